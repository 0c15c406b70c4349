"""Schedules under what can happen to them: clocks that are set, daylight saving, definitions that change, crashes in a fire."""

import asyncio
import logging
import math
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import datetime
from pathlib import Path

import pytest
from clock import FakeClock
from conftest import OpenAt
from fastapi import Depends
from helpers import Notes, Open, eventually, rows, stats_of, stopped_at_once

import tinyq
from tinyq import Cancel, Snooze, TinyQ


async def pass_time(q: TinyQ, clock: FakeClock, seconds: float, step: float) -> None:
    """Let time pass in steps; what comes due with one is over before the next."""
    for _ in range(round(seconds / step)):
        await clock.advance(step)
        await settled(q, clock)


async def settled(q: TinyQ, clock: FakeClock) -> None:
    """What is due has been fired, and has run."""
    engine = q._engine
    assert engine is not None
    async with asyncio.timeout(20):
        while True:
            fired = not any(scheduler.is_busy(clock.time()) for scheduler in engine.schedulers.values())
            counts = (await q.stats()).counts
            if fired and not any(count.due or count.state == "running" for count in counts):
                return
            if not fired:
                await clock.advance(0.1)  # the wall may have been set while it slept
            await asyncio.sleep(0.001)


# Clocks that are set


@pytest.mark.parametrize("seconds", [1, 59 * 60, 3 * 3600, 86_400])
@pytest.mark.parametrize("kind", ["every", "cron"])
async def test_a_clock_set_forward_makes_up_for_the_latest_fire_time_and_goes_on(
    q: TinyQ, notes: Notes, clock: FakeClock, seconds: float, kind: str
) -> None:
    if kind == "every":
        q.every(60, name="tick")(notes.tick)
    else:
        q.cron("* * * * *", name="tick")(notes.tick)
    await pass_time(q, clock, 90, 30)
    began = clock.now()
    clock.step_wall(seconds)
    await pass_time(q, clock, 180, 30)
    made = notes.after(began)[1:]
    assert len(set(notes.fires)) == len(notes.fires)
    assert made == sorted(made) and 3 <= len(made) <= 4
    assert made[-1] >= seconds + 120


@pytest.mark.parametrize("seconds", [1, 59 * 60, 3 * 3600, 86_400])
@pytest.mark.parametrize("kind", ["every", "cron"])
async def test_a_clock_set_back_repeats_no_fire_time(
    q: TinyQ, notes: Notes, clock: FakeClock, seconds: float, kind: str, durable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "every":
        q.every(60, name="tick")(notes.tick)
    else:
        q.cron("* * * * *", name="tick")(notes.tick)
    await pass_time(q, clock, 90, 30)
    began = clock.now()
    clock.step_wall(-seconds)
    await pass_time(q, clock, 180, 30)
    keeps_pace = kind == "every" and not durable
    fires = notes.after(began)
    assert len(set(fires)) == len(fires)
    assert len(fires) == (4 if keeps_pace or seconds == 1 else 1)
    told = [line for line in caplog.messages if "set back" in line]
    assert len(told) == (seconds > 60 and not keeps_pace)
    clock.step_wall(seconds)
    await pass_time(q, clock, 120, 30)
    fires = notes.after(began)
    assert len(set(fires)) == len(fires)
    assert fires[-1] > 200


@pytest.mark.parametrize(
    ("expression", "start", "hours", "expected"),
    [
        ("30 2 * * *", "2026-03-28T12:00", 48, ["29T01:00", "30T00:30"]),
        ("*/30 2 * * *", "2026-03-28T12:00", 48, ["30T00:00", "30T00:30"]),
        ("30 * * * *", "2026-03-28T23:40", 3, ["29T00:30", "29T01:30", "29T02:30"]),
        ("30 2 * * *", "2026-10-24T12:00", 48, ["25T00:30", "26T01:30"]),
        ("*/30 2 * * *", "2026-10-24T12:00", 24, ["25T00:00", "25T00:30", "25T01:00", "25T01:30"]),
        ("30 * * * *", "2026-10-24T23:40", 3, ["25T00:30", "25T01:30", "25T02:30"]),
    ],
)
async def test_a_process_that_runs_through_a_change_of_the_clocks_fires_as_the_rule_says(
    expression: str, start: str, hours: int, expected: list[str]
) -> None:
    clock = FakeClock(f"{start}:00+00:00")
    notes = Notes(clock)
    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long
    q.cron(expression, tz="Europe/Berlin", name="tick")(notes.tick)
    await q.start()
    await clock.advance(hours * 3600)
    assert [f"{fire:%dT%H:%M}" for fire in notes.moments] == expected
    assert stats_of(q).missed == 0
    await q.stop()


@pytest.mark.parametrize(("early", "late"), [(0.02, 0.0), (0.0, 1.5), (0.02, 1.5)])
async def test_timers_that_wake_early_or_late_lose_and_repeat_nothing(early: float, late: float) -> None:
    class Shaky(FakeClock):
        async def wait(self, wake: asyncio.Event, seconds: float) -> None:
            await super().wait(wake, seconds - early if seconds > 0.1 else seconds + late)

    clock = Shaky()
    notes = Notes(clock)
    began = clock.now()
    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long
    q.every(10, name="tick")(notes.tick)
    await q.start()
    await clock.advance(101.9)
    assert notes.after(began) == [10 * n for n in range(1, 11)]
    assert stats_of(q).missed == 0
    await q.stop()


async def test_a_cron_schedule_that_was_down_over_its_time_runs_once_afterwards_if_that_is_not_too_late(file: Path) -> None:
    for up_again, fires in (("03:10", ["03:00"]), ("14:00", [])):
        clock = FakeClock("2026-01-01T02:50:00+00:00")
        notes = Notes(clock)
        path = file.with_name(up_again.replace(":", ""))
        for moment in ("02:50", up_again):
            clock.block((datetime.fromisoformat(f"2026-01-01T{moment}:00+00:00") - clock.now()).total_seconds())
            q = TinyQ(path, clock=clock)
            q.cron("0 3 * * *", name="tick")(notes.tick)
            await q.start()
            await eventually(lambda q=q: not q._engine.schedulers[True]._new)  # type: ignore[misc]
            await settled(q, clock)
            await q.stop()
        assert [f"{fire:%H:%M}" for fire in notes.moments] == fires
        assert stats_of(q).missed == (not fires)
        assert stats_of(q).next == datetime.fromisoformat("2026-01-02T03:00:00+00:00")


# Overlap, retries, signals


async def test_a_run_by_hand_that_ends_first_does_not_hide_the_one_that_still_runs(
    q: TinyQ, notes: Notes, clock: FakeClock
) -> None:
    q.every(10, name="tick", timeout=3600)(notes.tick)
    notes.seconds = 1000
    await eventually(lambda: len(notes.fires) == 1, clock, 1)
    notes.seconds = 0
    await (await (await q.schedules())[0].run_now()).result(20)
    await eventually(lambda: stats_of(q).skipped >= 2, clock, 1)
    assert len(notes.fires) == 2


async def test_a_run_by_hand_that_still_runs_makes_fire_times_wait(q: TinyQ, notes: Notes, clock: FakeClock) -> None:
    q.every(10, name="tick", timeout=3600)(notes.tick)
    notes.seconds = 1000
    job = await (await q.schedules())[0].run_now()
    await eventually(lambda: stats_of(q).skipped >= 2, clock, 1)
    assert len(notes.fires) == 1
    assert job.status == "running"


async def test_allowed_beside_each_other_every_run_that_waits_for_its_retry_is_given_up(
    q: TinyQ, notes: Notes, clock: FakeClock
) -> None:
    q.every(60, name="tick", overlap="allow", retry=[600, 600], timeout=3600)(notes.tick)
    notes.seconds, notes.error = 70, ValueError("down")
    await eventually(lambda: len(notes.fires) == 1, clock, 1)
    notes.seconds, notes.error = 0, None
    await eventually(lambda: len(notes.fires) == 2, clock, 1)  # ends before the first one, which fails and waits
    await eventually(lambda: len(notes.fires) == 5, clock, 1)
    assert notes.attempts == [1] * 5
    assert stats_of(q).superseded == 1


@pytest.mark.parametrize("error", [Cancel("not today"), ValueError("down"), SystemExit(3)])
async def test_whatever_a_run_ends_with_the_next_fire_time_comes(
    q: TinyQ, notes: Notes, clock: FakeClock, error: BaseException
) -> None:
    dead: list[str] = []
    q.on_dead(lambda job: dead.append(job.task))
    q.every(10, name="tick")(notes.tick)
    notes.error = error
    await pass_time(q, clock, 30, 5)
    assert len(notes.fires) == 3
    if not isinstance(error, Cancel):
        await eventually(lambda: dead == ["tick"] * 3)


async def test_a_snoozed_run_comes_back_for_its_fire_time_and_others_are_skipped_until_then(
    q: TinyQ, notes: Notes, clock: FakeClock
) -> None:
    q.every(10, name="tick")(notes.tick)
    notes.error = Snooze(25)
    began = clock.now()
    await pass_time(q, clock, 10, 5)
    notes.error = None
    await pass_time(q, clock, 30, 5)
    assert notes.after(began)[:2] == [10, 10]
    assert stats_of(q).skipped >= 2


async def test_paused_and_resumed_while_it_runs_it_leaves_that_run_alone(q: TinyQ, notes: Notes, clock: FakeClock) -> None:
    q.every(10, name="tick")(notes.tick)
    notes.seconds = 3
    [schedule] = await q.schedules()
    await eventually(lambda: len(notes.fires) == 1, clock, 1)
    await schedule.pause()
    assert schedule.stats.paused and schedule.stats.next is None
    await schedule.pause()
    await schedule.resume()
    await schedule.resume()
    assert not schedule.stats.paused and schedule.stats.next is not None
    await eventually(lambda: len(notes.fires) >= 3, clock, 1)
    assert len(set(notes.fires)) == len(notes.fires)
    assert notes.most == 1


async def test_it_may_be_removed_from_its_own_handler_and_twice(q: TinyQ, clock: FakeClock) -> None:
    ran: list[int] = []

    @q.every(10, name="tick")
    async def tick() -> None:
        ran.append(1)
        [schedule] = await q.schedules("tick")
        await schedule.remove()
        await schedule.remove()

    await pass_time(q, clock, 40, 5)
    assert ran == [1]
    assert await q.schedules() == []


# Definitions


async def test_a_changed_definition_does_not_fire_at_once_though_it_is_immediate(clock: FakeClock, db: Path | None) -> None:
    if db is None:
        return  # there is no record that could outlive a process
    fires: list[list[datetime]] = []
    for period in (3600, 1800, 1800):
        notes = Notes(clock)
        q = TinyQ(db, clock=clock)
        q.every(period, name="tick", immediate=True)(notes.tick)
        await q.start()
        await eventually(lambda q=q: not q._engine.schedulers[True]._new)  # type: ignore[misc]
        await settled(q, clock)
        await q.stop()
        fires.append(notes.moments)
        clock.block(1900 if period == 3600 else 60)
    assert [len(some) for some in fires] == [1, 0, 0]


async def test_a_process_that_comes_back_with_the_older_definition_has_the_newest_one(
    clock: FakeClock, file: Path, open_at: OpenAt
) -> None:
    async def start(period: float) -> tuple[TinyQ, Notes]:
        notes = Notes(clock)
        q = TinyQ(file, clock=clock)
        q.every(period, name="tick")(notes.tick)
        await q.start()
        await eventually(lambda: not q._engine.schedulers[True]._new)  # type: ignore[union-attr]
        return q, notes

    first, _ = await start(10)
    second, _ = await start(15)
    await first.stop()
    third, _ = await start(10)
    await eventually(lambda: stats_of(second).next is None, clock, 1)
    await eventually(lambda: stats_of(third).fired >= 2, clock, 1)
    for q in (second, third):
        await stopped_at_once(q, clock)


def test_a_grace_of_nothing_is_refused_since_no_fire_time_could_be_met() -> None:
    with pytest.raises(ValueError, match="misfire_grace is 0: it must be greater than zero"):
        TinyQ().every(60, misfire_grace=0)


async def test_the_next_fire_times_end_where_time_does(q: TinyQ) -> None:
    q.every(9e9, name="rare")(asyncio.Event().wait)
    fires = (await q.schedules())[0].next_fires(100)
    assert 20 < len(fires) < 40
    assert fires == sorted(set(fires)) and fires[-1].year < 10_000


async def test_a_plain_handler_may_add_a_schedule_from_its_thread(q: TinyQ, notes: Notes, clock: FakeClock) -> None:
    asyncio.get_running_loop().set_debug(True)  # what is not meant for threads says so

    def adds() -> None:
        q.every(10, name="tick")(notes.tick)

    q.task(name="adds")(adds)
    await (await q.enqueue("adds")).result(20)
    await eventually(lambda: len(notes.fires) == 1, clock, 1)


async def test_a_handler_may_add_a_schedule(q: TinyQ, notes: Notes, clock: FakeClock) -> None:
    @q.task(name="adds")
    async def adds() -> None:
        q.every(10, name="tick")(notes.tick)

    await (await q.enqueue("adds")).result(20)
    await eventually(lambda: len(notes.fires) == 2, clock, 1)


@pytest.mark.parametrize("name", ["n" * 255, "Müller & Söhne; DROP TABLE tinyq_jobs; --", "🎈\u21bb 7", "%s %d {x}"])
async def test_a_name_is_any_text(q: TinyQ, notes: Notes, clock: FakeClock, name: str) -> None:
    q.every(10, name=name)(notes.tick)
    q.every(10, name=f"{name[:200]}2", overlap="queue")(notes.tick)
    await eventually(lambda: len(notes.fires) == 4, clock, 1)
    [schedule] = await q.schedules(name)
    await schedule.pause()
    assert schedule.stats.paused
    await schedule.remove()


async def test_a_thousand_schedules_come_and_go(q: TinyQ, clock: FakeClock) -> None:
    for n in range(1_000):
        q.every(3600, name=f"s{n}")(lambda: None)
    await eventually(lambda: not any(s._new for s in q._engine.schedulers.values()), clock, 0)  # type: ignore[union-attr]
    await asyncio.gather(*(schedule.remove() for schedule in await q.schedules()))
    assert await q.schedules() == []
    assert (await q.stats()).schedules == ()
    q.every(7200, name="last")(lambda: None)
    assert len(await q.schedules()) == 1


async def test_a_schedule_runs_in_a_process_and_with_what_it_depends_on(q: TinyQ, clock: FakeClock) -> None:
    given: list[int] = []

    def number() -> int:
        return 7

    async def tick(n: int = Depends(number)) -> None:
        given.append(n)

    q.every(10, name="depends")(tick)
    q.every(10, name="process", run_in="process")(os.getpid)
    await eventually(lambda: given, clock, 1)
    assert given[0] == 7
    await eventually(lambda: all(s.stats().fired for s in q._schedules), clock, 0.1)


async def test_a_schedule_in_a_queue_without_slots_is_not_fired_without_a_database(clock: FakeClock, open_at: OpenAt) -> None:
    q = await open_at(None, queues={"idle": 0})
    q.every(10, name="tick", queue="idle")(lambda: None)
    await clock.advance(60)
    assert stats_of(q).fired == 0 and stats_of(q).next is None
    [schedule] = await q.schedules()
    assert len(schedule.next_fires(3)) == 3
    with pytest.raises(tinyq.ConfigurationError, match="0 slots"):
        await schedule.run_now()


async def test_in_one_namespace_a_schedule_knows_nothing_of_its_twin_in_another(
    clock: FakeClock, open_at: OpenAt, file: Path
) -> None:
    both = [await open_at(file, namespace=name) for name in ("one", "two")]
    all_notes = [Notes(clock), Notes(clock)]
    for q, notes in zip(both, all_notes, strict=True):
        q.every(10, name="tick")(notes.tick)
    await eventually(lambda: all(notes.fires for notes in all_notes), clock, 1)
    await (await both[0].schedules())[0].pause()
    seen = len(all_notes[1].fires)
    await eventually(lambda: len(all_notes[1].fires) > seen, clock, 1)


# A crash in the middle of a fire


async def test_a_fire_time_whose_job_could_not_be_stored_is_not_recorded_and_fires_later(
    open_file: Open, notes: Notes, clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file()
    q.every(600, name="tick")(notes.tick)
    await eventually(lambda: not q._engine.schedulers[True]._new)  # type: ignore[union-attr]
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("CREATE TRIGGER bad BEFORE INSERT ON tinyq_jobs BEGIN SELECT raise(ABORT, 'no room'); END")
        before = db.execute("SELECT last_fire FROM tinyq_schedules").fetchall()
        with caplog.at_level(logging.ERROR, "tinyq"):
            await eventually(lambda: "durable schedules" in q._engine.incidents, clock, 10)  # type: ignore[union-attr]
        await clock.advance(20)
        assert db.execute("SELECT last_fire FROM tinyq_schedules").fetchall() == before
        db.execute("DROP TRIGGER bad")
    began = clock.now()
    await eventually(lambda: notes.fires, clock, 1)
    assert len(notes.fires) == 1 and notes.moments[0] <= began
    assert len([line for line in caplog.messages if "no room" in line]) == 1


DIES = """
import asyncio, os, signal, sys, tinyq

def die(row):
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with tinyq.TinyQ(sys.argv[1]) as q:
        tinyq.as_values = die  # which is called between the record of the fire time and the job
        q.every(9e9, name="tick", immediate=True)(print)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_process_killed_between_the_record_of_a_fire_time_and_its_job_has_recorded_nothing(file: Path) -> None:
    dead = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", DIES, str(file)], timeout=60)
    assert dead.returncode == -signal.SIGKILL
    assert rows(file, "seq") == []
    ran = asyncio.Event()
    q = TinyQ(file)
    q.every(9e9, name="tick", immediate=True)(ran.set)
    async with q:
        await asyncio.wait_for(ran.wait(), 20)


# The test kit


def test_a_cron_schedule_and_a_recurring_job_run_as_the_kit_lets_time_pass() -> None:
    clock = FakeClock("2026-03-28T12:00:00+00:00")
    q = TinyQ(clock=clock)
    fires: list[str] = []

    async def note() -> None:
        fires.append(f"{tinyq.current_job().fire_time:%dT%H:%M}")

    q.cron("30 2 * * *", tz="Europe/Berlin", name="nightly")(note)
    task = q.task(name="recurring")(note)
    with q.testing() as jobs:
        asyncio.run(q.schedule(task, when=tinyq.Cron("0 12 * * *"), key="noon", durable=True))
        jobs.advance(2 * 86_400)
        assert fires == ["29T01:00", "29T12:00", "30T00:30", "30T12:00"]
        [nightly, noon] = asyncio.run(q.schedules())
        assert (nightly.stats.fired, noon.stats.fired) == (2, 2)
        asyncio.run(noon.pause())
        jobs.advance(86_400)
        asyncio.run(noon.resume())
        jobs.advance(86_400)
    assert fires[4:] == ["31T00:30", "01T00:30", "01T12:00"]
