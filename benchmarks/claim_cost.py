"""What a claim costs beside a million rows that it is not to take, compared with a thousand of the same kind.

    python benchmarks/claim_cost.py [--rows 1000000] [--repeats 200] [--folder FOLDER]

For each kind of row two files are made, one with a thousand and one with a million of them, each with 20 jobs more that a claim
takes. The claims go through `SQLiteStore.claim`; between two of them the rows are put back. The files take turns, so that
whatever else the machine does meets both. Prints six ratios of medians; exits 1 if one is above 1.5. Takes about five minutes
and half a gigabyte in FOLDER (default: the temporary one).
"""

import argparse
import asyncio
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import tinyq

FEW = 1_000
TAKEN = 20  # jobs of a claim
LIMIT = 1.5
NOW = 1_800_000_000_000_000
HOUR = 3_600_000_000

ROOM = tinyq.Room(shared=TAKEN, named={"full": 0}, threads=TAKEN, fragile=1, tasks={"send": False, "report": True})

# What differs from a job that a claim would take.
KINDS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "due backlog": ({},),
    "future jobs": ({"ready": 0, "run_at": NOW + HOUR},),
    "jobs without a free slot": ({"queue": "full"},),
    "jobs of an unknown task": ({"task": "stranger"},),
    "fragile jobs": tuple(
        {"ready": 3, "lost": 1, "attempts": 1, "claim_no": 1} | where for where in ({}, {"queue": "full"}, {"task": "stranger"})
    ),
    "finished jobs": tuple(
        {"state": state, "ready": None, "attempts": 1, "claim_no": 1, "finished": NOW - HOUR, "keep_until": keep_until}
        for state, keep_until in (("done", NOW + HOUR), ("dead", NOW + HOUR), ("dead", None), ("cancelled", NOW + HOUR))
    ),
}

COLUMNS = (
    "id, namespace, task, queue, lane, priority, run_at, created, state, ready, payload, payload_version, attempts, claim_no, "
    "snoozes, interruptions, lost, finished, keep_until"
)
INSERT = f"INSERT INTO tinyq_jobs ({COLUMNS}) VALUES ({', '.join(':' + name for name in COLUMNS.split(', '))})"
PUT_BACK = (
    "UPDATE tinyq_jobs SET state = 'pending', ready = 1, worker = NULL, lease = NULL, started = NULL, attempts = 0, claim_no = 0 "
    "WHERE state = 'running'"
)


def job(number: int, **others: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS.split(", "), 0)
    row |= {"id": os.urandom(16), "namespace": "default", "task": "send", "queue": "default", "state": "pending"}
    row |= {"ready": 1, "run_at": NOW - HOUR + number, "created": NOW - HOUR, "payload": '[["somebody@example.com"],{}]'}
    row |= {"payload_version": 1, "finished": None, "keep_until": None}
    row |= others
    return row | {"lane": tinyq.lane_of("default", row["queue"], row["task"])}


def rows(kind: str, count: int) -> Iterator[dict[str, Any]]:
    """So many of a kind, then those that a claim takes: in front of the backlog, behind what cannot start."""
    changes = KINDS[kind]
    for number in range(count):
        yield job(number, **changes[number % len(changes)])
    for number in range(TAKEN):
        yield job(number, priority=1)


async def make_store(path: Path, kind: str, count: int) -> tinyq.SQLiteStore:
    store = tinyq.SQLiteStore(str(path), synchronous="normal")
    await store.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN IMMEDIATE")
        db.executemany(INSERT, rows(kind, count))
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return store


async def claim(store: tinyq.SQLiteStore) -> float:
    """Microseconds of one claim of 20, which are pending again afterwards."""
    start = time.perf_counter()
    claimed = await store.claim(ROOM, "benchmark", NOW + HOUR, NOW)
    elapsed = time.perf_counter() - start
    if [row.priority for row in claimed.rows] != [1] * TAKEN:
        raise RuntimeError(f"a claim took {len(claimed.rows)} rows, or the wrong ones")
    with closing(sqlite3.connect(store.path, isolation_level=None, timeout=10)) as db:
        db.execute(PUT_BACK)
    return elapsed * 1e6


async def measure(folder: Path, kind: str, many: int, repeats: int) -> tuple[float, float]:
    """Medians for few and for many rows."""
    stores = [await make_store(folder / f"{count}.db", kind, count) for count in (FEW, many)]
    try:
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(repeats + 10):
            for which in (0, 1) if turn % 2 else (1, 0):
                elapsed = await claim(stores[which])
                if turn >= 10:  # the first ones fill the caches
                    times[which].append(elapsed)
        return statistics.median(times[0]), statistics.median(times[1])
    finally:
        for store in stores:
            await store.close()


async def main(options: argparse.Namespace) -> int:
    print(f"a claim of {TAKEN} beside {FEW:,} and {options.rows:,} rows, medians of {options.repeats}, in microseconds")
    too_slow = False
    for kind in KINDS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            few, many = await measure(Path(folder), kind, options.rows, options.repeats)
        too_slow |= many > LIMIT * few
        print(f"  {kind:26} {few:8.0f} {many:8.0f}   x {many / few:.2f}{'  TOO MUCH' if many > LIMIT * few else ''}", flush=True)
    return 1 if too_slow else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="on a real disk; default: the temporary one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
