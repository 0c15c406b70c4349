"""Several worker processes on one file, killed and stopped at random while they work; then what happened is checked.

    python tests/chaos.py [--jobs 20000] [--workers 4] [--lease 1.0] [--seed N] [--seconds 360] [--folder FOLDER]

Jobs are short or about as long as the lease; async handlers and plain functions; some fail, snooze, enqueue others, give up,
are cancelled from outside, or end their process. Workers are killed with SIGKILL and started again, and stopped with SIGSTOP
for less and for more than the lease. Triggers in the file keep a list of every claim, renewal and settlement, and the handlers
keep lists of their own. Prints what was done and what was found; exits 1 with the names of the broken invariants, if any. Takes
about four minutes with 20,000 jobs.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import tinyq

TESTS = Path(__file__).parent
MEMBER = TESTS / "workers" / "chaos_member.py"
SLACK = 20_000  # microseconds; a trigger reads the time in milliseconds, and before the commit


class About(NamedTuple):
    """A task of the run: how it may end, how many starts it has, how many of the jobs are of it."""

    end: str
    starts: int
    share: int


TASKS = {
    "sleeps": About("done", 6, 45),
    "blocks": About("done", 6, 15),
    "raises": About("dead", 2, 8),
    "fails_once": About("done", 5, 8),
    "snoozes": About("done", 5, 8),
    "gives_up": About("cancelled", 4, 6),
    "enqueues": About("done", 4, 10),
    "poison": About("dead", 3, 0),
}

# What the triggers keep of each write, in the order in which it was committed.
EVENT_COLUMNS = "at, seq, id, old_state, state, old_claim, claim, old_lease, lease, old_lost, lost, worker"
TRIGGERS = f"""
    CREATE TABLE chaos_events (
        n INTEGER PRIMARY KEY, at INTEGER, seq INTEGER, id TEXT, old_state TEXT, state TEXT, old_claim INTEGER, claim INTEGER,
        old_lease INTEGER, lease INTEGER, old_lost INTEGER, lost INTEGER, worker TEXT
    );
    CREATE TRIGGER chaos_insert AFTER INSERT ON tinyq_jobs WHEN new.state = 'running' BEGIN
        INSERT INTO chaos_events ({EVENT_COLUMNS}) VALUES (:now, new.seq, hex(new.id), NULL, new.state, NULL, new.claim_no, NULL,
            new.lease, NULL, new.lost, new.worker);
    END;
    CREATE TRIGGER chaos_update AFTER UPDATE ON tinyq_jobs WHEN NOT (old.state = 'pending' AND new.state = 'pending') BEGIN
        INSERT INTO chaos_events ({EVENT_COLUMNS}) VALUES (:now, new.seq, hex(new.id), old.state, new.state, old.claim_no,
            new.claim_no, old.lease, new.lease, old.lost, new.lost, new.worker);
    END;
    CREATE TRIGGER chaos_delete AFTER DELETE ON tinyq_jobs BEGIN
        INSERT INTO chaos_events ({EVENT_COLUMNS}) VALUES (:now, old.seq, hex(old.id), old.state, 'deleted', old.claim_no,
            old.claim_no, old.lease, NULL, old.lost, old.lost, old.worker);
    END;
""".replace(":now", "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)")


# What is known after a run


class Event(NamedTuple):
    at: int
    seq: int
    id: str
    old_state: str | None
    state: str
    old_claim: int | None
    claim: int
    old_lease: int | None
    lease: int | None
    old_lost: int | None
    lost: int
    worker: str | None

    @property
    def is_claim(self) -> bool:
        return self.state == "running" and self.claim != (self.old_claim or 0)

    @property
    def is_settlement(self) -> bool:
        return self.old_state not in (None, "pending") and self.state != "running"

    @property
    def is_loss(self) -> bool:
        """Written by somebody other than the worker that had the claim."""
        return self.is_settlement and self.lost > (self.old_lost or 0)

    @property
    def tag(self) -> str:
        return (self.worker or "").split("-")[0]


class Start(NamedTuple):
    by: str
    at: int
    id: str
    task: str
    attempt: int


class End(NamedTuple):
    by: str
    at: int
    id: str


class Row(NamedTuple):
    task: str
    state: str
    reason: str | None
    attempts: int
    snoozes: int
    interruptions: int


class Evidence(NamedTuple):
    acknowledged: Mapping[str, str]  # id: task
    starts: list[Start]
    ends: list[End]  # of handlers that came to it
    cancelled: frozenset[str]  # ids of the jobs that somebody asked to cancel
    errors: list[str]  # that callers met
    events: list[Event]
    rows: Mapping[str, Row]
    integrity: str
    unfinished: int  # jobs after the workers have been left in peace
    exits: list[int]  # of the processes that were told to end
    defects: list[str]  # lines that no process should have logged


# The invariants


Check = Callable[[Evidence], Iterator[str]]
CHECKS: dict[str, Check] = {}


def invariant(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return add


@invariant("every acknowledged job reaches a terminal state")
def terminal(found: Evidence) -> Iterator[str]:
    for id, task in found.acknowledged.items():
        row = found.rows.get(id)
        if row is None or row.state not in ("done", "dead", "cancelled"):
            yield f"{task} {id} is {row.state if row else 'gone'}"


@invariant("each job ends as its handler says")
def as_told(found: Evidence) -> Iterator[str]:
    for id, row in found.rows.items():
        fits = row.state == TASKS[row.task].end
        lost = (row.state, row.reason) == ("dead", "worker lost")
        if not (fits or lost or (row.state == "cancelled" and id in found.cancelled) or row.state in ("pending", "running")):
            yield f"{row.task} {id} is {row.state} ({row.reason})"


@invariant("starts never exceed max_attempts")
def few_starts(found: Evidence) -> Iterator[str]:
    for id, count in Counter(start.id for start in found.starts).items():
        row = found.rows.get(id)
        if row and count > (most := TASKS[row.task].starts) + row.snoozes + row.interruptions:
            yield f"{row.task} {id} has {count} starts of {most}, {row.snoozes} snoozes, {row.interruptions} interruptions"
    for start in found.starts:
        if start.attempt > TASKS[start.task].starts:
            yield f"{start} is one too many"


@invariant("no two settlements for one claim")
def one_settlement(found: Evidence) -> Iterator[str]:
    for (seq, claim), count in Counter((event.seq, event.old_claim) for event in found.events if event.is_settlement).items():
        if count > 1:
            yield f"claim {claim} of job {seq} was settled {count} times"


@invariant("a success is written by the worker that had it")
def own_success(found: Evidence) -> Iterator[str]:
    ends, claims = defaultdict(list), {}
    for end in found.ends:
        ends[end.by, end.id].append(end.at)
    for event in found.events:
        if event.is_claim:
            claims[event.id] = event.at
        elif event.state == "done":
            moments = ends[event.tag, event.id]
            if not any(claims.get(event.id, 0) - SLACK <= at <= event.at + SLACK for at in moments):
                yield f"{event} comes from somebody else, or from nobody: ends are at {moments}"


@invariant("no claim is taken away before its lease is past")
def leases_hold(found: Evidence) -> Iterator[str]:
    for event in found.events:
        taken = event.is_loss or (event.is_claim and event.old_state == "running")
        if taken and event.old_lease is not None and event.old_lease > event.at + SLACK:
            yield f"{event} comes {(event.old_lease - event.at) / 1e6:.3f} s early"


@invariant("a handler starts once for a claim of its own worker")
def one_start(found: Evidence) -> Iterator[str]:
    claims, starts = defaultdict(list), defaultdict(list)
    for event in found.events:
        if event.is_claim:
            claims[event.tag, event.id].append(event.at)
    for start in found.starts:
        starts[start.by, start.id].append(start)
    for pair, some in starts.items():
        for count, start in enumerate(some, 1):
            if count > (so_far := sum(at <= start.at + SLACK for at in claims[pair])):
                yield f"{start} is start {count} after {so_far} claims of this worker"


@invariant("no start inside another's live lease")
def no_start_inside(found: Evidence) -> Iterator[str]:
    histories = defaultdict(list)
    for event in found.events:
        histories[event.id].append(event)
    for start in found.starts:
        known = [event for event in histories[start.id] if event.at <= start.at + SLACK]
        own = max((n for n, event in enumerate(known) if event.is_claim and event.tag == start.by), default=-1)
        since = known[own + 1 :]
        taken = any(event.is_claim and event.at <= start.at - SLACK for event in since)
        if taken and since[-1].state == "running" and (left := (since[-1].lease or 0) - start.at) > SLACK:
            yield f"{start} while {since[-1].worker} has {left / 1e6:.3f} s of its lease left"


@invariant("no locked database reaches a caller")
def never_busy(found: Evidence) -> Iterator[str]:
    yield from found.errors


@invariant("what is left alive drains the file and ends")
def drained(found: Evidence) -> Iterator[str]:
    if found.unfinished:
        yield f"{found.unfinished} jobs are not finished"
    if any(found.exits):
        yield f"processes ended with {found.exits}"


@invariant("the file is whole")
def whole(found: Evidence) -> Iterator[str]:
    if found.integrity != "ok":
        yield found.integrity


@invariant("no process logs a defect")
def no_defect(found: Evidence) -> Iterator[str]:
    yield from found.defects


def broken(found: Evidence) -> dict[str, list[str]]:
    """The invariants that do not hold, each with what speaks against it."""
    return {name: cases for name, check in CHECKS.items() if (cases := list(check(found)))}


# The run


class Slot:
    """The place of one worker process, and of those that follow it when it has died."""

    def __init__(self, number: int, run: "Run") -> None:
        self.number, self.run, self.generation = number, run, 0
        self.resume_at: float | None = None
        self.start()

    def start(self) -> None:
        self.generation += 1
        self.resume_at = None
        self.process = self.run.member("worker", f"w{self.number}g{self.generation}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGSTOP)
            self.resume_at = time.monotonic() + seconds

    def tend(self, now: float) -> None:
        """Let it go on when its time has come; start another when it has died."""
        if self.process.poll() is not None:
            self.run.restarts += 1
            self.start()
        elif self.resume_at is not None and now >= self.resume_at:
            os.kill(self.process.pid, signal.SIGCONT)
            self.resume_at = None


class Run:
    """One run, from an empty file to the evidence. No process outlives the `with` block."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.db = folder, options, folder / "jobs.db"
        self.dice = random.Random(options.seed)
        self.done: Counter[str] = Counter()
        self.restarts = 0
        self.members: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.members:
            process.kill()
        for process in self.members:
            process.communicate()

    def member(self, role: str, tag: str) -> subprocess.Popen[bytes]:
        wishes = {name: getattr(self.options, name) for name in ("seed", "jobs", "poison", "rate", "lease", "slots")}
        command = [sys.executable, str(MEMBER), role, tag, str(self.folder), json.dumps(wishes)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
        with (self.folder / "members.txt").open("ab") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env)
        self.members.append(process)
        return process

    def go(self) -> Evidence:
        asyncio.run(make_file(self.db))
        deadline = time.monotonic() + self.options.seconds
        producer = self.member("producer", "producer")
        slots = [Slot(number, self) for number in range(self.options.workers)]
        while producer.poll() is None and time.monotonic() < deadline:
            self.disturb(slots, producer)
        for slot in slots:
            slot.resume_at = None if slot.resume_at is None else 0.0
        while (unfinished := self.unfinished()) and time.monotonic() < deadline:
            for slot in slots:
                slot.tend(time.monotonic())
            time.sleep(0.1)
        exits = [end(process) for process in (producer, *(slot.process for slot in slots))]
        return evidence(self.folder, unfinished, exits)

    def disturb(self, slots: list[Slot], producer: subprocess.Popen[bytes]) -> None:
        """Do one bad thing to one worker, after a while."""
        until = time.monotonic() + self.dice.uniform(0.4, 1.6) * self.options.pause
        while time.monotonic() < until and producer.poll() is None:
            for slot in slots:
                slot.tend(time.monotonic())
            time.sleep(0.02)
        slot, lease = self.dice.choice(slots), self.options.lease
        what = self.dice.choice(["kill", "kill", "long stop", "long stop", "short stop"])
        self.done[what] += 1
        if what == "kill":
            slot.kill()
        else:
            slot.stop(self.dice.uniform(1.4, 3) * lease if what == "long stop" else self.dice.uniform(0.05, 0.7) * lease)

    def unfinished(self) -> int:
        with closing(sqlite3.connect(self.db, timeout=10)) as db:
            [count] = db.execute("SELECT count(*) FROM tinyq_jobs WHERE state IN ('pending', 'running')").fetchone()
        return int(count)


async def make_file(path: Path) -> None:
    async with tinyq.TinyQ(path, worker=False):
        with closing(sqlite3.connect(path, timeout=10)) as db:
            db.executescript(TRIGGERS)


def end(process: subprocess.Popen[bytes]) -> int:
    """Tell a process to end; its exit code, or that of a kill if it does not end."""
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
    return process.wait()


def evidence(folder: Path, unfinished: int, exits: list[int]) -> Evidence:
    notes = [json.loads(line) for log in folder.glob("*.log") for line in log.read_text().splitlines()]
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for note in sorted(notes, key=lambda note: note["at"]):
        note["id"] = note.get("id", "").replace("-", "").upper()
        of[note["what"]].append(note)
    with closing(sqlite3.connect(folder / "jobs.db", timeout=10)) as db:
        rows = db.execute("SELECT hex(id), task, state, reason, attempts, snoozes, interruptions FROM tinyq_jobs").fetchall()
        events = db.execute(f"SELECT {EVENT_COLUMNS} FROM chaos_events ORDER BY n").fetchall()
        [[integrity], *_] = db.execute("PRAGMA integrity_check").fetchall()
    logged = (folder / "members.txt").read_text().splitlines()
    return Evidence(
        acknowledged={note["id"]: note["task"] for note in of["ack"]},
        starts=[Start(*(note[name] for name in Start._fields)) for note in of["start"]],
        ends=[End(*(note[name] for name in End._fields)) for note in of["end"]],
        cancelled=frozenset(note["id"] for note in of["cancel"]),
        errors=[f"{note['by']}: {note['call']}: {note['error']}" for note in of["error"]],
        events=[Event(*event) for event in events],
        rows={id: Row(*values) for id, *values in rows},
        integrity=integrity,
        unfinished=unfinished,
        exits=exits,
        defects=[line for line in logged if "a defect in tinyq" in line or "was never retrieved" in line],
    )


def summary(run: Run, found: Evidence) -> Iterable[str]:
    """What the run was, in a few lines; without disturbance it would show nothing."""
    states = Counter(row.state for row in found.rows.values())
    yield f"seed {run.options.seed}: {len(found.acknowledged):,} jobs acknowledged; " + ", ".join(
        f"{count:,} {state}" for state, count in sorted(states.items())
    )
    yield f"{run.done['kill']} kills, {run.done['long stop']} long stops, {run.done['short stop']} short ones; " + (
        f"{run.restarts} processes started again"
    )
    claims, losses = sum(event.is_claim for event in found.events), sum(event.is_loss for event in found.events)
    renewals = sum(event.old_state == event.state == "running" for event in found.events)
    yield f"{claims:,} claims, {len(found.starts):,} starts, {renewals:,} renewals, {losses:,} claims lost"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lease", type=float, default=1.0, help="seconds (default 1)")
    parser.add_argument("--slots", type=int, default=10, help="jobs that run at once in a worker (default 10)")
    parser.add_argument("--rate", type=float, default=120.0, help="jobs enqueued in a second, at most (default 120)")
    parser.add_argument("--pause", type=float, default=2.5, help="seconds between two kills or stops (default 2.5)")
    parser.add_argument("--poison", type=int, default=5, help="jobs that end their process (default 5)")
    parser.add_argument("--seconds", type=float, default=360.0, help="the run's bound (default 360)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="default: another each time")
    parser.add_argument("--folder", type=Path, help="where to keep the file and the logs; default: nowhere")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=options.folder is None)  # what an earlier run left would be taken for evidence
        began = time.monotonic()
        with Run(folder, options) as run:
            found = run.go()
        for line in summary(run, found):
            print(line)
    failures = broken(found)
    for name, cases in failures.items():
        print(f"BROKEN: {name}: {len(cases)} cases", *cases[:10], sep="\n  ")
    for name in CHECKS:
        if name not in failures:
            print(f"holds: {name}")
    print(f"{time.monotonic() - began:.0f} s; {'FAILED, seed ' + str(options.seed) if failures else 'all invariants hold'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(parse()))
