"""What goes wrong around a database file that several processes share, and what becomes of its jobs then."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from fleet import Fleet
from helpers import Open, eventually
from servers import wait_until

from tinyq import SQLiteStore, State, TinyQ

pytestmark = pytest.mark.timeout(300)

DAY = 86400.0


@pytest.fixture
def other(file: Path) -> Iterator[sqlite3.Connection]:
    """The application's own connection to the same file."""
    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as connection:
        yield connection


@contextmanager
def locked(path: str, seconds: float, pause: float = 0.0) -> Iterator[None]:
    """Somebody holds the write lock for so long, once or again and again until the end of the block."""
    over = threading.Event()

    def hold() -> None:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as connection:
            while not over.is_set():
                connection.execute("BEGIN IMMEDIATE")
                over.wait(seconds)
                connection.execute("ROLLBACK")
                over.wait(pause)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# Locks


def test_a_write_lock_that_outlasts_the_lease_takes_no_job_from_its_worker(fleet: Fleet) -> None:
    members = [fleet.member({"long": 5}, lease=3) for _ in range(3)]
    fleet.enqueue("long", *[6.5] * 4)
    fleet.wait_for_marks(4, "long", "began")
    with locked(fleet.db, 4):
        time.sleep(4)  # the fault itself
    fleet.wait_for_marks(4, "long", "ended")
    fleet.wait_for_rows([], "id")
    for member in members:
        member.finish()
    assert Counter(what for _, _, what in fleet.marks("long")) == {"began": 4, "ended": 4}
    assert [line for line in fleet.log_lines() if "reclaimed" in line] == []


def test_a_file_that_is_locked_most_of_the_time_is_waited_for_by_everyone(fleet: Fleet) -> None:
    members = [fleet.member({"note": 1}, lease=10) for _ in range(4)]

    async def enqueue() -> None:
        async with TinyQ(fleet.db, worker=False) as q:
            for n in range(10):
                await asyncio.gather(*(q.enqueue("note", n * 10 + i, durable=True) for i in range(10)))

    with locked(fleet.db, 0.3, pause=0.05):
        asyncio.run(enqueue())
        fleet.wait_for_marks(100, "note")
    fleet.wait_for_rows([], "id")
    for member in members:
        member.finish()
    assert Counter(int(n) for _, _, n in fleet.marks("note")) == Counter(range(100))
    assert [line for line in fleet.log_lines() if "lease" in line or "never" in line] == []


# A file that was cut off in the middle of its work


def test_files_of_a_moment_in_the_middle_of_the_load_open_with_all_that_was_acknowledged(file: Path, tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        import tinyq

        async def main():
            async with tinyq.TinyQ(sys.argv[1], worker=False) as q:
                while True:
                    for job in await asyncio.gather(*(q.enqueue("send", durable=True) for _ in range(5))):
                        print(job.id, flush=True)

        asyncio.run(main())
    """
    copy = tmp_path / "copy.db"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(file)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(200)]
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            shutil.copy(file, copy)
            shutil.copy(f"{file}-wal", f"{copy}-wal")
            process.kill()
            lines += process.stdout.readlines()
        finally:
            process.kill()
    with open(f"{copy}-wal", "ab") as wal:
        wal.write(os.urandom(3000))  # a write that was torn
    acknowledged = [line.strip() for line in lines if line.endswith("\n")]
    assert len(acknowledged) >= 200

    async def look() -> set[State]:
        async with TinyQ(copy, worker=False) as q:
            await q.enqueue("send", durable=True)
            return {(await q.get(id)).status for id in acknowledged}

    assert asyncio.run(look()) == {State.PENDING}
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# Rows that cannot be taken


async def test_a_row_that_cannot_be_claimed_is_not_tried_without_pause_and_others_run_afterwards(
    open_file: Open, file: Path, clock: FakeClock, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    looker = await open_file(worker=False)
    other.execute("CREATE TRIGGER stuck BEFORE UPDATE ON tinyq_jobs BEGIN SELECT RAISE(IGNORE); END")
    claims = 0
    claim = SQLiteStore.claim

    async def counted(*arguments: Any) -> Any:
        nonlocal claims
        claims += 1
        return await claim(*arguments)

    monkeypatch.setattr(SQLiteStore, "claim", counted)
    ran: list[int] = []
    await looker.enqueue("note", 1, durable=True)
    worker = TinyQ(file, clock=clock)

    @worker.task(name="note")
    async def note(n: int) -> None:
        ran.append(n)

    async with worker:
        await eventually(lambda: claims >= 3, clock)
        await asyncio.sleep(0.2)  # what is under way is answered; this clock stands still
        before = claims
        await asyncio.sleep(0.5)
        assert claims == before
        assert ran == []
        other.execute("DROP TRIGGER stuck")
        await looker.enqueue("note", 2, durable=True)
        await eventually(lambda: ran == [1, 2], clock)


# Claims


async def test_jobs_that_wait_for_a_slot_hold_no_lease_and_may_run_elsewhere(
    open_file: Open, clock: FakeClock, other: sqlite3.Connection
) -> None:
    gate, started = asyncio.Event(), list[tuple[str, int]]()
    workers = {name: await open_file(concurrency=1, lease=3600) for name in ("a", "b")}
    for name, worker in workers.items():

        @worker.task(name="work")
        async def work(n: int, name: str = name) -> None:
            started.append((name, n))
            await gate.wait()

    looker = await open_file(worker=False)
    await looker.enqueue_many([("work", (n,)) for n in range(20)], durable=True)
    await eventually(lambda: len(started) == 2, clock)
    await clock.advance(5)
    await asyncio.sleep(0.1)  # time enough for another claim
    rows = other.execute("SELECT state, lease IS NULL, attempts, count(*) FROM tinyq_jobs GROUP BY 1, 2, 3 ORDER BY 1").fetchall()
    assert rows == [("pending", 1, 0, 18), ("running", 0, 1, 2)]
    gate.set()
    await eventually(lambda: other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,), clock)
    assert sorted(n for _, n in started) == list(range(20))


async def test_a_job_that_is_due_in_a_month_holds_no_lease_until_then_and_runs_once(
    open_file: Open, clock: FakeClock, other: sqlite3.Connection
) -> None:
    ran: list[str] = []
    for name in "abcd":
        worker = await open_file(lease=5)

        @worker.task(name="report")
        async def report(name: str = name) -> None:
            ran.append(name)

    await worker.enqueue("report", durable=True, delay=30 * DAY)
    for _ in range(29):
        clock.block(DAY)
        await clock.advance(10)
    untouched = ("pending", 0, 0, None)
    assert other.execute("SELECT state, attempts, claim_no, lease FROM tinyq_jobs").fetchall() == [untouched]
    assert ran == []
    clock.block(DAY)
    await eventually(lambda: ran, clock, 0.005)  # slowly: the lease is real work in threads, which this clock does not wait for
    await eventually(lambda: other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,))
    await clock.advance(20)
    assert len(ran) == 1


def test_a_killed_worker_delays_nothing_but_what_ran_in_it(fleet: Fleet) -> None:
    tasks = {"hangs_once": 2, "note": 2}
    killed = fleet.member(tasks, lease=3600)
    fleet.enqueue("hangs_once", *range(3))
    fleet.wait_for_marks(3, "hangs_once")
    members = [fleet.member(tasks, lease=3600) for _ in range(2)]
    fleet.enqueue("note", *range(100))
    killed.kill()
    fleet.enqueue("note", *range(100, 200))

    def noted() -> Counter[int]:
        return Counter(int(n) for _, _, n in fleet.marks("note"))

    wait_until("all that came afterwards has run", lambda: set(range(100, 200)) <= noted().keys())  # long before a lease ends
    assert set(noted().values()) == {1}
    assert fleet.rows("task", "state", "attempts")[:3] == [("hangs_once", "running", 1)] * 3
    for member in members:
        member.finish()


async def test_higher_priority_always_goes_first_and_the_lowest_runs_when_there_is_no_other(open_q: Open, durable: bool) -> None:
    q, order = await open_q(concurrency=1), list[str]()

    @q.task(name="work", durable=durable)
    async def work(name: str, left: int) -> None:
        order.append(name)
        if left == 20:
            await work.options(priority=0).enqueue("low", 0)
        if left > 0:
            await work.options(priority=5).enqueue(f"high {left - 1}", left - 1)

    await work.options(priority=5).enqueue("high 20", 20)
    async with asyncio.timeout(20):
        while len(order) < 22:
            await q.drain()
    assert order == [*(f"high {n}" for n in range(20, -1, -1)), "low"]


# What grows


async def test_a_tight_loop_of_enqueues_never_has_more_in_memory_than_may_wait() -> None:
    waiting = most = 0

    async def quick() -> None:
        nonlocal waiting
        waiting -= 1

    async with TinyQ(max_pending=50, concurrency=10) as q:
        for _ in range(5_000):
            await q.enqueue(quick)
            waiting += 1
            most = max(most, waiting)
        await q.drain()
    assert waiting == 0
    assert 50 <= most <= 61  # those that wait, those that have a slot, and the one just counted


async def test_a_schedule_leaves_one_row_however_often_it_fires(
    open_file: Open, clock: FakeClock, other: sqlite3.Connection
) -> None:
    q, ran = await open_file(), 0

    @q.every(60, name="tick", failure_ttl=600, retry=False)
    async def tick() -> None:
        nonlocal ran
        ran += 1
        if ran % 2:
            raise ValueError("every other one fails, and is kept for ten minutes")

    for n in range(1, 61):
        await eventually(lambda n=n: ran >= n, clock, 5)  # type: ignore[misc]
    assert other.execute("SELECT name FROM tinyq_schedules").fetchall() == [("tick",)]
    await eventually(lambda: other.execute("SELECT count(*) FROM tinyq_jobs WHERE state = 'dead'").fetchone()[0] <= 6, clock)
