"""Thousands of searches that come again every second, made by several processes on one file: one request for each process.

Callers subscribe to sources over HTTP, and are told over a WebSocket what a search service (search_backend.py) finds there. Each
subscription is a durable recurring job of a batch handler. One web process has the callers; any number of engines search:

    uvicorn --app-dir examples --port 8001 search_backend:app
    TINYQ_WORKER=0 uvicorn --app-dir examples polling_engine:app
    python -m tinyq worker --app-dir examples polling_engine:app      # an engine: start three, and kill -9 one of them

    curl --json '["cat", "dog"]' 127.0.0.1:8000/subscriptions/alice
    websockets ws://127.0.0.1:8000/matches/alice
    curl --json '{"source": "cat", "text": "meow"}' 127.0.0.1:8001/messages
    curl -X DELETE 127.0.0.1:8000/subscriptions/alice/dog

What an engine has found it posts to /matches in the web process, where the WebSockets are: keep that route from the public. It
is not stored. Instead, each search reaches back over more than a lease, so that what was found and not told, because one of them
died, is found again, and a WebSocket is told everything once. A caller who connects anew is told the last seconds again.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

import tinyq

DB = os.environ.get("ENGINE_DB", "engine.db")
WEB = os.environ.get("ENGINE_WEB", "http://127.0.0.1:8000")
BACKEND = os.environ.get("ENGINE_BACKEND", "http://127.0.0.1:8001")
LEASE = float(os.environ.get("ENGINE_LEASE", "10"))
PERIOD = float(os.environ.get("ENGINE_PERIOD", "1"))  # seconds
REACH = 2 * LEASE + 10 * PERIOD  # seconds that a search goes back: what is not told within them never is

log = logging.getLogger("uvicorn.error")


listeners: dict[str, set[asyncio.Queue[dict[str, Any]]]] = {}  # by caller: what each of their WebSockets is going to be told


# All that is due at once goes into one call. A subscription is "caller/source"; very few of them find anything.
@tinyq.batch(5_000, window=0.05)
async def poll(subscriptions: list[str]) -> None:
    http: httpx.AsyncClient = tinyq.current_job().app.state.http
    callers: dict[str, list[str]] = {}  # by source
    for subscription in subscriptions:
        caller, _, source = subscription.partition("/")
        callers.setdefault(source, []).append(caller)
    try:
        search = {"sources": list(callers), "since": time.time() - REACH}
        found = (await http.post(f"{BACKEND}/search", json=search)).raise_for_status().json()
        if found:
            matches = [(caller, message) for message in found for caller in callers[message["source"]]]
            (await http.post(f"{WEB}/matches", json=matches)).raise_for_status()
    except httpx.HTTPError as error:  # no single one is to blame: they need not be tried singly, as after any other error
        log.warning("%d searches wait for the next time: %r", len(subscriptions), error)
        raise tinyq.Snooze(PERIOD) from error


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
    async with httpx.AsyncClient(timeout=5) as app.state.http, tinyq.lifespan(app, db=DB, lease=LEASE) as state:
        yield state


app = FastAPI(title="polling engine", lifespan=lifespan)


@app.post("/subscriptions/{caller}", status_code=204)
async def subscribe(caller: str, sources: list[str]) -> None:
    names = [f"{caller}/{source}" for source in sources]
    await asyncio.gather(*[tinyq.schedule(poll, name, when=tinyq.Every(PERIOD), key=name) for name in names])


@app.delete("/subscriptions/{caller}/{source}", status_code=204)
async def unsubscribe(caller: str, source: str) -> None:
    await tinyq.unschedule(poll, key=f"{caller}/{source}")


@app.post("/matches", status_code=204)
async def tell(matches: list[tuple[str, dict[str, Any]]]) -> None:
    for caller, message in matches:
        for messages in listeners.get(caller, ()):
            if not messages.full():  # if it is: when it is found again
                messages.put_nowait(message)


@app.websocket("/matches/{caller}")
async def listen(socket: WebSocket, caller: str) -> None:
    await socket.accept()
    messages = asyncio.Queue[dict[str, Any]](1_000)
    listeners.setdefault(caller, set()).add(messages)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(send(socket, messages))
            both.create_task(until_closed(socket))
    except* WebSocketDisconnect:
        pass
    finally:
        listeners[caller].discard(messages)


async def send(socket: WebSocket, messages: asyncio.Queue[dict[str, Any]]) -> None:
    last: dict[str, int] = {}  # the number of the last message of each source: later ones have higher numbers
    while True:
        message = await messages.get()
        if message["number"] > last.get(message["source"], 0):
            last[message["source"]] = message["number"]
            await socket.send_json(message)


async def until_closed(socket: WebSocket) -> None:
    while True:
        await socket.receive_text()
