"""Every code block of the README runs, and does what the text beside it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        assert len(fired) == 2
asyncio.run(drive())
""",
    "async def convert": """
import time
from fastapi.testclient import TestClient
with TestClient(app) as client:
    id = client.post("/convert/letter").json()["job"]
    while (answer := client.get(f"/jobs/{id}").json())["status"] != "done":
        assert answer["status"] in ("pending", "running"), answer
    assert answer == {"status": "done", "attempts": 1, "error": None}
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
    "async def audit": """
from fastapi.testclient import TestClient
with TestClient(app) as client:
    assert len(client.post("/login/ann").json()["job"]) == 36
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
assert sqlite3.connect("shop.db").execute("SELECT id FROM orders").fetchall() == [(7,), (9,)]
assert sqlite3.connect("shop.db").execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,)
""",
    "os.fork()": """
import sqlite3
assert sqlite3.connect("jobs.db").execute("SELECT count(*) FROM tinyq_jobs").fetchone() == (0,)
""",
    "async def alive": """
from fastapi.testclient import TestClient
assert tinyq.health().reasons == ("tinyq has not been started",)
with TestClient(app) as client:
    assert client.get("/ready").json() == {"status": "ok", "reasons": []}
    assert client.get("/alive").status_code == 200
assert tinyq.health().reasons == ("tinyq has stopped",)
""",
    "shop.tasks.send_receipt": """
import sqlite3
assert sqlite3.connect("jobs.db").execute("SELECT task, state, payload FROM tinyq_jobs").fetchall() == [
    ("shop.tasks.send_receipt", "pending", "[[7],{}]")]
""",
}


@pytest.mark.parametrize("word", DRIVES)
def test_a_block_runs_and_does_what_it_says(word: str, tmp_path: Path) -> None:
    [block] = [code for _, code in BLOCKS if word in code]
    (tmp_path / "block.py").write_text(block)
    (tmp_path / "drive.py").write_text("import asyncio\nfrom block import *\n" + DRIVES[word])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "drive.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_every_block_is_python_and_is_driven() -> None:
    for language, code in BLOCKS:
        assert language == "python"
        assert sum(word in code for word in DRIVES) == 1, code


def test_the_first_example_is_within_the_first_twenty_lines() -> None:
    beginning = "\n".join(README.splitlines()[:21])  # the last of them closes the block
    assert re.search(r"^```python\n.*^```$", beginning, flags=re.M | re.S)


def test_the_set_up_is_the_two_make_commands() -> None:
    set_up = README.split("## Set-up")[1].split("\n## ")[0]
    assert re.findall(r"`(make \w+)`", set_up) == ["make demo", "make test"]
