"""One application, driven from outside over HTTP only: the same whether its jobs run in the web processes or in a worker of
their own, and whichever server it runs under."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from servers import wait_until

TESTS = Path(__file__).parent
APP = "blackbox_app:app"
SERVERS = {
    "uvicorn": ("uvicorn", "--workers", "2", "--port"),
    "gunicorn": ("gunicorn", "-k", "uvicorn_worker.UvicornWorker", "--workers", "2", "--bind"),
    "gunicorn --preload": ("gunicorn", "-k", "uvicorn_worker.UvicornWorker", "--workers", "2", "--preload", "--bind"),
}


class Deployment:
    """The application in production: a server with two web processes and, if its jobs are not to run in these, a worker."""

    def __init__(self, server: str, separate: bool, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._web_command = ["-m", *SERVERS[server], f"127.0.0.1:{port}" if "gunicorn" in server else str(port), APP]
        self._worker_command = ["-m", "tinyq", "worker", APP, "--grace", "0.2"]
        self._folder = folder
        self.separate = separate
        # No connection is kept, so that the requests go to both processes.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", limits=limits, verify=False, timeout=60)

    def start(self) -> None:
        self._web = self._run(self._web_command, TINYQ_WORKER="0" if self.separate else "1")
        self._worker = self._run(self._worker_command) if self.separate else None
        wait_until("the server answers", self._answers, 60)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        wait_until("all have started", lambda: self._count() == 2 + self.separate, 60)

    def _count(self) -> int:
        assert self._worker is None or self._worker.poll() is None, "the worker ended while starting"
        return len(self.notes("up")) - len(self.notes("down"))

    def _run(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"FOLDER": str(self._folder), "PYTHONPATH": str(TESTS)} | env
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen([sys.executable, *command], cwd=TESTS, env=env, stdout=log, stderr=log)

    def _answers(self) -> bool:
        assert self._web.poll() is None, "the server ended while starting"
        try:
            return self._client.get("/notes/up").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """SIGTERM, as when a new version is deployed."""
        self._web.terminate()
        self._stop_worker()
        self._web.wait(60)

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.terminate()
            assert self._worker.wait(60) == 0

    def restart(self) -> None:
        """What runs the durable jobs stops and starts again."""
        if self.separate:
            self._stop_worker()
            self._worker = self._run(self._worker_command)
            self._wait_for_all()
        else:
            self.stop()
            self.start()

    def close(self) -> None:
        for process in filter(None, (self._web, self._worker)):
            process.kill()
            process.wait()
        self._client.close()
        print((self._folder / "log").read_text())  # pytest shows it when a test fails

    # requests

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def post(self, path: str, **query: Any) -> Any:
        return self._client.post(path, params=query).raise_for_status().json()

    def delete(self, path: str) -> Any:
        return self._client.delete(path).raise_for_status().json()

    def notes(self, what: str) -> list[list[str]]:
        found: list[list[str]] = self.get(f"/notes/{what}")
        return found

    def wait_for_notes(self, count: int, what: str) -> list[list[str]]:
        wait_until(f"{count} notes of {what}", lambda: len(self.notes(what)) >= count)
        return self.notes(what)

    def pids(self, worker: bool) -> set[str]:
        """Of the web processes, or of the worker."""
        started = {pid for [pid] in self.notes("up")}
        workers = set() if self._worker is None else {str(self._worker.pid)}
        return workers if worker else started - workers

    def wait_for_status(self, id: str, status: str) -> None:
        wait_until(f"job {id} is {status}", lambda: self.get(f"/jobs/{id}")["status"] == status)


# Each server with its jobs in the web processes and in a worker of their own.
DEPLOYMENTS = [("uvicorn", False), ("uvicorn", True), ("gunicorn --preload", False), ("gunicorn", True)]


@pytest.fixture(scope="module", params=DEPLOYMENTS, ids=lambda param: f"{param[0]}, {'worker' if param[1] else 'in-process'}")
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    server, separate = request.param
    deployment = Deployment(server, separate, tmp_path_factory.mktemp("deployment"))
    try:
        deployment.start()
        yield deployment
        deployment.stop()
    finally:
        deployment.close()


@pytest.fixture
def name() -> str:
    """Of an order that no other test has."""
    return uuid4().hex


def test_a_job_s_result_is_there_for_every_process(deployment: Deployment) -> None:
    job = deployment.post("/orders", item="teapot", count=3)
    assert job["created"]
    results = [deployment.get(f"/jobs/{job['id']}/result") for _ in range(5)]
    assert [result["price"] for result in results] == [60] * 5
    assert deployment.get(f"/jobs/{job['id']}")["status"] == "done"


def test_durable_jobs_run_in_the_worker_if_there_is_one_else_in_the_web_processes(deployment: Deployment, name: str) -> None:
    jobs = [deployment.post("/orders", item="teapot") for _ in range(5)]
    ran = {str(deployment.get(f"/jobs/{job['id']}/result")["pid"]) for job in jobs}
    assert ran <= deployment.pids(worker=deployment.separate)


def test_best_effort_jobs_run_in_the_web_processes(deployment: Deployment, name: str) -> None:
    deployment.post(f"/thanks/{name}")
    [[pid]] = deployment.wait_for_notes(1, f"thank-{name}")
    assert pid in deployment.pids(worker=False)


def test_a_job_that_fails_is_tried_again(deployment: Deployment, name: str) -> None:
    job = deployment.post(f"/charges/{name}")
    assert deployment.get(f"/jobs/{job['id']}/result") == 3
    assert [attempt for _, attempt in deployment.notes(f"charge-{name}")] == ["1", "2", "3"]


def test_a_delayed_job_does_not_run_before_its_time(deployment: Deployment, name: str) -> None:
    before = time.time()
    job = deployment.post(f"/reminders/{name}", delay=0.2)
    assert deployment.get(f"/jobs/{job['id']}/result") >= before + 0.2


def test_a_job_with_the_same_key_is_the_same_job(deployment: Deployment, name: str) -> None:
    answers = [deployment.post(f"/reminders/{name}", delay=3600) for _ in range(5)]
    assert len({answer["id"] for answer in answers}) == 1
    assert [answer["created"] for answer in answers] == [True, False, False, False, False]


def test_a_pending_job_that_is_cancelled_never_runs(deployment: Deployment, name: str) -> None:
    job = deployment.post(f"/reminders/{name}", delay=3600)
    assert deployment.delete(f"/jobs/{job['id']}") is True
    assert deployment.get(f"/jobs/{job['id']}")["status"] == "cancelled"
    assert deployment.notes(f"remind-{name}") == []


def test_a_running_job_is_cancelled_from_any_process(deployment: Deployment, name: str) -> None:
    job = deployment.post(f"/products/{name}")
    deployment.wait_for_notes(1, f"produce-{name}")
    assert deployment.delete(f"/jobs/{job['id']}") is True
    deployment.wait_for_status(job["id"], "cancelled")
    assert [what for _, what in deployment.notes(f"produce-{name}")] == ["began"]


def test_an_unknown_job_is_not_found(deployment: Deployment) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        deployment.get("/jobs/019b796d-d600-7000-8000-000000000000")


def test_a_restart_loses_no_job_and_repeats_no_fire_time(deployment: Deployment, name: str) -> None:
    running = deployment.post(f"/products/{name}")
    deployment.wait_for_notes(1, f"produce-{name}")
    waiting = [deployment.post(f"/reminders/{name}{i}", delay=0.3) for i in range(10)]
    deployment.restart()
    deployment.post(f"/products/{name}/release")
    assert deployment.get(f"/jobs/{running['id']}/result") == name
    assert [what for _, what in deployment.notes(f"produce-{name}")] == ["began", "began", "ended"]
    for i, job in enumerate(waiting):
        assert deployment.get(f"/jobs/{job['id']}/result") > 0
        assert len(deployment.notes(f"remind-{name}{i}")) == 1
    assert len(deployment.wait_for_notes(1, "inventory")) == 1  # of all processes, before and after
