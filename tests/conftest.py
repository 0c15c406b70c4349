"""Fixtures that several files use."""

import functools
import math
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Unpack

import pytest
from clock import FakeClock
from fleet import Fleet
from helpers import Notes, Open, stopped_at_once

import tinyq
from tinyq import TinyQ

collect_ignore = ["sample_project"]  # a project of its own, with its own suite, which a test of ours runs

# A job in the background of a shell ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

OpenAt = Callable[..., Coroutine[Any, Any, TinyQ]]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def notes(clock: FakeClock) -> Notes:
    return Notes(clock)


@pytest.fixture(params=[False, True], ids=["best-effort", "durable"])
def durable(request: pytest.FixtureRequest) -> bool:
    """The tier under test."""
    return bool(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def db(durable: bool, file: Path) -> Path | None:
    """The database of the tier under test: none for the best-effort one."""
    return file if durable else None


@pytest.fixture
async def open_at(clock: FakeClock) -> AsyncIterator[OpenAt]:
    """Starts TinyQs; stops them afterwards, whatever still runs in them."""
    opened: list[TinyQ] = []

    async def open_at(db: Path | None, **options: Unpack[tinyq.Configuration]) -> TinyQ:
        options.setdefault("clock", clock)
        options.setdefault("behind_after", math.inf)  # work is always behind a clock that is moved on by hand
        q = TinyQ(db, **options)
        await q.start()
        opened.append(q)
        return q

    yield open_at
    for q in opened:
        await stopped_at_once(q, clock)


@pytest.fixture
def open_file(open_at: OpenAt, file: Path) -> Open:
    """Starts TinyQs on one file."""
    return functools.partial(open_at, file)


@pytest.fixture
def open_q(open_at: OpenAt, db: Path | None) -> Open:
    """Starts TinyQs of the tier under test."""
    return functools.partial(open_at, db)


@pytest.fixture
async def q(open_q: Open) -> TinyQ:
    return await open_q()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as made:
        yield made
