"""A small service that keeps a reading list: a route that enqueues, a job that fails now and then, a reminder, a schedule."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

import tinyq

books: dict[int, dict[str, str]] = {}
outbox: list[str] = []


class LibraryDown(Exception):
    pass


async def ask_library(title: str) -> str | None:
    """A summary, None while the library is still looking for it. (The tests put something else in its place.)"""
    raise LibraryDown("no network")


@tinyq.task(name="summarize", retry=[60, 600], result_ttl=3600)
async def summarize(book: int, request: Mapping[str, str]) -> str:
    summary = await ask_library(request["title"])
    if summary is None:
        raise tinyq.Snooze(300)
    books[book]["summary"] = summary
    return summary


@tinyq.task(name="remind", durable=True)
def remind(book: int) -> None:
    outbox.append(f"Have you read {books[book]['title']}?")


@tinyq.every(86400, name="digest")
async def digest() -> None:
    outbox.append(f"{len(books)} books on the shelf")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, tinyq.TinyQ]]:
    async with tinyq.lifespan(app, db=os.environ.get("SHELF_DB", "shelf.db")) as state:
        yield state


app = FastAPI(lifespan=lifespan)


@app.post("/books", status_code=202)
async def add(title: str) -> dict[str, str]:
    book = len(books) + 1
    books[book] = {"title": title}
    job = await tinyq.enqueue(summarize, book, {"title": title}, durable=True)
    await remind.options(delay=7 * 86400).enqueue(book)
    return {"job": job.id}


@app.get("/jobs/{id}")
async def job(id: str) -> dict[str, str]:
    try:
        return {"status": (await tinyq.get(id)).status}
    except tinyq.JobNotFound:
        raise HTTPException(404) from None
