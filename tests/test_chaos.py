"""A small run of chaos.py, and proof that each of its checks can fail."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import chaos
import pytest
from chaos import End, Event, Evidence, Row, Start
from servers import wait_until

LEASE = 1_000_000
A, B, C = "A" * 32, "B" * 32, "C" * 32


def event(at: int, old: str | None, new: str, claim: int, *, by: str, old_claim: int | None = None, **others: Any) -> Event:
    """One write to the job A, which a worker `by` has or had last; its lease ends a second after the last claim."""
    values: dict[str, Any] = {"old_lease": None, "lease": at + LEASE if new == "running" else None, "old_lost": 0, "lost": 0}
    old_claim = claim - (new == "running") if old_claim is None else old_claim
    return Event(
        at=at, seq=1, id=A, old_state=old, state=new, old_claim=old_claim, claim=claim, worker=f"{by}-1-f", **values | others
    )


# A is lost by the worker w0 and then done by w1; B fails twice and is dead; C is pending still when somebody cancels it.
LIFE = [
    event(0, "pending", "running", 1, by="w0"),
    event(500_000, "running", "running", 1, by="w0", old_claim=1, old_lease=LEASE, lease=1_500_000),
    event(2_000_000, "running", "pending", 1, by="w0", old_lease=1_500_000, lost=1),
    event(2_100_000, "pending", "running", 2, by="w1", old_lost=1, lost=1),
    event(2_200_000, "running", "done", 2, by="w1", old_lease=3_100_000, old_lost=1, lost=1),
]
OTHER = [event(0, "pending", "running", n, by="w0")._replace(seq=2, id=B, at=n) for n in (1, 2)]
GOOD = Evidence(
    acknowledged={A: "sleeps", B: "raises", C: "blocks"},
    starts=[
        Start("w0", 100, A, "sleeps", 1),
        Start("w1", 2_100_100, A, "sleeps", 2),
        Start("w0", 30_000, B, "raises", 1),
        Start("w0", 60_000, B, "raises", 2),
    ],
    ends=[End("w1", 2_200_000, A)],
    cancelled=frozenset([C]),
    errors=[],
    events=[*LIFE, OTHER[0], OTHER[0]._replace(old_state="running", state="pending"), OTHER[1]._replace(at=55_000)],
    rows={
        A: Row("sleeps", "done", None, 2, 0, 0),
        B: Row("raises", "dead", "no attempts left", 2, 0, 0),
        C: Row("blocks", "cancelled", "cancelled", 0, 0, 0),
    },
    integrity="ok",
    unfinished=0,
    exits=[0, 0],
    defects=[],
)


def with_row(id: str, **changes: Any) -> Evidence:
    return GOOD._replace(rows={**GOOD.rows, id: GOOD.rows[id]._replace(**changes)})


def with_event(place: int, **changes: Any) -> Evidence:
    return GOOD._replace(events=[*GOOD.events[:place], GOOD.events[place]._replace(**changes), *GOOD.events[place + 1 :]])


def with_start(*start: Any) -> Evidence:
    return GOOD._replace(starts=[*GOOD.starts, Start(*start)])


DOCTORED = {
    "an acknowledged job that is gone": (
        GOOD._replace(rows={id: row for id, row in GOOD.rows.items() if id != A}),
        {"every acknowledged job reaches a terminal state"},
    ),
    "an acknowledged job that runs for ever": (with_row(A, state="running"), {"every acknowledged job reaches a terminal state"}),
    "a failure where there is none": (
        with_row(A, state="dead", reason="no attempts left"),
        {"each job ends as its handler says"},
    ),
    "a success of a handler that never came to its end": (
        GOOD._replace(ends=[]),
        {"a success is written by the worker that had it"},
    ),
    "a success that is that of the worker which had the job before": (
        GOOD._replace(ends=[End("w0", 2_200_000, A)]),
        {"a success is written by the worker that had it"},
    ),
    "a cancelled job that nobody cancelled": (GOOD._replace(cancelled=frozenset()), {"each job ends as its handler says"}),
    "a start too many": (
        GOOD._replace(
            starts=[*GOOD.starts, Start("w0", 90_000, B, "raises", 2)],
            events=[*GOOD.events, OTHER[1]._replace(at=85_000, old_claim=2, claim=3)],
        ),
        {"starts never exceed max_attempts"},
    ),
    "an attempt with too high a number": (
        GOOD._replace(starts=[start._replace(attempt=3) if start.id == B else start for start in GOOD.starts]),
        {"starts never exceed max_attempts"},
    ),
    "a second outcome for one claim": (
        GOOD._replace(events=[*GOOD.events, LIFE[4]._replace(old_state="done", state="dead")]),
        {"no two settlements for one claim"},
    ),
    "an outcome of a claim that was lost": (
        GOOD._replace(events=[*GOOD.events, LIFE[2]._replace(old_lost=1)]),
        {"no two settlements for one claim"},
    ),
    "a finished row that is deleted": (
        GOOD._replace(events=[*GOOD.events, LIFE[4]._replace(old_state="done", state="deleted")]),
        {"no two settlements for one claim"},
    ),
    "a reclaim before the lease is past": (
        with_event(2, old_lease=2_500_000),
        {"no claim is taken away before its lease is past"},
    ),
    "a claim of a job that is running": (
        with_event(3, old_state="running", old_lease=2_500_000),
        {"no claim is taken away before its lease is past"},
    ),
    "a start without a claim": (
        with_start("w2", 3_500_000, A, "sleeps", 2),
        {"a handler starts once for a claim of its own worker"},
    ),
    "two starts for one claim": (
        with_start("w1", 2_500_000, A, "sleeps", 2),
        {"a handler starts once for a claim of its own worker"},
    ),
    "a start of a worker that has lost the job to another": (
        GOOD._replace(starts=[GOOD.starts[0]._replace(at=2_150_000), *GOOD.starts[1:]]),
        {"no start inside another's live lease"},
    ),
    "a locked database": (GOOD._replace(errors=["w0: enqueue: StoreBusy"]), {"no locked database reaches a caller"}),
    "a job that is never run": (GOOD._replace(unfinished=1), {"what is left alive drains the file and ends"}),
    "a process that must be killed": (GOOD._replace(exits=[0, -9]), {"what is left alive drains the file and ends"}),
    "a damaged file": (GOOD._replace(integrity="row 3 missing from index tinyq_claim"), {"the file is whole"}),
    "a defect": (GOOD._replace(defects=["a defect in tinyq"]), {"no process logs a defect"}),
}


def test_the_checks_find_nothing_in_a_run_in_which_all_went_well() -> None:
    assert chaos.broken(GOOD) == {}


def test_a_job_that_goes_from_worker_to_worker_within_milliseconds_is_nothing_to_find() -> None:
    events, starts = [], []
    for claim in range(1, 40):
        at, by = claim * 4_000, f"w{claim % 2}"
        events.append(event(at, "pending", "running", claim, by=by))
        starts.append(Start(by, at + 1_000, A, "sleeps", 1))
        events.append(event(at + 2_000, "running", "pending", claim, by=by, old_lease=at + LEASE))
    found = GOOD._replace(events=events, starts=starts, rows={**GOOD.rows, A: GOOD.rows[A]._replace(snoozes=40)})
    assert chaos.broken(found) == {}


@pytest.mark.parametrize("case", DOCTORED)
def test_the_checks_find_what_went_wrong_and_name_it(case: str) -> None:
    evidence, names = DOCTORED[case]
    assert chaos.broken(evidence).keys() == names


def test_each_check_has_been_seen_to_fail() -> None:
    assert set().union(*(names for _, names in DOCTORED.values())) == chaos.CHECKS.keys()


def test_a_broken_invariant_is_the_exit_code_and_is_named_with_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos.Run, "go", lambda run: GOOD._replace(integrity="not a database"))
    assert chaos.main(chaos.parse(["--seed", "77"])) == 1
    shown = capsys.readouterr().out
    assert "BROKEN: the file is whole: 1 cases\n  not a database" in shown
    assert "seed 77" in shown.splitlines()[-1]


@pytest.mark.timeout(300)
def test_four_processes_that_are_killed_and_stopped_at_random_keep_every_promise(tmp_path: Path) -> None:
    options = ["--jobs", "600", "--rate", "100", "--pause", "0.7", "--poison", "2", "--seconds", "200"]
    with chaos.Run(tmp_path, chaos.parse(options)) as run:
        found = run.go()
    assert chaos.broken(found) == {}, f"seed {run.options.seed}"
    assert len(found.acknowledged) >= 600
    assert run.restarts >= 6  # for each start of the two jobs that end their process
    assert any(event.is_loss for event in found.events)
    assert all(process.returncode is not None for process in run.members)


def test_no_process_survives_a_run_that_is_killed(tmp_path: Path) -> None:
    options = ["--rate", "5", "--pause", "1000"]  # undisturbed: a process that is stopped does not see the run end
    command = [sys.executable, chaos.__file__, "--folder", str(tmp_path / "run"), *options]
    with subprocess.Popen(command) as process:
        try:
            log = tmp_path / "run" / "producer.log"
            wait_until("the run goes on", lambda: log.exists() and log.stat().st_size > 0)
        finally:
            process.kill()
    wait_until("its processes are gone", lambda: not commands_with(str(tmp_path / "run")))


def commands_with(argument: str) -> list[str]:
    lines = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if argument in line]
