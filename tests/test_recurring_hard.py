"""Recurring jobs under what can happen to them: retries that outlast a policy, lost workers, changes while they run, clocks."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from clock import FakeClock
from conftest import OpenAt
from helpers import Notes, Open, edit, eventually, rows, stopped_at_once
from test_recurring import Polls, next_run, only

import tinyq
from tinyq import Cancel, Cron, Every, Job, JobFailed, RecurringJob, Retry, Snooze, State, TinyQ


def id_of(recurring: RecurringJob) -> str:
    return tinyq.id_text(recurring._row.id)


@pytest.fixture
async def polls(q: TinyQ, clock: FakeClock) -> Polls:
    return Polls(q, clock)


# Retries and policies


@pytest.mark.parametrize("options", [{"misfire": "skip"}, {"misfire_grace": 3}, {"misfire": "all", "misfire_grace": 3}, {}])
async def test_a_retry_is_not_too_late_for_its_fire_time(
    q: TinyQ, polls: Polls, clock: FakeClock, options: dict[str, Any]
) -> None:
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(60), key="7", retry=[20, 20], **options)
    await next_run(q, polls, clock, 4)
    assert polls.calls == [(7, 60, 1), (7, 60, 2), (7, 60, 3), (7, 120, 1)]
    assert (await only(q)).stats.missed == 0


async def test_a_snooze_is_not_too_late_for_its_fire_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = Snooze(20)
    await q.schedule(polls.task, 7, when=Every(60), key="7", misfire="skip")
    await next_run(q, polls, clock, 1)
    polls.error = None
    await next_run(q, polls, clock, 3)
    assert polls.calls == [(7, 60, 1), (7, 60, 1), (7, 120, 1)]
    assert (await only(q)).stats.missed == 0


async def test_resumed_while_it_waited_for_a_retry_it_has_all_its_attempts_again(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    polls.error = ValueError("down")
    job = await q.schedule(polls.task, 7, when=Every(60), key="7", retry=[40, 40])
    await next_run(q, polls, clock, 1)
    await job.pause()
    await clock.advance(100)
    await job.resume()
    await next_run(q, polls, clock, 2)
    fire = polls.fires[1]
    assert fire > 60 and polls.calls[1] == (7, fire, 1)


async def test_a_rule_changed_while_it_waits_for_a_retry_begins_with_the_first_attempt(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(60), key="7", retry=[50, 50])
    await next_run(q, polls, clock, 1)
    await q.schedule(polls.task, 7, when=Every(600), key="7", retry=[50, 50])
    await next_run(q, polls, clock, 2, 5)
    assert polls.calls[1] == (7, 600, 1)


async def test_a_retry_after_a_change_of_arguments_takes_the_new_ones(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(600), key="7", retry=[50, 50])
    await next_run(q, polls, clock, 1, 5)
    await q.schedule(polls.task, 8, when=Every(600), key="7", retry=[50, 50])
    await next_run(q, polls, clock, 2, 5)
    assert polls.calls == [(7, 600, 1), (8, 600, 2)]


async def test_expires_of_the_task_does_not_end_it(q: TinyQ, clock: FakeClock) -> None:
    polls = Polls(q, clock, expires=5)
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    await next_run(q, polls, clock, 2)
    assert polls.fires == [60, 120]


async def test_a_timeout_is_a_failure_of_this_fire_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.seconds = 3600
    await q.schedule(polls.task, 7, when=Every(60), key="7", timeout=5, retry=False)
    await next_run(q, polls, clock, 2)
    assert polls.fires == [60, 120]
    assert (await only(q)).stats.failed >= 1


# The on_dead hooks


class Heard:
    """What the on_dead hooks of a TinyQ were told, as of the moment of each call."""

    def __init__(self, q: TinyQ) -> None:
        self.jobs: list[Job[Any]] = []
        self.told: list[tuple[str, State, int, str | None, str | None]] = []
        q.on_dead(self.note)

    async def note(self, job: Job[Any]) -> None:
        self.jobs.append(job)
        self.told.append((job.task, job.status, job.attempts, job.error, job.reason))


async def test_the_on_dead_hooks_hear_of_each_fire_time_that_has_failed_for_good(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    heard = Heard(q)
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(60), key="7", retry=[5])
    began = clock.now()
    for n in (1, 2):
        await next_run(q, polls, clock, 2 * n)
        await eventually(lambda n=n: len(heard.told) == n)  # type: ignore[misc]
    assert heard.told == [("poll", State.DEAD, 2, "ValueError: down", "no attempts left")] * 2
    assert [job.run_at >= began + timedelta(seconds=60 * n + 5) for n, job in enumerate(heard.jobs, 1)] == [True] * 2
    assert "ValueError: down" in (heard.jobs[0].traceback or "")
    with pytest.raises(JobFailed, match="down"):
        await heard.jobs[0].result(5)


async def test_the_on_dead_hooks_are_not_called_while_there_are_attempts_nor_for_what_is_given_up(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    heard = Heard(q)
    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(10), key="7", retry=[25])
    await next_run(q, polls, clock, 3)
    polls.error = Cancel("over")
    await next_run(q, polls, clock, 4)
    await q.drain()
    assert heard.told == []


async def test_the_on_dead_hooks_hear_of_what_was_unscheduled_while_it_ran_and_failed(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    heard = Heard(q)
    polls.seconds, polls.error = 3, ValueError("down")
    await q.schedule(polls.task, 7, when=Every(60), key="7", retry=False)
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    await q.unschedule(polls.task, key="7")
    await next_run(q, polls, clock, 1)
    await eventually(lambda: heard.told)
    assert heard.told == [("poll", State.DEAD, 1, "ValueError: down", "no attempts left")]


async def test_a_hook_may_requeue_or_look_up_a_job_that_comes_again_anyway(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    found: list[tuple[int, State]] = []

    @q.on_dead
    async def hook(job: Job[Any]) -> None:
        found.append((await q.requeue(job.id), (await q.get(job.id)).status))

    polls.error = ValueError("down")
    await q.schedule(polls.task, 7, when=Every(10), key="7", retry=False)
    await next_run(q, polls, clock, 1)
    await eventually(lambda: found)
    assert found == [(0, State.PENDING)]
    polls.error = None
    await next_run(q, polls, clock, 2)
    assert polls.calls == [(7, 10, 1), (7, 20, 1)]


async def test_requeued_after_it_was_cancelled_it_waits_for_its_next_fire_time(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    job = await q.get(id_of(await q.schedule(polls.task, 7, when=Every(60), key="7")))
    await next_run(q, polls, clock, 1)
    assert await job.cancel()
    await clock.advance(130)
    assert await q.requeue(job.id) == 1
    assert (await only(q)).stats.next == polls.began + timedelta(seconds=240)
    await next_run(q, polls, clock, 3)
    assert polls.calls == [(7, 60, 1), (7, 240, 1), (7, 300, 1)]


async def test_requeued_after_it_was_paused_and_cancelled_it_stays_paused(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    recurring = await q.schedule(polls.task, 7, when=Every(60), key="7")
    await recurring.pause()
    job = await q.get(id_of(recurring))
    assert await job.cancel()
    assert await q.requeue(job.id) == 1
    await clock.advance(130)
    assert polls.calls == []
    await (await only(q)).resume()
    await next_run(q, polls, clock, 1)
    assert polls.calls == [(7, 180, 1)]


async def test_the_on_dead_hooks_hear_of_a_fire_time_whose_worker_was_lost_once_too_often(
    open_file: Open, clock: FakeClock, file: Path
) -> None:
    q = await open_file(lease=4)
    polls, heard = Polls(q, clock), Heard(q)
    await q.schedule(polls.task, 7, when=Every(600), key="7", retry=Retry(max_attempts=2, base=1))
    lose(file, clock, attempts=2)
    await eventually(lambda: heard.told, clock, 1)
    assert heard.told == [("poll", State.DEAD, 2, "worker lost", "worker lost")]
    await next_run(q, polls, clock, 1)
    assert len(heard.told) == 1 and polls.calls[0][2] == 1


# Removed, changed, run by hand, while it runs


async def test_unscheduled_while_it_runs_and_fails_it_is_not_tried_again(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.seconds, polls.error = 3, ValueError("down")
    await q.schedule(polls.task, 7, when=Every(60), key="7", retry=[5, 5])
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    assert await q.unschedule(polls.task, key="7") is True
    assert await q.unschedule(polls.task, key="7") is False
    await next_run(q, polls, clock, 1)
    await clock.advance(200)
    assert polls.fires == [60]
    assert (await q.stats()).count(state="pending") == 0


async def test_scheduled_again_right_after_it_was_unscheduled_while_it_runs_it_goes_on(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    await q.unschedule(polls.task, key="7")
    await q.schedule(polls.task, 8, when=Every(60), key="7")
    await next_run(q, polls, clock, 2)
    assert polls.calls == [(7, 60, 1), (8, 120, 1)]


async def test_a_job_scheduled_with_another_rule_while_it_runs_is_answered_with_that_rule(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    changed = await q.schedule(polls.task, 7, when=Cron("0 0 * * *"), key="7")
    assert changed.rule == Cron("0 0 * * *")


async def test_a_queue_changed_while_it_runs_takes_no_slot_from_any(clock: FakeClock, open_at: OpenAt, db: Path | None) -> None:
    q = await open_at(db, queues={"a": 1, "b": 1})
    polls = Polls(q, clock)
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(60), key="7", queue="a")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    await q.schedule(polls.task, 7, when=Every(60), key="7", queue="b")
    await next_run(q, polls, clock, 2)
    async with asyncio.timeout(20):
        while (await q.stats()).count(state="running"):
            await clock.advance(1)
    assert q._engine is not None
    assert q._engine.crew._slots.named == {"a": 1, "b": 1}


async def test_run_by_hand_while_it_runs_it_starts_beside(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.seconds = 3
    schedule = await q.schedule(polls.task, 7, when=Every(60), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    job = await schedule.run_now()
    await eventually(lambda: len(polls.calls) == 2)
    result = asyncio.create_task(job.result(20))
    await eventually(result.done, clock, 1)
    await result
    await next_run(q, polls, clock, 3)
    assert polls.fires[0] == 60 and polls.fires[2] == 120


async def test_run_by_hand_while_it_runs_it_has_the_arguments_that_it_was_given_last(
    q: TinyQ, polls: Polls, clock: FakeClock
) -> None:
    polls.seconds = 20
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    await eventually(lambda: len(polls.calls) == 1, clock, 1)
    job = await q.schedule(polls.task, 8, when=Every(60), key="7")
    await job.run_now()
    await eventually(lambda: len(polls.calls) == 2, clock, 0.1)
    assert polls.numbers == [7, 8] and polls.most == 2


async def test_run_by_hand_after_a_failure_it_begins_without_a_history(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    polls.error = ValueError("down")
    schedule = await q.schedule(polls.task, 7, when=Every(60), key="7", retry=False)
    await next_run(q, polls, clock, 1)
    polls.error = None
    job = await schedule.run_now()
    await job.result(20)
    assert polls.calls[1][2] == 1 and (await only(q)).stats.fired == 1


async def test_paused_while_it_is_due_it_does_not_start(clock: FakeClock, open_at: OpenAt, db: Path | None) -> None:
    q = await open_at(db, concurrency=1)
    polls, other = Polls(q, clock), asyncio.Event()

    @q.task
    async def blocks() -> None:
        await other.wait()

    schedule = await q.schedule(polls.task, 7, when=Every(10), key="7")
    await q.enqueue(blocks)
    await eventually(lambda: q._engine is not None and len(q._engine.crew.running) == 1)
    await clock.advance(15)
    await schedule.pause()
    other.set()
    await clock.advance(30)
    await eventually(lambda: q._engine is not None and not q._engine.crew.running)
    assert polls.calls == []
    await schedule.resume()
    await next_run(q, polls, clock, 1)
    assert polls.fires[0] >= 50


# Lost workers


@pytest.mark.parametrize("on_lost", ["retry", "dead"])
async def test_a_worker_lost_once_does_not_keep_it_from_running_again(
    open_file: Open, clock: FakeClock, file: Path, on_lost: Any
) -> None:
    q = await open_file(lease=4)
    polls = Polls(q, clock, on_lost=on_lost)
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    lose(file, clock)
    await next_run(q, polls, clock, 3)
    assert polls.fires[-3:] == ([120, 180, 240] if on_lost == "dead" else [60, 120, 180])
    assert rows(file, "lost") == [(0,)]


async def test_a_fire_time_on_which_workers_die_is_given_up_and_the_next_one_runs(
    open_file: Open, clock: FakeClock, file: Path
) -> None:
    q = await open_file(lease=4)
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(600), key="7", retry=Retry(max_attempts=2, base=1))
    lose(file, clock, attempts=2)
    await next_run(q, polls, clock, 1)
    assert polls.calls == [(7, polls.fires[0], 1)]
    assert (await only(q)).stats.failed == 1


def lose(file: Path, clock: FakeClock, attempts: int = 1) -> None:
    """As if a worker had claimed the job for its fire time and died."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute(
            "UPDATE tinyq_jobs SET state = 'running', ready = NULL, worker = 'gone', lease = ?, claim_no = 1, attempts = ?",
            (clock.time() + 1_000_000, attempts),
        )


# Rules that fail


async def test_a_job_whose_rule_fails_is_stopped_alone(
    open_file: Open, clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    q = await open_file()
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await q.schedule(polls.task, 8, when=Every(10), key="8")
    edit(file, "UPDATE tinyq_jobs SET recurrence = replace(recurrence, 'every 10.0', 'never 10.0') WHERE key LIKE '%7'")
    await next_run(q, polls, clock, 3)
    assert [number for number, _, _ in polls.calls] == [8, 8, 8]
    told = [line for line in caplog.messages if "'never 10.0 0.0'" in line]
    assert len(told) == 1


@pytest.mark.parametrize("bad", ["replace(recurrence, 'every 10.0', 'never 10.0')", "'no JSON'", "'[1, 2]'"])
async def test_a_rule_that_turns_bad_while_it_runs_does_not_hold_up_the_outcomes_of_others(
    open_file: Open, clock: FakeClock, file: Path, bad: str
) -> None:
    q = await open_file()
    polls = Polls(q, clock)
    polls.seconds = 3
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await q.schedule(polls.task, 8, when=Every(10), key="8")
    await eventually(lambda: len(polls.calls) == 2, clock, 1)
    edit(file, f"UPDATE tinyq_jobs SET recurrence = {bad} WHERE key LIKE '%7'")
    await eventually(lambda: (7, "its rule fails") in rows(file, "payload ->> '$[0][0]', reason"), clock, 1)
    await eventually(lambda: len(polls.calls) == 4, clock, 1)
    assert [number for number, _, _ in polls.calls][2:] == [8, 8]
    await q.schedule(polls.task, 9, when=Every(10), key="7")
    await eventually(lambda: 9 in polls.numbers, clock, 1)


# Clocks


@pytest.mark.parametrize("seconds", [-1, -59 * 60, -3 * 3600, -86_400])
async def test_in_memory_it_keeps_its_pace_when_the_wall_clock_is_set_back(clock: FakeClock, seconds: float) -> None:
    q = TinyQ(clock=clock)
    polls = Polls(q, clock)
    await q.start()
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await clock.advance(35)
    clock.step_wall(seconds)
    await clock.advance(120)
    assert 11 <= len(polls.calls) <= 15
    assert len(set(polls.fires)) == len(polls.fires)
    await stopped_at_once(q, clock)


async def test_in_memory_a_job_that_runs_while_the_wall_clock_is_set_back_keeps_its_pace(clock: FakeClock) -> None:
    q = TinyQ(clock=clock)
    polls = Polls(q, clock)
    polls.seconds = 5
    await q.start()
    await q.schedule(polls.task, 7, when=Every(10), key="7")
    await q.schedule(q.task(name="other")(Notes(clock).tick), when=Every(1), key="other")
    await clock.advance(32)
    clock.step_wall(-3600)
    await clock.advance(30)
    assert polls.fires == [10, 20, 30, *(n - 3600 for n in (40, 50, 60))]
    await stopped_at_once(q, clock)


async def test_after_the_wall_clock_was_set_back_a_durable_one_fires_when_it_says_and_repeats_no_fire_time(
    open_file: Open, clock: FakeClock
) -> None:
    q = await open_file()
    polls = Polls(q, clock)
    await q.schedule(polls.task, 7, when=Every(60), key="7")
    await next_run(q, polls, clock, 1)
    clock.step_wall(-3600)
    upcoming = [polls.began + timedelta(seconds=seconds) for seconds in (120, 180)]
    job = await only(q)
    assert (job.stats.next, job.next_fires(2)) == (upcoming[0], upcoming)
    await job.pause()
    await job.resume()
    assert (job.stats.next, job.next_fires(2)) == (upcoming[0], upcoming)


@pytest.mark.parametrize("seconds", [1, 59 * 60, 3 * 3600, 86_400])
async def test_in_memory_it_goes_on_within_a_minute_when_the_wall_clock_is_set_forward(clock: FakeClock, seconds: float) -> None:
    q = TinyQ(clock=clock)
    polls = Polls(q, clock)
    await q.start()
    await q.schedule(polls.task, 7, when=Every(3600), key="7")
    await clock.advance(1)
    clock.step_wall(seconds)
    await clock.advance(60)
    reached = seconds + 61 >= 3600
    assert len(polls.calls) == reached
    await clock.advance(3600)
    assert len(polls.calls) == reached + 1
    await stopped_at_once(q, clock)


# What it can be given


async def test_a_key_has_up_to_255_characters_of_any_kind(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    keys = ["k" * 255, "\u21bb 7", "ein/Schlüssel 'mit' \"allem\" %_;--", "🎈" * 255]
    for n, key in enumerate(keys):
        await q.schedule(polls.task, n, when=Every(10), key=key)
        assert (await q.schedule(polls.task, n, when=Every(10), key=key)).created is False
    assert [s.key for s in await q.schedules()] == keys
    await next_run(q, polls, clock, 4)
    for key in keys:
        [found] = await q.schedules(polls.task, key)
        assert found.key == key
        await found.remove()
    with pytest.raises(ValueError, match="key is"):
        await q.schedule(polls.task, 1, when=Every(10), key="k" * 256)


async def test_a_task_known_by_name_only_is_scheduled_for_those_who_have_it(
    open_file: Open, clock: FakeClock, file: Path
) -> None:
    web = await open_file(worker=False)
    await web.schedule("poll", 7, when=Every(10), key="7", durable=True)
    worker = await open_file()
    polls = Polls(worker, clock)
    await next_run(worker, polls, clock, 2)
    assert polls.fires == [10, 20]
    assert await web.unschedule("poll", key="7") is True
    assert await worker.schedules() == []


async def test_arguments_arrive_as_their_annotations_say(q: TinyQ, clock: FakeClock) -> None:
    seen: list[tuple[object, dict[str, str]]] = []

    @q.task(name="typed")
    async def typed(id: UUID) -> None:
        seen.append((id, dict(tinyq.current_job().headers)))

    q.on_enqueue(lambda headers: headers.update(trace="1"))
    id = UUID(int=7)
    await q.schedule(typed, id, when=Every(10), key="7", headers={"tenant": "a"})
    await eventually(lambda: len(seen) == 2, clock, 1)
    assert [given for given, _ in seen] == [id, id]
    assert all(headers["tenant"] == "a" for _, headers in seen)


async def test_a_fire_time_may_be_scheduled_from_a_handler_and_end_itself(q: TinyQ, polls: Polls, clock: FakeClock) -> None:
    @q.task(name="starts")
    async def starts() -> None:
        await q.schedule(polls.task, 7, when=Every(10), key="7")

    @q.task(name="once")
    async def once() -> None:
        await q.unschedule("once", key="o")

    await (await q.enqueue(starts)).result(20)
    await q.schedule(once, when=Every(10), key="o")
    await next_run(q, polls, clock, 2)
    assert [s.key for s in await q.schedules()] == ["7"]


async def test_namespaces_keep_their_recurring_jobs_apart(clock: FakeClock, open_at: OpenAt, file: Path) -> None:
    one, two = await open_at(file, namespace="one"), await open_at(file, namespace="two")
    both = [Polls(one, clock), Polls(two, clock)]
    for n, (q, polls) in enumerate(zip((one, two), both, strict=True)):
        await q.schedule(polls.task, n, when=Every(10), key="same")
    await eventually(lambda: all(len(polls.calls) >= 2 for polls in both), clock, 1)
    assert [{number for number, _, _ in polls.calls} for polls in both] == [{0}, {1}]
    await one.unschedule("poll", key="same")
    assert (len(await one.schedules()), len(await two.schedules())) == (0, 1)


async def test_a_renamed_task_takes_its_recurring_jobs_along(q: TinyQ, clock: FakeClock, db: Path | None) -> None:
    old = Polls(q, clock)
    await q.schedule(old.task, 7, when=Every(10), key="7")
    await next_run(q, old, clock, 1)
    if db is None:
        return  # nothing outlives the process that could have another name for it
    await stopped_at_once(q, clock)
    again = TinyQ(db, clock=clock)
    calls: list[int] = []

    @again.task(name="renamed", aliases=["poll"])
    async def renamed(number: int) -> None:
        calls.append(number)

    await again.start()
    assert [s.key for s in await again.schedules(renamed)] == ["7"]
    answer = await again.schedule(renamed, 7, when=Every(10), key="7")
    assert (answer.created, answer.name) == (False, "renamed")
    assert [s.name for s in await again.schedules()] == ["renamed"]
    await eventually(lambda: len(calls) == 2, clock, 1)
    assert await again.unschedule(renamed, key="7") is True
    assert await again.schedules() == []
    await stopped_at_once(again, clock)


async def test_a_process_without_slots_for_the_queue_leaves_it_to_others(clock: FakeClock, open_at: OpenAt, file: Path) -> None:
    idle, busy = await open_at(file, queues={"polls": 0}), await open_at(file)
    both = [Polls(q, clock, queue="polls") for q in (idle, busy)]
    await idle.schedule(both[0].task, 7, when=Every(10), key="7")
    await next_run(busy, both[1], clock, 3)
    assert both[0].calls == []


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("misfire", ["latest", "all"])
async def test_in_memory_it_fires_no_more_once_that_is_said(clock: FakeClock, stops: bool, misfire: Any) -> None:
    q = TinyQ(clock=clock)
    polls = Polls(q, clock)
    polls.seconds = 35
    await q.start()
    await q.schedule(polls.task, 7, when=Every(10), key="7", misfire=misfire)
    await q.schedule(polls.task, 8, when=Every(60), key="8")
    await q.enqueue(clock.wait, asyncio.Event(), 200)
    await clock.advance(12)
    quiet = asyncio.create_task(q.stop(grace=600) if stops else q.quiesce())
    await clock.advance(300)
    assert quiet.done() and polls.ended == 1
    await stopped_at_once(q, clock)


@pytest.mark.parametrize("grace", [0.0, 3600.0])
async def test_in_memory_it_is_neither_promoted_nor_reported_lost_at_shutdown(
    clock: FakeClock, file: Path, caplog: pytest.LogCaptureFixture, grace: float
) -> None:
    q = TinyQ(file, clock=clock)
    polls = Polls(q, clock)
    await q.start()
    await q.schedule(polls.task, 7, when=Every(10), key="7", durable=False)
    await next_run(q, polls, clock, 1)
    await q.stop(grace=grace)
    assert rows(file, "seq") == []
    assert not [line for line in caplog.messages if "lost" in line]


async def test_a_job_with_an_older_definition_of_its_own_never_gets_two_rows(
    open_file: Open, clock: FakeClock, file: Path
) -> None:
    both = [await open_file(), await open_file()]
    all_polls = [Polls(q, clock) for q in both]
    for n in range(20):
        await asyncio.gather(
            *(q.schedule(polls.task, n, when=Every(10), key="7") for q, polls in zip(both, all_polls, strict=True))
        )
    assert len(rows(file, "seq")) == 1


def late(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "missed" in line]


@pytest.mark.parametrize("options", [{}, {"misfire": "skip"}])
async def test_what_many_jobs_missed_in_one_delay_is_said_in_one_line(
    clock: FakeClock, open_at: OpenAt, db: Path | None, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    q = await open_at(db, concurrency=100)
    polls = Polls(q, clock)
    for n in range(30):
        await q.schedule(polls.task, n, when=Every(10), key=str(n), **options)
    clock.block(64)
    await clock.advance(0)
    await eventually(lambda: len(polls.calls) >= (0 if options else 30), clock, 1)
    await next_run(q, polls, clock, 30)
    assert sum([s.stats.missed for s in await q.schedules()]) >= 150
    await eventually(lambda: late(caplog))  # which comes after what is written
    assert 1 <= len(late(caplog)) <= 2
