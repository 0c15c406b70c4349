"""One process of a fleet, for fleet.py: `python member.py DB MARKS WISHES`, the last as JSON.

It works until its standard input ends, so that it cannot outlive whoever started it, and notes what it does in MARKS.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from typing import Any

import tinyq

DB, MARKS, WISHES = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def mark(*words: object) -> None:
    with open(MARKS, "a") as marks:  # lines this short are appended whole
        marks.write(" ".join(map(str, (os.getpid(), *words))) + "\n")


async def note(n: int) -> None:
    mark("note", n)


async def killed(n: int) -> None:
    mark("killed", n, tinyq.current_job().attempt)
    os.kill(os.getpid(), signal.SIGKILL)


async def leaves(n: int) -> None:
    mark("leaves", n, tinyq.current_job().attempt)
    os._exit(1)


async def hangs_once(n: int) -> None:
    mark("hangs_once", n, tinyq.current_job().attempt)
    if tinyq.current_job().attempt == 1:
        await asyncio.Event().wait()


async def hangs_until_told(n: int) -> None:
    mark("hangs_until_told", n, tinyq.current_job().attempt)
    if tinyq.current_job().attempt == 1:
        try:
            await asyncio.Event().wait()
        finally:
            mark("told", n)


def looks_until_told(n: int) -> None:
    mark("looks_until_told", n)
    while not tinyq.current_job().cancelled:
        time.sleep(0.01)
    mark("told", n)
    raise tinyq.Cancel("told")


async def fails_once(n: int) -> None:
    mark("fails_once", n, tinyq.current_job().attempt, time.time_ns() // 1000)
    if tinyq.current_job().attempt == 1:
        raise ValueError(n)


async def long(seconds: float) -> None:
    mark("long", "began")
    await asyncio.sleep(seconds)
    mark("long", "ended")


async def blocks(seconds: float) -> None:
    mark("blocks", "began")
    time.sleep(seconds)  # noqa: ASYNC251 - the fault itself
    mark("blocks", "ended")


async def batch_hangs_once(items: list[int]) -> None:
    mark("batch_hangs_once", *items)
    if tinyq.current_job().attempt == 1:
        await asyncio.Event().wait()


async def batch_killed_by_seven(items: list[int]) -> None:
    mark("batch_killed_by_seven", *items)
    if 7 in items:
        os.kill(os.getpid(), signal.SIGKILL)


async def tick() -> None:
    fire_time = tinyq.current_job().fire_time
    mark("tick", fire_time.timestamp() if fire_time else None)


async def main() -> None:
    queues = [tinyq.TinyQ(DB, **WISHES["options"]) for _ in range(WISHES["loops"])]
    for q in queues:
        for name, starts in WISHES["tasks"].items():
            retry = tinyq.Retry(max_attempts=starts, base=2, jitter="none")
            q.task(name=name, retry=retry)(globals()[name])
        for name, size in WISHES["batches"].items():
            q.batch(size, name=name, retry=tinyq.Retry(max_attempts=3, base=2, jitter="none"))(globals()[name])
        if WISHES["every"]:
            options: dict[str, Any] = WISHES["every"]
            q.every(**options)(tick)
    async with contextlib.AsyncExitStack() as stack:
        for q in queues:
            await stack.enter_async_context(q)
        mark("started")
        await asyncio.to_thread(sys.stdin.read)
        for q in queues:
            for schedule in (await q.stats()).schedules:
                mark("schedule", schedule.fired, schedule.skipped, schedule.missed)


logging.basicConfig(format="%(levelname)s %(message)s")
asyncio.run(main())
