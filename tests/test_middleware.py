"""Middleware: async functions around each attempt of every job."""

import asyncio
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from helpers import Open, edit, eventually

import tinyq
from tinyq import Cancel, CurrentJob, RetryAfter, Snooze, State, TinyQ

pytestmark = pytest.mark.timeout(300)

CallNext = Callable[[CurrentJob], Awaitable[Any]]


def noting(events: list[str], name: str) -> Callable[[CurrentJob, CallNext], Any]:
    async def note(job: CurrentJob, call_next: CallNext) -> Any:
        events.append(f"{name} in")
        try:
            return await call_next(job)
        finally:
            events.append(f"{name} out")

    return note


@pytest.fixture
def raised(q: TinyQ) -> list[BaseException]:
    """What came through a middleware."""
    errors: list[BaseException] = []

    @q.middleware
    async def note(job: CurrentJob, call_next: CallNext) -> Any:
        try:
            return await call_next(job)
        except BaseException as error:
            errors.append(error)
            raise

    return errors


async def test_the_first_middleware_is_outermost(q: TinyQ, durable: bool) -> None:
    events: list[str] = []

    @q.task
    async def work() -> int:
        events.append("work")
        return 7

    q.middleware(noting(events, "first"))
    q.middleware(noting(events, "second"))
    assert await (await work.options(durable=durable).enqueue()).result() == 7
    assert events == ["first in", "second in", "work", "second out", "first out"]


async def test_it_runs_around_each_attempt_of_every_kind_of_handler(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    seen: list[tuple[str, int]] = []

    @q.middleware
    async def note(job: CurrentJob, call_next: CallNext) -> Any:
        assert tinyq.current_job().id == job.id
        seen.append((job.task, job.attempt))
        return await call_next(job)

    @q.task(name="async", retry=[0.1])
    async def flaky() -> None:
        if tinyq.current_job().attempt == 1:
            raise OSError

    @q.task(name="plain")
    def plain() -> str:
        return threading.current_thread().name

    @q.every(1, name="tick")
    async def tick() -> None:
        pass

    first = await flaky.options(durable=durable).enqueue()
    second = await plain.options(durable=durable).enqueue()
    await eventually(lambda: first.status is State.DONE and ("tick", 1) in seen, clock)
    assert (await second.result()).startswith("tinyq-")
    assert {("async", 1), ("async", 2), ("plain", 1), ("tick", 1)} <= set(seen)


async def test_what_it_returns_is_the_result(q: TinyQ, durable: bool) -> None:
    @q.middleware
    async def double(job: CurrentJob, call_next: CallNext) -> Any:
        return 2 * await call_next(job)

    @q.task(result_ttl=60)
    async def one() -> int:
        return 1

    assert await (await one.options(durable=durable).enqueue()).result() == 2


async def test_what_it_raises_counts_as_the_handlers_own(q: TinyQ, durable: bool) -> None:
    called: list[str] = []

    @q.middleware
    async def refuse(job: CurrentJob, call_next: CallNext) -> Any:
        raise Cancel("not today")

    @q.task
    async def work() -> None:
        called.append("work")

    job = await work.options(durable=durable).enqueue()
    with pytest.raises(tinyq.JobCancelled, match="not today"):
        await job.result()
    assert called == []


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize(
    "error", [OSError("down"), RetryAfter(9), Snooze(9), Cancel("no")], ids=lambda error: type(error).__name__
)
async def test_an_error_comes_through_as_it_is(
    q: TinyQ, durable: bool, raised: list[BaseException], kind: str, error: Exception
) -> None:
    async def fail() -> None:
        raise error

    def fail_in_thread() -> None:
        raise error

    q.task(name="fail", retry=False)(fail if kind == "async" else fail_in_thread)
    job = await q.enqueue("fail", durable=durable)
    await eventually(lambda: job.status in (State.DEAD, State.CANCELLED) or (isinstance(error, Snooze) and raised))
    assert raised == [error]


async def test_a_stopiteration_of_a_plain_function_stays_one(q: TinyQ, durable: bool, raised: list[BaseException]) -> None:
    @q.task(retry=False)
    def last() -> None:
        raise StopIteration("nothing left")

    job = await last.options(durable=durable).enqueue()
    with pytest.raises(tinyq.JobFailed, match=r"^StopIteration: nothing left$"):
        await job.result()
    assert isinstance(raised[0].__cause__, StopIteration)


async def test_a_timeout_reaches_it_as_a_cancellation(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    events: list[str] = []

    @q.middleware
    async def note(job: CurrentJob, call_next: CallNext) -> Any:
        try:
            await call_next(job)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    @q.task(timeout=1, retry=False)
    async def stuck() -> None:
        await asyncio.Event().wait()

    job = await stuck.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DEAD, clock)
    assert (events, job.error) == (["cancelled"], "TimeoutError: timed out after 1 s")


async def test_it_is_within_the_timeout_itself(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()

    @q.middleware
    async def wait(job: CurrentJob, call_next: CallNext) -> Any:
        await asyncio.Event().wait()

    @q.task(timeout=1, retry=False)
    async def work() -> None:
        pass

    job = await work.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DEAD, clock)
    assert job.error == "TimeoutError: timed out after 1 s"


async def test_the_handler_sees_what_it_has_put_into_the_context(q: TinyQ, durable: bool) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")

    @q.middleware
    async def enter(job: CurrentJob, call_next: CallNext) -> Any:
        tenant.set(job.headers["tenant"])
        return await call_next(job)

    @q.task
    async def read() -> str:
        return tenant.get()

    @q.task
    def read_in_thread() -> str:
        return tenant.get()

    for name, task in (("a", read), ("b", read_in_thread)):
        assert await (await q.enqueue(task, durable=durable, headers={"tenant": name})).result() == name
    assert tenant.get() == "none"


async def test_a_job_whose_handler_is_not_called_does_not_pass_through(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    seen: list[str] = []

    @q.middleware
    async def note(job: CurrentJob, call_next: CallNext) -> Any:
        seen.append(job.task)
        return await call_next(job)

    @q.task(durable=True, delay=5)
    async def work(number: int) -> None:
        pass

    expired = await work.options(expires=1).enqueue(1)
    undecodable, parked = await work.enqueue(2), await work.enqueue(3)
    edit(file, "UPDATE tinyq_jobs SET payload = '{' WHERE payload = '[[2],{}]'")
    edit(file, "UPDATE tinyq_jobs SET payload = '[[],{}]' WHERE payload = '[[3],{}]'")
    await eventually(
        lambda: (expired.status, undecodable.status, parked.reason) == (State.CANCELLED, State.DEAD, "parked"), clock
    )
    assert seen == []


async def test_registered_while_jobs_run_it_is_there_for_the_next_one(q: TinyQ, durable: bool) -> None:
    started, go_on, events = asyncio.Event(), asyncio.Event(), list[str]()

    @q.task
    async def work() -> None:
        started.set()
        await go_on.wait()

    first = await work.options(durable=durable).enqueue()
    async with asyncio.timeout(10):
        await started.wait()
    q.middleware(noting(events, "mw"))
    second = await work.options(durable=durable).enqueue()
    go_on.set()
    await first.result()
    await second.result()
    assert events == ["mw in", "mw out"]


async def test_a_middleware_outlives_a_restart() -> None:
    q, events = TinyQ(), list[str]()
    q.middleware(noting(events, "mw"))
    for _ in range(2):
        async with asyncio.timeout(10), q:
            await (await q.enqueue(asyncio.sleep, 0)).result()
    assert events == ["mw in", "mw out"] * 2


def plain(job: CurrentJob, call_next: CallNext) -> Any:
    return None


async def one(job: CurrentJob) -> Any:
    return None


@pytest.mark.parametrize("wrong", [plain, one, None, 7], ids=["plain", "one parameter", "None", "7"])
def test_what_is_not_an_async_function_of_two_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"middleware\(\) takes an async function"):
        TinyQ().middleware(wrong)


async def test_a_callable_object_will_do() -> None:
    class Counting:
        count = 0

        async def __call__(self, job: CurrentJob, call_next: CallNext) -> Any:
            self.count += 1
            return await call_next(job)

    q, counting = TinyQ(), Counting()
    assert q.middleware(counting) is counting
    async with asyncio.timeout(10), q:
        await (await q.enqueue(asyncio.sleep, 0)).result()
    assert counting.count == 1


def other_process() -> int:
    return os.getpid()


def fail_in_process() -> None:
    raise OSError("down")


async def test_it_runs_here_around_a_handler_in_a_process_of_its_own(
    q: TinyQ, durable: bool, raised: list[BaseException]
) -> None:
    here: list[int] = []

    @q.middleware
    async def note(job: CurrentJob, call_next: CallNext) -> Any:
        here.append(os.getpid())
        return await call_next(job)

    well = await q.task(run_in="process")(other_process).options(durable=durable).enqueue()
    badly = await q.task(run_in="process", retry=False)(fail_in_process).options(durable=durable).enqueue()
    assert await well.result(30) not in here
    with pytest.raises(tinyq.JobFailed, match="OSError: down"):
        await badly.result(30)
    assert here == [os.getpid()] * 2
    assert [str(error) for error in raised] == ["down"]
