"""A separate worker: the command line, what it overrides, and real worker processes."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest
from clock import FakeClock
from helpers import Open, eventually, rows
from servers import ROOT, wait_until

import tinyq
from tinyq import TinyQ

TESTS = Path(__file__).parent


class Worker:
    """A worker process; ready on entry, gone on exit."""

    def __init__(
        self, *arguments: object, folder: Path, start: Sequence[str] = ("-m", "tinyq"), cwd: Path = TESTS, **env: str
    ) -> None:
        self.folder = folder
        self._log = folder / f"log{len(list(folder.glob('log*')))}"
        command = [sys.executable, "-W", "error", *start, "worker", *map(str, arguments)]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=os.environ | {"FOLDER": str(folder)} | env, stdout=output, stderr=output
            )

    def __enter__(self) -> Self:
        try:
            wait_until("the worker serves", lambda: "grace" in self.log or self.ended)
            assert not self.ended
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        print(self.log)  # pytest shows it when the test fails

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> int:
        """One SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def wait_for(self, mark: str) -> None:
        wait_until(f"{mark} is noted", lambda: mark in marks(self.folder))


def marks(folder: Path) -> list[str]:
    file = folder / "marks"
    return file.read_text().splitlines() if file.exists() else []


def enqueue(folder: Path, task: str, *arguments: object, **options: Any) -> None:
    """From a process that runs no durable jobs."""

    async def enqueue() -> None:
        async with TinyQ(folder / "jobs.db", worker=False) as q:
            await q.enqueue_many([(task, arguments)], durable=True, **options)

    asyncio.run(enqueue())


def result(folder: Path, task: str) -> Any:
    """What a job of this task answers in the worker."""

    async def wait() -> Any:
        async with TinyQ(folder / "jobs.db", worker=False) as q:
            return await (await q.enqueue(task, durable=True, result_ttl=60)).result(timeout=30)

    return asyncio.run(wait())


# the process


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker of an application which the web side's code and environment say does not claim."""
    with Worker("worker_apps:app", folder=tmp_path_factory.mktemp("served"), TINYQ_WORKER="0") as worker:
        yield worker


def test_a_worker_runs_what_another_process_enqueues_with_one_copy_of_the_module_and_the_state_of_the_app(served: Worker) -> None:
    assert result(served.folder, "identity") == {
        "name": "tinyq",
        "main": True,
        "module": "tinyq",
        "pickled": True,
        "job": "identity",
        "state": "open",
        "child": True,
    }


def test_a_worker_says_what_it_serves(served: Worker) -> None:
    assert "INFO tinyq: worker of worker_apps:app: all queues, grace 60 s\n" in served.log


def test_sigterm_lets_a_running_job_complete_before_the_application_closes(tmp_path: Path) -> None:
    with Worker("worker_apps:app", folder=tmp_path) as worker:
        enqueue(tmp_path, "stay")
        worker.wait_for(f"started {worker.process.pid}")
        worker.process.terminate()
        worker.wait_for("draining")
        enqueue(tmp_path, "note", "too late")
        (tmp_path / "release").touch()
        assert worker.process.wait(60) == 0
        assert worker.log.endswith("INFO tinyq: worker of worker_apps:app: stopped\n")
    assert marks(tmp_path) == [f"started {worker.process.pid}", "draining", "completed", "closed"]
    assert rows(tmp_path / "jobs.db", "task, state") == [("note", "pending")]


def test_a_second_sigterm_skips_the_grace_and_hands_the_job_back(tmp_path: Path) -> None:
    with Worker("worker_apps:app", folder=tmp_path) as worker:
        enqueue(tmp_path, "stay")
        worker.wait_for(f"started {worker.process.pid}")
        worker.process.terminate()
        worker.wait_for("draining")
        assert worker.stop() == 0
    assert marks(tmp_path)[-2:] == ["cancelled", "closed"]
    assert rows(tmp_path / "jobs.db", "task, state, attempts, interruptions") == [("stay", "pending", 0, 1)]


def test_a_second_worker_takes_over_from_one_that_is_killed(tmp_path: Path) -> None:
    with Worker("worker_apps:app", folder=tmp_path, LEASE="0.5") as first:
        enqueue(tmp_path, "stay")
        first.wait_for(f"started {first.process.pid}")
        first.process.kill()
        with Worker("worker_apps:app", folder=tmp_path, LEASE="0.5") as second:
            second.wait_for(f"started {second.process.pid}")
            (tmp_path / "release").touch()
            second.wait_for("completed")


def test_a_second_signal_ends_a_worker_whose_application_hangs_at_shutdown(tmp_path: Path) -> None:
    program = "import sys, tinyq; tinyq.EXTRA = 0.1; sys.exit(tinyq.main())"
    with Worker("worker_apps:hanging", folder=tmp_path, start=("-c", program)) as worker:
        worker.process.send_signal(signal.SIGINT)
        worker.wait_for("hangs")
        assert worker.stop() == 1
        assert worker.log.endswith("tinyq: worker_apps:hanging did not shut down in time: its lifespan was cut short\n")


def test_a_third_signal_kills(tmp_path: Path) -> None:
    with Worker("worker_apps:stubborn", folder=tmp_path) as worker:
        worker.process.terminate()
        worker.wait_for("stops")

        def killed() -> bool:
            worker.process.terminate()
            return worker.ended

        wait_until("it is killed", killed)
        assert worker.process.returncode == -signal.SIGTERM


def test_a_signal_while_the_application_starts_ends_the_worker(tmp_path: Path) -> None:
    env = os.environ | {"FOLDER": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-m", "tinyq", "worker", "worker_apps:slow"], cwd=TESTS, env=env) as process:
        try:
            wait_until("it starts", lambda: "starting" in marks(tmp_path))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert marks(tmp_path) == ["starting", "gave up"]


def test_a_worker_of_some_queues_of_a_bare_instance(tmp_path: Path) -> None:
    enqueue(tmp_path, "note", "default")
    enqueue(tmp_path, "note", "own", queue="own")
    enqueue(tmp_path, "note", "emails", queue="emails")
    options = ("--queues", "emails,own=2", "--grace", "0.5", "--log-level", "info")
    script = str(ROOT / "tinyq.py")
    with Worker("worker_apps:q", *options, "--app-dir", TESTS, folder=tmp_path, start=(script,), cwd=tmp_path) as worker:
        worker.wait_for("own")
        worker.wait_for("emails")
        assert "queues emails, own=2, grace 0.5 s" in worker.log
        enqueue(tmp_path, "identity", queue="own", result_ttl=60)
        wait_until("it is done", lambda: ("identity", "done") in rows(tmp_path / "jobs.db", "task, state"))
        assert worker.stop() == 0
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
        [(found,)] = db.execute("SELECT result FROM tinyq_jobs WHERE task = 'identity'").fetchall()
    assert '"name":"tinyq","main":true' in found and '"child":true' in found
    assert sorted(marks(tmp_path)) == ["emails", "own"]
    assert rows(tmp_path / "jobs.db", "task, queue, state")[0] == ("note", "default", "pending")


VENDORED = """
import sys
from pathlib import Path

from myapp.vendored import tinyq

q = tinyq.TinyQ(Path(__file__).parent / "jobs.db")

@q.task(name="identity", result_ttl=60)
async def identity():
    copies = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == tinyq.__file__]
    return [tinyq.TinyQ.__module__, tinyq.current_job().task, sorted(copies)]
"""


@pytest.mark.parametrize("imported", [False, True], ids=["runs", "was-imported"])
def test_a_vendored_copy_is_run_under_its_own_name(tmp_path: Path, imported: bool) -> None:
    package = tmp_path / "myapp"
    (package / "vendored").mkdir(parents=True)
    (package / "__init__.py").write_text("from myapp.vendored import tinyq\n" * imported)
    shutil.copy(ROOT / "tinyq.py", package / "vendored")
    (tmp_path / "main.py").write_text(VENDORED)
    start = ("-W", "ignore:'myapp.vendored.tinyq' found:RuntimeWarning", "-m", "myapp.vendored.tinyq")
    with Worker("main:q", folder=tmp_path, start=start, cwd=tmp_path):
        module, task, copies = result(tmp_path, "identity")
    assert (module, task) == ("myapp.vendored.tinyq", "identity")
    assert [name for name in copies if name != "__main__"] == ["myapp.vendored.tinyq"]


def test_another_copy_than_the_application_s_is_named(tmp_path: Path) -> None:
    package = tmp_path / "myapp" / "vendored"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "tinyq.py", package)
    (tmp_path / "main.py").write_text("from myapp.vendored import tinyq\nq = tinyq.TinyQ()\n")
    done = run("worker", "main:q", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("the application uses myapp.vendored.tinyq: python -m myapp.vendored.tinyq worker\n")


# wrong use


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinyq", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )


def test_without_a_command_it_prints_its_usage(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m tinyq ")


def test_the_version_is_printed(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"tinyq {tinyq.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "MODULE:APP"),
        (("main",), "'main' names no application: write MODULE:APP, such as main:app"),
        (("main:",), "'main:' names no application"),
        (("main:app", "--queues", ""), "--queues is '', and '' in it is no new queue: write names, as in emails,reports=3"),
        (("main:app", "--queues", "a,,b"), "'' in it is no new queue"),
        (("main:app", "--queues", "a=0"), "'a=0' in it is no new queue"),
        (("main:app", "--queues", "a=x"), "'a=x' in it is no new queue"),
        (("main:app", "--queues", "a,b,a=3"), "'a=3' in it is no new queue"),
        (("main:app", "--queues", "a" * 300), "give 1 to 255 characters"),
        (("main:app", "--grace", "soon"), "--grace is 'soon': give a number"),
        (("main:app", "--grace", "-1"), "--grace is -1.0"),
        (("main:app", "--log-level", "loud"), "--log-level"),
    ],
)
def test_wrong_usage_is_said_with_exit_code_2(
    arguments: Sequence[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        tinyq.main(["worker", *arguments])
    assert exit.value.code == 2
    assert expected in capsys.readouterr().err


APPS = """
import asyncio, signal, tinyq
from pathlib import Path
from contextlib import asynccontextmanager
from starlette.applications import Starlette

@asynccontextmanager
async def without_tinyq(app):
    yield

@asynccontextmanager
async def failing(app):
    raise OSError("no such host")
    yield

@asynccontextmanager
async def failing_at_shutdown(app):
    async with stored:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGTERM)
        yield
    raise OSError("cannot close")

async def short(scope, receive, send):
    async with stored:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await asyncio.sleep(0.05)  # so that it was seen at work

async def http_only(scope, receive, send):
    assert scope["type"] == "http", "only HTTP"

async def silent(scope, receive, send):
    pass

async def refusing(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.failed", "message": "not today"})

class api:
    app = Starlette(lifespan=without_tinyq)

q = tinyq.TinyQ()
stored = tinyq.TinyQ(Path(__file__).parent / "jobs.db")
app = Starlette(lifespan=failing)
unfinished = Starlette(lifespan=failing_at_shutdown)
number = 7

def create(): return app
def create_nothing(): raise OSError("nothing")
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `tinyq worker …` says when it fails."""
    (tmp_path / "apps.py").write_text(APPS)
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", [*sys.path])

    for name in ("apps", "broken", "wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def command(*arguments: str) -> str:
        assert tinyq.main(["worker", "--app-dir", str(tmp_path), *arguments]) == 1
        assert tinyq._commands == []
        return capsys.readouterr().err

    return command


def test_a_tinyq_whose_event_loop_has_ended_is_not_served(command: Callable[..., str]) -> None:
    q = tinyq.TinyQ()
    asyncio.run(q.start())
    assert "started no TinyQ" in command("apps:api.app")
    assert q in tinyq._started


@pytest.mark.parametrize(
    ("target", "expected", "cause"),
    [
        ("missing:app", "tinyq: there is no module 'missing' in ", None),
        ("apps.py:app", "write main:app for main.py", None),
        (
            "broken:app",
            "tinyq: broken cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'",
            "import no_such",
        ),
        ("wrong:app", "tinyq: wrong cannot be imported: ZeroDivisionError: division by zero", "1 / 0"),
        ("apps:ap", "has no 'ap'; did you mean 'app'?", None),
        ("apps:api.ap", "has no 'ap'; did you mean 'app'?", None),
        ("apps:number", "tinyq: apps:number is 7: an ASGI application or a TinyQ is wanted\n", None),
        (
            "apps:api.app",
            "tinyq: the lifespan of apps:api.app started no TinyQ: put `async with tinyq.lifespan(app, db=…):` into it\n",
            None,
        ),
        ("apps:q", "tinyq: apps:q has no database, and so no jobs for a worker: give db='jobs.db' to lifespan()", None),
        ("apps:app", "tinyq: apps:app did not start: OSError: no such host\n", 'raise OSError("no such host")'),
        ("apps:refusing", "tinyq: apps:refusing did not start: not today\n", None),
        ("apps:silent", "tinyq: apps:silent did not start: it takes no part in the lifespan protocol of ASGI\n", None),
        ("apps:http_only", "tinyq: apps:http_only did not start: AssertionError: only HTTP", "assert scope"),
        (
            "apps:unfinished",
            "tinyq: apps:unfinished did not shut down: OSError: cannot close\n",
            'raise OSError("cannot close")',
        ),
        ("apps:short", "tinyq: the lifespan of apps:short ended by itself\n", None),
        ("apps:create", "if it is a function that makes one, add --factory\n", "TypeError"),
    ],
)
def test_a_target_that_cannot_be_served_is_said_with_exit_code_1(
    command: Callable[..., str], target: str, expected: str, cause: str | None
) -> None:
    said = command(target)
    *before, last = said.splitlines(keepends=True)
    assert expected in last
    assert before == [] if cause is None else cause in "".join(before)


def test_a_factory_makes_the_application(command: Callable[..., str]) -> None:
    assert command("apps:create", "--factory").endswith("tinyq: apps:create did not start: OSError: no such host\n")


def test_a_factory_that_fails_is_said(command: Callable[..., str]) -> None:
    assert command("apps:create_nothing", "--factory").endswith("tinyq: apps:create_nothing() failed: OSError: nothing\n")


def test_a_database_that_cannot_be_opened_is_said(command: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "apps.py").write_text(f"import tinyq\nq = tinyq.TinyQ({str(tmp_path / 'no' / 'jobs.db')!r})\n")
    assert "tinyq: apps:q did not start: StoreError: " in command("apps:q")


# what the command overrides


@pytest.fixture
def commanded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the next TinyQ that starts is told by the command."""

    def commanded(grace: float = 60.0, **queues: int | None) -> None:
        monkeypatch.setattr(tinyq, "_commands", [tinyq.Command(grace=grace, queues=queues)])

    return commanded


@pytest.fixture(autouse=True)
def no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYQ_WORKER", raising=False)


async def test_only_the_queues_of_the_command_are_claimed(
    commanded: Callable[..., None], open_file: Open, file: Path, clock: FakeClock
) -> None:
    commanded(emails=None)
    q = await open_file()
    ran: list[str] = []
    task = q.task(name="note")(ran.append)
    await task.options(durable=True, delay=1).enqueue("of another queue")
    await task.options(durable=True, queue="emails", delay=1).enqueue("of this")
    await eventually(lambda: ran, clock)
    await q.drain()
    assert ran == ["of this"]
    assert rows(file, "queue, state") == [("default", "pending")]


async def test_only_jobs_of_the_queues_of_the_command_are_handed_over(
    commanded: Callable[..., None], open_file: Open, file: Path
) -> None:
    commanded(emails=None)
    q = await open_file()
    ran: list[str] = []
    task = q.task(name="note")(ran.append)
    for queue in ("emails", "default"):
        for i in range(3):  # the first makes the plan by which the others are handed over
            await q.drain()
            await q.enqueue(task, f"{queue} {i}", durable=True, queue=queue)
    await q.drain()
    assert ran == ["emails 0", "emails 1", "emails 2"]
    assert rows(file, "queue, state, claim_no") == [("default", "pending", 0)] * 3


async def test_best_effort_jobs_run_in_all_queues_of_a_worker_of_some(
    commanded: Callable[..., None], open_file: Open, clock: FakeClock
) -> None:
    commanded(emails=None)
    q = await open_file()
    assert await (await q.enqueue(len, "at once", queue="other")).result() == 7
    waiting = await q.enqueue(len, "later", queue="other", delay=1)
    await clock.advance(1)
    assert await waiting.result() == 5


async def test_a_queue_that_is_not_served_does_not_hold_up_the_others(commanded: Callable[..., None], open_file: Open) -> None:
    commanded(emails=None)
    q = await open_file(concurrency=1)
    task = q.task(name="note", durable=True)(lambda: None)
    await task.enqueue()
    await q.drain()
    assert q._engine is not None and q._engine.durable is not None
    assert not q._engine.durable.hungry  # else each best-effort job would wait for a claim


@pytest.mark.parametrize(
    ("queues", "slots"),
    [
        ({"own": None}, {"own": 5, "none": 0}),
        ({"none": None}, {"own": 5}),
        ({"none": 2, "new": 3}, {"own": 5, "none": 2, "new": 3}),
        ({}, {"own": 5, "none": 0}),
    ],
)
async def test_slots_are_those_of_the_command_or_else_the_application_s(
    commanded: Callable[..., None], open_file: Open, queues: dict[str, int | None], slots: dict[str, int]
) -> None:
    commanded(**queues)
    q = await open_file(queues={"own": 5, "none": 0})
    assert q._engine is not None
    assert q._engine.config.queues == slots


async def test_the_command_counts_more_than_code_and_environment(
    commanded: Callable[..., None], open_file: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYQ_WORKER", "0")
    commanded(grace=7)
    q = await open_file(worker=False, grace=1)
    assert await (await q.enqueue(q.task(name="answer")(lambda: 42), durable=True, result_ttl=60)).result() == 42
    assert q._engine is not None and q._engine.config.grace == 7


async def test_a_shared_schedule_follows_its_queue(
    commanded: Callable[..., None], open_file: Open, file: Path, clock: FakeClock
) -> None:
    commanded(emails=None)
    q = await open_file()
    ran: list[str] = []
    q.every(10, name="a", queue="emails")(lambda: ran.append("shared, of a queue that is served"))
    q.every(10, name="b")(lambda: ran.append("shared, of another"))
    q.every(10, name="c", per_process=True)(lambda: ran.append("of each process"))
    await eventually(lambda: len(set(ran)) == 2, clock, 1)
    await q.drain()
    assert set(ran) == {"shared, of a queue that is served", "of each process"}
    assert [row for row in rows(file, "task") if row != ("a",)] == []


async def test_a_result_of_a_queue_that_is_not_served_is_waited_for_as_that_of_another_process(
    commanded: Callable[..., None], open_file: Open
) -> None:
    commanded(emails=None)
    q = await open_file()
    job = await q.enqueue(q.task(name="note")(lambda: None), durable=True)
    async with asyncio.timeout(20):
        with pytest.raises(tinyq.NoResult, match="runs in another process"):
            await job.result()


@pytest.fixture
async def explicit(file: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., TinyQ]]:
    monkeypatch.setenv("TINYQ_WORKER", "0")
    yield lambda **options: TinyQ(file, **options)


@pytest.mark.parametrize(("options", "claims"), [({}, False), ({"worker": True}, True)])
async def test_the_environment_says_for_every_instance_whether_the_process_is_a_worker_unless_the_code_does(
    explicit: Callable[..., TinyQ], options: dict[str, Any], claims: bool
) -> None:
    ran: list[str] = []
    async with explicit(**options) as q, asyncio.timeout(20):
        task = q.task(name="note")(ran.append)
        await task.options(durable=True).enqueue("durable")
        await (await task.enqueue("best-effort")).result()
        await q.drain()
    assert ("durable" in ran) == claims
    assert "best-effort" in ran
