"""The application that test_blackbox.py drives over HTTP; FOLDER names the directory of its database and of its handlers' notes.

A route for each thing that an application does with tinyq; handlers note what they do, since it may be another process that is
asked about it.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException

import tinyq

FOLDER = Path(os.environ["FOLDER"])


def note(what: str, *words: object) -> None:
    with (FOLDER / "notes").open("a") as notes:  # lines this short are appended whole
        notes.write(" ".join(map(str, (what, os.getpid(), *words))) + "\n")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    app.state.prices = {"teapot": 20}  # what a service opens in its lifespan, and its jobs use
    async with tinyq.lifespan(app, db=FOLDER / "jobs.db", grace=0.2, lease=4, result_ttl=3600) as state:
        note("up")
        yield state
    app.state.prices = None
    note("down")


app = FastAPI(lifespan=lifespan)


# what runs behind the routes


@tinyq.task(durable=True)
async def fulfil(item: str, count: int) -> dict[str, int]:
    return {"price": app.state.prices[item] * count, "pid": os.getpid()}


@tinyq.task(durable=True, retry=[0.01, 0.01])
def charge(order: str) -> int:
    attempt = tinyq.current_job().attempt
    note(f"charge-{order}", attempt)
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
    while not (FOLDER / f"released-{order}").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)
    note(f"produce-{order}", "ended")
    return order


@tinyq.task
async def thank(order: str) -> None:
    note(f"thank-{order}")


@tinyq.every(timedelta(days=3650), immediate=True)
async def inventory() -> None:
    note("inventory")


# routes


def answer(job: tinyq.Job[Any]) -> dict[str, Any]:
    return {"id": job.id, "created": job.created, "status": job.status}


@app.get("/notes/{what}")
def notes(what: str) -> list[list[str]]:
    """What handlers have noted under this word, each as [process, word, …]."""
    file = FOLDER / "notes"
    lines = file.read_text().splitlines() if file.exists() else []
    return [words[1:] for words in map(str.split, lines) if words[0] == what]


@app.post("/orders")
async def order(item: str, count: int = 1) -> dict[str, Any]:
    return answer(await fulfil.enqueue(item, count))


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
