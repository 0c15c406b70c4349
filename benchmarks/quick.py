"""What a job costs: best-effort beside bare asyncio, durable beside bare sqlite3, and how far a schedule drifts.

    python benchmarks/quick.py [FOLDER]

Takes about 20 seconds. The database is made in FOLDER (default: the temporary one), which should be on a real disk. Machines
differ and are shared, so compare the ratios of one run, not the figures of two.
"""

import asyncio
import gc
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import tinyq

ROUNDS = 3
BEST_EFFORT = 20_000
ENQUEUED = 1_000
DRAINED = 5_000
SLOTS = 500  # for durable jobs
PERIOD, TICKS = 0.1, 50

Measured = Callable[[], Awaitable[float]]  # answers microseconds per job


async def noop(number: int = 0) -> None:
    pass


async def timed(work: Awaitable[object], jobs: int) -> float:
    gc.collect()
    start = time.perf_counter()
    await work
    return (time.perf_counter() - start) / jobs * 1e6


async def bare_tasks() -> float:
    async def work() -> None:
        await asyncio.gather(*[asyncio.create_task(noop(i)) for i in range(BEST_EFFORT)])

    return await timed(work(), BEST_EFFORT)


async def best_effort(slots: int) -> float:
    async def work() -> None:
        for i in range(BEST_EFFORT):
            await q.enqueue(noop, i)
        await q.drain()

    async with tinyq.TinyQ(concurrency=slots, max_pending=BEST_EFFORT) as q:
        return await timed(work(), BEST_EFFORT)


def new_queue(folder: str, *, worker: bool) -> tinyq.TinyQ:
    q = tinyq.TinyQ(Path(folder, "jobs.db"), concurrency=SLOTS, worker=worker)
    q.task(name="noop")(noop)
    return q


async def bare_commits(place: str | None) -> float:
    async def work() -> None:
        for i in range(ENQUEUED):
            db.execute("INSERT INTO jobs (payload) VALUES (?)", (f"[[{i}], {{}}]",))

    with tempfile.TemporaryDirectory(dir=place) as folder:
        db = sqlite3.connect(Path(folder, "bare.db"), isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE jobs (seq INTEGER PRIMARY KEY, payload TEXT)")
        try:
            return await timed(work(), ENQUEUED)
        finally:
            db.close()


async def durable_enqueues(place: str | None) -> float:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        async with new_queue(folder, worker=False) as q:
            return await timed(asyncio.gather(*[q.enqueue("noop", i, durable=True) for i in range(ENQUEUED)]), ENQUEUED)


async def durable_drain(place: str | None) -> float:
    async def work() -> None:
        async with new_queue(folder, worker=True) as q:
            await q.drain()

    with tempfile.TemporaryDirectory(dir=place) as folder:
        async with new_queue(folder, worker=False) as q:
            await q.enqueue_many([("noop", (i,)) for i in range(DRAINED)], durable=True)
        return await timed(work(), DRAINED)


async def ticks() -> tuple[list[float], list[float]]:
    """When each tick started, and how long after its fire time; in seconds."""
    started: list[float] = []
    late: list[float] = []
    enough = asyncio.Event()
    q = tinyq.TinyQ()

    @q.every(PERIOD, name="tick")
    async def tick() -> None:
        fire_time = tinyq.current_job().fire_time
        assert fire_time is not None
        started.append(time.perf_counter())
        late.append(time.time() - fire_time.timestamp())
        if len(started) == TICKS:
            enough.set()

    async with q:
        await enough.wait()
    return started[:TICKS], late[:TICKS]


async def compare(title: str, *peers: tuple[str, Measured]) -> None:
    """Medians of alternating rounds; the first peer is what the others are compared with."""
    times: dict[str, list[float]] = {name: [] for name, _ in peers}
    for round_ in range(ROUNDS):
        for name, measure in peers if round_ % 2 == 0 else reversed(peers):
            times[name].append(await measure())
    print(title)
    base = statistics.median(times[peers[0][0]])
    for name, found in times.items():
        median = statistics.median(found)
        print(f"  {name:46} {median:8.1f} µs per job  x {median / base:5.2f}   ({min(found):.1f} to {max(found):.1f})")


async def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else None
    await best_effort(BEST_EFFORT)  # warms up
    await compare(
        f"{BEST_EFFORT:,} best-effort jobs that do nothing, enqueued and drained",
        ("asyncio.create_task and gather", bare_tasks),
        ("tinyq, a slot for each", lambda: best_effort(BEST_EFFORT)),
        ("tinyq, 20 slots", lambda: best_effort(20)),
    )
    await compare(
        f"{ENQUEUED:,} durable enqueues at once, synchronous=full; {DRAINED:,} durable jobs drained, {SLOTS} slots",
        ("sqlite3, a commit for each insert", lambda: bare_commits(place)),
        ("tinyq, enqueued", lambda: durable_enqueues(place)),
        ("tinyq, drained, from start to stop", lambda: durable_drain(place)),
    )
    started, late = await ticks()
    drift = started[-1] - started[0] - (TICKS - 1) * PERIOD
    print(f"every({PERIOD}), {TICKS} ticks")
    print(f"  drift {drift * 1e3:.2f} ms over {(TICKS - 1) * PERIOD:.1f} s")
    print(f"  late  {statistics.median(late) * 1e3:.2f} ms after the fire time (median), {max(late) * 1e3:.2f} ms at most")


if __name__ == "__main__":
    asyncio.run(main())
