"""An application and a TinyQ for worker processes, for test_worker.py; FOLDER names the directory of their files."""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

import tinyq

FOLDER = Path(os.environ["FOLDER"])
DB = FOLDER / "jobs.db"
q = tinyq.TinyQ(DB, worker=False, queues={"own": 0})
engines: list[str] = []


def mark(what: str) -> None:
    with (FOLDER / "marks").open("a") as marks:
        marks.write(what + "\n")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
    engines.append("open")
    app.state.engine = engines[0]
    async with tinyq.lifespan(app, db=DB, worker=False, grace=0, lease=float(os.environ.get("LEASE", "30"))) as state:
        yield state
        asyncio.get_running_loop().call_soon(mark, "draining")  # once the drain has begun
    mark("closed")


app = Starlette(lifespan=lifespan)


@asynccontextmanager
async def hanging_lifespan(app: Starlette) -> AsyncIterator[None]:
    async with q:
        yield
    mark("hangs")
    await asyncio.Event().wait()


hanging = Starlette(lifespan=hanging_lifespan)


@asynccontextmanager
async def stubborn_lifespan(app: Starlette) -> AsyncIterator[None]:
    async with q:
        yield
    mark("stops")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


stubborn = Starlette(lifespan=stubborn_lifespan)


@asynccontextmanager
async def slow_lifespan(app: Starlette) -> AsyncIterator[None]:
    mark("starting")
    try:
        await asyncio.Event().wait()
    finally:
        mark("gave up")
    yield


slow = Starlette(lifespan=slow_lifespan)


def one_copy_in_a_child() -> bool:
    return sys.modules["__main__"].__dict__["TinyQ"] is tinyq.TinyQ


@q.task(name="identity", result_ttl=60)
@tinyq.task(name="identity", result_ttl=60)
async def identity() -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        in_child = pool.apply(one_copy_in_a_child)
    return {
        "name": tinyq.__name__,
        "main": sys.modules["__main__"] is sys.modules["tinyq"],
        "module": tinyq.TinyQ.__module__,
        "pickled": pickle.loads(pickle.dumps(tinyq.Retry)) is tinyq.Retry,
        "job": tinyq.current_job().task,
        "state": app.state.engine if engines else None,
        "child": in_child,
    }


@q.task(name="note")
@tinyq.task(name="note")
async def note(what: str) -> None:
    mark(what)


@tinyq.task(name="stay")
async def stay() -> None:
    """Until it is released, or cancelled."""
    mark(f"started {os.getpid()}")
    try:
        while not (FOLDER / "release").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        mark("cancelled")
        raise
    mark("completed")
