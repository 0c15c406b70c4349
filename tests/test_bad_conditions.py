"""A disk that is full, a file that is locked, gone or only readable, a clock that jumps: an error or a bounded wait, one line in
the log, and recovery without a restart."""

import asyncio
import logging
import os
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from helpers import Open, eventually

import tinyq
from tinyq import JobFailed, JobRow, SQLiteStore, State, StoreBusy, StoreError, TinyQ, new_id

SECOND = 1_000_000
NOW = 1_767_268_800 * SECOND  # noon of the first day of 2026

pytestmark = pytest.mark.timeout(300)


def job(payload: str = "[[1],{}]") -> JobRow:
    return JobRow(new_id(NOW), "send", "default", 0, NOW, NOW, payload=payload, durable=True)


def size_of_log(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


def query(file: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file, isolation_level=None, timeout=10)) as db:
        return db.execute(sql, values).fetchall()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def on_owner(q: TinyQ, sql: str) -> None:
    """Run a statement on the connection that writes, in its thread."""
    store: Any = q._engine and q._engine.durable_store
    await store._hop(store._writer, lambda db: db.execute(sql).fetchall())


# conditions that come while tinyq runs, and go


@contextmanager
def a_lock(file: Path) -> Iterator[None]:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


@contextmanager
def a_full_disk(file: Path) -> Iterator[None]:
    """As far as this process is concerned: none of its files may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(size_of_log(file), file.stat().st_size), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def a_moved_file(file: Path) -> Iterator[None]:
    file.rename(file.with_name("elsewhere"))
    yield
    file.with_name("elsewhere").rename(file)


@contextmanager
def a_replaced_file(file: Path) -> Iterator[None]:
    with a_moved_file(file):
        file.write_bytes(b"")
        yield


Condition = Callable[[Path], Any]
CONDITIONS: dict[str, tuple[Condition, type[StoreError], str]] = {
    "locked": (a_lock, StoreBusy, "stayed locked"),
    "disk full": (a_full_disk, StoreError, "disk"),
    "deleted": (a_moved_file, StoreError, "deleted or replaced"),
    "replaced": (a_replaced_file, StoreError, "deleted or replaced"),
}
conditions = pytest.mark.parametrize(("condition", "kind", "says"), CONDITIONS.values(), ids=CONDITIONS)


@conditions
async def test_an_enqueue_raises_and_nothing_is_kept_in_memory_instead(
    open_file: Open, file: Path, monkeypatch: pytest.MonkeyPatch, condition: Condition, kind: type[StoreError], says: str
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.2)
    q = await open_file(worker=False)
    await q.enqueue("send", 1, durable=True)
    with condition(file), pytest.raises(kind, match=says):
        for _ in range(100):  # a full disk may still have room for a few
            await q.enqueue("send", "x" * 10_000, durable=True)
    stored = query(file, "SELECT count(*) FROM tinyq_jobs")
    assert (await q.stats()).count() == stored[0][0]
    await q.enqueue("send", 2, durable=True)
    assert query(file, "SELECT payload FROM tinyq_jobs ORDER BY seq DESC LIMIT 1") == [("[[2],{}]",)]
    assert query(file, "PRAGMA integrity_check") == [("ok",)]


@conditions
async def test_what_runs_goes_on_and_is_settled_later_and_the_next_is_claimed(
    open_file: Open,
    file: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    condition: Condition,
    kind: type[StoreError],
    says: str,
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.02)
    q = await open_file(concurrency=1, lease=600)
    began, go_on, ran = asyncio.Event(), asyncio.Event(), list[int]()

    @q.task(name="send", result_ttl=3600)
    async def send(n: int) -> str:
        ran.append(n)
        began.set()
        await go_on.wait()
        return "x" * 100_000  # more than a file that is full still takes

    first = await q.enqueue(send, 1, durable=True)
    async with asyncio.timeout(20):
        await began.wait()
    second = await q.enqueue(send, 2, durable=True)
    with condition(file):
        go_on.set()
        await eventually(lambda: any("durable outcomes failed and will be tried again" in line for line in told(caplog)), clock)
        for _ in range(50):
            await clock.advance(1)
            await asyncio.sleep(0.002)
        assert first.status is State.RUNNING
        assert ran == [1] or says == "disk"
    for waited in (first, second):
        waiting = asyncio.create_task(waited.result())
        await eventually(waiting.done, clock)
        assert len(await waiting) == 100_000
    assert ran == [1, 2]
    lines = told(caplog)
    assert len(lines) == len(set(lines))
    assert len(lines) <= 5  # one for each loop that could not go on, and for each job that waited


async def test_a_file_that_became_read_only_is_one_incident_and_is_used_again_afterwards(
    open_file: Open, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file()
    ran = list[int]()

    @q.task(name="send")
    async def send(n: int) -> None:
        ran.append(n)

    await on_owner(q, "PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="READONLY"):
        await q.enqueue(send, 1, durable=True)
    query(file, "UPDATE sqlite_sequence SET seq = seq")
    other = SQLiteStore(str(file))
    await other.open()
    await other.insert([job("[[2],{}]")], clock.time())
    await other.close()
    await eventually(lambda: any("durable claims failed" in line for line in told(caplog)), clock)
    for _ in range(50):
        await clock.advance(1)
        await asyncio.sleep(0.002)
    assert sum("durable claims failed" in line for line in told(caplog)) == 1
    await on_owner(q, "PRAGMA query_only = OFF")
    await eventually(lambda: ran == [2], clock)


# what other processes and people do to the file


async def test_a_process_goes_on_after_a_newer_one_has_added_to_the_tables(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SQLiteStore(str(file))
    await old.open()
    await old.insert([job("[[1],{}]")], NOW)
    with monkeypatch.context() as newer:
        addition = ("ALTER TABLE tinyq_jobs ADD COLUMN later TEXT", "CREATE TABLE tinyq_more (name TEXT) STRICT")
        newer.setattr(tinyq, "MIGRATIONS", (*tinyq.MIGRATIONS, addition))
        new = SQLiteStore(str(file))
        await new.open()
        await new.insert([job("[[2],{}]")], NOW)
        await new.close()
    await old.insert([job("[[3],{}]")], NOW)
    room = tinyq.Room(10, {}, 10, 1, {"send": False})
    rows = (await old.claim(room, "w1", NOW + 30 * SECOND, NOW)).rows
    assert [row.payload for row in rows] == ["[[1],{}]", "[[2],{}]", "[[3],{}]"]
    changes = [tinyq.decide(row, tinyq.Outcome("done"), tinyq.Settings(), NOW) for row in rows]
    assert set((await old.settle(changes, NOW)).values()) == {State.DONE}
    await old.close()
    with pytest.raises(StoreError, match="upgrade tinyq"):
        await SQLiteStore(str(file)).open()


@pytest.mark.parametrize(
    "payload",
    ["[[1,{}]", "", "null", '{"a": 1}', "[[NaN],{}]", "[[1]]", "[" * 100_000, b"\xff\xfe".decode("latin-1"), "[[1],[]]"],
    ids=["cut", "empty", "null", "object", "NaN", "no keywords", "deep", "not JSON", "keywords as a list"],
)
async def test_a_payload_that_was_edited_by_hand_is_dead_without_running_and_the_others_go_on(
    open_file: Open, file: Path, clock: FakeClock, payload: str
) -> None:
    q = await open_file(worker=False)
    ran = list[Any]()
    edited, other = await q.enqueue_many([("send", (1,)), ("send", (2,))], durable=True)
    query(file, "UPDATE tinyq_jobs SET payload = ? WHERE payload = '[[1],{}]'", payload)
    await q.stop()
    q = await open_file()

    @q.task(name="send", retry=[1, 1])
    async def send(*args: Any) -> None:
        ran.append(args)

    await eventually(lambda: ran, clock)
    dead = await q.get(edited.id)
    waiting = asyncio.create_task(dead.result())
    await eventually(waiting.done, clock)
    with pytest.raises(JobFailed, match="undecodable"):
        await waiting
    assert ran == [(2,)]
    assert query(file, "SELECT id, state, keep_until FROM tinyq_jobs") == [(tinyq.id_bytes(edited.id), "dead", None)]
    assert other.id != edited.id


# clocks


async def pass_time(workers: Sequence[TinyQ], clock: FakeClock, seconds: int) -> None:
    """No faster than the threads of the stores can follow."""
    for _ in range(seconds):
        await clock.advance(1)
        for q in [*workers] * 4:
            await q.stats()
            await on_owner(q, "SELECT 1")
            await clock.settle()


@pytest.mark.parametrize("seconds", [3600, 86400 * 365, -3600, -86400 * 365])
async def test_no_step_of_the_clock_starts_a_leased_job_again(
    open_file: Open, clock: FakeClock, caplog: pytest.LogCaptureFixture, seconds: float
) -> None:
    starts = list[int]()
    go_on = asyncio.Event()
    workers = [await open_file(lease=30) for _ in range(2)]

    async def send(n: int) -> None:
        starts.append(n)
        await go_on.wait()

    tasks = [q.task(name="send", timeout=86400)(send) for q in workers]
    await tasks[0].options(durable=True).enqueue(1)
    await eventually(lambda: starts, clock)
    clock.step_wall(seconds)
    await pass_time(workers, clock, 60)  # two leases
    clock.step_wall(-seconds)
    await pass_time(workers, clock, 60)
    assert starts == [1]
    assert not any("lost" in line or "reclaimed" in line for line in told(caplog))
    go_on.set()
    draining = asyncio.create_task(workers[0].drain())
    await eventually(draining.done, clock)


# the write-ahead log


async def test_the_log_stays_short_under_continuous_writing_beside_a_reader(file: Path) -> None:
    store = SQLiteStore(str(file), synchronous="normal")
    await store.open()
    ended = threading.Event()
    reads = 0

    def read() -> None:
        nonlocal reads
        with closing(sqlite3.connect(file, isolation_level=None)) as db:
            while not ended.is_set():
                db.execute("BEGIN")
                db.execute("SELECT count(*) FROM tinyq_jobs").fetchone()
                ended.wait(0.01)
                db.execute("COMMIT")
                reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    longest = 0
    try:
        for n in range(20_000):
            await store.insert([job()], NOW)
            if n % 50 == 0:
                longest = max(longest, size_of_log(file))
    finally:
        ended.set()
        reader.join()
    await store.close()
    assert reads > 10
    assert 0 < longest < 4 * tinyq.LOG_BYTES  # of twenty times as much that was written; a busy machine cuts it later


async def test_a_log_that_a_long_reader_has_made_long_is_cut_when_the_reader_is_done(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "LOG_BYTES", 1_000_000)
    store = SQLiteStore(str(file), synchronous="normal")
    await store.open()
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM tinyq_jobs").fetchone()
        while size_of_log(file) < 3_000_000:
            await store.insert([job("x" * 20_000)], NOW)
        reader.execute("COMMIT")
    for _ in range(2_000):
        await store.insert([job()], NOW)
        if size_of_log(file) < 1_000_000:
            break
    else:
        pytest.fail("the log stays long")
    await store.close()


async def test_no_caller_waits_for_the_log_to_be_written_back_inside_its_commit(file: Path) -> None:
    store = SQLiteStore(str(file))
    await store.open()
    writer: Any = store._writer
    assert list(await writer.execute_fetchall("PRAGMA wal_autocheckpoint")) == [(0,)]
    await store.close()


# where the file lies


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/jobs {folder}/on\\040nfs nfs4 rw 0 0
tmpfs {folder}/memory tmpfs rw 0 0
overlay {folder}/layer overlay rw 0 0
/dev/vdb {folder}/layer/volume ext4 rw 0 0
tmpfs {folder}/covered tmpfs rw 0 0
/dev/vdc {folder}/covered ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "words"),
    {
        "on nfs": ("nfs4", "network file system", "local disk"),
        "memory": ("tmpfs", "memory"),
        "layer": ("overlay", "container", "volume"),
        "layer/volume": (),
        "covered": (),
        "memory beside": (),
    }.items(),
)
async def test_an_unfit_file_system_is_warned_about_once_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: str, words: tuple[str, ...]
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(folder=tmp_path))
    monkeypatch.setattr(tinyq, "MOUNTS", str(mounts))
    file = tmp_path / folder / "jobs.db"
    file.parent.mkdir(parents=True)
    async with TinyQ(file, worker=False) as q:
        await q.enqueue("send", 1, durable=True)
    lines = told(caplog)
    assert len(lines) == bool(words)
    assert all(word in lines[0] for word in (*words, str(file)) if words)


async def test_a_system_that_lists_no_mounts_is_not_warned_about(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tinyq, "MOUNTS", str(file.with_name("nothing")))
    async with TinyQ(file, worker=False):
        assert os.path.exists(file)
    assert told(caplog) == []
