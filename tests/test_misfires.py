"""Fire times that passed unnoticed, runs that are not over, definitions that change, and what can be done with a schedule."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from helpers import Notes, eventually, rows, stats_of, stopped_at_once

import tinyq
from tinyq import Every, Retry, State, TinyQ


def scheduled(clock: FakeClock, notes: Notes, period: float, db: Path | None = None, **options: Any) -> TinyQ:
    q = TinyQ(db, clock=clock)
    q.every(period, name="tick", **options)(notes.tick)
    return q


async def quiet(q: TinyQ, fired: int, ran: Callable[[], int]) -> None:
    """Return when so many have run and nothing is left."""
    async with asyncio.timeout(20):
        while ran() < fired or (await q.stats()).count():  # noqa: ASYNC110 - it may be in the database, which has no event for it
            await asyncio.sleep(0.001)


# Overlap


@pytest.mark.parametrize(
    ("seconds", "overlap", "starts", "most"),
    [
        (3, "skip", [2, 6, 10], 1),
        (3, "queue", [2, 5, 8, 11], 1),
        (3, "allow", [2, 4, 6, 8, 10, 12], 2),
        (2.2, "skip", [2, 6, 10], 1),  # a tenth longer than its period
        (2.2, "queue", [2, 4.2, 6.4, 8.6, 10.8], 1),
        (2.2, "allow", [2, 4, 6, 8, 10, 12], 2),
    ],
)
async def test_a_fire_time_while_the_last_run_is_not_over_is_skipped_queued_or_allowed(
    seconds: float, overlap: str, starts: list[float], most: int
) -> None:
    clock = FakeClock("2026-01-01T11:59:58+00:00")
    notes = Notes(clock, seconds)
    q = scheduled(clock, notes, 2, overlap=overlap)
    await q.start()
    await clock.advance(12.5)
    assert notes.starts == pytest.approx(starts)
    assert notes.most == most
    assert stats_of(q).fired + stats_of(q).skipped == 6
    await stopped_at_once(q, clock)


@pytest.mark.parametrize("overlap", ["skip", "queue", "allow"])
async def test_overlap_holds_for_durable_runs_too(overlap: str, clock: FakeClock, file: Path) -> None:
    notes = Notes(clock, 25)
    q = scheduled(clock, notes, 10, file, overlap=overlap)
    await q.start()
    await eventually(lambda: len(notes.starts) == 3, clock, 0.5)
    waited = [later - earlier for earlier, later in zip(notes.starts, notes.starts[1:], strict=False)]
    if overlap == "allow":
        assert notes.most > 1
    else:
        assert notes.most == 1 and all(gap >= 25 for gap in waited)
    if overlap == "queue":  # whatever a fire time brings stands right behind the run
        assert notes.fires[:2] == [10, 20]
    await stopped_at_once(q, clock)


async def test_of_all_fire_times_during_one_run_one_waits_in_line(clock: FakeClock) -> None:
    notes = Notes(clock, 35)
    q = scheduled(clock, notes, 10, overlap="queue")
    await q.start()
    await clock.advance(46)
    assert notes.fires == [10, 20]
    assert (stats_of(q).fired, stats_of(q).skipped) == (2, 2)
    await stopped_at_once(q, clock)


@pytest.mark.parametrize("overlap", ["skip", "queue"])
async def test_a_run_that_waits_for_its_retry_is_given_up_for_the_next_fire_time(clock: FakeClock, overlap: str) -> None:
    notes = Notes(clock)
    notes.error = ValueError("as told")
    q = scheduled(clock, notes, 60, overlap=overlap, retry=[45, 45])
    await q.start()
    await clock.advance(200)  # starts at :60 and :105, then the retry of :150 is given up at :120
    assert notes.starts == [60, 105, 120, 165, 180]
    assert notes.attempts == [1, 2, 1, 2, 1]
    assert stats_of(q).superseded == 2
    await q.stop()


async def test_a_retry_that_is_given_up_leaves_no_row(clock: FakeClock, file: Path) -> None:
    notes = Notes(clock)
    notes.error = ValueError("as told")
    q = scheduled(clock, notes, 60, file, retry=[3600])
    await q.start()
    await eventually(lambda: len(notes.starts) == 3, clock, 1)
    assert notes.attempts == [1, 1, 1]
    assert stats_of(q).superseded == 2
    await stopped_at_once(q, clock)
    assert len(rows(file, "seq")) == 1


# Misfires


@pytest.mark.parametrize(
    ("options", "fires", "missed"),
    [
        ({}, [1, 2, 7, 8, 9], 4),
        ({"misfire": "skip"}, [1, 2, 7, 8, 9], 4),
        ({"misfire": "all"}, list(range(1, 10)), 0),
        ({"misfire": "all", "overlap": "queue"}, list(range(1, 10)), 0),
        ({"misfire": "all", "overlap": "allow"}, list(range(1, 10)), 0),
        ({"misfire": "all", "misfire_grace": 3}, [1, 2, 5, 6, 7, 8, 9], 2),
        ({"misfire": "all", "overlap": "allow", "misfire_grace": 3}, [1, 2, 5, 6, 7, 8, 9], 2),
        ({"misfire": "latest", "misfire_grace": 0.4}, [1, 2, 8, 9], 5),
    ],
)
async def test_a_blocked_loop_runs_of_the_missed_fire_times_those_that_the_policy_names(
    clock: FakeClock, notes: Notes, options: dict[str, Any], fires: list[float], missed: int
) -> None:
    q = scheduled(clock, notes, 1, **options)
    await q.start()
    await clock.advance(2.1)
    clock.block(5.4)
    await clock.advance(2)
    assert notes.fires == fires
    assert stats_of(q).missed == missed
    await q.stop()


@pytest.mark.parametrize("overlap", ["skip", "queue"])
async def test_all_that_was_missed_in_a_downtime_is_run_one_after_another(
    clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture, overlap: str
) -> None:
    notes = Notes(clock, 5)
    q = scheduled(clock, notes, 60, file, misfire="all", misfire_grace=600, overlap=overlap)
    await q.start()
    await eventually(lambda: rows_of_schedules(file) == ["tick"])
    await q.stop()
    clock.block(310)
    await q.start()
    await eventually(lambda: len(notes.fires) == 6, clock, 0.5)
    assert notes.fires == [60, 120, 180, 240, 300, 360]
    assert notes.most == 1
    assert (stats_of(q).fired, stats_of(q).skipped, stats_of(q).missed) == (6, 0, 0)
    assert caplog.messages == []
    await stopped_at_once(q, clock)


async def test_a_fire_time_that_passes_during_a_run_is_skipped_though_all_missed_ones_are_run(clock: FakeClock) -> None:
    notes = Notes(clock, 25)
    q = scheduled(clock, notes, 10, misfire="all")
    await q.start()
    await clock.advance(10)
    clock.block(15)
    await clock.advance(50)
    assert notes.fires == [10, 40, 70]
    await stopped_at_once(q, clock)


async def test_missed_fire_times_wait_for_a_run_of_a_process_that_is_still_there(clock: FakeClock, file: Path) -> None:
    earlier, later = Notes(clock, 100), Notes(clock)
    leaving = scheduled(clock, earlier, 60, file, misfire="all")
    await leaving.start()
    await eventually(lambda: earlier.fires == [60], clock, 1)
    stopping = asyncio.ensure_future(leaving.stop(grace=600))
    await eventually(lambda: leaving.health().status == "degraded")
    clock.block(70)  # 2:10, and the first run goes on until 2:40
    coming = scheduled(clock, later, 60, file, misfire="all")
    await coming.start()
    await eventually(lambda: len(later.fires) == 2, clock, 0.5)
    assert later.fires == [120, 180]
    assert later.starts[0] >= 160
    await asyncio.gather(stopping, stopped_at_once(coming, clock))


@pytest.mark.parametrize("durable", [False, True])
async def test_a_schedule_that_is_nearly_always_busy_catches_up_after_a_delay(
    clock: FakeClock, file: Path, durable: bool
) -> None:
    notes = Notes(clock, 0.93)
    q = scheduled(clock, notes, 1, file if durable else None, misfire="all")
    await q.start()
    await eventually(lambda: len(notes.fires) == 2, clock, 0.01)
    clock.block(4.5)
    await eventually(lambda: len(notes.fires) == 5, clock, 0.01)
    behind = notes.starts[-1] - notes.fires[-1]
    await eventually(lambda: len(notes.fires) == 30, clock, 0.01)
    assert notes.starts[-1] - notes.fires[-1] < behind - 0.5
    await stopped_at_once(q, clock)


async def test_a_missed_fire_time_does_not_wait_for_one_that_was_answered_with_the_job_that_waits(clock: FakeClock) -> None:
    notes = Notes(clock, 35)
    q = scheduled(clock, notes, 10, misfire="all", overlap="queue", misfire_grace=600)
    await q.start()
    await eventually(lambda: len(notes.fires) == 1, clock, 1)
    await clock.advance(30)  # 20 waits, 30 and 40 are skipped
    notes.seconds = 1
    await clock.advance(20)
    clock.block(35)
    before = len(notes.fires)
    await clock.advance(60)
    assert notes.fires[before - 1 :] == [60, 70, 80, 90, 100, 110, 120, 130, 140, 150]
    await stopped_at_once(q, clock)


async def test_drain_does_not_wait_for_fire_times_behind_a_run_that_cannot_start(clock: FakeClock, notes: Notes) -> None:
    q = scheduled(clock, notes, 10, misfire="all", misfire_grace=86_400)
    await q.start()
    await q.pause("default")
    await clock.advance(1)
    clock.block(34)
    await clock.advance(0)
    draining = asyncio.ensure_future(q.drain())
    await clock.advance(2)
    await eventually(draining.done)
    assert notes.fires == []
    await stopped_at_once(q, clock)


async def test_catching_up_reckons_the_missed_fire_times_once(
    clock: FakeClock, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = scheduled(clock, notes, 10, misfire="all", misfire_grace=86_400)
    await q.start()
    await clock.advance(1)
    clock.block(2000)
    real, reckoned = Every.passed, list[int]()

    def passed(rule: Every, since: int, now: int, most: int) -> tuple[int, list[int]]:
        reckoned.append(most)
        return real(rule, since, now, most)

    monkeypatch.setattr(Every, "passed", passed)
    await eventually(lambda: len(notes.fires) == 200, clock, 0.01)
    assert len(reckoned) < 5
    await q.stop()


async def test_after_the_clock_was_set_back_a_fire_time_during_a_run_is_skipped_again(clock: FakeClock) -> None:
    notes = Notes(clock, 25)
    q = scheduled(clock, notes, 10, misfire="all")
    await q.start()
    await clock.advance(11)
    clock.step_wall(-3600)
    await clock.advance(80)
    assert stats_of(q).skipped >= 4
    assert stats_of(q).missed == 0
    await stopped_at_once(q, clock)


async def test_a_run_that_cannot_be_started_costs_the_other_schedules_nothing(clock: FakeClock) -> None:
    runs: list[str] = []
    failing = [""]

    def make(loop: asyncio.AbstractEventLoop, run: Any, **named: Any) -> asyncio.Task[Any]:
        if run.__name__ == "call_handler" and run.cr_frame.f_locals["job"].task == failing[0]:
            failing[0] = ""
            run.close()
            raise RuntimeError("no task")
        return asyncio.Task(run, loop=loop, **named)

    q = TinyQ(clock=clock)
    for name, overlap in (("a", "queue"), ("b", "skip"), ("c", "skip")):

        @q.every(10, name=name, overlap=overlap)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        async def tick() -> None:
            job = tinyq.current_job()
            runs.append(job.task)

    await q.start()
    await clock.advance(11)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(make)  # pyright: ignore[reportArgumentType]
    failing[0] = "b"
    await clock.advance(30)
    loop.set_task_factory(None)
    assert runs.count("a") == runs.count("c") == 4
    await stopped_at_once(q, clock)


async def test_a_run_by_hand_before_a_fire_time_does_not_count_as_long(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes(clock, 4)
    q = scheduled(clock, notes, 10)
    await q.start()
    await clock.advance(18)
    await (await q.schedules())[0].run_now()
    await clock.advance(10)
    assert stats_of(q).skipped == 1
    assert caplog.messages == []
    await stopped_at_once(q, clock)


async def test_what_comes_to_be_too_late_while_it_waits_for_a_run_is_told_in_one_line(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes(clock, 30)
    q = scheduled(clock, notes, 1, misfire="all", misfire_grace=20)
    await q.start()
    await clock.advance(0.5)
    clock.block(10)
    with caplog.at_level(logging.WARNING, "tinyq"):
        await clock.advance(35)
    assert notes.fires[0] == 1
    [line] = [line for line in caplog.messages if "missed" in line]
    assert line == "schedule tick missed 9 fire times: it was 20.5 s late"
    await stopped_at_once(q, clock)


async def test_drain_runs_what_was_missed_to_the_last(clock: FakeClock, notes: Notes) -> None:
    q = scheduled(clock, notes, 10, misfire="all")
    await q.start()
    await clock.advance(1)
    clock.block(44)
    draining = asyncio.ensure_future(q.drain())
    await eventually(draining.done, clock, 0.01)
    assert notes.fires == [10, 20, 30, 40]
    await q.stop()


async def test_a_schedule_that_is_paused_while_it_catches_up_stops_at_once(clock: FakeClock) -> None:
    notes = Notes(clock, 2)
    q = scheduled(clock, notes, 10, misfire="all")
    await q.start()
    await clock.advance(1)
    clock.block(54)
    await eventually(lambda: len(notes.starts) == 2, clock, 0.1)
    await (await q.schedules())[0].pause()
    await clock.advance(30)
    assert notes.fires == [10, 20]
    await stopped_at_once(q, clock)


async def test_a_fire_time_is_on_time_for_skip_up_to_a_second(clock: FakeClock, notes: Notes) -> None:
    q = scheduled(clock, notes, 60, misfire="skip")
    await q.start()
    await clock.advance(59)
    clock.block(2)
    await clock.advance(58)
    clock.block(2.1)
    await clock.advance(60)
    assert notes.fires == [60, 180]
    assert stats_of(q).missed == 1
    await q.stop()


async def test_what_was_missed_is_logged_with_how_late_it_was(
    clock: FakeClock, notes: Notes, caplog: pytest.LogCaptureFixture
) -> None:
    q = scheduled(clock, notes, 60, misfire="skip")
    await q.start()
    await clock.advance(59)
    with caplog.at_level(logging.WARNING, "tinyq"):
        clock.block(3.5)
        await clock.advance(0)
    [line] = caplog.messages
    assert line == "schedule tick missed 1 fire times: it was 2.5 s late"
    await q.stop()


@pytest.mark.parametrize(
    ("period", "down", "fires", "missed"),
    [
        (60, (30, 310), [300, 360], 4),  # 12:00:30 to 12:05:10
        (86_400, (40_000, 44_400), [43_200], 0),  # over midnight, 20 minutes
        (86_400, (40_000, 43_200 + 5 * 3600), [], 1),  # five hours late is too late for nightly work
        (7 * 86_400, (0, 43_200 + 3599), [43_200], 0),
    ],
)
async def test_after_a_downtime_the_latest_fire_time_is_run_unless_it_is_too_late(
    clock: FakeClock, notes: Notes, file: Path, period: float, down: tuple[float, float], fires: list[float], missed: int
) -> None:
    offset = (43_200 + 4 * 86_400) % period if period > 86_400 else 0  # 2026-01-02 is a Friday
    weekly = {"offset": (1_767_312_000 % period)} if period > 86_400 else {}
    assert offset >= 0
    q = scheduled(clock, notes, period, file, **weekly)
    await q.start()
    await eventually(lambda: rows_of_schedules(file) == ["tick"])
    await clock.advance(down[0])
    await q.stop()
    clock.block(down[1] - down[0])
    await q.start()
    if fires:
        await quiet(q, 1, lambda: len(notes.fires))
        if len(fires) > 1:
            await clock.advance(fires[1] - down[1])
            await quiet(q, 2, lambda: len(notes.fires))
    await eventually(lambda: stats_of(q).missed == missed)
    assert notes.fires == fires
    await q.stop()


def rows_of_schedules(file: Path) -> list[str]:
    with closing(sqlite3.connect(file, timeout=10)) as db:
        return [name for (name,) in db.execute("SELECT name FROM tinyq_schedules")]


def rules_of(file: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(file, timeout=10)) as db:
        return db.execute("SELECT rule FROM tinyq_schedules").fetchall()


async def test_a_weekly_interval_fires_though_the_service_restarts_every_day(
    clock: FakeClock, notes: Notes, db: Path | None
) -> None:
    for _ in range(10):
        q = scheduled(clock, notes, 7 * 86_400, db)
        await q.start()
        if db is not None:
            await eventually(lambda db=db: rows_of_schedules(db) == ["tick"])  # type: ignore[misc]
        clock.block(43_199)
        await clock.advance(2)  # over midnight
        await eventually(lambda q=q: (stats_of(q).next or clock.now()) > clock.now())  # type: ignore[misc]
        await quiet(q, 0, lambda: 0)
        clock.block(43_199)
        await stopped_at_once(q, clock)
    assert notes.fires == [6.5 * 86_400]


async def test_a_fire_time_that_is_due_when_the_same_schedule_is_registered_again_still_runs(
    clock: FakeClock, notes: Notes, file: Path
) -> None:
    q = scheduled(clock, notes, 3600, file)
    await q.start()
    await eventually(lambda: rows_of_schedules(file) == ["tick"])
    await q.stop()
    clock.block(3605)
    again = scheduled(clock, notes, 3600, file)
    await again.start()
    await quiet(again, 1, lambda: len(notes.fires))
    assert notes.fires == [3600]
    await again.stop()


# Definitions


async def test_a_changed_definition_starts_afresh(clock: FakeClock, notes: Notes, file: Path) -> None:
    q = scheduled(clock, notes, 60, file)
    await q.start()
    await eventually(lambda: rows_of_schedules(file) == ["tick"])
    await q.stop()
    clock.block(3600)
    changed = scheduled(clock, notes, 50, file)
    await changed.start()
    await eventually(lambda: len(notes.fires) == 1, clock, 5)
    assert notes.fires[0] > 3600
    await stopped_at_once(changed, clock)


async def test_the_newest_definition_of_a_name_wins_and_the_older_process_stands_down_with_one_line(
    clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Notes(clock), Notes(clock)
    first, second = scheduled(clock, old, 10, file), scheduled(clock, new, 15, file)
    await first.start()
    await eventually(lambda: len(old.fires) == 1, clock, 1)
    await second.start()
    await eventually(lambda: ("every 15.0 0.0",) in rules_of(file))
    since = (clock.now() - old.began).total_seconds()
    with caplog.at_level(logging.WARNING, "tinyq"):
        await eventually(lambda: stats_of(second).fired >= 3 and stats_of(first).next is None, clock, 1)
    runs = sorted(fire for fire in old.fires + new.fires if fire > since)  # whoever has room runs what the second has made
    assert all(fire % 15 == 0 for fire in runs) and len(runs) == len(set(runs))
    assert [line for line in caplog.messages if "stands down" in line] == [
        "schedule tick stands down in this process: another one has defined it differently since"
    ]
    assert stats_of(first).next is None
    for q in (first, second):
        await stopped_at_once(q, clock)


async def test_a_rule_that_fails_stops_its_own_schedule_only(
    clock: FakeClock, notes: Notes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = scheduled(clock, notes, 10)
    bad = Notes(clock)
    q.every(10, name="bad")(bad.tick)
    await q.start()
    await clock.advance(10)
    real = Every.next_at
    q._schedules[1].period = q._schedules[1].prompt = 0  # as of a rule that is no interval

    def next_at(rule: Every, after: int) -> int:
        if rule is broken:
            raise OverflowError("no more time")
        return real(rule, after)

    broken = (await q.schedules("bad"))[0].rule
    monkeypatch.setattr(Every, "next_at", next_at)
    with caplog.at_level(logging.ERROR, "tinyq"):
        await clock.advance(30)
    assert notes.fires == [10, 20, 30, 40]
    assert bad.fires == [10]
    [line] = caplog.messages
    assert line.startswith("schedule bad is stopped, its rule fails: OverflowError")
    await q.stop()


async def test_an_immediate_rule_that_fails_before_it_has_fired_stops_its_own_schedule_only(
    clock: FakeClock, notes: Notes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = scheduled(clock, notes, 10)
    bad = Notes(clock)
    q.every(7, name="bad", immediate=True)(bad.tick)

    def latest_at(rule: Every, now: int) -> int | None:
        raise OverflowError("no time before")

    monkeypatch.setattr(Every, "latest_at", latest_at)
    with caplog.at_level(logging.ERROR, "tinyq"):
        await q.start()
        await clock.advance(30)
    assert (notes.fires, bad.fires) == ([10, 20, 30], [])
    assert [line.split(":")[0] for line in caplog.messages] == ["schedule bad is stopped, its rule fails"]
    await q.stop()


# What can be done with one


async def test_a_paused_schedule_fires_no_more_in_any_process_until_it_is_resumed(clock: FakeClock, file: Path) -> None:
    notes = Notes(clock)
    both = [scheduled(clock, notes, 10, file) for _ in range(2)]
    for q in both:
        await q.start()
    await eventually(lambda: len(notes.fires) == 1, clock, 1)
    await (await both[0].schedules())[0].pause()
    await eventually(lambda: stats_of(both[1]).paused, clock, 1)
    seen = len(notes.fires)
    await clock.advance(30)
    assert len(notes.fires) == seen
    resumed = (clock.now() - notes.began).total_seconds()
    await (await both[0].schedules())[0].resume()
    await eventually(lambda: len(notes.fires) > seen, clock, 1)
    assert notes.fires[seen] > resumed
    for q in both:
        await stopped_at_once(q, clock)


async def test_every_process_says_whether_a_schedule_is_paused(clock: FakeClock, notes: Notes, file: Path) -> None:
    both = [scheduled(clock, notes, 86_400, file) for _ in range(2)]
    for q in both:
        await q.start()
    here, there = both
    await (await here.schedules())[0].pause()
    assert (await there.schedules())[0].stats.paused and (await there.stats()).schedules[0].next is None
    await (await there.schedules())[0].resume()
    assert not (await here.schedules())[0].stats.paused and (await here.stats()).schedules[0].next is not None
    for q in both:
        await stopped_at_once(q, clock)


async def test_a_pause_outlives_a_restart(clock: FakeClock, notes: Notes, file: Path) -> None:
    q = scheduled(clock, notes, 10, file)
    await q.start()
    await (await q.schedules())[0].pause()
    await q.stop()
    await q.start()
    await clock.advance(35)
    await eventually(lambda: stats_of(q).paused)
    assert notes.fires == []
    await q.stop()


async def test_a_schedule_without_a_database_can_be_paused_and_resumed(clock: FakeClock, notes: Notes) -> None:
    q = scheduled(clock, notes, 10)
    await q.start()
    await clock.advance(15)
    await (await q.schedules())[0].pause()
    assert stats_of(q).paused
    await clock.advance(30)
    await (await q.schedules())[0].resume()
    await clock.advance(10)
    assert notes.fires == [10, 50]
    await q.stop()


async def test_to_resume_what_is_not_paused_costs_no_fire_time(clock: FakeClock, notes: Notes, db: Path | None) -> None:
    q = scheduled(clock, notes, 3600, db, immediate=True)
    await q.start()
    await (await q.schedules())[0].resume()
    await eventually(lambda: notes.fires == [0], clock)
    await stopped_at_once(q, clock)


async def test_to_resume_what_is_not_paused_costs_no_missed_fire_time(clock: FakeClock, notes: Notes, file: Path) -> None:
    for expected in ([], [3600]):
        q = scheduled(clock, notes, 3600, file)
        await q.start()
        await eventually(lambda: rows_of_schedules(file))
        await (await q.schedules())[0].resume()
        await eventually(lambda expected=expected: notes.fires == expected, clock)  # type: ignore[misc]
        await stopped_at_once(q, clock)
        await clock.advance(3600)


async def test_a_schedule_that_is_paused_stays_so_when_the_wall_clock_is_set_back(clock: FakeClock, notes: Notes) -> None:
    q = scheduled(clock, notes, 10)
    await q.start()
    await clock.advance(15)
    [schedule] = await q.schedules()
    await schedule.pause()
    clock.step_wall(-3600)
    await clock.advance(120)
    assert notes.fires == [10] and schedule.stats.paused
    await schedule.resume()
    await clock.advance(10)
    assert notes.fires == [10, 140 - 3600]
    await q.stop()


async def test_run_now_makes_a_job_beside_the_fire_times(clock: FakeClock, notes: Notes, db: Path | None) -> None:
    q = scheduled(clock, notes, 3600, db)
    await q.start()
    job = await (await q.schedules())[0].run_now()
    await job.result(10)
    assert job.task == "tick" and job.status is State.DONE
    assert notes.fires == [0]
    await eventually(lambda: len(notes.fires) == 2, clock, 600)
    assert notes.fires == [0, 3600]
    await stopped_at_once(q, clock)


async def test_a_removed_schedule_fires_no_more_and_its_task_stays(clock: FakeClock, notes: Notes, db: Path | None) -> None:
    q = scheduled(clock, notes, 10, db)
    await q.start()
    [schedule] = await q.schedules()
    await schedule.remove()
    await clock.advance(30)
    assert notes.fires == []
    assert await q.schedules() == []
    if db is not None:
        assert rows_of_schedules(db) == []
    await q.stop()


async def test_the_next_fire_times_can_be_asked_for_without_side_effects(clock: FakeClock, notes: Notes) -> None:
    q = scheduled(clock, notes, 60, offset=5)
    await q.start()
    [schedule] = await q.schedules()
    before = schedule.stats
    assert [f"{fire:%H:%M:%S %z}" for fire in schedule.next_fires(3)] == [f"12:0{n}:05 +0000" for n in range(3)]
    assert schedule.next_fires(0) == [] and schedule.stats == before
    with pytest.raises(ValueError, match="n is -1"):
        schedule.next_fires(-1)
    await q.stop()


async def test_a_retried_schedule_gets_its_attempts_anew_each_fire_time(clock: FakeClock, notes: Notes) -> None:
    notes.error = ValueError("as told")
    q = scheduled(clock, notes, 100, retry=Retry(max_attempts=3, base=10, factor=1, jitter="none"))
    await q.start()
    await clock.advance(210)
    assert notes.attempts[:6] == [1, 2, 3, 1, 2, 3] or notes.attempts[:5] == [1, 2, 3, 1, 2]
    await q.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "wait"}, "overlap is 'wait': give one of 'skip', 'queue', 'allow'"),
        ({"misfire": "never"}, "misfire is 'never': give one of 'latest', 'all', 'skip'"),
        ({"misfire_grace": -1}, "misfire_grace is -1: it must be greater than zero"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyQ().every(60, **options)
