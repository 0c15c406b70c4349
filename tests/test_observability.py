"""The example for Sentry, OpenTelemetry and Prometheus, with the real libraries."""

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import sentry_sdk
from clock import FakeClock
from helpers import Open, eventually
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport
from servers import ROOT

from tinyq import Snooze, State

pytestmark = pytest.mark.timeout(300)

CARD = "-".join(["4111"] * 4)  # an event quotes lines of the source, where this is not to be found


@pytest.fixture(scope="session")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("observability", ROOT / "examples" / "observability.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# OpenTelemetry


@pytest.fixture(scope="session")  # a process may come back to this file when it has run others
def exporter() -> InMemorySpanExporter:
    """The provider of a process can be set once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def ids(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


async def test_each_attempt_is_a_span_in_the_trace_of_the_request(
    example: ModuleType, open_q: Open, clock: FakeClock, durable: bool, spans: InMemorySpanExporter
) -> None:
    q = await open_q()
    example.trace_jobs(q)
    tracer = trace.get_tracer("the application")

    @q.task(name="flaky", retry=[1])
    async def flaky(secret: str) -> None:
        with tracer.start_as_current_span("inside"):
            if len(spans.get_finished_spans()) < 3:
                raise OSError("down")

    with tracer.start_as_current_span("POST /orders"):
        job = await flaky.options(durable=durable).enqueue("s3cret")
    await eventually(lambda: job.status is State.DONE, clock)
    request, inside, first, inside_again, second = sorted(
        spans.get_finished_spans(), key=lambda span: (span.name != "POST /orders", span.end_time)
    )
    assert [span.name for span in (request, inside, first, inside_again, second)] == [
        "POST /orders", "inside", "job flaky", "inside", "job flaky",
    ]  # fmt: skip
    assert {ids(span)[0] for span in spans.get_finished_spans()} == {ids(request)[0]}
    assert [span.parent.span_id if span.parent else None for span in (first, inside, second, inside_again)] == [
        ids(request)[1], ids(first)[1], ids(request)[1], ids(second)[1],
    ]  # fmt: skip
    assert [(span.attributes or {}).get("tinyq.attempt") for span in (first, second)] == [1, 2]
    assert {(span.attributes or {}).get("tinyq.id") for span in (first, second)} == {job.id}
    assert [span.status.status_code for span in (first, second)] == [trace.StatusCode.ERROR, trace.StatusCode.UNSET]
    assert "s3cret" not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_a_job_that_nobody_traces_begins_a_trace_of_its_own(
    example: ModuleType, open_q: Open, clock: FakeClock, durable: bool, spans: InMemorySpanExporter
) -> None:
    q = await open_q()
    example.trace_jobs(q)

    @q.task(name="snooze")
    async def snooze() -> None:
        if not spans.get_finished_spans():
            raise Snooze(1)

    job = await snooze.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DONE, clock)
    first, second = spans.get_finished_spans()
    assert first.parent is second.parent is None
    assert (first.status.status_code, first.events) == (trace.StatusCode.UNSET, ())  # to snooze is no error


# Sentry


class Kept(Transport):
    """Sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.texts: list[bytes] = []
        self.given = {"transport": self, "default_integrations": False, "integrations": [LoggingIntegration()]}

    def capture_envelope(self, envelope: Envelope) -> None:
        event = envelope.get_event()
        if event is not None:
            self.events.append(dict(event))
            self.texts.append(envelope.serialize())


@pytest.fixture
def sentry() -> Iterator[Kept]:
    yield Kept()
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_failing_job_is_one_event_with_its_tags_and_without_its_arguments(
    example: ModuleType, open_q: Open, durable: bool, sentry: Kept, kind: str
) -> None:
    q = await open_q()
    example.send_errors(q, dsn="https://key@example.invalid/1", **sentry.given)

    async def charge(card: str) -> None:
        raise OSError("the bank is closed")

    def charge_in_thread(card: str) -> None:
        raise OSError("the bank is closed")

    task = q.task(name="charge", queue="money", retry=False)(charge if kind == "async" else charge_in_thread)
    job = await task.options(durable=durable).enqueue(CARD)
    await eventually(lambda: job.status is State.DEAD)
    [event] = sentry.events
    assert event["tags"] == {"tinyq.task": "charge", "tinyq.id": job.id, "tinyq.queue": "money", "tinyq.attempt": 1}
    assert event["transaction"] == "job charge"
    [*_, error] = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("OSError", "the bank is closed")
    assert error["stacktrace"]["frames"][-1]["function"] == ("charge" if kind == "async" else "charge_in_thread")
    assert CARD.encode() not in sentry.texts[0]


async def test_what_a_handler_raises_on_purpose_is_no_event(
    example: ModuleType, open_q: Open, clock: FakeClock, durable: bool, sentry: Kept
) -> None:
    q = await open_q()
    example.send_errors(q, dsn="https://key@example.invalid/1", **sentry.given)
    came: list[int] = []

    @q.task
    async def later() -> None:
        came.append(1)
        if len(came) == 1:
            raise Snooze(1)

    job = await later.options(durable=durable).enqueue()
    await eventually(lambda: job.status is State.DONE, clock)
    assert sentry.events == []


# Prometheus


def samples(text: bytes) -> dict[tuple[str, str, str, str], float]:
    """The values by metric, queue, task and state."""
    found = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text.decode(), re.MULTILINE):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[name, named["queue"], named["task"], named.get("state", "")] = float(value)
    return found


async def test_jobs_are_counted_by_queue_and_state_and_the_dead_in_a_counter(
    example: ModuleType, open_q: Open, durable: bool
) -> None:
    q = await open_q(queues={"emails": 1})
    metrics = example.Metrics(q)
    go_on = asyncio.Event()

    @q.task(name="send", queue="emails")
    async def send() -> None:
        await go_on.wait()

    @q.task(name="fail", retry=False)
    async def fail() -> None:
        raise OSError

    jobs = [await send.options(durable=durable).enqueue() for _ in range(3)]
    dead = [await fail.options(durable=durable).enqueue() for _ in range(2)]
    await eventually(lambda: all(job.status is State.DEAD for job in dead) and jobs[0].status is State.RUNNING)
    labels = {"queue": "default", "task": "fail"}
    await eventually(lambda: metrics.registry.get_sample_value("tinyq_dead_jobs_total", labels) == 2)
    found = samples(await metrics.render())
    assert found["tinyq_jobs", "emails", "send", "running"] == 1
    assert found["tinyq_jobs", "emails", "send", "pending"] == 2
    assert found["tinyq_due_jobs", "emails", "send", "pending"] == 2
    assert found["tinyq_jobs", "default", "fail", "dead"] == 2
    go_on.set()
    for job in jobs:
        await job.result()
    found = samples(await metrics.render())
    assert ("tinyq_jobs", "emails", "send", "pending") not in found
    assert found["tinyq_dead_jobs_total", "default", "fail", ""] == 2
