"""Recurring jobs as data: one row for each, which moves from fire time to fire time. The same with and without a database."""

import asyncio
import logging
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Notes, Open, edit, eventually, rows, stopped_at_once

from tinyq import Cancel, Every, JobNotFound, RecurringJob, Retry, Snooze, TinyQ


class Polls(Notes):
    """A task that notes what it polls, for which fire time, at which attempt."""

    def __init__(self, q: TinyQ, clock: FakeClock, **options: Any) -> None:
        super().__init__(clock)
        self.numbers: list[int] = []
        self.task = q.task(name="poll", **options)(self.poll)

    async def poll(self, number: int) -> None:
        self.numbers.append(number)
        await self.tick()

    @property
    def calls(self) -> list[tuple[int, float, int]]:
        return [*zip(self.numbers, self.fires, self.attempts, strict=True)]


@pytest.fixture
async def polls(q: TinyQ, clock: FakeClock) -> Polls:
    return Polls(q, clock)


async def only(q: TinyQ) -> RecurringJob:
    [found] = await q.schedules()
    assert isinstance(found, RecurringJob)
    return found


async def next_run(q: TinyQ, polls: Polls, clock: FakeClock, count: int, step: float = 1) -> None:
    """Let time pass until there were so many runs and the last of them is settled; what is due starts before more time passes."""
    async with asyncio.timeout(20):
        while await busy(q, clock) or len(polls.calls) < count:
            await clock.advance(step)
            for _ in range(100):
                if not sum(count.due for count in (await q.stats()).counts):
                    break
                await asyncio.sleep(0.001)
        await busy(q, clock)  # the last one may have begun since that was asked


async def busy(q: TinyQ, clock: FakeClock) -> bool:
    """False, once nothing runs any more."""
    step = 0.01
    while (await q.stats()).count(state="running"):
        await clock.advance(step)
        await asyncio.sleep(0.001)
        step = min(0.3, step * 1.5)
    return False


async def test_a_recurring_job_runs_at_each_fire_time_of_its_rule(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    for n in (1, 2, 3):
        await next_run(q, polls, clock, n)
    assert polls.calls == [(7, 10, 1), (7, 20, 1), (7, 30, 1)]
    assert (await only(q)).stats.fired == 3
    assert (await q.stats()).count() == 1


async def test_the_stats_say_for_which_fire_time_it_has_run_last(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    began = clock.now()
    job = await q.schedule(polls.task, 7, when=Every(10), key="7", retry=False)
    assert job.stats.last is None
    for n, error in enumerate((None, ValueError("down"), None), 1):
        polls.error = error
        await next_run(q, polls, clock, n)
        assert (await only(q)).stats.last == began + timedelta(seconds=10 * n)


async def test_the_stats_of_one_that_runs_or_waits_for_its_retry_say_when_it_fires_next(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    polls.seconds, polls.error = 20, ValueError("down")
    await q.schedule(polls.task, 7, when=Every(60), key="7", retry=[20])
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    assert (await only(q)).stats.next == polls.began + timedelta(seconds=120)
    await busy(q, clock)
    assert (await only(q)).stats.next == polls.began + timedelta(seconds=120)


async def test_a_fire_time_that_was_missed_is_not_the_one_for_which_it_has_run_last(clock: FakeClock, open_at: OpenAt) -> None:
    q = await open_at(None)
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(10), key="7", misfire="skip")
    await clock.advance(10)
    ran = clock.now()
    clock.block(64)
    await clock.advance(1)
    stats = (await only(q)).stats
    assert (stats.fired, stats.missed, stats.last) == (1, 6, ran)


async def test_a_run_whose_retry_was_given_up_is_the_last_one_all_the_same(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    began, polls.error = clock.now(), ValueError("down")
    await q.schedule(polls.task, 7, when=Every(10), key="7", retry=[25])
    await next_run(q, polls, clock, 1)
    assert (await only(q)).stats.last == began + timedelta(seconds=10)


async def test_scheduling_the_same_again_changes_nothing(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    first = await q.schedule(polls.task, 7, when=Every(10), key="7")
    await next_run(q, polls, clock, 1)
    again = await q.schedule(polls.task, 7, when=Every(10), key="7")
    assert (first.created, again.created) == (True, False)
    assert again.stats.fired == 1 and again.stats.next is not None
    assert (await q.stats()).count() == 1


async def test_scheduling_with_other_arguments_gives_them_to_the_next_run(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    await q.schedule(polls.task, 7, when=Every(10), key="k")
    await q.schedule(polls.task, 8, when=Every(10), key="k")
    await next_run(q, polls, clock, 1)
    assert polls.calls == [(8, 10, 1)]


async def test_another_rule_begins_with_its_own_next_fire_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    await q.schedule(polls.task, 7, when=Every(3600), key="k")
    await q.schedule(polls.task, 7, when=Every(10), key="k")
    await next_run(q, polls, clock, 1)
    assert polls.fires == [10]


async def test_what_is_scheduled_while_it_runs_holds_from_its_next_run_on(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(10), key="k")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    changed = await q.schedule(polls.task, 8, when=Every(60), key="k")
    assert not changed.created
    await next_run(q, polls, clock, 2)
    assert polls.calls == [(7, 10, 1), (8, 60, 1)]


async def test_jobs_of_different_keys_and_tasks_keep_their_own_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    for n in (2, 3, 5):
        await q.schedule(polls.task, n, when=Every(10 * n), key=str(n))
    await eventually(lambda: len(polls.calls) >= 6, clock, 1)
    assert sorted(polls.fires)[:6] == [20, 30, 40, 50, 60, 60]


async def test_an_ordinary_job_with_the_same_key_is_another_one(q: TinyQ, polls: Polls, clock: FakeClock, durable: bool) -> None:
    await q.schedule(polls.task, 7, when=Every(10), key="k")
    job = await q.enqueue("poll", 1, key="k", delay=100, durable=durable)
    assert job.created
    assert (await q.stats()).count() == 2


async def test_unscheduling_removes_it_and_does_nothing_the_second_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    assert await q.unschedule(polls.task, key="7") is True
    assert await q.unschedule(polls.task, key="7") is False
    assert await q.schedules() == []
    await clock.advance(30)
    assert polls.calls == []
    assert (await q.stats()).count() == 0


async def test_unscheduled_while_it_runs_it_ends_with_that_run(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    assert await q.unschedule("poll", key="7") is True
    await next_run(q, polls, clock, 1)
    async with asyncio.timeout(20):
        while (await q.stats()).count():
            await clock.advance(0.5)
    await clock.advance(30)
    assert polls.fires == [10]


async def test_one_that_was_unscheduled_and_still_runs_is_not_listed_and_no_error(
    q: TinyQ, polls: Polls, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    await q.unschedule(polls.task, key="7")
    assert await q.schedules() == []
    assert caplog.records == []


async def test_the_handler_can_end_it_for_good_with_cancel(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = Cancel("no such subscription")
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await next_run(q, polls, clock, 1)
    await clock.advance(30)
    assert polls.fires == [10]
    assert await q.schedules() == []


async def test_a_job_that_fails_for_good_is_logged_counted_and_comes_again(
    q: TinyQ, polls: Polls, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(10), key="7", retry=False)
    with caplog.at_level(logging.ERROR, "tinyq"):
        await next_run(q, polls, clock, 2)
    assert polls.fires == [10, 20]
    lines = [
        line for line in caplog.messages if "attempt 1 failed for this fire time, no attempts left: ValueError: down" in line
    ]
    assert len(lines) == 2
    found = await only(q)
    assert found.error == "ValueError: down"
    assert (found.stats.fired, found.stats.failed) == (2, 2)
    polls.error = None
    await next_run(q, polls, clock, 3)
    assert (await only(q)).error is None


async def test_each_fire_time_has_all_its_attempts(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(100), key="7", retry=Retry(max_attempts=3, base=10, factor=1, jitter="none"))
    await next_run(q, polls, clock, 6)
    assert [attempt for _, _, attempt in polls.calls] == [1, 2, 3, 1, 2, 3]
    assert polls.fires == [100] * 3 + [200] * 3
    assert (await only(q)).stats.failed == 2


async def test_a_retry_that_would_come_after_the_next_fire_time_is_given_up(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(10), key="7", retry=[25])
    await next_run(q, polls, clock, 3)
    assert polls.calls == [(7, 10, 1), (7, 20, 1), (7, 30, 1)]
    assert (await only(q)).stats.superseded == 3


async def test_a_snooze_within_the_period_comes_back_for_the_same_fire_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = Snooze(4)
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await next_run(q, polls, clock, 1)
    polls.error = None
    await next_run(q, polls, clock, 3)
    assert polls.calls == [(7, 10, 1), (7, 10, 1), (7, 20, 1)]


@pytest.mark.parametrize(("overlap", "fires"), [("skip", [10, 40, 70]), ("queue", [10, 30, 60])])
async def test_fire_times_during_its_own_run_are_skipped_or_the_last_one_is_run_after_it(
    clock: FakeClock, overlap: Any, fires: list[float]
) -> None:
    q = TinyQ(clock=clock)
    polls = Polls(q, clock)
    polls.seconds = 25
    await q.start()
    await q.schedule(polls.task, 7, when=Every(10), key="7", overlap=overlap)
    await clock.advance(100)
    assert polls.fires[:3] == fires
    stats = (await only(q)).stats
    assert stats.skipped > 0 and stats.missed == 0
    await stopped_at_once(q, clock)


@pytest.mark.parametrize("options", [{"misfire": "skip"}, {"misfire_grace": 4}, {"misfire": "all", "misfire_grace": 4}])
async def test_a_fire_time_that_is_queued_behind_its_own_run_is_not_missed(
    q: TinyQ, polls: Polls, clock: FakeClock, options: dict[str, Any]
) -> None:
    polls.seconds = 25
    await q.schedule(polls.task, 7, when=Every(10), key="7", overlap="queue", **options)
    await eventually(lambda: len(polls.fires) == 3, clock)
    assert polls.fires[:2] == [10, 30]
    assert (await only(q)).stats.missed == 0


@pytest.mark.parametrize(
    ("options", "fires", "missed"),
    [
        ({}, [10, 70, 80], 5),
        ({"misfire": "skip"}, [10, 80, 90], 6),
        ({"misfire": "all"}, [10, 20, 30, 40, 50, 60, 70, 80], 0),
        ({"misfire": "all", "misfire_grace": 30}, [10, 50, 60, 70, 80], 3),
        ({"misfire_grace": 3}, [10, 80, 90], 6),
    ],
)
async def test_of_the_fire_times_that_were_missed_those_are_run_that_the_policy_names(
    clock: FakeClock, open_at: OpenAt, options: dict[str, Any], fires: list[float], missed: int
) -> None:
    q = await open_at(None)
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(10), key="7", **options)
    await clock.advance(10)
    clock.block(64)
    await clock.advance(fires[-1] - 74)
    assert polls.fires == fires
    stats = (await only(q)).stats
    assert (stats.missed, stats.last) == (missed, clock.now())


async def test_paused_it_does_not_run_and_resumed_it_goes_on_with_the_next_fire_time(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    job = await q.schedule(polls.task, 7, when=Every(10), key="7")
    await job.pause()
    assert (await only(q)).stats.paused and job.stats.next is None
    await clock.advance(35)
    assert polls.calls == []
    await q.schedule(polls.task, 8, when=Every(10), key="7")  # takes the new argument, and stays paused
    await clock.advance(35)
    await (await only(q)).resume()
    await next_run(q, polls, clock, 1)
    assert polls.calls[0][0] == 8 and polls.fires[0] >= 80


async def test_paused_while_it_runs_it_waits_after_that_run(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.seconds = 3
    job = await q.schedule(polls.task, 7, when=Every(10), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    await job.pause()
    await next_run(q, polls, clock, 1)
    await clock.advance(60)
    assert polls.fires == [10]
    assert (await only(q)).stats.fired == 1


async def test_run_now_runs_it_once_more_and_leaves_its_fire_times_alone(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    schedule = await q.schedule(polls.task, 7, when=Every(3600), key="7")
    job = await schedule.run_now()
    await job.result(10)
    assert polls.calls == [(7, 0, 1)]
    assert [f"{fire:%H:%M}" for fire in (await only(q)).next_fires(2)] == ["13:00", "14:00"]
    await next_run(q, polls, clock, 2, 600)
    assert polls.fires == [0, 3600]


async def test_what_is_gone_cannot_be_paused_or_run(q: TinyQ, polls: Polls) -> None:
    schedule = await q.schedule(polls.task, 7, when=Every(3600), key="7")
    await schedule.remove()
    for verb in (schedule.pause, schedule.resume, schedule.run_now):
        with pytest.raises(JobNotFound, match="no recurring job poll with key '7' any more"):
            await verb()
    await schedule.remove()


async def test_schedules_lists_functions_and_recurring_jobs_by_task_and_key(q: TinyQ, polls: Polls) -> None:
    @q.every(60, name="refresh")
    async def refresh() -> None: ...

    for n in range(5):
        await q.schedule(polls.task, n, when=Every(60), key=f"sub:{n}")
    assert [(s.name, s.key) for s in await q.schedules(limit=3)] == [("refresh", None), ("poll", "sub:0"), ("poll", "sub:1")]
    assert [s.key for s in await q.schedules(polls.task)] == [f"sub:{n}" for n in range(5)]
    assert [s.key for s in await q.schedules(key="sub:3")] == ["sub:3"]
    assert [s.name for s in await q.schedules("refresh")] == ["refresh"]


async def test_immediate_begins_with_the_fire_time_that_has_passed_last(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    await q.schedule(polls.task, 7, when=Every(10, offset=5), key="7", immediate=True)
    await next_run(q, polls, clock, 1, 0)
    assert polls.fires == [-5]
    await q.schedule(polls.task, 7, when=Every(10, offset=5), key="7", immediate=True)
    await next_run(q, polls, clock, 2)
    assert polls.fires == [-5, 5]


# With a database


async def test_it_goes_on_after_a_restart_and_runs_the_fire_time_that_was_missed(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    first = await open_file()
    polls = Polls(first, clock)
    await first.schedule(polls.task, 7, when=Every(10), key="7")
    await next_run(first, polls, clock, 1)
    await first.stop()
    clock.block(23)
    second = await open_file()
    polls = Polls(second, clock)
    await next_run(second, polls, clock, 1, 0)
    assert 0 <= polls.starts[0] - polls.fires[0] < 10  # the latest that has passed when it starts
    await eventually(lambda: rows(file, "state") == [("pending",)])  # its run has been written
    assert (await only(second)).stats.missed >= 1


async def test_two_processes_run_each_fire_time_once(open_file: Open, clock: FakeClock) -> None:
    first, second = await open_file(), await open_file()
    polls = Polls(first, clock)
    await first.schedule(polls.task, 7, when=Every(10), key="7")
    await second.schedule(second.task(name="poll")(polls.poll), 7, when=Every(10), key="7")
    for n in range(1, 6):
        await next_run(first, polls, clock, n)
    assert polls.fires == [10, 20, 30, 40, 50]


async def test_a_run_whose_worker_was_lost_is_repeated_and_the_next_fire_time_follows(
    open_file: Open, clock: FakeClock, file: Path
) -> None:
    q = await open_file(lease=4)
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        now = int(clock.time()) + 60_000_000
        db.execute(
            "UPDATE tinyq_jobs SET state = 'running', ready = NULL, worker = 'gone', lease = ?, claim_no = 1, attempts = 1",
            (now,),
        )
    await next_run(q, polls, clock, 2)
    assert polls.calls == [(7, 60, 2), (7, 120, 1)]


async def test_a_cancel_that_comes_too_late_for_one_run_leaves_the_next_alone(
    open_file: Open, clock: FakeClock, file: Path
) -> None:
    q = await open_file(lease=3600)  # so that no renewal sees it while the run goes on
    polls = Polls(q, clock)
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    edit(file, "UPDATE tinyq_jobs SET cancel_at = ?", clock.time())  # as another process does that asks for it
    await eventually(lambda: rows(file, "cancel_at, state") == [(None, "pending")], clock, 0.5)
    await next_run(q, polls, clock, 2)
    assert polls.fires == [10, 20]


@pytest.mark.parametrize("durable", [True, False])
async def test_scheduled_as_durable_or_not_it_is_one_job_all_the_same(open_file: Open, clock: FakeClock, durable: bool) -> None:
    q = await open_file()
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(10), key="7", durable=durable)
    job = await q.schedule(polls.task, 8, when=Every(10), key="7", durable=not durable)
    assert not job.created
    await next_run(q, polls, clock, 2)
    assert polls.calls == [(8, 10, 1), (8, 20, 1)]
    await only(q)


async def test_it_is_one_row_however_often_it_has_run(open_file: Open, clock: FakeClock, file: Path) -> None:
    q = await open_file()
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(1), key="7")
    await next_run(q, polls, clock, 20)
    assert len(rows(file, "seq")) == 1
    assert rows(file, "claim_no")[0][0] >= 20


# What is refused


@pytest.mark.parametrize("option", [{"delay": 1}, {"expires": 1}, {"on_conflict": "raise"}])
async def test_options_that_say_when_are_refused(q: TinyQ, polls: Polls, option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(option))} does not go with a recurring job"):
        await q.schedule(polls.task, 7, when=Every(1), key="7", **option)
    assert (await q.stats()).count() == 0


@pytest.mark.parametrize("when", [60, "* * * * *", None])
async def test_a_rule_that_is_none_is_refused(q: TinyQ, polls: Polls, when: Any) -> None:
    with pytest.raises(TypeError, match=r"when is .*: give tinyq\.Every"):
        await q.schedule(polls.task, 7, when=when, key="7")


async def test_arguments_that_the_handler_does_not_take_are_refused(q: TinyQ, polls: Polls) -> None:
    with pytest.raises(TypeError, match="does not take these arguments"):
        await q.schedule(polls.task, when=Every(1), key="7")
    assert (await q.stats()).count() == 0


async def test_many_in_memory_are_no_full_queue(clock: FakeClock) -> None:
    async with TinyQ(clock=clock, max_pending=10) as q:
        polls = Polls(q, clock)
        for n in range(50):
            await q.schedule(polls.task, n, when=Every(3600), key=str(n))
        await q.enqueue(polls.task, 1, delay=10)
        assert (await q.stats()).count() == 51
