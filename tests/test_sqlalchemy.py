"""`tx=` with SQLAlchemy's sessions and connections: order and job commit or roll back together."""

import asyncio
import sqlite3
import types
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from helpers import Open, rows
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.ext.asyncio import create_async_engine as async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import tinyq
from tinyq import State, StoreBusy, TinyQ

pytestmark = pytest.mark.timeout(300)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Caller:
    """A session or connection of any of the four kinds, under one set of words."""

    def __init__(self, q: TinyQ, tx: Any, waits: bool, sync: bool = False) -> None:
        self.q, self.tx, self.waits, self.sync = q, tx, waits, sync

    async def do(self, name: str, *arguments: Any) -> Any:
        return await self.answer(getattr(self.tx, name)(*arguments))

    async def answer(self, answer: Any) -> Any:
        return await answer if self.waits else answer

    async def enqueue(self, order: int) -> tinyq.Job[Any]:
        return self.q.enqueue_sync("send", order, tx=self.tx) if self.sync else await self.q.enqueue("send", order, tx=self.tx)

    async def order(self, id: int) -> None:
        """Add an order; in a session it stays pending until the next flush."""
        if isinstance(self.tx, (Session, AsyncSession)):
            self.tx.add(Order(id=id))
        else:
            await self.do("execute", sa.insert(Order).values(id=id))


@pytest.fixture
async def engine(file: Path) -> AsyncIterator[AsyncEngine]:
    made = async_engine(f"sqlite+aiosqlite:///{file}")
    async with made.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield made
    await made.dispose()


@pytest.fixture
async def plain_engine(engine: AsyncEngine) -> AsyncIterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{engine.url.database}")
    yield made
    made.dispose()


KINDS = ["AsyncSession", "AsyncConnection", "Session", "Connection", "Session, enqueue_sync", "Connection, enqueue_sync"]


@pytest.fixture(params=KINDS)
async def caller(request: pytest.FixtureRequest, engine: AsyncEngine, plain_engine: sa.Engine, q: TinyQ) -> AsyncIterator[Caller]:
    kind, _, sync = request.param.partition(", ")
    if kind == "AsyncSession":
        async with AsyncSession(engine) as session:
            yield Caller(q, session, True)
    elif kind == "AsyncConnection":
        async with engine.connect() as connection:
            yield Caller(q, connection, True)
    elif kind == "Session":
        with Session(plain_engine) as plain_session:
            yield Caller(q, plain_session, False, bool(sync))
    else:
        with plain_engine.connect() as plain_connection:
            yield Caller(q, plain_connection, False, bool(sync))


@pytest.fixture
async def q(open_file: Open) -> TinyQ:
    """It claims nothing, so that jobs stay where a test looks for them."""
    return await open_file(worker=False)


def stored(file: Path) -> tuple[list[int], list[str]]:
    """The committed orders, and the payloads of the committed jobs."""
    with closing(sqlite3.connect(file, timeout=10)) as db:
        orders = [id for (id,) in db.execute("SELECT id FROM orders ORDER BY id")]
    return orders, [payload for (payload,) in rows(file, "payload")]


# committed or not


async def test_order_and_job_commit_together(caller: Caller, file: Path) -> None:
    await caller.order(7)
    job = await caller.enqueue(7)
    assert stored(file) == ([], [])
    await caller.do("commit")
    assert stored(file) == ([7], ["[[7],{}]"])
    assert (job.status, job.durable, job.created) == (State.PENDING, True, True)


async def test_order_and_job_roll_back_together(caller: Caller, file: Path) -> None:
    await caller.order(7)
    job = await caller.enqueue(7)
    await caller.do("rollback")
    await caller.do("commit")
    assert stored(file) == ([], [])
    assert not await job.exists()


async def test_a_job_that_comes_first_begins_the_transaction(caller: Caller, file: Path) -> None:
    for _ in range(2):
        await caller.enqueue(7)
        assert caller.tx.in_transaction()
        await caller.do("rollback")
    await caller.enqueue(8)
    await caller.order(8)
    await caller.do("commit")
    assert stored(file) == ([8], ["[[8],{}]"])


async def test_a_session_that_is_closed_takes_the_job_along(caller: Caller, file: Path) -> None:
    await caller.order(7)
    await caller.enqueue(7)
    await caller.do("close")
    assert stored(file) == ([], [])


async def test_a_savepoint_that_is_rolled_back_takes_its_job_along(caller: Caller, file: Path) -> None:
    await caller.order(1)
    await caller.enqueue(1)
    nested = await caller.do("begin_nested")
    await caller.order(2)
    await caller.enqueue(2)
    await caller.answer(nested.rollback())
    await caller.do("commit")
    assert stored(file) == ([1], ["[[1],{}]"])


async def test_a_block_that_begins_a_transaction_commits_the_job(engine: AsyncEngine, q: TinyQ, file: Path) -> None:
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(id=1))
        await q.enqueue("send", 1, tx=session)
    async with engine.begin() as connection:
        await q.enqueue("send", 2, tx=connection)
    with pytest.raises(ZeroDivisionError):
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(id=3))
            await q.enqueue("send", 3, tx=session)
            raise ZeroDivisionError
    assert stored(file) == ([1], ["[[1],{}]", "[[2],{}]"])


async def test_all_ways_of_enqueueing_take_a_session(caller: Caller, q: TinyQ, file: Path) -> None:
    async def send(order: int) -> None: ...

    task = q.task(name="send")(send)
    await q.enqueue(task, 1, tx=caller.tx)
    await task.options(tx=caller.tx).enqueue(2)
    await q.enqueue_many([(task, (3,)), ("elsewhere", (4,))], tx=caller.tx)
    assert stored(file) == ([], [])
    await caller.do("commit")
    assert stored(file)[1] == [f"[[{n}],{{}}]" for n in (1, 2, 3, 4)]


async def test_a_scoped_session_stands_for_the_session_of_its_scope(
    engine: AsyncEngine, plain_engine: sa.Engine, q: TinyQ, file: Path
) -> None:
    plain = scoped_session(sessionmaker(plain_engine))
    q.enqueue_sync("send", 1, tx=plain)
    plain.commit()
    plain.remove()
    scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
    await q.enqueue("send", 2, tx=scoped)
    await scoped.commit()
    await scoped.remove()
    assert stored(file) == ([], ["[[1],{}]", "[[2],{}]"])


async def test_the_job_runs_after_the_commit(open_file: Open, engine: AsyncEngine) -> None:
    q = await open_file()

    @q.task(name="double")
    async def double(n: int) -> int:
        return 2 * n

    async with AsyncSession(engine) as session:
        job = await q.enqueue(double, 21, tx=session, result_ttl=60)
        await session.commit()
    async with asyncio.timeout(20):
        assert await job.result() == 42


async def test_the_usual_recipe_for_savepoints_of_sqlite_works(plain_engine: sa.Engine, q: TinyQ, file: Path) -> None:
    """Where the application has the driver begin nothing, and says BEGIN itself."""

    def connect(connection: Any, _: object) -> None:
        connection.isolation_level = None

    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    sa.event.listen(plain_engine, "connect", connect)
    sa.event.listen(plain_engine, "begin", begin)
    plain_engine.dispose()
    with Session(plain_engine) as session:
        with pytest.raises(ZeroDivisionError), session.begin_nested():
            q.enqueue_sync("send", 1, tx=session)
            raise ZeroDivisionError
        q.enqueue_sync("send", 2, tx=session)
        session.commit()
    assert stored(file) == ([], ["[[2],{}]"])


# in a script


def test_without_an_engine_of_tinyq_a_session_takes_the_first_job_of_a_new_file(file: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{file}")
    Base.metadata.create_all(engine)
    q = TinyQ(file)
    with Session(engine) as session, session.begin():
        session.add(Order(id=7))
        q.enqueue_sync("send", 7, tx=session)
    engine.dispose()
    assert stored(file) == ([7], ["[[7],{}]"])


# refused


async def refused(q: TinyQ, tx: Any, match: str, kind: type[Exception] = ValueError) -> None:
    """By both kinds of enqueue."""
    with pytest.raises(kind, match=match):
        await q.enqueue("send", 1, tx=tx)
    if not isinstance(tx, (AsyncSession, AsyncConnection)):
        with pytest.raises(kind, match=match):
            q.enqueue_sync("send", 1, tx=tx)


async def test_a_session_on_another_file_is_refused(q: TinyQ, tmp_path: Path) -> None:
    for url in (f"sqlite+aiosqlite:///{tmp_path / 'other.db'}", "sqlite+aiosqlite://"):
        engine = async_engine(url)
        async with AsyncSession(engine) as session:
            await refused(q, session, "give a connection to that file")
        await engine.dispose()
    plain = sa.create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with Session(plain) as plain_session, plain.connect() as connection:
        await refused(q, plain_session, "give a connection to that file")
        await refused(q, connection, "give a connection to that file")
    plain.dispose()


async def test_a_session_on_another_database_is_refused_before_it_connects(q: TinyQ) -> None:
    driver = types.SimpleNamespace(paramstyle="pyformat", __version__="1.31.0")  # the engine looks at no more of it
    with Session(sa.create_engine("postgresql+pg8000://nowhere/app", module=driver)) as session:
        await refused(q, session, "Session on postgresql, and the jobs are in an SQLite file")
        assert not session.in_transaction()


async def test_what_has_been_closed_is_refused(engine: AsyncEngine, plain_engine: sa.Engine, q: TinyQ) -> None:
    connection, plain = await engine.connect(), plain_engine.connect()
    await connection.close()
    plain.close()
    session = AsyncSession(engine, close_resets_only=False)
    await session.close()
    for tx in (connection, plain, session):
        await refused(q, tx, "cannot be used: .*closed")
    await refused(q, engine.connect(), "AsyncConnection that cannot be used.* await it first")


async def test_a_session_without_a_default_engine_is_refused(engine: AsyncEngine, q: TinyQ, file: Path) -> None:
    async with AsyncSession(binds={Order: engine}) as session:
        await refused(q, session, "pass tx=session.connection")
        connection = await session.connection(bind_arguments={"mapper": Order})
        await q.enqueue("send", 1, tx=connection)
        await session.commit()
    assert stored(file) == ([], ["[[1],{}]"])


async def test_a_session_that_must_be_rolled_back_is_refused(engine: AsyncEngine, q: TinyQ, file: Path) -> None:
    async with AsyncSession(engine) as session:
        session.add(Order(id=1))
        await session.flush()
        session.expunge_all()
        session.add(Order(id=1))
        with pytest.raises(sa.exc.IntegrityError):
            await session.flush()
        await refused(q, session, "has been rolled back due to a previous exception")
        await session.rollback()
        await q.enqueue("send", 1, tx=session)
        await session.commit()
    assert stored(file) == ([], ["[[1],{}]"])


async def test_a_connection_that_commits_each_statement_is_refused(plain_engine: sa.Engine, q: TinyQ, file: Path) -> None:
    with plain_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        await refused(q, connection, "no open transaction.*AUTOCOMMIT")
    assert stored(file) == ([], [])


async def test_a_session_that_needs_an_event_loop_is_refused_without_one(engine: AsyncEngine, q: TinyQ, file: Path) -> None:
    async with AsyncSession(engine) as session, engine.connect() as connection:
        for tx in (session, connection):
            with pytest.raises(TypeError, match="await enqueue"):
                q.enqueue_sync("send", 1, tx=tx)
        with pytest.raises(TypeError, match="await enqueue"):
            await session.run_sync(lambda plain: q.enqueue_sync("send", 1, tx=plain))
    assert stored(file) == ([], [])


async def test_what_is_no_session_is_refused(engine: AsyncEngine, plain_engine: sa.Engine, q: TinyQ) -> None:
    for tx in (engine, plain_engine, sessionmaker(plain_engine), async_sessionmaker(engine)):
        await refused(q, tx, "give a sqlite3.Connection, an aiosqlite.Connection, or SQLAlchemy's Session", TypeError)


async def test_a_locked_file_is_reported_as_on_any_connection(q: TinyQ, file: Path) -> None:
    engine = async_engine(f"sqlite+aiosqlite:///{file}", connect_args={"timeout": 0.05})
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with AsyncSession(engine) as session:
            await refused(q, session, "stayed locked for longer than your connection waits", StoreBusy)
    await engine.dispose()


async def test_what_the_applications_own_hook_fails_with_is_reported_too(plain_engine: sa.Engine, q: TinyQ, file: Path) -> None:
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA busy_timeout = 20")
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sa.event.listen(plain_engine, "begin", begin)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with Session(plain_engine) as session:
            await refused(q, session, "stayed locked", StoreBusy)


def test_sqlalchemy_is_not_imported_for_those_who_do_not_have_it() -> None:
    assert not tinyq.is_a(object(), ("no.such.module", "Session"))
