"""One process of a chaos run, for chaos.py: `python chaos_member.py ROLE TAG FOLDER WISHES`, the last as JSON.

A worker works until its standard input ends. The producer ends when it has enqueued all its jobs. Both die with the process
that started them, also while they are stopped. What happens is appended to a file of this process's own.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import chaos

import tinyq

ROLE, TAG, FOLDER, WISHES = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
LOG = os.open(FOLDER / f"{TAG}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
dice = random.Random(f"{WISHES['seed']} {TAG}")
with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: when the parent dies


def note(what: str, **facts: object) -> None:
    line = {"what": what, "by": TAG, "at": time.time_ns() // 1000, "steady": time.monotonic()} | facts
    os.write(LOG, (json.dumps(line) + "\n").encode())  # in one write, which a kill does not tear


def began() -> None:
    job = tinyq.current_job()
    note("start", id=job.id, task=job.task, attempt=job.attempt)


def ended() -> None:
    note("end", id=tinyq.current_job().id)


async def sleeps(seconds: float) -> None:
    began()
    await asyncio.sleep(seconds)
    ended()


def blocks(seconds: float) -> None:
    began()
    time.sleep(seconds)
    ended()


async def raises(seconds: float) -> None:
    began()
    await asyncio.sleep(seconds)
    raise ValueError(seconds)


def fails_once(seconds: float) -> None:
    began()
    time.sleep(seconds)
    if tinyq.current_job().attempt == 1:
        raise ValueError(seconds)
    ended()


async def snoozes(seconds: float) -> None:
    began()
    if dice.random() < 0.6:
        raise tinyq.Snooze(seconds)
    ended()


async def gives_up(seconds: float) -> None:
    began()
    await asyncio.sleep(seconds)
    raise tinyq.Cancel("it is of no use")


async def poison(seconds: float) -> None:
    began()
    await asyncio.sleep(seconds)
    os._exit(9)


async def enqueues(seconds: float) -> None:
    began()
    await enqueue("sleeps", seconds)
    ended()


async def enqueue(task: str, seconds: float, **options: Any) -> tinyq.Job[Any]:
    try:
        job = await q.enqueue(task, seconds, durable=True, **options)
    except Exception as error:
        note("error", call="enqueue", error=repr(error))
        raise
    note("ack", id=job.id, task=task)
    return job


async def enqueue_many(tasks: list[str]) -> list[tinyq.Job[Any]]:
    try:
        jobs = await q.enqueue_many([(task, (length(task),)) for task in tasks], durable=True)
    except Exception as error:
        note("error", call="enqueue_many", error=repr(error))
        raise
    for job in jobs:
        note("ack", id=job.id, task=job.task)
    return jobs


async def cancel(job: tinyq.Job[Any]) -> None:
    await asyncio.sleep(dice.uniform(0, 1.5 * WISHES["lease"]))
    note("cancel", id=job.id)
    try:
        await job.cancel()
    except Exception as error:
        note("error", call="cancel", error=repr(error))


def length(task: str) -> float:
    """Seconds: most jobs are short, some about as long as the lease, a few much longer."""
    if task in ("snoozes", "poison"):
        return dice.uniform(0, 0.2)
    least, most = dice.choices([(0, 0.05), (0.1, 1), (1, 2.5)], [85, 10, 5])[0]
    return float(WISHES["lease"] * dice.uniform(least, most))


def plan() -> list[str]:
    """The tasks of all jobs to come, in a random order."""
    ordinary = [task for task in chaos.TASKS if task != "poison"]
    tasks = dice.choices(ordinary, [chaos.TASKS[task].share for task in ordinary], k=WISHES["jobs"] - WISHES["poison"])
    tasks += ["poison"] * WISHES["poison"]
    dice.shuffle(tasks)
    return tasks


async def produce() -> None:
    tasks, cancels, began = plan(), set(), time.monotonic()
    async with q:
        while tasks:
            size = dice.randint(1, 20)
            some, tasks = tasks[:size], tasks[size:]
            if dice.random() < 0.3:
                jobs = await enqueue_many(some)
            else:
                calls = [
                    enqueue(task, length(task), delay=dice.choice([0, 0, 0, dice.uniform(0, 2)]), priority=dice.randint(-1, 1))
                    for task in some
                ]
                jobs = await asyncio.gather(*calls)
            cancels |= {asyncio.create_task(cancel(job)) for job in jobs if dice.random() < 0.03}
            ahead = (WISHES["jobs"] - len(tasks)) / WISHES["rate"] - (time.monotonic() - began)
            await asyncio.sleep(max(0.0, ahead))
        await asyncio.gather(*cancels)


async def work() -> None:
    async with q:
        await asyncio.to_thread(sys.stdin.read)


logging.basicConfig(format=f"%(asctime)s {TAG} %(levelname)s %(message)s")
q = tinyq.TinyQ(
    FOLDER / "jobs.db",
    worker=ROLE == "worker",
    worker_name=TAG,
    lease=WISHES["lease"],
    concurrency=WISHES["slots"],
    result_ttl=float("inf"),
    failure_ttl=float("inf"),
)
if ROLE == "worker":
    for name, about in chaos.TASKS.items():
        q.task(name=name, retry=tinyq.Retry(max_attempts=about.starts, base=0.2, cap=1))(globals()[name])
asyncio.run(work() if ROLE == "worker" else produce())
