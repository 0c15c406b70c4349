"""`with q.testing() as jobs:`: the same behaviour as in production, with nothing running and no time passing by itself."""

import asyncio
import functools
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from clock import FakeClock
from fastapi import FastAPI
from fastapi.testclient import TestClient

import tinyq
from tinyq import Job, Kit, Snooze, State, Task, TinyQ, at_once

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def q() -> TinyQ:
    """Not started, and without a database."""
    return TinyQ()


@pytest.fixture
def jobs(q: TinyQ) -> Iterator[Kit]:
    with q.testing(at=NOON) as jobs:
        yield jobs


def enqueue(q: TinyQ, fn: Any, *args: Any, **more: Any) -> Job[Any]:
    """From a loop of its own, as a test client's route does."""
    return asyncio.run(q.enqueue(fn, *args, **more))


def register(q: TinyQ, fn: Callable[..., Any], name: str, **options: Any) -> Task[..., Any, Any]:
    return q.task(name=name, **options)(fn)


# what is there, and what is not


def test_an_enqueued_job_waits_until_it_is_drained(q: TinyQ, jobs: Kit, durable: bool) -> None:
    ran: list[int] = []
    task = register(q, ran.append, name="note")
    job = enqueue(q, task, 7, durable=durable)
    assert (job.status, job.durable, ran) == (State.PENDING, durable, [])
    assert jobs.drain() == 1
    assert (job.status, ran) == (State.DONE, [7])


async def test_the_same_in_an_async_test(q: TinyQ, jobs: Kit, durable: bool) -> None:
    @q.task
    async def double(n: int) -> int:
        return 2 * n

    job = await double.options(durable=durable).enqueue(4)
    assert await jobs.adrain() == 1
    assert await job.result() == 8


def test_what_was_enqueued_is_gone_after_the_block_and_tasks_stay(q: TinyQ, durable: bool) -> None:
    task = register(q, lambda: None, name="nothing")
    for _ in range(2):
        with q.testing() as jobs:
            assert jobs.enqueued(task) == []
            enqueue(q, "nothing", durable=durable)
            assert len(jobs.enqueued(task)) == 1
    with pytest.raises(tinyq.NotStarted):
        enqueue(q, task)


async def test_it_runs_as_ever_after_the_block(file: Path) -> None:
    q = TinyQ(file, timeout=100)
    task = register(q, threading.get_ident, name="where")
    with q.testing() as jobs:
        await task.options(durable=True).enqueue()
        await jobs.adrain()
    async with q:
        assert await (await task.options(durable=True).enqueue()).result(timeout=10) != threading.get_ident()


def test_after_the_block_its_jobs_run_no_more(q: TinyQ) -> None:
    with q.testing() as jobs:
        job = enqueue(q, print)
    with pytest.raises(tinyq.NoResult):
        asyncio.run(job.result())
    with pytest.raises(RuntimeError, match="over"):
        jobs.drain()
    with pytest.raises(RuntimeError, match="over"):
        asyncio.run(jobs.adrain())


async def test_a_tinyq_that_runs_is_not_tested(q: TinyQ) -> None:
    async with q:
        with pytest.raises(tinyq.AlreadyStarted), q.testing():
            pass
        assert await (await q.enqueue(int)).result() == 0


def test_a_block_within_another_is_refused(q: TinyQ, jobs: Kit) -> None:
    with pytest.raises(tinyq.AlreadyStarted), q.testing():
        pass
    enqueue(q, int)
    assert jobs.drain() == 1


async def test_start_and_stop_open_nothing_and_start_nothing(file: Path) -> None:
    q = TinyQ(file)
    with q.testing() as jobs:
        tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
        async with q.lifespan() as state, q:
            assert state == {"tinyq": q}
            assert asyncio.all_tasks() == tasks
            assert set(threading.enumerate()) <= threads  # one of an earlier test may have ended meanwhile
            await q.enqueue(int)
        job = await q.enqueue(int)
        await q.quiesce()
        assert await jobs.adrain() == 2
        assert job.status == "done"
        assert q.health().status == "ok"
    assert list(file.parent.iterdir()) == []


def test_the_options_of_a_lifespan_hold(tmp_path: Path) -> None:
    program = f"""
import asyncio, tinyq

async def fails(): raise ValueError

async def use(name, retry):
    async with tinyq.lifespan(db={str(tmp_path)!r} + name, retry=retry):
        return await tinyq.enqueue(tinyq.task(fails, name=name), durable=True)

for name, retry in (("/a.db", [1, 1]), ("/b.db", False)):
    with tinyq.testing() as jobs:
        job = asyncio.run(use(name, retry))
        jobs.drain(raise_errors=False)
        print(job.status, job.attempts)
with tinyq.testing() as jobs:
    tinyq.configure(retry=[1])
    job = asyncio.run(tinyq.enqueue(tinyq.task(fails, name="c")))
    jobs.drain(raise_errors=False)
    print(job.status, job.attempts)
"""
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == ["dead 3", "dead 1", "dead 2"], ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_warning_that_schedules_never_ran_after_tests(tmp_path: Path) -> None:
    program = "import tinyq\n@tinyq.every(60, name='tick')\ndef tick(): ...\n"
    for more, said in (("", 1), ("with tinyq.testing(): pass", 0)):
        ended = subprocess.run([sys.executable, "-c", program + more], capture_output=True, text=True, timeout=60)
        assert ended.stderr.count("never started") == said


def test_all_queues_are_served_whatever_this_process_would_serve(durable: bool) -> None:
    q = TinyQ(worker=False, queues={"reports": 0})
    task = register(q, lambda: None, name="report", queue="reports" if durable else "default")
    with q.testing() as jobs:
        enqueue(q, task, durable=durable)
        assert jobs.drain() == 1


# arguments


def test_arguments_of_a_durable_job_go_through_json(q: TinyQ, jobs: Kit) -> None:
    given = {"a": [1]}
    seen: list[object] = []
    task = register(q, lambda value, *, word: seen.append((value, word)), name="see")
    job = enqueue(q, task, given, word="x", durable=True)
    given["a"].append(2)
    jobs.drain()
    assert seen == [({"a": [1]}, "x")]
    [found] = jobs.enqueued(task)
    assert (found.id, found.args, found.kwargs) == (job.id, ({"a": [1]},), {"word": "x"})
    with pytest.raises(tinyq.PayloadError):
        enqueue(q, task, object(), word="x", durable=True)


def test_arguments_of_a_durable_job_are_what_the_annotations_say(q: TinyQ, jobs: Kit) -> None:
    seen: list[datetime] = []

    def note(when: datetime) -> None:
        seen.append(when)

    enqueue(q, q.task(note), NOON, durable=True)
    jobs.drain()
    assert (seen, jobs.enqueued(note)[0].args) == ([NOON], (NOON,))


def test_arguments_of_a_best_effort_job_stay_as_they_are(q: TinyQ, jobs: Kit) -> None:
    given = object()
    seen: list[object] = []
    enqueue(q, seen.append, given)
    jobs.drain()
    assert seen == [given]
    assert jobs.enqueued()[0].args == (given,)


# what was enqueued


def test_enqueued_lists_what_a_task_a_function_or_a_name_was_enqueued_for(q: TinyQ, jobs: Kit) -> None:
    def plain() -> None: ...

    first, second = register(q, plain, name="first"), register(q, lambda: None, name="second")
    enqueued = [enqueue(q, first), enqueue(q, second, durable=True), enqueue(q, print), enqueue(q, first, durable=True)]
    jobs.drain()
    ids = [job.id for job in enqueued]
    assert [job.id for job in jobs.enqueued()] == ids
    assert [job.id for job in jobs.enqueued(first)] == [ids[0], ids[3]]
    assert [job.id for job in jobs.enqueued(plain)] == [ids[0], ids[3]]
    assert [job.id for job in jobs.enqueued("second")] == [ids[1]]
    assert [job.id for job in jobs.enqueued(print)] == [ids[2]]


def test_a_task_of_which_nothing_was_enqueued_differs_from_one_that_does_not_exist(q: TinyQ, jobs: Kit) -> None:
    register(q, lambda: None, name="first")
    assert jobs.enqueued("first") == []
    with pytest.raises(tinyq.UnknownTask, match="first"):
        jobs.enqueued("frist")


def test_jobs_are_found_by_an_old_name_of_their_task(q: TinyQ, jobs: Kit) -> None:
    task = q.task(name="new", aliases=["old"])(lambda: None)
    by_name, by_task = enqueue(q, "old"), enqueue(q, task)
    assert [job.id for job in jobs.enqueued("old")] == [by_name.id, by_task.id]


def test_an_enqueued_job_shows_its_options(q: TinyQ, jobs: Kit) -> None:
    enqueue(q, register(q, lambda: None, name="t"), queue="slow", priority=3, key="k", delay=60, durable=True)
    [job] = jobs.enqueued("t")
    assert (job.queue, job.priority, job.key, job.durable, job.fire_time) == ("slow", 3, "k", True, None)
    assert job.run_at == NOON + timedelta(minutes=1)


def test_clear_takes_out_what_is_pending(q: TinyQ, jobs: Kit) -> None:
    kept = [enqueue(q, int), enqueue(q, register(q, int, name="int"), durable=True)]
    jobs.clear()
    assert (jobs.enqueued(), jobs.drain(), [job.status for job in kept]) == ([], 0, ["cancelled"] * 2)


def test_a_job_for_another_service_stays_pending(q: TinyQ, jobs: Kit) -> None:
    enqueue(q, "elsewhere", 1, durable=True)
    assert jobs.drain() == 0
    [job] = jobs.enqueued("elsewhere")
    assert (job.status, job.args) == ("pending", (1,))


# drain


def test_jobs_run_by_priority_then_in_the_order_of_enqueuing_across_both_kinds(q: TinyQ, jobs: Kit) -> None:
    ran: list[int] = []
    task = register(q, ran.append, name="note")
    for i, durable in enumerate([False, True, False, True]):
        enqueue(q, task, i, durable=durable)
    enqueue(q, task, 9, priority=1, durable=True)
    jobs.drain()
    assert ran == [9, 0, 1, 2, 3]


def test_drain_runs_what_jobs_enqueue(q: TinyQ, jobs: Kit, durable: bool) -> None:
    ran: list[int] = []

    @q.task(durable=durable)
    async def countdown(n: int) -> None:
        ran.append(n)
        if n:
            await countdown.enqueue(n - 1)

    enqueue(q, countdown, 3)
    assert (jobs.drain(), ran) == (4, [3, 2, 1, 0])
    assert len(jobs.enqueued(countdown)) == 4


def test_drain_follows_retries_at_their_own_times(q: TinyQ, jobs: Kit, durable: bool) -> None:
    starts: list[float] = []

    @q.task(retry=[30, 120], durable=durable)
    async def fails_twice() -> None:
        starts.append((jobs.now - NOON).total_seconds())
        if len(starts) < 3:
            raise OSError

    job = enqueue(q, fails_twice)
    assert jobs.drain() == 3
    assert (job.status, job.attempts, starts) == ("done", 3, [0, 30, 150])


def test_drain_follows_snoozes(q: TinyQ, jobs: Kit, durable: bool) -> None:
    starts: list[float] = []

    @q.task(durable=durable)
    def polls() -> None:
        starts.append((jobs.now - NOON).total_seconds())
        if len(starts) < 3:
            raise tinyq.Snooze(3600)

    job = enqueue(q, polls)
    assert jobs.drain() == 3
    assert (job.status, job.attempts, starts) == ("done", 1, [0, 3600, 7200])


def test_drain_leaves_delayed_jobs_and_schedules_alone(q: TinyQ, jobs: Kit, durable: bool) -> None:
    q.every(1, name="tick")(lambda: None)
    job = enqueue(q, register(q, int, name="int"), delay=60, durable=durable)
    assert (jobs.drain(), job.status, jobs.now) == (0, "pending", NOON)


def test_no_schedule_fires_while_drain_follows_a_retry(q: TinyQ, jobs: Kit) -> None:
    for immediate in (False, True):
        q.every(60, name=f"tick {immediate}", immediate=immediate)(lambda: None)
    enqueue(q, register(q, lambda: 1 / 0, name="fails", retry=[3600]))
    assert jobs.drain(raise_errors=False) == 2
    assert jobs.advance(0) == 1
    assert jobs.advance(60) == 2
    assert [schedule.missed for schedule in asyncio.run(q.stats()).schedules] == [0, 0]


@pytest.mark.parametrize("circle", ["snoozes", "enqueues itself"])
def test_an_endless_circle_is_an_error(q: TinyQ, jobs: Kit, monkeypatch: pytest.MonkeyPatch, circle: str) -> None:
    monkeypatch.setattr(tinyq, "MOST_RUNS", 50)

    @q.task(name="endless")
    async def endless() -> None:
        if circle == "snoozes":
            raise tinyq.Snooze(1)
        await endless.enqueue()

    enqueue(q, endless)
    with pytest.raises(RuntimeError, match=r"without end.*endless"):
        jobs.drain()


def test_many_jobs_are_no_circle(q: TinyQ, jobs: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyq, "MOST_RUNS", 50)
    asyncio.run(q.enqueue_many([(int, ()) for _ in range(100)]))
    assert jobs.drain() == 100


def test_drain_raises_the_error_of_a_job_that_died_once_the_others_have_run(q: TinyQ, jobs: Kit, durable: bool) -> None:
    error = ValueError("no such user")

    async def fails() -> None:
        raise error

    dead = enqueue(q, register(q, fails, name="fails", retry=False), durable=durable)
    other = enqueue(q, int)
    with pytest.raises(ValueError, match="no such user") as raised:
        jobs.drain()
    assert raised.value is error
    assert dead.id in raised.value.__notes__[0]
    assert (dead.status, other.status) == ("dead", "done")
    assert jobs.drain() == 0


def test_or_raises_nothing_and_the_job_tells(q: TinyQ, jobs: Kit) -> None:
    enqueue(q, lambda: 1 / 0)
    assert jobs.drain(raise_errors=False) == 1
    [job] = jobs.enqueued()
    assert (job.status, job.error) == ("dead", "ZeroDivisionError: division by zero")


def test_an_error_that_would_end_the_test_run_is_a_failed_job(q: TinyQ, jobs: Kit) -> None:
    enqueue(q, sys.exit, 3)
    with pytest.raises(tinyq.JobFailed, match="SystemExit: 3"):
        jobs.drain()


def test_a_cancelled_job_is_no_error(q: TinyQ, jobs: Kit, durable: bool) -> None:
    def gives_up() -> None:
        raise tinyq.Cancel("not needed")

    job = enqueue(q, register(q, gives_up, name="gives up"), durable=durable)
    assert (jobs.drain(), job.status, job.reason) == (1, "cancelled", "not needed")


def test_an_expired_job_is_not_called(q: TinyQ, jobs: Kit, durable: bool) -> None:
    job = enqueue(q, register(q, int, name="int"), delay=10, expires=5, durable=durable)
    assert (jobs.advance(10), job.status) == (0, "cancelled")


def test_drain_calls_the_on_dead_hooks_before_it_returns(q: TinyQ, jobs: Kit, durable: bool) -> None:
    heard: list[str] = []

    @q.on_dead
    async def hook(job: Job[Any]) -> None:
        await asyncio.sleep(0)
        heard.append(job.id)

    q.on_dead(lambda job: heard.append(job.status))
    job = enqueue(q, register(q, lambda: 1 / 0, name="fails", retry=False), durable=durable)
    jobs.drain(raise_errors=False)
    assert sorted(heard) == sorted([job.id, "dead"])


async def test_a_hook_in_the_configuration_is_called(q: TinyQ) -> None:
    heard: list[str] = []
    q = TinyQ(on_dead=lambda job: heard.append(job.task))
    with q.testing() as jobs:
        await q.enqueue(register(q, lambda: 1 / 0, name="fails", retry=False))
        await jobs.adrain(raise_errors=False)
    assert heard == ["fails"]


async def test_drain_in_an_event_loop_names_the_way_out(q: TinyQ, jobs: Kit) -> None:
    with pytest.raises(RuntimeError, match=r"await jobs\.adrain\(\)"):
        jobs.drain()
    with pytest.raises(RuntimeError, match=r"await jobs\.aadvance\(…\)"):
        jobs.advance(1)


def test_all_drains_of_a_block_share_one_event_loop(q: TinyQ, jobs: Kit) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    for _ in range(2):
        enqueue(q, note)
        jobs.drain()
    assert loops[0] is loops[1]


def test_plain_functions_are_called_in_the_thread_of_the_test(q: TinyQ, jobs: Kit) -> None:
    threads: list[int] = []
    enqueue(q, lambda: threads.append(threading.get_ident()))
    jobs.drain()
    assert threads == [threading.get_ident()]


def note_process(where: list[int]) -> None:
    where.append(os.getpid())


def test_and_in_its_process_whatever_run_in_says(q: TinyQ, jobs: Kit) -> None:
    where: list[int] = []
    enqueue(q, q.task(name="where", run_in="process")(note_process), where)
    jobs.drain()
    assert where == [os.getpid()]


async def test_spawned_coroutines_run_and_are_waited_for(q: TinyQ, jobs: Kit) -> None:
    go = asyncio.Event()
    task = q.spawn(go.wait())
    q.spawn(q.enqueue(go.set))
    await jobs.adrain()
    assert task.result() is True


async def test_a_spawned_coroutine_that_never_ends_is_named(q: TinyQ, jobs: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyq, "SPAWN_TIME", 0.0)
    task = q.spawn(asyncio.Event().wait(), name="listen")
    with pytest.raises(RuntimeError, match="listen"):
        await jobs.adrain()
    task.cancel()


async def test_a_drain_that_is_cancelled_gives_the_attempt_back(q: TinyQ, jobs: Kit, durable: bool) -> None:
    begun = asyncio.Event()

    async def hangs() -> None:
        begun.set()
        await asyncio.Event().wait()

    job = await q.enqueue(register(q, hangs, name="hangs"), durable=durable)
    draining = asyncio.create_task(jobs.adrain())
    async with asyncio.timeout(10):
        await begun.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
    assert (job.status, job.attempts) == ("pending", 0)


def test_a_handler_that_hangs_times_out(q: TinyQ, jobs: Kit, durable: bool) -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    enqueue(q, register(q, hangs, name="hangs", timeout=0.01, retry=False), durable=durable)
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 s"):
        jobs.drain()


# time


def test_advance_runs_a_delayed_job_at_its_time(q: TinyQ, jobs: Kit, durable: bool) -> None:
    seen: list[datetime] = []
    task = register(q, lambda: seen.append(jobs.now), name="note")
    enqueue(q, task, delay=3600, durable=durable)
    assert jobs.advance(3599) == 0
    assert jobs.advance(timedelta(hours=1)) == 1
    assert (seen, jobs.now) == ([NOON + timedelta(hours=1)], NOON + timedelta(seconds=7199))


def test_a_schedule_fires_at_each_of_its_times(q: TinyQ, jobs: Kit) -> None:
    seen: list[object] = []
    q.every(60, offset=5, name="tick")(lambda: seen.append((tinyq.current_job().fire_time, jobs.now)))
    assert jobs.advance(3600) == 60
    times = [NOON + timedelta(seconds=5 + 60 * i) for i in range(60)]
    assert seen == [(time, time) for time in times]
    assert [job.fire_time for job in jobs.enqueued("tick")] == times


async def test_the_same_for_one_of_each_process_in_an_async_test(q: TinyQ, jobs: Kit) -> None:
    @q.every(60, name="tick", per_process=True)
    async def tick() -> None: ...

    assert await jobs.aadvance(3600) == 60
    assert {job.durable for job in jobs.enqueued(tick)} == {False}
    assert (await q.stats()).schedules[0].fired == 60


def test_an_immediate_schedule_fires_before_time_passes(q: TinyQ, jobs: Kit) -> None:
    q.every(60, name="tick", immediate=True)(lambda: None)
    assert (jobs.drain(), jobs.advance(0), jobs.advance(0), jobs.now) == (0, 1, 0, NOON)


def test_a_fire_time_is_skipped_while_the_last_run_is_not_over(q: TinyQ, jobs: Kit) -> None:
    @q.every(60, name="tick")
    def tick() -> None:
        raise Snooze(150)

    assert jobs.advance(180) == 1
    [schedule] = asyncio.run(q.stats()).schedules
    assert (schedule.fired, schedule.skipped) == (1, 2)


def test_a_recurring_job_runs_at_its_fire_times_as_time_passes_and_not_in_a_drain(q: TinyQ, jobs: Kit) -> None:
    polled: list[UUID] = []
    number = uuid4()

    @q.task(name="poll")
    def poll(number: UUID) -> None:
        polled.append(number)

    asyncio.run(q.schedule(poll, number, when=tinyq.Every(60), key="k"))
    assert jobs.drain() == 0
    assert jobs.advance(180) == 3
    assert polled == [number] * 3
    assert jobs.drain() == 0
    [schedule] = asyncio.run(q.schedules())
    assert (schedule.key, schedule.stats.fired) == ("k", 3)


async def test_a_recurring_job_ends_itself_after_three_runs(q: TinyQ, jobs: Kit) -> None:
    runs: list[datetime | None] = []

    @q.task(name="poll")
    async def poll() -> None:
        runs.append(tinyq.current_job().fire_time)
        if len(runs) == 3:
            raise tinyq.Cancel("that is enough")

    await q.schedule(poll, when=tinyq.Every(60), key="k")
    assert await jobs.aadvance(600) == 3
    assert len(set(runs)) == 3
    assert await q.schedules() == []


def test_a_recurring_job_that_fails_for_a_fire_time_is_a_death_for_the_test_and_the_hooks(
    q: TinyQ, jobs: Kit, durable: bool
) -> None:
    heard: list[str | None] = []
    q.on_dead(lambda job: heard.append(job.error))

    @q.task(name="poll")
    async def poll() -> None:
        raise ValueError("down")

    asyncio.run(q.schedule(poll, when=tinyq.Every(60), key="k", retry=False, durable=durable))
    with pytest.raises(ValueError, match="down") as caught:
        jobs.advance(60)
    assert any("is dead: no attempts left" in note for note in caught.value.__notes__)
    assert jobs.advance(60, raise_errors=False) == 1
    assert heard == ["ValueError: down"] * 2


async def test_a_schedule_keeps_no_trace_of_a_test(q: TinyQ) -> None:
    q.every(60, name="tick")(lambda: None)
    with q.testing() as jobs:
        await jobs.aadvance(600)
    async with q:
        assert (await q.stats()).schedules[0].last is None


def test_the_clock_begins_where_the_clock_of_the_tinyq_stands(clock: FakeClock) -> None:
    with TinyQ(clock=clock).testing() as jobs:
        assert jobs.now == clock.now()


def test_without_any_clock_it_begins_now(q: TinyQ) -> None:
    before = datetime.now(UTC)
    with q.testing() as jobs:
        assert before <= jobs.now <= datetime.now(UTC)
        assert jobs.now == jobs.now


def test_what_was_kept_for_a_time_is_gone_after_it(q: TinyQ, jobs: Kit, durable: bool) -> None:
    job = enqueue(q, register(q, int, name="int", result_ttl=60), durable=durable)
    jobs.drain()
    assert asyncio.run(q.get(job.id)).status == "done"
    jobs.advance(61)
    with pytest.raises(tinyq.JobNotFound):
        asyncio.run(q.get(job.id))


# the rest of the surface


def test_a_key_is_unique_among_pending_jobs(q: TinyQ, jobs: Kit, durable: bool) -> None:
    seen: list[int] = []
    task = register(q, seen.append, name="note", durable=durable)
    first = enqueue(q, task, 1, key="k")
    again = enqueue(q, task, 2, key="k")
    assert (again.id, again.created) == (first.id, False)
    enqueue(q, task, 3, key="k", on_conflict="replace")
    assert len(jobs.enqueued(task)) == 1
    jobs.drain()
    assert seen == [3]


async def test_the_dead_can_be_listed_requeued_and_purged(q: TinyQ, jobs: Kit, durable: bool) -> None:
    broken = True

    @q.task(retry=False, durable=durable)
    def mend() -> None:
        if broken:
            raise OSError

    await mend.enqueue()
    await mend.enqueue()
    await jobs.adrain(raise_errors=False)
    first, second = sorted(await q.dead(mend), key=lambda job: job.id)
    assert (await q.stats()).counts == (
        tinyq.Count(queue="default", task=mend.name, state=State.DEAD, durable=durable, count=2, due=0),
    )
    broken = False
    assert (await q.requeue(first.id), await q.purge(second.id)) == (1, 1)
    assert (await jobs.adrain(), await q.dead()) == (1, [])


async def test_a_paused_queue_is_held_back(q: TinyQ, jobs: Kit, durable: bool) -> None:
    job = await q.enqueue(register(q, int, name="int"), durable=durable, queue="slow")
    await q.pause("slow")
    assert (await jobs.adrain(), (await q.stats()).paused) == (0, ("slow",))
    await q.resume("slow")
    assert (await jobs.adrain(), job.status) == (1, "done")


async def test_a_pending_job_can_be_cancelled_and_another_promoted(q: TinyQ, jobs: Kit) -> None:
    task = register(q, int, name="int")
    first, second = await task.enqueue(), await task.enqueue()
    assert await first.cancel()
    assert await second.promote()
    assert (first.status, second.durable, await second.exists()) == ("cancelled", True, True)
    assert await jobs.adrain() == 1
    assert [job.id for job in jobs.enqueued(task)] == [first.id, second.id]
    assert second.status == "done"


async def test_drain_of_the_tinyq_itself_runs_what_is_due_now(q: TinyQ, jobs: Kit) -> None:
    due, later = await q.enqueue(int), await q.enqueue(int, delay=1)
    await q.drain()
    assert (due.status, later.status, jobs.now) == ("done", "pending", NOON)


async def test_waiting_for_a_result_runs_the_job(q: TinyQ, jobs: Kit, durable: bool) -> None:
    async def double(n: int) -> int:
        return 2 * n

    task = register(q, double, name="double", durable=durable)

    async def parent() -> int:
        return 1 + int(await (await task.enqueue(3)).result())

    job = await q.enqueue(parent)
    await jobs.adrain()
    assert await job.result() == 7
    assert await (await task.enqueue(4)).result() == 8


async def test_a_job_that_waits_for_itself_times_out(q: TinyQ, jobs: Kit, durable: bool) -> None:
    itself: list[Job[Any]] = []

    async def narcissus() -> None:
        await itself[0].result()

    itself.append(await q.enqueue(register(q, narcissus, name="self", timeout=0.05, retry=False), durable=durable))
    with pytest.raises(TimeoutError):
        await jobs.adrain()


async def test_waiting_for_what_is_not_due_is_an_error_at_once(q: TinyQ, jobs: Kit) -> None:
    job = await q.enqueue(int, delay=60)
    with pytest.raises(tinyq.NoResult, match=r"12:01.*advance\(\)"):
        await job.result()


async def test_two_who_drain_at_once_run_each_job_once(q: TinyQ, jobs: Kit) -> None:
    ran: list[int] = []

    async def note(n: int) -> None:
        await asyncio.sleep(0)
        ran.append(n)

    await q.enqueue_many([(note, (n,)) for n in range(10)])
    await asyncio.gather(jobs.adrain(), jobs.adrain())
    assert sorted(ran) == list(range(10))


async def test_a_full_queue_is_an_error_at_once() -> None:
    q = TinyQ(max_pending=1)
    with q.testing() as jobs:
        await q.enqueue(int)
        with pytest.raises(tinyq.QueueFull, match="drain"):
            await q.enqueue(int)
        await jobs.adrain()
        await q.enqueue(int)


def test_enqueue_needs_no_event_loop(q: TinyQ, jobs: Kit, durable: bool) -> None:
    task = register(q, int, name="int")
    for key in (None, "k"):
        job = at_once(q.enqueue(task, durable=durable, key=key))
        assert (jobs.drain(), job.status) == (1, "done")


def test_enqueue_sync_needs_no_file_in_a_test_nor_in_a_plain_handler(q: TinyQ, jobs: Kit, durable: bool) -> None:
    task = register(q, int, name="int", durable=durable)
    q.enqueue_sync(task)
    task.options(delay=0).enqueue_sync()
    task.enqueue_sync()
    q.enqueue_sync(task.enqueue_sync)
    assert (jobs.drain(), len(jobs.enqueued(task))) == (5, 4)


async def test_enqueue_sync_is_refused_where_it_would_block_an_event_loop_in_production(
    q: TinyQ, jobs: Kit, durable: bool
) -> None:
    task = register(q, int, name="int", durable=durable)

    @q.task(name="plain")
    def plain() -> None:
        task.enqueue_sync()

    @q.task(name="slip", retry=False)
    async def slip() -> None:
        task.enqueue_sync()

    for call in (task.enqueue_sync, functools.partial(q.enqueue_sync, task), task.options(delay=0).enqueue_sync):
        with pytest.raises(tinyq.NotStarted, match="block the event loop"):
            call()
    await slip.enqueue()
    with pytest.raises(tinyq.NotStarted, match="block the event loop"):
        await jobs.adrain()
    await asyncio.to_thread(task.enqueue_sync)
    await plain.enqueue()
    assert (await jobs.adrain(), len(jobs.enqueued(task))) == (3, 2)


async def test_a_plain_handler_under_test_does_not_wait_for_the_loop_it_stands_in(q: TinyQ, jobs: Kit) -> None:
    async with TinyQ() as other:
        await q.enqueue(lambda: other.enqueue_sync(int))
        with pytest.raises(tinyq.NotStarted, match="block the event loop"):
            await jobs.adrain()


def test_a_job_with_tx_needs_no_file_and_no_commit(q: TinyQ, jobs: Kit, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "own.db", isolation_level=None)) as tx:
        tx.execute("BEGIN")
        job = enqueue(q, register(q, int, name="int"), tx=tx)
        assert job.durable
        tx.execute("ROLLBACK")
    assert jobs.drain() == 1


def test_jobs_may_be_enqueued_from_several_threads(q: TinyQ, jobs: Kit) -> None:
    task = register(q, int, name="int")

    async def several() -> None:
        for i in range(50):
            await task.options(durable=bool(i % 2)).enqueue()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(asyncio.run, several()) for _ in range(4)]:
            done.result(timeout=60)
    assert jobs.drain() == len(jobs.enqueued()) == 200


# around an application


@pytest.fixture
def app(q: TinyQ) -> FastAPI:
    app = FastAPI(lifespan=q.lifespan)
    task = register(q, lambda n: 2 * n, name="double", durable=True, result_ttl=60)

    @app.post("/double")
    async def double(n: int) -> str:
        return (await task.enqueue(n)).id

    @app.get("/result")
    async def result(id: str) -> int:
        return int(await (await q.get(id)).result())

    @app.post("/spawn")
    async def spawn() -> None:
        q.spawn(task.enqueue(1))

    return app


def test_a_test_client_with_the_lifespan(q: TinyQ, app: FastAPI, jobs: Kit) -> None:
    with TestClient(app) as client:
        id = client.post("/double", params={"n": 4}).json()
        assert jobs.drain() == 1
        assert client.get("/result", params={"id": id}).json() == 8
        client.post("/spawn")
        assert jobs.drain() == 1


def test_a_test_client_without_the_lifespan(q: TinyQ, app: FastAPI, jobs: Kit) -> None:
    client = TestClient(app)
    id = client.post("/double", params={"n": 4}).json()
    assert client.get("/result", params={"id": id}).json() == 8
    assert jobs.enqueued("double")[0].args == (4,)


async def test_a_transport_that_runs_no_lifespan(q: TinyQ, app: FastAPI, jobs: Kit) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        id = (await client.post("/double", params={"n": 4})).json()
        assert await jobs.adrain() == 1
        assert (await client.get("/result", params={"id": id})).json() == 8


def test_a_project_tests_itself_with_it(tmp_path: Path) -> None:
    source, project = Path(__file__).parent / "sample_project", tmp_path / "project"
    shutil.copytree(source, project, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path.relative_to(project) for path in project.rglob("*")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TINYQ_"))}
    ended = subprocess.run(
        command, cwd=project, env=env | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True, timeout=100
    )
    assert re.search(r"\b8 passed", ended.stdout), ended.stdout + ended.stderr
    assert {path.relative_to(project) for path in project.rglob("*")} == files
    assert [path for path in files if path.suffix == ".py" and "sleep" in (project / path).read_text()] == []
