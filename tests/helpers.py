"""What several test files need: waiting for a condition, and stopping a TinyQ whose clock stands still."""

import asyncio
from collections.abc import Callable
from typing import Protocol, Unpack

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
