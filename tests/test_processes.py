"""Several processes on one file: real ones, some of which die in the middle of their work."""

import asyncio
import functools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from fleet import Fleet, Member
from servers import wait_until

from tinyq import Settlement, SQLiteStore, State, StoreBusy

pytestmark = pytest.mark.timeout(300)


def supervise(start: Callable[[], Member], until: Callable[[], bool]) -> int:
    """Start a member again whenever it has ended; how many were needed."""
    count, member = 1, start()

    def step() -> bool:
        nonlocal count, member
        if member.ended() and not until():
            count, member = count + 1, start()
        return until()

    wait_until("the supervised work is over", step)
    return count


# claims


def test_of_four_processes_with_four_loops_each_no_two_run_the_same_job(fleet: Fleet) -> None:
    members = [fleet.member({"note": 5}, loops=4, concurrency=5) for _ in range(4)]
    fleet.enqueue("note", *range(2_000))
    fleet.wait_for_marks(2_000, "note")
    for member in members:
        member.finish()
    marks = fleet.marks("note")
    assert Counter(int(n) for _, _, n in marks) == Counter(range(2_000))
    assert len({pid for pid, *_ in marks}) > 1
    assert fleet.rows("id") == []


def test_a_claimed_row_is_whole_from_the_start_and_cannot_be_swept_away(fleet: Fleet) -> None:
    members = [fleet.member({"note": 5}, loops=2, concurrency=5) for _ in range(2)]

    def taken_away(row: Any) -> Settlement:
        fields: dict[str, Any] = {name: getattr(row, name, None) for name in Settlement.__annotations__}
        return Settlement(**(fields | {"state": State.PENDING, "keep": True}))

    async def sweep() -> int:
        """Look at what runs, and try to reclaim all of it, as often as one can."""
        store, seen = SQLiteStore(fleet.db), 0
        await store.open()
        try:
            async with asyncio.timeout(60):
                while len(fleet.marks("note")) < 1_000:
                    rows = await store.list(State.RUNNING, limit=1_000)
                    for row in rows:
                        assert (row.attempts, row.claim_no) == (1, 1)
                        assert None not in (row.lease, row.worker, row.started)
                    with suppress(StoreBusy):  # the members write all the time
                        assert await store.reclaim([taken_away(row) for row in rows], time.time_ns() // 1000) == {}
                    seen += len(rows)
            return seen
        finally:
            await store.close()

    fleet.enqueue("note", *range(1_000))
    assert asyncio.run(sweep()) > 0
    for member in members:
        member.finish()
    assert Counter(int(n) for _, _, n in fleet.marks("note")) == Counter(range(1_000))


# processes that die


def test_what_ran_in_a_killed_process_runs_again_in_the_next_one(fleet: Fleet) -> None:
    fleet.enqueue("hangs_once", *range(5))
    first = fleet.member({"hangs_once": 2}, lease=1.0)
    fleet.wait_for_marks(5, "hangs_once")
    first.kill()
    assert fleet.rows("state", "attempts") == [("running", 1)] * 5
    second = fleet.member({"hangs_once": 2}, lease=1.0)  # on the same host
    fleet.wait_for_rows([], "id")
    second.finish()
    starts = [(pid, int(n), int(attempt)) for pid, _, n, attempt in fleet.marks("hangs_once")]
    assert sorted(starts) == sorted([(first.pid, n, 1) for n in range(5)] + [(second.pid, n, 2) for n in range(5)])


@pytest.mark.parametrize(("task", "starts"), [("killed", 1), ("leaves", 3)])
def test_a_job_that_ends_its_process_has_so_many_starts_and_is_dead_then(fleet: Fleet, task: str, starts: int) -> None:
    fleet.enqueue(task, 7)
    members = supervise(
        lambda: fleet.member({task: starts}, lease=1.0), lambda: fleet.rows("state")[0] in [("dead",), ("done",), ("cancelled",)]
    )
    assert members == starts + 1
    assert [mark[1:] for mark in fleet.marks(task)] == [[task, "7", str(n + 1)] for n in range(starts)]
    assert fleet.rows("state", "reason", "attempts", "lost") == [("dead", "worker lost", starts, starts)]
    wait_until("its end is logged", lambda: any(line.startswith("ERROR") and "worker lost" in line for line in fleet.log_lines()))


def test_a_job_that_ends_its_process_does_not_use_up_the_attempts_of_its_neighbours(fleet: Fleet) -> None:
    fleet.enqueue("hangs_once", *range(4))
    fleet.enqueue("leaves", 7)
    tasks = {"leaves": 3, "hangs_once": 2}
    supervise(lambda: fleet.member(tasks, lease=1.0), lambda: fleet.rows("state") == [("dead",)])
    assert fleet.rows("task", "reason") == [("leaves", "worker lost")]
    attempts = Counter((int(n), int(attempt)) for _, _, n, attempt in fleet.marks("hangs_once"))
    assert attempts == Counter((n, attempt) for n in range(4) for attempt in (1, 2))


def test_a_retry_belongs_to_no_process(fleet: Fleet) -> None:
    fleet.enqueue("fails_once", 7)
    first = fleet.member({"fails_once": 2})
    wait_until("the first start has failed", lambda: fleet.rows("state", "attempts") == [("pending", 1)])
    [(due,)] = fleet.rows("run_at")
    first.finish()
    second = fleet.member({"fails_once": 2})
    [one, two] = fleet.wait_for_marks(2, "fails_once")
    fleet.wait_for_rows([], "id")
    assert (one[0], one[3]) == (first.pid, "1")
    assert (two[0], two[3]) == (second.pid, "2")
    assert int(two[4]) >= due


# processes that do not know a task


def test_a_process_leaves_jobs_alone_whose_task_it_does_not_know(fleet: Fleet) -> None:
    fleet.enqueue("hangs_once", 0)
    knows = fleet.member({"hangs_once": 2}, lease=1.0)
    fleet.wait_for_marks(1, "hangs_once")
    knows.kill()
    fleet.enqueue("hangs_once", 1, 2)
    assert fleet.unknown() == ("hangs_once",)
    fleet.member({"note": 5}, lease=1.0)
    untouched = [("hangs_once", "pending", 0, 0, 0)] * 2
    fleet.wait_for_rows([("hangs_once", "pending", 1, 1, 1), *untouched], "task", "state", "attempts", "claim_no", "lost")
    fleet.enqueue("note", 7)
    fleet.wait_for_marks(1, "note")  # so it has claimed since
    wait_until("the note is settled", lambda: len(fleet.rows("id")) == 3)
    columns = ("state", "attempts", "claim_no", "lease", "payload", "finished")
    assert fleet.rows(*columns) == [
        ("pending", 1, 1, None, "[[0],{}]", None),
        ("pending", 0, 0, None, "[[1],{}]", None),
        ("pending", 0, 0, None, "[[2],{}]", None),
    ]
    assert fleet.unknown() == ("hangs_once",)
    fleet.member({"hangs_once": 2}, lease=1.0)
    fleet.wait_for_marks(1, "hangs_once", 0, 2)


def test_a_lease_that_ends_among_strangers_does_not_give_another_start(fleet: Fleet) -> None:
    fleet.enqueue("killed", 7)
    wait_until("the job has ended its process", fleet.member({"killed": 1}, lease=1.0).ended)
    fleet.member({"note": 5}, lease=1.0)
    wait_until("a stranger has seen the lease end", lambda: fleet.rows("state") != [("running",)])
    knows = fleet.member({"killed": 1}, lease=1.0)
    fleet.wait_for_rows([("dead", "worker lost", 1)], "state", "reason", "attempts")
    knows.finish()
    assert len(fleet.marks("killed")) == 1


# processes that live


def test_a_job_that_takes_longer_than_its_lease_starts_once(fleet: Fleet) -> None:
    members = [fleet.member({"long": 5}, lease=2) for _ in range(2)]
    fleet.enqueue("long", 5.0)
    fleet.wait_for_marks(1, "long", "ended")
    fleet.wait_for_rows([], "id")
    for member in members:
        member.finish()
    assert [what for _, _, what in fleet.marks("long")] == ["began", "ended"]


@pytest.mark.parametrize(("count", "period", "apart", "more"), [(3, 0.2, 0.0, 6), (4, 1.0, 0.3, 2)])
def test_each_fire_time_runs_in_one_of_several_processes_though_they_start_apart(
    fleet: Fleet, count: int, period: float, apart: float, more: int
) -> None:
    members: list[Member] = []
    for _ in range(count):
        last = time.monotonic()
        members.append(fleet.member(every={"seconds": period, "name": "tick"}))
        wait_until("the time between two starts is over", lambda last=last: time.monotonic() >= last + apart)  # type: ignore[misc]
    together = len(fleet.wait_for_marks(len(fleet.marks("tick")) + more, "tick"))
    for member in members:
        member.finish()
    times = [float(moment) / period for _, _, moment in fleet.marks("tick")]
    numbers = [round(moment) for moment in times]
    assert [moment for moment in times if abs(moment - round(moment)) > 1e-3] == []
    assert len(numbers) == len(set(numbers))
    first, last = min(numbers[:together]), max(numbers[:together])
    left_out = set(range(first, last)) - set(numbers)
    noticed = sum(int(skipped) + int(missed) for _, _, _, skipped, missed in fleet.marks("schedule"))
    assert len(left_out) <= noticed  # by a process that was late, or that found the last run not over


FIRES = """
import asyncio, sys, tinyq

async def main():
    store = tinyq.SQLiteStore(sys.argv[1])
    await store.open()
    for line in sys.stdin:
        fire = int(line)
        row = tinyq.JobRow(tinyq.new_id(fire), "tick", "default", 0, fire, fire, payload="[[],{}]")
        row.schedule, row.fire_time, row.rule, row.overlap = "tick", fire, "every 1.0 0.0", "allow"
        [answer] = await store.insert([row], fire)
        print(answer.verdict, flush=True)
    await store.close()

asyncio.run(main())
"""


def test_of_two_processes_let_go_at_one_moment_exactly_one_wins_each_of_a_thousand_fire_times(fleet: Fleet) -> None:
    verdicts: Counter[tuple[str, ...]] = Counter()
    with ExitStack() as stack:
        start: Any = functools.partial(subprocess.Popen, [sys.executable, "-c", FIRES, fleet.db], text=True)
        both = [stack.enter_context(start(stdin=subprocess.PIPE, stdout=subprocess.PIPE)) for _ in range(2)]
        for fire in range(1, 1_001):
            for process in both:
                print(fire, file=process.stdin, flush=True)
            verdicts[tuple(process.stdout.readline().strip() for process in both)] += 1
    assert verdicts["created", "lost"] + verdicts["lost", "created"] == 1_000
    assert [fire for (fire,) in fleet.rows("fire_time")] == [*range(1, 1_001)]


def test_each_process_runs_every_fire_time_of_a_schedule_of_its_own(fleet: Fleet) -> None:
    members = [fleet.member(every={"seconds": 0.2, "name": "tick", "per_process": True}) for _ in range(3)]

    def shared() -> list[str]:
        """Fire times that have run in each process."""
        counts = Counter(moment for _, _, moment in fleet.marks("tick"))
        return [moment for moment, count in counts.items() if count == 3]

    wait_until("some fire times have run in each process", lambda: len(shared()) >= 4)
    for member in members:
        member.finish()
    marks = Counter((pid, moment) for pid, _, moment in fleet.marks("tick"))
    assert set(marks.values()) == {1}
    assert {pid for pid, _ in marks} == {member.pid for member in members}
    assert fleet.rows("id") == []
