"""A lease is renewed whatever the event loop does, by the owner or by a thread, and is lost only to somebody else."""

import asyncio
import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from helpers import Open, eventually
from servers import wait_until

import tinyq
from tinyq import State, SystemClock

pytestmark = pytest.mark.timeout(300)


def query(file: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file, timeout=10)) as db:
        found = db.execute(sql).fetchall()
        db.commit()
        return found


async def never(*_: object) -> Any:
    await asyncio.Event().wait()


# a loop that is blocked


def test_a_job_that_blocks_its_loop_for_three_leases_is_started_once(fleet: Fleet) -> None:
    members = [fleet.member({"blocks": 5}, lease=1.0) for _ in range(2)]
    fleet.enqueue("blocks", 3.5)
    fleet.wait_for_marks(1, "blocks", "ended")
    fleet.wait_for_rows([], "id")
    for member in members:
        member.finish()
    assert len(fleet.marks("blocks", "began")) == 1


def test_a_job_that_blocks_its_loop_for_more_than_ten_leases_is_given_to_another(fleet: Fleet) -> None:
    fleet.enqueue("blocks", 30)
    for _ in range(2):
        fleet.member({"blocks": 5}, lease=0.5)
    [first, second] = fleet.wait_for_marks(2, "blocks", "began")
    assert first[0] != second[0]
    assert [line for line in fleet.log_lines() if "has not turned for 10 leases" in line]
    assert fleet.rows("attempts", "lost") == [(2, 1)]


def test_what_runs_beside_a_blocking_job_keeps_its_lease_too(fleet: Fleet) -> None:
    busy = fleet.member({"blocks": 5, "long": 5}, lease=0.8)
    fleet.enqueue("long", 4)
    fleet.wait_for_marks(1, "long", "began")
    other = fleet.member({"long": 5}, lease=0.8)
    fleet.enqueue("blocks", 2.5)
    fleet.wait_for_marks(1, "blocks", "ended")
    fleet.wait_for_marks(1, "long", "ended")
    fleet.wait_for_rows([], "id")
    busy.finish()
    other.finish()
    assert len(fleet.marks("long", "began")) == 1


# an owner that does not get there


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch, open_file: Open) -> tuple[tinyq.TinyQ, tinyq.Job[None]]:
    """A process whose owner renews nothing, and a job that runs in it for ever."""
    monkeypatch.setattr(tinyq.SQLiteStore, "extend", never)
    monkeypatch.setattr(tinyq, "EXTRA", 0.2)  # this fault outlasts any patience
    q = await open_file(clock=SystemClock(), lease=1.0)

    @q.task(name="endless", timeout=3600)
    async def endless() -> None:
        await asyncio.Event().wait()

    job = await q.enqueue(endless, durable=True)
    await eventually(lambda: job.status == State.RUNNING)
    return q, job


async def test_a_lease_that_the_owner_does_not_renew_is_renewed_by_the_thread(running: object, file: Path) -> None:
    def lease() -> int:
        return int(query(file, "SELECT lease FROM tinyq_jobs")[0][0])

    for _ in range(3):
        before = lease()
        await eventually(lambda before=before: lease() > max(before, time.time_ns() // 1000))  # type: ignore[misc]


async def test_a_job_whose_lease_the_thread_finds_lost_is_cancelled_and_writes_nothing(
    running: tuple[tinyq.TinyQ, tinyq.Job[None]], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query(file, "UPDATE tinyq_jobs SET claim_no = claim_no + 1, worker = 'another', lease = lease + 60000000")
    await eventually(lambda: "its outcome is not written" in caplog.text)
    assert caplog.text.count("has lost its lease") == 1
    assert query(file, "SELECT worker, state FROM tinyq_jobs") == [("another", "running")]


async def test_a_cancel_that_is_asked_for_elsewhere_arrives_with_the_threads_renewal(
    running: tuple[tinyq.TinyQ, tinyq.Job[None]], open_file: Open
) -> None:
    _, job = running
    other = await open_file(clock=SystemClock(), worker=False)
    assert await (await other.get(job.id)).cancel()
    await eventually(lambda: job.status == State.CANCELLED)


# bad conditions


async def test_a_locked_file_is_told_once_and_the_lease_is_renewed_afterwards(
    running: object, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinyq")

    def told(text: str) -> int:
        return sum(text in message for message in caplog.messages)

    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as other:
        other.execute("BEGIN IMMEDIATE")
        await eventually(lambda: told("lease renewal failed"))
        other.execute("ROLLBACK")
    await eventually(lambda: told("lease renewal: working again"))
    assert told("lease renewal failed") == told("lease renewal: working again") == 1
    [(lease, claim_no)] = query(file, "SELECT lease, claim_no FROM tinyq_jobs")
    assert lease > time.time_ns() // 1000
    assert claim_no == 1


async def test_the_thread_survives_any_error_and_says_so_once(
    running: object, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tinyq")
    failures: list[object] = []

    def fail(*given: object) -> None:
        failures.append(given)
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(tinyq, "extend_leases", fail)
        await eventually(lambda: len(failures) > 3)
    await eventually(lambda: "lease renewal: working again" in caplog.messages)
    assert [message for message in caplog.messages if "disk I/O error" in message] == [
        "lease renewal failed and will be tried again: OperationalError: disk I/O error"
    ]


async def test_nothing_of_the_thread_is_left_after_a_stop(running: tuple[tinyq.TinyQ, object]) -> None:
    q, _ = running
    engine = q._engine
    assert engine is not None and engine.pulse is not None
    thread = engine.pulse._thread
    assert thread.is_alive()
    await q.stop(grace=0)
    assert not thread.is_alive()


def test_the_thread_ends_with_a_loop_that_is_closed_without_a_stop(file: Path) -> None:
    q = tinyq.TinyQ(file)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(q.start())
    engine = q._engine
    assert engine is not None and engine.pulse is not None
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
    assert engine.durable_store is not None
    loop.run_until_complete(engine.durable_store.close())
    loop.close()
    thread = engine.pulse._thread
    wait_until("the thread has ended", lambda: not thread.is_alive())
