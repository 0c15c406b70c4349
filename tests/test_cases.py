"""What goes wrong around a service, and what becomes of its jobs then: clients, signals, disks, processes, its own mistakes."""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import AsyncIterator, MutableMapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from clock import FakeClock
from fleet import Fleet
from helpers import Open, eventually
from servers import Server, wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tinyq import Job, JobFailed, Retry, State, TinyQ

pytestmark = pytest.mark.timeout(300)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


# Clients


async def test_a_client_that_goes_away_leaves_the_jobs_of_its_request_alone(q: TinyQ, durable: bool) -> None:
    may_end, cut_off = asyncio.Event(), asyncio.Event()
    jobs: list[Job[str]] = []
    spawned: list[asyncio.Task[str]] = []

    @q.task(durable=durable)
    async def work() -> str:
        await may_end.wait()
        return "worked"

    async def answer(request: Request) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            jobs.append(await work.enqueue())
            spawned.append(q.spawn(work()))
            yield b"."
            try:
                await asyncio.Event().wait()
            finally:
                cut_off.set()

        return StreamingResponse(body())

    async def receive() -> MutableMapping[str, Any]:
        await eventually(lambda: jobs and jobs[0].status is State.RUNNING and spawned)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None: ...

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "asgi": {"spec_version": "2.3"}}
    async with asyncio.timeout(20):
        await Starlette(routes=[Route("/", answer)])(scope, receive, send)
    assert cut_off.is_set()
    may_end.set()
    assert await jobs[0].result(timeout=20) == "worked"
    assert await spawned[0] == "worked"


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
async def test_a_signal_while_stopping_skips_the_grace_and_still_reaches_the_applications_own_handler(
    q: TinyQ, durable: bool, clock: FakeClock, number: signal.Signals
) -> None:
    heard: list[int] = []

    def own(number: int, frame: object) -> None:
        heard.append(number)

    @q.task(durable=durable)
    async def long() -> None:
        await asyncio.Event().wait()

    job = await long.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    before = signal.signal(number, own)
    try:
        stopping = asyncio.create_task(q.stop(grace=3600))
        await clock.settle()
        assert not stopping.done()
        os.kill(os.getpid(), number)
        await eventually(stopping.done)  # the clock stands still
        assert heard == [number]
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)
    assert job.status is (State.PENDING if durable else State.CANCELLED)


SHOP = """
    import asyncio, logging
    from pathlib import Path
    from fastapi import FastAPI
    import tinyq

    logging.basicConfig(level=logging.INFO)
    folder = Path(__file__).parent

    @tinyq.task(name="work")
    async def work(n):
        with (folder / "marks").open("a") as marks:
            marks.write(f"{n} started\\n")
        while not (folder / "may end").exists():
            await asyncio.sleep(0.01)
        with (folder / "marks").open("a") as marks:
            marks.write(f"{n} ended\\n")

    app = FastAPI(lifespan=lambda app: tinyq.lifespan(app, db=folder / "jobs.db", concurrency=1, grace=60))

    @app.post("/orders")
    async def order():
        await tinyq.enqueue_many([(work, (n,)) for n in range(4)], durable=True)
        await tinyq.enqueue(work, 4, delay=3600)
"""


def test_sigterm_to_a_server_lets_the_running_job_end_and_leaves_the_waiting_ones_untouched(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))
    marks = tmp_path / "marks"
    with Server("shop:app", app_dir=tmp_path, log=tmp_path / "log") as server:
        httpx.post(server.url + "/orders").raise_for_status()
        wait_until("the first job has started", marks.exists)
        server.process.terminate()
        wait_until("tinyq drains", lambda: "stopping: waiting for work" in server.log.read_text())
        assert fleet.rows("state", "attempts") == [("running", 1)] + [("pending", 0)] * 3
        (tmp_path / "may end").touch()
        server.wait_for_exit()
    assert marks.read_text().split("\n") == ["0 started", "0 ended", ""]
    untouched = [(f"[[{n}],{{}}]", "pending", 0, 0, None) for n in (1, 2, 3)]
    promoted = ("[[4],{}]", "pending", 0, 0, None)
    assert fleet.rows("payload", "state", "attempts", "claim_no", "lease") == [*untouched, promoted]


# Disks


def test_a_full_disk_refuses_durable_jobs_only_and_keeps_none_of_them_in_memory(tmp_path: Path) -> None:
    program = """
        import asyncio, os, resource, sys
        import tinyq

        async def best_effort():
            return "best-effort work goes on"

        async def main(db):
            async with tinyq.TinyQ(db, worker=False) as q:
                await q.enqueue("send", "first", durable=True)
                soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                largest = max(os.path.getsize(db), os.path.getsize(db + "-wal"))
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
                try:
                    await q.enqueue("send", "x" * 900_000, durable=True)
                except tinyq.StoreError:
                    print("refused")
                print(await (await q.enqueue(best_effort)).result())
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                await q.enqueue("send", "last", durable=True)
                print((await q.stats()).count())

        asyncio.run(main(sys.argv[1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "jobs.db")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["refused", "best-effort work goes on", "2"]), done.stderr


# Processes that die, stall, or come back


def test_what_was_acknowledged_is_there_after_kill_9(file: Path) -> None:
    program = """
        import asyncio, sys
        import tinyq

        async def main():
            async with tinyq.TinyQ(sys.argv[1], worker=False) as q:
                while True:
                    jobs = await asyncio.gather(*(q.enqueue("send", durable=True) for _ in range(5)))
                    for job in jobs:
                        print(job.id, flush=True)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(100)]
            process.kill()
            lines += process.stdout.readlines()
        finally:
            process.kill()
    acknowledged = [line.strip() for line in lines if line.endswith("\n")]
    assert len(acknowledged) >= 100

    async def found() -> set[State]:
        async with TinyQ(file, worker=False) as q:
            return {(await q.get(id)).status for id in acknowledged}

    assert asyncio.run(found()) == {State.PENDING}


def test_a_worker_that_stalls_past_its_lease_is_replaced_then_cancelled_and_writes_nothing(fleet: Fleet) -> None:
    fleet.enqueue("hangs_until_told", 7)
    stalled = fleet.member({"hangs_until_told": 3}, lease=1.0, result_ttl=3600)
    fleet.wait_for_marks(1, "hangs_until_told")
    os.kill(int(stalled.pid), signal.SIGSTOP)
    other = fleet.member({"hangs_until_told": 3}, lease=1.0, result_ttl=3600)
    columns = ("state", "attempts", "lost", "claim_no", "error", "reason", "finished")
    wait_until("the other one has run it", lambda: fleet.rows("state") == [("done",)])
    settled = fleet.rows(*columns)
    assert settled[0][:4] == ("done", 2, 1, 2)
    assert fleet.marks("told") == []
    os.kill(int(stalled.pid), signal.SIGCONT)
    assert fleet.wait_for_marks(1, "told") == [[stalled.pid, "told", "7"]]
    stalled.finish()
    other.finish()
    assert fleet.rows(*columns) == settled
    assert fleet.marks("hangs_until_told") == [
        [stalled.pid, "hangs_until_told", "7", "1"],
        [other.pid, "hangs_until_told", "7", "2"],
    ]
    assert len([line for line in fleet.log_lines() if "lost its lease" in line]) == 1


def test_a_process_that_comes_back_under_its_old_name_does_not_keep_its_old_jobs_from_being_taken_over(fleet: Fleet) -> None:
    fleet.enqueue("hangs_once", 0)
    first = fleet.member({"hangs_once": 3}, lease=1.0, worker_name="web-1")
    fleet.wait_for_marks(1, "hangs_once")
    first.kill()
    fleet.enqueue("hangs_once", 1)
    second = fleet.member({"hangs_once": 3}, lease=1.0, worker_name="web-1")  # renews a lease of its own
    assert fleet.wait_for_marks(1, "hangs_once", 0, 2) == [[second.pid, "hangs_once", "0", "2"]]
    fleet.wait_for_rows([("running", 1)], "state", "attempts")
    assert fleet.marks("hangs_once", 1) == [[second.pid, "hangs_once", "1", "1"]]


def test_a_job_that_blocks_its_event_loop_for_less_than_half_its_lease_starts_once(fleet: Fleet) -> None:
    members = [fleet.member({"blocks": 5}, lease=6) for _ in range(2)]
    fleet.enqueue("blocks", 2.5)
    fleet.wait_for_marks(1, "blocks", "ended")
    fleet.wait_for_rows([], "id")
    for member in members:
        member.finish()
    assert [what for _, _, what in fleet.marks("blocks")] == ["began", "ended"]
    assert [line for line in fleet.log_lines() if "reclaimed" in line] == []


def test_processes_that_write_to_one_file_at_the_same_time_have_nothing_to_report(fleet: Fleet) -> None:
    members = [fleet.member({"note": 5}, loops=2) for _ in range(4)]
    for n in range(20):
        fleet.enqueue("note", *range(n * 20, n * 20 + 20))
    fleet.wait_for_marks(400, "note")
    for member in members:
        member.finish()
    assert fleet.rows("id") == []
    assert fleet.log_lines() == []


# Several server processes without a database


async def scheduled(clock: FakeClock, db: Path | None = None, **options: Any) -> None:
    """Start and stop with two schedules."""
    q = TinyQ(db, clock=clock)
    for name in ("rates", "cache"):
        q.every(3600, name=name, **options)(asyncio.Event().wait)
    async with q:
        await clock.settle()


async def test_schedules_of_several_processes_without_a_database_are_warned_about_once(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    await scheduled(clock)
    [warning] = messages(caplog, logging.WARNING)
    assert "several server processes" in warning
    assert "db=" in warning and "per_process=True" in warning


@pytest.mark.parametrize("reason", ["one worker", "database", "per process"])
async def test_there_is_no_such_warning_where_each_fire_time_runs_as_often_as_is_meant(
    clock: FakeClock, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "1" if reason == "one worker" else "4")
    await scheduled(clock, file if reason == "database" else None, per_process=reason == "per process")
    assert messages(caplog, logging.WARNING) == []


def start_a_schedule(log: str) -> None:
    logging.basicConfig(filename=log, level=logging.WARNING)
    asyncio.run(scheduled(FakeClock()))


def test_a_process_that_a_server_has_started_knows_that_it_may_not_be_the_only_one(tmp_path: Path) -> None:
    with closing(multiprocessing.get_context("spawn").Process(target=start_a_schedule, args=(str(tmp_path / "log"),))) as child:
        child.start()
        child.join(60)
        assert child.exitcode == 0
    assert (tmp_path / "log").read_text().count("several server processes") == 1


# Mistakes of one's own


@pytest.mark.parametrize("option", ["retry_on", "give_up_on"])
async def test_a_predicate_that_fails_is_logged_and_does_not_end_the_retries(
    q: TinyQ, clock: FakeClock, durable: bool, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(error: BaseException) -> bool:
        raise LookupError("a bug in the predicate")

    options: dict[str, Any] = {option: broken}

    @q.task(durable=durable, retry=Retry(max_attempts=3, base=10, factor=2, jitter="none", **options))
    async def fails() -> None:
        raise ConnectionError("down")

    job = await fails.enqueue()
    await eventually(lambda: job.attempts == 1 and job.status is State.PENDING)
    assert job.run_at == clock.now() + timedelta(seconds=10)
    assert job.error == "ConnectionError: down"
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [LookupError]
    await eventually(lambda: job.status is State.DEAD, clock, 0.5)
    assert job.attempts == 3


async def test_a_job_has_five_minutes_unless_told_otherwise(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q(lease=3600)

    @q.task(durable=durable, retry=False)
    async def hangs() -> None:
        await asyncio.Event().wait()

    job = await hangs.enqueue()
    await eventually(lambda: job.status is State.RUNNING)
    await clock.advance(299)
    assert job.status is State.RUNNING
    await clock.advance(1)
    with pytest.raises(JobFailed, match="TimeoutError"):
        await job.result(timeout=20)


async def test_a_spawned_task_can_be_cancelled_like_any_task_and_that_is_no_failure(
    q: TinyQ, caplog: pytest.LogCaptureFixture
) -> None:
    task = q.spawn(asyncio.Event().wait(), name="refresh")
    await asyncio.sleep(0)
    assert (task.get_name(), (await q.stats()).count(task="refresh")) == ("refresh", 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await q.stats()).count(task="refresh") == 0
    assert messages(caplog, logging.ERROR) == []


async def test_a_spawned_task_that_is_cancelled_before_its_first_turn_leaves_no_warning(q: TinyQ) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        task = q.spawn(asyncio.Event().wait())
        task.cancel()
        await asyncio.wait({task})
        gc.collect()
    assert task.cancelled()
    assert [str(warning.message) for warning in caught] == []
