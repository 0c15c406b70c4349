"""The way down: what is finished, handed back, promoted, reported, and that nothing stays behind."""

import asyncio
import logging
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Unpack

import pytest
from clock import FakeClock
from helpers import eventually
from starlette.applications import Starlette
from starlette.testclient import TestClient

import tinyq
from tinyq import Job, JobCancelled, Retry, ShuttingDown, State, TinyQ

ENDED = (State.DONE, State.DEAD, State.CANCELLED)


def rows(file: Path, columns: str) -> list[Any]:
    """What is in the table, in the order of enqueuing."""
    connection = sqlite3.connect(file)
    try:
        return connection.execute(f"SELECT {columns} FROM tinyq_jobs ORDER BY seq").fetchall()
    finally:
        connection.close()


async def started(db: Path | None, clock: FakeClock, /, **options: Unpack[tinyq.Configuration]) -> TinyQ:
    options["clock"] = clock
    q = TinyQ(db, **options)
    await q.start()
    return q


async def stopped(q: TinyQ, clock: FakeClock, grace: float, step: float = 0.5) -> float:
    """Stop, let as much time pass as that takes, and answer how much it was."""
    moment = clock.monotonic()
    stopping = asyncio.create_task(q.stop(grace=grace))
    await clock.settle()
    await eventually(lambda: stopping.done() or clock.monotonic() - moment >= grace, clock, step)
    await asyncio.wait({stopping}, timeout=0.5)  # threads write outcomes while this clock stands still
    while not stopping.done():
        await clock.advance(0.1)
        await asyncio.sleep(0.02)
    await stopping
    return clock.monotonic() - moment


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def pause(clock: FakeClock, seconds: float) -> None:
    await clock.wait(asyncio.Event(), seconds)


async def nothing() -> None: ...


# What runs, and what waits


async def test_a_running_job_finishes_within_the_grace(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)
    events: list[str] = []

    @q.task(durable=durable)
    async def second_long() -> str:
        events.append("started")
        try:
            await pause(clock, 1)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        events.append("finished")
        return "value"

    job = await second_long.enqueue()
    await eventually(lambda: events)
    await stopped(q, clock, grace=3, step=0.1)
    assert events == ["started", "finished"]
    assert job.status is State.DONE
    assert await job.result() == "value"


async def test_a_running_plain_function_finishes_within_the_grace(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)
    running, may_end = threading.Event(), threading.Event()

    @q.task(durable=durable)
    def blocks() -> str:
        running.set()
        may_end.wait(60)
        return "value"

    job = await blocks.enqueue()
    await eventually(running.is_set)
    stopping = asyncio.create_task(q.stop(grace=60))
    await clock.advance(1)
    assert not stopping.done()
    may_end.set()
    await eventually(stopping.done)
    assert await job.result() == "value"


async def test_at_the_end_of_the_grace_a_job_is_cancelled_and_its_finally_block_has_time(
    db: Path | None, durable: bool, clock: FakeClock
) -> None:
    q = await started(db, clock)
    events: list[tuple[str, float]] = []
    began = clock.monotonic()

    @q.task(durable=durable)
    async def long() -> None:
        events.append(("started", 0))
        try:
            await pause(clock, 3600)
        finally:
            events.append(("cancelled", round(clock.monotonic() - began, 6)))
            await pause(clock, 1)
            events.append(("cleaned up", round(clock.monotonic() - began, 6)))

    job = await long.enqueue()
    await eventually(lambda: events)
    await stopped(q, clock, grace=0.2, step=0.1)
    assert events == [("started", 0), ("cancelled", 0.2), ("cleaned up", 1.2)]
    assert job.status is not State.RUNNING


async def test_claiming_stops_in_the_same_turn_and_what_waits_in_the_table_is_untouched(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, concurrency=1)
    ran: list[int] = []

    @q.task(durable=True)
    async def five_seconds(n: int) -> None:
        ran.append(n)
        await pause(clock, 5)

    for n in range(4):
        await five_seconds.enqueue(n)
    await eventually(lambda: ran)
    assert await stopped(q, clock, grace=3000) < 1000
    assert ran == [0]
    assert rows(file, "payload, state, attempts, lease, claim_no") == [
        (f"[[{n}],{{}}]", "pending", 0, None, 0) for n in (1, 2, 3)
    ]


async def test_best_effort_jobs_that_wait_are_run_within_the_grace(clock: FakeClock) -> None:
    q = await started(None, clock, concurrency=1)
    ran: list[int] = []

    async def second_long(n: int) -> None:
        await pause(clock, 1)
        ran.append(n)

    jobs = [await q.enqueue(second_long, n) for n in range(4)]
    assert await stopped(q, clock, grace=10) < 6
    assert ran == [0, 1, 2, 3]
    assert {job.status for job in jobs} == {State.DONE}


async def test_a_grace_that_nobody_needs_is_not_waited_for(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock, grace=3600)
    await (await q.task(durable=durable, name="task")(nothing).enqueue()).result(timeout=20)
    await asyncio.wait_for(q.stop(), 20)  # the clock stands still


async def test_a_short_job_finishes_and_a_long_one_is_handed_back_at_the_end_of_the_grace(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock)
    ends: dict[float, float] = {}
    cleaned: list[float] = []

    @q.task(durable=True)
    async def lasts(seconds: float) -> None:
        try:
            await pause(clock, seconds)
        finally:
            ends[seconds] = clock.monotonic() - began
            await asyncio.sleep(0)
            cleaned.append(seconds)

    short, long = await lasts.enqueue(1), await lasts.enqueue(60)
    await eventually(lambda: long.status is State.RUNNING)
    await clock.settle()
    began = clock.monotonic()
    await stopped(q, clock, grace=5)
    assert ends == {1: 1, 60: 5}
    assert cleaned == [1, 60]
    assert (short.status, long.status) == (State.DONE, State.PENDING)
    assert rows(file, "state, attempts, interruptions, lease, run_at <= " + str(clock.time())) == [("pending", 0, 1, None, 1)]


async def test_a_durable_job_survives_any_three_deploys_with_its_attempts(file: Path, clock: FakeClock) -> None:
    starts: list[int] = []
    for deploy in range(4):
        q = await started(file, clock)

        @q.task(name="long", durable=True, retry=False)
        async def long(deploy: int = deploy) -> None:
            starts.append(tinyq.current_job().attempt)
            await pause(clock, 30 if deploy < 3 else 0)

        if deploy == 0:
            await long.enqueue()
        await eventually(lambda n=deploy: len(starts) > n, clock)  # type: ignore[misc]
        if deploy < 3:
            await stopped(q, clock, grace=0)
            assert rows(file, "state, attempts, interruptions") == [("pending", 0, deploy + 1)]
        else:
            await q.drain()
            await q.stop()
    assert starts == [1, 1, 1, 1]
    assert rows(file, "state") == []


async def test_a_job_that_fails_while_it_is_being_stopped_is_interrupted_and_not_failed(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock)

    @q.task(durable=True, retry=False)
    async def upset() -> None:
        try:
            await pause(clock, 3600)
        except asyncio.CancelledError:
            raise ConnectionError("torn down") from None

    job = await upset.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    await clock.settle()
    await stopped(q, clock, grace=0)
    assert rows(file, "state, attempts, interruptions") == [("pending", 0, 1)]


async def test_a_job_that_finishes_while_it_is_being_stopped_is_done(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)
    waiting = asyncio.Event()

    @q.task(durable=durable)
    async def wraps_up() -> str:
        waiting.set()
        with suppress(asyncio.CancelledError):
            await pause(clock, 3600)
        return "saved"

    job = await wraps_up.enqueue()
    await asyncio.wait_for(waiting.wait(), 20)
    await stopped(q, clock, grace=1)
    assert job.status is State.DONE
    assert await job.result() == "saved"


async def test_a_claim_that_is_under_way_when_stop_is_called_is_handed_back_or_has_run(tmp_path: Path, clock: FakeClock) -> None:
    for turns in range(30):
        file = tmp_path / f"{turns}.db"
        q = await started(file, clock)
        ran: list[int] = []

        @q.task(durable=True, name="note")
        async def note(ran: list[int] = ran) -> None:
            ran.append(1)

        await note.enqueue()
        for _ in range(turns):
            await asyncio.sleep(0)
        await stopped(q, clock, grace=10)
        assert rows(file, "state, attempts, interruptions, lease") == ([] if ran else [("pending", 0, 0, None)])


async def test_a_claim_that_waits_for_a_lock_when_stop_is_called_is_handed_back(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock)
    ran: list[int] = []

    @q.task(durable=True, delay=1)
    async def note() -> None:
        ran.append(1)

    for _ in range(3):
        await note.enqueue()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await clock.advance(1)
    await asyncio.sleep(0.02)  # some time for the claim to meet the lock
    stopping = asyncio.create_task(q.stop(grace=10))
    await asyncio.sleep(0)
    other.execute("COMMIT")
    other.close()
    await eventually(stopping.done, clock, 0.1)
    assert ran == []
    assert rows(file, "state, attempts, interruptions, lease") == [("pending", 0, 0, None)] * 3


async def test_running_jobs_may_enqueue_to_the_end_and_nobody_else_may(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)
    successors: list[Job[Any]] = []
    go_on = asyncio.Event()
    successor = q.task(durable=durable, name="successor")(nothing)

    @q.task(durable=durable)
    async def job() -> None:
        await go_on.wait()
        successors.append(await successor.enqueue())

    running = await job.enqueue()
    await eventually(lambda: running.status is State.RUNNING)
    stopping = asyncio.create_task(q.stop(grace=10))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await successor.enqueue()
    with pytest.raises(ShuttingDown):
        await q.enqueue_many([(successor, ())])
    coroutine = nothing()
    with pytest.raises(ShuttingDown):
        q.spawn(coroutine)
    go_on.set()
    await eventually(stopping.done, clock)
    assert running.status is State.DONE
    assert successors[0].status is (State.PENDING if durable else State.DONE)
    with pytest.raises(ShuttingDown):
        await successor.enqueue()


async def test_a_progress_line_says_what_is_waited_for(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    q = await started(None, clock)

    @q.task(name="reports.monthly")
    async def long() -> None:
        await pause(clock, 30)

    await long.enqueue()
    await clock.settle()
    await stopped(q, clock, grace=60)
    progress = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert progress
    assert all("reports.monthly" in line for line in progress)


# Cancels and leases while draining


async def test_a_job_can_be_cancelled_while_stop_waits_for_it(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock, lease=5)

    @q.task(durable=durable)
    async def long() -> None:
        await pause(clock, 60)

    job = await long.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    moment = clock.monotonic()
    stopping = asyncio.create_task(q.stop(grace=60))
    await clock.advance(1)
    assert await asyncio.wait_for(job.cancel(), 20) is True
    await eventually(stopping.done)  # the clock stands still
    assert job.status is State.CANCELLED
    assert clock.monotonic() - moment < 2


async def test_another_process_can_cancel_a_job_while_stop_waits_for_it(file: Path, clock: FakeClock) -> None:
    q, other = await started(file, clock, lease=5), await started(file, clock, worker=False, lease=5)

    @q.task(durable=True)
    async def long() -> None:
        await pause(clock, 3600)

    job = await long.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    stopping = asyncio.create_task(q.stop(grace=3600))
    await clock.advance(1)
    cancelling = asyncio.create_task((await other.get(job.id)).cancel())
    await eventually(lambda: stopping.done() and cancelling.done(), clock, 0.5)
    assert await cancelling is True
    assert job.status is State.CANCELLED
    await other.stop()


async def test_leases_are_renewed_until_the_last_job_has_ended(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, lease=8)
    may_end = asyncio.Event()

    @q.task(durable=True, timeout=3600)
    async def long() -> None:
        await may_end.wait()

    job = await long.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    stopping = asyncio.create_task(q.stop(grace=3600))
    for _ in range(10):
        [(before,)] = rows(file, "lease")
        await clock.advance(2)
        await eventually(lambda before=before: rows(file, "lease") > [(before,)], clock, 0.1)  # type: ignore[misc]
        assert rows(file, "lease")[0][0] > clock.time()
    assert not stopping.done()
    may_end.set()
    await eventually(stopping.done)
    assert job.status is State.DONE


# What does not end


async def test_a_handler_that_ignores_cancellation_does_not_hold_up_the_stop(
    db: Path | None, durable: bool, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(db, clock)
    release = asyncio.Event()

    @q.task(durable=durable)
    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    job = await stubborn.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    await clock.settle()
    took = await stopped(q, clock, grace=1)
    assert 1 <= took < 60  # the grace and a fixed margin
    assert any(stubborn.name in line and job.id in line for line in errors(caplog))
    if durable:
        [(state, attempts, lease)] = rows(file, "state, attempts, lease")
        assert (state, attempts) == ("running", 1)
        assert lease > clock.time() - 30_000_000
    release.set()
    await eventually(lambda: not [task for task in asyncio.all_tasks() if "tinyq" in task.get_name()])
    if durable:  # what it did at last is not written: the lease decides
        assert rows(file, "state, attempts, lease") == [("running", 1, lease)]


async def test_a_thread_that_does_not_end_is_named_and_left_with_its_lease(
    db: Path | None, durable: bool, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(db, clock)
    running, release = threading.Event(), threading.Event()

    @q.task(durable=durable)
    def stuck() -> None:
        running.set()
        release.wait(60)

    try:
        await stuck.enqueue()
        await eventually(running.is_set)
        assert 1 <= await stopped(q, clock, grace=1) < 60
        assert any(stuck.name in line for line in errors(caplog))
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("tinyq"))
        if durable:
            assert rows(file, "state, attempts") == [("running", 1)]
    finally:
        release.set()
    await eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("tinyq")])


async def test_an_abandoned_job_is_run_again_by_the_next_process_when_its_lease_has_ended(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, lease=5)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    await q.task(name="task", durable=True)(stubborn).enqueue()
    await eventually(lambda: rows(file, "state") == [("running",)])
    await clock.settle()
    await stopped(q, clock, grace=0)
    again = await started(file, clock, lease=5)
    ran: list[int] = []

    @again.task(name="task")
    async def ends() -> None:
        ran.append(tinyq.current_job().attempt)

    await eventually(lambda: ran, clock, 0.2)
    release.set()
    await again.drain()
    await again.stop()
    assert ran == [2]
    await eventually(lambda: not [task for task in asyncio.all_tasks() if "tinyq" in task.get_name()])


# Spawned tasks


async def test_a_spawned_task_is_waited_for(clock: FakeClock) -> None:
    q = await started(None, clock)
    ended: list[str] = []

    async def second_long() -> None:
        await pause(clock, 1)
        ended.append("spawned")

    q.spawn(second_long())
    assert await stopped(q, clock, grace=10) < 3
    assert ended == ["spawned"]


async def test_a_spawned_task_is_cancelled_at_the_end_of_the_grace(clock: FakeClock) -> None:
    q = await started(None, clock)
    task = q.spawn(pause(clock, 3600))
    assert 2 <= await stopped(q, clock, grace=2) < 5
    assert task.cancelled()


async def test_a_spawned_task_that_ignores_cancellation_is_named(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    q = await started(None, clock)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    task = q.spawn(stubborn(), name="the stubborn one")
    assert await stopped(q, clock, grace=1) < 10
    assert any("the stubborn one" in line for line in errors(caplog))
    release.set()
    await task


# Leftovers: promoted or reported


async def test_what_was_not_started_is_promoted_with_all_that_was_said_about_it(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(file, clock)

    @q.task(name="task", queue="emails", retry=[50, 50])
    async def later(x: int, *, y: str = "") -> None:
        raise ConnectionError("down")

    waiting = await later.options(delay=100, priority=7, expires=500, timeout=9, result_ttl=60, key="k").enqueue(1, y="z")
    failed_once = await later.enqueue(2)
    await eventually(lambda: failed_once.attempts == 1 and failed_once.status is State.PENDING)
    await clock.advance(10)
    began = clock.monotonic() - 10
    await stopped(q, clock, grace=5)
    assert errors(caplog) == []

    again = await started(file, clock)
    ran: list[tuple[int, str, float, int, str]] = []

    @again.task(name="task", queue="other", retry=[50, 50])
    async def runs(x: int, *, y: str = "") -> str:
        current = tinyq.current_job()
        ran.append((x, y, clock.monotonic() - began, current.attempt, current.queue))
        return y

    found = [await again.get(job.id) for job in (waiting, failed_once)]
    assert [job.run_at for job in found] == [waiting.run_at, failed_once.run_at]
    assert [job.attempts for job in found] == [0, 1]
    stored = rows(file, "priority, queue, (expires - created) / 1000000, key, options ->> 'timeout'")
    assert (7, "emails", 500, "k", 9.0) in stored
    await eventually(lambda: len(ran) == 2, clock, 0.5)
    await eventually(lambda: found[0].status is State.DONE)
    assert await found[0].result() == "z"
    await again.stop()
    assert [(x, y, attempt, queue) for x, y, _, attempt, queue in ran] == [(2, "", 2, "emails"), (1, "z", 1, "emails")]
    assert ran[0][2] >= 50
    assert ran[1][2] >= 100


async def test_a_promoted_job_whose_expiry_passes_does_not_run(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock)
    job = await q.task(name="task", delay=10, expires=30)(nothing).enqueue()
    await stopped(q, clock, grace=0)
    await clock.advance(60)
    again = await started(file, clock)
    ran: list[int] = []

    @again.task(name="task")
    async def runs() -> None:
        ran.append(1)

    found = await again.get(job.id)
    await eventually(lambda: found.status is State.CANCELLED, clock)
    await again.stop()
    assert ran == []


async def test_jobs_that_wait_for_a_slot_at_the_end_of_the_grace_are_promoted(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, concurrency=1)

    @q.task(name="long", promote=False)
    async def long() -> None:
        await pause(clock, 3600)

    @q.task(name="short")
    async def short(n: int) -> None: ...

    await long.enqueue()
    await clock.settle()
    waiting = [await short.enqueue(n) for n in range(3)]
    await stopped(q, clock, grace=1)
    assert rows(file, "task, payload, state, attempts") == [("short", f"[[{n}],{{}}]", "pending", 0) for n in range(3)]
    assert {job.status for job in waiting} == {State.PENDING}
    assert all(job.durable for job in waiting)


async def test_an_interrupted_best_effort_job_is_reported_lost_by_name(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(file, clock)

    @q.task(name="reports.monthly")
    async def long() -> None:
        await pause(clock, 3600)

    job = await long.enqueue()
    await clock.settle()
    await stopped(q, clock, grace=0)
    [line] = errors(caplog)
    assert "reports.monthly" in line
    assert rows(file, "state") == []
    assert job.status is State.CANCELLED
    with pytest.raises(JobCancelled, match="lost"):
        await job.result()


@pytest.mark.parametrize("level", ["task", "instance"])
async def test_an_interrupted_job_is_promoted_if_its_task_wants_that(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    q = await started(file, clock, promote="interrupted" if level == "instance" else True)

    @q.task(name="long", promote="interrupted" if level == "task" else None, retry=False)
    async def long(x: int) -> None:
        await pause(clock, 3600)

    await long.enqueue(7)
    await clock.settle()
    waiting = await long.options(delay=100).enqueue(8)
    await stopped(q, clock, grace=0)
    assert errors(caplog) == []
    assert set(rows(file, "payload, state, attempts, interruptions")) == {
        ("[[7],{}]", "pending", 0, 1),
        ("[[8],{}]", "pending", 0, 0),
    }
    assert waiting.status is State.PENDING


@pytest.mark.parametrize("level", ["task", "instance"])
async def test_nothing_is_promoted_if_it_is_not_wanted(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    q = await started(file, clock, promote=level != "instance")
    task = q.task(name="receipts.send", promote=False if level == "task" else None, delay=60)(nothing)
    await task.enqueue()
    await stopped(q, clock, grace=0)
    [line] = errors(caplog)
    assert "receipts.send" in line
    assert rows(file, "state") == []


async def test_a_tasks_wish_to_be_promoted_goes_before_the_instances(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, promote=False)
    await q.task(name="task", promote=True, delay=60)(nothing).enqueue()
    await stopped(q, clock, grace=0)
    assert rows(file, "task, state") == [("task", "pending")]


async def test_what_cannot_be_found_again_is_reported_lost_in_one_line(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(file, clock)

    odd_ran = ticks = 0

    async def bare() -> None: ...

    @q.task(name="odd", delay=60)
    async def odd(x: object) -> None:
        nonlocal odd_ran
        odd_ran += 1

    @q.every(60, name="tick", per_process=True)
    async def tick() -> None:
        nonlocal ticks
        ticks += 1
        await pause(clock, 3600)

    ran = [await q.enqueue(bare, delay=60) for _ in range(3)]
    await odd.enqueue(object())
    await odd.enqueue(1)
    await clock.advance(60)  # the schedule fires, and all these run
    await eventually(lambda: all(job.status is State.DONE for job in ran))
    await eventually(lambda: odd_ran == 2 and ticks)
    for _ in range(2):
        await q.enqueue(bare, delay=60)
    await odd.enqueue(object())
    await stopped(q, clock, grace=0)
    [line] = errors(caplog)
    assert "test_shutdown" in line
    assert "bare ×2" in line
    assert "odd" in line
    assert "tick" in line
    assert rows(file, "task") == []


async def test_without_a_database_everything_left_is_reported_lost_by_name(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(None, clock)
    a, b = [q.task(name=name, delay=60)(nothing) for name in ("receipts.send", "cache.refresh")]
    jobs = [await a.enqueue(), await a.enqueue(), await b.enqueue()]
    waiting = asyncio.create_task(jobs[0].result())
    await stopped(q, clock, grace=0)
    [line] = errors(caplog)
    assert "receipts.send ×2" in line
    assert "cache.refresh" in line
    with pytest.raises(JobCancelled, match="lost"):
        await asyncio.wait_for(waiting, 20)


async def test_if_promotion_fails_the_jobs_are_reported_lost(
    file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await started(file, clock)
    await q.task(name="receipts.send", delay=60)(nothing).enqueue()
    connection = sqlite3.connect(file)
    connection.execute("DROP TABLE tinyq_jobs")
    connection.close()
    await stopped(q, clock, grace=0)
    assert any("lost" in line and "receipts.send" in line for line in errors(caplog))


# Quiet: quiesce and drain


async def test_quiesce_stops_claiming_and_firing_and_lets_the_rest_go_on(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, concurrency=2)
    ran: list[str] = []
    may_end = asyncio.Event()

    @q.task(durable=True)
    async def running() -> None:
        ran.append("running")
        await may_end.wait()
        ran.append("ended")

    @q.task
    async def note(what: str) -> None:
        ran.append(what)

    @q.every(10, per_process=True)
    async def tick() -> None:
        ran.append("tick")

    @q.every(10)
    async def shared_tick() -> None:
        ran.append("shared tick")

    await running.enqueue()
    await eventually(lambda: ran)
    await q.quiesce()
    durable = await note.options(durable=True).enqueue("durable")
    await (await note.enqueue("best-effort")).result(timeout=20)
    for _ in range(30):
        await clock.advance(1)
    may_end.set()
    await eventually(lambda: "ended" in ran)
    await clock.advance(5)
    assert ran == ["running", "best-effort", "ended"]
    assert durable.status is State.PENDING
    await stopped(q, clock, grace=1)
    assert rows(file, "state, attempts") == [("pending", 0)]


async def test_drain_returns_when_nothing_due_is_pending_or_running(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock, concurrency=2)
    ended: list[int] = []

    @q.task(durable=durable)
    async def job(n: int) -> None:
        await asyncio.sleep(0)
        if n:
            await job.enqueue(n - 1)
        ended.append(n)

    for _ in range(5):
        await job.enqueue(3)
    later = await job.options(delay=3600).enqueue(0)
    await asyncio.wait_for(q.drain(), 20)
    assert sorted(ended) == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert later.status is State.PENDING
    await asyncio.wait_for(q.drain(), 20)
    await later.cancel()
    await q.stop()


async def test_drain_waits_for_a_running_job_and_for_spawned_tasks(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)
    may_end = [asyncio.Event(), asyncio.Event()]
    job = await q.task(durable=durable, name="wait")(may_end[0].wait).enqueue()
    q.spawn(may_end[1].wait())
    draining = asyncio.create_task(q.drain())
    await eventually(lambda: job.status is State.RUNNING)
    for event in may_end:
        await asyncio.wait({draining}, timeout=0.02)
        assert not draining.done()
        event.set()
    await asyncio.wait_for(draining, 20)
    await q.stop()


async def test_drain_does_not_wait_for_a_retry_that_is_not_due(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)

    @q.task(durable=durable, retry=[3600])
    async def fails() -> None:
        raise ConnectionError

    job = await fails.enqueue()
    await asyncio.wait_for(q.drain(), 20)
    assert job.attempts == 1
    await job.cancel()
    await q.stop()


# Calling stop


async def test_a_second_stop_joins_the_first(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = await started(db, clock)

    @q.task(durable=durable)
    async def job() -> None:
        await pause(clock, 5)

    running = await job.enqueue()
    await eventually(lambda: running.status is State.RUNNING)
    await clock.settle()
    moment = clock.monotonic()
    stops = [asyncio.create_task(q.stop(grace=3000)) for _ in range(3)]
    await clock.advance(1)
    assert not any(task.done() for task in stops)
    await eventually(lambda: all(task.done() for task in stops), clock, 0.5)
    await asyncio.gather(*stops)
    assert clock.monotonic() - moment < 1000
    assert running.status is State.DONE
    await q.stop()


async def test_a_second_stop_can_shorten_the_grace_and_not_lengthen_it(clock: FakeClock) -> None:
    q = await started(None, clock)
    moment = clock.monotonic()
    cancelled: list[float] = []

    async def long() -> None:
        try:
            await pause(clock, 3600)
        except asyncio.CancelledError:
            cancelled.append(clock.monotonic() - moment)

    await q.enqueue(long)
    await clock.settle()
    stops = [asyncio.create_task(q.stop(grace=60)), asyncio.create_task(q.stop(grace=5)), asyncio.create_task(q.stop(grace=600))]
    await eventually(lambda: all(task.done() for task in stops), clock, 0.5)
    assert cancelled == [5]


async def test_stop_without_start_and_after_stop_does_nothing(db: Path | None, clock: FakeClock) -> None:
    q = TinyQ(db, clock=clock)
    await q.stop()
    await q.start()
    await q.stop()
    await q.stop(grace=0)


async def test_stop_finishes_though_its_caller_is_cancelled(db: Path | None, durable: bool, file: Path, clock: FakeClock) -> None:
    q = await started(db, clock)
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    cleaned = asyncio.Event()

    @q.task(durable=durable)
    async def long() -> None:
        try:
            await pause(clock, 3600)
        finally:
            await pause(clock, 0.5)
            cleaned.set()

    job = await long.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    await clock.settle()
    stopping = asyncio.create_task(q.stop(grace=600))
    await clock.settle()
    stopping.cancel()
    await eventually(stopping.done, clock, 0.1)
    assert stopping.cancelled()
    assert cleaned.is_set()
    assert job.status is (State.PENDING if durable else State.CANCELLED)
    assert not [task for task in asyncio.all_tasks() if "tinyq" in task.get_name()]
    if durable:
        assert rows(file, "state, attempts, interruptions") == [("pending", 0, 1)]
    await q.start()  # it really has stopped
    await stopped(q, clock, grace=0)
    assert asyncio.all_tasks() < tasks
    assert set(threading.enumerate()) < threads or not durable


async def test_leaving_the_block_by_an_error_stops_in_the_same_way(db: Path | None, durable: bool, clock: FakeClock) -> None:
    ended: list[str] = []
    with pytest.raises(LookupError):
        async with TinyQ(db, clock=clock) as q:

            @q.task(durable=durable)
            async def job() -> None:
                await asyncio.sleep(0)
                ended.append("job")

            running = await job.enqueue()
            await eventually(lambda: running.status is not State.PENDING)
            raise LookupError
    assert ended == ["job"]


# Three ways down, one outcome


Way = Callable[[TinyQ, Callable[[], AbstractAsyncContextManager[None]]], None]


def by_test_client(q: TinyQ, work: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with q.lifespan(app) as state, work():
            yield state

    with TestClient(Starlette(lifespan=lifespan)):
        pass


def by_context_manager(q: TinyQ, work: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    async def main() -> None:
        async with q, work():
            pass

    asyncio.run(main())


def by_stop(q: TinyQ, work: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    async def main() -> None:
        await q.start()
        async with work():
            pass
        await q.stop(grace=5)

    asyncio.run(main())


@pytest.mark.parametrize("way", [by_test_client, by_context_manager, by_stop])
def test_every_way_down_has_the_same_outcome(way: Way, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    q = TinyQ(file, clock=clock, grace=5, concurrency=4)
    events: list[str] = []
    ticking: list[asyncio.Task[None]] = []

    @q.task
    async def lasts(name: str, seconds: float) -> None:
        events.append(f"{name} starts")
        try:
            await pause(clock, seconds)
            events.append(f"{name} ends")
        except asyncio.CancelledError:
            events.append(f"{name} is cancelled")
            raise

    async def bare() -> None: ...

    async def tick() -> None:
        ends = clock.monotonic() + 5
        while True:
            await clock.advance(0.25)
            await asyncio.sleep(0.002 if clock.monotonic() <= ends else 0.1)  # threads write outcomes meanwhile

    @asynccontextmanager
    async def work() -> AsyncIterator[None]:
        for durable in (True, False):
            for seconds in (1, 60):
                await lasts.options(durable=durable).enqueue(f"durable {seconds}" if durable else f"{seconds}", seconds)
        await eventually(lambda: len(events) == 4)
        await lasts.options(durable=True).enqueue("durable waiting", 1)
        await lasts.options(delay=3600).enqueue("promoted", 1)
        await q.enqueue(bare, delay=3600)
        yield
        ticking.append(asyncio.create_task(tick()))  # in the loop that stops
        await asyncio.sleep(0)

    way(q, work)
    assert sorted(events[:4]) == ["1 starts", "60 starts", "durable 1 starts", "durable 60 starts"]
    assert sorted(events[4:6]) == ["1 ends", "durable 1 ends"]
    assert sorted(events[6:]) == ["60 is cancelled", "durable 60 is cancelled"]
    assert sorted(rows(file, "payload ->> '$[0][0]', state, attempts, interruptions, lease")) == [
        ("durable 60", "pending", 0, 1, None),
        ("durable waiting", "pending", 0, 0, None),
        ("promoted", "pending", 0, 0, None),
    ]
    [line] = errors(caplog)
    assert lasts.name in line  # the one that was interrupted
    assert bare.__qualname__ in line


# Nothing stays behind


@pytest.fixture
def nothing_new() -> Iterator[Callable[[], list[object]]]:
    """Answers the tasks and threads that have come up since the test began."""
    threads = set(threading.enumerate())

    def new() -> list[object]:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        return [*(set(threading.enumerate()) - threads), *tasks]

    yield new


async def test_nothing_is_alive_after_stop_however_often_it_is_started(
    db: Path | None, durable: bool, clock: FakeClock, nothing_new: Callable[[], list[object]]
) -> None:
    before = nothing_new()
    q = TinyQ(db, clock=clock)
    fired: list[str] = []

    @q.task(durable=durable)
    def plain() -> int:
        return 7

    @q.every(10)
    async def tick() -> None:
        fired.append(str(tinyq.current_job().fire_time))

    for _ in range(4):
        await q.start()
        assert await (await plain.enqueue()).result(timeout=20) == 7
        n = len(fired)
        await eventually(lambda n=n: len(fired) > n, clock, 0.5)  # type: ignore[misc]
        await q.stop()
        assert nothing_new() == before
    assert len(fired) == len(set(fired))  # once a fire time, not once a start


async def test_a_start_that_fails_leaves_nothing_behind(
    tmp_path: Path, clock: FakeClock, nothing_new: Callable[[], list[object]]
) -> None:
    before = nothing_new()
    (tmp_path / "text").write_text("this is no database, and longer than the header of one would be\n" * 100)
    for path in (tmp_path, tmp_path / "no folder" / "jobs.db", tmp_path / "text"):
        q = TinyQ(path, clock=clock)
        with pytest.raises(tinyq.StoreError):
            await q.start()
        await eventually(lambda: nothing_new() == before)
        with pytest.raises(tinyq.NotStarted):
            await q.enqueue(nothing)


def test_it_can_be_started_again_in_another_event_loop(db: Path | None, durable: bool, clock: FakeClock) -> None:
    q = TinyQ(db, clock=clock)
    threads = set(threading.enumerate())
    ran: list[str] = []

    @q.task(durable=durable)
    async def note(what: str) -> None:
        ran.append(what)

    @q.task(durable=durable)
    def plain(what: str) -> None:
        ran.append(what)

    async def main(what: str) -> None:
        async with q:
            for task in (note, plain):
                await (await task.enqueue(what)).result(timeout=20)

    for what in ("first", "second", "third"):
        asyncio.run(main(what))
        assert set(threading.enumerate()) <= threads
    assert ran == ["first", "first", "second", "second", "third", "third"]


def test_a_loop_that_went_down_without_stop_holds_up_neither_a_new_start_nor_the_interpreters_exit(db: Path | None) -> None:
    script = """
        import asyncio, sys, tinyq

        q = tinyq.TinyQ(sys.argv[1] or None)

        @q.task(durable=bool(sys.argv[1]))
        def plain():
            return "worked"

        async def main(stop):
            await q.start()
            print(await (await plain.enqueue()).result(timeout=20))
            if stop:
                await q.stop()

        asyncio.run(main(False))
        asyncio.run(main(True))
        asyncio.run(main(False))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(db or "")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "worked\n" * 3)


async def test_a_job_of_the_last_run_is_found_by_the_next(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock, worker=False)
    task = q.task(name="task", durable=True, retry=Retry(max_attempts=1))(nothing)
    job = await task.enqueue()
    await q.stop()
    assert job.status is State.PENDING
    again = await started(file, clock)
    again.task(name="task", result_ttl=60)(nothing)
    found = await again.get(job.id)
    await eventually(lambda: found.status in ENDED, clock)
    assert found.status is State.DONE
    await again.stop()


async def test_start_returns_at_once_whatever_the_first_run_does(db: Path | None, clock: FakeClock) -> None:
    q = TinyQ(db, clock=clock)
    ran: list[str] = []

    @q.every(60, immediate=True)
    async def sleeps() -> None:
        ran.append("sleeps")
        await pause(clock, 60)

    @q.every(60, immediate=True)
    async def fails() -> None:
        ran.append("fails")
        raise ConnectionError

    await asyncio.wait_for(q.start(), 20)  # the clock stands still
    await eventually(lambda: sorted(ran) == ["fails", "sleeps"])
    await stopped(q, clock, grace=0)


async def test_delay_that_remains_is_what_is_left_of_it(file: Path, clock: FakeClock) -> None:
    q = await started(file, clock)
    enqueued = clock.now()
    job = await q.task(name="task", delay=100)(nothing).enqueue()
    await clock.advance(40)
    await stopped(q, clock, grace=0)
    again = await started(file, clock)
    assert (await again.get(job.id)).run_at == enqueued + timedelta(seconds=100)
    await again.stop()


async def test_a_best_effort_job_runs_within_the_grace_though_a_claim_of_the_table_is_under_way(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, go_on, ran = asyncio.Event(), asyncio.Event(), asyncio.Event()
    claim = tinyq.SQLiteStore.claim

    async def slow(store: tinyq.SQLiteStore, room: tinyq.Room, worker: str, lease: int, now: int) -> tinyq.Claimed:
        under_way.set()
        await go_on.wait()
        return await claim(store, room, worker, lease, now)

    monkeypatch.setattr(tinyq.SQLiteStore, "claim", slow)

    async def job() -> None:
        ran.set()

    async with asyncio.timeout(20):
        q = TinyQ(file)
        await q.start()
        await under_way.wait()
        await q.enqueue(job)
        stopping = asyncio.create_task(q.stop(grace=10))
        await ran.wait()
        go_on.set()
        await stopping
