"""The examples, as a user runs them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import ROOT, Server, wait_until

EXAMPLES = ROOT / "examples"


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    return tmp_path / "outbox.txt"


@pytest.fixture
def shop(tmp_path: Path, outbox: Path) -> Iterator[httpx.Client]:
    env = {"SHOP_DB": str(tmp_path / "shop.db"), "SHOP_OUTBOX": str(outbox), "SHOP_WORK": "0.1"}
    with (
        Server("shop:app", app_dir=EXAMPLES, log=tmp_path / "log", **env) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def order(shop: httpx.Client, item: str = "teapot") -> dict[str, str]:
    response = shop.post("/orders", params={"item": item})
    assert response.status_code == 202
    placed: dict[str, str] = response.json()
    return placed


def test_an_order_has_its_receipt_delivered(shop: httpx.Client, outbox: Path) -> None:
    placed = order(shop)
    wait_until("the receipt is delivered", outbox.exists)
    wait_until("it is complete", lambda: outbox.read_text() == f"{placed['order']} teapot\n")


def test_the_job_of_an_order_can_be_followed_until_it_is_done(shop: httpx.Client) -> None:
    placed = order(shop)

    def job() -> Any:
        return shop.get(f"/jobs/{placed['job']}").raise_for_status().json()

    assert job()["status"] in ("pending", "running", "done")
    wait_until("the job is done", lambda: job()["status"] == "done")


def test_an_unknown_job_is_not_found(shop: httpx.Client) -> None:
    assert shop.get(f"/jobs/{'0' * 32}").status_code == 404


def test_an_order_refreshes_the_cache(shop: httpx.Client) -> None:
    order(shop, "kettle")
    wait_until("the cache counts it", lambda: shop.get("/status").json()["best_sellers"] == {"kettle": 1})


def test_the_status_counts_receipts_by_state(shop: httpx.Client) -> None:
    order(shop)

    def finished() -> list[int]:
        counts = shop.get("/status").raise_for_status().json()["jobs"]["counts"]
        return [c["count"] for c in counts if c["queue"] == "emails" and c["state"] == "done" and c["durable"]]

    wait_until("the receipt counts as done", lambda: finished() == [1])


def crash_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "crash_demo.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_the_crash_demo_loses_no_acknowledged_order() -> None:
    done = crash_demo("--orders", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = {name: int(n) for name, n in re.findall(r"^(\w.*?) +(\d+)$", done.stdout, re.MULTILINE)}
    assert numbers["acknowledged"] == numbers["delivered"] == 60
    assert numbers["lost"] == 0


def test_the_crash_demo_kills_the_shop_while_orders_and_receipts_are_under_way() -> None:
    done = crash_demo("--orders", "60")
    match = re.search(r"^killed with (\d+) of 60 orders acknowledged, (\d+) delivered$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    acknowledged, delivered = map(int, match.groups())
    assert 0 < delivered < acknowledged < 60


def test_the_crash_demo_fails_when_an_acknowledged_order_has_no_receipt() -> None:
    program = "import crash_demo; raise SystemExit(crash_demo.verdict(['a', 'b'], ['a', 'a', 'c']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.findall(r"\d+$", done.stdout, re.MULTILINE) == ["2", "1", "1", "1"]
