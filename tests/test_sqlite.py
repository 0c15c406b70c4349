"""What is true of the SQLite store alone: its file, its locks and the owner of all writes."""

import asyncio
import errno
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import tinyq
from tinyq import JobRow, KeyConflict, Room, Settlement, SQLiteStore, State, StoreBusy, StoreError, Terms, TinyQ, new_id

HERE = Path(__file__).parent
SECOND = 1_000_000
NOW = 1_767_268_800 * SECOND  # noon of the first day of 2026
LEASE = NOW + 30 * SECOND
ROOM = Room(10, {}, 10, 1, {"send": False})
WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER")

pytestmark = pytest.mark.timeout(300)


class Spy:
    """Sees every statement of every connection that a store opens, in the thread that is about to run it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, bool]] = []  # statement, parameters, whether inside a transaction
        self.threads: set[int] = set()
        self.before: Callable[[sqlite3.Connection, str], object] = lambda db, sql: None

    def note(self, db: sqlite3.Connection, sql: str = "", parameters: Any = ()) -> None:
        self.threads.add(threading.get_ident())
        if sql:
            self.seen.append((sql, parameters, db.in_transaction))
            self.before(db, sql)

    def count(self, start: str) -> int:
        return sum(sql.startswith(start) for sql, _, _ in self.seen)

    def hold(self, start: str) -> tuple[threading.Event, threading.Event]:
        """Stop once before a statement that begins like this: (it is there, it may go on)."""
        reached, go_on = threading.Event(), threading.Event()

        def before(db: sqlite3.Connection, sql: str) -> None:
            if sql.startswith(start) and not reached.is_set():
                reached.set()
                assert go_on.wait(20)

        self.before = before
        return reached, go_on


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    watching = Spy()
    base: Any = tinyq.connection_class()

    class Watched(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            watching.note(self)
            super().__init__(*args, **kwargs)

        def execute(self, sql: str, parameters: Any = (), /) -> Any:
            watching.note(self, sql, parameters)
            return super().execute(sql, parameters)

        def executemany(self, sql: str, parameters: Any, /) -> Any:
            parameters = list(parameters)
            if parameters:
                watching.note(self, sql, parameters[0])
            return super().executemany(sql, parameters)

        def close(self) -> None:
            watching.note(self)
            super().close()

    monkeypatch.setattr(tinyq, "connection_class", lambda: Watched)
    return watching


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "jobs.db")


@asynccontextmanager
async def opened(path: str, **options: Any) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(path, **options)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(path: str) -> AsyncIterator[SQLiteStore]:
    async with opened(path) as made:
        yield made


@pytest.fixture
async def watched(spy: Spy, store: SQLiteStore) -> SQLiteStore:
    """A store whose statements the spy sees, from after it was opened."""
    spy.seen.clear()
    return store


@pytest.fixture
def other(path: str) -> Iterator[sqlite3.Connection]:
    """Somebody else's connection to the same file, which does not wait for locks."""
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        yield connection


def job(task: str = "send", **fields: Any) -> JobRow:
    row = JobRow(new_id(NOW), task, "default", 0, NOW, NOW, payload="[[],{}]", durable=True)
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def outcome(row: JobRow, state: State = State.DONE, **changes: Any) -> Settlement:
    fields: dict[str, Any] = {name: getattr(row, name, None) for name in Settlement.__annotations__}
    return Settlement(**(fields | {"state": state, "keep": False} | changes))


async def claim(store: SQLiteStore, now: int = NOW) -> list[JobRow]:
    return list((await store.claim(ROOM, "w1", now + 30 * SECOND, now)).rows)


async def is_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


async def free_to_write(other: sqlite3.Connection) -> None:
    """Return as soon as another connection gets the write lock, which it never does while somebody's transaction is open."""
    async with asyncio.timeout(30):
        while True:
            try:
                other.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError:
                await asyncio.sleep(0.001)
    other.execute("ROLLBACK")


@contextmanager
def locked(other: sqlite3.Connection) -> Iterator[None]:
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")


# the schema


async def test_every_table_is_strict_and_bears_the_prefix(store: SQLiteStore, other: sqlite3.Connection) -> None:
    tables = [row for row in other.execute("PRAGMA table_list") if row[2] == "table" and not row[1].startswith("sqlite_")]
    assert len(tables) >= 3
    for _, name, _, _, _, strict in tables:
        assert name.startswith("tinyq_")
        assert strict == 1, name


MOMENTS = ("run_at", "created", "expires", "fire_time", "parked", "lease", "started", "finished", "cancel_at", "keep_until")


@pytest.mark.parametrize("column", MOMENTS)
@pytest.mark.parametrize("value", ["2026-03-29T01:00:00+00:00", 1774746000.5, b"\x01"])
async def test_a_moment_that_is_not_an_integer_cannot_be_written(
    store: SQLiteStore, other: sqlite3.Connection, column: str, value: object
) -> None:
    await store.insert([job()], NOW)
    with pytest.raises(sqlite3.IntegrityError, match=column):
        other.execute(f"UPDATE tinyq_jobs SET {column} = ?", (value,))


async def test_every_moment_of_a_life_is_stored_as_an_integer(store: SQLiteStore, other: sqlite3.Connection) -> None:
    await store.insert([job(expires=LEASE), job(schedule="tick", fire_time=NOW), job(run_at=NOW + 1), job()], NOW)
    rows = await claim(store)
    await store.cancel([rows[0].id], "why", LEASE, NOW)
    changes = [outcome(rows[1], State.DEAD, keep=True, keep_until=LEASE), outcome(rows[2], State.PENDING, keep=True, parked=NOW)]
    await store.settle(changes, NOW)
    for column in MOMENTS:
        kinds = {kind for (kind,) in other.execute(f"SELECT DISTINCT typeof({column}) FROM tinyq_jobs")}
        assert kinds - {"null"} == {"integer"}, column
    assert other.execute("SELECT typeof(last_fire) FROM tinyq_schedules").fetchall() == [("integer",)]


async def test_moments_sort_by_time_whatever_their_zone(store: SQLiteStore) -> None:
    texts = ["2026-03-29T01:00:00+00:00", "2026-03-29T02:30:00+02:00", "2026-03-28T20:00:00-05:30", "2026-03-29T03:15:00+02:00"]
    moments = [tinyq.as_moment(datetime.fromisoformat(text), "run_at") for text in texts]
    await store.insert([job(run_at=moment) for moment in moments], NOW)
    assert [moments.index(row.run_at) for row in await claim(store, max(moments))] == [1, 0, 3, 2]


async def test_an_id_is_sixteen_bytes_and_unique(store: SQLiteStore) -> None:
    row = job()
    await store.insert([row], NOW)
    for wrong in (job(id=row.id), job(id=b"short")):
        with pytest.raises(StoreError):
            await store.insert([wrong], NOW)


async def test_a_sequence_number_is_not_reused_by_another_process_either(path: str, other: sqlite3.Connection) -> None:
    seqs = []
    for _ in range(3):
        async with opened(path) as store:
            await store.insert([job()], NOW)
            [row] = await claim(store)
            await store.settle([outcome(row)], NOW)
            seqs.append(row.seq)
        assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,)
    assert seqs == sorted(set(seqs))


@pytest.mark.parametrize("change", ["state = 'lost'", "ready = NULL", "state = 'done'", "id = x'00'"])
async def test_a_row_that_makes_no_sense_cannot_be_written(store: SQLiteStore, other: sqlite3.Connection, change: str) -> None:
    await store.insert([job()], NOW)
    with pytest.raises(sqlite3.IntegrityError):
        other.execute(f"UPDATE tinyq_jobs SET {change}")


# opening


async def test_the_file_is_in_wal_mode(store: SQLiteStore, other: sqlite3.Connection) -> None:
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


async def test_a_file_that_stays_in_another_journal_mode_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = tinyq.connection_class()

    class Stubborn(base):  # type: ignore[misc]
        def execute(self, sql: str, parameters: Any = (), /) -> Any:
            return super().execute("PRAGMA journal_mode" if "journal_mode" in sql else sql, parameters)

    monkeypatch.setattr(tinyq, "connection_class", lambda: Stubborn)
    await refuses(path, "WAL")


class Disk:
    """Sees how the write-ahead log is brought to the disk, and may make that take long or fail."""

    def __init__(self, path: str) -> None:
        self.log = f"{path}-wal"
        self.syncs = 0
        self.error: OSError | None = None
        self.halted, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def sync(self, descriptor: int) -> None:
        assert os.path.samestat(os.fstat(descriptor), os.stat(self.log))
        self.syncs += 1
        self.halted.set()
        assert self.go_on.wait(20)
        if self.error is not None:
            raise self.error

    async def halts(self) -> None:
        assert await asyncio.to_thread(self.halted.wait, 20)


@pytest.fixture
def disk(path: str, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(path)
    monkeypatch.setattr(os, "fdatasync" if hasattr(os, "fdatasync") else "fsync", disk.sync)
    return disk


@pytest.mark.parametrize(("option", "syncs"), [("full", 1), ("normal", 0)])
async def test_writes_are_as_synchronous_as_asked_for(path: str, disk: Disk, option: str, syncs: int) -> None:
    async with opened(path, synchronous=option) as store:
        await store.insert([job()], NOW)
        assert disk.syncs == syncs


async def test_an_insertion_is_answered_when_it_is_on_the_disk(path: str, disk: Disk, other: sqlite3.Connection) -> None:
    disk.go_on.clear()
    async with opened(path) as store:
        inserting = asyncio.create_task(store.insert([job()], NOW))
        await disk.halts()
        assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (1,)  # others see it
        for _ in range(5):
            await asyncio.sleep(0)
        assert not inserting.done()
        disk.go_on.set()
        await inserting


async def test_only_claims_and_renewals_need_not_wait_for_the_disk(path: str, disk: Disk) -> None:
    syncs: list[int] = []
    async with opened(path) as store:
        await store.insert([job(), job()], NOW)
        syncs.append(disk.syncs)
        claimed = await store.claim(Room(2, {}, 2, 1, {"send": False}), "w1", LEASE, NOW)
        syncs.append(disk.syncs)
        await store.extend([(row.seq, row.claim_no, None) for row in claimed.rows], LEASE + 1)
        syncs.append(disk.syncs)
        await store.requeue([row.id for row in claimed.rows], NOW)
        syncs.append(disk.syncs)
    assert len(claimed.rows) == 2
    assert syncs == [1, 1, 1, 2]


async def test_a_claim_is_answered_while_others_of_its_unit_wait_for_the_disk(path: str, disk: Disk) -> None:
    disk.go_on.clear()
    async with opened(path) as store:
        inserting = asyncio.create_task(store.insert([job()], NOW))
        claimed = await store.claim(Room(2, {}, 2, 1, {"send": False}), "w1", LEASE, NOW)
        await disk.halts()
        assert len(claimed.rows) == 1
        assert not inserting.done()
        disk.go_on.set()
        await inserting


async def test_what_cannot_be_brought_to_the_disk_is_an_error_for_who_wrote_it_and_one_line_in_the_log(
    path: str, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.error = OSError(errno.EIO, "Input/output error")
    async with opened(path) as store:
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be brought to the disk, so a power cut may undo what was just written"):
                await store.insert([job()], NOW)
        disk.error = None
        await store.insert([job()], NOW)
        assert len(await store.list(State.PENDING)) == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_claim_is_never_answered_before_what_set_its_jobs_free(path: str, disk: Disk) -> None:
    answered: list[str] = []
    async with opened(path) as store:
        await store.insert([row := job()], NOW)
        [claimed] = (await store.claim(ROOM, "w1", LEASE, NOW)).rows
        retry = outcome(claimed, State.PENDING, run_at=NOW, keep=True)
        dead = outcome(claimed, State.DEAD, claim_no=claimed.claim_no + 1, keep=True, keep_until=LEASE)

        async def note(name: str, call: Awaitable[Any]) -> Any:
            answer = await call
            answered.append(name)
            return answer

        def claim() -> Awaitable[Any]:
            return note("claim", store.claim(ROOM, "w1", LEASE, NOW))

        _, again = await asyncio.gather(note("retry", store.settle([retry], NOW)), claim())
        await store.settle([dead], NOW)
        _, requeued = await asyncio.gather(note("requeue", store.requeue([row.id], NOW)), claim())
    assert [len(found.rows) for found in (again, requeued)] == [1, 1]
    assert answered == ["retry", "claim", "requeue", "claim"]


async def test_no_connection_leaves_waiting_to_sqlite(path: str, spy: Spy) -> None:
    waits = set()
    spy.before = lambda db, sql: waits.add(sqlite3.Connection.execute(db, "PRAGMA busy_timeout").fetchone()[0])
    async with opened(path) as store:
        await store.insert([job()], NOW)
        await store.list(State.PENDING)
    assert waits == {0}


async def test_opening_a_file_again_finds_its_jobs(path: str) -> None:
    row = job()
    async with opened(path) as store:
        await store.insert([row], NOW)
    for _ in range(2):
        async with opened(path) as store:
            assert [found.id for found in await store.list(State.PENDING)] == [row.id]


async def test_the_tables_may_live_in_the_applications_own_file(path: str, other: sqlite3.Connection) -> None:
    other.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    other.execute("INSERT INTO orders VALUES (7, 'teapot')")
    other.execute("PRAGMA user_version = 41")
    other.execute("PRAGMA application_id = 42")
    async with opened(path) as store:
        await store.insert([job()], NOW)
        other.execute("INSERT INTO orders VALUES (8, 'cup')")
        [row] = await claim(store)
        await store.settle([outcome(row)], NOW)
    assert other.execute("SELECT * FROM orders").fetchall() == [(7, "teapot"), (8, "cup")]
    assert other.execute("PRAGMA user_version").fetchone() == (41,)
    assert other.execute("PRAGMA application_id").fetchone() == (42,)
    names = [name for (name,) in other.execute("SELECT name FROM sqlite_schema") if not name.startswith("sqlite_")]
    assert [name for name in names if not name.startswith("tinyq_")] == ["orders"]


async def test_namespaces_in_one_file_do_not_see_each_other(path: str) -> None:
    async with opened(path, namespace="one") as one, opened(path, namespace="two") as two:
        mine, theirs = job(key="k"), job(key="k")
        for store, row in ((one, mine), (two, theirs)):
            answers = await store.insert([row, job(schedule="s", fire_time=NOW)], NOW)
            assert [answer.verdict for answer in answers] == ["created", "created"]
        assert await one.get([theirs.id]) == []
        assert await one.cancel([theirs.id], "why", None, NOW) == {}
        assert [count.count for count in await one.counts(NOW)] == [2]
        assert {row.namespace for row in await claim(one)} == {"one"}
        assert len(await two.list(State.PENDING)) == 2
        assert await two.list(State.RUNNING, lease_before=LEASE + 1) == []
        assert {row.namespace for row in await claim(two)} == {"two"}


async def test_namespaces_whose_lanes_have_the_same_numbers_do_not_hold_up_each_other(path: str) -> None:
    names = "svc173", "svc374"
    assert len({tinyq.lane_range(name)["first"] for name in names}) == 1
    async with opened(path, namespace=names[0]) as one, opened(path, namespace=names[1]) as two:
        theirs, mine = ([job(), job(run_at=NOW + 1)] for _ in names)
        await two.insert(theirs, NOW)
        await one.insert(mine, NOW)
        assert [row.id for row in await claim(one, now=NOW + 1)] == [row.id for row in mine]
        assert [row.id for row in await claim(two, now=NOW + 1)] == [row.id for row in theirs]


# opening what cannot be opened


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "asyncio" not in thread.name}


async def ended_since(before: set[threading.Thread]) -> None:
    """Return when no thread is alive that was not there before."""
    for thread in threads() - before:
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()


async def refuses(path: str, *words: str) -> None:
    """Opening raises one sentence that holds the path and these words, and leaves no thread behind."""
    before = threads()
    with pytest.raises(StoreError) as caught:
        async with opened(path):
            pass
    message = str(caught.value)
    assert path in message
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    await ended_since(before)


async def test_a_newer_schema_is_refused(path: str) -> None:
    async with opened(path) as store:
        await store.insert([job()], NOW)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE tinyq_meta SET value = 99 WHERE name = 'schema'")
    await refuses(path, "99", "upgrade tinyq")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (1,)
        assert db.execute("SELECT value FROM tinyq_meta").fetchone() == (99,)


@pytest.mark.parametrize("content", [b"order,item\n", b"\x00" * 5_000, b"not a database " * 1_000])
def test_a_file_that_is_not_a_database_is_refused_and_left_as_it_is(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    asyncio.run(refuses(path, "not an SQLite database"))
    assert Path(path).read_bytes() == content


async def test_a_folder_is_refused(tmp_path: Path) -> None:
    await refuses(str(tmp_path), "folder")


async def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    await refuses(str(tmp_path / "missing" / "jobs.db"), "folder")
    assert not (tmp_path / "missing").exists()


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, and no right to write to it but by its mode, which root would not have to mind."""
    with tempfile.TemporaryDirectory() as name:
        folder, me = Path(name), os.geteuid()
        if me == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(me)
            folder.chmod(0o700)


async def test_a_folder_that_may_not_be_written_is_refused(unprivileged: Path) -> None:
    os.chmod(unprivileged, 0o500)
    await refuses(str(unprivileged / "jobs.db"), "folder", "written")


async def test_a_file_that_may_not_be_written_is_refused(unprivileged: Path) -> None:
    path = unprivileged / "jobs.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE orders (id INTEGER)")
    os.chmod(path, 0o400)
    await refuses(str(path), "writable")


async def test_a_database_of_tinyq_that_may_not_be_written_takes_no_job(unprivileged: Path) -> None:
    path = unprivileged / "jobs.db"
    async with opened(str(path)):
        pass
    os.chmod(path, 0o400)
    with pytest.raises(StoreError, match="writable"):
        async with opened(str(path)) as store:
            await store.insert([job()], NOW)


# two that open at once


async def test_a_schema_that_appears_while_waiting_for_the_lock_is_not_made_again(path: str, spy: Spy) -> None:
    rounds: list[str] = []

    def overtake(db: sqlite3.Connection, sql: str) -> None:
        if sql == "BEGIN IMMEDIATE" and not rounds:
            rounds.append(sql)
            with closing(sqlite3.connect(path, isolation_level=None)) as faster:
                tinyq.prepare(faster, path, "full")

    spy.before = overtake
    async with opened(path) as store:
        assert rounds == ["BEGIN IMMEDIATE"]
        await store.insert([job()], NOW)
        assert len(await store.list(State.PENDING)) == 1


def test_processes_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "workers" / "opener.py")]
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env) for _ in range(2)
    ]
    try:
        for i in range(40):
            path = tmp_path / f"{i}.db"
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{path}\n")
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ok\n"
            with closing(sqlite3.connect(path)) as db:
                assert db.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (2,)
                assert db.execute("SELECT name, value FROM tinyq_meta").fetchall() == [("schema", len(tinyq.MIGRATIONS))]
    finally:
        for process in processes:
            process.communicate()


async def test_opening_waits_while_somebody_else_writes(path: str, other: sqlite3.Connection) -> None:
    store = SQLiteStore(path)
    other.execute("CREATE TABLE orders (id INTEGER)")
    with locked(other):
        opening = asyncio.create_task(store.open())
        await asyncio.sleep(0.05)
        assert not opening.done()
    async with asyncio.timeout(30):
        await opening
    await store.close()


async def test_opening_waits_whichever_of_its_statements_meets_a_lock(path: str, spy: Spy) -> None:
    refused: set[str] = set()

    def refuse_once(db: sqlite3.Connection, sql: str) -> None:
        """As SQLite does while another process, just as new here, sets up or recovers the WAL."""
        if sql not in refused and not db.in_transaction and "query_only" not in sql:  # which does not look at the file
            refused.add(sql)
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode, error.sqlite_errorname = 261, "SQLITE_BUSY_RECOVERY"
            raise error

    spy.before = refuse_once
    async with opened(path) as store:
        await store.insert([job()], NOW)
        assert len(await store.list(State.PENDING)) == 1
    assert len(refused) >= 4


async def test_opening_gives_up_on_a_lock_that_stays(
    path: str, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.1)
    other.execute("CREATE TABLE orders (id INTEGER)")
    before = threads()
    with locked(other), pytest.raises(StoreBusy, match="locked"):
        async with opened(path):
            pass
    await ended_since(before)


# the owner: units


async def test_concurrent_writes_share_few_transactions(watched: SQLiteStore, spy: Spy) -> None:
    rows = [job() for _ in range(300)]
    await asyncio.gather(*(watched.insert([row], NOW) for row in rows))
    assert len(await watched.get([row.id for row in rows])) == 300
    assert 1 <= spy.count("BEGIN") <= 5
    assert spy.count("COMMIT") == spy.count("BEGIN")


async def test_writes_that_come_during_a_unit_go_into_the_next_one(watched: SQLiteStore, spy: Spy) -> None:
    reached, go_on = spy.hold("COMMIT")
    first = asyncio.create_task(watched.insert([job()], NOW))
    await is_set(reached)
    rest = [asyncio.create_task(watched.insert([job()], NOW)) for _ in range(100)]
    go_on.set()
    await asyncio.gather(first, *rest)
    assert spy.count("BEGIN") == 2


async def test_a_caller_is_answered_after_the_commit(watched: SQLiteStore, spy: Spy, other: sqlite3.Connection) -> None:
    reached, go_on = spy.hold("COMMIT")
    inserting = asyncio.create_task(watched.insert([job()], NOW))
    await is_set(reached)
    done, _ = await asyncio.wait({inserting}, timeout=0.05)
    assert not done
    assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,)
    go_on.set()
    await inserting
    assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (1,)


async def test_a_refused_operation_does_not_harm_the_others_of_its_unit(watched: SQLiteStore, spy: Spy) -> None:
    taken = job(key="k")
    await watched.insert([taken], NOW)
    good = [job() for _ in range(10)]
    conflict = [job(), job(key="k", on_conflict="raise"), job()]
    broken = [job(), job(id=taken.id)]
    answers = await asyncio.gather(
        *(watched.insert([row], NOW) for row in good[:5]),
        watched.insert(conflict, NOW),
        watched.insert(broken, NOW),
        *(watched.insert([row], NOW) for row in good[5:]),
        return_exceptions=True,
    )
    assert [type(answer) for answer in answers if isinstance(answer, BaseException)] == [KeyConflict, StoreError]
    stored = {row.id for row in await watched.list(State.PENDING)}
    assert stored == {taken.id} | {row.id for row in good}


async def test_a_unit_that_fails_in_the_middle_leaves_nothing(watched: SQLiteStore, spy: Spy, other: sqlite3.Connection) -> None:
    def full(db: sqlite3.Connection, sql: str) -> None:
        pages = sqlite3.Connection.execute(db, "PRAGMA page_count").fetchone()[0]
        sqlite3.Connection.execute(db, f"PRAGMA max_page_count = {pages + 3}")

    spy.before = full
    rows = [job(), job(payload="x" * 1_000_000), job()]
    with pytest.raises(StoreError, match="disk is full"):
        await watched.insert(rows, NOW)
    assert await watched.get([row.id for row in rows]) == []
    await free_to_write(other)
    small = job()
    await watched.insert([small], NOW)
    assert [row.id for row in await watched.list(State.PENDING)] == [small.id]


async def all_verbs(store: SQLiteStore) -> None:
    """Every verb in every way that has statements of its own."""
    rows = [job(), job(key="a"), job(key="b"), job(key="c"), job(schedule="tick", fire_time=NOW), job(), job(run_at=NOW + SECOND)]
    await store.insert(rows, NOW)
    await store.insert([job(key="b", on_conflict="replace", priority=-1), job(schedule="tick", fire_time=NOW + 1)], NOW)
    await store.insert([job(schedule="tick", fire_time=NOW)], NOW)
    taken = await claim(store)
    await store.insert([job(key=key, on_conflict="queue") for key in "abc"], NOW)
    await store.extend([(row.seq, row.claim_no, None) for row in taken], LEASE)
    keyed = {row.key: row for row in taken}
    settlements = [
        outcome(keyed["a"]),
        outcome(keyed["b"], State.PENDING, keep=True, run_at=NOW),
        outcome(taken[0], State.DEAD, keep=True, keep_until=LEASE),
        outcome(taken[-1], State.PENDING, keep=True, lost=1) if taken[-1].key is None else outcome(taken[-2], keep=True),
    ]
    await store.settle(settlements, NOW)
    await store.list(State.RUNNING, lease_before=LEASE + SECOND)
    await store.reclaim([outcome(keyed["c"], State.PENDING, keep=True, lost=1)], LEASE + SECOND)
    await store.cancel([row.id for row in rows], "why", LEASE, NOW)
    await store.requeue([row.id for row in rows], NOW)
    await claim(store, NOW + SECOND)
    await store.get([row.id for row in rows])
    await store.list(State.DEAD)
    await store.counts(NOW)
    await store.prune(LEASE + SECOND)


async def test_whatever_may_write_begins_immediately(watched: SQLiteStore, spy: Spy) -> None:
    await all_verbs(watched)
    assert {sql for sql, _, _ in spy.seen if sql.startswith("BEGIN")} == {"BEGIN IMMEDIATE"}
    writing = [(sql, inside) for sql, _, inside in spy.seen if sql.lstrip().startswith(WRITES)]
    assert len(writing) > 10
    assert [sql for sql, inside in writing if not inside] == []


async def test_a_write_between_looking_and_claiming_is_no_error(
    watched: SQLiteStore, spy: Spy, other: sqlite3.Connection
) -> None:
    other.execute("CREATE TABLE orders (id INTEGER)")
    await watched.insert([job()], NOW)
    with closing(sqlite3.connect(watched.path, isolation_level=None, check_same_thread=False)) as writer:

        def write(db: sqlite3.Connection, sql: str) -> None:
            if sql == "BEGIN IMMEDIATE":
                writer.execute("INSERT INTO orders VALUES (1)")

        spy.before = write
        assert len(await claim(watched)) == 1
    assert other.execute("SELECT count(*) FROM orders").fetchone() == (1,)


async def test_somebody_elses_open_reader_is_in_nobodys_way(store: SQLiteStore, other: sqlite3.Connection) -> None:
    await store.insert([job()], NOW)
    other.execute("BEGIN")
    assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (1,)
    await store.insert([job()], NOW)
    rows = await claim(store)
    await store.settle([outcome(row) for row in rows], NOW)
    assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (1,)
    with pytest.raises(sqlite3.OperationalError, match="locked"):  # which is why tinyq never begins like this
        other.execute("DELETE FROM tinyq_jobs")
    other.execute("ROLLBACK")
    assert other.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,)


async def test_no_call_to_sqlite_runs_on_the_event_loops_thread(path: str, spy: Spy) -> None:
    async with opened(path) as store:
        await all_verbs(store)
    assert spy.threads
    assert threading.get_ident() not in spy.threads


# the owner: locks


async def test_a_write_waits_for_the_lock(store: SQLiteStore, other: sqlite3.Connection) -> None:
    row = job()
    with locked(other):
        inserting = asyncio.create_task(store.insert([row], NOW))
        await asyncio.sleep(0.05)
        assert not inserting.done()
    async with asyncio.timeout(30):
        await inserting
    assert len(await store.get([row.id])) == 1


async def test_a_write_that_waited_too_long_is_refused_and_never_stored(
    store: SQLiteStore, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 0.1)
    refused, stored = job(), job()
    with locked(other), pytest.raises(StoreBusy, match="commit before you enqueue"):
        await store.insert([refused], NOW)
    await store.insert([stored], NOW)
    assert [row.id for row in await store.list(State.PENDING)] == [stored.id]


async def test_a_claim_gives_up_sooner_than_the_writes_beside_it(
    store: SQLiteStore, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "PATIENCE", 1000)
    monkeypatch.setattr(tinyq, "CLAIM_PATIENCE", 0.05)
    await store.insert([job()], NOW)
    row = job()
    with locked(other):
        inserting = asyncio.create_task(store.insert([row], NOW))
        with pytest.raises(StoreBusy):
            async with asyncio.timeout(30):
                await claim(store)
        assert not inserting.done()
    await inserting
    assert len(await claim(store)) == 2


async def test_a_claim_of_nothing_needs_no_lock(store: SQLiteStore, other: sqlite3.Connection) -> None:
    await store.insert([job(run_at=NOW + SECOND), job("stranger")], NOW)
    with locked(other):
        claimed = await store.claim(ROOM, "w1", LEASE, NOW)
    assert (list(claimed.rows), claimed.next_at) == ([], NOW + SECOND)


async def test_reading_needs_no_lock(store: SQLiteStore, other: sqlite3.Connection) -> None:
    row = job()
    await store.insert([row], NOW)
    with locked(other):
        assert len(await store.get([row.id])) == 1
        assert len(await store.list(State.PENDING)) == 1
        assert [count.count for count in await store.counts(NOW)] == [1]


async def test_reading_goes_on_while_a_unit_is_written(watched: SQLiteStore, spy: Spy) -> None:
    reached, go_on = spy.hold("COMMIT")
    inserting = asyncio.create_task(watched.insert([job()], NOW))
    await is_set(reached)
    async with asyncio.timeout(30):
        assert await watched.list(State.PENDING) == []
    go_on.set()
    await inserting
    assert len(await watched.list(State.PENDING)) == 1


# the owner: callers that are cancelled

TICKS = 25


async def cancelled_after(call: Any, ticks: int) -> bool:
    """Cancel a call after so many turns of the loop; whether it had not ended by then."""
    task: asyncio.Future[Any] = asyncio.ensure_future(call)
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    return task.cancelled()


@pytest.mark.parametrize("release", ["before", "after"])
async def test_a_cancelled_insert_is_wholly_there_or_wholly_absent(
    store: SQLiteStore, other: sqlite3.Connection, release: str
) -> None:
    for ticks in range(TICKS):
        rows = [job(), job(key=f"k{ticks}"), job(schedule=f"s{ticks}", fire_time=NOW), job()]
        other.execute("BEGIN IMMEDIATE")
        inserting = asyncio.ensure_future(store.insert(rows, NOW))
        if release == "before":
            await asyncio.sleep(0)
            other.execute("ROLLBACK")
        cancelled = await cancelled_after(inserting, ticks)
        if release == "after":
            assert cancelled
            other.execute("ROLLBACK")
        await free_to_write(other)
        await store.insert([job()], NOW)  # what was under way has ended
        await free_to_write(other)
        assert len(await store.get([row.id for row in rows])) in ((0, 4) if cancelled else (4,))
        recorded = other.execute("SELECT count(*) FROM tinyq_schedules WHERE name = ?", (f"s{ticks}",)).fetchone()[0]
        assert recorded == (len(await store.get([rows[0].id])) == 1)


async def test_a_cancelled_claim_has_taken_all_or_nothing(store: SQLiteStore, other: sqlite3.Connection) -> None:
    for ticks in range(TICKS):
        rows = [job(), job(), job()]
        await store.insert(rows, NOW)
        with locked(other):
            assert await cancelled_after(store.claim(ROOM, "w1", LEASE, NOW), ticks)
        await free_to_write(other)
        await store.insert([job(run_at=LEASE)], NOW)
        await free_to_write(other)
        states = {(row.state, row.attempts, row.claim_no, row.lease) for row in await store.get([row.id for row in rows])}
        assert states in ({(State.PENDING, 0, 0, None)}, {(State.RUNNING, 1, 1, LEASE)})
        await claim(store)


async def test_a_cancelled_outcome_is_written_or_not(store: SQLiteStore, other: sqlite3.Connection) -> None:
    for ticks in range(TICKS):
        await store.insert([job(), job(key="k"), job()], NOW)
        rows = await claim(store)
        with locked(other):
            assert await cancelled_after(store.settle([outcome(row) for row in rows], NOW), ticks)
        await free_to_write(other)
        await store.insert([job(run_at=LEASE)], NOW)
        await free_to_write(other)
        left = await store.get([row.id for row in rows])
        assert len(left) in (0, 3)
        await store.settle([outcome(row) for row in left], NOW)


@pytest.mark.parametrize("moment", ["BEGIN IMMEDIATE", "INSERT", "COMMIT"])
async def test_a_unit_that_has_begun_is_committed_though_its_callers_are_gone(
    watched: SQLiteStore, spy: Spy, other: sqlite3.Connection, moment: str
) -> None:
    reached, go_on = spy.hold(moment)
    rows = [job(), job(key="k"), job()]
    inserting = asyncio.create_task(watched.insert(rows, NOW))
    await is_set(reached)
    inserting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await inserting
    go_on.set()
    await free_to_write(other)
    await watched.insert([job()], NOW)
    assert len(await watched.get([row.id for row in rows])) == 3
    await free_to_write(other)


async def test_a_cancelled_caller_takes_nobody_along(watched: SQLiteStore, spy: Spy) -> None:
    reached, go_on = spy.hold("COMMIT")
    first = asyncio.create_task(watched.insert([job()], NOW))
    await is_set(reached)
    rows = [job() for _ in range(9)]
    inserting = [asyncio.create_task(watched.insert([row], NOW)) for row in rows]
    await asyncio.sleep(0)
    for task in inserting[::3]:
        task.cancel()
    go_on.set()
    await asyncio.wait({first, *inserting})
    kept = [row.id for row, task in zip(rows, inserting, strict=True) if not task.cancelled()]
    assert len(kept) == 6
    assert [row.id for row in await watched.get([row.id for row in rows])] == kept


async def test_an_enqueue_cancelled_at_any_turn_leaves_the_file_usable(path: str, other: sqlite3.Connection) -> None:
    async with TinyQ(path, worker=False) as q:
        ended = []
        for ticks in range(TICKS):
            with locked(other):
                ended.append(not await cancelled_after(q.enqueue("send", ticks, durable=True), ticks))
            await free_to_write(other)
            async with asyncio.timeout(30):
                await q.enqueue("marker", durable=True)
        assert not any(ended)
        write = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=10).execute('CREATE TABLE mine (id)')"
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", write, path)
        assert await writer.wait() == 0
    stored = [payload for (payload,) in other.execute("SELECT payload FROM tinyq_jobs WHERE task = 'send'")]
    assert len(stored) == len(set(stored))
    assert other.execute("SELECT count(*) FROM tinyq_jobs WHERE task = 'marker'").fetchone() == (TICKS,)


async def test_a_cancelled_read_leaves_no_transaction(store: SQLiteStore, other: sqlite3.Connection) -> None:
    await store.insert([job() for _ in range(200)], NOW)
    for ticks in range(TICKS):
        await cancelled_after(store.list(State.PENDING, limit=200), ticks)
    assert len(await store.list(State.PENDING, limit=200)) == 200
    assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0  # an open reader would keep it from that


# the owner: the end


async def test_close_finishes_what_was_accepted(path: str) -> None:
    rows = [job() for _ in range(50)]
    async with opened(path) as store:
        inserting = [asyncio.create_task(store.insert([row], NOW)) for row in rows]
        await asyncio.sleep(0)
    await asyncio.gather(*inserting)
    async with opened(path) as store:
        assert len(await store.get([row.id for row in rows])) == 50


async def test_close_ends_the_threads_and_lets_go_of_the_file(path: str) -> None:
    before = threads()
    async with opened(path) as store:
        await store.insert([job()], NOW)
        await store.list(State.PENDING)
        assert threads() - before
    await ended_since(before)
    assert [file.name for file in Path(path).parent.iterdir()] == ["jobs.db"]  # the last one out checkpoints the WAL


async def test_close_may_be_called_again_and_by_several(path: str) -> None:
    await SQLiteStore(path).close()
    async with opened(path) as store:
        inserting = asyncio.create_task(store.insert([job()], NOW))
        await asyncio.sleep(0)
        await asyncio.gather(store.close(), store.close())
        await store.close()
    await inserting


async def test_a_closed_store_says_so(path: str) -> None:
    async with opened(path) as store:
        pass
    for call in (store.insert([job()], NOW), store.claim(ROOM, "w1", LEASE, NOW), store.get([new_id(NOW)]), store.counts(NOW)):
        with pytest.raises(StoreError, match="closed"):
            await call


async def test_whoever_comes_while_the_store_closes_is_served_or_told(path: str) -> None:
    async with opened(path) as store:
        await store.insert([job()], NOW)
        ending = asyncio.create_task(store.close())
        calls = []
        while not ending.done():
            calls.append(asyncio.create_task(store.insert([job()], NOW)))
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    assert [error for error in errors if not isinstance(error, StoreError)] == []
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (1 + len(answers) - len(errors),)


async def test_an_error_of_the_driver_reaches_the_caller_as_one_of_tinyq(
    path: str, store: SQLiteStore, other: sqlite3.Connection
) -> None:
    other.execute("DROP TABLE tinyq_jobs")
    for call in (store.insert([job()], NOW), store.claim(ROOM, "w1", LEASE, NOW), store.list(State.PENDING)):
        with pytest.raises(StoreError, match="tinyq_jobs") as caught:
            await call
        assert path in str(caught.value)


# plans


def plan(db: sqlite3.Connection, sql: str, parameters: Any) -> list[str]:
    return [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]


async def fill(store: SQLiteStore) -> None:
    rows = [job(queue=f"q{i % 3}", run_at=NOW + i % 2, priority=i % 5) for i in range(300)]
    await store.insert(rows + [job(key=f"k{i}", schedule=f"s{i}", fire_time=NOW) for i in range(100)], NOW)


async def test_no_statement_of_daily_work_scans_the_jobs(watched: SQLiteStore, spy: Spy, other: sqlite3.Connection) -> None:
    await all_verbs(watched)
    await fill(watched)
    statements = {sql: parameters for sql, parameters, _ in spy.seen if "tinyq_jobs" in sql and "GROUP BY" not in sql}
    statements.pop(next(sql for sql in statements if "WHERE namespace = ? AND state = ? ORDER BY seq LIMIT" in sql))
    assert len(statements) > 20
    other.create_function("tinyq_row", -1, lambda *values: None)  # of which the store's own connections know
    for sql, parameters in statements.items():
        steps = plan(other, sql, parameters)
        assert [step for step in steps if step.startswith(("SCAN tinyq_jobs", "SCAN job", "SCAN j ", "SCAN n"))] == [], sql


@pytest.mark.parametrize(
    ("statement", "parameters", "index"),
    [
        ("GROUPS", tinyq.lane_range("default"), "tinyq_claim (lane>?"),
        ("LANES", tinyq.lane_range("default") | {"most": 10}, "tinyq_claim (lane>?"),
        ("LANE_HEADS", (tinyq.lane_of("default", "q1", "send"), 5), "tinyq_claim (lane=?)"),
        ("FRAGILE_GROUPS", tinyq.lane_range("default"), "tinyq_fragile (lane>?"),
        ("FRAGILE_LANES", tinyq.lane_range("default") | {"most": 10}, "tinyq_fragile (lane>?"),
        ("FRAGILE_HEADS", (tinyq.lane_of("default", "q1", "send"), 5), "tinyq_fragile (lane=?)"),
        ("STRAYS", (), "tinyq_claim (lane=?)"),
        ("STRAYS", (), "tinyq_fragile (lane=?)"),
        ("COME_DUE", ("default", NOW, 500), "tinyq_later (namespace=? AND run_at<?)"),
        ("EDGES", ("default",), "tinyq_later (namespace=?)"),
        ("EDGES", ("default",), "SEARCH tinyq_jobs USING INDEX tinyq_claim"),
        ("EDGES", ("default",), "SEARCH tinyq_jobs USING INDEX tinyq_fragile"),
        ("DUE_NOW", ("default", NOW, 1, 1, 0, 500), "tinyq_later (namespace=? AND run_at<?)"),
        ("UPCOMING", ("default", NOW), "tinyq_later (namespace=? AND run_at>?)"),
        ("OVERLAP", ("default", "s1"), "tinyq_occurrences (namespace=? AND schedule=?)"),
    ],
)
async def test_a_frequent_statement_is_served_by_its_own_index(
    store: SQLiteStore, other: sqlite3.Connection, statement: str, parameters: Any, index: str
) -> None:
    await fill(store)
    steps = plan(other, getattr(tinyq, statement), parameters)
    assert any(index in step for step in steps), steps
    assert [step for step in steps if "TEMP B-TREE" in step] == []


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING])
async def test_a_key_is_looked_for_in_the_index_of_its_kind(
    store: SQLiteStore, other: sqlite3.Connection, state: State, recurs: bool
) -> None:
    await fill(store)
    [step] = plan(other, tinyq.SAME_KEY[state, recurs], ("default", "send", "k1"))
    assert f"tinyq_{'recurring_' * recurs}keys (namespace=? AND task=? AND key=?" in step


async def test_what_a_partial_index_asks_for_is_no_parameter_or_each_use_would_be_prepared_anew(
    watched: SQLiteStore, spy: Spy
) -> None:
    await all_verbs(watched)
    conditions = [sql.partition("WHERE")[2] for sql, _, _ in spy.seen if "tinyq_jobs" in sql]
    asked = {sql for sql in conditions if re.search(r"\b(state|ready) = [?:]", sql)}
    assert len(conditions) > 20
    assert [sql for sql in asked if "ORDER BY seq LIMIT" not in sql] == []


# What comes due at once


@pytest.fixture
def three_workers(store: SQLiteStore, other: sqlite3.Connection) -> None:
    other.executemany(tinyq.ENLIST, [(name, "default", 1, NOW, NOW) for name in ("w1", "w2", "w3")])
    other.commit()


WIDE = Room(1_000, {}, 0, 1, {"send": False})


async def share(store: SQLiteStore, worker: str, now: int) -> list[JobRow]:
    return [*(await store.claim(WIDE, worker, now + 30_000_000, now)).rows]


@pytest.mark.usefixtures("three_workers")
async def test_what_comes_due_at_once_is_shared_out_among_the_workers(store: SQLiteStore) -> None:
    await store.insert([job(run_at=NOW + 5) for _ in range(300)], NOW)
    shares = [await share(store, worker, NOW + 6) for worker in ("w2", "w3", "w1", "w2")]
    assert [len(rows) for rows in shares] == [100, 100, 100, 0]
    assert len({row.seq for rows in shares for row in rows}) == 300


@pytest.mark.usefixtures("three_workers")
async def test_what_the_others_have_not_taken_within_a_moment_goes_to_whoever_has_room(store: SQLiteStore) -> None:
    await store.insert([job(run_at=NOW + 5) for _ in range(300)], NOW)
    first = await store.claim(WIDE, "w1", LEASE, NOW + 6)
    assert (len(first.rows), first.next_at) == (100, NOW + 10_005)
    assert len(await share(store, "w1", NOW + 10_005)) == 200


@pytest.mark.usefixtures("three_workers")
async def test_an_urgent_job_goes_to_whoever_comes_first_whatever_is_shared_out(store: SQLiteStore) -> None:
    await store.insert([job(run_at=NOW + 5, priority=int(n == 250)) for n in range(300)], NOW)
    rows = await share(store, "w1", NOW + 6)
    assert (len(rows), rows[0].priority) == (100, 1)


@pytest.mark.usefixtures("three_workers")
async def test_calls_that_would_be_full_do_not_wait_for_their_window_because_they_are_shared_out(store: SQLiteStore) -> None:
    await store.insert([job("poll", run_at=NOW + 5) for _ in range(250)], NOW)
    terms = {"poll": Terms(names=["poll"], size=100, window=SECOND, value_of=lambda payload, version: "")}
    where = Room(9, {}, 0, 1, {"poll": False}, terms=terms)
    taken = [len((await store.claim(where, worker, LEASE, NOW + 6)).rows) for worker in ("w1", "w2")]
    assert min(taken) > 80


async def test_what_comes_due_while_others_wait_for_a_slot_lets_them_be_waited_for(store: SQLiteStore) -> None:
    await store.insert([job(queue="reports"), job(run_at=NOW + 5)], NOW)
    where = ROOM._replace(named={"reports": 0})
    claimed = await store.claim(where, "w1", LEASE, NOW + 6)
    assert ([row.queue for row in claimed.rows], claimed.more) == (["default"], True)


async def test_what_comes_due_with_a_value_that_nothing_is_limited_by_any_more_takes_a_slot_for_each(store: SQLiteStore) -> None:
    rows = [job("poll", run_at=NOW + 5, limit_value=value) for value in ('"a"', '"b"', '"c"')]
    await store.insert(rows, NOW)
    terms = {"poll": Terms(names=["poll"], size=10, value_of=lambda payload, version: "")}
    claimed = await store.claim(Room(1, {}, 0, 1, {"poll": False}, terms=terms), "w1", LEASE, NOW + 6)
    assert (len(claimed.rows), claimed.more) == (1, True)


async def test_what_is_unscheduled_is_found_by_its_key(watched: SQLiteStore, spy: Spy, other: sqlite3.Connection) -> None:
    await fill(watched)
    await watched.unschedule("send", "k1", NOW)
    found = [(sql, parameters) for sql, parameters, _ in spy.seen if "recurrence <>" in sql]
    assert len(found) == 2
    for sql, parameters in found:
        assert plan(other, sql, parameters) == [
            "SEARCH tinyq_jobs USING INDEX tinyq_recurring_keys (namespace=? AND task=? AND key=?)"
        ]


async def test_recurring_jobs_move_on_together_in_one_statement(
    watched: SQLiteStore, spy: Spy, other: sqlite3.Connection
) -> None:
    text = tinyq.Recurrence(tinyq.Every(60).as_text(), "skip", "latest", None).as_text()
    await watched.insert([job(key=f"k{n}", recurrence=text, fire_time=NOW) for n in range(10)], NOW)
    rows = await claim(watched)
    spy.seen.clear()
    ran = tinyq.Ran(NOW, NOW, 0, 0, text)
    states = await watched.settle([tinyq.done_with(row)._replace(ran=ran) for row in rows], NOW + 1)
    assert states == {row.seq: State.PENDING for row in rows}
    [(sql, parameters)] = [(sql, parameters) for sql, parameters, _ in spy.seen if "tinyq_jobs" in sql]
    assert "SEARCH tinyq_jobs USING INTEGER PRIMARY KEY (rowid=?)" in plan(other, sql, parameters)


async def test_leases_that_end_are_found_by_their_index(watched: SQLiteStore, spy: Spy, other: sqlite3.Connection) -> None:
    await fill(watched)
    await watched.list(State.RUNNING, lease_before=LEASE)
    [(sql, parameters, _)] = [seen for seen in spy.seen if "lease <" in seen[0]]
    steps = plan(other, sql, parameters)
    assert steps == ["SEARCH tinyq_jobs USING INDEX tinyq_leases (lease<?)"]


async def test_who_looks_for_lost_workers_does_not_read_payloads(store: SQLiteStore) -> None:
    await store.insert([job(payload=f'[["{"x" * 1_000_000}"],{{}}]') for _ in range(3)], NOW)
    await claim(store)
    await store.list(State.RUNNING, lease_before=LEASE + 1)  # what the first one loads is not to be counted
    tracemalloc.start()
    try:
        doubtful = await store.list(State.RUNNING, lease_before=LEASE + 1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert [(row.seq, row.claim_no, row.payload) for row in doubtful] == [(1, 1, None), (2, 1, None), (3, 1, None)]


async def test_what_may_be_long_comes_last_in_a_row_of_the_file(store: SQLiteStore, other: sqlite3.Connection) -> None:
    """So that it is not read on the way to a short column."""
    names = [name for _, name, *_ in other.execute("PRAGMA table_info(tinyq_jobs)")]
    assert names[-3:] == ["payload", "result", "progress"]
    light = dict(zip(tinyq.COLUMNS, tinyq.LIGHT.split(", "), strict=True))
    assert {column for column, selected in light.items() if selected == "NULL"} == {"payload", "result", "progress"}


UNRELATED: dict[str, dict[str, Any]] = {
    "more of the same": {},
    "future": {"run_at": LEASE, "ready": tinyq.LATER},
    "unknown task": {"task": "stranger"},
    "full queue": {"queue": "full"},
    "fragile": {"ready": tinyq.FRAGILE, "lost": 1},
    "fragile, unknown task": {"ready": tinyq.FRAGILE, "lost": 1, "task": "stranger"},
    "fragile, full queue": {"ready": tinyq.FRAGILE, "lost": 1, "queue": "full"},
    "dead": {"state": State.DEAD, "ready": None},
    "running": {"state": State.RUNNING, "ready": None, "lease": LEASE},
}
NARROW = Room(3, {"full": 0}, 3, 1, {"send": False})


@contextmanager
def counted(db: sqlite3.Connection) -> Iterator[list[int]]:
    """How many instructions of SQLite's virtual machine a block takes."""
    instructions = [0]

    def count() -> int:
        instructions[0] += 1
        return 0

    db.set_progress_handler(count, 1)
    yield instructions
    db.set_progress_handler(None, 1)


@contextmanager
def beside(path: str, others: int, kind: str) -> Iterator[sqlite3.Connection]:
    """A file with so many rows of a kind."""
    with closing(sqlite3.connect(f"{path}-{others}", isolation_level=None)) as db:
        tinyq.prepare(db, path, "normal")
        db.execute("BEGIN IMMEDIATE")
        rows = [job(**{"ready": tinyq.CLAIMABLE} | UNRELATED[kind]) for _ in range(others)]
        lanes = [{"lane": tinyq.lane_of("default", row.queue, row.task)} for row in rows]
        db.executemany(tinyq.INSERT, [tinyq.as_values(row) | lane for row, lane in zip(rows, lanes, strict=True)])
        yield db
        db.execute("ROLLBACK")


@pytest.mark.parametrize("kind", UNRELATED)
async def test_the_work_of_a_claim_does_not_grow_with_other_jobs(path: str, kind: str) -> None:
    def work(others: int) -> int:
        with beside(path, others, kind) as db:
            tinyq.insert_rows(db, "default", [job(priority=1) for _ in range(3)], NOW)
            with counted(db) as instructions:
                assert len(tinyq.claim_rows(db, "default", NARROW, "w1", LEASE, NOW).rows) == 3
        return instructions[0]

    few, many = work(20), work(2_000)
    assert many < 2 * few


@pytest.mark.parametrize("kind", [kind for kind in UNRELATED if kind != "more of the same"])
async def test_the_work_of_a_look_does_not_grow_with_jobs_that_cannot_start(path: str, kind: str) -> None:
    def work(others: int) -> int:
        with beside(path, others, kind) as db, counted(db) as instructions:
            assert tinyq.look_for_due(db, "default", NARROW._replace(fragile=0), NOW) is not None
        return instructions[0]

    few, many = work(20), work(2_000)
    assert many < 2 * few


async def test_a_look_at_a_file_where_nothing_is_due_is_one_statement(other: sqlite3.Connection, store: SQLiteStore) -> None:
    await store.insert([job(run_at=LEASE) for _ in range(5)], NOW)
    seen: list[str] = []
    other.set_trace_callback(seen.append)
    assert tinyq.look_for_due(other, "default", ROOM, NOW) == tinyq.Claimed((), LEASE, False)
    assert len(seen) == 1


GATHERING: dict[str, tuple[list[dict[str, Any]], int]] = {  # what is due besides four polls, and how many a claim takes then
    "nothing": ([], 0),
    "too few": ([{}] * 5, 0),
    "enough": ([{}] * 6, 10),
    "another task": ([{"task": "send"}], 1),
    "another queue": ([{"queue": "other"}], 0),
    "one that was lost before": ([{"lost": 1}], 1),
    "one that goes alone": ([{"singly": 1, "priority": 1}], 1),
    "one that has waited": ([{"run_at": NOW - 50_000}], 5),
    "another task, all without a lane": ([{"task": "send"}], 1),
}


@pytest.mark.parametrize("others", GATHERING)
def test_items_that_wait_for_others_to_go_with_are_not_read_until_then(path: str, others: str) -> None:
    besides, count = GATHERING[others]
    terms = {"poll": tinyq.Terms(names=("poll",), size=10, window=50_000, value_of=lambda payload, version: "")}
    room = Room(10, {}, 10, 1, {"poll": False, "send": False}, terms=terms)
    rows = [job("poll", run_at=NOW + number) for number in range(4)] + [job(**{"task": "poll"} | fields) for fields in besides]
    with closing(tinyq.connection_class()(path, isolation_level=None)) as db:
        tinyq.prepare(db, path, "normal")
        db.execute("BEGIN IMMEDIATE")
        tinyq.insert_rows(db, "default", rows, NOW - 10**6)
        db.executemany(
            "UPDATE tinyq_jobs SET lost = ?, singly = ?, ready = 0, lane = ? WHERE id = ?",
            [(row.lost, row.singly, tinyq.lane_of("default", row.queue, row.task, None, row.singly), row.id) for row in rows],
        )
        if "without a lane" in others:
            db.execute("UPDATE tinyq_jobs SET lane = 0")
        statements = list[str]()
        db.set_trace_callback(statements.append)
        claimed = tinyq.claim_rows(db, "default", room, "w1", LEASE, NOW + 10)
        assert len(claimed.rows) == count
        db.set_trace_callback(None)
        if others in ("nothing", "too few"):
            assert claimed == tinyq.Claimed((), NOW + 50_000, True, limited=frozenset({"poll"}))
            assert [text for text in statements if "tinyq_row" in text or "payload" in text] == []
        rest = tinyq.claim_rows(db, "default", room, "w1", LEASE, NOW + 50_000)
        assert len(claimed.rows) + len(rest.rows) >= len(rows) - (others == "one that goes alone")
        db.execute("ROLLBACK")


@pytest.mark.parametrize("select", ["READ_HEADS", "READ_CHOSEN", "READ_RECURRING"])
def test_a_connection_of_tinyq_hands_over_the_same_rows_as_a_cursor(path: str, select: str) -> None:
    statement, which = getattr(tinyq, select), ("default", tinyq.lane_of("default", "default", "send"), 50)
    rows = [
        job(payload=text, priority=number) for number, text in enumerate(["[[1],{}]", None, "", "\0 nil \0", "ü€𝄞", "x" * 10_000])
    ]
    with closing(tinyq.connection_class()(path, isolation_level=None)) as db:
        tinyq.prepare(db, path, "normal")
        db.execute("BEGIN IMMEDIATE")
        tinyq.insert_rows(db, "default", rows, NOW)
        seqs = tinyq.encode_json([seq for (seq,) in db.execute("SELECT seq FROM tinyq_jobs")])
        given = which if select == "READ_HEADS" else ("default", seqs)
        plain = db.execute(statement, given).fetchall()
        assert [row[7] for row in plain] == [row.payload for row in (rows[::-1] if select == "READ_HEADS" else rows)]
        for _ in range(2):
            assert tinyq.rows_of(db, statement, given) == plain
        assert tinyq.rows_of(db, statement, ("nobody", *given[1:])) == []
        db.execute("ROLLBACK")


async def test_a_claim_reads_no_more_fragile_rows_than_may_run(path: str) -> None:
    def work(fragile: int) -> int:
        with beside(path, 300, "fragile") as db, counted(db) as instructions:
            tinyq.claim_rows(db, "default", NARROW._replace(shared=200, threads=200, fragile=fragile), "w1", LEASE, NOW)
        return instructions[0]

    assert work(0) < work(1) < work(50) / 5


async def test_fragile_rows_of_a_full_queue_wait_for_its_slots(store: SQLiteStore, other: sqlite3.Connection) -> None:
    await store.insert([job(queue="full")], NOW)
    other.execute("UPDATE tinyq_jobs SET ready = 3, lost = 1")
    assert await store.claim(NARROW, "w1", LEASE, NOW) == tinyq.Claimed((), None, True)
    assert len(await claim(store)) == 1


async def test_a_fragile_row_that_a_hand_has_moved_is_claimed_from_its_new_queue(
    store: SQLiteStore, other: sqlite3.Connection
) -> None:
    await store.insert([job(queue="full"), job("stranger")], NOW)
    other.execute("UPDATE tinyq_jobs SET ready = 3, lost = 1")
    other.execute("UPDATE tinyq_jobs SET queue = 'default' WHERE queue = 'full'")
    claimed = await store.claim(NARROW, "w1", LEASE, NOW)
    assert [row.queue for row in claimed.rows] == ["default"]
    assert other.execute("SELECT count(*) FROM tinyq_jobs WHERE lane = 0").fetchone() == (0,)


async def test_of_many_rows_without_a_lane_each_claim_sorts_some_and_asks_for_another(
    store: SQLiteStore, other: sqlite3.Connection
) -> None:
    await store.insert([job("stranger") for _ in range(700)], NOW)
    other.execute("UPDATE tinyq_jobs SET lane = 0, ready = iif(seq % 2, 1, 3)")
    assert (await store.claim(ROOM, "w1", LEASE, NOW)).next_at == NOW
    assert other.execute("SELECT count(*) FROM tinyq_jobs WHERE lane = 0").fetchone() == (200,)
    assert (await store.claim(ROOM, "w1", LEASE, NOW)).next_at is None
    assert other.execute("SELECT count(*) FROM tinyq_jobs WHERE lane = 0").fetchone() == (0,)


async def test_due_jobs_of_unknown_tasks_are_found_whether_fragile_or_not(store: SQLiteStore, other: sqlite3.Connection) -> None:
    await store.insert([job("sound"), job("fragile"), job("fragile"), job("send")], NOW)
    other.execute("UPDATE tinyq_jobs SET ready = 3, lost = 1 WHERE task = 'fragile'")
    assert await store.unknown(["send"]) == {1: "sound", 2: "fragile"}


# the file, under the hands of others


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
async def test_a_file_that_is_no_longer_there_takes_no_more_jobs(path: str, tmp_path: Path, replaced: bool) -> None:
    async with TinyQ(path, worker=False) as q:
        await q.enqueue("send", 1, durable=True)
        Path(path).rename(tmp_path / "moved")
        if replaced:
            Path(path).touch()
        with pytest.raises(StoreError, match="deleted or replaced"):
            await q.enqueue("send", 2, durable=True)
        Path(tmp_path / "moved").rename(path)  # put back, it goes on
        await q.enqueue("send", 3, durable=True)
    with closing(sqlite3.connect(path)) as db:
        assert [payload for (payload,) in db.execute("SELECT payload FROM tinyq_jobs ORDER BY seq")] == ["[[1],{}]", "[[3],{}]"]
