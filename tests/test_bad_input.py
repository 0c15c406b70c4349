"""Every mistake is a specific error at the call that says the way out in one sentence, and nothing is stored or lost."""

import asyncio
import functools
import itertools
import math
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import tinyq
from tinyq import Retry, State, TinyQ

ROOT = Path(__file__).parents[1]


class Shop:
    """A TinyQ over a file, with a task that notes its calls; it claims no durable job, so that what is stored stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ran: list[Any] = []
        self.q: Any = TinyQ(path, worker=False, queues={"elsewhere": 0})

        @self.q.task(name="send")
        async def send(user: Any, note: Any = None) -> None:
            self.ran.append(user)

        self.send: Any = send

    def stored(self) -> int:
        return int(rows(self.path, "SELECT count(*) FROM tinyq_jobs")[0][0])


def rows(path: Path, statement: str) -> list[Any]:
    db = sqlite3.connect(path)
    try:
        found = db.execute(statement).fetchall()
        db.commit()
        return found
    finally:
        db.close()


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Shop]:
    made = Shop(tmp_path / "jobs.db")
    async with made.q:
        yield made


@contextmanager
def mistake(error: type[BaseException], *words: str) -> Iterator[None]:
    """The block raises exactly this error, in one sentence that has these words."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is error
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


@asynccontextmanager
async def refused(shop: Shop, error: type[BaseException], *words: str) -> AsyncIterator[None]:
    """The block is a mistake, after which nothing is stored, waits or runs."""
    with mistake(error, *words):
        yield
    await shop.q.drain()
    assert (await shop.q.stats()).count() == 0
    assert shop.stored() == 0
    assert shop.ran == []


async def noop() -> None: ...


numbers = itertools.count()


async def register(shop: Shop, options: Any) -> None:
    name = f"new {next(numbers)}"
    try:
        shop.q.task(name=name, **options)(noop)
    except BaseException:
        shop.q.task(name=name)(noop)  # the failed one has left no name behind
        raise


async def register_schedule(shop: Shop, options: Any) -> None:
    name = f"new {next(numbers)}"
    try:
        shop.q.every(3600, name=name, **options)(noop)
    except BaseException:
        assert (await shop.q.stats()).schedules == ()
        shop.q.task(name=name)(noop)
        raise


WAYS: dict[str, Callable[[Shop, Any], Awaitable[Any]]] = {
    "enqueue": lambda shop, options: shop.q.enqueue(shop.send, 1, **options),
    "enqueue by name": lambda shop, options: shop.q.enqueue("send", 1, **options),
    "enqueue a bare function": lambda shop, options: shop.q.enqueue(noop, **options),
    "options": lambda shop, options: shop.send.options(**options).enqueue(1),
    "enqueue_many": lambda shop, options: shop.q.enqueue_many([(shop.send, (1,))], **options),
    "task": register,
    "every": register_schedule,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
NAMES = list(tinyq.Options.__annotations__)


# options that there are not


MISSPELLED = {
    "durabel": "durable", "qeue": "queue", "priorty": "priority", "delays": "delay", "runat": "run_at", "expire": "expires",
    "keyy": "key", "on_conflit": "on_conflict", "retrys": "retry", "timout": "timeout", "result_tl": "result_ttl",
    "failure_tll": "failure_ttl",
}  # fmt: skip


@ways
async def test_a_misspelled_option_is_refused_and_the_right_one_suggested(
    shop: Shop, way: Any, subtests: pytest.Subtests
) -> None:
    for wrong, right in MISSPELLED.items():
        with subtests.test(wrong):
            async with refused(shop, TypeError, f"{wrong!r}", f"did you mean {right!r}?"):
                await way(shop, {wrong: 1})


@ways
async def test_an_option_that_is_like_no_other_is_refused(shop: Shop, way: Any) -> None:
    async with refused(shop, TypeError, "'wibble'"):
        await way(shop, {"wibble": 1})


@pytest.mark.parametrize("way", ["options", "enqueue_many", "task", "every"])
async def test_where_all_keywords_are_options_an_unknown_one_lists_those_there_are(shop: Shop, way: str) -> None:
    async with refused(shop, TypeError, *NAMES):
        await WAYS[way](shop, {"wibble": 1})


@pytest.mark.parametrize(
    ("wrong", "right"), {"nam": "name", "replce": "replace", "promot": "promote"}.items(), ids=["name", "replace", "promote"]
)
def test_a_misspelled_keyword_of_task_is_refused_and_the_right_one_suggested(wrong: str, right: str) -> None:
    q: Any = TinyQ()
    with mistake(TypeError, f"{wrong!r}", f"did you mean {right!r}?"):
        q.task(**{wrong: True})(noop)


@pytest.mark.parametrize(
    ("wrong", "right"),
    {
        "ofset": "offset", "imediate": "immediate", "overlaps": "overlap", "per_proces": "per_process", "nam": "name",
        "promot": "promote",
    }.items(),
    ids=["offset", "immediate", "overlap", "per_process", "name", "promote"],
)  # fmt: skip
def test_a_misspelled_keyword_of_every_is_refused_and_the_right_one_suggested(wrong: str, right: str) -> None:
    q: Any = TinyQ()
    with mistake(TypeError, f"{wrong!r}", f"did you mean {right!r}?"):
        q.every(60, **{wrong: True})(noop)


CONFIGURATION = {
    "concurency": "concurrency", "queue": "queues", "thread": "threads", "max_pendng": "max_pending", "max_paylod": "max_payload",
    "grase": "grace", "leases": "lease", "synchronus": "synchronous", "promot": "promote", "workers": "worker",
    "name_space": "namespace", "workername": "worker_name", "clok": "clock", "timout": "timeout", "retrys": "retry",
    "result_tl": "result_ttl", "failure_tll": "failure_ttl", "dbs": "db",
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "right"), CONFIGURATION.items(), ids=CONFIGURATION)
def test_a_misspelled_option_of_a_tinyq_is_refused_and_the_right_one_suggested(wrong: str, right: str) -> None:
    make: Any = TinyQ
    with mistake(TypeError, f"{wrong!r}", f"did you mean {right!r}?"):
        make(**{wrong: 1})


def test_an_unknown_option_of_a_tinyq_lists_those_there_are() -> None:
    make: Any = TinyQ
    with mistake(TypeError, "'wibble'", "db", *tinyq.Configuration.__annotations__):
        make(wibble=1)


@pytest.mark.parametrize("name", ["durable", "priority", "delay", "key", "run_at", "expires", "on_conflict"])
def test_an_option_that_is_only_for_jobs_is_none_of_a_tinyq(name: str) -> None:
    make: Any = TinyQ
    with mistake(TypeError, f"unknown option {name!r}"):
        make(**{name: 1})


async def test_a_misspelled_option_of_lifespan_is_refused_and_nothing_is_started() -> None:
    life: Any = tinyq.lifespan
    with mistake(TypeError, "'concurency'", "did you mean 'concurrency'?"):
        async with life(concurency=5):
            pass
    with pytest.raises((tinyq.NotStarted, tinyq.ShuttingDown)):  # the latter if another test has had it running
        await tinyq.stats()


# values of options


NAIVE = datetime(2026, 1, 6, 20, 52)
BAD_VALUES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "durable as a word": ({"durable": "yes"}, TypeError, "durable is 'yes': give True or False"),
    "durable as a number": ({"durable": 1}, TypeError, "durable is 1"),
    "queue without a name": ({"queue": ""}, ValueError, "queue is ''"),
    "queue as a number": ({"queue": 5}, TypeError, "queue is 5: give a str"),
    "queue with a name too long": ({"queue": "x" * 256}, ValueError, "1 to 255 characters"),
    "priority as a word": ({"priority": "high"}, TypeError, "priority is 'high': give a whole number"),
    "priority as a fraction": ({"priority": 1.5}, TypeError, "priority is 1.5"),
    "priority as a truth value": ({"priority": True}, TypeError, "priority is True"),
    "priority beyond its range": ({"priority": 2**40}, ValueError, f"priority is {2**40}"),
    "priority below its range": ({"priority": -(2**40)}, ValueError, f"priority is {-(2**40)}"),
    "negative delay": ({"delay": -1}, ValueError, "delay is -1: it must not be negative"),
    "negative delay, timedelta": ({"delay": timedelta(seconds=-1)}, ValueError, "delay is "),
    "endless delay": ({"delay": math.inf}, ValueError, "delay is inf"),
    "delay that is no number": ({"delay": math.nan}, ValueError, "delay is nan"),
    "delay as text": ({"delay": "5"}, TypeError, "delay is '5': give seconds as a number, or a timedelta"),
    "delay as a truth value": ({"delay": True}, TypeError, "delay is True"),
    "delay as a moment": ({"delay": NAIVE}, TypeError, "delay is datetime"),
    "delay too long for a float": ({"delay": 10**400}, ValueError, "delay is "),
    "naive run_at": ({"run_at": NAIVE}, TypeError, "without a time zone: use datetime.now(UTC) + …"),
    "run_at as a date": ({"run_at": date(2026, 1, 6)}, TypeError, "run_at is datetime.date(2026, 1, 6): give an aware datetime"),
    "run_at as a timestamp": ({"run_at": 1_767_730_000.0}, TypeError, "run_at is 1767730000.0"),
    "run_at as text": ({"run_at": "2026-01-06T20:52:00Z"}, TypeError, "run_at is '2026-01-06T20:52:00Z'"),
    "run_at as a delay": ({"run_at": timedelta(hours=1)}, TypeError, "run_at is datetime.timedelta"),
    "delay and run_at": ({"delay": 5, "run_at": NAIVE.replace(tzinfo=UTC)}, ValueError, "give one of them"),
    "zero delay and run_at": ({"delay": 0, "run_at": NAIVE.replace(tzinfo=UTC)}, ValueError, "give one of them"),
    "naive expires": ({"expires": NAIVE}, TypeError, "expires is datetime"),
    "negative expires": ({"expires": -5}, ValueError, "expires is -5"),
    "endless expires": ({"expires": math.inf}, ValueError, "expires is inf"),
    "expires as text": ({"expires": "tomorrow"}, TypeError, "expires is 'tomorrow'"),
    "key without a name": ({"key": ""}, ValueError, "key is ''"),
    "key as a number": ({"key": 7}, TypeError, "key is 7: give a str"),
    "key too long": ({"key": "x" * 256}, ValueError, "1 to 255 characters"),
    "on_conflict that is none": ({"key": "k", "on_conflict": "ignore"}, ValueError, "'reuse', 'queue', 'replace', 'raise'"),
    "on_conflict as a truth value": ({"key": "k", "on_conflict": True}, ValueError, "on_conflict is True"),
    "retry as a number": ({"retry": 3}, TypeError, "retry is 3: give tinyq.Retry(...), a list of delays in seconds, or False"),
    "retry zero": ({"retry": 0}, TypeError, "retry is 0"),
    "retry true": ({"retry": True}, TypeError, "retry is True"),
    "retry without delays": ({"retry": []}, TypeError, "retry is []"),
    "retry with a negative delay": ({"retry": [5, -1]}, ValueError, "Retry.delays[1] is -1"),
    "retry as text": ({"retry": "always"}, TypeError, "retry is 'always'"),
    "no time": ({"timeout": 0}, ValueError, "timeout is 0: it must be greater than zero"),
    "no time, float": ({"timeout": 0.0}, ValueError, "timeout is 0.0: it must be greater than zero"),
    "no time, timedelta": ({"timeout": timedelta(0)}, ValueError, "greater than zero"),
    "negative timeout": ({"timeout": -5}, ValueError, "timeout is -5"),
    "timeout that is no number": ({"timeout": math.nan}, ValueError, "timeout is nan"),
    "timeout as text": ({"timeout": "30s"}, TypeError, "timeout is '30s'"),
    "timeout too long for a float": ({"timeout": 10**400}, ValueError, "timeout is "),
    "negative result_ttl": ({"result_ttl": -1}, ValueError, "result_ttl is -1"),
    "result_ttl as text": ({"result_ttl": "1h"}, TypeError, "result_ttl is '1h'"),
    "negative failure_ttl": ({"failure_ttl": -1}, ValueError, "failure_ttl is -1"),
    "failure_ttl false": ({"failure_ttl": False}, TypeError, "failure_ttl is False"),
}


@ways
async def test_a_bad_value_of_an_option_is_refused_by_its_name(shop: Shop, way: Any, subtests: pytest.Subtests) -> None:
    for name, (options, error, words) in BAD_VALUES.items():
        with subtests.test(name):
            async with refused(shop, error, words):
                await way(shop, options)


@ways
async def test_none_leaves_an_option_unset(shop: Shop, way: Any) -> None:
    await way(shop, dict.fromkeys(NAMES))


@pytest.mark.parametrize("bad", ["timeout", "retry", "result_ttl", "failure_ttl"])
def test_a_bad_value_of_a_default_is_refused_by_its_name(bad: str) -> None:
    make: Any = TinyQ
    for options, error, words in BAD_VALUES.values():
        if list(options) == [bad]:
            with mistake(error, words, "TinyQ"):
                make(**options)


def test_no_attempt_at_all_is_refused() -> None:
    with mistake(ValueError, "Retry.max_attempts is 0", "1 or more"):
        Retry(max_attempts=0)


async def test_zero_is_honoured_where_it_means_something(tmp_path: Path) -> None:
    q: Any = TinyQ(tmp_path / "jobs.db", worker=False, grace=0, result_ttl=0, failure_ttl=60)

    @q.task(priority=9, delay=3600, result_ttl=60, failure_ttl=60, retry=[30])  # type: ignore[untyped-decorator]
    async def send() -> None: ...

    async with q:
        before = datetime.now(UTC)
        job = await q.enqueue(send, durable=True, priority=0, delay=0, result_ttl=0, failure_ttl=0, retry=[0])
        assert before <= job.run_at <= datetime.now(UTC)
        later = await send.options(durable=True).enqueue()
        assert later.run_at > datetime.now(UTC) + timedelta(minutes=59)
    stored = rows(tmp_path / "jobs.db", "SELECT priority, options FROM tinyq_jobs ORDER BY seq")
    assert [priority for priority, _ in stored] == [0, 9]
    assert tinyq.decode_overrides(stored[0][1]) == {"result_ttl": 0, "failure_ttl": 0, "retry": Retry(delays=[0])}
    assert stored[1][1] is None


async def test_a_failure_that_is_kept_for_zero_seconds_is_not_kept() -> None:
    q: Any = TinyQ()

    async def fail() -> None:
        raise ValueError

    async with q, asyncio.timeout(10):
        job = await q.enqueue(fail, failure_ttl=0)
        with pytest.raises(tinyq.JobFailed):
            await job.result()
        with pytest.raises(tinyq.JobNotFound):
            await q.get(job.id)


async def test_a_retry_in_zero_seconds_is_at_once() -> None:
    q: Any = TinyQ()
    starts: list[int] = []

    async def fail() -> None:
        starts.append(tinyq.current_job().attempt)
        raise ValueError

    async with q, asyncio.timeout(10):
        for retry in ([0, 0], Retry(max_attempts=3, base=0)):
            starts.clear()
            with pytest.raises(tinyq.JobFailed):
                await (await q.enqueue(fail, retry=retry)).result()
            assert starts == [1, 2, 3]


# options and parameters of one name


def clash(queue: Any = None, delay: Any = None, run_at: Any = None, key: Any = None, timeout: Any = None) -> Any:
    return queue, delay, run_at, key, timeout


@pytest.mark.parametrize("name", ["queue", "delay", "run_at", "key", "timeout"])
@pytest.mark.parametrize("by_name", [False, True], ids=["by task", "by name"])
async def test_a_keyword_that_is_an_option_and_a_parameter_is_refused_with_both_other_spellings(name: str, by_name: bool) -> None:
    q: Any = TinyQ()
    task = q.task(name="clash")(clash)
    async with q:
        with mistake(TypeError, f"{name!r}", "'clash'", f"task.options({name}=…).enqueue(…)", f"task.enqueue({name}=…)"):
            await q.enqueue("clash" if by_name else task, **{name: None})
        assert (await q.stats()).count() == 0


async def test_a_task_with_parameters_named_like_options_is_given_them() -> None:
    q: Any = TinyQ()
    task = q.task(clash)
    values = {"queue": 1, "delay": 2, "run_at": 3, "key": 4, "timeout": 5}
    async with q, asyncio.timeout(10):
        assert await (await task.enqueue(**values)).result() == (1, 2, 3, 4, 5)
        assert await (await task.options(queue="emails", delay=0, key="k").enqueue(**values)).result() == (1, 2, 3, 4, 5)
        assert await (await q.enqueue(task, 1, 2, 3, 4, 5)).result() == (1, 2, 3, 4, 5)
        [job] = await q.enqueue_many([(task, (), values)])
        assert await job.result() == (1, 2, 3, 4, 5)


async def test_a_keyword_that_is_only_an_option_never_reaches_a_handler_that_takes_any() -> None:
    q: Any = TinyQ()

    async def anything(**given: Any) -> Any:
        return given

    async with q, asyncio.timeout(10):
        job = await q.enqueue(anything, queue="emails", color="red")
        assert (job.queue, await job.result()) == ("emails", {"color": "red"})


# arguments of the handler


BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "none": ((), {}),
    "another name": ((), {"usr": 1}),
    "one too many": ((1, 2, 3), {}),
    "twice": ((1,), {"user": 2}),
    "one more by name": ((1,), {"color": "red"}),
}
CALLS: dict[str, Callable[[Shop, Any, Any], Awaitable[Any]]] = {
    "task.enqueue": lambda shop, args, kwargs: shop.send.enqueue(*args, **kwargs),
    "task.options": lambda shop, args, kwargs: shop.send.options(durable=True).enqueue(*args, **kwargs),
    "enqueue": lambda shop, args, kwargs: shop.q.enqueue(shop.send, *args, **kwargs),
    "enqueue durable": lambda shop, args, kwargs: shop.q.enqueue(shop.send, *args, durable=True, **kwargs),
    "enqueue by name": lambda shop, args, kwargs: shop.q.enqueue("send", *args, **kwargs),
    "enqueue_many": lambda shop, args, kwargs: shop.q.enqueue_many([(shop.send, (1,)), (shop.send, args, kwargs)], durable=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("bad", BAD_CALLS.values(), ids=BAD_CALLS)
async def test_arguments_that_the_handler_does_not_take_are_refused_in_the_caller(
    shop: Shop, call: Any, bad: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    async with refused(shop, TypeError, "'send'", "does not take these arguments"):
        await call(shop, *bad)


async def test_arguments_of_every_kind_of_callable_are_checked() -> None:
    class Mailer:
        def method(self, user: int) -> None: ...

        def __call__(self, user: int) -> None: ...

    def plain(user: int, /, *, note: str) -> None: ...

    q: Any = TinyQ()
    async with q:
        for fn in (Mailer().method, Mailer(), plain, functools.partial(plain, 1), lambda user: None):
            with pytest.raises(TypeError, match="does not take these arguments"):
                await q.enqueue(fn)
        assert (await q.stats()).count() == 0


BAD_ITEMS: dict[str, Callable[[Any], Any]] = {
    "a task alone": lambda send: send,
    "a task in a tuple": lambda send: (send,),
    "an argument that is not in a tuple": lambda send: (send, 1),
    "text instead of arguments": lambda send: (send, "ab"),
    "bytes instead of arguments": lambda send: (send, b"ab"),
    "keywords instead of arguments": lambda send: (send, {"user": 1}),
    "None instead of arguments": lambda send: (send, None),
    "keywords that are none": lambda send: (send, (1,), 5),
    "four parts": lambda send: (send, (1,), {}, {}),
    "text": lambda send: "send",
    "nothing": lambda send: None,
}


@pytest.mark.parametrize("make", BAD_ITEMS.values(), ids=BAD_ITEMS)
async def test_an_item_of_enqueue_many_that_is_not_a_call_is_refused_by_its_number(shop: Shop, make: Any) -> None:
    async with refused(shop, TypeError, "items[1] is not (task, args) or (task, args, kwargs)"):
        await shop.q.enqueue_many([(shop.send, (1,)), make(shop.send)], durable=True)


async def test_items_of_both_kinds_are_refused_together(shop: Shop) -> None:
    shop.q.task(name="kept", durable=True)(noop)
    async with refused(shop, ValueError, "durable=True or durable=False"):
        await shop.q.enqueue_many([(shop.send, (1,)), ("kept", ())])


# what is no handler


NOT_CALLABLE = [5, "x", None, [], {}, Path(), ...]


@pytest.mark.parametrize(
    ("how", "thing"),
    # not task(None), which is how task() is spelled
    [(how, thing) for how in ("task", "task with options", "every") for thing in NOT_CALLABLE if (how, thing) != ("task", None)],
    ids=repr,
)
def test_what_is_not_callable_is_no_task(how: str, thing: object) -> None:
    q: Any = TinyQ()
    register = {"task": q.task, "task with options": q.task(queue="emails"), "every": q.every(60)}[how]
    with mistake(TypeError, f"{thing!r} is not callable", "a function, a method, a partial or another callable"):
        register(thing)


@pytest.mark.parametrize("thing", [thing for thing in NOT_CALLABLE if thing != "x"], ids=repr)
async def test_what_is_not_callable_cannot_be_enqueued(shop: Shop, thing: object) -> None:
    async with refused(shop, TypeError, f"{thing!r} is not callable"):
        await shop.q.enqueue(thing)
    async with refused(shop, TypeError, f"{thing!r} is not callable"):
        await shop.q.enqueue_many([(shop.send, (1,)), (thing, ())])


async def test_a_coroutine_is_called_already_and_is_no_handler(shop: Shop) -> None:
    coroutine = noop()
    async with refused(shop, TypeError, "is not callable"):
        await shop.q.enqueue(coroutine)
    coroutine.close()


async def generate() -> AsyncIterator[int]:
    yield 1


def count() -> Iterator[int]:
    yield 1


class Generating:
    def __call__(self) -> Iterator[int]:
        yield 1

    def method(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    "thing",
    [
        generate,
        count,
        Generating(),
        Generating().method,
        functools.partial(count),
        functools.partial(functools.partial(generate)),
    ],
    ids=["async", "plain", "callable", "method", "partial", "partial of partial"],
)
async def test_a_generator_function_is_refused_since_a_call_does_not_run_it(shop: Shop, thing: Any) -> None:
    for register in (shop.q.task, shop.q.task(name="new"), shop.q.every(60)):
        with mistake(TypeError, "generator function", "without yield"):
            register(thing)
    async with refused(shop, TypeError, "generator function"):
        await shop.q.enqueue(thing)


@pytest.mark.parametrize("thing", [noop, asyncio.sleep, 5, None, "x"], ids=["function", "library function", "int", "None", "str"])
async def test_only_a_coroutine_can_be_spawned(shop: Shop, thing: Any) -> None:
    async with refused(shop, TypeError, "spawn() takes a coroutine", "call the async function"):
        shop.q.spawn(thing)


async def test_a_plain_function_in_its_thread_cannot_spawn_and_is_told_so(shop: Shop) -> None:
    def plain() -> None:
        coroutine = noop()
        with closing(coroutine), mistake(tinyq.NotStarted, "event loop"):
            shop.q.spawn(coroutine)

    async with asyncio.timeout(10):
        await (await shop.q.enqueue(plain)).result()


# names of tasks


def named(module: str, name: str = "run") -> Callable[[], str]:
    def fn() -> str:
        return module

    fn.__module__, fn.__qualname__ = module, name
    return fn


@pytest.mark.parametrize("first", ["task", "every"])
@pytest.mark.parametrize("second", ["task", "every"])
async def test_a_second_task_with_a_name_is_refused_and_the_first_stays(first: str, second: str) -> None:
    q: Any = TinyQ()
    register = {"task": lambda: q.task(name="run"), "every": lambda: q.every(3600, name="run")}
    register[first]()(named("one"))
    with mistake(tinyq.DuplicateTask, "'run'", "name=…", "replace=True"):
        register[second]()(named("two"))
    async with q, asyncio.timeout(10):
        assert await (await q.enqueue("run")).result() == "one"
        assert len((await q.stats()).schedules) == (first == "every")


def test_one_function_cannot_be_two_tasks_without_a_name() -> None:
    q: Any = TinyQ()
    q.task(noop)
    with mistake(tinyq.DuplicateTask, noop.__qualname__):
        q.task(noop)
    q.task(name="again")(noop)


def test_lambdas_of_one_place_need_names() -> None:
    q: Any = TinyQ()
    q.task(lambda: 1)
    with mistake(tinyq.DuplicateTask, "<lambda>"):
        q.task(lambda: 2)


async def test_replace_puts_a_task_in_the_place_of_another() -> None:
    q: Any = TinyQ()
    q.task(name="run")(named("one"))
    new = q.task(name="run", replace=True)(named("two"))
    async with q, asyncio.timeout(10):
        assert await (await q.enqueue("run")).result() == "two"
        assert await (await new.enqueue()).result() == "two"


async def test_functions_of_one_name_in_different_modules_are_different_tasks() -> None:
    q: Any = TinyQ()
    one, two = q.task(named("shop.mail")), q.task(named("shop.report"))
    assert (one.name, two.name) == ("shop.mail.run", "shop.report.run")
    async with q, asyncio.timeout(10):
        assert await (await q.enqueue("shop.mail.run")).result() == "shop.mail"
        assert await (await q.enqueue("shop.report.run")).result() == "shop.report"


@pytest.mark.parametrize("name", ["", "x" * 256], ids=["empty", "too long"])
def test_a_name_has_1_to_255_characters(name: str) -> None:
    q: Any = TinyQ()
    with mistake(ValueError, "a task's name is", "1 to 255 characters"):
        q.task(name=name)(noop)


def test_a_name_is_text() -> None:
    q: Any = TinyQ()
    with mistake(TypeError, "a task's name is 5"):
        q.task(name=5)(noop)


def test_a_task_of_the_script_that_runs_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    q: Any = TinyQ()
    q.task(named("__main__"))
    assert [(r.levelname, "__main__.run" in r.getMessage(), "name=" in r.getMessage()) for r in caplog.records] == [
        ("WARNING", True, True)
    ]
    caplog.clear()
    q.task(name="run")(named("__main__"))
    q.task(named("shop"))
    assert caplog.records == []


async def test_a_best_effort_job_of_an_unknown_name_is_refused_with_the_closest(shop: Shop) -> None:
    async with refused(shop, tinyq.UnknownTask, "'sned'", "did you mean 'send'?"):
        await shop.q.enqueue("sned", 1)


async def test_an_unknown_name_is_refused_readably_when_there_are_no_tasks_at_all() -> None:
    async with TinyQ() as q:
        with pytest.raises(tinyq.UnknownTask, match="'send'") as caught:
            await q.enqueue("send")
    assert "known are ;" not in str(caught.value)


async def test_a_durable_job_may_name_a_task_that_only_others_know(shop: Shop) -> None:
    job = await shop.q.enqueue("elsewhere.send", 1, durable=True)
    assert job.status is State.PENDING
    assert shop.stored() == 1
    assert (await shop.q.stats()).unknown == ("elsewhere.send",)


async def test_a_task_of_another_tinyq_is_refused(shop: Shop) -> None:
    other: Any = TinyQ()
    task = other.task(name="other")(noop)
    async with refused(shop, tinyq.UnknownTask, "'other'", "belongs to another TinyQ"):
        await shop.q.enqueue(task)


async def test_a_durable_job_needs_a_registered_task(shop: Shop) -> None:
    for fn in (noop, lambda: None, functools.partial(noop)):
        async with refused(shop, TypeError, "is not a registered task", "@tinyq.task"):
            await shop.q.enqueue(fn, durable=True)


# schedules


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        (0, ValueError), (-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), (0.0001, ValueError),
        (timedelta(0), ValueError), ("60", TypeError), (None, TypeError), (True, TypeError), (noop, TypeError),
        (10**400, ValueError),
    ],
    ids=["zero", "negative", "nan", "inf", "too short", "timedelta", "str", "None", "bool", "the function itself", "too long"],
)  # fmt: skip
def test_a_period_that_is_none_is_refused(seconds: Any, error: type[Exception]) -> None:
    q: Any = TinyQ()
    with mistake(error, "every is "):
        q.every(seconds)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"offset": -1}, ValueError, "offset is -1"),
        ({"offset": "5"}, TypeError, "offset is '5'"),
        ({"offset": math.inf}, ValueError, "offset is inf"),
        ({"immediate": "yes"}, TypeError, "immediate is 'yes'"),
        ({"immediate": 1}, TypeError, "immediate is 1"),
        ({"per_process": "yes"}, TypeError, "per_process is 'yes'"),
        ({"overlap": "maybe"}, ValueError, "overlap is 'maybe': give one of 'skip'"),
        ({"promote": "yes"}, ValueError, "promote is 'yes'"),
        ({"name": ""}, ValueError, "a task's name is ''"),
    ],
    ids=repr,
)
async def test_a_bad_value_of_a_schedule_is_refused_and_leaves_neither_schedule_nor_task(
    shop: Shop, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with refused(shop, error, words):
        shop.q.every(60, **{"name": "new", **options})(noop)
    assert (await shop.q.stats()).schedules == ()
    shop.q.task(name="new")(noop)


def test_a_schedule_has_no_arguments_to_give() -> None:
    def wants(user: int) -> None: ...

    def wants_keyword(*, user: int) -> None: ...

    q: Any = TinyQ()
    for function in (wants, wants_keyword):
        with mistake(TypeError, "needs arguments", "functools.partial"):
            q.every(60)(function)
    q.every(60, name="partial")(functools.partial(wants, 5))


@pytest.mark.parametrize("promote", ["yes", 1, 0, "all"])
def test_a_bad_promote_of_a_task_is_refused(promote: Any) -> None:
    q: Any = TinyQ()
    with mistake(ValueError, f"promote is {promote!r}", "True, False, 'interrupted'"):
        q.task(promote=promote)


# options of a TinyQ


BAD_CONFIGURATION: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no slots": ({"concurrency": 0}, ValueError, "concurrency is 0: it must be at least 1"),
    "fewer than no slots": ({"concurrency": -1}, ValueError, "concurrency is -1"),
    "half a slot": ({"concurrency": 1.5}, TypeError, "concurrency is 1.5: give a whole number"),
    "slots as text": ({"concurrency": "20"}, TypeError, "concurrency is '20'"),
    "slots as a truth value": ({"concurrency": True}, TypeError, "concurrency is True"),
    "negative slots of a queue": ({"queues": {"emails": -1}}, ValueError, "queues['emails'] is -1"),
    "half a slot of a queue": ({"queues": {"emails": 1.5}}, TypeError, "queues['emails'] is 1.5"),
    "slots of a queue as text": ({"queues": {"emails": "3"}}, TypeError, "queues['emails'] is '3'"),
    "slots of a queue as a truth value": ({"queues": {"emails": True}}, TypeError, "queues['emails'] is True"),
    "no number of slots of a queue": ({"queues": {"emails": None}}, TypeError, "queues['emails'] is None"),
    "endless slots of a queue": ({"queues": {"emails": math.inf}}, TypeError, "queues['emails'] is inf"),
    "a queue without a name": ({"queues": {"": 1}}, ValueError, "a queue's name is ''"),
    "a queue with a number for a name": ({"queues": {1: 1}}, TypeError, "a queue's name is 1"),
    "queues as a list": ({"queues": ["emails"]}, TypeError, "queues is ['emails']"),
    "queues as text": ({"queues": "emails"}, TypeError, "queues is 'emails'"),
    "queues as a number": ({"queues": 5}, TypeError, "queues is 5"),
    "no threads": ({"threads": 0}, ValueError, "threads is 0"),
    "threads as text": ({"threads": "4"}, TypeError, "threads is '4'"),
    "nothing may wait": ({"max_pending": 0}, ValueError, "max_pending is 0"),
    "endless waiting": ({"max_pending": math.inf}, TypeError, "max_pending is inf"),
    "no payload": ({"max_payload": 0}, ValueError, "max_payload is 0"),
    "negative grace": ({"grace": -1}, ValueError, "grace is -1"),
    "grace as text": ({"grace": "10"}, TypeError, "grace is '10'"),
    "no lease": ({"lease": 0}, ValueError, "lease is 0"),
    "a lease too short": ({"lease": 0.2}, ValueError, "lease is 0.2: it must be at least 0.3 s"),
    "an endless lease": ({"lease": math.inf}, ValueError, "lease is inf"),
    "synchronous off": ({"synchronous": "off"}, ValueError, "synchronous is 'off': give one of 'full', 'normal'"),
    "synchronous as a truth value": ({"synchronous": True}, ValueError, "synchronous is True"),
    "promote as text": ({"promote": "yes"}, ValueError, "promote is 'yes'"),
    "worker as a number": ({"worker": 0}, TypeError, "worker is 0: give True or False"),
    "worker as text": ({"worker": "no"}, TypeError, "worker is 'no'"),
    "no namespace": ({"namespace": ""}, ValueError, "namespace is ''"),
    "namespace as a number": ({"namespace": 5}, TypeError, "namespace is 5"),
    "no worker name": ({"worker_name": ""}, ValueError, "worker_name is ''"),
    "worker name as a number": ({"worker_name": 5}, TypeError, "worker_name is 5"),
    "a clock that is none": ({"clock": 5}, TypeError, "clock is 5"),
    "a clock without a wait": ({"clock": __import__("time")}, TypeError, "clock is "),
    "db as a number": ({"db": 5}, TypeError, "db is 5: give the path of an SQLite file"),
    "db as bytes": ({"db": b"jobs.db"}, TypeError, "db is b'jobs.db'"),
    "db as a truth value": ({"db": True}, TypeError, "db is True"),
    "db without a name": ({"db": ""}, tinyq.ConfigurationError, "db is ''"),
    "db in memory": ({"db": ":memory:"}, tinyq.ConfigurationError, "leave db out for jobs in memory"),
    "db in memory as a path": ({"db": Path(":memory:")}, tinyq.ConfigurationError, "leave db out"),
    "db in shared memory": ({"db": "file::memory:?cache=shared"}, tinyq.ConfigurationError, "leave db out"),
    "db in named memory": ({"db": "file:jobs?mode=memory"}, tinyq.ConfigurationError, "leave db out"),
    "db as a file URI": ({"db": "file:jobs.db"}, tinyq.ConfigurationError, "give the plain path"),
    "db as a URL": ({"db": "sqlite:///jobs.db"}, tinyq.ConfigurationError, "give the plain path"),
    "db as the URL of a server": ({"db": "postgresql://u@h/d"}, tinyq.ConfigurationError, "give the plain path"),
}


@pytest.mark.parametrize("bad", BAD_CONFIGURATION.values(), ids=BAD_CONFIGURATION)
def test_a_bad_option_of_a_tinyq_is_refused_by_the_constructor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[dict[str, Any], type[Exception], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options, error, words = bad
    make: Any = TinyQ
    with mistake(error, words):
        make(**options)
    assert entries(tmp_path) == []


def test_none_leaves_an_option_of_a_tinyq_unset() -> None:
    make: Any = TinyQ
    make(None, **dict.fromkeys(["queues", "threads", "worker_name", "clock", "timeout", "retry", "result_ttl", "failure_ttl"]))


async def test_a_bad_grace_does_not_stop_anything(shop: Shop) -> None:
    for grace, error in ((-1, ValueError), ("5", TypeError), (math.nan, ValueError)):
        async with refused(shop, error, f"grace is {grace!r}"):
            await shop.q.stop(grace=grace)
    async with asyncio.timeout(10):
        await (await shop.send.enqueue(1)).result()
    assert shop.ran == [1]


# queues that are not served


async def test_a_best_effort_job_for_a_queue_without_slots_is_refused(shop: Shop) -> None:
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: shop.q.enqueue(shop.send, 1, queue="elsewhere"),
        lambda: shop.send.options(queue="elsewhere").enqueue(1),
        lambda: shop.q.enqueue_many([(shop.send, (1,))], queue="elsewhere"),
        lambda: shop.q.enqueue(noop, queue="elsewhere"),
    ]
    for call in calls:
        async with refused(shop, tinyq.ConfigurationError, "'elsewhere'", "0 slots", "durable=True"):
            await call()


async def test_a_durable_job_for_a_queue_without_slots_is_left_to_others(shop: Shop) -> None:
    job = await shop.q.enqueue(shop.send, 1, queue="elsewhere", durable=True)
    assert job.status is State.PENDING
    assert shop.stored() == 1


# durable without a database


async def test_a_durable_job_without_a_database_is_refused_with_the_ways_to_have_one() -> None:
    q: Any = TinyQ()
    task = q.task(name="send", durable=True)(noop)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: task.enqueue(),
        lambda: q.enqueue(task),
        lambda: q.enqueue("send"),
        lambda: q.enqueue("elsewhere", durable=True),
        lambda: task.options(durable=True).enqueue(),
        lambda: q.enqueue_many([(task, ())]),
    ]
    async with q:
        for call in calls:
            with mistake(tinyq.ConfigurationError, "durable=True needs a database", "db='jobs.db'", "TINYQ_DB"):
                await call()
        assert (await q.stats()).count() == 0


async def test_a_job_cannot_be_promoted_without_a_database_and_stays_as_it_was() -> None:
    q: Any = TinyQ()
    task = q.task(noop)
    async with q, asyncio.timeout(10):
        job = await task.options(delay=3600).enqueue()
        with mistake(tinyq.ConfigurationError, "needs a database"):
            await job.promote()
        assert job.status is State.PENDING
        assert await job.cancel()


# arguments that JSON cannot carry


class Session:
    """Like the session of a request: alive only as long as the request."""

    def commit(self) -> None: ...


async def test_a_session_is_refused_as_argument_of_a_durable_job_by_name_and_type(shop: Shop) -> None:
    calls: list[tuple[Callable[[], Awaitable[Any]], str]] = [
        (lambda: shop.q.enqueue(shop.send, Session(), durable=True), "user"),
        (lambda: shop.send.options(durable=True).enqueue(1, note=Session()), "note"),
        (lambda: shop.send.options(durable=True).enqueue(1, note={"db": [Session()]}), "note['db'][0]"),
        (lambda: shop.q.enqueue_many([(shop.send, (1,)), (shop.send, (Session(),))], durable=True), "user"),
    ]
    for call, path in calls:
        async with refused(shop, tinyq.PayloadError, "'send'", f"{path} is of type", f"{__name__}.Session", "pass an id"):
            await call()


@pytest.mark.parametrize("value", [(1, 2), {1}, math.nan, NAIVE, {1: 2}, {None: 1}, Path()], ids=repr)
async def test_an_argument_that_json_cannot_carry_is_refused_by_task_and_path(shop: Shop, value: object) -> None:
    async with refused(shop, tinyq.PayloadError, "'send'", "note['items'][1]"):
        await shop.send.options(durable=True).enqueue(1, note={"items": [0, value]})


async def test_arguments_that_are_too_large_are_refused(shop: Shop) -> None:
    async with refused(shop, tinyq.PayloadTooLarge, "'send'", "max_payload", "pass its id"):
        await shop.q.enqueue(shop.send, "x" * 1_048_577, durable=True)


async def test_a_job_whose_arguments_json_cannot_carry_is_not_promoted_and_not_lost(shop: Shop) -> None:
    job = await shop.send.options(delay=3600).enqueue({1})
    with mistake(tinyq.PayloadError, "'send'", "user is of type set"):
        await job.promote()
    assert (job.status, job.durable, shop.stored()) == (State.PENDING, False, 0)
    assert await job.cancel()


# before start, after stop


USES: dict[str, Callable[[Any, Any], Any]] = {
    "task.enqueue": lambda q, task: task.enqueue(),
    "task.options": lambda q, task: task.options(delay=5).enqueue(),
    "enqueue": lambda q, task: q.enqueue(task),
    "enqueue durable": lambda q, task: q.enqueue(task, durable=True),
    "enqueue by name": lambda q, task: q.enqueue("task"),
    "enqueue a bare function": lambda q, task: q.enqueue(noop),
    "enqueue_many": lambda q, task: q.enqueue_many([(task, ())]),
    "enqueue_many of nothing": lambda q, task: q.enqueue_many([]),
    "spawn": lambda q, task: q.spawn(noop()),
    "get": lambda q, task: q.get("x"),
    "stats": lambda q, task: q.stats(),
    "drain": lambda q, task: q.drain(),
    "quiesce": lambda q, task: q.quiesce(),
    "requeue": lambda q, task: q.requeue("x"),
}
uses = pytest.mark.parametrize("use", USES.values(), ids=USES)


async def use_it(use: Any, q: Any, task: Any) -> None:
    answer = use(q, task)
    if asyncio.iscoroutine(answer):
        await answer


@uses
async def test_use_before_start_names_what_may_have_kept_it_from_starting(tmp_path: Path, use: Any) -> None:
    q: Any = TinyQ(tmp_path / "jobs.db")
    task = q.task(name="task")(noop)
    with mistake(tinyq.NotStarted, "has not been started", "lifespan", "mounted sub-application", "test client"):
        await use_it(use, q, task)
    assert not (tmp_path / "jobs.db").exists()
    async with q:
        assert (await q.stats()).count() == 0


async def test_use_before_start_names_a_bare_asgi_transport_as_a_likely_cause() -> None:
    q: Any = TinyQ()
    with mistake(tinyq.NotStarted, "ASGI"):
        await q.enqueue(noop)


@uses
async def test_use_after_stop_is_refused_and_stores_nothing(tmp_path: Path, use: Any) -> None:
    q: Any = TinyQ(tmp_path / "jobs.db")
    task = q.task(name="task")(noop)
    async with q:
        pass
    with mistake(tinyq.ShuttingDown, "stopped"):
        await use_it(use, q, task)
    assert rows(tmp_path / "jobs.db", "SELECT count(*) FROM tinyq_jobs") == [(0,)]


async def test_enqueue_while_stopping_is_refused_but_not_to_jobs_that_still_run(tmp_path: Path) -> None:
    q: Any = TinyQ(tmp_path / "jobs.db")
    begun, go_on = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    @q.task(name="last")  # type: ignore[untyped-decorator]
    async def last() -> None:
        ran.append("last")

    @q.task(name="first")  # type: ignore[untyped-decorator]
    async def first() -> None:
        begun.set()
        await go_on.wait()
        await last.enqueue()
        await last.options(durable=True).enqueue()

    async with asyncio.timeout(20):
        await q.start()
        await first.enqueue()
        await begun.wait()
        stopping = asyncio.create_task(q.stop(grace=60))
        await asyncio.sleep(0)
        for options in ({}, {"durable": True}):
            with mistake(tinyq.ShuttingDown, "stopping", "nothing was stored"):
                await q.enqueue(last, **options)
        with mistake(tinyq.ShuttingDown, "stopping"):
            q.spawn(noop())
        go_on.set()
        await stopping
    assert ran == ["last"]
    assert rows(tmp_path / "jobs.db", "SELECT task, state FROM tinyq_jobs") == [("last", "pending")]


@uses
async def test_use_from_another_event_loop_is_refused(shop: Shop, use: Any) -> None:
    task = shop.q.task(name="task")(noop)

    def other_loop() -> None:
        with mistake(tinyq.NotStarted, "another event loop"):
            asyncio.run(use_it(use, shop.q, task))

    await asyncio.to_thread(other_loop)
    assert (await shop.q.stats()).count() == 0


def test_the_lifespan_of_a_mounted_sub_application_does_not_run_and_the_error_says_so() -> None:
    q: Any = TinyQ()
    outer, inner = FastAPI(), FastAPI(lifespan=q.lifespan)

    @inner.post("/job")
    async def job() -> None:
        await q.enqueue(noop)

    outer.mount("/inner", inner)
    with TestClient(outer) as client, mistake(tinyq.NotStarted, "mounted sub-application"):
        client.post("/inner/job")


def test_a_test_client_without_its_context_manager_runs_no_lifespan_and_the_error_says_so() -> None:
    q: Any = TinyQ()
    app = FastAPI(lifespan=q.lifespan)

    @app.post("/job")
    async def job() -> str:
        return str((await q.enqueue(noop)).status)

    with mistake(tinyq.NotStarted, "test client's without its context manager"):
        TestClient(app).post("/job")
    with TestClient(app) as client:
        assert client.post("/job").status_code == 200


async def test_a_bare_asgi_transport_runs_no_lifespan() -> None:
    q: Any = TinyQ()
    app = FastAPI(lifespan=q.lifespan)

    @app.post("/job")
    async def job() -> None:
        await q.enqueue(noop)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        with mistake(tinyq.NotStarted):
            await client.post("/job")


# always a handle or an error


async def test_enqueue_answers_a_handle_whether_the_job_is_new_or_was_there(shop: Shop) -> None:
    for durable in (False, True):
        new = await shop.q.enqueue(shop.send, 1, key="k", delay=3600, durable=durable)
        old = await shop.q.enqueue(shop.send, 2, key="k", delay=3600, durable=durable)
        assert isinstance(new, tinyq.Job) and isinstance(old, tinyq.Job)
        assert (new.created, old.created, new.id == old.id) == (True, False, True)
        [many] = await shop.q.enqueue_many([(shop.send, (3,))], key="k", delay=3600, durable=durable)
        assert (many.created, many.id) == (False, new.id)
        with mistake(tinyq.KeyConflict, "'send'", "'k'", "nothing was stored"):
            await shop.q.enqueue(shop.send, 4, key="k", on_conflict="raise", durable=durable)
        assert await new.cancel()


async def test_enqueue_raises_a_store_error_while_the_tables_are_gone_and_works_again_when_they_are_back(shop: Shop) -> None:
    rows(shop.path, "ALTER TABLE tinyq_jobs RENAME TO hidden")
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: shop.q.enqueue(shop.send, 1, durable=True),
        lambda: shop.q.enqueue_many([(shop.send, (1,))], durable=True),
        lambda: shop.q.get("00000000-0000-7000-8000-000000000000"),
        lambda: shop.q.stats(),
    ]
    for call in calls:
        with mistake(tinyq.StoreError, str(shop.path)):
            await call()
    rows(shop.path, "ALTER TABLE hidden RENAME TO tinyq_jobs")
    assert shop.stored() == 0
    assert (await shop.q.enqueue(shop.send, 1, durable=True)).created
    assert shop.stored() == 1


@pytest.mark.parametrize("id", ["", "x", "00000000-0000-7000-8000-000000000000", "0" * 31, 5, None], ids=repr)
async def test_an_id_of_no_job_is_refused_at_once(shop: Shop, id: Any) -> None:
    async with refused(shop, tinyq.JobNotFound, f"{id!r}"):
        await shop.q.get(id)


# files that cannot be opened


async def no_start(q: Any, *words: str) -> None:
    """Start fails with a StoreError, and leaves no thread, no task and nothing that is started behind."""
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    with mistake(tinyq.StoreError, *words):
        await q.start()
    async with asyncio.timeout(10):
        while set(threading.enumerate()) - threads:  # noqa: ASYNC110  a thread sets no event when it has ended
            await asyncio.sleep(0.001)
    assert asyncio.all_tasks() == tasks
    with mistake(tinyq.NotStarted):
        await q.stats()


async def test_a_path_in_a_missing_folder_is_refused_until_the_folder_is_there(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "jobs.db"
    q = TinyQ(path)
    await no_start(q, str(path), "folder that exists")
    assert entries(tmp_path) == []
    (tmp_path / "missing").mkdir()
    async with q:
        assert (await q.stats()).count() == 0


async def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    await no_start(TinyQ(tmp_path / "file" / "jobs.db"), "folder")


async def test_a_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    await no_start(TinyQ(tmp_path), str(tmp_path), "folder", "the path of a file")
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [b"order,item\n7,teapot\n", b"\x00" * 4096, b"PK\x03\x04" + b"x" * 5000, b"SQLite format 2\x00" + b"x" * 5000],
    ids=["text", "zeros", "archive", "almost"],
)
async def test_a_file_that_is_not_sqlite_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.csv"
    path.write_bytes(content)
    await no_start(TinyQ(path), str(path), "not a database", "give another path")
    assert path.read_bytes() == content
    assert entries(tmp_path) == ["jobs.csv"]


async def test_a_newer_schema_is_refused_in_one_sentence_and_its_jobs_are_kept(shop: Shop) -> None:
    await shop.q.enqueue(shop.send, 1, durable=True)
    await shop.q.stop()
    rows(shop.path, "UPDATE tinyq_meta SET value = value + 1 WHERE name = 'schema'")
    await no_start(TinyQ(shop.path), str(shop.path), "schema", "upgrade tinyq")
    assert shop.stored() == 1
    rows(shop.path, "UPDATE tinyq_meta SET value = value - 1 WHERE name = 'schema'")
    async with TinyQ(shop.path, worker=False) as q:
        assert (await q.stats()).count(task="send", state="pending") == 1


async def test_the_database_of_an_application_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    rows(path, "CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    async with TinyQ(path, worker=False) as q:
        await q.enqueue("send", durable=True)
    assert rows(path, "SELECT count(*) FROM orders") == [(0,)]


# the environment of the default instance


def start_default(**env: str) -> subprocess.CompletedProcess[str]:
    """A process that starts the default instance and says what came of it."""
    program = (
        "import asyncio, tinyq\n"
        "async def main():\n"
        "    async with tinyq.lifespan():\n"
        "        print('started')\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except Exception as error:\n"
        "    print(f'{type(error).__name__}: {error}')\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINYQ_")}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=60, check=True
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("TINYQ_WORKER", "maybe", "ConfigurationError: TINYQ_WORKER is 'maybe': set it to 0 or 1\n"),
        ("TINYQ_WORKER", "2", "ConfigurationError: TINYQ_WORKER is '2': set it to 0 or 1\n"),
        ("TINYQ_GRACE", "long", "ConfigurationError: TINYQ_GRACE is 'long': set it to a number of seconds\n"),
        ("TINYQ_GRACE", "-1", "ConfigurationError: TINYQ_GRACE is '-1': set it to a number of seconds\n"),
        ("TINYQ_GRACE", "nan", "ConfigurationError: TINYQ_GRACE is 'nan': set it to a number of seconds\n"),
        ("TINYQ_GRACE", "10s", "ConfigurationError: TINYQ_GRACE is '10s': set it to a number of seconds\n"),
    ],
)
def test_a_bad_environment_variable_is_refused_by_its_name_when_the_default_instance_starts(
    name: str, value: str, expected: str
) -> None:
    assert start_default(**{name: value}).stdout == expected


@pytest.mark.parametrize("value", [":memory:", "sqlite:///jobs.db"])
def test_a_bad_path_in_the_environment_is_refused_when_the_default_instance_starts(value: str) -> None:
    assert start_default(TINYQ_DB=value).stdout.startswith(f"ConfigurationError: db is '{value}'")


def test_a_path_in_the_environment_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    answer = start_default(TINYQ_DB=str(tmp_path / "missing" / "jobs.db"))
    assert answer.stdout.startswith("StoreError: ")
    assert "folder that exists" in answer.stdout


@pytest.mark.parametrize(
    "env",
    [
        {"TINYQ_GRACE": "0"},
        {"TINYQ_GRACE": "2.5"},
        {"TINYQ_WORKER": "0"},
        {"TINYQ_WORKER": "1"},
        {"TINYQ_GRACE": "", "TINYQ_DB": ""},
    ],
    ids=repr,
)
def test_good_and_empty_environment_variables_are_no_mistake(env: dict[str, str]) -> None:
    assert start_default(**env).stdout == "started\n"
