"""An application with a schedule, for several server processes on one file; one of them may have a clock that is wrong."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

import tinyq

FOLDER = Path(os.environ["TICKING_FOLDER"])
SKEW = float(os.environ.get("TICKING_SKEW", "0"))


class WrongClock(tinyq.SystemClock):
    def time(self) -> int:
        return time.time_ns() // 1000 + round(SKEW * 1e6)


def first(name: str) -> bool:
    """Whether no process has come to this point before."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(line: str) -> None:
    with open(FOLDER / "ticks", "a") as notes:
        notes.write(f"{line}\n")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    wrong = bool(SKEW) and first("wrong")
    q = tinyq.TinyQ(FOLDER / "jobs.db", clock=WrongClock() if wrong else None, lease=1.0)

    # By the defaults a machine that is busy for a second would leave one out.
    @q.every(1, name="tick", misfire="all", overlap="allow")
    async def tick() -> None:
        fire_time = tinyq.current_job().fire_time
        assert fire_time is not None
        note(f"tick {fire_time.timestamp():.0f} {os.getpid()}")

    async with q:
        note(f"{'wrong' if wrong else 'right'} {time.time():.3f} {os.getpid()}")
        yield


app = FastAPI(lifespan=lifespan)
