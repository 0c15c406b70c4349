"""What requests notice of jobs that crash, hang and leave in processes of their own: latency under uvicorn, with and without.

    python benchmarks/process_latency.py [SECONDS]

Sends a request every 5 ms for SECONDS (default 10) to an idle server, and again while three kinds of jobs end badly there, as
fast as they can: a segfault, `os._exit`, and a function that never returns and is killed at its timeout. Rounds of both take
turns. With fewer processors than processes they compete, which is no matter of the event loop: the last line gives the longest
time for which that loop did not turn.
"""

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinyq

if TYPE_CHECKING:  # the processes of the jobs import this file, too
    import httpx

ROUNDS = 2
EVERY = 0.005  # seconds between requests


@tinyq.task(name="crash", run_in="process", retry=False, queue="crash")
def crash() -> None:
    ctypes.string_at(0)


@tinyq.task(name="leave", run_in="process", retry=False, queue="leave")
def leave() -> None:
    os._exit(3)


@tinyq.task(name="hang", run_in="process", retry=False, queue="hang", timeout=2)
def hang() -> None:
    while True:
        time.sleep(3600)


def make_app() -> Any:
    from fastapi import FastAPI

    ended: dict[str, int] = {}
    lag = 0.0
    wanted = False

    @tinyq.on_dead
    async def count(job: tinyq.Job[Any]) -> None:
        what = f"{job.task}: {job.error}"
        ended[what] = ended.get(what, 0) + 1
        if wanted:
            await tinyq.enqueue(job.task)

    async def watch() -> None:
        nonlocal lag
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            lag = max(lag, time.perf_counter() - due)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with tinyq.lifespan(app, grace=0, queues={"crash": 1, "leave": 1, "hang": 1}):
            watching = asyncio.create_task(watch())
            yield
            watching.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    async def answer() -> dict[str, int]:
        return {"number": 42}

    @app.post("/jobs/{on}")
    async def switch(on: bool) -> dict[str, Any]:
        nonlocal wanted, lag
        wanted = on
        if on:
            for task in (crash, leave, hang):
                await task.enqueue()
        else:
            await tinyq.drain()
        told = {"ended": dict(ended), "lag": lag}
        lag = 0.0
        return told

    return app


async def latencies(client: "httpx.AsyncClient", seconds: float) -> list[float]:
    took: list[float] = []

    async def request() -> None:
        start = time.perf_counter()
        (await client.get("/")).raise_for_status()
        took.append(time.perf_counter() - start)

    async with asyncio.TaskGroup() as requests:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            requests.create_task(request())
            await asyncio.sleep(EVERY)
    return took


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1e3


async def measure(url: str, seconds: float) -> None:
    import httpx

    without: list[float] = []
    with_jobs: list[float] = []
    quiet = lag = 0.0
    told: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await latencies(client, 1)
        await client.post("/jobs/false")
        for _ in range(ROUNDS):
            without += await latencies(client, seconds / ROUNDS)
            quiet = max(quiet, (await client.post("/jobs/true")).json()["lag"])
            with_jobs += await latencies(client, seconds / ROUNDS)
            told = (await client.post("/jobs/false")).json()
            lag = max(lag, told["lag"])
    print(f"{'ms':>10} {'without':>10} {'with':>10}")
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("longest", 1.0)):
        print(f"{name:>10} {percentile(without, share):10.1f} {percentile(with_jobs, share):10.1f}")
    print(f"{'requests':>10} {len(without):10,} {len(with_jobs):10,}")
    print(f"{'loop stood':>10} {quiet * 1e3:10.1f} {lag * 1e3:10.1f}")
    for what, times in sorted(told["ended"].items()):
        print(f"{times:4} × {what}")


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "--factory", "process_latency:make_app"]
    server = subprocess.Popen([*app, "--port", str(port), "--log-level", "critical"], stderr=subprocess.DEVNULL)
    try:
        with socket.socket() as client:
            while client.connect_ex(("127.0.0.1", port)) != 0:
                time.sleep(0.05)
        asyncio.run(measure(f"http://127.0.0.1:{port}", float(sys.argv[1]) if len(sys.argv) > 1 else 10.0))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
