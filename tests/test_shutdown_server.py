"""What SIGTERM does to running work, in real servers: the bare way, and tinyq's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from servers import Server, wait_until


def marks(folder: Path) -> list[str]:
    """What the job and the app of shutdown_apps.py have noted, in order."""
    file = folder / "marks"
    return file.read_text().split() if file.exists() else []


@contextmanager
def server_with_job(app: str, *options: str, folder: Path) -> Iterator[Server]:
    """An app of shutdown_apps.py in a server of its own, in the middle of its job, which ends when it is released."""
    env = {"MARKS": str(folder / "marks"), "RELEASE": str(folder / "release")}
    with Server(f"shutdown_apps:{app}", *options, app_dir=Path(__file__).parent, log=folder / "log", **env) as server:
        httpx.post(server.url + "/job").raise_for_status()
        wait_until("the job has started", lambda: "started" in marks(folder))
        yield server


def wait_for_drain(folder: Path) -> None:
    wait_until("tinyq drains", lambda: "draining" in marks(folder))


def test_sigterm_abandons_a_bare_task(tmp_path: Path) -> None:
    with server_with_job("bare", folder=tmp_path) as server:
        server.process.terminate()
        server.wait_for_exit()
    assert "completed" not in marks(tmp_path)


def test_sigterm_lets_a_job_of_tinyq_complete(tmp_path: Path) -> None:
    with server_with_job("owned", folder=tmp_path) as server:
        server.process.terminate()
        wait_for_drain(tmp_path)
        (tmp_path / "release").touch()
        server.wait_for_exit()
    assert marks(tmp_path) == ["started", "draining", "completed"]


def test_a_client_that_holds_a_stream_open_does_not_cost_the_job_its_drain(tmp_path: Path) -> None:
    # uvicorn ends the lifespan, where tinyq drains, only after the last response has ended. This one never does, so
    # uvicorn's own wait needs a limit; the grace of tinyq begins after it.
    options = ["--timeout-graceful-shutdown", "1"]
    with (
        server_with_job("owned", *options, folder=tmp_path) as server,
        httpx.stream("GET", server.url + "/stream", timeout=60) as response,
    ):
        next(response.iter_bytes())
        server.process.terminate()
        wait_for_drain(tmp_path)
        (tmp_path / "release").touch()
        server.wait_for_exit()
    assert marks(tmp_path) == ["started", "draining", "completed"]


def test_a_second_sigterm_while_draining_skips_the_grace(tmp_path: Path) -> None:
    with server_with_job("owned", folder=tmp_path) as server:
        server.process.terminate()
        wait_for_drain(tmp_path)
        server.process.terminate()
        server.wait_for_exit(seconds=40)  # less than the grace; the job itself would never end
    assert marks(tmp_path) == ["started", "draining", "cancelled"]
