"""Several worker processes that share a limit in all of them, and are killed at random; then what ran at once is counted.

    python tests/limited.py [--kills 50] [--workers 4] [--limit 5] [--lease 1.0] [--seed N] [--folder FOLDER]

A trigger in the file counts at each claim how many jobs are claimed; the handlers keep lists of their own. After each kill the
run waits until as many handlers are at work again as the limit lets. Prints what was found; exits 1 if the limit was ever
exceeded, or was not free again within `--margin` seconds of the end of a lease. Takes about two minutes with 50 kills.
"""

import argparse
import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Self

import tinyq

TESTS = Path(__file__).parent
MEMBER = TESTS / "workers" / "limited_member.py"
COUNTER = """
    CREATE TABLE limited_claims (at INTEGER, running INTEGER);
    CREATE TRIGGER limited_claim AFTER UPDATE ON tinyq_jobs WHEN new.state = 'running' AND old.state = 'pending' BEGIN
        INSERT INTO limited_claims
            SELECT CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER), count(*) FROM tinyq_jobs
            WHERE state = 'running';
    END;
"""


class Span(NamedTuple):
    """A handler at work, from when to when (microseconds); None: it still is."""

    by: str
    start: int
    end: int | None


class Kill(NamedTuple):
    of: str
    at: int  # when it was gone
    held: int  # handlers that were at work in it
    free_at: int | None  # when as many as the limit lets were at work again


class Evidence(NamedTuple):
    spans: list[Span]
    kills: list[Kill]
    claimed: list[int]  # jobs that were claimed, at each claim
    limit: int
    lease: float


def most_at_once(spans: Iterable[Span]) -> int:
    """Of handlers at work. What ends in a moment is over before what begins in it."""
    spans = list(spans)
    changes = sorted([(span.start, 1) for span in spans] + [(span.end, -1) for span in spans if span.end is not None])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def broken(found: Evidence, margin: float) -> list[str]:
    """What speaks against the promises."""
    cases = []
    if (most := most_at_once(found.spans)) > found.limit:
        cases.append(f"{most} handlers were at work at once")
    if (most := max(found.claimed, default=0)) > found.limit:
        cases.append(f"{most} jobs were claimed at once")
    for kill in found.kills:
        if kill.free_at is None or kill.free_at - kill.at > (found.lease + margin) * 1e6:
            cases.append(f"the limit was not free again in time: {kill}")
    return cases


class Run:
    """One run, from an empty file to the evidence. No process outlives the `with` block."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.dice = random.Random(options.seed)
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        self.gone: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tag in list(self.members):
            self.kill(tag)

    def start(self) -> None:
        tag = f"w{len(self.members) + len(self.gone)}"
        wishes = json.dumps({"lease": self.options.lease, "limit": self.options.limit})
        command = [sys.executable, str(MEMBER), tag, str(self.folder), wishes]
        env = os.environ | {"PYTHONPATH": str(TESTS.parent)}
        with (self.folder / "members.txt").open("ab") as output:
            self.members[tag] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env)

    def kill(self, tag: str) -> None:
        process = self.members.pop(tag)
        process.kill()
        process.communicate()
        self.gone[tag] = time.time_ns() // 1000

    def spans(self) -> list[Span]:
        starts: dict[tuple[str, str], int] = {}
        spans = []
        for log in self.folder.glob("*.log"):
            for line in map(json.loads, log.read_text().splitlines()):
                key = line["by"], line["id"]
                if line["what"] == "start":
                    starts[key] = line["at"]
                else:
                    spans.append(Span(line["by"], starts.pop(key), line["at"]))
        return spans + [Span(by, at, self.gone.get(by)) for (by, _), at in starts.items()]

    def at_work(self) -> Mapping[str, int]:
        """How many handlers are, in each process that has any."""
        found: dict[str, int] = {}
        for span in self.spans():
            if span.end is None:
                found[span.by] = found.get(span.by, 0) + 1
        return found

    def wait_until_full(self) -> int | None:
        """Until as many handlers are at work as the limit lets; when that was, or None if it does not come to it."""
        deadline = time.monotonic() + self.options.lease + self.options.margin
        while time.monotonic() < deadline:
            if sum(self.at_work().values()) >= self.options.limit:
                return time.time_ns() // 1000
            time.sleep(0.01)
        return None

    def go(self) -> Evidence:
        asyncio.run(make_file(self.folder / "jobs.db", 200 * (self.options.kills + 1)))
        for _ in range(self.options.workers):
            self.start()
        kills = []
        for _ in range(self.options.kills):
            if self.wait_until_full() is None:
                break
            time.sleep(self.dice.uniform(0, 0.5) * self.options.lease)
            busy = self.at_work()
            tag = self.dice.choice(sorted(busy) or sorted(self.members))
            self.kill(tag)
            held = sum(span.by == tag and span.end == self.gone[tag] for span in self.spans())
            self.start()
            kills.append(Kill(tag, self.gone[tag], held, self.wait_until_full()))
        for tag in list(self.members):
            self.kill(tag)
        with closing(sqlite3.connect(self.folder / "jobs.db", timeout=10)) as db:
            claimed = [running for (running,) in db.execute("SELECT running FROM limited_claims")]
        return Evidence(self.spans(), kills, claimed, self.options.limit, self.options.lease)


async def make_file(path: Path, jobs: int) -> None:
    async with tinyq.TinyQ(path, worker=False) as q:
        await q.enqueue_many([("work", (n,)) for n in range(jobs)], durable=True)
        with closing(sqlite3.connect(path, timeout=10)) as db:
            db.executescript(COUNTER)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--lease", type=float, default=1.0, help="seconds")
    parser.add_argument("--margin", type=float, default=15.0, help="seconds after a lease within which others must have started")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--folder", type=Path, help="an empty one, which is kept")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with Run(folder, options) as run:
            found = run.go()
    delays = sorted((kill.free_at - kill.at) / 1e6 for kill in found.kills if kill.held and kill.free_at is not None)
    print(f"{len(found.spans)} starts, {len(found.kills)} kills, {len(delays)} of them of processes with jobs at work")
    print(f"most handlers at work at once: {most_at_once(found.spans)}, most jobs claimed: {max(found.claimed, default=0)}")
    if delays:
        print(f"seconds from a kill until the limit was used to the full: median {delays[len(delays) // 2]}, most {delays[-1]}")
    cases = broken(found, options.margin)
    print(*(f"BROKEN: {case}" for case in cases), f"seed {options.seed}", sep="\n")
    return 1 if cases or len(found.kills) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main(parse()))
