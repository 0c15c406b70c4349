"""What is done to be fast, where it could cost what is promised: shared insertions, jobs that start where they are enqueued
or are handed over without a claim, and outcomes that are written together."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, edit, eventually, stopped_at_once

import tinyq
from tinyq import Job, JobCancelled, JobNotFound, Snooze, SQLiteStore, State, StoreBusy, StoreError, SystemClock, TinyQ

ROOT = Path(__file__).parents[1]


def query(file: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file, timeout=10)) as db, db:
        return db.execute(sql, values).fetchall()


def stored_ids(file: Path) -> list[str]:
    return [tinyq.id_text(id) for (id,) in query(file, "SELECT id FROM tinyq_jobs ORDER BY seq")]


@contextmanager
def locked(file: Path) -> Iterator[sqlite3.Connection]:
    """Another connection that holds the write lock."""
    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield db
        if db.in_transaction:
            db.execute("ROLLBACK")


def new_row(number: int = 0, **fields: Any) -> tinyq.JobRow:
    now = SystemClock().time()
    row = tinyq.JobRow(tinyq.new_id(now), "some.task", "default", 0, now, now)
    row.durable, row.payload = True, f"[[{number}],{{}}]"
    for name, value in fields.items():
        setattr(row, name, value)
    return row


async def outcomes(futures: Sequence[Awaitable[Any]]) -> list[Any]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*futures, return_exceptions=True)


async def enqueued(job: Awaitable[Job[Any]]) -> Job[Any] | BaseException:
    """The job, or what its enqueue raised. (Whoever gathers a cancelled task gets another CancelledError.)"""
    try:
        return await job
    except (Exception, asyncio.CancelledError) as error:
        return error


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def engine_of(q: TinyQ) -> Any:
    assert q._engine is not None
    return q._engine


async def unhurried(q: TinyQ) -> None:
    """Until its claim loop has found out that nothing is due, and nothing is being written."""
    engine = engine_of(q)
    await eventually(lambda: not engine.durable.hungry and not engine.crew.claims_under_way and engine.durable_store.idle)


@pytest.fixture
async def store(file: Path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(str(file))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers give up on a locked file after a moment."""
    monkeypatch.setattr(tinyq, "PATIENCE", 0.2)
    usual = SQLiteStore._submit.__defaults__ or ()
    monkeypatch.setattr(SQLiteStore._submit, "__defaults__", tuple(0.2 if value == 10.0 else value for value in usual))


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many new rows each transaction stored."""
    sizes: list[int] = []
    original = tinyq.in_transaction

    def in_transaction(db: Any, namespace: str, ops: Any, deadline: float) -> Any:
        answers = original(db, namespace, ops, deadline)
        if size := sum(len(op.rows) for op in ops):
            sizes.append(size)
        return answers

    monkeypatch.setattr(tinyq, "in_transaction", in_transaction)
    return sizes


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of all jobs that came out of claims."""
    ids: list[str] = []
    original = tinyq.claim_rows

    def claim_rows(*given: Any) -> Any:
        answer = original(*given)
        ids.extend(tinyq.id_text(row.id) for row in answer.rows)
        return answer

    monkeypatch.setattr(tinyq, "claim_rows", claim_rows)
    return ids


class Halt:
    """Stops whoever calls a function of tinyq's, in its thread, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.armed = False
        original = getattr(tinyq, name)

        def stop(*given: Any) -> Any:
            if self.armed:
                self.armed = False
                self.entered.set()
                assert self.go_on.wait(30)
            return original(*given)

        monkeypatch.setattr(tinyq, name, stop)

    async def reached(self) -> None:
        await eventually(self.entered.is_set)


# Enqueues that share an operation


async def test_thousands_of_concurrent_enqueues_are_each_stored_once_in_few_units(
    open_file: Open, file: Path, units: list[int]
) -> None:
    q = await open_file(worker=False)
    jobs = await outcomes([q.enqueue("some.task", number, durable=True) for number in range(3_000)])
    assert sorted(stored_ids(file)) == sorted(job.id for job in jobs)
    numbers = [number for (number,) in query(file, "SELECT payload ->> '$[0][0]' FROM tinyq_jobs")]
    assert sorted(numbers) == list(range(3_000)), numbers[:3]
    assert sum(units) == 3_000
    assert max(units) < 2 * tinyq.GROUP
    assert len(units) <= 10


@pytest.mark.parametrize("count", [2, 3, 1_000, 2_500])
async def test_a_row_that_cannot_be_bound_fails_its_own_caller_only(store: SQLiteStore, file: Path, count: int) -> None:
    rows = [new_row(number) for number in range(count)]
    bad = count // 2
    rows[bad].payload = object()  # type: ignore[assignment]
    answers = await outcomes([store.add(row, row.created) for row in rows])
    assert isinstance(answers.pop(bad), StoreError)
    assert set(answers) == {None}
    del rows[bad]
    assert sorted(stored_ids(file)) == sorted(tinyq.id_text(row.id) for row in rows)


async def test_a_row_whose_id_exists_fails_its_own_caller_only(store: SQLiteStore, file: Path) -> None:
    old, rows = new_row(-1), [new_row(number) for number in range(5)]
    await store.add(old, old.created)
    rows[2].id = old.id
    answers = await outcomes([store.add(row, row.created) for row in rows])
    assert [isinstance(answer, StoreError) for answer in answers] == [False, False, True, False, False]
    assert query(file, "SELECT count(*), sum(payload = '[[-1],{}]') FROM tinyq_jobs") == [(5, 1)]


async def test_of_two_riders_with_one_id_the_first_is_stored(store: SQLiteStore, file: Path) -> None:
    first, second, third = (new_row(number) for number in range(3))
    second.id = first.id
    answers = await outcomes([store.add(row, row.created) for row in (first, second, third)])
    assert [isinstance(answer, StoreError) for answer in answers] == [False, True, False]
    assert stored_ids(file) == [tinyq.id_text(first.id), tinyq.id_text(third.id)]


async def test_a_bad_row_costs_the_other_verbs_of_its_unit_nothing(store: SQLiteStore, file: Path) -> None:
    bad, good, listed = new_row(1, payload=object()), new_row(2), new_row(3)
    answers = await outcomes(
        [
            store.add(bad, bad.created),
            store.add(good, good.created),
            store.insert([listed], listed.created),
            store.pause(["emails"]),
        ]
    )
    assert [isinstance(answer, StoreError) for answer in answers] == [True, False, False, False]
    assert sorted(stored_ids(file)) == sorted(tinyq.id_text(row.id) for row in (good, listed))
    assert query(file, "SELECT queue FROM tinyq_paused") == [("emails",)]


async def test_a_rider_that_is_cancelled_before_the_unit_begins_leaves_nothing(store: SQLiteStore, file: Path) -> None:
    rows = [new_row(number) for number in range(3)]
    futures = [store.add(row, row.created) for row in rows]
    futures[1].cancel()
    answers = await outcomes(futures)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert stored_ids(file) == [tinyq.id_text(rows[0].id), tinyq.id_text(rows[2].id)]


async def test_a_rider_that_is_cancelled_while_its_unit_is_written_leaves_a_whole_job(
    store: SQLiteStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt = Halt(monkeypatch, "in_transaction")
    halt.armed = True
    rows = [new_row(number) for number in range(3)]
    futures = [store.add(row, row.created) for row in rows]
    await halt.reached()
    futures[1].cancel()
    halt.go_on.set()
    answers = await outcomes(futures)
    assert isinstance(answers[1], asyncio.CancelledError)
    assert stored_ids(file) == [tinyq.id_text(row.id) for row in rows]


async def test_a_rider_that_is_cancelled_while_its_unit_waits_for_the_lock_leaves_nothing_or_a_whole_job(
    store: SQLiteStore, file: Path
) -> None:
    rows = [new_row(number) for number in range(3)]
    with locked(file):
        futures = [store.add(row, row.created) for row in rows]
        await eventually(lambda: not store._waiting)  # in the thread
        futures[1].cancel()
        await eventually(lambda: store._unit and not any(row is rows[1] for op in store._unit for row in op.rows))
    await outcomes(futures)
    assert stored_ids(file) == [tinyq.id_text(rows[0].id), tinyq.id_text(rows[2].id)]


async def test_riders_who_are_all_cancelled_leave_a_store_that_works(store: SQLiteStore, file: Path) -> None:
    futures = [store.add(row, row.created) for row in (new_row(1), new_row(2))]
    for future in futures:
        future.cancel()
    await outcomes(futures)
    row = new_row(3)
    async with asyncio.timeout(10):
        await store.add(row, row.created)
    assert stored_ids(file) == [tinyq.id_text(row.id)]


async def test_riders_are_answered_though_one_is_cancelled_while_each_is_written_alone(
    store: SQLiteStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row is bad, so each is tried alone; at that moment the file is locked, and one of the callers goes."""
    lock = sqlite3.connect(file, isolation_level=None, timeout=10)
    original = SQLiteStore._each_alone
    locks: list[object] = []

    def each_alone(self: SQLiteStore, carrier: tinyq.Op) -> Sequence[tinyq.Op]:
        locks.append(lock.execute("BEGIN IMMEDIATE"))
        return original(self, carrier)

    monkeypatch.setattr(SQLiteStore, "_each_alone", each_alone)
    rows = [new_row(0, payload=object()), *(new_row(number) for number in range(1, 5))]
    futures = [store.add(row, row.created) for row in rows]
    with closing(lock):
        await eventually(lambda: locks)
        futures[2].cancel()
        await eventually(lambda: store._unit and not any(row is rows[2] for op in store._unit for row in op.rows))
        lock.execute("ROLLBACK")
    _, waiting = await asyncio.wait(futures, timeout=10)
    for future in waiting:
        future.cancel()
    assert not waiting, f"{len(waiting)} of {len(futures)} callers were never answered"
    assert isinstance(futures[0].exception(), StoreError)
    assert stored_ids(file) == [tinyq.id_text(rows[number].id) for number in (1, 3, 4)]


async def test_a_failure_that_nobody_waits_for_any_more_is_not_complained_about(store: SQLiteStore, file: Path) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    row = new_row()
    with locked(file):
        future = store.add(row, row.created)
        await eventually(lambda: not store._waiting)
        future.cancel()
        file.rename(file.with_name("elsewhere"))
        await eventually(lambda: store._flushing is None)
        file.with_name("elsewhere").rename(file)
    for number in range(3):  # until no thread holds on to what is over
        another = new_row(number)
        await store.add(another, another.created)
    gc.collect()
    await turns(3)
    assert complaints == []


async def test_when_the_file_is_moved_every_rider_is_told_and_once_it_is_back_enqueues_work(
    store: SQLiteStore, file: Path
) -> None:
    with locked(file):
        futures = [store.add(row, row.created) for row in map(new_row, range(1_500))]
        await eventually(lambda: store._unit)
        futures += [store.add(row, row.created) for row in map(new_row, range(5))]
        file.rename(file.with_name("elsewhere"))
        answers = await outcomes(futures)
    assert {type(answer) for answer in answers} == {StoreError}
    assert "was deleted or replaced" in str(answers[0])
    file.with_name("elsewhere").rename(file)
    row = new_row()
    async with asyncio.timeout(10):
        await store.add(row, row.created)
    assert stored_ids(file) == [tinyq.id_text(row.id)]


async def test_riders_of_a_store_that_is_closed_are_stored_or_told(store: SQLiteStore, file: Path) -> None:
    rows = [new_row(number) for number in range(2_500)]
    futures = [store.add(row, row.created) for row in rows]
    async with asyncio.timeout(20):
        await store.close()
    answers = await outcomes(futures)
    assert sorted(stored_ids(file)) == sorted(
        tinyq.id_text(row.id) for row, answer in zip(rows, answers, strict=True) if answer is None
    )
    with pytest.raises(StoreError, match="is closed"):
        store.add(new_row(), 0)


async def test_when_the_file_stays_locked_every_rider_is_told_that_it_is_busy(
    open_file: Open, file: Path, impatient: None
) -> None:
    q = await open_file(worker=False)
    with locked(file):
        answers = await outcomes([q.enqueue("some.task", number, durable=True) for number in range(1_200)])
    assert {type(answer) for answer in answers} == {StoreBusy}
    assert stored_ids(file) == []
    job = await q.enqueue("some.task", 0, durable=True)
    assert stored_ids(file) == [job.id]


@pytest.mark.parametrize("held", [False, True], ids=["free", "locked"])
async def test_each_enqueue_of_a_burst_during_stop_is_stored_or_raises(
    file: Path, held: bool, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "EXTRA", 0.2)
    q = TinyQ(file, worker=False)
    await q.start()
    tasks = [asyncio.create_task(q.enqueue("some.task", number, durable=True)) for number in range(500)]
    with locked(file) if held else contextlib.nullcontext():
        stopping = None
        for number in range(100):
            await asyncio.sleep(0)
            tasks += [asyncio.create_task(q.enqueue("some.task", number, durable=True)) for _ in range(5)]
            if number == 20:
                stopping = asyncio.create_task(q.stop(grace=0))
        assert stopping is not None
        answers = await outcomes(tasks)
        async with asyncio.timeout(20):
            await stopping
    jobs = [answer for answer in answers if isinstance(answer, Job)]
    assert {type(answer) for answer in answers} - {Job} <= {StoreBusy, StoreError, tinyq.ShuttingDown}
    assert tinyq.ShuttingDown in map(type, answers)
    assert sorted(stored_ids(file)) == sorted(job.id for job in jobs)


async def test_riders_of_two_event_loops_do_not_meet(file: Path) -> None:
    async def burst(first: int) -> list[str]:
        async with TinyQ(file, worker=False) as q:
            return [job.id for job in await outcomes([q.enqueue("t", first + n, durable=True) for n in range(400)])]

    answers = await asyncio.gather(*(asyncio.to_thread(asyncio.run, burst(first)) for first in (0, 1_000)))
    assert sorted(stored_ids(file)) == sorted(id for ids in answers for id in ids)


async def test_riders_of_two_instances_in_one_loop_do_not_meet(tmp_path: Path, open_at: OpenAt) -> None:
    files = [tmp_path / "a.db", tmp_path / "b.db"]
    qs = [await open_at(file, worker=False) for file in files]
    jobs = await outcomes([qs[n % 2].enqueue("t", n, durable=True) for n in range(400)])
    for which, file in enumerate(files):
        assert sorted(stored_ids(file)) == sorted(job.id for job in jobs[which::2])


# A cancelled enqueue can be asked about


@pytest.mark.parametrize("held", [False, True], ids=["free", "locked"])
@pytest.mark.parametrize("way", ["shared", "handed over", "with a key"])
async def test_a_cancelled_enqueue_tells_whether_its_job_exists(open_file: Open, file: Path, way: str, held: bool) -> None:
    q = await open_file(worker=way == "handed over", concurrency=100)
    gate = asyncio.Event()

    @q.task(name="waits")
    async def waits(number: int) -> None:
        await gate.wait()

    if way == "handed over":
        await unhurried(q)
    found: list[bool] = []
    for number, ticks in enumerate([*range(1, 12), 20, 50, 100, 200, 400, 800]):
        options: dict[str, Any] = {"key": str(number)} if way == "with a key" else {}
        with locked(file) if held else contextlib.nullcontext():
            task = asyncio.create_task(enqueued(waits.options(durable=True, **options).enqueue(number)))
            await turns(ticks)
            task.cancel()
            [error] = await outcomes([task])
        if isinstance(error, Job):
            continue
        assert isinstance(error, asyncio.CancelledError)
        job: Job[None] = error.job  # type: ignore[attr-defined]
        exists = await job.exists()
        assert exists == (job.id in stored_ids(file)), (number, ticks)
        assert exists == bool(query(file, "SELECT 1 FROM tinyq_jobs WHERE payload ->> '$[0][0]' = ?", number))
        found.append(exists)
    assert False in found
    gate.set()


async def test_an_enqueue_that_is_cancelled_while_it_is_written_says_that_the_job_exists(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file(worker=False)
    halt = Halt(monkeypatch, "insert_all")
    halt.armed = True
    task = asyncio.create_task(enqueued(q.enqueue("some.task", durable=True)))
    await halt.reached()
    task.cancel()
    [error] = await outcomes([task])
    asking = asyncio.create_task(error.job.exists())
    await turns(5)
    assert not asking.done()  # it cannot be known yet
    halt.go_on.set()
    assert await asking is True
    assert stored_ids(file) == [error.job.id]


# A job is handed over to the worker that enqueues it


def held_slots(q: TinyQ) -> int:
    """How many of its slots are taken or kept."""
    crew = engine_of(q).crew
    assert crew._handed >= 0
    return int(engine_of(q).config.concurrency - crew._slots.shared)


async def test_on_an_idle_worker_a_durable_job_starts_without_a_claim(
    open_file: Open, file: Path, clock: FakeClock, claimed: list[str]
) -> None:
    q = await open_file(lease=30)
    gate, started = asyncio.Event(), asyncio.Event()

    @q.task(name="waits")
    async def waits() -> None:
        started.set()
        await gate.wait()

    await unhurried(q)
    job = await q.enqueue(waits, durable=True)
    stored = query(file, "SELECT state, worker, lease, attempts, claim_no, ready, started FROM tinyq_jobs")
    now = clock.time()
    assert stored == [("running", engine_of(q).worker, now + 30_000_000, 1, 1, None, now)]
    assert (job.status, job.attempts) == (State.RUNNING, 1)
    async with asyncio.timeout(10):
        await started.wait()
        gate.set()
        await job.result()
    await eventually(lambda: stored_ids(file) == [])
    assert claimed == []


async def plain(q: TinyQ) -> Any:
    """A task that ends at once."""

    @q.task(name="ends")
    async def ends() -> None: ...

    await unhurried(q)
    return ends


async def test_a_job_behind_one_that_is_due_is_claimed(open_file: Open, file: Path, claimed: list[str]) -> None:
    q = await open_file()
    task = await plain(q)
    await q.enqueue("of.another.process", durable=True)
    await unhurried(q)
    job = await q.enqueue(task, durable=True)
    assert query(file, "SELECT state FROM tinyq_jobs WHERE task = 'of.another.process'") == [("pending",)]
    await job.result(10)
    assert claimed == [job.id]
    assert held_slots(q) == 0


async def test_a_job_of_a_paused_queue_waits(open_file: Open, file: Path, claimed: list[str]) -> None:
    q = await open_file()
    task = await plain(q)
    await q.pause("default")
    job = await q.enqueue(task, durable=True)
    await FakeClock.settle()
    assert query(file, "SELECT state, attempts, worker FROM tinyq_jobs") == [("pending", 0, None)]
    assert held_slots(q) == 0
    await q.resume("default")
    await job.result(10)


async def test_a_job_of_a_queue_that_another_process_has_just_paused_waits(open_file: Open, file: Path) -> None:
    q = await open_file()
    task = await plain(q)
    query(file, "INSERT INTO tinyq_paused (namespace, queue) VALUES ('default', 'default')")
    await q.enqueue(task, durable=True)
    await FakeClock.settle()
    assert query(file, "SELECT state, attempts, worker FROM tinyq_jobs") == [("pending", 0, None)]
    assert held_slots(q) == 0


async def test_a_job_for_later_waits_for_its_time(open_file: Open, file: Path, clock: FakeClock, claimed: list[str]) -> None:
    q = await open_file()
    task = await plain(q)
    job = await q.enqueue(task, durable=True, delay=60)
    await FakeClock.settle()
    assert query(file, "SELECT state, attempts, lease FROM tinyq_jobs") == [("pending", 0, None)]
    await eventually(lambda: job.status is State.DONE, clock, 5)
    assert claimed == [job.id]


async def test_a_job_with_a_key_is_claimed(open_file: Open, claimed: list[str]) -> None:
    q = await open_file()
    task = await plain(q)
    job = await q.enqueue(task, durable=True, key="k")
    await job.result(10)
    assert claimed == [job.id]


async def test_a_job_waits_while_all_slots_are_taken(open_file: Open, file: Path, claimed: list[str]) -> None:
    q = await open_file(concurrency=1)
    gate = asyncio.Event()

    @q.task(name="waits")
    async def waits() -> None:
        await gate.wait()

    await unhurried(q)
    first, second = [await q.enqueue(waits, durable=True) for _ in range(2)]
    assert query(file, "SELECT state FROM tinyq_jobs ORDER BY seq") == [("running",), ("pending",)]
    gate.set()
    await second.result(10)
    assert claimed == [second.id]
    assert first.status is State.DONE


async def test_a_plain_function_waits_while_no_thread_is_free(open_file: Open, file: Path, claimed: list[str]) -> None:
    q = await open_file(threads=1)
    gate = threading.Event()

    @q.task(name="blocks")
    def blocks() -> None:
        assert gate.wait(30)

    await unhurried(q)
    try:
        _, second = [await q.enqueue(blocks, durable=True) for _ in range(2)]
        assert query(file, "SELECT state FROM tinyq_jobs ORDER BY seq") == [("running",), ("pending",)]
    finally:
        gate.set()
    await second.result(10)
    assert claimed == [second.id]


async def test_a_job_of_a_worker_that_is_quiesced_is_left_to_others(open_file: Open, file: Path, claimed: list[str]) -> None:
    q = await open_file()
    task = await plain(q)
    await q.quiesce()
    await q.enqueue(task, durable=True)
    await FakeClock.settle()
    assert query(file, "SELECT state, attempts, lease FROM tinyq_jobs") == [("pending", 0, None)]


async def test_a_job_on_its_way_when_its_worker_is_quiesced_is_handed_back(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file()
    ran: list[int] = []

    @q.task(name="runs")
    async def runs() -> None:
        ran.append(1)

    await unhurried(q)
    halt = Halt(monkeypatch, "insert_all")
    halt.armed = True
    enqueueing = asyncio.create_task(q.enqueue(runs, durable=True))
    await halt.reached()
    await q.quiesce()
    halt.go_on.set()
    await enqueueing
    await eventually(lambda: query(file, "SELECT state, attempts, lease FROM tinyq_jobs") == [("pending", 0, None)])
    assert ran == []
    assert held_slots(q) == 0


async def test_the_slot_of_a_job_that_could_not_be_stored_is_given_back(open_file: Open, file: Path, impatient: None) -> None:
    q = await open_file(concurrency=1)
    task = await plain(q)
    with locked(file), pytest.raises(StoreBusy):
        await q.enqueue(task, durable=True)
    assert held_slots(q) == 0
    async with asyncio.timeout(10):
        await (await q.enqueue(task, durable=True)).result()
    assert stored_ids(file) == []


@pytest.mark.parametrize("held", [False, True], ids=["free", "locked"])
async def test_the_slot_of_an_enqueue_that_is_cancelled_is_given_back(open_file: Open, file: Path, held: bool) -> None:
    q = await open_file(concurrency=1)
    task = await plain(q)
    for ticks in [*range(12), 20, 50, 100, 200, 400]:
        with locked(file) if held else contextlib.nullcontext():
            enqueueing = asyncio.create_task(q.enqueue(task, durable=True))
            await turns(ticks)
            enqueueing.cancel()
            await outcomes([enqueueing])
        await eventually(lambda: held_slots(q) == 0 and stored_ids(file) == [])
    async with asyncio.timeout(10):
        await (await q.enqueue(task, durable=True)).result()


async def test_the_slot_of_a_job_of_a_file_that_is_gone_is_given_back(open_file: Open, file: Path) -> None:
    q = await open_file(concurrency=1)
    task = await plain(q)
    file.rename(file.with_name("elsewhere"))
    with pytest.raises(StoreError, match="was deleted or replaced"):
        await q.enqueue(task, durable=True)
    file.with_name("elsewhere").rename(file)
    assert held_slots(q) == 0
    async with asyncio.timeout(10):
        await (await q.enqueue(task, durable=True)).result()


async def test_a_drain_waits_for_a_job_on_its_way_into_the_file(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    q = await open_file()
    ran: list[int] = []

    @q.task(name="runs")
    async def runs() -> None:
        ran.append(1)

    await unhurried(q)
    halt = Halt(monkeypatch, "insert_all")
    halt.armed = True
    enqueueing = asyncio.create_task(q.enqueue(runs, durable=True))
    await halt.reached()
    draining = asyncio.create_task(q.drain())
    await FakeClock.settle()
    assert not draining.done()
    halt.go_on.set()
    async with asyncio.timeout(10):
        await enqueueing
        await draining
    assert ran == [1]


async def test_a_job_on_its_way_into_the_file_when_tinyq_stops_is_handed_back(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file()
    ran: list[int] = []

    @q.task(name="runs")
    async def runs() -> None:
        ran.append(1)

    await unhurried(q)
    halt = Halt(monkeypatch, "insert_all")
    halt.armed = True
    enqueueing = asyncio.create_task(q.enqueue(runs, durable=True))
    await halt.reached()
    stopping = asyncio.create_task(stopped_at_once(q, clock))
    await turns(5)
    halt.go_on.set()
    await outcomes([enqueueing, stopping])
    assert query(file, "SELECT state, attempts, lease FROM tinyq_jobs") == [("pending", 0, None)]
    assert ran == []


async def test_a_bad_row_costs_a_job_that_is_handed_over_in_the_same_unit_nothing(store: SQLiteStore, file: Path) -> None:
    told: list[tuple[int, str | None]] = []
    futures = []
    for number in range(3):
        row = new_row(number, worker="w", lease=9, started=1, payload=object() if number == 1 else f"[[{number}],{{}}]")

        def then(answer: Sequence[tinyq.Inserted] | None, number: int = number) -> None:
            told.append((number, answer[0].verdict if answer else None))

        futures.append(store.hand_over(row, row.created, then))
    answers = await outcomes(futures)
    assert sorted(told) == [(0, "started"), (1, None), (2, "started")]
    assert isinstance(answers[1], StoreError)
    seqs = [answers[number][0].row.seq for number in (0, 2)]
    assert query(file, "SELECT seq, payload ->> '$[0][0]', state FROM tinyq_jobs") == [
        (seqs[0], 0, "running"),
        (seqs[1], 2, "running"),
    ]


async def test_jobs_that_are_handed_over_with_others_know_their_numbers(store: SQLiteStore, file: Path) -> None:
    rows = [new_row(number) for number in range(6)]
    futures: list[Awaitable[Any]] = []
    for number, row in enumerate(rows):
        if number % 2:
            row.queue, row.worker, row.lease, row.started = f"queue {number}", "w", 9, 1
            futures.append(store.hand_over(row, row.created, lambda answer: None))
        else:
            futures.append(store.add(row, row.created))
    await outcomes(futures)
    numbers = dict(query(file, "SELECT payload ->> '$[0][0]', seq FROM tinyq_jobs WHERE state = 'running'"))
    assert numbers == {number: rows[number].seq for number in (1, 3, 5)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_a_backlog_starts_in_strict_order(open_file: Open, file: Path, concurrency: int, seed: int) -> None:
    dice = random.Random(seed)
    q = await open_file(concurrency=concurrency)
    gate, blocked = asyncio.Event(), list[str]()
    started: list[str] = []

    @q.task(name="blocks")
    async def blocks() -> None:
        blocked.append(tinyq.current_job().id)
        await gate.wait()

    @q.task(name="runs")
    async def runs(pause: int) -> None:
        started.append(tinyq.current_job().id)
        await turns(pause)

    await unhurried(q)
    for _ in range(concurrency):
        await q.enqueue(blocks, durable=True)
    await eventually(lambda: len(blocked) == concurrency)
    await outcomes([q.enqueue(runs, dice.randrange(4), durable=True, priority=dice.randrange(3)) for _ in range(40)])
    order = "SELECT id FROM tinyq_jobs WHERE task = 'runs' ORDER BY priority DESC, run_at, seq"
    expected = [tinyq.id_text(id) for (id,) in query(file, order)]
    gate.set()
    await eventually(lambda: len(started) == 40)
    assert started == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_no_job_starts_before_a_better_one_that_was_stored_earlier(
    open_file: Open, clock: FakeClock, concurrency: int, seed: int
) -> None:
    dice = random.Random(seed)
    q = await open_file(concurrency=concurrency)
    moment = 0
    began: dict[int, int] = {}
    stored: dict[int, int] = {}
    started: dict[int, int] = {}

    def tick() -> int:
        nonlocal moment
        moment += 1
        return moment

    @q.task(name="runs")
    async def runs(number: int, pause: int) -> None:
        started[number] = tick()
        await turns(pause)

    await unhurried(q)
    priorities = [dice.randrange(3) for _ in range(90)]

    async def enqueue_some(numbers: Sequence[int]) -> None:
        for number in numbers:
            began[number] = tick()
            await q.enqueue(runs, number, dice.choice([0, 0, 5, 200]), durable=True, priority=priorities[number])
            stored[number] = tick()
            await turns(dice.randrange(30))

    await outcomes([enqueue_some(range(first, 90, 3)) for first in range(3)])
    await eventually(lambda: len(started) == 90)
    wrong = [
        (first, second)
        for first in range(90)
        for second in range(90)
        if stored[first] < began[second] and priorities[first] >= priorities[second] and started[first] > started[second]
    ]
    assert wrong == []


@pytest.mark.parametrize("way", ["alone", "with a key", "among many"])
async def test_a_job_that_is_handed_over_does_not_overtake_a_better_one_that_is_stored_with_it(
    open_file: Open, clock: FakeClock, way: str
) -> None:
    """One is enqueued while the only slot is taken; the slot comes free, and another is enqueued before the first is stored."""
    q = await open_file(concurrency=1)
    gate = asyncio.Event()
    started: list[str] = []

    @q.task(name="blocks")
    async def blocks() -> None:
        await gate.wait()

    @q.task(name="runs")
    async def runs(name: str) -> None:
        started.append(name)

    await unhurried(q)
    blocking = await q.enqueue(blocks)  # best-effort
    await turns(5)

    async def enqueue_first() -> None:
        if way == "among many":
            await q.enqueue_many([(runs, ("first",))], durable=True, priority=1)
        else:
            await q.enqueue(runs, "first", durable=True, priority=1, key="k" if way == "with a key" else None)

    first = asyncio.create_task(enqueue_first())
    gate.set()
    second = asyncio.create_task(q.enqueue(runs, "second", durable=True))
    await outcomes([first, second])
    await eventually(lambda: len(started) == 2)
    assert blocking.status is State.DONE
    assert started == ["first", "second"]


async def test_a_job_whose_worker_dies_between_the_commit_and_its_start_is_recovered_by_its_lease(
    open_file: Open, store: SQLiteStore, file: Path, clock: FakeClock
) -> None:
    now = clock.time()
    row = new_row(7, task="runs", run_at=now, created=now, worker="of a process that died", lease=now + 30_000_000, started=now)
    [answer] = await store.hand_over(row, now, lambda answer: None)
    assert answer.verdict == "started"
    q = await open_file(lease=30)
    starts: list[tuple[int, int]] = []

    @q.task(name="runs")
    async def runs(number: int) -> None:
        starts.append((number, tinyq.current_job().attempt))

    await clock.advance(5)
    assert starts == []
    await eventually(lambda: starts, clock, 2)
    await eventually(lambda: stored_ids(file) == [], clock)
    assert starts == [(7, 2)]


# Best-effort jobs that start at once


def memory_of(q: TinyQ) -> tinyq.MemoryStore:
    store = engine_of(q).memory_store
    assert isinstance(store, tinyq.MemoryStore)
    return store


@pytest.fixture
async def memory(open_at: OpenAt) -> TinyQ:
    return await open_at(None, concurrency=2)


async def held_back(gate: asyncio.Event) -> None:
    await gate.wait()


async def test_ids_of_best_effort_jobs_are_unique_and_stay(memory: TinyQ) -> None:
    gate = asyncio.Event()
    jobs = [await memory.enqueue(held_back, gate) for _ in range(1_000)]
    ids = [job.id for job in jobs]
    assert len(set(ids)) == 1_000
    gate.set()
    await memory.drain()
    assert [job.id for job in jobs] == ids


async def test_ids_sort_by_creation_in_whatever_order_they_are_asked_for(memory: TinyQ, clock: FakeClock) -> None:
    gate = asyncio.Event()
    jobs = []
    for _ in range(200):
        jobs.append(await memory.enqueue(held_back, gate))
        clock.block(0.000_001 if len(jobs) % 2 else 0.01)
    random.Random(1).shuffle(jobs)
    ids = {job.id: job._row.created for job in jobs}
    assert sorted(ids) == sorted(ids, key=lambda id: ids[id])
    gate.set()


async def test_the_id_of_a_job_is_the_same_for_its_thread_and_for_its_loop(
    memory: TinyQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ask for the first time, at the same moment."""
    original = tinyq.new_id
    asked, go_on = threading.Event(), threading.Event()

    def new_id(now: int) -> bytes:
        made = original(now)
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            assert go_on.wait(30)
        return made

    monkeypatch.setattr(tinyq, "new_id", new_id)
    job = await memory.enqueue(lambda: tinyq.current_job().id)
    await eventually(asked.is_set)
    here = job.id
    go_on.set()
    assert await job.result(10) == here
    assert job.id == here


async def test_an_id_can_be_made_though_another_thread_takes_the_last_number_that_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Drawn(list[int]):
        def __len__(self) -> int:
            count = super().__len__()
            if count == 1:
                self.clear()  # the other thread, right after the look
            return count

    monkeypatch.setattr(tinyq, "_drawn", Drawn([1]))
    assert len(tinyq.new_id(1)) == 16


async def test_get_finds_a_pending_and_a_running_job_and_not_one_that_has_ended(memory: TinyQ) -> None:
    gate = asyncio.Event()
    early = [await memory.enqueue(held_back, gate) for _ in range(3)]
    for job in early:
        assert (await memory.get(job.id)).status is job.status
    late = [await memory.enqueue(held_back, gate) for _ in range(2)]  # once somebody has asked for ids
    assert [job.status for job in (*early, *late)] == ["running", "running", "pending", "pending", "pending"]
    for job in late:
        assert (await memory.get(job.id)).id == job.id
    gate.set()
    await memory.drain()
    at_once = await memory.enqueue(held_back, gate)
    assert (await memory.get(at_once.id)).status is State.RUNNING
    await memory.drain()
    for job in (*early, *late, at_once):
        with pytest.raises(JobNotFound):
            await memory.get(job.id)


@pytest.mark.parametrize("options", [{"concurrency": 3}, {"queues": {"default": 3}}, {"threads": 3}])
async def test_never_more_jobs_run_at_once_than_there_are_slots(open_at: OpenAt, options: Any) -> None:
    q = await open_at(None, **options)
    dice, lock, now, most = random.Random(3), threading.Lock(), 0, 0

    def count(step: int) -> None:
        nonlocal now, most
        with lock:
            now += step
            most = max(most, now)

    async def runs(pause: int) -> None:
        count(1)
        await turns(pause)
        count(-1)

    def blocks(pause: int) -> None:
        count(1)
        time.sleep(0)
        count(-1)

    for _ in range(300):
        await q.enqueue(blocks if "threads" in options else runs, dice.randrange(6))
        await turns(dice.randrange(3))
    async with asyncio.timeout(20):
        await q.drain()
    assert most == 3 or (most <= 3 and "threads" in options)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_best_effort_jobs_start_in_the_order_of_their_queue(open_at: OpenAt, concurrency: int, seed: int) -> None:
    q, dice = await open_at(None, concurrency=concurrency), random.Random(seed)
    moment = 0
    enqueued_at: dict[int, int] = {}
    started: dict[int, int] = {}

    def tick() -> int:
        nonlocal moment
        moment += 1
        return moment

    async def runs(number: int, pause: int) -> None:
        started[number] = tick()
        await turns(pause)

    tasks = [q.task(name=f"runs {priority}", priority=priority)(runs) for priority in range(3)]
    priorities = [dice.randrange(3) for _ in range(150)]
    for number, priority in enumerate(priorities):
        await tasks[priority].enqueue(number, dice.choice([0, 0, 1, 10]))
        enqueued_at[number] = tick()
        await turns(dice.choice([0, 0, 0, 1, 2, 15]))
    await q.drain()
    wrong = [
        (first, second)
        for first in range(150)
        for second in range(first + 1, 150)
        if priorities[first] >= priorities[second] and started[first] > started[second]
    ]
    assert wrong == []


async def test_a_new_job_waits_behind_one_whose_time_has_come(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None, concurrency=1)
    started: list[str] = []

    async def runs(name: str) -> None:
        started.append(name)

    await q.enqueue(runs, "first", delay=10)
    clock.block(11)
    await q.enqueue(runs, "second")
    await q.drain()
    assert started == ["first", "second"]


async def test_a_job_that_started_at_once_is_retried(memory: TinyQ, clock: FakeClock) -> None:
    attempts: list[int] = []

    @memory.task(name="fails", retry=[5, 5])
    async def fails() -> str:
        attempts.append(tinyq.current_job().attempt)
        if len(attempts) < 3:
            raise ValueError("not yet")
        return "at last"

    job = await fails.enqueue()
    await turns(5)
    assert (attempts, job.status, job.attempts) == ([1], State.PENDING, 1)
    await clock.advance(11)
    assert (attempts, await job.result(10), job.status) == ([1, 2, 3], "at last", State.DONE)


async def test_a_job_that_started_at_once_may_snooze(memory: TinyQ, clock: FakeClock) -> None:
    attempts: list[int] = []

    async def snoozes() -> None:
        attempts.append(tinyq.current_job().attempt)
        if len(attempts) < 3:
            raise Snooze(5)

    job = await memory.enqueue(snoozes)
    await turns(5)
    assert (job.status, job.attempts) == (State.PENDING, 0)
    await clock.advance(11)
    assert (attempts, job.status) == ([1, 1, 1], State.DONE)


async def test_a_job_that_started_at_once_times_out(memory: TinyQ, clock: FakeClock) -> None:
    @memory.task(name="hangs", timeout=5, retry=False)
    async def hangs() -> None:
        await asyncio.Event().wait()

    job = await hangs.enqueue()
    await clock.advance(4)
    assert job.status is State.RUNNING
    await clock.advance(2)
    assert (job.status, job.error) == (State.DEAD, "TimeoutError: timed out after 5 s")


async def test_a_job_that_is_cancelled_before_its_first_turn_is_not_called(memory: TinyQ) -> None:
    ran: list[int] = []

    async def runs() -> None:
        ran.append(1)

    job = await memory.enqueue(runs)
    assert await job.cancel()
    assert (ran, job.status) == ([], State.CANCELLED)
    assert held_slots(memory) == 0


async def test_a_job_that_started_at_once_is_cancelled_while_it_runs(memory: TinyQ) -> None:
    ended: list[str] = []

    async def runs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("finally")

    job = await memory.enqueue(runs)
    await turns(3)
    assert await job.cancel()
    assert ended == ["finally"]
    with pytest.raises(JobCancelled):
        await job.result()
    assert held_slots(memory) == 0


async def test_stats_count_jobs_that_started_at_once_and_jobs_that_wait(memory: TinyQ) -> None:
    gate = asyncio.Event()
    for _ in range(5):
        await memory.enqueue(held_back, gate)
    stats = await memory.stats()
    assert [(c.state, c.count, c.due) for c in stats.counts] == [("pending", 3, 3), ("running", 2, 0)]
    gate.set()
    await memory.drain()
    assert (await memory.stats()).counts == ()


async def test_the_result_of_a_job_that_started_at_once_is_known_whenever_it_is_asked_for(memory: TinyQ) -> None:
    async def answer(value: object) -> object:
        return value

    early = await memory.enqueue(answer, 1)
    assert await early.result(10) == 1
    late, nothing = await memory.enqueue(answer, 2), await memory.enqueue(answer, None)
    await memory.drain()
    assert (await late.result(10), await nothing.result(10)) == (2, None)


colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


async def repaint(seen: list[str], raising: Sequence[BaseException]) -> None:
    seen.append(colour.get())
    colour.set("painted over")
    if len(seen) <= len(raising):
        raise raising[len(seen) - 1]


async def test_each_attempt_has_the_context_of_the_enqueue(memory: TinyQ, clock: FakeClock) -> None:
    task = memory.task(name="repaint", retry=[1, 1])(repaint)
    seen: list[str] = []
    colour.set("red")
    await task.enqueue(seen, [ValueError(), Snooze(1)])
    colour.set("blue")
    await clock.advance(5)
    assert seen == ["red", "red", "red"]


async def test_a_job_of_one_start_that_snoozes_goes_on_in_its_own_context(memory: TinyQ, clock: FakeClock) -> None:
    seen: list[str] = []
    colour.set("red")
    await memory.enqueue(repaint, seen, [Snooze(1), Snooze(1)])
    colour.set("blue")
    await clock.advance(5)
    assert seen == ["red", "painted over", "painted over"]
    assert colour.get() == "blue"


async def test_a_job_may_enqueue_while_tinyq_stops(clock: FakeClock) -> None:
    q = TinyQ(clock=clock, concurrency=3)
    await q.start()
    gate = asyncio.Event()
    ran: list[str] = []

    async def follows() -> None:
        ran.append("follows")

    async def runs() -> None:
        await gate.wait()
        await q.enqueue(follows)
        ran.append("runs")

    await q.enqueue(runs)
    stopping = asyncio.create_task(q.stop(grace=5))
    await turns(5)
    gate.set()
    async with asyncio.timeout(10):
        await stopping
    assert sorted(ran) == ["follows", "runs"]


async def test_waiting_jobs_are_promoted_at_shutdown_and_those_that_started_at_once_are_not(
    open_file: Open, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file(concurrency=1)

    @q.task(name="hangs")
    async def hangs(number: int) -> None:
        await asyncio.Event().wait()

    await unhurried(q)
    jobs = [await hangs.enqueue(number) for number in range(3)]
    assert [job.status for job in jobs] == [State.RUNNING, State.PENDING, State.PENDING]
    ids = [job.id for job in jobs[1:]]
    await stopped_at_once(q, clock)
    stored = query(file, "SELECT payload ->> '$[0][0]', state, attempts, claim_no, lease FROM tinyq_jobs ORDER BY seq")
    assert stored == [(1, "pending", 0, 0, None), (2, "pending", 0, 0, None)]
    assert stored_ids(file) == ids
    assert "lost at shutdown: hangs ×1" in caplog.text  # the one that ran


async def test_a_waiting_job_is_promoted_on_request_and_keeps_its_id(open_file: Open, file: Path) -> None:
    q = await open_file(concurrency=1)
    gate = asyncio.Event()
    ran: list[int] = []

    @q.task(name="waits")
    async def waits(number: int) -> None:
        await gate.wait()
        ran.append(number)

    await unhurried(q)
    first, second = [await waits.enqueue(number) for number in range(2)]
    assert not await first.promote()
    assert await second.promote()
    assert stored_ids(file) == [second.id]
    assert second.durable and not first.durable
    gate.set()
    await second.result(10)
    assert sorted(ran) == [0, 1]


async def test_a_dead_job_that_started_at_once_can_be_requeued(memory: TinyQ) -> None:
    starts: list[int] = []

    @memory.task(name="fails once", retry=False)
    async def fails_once(number: int) -> None:
        starts.append(number)
        if len(starts) == 1:
            raise ValueError("once")

    job = await fails_once.enqueue(5)
    await memory.drain()
    assert job.status is State.DEAD
    assert await memory.requeue(job.id) == 1
    await job.result(10)
    assert starts == [5, 5]


async def test_a_job_that_waits_for_its_retry_is_promoted_with_its_attempts(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file(concurrency=5)

    @q.task(name="fails", retry=[60, 60])
    async def fails(number: int) -> None:
        raise ValueError("no")

    await unhurried(q)
    stored = await q.enqueue("of.another.process", durable=True)  # numbered as the first job in memory is
    job = await fails.enqueue(5)
    await eventually(lambda: job.error is not None and job.status is State.PENDING)
    await stopped_at_once(q, clock)
    assert stored_ids(file) == [stored.id, job.id]
    assert query(file, "SELECT state, attempts, error, run_at FROM tinyq_jobs WHERE task = 'fails'") == [
        ("pending", 1, "ValueError: no", job._row.run_at)
    ]


async def test_on_dead_hears_of_a_job_that_started_at_once(memory: TinyQ) -> None:
    heard: list[tuple[str, str | None]] = []

    @memory.on_dead
    async def hook(job: Job[Any]) -> None:
        heard.append((job.id, job.error))

    async def fails() -> None:
        raise ValueError("no")

    job = await memory.enqueue(fails)
    await eventually(lambda: heard)
    assert heard == [(job.id, "ValueError: no")]


async def test_max_pending_bounds_the_jobs_that_wait_behind_those_that_started_at_once(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None, concurrency=2, max_pending=3)
    gate = asyncio.Event()
    for _ in range(5):
        await q.enqueue(held_back, gate)
    sixth = asyncio.create_task(q.enqueue(held_back, gate))
    await turns(5)
    assert not sixth.done()
    await clock.advance(6)
    with pytest.raises(tinyq.QueueFull):
        await sixth
    gate.set()


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def nothing(number: int) -> None: ...


async def test_jobs_that_have_ended_leave_nothing_behind(open_at: OpenAt) -> None:
    q = await open_at(None, concurrency=20)
    rows: list[weakref.ref[Any]] = []
    for number in range(100):  # what is set up once
        await q.enqueue(nothing, number)
    await q.drain()
    with no_collector():
        for number in range(20_000):
            rows.append(weakref.ref((await q.enqueue(nothing, number))._row))
            if number % 37 == 0:
                await turns(2)
        await q.drain()
        await turns(5)
        alive = sum(row() is not None for row in rows)
        found = gc.collect()
    assert alive <= 2  # the last one may be remembered
    assert found < 200
    assert not memory_of(q)._rows


@pytest.mark.parametrize("by", ["a retry", "a snooze"])
async def test_a_job_that_succeeds_in_the_end_leaves_nothing_behind(memory: TinyQ, by: str) -> None:
    @memory.task(name="stumbles", retry=[0])
    async def stumbles(seen: list[str]) -> None:
        seen.append("")
        if len(seen) == 1:
            raise Snooze(0) if by == "a snooze" else ValueError("once")

    async def run() -> weakref.ref[Any]:
        job = await stumbles.enqueue([])
        await job.result(10)
        return weakref.ref(job._row)

    await run()
    with no_collector():
        rows = [await run() for _ in range(20)]
        await memory.enqueue(nothing, 0)
        await memory.drain()
        await turns(5)
        alive = sum(row() is not None for row in rows)
    assert alive <= 2


# Outcomes that are written together


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many outcomes each unit wrote."""
    sizes: list[int] = []
    original = tinyq.settle_rows

    def settle_rows(db: Any, namespace: str, settlements: Any, *others: Any) -> Any:
        sizes.append(len(settlements))
        return original(db, namespace, settlements, *others)

    monkeypatch.setattr(tinyq, "settle_rows", settle_rows)
    return sizes


async def test_durable_jobs_that_have_run_keep_no_dictionaries_of_their_own(open_file: Open, file: Path) -> None:
    async with TinyQ(str(file), worker=False) as before:
        await before.enqueue_many([("runs", (number,)) for number in range(5)], durable=True)
        for number in range(5):
            await before.schedule("ticks", number, when=tinyq.Every(3600.0), key=str(number), immediate=True)
    rows: list[tinyq.JobRow] = []
    q = await open_file()

    def note() -> None:
        row = tinyq._current.get()
        assert row is not None
        rows.append(row)

    @q.task(name="runs")
    async def runs(number: int) -> None:
        note()

    @q.task(name="ticks")
    async def ticks(number: int) -> None:
        note()

    await eventually(lambda: len(rows) == 10 and not engine_of(q).crew.running)
    assert {type(row) for row in rows} == {tinyq.ClaimedRow}
    for row in rows:  # its values stand in the object itself
        assert [fields for fields in gc.get_referents(row) if isinstance(fields, dict) and "task" in fields] == []


# A backlog that another process has left: its jobs are claimed by somebody who has no handle of them.


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs of each claim were started without a look at each."""
    counts: list[int] = []
    start = tinyq.Crew._start_alike

    def noted(*given: Any) -> int:
        counts.append(start(*given))
        return counts[-1]

    monkeypatch.setattr(tinyq.Crew, "_start_alike", noted)
    return counts


async def left_behind(file: Path, *calls: tuple[str, int], options: Sequence[tinyq.Options] = ()) -> list[str]:
    """Durable jobs of a process that has ended. Answers their ids."""
    async with TinyQ(str(file), worker=False) as before:
        each = zip(calls, options or [{}] * len(calls), strict=True)
        return [(await before.enqueue(name, number, **{"durable": True, **own})).id for (name, number), own in each]


def slots_of(q: TinyQ) -> tuple[int, dict[str, int]]:
    slots = engine_of(q).crew._slots
    return slots.shared, dict(slots.named)


async def emptied(file: Path) -> None:
    await eventually(lambda: not query(file, "SELECT 1 FROM tinyq_jobs WHERE finished IS NULL"))


@pytest.mark.parametrize("seed", range(4))
async def test_plain_jobs_and_others_of_one_claim_start_in_its_order(
    open_file: Open, file: Path, alike: list[int], seed: int
) -> None:
    dice = random.Random(seed)
    calls = [(dice.choice(["one", "two", "limited"]), number) for number in range(40)]
    options = [tinyq.Options(priority=dice.randrange(2)) for _ in calls]
    for number in dice.sample(range(40), 6):
        options[number].update({"timeout": 50} if number % 2 else {"key": str(number)})
    await left_behind(file, *calls, options=options)
    q = await open_file(concurrency=100)
    started: list[int] = []

    async def run(number: int) -> None:
        started.append(number)

    q.task(name="one")(run)
    q.task(name="two")(functools.partial(run))
    q.task(name="limited", max_running=100)(functools.partial(run))
    await emptied(file)
    assert started == sorted(range(40), key=lambda number: (-(options[number]["priority"] or 0), number))
    assert slots_of(q) == (100, {})


async def test_plain_jobs_of_a_claim_have_a_context_each(open_file: Open, file: Path, alike: list[int]) -> None:
    await left_behind(file, *[("runs", number) for number in range(5)])
    seen: list[tuple[int, str]] = []
    mark = contextvars.ContextVar("mark", default="none")
    mark.set("of the test")
    q = await open_file()

    @q.task(name="runs")
    async def runs(number: int) -> None:
        seen.append((number, mark.get()))
        mark.set(f"of job {number}")

    await emptied(file)
    assert sorted(seen) == [(number, "none") for number in range(5)]
    assert sum(alike) == 5


@pytest.mark.parametrize("queues", [{}, {"default": 2, "other": 1}])
async def test_plain_jobs_of_a_claim_that_end_in_all_ways_give_their_slots_back(
    open_file: Open, file: Path, alike: list[int], clock: FakeClock, queues: dict[str, int]
) -> None:
    await left_behind(file, *[(name, number) for number in range(4) for name in ("ends", "fails", "snoozes", "leaves", "hangs")])
    q = await open_file(concurrency=3, queues=queues)
    now = most = 0
    attempts: list[tuple[str, int]] = []

    async def enter(name: str, number: int) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        attempts.append((name, number))
        try:
            await asyncio.sleep(0)
        finally:
            now -= 1

    @q.task(name="ends")
    async def ends(number: int) -> None:
        await enter("ends", number)

    @q.task(name="fails", retry=[1.0])
    async def fails(number: int) -> None:
        await enter("fails", number)
        raise ValueError(number)

    @q.task(name="snoozes")
    async def snoozes(number: int) -> None:
        await enter("snoozes", number)
        if attempts.count(("snoozes", number)) == 1:
            raise Snooze(5)

    @q.task(name="leaves", queue="default")
    async def leaves(number: int) -> None:
        await enter("leaves", number)
        raise tinyq.Cancel("enough")

    @q.task(name="hangs", timeout=3, retry=False)
    async def hangs(number: int) -> None:
        await enter("hangs", number)
        await asyncio.Event().wait()

    def over() -> bool:
        return not query(file, "SELECT 1 FROM tinyq_jobs WHERE finished IS NULL")

    await eventually(over, clock, 1.0)
    expected = Counter({"ends": 4, "fails": 8, "snoozes": 8, "leaves": 4, "hangs": 4})
    assert Counter(name for name, _ in attempts) == expected
    states = query(file, "SELECT task, state, count(*), max(attempts) FROM tinyq_jobs GROUP BY task, state ORDER BY task")
    assert states == [("fails", "dead", 4, 2), ("hangs", "dead", 4, 1), ("leaves", "cancelled", 4, 1)]
    await eventually(lambda: not engine_of(q).crew.running)
    assert slots_of(q) == (3, queues)
    assert most == (2 if queues else 3)
    assert sum(alike) >= 5


async def test_the_results_of_plain_jobs_of_a_claim_are_kept(open_file: Open, file: Path, alike: list[int]) -> None:
    ids = await left_behind(file, *[("doubles", number) for number in range(3)])
    q = await open_file()

    @q.task(name="doubles", result_ttl=60)
    async def doubles(number: int) -> int:
        return 2 * number

    await emptied(file)
    kept = [await (await q.get(id)).result() for id in ids]
    assert (kept, sum(alike)) == ([0, 2, 4], 3)


async def one_waits(q: TinyQ) -> None:
    """A task "waits" of which a job runs now, for ever."""
    came = asyncio.Event()

    @q.task(name="waits")
    async def waits(number: int) -> None:
        came.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await came.wait()


async def test_plain_jobs_of_a_claim_are_handed_back_at_a_stop_without_grace(
    open_file: Open, file: Path, alike: list[int], clock: FakeClock
) -> None:
    await left_behind(file, *[("waits", number) for number in range(3)])
    q = await open_file()
    await one_waits(q)
    await stopped_at_once(q, clock)
    assert query(file, "SELECT state, attempts, lease FROM tinyq_jobs") == [("pending", 0, None)] * 3
    assert sum(alike) == 3


async def test_a_plain_job_of_a_claim_is_cancelled_from_another_process(open_file: Open, file: Path, alike: list[int]) -> None:
    [id] = await left_behind(file, ("waits", 0))
    q = await open_file(clock=SystemClock(), lease=0.5)
    await one_waits(q)
    async with TinyQ(str(file), worker=False) as other:
        await (await other.get(id)).cancel()
    await emptied(file)
    assert (query(file, "SELECT state FROM tinyq_jobs"), sum(alike)) == ([("cancelled",)], 1)


async def test_a_job_that_is_added_behind_one_for_later_is_claimed_at_once(open_file: Open, file: Path) -> None:
    q = await open_file(concurrency=100)

    @q.task(name="limited", max_running=50)
    async def limited() -> None: ...

    await unhurried(q)
    await eventually(lambda: not engine_of(q).require_durable().wake.is_set())
    first = asyncio.create_task(q.enqueue(limited, durable=True, delay=60))
    await asyncio.sleep(0)
    assert not engine_of(q).require_durable().wake.is_set()
    second = asyncio.create_task(q.enqueue(limited, durable=True))
    await asyncio.sleep(0)
    assert engine_of(q).require_durable().wake.is_set()
    await outcomes([first, second])


async def test_what_a_drain_has_claimed_starts_though_nobody_waits_for_it_any_more(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file()
    ran = asyncio.Event()
    claiming, go_on = threading.Event(), threading.Event()
    claim = tinyq.claim_rows

    def slow(*given: Any) -> tinyq.Claimed:
        claiming.set()
        go_on.wait(10)
        return claim(*given)

    @q.task(name="runs")
    async def runs() -> None:
        ran.set()

    await q.enqueue(runs, durable=True, delay=60)
    await clock.settle()
    clock.block(120)  # nobody is woken by that
    monkeypatch.setattr(tinyq, "claim_rows", slow)
    drain = asyncio.create_task(q.drain())
    await eventually(claiming.is_set)
    drain.cancel()
    await asyncio.wait({drain})
    assert drain.cancelled()
    go_on.set()
    async with asyncio.timeout(10):
        await ran.wait()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in 3.12")
async def test_durable_jobs_work_where_tasks_are_eager(open_file: Open, file: Path) -> None:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        q = await open_file(concurrency=3)
        ran: list[int] = []

        @q.task(name="runs")
        async def runs(number: int) -> None:
            ran.append(number)

        await asyncio.gather(*(q.enqueue(runs, number, durable=True) for number in range(20)))
        await eventually(lambda: len(ran) == 20)
        await q.stop()
    finally:
        loop.set_task_factory(None)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks are new in 3.12")
async def test_eager_tasks_end_each_job_and_free_each_slot_once(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The look at the loop, which finds jobs whose task is over, comes often here, and so before an outcome is written."""
    monkeypatch.setattr(tinyq, "WATCH", 0.0)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        q = await open_file(concurrency=5, clock=SystemClock())
        ran: list[int] = []

        @q.task(name="runs", durable=True)
        async def runs(number: int) -> None:
            ran.append(number)

        @q.batch(3, name="batch", durable=True)
        async def batch(numbers: list[int]) -> None:
            ran.extend(numbers)

        for first in range(0, 100, 10):
            some = [runs.enqueue(first + n) if n < 5 else batch.enqueue(first + n) for n in range(10)]
            jobs = [await job for job in some] if first < 50 else await asyncio.gather(*some)
            async with asyncio.timeout(10):
                assert [await job.result() for job in jobs] == [None] * 10
        assert sorted(ran) == list(range(100))
        assert engine_of(q).crew._slots.shared == 5
        await q.stop()
    finally:
        loop.set_task_factory(None)
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


async def test_jobs_that_callers_add_together_are_claimed_with_one_claim(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file(concurrency=100)
    ran: list[int] = []

    @q.task(name="limited", max_running=50)
    async def limited(number: int) -> None:
        ran.append(number)

    await unhurried(q)
    claims: list[int] = []
    claim = tinyq.claim_rows

    def noted(*given: Any) -> tinyq.Claimed:
        claimed = claim(*given)
        claims.append(len(claimed.rows))
        return claimed

    monkeypatch.setattr(tinyq, "claim_rows", noted)
    await outcomes([q.enqueue(limited, number, durable=True) for number in range(30)])
    await eventually(lambda: len(ran) == 30)
    assert [count for count in claims if count] == [30]


async def test_jobs_that_come_together_are_written_with_their_claim_though_the_first_need_not_be_claimed(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file(concurrency=100, clock=tinyq.SystemClock())
    ran: list[int] = []

    @q.task(name="plain", durable=True)
    async def plain(number: int) -> None:
        ran.append(number)

    await unhurried(q)
    written: list[tuple[int, int]] = []  # new rows of each unit, and rows that its claim has found
    run_unit = SQLiteStore._run_unit

    def noted(self: SQLiteStore, db: Any, ops: Sequence[tinyq.Op]) -> None:
        run_unit(self, db, ops)
        taken = sum(len(op.answer.rows) for op in ops if isinstance(op.answer, tinyq.Claimed))
        written.append((sum(len(op.rows) for op in ops), taken))

    monkeypatch.setattr(SQLiteStore, "_run_unit", noted)
    await outcomes([plain.enqueue(number) for number in range(30)])
    await eventually(lambda: len(ran) == 30)
    assert written[0] == (30, 29)


async def test_a_job_that_died_elsewhere_and_was_requeued_is_settled_by_the_claim_that_it_runs_under(
    open_file: Open, file: Path
) -> None:
    """Of a lane of a batch task, a claim need not read a row whole though it has been claimed before."""
    q = await open_file(concurrency=1, clock=SystemClock())
    running, go_on = asyncio.Event(), asyncio.Event()
    items: list[int] = []

    @q.task(name="busy")
    async def busy() -> None:
        running.set()
        await go_on.wait()

    @q.batch(10, name="batch", durable=True)
    async def batch(numbers: list[int]) -> None:
        items.extend(numbers)

    await busy.enqueue()
    await running.wait()
    async with TinyQ(file, clock=SystemClock()) as other:

        @other.batch(10, name="batch", durable=True, retry=False)
        async def fails(numbers: list[int]) -> None:
            raise ValueError("no")

        job = await batch.enqueue(7)
        await eventually(lambda: query(file, "SELECT state FROM tinyq_jobs") == [("dead",)])
        await other.quiesce()
        assert await other.requeue(job.id) == 1
    go_on.set()
    async with asyncio.timeout(10):
        await job.result()
    assert items == [7] and (job.status, job.attempts) == (State.DONE, 1)
    assert query(file, "SELECT state FROM tinyq_jobs") == []


async def test_a_job_that_others_have_cancelled_and_requeued_does_not_expire_any_more(open_file: Open, file: Path) -> None:
    q = await open_file(concurrency=1, clock=SystemClock())
    running, go_on = asyncio.Event(), asyncio.Event()
    ran: list[int] = []

    @q.task(name="busy")
    async def busy() -> None:
        running.set()
        await go_on.wait()

    @q.task(name="plain", durable=True)
    async def plain(number: int) -> None:
        ran.append(number)

    await busy.enqueue()
    await running.wait()
    async with TinyQ(file, worker=False, clock=SystemClock()) as other:
        job = await plain.options(expires=0.2).enqueue(7)
        assert await (await other.get(job.id)).cancel()
        assert await other.requeue(job.id) == 1
    await asyncio.sleep(0.25)
    go_on.set()
    async with asyncio.timeout(10):
        await job.result()
    assert ran == [7]


@pytest.mark.parametrize(("column", "before"), [("headers", {"headers": {"a": "b"}}), ("expires", {"expires": 0.2})])
async def test_what_a_hand_has_taken_off_a_job_is_off_it_though_a_handle_knows_of_it(
    open_file: Open, file: Path, column: str, before: dict[str, Any]
) -> None:
    q = await open_file(concurrency=1, clock=SystemClock())
    running, go_on = asyncio.Event(), asyncio.Event()
    ran: list[tuple[int, dict[str, str]]] = []

    @q.task(name="busy")
    async def busy() -> None:
        running.set()
        await go_on.wait()

    @q.task(name="plain", durable=True)
    async def plain(number: int) -> None:
        ran.append((number, dict(tinyq.current_job().headers)))

    await busy.enqueue()
    await running.wait()
    job = await plain.options(**before).enqueue(7)
    edit(file, f"UPDATE tinyq_jobs SET {column} = NULL")
    await asyncio.sleep(0.25)
    go_on.set()
    async with asyncio.timeout(10):
        await job.result()
    assert ran == [(7, {})]


@pytest.mark.parametrize("limits", [{}, {"max_running": 1}])
async def test_a_job_that_a_hand_has_given_to_another_task_runs_as_one_of_that_though_a_handle_knows_of_it(
    open_file: Open, file: Path, limits: dict[str, Any]
) -> None:
    q = await open_file(concurrency=1, clock=SystemClock())
    running, go_on = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @q.task(name="busy")
    async def busy() -> None:
        running.set()
        await go_on.wait()

    @q.task(name="one", durable=True, **limits)
    async def one() -> None:
        ran.append("one")

    @q.task(name="other", durable=True)
    def other() -> None:
        ran.append("other")

    await busy.enqueue()
    await running.wait()
    job = await one.enqueue()
    edit(file, "UPDATE tinyq_jobs SET task = 'other', lane = 0")
    go_on.set()
    async with asyncio.timeout(10):
        await job.result()
    assert (ran, job.task) == (["other"], "other")


async def test_a_claim_looks_on_if_others_take_what_gathers_while_it_looks(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file(clock=SystemClock())
    ran: list[int] = []

    @q.batch(10, name="batch", durable=True, window=0.2)
    async def batch(numbers: list[int]) -> None:
        ran.extend(numbers)

    gated_rows, taken = tinyq.gated_rows, list[int]()

    def taken_meanwhile(db: Any, lane: Any, most: int) -> list[Any]:
        found = gated_rows(db, lane, most)
        if found and not taken and not db.in_transaction:
            taken.append(found[0][2])
            edit(file, "DELETE FROM tinyq_jobs")
        return found

    monkeypatch.setattr(tinyq, "gated_rows", taken_meanwhile)
    await batch.enqueue(1)
    await eventually(lambda: taken)
    await batch.enqueue(2)
    await eventually(lambda: ran)
    assert ran == [2]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("payload", ["[[7],{}],[[7],{}]", "[[7],{}", "[[7],{}],", "", "[[7],[]]", "[7,{}]", "[[NaN],{}]", "7"])
async def test_a_payload_that_is_none_leaves_those_that_are_claimed_with_it_their_own_arguments(
    open_file: Open, file: Path, payload: str
) -> None:
    async with TinyQ(str(file), worker=False) as before:
        await before.enqueue_many([("runs", (number,)) for number in range(5)], durable=True)
    query(file, "UPDATE tinyq_jobs SET payload = ? WHERE seq = 3", payload)
    ran: list[int] = []
    q = await open_file()

    @q.task(name="runs")
    async def runs(number: int) -> None:
        ran.append(number)

    await eventually(lambda: len(ran) == 4 and not engine_of(q).crew.running)
    assert ran == [0, 1, 3, 4]
    [(state, reason)] = query(file, "SELECT state, reason FROM tinyq_jobs")
    assert state == "dead" and reason.startswith("undecodable")


async def test_payloads_that_are_calls_only_together_are_none(open_file: Open, file: Path) -> None:
    async with TinyQ(str(file), worker=False) as before:
        await before.enqueue_many([("runs", (number,)) for number in range(4)], durable=True)
    query(file, "UPDATE tinyq_jobs SET payload = ? WHERE seq = 2", '[[7],{}],[["')
    query(file, "UPDATE tinyq_jobs SET payload = ? WHERE seq = 3", '"],{}]')
    ran: list[object] = []
    q = await open_file()

    @q.task(name="runs")
    async def runs(number: object) -> None:
        ran.append(number)

    await eventually(lambda: len(ran) == 2 and not engine_of(q).crew.running)
    assert ran == [0, 3]
    assert query(file, "SELECT state, count(*) FROM tinyq_jobs GROUP BY 1") == [("dead", 2)]


async def test_a_job_that_is_replaced_while_it_waits_for_its_retry_has_none_of_its_old_keywords(
    open_file: Open, clock: FakeClock
) -> None:
    q, calls = await open_file(), list[tuple[int, int]]()

    @q.task(name="runs", durable=True, key="k", on_conflict="replace", retry=[60])
    async def runs(number: int, more: int = 0) -> None:
        calls.append((number, more))
        if number == 1:
            raise ValueError("once")

    job = await runs.enqueue(1, more=7)
    await eventually(lambda: calls == [(1, 7)] and job.status is State.PENDING)
    assert (await runs.enqueue(2)).id == job.id
    await eventually(lambda: len(calls) == 2, clock)
    assert calls == [(1, 7), (2, 0)]


async def test_jobs_on_which_a_worker_has_died_are_called_together_while_each_has_attempts_left(
    open_file: Open, file: Path
) -> None:
    calls: list[list[str]] = []

    def many(q: TinyQ) -> Any:
        @q.batch(10, durable=True, name="many")
        async def many(items: list[str]) -> None:
            calls.append(items)

        return many

    async with TinyQ(str(file), worker=False) as before:
        task = many(before)
        await task.options(retry=tinyq.Retry(max_attempts=3), timeout=10).enqueue("a")
        await task.options(retry=tinyq.Retry(max_attempts=2), timeout=100).enqueue("b")
    query(file, "UPDATE tinyq_jobs SET lost = 1, ready = 3, claim_no = 2, attempts = iif(payload LIKE '%a%', 2, 0)")
    q = await open_file()
    many(q)
    await eventually(lambda: query(file, "SELECT * FROM tinyq_jobs") == [])
    assert calls == [["a", "b"]]


async def test_a_claim_that_the_loop_is_not_told_of_leaves_others_to_wake_it(open_file: Open) -> None:
    q = await open_file(clock=SystemClock())
    await q.enqueue("later", durable=True, delay=100)
    engine = engine_of(q)
    await eventually(lambda: engine.crew.looks_at < tinyq.FOREVER)
    await engine._start_due()
    assert engine.crew.looks_at == tinyq.FOREVER


async def test_outcomes_of_jobs_that_end_together_are_written_together(open_file: Open, file: Path, settled: list[int]) -> None:
    q = await open_file(concurrency=200)
    gate = asyncio.Event()

    @q.task(name="waits", retry=False)
    async def waits(number: int) -> None:
        await gate.wait()
        if number % 10 == 0:
            raise ValueError(number)

    jobs = await outcomes([waits.options(durable=True).enqueue(number) for number in range(200)])
    await eventually(lambda: query(file, "SELECT count(*) FROM tinyq_jobs WHERE state = 'running'") == [(200,)])
    gate.set()
    await eventually(lambda: all(job.status in (State.DONE, State.DEAD) for job in jobs))
    assert sum(settled) == 200
    assert len(settled) <= 4
    assert query(file, "SELECT state, count(*) FROM tinyq_jobs GROUP BY 1") == [("dead", 20)]


def refuse_to_store(file: Path, word: str) -> None:
    query(
        file,
        f"CREATE TRIGGER refuses BEFORE UPDATE ON tinyq_jobs WHEN NEW.error LIKE '%{word}%' "
        "BEGIN SELECT RAISE(ABORT, 'this trigger refuses it'); END",
    )


async def test_an_outcome_that_cannot_be_written_does_not_hold_up_the_others(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file(concurrency=50)
    gate = asyncio.Event()

    @q.task(name="waits", retry=False)
    async def waits(number: int) -> None:
        await gate.wait()
        if number in (0, 7):
            raise ValueError("unspeakable")

    await unhurried(q)
    refuse_to_store(file, "unspeakable")
    jobs = await outcomes([waits.options(durable=True).enqueue(number) for number in range(30)])
    gate.set()
    bad = [jobs[0].id, jobs[7].id]
    await eventually(lambda: stored_ids(file) == bad, clock)
    later = await waits.options(durable=True).enqueue(100)  # nor those that come later
    await eventually(lambda: later.status is State.DONE, clock)
    assert query(file, "SELECT DISTINCT state, attempts FROM tinyq_jobs") == [("running", 1)]
    query(file, "DROP TRIGGER refuses")
    await eventually(lambda: [jobs[0].status, jobs[7].status] == [State.DEAD, State.DEAD], clock)
    assert query(file, "SELECT state, error FROM tinyq_jobs") == [("dead", "ValueError: unspeakable")] * 2


async def test_the_last_outcomes_are_written_at_shutdown_though_one_of_them_cannot_be(
    open_file: Open, file: Path, impatient: None
) -> None:
    """The file was locked until then, so that they have not been tried one by one."""
    q = await open_file(concurrency=50)
    gate = asyncio.Event()

    @q.task(name="waits", retry=False)
    async def waits(number: int) -> None:
        await gate.wait()
        if number == 0:
            raise ValueError("unspeakable")

    await unhurried(q)
    refuse_to_store(file, "unspeakable")
    jobs = await outcomes([waits.options(durable=True).enqueue(number) for number in range(30)])
    engine = engine_of(q)
    await eventually(lambda: all(job.status is State.RUNNING for job in jobs))
    with locked(file):
        gate.set()
        await eventually(lambda: not any(job._row.runner for job in jobs))
        writing = next(loop for loop in engine._loops if loop.get_name() == "tinyq durable outcomes")
        writing.cancel()
        await asyncio.wait({writing})
    assert engine.crew.unsettled == 30
    await engine._write_the_last()
    assert stored_ids(file) == [jobs[0].id]


async def test_retries_that_are_due_at_once_run_again_exactly_once(open_file: Open, file: Path) -> None:
    q = await open_file(concurrency=40)
    starts: dict[int, list[int]] = {}

    @q.task(name="fails", retry=[0])
    async def fails(number: int) -> None:
        starts.setdefault(number, []).append(tinyq.current_job().attempt)
        if len(starts[number]) == 1:
            raise ValueError("once")

    jobs = await outcomes([fails.options(durable=True).enqueue(number) for number in range(150)])
    await eventually(lambda: all(job.status is State.DONE for job in jobs))
    await eventually(lambda: stored_ids(file) == [])
    assert starts == {number: [1, 2] for number in range(150)}


@pytest.mark.parametrize(
    ("retry", "raises", "cancelled"),
    [(False, False, False), (False, True, False), ([60], True, True), ([0], True, True)],
    ids=["done", "dead", "to be retried", "to be retried at once"],
)
async def test_a_job_that_is_cancelled_while_its_outcome_is_written_reports_the_truth(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch, retry: Any, raises: bool, cancelled: bool
) -> None:
    q = await open_file()
    gate = asyncio.Event()
    starts: list[int] = []

    @q.task(name="waits", retry=retry)
    async def waits() -> None:
        starts.append(1)
        await gate.wait()
        if raises and len(starts) == 1:
            raise ValueError("no")
        if len(starts) > 1:
            await asyncio.Event().wait()

    await unhurried(q)
    halt = Halt(monkeypatch, "settle_rows")
    job = await waits.options(durable=True).enqueue()
    halt.armed = True
    gate.set()
    await halt.reached()
    cancelling = asyncio.create_task(job.cancel())
    await turns(5)
    assert not cancelling.done()
    halt.go_on.set()
    async with asyncio.timeout(10):
        assert await cancelling is cancelled
    expected = State.CANCELLED if cancelled else State.DEAD if raises else State.DONE
    assert job.status is expected
    stored = [] if expected is State.DONE else [(str(expected),)]
    assert query(file, "SELECT state FROM tinyq_jobs") == stored


# Ids in forked processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_gives_none_of_its_parents_ids() -> None:
    script = """
import os, sys, tinyq
drawn = [tinyq.new_id(1) for _ in range(10)]  # the random ends are drawn in advance
for child in range(4):
    if os.fork() == 0:
        break
    os.wait()
drawn += [tinyq.new_id(1) for _ in range(600)]
os.write(1, "".join(id.hex() + "\\n" for id in drawn[10:]).encode())
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    ids = ended.stdout.split()
    assert len(ids) == 5 * 600
    assert len(set(ids)) == len(ids)


# What starts before the disk has answered


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """It answers when the block ends; the event tells that somebody waits for it."""
    asked, go_on = threading.Event(), threading.Event()

    def sync(descriptor: int) -> None:
        asked.set()
        assert go_on.wait(20)

    monkeypatch.setattr(os, "fdatasync" if hasattr(os, "fdatasync") else "fsync", sync)
    try:
        yield asked
    finally:
        go_on.set()


@pytest.mark.parametrize("count", [1, 3])
async def test_jobs_start_while_their_enqueue_waits_for_the_disk(file: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    q, begun = TinyQ(file), asyncio.Event()

    @q.task(durable=True)
    async def works(number: int) -> None:
        if number == count - 1:
            begun.set()

    async with q:
        await unhurried(q)
        with slow_disk(monkeypatch) as asked:
            enqueueing = [asyncio.create_task(works.enqueue(number)) for number in range(count)]
            await asyncio.wait_for(begun.wait(), 20)
            assert not any(task.done() for task in enqueueing)
            assert await asyncio.to_thread(asked.wait, 20)
        await asyncio.gather(*enqueueing)


async def test_a_job_that_may_start_only_once_starts_when_its_lease_is_on_the_disk(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, begun = TinyQ(file), asyncio.Event()

    @q.task(durable=True, on_lost="dead")
    async def charge() -> None:
        begun.set()

    async with q:
        await unhurried(q)
        with slow_disk(monkeypatch) as asked:
            enqueueing = asyncio.create_task(charge.enqueue())
            assert await asyncio.to_thread(asked.wait, 20)
            await turns(20)
            assert not begun.is_set()
        await asyncio.wait_for(begun.wait(), 20)
        await enqueueing
