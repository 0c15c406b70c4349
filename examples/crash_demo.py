"""Kills the shop with SIGKILL in the middle of its work, starts it again, and counts.

    python examples/crash_demo.py --orders 200

Customers place orders while receipts are being delivered. An order counts as acknowledged when its response has
arrived; one that the kill cut off is placed anew, as a customer would. Every acknowledged order must have its receipt
in the end. Some may have two: a receipt that was delivered but not yet recorded as done when the process died is
delivered again.
"""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CUSTOMERS = 4
PAUSE = 0.02  # seconds between a customer's orders
LEASE = 2.0  # seconds until a dead process's jobs are taken over
WORK = 0.05  # seconds that a receipt takes


class Shop:
    """The shop as a process of its own, on a free port of the loopback interface, with its files in `folder`."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.timeout = timeout
        self.outbox = folder / "outbox.txt"
        self.log = folder / "shop.log"
        self.env = os.environ | {
            "SHOP_DB": str(folder / "shop.db"),
            "SHOP_OUTBOX": str(self.outbox),
            "SHOP_LEASE": str(LEASE),
            "SHOP_WORK": str(WORK),
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "shop:app"], env=self.env, stdout=log, stderr=log)
        try:
            self.wait_until("the shop answers", self.answers)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    def request(self, method: str, path: str) -> Any:
        """The decoded body of a 2xx response; an OSError or HTTPException for everything else."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            raise http.client.HTTPException(f"{method} {path} answered {response.status}: {body!r}")
        return json.loads(body)

    def answers(self) -> bool:
        try:
            self.request("GET", "/status")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def receipts_left(self) -> int:
        counts = self.request("GET", "/status")["jobs"]["counts"]
        return sum(c["count"] for c in counts if c["queue"] == "emails" and c["state"] in ("pending", "running"))

    def delivered(self) -> list[str]:
        lines = self.outbox.read_text().splitlines() if self.outbox.exists() else []
        return [line.split()[0] for line in lines]

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                reason = f"{self.timeout:g} s have passed" if self.process.poll() is None else "the shop has exited"
                sys.exit(f"Waited until {what}, but {reason}. The shop's log ends:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.005)


def place_orders(shop: Shop, numbers: range, acknowledged: list[str]) -> None:
    """One customer."""
    for number in numbers:
        while True:
            time.sleep(PAUSE)
            try:
                acknowledged.append(shop.request("POST", f"/orders?item=teapot-{number}")["order"])
                break
            except (OSError, http.client.HTTPException):
                pass  # the shop is down: try again


def verdict(acknowledged: Iterable[str], delivered: Iterable[str]) -> int:
    """Print what became of the orders; the exit code, 1 if an acknowledged one has no receipt."""
    receipts = Counter(delivered)
    orders = set(acknowledged)
    lost = orders - receipts.keys()
    print(f"acknowledged     {len(orders)}")
    print(f"delivered        {len(orders & receipts.keys())}")
    print(f"lost             {len(lost)}")
    print(f"delivered twice  {sum(n > 1 for n in receipts.values())}")
    if unconfirmed := receipts.keys() - orders:
        print(f"({len(unconfirmed)} more delivered: stored, but the kill cut off the acknowledgement)")
    return 1 if lost else 0


def run(orders: int, timeout: float, folder: Path) -> int:
    acknowledged: list[str] = []  # list.append is atomic
    with Shop(folder, timeout) as shop:
        for first in range(CUSTOMERS):
            numbers = range(first, orders, CUSTOMERS)
            threading.Thread(target=place_orders, args=(shop, numbers, acknowledged), daemon=True).start()
        shop.wait_until("half the orders are placed", lambda: len(acknowledged) >= orders // 2)
        shop.wait_until("the first receipt is delivered", lambda: any(shop.delivered()))
        shop.kill()
        print(f"killed with {len(acknowledged)} of {orders} orders acknowledged, {len(shop.delivered())} delivered")
        shop.start()
        shop.wait_until("all orders are placed", lambda: len(acknowledged) == orders)
        shop.wait_until("no receipt is left to deliver", lambda: shop.receipts_left() == 0)
        return verdict(acknowledged, shop.delivered())


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the shop in the middle of its work and count what was lost.")
    parser.add_argument("--orders", type=int, default=200, help="how many to place (default: 200)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for each step (default: 60)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated."))  # so that the shop and the folder go too
    with tempfile.TemporaryDirectory(prefix="crash-demo-") as folder:
        return run(options.orders, options.timeout, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
