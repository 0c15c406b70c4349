"""The engine over both stores: slots and order, room, time, keys, handles, what is kept, several processes, logs, trouble."""

import asyncio
import itertools
import logging
import math
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from clock import FakeClock
from helpers import Open, eventually, rows

import tinyq
from tinyq import (
    ConfigurationError,
    Job,
    JobCancelled,
    JobFailed,
    JobNotFound,
    KeyConflict,
    NoResult,
    PayloadError,
    QueueFull,
    ShuttingDown,
    State,
    Task,
    TinyQ,
    UnknownTask,
)

ENDED = (State.DONE, State.DEAD, State.CANCELLED)


async def ended(job: Job[Any], clock: FakeClock | None = None, step: float = 0.05) -> Job[Any]:
    await eventually(lambda: job.status in ENDED, clock, step)
    return job


async def not_found(q: TinyQ, id: str, clock: FakeClock) -> None:
    """Return when the job is gone."""
    async with asyncio.timeout(20):
        while True:
            try:
                await q.get(id)
            except JobNotFound:
                return
            await clock.advance(1)
            await asyncio.sleep(0.001)


class Gate:
    """What jobs wait at, async and plain ones; counts who is at it, and how many at most."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.order: list[str] = []
        self.opened = asyncio.Event()
        self._opened = threading.Event()
        self._lock = threading.Lock()

    def open(self) -> None:
        self.opened.set()
        self._opened.set()

    def enter(self, name: str) -> None:
        with self._lock:
            self.order.append(name)
            self.inside[name] += 1
            self.peak[name] = max(self.peak[name], self.inside[name])

    def leave(self, name: str) -> None:
        with self._lock:
            self.inside[name] -= 1

    async def wait(self, name: str) -> None:
        self.enter(name)
        try:
            await self.opened.wait()
        finally:
            self.leave(name)

    def block(self, name: str) -> None:
        self.enter(name)
        self._opened.wait(60)
        self.leave(name)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def hold(q: TinyQ, durable: bool, gate: Gate) -> Task[[str], Any, None]:
    """A task whose jobs stay at the gate."""
    return q.task(durable=durable, name="hold")(gate.wait)


def query(file: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(file)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def change(file: Path, sql: str, *values: Any) -> None:
    connection = sqlite3.connect(file, timeout=10)
    try:
        with connection:
            assert connection.execute(sql, values).rowcount != 0
    finally:
        connection.close()


# Slots


async def test_a_queue_has_the_slots_it_was_given_and_all_others_share_the_rest(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(concurrency=3, queues={"emails": 2, "reports": 1})
    wait = q.task(durable=durable, name="wait")(gate.wait)
    jobs = []
    for queue in ("emails", "reports", "other", "default"):
        pool = queue if queue in ("emails", "reports") else "shared"
        jobs += [await wait.options(queue=queue).enqueue(pool) for _ in range(4)]
    await eventually(lambda: gate.inside == {"emails": 2, "reports": 1, "shared": 3})
    gate.open()
    for job in jobs:
        await ended(job)
    assert gate.peak == {"emails": 2, "reports": 1, "shared": 3}


async def test_a_saturated_queue_does_not_delay_the_others(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(concurrency=1, queues={"reports": 1})
    wait = q.task(durable=durable, name="wait")(gate.wait)

    @q.task(durable=durable, queue="other")
    async def quick() -> str:
        return "quick"

    for _ in range(5):
        await wait.options(queue="reports", priority=100).enqueue("reports")
    await eventually(lambda: gate.inside["reports"] == 1)
    for _ in range(3):
        assert await (await quick.enqueue()).result(timeout=20) == "quick"
    assert gate.inside["reports"] == 1


async def test_plain_functions_have_a_limit_of_their_own_that_does_not_delay_async_ones(
    open_q: Open, durable: bool, gate: Gate
) -> None:
    q = await open_q(concurrency=5, threads=2)
    block = q.task(durable=durable, name="block", priority=10)(gate.block)

    @q.task(durable=durable)
    async def quick() -> str:
        return "quick"

    blocked = [await block.enqueue("thread") for _ in range(5)]
    await eventually(lambda: gate.inside["thread"] == 2)
    for _ in range(5):
        assert await (await quick.enqueue()).result(timeout=20) == "quick"
    gate.open()
    for job in blocked:
        await ended(job)
    assert gate.peak["thread"] == 2


async def test_a_plain_function_that_hangs_costs_its_queue_one_slot_and_others_nothing(
    open_q: Open, durable: bool, gate: Gate
) -> None:
    q = await open_q(queues={"a": 2}, concurrency=1, threads=5)
    block = q.task(durable=durable, name="block", queue="a", timeout=math.inf)(gate.block)

    @q.task(durable=durable)
    def quick(x: int) -> int:
        return x

    await block.enqueue("hung")
    await eventually(lambda: gate.inside["hung"] == 1)
    for queue in ("a", "b"):
        assert await (await quick.options(queue=queue).enqueue(7)).result(timeout=20) == 7


async def test_a_durable_job_of_a_queue_with_zero_slots_waits_for_another_process(open_file: Open, clock: FakeClock) -> None:
    q = await open_file(queues={"reports": 0})

    @q.task(durable=True)
    async def report() -> str:
        return "here"

    left = await report.options(queue="reports").enqueue()
    assert await (await report.enqueue()).result(timeout=20) == "here"
    await clock.advance(5)
    assert left.status is State.PENDING
    assert left.attempts == 0
    other = await open_file()
    other.task(name=report.name)(report.fn)
    await not_found(q, left.id, clock)


async def test_a_best_effort_job_for_a_queue_with_zero_slots_is_refused(clock: FakeClock) -> None:
    async with TinyQ(queues={"reports": 0}, clock=clock) as q:

        @q.task(queue="reports")
        async def report() -> None: ...

        with pytest.raises(ConfigurationError, match="reports"):
            await report.enqueue()
        assert (await q.stats()).counts == ()


async def test_waiting_jobs_start_by_priority_and_then_in_the_order_they_came_across_tasks(
    open_q: Open, durable: bool, gate: Gate
) -> None:
    q = await open_q(concurrency=1)
    hold = q.task(durable=durable, name="hold")(gate.wait)
    started: list[str] = []

    @q.task(durable=durable)
    async def a(name: str) -> None:
        started.append(name)

    @q.task(durable=durable)
    async def b(name: str) -> None:
        started.append(name)

    await hold.enqueue("first")
    await eventually(lambda: gate.inside["first"])
    plan = [(a, 0), (b, 5), (a, -1), (b, 0), (a, 5), (b, -1), (a, 0), (a, 100), (b, 1)]
    jobs = [await task.options(priority=priority).enqueue(f"{priority}/{n}") for n, (task, priority) in enumerate(plan)]
    gate.open()
    for job in jobs:
        await ended(job)
    assert started == ["100/7", "5/1", "5/4", "1/8", "0/0", "0/3", "0/6", "-1/2", "-1/5"]


async def test_a_job_that_came_due_earlier_goes_first_among_equals(
    open_q: Open, durable: bool, gate: Gate, clock: FakeClock
) -> None:
    q = await open_q(concurrency=1)
    hold = q.task(durable=durable, name="hold", timeout=math.inf)(gate.wait)
    started: list[str] = []

    @q.task(durable=durable)
    async def note(name: str) -> None:
        started.append(name)

    await hold.enqueue("first")
    await eventually(lambda: gate.inside["first"])
    jobs = [await note.options(delay=delay).enqueue(f"after {delay}") for delay in (30, 10, 20)]
    await clock.advance(60)
    gate.open()
    for job in jobs:
        await ended(job, clock)
    assert started == ["after 10", "after 20", "after 30"]


async def test_both_tiers_share_the_slots(open_file: Open, gate: Gate) -> None:
    q = await open_file(concurrency=2)
    wait = q.task(name="wait")(gate.wait)
    jobs = [await wait.options(durable=n % 2 == 0).enqueue("job") for n in range(8)]
    await eventually(lambda: gate.inside["job"] == 2)
    gate.open()
    for job in jobs:
        await ended(job)
    assert gate.peak["job"] == 2


# Bounded memory


@pytest.fixture
async def full(clock: FakeClock, gate: Gate) -> AsyncIterator[TinyQ]:
    """A best-effort TinyQ with one job running and as many waiting as may wait."""
    q = TinyQ(concurrency=1, max_pending=2, clock=clock)
    await q.start()
    for name in ("running", "waiting", "waiting"):
        await q.enqueue(gate.wait, name)
        await eventually(lambda: gate.inside["running"] == 1)
    yield q
    gate.open()
    await q.stop()


async def nothing() -> None: ...


async def test_enqueue_waits_five_seconds_for_room_and_then_raises(full: TinyQ, clock: FakeClock) -> None:
    enqueuing = asyncio.create_task(full.enqueue(nothing))
    await clock.advance(4.9)
    assert not enqueuing.done()
    await clock.advance(0.1)
    with pytest.raises(QueueFull, match="max_pending"):
        await enqueuing
    assert (await full.stats()).count(state=State.PENDING) == 2


async def test_enqueue_goes_on_as_soon_as_there_is_room(full: TinyQ, clock: FakeClock, gate: Gate) -> None:
    enqueuing = [asyncio.create_task(full.enqueue(nothing)) for _ in range(5)]
    await clock.advance(1)
    assert not any(task.done() for task in enqueuing)
    gate.open()
    jobs = [await asyncio.wait_for(task, 20) for task in enqueuing]
    for job in jobs:
        await job.result(timeout=20)


async def test_a_cancelled_job_makes_room(clock: FakeClock, gate: Gate) -> None:
    async with TinyQ(concurrency=1, max_pending=1, clock=clock) as q:
        await q.enqueue(gate.wait, "running")
        await eventually(lambda: gate.inside["running"])
        waiting = await q.enqueue(gate.wait, "waiting")
        enqueuing = asyncio.create_task(q.enqueue(nothing))
        await clock.settle()
        assert not enqueuing.done()
        assert await waiting.cancel()
        job = await asyncio.wait_for(enqueuing, 20)
        gate.open()
        await job.result(timeout=20)


async def test_inside_a_handler_a_full_queue_raises_at_once(clock: FakeClock) -> None:
    async with TinyQ(concurrency=1, max_pending=1, clock=clock) as q:

        async def fills() -> str:
            await q.enqueue(nothing)
            try:
                await q.enqueue(nothing)
            except QueueFull:
                return "full"
            return "waited"

        assert await (await q.enqueue(fills)).result(timeout=20) == "full"  # the clock stands still


async def test_more_jobs_at_once_than_may_wait_are_refused_as_a_whole(clock: FakeClock) -> None:
    async with TinyQ(max_pending=3, clock=clock) as q:
        with pytest.raises(QueueFull):
            await q.enqueue_many([(nothing, ())] * 4)
        assert (await q.stats()).counts == ()


async def test_durable_jobs_do_not_count_as_waiting_in_memory(open_file: Open, gate: Gate) -> None:
    q = await open_file(concurrency=1, max_pending=1)
    wait = q.task(name="wait", durable=True)(gate.wait)
    jobs = [await wait.enqueue("durable") for _ in range(5)]
    gate.open()
    for job in jobs:
        await ended(job)


async def test_spawned_tasks_are_bounded_too(clock: FakeClock, gate: Gate) -> None:
    async with TinyQ(max_pending=2, clock=clock) as q:
        tasks = [q.spawn(gate.wait("spawned")) for _ in range(2)]
        with pytest.raises(QueueFull):
            q.spawn(nothing())
        gate.open()
        await asyncio.gather(*tasks)
        await q.spawn(nothing())


async def test_stop_frees_whoever_waits_for_room(clock: FakeClock, gate: Gate) -> None:
    q = TinyQ(concurrency=1, max_pending=1, clock=clock)
    await q.start()
    await q.enqueue(gate.wait, "running")
    await eventually(lambda: gate.inside["running"])
    await q.enqueue(gate.wait, "pending")
    blocked = [asyncio.create_task(q.enqueue(nothing)) for _ in range(3)]
    await clock.settle()
    stopping = asyncio.create_task(q.stop(grace=60))
    await clock.settle()
    assert all(task.done() for task in blocked)  # while stop still waits for the running job
    assert not stopping.done()
    for task in blocked:
        with pytest.raises(ShuttingDown):
            await task
    gate.open()
    await eventually(stopping.done, clock)
    await stopping
    assert gate.order == ["running", "pending"]
    assert gate.inside.total() == 0
    with pytest.raises(ShuttingDown):
        await q.enqueue(nothing)


# Time


async def test_a_delayed_job_starts_when_its_time_has_come(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    starts: list[float] = []

    @q.task(durable=durable)
    async def note() -> None:
        starts.append(clock.monotonic())

    moment = clock.monotonic()
    job = await note.options(delay=timedelta(minutes=1)).enqueue()
    await clock.advance(59.9)
    assert job.status is State.PENDING
    await ended(job, clock)
    assert starts[0] - moment >= 60


async def test_a_best_effort_job_starts_exactly_at_its_time(clock: FakeClock) -> None:
    starts: list[float] = []

    async def note() -> None:
        starts.append(clock.monotonic())

    async with TinyQ(clock=clock) as q:
        moment = clock.monotonic()
        for delay in (20, 5, 0.5):
            await q.enqueue(note, delay=delay)
        await clock.advance(60)
        assert [start - moment for start in starts] == [0.5, 5, 20]


async def test_run_at_is_a_moment_in_any_zone(durable: bool, file: Path) -> None:
    starts: list[datetime] = []
    clock = FakeClock("2026-01-06T12:00:00+00:00")
    q = TinyQ(file if durable else None, clock=clock)

    @q.task(durable=durable)
    async def note() -> None:
        starts.append(clock.now())

    async with q:
        job = await note.options(run_at=datetime(2026, 1, 6, 20, 52, tzinfo=ZoneInfo("Asia/Shanghai"))).enqueue()
        assert job.run_at == (moment := datetime(2026, 1, 6, 12, 52, tzinfo=UTC))
        assert not durable or rows(file, "typeof(run_at), run_at") == [("integer", moment.timestamp() * 1e6)]
        await clock.advance(52 * 60 - 0.001)
        assert job.status is State.PENDING
        await ended(job, clock)
    [start] = starts
    assert start >= moment if durable else start == moment  # this clock goes on while a thread works


async def test_a_moment_that_is_past_means_now(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    @q.task(durable=durable)
    async def note() -> None: ...

    await ended(await note.options(run_at=clock.now() - timedelta(days=400)).enqueue())


async def test_zero_overrides_a_tasks_own_options(q: TinyQ, durable: bool, gate: Gate) -> None:
    @q.task(durable=durable, delay=3600, priority=5, result_ttl=60)
    async def later() -> None: ...

    job = await later.options(delay=0, priority=0, result_ttl=0).enqueue()
    await ended(job)  # the clock stands still
    with pytest.raises(JobNotFound):
        await q.get(job.id)
    assert (await later.enqueue()).status is State.PENDING


@pytest.mark.parametrize("as_datetime", [False, True], ids=["seconds", "datetime"])
async def test_a_job_that_has_not_started_by_then_expires(
    open_q: Open, durable: bool, clock: FakeClock, gate: Gate, as_datetime: bool
) -> None:
    q = await open_q(concurrency=1)
    hold = q.task(durable=durable, name="hold", timeout=math.inf)(gate.wait)
    ran: list[str] = []

    @q.task(durable=durable)
    async def offer(name: str) -> None:
        ran.append(name)

    await hold.enqueue("first")
    await eventually(lambda: gate.inside["first"])
    until = [clock.now() + timedelta(seconds=s) if as_datetime else float(s) for s in (10, 1000)]
    expired, in_time = [
        await offer.options(expires=expires).enqueue(name) for expires, name in zip(until, ("a", "b"), strict=True)
    ]
    await clock.advance(11)
    gate.open()
    await ended(expired)
    await ended(in_time)
    assert ran == ["b"]
    assert expired.status is State.CANCELLED
    assert expired.attempts == 0
    assert expired.reason is not None
    assert "expired" in expired.reason
    with pytest.raises(JobCancelled, match="expired"):
        await expired.result()


async def test_a_job_that_started_in_time_may_end_after_it_expires(q: TinyQ, durable: bool, clock: FakeClock, gate: Gate) -> None:
    task = q.task(durable=durable, name="wait", expires=5)(gate.wait)
    job = await task.enqueue("x")
    await eventually(lambda: gate.inside["x"])
    await clock.advance(10)
    gate.open()
    assert (await ended(job)).status is State.DONE


@pytest.mark.parametrize(
    "first", [ValueError("once"), tinyq.Snooze(60), tinyq.RetryAfter(60)], ids=lambda error: type(error).__name__
)
async def test_a_job_that_started_in_time_may_start_again_after_it_expires(
    q: TinyQ, durable: bool, clock: FakeClock, first: Exception
) -> None:
    starts: list[float] = []

    @q.task(durable=durable, retry=[60], expires=5, name="tries")
    async def tries() -> None:
        starts.append(clock.monotonic())
        if len(starts) == 1:
            raise first

    job = await tries.enqueue()
    await eventually(lambda: starts and job.status is State.PENDING)
    await clock.advance(61)
    assert (await ended(job)).status is State.DONE
    assert len(starts) == 2


# Keys


@pytest.fixture
def keyed(q: TinyQ, durable: bool, gate: Gate) -> Task[[str], Any, None]:
    return q.task(durable=durable, key="k", name="keyed")(gate.wait)


async def test_a_pending_job_with_the_same_key_is_reused(keyed: Task[[str], Any, None], gate: Gate) -> None:
    first = await keyed.options(delay=60).enqueue("first")
    second = await keyed.options(delay=1).enqueue("second")
    assert (first.created, second.created) == (True, False)
    assert second.id == first.id
    assert second.run_at == first.run_at


async def test_a_running_job_with_the_same_key_is_reused(keyed: Task[[str], Any, None], gate: Gate) -> None:
    first = await keyed.enqueue("first")
    await eventually(lambda: gate.inside["first"])
    second = await keyed.enqueue("second")
    assert (second.id, second.created) == (first.id, False)
    gate.open()
    await ended(first)
    assert gate.order == ["first"]
    assert await second.result(timeout=20) is None  # type: ignore[func-returns-value]


async def test_a_key_is_free_again_when_its_job_has_ended(keyed: Task[[str], Any, None], gate: Gate) -> None:
    gate.open()
    first = await ended(await keyed.options(result_ttl=3600).enqueue("first"))
    second = await keyed.enqueue("second")
    assert second.created
    assert second.id != first.id
    await ended(second)
    assert gate.order == ["first", "second"]


async def test_a_key_is_free_again_when_its_job_is_dead_or_cancelled(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, key="k", retry=False)
    async def fails() -> None:
        raise ValueError

    dead = await ended(await fails.enqueue())
    waiting = await fails.options(delay=60).enqueue()
    assert (dead.status, waiting.created) == (State.DEAD, True)
    await waiting.cancel()
    assert (await fails.enqueue()).created


async def test_keys_belong_to_their_task(q: TinyQ, durable: bool) -> None:
    a, b = [q.task(durable=durable, key="k", name=name, delay=60)(nothing) for name in "ab"]
    jobs = [await a.enqueue(), await b.enqueue(), await a.options(key="other").enqueue()]
    assert [job.created for job in jobs] == [True] * 3


async def test_queue_puts_at_most_one_behind_the_running_one(keyed: Task[[str], Any, None], gate: Gate) -> None:
    first = await keyed.enqueue("first")
    await eventually(lambda: gate.inside["first"])
    behind = [await keyed.options(on_conflict="queue").enqueue(name) for name in ("second", "third")]
    assert [job.created for job in behind] == [True, False]
    assert behind[0].id == behind[1].id != first.id
    assert behind[0].status is State.PENDING
    gate.open()
    await ended(behind[0])
    assert gate.order == ["first", "second"]
    assert gate.peak == {"first": 1, "second": 1}


async def test_replace_gives_the_pending_job_the_new_arguments_and_time(
    keyed: Task[[str], Any, None], gate: Gate, clock: FakeClock
) -> None:
    replace = keyed.options(on_conflict="replace", delay=10)
    first = await replace.enqueue("a")
    await clock.advance(9)
    second = await replace.enqueue("b")
    assert (second.id, second.created) == (first.id, False)
    assert second.run_at == clock.now() + timedelta(seconds=10)
    await clock.advance(9)
    assert first.status is State.PENDING
    gate.open()
    await ended(first, clock)
    assert gate.order == ["b"]


async def test_replace_makes_a_successor_that_is_not_claimed_while_the_first_runs(
    keyed: Task[[str], Any, None], gate: Gate, clock: FakeClock
) -> None:
    await keyed.enqueue("first")
    await eventually(lambda: gate.inside["first"])
    replace = keyed.options(on_conflict="replace")
    successors = [await replace.enqueue(name) for name in ("second", "third")]
    assert [job.created for job in successors] == [True, False]
    assert successors[0].id == successors[1].id
    await clock.advance(10)
    assert gate.order == ["first"]
    gate.open()
    await ended(successors[0], clock)
    assert gate.order == ["first", "third"]


async def test_raise_raises_for_a_pending_and_for_a_running_one(q: TinyQ, keyed: Task[[str], Any, None], gate: Gate) -> None:
    for name, delay in (("running", 0), ("pending", 60)):
        first = await keyed.options(key=name, delay=delay).enqueue(name)
        if not delay:
            await eventually(lambda: gate.inside["running"])
        with pytest.raises(KeyConflict, match=name):
            await keyed.options(key=name, on_conflict="raise").enqueue("second")
        assert (await q.get(first.id)).id == first.id
    assert (await q.stats()).count() == 2


async def test_a_retry_and_its_successor_merge_and_the_earliest_time_wins(
    q: TinyQ, durable: bool, clock: FakeClock, gate: Gate
) -> None:
    ran: list[str] = []

    @q.task(durable=durable, key="k", on_conflict="queue", retry=[30])
    async def sync(name: str) -> None:
        ran.append(name)
        await gate.opened.wait()
        if name == "first":
            raise ConnectionError

    first = await sync.enqueue("first")
    await eventually(lambda: ran)
    successor = await sync.options(delay=3600).enqueue("second")
    gate.open()
    await ended(first)
    assert first.status is State.CANCELLED
    assert first.reason is not None
    assert "merged" in first.reason
    successor = await q.get(successor.id)
    assert successor.run_at == clock.now() + timedelta(seconds=30)
    await ended(successor, clock, 1)
    assert ran == ["first", "second"]


@pytest.mark.parametrize("rule", ["reuse", "queue", "replace"])
async def test_many_at_once_with_one_key_never_meet_an_internal_error(
    q: TinyQ, durable: bool, rule: tinyq.OnConflict, clock: FakeClock
) -> None:
    active = 0

    @q.task(durable=durable, key="k", on_conflict=rule)
    async def alone() -> int:
        nonlocal active
        active += 1
        await asyncio.sleep(0)
        most = active
        active -= 1
        return most

    jobs = await asyncio.gather(*(alone.enqueue() for _ in range(50)))
    assert 1 <= sum(job.created for job in jobs) <= len({job.id for job in jobs})
    for job in {job.id: job for job in jobs}.values():
        assert await job.result(timeout=20) == 1


# Many at once


async def test_enqueue_many_takes_tasks_with_arguments_and_keywords(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable)
    async def add(x: int, y: int = 0) -> int:
        return x + y

    jobs = await q.enqueue_many([(add, (1,)), (add, (1, 2)), (add, (1,), {"y": 5}), (add, [7])], result_ttl=60)
    assert [await job.result(timeout=20) for job in jobs] == [1, 3, 6, 7]
    assert [job.created for job in jobs] == [True] * 4
    assert await (await q.get(jobs[0].id)).result() == 1


async def test_enqueue_many_of_nothing_is_nothing(q: TinyQ) -> None:
    assert await q.enqueue_many([]) == []


async def test_enqueue_many_is_all_or_nothing(q: TinyQ, durable: bool) -> None:
    @q.task(durable=durable, delay=60)
    async def add(x: int, y: int = 0) -> int:
        return x + y

    keyed = q.task(durable=durable, delay=60, key="k", on_conflict="raise", name="keyed")(nothing)
    taken = await keyed.enqueue()
    good = (add, (1,))
    for bad, error in [((add, ()), TypeError), ((add, (1,), {"z": 1}), TypeError), ((keyed, ()), KeyConflict)]:
        for items in ([good, bad], [bad, good], [good, bad, good]):
            with pytest.raises(error):
                await q.enqueue_many(items)
    wrong: Any
    for wrong in (add, (add,), [add, (1,)], (add, (1,), {}, 0)):
        with pytest.raises(TypeError):
            await q.enqueue_many([good, wrong])
    stats = await q.stats()
    assert stats.count() == 1
    assert (await q.get(taken.id)).status is State.PENDING


async def test_two_of_one_key_in_one_call_conflict_as_a_whole(q: TinyQ, durable: bool) -> None:
    keyed = q.task(durable=durable, delay=60, key="k", on_conflict="raise", name="keyed")(nothing)
    with pytest.raises(KeyConflict):
        await q.enqueue_many([(keyed, ()), (keyed, ())])
    assert (await q.stats()).counts == ()


async def test_enqueue_many_stores_nothing_if_one_argument_is_not_json(open_file: Open) -> None:
    q = await open_file()

    @q.task(durable=True, delay=60)
    async def take(x: Any) -> None: ...

    with pytest.raises(PayloadError, match="take"):
        await q.enqueue_many([(take, (1,)), (take, ({1, 2},))])
    assert (await q.stats()).counts == ()


async def test_enqueue_many_does_not_mix_tiers(open_file: Open) -> None:
    q = await open_file()
    a, b = q.task(durable=True, name="a")(nothing), q.task(name="b")(nothing)
    with pytest.raises(ValueError, match="durable"):
        await q.enqueue_many([(a, ()), (b, ())])
    assert (await q.stats()).counts == ()
    for job in await q.enqueue_many([(a, ()), (b, ())], durable=True):
        await ended(job)


# Looking: get, stats, requeue


async def test_get_finds_a_job_in_every_state_in_which_it_is_kept(
    q: TinyQ, durable: bool, hold: Task[[str], Any, None], gate: Gate
) -> None:
    @q.task(durable=durable, retry=False, result_ttl=60)
    async def fails(really: bool) -> int:
        if really:
            raise ValueError("no")
        return 7

    pending = await hold.options(delay=60).enqueue("later")
    running = await hold.enqueue("now")
    await eventually(lambda: gate.inside["now"])
    dead, done = [await ended(await fails.enqueue(really)) for really in (True, False)]
    cancelled = await hold.options(delay=60).enqueue("never")
    await cancelled.cancel()
    found = [await q.get(job.id) for job in (pending, running, dead, done, cancelled)]
    assert [job.status for job in found] == ["pending", "running", "dead", "done", "cancelled"]
    assert [job.task for job in found] == ["hold", "hold", fails.name, fails.name, "hold"]
    assert [job.created for job in found] == [False] * 5
    assert found[2].error == "ValueError: no"
    assert await found[3].result() == 7


async def test_stats_count_by_queue_task_and_state(q: TinyQ, durable: bool, hold: Task[[str], Any, None], gate: Gate) -> None:
    other = q.task(durable=durable, name="other", queue="emails", delay=60)(nothing)
    for _ in range(2):
        await hold.enqueue("now")
    for _ in range(3):
        await other.enqueue()
    await eventually(lambda: gate.inside["now"] == 2)
    stats = await q.stats()
    assert {(c.queue, c.task, c.state, c.durable, c.count) for c in stats.counts} == {
        ("default", "hold", State.RUNNING, durable, 2),
        ("emails", "other", State.PENDING, durable, 3),
    }
    assert stats.count() == 5
    assert stats.count(queue="emails") == stats.count(task="other") == stats.count(state="pending") == 3
    assert stats.count(queue="emails", state="running") == 0
    assert stats.unknown == ()


async def test_requeue_gives_a_dead_job_all_its_attempts_again(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    broken = True
    attempts: list[int] = []

    @q.task(durable=durable, retry=[0], result_ttl=60)  # it may have run by the time one looks
    async def fragile() -> str:
        attempts.append(tinyq.current_job().attempt)
        if broken:
            raise ConnectionError("down")
        return "up"

    job = await ended(await fragile.enqueue())
    assert job.status is State.DEAD
    broken = False
    assert await q.requeue(job.id) == 1
    assert await (await q.get(job.id)).result(timeout=20) == "up"
    assert attempts == [1, 2, 1]


async def test_requeue_leaves_everything_else_alone(q: TinyQ, durable: bool) -> None:
    task = q.task(durable=durable, name="later", delay=60, result_ttl=3600)(nothing)  # it may have run by the time one looks
    pending, cancelled = await task.enqueue(), await task.enqueue()
    await cancelled.cancel()
    unknown = "0198c0de-0000-7000-8000-000000000000"
    assert await q.requeue(pending.id, cancelled.id, unknown, "no id") == 1
    assert (await q.get(cancelled.id)).status is not State.CANCELLED
    assert pending.status is State.PENDING


# Handles


async def test_a_cancelled_pending_job_never_runs(q: TinyQ, hold: Task[[str], Any, None], clock: FakeClock, gate: Gate) -> None:
    job = await hold.options(delay=5).enqueue("never")
    assert await job.cancel() is True
    assert await job.cancel() is True or job.status is State.CANCELLED
    with pytest.raises(JobCancelled, match="on request"):
        await job.result(timeout=20)
    await clock.advance(10)
    assert gate.order == []
    assert (await q.get(job.id)).status is State.CANCELLED


async def test_cancelling_wakes_whoever_waits_for_the_result(hold: Task[[str], Any, None]) -> None:
    job = await hold.options(delay=5).enqueue("never")
    waiting = asyncio.create_task(job.result())
    await asyncio.sleep(0)
    await job.cancel()
    with pytest.raises(JobCancelled):
        await asyncio.wait_for(waiting, 20)


async def test_cancelling_a_running_job_stops_its_handler(hold: Task[[str], Any, None], gate: Gate) -> None:
    job = await hold.enqueue("x")
    await eventually(lambda: gate.inside["x"])
    assert await job.cancel() is True
    assert job.status is State.CANCELLED
    with pytest.raises(JobCancelled):
        await job.result()


async def test_cancelling_a_finished_job_is_refused_quietly(hold: Task[[str], Any, None], gate: Gate) -> None:
    gate.open()
    job = await ended(await hold.enqueue("x"))
    assert await job.cancel() is False
    assert job.status is State.DONE


async def test_a_job_that_runs_in_another_process_can_be_cancelled_from_here(
    open_file: Open, clock: FakeClock, gate: Gate
) -> None:
    looker, worker = await open_file(worker=False), await open_file()
    cleaning, clean = asyncio.Event(), asyncio.Event()

    @worker.task(name="wait")
    async def lingers() -> None:
        try:
            await gate.wait("x")
        finally:
            cleaning.set()
            await clean.wait()

    job = await looker.enqueue("wait", durable=True)
    await eventually(lambda: gate.inside["x"], clock)
    cancelling = asyncio.create_task(job.cancel())
    await eventually(cleaning.is_set, clock, 0.5)
    await asyncio.wait({cancelling}, timeout=0.5)  # it says nothing while the handler has not stopped
    assert not cancelling.done()
    clean.set()
    await eventually(cancelling.done, clock, 0.5)
    assert await cancelling is True
    assert (await worker.get(job.id)).status is State.CANCELLED


async def test_a_cancel_from_another_process_that_comes_too_late_is_no_error(
    open_file: Open, clock: FakeClock, file: Path, gate: Gate
) -> None:
    looker, worker = await open_file(worker=False), await open_file()
    worker.task(name="block")(gate.block)
    job = await looker.enqueue("block", "x", durable=True)
    await eventually(lambda: gate.inside["x"], clock)
    cancelling = asyncio.create_task(job.cancel())
    await eventually(lambda: query(file, "SELECT cancel_at FROM tinyq_jobs") != [(None,)])
    gate.open()
    await eventually(cancelling.done, clock, 0.5)
    assert await cancelling is False


async def test_promote_makes_a_pending_best_effort_job_durable(open_file: Open, clock: FakeClock, file: Path) -> None:
    q = await open_file()

    @q.task(delay=60, timeout=7)
    async def later(x: int) -> int:
        return x

    job = await later.enqueue(7)
    assert not job.durable
    assert await job.promote() is True
    assert job.durable
    assert job.status is State.PENDING
    assert query(file, "SELECT task, state, payload FROM tinyq_jobs") == [(later.name, "pending", "[[7],{}]")]
    assert job.run_at == clock.now() + timedelta(seconds=60)
    assert await job.promote() is True
    assert (await q.stats()).count() == 1
    await ended(job, clock, 1)
    assert await job.result() == 7


async def test_promote_is_false_for_a_job_that_has_started_or_ended(open_file: Open, gate: Gate) -> None:
    q = await open_file()
    wait = q.task(name="wait")(gate.wait)
    job = await wait.enqueue("x")
    await eventually(lambda: gate.inside["x"])
    assert await job.promote() is False
    gate.open()
    await ended(job)
    assert await job.promote() is False


async def test_promote_says_why_it_cannot(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()

    @q.task(delay=60)
    async def take(x: Any) -> None: ...

    bare, odd = await q.enqueue(nothing, delay=60), await take.enqueue(object())
    with pytest.raises(TypeError, match="registered"):
        await bare.promote()
    with pytest.raises(PayloadError, match="take"):
        await odd.promote()
    async with TinyQ(clock=clock) as memory_only:
        job = await memory_only.task(delay=60, name="later")(nothing).enqueue()
        with pytest.raises(ConfigurationError, match="db"):
            await job.promote()
        assert await job.cancel()
    assert (bare.status, odd.status) == (State.PENDING, State.PENDING)
    assert await bare.cancel()
    assert await odd.cancel()


# What is kept


async def test_a_kept_result_can_be_read_from_another_process(open_file: Open, clock: FakeClock) -> None:
    worker, looker = await open_file(), await open_file(worker=False)

    @worker.task(durable=True, result_ttl=3600)
    async def answer() -> dict[str, Any]:
        return {"answer": [42, None, 1.5]}

    job = await ended(await answer.enqueue())
    found = await looker.get(job.id)
    assert found.status is State.DONE
    assert await found.result() == {"answer": [42, None, 1.5]}
    with pytest.raises(JobNotFound):
        await looker.get((await ended(await answer.options(result_ttl=0).enqueue())).id)


async def test_a_kept_result_can_be_waited_for_from_another_process(open_file: Open, clock: FakeClock, gate: Gate) -> None:
    looker, worker = await open_file(worker=False), await open_file()

    @worker.task(name="answer")
    async def answer() -> int:
        await gate.wait("x")
        return 42

    job = await looker.enqueue("answer", durable=True, result_ttl=3600)
    waiting = asyncio.create_task(job.result())
    await eventually(lambda: gate.inside["x"], clock)
    assert not waiting.done()
    gate.open()
    assert await asyncio.wait_for(waiting, 20) == 42


async def test_a_process_that_only_enqueues_can_wait_for_a_result_while_it_holds_another_handle_of_the_job(
    open_file: Open, clock: FakeClock
) -> None:
    looker, worker = await open_file(worker=False), await open_file()
    worker.task(name="answer")(lambda: 42)
    await worker.pause("default")
    job = await looker.enqueue("answer", durable=True, result_ttl=3600)
    found = await looker.get(job.id)
    waiting = [asyncio.create_task(handle.result()) for handle in (job, found)]
    await worker.resume("default")
    assert await asyncio.wait_for(asyncio.gather(*waiting), 20) == [42, 42]


async def test_who_waits_for_a_result_is_told_though_somebody_else_has_read_first_that_the_job_is_done(
    open_file: Open, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def later(engine: tinyq.Engine, now: int) -> float:
        return math.inf

    monkeypatch.setattr(tinyq.Engine, "look_up", later)
    looker, worker = await open_file(worker=False), await open_file()
    worker.task(name="answer")(lambda: 42)
    job = await looker.enqueue("answer", durable=True, result_ttl=3600)
    waiting = asyncio.create_task(job.result())
    await worker.drain()
    assert (await looker.get(job.id)).status is State.DONE
    assert await asyncio.wait_for(waiting, 20) == 42


async def test_without_result_ttl_another_process_is_told_at_once_that_there_will_be_no_result(
    open_file: Open, clock: FakeClock, gate: Gate
) -> None:
    looker, worker = await open_file(worker=False), await open_file()
    worker.task(name="wait")(gate.wait)
    job = await looker.enqueue("wait", "x", durable=True)
    await eventually(lambda: gate.inside["x"], clock)
    with pytest.raises(NoResult, match="result_ttl"):
        await asyncio.wait_for(job.result(), 20)
    with pytest.raises(NoResult, match="result_ttl"):
        await asyncio.wait_for((await looker.get(job.id)).result(), 20)


async def test_a_result_can_be_waited_for_while_the_claim_of_its_job_is_on_its_way_back(
    open_file: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, arrive = tinyq.SQLiteStore.claim, asyncio.Event()

    async def arrives_late(store: tinyq.SQLiteStore, *args: Any) -> tinyq.Claimed:
        claimed = await claim(store, *args)
        if claimed.rows:  # committed, and so to be seen in the table, but not known to the loop yet
            await arrive.wait()
        return claimed

    monkeypatch.setattr(tinyq.SQLiteStore, "claim", arrives_late)
    q = await open_file()

    @q.task(durable=True)
    async def answer() -> int:
        return 42

    waiting = asyncio.create_task((await answer.enqueue()).result())
    await asyncio.wait({waiting}, timeout=0.5)  # long enough for it to look
    arrive.set()
    assert await asyncio.wait_for(waiting, 20) == 42


async def test_the_failure_of_a_job_can_be_read_from_another_process(open_file: Open) -> None:
    worker, looker = await open_file(), await open_file(worker=False)

    @worker.task(durable=True, retry=False)
    async def fails() -> None:
        raise LookupError("no such order")

    job = await ended(await fails.enqueue())
    with pytest.raises(JobFailed) as raised:
        await (await looker.get(job.id)).result()
    assert (raised.value.type, raised.value.message) == ("LookupError", "no such order")


@pytest.mark.parametrize("outcome", ["result", "failure", "cancelled"])
async def test_what_is_kept_goes_when_its_time_is_over(q: TinyQ, durable: bool, clock: FakeClock, outcome: str) -> None:
    @q.task(durable=durable, retry=False, result_ttl=100, failure_ttl=100)
    async def ends() -> int:
        if outcome == "failure":
            raise ValueError
        return 7

    job = await (ends.options(delay=60) if outcome == "cancelled" else ends).enqueue()
    if outcome == "cancelled":
        await job.cancel()
    await ended(job)
    moment = clock.monotonic()
    await clock.advance(90)
    assert (await q.get(job.id)).status is job.status
    await not_found(q, job.id, clock)
    assert clock.monotonic() - moment >= 100


async def test_what_is_kept_for_ever_stays(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    @q.task(durable=durable)
    async def ends() -> int:
        return 7

    kept, other = [await ended(await ends.options(result_ttl=ttl).enqueue()) for ttl in (math.inf, 86_400 * 5000)]
    clock.block(86_400 * 10_000)
    await not_found(q, other.id, clock)
    assert await (await q.get(kept.id)).result() == 7


# Several processes: other TinyQs on the same file


async def test_namespaces_do_not_see_each_other(open_file: Open, clock: FakeClock) -> None:
    shop, blog = await open_file(namespace="shop"), await open_file(namespace="blog")
    ran: list[str] = []

    @shop.task(name="note", durable=True, key="k")
    async def shop_note() -> None:
        ran.append("shop")

    @blog.task(name="note", durable=True, key="k")
    async def blog_note() -> None:
        ran.append("blog")

    a, b = await shop_note.options(delay=10).enqueue(), await blog_note.options(delay=10).enqueue()
    assert a.created and b.created
    with pytest.raises(JobNotFound):
        await blog.get(a.id)
    assert await blog.requeue(a.id) == 0
    assert (await shop.stats()).count() == (await blog.stats()).count() == 1
    assert await a.cancel()
    await ended(b, clock)
    await clock.advance(5)
    assert ran == ["blog"]


async def test_a_process_that_does_not_work_claims_nothing_durable_but_runs_best_effort_jobs(
    open_file: Open, clock: FakeClock
) -> None:
    q = await open_file(worker=False)

    @q.task
    async def where() -> str:
        return "here"

    durable = await where.options(durable=True).enqueue()
    assert await (await where.enqueue()).result(timeout=20) == "here"
    await clock.advance(10)
    assert await (await where.enqueue()).result(timeout=20) == "here"
    assert durable.status is State.PENDING
    assert durable.attempts == 0


async def test_a_durable_job_can_be_enqueued_by_the_name_of_a_task_that_only_others_know(
    open_file: Open, clock: FakeClock
) -> None:
    web = await open_file()
    job = await web.enqueue("shop.send", 7, copy=True, durable=True, result_ttl=60)
    await clock.advance(5)
    assert job.status is State.PENDING
    assert (await web.stats()).unknown == ("shop.send",)
    worker = await open_file()

    @worker.task(name="shop.send")
    async def send(order: int, copy: bool) -> list[Any]:
        return [order, copy]

    waiting = asyncio.create_task(job.result())
    await eventually(waiting.done, clock)
    assert await waiting == [7, True]
    assert (await web.stats()).unknown == ()


async def test_a_best_effort_job_needs_a_task_that_is_known_here(q: TinyQ) -> None:
    q.task(name="shop.send")(nothing)
    assert (await ended(await q.enqueue("shop.send"))).status is State.DONE
    with pytest.raises(UnknownTask, match=r"shop\.send"):  # as a suggestion
        await q.enqueue("shop.sned")


async def test_a_job_whose_arguments_do_not_fit_this_version_is_parked_until_one_comes_that_they_fit(
    open_file: Open, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = await open_file(worker=False), await open_file()
    ran: list[str] = []

    @old.task(name="send", durable=True, retry=False)
    async def send(user: int) -> None: ...

    @new.task(name="send")
    async def renamed(customer: int) -> None:
        ran.append("misfit")

    job = await send.enqueue(user=7)
    await eventually(lambda: any("parked" in record.getMessage() for record in caplog.records), clock)
    found = await new.get(job.id)
    assert found.status is State.PENDING
    assert found.attempts == 0
    assert ran == []

    await new.stop()
    newest = await open_file()

    @newest.task(name="send")
    async def fits(user: int) -> None:
        ran.append(f"fits {user}")

    await eventually(lambda: ran, clock, 1)
    assert ran == ["fits 7"]


async def test_a_job_that_stays_parked_is_one_incident_and_so_one_line(
    open_file: Open, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file()
    job = await q.enqueue("send", 7, durable=True)
    looks = 0

    @q.task(name="send")
    async def send() -> None: ...

    async with asyncio.timeout(20):
        while looks < 5:  # each puts it off once more
            before = (await q.get(job.id)).run_at
            await clock.advance(15)
            await asyncio.sleep(0.001)
            looks += (await q.get(job.id)).run_at > before
    assert len(lines(caplog, logging.WARNING)) == 1


async def test_a_job_parked_for_an_hour_is_dead_and_never_ran(open_file: Open, clock: FakeClock) -> None:
    old, new = await open_file(worker=False, lease=86_400), await open_file(lease=86_400)
    job = await old.enqueue("send", 7, durable=True)
    enqueued = clock.now()

    @new.task(name="send")
    async def send() -> None:
        raise AssertionError("called with arguments that do not fit")

    async def state() -> State:
        return (await new.get(job.id)).status

    async with asyncio.timeout(30):
        while await state() not in ENDED:
            await clock.advance(10)
            await asyncio.sleep(0.001)
    assert await state() is State.DEAD
    assert timedelta(hours=1) <= clock.now() - enqueued <= timedelta(hours=2)
    assert (await new.get(job.id)).attempts == 0


@pytest.mark.parametrize(
    "payload", ["{", "", '"text"', "[1]", "[[1],[2]]", "[{},{}]", "null", b"\x80\x04K\x01.".decode("latin1"), "[" * 100_000]
)
async def test_an_undecodable_payload_is_dead_without_running_and_kept_and_the_next_job_runs(
    open_file: Open, clock: FakeClock, file: Path, payload: str
) -> None:
    q = await open_file()
    ran: list[int] = []

    @q.task(durable=True, delay=5, failure_ttl=10)
    async def note(x: int) -> None:
        ran.append(x)

    spoilt, sound = await note.enqueue(1), await note.enqueue(2)
    change(file, "UPDATE tinyq_jobs SET payload = ? WHERE payload = '[[1],{}]'", payload)
    await ended(spoilt, clock)
    await ended(sound, clock)
    assert ran == [2]
    assert spoilt.status is State.DEAD
    assert spoilt.attempts == 0
    for _ in range(20):
        await clock.advance(10)
        await asyncio.sleep(0.002)
    kept = await q.get(spoilt.id)
    assert kept.reason is not None
    assert "undecodable" in kept.reason


async def test_a_payload_of_a_later_version_is_kept_without_running(open_file: Open, clock: FakeClock, file: Path) -> None:
    q = await open_file()
    task = q.task(durable=True, delay=5, name="note")(nothing)
    job = await task.enqueue()
    change(file, "UPDATE tinyq_jobs SET payload_version = 99")
    await ended(job, clock)
    assert job.status is State.DEAD
    assert (await q.get(job.id)).reason is not None


# Logs


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "tinyq" and record.levelno == level]


async def test_a_retry_is_one_warning_and_the_end_one_error_with_its_traceback(
    q: TinyQ, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    @q.task(durable=durable, retry=[1, 1])
    async def fails() -> None:
        raise ConnectionError("down\nand out")

    job = await ended(await fails.enqueue(), clock)
    warnings, errors = lines(caplog, logging.WARNING), lines(caplog, logging.ERROR)
    assert len(warnings) == 2
    for record in warnings:
        assert "\n" not in record.getMessage()
        assert record.exc_info is None
        assert fails.name in record.getMessage()
        assert job.id in record.getMessage()
    [error] = errors
    assert fails.name in error.getMessage()
    assert error.exc_info is not None
    assert isinstance(error.exc_info, tuple)
    assert isinstance(error.exc_info[1], ConnectionError)
    assert error.exc_info[2] is not None


async def test_a_job_that_succeeds_is_not_worth_a_line(q: TinyQ, durable: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    caplog.clear()
    await ended(await q.task(durable=durable, name="fine")(nothing).enqueue())
    assert [record.getMessage() for record in caplog.records if record.name == "tinyq"] == []


async def test_no_argument_and_no_result_ever_appears_in_a_log(
    open_q: Open, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "hunter2-secret"
    q = await open_q()

    @q.task(durable=durable, retry=[0], result_ttl=60)
    async def handles(kind: str, password: str, *, token: str = "") -> str:
        if kind == "fails":
            raise ConnectionError("down")
        if kind == "snoozes" and clock.monotonic() < 1005:
            raise tinyq.Snooze(10)
        if kind == "cancels":
            raise tinyq.Cancel("obsolete")
        if kind == "hangs":
            await asyncio.Event().wait()
        return password

    @q.task(durable=durable)
    def blocks(password: str) -> None:
        gate.block("thread")

    jobs = [
        await handles.options(timeout=1, expires=60).enqueue(kind, secret, token=secret)
        for kind in ("returns", "fails", "snoozes", "cancels", "hangs")
    ]
    jobs.append(await handles.options(delay=5, expires=1).enqueue("expires", secret))
    pending = await handles.options(delay=3600, key="key").enqueue("never", secret)
    thread = await blocks.options(timeout=1).enqueue(secret)
    await eventually(lambda: gate.inside["thread"])
    await pending.cancel()
    for job in jobs:
        await ended(job, clock, 0.5)
    gate.open()
    await eventually(lambda: thread.attempts == 1 and thread.status is State.PENDING)
    with pytest.raises(TypeError):
        await handles.enqueue(secret, secret, secret, secret)  # type: ignore[call-arg]
    left = await handles.options(delay=7200).enqueue("left", secret)
    await q.stop(grace=0)
    assert left.status is not State.RUNNING
    formatter = logging.Formatter("%(message)s")
    assert len(caplog.records) > 10
    assert [text for record in caplog.records if secret in (text := formatter.format(record))] == []


async def test_start_says_what_it_runs_on(open_q: Open, durable: bool, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    await open_q(worker_name="shop-1")
    [line] = lines(caplog, logging.INFO)
    assert tinyq.__version__ in line.getMessage()
    assert "shop-1" in line.getMessage()
    if durable:
        assert str(file) in line.getMessage()
        assert sqlite3.sqlite_version in line.getMessage()


# Trouble with the store


async def test_an_outcome_that_cannot_be_written_yet_is_written_later_and_said_once(
    open_file: Open, clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    q = await open_file(worker=True)
    wait = q.task(name="wait", durable=True, result_ttl=3600)(gate.wait)
    job = await wait.enqueue("x")
    await eventually(lambda: gate.inside["x"])
    change(file, "ALTER TABLE tinyq_jobs RENAME TO hidden")
    gate.open()
    incident = "durable outcomes failed and will be tried again"
    await eventually(lambda: any(incident in record.getMessage() for record in caplog.records))
    for _ in range(50):
        await clock.advance(1)
        await asyncio.sleep(0.001)
    assert job.status not in ENDED
    change(file, "ALTER TABLE hidden RENAME TO tinyq_jobs")
    await ended(job, clock, 1)
    assert job.status is State.DONE
    assert gate.order == ["x"]
    counted = Counter(record.getMessage().split(":")[0] for record in lines(caplog, logging.ERROR))
    assert set(counted.values()) == {1}  # one line an incident, for each loop
    assert query(file, "SELECT state, attempts FROM tinyq_jobs") == [("done", 1)]


async def test_an_outcome_waits_for_another_connections_write_transaction(
    open_file: Open, file: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file()
    wait = q.task(name="wait", durable=True)(gate.wait)
    job = await wait.enqueue("x")
    await eventually(lambda: gate.inside["x"])
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    gate.open()
    await eventually(lambda: gate.inside.total() == 0)
    await asyncio.sleep(0.05)  # some time for the outcome to meet the lock
    assert job.status not in ENDED
    other.execute("COMMIT")
    other.close()
    await ended(job)
    assert job.status is State.DONE
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_enqueue_waits_for_another_connections_write_transaction(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    task = q.task(name="task", durable=True, delay=60)(nothing)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    enqueuing = [asyncio.create_task(task.enqueue()) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(done.done() for done in enqueuing)
    other.execute("COMMIT")
    other.close()
    jobs = [await asyncio.wait_for(one, 20) for one in enqueuing]
    assert len({job.id for job in jobs}) == 5


async def test_claims_that_meet_a_lock_are_said_once_and_go_on_afterwards(
    open_file: Open, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    q = await open_file(lease=86_400)  # so that after the first jobs nothing else than claims is to be written
    for n in range(3):
        await ended(await q.task(name=f"first {n}", durable=True)(nothing).enqueue())
    job = await q.task(name="task", durable=True, delay=5)(nothing).enqueue()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await eventually(lambda: lines(caplog, logging.ERROR), clock)
    for _ in range(30):
        await clock.advance(1)
        await asyncio.sleep(0.02)
    assert job.status is State.PENDING
    other.execute("COMMIT")
    other.close()
    await ended(job, clock, 1)
    errors = [record.getMessage() for record in lines(caplog, logging.ERROR)]
    assert len([line for line in errors if "claims" in line]) == 1
    await eventually(
        lambda: any(
            "claims" in line and "again" in line for line in map(logging.LogRecord.getMessage, lines(caplog, logging.INFO))
        ),
        clock,
    )


async def test_trouble_with_the_store_leaves_best_effort_jobs_alone(open_file: Open, file: Path) -> None:
    q = await open_file()
    change(file, "ALTER TABLE tinyq_jobs RENAME TO hidden")
    assert (await ended(await q.enqueue(nothing))).status is State.DONE
    with pytest.raises(tinyq.StoreError):
        await q.task(name="task", durable=True)(nothing).enqueue()
    change(file, "ALTER TABLE hidden RENAME TO tinyq_jobs")


async def test_best_effort_jobs_run_while_a_durable_enqueue_waits_for_a_lock(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file()

    @q.task(durable=True)
    async def task() -> None: ...

    await ended(await task.enqueue())
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    enqueuing = asyncio.create_task(task.enqueue())
    await asyncio.sleep(0.05)  # some time for it to meet the lock
    for _ in range(5):
        await clock.advance(0.2)  # so that claims look at the table, too
    best_effort = asyncio.create_task((await q.enqueue(nothing)).result())
    await asyncio.wait({enqueuing, best_effort}, return_when=asyncio.FIRST_COMPLETED)
    came_first = [best_effort.done(), enqueuing.done()]
    other.execute("COMMIT")
    other.close()
    await asyncio.gather(enqueuing, best_effort, return_exceptions=True)
    assert came_first == [True, False]


async def test_a_loop_says_an_incident_once_whatever_kind_of_error_it_begins_with(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    busy, gone = tinyq.StoreBusy("locked"), tinyq.StoreError("disk is gone")
    sequences: list[list[Exception]] = [
        [gone] * 10,
        [gone, *[busy] * 10],
        [busy, *[gone] * 10],
        [busy, busy, gone, busy, gone, gone],
    ]
    for errors in sequences:
        caplog.clear()

        async def step(now: int, errors: list[Exception] = errors) -> float:
            if errors:
                raise errors.pop(0)
            return math.inf

        loop = asyncio.create_task(tinyq.drive("claims", step, asyncio.Event(), clock, asyncio.Event()))
        await clock.advance(300)
        loop.cancel()
        assert errors == []
        assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.INFO]


async def test_a_loop_that_a_lock_has_held_up_for_long_goes_on_when_it_is_woken(clock: FakeClock) -> None:
    wake, busy, rounds = asyncio.Event(), [tinyq.StoreBusy("locked")] * 30, list[int]()

    async def step(now: int) -> float:
        rounds.append(now)
        if busy:
            raise busy.pop()
        return math.inf

    loop = asyncio.create_task(tinyq.drive("claims", step, wake, clock, asyncio.Event()))
    await eventually(lambda: len(rounds) == 21)
    assert len(set(rounds)) == 1
    busy.clear()
    wake.set()
    await eventually(lambda: len(rounds) == 22)
    loop.cancel()
    assert len(set(rounds)) == 1


async def test_a_loop_that_a_lock_holds_up_tries_again_within_a_second(clock: FakeClock) -> None:
    busy, rounds = [tinyq.StoreBusy("locked")] * 25, list[int]()

    async def step(now: int) -> float:
        rounds.append(now)
        if busy:
            raise busy.pop()
        return math.inf

    loop = asyncio.create_task(tinyq.drive("claims", step, asyncio.Event(), clock, asyncio.Event()))
    await eventually(lambda: len(rounds) == 26, clock)
    loop.cancel()
    assert max(after - before for before, after in itertools.pairwise(rounds)) <= 1_000_000
