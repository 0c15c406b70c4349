"""Slow jobs that may take some of the slots leave the others to quick ones, by a running limit or by a queue of their own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import OpenAt
from helpers import eventually

from tinyq import Task, TinyQ

SLOTS, LIMIT = 10, 3
REPORTS, EMAILS = 30, 21  # emails that fill the other slots three times


class Office:
    """A TinyQ with reports, which run until they are let go, and emails, which only end in sevens: all other slots at once."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.most_reports = self.most_jobs = self.emails_running = 0
        self.order: list[int] = []
        self.ended: list[int] = []
        self.sent: list[int] = []
        self.gates = [asyncio.Event() for _ in range(REPORTS)]
        self.others = asyncio.Barrier(SLOTS - LIMIT)
        self.q: TinyQ
        self.report: Task[[int], Any, None]
        self.email: Task[[int], Any, None]

    def _look(self) -> None:
        self.most_reports = max(self.most_reports, len(self.running))
        self.most_jobs = max(self.most_jobs, len(self.running) + self.emails_running)

    async def work(self, number: int) -> None:
        self.running.append(number)
        self.order.append(number)
        self._look()
        try:
            await self.gates[number].wait()
        finally:
            self.running.remove(number)
        self.ended.append(number)

    async def send(self, number: int) -> None:
        self.emails_running += 1
        self._look()
        try:
            await self.others.wait()
        finally:
            self.emails_running -= 1
        self.sent.append(number)

    async def enqueue_all(self) -> None:
        async with asyncio.timeout(10):
            for number in range(REPORTS):
                await self.report.enqueue(number)
            for number in range(EMAILS):
                await self.email.enqueue(number)

    async def reports(self, state: str) -> int:
        return (await self.q.stats()).count(task="report", state=state)


@pytest.fixture(params=["limit", "queue"])
async def office(request: pytest.FixtureRequest, open_at: OpenAt, db: Path | None) -> Office:
    office = Office()
    durable = db is not None
    if request.param == "limit":
        office.q = await open_at(db, concurrency=SLOTS)
        office.report = office.q.task(name="report", durable=durable, max_running=LIMIT)(office.work)
    else:
        office.q = await open_at(db, concurrency=SLOTS - LIMIT, queues={"reports": LIMIT})
        office.report = office.q.task(name="report", durable=durable, queue="reports")(office.work)
    office.email = office.q.task(name="email", durable=durable)(office.send)
    return office


async def test_emails_are_sent_through_all_other_slots_while_reports_wait(office: Office) -> None:
    await office.enqueue_all()
    await eventually(lambda: len(office.sent) == EMAILS)
    assert (office.ended, office.running) == ([], [0, 1, 2])


async def test_reports_are_never_above_their_limit_and_all_of_them_end(office: Office) -> None:
    await office.enqueue_all()
    while len(office.ended) < REPORTS:  # as many as may run end together
        await eventually(lambda: len(office.running) == LIMIT)
        ending = list(office.running)
        for number in ending:
            office.gates[number].set()
        await eventually(lambda ending=ending: set(ending) <= set(office.ended))  # type: ignore[misc]
    await eventually(lambda: len(office.sent) == EMAILS)
    assert office.most_reports == LIMIT
    assert office.most_jobs <= SLOTS


async def test_a_report_at_the_limit_has_no_slot(office: Office) -> None:
    await office.enqueue_all()
    await eventually(lambda: len(office.sent) == EMAILS)
    assert (await office.reports("running"), await office.reports("pending")) == (LIMIT, REPORTS - LIMIT)


async def test_each_report_that_ends_lets_the_next_one_in(office: Office) -> None:
    await office.enqueue_all()
    await eventually(lambda: len(office.running) == LIMIT)
    for number in range(REPORTS - LIMIT):
        office.gates[number].set()
        running = [number + 1, number + 2, number + 3]
        await eventually(lambda running=running: office.running == running)  # type: ignore[misc]
    assert office.order == list(range(REPORTS))
