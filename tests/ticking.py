"""Four uvicorn workers on one file and a schedule of one second: is every fire time run exactly once?

    python tests/ticking.py [--seconds 30] [--workers 4] [--kill] [--skew 2]

With --kill one worker is killed with SIGKILL a third of the way through, and uvicorn starts another; with --skew the clock of
one worker is ahead (or behind) by so many seconds. Prints the fire times that were run never or twice; exits 1 if there are any.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from servers import Server, wait_until

APPS = Path(__file__).parent / "workers"


class Found(NamedTuple):
    runs: Counter[int]  # by fire time, whole seconds since the epoch
    processes: int  # that ran any

    def wrong(self) -> Sequence[str]:
        """The fire times between the first and the last that were not run exactly once."""
        every = range(min(self.runs), max(self.runs) + 1)
        return [f"{fire}: {self.runs[fire]} times" for fire in every if self.runs[fire] != 1]


def lines(folder: Path) -> list[list[str]]:
    notes = folder / "ticks"
    return [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []


def pids(folder: Path, *kinds: str) -> set[int]:
    return {int(pid) for kind, _, pid in lines(folder) if kind in kinds}


def tick(folder: Path, seconds: float, workers: int = 4, kill: bool = False, skew: float = 0.0) -> Found:
    """Let the workers tick for so long; all of them are up when the time begins."""
    env = {"TICKING_FOLDER": str(folder), "TICKING_SKEW": str(skew)}
    with Server("ticking_app:app", "--workers", str(workers), app_dir=APPS, log=folder / "log", **env) as server:
        wait_until("all workers have started", lambda: len(pids(folder, "right", "wrong")) >= workers)
        begins = time.monotonic()
        if kill:
            wait_until("a third has passed", lambda: time.monotonic() - begins > seconds / 3, seconds + 30)
            wait_until("the middle of a second", lambda: 0.4 < time.time() % 1 < 0.6)  # when none of them is at work
            os.kill(min(pids(folder, "right")), signal.SIGKILL)
            wait_until("another has started", lambda: len(pids(folder, "right", "wrong")) > workers)
        wait_until("the time is over", lambda: time.monotonic() - begins > seconds, seconds + 30)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_exit()
    ran = [(int(fire), pid) for kind, fire, pid in lines(folder) if kind == "tick"]
    return Found(Counter(fire for fire, _ in ran), len({pid for _, pid in ran}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--skew", type=float, default=0.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tick(Path(folder), given.seconds, given.workers, given.kill, given.skew)
    print(f"{len(found.runs)} fire times were run by {found.processes} processes")
    print("\n".join(found.wrong()) or "each exactly once")
    sys.exit(bool(found.wrong()))


if __name__ == "__main__":
    main()
