"""What the polling engine of the examples costs, how punctual it is, and what a kill does to it.

    python benchmarks/polling.py [--subscriptions 5000] [--seconds 15] [--lease 5] [--processes 1 3]

Runs examples/polling_engine.py as a service: a search service that takes 50 ms, a web process, and engines on one file, with a
tenth of the subscriptions and with all. Each is to be searched for once in every second. The figures are what the search service
has seen: for which sources it was asked, how long after the full second, in how many requests; and the CPU time of the engines
per poll, with what HTTP takes of it (from /proc: Linux only). At the end one engine is killed in the middle of its searches: how
long until those subscriptions are searched for again? The lease is shorter than usual for that.

Machines differ and are shared: compare the ratios of one run.
"""

import argparse
import functools
import math
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import httpx

EXAMPLES = Path(__file__).parents[1] / "examples"


def wait_until(what: str, condition: Callable[[], bool], seconds: float = 120, pause: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


class Search(NamedTuple):
    at: float
    sources: list[str]


class Service:
    """The processes, with their files in a folder; gone on exit."""

    def __init__(self, folder: Path, engines: int, lease: float) -> None:
        self.db, self._stack = folder / "engine.db", ExitStack()
        self._log = folder / "log"
        self._output = self._stack.enter_context(self._log.open("wb"))
        self.env = os.environ | {"ENGINE_DB": str(self.db), "ENGINE_LEASE": str(lease)}
        self._http = self._stack.enter_context(httpx.Client(timeout=60))
        self.backend = self._server("BACKEND", "search_backend:app")
        self.web = self._server("WEB", "polling_engine:app")
        command = ["-m", "tinyq", "worker", "--app-dir", str(EXAMPLES), "polling_engine:app"]
        self.engines = [self._process(*command, TINYQ_WORKER="1") for _ in range(engines)]

    def _process(self, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *arguments], env=self.env | env, stdout=self._output, stderr=self._output)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _server(self, name: str, app: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["--app-dir", str(EXAMPLES), "--port", str(port), "--log-level", "warning"]
        self._process("-m", "uvicorn", *options, app, TINYQ_WORKER="0")
        self.env[f"ENGINE_{name}"] = url = f"http://127.0.0.1:{port}"
        return url

    def __enter__(self) -> "Service":
        for url in (self.backend, self.web):
            wait_until(f"{url} answers", functools.partial(self._answers, url))
        wait_until("the engines have started", lambda: self._log.read_bytes().count(b"claims jobs") == len(self.engines))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _answers(self, url: str) -> bool:
        try:
            return self._http.get(f"{url}/openapi.json").is_success
        except httpx.TransportError:
            return False

    def subscribe(self, sources: list[str]) -> None:
        for first in range(0, len(sources), 500):
            self._http.post(f"{self.web}/subscriptions/caller", json=sources[first : first + 500]).raise_for_status()

    def searches(self, after: float) -> list[Search]:
        answer = self._http.get(f"{self.backend}/searches", params={"after": after}).raise_for_status()
        return [Search(at, sources) for at, sources in answer.json()]

    def cpu_time(self) -> float:
        return sum(cpu_time(engine.pid) for engine in self.engines)

    def held(self, engine: subprocess.Popen[bytes]) -> set[str]:
        """The sources for which it searches at this moment."""
        query = "SELECT key FROM tinyq_jobs WHERE state = 'running' AND worker LIKE ?"
        with closing(sqlite3.connect(self.db, timeout=10)) as db:
            return {key.partition("/")[2] for (key,) in db.execute(query, (f"%-{engine.pid}-%",))}


def cpu_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until(moment: float) -> float:
    time.sleep(max(0.0, moment - time.time()))
    return moment


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def measure(service: Service, sources: list[str], seconds: int) -> None:
    """One line: whole seconds, from the first in which everything runs."""
    began = time.time()
    service.subscribe(sources)
    wait_until("everything is searched for", lambda: polled(service.searches(began)) >= set(sources))
    first = until(math.ceil(time.time()) + 3 - 0.02)
    cpu = service.cpu_time()
    until(first + seconds)
    cpu = service.cpu_time() - cpu
    first = math.ceil(first)
    until(first + seconds + 0.5)
    searches = [search for search in service.searches(first) if search.at < first + seconds]
    in_time = {(source, math.floor(search.at)) for search in searches for source in search.sources}
    polls = sum(len(search.sources) for search in searches)
    late = sorted(search.at % 1 for search in searches for _ in search.sources)
    wanted = len(sources) * seconds
    print(
        f"{len(service.engines):9} {len(sources):13,} {polls:8,} {wanted - len(in_time):7,} {percentile(late, 0.5) * 1e3:8.0f}"
        f" {percentile(late, 0.99) * 1e3:8.0f} {len(searches) / seconds:10.1f} {cpu / max(1, polls) * 1e3:8.3f}", flush=True
    )  # fmt: skip


def polled(searches: Iterable[Search]) -> set[str]:
    return {source for search in searches for source in search.sources}


def kill_one(service: Service, sources: list[str], lease: float) -> None:
    victim = service.engines[-1]
    wait_until("it searches", lambda: bool(service.held(victim)), pause=0.002)
    victim.kill()
    victim.wait()
    killed = time.time()
    held = service.held(victim)
    wait_until("everything is searched for again", lambda: polled(service.searches(killed)) >= set(sources))
    again: dict[str, float] = {}
    for search in sorted(service.searches(killed)):
        for source in search.sources:
            again.setdefault(source, search.at - killed)
    after = sorted(again[source] for source in held) or [0.0]
    others = max((again[source] for source in again.keys() - held), default=0.0)
    print(
        f"killed one of {len(service.engines)} engines, which was searching for {len(held):,} of {len(sources):,} subscriptions:"
    )
    print(f"  these are searched for again after {after[0]:.2f} s, the last after {after[-1]:.2f} s; a lease is {lease:g} s;")
    print(f"  the others after {others:.2f} s at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--subscriptions", type=int, default=5_000)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 3])
    given = parser.parse_args()
    print(f"{'processes':>9} {'subscriptions':>13} {'polls':>8} {'missed':>7} {'p50, ms':>8} {'p99, ms':>8}", end=" ")
    print(f"{'searches/s':>10} {'CPU, ms':>8}")
    for count in given.processes:
        for subscriptions in (given.subscriptions // 10, given.subscriptions):
            sources = [f"source-{n}" for n in range(subscriptions)]
            with tempfile.TemporaryDirectory() as folder, Service(Path(folder), count, given.lease) as service:
                measure(service, sources, given.seconds)
                if count > 1 and subscriptions == given.subscriptions:
                    kill_one(service, sources, given.lease)


if __name__ == "__main__":
    main()
