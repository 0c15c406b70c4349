"""One job from call to outcome: what handlers may be and do, and what becomes of it. The same in both tiers."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import itertools
import logging
import math
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from clock import EPOCH, FakeClock
from helpers import Open, eventually

import tinyq
from tinyq import Cancel, JobCancelled, JobFailed, JobNotFound, NoResult, Retry, RetryAfter, Snooze, State, TinyQ


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What plain functions wait for; open at the end, so that no thread outlives its test."""
    gate = threading.Event()
    yield gate
    gate.set()


async def forever() -> None:
    await asyncio.Event().wait()


# What a handler may be


async def coroutine_function(x: int) -> int:
    return x + 1


def plain_function(x: int) -> int:
    return x + 1


def returns_an_awaitable(x: int) -> Any:
    return coroutine_function(x)


class Adder:
    def method(self, x: int) -> int:
        return x + 1

    async def async_method(self, x: int) -> int:
        return x + 1

    @classmethod
    async def class_method(cls, x: int) -> int:
        return x + 1

    @staticmethod
    def static_method(x: int) -> int:
        return x + 1

    def __call__(self, x: int) -> int:
        return x + 1


class AsyncAdder:
    async def __call__(self, x: int) -> int:
        return x + 1


def add(y: int, x: int) -> int:
    return x + y


async def async_add(y: int, x: int) -> int:
    return x + y


HANDLERS: dict[str, Callable[[int], Any]] = {
    "async function": coroutine_function,
    "plain function": plain_function,
    "plain function that returns an awaitable": returns_an_awaitable,
    "lambda": lambda x: x + 1,
    "method": Adder().method,
    "async method": Adder().async_method,
    "class method": Adder.class_method,
    "static method": Adder.static_method,
    "callable object": Adder(),
    "async callable object": AsyncAdder(),
    "partial": functools.partial(add, 1),
    "async partial": functools.partial(async_add, 1),
    "partial of a partial of a method": functools.partial(functools.partial(Adder().async_method)),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS.keys())
async def test_any_callable_can_be_a_task_and_its_job_gives_the_result(
    q: TinyQ, durable: bool, handler: Callable[[int], Any]
) -> None:
    task = q.task(durable=durable)(handler)
    job = await task.enqueue(41)
    assert await job.result(timeout=20) == 42
    assert job.status is State.DONE
    assert job.attempts == 1


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS.keys())
async def test_any_callable_can_be_enqueued_without_being_registered(clock: FakeClock, handler: Callable[[int], Any]) -> None:
    async with TinyQ(clock=clock) as q:
        job = await q.enqueue(handler, 41)
        assert await job.result(timeout=20) == 42


async def test_a_registered_task_is_called_as_before_outside_of_a_job(q: TinyQ, durable: bool) -> None:
    assert q.task(durable=durable)(plain_function)(1) == 2
    assert await q.task(durable=durable)(coroutine_function)(1) == 2


async def test_a_result_of_none_is_a_result(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable)
    async def nothing() -> None: ...

    job = await nothing.enqueue()
    assert await job.result(timeout=20) is None  # type: ignore[func-returns-value]


async def test_a_failure_reaches_the_waiter_with_type_message_and_cause(q: TinyQ, durable: bool) -> None:
    error = LookupError("no such order")

    @q.task(durable=durable, retry=False)
    async def fails() -> None:
        raise error

    job = await fails.enqueue()
    with pytest.raises(JobFailed, match="LookupError: no such order") as raised:
        await job.result(timeout=20)
    assert (raised.value.type, raised.value.message) == ("LookupError", "no such order")
    assert raised.value.__cause__ is error
    assert job.status is State.DEAD
    assert job.error == "LookupError: no such order"


async def test_a_waiter_hears_of_the_failure_after_the_last_attempt_only(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    @q.task(durable=durable, retry=[10])
    def fails() -> None:
        raise ValueError("no")

    job = await fails.enqueue()
    waiting = asyncio.create_task(job.result())
    await eventually(lambda: job.status is State.PENDING and job.attempts == 1)
    assert not waiting.done()
    await eventually(waiting.done, clock)
    with pytest.raises(JobFailed):
        await waiting
    assert job.attempts == 2


async def test_a_spawned_task_gives_its_result_and_raises_its_error(q: TinyQ) -> None:
    async def fails() -> None:
        raise LookupError("no such order")

    assert await q.spawn(coroutine_function(1)) == 2
    with pytest.raises(LookupError, match="no such order"):
        await q.spawn(fails())


async def test_a_spawned_tasks_failure_is_logged_with_its_name(q: TinyQ, caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise LookupError("no such order")

    q.spawn(fails(), name="find the order")
    await eventually(lambda: caplog.records)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "find the order" in record.getMessage()
    assert record.exc_info is not None


# Nothing is garbage-collected, nothing takes the loop down


@pytest.mark.parametrize("way", ["enqueue", "spawn"])
async def test_work_that_waits_for_what_nobody_else_holds_survives_the_garbage_collector(
    q: TinyQ, durable: bool, way: str
) -> None:
    futures: list[weakref.ref[asyncio.Future[str]]] = []
    seen: list[str] = []

    async def waits() -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        futures.append(weakref.ref(future))
        seen.append(await future)

    if way == "enqueue":
        await q.task(durable=durable)(waits).enqueue()  # the handle is dropped
    else:
        q.spawn(waits())
    await eventually(lambda: futures)
    for _ in range(3):
        gc.collect()
    assert (await q.stats()).count(state=State.RUNNING) == 1
    future = futures[0]()
    assert future is not None
    future.set_result("kept")
    del future
    await eventually(lambda: seen == ["kept"])


class Odd(BaseException):
    pass


EXITS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Odd("odd"), asyncio.CancelledError("by its own hand")]


@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_an_exit_raised_by_a_handler_is_a_failure_and_everything_else_goes_on(
    q: TinyQ, durable: bool, error: BaseException, plain: bool
) -> None:
    other_may_end = asyncio.Event()

    @q.task(durable=durable)
    async def other() -> str:
        await other_may_end.wait()
        return "untouched"

    def exits() -> None:
        raise error

    async def exits_async() -> None:
        raise error

    running = await other.enqueue()
    job = await q.task(durable=durable, retry=False)(exits if plain else exits_async).enqueue()
    with pytest.raises(JobFailed) as raised:
        await job.result(timeout=20)
    assert raised.value.type == type(error).__name__
    assert job.status is State.DEAD
    assert job.attempts == 1
    other_may_end.set()
    assert await running.result(timeout=20) == "untouched"
    assert await (await q.task(durable=durable)(plain_function).enqueue(1)).result(timeout=20) == 2


async def test_stop_iteration_out_of_a_plain_function_is_recorded_under_its_own_name(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, retry=False)
    def first_of_none() -> int:
        return next(iter(()))

    job = await first_of_none.enqueue()
    with pytest.raises(JobFailed) as raised:
        await job.result(timeout=20)
    assert raised.value.type == "StopIteration"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Odd("odd")], ids=lambda error: type(error).__name__)
async def test_an_exit_raised_in_a_spawned_task_stays_in_it(
    q: TinyQ, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    async def exits() -> None:
        raise error

    task = q.spawn(exits(), name="exits")
    other = q.spawn(coroutine_function(1))
    await eventually(task.done)
    failure = task.exception()
    assert failure is not None
    assert type(error).__name__ in (type(failure).__name__, getattr(failure, "type", None))
    assert await other == 2
    assert ["exits" in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [True]


def test_a_real_ctrl_c_still_stops_the_process() -> None:
    script = """
        import asyncio, tinyq

        async def job():
            print("started", flush=True)
            await asyncio.sleep(600)

        async def main():
            async with tinyq.TinyQ(grace=0.05) as q:
                await q.enqueue(job)
                await asyncio.sleep(600)

        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors


# Retries


async def test_a_failing_job_is_retried_after_its_backoff_and_may_then_succeed(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    starts: list[datetime] = []

    @q.task(durable=durable, retry=Retry(max_attempts=3, base=10, factor=3, jitter="none"))
    async def fails_twice() -> str:
        starts.append(clock.now())
        if len(starts) < 3:
            raise ConnectionError("down")
        return "up"

    job = await fails_twice.enqueue()
    await eventually(lambda: job.attempts == 1 and job.status is State.PENDING)
    assert job.run_at == starts[0] + timedelta(seconds=10)
    assert job.error == "ConnectionError: down"
    await eventually(lambda: job.attempts == 2 and job.status is State.PENDING, clock, 0.5)
    assert starts[1] >= starts[0] + timedelta(seconds=10)
    assert job.run_at == starts[1] + timedelta(seconds=30)
    await eventually(lambda: job.status is State.DONE, clock, 0.5)
    assert starts[2] >= starts[1] + timedelta(seconds=30)
    assert await job.result() == "up"
    assert job.attempts == 3


async def test_a_job_is_dead_after_max_attempts_starts(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    starts: list[int] = []

    @q.task(durable=durable, retry=Retry(max_attempts=3, base=1, factor=1))
    def fails() -> None:
        starts.append(tinyq.current_job().attempt)
        raise ConnectionError("down")

    job = await fails.enqueue()
    await eventually(lambda: job.status is State.DEAD, clock)
    await clock.advance(60)
    assert starts == [1, 2, 3]
    assert job.attempts == 3


async def test_a_task_gives_up_after_five_starts_unless_told_otherwise(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    starts: list[datetime] = []

    @q.task(durable=durable)
    async def missing_file() -> None:
        starts.append(clock.now())
        raise FileNotFoundError("gone")

    job = await missing_file.enqueue()
    await eventually(lambda: job.status is State.DEAD, clock, step=5)
    assert len(starts) == 5
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(starts)]
    assert all(gap >= least for gap, least in zip(gaps, (2.5, 15, 90, 450), strict=True))


async def test_a_bare_callable_starts_once(clock: FakeClock) -> None:
    async def fails() -> None:
        raise ConnectionError("down")

    async with TinyQ(clock=clock) as q:
        job = await q.enqueue(fails)
        with pytest.raises(JobFailed):
            await job.result(timeout=20)
        assert job.attempts == 1


async def test_an_explicit_delay_of_zero_retries_at_once(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, retry=[0, 0])
    async def fails() -> None:
        raise ConnectionError("down")

    job = await fails.enqueue()
    await eventually(lambda: job.status is State.DEAD)  # the clock stands still
    assert job.attempts == 3


async def test_errors_that_are_not_to_be_retried_end_the_job_at_once(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, retry=Retry(retry_on=OSError, give_up_on=FileNotFoundError))
    async def fails(kind: str) -> None:
        raise {"gives up": FileNotFoundError, "not retried": ValueError, "retried": ConnectionError}[kind]("no")

    given_up, other, retried = [await fails.enqueue(kind) for kind in ("gives up", "not retried", "retried")]
    await eventually(lambda: given_up.status is State.DEAD and other.status is State.DEAD and retried.attempts == 1)
    assert (given_up.attempts, other.attempts) == (1, 1)
    await eventually(lambda: retried.status is State.PENDING)


async def test_wrong_arguments_are_refused_in_the_caller_and_nothing_is_stored(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable)
    async def send(user: int) -> None: ...

    for args, kwargs in [((), {}), ((1, 2), {}), ((), {"usr": 1}), ((1,), {"user": 1})]:
        with pytest.raises(TypeError):
            await send.enqueue(*args, **kwargs)
        with pytest.raises(TypeError):
            await q.enqueue(send, *args, **kwargs)
    assert (await q.stats()).counts == ()


async def test_retry_after_waits_as_long_as_the_handler_says(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    @q.task(durable=durable, retry=Retry(max_attempts=2, base=5))
    async def throttled() -> None:
        raise RetryAfter(120)

    job = await throttled.enqueue()
    await eventually(lambda: job.attempts == 1 and job.status is State.PENDING)
    assert job.run_at == clock.now() + timedelta(seconds=120)
    await eventually(lambda: job.status is State.DEAD, clock, step=10)
    assert job.attempts == 2


async def test_cancel_raised_by_the_handler_ends_the_job_without_a_failure(
    q: TinyQ, durable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @q.task(durable=durable)
    def obsolete() -> None:
        raise Cancel("the order is gone")

    job = await obsolete.enqueue()
    with pytest.raises(JobCancelled, match="the order is gone") as raised:
        await job.result(timeout=20)
    assert raised.value.reason == "the order is gone"
    assert job.status is State.CANCELLED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_snooze_uses_no_attempt(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    starts: list[datetime] = []

    @q.task(durable=durable, retry=False)
    async def not_yet() -> str:
        starts.append(clock.now())
        if len(starts) < 5:
            raise Snooze(timedelta(seconds=30))
        return "now"

    job = await not_yet.enqueue()
    await eventually(lambda: starts and job.status is State.PENDING)
    assert job.attempts == 0
    assert job.run_at == starts[0] + timedelta(seconds=30)
    await eventually(lambda: job.status is State.DONE, clock, step=1)
    assert await job.result() == "now"
    assert job.attempts == 1
    assert all(later - earlier >= timedelta(seconds=30) for earlier, later in itertools.pairwise(starts))


async def test_thirty_jobs_that_snooze_while_two_others_are_busy_all_succeed(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    busy = peak = 0

    @q.task(durable=durable, retry=Retry(max_attempts=3))
    async def two_at_a_time() -> None:
        nonlocal busy, peak
        if busy == 2:
            raise Snooze(1)
        busy += 1
        peak = max(peak, busy)
        await clock.wait(asyncio.Event(), 0.5)
        busy -= 1

    jobs = [await two_at_a_time.enqueue() for _ in range(30)]
    await eventually(
        lambda: all(job.status is not State.PENDING and job.status is not State.RUNNING for job in jobs), clock, 0.25
    )
    assert {job.status for job in jobs} == {State.DONE}
    assert {job.attempts for job in jobs} == {1}
    assert peak == 2


# Timeouts


async def test_a_timeout_is_recorded_uses_one_attempt_and_waits_for_the_backoff(
    q: TinyQ, clock: FakeClock, durable: bool
) -> None:
    starts: list[datetime] = []
    caught: list[datetime] = []

    @q.task(durable=durable, timeout=5, retry=Retry(max_attempts=2, base=10, jitter="none"))
    async def hangs() -> None:
        starts.append(clock.now())
        try:
            await forever()
        except asyncio.CancelledError:
            caught.append(clock.now())
            raise

    job = await hangs.enqueue()
    await eventually(lambda: starts)
    await clock.advance(4.9)
    assert job.status is State.RUNNING
    await clock.advance(0.1)
    await eventually(lambda: job.status is State.PENDING)
    assert caught == [starts[0] + timedelta(seconds=5)]
    assert job.attempts == 1
    assert job.error is not None
    assert job.error.startswith("TimeoutError")
    assert job.run_at == starts[0] + timedelta(seconds=15)
    await eventually(lambda: job.status is State.DEAD, clock)
    assert starts[1] >= starts[0] + timedelta(seconds=15)
    assert len(starts) == len(caught) == 2
    with pytest.raises(JobFailed) as raised:
        await job.result()
    assert raised.value.type == "TimeoutError"


async def test_a_handler_that_swallows_its_timeout_has_still_timed_out(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    started = asyncio.Event()

    @q.task(durable=durable, timeout=5, retry=False)
    async def swallows() -> str:
        started.set()
        try:
            await forever()
        except asyncio.CancelledError:
            return "as if nothing had happened"
        return ""

    job = await swallows.enqueue()
    await asyncio.wait_for(started.wait(), 20)
    await clock.advance(5)
    with pytest.raises(JobFailed) as raised:
        await job.result(timeout=20)
    assert raised.value.type == "TimeoutError"


async def test_a_timeout_of_its_own_that_a_handler_raises_is_an_ordinary_failure(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, retry=False)
    async def inner() -> None:
        async with asyncio.timeout(0):
            await forever()

    job = await inner.enqueue()
    with pytest.raises(JobFailed) as raised:
        await job.result(timeout=20)
    assert raised.value.type == "TimeoutError"


async def test_an_infinite_timeout_is_no_timeout(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    may_end = asyncio.Event()

    @q.task(durable=durable, timeout=math.inf)
    async def long() -> str:
        await may_end.wait()
        return "at last"

    job = await long.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    for _ in range(20):
        await clock.advance(50)
    assert job.status is State.RUNNING
    may_end.set()
    assert await job.result(timeout=20) == "at last"


async def test_a_plain_function_past_its_timeout_keeps_its_slot_until_its_thread_ends(
    open_q: Open, clock: FakeClock, durable: bool, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_q(concurrency=1)
    starts: list[str] = []

    @q.task(durable=durable, timeout=0.5, retry=[5])
    def stuck() -> None:
        starts.append("stuck")
        gate.wait(60)

    @q.task(durable=durable)
    def waiting() -> None:
        starts.append("waiting")

    job = await stuck.enqueue()
    await eventually(lambda: starts)
    second = await waiting.enqueue()
    await clock.advance(0.5)
    await eventually(lambda: caplog.records)
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert stuck.name in warning.getMessage()
    assert "thread still running" in warning.getMessage()
    await eventually(lambda: clock.monotonic() > 1010, clock, 0.5)  # many looks for work to claim
    assert job.status is State.RUNNING
    assert second.status is State.PENDING
    assert starts == ["stuck"]  # neither its own retry nor the other one
    gate.set()
    await eventually(lambda: job.status is State.PENDING and second.status is State.DONE)
    assert job.error is not None
    assert job.error.startswith("TimeoutError")
    assert "thread still running" in job.error
    assert job.attempts == 1
    assert starts == ["stuck", "waiting"]


async def test_timeouts_do_not_need_the_default_executor(
    q: TinyQ, clock: FakeClock, durable: bool, gate: threading.Event
) -> None:
    pool = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(pool)
    blocker = loop.run_in_executor(None, gate.wait, 60)
    queued = loop.run_in_executor(None, gate.wait, 60)  # and whatever comes now has to wait
    started, may_end = threading.Event(), threading.Event()

    @q.task(durable=durable, timeout=1, retry=False)
    def works() -> None:
        started.set()
        may_end.wait(60)

    @q.task(durable=durable, timeout=1, retry=False)
    async def hangs() -> None:
        await forever()

    try:
        plain, asynchronous = await works.enqueue(), await hangs.enqueue()
        await eventually(started.is_set)
        await eventually(lambda: asynchronous.status is State.RUNNING)
        await clock.advance(1)
        with pytest.raises(JobFailed, match="TimeoutError"):
            await asynchronous.result(timeout=20)
        may_end.set()
        with pytest.raises(JobFailed, match="TimeoutError"):
            await plain.result(timeout=20)
    finally:
        may_end.set()
        gate.set()
        await asyncio.gather(blocker, queued)


async def test_the_time_a_plain_function_waits_for_a_thread_is_not_its_run_time(
    open_q: Open, clock: FakeClock, durable: bool, gate: threading.Event
) -> None:
    q = await open_q(threads=1)
    first_started = threading.Event()

    @q.task(durable=durable, timeout=math.inf)
    def first() -> None:
        first_started.set()
        gate.wait(60)

    @q.task(durable=durable, timeout=1, retry=False)
    def second() -> str:
        return "in time"

    await first.enqueue()
    await eventually(first_started.is_set)
    job = await second.enqueue()
    await clock.advance(100)
    assert job.status is State.PENDING
    gate.set()
    await eventually(lambda: job.status not in (State.PENDING, State.RUNNING), clock)
    assert await job.result() == "in time"


@pytest.mark.parametrize("durable", [True], ids=["durable"])
async def test_leases_are_renewed_while_the_default_executor_is_full(
    open_q: Open, clock: FakeClock, db: Path, gate: threading.Event
) -> None:
    q = await open_q(lease=8)
    pool = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(pool)
    blockers = [loop.run_in_executor(None, gate.wait, 60) for _ in range(2)]

    @q.task(durable=True)
    def works() -> None:
        gate.wait(60)

    def lease() -> int:
        connection = sqlite3.connect(db)
        try:
            return int(connection.execute("SELECT coalesce(max(lease), 0) FROM tinyq_jobs WHERE state = 'running'").fetchone()[0])
        finally:
            connection.close()

    await works.enqueue()
    await eventually(lambda: lease() > 0)
    before = lease()
    await eventually(lambda: lease() > before + 8_000_000, clock, step=1)
    gate.set()
    await asyncio.gather(*blockers)


# Results and cancellation


async def test_an_unknown_id_is_an_error_at_once(q: TinyQ) -> None:
    for id in ("0198c0de-0000-7000-8000-000000000000", "no id", ""):
        with pytest.raises(JobNotFound):
            await q.get(id)


async def test_a_finished_job_whose_result_is_not_kept_is_not_found_but_its_own_handle_still_knows(
    q: TinyQ, durable: bool
) -> None:
    job = await q.task(durable=durable)(coroutine_function).enqueue(1)
    assert await job.result(timeout=20) == 2
    assert await job.result(timeout=20) == 2
    with pytest.raises(JobNotFound):
        await q.get(job.id)


@pytest.mark.parametrize("durable", [True], ids=["durable"])
async def test_a_handle_to_a_job_that_another_process_ended_without_keeping_it_raises_at_once(
    open_q: Open, clock: FakeClock
) -> None:
    looker = await open_q(worker=False)
    job = await looker.enqueue("elsewhere", durable=True)
    worker = await open_q()

    @worker.task(name="elsewhere")
    async def elsewhere() -> None: ...

    async def gone() -> bool:
        try:
            await worker.get(job.id)
        except JobNotFound:
            return True
        return False

    async with asyncio.timeout(20):
        while not await gone():
            await clock.advance(0.05)
            await asyncio.sleep(0.001)
    with pytest.raises(NoResult):
        await job.result()


async def test_a_dead_job_that_is_not_kept_is_not_found(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, retry=False, failure_ttl=0)
    async def fails() -> None:
        raise ValueError("no")

    job = await fails.enqueue()
    with pytest.raises(JobFailed):
        await job.result(timeout=20)
    with pytest.raises(JobNotFound):
        await q.get(job.id)


async def test_giving_up_on_a_result_leaves_the_job_alone(q: TinyQ, durable: bool) -> None:
    may_end = asyncio.Event()

    @q.task(durable=durable)
    async def slow() -> str:
        await may_end.wait()
        return "completed"

    job = await slow.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(job.result(), 0.01)
    with pytest.raises(TimeoutError):
        await job.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        await job.result(timeout=timedelta(0))
    waiting = asyncio.create_task(job.result())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert job.status is State.RUNNING
    may_end.set()
    assert await job.result(timeout=20) == "completed"


async def test_many_waiters_get_the_same_result(q: TinyQ, durable: bool) -> None:
    may_end = asyncio.Event()

    @q.task(durable=durable)
    async def slow() -> str:
        await may_end.wait()
        return "completed"

    job = await slow.enqueue()
    waiting = [asyncio.create_task(job.result(timeout=20)) for _ in range(5)]
    await eventually(lambda: job.status is State.RUNNING)
    may_end.set()
    assert await asyncio.gather(*waiting) == ["completed"] * 5


async def test_a_running_job_is_called_cancelled_only_when_its_code_has_stopped(q: TinyQ, durable: bool) -> None:
    may_end, events = asyncio.Event(), list[str]()

    @q.task(durable=durable)
    async def lingers() -> None:
        events.append("started")
        try:
            await forever()
        finally:
            events.append("cleaning up")
            await may_end.wait()
            events.append("stopped")

    job = await lingers.enqueue()
    await eventually(lambda: events)
    cancelling = asyncio.create_task(job.cancel())
    await eventually(lambda: "cleaning up" in events)
    assert not cancelling.done()
    events.append(job.status)
    may_end.set()
    assert await asyncio.wait_for(cancelling, 20)
    assert [*events, job.status] == ["started", "cleaning up", "running", "stopped", "cancelled"]
    assert job.attempts == 1  # not run again
    with pytest.raises(JobCancelled):
        await job.result()


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_cancel_that_comes_too_late_changes_nothing_and_says_so(
    q: TinyQ, durable: bool, plain: bool, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    started = threading.Event()

    def finishes_in_a_thread() -> str:
        started.set()
        gate.wait(60)
        return "value"

    async def finishes() -> str:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        return "value"

    job = await q.task(durable=durable, result_ttl=60)(finishes_in_a_thread if plain else finishes).enqueue()
    await eventually(started.is_set)
    cancelling = asyncio.create_task(job.cancel())
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.wait_for(cancelling, 20) is False
    assert await job.result() == "value"
    assert job.status is State.DONE
    assert job.reason is not None
    assert "too late" in job.reason
    assert await job.cancel() is False
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_plain_function_can_see_that_it_is_to_stop(q: TinyQ, durable: bool, gate: threading.Event) -> None:
    started = threading.Event()

    @q.task(durable=durable)
    def looks_up() -> None:
        started.set()
        while not tinyq.current_job().cancelled:
            if gate.wait(0.001):
                raise AssertionError("never told to stop")
        raise InterruptedError

    job = await looks_up.enqueue()
    await eventually(started.is_set)
    assert await asyncio.wait_for(job.cancel(), 20)
    assert job.status is State.CANCELLED


# Threads, context, the current job


async def test_plain_functions_run_in_threads_and_the_loop_goes_on(q: TinyQ, durable: bool, gate: threading.Event) -> None:
    threads: list[threading.Thread] = []

    @q.task(durable=durable)
    def blocks() -> None:
        threads.append(threading.current_thread())
        gate.wait(60)

    job = await blocks.enqueue()
    await eventually(lambda: threads)  # which takes a loop that turns
    assert threads[0] is not threading.main_thread()
    assert threads[0].daemon
    gate.set()
    await job.result(timeout=20)


async def test_async_handlers_run_in_the_loops_own_thread(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable)
    async def where() -> str:
        return threading.current_thread().name

    assert await (await where.enqueue()).result(timeout=20) == threading.main_thread().name


async def test_an_async_job_that_blocks_the_loop_is_warned_about_by_name(
    q: TinyQ, durable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @q.task(durable=durable)
    async def blocks() -> None:
        time.sleep(2.2)  # noqa: ASYNC251 - the fault itself

    job = await blocks.enqueue()
    await job.result(timeout=20)
    await eventually(lambda: caplog.records)
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert blocks.name in warning.getMessage()
    [seconds] = re.findall(r"blocked for (\d+\.\d) s", warning.getMessage())
    assert float(seconds) > 1


async def test_context_variables_reach_best_effort_jobs_each_with_a_copy_of_its_own(clock: FakeClock) -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    seen: list[str] = []
    async with TinyQ(clock=clock) as q:

        @q.task(retry=[0])
        async def fails_once(own: str) -> None:
            seen.append(request.get())
            request.set(own)
            if tinyq.current_job().attempt == 1:
                raise ConnectionError

        @q.task
        def plain(own: str) -> None:
            seen.append(request.get())
            request.set(own)

        request.set("the enqueuer's")
        jobs = [await task.enqueue(own) for own in ("a", "b") for task in (fails_once, plain)]
        request.set("changed afterwards")
        for job in jobs:
            await job.result(timeout=20)
        assert seen == ["the enqueuer's"] * 6
        assert request.get() == "changed afterwards"


async def test_a_job_knows_itself(q: TinyQ, clock: FakeClock, durable: bool) -> None:
    @q.task(durable=durable, queue="emails", retry=[10])
    async def look(seen: str) -> dict[str, Any]:
        current = tinyq.current_job()
        if current.attempt == 1:
            raise ConnectionError
        return {
            "id": current.id, "task": current.task, "queue": current.queue, "attempt": current.attempt,
            "created": current.created, "fire_time": current.fire_time, "cancelled": current.cancelled,
        }  # fmt: skip

    created = clock.now()
    job = await look.enqueue("x")
    await eventually(lambda: job.status is State.DONE, clock)
    assert await job.result() == {
        "id": job.id, "task": look.name, "queue": "emails", "attempt": 2,
        "created": created, "fire_time": None, "cancelled": False,
    }  # fmt: skip


async def test_a_plain_function_and_what_it_calls_know_their_job(q: TinyQ, durable: bool) -> None:
    def helper() -> str:
        return tinyq.current_job().id

    @q.task(durable=durable)
    def look() -> str:
        return helper()

    job = await look.enqueue()
    assert await job.result(timeout=20) == job.id


async def test_jobs_at_the_same_time_do_not_see_each_other_as_the_current_one(q: TinyQ, durable: bool) -> None:
    both = asyncio.Barrier(2)

    @q.task(durable=durable)
    async def look() -> str:
        await both.wait()
        return tinyq.current_job().id

    jobs = [await look.enqueue() for _ in range(2)]
    assert [await job.result(timeout=20) for job in jobs] == [job.id for job in jobs]


async def test_outside_of_a_job_there_is_no_current_job(q: TinyQ) -> None:
    with pytest.raises(LookupError, match="outside of a job"):
        tinyq.current_job()


# The decision: a table

NOW = 1_767_268_800_000_000  # 2026-01-01T12:00:00Z
SECOND = 1_000_000
POLICY = Retry(max_attempts=5, base=10, factor=2, cap=60, jitter="none")


def running_row(**values: Any) -> tinyq.JobRow:
    row = tinyq.JobRow(b"\x01" * 16, "task", "default", 0, NOW - 5 * SECOND, NOW - 5 * SECOND)
    row.seq, row.claim_no, row.attempts, row.state, row.durable = 7, 3, 1, State.RUNNING, True
    for name, value in values.items():
        setattr(row, name, value)
    return row


def decide(row: tinyq.JobRow, outcome: tinyq.Outcome, **settings: Any) -> tinyq.Settlement:
    return tinyq.decide(row, outcome, tinyq.Settings(**{"retry": POLICY, "failure_ttl": 100.0, **settings}), NOW)


ERROR = ConnectionError("down")
TABLE: dict[str, tuple[dict[str, Any], tinyq.Outcome, dict[str, Any]]] = {
    # what: fields of the row, outcome, what is expected of the settlement
    "done": ({}, tinyq.Outcome("done", 1), {"state": State.DONE, "attempts": 1, "keep": False}),
    "done clears the last error": ({"error": "E", "traceback": "T"}, tinyq.Outcome("done"), {"error": None, "traceback": None}),
    "failed once": (
        {}, tinyq.Outcome("failed", error=ERROR),
        {"state": State.PENDING, "attempts": 1, "run_at": NOW + 10 * SECOND, "error": "ConnectionError: down"},
    ),
    "failed twice": ({"attempts": 2}, tinyq.Outcome("failed", error=ERROR), {"run_at": NOW + 20 * SECOND}),
    "failed four times": ({"attempts": 4}, tinyq.Outcome("failed", error=ERROR), {"run_at": NOW + 60 * SECOND}),
    "failed for the last time": (
        {"attempts": 5}, tinyq.Outcome("failed", error=ERROR),
        {"state": State.DEAD, "attempts": 5, "keep": True, "keep_until": NOW + 100 * SECOND, "error": "ConnectionError: down"},
    ),
    "timed out": (
        {}, tinyq.Outcome("timeout", error=TimeoutError("timed out")),
        {"state": State.PENDING, "attempts": 1, "run_at": NOW + 10 * SECOND, "error": "TimeoutError: timed out"},
    ),
    "timed out for the last time": ({"attempts": 5}, tinyq.Outcome("timeout", error=TimeoutError()), {"state": State.DEAD}),
    "asks to be retried later": (
        {}, tinyq.Outcome("failed", error=RetryAfter(7), delay=7.0),
        {"state": State.PENDING, "attempts": 1, "run_at": NOW + 7 * SECOND},
    ),
    "asks to be retried at once": ({}, tinyq.Outcome("failed", error=RetryAfter(0), delay=0.0), {"run_at": NOW}),
    "asks to be retried, but has no attempts left": (
        {"attempts": 5}, tinyq.Outcome("failed", error=RetryAfter(7), delay=7.0), {"state": State.DEAD},
    ),
    "snooze": (
        {"attempts": 5}, tinyq.Outcome("snooze", delay=30.0),
        {"state": State.PENDING, "attempts": 4, "snoozes": 1, "run_at": NOW + 30 * SECOND},
    ),
    "snooze of zero": ({}, tinyq.Outcome("snooze", delay=0.0), {"state": State.PENDING, "attempts": 0, "run_at": NOW}),
    "cancelled": (
        {}, tinyq.Outcome("cancelled", reason="gone"),
        {"state": State.CANCELLED, "attempts": 1, "reason": "gone", "keep_until": NOW + 100 * SECOND},
    ),
    "expired": ({}, tinyq.Outcome("expired", reason="expired"), {"state": State.CANCELLED, "attempts": 0, "reason": "expired"}),
    "interrupted": (
        {"attempts": 5}, tinyq.Outcome("interrupted", reason="shutdown"),
        {"state": State.PENDING, "attempts": 4, "interruptions": 1, "run_at": NOW},
    ),
    "handed back unstarted": (
        {}, tinyq.Outcome("unstarted"),
        {"state": State.PENDING, "attempts": 0, "interruptions": 0, "snoozes": 0, "run_at": NOW - 5 * SECOND},
    ),
    "parked": (
        {}, tinyq.Outcome("parked", error=TypeError("misfit")),
        {"state": State.PENDING, "attempts": 0, "parked": NOW, "error": "TypeError: misfit"},
    ),
    "parked for less than an hour": (
        {"parked": NOW - 3599 * SECOND}, tinyq.Outcome("parked", error=TypeError("misfit")),
        {"state": State.PENDING, "attempts": 0, "parked": NOW - 3599 * SECOND},
    ),
    "parked for an hour": (
        {"parked": NOW - 3600 * SECOND}, tinyq.Outcome("parked", error=TypeError("misfit")),
        {"state": State.DEAD, "attempts": 0, "error": "TypeError: misfit", "keep": True},
    ),
    "undecodable is kept for ever": (
        {}, tinyq.Outcome("undecodable", reason="undecodable: not JSON"),
        {"state": State.DEAD, "attempts": 0, "keep": True, "keep_until": None, "reason": "undecodable: not JSON"},
    ),
    "a fire time that was missed": (
        {"attempts": 2}, tinyq.Outcome("missed"), {"state": State.PENDING, "attempts": 1, "reason": tinyq.MISSED},
    ),
    "lost is due at once and counts": (
        {"attempts": 2}, tinyq.Outcome("lost"), {"state": State.PENDING, "attempts": 2, "lost": 1, "run_at": NOW},
    ),
    "its call with others failed": (
        {"attempts": 2}, tinyq.Outcome("split", {"error": "OSError: down"}, ERROR),
        {"state": State.PENDING, "attempts": 1, "run_at": NOW, "singly": 1, "reason": "its call with others failed",
         "error": "OSError: down"},
    ),
    "done after it has run singly": ({"singly": 1}, tinyq.Outcome("done"), {"singly": 0}),
    "lost with the last attempt": ({"attempts": 5}, tinyq.Outcome("lost"), {"state": State.DEAD, "attempts": 5}),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "outcome", "expected"), TABLE.values(), ids=TABLE.keys())
def test_an_outcome_decides_what_is_written(fields: dict[str, Any], outcome: tinyq.Outcome, expected: dict[str, Any]) -> None:
    change = decide(running_row(**fields), outcome)
    assert {name: getattr(change, name) for name in expected} == expected
    assert (change.seq, change.claim_no) == (7, 3)


def test_the_table_covers_every_kind_of_outcome_that_is_written() -> None:
    kinds = set(tinyq.OutcomeKind.__args__)  # type: ignore[attr-defined]
    assert {outcome.kind for _, outcome, _ in TABLE.values()} == kinds - {"dropped"}


def test_an_outcome_without_a_claim_is_never_written() -> None:
    with pytest.raises(ValueError, match="not written"):
        decide(running_row(), tinyq.Outcome("dropped"))


def until_it_ends(outcome: tinyq.Outcome, most: int, **settings: Any) -> tuple[tinyq.Settlement, int]:
    """The last settlement of a row that meets the same outcome each time it runs, and after how many runs that was."""
    row = running_row(attempts=0)
    for n in range(1, most + 1):
        row.attempts += 1
        change = decide(row, outcome, **settings)
        if change.state is not State.PENDING:
            return change, n
        for name in ("attempts", "snoozes", "interruptions", "parked", "lost"):
            setattr(row, name, getattr(change, name))
    raise AssertionError(f"still pending after {most} runs")


def test_interruptions_are_bounded_by_twenty() -> None:
    change, runs = until_it_ends(tinyq.Outcome("interrupted"), 30, retry=Retry(max_attempts=1))
    assert change.state is State.DEAD
    assert runs == 21


def test_an_interruption_too_many_is_an_ordinary_failure_while_attempts_are_left() -> None:
    change = decide(running_row(interruptions=20), tinyq.Outcome("interrupted"))
    assert change.state is State.PENDING
    assert change.attempts == 1


def test_snoozes_have_a_generous_bound() -> None:
    change, runs = until_it_ends(tinyq.Outcome("snooze", delay=1.0), 20_000, retry=Retry(max_attempts=1))
    assert change.state is State.DEAD
    assert 1_000 <= runs <= 20_000


def test_a_worker_lost_on_each_start_ends_the_job_after_exactly_max_attempts_starts() -> None:
    change, runs = until_it_ends(tinyq.Outcome("lost"), 10, retry=Retry(max_attempts=3))
    assert (change.state, change.attempts, runs) == (State.DEAD, 3, 3)


@pytest.mark.parametrize(
    ("policy", "error", "state"),
    [
        (Retry(retry_on=OSError), ConnectionError(), State.PENDING),
        (Retry(retry_on=OSError), ValueError(), State.DEAD),
        (Retry(retry_on=(OSError, ValueError)), ValueError(), State.PENDING),
        (Retry(give_up_on=FileNotFoundError), FileNotFoundError(), State.DEAD),
        (Retry(give_up_on=FileNotFoundError), ConnectionError(), State.PENDING),
        (Retry(retry_on=OSError, give_up_on=FileNotFoundError), FileNotFoundError(), State.DEAD),
        (Retry(retry_on=OSError, give_up_on=FileNotFoundError), ConnectionError(), State.PENDING),
    ],
)
def test_retry_on_and_give_up_on_decide_whether_an_error_is_retried(policy: Retry, error: Exception, state: State) -> None:
    assert decide(running_row(), tinyq.Outcome("failed", error=error), retry=policy).state is state


def test_retry_on_and_give_up_on_may_be_predicates() -> None:
    def is_temporary(error: BaseException) -> bool:
        return str(error) == "down"

    for policy, state in [(Retry(retry_on=is_temporary), State.PENDING), (Retry(give_up_on=is_temporary), State.DEAD)]:
        assert decide(running_row(), tinyq.Outcome("failed", error=ERROR), retry=policy).state is state


@pytest.mark.parametrize(
    ("ttl", "keep", "keep_until"),
    [(0.0, False, None), (60.0, True, NOW + 60 * SECOND), (math.inf, True, None)],
    ids=["nothing", "a minute", "for ever"],
)
def test_how_long_an_end_is_kept(ttl: float, keep: bool, keep_until: int | None) -> None:
    done = decide(running_row(), tinyq.Outcome("done", "v"), result_ttl=ttl)
    dead = decide(running_row(attempts=5), tinyq.Outcome("failed", error=ERROR), failure_ttl=ttl)
    cancelled = decide(running_row(), tinyq.Outcome("cancelled"), failure_ttl=ttl)
    assert [change.keep for change in (done, dead, cancelled)] == [keep] * 3
    if keep:
        assert [change.keep_until for change in (done, dead, cancelled)] == [keep_until] * 3


def test_a_delay_beyond_the_calendar_is_the_last_moment_there_is() -> None:
    change = decide(running_row(), tinyq.Outcome("snooze", delay=1e300))
    assert EPOCH + timedelta(microseconds=change.run_at) <= datetime.max.replace(tzinfo=UTC)


def test_a_retry_that_the_default_jitter_draws_is_never_below_half_the_delay() -> None:
    policy = Retry(base=10, factor=1)
    changes = [decide(running_row(), tinyq.Outcome("failed", error=ERROR), retry=policy) for _ in range(1_000)]
    waits = [(change.run_at - NOW) / SECOND for change in changes]
    assert 5 <= min(waits) < max(waits) <= 10
