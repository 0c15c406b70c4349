"""A file of an older schema version is brought forward with all that it holds."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from helpers import eventually

import tinyq
from tinyq import State, TinyQ

VERSION_1 = (
    "CREATE TABLE tinyq_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT",
    """CREATE TABLE tinyq_jobs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, so that an old handle cannot find another job
        id BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
        namespace TEXT NOT NULL,
        task TEXT NOT NULL,
        queue TEXT NOT NULL,
        lane TEXT NOT NULL,
        priority INTEGER NOT NULL,
        run_at INTEGER NOT NULL,
        created INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('pending', 'running', 'done', 'dead', 'cancelled')),
        ready INTEGER CHECK ((ready IS NOT NULL) = (state = 'pending')),
        payload TEXT, payload_version INTEGER NOT NULL, options TEXT, headers TEXT,
        key TEXT, expires INTEGER, schedule TEXT, fire_time INTEGER,
        attempts INTEGER NOT NULL, claim_no INTEGER NOT NULL, snoozes INTEGER NOT NULL,
        interruptions INTEGER NOT NULL, lost INTEGER NOT NULL, parked INTEGER,
        worker TEXT, lease INTEGER, started INTEGER, finished INTEGER, cancel_at INTEGER,
        reason TEXT, error TEXT, traceback TEXT, result TEXT, keep_until INTEGER
    ) STRICT""",
    # Only what may start now is in the claim index: its size, and so the cost of a claim, ignores everything else.
    "CREATE INDEX tinyq_claim ON tinyq_jobs (namespace, queue, task, lane, priority DESC, run_at, seq) WHERE ready = 1",
    "CREATE INDEX tinyq_later ON tinyq_jobs (namespace, run_at, priority DESC) WHERE ready = 0",
    "CREATE INDEX tinyq_fragile ON tinyq_jobs (namespace, priority DESC, run_at, seq) WHERE ready = 3",
    "CREATE INDEX tinyq_leases ON tinyq_jobs (namespace, lease) WHERE state = 'running'",
    "CREATE UNIQUE INDEX tinyq_keys ON tinyq_jobs (namespace, task, key, state) WHERE key IS NOT NULL AND finished IS NULL",
    "CREATE INDEX tinyq_occurrences ON tinyq_jobs (namespace, schedule) WHERE schedule IS NOT NULL AND finished IS NULL",
    "CREATE INDEX tinyq_keep ON tinyq_jobs (keep_until) WHERE keep_until IS NOT NULL",
    """CREATE TABLE tinyq_schedules (
        namespace TEXT NOT NULL, name TEXT NOT NULL, last_fire INTEGER NOT NULL, PRIMARY KEY (namespace, name)
    ) STRICT""",
)

NOW = 1_767_268_800_000_000
HOUR = 3_600_000_000


def insert(db: sqlite3.Connection, number: int, **others: Any) -> None:
    fields = {
        "id": bytes([number]) * 16, "namespace": "default", "task": "note", "queue": "default", "lane": "", "priority": 0,
        "run_at": NOW, "created": NOW, "state": "pending", "ready": 1, "payload": f"[[{number}],{{}}]", "payload_version": 1,
        "attempts": 0, "claim_no": 0, "snoozes": 0, "interruptions": 0, "lost": 0,
    } | others  # fmt: skip
    db.execute(f"INSERT INTO tinyq_jobs ({', '.join(fields)}) VALUES ({', '.join('?' * len(fields))})", list(fields.values()))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Jobs in all states; the last number that was given belongs to a job that is gone."""
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for statement in VERSION_1:
            db.execute(statement)
        db.execute("INSERT INTO tinyq_meta VALUES ('schema', 1)")
        insert(db, 1)
        insert(db, 2, key="k", task="keyed")
        insert(db, 3, run_at=NOW + 10**6 * HOUR, ready=0)
        insert(db, 4, state="running", ready=None, worker="gone", lease=NOW, attempts=1, claim_no=1, started=NOW)
        insert(db, 5, state="dead", ready=None, finished=NOW, attempts=5, error="E: down", traceback="T")
        insert(db, 6, state="done", ready=None, finished=NOW, result="[1]")
        insert(db, 7, ready=3, lost=1, attempts=1, claim_no=1)
        insert(db, 8)
        db.execute("DELETE FROM tinyq_jobs WHERE id = ?", (bytes([8]) * 16,))
        db.execute("INSERT INTO tinyq_schedules VALUES ('default', 'tick', ?)", (NOW,))
        db.commit()
    return path


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path, timeout=10)) as db:
        return db.execute(sql).fetchall()


async def test_every_job_of_an_old_file_is_kept_as_it_was(old: Path) -> None:
    columns = ", ".join(
        name for name in tinyq.COLUMNS if name not in ("lane", "progress", "recurrence", "tally", "limit_value", "singly")
    )
    before = rows(old, f"SELECT {columns} FROM tinyq_jobs ORDER BY seq")
    async with TinyQ(old, worker=False):
        pass
    assert len(before) == 7
    assert rows(old, f"SELECT {columns} FROM tinyq_jobs ORDER BY seq") == before
    assert rows(old, "SELECT * FROM tinyq_schedules") == [("default", "tick", NOW, None, 0)]
    assert rows(old, "PRAGMA integrity_check") == [("ok",)]


async def test_the_jobs_of_an_old_file_run(old: Path) -> None:
    ran: list[int] = []
    q = TinyQ(old)

    @q.task(name="note")
    async def note(number: int) -> None:
        ran.append(number)

    @q.task(name="keyed")
    async def keyed(number: int) -> None:
        ran.append(number)

    async with q, asyncio.timeout(30):
        await eventually(lambda: sorted(ran) == [1, 2, 7])
        [dead] = await q.dead()
        assert (dead.error, dead.status) == ("E: down", State.DEAD)


async def test_no_number_is_given_again_after_a_migration(old: Path) -> None:
    async with TinyQ(old, worker=False) as q:
        await q.enqueue("later", durable=True)
    assert rows(old, "SELECT max(seq) FROM tinyq_jobs") == [(9,)]


async def test_an_old_file_ends_with_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.db"
    for path in (old, new):
        async with TinyQ(path, worker=False):
            pass
    schema = "SELECT type, name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    assert [row for row in rows(old, schema) if row[1] not in ("tinyq_meta", "tinyq_schedules")] == [
        row for row in rows(new, schema) if row[1] not in ("tinyq_meta", "tinyq_schedules")
    ]
    assert rows(old, "SELECT * FROM tinyq_meta") == rows(new, "SELECT * FROM tinyq_meta") == [("schema", 5)]


async def test_the_jobs_of_a_file_of_version_2_have_told_of_no_progress(tmp_path: Path) -> None:
    path = tmp_path / "second.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for statement in (*tinyq.MIGRATIONS[0], *tinyq.MIGRATIONS[1]):
            db.execute(statement)
        db.execute("INSERT INTO tinyq_meta VALUES ('schema', 2)")
        insert(db, 1, lane=0)
        assert "progress" not in [name for _, name, *_ in db.execute("PRAGMA table_info(tinyq_jobs)")]
        db.commit()
    async with TinyQ(path, worker=False) as q:
        job = await q.get((bytes([1]) * 16).hex())
        assert (job.task, job.progress) == ("note", None)
    assert rows(path, "SELECT progress FROM tinyq_jobs") == [(None,)]
    assert rows(path, "SELECT value FROM tinyq_meta") == [(5,)]


async def test_a_recurring_job_of_a_file_of_version_4_is_known_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "fourth.db"
    recurrence = tinyq.Recurrence(tinyq.Every(60).as_text(), "skip", "latest", None).as_text()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for statements in tinyq.MIGRATIONS[:4]:
            for statement in statements:
                db.execute(statement)
        db.execute("INSERT INTO tinyq_meta VALUES ('schema', 4)")
        insert(
            db, 1, lane=0, task="poll", key=f"{tinyq.RECURS}7", run_at=10**6 * HOUR, ready=0, fire_time=10**6 * HOUR,
            recurrence=recurrence, payload="[[7],{}]", tally="5 0 1 0 2",
        )  # fmt: skip
        db.commit()
    q = TinyQ(path, worker=False)

    @q.task(name="poll")
    async def poll(number: int) -> None: ...

    async with q:
        await q.schedule(poll, 8, when=tinyq.Every(60), key="7")
        assert rows(path, "SELECT seq, payload, tally FROM tinyq_jobs") == [(1, "[[8],{}]", "5 0 1 0 2 0")]
        assert await q.unschedule(poll, key="7")
    assert rows(path, "SELECT seq FROM tinyq_jobs") == []


@pytest.mark.parametrize("version", [1, 2, 3, 4])
async def test_a_schedule_of_an_older_file_goes_on_from_its_last_fire_time(tmp_path: Path, version: int) -> None:
    path = tmp_path / "older.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for statements in tinyq.MIGRATIONS[:version]:
            for statement in statements:
                db.execute(statement)
        db.execute("INSERT INTO tinyq_meta VALUES ('schema', ?)", (version,))
        db.execute("INSERT INTO tinyq_schedules (namespace, name, last_fire) VALUES ('default', 'tick', ?)", (NOW,))
        db.commit()
    clock = FakeClock("2026-01-01T12:59:59+00:00")  # NOW is noon
    fires: list[datetime | None] = []
    q = TinyQ(path, clock=clock)

    @q.every(3600, name="tick", immediate=True)
    async def tick() -> None:
        fires.append(tinyq.current_job().fire_time)

    @q.task(name="poll")
    async def poll(number: int) -> None:
        fires.append(None)

    async with q:
        await eventually(lambda: rows(path, "SELECT rule FROM tinyq_schedules") == [("every 3600.0 0.0",)])
        assert fires == []
        await q.schedule(poll, 7, when=tinyq.Every(3600), key="7")
        await eventually(lambda: len(fires) == 2, clock, 1)
    assert datetime(2026, 1, 1, 13, tzinfo=UTC) in fires


# Tables that somebody else makes


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert tinyq.main(["schema", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def schema_of(path: Path) -> list[Any]:
    return rows(path, "SELECT type, name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name")


def run_script(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script)


async def test_without_auto_migrate_the_tables_are_left_to_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.db"
    with pytest.raises(tinyq.StoreError, match=r"no tables of tinyq, and 5 is needed.*python -m tinyq schema"):
        await TinyQ(path, auto_migrate=False).start()
    assert schema_of(path) == []
    run_script(path, printed(capsys))
    async with TinyQ(path, auto_migrate=False) as q:
        await q.enqueue("later", durable=True)
    assert rows(path, "SELECT task FROM tinyq_jobs") == [("later",)]


async def test_a_file_of_an_older_version_is_refused_until_it_is_brought_forward(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = schema_of(old)
    with pytest.raises(tinyq.StoreError, match="has tinyq schema 1, and 5 is needed"):
        await TinyQ(old, auto_migrate=False).start()
    with pytest.raises(tinyq.StoreError, match="has tinyq schema 1, and 5 is needed"):
        await asyncio.to_thread(TinyQ(old, auto_migrate=False).enqueue_sync, "later", durable=True)
    script = printed(capsys, old)
    assert schema_of(old) == before
    run_script(old, script)
    copy = tmp_path / "new.db"
    async with TinyQ(copy, worker=False), TinyQ(old, worker=False, auto_migrate=False):
        pass
    made = [row for row in schema_of(old) if row[1] not in ("tinyq_meta", "tinyq_schedules")]
    assert made == [row for row in schema_of(copy) if row[1] not in ("tinyq_meta", "tinyq_schedules")]
    assert printed(capsys, old) == ""


def test_the_schema_of_a_file_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tinyq.main(["schema", str(tmp_path / "none.db")]) == 1
    assert "none.db" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


def test_auto_migrate_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="auto_migrate"):
        TinyQ(auto_migrate="no")  # type: ignore[arg-type]
