"""What happens when two things happen at once, or when what is stored, raised or asked for is not what it should be."""

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, edit, eventually, rows, stopped_at_once

import tinyq
from tinyq import Cancel, Job, JobCancelled, JobFailed, NoResult, Room, ShuttingDown, Snooze, SQLiteStore, State, StoreBusy, TinyQ

ROOT = Path(__file__).parents[1]
ENDED = (State.DONE, State.DEAD, State.CANCELLED)

pytestmark = pytest.mark.timeout(300)


@contextmanager
def write_lock(file: Path) -> Iterator[sqlite3.Connection]:
    """Held by a stranger's transaction until that is rolled back, here or in the block."""
    with closing(sqlite3.connect(file, timeout=10, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield db
        if db.in_transaction:
            db.execute("ROLLBACK")


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


async def nothing(*_: object) -> None: ...


class Flaky:
    """A handler that fails the first time it runs."""

    def __init__(self) -> None:
        self.runs = 0

    async def __call__(self) -> str:
        self.runs += 1
        if self.runs == 1:
            raise ValueError("not yet")
        return "at last"


async def dead(job: Job[Any]) -> Job[Any]:
    with pytest.raises(JobFailed):
        await job.result(timeout=20)
    return job


# Signals


INTERRUPTED = """
    import asyncio, logging, sys
    import tinyq

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    q = tinyq.TinyQ(sys.argv[1], grace=3600)

    @q.task(name="long")
    async def long():
        print("running", flush=True)
        await asyncio.Event().wait()

    @q.task(name="later", delay=60)
    async def later(n): ...

    async def main():
        async with q:
            await later.enqueue(7)
            await long.enqueue()
            await asyncio.Event().wait()

    asyncio.run(main())
"""


def test_a_second_sigint_under_asyncio_run_still_promotes_what_waits(file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with process:
        try:
            assert process.stdout is not None
            output = ""
            for awaited in ("running", "stopping: waiting for"):
                while awaited not in output:
                    line = process.stdout.readline()
                    assert line, f"no {awaited!r} in {output}"
                    output += line
                process.send_signal(signal.SIGINT)
            output += process.communicate(timeout=30)[0]
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT, output
    assert rows(file, "task, state, payload") == [("later", "pending", "[[7],{}]")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("last", [0, 1])
async def test_after_two_have_stopped_at_the_same_time_signals_reach_their_original_handler(
    open_at: OpenAt, clock: FakeClock, number: signal.Signals, last: int
) -> None:
    heard: list[int] = []

    def own(number: int, frame: object) -> None:
        heard.append(number)

    before = signal.signal(number, own)
    try:
        qs = [await open_at(None), await open_at(None)]
        gates = [asyncio.Event(), asyncio.Event()]
        jobs = [await q.enqueue(gate.wait) for q, gate in zip(qs, gates, strict=True)]
        await eventually(lambda: all(job.status is State.RUNNING for job in jobs))
        stops = [asyncio.create_task(q.stop(grace=3600)) for q in qs]
        await clock.settle()
        for i in (1 - last, last):
            gates[i].set()
            await eventually(stops[i].done)
        for n in (1, 2):
            signal.raise_signal(number)
            assert heard == [number] * n
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


# Requeuing


async def test_a_job_that_another_instance_requeues_while_its_handle_is_held_here_runs_once_more_and_ends_done(
    open_file: Open, clock: FakeClock
) -> None:
    q, other = await open_file(), await open_file(worker=False)
    flaky = Flaky()
    job = await dead(await q.task(name="flaky", retry=False, durable=True, result_ttl=3600)(flaky).enqueue())
    assert await other.requeue(job.id) == 1
    await eventually(lambda: flaky.runs > 1, clock)
    await eventually(lambda: job.status is State.DONE)
    for _ in range(30):
        await clock.advance(3)  # three leases
        await asyncio.sleep(0.002)
    assert flaky.runs == 2
    assert (await other.get(job.id)).status is State.DONE
    assert await job.result(timeout=20) == "at last"


async def test_a_dead_job_that_another_instance_has_requeued_is_pending_for_whoever_asks_though_its_handle_is_held_here(
    open_file: Open, clock: FakeClock
) -> None:
    q, other = await open_file(), await open_file(worker=False)
    flaky = Flaky()
    held = await dead(await q.task(name="flaky", retry=False, durable=True, result_ttl=3600)(flaky).enqueue())
    await other.pause("default")
    assert await other.requeue(held.id) == 1
    job = await q.get(held.id)
    assert (job.status, held.status, job.attempts) == (State.PENDING, State.PENDING, 0)
    await other.resume("default")
    assert await job.result(timeout=20) == "at last"


async def test_a_requeued_job_that_runs_before_requeue_has_read_it_back_runs_once_more_and_ends_done(
    open_file: Open, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file()
    flaky = Flaky()
    job = await dead(await q.task(name="flaky", retry=False, durable=True, result_ttl=3600)(flaky).enqueue())
    read, read_rows = SQLiteStore.get, asyncio.Event()
    may_go_on = asyncio.Event()

    async def slow(self: SQLiteStore, ids: Sequence[bytes]) -> Sequence[tinyq.JobRow]:
        found = await read(self, ids)
        read_rows.set()
        await may_go_on.wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(SQLiteStore, "get", slow)
        requeuing = asyncio.create_task(q.requeue(job.id))
        await eventually(read_rows.is_set)
        await eventually(lambda: flaky.runs > 1, clock)
        may_go_on.set()
        assert await requeuing == 1
    assert await job.result(timeout=20) == "at last"
    await clock.advance(60)
    assert (flaky.runs, job.status) == (2, State.DONE)


async def test_a_job_that_is_requeued_twice_in_one_call_counts_and_runs_once(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    flaky = Flaky()
    job = await dead(await q.task(name="flaky", retry=False, durable=durable)(flaky).enqueue())
    assert await q.requeue(job.id, job.id) == 1
    assert await job.result(timeout=20) == "at last"
    await clock.advance(60)
    assert flaky.runs == 2


# Promotion, and what comes in between


async def test_two_promotions_of_one_job_at_once_store_it_once(open_file: Open, file: Path) -> None:
    q = await open_file()
    job = await q.task(name="task", delay=60)(nothing).enqueue()
    assert all(await asyncio.wait_for(asyncio.gather(job.promote(), job.promote()), 20))
    assert job.durable
    assert rows(file, "task, state") == [("task", "pending")]
    assert (await q.stats()).count() == 1


async def test_a_job_whose_key_was_given_away_while_its_promotion_failed_wakes_who_waits_for_it(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.2)
    q = await open_file()
    task = q.task(name="task", delay=60, key="k")(nothing)
    job = await task.enqueue()
    waiting = asyncio.create_task(job.result())
    await clock.settle()
    with write_lock(file):
        promoting = asyncio.create_task(job.promote())
        await clock.settle()
        successor = await task.enqueue()
        assert successor.created
        with pytest.raises(StoreBusy):
            await asyncio.wait_for(promoting, 20)
    with pytest.raises(JobCancelled):
        await asyncio.wait_for(waiting, 20)
    assert job.status is State.CANCELLED
    assert successor.status is State.PENDING


async def test_a_job_that_is_cancelled_during_its_promotion_does_not_stay_in_the_table(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file()
    job = await q.task(name="task", delay=60)(nothing).enqueue()
    with write_lock(file) as lock:
        promoting = asyncio.create_task(job.promote())
        await clock.settle()
        cancelling = asyncio.create_task(job.cancel())
        await clock.settle()
        lock.execute("ROLLBACK")
        assert await asyncio.wait_for(promoting, 20)
        assert await asyncio.wait_for(cancelling, 20)
    assert job.status is State.CANCELLED
    assert rows(file, "state") in ([], [("cancelled",)])


@pytest.mark.parametrize("locked", [False, True], ids=["stored after all", "never stored"])
async def test_a_promotion_that_is_under_way_when_stop_comes_ends_stored_or_reported_lost(
    open_file: Open,
    file: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    locked: bool,
) -> None:
    if locked:
        monkeypatch.setattr(tinyq, "PATIENCE", 0.2)
    q = await open_file()
    job = await q.task(name="receipts.send", delay=60)(nothing).enqueue()
    waiting = asyncio.create_task(job.result())
    await clock.settle()
    with write_lock(file) as lock:
        promoting = asyncio.create_task(job.promote())
        await clock.settle()
        promoting.cancel()
        stopping = asyncio.create_task(q.stop(grace=0))
        await clock.settle()
        if not locked:
            lock.execute("ROLLBACK")
        await eventually(stopping.done, clock, 0.5)
        await stopping
    assert (await asyncio.wait({waiting}, timeout=20))[0], "who waits was not woken"
    lost = [line for line in messages(caplog, logging.ERROR) if "lost" in line and "receipts.send" in line]
    if locked:
        assert isinstance(waiting.exception(), JobCancelled)
        assert job.status is State.CANCELLED
        assert len(lost) == 1
        assert rows(file, "state") == []
    else:
        assert isinstance(waiting.exception(), NoResult)
        assert job.durable
        assert lost == []
        assert rows(file, "state") == [("pending",)]


async def test_no_job_vanishes_that_a_stuck_handler_enqueues_during_the_promotion_at_the_end_of_the_grace(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file(retry=False)
    ran: list[str] = []
    accepted: list[Job[None]] = []
    attempts = refused = 0
    free, promoting = asyncio.Event(), asyncio.Event()

    @q.task(name="work")
    async def work() -> None:
        ran.append(tinyq.current_job().id)

    @q.task(name="stuck")
    async def stuck() -> None:
        nonlocal attempts, refused
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
            attempts += 1
            try:
                accepted.append(await work.enqueue())
            except ShuttingDown:
                refused += 1

    insert = SQLiteStore.insert

    async def slow(self: SQLiteStore, new: Sequence[tinyq.JobRow], now: int) -> Sequence[tinyq.Inserted]:
        promoting.set()
        before = attempts
        await eventually(lambda: attempts > before + 3)
        return await insert(self, new, now)

    monkeypatch.setattr(SQLiteStore, "insert", slow)
    await stuck.enqueue()
    accepted.append(await work.options(delay=60).enqueue())
    await eventually(lambda: len(accepted) > 5)
    await stopped_at_once(q, clock)
    assert promoting.is_set()
    await eventually(lambda: refused > 3)
    stored = {id for (id,) in rows(file, "id")}
    fates = {
        job.id: ("ran" if job.id in ran else "")
        or ("stored" if tinyq.id_bytes(job.id) in stored else "")
        or ("reported" if job.status is State.CANCELLED and "lost" in (job.reason or "") else "")
        for job in accepted
    }
    assert [id for id, fate in fates.items() if not fate] == []
    assert fates[accepted[0].id] == "stored"
    reports = [line for line in messages(caplog, logging.ERROR) if "lost at shutdown" in line]
    assert bool(reports) == ("reported" in fates.values())
    free.set()
    await clock.settle()


# What is stored and cannot be read


async def test_a_row_whose_task_is_not_utf_8_does_not_stop_the_claims_of_others(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    other = await open_file(worker=False)
    await other.enqueue_many([("task", (n,)) for n in range(3)], durable=True, delay=5)
    edit(file, "UPDATE tinyq_jobs SET task = CAST(x'ff41' AS TEXT) WHERE seq = 2")
    q = await open_file()
    ran: list[int] = []

    @q.task(name="task")
    async def task(n: int) -> None:
        ran.append(n)

    await eventually(lambda: len(ran) == 2, clock)
    assert sorted(ran) == [0, 2]
    async with asyncio.timeout(20):
        assert (await q.stats()).count(state=State.PENDING) == 1


async def test_options_that_cannot_be_read_leave_their_job_dead_and_its_neighbours_run(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    other = await open_file(worker=False)
    jobs = await other.enqueue_many([("task", (n,)) for n in range(3)], durable=True, delay=5)
    edit(file, "UPDATE tinyq_jobs SET options = '{\"nope\":1}' WHERE seq = 2")
    q = await open_file()
    ran: list[int] = []

    @q.task(name="task")
    async def task(n: int) -> None:
        ran.append(n)

    await eventually(lambda: len(ran) == 2 and [state for (state,) in rows(file, "state")] == ["dead"], clock)
    assert sorted(ran) == [0, 2]
    bad = await q.get(jobs[1].id)
    with pytest.raises(JobFailed, match="undecodable"):
        await bad.result(timeout=20)
    assert bad.status is State.DEAD


@pytest.mark.parametrize("written", ["not JSON", "", pytest.param("[" * 100_000, id="nested too deep")])
async def test_a_result_that_a_hand_has_spoilt_cannot_be_read_and_the_error_says_so(
    open_file: Open, file: Path, written: str
) -> None:
    q, looker = await open_file(), await open_file(worker=False)
    job = await q.task(name="answer", durable=True, result_ttl=3600)(lambda: 42).enqueue()
    assert await job.result(timeout=20) == 42
    edit(file, "UPDATE tinyq_jobs SET result = ?", written)
    with pytest.raises(NoResult, match="is done, and its result cannot be read here"):
        await (await looker.get(job.id)).result()


async def test_options_that_cannot_be_read_do_not_keep_other_jobs_of_a_lost_worker_from_being_reclaimed(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    other = await open_file(worker=False)
    await other.enqueue_many([("task", (n,)) for n in range(3)], durable=True)
    edit(
        file,
        "UPDATE tinyq_jobs SET state = 'running', ready = NULL, worker = 'gone', claim_no = 1, attempts = 1, lease = ?",
        clock.time() - 30_000_000,
    )
    edit(file, "UPDATE tinyq_jobs SET options = '[' WHERE seq = 1")
    q = await open_file()
    ran: list[int] = []

    @q.task(name="task")
    async def task(n: int) -> None:
        ran.append(n)

    await eventually(lambda: len(ran) == 2 and [state for (state,) in rows(file, "state")] == ["dead"], clock, 0.5)
    assert sorted(ran) == [1, 2]
    [(error, reason)] = rows(file, "error, reason")
    assert "undecodable" in f"{error} {reason}"


# What a handler may do to those who run it


class Careless(Snooze):
    def __init__(self) -> None:
        pass


class Speechless(Cancel):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("signal_type", [Careless, Speechless])
async def test_a_broken_subclass_of_a_signal_ends_its_job_and_gives_the_slot_back(
    open_q: Open, durable: bool, signal_type: Callable[[], BaseException]
) -> None:
    q = await open_q(concurrency=1)

    @q.task(name="broken", durable=durable, retry=False)
    async def broken() -> None:
        raise signal_type()

    job = await broken.enqueue()
    with pytest.raises((JobFailed, JobCancelled)):
        await job.result(timeout=20)
    assert job.status in (State.DEAD, State.CANCELLED)
    assert job.attempts == 1
    await (await q.task(name="next", durable=durable)(nothing).enqueue()).result(timeout=20)


async def test_an_error_message_with_a_lone_surrogate_is_retried_and_kept_like_any_other(
    q: TinyQ, durable: bool, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(tinyq.log, "handle", records.append)  # the traceback has the surrogate, which no report could carry

    @q.task(name="task", durable=durable, retry=[1, 1])
    async def task() -> None:
        runs.append(tinyq.current_job().attempt)
        raise ValueError("bad name \udcff")

    job = await task.enqueue()
    await eventually(lambda: job.status in ENDED, clock)
    assert runs == [1, 2, 3]
    assert job.status is State.DEAD
    kept = await q.get(job.id)
    assert kept.error is not None
    assert kept.error.startswith("ValueError: bad name")
    lines = "\n".join(record.getMessage() for record in records)
    assert "is dead, no attempts left: ValueError: bad name" in lines
    assert "cannot be written" not in lines and "defect" not in lines


async def test_a_handler_that_cancels_its_own_task_and_returns_ends_once(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    runs: list[int] = []

    @q.task(name="task", durable=durable)
    async def task() -> str:
        runs.append(tinyq.current_job().attempt)
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        return "value"

    job = await task.enqueue()
    assert await job.result(timeout=20) == "value"
    assert job.status is State.DONE
    for _ in range(20):
        await clock.advance(3)  # two leases
        await asyncio.sleep(0.002)
    assert runs == [1]


async def test_a_handler_that_cancels_its_own_task_while_it_times_out_is_dead_by_its_timeout(
    q: TinyQ, durable: bool, clock: FakeClock
) -> None:
    @q.task(name="task", durable=durable, timeout=1, retry=False)
    async def task() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()

    job = await task.enqueue()
    await eventually(lambda: job.status in ENDED, clock)
    assert job.status is State.DEAD
    with pytest.raises(JobFailed, match="TimeoutError"):
        await job.result(timeout=20)


# Cancelling


async def test_a_durable_job_is_cancelled_at_once_however_soon_after_its_enqueue(open_file: Open) -> None:
    q = await open_file()

    @q.task(name="task", durable=True, retry=False)
    async def task() -> None:
        await asyncio.Event().wait()

    for turns in range(12):  # before, during and after its claim
        job = await task.enqueue()
        for _ in range(turns):
            await asyncio.sleep(0)
        assert await asyncio.wait_for(job.cancel(), 20)  # the clock stands still: no lease is renewed
        assert job.status is State.CANCELLED


@pytest.mark.parametrize("delay", [0, 1])
async def test_a_job_that_fails_while_another_instance_cancels_it_ends_cancelled_and_is_not_retried(
    open_file: Open, file: Path, clock: FakeClock, delay: int
) -> None:
    q, other = await open_file(), await open_file(worker=False)
    runs: list[int] = []
    may_fail = asyncio.Event()

    @q.task(name="task", retry=[delay] * 3)
    async def task() -> None:
        runs.append(tinyq.current_job().attempt)
        await may_fail.wait()
        raise ValueError("too bad")

    job = await other.enqueue("task", durable=True)
    await eventually(lambda: runs, clock)
    seen = await other.get(job.id)
    cancelling = asyncio.create_task(seen.cancel())
    await eventually(lambda: rows(file, "cancel_at IS NOT NULL") == [(1,)])
    may_fail.set()
    assert await asyncio.wait_for(cancelling, 20)
    assert seen.status is State.CANCELLED
    for _ in range(20):
        await clock.advance(1)
        await asyncio.sleep(0.002)
    assert runs == [1]
    assert rows(file, "state") == [("cancelled",)]


async def test_a_job_that_is_cancelled_while_its_failure_is_being_written_ends_cancelled_and_is_not_retried(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file()
    runs: list[int] = []
    may_fail, failed = asyncio.Event(), asyncio.Event()

    @q.task(name="task", durable=True, retry=[1, 1, 1])
    async def task() -> None:
        runs.append(tinyq.current_job().attempt)
        await may_fail.wait()
        failed.set()
        raise ValueError("too bad")

    job = await task.enqueue()
    await eventually(lambda: runs, clock)
    with write_lock(file) as lock:
        may_fail.set()
        await asyncio.wait_for(failed.wait(), 20)
        await clock.settle()
        cancelling = asyncio.create_task(job.cancel())
        await clock.settle()
        assert not cancelling.done()
        lock.execute("ROLLBACK")
        assert await asyncio.wait_for(cancelling, 20)
    assert job.status is State.CANCELLED
    for _ in range(20):
        await clock.advance(1)
        await asyncio.sleep(0.002)
    assert runs == [1]
    assert rows(file, "state") == [("cancelled",)]


async def test_cancel_of_an_abandoned_job_after_stop_answers_at_once(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    free = asyncio.Event()

    @q.task(name="stuck", durable=durable)
    async def stuck() -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    job = await stuck.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    await clock.settle()
    await stopped_at_once(q, clock)
    assert await asyncio.wait_for(job.cancel(), 20) is False
    free.set()
    await clock.settle()


# Many


async def test_drain_goes_on_behind_more_due_rows_of_an_unknown_task_than_come_due_at_once(
    open_file: Open, clock: FakeClock
) -> None:
    other = await open_file(worker=False)
    await other.enqueue_many([("unknown", (n,)) for n in range(1_100)], durable=True, delay=0.5)
    await other.enqueue("task", durable=True, delay=0.6)
    clock.block(1)
    q = await open_file()
    ran: list[str] = []

    @q.task(name="task")
    async def task() -> None:
        ran.append("task")

    async with asyncio.timeout(20):
        await q.drain()
    assert ran == ["task"]


async def test_more_finished_rows_than_one_prune_takes_are_all_pruned_at_once(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    other = await open_file(worker=False)
    await other.enqueue_many([("task", (n,)) for n in range(1_700)], durable=True)
    over = clock.time() + 10_000_000
    edit(file, "UPDATE tinyq_jobs SET state = 'done', ready = NULL, finished = 1, keep_until = ?", over)
    await open_file(lease=3_600)  # its upkeep comes round every quarter of an hour
    with closing(sqlite3.connect(file)) as db:

        def left() -> int:
            return int(db.execute("SELECT count(*) FROM tinyq_jobs").fetchone()[0])

        assert left() == 1_700
        clock.block(11)
        await eventually(lambda: left() < 1_700, clock, 60)
        await eventually(lambda: left() == 0)  # the clock stands still: in the same round


def test_the_work_of_a_claim_among_many_lanes_does_not_grow_with_the_due_rows_of_one(tmp_path: Path) -> None:
    tasks = ["busy", *(f"task {n}" for n in range(9))]
    room = Room(20, {}, 20, 1, dict.fromkeys(tasks, False))
    now = 1_767_268_800_000_000

    def row(task: str, queue: str) -> tinyq.JobRow:
        return tinyq.JobRow(tinyq.new_id(now), task, queue, 0, now, now, payload="[[],{}]", durable=True)

    def work(many: int) -> int:
        """Instructions of SQLite's virtual machine."""
        instructions = 0

        def count() -> int:
            nonlocal instructions
            instructions += 1
            return 0

        path = str(tmp_path / f"{many}.db")
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            tinyq.prepare(db, path, "normal")
            db.execute("BEGIN IMMEDIATE")
            lanes = [row(task, queue) for task in tasks for queue in ("default", "other")]
            tinyq.insert_rows(db, "default", [*lanes, *(row("busy", "default") for _ in range(many))], now)
            db.set_progress_handler(count, 1)
            assert len(tinyq.claim_rows(db, "default", room, "w1", now + 30_000_000, now).rows) == 20
            db.execute("ROLLBACK")
        return instructions

    few, many = work(40), work(20_000)
    assert many < 2 * few


# Mistakes at a call


async def test_a_path_in_the_place_of_the_application_is_refused_by_lifespan(tmp_path: Path, clock: FakeClock) -> None:
    q = TinyQ(clock=clock)
    path: Any
    for path in ("jobs.db", tmp_path / "jobs.db"):
        for lifespan in (tinyq.lifespan, q.lifespan):
            with pytest.raises(TypeError, match=r"jobs\.db.*db="):
                async with lifespan(path):
                    pass
    assert not (tmp_path / "jobs.db").exists()


async def test_on_conflict_means_nothing_without_a_key(q: TinyQ, durable: bool) -> None:
    task = q.task(name="task", durable=durable, delay=60)(nothing)
    jobs = [await q.enqueue(task, on_conflict="raise", key=None) for _ in range(2)]
    assert all(job.created for job in jobs)
    assert (await q.stats()).count() == 2


async def test_an_option_that_is_passed_to_the_enqueue_of_a_task_is_refused_with_the_way_to_give_it(q: TinyQ) -> None:
    @q.task(name="mail")
    async def mail(n: int) -> None: ...

    wrong: Any = mail.enqueue
    with pytest.raises(TypeError, match=r"delay is an option.*task\.options\(delay=") as caught:
        await wrong(1, delay=5)
    assert "'mail'" in str(caught.value)
    assert (await q.stats()).count() == 0


async def test_a_durable_job_by_a_misspelled_name_is_stored_and_warned_about_once_with_the_near_match(
    open_file: Open, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file()
    q.task(name="receipts.send")(nothing)
    for n in range(3):
        await q.enqueue("receipts.sned", n, durable=True)
    await q.enqueue("elsewhere.purge", durable=True)  # like no other: left to others without a word
    [line] = messages(caplog, logging.WARNING)
    assert "'receipts.sned'" in line
    assert "did you mean 'receipts.send'?" in line
    assert len(rows(file, "id")) == 4


async def test_a_result_that_does_not_come_in_time_is_an_error_that_names_the_job(q: TinyQ, durable: bool) -> None:
    job = await q.task(name="task", durable=durable, delay=60)(nothing).enqueue()
    with pytest.raises(TimeoutError, match=job.id):
        await job.result(timeout=0.01)
    assert job.status is State.PENDING
