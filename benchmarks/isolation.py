"""What quick jobs wait for behind slow ones: tinyq with a running limit or separate queues, and arq as it can be arranged.

    python benchmarks/isolation.py [--repeats 3] [--only WORDS] [--folder FOLDER] [--redis URL | --redis-server PATH]

30 reports of 500 ms and 20 emails of 10 ms are enqueued at once, the reports first, for 10 slots, 3 of which reports may take. An
email's time is that from its enqueue to its end: with 7 slots left the median cannot be below 20 ms, nor the total below 5 s.
Repeats of all arrangements take turns. Printed are the medians of the repeats, and the lowest median of an email's time: what the
machine's other work spoils least. Exits 1 if more than 3 reports ran at once where that is the limit.

arq is measured if it is installed and there is a Redis to write to: at URL, whose database it empties, or one started from PATH,
which is looked for as redis-server and valkey-server if neither is given. It polls every 20 ms here instead of its 500.
"""

import argparse
import asyncio
import functools
import importlib.util
import logging
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import tinyq

SLOTS, LIMIT = 10, 3
REPORT, EMAIL = 0.5, 0.01  # seconds
WANTED = {"memory": 23.0, "file": 26.0}  # ms, the median of emails


class Scene:
    """One pass: both handlers, and what is seen of them."""

    def __init__(self, reports: int, emails: int) -> None:
        self.reports, self.emails = range(reports), range(emails)
        self.begun: dict[int, float] = {}  # when an email was enqueued
        self.took: list[float] = []  # seconds of each email
        self.running = self.most = self.reported = 0
        self.over = asyncio.Event()
        self.start = time.perf_counter()
        self.total = math.nan

    async def report(self, number: int) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(REPORT)
        self.running -= 1
        self.reported += 1
        self._look()

    async def email(self, number: int) -> None:
        await asyncio.sleep(EMAIL)
        self.took.append(time.perf_counter() - self.begun[number])
        self._look()

    def _look(self) -> None:
        if self.reported == len(self.reports) and len(self.took) == len(self.emails):
            self.total = time.perf_counter() - self.start
            self.over.set()


class Figures:
    """What the passes of one arrangement came to, in milliseconds."""

    def __init__(self) -> None:
        self.medians: list[float] = []
        self.p99s: list[float] = []
        self.totals: list[float] = []
        self.most = 0

    def add(self, scene: Scene) -> None:
        took = sorted(scene.took)
        self.medians.append(statistics.median(took) * 1e3)
        self.p99s.append(took[math.ceil(len(took) * 0.99) - 1] * 1e3)
        self.totals.append(scene.total * 1e3)
        self.most = max(self.most, scene.most)


Arrangement = Callable[[Scene], Awaitable[None]]


async def with_asyncio(scene: Scene) -> None:
    """What the loop and its timers allow on this machine: no jobs, only tasks and two semaphores."""
    for_reports, for_emails = asyncio.Semaphore(LIMIT), asyncio.Semaphore(SLOTS - LIMIT)

    async def within(semaphore: asyncio.Semaphore, handler: Callable[[int], Awaitable[None]], number: int) -> None:
        async with semaphore:
            await handler(number)

    scene.start = time.perf_counter()
    scene.begun = dict.fromkeys(scene.emails, scene.start)
    await asyncio.gather(
        *[within(for_reports, scene.report, n) for n in scene.reports],
        *[within(for_emails, scene.email, n) for n in scene.emails],
    )


# ── tinyq ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def with_tinyq(scene: Scene, where: Path | None, synchronous: Literal["full", "normal"], by: str) -> None:
    with tempfile.TemporaryDirectory(dir=where) as folder:
        db = Path(folder, "jobs.db") if where else None
        if by == "max_running":
            q = tinyq.TinyQ(db, concurrency=SLOTS, synchronous=synchronous)
            report = q.task(name="report", durable=bool(db), max_running=LIMIT)(scene.report)
        else:
            q = tinyq.TinyQ(db, concurrency=SLOTS - LIMIT, queues={"reports": LIMIT}, synchronous=synchronous)
            report = q.task(name="report", durable=bool(db), queue="reports")(scene.report)
        email = q.task(name="email", durable=bool(db))(scene.email)

        async def send(number: int) -> None:
            scene.begun[number] = time.perf_counter()
            await email.enqueue(number)

        async with q:
            scene.start = time.perf_counter()
            await asyncio.gather(*[report.enqueue(n) for n in scene.reports], *[send(n) for n in scene.emails])
            await scene.over.wait()


# ── arq ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def arq_workers(scene: Scene, how: str, settings: Any) -> list[Any]:
    from arq import Retry, Worker, func  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]

    semaphore = asyncio.Semaphore(LIMIT)

    async def report(ctx: object, number: int) -> None:
        if how == "defers itself" and semaphore.locked():
            raise Retry(defer=0.1)
        async with semaphore:
            await scene.report(number)

    async def unlimited(ctx: object, number: int) -> None:
        await scene.report(number)

    async def email(ctx: object, number: int) -> None:
        await scene.email(number)

    make = functools.partial(
        Worker,
        redis_settings=settings,
        handle_signals=False,
        keep_result=0,
        poll_delay=0.02,
        max_tries=10 * len(scene.reports) + 10,
    )
    emails = func(email, name="email")
    if how == "separate queues":
        reports = func(unlimited, name="report")
        return [
            make([reports], queue_name="arq:reports", max_jobs=LIMIT),
            make([emails], queue_name="arq:queue", max_jobs=SLOTS - LIMIT),
        ]
    return [make([func(unlimited if how == "no limit" else report, name="report"), emails], max_jobs=SLOTS)]


async def with_arq(scene: Scene, url: str, how: str) -> None:
    from arq import create_pool  # pyright: ignore[reportMissingImports]
    from arq.connections import RedisSettings  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]

    settings = RedisSettings.from_dsn(url)
    pool = await create_pool(settings)
    await pool.flushdb()
    workers = arq_workers(scene, how, settings)
    running = [asyncio.create_task(worker.async_run()) for worker in workers]
    try:
        await asyncio.sleep(0.1)  # until they poll
        scene.start = time.perf_counter()
        for number in scene.reports:
            await pool.enqueue_job("report", number, _queue_name="arq:reports" if how == "separate queues" else "arq:queue")
        for number in scene.emails:
            scene.begun[number] = time.perf_counter()
            await pool.enqueue_job("email", number)
        await scene.over.wait()
        await asyncio.sleep(0.2)  # until it has written down the last ones: closing cancels those
    finally:
        for worker in workers:
            await worker.close()
        await asyncio.gather(*running, return_exceptions=True)
        await pool.aclose()


class NotMeasured(Exception):
    pass


@contextmanager
def redis_at(url: str | None, binary: str | None) -> Iterator[str]:
    """Its URL. Raises NotMeasured with the reason."""
    if importlib.util.find_spec("arq") is None:
        raise NotMeasured("it is not installed in this Python's environment")
    if url is not None:
        yield url
        return
    binary = binary or shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise NotMeasured("no Redis: give --redis URL or --redis-server PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        try:
            server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
        except OSError as error:
            raise NotMeasured(f"{binary} does not start: {error}") from None
        try:
            for _ in range(200):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if server.poll() is not None:
                    raise NotMeasured(f"{binary} ended with exit status {server.returncode}")
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.wait()


# ── All of them ───────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(arrangements: dict[str, Arrangement], given: argparse.Namespace) -> dict[str, Figures]:
    found = {name: Figures() for name in arrangements}

    async def one_pass(name: str) -> None:
        scene = Scene(given.reports, given.emails)
        async with asyncio.timeout(60 + given.reports):
            await arrangements[name](scene)
        found[name].add(scene)

    for turn in range(given.repeats):
        for name in arrangements if turn % 2 == 0 else reversed(arrangements):
            asyncio.run(one_pass(name))
    return found


def report_on(found: dict[str, Figures]) -> bool:
    """Prints the table. True if a limit was exceeded."""
    exceeded = False
    print(f"{'ms':45} {'email p50':>10} {'lowest':>8} {'p99':>8} {'total':>8} {'reports at once':>16}")
    for name, figures in found.items():
        median, p99, total = (statistics.median(x) for x in (figures.medians, figures.p99s, figures.totals))
        notes = ""
        if name.startswith("tinyq"):
            wanted = WANTED["memory" if "memory" in name else "file"]
            notes += f"  SLOW: more than {wanted:g}" if median > wanted else ""
            if figures.most > LIMIT:
                exceeded = True
                notes += f"  LIMIT EXCEEDED: more than {LIMIT}"
        print(
            f"{name:45} {median:10,.1f} {min(figures.medians):8,.1f} {p99:8,.1f} {total:8,.0f} {figures.most:16}{notes}",
            flush=True,
        )
    return exceeded


def main() -> int:
    given = parse()
    logging.getLogger("tinyq").setLevel(logging.ERROR)  # that reports wait is meant
    where = given.folder or Path(tempfile.gettempdir())
    arrangements: dict[str, Arrangement] = {"bare asyncio, two semaphores": with_asyncio}
    for by in ("max_running", "queues"):
        arrangements[f"tinyq, memory, {by}"] = functools.partial(with_tinyq, where=None, synchronous="full", by=by)
        for level in ("full", "normal"):
            arrangements[f"tinyq, file, synchronous={level}, {by}"] = functools.partial(
                with_tinyq, where=where, synchronous=level, by=by
            )
    print(
        f"{given.reports} reports of {REPORT * 1e3:g} ms and {given.emails} emails of {EMAIL * 1e3:g} ms, {SLOTS} slots, "
        f"at most {LIMIT} reports; medians of {given.repeats}; {os.cpu_count()} processors"
    )
    with ExitStack() as stack:
        try:
            url = stack.enter_context(redis_at(given.redis, given.redis_server))
        except NotMeasured as reason:
            print(f"arq: not measured: {reason}")
        else:
            for how in ("no limit", "a semaphore in the job", "defers itself", "separate queues"):
                arrangements[f"arq, {how}"] = functools.partial(with_arq, url=url, how=how)
        return report_on(measure({name: run for name, run in arrangements.items() if given.only in name}, given))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reports", type=int, default=30)
    parser.add_argument("--emails", type=int, default=20)
    parser.add_argument("--only", metavar="WORDS", default="", help="arrangements whose name has these words in it")
    parser.add_argument("--folder", type=Path, help="on a real disk; default: the temporary one")
    parser.add_argument("--redis", metavar="URL", help="of a database that arq may empty")
    parser.add_argument("--redis-server", metavar="PATH", help="a server to start for the run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
