"""Jobs enqueued from threads and scripts: through the engine that runs in this process, or straight into the file."""

import asyncio
import contextvars
import functools
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from clock import FakeClock
from conftest import OpenAt
from fleet import Fleet
from helpers import Open, counted, edit, eventually, rows
from servers import Server, wait_until
from starlette.requests import Request

import tinyq
from tinyq import (
    ConfigurationError,
    JobNotFound,
    KeyConflict,
    NoResult,
    NotStarted,
    PayloadError,
    QueueFull,
    ShuttingDown,
    State,
    StoreBusy,
    StoreError,
    TinyQ,
)

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[1]


def add(a: int, b: int = 0) -> int:
    return a + b


async def in_thread(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In a plain thread, without the context of the caller."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **kwargs))


def in_other_thread(call: Callable[[], Any]) -> Any:
    """The same, while the caller's own thread, and its event loop, stand still."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.fixture
def unstarted(file: Path) -> TinyQ:
    q = TinyQ(file)
    q.task(name="add")(add)
    return q


def script(source: str, *arguments: object) -> str:
    """What a Python process of its own prints."""
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", source]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


# through the engine


async def test_a_thread_enqueues_through_the_engine_of_its_process(q: TinyQ, durable: bool) -> None:
    task = q.task(name="add")(add)
    job = await in_thread(q.enqueue_sync, task, 1, 2, durable=durable)
    assert (job.durable, job.created, job.task) == (durable, True, "add")
    assert await job.result() == 3


async def test_all_ways_of_enqueueing_have_a_form_for_threads(q: TinyQ, durable: bool) -> None:
    task = q.task(name="add", durable=durable)(add)
    jobs = [
        await in_thread(q.enqueue_sync, add, 1, b=2),
        await in_thread(q.enqueue_sync, "add", 1, 2),
        await in_thread(task.enqueue_sync, 1, 2),
        await in_thread(task.enqueue_sync, 1, b=2),
        await in_thread(task.options(priority=3).enqueue_sync, 1, 2),
    ]
    assert [await job.result() for job in jobs] == [3] * 5
    assert {job.durable for job in jobs} == {durable}


async def test_a_handle_that_is_awaited_in_another_loop_says_where_it_belongs(open_q: Open, durable: bool) -> None:
    q = await open_q()
    go_on = asyncio.Event()

    @q.task(result_ttl=60)
    async def work() -> str:
        await go_on.wait()
        return "done"

    job = await in_thread(work.options(durable=durable).enqueue_sync)
    waits: list[Callable[[], Coroutine[Any, Any, Any]]] = [job.result, job.cancel, q.stop]
    for wait in waits:
        with pytest.raises(NotStarted, match="run_coroutine_threadsafe"):
            await in_thread(lambda wait=wait: asyncio.run(wait()))
    go_on.set()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        assert await in_thread(lambda: asyncio.run_coroutine_threadsafe(job.result(), loop).result()) == "done"
        assert await in_thread(lambda: asyncio.run(job.result())) == "done"


async def test_a_best_effort_job_sees_the_context_of_the_thread(open_at: OpenAt) -> None:
    q = await open_at(None)
    variable = contextvars.ContextVar("variable", default="unset")

    async def look() -> str:
        return variable.get()

    def caller() -> Any:
        variable.set("the thread's")
        return q.enqueue_sync(look), q.enqueue_sync(look, priority=1)

    jobs = await in_thread(caller)
    assert [await job.result() for job in jobs] == ["the thread's"] * 2


async def test_a_plain_handler_enqueues_another_job(q: TinyQ, durable: bool) -> None:
    task = q.task(name="add", durable=durable)(add)
    enqueued: list[Any] = []

    @q.task(durable=durable)
    def first() -> None:
        enqueued.append(q.enqueue_sync(task, 1, 2))

    await (await q.enqueue(first)).result()
    assert await enqueued[0].result() == 3


async def test_a_plain_handler_is_known_as_a_job_to_what_it_enqueues(open_at: OpenAt) -> None:
    """A job does not wait for room, since it may be in the way itself: the clock stands still here."""
    q = await open_at(None, concurrency=1, max_pending=1)

    @q.task(retry=False)
    def fills() -> str:
        q.enqueue_sync(add, 1)
        try:
            q.enqueue_sync(add, 2)
        except QueueFull:
            return tinyq.current_job().task
        return "there was room"

    job = await q.enqueue(fills)
    assert await job.result() == job.task


async def test_threads_wait_for_room_as_coroutines_do(open_at: OpenAt) -> None:
    q = await open_at(None, concurrency=1, max_pending=1)
    gate = asyncio.Event()
    await q.enqueue(gate.wait)
    await q.enqueue(add, 0)
    waiting = asyncio.create_task(in_thread(q.enqueue_sync, add, 1))
    await eventually(lambda: q._engine and q._engine._room)
    gate.set()
    assert await (await waiting).result() == 1


async def test_what_is_wrong_with_a_call_is_raised_in_the_thread(open_file: Open) -> None:
    q: Any = await open_file(worker=False)
    task = q.task(name="add")(add)
    await q.enqueue(task, 1, durable=True, key="k")
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: q.enqueue_sync(task)),
        (TypeError, lambda: q.enqueue_sync(task, 1, dellay=3)),
        (ValueError, lambda: q.enqueue_sync(task, 1, delay=-3)),
        (PayloadError, lambda: q.enqueue_sync(task, object(), durable=True)),
        (KeyConflict, lambda: q.enqueue_sync(task, 1, durable=True, key="k", on_conflict="raise")),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            await in_thread(call)


async def test_an_event_loop_is_not_blocked(q: TinyQ, durable: bool) -> None:
    task = q.task(name="add", durable=durable)(add)
    calls: list[Callable[[], Any]] = [
        lambda: q.enqueue_sync(task, 1),
        lambda: task.enqueue_sync(1),
        lambda: task.options(priority=1).enqueue_sync(1),
    ]

    async def elsewhere(call: Callable[[], Any]) -> None:
        with pytest.raises(NotStarted, match="await enqueue"):
            call()

    for call in calls:
        await elsewhere(call)
        await in_thread(lambda: asyncio.run(elsewhere(call)))  # noqa: B023  it is awaited here
    assert (await q.stats()).counts == ()


async def test_an_event_loop_that_is_stuck_is_waited_for_a_bounded_time(q: TinyQ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.05)
    ran: list[int] = []
    with pytest.raises(TimeoutError, match="nothing was stored"):
        in_other_thread(lambda: q.enqueue_sync(ran.append, 1))
    monkeypatch.undo()
    await in_thread(q.enqueue_sync, ran.append, 2)
    await q.drain()
    assert ran == [2]


async def test_ones_own_open_transaction_is_named_as_what_may_be_in_the_way(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file(worker=False)
    monkeypatch.setattr(tinyq, "PATIENCE", 0.1)

    def caller() -> None:
        with closing(sqlite3.connect(file, isolation_level=None)) as own:
            own.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusy, match="if it is your own, commit before you enqueue, or pass it as tx"):
                q.enqueue_sync("add", 1, durable=True)

    await in_thread(caller)


async def test_a_tinyq_that_is_stopping_takes_nothing_from_threads(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()
    task, gate = q.task(name="add")(add), threading.Event()
    heard: list[str] = []

    def slow() -> None:
        gate.wait(20)
        heard.append(q.enqueue_sync(task, 3, durable=True).id)  # a job that runs may go on to the end

    await q.enqueue(slow)
    stopping = asyncio.create_task(q.stop())
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await in_thread(q.enqueue_sync, task, 1, durable=True)
    gate.set()
    await eventually(stopping.done)
    assert len(heard) == 1


async def test_a_tinyq_that_has_stopped_takes_durable_jobs_into_the_file(open_file: Open, file: Path) -> None:
    q = await open_file()
    task = q.task(name="add")(add)
    await q.stop()
    await in_thread(q.enqueue_sync, task, 1, durable=True)
    with pytest.raises(NotStarted):
        await in_thread(q.enqueue_sync, task, 1)
    assert rows(file, "payload") == [("[[1],{}]",)]


def test_an_engine_whose_loop_does_not_run_is_not_waited_for(unstarted: TinyQ) -> None:
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(unstarted.start())
        job = unstarted.enqueue_sync(add, 1, 2, durable=True, result_ttl=60)
        assert loop.run_until_complete(job.result(20)) == 3
        loop.run_until_complete(unstarted.stop())


# straight into the file


def test_without_an_engine_a_durable_job_is_in_the_file_when_the_call_returns(unstarted: TinyQ, file: Path) -> None:
    job = unstarted.enqueue_sync("add", 1, b=2, durable=True, priority=4)
    assert (job.status, job.created, job.task, job.durable) == (State.PENDING, True, "add", True)
    [(id, *others)] = rows(file, "id, payload, priority, state, ready")
    assert (tinyq.id_text(id), others) == (job.id, ['[[1],{"b":2}]', 4, "pending", 1])


async def test_the_row_is_the_one_that_an_engine_would_have_written(file: Path, open_file: Open, clock: FakeClock) -> None:
    q = TinyQ(file, clock=clock)
    task = q.task(name="add", queue="sums")(add)
    options: list[dict[str, Any]] = [{}, {"key": "k"}, {"delay": 60, "expires": 90}, {"retry": [1, 2], "timeout": 5}]
    for each in options:
        in_other_thread(functools.partial(task.options(durable=True, **each).enqueue_sync, 1, b=2))
    edit(file, "UPDATE tinyq_jobs SET key = 'other' WHERE key = 'k'")
    started = await open_file(worker=False)
    other = started.task(name="add", queue="sums")(add)
    for each in options:
        await other.options(durable=True, **each).enqueue(1, b=2)
    columns = ", ".join(c for c in tinyq.COLUMNS if c not in ("seq", "id", "key"))
    found = rows(file, columns)
    assert found[: len(options)] == found[len(options) :]


async def test_the_job_runs_once_its_tinyq_starts_and_its_handle_follows(unstarted: TinyQ) -> None:
    job = await in_thread(unstarted.enqueue_sync, add, 1, 2, durable=True, result_ttl=60)
    waits: list[Callable[[], Coroutine[Any, Any, Any]]] = [job.result, job.cancel, job.exists, job.promote]
    for wait in waits:
        with pytest.raises(NotStarted, match=r"q\.get"):
            await wait()
    async with unstarted, asyncio.timeout(20):
        assert await job.result() == 3
        assert await job.exists()
        assert job.status is State.DONE
    async with unstarted:
        assert await job.result() == 3


async def test_a_job_that_starts_while_its_handle_looks_for_it_is_the_handles_own(
    unstarted: TinyQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @unstarted.task(durable=True)
    async def work() -> str:
        started.set()
        await go_on.wait()
        return "seen"

    async with unstarted:
        await unstarted.pause("default")
    job = await in_thread(work.enqueue_sync)
    get = tinyq.SQLiteStore.get

    async def late(store: tinyq.SQLiteStore, ids: Any) -> Any:
        found = await get(store, ids)
        await unstarted.resume("default")
        await started.wait()
        return found

    async with asyncio.timeout(20), unstarted:
        monkeypatch.setattr(tinyq.SQLiteStore, "get", late)
        result = asyncio.create_task(job.result())
        await eventually(lambda: job.status is State.RUNNING)
        go_on.set()
        assert await result == "seen"


async def test_a_handle_cancels_a_job_that_waits(unstarted: TinyQ, file: Path) -> None:
    job = await in_thread(unstarted.enqueue_sync, add, 1, durable=True, delay=3600)
    async with unstarted:
        assert await job.cancel()
        assert job.status is State.CANCELLED
    assert rows(file, "state") == [("cancelled",)]


async def test_a_handle_of_a_job_that_has_gone_says_so(unstarted: TinyQ) -> None:
    job = await in_thread(unstarted.enqueue_sync, add, 1, durable=True)
    async with unstarted, asyncio.timeout(20):
        await unstarted.drain()
        assert not await job.exists()
        with pytest.raises(NoResult):
            await job.result()


def test_a_best_effort_job_needs_an_engine(unstarted: TinyQ, file: Path) -> None:
    of_request = Request({"type": "http"})  # which is warned about, where it would run
    calls = ((add, 1), (print, 1), (print, of_request))
    for call in (functools.partial(unstarted.enqueue_sync, *each) for each in calls):
        with pytest.raises(NotStarted, match="durable=True"):
            call()
    assert not file.exists()


def test_a_durable_job_needs_a_database() -> None:
    q = TinyQ()
    task = q.task(name="add")(add)
    with pytest.raises(ConfigurationError, match="needs a database"):
        q.enqueue_sync(task, 1, durable=True)


def test_what_is_wrong_with_a_call_is_found_without_an_engine_too(unstarted: Any, file: Path) -> None:
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (TypeError, lambda: unstarted.enqueue_sync(add, durable=True)),
        (TypeError, lambda: unstarted.enqueue_sync(print, durable=True)),
        (TypeError, lambda: unstarted.enqueue_sync(add, 1, durable=True, dellay=3)),
        (ValueError, lambda: unstarted.enqueue_sync(add, 1, durable=True, delay=-3)),
        (PayloadError, lambda: unstarted.enqueue_sync(add, object(), durable=True)),
        (tinyq.UnknownTask, lambda: unstarted.enqueue_sync("ad")),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
    assert not file.exists()


def test_keys_hold_without_an_engine(unstarted: TinyQ, file: Path) -> None:
    first = unstarted.enqueue_sync(add, 1, durable=True, key="k")
    again = unstarted.enqueue_sync(add, 2, durable=True, key="k")
    assert (again.id, again.created) == (first.id, False)
    with pytest.raises(KeyConflict):
        unstarted.enqueue_sync(add, 3, durable=True, key="k", on_conflict="raise")
    unstarted.enqueue_sync(add, 4, durable=True, key="k", on_conflict="replace")
    assert rows(file, "payload") == [("[[4],{}]",)]


def test_many_threads_enqueue_into_a_new_file_at_once(unstarted: TinyQ, file: Path) -> None:
    ready = threading.Barrier(8)

    def caller(thread: int) -> list[str]:
        ready.wait(20)
        return [unstarted.enqueue_sync(add, thread, n, durable=True).id for n in range(5)]

    with ThreadPoolExecutor(8) as pool:
        ids = [id for some in pool.map(caller, range(8)) for id in some]
    assert len(set(ids)) == len(rows(file, "id")) == 40


def test_nothing_stays_open(unstarted: TinyQ, file: Path) -> None:
    before = list(tinyq._open)
    unstarted.enqueue_sync(add, 1, durable=True)
    with pytest.raises(KeyConflict):
        for _ in range(2):
            unstarted.enqueue_sync(add, 1, durable=True, key="k", on_conflict="raise")
    assert tinyq._open == before
    assert [found.name for found in file.parent.iterdir()] == [file.name]


def test_the_configured_durability_holds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = counted(monkeypatch, "prepare")
    for q in (TinyQ(file), TinyQ(file, synchronous="normal")):
        q.enqueue_sync("add", 1, durable=True)
    assert [given[1:3] for given in prepared] == [(str(file), "full"), (str(file), "normal")]  # type: ignore[index]


def test_the_default_instance_takes_its_database_from_the_environment(file: Path) -> None:
    source = "import os, sys, tinyq; os.environ['TINYQ_DB'] = sys.argv[1]; print(tinyq.enqueue_sync('add', 1, durable=True).task)"
    assert script(source, file) == "add\n"
    assert rows(file, "task, payload") == [("add", "[[1],{}]")]


def test_a_file_that_is_locked_is_waited_for_a_bounded_time(
    unstarted: TinyQ, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unstarted.enqueue_sync(add, 1, durable=True)
    monkeypatch.setattr(tinyq, "PATIENCE", 0.05)
    with closing(sqlite3.connect(file, isolation_level=None)) as own:
        own.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="if it is your own, commit before you enqueue, or pass it as tx"):
            unstarted.enqueue_sync(add, 2, durable=True)
    assert len(rows(file, "id")) == 1


def test_a_lock_that_is_released_meanwhile_costs_nothing_but_time(unstarted: TinyQ, file: Path) -> None:
    unstarted.enqueue_sync(add, 1, durable=True)
    with closing(sqlite3.connect(file, isolation_level=None)) as own, ThreadPoolExecutor(1) as pool:
        own.execute("BEGIN IMMEDIATE")
        job = pool.submit(unstarted.enqueue_sync, add, 2, durable=True)
        wait_until("it waits", lambda: len(tinyq._open) > 0)
        own.execute("COMMIT")
        assert job.result(20).status is State.PENDING
    assert len(rows(file, "id")) == 2


def test_what_cannot_be_a_database_is_a_store_error(tmp_path: Path, unstarted: TinyQ, file: Path) -> None:
    with pytest.raises(StoreError, match="CANTOPEN"):
        TinyQ(tmp_path / "nowhere" / "jobs.db").enqueue_sync("add", durable=True)
    unstarted.enqueue_sync(add, 1, durable=True)
    edit(file, "UPDATE tinyq_meta SET value = 99")
    with pytest.raises(StoreError, match="upgrade tinyq"):
        unstarted.enqueue_sync(add, 1, durable=True)


def test_the_workers_of_other_processes_are_rung(unstarted: TinyQ, file: Path) -> None:
    """A socket stands for the worker, which would also find the job with its next look."""
    unstarted.enqueue_sync(add, 1, durable=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bell:
        bell.bind(("127.0.0.1", 0))
        bell.settimeout(20)
        now = time.time_ns() // 1000
        row = ("worker", "default", bell.getsockname()[1], now, now)
        edit(file, "INSERT INTO tinyq_workers VALUES (?, ?, ?, ?, ?)", *row)
        unstarted.enqueue_sync(add, 1, durable=True)
        assert bell.recv(10) == b"\0"
        bell.setblocking(False)
        unstarted.enqueue_sync(add, 1, durable=True, delay=60)
        with pytest.raises(BlockingIOError):
            bell.recv(10)


def test_a_script_hands_work_to_a_worker_in_another_process(fleet: Fleet) -> None:
    fleet.member({"note": 1})
    source = "import sys, tinyq; tinyq.TinyQ(sys.argv[1]).enqueue_sync('note', 7, durable=True)"
    script(source, fleet.db)
    assert fleet.wait_for_marks(1, "note", 7)


def test_a_script_needs_no_aiosqlite(file: Path) -> None:
    source = """
import sqlite3, sys
sys.modules["aiosqlite"] = sys.modules["sqlalchemy"] = None
import tinyq
q = tinyq.TinyQ(sys.argv[1])
q.enqueue_sync("add", 1, durable=True)
with sqlite3.connect(sys.argv[1]) as tx:
    q.enqueue_sync("add", 2, tx=tx)
tx.close()
try:
    q.enqueue_sync("add", 2, tx=q)
except TypeError as error:
    print(error)
"""
    assert "give a sqlite3.Connection" in script(source, file)
    assert rows(file, "payload") == [("[[1],{}]",), ("[[2],{}]",)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_enqueues_while_its_parent_goes_on(file: Path) -> None:
    source = """
import asyncio, os, sys, threading, tinyq
q = tinyq.TinyQ(sys.argv[1], worker=False)
def child():
    pid = os.fork()
    if not pid:
        try:
            thread = threading.Thread(target=q.enqueue_sync, args=("add", 2), kwargs={"durable": True})
            thread.start()
            thread.join()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
async def main():
    async with q:
        for _ in range(10):
            await q.enqueue("add", 1, durable=True)
            child()
            await q.enqueue("add", 3, durable=True)
asyncio.run(main())
"""
    script(source, file)
    assert rows(file, "payload") == [(f"[[{n}],{{}}]",) for _ in range(10) for n in (1, 2, 3)]


# in the caller's transaction


@pytest.fixture
def own(file: Path, unstarted: TinyQ) -> Any:
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE orders (id INTEGER)")
        yield db


def test_without_an_engine_a_job_exists_once_its_transaction_has_committed(
    unstarted: TinyQ, file: Path, own: sqlite3.Connection
) -> None:
    """Also the first one of a file that tinyq has not seen before."""
    own.execute("INSERT INTO orders VALUES (7)")
    job = unstarted.enqueue_sync(add, 7, tx=own)
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'tinyq_jobs'").fetchone() == (0,)
    own.commit()
    assert rows(file, "payload, state") == [("[[7],{}]", "pending")]
    assert (job.durable, job.created, job.status) == (True, True, State.PENDING)


def test_without_an_engine_a_job_does_not_exist_if_its_transaction_rolls_back(
    unstarted: TinyQ, file: Path, own: sqlite3.Connection
) -> None:
    unstarted.enqueue_sync(add, 1, durable=True)
    own.execute("INSERT INTO orders VALUES (7)")
    unstarted.enqueue_sync(add, 7, tx=own)
    own.rollback()
    assert rows(file, "payload") == [("[[1],{}]",)]
    assert own.execute("SELECT * FROM orders").fetchall() == []


async def test_while_an_engine_runs_the_callers_transaction_stays_in_his_thread(open_file: Open, file: Path) -> None:
    q = await open_file()
    task = q.task(name="add")(add)

    def caller() -> Any:
        with closing(sqlite3.connect(file)) as tx, tx:
            return q.enqueue_sync(task, 1, 2, tx=tx, result_ttl=60), task.options(tx=tx, delay=60).enqueue_sync(3)

    first, second = await in_thread(caller)
    async with asyncio.timeout(20):
        assert await first.result() == 3
    assert await second.cancel()


async def test_a_transaction_of_this_thread_is_taken_in_an_event_loop_too(open_file: Open, file: Path) -> None:
    q = await open_file(worker=False)
    with closing(sqlite3.connect(file)) as tx:
        job = q.enqueue_sync("add", 1, tx=tx)
        async with asyncio.timeout(20):
            with pytest.raises(NoResult, match="was not committed"):
                await job.result()
        tx.commit()
    assert (await q.get(job.id)).status is State.PENDING


async def test_the_handle_of_a_job_that_was_rolled_back_says_that_it_is_not_there(open_file: Open, file: Path) -> None:
    q = await open_file(worker=False)
    with closing(sqlite3.connect(file)) as tx:
        job = q.enqueue_sync("add", 1, tx=tx)
    assert not await job.exists()
    assert not await job.cancel()
    with pytest.raises(JobNotFound):
        await q.get(job.id)


def test_a_connection_to_another_file_is_refused(unstarted: TinyQ, tmp_path: Path, file: Path) -> None:
    for path in (tmp_path / "other.db", ":memory:"):
        with closing(sqlite3.connect(path)) as tx:
            with pytest.raises(ValueError, match="give a connection to that file"):
                unstarted.enqueue_sync(add, 1, tx=tx)
            assert not tx.in_transaction
    assert not file.exists()


def test_a_connection_that_cannot_be_used_is_refused(unstarted: TinyQ, own: sqlite3.Connection, file: Path) -> None:
    with pytest.raises(ValueError, match="thread"):
        in_other_thread(lambda: unstarted.enqueue_sync(add, 1, tx=own))
    with closing(sqlite3.connect(file, isolation_level=None)) as tx, pytest.raises(ValueError, match="no open transaction"):
        unstarted.enqueue_sync(add, 1, tx=tx)
    with pytest.raises(ValueError, match="before you close it"):
        unstarted.enqueue_sync(add, 1, tx=tx)


def test_a_connection_that_needs_an_event_loop_is_refused(unstarted: TinyQ, file: Path) -> None:
    import aiosqlite

    async def refused() -> None:
        async with aiosqlite.connect(file) as tx:
            with pytest.raises(TypeError, match="await enqueue"):
                unstarted.enqueue_sync(add, 1, tx=tx)

    asyncio.run(refused())


# in a server

APP = """
from fastapi import FastAPI
import tinyq

ran = []

@tinyq.task
def note(word: str) -> None:
    ran.append(word)

app = FastAPI(lifespan=tinyq.lifespan)

@app.post("/note")
def enqueue() -> list[str]:
    return [tinyq.enqueue_sync(note, "best-effort").id, tinyq.enqueue_sync(note, "durable", durable=True).id]

@app.get("/ran")
def look() -> list[str]:
    return sorted(ran)
"""


def test_plain_routes_of_a_real_server_enqueue_both_kinds_of_job(tmp_path: Path, file: Path) -> None:
    (tmp_path / "sync_app.py").write_text(APP)
    with Server("sync_app:app", app_dir=tmp_path, log=tmp_path / "log", TINYQ_DB=str(file)) as server:
        assert len(httpx.post(server.url + "/note").raise_for_status().json()) == 2
        wait_until("both ran", lambda: httpx.get(server.url + "/ran").json() == ["best-effort", "durable"])
