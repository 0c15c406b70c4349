"""A stub of a search service, for polling_engine.py: it keeps messages by source, and takes 50 ms for a search."""

import asyncio
import os
import time
from collections import deque
from typing import Annotated, Any

from fastapi import Body, FastAPI

LATENCY = float(os.environ.get("SEARCH_LATENCY", "0.05"))  # seconds

app = FastAPI(title="search backend")
messages: deque[dict[str, Any]] = deque(maxlen=10_000)
searches: deque[tuple[float, list[str]]] = deque(maxlen=1_000)  # when, and for which sources


@app.post("/messages", status_code=201)
async def write(source: Annotated[str, Body()], text: Annotated[str, Body()]) -> int:
    number: int = messages[-1]["number"] + 1 if messages else 1
    messages.append({"number": number, "at": time.time(), "source": source, "text": text})
    return number


@app.post("/search")
async def search(sources: Annotated[list[str], Body()], since: Annotated[float, Body()]) -> list[dict[str, Any]]:
    searches.append((time.time(), sources))
    await asyncio.sleep(LATENCY)
    wanted = set(sources)
    return [message for message in messages if message["source"] in wanted and message["at"] >= since]


@app.get("/searches")
async def told(after: float = 0.0) -> list[tuple[float, list[str]]]:
    return [search for search in searches if search[0] > after]
