"""A clock that stands still until a test moves it."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import aiosqlite

from tinyq import SELDOM, Sharp

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PATIENCE = 0.5  # real seconds that a move of the clock waits for threads: longer than they need, unless somebody holds them up

under_way: dict[object, asyncio.AbstractEventLoop] = {}  # calls that the thread of a database has not answered yet
execute: Any = aiosqlite.Connection._execute


async def noted(connection: aiosqlite.Connection, *given: Any, **named: Any) -> Any:
    call = object()
    under_way[call] = asyncio.get_running_loop()
    try:
        return await execute(connection, *given, **named)
    finally:
        del under_way[call]


aiosqlite.Connection._execute = noted  # type: ignore[assignment,method-assign]


class FakeClock:
    """`tinyq.Clock` by hand: wall and monotonic time move together with `advance`, the wall alone with `step_wall`."""

    def __init__(self, start: str = "2026-01-01T12:00:00+00:00") -> None:
        self._wall = (datetime.fromisoformat(start) - EPOCH) // timedelta(microseconds=1)
        self._steady = 1000.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._held_up: set[object] = set()  # calls that have been waited for in vain

    def time(self) -> int:
        return self._wall

    def monotonic(self) -> float:
        return self._steady

    def now(self) -> datetime:
        return EPOCH + timedelta(microseconds=self._wall)

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        if wake.is_set() or seconds <= 0:
            await asyncio.sleep(0)
            return
        over = asyncio.Event()
        sleeper = (self._steady + seconds, over)
        self._sleepers.append(sleeper)
        ends = [asyncio.ensure_future(event.wait()) for event in (wake, over)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sleepers.remove(sleeper)
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def advance(self, seconds: float) -> None:
        """Move time, stopping at every moment somebody sleeps until, and let the loop turn at each; then let databases answer, or
        on a busy machine an answer would come minutes late by this clock."""
        await self.settle()
        end = self._steady + seconds
        while True:
            due = min((moment for moment, _ in self._sleepers), default=end)
            if due > end:
                break
            self._move(max(self._steady, due))
            for moment, wake in list(self._sleepers):
                if moment <= self._steady:
                    wake.set()
            await self.settle()
            if due >= end:
                break
        self._move(end)
        await self.settle()
        await self._answered()

    async def _answered(self) -> None:
        loop, began = asyncio.get_running_loop(), time.monotonic()
        while waiting := {call for call, its in list(under_way.items()) if its is loop} - self._held_up:
            if time.monotonic() - began > PATIENCE:
                self._held_up |= waiting
            await asyncio.sleep(0.0005)
            await self.settle()

    def step_wall(self, seconds: float) -> None:
        """Move the wall clock alone, as an administrator or NTP would."""
        self._wall += round(seconds * 1e6)

    def block(self, seconds: float) -> None:
        """Let time pass while nothing in the loop can run."""
        self._move(self._steady + seconds)

    def _move(self, steady: float) -> None:
        self._wall += round((steady - self._steady) * 1e6)
        self._steady = steady

    @staticmethod
    async def settle(turns: int = 30) -> None:
        """Let everything run that can run without time passing (in this loop; threads are not waited for)."""
        for _ in range(turns):
            await asyncio.sleep(0)


class EarlyClock(FakeClock):
    """As the real one does, it wakes a scheduler of best-effort work a little early, which then waits itself."""

    overdue = 100.0  # real seconds after which it gives up

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        if seconds <= SELDOM or not isinstance(wake, Sharp) or wake.meet == wake.turn_until:
            await super().wait(wake, seconds)
            return
        await super().wait(wake, seconds - wake.early)
        if wake.is_set():
            return
        stop = asyncio.ensure_future(super().wait(asyncio.Event(), wake.early))  # of `advance`, at that very moment
        await wake.meet(asyncio.get_running_loop().time() + self.overdue)
        stop.cancel()
