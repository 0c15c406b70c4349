"""Where two features meet: promotion, hand-over, shutdown, replaced tasks, cancelled tasks."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from helpers import eventually

import tinyq
from tinyq import State, TinyQ


async def test_a_promoted_job_runs_once_and_is_pending_nowhere_else(tmp_path: Path) -> None:
    ran: list[int] = []
    async with TinyQ(tmp_path / "jobs.db", concurrency=1) as q:
        gate = asyncio.Event()

        @q.task(name="waits")
        async def waits(number: int) -> None:
            await gate.wait()
            ran.append(number)

        jobs = [await waits.enqueue(number) for number in range(7)]
        await eventually(lambda: jobs[0].status is State.RUNNING)
        assert [await job.promote() for job in jobs[1:]] == [True] * 6
        gate.set()
        await eventually(lambda: all(job.status is State.DONE for job in jobs))
        assert cast(Any, q)._engine.memory_store.pending == 0
    assert sorted(ran) == list(range(7))


async def test_a_job_behind_a_running_one_with_its_key_is_not_promoted(tmp_path: Path) -> None:
    async with TinyQ(tmp_path / "jobs.db") as q:
        gate = asyncio.Event()

        @q.task(name="waits", key="k", on_conflict="queue")
        async def waits() -> None:
            await gate.wait()

        first = await waits.enqueue()
        await eventually(lambda: first.status is State.RUNNING)
        second = await waits.enqueue()
        assert not await second.promote()
        gate.set()
        await second.result(10)
        assert not second.durable


async def test_a_slot_kept_for_a_durable_job_that_could_not_be_stored_goes_to_a_best_effort_one(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    async with TinyQ(file, concurrency=1) as q:

        @q.task(name="durable")
        async def durable() -> None: ...

        async def best_effort() -> str:
            return "ran"

        engine = cast(Any, q)._engine
        crew = engine.crew
        await eventually(lambda: not any(tier.hungry for tier in crew.tiers) and engine.durable_store.idle)
        with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as other:
            other.execute("BEGIN IMMEDIATE")
            storing = asyncio.create_task(q.enqueue(durable, durable=True))
            await eventually(lambda: crew._handed == 1)
            waiting = await q.enqueue(best_effort)
            storing.cancel()
            other.execute("ROLLBACK")
        assert await waiting.result(10) == "ran"


async def test_a_job_that_was_told_to_stop_before_it_began_is_promoted(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    q = TinyQ(file)
    await q.start()

    @q.task(name="later")
    async def later() -> None:
        raise AssertionError("it was not to begin")

    job = await later.enqueue()
    await q.stop(grace=0)
    assert job.durable
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT state, attempts, interruptions FROM tinyq_jobs").fetchall() == [("pending", 0, 0)]


async def test_a_task_that_was_replaced_does_not_say_how_its_successors_jobs_run(tmp_path: Path) -> None:
    async with TinyQ(tmp_path / "jobs.db") as q:

        @q.task(name="same")
        async def old() -> None: ...

        @q.task(name="same", replace=True)
        def new() -> None: ...

        await old.options(durable=True).enqueue()
        assert cast(Any, q)._engine.durable_tasks == {"same": True}  # in a thread


async def test_a_job_whose_task_somebody_cancels_before_it_began_gives_its_slot_back() -> None:
    async with TinyQ(concurrency=1) as q:

        async def noop() -> None: ...

        job = await q.enqueue(noop)
        cast(Any, job)._row.runner.cancel()
        second = await q.enqueue(noop)
        await second.result(10)
        assert second.status is State.DONE


async def test_an_option_that_is_changed_between_two_calls_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    async with TinyQ(file, worker=False) as q:
        delays = [30.0]
        for delays[0] in (30.0, 60.0):
            await q.enqueue("f", durable=True, retry=delays)
    with closing(sqlite3.connect(file)) as db:
        first, second = db.execute("SELECT options FROM tinyq_jobs ORDER BY seq").fetchall()
    assert "30" in first[0]
    assert "60" in second[0]


async def test_a_claim_of_a_job_that_must_not_run_twice_waits_for_the_disk(tmp_path: Path) -> None:
    confirmed: list[object] = []
    original = tinyq.SQLiteStore.confirm

    async def confirm(self: tinyq.SQLiteStore, claims: Any, lease: int) -> None:
        await original(self, claims, lease)
        confirmed.extend(claims)

    async with TinyQ(tmp_path / "jobs.db", worker=False) as producer:
        await producer.enqueue("charge", durable=True)
    q = TinyQ(tmp_path / "jobs.db")
    seen: list[int] = []

    @q.task(name="charge", on_lost="dead")
    async def charge() -> None:
        seen.append(len(confirmed))

    tinyq.SQLiteStore.confirm = confirm  # type: ignore[method-assign]
    try:
        async with q:
            await eventually(lambda: bool(seen))
    finally:
        tinyq.SQLiteStore.confirm = original  # type: ignore[method-assign]
    assert seen == [1]
