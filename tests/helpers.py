"""What several test files need: waiting for a condition, and stopping a TinyQ whose clock stands still."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, Unpack

import pytest
from clock import FakeClock

import tinyq
from tinyq import TinyQ


class Open(Protocol):
    async def __call__(self, **options: Unpack[tinyq.Configuration]) -> TinyQ: ...


async def eventually(condition: Callable[[], object], clock: FakeClock | None = None, step: float = 0.05) -> None:
    """Return as soon as the condition holds; with a clock, let its time pass meanwhile."""
    async with asyncio.timeout(20):
        while not condition():
            if clock is not None:
                await clock.advance(step)
            await asyncio.sleep(0.001)


async def stopped_at_once(q: TinyQ, clock: FakeClock) -> None:
    """Stop without any grace, whatever still runs."""
    stopping = asyncio.create_task(q.stop(grace=0))
    await asyncio.wait({stopping}, timeout=0.5)  # threads write outcomes while this clock stands still
    await eventually(stopping.done, clock, 0.5)
    await stopping


def rows(file: Path, columns: str) -> list[Any]:
    """What is in the table, in the order of enqueuing."""
    with closing(sqlite3.connect(file, timeout=10)) as db:
        return db.execute(f"SELECT {columns} FROM tinyq_jobs ORDER BY seq").fetchall()


def edit(file: Path, sql: str, *parameters: object) -> None:
    with closing(sqlite3.connect(file, timeout=10, isolation_level=None)) as db:
        assert db.execute(sql, parameters).rowcount > 0


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """The arguments of each call of a function of the module, from now on."""
    calls: list[object] = []
    original = getattr(tinyq, name)

    def call(*given: Any) -> Any:
        calls.append(given)
        return original(*given)

    monkeypatch.setattr(tinyq, name, call)
    return calls
