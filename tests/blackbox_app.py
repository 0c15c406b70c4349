"""The application that test_blackbox.py drives over HTTP; FOLDER names the directory of its database and of its handlers' notes.

A route for each thing that an application does with tinyq; handlers note what they do, since it may be another process that is
asked about it. The application's own tables are in the same file as the jobs.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import process_tasks
import sqlalchemy as sa
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.schema import CreateTable

import tinyq

FOLDER = Path(os.environ["FOLDER"])
DB = FOLDER / "jobs.db"
request_id: ContextVar[str] = ContextVar("request_id", default="none")


class Base(DeclarativeBase):
    pass


class Purchase(Base):
    __tablename__ = "purchases"
    id: Mapped[str] = mapped_column(primary_key=True)
    mailed_by: Mapped[str | None]


class Line(BaseModel):
    item: str
    price: Decimal


class Invoice(BaseModel):
    id: UUID
    due: datetime
    lines: list[Line]


class Bill(BaseModel):
    invoice: UUID
    amount: Decimal
    due: datetime


def note(what: str, *words: object) -> None:
    with (FOLDER / "notes").open("a") as notes:  # lines this short are appended whole
        notes.write(" ".join(map(str, (what, os.getpid(), *words))) + "\n")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    app.state.prices = {"teapot": 20}  # what a service opens in its lifespan, and its jobs use
    engine = create_async_engine(f"sqlite+aiosqlite:///{DB}", connect_args={"timeout": 30})
    plain_engine = sa.create_engine(f"sqlite:///{DB}", connect_args={"timeout": 30})
    app.state.sessions, app.state.plain_engine = async_sessionmaker(engine), plain_engine
    async with engine.begin() as connection:  # all processes start at once
        await connection.execute(CreateTable(Base.metadata.tables["purchases"], if_not_exists=True))
    async with tinyq.lifespan(app, db=DB, grace=0.2, lease=4, result_ttl=3600) as state:
        note("up")
        yield state
    app.state.prices = app.state.sessions = app.state.plain_engine = None
    await engine.dispose()
    plain_engine.dispose()
    note("down")


app = FastAPI(lifespan=lifespan)


async def get_session() -> AsyncIterator[AsyncSession]:
    """For routes and for handlers."""
    async with app.state.sessions() as session:
        yield session
    if "of" in session.info:
        note(session.info["of"], "closed")


RouteSession = Annotated[AsyncSession, Depends(get_session)]


# around every job


@app.middleware("http")
async def take_request_id(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    request_id.set(request.headers.get("X-Request-ID", "none"))
    response = await call_next(request)
    response.headers["X-Process"] = str(os.getpid())
    return response


@tinyq.on_enqueue
def hand_request_id_on(headers: dict[str, str]) -> None:
    headers["request"] = request_id.get()


@tinyq.middleware
async def traced(job: tinyq.CurrentJob, call_next: Callable[[tinyq.CurrentJob], Awaitable[Any]]) -> Any:
    result = await call_next(job)
    note(f"traced-{job.id}", job.attempt, job.headers.get("request"))
    return result


# what runs behind the routes


@tinyq.task(durable=True, aliases=["shop.dispatch"])
async def fulfil(item: str, count: int) -> dict[str, Any]:
    job = tinyq.current_job()
    price = job.app.state.prices[item] * count
    return {"price": price, "pid": os.getpid(), "job": job.id, "request": job.headers.get("request")}


@tinyq.task(durable=True)
async def mail(purchase: str, session: AsyncSession = Depends(get_session)) -> None:  # noqa: B008 - to type checkers it may be left out
    session.info["of"] = f"mail-{purchase}"
    found = await session.get_one(Purchase, purchase)
    found.mailed_by = tinyq.current_job().id
    await session.commit()
    note(f"mail-{purchase}", "mailed")


@tinyq.task(durable=True)
async def wrap(purchase: str) -> None:
    job = tinyq.current_job()
    async with job.app.state.sessions.begin() as session:
        (await session.get_one(Purchase, purchase)).mailed_by = job.id


@tinyq.task(durable=True)
def bill(invoice: Invoice) -> Bill:
    amount = sum((line.price for line in invoice.lines), Decimal(0))
    return Bill(invoice=invoice.id, amount=amount, due=invoice.due + timedelta(days=14))


@tinyq.task(durable=True, retry=[0.01, 0.01])
def charge(order: str) -> int:
    attempt = tinyq.current_job().attempt
    note(f"charge-{order}", attempt, tinyq.current_job().id)
    if attempt < 3:
        raise ConnectionError("the bank does not answer")
    return attempt


@tinyq.task(durable=True)
async def remind(order: str) -> float:
    note(f"remind-{order}")
    return time.time()


@tinyq.task(durable=True)
async def produce(order: str) -> str:
    """As long as it is not told that it may end, or cancelled."""
    note(f"produce-{order}", "began")
    await tinyq.current_job().progress(0.4, "halfway")
    while not (FOLDER / f"released-{order}").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    note(f"produce-{order}", "ended")
    return order


@tinyq.task
async def thank(order: str) -> None:
    note(f"thank-{order}")


@tinyq.task(durable=True)
async def poll(partner: str) -> None:
    fire_time = tinyq.current_job().fire_time
    assert fire_time is not None
    note(f"poll-{partner}", fire_time.isoformat())


crash_unless = tinyq.task(durable=True, retry=False, run_in="process")(process_tasks.crash_unless)


@tinyq.every(timedelta(days=3650), immediate=True)
async def inventory() -> None:
    note("inventory")


# routes


def answer(job: tinyq.Job[Any]) -> dict[str, Any]:
    return {"id": job.id, "created": job.created, "status": job.status, "progress": job.progress, "error": job.error}


@app.get("/notes/{what}")
def notes(what: str) -> list[list[str]]:
    """What handlers have noted under this word, each as [process, word, …]."""
    file = FOLDER / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [words[1:] for words in map(str.split, lines) if words[0] == what]


@app.post("/orders")
async def order(item: str, count: int = 1) -> dict[str, Any]:
    return answer(await fulfil.enqueue(item, count))


@app.post("/purchases/{id}")
async def buy(id: str, session: RouteSession, fails: bool = False) -> dict[str, Any]:
    session.add(Purchase(id=id))
    job = await mail.options(tx=session).enqueue(id)
    if fails:
        raise HTTPException(402, job.id)
    await session.commit()
    return answer(job)


@app.post("/gifts/{id}")
def give(id: str, fails: bool = False) -> dict[str, Any]:
    """In a thread, with a session that knows nothing of the event loop."""
    with Session(app.state.plain_engine) as session, session.begin():
        session.add(Purchase(id=id))
        job = wrap.options(tx=session).enqueue_sync(id)
        if fails:
            raise HTTPException(402, job.id)
    return answer(job)


@app.get("/purchases/{id}")
async def purchase(id: str, session: RouteSession) -> str | None:
    found = await session.get(Purchase, id)
    if found is None:
        raise HTTPException(404, "no such purchase")
    return found.mailed_by


@app.post("/invoices")
async def send_invoice(invoice: Invoice) -> dict[str, Any]:
    return answer(await bill.enqueue(invoice))


@app.get("/bills/{id}")
async def show_bill(id: str) -> dict[str, Any]:
    found = await (await tinyq.get(id)).result(timeout=30)
    return {"type": type(found).__name__, "amount": type(found.amount).__name__, "bill": found}


@app.post("/receipts/{order}")
def receipt(order: str) -> dict[str, Any]:
    """Enqueues both kinds of job from a thread."""
    thank.enqueue_sync(order)
    return answer(remind.enqueue_sync(order))


@app.post("/crashes/{order}")
async def start_crashing(order: str) -> dict[str, Any]:
    return answer(await crash_unless.enqueue(str(FOLDER / f"released-{order}")))


@app.get("/dead")
async def dead() -> dict[str, str | None]:
    return {job.id: job.error for job in await tinyq.dead()}


@app.post("/dead/{id}/requeue")
async def requeue(id: str) -> int:
    return await tinyq.requeue(id)


@app.post("/polls/{partner}")
async def start_polling(partner: str) -> bool:
    return (await tinyq.schedule(poll, partner, when=tinyq.Every(0.1), key=partner)).created


@app.get("/polls/{partner}")
async def polls(partner: str) -> list[str]:
    return [repr(found.rule) for found in await tinyq.schedules(poll, key=partner)]


@app.delete("/polls/{partner}")
async def stop_polling(partner: str) -> bool:
    return await tinyq.unschedule(poll, key=partner)


@app.post("/charges/{order}")
async def charge_order(order: str) -> dict[str, Any]:
    return answer(await charge.enqueue(order))


@app.post("/reminders/{order}")
async def remind_of(order: str, delay: float) -> dict[str, Any]:
    return answer(await remind.options(delay=delay, key=order).enqueue(order))


@app.post("/products/{order}")
async def start_production(order: str) -> dict[str, Any]:
    return answer(await produce.enqueue(order))


@app.post("/products/{order}/release")
def release(order: str) -> None:
    (FOLDER / f"released-{order}").touch()


@app.post("/thanks/{order}")
async def thank_for(order: str) -> None:
    await thank.enqueue(order)


@app.get("/jobs/{id}")
async def status(id: str) -> dict[str, Any]:
    try:
        return answer(await tinyq.get(id))
    except tinyq.JobNotFound as error:
        raise HTTPException(404, str(error)) from None


@app.get("/jobs/{id}/result")
async def result(id: str) -> Any:
    return await (await tinyq.get(id)).result(timeout=30)


@app.delete("/jobs/{id}")
async def cancel(id: str) -> bool:
    return await (await tinyq.get(id)).cancel()
