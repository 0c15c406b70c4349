"""Limits of a task: how many of its jobs run at once, here and in all processes, and how many start within a time."""

import asyncio
import enum
import itertools
import math
import random
import re
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import closing
from datetime import date, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import limited
import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Open, edit, eventually, rows, stopped_at_once
from limited import Evidence, Kill, Span

import tinyq
from tinyq import (
    Every,
    JobRow,
    PayloadError,
    Rate,
    Retry,
    Room,
    Settlement,
    Snooze,
    SQLiteStore,
    State,
    Task,
    Terms,
    TinyQ,
    new_id,
)

SECOND = 1_000_000
NOW = 1_767_268_800 * SECOND  # noon of the first day of 2026

pytestmark = pytest.mark.timeout(60)


class Gate:
    """A handler whose jobs stay until they are let through, all or those of one value, and who was there at once."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.inside = Counter[Any]()
        self.peak = Counter[Any]()
        self.most = 0
        self._open: dict[Hashable, asyncio.Event] = {}

    def open(self, *values: Hashable) -> None:
        """For good: for these values, or for all."""
        for value in values or (...,):
            self._open.setdefault(value, asyncio.Event()).set()

    def shut(self) -> None:
        self._open.clear()

    async def enter(self, value: Any) -> None:
        self.started.append(value)
        self.inside[value] += 1
        self.peak[value] = max(self.peak[value], self.inside[value])
        self.most = max(self.most, self.inside.total())
        try:
            events = [self._open.setdefault(key, asyncio.Event()) for key in (value, ...)]
            waits = [asyncio.ensure_future(event.wait()) for event in events]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        finally:
            self.inside[value] -= 1


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(params=["max_running", "max_running_total"])
def limit(request: pytest.FixtureRequest) -> str:
    """The name of the limit under test."""
    return str(request.param)


def held(q: TinyQ, gate: Gate, **options: Any) -> Task[[Any], Any, Any]:
    """A task, named held, whose jobs are at the gate."""

    async def enter(value: Any) -> None:
        await gate.enter(value)

    return q.task(**({"name": "held"} | options))(enter)


async def done(*jobs: tinyq.Job[Any]) -> None:
    async with asyncio.timeout(20):
        for job in jobs:
            await job.result()


async def quiet() -> None:
    """Time enough for another claim, which takes a thread."""
    for _ in range(6):
        await asyncio.sleep(0.004)


# What may be said, and where


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("max_running", 0, ValueError, "max_running is 0: it must be at least 1"),
        ("max_running", -1, ValueError, "max_running is -1: it must be at least 1"),
        ("max_running", True, TypeError, "max_running is True: give a whole number"),
        ("max_running", 2.5, TypeError, "max_running is 2.5: give a whole number"),
        ("max_running", 2**40, ValueError, "at most 2,147,483,647"),
        ("max_running_total", 0, ValueError, "max_running_total is 0: it must be at least 1"),
        ("max_running_total", "5", TypeError, "max_running_total is '5': give a whole number"),
        ("rate", 100, TypeError, "rate is 100: give a tinyq.Rate, such as Rate(100, per=60)"),
        ("rate", (100, 60), TypeError, "rate is (100, 60): give a tinyq.Rate"),
        ("limit_by", 7, TypeError, "limit_by is 7: give a str"),
        ("limit_by", "", ValueError, "limit_by is '': give 1 to 255 characters"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_the_task_and_the_option(
    option: str, value: object, error: type[Exception], message: str
) -> None:
    options: dict[str, Any] = ({"max_running": 1} if option == "limit_by" else {}) | {option: value}
    with pytest.raises(error, match=re.escape(message)) as caught:
        TinyQ().task(name="send", **options)(lambda to: None)
    assert "task" in str(caught.value)


def test_unset_is_no_limit() -> None:
    task = TinyQ().task(name="send", max_running=None, max_running_total=None, rate=None, limit_by=None)(lambda to: None)
    assert task._handler.terms is None


def test_limit_by_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limit_by is 'to' and there is no limit: give max_running, say, as well"):
        TinyQ().task(limit_by="to")(lambda to: None)


@pytest.mark.parametrize("by", ["acount", "args", "kwargs"])
def test_limit_by_what_is_no_parameter_is_refused_with_what_was_meant(by: str) -> None:
    def send(account: str, *args: int, **kwargs: int) -> None: ...

    with pytest.raises(TypeError, match=rf"task '.*send': limit_by is '{by}', which is no parameter of it") as caught:
        TinyQ().task(max_running=1, limit_by=by)(send)
    assert by != "acount" or "did you mean 'account'?" in str(caught.value)


@pytest.mark.parametrize("option", ["max_running", "max_running_total", "rate", "limit_by"])
async def test_limits_are_refused_where_one_job_is_spoken_of_with_the_place_where_they_belong(option: str) -> None:
    async with TinyQ() as q:
        task = q.task(name="send")(lambda to: None)
        given: dict[str, Any] = {option: 1}
        way_out = rf"{option} belongs to the task, since it is for all its jobs: @task\({option}=…\)"
        with pytest.raises(TypeError, match=way_out):
            task.options(**given)
        with pytest.raises(TypeError, match=way_out):
            await q.enqueue("send", "a", durable=False, **given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"limit": 0}, ValueError, "Rate.limit is 0: it must be at least 1"),
        ({"limit": True}, TypeError, "Rate.limit is True: give a whole number"),
        ({"limit": 1.5}, TypeError, "Rate.limit is 1.5: give a whole number"),
        ({"per": 0}, ValueError, "Rate.per is 0"),
        ({"per": -1}, ValueError, "Rate.per is -1"),
        ({"per": math.inf}, ValueError, "Rate.per is inf"),
        ({"per": math.nan}, ValueError, "Rate.per is nan"),
        ({"per": "60"}, TypeError, "Rate.per is '60'"),
        ({"burst": 0}, ValueError, "Rate.burst is 0: it must be at least 1"),
    ],
    ids=repr,
)
def test_a_rate_that_makes_no_sense_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Rate(**({"limit": 1} | given))


def test_a_rate_is_a_value_in_seconds_whose_burst_is_its_limit() -> None:
    assert Rate(100, per=timedelta(minutes=1)) == Rate(100, 60, burst=100) == Rate(100, per=60.0)
    assert (Rate(5).per, Rate(5).burst) == (1.0, 5)
    with pytest.raises(AttributeError, match=r"Rate\.limit cannot be changed"):
        Rate(5).limit = 6  # type: ignore[misc]  # pyright: ignore


async def test_periodic_work_has_limits_too(q: TinyQ, clock: FakeClock, gate: Gate) -> None:
    @q.every(10, overlap="allow", max_running=2)
    async def poll() -> None:
        await gate.enter("poll")

    for _ in range(6):
        await clock.advance(10)
        await quiet()
    assert gate.inside["poll"] == 2
    gate.open()
    await eventually(lambda: len(gate.started) >= 5, clock)
    assert gate.most == 2


def test_cron_takes_limits_and_names_itself_where_they_make_no_sense() -> None:
    q = TinyQ()
    assert q.cron("0 3 * * *", max_running=1, rate=Rate(1))(lambda: None)._handler.terms is not None
    with pytest.raises(ValueError, match=r"cron\(\): max_running is 0"):
        q.cron("0 3 * * *", max_running=0)
    with pytest.raises(TypeError, match="limit_by is 'account', which is no parameter of it"):
        q.every(10, max_running=1, limit_by="account")(lambda: None)


def test_under_test_limits_hold_nothing_up() -> None:
    q, ran = TinyQ(), list[int]()

    @q.task(max_running=1, max_running_total=1, rate=Rate(1, per=3600), limit_by="n")
    async def work(n: int) -> None:
        ran.append(n)

    async def enqueue() -> None:
        for n in (1, 1, 2, 1):
            await work.enqueue(n)
            await work.options(durable=True).enqueue(n)

    with q.testing() as jobs:
        asyncio.run(enqueue())
        assert jobs.drain() == 8
    assert sorted(ran) == [1, 1, 1, 1, 1, 1, 2, 2]


# The arithmetic of rates


def some_rate(dice: random.Random) -> Rate:
    per = dice.choice([0.001, 0.01, 1, 1, 60, 3600, dice.uniform(0.01, 100)])
    limit = dice.choice([1, 2, 3, 7, 10, 100, 3000])
    return Rate(limit, per=per, burst=dice.choice([None, 1, 2, 5, 50]))


def starts_of(rate: Rate, dice: random.Random, count: int) -> list[int]:
    """Moments of starts: greedy ones, with pauses of any length between them; each claim takes any part of what there is."""
    now, full_at, starts = NOW, None, list[int]()
    each = rate.per * SECOND / rate.limit
    while len(starts) < count:
        tokens, at = rate.tokens(full_at, now)
        assert 0 <= tokens <= rate.burst
        if tokens:
            taken = dice.randint(1, tokens)
            full_at = rate.spend(full_at, now, taken)
            starts += [now] * taken
        else:
            assert at > now, "or whoever waits would never wait"
            now = at
        if dice.random() < 0.3:
            now += round(dice.expovariate(1) * each * dice.choice([0.1, 1, rate.burst]))
    return starts


def test_within_any_time_no_more_start_than_a_rate_and_its_burst_let() -> None:
    for seed in range(25):
        dice = random.Random(seed)
        rate = some_rate(dice)
        starts = starts_of(rate, dice, 80)
        for (i, first), (j, last) in itertools.combinations(enumerate(starts), 2):
            most = rate.burst + (last - first) / SECOND * rate.limit / rate.per
            assert j - i + 1 <= most + 1e-5, (seed, rate, i, j)


def test_a_rate_gives_what_an_exact_bucket_gives() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        rate = some_rate(dice)
        per_token = Fraction(rate.per) * SECOND / rate.limit
        level, then, full_at, now = Fraction(rate.burst), NOW, None, NOW
        for _ in range(200):
            now += round(dice.expovariate(1) * float(per_token) * dice.choice([0.1, 1, 2]))
            level, then = min(Fraction(rate.burst), level + (now - then) / per_token), now
            tokens, at = rate.tokens(full_at, now)
            slack = max(Fraction(1, 1000), Fraction(60) / per_token)  # of a token: a quarter of a microsecond each start, at most
            assert level - slack <= tokens + 1, (seed, rate)
            assert tokens <= level + Fraction(1, 1000), (seed, rate)
            if tokens == 0:
                assert at - now <= (1 - level + slack) * per_token + 2, (seed, rate)
            else:
                full_at = rate.spend(full_at, now, 1)
                level -= 1


@pytest.mark.parametrize("rate", [Rate(3000, burst=2), Rate(7, per=0.001, burst=3), Rate(30, burst=2), Rate(100, per=60)])
def test_a_rate_that_is_used_to_the_full_does_not_drift(rate: Rate) -> None:
    now, full_at, count = NOW, None, 0
    while count < 10_000:
        tokens, at = rate.tokens(full_at, now)
        full_at, count = (rate.spend(full_at, now, tokens) if tokens else full_at), count + tokens
        now = now if tokens else at
    ideal = rate.burst + (now - NOW) / SECOND * rate.limit / rate.per
    assert 0.995 * ideal <= count <= ideal + 0.001


@pytest.mark.parametrize("back", [1, 20, 60, 3600, 10**9])
def test_a_clock_that_is_set_back_stops_no_rate_for_longer_than_its_bucket_takes_to_fill(back: int) -> None:
    rate, full_at = Rate(10, per=60, burst=5), None
    for _ in range(5):
        full_at = rate.spend(full_at, NOW, 1)
    now = NOW - back * SECOND
    assert rate.tokens(full_at, now)[0] == 0 or back >= 30
    until = now + 36 * SECOND
    while rate.tokens(full_at, now)[0] == 0:
        before, now = now, rate.tokens(full_at, now)[1]
        assert before < now <= until
    full_at = rate.spend(full_at, now, 1)
    assert now < full_at <= now + 30 * SECOND


# How many run at once


async def test_no_more_run_than_a_limit_lets_and_all_run(
    open_q: Open, durable: bool, clock: FakeClock, gate: Gate, limit: str
) -> None:
    q, dice = await open_q(concurrency=10), random.Random(7)
    now = most = 0

    async def work(n: int) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            await clock.wait(asyncio.Event(), dice.uniform(0, 2))
            if dice.random() < 0.2:
                raise ValueError(n)
        finally:
            now -= 1

    bounds: dict[str, Any] = {limit: 3}
    task = q.task(durable=durable, retry=Retry(50, base=1), **bounds)(work)
    jobs = [await task.enqueue(n) for n in range(25)]
    await eventually(lambda: all(job.status is State.DONE for job in jobs), clock, 0.25)
    assert most == 3


async def test_best_effort_and_durable_jobs_count_together_in_a_process(open_file: Open, clock: FakeClock, gate: Gate) -> None:
    q = await open_file(concurrency=10)
    task = held(q, gate, max_running=3)
    jobs = [await task.options(durable=n % 2 == 0).enqueue(n) for n in range(12)]
    await eventually(lambda: len(gate.started) == 3, clock)
    await clock.advance(2)
    await quiet()
    gate.open()
    await done(*jobs)
    assert gate.most == 3


async def test_a_job_at_its_limit_takes_no_slot_from_others(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(concurrency=10)
    report = held(q, gate, durable=durable, max_running=3)

    @q.task(durable=durable)
    async def mail(n: int) -> int:
        return n

    reports = [await report.enqueue("report") for _ in range(30)]
    mails = [await mail.enqueue(n) for n in range(20)]
    await done(*mails)  # while all reports that run are held
    assert gate.started == ["report"] * 3
    gate.open()
    await done(*reports)
    assert gate.most == 3


@pytest.mark.parametrize("limits", [{"max_running": 1}, {"max_running_total": 1}, {"rate": Rate(1, per=3600)}])
async def test_a_job_below_its_limit_starts_when_others_that_took_all_slots_have_ended(
    open_q: Open, durable: bool, gate: Gate, limits: dict[str, Any]
) -> None:
    q = await open_q(concurrency=2)
    urgent = held(q, gate, name="urgent", durable=durable)
    limited = held(q, gate, durable=durable, **limits)
    jobs = await q.enqueue_many([(urgent, ("urgent",)), (urgent, ("urgent",)), (limited, ("limited",))])
    await eventually(lambda: gate.inside["urgent"] == 2)
    gate.open()
    await done(*jobs)
    assert gate.started == ["urgent", "urgent", "limited"]


async def test_plain_functions_have_limits_as_well(q: TinyQ, durable: bool) -> None:
    import threading

    lock, now, most = threading.Lock(), 0, 0

    @q.task(durable=durable, max_running=2)
    def work() -> None:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        threading.Event().wait(0.01)
        with lock:
            now -= 1

    await done(*[await work.enqueue() for _ in range(12)])
    assert most <= 2


async def test_a_long_backlog_at_its_limit_keeps_an_urgent_job_from_nothing(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(concurrency=4, max_pending=10_000)
    report = held(q, gate, durable=durable, max_running=2, priority=5)

    @q.task(durable=durable)
    async def urgent() -> str:
        return "ran"

    await q.enqueue_many([(report, ("report",)) for _ in range(5_000)])
    await eventually(lambda: gate.inside["report"] == 2)
    async with asyncio.timeout(10):
        for _ in range(5):
            assert await (await urgent.enqueue()).result() == "ran"
    assert gate.started == ["report"] * 2


async def test_priority_is_strict_and_within_one_it_is_first_come_first_served_whatever_waits_at_its_limit(
    open_q: Open, durable: bool, gate: Gate
) -> None:
    q, order = await open_q(concurrency=2), list[str]()
    limited = held(q, gate, durable=durable, max_running=1, priority=9)
    blocker = held(q, gate, name="blocker", durable=durable)

    @q.task(durable=durable)
    async def note(name: str) -> None:
        order.append(name)

    first = [await blocker.enqueue("blocker"), await limited.enqueue("first")]
    await eventually(lambda: len(gate.started) == 2)
    limited_jobs = [await limited.enqueue(f"limited {n}") for n in range(3)]
    others = [await note.options(priority=n % 3).enqueue(f"{n % 3}: {n // 3}") for n in range(9)]
    gate.open("blocker")
    await done(first[0], *others)  # while the limited ones, of the highest priority, wait
    assert order == [f"{priority}: {n}" for priority in (2, 1, 0) for n in range(3)]
    assert gate.started[2:] == []
    gate.open()
    await done(*limited_jobs)
    assert gate.started[2:] == ["limited 0", "limited 1", "limited 2"]


async def test_jobs_of_a_limited_task_start_by_priority(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(concurrency=10)
    task = held(q, gate, durable=durable, max_running=1)
    jobs = [await task.enqueue("first")]
    await eventually(lambda: gate.started)
    jobs += [await task.options(priority=priority).enqueue(f"{priority} {n}") for n in range(2) for priority in (0, 5, -5)]
    gate.open()
    await done(*jobs)
    assert gate.started == ["first", "5 0", "5 1", "0 0", "0 1", "-5 0", "-5 1"]


@pytest.mark.parametrize("end", ["returns", "raises", "snoozes", "is cancelled", "times out", "gives up"])
async def test_a_job_that_is_over_or_waits_again_leaves_its_place_to_another(
    open_q: Open, durable: bool, clock: FakeClock, limit: str, end: str
) -> None:
    q, started, go_on = await open_q(), list[str](), asyncio.Event()
    ends = {"raises": ValueError(), "snoozes": Snooze(3600), "gives up": tinyq.Cancel("no use")}
    bounds: dict[str, Any] = {limit: 1}

    @q.task(durable=durable, retry=[3600.0], timeout=30, **bounds)
    async def work(name: str) -> None:
        started.append(name)
        if name == "first":
            await go_on.wait()
            if end in ends:
                raise ends[end]

    first = await work.enqueue("first")
    await eventually(lambda: started, clock)
    second = await work.enqueue("second")
    await quiet()
    assert started == ["first"]
    if end == "is cancelled":
        await first.cancel()
    elif end == "times out":
        await clock.advance(31)
    else:
        go_on.set()
    await eventually(lambda: second.status is State.DONE, clock, 0.1)
    assert started == ["first", "second"]


async def test_a_job_that_waits_at_its_limit_can_be_cancelled_and_expires(
    open_q: Open, durable: bool, clock: FakeClock, gate: Gate
) -> None:
    q = await open_q()
    task = held(q, gate, durable=durable, max_running=1)
    first, second = await task.enqueue("first"), await task.enqueue("second")
    third = await task.options(expires=20).enqueue("third")
    fourth = await task.enqueue("fourth")
    await eventually(lambda: gate.started)
    await second.cancel()
    await clock.advance(25)
    gate.open()
    await done(first, fourth)
    await eventually(lambda: third.status is State.CANCELLED, clock)
    assert gate.started == ["first", "fourth"]


async def test_drain_waits_for_what_waits_at_a_limit(open_q: Open, durable: bool) -> None:
    q, ran = await open_q(), list[int]()

    @q.task(durable=durable, max_running=1)
    async def work(n: int) -> None:
        await asyncio.sleep(0)
        ran.append(n)

    for n in range(20):
        await work.enqueue(n)
    async with asyncio.timeout(10):
        await q.drain()
    assert ran == list(range(20))


async def test_what_waited_at_a_limit_when_its_process_stopped_has_the_limit_in_the_next_one(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    first = await open_file()
    task = held(first, gate, max_running_total=1, limit_by="value")
    for value in ("a", "a", "b", "a", "b"):
        await task.enqueue(value)
    await eventually(lambda: len(gate.started) == 2)
    await stopped_at_once(first, clock)
    waiting = len(rows(file, "seq"))
    assert waiting >= 3
    assert set(rows(file, "limit_value")) == {('"a"',), ('"b"',)}
    second = await open_file()
    held(second, gate, max_running_total=1, limit_by="value")
    await eventually(lambda: len(gate.started) == 4, clock)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock)
    assert gate.peak == {"a": 1, "b": 1}
    assert len(gate.started) == 2 + waiting


# For each value of a parameter


async def test_limits_hold_for_each_value_apart(q: TinyQ, durable: bool, gate: Gate, limit: str) -> None:
    bounds: dict[str, Any] = {limit: 2}
    task = held(q, gate, durable=durable, limit_by="value", **bounds)
    jobs = [await task.enqueue(value) for value in ("a",) * 5 + ("b",) * 5 + ("c",)]
    await eventually(lambda: len(gate.started) == 5)
    await quiet()
    assert gate.inside == {"a": 2, "b": 2, "c": 1}
    gate.open()
    await done(*jobs)
    assert gate.peak == {"a": 2, "b": 2, "c": 1}


class Plan(enum.Enum):
    FREE = "free"
    PAID = "paid"


LONG = "ß" * 5_000


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (str, "a", "b"),
        (str, LONG, LONG + "x"),
        (str, "", " "),
        (str, "\0", "\N{SNOWMAN}"),
        (int, 7, -7),
        (UUID, UUID(int=1), UUID(int=2)),
        (Plan, Plan.FREE, Plan.PAID),
        (date, date(2026, 1, 1), date(2026, 1, 2)),
        (int | None, None, 0),
        (list[int], [1, 2], [2, 1]),
        (bool, True, False),
    ],
    ids=lambda value: re.sub(r"\W", "", repr(value))[:20],
)
async def test_values_of_any_kind_are_told_apart_and_known_again(
    q: TinyQ, durable: bool, gate: Gate, kind: Any, one: Any, other: Any
) -> None:
    async def work(account: Any) -> None:
        await gate.enter(repr(account))

    work.__annotations__["account"] = kind
    task = q.task(durable=durable, max_running=1, limit_by="account")(work)
    jobs = [await task.enqueue(value) for value in (one, other)] + [await task.enqueue(account=value) for value in (one, other)]
    await eventually(lambda: len(gate.started) == 2)
    await quiet()
    assert gate.inside == {repr(one): 1, repr(other): 1}
    gate.open()
    await done(*jobs)
    assert gate.most == 2


async def test_a_value_may_be_given_by_position_by_keyword_or_not_at_all(q: TinyQ, durable: bool, gate: Gate) -> None:
    @q.task(durable=durable, max_running=1, limit_by="account")
    async def work(n: int, account: str = "a") -> None:
        await gate.enter(account)

    jobs = [await work.enqueue(1), await work.enqueue(2, "a"), await work.enqueue(account="a", n=3), await work.enqueue(4, "b")]
    await eventually(lambda: len(gate.started) == 2)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}
    gate.open()
    await done(*jobs)
    assert gate.peak == {"a": 1, "b": 1}


async def test_a_value_that_can_only_be_given_by_keyword_is_not_taken_from_the_positions(
    q: TinyQ, durable: bool, gate: Gate
) -> None:
    @q.task(durable=durable, max_running=1, limit_by="account")
    async def work(*numbers: int, account: str = "a") -> None:
        await gate.enter(account)

    jobs = [await work.enqueue(1, 2), await work.enqueue(3, 4), await work.enqueue(5, account="b")]
    await eventually(lambda: len(gate.started) == 2)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}
    gate.open()
    await done(*jobs)


async def test_a_value_that_json_cannot_carry_is_refused_with_the_parameter(q: TinyQ) -> None:
    @q.task(max_running=1, limit_by="account")
    async def work(account: Any) -> None: ...

    with pytest.raises(PayloadError, match=r"its limits go by account \(limit_by\)"):
        await work.enqueue(object())


async def test_one_account_with_a_long_backlog_holds_up_no_other(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(concurrency=10, max_pending=10_000)
    task = held(q, gate, durable=durable, max_running=2, limit_by="value")
    await q.enqueue_many([(task, ("busy",)) for _ in range(3_000)])
    await eventually(lambda: gate.inside["busy"] == 2)
    gate.open("quick")
    await done(*[await task.enqueue("quick") for _ in range(5)])
    assert gate.inside["busy"] == 2


async def test_of_three_hundred_accounts_at_their_limit_the_one_that_has_room_is_served(
    open_q: Open, durable: bool, clock: FakeClock, gate: Gate
) -> None:
    q = await open_q(concurrency=400)
    task = held(q, gate, durable=durable, max_running=1, limit_by="value")
    values = [f"account {n}" for n in range(300)]
    jobs = await q.enqueue_many([(task, (value,)) for value in values * 2])
    await eventually(lambda: len(gate.started) == 300, clock, 0.02)
    assert set(gate.inside.values()) == {1}
    for n, value in enumerate(("account 137", "account 0", "account 299")):
        gate.open(value)
        await eventually(lambda n=n: len(gate.started) == 301 + n, clock, 0.02)  # type: ignore[misc]
        assert gate.started[-1] == value
    gate.open()
    await eventually(lambda: all(job.status is State.DONE for job in jobs), clock, 0.02)
    assert set(gate.peak.values()) == {1}


async def test_a_replaced_job_waits_for_the_limit_of_its_new_value(q: TinyQ, durable: bool, gate: Gate) -> None:
    async def work(account: str, n: int) -> None:
        await gate.enter(account)

    task = q.task(name="work", durable=durable, max_running=1, limit_by="account")(work)
    first = await task.enqueue("a", 1)
    await eventually(lambda: gate.started == ["a"])
    keyed = task.options(key="k", on_conflict="replace")
    second = await keyed.enqueue("a", 2)
    await quiet()
    assert gate.started == ["a"]
    await keyed.enqueue("b", 3)
    await eventually(lambda: gate.started == ["a", "b"])
    third = await task.enqueue("b", 4)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}
    gate.open()
    await done(first, second, third)


async def test_a_replaced_job_in_another_queue_keeps_the_limit_of_its_value(open_q: Open, durable: bool, gate: Gate) -> None:
    q = await open_q(queues={"other": 5})
    task = held(q, gate, durable=durable, max_running=1, limit_by="value")
    first = await task.enqueue("a")
    await eventually(lambda: gate.started == ["a"])
    keyed = task.options(key="k", on_conflict="replace")
    await keyed.enqueue("b" if gate.inside["b"] else "a")
    second = await task.options(key="k", on_conflict="replace", queue="other").enqueue("a")
    await quiet()
    assert gate.inside == {"a": 1}
    gate.open()
    await done(first, second)
    assert gate.most == 1


async def test_a_recurring_job_that_is_given_another_value_has_its_limit_from_the_next_run_on(
    q: TinyQ, clock: FakeClock, gate: Gate
) -> None:
    task = held(q, gate, max_running=1, limit_by="value")
    await q.schedule(task, "a", when=Every(10), key="k")
    await eventually(lambda: gate.started == ["a"], clock, 1)
    await q.schedule(task, "b", when=Every(10), key="k")
    other = await task.enqueue("a")
    await quiet()
    assert gate.inside == {"a": 1}
    gate.open("a")
    await done(other)
    gate.shut()
    await eventually(lambda: gate.inside["b"], clock, 1)
    another = await task.enqueue("b")
    await quiet()
    assert gate.peak == {"a": 1, "b": 1}
    assert len(gate.started) == 3
    gate.open()
    await done(another)


# In all processes


async def both(open_file: Open, gate: Gate, **options: Any) -> list[Task[[Any], Any, Any]]:
    return [held(await open_file(), gate, durable=True, **options) for _ in range(2)]


async def test_processes_share_one_limit_and_what_ends_in_one_lets_another_start(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    tasks = await both(open_file, gate, max_running_total=3)
    for n in range(12):
        await tasks[n % 2].enqueue(n)
    await eventually(lambda: len(gate.started) == 3, clock)
    await clock.advance(5)
    await quiet()
    assert len(gate.started) == 3
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock, 0.05)
    assert gate.most == 3


async def test_a_process_hears_at_once_that_a_job_of_another_has_made_room(open_file: Open, gate: Gate) -> None:
    first = await open_file(concurrency=1)
    task = held(first, gate, durable=True, max_running_total=1)
    blocker = held(first, gate, name="blocker", durable=True, queue="own", priority=9)
    await task.enqueue("first")
    await eventually(lambda: gate.started == ["first"])
    second = await open_file(queues={"own": 0})
    held(second, gate, durable=True, max_running_total=1)
    await task.enqueue("second")
    await blocker.enqueue("blocker")
    await quiet()
    gate.open("first")
    await eventually(lambda: sorted(gate.started[1:]) == ["blocker", "second"])  # while no time passes
    assert gate.inside == {"first": 0, "blocker": 1, "second": 1}


async def test_best_effort_and_durable_jobs_of_one_task_take_turns_at_its_limit(
    open_file: Open, clock: FakeClock, gate: Gate
) -> None:
    task = held(await open_file(), gate, max_running=1)
    await task.enqueue("first")
    await eventually(lambda: gate.started)
    for n in range(20):
        await task.options(durable=n % 2 == 0).enqueue(("best-effort", "durable")[n % 2 == 0])
    gate.open()
    await eventually(lambda: len(gate.started) == 21, clock)
    kinds = gate.started[1:]
    assert {*kinds[:10]} == {"best-effort", "durable"}
    assert gate.most == 1


async def test_each_process_has_a_limit_of_its_own_of_what_runs_in_it(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    tasks = await both(open_file, gate, max_running=2, max_running_total=3)
    for n in range(8):
        await tasks[0].enqueue(n)
    await eventually(lambda: len(gate.started) == 3, clock)
    await clock.advance(5)
    await quiet()
    assert gate.most == 3
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock, 0.05)
    assert gate.most == 3


async def test_a_job_by_name_from_a_process_without_its_handler_counts_like_any_other(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    producer = await open_file(worker=False)
    tasks = await both(open_file, gate, max_running_total=2)
    jobs = [await tasks[0].enqueue(0)]
    await eventually(lambda: gate.started)
    jobs += [await producer.enqueue("held", n, durable=True) if n % 2 else await tasks[0].enqueue(n) for n in range(1, 12)]
    await eventually(lambda: len(gate.started) == 2, clock)
    for _ in range(10):
        await clock.advance(1)
        await quiet()
    assert len(gate.started) == 2
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock, 0.05)
    assert gate.most == 2


async def test_a_job_by_name_has_the_limit_of_its_value(open_file: Open, clock: FakeClock, gate: Gate, file: Path) -> None:
    producer = await open_file(worker=False)
    await producer.enqueue_many([("held", ("ab"[n % 2],)) for n in range(6)], durable=True)
    assert rows(file, "limit_value") == [(None,)] * 6
    held(await open_file(), gate, max_running=1, limit_by="value")
    await eventually(lambda: len(gate.started) == 2, clock)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock)
    assert gate.peak == {"a": 1, "b": 1}


async def test_a_job_by_name_whose_arguments_do_not_fit_holds_up_no_other(
    open_file: Open, clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    producer = await open_file(worker=False)
    ran: list[int] = []
    for arguments in ((), (1, 2, 3), (5,)):
        await producer.enqueue("work", *arguments, durable=True)
    edit(file, "UPDATE tinyq_jobs SET payload = 'no json' WHERE seq = 2")
    q = await open_file()

    @q.task(name="work", max_running_total=1, limit_by="account")
    async def work(account: int) -> None:
        ran.append(account)

    await eventually(lambda: ran == [5], clock)
    await eventually(lambda: rows(file, "state") == [("pending",), ("dead",)], clock)


async def test_a_job_that_is_moved_to_another_task_by_hand_counts_for_that(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    q = await open_file()
    other = held(q, gate, name="other", durable=True, max_running=1, limit_by="value")
    task = held(q, gate, durable=True, max_running=1, limit_by="value")
    jobs = [await task.enqueue("a"), await other.enqueue("a")]
    await eventually(lambda: len(gate.started) == 2)
    jobs += [await task.enqueue("a"), await task.enqueue("a")]
    edit(file, "UPDATE tinyq_jobs SET task = 'other' WHERE seq IN (1, 3)")
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock)
    assert len(gate.started) == 4
    assert gate.peak["a"] == 2
    assert gate.most == 2


async def test_a_job_that_is_moved_while_it_runs_counts_until_it_ends(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    tasks = await both(open_file, gate, max_running_total=1)
    await tasks[0].enqueue("first")
    await eventually(lambda: gate.started, clock)
    edit(file, "UPDATE tinyq_jobs SET queue = 'other'")
    await tasks[1].enqueue("second")
    for _ in range(5):
        await clock.advance(1)
        await quiet()
    assert gate.started == ["first"]
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock)
    assert gate.most == 1


async def test_a_recurring_job_counts_for_the_value_that_it_runs_with_when_it_is_given_another(
    open_file: Open, clock: FakeClock, gate: Gate, file: Path
) -> None:
    first = held(await open_file(), gate, max_running_total=1, limit_by="value")
    await first._q.schedule(first, "a", when=Every(3600), key="k", immediate=True)
    await eventually(lambda: gate.started == ["a"], clock)
    await first._q.schedule(first, "b", when=Every(3600), key="k")
    held(await open_file(), gate, max_running_total=1, limit_by="value")
    await first.options(durable=True).enqueue("a")
    for _ in range(5):
        await clock.advance(1)
        await quiet()
    assert gate.started == ["a"]
    gate.open()
    await eventually(lambda: len(rows(file, "seq")) == 1, clock)
    clock.block(3600)
    await eventually(lambda: gate.started == ["a", "a", "b"], clock)
    await eventually(lambda: rows(file, "state, limit_value") == [("pending", '"b"')], clock)


async def test_names_of_before_share_the_limit_of_their_task(open_file: Open, clock: FakeClock, gate: Gate, file: Path) -> None:
    producer = await open_file(worker=False)
    for name in ("old", "older", "held", "old", "held"):
        await producer.enqueue(name, name, durable=True)
    for _ in range(2):
        held(await open_file(), gate, aliases=["old", "older"], max_running_total=2)
    await eventually(lambda: len(gate.started) == 2, clock)
    for _ in range(5):
        await clock.advance(1)
        await quiet()
    assert len(gate.started) == 2
    gate.open()
    await eventually(lambda: rows(file, "seq") == [], clock, 0.05)
    assert gate.most == 2


async def test_a_task_that_has_a_limit_now_has_it_for_jobs_of_before(open_file: Open, gate: Gate, clock: FakeClock) -> None:
    before = held(await open_file(worker=False), gate, durable=True)
    for value in "aabb":
        await before.enqueue(value)
    held(await open_file(), gate, max_running_total=1, limit_by="value")
    await eventually(lambda: len(gate.started) == 2, clock)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}


async def test_a_task_that_has_no_limit_any_more_runs_all_its_jobs(open_file: Open, gate: Gate, clock: FakeClock) -> None:
    before = held(await open_file(worker=False), gate, durable=True, max_running=1, limit_by="value")
    for value in "aabb":
        await before.enqueue(value)
    held(await open_file(), gate)
    await eventually(lambda: gate.inside == {"a": 2, "b": 2}, clock)


async def test_a_job_of_a_task_with_a_limit_in_ones_own_transaction_counts_like_any_other(
    q: TinyQ, open_file: Open, file: Path, gate: Gate
) -> None:
    worker = await open_file()
    task = held(worker, gate, durable=True, max_running_total=1, limit_by="value")
    with closing(sqlite3.connect(file, timeout=10)) as connection, connection:
        for value in "aab":
            await task.options(tx=connection).enqueue(value)
    await eventually(lambda: len(gate.started) == 2)
    await quiet()
    assert gate.inside == {"a": 1, "b": 1}


async def test_a_job_that_a_script_stores_counts_like_any_other(open_file: Open, file: Path, gate: Gate) -> None:
    await open_file(worker=False)
    script = TinyQ(file)
    task = held(script, gate, durable=True, max_running_total=1, limit_by="value")
    await asyncio.to_thread(lambda: [task.enqueue_sync(value) for value in ("a", "a", "b")])
    assert rows(file, "limit_value") == [('"a"',), ('"a"',), ('"b"',)]


# Rates


async def starts_at(q: TinyQ, durable: bool, clock: FakeClock, count: int, **options: Any) -> list[float]:
    """When so many jobs start that are enqueued now, in seconds from now."""
    began, starts = clock.now(), list[float]()

    @q.task(name="timed", durable=durable, **options)
    async def timed(value: int) -> None:
        starts.append((clock.now() - began).total_seconds())

    await q.enqueue_many([(timed, (n,)) for n in range(count)])
    while len(starts) < count:
        before = len(starts)
        await quiet()
        if len(starts) == before:
            await clock.advance(2.5)
        assert clock.now() - began < timedelta(minutes=10), starts
    return starts


async def test_a_rate_lets_a_burst_start_and_then_one_for_each_token(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    starts = await starts_at(q, durable, clock, 5, rate=Rate(2, per=10))
    assert starts == pytest.approx([0, 0, 5, 10, 15], abs=2.5)
    assert all(start >= ideal for start, ideal in zip(starts, [0, 0, 5, 10, 15], strict=True))


async def test_a_rate_with_a_burst_of_one_is_even(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    starts = await starts_at(q, durable, clock, 4, rate=Rate(2, per=10, burst=1))
    assert starts == pytest.approx([0, 5, 10, 15], abs=2.5)


async def test_the_next_token_lets_one_start_while_all_that_started_before_still_run(
    q: TinyQ, durable: bool, clock: FakeClock, gate: Gate
) -> None:
    limited = held(q, gate, durable=durable, rate=Rate(1, per=10))
    await q.enqueue_many([(limited, (n,)) for n in range(3)])
    await eventually(lambda: gate.started)
    began = clock.now()
    await eventually(lambda: len(gate.started) == 3 or clock.now() - began > timedelta(minutes=1), clock, 0.5)
    assert gate.started == [0, 1, 2]


async def test_a_rate_holds_for_each_value_apart(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    starts = await starts_at(q, durable, clock, 4, rate=Rate(1, per=3600), limit_by="value")
    assert max(starts) < 600


async def test_what_waits_for_a_rate_holds_up_no_other(q: TinyQ, durable: bool, gate: Gate) -> None:
    gate.open()
    limited = held(q, gate, durable=durable, rate=Rate(1, per=3600), priority=5)

    @q.task(durable=durable)
    async def other() -> str:
        return "ran"

    await q.enqueue_many([(limited, (n,)) for n in range(50)])
    async with asyncio.timeout(10):
        assert await (await other.enqueue()).result() == "ran"
    await quiet()
    assert gate.started == [0]


async def test_each_start_takes_a_token_a_retry_too(q: TinyQ, durable: bool, clock: FakeClock) -> None:
    starts: list[float] = []
    began = clock.now()

    @q.task(durable=durable, rate=Rate(1, per=60), retry=[1.0, 1.0])
    async def fails() -> None:
        starts.append((clock.now() - began).total_seconds())
        raise ValueError

    job = await fails.enqueue()
    await eventually(lambda: job.status is State.DEAD, clock, 0.5)
    assert len(starts) == 3
    assert starts[1] >= 60
    assert starts[2] >= 120


async def test_processes_share_one_rate(open_file: Open, clock: FakeClock, gate: Gate) -> None:
    gate.open()
    tasks = await both(open_file, gate, rate=Rate(3, per=3600))
    for n in range(10):
        await tasks[n % 2].enqueue(n)
    await eventually(lambda: len(gate.started) == 3, clock)
    await clock.advance(60)
    await quiet()
    assert len(gate.started) == 3
    clock.block(1200)
    await eventually(lambda: len(gate.started) == 4, clock)


async def test_best_effort_jobs_have_a_rate_of_their_own(open_file: Open, clock: FakeClock, gate: Gate) -> None:
    gate.open()
    task = held(await open_file(), gate, rate=Rate(2, per=3600))
    for n in range(5):
        await task.enqueue(f"best-effort {n}")
        await task.options(durable=True).enqueue(f"durable {n}")
    await eventually(lambda: len(gate.started) == 4, clock)
    await clock.advance(5)
    await quiet()
    assert sorted(gate.started) == ["best-effort 0", "best-effort 1", "durable 0", "durable 1"]


async def test_a_clock_that_is_set_back_stops_no_task_with_a_rate(q: TinyQ, durable: bool, clock: FakeClock, gate: Gate) -> None:
    gate.open()
    task = held(q, gate, durable=durable, rate=Rate(1, per=10))
    first = await task.enqueue(1)
    await done(first)
    clock.step_wall(-86_400)
    second = await task.enqueue(2)
    await eventually(lambda: second.status is State.DONE, clock, 1)
    assert clock.monotonic() < 1000 + 60


async def test_buckets_that_are_full_again_do_not_stay_in_the_file(open_file: Open, clock: FakeClock, file: Path) -> None:
    q = await open_file()

    @q.task(name="work", durable=True, rate=Rate(1, per=1), limit_by="n")
    async def work(n: int) -> None: ...

    for n in range(30):
        await q.enqueue_many([(work, (10 * n + i,)) for i in range(10)])
        async with asyncio.timeout(20):
            await q.drain()
        await clock.advance(10)
    with closing(sqlite3.connect(file, timeout=10)) as connection:
        [(buckets,)] = connection.execute("SELECT count(*) FROM tinyq_rates").fetchall()
    assert buckets < 150


# What is in the file


@pytest.fixture
async def store(file: Path) -> AsyncIterator[SQLiteStore]:
    made = SQLiteStore(str(file))
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def row(value: str, limit_value: str | None = None, **fields: Any) -> JobRow:
    others = {"payload": f'[["{value}"],{{}}]', "durable": True, "limit_value": limit_value} | fields
    return JobRow(new_id(NOW), "send", "default", 0, NOW, NOW, **others)


def room_of(total: int, by: str | None = None, slots: int = 50, names: Sequence[str] = ("send",), size: int = 1) -> Room:
    def value_of(payload: str | None, version: int) -> str:
        return str(payload)[2:].partition("]")[0] if by else ""

    terms = Terms(names=names, total=total, by=by, value_of=value_of, size=size)
    return Room(slots, {}, slots, slots, dict.fromkeys(names, False), terms=dict.fromkeys(names, terms))


async def claim_all(store: SQLiteStore, room: Room, times: int = 5, now: int = NOW) -> list[JobRow]:
    """What as many workers claim one after another."""
    claimed: list[JobRow] = []
    for n in range(times):
        claimed += (await store.claim(room, f"w{n}", now + 30 * SECOND, now)).rows
    return claimed


async def test_jobs_stored_without_a_value_among_others_count_as_well(store: SQLiteStore) -> None:
    await store.insert([row("a", ""), *(row("a") for _ in range(9)), row("a", "")], NOW)
    assert [found.limit_value for found in await claim_all(store, room_of(3))] == [""] * 3


@pytest.mark.parametrize("by", [None, "account"])
async def test_more_jobs_without_a_value_than_one_claim_gives_them_to_count_as_well(store: SQLiteStore, by: str | None) -> None:
    await store.insert([row("ab"[n % 2]) for n in range(1_700)], NOW)
    claimed = await claim_all(store, room_of(2, by), 8)
    expected = Counter({'"a"': 2, '"b"': 2}) if by else Counter({"": 2})
    assert Counter(found.limit_value for found in claimed) == expected


@pytest.mark.parametrize("by", [None, "account"])
async def test_jobs_stored_when_the_limit_went_by_something_else_count_as_it_goes_now(
    store: SQLiteStore, file: Path, by: str | None
) -> None:
    await store.insert([row(value, "" if by else f'"{value}"') for value in "abababab"], NOW)
    claimed = await claim_all(store, room_of(2, by))
    assert Counter(found.limit_value for found in claimed) == (Counter({'"a"': 2, '"b"': 2}) if by else Counter({"": 2}))


async def test_what_runs_since_a_limit_went_by_a_parameter_counts_for_the_limit_of_all(store: SQLiteStore) -> None:
    await store.insert([row(value, f'"{value}"') for value in "abc"], NOW)
    assert len(await claim_all(store, room_of(1, "account"), 1)) == 3
    await store.insert([row("d", "")], NOW)
    assert await claim_all(store, room_of(3)) == []
    assert len(await claim_all(store, room_of(4))) == 1


async def test_calls_of_several_jobs_below_the_limit_of_all_are_claimed_right_after_another(store: SQLiteStore) -> None:
    await store.insert([row("a", "") for _ in range(8)], NOW)
    room, found = room_of(3, size=2), []
    for moment in range(NOW, NOW + 4):
        claimed = await store.claim(room, "w", moment + 30 * SECOND, moment)
        found.append((len(claimed.rows), claimed.next_at and claimed.next_at - moment))
    assert found == [(2, 1), (2, 1), (2, None), (0, None)]


async def test_a_job_on_which_a_worker_has_died_gets_its_value_as_well(store: SQLiteStore, file: Path) -> None:
    await store.insert([row("a", ""), row("a"), row("a")], NOW)
    edit(file, "UPDATE tinyq_jobs SET ready = 3, lost = 1 WHERE limit_value IS NULL")
    assert [found.limit_value for found in await claim_all(store, room_of(2))] == ["", ""]


def settled(row: JobRow, state: State, **changes: Any) -> Settlement:
    fields: dict[str, Any] = {name: getattr(row, name, None) for name in Settlement.__annotations__}
    return Settlement(**(fields | {"state": state, "keep": state is State.PENDING} | changes))


@pytest.mark.parametrize("by", [None, "account"])
async def test_jobs_of_a_file_from_before_there_were_limits_count_like_any_other(
    store: SQLiteStore, file: Path, by: str | None
) -> None:
    await store.insert([row("ab"[n % 2]) for n in range(1_200)], NOW)
    edit(file, "UPDATE tinyq_jobs SET lane = 0")  # as a migration leaves them, and a hand that inserts some
    claimed = await claim_all(store, room_of(2, by), 8)
    assert Counter(found.limit_value for found in claimed) == (Counter({'"a"': 2, '"b"': 2}) if by else Counter({"": 2}))


async def test_a_lost_job_counts_until_it_is_taken_over_and_frees_its_place_once(store: SQLiteStore) -> None:
    room, lease = room_of(1), NOW + 30 * SECOND
    await store.insert([row("a", "") for _ in range(4)], NOW)
    [first] = (await store.claim(room, "stalls", lease, NOW)).rows
    lost, returns = settled(first, State.PENDING, lost=1), settled(first, State.DONE)
    for now in (NOW + 1, lease - 1, lease, lease + 1):  # not before, and not until somebody says that it is lost
        assert not (await store.claim(room, "other", now + 30 * SECOND, now)).rows
    assert await store.reclaim([lost], lease) == {}
    assert await store.reclaim([lost], lease + 1) == {first.seq: State.PENDING}
    [second] = (await store.claim(room, "other", lease + 30 * SECOND, lease + 1)).rows
    assert (second.seq, second.claim_no) == (first.seq, 2)
    assert await store.settle([returns], lease + 2) == {}
    assert await store.reclaim([lost], lease + 2) == {}
    for worker in ("third", "stalls"):
        assert not (await store.claim(room, worker, lease + 30 * SECOND, lease + 2)).rows
    assert await store.settle([settled(second, State.DONE)], lease + 3) == {first.seq: State.DONE}
    assert len((await store.claim(room, "third", lease + 30 * SECOND, lease + 3)).rows) == 1


async def test_many_values_without_room_leave_the_one_that_has_some_within_a_second(store: SQLiteStore) -> None:
    values = [f"{n}" for n in range(300)]
    await store.insert([row(value, f'"{value}"') for value in values], NOW)
    room = room_of(1, "account", slots=1_000)
    running = list[JobRow]()
    for n in range(50):
        answer = await store.claim(room, "w", NOW + 30 * SECOND, NOW + n * tinyq.LOOK_ON)
        assert answer.next_at == NOW + (n + 1) * tinyq.LOOK_ON or len(running) > 200  # it will look on by itself
        running += answer.rows
    assert len(running) == 300
    await store.insert([row(value, f'"{value}"') for value in values], NOW)
    for free in random.Random(3).sample(running, 5):
        await store.settle([settled(free, State.DONE)], NOW)
        now, claimed = NOW, list[JobRow]()
        while not claimed:
            answer = await store.claim(room, "w", now + 30 * SECOND, now)
            claimed += answer.rows
            assert answer.next_at == now + tinyq.LOOK_ON
            now += tinyq.LOOK_ON
        assert [found.limit_value for found in claimed] == [free.limit_value]
        assert now - NOW <= SECOND


async def test_limits_of_one_namespace_are_not_those_of_another(open_at: OpenAt, file: Path, gate: Gate) -> None:
    for namespace in ("one", "two"):
        q = await open_at(file, namespace=namespace)
        task = held(q, gate, durable=True, max_running_total=1, rate=Rate(1, per=3600))
        for _ in range(2):
            await task.enqueue(namespace)
    await eventually(lambda: len(gate.started) == 2)
    await quiet()
    assert gate.inside == {"one": 1, "two": 1}


# Processes that die


SPANS = [Span("w1", 0, 10), Span("w1", 5, 20), Span("w2", 10, None)]
KEPT = Evidence(SPANS, [Kill("w3", 7, 1, 1_000_000)], [1, 2, 2], limit=2, lease=1.0)


def test_the_checks_of_a_run_with_kills_find_nothing_where_nothing_is() -> None:
    assert limited.broken(KEPT, margin=1) == []
    assert limited.most_at_once(SPANS) == 2


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (KEPT._replace(spans=[*SPANS, Span("w3", 9, 11)]), "3 handlers were at work at once"),
        (KEPT._replace(claimed=[1, 3, 2]), "3 jobs were claimed at once"),
        (KEPT._replace(kills=[Kill("w3", 7, 1, None)]), "the limit was not free again in time"),
        (KEPT._replace(kills=[Kill("w3", 7, 1, 2_000_008)]), "the limit was not free again in time"),
    ],
    ids=["handlers", "claims", "never", "late"],
)
def test_the_checks_of_a_run_with_kills_find_what_went_wrong(found: Evidence, words: str) -> None:
    [case] = limited.broken(found, margin=1)
    assert words in case


def test_processes_that_are_killed_never_exceed_a_limit_and_their_share_is_free_when_their_leases_end(tmp_path: Path) -> None:
    with limited.Run(tmp_path, limited.parse(["--kills", "2", "--lease", "1.5"])) as run:
        found = run.go()
    assert limited.broken(found, run.options.margin) == [], f"seed {run.options.seed}"
    assert len(found.kills) == 2
    assert sum(kill.held for kill in found.kills) >= 1  # who is killed is chosen at random among those at work
    assert limited.most_at_once(found.spans) == max(found.claimed) == 5
