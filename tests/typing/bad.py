"""Wrong uses of every part of the typed surface. Each line that ends in `# error` is one, for each checker; no other line is.

It is checked and never run.
"""

import asyncio
import functools
import time
from datetime import UTC, datetime
from typing import Any

from clock import FakeClock
from fastapi import FastAPI
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

import tinyq

q = tinyq.TinyQ("jobs.db")
moment = datetime(2026, 1, 2, tzinfo=UTC)


@tinyq.task
async def send(order: str, copies: int = 1) -> int:
    return copies


@tinyq.task
def resize(path: str, *, width: int = 100) -> bytes:
    return path.encode() * width


@tinyq.task(queue="emails", timeout=30)
async def report(day: datetime, /, subject: str) -> list[str]:
    return [subject]


@tinyq.task(queue="images")
def crop(path: str) -> bytes:
    return path.encode()


@q.task
async def own(order: str) -> int:
    return len(order)


@q.task(queue="emails")
def own_plain(path: str) -> bytes:
    return path.encode()


@tinyq.every(60)
async def heartbeat() -> None:
    """It takes no argument, not even the job it runs in."""


@q.every(0.5)
def tick() -> int:
    return 7


async def look_up(order: str) -> float:
    return float(order)


def parse(text: str, base: int = 10) -> int:
    return int(text, base)


class Mailer:
    async def send(self, to: str, *, subject: str = "") -> bool:
        return bool(to)


class Fetch:
    async def __call__(self, url: str) -> bytes:
        return url.encode()


mailer = Mailer()
send_mail = tinyq.task(mailer.send)
fetch = q.task(name="fetch")(Fetch())
send_again = tinyq.task(name="again")(send)


async def a_task_is_enqueued_with_wrong_arguments() -> None:
    await send.enqueue(7)  # error
    await send.enqueue("7", "2")  # error
    await send.enqueue()  # error
    await send.enqueue("7", 2, 3)  # error
    await send.enqueue("7", copy=2)  # error
    await send.enqueue(ordre="7")  # error
    await send.enqueue("7", order="7")  # error
    await send.enqueue("7", durable=True)  # error
    await send.enqueue(tinyq.current_job(), "7")  # error
    await send.enqueue(None)  # error
    await resize.enqueue(b"a.png")  # error
    await resize.enqueue("a.png", 50)  # error
    await resize.enqueue("a.png", width="50")  # error
    await resize.enqueue()  # error
    await report.enqueue("today", "hello")  # error
    await report.enqueue(moment)  # error
    await report.enqueue(day=moment, subject="hello")  # error
    await crop.enqueue(7)  # error
    await own.enqueue(7)  # error
    await own.enqueue()  # error
    await own_plain.enqueue(path=7)  # error
    await heartbeat.enqueue(7)  # error
    await tick.enqueue(now=7)  # error
    await send_mail.enqueue(7)  # error
    await send_mail.enqueue(mailer, "a@b.c")  # error
    await send_mail.enqueue("a@b.c", subjekt="hello")  # error
    await fetch.enqueue()  # error
    await send_again.enqueue(7)  # error
    send.enqueue("7")  # error


async def a_task_with_options_is_enqueued_with_wrong_arguments() -> None:
    await send.options(delay=5).enqueue(7)  # error
    await send.options(delay=5).enqueue()  # error
    await send.options(delay=5).enqueue("7", 2, 3)  # error
    await send.options(delay=5).enqueue("7", copy=2)  # error
    await send.options(delay=5).enqueue("7", durable=True)  # error
    await resize.options(durable=True).enqueue("a.png", 50)  # error
    await report.options(key="7").enqueue(moment, sub="hello")  # error
    await own.options(key="7").enqueue(7)  # error
    await heartbeat.options(delay=5).enqueue(7)  # error
    await fetch.options(delay=5).enqueue(7)  # error
    await send.options(delay=5)  # error
    await send.options(delay=5)("7")  # error


async def a_function_is_enqueued_with_wrong_arguments() -> None:
    await tinyq.enqueue(send, 7)  # error
    await tinyq.enqueue(send)  # error
    await tinyq.enqueue(send, "7", 2, 3)  # error
    await tinyq.enqueue(send, "7", copy=2)  # error
    await tinyq.enqueue(resize, 7)  # error
    await tinyq.enqueue(resize, "a.png", width="50")  # error
    await tinyq.enqueue(look_up, 7)  # error
    await tinyq.enqueue(parse, "ff", "16")  # error
    await tinyq.enqueue(parse, "ff", bse=16)  # error
    await tinyq.enqueue(mailer.send, 7)  # error
    await tinyq.enqueue(mailer.send)  # error
    await tinyq.enqueue(Mailer.send, "a@b.c")  # error
    await tinyq.enqueue(Fetch(), 7)  # error
    await tinyq.enqueue(heartbeat, 7)  # error
    await q.enqueue(own, 7)  # error
    await q.enqueue(own)  # error
    await q.enqueue(own, "7", copies=2)  # error
    await q.enqueue(look_up, 7)  # error


async def a_function_is_enqueued_with_wrong_arguments_and_options() -> None:
    await tinyq.enqueue(send, 7, durable=True)  # error
    await tinyq.enqueue(send, durable=True)  # error
    await tinyq.enqueue(send, "7", 2, 3, durable=True)  # error
    await tinyq.enqueue(resize, 7, queue="images")  # error
    await tinyq.enqueue(look_up, 7, delay=5)  # error
    await tinyq.enqueue(parse, "ff", "16", delay=5)  # error
    await tinyq.enqueue(mailer.send, 7, delay=5)  # error
    await tinyq.enqueue(heartbeat, 7, delay=5)  # error
    await q.enqueue(own, 7, key="7")  # error
    await q.enqueue(own, key="7")  # error


async def a_function_is_enqueued_with_wrong_options() -> None:
    await tinyq.enqueue(send, "7", durabel=True)  # error
    await tinyq.enqueue(send, "7", durable="yes")  # error
    await tinyq.enqueue(send, "7", queue=7)  # error
    await tinyq.enqueue(send, "7", priority="high")  # error
    await tinyq.enqueue(send, "7", delay="5")  # error
    await tinyq.enqueue(send, "7", run_at=5)  # error
    await tinyq.enqueue(send, "7", expires="soon")  # error
    await tinyq.enqueue(send, "7", key=7)  # error
    await tinyq.enqueue(send, "7", on_conflict="ignore")  # error
    await tinyq.enqueue(send, "7", retry=3)  # error
    await tinyq.enqueue(send, "7", timeout="5")  # error
    await tinyq.enqueue(send, "7", result_ttl="1d")  # error
    await tinyq.enqueue(send, "7", failure_ttl=moment)  # error
    await tinyq.enqueue(send, "7", tx="jobs.db")  # error
    await tinyq.enqueue(send, "7", tx=True)  # error
    send.options(tx=q)  # error
    await tinyq.enqueue(send, "7", name="other")  # error
    await q.enqueue(own, "7", durabel=True)  # error
    await q.enqueue(own, "7", delay="5")  # error
    await tinyq.enqueue(send, "7", copies=2, durable=True)  # error


def a_thread_enqueues_with_wrong_arguments_and_options(engine: Engine, factory: sessionmaker[Session]) -> None:
    tinyq.enqueue_sync(send, 7)  # error
    tinyq.enqueue_sync(send, "7", 2, 3, durable=True)  # error
    tinyq.enqueue_sync(send, "7", durabel=True)  # error
    tinyq.enqueue_sync(send, "7", delay="5")  # error
    tinyq.enqueue_sync(send, "7", tx=engine)  # error
    tinyq.enqueue_sync(send, "7", tx=factory)  # error
    q.enqueue_sync(7)  # error
    send.enqueue_sync(7)  # error
    send.enqueue_sync("7", durable=True)  # error
    resize.options(durable=True).enqueue_sync("a.png", 3)  # error


async def what_is_enqueued_cannot_be_called() -> None:
    await tinyq.enqueue(7)  # error
    await tinyq.enqueue(None, "7")  # error
    await tinyq.enqueue(look_up("7"))  # error
    await tinyq.enqueue()  # error
    await tinyq.enqueue(send.options(delay=5), "7")  # error
    await q.enqueue(b"mail.report", 7)  # error
    await tinyq.enqueue_many([send, resize])  # error
    await tinyq.enqueue_many(send)  # error
    await tinyq.enqueue_many([(send, ("7",))], durabel=True)  # error
    await tinyq.enqueue_many([(send, ("7",))], delay="5")  # error
    await q.enqueue_many([(own, ("7",))], retry=3)  # error
    tinyq.enqueue(send, "7")  # error
    tinyq.enqueue_many([(send, ("7",))])  # error


async def results_are_taken_for_something_else() -> None:
    _text: str = await (await send.enqueue("7")).result()  # error
    _text = await (await send.options(delay=5).enqueue("7")).result()  # error
    _text = await (await tinyq.enqueue(send, "7")).result()  # error
    _text = await (await tinyq.enqueue(send, "7", delay=5)).result()  # error
    _text = await (await resize.enqueue("a.png")).result()  # error
    _text = await (await q.enqueue(own, "7")).result()  # error
    _text = await (await own_plain.enqueue("a.png")).result()  # error
    _text = await (await heartbeat.enqueue()).result()  # error
    _text = await (await tick.enqueue()).result()  # error
    _text = await (await tinyq.enqueue(look_up, "7")).result()  # error
    _text = await (await send_mail.enqueue("a@b.c")).result()  # error
    await (await (await send.enqueue("7")).result())  # error
    await (await tinyq.enqueue(look_up, "7", delay=5)).result().upper()  # error
    _job: tinyq.Job[str] = await send.enqueue("7")  # error
    await tinyq.enqueue(look_up, "7").result()  # error


async def a_job_is_used_wrongly(job: tinyq.Job[int]) -> None:
    job.id = "7"  # error
    job.status = tinyq.State.DONE  # error
    await job.result("5")  # error
    await job.result(timout=5)  # error
    await job.cancel("reason")  # error
    job.result()  # error
    job.finished  # error  # noqa: B018
    tinyq.current_job().attempt = 1  # error
    tinyq.current_job().is_cancelled()  # error
    await job  # error


async def a_task_is_called_wrongly() -> None:
    await send(7)  # error
    await send()  # error
    await send("7", 2, 3)  # error
    await send("7", copy=2)  # error
    resize(7)  # error
    resize("a.png", 50)  # error
    await resize("a.png")  # error
    await own(7)  # error
    own_plain()  # error
    await heartbeat(7)  # error
    tick(7)  # error
    await send_mail(7)  # error
    await fetch(7)  # error
    send("7").upper()  # error
    send("7")  # error
    send.name = "other"  # error
    _text: str = resize("a.png")  # error
    _text = await send("7")  # error
    asyncio.create_task(resize("a.png"))  # error  # noqa: RUF006


tinyq.task(7)  # error
tinyq.task("send")  # error
tinyq.task(look_up, name="look_up")  # error
tinyq.task(durabel=True)(look_up)  # error
tinyq.task(timeout="soon")(look_up)  # error
tinyq.task(name=7)(look_up)  # error
tinyq.task(replace="yes")(look_up)  # error
tinyq.task(promote="always")(look_up)  # error
tinyq.task(run_in="thread")(look_up)  # error
tinyq.task(queue="a", retry=3)(look_up)  # error
tinyq.task(queue="a")(7)  # error
tinyq.task(queue="a")()  # error
q.task(durabel=True)  # error
q.task(delay="5")  # error
q.task(on_conflict="ignore")  # error
send.options(durabel=True)  # error
send.options(durable="yes")  # error
send.options(run_at="tomorrow")  # error
send.options(5)  # error
send.options(name="other")  # error
own.options(quue="emails")  # error
_options: tinyq.Options = {"durabel": True}  # error
_wrong: tinyq.Options = {"delay": "5"}  # error


tinyq.every()(look_up)  # error
tinyq.every("60")  # error
tinyq.every(60, look_up)  # error
tinyq.every(look_up)  # error
tinyq.every(60, offset="5")  # error
tinyq.every(60, immediate="yes")  # error
tinyq.every(60, immediat=True)  # error
tinyq.every(60, overlap="wait")  # error
tinyq.every(60, misfire="never")  # error
tinyq.cron("0 * * * *", zone="UTC")  # error
tinyq.every(60, per_process=1.5)  # error
tinyq.every(60, queue=7)  # error
tinyq.every(60, durabel=True)  # error
tinyq.every(60)(7)  # error
q.every("60")  # error
q.every(60, retry=3)  # error
q.every(60)(None)  # error


async def spawn_is_given_no_coroutine() -> None:
    tinyq.spawn(look_up)  # error
    tinyq.spawn(look_up, "7")  # error
    tinyq.spawn(parse("ff"))  # error
    tinyq.spawn(look_up(7))  # error
    tinyq.spawn(look_up("7"), nam="look up")  # error
    q.spawn(asyncio.get_running_loop().create_future())  # error
    _number: int = await tinyq.spawn(look_up("7"))  # error
    _task: asyncio.Task[int] = q.spawn(look_up("7"))  # error


tinyq.Retry(max_attempts="5")  # error
tinyq.Retry(attempts=5)  # error
tinyq.Retry(base="5")  # error
tinyq.Retry(cap=moment)  # error
tinyq.Retry(factor="2")  # error
tinyq.Retry(jitter="some")  # error
tinyq.Retry(retry_on="OSError")  # error
tinyq.Retry(retry_on=OSError())  # error
tinyq.Retry(retry_on=[OSError])  # error
tinyq.Retry(retry_on=int)  # error
tinyq.Retry(give_up_on=(OSError, "ValueError"))  # error
tinyq.Retry(delays=30)  # error
tinyq.Retry(delays=["30"])  # error
tinyq.Retry().max_attempts = 3  # error
tinyq.task(retry=3)  # error
tinyq.task(retry=True)  # error
tinyq.task(retry="never")  # error
tinyq.task(retry=["30"])  # error
tinyq.task(retry=tinyq.Retry)  # error
tinyq.Snooze()  # error
tinyq.Snooze("5")  # error
tinyq.RetryAfter(moment)  # error
tinyq.Cancel(7)  # error


async def an_instance_is_used_wrongly() -> None:
    async with tinyq.TinyQ(concurency=5):  # error
        pass
    with tinyq.TinyQ():  # error
        pass
    async with tinyq.TinyQ() as _other:
        await _other.enqeue(look_up, "7")  # error
        await _other.stop("now")  # error
        await _other.get(7)  # error
        await _other.requeue(7)  # error
        await _other.drain(5)  # error
        _other.drain()  # error
    async with tinyq.lifespan(db=7):  # error
        pass
    async with tinyq.lifespan(None, concurency=5):  # error
        pass
    async with tinyq.lifespan(grace="10") as _state:  # error
        pass
    await tinyq.stop("now")  # error
    await tinyq.get(7)  # error
    await tinyq.requeue(7)  # error
    await tinyq.requeue(task=7)  # error
    await tinyq.purge(all="yes")  # error
    await tinyq.pause(7)  # error
    await tinyq.resume()  # error
    await tinyq.dead(limit="5")  # error
    tinyq.stop()  # error
    tinyq.run("jobs.db")  # error
    (await tinyq.stats()).count(queue=7)  # error
    (await tinyq.stats()).count(stat="dead")  # error


tinyq.TinyQ(7)  # error
tinyq.TinyQ("jobs.db", 20)  # error
tinyq.TinyQ(concurrency="20")  # error
tinyq.TinyQ(concurrency=None)  # error
tinyq.TinyQ(queues=["emails"])  # error
tinyq.TinyQ(queues={"emails": "5"})  # error
tinyq.TinyQ(threads="4")  # error
tinyq.TinyQ(max_pending=1.5)  # error
tinyq.TinyQ(grace="10")  # error
tinyq.TinyQ(lease=moment)  # error
tinyq.TinyQ(synchronous="off")  # error
tinyq.TinyQ(promote="always")  # error
tinyq.TinyQ(worker="no")  # error
tinyq.TinyQ(namespace=None)  # error
tinyq.TinyQ(retry=5)  # error
tinyq.TinyQ(durable=True)  # error
tinyq.configure(concurency=5)  # error
tinyq.configure(concurrency="5")  # error
tinyq.configure(7)  # error
tinyq.configure(on_dead=7)  # error
tinyq.on_dead(7)  # error
tinyq.task(on_lost="ignore")  # error
tinyq.task(max_running="3")  # error
tinyq.task(max_running_total=2.5)  # error
tinyq.task(rate=100)  # error
tinyq.task(rate=tinyq.Rate("100"))  # error
tinyq.task(max_running=1, limit_by=7)  # error
tinyq.Rate()  # error
tinyq.Rate(100, every=60)  # error
tinyq.Rate(100, per="1 min")  # error
tinyq.Rate(100).limit = 5  # error
tinyq.every(10, max_running="1")  # error
tinyq.TinyQ(max_running=1)  # error
send.options(max_running=1)  # error


class Unsteady:
    def time(self) -> int:
        return 0

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        await wake.wait()


class Impatient(FakeClock):
    def wait(self, wake: asyncio.Event) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


tinyq.TinyQ(clock=time.time)  # error
tinyq.TinyQ(clock=time)  # error
tinyq.TinyQ(clock=FakeClock)  # error
tinyq.TinyQ(clock=Unsteady())  # error
tinyq.TinyQ(clock=Impatient())  # error
tinyq.configure(clock=Unsteady())  # error
_clock: tinyq.Clock = Unsteady()  # error


FastAPI(lifespan=tinyq.lifespan())  # error
FastAPI(lifespan=q)  # error
FastAPI(lifespan=q.lifespan())  # error
FastAPI(lifespan=tinyq.start)  # error


def parts_are_kept_apart(by_name: Any, other: functools.partial[int]) -> None:
    _one: tinyq.Task[[int], object, object] = resize  # error
    _two: tinyq.Task[..., object, str] = send  # error
    _three: tinyq.Job[int] = send  # error
    _four: tinyq.Task[..., object, object] = other  # error


def tests_are_checked_too() -> None:
    with tinyq.testing(at="noon") as jobs:  # error
        jobs.drain(True)  # error
        jobs.advance("1 h")  # error
        jobs.enqueued(7)  # error


def no_middleware(job: tinyq.CurrentJob) -> None: ...


tinyq.middleware(no_middleware)  # error
q.on_enqueue(lambda: None)  # error
tinyq.task(headers={"number": 7})(look_up)  # error
tinyq.task(aliases=7)(look_up)  # error
tinyq.current_job().progress("half")  # error
tinyq.current_job().progress()  # error
