"""What periodic work costs, and how well it keeps its time.

    python benchmarks/schedules.py [--schedules 5000] [--seconds 10] [FOLDER]

1. 100 ticks of 100 ms with a body of 20 ms: how late each starts, and whether that grows.
2. Many schedules of one second in memory, beside one coroutine each that sleeps until its next fire time, and beside APScheduler
   if that is installed: which part of the fire times was run, and the CPU time per run.
3. As many durable recurring jobs of one second in one file.

The database is made in FOLDER (default: the temporary one). Machines differ and are shared: compare the ratios of one run.
"""

import argparse
import asyncio
import functools
import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import tinyq


class Figures:
    """Counts runs, and the CPU time that has passed since."""

    def __init__(self) -> None:
        self.runs = 0
        self._cpu = time.process_time()

    async def run(self, number: int = 0) -> None:
        self.runs += 1

    def shown(self, name: str, expected: int) -> float:
        each = (time.process_time() - self._cpu) / max(1, self.runs) * 1e6
        print(f"  {name:<42} {self.runs / expected:7.1%} of {expected:,} runs  {each:7.1f} µs of CPU each", flush=True)
        return each


async def until_half(seconds: float) -> int:
    """Wait for the middle of a second, so many seconds on; answers how many whole seconds begin meanwhile."""
    now = time.time()
    end = math.floor(now) + seconds + 0.5
    await asyncio.sleep(end - now)
    return math.floor(end) - math.floor(now)


async def bare_ticks() -> None:
    """The same with nothing but a coroutine that sleeps: what the loop's timers and the machine allow."""
    late: list[float] = []
    upcoming = math.ceil(time.time() * 10) / 10
    while len(late) < 100:
        await asyncio.sleep(upcoming - time.time())
        late.append(time.time() - upcoming)
        await asyncio.sleep(0.02)
        upcoming += 0.1
    print(f"  a coroutine that sleeps: {statistics.median(late) * 1000:.2f} ms (median), {sorted(late)[98] * 1000:.2f} ms (p99)")


async def ticks() -> None:
    late: list[float] = []
    q = tinyq.TinyQ()

    @q.every(0.1, name="tick")
    async def tick() -> None:
        fire_time = tinyq.current_job().fire_time
        assert fire_time is not None
        late.append(time.time() - fire_time.timestamp())
        await asyncio.sleep(0.02)

    async with q:
        await asyncio.sleep(11)
    late = late[:100]
    drift = (statistics.median(late[-20:]) - statistics.median(late[:20])) * 1000
    print(f"100 ticks of 100 ms: late {statistics.median(late) * 1000:.2f} ms (median), {sorted(late)[98] * 1000:.2f} ms (p99)")
    print(f"  the last 20 are {drift:+.2f} ms later than the first 20", flush=True)


async def in_memory(schedules: int, seconds: int) -> float:
    q = tinyq.TinyQ(concurrency=schedules)
    figures = Figures()
    for n in range(schedules):
        q.every(1, name=str(n))(functools.partial(figures.run, n))
    async with q:
        await until_half(1)
        figures.__init__()  # type: ignore[misc]
        fires = await until_half(seconds)
        return figures.shown("every(1), in memory", fires * schedules)


async def coroutines(schedules: int, seconds: int) -> float:
    figures = Figures()

    async def forever() -> None:
        upcoming = math.floor(time.time()) + 1
        while True:
            await asyncio.sleep(upcoming - time.time())
            await figures.run()
            upcoming += 1

    tasks = [asyncio.create_task(forever()) for _ in range(schedules)]
    await until_half(1)
    figures.__init__()  # type: ignore[misc]
    fires = await until_half(seconds)
    each = figures.shown("a coroutine each", fires * schedules)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return each


async def apscheduler(schedules: int, seconds: int) -> float:
    from apscheduler.schedulers.asyncio import AsyncIOScheduler  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    figures = Figures()
    scheduler = AsyncIOScheduler(timezone="UTC")
    for n in range(schedules):
        scheduler.add_job(figures.run, "interval", seconds=1, id=str(n), misfire_grace_time=1)
    scheduler.start()
    await until_half(1)
    figures.__init__()  # type: ignore[misc]
    fires = await until_half(seconds)
    each = figures.shown("APScheduler", fires * schedules)
    scheduler.shutdown()
    return each


async def durable(schedules: int, seconds: int, folder: Path) -> float:
    q = tinyq.TinyQ(folder / "recurring.db", concurrency=1_000)
    figures = Figures()
    poll = q.task(name="poll")(figures.run)
    async with q:
        for n in range(schedules):
            await q.schedule(poll, n, when=tinyq.Every(1), key=str(n))
        await until_half(2)
        figures.__init__()  # type: ignore[misc]
        fires = await until_half(seconds)
        each = figures.shown("recurring jobs, in a file", fires * schedules)
        missed = sum([schedule.stats.missed for schedule in await q.schedules(limit=schedules)])
        print(f"  {missed} fire times were missed")
        return each


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5_000)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("folder", nargs="?", default=None)
    given = parser.parse_args()
    asyncio.run(ticks())
    asyncio.run(bare_ticks())
    print(f"{given.schedules:,} schedules of one second, {given.seconds} seconds:")
    kinds: list[Callable[[int, int], Coroutine[None, None, float]]] = [coroutines, in_memory]
    if importlib.util.find_spec("apscheduler"):
        kinds.append(apscheduler)
    each: list[float] = [asyncio.run(kind(given.schedules, given.seconds)) for kind in kinds]
    print(f"  every(1) costs {each[1] / each[0]:.2f} times a coroutine each", end="")
    print(f", and APScheduler {each[2] / each[1]:.1f} times every(1)" if len(each) > 2 else "")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        asyncio.run(durable(given.schedules, given.seconds, Path(folder)))


if __name__ == "__main__":
    main()
