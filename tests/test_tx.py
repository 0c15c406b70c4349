"""Jobs that are enqueued in the caller's own transaction: they exist if and only if it commits."""

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, eventually

import tinyq
from tinyq import JobNotFound, KeyConflict, NoResult, PayloadError, PayloadTooLarge, State, StoreBusy, StoreError, TinyQ

pytestmark = pytest.mark.timeout(300)


class Caller:
    """The application's own connection, sqlite3's or aiosqlite's, under one set of words."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    async def do(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self.tx, name)(*arguments)
        return await answer if hasattr(answer, "__await__") else answer

    async def execute(self, sql: str, *parameters: Any) -> None:
        await self.do("execute", sql, parameters)

    async def commit(self) -> None:
        await self.do("commit")

    async def rollback(self) -> None:
        await self.do("rollback")


@pytest.fixture(params=["sqlite3", "aiosqlite"])
async def caller(request: pytest.FixtureRequest, file: Path, q: TinyQ) -> AsyncIterator[Caller]:
    """Connected as most applications do it; its table `orders` is there."""
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE orders (id INTEGER)")
    if request.param == "sqlite3":
        with closing(sqlite3.connect(file)) as db:
            yield Caller(db)
    else:
        async with aiosqlite.connect(file) as other:
            yield Caller(other)


@pytest.fixture
async def q(open_file: Open) -> TinyQ:
    """It claims nothing, so that jobs stay where a test looks for them."""
    return await open_file(worker=False)


@contextmanager
def connected(file: Path, **options: Any) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file, **options)) as db:
        yield db


def rows(file: Path, columns: str = "payload") -> list[tuple[Any, ...]]:
    with connected(file) as db:
        return db.execute(f"SELECT {columns} FROM tinyq_jobs ORDER BY seq").fetchall()


async def send(order: int) -> int:
    return order


# committed or not


async def test_a_job_exists_once_its_transaction_has_committed(q: TinyQ, caller: Caller, file: Path) -> None:
    await caller.execute("INSERT INTO orders VALUES (7)")
    job = await q.enqueue("send", 7, tx=caller.tx)
    assert rows(file) == []
    assert (job.status, job.durable, job.created) == (State.PENDING, True, True)
    await caller.commit()
    assert rows(file, "payload, state") == [("[[7],{}]", "pending")]
    assert (await q.get(job.id)).id == job.id


async def test_a_job_does_not_exist_if_its_transaction_rolls_back(q: TinyQ, caller: Caller, file: Path) -> None:
    await caller.execute("INSERT INTO orders VALUES (7)")
    job = await q.enqueue("send", 7, tx=caller.tx)
    await caller.rollback()
    assert rows(file) == []
    with pytest.raises(JobNotFound):
        await q.get(job.id)
    async with asyncio.timeout(10):
        with pytest.raises(NoResult, match="was not committed"):
            await job.result()
        assert not await job.cancel()


async def test_a_transaction_is_opened_as_for_any_other_write(q: TinyQ, caller: Caller, file: Path) -> None:
    await q.enqueue("send", 1, tx=caller.tx)
    assert caller.tx.in_transaction
    await caller.rollback()
    await q.enqueue("send", 2, tx=caller.tx)
    await caller.commit()
    assert rows(file) == [("[[2],{}]",)]


async def test_all_ways_of_enqueueing_take_the_callers_transaction(q: TinyQ, caller: Caller, file: Path) -> None:
    task = q.task(name="send", durable=False)(send)
    await q.enqueue(task, 1, tx=caller.tx)
    await task.options(tx=caller.tx).enqueue(2)
    jobs = await q.enqueue_many([(task, (3,)), ("elsewhere", (4,))], tx=caller.tx)
    assert [job.durable for job in jobs] == [True, True]
    assert rows(file) == []
    await caller.commit()
    assert rows(file, "task, payload") == [
        ("send", "[[1],{}]"), ("send", "[[2],{}]"), ("send", "[[3],{}]"), ("elsewhere", "[[4],{}]"),
    ]  # fmt: skip


async def test_a_job_in_a_transaction_is_written_like_any_other(q: TinyQ, caller: Caller, file: Path) -> None:
    options: Any = {"queue": "emails", "priority": 3, "delay": 60, "expires": 600, "key": "k", "timeout": 5, "retry": [1, 2]}
    await q.enqueue("one", "ä", options["queue"], durable=True, **options)
    await q.enqueue("two", "ä", options["queue"], tx=caller.tx, **options)
    await caller.commit()
    names = ", ".join(name for name in tinyq.COLUMNS if name not in ("seq", "id", "task", "lane"))
    first, second = rows(file, names)
    assert first == second


async def test_nothing_is_enqueued_for_an_empty_list(q: TinyQ, caller: Caller) -> None:
    assert await q.enqueue_many([], tx=caller.tx) == []
    assert not caller.tx.in_transaction


async def test_a_committed_job_is_run_by_the_process_that_enqueued_it(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    task = q.task(name="send")(send)
    with connected(file) as db:
        job = await task.options(tx=db).enqueue(7)
        await clock.advance(1)
        assert job.status is State.PENDING
        db.commit()
    waiting = asyncio.create_task(job.result())
    await eventually(waiting.done, clock)
    assert await waiting == 7
    assert str(job.status) == "done"


async def test_a_job_that_was_rolled_back_never_runs(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    ran: list[int] = []

    @q.task(name="send")
    async def task(order: int) -> None:
        ran.append(order)

    with connected(file) as db:
        await task.options(tx=db).enqueue(1)
        db.rollback()
        await task.options(tx=db).enqueue(2)
        db.commit()
    await eventually(lambda: ran, clock)
    await q.drain()
    assert ran == [2]


async def test_a_savepoint_of_the_caller_decides_too(q: TinyQ, file: Path) -> None:
    with connected(file, isolation_level=None) as db:
        db.execute("BEGIN")
        await q.enqueue("send", 1, tx=db)
        db.execute("SAVEPOINT tinyq")  # by the very name that is used inside
        await q.enqueue("send", 2, tx=db)
        db.execute("ROLLBACK TO tinyq")
        await q.enqueue("send", 3, tx=db)
        db.execute("COMMIT")
    assert rows(file) == [("[[1],{}]",), ("[[3],{}]",)]


# keys


async def test_keys_hold_inside_a_transaction(q: TinyQ, caller: Caller, file: Path) -> None:
    first = await q.enqueue("send", 1, tx=caller.tx, key="k")
    again = await q.enqueue("send", 2, tx=caller.tx, key="k")
    assert (again.id, again.created) == (first.id, False)
    replaced = await q.enqueue("send", 3, tx=caller.tx, key="k", on_conflict="replace")
    assert (replaced.id, replaced.created) == (first.id, False)
    await caller.commit()
    assert rows(file) == [("[[3],{}]",)]


async def test_a_conflict_of_keys_takes_only_its_own_call_back(q: TinyQ, caller: Caller, file: Path) -> None:
    await q.enqueue("send", 1, durable=True, key="k")
    await caller.execute("INSERT INTO orders VALUES (7)")
    with pytest.raises(KeyConflict):
        await q.enqueue_many([("other", (1,)), ("send", (2,))], tx=caller.tx, key="k", on_conflict="raise")
    await q.enqueue("send", 3, tx=caller.tx)
    await caller.commit()
    assert rows(file) == [("[[1],{}]",), ("[[3],{}]",)]
    with connected(file) as db:
        assert db.execute("SELECT id FROM orders").fetchall() == [(7,)]


async def test_a_conflict_of_keys_leaves_no_transaction_open_that_was_not(q: TinyQ, caller: Caller) -> None:
    await q.enqueue("send", 1, durable=True, key="k")
    with pytest.raises(KeyConflict):
        await q.enqueue("send", 2, tx=caller.tx, key="k", on_conflict="raise")
    assert not caller.tx.in_transaction


async def test_a_handle_does_not_take_over_what_is_rolled_back(q: TinyQ, caller: Caller) -> None:
    job = await q.enqueue("send", 1, durable=True, key="k")
    before = job.run_at
    await q.enqueue("send", 2, tx=caller.tx, key="k", on_conflict="replace", delay=3600)
    await caller.rollback()
    assert job.run_at == (await q.get(job.id)).run_at == before


async def test_a_replacement_that_is_committed_is_seen_when_read_again(q: TinyQ, caller: Caller) -> None:
    job = await q.enqueue("send", 1, durable=True, key="k")
    before = job.run_at
    await q.enqueue("send", 2, tx=caller.tx, key="k", on_conflict="replace", delay=3600)
    await caller.commit()
    assert (await q.get(job.id)).run_at > before


# connections of many kinds


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("factory", [sqlite3.Row, as_dict, lambda cursor, row: 1 / 0], ids=["Row", "dict", "one that fails"])
async def test_a_row_factory_of_the_caller_is_in_nobodys_way(q: TinyQ, caller: Caller, factory: Any, file: Path) -> None:
    caller.tx.row_factory = factory
    for n in (1, 2):
        await q.enqueue("send", n, tx=caller.tx, key="k", on_conflict="replace")
    assert caller.tx.row_factory is factory
    await caller.commit()
    assert rows(file) == [("[[2],{}]",)]


async def test_a_text_factory_of_the_caller_is_in_nobodys_way(q: TinyQ, caller: Caller, file: Path) -> None:
    caller.tx.text_factory = bytes
    for n in (1, 2):
        job = await q.enqueue("send", n, tx=caller.tx, key="k")
        assert job.task == "send"
    assert caller.tx.text_factory is bytes
    await caller.commit()
    assert rows(file) == [("[[1],{}]",)]


@pytest.mark.parametrize("level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
async def test_every_isolation_level_that_opens_transactions_does_so(q: TinyQ, file: Path, level: Any) -> None:
    with connected(file, isolation_level=level) as db:
        await q.enqueue("send", 1, tx=db)
        assert db.in_transaction
        db.rollback()
        await q.enqueue("send", 2, tx=db)
        db.commit()
    assert rows(file) == [("[[2],{}]",)]


async def test_without_a_transaction_in_autocommit_mode_one_is_told_to_begin(q: TinyQ, file: Path) -> None:
    with connected(file, isolation_level=None) as db:
        with pytest.raises(ValueError, match="BEGIN"):
            await q.enqueue("send", 1, tx=db)
        db.execute("BEGIN")
        await q.enqueue("send", 2, tx=db)
        db.execute("COMMIT")
    assert rows(file) == [("[[2],{}]",)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="connections have no autocommit attribute")
async def test_the_autocommit_attribute_decides_whether_a_transaction_is_open(q: TinyQ, file: Path) -> None:
    with connected(file, autocommit=True) as db:
        with pytest.raises(ValueError, match="BEGIN"):
            await q.enqueue("send", 1, tx=db)
        db.execute("BEGIN")
        await q.enqueue("send", 2, tx=db)
        db.execute("COMMIT")
    with connected(file, autocommit=False) as db:
        await q.enqueue("send", 3, tx=db)
        db.commit()
        await q.enqueue("send", 4, tx=db)
        db.rollback()
    assert rows(file) == [("[[2],{}]",), ("[[3],{}]",)]


async def test_no_setting_of_the_connection_is_changed(q: TinyQ, file: Path) -> None:
    pragmas = ("synchronous", "busy_timeout", "wal_autocheckpoint", "foreign_keys", "query_only", "temp_store")

    def settings(db: sqlite3.Connection) -> list[Any]:
        return [
            db.isolation_level,
            db.row_factory,
            db.text_factory,
            *(db.execute(f"PRAGMA {name}").fetchone() for name in pragmas),
        ]

    with connected(file, timeout=3.5) as db:
        before = settings(db)
        await q.enqueue("send", 1, tx=db, key="k")
        db.commit()
        assert settings(db) == before


async def test_a_sqlite3_connection_is_used_in_the_callers_thread(q: TinyQ, file: Path) -> None:
    threads = set()
    with connected(file) as db:
        db.set_trace_callback(lambda sql: threads.add(threading.get_ident()))
        await q.enqueue("send", 1, tx=db)
    assert threads == {threading.get_ident()}


async def test_an_aiosqlite_connection_is_used_in_its_own_thread(q: TinyQ, file: Path) -> None:
    threads = set()
    async with aiosqlite.connect(file) as db:
        await db.set_trace_callback(lambda sql: threads.add(threading.get_ident()))
        await q.enqueue("send", 1, tx=db)
        await db.rollback()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


# connections that will not do


async def test_a_connection_to_another_file_is_refused_and_both_are_named(q: TinyQ, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with connected(other) as db:
        with pytest.raises(ValueError) as caught:
            await q.enqueue("send", 1, tx=db)
        assert not db.in_transaction
    assert str(other) in str(caught.value)
    assert str(file) in str(caught.value)


async def test_a_connection_to_memory_is_refused(q: TinyQ, file: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("ATTACH ? AS jobs", (str(file),))
        with pytest.raises(ValueError, match="in memory"):
            await q.enqueue("send", 1, tx=db)


async def test_the_same_file_by_another_name_is_the_same_file(q: TinyQ, file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file)
    with connected(tmp_path / "link") as db:
        await q.enqueue("send", 1, tx=db)
        db.commit()
    assert rows(file) == [("[[1],{}]",)]


async def test_a_closed_connection_is_refused(q: TinyQ, caller: Caller) -> None:
    await caller.do("close")
    with pytest.raises(ValueError, match="close"):
        await q.enqueue("send", 1, tx=caller.tx)


async def test_an_aiosqlite_connection_that_was_never_opened_is_refused(q: TinyQ, file: Path) -> None:
    with pytest.raises(ValueError, match="not open"):
        await q.enqueue("send", 1, tx=aiosqlite.connect(file))


async def test_a_connection_of_another_thread_is_refused(q: TinyQ, file: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(sqlite3.connect, file).result()
        with pytest.raises(ValueError, match="check_same_thread=False"):
            await q.enqueue("send", 1, tx=made)
        thread.submit(made.close).result()
    assert rows(file) == []


async def test_a_connection_that_may_be_used_in_any_thread_is_taken(q: TinyQ, file: Path) -> None:
    db = await asyncio.to_thread(sqlite3.connect, file, check_same_thread=False)
    with closing(db):
        await q.enqueue("send", 1, tx=db)
        db.commit()
    assert rows(file) == [("[[1],{}]",)]


async def test_a_connection_that_may_only_read_is_refused(q: TinyQ, file: Path) -> None:
    with connected(Path(f"file:{file}?mode=ro"), uri=True) as db:
        with pytest.raises(StoreError, match="only read"):
            await q.enqueue("send", 1, tx=db)
        assert not db.in_transaction


async def test_a_transaction_that_does_not_see_the_tables_is_refused(open_at: OpenAt, file: Path) -> None:
    with connected(file, isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE orders (id INTEGER)")
        db.execute("BEGIN")
        db.execute("SELECT * FROM orders")
        q = await open_at(file, worker=False)
        with pytest.raises(StoreError, match="does not see tinyq's tables"):
            await q.enqueue("send", 1, tx=db, key="k")
        db.execute("ROLLBACK")
        db.execute("BEGIN")
        await q.enqueue("send", 2, tx=db, key="k")
        db.execute("COMMIT")
    assert rows(file) == [("[[2],{}]",)]


async def test_a_transaction_that_has_read_before_others_wrote_is_told_to_begin_immediately(
    q: TinyQ, caller: Caller, file: Path
) -> None:
    await caller.execute("BEGIN")
    await caller.do("execute_fetchall" if isinstance(caller.tx, aiosqlite.Connection) else "execute", "SELECT * FROM orders")
    if isinstance(caller.tx, sqlite3.Connection):
        caller.tx.execute("SELECT count(*) FROM orders").fetchall()
    await q.enqueue("send", 1, durable=True)
    with pytest.raises(StoreBusy, match="BEGIN IMMEDIATE"):
        await q.enqueue("send", 2, tx=caller.tx)
    await caller.rollback()
    assert rows(file) == [("[[1],{}]",)]


async def test_a_locked_file_is_waited_for_as_long_as_the_connection_says(q: TinyQ, file: Path) -> None:
    with connected(file, isolation_level=None) as other, connected(file, timeout=0.01) as db:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="your connection"):
            await q.enqueue("send", 1, tx=db)
        assert not db.in_transaction
        other.execute("ROLLBACK")
        await q.enqueue("send", 2, tx=db)
        db.commit()
    assert rows(file) == [("[[2],{}]",)]


@pytest.mark.parametrize("value", ["jobs.db", 1, object()], ids=["path", "number", "object"])
async def test_what_is_no_connection_is_refused(q: TinyQ, value: Any) -> None:
    with pytest.raises(TypeError, match=r"tx is .*: give a sqlite3.Connection"):
        await q.enqueue("send", 1, tx=value)


async def test_not_durable_and_in_a_transaction_contradict_each_other(q: TinyQ, caller: Caller) -> None:
    with pytest.raises(ValueError, match="durable"):
        await q.enqueue("send", 1, tx=caller.tx, durable=False)


def test_a_task_has_no_transaction_of_its_own() -> None:
    q: Any = TinyQ()
    with closing(sqlite3.connect(":memory:")) as db:
        with pytest.raises(TypeError, match="one call"):
            q.task(tx=db)
        with pytest.raises(TypeError, match="one call"):
            q.every(60, tx=db)


async def test_without_a_database_there_is_no_transaction_to_join(file: Path) -> None:
    async with TinyQ() as q:
        with connected(file) as db, pytest.raises(tinyq.ConfigurationError, match="database"):
            await q.enqueue("send", 1, tx=db)


async def test_the_limits_of_a_job_hold_in_a_transaction(open_file: Open, file: Path) -> None:
    q = await open_file(worker=False, max_payload=100)
    task: Any = q.task(name="own")(send)
    too_much: list[tuple[type[Exception], Callable[[Any], Any]]] = [
        (PayloadTooLarge, lambda tx: q.enqueue("send", "x" * 200, tx=tx)),
        (PayloadError, lambda tx: q.enqueue("send", object(), tx=tx)),
        (TypeError, lambda tx: task.options(tx=tx).enqueue()),
        (TypeError, lambda tx: q.enqueue(aiosqlite.connect, "not a registered task", tx=tx)),
    ]
    with connected(file) as db:
        for kind, enqueue in too_much:
            with pytest.raises(kind):
                await enqueue(db)
        assert not db.in_transaction


async def test_a_file_that_is_no_longer_there_takes_no_job_in_a_transaction_either(q: TinyQ, file: Path, tmp_path: Path) -> None:
    with connected(file) as db:
        file.rename(tmp_path / "moved")
        with pytest.raises(StoreError, match="deleted or replaced"):
            await q.enqueue("send", 1, tx=db)
        (tmp_path / "moved").rename(file)


async def test_enqueueing_beside_ones_own_transaction_ends_with_advice(
    q: TinyQ, caller: Caller, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.2)
    await caller.execute("INSERT INTO orders VALUES (7)")
    with pytest.raises(StoreBusy, match="if it is your own, commit before you enqueue, or pass it as tx="):
        await q.enqueue("send", 1, durable=True)
    await caller.commit()
    assert rows(file) == []
