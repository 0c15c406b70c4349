"""Right uses of every part of the typed surface: type checkers accept all of it. It is checked and never run."""
# pyright: strict

import asyncio
import functools
import math
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Never, Unpack, assert_type

import aiosqlite
from clock import FakeClock
from fastapi import BackgroundTasks, Depends, FastAPI
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from starlette.applications import Starlette

import tinyq

q = tinyq.TinyQ("jobs.db")
tomorrow = datetime(2026, 1, 2, tzinfo=UTC)


# Tasks of every kind, on the default instance and on one's own


@tinyq.task
async def send(order: str, copies: int = 1) -> int:
    """It knows its own job without taking it as an argument."""
    assert_type(tinyq.current_job(), tinyq.CurrentJob)
    return copies


@tinyq.task
def resize(path: str, *, width: int = 100) -> bytes:
    return path.encode() * width


@tinyq.task(
    name="mail.report",
    aliases=["mail.old_report"],
    queue="emails",
    timeout=30,
    retry=[30, 120, 600],
    promote="interrupted",
    replace=True,
)
async def report(day: datetime, *recipients: str, **headers: str) -> list[str]:
    return [*recipients, *headers]


@tinyq.task(durable=True, priority=10, expires=timedelta(hours=1), result_ttl=60, failure_ttl=math.inf)
def total(numbers: list[int], /) -> float:
    return sum(numbers)


@tinyq.task(max_running=3, max_running_total=5, rate=tinyq.Rate(100, per=timedelta(minutes=1), burst=10), limit_by="account")
async def bill(account: int) -> str:
    return str(account)


@tinyq.every(10, max_running=1, rate=tinyq.Rate(1), overlap="allow")
async def check() -> None: ...


@tinyq.task()
async def ping() -> None: ...


@q.task
async def own(order: str, copies: int = 1) -> int:
    return copies


@q.task
def own_plain(path: str) -> bytes:
    return path.encode()


@q.task(queue="emails", promote=False, run_in="process")
async def own_with_options(order: str) -> tuple[str, int]:
    return order, 1


@q.task(queue="emails")
def own_plain_with_options(path: str) -> bytes:
    return path.encode()


# A task enqueues itself with the signature of its function, and its job's result is what the function returns


async def tasks_enqueue_themselves() -> None:
    assert_type(await send.enqueue("7"), tinyq.Job[int])
    assert_type(await send.enqueue("7", 2), tinyq.Job[int])
    assert_type(await send.enqueue(order="7", copies=2), tinyq.Job[int])
    assert_type(await resize.enqueue("a.png", width=50), tinyq.Job[bytes])
    assert_type(await report.enqueue(tomorrow, "a@b.c", "d@e.f", subject="hello"), tinyq.Job[list[str]])
    assert_type(await total.enqueue([1, 2]), tinyq.Job[float])
    assert_type(await ping.enqueue(), tinyq.Job[None])
    assert_type(await own.enqueue("7", copies=2), tinyq.Job[int])
    assert_type(await own_plain.enqueue("a.png"), tinyq.Job[bytes])
    assert_type(await own_with_options.enqueue("7"), tinyq.Job[tuple[str, int]])
    assert_type(await own_plain_with_options.enqueue("a.png"), tinyq.Job[bytes])


async def results_are_what_the_function_returns() -> None:
    assert_type(await (await send.enqueue("7")).result(), int)
    assert_type(await (await resize.enqueue("a.png")).result(), bytes)
    assert_type(await (await report.enqueue(tomorrow)).result(timeout=5), list[str])
    assert_type(await (await total.enqueue([1])).result(timedelta(seconds=5)), float)
    assert_type(await (await own.enqueue("7")).result(), int)
    assert_type(await (await own_plain.enqueue("a.png")).result(), bytes)


async def tasks_with_options_keep_the_signature() -> None:
    assert_type(await send.options(delay=1.5).enqueue("7", copies=2), tinyq.Job[int])
    assert_type(await (await resize.options(durable=True, key="a").enqueue("a.png", width=9)).result(), bytes)
    assert_type(await own.options(run_at=tomorrow, on_conflict="replace", key="7").enqueue("7"), tinyq.Job[int])
    assert_type(await own_plain_with_options.options(queue="images").enqueue(path="a.png"), tinyq.Job[bytes])


async def every_option_is_accepted_on_every_level(**options: Unpack[tinyq.Options]) -> None:
    chosen: tinyq.Options = {
        "durable": True,
        "queue": "emails",
        "priority": -1,
        "delay": timedelta(seconds=5),
        "run_at": tomorrow,
        "expires": tomorrow,
        "key": "7",
        "on_conflict": "queue",
        "retry": tinyq.Retry(max_attempts=3),
        "timeout": math.inf,
        "result_ttl": 0,
        "failure_ttl": timedelta(days=1),
    }
    unset: tinyq.Options = {
        "durable": None,
        "queue": None,
        "priority": None,
        "delay": None,
        "run_at": None,
        "expires": None,
        "key": None,
        "on_conflict": None,
        "retry": None,
        "timeout": None,
        "result_ttl": None,
        "failure_ttl": None,
    }
    await send.options(**chosen).enqueue("7")
    await send.options(**unset).enqueue("7")
    await send.options(**options).enqueue("7")
    await tinyq.enqueue(send, "7", **chosen)
    await q.enqueue(own, "7", **chosen)
    await tinyq.enqueue_many([(send, ("7",))], **chosen)
    tinyq.task(**chosen)(parse)
    tinyq.every(60, **options)(heartbeat)


# Enqueuing through the function


async def enqueue_takes_the_arguments_of_the_function() -> None:
    assert_type(await tinyq.enqueue(send, "7"), tinyq.Job[int])
    assert_type(await tinyq.enqueue(send, "7", 2), tinyq.Job[int])
    assert_type(await tinyq.enqueue(send, "7", copies=2), tinyq.Job[int])
    assert_type(await tinyq.enqueue(resize, path="a.png", width=9), tinyq.Job[bytes])
    assert_type(await tinyq.enqueue(report, tomorrow, "a@b.c", subject="hello"), tinyq.Job[list[str]])
    assert_type(await tinyq.enqueue(ping), tinyq.Job[None])
    assert_type(await q.enqueue(own, "7", copies=2), tinyq.Job[int])
    assert_type(await (await q.enqueue(own_plain, "a.png")).result(), bytes)
    assert_type(await (await tinyq.enqueue(send, "7")).result(), int)


async def enqueue_takes_positional_arguments_together_with_options() -> None:
    assert_type(await tinyq.enqueue(send, "7", durable=True), tinyq.Job[int])
    assert_type(await tinyq.enqueue(send, "7", 2, delay=5, key="7", priority=1), tinyq.Job[int])
    assert_type(await tinyq.enqueue(resize, "a.png", queue="images"), tinyq.Job[bytes])
    assert_type(await tinyq.enqueue(ping, retry=False), tinyq.Job[None])
    assert_type(await (await q.enqueue(own, "7", run_at=tomorrow)).result(), int)
    assert_type(await (await q.enqueue(own_plain, "a.png", timeout=5)).result(), bytes)


async def enqueue_by_name_takes_anything_and_its_result_is_anything() -> None:
    job: tinyq.Job[str] = await tinyq.enqueue("mail.report", 7, subject="hello", durable=True)
    assert_type(await tinyq.enqueue("mail.report"), tinyq.Job[Any])
    assert_type(await (await q.enqueue("mail.report", 7, queue="emails")).result(), Any)
    assert_type(job, tinyq.Job[str])


async def enqueue_many_takes_tasks_names_and_callables() -> None:
    jobs = await tinyq.enqueue_many([(send, ("7", 2)), (resize, ["a.png"], {"width": 9}), ("mail.report", (tomorrow,))])
    assert_type(jobs, list[tinyq.Job[Any]])
    await q.enqueue_many(((own, (order,)) for order in "789"), durable=True, queue="emails")
    await q.enqueue_many([])


async def in_ones_own_transaction(plain: sqlite3.Connection, through_a_thread: aiosqlite.Connection) -> None:
    assert_type(await tinyq.enqueue(send, "7", tx=plain), tinyq.Job[int])
    assert_type(await send.options(tx=through_a_thread).enqueue("7", copies=2), tinyq.Job[int])
    assert_type(await q.enqueue("by.name", 7, tx=through_a_thread), tinyq.Job[Any])
    await q.enqueue_many([(own, ("7",))], tx=plain)
    await q.enqueue_many([(own, ("7",))], tx=None)


async def in_the_transaction_of_sqlalchemy(
    session: AsyncSession, connection: AsyncConnection, scoped: async_scoped_session[AsyncSession]
) -> None:
    assert_type(await tinyq.enqueue(send, "7", tx=session), tinyq.Job[int])
    assert_type(await send.options(tx=connection).enqueue("7", copies=2), tinyq.Job[int])
    await q.enqueue_many([(own, ("7",))], tx=scoped)


def from_a_thread(session: Session, connection: Connection, scoped: scoped_session[Session], plain: sqlite3.Connection) -> None:
    assert_type(tinyq.enqueue_sync(send, "7", copies=2), tinyq.Job[int])
    assert_type(tinyq.enqueue_sync(resize, "a.png", width=3), tinyq.Job[bytes])
    assert_type(tinyq.enqueue_sync(send, "7", durable=True, delay=5), tinyq.Job[int])
    assert_type(q.enqueue_sync("mail.report", 7, subject="hello", durable=True), tinyq.Job[Any])
    assert_type(send.enqueue_sync("7", copies=2), tinyq.Job[int])
    assert_type(resize.options(durable=True).enqueue_sync("a.png", width=3), tinyq.Job[bytes])
    q.enqueue_sync(own, "7", tx=session)
    q.enqueue_sync(own, "7", tx=connection)
    q.enqueue_sync(own, "7", tx=scoped)
    q.enqueue_sync(own, "7", tx=plain)


# What is no task: best-effort jobs of any callable


async def look_up(order: str) -> float:
    return float(order)


def parse(text: str, base: int = 10) -> int:
    return int(text, base)


class Mailer:
    async def send(self, to: str, *, subject: str = "") -> bool:
        return bool(to)

    def render(self, to: str) -> bytes:
        return to.encode()

    @classmethod
    async def connect(cls, host: str) -> "Mailer":
        return cls()

    @staticmethod
    def quote(text: str) -> str:
        return text


class Fetch:
    async def __call__(self, url: str) -> bytes:
        return url.encode()


class Count:
    def __call__(self, text: str) -> int:
        return len(text)


mailer = Mailer()


async def enqueue_takes_any_callable() -> None:
    assert_type(await tinyq.enqueue(look_up, "7"), tinyq.Job[float])
    assert_type(await tinyq.enqueue(look_up, "7", delay=5), tinyq.Job[float])
    assert_type(await tinyq.enqueue(parse, "ff", base=16), tinyq.Job[int])
    assert_type(await tinyq.enqueue(parse, "ff", 16, queue="slow"), tinyq.Job[int])
    assert_type(await tinyq.enqueue(asyncio.sleep, 1), tinyq.Job[None])
    assert_type(await tinyq.enqueue(print, "hello", "world"), tinyq.Job[None])
    assert_type(await tinyq.enqueue(lambda: 7), tinyq.Job[int])
    assert_type(await tinyq.enqueue(mailer.send, "a@b.c", subject="hello"), tinyq.Job[bool])
    assert_type(await tinyq.enqueue(mailer.send, "a@b.c", priority=1), tinyq.Job[bool])
    assert_type(await tinyq.enqueue(mailer.render, "a@b.c"), tinyq.Job[bytes])
    assert_type(await tinyq.enqueue(Mailer.connect, "localhost"), tinyq.Job[Mailer])
    assert_type(await tinyq.enqueue(Mailer.quote, "a"), tinyq.Job[str])
    assert_type(await tinyq.enqueue(Fetch(), "http://a"), tinyq.Job[bytes])
    assert_type(await tinyq.enqueue(Fetch(), "http://a", timeout=3), tinyq.Job[bytes])
    assert_type(await tinyq.enqueue(Count(), "abc"), tinyq.Job[int])
    assert_type(await tinyq.enqueue(functools.partial(parse, base=16), "ff"), tinyq.Job[int])
    number: float = await (await tinyq.enqueue(functools.partial(look_up, "7"))).result()  # to pyright it is Any
    assert_type(number, float)
    assert_type(await tinyq.enqueue(functools.partial(look_up, "7"), delay=5), tinyq.Job[float])
    assert_type(await q.enqueue(look_up, "7", delay=5), tinyq.Job[float])


# Tasks of what is not a function


send_mail = tinyq.task(mailer.send)
render_mail = tinyq.task(name="render", queue="emails")(mailer.render)
fetch = tinyq.task(name="fetch")(Fetch())
count = q.task(Count())
parse_hex = tinyq.task(functools.partial(parse, base=16))
look_up_7 = q.task(name="look_up_7")(functools.partial(look_up, "7"))
send_again = tinyq.task(name="send_again")(send)


async def tasks_of_methods_partials_and_callable_objects() -> None:
    assert_type(await (await send_mail.enqueue("a@b.c", subject="hello")).result(), bool)
    assert_type(await (await render_mail.enqueue("a@b.c")).result(), bytes)
    assert_type(await (await fetch.options(durable=True).enqueue("http://a")).result(), bytes)
    assert_type(await (await count.enqueue("abc")).result(), int)
    assert_type(await (await parse_hex.enqueue("ff")).result(), int)
    assert_type(await (await look_up_7.enqueue()).result(), float)
    assert_type(await (await send_again.enqueue("7", copies=2)).result(), int)
    assert_type(await send_mail("a@b.c"), bool)
    assert_type(render_mail("a@b.c"), bytes)
    assert_type(await fetch("http://a"), bytes)
    assert_type(count("abc"), int)


# A task is called as before


async def direct_calls_are_those_of_the_function() -> None:
    assert_type(await send("7"), int)
    assert_type(await send("7", copies=2), int)
    assert_type(await ping(), None)
    assert_type(resize("a.png", width=9), bytes)
    assert_type(total([1, 2]), float)
    assert_type(await own("7"), int)
    assert_type(own_plain("a.png"), bytes)
    assert_type(await own_with_options("7"), tuple[str, int])
    assert_type((send("7"), own("7")), tuple[Coroutine[object, Never, int], Coroutine[object, Never, int]])
    assert_type(await send.fn("7"), int)
    assert_type(resize.fn("a.png"), bytes)


async def direct_calls_can_go_wherever_a_coroutine_can() -> None:
    assert_type(asyncio.create_task(send("7")), asyncio.Task[int])
    assert_type(await asyncio.gather(send("7"), own("8")), tuple[int, int])
    assert_type(await asyncio.wait_for(send("7"), 1), int)
    assert_type(tinyq.spawn(send("7")), asyncio.Task[int])
    async with asyncio.TaskGroup() as group:
        assert_type(group.create_task(send("7")), asyncio.Task[int])


async def call(function: Callable[[str], Awaitable[int]], convert: Callable[[str], bytes]) -> None:
    assert_type(await function("7"), int)
    assert_type(convert("7"), bytes)


async def a_task_can_go_wherever_its_function_can(background: BackgroundTasks) -> None:
    await call(send, resize)
    await call(own, own_plain)
    background.add_task(send, "7", copies=2)
    background.add_task(resize, "a.png")
    app.get("/pictures")(resize)
    assert_type(list(map(resize, ["a.png"])), list[bytes])


def tasks_can_be_told_by_type(any_task: tinyq.Task[..., object, object]) -> tinyq.Task[[str], object, object]:
    assert_type(any_task.name, str)
    tasks: list[tinyq.Task[..., object, object]] = [send, resize, report, total, ping, heartbeat]
    tasks.append(any_task)
    return own_with_options


# Schedules


@tinyq.every(60)
async def heartbeat() -> None:
    await heartbeat.enqueue()


@tinyq.every(
    timedelta(hours=1), offset=300, immediate=True, overlap="skip", per_process=True, name="hourly", promote=False, timeout=5,
    run_in=None,
    queue="upkeep", retry=tinyq.Retry(max_attempts=2), priority=-5, delay=1, expires=timedelta(minutes=10), failure_ttl=60,
)  # fmt: skip
def vacuum() -> int:
    return 7


@q.every(0.5, offset=timedelta(seconds=0.1))
async def own_tick() -> str:
    return "tick"


async def collect(limit: int = 10) -> int:
    return limit


collect_often = tinyq.every(60)(collect)
collect_plain = q.every(60, name="plain", retry=[1, 2])(functools.partial(parse, "ff"))
ping_hourly = tinyq.every(3600)(ping)
collect_five = tinyq.every(60, name="five")(functools.partial(collect, 5))


async def schedules_are_tasks() -> None:
    assert_type(await (await heartbeat.enqueue()).result(), None)
    assert_type(await (await vacuum.options(key="once").enqueue()).result(), int)
    assert_type(await (await own_tick.enqueue()).result(), str)
    assert_type(await (await collect_often.enqueue(limit=5)).result(), int)
    assert_type(await (await collect_plain.enqueue()).result(), int)
    assert_type(await (await tinyq.enqueue(collect_often, 5, delay=1)).result(), int)
    assert_type(await heartbeat(), None)
    assert_type(vacuum(), int)
    assert_type(await own_tick(), str)
    assert_type(await collect_often(limit=5), int)
    assert_type(await collect_five(), int)
    assert_type(await ping_hourly(), None)


# The job


async def a_job_says_what_it_is(job: tinyq.Job[int]) -> None:
    assert_type(job.id, str)
    assert_type(job.created, bool)
    assert_type(job.status, tinyq.State)
    assert_type(job.task, str)
    assert_type(job.attempts, int)
    assert_type(job.error, str | None)
    assert_type(await job.cancel(), bool)
    assert_type(await job.promote(), bool)
    assert_type(job.status == "done", bool)
    assert_type(job.status in (tinyq.State.DONE, tinyq.State.DEAD), bool)


async def a_job_with_a_narrower_result_will_do(job: tinyq.Job[float | str], any_job: tinyq.Job[object]) -> None:
    assert_type(await job.result(), float | str)
    assert_type(await any_job.result(), object)
    await a_job_with_a_narrower_result_will_do(await send.enqueue("7"), await resize.enqueue("a.png"))


async def a_job_ends_in_errors_that_can_be_told_apart(job: tinyq.Job[int]) -> str:
    try:
        await job.result(timeout=1)
    except tinyq.JobFailed as failed:
        return failed.type + failed.message
    except tinyq.JobCancelled as cancelled:
        return cancelled.reason
    except (tinyq.NoResult, tinyq.JobNotFound, tinyq.JobError, tinyq.TinyQError, TimeoutError) as other:
        return str(other)
    return ""


async def a_running_job_knows_itself() -> None:
    job = tinyq.current_job()
    assert_type(job.id, str)
    assert_type(job.task, str)
    assert_type(job.queue, str)
    assert_type(job.attempt, int)
    assert_type(job.created, datetime)
    assert_type(job.fire_time, datetime | None)
    assert_type(job.cancelled, bool)


def a_job_steers_itself(reason: str) -> None:
    if reason == "later":
        raise tinyq.Snooze(5)
    if reason == "much later":
        raise tinyq.RetryAfter(timedelta(minutes=5))
    if reason == "never mind":
        raise tinyq.Cancel
    raise tinyq.Cancel(reason)


# Spawned coroutines


async def spawn_returns_the_task_of_the_coroutine() -> None:
    assert_type(tinyq.spawn(look_up("7")), asyncio.Task[float])
    assert_type(await tinyq.spawn(look_up("7"), name="look up"), float)
    assert_type(q.spawn(mailer.send("a@b.c")), asyncio.Task[bool])


# Retry


retries = [
    tinyq.Retry(),
    tinyq.Retry(5),
    tinyq.Retry(max_attempts=5, base=5.0, factor=6, cap=timedelta(minutes=15), jitter="equal"),
    tinyq.Retry(max_attempts=math.inf, base=timedelta(seconds=1), jitter="full"),
    tinyq.Retry(jitter="none", retry_on=OSError, give_up_on=FileNotFoundError),
    tinyq.Retry(retry_on=(OSError, TimeoutError), give_up_on=(FileNotFoundError, asyncio.CancelledError)),
    tinyq.Retry(max_attempts=6, delays=(30, 120.5, timedelta(minutes=10))),
    tinyq.Retry(delays=[30, 120, 600]),
]
tinyq.task(name="list", retry=[30, 120.5, timedelta(minutes=10)])(parse)
tinyq.task(name="tuple", retry=(30, 120))(parse)
tinyq.task(name="no", retry=False)(parse)
tinyq.task(name="unset", retry=None)(parse)
assert_type(retries[0].delay(1), float)


def retry_can_be_decided_by_a_function(transient: Callable[[BaseException], bool]) -> None:
    tinyq.Retry(retry_on=transient, give_up_on=transient)


# The life of a TinyQ


async def an_instance_lives_in_a_block() -> None:
    async with tinyq.TinyQ() as best_effort:
        assert_type(best_effort, tinyq.TinyQ)
    async with tinyq.TinyQ("jobs.db", concurrency=5) as mine:
        assert_type(mine, tinyq.TinyQ)
        assert_type(await mine.enqueue(look_up, "7"), tinyq.Job[float])
        assert_type(await mine.stats(), tinyq.Stats)
    async with tinyq.TinyQ(Path("jobs.db")).lifespan() as state:
        assert_type(state, dict[str, tinyq.TinyQ])


async def an_instance_and_the_module_have_the_same_verbs() -> None:
    await q.start()
    await q.quiesce()
    await q.drain()
    await q.stop()
    await q.stop(5)
    await q.stop(grace=timedelta(seconds=5))
    assert_type(await q.get("id"), tinyq.Job[Any])
    assert_type(await q.stats(), tinyq.Stats)
    await q.requeue("id", "another")
    await tinyq.start()
    await tinyq.quiesce()
    await tinyq.drain()
    await tinyq.stop()
    await tinyq.stop(5)
    await tinyq.stop(grace=timedelta(seconds=5))
    assert_type(await tinyq.get("id"), tinyq.Job[Any])
    assert_type(await tinyq.stats(), tinyq.Stats)
    await tinyq.requeue("id", "another")


def scripts_and_workers_run_an_instance_or_the_default_one() -> None:
    q.run()
    tinyq.run()
    tinyq.run(q)


async def stats_are_counts_and_schedules() -> None:
    stats = await tinyq.stats()
    assert_type(stats.count(queue="emails", task="mail.report", state="pending"), int)
    assert_type(stats.count(state=tinyq.State.DEAD), int)
    assert_type(stats.unknown, tuple[str, ...])
    for number in stats.counts:
        assert_type(number, tinyq.Count)
        assert_type(number.state, tinyq.State)
        assert_type((number.queue, number.task, number.durable, number.count), tuple[str, str, bool, int])
    for schedule in stats.schedules:
        assert_type(schedule, tinyq.ScheduleStats)
        assert_type((schedule.name, schedule.fired, schedule.skipped, schedule.missed), tuple[str, int, int, int])
        assert_type((schedule.last, schedule.next), tuple[datetime | None, datetime | None])


def options_of_an_instance() -> None:
    tinyq.TinyQ(db=None)
    tinyq.TinyQ(
        "jobs.db", concurrency=20, queues={"emails": 50, "reports": 0}, threads=4, max_pending=100, max_payload=1000,
        grace=math.inf, lease=timedelta(seconds=30), synchronous="normal", promote="interrupted", worker=False,
        namespace="shop", worker_name="shop-1", clock=FakeClock(), timeout=60, retry=[30, 120], result_ttl=0.0,
        failure_ttl=timedelta(days=7),
    )  # fmt: skip
    tinyq.TinyQ(queues=None, threads=None, worker_name=None, clock=None, retry=None, promote=True)
    tinyq.configure("jobs.db", concurrency=20, clock=FakeClock())
    tinyq.configure(db=Path("jobs.db"), synchronous="full")
    tinyq.configure(queues={"emails": 5})


# Applications


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[dict[str, tinyq.TinyQ]]:
    async with tinyq.lifespan(app, db="jobs.db", grace=20, queues={"emails": 5}) as state:
        assert_type(state, dict[str, tinyq.TinyQ])
        yield state


app = FastAPI(lifespan=lifespan)
FastAPI(lifespan=tinyq.lifespan)
FastAPI(lifespan=q.lifespan)
Starlette(lifespan=tinyq.lifespan)
Starlette(lifespan=q.lifespan)


@app.post("/orders/{order}")
async def place(order: str, size: bytes = Depends(resize)) -> dict[str, str]:
    job = await send.options(durable=True, key=order).enqueue(order)
    return {"job": job.id}


async def a_lifespan_needs_no_application() -> None:
    async with tinyq.lifespan(db="jobs.db") as state:
        assert_type(state["tinyq"], tinyq.TinyQ)
    async with tinyq.lifespan(), q.lifespan():
        pass


# Dead jobs and paused queues


@tinyq.on_dead
async def tell(job: tinyq.Job[Any]) -> None:
    print(job.task, job.error, job.traceback)


@q.on_dead
def tell_from_a_thread(job: tinyq.Job[Any]) -> int:
    return job.attempts


tinyq.TinyQ(on_dead=tell)
tinyq.configure(on_dead=lambda job: print(job.reason))


@tinyq.task(on_lost="dead")
async def once() -> None: ...


async def operators_look_and_repair() -> None:
    assert_type(await tinyq.dead(), list[tinyq.Job[Any]])
    assert_type(await q.dead(own, limit=5), list[tinyq.Job[Any]])
    assert_type(await tinyq.requeue(task=send), int)
    assert_type(await tinyq.requeue(all=True), int)
    assert_type(await q.purge("id"), int)
    assert_type(await q.purge(task="shop.send"), int)
    assert_type(tell_from_a_thread(await q.get("id")), int)
    await once.options(on_lost="retry").enqueue()
    await tinyq.pause("emails")
    await tinyq.resume("emails")
    assert_type((await q.stats()).paused, tuple[str, ...])


# The clock


class StoppedClock:
    def time(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return 0.0

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        await wake.wait()


clock: tinyq.Clock = FakeClock()
tinyq.TinyQ(clock=clock)
tinyq.TinyQ(clock=StoppedClock())


# Functions whose results are unusual: the result of a job is never a coroutine


@tinyq.task
async def nested() -> list[list[int | None]]:
    return [[1, None]]


@tinyq.task
async def anything(order: str) -> Any:
    return order


@tinyq.task
async def shape(width: int, /, height: int = 1, *, unit: str) -> Callable[[int], str]:
    return lambda number: unit


@tinyq.task
def starts_something(order: str) -> Coroutine[Any, Any, float]:
    return look_up(order)


async def results_are_never_coroutines() -> None:
    assert_type(await (await nested.enqueue()).result(), list[list[int | None]])
    assert_type(await (await anything.enqueue("7")).result(), Any)
    assert_type(await (await shape.enqueue(1, 2, unit="cm")).result(), Callable[[int], str])
    assert_type(await (await starts_something.enqueue("7")).result(), float)
    assert_type(await starts_something("7"), float)
    assert_type(await (await tinyq.enqueue(starts_something, "7")).result(), float)
    assert_type(await (await tinyq.enqueue(starts_something, "7", delay=5)).result(), float)


# The test kit


def a_test_of_the_default_instance() -> None:
    with tinyq.testing() as jobs:
        assert_type(jobs, tinyq.Kit)
        assert_type(jobs.enqueued(), list[tinyq.EnqueuedJob[Any]])
        assert_type(jobs.enqueued(send), list[tinyq.EnqueuedJob[int]])
        assert_type(jobs.enqueued(resize)[0].args, tuple[Any, ...])
        assert_type(jobs.enqueued("mail.report"), list[tinyq.EnqueuedJob[Any]])
        assert_type(jobs.enqueued(own_plain.fn), list[tinyq.EnqueuedJob[Any]])
        assert_type(jobs.drain(), int)
        assert_type(jobs.advance(timedelta(hours=1), raise_errors=False), int)
        assert_type(jobs.now, datetime)
        jobs.clear()


async def a_test_of_an_instance() -> None:
    with q.testing(at=tomorrow) as jobs:
        assert_type(await jobs.adrain(raise_errors=False), int)
        assert_type(await jobs.aadvance(3600), int)
        job = jobs.enqueued(own_with_options)[0]
        assert_type(await job.result(), tuple[str, int])
        assert_type((job.kwargs, job.priority, job.key), tuple[dict[str, Any], int, str | None])


# What goes around a job, and what it knows of itself


@tinyq.middleware
async def timed(job: tinyq.CurrentJob, call_next: Callable[[tinyq.CurrentJob], Awaitable[Any]]) -> Any:
    assert_type((job.id, job.attempt, job.cancelled), tuple[str, int, bool])
    return await call_next(job)


def inject(carrier: dict[str, str], context: object = None) -> None:
    """As OpenTelemetry's."""


q.on_enqueue(inject)


def open_session() -> Session:
    raise NotImplementedError


@q.task(headers={"from": "here"}, aliases=["own.old_name"])
async def import_rows(path: str, session: Session = Depends(open_session)) -> int:  # noqa: B008  FastAPI's own way
    job = tinyq.current_job()
    await job.progress(0.5, "half")
    job.progress(1)
    assert_type(job.headers.get("from"), str | None)
    assert_type(job.fire_time, datetime | None)
    return 1


async def callers_leave_dependencies_out() -> None:
    assert_type(await import_rows.options(headers={"trace": "1"}).enqueue("a.csv"), tinyq.Job[int])
    job = import_rows.enqueue_sync("a.csv")
    assert_type(job.progress, tuple[float, str | None] | None)
