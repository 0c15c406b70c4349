"""Periodic work: when it fires, what it skips, what it has missed, and who fires it. The same with and without a database."""

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from clock import EPOCH, EarlyClock, FakeClock
from helpers import Notes, eventually, stopped_at_once

import tinyq
from tinyq import DuplicateTask, JobNotFound, ScheduleStats, TinyQ

NOON = datetime.fromisoformat("2026-01-01T12:00:00+00:00")


class Open(Protocol):
    async def __call__(self, register: Callable[[TinyQ], object], *, worker: bool = True) -> TinyQ: ...


@pytest.fixture
async def open_q(db: Path | None, clock: FakeClock) -> AsyncIterator[Open]:
    """Starts a TinyQ with what was registered; stops it afterwards, whatever still runs in it."""
    opened: list[TinyQ] = []

    async def open_q(register: Callable[[TinyQ], object], *, worker: bool = True) -> TinyQ:
        q = TinyQ(db, clock=clock, worker=worker)
        register(q)
        await q.start()
        opened.append(q)
        return q

    yield open_q
    for q in opened:
        await stopped_at_once(q, clock)


async def served(clock: FakeClock, ticks: Notes, times: int, *qs: TinyQ, each: int = 1) -> None:
    """Let so many fire times come, ten seconds apart, and each be served, and that be written, before the next comes."""
    for _ in range(times):
        wanted = ticks.ended + each
        await clock.advance(10)
        await eventually(lambda wanted=wanted: ticks.ended >= wanted, clock, 0.001)  # type: ignore[misc]
        for q in qs:
            await emptied(q)


async def emptied(q: TinyQ) -> None:
    """Return when no job is left."""
    async with asyncio.timeout(20):
        while (await q.stats()).count():  # noqa: ASYNC110 - it may be in the database, which has no event for it
            await asyncio.sleep(0.001)


async def schedule_stats(q: TinyQ) -> ScheduleStats:
    [stats] = (await q.stats()).schedules
    return stats


# When it fires: exact values. A clock that does not move while a thread works shows them for the tier without a database;
# those of the other tier follow.


async def run(clock: FakeClock, ticks: Notes, period: float, seconds: float, **options: Any) -> TinyQ:
    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long
    q.every(period, name="tick", **options)(ticks.tick)
    await q.start()
    await clock.advance(seconds)
    return q


async def test_fire_times_do_not_drift(clock: FakeClock) -> None:
    ticks = Notes(clock, 0.2)
    q = await run(clock, ticks, 1, 300)
    assert ticks.starts == [float(n) for n in range(1, 301)]
    assert ticks.fires == ticks.starts
    await stopped_at_once(q, clock)


async def test_a_fire_time_is_skipped_and_counted_while_the_last_run_is_not_over() -> None:
    clock = FakeClock("2026-01-01T11:59:58+00:00")
    ticks = Notes(clock, 3)
    q = await run(clock, ticks, 2, 12)
    assert ticks.starts == [2, 6, 10]
    stats = await schedule_stats(q)
    assert (stats.fired, stats.skipped, stats.missed) == (3, 3, 0)
    await stopped_at_once(q, clock)


@pytest.mark.parametrize(
    ("period", "offset", "start", "expected"),
    [
        (60, 0, "12:00:33", ["12:01:00", "12:02:00"]),
        (60, 10, "12:00:33", ["12:01:10", "12:02:10"]),
        (60, 70, "12:00:33", ["12:01:10", "12:02:10"]),
        (60, 0, "12:00:00", ["12:01:00", "12:02:00"]),
        (7, 0, "12:00:00", ["12:00:04", "12:00:11"]),
        (timedelta(minutes=15), timedelta(minutes=5), "12:00:33", ["12:05:00", "12:20:00"]),
        (0.25, 0, "12:00:00.1", ["12:00:00.25", "12:00:00.5"]),
        (3600, 0, "12:00:33", ["13:00:00", "14:00:00"]),
        (86_400, 7 * 3600, "12:00:33", ["2026-01-02T07:00:00", "2026-01-03T07:00:00"]),
    ],
)
async def test_fire_times_are_multiples_of_the_period_since_the_epoch_moved_by_the_offset(
    period: float | timedelta, offset: float | timedelta, start: str, expected: list[str]
) -> None:
    def moment(text: str) -> datetime:
        return datetime.fromisoformat((text if "T" in text else f"2026-01-01T{text}") + "+00:00")

    clock = FakeClock(moment(start).isoformat())
    ran: list[datetime] = []

    async def tick() -> None:
        ran.append(clock.now())

    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long
    q.every(period, offset=offset)(tick)
    await q.start()
    await clock.advance((moment(expected[-1]) - clock.now()).total_seconds())
    assert ran == [moment(text) for text in expected]
    await q.stop()


async def test_a_day_is_twenty_four_hours_over_a_clock_change() -> None:
    clock = FakeClock("2026-03-28T06:59:00+00:00")
    ran: list[str] = []

    async def tick() -> None:
        ran.append(clock.now().isoformat())

    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long
    q.every(timedelta(days=1), offset=timedelta(hours=7))(tick)
    await q.start()
    await clock.advance(2 * 86_400)
    assert ran == ["2026-03-28T07:00:00+00:00", "2026-03-29T07:00:00+00:00"]
    await q.stop()


async def test_without_immediate_the_first_run_waits_for_its_fire_time_and_with_it_it_does_not() -> None:
    clock = FakeClock("2026-01-01T12:00:33+00:00")
    plain, immediate = Notes(clock), Notes(clock)
    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long
    q.every(60, name="plain")(plain.tick)
    q.every(60, name="immediate", immediate=True)(immediate.tick)
    await q.start()
    await clock.settle()
    assert (plain.starts, immediate.starts) == ([], [0])
    await clock.advance(90)
    assert (plain.starts, immediate.starts) == ([27, 87], [0, 27, 87])
    assert immediate.fires == [-33, 27, 87]
    await q.stop()


async def test_a_loop_that_was_blocked_over_several_fire_times_runs_once_for_the_latest(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = Notes(clock)
    q = await run(clock, ticks, 1, 2.1, immediate=True)
    clock.block(5.4)
    await clock.advance(1.5)
    assert ticks.starts == [0, 1, 2, 7.5, 8, 9]
    assert ticks.fires == [0, 1, 2, 7, 8, 9]
    stats = await schedule_stats(q)
    assert (stats.fired, stats.missed, stats.skipped) == (6, 4, 0)
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert "tick" in warning.getMessage()
    assert "4" in warning.getMessage()
    await q.stop()


async def test_fire_times_missed_before_the_first_run_are_counted_too(clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = await run(clock, ticks, 1, 0.5)
    clock.block(5)
    await clock.advance(1)
    assert ticks.fires == [5, 6]
    assert (await schedule_stats(q)).missed == 4
    await q.stop()


async def test_a_suspended_machine_runs_once_within_a_minute_of_its_return_and_then_at_the_fire_times(clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = await run(clock, ticks, 3600, 60)
    clock.step_wall(8 * 3600)  # the monotonic clock stands still while a machine sleeps
    await clock.advance(60)
    assert len(ticks.starts) == 1
    assert ticks.fires == [8 * 3600]
    await clock.advance(2 * 3600)
    assert ticks.starts[1:] == ticks.fires[1:] == [9 * 3600, 10 * 3600]
    await q.stop()


async def test_an_interval_of_one_process_keeps_its_pace_when_the_wall_clock_is_set_back(clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = await run(clock, ticks, 10, 35)
    clock.step_wall(-3600)
    await clock.advance(60)
    assert ticks.fires == [10, 20, 30, *(n - 3600 for n in (40, 50, 60, 70, 80, 90))]
    await q.stop()


async def test_a_clock_that_steps_back_a_little_before_each_fire_time_repeats_none(clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = await run(clock, ticks, 10, 0)
    for _ in range(40):
        await clock.advance(2.5)
        clock.step_wall(-0.5)
    assert ticks.fires == [10 * n for n in range(1, len(ticks.fires) + 1)]
    assert len(ticks.fires) == 8
    await q.stop()


async def test_an_added_schedule_with_a_nearer_time_is_not_kept_waiting(clock: FakeClock) -> None:
    slow, fast = Notes(clock), Notes(clock)
    q = await run(clock, slow, 3600, 1)
    q.every(2, name="fast")(fast.tick)
    await clock.advance(5)
    assert fast.starts == [2, 4, 6]
    await q.stop()


BRIEFLY = 1 / 512  # seconds, which add up exactly: two milliseconds


@pytest.fixture
async def early() -> AsyncIterator[tuple[EarlyClock, Notes, TinyQ]]:
    """One slot, and a schedule shortly before its fire time, for which its scheduler has got ready."""
    clock = EarlyClock()
    notes = Notes(clock)
    q = TinyQ(clock=clock, behind_after=math.inf, concurrency=1)
    q.every(10, name="tick")(notes.tick)
    await q.start()
    await clock.advance(10 - BRIEFLY)
    yield clock, notes, q
    await stopped_at_once(q, clock)


def tasks_of(name: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == name]


async def test_a_run_has_its_task_before_the_fire_time_and_begins_at_it(early: tuple[EarlyClock, Notes, TinyQ]) -> None:
    clock, notes, q = early
    assert len(tasks_of("tinyq tick")) == 1
    assert (notes.starts, (await schedule_stats(q)).fired, (await q.stats()).count()) == ([], 0, 0)
    await clock.advance(BRIEFLY)
    assert notes.starts == [10]
    await clock.advance(25)
    assert notes.starts == [10, 20, 30]
    stats = await schedule_stats(q)
    assert (stats.fired, stats.skipped, stats.missed, stats.next) == (3, 0, 0, NOON + timedelta(seconds=40))
    assert tasks_of("tinyq tick") == []


async def test_what_is_paused_shortly_before_its_fire_time_does_not_run(early: tuple[EarlyClock, Notes, TinyQ]) -> None:
    clock, notes, q = early
    [schedule] = await q.schedules()
    await schedule.pause()
    await clock.advance(5)
    assert notes.starts == []
    await schedule.resume()
    await clock.advance(5 + BRIEFLY)
    assert notes.starts == [20]


async def test_what_is_removed_shortly_before_its_fire_time_does_not_run(early: tuple[EarlyClock, Notes, TinyQ]) -> None:
    clock, notes, q = early
    [schedule] = await q.schedules()
    await schedule.remove()
    await clock.advance(15)
    assert notes.starts == []
    assert tasks_of("tinyq tick") == []


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_schedule_that_has_been_removed_cannot_be_paused_or_resumed_by_a_handle_of_before(
    early: tuple[EarlyClock, Notes, TinyQ], verb: str
) -> None:
    _, _, q = early
    [schedule], [other] = await q.schedules(), await q.schedules()
    await schedule.remove()
    for handle in (schedule, other):
        with pytest.raises(JobNotFound, match="schedule tick has been removed"):
            await getattr(handle, verb)()


async def test_a_job_that_takes_the_slot_shortly_before_a_fire_time_is_waited_for(
    early: tuple[EarlyClock, Notes, TinyQ],
) -> None:
    clock, notes, q = early
    gate = asyncio.Event()

    async def other() -> None:
        await gate.wait()

    job = await q.enqueue(q.task(other))
    await clock.advance(1)
    assert notes.starts == []
    gate.set()
    await job.result()
    await clock.settle()
    assert len(notes.starts) == 1


async def test_a_stop_shortly_before_a_fire_time_runs_nothing_and_leaves_nothing(
    early: tuple[EarlyClock, Notes, TinyQ],
) -> None:
    clock, notes, q = early
    await stopped_at_once(q, clock)
    assert (notes.starts, tasks_of("tinyq tick")) == ([], [])


async def test_a_schedule_added_shortly_before_a_fire_time_waits_for_none(early: tuple[EarlyClock, Notes, TinyQ]) -> None:
    clock, notes, q = early
    ran: list[datetime] = []

    async def other() -> None:
        ran.append(clock.now())

    q.every(10.0, offset=9.9995)(other)
    await clock.advance(BRIEFLY)
    assert ran == [NOON + timedelta(seconds=9.9995)]
    assert notes.starts == [10]


async def test_a_task_that_others_cancel_before_its_fire_time_costs_no_run(early: tuple[EarlyClock, Notes, TinyQ]) -> None:
    clock, notes, _ = early
    [task] = tasks_of("tinyq tick")
    task.cancel()
    await clock.advance(0.002)
    assert len(notes.starts) == 1


async def test_a_task_that_others_cancel_before_it_begins_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    create, cancelled = asyncio.create_task, list[str]()

    def create_task(run: Any, **options: Any) -> asyncio.Task[Any]:
        task = create(run, **options)
        if options.get("name") == "tinyq tick" and not cancelled:
            cancelled.append("tinyq tick")
            task.cancel()
        return task

    monkeypatch.setattr(asyncio, "create_task", create_task)
    clock = EarlyClock()
    notes = Notes(clock)
    q = await run(clock, notes, 10, 25)
    assert (cancelled, notes.starts) == (["tinyq tick"], [10, 20])
    await q.stop()


async def test_several_schedules_of_one_fire_time_all_begin_at_it() -> None:
    clock = EarlyClock()
    ran: list[tuple[datetime, int]] = []
    q = TinyQ(clock=clock, behind_after=math.inf)

    async def note(number: int) -> None:
        ran.append((clock.now(), number))

    for number in range(3):
        q.every(10, name=str(number))(functools.partial(note, number))
    await q.start()
    await clock.advance(10)
    assert sorted(ran) == [(NOON + timedelta(seconds=10), number) for number in range(3)]
    await q.stop()


async def test_a_clock_that_stands_still_before_a_fire_time_keeps_no_task_turning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = EarlyClock()
    monkeypatch.setattr(clock, "overdue", 0.0)
    notes = Notes(clock)
    q = await run(clock, notes, 10, 10 - BRIEFLY)
    await eventually(lambda: not tasks_of("tinyq tick"))
    assert notes.starts == []
    await clock.advance(BRIEFLY)
    assert notes.starts == [10]
    await q.stop()


async def test_many_schedules_keep_their_own_time(clock: FakeClock) -> None:
    q = TinyQ(clock=clock)
    ticks = {period: Notes(clock) for period in (2, 3, 5, 7)}
    for period, tick in ticks.items():
        q.every(period, name=str(period), offset=-(NOON - EPOCH).total_seconds() % period)(tick.tick)
    await q.start()
    await clock.advance(210)
    for period, tick in ticks.items():
        assert len(tick.starts) == 210 // period
        assert tick.starts == tick.fires
    await q.stop()


# In both tiers


async def test_each_fire_time_fires_once_and_its_job_sees_it(open_q: Open, clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = await open_q(lambda q: q.every(10, name="tick")(ticks.tick))
    await served(clock, ticks, 5, q)
    assert ticks.fires == [10, 20, 30, 40, 50]
    assert all(0 <= start - fire_time < 10 for start, fire_time in zip(ticks.starts, ticks.fires, strict=True))
    stats = await schedule_stats(q)
    assert stats == ScheduleStats(
        name="tick", fired=5, skipped=0, missed=0, last=NOON + timedelta(seconds=50), next=NOON + timedelta(seconds=60)
    )


async def test_the_stats_of_a_schedule_that_has_not_fired_say_when_it_will(open_q: Open, clock: FakeClock) -> None:
    q = await open_q(lambda q: q.every(3600, name="tick")(Notes(clock).tick))
    assert await schedule_stats(q) == ScheduleStats(
        name="tick", fired=0, skipped=0, missed=0, last=None, next=NOON + timedelta(hours=1)
    )


async def test_a_run_that_is_not_over_means_that_fire_times_are_skipped(open_q: Open, clock: FakeClock) -> None:
    may_end = asyncio.Event()
    starts: list[datetime | None] = []

    async def tick() -> None:
        starts.append(tinyq.current_job().fire_time)
        await may_end.wait()

    q = await open_q(lambda q: q.every(10, name="tick", timeout=3600)(tick))
    await eventually(lambda: starts, clock, 1)
    skipped = 0
    async with asyncio.timeout(20):
        while skipped < 3:
            await clock.advance(1)
            await asyncio.sleep(0.001)
            skipped = (await schedule_stats(q)).skipped
    assert len(starts) == 1
    may_end.set()
    await eventually(lambda: len(starts) == 2, clock, 1)
    assert (await schedule_stats(q)).fired == 2


async def test_a_late_loop_runs_once_for_the_latest_fire_time(open_q: Open, clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = await open_q(lambda q: q.every(10, name="tick")(ticks.tick))
    await served(clock, ticks, 1, q)
    clock.block(45)
    await eventually(lambda: ticks.ended == 2, clock, 0.001)
    await eventually(lambda: ticks.ended == 3, clock, 0.1)
    assert ticks.fires == [10, 50, 60]
    stats = await schedule_stats(q)
    assert (stats.fired, stats.missed, stats.skipped) == (3, 3, 0)


async def test_a_schedule_that_fails_is_logged_each_time_and_goes_on(
    open_q: Open, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    ran = 0

    async def tick() -> None:
        nonlocal ran
        ran += 1
        if ran in (2, 3):
            raise ConnectionError("down")

    await open_q(lambda q: q.every(10, name="refresh")(tick))
    await eventually(lambda: ran == 4, clock, 1)

    def errors() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno == logging.ERROR]

    await eventually(lambda: len(errors()) == 2)
    for record in errors():
        assert "refresh" in record.getMessage()
        assert record.exc_info is not None


async def test_a_schedule_is_retried_only_if_it_asks_for_that(open_q: Open, clock: FakeClock) -> None:
    attempts: list[int] = []

    async def tick() -> None:
        attempts.append(tinyq.current_job().attempt)
        raise ConnectionError

    await open_q(lambda q: q.every(600, offset=5, name="tick", retry=[1, 1])(tick))
    await eventually(lambda: len(attempts) == 3, clock, 0.5)
    assert attempts == [1, 2, 3]


async def test_a_plain_function_can_be_a_schedule(open_q: Open, clock: FakeClock) -> None:
    fire_times: list[datetime | None] = []

    def tick() -> None:
        fire_times.append(tinyq.current_job().fire_time)

    await open_q(lambda q: q.every(10)(tick))
    await eventually(lambda: fire_times, clock, 1)
    assert fire_times[0] == NOON + timedelta(seconds=10)


async def test_start_returns_at_once_whatever_the_first_run_does(open_q: Open, clock: FakeClock) -> None:
    ran: list[str] = []

    async def sleeps() -> None:
        ran.append("sleeps")
        await clock.wait(asyncio.Event(), 3600)

    async def fails() -> None:
        ran.append("fails")
        raise ConnectionError

    def register(q: TinyQ) -> None:
        for handler in (sleeps, fails):
            q.every(60, immediate=True)(handler)

    await asyncio.wait_for(open_q(register), 20)  # the clock stands still
    await eventually(lambda: sorted(ran) == ["fails", "sleeps"])


async def test_a_scheduled_function_is_a_task_too(open_q: Open, clock: FakeClock) -> None:
    fire_times: list[datetime | None] = []

    async def tick() -> None:
        fire_times.append(tinyq.current_job().fire_time)

    q = await open_q(lambda q: None)
    task = q.every(3600, name="tick")(tick)
    assert task.name == "tick"
    await (await task.enqueue()).result(timeout=20)
    await (await q.enqueue("tick")).result(timeout=20)
    assert fire_times == [None, None]


async def test_every_works_as_decorator_and_as_a_call(open_q: Open, clock: FakeClock) -> None:
    ran: list[str] = []
    q = await open_q(lambda q: None)

    @q.every(10)
    async def decorated() -> None:
        ran.append("decorated")

    async def called() -> None:
        ran.append("called")

    q.every(10)(called)
    q.every(10, name="partial")(functools.partial(ran.append, "partial"))
    await eventually(lambda: len(ran) == 3, clock, 1)
    assert sorted(ran) == ["called", "decorated", "partial"]


async def test_a_schedule_starts_again_with_its_tinyq_and_fires_once_a_fire_time(
    db: Path | None, durable: bool, clock: FakeClock
) -> None:
    ticks = Notes(clock)
    q = TinyQ(db, clock=clock)
    q.every(10, name="tick")(ticks.tick)
    for _ in range(3):
        await q.start()
        await served(clock, ticks, 2, q)
        await q.stop()
    assert ticks.fires == [10, 20, 30, 40, 50, 60]


# With a database: once for all processes


async def two(file: Path, clock: FakeClock, ticks: Notes, **options: Any) -> list[TinyQ]:
    both = [TinyQ(file, clock=clock), TinyQ(file, clock=clock)]
    for q in both:
        q.every(10, name="tick", **options)(ticks.tick)
        await q.start()
    return both


async def test_of_two_processes_exactly_one_runs_each_fire_time(file: Path, clock: FakeClock) -> None:
    ticks = Notes(clock)
    both = await two(file, clock, ticks)
    await served(clock, ticks, 10, *both)
    assert ticks.fires == [10 * n for n in range(1, 11)]
    assert sum([(await schedule_stats(q)).fired for q in both]) == 10
    for q in both:
        await q.stop()


async def test_an_immediate_run_happens_once_for_all_processes_and_not_again_after_a_restart(
    file: Path, clock: FakeClock
) -> None:
    ticks = Notes(clock)
    both = await two(file, clock, ticks, immediate=True)
    await eventually(lambda: ticks.ended == 1)
    for q in both:
        await q.stop()
    for q in both:
        await q.start()
    await eventually(lambda: ticks.ended == 2, clock, 1)
    for q in both:
        await q.stop()
    assert ticks.fires[0] == 0 < ticks.fires[1]


async def test_per_process_means_that_each_process_runs_its_own(file: Path, clock: FakeClock) -> None:
    ticks = Notes(clock)
    both = await two(file, clock, ticks, per_process=True)
    await served(clock, ticks, 5, *both, each=2)
    assert ticks.fires == [10, 10, 20, 20, 30, 30, 40, 40, 50, 50]
    for q in both:
        assert (await q.stats()).count() == 0
        await q.stop()


async def test_a_run_in_one_process_makes_the_other_skip(file: Path, clock: FakeClock) -> None:
    ticks = Notes(clock, 25)
    both = await two(file, clock, ticks)
    await eventually(lambda: ticks.ended == 2, clock, 0.5)
    for q in both:
        await stopped_at_once(q, clock)
    assert all(later - earlier >= 25 for earlier, later in zip(ticks.starts, ticks.starts[1:], strict=False))
    assert ticks.fires[0] == 10
    assert ticks.fires[1] >= 40


async def test_a_process_that_does_not_work_fires_its_own_schedules_only(file: Path, clock: FakeClock) -> None:
    shared, own = Notes(clock), Notes(clock)
    q = TinyQ(file, clock=clock, worker=False)
    q.every(10, name="shared")(shared.tick)
    q.every(10, name="own", per_process=True)(own.tick)
    await q.start()
    await served(clock, own, 3, q)
    assert shared.starts == []
    assert (await q.stats()).count() == 0
    await q.stop()


async def test_a_clock_that_was_set_back_between_two_starts_repeats_no_fire_time(file: Path, clock: FakeClock) -> None:
    ticks = Notes(clock)
    q = TinyQ(file, clock=clock)
    q.every(10, name="tick")(ticks.tick)
    await q.start()
    await served(clock, ticks, 3, q)
    await q.stop()
    clock.step_wall(-25)
    await q.start()
    await eventually(lambda: ticks.ended == 5, clock, 1)
    await q.stop()
    assert ticks.fires[:3] == [10, 20, 30]
    assert 30 < ticks.fires[3] < ticks.fires[4]


async def test_schedules_of_services_that_share_a_file_fire_each(file: Path, clock: FakeClock) -> None:
    a, b = Notes(clock), Notes(clock)
    both = [TinyQ(file, clock=clock), TinyQ(file, clock=clock)]
    for q, name, ticks in zip(both, "ab", (a, b), strict=True):
        q.every(10, name=name)(ticks.tick)
        await q.start()
    for n in (1, 2, 3):
        await clock.advance(10)
        await eventually(lambda n=n: a.ended == b.ended == n, clock, 0.001)  # type: ignore[misc]
        await emptied(both[0])
    for q in both:
        await q.stop()
    assert a.fires == b.fires == [10, 20, 30]


# What is refused


@pytest.mark.parametrize("period", [0, -1, 1e-9, float("nan"), float("inf"), timedelta(0), "60", None, True])
def test_a_period_that_makes_no_sense_is_refused(period: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="every"):
        TinyQ().every(period)


def test_a_handler_that_needs_arguments_is_refused() -> None:
    def needs_one(x: int) -> None: ...

    def needs_a_keyword(*, x: int) -> None: ...

    class Needs:
        def method(self, x: int) -> None: ...

    q = TinyQ()
    for handler in (needs_one, needs_a_keyword, Needs().method, functools.partial(lambda x, y: None, 1)):
        with pytest.raises(TypeError, match="arguments"):
            q.every(60)(handler)
    with pytest.raises(TypeError):
        q.every(60)("not callable")  # type: ignore[call-overload]
    assert q._handlers == {}


def test_a_handler_whose_arguments_all_have_defaults_is_accepted() -> None:
    def has_defaults(x: int = 1, *args: int, y: int = 2, **kwargs: int) -> None: ...

    assert TinyQ().every(60)(has_defaults).fn is has_defaults


def test_two_schedules_of_one_name_are_refused() -> None:
    q = TinyQ()
    q.every(60, name="tick")(asyncio.Event().wait)
    with pytest.raises(DuplicateTask, match="tick"):
        q.every(30, name="tick")(asyncio.Event().wait)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": "sometimes"}, {"immediate": 1}, {"per_process": "no"}, {"offset": -1}, {"prioritty": 1}, {"timeout": 0},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_a_schedule_cannot_have_is_refused(options: dict[str, Any]) -> None:
    async def tick() -> None: ...

    with pytest.raises((TypeError, ValueError)):
        TinyQ().every(60, **options)(tick)


async def test_durable_key_and_run_at_are_for_calls_by_hand_and_not_for_the_schedule(clock: FakeClock) -> None:
    ran = asyncio.Event()
    q = TinyQ(clock=clock)

    @q.every(60, durable=True, key="k", run_at=clock.now() + timedelta(days=1))
    async def tick() -> None:
        ran.set()

    async with q:
        await clock.advance(60)
        assert ran.is_set()
        with pytest.raises(tinyq.ConfigurationError, match="durable"):
            await tick.enqueue()
