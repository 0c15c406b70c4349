"""What `health` says: ok, or degraded and why; and ok again afterwards."""

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import Open, counted, eventually

import tinyq
from tinyq import Health, SystemClock, TinyQ

OK = Health(status="ok")


@pytest.fixture
async def q(open_file: Open) -> TinyQ:
    return await open_file(clock=SystemClock(), lease=0.5)


def reasons(q: TinyQ) -> str:
    health = q.health()
    assert (health.status == "ok") == (health.reasons == ())
    return "; ".join(health.reasons)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


# the life of an instance


async def test_a_process_that_works_is_ok(q: TinyQ) -> None:
    assert q.health() == OK
    assert q.health().as_dict() == {"status": "ok", "reasons": ()}


async def test_without_a_database_all_is_well_too() -> None:
    async with TinyQ() as q:
        assert q.health() == OK


async def test_before_the_start_and_after_the_stop_it_is_degraded() -> None:
    q = TinyQ()
    assert q.health() == Health(status="degraded", reasons=("tinyq has not been started",))
    async with q:
        pass
    assert q.health() == Health(status="degraded", reasons=("tinyq has stopped",))


async def test_while_stopping_it_is_degraded(q: TinyQ) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    @q.task
    async def last() -> None:
        began.set()
        await go.wait()

    await q.enqueue(last)
    async with asyncio.timeout(30):
        await began.wait()
    stopping = asyncio.create_task(q.stop())
    await asyncio.sleep(0)
    assert q.health() == Health(status="degraded", reasons=("tinyq is stopping",))
    go.set()
    await stopping


def test_an_instance_whose_loop_has_gone_is_degraded() -> None:
    q = TinyQ()

    async def start() -> None:
        await q.start()

    asyncio.run(start())
    assert q.health().status == "degraded"


# the database


async def test_a_locked_database_is_a_reason_until_it_is_unlocked(q: TinyQ, file: Path) -> None:
    with locked(file):
        await eventually(lambda: "lease renewal failing: OperationalError: database is locked" in reasons(q))
    await eventually(lambda: q.health() == OK)


async def test_a_loop_that_cannot_use_the_database_is_a_reason(q: TinyQ, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(tinyq, "look_for_due", broken)
        await q.wake()
        await eventually(lambda: "durable claims failing: StoreError: " in reasons(q))
        assert "disk I/O error" in reasons(q)
    await eventually(lambda: q.health() == OK)


async def test_a_write_that_waits_for_long_is_a_reason(q: TinyQ, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyq, "STALLED", 0.05)
    with locked(file):
        enqueue = asyncio.create_task(q.enqueue("anything", durable=True))
        await eventually(lambda: "a write has been waiting for the database for 0." in reasons(q))
    await enqueue
    await eventually(lambda: q.health() == OK)


async def test_a_failure_to_listen_is_no_reason_once_nobody_waits(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(tinyq.Pulse, "_listen", broken)
    q = await open_file(worker=False, clock=SystemClock())
    job = await q.enqueue("strange", durable=True, result_ttl=60)
    waiting = asyncio.create_task(job.result())
    await eventually(lambda: "listening to the database failing: OperationalError: disk I/O error" in reasons(q))
    waiting.cancel()
    await asyncio.wait({waiting})
    await eventually(lambda: q.health() == OK)


# the loop


async def test_a_loop_that_does_not_turn_is_a_reason_seen_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyq, "STALLED", 0.2)
    async with TinyQ() as q:
        seen = threading.Event()

        def watch() -> None:
            while "the event loop has not turned for " not in reasons(q):
                time.sleep(0.01)
            seen.set()

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        assert seen.wait(60)  # which blocks the loop
        watching.join()
        async with asyncio.timeout(30):
            while await asyncio.to_thread(q.health) != OK:
                pass


async def test_a_loop_that_asks_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyq, "STALLED", 0.0)
    async with TinyQ() as q:
        engine = q._engine
        assert engine is not None
        assert engine.beat.owed() == 0.0
        assert engine.beat.owed() > 0.0
        assert q.health() == OK


# jobs that nobody takes


async def test_due_jobs_of_a_task_that_nobody_knows_are_a_reason_until_somebody_does(q: TinyQ) -> None:
    jobs = [await q.enqueue("strange", durable=True), await q.enqueue("stranger", durable=True)]
    await eventually(lambda: reasons(q) == "jobs are due of tasks that no worker knows: strange, stranger")

    @q.task(name="strange")
    async def known() -> None: ...

    assert reasons(q) == "jobs are due of tasks that no worker knows: stranger"
    await jobs[1].cancel()
    await eventually(lambda: q.health() == OK)


@pytest.fixture
def upkeeps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is done in each upkeep, of whatever process."""
    return counted(monkeypatch, "nothing_to_prune")


async def test_jobs_that_another_worker_takes_are_no_reason(q: TinyQ, open_file: Open, upkeeps: list[object]) -> None:
    other, came = await open_file(clock=SystemClock(), lease=0.5), asyncio.Event()

    @other.task(name="shared")
    async def shared() -> None:
        came.set()

    while len(upkeeps) < 12:
        came.clear()
        await q.enqueue("shared", durable=True)
        async with asyncio.timeout(30):
            await came.wait()
        assert q.health() == OK


async def test_a_process_that_claims_nothing_does_not_mind_unknown_tasks(open_file: Open, upkeeps: list[object]) -> None:
    q = await open_file(worker=False, clock=SystemClock(), lease=0.3)
    await q.enqueue("strange", durable=True)
    upkeeps.clear()
    await eventually(lambda: len(upkeeps) > 4)
    assert q.health() == OK


async def test_an_index_with_jobs_that_are_not_in_the_table_is_a_reason_and_does_not_spin(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with TinyQ(file, worker=False) as producer:
        await producer.enqueue("note", durable=True)
    lose_rows_but_keep_index_entries(file)
    claims = counted(monkeypatch, "claim_rows")
    q = await open_file(clock=SystemClock())

    @q.task(name="note")
    async def note() -> None: ...

    await eventually(lambda: "due jobs were found and none can be claimed" in reasons(q))
    assert "REINDEX" in reasons(q)
    assert len(claims) < 10
    assert sum("none can be claimed" in message for message in caplog.messages) == 1
    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as db:
        db.execute("REINDEX tinyq_claim")
    await eventually(lambda: q.health() == OK)


def lose_rows_but_keep_index_entries(file: Path) -> None:
    """As after a partial restore: the rows are deleted while SQLite does not know of the index."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        kept = db.execute("SELECT * FROM sqlite_schema WHERE name = 'tinyq_claim'").fetchone()
        db.execute("DELETE FROM sqlite_schema WHERE name = 'tinyq_claim'")
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("DELETE FROM tinyq_jobs")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("INSERT INTO sqlite_schema VALUES (?, ?, ?, ?, ?)", kept)
    with closing(sqlite3.connect(file)) as db:
        assert "missing from index" not in json.dumps(db.execute("PRAGMA integrity_check").fetchall())
