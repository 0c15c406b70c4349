"""What every store does, asked of each of them."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

import tinyq
from tinyq import JobRow, KeyConflict, MemoryStore, OnConflict, Room, Settlement, SQLiteStore, State, Store, Terms, new_id

SECOND = 1_000_000
NOW = 1_767_268_800 * SECOND  # noon of the first day of 2026
LEASE = NOW + 30 * SECOND
RULES: Sequence[OnConflict] = get_args(OnConflict)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SQLiteStore(str(tmp_path / "jobs.db"))
    try:
        await made.open()
        yield made
    finally:
        await made.close()


def job(task: str = "send", **fields: Any) -> JobRow:
    row = JobRow(new_id(NOW), task, "default", 0, NOW, NOW, payload="[[],{}]", durable=True)
    for name, value in fields.items():
        setattr(row, name, value)
    return row


def room(
    shared: int = 10,
    tasks: Mapping[str, bool] | None = None,
    *,
    named: Mapping[str, int] | None = None,
    threads: int = 10,
    fragile: int = 1,
) -> Room:
    return Room(shared, named or {}, threads, fragile, tasks or {"send": False})


async def claim(store: Store, where: Room | None = None, now: int = NOW, *, worker: str = "w1") -> list[JobRow]:
    """Copies of what was claimed, as of now: rows in memory go on changing."""
    claimed = await store.claim(where or room(), worker, now + 30 * SECOND, now)
    return [row.but() for row in claimed.rows]


async def running(store: Store, **fields: Any) -> JobRow:
    """A job that has just been claimed, the only one there is to claim."""
    await store.insert([job(**fields)], NOW)
    [row] = await claim(store)
    return row


async def read(store: Store, row: JobRow) -> JobRow:
    [found] = await store.get([row.id])
    return found


def outcome(row: JobRow, state: State = State.DONE, **changes: Any) -> Settlement:
    """What a worker writes about a row that it has claimed."""
    fields: dict[str, Any] = {name: getattr(row, name, None) for name in Settlement.__annotations__}
    return Settlement(**(fields | {"state": state, "keep": True} | changes))


async def settle(store: Store, row: JobRow, state: State = State.DONE, now: int = NOW, **changes: Any) -> State | None:
    return (await store.settle([outcome(row, state, **changes)], now)).get(row.seq)


async def fragile_rows(store: Store, *rows: JobRow) -> list[JobRow]:
    """Make these the pending jobs on which a worker has died."""
    await store.insert(rows, NOW)
    taken = await claim(store, room(len(rows), {row.task: False for row in rows}))
    await store.reclaim([outcome(row, State.PENDING, lost=1, run_at=NOW) for row in taken], LEASE + 1)
    return taken


def numbers(counts: Sequence[tinyq.Count]) -> dict[tuple[str, str, State], tuple[int, int]]:
    return {(c.queue, c.task, c.state): (c.count, c.due) for c in counts}


# insert and get


async def test_a_row_reads_back_as_it_was_inserted(store: Store) -> None:
    fields: dict[str, Any] = {
        "queue": "emails", "priority": -3, "run_at": NOW + 7, "created": NOW - 5,
        "payload": '[[1],{"a":"ß"}]', "options": '{"timeout":3}', "headers": '{"traceparent":"00-1"}', "key": "k",
        "expires": NOW + 99, "attempts": 2, "snoozes": 3, "interruptions": 4,
    }  # fmt: skip
    row = job("send", **fields)
    await store.insert([row], NOW)
    found = await read(store, row)
    assert {name: getattr(found, name) for name in fields} == fields
    assert (found.id, found.task, found.state, found.lease, found.worker) == (row.id, "send", State.PENDING, None, None)


async def test_insert_answers_for_each_row_in_the_order_given(store: Store) -> None:
    rows = [job(), job(key="a"), job("other"), job(key="b")]
    answers = await store.insert(rows, NOW)
    assert [(answer.row.id, answer.verdict) for answer in answers] == [(row.id, "created") for row in rows]


async def test_rows_of_one_batch_queue_up_in_the_order_given(store: Store) -> None:
    rows = [job(key="a"), job(), job(key="b"), job(schedule="s", fire_time=NOW), job()]
    await store.insert(rows, NOW)
    assert [row.id for row in await claim(store)] == [row.id for row in rows]


async def test_get_answers_the_rows_that_exist(store: Store) -> None:
    first, second = job(), job()
    await store.insert([first, second], NOW)
    assert [row.id for row in await store.get([second.id, new_id(NOW), b"", first.id])] == [second.id, first.id]


async def test_empty_batches_change_nothing(store: Store) -> None:
    assert list(await store.insert([], NOW)) == []
    assert dict(await store.extend([], LEASE)) == {}
    assert dict(await store.settle([], NOW)) == {}
    assert dict(await store.reclaim([], NOW)) == {}
    assert dict(await store.cancel([], "why", None, NOW)) == {}
    assert list(await store.requeue([], NOW)) == []
    assert list(await store.get([])) == []
    assert list(await store.counts(NOW)) == []


# keys


async def with_key(store: Store, situation: str) -> dict[str, bytes]:
    """Make jobs with the key "k" exist in the given states; answers their ids."""
    ids: dict[str, bytes] = {}
    if situation in ("running", "both"):
        ids["running"] = (await running(store, key="k")).id
    if situation in ("pending", "both"):
        row = job(key="k", on_conflict="queue")
        await store.insert([row], NOW)
        ids["pending"] = row.id
    return ids


@pytest.mark.parametrize(
    ("situation", "rule", "verdict", "led_to"),
    [
        *(("neither", rule, "created", "new") for rule in RULES),
        ("pending", "reuse", "existing", "pending"),
        ("pending", "queue", "existing", "pending"),
        ("pending", "replace", "replaced", "pending"),
        ("running", "reuse", "existing", "running"),
        ("running", "queue", "created", "new"),
        ("running", "replace", "created", "new"),
        ("both", "queue", "existing", "pending"),
        ("both", "replace", "replaced", "pending"),
    ],
)
async def test_a_key_leads_to_the_job_that_its_rule_names(
    store: Store, situation: str, rule: OnConflict, verdict: str, led_to: str
) -> None:
    ids = await with_key(store, situation)
    new = job(key="k", on_conflict=rule)
    [answer] = await store.insert([new], NOW)
    assert answer.verdict == verdict
    assert answer.row.id == (ids | {"new": new.id})[led_to]
    assert len(await store.get([new.id])) == (led_to == "new")


async def test_reuse_leads_to_one_of_both_and_stores_nothing(store: Store) -> None:
    ids = await with_key(store, "both")
    new = job(key="k", on_conflict="reuse")
    [answer] = await store.insert([new], NOW)
    assert answer.verdict == "existing"
    assert answer.row.id in ids.values()
    assert await store.get([new.id]) == []


@pytest.mark.parametrize("situation", ["pending", "running", "both"])
async def test_raise_refuses_a_key_that_is_taken(store: Store, situation: str) -> None:
    await with_key(store, situation)
    new = job(key="k", on_conflict="raise")
    with pytest.raises(KeyConflict, match="'k'"):
        await store.insert([new], NOW)
    assert await store.get([new.id]) == []


@pytest.mark.parametrize("rule", RULES)
async def test_a_key_belongs_to_one_task(store: Store, rule: OnConflict) -> None:
    await with_key(store, "both")
    [answer] = await store.insert([job("other", key="k", on_conflict=rule)], NOW)
    assert answer.verdict == "created"


@pytest.mark.parametrize("end", [State.DONE, State.DEAD, State.CANCELLED])
@pytest.mark.parametrize("rule", RULES)
async def test_a_finished_job_holds_no_key(store: Store, end: State, rule: OnConflict) -> None:
    old = await running(store, key="k")
    assert await settle(store, old, end, keep_until=LEASE) is end
    [answer] = await store.insert([job(key="k", on_conflict=rule)], NOW)
    assert answer.verdict == "created"


@pytest.mark.parametrize("starts", [False, True])
async def test_a_recurring_job_that_ended_is_not_requeued_beside_its_successor(store: Store, starts: bool) -> None:
    recurrence = tinyq.Recurrence(tinyq.Every(60).as_text(), "skip", "latest", None).as_text()
    old = await running(store, key="k", recurrence=recurrence, fire_time=NOW)
    assert await settle(store, old, State.CANCELLED, keep_until=LEASE) is State.CANCELLED
    await store.insert([job(key="k", recurrence=recurrence, fire_time=NOW)], NOW)
    if starts:
        await claim(store)
    with pytest.raises(KeyConflict, match="'k'"):
        await store.requeue([old.id], NOW)


async def recurring(store: Store, keys: str, seconds: float = 60) -> list[JobRow]:
    """Jobs that run for a fire time, not for the first time."""
    text = tinyq.Recurrence(tinyq.Every(seconds).as_text(), "skip", "latest", None).as_text()
    await store.insert([job(key=key, recurrence=text, fire_time=NOW, tally="9 1 0 0 2 0") for key in keys], NOW)
    return sorted(await claim(store), key=lambda row: row.key or "")


def ran(row: JobRow, **changes: Any) -> Settlement:
    """It was started as soon as it was claimed, and has nothing to say."""
    assert row.recurrence is not None
    return outcome(row, keep=False, ran=tinyq.Ran(NOW, NOW, 0, 0, row.recurrence), **changes)


async def test_recurring_jobs_that_are_done_wait_for_their_next_fire_times(store: Store) -> None:
    rows = [*await recurring(store, "abc"), *await recurring(store, "def", 90)]
    rows[0].claim_no -= 1  # claimed by another meanwhile
    states = await store.settle([ran(row) for row in rows], NOW + SECOND)
    assert states == {row.seq: State.PENDING for row in rows[1:]}
    found = await store.get([row.id for row in rows])
    assert [(row.run_at, row.fire_time, row.tally) for row in found[1:]] == [
        (at, at, f"10 1 0 0 2 {NOW}") for at in [NOW + 60 * SECOND] * 2 + [NOW + 90 * SECOND] * 3
    ]
    assert {(row.state, row.attempts, row.lease, row.cancel_at) for row in found[1:]} == {(State.PENDING, 0, None, None)}
    assert (found[0].state, found[0].tally) == (State.RUNNING, "9 1 0 0 2 0")


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        ("cancelled", (State.PENDING, NOW + 60 * SECOND, f"10 1 0 0 2 {NOW}", None)),
        ("rescheduled", (State.PENDING, NOW + 90 * SECOND, f"10 1 0 0 2 {NOW}", None)),
        ("paused", (State.PENDING, NOW + 60 * SECOND, f"10 1 0 0 2 {NOW}", None)),
        ("unscheduled", None),
    ],
)
async def test_what_befalls_a_recurring_job_while_it_runs_concerns_no_other(store: Store, meanwhile: str, expected: Any) -> None:
    rows = await recurring(store, "abc")
    match meanwhile:
        case "cancelled":
            await store.cancel([rows[1].id], "asked for", None, NOW)
        case "rescheduled":
            text = tinyq.Recurrence(tinyq.Every(90).as_text(), "skip", "latest", None).as_text()
            await store.insert([job(key="b", recurrence=text, fire_time=NOW)], NOW)
        case "paused":
            await store.hold(rows[1].id, True, NOW)
        case _:
            assert await store.unschedule("send", "b", NOW)
    await store.settle([ran(row) for row in rows], NOW + SECOND)
    first, *others, last = await store.get([row.id for row in rows])
    for row in (first, last):
        assert (row.state, row.run_at, row.tally) == (State.PENDING, NOW + 60 * SECOND, f"10 1 0 0 2 {NOW}")
    assert [(row.state, row.run_at, row.tally, row.cancel_at) for row in others] == ([expected] if expected else [])
    assert [row.ready == tinyq.PAUSED for row in others] == ([meanwhile == "paused"] if expected else [])


async def test_a_refused_key_stores_nothing_of_its_batch(store: Store) -> None:
    await with_key(store, "pending")
    batch = [job(), job(key="other"), job(key="k", on_conflict="raise"), job()]
    with pytest.raises(KeyConflict):
        await store.insert(batch, NOW)
    assert await store.get([row.id for row in batch]) == []


async def test_a_key_that_is_refused_within_its_own_batch_stores_nothing_of_it(store: Store) -> None:
    batch = [job(key="k", on_conflict="raise"), job(), job(key="k", on_conflict="raise")]
    with pytest.raises(KeyConflict):
        await store.insert(batch, NOW)
    assert await store.get([row.id for row in batch]) == []


async def test_rows_of_one_batch_see_each_others_keys(store: Store) -> None:
    first, second = job(key="k"), job(key="k")
    answers = await store.insert([first, second], NOW)
    assert [(answer.verdict, answer.row.id) for answer in answers] == [("created", first.id), ("existing", first.id)]


@pytest.mark.parametrize("rule", RULES)
async def test_of_many_that_insert_one_key_at_once_one_creates_it(store: Store, rule: OnConflict) -> None:
    inserts = [store.insert([job(key="k", on_conflict=rule)], NOW) for _ in range(40)]
    answers = await asyncio.gather(*inserts, return_exceptions=True)
    verdicts = [repr(type(a)) if isinstance(a, BaseException) else a[0].verdict for a in answers]
    otherwise = {"reuse": "existing", "queue": "existing", "replace": "replaced", "raise": repr(KeyConflict)}[rule]
    assert sorted(verdicts) == sorted(["created"] + [otherwise] * 39)
    assert len(await store.list(State.PENDING)) == 1


async def test_replace_gives_the_pending_job_new_arguments_and_time(store: Store) -> None:
    old = job(key="k", payload='[["old"],{}]', run_at=NOW + 50 * SECOND)
    await store.insert([old], NOW)
    fields: dict[str, Any] = {
        "payload": '[["new"],{}]',
        "run_at": NOW + 3 * SECOND,
        "queue": "fast",
        "priority": 7,
        "options": "{}",
    }
    await store.insert([job(key="k", on_conflict="replace", **fields)], NOW)
    found = await read(store, old)
    assert {name: getattr(found, name) for name in fields} == fields


async def test_a_job_that_is_replaced_while_it_waits_for_its_retry_begins_afresh(store: Store) -> None:
    old = await running(store, key="k")
    counted: dict[str, Any] = {"attempts": 5, "snoozes": 2, "interruptions": 3, "parked": NOW, "reason": "worker lost"}
    await settle(store, old, State.PENDING, **counted)
    await store.insert([job(key="k", on_conflict="replace", payload='[["new"],{}]')], NOW)
    found = await read(store, old)
    assert [getattr(found, name) for name in counted] == [0, 0, 0, None, None]


async def test_each_replacement_postpones_the_job(store: Store) -> None:
    await store.insert([job(key="k")], NOW)
    for delay in (1, 2, 3):
        now = NOW + (delay - 1) * SECOND
        await store.insert([job(key="k", on_conflict="replace", run_at=NOW + delay * SECOND)], now)
        assert await claim(store, now=now) == []
    [row] = await claim(store, now=NOW + 3 * SECOND)
    assert row.run_at == NOW + 3 * SECOND
    assert await claim(store, now=NOW + 9 * SECOND) == []


async def test_a_replacement_may_make_the_job_due(store: Store) -> None:
    old = job(key="k", run_at=NOW + 3600 * SECOND)
    await store.insert([old], NOW)
    await store.insert([job(key="k", on_conflict="replace", run_at=NOW)], NOW)
    assert [row.id for row in await claim(store)] == [old.id]


@pytest.mark.parametrize("rule", ["queue", "replace"])
async def test_a_successor_is_not_claimed_before_the_running_job_ends(store: Store, rule: OnConflict) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict=rule)
    await store.insert([second], NOW)
    assert await claim(store, now=NOW + 60 * SECOND) == []
    await settle(store, first, now=NOW + 60 * SECOND)
    assert [row.id for row in await claim(store, now=NOW + 60 * SECOND)] == [second.id]


async def test_a_replaced_successor_still_waits_for_the_running_job(store: Store) -> None:
    first = await running(store, key="k")
    for text in ("a", "b"):
        await store.insert([job(key="k", on_conflict="replace", payload=f'[["{text}"],{{}}]')], NOW)
        assert await claim(store, now=NOW + 60 * SECOND) == []
    await settle(store, first)
    assert [row.payload for row in await claim(store)] == ['[["b"],{}]']


@pytest.mark.parametrize("end", [State.DONE, State.DEAD, State.CANCELLED])
@pytest.mark.parametrize("keep", [True, False])
async def test_any_end_of_the_running_job_lets_its_successor_go(store: Store, end: State, keep: bool) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict="queue")
    await store.insert([second], NOW)
    await settle(store, first, end, keep=keep, keep_until=LEASE)
    assert [row.id for row in await claim(store)] == [second.id]


async def test_a_successor_that_is_let_go_keeps_its_own_time(store: Store) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict="queue", run_at=NOW + 60 * SECOND)
    await store.insert([second], NOW)
    await settle(store, first)
    claimed = await store.claim(room(), "w1", LEASE, NOW)
    assert (list(claimed.rows), claimed.next_at) == ([], NOW + 60 * SECOND)
    assert [row.id for row in await claim(store, now=NOW + 60 * SECOND)] == [second.id]


@pytest.mark.parametrize(("retry_at", "successor_at"), [(20, 50), (50, 20), (0, 50), (50, 0)])
async def test_a_retry_merges_with_the_successor_at_the_earlier_time(store: Store, retry_at: int, successor_at: int) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict="queue", run_at=NOW + successor_at * SECOND, payload='[["second"],{}]')
    await store.insert([second], NOW)
    assert await settle(store, first, State.PENDING, run_at=NOW + retry_at * SECOND) is State.CANCELLED
    [pending] = await store.list(State.PENDING)
    assert (pending.id, pending.payload) == (second.id, '[["second"],{}]')
    due = NOW + min(retry_at, successor_at) * SECOND
    assert pending.run_at == due
    if due > NOW:
        assert await claim(store, now=due - 1) == []
    assert [row.id for row in await claim(store, now=due)] == [second.id]


async def test_a_merged_job_says_what_it_was_merged_into(store: Store) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict="queue")
    await store.insert([second], NOW)
    await settle(store, first, State.PENDING)
    for merged in await store.get([first.id]):  # it need not be kept
        assert merged.state is State.CANCELLED
        assert tinyq.id_text(second.id) in str(merged.reason)


async def test_a_merged_job_is_not_kept_for_ever(store: Store) -> None:
    first = await running(store, key="k")
    await store.insert([job(key="k", on_conflict="queue")], NOW)
    await settle(store, first, State.PENDING)
    await store.prune(tinyq.FOREVER)
    assert await store.get([first.id]) == []


async def test_a_successor_does_not_wait_for_a_job_that_has_been_cancelled_before_it_ran(store: Store) -> None:
    first = job(key="k")
    await store.insert([first], NOW)
    await store.cancel([first.id], "why", LEASE, NOW)
    [answer] = await store.insert([job(key="k", on_conflict="queue")], NOW)
    assert answer.verdict == "created"
    assert [row.id for row in await claim(store)] == [answer.row.id]


async def test_a_stale_outcome_does_not_let_the_successor_go(store: Store) -> None:
    first = await running(store, key="k")
    await store.insert([job(key="k", on_conflict="queue")], NOW)
    assert await settle(store, first, claim_no=first.claim_no + 1) is None
    assert await claim(store) == []


async def test_a_cancelled_successor_leaves_the_running_job_alone(store: Store) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict="queue")
    await store.insert([second], NOW)
    assert await store.cancel([second.id], "why", LEASE, NOW) == {second.id: State.CANCELLED}
    assert await settle(store, first) is State.DONE
    assert await claim(store) == []


# occurrences of schedules


def occurrence(fire_time: int, schedule: str = "tick", **fields: Any) -> JobRow:
    return job(schedule=schedule, fire_time=fire_time, **fields)


async def fire(store: Store, fire_time: int, schedule: str = "tick") -> str:
    [answer] = await store.insert([occurrence(fire_time, schedule)], NOW)
    return answer.verdict


async def finish_all(store: Store) -> None:
    for row in await claim(store):
        await settle(store, row, keep=False)


async def test_a_fire_time_is_created_once(store: Store) -> None:
    assert [await fire(store, NOW), await fire(store, NOW)] == ["created", "lost"]
    assert len(await store.list(State.PENDING)) == 1


async def test_a_fire_time_before_the_last_one_is_lost(store: Store) -> None:
    assert await fire(store, NOW) == "created"
    await finish_all(store)
    assert await fire(store, NOW - SECOND) == "lost"


async def test_the_record_of_a_fire_time_outlives_its_job(store: Store) -> None:
    assert await fire(store, NOW) == "created"
    await finish_all(store)
    await store.prune(tinyq.FOREVER)
    assert await fire(store, NOW) == "lost"


async def test_the_next_fire_time_is_created_when_the_last_run_is_over(store: Store) -> None:
    verdicts = []
    for i in range(3):
        verdicts.append(await fire(store, NOW + i * SECOND))
        await finish_all(store)
    assert verdicts == ["created"] * 3


@pytest.mark.parametrize("started", [False, True])
async def test_a_fire_time_overlaps_with_a_run_that_is_not_over(store: Store, started: bool) -> None:
    assert await fire(store, NOW) == "created"
    if started:
        await claim(store)
    assert await fire(store, NOW + SECOND) == "overlap"
    counts = await store.counts(NOW)
    assert [c.count for c in counts] == [1]


async def test_a_skipped_fire_time_stays_skipped(store: Store) -> None:
    await fire(store, NOW)
    await fire(store, NOW + SECOND)
    await finish_all(store)
    assert await fire(store, NOW + SECOND) == "lost"
    assert await fire(store, NOW + 2 * SECOND) == "created"


@pytest.mark.parametrize("started", [False, True])
async def test_a_fire_time_that_waits_its_turn_is_not_recorded_until_the_run_is_over(store: Store, started: bool) -> None:
    await fire(store, NOW)
    running = await claim(store) if started else []
    waiting = occurrence(NOW + SECOND, overlap="wait")
    assert [answer.verdict for answer in await store.insert([waiting], NOW)] == ["overlap"]
    for row in running or await claim(store):
        await settle(store, row)
    assert [answer.verdict for answer in await store.insert([waiting], NOW)] == ["created"]
    assert await fire(store, NOW + SECOND) == "lost"


async def test_a_fire_time_that_waits_its_turn_gives_up_a_run_that_waits_for_its_retry(store: Store) -> None:
    await fire(store, NOW)
    [row] = await claim(store)
    await settle(store, row, State.PENDING, run_at=NOW + 60 * SECOND, attempts=1)
    [answer] = await store.insert([occurrence(NOW + SECOND, overlap="wait")], NOW)
    assert (answer.verdict, answer.superseded) == ("created", True)


async def test_schedules_do_not_know_each_other(store: Store) -> None:
    assert [await fire(store, NOW, "tick"), await fire(store, NOW, "tock")] == ["created", "created"]


async def test_of_many_that_fire_one_time_at_once_one_creates_it(store: Store) -> None:
    verdicts = await asyncio.gather(*(fire(store, NOW) for _ in range(30)))
    assert sorted(verdicts) == sorted(["created"] + ["lost"] * 29)


async def test_a_claimed_occurrence_knows_its_schedule_and_fire_time(store: Store) -> None:
    await store.insert([occurrence(NOW - 3)], NOW)
    [row] = await claim(store)
    assert (row.schedule, row.fire_time) == ("tick", NOW - 3)


# claim: order


async def test_claims_go_by_priority_then_time_then_sequence(store: Store) -> None:
    wanted = [
        job(priority=p, run_at=NOW - late) for p, late in [(9, 0), (5, 3), (5, 1), (0, 7), (0, 7), (0, 7), (-4, 99), (-5, 99)]
    ]
    shuffled = wanted[:]
    random.Random(7).shuffle(shuffled)
    shuffled.sort(key=lambda row: (row.priority, row.run_at) == (0, NOW - 7) and wanted.index(row))  # equal ones as listed
    await store.insert(shuffled, NOW)
    assert [row.id for row in await claim(store)] == [row.id for row in wanted]


async def test_the_best_come_first_when_there_is_room_for_few(store: Store) -> None:
    rows = [job(priority=p) for p in (1, 3, 2, 5, 4)]
    await store.insert(rows, NOW)
    taken = [[row.priority for row in await claim(store, room(2))] for _ in range(4)]
    assert taken == [[5, 4], [3, 2], [1], []]


async def test_within_a_queue_the_order_holds_across_tasks(store: Store) -> None:
    tasks = dict.fromkeys("abc", False)
    rows = [job("abc"[i % 3], priority=i * 7 % 11) for i in range(11)]
    await store.insert(rows, NOW)
    taken = [row.priority for _ in range(4) for row in await claim(store, room(3, tasks))]
    assert taken == sorted(range(11), reverse=True)


async def test_a_large_claim_is_returned_in_order(store: Store) -> None:
    rows = [job(priority=random.Random(i).randrange(20)) for i in range(300)]
    await store.insert(rows, NOW)
    keys = [(-row.priority, row.run_at, row.seq) for row in await claim(store, room(300))]
    assert keys == sorted(keys)
    assert len(keys) == 300


async def test_a_job_that_comes_due_takes_its_place_by_priority(store: Store) -> None:
    low, high = job(priority=1), job(priority=2, run_at=NOW + SECOND)
    await store.insert([low, high], NOW)
    assert [row.id for row in await claim(store, now=NOW + SECOND)] == [high.id, low.id]


# claim: what a claimed row is


async def test_a_claim_makes_a_row_running_leased_and_counted(store: Store) -> None:
    row = await running(store)
    found = await read(store, row)
    for seen in (row, found):
        assert (seen.state, seen.worker, seen.lease, seen.started) == (State.RUNNING, "w1", LEASE, NOW)
        assert (seen.attempts, seen.claim_no) == (1, 1)


async def test_a_claimed_row_is_not_claimed_again(store: Store) -> None:
    await running(store)
    assert await claim(store, now=LEASE + SECOND, worker="w2") == []


async def test_claims_at_the_same_time_share_no_row(store: Store) -> None:
    await store.insert([job() for _ in range(60)], NOW)
    parts = await asyncio.gather(*(claim(store, room(7), worker=f"w{i}") for i in range(12)))
    seqs = [row.seq for part in parts for row in part]
    assert len(seqs) == len(set(seqs)) == 60
    assert all(len(part) <= 7 for part in parts)


async def test_starts_and_claims_are_counted_over_retries(store: Store) -> None:
    await store.insert([job()], NOW)
    for n in (1, 2, 3):
        [row] = await claim(store)
        assert (row.attempts, row.claim_no) == (n, n)
        await settle(store, row, State.PENDING)


async def test_a_claim_that_is_given_back_counts_as_a_claim_and_not_as_a_start(store: Store) -> None:
    row = await running(store)
    await settle(store, row, State.PENDING, attempts=0, snoozes=1)
    [again] = await claim(store)
    assert (again.attempts, again.claim_no, again.snoozes) == (1, 2, 1)


# claim: room


async def test_a_claim_takes_no_more_than_the_shared_slots(store: Store) -> None:
    await store.insert([job(queue=f"q{i}") for i in range(6)], NOW)
    assert len(await claim(store, room(4))) == 4
    assert len(await claim(store, room(0))) == 0


async def test_a_named_queue_has_slots_of_its_own(store: Store) -> None:
    await store.insert([job(queue=name) for name in ("emails", "emails", "emails", "default", "default")], NOW)
    taken = await claim(store, room(1, named={"emails": 2}))
    assert sorted(row.queue for row in taken) == ["default", "emails", "emails"]


async def test_a_queue_without_slots_is_not_served(store: Store) -> None:
    left, taken = job(queue="reports", priority=9), job()
    await store.insert([left, taken], NOW)
    assert [row.id for row in await claim(store, room(5, named={"reports": 0}))] == [taken.id]


async def test_plain_functions_are_limited_by_threads_across_queues(store: Store) -> None:
    rows = [job("thread", queue=name) for name in ("a", "b", "default", "default")] + [job("send") for _ in range(3)]
    await store.insert(rows, NOW)
    where = room(10, {"thread": True, "send": False}, named={"a": 5, "b": 5}, threads=2)
    assert sorted(row.task for row in await claim(store, where)) == ["send"] * 3 + ["thread"] * 2


async def test_slots_that_threads_cannot_use_go_to_other_jobs(store: Store) -> None:
    await store.insert([job("thread", priority=9) for _ in range(5)] + [job("send") for _ in range(5)], NOW)
    taken = await claim(store, room(4, {"thread": True, "send": False}, threads=1))
    assert [row.task for row in taken] == ["thread", "send", "send", "send"]


async def test_a_task_that_is_not_known_is_never_claimed(store: Store) -> None:
    stranger = job("stranger", priority=99)
    await store.insert([stranger], NOW)
    assert await claim(store, now=NOW + 86_400 * SECOND) == []
    found = await read(store, stranger)
    assert (found.state, found.attempts, found.claim_no) == (State.PENDING, 0, 0)


OBSTACLES: Mapping[str, dict[str, Any]] = {
    "unknown task": {"task": "stranger"},
    "full queue": {"queue": "full"},
    "no threads": {"task": "thread"},
    "not due": {"run_at": NOW + 1},
    "held": {},
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
async def test_jobs_that_cannot_start_are_in_nobodys_way(store: Store, obstacle: str) -> None:
    if obstacle == "held":
        holder = await running(store, key="k")
        rows = [job(key="k", on_conflict="queue", priority=9)]
    else:
        rows = [job(priority=9, **OBSTACLES[obstacle]) for _ in range(700)]
    await store.insert(rows, NOW - SECOND)
    mine = job()
    await store.insert([mine], NOW)
    where = room(1, {"send": False, "thread": True}, named={"full": 0}, threads=0)
    assert [row.id for row in await claim(store, where)] == [mine.id]
    if obstacle == "held":
        assert (await read(store, holder)).state is State.RUNNING


async def test_lanes_of_one_task_are_claimed_together(store: Store) -> None:
    first = tinyq.lane_of("default", job().queue, job().task)
    rows = [job(lane=first + lane, priority=p) for p, lane in [(5, 2), (4, 0), (3, 1), (2, 2), (1, 0)]]
    await store.insert(rows, NOW)
    assert [row.priority for row in await claim(store, room(4))] == [5, 4, 3, 2]


async def test_every_lane_is_found(store: Store) -> None:
    lanes = list(itertools.product(("a", "b", "c"), ("x", "y", "z"), (0, 1, 2)))
    random.Random(3).shuffle(lanes)
    first = tinyq.lane_of
    rows = [job(task, queue=queue, lane=first("default", queue, task) + lane) for queue, task, lane in lanes[:20]]
    await store.insert(rows, NOW)
    taken = await claim(store, room(100, dict.fromkeys("xyz", False)))
    assert [row.id for row in taken] == [row.id for row in rows]


# claim: time


async def test_a_job_is_not_claimed_before_its_time(store: Store) -> None:
    row = job(run_at=NOW + SECOND)
    await store.insert([row], NOW)
    assert await claim(store, now=NOW + SECOND - 1) == []
    assert [taken.id for taken in await claim(store, now=NOW + SECOND)] == [row.id]


async def test_a_claim_tells_when_the_next_job_comes_due(store: Store) -> None:
    await store.insert([job(run_at=NOW + n * SECOND) for n in (9, 4, 7)] + [job()], NOW)
    claimed = await store.claim(room(), "w1", LEASE, NOW)
    assert (len(claimed.rows), claimed.next_at) == (1, NOW + 4 * SECOND)
    claimed = await store.claim(room(), "w1", LEASE, NOW + 5 * SECOND)
    assert (len(claimed.rows), claimed.next_at) == (1, NOW + 7 * SECOND)


async def test_a_claim_with_nothing_ahead_tells_no_time(store: Store) -> None:
    await store.insert([job()], NOW)
    assert (await store.claim(room(), "w1", LEASE, NOW)).next_at is None
    assert (await store.claim(room(), "w1", LEASE, NOW)).next_at is None


async def test_any_number_of_jobs_may_come_due_at_once(store: Store) -> None:
    await store.insert([job(run_at=NOW + SECOND) for _ in range(1_201)], NOW)
    now, taken = NOW + SECOND, 0
    for _ in range(4):
        claimed = await store.claim(room(5_000), "w1", LEASE, now)
        taken += len(claimed.rows)
        if claimed.next_at is None:
            break
        assert claimed.next_at <= now  # come again at once
    assert taken == 1_201


# claim: rows on which a worker died


async def test_of_the_rows_on_which_a_worker_died_one_runs_at_a_time(store: Store) -> None:
    fragile = await fragile_rows(store, job(), job(), job())
    sound = [job() for _ in range(3)]
    await store.insert(sound, NOW)
    taken = await claim(store)
    assert sorted(row.id for row in taken) == sorted([fragile[0].id] + [row.id for row in sound])
    assert await claim(store, room(fragile=0)) == []
    assert [row.id for row in await claim(store, room(fragile=1))] == [fragile[1].id]


async def test_one_at_a_time_holds_across_tasks_and_queues(store: Store) -> None:
    await fragile_rows(store, *(job(f"t{i}", queue=f"q{i}") for i in range(3)))
    assert len(await claim(store, room(10, {f"t{i}": False for i in range(3)}))) == 1


async def test_a_fragile_row_keeps_its_place_by_priority(store: Store) -> None:
    [fragile] = await fragile_rows(store, job(priority=5))
    high, low = job(priority=6), job(priority=4)
    await store.insert([high, low], NOW)
    assert [row.id for row in await claim(store, room(2))] == [high.id, fragile.id]


async def test_a_fragile_row_of_an_unknown_task_is_in_nobodys_way(store: Store) -> None:
    [_, mine] = await fragile_rows(store, job("stranger", priority=9), job(priority=1))
    assert [row.id for row in await claim(store)] == [mine.id]


async def test_a_row_stays_fragile_over_a_delayed_retry(store: Store) -> None:
    await store.insert([job(), job()], NOW)
    for row in await claim(store):
        await settle(store, row, State.PENDING, lost=1, run_at=NOW + SECOND)
    assert len(await claim(store, now=NOW + SECOND)) == 1


async def test_a_row_stays_fragile_when_its_arguments_are_replaced(store: Store) -> None:
    await fragile_rows(store, job(key="a"), job(key="b"))
    for key in ("a", "b"):
        await store.insert([job(key=key, on_conflict="replace")], NOW)
    assert len(await claim(store)) == 1


# extend


async def test_extend_moves_the_lease(store: Store) -> None:
    row = await running(store)
    assert await store.extend([(row.seq, row.claim_no, None)], LEASE + 5) == {row.seq: None}
    assert (await read(store, row)).lease == LEASE + 5


async def test_extend_leaves_alone_what_is_no_longer_held(store: Store) -> None:
    held, lost, ended = [job() for _ in range(3)]
    await store.insert([held, lost, ended], NOW)
    rows = await claim(store)
    await store.reclaim([outcome(rows[1], State.PENDING, run_at=NOW)], LEASE + 1)
    [theirs] = await claim(store, worker="w2")
    await settle(store, rows[2])
    claims = [(row.seq, row.claim_no, None) for row in rows] + [(10_000, 1, None)]
    assert await store.extend(claims, LEASE + 5) == {rows[0].seq: None}
    found = await read(store, lost)
    assert (found.lease, found.worker, found.claim_no) == (theirs.lease, "w2", 2)


async def test_extend_tells_of_a_cancel_request(store: Store) -> None:
    row = await running(store)
    await store.cancel([row.id], "why", LEASE, NOW + 3)
    assert await store.extend([(row.seq, row.claim_no, None)], LEASE + 5) == {row.seq: NOW + 3}


async def test_a_note_is_readable_while_the_job_runs(store: Store) -> None:
    row = await running(store)
    await store.extend([(row.seq, row.claim_no, "thread still running")], LEASE + 5)
    await store.extend([(row.seq, row.claim_no, None)], LEASE + 6)
    assert (await read(store, row)).error == "thread still running"


# settle


async def test_a_done_job_that_is_not_kept_is_deleted(store: Store) -> None:
    row = await running(store)
    assert await settle(store, row, keep=False) is State.DONE
    assert await store.get([row.id]) == []
    assert list(await store.counts(NOW)) == []


@pytest.mark.parametrize("state", [State.DONE, State.DEAD, State.CANCELLED])
async def test_a_finished_job_that_is_kept_tells_how_it_ended(store: Store, state: State) -> None:
    row = await running(store)
    about: dict[str, Any] = {
        "reason": "why",
        "error": "E: x",
        "traceback": "File …",
        "result": "[1]",
        "keep_until": NOW + 99,
        "lost": 1,
    }
    assert await settle(store, row, state, now=NOW + 5, **about) is state
    found = await read(store, row)
    assert {name: getattr(found, name) for name in about} == about
    assert (found.state, found.finished, found.lease, found.attempts) == (state, NOW + 5, None, 1)
    assert await claim(store, now=LEASE) == []


async def test_a_retry_is_pending_until_its_time(store: Store) -> None:
    row = await running(store)
    at = NOW + 5 * SECOND
    assert await settle(store, row, State.PENDING, run_at=at, error="E: x", reason="failed", parked=NOW) is State.PENDING
    found = await read(store, row)
    assert (found.state, found.run_at, found.lease, found.finished) == (State.PENDING, at, None, None)
    assert (found.attempts, found.error, found.reason, found.parked) == (1, "E: x", "failed", NOW)
    claimed = await store.claim(room(), "w2", LEASE, NOW)
    assert (list(claimed.rows), claimed.next_at) == ([], at)
    assert [again.id for again in await claim(store, now=at)] == [row.id]


@pytest.mark.parametrize("state", [State.DONE, State.DEAD, State.PENDING])
@pytest.mark.parametrize("keep", [True, False])
async def test_an_outcome_with_another_claim_number_writes_nothing(store: Store, state: State, keep: bool) -> None:
    stale = await running(store)
    await store.reclaim([outcome(stale, State.PENDING, run_at=NOW)], LEASE + 1)
    [held] = await claim(store, worker="w2")
    before = (await read(store, held)).but()
    assert await settle(store, stale, state, keep=keep, error="E: stale") is None
    after = await read(store, held)
    assert [getattr(after, name) for name in tinyq.COLUMNS] == [getattr(before, name) for name in tinyq.COLUMNS]
    assert await settle(store, held, keep=False) is State.DONE


async def test_an_outcome_is_written_once(store: Store) -> None:
    row = await running(store)
    assert await settle(store, row, State.DEAD, error="first") is State.DEAD
    assert await settle(store, row, State.DONE, keep=False) is None
    assert (await read(store, row)).error == "first"


async def test_an_outcome_for_a_pending_row_writes_nothing(store: Store) -> None:
    row = await running(store)
    await settle(store, row, State.PENDING, run_at=NOW)
    assert await settle(store, row, State.DEAD) is None
    assert (await read(store, row)).state is State.PENDING


async def test_a_batch_of_outcomes_is_written_as_far_as_its_claims_hold(store: Store) -> None:
    await store.insert([job() for _ in range(4)], NOW)
    rows = await claim(store)
    batch = [
        outcome(rows[0], keep=False),
        outcome(rows[1], State.DEAD, claim_no=9),
        outcome(rows[2], State.PENDING, run_at=NOW + 5),
        outcome(rows[3], State.DEAD),
        outcome(rows[0].but(seq=10_000)),
    ]
    states = await store.settle(batch, NOW)
    assert states == {rows[0].seq: State.DONE, rows[2].seq: State.PENDING, rows[3].seq: State.DEAD}
    assert [row.state for row in await store.get([row.id for row in rows])] == [State.RUNNING, State.PENDING, State.DEAD]


async def test_a_late_outcome_counts_as_long_as_nobody_has_reclaimed_the_row(store: Store) -> None:
    row = await running(store)
    assert await settle(store, row, now=LEASE + 60 * SECOND, keep=False) is State.DONE


# cancel


async def test_a_pending_job_that_is_cancelled_never_starts(store: Store) -> None:
    now_row, later_row = job(), job(run_at=NOW + SECOND)
    await store.insert([now_row, later_row], NOW)
    ids = [now_row.id, later_row.id]
    assert await store.cancel(ids, "not wanted", NOW + 99, NOW + 5) == dict.fromkeys(ids, State.CANCELLED)
    claimed = await store.claim(room(), "w1", LEASE, NOW + 9 * SECOND)
    assert (list(claimed.rows), claimed.next_at) == ([], None)
    for found in await store.get(ids):
        assert (found.state, found.reason, found.finished, found.keep_until) == (
            State.CANCELLED, "not wanted", NOW + 5, NOW + 99,
        )  # fmt: skip


async def test_a_running_job_is_marked_and_goes_on(store: Store) -> None:
    row = await running(store)
    assert await store.cancel([row.id], "why", None, NOW + 3) == {row.id: State.RUNNING}
    assert await store.cancel([row.id], "why", None, NOW + 8) == {row.id: State.RUNNING}
    found = await read(store, row)
    assert (found.state, found.cancel_at, found.lease) == (State.RUNNING, NOW + 3, LEASE)
    assert await settle(store, row, State.CANCELLED) is State.CANCELLED


async def test_cancel_answers_the_state_of_what_exists(store: Store) -> None:
    done, dead = await running(store), await running(store)
    await settle(store, done)
    await settle(store, dead, State.DEAD)
    assert await store.cancel([done.id, dead.id, new_id(NOW)], "why", None, NOW) == {
        done.id: State.DONE,
        dead.id: State.DEAD,
    }
    assert (await read(store, dead)).reason is None


# requeue


@pytest.mark.parametrize("state", [State.DEAD, State.CANCELLED])
async def test_a_dead_or_cancelled_job_starts_afresh(store: Store, state: State) -> None:
    old = await running(store, expires=NOW + SECOND)
    await store.cancel([old.id], "why", None, NOW)
    spent: dict[str, Any] = {
        "attempts": 5,
        "snoozes": 2,
        "interruptions": 3,
        "lost": 4,
        "parked": NOW,
        "reason": "r",
        "error": "E",
        "keep_until": NOW,
    }
    await settle(store, old, state, **(spent | {"traceback": "t"}))
    later = NOW + 60 * SECOND
    assert list(await store.requeue([old.id], later)) == [old.id]
    found = await read(store, old)
    assert [getattr(found, name) for name in spent] == [0, 0, 0, 0, None, None, None, None]
    assert (found.state, found.run_at, found.expires, found.finished, found.cancel_at, found.traceback) == (
        State.PENDING, later, None, None, None, None,
    )  # fmt: skip
    [row] = await claim(store, now=later)
    assert (row.id, row.attempts, row.claim_no) == (old.id, 1, old.claim_no + 1)
    assert await store.prune(tinyq.FOREVER) == 0


async def test_requeue_leaves_all_other_jobs_alone(store: Store) -> None:
    done, live, waiting = await running(store), await running(store), job(run_at=NOW + 5)
    await settle(store, done)
    await store.insert([waiting], NOW)
    assert list(await store.requeue([done.id, live.id, waiting.id, new_id(NOW)], NOW)) == []
    states = [row.state for row in await store.get([done.id, live.id, waiting.id])]
    assert states == [State.DONE, State.RUNNING, State.PENDING]


async def test_a_job_whose_key_is_pending_cannot_be_requeued(store: Store) -> None:
    old = await running(store, key="k")
    await settle(store, old, State.DEAD)
    await store.insert([job(key="k")], NOW)
    with pytest.raises(KeyConflict, match="'k'"):
        await store.requeue([old.id], NOW)
    assert (await read(store, old)).state is State.DEAD


async def test_a_requeued_job_waits_for_the_one_that_runs_with_its_key(store: Store) -> None:
    old = await running(store, key="k")
    await settle(store, old, State.DEAD)
    live = await running(store, key="k")
    await store.requeue([old.id], NOW)
    assert await claim(store) == []
    await settle(store, live)
    assert [row.id for row in await claim(store)] == [old.id]


async def test_a_refused_requeue_changes_nothing_of_its_batch(store: Store) -> None:
    plain, keyed = await running(store), await running(store, key="k")
    for row in (plain, keyed):
        await settle(store, row, State.DEAD)
    await store.insert([job(key="k")], NOW)
    with pytest.raises(KeyConflict):
        await store.requeue([plain.id, keyed.id], NOW)
    assert [row.state for row in await store.get([plain.id, keyed.id])] == [State.DEAD, State.DEAD]


async def test_in_bulk_only_dead_jobs_are_requeued_and_those_whose_key_is_free(store: Store) -> None:
    dead, taken, cancelled, done = [await running(store, key=key) for key in (None, "k", None, None)]
    for row, state in ((dead, State.DEAD), (taken, State.DEAD), (cancelled, State.CANCELLED), (done, State.DONE)):
        await settle(store, row, state)
    await store.insert([job(key="k", run_at=LEASE)], NOW)
    ids = [taken.id, cancelled.id, done.id, new_id(NOW), dead.id]
    assert list(await store.requeue(ids, NOW, True)) == [dead.id]
    states = [row.state for row in await store.get(ids)]
    assert states == [State.DEAD, State.CANCELLED, State.DONE, State.PENDING]


# purge


@pytest.mark.parametrize("bulk", [False, True], ids=["by id", "in bulk"])
async def test_purge_deletes_finished_rows_or_in_bulk_only_dead_ones(store: Store, bulk: bool) -> None:
    ended = [await running(store) for _ in range(3)]
    for row, state in zip(ended, (State.DEAD, State.CANCELLED, State.DONE), strict=True):
        await settle(store, row, state)
    live, waiting = await running(store), job(run_at=LEASE)
    await store.insert([waiting], NOW)
    ids = [row.id for row in (*ended, live, waiting)]
    assert await store.purge(ids, bulk) == (1 if bulk else 3)
    assert [row.id for row in await store.get(ids)] == (ids[1:] if bulk else ids[3:])
    assert await store.purge([]) == 0


# dead


async def test_dead_rows_are_listed_the_last_first_and_from_a_place_on(store: Store) -> None:
    made = [await running(store, task=task) for task in ("send", "send", "send")]
    for row, moment in zip(made, (NOW + 2, NOW + 1, NOW + 2), strict=True):
        await store.settle([outcome(row, State.DEAD)], moment)
    await settle(store, await running(store), State.CANCELLED)
    in_order = [made[2].id, made[0].id, made[1].id]
    assert [row.id for row in await store.dead(None, tinyq.NEWEST, 10)] == in_order
    assert [row.id for row in await store.dead("send", tinyq.NEWEST, 2)] == in_order[:2]
    assert [row.id for row in await store.dead(None, (NOW + 2, made[0].seq), 10)] == in_order[2:]
    assert list(await store.dead("other", tinyq.NEWEST, 10)) == []


# pause and resume


async def test_nothing_of_a_paused_queue_is_claimed(store: Store) -> None:
    held, free = job(queue="mail", priority=9), job()
    await store.pause(["mail", "alarm"])
    await store.pause(["mail"])
    await store.insert([held, free], NOW)
    assert await store.paused() == {"mail", "alarm"}
    assert [row.id for row in await claim(store)] == [free.id]
    assert [row.id for row in await claim(store, room(named={"mail": 5}))] == []
    await store.resume(["mail", "never heard of"], NOW)
    assert await store.paused() == {"alarm"}
    assert [row.id for row in await claim(store)] == [held.id]


# reclaim


async def test_a_row_is_reclaimed_when_its_lease_is_past(store: Store) -> None:
    row = await running(store)
    change = outcome(row, State.PENDING, lost=1, run_at=LEASE + 1)
    assert await store.reclaim([change], LEASE + 1) == {row.seq: State.PENDING}
    [again] = await claim(store, now=LEASE + 1, worker="w2")
    assert (again.id, again.attempts, again.claim_no, again.lost, again.worker) == (row.id, 2, 2, 1, "w2")


async def test_a_reclaimed_row_may_end_dead(store: Store) -> None:
    row = await running(store)
    change = outcome(row, State.DEAD, lost=1, reason="worker lost", error="worker lost", keep_until=LEASE + 99)
    assert await store.reclaim([change], LEASE + 1) == {row.seq: State.DEAD}
    found = await read(store, row)
    assert (found.state, found.reason, found.attempts, found.finished) == (State.DEAD, "worker lost", 1, LEASE + 1)


async def test_a_row_whose_lease_runs_is_not_reclaimed(store: Store) -> None:
    row = await running(store)
    assert await store.reclaim([outcome(row, State.PENDING)], LEASE - 1) == {}
    assert (await read(store, row)).state is State.RUNNING


async def test_a_row_that_was_renewed_meanwhile_is_not_reclaimed(store: Store) -> None:
    row = await running(store)
    await store.extend([(row.seq, row.claim_no, None)], LEASE + 30 * SECOND)
    assert await store.reclaim([outcome(row, State.PENDING)], LEASE + 1) == {}
    assert (await read(store, row)).lease == LEASE + 30 * SECOND


async def test_a_row_is_reclaimed_once(store: Store) -> None:
    row = await running(store)
    change = outcome(row, State.PENDING, lost=1, run_at=NOW)
    answers = await asyncio.gather(*(store.reclaim([change], LEASE + 1) for _ in range(10)))
    assert sorted(map(len, answers)) == [0] * 9 + [1]


async def test_a_row_that_ended_or_was_claimed_again_is_not_reclaimed(store: Store) -> None:
    ended = await running(store)
    await settle(store, ended, State.DEAD, error="its own")
    moved = await running(store)
    await settle(store, moved, State.PENDING, run_at=NOW)
    await claim(store, now=NOW, worker="w2")
    assert await store.reclaim([outcome(row, State.PENDING, error="lost") for row in (ended, moved)], LEASE + 1) == {}
    assert [row.error for row in await store.get([ended.id, moved.id])] == ["its own", None]


async def test_a_reclaimed_job_lets_its_successor_go_like_any_other(store: Store) -> None:
    first = await running(store, key="k")
    second = job(key="k", on_conflict="queue", run_at=LEASE + 60 * SECOND)
    await store.insert([second], NOW)
    await store.reclaim([outcome(first, State.PENDING, lost=1, run_at=LEASE + 1)], LEASE + 1)
    assert [row.id for row in await claim(store, now=LEASE + 1)] == [second.id]


# list


async def test_list_answers_one_state_in_order(store: Store) -> None:
    await store.insert([job() for _ in range(5)], NOW)
    live = await claim(store, room(2))
    assert [row.id for row in await store.list(State.RUNNING)] == [row.id for row in live]
    pending = await store.list(State.PENDING)
    assert [row.seq for row in pending] == sorted(row.seq for row in pending)
    assert len(pending) == 3
    assert await store.list(State.DEAD) == []


async def test_list_answers_no_more_than_asked_for(store: Store) -> None:
    rows = [job() for _ in range(5)]
    await store.insert(rows, NOW)
    assert [row.id for row in await store.list(State.PENDING, limit=2)] == [row.id for row in rows[:2]]


async def test_list_finds_leases_that_end_soon_the_oldest_first(store: Store) -> None:
    live = [await running(store) for _ in range(4)]
    for row, lease in zip(live, (40, 10, 30, 20), strict=True):
        await store.extend([(row.seq, row.claim_no, None)], NOW + lease)
    await store.insert([job()], NOW)
    found = await store.list(State.RUNNING, lease_before=NOW + 40)
    assert [row.lease for row in found] == [NOW + 10, NOW + 20, NOW + 30]
    assert [row.lease for row in await store.list(State.RUNNING, lease_before=NOW + 40, limit=1)] == [NOW + 10]


# counts


async def test_counts_are_by_queue_task_and_state(store: Store) -> None:
    await store.insert([job(), job(), job("other"), job(queue="emails")], NOW)
    [taken] = await claim(store, room(1))
    dead = await claim(store, room(1, {"other": False}))
    await settle(store, dead[0], State.DEAD, keep_until=LEASE)
    assert numbers(await store.counts(NOW)) == {
        ("default", "send", State.PENDING): (1, 1),
        ("default", "send", State.RUNNING): (1, 0),
        ("default", "other", State.DEAD): (1, 0),
        ("emails", "send", State.PENDING): (1, 1),
    }
    assert taken.queue == "default"


async def test_counts_tell_how_many_are_due(store: Store) -> None:
    await running(store, key="k")
    held, soon, late = job("other", run_at=NOW), job(run_at=NOW + SECOND), job(run_at=NOW + 9 * SECOND)
    held.task, held.key, held.on_conflict = "send", "k", "queue"
    await store.insert([held, soon, late, job()], NOW)
    assert numbers(await store.counts(NOW))["default", "send", State.PENDING] == (4, 1)
    assert numbers(await store.counts(NOW + SECOND))["default", "send", State.PENDING] == (4, 2)


async def test_a_fragile_row_is_due(store: Store) -> None:
    await fragile_rows(store, job())
    assert numbers(await store.counts(NOW)) == {("default", "send", State.PENDING): (1, 1)}


# prune


async def test_prune_deletes_what_was_kept_long_enough(store: Store) -> None:
    rows = {}
    for keep_until in (NOW + 10, NOW + 20, None):
        rows[keep_until] = await running(store)
        await settle(store, rows[keep_until], State.DEAD, keep_until=keep_until)
    assert await store.prune(NOW + 9) == 0
    assert await store.prune(NOW + 10) == 1
    assert await store.prune(tinyq.FOREVER) == 1
    assert [row.id for row in await store.get([row.id for row in rows.values()])] == [rows[None].id]


async def test_prune_works_in_small_batches(store: Store) -> None:
    await store.insert([job() for _ in range(7)], NOW)
    for row in await claim(store):
        await settle(store, row, State.DEAD, keep_until=NOW)
    assert [await store.prune(NOW, limit=3) for _ in range(4)] == [3, 3, 1, 0]


async def test_prune_spares_what_is_alive(store: Store) -> None:
    await running(store)
    await store.insert([job(), job(run_at=NOW + 5), job(key="k")], NOW)
    assert await store.prune(tinyq.FOREVER) == 0
    assert sum(c.count for c in await store.counts(NOW)) == 4


# identity


async def test_the_sequence_number_of_a_deleted_job_is_not_used_again(store: Store) -> None:
    seen: set[int] = set()
    for _ in range(4):
        row = await running(store)
        assert row.seq > max(seen, default=0)
        seen.add(row.seq)
        await settle(store, row, keep=False)
        assert await store.get([row.id]) == []


async def test_an_old_handle_never_finds_another_job(store: Store) -> None:
    old = await running(store)
    await settle(store, old, keep=False)
    new = await running(store)
    assert await store.get([old.id]) == []
    assert await store.extend([(old.seq, old.claim_no, None)], LEASE) == {}
    assert await settle(store, old, State.DEAD) is None
    assert (await read(store, new)).state is State.RUNNING


async def test_ids_sort_by_the_time_they_were_made() -> None:
    ids = [new_id(NOW + step) for step in (0, 3, 999, 1_000, 10**9)]
    assert ids == sorted(ids)
    assert len({new_id(NOW) for _ in range(1_000)}) == 1_000


# the end


async def test_close_can_be_repeated(store: Store) -> None:
    await store.close()
    await store.close()


def test_all_stores_have_the_verbs_of_the_contract_in_its_order() -> None:
    def verbs(kind: type) -> list[str]:
        return [name for name in vars(kind) if not name.startswith("_") and name in vars(Store)]

    assert verbs(MemoryStore) == verbs(SQLiteStore) == verbs(Store)
    assert len(verbs(Store)) == 28


# What has just come due


@pytest.mark.parametrize("seed", range(20))
async def test_a_file_and_the_memory_give_the_same_jobs_as_they_come_due(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    stores: list[Store] = [MemoryStore(), SQLiteStore(str(tmp_path / "jobs.db"))]
    tasks = {"send": False, "report": True, "poll": False}
    terms = {"poll": Terms(names=["poll"], size=7, window=dice.choice([0, 20_000]), value_of=lambda payload, version: "")}
    rows = [
        job(
            dice.choice(["send", "report", "poll", "unknown"]), queue=dice.choice(["default", "slow", "shut"]),
            priority=dice.choice([0, 0, 0, 5]), run_at=NOW + dice.randrange(100) * 1_000,
        )
        for _ in range(200)
    ]  # fmt: skip
    for store in stores:
        await store.open()
        await store.insert([row.but(waiters=None) for row in rows], NOW - 1)
    now, taken = NOW, 0
    for _ in range(60):
        now += dice.choice([0, 100, 5_000, 12_000])
        named = {"slow": dice.randrange(3), "shut": 0}
        where = Room(dice.randrange(6), named, dice.randrange(4), 1, tasks, serves=None, terms=terms)
        memory, file = [[row.id for row in await claim(store, where, now)] for store in stores]
        assert file == memory
        taken += len(file)
    assert taken > 50
    for store in stores:
        await store.close()


async def test_what_found_no_room_as_it_came_due_keeps_its_place(store: Store) -> None:
    rows = [job(run_at=NOW + 5, priority=p) for p in (1, 3, 2)]
    await store.insert(rows, NOW)
    seen = [[row.priority for row in await claim(store, room(1), NOW + late)] for late in (5, 6, 20_000, 20_001)]
    assert seen == [[3], [2], [1], []]


# What waits too long


async def test_jobs_that_have_been_due_for_long_are_told_by_queue_and_task(store: Store) -> None:
    others = {"task": "report", "queue": "reports"}
    rows = [job(run_at=NOW - 5), job(run_at=NOW - 3), job(run_at=NOW - 9, priority=-1), job(run_at=NOW + 10**6)]
    rows += [job(run_at=NOW - 8, limit_value='"a"', **others), job(run_at=NOW - 2, limit_value='"b"', **others)]
    await store.insert(rows, NOW - 10)
    await store.claim(room(0), "w1", LEASE, NOW + 20_000)  # which finds what has come due, and has no room for it
    found = sorted(await store.overdue(NOW - 2))
    assert found == [("default", "send", "", NOW - 9, 3), ("reports", "report", '"a"', NOW - 8, 1)]
    await store.pause(["reports"])
    assert [late.queue for late in await store.overdue(NOW)] == ["default"]


# limits


def limited(*, slots: int = 10, busy: Mapping[tuple[str, str], int] | None = None, **terms: Terms) -> Room:
    """Room for tasks with these limits, and for `send`, which has none."""
    tasks = dict.fromkeys(("send", *terms), False)
    return room(slots, tasks)._replace(terms=terms, busy=busy or {})


def terms(name: str, **limits: Any) -> Terms:
    return Terms(names=(name,), value_of=lambda payload, version: "", **limits)


async def test_a_claim_takes_no_more_than_a_limit_leaves_and_what_else_there_is(store: Store) -> None:
    await store.insert([*(job("report", limit_value="", priority=5) for _ in range(8)), *(job() for _ in range(8))], NOW)
    where = limited(slots=6, report=terms("report", running=3), busy={("report", ""): 1})
    assert [row.task for row in await claim(store, where)] == ["report"] * 2 + ["send"] * 4
    assert [row.task for row in await claim(store, where._replace(busy={("report", ""): 3}))] == ["send"] * 4
    assert [row.task for row in await claim(store, where._replace(busy={("report", ""): 2}))] == ["report"]


async def test_a_task_that_is_over_its_limit_starts_nothing(store: Store) -> None:
    await store.insert([job("report", limit_value="")], NOW)
    where = limited(report=terms("report", running=2), busy={("report", ""): 5})
    claimed = await store.claim(where, "w1", LEASE, NOW)
    assert not claimed.rows and not claimed.more and claimed.next_at is None
    assert claimed.limited == {"report"}


async def test_each_value_has_the_limit_for_itself(store: Store) -> None:
    await store.insert([job("report", limit_value=value) for value in "aaabbc"], NOW)
    where = limited(report=terms("report", running=2, by="account"), busy={("report", "b"): 1})
    assert [row.limit_value for row in await claim(store, where)] == ["a", "a", "b", "c"]


async def test_jobs_at_their_limit_are_taken_by_priority_and_then_in_order(store: Store) -> None:
    rows = [job("report", limit_value="", priority=priority) for priority in (0, 5, -5, 5, 0)]
    await store.insert(rows, NOW)
    where, order = limited(report=terms("report", running=1)), list[bytes]()
    for _ in rows:
        [row] = await claim(store, where)
        order.append(row.id)
        await settle(store, row, keep=False)
    assert order == [rows[n].id for n in (1, 3, 0, 4, 2)]


async def test_a_limit_counts_the_fragile_with_the_others(store: Store) -> None:
    taken = await fragile_rows(store, *(job("report", limit_value="") for _ in range(2)))
    await store.insert([job("report", limit_value="") for _ in range(3)], NOW)
    now = LEASE + 1
    where = limited(report=terms("report", running=2))
    assert [row.seq for row in await claim(store, where, now)] == [taken[0].seq, taken[1].seq + 1]


async def test_a_rate_gives_its_tokens_and_then_says_when_there_is_another(store: Store) -> None:
    await store.insert([job("mail", limit_value="") for _ in range(9)], NOW)
    where = limited(mail=terms("mail", rate=tinyq.Rate(3, per=30)))
    for now, count, next_at in [(0, 3, None), (0, 0, 10), (9, 0, 10), (10, 1, None), (10, 0, 20), (35, 2, None), (35, 0, 40)]:
        claimed = await store.claim(where, "w1", LEASE, NOW + now * SECOND)
        assert len(claimed.rows) == count
        if next_at is not None:
            assert claimed.next_at == NOW + next_at * SECOND


async def test_a_rate_says_nothing_of_a_time_at_which_something_else_holds_the_job(store: Store) -> None:
    await store.insert([job("mail", limit_value="") for _ in range(3)], NOW)
    where = limited(mail=terms("mail", running=1, rate=tinyq.Rate(1, per=30)))
    assert len(await claim(store, where)) == 1
    claimed = await store.claim(where._replace(busy={("mail", ""): 1}), "w1", LEASE, NOW)
    assert ([*claimed.rows], claimed.next_at) == ([], None)
    assert (await store.claim(where, "w1", LEASE, NOW)).next_at == NOW + 30 * SECOND


async def test_a_job_that_finds_no_slot_takes_no_token(store: Store) -> None:
    await store.insert([job("mail", limit_value="") for _ in range(5)], NOW)
    where = limited(slots=1, mail=terms("mail", rate=tinyq.Rate(3, per=3600)))
    for count in (1, 1, 1, 0):
        assert len(await claim(store, where)) == count


async def test_a_replaced_job_counts_for_its_new_value(store: Store) -> None:
    await store.insert([job("report", key="k", limit_value="a")], NOW)
    await store.insert([job("report", key="k", limit_value="b", on_conflict="replace")], NOW)
    where = limited(report=terms("report", running=1, by="account"), busy={("report", "b"): 1})
    assert await claim(store, where) == []
    [row] = await claim(store, where._replace(busy={("report", "a"): 1}))
    assert row.limit_value == "b"


async def test_a_job_keeps_its_value_over_retries_and_requeues(store: Store) -> None:
    row = await running(store, limit_value='"a"')
    await settle(store, row, State.PENDING)
    [row] = await claim(store)
    assert row.limit_value == '"a"'
    await settle(store, row, State.DEAD)
    await store.requeue([row.id], NOW)
    [row] = await claim(store)
    assert row.limit_value == '"a"'


async def test_values_without_room_in_any_number_leave_the_one_that_has_some(store: Store) -> None:
    values = [f"{n}" for n in range(250)]
    await store.insert([job("report", limit_value=value) for value in values], NOW)
    busy = {("report", value): 1 for value in values if value != "137"}
    where, found, now = limited(report=terms("report", running=1, by="account"), busy=busy), list[JobRow](), NOW
    for _ in range(40):
        claimed = await store.claim(where, "w1", now + LEASE, now)
        found += claimed.rows
        now = claimed.next_at or now
    assert [row.limit_value for row in found] == ["137"]


async def test_a_claim_takes_what_a_walk_through_the_sorted_jobs_would_take(store: Store) -> None:
    for seed in range(60):
        dice = random.Random(seed)
        limits = {
            "report": terms("report", running=dice.choice([1, 2, 5]), by="account"),
            "mail": terms("mail", running=dice.choice([1, 3, float("inf")]), rate=tinyq.Rate(dice.randint(1, 4), per=3600)),
        }
        values: dict[str, list[str | None]] = {"report": ["a", "b", "c"], "mail": [""], "send": [None]}
        rows = []
        for _ in range(dice.randint(1, 25)):
            task, moment = dice.choice([*values]), NOW - dice.randint(0, 3)
            rows.append(job(task, priority=dice.randint(-1, 1), run_at=moment, limit_value=dice.choice(values[task])))
            rows[-1].queue = dice.choice(["default", "own"])
        await store.insert(rows, NOW)
        order = {row.id: n for n, row in enumerate(rows)}
        busy = {(task, value or ""): dice.randint(1, 2) for task in limits for value in values[task] if dice.random() < 0.4}
        pools = {"default": dice.randint(0, 8), "own": dice.randint(0, 3)}
        where = limited(slots=pools["default"], busy=busy, **limits)._replace(named={"own": pools["own"]})
        expected, calls = list[int](), Counter(busy)
        tokens = {"mail": limits["mail"].rate.limit if limits["mail"].rate else 0}
        for row in sorted(rows, key=lambda row: (-row.priority, row.run_at, order[row.id])):
            bound, place = limits.get(row.task), (row.task, row.limit_value or "")
            if pools[row.queue] > 0 and (bound is None or calls[place] < bound.running) and tokens.get(row.task, 1) > 0:
                expected.append(order[row.id])
                pools[row.queue] -= 1
                calls[place] += bound is not None
                tokens[row.task] = tokens.get(row.task, 10**6) - 1
        now = NOW + seed * 4 * 3600 * SECOND  # each time with a full bucket
        claimed = await claim(store, where, now)
        assert sorted(order[row.id] for row in claimed) == sorted(expected), seed
        await store.settle([outcome(row, keep=False) for row in claimed], now)
        await store.cancel([row.id for row in rows], "over", now, now)
