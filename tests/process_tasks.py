"""What test_process_handlers.py runs in processes of their own: each function is imported there by its name."""

import asyncio
import contextvars
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tinyq

q = tinyq.TinyQ()


@q.task(run_in="process")
def decorated(number: int) -> int:
    return number + 1


def describe(text: str, *, times: int = 1) -> dict[str, object]:
    """What a job finds around itself."""
    job = tinyq.current_job()
    print("printed", text * times)
    return {
        "text": text * times,
        "pid": os.getpid(),
        "job": (job.id, job.task, job.queue, job.attempt, job.created, job.fire_time, job.cancelled),
        "main": sys.modules["__main__"].__name__,
        "running": threading.active_count(),
        "copies": sorted(name for name in sys.modules if name.endswith("tinyq")),
    }


async def asynchronous(number: int) -> int:
    await asyncio.sleep(0)
    return number + tinyq.current_job().attempt


class Refused(Exception):
    """Its constructor takes other arguments than it hands on."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        self.where: object = threading.Lock()  # which cannot be pickled


def refused() -> None:
    raise Refused(402, "no funds")


def raises_a_local_class() -> None:
    class Hidden(Exception):
        pass

    raise Hidden("nobody can import it")


def steered(kind: str) -> None:
    if tinyq.current_job().attempt == 1 and kind == "retry":
        raise tinyq.RetryAfter(7, "busy")
    if kind == "cancel":
        raise tinyq.Cancel("not needed")
    if kind == "snooze":
        raise tinyq.Snooze(60)


def crash() -> None:
    ctypes.string_at(0)


def crash_unless(go_on: str) -> str:
    if not Path(go_on).exists():
        crash()
    return "went on"


def end(code: int) -> None:
    os._exit(code)


def forks_and_ends(pids: str) -> None:
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(tell, b".")
        time.sleep(1000)
    os.read(ready, 1)
    Path(pids).write_text(str(pid))
    os._exit(3)


def leave() -> None:
    sys.exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(pids: str) -> None:
    """For ever, and so does what it has started. Says who they are."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    note = Path(pids + ".new")
    note.write_text(f"{os.getpid()} {child.pid}")
    note.rename(pids)
    while True:
        time.sleep(1000)


def wait_for(started: str, go_on: str) -> str:
    """Until a file exists. The signals that a whole service gets do not end it."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    Path(started).touch()
    while not Path(go_on).exists():
        time.sleep(0.01)
    return "went on"


def leaves_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return os.getpid()


def tells_progress(go_on: str) -> None:
    for percent in range(41):
        tinyq.current_job().progress(percent / 100, f"{percent} so far")
    if os.fork() == 0:  # which has no way to the parent
        tinyq.current_job().progress(0.9, "not heard")
        os._exit(0)
    os.wait()
    while not Path(go_on).exists():
        time.sleep(0.01)
    thread = threading.Thread(target=contextvars.copy_context().run, args=(tinyq.current_job().progress, 1, "x" * 1000))
    thread.start()
    thread.join()


async def surroundings() -> object:
    job = tinyq.current_job()
    await job.progress(0.5)
    return dict(job.headers), job.app


def unpicklable() -> Callable[[], int]:
    return lambda: 1


def sized(data: bytes) -> bytes:
    return data[::-1]
