"""Async tests, around a transport that runs no lifespan."""

from collections.abc import AsyncIterator

import httpx
import pytest
import shelf

import tinyq


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shelf.app), base_url="http://shelf") as client:
        yield client


async def test_a_library_that_is_slow_is_asked_again(
    client: httpx.AsyncClient, jobs: tinyq.Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [None, None, "At last"]

    async def looking(title: str) -> str | None:
        return answers.pop(0)

    monkeypatch.setattr(shelf, "ask_library", looking)
    id = (await client.post("/books", params={"title": "Emma"})).json()["job"]
    began = jobs.now
    assert await jobs.adrain() == 3
    assert (jobs.now - began).total_seconds() == 600
    assert await (await tinyq.get(id)).result() == "At last"


async def test_nothing_of_another_test_is_left(client: httpx.AsyncClient, jobs: tinyq.Kit) -> None:
    assert jobs.enqueued() == []
    assert (await client.get("/jobs/00000000-0000-7000-8000-000000000000")).status_code == 404


async def test_time_passes_by_hand(client: httpx.AsyncClient, jobs: tinyq.Kit) -> None:
    assert await jobs.aadvance(86400) == 1
    [occurrence] = jobs.enqueued("digest")
    assert occurrence.fire_time is not None and occurrence.fire_time.hour == 0
