"""How soon an urgent job starts beside a million that wait because of a limit, compared with an empty table.

    python benchmarks/limits.py [--rows 1000000] [--starts 200] [--synchronous full] [--folder FOLDER]

Three files: an empty one, one with a million due jobs of a task at its limit (`max_running_total=1`, and one runs), and one with
as many of a single value of `limit_by`, which is at its limit, too. A worker is opened on each in turn, with the same tasks, and
gets one urgent job at a time: of a higher priority in the same queue, in a queue of its own, and of a higher priority from
another TinyQ on the file, whose job has to be claimed even if nothing else waits. Prints medians and p99 of the time from the
call of enqueue to the start of the handler; exits 1 if a median is more than 2 ms above that of the empty table. Takes about two
minutes and half a gigabyte in FOLDER (default: the temporary one).
"""

import argparse
import asyncio
import logging
import math
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import tinyq

ROUNDS = 10  # in which the files take turns
WARM_UP = 3  # starts of each round that are not counted
ALLOWED = 2.0  # ms
HOUR = 3_600_000_000
ACCOUNT = "acme"

# task, arguments and limit value of the jobs that wait
Backlog = tuple[str, str, str]
BACKLOGS: dict[str, Backlog | None] = {
    "an empty table": None,
    "a task at its limit": ("report", "[[],{}]", ""),
    "a limit_by value at its limit": ("sync", f'[["{ACCOUNT}"],{{}}]', f'"{ACCOUNT}"'),
}

# How the urgent job is enqueued: through the TinyQ that runs it or not, and with which options.
Enqueue = Callable[..., Coroutine[Any, Any, tinyq.Job[Any]]]
WAYS: dict[str, tuple[bool, tinyq.Options]] = {
    "of a higher priority": (True, {"durable": True, "priority": 10}),
    "in a queue of its own": (True, {"durable": True, "queue": "alarms"}),
    "from another TinyQ": (False, {"durable": True, "priority": 10}),
}

INSERT = (
    "INSERT INTO tinyq_jobs (id, namespace, task, queue, lane, limit_value, priority, run_at, created, state, ready, payload, "
    "payload_version, attempts, claim_no, snoozes, interruptions, lost) "
    "VALUES (?, 'default', ?, 'default', ?, ?, 0, ?, ?, 'pending', 1, ?, 1, 0, 0, 0, 0, 0)"
)


def rows(backlog: Backlog, count: int) -> Iterator[tuple[object, ...]]:
    task, payload, value = backlog
    lane = tinyq.lane_of("default", "default", task, value)
    earliest = time.time_ns() // 1_000 - HOUR
    for number in range(count):
        yield os.urandom(16), task, lane, value, earliest + number, earliest, payload


async def make_file(path: Path, backlog: Backlog | None, count: int) -> None:
    store = tinyq.SQLiteStore(str(path), synchronous="normal")
    await store.open()
    await store.close()
    if backlog is not None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = OFF")
            db.execute("BEGIN IMMEDIATE")
            db.executemany(INSERT, rows(backlog, count))
            db.execute("COMMIT")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class Worker:
    """A worker on one of the files, and when its urgent jobs start."""

    def __init__(self, path: Path, synchronous: Any) -> None:
        self.limited = asyncio.Event()
        self.running = 0
        self.started = asyncio.Queue[float]()
        self.q = tinyq.TinyQ(path, queues={"alarms": 5}, synchronous=synchronous, grace=0)
        self.elsewhere = tinyq.TinyQ(path, worker=False, synchronous=synchronous)
        self.q.task(name="report", max_running_total=1)(self.hold)
        self.q.task(name="sync", max_running_total=1, limit_by="account_id")(self.hold_account)
        self.q.task(name="alarm")(self.alarm)
        self.elsewhere.task(name="alarm")(self.alarm)

    async def hold(self) -> None:
        self.running += 1
        if self.running > 1:
            raise RuntimeError(f"{self.running} jobs run, and their limit is 1")
        self.limited.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1

    async def hold_account(self, account_id: str) -> None:
        await self.hold()

    async def alarm(self) -> None:
        self.started.put_nowait(time.perf_counter())

    async def start(self, enqueue: Enqueue, options: tinyq.Options) -> float:
        """Milliseconds from the call of enqueue to the start of the handler."""
        begin = time.perf_counter()
        await enqueue("alarm", **options)
        took = (await self.started.get()) - begin
        await asyncio.sleep(0.02)  # until it is written down, and the worker idle again
        return took * 1e3

    async def measure(self, times: Mapping[str, list[float]], starts: int, *, held: bool) -> None:
        async with self.q, self.elsewhere:
            if held:
                await self.limited.wait()
            for name, (here, options) in WAYS.items():
                enqueue = self.q.enqueue if here else self.elsewhere.enqueue
                times[name].extend([await self.start(enqueue, options) for _ in range(WARM_UP + starts)][WARM_UP:])
            if self.running != held:
                raise RuntimeError(f"{self.running} jobs of a task run, and should be {held:d}")


async def measure(folder: Path, given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by backlog and way."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, backlog in BACKLOGS.items():
        await make_file(folder / f"{name}.db", backlog, given.rows)
        found[name] = {way: [] for way in WAYS}
    for turn in range(ROUNDS):
        for name in BACKLOGS if turn % 2 == 0 else reversed(BACKLOGS):
            worker = Worker(folder / f"{name}.db", given.synchronous)
            await worker.measure(found[name], math.ceil(given.starts / ROUNDS), held=BACKLOGS[name] is not None)
    return found


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[math.ceil(len(times) * share) - 1]


async def main() -> int:
    given = parse()
    logging.getLogger("tinyq").setLevel(logging.ERROR)  # that a million wait is no news here
    print(f"start of an urgent job beside {given.rows:,} that wait, in ms; synchronous={given.synchronous}")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = await measure(Path(folder), given)
    too_slow = False
    for way in WAYS:
        print(f"{way:34} {'median':>9} {'p99':>9} {'median above empty':>20}")
        empty = statistics.median(found["an empty table"][way])
        for name, times in found.items():
            median = statistics.median(times[way])
            late = median > empty + ALLOWED
            too_slow |= late
            shown = f"{median:9.2f} {percentile(times[way], 0.99):9.2f} {median - empty:+20.2f}"
            print(f"  {name:32} {shown}{'  TOO MUCH' if late else ''}", flush=True)
    return 1 if too_slow else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--starts", type=int, default=200, help="of each way, on each file")
    parser.add_argument("--synchronous", choices=("full", "normal"), default="full")
    parser.add_argument("--folder", type=Path, help="on a real disk; default: the temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
