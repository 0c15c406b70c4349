"""Jobs in Sentry, in OpenTelemetry and in Prometheus: three functions to copy from.

    q = tinyq.TinyQ("jobs.db")
    trace_jobs(q)                   # a span for each attempt, in the trace of the request that enqueued the job
    send_errors(q, dsn="https://…") # an event for each attempt that fails
    metrics = Metrics(q)            # in a route: return Response(await metrics.render(), media_type=CONTENT_TYPE_LATEST)

None of them tells anybody the arguments of a job.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import prometheus_client
import sentry_sdk
import sentry_sdk.integrations.logging
from opentelemetry import propagate, trace

import tinyq

CallNext = Callable[[tinyq.CurrentJob], Awaitable[Any]]
SIGNALS = (tinyq.Snooze, tinyq.RetryAfter, tinyq.Cancel)  # what a handler raises on purpose


def trace_jobs(q: tinyq.TinyQ) -> None:
    """OpenTelemetry. The trace travels in the headers of the job, through the database, too."""
    tracer = trace.get_tracer("tinyq")
    q.on_enqueue(propagate.inject)

    @q.middleware
    async def in_span(job: tinyq.CurrentJob, call_next: CallNext) -> Any:
        with tracer.start_as_current_span(
            f"job {job.task}",
            context=propagate.extract(job.headers),
            kind=trace.SpanKind.CONSUMER,
            attributes={"tinyq.id": job.id, "tinyq.task": job.task, "tinyq.queue": job.queue, "tinyq.attempt": job.attempt},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return await call_next(job)
            except SIGNALS:
                raise
            except BaseException as error:  # a timeout is a CancelledError
                span.record_exception(error)
                span.set_status(trace.StatusCode.ERROR, type(error).__name__)
                raise


def send_errors(q: tinyq.TinyQ, **options: Any) -> None:
    """Sentry. The options are those of `sentry_sdk.init`."""
    # The local variables of a frame hold the arguments; and what tinyq logs is here already, with its traceback.
    sentry_sdk.init(**{"include_local_variables": False, **options})
    sentry_sdk.integrations.logging.ignore_logger("tinyq")

    @q.middleware
    async def in_scope(job: tinyq.CurrentJob, call_next: CallNext) -> Any:
        with sentry_sdk.isolation_scope() as scope:
            scope.set_transaction_name(f"job {job.task}")
            for name, value in {"task": job.task, "id": job.id, "queue": job.queue, "attempt": job.attempt}.items():
                scope.set_tag(f"tinyq.{name}", value)
            try:
                return await call_next(job)
            except SIGNALS:
                raise
            except Exception as error:
                sentry_sdk.capture_exception(error)
                raise


class Metrics:
    """Prometheus. How many jobs there are by queue, task and state, and how many have died here."""

    def __init__(self, q: tinyq.TinyQ) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        labels = ["queue", "task", "state", "durable"]
        self._q = q
        self._jobs = prometheus_client.Gauge("tinyq_jobs", "Jobs there are.", labels, registry=self.registry)
        self._due = prometheus_client.Gauge("tinyq_due_jobs", "Jobs that wait only for room.", labels, registry=self.registry)
        self._dead = prometheus_client.Counter("tinyq_dead_jobs", "Jobs that died.", ["queue", "task"], registry=self.registry)
        q.on_dead(self._count)

    async def _count(self, job: tinyq.Job[Any]) -> None:
        self._dead.labels(job.queue, job.task).inc()

    async def render(self) -> bytes:
        """The metrics as of now. The counts are of the whole database: ask one process of all, or take the maximum."""
        stats = await self._q.stats()
        self._jobs.clear()
        self._due.clear()
        for c in stats.counts:
            labels = c.queue, c.task, c.state, str(c.durable).lower()
            self._jobs.labels(*labels).set(c.count)
            self._due.labels(*labels).set(c.due)
        return prometheus_client.generate_latest(self.registry)
