"""Work that falls behind says so: once, with the reason and the way out."""

import asyncio
import logging
from datetime import timedelta

import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, eventually

from tinyq import Every, TinyQ

Lines = pytest.LogCaptureFixture


def told(caplog: Lines, *words: str, level: int = logging.WARNING) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == level and all(word in record.getMessage() for word in words)
    ]


async def pass_time(clock: FakeClock, seconds: float) -> None:
    for _ in range(round(seconds)):
        await clock.advance(1)
        await asyncio.sleep(0.005)


async def test_jobs_that_wait_for_slots_are_one_warning_until_they_have_caught_up(
    open_q: Open, durable: bool, clock: FakeClock, caplog: Lines
) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    q = await open_q(concurrency=2, behind_after=10)
    go_on = asyncio.Event()

    @q.task(name="report")
    async def report() -> None:
        await go_on.wait()

    jobs = [await q.enqueue(report, durable=durable) for _ in range(5)]
    await eventually(lambda: told(caplog, "falls behind"), clock, 1)
    await pass_time(clock, 60)
    [line] = told(caplog, "falls behind")
    kind = "durable" if durable else "best-effort"
    assert f"queue 'default' falls behind: 3 {kind} jobs of task report wait, for up to 1" in line
    assert "all its slots are taken, by report (2), for up to 1" in line
    assert "more slots (concurrency) or another process would help" in line
    assert "the last claim took" in line
    go_on.set()
    for job in jobs:
        await job.result()
    await eventually(lambda: told(caplog, "'default' has caught up with the jobs of task report", level=logging.INFO), clock, 1)


@pytest.mark.parametrize("delay", [0, 2])
async def test_what_comes_due_while_all_slots_are_taken_is_told_of(
    open_q: Open, durable: bool, clock: FakeClock, caplog: Lines, delay: int
) -> None:
    q = await open_q(concurrency=1, behind_after=10)
    began, go_on = asyncio.Event(), asyncio.Event()

    @q.task(name="hang")
    async def hang() -> None:
        began.set()
        await go_on.wait()

    @q.task(name="report")
    async def report() -> None: ...

    await q.enqueue(hang, delay=1, durable=durable)
    await eventually(began.is_set, clock, 1)
    await q.enqueue(report, delay=delay, durable=durable)
    await pass_time(clock, 60)
    [line] = told(caplog, "falls behind")
    assert "of task report wait" in line and "all its slots are taken, by hang (1)" in line
    go_on.set()


async def test_calls_of_batch_handlers_are_told_of_as_the_slots_that_they_take(
    open_q: Open, durable: bool, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_q(concurrency=1, behind_after=10)
    began, go_on = asyncio.Event(), asyncio.Event()

    @q.batch(3, name="poll")
    async def poll(items: list[int]) -> None:
        began.set()
        await go_on.wait()

    @q.task(name="report")
    async def report() -> None: ...

    for timeout in (60, 600):  # of which the call has the longest
        await poll.options(timeout=timeout, delay=1, durable=durable).enqueue(timeout)
    await eventually(began.is_set, clock, 1)
    await q.enqueue(report, durable=durable)
    await eventually(lambda: told(caplog, "falls behind"), clock, 1)
    [line] = told(caplog, "falls behind")
    assert "all its slots are taken, by poll (1), for up to 1" in line
    go_on.set()


async def test_a_queue_with_slots_of_its_own_is_named_with_the_option_that_helps(
    open_at: OpenAt, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_at(None, queues={"reports": 1}, behind_after=10)
    go_on = asyncio.Event()

    @q.task(name="report", queue="reports")
    async def report() -> None:
        await go_on.wait()

    for _ in range(2):
        await report.enqueue()
    await eventually(lambda: told(caplog, "queue 'reports' falls behind", "queues={'reports': …}"), clock, 1)
    go_on.set()


async def test_jobs_that_wait_for_their_limit_are_told_of_with_that(open_at: OpenAt, clock: FakeClock, caplog: Lines) -> None:
    q = await open_at(None, behind_after=10)
    go_on = asyncio.Event()

    @q.task(name="report", max_running=1, limit_by="account")
    async def report(account: str) -> None:
        await go_on.wait()

    for _ in range(2):
        await report.enqueue("a7")
    await eventually(lambda: told(caplog, "falls behind", "task report", 'max_running=1 is reached for "a7"'), clock, 1)
    go_on.set()


async def test_jobs_that_wait_for_their_time_are_not_behind(open_at: OpenAt, clock: FakeClock, caplog: Lines) -> None:
    q = await open_at(None, concurrency=1, behind_after=10)
    await q.enqueue(lambda: None, delay=40)
    await pass_time(clock, 60)
    assert told(caplog, "falls behind") == []


async def test_nothing_is_said_with_an_infinite_threshold(open_at: OpenAt, clock: FakeClock, caplog: Lines) -> None:
    q = await open_at(None, concurrency=1, behind_after=float("inf"))
    go_on = asyncio.Event()
    for _ in range(2):
        await q.enqueue(go_on.wait)
    await pass_time(clock, 60)
    assert told(caplog, "falls behind") == []
    go_on.set()


@pytest.mark.parametrize("value", [0, -1, "soon", None])
def test_a_threshold_is_a_positive_number_of_seconds(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="behind_after"):
        TinyQ(behind_after=value)  # type: ignore[arg-type]


def test_a_threshold_may_be_a_timedelta() -> None:
    TinyQ(behind_after=timedelta(minutes=1))


async def test_a_recurring_job_that_takes_longer_than_its_period_is_one_warning(
    open_file: Open, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_file()
    runs = 0

    @q.task(name="poll")
    async def poll(number: int) -> None:
        nonlocal runs
        runs += 1
        await clock.wait(asyncio.Event(), 2.5)

    for number in range(3):
        await q.schedule(poll, number, when=Every(2), key=str(number))
    await eventually(lambda: runs >= 12, clock, 0.5)
    [line] = told(caplog, "takes longer than its period")
    assert "recurring job poll" in line and "it is due each 2 s" in line and "batch" in line


async def test_a_batch_handler_that_takes_longer_than_the_period_is_not_told_to_become_one(
    open_q: Open, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_q()

    @q.batch(10, name="poll")
    async def poll(numbers: list[int]) -> None:
        await clock.wait(asyncio.Event(), 2.5)

    await q.schedule(poll, 7, when=Every(2), key="7")
    await eventually(lambda: told(caplog, "takes longer than its period"), clock, 0.5)
    [line] = told(caplog, "takes longer than its period")
    assert line.endswith("make it shorter or its period longer")


async def test_a_schedule_that_takes_longer_than_its_period_is_one_warning(
    open_at: OpenAt, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_at(None)
    runs = 0

    @q.every(2, name="refresh")
    async def refresh() -> None:
        nonlocal runs
        runs += 1
        await clock.wait(asyncio.Event(), 2.5)

    await eventually(lambda: runs >= 6, clock, 0.5)
    [line] = told(caplog, "takes longer than its period")
    assert "schedule refresh" in line and "it is due each 2 s" in line


async def test_a_schedule_that_ends_in_time_is_not_told_of(open_at: OpenAt, clock: FakeClock, caplog: Lines) -> None:
    q = await open_at(None)
    runs = 0

    @q.every(2, name="refresh")
    async def refresh() -> None:
        nonlocal runs
        runs += 1
        await clock.wait(asyncio.Event(), 1)

    await eventually(lambda: runs >= 6, clock, 0.5)
    assert told(caplog, "longer than its period") == []
