"""One application, driven from outside over HTTP only: the same whether its jobs run in the web processes or in a worker of
their own, and whichever server it runs under."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from servers import wait_until

from tinyq import TinyQ

TESTS = Path(__file__).parent
APP = "blackbox_app:app"
GUNICORN = ("gunicorn", "-k", "uvicorn_worker.UvicornWorker", "--workers", "2", "--no-control-socket")
SERVERS = {
    "uvicorn": ("uvicorn", "--workers", "2", "--port"),
    "gunicorn": (*GUNICORN, "--bind"),
    "gunicorn --preload": (*GUNICORN, "--preload", "--bind"),
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
        self.db = folder / "jobs.db"
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
            command = [sys.executable, *command]
            return subprocess.Popen(command, cwd=TESTS, env=env, stdout=log, stderr=log, start_new_session=True)

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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.wait()
        self._client.close()
        print((self._folder / "log").read_text())  # pytest shows it when a test fails

    # requests

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def get_from_all(self, path: str) -> list[Any]:
        """What each of the two web processes answers."""
        answers = {}

        def ask() -> bool:
            answer = self._client.get(path).raise_for_status()
            answers[answer.headers["X-Process"]] = answer.json()
            return len(answers) == 2

        wait_until("both processes have answered", ask)
        return list(answers.values())

    def post(self, path: str, json: Any = None, request: str = "none", **query: Any) -> Any:
        answer = self._client.post(path, params=query, json=json, headers={"X-Request-ID": request})
        return answer.raise_for_status().json()

    def refusal(self, path: str, **query: Any) -> tuple[int, Any]:
        """Of a POST."""
        answer = self._client.post(path, params=query)
        return answer.status_code, answer.json()["detail"]

    def finds(self, path: str) -> bool:
        return self._client.get(path).status_code != 404

    def result(self, job: Mapping[str, Any]) -> Any:
        return self.get(f"/jobs/{job['id']}/result")

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
    assert [attempt for _, attempt, _ in deployment.notes(f"charge-{name}")] == ["1", "2", "3"]


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


@pytest.mark.parametrize("kind", ["purchases", "gifts"])
def test_an_order_and_its_job_commit_together(deployment: Deployment, name: str, kind: str) -> None:
    job = deployment.post(f"/{kind}/{name}")
    assert deployment.result(job) is None
    assert deployment.get(f"/purchases/{name}") == job["id"]


@pytest.mark.parametrize("kind", ["purchases", "gifts"])
def test_an_order_and_its_job_roll_back_together(deployment: Deployment, name: str, kind: str) -> None:
    status, job = deployment.refusal(f"/{kind}/{name}", fails=True)
    assert status == 402
    assert not deployment.finds(f"/purchases/{name}")
    assert not deployment.finds(f"/jobs/{job}")


def test_a_handler_s_session_is_a_dependency_that_is_closed_after_the_job(deployment: Deployment, name: str) -> None:
    deployment.post(f"/purchases/{name}")
    [mailed, closed] = deployment.wait_for_notes(2, f"mail-{name}")
    assert (mailed[1], closed[1]) == ("mailed", "closed")
    assert mailed[0] in deployment.pids(worker=deployment.separate)


def test_a_model_arrives_as_the_model_and_comes_back_as_the_result_s(deployment: Deployment) -> None:
    invoice = str(uuid4())
    lines = [{"item": "teapot", "price": "19.90"}, {"item": "cup", "price": "0.10"}]
    job = deployment.post("/invoices", {"id": invoice, "due": "2026-03-01T12:00:00+01:00", "lines": lines})
    bill = {"invoice": invoice, "amount": "20.00", "due": "2026-03-15T12:00:00+01:00"}
    assert deployment.get(f"/bills/{job['id']}") == {"type": "Bill", "amount": "Decimal", "bill": bill}


def test_a_route_in_a_thread_enqueues_both_kinds_of_job(deployment: Deployment, name: str) -> None:
    job = deployment.post(f"/receipts/{name}")
    assert job["created"] and deployment.result(job) > 0
    [[web]] = deployment.wait_for_notes(1, f"thank-{name}")
    [[runner]] = deployment.notes(f"remind-{name}")
    assert web in deployment.pids(worker=False)
    assert runner in deployment.pids(worker=deployment.separate)


def test_a_job_knows_the_request_that_it_comes_from_and_so_does_the_middleware(deployment: Deployment, name: str) -> None:
    job = deployment.post("/orders", item="teapot", request=name)
    result = deployment.result(job)
    assert (result["job"], result["request"]) == (job["id"], name)
    assert deployment.notes(f"traced-{job['id']}") == [[str(result["pid"]), "1", name]]


def test_a_job_s_id_is_the_same_at_each_attempt(deployment: Deployment, name: str) -> None:
    job = deployment.post(f"/charges/{name}")
    deployment.result(job)
    assert [id for _, _, id in deployment.notes(f"charge-{name}")] == [job["id"]] * 3


def test_progress_is_seen_in_every_process_while_the_job_runs(deployment: Deployment, name: str) -> None:
    id = deployment.post(f"/products/{name}")["id"]
    wait_until("progress is seen", lambda: deployment.get(f"/jobs/{id}")["progress"] is not None)
    seen = deployment.get_from_all(f"/jobs/{id}")
    assert [(job["status"], job["progress"]) for job in seen] == [("running", [0.4, "halfway"])] * 2
    deployment.post(f"/products/{name}/release")
    assert deployment.get(f"/jobs/{id}/result") == name


def test_a_handler_that_crashes_its_process_is_dead_and_can_be_requeued(deployment: Deployment, name: str) -> None:
    processes = deployment.notes("up")
    job = deployment.post(f"/crashes/{name}")
    deployment.wait_for_status(job["id"], "dead")
    assert all("SIGSEGV" in dead[job["id"]] for dead in deployment.get_from_all("/dead"))
    deployment.post(f"/products/{name}/release")
    assert deployment.post(f"/dead/{job['id']}/requeue") == 1
    assert deployment.result(job) == "went on"
    assert not any(job["id"] in dead for dead in deployment.get_from_all("/dead"))
    assert deployment.notes("up") == processes  # none of them was started again


def test_a_recurring_job_is_registered_and_removed_by_any_process(deployment: Deployment, name: str) -> None:
    created = [deployment.post(f"/polls/{name}") for _ in range(3)]
    assert created == [True, False, False]
    assert deployment.get_from_all(f"/polls/{name}") == [["Every(seconds=0.1, offset=0.0)"]] * 2
    deployment.wait_for_notes(3, f"poll-{name}")
    assert [deployment.delete(f"/polls/{name}") for _ in range(2)] == [True, False]
    assert deployment.get_from_all(f"/polls/{name}") == [[], []]
    polls = deployment.notes(f"poll-{name}")
    assert len({fire_time for _, fire_time in polls}) == len(polls)
    assert {pid for pid, _ in polls} <= deployment.pids(worker=deployment.separate)


def test_a_job_that_is_enqueued_under_an_old_name_is_the_renamed_task_s(deployment: Deployment) -> None:
    earlier = TinyQ(deployment.db, result_ttl=3600)  # a script that has not been changed yet
    job = earlier.enqueue_sync("shop.dispatch", "teapot", 2, durable=True)
    assert deployment.get(f"/jobs/{job.id}/result")["price"] == 40


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
