"""Jobs that run in processes of their own: what comes back from there, what ends them, and that nothing else notices."""

import asyncio
import functools
import gc
import os
import py_compile
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process_tasks
import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, counted, edit, eventually, rows
from servers import wait_until

import tinyq
from tinyq import JobCancelled, JobFailed, ProcessDied, Retry, State, TinyQ

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Or, where Python is told to keep no bytecode, each process would compile tinyq anew."""
    py_compile.compile(tinyq.__file__)


def is_alive(pid: int) -> bool:
    """A zombie, whose parent is somebody else here, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it goes between the opening and the reading
        return False


def pids(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


async def failure(q: TinyQ, fn: Callable[..., Any], *args: object, **options: Any) -> JobFailed:
    """What comes of a task with a single start, when it runs in a process."""
    task = q.task(run_in="process", retry=False, **options)(fn)
    async with asyncio.timeout(30):
        with pytest.raises(JobFailed) as caught:
            await (await task.enqueue(*args)).result()
    return caught.value


# What goes over, and what comes back


async def test_a_task_of_another_process_gets_its_arguments_and_gives_its_result(q: TinyQ, durable: bool) -> None:
    task = q.task(run_in="process", queue="heavy", name="describe")(process_tasks.describe)
    job = await task.options(durable=durable).enqueue("ab", times=2)
    async with asyncio.timeout(30):
        found: Any = await job.result()
    assert found["text"] == "abab"
    assert found["pid"] != os.getpid()
    row = found["job"]
    assert row == (job.id, "describe", "heavy", 1, row[4], None, False)
    assert row[4].tzinfo is not None
    assert found["copies"] == ["tinyq"]


async def test_a_decorated_function_runs_in_a_process_and_what_it_prints_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    async with asyncio.timeout(30), process_tasks.q as q:
        assert await (await process_tasks.decorated.enqueue(1)).result() == 2
        await (await q.task(run_in="process")(process_tasks.describe).enqueue("this")).result()
    assert "printed this" in capfd.readouterr().out
    assert process_tasks.decorated(5) == 6


async def test_an_async_function_runs_in_a_loop_of_its_own_process(open_at: OpenAt) -> None:
    q = await open_at(None)
    task = q.task(run_in="process")(process_tasks.asynchronous)
    async with asyncio.timeout(30):
        assert await (await task.enqueue(41)).result() == 42


async def test_ten_megabytes_go_over_and_come_back(open_at: OpenAt) -> None:
    q = await open_at(None)
    data = os.urandom(10_000_000)
    task = q.task(run_in="process")(process_tasks.sized)
    async with asyncio.timeout(60):
        assert await (await task.enqueue(data)).result() == data[::-1]


async def test_an_argument_that_cannot_be_pickled_fails_the_attempt(open_at: OpenAt) -> None:
    failed = await failure(await open_at(None), process_tasks.sized, threading.Lock())
    assert failed.type == "TypeError"
    assert failed.message.startswith("the arguments cannot be pickled for the job's process: ")


async def test_a_result_that_cannot_be_pickled_fails_the_attempt(open_at: OpenAt) -> None:
    failed = await failure(await open_at(None), process_tasks.unpicklable)
    assert failed.type in ("TypeError", "AttributeError")
    assert failed.message.startswith("the result cannot be pickled: ")


async def test_a_schedule_can_fire_into_a_process(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None)
    q.every(60, run_in="process", name="fired")(process_tasks.crash)
    died: list[str] = []
    q.on_dead(lambda job: died.append(job.task))
    await clock.advance(60)
    await eventually(lambda: died == ["fired"])


# Errors


async def test_an_error_comes_back_as_what_it_was_with_the_traceback_of_the_child(open_file: Open, file: Path) -> None:
    q = await open_file()
    failed = await failure(q, process_tasks.refused, durable=True)
    assert str(failed) == "Refused: no funds (402)"
    cause = failed.__cause__
    assert isinstance(cause, process_tasks.Refused) and cause.code == 402
    [(error, traceback)] = rows(file, "error, traceback")
    assert error == "Refused: no funds (402)"
    assert "in refused\n" in traceback and "process_tasks.py" in traceback


async def test_the_retry_options_know_the_errors_of_a_process(open_at: OpenAt) -> None:
    q = await open_at(None)
    task = q.task(run_in="process", retry=Retry(5, give_up_on=process_tasks.Refused))(process_tasks.refused)
    job = await task.enqueue()
    async with asyncio.timeout(30):
        with pytest.raises(JobFailed):
            await job.result()
    assert (job.attempts, job.reason) == (1, "not to be retried")


async def test_an_error_of_a_local_class_keeps_its_name_and_its_message(open_at: OpenAt) -> None:
    failed = await failure(await open_at(None), process_tasks.raises_a_local_class)
    assert failed.type.endswith("Hidden")
    assert failed.message == "nobody can import it"


async def test_a_process_can_snooze_cancel_and_postpone_its_job(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None)
    task = q.task(run_in="process")(process_tasks.steered)
    snoozed, cancelled, retried = [await task.enqueue(kind) for kind in ("snooze", "cancel", "retry")]
    async with asyncio.timeout(30):
        with pytest.raises(JobCancelled, match="not needed"):
            await cancelled.result()
        await eventually(lambda: snoozed.status is retried.status is State.PENDING)
        assert (snoozed.run_at - clock.now()).total_seconds() == 60
        assert (retried.run_at - clock.now()).total_seconds() == 7
        await clock.advance(7)
        await retried.result()


# Ends without a result


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (process_tasks.crash, (), "the process was ended by SIGSEGV (signal 11)"),
        (process_tasks.end, (0,), "the process ended with exit code 0 before its function had returned"),
        (process_tasks.leave, (), "the process ended with exit code 3 before its function had returned"),
    ],
    ids=["segfault", "os._exit(0)", "sys.exit(3)"],
)
async def test_a_process_that_ends_before_its_function_has_returned_is_a_failed_attempt(
    open_at: OpenAt, fn: Callable[..., Any], args: tuple[object, ...], message: str
) -> None:
    failed = await failure(await open_at(None), fn, *args)
    assert (failed.type, failed.message) == ("ProcessDied", message)
    assert isinstance(failed.__cause__, ProcessDied)


async def test_a_crash_is_seen_at_once_though_a_fork_of_the_process_lives_on(open_at: OpenAt, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    try:
        failed = await failure(await open_at(None), process_tasks.forks_and_ends, str(note))
        assert failed.message == "the process ended with exit code 3 before its function had returned"
        assert all(map(is_alive, pids(note)))
    finally:
        for pid in pids(note):
            os.kill(pid, signal.SIGKILL)


async def test_a_crash_is_retried_like_any_failed_attempt(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    await q.task(run_in="process", retry=[30])(process_tasks.kill_itself).options(durable=True).enqueue()
    await eventually(lambda: rows(file, "state, attempts") == [("pending", 1)])
    await clock.advance(30)
    await eventually(lambda: rows(file, "state, attempts") == [("dead", 2)])
    assert rows(file, "error")[0][0].startswith("ProcessDied: the process was ended by SIGKILL (signal 9), which tinyq did not")


async def test_a_job_that_never_returns_is_killed_at_its_timeout_with_all_it_has_started(
    q: TinyQ, durable: bool, clock: FakeClock, tmp_path: Path
) -> None:
    note = tmp_path / "pids"
    task = q.task(run_in="process", retry=False, timeout=20)(process_tasks.hang)
    job = await task.options(durable=durable).enqueue(str(note))
    await eventually(note.exists)
    others = [await q.enqueue(asyncio.sleep, 0, number) for number in range(3)]
    assert [await other.result() for other in others] == [0, 1, 2]  # while it runs
    await clock.advance(20)
    async with asyncio.timeout(30):
        with pytest.raises(JobFailed, match=r"^TimeoutError: timed out after 20 s$"):
            await job.result()
    await eventually(lambda: not any(map(is_alive, pids(note))))


async def test_a_cancelled_job_is_killed_and_its_slot_is_free(open_at: OpenAt, clock: FakeClock, tmp_path: Path) -> None:
    q = await open_at(None, concurrency=1)
    note = tmp_path / "pids"
    job = await q.task(run_in="process")(process_tasks.hang).enqueue(str(note))
    behind = await q.enqueue(asyncio.sleep, 0, "next")
    await eventually(note.exists)
    await job.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(JobCancelled):
            await job.result()
        assert await behind.result() == "next"
    await eventually(lambda: not any(map(is_alive, pids(note))))


async def test_a_job_that_is_told_to_stop_before_its_process_has_started_is_killed(open_at: OpenAt, tmp_path: Path) -> None:
    before = children()  # of other tests, such as multiprocessing's tracker
    q = await open_at(None)
    job = await q.task(run_in="process")(process_tasks.hang).enqueue(str(tmp_path / "pids"))
    await asyncio.sleep(0)
    await job.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(JobCancelled):
            await job.result()
    assert set(children()) <= set(before)


async def test_a_sigterm_to_the_whole_service_does_not_end_a_process_that_is_just_starting(
    open_at: OpenAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tinyq.Child._start

    def start_and_terminate(fd: int) -> "subprocess.Popen[bytes]":
        process = start(fd)
        process.terminate()
        return process

    monkeypatch.setattr(tinyq.Child, "_start", staticmethod(start_and_terminate))
    task = (await open_at(None)).task(run_in="process")(process_tasks.sized)
    async with asyncio.timeout(30):
        assert await (await task.enqueue(b"ab")).result() == b"ba"


async def test_a_process_runs_on_in_the_grace_and_is_killed_at_its_end(clock: FakeClock, file: Path, tmp_path: Path) -> None:
    started, go_on, note = tmp_path / "started", tmp_path / "go on", tmp_path / "pids"
    q = TinyQ(file, clock=clock)
    await q.start()
    lasting = await q.task(run_in="process")(process_tasks.wait_for).enqueue(str(started), str(go_on))
    await q.task(run_in="process")(process_tasks.hang).options(durable=True).enqueue(str(note))
    await eventually(lambda: started.exists() and note.exists())
    stopping = asyncio.create_task(q.stop(grace=10))
    await clock.advance(5)
    go_on.touch()
    async with asyncio.timeout(30):
        assert await lasting.result() == "went on"
    assert all(map(is_alive, pids(note)))
    await clock.advance(5)
    await eventually(lambda: not any(map(is_alive, pids(note))))
    await eventually(lambda: rows(file, "state, attempts, interruptions") == [("pending", 0, 1)])
    await eventually(stopping.done, clock)


async def test_a_job_whose_asyncio_task_is_cancelled_by_somebody_else_is_killed_and_interrupted(
    open_file: Open, file: Path, tmp_path: Path
) -> None:
    q = await open_file()
    note = tmp_path / "pids"
    await q.task(run_in="process", name="hang")(process_tasks.hang).options(durable=True).enqueue(str(note))
    await eventually(note.exists)
    await q.quiesce()
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == "tinyq hang"]
    task.cancel()
    await eventually(lambda: rows(file, "state, attempts, interruptions") == [("pending", 0, 1)])
    assert not any(map(is_alive, pids(note)[:1]))


async def test_a_job_that_has_lost_its_lease_is_killed(open_file: Open, file: Path, clock: FakeClock, tmp_path: Path) -> None:
    q = await open_file()
    note = tmp_path / "pids"
    await q.task(run_in="process")(process_tasks.hang).options(durable=True).enqueue(str(note))
    await eventually(note.exists)
    edit(file, "UPDATE tinyq_jobs SET claim_no = 9, worker = 'another'")
    await clock.advance(8)  # until the lease is to be renewed
    await eventually(lambda: not any(map(is_alive, pids(note))))
    assert rows(file, "state, attempts, error") == [("running", 1, None)]  # nothing was written


# What the service notices of it


def children() -> list[int]:
    """The processes that this one has started and not yet waited for, zombies included."""
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_processes_leave_nothing_behind_and_take_no_slots_of_threads(open_at: OpenAt, tmp_path: Path) -> None:
    q = await open_at(None, threads=1)
    go_on = tmp_path / "go on"
    gc.collect()  # so that nothing of earlier tests closes its files meanwhile
    started, opened = children(), descriptors()
    processes = q.task(run_in="process")(process_tasks.wait_for)
    waiting = [await processes.enqueue(str(tmp_path / f"started {n}"), str(go_on)) for n in range(3)]
    await eventually(lambda: len(list(tmp_path.glob("started*"))) == 3)
    async with asyncio.timeout(30):
        assert await (await q.enqueue(abs, -3)).result() == 3  # in the one thread for plain functions
        go_on.touch()
        assert [await job.result() for job in waiting] == ["went on"] * 3
    assert children() == started
    assert descriptors() <= opened
    threads = set(threading.enumerate())
    async with asyncio.timeout(30):
        await (await q.task(run_in="process", name="again")(process_tasks.sized).enqueue(b"")).result()
    assert set(threading.enumerate()) <= threads


async def test_a_process_that_goes_on_after_its_function_is_killed_and_the_result_stands(
    open_at: OpenAt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tinyq, "LINGER", 0.1)
    task = (await open_at(None)).task(run_in="process")(process_tasks.leaves_a_thread)
    async with asyncio.timeout(30):
        assert not is_alive(await (await task.enqueue()).result())
    assert "its process did not end within 0.1 s of its function and is killed" in caplog.text


async def test_the_progress_of_a_child_is_seen_by_handles_and_by_other_processes(
    open_at: OpenAt, durable: bool, db: Path | None, tmp_path: Path
) -> None:
    q, go_on = await open_at(db), tmp_path / "go on"
    task = q.task(run_in="process", result_ttl=60, retry=False)(process_tasks.tells_progress)
    job = await task.options(durable=durable).enqueue(str(go_on))
    await eventually(lambda: job.progress == (0.4, "40 so far"))
    if durable:
        other = await open_at(db, worker=False)
        async with asyncio.timeout(30):
            while (await other.get(job.id)).progress != (0.4, "40 so far"):  # noqa: ASYNC110  no event tells other processes
                await asyncio.sleep(0.01)
    go_on.touch()
    async with asyncio.timeout(30):
        await job.result()
    assert job.progress == (1.0, "x" * 500)
    if durable:
        assert (await other.get(job.id)).progress == (1.0, "x" * 500)


async def test_a_child_that_says_more_than_the_loop_hears_is_heard_with_its_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = counted(monkeypatch, "report_progress")
    job: Any = tinyq.JobRow(bytes(16), "work", "default", 0, 0, 0, in_handler=True)
    child = tinyq.Child(job, (), {})
    for said in (0.1, 0.2, 0.3):
        child._hand_on(said, "while the loop is busy")
    assert heard == []
    await asyncio.sleep(0)
    assert heard == [(job, 0.3, "while the loop is busy")]
    child._hand_on(0.4, None)
    await asyncio.sleep(0)
    assert heard[1:] == [(job, 0.4, None)]


async def test_a_child_finds_the_headers_of_its_job(q: TinyQ, durable: bool) -> None:
    task = q.task(run_in="process", headers={"of": "the task"})(process_tasks.surroundings)
    jobs = [await task.options(durable=durable).enqueue(), await task.options(durable=durable, headers={"own": "one"}).enqueue()]
    async with asyncio.timeout(30):
        assert [await job.result() for job in jobs] == [({"of": "the task"}, None), ({"own": "one"}, None)]
    assert jobs[0].progress == (0.5, None)


def test_when_the_parent_is_killed_its_processes_end(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    script = """
        import asyncio, sys, process_tasks
        async def main():
            async with process_tasks.q as q:
                await q.task(run_in="process")(process_tasks.hang).enqueue(sys.argv[1])
                await asyncio.sleep(1000)
        asyncio.run(main())
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(note)], env=env) as parent:
        wait_until("the job runs", note.exists)
        parent.kill()
    wait_until("its processes have ended", lambda: not any(map(is_alive, pids(note))))


# The program as the module of a handler

PROGRAM = """
    import asyncio, sys, tinyq

    q = tinyq.TinyQ()

    class Odd(Exception):
        pass

    @q.task(run_in="process", name="checked", retry=False)
    def checked(number):
        if number % 2:
            raise Odd(number)
        return number

    async def main():
        async with q:
            print(await (await checked.enqueue(2)).result())
            try:
                await (await checked.enqueue(3)).result()
            except tinyq.JobFailed as error:
                print(error, type(error.__cause__) is Odd)
"""


def output_of(folder: Path, program: str, *command: str) -> str:
    (folder / "program.py").write_text(textwrap.dedent(program))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


def test_a_child_does_not_say_that_the_schedules_it_imports_were_never_started(tmp_path: Path) -> None:
    program = """
        import asyncio
        import tinyq

        q = tinyq.TinyQ()

        @q.every(3600, name="hourly")
        async def hourly():
            pass

        @q.task(run_in="process", name="work")
        def work():
            return "worked"

        async def main():
            async with q:
                print(await (await work.enqueue()).result())

        if __name__ == "__main__":
            asyncio.run(main())
    """
    assert output_of(tmp_path, program, "program.py") == "worked\n"


@pytest.mark.parametrize("command", [("program.py",), ("-m", "program")], ids=" ".join)
def test_functions_of_the_program_itself_run_if_its_main_part_is_guarded(tmp_path: Path, command: tuple[str, ...]) -> None:
    guarded = (
        PROGRAM
        + """
    if __name__ == "__main__":
        asyncio.run(main())
    """
    )
    printed = output_of(tmp_path, guarded, *command)
    assert printed.startswith("2\nOdd: 3 True\n")


def test_a_program_without_a_guard_fails_the_attempt_and_does_not_start_again(tmp_path: Path) -> None:
    printed = output_of(tmp_path, PROGRAM + "\n    asyncio.run(main())\n", "program.py")
    assert "RuntimeError: a TinyQ was started by importing the program" in printed
    assert "if __name__ == '__main__'" in printed


# Registration


class Machine:
    def method(self) -> None: ...

    def __call__(self) -> None: ...


def make_local() -> Callable[[], None]:
    def local() -> None: ...

    return local


@pytest.mark.parametrize(
    "fn",
    [lambda: None, make_local(), Machine().method, Machine(), functools.partial(process_tasks.end, 0), Machine, [].clear],
    ids=["lambda", "local", "method", "callable", "partial", "class", "builtin method"],
)
def test_a_callable_that_no_other_process_can_import_is_refused(fn: Callable[[], object]) -> None:
    with pytest.raises(
        TypeError, match=r"run_in='process' needs a function that a new process can import .* def at module level"
    ):
        TinyQ().task(run_in="process", name="job")(fn)


def test_there_is_one_other_place_to_run_in() -> None:
    place: Any = "thread"
    with pytest.raises(ValueError, match="run_in is 'thread': give one of None, 'process'"):
        TinyQ().task(run_in=place)(process_tasks.crash)


@pytest.mark.parametrize(
    "error",
    [
        tinyq.Snooze(3),
        tinyq.RetryAfter(4, "busy"),
        tinyq.Cancel("enough"),
        JobFailed("ValueError", "no"),
        JobCancelled("expired"),
        ProcessDied(-signal.SIGABRT),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_tinyq_raises_and_hears_survives_pickle(error: Exception) -> None:
    import pickle

    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.args, vars(copy)) == (type(error), str(error), error.args, vars(error))
