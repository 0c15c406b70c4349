"""FastAPI's own `Depends` on the parameters of a handler."""

# ruff: noqa: B008  a Depends stands where a default does

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import pytest
from clock import FakeClock
from fastapi import BackgroundTasks, Depends, FastAPI, Header, Query, Request, Response, Security, WebSocket
from fastapi.security import OAuth2PasswordBearer, SecurityScopes
from helpers import Open, eventually, rows

import tinyq
from tinyq import Snooze, State, TinyQ

pytestmark = pytest.mark.timeout(300)


class Session:
    """What a SQLAlchemy AsyncSession is to a service."""

    def __init__(self) -> None:
        self.events: list[str] = []


@pytest.fixture
def opened() -> list[Session]:
    return []


@pytest.fixture
def get_session(opened: list[Session]) -> Callable[[], AsyncIterator[Session]]:
    async def get_session() -> AsyncIterator[Session]:
        session = Session()
        opened.append(session)
        try:
            yield session
        except BaseException as error:
            session.events.append(f"rolled back: {type(error).__name__}")
            raise
        else:
            session.events.append("committed")
        finally:
            session.events.append("closed")

    return get_session


async def run(q: TinyQ, fn: Callable[..., Any], *args: Any, durable: bool, **options: Any) -> Any:
    """The result of a job."""
    options.setdefault("retry", False)
    task = q.task(name="the task", replace=True)(fn)
    return await (await q.enqueue(task, *args, durable=durable, **options)).result(10)


async def test_a_generator_is_open_for_the_handler_and_closed_after_it(
    q: TinyQ, durable: bool, opened: list[Session], get_session: Any
) -> None:
    async def use(number: int, session: Session = Depends(get_session)) -> int:
        session.events.append(f"used for {number}")
        return number

    assert await run(q, use, 7, durable=durable) == 7
    assert [session.events for session in opened] == [["used for 7", "committed", "closed"]]


async def test_inside_of_annotated_and_at_any_place(q: TinyQ, durable: bool) -> None:
    def first() -> str:
        return "1st"

    async def use(
        one: Annotated[str, Depends(first)], number: int, two: Annotated[str, Depends(lambda: "2nd")], *more: int, word: str
    ) -> list[Any]:
        return [one, number, two, more, word]

    def use_positions(one: Annotated[str, Depends(first)], number: int, /, other: int = 5) -> list[Any]:
        return [one, number, other]

    task: Any = q.task(use)
    job = await q.enqueue(task, 7, 8, 9, durable=durable, word="w")
    assert await job.result() == ["1st", 7, "2nd", (8, 9), "w"]
    assert await run(q, use_positions, 7, durable=durable) == ["1st", 7, 5]
    assert await run(q, use_positions, 7, 8, durable=durable) == ["1st", 7, 8]


async def test_an_annotation_may_be_text(q: TinyQ, durable: bool) -> None:
    scope: dict[str, Any] = {"Annotated": Annotated, "Depends": Depends, "get": lambda: "got"}
    exec("async def use(it: 'Annotated[str, Depends(get)]', other: 'Unknown' = 1): return it, other", scope)
    assert await run(q, scope["use"], durable=durable) == ("got", 1)


def plain_function() -> str:
    return f"plain in {threading.current_thread().name[:6]}"


async def coroutine_function() -> str:
    return f"coroutine in {threading.current_thread().name[:4]}"


def generator() -> Iterator[str]:
    yield f"generator in {threading.current_thread().name[:6]}"


async def async_generator() -> AsyncIterator[str]:
    yield f"async generator in {threading.current_thread().name[:4]}"


class Made:
    def __init__(self, part: str = Depends(plain_function)) -> None:
        self.part = part

    def __str__(self) -> str:
        return f"made of {self.part}"


class Callables:
    def __call__(self) -> str:
        return "called"

    async def method(self) -> str:
        return "method"


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        (plain_function, "plain in tinyq-"),
        (coroutine_function, "coroutine in Main"),
        (generator, "generator in tinyq-"),
        (async_generator, "async generator in Main"),
        (functools.partial(str, "of a partial"), "of a partial"),
        (functools.partial(lambda *parts: "".join(parts), "a", "b"), "ab"),
        (Made, "made of plain in tinyq-"),
        (Callables(), "called"),
        (Callables().method, "method"),
    ],
)
@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_every_kind_of_dependency(q: TinyQ, durable: bool, dependency: Any, expected: str, kind: str) -> None:
    async def use(it: object = Depends(dependency)) -> str:
        return str(it)

    def use_in_thread(it: object = Depends(dependency)) -> str:
        return str(it)

    assert await run(q, use if kind == "async" else use_in_thread, durable=durable) == expected


async def test_without_a_dependency_the_annotation_is_called(q: TinyQ, durable: bool) -> None:
    async def use(made: Annotated[Made, Depends()], again: Made = Depends()) -> bool:
        return isinstance(made, Made) and made is again

    assert await run(q, use, durable=durable)


async def test_a_dependency_is_called_once_for_a_job_unless_it_says_otherwise(q: TinyQ, durable: bool) -> None:
    calls: list[str] = []

    async def base() -> int:
        calls.append("base")
        return len(calls)

    async def left(number: int = Depends(base)) -> int:
        return number

    async def right(number: int = Depends(base), limit: int = 10) -> int:
        return number

    async def use(
        a: int = Depends(left), b: int = Depends(right), c: int = Depends(base), d: int = Depends(base, use_cache=False)
    ) -> list[int]:
        return [a, b, c, d]

    assert await run(q, use, durable=durable) == [1, 1, 1, 2]
    assert await run(q, use, durable=durable) == [3, 3, 3, 4]


async def test_what_was_opened_last_is_closed_first(q: TinyQ, durable: bool) -> None:
    events: list[str] = []

    async def engine() -> AsyncIterator[str]:
        yield "engine"
        events.append("engine closed")

    def session(of: str = Depends(engine)) -> Iterator[str]:
        yield f"session of {of}"
        events.append("session closed")

    @q.middleware
    async def note(job: tinyq.CurrentJob, call_next: Any) -> Any:
        result = await call_next(job)
        events.append("middleware out")
        return result

    async def use(it: str = Depends(session)) -> str:
        events.append("used")
        return it

    assert await run(q, use, durable=durable) == "session of engine"
    assert events == ["used", "session closed", "engine closed", "middleware out"]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_the_error_of_the_handler_is_thrown_into_generators(
    q: TinyQ, durable: bool, opened: list[Session], get_session: Any, kind: str
) -> None:
    caught: list[BaseException] = []
    failure = OSError("down")

    def in_thread() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            caught.append(error)
            raise

    async def fail(session: Session = Depends(get_session), other: None = Depends(in_thread)) -> None:
        raise failure

    def fail_in_thread(session: Session = Depends(get_session), other: None = Depends(in_thread)) -> None:
        raise failure

    with pytest.raises(tinyq.JobFailed, match="OSError: down"):
        await run(q, fail if kind == "async" else fail_in_thread, durable=durable)
    assert opened[0].events == ["rolled back: OSError", "closed"]
    assert caught == [failure]


async def test_a_generator_that_swallows_the_error_makes_no_success_of_it(q: TinyQ, durable: bool) -> None:
    async def swallow() -> AsyncIterator[None]:
        with contextlib.suppress(OSError):
            yield

    async def fail(it: None = Depends(swallow)) -> None:
        raise OSError("down")

    with pytest.raises(tinyq.JobFailed, match="OSError: down"):
        await run(q, fail, durable=durable)


async def test_a_generator_may_raise_an_error_of_its_own(q: TinyQ, durable: bool) -> None:
    async def commit() -> AsyncIterator[None]:
        yield
        raise ConnectionError("the commit failed")

    async def use(it: None = Depends(commit)) -> str:
        return "all well so far"

    with pytest.raises(tinyq.JobFailed, match="ConnectionError: the commit failed"):
        await run(q, use, durable=durable)


async def test_a_stopiteration_of_a_plain_function_stays_one(
    q: TinyQ, durable: bool, opened: list[Session], get_session: Any
) -> None:
    def last(session: Session = Depends(get_session)) -> None:
        raise StopIteration("nothing left")

    with pytest.raises(tinyq.JobFailed, match=r"^StopIteration: nothing left$"):
        await run(q, last, durable=durable)
    assert opened[0].events[-1] == "closed"


async def test_a_snooze_passes_through_and_each_attempt_has_its_own(
    open_q: Open, clock: FakeClock, durable: bool, opened: list[Session], get_session: Any
) -> None:
    q = await open_q()

    @q.task(retry=[1])
    async def work(session: Session = Depends(get_session)) -> None:
        if len(opened) == 1:
            raise Snooze(1)
        if len(opened) == 2:
            raise OSError

    job = await work.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DONE, clock)
    assert [session.events[0] for session in opened] == ["rolled back: Snooze", "rolled back: OSError", "committed"]
    assert job.attempts == 2


async def test_a_dependency_that_fails_is_a_failed_attempt(
    open_q: Open, clock: FakeClock, durable: bool, opened: list[Session], get_session: Any
) -> None:
    q = await open_q()
    calls: list[int] = []

    def flaky() -> int:
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError("not yet")
        return 7

    @q.task(retry=[1])
    async def work(session: Session = Depends(get_session), it: int = Depends(flaky)) -> int:
        return it

    job = await work.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DONE, clock)
    assert (await job.result(), job.attempts) == (7, 2)
    assert [session.events[0] for session in opened] == ["rolled back: OSError", "committed"]


async def test_a_timeout_closes_what_is_open(
    open_q: Open, clock: FakeClock, durable: bool, opened: list[Session], get_session: Any
) -> None:
    q = await open_q()

    @q.task(retry=False, timeout=1)
    async def stuck(session: Session = Depends(get_session)) -> None:
        await asyncio.Event().wait()

    job = await stuck.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DEAD, clock)
    assert job.error == "TimeoutError: timed out after 1 s"
    assert opened[0].events == ["rolled back: CancelledError", "closed"]


async def test_told_to_stop_while_a_dependency_is_in_its_thread_the_handler_does_not_begin(q: TinyQ, durable: bool) -> None:
    inside, go_on, events = threading.Event(), threading.Event(), list[str]()

    def slow() -> Iterator[None]:
        inside.set()
        go_on.wait(20)
        yield
        events.append("closed")

    def closing() -> Iterator[None]:
        try:
            yield
        finally:
            events.append("closed")

    @q.task
    async def work(first: None = Depends(closing), it: None = Depends(slow)) -> None:
        events.append("begun")

    job = await work.options(durable=durable).enqueue()
    await eventually(inside.is_set)
    cancelling = asyncio.create_task(job.cancel())
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(10):
        assert await cancelling
    assert events == ["closed"]


async def test_a_context_variable_may_be_reset_where_it_was_set(q: TinyQ, durable: bool) -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    def as_user() -> Iterator[None]:
        token = user.set("batch")
        yield
        user.reset(token)

    async def work(it: None = Depends(as_user)) -> str:
        return "done"

    assert await run(q, work, durable=durable) == "done"


async def test_overrides_of_the_application_hold(durable: bool, tmp_path: Any) -> None:
    app, q = FastAPI(), TinyQ(tmp_path / "jobs.db")

    def settings() -> dict[str, str]:
        return {"mail": "smtp"}

    async def mailer(of: dict[str, str] = Depends(settings)) -> str:
        return of["mail"]

    @q.task(retry=False)
    async def send(by: str = Depends(mailer)) -> str:
        return by

    async def closed() -> AsyncIterator[str]:
        yield "an override"

    async def on_its_own(of: dict[str, str] = Depends(settings)) -> str:
        return f"an override with {of['mail']}"

    async def of_request(request: Request) -> str:
        return request.url.path

    async with asyncio.timeout(20), q.lifespan(app):

        async def ask() -> str:
            return await (await send.options(durable=durable).enqueue()).result()

        assert await ask() == "smtp"
        app.dependency_overrides[settings] = lambda: {"mail": "none"}
        assert await ask() == "none"
        app.dependency_overrides[mailer] = closed
        assert await ask() == "an override"
        app.dependency_overrides[mailer] = on_its_own
        assert await ask() == "an override with none"
        app.dependency_overrides[mailer] = of_request
        with pytest.raises(tinyq.JobFailed, match="belongs to a request"):
            await ask()


# what callers give


async def test_a_dependency_is_not_for_callers(q: TinyQ, durable: bool, get_session: Any, file: Any) -> None:
    @q.task
    async def use(number: int, session: Session = Depends(get_session)) -> None:
        pass

    for wrong in (Session(), None):
        with pytest.raises(TypeError, match="session is not for callers: its Depends fills it in"):
            await use.options(durable=durable).enqueue(1, session=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="too many positional arguments"):
        await use.options(durable=durable).enqueue(1, Session())
    with pytest.raises(TypeError, match="missing a required argument: 'number'"):
        await use.options(durable=durable).enqueue()  # type: ignore[call-arg]
    if durable:
        assert rows(file, "id") == []


async def test_a_keyword_of_its_name_is_refused_beside_any_others(q: TinyQ, durable: bool, get_session: Any) -> None:
    async def use(session: Session = Depends(get_session), **others: int) -> dict[str, int]:
        return others

    task: Any = q.task(use)
    with pytest.raises(TypeError, match="session is not for callers"):
        await q.enqueue(task, durable=durable, session=1)
    assert await (await q.enqueue(task, durable=durable, a=1)).result() == {"a": 1}


async def test_the_direct_call_is_a_plain_call(get_session: Any) -> None:
    @TinyQ().task
    async def use(number: int, session: Any = Depends(get_session)) -> Any:
        return number, session

    assert await use(1, session="mine") == (1, "mine")
    assert inspect.signature(use).parameters.keys() == {"number", "session"}


async def test_a_bare_callable_has_its_dependencies_too(opened: list[Session], get_session: Any) -> None:
    async def use(number: int, session: Session = Depends(get_session)) -> int:
        return number

    async with asyncio.timeout(10), TinyQ() as q:
        assert await (await q.enqueue(use, 3)).result() == 3
        assert await (await q.enqueue(functools.partial(use, 4))).result() == 4
    assert [session.events for session in opened] == [["committed", "closed"]] * 2


async def test_a_schedule_takes_a_function_whose_parameters_are_all_filled_in(open_q: Open, clock: FakeClock) -> None:
    q, seen = await open_q(), list[str]()

    @q.every(1)
    async def tick(it: Annotated[str, Depends(lambda: "it")]) -> None:
        seen.append(it)

    await eventually(lambda: seen, clock)
    assert seen[0] == "it"


# what belongs to a request

scheme = OAuth2PasswordBearer("token")


async def of_request(request: Request) -> None: ...
async def of_a_query(page: int = Query(1)) -> None: ...
async def of_a_header(agent: Annotated[str, Header()]) -> None: ...
async def of_a_parameter(page: int) -> None: ...
async def of_scopes(scopes: SecurityScopes) -> None: ...
async def deeper(it: None = Depends(of_request)) -> None: ...


@pytest.mark.parametrize(
    ("dependency", "named"),
    [
        (of_request, r"it: request \(Request\) belongs to a request"),
        (deeper, r"it: it: request \(Request\) belongs to a request"),
        (scheme, r"it: request \((Request|HTTPConnection)\) belongs to a request"),
        (of_a_query, r"it: page \(int\) belongs to a request"),
        (of_a_header, "it: agent has no default and no Depends"),
        (of_a_parameter, "it: page has no default and no Depends"),
        (of_scopes, r"it: scopes \(SecurityScopes\) belongs to a request"),
    ],
)
@pytest.mark.parametrize("marker", [Depends, Security])
def test_a_dependency_of_a_request_is_refused_at_registration(marker: Any, dependency: Any, named: str) -> None:
    async def work(it: Any = marker(dependency)) -> None: ...

    with pytest.raises(TypeError, match=rf"task '.*work': {named}"):
        TinyQ().task(work)


@pytest.mark.parametrize("kind", [Request, WebSocket, Response, BackgroundTasks])
def test_a_task_takes_nothing_that_belongs_to_a_request(kind: Any) -> None:
    async def work(order: int, it: kind) -> None: ...

    with pytest.raises(TypeError, match=rf"it \({kind.__name__}\) belongs to a request, which is over when the job runs: take"):
        TinyQ().task(work)


async def test_what_is_no_dependency_is_refused() -> None:
    async def work(it: Any = Depends(7)) -> None:  # type: ignore[arg-type]
        pass

    with pytest.raises(TypeError, match="it depends on 7, which is not callable"):
        TinyQ().task(work)
    with pytest.raises(TypeError, match=r"on_dead\(\) takes a function of the dead Job"):
        TinyQ().on_dead(lambda job, it=Depends(generator): None)


def in_a_process(it: Annotated[str, Depends(plain_function)]) -> str:
    return it


def test_a_process_of_its_own_is_given_no_dependencies() -> None:
    with pytest.raises(TypeError, match="run_in='process' leaves no way for it: what a Depends gives stays in this process"):
        TinyQ().task(run_in="process")(in_a_process)


async def test_a_session_that_depends_is_no_argument_of_a_durable_job(q: TinyQ, durable: bool) -> None:
    """One that were passed would be refused, or warned about."""
    pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    engine = create_async_engine("sqlite+aiosqlite://")

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session

    async def read(number: int, session: AsyncSession = Depends(get_session)) -> Any:
        return (await session.connection()).dialect.name, number

    try:
        assert await run(q, read, 7, durable=durable) == ("sqlite", 7)
    finally:
        await engine.dispose()


def test_under_test_overrides_middleware_hooks_and_progress_are_there_as_well() -> None:
    app, q, seen = FastAPI(), TinyQ(), list[object]()
    app.dependency_overrides[plain_function] = lambda: "instead"
    q.on_enqueue(lambda headers: headers.update(by="hook"))

    @q.middleware
    async def note(job: tinyq.CurrentJob, call_next: Any) -> Any:
        seen.append(job.headers)
        return await call_next(job)

    @q.task(durable=True)
    async def work(it: str = Depends(plain_function)) -> None:
        await tinyq.current_job().progress(0.5)
        seen.append((it, tinyq.current_job().app is app))

    async def serve() -> None:
        async with q.lifespan(app):
            job = await work.enqueue()
            await jobs.adrain()
            seen.append(job.progress)

    with q.testing() as jobs:
        asyncio.run(serve())
    assert seen == [{"by": "hook"}, ("instead", True), (0.5, None)]
