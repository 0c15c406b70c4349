"""Every code block of the README runs, and does what the text beside it says."""

import ast
import configparser
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from servers import Server, wait_until

import tinyq

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)

# What is done with a block after it has run as a module: (a word of the block, code that uses its names).
DRIVES = {
    "@tinyq.task(timeout=30)": """
from fastapi.testclient import TestClient
with TestClient(app) as client:
    assert client.post("/orders/7").status_code == 200
""",
    'queue="emails"': """
from fastapi.testclient import TestClient
with TestClient(app) as client:
    answer = client.post("/orders/7")
    assert answer.status_code == 202, answer.text
    assert len(answer.json()["job"]) == 36
    import sqlite3
    while sqlite3.connect("jobs.db").execute("SELECT count(*) FROM tinyq_jobs").fetchone() != (0,):
        pass  # it leaves the table when it is done; the process has a time limit
""",
    "async def thumbnail": "",
    "async def report(account": """
async def drive():
    async with q:
        await order_some()
        await q.drain()
        left = (await q.stats()).counts
        assert [(c.task, c.state, c.count) for c in left if c.durable] == [(report.name, "pending", 1)], left
        await q.stop(grace=5)
asyncio.run(drive())
""",
    "async def monthly_report": """
async def drive():
    async with q:
        for n in range(3):
            await q.enqueue(receipt, n, durable=True)
            await q.enqueue(monthly_report, "a7", durable=True)
            await q.enqueue(sync_account, account="a7", durable=True)
            await q.enqueue(call_partner, n, durable=True)
        await q.drain()
        assert (await q.stats()).count() == 0
asyncio.run(drive())
""",
    "async def search(queries": """
async def drive():
    async with q:
        jobs = [await q.enqueue(poll, n, durable=True, result_ttl=60) for n in (99, 100)]
        assert [await job.result() for job in jobs] == [None, ["a match"]]
        await subscribe(7)
        assert [schedule.key for schedule in await q.schedules(poll)] == ["7"]
        await q.stop(grace=0)
asyncio.run(drive())
""",
    "class Busy": """
async def drive():
    async with tinyq.TinyQ() as q:
        task = q.task(sync_partner.fn, )
        assert await (await task.enqueue("fine")).result() == "synced"
        for answer, attempts in (("maintenance", 0), ("429", 1), ("503", 1)):
            job = await task.enqueue(answer)
            await q.drain()
            assert (job.status, job.attempts) == ("pending", attempts), (answer, job)
        gone = await task.enqueue("gone")
        await q.drain()
        assert (gone.status, gone.reason) == ("cancelled", "account closed")
        await q.stop(grace=0)
asyncio.run(drive())
""",
    "async def digest": """
async def drive():
    async with tinyq.lifespan():
        await tinyq.drain()
        fired = {schedule.name: schedule.fired for schedule in (await tinyq.stats()).schedules}
        assert fired[digest.name] == 1, fired
        assert len(fired) == 4
asyncio.run(drive())
""",
    "async def close_the_books": """
from datetime import UTC, datetime
from itertools import pairwise
async def drive():
    async with tinyq.lifespan():
        nightly, orders = [schedule for schedule in await tinyq.schedules()]
        return nightly.rule, orders.rule, nightly.next_fires(1)[0]
nightly, orders, fire = asyncio.run(drive())
assert nightly == tinyq.Cron("30 2 * * *", tz="Europe/Berlin") and fire > datetime.now(UTC)
def after(rule, *when):
    return rule.next(datetime(*when, tzinfo=UTC)).isoformat(" ")[:16]
assert after(nightly, 2027, 3, 27, 12) == "2027-03-28 01:00"  # right after the gap, which begins at 2:00 in Berlin
assert after(nightly, 2027, 10, 30, 12) == "2027-10-31 00:30"  # the first 2:30 of two
assert after(nightly, 2027, 10, 31, 0, 30) == "2027-11-01 01:30"
assert after(orders, 2027, 6, 4, 17, 45) == "2027-06-07 09:00"  # from Friday to Monday, in UTC
hourly = tinyq.Cron("30 * * * *", tz="Europe/Berlin")
assert [after(hourly, 2027, 3, 28, 0, 30), after(hourly, 2027, 10, 31, 0, 30)] == ["2027-03-28 01:30", "2027-10-31 01:30"]
assert after(tinyq.Cron("*/7 * * * *"), 2027, 1, 1, 0, 56) == "2027-01-01 01:00"
assert tinyq.Cron("@daily")
try:
    tinyq.cron("30 25 * * *")
except ValueError as error:
    assert "hour" in str(error), error
else:
    raise AssertionError("there is no such hour")
""",
    "async def maintain() -> None:\n    [schedule]": """
import contextlib, io
async def drive():
    async with q:
        [line] = await look()
        assert line.startswith(report.name + ": 0 failed, next ["), line
        await maintain()
        await q.drain()
        assert not (await q.stats()).schedules[0].paused
with contextlib.redirect_stdout(io.StringIO()) as output:
    asyncio.run(drive())
assert output.getvalue() == "reported\\n", output.getvalue()
""",
    "async def poll(sub_id": """
import contextlib, io
async def drive():
    async with q:
        assert await subscribe(7, 3600.0) is True
        assert await subscribe(7, 1800.0) is False
        [recurring] = await q.schedules(poll)
        assert (recurring.rule, recurring.key) == (tinyq.Every(1800.0), "sub-7")
        await (await recurring.run_now()).result()
    async with q:  # it is there after a restart
        assert [one.key for one in await q.schedules(poll)] == ["sub-7"]
        assert await unsubscribe(7) is True
        assert await unsubscribe(7) is False
        assert await q.schedules(poll) == []
with contextlib.redirect_stdout(io.StringIO()) as output:
    asyncio.run(drive())
assert output.getvalue() == "polled 7\\n", output.getvalue()
""",
    "async def convert": """
import time
from fastapi.testclient import TestClient
with TestClient(app) as client:
    id = client.post("/convert/letter").json()["job"]
    while (answer := client.get(f"/jobs/{id}").json())["status"] != "done":
        assert answer["status"] in ("pending", "running"), answer
    assert answer == {"status": "done", "attempts": 1, "progress": [0.5, "half of it"], "error": None}
    assert client.get("/jobs/nonsense").status_code == 404
""",
    "async def export": """
import block
async def drive():
    async with q:
        await q.enqueue_many([(export, (n,)) for n in range(3)])
        await q.drain()
        found = await look()
        assert len(found) == 3 and all("ConnectionError: the partner is down" in text for text in found), found
        assert all("in export" in text for text in found), found
        block.down = False
        await repair()
        await q.drain()
        assert await q.dead() == []
        assert (await q.stats()).count(task=export.name) == 0
asyncio.run(drive())
""",
    "async def newsletter": """
async def drive():
    async with q:
        await maintain()
        assert (await q.stats()).paused == ()
        await q.drain()
        assert (await q.stats()).counts == ()
asyncio.run(drive())
""",
    "def remind": """
import sqlite3
assert sqlite3.connect("jobs.db").execute("SELECT task, payload FROM tinyq_jobs ORDER BY seq").fetchall() == [
    ("remind", "[[1],{}]"), ("remind", "[[2],{}]"), ("remind", "[[3],{}]")]
""",
    "async def place_order": """
import sqlite3
async def drive():
    async with tinyq.lifespan():
        try:
            await place_order(8, fails=True)
        except RuntimeError:
            pass
        await place_order(9)
        await tinyq.drain()
asyncio.run(drive())
assert sqlite3.connect("orders.db").execute("SELECT id FROM orders").fetchall() == [(7,), (9,)]
assert sqlite3.connect("orders.db").execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,)
""",
    "async def alive": """
from fastapi.testclient import TestClient
assert tinyq.health().reasons == ("tinyq has not been started",)
with TestClient(app) as client:
    assert client.get("/ready").json() == {"status": "ok", "reasons": []}
    assert client.get("/alive").status_code == 200
assert tinyq.health().reasons == ("tinyq has stopped",)
""",
    "def render": """
if __name__ == "__main__":
    async def drive():
        async with q:
            fine, crashed = await render.enqueue(1), await render.enqueue(13)
            assert await fine.result() == "document 1, rendered"
            try:
                await crashed.result()
            except tinyq.JobFailed as error:
                assert "SIGSEGV" in str(error), error
            assert crashed.status == "dead"
    asyncio.run(drive())
""",
    "async def bill": """
from datetime import datetime
from uuid import uuid4
async def drive():
    async with q:
        items = [Item(name="tea", price="1.10"), Item(name="pot", price="2.20")]
        assert await (await bill.enqueue(uuid4(), items, date(2030, 1, 1))).result() == Decimal("3.30")
        assert await (await q.enqueue("shop.mail.send_bill", uuid4(), items, durable=True)).result() == Decimal("3.30")
        try:
            await bill.enqueue(uuid4(), [{"name": "tea"}])
        except tinyq.PayloadError as error:
            assert "items" in str(error), error
        else:
            raise AssertionError("that is no Item")
asyncio.run(drive())
""",
    "async def restock": """
import sqlite3
with sqlite3.connect("stock.db") as db:
    db.execute("CREATE TABLE items (name TEXT)")
db.close()
async def drive():
    async with tinyq.lifespan(db="jobs.db"):
        await order()
        await tinyq.drain()
asyncio.run(drive())
assert sqlite3.connect("stock.db").execute("SELECT name FROM items").fetchall() == [("teapot",)]
""",
    "async def timed": """
import contextlib, io, re
async def drive():
    async with tinyq.lifespan(db="jobs.db"):
        request_id.set("r-1")
        assert await (await tinyq.enqueue(count, 1, durable=True)).result() == 2
with contextlib.redirect_stdout(io.StringIO()) as output:
    asyncio.run(drive())
assert re.fullmatch("block.count took 0[.][0-9]+ s, for request r-1", output.getvalue().strip()), output.getvalue()
""",
    "async def resize": """
from fastapi.testclient import TestClient
with TestClient(app) as client:
    assert client.post("/images/7").status_code == 202
answer = TestClient(app).post("/images/7")  # it has stopped
assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5"), answer.text
""",
    "import stripe": """
import sqlite3
with sqlite3.connect("shop.db") as db:
    db.execute("CREATE TABLE done_jobs (id TEXT PRIMARY KEY)")
    db.execute("CREATE TABLE customers (id INTEGER, points INTEGER)")
    db.execute("INSERT INTO customers VALUES (1, 0)")
db.close()
def twice():
    add_points(1, 5)
    add_points(1, 5)
async def drive():
    async with tinyq.lifespan(db="jobs.db"):
        job = await charge.options(retry=[0]).enqueue(7, 500)
        await job.result()
        assert stripe.requests == [job.id, job.id], stripe.requests  # the first answer was lost on its way
        await (await tinyq.enqueue(twice)).result()
        await (await add_points.enqueue(1, 20)).result()
asyncio.run(drive())
assert sqlite3.connect("shop.db").execute("SELECT points FROM customers").fetchall() == [(25,)]
""",
    "async def pack": """
import sqlite3
from fastapi.testclient import TestClient
with TestClient(app) as client:
    assert client.post("/orders/7").status_code == 202
    while sqlite3.connect("shop.db").execute("SELECT id, status FROM orders").fetchall() != [(7, "packed")]:
        pass
    assert TestClient(app, raise_server_exceptions=False).post("/orders/7").status_code == 500  # there is one
    client.portal.call(tinyq.drain)
    assert client.portal.call(tinyq.stats).count() == 0
""",
    "async def index(document": """
import sqlite3
async def drive():
    async with q:
        for version in (1, 2, 3):
            await save(1, version)
        assert await reindex(1) is False
        assert await reindex(2) is True
        await q.drain()
asyncio.run(drive())
assert sqlite3.connect("jobs.db").execute("SELECT payload FROM tinyq_jobs").fetchall() == [("[[1,3],{}]",)]
""",
    "def back_up": """
import tinyq
q = tinyq.TinyQ("jobs.db")
@q.task(durable=True, name="later")
async def later(): ...
async def drive():
    async with q:
        await q.enqueue_many([(later, ())] * 3, delay=3600)
        await asyncio.to_thread(back_up, "jobs.db", "copy.db")
        await later.options(delay=3600).enqueue()
        assert (await q.stats()).count() == 4
    async with tinyq.TinyQ("copy.db") as copy:
        assert (await copy.stats()).count(task="later", state="pending") == 3
    try:
        back_up("jobs.db", "copy.db")
    except sqlite3.OperationalError:
        return
    raise AssertionError("it wrote over a file")
asyncio.run(drive())
""",
    "def include_name": """
assert [name for name in ("orders", "tinyq_jobs", "tinyq_meta") if include_name(name, "table", {})] == ["orders"]
assert include_name(None, "schema", {})
""",
    "async def count_signup": """
from fastapi.testclient import TestClient
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as output, TestClient(app) as client:
    assert client.post("/signup/ann").status_code == 200
assert sorted(output.getvalue().splitlines()) == ["signed up: ann", "welcome, ann"]

from fastapi import BackgroundTasks
called = []
def send_welcome(user):
    called.append("send_welcome")
    raise ConnectionError
def count_signup(user):
    called.append("count_signup")
app = FastAPI()
exec(BEFORE)
TestClient(app, raise_server_exceptions=False).post("/signup/ann")
assert called == ["send_welcome"], called
""",
    "async def refresh_rates() -> None: ...\n\n\napp =": """
from fastapi.testclient import TestClient
with TestClient(app) as client:
    client.portal.call(tinyq.drain)
    [schedule] = client.portal.call(tinyq.stats).schedules
    assert schedule.fired >= 1 and schedule.next.second == 0, schedule
""",
    "async def clean_up": """
async def drive():
    async with tinyq.lifespan():
        return {schedule.name: schedule.next for schedule in (await tinyq.stats()).schedules}
fires = asyncio.run(drive())
assert fires[clean_up.name].minute % 5 == fires[clean_up.name].second == 0, fires
assert fires[report.name].strftime("%H:%M:%S %Z") == "03:00:00 UTC", fires
""",
    'key="receipt-7"': """
import sqlite3
async def drive():
    async with q:
        await order()
        await order()
asyncio.run(drive())
rows = sqlite3.connect("jobs.db").execute("SELECT state, run_at - created FROM tinyq_jobs").fetchall()
assert rows == [("pending", 60_000_000)], rows
""",
    "def report(account: int) -> str": """
async def drive():
    async with q:
        job = await order()
        await q.drain()
        [count] = (await q.stats()).counts
        assert (count.queue, count.state, count.count) == ("reports", "done", 1), count
asyncio.run(drive())
""",
    "retry=[60, 60]": """
async def drive():
    async with q:
        await order()
        await q.drain()
        assert (await q.stats()).count() == 0
        [schedule] = (await q.stats()).schedules
        assert schedule.next.minute == schedule.next.second == 0, schedule
        send_receipt(7)
        assert (await q.stats()).count() == 0
asyncio.run(drive())
""",
}

# Blocks that run in servers of their own, further down: a word of each.
SERVED = ("slow mail server", "test_an_order_gets", "test_the_tidying_comes", "class Worker(UvicornWorker)")

STRIPE = """
requests = []
class PaymentIntent:
    @staticmethod
    def create(amount, currency, idempotency_key):
        requests.append(idempotency_key)
        if len(requests) == 1:
            raise ConnectionError("the answer is lost")
"""

# Runs drive.py in each folder that it is told of, in a child process that has the slow imports behind it.
RUNNER = """
import os, runpy, signal, sys
import fastapi.testclient, sqlalchemy.ext.asyncio, tinyq
for line in sys.stdin:
    child = os.fork()
    if not child:
        signal.alarm(60)
        os.chdir(line.strip())
        output = os.open("output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, os.getcwd())
        runpy.run_path("drive.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def block(word: str) -> str:
    """The one block with this word."""
    [found] = [code for _, code in BLOCKS if word in f"\n{code}"]
    return str(found)


def lines(word: str) -> list[list[str]]:
    """The commands of a shell block, split as a shell does."""
    return [shlex.split(line) for line in block(word).splitlines()]


@pytest.fixture(scope="module")
def runner() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", "-c", RUNNER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("word", DRIVES)
def test_a_block_runs_and_does_what_it_says(word: str, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    before = dict(itertools.pairwise(code for _, code in reversed(BLOCKS)))[block(word)] if "BEFORE" in DRIVES[word] else ""
    (tmp_path / "block.py").write_text(block(word))
    (tmp_path / "drive.py").write_text(f"import asyncio\nfrom block import *\nBEFORE = {before!r}\n" + DRIVES[word])
    (tmp_path / "stripe.py").write_text(STRIPE)
    assert runner.stdin is not None and runner.stdout is not None
    print(tmp_path, file=runner.stdin, flush=True)
    assert runner.stdout.readline() == "0\n", (tmp_path / "output").read_text()


def test_every_block_is_run() -> None:
    for language, code in BLOCKS:
        words = [word for word in (*DRIVES, *SERVED) if word in code]
        assert len(words) == (language == "python"), (words, code)
        assert language in ("python", "sh", "text", "ini", "yaml"), language


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "text"])
def test_what_stood_there_before_is_python(code: str) -> None:
    compile(code, "before", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# Servers


class Command(Server):
    """A server that is started by a command of the README, on a free port, in a folder of its own."""

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"log of {Path(command[0]).name}"
        self.command = command
        options = {"gunicorn": ["--bind", f"127.0.0.1:{self.port}"], "uvicorn": ["--port", str(self.port)]}
        where = options.get(Path(command[0]).name, [])
        paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *where],
                cwd=folder,
                env={**os.environ, **paths, "PYTHONUNBUFFERED": "1", **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def accepts(self) -> bool:
        if "tinyq" not in self.command:
            return super().accepts()
        assert self.process.poll() is None, "the worker ended while starting"
        return "worker of" in self.log.read_text()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        super().__exit__()


# Beside the probes of the README: work that notes how it ends, and a response that does not.
DEPLOYED = """
import asyncio
from pathlib import Path
from fastapi.responses import StreamingResponse
import tinyq
from probes import app

async def work():
    mark("started")
    try:
        await asyncio.sleep(1)
    except asyncio.CancelledError:
        mark("cancelled")
        raise
    mark("completed")

def mark(word):
    with Path("marks").open("a") as marks:
        print(word, file=marks)

@tinyq.task(durable=True)
async def store():
    pass

mark("imported")

@app.post("/work")
async def start_work():
    await tinyq.enqueue(work)

@app.post("/store")
async def start_store():
    return str((await store.enqueue()).status)

@app.get("/stream")
async def stream():
    async def endless():
        while True:
            yield b"."
            await asyncio.sleep(0.05)
    return StreamingResponse(endless())
"""


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    """A folder with an application to deploy."""
    (tmp_path / "main.py").write_text(DEPLOYED)
    (tmp_path / "probes.py").write_text(block("async def stopping"))
    return tmp_path


def marks(folder: Path) -> list[str]:
    file = folder / "marks"
    return file.read_text().split() if file.exists() else []


def stop_with_work_and_a_stream(server: Server, folder: Path) -> None:
    httpx.post(server.url + "/work").raise_for_status()
    wait_until("the job has started", lambda: "started" in marks(folder))
    with httpx.stream("GET", server.url + "/stream", timeout=60) as response:
        next(response.iter_bytes())
        server.process.terminate()
        server.wait_for_exit()


def test_the_configuration_of_gunicorn_drains_behind_an_open_stream(deployed: Path) -> None:
    configuration = block("class Worker(UvicornWorker)")
    assert '"timeout_graceful_shutdown": 20' in configuration
    (deployed / "gunicorn.conf.py").write_text(configuration.replace('shutdown": 20', 'shutdown": 0'))
    [command] = lines("gunicorn main:app")
    with Command(command, deployed, TINYQ_DB="jobs.db") as server:
        stop_with_work_and_a_stream(server, deployed)
    assert marks(deployed) == ["imported", "started", "completed"]  # once, before the workers were forked


def test_the_unit_of_systemd_stops_workers_in_time(deployed: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block("KillMode=mixed"))
    service = unit["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[0].endswith("/.venv/bin/uvicorn")
    assert command[-2:] == ["--timeout-graceful-shutdown", "20"]
    assert int(service["TimeoutStopSec"]) > 20 + grace() + 5
    assert service["KillMode"] == "mixed"  # so SIGTERM reaches the parent alone, as here
    name, _, _ = service["Environment"].partition("=")
    with Command(["uvicorn", *command[1:]], deployed, **{name: "jobs.db"}) as server:
        wait_until("all workers have started", lambda: server.log.read_text().count("startup complete") == 2)
        httpx.post(server.url + "/work").raise_for_status()
        wait_until("the job has started", lambda: "started" in marks(deployed))
        server.process.terminate()
        server.wait_for_exit()
    assert marks(deployed) == ["imported", "imported", "started", "completed"]
    assert (deployed / "jobs.db").exists()


def test_the_pod_of_kubernetes_is_given_enough_time_to_drain_behind_an_open_stream(deployed: Path) -> None:
    pod = block("terminationGracePeriodSeconds")
    [command] = [[word.strip(' "') for word in words.split(",")] for words in re.findall(r"command: \[(.*)\]", pod)]
    [hook] = re.findall(r"- python\n +- -c\n +- (.*)", pod)
    [patience] = re.findall(r"terminationGracePeriodSeconds: (\d+)", pod)
    [variable] = re.findall(r"name: (TINYQ_DB)", pod)
    [alone] = lines("uvicorn main:app --timeout")
    assert [word for word in command if word not in ("--host", "0.0.0.0")] == alone
    assert command[-2:] == ["--timeout-graceful-shutdown", "20"]
    assert hook.endswith("time.sleep(5)")
    assert int(patience) > 5 + 20 + grace() + 5
    with Command([*command[:-1], "0"], deployed, **{variable: "jobs.db"}) as server:
        for path in re.findall(r"path: (/\w+), port: 8000", pod):
            assert httpx.get(server.url + path).status_code == 200
        code = hook.replace("8000", str(server.port)).replace("sleep(5)", "sleep(0)")
        subprocess.run([sys.executable, "-c", code], check=True)
        assert httpx.post(server.url + "/store").json() == "pending"  # not begun after the hook
        stop_with_work_and_a_stream(server, deployed)
    assert marks(deployed) == ["imported", "started", "completed"]


def grace() -> float:
    """Of a TinyQ to which none is given."""
    return tinyq.Config(**tinyq.configure_from({}).__dict__).grace


def test_the_first_hour_goes_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shop = block("slow mail server")
    assert "sleep(2)" in shop
    (tmp_path / "shop.py").write_text(shop.replace("sleep(2)", "sleep(0.5)"))
    [command] = lines("\n.venv/bin/uvicorn shop:app")
    [order] = lines("curl -X POST")
    with Command([str(tmp_path / command[0]), *command[1:]], tmp_path) as server:
        assert order == ["curl", "-X", "POST", "127.0.0.1:8000/orders/7"]
        assert len(httpx.post(server.url + "/orders/7").json()["job"]) == 36
        server.process.send_signal(signal.SIGINT)
        server.wait_for_exit()
    assert "sent the receipt for order 7" in server.log.read_text()


def commands(word: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The commands of a shell block with the variables that are set before them."""
    for words in lines(word):
        variables = list(itertools.takewhile(lambda word: "=" in word, words))
        yield dict(variable.split("=") for variable in variables), words[len(variables) :]


def test_the_last_step_of_the_first_hour_has_a_worker(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "shop.py").write_text(block("slow mail server").replace("sleep(2)", "sleep(0.5)"))
    (web, serve), (own, work) = commands("-m tinyq worker shop:app")
    with (
        Command([str(tmp_path / serve[0]), *serve[1:]], tmp_path, **web) as server,
        Command([str(tmp_path / work[0]), *work[1:]], tmp_path, **own) as worker,
    ):
        httpx.post(server.url + "/orders/7").raise_for_status()
        wait_until("the receipt was sent", lambda: "sent the receipt for order 7" in worker.log.read_text())
        worker.process.terminate()
        worker.wait_for_exit()
        assert worker.process.returncode == 0
        assert "sent" not in server.log.read_text()


def test_a_worker_serves_the_queues_of_the_application(deployed: Path) -> None:
    (web, serve), (own, work) = commands("-m tinyq worker main:app --queues")
    with Command(work, deployed, TINYQ_DB="jobs.db", **own) as worker:
        assert serve == ["uvicorn", "main:app"] and web == {"TINYQ_WORKER": "0"} and not own
        assert "queues emails=2, default, grace 60 s" in worker.log.read_text()


def test_the_unit_of_a_worker_gives_it_its_grace() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(block("TimeoutStopSec=70"))
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[1:4] == ["-m", "tinyq", "worker"]
    assert int(unit["Service"]["TimeoutStopSec"]) > int(command[command.index("--grace") + 1]) + 5


def test_the_tests_of_the_readme_pass(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "shop.py").write_text(block("slow mail server"))
    (tmp_path / "test_shop.py").write_text(block("test_an_order_gets"))
    (tmp_path / "test_fetch.py").write_text(block("test_the_tidying_comes"))
    _, command = lines("-m pytest test_shop.py")
    _, asynchronous = lines("asyncio_mode=auto")
    options = ["test_fetch.py", *asynchronous[3:], "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.glob("*.db"))


def test_tinyq_is_installed_as_it_is_written(tmp_path: Path) -> None:
    environment, install, rest = lines("path/to/checkout\n")
    subprocess.run([sys.executable, *environment[1:], "--without-pip"], cwd=tmp_path, check=True)
    assert (tmp_path / install[0]).exists()
    offline = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for command, answer in ((install, "Would install tinyq-py-"), (rest, "already satisfied: uvicorn")):
        words = [str(ROOT) if word == "path/to/checkout" else word for word in command[1:]]
        done = subprocess.run([sys.executable, *words], env=os.environ | offline, capture_output=True, text=True, check=True)
        assert answer in done.stdout


# The text


def test_the_first_example_is_within_the_first_twenty_lines() -> None:
    beginning = "\n".join(README.splitlines()[:21])  # the last of them closes the block
    assert re.search(r"^```python\n.*^```$", beginning, flags=re.M | re.S)


def test_the_set_up_is_the_two_make_commands() -> None:
    set_up = README.split("## Set-up")[1].split("\n## ")[0]
    assert re.findall(r"`(make \w+)`", set_up) == ["make demo", "make test"]


def test_links_within_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", README, flags=re.M)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#(.*?)\)", README))
    assert links and links <= anchors


def test_nobody_is_sent_to_the_other_project() -> None:
    assert not re.search(r"pip install [\"']?tinyq(?!-py)", README)
