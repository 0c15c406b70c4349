"""What several test files need: a handler that notes its runs, waiting for a condition, a look at what is stored."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Unpack

import pytest
from clock import FakeClock

import tinyq
from tinyq import TinyQ


class Open(Protocol):
    async def __call__(self, **options: Unpack[tinyq.Configuration]) -> TinyQ: ...


class Notes:
    """A handler that notes its runs, takes so many seconds of the clock's time, and ends with an error if it has one."""

    def __init__(self, clock: FakeClock, seconds: float = 0.0) -> None:
        self._clock, self.began, self.seconds = clock, clock.now(), seconds
        self.error: BaseException | None = None
        self.starts: list[float] = []  # in seconds since it was made
        self.moments: list[datetime] = []  # the fire times
        self.attempts: list[int] = []
        self.now = self.most = self.ended = 0

    async def tick(self) -> None:
        job, error = tinyq.current_job(), self.error
        assert job.fire_time is not None
        self.starts.append((self._clock.now() - self.began).total_seconds())
        self.moments.append(job.fire_time)
        self.attempts.append(job.attempt)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if self.seconds:
                await self._clock.wait(asyncio.Event(), self.seconds)
        finally:
            self.now -= 1
        self.ended += 1
        if error is not None:
            raise error

    def after(self, moment: datetime) -> list[float]:
        return [(fire - moment).total_seconds() for fire in self.moments]

    @property
    def fires(self) -> list[float]:
        return self.after(self.began)


def stats_of(q: TinyQ) -> tinyq.ScheduleStats:
    [schedule] = q._schedules
    return schedule.stats()


async def eventually(condition: Callable[[], object], clock: FakeClock | None = None, step: float = 0.05) -> None:
    """Return as soon as the condition holds; with a clock, let its time pass meanwhile."""
    async with asyncio.timeout(60):
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
