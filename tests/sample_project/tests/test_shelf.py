"""Sync tests, around the TestClient with and without the application's lifespan."""

from collections.abc import Iterator

import pytest
import shelf
from fastapi.testclient import TestClient

import tinyq


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(shelf.app) as client:
        yield client


async def found(title: str) -> str:
    return f"All about {title}"


def test_a_book_gets_its_summary(client: TestClient, jobs: tinyq.Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "ask_library", found)
    id = client.post("/books", params={"title": "Emma"}).json()["job"]
    assert client.get(f"/jobs/{id}").json() == {"status": "pending"}
    assert jobs.drain() == 1
    assert client.get(f"/jobs/{id}").json() == {"status": "done"}
    assert shelf.books == {1: {"title": "Emma", "summary": "All about Emma"}}


def test_without_the_lifespan_it_is_the_same(jobs: tinyq.Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "ask_library", found)
    TestClient(shelf.app).post("/books", params={"title": "Emma"})
    jobs.drain()
    assert "summary" in shelf.books[1]


def test_the_library_is_asked_three_times(client: TestClient, jobs: tinyq.Kit) -> None:
    client.post("/books", params={"title": "Emma"})
    with pytest.raises(shelf.LibraryDown):
        jobs.drain()
    [job] = jobs.enqueued(shelf.summarize)
    assert (job.status, job.attempts, job.error) == ("dead", 3, "LibraryDown: no network")
    assert job.args == (1, {"title": "Emma"})


def test_a_reminder_comes_after_a_week(client: TestClient, jobs: tinyq.Kit) -> None:
    client.post("/books", params={"title": "Emma"})
    [reminder] = jobs.enqueued(shelf.remind)
    jobs.advance(7 * 86400 - 1, raise_errors=False)
    assert reminder.status == "pending"
    jobs.advance(1)
    assert "Have you read Emma?" in shelf.outbox


def test_the_digest_is_sent_daily(client: TestClient, jobs: tinyq.Kit) -> None:
    assert jobs.advance(3 * 86400) == 3
    assert shelf.outbox == ["0 books on the shelf"] * 3
