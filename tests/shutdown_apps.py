"""Two apps with the same background job, for test_shutdown_server.py; MARKS names the file that it writes to, RELEASE the one
that it waits for."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import tinyq

MARKS = Path(os.environ["MARKS"])
RELEASE = Path(os.environ["RELEASE"])


def mark(what: str) -> None:
    with MARKS.open("a") as marks:
        marks.write(what + "\n")


async def job() -> None:
    mark("started")
    try:
        while not RELEASE.exists():  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        mark("cancelled")
        raise
    mark("completed")


bare = FastAPI()
kept: set[asyncio.Task[None]] = set()  # so that it is not the garbage collector that ends them


@bare.post("/job")
async def start_bare() -> None:
    kept.add(asyncio.create_task(job()))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    async with tinyq.lifespan(app, grace=60) as state:
        yield state
        asyncio.get_running_loop().call_soon(mark, "draining")  # once the drain has begun


owned = FastAPI(lifespan=lifespan)


@owned.post("/job")
async def start_owned() -> None:
    await tinyq.enqueue(job)


@owned.get("/stream")
async def stream() -> StreamingResponse:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"."
            await asyncio.sleep(0.05)

    return StreamingResponse(endless())
