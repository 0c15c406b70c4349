"""The functions of the module over their one TinyQ, and starting and stopping any TinyQ more than once.

A test takes a copy of the module of its own, and so a default instance that nobody has configured yet.
"""

import asyncio
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from servers import ROOT, Server, wait_until

import tinyq as installed

VARIABLES = ("TINYQ_DB", "TINYQ_WORKER", "TINYQ_GRACE")


@pytest.fixture
def tinyq(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the module that no other test has used, in an environment that says nothing."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("tinyq_copy", installed.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tinyq_copy", module)
    spec.loader.exec_module(module)
    return module


def jobs(path: Path) -> list[Any]:
    """The tasks and states of the jobs that are stored in a file."""
    db = sqlite3.connect(path)
    try:
        return db.execute("SELECT task, state FROM tinyq_jobs ORDER BY seq").fetchall()
    finally:
        db.close()


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def uses(tinyq: Any, path: Path | None) -> bool:
    """Whether the default instance, which runs, has this database (None: has none)."""
    if path is None:
        with pytest.raises(tinyq.ConfigurationError, match="needs a database"):
            await tinyq.enqueue("elsewhere", durable=True)
        return True
    await tinyq.enqueue("elsewhere", durable=True)
    return bool(jobs(path)[-1] == ("elsewhere", "pending"))


# one instance behind the functions


async def test_the_functions_of_the_module_work_on_one_instance(tinyq: Any, tmp_path: Path) -> None:
    ran: list[object] = []

    @tinyq.task(name="note")  # type: ignore[untyped-decorator]
    async def note(value: object) -> object:
        ran.append(value)
        return value

    @tinyq.every(3600, name="hourly")  # type: ignore[untyped-decorator]
    async def hourly() -> None: ...

    tinyq.configure(db=tmp_path / "jobs.db")
    await tinyq.start()
    async with asyncio.timeout(20):
        assert await (await tinyq.enqueue(note, 1)).result() == 1
        assert await (await tinyq.enqueue("note", 2, durable=True)).result() == 2
        assert [await job.result() for job in await tinyq.enqueue_many([(note, (3,)), (note, (4,))])] == [3, 4]
        await tinyq.spawn(note(5))
        kept = await note.options(delay=3600, durable=True).enqueue(6)
        assert (await tinyq.get(kept.id)).status is tinyq.State.PENDING
        assert await kept.cancel()
        assert await tinyq.requeue(kept.id) == 1
        await tinyq.drain()
        await tinyq.quiesce()
        assert [schedule.name for schedule in (await tinyq.stats()).schedules] == ["hourly"]
        await tinyq.stop()
    assert sorted(map(int, map(str, ran))) == [1, 2, 3, 4, 5, 6]


async def test_lifespan_works_without_an_app_and_yields_the_instance(tinyq: Any, tmp_path: Path) -> None:
    async with tinyq.lifespan(db=tmp_path / "jobs.db") as state, asyncio.timeout(10):
        assert isinstance(state, Mapping)
        assert list(state) == ["tinyq"]
        assert isinstance(state["tinyq"], tinyq.TinyQ)
        job = await state["tinyq"].enqueue("elsewhere", durable=True)
        assert (await tinyq.get(job.id)).id == job.id


def test_nothing_happens_when_the_module_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINYQ_DB", str(tmp_path / "jobs.db"))
    monkeypatch.setenv("TINYQ_WORKER", "nonsense")
    program = "import tinyq, threading; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert entries(tmp_path) == []


# configuration


async def test_options_of_lifespan_configure_the_default_instance(tinyq: Any, tmp_path: Path) -> None:
    async with tinyq.lifespan(None, db=tmp_path / "jobs.db", worker=False):
        assert await uses(tinyq, tmp_path / "jobs.db")


async def test_configure_and_then_lifespan_without_options(tinyq: Any, tmp_path: Path) -> None:
    tinyq.configure(db=tmp_path / "jobs.db")
    async with tinyq.lifespan():
        assert await uses(tinyq, tmp_path / "jobs.db")


def test_configure_opens_nothing(tinyq: Any, tmp_path: Path) -> None:
    tinyq.configure(db=tmp_path / "jobs.db")
    assert entries(tmp_path) == []


async def test_saying_the_same_twice_is_no_conflict(tinyq: Any, tmp_path: Path) -> None:
    tinyq.configure(db=tmp_path / "jobs.db", concurrency=5)
    tinyq.configure(concurrency=5)
    async with tinyq.lifespan(db=tmp_path / "jobs.db"):
        assert await uses(tinyq, tmp_path / "jobs.db")


async def test_saying_something_else_before_the_first_start_is_a_conflict(tinyq: Any, tmp_path: Path) -> None:
    tinyq.configure(db=tmp_path / "one.db", grace=5)
    with pytest.raises(tinyq.ConfigurationError, match=r"db was set to .*one\.db.*two\.db.*in one place"):
        tinyq.configure(db=tmp_path / "two.db")
    with pytest.raises(tinyq.ConfigurationError, match="grace was set to 5 before and is to be 6 now"):
        async with tinyq.lifespan(grace=6):
            pass
    async with tinyq.lifespan():
        assert await uses(tinyq, tmp_path / "one.db")


async def test_a_conflict_changes_nothing(tinyq: Any, tmp_path: Path) -> None:
    tinyq.configure(grace=5)
    with pytest.raises(tinyq.ConfigurationError):
        tinyq.configure(db=tmp_path / "jobs.db", grace=6)
    with pytest.raises(ValueError, match="concurrency"):
        tinyq.configure(db=tmp_path / "jobs.db", concurrency=0)
    async with tinyq.lifespan():
        assert await uses(tinyq, None)


async def test_configure_while_it_runs_is_refused(tinyq: Any, tmp_path: Path) -> None:
    async with tinyq.lifespan():
        with pytest.raises(tinyq.AlreadyStarted, match="before its lifespan begins"):
            tinyq.configure(db=tmp_path / "jobs.db")
        assert await uses(tinyq, None)


async def test_new_options_apply_after_a_stop(tinyq: Any, tmp_path: Path) -> None:
    for name in ("one.db", "two.db", "three.db"):
        async with tinyq.lifespan(db=tmp_path / name):
            assert await uses(tinyq, tmp_path / name)
    tinyq.configure(db=tmp_path / "four.db")
    async with tinyq.lifespan():
        assert await uses(tinyq, tmp_path / "four.db")
    assert [len(jobs(tmp_path / f"{name}.db")) for name in ("one", "two", "three", "four")] == [1, 1, 1, 1]


async def test_the_default_instance_is_configured_by_the_environment(
    tinyq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYQ_DB", str(tmp_path / "jobs.db"))
    async with tinyq.lifespan():
        assert await uses(tinyq, tmp_path / "jobs.db")


async def test_what_the_code_says_wins_over_the_environment(tinyq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYQ_DB", str(tmp_path / "env.db"))
    async with tinyq.lifespan(db=tmp_path / "code.db"):
        assert await uses(tinyq, tmp_path / "code.db")
    assert not (tmp_path / "env.db").exists()


async def test_an_instance_of_ones_own_ignores_the_environment(
    tinyq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYQ_DB", str(tmp_path / "jobs.db"))
    monkeypatch.setenv("TINYQ_GRACE", "nonsense")
    async with tinyq.TinyQ() as q:
        with pytest.raises(tinyq.ConfigurationError):
            await q.enqueue("elsewhere", durable=True)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(("value", "claims"), [("0", False), ("no", False), ("false", False), ("1", True), ("yes", True)])
async def test_the_environment_says_whether_durable_jobs_are_claimed(
    tinyq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, claims: bool
) -> None:
    monkeypatch.setenv("TINYQ_WORKER", value)
    ran: list[bool] = []

    @tinyq.task(name="note")  # type: ignore[untyped-decorator]
    async def note(stored: bool) -> None:
        ran.append(stored)

    async with tinyq.lifespan(db=tmp_path / "jobs.db"), asyncio.timeout(20):
        await tinyq.enqueue(note, True, durable=True)
        await (await tinyq.enqueue(note, False)).result()
        await tinyq.drain()
    assert sorted(ran) == ([False, True] if claims else [False])
    assert len(jobs(tmp_path / "jobs.db")) == (not claims)


async def test_the_environment_says_how_long_the_grace_is(tinyq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYQ_GRACE", "0")
    begun = asyncio.Event()
    ended: list[str] = []

    async def stay() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with asyncio.timeout(10):  # the default grace is as long
        async with tinyq.lifespan():
            await tinyq.enqueue(stay)
            await begun.wait()
    assert ended == ["cancelled"]


# start and stop


@pytest.fixture(params=["default", "own"])
def q(request: pytest.FixtureRequest, tinyq: Any, tmp_path: Path) -> Any:
    """The default instance, as the module, and one of one's own: both over a file."""
    if request.param == "own":
        return tinyq.TinyQ(tmp_path / "jobs.db")
    tinyq.configure(db=tmp_path / "jobs.db")
    return tinyq


async def test_a_second_start_is_refused_and_the_first_goes_on(tinyq: Any, q: Any) -> None:
    async with q.lifespan(), asyncio.timeout(10):
        with pytest.raises(tinyq.AlreadyStarted, match="runs already"):
            await q.start()
        with pytest.raises(tinyq.AlreadyStarted):
            async with q.lifespan():
                pass
        assert (await q.stats()).counts == ()
        assert (await q.enqueue("elsewhere", durable=True)).created


async def test_of_two_starts_at_once_one_is_refused(tinyq: Any, q: Any) -> None:
    async with asyncio.timeout(10):
        answers = await asyncio.gather(q.start(), q.start(), return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["AlreadyStarted", "NoneType"]
        assert (await q.stats()).counts == ()
        await q.stop()


async def test_a_second_lifespan_with_options_is_refused_while_the_first_runs(tinyq: Any, tmp_path: Path) -> None:
    async with tinyq.lifespan():
        with pytest.raises(tinyq.AlreadyStarted):
            async with tinyq.lifespan(db=tmp_path / "jobs.db"):
                pass
        assert await uses(tinyq, None)


async def test_stop_is_idempotent(tinyq: Any, q: Any) -> None:
    async with asyncio.timeout(20):
        await q.stop()  # never started
        await q.start()
        await q.stop()
        await q.stop()
        await q.start()
        await asyncio.gather(q.stop(), q.stop(), q.stop())
        await q.stop(grace=0)
        with pytest.raises(tinyq.ShuttingDown):
            await q.stats()


async def test_stop_before_the_first_start_does_not_count_as_one(tinyq: Any, q: Any) -> None:
    await q.stop()
    with pytest.raises(tinyq.NotStarted, match="has not been started"):
        await q.stats()


async def test_a_start_that_fails_leaves_nothing_started(tinyq: Any, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "jobs.db"
    with pytest.raises(tinyq.StoreError):
        async with tinyq.lifespan(db=path):
            pass
    with pytest.raises(tinyq.NotStarted):
        await tinyq.stats()
    path.parent.mkdir()
    async with tinyq.lifespan(db=path):
        assert await uses(tinyq, path)


async def test_the_body_of_a_lifespan_may_fail_and_it_stops_all_the_same(tinyq: Any, q: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with q.lifespan():
            raise ZeroDivisionError
    with pytest.raises(tinyq.ShuttingDown):
        await q.stats()


async def test_started_and_stopped_three_times_it_leaves_no_task_and_no_thread(tinyq: Any, q: Any) -> None:
    def in_thread() -> str:
        return threading.current_thread().name

    task = q.task(name="thread")(in_thread)
    q.every(3600, name="hourly")(in_thread)
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    async with asyncio.timeout(60):
        for _ in range(4):
            async with q.lifespan():
                assert (await (await task.enqueue()).result()) not in {thread.name for thread in threads}
                await (await task.options(durable=True).enqueue()).result()
                await q.spawn(asyncio.sleep(0))
            assert asyncio.all_tasks() == tasks
            assert set(threading.enumerate()) <= threads  # one of an earlier test may have ended meanwhile


async def test_a_schedule_fires_once_per_fire_time_after_any_number_of_starts(tinyq: Any, clock: FakeClock) -> None:
    fired: list[str] = []
    q = tinyq.TinyQ(clock=clock)

    @q.every(60, name="minutely")  # type: ignore[untyped-decorator]
    async def minutely() -> None:
        fired.append(f"{tinyq.current_job().fire_time:%H:%M:%S}")

    for _ in range(4):
        async with q:
            await clock.advance(150)
    assert fired == ["12:01:00", "12:02:00", "12:03:00", "12:04:00", "12:05:00", "12:06:00", "12:07:00", "12:08:00", "12:09:00",
                     "12:10:00"]  # fmt: skip


def test_it_can_be_started_again_in_another_event_loop(q: Any) -> None:
    async def once() -> Any:
        async with q.lifespan(), asyncio.timeout(20):
            first = await (await q.enqueue(answer)).result()
            return first, await (await task.options(durable=True).enqueue()).result()

    async def answer() -> int:
        return 42

    task = q.task(name="answer")(answer)
    assert [asyncio.run(once()) for _ in range(3)] == [(42, 42)] * 3


def test_it_can_be_started_again_after_its_event_loop_ended_without_a_stop(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, tinyq\n"
        "q = tinyq.TinyQ(sys.argv[1])\n"
        "async def again():\n"
        "    async with q.lifespan():\n"
        "        print((await q.enqueue('elsewhere', durable=True)).created)\n"
        "asyncio.run(q.start())\n"
        "asyncio.run(again())\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "jobs.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


async def test_start_returns_before_the_first_run_of_a_schedule_ends(tinyq: Any, clock: FakeClock) -> None:
    q = tinyq.TinyQ(clock=clock)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @q.every(60, immediate=True)  # type: ignore[untyped-decorator]
    async def slow() -> None:
        begun.set()
        await go_on.wait()

    async with asyncio.timeout(10):
        await q.start()
        assert not begun.is_set()
        await begun.wait()
        go_on.set()
        await q.stop()


# in an application


def test_lifespan_may_be_the_lifespan_of_an_application(tinyq: Any) -> None:
    app = FastAPI(lifespan=tinyq.lifespan)
    ran: list[int] = []

    @app.post("/job")
    async def job(request: Request) -> list[bool]:
        async def note() -> None:
            ran.append(1)

        await (await request.state.tinyq.enqueue(note)).result()
        return [isinstance(request.state.tinyq, tinyq.TinyQ), (await request.state.tinyq.stats()).counts == ()]

    for _ in range(3):
        with TestClient(app) as client:
            assert client.post("/job").json() == [True, True]
    assert ran == [1, 1, 1]


def test_lifespan_may_be_innermost_in_the_lifespan_of_an_application(tinyq: Any, tmp_path: Path) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        events.append("opened")
        async with tinyq.lifespan(app, db=tmp_path / "jobs.db") as state:
            yield {**state, "pool": 7}
        events.append("closed")

    app = FastAPI(lifespan=lifespan)

    async def note() -> None:
        await asyncio.sleep(0.01)
        events.append("ran")

    @app.post("/job")
    async def job(request: Request) -> int:
        await tinyq.enqueue(note)
        return int(request.state.pool)

    with TestClient(app) as client:
        assert client.post("/job").json() == 7
    assert events == ["opened", "ran", "closed"]


def test_the_lifespan_of_an_instance_may_be_the_lifespan_of_an_application(tinyq: Any) -> None:
    q = tinyq.TinyQ()
    app = FastAPI(lifespan=q.lifespan)

    @app.get("/")
    async def root(request: Request) -> bool:
        return request.state.tinyq is q

    with TestClient(app) as client:
        assert client.get("/").json() is True


# schedules that never run


NEVER = """
import logging, sys
import tinyq
{setup}
q = {q}

@q.every(1)
async def one() -> None: ...

@q.every(60, name="two", per_process=True)
async def two() -> None: ...

{rest}
"""


def end_of(program: str) -> str:
    """What a process writes to its standard error until it has ended by itself."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("q", ["tinyq", "tinyq.TinyQ()"], ids=["default", "own"])
@pytest.mark.parametrize("setup", ["", "logging.basicConfig(level=logging.INFO)"], ids=["no logging", "logging"])
def test_schedules_that_were_never_started_are_warned_about_at_exit(q: str, setup: str) -> None:
    [line] = [line for line in end_of(NEVER.format(q=q, setup=setup, rest="")).splitlines() if "__main__" not in line]
    assert "2 schedules" in line
    assert "never started" in line


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param("import asyncio\nasync def main():\n    async with q.lifespan(): pass\nasyncio.run(main())", id="started"),
        pytest.param("import asyncio\nasyncio.run(q.start())", id="started and not stopped"),
        pytest.param(
            "import asyncio, os\nif os.fork():\n    os.wait()\nelse:\n    asyncio.run(q.start())", id="started in a child"
        ),
    ],
)
@pytest.mark.parametrize("q", ["tinyq", "tinyq.TinyQ()"], ids=["default", "own"])
def test_schedules_that_were_started_are_not_warned_about(q: str, rest: str) -> None:
    assert "never started" not in end_of(NEVER.format(q=q, setup="", rest=rest))


def test_of_a_parent_and_its_child_that_never_start_their_schedules_the_child_warns() -> None:
    text = end_of(NEVER.format(q="tinyq", setup="", rest="import os\nif os.fork():\n    os.wait()\nelse:\n    print('child')"))
    assert text.count("never started") == 1


def test_a_script_that_leaves_jobs_to_others_is_not_warned_of_schedules_it_imports(tmp_path: Path) -> None:
    setup = f"tinyq.configure({str(tmp_path / 'jobs.db')!r})"
    said = end_of(NEVER.format(q="tinyq", setup=setup, rest="q.enqueue_sync('elsewhere', durable=True)"))
    assert "never started" not in said


def test_without_schedules_there_is_no_warning_at_exit() -> None:
    assert end_of("import tinyq\n@tinyq.task(name='t')\nasync def t() -> None: ...\n") == ""


def test_a_server_that_never_starts_its_schedules_says_so_when_it_ends(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(
        "import tinyq\n"
        "from fastapi import FastAPI\n"
        "app = FastAPI()\n"
        "@app.get('/')\n"
        "async def root() -> int: return 1\n"
        "@tinyq.every(1)\n"
        "async def tick() -> None: ...\n"
    )
    with Server("forgetful:app", app_dir=tmp_path, log=tmp_path / "log") as server:
        server.process.send_signal(signal.SIGINT)
        server.wait_for_exit()
    text = (tmp_path / "log").read_text()
    assert "1 schedule" in text
    assert "never started" in text


# run


WORKER = """
import asyncio, logging, sys
import tinyq
logging.basicConfig(level=logging.INFO)
{q}

@q.task(name="work")
async def work() -> None:
    print("begun", flush=True)
    try:
        await asyncio.sleep({seconds})
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        raise
    print("completed", flush=True)

@q.every(3600, immediate=True, name="first", per_process=True)
async def first() -> None:
    await work.enqueue()
    await asyncio.sleep(0)

{run}
print("ended", flush=True)
"""
RUNS = {
    "default": ("q = tinyq\ntinyq.configure(db=sys.argv[1], grace=60)", "tinyq.run()"),
    "own": ("q = tinyq.TinyQ(sys.argv[1], grace=60)", "q.run()"),
    "own through the module": ("q = tinyq.TinyQ(sys.argv[1], grace=60)", "tinyq.run(q)"),
}


class Worker:
    """A process that runs a TinyQ until it is told to stop; gone on exit."""

    def __init__(self, folder: Path, how: str, seconds: float) -> None:
        q, run = RUNS[how]
        self.out, self.err = folder / "out", folder / "err"
        program = WORKER.format(q=q, run=run, seconds=seconds)
        with self.out.open("wb") as out, self.err.open("wb") as err:
            command = [sys.executable, "-c", program, str(folder / "jobs.db")]
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ.copy(), stdout=out, stderr=err)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        print(self.err.read_text())

    def says(self) -> list[str]:
        return self.out.read_text().split()

    def wait_for(self, word: str) -> None:
        wait_until(word, lambda: word in self.says() or self.process.poll() is not None)

    def end(self) -> tuple[int, list[str]]:
        wait_until("the worker has ended", lambda: self.process.poll() is not None)
        return self.process.returncode, self.says()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str, float], Worker]]:
    started: list[Worker] = []

    def start(how: str, seconds: float) -> Worker:
        started.append(Worker(tmp_path, how, seconds))
        return started[-1]

    yield start
    for one in started:
        one.__exit__()


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_run_ends_cleanly_on_a_signal_once_its_running_job_has_ended(
    worker: Callable[[str, float], Worker], how: str, number: signal.Signals
) -> None:
    process = worker(how, 0.5)
    process.wait_for("begun")
    process.process.send_signal(number)
    assert process.end() == (0, ["begun", "completed", "ended"])
    assert "Traceback" not in process.err.read_text()
    assert "tinyq stopped" in process.err.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_to_run_skips_the_grace(worker: Callable[[str, float], Worker], number: signal.Signals) -> None:
    process = worker("default", 50)
    process.wait_for("begun")
    process.process.send_signal(number)
    wait_until("it drains", lambda: "stopping: waiting for" in process.err.read_text())
    process.process.send_signal(number)
    assert process.end() == (0, ["begun", "cancelled", "ended"])
    assert "Traceback" not in process.err.read_text()


def test_run_ends_cleanly_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    program = "import logging, tinyq\nlogging.basicConfig(level=logging.INFO)\ntinyq.run()\nprint('ended')"
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        wait_until("it has started", lambda: "started" in (tmp_path / "err").read_text())
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (0, "ended\n")


def test_run_leaves_the_handlers_of_signals_as_they_were(tmp_path: Path) -> None:
    program = (
        "import signal, os, tinyq\n"
        "before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]\n"
        "@tinyq.every(3600, immediate=True, name='end')\n"
        "async def end(): os.kill(os.getpid(), signal.SIGTERM)\n"
        "tinyq.run()\n"
        "print(before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
