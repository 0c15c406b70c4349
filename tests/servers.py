"""Real uvicorn processes for tests, and waiting without guessing how long something takes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[1]


def wait_until(what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
    """Return as soon as the condition holds; fail when it has not after a time that is generous, not expected."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


class Server:
    """An app under uvicorn on a free port of the loopback interface; ready on entry, gone on exit."""

    def __init__(self, app: str, *options: str, app_dir: Path, log: Path, **env: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(app_dir), "--port", str(self.port), *options, app]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=output, stderr=output)

    def __enter__(self) -> Self:
        try:
            wait_until("the server accepts connections", self.accepts)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        print(self.log.read_text())  # pytest shows it when the test fails

    def accepts(self) -> bool:
        assert self.process.poll() is None, "the server ended while starting"
        with socket.socket() as client:
            # (While nobody listens, a socket may get this very port for its own end, and is then connected to itself.)
            return client.connect_ex(("127.0.0.1", self.port)) == 0 and client.getsockname() != client.getpeername()

    def wait_for_exit(self, seconds: float = 60) -> None:
        wait_until("the server has ended", lambda: self.process.poll() is not None, seconds)
