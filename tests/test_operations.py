"""What operators do: look at dead jobs, requeue and purge them, hear of them, pause queues, say what a lost worker means."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from conftest import OpenAt
from fleet import Fleet
from helpers import Open, counted, edit, eventually, rows, stopped_at_once
from servers import wait_until

import tinyq
from tinyq import Job, SQLiteStore, State, TinyQ

pytestmark = pytest.mark.timeout(300)


def lose(file: Path, clock: FakeClock, **changes: object) -> None:
    """Let all jobs have been started by a worker that has died."""
    values = {"attempts": 1, "claim_no": 1, "worker": "gone", "lease": clock.time() - 30_000_000, **changes}
    assignments = ", ".join(f"{name} = ?" for name in values)
    edit(file, f"UPDATE tinyq_jobs SET state = 'running', ready = NULL, {assignments}", *values.values())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def about_hooks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "hook" in record.getMessage()]


async def breaks(*_: object) -> None:
    raise ConnectionError("down")


async def nothing(*_: object) -> None: ...


async def died(job: Job[Any], clock: FakeClock | None = None) -> Job[Any]:
    await eventually(lambda: job.status is State.DEAD, clock)
    return job


async def dead_jobs(q: TinyQ, clock: FakeClock, durable: bool, count: int, name: str = "breaks") -> list[Job[Any]]:
    """So many dead jobs of a task, one second after the other."""
    task = q.task(name=name, retry=False, durable=durable, replace=True)(breaks)
    jobs = []
    for n in range(count):
        jobs.append(await died(await task.enqueue(n), clock))
        await clock.advance(1)
    return jobs


async def bury(file: Path, count: int, task: str = "old") -> list[bytes]:
    """So many dead rows, straight into the file."""
    store = SQLiteStore(str(file))
    await store.open()
    made = [
        tinyq.JobRow(tinyq.new_id(n), task, "default", 0, 0, 0, state=State.DEAD, finished=n, payload="[[],{}]")
        for n in range(count)
    ]
    with closing(sqlite3.connect(file, timeout=10)) as db, db:
        db.executemany(tinyq.INSERT, [{**tinyq.as_values(row), "ready": None} for row in made])
    await store.close()
    return [row.id for row in made]


# Dead jobs: looking


async def test_dead_jobs_are_listed_the_last_to_die_first_with_error_and_traceback(
    q: TinyQ, durable: bool, clock: FakeClock
) -> None:
    jobs = await dead_jobs(q, clock, durable, 3)
    found = await q.dead()
    assert [job.id for job in found] == [job.id for job in reversed(jobs)]
    for job in found:
        assert (job.status, job.reason, job.error) == (State.DEAD, "no attempts left", "ConnectionError: down")
        assert job.traceback is not None
        assert job.traceback.endswith("ConnectionError: down\n")
        assert "in breaks" in job.traceback


async def test_only_dead_jobs_are_listed(q: TinyQ, durable: bool) -> None:
    task = q.task(name="nothing", durable=durable, result_ttl=60)(nothing)
    done, [waiting, cancelled] = await task.enqueue(), [await task.options(delay=60).enqueue() for _ in range(2)]
    await cancelled.cancel()
    await done.result()
    assert (waiting.status, done.status, cancelled.status) == (State.PENDING, State.DONE, State.CANCELLED)
    assert await q.dead() == []


async def test_dead_jobs_of_one_task_are_listed_by_its_name_or_the_task(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    [one] = await dead_jobs(q, clock, durable, 1, "one")
    [other] = await dead_jobs(q, clock, durable, 1, "other")
    task = q.task(name="other", replace=True)(breaks)
    assert [job.id for job in await q.dead("one")] == [one.id]
    assert [job.id for job in await q.dead(task)] == [job.id for job in await q.dead(task="other")] == [other.id]
    assert await q.dead("no such task") == []


async def test_no_more_dead_jobs_are_listed_than_asked_for(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    jobs = await dead_jobs(q, clock, durable, 4)
    assert [job.id for job in await q.dead(limit=2)] == [jobs[3].id, jobs[2].id]
    with pytest.raises(ValueError, match="limit is 0"):
        await q.dead(limit=0)


async def test_dead_jobs_of_both_kinds_are_listed_together(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()
    jobs = [job for durable in (True, False, True, False) for job in await dead_jobs(q, clock, durable, 1)]
    assert [job.id for job in await q.dead()] == [job.id for job in reversed(jobs)]
    assert [job.id for job in await q.dead(limit=3)] == [job.id for job in reversed(jobs[1:])]


async def test_a_task_is_named_by_text_or_by_itself(open_file: Open) -> None:
    q = await open_file()
    wrong: Any = nothing
    for verb in (q.dead(wrong), q.requeue(task=wrong), q.purge(task=wrong)):
        with pytest.raises(TypeError, match="task is <function nothing"):
            await verb


async def test_a_list_of_dead_jobs_is_read_without_payloads(file: Path) -> None:
    [id] = await bury(file, 1)
    assert rows(file, "payload") == [("[[],{}]",)]
    store = SQLiteStore(str(file))
    await store.open()
    [row] = await store.dead(None, tinyq.NEWEST, 10)
    await store.close()
    assert (row.id, row.payload, row.result) == (id, None, None)


async def test_a_job_that_was_listed_runs_with_its_arguments_when_it_is_requeued(open_file: Open, clock: FakeClock) -> None:
    q, ran, broken = await open_file(), list[int](), True

    @q.task(retry=False, durable=True)
    async def fragile(n: int) -> None:
        if broken:
            raise ConnectionError
        ran.append(n)

    held = await died(await fragile.enqueue(7), clock)
    [listed] = await q.dead()
    broken = False
    assert await q.requeue(listed.id) == 1
    await eventually(lambda: held.status is State.DONE, clock)
    assert ran == [7]


async def test_a_requeued_job_that_ended_while_it_was_read_back_stays_ended(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()
    job = await died(await q.task(name="breaks", retry=False, durable=True)(breaks).enqueue(), clock)
    read_while_it_ran = job._row.but(state=State.RUNNING, finished=None)
    q._running().crew.known(read_while_it_ran, again=True)
    assert job.status is State.DEAD


# Dead jobs: requeue and purge


@pytest.mark.parametrize("way", ["task", "name", "all"])
async def test_all_dead_jobs_of_a_task_or_all_there_are_can_be_requeued(
    q: TinyQ, durable: bool, clock: FakeClock, way: str
) -> None:
    attempts: list[int] = []
    broken = True

    @q.task(retry=[0], durable=durable)
    async def fragile() -> None:
        attempts.append(tinyq.current_job().attempt)
        if broken:
            raise ConnectionError

    jobs = [await died(await fragile.enqueue(), clock) for _ in range(3)]
    others = await dead_jobs(q, clock, durable, 2, "other")
    broken = False
    attempts.clear()
    forms: dict[str, dict[str, Any]] = {"task": {"task": fragile}, "name": {"task": fragile.name}, "all": {"all": True}}
    assert await q.requeue(**forms[way]) == (5 if way == "all" else 3)
    await eventually(lambda: len(attempts) == 3 and all(job.status is State.DONE for job in jobs), clock)
    assert attempts == [1, 1, 1]
    await eventually(lambda: all(job.status is State.DEAD for job in others), clock)
    assert [job.attempts for job in others] == [1, 1]


@pytest.mark.parametrize("verb", ["requeue", "purge"])
async def test_what_is_not_dead_is_left_alone_unless_its_id_is_given(
    q: TinyQ, durable: bool, clock: FakeClock, verb: str
) -> None:
    await dead_jobs(q, clock, durable, 1, "task")
    task = q.task(name="task", durable=durable, result_ttl=60, replace=True)(nothing)
    done, [waiting, cancelled] = await task.enqueue(), [await task.options(delay=60).enqueue() for _ in range(2)]
    await cancelled.cancel()
    await done.result()
    do = getattr(q, verb)
    assert await do(task="task") == 1
    assert await do(all=True) == 0
    assert [(await q.get(job.id)).status for job in (waiting, cancelled)] == [State.PENDING, State.CANCELLED]
    assert await do(done.id, waiting.id, cancelled.id, "no id") == (1 if verb == "requeue" else 2)


async def test_a_purged_job_is_gone_and_no_other(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    first, second, third = await dead_jobs(q, clock, durable, 3)
    assert await q.purge(first.id, second.id, first.id) == 2
    assert [job.id for job in await q.dead()] == [third.id]
    with pytest.raises(tinyq.JobNotFound):
        await q.get(first.id)
    assert await q.purge(first.id) == 0
    assert await q.purge(all=True) == 1
    assert await q.dead() == []


@pytest.mark.parametrize("verb", ["requeue", "purge"])
@pytest.mark.parametrize(
    ("ids", "options"),
    [((), {}), ((), {"all": False}), (("x",), {"all": True}), (("x",), {"task": "t"}), ((), {"task": "t", "all": True})],
)
async def test_exactly_one_way_of_naming_the_jobs_is_taken(
    q: TinyQ, verb: str, ids: Sequence[str], options: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match=rf"{verb}\(\) takes ids, or task=…, or all=True, one of these"):
        await getattr(q, verb)(*ids, **options)


async def test_dead_jobs_whose_key_is_taken_are_left_dead_and_counted_in_one_warning(
    q: TinyQ, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    task = q.task(name="keyed", retry=False, durable=durable)(breaks)
    clash, last = [await died(await task.options(key="k").enqueue(), clock) for _ in range(2)]
    await clock.advance(1)
    taken, free = [await died(await task.options(key=key).enqueue(), clock) for key in ("taken", "free")]
    await task.options(key="taken", delay=60).enqueue()
    await q.pause("default")
    caplog.clear()
    assert await q.requeue(task="keyed") == 2
    assert [job.status for job in (clash, last, taken, free)].count(State.DEAD) == 2
    assert (taken.status, free.status) == (State.DEAD, State.PENDING)
    [line] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.getMessage().startswith("requeue left 2 dead jobs as they are")


async def test_an_id_whose_key_is_taken_is_still_an_error(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    task = q.task(name="keyed", retry=False, durable=durable)(breaks)
    taken = await died(await task.options(key="k").enqueue(), clock)
    await task.options(key="k", delay=60).enqueue()
    with pytest.raises(tinyq.KeyConflict):
        await q.requeue(taken.id)


@pytest.mark.parametrize("verb", ["requeue", "purge"])
@pytest.mark.parametrize("wrong", [["an id"], b"an id", 7], ids=["a list", "bytes", "a number"])
async def test_what_is_no_id_is_refused_with_the_way_out(open_file: Open, verb: str, wrong: object) -> None:
    q = await open_file()
    with pytest.raises(TypeError, match=rf"{verb}\(\) takes ids one after another, and .* is none: give {verb}\(id, …\), or"):
        await getattr(q, verb)("an id", wrong)


@pytest.mark.parametrize("verb", ["requeue", "purge"])
@pytest.mark.parametrize("by", ["ids", "task", "all"])
async def test_many_rows_are_changed_in_transactions_of_500(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch, verb: str, by: str
) -> None:
    ids = await bury(file, 1_201)
    q = await open_file(worker=False)
    original, sizes = getattr(tinyq, f"{verb}_rows"), list[int]()

    def spy(db: Any, namespace: str, ids: Sequence[bytes], *others: Any) -> Any:
        sizes.append(len(ids))
        return original(db, namespace, ids, *others)

    monkeypatch.setattr(tinyq, f"{verb}_rows", spy)
    forms: dict[str, Any] = {"task": {"task": "old"}, "all": {"all": True}}
    names = [tinyq.id_text(id) for id in ids] if by == "ids" else []
    assert await getattr(q, verb)(*names, **forms.get(by, {})) == 1_201
    assert sizes == [500, 500, 201]
    assert len(rows(file, "id")) == (1_201 if verb == "requeue" else 0)
    assert set(rows(file, "state")) <= {("pending",)}


async def test_a_job_that_dies_again_while_all_are_requeued_is_not_requeued_twice(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()
    starts: list[int] = []

    async def again(n: int) -> None:
        starts.append(n)
        raise ConnectionError

    task = q.task(name="again", retry=False, durable=True)(again)
    jobs = await q.enqueue_many([(task, (n,)) for n in range(20)])
    await eventually(lambda: all(job.status is State.DEAD for job in jobs), clock)
    starts.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinyq, "BATCH", 1)
        assert await q.requeue(task=task) == 20
    await eventually(lambda: len(starts) == 20 and all(job.status is State.DEAD for job in jobs), clock)
    await clock.advance(2)
    assert sorted(starts) == list(range(20))


# The on_dead hook


async def test_an_async_hook_is_called_with_the_job_once_its_death_is_stored(
    open_q: Open, durable: bool, clock: FakeClock, file: Path
) -> None:
    seen: list[tuple[str, State, str | None, str | None]] = []
    stored: list[Any] = []

    async def hook(job: Job[Any]) -> None:
        stored.extend(rows(file, "state") if durable else [])
        seen.append((job.id, job.status, job.error, job.reason))

    q = await open_q(on_dead=hook)
    [job] = await dead_jobs(q, clock, durable, 1)
    await q.drain()
    assert seen == [(job.id, State.DEAD, "ConnectionError: down", "no attempts left")]
    assert stored == ([("dead",)] if durable else [])


async def test_a_plain_hook_is_called_in_a_thread(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    seen: list[tuple[str, bool]] = []

    @q.on_dead
    def hook(job: Job[Any]) -> None:
        seen.append((job.id, threading.current_thread() is threading.main_thread()))

    [job] = await dead_jobs(q, clock, durable, 1)
    await q.drain()
    assert seen == [(job.id, False)]


async def test_all_hooks_are_called_whatever_the_others_do(
    open_q: Open, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    q = await open_q(on_dead=lambda job: called.append("configured"))

    @q.on_dead
    async def first(job: Job[Any]) -> None:
        called.append("first")
        raise ValueError("no mail today")

    @q.on_dead
    def second(job: Job[Any]) -> None:
        called.append("second")
        raise SystemExit(3)

    @q.on_dead
    async def third(job: Job[Any]) -> None:
        called.append("third")
        raise SystemExit(3)

    @q.on_dead
    async def fourth(job: Job[Any]) -> None:
        called.append("fourth")
        raise asyncio.CancelledError

    [job] = await dead_jobs(q, clock, durable, 1)
    await q.drain()
    assert sorted(called) == ["configured", "first", "fourth", "second", "third"]
    assert (job.status, (await q.get(job.id)).error) == (State.DEAD, "ConnectionError: down")
    failures = about_hooks(caplog)
    assert [record.levelname for record in failures] == ["ERROR"] * 4
    assert all(record.exc_info and record.exc_info[2] is not None for record in failures)
    assert {word for record in failures for word in ("first", "second", "third", "fourth") if word in record.getMessage()} == {
        "first", "second", "third", "fourth",
    }  # fmt: skip
    assert any("ValueError: no mail today" in record.getMessage() and job.id in record.getMessage() for record in failures)


async def test_a_plain_function_that_returns_a_coroutine_is_a_hook_too(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    seen: list[str] = []

    async def tell(job: Job[Any]) -> None:
        seen.append(job.id)

    q.on_dead(lambda job: tell(job))
    [job] = await dead_jobs(q, clock, durable, 1)
    await q.drain()
    assert seen == [job.id]


async def test_no_hook_is_called_for_a_job_that_is_not_dead(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    seen: list[str] = []
    q.on_dead(lambda job: seen.append(job.task))
    task = q.task(name="task", durable=durable, retry=[3600])(breaks)
    fine = q.task(name="fine", durable=durable)(nothing)
    retried, done, cancelled = await task.enqueue(), await fine.enqueue(), await fine.options(delay=60).enqueue()
    await cancelled.cancel()
    await eventually(lambda: retried.attempts == 1 and retried.status is State.PENDING and done.status is State.DONE, clock)
    await dead_jobs(q, clock, durable, 1)
    await q.drain()
    assert seen == ["breaks"]


async def test_a_hook_is_called_by_whoever_finds_that_a_worker_was_lost(open_file: Open, file: Path, clock: FakeClock) -> None:
    writer = await open_file(worker=False)
    job = await writer.enqueue("charge", durable=True)
    lose(file, clock)
    q = await open_file()
    seen: list[tuple[str, State, str | None, int, str | None]] = []

    @q.on_dead
    async def hook(job: Job[Any]) -> None:
        [(state,)] = rows(file, "state")
        seen.append((job.id, job.status, job.reason, job.attempts, state))

    q.task(name="charge", retry=False)(nothing)
    await eventually(lambda: seen, clock, 0.5)
    assert seen == [(job.id, State.DEAD, "worker lost", 1, "dead")]
    assert [job.reason for job in await q.dead()] == ["worker lost"]


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_hook_that_hangs_is_given_up_after_30_seconds_and_holds_up_no_job(
    open_q: Open, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture, plain: bool
) -> None:
    release, inside = threading.Event(), threading.Event()
    q = await open_q(concurrency=1)

    async def hangs(job: Job[Any]) -> None:
        inside.set()
        await asyncio.Event().wait()

    def blocks(job: Job[Any]) -> None:
        inside.set()
        release.wait(60)

    q.on_dead(blocks if plain else hangs)
    try:
        [job] = await dead_jobs(q, clock, durable, 1)
        await eventually(inside.is_set)
        other = await q.task(name="other", durable=durable)(nothing).enqueue()
        await eventually(lambda: other.status is State.DONE, clock)
        assert about_hooks(caplog) == []
        await eventually(lambda: about_hooks(caplog), clock, 5)
        [record] = about_hooks(caplog)
        assert record.levelname == "ERROR"
        assert "TimeoutError: stopped after 30 s" in record.getMessage()
        assert record.exc_text is not None
        assert plain or "in hangs" in record.exc_text
        assert job.status is State.DEAD
    finally:
        release.set()


async def test_at_most_ten_hooks_run_at_once_and_all_do(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    gate, inside, peak, called = asyncio.Event(), 0, 0, 0

    @q.on_dead
    async def hook(job: Job[Any]) -> None:
        nonlocal inside, peak, called
        inside, called = inside + 1, called + 1
        peak = max(peak, inside)
        await gate.wait()
        inside -= 1

    await dead_jobs(q, clock, durable, 14)
    await clock.settle()
    assert (peak, called) == (10, 10)
    gate.set()
    await q.drain()
    assert (peak, called) == (10, 14)


async def test_a_hook_may_enqueue(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    told: list[str] = []

    @q.task(durable=durable)
    async def alarm(task: str) -> None:
        told.append(task)

    @q.on_dead
    async def hook(job: Job[Any]) -> None:
        await alarm.enqueue(job.task)

    await dead_jobs(q, clock, durable, 1)
    await eventually(lambda: told == ["breaks"], clock)


async def test_shutdown_waits_for_a_hook_within_the_grace(open_q: Open, durable: bool, clock: FakeClock) -> None:
    q = await open_q()
    told: list[str] = []

    @q.on_dead
    async def hook(job: Job[Any]) -> None:
        await clock.wait(asyncio.Event(), 3)
        told.append(job.id)

    [job] = await dead_jobs(q, clock, durable, 1)
    stopping = asyncio.create_task(q.stop(grace=10))
    await eventually(stopping.done, clock)
    assert told == [job.id]


async def test_shutdown_cancels_a_hook_at_the_end_of_the_grace_and_says_so(
    open_q: Open, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_q()
    began: list[bool] = []
    ended: list[str] = []

    @q.on_dead
    async def slow(job: Job[Any]) -> None:
        began.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(job.id)

    jobs = await dead_jobs(q, clock, durable, 11)
    assert len(began) == 10
    stopping = asyncio.create_task(q.stop(grace=2))
    await eventually(stopping.done, clock)
    assert sorted(ended) == sorted(job.id for job in jobs[:10])
    lines = [record.getMessage() for record in about_hooks(caplog) if record.levelno >= logging.ERROR]
    assert sum("stopped at shutdown" in line for line in lines) == 10
    assert sum("was not called for" in line for line in lines) == 1
    assert len(lines) == 11


async def test_a_plain_hook_that_does_not_end_does_not_hold_up_shutdown(
    open_q: Open, durable: bool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q, release, inside = await open_q(), threading.Event(), threading.Event()

    @q.on_dead
    def stubborn(job: Job[Any]) -> None:
        inside.set()
        release.wait(60)

    try:
        await dead_jobs(q, clock, durable, 1)
        await eventually(inside.is_set)
        stopping = asyncio.create_task(q.stop(grace=1))
        began = clock.monotonic()
        await eventually(stopping.done, clock)
        assert clock.monotonic() - began < 100  # the grace and what threads need, while this clock runs on
        assert any("stubborn does not end though it was cancelled" in line for line in errors(caplog))
    finally:
        release.set()
    await eventually(lambda: [task for task in asyncio.all_tasks() if "stubborn" in task.get_name()] == [])


async def test_what_cannot_be_called_is_no_hook(clock: FakeClock) -> None:
    wrong: Any = "hook"
    with pytest.raises(TypeError, match=r"on_dead\(\) takes a function of the dead Job, and this is 'hook'"):
        TinyQ().on_dead(wrong)
    with pytest.raises(TypeError, match="on_dead is 'hook': give a function of the dead Job"):
        TinyQ(on_dead=wrong)


def test_a_hook_stays_the_function_that_it_was() -> None:
    def hook(job: Job[Any]) -> None: ...

    assert TinyQ().on_dead(hook) is hook


# Paused queues


def waits(q: TinyQ, durable: bool, ran: list[str], queue: str = "mail", **options: Any) -> tinyq.Task[[str], Any, None]:
    async def note(what: str) -> None:
        ran.append(what)

    return q.task(name=f"note {queue}", queue=queue, durable=durable, **options)(note)


async def test_jobs_of_a_paused_queue_wait_and_others_run_until_it_is_resumed(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    ran: list[str] = []
    mail, other = waits(q, durable, ran), waits(q, durable, ran, "other")
    await q.pause("mail")
    held = [await mail.enqueue("a"), await mail.options(delay=2).enqueue("b")]
    await other.enqueue("c")
    await eventually(lambda: ran == ["c"], clock)
    await clock.advance(10)
    assert ran == ["c"]
    assert [job.status for job in held] == [State.PENDING, State.PENDING]
    await q.resume("mail")
    await eventually(lambda: sorted(ran) == ["a", "b", "c"], clock)


async def test_what_runs_when_its_queue_is_paused_goes_on(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    began, gate = asyncio.Event(), asyncio.Event()

    @q.task(durable=durable, queue="mail")
    async def long() -> str:
        began.set()
        await gate.wait()
        return "sent"

    job = await long.enqueue()
    async with asyncio.timeout(20):
        await eventually(began.is_set, clock)
        await q.pause("mail")
        await clock.advance(5)
        gate.set()
        assert await job.result() == "sent"


async def test_a_retry_waits_while_its_queue_is_paused(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    starts: list[int] = []

    @q.task(durable=durable, queue="mail", retry=[1, 1])
    async def flaky() -> None:
        starts.append(tinyq.current_job().attempt)
        if len(starts) == 1:
            raise ConnectionError

    job = await flaky.enqueue()
    await eventually(lambda: job.attempts == 1 and job.status is State.PENDING)
    await q.pause("mail")
    await clock.advance(10)
    assert starts == [1]
    await q.resume("mail")
    await eventually(lambda: starts == [1, 2], clock)


async def test_pause_and_resume_are_idempotent_and_take_any_name(q: TinyQ) -> None:
    await q.resume("never heard of")
    for _ in range(2):
        await q.pause("mail")
        await q.pause("alarm")
    assert (await q.stats()).paused == ("alarm", "mail")
    for _ in range(2):
        await q.resume("mail")
    assert (await q.stats()).paused == ("alarm",)
    wrong: Any = None
    with pytest.raises(TypeError, match="queue is None"):
        await q.pause(wrong)
    with pytest.raises(ValueError, match="queue is ''"):
        await q.resume("")


async def test_a_paused_job_is_not_counted_as_one_that_could_start(q: TinyQ, durable: bool) -> None:
    await q.pause("mail")
    await waits(q, durable, []).enqueue("a")
    [count] = (await q.stats()).counts
    assert (count.queue, count.state, count.count, count.due) == ("mail", State.PENDING, 1, 0)


async def test_a_pause_holds_in_every_instance_on_the_file_and_after_a_restart(open_file: Open, clock: FakeClock) -> None:
    ran: list[str] = []
    first, worker = await open_file(worker=False), await open_file()
    await first.pause("mail")
    await waits(worker, True, ran).enqueue("a")
    await clock.advance(5)
    assert ran == []
    await worker.stop()
    again = await open_file()
    waits(again, True, ran)
    await clock.advance(5)
    assert ran == []
    assert (await again.stats()).paused == ("mail",)
    await first.resume("mail")
    await eventually(lambda: ran == ["a"], clock)


async def test_a_pause_is_for_one_namespace(open_file: Open, clock: FakeClock) -> None:
    ran: list[str] = []
    one, two = await open_file(namespace="one"), await open_file(namespace="two")
    await one.pause("mail")
    await waits(two, True, ran).enqueue("a")
    await eventually(lambda: ran == ["a"], clock)
    assert (await two.stats()).paused == ()


async def test_without_a_database_a_pause_is_the_instances_own(open_at: OpenAt, clock: FakeClock) -> None:
    ran: list[str] = []
    one, two = await open_at(None), await open_at(None)
    await one.pause("mail")
    await waits(one, False, ran).enqueue("a")
    await waits(two, False, ran).enqueue("b")
    await eventually(lambda: ran == ["b"], clock)
    await clock.advance(5)
    assert ran == ["b"]


async def test_a_best_effort_job_does_not_start_once_pause_has_returned(open_file: Open, clock: FakeClock) -> None:
    q, ran = await open_file(), list[str]()
    await q.pause("mail")
    await waits(q, False, ran).enqueue("a")
    await clock.advance(5)
    assert ran == []
    await q.resume("mail")
    await eventually(lambda: ran == ["a"], clock)


async def test_paused_best_effort_jobs_do_not_count_as_waiting_for_room(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None)
    await q.pause("mail")
    await waits(q, False, []).enqueue("a")
    await clock.settle()
    engine = q._running()
    assert not engine.memory_store.has_due(clock.time())
    assert [tier.hungry for tier in engine.crew.tiers] == [False]


@pytest.mark.parametrize("claims", [True, False], ids=["claims", "claims nothing"])
async def test_best_effort_jobs_elsewhere_wait_too_once_that_process_has_noticed(
    open_file: Open, clock: FakeClock, claims: bool
) -> None:
    ran: list[str] = []
    here = await open_file()
    there = await (open_file(lease=86400) if claims else open_file(worker=False))  # so it is the claims that tell, or the upkeep
    task = waits(there, False, ran)
    await task.enqueue("before")
    await eventually(lambda: ran == ["before"], clock)
    await here.pause("mail")
    engine = there._running()
    await eventually(lambda: engine.memory_store.held == {"mail"}, clock, 0.5)
    await task.enqueue("after")
    await clock.advance(5)
    assert ran == ["before"]
    await here.resume("mail")
    await eventually(lambda: ran == ["before", "after"], clock, 0.5)


async def test_a_paused_backlog_does_not_keep_a_worker_busy(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file()
    await q.pause("mail")
    mail = waits(q, True, [])
    await q.enqueue_many([(mail, (str(n),)) for n in range(600)], delay=1)
    await q.enqueue_many([(mail, (str(n),)) for n in range(600)])
    await clock.advance(2)
    await eventually(lambda: rows(file, "DISTINCT ready, 1") == [(1, 1)], clock)  # all are due, which takes claims that write
    await eventually(lambda: not q._running().crew.claims_under_way)
    written, looked = counted(monkeypatch, "claim_rows"), counted(monkeypatch, "look_for_due")
    began = clock.monotonic()
    await eventually(lambda: len(looked) >= 5, clock)
    assert written == []
    assert clock.monotonic() - began > 3 * 0.2 - 0.01


async def test_the_backlog_of_a_paused_queue_leaves_others_their_room(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    ran: list[str] = []
    mail, other = waits(q, durable, ran), waits(q, durable, ran, "other")
    await q.pause("mail")
    await q.enqueue_many([(mail, ("held",)) for _ in range(1_000)], priority=9)
    await q.enqueue_many([(other, (str(n),)) for n in range(50)])
    await eventually(lambda: len(ran) == 50, clock)
    assert ran == [str(n) for n in range(50)]


async def test_a_paused_job_that_a_worker_died_on_waits_and_keeps_no_place(open_file: Open, file: Path, clock: FakeClock) -> None:
    ran: list[str] = []
    q = await open_file()
    await q.pause("mail")
    mail, other = waits(q, True, ran, delay=3600), waits(q, True, ran, "other", delay=3600)
    await mail.options(priority=5).enqueue("held")
    await other.enqueue("free")
    lose(file, clock)
    await eventually(lambda: ran == ["free"], clock, 0.5)
    await eventually(lambda: rows(file, "queue, state, lost") == [("mail", "pending", 1)], clock)


async def test_drain_does_not_wait_for_paused_jobs(q: TinyQ, durable: bool) -> None:
    ran: list[str] = []
    await q.pause("mail")
    await waits(q, durable, ran).enqueue("held")
    await waits(q, durable, ran, "other").enqueue("free")
    async with asyncio.timeout(20):
        await q.drain()
    assert ran == ["free"]


async def test_paused_best_effort_jobs_are_promoted_at_shutdown(open_file: Open, file: Path) -> None:
    q, ran = await open_file(), list[str]()
    await q.pause("mail")
    await waits(q, False, ran).enqueue("held")
    async with asyncio.timeout(20):
        await q.stop(grace=3600)
    assert ran == []
    assert rows(file, "state, queue, payload") == [("pending", "mail", '[["held"],{}]')]


async def test_paused_best_effort_jobs_without_a_database_are_reported_lost(
    open_at: OpenAt, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_at(None)
    await q.pause("mail")
    await waits(q, False, []).enqueue("held")
    async with asyncio.timeout(20):
        await q.stop(grace=3600)
    assert errors(caplog) == ["best-effort jobs lost at shutdown: note mail ×1"]


async def test_a_schedule_whose_queue_is_paused_goes_on_firing_and_skips(q: TinyQ, clock: FakeClock) -> None:
    ran: list[str] = []

    @q.every(10, queue="mail")
    async def tick() -> None:
        ran.append("tick")

    await q.pause("mail")
    for _ in range(4):
        await clock.advance(10)
        await eventually(lambda: not q._running().schedulers[q._running().durable is not None].is_busy(clock.time()))
    [schedule] = (await q.stats()).schedules
    assert (ran, schedule.fired, schedule.skipped, schedule.missed) == ([], 1, 3, 0)
    await q.resume("mail")
    await eventually(lambda: ran == ["tick"], clock)


def test_a_queue_is_paused_and_resumed_across_processes(fleet: Fleet) -> None:
    async def do(verb: Callable[[TinyQ], Any]) -> None:
        async with TinyQ(fleet.db, worker=False) as q:
            await verb(q)

    fleet.member({"note": 5})
    asyncio.run(do(lambda q: q.pause("mail")))
    asyncio.run(do(lambda q: q.enqueue("note", 1, durable=True, queue="mail")))
    asyncio.run(do(lambda q: q.enqueue("note", 2, durable=True, priority=-1)))
    fleet.wait_for_marks(1, "note", 2)  # so it has looked since
    assert fleet.marks("note", 1) == []
    asyncio.run(do(lambda q: q.resume("mail")))
    fleet.wait_for_marks(1, "note", 1)


# on_lost


@pytest.mark.parametrize("level", ["task", "enqueue"])
async def test_a_job_that_is_not_to_survive_its_worker_is_dead_without_another_start(
    open_file: Open, file: Path, clock: FakeClock, level: str
) -> None:
    q, ran, told = await open_file(), list[str](), list[str | None]()
    q.on_dead(lambda job: told.append(job.reason))
    task = waits(q, True, ran, delay=3600, **({"on_lost": "dead"} if level == "task" else {}))
    job = await (task if level == "task" else task.options(on_lost="dead")).enqueue("once")
    lose(file, clock)
    await eventually(lambda: told, clock, 0.5)
    await clock.advance(5)
    assert (ran, told) == ([], ["worker lost"])
    assert rows(file, "state, reason, attempts, lost") == [("dead", "worker lost", 1, 1)]
    assert (job.status, job.reason) == (State.DEAD, "worker lost")


async def test_what_an_enqueue_says_about_a_lost_worker_stands_over_what_its_task_says(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q, ran = await open_file(), list[str]()
    await waits(q, True, ran, delay=3600, on_lost="dead").options(on_lost="retry").enqueue("again")
    lose(file, clock)
    await eventually(lambda: ran == ["again"], clock, 0.5)


async def test_a_process_that_does_not_know_the_task_heeds_what_the_row_says(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    writer = await open_file(worker=False)
    for on_lost in ("dead", "retry"):
        await writer.enqueue("charge", durable=True, on_lost=on_lost)
    lose(file, clock)
    await eventually(lambda: rows(file, "state") == [("dead",), ("pending",)], clock, 0.5)
    assert rows(file, "reason, attempts, lost") == [("worker lost", 1, 1)] * 2


async def test_what_a_stranger_had_to_leave_pending_is_dead_when_one_comes_who_knows_the_task(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    stranger = await open_file(worker=False)
    job = await stranger.enqueue("charge", durable=True)
    lose(file, clock)
    await eventually(lambda: rows(file, "state") == [("pending",)], clock, 0.5)
    q, ran, told = await open_file(), list[str](), list[str]()

    async def charge() -> None:
        ran.append("charged")

    q.on_dead(lambda job: told.append(job.id))
    q.task(name="charge", on_lost="dead")(charge)
    await eventually(lambda: told, clock, 0.5)
    assert (ran, told) == ([], [job.id])
    assert rows(file, "state, reason, attempts, lost") == [("dead", "worker lost", 1, 1)]


async def test_what_was_lost_for_good_is_not_started_after_a_worker_that_stopped_just_then_has_handed_it_back(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await open_file(worker=False)).enqueue("charge", durable=True)
    lose(file, clock)
    await eventually(lambda: rows(file, "state") == [("pending",)], clock, 0.5)
    claim, claimed, arrive, ran = SQLiteStore.claim, asyncio.Event(), asyncio.Event(), list[str]()

    async def arrives_late(store: SQLiteStore, *args: Any) -> tinyq.Claimed:
        answer = await claim(store, *args)
        if answer.rows:
            claimed.set()
            await arrive.wait()
        return answer

    async def charge() -> None:
        ran.append("charged")

    monkeypatch.setattr(SQLiteStore, "claim", arrives_late)
    q = await open_file()
    q.task(name="charge", on_lost="dead")(charge)
    await eventually(claimed.is_set, clock, 0.5)
    stopping = asyncio.create_task(stopped_at_once(q, clock))
    await eventually(lambda: q._engine is None or q._engine.phase == "stopping")
    arrive.set()
    await stopping
    assert rows(file, "state, reason, attempts, lost") == [("pending", "worker lost", 1, 1)]
    (await open_file()).task(name="charge", on_lost="dead")(charge)
    await eventually(lambda: rows(file, "state") == [("dead",)], clock, 0.5)
    assert ran == []


async def test_a_loss_that_was_survived_long_ago_does_not_end_a_job(open_file: Open, file: Path, clock: FakeClock) -> None:
    q, ran = await open_file(), list[str]()
    await waits(q, True, ran, delay=3600, on_lost="dead").enqueue("a")
    edit(file, "UPDATE tinyq_jobs SET lost = 1, attempts = 2, claim_no = 2, reason = 'failed', run_at = ?", clock.time())
    await eventually(lambda: ran == ["a"], clock)


async def test_a_requeued_job_that_was_lost_starts_again(open_file: Open, file: Path, clock: FakeClock) -> None:
    q, ran = await open_file(), list[str]()
    job = await waits(q, True, ran, delay=3600, on_lost="dead").enqueue("a")
    lose(file, clock)
    await eventually(lambda: rows(file, "state") == [("dead",)], clock, 0.5)
    assert await q.requeue(job.id) == 1
    await eventually(lambda: ran == ["a"], clock)


async def test_a_promoted_job_keeps_what_was_said_about_a_lost_worker(open_file: Open, file: Path) -> None:
    q = await open_file()
    job = await waits(q, False, []).options(delay=60, on_lost="dead").enqueue("a")
    assert await job.promote()
    assert rows(file, "options") == [('{"on_lost":"dead"}',)]


def test_on_lost_is_one_of_two_words() -> None:
    wrong: Any = "ignore"
    with pytest.raises(ValueError, match="on_lost is 'ignore': give one of 'retry', 'dead'"):
        TinyQ().task(on_lost=wrong)


def test_a_job_that_ends_its_process_and_is_not_to_survive_it_has_one_start(fleet: Fleet) -> None:
    async def enqueue() -> None:
        async with TinyQ(fleet.db, worker=False) as q:
            await q.enqueue("killed", 7, durable=True, on_lost="dead")

    asyncio.run(enqueue())
    first = fleet.member({"killed": 5}, lease=1.0)
    wait_until("the job has ended its process", first.ended)
    fleet.member({"killed": 5}, lease=1.0)
    fleet.wait_for_rows([("dead", "worker lost", 1)], "state", "reason", "attempts")
    assert len(fleet.marks("killed")) == 1


# Cancel from another process


def cancel(fleet: Fleet, id: str) -> tuple[bool, State]:
    async def cancel() -> tuple[bool, State]:
        async with TinyQ(fleet.db, worker=False) as q, asyncio.timeout(30):
            job = await q.get(id)
            return await job.cancel(), (await q.get(id)).status

    return asyncio.run(cancel())


@pytest.mark.parametrize("task", ["hangs_until_told", "looks_until_told"])
def test_a_job_that_runs_in_another_process_is_stopped_there(fleet: Fleet, task: str) -> None:
    member = fleet.member({task: 1}, lease=1.0)
    [id] = fleet.enqueue(task, 7)
    fleet.wait_for_marks(1, task, 7)
    assert cancel(fleet, id) == (True, State.CANCELLED)
    assert len(fleet.marks("told", 7)) == 1  # when cancel returned, the handler had stopped
    assert fleet.rows("state", "reason", "attempts") == [("cancelled", "cancelled on request", 1)]
    assert not member.ended()


def test_a_pending_job_is_cancelled_from_another_process_and_never_runs(fleet: Fleet) -> None:
    fleet.member({"hangs_until_told": 1, "note": 5}, lease=1.0, concurrency=1)
    [running] = fleet.enqueue("hangs_until_told", 7)
    fleet.wait_for_marks(1, "hangs_until_told", 7)
    [pending] = fleet.enqueue("note", 1)
    assert cancel(fleet, pending) == (True, State.CANCELLED)
    assert cancel(fleet, running) == (True, State.CANCELLED)
    fleet.enqueue("note", 2)
    fleet.wait_for_marks(1, "note", 2)
    assert fleet.marks("note", 1) == []
    fleet.wait_for_rows([("hangs_until_told", "cancelled"), ("note", "cancelled")], "task", "state")
