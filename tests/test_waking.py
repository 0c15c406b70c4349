"""How a process hears of work: an event within it, a doorbell between tinyq's, PRAGMA data_version for everything else."""

import asyncio
import logging
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fleet import Fleet
from helpers import Open, counted, eventually

import tinyq
from tinyq import SystemClock, TinyQ

NEVER = 1000.0


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves one way of hearing of work; the others are as slow as to be never."""

    def only(*ways: str) -> None:
        for way in {"TICK", "SAFETY"} - set(ways):
            monkeypatch.setattr(tinyq, way, NEVER)

    return only


@pytest.fixture
def open_real(open_file: Open) -> Open:
    """Starts TinyQs on one file, under the real clock; a worker is listed when this returns."""

    async def open_real(**options: Any) -> TinyQ:
        q = await open_file(**{"clock": SystemClock(), **options})
        if options.get("worker", True):
            assert q._engine is not None
            name, path = q._engine.worker, Path(q._engine.config.db or "")
            await eventually(lambda: (name,) in query(path, "SELECT id FROM tinyq_workers"))
        return q

    return open_real


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The looks of all claims."""
    return counted(monkeypatch, "look_for_due")


def query(file: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file, timeout=10)) as db:
        found = db.execute(sql, values).fetchall()
        db.commit()
        return found


@contextmanager
def listed(file: Path, namespace: str = "default", age: float = 0.0) -> Iterator[socket.socket]:
    """A doorbell of our own, in a worker's row that was last seen so many seconds ago."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as bell:
        bell.bind(("127.0.0.1", 0))
        bell.setblocking(False)
        now = time.time_ns() // 1000
        row = (f"seen {age}", namespace, bell.getsockname()[1], now, now - round(age * 1e6))
        query(file, "INSERT INTO tinyq_workers VALUES (?, ?, ?, ?, ?)", *row)
        yield bell


def rings(bell: socket.socket) -> int:
    """How often it has rung since the last time; on the loopback interface a datagram is there when it has been sent."""
    count = 0
    while True:
        try:
            bell.recv(10)
        except BlockingIOError:
            return count
        count += 1


def insert_by_hand(file: Path, task: str, argument: int) -> None:
    """What an application's own transaction would do: a row that nobody is told of."""
    now = time.time_ns() // 1000
    row = tinyq.JobRow(tinyq.new_id(now), task, "default", 0, now, now)
    row.payload = f"[[{argument}],{{}}]"
    with closing(sqlite3.connect(file, timeout=10)) as db:
        tinyq.insert_rows(db, "default", [row], now)
        db.commit()


def heard(q: TinyQ) -> "asyncio.Queue[int]":
    """Registers task "note", whose arguments come out here."""
    came: asyncio.Queue[int] = asyncio.Queue()

    @q.task(name="note")
    async def note(n: int) -> None:
        came.put_nowait(n)

    return came


async def first(came: "asyncio.Queue[int]") -> int:
    async with asyncio.timeout(30):
        return await came.get()


# what others write

WRITTEN: dict[str, tuple[str, bool]] = {
    "nothing of tinyq's": ("CREATE TABLE things (x)", False),
    "a job that is due after the next look": ("UPDATE tinyq_jobs SET run_at = ? + 200000000", False),
    "a job that is due before the next look": ("UPDATE tinyq_jobs SET run_at = ? + 50000000", True),
    "a job that is due": ("UPDATE tinyq_jobs SET run_at = ?", True),
    "a job that can be claimed": ("UPDATE tinyq_jobs SET ready = 1", True),
    "a job that can be claimed alone": ("UPDATE tinyq_jobs SET ready = 3", True),
    "the end of a job": ("DELETE FROM tinyq_jobs", False),
    "a pause": ("INSERT INTO tinyq_paused VALUES ('default', 'mail')", True),
    "a pause of another namespace's queue": ("INSERT INTO tinyq_paused VALUES ('other', 'mail')", False),
    "a job of another namespace": ("UPDATE tinyq_jobs SET namespace = 'other', run_at = ?", False),
}


@pytest.mark.parametrize("what", WRITTEN)
async def test_of_what_others_write_a_claim_hears_if_it_may_be_news(
    open_real: Open, file: Path, only: Callable[..., None], what: str
) -> None:
    only()
    q = await open_real()
    await q.enqueue("later", durable=True, delay=100)
    assert q._engine is not None and q._engine.pulse is not None
    pulse, calls, now = q._engine.pulse, list[object](), time.time_ns() // 1000
    await eventually(lambda: q._engine is not None and q._engine.crew.looks_at < tinyq.FOREVER)
    loop, pulse._loop = pulse._loop, cast(Any, SimpleNamespace(call_soon_threadsafe=lambda call: calls.append(call)))
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as listener:
            for _ in range(2):
                pulse._listen(listener, 0.0)
            calls.clear()
            statement, news = WRITTEN[what]
            query(file, statement, *[now] * statement.count("?"))
            for _ in range(3):
                pulse._listen(listener, 0.0)
    finally:
        pulse._loop = loop
    assert calls == [pulse._heard] * news


async def test_news_that_could_not_be_read_is_read_the_next_time(
    open_real: Open, file: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only()
    q = await open_real()
    assert q._engine is not None and q._engine.pulse is not None
    pulse, calls, edges = q._engine.pulse, list[int](), tinyq.edges
    pulse._heard, pulse._version = (lambda: calls.append(1)), None

    def busy(*given: Any) -> Any:
        raise sqlite3.OperationalError("database is locked")

    insert_by_hand(file, "unknown", 7)
    with closing(sqlite3.connect(file, isolation_level=None)) as listener:
        monkeypatch.setattr(tinyq, "edges", busy)
        with pytest.raises(sqlite3.OperationalError):
            pulse._listen(listener, 0.0)
        monkeypatch.setattr(tinyq, "edges", edges)
        pulse._listen(listener, 0.0)
        await eventually(lambda: calls)


async def test_while_a_claim_is_under_way_a_later_job_may_be_news(open_real: Open, file: Path, only: Callable[..., None]) -> None:
    only()
    q = await open_real()
    await q.enqueue("later", durable=True, delay=100)
    assert q._engine is not None and q._engine.pulse is not None
    pulse, engine, calls = q._engine.pulse, q._engine, list[int]()
    await eventually(lambda: engine.crew.looks_at < tinyq.FOREVER)
    pulse._heard, pulse._version, engine.crew.looks_at = (lambda: calls.append(1)), None, tinyq.FOREVER
    with closing(sqlite3.connect(file, isolation_level=None)) as listener:
        pulse._listen(listener, 0.0)
        await eventually(lambda: calls)


# the list of workers


async def test_a_process_that_claims_is_listed_while_it_runs(open_real: Open, file: Path) -> None:
    q = await open_real(namespace="shop", worker_name="anna")
    [(name, namespace, port, started, seen)] = query(file, "SELECT * FROM tinyq_workers")
    assert name.startswith("anna-")
    assert namespace == "shop"
    assert 0 < port < 65536
    assert 0 < started <= seen <= time.time_ns() // 1000
    await q.stop()
    assert query(file, "SELECT * FROM tinyq_workers") == []


async def test_a_process_that_claims_nothing_is_not_listed(open_real: Open, file: Path) -> None:
    q = await open_real(worker=False)
    await open_real()
    await q.enqueue("anything", durable=True, delay=60)
    assert len(query(file, "SELECT * FROM tinyq_workers")) == 1


async def test_each_start_is_listed_under_a_name_of_its_own(open_real: Open, file: Path) -> None:
    await open_real(worker_name="anna")
    await open_real(worker_name="anna")
    assert len(query(file, "SELECT * FROM tinyq_workers")) == 2


async def test_a_worker_is_seen_again_and_again(open_real: Open, file: Path) -> None:
    await open_real(lease=0.3)
    [(before,)] = query(file, "SELECT seen FROM tinyq_workers")
    await eventually(lambda: query(file, "SELECT seen FROM tinyq_workers") > [(before,)])


async def test_the_row_of_a_worker_that_died_long_ago_is_removed(open_real: Open, file: Path) -> None:
    await open_real(lease=0.3)
    with listed(file, age=2 * 86400), listed(file, age=3600):
        await eventually(lambda: len(query(file, "SELECT * FROM tinyq_workers")) == 2)
        assert query(file, "SELECT id FROM tinyq_workers WHERE id LIKE 'seen %'") == [("seen 3600",)]


# the doorbell


async def test_an_enqueue_in_another_process_rings(open_real: Open, only: Callable[..., None]) -> None:
    only("doorbell")
    came = heard(await open_real())
    producer = await open_real(worker=False)
    await producer.enqueue("note", 7, durable=True)
    assert await first(came) == 7


async def test_a_requeue_in_another_process_rings(open_real: Open, only: Callable[..., None]) -> None:
    only("doorbell")
    producer = await open_real(worker=False)
    job = await producer.enqueue("note", 7, durable=True)
    await job.cancel()
    came = heard(await open_real())
    await producer.requeue(job.id)
    assert await first(came) == 7


async def test_a_job_that_is_handed_back_at_shutdown_rings(open_real: Open, only: Callable[..., None]) -> None:
    only("doorbell")
    ending, began = await open_real(), asyncio.Event()

    @ending.task(name="note")
    async def endless(n: int) -> None:
        began.set()
        await asyncio.Event().wait()

    await ending.enqueue("note", 7, durable=True)
    async with asyncio.timeout(30):
        await began.wait()
    came = heard(await open_real())
    await ending.stop(grace=0)
    assert await first(came) == 7


async def test_a_promotion_rings(open_real: Open, file: Path) -> None:
    q = await open_real(concurrency=1)

    @q.task
    async def busy() -> None:
        await asyncio.Event().wait()

    await q.enqueue(busy)
    waiting = await q.enqueue(busy)
    with listed(file) as bell:
        assert await waiting.promote()
        assert rings(bell) == 1


async def test_a_batch_rings_once_and_after_its_commit(open_real: Open, file: Path) -> None:
    producer = await open_real(worker=False)
    with listed(file) as bell:
        bell.settimeout(10)

        def rung() -> list[tuple[int]]:
            bell.recv(1)
            return query(file, "SELECT count(*) FROM tinyq_jobs")

        listener = asyncio.create_task(asyncio.to_thread(rung))
        await producer.enqueue_many([("note", (n,)) for n in range(100)], durable=True)
        assert await listener == [(100,)]
        bell.setblocking(False)
        assert rings(bell) == 0


async def test_concurrent_enqueues_ring_once_a_transaction(open_real: Open, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units: list[object] = []
    original = tinyq.in_transaction

    def in_transaction(*given: Any) -> Any:
        units.append(given)
        return original(*given)

    producer = await open_real(worker=False)
    monkeypatch.setattr(tinyq, "in_transaction", in_transaction)
    with listed(file) as bell:
        await asyncio.gather(*(producer.enqueue("note", n, durable=True) for n in range(100)))
        assert rings(bell) == len(units) < 50


@pytest.mark.parametrize(
    ("namespace", "age", "delay", "count"),
    [("default", 0, 0, 1), ("other", 0, 0, 0), ("default", 3600, 0, 0), ("default", 0, 60, 0)],
    ids=["a live worker", "of another namespace", "not seen for an hour", "for a job that is not due"],
)
async def test_a_doorbell_rings_if_there_is_something_to_do_for_its_owner(
    open_real: Open, file: Path, namespace: str, age: float, delay: float, count: int
) -> None:
    producer = await open_real(worker=False)
    with listed(file, namespace, age) as bell:
        await producer.enqueue("note", 7, durable=True, delay=delay)
        assert rings(bell) == count


async def test_nobody_rings_at_his_own_door(open_real: Open, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[object] = []
    monkeypatch.setattr(tinyq.Pulse, "_rung", lambda self, bell: rung.append(bell.recv(1)))
    q = await open_real()
    with listed(file) as bell:
        await q.enqueue("nobody knows it", durable=True)
        assert rings(bell) == 1
    await asyncio.sleep(0)
    assert rung == []


async def test_a_storm_at_the_door_causes_few_looks(open_real: Open, file: Path, looks: list[object]) -> None:
    q = await open_real()
    came = heard(q)
    [(port,)] = query(file, "SELECT port FROM tinyq_workers")
    await eventually(lambda: looks)
    looks.clear()
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as stranger:
        for n in range(500):
            stranger.sendto(bytes([n % 256]) * (n % 50), ("127.0.0.1", port))
    await q.enqueue("note", 7, durable=True)
    assert await first(came) == 7
    assert len(looks) < 20


async def test_a_worker_without_a_doorbell_hears_of_jobs_all_the_same(
    open_real: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no sockets here")

    caplog.set_level(logging.INFO, "tinyq")
    monkeypatch.setattr(tinyq, "SAFETY", NEVER)
    with monkeypatch.context() as without:
        without.setattr(tinyq.Pulse, "_bind", refuse)
        came = heard(await open_real())
    producer = await open_real(worker=False)
    assert any("no doorbell: PermissionError" in message for message in caplog.messages)
    await producer.enqueue("note", 7, durable=True)
    assert await first(came) == 7


# rows that somebody else inserted


async def test_a_row_that_another_program_inserted_is_found(open_real: Open, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr(tinyq, "SAFETY", NEVER)
    came = heard(await open_real())
    for n in range(3):
        insert_by_hand(file, "note", n)
        assert await first(came) == n


async def test_a_row_that_is_inserted_while_a_worker_starts_is_found(
    open_real: Open, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setattr(tinyq, "SAFETY", NEVER)
    await open_real(worker=False)
    for n in range(5):
        q = TinyQ(file)
        came = heard(q)
        async with asyncio.TaskGroup() as both:
            both.create_task(q.start())
            both.create_task(asyncio.to_thread(insert_by_hand, file, "note", n))
        assert await first(came) == n
        await q.stop()


async def test_an_idle_process_is_not_kept_busy_by_what_it_wrote_itself(
    open_real: Open, monkeypatch: pytest.MonkeyPatch, looks: list[object]
) -> None:
    listens: list[object] = []
    listen = tinyq.Pulse._listen

    def listening(*given: Any) -> None:
        listens.append(given)
        listen(*given)

    monkeypatch.setattr(tinyq.Pulse, "_listen", listening)
    monkeypatch.setattr(tinyq, "TICK", 0.001)
    q = await open_real()
    came = heard(q)
    await q.enqueue("note", 7, durable=True)
    assert await first(came) == 7
    await q.drain()
    looks.clear()
    listens.clear()
    await eventually(lambda: len(listens) > 100)
    assert len(looks) <= 3


# wake


async def test_wake_looks_at_once_here(open_real: Open, only: Callable[..., None], file: Path) -> None:
    only("wake")
    q = await open_real()
    came = heard(q)
    insert_by_hand(file, "note", 7)
    await q.wake()
    assert await first(came) == 7


async def test_wake_has_the_other_processes_look(open_real: Open, only: Callable[..., None], file: Path) -> None:
    only("wake")
    came = heard(await open_real())
    other = await open_real(worker=False)
    insert_by_hand(file, "note", 7)
    await other.wake()
    assert await first(came) == 7


async def test_wake_needs_no_database_but_a_start() -> None:
    async with TinyQ() as q:
        await q.wake()
    with pytest.raises(tinyq.ShuttingDown):
        await q.wake()


# results from another process


async def test_results_from_another_process_arrive_by_looks_that_are_shared(
    open_real: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinyq, "SAFETY", NEVER)
    asking, go = await open_real(worker=False), asyncio.Event()
    working = await open_real(concurrency=100)

    @working.task(name="double")
    async def double(n: int) -> int:
        await go.wait()
        return 2 * n

    jobs = await asking.enqueue_many([("double", (n,)) for n in range(50)], durable=True, result_ttl=60)
    looks = counted(monkeypatch, "read_rows")
    waiting = [asyncio.create_task(job.result(timeout=30)) for job in jobs]
    await eventually(lambda: looks)  # they all wait by now
    go.set()
    assert await asyncio.gather(*waiting) == [2 * n for n in range(50)]
    assert len(looks) < 25


async def test_a_result_that_is_not_going_to_be_kept_is_refused_to_each_who_waits(open_real: Open) -> None:
    asking = await open_real(worker=False)
    job = await asking.enqueue("note", 7, durable=True)
    answers = await asyncio.gather(*(job.result(timeout=30) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [tinyq.NoResult] * 3


def test_a_member_of_a_fleet_hears_of_jobs_from_another_process(fleet: Fleet) -> None:
    member = fleet.member({"note": 1})
    for n in range(3):
        fleet.enqueue("note", n)
        fleet.wait_for_marks(n + 1, "note")
    member.finish()
    assert [int(n) for _, _, n in fleet.marks("note")] == [0, 1, 2]


async def test_a_worker_is_listed_when_it_has_started(open_file: Open, file: Path) -> None:
    q = await open_file(clock=SystemClock())
    assert q._engine is not None
    assert query(file, "SELECT id FROM tinyq_workers") == [(q._engine.worker,)]


async def test_a_worker_starts_though_it_cannot_be_listed_for_now(open_file: Open, file: Path) -> None:
    async with TinyQ(file, worker=False):
        pass
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        q = await open_file(clock=SystemClock())
        assert q._engine is not None
        assert db.execute("SELECT id FROM tinyq_workers").fetchall() == []
        db.execute("ROLLBACK")
    name = q._engine.worker
    await eventually(lambda: query(file, "SELECT id FROM tinyq_workers") == [(name,)])


def pulses() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tinyq-pulse"]


async def test_a_start_that_is_given_up_leaves_no_thread_and_no_connection(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with TinyQ(file, worker=False):
        pass
    monkeypatch.setattr(tinyq, "PULSE_PATIENCE", NEVER)
    open_before = len(tinyq._open)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        q = TinyQ(file)
        starting = asyncio.create_task(q.start())
        await eventually(lambda: bool(pulses()))
        starting.cancel()
        await asyncio.wait([starting], timeout=0.2)
        db.execute("ROLLBACK")
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (pulses(), len(tinyq._open)) == ([], open_before)
    await q.start()
    await q.stop()


@pytest.mark.parametrize("turns", [*range(1, 8), 0.001, 0.003, 0.01, 0.03])
async def test_a_start_that_is_given_up_at_any_moment_leaves_no_connection(file: Path, turns: float) -> None:
    async with TinyQ(file, worker=False):
        pass
    open_before = len(tinyq._open)
    for _ in range(3):
        q = TinyQ(file)
        starting = asyncio.create_task(q.start())
        for _ in range(turns if isinstance(turns, int) else 0):
            await asyncio.sleep(0)
        if not isinstance(turns, int):
            await asyncio.sleep(turns)
        starting.cancel()
        await asyncio.wait([starting])
        await q.stop()
        assert (pulses(), len(tinyq._open)) == ([], open_before)


async def test_a_start_that_is_told_twice_to_give_up_leaves_no_thread_and_no_connection(file: Path) -> None:
    async with TinyQ(file, worker=False):
        pass
    threads_before, open_before = threading.active_count(), len(tinyq._open)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        starting = asyncio.create_task(TinyQ(file).start())
        await eventually(lambda: bool(pulses()))
        starting.cancel()
        await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait([starting])
        db.execute("ROLLBACK")
    assert starting.cancelled()
    await eventually(lambda: (threading.active_count(), len(tinyq._open)) == (threads_before, open_before))
