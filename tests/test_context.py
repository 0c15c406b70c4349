"""What a job knows of itself, what it tells of its progress, and what reaches it from whoever enqueued it."""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, edit, eventually, rows

import tinyq
from tinyq import Retry, Snooze, State, TinyQ

pytestmark = pytest.mark.timeout(300)

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="nobody's")


@pytest.fixture
def other(file: Path) -> TinyQ:
    """Another process, in effect: it shares nothing but the file."""
    return TinyQ(file, worker=False)


# the current job


async def test_a_job_knows_the_application_of_the_lifespan(durable: bool, db: Path | None) -> None:
    app, q = object(), TinyQ(db)

    @q.task
    async def which() -> bool:
        return tinyq.current_job().app is app

    async with asyncio.timeout(10), q.lifespan(app):
        assert await (await which.options(durable=durable).enqueue()).result()


async def test_without_a_lifespan_there_is_no_application(q: TinyQ, durable: bool) -> None:
    async with TinyQ().lifespan(object()):
        pass

    @q.task
    async def which() -> object:
        return tinyq.current_job().app

    assert await (await which.options(durable=durable).enqueue()).result() is None


async def test_the_application_of_one_lifespan_is_not_that_of_the_next_start() -> None:
    q = TinyQ()

    async def which() -> object:
        return tinyq.current_job().app

    async with q.lifespan(object()):
        pass
    async with asyncio.timeout(10), q:
        assert await (await q.enqueue(which)).result() is None


async def test_the_id_is_the_same_and_the_attempt_counts_over_retries(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    seen: list[tuple[str, int]] = []

    @q.task(retry=Retry(max_attempts=3, base=0.0))
    async def flaky() -> None:
        job = tinyq.current_job()
        seen.append((job.id, job.attempt))
        if job.attempt < 3:
            raise OSError

    handle = await flaky.options(durable=durable).enqueue()
    await eventually(lambda: handle.status is State.DONE, clock)
    assert seen == [(handle.id, 1), (handle.id, 2), (handle.id, 3)]


# progress


async def test_the_progress_of_a_running_job_is_on_its_handle(q: TinyQ, durable: bool) -> None:
    go_on = asyncio.Event()

    @q.task
    async def work() -> None:
        await tinyq.current_job().progress(0.4, "two of five")
        await go_on.wait()

    job = await work.options(durable=durable).enqueue()
    assert job.progress is None
    await eventually(lambda: job.progress == (0.4, "two of five"))
    assert (await q.get(job.id)).progress == (0.4, "two of five")
    go_on.set()
    await job.result()
    assert job.progress == (0.4, "two of five")


async def test_another_process_sees_what_was_awaited(open_file: Open, other: TinyQ) -> None:
    q = await open_file()
    told, go_on = asyncio.Event(), asyncio.Event()

    @q.task(durable=True)
    async def work() -> None:
        await tinyq.current_job().progress(0.25)
        told.set()
        await go_on.wait()
        await tinyq.current_job().progress(1, "ready")
        told.set()
        await asyncio.Event().wait()

    job = await work.enqueue()
    async with asyncio.timeout(10), other:
        await told.wait()
        assert (await other.get(job.id)).progress == (0.25, None)
        told.clear()
        go_on.set()
        await told.wait()
        assert (await other.get(job.id)).progress == (1.0, "ready")


async def test_a_plain_function_tells_its_progress_from_its_thread(open_file: Open, file: Path) -> None:
    q = await open_file()
    go_on = threading.Event()

    @q.task(durable=True)
    def work() -> None:
        tinyq.current_job().progress(0.5, "half")
        go_on.wait(20)

    job = await work.enqueue()
    try:
        await eventually(lambda: rows(file, "progress") == [('[0.5,"half"]',)])
        assert job.progress == (0.5, "half")
    finally:
        go_on.set()
    await job.result()


async def test_many_reports_are_few_writes_and_the_last_one_is_among_them(open_file: Open, file: Path) -> None:
    q = await open_file()
    written: list[str] = []
    assert q._engine is not None and q._engine.durable_store is not None
    store = q._engine.durable_store
    write = store.progress

    async def counted(reports: Any) -> Any:
        written.extend(text for _, _, text in reports)
        return await write(reports)

    store.progress = counted  # type: ignore[method-assign]
    go_on = asyncio.Event()

    @q.task(durable=True)
    async def work() -> None:
        for i in range(1000):
            await tinyq.current_job().progress(i / 1000)
        await go_on.wait()

    job = await work.enqueue()
    await eventually(lambda: rows(file, "progress") == [("[0.999,null]",)])
    go_on.set()
    await job.result()
    assert written[0] == "[0.0,null]" and written[-1] == "[0.999,null]"
    assert len(written) < 100


async def test_a_job_that_dies_keeps_the_last_progress_it_told(open_file: Open, file: Path) -> None:
    q = await open_file()

    @q.task(durable=True, retry=False)
    async def work() -> None:
        await tinyq.current_job().progress(0.1)
        await tinyq.current_job().progress(0.2, "then it broke")
        raise OSError("broken")

    job = await work.enqueue()
    await eventually(lambda: job.status is State.DEAD)
    assert job.progress == (0.2, "then it broke")
    assert rows(file, "state, progress") == [("dead", '[0.2,"then it broke"]')]


@pytest.mark.parametrize("error", [OSError("once more"), Snooze(30)], ids=["retry", "snooze"])
async def test_an_attempt_starts_without_progress(open_q: Open, clock: FakeClock, durable: bool, error: Exception) -> None:
    q = await open_q()
    found: list[object] = []

    @q.task(retry=[30])
    async def work() -> None:
        found.append(job.progress)
        await tinyq.current_job().progress(0.5)
        if len(found) == 1:
            raise error

    job = await work.options(durable=durable, delay=1).enqueue()
    await eventually(lambda: len(found) == 1 and job.status is State.PENDING, clock)
    assert (job.progress, (await q.get(job.id)).progress) == (None, None)
    await eventually(lambda: job.status is State.DONE, clock, 5)
    assert found == [None, None]


async def test_a_requeued_job_has_no_progress(q: TinyQ, durable: bool) -> None:
    go_on = asyncio.Event()

    @q.task(retry=False)
    async def work() -> None:
        if go_on.is_set():
            await asyncio.Event().wait()
        go_on.set()
        await tinyq.current_job().progress(0.5)
        raise OSError

    job = await work.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DEAD)
    assert job.progress == (0.5, None)
    await q.requeue(job.id)
    assert (await q.get(job.id)).progress is None


async def test_who_has_lost_the_lease_writes_no_progress(open_file: Open, file: Path) -> None:
    q = await open_file()
    started, go_on = asyncio.Event(), asyncio.Event()

    @q.task(durable=True)
    async def work() -> None:
        started.set()
        await go_on.wait()
        await tinyq.current_job().progress(0.7)
        started.set()
        await asyncio.Event().wait()

    await work.enqueue()
    async with asyncio.timeout(10):
        await started.wait()
        started.clear()
        edit(file, "UPDATE tinyq_jobs SET claim_no = claim_no + 1, worker = 'another'")
        go_on.set()
        await started.wait()
    assert rows(file, "progress") == [(None,)]


async def test_a_store_that_fails_is_one_warning_and_no_failure(
    open_file: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = await open_file()
    asked: list[object] = []

    async def fail(self: object, reports: object) -> None:
        asked.append(reports)
        raise tinyq.StoreError("the disk is full")

    monkeypatch.setattr(tinyq.SQLiteStore, "progress", fail)

    @q.task(durable=True)
    async def work() -> str:
        await tinyq.current_job().progress(1)
        await tinyq.current_job().progress(1)
        return "done"

    assert await (await work.enqueue()).result() == "done"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(asked) == 2
    assert len(warnings) == 1 and "its progress cannot be written: StoreError: the disk is full" in warnings[0]


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan"), float("inf")])
async def test_a_fraction_that_is_none_is_refused(q: TinyQ, durable: bool, fraction: float) -> None:
    @q.task
    async def work() -> str:
        with pytest.raises(ValueError, match="give a number from 0 to 1"):
            tinyq.current_job().progress(fraction)
        return "refused"

    job = await work.options(durable=durable).enqueue()
    assert await job.result() == "refused"
    assert job.progress is None


async def test_other_types_are_refused_and_a_long_message_is_cut(q: TinyQ, durable: bool) -> None:
    @q.task
    async def work() -> None:
        progress: Callable[..., Any] = tinyq.current_job().progress
        for wrong in (True, "0.5", None):
            with pytest.raises(TypeError, match="give a number from 0 to 1"):
                progress(wrong)
        with pytest.raises(TypeError, match="give a str"):
            progress(0.5, 7)
        await progress(0.5, "ä" * 2000)

    job = await work.options(durable=durable).enqueue()
    await job.result()
    assert job.progress == (0.5, "ä" * 500)


async def test_what_a_job_has_left_behind_tells_no_progress(q: TinyQ, durable: bool) -> None:
    left: list[tinyq.CurrentJob] = []

    @q.task
    async def work() -> None:
        left.append(tinyq.current_job())

    job = await work.options(durable=durable).enqueue()
    await job.result()
    await left[0].progress(0.5)
    assert job.progress is None


# context


async def test_a_best_effort_job_sees_the_context_of_whoever_enqueued_it(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None)

    async def read() -> str:
        return request_id.get()

    request_id.set("r1")
    first = await q.enqueue(read)
    later = await q.enqueue(read, delay=0.001)
    request_id.set("r2")
    second = await q.enqueue(read)
    await eventually(lambda: later.status is State.DONE, clock)
    assert [await job.result() for job in (first, later, second)] == ["r1", "r1", "r2"]


async def test_a_plain_function_sees_the_context_as_well() -> None:
    async with asyncio.timeout(10), TinyQ() as q:
        request_id.set("r1")
        assert await (await q.enqueue(lambda: request_id.get())).result() == "r1"


async def test_jobs_do_not_see_each_others_changes_and_retries_start_from_the_first(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None)
    seen: list[str] = []

    @q.task(retry=[0.001])
    async def change(name: str) -> None:
        seen.append(request_id.get())
        request_id.set(name)
        if tinyq.current_job().attempt == 1:
            raise OSError

    request_id.set("r1")
    jobs = [await change.enqueue("a"), await change.enqueue("b")]
    await eventually(lambda: all(job.status is State.DONE for job in jobs), clock)
    assert seen == ["r1"] * 4
    assert request_id.get() == "r1"


async def test_durable_jobs_and_schedules_run_in_an_empty_context(open_q: Open, clock: FakeClock, durable: bool) -> None:
    request_id.set("of whoever started it")
    q = await open_q()
    seen: list[str] = []

    @q.every(1)
    async def tick() -> None:
        seen.append(request_id.get())

    @q.task
    async def work() -> str:
        return request_id.get()

    await eventually(lambda: seen, clock)
    assert set(seen) == {"nobody's"}
    if durable:
        direct = await work.options(durable=True).enqueue()
        claimed = await work.options(durable=True, delay=1).enqueue()
        await eventually(lambda: claimed.status is State.DONE, clock)
        assert [await direct.result(), await claimed.result()] == ["nobody's"] * 2


async def test_what_watches_the_loop_holds_nobodys_context(open_at: OpenAt) -> None:
    q = await open_at(None)
    request_id.set("r1")
    await q.enqueue(asyncio.Event().wait)
    watch: Any = q._engine.crew._watch if q._engine else None
    found: list[str] = []
    watch._context.run(lambda: found.append(request_id.get()))
    assert found == ["nobody's"]


# headers


async def test_headers_reach_the_job_at_each_level(q: TinyQ, durable: bool) -> None:
    @q.task(headers={"of": "task"})
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    @q.task
    async def without() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    assert await (await read.options(durable=durable).enqueue()).result() == {"of": "task"}
    assert await (await read.options(durable=durable, headers={"of": "call"}).enqueue()).result() == {"of": "call"}
    assert await (await q.enqueue(read, durable=durable, headers={})).result() == {}
    assert await (await q.enqueue(without, durable=durable)).result() == {}


async def test_headers_last_over_retries_and_requeues(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    seen: list[dict[str, str]] = []

    @q.task(retry=[1])
    async def flaky() -> None:
        seen.append(dict(tinyq.current_job().headers))
        raise OSError

    job = await flaky.options(durable=durable, headers={"k": "ß"}).enqueue()
    await eventually(lambda: job.status is State.DEAD, clock)
    await q.requeue(job.id)
    await eventually(lambda: len(seen) == 3, clock)
    assert seen == [{"k": "ß"}] * 3


async def test_headers_of_a_durable_job_are_read_where_it_runs(open_file: Open, other: TinyQ) -> None:
    async with other:
        await other.enqueue("read", 1, durable=True, headers={"k": "one"})
        await other.enqueue("read", 2, durable=True, headers={"k": "two"}, key="k")
    q = await open_file()
    seen: dict[int, object] = {}

    @q.task(name="read")
    async def read(number: int) -> None:
        seen[number] = tinyq.current_job().headers

    await eventually(lambda: len(seen) == 2)
    assert seen == {1: {"k": "one"}, 2: {"k": "two"}}


async def test_a_replacement_brings_its_headers(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()

    @q.task(key="one", on_conflict="replace", delay=1)
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    await read.options(durable=durable, headers={"from": "the first"}).enqueue()
    job = await read.options(durable=durable, headers={"from": "the second"}).enqueue()
    await eventually(lambda: job.status is State.DONE, clock)
    assert await job.result() == {"from": "the second"}


async def test_a_promoted_job_takes_its_headers_along(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()

    @q.task(delay=1)
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    job = await read.options(headers={"k": "v"}).enqueue()
    q.on_enqueue(lambda headers: headers.update(by="hook"))
    hooked = await read.enqueue()
    assert await job.promote() and await hooked.promote()
    await eventually(lambda: hooked.status is State.DONE, clock)
    assert [await job.result(), await hooked.result()] == [{"k": "v"}, {"by": "hook"}]


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', "null", "[" * 5000])
async def test_headers_that_a_hand_has_spoilt_are_none(open_file: Open, file: Path, clock: FakeClock, text: str) -> None:
    q = await open_file()

    @q.task(durable=True, delay=1)
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    job = await read.options(headers={"k": "v"}).enqueue()
    edit(file, "UPDATE tinyq_jobs SET headers = ?", text)
    await eventually(lambda: job.status is State.DONE, clock)
    assert await job.result() == {}


@pytest.mark.parametrize("wrong", ["k=v", {"k": 1}, {1: "v"}, [("k", "v")]])
async def test_headers_are_a_mapping_of_text(q: TinyQ, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"enqueue\(.*\): headers .*give a"):
        await q.enqueue(asyncio.sleep, 0, headers=wrong)


async def test_headers_are_small(q: TinyQ) -> None:
    await q.enqueue(asyncio.sleep, 0, headers={"k": "v" * 8000})
    with pytest.raises(ValueError, match=r"headers take 9,\d+ bytes of JSON, and 8,192 is the most"):
        await q.enqueue(asyncio.sleep, 0, headers={"k": "v" * 9000})


# on_enqueue


async def test_a_hook_adds_headers_in_the_context_of_whoever_enqueues(q: TinyQ, durable: bool) -> None:
    @q.task
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    @q.on_enqueue
    def inject(headers: dict[str, str]) -> None:
        headers["request"] = request_id.get()

    request_id.set("r1")
    expected = {"request": "r1"}
    assert await (await read.options(durable=durable).enqueue()).result() == expected
    assert await (await q.enqueue(read, durable=durable)).result() == expected
    assert [await job.result() for job in await q.enqueue_many([(read, ()), (read, ())], durable=durable)] == [expected] * 2
    assert await (await q.enqueue(read, durable=durable, headers={"k": "v"})).result() == {"k": "v", **expected}


@pytest.mark.parametrize("running", [True, False])
def test_a_hook_is_called_in_the_thread_of_enqueue_sync(file: Path, running: bool) -> None:
    q = TinyQ(file, worker=False)
    q.on_enqueue(lambda headers: headers.update(request=request_id.get()))

    async def serve() -> None:
        async with q:
            await asyncio.to_thread(q.enqueue_sync, "read", durable=True, headers={"k": "v"})

    request_id.set("r1")
    if running:
        asyncio.run(serve())
    else:
        q.enqueue_sync("read", durable=True, headers={"k": "v"})
    assert rows(file, "headers") == [('{"k":"v","request":"r1"}',)]


async def test_a_hook_hears_of_calls_that_were_made_before_it_was_there(q: TinyQ, durable: bool) -> None:
    @q.task
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    async def ask() -> dict[str, str]:
        return await (await q.enqueue(read, durable=durable)).result()

    assert [await ask(), await ask()] == [{}, {}]
    numbers = iter(range(10))
    q.on_enqueue(lambda headers: headers.update(n=str(n)) if (n := next(numbers)) else None)
    assert [await ask(), await ask(), await ask()] == [{}, {"n": "1"}, {"n": "2"}]


async def test_hooks_are_not_called_for_schedules_and_retries(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    called: list[dict[str, str]] = []
    ran: list[int] = []
    q.on_enqueue(called.append)

    @q.every(5, retry=[0.1], headers={"k": "v"})
    async def tick() -> None:
        assert tinyq.current_job().headers == {"k": "v"}
        ran.append(tinyq.current_job().attempt)
        if len(ran) == 1:
            raise OSError

    await eventually(lambda: len(ran) == 3, clock)
    assert (ran, called) == ([1, 2, 1], [])


@pytest.mark.parametrize("wrong", [{"k": 1}, {"k": "v" * 9000}], ids=["no text", "too long"])
async def test_a_hook_that_fails_is_a_warning_and_the_job_goes_on(
    q: TinyQ, durable: bool, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    @q.task
    async def read() -> dict[str, str]:
        return dict(tinyq.current_job().headers)

    def fail(headers: dict[str, str]) -> None:
        headers["half"] = "done"
        raise RuntimeError("no tracer")

    q.on_enqueue(fail)
    q.on_enqueue(lambda headers: headers.update(wrong))
    q.on_enqueue(lambda headers: headers.update(good="yes"))
    assert await (await read.options(durable=durable).enqueue()).result() == {"good": "yes"}
    first, second = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "fail" in first and "RuntimeError: no tracer" in first
    assert "headers" in second


async def test_a_hook_is_a_plain_function() -> None:
    async def hook(headers: dict[str, str]) -> None:
        pass

    for wrong in (hook, None):
        with pytest.raises(TypeError, match=r"on_enqueue\(\) takes a plain function"):
            TinyQ().on_enqueue(wrong)  # type: ignore[type-var]
