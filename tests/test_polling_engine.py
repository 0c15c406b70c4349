"""The polling engine of the examples, as a user runs it: a search service, a web process, and engines on one file."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from servers import ROOT, Server, wait_until
from websockets.sync.client import ClientConnection, connect

EXAMPLES = ROOT / "examples"
FAILED = "searches wait for the next time"
TIMES = {"ENGINE_LEASE": "1", "ENGINE_PERIOD": "0.25"}  # seconds


class Engine:
    """A process that searches; ready when it has said so, gone on exit."""

    def __init__(self, log: Path, **env: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "tinyq", "worker", "--app-dir", str(EXAMPLES), "polling_engine:app"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=output, stderr=output)

    def __enter__(self) -> Self:
        try:
            wait_until("the engine has started", lambda: "claims jobs" in self.log.read_text() or self.process.poll() is not None)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        print(self.log.read_text()[-10_000:])  # pytest shows it when the test fails


class Service:
    """All of them. The backend knows what has been searched."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self._engines = folder, ExitStack(), 0
        self.db = folder / "engine.db"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        backend = self._backend()
        self.env = {"ENGINE_DB": str(self.db), "ENGINE_BACKEND": backend.url, **TIMES}
        web = Server("polling_engine:app", app_dir=EXAMPLES, log=self._folder / "web.log", TINYQ_WORKER="0", **self.env)
        self.env["ENGINE_WEB"] = self._web = web.url
        self._stack.enter_context(web)
        for engine in [self._engine(), self._engine()]:  # they start while the others do
            self._stack.enter_context(engine)
        self.backend = self._stack.enter_context(backend)

    def _backend(self, *options: str) -> Server:
        return Server("search_backend:app", *options, app_dir=EXAMPLES, log=self._folder / "backend.log")

    def kill_backend(self) -> None:
        """It is gone when this returns: one that is still dying accepts connections."""
        self.backend.process.kill()
        self.backend.process.wait()

    def restart_backend(self) -> None:
        """On the same port, and it knows nothing any more."""
        again = self._backend("--port", str(self.backend.port))
        again.port, again.url = self.backend.port, self.backend.url
        self.backend = self._stack.enter_context(again)

    def _engine(self) -> Engine:
        self._engines += 1
        return Engine(self._folder / f"engine{self._engines}.log", **self.env)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def one_more_engine(self) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(self._engine()).process

    def engines_said(self, words: str) -> int:
        """How often, all of them together."""
        return sum(log.read_text().count(words) for log in self._folder.glob("engine*.log"))

    def subscribe(self, caller: str, *sources: str) -> None:
        httpx.post(f"{self._web}/subscriptions/{caller}", json=sources, timeout=30).raise_for_status()

    def unsubscribe(self, caller: str, source: str) -> None:
        httpx.delete(f"{self._web}/subscriptions/{caller}/{source}", timeout=30).raise_for_status()

    @contextmanager
    def socket(self, caller: str) -> Iterator[ClientConnection]:
        with connect(f"{self._web.replace('http', 'ws')}/matches/{caller}", proxy=None) as socket:
            yield socket

    def write(self, source: str, text: str) -> None:
        url = f"{self.env['ENGINE_BACKEND']}/messages"
        httpx.post(url, json={"source": source, "text": text}, timeout=30).raise_for_status()

    def searches(self, after: float = 0.0) -> list[list[str]]:
        answer = httpx.get(f"{self.env['ENGINE_BACKEND']}/searches", params={"after": after}, timeout=30).raise_for_status()
        return [sources for _, sources in answer.json()]

    def wait_for_search(self, sources: Sequence[str], after: float = 0.0, times: int = 1) -> None:
        """Until each of these has been searched for so often since that moment."""

        def searched() -> bool:
            found = [source for search in self.searches(after) for source in search]
            return all(found.count(source) >= times for source in sources)

        wait_until(f"{len(sources)} sources are searched", searched)

    def held(self, pid: int | str = "%") -> list[str]:
        """The subscriptions that an engine, or any, has a lease of."""
        query = "SELECT key FROM tinyq_jobs WHERE state = 'running' AND worker LIKE ?"
        with closing(sqlite3.connect(self.db, timeout=10)) as db:
            return [key for (key,) in db.execute(query, (f"%-{pid}-%",))]


def received(socket: ClientConnection) -> tuple[str, str]:
    message: dict[str, Any] = json.loads(socket.recv(timeout=30))
    return message["source"], message["text"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("engine")) as service:
        yield service


def test_what_is_found_for_a_caller_arrives_at_its_web_socket(service: Service) -> None:
    service.subscribe("ann", "ann-cats", "ann-dogs")
    with service.socket("ann") as socket:
        service.write("nobody's", "quack")
        service.write("ann-dogs", "woof")
        assert received(socket) == ("ann-dogs", "woof")


def test_a_web_socket_is_told_once_what_is_found_again_and_again(service: Service) -> None:
    service.subscribe("bob", "bob-cats")
    with service.socket("bob") as socket:
        service.write("bob-cats", "meow")
        assert received(socket) == ("bob-cats", "meow")
        service.wait_for_search(["bob-cats"], after=time.time(), times=2)
        service.write("bob-cats", "purr")
        assert received(socket) == ("bob-cats", "purr")


def test_callers_of_one_source_are_told_each(service: Service) -> None:
    service.subscribe("cleo", "shared")
    service.subscribe("carl", "shared")
    with service.socket("cleo") as first, service.socket("carl") as second:
        service.write("shared", "meow")
        assert received(first) == received(second) == ("shared", "meow")


def test_what_is_unsubscribed_is_searched_no_more(service: Service) -> None:
    service.subscribe("dora", "dora-cats", "dora-dogs")
    service.wait_for_search(["dora-cats", "dora-dogs"])
    service.unsubscribe("dora", "dora-dogs")
    wait_until("its last run has ended", lambda: not any("dora-dogs" in key for key in service.held()))
    now = time.time()
    service.wait_for_search(["dora-cats"], after=now, times=2)
    assert not [search for search in service.searches(after=now) if "dora-dogs" in search]


def test_many_subscriptions_share_few_searches(service: Service) -> None:
    sources = [f"eve-{n}" for n in range(200)]
    service.subscribe("eve", *sources)
    now = time.time()
    service.wait_for_search(sources, after=now, times=3)
    searches = [len(search) for search in service.searches(after=now)]
    assert sum(searches) / len(searches) > 20


def test_the_subscriptions_of_a_killed_engine_continue(service: Service) -> None:
    sources = [f"fay-{n}" for n in range(200)]
    service.subscribe("fay", *sources)
    victim = service.one_more_engine()

    def stopped_in_a_search() -> bool:
        victim.send_signal(signal.SIGSTOP)
        if any("fay/" in key for key in service.held(victim.pid)):
            return True
        victim.send_signal(signal.SIGCONT)
        return False

    wait_until("the engine has subscriptions under way", stopped_in_a_search)
    held = [key.partition("fay/")[2] for key in service.held(victim.pid) if "fay/" in key]
    victim.kill()
    now = time.time()
    with service.socket("fay") as socket:
        service.write(held[0], "meow")
        assert received(socket) == (held[0], "meow")
    service.wait_for_search(sources, after=now, times=2)


def test_searches_that_fail_together_go_on_together(service: Service) -> None:
    sources = [f"gil-{n}" for n in range(200)]
    service.subscribe("gil", *sources)
    service.wait_for_search(sources)
    before = service.engines_said(FAILED)  # a slow start may have made them say it
    service.kill_backend()
    wait_until("the engines have noticed", lambda: service.engines_said(FAILED) > before)
    service.restart_backend()
    service.wait_for_search(sources)
    searches = [len(search) for search in service.searches()]
    assert sum(searches) / len(searches) > 20
