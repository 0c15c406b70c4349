"""One worker of a run of limited.py: `python limited_member.py TAG FOLDER WISHES`, the last as JSON.

It works until its standard input ends, or the process dies that started it. It notes when its handlers begin and end.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import tinyq

TAG, FOLDER, WISHES = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
LOG = os.open(FOLDER / f"{TAG}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: when the parent dies
q = tinyq.TinyQ(FOLDER / "jobs.db", lease=WISHES["lease"], concurrency=20, worker_name=TAG)


def note(what: str, id: str) -> None:
    line = {"what": what, "by": TAG, "at": time.time_ns() // 1000, "id": id}
    os.write(LOG, (json.dumps(line) + "\n").encode())  # in one write, which a kill does not tear


@q.task(name="work", max_running_total=WISHES["limit"], retry=tinyq.Retry(1_000, base=0.1))
async def work(n: int) -> None:
    id = tinyq.current_job().id
    note("start", id)
    await asyncio.sleep(random.uniform(0.02, 0.3))
    note("end", id)


async def main() -> None:
    async with q:
        await asyncio.to_thread(sys.stdin.read)


logging.basicConfig(format=f"%(asctime)s {TAG} %(levelname)s %(message)s")
asyncio.run(main())
