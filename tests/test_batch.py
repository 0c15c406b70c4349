"""Batch handlers: many jobs in one call, of which each keeps what is its own. The same with and without a database."""

import asyncio
import functools
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import UUID

import pytest
from clock import FakeClock
from conftest import OpenAt
from fastapi import Depends
from fleet import Fleet, Member
from helpers import Open, counted, edit, eventually, rows, stopped_at_once
from pydantic import BaseModel
from servers import wait_until

import tinyq
from tinyq import Cancel, CurrentJob, Every, Job, JobFailed, Rate, Retry, RetryAfter, Snooze, State, Task, TinyQ

pytestmark = pytest.mark.timeout(60)

Lines = pytest.LogCaptureFixture


class Batches:
    """A batch handler that notes its calls, and answers what it is told to."""

    def __init__(self, q: TinyQ, size: int = 10, /, *, name: str = "poll", **options: Any) -> None:
        self.q = q
        self.calls: list[list[int]] = []
        self.attempts: list[list[int]] = []
        self.running = self.most = 0  # calls at once
        self.answer: Callable[[list[int]], Any] = lambda items: None
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.began = asyncio.Event()
        self.task: Task[[int], Any, Any] = q.batch(size, name=name, **options)(self.poll)

    async def poll(self, items: list[int]) -> Any:
        self.calls.append(sorted(items))
        self.attempts.append([job.attempt for job in tinyq.current_job().batch])
        self.began.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go_on.wait()
            answer = self.answer(items)
            return await answer if isinstance(answer, Awaitable) else answer
        finally:
            self.running -= 1

    async def enqueue(self, *items: int, **options: Any) -> list[Job[Any]]:
        """All at once, so that they are due together."""
        return await self.q.enqueue_many([(self.task, (item,)) for item in items], **options)


def over(jobs: Sequence[Job[Any]]) -> bool:
    return all(job.status not in (State.PENDING, State.RUNNING) for job in jobs)


def states(jobs: Sequence[Job[Any]]) -> list[State]:
    return [job.status for job in jobs]


def warnings(caplog: Lines) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def polls(q: TinyQ) -> Batches:
    return Batches(q)


# What may be a batch handler


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (0, ValueError, "size is 0"),
        (-3, ValueError, "size is -3"),
        (100_001, ValueError, "size is 100001"),
        (2.5, TypeError, "size is 2.5"),
        (True, TypeError, "size is True"),
        ("10", TypeError, "size is '10'"),
        (None, TypeError, "size is None"),
    ],
)
def test_a_size_that_is_none_is_refused(size: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TinyQ().batch(size)


@pytest.mark.parametrize(
    ("window", "error"),
    [(-1, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("1", TypeError), (True, TypeError)],
)
def test_a_window_that_is_no_time_is_refused(window: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="window"):
        TinyQ().batch(10, window=window)


def test_the_decorator_needs_its_size() -> None:
    q: Any = TinyQ()

    async def poll(items: list[int]) -> None: ...

    with pytest.raises(TypeError, match="size"):
        q.batch(poll)
    with pytest.raises(TypeError, match="size"):
        q.batch()


@pytest.mark.parametrize("options", [{"run_in": "process"}, {"tx": object()}, {"windows": 1}, {"replace": True}, {"key": 7}])
def test_options_that_a_batch_handler_does_not_take_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        TinyQ().batch(10, **options)


async def takes_one(item: int) -> None: ...
async def takes_two(items: list[int], more: int) -> None: ...
async def takes_two_lists(items: list[int], others: list[int]) -> None: ...
async def takes_nothing() -> None: ...
async def takes_a_keyword(*, items: list[int]) -> None: ...
async def takes_any_number(*items: int) -> None: ...
async def takes_a_dict(items: dict[str, int]) -> None: ...
async def takes_text(items: str) -> None: ...
async def takes_this_or_that(items: list[int] | int) -> None: ...
async def takes_a_set(items: set[int]) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        takes_one, takes_two, takes_two_lists, takes_nothing, takes_a_keyword, takes_any_number, takes_a_dict, takes_text,
        takes_this_or_that, takes_a_set,
    ],
)  # fmt: skip
def test_a_function_that_does_not_take_one_list_is_refused(function: Any) -> None:
    q = TinyQ()
    with pytest.raises(TypeError, match="a batch handler takes one list"):
        q.batch(10)(function)


def test_a_generator_is_refused() -> None:
    async def poll(items: list[int]) -> Any:
        yield items

    with pytest.raises(TypeError, match="generator"):
        TinyQ().batch(10)(poll)


class Items:
    """Handlers of several kinds that note their lists."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    async def given(self, items: list[int]) -> None:
        self.seen.append(items)

    async def unannotated(self, items) -> None:  # type: ignore[no-untyped-def]
        self.seen.append(items)

    async def bare(self, items: list) -> None:  # type: ignore[type-arg]
        self.seen.append(items)

    async def sequence(self, items: Sequence[int]) -> None:
        self.seen.append(items)

    async def any_tuple(self, items: tuple[int, ...]) -> None:
        self.seen.append(list(items))

    async def maybe(self, items: list[int] | None) -> None:
        self.seen.append(items)

    async def by_position(self, items: list[int], /) -> None:
        self.seen.append(items)

    async def annotated(self, items: Annotated[list[int], "of subscriptions"]) -> None:
        self.seen.append(items)

    async def with_more(self, more: str, items: list[int]) -> None:
        assert more == "more"
        self.seen.append(items)

    def in_thread(self, items: list[int]) -> None:
        assert threading.current_thread().name.startswith("tinyq-")
        self.seen.append(items)

    async def __call__(self, items: list[int]) -> None:
        self.seen.append(items)


KINDS: dict[str, Callable[[Items], Any]] = {
    "method": lambda items: items.given,
    "unannotated": lambda items: items.unannotated,
    "bare list": lambda items: items.bare,
    "sequence": lambda items: items.sequence,
    "tuple": lambda items: items.any_tuple,
    "list or None": lambda items: items.maybe,
    "positional only": lambda items: items.by_position,
    "annotated": lambda items: items.annotated,
    "partial": lambda items: functools.partial(items.with_more, "more"),
    "def": lambda items: items.in_thread,
    "callable": lambda items: items,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_of_this_kind_gets_its_items_in_one_list(q: TinyQ, durable: bool, kind: str) -> None:
    items = Items()
    task = q.batch(10, name="poll")(KINDS[kind](items))
    jobs = await q.enqueue_many([(task, (n,)) for n in (3, 1, 2)], durable=durable)
    for job in jobs:
        await job.result(10)
    assert items.seen == [[3, 1, 2]]


async def test_a_parameter_with_a_default_is_still_to_be_given_for_each_item(q: TinyQ, durable: bool) -> None:
    seen: list[Any] = []

    @q.batch(10, name="poll")
    async def poll(items: list[int] = []) -> None:  # noqa: B006
        seen.append(items)

    task: Any = poll
    with pytest.raises(TypeError, match="missing"):
        await task.enqueue()
    with pytest.raises(TypeError, match="missing"):
        await q.enqueue_many([(task, (1,)), (task, ())], durable=durable)
    await (await task.options(durable=durable).enqueue(7)).result(10)
    assert seen == [[7]]


async def test_an_item_may_be_given_by_name(q: TinyQ, durable: bool) -> None:
    seen: list[Any] = []

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> None:
        seen.append(items)

    jobs = await q.enqueue_many([(poll, (1,)), (poll, (), {"items": 2}), (poll, (3,))], durable=durable)
    for job in jobs:
        await job.result(10)
    assert seen == [[1, 2, 3]]


async def test_a_second_argument_is_refused(q: TinyQ, polls: Batches, durable: bool) -> None:
    enqueue: Any = polls.task.options(durable=durable).enqueue
    for wrong in ((), (1, 2)):
        with pytest.raises(TypeError, match="poll"):
            await enqueue(*wrong)
    with pytest.raises(TypeError, match="more"):
        await enqueue(1, more=2)


async def test_dependencies_are_provided_once_for_each_call(q: TinyQ, durable: bool) -> None:
    opened: list[str] = []
    seen: list[Any] = []

    async def session() -> str:
        opened.append("session")
        return f"session {len(opened)}"

    @q.batch(10, name="poll")
    async def poll(items: list[int], session: Annotated[str, Depends(session)]) -> list[int]:
        seen.append((items, session))
        return items

    jobs = await q.enqueue_many([(poll, (n,)) for n in range(3)], durable=durable)
    assert [await job.result(10) for job in jobs if not durable] == ([] if durable else [0, 1, 2])
    await eventually(lambda: over(jobs))
    assert seen == [([0, 1, 2], "session 1")]
    enqueue: Any = poll.options(durable=durable).enqueue
    with pytest.raises(TypeError, match="session"):
        await enqueue(7, session="x")


async def test_called_directly_it_is_the_function(q: TinyQ) -> None:
    @q.batch(2, name="double")
    async def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    @q.batch(2, name="triple")
    def triple(items: list[int]) -> list[int]:
        return [3 * item for item in items]

    assert await double([1, 2, 3]) == [2, 4, 6]
    assert triple([1, 2, 3]) == [3, 6, 9]
    assert asyncio.iscoroutinefunction(type(double).__call__)


async def test_jobs_under_an_older_name_go_with_the_others(open_file: Open, clock: FakeClock) -> None:
    before = await open_file(worker=False)
    for name in ("poll", "old_poll"):
        await before.enqueue_many([(name, (n,)) for n in range(2)], durable=True)
    q = await open_file()
    polls = Batches(q, aliases=["old_poll"])
    await eventually(lambda: sum(map(len, polls.calls)) == 4)
    assert len(polls.calls) <= 2


def test_another_task_of_its_name_is_refused() -> None:
    q = TinyQ()
    q.task(name="poll")(takes_one)
    with pytest.raises(tinyq.DuplicateTask):
        q.batch(10, name="poll")(Items().given)


async def test_it_can_be_registered_while_its_jobs_wait(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()
    await (await open_file(worker=False)).enqueue_many([("poll", (n,)) for n in range(3)], durable=True)
    polls = Batches(q)
    await eventually(lambda: polls.calls == [[0, 1, 2]], clock)


# Arguments and results


async def test_items_are_what_the_annotation_says_of_one(open_file: Open) -> None:
    q = await open_file()
    seen: list[Any] = []

    @q.batch(10, name="by_id")
    async def by_id(items: list[UUID]) -> None:
        seen.append(items)

    @q.batch(10, name="by_time")
    async def by_time(items: list[datetime]) -> None:
        seen.append(items)

    id, moment = UUID(int=7), datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    for job in (await q.enqueue(by_id, id, durable=True), await q.enqueue(by_time, moment, durable=True)):
        await job.result(10)
    assert [id] in seen and [moment] in seen


class Subscription(BaseModel):
    account: str
    number: int


async def test_items_may_be_models(q: TinyQ, durable: bool) -> None:
    seen: list[Any] = []

    @q.batch(10, name="poll")
    async def poll(items: list[Subscription]) -> None:
        seen.append(items)

    given = [Subscription(account="a", number=n) for n in range(3)]
    for job in await q.enqueue_many([(poll, (one,)) for one in given], durable=durable):
        await job.result(10)
    assert seen == [given]


async def test_what_is_no_item_is_refused_with_its_place(open_file: Open) -> None:
    q = await open_file()

    @q.batch(10, name="by_id")
    async def by_id(items: list[UUID]) -> None: ...

    @q.batch(10, name="poll")
    async def poll(items: list[Subscription]) -> None: ...

    wrong: Any = "7"
    with pytest.raises(tinyq.PayloadError, match="items"):
        await q.enqueue(by_id, wrong, durable=True)
    with pytest.raises(tinyq.PayloadError, match="items"):
        await by_id.options(durable=True).enqueue([UUID(int=7)])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    wrong = {"account": "a"}
    with pytest.raises(tinyq.PayloadError, match="items"):
        await q.enqueue(poll, wrong, durable=True)
    assert (await q.stats()).counts == ()


async def test_an_item_that_does_not_fit_is_parked_alone(open_file: Open, file: Path, clock: FakeClock, caplog: Lines) -> None:
    other = await open_file(worker=False)
    ids = [UUID(int=n) for n in range(3)]
    sent = await other.enqueue_many([("poll", (item,)) for item in (str(ids[0]), "two", str(ids[2]))], durable=True)
    q = await open_file()
    seen: list[list[UUID]] = []

    @q.batch(10, name="poll")
    async def poll(items: list[UUID]) -> None:
        seen.append(items)

    await eventually(lambda: rows(file, "reason") == [("parked",)], clock)
    assert seen == [[ids[0], ids[2]]]
    left = await q.get(sent[1].id)
    await eventually(lambda: left.status is State.PENDING)
    assert left.attempts == 0 and "items" in str(left.error)
    assert len([line for line in warnings(caplog) if "is parked" in line]) == 1


async def test_an_item_that_cannot_be_decoded_is_dead_alone(open_file: Open, file: Path) -> None:
    other = await open_file(worker=False)
    sent = await other.enqueue_many([("poll", (item,)) for item in (1, 2, 3)], durable=True)
    edit(file, "UPDATE tinyq_jobs SET payload = '{' WHERE seq = 2")
    q = await open_file()
    polls = Batches(q)
    await eventually(lambda: rows(file, "state") == [("dead",)])
    assert polls.calls == [[1, 3]]
    left = await q.get(sent[1].id)
    await eventually(lambda: left.status is State.DEAD)


async def test_each_item_has_its_result(open_q: Open, file: Path, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, result_ttl=60)
    polls.answer = lambda items: [None if item == 2 else 10 * item for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    assert [await job.result(10) for job in jobs] == [10, None, 30]
    if durable:
        assert rows(file, "result") == [("10",), ("null",), ("30",)]


async def test_results_are_written_as_the_annotation_says_of_one(open_file: Open, file: Path) -> None:
    q = await open_file()

    @q.batch(10, name="poll", result_ttl=60)
    async def poll(items: list[int]) -> list[UUID] | None:
        return [UUID(int=item) for item in items]

    jobs = await q.enqueue_many([(poll, (n,)) for n in (1, 2)], durable=True)
    await eventually(lambda: over(jobs))
    other = await open_file(worker=False)
    other.batch(10, name="poll")(poll.fn)
    assert await (await other.get(jobs[1].id)).result(10) == UUID(int=2)
    assert rows(file, "result")[0] == (f'"{UUID(int=1)}"',)


async def test_a_result_that_json_cannot_carry_costs_that_item_its_result_alone(open_file: Open, caplog: Lines) -> None:
    q = await open_file()
    polls = Batches(q, result_ttl=60)
    polls.answer = lambda items: [object() if item == 2 else item for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=True)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE] * 3
    assert len([line for line in warnings(caplog) if "no result is kept" in line]) == 1
    assert await jobs[2].result() == 3


async def test_a_tuple_of_values_will_do(q: TinyQ, polls: Batches, durable: bool) -> None:
    polls.answer = tuple
    jobs = await polls.enqueue(1, 2, durable=durable, result_ttl=60)
    assert [await job.result(10) for job in jobs] == [1, 2]


# Which items go into one call


async def test_a_call_takes_one_slot_and_no_more_than_its_size(open_q: Open, durable: bool) -> None:
    q = await open_q(concurrency=2)
    polls = Batches(q, 4)
    polls.go_on.clear()
    jobs = await polls.enqueue(*range(10), durable=durable)
    await eventually(lambda: len(polls.calls) == 2)
    assert sorted(polls.calls) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    polls.go_on.set()
    await eventually(lambda: over(jobs))
    assert sorted(polls.calls) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and polls.most == 2


async def test_items_are_in_the_order_in_which_they_are_due(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    seen: list[list[int]] = []

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> None:
        seen.append(items)

    blocker = await q.enqueue_many([(poll, (n,)) for n in (4, 3)], durable=durable, delay=1)
    more = await q.enqueue_many([(poll, (n,)) for n in (2, 9)], durable=durable, delay=0.5)
    first = await q.enqueue_many([(poll, (0,))], durable=durable, delay=1, priority=5)
    clock.block(2)
    await q.wake()
    await eventually(lambda: over([*blocker, *more, *first]), clock, 0)
    assert seen == [[0, 2, 9, 4, 3]]


async def test_another_kind_of_job_is_not_held_up(open_q: Open, durable: bool) -> None:
    q = await open_q(concurrency=2)
    polls = Batches(q, 4)
    polls.go_on.clear()
    seen: list[int] = []

    @q.task(name="other")
    async def other(n: int) -> None:
        seen.append(n)

    jobs = await polls.enqueue(*range(4), durable=durable)
    await polls.began.wait()
    await (await q.enqueue(other, 7, durable=durable)).result(10)
    assert seen == [7] and not over(jobs)


async def test_queues_are_bulkheads_for_calls_too(open_q: Open, durable: bool) -> None:
    q = await open_q(concurrency=5, queues={"polls": 1})
    polls = Batches(q, 2, queue="polls")
    polls.go_on.clear()
    jobs = await polls.enqueue(*range(4), durable=durable)
    elsewhere = await polls.enqueue(7, 8, durable=durable, queue="default")
    await eventually(lambda: len(polls.calls) == 2)
    assert sorted(polls.calls) == [[0, 1], [7, 8]]  # each queue has calls of its own
    polls.go_on.set()
    await eventually(lambda: over([*jobs, *elsewhere]))
    assert sorted(polls.calls) == [[0, 1], [2, 3], [7, 8]]


async def test_a_paused_queue_keeps_its_items(q: TinyQ, polls: Batches, durable: bool) -> None:
    await q.pause("default")
    jobs = await polls.enqueue(1, 2, durable=durable)
    await q.drain()
    assert polls.calls == []
    await q.resume("default")
    await eventually(lambda: over(jobs))
    assert polls.calls == [[1, 2]]


async def test_plain_functions_take_one_thread_for_a_call(open_q: Open, durable: bool) -> None:
    q = await open_q(concurrency=5, threads=1)
    seen: list[int] = []
    at_once: list[int] = []

    @q.batch(2, name="poll")
    def poll(items: list[int]) -> list[int]:
        at_once.append(len(items))
        seen.append(len(at_once))
        at_once.pop()
        return items

    jobs = await q.enqueue_many([(poll, (n,)) for n in range(6)], durable=durable, result_ttl=60)
    assert [await job.result(10) for job in jobs] == [*range(6)]
    assert seen == [1, 1, 1]


# The window


async def test_the_first_waits_for_others_as_long_as_the_window(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, window=2)
    first = await polls.enqueue(1, durable=durable)
    await clock.advance(1.5)
    second = await polls.enqueue(2, durable=durable)
    await clock.advance(0.4)
    await q.drain()
    assert polls.calls == [] and states([*first, *second]) == [State.PENDING] * 2
    await eventually(lambda: polls.calls, clock, 0.1)
    await eventually(lambda: over([*first, *second]))
    assert polls.calls == [[1, 2]]


async def test_what_waits_for_the_window_is_not_leased(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    polls = Batches(q, window=2)
    jobs = await polls.enqueue(1, 2, durable=True)
    await clock.advance(1)
    await q.drain()
    assert rows(file, "state, worker, lease, started, attempts, claim_no") == [("pending", None, None, None, 0, 0)] * 2
    await eventually(lambda: over(jobs), clock, 0.1)


async def test_a_full_call_does_not_wait(open_q: Open, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 3, window=3600)
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over(jobs))
    assert polls.calls == [[1, 2, 3]]


async def test_with_a_full_call_all_that_is_due_goes_along(open_q: Open, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 3, window=3600)
    jobs = await polls.enqueue(*range(7), durable=durable)
    await eventually(lambda: over(jobs[:6]))
    await q.drain()
    assert polls.calls[:2] == [[0, 1, 2], [3, 4, 5]]


async def test_an_item_that_fills_the_call_starts_it(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 3, window=3600)
    jobs = await polls.enqueue(1, 2, durable=durable)
    await clock.advance(1)
    await q.drain()
    assert polls.calls == []
    jobs += await polls.enqueue(3, durable=durable)
    await eventually(lambda: over(jobs))
    assert polls.calls == [[1, 2, 3]]


async def test_without_a_window_one_item_goes_alone_at_once(open_q: Open, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 3, window=0)
    await (await polls.enqueue(1, durable=durable))[0].result(10)
    await (await polls.enqueue(2, durable=durable))[0].result(10)
    assert polls.calls == [[1], [2]]


async def test_more_urgent_items_do_not_make_the_first_wait_longer(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, window=10)
    jobs: list[Job[Any]] = []
    for n in range(3):
        jobs += await polls.enqueue(n, durable=durable, priority=n)
        await clock.advance(4)
        await q.drain()
    await eventually(lambda: over(jobs), clock, 0)
    assert polls.calls == [[0, 1, 2]]


async def test_the_window_begins_when_a_delayed_item_is_due(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, window=2)
    began = clock.monotonic()
    [job] = await polls.enqueue(1, durable=durable, delay=5)
    await eventually(lambda: polls.calls, clock, 0.25)
    assert 7 <= clock.monotonic() - began < 8.5
    await eventually(lambda: over([job]))


async def test_items_that_wait_for_the_window_hold_up_none_of_their_task_that_wait_for_a_slot(
    open_q: Open, durable: bool
) -> None:
    q = await open_q(queues={"other": 1})
    polls, leave = Batches(q, 2, window=3600, durable=durable), asyncio.Event()

    @q.task(durable=durable, queue="other")
    async def busy() -> None:
        await leave.wait()

    first = await busy.enqueue()
    await eventually(lambda: first.status == State.RUNNING)
    await polls.enqueue(1)
    jobs = await polls.enqueue(2, 3, queue="other")
    leave.set()
    await eventually(lambda: over(jobs))
    assert polls.calls == [[2, 3]]


async def test_an_item_that_is_cancelled_while_it_waits_is_in_no_call(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, window=2)
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    assert await jobs[1].cancel()
    await eventually(lambda: over(jobs), clock, 0.1)
    assert polls.calls == [[1, 3]]


async def test_items_that_wait_no_more_do_not_fill_a_call(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 3, window=10, durable=durable)
    _, gone = await polls.enqueue(1, 2)
    await clock.advance(1)
    assert await gone.cancel()
    await polls.enqueue(3)
    await clock.advance(1)
    assert polls.calls == []
    await eventually(lambda: polls.calls, clock)
    assert polls.calls == [[1, 3]]


async def test_items_that_wait_for_their_window_do_not_fall_behind(
    open_q: Open, clock: FakeClock, durable: bool, caplog: Lines
) -> None:
    q = await open_q(behind_after=10)
    polls = Batches(q, window=60)
    jobs = await polls.enqueue(1, 2, durable=durable)
    for _ in range(59):
        await clock.advance(1)
        await asyncio.sleep(0.001)
    assert polls.calls == []
    await eventually(lambda: over(jobs), clock, 0.5)
    assert warnings(caplog) == []


async def test_at_the_end_items_do_not_wait_for_their_window(open_at: OpenAt, clock: FakeClock) -> None:
    q = await open_at(None)
    polls = Batches(q, window=3600)
    jobs = await polls.enqueue(1, 2, durable=False)
    await clock.advance(1)
    assert polls.calls == []
    async with asyncio.timeout(10):
        await q.stop(grace=5)
    assert polls.calls == [[1, 2]] and states(jobs) == [State.DONE] * 2


# What becomes of each item


async def test_with_none_all_are_done(q: TinyQ, polls: Batches, durable: bool) -> None:
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    assert [await job.result(10) for job in jobs if not durable] == [None] * (0 if durable else 3)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE] * 3


async def test_an_item_whose_entry_is_an_exception_fails_alone(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, retry=Retry(max_attempts=3, base=10, jitter="none"))
    polls.answer = lambda items: [ValueError("seven") if item == 7 else item for item in items]
    jobs = await polls.enqueue(*range(1, 11), durable=durable)
    await eventually(lambda: over([*jobs[:6], *jobs[7:]]))
    assert states(jobs).count(State.DONE) == 9
    assert (jobs[6].status, jobs[6].attempts, jobs[6].error) == (State.PENDING, 1, "ValueError: seven")
    assert (jobs[6].run_at - clock.now()).total_seconds() == 10
    await eventually(lambda: over(jobs), clock, 1)
    assert polls.calls == [[*range(1, 11)], [7], [7]] and polls.attempts[1:] == [[2], [3]]
    assert jobs[6].status is State.DEAD and "no attempts left" in str(jobs[6].reason)


async def test_an_item_that_has_failed_is_in_a_call_with_others_again(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, retry=[10])
    polls.answer = lambda items: [OSError() if len(polls.calls) == 1 and item == 2 else None for item in items]
    jobs = await polls.enqueue(1, 2, durable=durable)
    await eventually(lambda: over(jobs[:1]))
    jobs += await polls.enqueue(3, durable=durable, run_at=jobs[1].run_at)
    await eventually(lambda: over(jobs), clock, 1)
    assert polls.calls == [[1, 2], [2, 3]] and polls.attempts[1] == [2, 1]


async def test_each_item_has_its_own_retry_settings(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, retry=[1])
    polls.answer = lambda items: [OSError(item) for item in items]
    jobs = [
        *await q.enqueue_many([(polls.task, (1,))], durable=durable, retry=False),
        *await q.enqueue_many([(polls.task, (2,))], durable=durable),
        *await q.enqueue_many([(polls.task, (3,))], durable=durable, retry=[1, 1]),
    ]
    await eventually(lambda: over(jobs), clock, 0.5)
    assert [(job.status, job.attempts) for job in jobs] == [(State.DEAD, 1), (State.DEAD, 2), (State.DEAD, 3)]


async def test_an_item_may_be_snoozed_alone(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q)
    polls.answer = lambda items: [Snooze(30) if item == 2 and len(polls.calls) == 1 else None for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over([jobs[0], jobs[2]]))
    assert (jobs[1].status, jobs[1].attempts) == (State.PENDING, 0)
    assert (jobs[1].run_at - clock.now()).total_seconds() == 30
    await eventually(lambda: over(jobs), clock, 1)
    assert polls.calls == [[1, 2, 3], [2]] and polls.attempts[1] == [1]
    assert states(jobs) == [State.DONE] * 3


async def test_an_item_may_say_when_it_is_to_be_retried(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, retry=[5])
    polls.answer = lambda items: [RetryAfter(30) if item == 2 and len(polls.calls) == 1 else None for item in items]
    jobs = await polls.enqueue(1, 2, durable=durable)
    await eventually(lambda: over(jobs[:1]))
    assert (jobs[1].status, jobs[1].attempts) == (State.PENDING, 1)
    assert (jobs[1].run_at - clock.now()).total_seconds() == 30
    await eventually(lambda: over(jobs), clock, 1)
    assert states(jobs) == [State.DONE] * 2


async def test_an_item_may_be_cancelled_alone(q: TinyQ, polls: Batches, durable: bool) -> None:
    polls.answer = lambda items: [Cancel("unknown") if item == 2 else None for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE, State.CANCELLED, State.DONE]
    assert jobs[1].reason == "unknown"


async def test_an_item_that_ends_dead_is_told_to_the_hooks_once(
    open_q: Open, clock: FakeClock, durable: bool, caplog: Lines
) -> None:
    q = await open_q()
    told: list[str] = []
    q.on_dead(lambda job: told.append(job.id))
    polls = Batches(q, retry=False)
    polls.answer = lambda items: [ValueError() if item == 2 else None for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over(jobs) and told)
    assert states(jobs) == [State.DONE, State.DEAD, State.DONE] and told == [jobs[1].id]
    assert len(warnings(caplog)) == 1
    with pytest.raises(JobFailed):
        await jobs[1].result()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()], ids=repr)
async def test_an_entry_of_any_exception_fails_its_item(q: TinyQ, polls: Batches, durable: bool, error: BaseException) -> None:
    polls.answer = lambda items: [error if item == 2 else None for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=durable, retry=False)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE, State.DEAD, State.DONE]


class Careless(Snooze):
    """An outcome that was not made as it should be."""

    def __init__(self) -> None:
        pass


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "entry", [Careless(), Silent(), ValueError, UnicodeDecodeError], ids=["careless", "silent", "class", "bare"]
)
async def test_an_entry_that_is_no_good_exception_fails_its_item_alone(
    q: TinyQ, polls: Batches, durable: bool, entry: object
) -> None:
    polls.answer = lambda items: [entry if item == 2 else None for item in items]
    jobs = await polls.enqueue(1, 2, 3, durable=durable, retry=False)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE, State.DEAD, State.DONE] and polls.calls == [[1, 2, 3]]


async def test_what_gather_answers_can_be_returned(q: TinyQ, polls: Batches, durable: bool) -> None:
    async def one(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    polls.answer = lambda items: asyncio.gather(*map(one, items), return_exceptions=True)
    jobs = await polls.enqueue(1, 2, 3, durable=durable, retry=False, result_ttl=60)
    assert [await jobs[0].result(10), await jobs[2].result(10)] == [1, 3]
    assert (jobs[1].status, jobs[1].error) == (State.DEAD, "ValueError: two")


# A call that fails


def raise_if_seven(items: list[int]) -> None:
    if 7 in items:
        raise ValueError("seven")


async def test_all_items_of_a_call_that_raises_once_run_again(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 5, retry=[60])

    def fail_once(items: list[int]) -> None:
        if len(polls.calls) == 1:
            raise OSError("down")

    polls.answer = fail_once
    jobs = await polls.enqueue(*range(5), durable=durable)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE] * 5
    assert polls.calls[0] == [*range(5)] and sorted(polls.calls[1:]) == [[n] for n in range(5)]
    assert [job.attempts for job in jobs] == [1] * 5 and polls.attempts[1:] == [[1]] * 5


async def test_an_item_that_makes_its_call_raise_ends_dead_alone(
    open_q: Open, clock: FakeClock, durable: bool, caplog: Lines
) -> None:
    q = await open_q()
    told: list[str] = []
    q.on_dead(lambda job: told.append(job.id))
    polls = Batches(q, retry=[1, 1])
    polls.answer = raise_if_seven
    jobs = await polls.enqueue(*range(1, 11), durable=durable)
    await eventually(lambda: over(jobs) and told, clock, 0.5)
    others = [*jobs[:6], *jobs[7:]]
    assert states(others) == [State.DONE] * 9 and [job.attempts for job in others] == [1] * 9
    assert (jobs[6].status, jobs[6].attempts, jobs[6].error) == (State.DEAD, 3, "ValueError: seven")
    assert told == [jobs[6].id]
    assert len(polls.calls) == 1 + 10 + 2
    lines = warnings(caplog)
    assert len([line for line in lines if "a call of poll failed for its 10 jobs" in line]) == 1
    assert len(lines) == 1 + 2 + 1  # the call, two retries of seven, its end


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda items: items[:-1], "2 values for 3 items"),
        (lambda items: [*items, 7], "4 values for 3 items"),
        (lambda items: [], "0 values for 3 items"),
        (lambda items: {1: "one"}, "a dict for 3 items"),
        (lambda items: "abc", "a str for 3 items"),
        (lambda items: 7, "a int for 3 items"),
        (lambda items: (item for item in items), "a generator for 3 items"),
        (lambda items: {1, 2, 3}, "a set for 3 items"),
    ],
)
async def test_an_answer_that_is_not_one_value_for_each_item_counts_as_a_failed_call(
    open_q: Open, durable: bool, caplog: Lines, answer: Callable[[list[int]], Any], words: str
) -> None:
    q = await open_q()
    polls = Batches(q, retry=False)
    polls.answer = lambda items: answer(items) if len(items) > 1 else None
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE] * 3 and sorted(polls.calls[1:]) == [[1], [2], [3]]
    [line] = warnings(caplog)
    assert words in line and "a call of poll failed for its 3 jobs" in line


async def test_a_wrong_answer_for_a_single_item_counts(q: TinyQ, polls: Batches, durable: bool) -> None:
    polls.answer = lambda items: 7
    [job] = await polls.enqueue(1, durable=durable, retry=False)
    await eventually(lambda: over([job]))
    assert (job.status, job.attempts) == (State.DEAD, 1)
    assert "TypeError: a batch handler returns None, or a list" in str(job.error)


async def test_a_call_for_one_item_that_raises_counts(open_q: Open, clock: FakeClock, durable: bool, caplog: Lines) -> None:
    q = await open_q()
    polls = Batches(q, retry=[10])
    polls.answer = raise_if_seven
    [job] = await polls.enqueue(7, durable=durable)
    await eventually(lambda: job.error)
    await eventually(lambda: job.status is State.PENDING)
    assert job.attempts == 1 and (job.run_at - clock.now()).total_seconds() == 10
    await eventually(lambda: over([job]), clock, 1)
    assert job.status is State.DEAD and polls.attempts == [[1], [2]]
    assert "a call of" not in caplog.text


class Own(BaseException):
    """Of a library."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Own()], ids=repr)
async def test_a_call_that_ends_by_what_is_no_exception_is_a_failed_one(
    open_q: Open, durable: bool, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(error, KeyboardInterrupt):
        monkeypatch.setattr("tinyq.signal.getsignal", lambda number: None)  # as under a server that catches Ctrl-C itself
    q = await open_q()
    polls = Batches(q, retry=False)

    def fail(items: list[int]) -> None:
        if 2 in items:
            raise error

    polls.answer = fail
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE, State.DEAD, State.DONE]
    assert sorted(polls.calls) == sorted([[1, 2, 3], [1], [2], [3]])


async def test_a_call_that_cancels_its_own_task_is_a_failed_one(open_q: Open, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, retry=False)

    async def cancel_itself(items: list[int]) -> None:
        if 2 in items:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(3600)

    polls.answer = cancel_itself
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: len(polls.calls) > 1 and over([jobs[0], jobs[2]]))
    assert states([jobs[0], jobs[2]]) == [State.DONE] * 2


@pytest.mark.parametrize("in_thread", [False, True], ids=["async", "def"])
async def test_a_call_that_times_out_is_a_failed_one(
    open_q: Open, clock: FakeClock, durable: bool, in_thread: bool, caplog: Lines
) -> None:
    q = await open_q()
    calls: list[list[int]] = []
    told = threading.Event()

    @q.batch(10, name="hangs", timeout=5, retry=False)
    async def hangs(items: list[int]) -> None:
        calls.append(items)
        if 2 in items:
            await asyncio.Event().wait()

    @q.batch(10, name="looks", timeout=5, retry=False)
    def looks(items: list[int]) -> None:
        calls.append(items)
        while 2 in items and not tinyq.current_job().cancelled:
            told.wait(0.01)

    task = looks if in_thread else hangs
    jobs = await q.enqueue_many([(task, (n,)) for n in (1, 2, 3)], durable=durable)
    await eventually(lambda: over(jobs), clock, 0.5)
    assert states(jobs) == [State.DONE, State.DEAD, State.DONE]
    assert sorted(calls) == sorted([[1, 2, 3], [1], [2], [3]])
    assert "timed out after 5 s" in str(jobs[1].error) and jobs[1].attempts == 1
    assert len([line for line in warnings(caplog) if "failed for its 3 jobs" in line and "timed out after 5 s" in line]) == 1


async def test_the_timeout_of_a_call_is_the_longest_of_its_items(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q(concurrency=1)
    polls = Batches(q, 10, timeout=5)
    block = asyncio.Event()

    @q.task(name="block")
    async def blocks() -> None:
        await block.wait()

    polls.go_on.clear()
    await q.enqueue(blocks)
    jobs = await polls.enqueue(1, durable=durable)
    jobs += await polls.enqueue(2, durable=durable, timeout=60)
    block.set()
    await polls.began.wait()
    await clock.advance(30)
    assert states(jobs) == [State.RUNNING] * 2
    polls.go_on.set()
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE] * 2 and polls.calls == [[1, 2]]


async def test_snooze_from_the_call_is_for_each_of_its_items(
    open_q: Open, clock: FakeClock, durable: bool, caplog: Lines
) -> None:
    q = await open_q()
    polls = Batches(q)

    def busy(items: list[int]) -> None:
        if len(polls.calls) < 4:
            raise Snooze(30)

    polls.answer = busy
    jobs = await polls.enqueue(1, 2, 3, durable=durable, retry=False)
    await eventually(lambda: over(jobs), clock, 1)
    assert polls.calls == [[1, 2, 3]] * 4 and polls.attempts == [[1, 1, 1]] * 4
    assert states(jobs) == [State.DONE] * 3 and warnings(caplog) == []


async def test_retry_after_from_the_call_is_for_each_of_its_items(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q)

    def limited(items: list[int]) -> None:
        if len(polls.calls) == 1:
            raise RetryAfter(30)

    polls.answer = limited
    jobs = await polls.enqueue(1, 2, 3, durable=durable, retry=[1])
    await eventually(lambda: over(jobs), clock, 1)
    assert polls.calls == [[1, 2, 3]] * 2 and polls.attempts == [[1, 1, 1], [2, 2, 2]]
    assert states(jobs) == [State.DONE] * 3


async def test_cancel_from_the_call_is_for_each_of_its_items(q: TinyQ, polls: Batches, durable: bool) -> None:
    def refuse(items: list[int]) -> None:
        raise Cancel("no such account")

    polls.answer = refuse
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.CANCELLED] * 3 and {job.reason for job in jobs} == {"no such account"}
    assert polls.calls == [[1, 2, 3]]


async def test_items_of_a_failed_call_do_not_wait_for_the_window_again(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 3, window=3600, retry=False)
    polls.answer = lambda items: raise_if_seven(items)
    jobs = await polls.enqueue(7, 8, 9, durable=durable)
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DEAD, State.DONE, State.DONE]


async def test_an_item_of_a_failed_call_stays_alone_for_its_retries(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q(concurrency=1)
    polls = Batches(q, retry=[5, 5])
    polls.answer = raise_if_seven
    jobs = await polls.enqueue(6, 7, durable=durable)
    await eventually(lambda: jobs[1].attempts == 1 and jobs[1].status is State.PENDING, clock, 0)
    jobs += await polls.enqueue(8, 9, durable=durable, run_at=jobs[1].run_at)
    await eventually(lambda: over(jobs), clock, 0.5)
    assert states(jobs) == [State.DONE, State.DEAD, State.DONE, State.DONE]
    assert polls.calls.count([7]) == 3 and [8, 9] in polls.calls


async def test_an_item_keeps_what_it_had_before_its_call_failed(open_q: Open, clock: FakeClock, durable: bool) -> None:
    """Its attempts, and its place among the others."""
    q = await open_q()
    polls = Batches(q, retry=[5, 5])
    polls.answer = lambda items: [OSError() for _ in items]
    jobs = await polls.enqueue(1, 7, durable=durable)
    await eventually(lambda: [job.attempts for job in jobs] == [1, 1] and states(jobs) == [State.PENDING] * 2)
    polls.answer = raise_if_seven
    await eventually(lambda: over(jobs), clock, 0.5)
    assert polls.calls[1] == [1, 7] and polls.attempts[1] == [2, 2]
    assert [job.attempts for job in jobs] == [2, 3]
    assert states(jobs) == [State.DONE, State.DEAD]


async def test_the_table_says_why_an_item_runs_singly(open_file: Open, file: Path) -> None:
    q = await open_file(concurrency=1)
    polls = Batches(q, retry=[60])
    block = asyncio.Event()

    async def fail_then_block(items: list[int]) -> None:
        if len(items) > 1:
            raise OSError("down")
        await block.wait()

    polls.answer = fail_then_block
    jobs = await polls.enqueue(1, 2, durable=True)
    await eventually(lambda: len(polls.calls) == 2)
    [(state, reason, error, attempts)] = [row for row in rows(file, "state, reason, error, attempts") if row[0] == "pending"]
    assert (state, reason, error, attempts) == ("pending", "its call with others failed", "OSError: down", 0)
    block.set()
    await eventually(lambda: over(jobs))


async def test_the_job_of_a_call_is_the_first_that_is_in_it(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q(concurrency=1)
    seen: list[tuple[str, list[str]]] = []
    block = asyncio.Event()

    @q.task(name="block")
    async def blocks() -> None:
        await block.wait()

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> None:
        job = tinyq.current_job()
        seen.append((job.id, [item.id for item in job.batch]))

    await q.enqueue(blocks)
    jobs = await q.enqueue_many([(poll, (1,))], durable=durable, expires=5)
    jobs += await q.enqueue_many([(poll, (2,)), (poll, (3,))], durable=durable)
    await clock.advance(10)
    block.set()
    await eventually(lambda: over(jobs))
    assert jobs[0].status is State.CANCELLED and jobs[0].reason == "expired before it started"
    assert seen == [(jobs[1].id, [jobs[1].id, jobs[2].id])]


async def test_outside_of_a_batch_handler_there_is_no_batch(q: TinyQ, durable: bool) -> None:
    seen: list[Sequence[CurrentJob]] = []

    @q.task(name="single")
    async def single() -> None:
        seen.append(tinyq.current_job().batch)

    await (await q.enqueue(single, durable=durable)).result(10)
    assert [len(batch) for batch in seen] == [0]


# One settlement for all


async def test_all_items_of_a_call_are_settled_at_once(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    settle = tinyq.SQLiteStore.settle

    async def counting(store: Any, settlements: Sequence[Any], now: int) -> Any:
        settled.append(len(settlements))
        return await settle(store, settlements, now)

    monkeypatch.setattr(tinyq.SQLiteStore, "settle", counting)
    q = await open_file()
    polls = Batches(q, 100)
    polls.answer = lambda items: [OSError() if item % 10 == 0 else Snooze(60) if item % 10 == 1 else item for item in items]
    jobs = await polls.enqueue(*range(100), durable=True, retry=[60])
    await eventually(lambda: [job.status for job in jobs].count(State.DONE) == 80)
    assert settled == [100]


async def test_a_call_that_fails_is_settled_at_once_and_told_of_in_one_line(
    open_file: Open, monkeypatch: pytest.MonkeyPatch, caplog: Lines
) -> None:
    settled: list[int] = []
    settle = tinyq.SQLiteStore.settle

    async def counting(store: Any, settlements: Sequence[Any], now: int) -> Any:
        settled.append(len(settlements))
        return await settle(store, settlements, now)

    monkeypatch.setattr(tinyq.SQLiteStore, "settle", counting)
    tracebacks = counted(monkeypatch, "traceback_text")
    caplog.set_level(logging.INFO, "tinyq")
    q = await open_file()
    polls = Batches(q, 100)

    def fail(items: list[int]) -> None:
        if len(items) > 1:
            raise OSError("down")

    polls.answer = fail
    jobs = await polls.enqueue(*range(100), durable=True)
    await eventually(lambda: over(jobs))
    assert settled[0] == 100 and sum(settled) == 200 and len(tracebacks) == 1
    told = [record for record in caplog.records if "poll" in record.getMessage()]
    assert [record.getMessage() for record in told] == [
        "a call of poll failed for its 100 jobs, which run singly now: OSError: down"
    ]
    assert told[0].exc_info is not None


# Recurring jobs


async def quiet(q: TinyQ) -> None:
    """Return when nothing runs and nothing is due."""
    async with asyncio.timeout(20):
        while True:
            counts = (await q.stats()).counts
            if not any(count.due or count.state == "running" for count in counts):
                return
            await asyncio.sleep(0.001)


async def ticks(q: TinyQ, clock: FakeClock, count: int, seconds: float = 1) -> None:
    for _ in range(count):
        await clock.advance(seconds)
        await quiet(q)


async def recurring(polls: Batches, items: Sequence[int], seconds: float = 1, **options: Any) -> None:
    schedule = polls.q.schedule
    await asyncio.gather(*(schedule(polls.task, n, when=Every(seconds), key=str(n), **options) for n in items))


async def test_recurring_jobs_advance_together(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, range(5))
    await ticks(q, clock, 4)
    assert polls.calls == [[*range(5)]] * 4
    assert {(await q.schedules(polls.task, key=str(n)))[0].stats.fired for n in range(5)} == {4}


async def test_each_of_many_recurring_jobs_is_in_one_call_of_each_tick(open_q: Open, clock: FakeClock) -> None:
    q = await open_q(concurrency=2)
    polls = Batches(q, 100)
    await recurring(polls, range(300))
    for tick in range(1, 6):
        await ticks(q, clock, 1)
        assert sorted(len(call) for call in polls.calls) == [100] * 3 * tick
        assert sorted(n for call in polls.calls[-3:] for n in call) == [*range(300)]
    assert (await q.stats()).count(task="poll") == 300


async def test_each_recurring_item_has_its_own_fire_time(q: TinyQ, clock: FakeClock) -> None:
    began, seen = clock.now(), list[dict[int, float]]()

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> None:
        fires = [job.fire_time for job in tinyq.current_job().batch]
        seen.append({n: (fire - began).total_seconds() for n, fire in zip(items, fires, strict=True) if fire is not None})

    for n in (1, 2, 3):
        await q.schedule(poll, n, when=Every(n), key=str(n))
    await ticks(q, clock, 3)
    clock.block(3)
    await ticks(q, clock, 1, 0)
    assert seen == [{1: 1}, {1: 2, 2: 2}, {1: 3, 3: 3}, {1: 6, 2: 6, 3: 6}]


async def test_one_that_is_unscheduled_while_its_call_runs_is_not_in_the_next(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, range(3))
    polls.go_on.clear()
    await clock.advance(1)
    await polls.began.wait()
    assert await q.unschedule(polls.task, key="1")
    polls.go_on.set()
    await quiet(q)
    await ticks(q, clock, 2)
    assert polls.calls == [[0, 1, 2], [0, 2], [0, 2]]


async def test_one_that_is_paused_while_its_call_runs_waits_until_it_is_resumed(
    q: TinyQ, polls: Batches, clock: FakeClock
) -> None:
    await recurring(polls, range(3))
    polls.go_on.clear()
    await clock.advance(1)
    await polls.began.wait()
    [schedule] = await q.schedules(polls.task, key="1")
    await schedule.pause()
    polls.go_on.set()
    await quiet(q)
    await ticks(q, clock, 2)
    await schedule.resume()
    await ticks(q, clock, 1)
    assert polls.calls == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]


async def test_one_that_is_scheduled_anew_while_its_call_runs_takes_its_new_rule_and_item(
    q: TinyQ, polls: Batches, clock: FakeClock
) -> None:
    await recurring(polls, range(3))
    polls.go_on.clear()
    await clock.advance(1)
    await polls.began.wait()
    await q.schedule(polls.task, 7, when=Every(3), key="1")
    polls.go_on.set()
    await quiet(q)
    await ticks(q, clock, 3)
    assert polls.calls == [[0, 1, 2], [0, 2], [0, 2, 7], [0, 2]]


async def test_fire_times_that_pass_while_the_call_runs_are_skipped(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, range(3))
    polls.go_on.clear()
    await clock.advance(1)
    await polls.began.wait()
    await clock.advance(2.5)
    polls.go_on.set()
    await quiet(q)
    assert polls.calls == [[0, 1, 2]]
    await ticks(q, clock, 1, 0.5)
    assert polls.calls == [[0, 1, 2]] * 2
    assert {(await q.schedules(polls.task, key=str(n)))[0].stats.skipped for n in range(3)} == {2}


async def test_with_overlap_queue_the_last_of_them_is_run_right_after(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, [0, 1], overlap="queue")
    await recurring(polls, [2])
    polls.go_on.clear()
    await clock.advance(1)
    await polls.began.wait()
    await clock.advance(2.5)
    polls.go_on.set()
    await quiet(q)
    assert polls.calls == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize(("misfire", "calls"), [("latest", 1), ("all", 5), ("skip", 0)])
async def test_what_was_missed_is_made_up_for_together(
    q: TinyQ, polls: Batches, clock: FakeClock, misfire: str, calls: int
) -> None:
    await recurring(polls, range(3), 10, misfire=misfire)
    clock.block(55)
    await ticks(q, clock, 1, 0)
    assert polls.calls == [[0, 1, 2]] * calls


@pytest.mark.parametrize("options", [{"misfire": "skip"}, {"misfire_grace": 1}, {"misfire": "all", "misfire_grace": 0.5}, {}])
async def test_a_fire_time_is_not_missed_by_waiting_for_the_window(
    open_q: Open, clock: FakeClock, options: dict[str, Any], caplog: Lines
) -> None:
    q = await open_q()
    polls = Batches(q, window=5)
    await recurring(polls, range(3), 60, **options)
    for n, seconds in enumerate((60, 55)):
        await clock.advance(seconds)
        await q.drain()
        assert len(polls.calls) == n
        await clock.advance(5)
        await quiet(q)
    assert polls.calls == [[0, 1, 2]] * 2
    assert {(await q.schedules(polls.task, key=str(n)))[0].stats.missed for n in range(3)} == {0}
    assert warnings(caplog) == []


async def test_a_delay_beyond_the_window_is_a_misfire(open_q: Open, clock: FakeClock) -> None:
    q = await open_q()
    polls = Batches(q, window=5)
    await recurring(polls, range(3), 60, misfire="skip")
    clock.block(75)
    await ticks(q, clock, 1, 0)
    assert polls.calls == []


async def test_items_of_a_failed_call_are_not_too_late_for_their_fire_time(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, range(3), 60, misfire="skip")
    polls.go_on.clear()

    def fail(items: list[int]) -> None:
        if len(items) > 1 and len(polls.calls) == 1:
            raise OSError("down")

    polls.answer = fail
    await clock.advance(60)
    await polls.began.wait()
    await clock.advance(20)
    polls.go_on.set()
    await quiet(q)
    assert polls.calls[0] == [0, 1, 2] and sorted(polls.calls[1:]) == [[0], [1], [2]]
    await ticks(q, clock, 1, 40)
    assert polls.calls[4:] == [[0, 1, 2]]
    assert {(await q.schedules(polls.task, key=str(n)))[0].stats.missed for n in range(3)} == {0}


async def test_a_recurring_item_fails_alone(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, range(3), retry=False)
    polls.answer = lambda items: [OSError("down") if item == 1 else None for item in items]
    await ticks(q, clock, 3)
    assert polls.calls == [[0, 1, 2]] * 3
    stats = [(await q.schedules(polls.task, key=str(n)))[0].stats for n in range(3)]
    assert [(one.fired, one.failed) for one in stats] == [(3, 0), (3, 3), (3, 0)]


async def test_after_a_call_that_failed_they_are_back_in_one_call_at_the_next_fire_time(
    q: TinyQ, polls: Batches, clock: FakeClock
) -> None:
    await recurring(polls, range(3), retry=False)

    def fail_once(items: list[int]) -> None:
        if len(polls.calls) == 1:
            raise OSError("down")

    polls.answer = fail_once
    await ticks(q, clock, 1)
    assert polls.calls[0] == [0, 1, 2] and sorted(polls.calls[1:]) == [[0], [1], [2]]
    await ticks(q, clock, 2)
    assert polls.calls[4:] == [[0, 1, 2]] * 2
    stats = [(await q.schedules(polls.task, key=str(n)))[0].stats for n in range(3)]
    assert [(one.fired, one.failed) for one in stats] == [(3, 0)] * 3


async def test_a_recurring_item_that_makes_its_call_raise_does_so_once(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, [6, 7, 8], retry=False)
    polls.answer = raise_if_seven
    await ticks(q, clock, 1)
    polls.calls.clear()
    await ticks(q, clock, 2)
    assert sorted(polls.calls) == [[6, 8], [6, 8], [7], [7]]
    polls.answer = lambda items: None  # it is mended
    await ticks(q, clock, 1)
    polls.calls.clear()
    await ticks(q, clock, 1)
    assert polls.calls == [[6, 7, 8]]


async def test_a_recurring_item_whose_entry_is_cancel_comes_no_more(q: TinyQ, polls: Batches, clock: FakeClock) -> None:
    await recurring(polls, range(3))
    polls.answer = lambda items: [Cancel("gone") if item == 1 else None for item in items]
    await ticks(q, clock, 2)
    assert polls.calls == [[0, 1, 2], [0, 2]]
    assert {schedule.key for schedule in await q.schedules(polls.task)} == {"0", "2"}


# Cancelling, leases, shutdown


async def test_an_item_that_is_cancelled_while_its_call_runs_does_not_stop_the_others(
    q: TinyQ, polls: Batches, durable: bool
) -> None:
    polls.go_on.clear()
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await polls.began.wait()
    cancelling = asyncio.create_task(jobs[1].cancel())
    await FakeClock.settle()
    assert not cancelling.done() and states(jobs) == [State.RUNNING] * 3
    polls.go_on.set()
    assert not await cancelling  # it was done all the same
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE] * 3
    assert jobs[1].reason == "a cancel request came too late"


async def test_an_item_sees_that_it_is_to_be_cancelled(q: TinyQ, durable: bool) -> None:
    looks, told = asyncio.Event(), list[list[bool]]()

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> list[object]:
        batch = tinyq.current_job().batch
        looks.set()
        await eventually(lambda: any(job.cancelled for job in batch))
        told.append([job.cancelled for job in batch])
        assert not tinyq.current_job().cancelled
        return [Cancel("left out") if job.cancelled else "done" for job in batch]

    jobs = await q.enqueue_many([(poll, (n,)) for n in (1, 2, 3)], durable=durable)
    await looks.wait()
    assert await jobs[1].cancel()
    await eventually(lambda: over(jobs))
    assert told == [[False, True, False]]
    assert states(jobs) == [State.DONE, State.CANCELLED, State.DONE]


async def test_an_item_that_was_cancelled_does_not_run_singly_when_its_call_fails(
    q: TinyQ, polls: Batches, durable: bool
) -> None:
    polls.go_on.clear()

    def fail(items: list[int]) -> None:
        if len(items) > 1:
            raise OSError("down")

    polls.answer = fail
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await polls.began.wait()
    cancelling = asyncio.create_task(jobs[1].cancel())
    await FakeClock.settle()
    polls.go_on.set()
    assert await cancelling
    await eventually(lambda: over(jobs))
    assert states(jobs) == [State.DONE, State.CANCELLED, State.DONE]
    assert sorted(polls.calls) == [[1], [1, 2, 3], [3]]


async def test_a_call_all_of_whose_items_are_cancelled_is_stopped(q: TinyQ, polls: Batches, durable: bool) -> None:
    polls.go_on.clear()
    jobs = await polls.enqueue(1, 2, 3, durable=durable)
    await polls.began.wait()
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(job.cancel() for job in jobs)) == [True] * 3
    assert states(jobs) == [State.CANCELLED] * 3 and polls.calls == [[1, 2, 3]]
    await (await polls.enqueue(4, durable=durable))[0].cancel()  # and its slot is free
    await q.drain()


def taken_away(file: Path, *seqs: int) -> None:
    """As if another worker had claimed these jobs."""
    for seq in seqs:
        edit(file, "UPDATE tinyq_jobs SET claim_no = claim_no + 1, worker = 'other' WHERE seq = ?", seq)


async def test_an_item_whose_lease_is_lost_is_not_written_and_the_others_are(
    open_file: Open, file: Path, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_file(lease=60)
    polls = Batches(q, result_ttl=3600)
    polls.go_on.clear()
    jobs = await polls.enqueue(1, 2, 3, durable=True)
    await polls.began.wait()
    taken_away(file, 2)
    await eventually(lambda: "has lost its lease" in caplog.text, clock, 5)
    polls.go_on.set()
    await eventually(lambda: over([jobs[0], jobs[2]]))
    assert rows(file, "state, worker <> 'other'") == [("done", 1), ("running", 0), ("done", 1)]
    assert len([line for line in warnings(caplog) if "its outcome is not written" in line]) == 1


async def test_a_call_all_of_whose_leases_are_lost_is_stopped(
    open_file: Open, file: Path, clock: FakeClock, caplog: Lines
) -> None:
    q = await open_file(lease=60)
    polls = Batches(q)
    polls.go_on.clear()
    told: list[str] = []

    async def wait(items: list[int]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("told")
            raise

    polls.answer = wait
    polls.go_on.set()
    await polls.enqueue(1, 2, durable=True)
    await polls.began.wait()
    taken_away(file, 1, 2)
    await eventually(lambda: told, clock, 5)
    await eventually(lambda: caplog.text.count("its outcome is not written") == 2)
    assert rows(file, "state, worker") == [("running", "other")] * 2


async def test_a_call_that_the_end_interrupts_hands_all_its_items_back(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    polls = Batches(q)
    polls.go_on.clear()
    await polls.enqueue(1, 2, 3, durable=True)
    await polls.began.wait()
    await stopped_at_once(q, clock)
    assert (
        rows(file, "state, attempts, interruptions, reason, singly") == [("pending", 0, 1, "interrupted by shutdown", None)] * 3
    )
    again = await open_file()
    after = Batches(again)
    await eventually(lambda: after.calls == [[1, 2, 3]])
    assert after.attempts == [[1, 1, 1]]


async def test_a_call_that_ends_within_the_grace_is_settled(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    polls = Batches(q)
    polls.go_on.clear()
    await polls.enqueue(1, 2, 3, durable=True)
    await polls.began.wait()
    stopping = asyncio.create_task(q.stop(grace=10))
    await FakeClock.settle()
    polls.go_on.set()
    await eventually(stopping.done, clock)
    assert rows(file, "id") == []


async def test_best_effort_items_are_kept_at_the_end_if_that_was_asked_for(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    polls = Batches(q, promote="interrupted", window=0)
    polls.go_on.clear()
    await polls.enqueue(1, 2, 3, durable=False)
    await polls.began.wait()
    await stopped_at_once(q, clock)
    assert rows(file, "state, attempts") == [("pending", 0)] * 3
    again = await open_file()
    after = Batches(again)
    await eventually(lambda: after.calls == [[1, 2, 3]])


async def test_best_effort_items_that_have_to_run_singly_do_so_after_their_promotion(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file(concurrency=1)
    polls = Batches(q, promote="interrupted")

    async def fail_then_hang(items: list[int]) -> None:
        if len(items) > 1:
            raise OSError("down")
        await asyncio.Event().wait()

    polls.answer = fail_then_hang
    await polls.enqueue(1, 2, 3, durable=False)
    await eventually(lambda: len(polls.calls) == 2)
    await stopped_at_once(q, clock)
    assert sorted(rows(file, "state, attempts, singly")) == [("pending", 0, 1)] * 3
    after = Batches(await open_file())
    await eventually(lambda: sorted(after.calls) == [[1], [2], [3]])


def test_the_items_of_a_process_that_was_killed_are_in_a_call_of_another(fleet: Fleet) -> None:
    first = fleet.member(batches={"batch_hangs_once": 10}, lease=0.5)
    fleet.enqueue("batch_hangs_once", *range(5))
    wait_until("all of them have begun", lambda: sum(len(words) - 2 for words in fleet.marks("batch_hangs_once")) == 5)
    first.kill()
    fleet.member(batches={"batch_hangs_once": 10}, lease=0.5)
    fleet.wait_for_rows([], "id")
    starts = Counter(n for _, _, *items in fleet.marks("batch_hangs_once") for n in items)
    assert starts == Counter({str(n): 2 for n in range(5)})


async def test_of_items_on_which_workers_died_the_next_starts_once_the_last_is_written(
    open_file: Open, file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it might take along what has been done already."""
    writing, written = asyncio.Event(), asyncio.Event()
    settle = tinyq.SQLiteStore.settle

    async def late(store: Any, settlements: Sequence[Any], now: int) -> Any:
        writing.set()
        await written.wait()
        return await settle(store, settlements, now)

    before = await open_file(worker=False)
    await before.enqueue_many([("poll", (n,)) for n in (1, 2)], durable=True)
    edit(file, "UPDATE tinyq_jobs SET lost = 2, ready = 3")
    monkeypatch.setattr(tinyq.SQLiteStore, "settle", late)
    q = await open_file()
    polls = Batches(q)
    noted = asyncio.Event()

    @q.task(name="note")
    async def note() -> None:
        noted.set()

    try:
        async with asyncio.timeout(10):
            await writing.wait()
            await q.enqueue(note, durable=True, delay=1)
            await clock.advance(1)
            await noted.wait()  # a claim has taken what it could
        assert polls.calls == [[1]]
    finally:
        written.set()
    await eventually(lambda: polls.calls == [[1], [2]])


def test_an_item_that_kills_its_process_every_time_is_dead_alone(fleet: Fleet) -> None:
    fleet.enqueue("batch_killed_by_seven", *range(5, 10))

    def start() -> Member:
        return fleet.member(batches={"batch_killed_by_seven": 10}, lease=0.3)

    def is_over() -> bool:
        return fleet.rows("state") == [("dead",)]

    members = [start()]

    def counts_as_alive() -> bool:  # the last one, for another lease: until then the next one would leave it a part of the jobs
        with closing(sqlite3.connect(fleet.db, timeout=10)) as db:
            [(seen,)] = db.execute("SELECT max(seen) FROM tinyq_workers").fetchall()
        return seen is not None and seen >= (time.time() - 0.3) * 1e6

    def supervise() -> bool:
        if members[-1].ended() and not is_over() and not counts_as_alive():
            members.append(start())
        return is_over()

    wait_until("only the one to blame is left", supervise)
    starts = Counter(n for _, _, *items in fleet.marks("batch_killed_by_seven") for n in items)
    assert starts["7"] == 3  # as often as its retries say: twice with the others, and once alone
    assert all(starts[str(n)] == 3 for n in (5, 6, 8, 9))
    calls = [words[2:] for words in fleet.marks("batch_killed_by_seven")]
    assert calls[:2] == [["5", "6", "7", "8", "9"]] * 2 and sorted(calls[2:]) == [["5"], ["6"], ["7"], ["8"], ["9"]]
    assert fleet.rows("attempts", "reason") == [(3, "worker lost")]


# Limits, middleware, headers, progress


async def note_that_all_is_claimed(q: TinyQ, durable: bool) -> None:
    """A claim that takes this takes whatever else could start."""

    async def note() -> None: ...

    await (await q.enqueue(q.task(name="note")(note), durable=durable, priority=-1)).result(10)


async def test_running_limits_count_calls(open_q: Open, durable: bool) -> None:
    q = await open_q(concurrency=5)
    polls = Batches(q, 2, max_running=2)
    polls.go_on.clear()
    jobs = await polls.enqueue(*range(6), durable=durable)
    await eventually(lambda: len(polls.calls) == 2)
    await note_that_all_is_claimed(q, durable)
    assert sorted(polls.calls) == [[0, 1], [2, 3]]
    polls.go_on.set()
    await eventually(lambda: over(jobs))
    assert sorted(polls.calls) == [[0, 1], [2, 3], [4, 5]] and polls.most == 2


async def test_a_limit_of_all_processes_counts_calls(open_at: OpenAt, file: Path, clock: FakeClock) -> None:
    both = [await open_at(file, concurrency=5) for _ in range(2)]
    all_polls = [Batches(q, 2, max_running_total=1) for q in both]
    running, most = 0, 0

    async def count(items: list[int]) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.005)
        running -= 1

    for polls in all_polls:
        polls.answer = count
    await all_polls[0].enqueue(*range(10), durable=True)
    await eventually(lambda: rows(file, "id") == [], clock)
    calls = sorted(all_polls[0].calls + all_polls[1].calls)
    assert sorted(n for call in calls for n in call) == [*range(10)]
    assert most == 1 and max(map(len, calls)) == 2


async def test_rates_count_items(open_q: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_q()
    polls = Batches(q, 10, rate=Rate(3, per=30))
    jobs = await polls.enqueue(*range(7), durable=durable)
    await eventually(lambda: over(jobs[:3]))
    await q.drain()
    assert polls.calls == [[0, 1, 2]]
    began = clock.monotonic()
    await eventually(lambda: over(jobs), clock, 1)
    assert 40 <= clock.monotonic() - began < 45
    assert sorted(n for call in polls.calls for n in call) == [*range(7)]


@dataclass
class Base:
    account: str


@dataclass
class Inherited(Base):
    number: int


class Typed(TypedDict):
    account: str
    number: int


def of_dict(account: str, number: int) -> dict[str, Any]:
    return {"account": account, "number": number}


async def of_dicts(items: list[dict[str, Any]]) -> None: ...
async def of_dataclasses(items: list[Inherited]) -> None: ...
async def of_typed_dicts(items: list[Typed]) -> None: ...
async def of_models(items: list[Subscription]) -> None: ...
async def of_anything(items: list[Any]) -> None: ...


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (of_dicts, of_dict),
        (of_dataclasses, Inherited),
        (of_typed_dicts, of_dict),
        (of_models, lambda account, number: Subscription(account=account, number=number)),
        (of_anything, of_dict),
    ],
)
async def test_limits_may_go_by_a_field_of_the_item(
    open_q: Open, durable: bool, function: Callable[..., Any], make: Callable[[str, int], Any]
) -> None:
    q = await open_q(concurrency=5)
    calls: list[list[Any]] = []
    go_on = asyncio.Event()

    @functools.wraps(function)
    async def poll(items: list[Any]) -> None:
        calls.append(items)
        await go_on.wait()

    task = q.batch(2, name="poll", max_running=1, limit_by="account")(poll)
    items = [make(account, n) for n, account in enumerate("abababaa")]
    jobs = await q.enqueue_many([(task, (item,)) for item in items], durable=durable)
    await eventually(lambda: len(calls) == 2)
    await note_that_all_is_claimed(q, durable)
    assert sorted(calls, key=str) == sorted([[items[0], items[2]], [items[1], items[3]]], key=str)
    go_on.set()
    await eventually(lambda: over(jobs))
    assert sorted(calls[2:], key=str) == sorted([[items[4], items[6]], [items[5]], [items[7]]], key=str)


async def test_limits_may_go_by_the_item(open_q: Open, durable: bool) -> None:
    q = await open_q(concurrency=5)
    polls = Batches(q, 10, max_running=1, limit_by="items")
    polls.go_on.clear()
    jobs = await polls.enqueue(1, 2, 1, 2, 1, durable=durable)
    await eventually(lambda: len(polls.calls) == 2)
    assert sorted(polls.calls) == [[1, 1, 1], [2, 2]]
    polls.go_on.set()
    await eventually(lambda: over(jobs))


@pytest.mark.parametrize("function", [of_dataclasses, of_typed_dicts, of_models, takes_a_dict])
def test_limits_by_a_field_that_the_item_has_not_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"limit_by is 'acount'|a batch handler takes one list"):
        TinyQ().batch(10, max_running=1, limit_by="acount")(function)


async def test_an_item_without_the_field_that_limits_go_by_is_refused(q: TinyQ, durable: bool) -> None:
    task = q.batch(10, name="poll", max_running=1, limit_by="account")(of_dicts)
    with pytest.raises(tinyq.PayloadError, match="items has no 'account'"):
        await task.options(durable=durable).enqueue({"number": 7})


async def test_middleware_runs_once_for_each_call(q: TinyQ, polls: Batches, durable: bool) -> None:
    seen: list[list[str]] = []

    @q.middleware
    async def note(job: CurrentJob, call_next: Callable[[CurrentJob], Awaitable[Any]]) -> Any:
        seen.append([each.id for each in job.batch])
        values = await call_next(job)
        return [10 * value for value in values]

    polls.answer = lambda items: items
    jobs = await polls.enqueue(1, 2, 3, durable=durable, result_ttl=60)
    assert [await job.result(10) for job in jobs] == [10, 20, 30]
    assert seen == [[job.id for job in jobs]]


async def test_each_item_has_its_own_headers(q: TinyQ, durable: bool) -> None:
    seen: list[Any] = []

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> None:
        seen.extend(job.headers["trace"] for job in tinyq.current_job().batch)
        seen.append(tinyq.current_job().headers["trace"])

    await q.pause("default")
    jobs = [await poll.options(durable=durable, headers={"trace": str(n)}).enqueue(n) for n in (1, 2)]
    await q.resume("default")
    await eventually(lambda: over(jobs))
    assert seen == ["1", "2", "1"]


async def test_each_item_tells_of_its_own_progress(q: TinyQ, durable: bool) -> None:
    told, go_on = asyncio.Event(), asyncio.Event()

    @q.batch(10, name="poll")
    async def poll(items: list[int]) -> None:
        job = tinyq.current_job()
        await job.progress(0.25, "the first")
        for n, item in enumerate(job.batch[1:], 1):
            await item.progress(n / 4, str(n))
        told.set()
        await go_on.wait()

    jobs = await q.enqueue_many([(poll, (n,)) for n in range(3)], durable=durable)
    await told.wait()
    assert [job.progress for job in jobs] == [(0.25, "the first"), (0.25, "1"), (0.5, "2")]
    if durable:
        assert [(await q.get(job.id)).progress for job in jobs] == [(0.25, "the first"), (0.25, "1"), (0.5, "2")]
    go_on.set()
    await eventually(lambda: over(jobs))


# Under test


async def test_drain_runs_items_together_whatever_their_window(durable: bool) -> None:
    q = TinyQ()
    polls = Batches(q, 3, window=60)
    with q.testing() as jobs:
        await polls.enqueue(*range(7), durable=durable)
        assert await jobs.adrain() == 3  # calls
        assert polls.calls == [[0, 1, 2], [3, 4, 5], [6]]


async def test_drain_runs_the_items_of_a_failed_call_singly(durable: bool) -> None:
    q = TinyQ()
    polls = Batches(q, retry=[60])
    polls.answer = raise_if_seven
    with q.testing() as jobs:
        sent = await polls.enqueue(6, 7, 8, durable=durable)
        with pytest.raises(ValueError, match="seven"):
            await jobs.adrain()
        assert polls.calls == [[6, 7, 8], [6], [8], [7], [7]] or sorted(polls.calls) == [[6], [6, 7, 8], [7], [7], [8]]
        assert states(sent) == [State.DONE, State.DEAD, State.DONE]


async def test_advance_runs_recurring_items_together() -> None:
    q = TinyQ()
    polls = Batches(q, window=0.05)
    with q.testing() as jobs:
        await recurring(polls, range(3), 60)
        assert await jobs.aadvance(180) == 3
        assert polls.calls == [[0, 1, 2]] * 3


async def test_under_test_too_a_call_has_the_time_of_its_longest_item(durable: bool) -> None:
    q = TinyQ()
    polls = Batches(q)

    async def take_a_while(items: list[int]) -> None:
        await asyncio.sleep(0.05)

    polls.answer = take_a_while
    with q.testing() as jobs:
        sent = await polls.enqueue(1, durable=durable, timeout=0.01)
        sent += await polls.enqueue(2, durable=durable, timeout=60)
        assert await jobs.adrain() == 1
        assert states(sent) == [State.DONE] * 2


def test_a_test_without_an_event_loop_sees_results_of_items() -> None:
    q = TinyQ()

    @q.batch(10, name="double")
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    with q.testing() as jobs:
        sent = [double.enqueue_sync(n) for n in (1, 2)]
        assert jobs.drain() == 1
        assert [asyncio.run(job.result()) for job in sent] == [2, 4]
