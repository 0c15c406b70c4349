"""tinyq: the background work of a FastAPI or Starlette service, in one file.

    @tinyq.task(timeout=30, queue="emails")
    async def send_receipt(order_id: int) -> None: ...

    @tinyq.every(60)
    async def refresh_rates() -> None: ...

    async with tinyq.lifespan(app, db="jobs.db"):                  # in the application's lifespan, innermost
        await tinyq.enqueue(send_receipt, 7)                       # best-effort: in memory, tracked, retried, drained
        await tinyq.enqueue(send_receipt, 7, durable=True)         # durable: committed to SQLite when this returns

The life of a job: `enqueue` (or the next fire time of a schedule) makes a `JobRow` and inserts it into a store. A claim step
takes due rows for which there is room, under a lease. The handler is called in one function, which turns whatever happens
into an `Outcome`; `decide`, which is pure, turns the outcome into a `Settlement`; the store writes it if the claim still
holds. Best-effort and durable jobs take this one road; only the store differs. Where nothing waits and a slot is free, a step
is left out: a best-effort job starts at once, a durable one is inserted with its lease and need not be claimed. A durable job
may run twice (after a crash, a lost lease): its handler must be idempotent.

Contents
     1. Imports and surface
     2. Errors and signals
     3. Vocabulary: what users pass
     4. Vocabulary: counts
     5. Vocabulary: what travels inside
     6. Time
     7. Payload
     8. Payload: what annotations say
     9. Options of a job
    10. Options of a TinyQ
    11. Handlers, and the options of a call
    12. Store contract
    13. Memory store
    14. SQLite store: schema and statements
    15. SQLite store: rows in one transaction
    16. SQLite store: the owner of the file
    17. SQLite store: the caller's connection
    18. SQLite store: the class
    19. SQLite store: the pulse
    20. SQLite store: without an event loop
    21. Running one job: its place and its thread
    22. Running one job: what its handler depends on
    23. Running one job: a process of its own
    24. Running one job: the call
    25. Running one job: the decision
    26. Loops: driver and slots
    27. Loops: the crew that claims, runs and settles
    28. Loops: schedules
    29. Engine: taking work in
    30. Engine: asking about jobs
    31. Engine: from start to stop
    32. Engine: under test
    33. Job handle
    34. Tasks
    35. Test kit
    36. TinyQ
    37. Default instance
    38. Command line
"""

# ── 1. Imports and surface ────────────────────────────────────────────────────────────────────────────────────────────
# Standard library only, and nothing runs at import: no loop, file or thread. Drivers are imported when a store opens.

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import heapq
import inspect
import itertools
import logging
import math
import operator
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, abc, deque, namedtuple
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    TypeVarTuple,
    Union,
    Unpack,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)  # fmt: skip

if TYPE_CHECKING:
    import json
    import random
    import sqlite3
    import subprocess
    from typing import NamedTuple, TypedDict
    from zoneinfo import ZoneInfo

    import aiosqlite
    from cronsim import CronSim
else:

    class Fields(type):
        """Makes what typing.NamedTuple makes, but compiles no types: those of a dozen classes take a tenth of the import."""

        def __new__(cls, name, bases, body):
            if not bases:
                return super().__new__(cls, name, bases, body)
            names = body["__annotations__"]
            made = namedtuple(name, names, defaults=[body.pop(field) for field in names if field in body], module=__name__)
            for key, value in body.items():
                if key not in ("__module__", "__qualname__"):
                    setattr(made, key, value)
            return made

    class NamedTuple(metaclass=Fields):
        pass

    class TypedDict:
        """The same for typing.TypedDict: a dict at run time."""

        def __init_subclass__(cls, total=True):
            pass

        def __new__(cls, **fields):
            return fields


_program: Final = __name__ == "__main__"
if __name__ in ("__main__", "__mp_main__"):  # run with -m or as a script, or by multiprocessing in a child of such a process
    _spec = globals()["__spec__"]
    __name__ = _spec.name if _spec else os.path.splitext(os.path.basename(__file__))[0]
    if _program and __name__ in sys.modules:  # its package has imported it: that one is what the application uses
        sys.exit(sys.modules[__name__].main())
    sys.modules.setdefault(__name__, sys.modules["__main__" if _program else "__mp_main__"])  # else an import makes a second copy

__version__ = "0.1.0"

__all__ = [
    "AlreadyStarted", "Cancel", "Clock", "Configuration", "ConfigurationError", "Count", "Cron", "CurrentJob",
    "DuplicateTask", "EnqueuedJob", "Every", "Health", "Job", "JobCancelled", "JobError", "JobFailed", "JobNotFound",
    "KeyConflict", "Kit", "NoResult", "NotStarted", "Options", "PayloadError", "PayloadTooLarge", "ProcessDied", "QueueFull",
    "Rate", "RecurringJob", "Retry", "RetryAfter", "Schedule", "ScheduleStats", "ShuttingDown", "Snooze", "State", "Stats",
    "StoreBusy", "StoreError", "Task", "TaskOptions", "TinyQ", "TinyQError", "UnknownTask", "batch", "configure", "cron",
    "current_job", "dead", "drain", "enqueue", "enqueue_many", "enqueue_sync", "every", "get", "health", "lifespan",
    "middleware", "on_dead", "on_enqueue", "pause", "purge", "quiesce", "requeue", "resume", "run", "schedule", "schedules",
    "spawn", "start", "stats", "stop", "task", "testing", "unschedule", "wake",
]  # fmt: skip

log = logging.getLogger("tinyq")

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
C_co = TypeVar("C_co", covariant=True)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
HookT = TypeVar("HookT", bound="DeadHook")
EnqueueHookT = TypeVar("EnqueueHookT", bound="EnqueueHook")
MiddlewareT = TypeVar("MiddlewareT", bound="Middleware")


# ── 2. Errors and signals ─────────────────────────────────────────────────────────────────────────────────────────────
# What tinyq raises, and what a handler may raise to say something other than "this failed".
# Plain mistakes at a call are TypeError or ValueError, as everywhere in Python.


def revive(kind: type[T], args: tuple[Any, ...], state: Mapping[str, Any]) -> T:
    """An exception as it was, without its constructor, which may want other arguments than it hands on."""
    error = kind.__new__(kind, *args)
    cast(BaseException, error).args = args
    vars(error).update(state)
    return error


def revival(self: BaseException) -> tuple[Any, ...]:
    """How pickle and copy are to make it again."""
    return revive, (type(self), self.args, vars(self))


class TinyQError(Exception):
    """Base of every error that tinyq raises, TypeError and ValueError for plain mistakes aside."""

    __reduce__ = revival


class NotStarted(TinyQError, RuntimeError):
    """Work was handed to a TinyQ that has not been started, or that runs in another event loop; or `enqueue_sync` was called in
    an event loop, which it would block."""


class AlreadyStarted(TinyQError, RuntimeError):
    """`start`, `lifespan`, `configure` or `testing` was called while this TinyQ runs."""


class ShuttingDown(TinyQError, RuntimeError):
    """Work was handed to a TinyQ that is stopping or has stopped; nothing was stored."""


class ConfigurationError(TinyQError, ValueError):
    """The options of a TinyQ do not allow this, or contradict each other."""


class QueueFull(TinyQError):
    """`max_pending` best-effort jobs are waiting, and none left within the time that `enqueue` waits for room."""


class KeyConflict(TinyQError):
    """A job with this `key` is pending or running, and `on_conflict="raise"` was asked for."""


class UnknownTask(TinyQError, LookupError):
    """A best-effort job names a task that is not registered here, or a Task belongs to another TinyQ."""


class DuplicateTask(TinyQError, ValueError):
    """A second task was registered under a name that is taken."""


class PayloadError(TinyQError, TypeError):
    """A durable job's argument would not arrive as it is: it is neither plain JSON nor what the handler's annotation says. The
    message names the task and the path to it."""


class PayloadTooLarge(TinyQError, ValueError):
    """A durable job's arguments take more than `max_payload` bytes of JSON."""


class StoreError(TinyQError):
    """The database cannot be opened, read or written. What was being written has not been stored."""


class StoreBusy(StoreError):
    """Another connection held the database's write lock for longer than tinyq waits."""


class JobError(TinyQError):
    """Base of what `Job.result` and `get` raise about one job."""


class JobFailed(JobError):
    """The job is dead. `type` and `message` describe the last error; in the process that ran it, `__cause__` is that error."""

    def __init__(self, type: str, message: str = "") -> None:
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.message = message


class ProcessDied(TinyQError):
    """The process of a job (`run_in="process"`) ended before its function had returned: a failed attempt like any other.

    exitcode: as in `subprocess`: what the process ended with, or the number of the signal that ended it, negative.
    """

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode
        if exitcode >= 0:
            super().__init__(f"the process ended with exit code {exitcode} before its function had returned")
            return
        known = {int(number): number.name for number in signal.Signals}
        hint = ", which tinyq did not send; the system does when memory runs out" if exitcode == -9 else ""
        super().__init__(f"the process was ended by {known.get(-exitcode, 'a signal')} (signal {-exitcode}){hint}")


class JobCancelled(JobError):
    """The job was cancelled, expired, or lost at shutdown; `reason` says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoResult(JobError):
    """There is no result to give: it was not kept (`result_ttl`), or the job is not going to run in this process."""


class JobNotFound(JobError, LookupError):
    """No job with this id: it never was, or it has finished and was not kept."""


def duration(value: object, name: str, *, zero: bool = True, infinite: bool = False) -> float:
    """Seconds as a float; TypeError or ValueError that names the option otherwise."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: give seconds as a number, or a timedelta")
    if isinstance(value, int) and abs(value) > 10**300:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits: give seconds")
    if math.isnan(value) or value < 0 or (value == 0 and not zero) or (math.isinf(value) and not infinite):
        wanted = "not be negative" if zero else "be greater than zero"
        raise ValueError(f"{name} is {value!r}: it must {wanted}{'' if infinite else ', and be finite'}")
    return float(value)


class Steering(Exception):
    """Base of what a handler may raise to steer its own job."""

    __reduce__ = revival


class Snooze(Steering):
    """Come back in `seconds` (float or timedelta, not negative). Uses no attempt; at most 10,000 times a job."""

    def __init__(self, seconds: float | timedelta) -> None:
        self.seconds = duration(seconds, "Snooze")
        super().__init__(f"snoozed for {self.seconds:g} s")


class RetryAfter(Steering):
    """This attempt failed; if attempts are left, the next one starts in `seconds` instead of after the backoff."""

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        self.seconds = duration(seconds, "RetryAfter")
        super().__init__(reason or f"asked to be retried after {self.seconds:g} s")


class Cancel(Steering):
    """Stop this job for good. It ends as cancelled, which is not a failure."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "cancelled by its handler")


# ── 3. Vocabulary: what users pass ────────────────────────────────────────────────────────────────────────────────────
# Values that appear in signatures, checked once, here. Durations are seconds or timedelta; `None` means unset, zero is a value.


class State(StrEnum):
    """Where a job is in its life. The last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


@dataclass_transform(kw_only_default=True)
class Record:
    """Declared fields, given by keyword. (The methods that a dataclass compiles would take half of the time of the import.)"""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Value:
    """A record that never changes, and is equal to another with the same fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def _refuse(self, name: str, *value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed: make another one")

    if not TYPE_CHECKING:  # it would hide misspelled fields from mypy
        __setattr__ = __delattr__ = _refuse

    def but(self, **changes: Any) -> Self:
        """Another one, with these changes."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **changes)
        return other

    def as_dict(self) -> dict[str, Any]:
        """The fields, other values in them included, as plain dicts and tuples."""
        return {name: plain(getattr(self, name)) for name in type(self).__annotations__}

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in type(self).__annotations__)  # with the defaults, which the class holds

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        fields = zip(type(self).__annotations__, self._fields(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


def plain(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.as_dict() if isinstance(value, Value) else value


ErrorKinds = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]


class Retry(Value):
    """How often a failing job starts again, and how long it waits before that.

    The delay after failure n (n = 1, 2, …) is d = min(cap, base · factor^(n-1)) seconds, then jitter:
    "equal" (default) draws from [d/2, d], "full" from [d/10, d], "none" takes d. `delays` gives the delays themselves,
    taken as they are, the last one repeated; `max_attempts` then defaults to one start more than there are delays.
    No delay is longer than 10^12 seconds.

    max_attempts: starts altogether, the first included; `math.inf` for no limit. Default 5.
    base, cap: seconds or timedelta. Defaults 5 s and 900 s: about 5 s, 30 s, 3 min and 15 min apart.
    retry_on: the exception type, or types, that are retried, or a function that says so of an error; anything else is dead at
        once. Default: all.
    give_up_on: types (or a function) for errors that are dead at once even if `retry_on` includes them.

    Raises TypeError or ValueError for values that make no sense.
    """

    max_attempts: float
    base: float
    factor: float
    cap: float
    jitter: Literal["equal", "full", "none"]
    retry_on: ErrorKinds
    give_up_on: ErrorKinds
    delays: tuple[float, ...]

    def __init__(
        self,
        max_attempts: float | None = None,
        base: float | timedelta = 5.0,
        factor: float = 6.0,
        cap: float | timedelta = 900.0,
        jitter: Literal["equal", "full", "none"] | bool = "equal",
        retry_on: ErrorKinds = BaseException,
        give_up_on: ErrorKinds = (),
        delays: Sequence[float | timedelta] = (),
    ) -> None:
        if isinstance(delays, (str, bytes)) or not isinstance(delays, Sequence):
            raise TypeError(f"Retry.delays is {delays!r}: give a list of seconds")
        if max_attempts is None:
            max_attempts = len(delays) + 1 if delays else 5
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, (int, float)):
            raise TypeError(f"Retry.max_attempts is {max_attempts!r}: give a whole number of starts")
        if not max_attempts >= 1 or (max_attempts != math.inf and max_attempts != int(max_attempts)):
            raise ValueError(f"Retry.max_attempts is {max_attempts!r}: it counts all starts, so it is 1 or more (1: never retry)")
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"Retry.factor is {factor!r}: give a number")
        if isinstance(jitter, bool):
            jitter = "equal" if jitter else "none"
        if jitter not in ("equal", "full", "none"):
            raise ValueError(f"Retry.jitter is {jitter!r}: it is 'equal', 'full' or 'none'")
        self.__dict__.update(
            max_attempts=max_attempts,
            base=duration(base, "Retry.base"),
            factor=duration(factor, "Retry.factor", zero=False),
            cap=duration(cap, "Retry.cap", infinite=True),
            jitter=jitter,
            retry_on=self._kinds("retry_on", retry_on),
            give_up_on=self._kinds("give_up_on", give_up_on),
            delays=tuple(duration(delay, f"Retry.delays[{i}]") for i, delay in enumerate(delays)),
        )

    @staticmethod
    def _kinds(name: str, given: Any) -> ErrorKinds:
        if callable(given) and not isinstance(given, type):
            return cast(Callable[[BaseException], bool], given)
        kinds = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            raise TypeError(f"Retry.{name} is {given!r}: give exception types, or a function of the error")
        return kinds

    def delay(self, failures: int, rng: random.Random | None = None) -> float:
        """Seconds to wait after the given number of failures (1 or more)."""
        if self.delays:
            return self.delays[min(failures, len(self.delays)) - 1]
        exponent: float = failures - 1
        base, cap = self.base, min(self.cap, 1e12)
        if base == 0 or cap == 0:
            return 0.0
        if self.factor > 1:  # clamped before the power, which overflows at attempt 1,024 for factor 2
            reach = (math.log(cap) - math.log(base)) / math.log(self.factor)
            exponent = min(exponent, max(0, math.ceil(reach)))
        try:
            longest: float = min(cap, base * self.factor**exponent)
        except OverflowError:  # a factor of astronomic size
            longest = cap
        if self.jitter == "none":
            return longest
        return (rng or dice()).uniform(longest / (2 if self.jitter == "equal" else 10), longest)

    def gives_up_on(self, error: BaseException) -> bool:
        """Whether this error ends the job whatever attempts are left."""
        return self._matches(self.give_up_on, error, False) or not self._matches(self.retry_on, error, True)

    @staticmethod
    def _matches(kinds: Any, error: BaseException, fallback: bool) -> bool:
        if isinstance(kinds, tuple):
            return isinstance(error, kinds)
        try:
            return bool(kinds(error))
        except Exception:
            log.exception("a Retry's function %r failed on %s: the error is retried", kinds, type(error).__qualname__)
            return fallback


@functools.cache
def dice() -> random.Random:
    """Made when first used: importing random takes a millisecond."""
    import random

    rng = random.Random()
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=rng.seed)
    return rng


ONE_START: Final = Retry(max_attempts=1)
FIVE_STARTS: Final = Retry()
RetryOption = Retry | Sequence[float | timedelta] | Literal[False] | None
OnConflict = Literal["reuse", "queue", "replace", "raise"]
Promote = Literal[True, False, "interrupted"]
OnLost = Literal["retry", "dead"]
RunIn = Literal["process"]
Overlap = Literal["skip", "queue", "allow"]
Misfire = Literal["latest", "all", "skip"]
DeadHook = Callable[["Job[Any]"], object]
EnqueueHook = Callable[[dict[str, str]], object]
CallNext = Callable[["CurrentJob"], Awaitable[Any]]
Middleware = Callable[["CurrentJob", CallNext], Coroutine[Any, Any, Any]]


def as_retry(value: object) -> Retry:
    """The `retry` option in any of its three forms."""
    if isinstance(value, Retry):
        return value
    if value is False:
        return ONE_START
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value:
        return Retry(delays=tuple(value))
    raise TypeError(f"retry is {value!r}: give tinyq.Retry(...), a list of delays in seconds, or False")


class Rate(Value):
    """How many jobs of a task may start within a time: Rate(100, per=60) is 100 a minute.

    A token bucket: each start takes a token, `limit` new ones come in evenly over each `per` seconds, and no more than `burst`
    are kept. So within any t seconds at most burst + t · limit / per jobs start, and never more than `burst` at once.

    limit: whole, 1 or more. per: seconds or timedelta, default 1. burst: whole, 1 or more; default `limit`, 1 spreads evenly.

    Raises TypeError or ValueError for values that make no sense.
    """

    limit: int
    per: float
    burst: int

    def __init__(self, limit: int, per: float | timedelta = 1.0, burst: int | None = None) -> None:
        limit = whole(limit, "Rate.limit", 1)
        burst = limit if burst is None else whole(burst, "Rate.burst", 1)
        self.__dict__.update(limit=limit, per=duration(per, "Rate.per", zero=False), burst=burst)

    # What is stored of a bucket is the moment at which it will be full again: the "theoretical arrival time" of the generic cell
    # rate algorithm (ITU-T I.371).

    @property
    def _each(self) -> float:
        return self.per * 1e6 / self.limit  # microseconds in which one token comes

    def _ahead(self, full_at: float | None, now: int) -> float:
        """How long it takes until the bucket is full. A moment that a clock's step back has left behind is not believed."""
        ahead, longest = max((full_at or now) - now, 0.0), self.burst * self._each
        return min(ahead, longest) if ahead <= 2 * longest else 0.0

    def tokens(self, full_at: float | None, now: int) -> tuple[int, int]:
        """How many there are now, and when there is one again after these."""
        ahead = self._ahead(full_at, now)
        count = int((self.burst * self._each - ahead) / self._each + 1e-6)
        return count, now + max(1, math.ceil(ahead + (count + 1 - self.burst) * self._each))

    def spend(self, full_at: float | None, now: int, count: int) -> float:
        """When the bucket will be full again after so many have been taken. Rounded up: a moment holds quarters of microseconds,
        and what each start gained would add up."""
        since = now + self._ahead(full_at, now)
        later = since + count * self._each
        return later if later - since >= count * self._each else math.nextafter(later, math.inf)


class HasTransactions(Protocol):
    """SQLAlchemy's Session, Connection, AsyncSession and AsyncConnection, for type checkers that may not find it."""

    @property
    def begin_nested(self) -> Callable[..., Any]: ...


class Options(TypedDict, total=False):
    """The options of a job: on a task, on `task.options(...)`, or on `enqueue`; the nearest one wins, None is unset.

    durable: commit the job to the database before returning. Default False: best-effort, in memory. Arguments of a durable job
        arrive as the annotations of its handler say.
    queue: the bulkhead whose slots it uses. Default "default".
    priority: higher starts first within a queue. Default 0.
    delay, run_at: start in so many seconds / at an aware datetime. Default: now. Not both.
    expires: seconds from now, or an aware datetime; a job not started by then is cancelled, one that was may be retried later.
    key, on_conflict: one pending job per task and key. If there is one: "reuse" it (default, also a running one), "queue" one
        behind the running one, "replace" the pending one's arguments and time, or "raise" KeyConflict.
    retry: a Retry, a list of delays, or False.
    timeout: seconds a handler may run. Default 300; `math.inf` for no limit.
    result_ttl, failure_ttl: seconds that a result / a dead or cancelled job is kept. Defaults 0 and 7 days.
    on_lost: what becomes of a durable job whose worker died while it ran: "retry" (default), as long as attempts are left, or
        "dead" at once, without another start, for a handler that must not run twice on its own.
    headers: a mapping from str to str that goes with the job and is not for its handler, such as a trace's id: see
        `current_job().headers`. Stored with a durable job. At most 8,192 bytes of JSON.
    tx: your own open sqlite3 or aiosqlite connection to the same file, or SQLAlchemy's Session, Connection, AsyncSession or
        AsyncConnection on it: the job is written in its transaction, and exists if and only if you commit that. Durable by
        itself. For one call of `enqueue`, not for a task.
    """

    durable: bool | None
    queue: str | None
    priority: int | None
    delay: float | timedelta | None
    run_at: datetime | None
    expires: float | timedelta | datetime | None
    key: str | None
    on_conflict: OnConflict | None
    retry: RetryOption
    timeout: float | timedelta | None
    result_ttl: float | timedelta | None
    failure_ttl: float | timedelta | None
    on_lost: OnLost | None
    headers: Mapping[str, str] | None
    tx: sqlite3.Connection | aiosqlite.Connection | HasTransactions | None


class TaskOptions(Options, total=False):
    """What a task may say besides. Limits hold before a slot is taken: a job that has to wait costs the others nothing.

    max_running: how many of its jobs run at once in this process, best-effort and durable ones together.
    max_running_total: the same for the durable jobs of all processes on one database. It counts what runs by the claims in the
        database, so that nothing is left over of a process that is killed: its share is free when its leases have ended. (No
        process runs more than that of both kinds together.)
    rate: a Rate. Durable jobs of all processes share one; best-effort jobs have one in each process.
    limit_by: the name of a parameter: the limits hold for each of its values apart, such as one account's jobs.
    """

    max_running: int | None
    max_running_total: int | None
    rate: Rate | None
    limit_by: str | None


# ── 4. Vocabulary: counts ─────────────────────────────────────────────────────────────────────────────────────────────
# Counts: what `stats` answers. Plain values.


class Count(Value):
    """How many jobs of one queue and task are in one state; `due` of them could start now if there were room."""

    queue: str
    task: str
    state: State
    durable: bool
    count: int
    due: int = 0


class ScheduleStats(Value):
    """One schedule in this process: how often it fired, was skipped because the last run was not over, missed its time, or gave
    up the retries of a run (`superseded`) because the next fire time had come."""

    name: str
    fired: int
    skipped: int
    missed: int
    last: datetime | None
    next: datetime | None
    superseded: int = 0
    failed: int = 0
    paused: bool = False


class Stats(Value):
    """What `stats()` answers: live best-effort jobs of this process and all stored jobs of its namespace; the queues `paused`."""

    counts: tuple[Count, ...]
    unknown: tuple[str, ...]
    schedules: tuple[ScheduleStats, ...]
    paused: tuple[str, ...] = ()

    def count(self, *, queue: str | None = None, task: str | None = None, state: str | None = None) -> int:
        """The number of jobs that match what is given."""
        return sum(
            c.count for c in self.counts if queue in (None, c.queue) and task in (None, c.task) and state in (None, c.state)
        )


class Health(Value):
    """What `health()` answers: "ok", or "degraded" and the reasons, a phrase each."""

    status: Literal["ok", "degraded"]
    reasons: tuple[str, ...] = ()


# ── 5. Vocabulary: what travels inside ────────────────────────────────────────────────────────────────────────────────
# The row of a job, the room a claim may fill, what came of a run, and what is written about it. No behaviour beyond that.


Arguments = tuple[Sequence[Any], Mapping[str, Any]]  # of a call: positions, keywords


two_words: Final = struct.Struct(">QQ").pack
_drawn: list[int] = []  # random ends of the ids to come
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drawn.clear)  # or parent and child would give the same ids


def new_id(now: int) -> bytes:
    """A UUID version 7 (RFC 9562): milliseconds, then 12 bits that hold the microseconds, then 62 random bits. Sorts by time."""
    try:
        tail = _drawn.pop()
    except IndexError:
        tail, *others = [0x8000000000000000 | number >> 2 for number in memoryview(os.urandom(512)).cast("Q")]
        _drawn.extend(others)
    return two_words(now // 1000 << 16 | 0x7000 | now % 1000, tail)


class Lazily:
    """A field that is worked out when it is first asked for. (`cached_property` would give each row a dictionary.) `once`: it
    would come out differently in another thread."""

    lock = threading.Lock()

    def __init__(self, make: Callable[[Any], object], once: bool = False) -> None:
        self.make = make
        self.once = once

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, row: object, owner: type) -> object:
        value = self.make(row)
        if self.once:
            with self.lock:
                return vars(row).setdefault(self.name, value)
        setattr(row, self.name, value)
        return value


IS_DONE: Final = State.DONE  # (to reach a member through its class takes a while)
IS_PENDING: Final = State.PENDING
IS_RUNNING: Final = State.RUNNING


class JobRow:
    """One job. The fields down to `progress` are the columns of `tinyq_jobs`, in this order; the rest lives in this process.

    Moments are integer microseconds since the epoch, UTC. A row is owned by the store that holds it. (Not a dataclass, since
    most of its many fields keep their defaults most of the time.)
    """

    id: bytes
    task: str
    queue: str
    priority: int
    run_at: int
    created: int
    seq: int = 0
    namespace: str = "default"
    lane: int = 0  # see lane_of
    state: State = State.PENDING
    ready: int | None = None  # why a pending job is or is not claimable, see LATER and its neighbours
    payload: str | None = None
    payload_version: int = 1
    options: str | None = None  # JSON of what `enqueue` overrode for the run itself
    headers: str | None = None  # JSON, what goes with the job besides its arguments; see headers_of
    key: str | None = None
    expires: int | None = None
    schedule: str | None = None
    fire_time: int | None = None
    attempts: int = 0  # starts; counted by the claim
    claim_no: int = 0  # grows with every claim: the fence that every write of an outcome carries
    snoozes: int = 0
    interruptions: int = 0
    lost: int = 0
    parked: int | None = None
    worker: str | None = None
    lease: int | None = None
    started: int | None = None
    finished: int | None = None
    cancel_at: int | None = None
    reason: str | None = None
    error: str | None = None
    traceback: str | None = None
    result: str | None = None
    keep_until: int | None = None
    recurrence: str | None = None  # of a recurring job: see Recurrence
    tally: str | None = None  # and Tally
    limit_value: str | None = None  # JSON of the argument that its limits go by; '' for a task whose limits are for all
    singly: int | None = None  # 1: not in one call with others, since such a call has failed
    progress: str | None = None  # JSON of what the running or last attempt has said: [fraction, message]

    durable: bool = False
    args: Sequence[Any] | None = None  # None: to be decoded from the payload
    kwargs: Mapping[str, Any] = {}
    handler: Handler | None = None
    settings: Settings | None = None
    on_conflict: OnConflict = "reuse"
    rule: str | None = None  # of the schedule that made it, as text
    overlap: Overlap | Literal["wait"] = "skip"  # wait: not now and not recorded, to be tried again
    by_hand: bool = False  # an occurrence that is not recorded as one
    ran: Ran | None = None  # of a recurring job: what the claim that it runs under has chosen
    context: contextvars.Context | None = None
    value: Any = ...  # what the handler returned, if it ran here; Ellipsis if it did not
    exception: BaseException | None = None
    waiters: list[asyncio.Future[None]] | None = None
    ticket: int = 0  # which of its heap entries is the valid one
    overtakes: frozenset[str] = frozenset()  # tasks with jobs that wait for other things than slots, so that this one may pass

    # While it runs in this process:
    tier: Tier
    runner: asyncio.Task[None] | None = None
    in_handler: bool = False
    deadline: float = math.inf  # monotonic
    refused: Outcome | None = None  # why its handler cannot even be called
    why: Why | None = None  # why it was told to stop
    call: BatchCall | None = None  # that it is in, together with others
    note: str | None = None  # for the stored row, with the next renewal
    reporter: Reporter | None = None  # if it is durable and has told of its progress
    to_parent: Callable[[float, str | None], None] | None = None  # in a process of its own: hands on what it tells of that

    def __init__(self, id: bytes, task: str, queue: str, priority: int, run_at: int, created: int, **others: Any) -> None:
        self.task, self.queue, self.priority, self.run_at, self.created = task, queue, priority, run_at, created
        if id:  # else it gets one when it is asked for, which most best-effort jobs never are
            self.id = id
        if others:
            self.__dict__.update(others)

    if not TYPE_CHECKING:
        id = Lazily(lambda row: new_id(row.created), once=True)

    @property
    def tag(self) -> object:
        """What it is known by where it runs."""
        return self.id if self.durable else self

    def but(self, **changes: Any) -> JobRow:
        """Another row, with these changes."""
        told = ("id", "task", "queue", "priority", "run_at", "durable", "state", "attempts", "claim_no")
        return JobRow(**{**{name: getattr(self, name) for name in told}, **self.__dict__, **changes})

    def stop(self, why: Why) -> None:
        """Cancel the handler; the first reason stands, unless the right to write anything is gone."""
        if self.why is None or why in ("lost", "abandoned"):
            self.why = why
        if self.call is not None:
            self.call.stop_for(why)
        elif self.in_handler and self.runner is not None:
            self.runner.cancel()


class SimpleRow(JobRow):
    """A best-effort job without options of its own. What such jobs have in common stands in the class or is looked up when it is
    asked for: with thousands of them alive it is the garbage collector's visits to their fields that take the time."""

    state = State.RUNNING  # as most of them start at once
    attempts = 1
    claim_no = 1

    def __init__(
        self, handler: Handler, settings: Settings, args: Sequence[Any], created: int, context: contextvars.Context | None
    ) -> None:
        self.handler, self.settings, self.args, self.created, self.context = handler, settings, args, created, context

    if not TYPE_CHECKING:
        task = Lazily(lambda row: row.handler.name)
        queue = Lazily(lambda row: row.settings.queue)
        priority = Lazily(lambda row: row.settings.priority)
        run_at = Lazily(lambda row: row.created)

    def wait(self) -> None:
        """It does not start at once after all."""
        self.state, self.attempts, self.claim_no = State.PENDING, 0, 0


class ClaimedRow(JobRow):
    """A durable job as a claim has read it. What it has got by the time it has run is something else than what a new job gets."""

    durable = True
    state = State.RUNNING
    attempts = 1
    claim_no = 1


def shape(row: JobRow, *names: str) -> None:
    """Give the first instance of a class the fields that the later ones will have. They then share one table of names, of at most
    29; a name that comes up later would cost each instance a dictionary of its own."""
    for name in names:
        setattr(row, name, None)


shape(
    object.__new__(SimpleRow), "handler", "settings", "args", "created", "context", "seq", "tier", "deadline", "runner",
    "in_handler", "state", "finished", "value", "attempts", "claim_no", "id", "task", "queue", "priority", "run_at", "waiters",
    "started", "worker", "lease", "ready", "ticket",
)  # fmt: skip
shape(
    object.__new__(JobRow), "task", "queue", "priority", "run_at", "created", "id", "handler", "settings", "key", "on_conflict",
    "durable", "options", "lane", "payload", "worker", "lease", "started", "overtakes", "seq", "state", "claim_no", "attempts",
    "tier", "deadline", "runner", "args", "in_handler", "finished", "value",
)  # fmt: skip
shape(
    object.__new__(ClaimedRow), "seq", "id", "task", "queue", "priority", "run_at", "created", "payload", "state",
    "worker", "lease", "started", "attempts", "claim_no", "key", "recurrence", "fire_time", "handler", "settings", "tier",
    "deadline", "runner", "args", "kwargs", "in_handler", "ran", "value", "finished",
)  # fmt: skip

# `JobRow.ready` of a pending row. NULL for every other state, so that the partial indexes hold nothing else.
LATER: Final = 0  # its time has not come
CLAIMABLE: Final = 1
HELD: Final = 2  # behind a running job with the same key
PAUSED: Final = 4  # a recurring job, until it is resumed
FRAGILE: Final = 3  # claimable, but a worker died on it: one at a time, so that a poison job takes no neighbours along

FOREVER: Final = 253_402_300_799_000_000  # the last second of the year 9999, in microseconds: the latest moment there is


class Settings(Value):
    """All options of one job, resolved and checked."""

    durable: bool = False
    queue: str = "default"
    priority: int = 0
    delay: float = 0.0
    run_at: int | None = None
    expires: float | datetime | None = None
    key: str | None = None
    on_conflict: OnConflict = "reuse"
    retry: Retry = ONE_START
    timeout: float = 300.0
    result_ttl: float = 0.0
    failure_ttl: float = 7 * 86400.0
    on_lost: OnLost = "retry"
    headers: Mapping[str, str] | None = None
    gated: bool = False  # its task has Terms
    shared: bool = False  # and among them a limit in all processes

    def as_given(self) -> dict[str, Any]:
        """The fields that were given, without what has been worked out of them."""
        return {name: value for name, value in vars(self).items() if name not in ("plain", "simple")}

    @functools.cached_property
    def plain(self) -> bool:
        """To start as soon as its task lets it, and nothing that differs from job to job."""
        return not self.delay and self.run_at is None and self.expires is None and self.key is None

    @functools.cached_property
    def simple(self) -> bool:
        """The same, best-effort, and of a task without terms."""
        return self.plain and not (self.durable or self.gated)


DEFAULTS: Final = Settings()


class Terms(Record):
    """On what terms jobs of a task start, if there is more to it than a free slot: its limits, and how many go into one call."""

    names: Sequence[str]  # the task's, and those it had before
    running: float = math.inf  # calls at once in this process
    total: float = math.inf  # in all processes
    rate: Rate | None = None  # of items
    by: str | None = None  # the parameter for each value of which these hold
    size: int = 1  # items of one call
    window: int = 0  # microseconds that the first of them waits for more
    value_of: Callable[[str | None, int], str]  # of a stored payload

    @property
    def limited(self) -> bool:
        return self.running < math.inf or self.total < math.inf or self.rate is not None

    def fits(self, value: str | None) -> bool:
        """Whether a stored value is of the kind that these limits go by: before a change of them it may have been another."""
        return value is not None and (value == "") == (self.by is None)

    def ripe_at(self, moments: Iterable[int], count: int) -> int:
        """When items of a lane, `count` of them, wait no longer for others to go with. `moments`: when they came due."""
        return 0 if count >= self.size or self.window == 0 else min(moments) + self.window


class Handler(Record):
    """A callable that jobs call, and what is known of it. `fewest` and `most` bound a call by position alone."""

    name: str
    fn: Callable[..., Any]
    is_async: bool
    in_thread: bool
    registered: bool
    signature: inspect.Signature | None
    fewest: float
    most: float
    options: Mapping[str, Any]
    promote: Promote | None = None
    run_in: RunIn | None = None
    needs: Mapping[str, Dependency] = {}  # parameters that `signature` leaves out: they are filled in for each attempt
    whole: inspect.Signature | None = None  # with them
    direct: bool = False  # jobs may await `fn` as it is
    settings: Settings | None = None  # of a call without options of its own, once that has been asked
    plan: Plan | None = None  # the same, if it is durable; valid with those settings
    learned: object = None  # the engine run that knows of it
    aliases: Sequence[str] = ()  # names that jobs of it were stored under
    terms: Terms | None = None
    batch: bool = False  # `fn` takes a list of what `signature` says of one

    @functools.cached_property
    def task_name(self) -> str:
        return f"tinyq {self.name}"

    @functools.cached_property
    def codecs(self) -> Codecs | None:
        """What its annotations say of arguments, see section 8; None if those are JSON as they are."""
        return codecs_of(self)

    @functools.cached_property
    def result_codec(self) -> Codec:
        return result_codec(self)


# A due job that a claim may take: queue, task, whether it is fragile, its limit value, whether it is not to go into one call with
# others; and what it is.
Candidate = tuple[str, str, bool, str, bool, Any]
Left = tuple[float, float, int | None]  # calls and items that limits leave, and when there is an item again after these


class Room(NamedTuple):
    """What a claim may take: free slots, and the tasks known here (True: runs in a thread)."""

    shared: int
    named: Mapping[str, int]
    threads: int
    fragile: int
    tasks: Mapping[str, bool]
    paused: frozenset[str] = frozenset()
    serves: frozenset[str] | None = None  # no other queues than these
    terms: Mapping[str, Terms] = {}  # of those tasks that have any
    busy: Mapping[tuple[str, str], int] = {}  # calls that run here, by task and value, where there is a limit

    def wants(self, queue: str, task: str) -> bool:
        """Whether jobs of this queue and task are run here, if there is room."""
        return task in self.tasks and queue not in self.paused and (self.serves is None or queue in self.serves)

    def free(self, queue: str, task: str) -> int:
        """How many calls for jobs of this queue and task could start now."""
        if not self.wants(queue, task):
            return 0
        in_thread = self.tasks[task]
        slots = self.named.get(queue, self.shared)
        return min(slots, self.threads) if in_thread else slots

    @property
    def comes_due(self) -> int:
        """How many of the jobs whose time has come one claim looks at: as many as there may be room for, and some more."""
        return min(5_000, max(500, self.shared, *(terms.size for terms in self.terms.values()), 0))

    def without(self, paused: frozenset[str]) -> Room:
        """The same for all queues but these."""
        return self._replace(paused=paused) if paused else self

    def pick(self, ordered: Iterable[Candidate], limits: Limits, most: float = math.inf) -> list[Any]:
        """The things of those candidates, best first, that fit together into the room."""
        slots, threads, fragile_left = {**self.named, "": self.shared}, self.threads, self.fragile
        picked: list[Any] = []
        begun: dict[tuple[str, str, str, bool], int] = {}  # calls that have places left
        for queue_name, task_name, fragile, value, alone, thing in ordered:
            pool = queue_name if queue_name in self.named else ""
            in_thread = self.tasks[task_name]
            terms = self.terms.get(task_name)
            call = (queue_name, task_name, value, fragile)
            joins = not alone and begun.get(call, 0) > 0
            fits = slots[pool] > 0 and (threads > 0 or not in_thread) and (fragile_left > 0 or not fragile)
            if len(picked) >= most:
                break
            if not (joins or fits) or (terms is not None and not limits.take(terms, value, joins)):
                continue
            picked.append(thing)
            if joins:
                begun[call] -= 1
                continue
            slots[pool] -= 1
            threads -= in_thread
            fragile_left -= fragile
            if terms is not None and not alone:
                begun[call] = terms.size - 1
        return picked


class Limits:
    """What the limits of tasks leave, in the course of one claim. `left`: what a store knows of (terms, value). `by_start`: it
    tells the calls that run in all processes apart by when they were started, so that one claim may not begin two of them."""

    def __init__(self, room: Room, left: Callable[[Terms, str], Left], by_start: bool = False) -> None:
        self.refused = 0
        self.one_by_one = False  # more calls could start than one claim may begin
        self.gathering: set[str] = set()  # tasks with jobs that wait for others to go with
        self._room, self._left, self._by_start = room, left, by_start
        self._known: dict[tuple[str, str], list[float]] = {}
        self._again: dict[tuple[str, str], int | None] = {}  # when there is an item again, after these
        self._short: dict[tuple[str, str], list[float]] = {}  # of what has more slots than they leave it
        self._spent: dict[tuple[str, str], tuple[Rate, int]] = {}

    def of(self, terms: Terms, value: str) -> list[float]:
        """How many calls and items."""
        key = (terms.names[0], value)
        if (known := self._known.get(key)) is None:
            calls, items, again = self._left(terms, value) if terms.limited else (math.inf, math.inf, None)
            calls = min(calls, min(terms.running, terms.total) - self._room.busy.get(key, 0))
            if self._by_start and terms.size > 1 and calls > 1 and terms.total < math.inf:
                self.one_by_one, calls = True, 1
            self._known[key] = known = [calls, items]
            self._again[key] = again
        return known

    def most(self, terms: Terms, value: str, slots: int) -> int:
        """How many items might start, with so many slots."""
        calls, items = left = self.of(terms, value)
        most = int(min(min(calls, slots) * terms.size, items))
        if most < slots * terms.size:
            self.block(terms, value, left)
        return most

    def block(self, terms: Terms, value: str, left: list[float]) -> None:
        self._short.update(((name, value), left) for name in terms.names)

    @property
    def blocked(self) -> set[tuple[str, str]]:
        """Task and value of what they keep from starting: where they leave something, it is slots that are missing."""
        return {key for key, left in self._short.items() if min(left) < 1}

    @property
    def limited(self) -> frozenset[str]:
        """See Claimed."""
        return frozenset(self.gathering | {task for task, _ in self.blocked})

    @property
    def wait(self) -> int | None:
        """When a rate lets go of what waits for it."""
        waiting = (self._again.get(key) for key, (calls, items) in self._short.items() if calls >= 1 > items)
        return min((moment for moment in waiting if moment is not None), default=None)

    def take(self, terms: Terms, value: str, joins: bool) -> bool:
        """One item, and a call if it does not join one; False if there is none left."""
        left = self.of(terms, value)
        if left[1] < 1 or (left[0] < 1 and not joins):
            self.block(terms, value, left)
            self.refused += 1
            return False
        left[0] -= not joins
        left[1] -= 1
        if terms.rate is not None:
            key = (terms.names[0], value)
            self._spent[key] = terms.rate, self._spent.get(key, (terms.rate, 0))[1] + 1
        return True

    @property
    def spent(self) -> Iterable[tuple[str, str, Rate, int]]:
        """Tokens of rates: task, value, rate, how many."""
        return [(task, value, rate, count) for (task, value), (rate, count) in self._spent.items()]


class Plan(Record):
    """What follows from enqueuing the same thing with the same options again."""

    given: Mapping[str, Any]  # the options, as they were given
    kinds: Sequence[type]  # of their values, as True equals 1
    handler: Handler | None
    name: str
    settings: Settings
    options: str | None  # as they are stored
    lane: int
    limit_value: str | None

    def fits(self, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        if given != self.given or [*map(type, given.values())] != self.kinds:
            return False
        return self.handler is None or self.handler.fewest <= len(args) <= self.handler.most


OutcomeKind = Literal[
    "done",
    "failed",
    "timeout",
    "snooze",
    "cancelled",
    "split",
    "expired",
    "interrupted",
    "unstarted",
    "parked",
    "undecodable",
    "lost",
    "missed",
    "dropped",
]


class Outcome(NamedTuple):
    """What came of one claim, as a value."""

    kind: OutcomeKind
    value: Any = None
    error: BaseException | None = None
    delay: float | None = None
    reason: str | None = None


DONE: Final = Outcome("done")


class Settlement(NamedTuple):
    """What is to be written about one claimed row, if the claim numbered `claim_no` still holds."""

    seq: int
    claim_no: int
    state: State
    run_at: int
    attempts: int
    snoozes: int
    interruptions: int
    lost: int
    parked: int | None
    reason: str | None
    error: str | None
    traceback: str | None
    result: str | None
    keep_until: int | None
    keep: bool  # False: the finished row is deleted at once
    ran: Ran | None = None  # of a recurring job
    singly: int | None = None  # what JobRow.singly becomes, if it changes; 0: None
    frees: bool = False  # its task has a limit in all processes: others may wait for its end


class Ran(NamedTuple):
    """For which fire time a recurring job was started, when, and how many fire times were missed by then."""

    fire_time: int
    started: int
    missed: int = 0
    superseded: int = 0  # retries that were given up
    recurrence: str = ""  # by which that was chosen


class Inserted(NamedTuple):
    """What became of a row given to `insert`: created (or handed over and started), or the existing row that a key led to, or a
    fire time that is lost (to another process), skipped, paused, or stale (another definition of the schedule is newer)."""

    row: JobRow
    verdict: Literal["created", "started", "existing", "replaced", "lost", "overlap", "paused", "stale"]
    superseded: bool = False  # it took the place of an earlier run that was waiting for its retry


class ScheduleRecord(NamedTuple):
    """What a store knows of a schedule: the last fire time that was recorded (before the first one: the moment at which it was
    defined), and whether it is paused."""

    last: int
    paused: bool


class Claimed(NamedTuple):
    """Rows now leased to the caller, best first, the moment at which the next one comes due, if known, whether more might be due
    than there were slots for, the queues of which none was taken because they are paused, and the tasks of which jobs wait for
    something else than a slot: a limit, or others to go with."""

    rows: Sequence[JobRow]
    next_at: int | None
    more: bool = False
    paused: frozenset[str] = frozenset()
    limited: frozenset[str] = frozenset()


class Overdue(NamedTuple):
    """Due jobs that wait: their queue, task and limit value, since when the first does, and how many there are, up to 10,000."""

    queue: str
    task: str
    value: str
    since: int
    jobs: int


# ── 6. Time ───────────────────────────────────────────────────────────────────────────────────────────────────────────
# Moments, ids that sort by time, fire times. Pure but for the clock, which is an object that a test can replace.


class Clock(Protocol):
    """Where tinyq takes the time from. Pass your own as `TinyQ(clock=…)` to move time by hand in tests."""

    def time(self) -> int:
        """Microseconds since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever grow."""
        ...

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        """Return when `wake` is set or `seconds` (possibly infinite) have passed."""
        ...


LONGEST_SLEEP: Final = 60.0  # so that a step of the wall clock, or a suspended machine, is noticed
STEP: Final = 1.0  # seconds by which the wall clock must jump back to count as set


TIMERS_LATE: Final = 0.002  # seconds: a selector rounds up to whole milliseconds, and it takes a while to wake
SELDOM: Final = 0.05  # who waits for longer than that may turn the loop for the last of it, to be there in time


class Sharp(asyncio.Event):
    """Whoever waits for this with a timer wants to be there to the millisecond. `meet`: what he does from so many seconds before
    the time, on the loop's clock, that he is told of; else he turns the loop."""

    def __init__(self, meet: Callable[[float], Awaitable[object]] | None = None, early: float = TIMERS_LATE) -> None:
        super().__init__()
        self.meet, self.early = meet or self.turn_until, early

    async def turn_until(self, due: float) -> None:
        now = asyncio.get_running_loop().time
        while now() < due and not self.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)


class SystemClock:
    """The machine's clocks."""

    def time(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        if wake.is_set() or seconds <= 0:
            await asyncio.sleep(0)  # a loop that is never idle lets the others run all the same
            return
        due, sharp = asyncio.get_running_loop().time() + seconds, wake if seconds > SELDOM and isinstance(wake, Sharp) else None
        try:
            async with asyncio.timeout_at(None if seconds == math.inf else due - (sharp.early if sharp else 0.0)):
                await wake.wait()
        except TimeoutError:
            if sharp:
                await sharp.meet(due)


def later(moment: int, seconds: float) -> int:
    """The moment so many seconds after this one, no later than there are datetimes for."""
    return FOREVER if seconds > 2e11 else min(FOREVER, moment + round(seconds * 1e6))


def as_datetime(moment: int | None) -> datetime | None:
    return None if moment is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=moment)


def as_moment(value: object, name: str) -> int:
    """Microseconds of an aware datetime; TypeError for anything else, since a guessed zone runs jobs hours early or late."""
    if not isinstance(value, datetime):
        raise TypeError(f"{name} is {value!r}: give an aware datetime")
    if value.utcoffset() is None:
        raise TypeError(f"{name} is {value!r}, without a time zone: use datetime.now(UTC) + …, or .replace(tzinfo=…)")
    return min(FOREVER, (value - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1))


def id_text(raw: bytes) -> str:
    h = raw.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def id_bytes(text: str) -> bytes:
    """The id behind its text; b"", which no job has, for what is not an id."""
    with contextlib.suppress(ValueError, AttributeError):
        raw = bytes.fromhex(text.replace("-", ""))
        return raw if len(raw) == 16 else b""
    return b""


class Rule(Value):
    """When something happens again and again, an `Every` or a `Cron`. Its moments are microseconds since the epoch."""

    def next(self, after: datetime) -> datetime:
        """The first fire time later than `after`, an aware datetime; in UTC. It reads no clock.

        Raises TypeError for a datetime without a zone, OverflowError if there is none before the year 10,000.
        """
        found = self.next_at(as_moment(after, "after"))
        if found >= FOREVER:
            raise OverflowError(f"{self!r} does not fire between {after} and the year 10,000")
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=found)

    def next_at(self, after: int) -> int:
        """The first fire time later than `after`; FOREVER if there is none."""
        raise NotImplementedError

    def passed(self, after: int, now: int, most: int) -> tuple[int, list[int]]:
        """How many fire times are later than `after`, but not than `now`; and the newest of them, at most `most`, in order."""
        raise NotImplementedError

    def latest_at(self, now: int) -> int | None:
        """The last fire time that is not later; None if there is none."""
        raise NotImplementedError

    def as_text(self) -> str:
        """What `rule_from` makes an equal rule of; equal rules have the same text."""
        raise NotImplementedError

    def but(self, **changes: Any) -> Self:
        return type(self)(**{**self.as_dict(), **changes})  # checked as if it were written out


@functools.lru_cache(10_000)
def rule_from(text: str) -> Rule:
    """The rule behind its text; ValueError if this version knows none."""
    kind, _, rest = text.partition(" ")
    parts = rest.split(" ", 1)
    if kind == "every" and len(parts) == 2:
        return Every(*map(float, parts))
    if kind == "cron" and len(parts) == 2:
        return Cron(parts[1], parts[0])
    raise ValueError(f"{text!r} is not the text of a rule: it was written by another version of tinyq")


class Every(Rule):
    """Each multiple of `seconds` since the epoch, moved by `offset`: Every(60) is each full minute, Every(60, 15) is at :15.

    Both are seconds or a timedelta, kept in whole microseconds; the shortest period is 0.001 s, the longest 9·10^9 s. They count
    elapsed time: in a zone with daylight saving, Every(86400) fires an hour later by the wall clock in summer than in winter,
    and Every(604800) starts its weeks on a Thursday, as the epoch did. For times of day, take `Cron` with a zone.
    Raises TypeError or ValueError for what is not such a duration.
    """

    seconds: float
    offset: float

    def __init__(self, seconds: float | timedelta, offset: float | timedelta = 0.0) -> None:
        longest = 9e9  # to this length microseconds survive as a float of seconds
        given, moved = duration(seconds, "every", zero=False), duration(offset, "offset")
        if given > longest or moved > longest:
            name, value = ("every", seconds) if given > longest else ("offset", offset)
            raise ValueError(f"{name} is {value!r}: the longest is {longest:.0f} s, which is 285 years")
        period = round(given * 1e6)
        if period < 1_000:
            raise ValueError(f"every is {seconds!r}: the shortest period is 0.001 s")
        self.__dict__.update(seconds=period / 1e6, offset=round(moved * 1e6) % period / 1e6)

    @property
    def period(self) -> int:
        return round(self.seconds * 1e6)

    def next_at(self, after: int) -> int:
        period = self.period
        return min(FOREVER, after - (after - round(self.offset * 1e6)) % period + period)

    def passed(self, after: int, now: int, most: int) -> tuple[int, list[int]]:
        period, first = self.period, self.next_at(after)
        count = max(0, (now - first) // period + 1)
        return count, [first + i * period for i in range(max(0, count - most), count)]

    def latest_at(self, now: int) -> int | None:
        period = self.period
        return now - (now - round(self.offset * 1e6)) % period

    def as_text(self) -> str:
        return f"every {self.seconds!r} {self.offset!r}"


class Cron(Rule):
    """The minutes that a crontab's five fields name, read from the wall clock of a time zone.

        Cron("30 2 * * *", tz="Europe/Berlin")     each night at half past two, in Berlin
        Cron("*/15 9-17 * * mon-fri")              in UTC, which is the default; never the zone of the host

    expression: minute (0-59), hour (0-23), day (1-31), month (1-12 or jan-dec), weekday (0-7 or sun-sat, 0 and 7 are Sunday);
        each `*`, a number, a range `a-b`, a step through one of these (`*/15`, `8-18/2`), or a list of them with commas.
        Or @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually.
    tz: a key of the IANA time zone database, or a ZoneInfo that has one.

    If neither the day nor the weekday field begins with `*`, either is enough: `0 0 13 * 5` is each 13th and each Friday.
    `*/7` means the minutes that 7 divides (0, 7, … 56, and 0 again): for each seven minutes take Every(420).

    When clocks change, as in Debian's cron: fixed times that are skipped fire once, at the first instant after the gap, and of
    a repeated hour's two passes only the first counts. But if the minute or the hour field begins with `*`, the clock is
    followed as it reads: not in the gap, and in both passes.

    Needs the package cronsim (pip install 'tinyq-py[cron]'), else ImportError. Raises ValueError, which names the field and the
    reason, for other expressions, for dates that never occur (`0 0 30 2 *`), and for what is not such a zone; TypeError for
    what is not even text.
    """

    expression: str
    tz: str

    def __init__(self, expression: str, tz: str | ZoneInfo = "UTC") -> None:
        self.__dict__.update(expression=check_cron(expression), tz=check_zone(tz))
        timetable(self.expression, self.tz)

    def next_at(self, after: int) -> int:
        found = timetable(self.expression, self.tz).next(after // 1_000_000)
        return FOREVER if found is None else min(FOREVER, found * 1_000_000)

    def passed(self, after: int, now: int, most: int) -> tuple[int, list[int]]:
        table = timetable(self.expression, self.tz)
        first, last = after // 1_000_000, now // 1_000_000
        newest: list[int] = []
        moment = table.latest(last) if most > 0 else None
        while moment is not None and moment > first and len(newest) < most:
            newest.append(moment * 1_000_000)
            moment = table.latest(moment - 1)
        if len(newest) < most:
            return len(newest), newest[::-1]
        return table.count(first, last), newest[::-1]

    def latest_at(self, now: int) -> int | None:
        found = timetable(self.expression, self.tz).latest(now // 1_000_000)
        return None if found is None else found * 1_000_000

    def as_text(self) -> str:
        return f"cron {self.tz} {self.expression}"


MACROS: Final = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0", "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}  # fmt: skip
MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
CRON_FIELDS: Final[tuple[tuple[str, int, int, tuple[str, ...]], ...]] = (
    ("minute", 0, 59, ()), ("hour", 0, 23, ()), ("day", 1, 31, ()), ("month", 1, 12, MONTHS), ("weekday", 0, 7, WEEKDAYS),
)  # fmt: skip
MONTH_LENGTHS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def check_cron(expression: object) -> str:
    """The five fields in lower case; ValueError for what a vixie cron has no sense for, or would never run."""
    if not isinstance(expression, str):
        raise TypeError(f'cron is {expression!r}: give an expression such as "30 2 * * *"')
    text = expression.strip(" \t\r\n")
    macro = text.lower()
    if macro == "@reboot":
        raise ValueError("cron '@reboot' is not a time: enqueue the task in your lifespan, or give a schedule immediate=True")
    if macro.startswith("@") and macro not in MACROS:
        raise ValueError(f"cron {expression!r:.200} is not one of {', '.join(MACROS)}")
    fields = MACROS.get(macro, text).replace("\t", " ").split(" ")
    fields = [field for field in fields if field]
    if len(fields) != 5:
        hint = "; seconds and years are not among them: use every() for less than a minute" if len(fields) in (6, 7) else ""
        raise ValueError(
            f"cron {expression!r:.200} has {len(fields)} fields: it needs five, minute hour day month weekday, or a macro{hint}"
        )
    meant = []
    for i, (field, (name, low, high, names)) in enumerate(zip(fields, CRON_FIELDS, strict=True)):
        items = {}
        for item in field.split(","):
            try:
                values = cron_item(item.lower(), low, high, names)
            except ValueError as error:
                raise ValueError(f"cron {expression!r:.200}: {item!r:.50} in the {name} field {error}") from None
            items[item if len(values) > 1 or item[0] == "*" else str(*values)] = values  # cronsim would read 5-5/1 as 5-59
        fields[i] = ",".join(items).lower()
        meant.append(set[int]().union(*items.values()))
    days, months = meant[2:4]
    if "*" in (fields[2][0], fields[4][0]) and min(days) > max(MONTH_LENGTHS[month - 1] for month in months):
        raise ValueError(f"cron {expression!r:.200} never fires: no day of the day field {fields[2]!r} is in month {fields[3]!r}")
    return " ".join(fields)


def cron_item(item: str, low: int, high: int, names: tuple[str, ...]) -> set[int]:
    """The values of one item of a list; ValueError with the reason."""
    part, slash, step_text = item.partition("/")
    first_text, dash, last_text = part.partition("-")
    if part == "*":
        first, last = low, high
    else:
        first = cron_value(first_text, low, high, names)
        last = cron_value(last_text, low, high, names) if dash else first
    if first > last:
        hint = "" if slash else f": write {first}-{high}" if last == 0 and names else f": write {first}-{high},{low}-{last}"
        raise ValueError(f"runs backwards{hint}")
    if not slash:
        return set(range(first, last + 1))
    if not (step_text.isascii() and step_text.isdigit()) or int(step_text[:9]) == 0:
        raise ValueError("has a step that is not a number from 1 up")
    if not dash and part != "*":
        raise ValueError(f"has a step, which goes with * or a range: write {first}-{high}/{step_text}")
    if len(step_text) > 9 or int(step_text) > last - first + 1:
        raise ValueError(f"has a step beyond its range, so it means only {first}: write that, or use every() for an interval")
    return set(range(first, last + 1, int(step_text)))


def cron_value(text: str, low: int, high: int, names: tuple[str, ...]) -> int:
    if text in names:
        return low + names.index(text)
    if not text:
        raise ValueError("is incomplete: there is nothing where a value should be")
    if text.isascii() and text.isdigit():
        if len(text) > 4 or not low <= int(text) <= high:
            raise ValueError(f"is out of range: it must be {low}-{high}")
        return int(text)
    named = f", or one of {' '.join(names)}" if names else ""
    other = "; L, W, # and ? are not known to this cron" if set(text) & set("lw#?") else ""
    raise ValueError(f"is not a number from {low} to {high}{named}{other}")


def check_zone(tz: object) -> str:
    """The key of a zone. Not what the host is set to: schedules are not to move when that does."""
    from zoneinfo import ZoneInfo

    key = tz.key if isinstance(tz, ZoneInfo) else tz
    wanted = 'give "UTC" or a key of the IANA time zone database such as "Europe/Berlin"'
    if not isinstance(key, str):
        raise (ValueError if isinstance(tz, ZoneInfo) else TypeError)(f"tz is {tz!r}: {wanted}, or a ZoneInfo that has one")
    if key in ("localtime", "posixrules", "Factory") or key.startswith(("posix/", "right/")):
        raise ValueError(f"tz is {tz!r}, which is not the same on every host: {wanted}")
    try:
        zone_of(key)
    except (LookupError, ValueError, OSError):
        with contextlib.suppress(LookupError, OSError):
            ZoneInfo("Etc/UTC")
            raise ValueError(f"tz is {tz!r:.200}, which is not a time zone: {wanted}") from None
        raise ValueError(f"tz is {tz!r:.200}, and this machine has no time zone database: pip install tzdata") from None
    return key


def zone_of(key: str) -> tzinfo:
    if key == "UTC":
        return UTC  # needs no database
    from zoneinfo import ZoneInfo

    return ZoneInfo(key)


DAY: Final = 86_400
DATES: Final = (-62_135_596_800, FOREVER // 1_000_000)  # what datetime can hold, in seconds since the epoch


class Stretch(NamedTuple):
    """Seconds from `start` to before `end` in which a zone's clock runs evenly: it reads the time of UTC plus `offset`."""

    start: int
    end: int
    offset: int


ALWAYS: Final = Stretch(-(2**62), 2**62, 0)
PART: Final = 400 * DAY


@functools.lru_cache(maxsize=4096)
def stretches(zone: tzinfo, part: int) -> tuple[Stretch, ...]:
    """400 days of a zone, cut where its offset changes. They are found a day apart: no zone has ever had two in three days."""

    def offset(moment: int) -> int:
        inside = min(max(moment, DATES[0] + 2 * DAY), DATES[1] - 2 * DAY)
        moved = (datetime.fromtimestamp(0, UTC) + timedelta(seconds=inside)).astimezone(zone).utcoffset()
        return moved // timedelta(seconds=1) if moved else 0

    cuts = [(part * PART, offset(part * PART))]
    for day in range(part * PART, (part + 1) * PART, DAY):
        low, high = day, day + DAY
        after = offset(high)
        if after == cuts[-1][1]:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if offset(middle) == after else (middle, high)
        cuts.append((high, after))
    cuts.append(((part + 1) * PART, 0))
    found = [Stretch(start, end, moved) for (start, moved), (end, _) in itertools.pairwise(cuts)]
    return tuple(stretch for stretch in found if stretch.start < stretch.end)


def stretch_at(zone: tzinfo, moment: int) -> Stretch:
    if zone is UTC:
        return ALWAYS
    return next(stretch for stretch in reversed(stretches(zone, moment // PART)) if stretch.start <= moment)


def highest_reading(zone: tzinfo, moment: int) -> int:
    """The latest time that a zone's clock has shown up to a moment: higher than what it reads, after it was set back."""
    stretch = stretch_at(zone, moment)
    highest = moment + stretch.offset
    while stretch.start > moment - 2 * DAY:  # offsets are less than a day
        stretch = stretch_at(zone, stretch.start - 1)
        highest = max(highest, stretch.end - 1 + stretch.offset)
    return highest


def first_reached(zone: tzinfo, reading: int) -> int:
    """The first moment at which a zone's clock reads this time or, if it jumps over it, a later one."""
    stretch = stretch_at(zone, reading - DAY)
    while (moment := max(stretch.start, reading - stretch.offset)) >= stretch.end:
        stretch = stretch_at(zone, stretch.end)
    return moment


class Readings:
    """What a wall clock reads when an expression fires, in seconds since 1970 by that clock. It knows no zones.

    cronsim walks the calendar. Its own treatment of zones is not used: after a change of the clocks, a time that it answers may
    not be later than the one it was asked for, and with gaps at midnight or of half an hour it misses times or makes them up.
    """

    def __init__(self, expression: str) -> None:
        try:
            from cronsim import CronSim
        except ImportError as error:
            raise ImportError("tinyq.Cron needs cronsim: pip install 'tinyq-py[cron]', or pip install cronsim") from error
        self._forward = CronSim(expression, datetime(1970, 1, 1))
        self._backward = CronSim(expression, datetime(1970, 1, 1), reverse=True)
        self._times = sorted(hour * 3600 + minute * 60 for hour in self._forward.hours for minute in self._forward.minutes)

    def next(self, reading: int) -> int | None:
        """The first one later than this."""
        return self._step(self._forward, reading)

    def latest(self, reading: int) -> int | None:
        """The last one not later than this."""
        return self._step(self._backward, reading + 1)

    def _step(self, towards: CronSim, reading: int) -> int | None:
        import copy

        walker = copy.copy(towards)
        try:
            walker.dt = datetime(1970, 1, 1) + timedelta(seconds=min(max(reading, DATES[0]), DATES[1]))
            found = next(walker, None)
        except OverflowError:  # where the calendar ends
            return None
        return None if found is None else (found - datetime(1970, 1, 1)) // timedelta(seconds=1)

    def count(self, above: int, last: int) -> int:
        """How many are later than `above` and not later than `last`."""
        above, last = max(above, DATES[0]), min(last, DATES[1])
        if above >= last:
            return 0
        days = sum(map(self._fires_on, range(above // DAY, last // DAY)))
        return days * len(self._times) - self._by(above) + self._by(last)

    def _by(self, reading: int) -> int:
        from bisect import bisect_right

        day, second = divmod(reading, DAY)
        return bisect_right(self._times, second) if self._fires_on(day) else 0

    def _fires_on(self, day: int) -> bool:
        date = datetime.fromordinal(719_163 + day)
        return date.month in self._forward.months and self._forward.match_day(date)


class Timetable:
    """When an expression fires in a zone, in seconds since the epoch.

    A fixed time fires when the zone's clock first reads it or more: this gives it one run, in a gap and in a repeated hour too.
    """

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._readings = Readings(expression)
        self._zone = zone
        self._follows = any(field.startswith("*") for field in expression.split(" ")[:2])  # the clock, whatever it reads

    def next(self, after: int) -> int | None:
        if not self._follows:
            reading = self._readings.next(highest_reading(self._zone, after))
            return None if reading is None else first_reached(self._zone, reading)
        moment = after + 1
        while True:
            stretch = stretch_at(self._zone, moment)
            reading = self._readings.next(moment - 1 + stretch.offset)
            if reading is None:
                return None
            found = reading - stretch.offset
            if found < stretch.end:
                return found
            # Between these two readings there is none, so whatever the offsets, nothing fires well inside.
            moment = stretch.end if stretch.end < moment + 2 * DAY else max(stretch.end, found - 2 * DAY)

    def latest(self, moment: int) -> int | None:
        """The last fire time that is not later."""
        if not self._follows:
            reading = self._readings.latest(highest_reading(self._zone, moment))
            return None if reading is None else first_reached(self._zone, reading)
        while True:
            stretch = stretch_at(self._zone, moment)
            reading = self._readings.latest(moment + stretch.offset)
            if reading is None:
                return None
            found = reading - stretch.offset
            if found >= stretch.start:
                return found
            before = stretch.start - 1
            moment = before if before > moment - 2 * DAY else min(before, found + 2 * DAY)

    def count(self, after: int, last: int) -> int:
        """How many fire times are later than `after` and not later than `last`."""
        zone, readings, count = self._zone, self._readings, 0
        if not self._follows and after < last:
            count = readings.count(highest_reading(zone, after), highest_reading(zone, last))
        while after < last:
            stretch = stretch_at(zone, after + 1)
            end = min(last, stretch.end - 1)
            if self._follows:
                count += readings.count(after + stretch.offset, end + stretch.offset)
            elif after + 1 == stretch.start:  # all readings of a gap make one fire time
                count -= max(0, readings.count(highest_reading(zone, after), stretch.start + stretch.offset) - 1)
            after = end
        return count


@functools.lru_cache(maxsize=1024)
def timetable(expression: str, tz: str) -> Timetable:
    """Kept beside the rule, which is a value: rules that are equal share it."""
    return Timetable(expression, zone_of(tz))


# ── 7. Payload ────────────────────────────────────────────────────────────────────────────────────────────────────────
# Arguments and results as JSON, both ways. Strict: what would come back as another type (a tuple, a number as a key) or
# would not be JSON (NaN) is refused when it is handed in. There is no pickle in either direction.

PAYLOAD_VERSION: Final = 1


class Undecodable(ValueError):
    """A stored payload that this version cannot read."""


@functools.cache
def json_encoder() -> Callable[[object], str]:
    """Made when first used, since importing json takes a millisecond."""
    import json

    return json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode_json(value: object) -> str:
    return json_encoder()(value)


def refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON, though Python's module reads it")


@functools.cache
def json_decoder(strict: bool) -> json.JSONDecoder:
    import json

    return json.JSONDecoder(parse_constant=refuse_constant if strict else None)


def decode_json(text: str, strict: bool = False) -> Any:
    """Strict: without NaN and its like, which Python's module reads."""
    decoder = json_decoder(strict)
    try:
        value, end = decoder.raw_decode(text)
    except ValueError:
        return decoder.decode(text)  # white space before it, or the better message
    return value if end == len(text) else decoder.decode(text)


BOUND: Final[Mapping[str, frozenset[str]]] = {  # by the package that defines them: what is closed with its request
    "sqlalchemy": frozenset(
        ("AsyncSession", "Session", "AsyncConnection", "Connection", "scoped_session", "async_scoped_session")
    ),
    "starlette": frozenset(("HTTPConnection", "Response", "BackgroundTask", "BackgroundTasks", "UploadFile")),
    "sqlite3": frozenset(("Connection", "Cursor")),
    "aiosqlite": frozenset(("Connection", "Cursor")),
    "asyncpg": frozenset(("Connection", "PoolConnectionProxy")),
    "psycopg": frozenset(("Connection", "AsyncConnection")),
}
UNBOUND: Final[set[type]] = {str, int, float, bool, bytes, list, dict, tuple, set, type(None)}  # types seen to be harmless


def bound_to_request(kind: type) -> bool:
    """Whether such an object is closed with its request, told by the names of its classes: nothing is imported for it."""
    found = any(base.__name__ in BOUND.get(base.__module__.partition(".")[0], ()) for base in kind.__mro__)
    if not found:
        if len(UNBOUND) >= 1_000:  # of classes that are made as the program goes
            UNBOUND.clear()
        UNBOUND.add(kind)
    return found


BOUND_ADVICE: Final = "pass an id or the values that are needed, and open a session of its own inside the task"


def type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Misfit(ValueError):
    """A value for which there is no place. The message begins with its path; `way_out` is for whoever handed it in."""

    def __init__(self, message: str, way_out: str = "") -> None:
        super().__init__(message)
        self.way_out = way_out


def closed_with_request(value: object, path: str) -> Misfit | None:
    kind = type(value)
    if kind in UNBOUND or not bound_to_request(kind):
        return None
    return Misfit(f"{path} is of type {type_name(kind)}, which is closed with its request", BOUND_ADVICE)


SIMPLE: Final = frozenset((int, bool, type(None)))  # what JSON carries as it is, with nothing in it to look at


def lone(text: str) -> bool:
    """Whether it holds half a character (a surrogate without its other half), which UTF-8 does not take."""
    return not text.isascii() and text.encode("utf-8", "ignore") != text.encode("utf-8", "surrogatepass")


def foreign(value: object, path: str) -> Misfit | None:
    """Where and what in a value JSON cannot carry as it is; None if nothing."""
    kind = type(value)
    if kind in SIMPLE:
        return None
    if kind is str:
        return Misfit(f"{path} holds a lone surrogate, which is not text", "pass bytes") if lone(cast(str, value)) else None
    if kind is float:
        return (
            None if math.isfinite(cast(float, value)) else Misfit(f"{path} is {value!r}, which is not JSON", "pass None or a str")
        )
    parts: Iterable[tuple[str, object]]
    if kind is list:
        parts = ((f"{path}[{i}]", item) for i, item in enumerate(cast("list[object]", value)))
    elif kind is dict:
        strange = [key for key in cast("dict[object, object]", value) if type(key) is not str]
        if strange:
            return Misfit(f"{path} has the key {strange[0]!r} of type {type(strange[0]).__qualname__}; keys must be str")
        if any(map(lone, cast("dict[str, object]", value))):
            return Misfit(f"{path} has a key that holds a lone surrogate, which is not text")
        parts = ((f"{path}[{key!r}]", item) for key, item in cast("dict[str, object]", value).items())
    else:
        return closed_with_request(value, path) or Misfit(f"{path} is of type {type_name(kind)}")
    return next((found for inner, item in parts if (found := foreign(item, inner))), None)


def plainly(value: Any, path: str) -> Any:
    """What has no annotation to go by is JSON already."""
    if found := foreign(value, path):
        raise found
    return value


def argument_name(handler: Handler | None, position: int) -> str:
    """What the handler calls its argument at this position."""
    parameters = list(handler.signature.parameters.values()) if handler and handler.signature else []
    for i, parameter in enumerate(parameters[: position + 1]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - i}]"
    return parameters[position].name if position < len(parameters) else f"args[{position}]"


@functools.cache
def json_writers() -> Mapping[type, Callable[[Any], str]]:
    """How the values are written that most arguments are. Exact types only: a subclass may mean more than JSON can say."""
    import json

    return {
        int: int.__repr__,
        str: json.encoder.encode_basestring_ascii,
        bool: lambda value: "true" if value else "false",
        type(None): lambda value: "null",
    }


def encode_call(handler: Handler | None, name: str, call: Arguments, limit: int) -> str:
    """The JSON of a call. Raises PayloadError (naming task and path) or PayloadTooLarge."""
    args, kwargs = call
    codecs = handler.codecs if handler is not None else None
    if codecs is None and not kwargs:
        writers = json_writers()
        try:
            text = f"[[{','.join([writers[type(value)](value) for value in args])}],{{}}]"
        except (KeyError, ValueError):  # another type, or too long a number
            pass
        else:
            if "\\ud" not in text or not any(type(value) is str and lone(value) for value in args):
                return text if len(text) <= limit else within(limit, name, text)
    named = [(argument_name(handler, i), value) for i, value in enumerate(args)]
    texts = []
    for path, value in [*named, *kwargs.items()]:
        try:
            plain = plainly(value, path) if codecs is None else codecs.write(value, path)
            texts.append(encode_json(plain))
        except Misfit as error:
            raise PayloadError(clean(f"task {name!r}: {error}; {error.way_out or way_out(handler)}")) from None
        except (RecursionError, ValueError):
            why = f"{path} is nested too deep, or in a circle, or holds too long a number"
            raise PayloadError(f"task {name!r}: {why}; {way_out(handler)}") from None
    keywords = (f"{encode_json(key)}:{value}" for key, value in zip(kwargs, texts[len(args) :], strict=True))
    return within(limit, name, f"[[{','.join(texts[: len(args)])}],{{{','.join(keywords)}}}]")


def way_out(handler: Handler | None) -> str:
    if handler is None:
        return (
            "JSON cannot carry that, and no handler is here to say how it is meant: import the task, or pass str(value), which "
            "the annotations of the worker's handler convert"
        )
    return (
        "JSON cannot carry that to a durable job: annotate the parameter with a type that tinyq converts, or "
        "pass an id, a str, or a plain list or dict instead"
    )


def digest(text: str) -> int:
    """64 bits of a hash that is the same everywhere."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def within(limit: int, name: str, text: str) -> str:
    if len(text) > limit:
        raise PayloadTooLarge(
            f"task {name!r}: the arguments take {len(text):,} bytes of JSON and max_payload is {limit:,}: "
            "store the data and pass its id, or raise max_payload"
        )
    return text


def decode_call(payload: str | None, version: int) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in a stored payload; Undecodable if it is not one."""
    if version != PAYLOAD_VERSION:
        raise Undecodable(f"undecodable: payload version {version}, and this tinyq reads {PAYLOAD_VERSION}")
    try:
        args, kwargs = decode_json(payload or "", strict=True)
    except (ValueError, TypeError, RecursionError) as error:
        raise Undecodable(f"undecodable: the payload is not the JSON of a call ({type(error).__name__})") from None
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise Undecodable("undecodable: the payload is JSON, but not [arguments, keywords]")
    return args, kwargs


def clean(text: str) -> str:
    """Without what UTF-8, and so a database, does not take: lone surrogates, as in the name of a strange file."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """`Type: message` on one line, at most 500 characters."""
    try:
        message = clean(" ".join(str(error).split()))
    except BaseException:  # even SystemExit, which would end the loop
        message = "(its message cannot be shown)"
    text = f"{type(error).__qualname__}: {message}" if message else type(error).__qualname__
    return text if len(text) <= 500 else text[:499] + "…"


def traceback_text(error: BaseException) -> str:
    """The traceback, its last 4,000 characters."""
    try:
        return clean("".join(traceback.format_exception(error))[-4000:])
    except BaseException:
        return "(it cannot be shown)"


# ── 8. Payload: what annotations say ──────────────────────────────────────────────────────────────────────────────────
# Arguments that JSON has no word for, carried as their annotations say. A codec writes a value as plain JSON and reads it
# back. Whatever is handed in is read back at once, and refused unless the same comes of it: no codec needs to see to that.


def unfit(path: str, value: object, says: str) -> Misfit:
    return closed_with_request(value, path) or Misfit(
        f"{path} is of type {type_name(type(value))}, and the annotation says {says}, which is how it would arrive",
        "pass what the annotation says, or change the annotation",
    )


def unreadable(path: str, value: object, says: str) -> Misfit:
    return Misfit(f"{path} (of type {type(value).__qualname__}) does not read as {says}")


def any_bound(args: Iterable[Any]) -> list[Any]:
    """Those that are closed with their request; for most calls there is nothing but a look at the types."""
    return [] if UNBOUND.issuperset(map(type, args)) else [value for value in args if bound_to_request(type(value))]


class Codec(NamedTuple):
    """What is done with the values of one annotation: two functions of (value, path), which raise Misfit. They get values of
    these exact types only: `kinds` to write, `stored` to read; None: of any."""

    says: str = "anything"
    to_json: Callable[[Any, str], Any] = plainly
    of_json: Callable[[Any, str], Any] = lambda value, path: value
    kinds: Iterable[type] | None = None
    stored: Iterable[type] | None = None

    @property
    def plain(self) -> bool:
        """What it lets through is JSON already."""
        return self.to_json is plainly and self.kinds is None

    def write(self, value: Any, path: str) -> Any:
        if self.kinds is not None and type(value) not in self.kinds:
            raise unfit(path, value, self.says)
        return self.to_json(value, path)

    def read(self, value: Any, path: str) -> Any:
        if self.stored is not None and type(value) not in self.stored:
            raise unreadable(path, value, self.says)
        return self.of_json(value, path)


ANYTHING: Final = Codec()


def write(codec: Codec, value: Any, path: str) -> Any:
    """One value as plain JSON, once it is certain that the same will arrive."""
    written = codec.write(value, path)
    if not codec.plain:
        refuse_change(value, read_back(codec, written, path), path)
    return written


def read_back(codec: Codec, written: Any, path: str) -> Any:
    """Its inverse. Classes of the application are called here, and may raise anything."""
    try:
        return codec.read(written, path)
    except (Misfit, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Misfit(f"{path} does not fit {codec.says}: {error_text(error)}") from None


def parts(value: Any, path: str) -> list[tuple[Any, str, Any]]:
    """What a value holds: name, path and part of each."""
    kind = type(value)
    if issubclass(kind, dict):
        return [(name, f"{path}[{name!r}]", part) for name, part in value.items()]
    for fields in ("_fields", "__dataclass_fields__", "model_fields"):
        if names := getattr(kind, fields, ()):
            return [(name, f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    if issubclass(kind, (set, frozenset)):
        ordered = sorted(value, key=lambda part: (hash(part), repr(part)))  # alike for sets that are equal
        return [(None, f"{path}{{…}}", part) for part in ordered]
    return [(i, f"{path}[{i}]", part) for i, part in enumerate(value)] if issubclass(kind, (list, tuple)) else []


def refuse_change(value: Any, back: Any, path: str) -> None:
    """Misfit unless what came back is the same value, of the same type all the way down."""
    if type(back) is not type(value):
        raise Misfit(
            f"{path} is ambiguous: of type {type_name(type(value))}, it would arrive as {type_name(type(back))}",
            "annotate it with one type, or with types that JSON can tell apart",
        )
    model = hasattr(type(value), "__pydantic_validator__")  # which converts what it is given, but not its defaults
    if model and back == value:
        return
    inside, again = parts(value, path), parts(back, path)
    for (_, where, part), (_, _, other) in zip(inside, again, strict=False):
        refuse_change(part, other, where)
    if model or len(inside) != len(again) or (not inside and back != value):
        raise Misfit(
            f"{path} does not come back from JSON as it was",
            "pass plain values, or annotate it with a type that JSON can hold (secrets and private attributes are not written)",
        )


def scalar(kinds: Sequence[type], stored: Iterable[type], to_json: Callable[[Any], Any], of_json: Callable[[Any], Any]) -> Codec:
    """What is one text or number in JSON."""
    says = kinds[0].__qualname__

    def read(value: Any, path: str) -> Any:
        try:
            return of_json(value)
        except Exception:  # an Enum may have a word of its own for it
            raise unreadable(path, value, says) from None

    return Codec(says, lambda value, path: plainly(to_json(value), path), read, kinds, stored)


def write_moment(value: Any) -> Any:
    lost = value.tzinfo is not None and value.utcoffset() is None  # a zone that tells no offset without a date
    return value if lost else value.isoformat()


def write_seconds(value: timedelta) -> Any:
    if abs(value.days) > 50_000:  # a float would not hold all of it
        return [value.days, value.seconds, value.microseconds]
    seconds = value.total_seconds()
    return int(seconds) if seconds.is_integer() else seconds


def read_seconds(value: Any) -> timedelta:
    return timedelta(*value) if type(value) is list else timedelta(seconds=float(value))


PLAIN: Final[Mapping[type, Sequence[type]]] = {  # what JSON carries as it is; only in a union it has to be told from the rest
    str: (str,), int: (int, bool), bool: (bool,), float: (float, int), type(None): (type(None),),
}  # fmt: skip


@functools.cache
def scalars() -> Mapping[type, Codec]:
    import base64
    import datetime as dt
    import decimal
    import pathlib
    import uuid

    text = [str]
    return {
        **{kind: Codec(kind.__name__, kinds=kinds, stored=kinds) for kind, kinds in PLAIN.items()},
        dt.datetime: scalar([dt.datetime], text, write_moment, dt.datetime.fromisoformat),
        dt.date: scalar([dt.date], text, dt.date.isoformat, dt.date.fromisoformat),
        dt.time: scalar([dt.time], text, write_moment, dt.time.fromisoformat),
        timedelta: scalar([timedelta], [int, float, str, list], write_seconds, read_seconds),
        uuid.UUID: scalar([uuid.UUID], text, str, uuid.UUID),
        decimal.Decimal: scalar([decimal.Decimal], [str, int], lambda n: str(n) if n.is_finite() else math.nan, decimal.Decimal),
        bytes: scalar([bytes], text, lambda b: base64.b64encode(b).decode(), lambda s: base64.b64decode(s, validate=True)),
        **{kind: scalar([type(kind("."))], text, str, kind) for kind in (pathlib.Path, pathlib.PurePath)},
    }


def enumeration(kind: Any) -> Codec:
    """By value; by name if JSON would change one of the values."""
    if all(type(member.value) in PLAIN for member in kind):
        return scalar([kind], {type(member.value) for member in kind}, lambda member: member.value, kind)
    return scalar([kind], [str], lambda member: member.name, kind.__getitem__)


def optional(inner: Codec) -> Codec:
    if inner.plain:
        return inner
    return Codec(
        f"{inner.says} | None",
        lambda value, path: None if value is None else inner.write(value, path),
        lambda value, path: None if value is None else inner.read(value, path),
    )


def pydantic_codec(hint: Any, kind: Any) -> Codec:
    """Through pydantic's own TypeAdapter: dumped in JSON mode, and validated from JSON on arrival."""
    pydantic = sys.modules["pydantic"]
    adapter, says = pydantic.TypeAdapter(hint), getattr(hint, "__qualname__", str(hint))
    by_name = "by_name" in inspect.signature(adapter.validate_json).parameters  # since 2.11
    names: dict[str, Any] = {"by_alias": True, "by_name": True} if by_name else {}

    def write(value: Any, path: str) -> Any:
        try:
            written = adapter.dump_python(value, mode="json", round_trip=True, by_alias=not by_name, warnings=False)
        except Exception as error:
            why = Misfit(f"{path} cannot be written: {error_text(error)}", "change its class")
            raise closed_with_request(value, path) or why from None
        return plainly(written, path)

    def read(value: Any, path: str) -> Any:
        try:
            return adapter.validate_json(encode_json(value), **names)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            raise Misfit(f"{path}{where} does not fit {says}: {first['msg']}") from None

    return Codec(says, write, read, [kind] if "__pydantic_validator__" in vars(kind) else None)


def evaluated(annotation: Any, names: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """What an annotation stands for, names in quotes included. If that cannot be known: a Codec, for plain values only."""
    import types

    def write(value: Any, path: str) -> Any:
        if found := foreign(value, path):
            way_out = found.way_out or "import what it names where the program runs, not only under TYPE_CHECKING"
            raise Misfit(f"{found}, and its annotation {annotation!r} cannot be resolved at run time", way_out)
        return value

    try:
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        return get_type_hints(holder, dict(names), dict(own), include_extras=True)["it"]
    except Exception:  # a name that only type checkers know, say
        return Codec(str(annotation), write)


def class_hints(kind: Any) -> dict[str, Any]:
    """The annotations of a class, each by itself: one that cannot be resolved spoils no other."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = vars(sys.modules.get(base.__module__, sys))
        for name, annotation in inspect.get_annotations(base).items():
            found[name] = evaluated(annotation, names, {base.__name__: base, kind.__name__: kind})
    return found


def core_of(call: Any) -> Any:
    """What is behind any number of partials."""
    while isinstance(call, functools.partial):
        call = call.func
    return call


def body_of(call: Any) -> Any:
    """The function that runs when this is called; the class, if that is one."""
    core = core_of(call)
    return core if inspect.isroutine(core) or isinstance(core, type) else type(core).__call__


def names_for(call: Any) -> Mapping[str, Any]:
    """What the annotations of a callable may name: the globals of the function behind it."""
    core = inspect.unwrap(core_of(call))
    if not inspect.isroutine(core):
        core = inspect.unwrap(core.__init__ if isinstance(core, type) else type(core).__call__)  # type: ignore[misc]
    return getattr(core, "__globals__", {})


def handler_hints(handler: Handler) -> dict[str, Any]:
    """What the annotations of its parameters, and of "return", stand for."""
    if handler.signature is None:
        return {}
    hints = {name: parameter.annotation for name, parameter in handler.signature.parameters.items()}
    hints["return"] = handler.signature.return_annotation
    names = names_for(handler.fn)
    return {name: Any if hint is inspect.Parameter.empty else evaluated(hint, names, {}) for name, hint in hints.items()}


def origin_name(hint: Any) -> str:
    origin = get_origin(hint)
    return str(getattr(origin, "_name", None) or getattr(origin, "__name__", ""))


def filled(hint: Any, names: Mapping[Any, Any]) -> Any:
    """An annotation in a generic class, with what its type variables stand for."""
    if isinstance(hint, TypeVar):
        return names.get(hint, hint)
    inside = getattr(hint, "__parameters__", ()) if names and get_origin(hint) else ()
    return hint[tuple(names.get(each, each) for each in inside)] if inside else hint


REQUIRED: Final = inspect.Parameter.empty  # what stands for the default of a field that has none
LATE: Final = object()  # of one that the constructor does not take


def field_defaults(kind: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Of the fields of a dataclass, a NamedTuple or a TypedDict."""
    import dataclasses

    if hasattr(kind, "__required_keys__"):  # where annotations are postponed, that set knows nothing of these words
        words = {"Required": True, "NotRequired": False}
        needed = {name: words.get(origin_name(hint), name in kind.__required_keys__) for name, hint in hints.items()}
        return {name: REQUIRED if needed[name] else ... for name in hints}
    takes = inspect.signature(kind).parameters
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    return {name: takes[name].default if name in takes else LATE for name in names}


CONTAINERS: Final[Mapping[Any, type]] = {  # what arrives where any of several would do
    **dict.fromkeys((list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable), list),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), set),
    **dict.fromkeys((dict, abc.Mapping, abc.MutableMapping), dict),
    frozenset: frozenset,
    tuple: tuple,
}


class Annotations:
    """Makes the codecs of annotations. `strict`: told from the other members of a union, by exact types; else what is plain
    JSON is carried as it is. `known` holds what was made before or is being made, since a class may refer to itself."""

    def __init__(self) -> None:
        self.known: dict[Any, Codec] = {}

    def of(self, hint: Any, strict: bool = False) -> Codec:
        if isinstance(hint, Codec):  # it is known by now that it cannot be known
            return hint
        known, key = self.known, (hint, strict)
        try:
            if (found := known.get(key)) is not None:
                return found
        except TypeError:  # what is noted beside a type need not be hashable
            return self._make(hint, strict)
        known[key] = Codec(
            "…", lambda value, path: known[key].write(value, path), lambda value, path: known[key].read(value, path)
        )
        known[key] = self._make(hint, strict)
        return known[key]

    def _make(self, hint: Any, strict: bool) -> Codec:
        origin, args, word = get_origin(hint), get_args(hint), origin_name(hint)
        if word in ("Annotated", "Required", "NotRequired", "ReadOnly", "Final", "ClassVar"):
            return self.of(args[0], strict)
        if hasattr(hint, "__supertype__"):  # NewType
            return self.of(hint.__supertype__, strict)
        if isinstance(hint, TypeVar):
            return self.of(hint.__bound__ or Any, strict)
        kind: Any = type(None) if hint is None else origin or hint
        if type(kind).__name__ == "TypeAliasType":
            return self.of(filled(kind.__value__, dict(zip(kind.__type_params__, args, strict=False))), strict)
        if word in ("Union", "UnionType"):
            return self._union(args, strict)
        if kind is Literal:
            return self._literal(args, strict)
        if kind in (Any, object) or not isinstance(kind, type):  # or Callable[...], or whatever else there is
            return ANYTHING
        container = CONTAINERS.get(kind)
        if container is dict:
            return self._dict(args or (Any, Any), strict)
        return self._collection(container, hint, args, strict) if container else self._class(hint, kind, strict)

    def _union(self, args: Sequence[Any], strict: bool) -> Codec:
        """The first member that can write a value writes it. It is read by the first that would write the same again, else by
        the first that can read it at all: text that only resembles a UUID stays text."""
        rest = [arg for arg in args if arg not in (None, type(None))]
        rest.sort(key=lambda arg: self.of(arg).plain)  # text takes what others leave
        members = [self.of(arg, strict or len(rest) > 1) for arg in rest]
        says = " | ".join(member.says for member in members)

        def write(value: Any, path: str) -> Any:
            inside: list[Misfit] = []
            for member in members:
                try:
                    return member.write(value, path)
                except Misfit as error:
                    inside += [] if str(error).startswith(f"{path} is of type ") else [error]
            raise inside[0] if inside else unfit(path, value, says)

        def read(value: Any, path: str) -> Any:
            found = []
            for member in members:
                with contextlib.suppress(Misfit):
                    found.append(member.read(value, path))
                    if encode_json(member.write(found[-1], path)) == encode_json(value):
                        return found[-1]
            if not found:
                raise unreadable(path, value, says)
            return found[0]

        if not strict and self.of(rest[0]).plain:
            return Codec(says)
        made = Codec(says, write, read) if len(rest) > 1 else members[0]
        return made if len(rest) == len(args) else optional(made)

    def _literal(self, args: Sequence[Any], strict: bool) -> Codec:
        inner, says = self.of(Union[tuple(map(type, args))], strict), f"Literal[{', '.join(map(repr, args))}]"  # noqa: UP007
        if inner.plain:
            return Codec(says)

        def write(value: Any, path: str) -> Any:
            if (type(value), value) not in [(type(arg), arg) for arg in args]:
                raise unfit(path, value, says)
            return inner.write(value, path)

        def read(value: Any, path: str) -> Any:
            if (found := inner.read(value, path)) not in args:
                raise unreadable(path, value, says)
            return found

        return Codec(says, write, read, None, inner.stored)

    def _dict(self, args: Sequence[Any], strict: bool) -> Codec:
        """Keys that are not text are written as their text, and must come back from it."""
        key, item = self.of(args[0], True), self.of(args[1], strict)
        if args[0] in (str, Any) and item.plain and not strict:
            return Codec("dict")
        number = key.stored is not None and str not in key.stored

        def write_key(value: Any, path: str) -> str:
            plain = key.write(value, f"a key of {path}")
            text = str(plain) if type(plain) is int else plain
            if type(text) is not str or type(back := read_key(text, path)) is not type(value) or back != value:
                raise Misfit(f"{path} has the key {value!r} of type {type(value).__qualname__}; as text it would be another key")
            return text

        def read_key(text: str, path: str) -> Any:
            is_number = number and text.removeprefix("-").isdecimal()
            return key.read(int(text) if is_number else text, f"a key of {path}")

        def write(value: Any, path: str) -> Any:
            return {write_key(name, path): item.write(part, where) for name, where, part in parts(value, path)}

        def read(value: Any, path: str) -> Any:
            return {read_key(text, path): item.read(part, where) for text, where, part in parts(value, path)}

        return Codec(f"dict[{key.says}, {item.says}]", write, read, [dict], [dict])

    def _collection(self, kind: type, hint: Any, args: Sequence[Any], strict: bool) -> Codec:
        """list, set, frozenset or tuple of one type; a fixed tuple has one for each place."""
        fixed = kind is tuple and hint is not tuple and args[1:] != (...,)
        items = [self.of(arg, strict) for arg in args if arg is not ...] if args or fixed else [ANYTHING]
        if kind is list and items[0].plain and not strict:
            return Codec("list")
        says = f"{kind.__name__}[{', '.join(item.says for item in items)}]"

        def inside(value: Any, path: str, refusal: Callable[[str, object, str], Misfit]) -> Iterable[tuple[Codec, Any, str]]:
            if fixed and len(value) != len(items):
                raise refusal(path, value, says)
            return [(items[i if fixed else 0], part, where) for i, (_, where, part) in enumerate(parts(value, path))]

        def write(value: Any, path: str) -> Any:
            written = [item.write(part, where) for item, part, where in inside(value, path, unfit)]
            return written if kind in (list, tuple) else sorted(written, key=encode_json)  # the same set, the same payload

        def read(value: Any, path: str) -> Any:
            return kind([item.read(part, where) for item, part, where in inside(value, path, unreadable)])

        return Codec(says, write, read, [kind], [list])

    def _class(self, hint: Any, kind: Any, strict: bool) -> Codec:
        import enum

        if kind in PLAIN and not strict:
            return Codec(kind.__name__)
        if kind in scalars():
            return scalars()[kind]
        own = vars(kind)
        if "pydantic" in sys.modules and (hasattr(kind, "__get_pydantic_core_schema__") or "__pydantic_validator__" in own):
            return pydantic_codec(hint, kind)
        if issubclass(kind, enum.Enum):
            return enumeration(kind)
        if "__dataclass_fields__" in own or hasattr(kind, "_fields" if issubclass(kind, tuple) else "__required_keys__"):
            return self._record(hint, kind, strict)
        return Codec(kind.__name__, kinds=[kind], stored=[]) if strict else Codec(kind.__name__)  # nothing but plain JSON

    def _record(self, hint: Any, kind: Any, strict: bool) -> Codec:
        """A dataclass, a NamedTuple or a TypedDict."""
        hints, says, typed_dict = class_hints(kind), kind.__qualname__, issubclass(kind, dict)
        defaults = field_defaults(kind, hints)
        variables = dict(zip(getattr(kind, "__parameters__", ()), get_args(hint), strict=False))
        fields = {name: self.of(filled(hints.get(name, Any), variables), strict) for name in defaults}
        fields |= {name: optional(fields[name]) for name, default in defaults.items() if default is None}

        def inside(held: Mapping[str, Any], path: str) -> Iterable[tuple[str, Codec, Any, str]]:
            if missing := [name for name in defaults if defaults[name] is REQUIRED and name not in held]:
                raise Misfit(f"{path} has no {missing[0]!r}, which {says} needs", "give it")
            if typed_dict:
                plainly(dict.fromkeys(held), path)  # it may hold more than its annotations name, but no other keys than text
            elif unknown := [name for name in held if name not in fields]:
                raise Misfit(f"{path} has {unknown[0]!r}, which {says} does not know")
            where = "{}[{!r}]" if typed_dict else "{}.{}"
            return [(name, fields.get(name, ANYTHING), part, where.format(path, name)) for name, part in held.items()]

        def write(value: Any, path: str) -> Any:
            held = value if typed_dict else {name: getattr(value, name) for name in fields if hasattr(value, name)}
            return {name: codec.write(part, where) for name, codec, part, where in inside(held, path)}

        def read(value: Any, path: str) -> Any:
            found = {name: codec.read(part, where) for name, codec, part, where in inside(value, path)}
            after = [(name, found.pop(name)) for name in defaults if defaults[name] is LATE and name in found]
            try:
                made = kind(**found)
                for name, part in after:
                    object.__setattr__(made, name, part)
            except Exception as error:
                raise Misfit(f"{path} is refused by {says}: {error_text(error)}") from None
            return made

        return Codec(says, write, read, [dict if typed_dict else kind], [dict])


class Codecs(Record):
    """What the annotations of a handler's parameters say."""

    names: Mapping[str, Codec]
    more: Codec  # of **kwargs

    def of(self, path: str) -> Codec:
        """`path`: the name of a keyword, or what `argument_name` says."""
        return self.names.get(path.partition("[")[0], self.more)

    def write(self, value: Any, path: str) -> Any:
        return write(self.of(path), value, path)


def codecs_of(handler: Handler) -> Codecs | None:
    """None: all that the handler takes is JSON as it is."""
    make, hints, more = Annotations(), handler_hints(handler), ANYTHING
    names: dict[str, Codec] = {}
    for name, parameter in handler.signature.parameters.items() if handler.signature else ():
        codec = make.of(hints[name])
        names[name] = optional(codec) if parameter.default is None else codec
        if parameter.kind is parameter.VAR_KEYWORD:
            more = names[name]
    return None if all(codec.plain for codec in names.values()) else Codecs(names=names, more=more)


def result_codec(handler: Handler) -> Codec:
    return optional(Annotations().of(handler_hints(handler).get("return", Any)))


def read_call(handler: Handler | None, call: Arguments) -> Arguments:
    """Stored arguments as the handler's annotations say. Raises Misfit."""
    codecs = handler.codecs if handler is not None else None
    if codecs is None:
        return call
    named = [(argument_name(handler, i), value) for i, value in enumerate(call[0])]
    args = [read_back(codecs.of(path), value, path) for path, value in named]
    return args, {name: read_back(codecs.of(name), value, name) for name, value in call[1].items()}


# ── 9. Options of a job ───────────────────────────────────────────────────────────────────────────────────────────────
# What a user may say about a job, checked at the call, with the way out in the message; and how it is stored with the row.


def did_you_mean(name: str, known: Iterable[str]) -> str:
    import difflib  # only ever needed for a message

    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def hint(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, known) or f"; known are {', '.join(sorted(known)) or 'none'}"


def whole(value: object, name: str, least: int, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: give a whole number")
    if not least <= value <= most:
        raise ValueError(
            f"{name} is {value!r}: it must be at least {least:,}" + ("" if value < least else f" and at most {most:,}")
        )
    return value


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: give a str")
    if not value or len(value) > 255 or clean(value) != value:
        raise ValueError(f"{name} is {value!r}: give 1 to 255 characters of text")
    return value


def flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give True or False")
    return value


def choice(value: object, name: str, *allowed: object) -> Any:
    if not any(value is item or (isinstance(item, str) and value == item) for item in allowed):
        raise ValueError(f"{name} is {value!r}: give one of {', '.join(map(repr, allowed))}")
    return value


DRIVERS: Final = (("sqlite3", "Connection"), ("aiosqlite", "Connection"))
SQLALCHEMY: Final = (("sqlalchemy.orm", "Session"), ("sqlalchemy.engine", "Connection"))
ASYNC_SQLALCHEMY: Final = (("sqlalchemy.ext.asyncio", "AsyncSession"), ("sqlalchemy.ext.asyncio", "AsyncConnection"))
SCOPED: Final = (("sqlalchemy.orm", "scoped_session"), ("sqlalchemy.ext.asyncio", "async_scoped_session"))


def is_a(value: object, *classes: tuple[str, str]) -> bool:
    """Whether it is of one of these classes; whoever has such an object has imported its module."""
    return any(isinstance(value, getattr(sys.modules.get(module), name, ())) for module, name in classes)


def connection(value: object) -> Any:
    found = cast(Any, value)() if is_a(value, *SCOPED) else value
    if is_a(found, *DRIVERS, *SQLALCHEMY, *ASYNC_SQLALCHEMY):
        return found
    raise TypeError(
        f"tx is {value!r}: give a sqlite3.Connection, an aiosqlite.Connection, or SQLAlchemy's Session, Connection, "
        "AsyncSession or AsyncConnection"
    )


HEADERS: Final = 8_192  # bytes of JSON that the headers of a job may take: they travel with each claim


def as_headers(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"headers is {value!r}: give a mapping from str to str")
    for key, item in value.items():
        if not isinstance(key, str) or not isinstance(item, str):
            raise TypeError(f"headers has {key!r}: {item!r}: give a str for a str")
    headers = dict(value)
    if (size := len(encode_json(headers))) > HEADERS:
        raise ValueError(f"headers take {size:,} bytes of JSON, and {HEADERS:,} is the most: store the data and pass its id")
    return headers


def expiry(value: object) -> float | datetime:
    if isinstance(value, datetime):
        as_moment(value, "expires")
        return value
    return duration(value, "expires")


CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "durable": lambda value: flag(value, "durable"),
    "queue": lambda value: text(value, "queue"),
    "priority": lambda value: whole(value, "priority", -(2**31)),
    "delay": lambda value: duration(value, "delay"),
    "run_at": lambda value: as_moment(value, "run_at"),
    "expires": expiry,
    "key": lambda value: text(value, "key"),
    "on_conflict": lambda value: choice(value, "on_conflict", "reuse", "queue", "replace", "raise"),
    "retry": as_retry,
    "timeout": lambda value: duration(value, "timeout", zero=False, infinite=True),
    "result_ttl": lambda value: duration(value, "result_ttl", infinite=True),
    "failure_ttl": lambda value: duration(value, "failure_ttl", infinite=True),
    "on_lost": lambda value: choice(value, "on_lost", "retry", "dead"),
    "headers": as_headers,
    "tx": connection,
}


LIMITS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "max_running": lambda value: whole(value, "max_running", 1),
    "max_running_total": lambda value: whole(value, "max_running_total", 1),
    "rate": lambda value: as_rate(value),
    "limit_by": lambda value: text(value, "limit_by"),
}


def as_rate(value: object) -> Rate:
    if not isinstance(value, Rate):
        raise TypeError(f"rate is {value!r}: give a tinyq.Rate, such as Rate(100, per=60)")
    return value


def take_limits(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The limits among the options of a task, checked, which are taken out."""
    given = {name: value for name in LIMITS if (value := options.pop(name, None)) is not None}
    try:
        limits = {name: LIMITS[name](value) for name, value in given.items()}
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    if limits.keys() == {"limit_by"}:
        raise ValueError(f"{where}: limit_by is {limits['limit_by']!r} and there is no limit: give max_running, say, as well")
    return limits


def check_options(options: Mapping[str, Any], where: str, *others: str) -> dict[str, Any]:
    """Job options, checked and in plain units; None is left out. TypeError or ValueError names `where` and the option.
    `others`: keywords that the caller takes besides, and that may have been meant."""
    checked = {}
    for name, value in options.items():
        if name not in CHECKS:
            if name in LIMITS:
                raise TypeError(f"{where}: {name} belongs to the task, since it is for all its jobs: @task({name}=…)")
            raise TypeError(f"{where}: unknown option {name!r}{hint(name, (*CHECKS, *others))}")
        if value is not None:
            try:
                checked[name] = CHECKS[name](value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{where}: {error}") from None
    if "delay" in checked and "run_at" in checked:
        raise ValueError(f"{where}: delay and run_at both say when to start: give one of them")
    return imply_durable(checked, where) if "tx" in checked else checked


def imply_durable(checked: dict[str, Any], where: str) -> dict[str, Any]:
    if not checked.setdefault("durable", True):
        raise ValueError(f"{where}: durable is False and tx writes the job to the database: leave one of them out")
    return checked


def refuse_tx(options: Mapping[str, Any], where: str) -> None:
    if "tx" in options:
        raise TypeError(f"{where}: tx belongs to one call: write task.options(tx=…).enqueue(…) or enqueue(task, …, tx=…)")


STORED_OPTIONS: Final = ("timeout", "result_ttl", "failure_ttl", "on_lost")  # and `retry`, which is encoded in its parts


def encode_overrides(name: str, overrides: Mapping[str, Any]) -> str | None:
    """What `enqueue` said about the run itself, to be stored with the row; None if it said nothing."""
    kept: dict[str, Any] = {key: overrides[key] for key in STORED_OPTIONS if key in overrides}
    retry = overrides.get("retry")
    if retry is not None:
        if retry.retry_on != (BaseException,) or retry.give_up_on != ():
            raise TypeError(f"task {name!r}: retry_on and give_up_on cannot be stored with a durable job: put them on the task")
        values = (retry.max_attempts, retry.base, retry.factor, retry.cap, retry.jitter, list(retry.delays))
        kept["retry"] = [infinity_out(value) for value in values]
    return encode_json({key: infinity_out(value) for key, value in kept.items()}) if kept else None


def infinity_out(value: object) -> object:
    """JSON has no infinity: it is stored as a word."""
    return "inf" if value == math.inf else value


def infinity_in(value: Any) -> Any:
    return math.inf if value == "inf" else value


def decode_overrides(text: str | None) -> dict[str, Any]:
    """Its inverse; Undecodable if another version, or a hand, wrote something else."""
    try:
        kept: dict[str, Any] = decode_json(text) if text else {}
        kept = {name: infinity_in(value) for name, value in kept.items()}
        if "retry" in kept:
            starts, base, factor, cap, jitter, delays = map(infinity_in, kept["retry"])
            kept["retry"] = Retry(starts, base, factor, cap, jitter, delays=delays)
        return check_options(kept, "stored options")
    except (TypeError, ValueError, RecursionError) as error:
        raise Undecodable(f"undecodable: the options are not what this tinyq stores ({type(error).__name__})") from None


# ── 10. Options of a TinyQ ────────────────────────────────────────────────────────────────────────────────────────────
# The outermost level: what an instance is given, and what the environment may say.


class Configuration(TypedDict, total=False):
    """The options of a TinyQ, beside `db`: the path of the SQLite file, None (default) for best-effort jobs only. It may be the
    application's own database.

    concurrency: jobs that run at once in this process, in all queues that `queues` does not name. Default 20.
    queues: own numbers of slots for some queues, such as {"emails": 50}; 0 means not served here.
    threads: plain functions that run at once. Default min(concurrency, 32).
    max_pending: best-effort jobs that may wait in memory. Default 10,000.
    max_payload: bytes of JSON that a durable job's arguments may take. Default 1,048,576.
    grace: seconds that running jobs are given at shutdown. Default 10.
    lease: seconds for which a worker owns a job before it must renew; a crash is noticed after that. Default 30, at least 0.3.
    synchronous: "full" (default): an acknowledged durable job survives a power cut. "normal": it survives a crash of the
        process, but a power cut may take the last ones along.
    auto_migrate: False: the tables are not made or brought forward here, but by whoever may do that, with what
        `python -m tinyq schema FILE` prints; until then `start` raises StoreError. Default True.
    promote: at shutdown, store best-effort jobs that were not started, if there is a database. Default True; "interrupted" also
        stores those that had to be cancelled.
    worker: False to claim no durable jobs and fire no shared schedules in this process. Default: what TINYQ_WORKER says (0 or
        1), else True.
    namespace: services that share a file but not their jobs have different ones. Default "default".
    worker_name: how this process is called in rows and logs; made unique anyway. Default: the host's name.
    behind_after: seconds that due jobs may wait before a WARNING says so, once until they have caught up, with the reason and
        what would help. Default 10; `math.inf` for never.
    on_dead: called with the Job of each job that has died here, or with a worker whose lease ended; see `TinyQ.on_dead`.
    clock: see Clock.
    timeout, retry, result_ttl, failure_ttl: the outermost level of the options of the same names.
    """

    concurrency: int
    queues: Mapping[str, int] | None
    threads: int | None
    max_pending: int
    max_payload: int
    grace: float | timedelta
    lease: float | timedelta
    synchronous: Literal["full", "normal"]
    auto_migrate: bool
    promote: Promote
    worker: bool
    namespace: str
    worker_name: str | None
    behind_after: float | timedelta
    on_dead: DeadHook | None
    clock: Clock | None
    timeout: float | timedelta
    retry: RetryOption
    result_ttl: float | timedelta
    failure_ttl: float | timedelta


class Config(Value):
    """A Configuration, complete and checked."""

    db: str | None
    concurrency: int
    queues: Mapping[str, int]
    threads: int
    max_pending: int
    max_payload: int
    grace: float
    lease: float
    synchronous: str
    auto_migrate: bool
    promote: Promote
    worker: bool
    namespace: str
    worker_name: str | None
    behind_after: float
    on_dead: DeadHook | None
    clock: Clock
    defaults: Mapping[str, Any]  # of job options
    serves: frozenset[str] | None = None  # the queues whose durable jobs are claimed here; None: all


def configure_from(given: Mapping[str, Any]) -> Config:
    """Raises TypeError, ValueError or ConfigurationError; opens nothing."""
    known = {"db", *Configuration.__annotations__}
    for name in given:
        if name not in known:
            raise TypeError(f"TinyQ: unknown option {name!r}{hint(name, known)}")
    if not isinstance(given.get("queues") or {}, Mapping):
        raise TypeError(f"queues is {given['queues']!r}: give a mapping from names to numbers of slots")
    if given.get("clock") is not None and not hasattr(given["clock"], "wait"):
        raise TypeError(f"clock is {given['clock']!r}: give an object with time(), monotonic() and wait(), see Clock")
    if given.get("on_dead") is not None and not callable(given["on_dead"]):
        raise TypeError(f"on_dead is {given['on_dead']!r}: give a function of the dead Job, async or plain")
    queues = {text(name, "a queue's name"): whole(n, f"queues[{name!r}]", 0) for name, n in (given.get("queues") or {}).items()}
    concurrency = whole(given.get("concurrency", 20), "concurrency", 1)
    threads, worker_name = given.get("threads"), given.get("worker_name")
    lease = duration(given.get("lease", 30.0), "lease", zero=False)
    if not 0.3 <= lease <= 86400:
        raise ValueError(
            f"lease is {lease!r}: it must be at least 0.3 s, since it is renewed every quarter of it, and at most a day"
        )
    return Config(
        db=database_path(given.get("db")),
        concurrency=concurrency,
        queues=queues,
        threads=min(concurrency, 32) if threads is None else whole(threads, "threads", 1),
        max_pending=whole(given.get("max_pending", 10_000), "max_pending", 1),
        max_payload=whole(given.get("max_payload", 1_048_576), "max_payload", 1),
        grace=duration(given.get("grace", 10.0), "grace", infinite=True),
        lease=lease,
        synchronous=choice(given.get("synchronous", "full"), "synchronous", "full", "normal"),
        auto_migrate=flag(given.get("auto_migrate", True), "auto_migrate"),
        promote=choice(given.get("promote", True), "promote", True, False, "interrupted"),
        worker=flag(given.get("worker", True), "worker"),
        namespace=text(given.get("namespace", "default"), "namespace"),
        worker_name=None if worker_name is None else text(worker_name, "worker_name"),
        behind_after=duration(given.get("behind_after", 10.0), "behind_after", zero=False, infinite=True),
        on_dead=given.get("on_dead"),
        clock=given.get("clock") or SystemClock(),
        defaults=check_options({name: given.get(name) for name in ("timeout", "retry", "result_ttl", "failure_ttl")}, "TinyQ"),
    )


def database_path(db: object) -> str | None:
    if db is None:
        return None
    try:
        path = os.fspath(cast(Any, db))
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise TypeError(f"db is {db!r}: give the path of an SQLite file")
    if not path or ":memory:" in path or "mode=memory" in path:
        raise ConfigurationError(
            f"db is {path!r}, which no other connection can see: leave db out for jobs in memory, or give a path"
        )
    if "://" in path or path.startswith("file:"):
        raise ConfigurationError(f"db is {path!r}: give the plain path of an SQLite file, not a URL")
    return path


def role_from_environment() -> dict[str, Any]:
    """TINYQ_WORKER (0 or 1), for every TinyQ: it is the process that is a worker or not."""
    worker = os.environ.get("TINYQ_WORKER")
    if not worker:
        return {}
    if worker.lower() not in ("0", "1", "false", "true", "no", "yes"):
        raise ConfigurationError(f"TINYQ_WORKER is {worker!r}: set it to 0 or 1")
    return {"worker": worker.lower() in ("1", "true", "yes")}


def from_environment() -> dict[str, Any]:
    """That, TINYQ_DB, and TINYQ_GRACE (seconds), for the default instance."""
    found = role_from_environment()
    if path := os.environ.get("TINYQ_DB"):
        found["db"] = path
    if grace := os.environ.get("TINYQ_GRACE"):
        try:
            found["grace"] = duration(float(grace), "TINYQ_GRACE", infinite=True)
        except ValueError:
            raise ConfigurationError(f"TINYQ_GRACE is {grace!r}: set it to a number of seconds") from None
    return found


class Command(Value):
    """What the worker command says of every TinyQ that starts in its process, whatever code and environment say."""

    grace: float
    queues: Mapping[str, int | None]  # those served, with slots of their own; empty: all

    def applied_to(self, config: Config) -> Config:
        # A queue that the code leaves to other processes with 0 slots has its share here, now that it was asked for.
        slots = {name: n for name, n in config.queues.items() if n > 0 or name not in self.queues}
        slots |= {name: n for name, n in self.queues.items() if n is not None}
        serves = frozenset(self.queues) if self.queues else None
        return config.but(worker=True, grace=self.grace, queues=slots, serves=serves)


_commands: Final[list[Command]] = []  # one, in a process that was started as a worker


# ── 11. Handlers, and the options of a call ───────────────────────────────────────────────────────────────────────────
# What is known of a callable, and which options hold for a call of it.


def resolve(config: Config, handler: Handler | None, overrides: Mapping[str, Any]) -> Settings:
    """All options of one call: the nearest level wins."""
    merged: dict[str, Any] = {"retry": FIVE_STARTS, **config.defaults}
    if handler is not None and not handler.registered:
        merged["retry"] = ONE_START
    for level in (handler.options if handler else {}, overrides):
        if "delay" in level:
            merged.pop("run_at", None)
        if "run_at" in level:
            merged.pop("delay", None)
        merged |= level
    if handler is not None and handler.terms is not None:
        merged |= {"gated": True, "shared": handler.terms.total < math.inf}
    return Settings(**merged)


# FastAPI's `Depends` is recognised at registration, and left out of what callers give. FastAPI is not imported: who writes
# `Depends` has done that.
REQUEST_BOUND: Final = {"Request", "WebSocket", "HTTPConnection", "Response", "BackgroundTasks", "SecurityScopes"}


class Dependency(NamedTuple):
    """One `Depends`: what is called, and what its own parameters depend on."""

    call: Callable[..., Any]
    use_cache: bool
    needs: Mapping[str, Dependency]


def hint_of(parameter: inspect.Parameter, call: Any) -> Any:
    """Its annotation; as it is written, if that names what cannot be found."""
    hint = evaluated(parameter.annotation, names_for(call), {})
    hint = parameter.annotation if isinstance(hint, Codec) else hint
    with contextlib.suppress(Exception):
        return getattr(hint, "__value__", hint)  # of a `type` statement
    return hint


def is_of_request(kind: Any, default: object) -> bool:
    """Whether only a request has this: such a parameter, or a default such as FastAPI's Query()."""
    kinds = [base for base in getattr(kind, "__mro__", ()) if base.__module__.partition(".")[0] in ("starlette", "fastapi")]
    return type(default).__module__ == "fastapi.params" or any(base.__name__ in REQUEST_BOUND for base in kinds)


def needs_of(call: Any, signature: inspect.Signature, where: str, strict: bool, given: bool = False) -> dict[str, Dependency]:
    """What the parameters with a `Depends` depend on. TypeError for those that only a request could fill in, if that is looked
    at (`strict`), and those that nothing fills in, unless callers do (`given`)."""
    marker_type = getattr(sys.modules.get("fastapi.params"), "Depends", ())
    needs = {}
    for name, parameter in signature.parameters.items():
        hint = hint_of(parameter, call)
        marks, kind = getattr(hint, "__metadata__", ()), getattr(hint, "__origin__", hint)
        kind = kind if marks else hint
        marker = next((mark for mark in (parameter.default, *marks) if isinstance(mark, marker_type)), None)
        if marker is not None:
            needs[name] = dependency_of(marker.dependency or kind, marker.use_cache, f"{where}{name}")
        elif strict and is_of_request(kind, parameter.default):
            raise TypeError(
                f"{where}{name} ({getattr(kind, '__name__', kind)}) belongs to a request, which is over when the job runs: "
                "take what is needed out of it in the route, and pass that"
            )
        elif not given and parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        ):  # fmt: skip
            raise TypeError(f"{where}{name} has no default and no Depends, and no request fills it in for a job: give it one")
    return needs


def dependency_of(call: Any, use_cache: bool, where: str) -> Dependency:
    if not callable(call):
        raise TypeError(f"{where} depends on {call!r}, which is not callable: write Depends(f)")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    return Dependency(call, use_cache, needs_of(call, signature, f"{where}: ", strict=True))


def without_dependencies(
    name: str, fn: Any, signature: inspect.Signature | None, registered: bool
) -> tuple[inspect.Signature | None, Mapping[str, Dependency]]:
    """What callers give, and what is filled in for them."""
    if signature is None or "starlette" not in sys.modules:
        return signature, {}
    needs = needs_of(fn, signature, f"task {name!r}: ", strict=registered, given=True)
    others = [parameter for parameter in signature.parameters.values() if parameter.name not in needs]
    return (signature.replace(parameters=others) if needs else signature), needs


def make_handler(
    fn: Callable[..., Any], name: str | None = None, options: Mapping[str, Any] | None = None, promote: Promote | None = None
) -> Handler:
    """What jobs need to know of a callable. With options (possibly empty) it is a registered task, without a bare one."""
    if inspect.iscoroutine(fn):
        fn.close()
        raise TypeError(
            f"{fn!r} is not callable but the coroutine of a call: write enqueue(f, 1), not enqueue(f(1)); spawn() takes it"
        )
    if not callable(fn):
        raise TypeError(f"{fn!r} is not callable: a task is a function, a method, a partial or another callable")
    core, call = core_of(fn), body_of(fn)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise TypeError(f"{fn!r} is a generator function, whose body a call does not run: use def or async def without yield")
    if name is None:
        owner = core if hasattr(core, "__qualname__") else type(core)
        name = f"{getattr(owner, '__module__', None) or 'builtins'}.{owner.__qualname__}"
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        signature = None  # some callables written in C do not tell
    whole, (signature, needs) = signature, without_dependencies(name, fn, signature, options is not None)
    fewest, most = positional_bounds(signature)
    return Handler(
        name=text(name, "a task's name"),
        fn=fn,
        is_async=inspect.iscoroutinefunction(call),
        in_thread=not inspect.iscoroutinefunction(call),
        needs=needs,
        whole=whole,
        direct=inspect.iscoroutinefunction(call) and not needs,
        registered=options is not None,
        signature=signature,
        fewest=fewest,
        most=most,
        options=options or {},
        promote=promote,
    )


UNIONS: Final = ("Union", "UnionType")


def item_hint(hint: Any) -> Any:
    """Of a list's annotation, or that of a list or None, the type of its items; None if it is no list's."""
    while origin_name(hint) == "Annotated":
        hint = get_args(hint)[0]
    members = [member for member in get_args(hint) if member is not type(None)] if origin_name(hint) in UNIONS else [hint]
    kinds = [get_origin(member) or member for member in members]
    if len(members) != 1 or (kinds[0] is not Any and CONTAINERS.get(kinds[0]) not in (list, tuple)):
        return None
    return next(iter(get_args(members[0])), Any)


def make_batch(handler: Handler) -> None:
    """Let the function take a list of what callers give one of."""
    hints, signature = handler_hints(handler), cast(inspect.Signature, handler.signature)
    given = list(signature.parameters.values()) if handler.signature is not None else []
    hint = item_hint(hints[given[0].name]) if len(given) == 1 and given[0].kind in (0, 1) else None
    if hint is None:
        raise TypeError(
            f"task {handler.name!r}: a batch handler takes one list, def {handler.name.rpartition('.')[2]}(items: list[T]), and "
            f"this takes {signature if handler.signature is not None else 'what it does not tell'}"
        )
    result = item_hint(hints["return"])
    handler.signature = signature.replace(
        parameters=[given[0].replace(annotation=hint, default=inspect.Parameter.empty)],  # each job has its item
        return_annotation=inspect.Signature.empty if result is None else result,
    )
    handler.batch, handler.fewest, handler.most = True, 1, 1


def set_terms(handler: Handler, terms: Mapping[str, Any]) -> None:
    """Give a task its limits, and its size and window if it is a batch handler. TypeError for limits that go by what callers do
    not give it."""
    by, known = terms.get("limit_by"), list(handler.signature.parameters) if handler.signature else []
    if handler.batch and by is not None and by not in known:
        known += fields_of(handler_hints(handler)[known[0]], by)
    parameter = handler.signature.parameters.get(by) if handler.signature and by is not None else None
    open_ended = parameter is not None and parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if by is not None and (by not in known or open_ended):
        raise TypeError(f"task {handler.name!r}: limit_by is {by!r}, which is no parameter of it{hint(by, known)}")
    handler.terms = Terms(
        names=(handler.name, *handler.aliases),
        running=terms.get("max_running", math.inf),
        total=terms.get("max_running_total", math.inf),
        rate=terms.get("rate"),
        by=by,
        size=terms.get("size", 1),
        window=terms.get("window", 0),
        value_of=functools.partial(stored_limit_value, handler),
    )


def fields_of(kind: Any, name: str) -> Iterable[str]:
    """The fields of an item; of one that may have any, this one."""
    kind = get_origin(kind) or kind
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", None)
    if fields is None and hasattr(kind, "__required_keys__"):
        fields = kind.__annotations__
    return fields or ([name] if kind is Any or CONTAINERS.get(kind) is dict else ())


VALUE_LENGTH: Final = 200  # characters; of a longer value its hash is stored


def limit_value(handler: Handler, call: Arguments, *, written: bool = False) -> str:
    """The JSON of the argument that the limits of a task go by, '' if they go by none. `written`: as it is stored, already.
    Raises PayloadError if JSON cannot carry it."""
    by, signature = cast(Terms, handler.terms).by, handler.signature
    if by is None or signature is None:
        return ""
    args, kwargs = call
    names = list(signature.parameters)
    name = by if by in names else names[0]  # or it is a field of the item
    value, place = signature.parameters[name].default, names.index(name)
    if name in kwargs:
        value = kwargs[name]
    elif place < len(args) and signature.parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
        value = args[place]
    else:
        written = False
    try:
        if not written:
            value = plainly(value, name) if handler.codecs is None else handler.codecs.write(value, name)
        if name != by and (not isinstance(value, dict) or by not in value):
            raise Misfit(f"{name} has no {by!r}")
        found = encode_json(value if name == by else value[by])
    except (Misfit, RecursionError, ValueError, TypeError) as error:
        raise PayloadError(clean(f"task {handler.name!r}: its limits go by {by} (limit_by), and {error}")) from None
    return found if len(found) <= VALUE_LENGTH else f"#{digest(found):x}"


def stored_limit_value(handler: Handler, payload: str | None, version: int) -> str:
    try:
        return limit_value(handler, decode_call(payload, version), written=True)
    except (Undecodable, PayloadError):  # its claim will say so
        return "null" if cast(Terms, handler.terms).by else ""


def misfit_hint(handler: Handler, kwargs: Mapping[str, Any]) -> str:
    """What was probably meant by a keyword that the handler does not take."""
    known = handler.signature.parameters if handler.signature else {}
    for word in kwargs:
        if word not in known and word in CHECKS:
            return f"; {word} is an option: write task.options({word}=…).enqueue(…) or tinyq.enqueue(task, …, {word}=…)"
        if word not in known and word in LIMITS:
            return f"; {word} belongs to the task, since it is for all its jobs: @task({word}=…)"
        if word not in known:
            return did_you_mean(word, (*known, *CHECKS))
    return ""


def positional_bounds(signature: inspect.Signature | None) -> tuple[float, float]:
    """How few and how many arguments may be given by position alone; (inf, 0) if a keyword is always needed."""
    if signature is None:
        return 0, math.inf
    fewest, most = 0.0, 0.0
    for parameter in signature.parameters.values():
        required = parameter.default is parameter.empty
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            fewest, most = fewest + required, most + 1
        elif parameter.kind is parameter.VAR_POSITIONAL:
            most = math.inf
        elif parameter.kind is parameter.KEYWORD_ONLY and required:
            return math.inf, 0
    return fewest, most


# ── 12. Store contract ────────────────────────────────────────────────────────────────────────────────────────────────
# Where jobs live. A store knows rows, leases and claim numbers; it reads no clock, computes no backoff, looks up no task.
# Each verb takes a list, is one transaction, and says which rows it changed. Raises StoreError, StoreBusy.


class Store(Protocol):
    """The verbs, in life order; every store has exactly these."""

    async def open(self) -> None:
        """Make the store usable; idempotent for the data, called once for the object."""
        ...

    async def insert(self, rows: Sequence[JobRow], now: int) -> Sequence[Inserted]:
        """All rows or none. Keys are resolved, and fire times recorded, together with the rows; KeyConflict stores none."""
        ...

    async def claim(self, room: Room, worker: str, lease: int, now: int) -> Claimed:
        """Due rows that fit into the room become running: lease, worker, claim number and attempt in one statement."""
        ...

    async def extend(self, claims: Sequence[tuple[int, int, str | None]], lease: int) -> Mapping[int, int | None]:
        """Give (seq, claim_no, note) a later lease. Answers the seqs still held, each with the moment a cancel was asked for."""
        ...

    async def confirm(self, claims: Sequence[tuple[int, int, str | None]], lease: int) -> None:
        """Return once a power cut could not take these claims along any more."""
        ...

    async def progress(self, reports: Sequence[tuple[int, int, str]]) -> Sequence[int]:
        """Write how far (seq, claim_no, JSON) say that they have come. Answers the seqs still held; the others are left alone."""
        ...

    async def settle(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        """Write outcomes. Answers the state of each seq whose claim still held; the others are left alone."""
        ...

    async def cancel(self, ids: Sequence[bytes], reason: str, keep_until: int | None, now: int) -> Mapping[bytes, State]:
        """Pending rows become cancelled, running ones are marked. Answers the state of each row that exists."""
        ...

    async def requeue(self, ids: Sequence[bytes], now: int, bulk: bool = False) -> Sequence[bytes]:
        """Dead and cancelled rows become pending with fresh counters. Answers those that did. In `bulk` only dead ones do, and
        one whose key is taken is left as it is, where else a KeyConflict changes none."""
        ...

    async def purge(self, ids: Sequence[bytes], bulk: bool = False) -> int:
        """Delete finished rows, in `bulk` only dead ones; answers how many."""
        ...

    async def reclaim(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        """Like settle, for rows of others, and only where the lease ended before now."""
        ...

    async def get(self, ids: Sequence[bytes]) -> Sequence[JobRow]:
        """The rows with these ids, those that exist."""
        ...

    async def list(self, state: State, lease_before: int | None = None, limit: int = 100) -> Sequence[JobRow]:
        """Rows in one state, oldest lease or sequence first; with `lease_before`, those whose lease ends sooner, which may
        come without payload."""
        ...

    async def dead(self, task: str | None, before: tuple[int, int], limit: int) -> Sequence[JobRow]:
        """Dead rows, of one task if it is named, that ended before this (moment, sequence), the last one first; no payloads."""
        ...

    async def overdue(self, before: int) -> Sequence[Overdue]:
        """What has been due since before this moment and waits, by queue and task; counted and looked for within bounds."""
        ...

    async def counts(self, now: int) -> Sequence[Count]:
        """How many rows there are by queue, task and state, and how many of the pending ones are due."""
        ...

    async def pause(self, queues: Sequence[str]) -> None:
        """No claim takes rows of these queues from now on."""
        ...

    async def resume(self, queues: Sequence[str], now: int) -> None:
        """They do again."""
        ...

    async def paused(self) -> frozenset[str]:
        """The queues that are paused."""
        ...

    async def define(self, schedules: Sequence[tuple[str, str, int]], now: int) -> Mapping[str, ScheduleRecord]:
        """Record (name, rule, moment): the newest definition holds. One that is new has as its last fire time this moment, one
        that is another than before has now; the same one as before keeps what it has. Answers what is recorded now."""
        ...

    async def suspend(self, schedule: str, paused: bool, now: int) -> None:
        """No fire time of this schedule becomes a job until it is resumed; those before that are passed over."""
        ...

    async def suspended(self) -> frozenset[str]:
        """The schedules that are paused."""
        ...

    async def undefine(self, schedule: str) -> None:
        """Forget a schedule."""
        ...

    async def recurring(self, task: str | None, key: str | None, after: int, limit: int) -> Sequence[JobRow]:
        """Recurring jobs, of one task or with one key if that is given, by sequence, from the one after this on; no payloads."""
        ...

    async def hold(self, id: bytes, paused: bool, now: int) -> bool:
        """Pause or resume a recurring job. Whether there is one."""
        ...

    async def unschedule(self, task: str, key: str, now: int) -> bool:
        """Remove a recurring job, or let it end with the run that is under way. Whether there was one."""
        ...

    async def prune(self, now: int, limit: int = 500) -> int:
        """Delete finished rows whose time is over, at most so many, and full buckets of rates; answers how many of either."""
        ...

    async def close(self) -> None:
        """Finish what has been accepted and let go of the store; idempotent."""
        ...


CANCELLED_ON_REQUEST: Final = "cancelled on request"


def heeding(change: Settlement, cancel_at: int | None) -> Settlement:
    """A job that would be tried again although its cancel was asked for, perhaps by another process, is cancelled."""
    if cancel_at is None or change.state is not State.PENDING:
        return change
    return change._replace(state=State.CANCELLED, reason=CANCELLED_ON_REQUEST)


def claimable(run_at: int, lost: int, now: int) -> int:
    """The `ready` value of a row that becomes pending now and is not held behind another."""
    return LATER if run_at > now else FRAGILE if lost else CLAIMABLE


def resolve_key(
    rule: OnConflict, pending: object, running: object
) -> Literal["create", "hold", "pending", "running", "replace", "conflict"]:
    """What `on_conflict` means when a job with the same key is pending, running, both or neither."""
    if not pending and not running:
        return "create"
    if rule == "raise":
        return "conflict"
    if pending:
        return "replace" if rule == "replace" else "pending"
    return "running" if rule == "reuse" else "hold"


def key_conflict(row: JobRow) -> KeyConflict:
    return KeyConflict(f"task {row.task!r} already has a pending or running job with key {row.key!r}; nothing was stored")


WORKER_LOST: Final = "worker lost"
SUPERSEDED: Final = "its retry was given up: the next fire time had come"
NO_RUNS: Final = "0 0 0 0 0 0"
SPLIT: Final = "its call with others failed"
MISSED: Final = "its fire time was missed"
QUEUED: Final = "its fire time came while its last run was not over"
UNSCHEDULED: Final = ""  # the recurrence of a job that was unscheduled while it ran
MOVED_ON: Final[Mapping[str, Any]] = {
    "state": State.PENDING, "attempts": 0, "snoozes": 0, "interruptions": 0, "parked": None, "reason": None,
}  # fmt: skip
MERGED: Final = "merged into its successor with the same key"  # such a row is not kept: the successor is the job now
# What `on_conflict="replace"` takes over from the newcomer, and what `requeue` resets.
REPLACED: Final = (
    "queue", "priority", "run_at", "payload", "payload_version", "options", "headers", "expires", "lane", "limit_value",
    "attempts", "snoozes", "interruptions", "parked", "reason", "singly",
)  # fmt: skip
FRESH: Final[Mapping[str, Any]] = {
    "state": State.PENDING, "attempts": 0, "snoozes": 0, "interruptions": 0, "lost": 0, "parked": None, "expires": None,
    "reason": None, "error": None, "traceback": None, "result": None, "keep_until": None, "finished": None, "cancel_at": None,
    "progress": None,
}  # fmt: skip


NEWEST: Final = (FOREVER, sys.maxsize)  # later than any row ended


def ended_at(row: JobRow) -> tuple[int, int]:
    """The place of a finished row in the order in which rows ended."""
    return row.finished or 0, row.seq


ON_TIME: Final = 1.0  # seconds by which a fire time may be late without having been missed
CATCH_UP: Final = 1_000  # fire times that misfire="all" runs in a row
LATENESS: Final = (60.0, 3600.0)  # the shortest and the longest default of misfire_grace: as long as the period, between these


def choose(rule: Rule, misfire: str, grace: float | None, since: int, now: int) -> tuple[int, list[int], int]:
    """Of the fire times in (since, now]: the latest, those that are to be run, and how many are missed for good."""
    count, passed = rule.passed(since, now, CATCH_UP if misfire == "all" else 1)
    if not passed:
        return since, [], 0
    if misfire == "skip":
        chosen = [moment for moment in passed if now - moment <= ON_TIME * 1e6]
    else:
        chosen = [moment for moment in passed if now - moment < longest_delay(rule, grace, moment)]
    return passed[-1], chosen, count - len(chosen)


def longest_delay(rule: Rule, grace: float | None, moment: int) -> float:
    """The misfire grace in microseconds."""
    if grace is not None:
        return grace * 1e6
    shortest, longest = LATENESS
    return min(max(rule.next_at(moment) - moment, shortest * 1e6), longest * 1e6)


class Recurrence(NamedTuple):
    """When a recurring job runs; stored with its row, as JSON."""

    rule: str  # as text
    overlap: str
    misfire: str
    grace: float | None  # seconds; None: the default
    paused: bool = False

    def as_text(self) -> str:
        return encode_json([infinity_out(value) for value in self])


@functools.lru_cache(10_000)
def recurrence_of(text: str) -> Recurrence:
    return Recurrence(*map(infinity_in, decode_json(text)))


@functools.lru_cache(10_000)
def interval_of(text: str) -> tuple[int, int, float]:
    """The period and offset of a recurrence that is an interval, and how late it may be without a second look; 0 if it needs one
    anyway."""
    recurrence = recurrence_of(text) if text != UNSCHEDULED else None
    rule = None
    if recurrence is not None and not recurrence.paused:
        with contextlib.suppress(Exception):  # the second look says what is wrong with it
            rule = rule_from(recurrence.rule)
    if recurrence is None or not isinstance(rule, Every):
        return 0, 0, 0.0
    grace = math.inf if recurrence.grace is None else recurrence.grace * 1e6
    return rule.period, round(rule.offset * 1e6), min(rule.period, ON_TIME * 1e6, grace)


def is_paused(recurrence: str | None) -> bool:
    with contextlib.suppress(Exception):  # one that cannot be read does not run anyway
        return bool(recurrence) and recurrence_of(cast(str, recurrence)).paused
    return False


def redefined(known: str, given: str) -> tuple[str, bool]:
    """The recurrence of a job that is scheduled anew, which stays paused; and whether its fire times are others now."""
    after = recurrence_of(given)
    try:
        before = recurrence_of(known)
    except Exception:  # UNSCHEDULED, or what cannot be read
        return given, True
    return after._replace(paused=before.paused).as_text(), before.rule != after.rule


class Tally(NamedTuple):
    """What has come of a recurring job so far; stored with its row, as numbers."""

    fired: int = 0
    skipped: int = 0
    missed: int = 0
    superseded: int = 0
    failed: int = 0
    last: int = 0  # the fire time for which it has run last

    def as_text(self) -> str:
        return " ".join(map(str, self))

    @staticmethod
    def of(text: str | None) -> Tally:
        return Tally(*map(int, (text or "").split()))


def requeued(row: JobRow, now: int) -> dict[str, Any]:
    """What becomes of a job that is made pending again: one that recurs waits for its next fire time, or to be resumed."""
    if not row.recurrence:
        return {**FRESH, "run_at": now, "ready": CLAIMABLE}
    recurrence = recurrence_of(row.recurrence)
    upcoming = rule_from(recurrence.rule).next_at(max(now, Tally.of(row.tally).last))
    ready = PAUSED if recurrence.paused else claimable(upcoming, 0, now)
    return {**FRESH, "run_at": upcoming, "fire_time": upcoming, "ready": ready}


RULE_FAILS: Final = "its rule fails"
LOOK_AGAIN: Final = 30.0  # seconds until a job whose rule fails here is tried again, by whoever has room for it


def recur_or_wait(
    change: Settlement, text: str, counts: str | None, fire_time: int, now: int
) -> tuple[Settlement, str | None, int]:
    """The same as `recur`; but a job whose rule fails waits, for a process that knows it, without holding up the others."""
    try:
        return recur(change, text, counts, fire_time, now)
    except Exception as error:
        if change.state is State.PENDING or change.reason == RULE_FAILS:
            return change, counts, fire_time
        told = error_text(error)
        log.error("a recurring job waits, %s: %s", RULE_FAILS, told)
        waiting = {**MOVED_ON, "run_at": later(now, LOOK_AGAIN), "reason": RULE_FAILS, "error": told}
        return change._replace(**waiting), counts, fire_time


def recur(change: Settlement, text: str, counts: str | None, fire_time: int, now: int) -> tuple[Settlement, str | None, int]:
    """What becomes of a recurring job whose run is settled so, by the recurrence that its row has now: the settlement, the
    counts, and the fire time that it waits for. What ends a job otherwise ends this run alone, but for a cancellation."""
    if text == UNSCHEDULED and change.state is State.PENDING:
        change = change._replace(state=State.CANCELLED, reason="unscheduled", keep=False)
    if text == UNSCHEDULED or change.state is State.CANCELLED:
        return change, counts, fire_time
    ran, tally, recurrence = change.ran or Ran(fire_time, now), Tally.of(counts), recurrence_of(text)
    rule, waits = rule_from(recurrence.rule), change.state is State.PENDING and change.reason != MISSED
    upcoming = rule.next_at(ran.fire_time)
    tally = tally._replace(missed=tally.missed + ran.missed, superseded=tally.superseded + ran.superseded)
    if waits and change.run_at < upcoming:
        return change, tally.as_text(), ran.fire_time
    skipped, queued = 0, False
    lost = change.reason == WORKER_LOST  # nobody ran it since: what has passed meanwhile was missed
    if not lost and (recurrence.misfire != "all" or upcoming > ran.started):  # else what was missed is run first
        skipped, passed = rule.passed(max(ran.fire_time, min(ran.started, now)), now, 1)
        upcoming = rule.next_at(max(now, ran.fire_time))
        if passed and recurrence.overlap == "queue":
            upcoming, skipped, queued = passed[0], skipped - 1, True
    tally = tally._replace(
        skipped=tally.skipped + skipped,
        superseded=tally.superseded + waits,
        fired=tally.fired + (change.state is not State.PENDING),
        failed=tally.failed + (change.state is State.DEAD),
        last=tally.last if change.reason == MISSED else ran.fire_time,
    )
    afresh = {**MOVED_ON, "run_at": upcoming, "lost": 0 if change.state is State.DONE else change.lost}
    if queued:
        afresh |= {"run_at": now, "reason": QUEUED}
    return change._replace(**afresh), tally.as_text(), upcoming


def apply(row: JobRow, change: Settlement, now: int) -> None:
    """Do to a row in memory what `settle` does to a stored one, except for `ready`."""
    row.state, row.run_at, row.attempts, row.snoozes = change.state, change.run_at, change.attempts, change.snoozes
    row.interruptions, row.lost, row.parked, row.reason = change.interruptions, change.lost, change.parked, change.reason
    row.error, row.traceback, row.result = change.error, change.traceback, change.result
    row.finished, row.keep_until = (None, None) if change.state is State.PENDING else (now, change.keep_until)
    row.lease = row.ready = None
    if change.singly is not None:
        row.singly = change.singly or None
    if row.progress is not None and change.state is State.PENDING:
        row.progress = None  # the next attempt begins anew


# ── 13. Memory store ──────────────────────────────────────────────────────────────────────────────────────────────────
# Best-effort jobs: the same verbs over Python objects. It never suspends, so its verbs are atomic by themselves.

Entry = tuple[int, int, int, int, JobRow]  # sorts as a claim takes: -priority, run_at, seq; then the ticket of this entry
TOLD: Final = (  # by `schedule`
    "args", "kwargs", "payload", "options", "headers", "settings", "queue", "priority", "handler", "limit_value",
)  # fmt: skip
MEMORY_KEEPS: Final = 1_000  # finished rows kept for `get` and `stats`, whatever their TTL: memory is not a table


def soonest(*moments: int | None) -> int | None:
    return min((moment for moment in moments if moment is not None), default=None)


def runs_alone(row: JobRow) -> bool:
    """Not in one call with others: since such a call has failed, or a second worker has died on it."""
    return row.singly is not None or row.lost > 1


def waits_for_retry(row: JobRow) -> bool:
    return row.state is State.PENDING and row.attempts > 0


class Fires:
    """What is known here of one schedule."""

    __slots__ = ("earlier", "last", "paused", "rule", "run")

    def __init__(self) -> None:
        self.last: int | None = None  # the fire time that is recorded; None: it is not defined
        self.paused = False
        self.rule: str | None = None
        self.run: JobRow | None = None  # the last one
        self.earlier: Sequence[JobRow] = ()  # and those before it that were not over when it was made

    def runs(self) -> list[JobRow]:
        """Those that are not over."""
        runs = [*self.earlier, self.run] if self.run is not None else []
        return [run for run in runs if run.finished is None]

    def note(self, run: JobRow) -> None:
        self.earlier, self.run = self.runs(), run


class MemoryStore:
    """Rows in dictionaries and heaps. Entries of rows that have moved on are dropped when they come up."""

    def __init__(self) -> None:
        self._rows: dict[int, JobRow] = {}  # by seq
        self._ids: dict[bytes, JobRow] | None = None  # the same by id, once anybody has asked for one
        self._lanes: dict[tuple[str, str, str | None, bool, int], list[Entry]] = {}
        self._full_at: dict[tuple[str, str], float] = {}  # of rates, by task and value
        self._blocked: set[tuple[str, str]] = set()  # what waits for something else than a slot: see Limits
        self._gathering: set[tuple[str, str, str | None, bool, int]] = set()  # lanes whose jobs wait for others to go with
        self._later: list[Entry] = []  # the same with priority 0
        self._finished: deque[JobRow] = deque()
        self._keys: dict[tuple[str, str, State], JobRow] = {}
        self._schedules: dict[str, Fires] = {}
        self._changes: dict[int, JobRow] = {}  # what running recurring jobs, by seq, are to be from their next run on
        self._seq = itertools.count(1)
        self.held: frozenset[str] = frozenset()  # the queues that are paused
        self.firing = True  # recurring jobs
        self.pending = 0
        self.recurring_pending = 0  # of these
        self._drift = math.inf  # by how much the wall clock was ahead of the steady one

    async def open(self) -> None:
        """Nothing to open."""

    async def insert(self, rows: Sequence[JobRow], now: int) -> Sequence[Inserted]:
        seen = set()
        for row in rows:
            if row.key is not None:
                if row.on_conflict == "raise" and (any(self._same_key(row)) or (row.task, row.key) in seen):
                    raise key_conflict(row)
                seen.add((row.task, row.key))
        return [self._insert_one(row, now) for row in rows]

    def _insert_one(self, row: JobRow, now: int) -> Inserted:
        superseded = False
        if row.schedule is not None:
            fires = self._schedules.setdefault(row.schedule, Fires())
            if row.fire_time is not None and not row.by_hand:
                if row.overlap == "wait" and not all(map(waits_for_retry, fires.runs())):
                    return Inserted(row, "overlap")
                if refusal := self._fire(fires, row.rule, row.fire_time):
                    return Inserted(row, refusal)
                superseded = sum(self._supersede(run, now) for run in fires.runs()) > 0  # all of them, not the first
                if row.overlap == "skip" and fires.runs():
                    return Inserted(row, "overlap")
        held = False
        if row.recurrence is not None and (known := next(filter(None, self._same_key(row)), None)):
            return Inserted(known, self._reschedule(known, row, now))
        if row.key is not None:
            pending, running = self._same_key(row)
            action = resolve_key(row.on_conflict, pending, running)
            if action == "replace" and pending is not None:
                for name in REPLACED:
                    setattr(pending, name, getattr(row, name))
                for name in ("args", "kwargs", "context", "settings", "handler"):
                    setattr(pending, name, getattr(row, name))
                if pending.ready != HELD:
                    self._enlist(pending, now)
                return Inserted(pending, "replaced")
            existing = pending if action == "pending" else running if action == "running" else None
            if existing is not None:
                return Inserted(existing, "existing")
            held = action == "hold"
        if row.schedule is not None:
            self._schedules[row.schedule].note(row)
        row.seq = next(self._seq)
        self._add(row)
        self._become_pending(row, now, HELD if held else None)
        return Inserted(row, "created", superseded)

    @staticmethod
    def _fire(fires: Fires, rule: str | None, fire_time: int) -> Literal["lost", "paused", "stale"] | None:
        if fires.rule is not None and rule is not None and fires.rule != rule:
            return "stale"
        if fires.paused or (fires.last is not None and fires.last >= fire_time):
            return "paused" if fires.paused else "lost"
        fires.last, fires.rule = fire_time, fires.rule or rule
        return None

    def _reschedule(self, known: JobRow, row: JobRow, now: int) -> Literal["existing", "replaced"]:
        """Give a recurring job other arguments, options or another rule."""
        recurrence, afresh = redefined(cast(str, known.recurrence), cast(str, row.recurrence))
        same = self._changes.get(known.seq, known)
        if known.recurrence == recurrence and all(getattr(same, name) == getattr(row, name) for name in TOLD):
            return "existing"
        known.recurrence = recurrence
        if known.state is State.RUNNING:  # in a slot of its queue
            self._changes[known.seq] = row
            return "replaced"
        for name in TOLD:
            setattr(known, name, getattr(row, name))
        if known.ready != PAUSED:
            if afresh:
                known.run_at, known.fire_time = row.run_at, row.fire_time
                known.attempts = known.snoozes = known.interruptions = 0
            self._enlist(known, now)
        return "replaced"

    def told(self, row: JobRow) -> dict[str, Any]:
        """What a recurring job is from its next run on."""
        told = self._changes.get(row.seq, row)
        return {name: getattr(told, name) for name in TOLD}

    def fire(self, row: JobRow, fire_time: int) -> bool:
        """Record an occurrence that is to start at once, unless anything about it needs a second look."""
        fires = self._schedules.get(cast(str, row.schedule))
        if fires is None or fires.last is None or fires.last >= fire_time or fires.paused or fires.rule != row.rule:
            return False
        if fires.earlier or (fires.run is not None and fires.run.finished is None):
            return False
        fires.last, fires.run = fire_time, row
        return True

    def _supersede(self, last: JobRow, now: int) -> bool:
        """Give up a run that waits for its retry."""
        if not waits_for_retry(last):
            return False
        self._leave(last)
        last.state, last.reason, last.finished, last.ready = State.CANCELLED, SUPERSEDED, now, None
        self._finish(last, False)
        return True

    def _add(self, row: JobRow) -> None:
        self._rows[row.seq] = row
        if self._ids is not None:
            self._ids[row.id] = row

    def _drop(self, row: JobRow) -> None:
        self._rows.pop(row.seq, None)
        if self._ids is not None:
            self._ids.pop(row.id, None)

    def _claimed(self, seq: int, claim_no: int) -> JobRow | None:
        row = self._rows.get(seq)
        return row if row is not None and row.state is State.RUNNING and row.claim_no == claim_no else None

    def _same_key(self, row: JobRow) -> tuple[JobRow | None, JobRow | None]:
        return (
            self._keys.get((row.task, cast(str, row.key), State.PENDING)),
            self._keys.get((row.task, cast(str, row.key), State.RUNNING)),
        )

    def _become_pending(self, row: JobRow, now: int, ready: int | None = None) -> None:
        """`ready`: why it is not to be claimed, if it is not."""
        self.pending += 1
        self.recurring_pending += row.recurrence is not None
        if row.key is not None:
            self._keys[row.task, row.key, State.PENDING] = row
        if ready is not None:
            row.ready = ready
        else:
            self._enlist(row, now)

    def _enlist(self, row: JobRow, now: int) -> None:
        row.ready = claimable(row.run_at, row.lost, now)
        row.ticket += 1
        if not self.firing and row.recurrence and row.attempts + row.snoozes + row.interruptions == 0:
            return  # a next fire time; what has begun goes on within the grace
        if row.ready == LATER:
            heap, priority = self._later, 0
        else:
            lane = (row.queue, row.task, row.limit_value, runs_alone(row), row.ready)
            heap, priority = self._lanes.setdefault(lane, []), row.priority
        heapq.heappush(heap, (-priority, row.run_at, row.seq, row.ticket, row))
        if len(heap) > 2 * self.pending + 64:  # more dead entries than live ones: rows cancelled or replaced while they waited
            heap[:] = [entry for entry in heap if not self._stale(entry)]
            heapq.heapify(heap)

    @staticmethod
    def _stale(entry: Entry) -> bool:
        row = entry[4]
        return row.state is not State.PENDING or row.ticket != entry[3]

    def _leave(self, row: JobRow) -> None:
        """Forget what made the row pending or running; its heap entry dies by itself."""
        if row.state is State.PENDING:
            self.pending -= 1
            self.recurring_pending -= row.recurrence is not None
        if row.key is not None and self._keys.get((row.task, row.key, row.state)) is row:
            del self._keys[row.task, row.key, row.state]

    async def claim(self, room: Room, worker: str, lease: int, now: int) -> Claimed:
        while self._later and (self._later[0][1] <= now or self._stale(self._later[0])):
            entry = heapq.heappop(self._later)
            if not self._stale(entry):
                self._enlist(entry[4], now)
        room = room.without(self.held)
        limits = Limits(room, functools.partial(self._left, now))
        found, ripe_at = self._candidates(room, limits, now)
        taken = room.pick((self._candidate(entry[4]) for entry in found), limits)
        if len(taken) < len(found):
            chosen = {row.seq for row in taken}
            for entry in found:
                if entry[2] not in chosen:
                    self._enlist(entry[4], now)
        for row in taken:
            self._leave(row)
            row.state, row.ready, row.worker, row.lease, row.started = State.RUNNING, None, worker, lease, now
            row.claim_no += 1
            row.attempts += 1
            if row.key is not None:
                self._keys[row.task, row.key, State.RUNNING] = row
        self._spend(limits, now)
        next_at = self._later[0][1] if self._later else None
        self._blocked = limits.blocked
        return Claimed(taken, soonest(next_at, ripe_at, limits.wait), self._lacks_room(), limited=limits.limited)

    @staticmethod
    def _candidate(row: JobRow) -> Candidate:
        return row.queue, row.task, row.ready == FRAGILE, row.limit_value or "", runs_alone(row), row

    def _left(self, now: int, terms: Terms, value: str) -> Left:
        """What the rate leaves; how many run is the room's to know, since all that run do so here."""
        if terms.rate is None:
            return math.inf, math.inf, None
        count, at = terms.rate.tokens(self._full_at.get((terms.names[0], value)), now)
        return math.inf, count, at

    def _spend(self, limits: Limits, now: int) -> None:
        for task, value, rate, count in limits.spent:
            self._full_at[task, value] = rate.spend(self._full_at.get((task, value)), now, count)
            if len(self._full_at) % 1_000 == 0:  # those that are full are as good as unknown
                self._full_at = {key: full_at for key, full_at in self._full_at.items() if full_at > now}

    def _candidates(self, room: Room, limits: Limits, now: int) -> tuple[Sequence[Entry], int | None]:
        """Off each lane that has room the best entries, as many as the lane's room; sorted together. And when the next items
        that wait for others to go with have waited long enough."""
        found: list[Entry] = []
        ripe_at: int | None = None
        self._gathering.clear()
        for lane in list(self._lanes):
            queue_name, task_name, value, alone, ready = lane
            most, heap = room.free(queue_name, task_name), self._lanes[lane]
            if ready == FRAGILE:
                most = min(most, room.fragile)
            terms = room.terms.get(task_name) if most > 0 else None
            if terms is not None:
                while heap and self._stale(heap[0]):
                    heapq.heappop(heap)
                if terms.window and not (alone or ready == FRAGILE):
                    moments = [*itertools.islice((entry[1] for entry in heap if not self._stale(entry)), terms.size)]
                    if moments and (wait := terms.ripe_at(moments, len(moments))) > now:
                        ripe_at = soonest(ripe_at, wait)
                        self._gathering.add(lane)
                        limits.gathering.update(terms.names)
                        continue
                most = limits.most(terms, value or "", most)
            while most > 0 and heap:
                entry = heapq.heappop(heap)
                if not self._stale(entry):
                    found.append(entry)
                    most -= 1
            if not heap:
                del self._lanes[lane]
        found.sort()
        return found, ripe_at

    async def extend(self, claims: Sequence[tuple[int, int, str | None]], lease: int) -> Mapping[int, int | None]:
        held: dict[int, int | None] = {}
        for seq, claim_no, note in claims:
            row = self._claimed(seq, claim_no)
            if row is not None:
                row.lease, row.error = lease, note or row.error
                held[seq] = row.cancel_at
        return held

    async def confirm(self, claims: Sequence[tuple[int, int, str | None]], lease: int) -> None:
        """Nothing here outlives the process."""

    async def progress(self, reports: Sequence[tuple[int, int, str]]) -> Sequence[int]:
        held = [(row, text) for seq, claim_no, text in reports if (row := self._claimed(seq, claim_no)) is not None]
        for row, text in held:
            row.progress = text
        return [row.seq for row, _ in held]

    async def settle(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        return self.settle_now(settlements, now)

    def settle_now(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        return self._settle(settlements, FOREVER, now)

    def _settle(self, settlements: Sequence[Settlement], lease_before: int, now: int) -> Mapping[int, State]:
        changed = {}
        for change in settlements:
            row = self._claimed(change.seq, change.claim_no)
            if row is None or (row.lease or 0) >= lease_before:
                continue
            self._leave(row)
            change = heeding(change, row.cancel_at)
            if row.recurrence is not None:
                change, row.tally, row.fire_time = recur_or_wait(change, row.recurrence, row.tally, row.fire_time or 0, now)
                row.cancel_at = None  # it came too late, if at all
                told = self._changes.pop(row.seq, row) if self._changes else row
                row.__dict__.update((name, getattr(told, name)) for name in TOLD if told is not row)
            successor = self._same_key(row)[0] if row.key is not None else None
            apply(row, change, now)
            if successor is not None:
                if row.state is State.PENDING:
                    successor.run_at = min(successor.run_at, row.run_at)
                    row.state, row.finished, row.reason = State.CANCELLED, now, MERGED
                if successor.ready == HELD:
                    self._enlist(successor, now)
            if row.state is State.PENDING:
                self._back_in_pace(row, now)
                self._become_pending(row, now, PAUSED if is_paused(row.recurrence) else None)
            else:
                self._finish(row, change.keep and row.state is change.state)
            changed[row.seq] = row.state
        return changed

    def _finish(self, row: JobRow, keep: bool) -> None:
        row.context = None
        if not keep:
            self._drop(row)
            return
        self._finished.append(row)
        if len(self._finished) > 50:  # an error keeps the locals of all its frames alive
            self._finished[-51].exception = None
        if len(self._finished) > MEMORY_KEEPS:
            self._drop(self._finished.popleft())

    async def cancel(self, ids: Sequence[bytes], reason: str, keep_until: int | None, now: int) -> Mapping[bytes, State]:
        states = {}
        for row in await self.get(ids):
            if row.state is State.PENDING:
                self._leave(row)
                row.state, row.reason, row.finished, row.keep_until, row.ready = State.CANCELLED, reason, now, keep_until, None
                self._finish(row, keep_until is None or keep_until > now)
            elif row.state is State.RUNNING:
                row.cancel_at = row.cancel_at or now
            states[row.id] = row.state
        return states

    async def requeue(self, ids: Sequence[bytes], now: int, bulk: bool = False) -> Sequence[bytes]:
        if bulk:
            return [again for id in ids for again in await self._requeue_dead(id, now)]
        again = [row for row in await self.get(ids) if row.state in (State.DEAD, State.CANCELLED)]
        keys = Counter((row.task, row.key) for row in again if row.key is not None)
        for row in again:
            if row.key is not None:
                pending, running = self._same_key(row)
                if pending or (running and row.recurrence is not None) or keys[row.task, row.key] > 1:
                    raise key_conflict(row)
        fresh = [requeued(row, now) for row in again]
        for row, values in zip(again, fresh, strict=True):
            self._finished.remove(row)
            for name, value in values.items():
                setattr(row, name, value)
            held = HELD if row.key is not None and self._same_key(row)[1] is not None else None
            self._become_pending(row, now, PAUSED if row.ready == PAUSED else held)
        return [row.id for row in again]

    async def _requeue_dead(self, id: bytes, now: int) -> Sequence[bytes]:
        with contextlib.suppress(KeyConflict):
            return await self.requeue([id], now) if any(row.state is State.DEAD for row in await self.get([id])) else ()
        return ()

    async def purge(self, ids: Sequence[bytes], bulk: bool = False) -> int:
        old = [row for row in await self.get(ids) if (row.state is State.DEAD if bulk else row.finished is not None)]
        for row in old:
            self._finished.remove(row)
            self._drop(row)
        return len(old)

    async def reclaim(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        return self._settle(settlements, now, now)

    async def get(self, ids: Sequence[bytes]) -> Sequence[JobRow]:
        if self._ids is None:
            self._ids = {row.id: row for row in self._rows.values()}
        return [self._ids[id] for id in ids if id in self._ids]

    async def list(self, state: State, lease_before: int | None = None, limit: int = 100) -> Sequence[JobRow]:
        rows = (row for row in self._rows.values() if row.state is state)
        if lease_before is not None:
            rows = (row for row in rows if row.lease is not None and row.lease < lease_before)
        return heapq.nsmallest(limit, rows, key=lambda row: (row.lease if lease_before is not None else 0, row.seq))

    async def dead(self, task: str | None, before: tuple[int, int], limit: int) -> Sequence[JobRow]:
        rows = (row for row in self._finished if row.state is State.DEAD and task in (None, row.task))
        return heapq.nlargest(limit, (row for row in rows if ended_at(row) < before), key=ended_at)

    async def overdue(self, before: int) -> Sequence[Overdue]:
        found, late = [], dict[tuple[str, str, str | None, bool, int], list[Entry]]()
        for entry in self._later:  # which no claim has looked at since: no slot is free
            if entry[1] < before:
                late.setdefault((entry[4].queue, entry[4].task, entry[4].limit_value, False, LATER), []).append(entry)
        for (queue, task, value, *_), heap in (*self._lanes.items(), *late.items()):
            since = [entry[1] for entry in heap if not self._stale(entry)]
            if since and min(since) < before and queue not in self.held:
                found.append(Overdue(queue, task, value or "", min(since), len(since)))
        return found

    async def counts(self, now: int) -> Sequence[Count]:
        numbers, due = Counter[tuple[str, str, State]](), Counter[tuple[str, str, State]]()
        for row in self._rows.values():
            numbers[row.queue, row.task, row.state] += 1
            due[row.queue, row.task, row.state] += row.ready in (CLAIMABLE, FRAGILE) or (row.ready == LATER and row.run_at <= now)
        return [
            Count(queue=queue, task=task, state=state, durable=False, count=n, due=due[queue, task, state])
            for (queue, task, state), n in sorted(numbers.items())
        ]

    async def pause(self, queues: Sequence[str]) -> None:
        self.held = self.held.union(queues)

    async def resume(self, queues: Sequence[str], now: int) -> None:
        self.held = self.held.difference(queues)

    async def paused(self) -> frozenset[str]:
        return self.held

    async def define(self, schedules: Sequence[tuple[str, str, int]], now: int) -> Mapping[str, ScheduleRecord]:
        records = {}
        for name, rule, moment in schedules:
            fires = self._schedules.setdefault(name, Fires())
            if fires.last is None:
                fires.last = moment
            elif fires.rule not in (None, rule):
                fires.last = max(now, fires.last)
            fires.rule = rule
            records[name] = ScheduleRecord(fires.last, fires.paused)
        return records

    async def suspend(self, schedule: str, paused: bool, now: int) -> None:
        fires = self._schedules.setdefault(schedule, Fires())
        if fires.last is None if paused else fires.paused:
            fires.last = max(fires.last or now, now)
        fires.paused = paused

    async def suspended(self) -> frozenset[str]:
        return frozenset(name for name, fires in self._schedules.items() if fires.paused)

    async def undefine(self, schedule: str) -> None:
        if (fires := self._schedules.get(schedule)) is not None:
            fires.last, fires.paused, fires.rule = None, False, None

    async def recurring(self, task: str | None, key: str | None, after: int, limit: int) -> Sequence[JobRow]:
        rows = (row for row in self._rows.values() if row.recurrence and row.finished is None and row.seq > after)
        return heapq.nsmallest(
            limit, (row for row in rows if task in (None, row.task) and key in (None, row.key)), key=lambda row: row.seq
        )

    async def hold(self, id: bytes, paused: bool, now: int) -> bool:
        for row in await self.get([id]):
            if row.recurrence and row.finished is None:
                row.recurrence = recurrence_of(row.recurrence)._replace(paused=paused).as_text()
                if row.state is State.PENDING and paused:
                    row.ready, row.ticket = PAUSED, row.ticket + 1
                elif row.ready == PAUSED:
                    row.run_at = row.fire_time = rule_from(recurrence_of(row.recurrence).rule).next_at(now)
                    row.attempts = row.snoozes = row.interruptions = 0
                    self._enlist(row, now)
                return True
        return False

    async def unschedule(self, task: str, key: str, now: int) -> bool:
        row = self._keys.get((task, key, State.PENDING)) or self._keys.get((task, key, State.RUNNING))
        if row is None or not row.recurrence:
            return False
        row.recurrence = UNSCHEDULED
        if row.state is State.PENDING:
            self._leave(row)
            row.state, row.reason, row.finished, row.ready = State.CANCELLED, "unscheduled", now, None
            self._finish(row, False)
        return True

    async def prune(self, now: int, limit: int = 500) -> int:
        old = [row for row in self._finished if row.keep_until is not None and row.keep_until <= now][:limit]
        for row in old:
            self._finished.remove(row)
            self._drop(row)
        return len(old)

    async def close(self) -> None:
        """Nothing to close; rows that are left belong to whoever holds a handle."""

    def keep_pace(self, now: int, steady: float) -> None:
        """Intervals go on as they were when the wall clock has been set back since the last look."""
        drift = now / 1e6 - steady
        set_back, self._drift = drift < self._drift - STEP < math.inf, drift
        for row in list(self._rows.values()) if set_back else ():
            if row.ready == LATER and self._back_in_pace(row, now):
                self._enlist(row, now)

    @staticmethod
    def _back_in_pace(row: JobRow, now: int) -> bool:
        """Whether a job was further than its period from its next fire time, as it is after a step back; now it is not."""
        period, offset, _ = interval_of(row.recurrence) if row.recurrence else (0, 0, 0.0)
        if not 0 < period < row.run_at - now:
            return False
        row.run_at = row.fire_time = now + (offset - now) % period
        row.attempts = row.snoozes = row.interruptions = 0
        return True

    @property
    def waiting(self) -> int:
        """How many jobs are pending that will be gone one day."""
        return self.pending - self.recurring_pending

    def has_due(self, now: int) -> bool:
        """Whether anything waits only for a slot."""
        return self._lacks_room() or bool(self._later and self._later[0][1] <= now)

    def _lacks_room(self) -> bool:
        if not (self.held or self._blocked or self._gathering):
            return bool(self._lanes)
        waiting = ((lane[0], (lane[1], lane[2] or "")) for lane in self._lanes.keys() - self._gathering)
        return any(queue not in self.held and limit not in self._blocked for queue, limit in waiting)

    def adopt(self, row: SimpleRow) -> None:
        """Insert and claim in one, for a row that need not wait."""
        row.seq = seq = next(self._seq)
        self._rows[seq] = row
        if self._ids is not None:
            self._ids[row.id] = row
        if row.attempts == 0:
            row.state, row.attempts, row.claim_no = State.RUNNING, 1, 1

    def forget(self, row: JobRow) -> None:
        """Settle in one, for a running row without a key of which nothing is kept, not even the moment."""
        del self._rows[row.seq]
        if self._ids is not None:
            self._ids.pop(row.id, None)
        row.state, row.finished, row.value, row.context = IS_DONE, 0, None, None
        if row.reason is not None:
            row.reason = row.error = row.traceback = row.parked = row.exception = None

    def detach(self, rows: Sequence[JobRow]) -> None:
        """Take pending rows out, as they are, on their way to another store."""
        for row in rows:
            self._leave(row)
            row.ticket += 1
            self._drop(row)

    def attach(self, rows: Sequence[JobRow], now: int) -> None:
        """Take them back. One whose key was given to another meanwhile gives way."""
        for row in rows:
            pending, running = self._same_key(row) if row.key is not None else (None, None)
            if pending is not None:
                row.state, row.reason, row.finished = State.CANCELLED, MERGED, now
            else:
                self._add(row)
                self._become_pending(row, now, HELD if running is not None else None)


# ── 14. SQLite store: schema and statements ───────────────────────────────────────────────────────────────────────────
# The tables, and every statement that is used more than once. Needs SQLite 3.38 (->> on JSON), STRICT tables with it.

COLUMNS: Final = tuple(itertools.takewhile(lambda name: name != "durable", JobRow.__annotations__))
ALL: Final = ", ".join(COLUMNS)
values_of: Final = operator.attrgetter(*COLUMNS)

JOBS: Final = (
    """CREATE TABLE tinyq_jobs (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, so that an old handle cannot find another job
        id BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
        namespace TEXT NOT NULL,
        task TEXT NOT NULL,
        queue TEXT NOT NULL,
        lane INTEGER NOT NULL DEFAULT 0,  -- see lane_of; 0: to be found out by the next claim
        priority INTEGER NOT NULL,
        run_at INTEGER NOT NULL,
        created INTEGER NOT NULL,
        state TEXT NOT NULL  -- (IN would build a table of the five for each row)
            CHECK (state = 'pending' OR state = 'running' OR state = 'done' OR state = 'dead' OR state = 'cancelled'),
        ready INTEGER CHECK ((ready IS NOT NULL) = (state = 'pending')),
        payload_version INTEGER NOT NULL, options TEXT, headers TEXT,
        key TEXT, expires INTEGER, schedule TEXT, fire_time INTEGER,
        attempts INTEGER NOT NULL, claim_no INTEGER NOT NULL, snoozes INTEGER NOT NULL,
        interruptions INTEGER NOT NULL, lost INTEGER NOT NULL, parked INTEGER,
        worker TEXT, lease INTEGER, started INTEGER, finished INTEGER, cancel_at INTEGER,
        reason TEXT, error TEXT, traceback TEXT, keep_until INTEGER,
        recurrence TEXT, tally TEXT, limit_value TEXT, singly INTEGER,
        payload TEXT, result TEXT, progress TEXT  -- last: SQLite reads a row from its start, up to the last column asked for
    ) STRICT""",
    """CREATE TRIGGER tinyq_moved AFTER UPDATE OF namespace, queue, task ON tinyq_jobs BEGIN
        UPDATE tinyq_jobs SET lane = 0, limit_value = CASE WHEN new.state = 'running' THEN limit_value END WHERE seq = new.seq
            AND (new.namespace, new.queue, new.task) IS NOT (old.namespace, old.queue, old.task);
    END""",
    # Only what may start now is in the claim index: its size, and so the cost of a claim, ignores everything else.
    "CREATE INDEX tinyq_claim ON tinyq_jobs (lane, priority DESC, run_at) WHERE ready = 1",
    "CREATE INDEX tinyq_later ON tinyq_jobs (namespace, run_at, priority DESC) WHERE ready = 0",
    "CREATE INDEX tinyq_fragile ON tinyq_jobs (lane, priority DESC, run_at) WHERE ready = 3",
    "CREATE INDEX tinyq_leases ON tinyq_jobs (lease) WHERE state = 'running'",
    """CREATE UNIQUE INDEX tinyq_keys ON tinyq_jobs (namespace, task, key, state)
        WHERE key IS NOT NULL AND finished IS NULL AND recurrence IS NULL""",
    # A recurring job is the only one with its key. In an index without `state` nothing is written for its starts and ends.
    """CREATE UNIQUE INDEX tinyq_recurring_keys ON tinyq_jobs (namespace, task, key)
        WHERE recurrence IS NOT NULL AND finished IS NULL""",
    "CREATE INDEX tinyq_occurrences ON tinyq_jobs (namespace, schedule) WHERE schedule IS NOT NULL AND finished IS NULL",
    "CREATE INDEX tinyq_keep ON tinyq_jobs (keep_until) WHERE keep_until IS NOT NULL",
    "CREATE INDEX tinyq_dead ON tinyq_jobs (namespace, finished, seq, task) WHERE state = 'dead'",
    "CREATE INDEX tinyq_recurring ON tinyq_jobs (namespace, seq) WHERE recurrence IS NOT NULL AND finished IS NULL",
    """CREATE INDEX tinyq_limited ON tinyq_jobs (namespace, task, limit_value)
        WHERE state = 'running' AND limit_value IS NOT NULL""",
)
# What version 1 had, in the order of its columns; its `lane` was text. For a new file the names are enough: later steps make the
# table anew.
FIRST: Final = (
    "id, namespace, task, queue, priority, run_at, created, state, ready, payload, payload_version, options, headers, key, "
    "expires, schedule, fire_time, attempts, claim_no, snoozes, interruptions, lost, parked, worker, lease, started, finished, "
    "cancel_at, reason, error, traceback, result, keep_until"
)
SINCE: Final = "progress, recurrence, tally"
# One tuple of statements a version; a file is brought forward by running those it has not seen, in one transaction.
MIGRATIONS: Final = (
    (
        "CREATE TABLE tinyq_meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT",
        f"CREATE TABLE tinyq_jobs (seq INTEGER PRIMARY KEY AUTOINCREMENT, lane, {FIRST})",
        """CREATE TABLE tinyq_schedules (
            namespace TEXT NOT NULL, name TEXT NOT NULL, last_fire INTEGER NOT NULL, PRIMARY KEY (namespace, name)
        ) STRICT""",
    ),
    (
        "CREATE TABLE tinyq_paused (namespace TEXT NOT NULL, queue TEXT NOT NULL, PRIMARY KEY (namespace, queue)) STRICT",
        """CREATE TABLE tinyq_workers (
            id TEXT PRIMARY KEY, namespace TEXT NOT NULL, port INTEGER, started INTEGER NOT NULL, seen INTEGER NOT NULL
        ) STRICT""",
    ),
    ("ALTER TABLE tinyq_jobs ADD COLUMN progress TEXT",),
    (
        "ALTER TABLE tinyq_schedules ADD COLUMN rule TEXT",  # unknown: of a file from before
        "ALTER TABLE tinyq_schedules ADD COLUMN paused INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE tinyq_jobs ADD COLUMN recurrence TEXT",
        "ALTER TABLE tinyq_jobs ADD COLUMN tally TEXT",
    ),
    (
        # The columns of jobs in another order, of which `lane` begins anew.
        "DROP TRIGGER IF EXISTS tinyq_moved",
        *(
            f"DROP INDEX IF EXISTS tinyq_{name}"
            for name in ("claim", "later", "fragile", "leases", "keys", "occurrences", "keep", "dead", "recurring")
        ),
        "ALTER TABLE tinyq_jobs RENAME TO tinyq_before",
        *JOBS,
        f"INSERT INTO tinyq_jobs (seq, {FIRST}, {SINCE}) SELECT seq, {FIRST}, {SINCE} FROM tinyq_before",
        "DELETE FROM sqlite_sequence WHERE name = 'tinyq_jobs'",  # numbers that were given go on being used up
        "INSERT INTO sqlite_sequence SELECT 'tinyq_jobs', seq FROM sqlite_sequence WHERE name = 'tinyq_before'",
        "DROP TABLE tinyq_before",
        "UPDATE tinyq_jobs SET tally = tally || ' 0' WHERE tally IS NOT NULL",  # which ends with the last fire time
        """CREATE TABLE tinyq_rates (
            namespace TEXT NOT NULL, task TEXT NOT NULL, value TEXT NOT NULL, full_at REAL NOT NULL,
            PRIMARY KEY (namespace, task, value)
        ) STRICT""",
    ),
)

AMONG: Final = "seq IN (SELECT value FROM json_each(?))"
GIVEN: Final = [column for column in COLUMNS if column not in ("seq", "progress")]
INSERT: Final = f"INSERT INTO tinyq_jobs ({', '.join(GIVEN)}) VALUES ({', '.join(f':{column}' for column in GIVEN)})"


def insertion(kind: str, each: str, rest: Mapping[str, str]) -> Mapping[int, str]:
    """Statements for so many new rows of the same kind, which is given once. (Each opens the table and its indexes, which takes
    as long as to insert a row.) `rest`: the same in all of them."""
    into = f"INSERT INTO tinyq_jobs ({kind}, {each}, {', '.join(rest)})"
    kind, each, same = *(", ".join("?" * len(names.split())) for names in (kind, each)), ", ".join(rest.values())
    several = {
        count: f"{into} SELECT {kind}, each.*, {same} FROM (VALUES {', '.join([f'({each})'] * count)}) AS each"
        for count in (25, 5)
    }
    return {**several, 1: f"{into} VALUES ({kind}, {each}, {same})"}


# What most jobs need. A job with a key, of a schedule or with a history takes the statement above.
NEW: Final = insertion(
    "namespace, ready, lane, task, queue, priority, payload_version, options, headers, expires, limit_value",
    "id, run_at, created, payload",
    {"state": "'pending'"} | dict.fromkeys(("attempts", "claim_no", "snoozes", "interruptions", "lost"), "0"),
)
# The same for a job that is handed over: running from its first moment on.
HANDED: Final = insertion(
    "namespace, task, queue, lane, priority, payload_version, options, headers, expires, worker",
    "id, run_at, created, payload, lease, started",
    {"state": "'running'", "attempts": "1", "claim_no": "1"} | dict.fromkeys(("snoozes", "interruptions", "lost"), "0"),
)
LAST_ROW: Final = "SELECT last_insert_rowid()"
# One index holds the keys of recurring jobs, another those of all others. The state is not a parameter: which partial indexes fit
# would depend on it, and SQLite would prepare the statement anew each time, which takes twenty times as long as to run it.
SAME_KEY: Final = {
    (state, recurs): f"SELECT {ALL} FROM tinyq_jobs WHERE namespace = ? AND task = ? AND key = ? AND state = '{state}' "
    f"AND finished IS NULL AND recurrence IS {'NOT ' * recurs}NULL"
    for state in (State.PENDING, State.RUNNING)
    for recurs in (False, True)
}
REPLACE: Final = f"UPDATE tinyq_jobs SET {', '.join(f'{c} = :{c}' for c in REPLACED)}, ready = :ready WHERE seq = :seq"
FIRE: Final = (
    "INSERT INTO tinyq_schedules (namespace, name, last_fire, rule) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
    "SET last_fire = excluded.last_fire, rule = coalesce(rule, excluded.rule) "
    "WHERE last_fire < excluded.last_fire AND paused = 0 AND coalesce(rule = excluded.rule, 1)"
)
DEFINE: Final = (
    "INSERT INTO tinyq_schedules (namespace, name, rule, last_fire) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
    "SET rule = excluded.rule, last_fire = CASE WHEN coalesce(rule = excluded.rule, 1) THEN last_fire "
    "ELSE max(last_fire, ?) END RETURNING last_fire, paused"
)
SUSPEND: Final = (
    "INSERT INTO tinyq_schedules (namespace, name, last_fire, paused) VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET paused = 1"
)
UNSUSPEND: Final = (
    "UPDATE tinyq_schedules SET paused = 0, last_fire = max(last_fire, ?) WHERE namespace = ? AND name = ? AND paused"
)
UNDEFINE: Final = "DELETE FROM tinyq_schedules WHERE namespace = ? AND name = ?"
OVERLAP: Final = (
    "SELECT seq, state = 'pending' AND attempts > 0 FROM tinyq_jobs WHERE namespace = ? AND schedule = ? AND finished IS NULL"
)

# The claim. First whether there is anything at all: what comes due next, and the lowest lane (0: a stray) of each claim index.
EDGES: Final = (
    "SELECT (SELECT min(run_at) FROM tinyq_jobs WHERE ready = 0 AND namespace = here.name), "
    "(SELECT min(lane) FROM tinyq_jobs WHERE ready = 1), (SELECT min(lane) FROM tinyq_jobs WHERE ready = 3), "
    "(SELECT json_group_array(queue) FROM tinyq_paused WHERE namespace = here.name) FROM (SELECT ? AS name) AS here"
)
# The recursion jumps from one non-empty group of lanes of the namespace to the next, whatever is in them. See lane_of.
GROUPS: Final = """
WITH RECURSIVE head(lane) AS (
    SELECT min(lane) FROM tinyq_jobs WHERE ready = 1 AND lane BETWEEN :first AND :last
    UNION ALL
    SELECT (SELECT min(n.lane) FROM tinyq_jobs n WHERE n.ready = 1 AND n.lane > head.lane | :within AND n.lane <= :last)
    FROM head WHERE head.lane IS NOT NULL
) SELECT j.queue, j.task, j.limit_value, head.lane,
    (SELECT max(n.lane) FROM tinyq_jobs n WHERE n.ready = 1 AND n.lane BETWEEN head.lane AND head.lane | :within)
    FROM head LEFT JOIN tinyq_jobs j ON j.seq = (SELECT n.seq FROM tinyq_jobs n WHERE n.ready = 1 AND n.lane = head.lane LIMIT 1)
    WHERE head.lane IS NOT NULL AND coalesce(j.namespace, :namespace) = :namespace"""
# And this one from lane to lane within a group, for so many.
LANES: Final = """
WITH RECURSIVE head(lane) AS (
    SELECT min(lane) FROM tinyq_jobs WHERE ready = 1 AND lane BETWEEN :first AND :last
    UNION ALL
    SELECT (SELECT min(n.lane) FROM tinyq_jobs n WHERE n.ready = 1 AND n.lane > head.lane AND n.lane <= :last)
    FROM head WHERE head.lane IS NOT NULL LIMIT :most
) SELECT j.queue, j.task, j.limit_value, head.lane
    FROM head JOIN tinyq_jobs j ON j.seq = (SELECT n.seq FROM tinyq_jobs n WHERE n.ready = 1 AND n.lane = head.lane LIMIT 1)
    WHERE j.namespace = :namespace"""
LANE_HEADS: Final = (
    "SELECT priority, run_at, seq FROM tinyq_jobs WHERE ready = 1 AND lane = ? ORDER BY priority DESC, run_at, seq LIMIT ?"
)
# The same for jobs whose tasks have terms, with what these ask for.
GATED_HEADS: Final = LANE_HEADS.replace("seq FROM", "seq, task, limit_value, singly IS NOT NULL OR lost > 1 FROM")
GATHERED: Final = "SELECT count(*), min(run_at) FROM (SELECT run_at FROM tinyq_jobs WHERE ready = 1 AND lane = ? LIMIT ?)"
FRAGILE_GROUPS: Final = GROUPS.replace(
    "ready = 1", "ready = 3"
)  # a partial index is used only where its condition is spelled out
FRAGILE_LANES: Final = LANES.replace("ready = 1", "ready = 3")
FRAGILE_GATED: Final = GATED_HEADS.replace("ready = 1", "ready = 3")
FRAGILE_HEADS: Final = LANE_HEADS.replace("ready = 1", "ready = 3")
STRAYS: Final = (
    "SELECT seq, namespace, queue, task, NULL, singly FROM tinyq_jobs WHERE ready = 1 AND lane = 0 UNION ALL "
    "SELECT seq, namespace, queue, task, NULL, singly FROM tinyq_jobs WHERE ready = 3 AND lane = 0 LIMIT 500"
)
# Those that were stored without the value that their limits go by: by a process that knows the task by name alone, or before
# it had a limit, or one that went by something else.
UNVALUED: Final = (
    "SELECT seq, queue, task, payload, payload_version, singly FROM tinyq_jobs "
    "WHERE ready = 1 AND lane = ? AND limit_value IS ? LIMIT 500"
)
FRAGILE_UNVALUED: Final = UNVALUED.replace("ready = 1", "ready = 3")
VALUE: Final = "UPDATE tinyq_jobs SET limit_value = ?, lane = ? WHERE seq = ?"
HOLDERS: Final = (  # the calls that run: those of one claim, which may be many jobs, have begun at one moment
    "SELECT {what} FROM tinyq_jobs WHERE state = 'running' AND limit_value IS NOT NULL "
    "AND namespace = ? AND task = ? AND limit_value BETWEEN ? AND ?"
)
LAST_VALUE: Final = "\U0010ffff"  # after all that there are
FULL_AT: Final = "SELECT full_at FROM tinyq_rates WHERE namespace = ? AND task = ? AND value = ?"
SPEND: Final = "INSERT INTO tinyq_rates VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET full_at = excluded.full_at"
REGROUP: Final = "UPDATE tinyq_jobs SET singly = ?, lane = 0 WHERE seq = ?"
COME_DUE: Final = (
    "UPDATE tinyq_jobs SET ready = CASE WHEN lost > 0 THEN 3 ELSE 1 END WHERE seq IN (SELECT seq FROM tinyq_jobs "
    "WHERE ready = 0 AND namespace = ? AND run_at <= ? ORDER BY run_at, priority DESC LIMIT ?)"
)
COME_DUE_THESE: Final = f"UPDATE tinyq_jobs SET ready = 1 WHERE {AMONG}"
UPCOMING: Final = "SELECT min(run_at) FROM tinyq_jobs WHERE ready = 0 AND namespace = ? AND run_at > ?"
# A claim reads first and then writes: with RETURNING an UPDATE or a DELETE takes twice as long, as SQLite then goes through all
# rows twice and unpacks the whole of each, as for a trigger.
CLAIM: Final = (
    "UPDATE tinyq_jobs SET state = 'running', ready = NULL, worker = ?, lease = ?, started = ?, claim_no = claim_no + 1, "
    f"attempts = attempts + 1 WHERE {AMONG}"
)
HELD_SINCE: Final = f"SELECT seq FROM tinyq_jobs WHERE {AMONG} AND state = 'running' AND worker = ? AND started = ?"
CHOSEN: Final = "seq, id, task, queue, priority, run_at, created, payload"  # and, last, whether there is more to know
RECURRING_HAS: Final = "key, recurrence, fire_time, claim_no"  # what is to be known of a recurring job besides
READ_CHOSEN: Final = (
    f"SELECT {CHOSEN}, CASE WHEN recurrence IS NOT NULL "
    "AND (attempts, lost, snoozes, interruptions, payload_version) = (0, 0, 0, 0, 1) "
    "AND coalesce(options, headers, reason, error, parked, cancel_at, limit_value, singly) IS NULL THEN 2 ELSE "
    "claim_no > 0 OR payload_version <> 1 "
    "OR coalesce(options, headers, key, expires, schedule, reason, cancel_at, limit_value) IS NOT NULL END "
    f"FROM tinyq_jobs WHERE namespace = ? AND {AMONG}"
)
# The best of a lane with all that, where they are going to be chosen.
READ_HEADS: Final = READ_CHOSEN.replace(AMONG, "ready = 1 AND lane = ? ORDER BY priority DESC, run_at, seq LIMIT ?")
READ_RECURRING: Final = (  # the same where many recur
    f"SELECT {CHOSEN}, {RECURRING_HAS}, (attempts, lost, snoozes, interruptions, payload_version) <> (0, 0, 0, 0, 1) "
    "OR coalesce(options, headers, expires, schedule, reason, error, parked, cancel_at, limit_value, singly) IS NOT NULL "
    f"FROM tinyq_jobs WHERE namespace = ? AND {AMONG}"
)
# Where nothing waits, what has come due can be claimed as it is, and need not go through the claim index.
# One of some parts of it: of many, whole blocks of rows, so that few pages of the file are written by more than one worker.
DUE_NOW: Final = READ_RECURRING.replace(
    f"{RECURRING_HAS}, ", f"{RECURRING_HAS}, lane, singly IS NOT NULL, lost > 0 OR limit_value IS NOT NULL, "
).replace(AMONG, "ready = 0 AND run_at <= ? AND (seq / ?) % ? = ? ORDER BY run_at, priority DESC LIMIT ?")
COLUMNS_OF: Final = {READ_CHOSEN: 9, READ_HEADS: 9, READ_RECURRING: 13, DUE_NOW: 16}  # how many; see rows_of
# How many, since when, whether all have one priority, over how many rows, and the task of one of the first.
DUE_SPAN: Final = (
    "SELECT jobs, since, alike, last - first, (SELECT task FROM tinyq_jobs WHERE seq = first) FROM ("
    "SELECT count(*) AS jobs, min(run_at) AS since, min(priority) = max(priority) AS alike, min(seq) AS first, max(seq) AS last "
    "FROM (SELECT seq, run_at, priority FROM tinyq_jobs WHERE ready = 0 AND namespace = ? AND run_at <= ? "
    "ORDER BY run_at, priority DESC LIMIT ?))"
)
DUE_ALIKE: Final = (  # whether those are of one lane, and nothing about any of them concerns the claim
    "SELECT min(lane) = max(lane) AND min(lane) <> 0 "
    "AND max(lost > 0 OR limit_value IS NOT NULL OR singly IS NOT NULL) = 0 FROM ("
    "SELECT lane, lost, limit_value, singly FROM tinyq_jobs WHERE ready = 0 AND namespace = ? AND run_at <= ? "
    "ORDER BY run_at, priority DESC LIMIT ?)"
)
READ_WHOLE: Final = f"SELECT {ALL} FROM tinyq_jobs WHERE {AMONG}"
SPECIAL: Final = 1  # what READ_CHOSEN says of a row that is to be read whole
RECURRING_ONLY: Final = 2  # and of a recurring job of which only RECURRING_HAS is more to know
MORE_OF_RECURRING: Final = f"SELECT seq, {RECURRING_HAS} FROM tinyq_jobs WHERE {AMONG}"
EXTEND: Final = (
    "UPDATE tinyq_jobs SET lease = ?, error = coalesce(claim.value ->> 2, error) FROM json_each(?) AS claim "
    "WHERE seq = claim.value ->> 0 AND claim_no = claim.value ->> 1 AND state = 'running' RETURNING seq, cancel_at"
)
HOW_FAR: Final = (
    "UPDATE tinyq_jobs SET progress = claim.value ->> 2 FROM json_each(?) AS claim "
    "WHERE seq = claim.value ->> 0 AND claim_no = claim.value ->> 1 AND state = 'running' RETURNING seq"
)
STILL_HELD: Final = (
    "SELECT claim.key, job.task, job.key, job.cancel_at, job.recurrence, job.tally, job.fire_time "
    "FROM json_each(?) AS claim CROSS JOIN tinyq_jobs AS job "
    "ON job.seq = claim.value ->> 0 WHERE job.claim_no = claim.value ->> 1 AND job.state = 'running' AND job.lease < ?"
)
DONE_WITH: Final = f"DELETE FROM tinyq_jobs WHERE {AMONG} AND claim_no = ? AND state = 'running' AND lease < ? AND key IS NULL"
DELETE: Final = f"DELETE FROM tinyq_jobs WHERE {AMONG}"
SETTLE: Final = (
    "UPDATE tinyq_jobs SET state = ?, ready = ?, run_at = ?, attempts = ?, snoozes = ?, interruptions = ?, lost = ?, "
    "parked = ?, reason = ?, error = ?, traceback = ?, result = ?, keep_until = ?, finished = ?, lease = NULL, "
    "progress = CASE WHEN ? THEN progress END WHERE seq = ?"
)
MOVE_ON: Final = (
    "UPDATE tinyq_jobs SET state = ?, ready = ?, run_at = ?, attempts = ?, snoozes = ?, interruptions = ?, lost = ?, parked = ?, "
    "reason = ?, error = ?, traceback = ?, fire_time = ?, tally = ?, progress = NULL, cancel_at = NULL, lease = NULL "
    "WHERE seq = ?"
)
# All that ran to the same period, if nobody has changed them since. Numbers of claims only grow: if their sum is the one that was
# expected, each of them is.
MOVE_ON_AS_USUAL: Final = (
    "UPDATE tinyq_jobs SET state = 'pending', ready = 0, run_at = fire_time + ?, fire_time = fire_time + ?, "
    f"tally = (CAST(coalesce(tally, '{NO_RUNS}') AS INTEGER) + 1) "  # the first number; the last one becomes the fire time
    f"|| trim(coalesce(tally, '{NO_RUNS}'), '0123456789') || fire_time, "
    "attempts = 0, snoozes = 0, interruptions = 0, lost = 0, parked = NULL, reason = NULL, error = NULL, traceback = NULL, "
    f"progress = NULL, lease = NULL WHERE {AMONG} AND state = 'running' AND lease < ? AND cancel_at IS NULL "
    f"AND recurrence = ? AND (SELECT sum(claim_no) FROM tinyq_jobs WHERE {AMONG}) = ?"
)
RESCHEDULE: Final = (
    "UPDATE tinyq_jobs SET task = :task, payload = :payload, payload_version = :payload_version, options = :options, "
    "headers = :headers, queue = :queue, lane = :lane, limit_value = :limit_value, priority = :priority, "
    "recurrence = :recurrence WHERE seq = :seq"
)
AFRESH: Final = "attempts = 0, snoozes = 0, interruptions = 0"
START_AFRESH: Final = (
    f"UPDATE tinyq_jobs SET run_at = ?, fire_time = ?, {AFRESH}, ready = ? WHERE seq = ? AND state = 'pending' AND ready <> 4"
)
RELEASE: Final = (
    "UPDATE tinyq_jobs SET run_at = min(run_at, ?), ready = CASE WHEN min(run_at, ?) > ? THEN 0 WHEN lost > 0 THEN 3 ELSE 1 END "
    "WHERE seq = ?"
)
CANCEL_PENDING: Final = (
    "UPDATE tinyq_jobs SET state = 'cancelled', ready = NULL, reason = ?, finished = ?, keep_until = ? "
    "WHERE namespace = ? AND id = ? AND state = 'pending'"
)
CANCEL_RUNNING: Final = (
    "UPDATE tinyq_jobs SET cancel_at = coalesce(cancel_at, ?) WHERE namespace = ? AND id = ? AND state = 'running'"
)
# One row for each start of a process that claims: where its doorbell is, and when it was last heard of.
ENLIST: Final = "INSERT INTO tinyq_workers VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET seen = excluded.seen"
STRIKE_OFF: Final = "DELETE FROM tinyq_workers WHERE id = ? OR seen < ?"
OTHERS: Final = (  # how many there are, and how many come before
    "SELECT count(*), count(nullif(id < ?, 0)) FROM tinyq_workers "
    "WHERE namespace = ? AND id <> ? AND port IS NOT NULL AND seen >= ?"
)
DUE: Final = (
    "SELECT count(*) FROM (SELECT 1 FROM tinyq_jobs WHERE ready = 1 AND lane BETWEEN :first AND :last "
    "UNION ALL SELECT 1 FROM tinyq_jobs WHERE ready = 3 AND lane BETWEEN :first AND :last LIMIT :most)"
)
PORTS: Final = "SELECT port FROM tinyq_workers WHERE namespace = ? AND id <> ? AND port IS NOT NULL AND seen >= ?"
# Of a lane, the job that waits longest among those of the highest priority, and among those of the lowest.
OVERDUE: Final = """
SELECT min(run_at), (SELECT count(*) FROM (SELECT 1 FROM tinyq_jobs WHERE ready = 1 AND lane = :lane LIMIT 10000)) FROM (
    SELECT (SELECT min(run_at) FROM tinyq_jobs WHERE ready = 1 AND lane = :lane AND priority = here.best) AS run_at
    FROM (SELECT (SELECT max(priority) FROM tinyq_jobs WHERE ready = 1 AND lane = :lane) AS best UNION ALL
          SELECT (SELECT min(priority) FROM tinyq_jobs WHERE ready = 1 AND lane = :lane)) AS here
)"""
OVERDUE_LATER: Final = (  # what no claim has moved over, as no slot is free
    "SELECT queue, task, coalesce(limit_value, ''), min(run_at), count(*) FROM (SELECT queue, task, limit_value, run_at "
    "FROM tinyq_jobs WHERE ready = 0 AND namespace = ? AND run_at < ? ORDER BY run_at LIMIT 10000) GROUP BY 1, 2, 3"
)
COUNTS: Final = (
    "SELECT queue, task, state, count(*), sum(ready IN (1, 3) OR (ready = 0 AND run_at <= ?)) FROM tinyq_jobs "
    "WHERE namespace = ? GROUP BY queue, task, state ORDER BY queue, task, state"
)
# What stands after a payload in the file cannot be read without it.
LIGHT: Final = ", ".join("NULL" if column in ("payload", "result", "progress") else column for column in COLUMNS)
# With the moment said twice SQLite begins where it is in the index: it does not look into a comparison of row values.
RECURRING: Final = (
    f"SELECT {LIGHT} FROM tinyq_jobs WHERE namespace = :namespace AND recurrence IS NOT NULL AND recurrence <> '' "
    "AND finished IS NULL AND seq > :after AND (:task IS NULL OR task = :task) AND (:key IS NULL OR key = :key) "
    "ORDER BY seq LIMIT :limit"
)
DEAD_ROWS: Final = (
    f"SELECT {LIGHT} FROM tinyq_jobs WHERE namespace = :namespace AND state = 'dead' AND finished <= :finished "
    "AND (finished, seq) < (:finished, :seq) AND (:task IS NULL OR task = :task) ORDER BY finished DESC, seq DESC LIMIT :limit"
)
PAUSE: Final = "INSERT OR IGNORE INTO tinyq_paused (namespace, queue) VALUES (?, ?)"
RESUME: Final = "DELETE FROM tinyq_paused WHERE namespace = ? AND queue = ?"


# ── 15. SQLite store: rows in one transaction ─────────────────────────────────────────────────────────────────────────
# What each verb does to the file, given a connection inside BEGIN IMMEDIATE. Plain functions in the thread of the owner.


LANE_BITS: Final = 24  # of a lane's number, that tell the lanes of a group apart


@functools.cache
def lane_range(namespace: str) -> dict[str, Any]:
    """Between which numbers all lanes of a namespace are (and, once in 30,000, those of another one, too)."""
    number = digest(namespace) >> 49
    return {"namespace": namespace, "first": number << 48, "last": (number + 1 << 48) - 1, "within": (1 << LANE_BITS) - 1}


@functools.lru_cache(10_000)
def lane_of(namespace: str, queue: str, task: str, value: str | None = None, singly: int | None = None) -> int:
    """The lane of a job as a number, a hash: an index of numbers costs half of one with their names in it. The lanes of a queue
    and a task are a group, of which most have one: each value that limits go by has its own, and each kind of call. What a
    hand has inserted, or moved to another task or queue, has none at first: the number 0."""
    group = digest("\0".join((namespace, queue, task))) >> 40 << LANE_BITS
    kind = (queue, task, *(() if value is None else (value,)), str(singly))  # what has no value yet has another than ''
    return cast(int, lane_range(namespace)["first"]) | group | digest("\0".join(kind)) >> 40


STATES: Final = {str(state): state for state in State}


@functools.cache
def handing_over(select: str) -> str:
    names = ", ".join(f"c{number}" for number in range(COLUMNS_OF[select]))
    return f"WITH found({names}) AS ({select}) SELECT count(tinyq_row({names})) FROM found"


def rows_of(db: sqlite3.Connection, select: str, parameters: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
    """The rows of one of COLUMNS_OF. A cursor lets the GIL go and takes it again for each column of each row, while a
    function that the statement calls is given whole rows."""
    import sqlite3

    handed: list[tuple[Any, ...]] | None = getattr(db, "handed", None)
    if handed is not None and db.text_factory is str:
        try:
            db.execute(handing_over(select), parameters).fetchone()
            return handed.copy()
        except sqlite3.OperationalError as error:
            if "user-defined function" not in str(error):
                raise  # else there is text that is not UTF-8, of which a cursor tells
        finally:
            handed.clear()
    return db.execute(select, parameters).fetchall()


def as_row(values: Sequence[Any]) -> JobRow:
    """A row out of a SELECT of ALL."""
    row: JobRow = object.__new__(JobRow)
    vars(row).update(zip(COLUMNS, values, strict=True))
    row.durable, row.state = True, STATES[row.state]
    return row


def as_values(row: JobRow) -> dict[str, Any]:
    return dict(zip(COLUMNS, values_of(row), strict=True))


def paused_queues(db: sqlite3.Connection, namespace: str) -> frozenset[str]:
    return frozenset(queue for (queue,) in db.execute("SELECT queue FROM tinyq_paused WHERE namespace = ?", (namespace,)))


def insert_rows(db: sqlite3.Connection, namespace: str, rows: Sequence[JobRow], now: int) -> list[Inserted]:
    inserted: list[Inserted] = []
    for new, some in itertools.groupby(rows, is_new):
        if new:
            batch = list(some)
            insert_new(db, namespace, batch, now)
            inserted += [Inserted(row, "created") for row in batch]
        else:
            inserted += [insert_special(db, namespace, row, now) for row in some]
    return inserted


def is_new(row: JobRow) -> bool:
    """Whether a row is nothing but a new job, so that its insertion meets no other row."""
    return row.key is None and row.schedule is None and row.claim_no == 0


chained: Final = itertools.chain.from_iterable


def insert_alike(
    db: sqlite3.Connection, statements: Mapping[int, str], rows: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]
) -> None:
    """Rows as what the statements ask for: of its kind, and of each. (The id as bytearray: for bytes sqlite3 first looks for an
    adapter, which takes as long as half of the insertion.)"""
    if len(rows) == 1:
        db.executemany(statements[1], [tuple(chained(rows[0]))])
        return
    for kind, some in itertools.groupby(rows, lambda row: row[0]):
        values, place = [each for _, each in some], 0
        for count, statement in statements.items():
            if len(values) - place >= count:
                ends = range(place + count, len(values) + 1, count)
                db.executemany(statement, [(*kind, *chained(values[end - count : end])) for end in ends])
                place = ends[-1]


def insert_new(db: sqlite3.Connection, namespace: str, rows: Iterable[JobRow], now: int) -> None:
    insert_alike(
        db, NEW,
        [
            ((namespace, LATER if row.run_at > now else CLAIMABLE,
              row.lane or lane_of(namespace, row.queue, row.task, row.limit_value), row.task, row.queue, row.priority,
              row.payload_version, row.options, row.headers, row.expires, row.limit_value),
             (bytearray(row.id), row.run_at, row.created, row.payload))
            for row in rows
        ],
    )  # fmt: skip


def insert_all(db: sqlite3.Connection, namespace: str, rows: Sequence[JobRow], now: int) -> None:
    """New rows. One that comes with a lease is to be handed over, and loses it if something of its queue is due before it."""
    handed = [row for row in rows if row.lease is not None]
    if handed:
        due = [(queue, task) for queue, task, *_ in db.execute(GROUPS, lane_range(namespace))]
        paused = paused_queues(db, namespace)
        for row in handed:
            if row.queue in paused or any(queue == row.queue and task not in row.overtakes for queue, task in due):
                row.worker = row.lease = row.started = None
        handed = [row for row in handed if row.lease is not None]
        insert_handed(db, namespace, handed)
    if len(handed) < len(rows):
        insert_new(db, namespace, [row for row in rows if row.lease is None], now)


def insert_handed(db: sqlite3.Connection, namespace: str, rows: Sequence[JobRow]) -> None:
    """Rows that are already leased to the worker who inserts them, and their numbers, which follow one another."""
    insert_alike(
        db, HANDED,
        [
            ((namespace, row.task, row.queue, row.lane or lane_of(namespace, row.queue, row.task), row.priority,
              row.payload_version, row.options, row.headers, row.expires, row.worker),
             (bytearray(row.id), row.run_at, row.created, row.payload, row.lease, row.started))
            for row in rows
        ],
    )  # fmt: skip
    last = db.execute(LAST_ROW).fetchone()[0]
    for seq, row in enumerate(rows, last - len(rows) + 1):
        row.seq = seq


def insert_special(db: sqlite3.Connection, namespace: str, row: JobRow, now: int) -> Inserted:
    """A row with a key, an occurrence of a schedule, or a job that has run before."""
    row.namespace, row.ready = namespace, claimable(row.run_at, row.lost, now)
    row.lane = lane_of(namespace, row.queue, row.task, row.limit_value, row.singly)
    superseded = False
    if row.schedule is not None and not row.by_hand:
        others = db.execute(OVERLAP, (row.namespace, row.schedule)).fetchall()
        overlaps = not all(waits for _, waits in others)
        if overlaps and row.overlap == "wait":
            return Inserted(row, "overlap")
        if db.execute(FIRE, (row.namespace, row.schedule, row.fire_time, row.rule)).rowcount == 0:
            return Inserted(row, why_not_fired(db, row))
        superseded = any(waits for _, waits in others)
        db.execute(DELETE, (encode_json([seq for seq, waits in others if waits]),)) if superseded else None
        if overlaps and row.overlap == "skip":
            return Inserted(row, "overlap")
    if row.key is not None:
        pending, running = namesakes(db, row)
        known = pending or running
        if known is not None and row.recurrence is not None:
            return reschedule(db, known, row, now)
        action = resolve_key(row.on_conflict, pending, running)
        if action == "conflict":
            raise key_conflict(row)
        if known is not None and known.task != row.task:  # its name stays, under which the two are told apart and set free
            row.task, row.lane = known.task, lane_of(namespace, row.queue, known.task, row.limit_value, row.singly)
        if action == "replace" and pending is not None:
            ready = HELD if running else claimable(row.run_at, pending.lost, now)
            db.execute(REPLACE, {name: getattr(row, name) for name in REPLACED} | {"ready": ready, "seq": pending.seq})
            return Inserted(same_key(db, row, State.PENDING) or row, "replaced")
        existing = pending if action == "pending" else running if action == "running" else None
        if existing is not None:
            return Inserted(existing, "existing")
        row.ready = HELD if action == "hold" else row.ready
    db.execute(INSERT, as_values(row))
    return Inserted(row, "created", superseded)


def reschedule(db: sqlite3.Connection, known: JobRow, row: JobRow, now: int) -> Inserted:
    """Give a recurring job other arguments, options or another rule; of one that runs, from its next run on."""
    row.recurrence, afresh = redefined(cast(str, known.recurrence), cast(str, row.recurrence))
    row.seq = known.seq
    told = (
        "task", "payload", "payload_version", "options", "headers", "queue", "lane", "limit_value", "priority", "recurrence",
        "seq",
    )  # fmt: skip
    if all(getattr(known, name) == getattr(row, name) for name in told):
        return Inserted(known, "existing")
    if known.state is State.RUNNING:  # where it counts until its end; its next claim finds out the value anew
        row.lane, row.limit_value = 0, known.limit_value
    db.execute(RESCHEDULE, {name: getattr(row, name) for name in told})
    if afresh:
        db.execute(START_AFRESH, (row.run_at, row.fire_time, claimable(row.run_at, 0, now), known.seq))
    return Inserted(same_key(db, row, known.state) or row, "replaced")


def hold_row(db: sqlite3.Connection, namespace: str, id: bytes, paused: bool, now: int) -> bool:
    for row in read_rows(db, namespace, [id], LIGHT):
        if row.recurrence and row.finished is None:
            recurrence = recurrence_of(row.recurrence)._replace(paused=paused)
            db.execute("UPDATE tinyq_jobs SET recurrence = ? WHERE seq = ?", (recurrence.as_text(), row.seq))
            if row.state is State.PENDING and paused:
                db.execute("UPDATE tinyq_jobs SET ready = ? WHERE seq = ?", (PAUSED, row.seq))
            elif row.ready == PAUSED and not paused:
                upcoming = rule_from(recurrence.rule).next_at(max(now, Tally.of(row.tally).last))
                again = f"UPDATE tinyq_jobs SET ready = ?, run_at = ?, fire_time = ?, {AFRESH} WHERE seq = ?"
                db.execute(again, (claimable(upcoming, row.lost, now), upcoming, upcoming, row.seq))
            return True
    return False


def unschedule_row(db: sqlite3.Connection, namespace: str, task: str, key: str) -> bool:
    where = "WHERE namespace = ? AND task = ? AND key = ? AND recurrence <> '' AND finished IS NULL AND state = "
    deleted = db.execute(f"DELETE FROM tinyq_jobs {where} 'pending'", (namespace, task, key)).rowcount
    return deleted + db.execute(f"UPDATE tinyq_jobs SET recurrence = '' {where} 'running'", (namespace, task, key)).rowcount > 0


def why_not_fired(db: sqlite3.Connection, row: JobRow) -> Literal["lost", "paused", "stale"]:
    select = "SELECT coalesce(rule <> ?, 0), paused FROM tinyq_schedules WHERE namespace = ? AND name = ?"
    stale, paused = db.execute(select, (row.rule, row.namespace, row.schedule)).fetchone()
    return "stale" if stale else "paused" if paused else "lost"


def namesakes(db: sqlite3.Connection, row: JobRow) -> tuple[JobRow | None, JobRow | None]:
    """What waits and what runs with its key; if nothing does, under a name that its task had before."""
    pending = running = None
    for name in (row.task, *(row.handler.aliases if row.handler is not None else ())):
        if pending is None and running is None:
            known = row if name == row.task else row.but(task=name)
            pending, running = same_key(db, known, State.PENDING), same_key(db, known, State.RUNNING)
    return pending, running


def same_key(db: sqlite3.Connection, row: JobRow, state: State) -> JobRow | None:
    select = SAME_KEY[state, row.recurrence is not None]
    found = db.execute(select, (row.namespace, row.task, row.key)).fetchone()
    return as_row(found) if found else None


class Lane(NamedTuple):
    """A lane that has room."""

    queue: str
    task: str
    value: str | None  # see JobRow.limit_value
    number: int
    fragile: bool
    slots: int  # that are free for it
    terms: Terms | None
    gathered: int = 0  # how many have come due, if that is all
    due: Sequence[Any] | None = None  # them, best first, where they are in no index yet: see DUE_NOW

    @property
    def unfit(self) -> bool:
        """Whether its jobs were stored without the value that their limits go by now."""
        return self.terms is not None and self.terms.limited and not self.terms.fits(self.value)


LANES_AT_ONCE: Final = 100  # of one group that one claim looks at
LOOK_ON: Final = 20_000  # microseconds until it looks at others


def lanes_of_group(db: sqlite3.Connection, namespace: str, first: int, last: int, fragile: bool, now: int) -> list[Any]:
    """(queue, task, value, lane) of some lanes; of more than are looked at, others each time."""
    lanes, start = FRAGILE_LANES if fragile else LANES, first + digest(str(now)) % (last - first + 1)
    some = {"namespace": namespace, "first": start, "last": last, "most": LANES_AT_ONCE}
    found = db.execute(lanes, some).fetchall()
    if (most := LANES_AT_ONCE - len(found)) > 0:
        found += db.execute(lanes, some | {"first": first, "last": start - 1, "most": most}).fetchall()
    return found


def lanes_with_room(
    db: sqlite3.Connection, namespace: str, room: Room, now: int, fragile: bool = False
) -> tuple[list[Lane], bool]:
    """The lanes for which there are slots; and whether there are others that are served here."""
    lanes, full = list[Lane](), False
    for queue, task, value, first, last in db.execute(FRAGILE_GROUPS if fragile else GROUPS, lane_range(namespace)).fetchall():
        if queue is None:  # the index holds what the table does not: each look would find it again
            raise StoreError("due jobs were found and none can be claimed: see PRAGMA integrity_check, and REINDEX")
        if room.free(queue, task) <= 0:
            full = full or room.wants(queue, task)
            continue
        group = [(queue, task, value, first)] if first == last else lanes_of_group(db, namespace, first, last, fragile, now)
        for queue_name, task_name, value, number in group:
            if (slots := room.free(queue_name, task_name)) > 0:
                lanes.append(Lane(queue_name, task_name, value, number, fragile, slots, room.terms.get(task_name)))
        full = full or len(group) == LANES_AT_ONCE
    return lanes, full


def due_lanes(
    db: sqlite3.Connection, namespace: str, room: Room, first: int | None, first_fragile: int | None, now: int
) -> tuple[list[Lane], list[Lane], bool]:
    """The lanes that have room, those of fragile rows apart, and whether there are others. `first`: see EDGES."""
    lanes, full = lanes_with_room(db, namespace, room, now) if first is not None else ([], False)
    if first_fragile is None:
        return lanes, [], full
    fragile, full_too = lanes_with_room(db, namespace, room, now, fragile=True)
    return lanes, fragile, full or full_too


def plain_heads(db: sqlite3.Connection, room: Room, lane: Lane) -> tuple[list[Any], bool]:
    """The best of a lane whose task has no terms, and whether there may be more."""
    most = min(lane.slots, room.fragile) if lane.fragile else lane.slots
    if lane.due is not None:
        return [(row[4], row[5], row[0]) for row in lane.due[:most]], len(lane.due) >= most
    found = db.execute(FRAGILE_HEADS if lane.fragile else LANE_HEADS, (lane.number, most)).fetchall()
    return found, len(found) == most


GROUP_OF_ITEMS: Final = 2_000  # items for calls that one claim takes of a lane, or one call, if that is more


def gated_heads(db: sqlite3.Connection, room: Room, lane: Lane, limits: Limits, now: int) -> tuple[list[Any], int | None]:
    """The best of a lane whose task has terms, as many as these let start; or when those that wait for others have waited."""
    terms, slots = cast(Terms, lane.terms), min(lane.slots, room.fragile) if lane.fragile else lane.slots
    most = limits.most(terms, lane.value or "", slots)
    if most <= 0:
        return [], None
    [head] = gated_rows(db, lane, 1) or [None]
    if head is not None and terms.window and not (lane.fragile or head[5]):
        if lane.due is not None:
            count, first_run_at = lane.gathered, min(row[5] for row in lane.due[: terms.size])
        else:
            count, first_run_at = db.execute(GATHERED, (lane.number, terms.size)).fetchone()
        if count and (wait := terms.ripe_at([first_run_at], count)) > now:  # others may have taken them since the head was read
            limits.gathering.update(terms.names)
            return [], wait
    if head is not None and head[5]:
        most = min(most, slots)  # each in a call of its own
    return gated_rows(db, lane, min(most, max(terms.size, GROUP_OF_ITEMS))), None


def gated_rows(db: sqlite3.Connection, lane: Lane, most: int) -> list[Any]:
    if lane.due is not None:
        return [(row[4], row[5], row[0], row[2], lane.value, row[13]) for row in lane.due[:most]]
    return db.execute(FRAGILE_GATED if lane.fragile else GATED_HEADS, (lane.number, most)).fetchall()


LONG_WINDOW: Final = 100_000  # microseconds that what waits for others to go with is left where it is
SHARED_OUT: Final = 100  # jobs; fewer go to whoever comes first
BLOCK: Final = 32  # rows, which take some pages
MANY_BLOCKS: Final = 32  # so many can be shared out evenly
FRESH_FOR: Final = 10_000  # microseconds that due jobs are left for the others; then whoever has room may have them


class Share(NamedTuple):
    """Of which worker's claim this is, when it is made, and since when others must have been seen to count as alive."""

    worker: str
    now: int
    seen: int
    due: int | None = None  # how many jobs there are, if that is known

    def of(self, db: sqlite3.Connection, namespace: str, wanted: int, since: int) -> int:
        """How many it takes of jobs the first of which came due at `since`: if they have only just done so, as many as each of
        the workers if they share them evenly."""
        if wanted <= 1 or since <= self.now - FRESH_FOR:
            return wanted
        others, _ = self.others(db, namespace)
        if not others:
            return wanted
        due = self.due
        if due is None:
            due = cast(int, db.execute(DUE, lane_range(namespace) | {"most": wanted * (others + 1)}).fetchone()[0])
        return max(1, math.ceil(due / (others + 1)))

    def others(self, db: sqlite3.Connection, namespace: str) -> tuple[int, int]:
        """How many others there are, and how many of them come before this one in their order."""
        return cast("tuple[int, int]", db.execute(OTHERS, (self.worker, namespace, self.worker, self.seen)).fetchone())

    def part(self, db: sqlite3.Connection, namespace: str, count: int, since: int) -> tuple[int, int]:
        """Into how many parts so many jobs are divided that have only just come due, and which of them is to be taken: so that no
        worker reads what is another's."""
        if count < SHARED_OUT or since <= self.now - FRESH_FOR:
            return 1, 0
        others, before = self.others(db, namespace)
        return others + 1, before


class Choice(NamedTuple):
    """What a claim would take."""

    seqs: Sequence[int]
    more: bool  # something due may be left
    wait: int | None = None  # when there is something again, whose time has come but for a rate or a window
    spent: Iterable[tuple[str, str, Rate, int]] = ()
    recurring: bool = False  # most of them, it may be
    read: Sequence[Sequence[Any]] | None = None  # what READ_RECURRING then says of them, or READ_CHOSEN, if that is known
    limited: frozenset[str] = frozenset()  # see Claimed


def candidates(
    db: sqlite3.Connection, namespace: str, room: Room, lanes: Sequence[Lane], fragile: Sequence[Lane], now: int,
    share: Share | None = None,
) -> Choice:  # fmt: skip
    """The heads of every lane that has room, merged by priority, time and sequence."""
    limits = Limits(room, functools.partial(left_in_all, db, namespace, now), by_start=True)
    if len(lanes) == 1 and not fragile and not lanes[0].unfit and (lanes[0].terms is None or not lanes[0].terms.limited):
        return of_one_lane(db, namespace, room, lanes[0], limits, now, share)
    heads: list[tuple[int, int, int, Candidate]] = []
    more, wait, since = bool(fragile), None, now
    for lane in (*lanes, *(fragile if room.fragile > 0 else ())):
        ripe_at, window = None, 0
        if lane.unfit:  # of so many that some have to wait for the next claim
            more = True
            continue
        if lane.terms is None:
            found, full = plain_heads(db, room, lane)
            plain = (lane.queue, lane.task, lane.fragile, "", True)
            heads += [(-priority, run_at, seq, (*plain, seq)) for priority, run_at, seq in found]
        else:
            found, ripe_at = gated_heads(db, room, lane, limits, now)
            full, window = len(found) >= lane.slots * lane.terms.size, lane.terms.window
            heads += [
                (-priority, run_at, seq, (lane.queue, task, lane.fragile, value or "", bool(alone), seq))
                for priority, run_at, seq, task, value, alone in found
            ]
        more, wait = more or full, soonest(wait, ripe_at)
        since = min(since, found[0][1] + window) if found else since
    heads.sort()
    most = len(heads)
    if share is not None:
        most = share.of(db, namespace, most, since)
    picked = room.pick((head[3] for head in heads), limits, most)
    left_for_others = now + FRESH_FOR if most < len(heads) else None
    look_on = now + LOOK_ON if len(lanes) >= LANES_AT_ONCE else None
    recurring = all(lane.terms is not None for lane in (*lanes, *fragile))
    wait = soonest(wait, limits.wait, left_for_others, look_on, now + 1 if limits.one_by_one and picked else None)
    more = more or len(picked) + limits.refused < len(heads)
    return Choice(picked, more, wait, limits.spent, recurring, limited=limits.limited)


def of_one_lane(
    db: sqlite3.Connection, namespace: str, room: Room, lane: Lane, limits: Limits, now: int, share: Share | None
) -> Choice:
    """The same where there is one lane, without limits: all that comes off it fits."""
    ripe_at, window, read = None, 0, None
    if lane.terms is not None:
        found, ripe_at = gated_heads(db, room, lane, limits, now)
        full, window = len(found) >= lane.slots * lane.terms.size, lane.terms.window
    elif lane.due is not None:
        found, full = plain_heads(db, room, lane)
    else:
        read = rows_of(db, READ_HEADS, (namespace, lane.number, lane.slots))
        found, full = [(row[4], row[5], row[0]) for row in read], len(read) == lane.slots
    most = share.of(db, namespace, len(found), found[0][1] + window) if share is not None and found else len(found)
    wait = soonest(ripe_at, now + FRESH_FOR if most < len(found) else None)
    seqs = [row[2] for row in found[:most]]
    return Choice(seqs, full or most < len(found), wait, (), lane.terms is not None, read and read[:most], limits.limited)


def left_in_all(db: sqlite3.Connection, namespace: str, now: int, terms: Terms, value: str) -> Left:
    """What the limits of all processes leave. What has a lease counts until the job is settled or reclaimed, even if that lease
    is over: no step of a clock lets one more start."""
    calls, items, wait = terms.total, math.inf, None
    if terms.total < math.inf:
        select = HOLDERS.format(what="count(*)" if terms.size == 1 else "count(DISTINCT worker || ' ' || started)")
        last = value if terms.by else LAST_VALUE  # what runs since these limits went by a parameter counts as well
        calls -= sum(db.execute(select, (namespace, name, value, last)).fetchone()[0] for name in terms.names)
    if terms.rate is not None:
        known = db.execute(FULL_AT, (namespace, terms.names[0], value)).fetchone()
        items, wait = terms.rate.tokens(known[0] if known else None, now)
    return calls, items, wait


def give_values(db: sqlite3.Connection, namespace: str, lanes: Sequence[Lane]) -> bool:
    """Have what was stored without it get the value that its limits go by. Whether there was any such job."""
    given = 0
    for lane in lanes:
        if not lane.unfit:
            continue
        rows, select = [], FRAGILE_UNVALUED if lane.fragile else UNVALUED
        for seq, queue, task, payload, version, singly in db.execute(select, (lane.number, lane.value)).fetchall():
            value = cast(Terms, lane.terms).value_of(payload, version)
            rows.append((value, lane_of(namespace, queue, task, value, singly), seq))
        given += db.executemany(VALUE, rows).rowcount if rows else 0
    return given > 0


def edges(db: sqlite3.Connection, namespace: str) -> tuple[int | None, int | None, int | None, frozenset[str]]:
    """When the next job comes due, the first lane and the first fragile one, and the queues that are paused."""
    next_at, first, first_fragile, paused = db.execute(EDGES, (namespace,)).fetchone()
    return next_at, first, first_fragile, frozenset(decode_json(paused))


def look_for_due(db: sqlite3.Connection, namespace: str, room: Room, now: int) -> Claimed | None:
    """The answer of a claim that would take nothing and write nothing; None if it would."""
    next_at, first, first_fragile, paused = edges(db, namespace)
    if (next_at is not None and next_at <= now) or first == 0 or first_fragile == 0:
        return None
    room = room.without(paused)
    lanes, fragile, full = due_lanes(db, namespace, room, first, first_fragile, now)
    if not lanes and (not fragile or room.fragile <= 0):
        return Claimed((), next_at, full or bool(fragile), paused)
    if any(lane.terms is None or lane.unfit for lane in (*lanes, *fragile)):
        return None
    choice = candidates(db, namespace, room, lanes, fragile, now)
    if choice.seqs:
        return None
    return Claimed((), soonest(next_at, choice.wait), full or choice.more, paused, choice.limited)


def claim_rows(db: sqlite3.Connection, namespace: str, room: Room, worker: str, lease: int, now: int) -> Claimed:
    next_at, first, first_fragile, paused = edges(db, namespace)
    room, share = room.without(paused), Share(worker, now, now - (lease - now))
    if next_at is not None and next_at <= now:
        lanes, fragile, full = due_lanes(db, namespace, room, first, first_fragile, now)
        if first != 0 and first_fragile != 0 and not lanes and not fragile:
            come = just_due(db, namespace, room, share, full)
            if isinstance(come, Claimed):
                return come
            if come is not None:
                return claim_just_due(db, namespace, room, come, share, lease)
        moved = db.execute(COME_DUE, (namespace, now, room.comes_due)).rowcount
        next_at, first, first_fragile, paused = edges(db, namespace)
        next_at = now if moved == room.comes_due else next_at
    if first == 0 or first_fragile == 0:
        strays = [(lane_of(*where), seq) for seq, *where in db.execute(STRAYS).fetchall()]
        db.executemany("UPDATE tinyq_jobs SET lane = ?, limit_value = NULL WHERE seq = ?", strays)
        next_at = now if len(strays) == 500 else next_at
    lanes, fragile, full = due_lanes(db, namespace, room, first, first_fragile, now)
    if give_values(db, namespace, (*lanes, *fragile)):
        next_at, (lanes, fragile, full) = now, due_lanes(db, namespace, room, first, first_fragile, now)
    choice = candidates(db, namespace, room, lanes, fragile, now, share)
    for task, value, rate, count in choice.spent:
        known = db.execute(FULL_AT, (namespace, task, value)).fetchone()
        db.execute(SPEND, (namespace, task, value, rate.spend(known[0] if known else None, now, count)))
    rows = take(db, namespace, choice, worker, lease, now)
    return Claimed(rows, soonest(next_at, choice.wait), full or choice.more, paused, choice.limited)


class JustDue(NamedTuple):
    """What has come due where nothing else waits, the earliest first."""

    lanes: Sequence[Lane]  # those that have room
    full: bool  # whether others have none, of these or of what waits
    rows: Sequence[Sequence[Any]]  # see DUE_NOW
    whole: bool  # and that is all
    left_until: int  # when others may take what this worker leaves, and this one what they leave
    shared_out: bool  # a part of it is another worker's


def just_due(db: sqlite3.Connection, namespace: str, room: Room, share: Share, full: bool) -> JustDue | Claimed | None:
    """None if the claim index is needed: for limits, for rows without a lane, or where some have been lost before. The answer of
    the claim if all of them wait for others to go with, so that they need not be read yet."""
    some = (namespace, share.now, room.comes_due)
    count, since, alike, span, first = db.execute(DUE_SPAN, some).fetchone()
    if (terms := room.terms.get(first)) is not None and 0 < terms.window <= LONG_WINDOW and not terms.limited:
        ripe_at = terms.ripe_at([since], count)
        if ripe_at > share.now and count < room.comes_due and db.execute(DUE_ALIKE, some).fetchone()[0]:
            upcoming = db.execute(UPCOMING, (namespace, share.now)).fetchone()[0]
            return Claimed((), soonest(ripe_at, upcoming), True, room.paused, frozenset(terms.names[:1]))
    since += min(terms.window, LONG_WINDOW) if terms is not None else 0
    parts, part = share.part(db, namespace, count, since) if alike else (1, 0)
    block = BLOCK if span and span >= MANY_BLOCKS * BLOCK else 1
    rows = rows_of(db, DUE_NOW, (namespace, share.now, block, parts, part, room.comes_due))
    jobs: dict[int, list[Any]] = {}  # by lane
    for row in rows:
        jobs.setdefault(row[12], []).append(row)
    if 0 in jobs or len(jobs) > LANES_AT_ONCE or any(row[14] for row in rows):
        return None
    lanes = list[Lane]()
    for number, due in jobs.items():
        task, queue = due[0][2:4]
        terms, slots = room.terms.get(task), room.free(queue, task)
        if terms is not None and terms.limited:
            return None
        if slots > 0:
            if any(row[4] != due[0][4] for row in due):
                due.sort(key=lambda row: (-row[4], row[5], row[0]))
            gathered = len(due) if parts == 1 else (len(due) + 1) * parts  # as far as one can tell from a part
            lanes.append(Lane(queue, task, None, number, False, slots, terms, gathered, due))
        else:
            full = full or room.wants(queue, task)
    return JustDue(lanes, full, rows, len(rows) == count < room.comes_due, since + FRESH_FOR, parts > 1)


def claim_just_due(db: sqlite3.Connection, namespace: str, room: Room, come: JustDue, share: Share, lease: int) -> Claimed:
    """Take of it what there is room for. What is left stays as it is for a moment, in which others may take it in the same way;
    then it goes where a backlog is cheap to look through."""
    now = share.now
    choice = candidates(db, namespace, room, come.lanes, (), now, None if come.shared_out else share._replace(due=len(come.rows)))
    left = {row[0]: row for row in come.rows}
    choice = choice._replace(read=[left.pop(seq) for seq in choice.seqs], recurring=True)
    rows = take(db, namespace, choice, share.worker, lease, now)
    stays = (come.whole or come.shared_out) and come.left_until > now
    if left and not stays:
        db.execute(COME_DUE_THESE, (encode_json([*left]),))
    done_with_it = come.whole and not (left and stays)
    again = None if done_with_it else come.left_until if stays else now
    upcoming = db.execute(UPCOMING, (namespace, now)).fetchone()[0]
    more = come.full or choice.more or bool(left) or not come.whole
    return Claimed(rows, soonest(again, upcoming, choice.wait), more, room.paused, choice.limited)


def take(db: sqlite3.Connection, namespace: str, choice: Choice, worker: str, lease: int, now: int) -> list[JobRow]:
    """Lease what was chosen to the worker. In the order of the choice, with all that is to be known of it."""
    if not choice.seqs:
        return []
    rows: dict[int, JobRow] = {}
    recurring, special = list[int](), list[int]()
    read = READ_RECURRING if choice.recurring else READ_CHOSEN
    for values in choice.read or rows_of(db, read, (namespace, encode_json(choice.seqs))):
        row: JobRow = object.__new__(ClaimedRow)  # (an update of its `vars` would give each a dictionary of its own)
        rows[values[0]] = row
        row.seq, row.id, row.task, row.queue, row.priority, row.run_at, row.created, row.payload = values[:8]
        row.worker, row.lease, row.started = worker, lease, now
        if choice.recurring:
            row.key, row.recurrence, row.fire_time, row.claim_no = values[8:12]
            row.claim_no += 1
        if values[-1] == SPECIAL:
            special.append(row.seq)
        elif values[-1] == RECURRING_ONLY:
            recurring.append(row.seq)
    if db.execute(CLAIM, (worker, lease, now, encode_json([*rows]))).rowcount != len(rows):  # a trigger of somebody else's?
        held = {seq for (seq,) in db.execute(HELD_SINCE, (encode_json([*rows]), worker, now))}
        rows = {seq: row for seq, row in rows.items() if seq in held}
        recurring, special = ([seq for seq in seqs if seq in held] for seqs in (recurring, special))
    if recurring:
        for seq, *others in db.execute(MORE_OF_RECURRING, (encode_json(recurring),)):
            row = rows[seq]
            row.key, row.recurrence, row.fire_time, row.claim_no = others
    if special:
        for row in map(as_row, db.execute(READ_WHOLE, (encode_json(special),))):
            rows[row.seq] = row
    return [rows[seq] for seq in choice.seqs if seq in rows]


def unknown_heads(db: sqlite3.Connection, namespace: str, known: Iterable[str]) -> dict[int, str]:
    """The first due job of each lane whose task is not among the known ones: seq and task."""
    heads: dict[int, str] = {}
    for groups, lane_heads in ((GROUPS, LANE_HEADS), (FRAGILE_GROUPS, FRAGILE_HEADS)):
        for _, task_name, _, lane, _ in db.execute(groups, lane_range(namespace)).fetchall():
            if task_name not in known:
                heads |= {seq: task_name for _, _, seq in db.execute(lane_heads, (lane, 1))}
    return heads


def overdue_lanes(db: sqlite3.Connection, namespace: str, before: int) -> list[Overdue]:
    found, paused = list[Overdue](), paused_queues(db, namespace)
    for queue, _, _, first, last in db.execute(GROUPS, lane_range(namespace)).fetchall():
        lanes = {"namespace": namespace, "first": first, "last": last, "most": LANES_AT_ONCE}
        for queue_name, task_name, value, lane in db.execute(LANES, lanes).fetchall() if queue not in paused else ():
            since, count = db.execute(OVERDUE, {"lane": lane}).fetchone()
            if since is not None and since < before:
                found.append(Overdue(queue_name, task_name, value or "", since, count))
    not_moved = [Overdue(*late) for late in db.execute(OVERDUE_LATER, (namespace, before))]
    return found + [late for late in not_moved if late.queue not in paused]


def extend_leases(db: sqlite3.Connection, claims: Sequence[tuple[int, int, str | None]], lease: int) -> dict[int, int | None]:
    return dict(db.execute(EXTEND, (lease, encode_json(claims))).fetchall())


def write_progress(db: sqlite3.Connection, reports: Sequence[tuple[int, int, str]]) -> list[int]:
    return [seq for (seq,) in db.execute(HOW_FAR, (encode_json(reports),)).fetchall()]


def settle_rows(
    db: sqlite3.Connection, namespace: str, settlements: Sequence[Settlement], lease_before: int, now: int
) -> dict[int, State]:
    states: dict[int, State] = {}
    settlements = move_on(db, settlements, lease_before, states, now)
    settlements = delete_done(db, settlements, lease_before, states)
    if not settlements:
        return states
    claims = encode_json([(change.seq, change.claim_no) for change in settlements])
    gone: list[int] = []
    for i, task_name, key, cancel_at, recurrence, tally, fire_time in db.execute(STILL_HELD, (claims, lease_before)).fetchall():
        change = heeding(settlements[i], cancel_at)
        if recurrence is not None:
            states[change.seq] = State.PENDING
            change, tally, fire_time = recur_or_wait(change, recurrence, tally, fire_time, now)
            if change.state is State.PENDING:
                ready = PAUSED if is_paused(recurrence) else claimable(change.run_at, change.lost, now)
                db.execute(MOVE_ON, (*pending_values(change, ready), fire_time, tally, change.seq))
                continue
            key = None  # of which there is no other
        states[change.seq] = change.state
        if not change.keep and key is None:
            gone.append(change.seq)
        elif key is None:
            write_settlement(db, change, now)
        else:
            states[change.seq] = settle_keyed(db, namespace, change, task_name, key, now)
    if gone:
        db.execute(DELETE, (encode_json(gone),))
    if regrouped := [(change.singly or None, change.seq) for change in settlements if change.singly is not None]:
        db.executemany(REGROUP, [changed for changed in regrouped if states.get(changed[1]) is State.PENDING])
    return states


def move_on(
    db: sqlite3.Connection, settlements: Sequence[Settlement], lease_before: int, states: dict[int, State], now: int
) -> Sequence[Settlement]:
    """Settle recurring jobs to which nothing special has happened, by rows as they were when they were claimed; those of a period
    together, or none of them if one has another claim, was cancelled or has become another. Answers all that are left."""
    runs: dict[tuple[int, str], list[Settlement]] = {}
    text, period, offset, run = "", 0, 0, list[Settlement]()
    for change in settlements:
        if change.ran is None or change.state is not IS_DONE or change.singly is not None:
            continue
        fire_time, _, missed, superseded, recurrence = change.ran
        if recurrence != text:
            text, (period, offset, _) = recurrence, interval_of(recurrence)
            run = runs.setdefault((period, text), [])
        # Nothing was missed, and the fire time that is one period later is yet to come.
        if period and not (missed or superseded or (fire_time - offset) % period) and fire_time + period > now:
            run.append(change)
    for (period, recurrence), changes in runs.items():
        if not changes:
            continue
        seqs, claims = encode_json([change.seq for change in changes]), sum(change.claim_no for change in changes)
        if all_or_none(db, MOVE_ON_AS_USUAL, (period, period, seqs, lease_before, recurrence, seqs, claims), len(changes)):
            states.update((change.seq, State.PENDING) for change in changes)
    return [change for change in settlements if change.seq not in states] if runs else settlements


def all_or_none(db: sqlite3.Connection, statement: str, parameters: Sequence[Any], count: int) -> bool:
    """Whether the statement found all of so many rows; otherwise it has changed nothing."""
    db.execute("SAVEPOINT tinyq_all")
    if complete := db.execute(statement, parameters).rowcount == count:
        db.execute("RELEASE tinyq_all")
    else:
        db.execute("ROLLBACK TO tinyq_all")
        db.execute("RELEASE tinyq_all")
    return complete


def delete_done(
    db: sqlite3.Connection, settlements: Sequence[Settlement], lease_before: int, states: dict[int, State]
) -> Sequence[Settlement]:
    """Settle those of which nothing is kept, by the numbers of their claims, which are few. Answers the others."""
    ends: dict[tuple[int, State], list[int]] = {}
    for change in settlements:
        if not change.keep and change.state is not IS_PENDING:
            ends.setdefault((change.claim_no, change.state), []).append(change.seq)
    for (claim_no, state), seqs in ends.items():
        which = encode_json(seqs), claim_no, lease_before
        if not all_or_none(db, DONE_WITH, which, len(seqs)):
            seqs = [seq for (seq,) in db.execute(f"{DONE_WITH} RETURNING seq", which)]
        states.update(dict.fromkeys(seqs, state))
    return [change for change in settlements if change.seq not in states]


def pending_values(change: Settlement, ready: int | None) -> tuple[Any, ...]:
    return (
        change.state, ready, change.run_at, change.attempts, change.snoozes, change.interruptions, change.lost, change.parked,
        change.reason, change.error, change.traceback,
    )  # fmt: skip


def write_settlement(db: sqlite3.Connection, change: Settlement, now: int) -> None:
    ready = claimable(change.run_at, change.lost, now) if change.state is State.PENDING else None
    ends = (None, None) if change.state is State.PENDING else (change.keep_until, now)
    keeps_progress = change.state is not State.PENDING
    db.execute(SETTLE, (*pending_values(change, ready), change.result, *ends, keeps_progress, change.seq))


def settle_keyed(db: sqlite3.Connection, namespace: str, change: Settlement, task_name: str, key: str, now: int) -> State:
    """A job with a key ends or waits: the successor behind it is let go, or takes it over if both would be pending."""
    select = SAME_KEY[State.PENDING, False].replace(ALL, "seq", 1)
    successor = db.execute(select, (namespace, task_name, key)).fetchone()
    run_at = FOREVER
    if successor and change.state is State.PENDING:
        run_at = change.run_at
        change = change._replace(state=State.CANCELLED, keep=False)
    if change.keep:
        write_settlement(db, change, now)
    else:
        db.execute(DELETE, (encode_json([change.seq]),))
    if successor:
        db.execute(RELEASE, (run_at, run_at, now, successor[0]))
    return change.state


def cancel_rows(
    db: sqlite3.Connection, namespace: str, ids: Sequence[bytes], reason: str, keep_until: int | None, now: int
) -> dict[bytes, State]:
    states = {}
    for id in ids:
        db.execute(CANCEL_PENDING, (reason, now, keep_until, namespace, id))
        db.execute(CANCEL_RUNNING, (now, namespace, id))
        found = db.execute("SELECT state FROM tinyq_jobs WHERE namespace = ? AND id = ?", (namespace, id)).fetchone()
        if found:
            states[id] = State(found[0])
    return states


def requeue_rows(db: sqlite3.Connection, namespace: str, ids: Sequence[bytes], now: int, bulk: bool) -> list[bytes]:
    again = []
    for row in read_rows(db, namespace, ids, LIGHT):
        if row.state is State.DEAD or (row.state is State.CANCELLED and not bulk):
            held = False
            if row.key is not None:
                running = same_key(db, row, State.RUNNING)
                if same_key(db, row, State.PENDING) or (running and row.recurrence is not None):
                    if bulk:
                        continue
                    raise key_conflict(row)
                held = running is not None
            fresh = requeued(row, now) | ({"ready": HELD} if held else {})
            assignments = ", ".join(f"{name} = :{name}" for name in fresh)
            db.execute(f"UPDATE tinyq_jobs SET {assignments} WHERE seq = :seq", fresh | {"seq": row.seq})
            again.append(row.id)
    return again


def purge_rows(db: sqlite3.Connection, namespace: str, ids: Sequence[bytes], bulk: bool) -> int:
    which = "state = 'dead'" if bulk else "finished IS NOT NULL"
    delete = f"DELETE FROM tinyq_jobs WHERE namespace = ? AND id = ? AND {which}"
    return db.executemany(delete, [(namespace, id) for id in ids]).rowcount if ids else 0


def read_rows(db: sqlite3.Connection, namespace: str, ids: Sequence[bytes], columns: str = ALL) -> list[JobRow]:
    select = f"SELECT {columns} FROM tinyq_jobs WHERE namespace = ? AND id = ?"
    found = (db.execute(select, (namespace, id)).fetchone() for id in ids)
    return [as_row(values) for values in found if values]


def list_rows(db: sqlite3.Connection, namespace: str, state: State, lease_before: int | None, limit: int) -> list[JobRow]:
    # With the state as a literal SQLite can use the partial index of leases. Who looks for lost workers needs no arguments.
    columns, where = (
        (ALL, "state = ? ORDER BY seq") if lease_before is None else (LIGHT, "state = 'running' AND lease < ? ORDER BY lease")
    )
    select = f"SELECT {columns} FROM tinyq_jobs WHERE namespace = ? AND {where} LIMIT ?"
    return [as_row(r) for r in db.execute(select, (namespace, state if lease_before is None else lease_before, limit))]


RATES_KEPT: Final = 60_000_000  # microseconds that a full bucket, which is as good as an unknown one, stays: clocks differ


def nothing_to_prune(db: sqlite3.Connection, now: int) -> int | None:
    for select, before in (
        ("SELECT 1 FROM tinyq_jobs WHERE keep_until <= ? LIMIT 1", now),
        ("SELECT 1 FROM tinyq_rates WHERE full_at <= ? LIMIT 1", now - RATES_KEPT),
    ):
        if db.execute(select, (before,)).fetchone():
            return None
    return 0


def prune_rows(db: sqlite3.Connection, now: int, limit: int) -> int:
    rates = "DELETE FROM tinyq_rates WHERE rowid IN (SELECT rowid FROM tinyq_rates WHERE full_at <= ? LIMIT ?)"
    full = db.execute(rates, (now - RATES_KEPT, limit)).rowcount
    delete = "DELETE FROM tinyq_jobs WHERE seq IN (SELECT seq FROM tinyq_jobs WHERE keep_until <= ? ORDER BY keep_until LIMIT ?)"
    return max(full, db.execute(delete, (now, limit)).rowcount)


# ── 16. SQLite store: the owner of the file ───────────────────────────────────────────────────────────────────────────
# All writes of a process go through one task, which takes whatever is waiting as one unit: one thread hop, one BEGIN
# IMMEDIATE … COMMIT. A unit commits or rolls back whole, whatever becomes of those who wait for it. aiosqlite owns the
# thread; no SQLite call runs on the event loop's thread.

PATIENCE: Final = 10.0  # seconds that a caller waits for the write lock
CLAIM_PATIENCE: Final = 0.05  # a claim holds free slots back while it waits, and can come again
GROUP: Final = 1_000  # operations in one unit at most
LOG_PAGES: Final = 1_000  # of the write-ahead log that are written back at a time
LOG_BYTES: Final = 16 * 2**20  # a longer log is cut as soon as no reader needs it


class Op:
    """One verb on its way through the owner. `look` may answer it without the write lock. An insertion of nothing but new rows
    has those instead of `write`, so that all of a unit can be one statement."""

    answer: Any = None
    error: BaseException | None = None
    finished: bool = False
    written: bool = False  # and not only looked for
    light: bool = False  # a claim or renewal: what a power cut takes along of these is done again, so they wait for no disk
    starts: bool = False  # so does `then`, though not the answer
    settles: bool = False  # a claim of the same unit may have taken what it sets free, so its answer never comes after that one's
    carries: bool = False  # or has carried riders, who all may have gone
    due: bool = False  # so is one of their rows

    def __init__(
        self,
        deadline: float,
        future: asyncio.Future[Any],
        write: Callable[[sqlite3.Connection], Any] | None,
        look: Callable[[sqlite3.Connection], Any] | None = None,
        rows: Sequence[JobRow] = (),
        now: int = 0,
        then: Callable[[Any], None] | None = None,
    ) -> None:
        self.deadline, self.future, self.write, self.look, self.rows, self.now = deadline, future, write, look, rows, now
        self.since = time.monotonic()
        self.then = then  # called with the answer, or None, even if nobody waits any more
        self.riders: list[tuple[JobRow, asyncio.Future[None]]] = []  # callers with one new row each, who share this operation


class Hop:
    """Carries a function into the connection's thread and its answer back, through aiosqlite's `execute_fetchall`."""

    def __init__(self, call: Callable[[sqlite3.Connection], Any]) -> None:
        self.call = call
        self.answer: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def fetchall(self) -> list[Any]:
        return [self.answer]


# Every open connection of a store, and in a forked child what it inherited besides. Closing, or merely freeing, a connection in a
# child would undo what its parent is writing at that moment. Nothing in here is ever freed: see `connection_class`.
_open: Final[list[Any]] = []
_opening: Final = threading.Lock()  # held while one is opened or closed


@functools.cache
def connection_class() -> type[sqlite3.Connection]:
    import sqlite3

    guard_forks()

    class Connection(sqlite3.Connection):
        def __init__(self, path: str, *args: Any, **options: Any) -> None:
            self.path = path
            self.busy = threading.Lock()  # held while something is done with it
            with _opening:
                super().__init__(path, *args, **options)
                _open.append(self)
                # The database refers to the list and the list to the database, in C where no collector looks, not even that of an
                # interpreter which ends: only `close` frees a connection.
                self.create_function("tinyq_open", 0, _open.__len__)
            self.handed: list[tuple[Any, ...]] = []  # see rows_of
            hand_over = self.handed.append
            self.create_function("tinyq_row", -1, lambda *values: hand_over(values))

        def close(self) -> None:
            with _opening:
                super().close()
                if self in _open:
                    _open.remove(self)

        def execute(self, sql: str, parameters: Any = (), /) -> Any:
            if isinstance(parameters, Hop):
                with self.busy:
                    parameters.answer = parameters.call(self)
                return parameters
            return super().execute(sql, parameters)

    return Connection


_guarded: Final[list[bool]] = []


def guard_forks() -> None:
    """A fork waits until no connection of ours is in the middle of something, and so inherits no transaction and no mutex."""
    with _opening:  # two threads may come at the same time, and a fork that took its locks twice would wait for itself
        if _guarded:
            return
        _guarded.append(True)
    held: list[threading.Lock] = []

    def wait() -> None:
        _opening.acquire()
        for connection in _open:
            if hasattr(connection, "busy"):
                connection.busy.acquire()
                held.append(connection.busy)

    def go_on() -> None:
        while held:
            held.pop().release()
        _opening.release()

    def go_on_in_child() -> None:
        for path in {connection.path for connection in _open if hasattr(connection, "path")}:
            take_over_locks(path)
        go_on()

    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(before=wait, after_in_parent=go_on, after_in_child=go_on_in_child)


def take_over_locks(path: str) -> None:
    """In a forked child SQLite takes its parent's locks for its own, and would open the same file without locking it; but the
    system lets no child inherit them. They are: a shared lock on the file, and one on the shared memory."""
    import fcntl

    for name, offset, length in (path, 0x4000_0002, 510), (f"{path}-shm", 128, 1):
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY)  # never closed: that would release every lock of this process on the file
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, length, offset)


def is_busy(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED and their extended codes


def patiently(call: Callable[[], T], deadline: float) -> T:
    """Retry while the database is locked. SQLite's own handler sleeps up to 100 ms at a time and starves behind group commit."""
    while True:
        try:
            return call()
        except Exception as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
        time.sleep(dice().uniform(0.0002, 0.0015))


def committed(db: sqlite3.Connection, work: Callable[[], T], deadline: float) -> T:
    """What the work answers, in a write transaction of its own; after an error nothing of it is left."""
    patiently(lambda: db.execute("BEGIN IMMEDIATE"), deadline)
    try:
        answer = work()
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return answer


def answer_all(db: sqlite3.Connection, namespace: str, ops: Sequence[Op]) -> list[Any]:
    insert_all(db, namespace, [row for op in ops for row in op.rows], max(op.now for op in ops))
    return [attempt(db, op, alone=len(ops) == 1) for op in ops]


def in_transaction(db: sqlite3.Connection, namespace: str, ops: Sequence[Op], deadline: float) -> list[Any]:
    """The answers of all operations, committed; or an error, and nothing was written."""
    return committed(db, lambda: answer_all(db, namespace, ops), deadline)


def attempt(db: sqlite3.Connection, op: Op, alone: bool) -> Any:
    """The answer of one operation inside of a unit. An error that it is meant to raise, such as KeyConflict, undoes it alone."""
    if op.riders:
        return True
    if op.write is None:
        return [Inserted(row, "created" if row.lease is None else "started") for row in op.rows]
    if alone:
        return op.write(db)
    db.execute("SAVEPOINT tinyq_op")
    try:
        return op.write(db)
    except TinyQError as error:
        db.execute("ROLLBACK TO tinyq_op")
        return error
    finally:
        db.execute("RELEASE tinyq_op")


def run_unit(db: sqlite3.Connection, namespace: str, ops: Sequence[Op]) -> None:
    """Answer the operations, together if that works, else each alone. Those that may still wait for the lock stay unfinished."""
    if all(op.look is not None for op in ops):
        ops = [op for op in ops if not answer_by_look(db, op)]
    try:
        if ops:
            # Not for longer at a time: a claim that comes meanwhile is to find out in its own time that the file is locked.
            answers = in_transaction(db, namespace, ops, min(time.monotonic() + 0.05, *(op.deadline for op in ops)))
            for op, answer in zip(ops, answers, strict=True):
                op.answer, op.finished, op.written = answer, True, True
                op.error = answer if isinstance(answer, TinyQError) else None
    except Exception as error:
        if is_busy(error):
            for op in ops:
                if op.deadline <= time.monotonic():
                    op.error, op.finished = error, True
        elif reads_on(db, error):
            run_unit(db, namespace, ops)
        elif len(ops) == 1:
            ops[0].error, ops[0].finished = error, True
        else:
            for op in ops:
                run_unit(db, namespace, [op])


def reads_on(db: sqlite3.Connection, error: Exception) -> bool:
    """Whether it is worth another try: text that is not UTF-8, in a row that a hand has edited, is read leniently from now on."""
    if "decode to UTF-8" not in str(error) or db.text_factory is not str:
        return False
    db.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
    return True


def read(db: sqlite3.Connection, call: Callable[[sqlite3.Connection], T], deadline: float) -> T:
    """A call that writes nothing."""
    try:
        return patiently(lambda: call(db), deadline)
    except Exception as error:
        if not reads_on(db, error):
            raise
        return patiently(lambda: call(db), deadline)


def answer_by_look(db: sqlite3.Connection, op: Op) -> bool:
    try:
        op.answer = op.look(db) if op.look else None
        op.finished = op.answer is not None
    except Exception as error:
        if reads_on(db, error):
            return answer_by_look(db, op)
        if not is_busy(error):  # else it may still wait for the lock
            op.error, op.finished = error, True
    return op.finished


class LogFile:
    """The write-ahead log, which the owner writes back into the database between units: inside a COMMIT, where SQLite does it by
    itself, callers would wait for it. It is cut when it has become long."""

    def __init__(self, path: str) -> None:
        self._path = f"{path}-wal"
        self._descriptor: int | None = None
        self._unsafe = False  # since it could not be brought to the disk
        self._units = 0  # since the last time
        self._enough = 100  # units that fill LOG_PAGES, as far as is known
        self._frames = 0  # in the log after the last time
        self._next_size = LOG_BYTES
        self._failed = False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def sync(self) -> None:
        """Have on the disk what has been committed. With synchronous = FULL SQLite does it inside of COMMIT, where whoever wants
        the write lock, and what may go on without, would wait for it. (https://sqlite.org/pragma.html#pragma_synchronous)"""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR)
            getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS and Windows have only the other
        except OSError as error:
            what = f"{self._path} cannot be brought to the disk, so a power cut may undo what was just written: {error}"
            if not self._unsafe:  # those who have been answered already are not going to tell
                log.error("%s", what)
            self._unsafe = True
            raise StoreError(what) from error
        self._unsafe = False

    def due(self) -> bool:
        """Asked once after each unit, in the owner's thread."""
        self._units += 1
        return self._units >= self._enough or (self._units % 16 == 0 and self._size() >= self._next_size)

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def write_back(self, db: sqlite3.Connection) -> None:
        """What a reader still needs stays in the log until the next time. Only to cut it are readers waited for, a moment: else
        some that overlap would keep it growing for ever. (Again and again, since each try sees how far the readers are by then;
        SQLite's own waiting looks once, and starves.)"""
        cut, deadline = self._size() > LOG_BYTES, time.monotonic() + 0.05
        try:
            busy, frames, done = db.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if cut else 'PASSIVE'})").fetchone()
            while cut and busy and time.monotonic() < deadline:
                time.sleep(0.002)
                busy, frames, done = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except Exception as error:
            frames = done = -1
            if not self._failed and not is_busy(error):
                self._failed = True
                log.warning("%s cannot be written back into the database, and grows: %s", self._path, error_text(error))
        else:
            self._failed = False
        if frames > self._frames:
            self._enough = min(10_000, max(1, self._units * LOG_PAGES // (frames - self._frames)))
        self._units, self._frames = 0, 0 if done == frames else frames  # written back wholly, it is going to begin anew
        self._next_size = max(LOG_BYTES, self._size() + LOG_BYTES // 4)


def prepare(db: sqlite3.Connection, path: str, synchronous: str, auto_migrate: bool = True) -> dict[str, Any]:
    """Set the pragmas, verify them, bring the schema forward. Answers what is worth logging."""
    import sqlite3

    if sqlite3.sqlite_version_info < (3, 38):
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old for tinyq: 3.38 or later is needed")
    deadline = time.monotonic() + PATIENCE
    mode = patiently(lambda: db.execute("PRAGMA journal_mode = WAL").fetchone()[0], deadline)
    if mode != "wal":
        raise StoreError(
            f"{path} stays in journal mode {mode!r}: tinyq needs WAL, and so a local disk that can map shared memory"
        )
    patiently(lambda: db.execute(f"PRAGMA synchronous = {synchronous}"), deadline)
    patiently(lambda: db.execute("PRAGMA wal_autocheckpoint = 0"), deadline)  # see LogFile
    if (version := patiently(lambda: schema_version(db, path), deadline)) < len(MIGRATIONS):
        if not auto_migrate:
            raise StoreError(
                f"{path} has {f'tinyq schema {version}' if version else 'no tables of tinyq'}, and {len(MIGRATIONS)} is needed, "
                f"which auto_migrate=False leaves to you: run what `python -m tinyq schema {path}` prints"
            )
        committed(db, lambda: migrate(db, path), deadline)
    # From now on no statement changes much. What it needs for a way back would be written to a file from 64 KiB on.
    patiently(lambda: db.execute("PRAGMA temp_store = MEMORY"), deadline)
    return {"path": path, "sqlite": sqlite3.sqlite_version, "journal": mode, "synchronous": synchronous}


def warm_up(db: sqlite3.Connection, namespace: str) -> None:
    """Have the statements of most jobs prepared, which takes as long as many jobs: the first ones need not wait for it."""
    for change in (*NEW.values(), *HANDED.values(), CLAIM, DONE_WITH):
        db.executemany(change, ())
    edges(db, namespace)
    rows_of(db, READ_HEADS, (namespace, 0, 0))
    rows_of(db, READ_CHOSEN, (namespace, "[]"))
    db.execute(GROUPS, lane_range(namespace)).fetchall()
    paused_queues(db, namespace)
    for read in (LANE_HEADS, GATED_HEADS, READ_WHOLE, OTHERS, PORTS, LAST_ROW, "PRAGMA data_version"):
        db.execute(read, (0,) * read.count("?")).fetchall()
    for name in ("tinyq_op", "tinyq_all"):
        db.execute(f"SAVEPOINT {name}")
        db.execute(f"RELEASE {name}")


def migrate(db: sqlite3.Connection, path: str) -> None:
    for statement in steps_from(schema_version(db, path)):
        db.execute(statement)


def steps_from(version: int) -> Iterable[str]:
    """The statements that bring a file of this version, 0 for one without tables of tinyq, forward to the newest."""
    return (*itertools.chain(*MIGRATIONS[version:]), f"INSERT OR REPLACE INTO tinyq_meta VALUES ('schema', {len(MIGRATIONS)})")


def schema_version(db: sqlite3.Connection, path: str) -> int:
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'tinyq_meta'").fetchone():
        return 0
    version = int(db.execute("SELECT value FROM tinyq_meta WHERE name = 'schema'").fetchone()[0])
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path} has tinyq schema {version} and tinyq {__version__} knows up to {len(MIGRATIONS)}: upgrade tinyq here"
        )
    return version


def store_error(error: BaseException, path: str) -> BaseException:
    """What a caller sees of an error from the driver."""
    if isinstance(error, TinyQError) or not type(error).__module__.startswith("sqlite3"):
        return error
    if is_busy(error):
        return StoreBusy(
            f"{path} stayed locked for longer than tinyq waits: another connection keeps a write transaction open; "
            "if it is your own, commit before you enqueue, or pass it as tx=…"
        )
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    hint = {
        "SQLITE_CANTOPEN": "give the path of a file, in a folder that exists and may be written",
        "SQLITE_NOTADB": "it is not an SQLite database: give another path",
        "SQLITE_FULL": "the disk is full",
        "SQLITE_READONLY": "make the file and its folder writable",
        "SQLITE_CORRUPT": "restore it from a backup",
    }.get(name.rsplit("_", 1)[0] if name.count("_") > 1 else name, "")
    return StoreError(f"{path}: {error} ({name}){': ' + hint if hint else ''}")


# ── 17. SQLite store: the caller's connection ─────────────────────────────────────────────────────────────────────────
# `tx=`: a job is written through the caller's own connection, in its transaction and its thread.


def file_identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Plain:
    """The caller's connection as the statements of a store see it: rows are tuples, whatever row factory he has set."""

    def __init__(self, db: sqlite3.Connection) -> None:
        import sqlite3

        self._cursor = functools.partial(sqlite3.Cursor, db)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return self._cursor().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        return self._cursor().executemany(sql, parameters)


class Errand(Sequence[Any]):
    """A statement's one parameter. To bind it, sqlite3 asks for it in the connection's own thread, and there the call is made."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.answer: Any = None
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        try:
            self.answer = self._call()
        except BaseException as error:  # sqlite3 would make another one of some
            self.error = error


async def in_its_thread(tx: aiosqlite.Connection, call: Callable[[sqlite3.Connection], T]) -> T:
    """Do something with the connection behind another one's aiosqlite connection."""
    try:
        cursor = await tx.cursor()
    except ValueError as error:
        raise ValueError(f"tx is {tx!r}, which is not open: {error}; enqueue before you close it") from None
    errand = Errand(lambda: call(cursor.connection))
    await cursor.execute("SELECT ? WHERE 0", errand)
    if errand.error is not None:
        raise errand.error
    return cast(T, errand.answer)


def require_same_file(db: sqlite3.Connection, path: str, identity: tuple[int, int] | None) -> None:
    if identity is not None and file_identity(path) != identity:
        raise StoreError(f"{path} was deleted or replaced while it was open: put it back, or restart to make a new one")
    [main] = [file for _, name, file in db.execute("PRAGMA database_list") if name == "main"]
    if not main or identity is None or file_identity(main) != identity:
        raise ValueError(
            f"tx is a connection to {main or 'a database in memory'}, and the jobs are in {path}: give a connection to "
            "that file, or leave tx out and enqueue after your commit"
        )


def driver_connection(tx: Any) -> Any:
    """The driver's connection behind SQLAlchemy's Session or Connection, in a transaction that its commit will commit."""
    of_session = is_a(tx, SQLALCHEMY[0])
    dialect = (tx.get_bind() if of_session else tx).dialect
    if dialect.name != "sqlite":
        raise ValueError(
            f"tx is a {type(tx).__name__} on {dialect.name}, and the jobs are in an SQLite file: leave tx out and enqueue after "
            "your commit"
        )
    connection = tx.connection() if of_session else tx
    if not connection.in_transaction():
        connection.begin()  # as its first statement would have done: else its commit would have nothing to commit
    found = connection.connection.driver_connection
    if not is_a(found, *DRIVERS):
        raise ValueError(f"tx is a {type(tx).__name__} over {found!r}: the driver must be sqlite3 or aiosqlite")
    return found


@contextlib.contextmanager
def sqlalchemy_errors(tx: object, path: str) -> Iterator[None]:
    """What a caller sees of an error of SQLAlchemy on his own session."""
    try:
        yield
    except Exception as error:
        if not is_a(error, ("sqlalchemy.exc", "SQLAlchemyError")):
            raise
        original = getattr(error, "orig", None)
        if is_a(original, ("sqlite3", "Error")):
            raise tx_error(cast(Exception, original), path) from error
        ways = {
            "UnboundExecutionError": "pass tx=session.connection(bind_arguments={'mapper': …}), which says where",
            "MissingGreenlet": "pass the AsyncSession or AsyncConnection itself",
            "AsyncContextNotStarted": "await it first",
        }
        way = ways.get(type(error).__name__, "enqueue while its transaction is open")
        what = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"tx is a {type(tx).__name__} that cannot be used: {what}. Way out: {way}") from error


async def driver_of(tx: Any, path: str) -> Any:
    """tx itself, or the driver's connection behind it."""
    with sqlalchemy_errors(tx, path):
        if is_a(tx, *ASYNC_SQLALCHEMY):
            return await tx.run_sync(driver_connection)
        return driver_connection(tx) if is_a(tx, *SQLALCHEMY) else tx


def may_begin(db: sqlite3.Connection) -> bool:
    """Whether Python's module would itself begin a transaction before a write."""
    return getattr(db, "autocommit", -1) == -1 and db.isolation_level is not None  # -1: LEGACY_TRANSACTION_CONTROL


def insert_within(
    tx: sqlite3.Connection,
    path: str,
    identity: tuple[int, int] | None,
    namespace: str,
    rows: Sequence[JobRow],
    now: int,
    migrating: bool = False,
) -> list[Inserted]:
    """Insert all rows or none through the caller's connection, and leave its transaction open. `migrating`: no engine has opened
    this file here, so that the tables, too, may have to be made, in the same transaction."""
    text_factory, tx.text_factory = tx.text_factory, str
    db = cast("sqlite3.Connection", Plain(tx))

    def insert() -> list[Inserted]:
        if migrating and schema_version(db, path) < len(MIGRATIONS):
            migrate(db, path)
        return insert_rows(db, namespace, rows, now)

    try:
        require_same_file(db, path, identity)
        return in_savepoint(tx, db, insert)
    finally:
        tx.text_factory = text_factory


def in_savepoint(tx: sqlite3.Connection, db: sqlite3.Connection, work: Callable[[], T]) -> T:
    begun = not tx.in_transaction
    if begun and not may_begin(tx):
        raise ValueError(
            "tx has no open transaction, so the job could not depend on your commit: execute BEGIN on it first (with SQLAlchemy: "
            "use no AUTOCOMMIT)"
        )
    try:
        if begun:  # at once for writing: one that reads first is refused if somebody wrote between its read and its write
            db.execute("BEGIN EXCLUSIVE" if tx.isolation_level == "EXCLUSIVE" else "BEGIN IMMEDIATE")
        db.execute("SAVEPOINT tinyq")
        answer = work()
        db.execute("RELEASE tinyq")
        return answer
    except BaseException:
        if tx.in_transaction and begun:
            db.execute("ROLLBACK")
        elif tx.in_transaction:
            with contextlib.suppress(Exception):  # the savepoint was not even set
                db.execute("ROLLBACK TO tinyq")
                db.execute("RELEASE tinyq")
        raise


def tx_error(error: Exception, path: str) -> Exception:
    """What a caller sees of an error of the driver on his own connection."""
    if type(error).__name__ == "ProgrammingError":
        thread = "thread" in str(error)
        way = "make it in the thread that enqueues, or with check_same_thread=False" if thread else "enqueue before you close it"
        return ValueError(f"tx cannot be used: {error} Way out: {way}")
    if getattr(error, "sqlite_errorcode", 0) == 517:  # SQLITE_BUSY_SNAPSHOT
        return StoreBusy(
            f"{path}: your transaction began by reading, and somebody has written since, so it cannot write any more: roll back, "
            "and start with BEGIN IMMEDIATE"
        )
    if is_busy(error):
        return StoreBusy(f"{path} stayed locked for longer than your connection waits (the timeout of connect()): try again")
    if "no such table: tinyq" in str(error):
        return StoreError(
            f"{path}: your transaction does not see tinyq's tables: it began before they were made, or somebody has "
            "dropped them; begin a new one"
        )
    hint = ": your connection may only read" if "readonly" in str(error) else ""
    return StoreError(f"{path}, through your connection: {error}{hint}; the job was not stored")


# ── 18. SQLite store: the class ───────────────────────────────────────────────────────────────────────────────────────
# The verbs over the owner. Writes queue up for one task; reads have a connection of their own and see what is committed.


MOUNTS = "/proc/self/mounts"  # Linux only
UNFIT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "fuse.sshfs"),
        "a network file system, on which SQLite's locks and its shared memory cannot be relied upon: use a local disk",
    ),
    "overlay": "a container's own layer, which is gone with the container: use a volume",
    **dict.fromkeys(("tmpfs", "ramfs"), "memory, which is gone with the machine's next start: use a disk"),
}


def warn_if_unfit(path: str) -> None:
    """Say so if the file lies where it is not safe, as far as the system tells."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            fields = [line.split(" ") for line in mounts]
    except OSError:
        return
    real, best, kind = os.path.realpath(path), "", ""
    for _, point, found, *_ in fields:
        point = point.replace("\\040", " ").rstrip("/")
        if len(point) >= len(best) and real.startswith(f"{point}/"):  # of two on one point the later one covers the other
            best, kind = point, found
    if kind in UNFIT:
        log.warning("%s is on %s (%s), %s", path, kind, best or "/", UNFIT[kind])


async def joined(threads: Sequence[threading.Thread], busy: int = 0) -> None:
    """Wait for threads that were told to end and have nothing left to do, but for so many; at most a second."""
    for _ in range(1_000):
        if sum(thread.is_alive() for thread in threads) <= busy:
            break
        await asyncio.sleep(0.001)


class SQLiteStore:
    """Jobs in one SQLite file. `path` may be the application's own database; all tables begin with `tinyq_`."""

    def __init__(self, path: str, namespace: str = "default", synchronous: str = "full", auto_migrate: bool = True) -> None:
        self._auto_migrate = auto_migrate
        self.path = os.path.abspath(path)
        self.facts: dict[str, Any] = {}
        self._namespace = namespace
        self._synchronous = synchronous
        self._writer: aiosqlite.Connection | None = None
        self._reader: aiosqlite.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._log = LogFile(self.path)
        self._log_due = False
        self._threads: list[threading.Thread] = []
        self._waiting: list[Op] = []
        self._carrier: Op | None = None  # the one among them that takes riders
        self._unit: Sequence[Op] = ()
        self._due: int | None = None
        self.on_added: Callable[[], object] = bool  # called in the loop when riders have been answered
        self.on_due: Callable[[sqlite3.Connection, int], None] | None = None  # called in the owner's thread after a commit
        self.claim_comes = False  # in this turn of the loop: it is worth waiting for
        self._latest = math.inf
        self._flushing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        try:
            import aiosqlite
        except ImportError:
            raise ImportError("a tinyq database needs aiosqlite: pip install aiosqlite") from None
        try:
            options: dict[str, Any] = {"isolation_level": None, "timeout": 0, "factory": connection_class()}
            self._loop = asyncio.get_running_loop()
            self._writer = await self._connected(aiosqlite.connect(self.path, **options))
            # (What "full" asks for besides is done after the COMMIT: see LogFile.sync.)
            facts = await self._hop(self._writer, lambda db: prepare(db, self.path, "normal", self._auto_migrate))
            self.facts = {**facts, "synchronous": self._synchronous}
            await self._hop(self._writer, lambda db: patiently(lambda: warm_up(db, self._namespace), time.monotonic() + PATIENCE))
            self._identity = await self._hop(self._writer, lambda db: file_identity(self.path))
            await self._hop(self._writer, lambda db: warn_if_unfit(self.path))
            self._reader = await self._connected(aiosqlite.connect(self.path, **options))
            await self._hop(self._reader, lambda db: db.execute("PRAGMA query_only = ON"))
        except BaseException as error:
            await self.close()
            raise store_error(error, self.path) from (None if isinstance(error, TinyQError) else error)

    async def insert(self, rows: Sequence[JobRow], now: int) -> Sequence[Inserted]:
        if all(map(is_new, rows)):
            return cast("list[Inserted]", await self._submit(None, rows=rows, now=now))
        return await self._write(lambda db: self._note_inserted(insert_rows(db, self._namespace, rows, now), now))

    async def claim(self, room: Room, worker: str, lease: int, now: int) -> Claimed:
        self.claim_comes = False
        return await self._write(
            lambda db: claim_rows(db, self._namespace, room, worker, lease, now),
            look=lambda db: look_for_due(db, self._namespace, room, now),
            patience=CLAIM_PATIENCE,
            light=True,
        )

    async def extend(self, claims: Sequence[tuple[int, int, str | None]], lease: int) -> Mapping[int, int | None]:
        return await self._write(lambda db: extend_leases(db, claims, lease), light=True)

    async def confirm(self, claims: Sequence[tuple[int, int, str | None]], lease: int) -> None:
        await self._write(lambda db: extend_leases(db, claims, lease))  # a commit that waits for the disk covers those before it

    async def progress(self, reports: Sequence[tuple[int, int, str]]) -> Sequence[int]:
        return await self._write(lambda db: write_progress(db, reports), light=True)

    async def settle(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        return await self._write(
            lambda db: self._note_settled(settlements, settle_rows(db, self._namespace, settlements, FOREVER, now), now),
            settles=True,
        )

    async def cancel(self, ids: Sequence[bytes], reason: str, keep_until: int | None, now: int) -> Mapping[bytes, State]:
        return await self._write(lambda db: cancel_rows(db, self._namespace, ids, reason, keep_until, now))

    async def requeue(self, ids: Sequence[bytes], now: int, bulk: bool = False) -> Sequence[bytes]:
        return await self._write(lambda db: self._note_due(requeue_rows(db, self._namespace, ids, now, bulk), now))

    async def purge(self, ids: Sequence[bytes], bulk: bool = False) -> int:
        return await self._write(lambda db: purge_rows(db, self._namespace, ids, bulk))

    async def reclaim(self, settlements: Sequence[Settlement], now: int) -> Mapping[int, State]:
        return await self._write(
            lambda db: self._note_settled(settlements, settle_rows(db, self._namespace, settlements, now, now), now),
            patience=CLAIM_PATIENCE,  # after a longer wait, the one that holds the lease is to have the first word
        )

    async def get(self, ids: Sequence[bytes]) -> Sequence[JobRow]:
        return await self._read(lambda db: read_rows(db, self._namespace, ids))

    async def list(self, state: State, lease_before: int | None = None, limit: int = 100) -> Sequence[JobRow]:
        return await self._read(lambda db: list_rows(db, self._namespace, state, lease_before, limit))

    async def dead(self, task: str | None, before: tuple[int, int], limit: int) -> Sequence[JobRow]:
        finished, seq = before
        values = {"namespace": self._namespace, "task": task, "finished": finished, "seq": seq, "limit": limit}
        return [as_row(found) for found in await self._read(lambda db: db.execute(DEAD_ROWS, values).fetchall())]

    async def overdue(self, before: int) -> Sequence[Overdue]:
        return await self._read(lambda db: overdue_lanes(db, self._namespace, before))

    async def counts(self, now: int) -> Sequence[Count]:
        rows = await self._read(lambda db: db.execute(COUNTS, (now, self._namespace)).fetchall())
        return [
            Count(queue=queue, task=task, state=State(state), durable=True, count=n, due=due or 0)
            for queue, task, state, n, due in rows
        ]

    async def pause(self, queues: Sequence[str]) -> None:
        await self._write(lambda db: db.executemany(PAUSE, [(self._namespace, queue) for queue in queues]).rowcount)

    async def resume(self, queues: Sequence[str], now: int) -> None:
        resumed = [(self._namespace, queue) for queue in queues]
        await self._write(lambda db: self._note_due(db.executemany(RESUME, resumed).rowcount, now))

    async def paused(self) -> frozenset[str]:
        return await self._read(lambda db: paused_queues(db, self._namespace))

    async def define(self, schedules: Sequence[tuple[str, str, int]], now: int) -> Mapping[str, ScheduleRecord]:
        def write(db: sqlite3.Connection) -> Mapping[str, ScheduleRecord]:
            found = (
                (name, db.execute(DEFINE, (self._namespace, name, rule, at, now)).fetchone()) for name, rule, at in schedules
            )
            return {name: ScheduleRecord(last, bool(paused)) for name, (last, paused) in found}

        return await self._write(write)

    async def suspend(self, schedule: str, paused: bool, now: int) -> None:
        name = self._namespace, schedule
        how = (SUSPEND, (*name, now)) if paused else (UNSUSPEND, (now, *name))
        await self._write(lambda db: db.execute(*how).rowcount)

    async def suspended(self) -> frozenset[str]:
        select = "SELECT name FROM tinyq_schedules WHERE namespace = ? AND paused"
        return await self._read(lambda db: frozenset(name for (name,) in db.execute(select, (self._namespace,))))

    async def undefine(self, schedule: str) -> None:
        await self._write(lambda db: db.execute(UNDEFINE, (self._namespace, schedule)).rowcount)

    async def recurring(self, task: str | None, key: str | None, after: int, limit: int) -> Sequence[JobRow]:
        values = {"namespace": self._namespace, "task": task, "key": key, "after": after, "limit": limit}
        return [as_row(found) for found in await self._read(lambda db: db.execute(RECURRING, values).fetchall())]

    async def hold(self, id: bytes, paused: bool, now: int) -> bool:
        return await self._write(lambda db: self._note_due(hold_row(db, self._namespace, id, paused, now), now))

    async def unschedule(self, task: str, key: str, now: int) -> bool:
        return await self._write(lambda db: unschedule_row(db, self._namespace, task, key))

    async def prune(self, now: int, limit: int = 500) -> int:
        return await self._write(lambda db: prune_rows(db, now, limit), look=lambda db: nothing_to_prune(db, now))

    async def close(self) -> None:
        connections = (self._reader, self._writer)
        self._reader = self._writer = None  # nothing new is accepted
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        self._log.close()
        for connection in connections:
            if connection is not None:
                await connection.close()
        await joined(self._threads)

    def add(self, row: JobRow, now: int) -> asyncio.Future[None]:
        """Insert a new row. What insert does, for one row among many from as many callers, at a third of the cost."""
        carrier = self._carrier
        if carrier is None or len(carrier.riders) >= GROUP:
            self._submit(None, now=now)
            self._carrier = carrier = self._waiting[-1]
            carrier.carries = True
        rider: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        carrier.riders.append((row, rider))
        carrier.now, carrier.due = now, carrier.due or row.run_at <= now
        return rider

    @property
    def carries_due(self) -> bool:
        """Whether the next row that is added goes along with one that is due."""
        return self._carrier is not None and self._carrier.due

    def hand_over(
        self, row: JobRow, now: int, then: Callable[[Sequence[Inserted] | None], None], sure: bool = False
    ) -> asyncio.Future[Sequence[Inserted]]:
        """Insert a new row with its lease already on it. `then` hears what came of it, also when the caller has gone: as soon as
        it is committed, or with `sure` when it is on the disk."""
        if self._writer is None:
            then(None)
        answer = self._submit(None, rows=[row], now=now, then=then)
        self._waiting[-1].starts = not sure
        return answer

    async def insert_within(self, tx: Any, rows: Sequence[JobRow], now: int) -> Sequence[Inserted]:
        """Insert in the caller's transaction: in this thread on a sqlite3 connection, in its own on an aiosqlite one."""
        if self._writer is None:
            raise StoreError(f"{self.path} is closed")
        import sqlite3

        def insert(db: sqlite3.Connection) -> list[Inserted]:
            return insert_within(db, self.path, self._identity, self._namespace, rows, now)

        try:
            tx = await driver_of(tx, self.path)
            return insert(tx) if isinstance(tx, sqlite3.Connection) else await in_its_thread(tx, insert)
        except sqlite3.Error as error:
            raise tx_error(error, self.path) from error

    def disown(self) -> None:
        """In a forked child: nothing goes through the parent's connections, and they are never closed."""
        _open.extend((self._writer, self._reader, self._flushing, self._waiting))
        self._writer = self._reader = self._flushing = None
        self._waiting, self._carrier = [], None

    async def exists(self, id: bytes) -> bool:
        """Whether there is such a row, once all that was handed in before has been written."""
        return await self._write(lambda db: bool(read_rows(db, self._namespace, [id])))

    def hurry(self, seconds: float) -> None:
        """From now on nothing waits longer than this for the write lock, what waits already included."""
        self._latest = time.monotonic() + seconds
        for op in self._waiting:
            op.deadline = min(op.deadline, self._latest)

    async def ring(self, now: int) -> None:
        """Have other processes look at the table, whether or not there is anything new."""
        await self._read(lambda db: self.on_due(db, now) if self.on_due else None)

    async def unknown(self, known: Sequence[str]) -> Mapping[int, str]:
        """The first due job of each lane whose task is not among the known ones: seq and task."""
        return await self._read(lambda db: unknown_heads(db, self._namespace, known))

    @property
    def idle(self) -> bool:
        """Whether nothing is being written, and so nothing on its way in that would have to come first."""
        return self._flushing is None

    @property
    def stalled(self) -> float:
        """Seconds for which the oldest write has been waiting, 0 if there is none."""
        ops = [op for op in (*self._unit, *self._waiting) if not op.future.done()]
        return time.monotonic() - min(op.since for op in ops) if ops else 0.0

    def _note_due(self, answer: T, now: int) -> T:
        """In the owner's thread: if this answer is not empty, there is something that another process might start."""
        if answer:
            self._due = now
        return answer

    def _note_inserted(self, answers: Sequence[Inserted], now: int) -> Sequence[Inserted]:
        fresh = (answer.row for answer in answers if answer.verdict in ("created", "replaced"))
        self._note_due(any(row.ready in (CLAIMABLE, FRAGILE) for row in fresh), now)
        return answers

    def _note_settled(self, settlements: Sequence[Settlement], states: dict[int, State], now: int) -> dict[int, State]:
        again = [change.seq for change in settlements if change.frees or (change.state is IS_PENDING and change.run_at <= now)]
        self._note_due(any(seq in states for seq in again), now)
        return states

    def _ring(self, db: sqlite3.Connection, ops: Sequence[Op]) -> None:
        """Once for a unit, after its COMMIT. (One that was rolled back rings in vain, which costs a look.)"""
        for op in ops:
            if op.rows and op.finished and op.error is None:
                self._note_due(any(row.lease is None and row.run_at <= op.now for row in op.rows), op.now)
        due, self._due = self._due, None
        if due is not None and self.on_due is not None:
            self.on_due(db, due)

    async def _connected(self, connection: aiosqlite.Connection) -> aiosqlite.Connection:
        """A daemon's thread: it would keep a program from exiting that never calls stop(). (Before aiosqlite 0.22 the connection
        itself is the thread.)"""
        thread: threading.Thread = getattr(connection, "_thread", cast(Any, connection))
        thread.daemon = True
        self._threads.append(thread)
        connecting = asyncio.ensure_future(connection)
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:  # what the thread has opened by then is to be closed
            await asyncio.wait({connecting})
            if not connecting.cancelled() and connecting.exception() is None:
                await connection.close()
            raise

    async def _hop(self, connection: aiosqlite.Connection, call: Callable[[sqlite3.Connection], T]) -> T:
        [answer] = cast("list[T]", await connection.execute_fetchall("", Hop(call)))
        return answer

    async def _read(self, call: Callable[[sqlite3.Connection], T]) -> T:
        if self._reader is None:
            raise StoreError(f"{self.path} is closed")
        deadline = time.monotonic() + PATIENCE
        try:
            return await self._hop(self._reader, lambda db: read(db, call, deadline))
        except Exception as error:
            raise store_error(error, self.path) from error

    async def _write(
        self,
        write: Callable[[sqlite3.Connection], T],
        look: Callable[[sqlite3.Connection], T | None] | None = None,
        patience: float | None = None,
        light: bool = False,
        settles: bool = False,
    ) -> T:
        future = self._submit(write, look, patience)
        self._waiting[-1].light, self._waiting[-1].settles = light, settles
        return cast(T, await future)

    def _submit(
        self,
        write: Callable[[sqlite3.Connection], Any] | None,
        look: Callable[[sqlite3.Connection], Any] | None = None,
        patience: float | None = None,
        rows: Sequence[JobRow] = (),
        now: int = 0,
        then: Callable[[Any], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Put an operation in line; the future is its answer."""
        if self._writer is None:
            raise StoreError(f"{self.path} is closed")
        loop = asyncio.get_running_loop()
        patience = PATIENCE if patience is None else patience
        op = Op(min(self._latest, time.monotonic() + patience), loop.create_future(), write, look, rows, now, then)
        self._waiting.append(op)
        if self._flushing is None:
            # (Not create_task: a factory of eager tasks would have it run before the caller is done with his operation.)
            self._flushing = asyncio.Task(self._flush(self._writer), loop=loop, context=contextvars.Context())
        return op.future

    async def _flush(self, writer: aiosqlite.Connection) -> None:
        """Run units until nobody waits. Whoever was cancelled before its unit began is left out, wholly."""
        ops: list[Op] = []
        try:
            while self._waiting:
                if self.claim_comes:
                    self.claim_comes = False
                    await asyncio.sleep(0)
                    continue
                ops = list(self._next_unit())
                if any(op.future.cancelled() for op in ops):
                    self._answer([op for op in ops if op.future.cancelled()])
                    ops = [op for op in ops if not op.future.cancelled()]
                self._unit = ops
                await self._hop(writer, functools.partial(self._run_unit, ops=ops))
                self._answer(ops)
                if self._log_due:
                    await self._hop(writer, self._log.write_back)
        except BaseException as error:
            self._answer(ops + self._waiting, error)
            self._waiting, self._carrier = [], None
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._flushing = None
            self._unit = []

    def _next_unit(self) -> Sequence[Op]:
        """Off the line, what is written together. Callers who were cancelled by now stay behind."""
        count = size = 0
        while count < len(self._waiting) and size < GROUP:
            op = self._waiting[count]
            if op.riders:
                op.rows = [row for row, rider in op.riders if not rider.cancelled()]
                if len(op.rows) < len(op.riders):
                    op.riders = [(row, rider) for row, rider in op.riders if not rider.cancelled()]
            size += len(op.riders) or 1
            count += 1
        ops, self._waiting = self._waiting[:count], self._waiting[count:]
        if self._carrier in ops:
            self._carrier = None
        return ops

    def _run_unit(self, db: sqlite3.Connection, ops: Sequence[Op]) -> None:
        if file_identity(self.path) != self._identity:  # what is written to a deleted file is gone with the process
            raise StoreError(f"{self.path} was deleted or replaced while it was open: put it back, or restart to make a new one")
        run_unit(db, self._namespace, ops)
        usual = all(op.light or op.settles or op.write is None for op in ops)
        if usual and any(op.written and (op.light or op.starts) for op in ops):
            self._loop.call_soon_threadsafe(self._go_ahead, ops)
        self._log_due = self._log.due()
        self._ring(db, ops)
        if self._synchronous == "full" and any(op.written and not op.light for op in ops):
            self._log.sync()

    def _go_ahead(self, ops: Sequence[Op]) -> None:
        """What has been claimed starts while other processes are told, and others of its unit wait for the disk."""
        for op in ops:
            if (op.light or op.settles) and op.finished:
                self._answer([op])
            elif op.starts and op.then is not None and op.finished and op.error is None:
                op.then(op.answer)
                op.then = None

    def _answer(self, ops: Sequence[Op], failure: BaseException | None = None) -> None:
        again, stored = list[Op](), list[tuple[JobRow, asyncio.Future[None]]]()
        for op in ops:
            error = op.error or failure
            if op.then is not None and (error or op.finished or op.future.done()):
                op.then(None if error else op.answer)
                op.then = None
            if op.future.done():
                continue
            if error is not None and len(op.riders) > 1 and not is_busy(error) and failure is None:
                again += self._each_alone(op)
            elif error is not None:
                for future in [rider for _, rider in op.riders] if op.carries else [op.future]:
                    if not future.done():
                        future.set_exception(self._seen(error))
            elif not op.finished:
                op.deadline = min(op.deadline, self._latest)
                again.append(op)
            elif op.carries:
                stored += op.riders
                self.on_added()
            else:
                op.future.set_result(op.answer)
        self._waiting = again + self._waiting
        if len(ops) == 1:
            self._tell(stored)
        elif stored:  # they go on when what a claim of this unit has taken has begun
            soon = asyncio.get_running_loop().call_soon
            soon(soon, self._tell, stored)

    @staticmethod
    def _tell(riders: Sequence[tuple[JobRow, asyncio.Future[None]]]) -> None:
        for _, rider in riders:
            if not rider.done():
                rider.set_result(None)

    def _seen(self, error: BaseException) -> BaseException:
        if isinstance(error, asyncio.CancelledError):
            return StoreError(f"{self.path}: the event loop is going down")
        return store_error(error, self.path)

    def _each_alone(self, carrier: Op) -> Sequence[Op]:
        """One of the riders has a row that cannot be stored: it must not cost the others theirs."""
        ops = []
        for row, rider in carrier.riders:
            op = Op(carrier.deadline, carrier.future, None, rows=[row], now=carrier.now)
            op.riders, op.carries = [(row, rider)], True
            ops.append(op)
        return ops


# ── 19. SQLite store: the pulse ───────────────────────────────────────────────────────────────────────────────────────
# A thread with a connection of its own, for what must go on while the event loop is blocked: leases are renewed, and the
# process stays listed. It also hears of what others wrote; so does the doorbell, a datagram that can only cause a look.

TICK: Final = 0.125  # seconds between looks at PRAGMA data_version, for what something other than tinyq wrote
BEAT: Final = 1.0  # seconds between questions to the event loop
SAFETY: Final = 5.0  # seconds between looks of those who should have been told
STUCK: Final = 10  # leases for which a loop that does not turn keeps its jobs
PULSE_PATIENCE: Final = 0.25  # seconds that the thread waits for the write lock at a time: it has more to do


def knock(bell: socket.socket, ports: Iterable[int]) -> None:
    for port in ports:
        with contextlib.suppress(OSError):  # BlockingIOError, if nobody empties a full door: he has enough to look at
            bell.sendto(b"\0", ("127.0.0.1", port))


class Beat:
    """Whether the event loop turns. It is asked from other threads, and answers with its next turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: float | None = None

    def owed(self) -> float:
        """Seconds for which the loop has owed an answer; it is asked again when it owes none."""
        asked = self._asked
        if asked is not None:
            return time.monotonic() - asked
        self._asked = time.monotonic()
        with contextlib.suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(self._answer)
        return 0.0

    def _answer(self) -> None:
        self._asked = None


class Duty(Record):
    """Something the thread does again and again, and how that has gone."""

    name: str
    call: Callable[[sqlite3.Connection, float], None]
    failures: int = 0
    since: float = 0.0  # monotonic, of the first failure
    again: float = 0.0  # not before
    told: bool = False


class Pulse:
    """The thread and the doorbell of one process on one file.

    `claims` gives what runs here, as for `extend`, and is called in the thread; `heed` (with the answer of a renewal) and `heard`
    (somebody wrote) are called in the loop. `listening`: whether anybody wants to hear. `looks_at`: when the next claim is to be
    made anyway, FOREVER while one is under way.
    """

    def __init__(
        self,
        path: str,
        config: Config,
        worker: str,
        beat: Beat,
        incidents: dict[str, str],
        claims: Callable[[], Sequence[tuple[int, int, str | None]]],
        heed: Callable[[Sequence[tuple[int, int, str | None]], Mapping[int, int | None]], None],
        heard: Callable[[], None],
        listening: Callable[[], bool],
        looks_at: Callable[[], int],
    ) -> None:
        self.renewed = time.monotonic()  # when the owner began the last renewal that it has completed
        self._path, self._config, self._worker, self._beat, self._incidents = path, config, worker, beat, incidents
        self._claims, self._heed, self._heard, self._listening, self._looks_at = claims, heed, heard, listening, looks_at
        self._loop = asyncio.get_running_loop()
        self._lease = round(config.lease * 1e6)
        self._started = config.clock.time()
        self._socket: socket.socket | None = None
        self._port: int | None = None
        self._ports: set[int] = set()
        self._ports_of: tuple[int, int, int] | None = None  # what was known when they were read
        self._db: sqlite3.Connection | None = None
        self._version: int | None = None
        self._paused: frozenset[str] | None = None
        self._renewed_here = self._enlisted = -math.inf
        self._asked = -math.inf
        self._nudge = threading.Event()
        self._begun = asyncio.Event()
        self._ending = False
        self._given_up = False
        self._duties = [Duty(name="listening to the database", call=self._listen), Duty(name="lease renewal", call=self._renew)]
        self._thread = threading.Thread(target=self._serve, name="tinyq-pulse", daemon=True)

    async def start(self) -> None:
        """Until the process is listed, as others are to find it, or that has failed."""
        try:
            self._bind()
        except (OSError, NotImplementedError) as error:  # without it, what others enqueue is seen with the next tick
            log.info("no doorbell: %s", error_text(error))
        self._thread.start()
        await self._begun.wait()

    def _bind(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if self._config.worker:
            self._socket.bind(("127.0.0.1", 0))
            self._loop.add_reader(self._socket, self._rung, self._socket)
            self._port = self._socket.getsockname()[1]

    def attend(self) -> None:
        """Somebody has begun to listen."""
        if not self._config.worker:
            self._nudge.set()

    async def stop(self) -> None:
        self._ending = True
        self._nudge.set()
        try:
            await joined([self._thread])
        finally:
            if self._socket is not None:
                if self._port is not None:
                    self._loop.remove_reader(self._socket)
                self._socket.close()

    def ring(self, db: sqlite3.Connection, now: int) -> None:
        """Have the other workers look; in the thread of the connection. Whoever does not hear it finds out with its next tick."""
        known = self._ports
        self._send(known)  # at once: who is there has probably not changed
        try:
            state = (id(db), db.execute("PRAGMA data_version").fetchone()[0], round(time.monotonic()))
            if state != self._ports_of:  # somebody may have come, or it is long ago that those were seen
                alive = (self._config.namespace, self._worker, now - STUCK * self._lease)
                self._ports = {port for (port,) in db.execute(PORTS, alive)}
                self._ports_of = state
                self._send(self._ports - known)
        except Exception as error:  # the unit has been committed: it must not fail any more
            log.debug("not everybody was rung: %s", error_text(error))

    def _send(self, ports: Iterable[int]) -> None:
        if self._socket is not None:
            knock(self._socket, ports)

    def _rung(self, bell: socket.socket) -> None:
        """However often it rang: one look. What the datagrams say does not matter."""
        for _ in range(1_000):
            try:
                bell.recv(1)
            except OSError:
                break
        self._heard()

    def _serve(self) -> None:
        while not self._ending and not self._loop.is_closed():
            moment = time.monotonic()
            for duty in self._duties:
                self._attend_to(duty, moment)
            if self._asked < 0:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    self._loop.call_soon_threadsafe(self._begun.set)
            if moment - self._asked >= BEAT:  # last: the loop, which this wakes, then need not share the GIL
                self._asked = moment
                self._beat.owed()
            self._nudge.wait(TICK if self._config.worker or self._listening() else BEAT)
            self._nudge.clear()
        self._leave()
        if self._loop.is_closed() and self._socket is not None:  # nobody has called stop, and nobody will
            self._socket.close()

    def _attend_to(self, duty: Duty, moment: float) -> None:
        """Errors back off, and are logged once an incident."""
        if not (self._config.worker or self._listening()):
            self._recovered(duty)  # nobody needs it any more
            return
        if moment < duty.again:
            return
        try:
            db = self._connection()
            with cast(Any, db).busy:  # a fork waits for it
                duty.call(db, moment)
        except Exception as error:
            if self._loop.is_closed():
                self._ending = True
                return
            duty.failures += 1
            duty.since = duty.since if duty.failures > 1 else moment
            duty.again = moment + min(SAFETY, self._config.lease / 6, TICK * 2.0 ** min(duty.failures, 10))
            self._say(duty, error, not is_busy(error) or moment - duty.since >= self._config.lease / 3)
            if not is_busy(error):
                self._disconnect()
        else:
            if duty.told:
                log.info("%s: working again", duty.name)
            self._recovered(duty)

    def _recovered(self, duty: Duty) -> None:
        duty.failures, duty.told = 0, False
        self._incidents.pop(duty.name, None)

    def _say(self, duty: Duty, error: Exception, incident: bool) -> None:
        """Once an incident; a lock that is held for a moment is none."""
        if incident and not duty.told:
            duty.told = True
            known = type(error).__module__.startswith("sqlite3")
            log.error("%s failed and will be tried again: %s", duty.name, error_text(error), exc_info=None if known else error)
        if duty.told:
            self._incidents[duty.name] = error_text(error)

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            import pathlib
            import sqlite3

            existing = pathlib.Path(self._path).as_uri() + "?mode=rw"  # a file that was deleted is not made anew
            self._db = sqlite3.connect(existing, uri=True, isolation_level=None, timeout=0, factory=connection_class())
            self._db.execute("PRAGMA synchronous = NORMAL")  # a renewal that a power cut takes along is not missed
            self._version = None
        return self._db

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None

    def _listen(self, db: sqlite3.Connection, moment: float) -> None:
        """Whether anybody else wrote since the last time, if only the owner, and whether that may be news for a claim."""
        [version] = db.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            next_at, first, first_fragile, paused = edges(db, self._config.namespace)
            sooner = next_at is not None and next_at < self._looks_at()
            if sooner or first is not None or first_fragile is not None or paused != self._paused or self._listening():
                self._loop.call_soon_threadsafe(self._heard)
            self._version, self._paused = version, paused

    def _renew(self, db: sqlite3.Connection, moment: float) -> None:
        """What the owner has not renewed by a third of the lease; and that this process is there."""
        third = self._config.lease / 3
        claims: Sequence[tuple[int, int, str | None]] = ()
        if moment - max(self.renewed, self._renewed_here) >= third and self._may_renew():
            claims = self._claims()
        listed = not self._config.worker or moment - self._enlisted < third
        if listed and not claims:
            return
        answers = committed(db, lambda: self._write(db, claims), time.monotonic() + PULSE_PATIENCE)
        self._enlisted = moment
        if claims:
            self._renewed_here = moment
            self._loop.call_soon_threadsafe(self._heed, claims, answers)

    def _may_renew(self) -> bool:
        """A loop that has not turned for so long will not finish its jobs: others may have them."""
        given_up = self._beat.owed() > STUCK * self._config.lease
        if given_up and not self._given_up:
            log.error("the event loop has not turned for %d leases: the leases of its jobs are not renewed any more", STUCK)
        self._given_up = given_up
        return not given_up

    def _write(self, db: sqlite3.Connection, claims: Sequence[tuple[int, int, str | None]]) -> dict[int, int | None]:
        now = self._config.clock.time()
        if self._config.worker:
            db.execute(ENLIST, (self._worker, self._config.namespace, self._port, self._started, now))
            db.execute(STRIKE_OFF, ("", now - max(STUCK * self._lease, 86_400_000_000)))
        return extend_leases(db, claims, now + self._lease) if claims else {}

    def _leave(self) -> None:
        """Nobody need ring here any more. A row that cannot be deleted now is pruned by others when it is old."""
        db = self._db
        if db is not None and self._config.worker:
            with contextlib.suppress(Exception):
                patiently(lambda: db.execute(STRIKE_OFF, (self._worker, 0)), time.monotonic() + PULSE_PATIENCE)
        self._disconnect()


# ── 20. SQLite store: without an event loop ───────────────────────────────────────────────────────────────────────────
# Jobs enqueued from threads and scripts in which no engine runs: straight into the file.


def insert_here(path: str, config: Config, rows: Sequence[JobRow], now: int) -> list[Inserted]:
    """Insert rows in a transaction of their own, and wake the workers. The connection is opened and closed with each call: that
    costs about a millisecond, and so there is none to be shared by threads, inherited by forks, or left behind."""
    import sqlite3

    deadline = time.monotonic() + PATIENCE
    db: Any = None
    try:
        db = sqlite3.connect(path, isolation_level=None, timeout=0, factory=connection_class())
        with db.busy:
            prepare(db, path, config.synchronous, config.auto_migrate)
            db.execute("PRAGMA wal_autocheckpoint = 1000")  # there may be no worker yet that writes the log back

        def once() -> list[Inserted]:
            with db.busy:  # a fork need not wait as long as this waits for the lock
                return committed(db, lambda: insert_rows(db, config.namespace, rows, now), 0.0)

        inserted = patiently(once, deadline)
        if any(answer.verdict in ("created", "replaced") and answer.row.run_at <= now for answer in inserted):
            ring_all(db, config, now)
        return inserted
    except Exception as error:
        raise store_error(error, path) from (None if isinstance(error, TinyQError) else error)
    finally:
        if db is not None:
            db.close()


def ring_all(db: Any, config: Config, now: int) -> None:
    """What `Pulse.ring` does, for those who have no pulse."""
    try:
        with db.busy:
            alive = (config.namespace, "", now - STUCK * round(config.lease * 1e6))
            ports = [port for (port,) in db.execute(PORTS, alive)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bell:
            bell.setblocking(False)
            knock(bell, ports)
    except Exception as error:  # the job is stored: whoever was not rung finds it with his next tick
        log.debug("not everybody was rung: %s", error_text(error))


def insert_here_within(tx: Any, path: str, config: Config, rows: Sequence[JobRow], now: int) -> list[Inserted]:
    """Insert rows in the caller's transaction, in the caller's thread."""
    import sqlite3

    with sqlalchemy_errors(tx, path):
        found = driver_connection(tx) if is_a(tx, *SQLALCHEMY) else tx
    if not isinstance(found, sqlite3.Connection):
        raise TypeError(f"tx is {tx!r}, which only an event loop can use: write `await enqueue(…, tx=…)` there")
    try:
        return insert_within(found, path, file_identity(path), config.namespace, rows, now, migrating=config.auto_migrate)
    except sqlite3.Error as error:
        raise tx_error(error, path) from error


# ── 21. Running one job: its place and its thread ─────────────────────────────────────────────────────────────────────
# What is known of a job while it runs here. Plain functions run in daemon threads of tinyq's own: an executor's threads would
# hold up the interpreter's exit, and a shared pool that is full would delay timeouts.

Ended = tuple[Any, BaseException | None]  # what a call returned, or what it raised
Why = Literal["timeout", "cancel", "shutdown", "lost", "abandoned"]


STOP_REASONS: Final[Mapping[Why, str]] = {
    "timeout": "timed out",
    "cancel": CANCELLED_ON_REQUEST,
    "shutdown": "interrupted by shutdown",
    "lost": "its lease was lost",
    "abandoned": "abandoned at shutdown",
}


def label(row: JobRow, attempt: int | None = None) -> str:
    """How a job is called in logs: name, id, attempt; never its arguments."""
    return f"job {row.task} [{id_text(row.id)}] attempt {row.attempts if attempt is None else attempt}"


class Tier(Record):
    """One of the two places jobs live in, and what its claim loop needs. `tasks`: see Room."""

    store: Store
    durable: bool
    tasks: Mapping[str, bool]
    wake: asyncio.Event
    claiming: bool = True
    waits_for_room: bool = False
    reports: bool = False  # whether any job has told of its progress
    app: object = None  # what was given to `lifespan`
    middleware: Sequence[Middleware] = ()  # the first is outermost; grows while jobs run
    hungry: bool = False  # something due may have been left for lack of room: a slot that comes free is to wake it
    limited: frozenset[str] = frozenset()  # see Claimed: the end of a job of such a task is to wake it
    serves: frozenset[str] | None = None  # see Room
    terms: Mapping[str, Terms] = {}  # by task


class Running(JobRow):
    """A row that runs in this process. (A name for type checkers: rows do not change their class.)"""

    handler: Handler  # pyright: ignore[reportIncompatibleVariableOverride]
    settings: Settings  # pyright: ignore[reportIncompatibleVariableOverride]


class BatchCall(Running):
    """One call of a batch handler for several jobs, whose rows stay their own. It looks like a running job that is in no store:
    like the first of them."""

    def __init__(self, tier: Tier, items: Sequence[Running]) -> None:
        first = items[0]
        super().__init__(first.id, first.task, first.queue, first.priority, first.run_at, first.created)
        self.tier, self.handler, self.left = tier, first.handler, len(items)
        self.settings = max((item.settings for item in items), key=lambda settings: settings.timeout)
        self.lost, self.limit_value = first.lost, first.limit_value
        self.hold(items)

    def hold(self, items: Sequence[Running]) -> None:
        """It is a call for these. (What it has taken, a slot of some kind, stays the same.)"""
        self.items, first = items, items[0]
        for name in ("id", "priority", "run_at", "created", "seq", "claim_no", "attempts", "headers", "fire_time"):
            setattr(self, name, getattr(first, name))

    def stop_for(self, why: Why) -> None:
        """One of its jobs is to stop. What concerns that one alone does not stop the others."""
        alone = why in ("cancel", "lost") and any(item.why is None for item in self.items)
        if not alone and (self.why is None or why == "abandoned"):
            self.stop(why)


def headers_of(row: JobRow) -> dict[str, str]:
    """What goes with a job besides its arguments: its own, else those of its task. None of it, if a hand has spoilt it."""
    if row.headers is None:
        return dict(row.settings.headers or {}) if row.settings else {}
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return as_headers(decode_json(row.headers))
    return {}


def as_progress(text: str | None) -> tuple[float, str | None] | None:
    with contextlib.suppress(TypeError, ValueError, RecursionError):  # a hand may have written anything
        fraction, message = decode_json(text or "")
        return float(fraction), message if message is None else str(message)
    return None


PROGRESS_EVERY: Final = 0.25  # seconds between two writes of one job's progress
PROGRESS_MESSAGE: Final = 500  # characters


class Written:
    """What `CurrentJob.progress` answers; it need not be awaited."""

    def __init__(self, write: asyncio.Future[None] | None = None) -> None:
        self._write = write

    def __await__(self) -> Generator[Any, None, None]:
        if self._write is not None:
            yield from asyncio.shield(self._write).__await__()


class Reporter:
    """Writes what one attempt of a durable job tells of its progress: the first at once, and then at most one in each quarter of
    a second, the latest. In the job's loop."""

    def __init__(self, job: Running, loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._claim_no, self._loop = job, job.claim_no, loop
        self._text: str | None = None  # handed to the store last
        self._pause: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._warned = False

    def report(self, at_once: bool) -> asyncio.Future[None] | None:
        """Write what the job has said last, now or when the pause is over."""
        if self._pause is not None and not at_once:
            return None
        self._text = cast(str, self._job.progress)
        self._rest()
        self._writing = self._loop.create_task(self._write(self._text), context=contextvars.Context())
        return self._writing

    def _rest(self) -> None:
        if self._pause is None:
            self._pause = self._loop.call_later(PROGRESS_EVERY, self._go_on, context=contextvars.Context())

    def _go_on(self) -> None:
        self._pause = None
        if self._writing is not None and not self._writing.done():
            self._rest()  # one at a time, while the store is slow
        elif self._job.progress != self._text and self._is_alive():
            self.report(False)

    def _is_alive(self) -> bool:
        job = self._job
        return job.runner is not None and job.claim_no == self._claim_no and job.why not in ("lost", "abandoned")

    async def _write(self, text: str) -> None:
        if not self._is_alive():
            return
        try:
            await self._job.tier.store.progress([(self._job.seq, self._claim_no, text)])
        except Exception as error:
            if not self._warned:
                self._warned = True
                log.warning("%s: its progress cannot be written: %s", label(self._job), error_text(error))

    def close(self, kept: bool) -> tuple[int, int, str] | None:
        """The attempt has ended: what is still to be written of it, if anything is kept of the job."""
        if self._pause is not None:
            self._pause.cancel()
        job = self._job
        job.reporter = None
        return (job.seq, self._claim_no, job.progress) if kept and job.progress not in (None, self._text) else None


def report_progress(job: Running, fraction: float, message: str | None = None) -> Written:
    """What `CurrentJob.progress` does; in any thread."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"progress is {fraction!r}: give a number from 0 to 1")
    if not 0 <= fraction <= 1:
        raise ValueError(f"progress is {fraction!r}: give a number from 0 to 1")
    if message is not None and not isinstance(message, str):
        raise TypeError(f"the message of a progress is {message!r}: give a str")
    message, runner = message and message[:PROGRESS_MESSAGE], job.runner
    if job.to_parent is not None:
        job.to_parent(float(fraction), message)
    if runner is None:  # it has ended: this is something that it has left behind
        return Written()
    job.progress = encode_json([float(fraction), message])
    if not job.tier.durable:
        return Written()
    loop = runner.get_loop()

    def report() -> asyncio.Future[None] | None:
        if job.runner is not runner:
            return None
        if job.reporter is None:
            job.reporter, job.tier.reports = Reporter(job, loop), True
        return job.reporter.report(at_once=fraction == 1)

    if asyncio._get_running_loop() is loop:
        return Written(report())
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(report)
    return Written()


class CurrentJob:
    """The job that the calling code runs in; from `current_job()`."""

    def __init__(self, job: Running) -> None:
        self._job = job

    @property
    def id(self) -> str:
        """The same over retries and reclaims: the idempotency key to hand to other services."""
        return id_text(self._job.id)

    @property
    def task(self) -> str:
        return self._job.task

    @property
    def queue(self) -> str:
        return self._job.queue

    @property
    def attempt(self) -> int:
        """1 for the first start."""
        return self._job.attempts

    @property
    def created(self) -> datetime:
        return cast(datetime, as_datetime(self._job.created))

    @property
    def fire_time(self) -> datetime | None:
        """The scheduled moment, aware, if a schedule made this job."""
        return as_datetime(self._job.fire_time)

    @property
    def cancelled(self) -> bool:
        """Whether the job has been told to stop: a plain function in a thread should look now and then."""
        return self._job.why is not None

    @property
    def app(self) -> Any:
        """The application that was given to `lifespan`; None if there was none, and in a process of its own (`run_in`)."""
        return self._job.tier.app

    @property
    def headers(self) -> Mapping[str, str]:
        """What goes with the job besides its arguments: the option `headers`, and what `on_enqueue` hooks have added. The same
        over retries."""
        return headers_of(self._job)

    @property
    def batch(self) -> Sequence[CurrentJob]:
        """In a batch handler: the jobs of all its items, in their order, where the job itself is the first. Else empty."""
        return [CurrentJob(item) for item in self._job.items] if isinstance(self._job, BatchCall) else ()

    def progress(self, fraction: float, message: str | None = None) -> Awaitable[None]:
        """Tell how far the job has come: from 0 to 1, with a message (cut after 500 characters). Read it as `Job.progress`.

        It counts at once for handles in this process. For those in others it is written with a durable job: the first at once,
        then the latest one about every 0.25 s, and 1 always; awaited, this returns when it has been written, or at once if it is
        going to be within that time. It need not be awaited, so plain functions may call it from their threads. Each attempt
        starts with none. From a process of its own (`run_in`) it is handed on at once, without waiting for anything. A store that
        fails is one WARNING. Raises TypeError, or ValueError if it is not between 0 and 1.
        """
        job = self._job.items[0] if isinstance(self._job, BatchCall) else self._job
        return report_progress(job, fraction, message)


_current: contextvars.ContextVar[Running] = contextvars.ContextVar("tinyq_current_job")
_spawned: contextvars.ContextVar[bool] = contextvars.ContextVar("tinyq_spawned", default=False)


def current_job() -> CurrentJob:
    """The job that the calling code runs in. Raises LookupError outside of one."""
    try:
        return CurrentJob(_current.get())
    except LookupError:
        raise LookupError("current_job() was called outside of a job") from None


class Threads:
    """Daemon threads that are reused. Claims take no more plain functions than there are slots, so nothing queues here."""

    inline = False  # nothing leaves the calling thread, nor the process

    def __init__(self) -> None:
        import queue

        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Ended]] | None]
        self._work = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Ended]:
        """(value, None) or (None, error), when the call has ended."""
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        with self._lock:
            grow = self._idle == 0
            self._idle -= not grow
        if grow:  # before the call is handed over: a thread that cannot be started must not leave it behind
            thread = threading.Thread(target=self._serve, name=f"tinyq-{len(self._threads) + 1}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._work.put((call, future))
        return future

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            call, future = item
            try:
                ended: Ended = (call(), None)
            except BaseException as error:
                ended = (None, error)
            with self._lock:
                self._idle += 1
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(self._resolve, future, ended)
            del item, call, future, ended

    @staticmethod
    def _resolve(future: asyncio.Future[Any], ended: Any) -> None:
        if not future.done():
            future.set_result(ended)

    async def close(self) -> None:
        """End the idle threads. One that is still in a call ends after it, or with the process."""
        busy = len(self._threads) - self._idle
        for _ in self._threads:
            self._work.put(None)
        await joined(self._threads, busy)


async def call_in_thread(job: Running, threads: Threads, call: Callable[[], Any]) -> Ended:
    """Waits for the thread's real end whatever happens: until then the job keeps its slot and its lease, and is not retried."""
    future = threads.submit(functools.partial(contextvars.copy_context().run, call))
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            if job.why in (None, "abandoned"):
                raise
            job.note = f"{STOP_REASONS[job.why]}; thread still running"
            log.warning("%s: %s; it keeps its slot until the function returns", label(job), job.note)
    return future.result()


# ── 22. Running one job: what its handler depends on ──────────────────────────────────────────────────────────────────
# FastAPI's `Depends` on a handler's parameters: what they depend on is called for each attempt, and closed when that ends.


class Provider:
    """Calls what one attempt of a job depends on, each dependency once; `stack` closes it."""

    def __init__(self, job: Running, threads: Threads, stack: contextlib.AsyncExitStack) -> None:
        self._job, self._threads, self._stack = job, threads, stack
        self._overrides: Mapping[Any, Any] = getattr(job.tier.app, "dependency_overrides", None) or {}
        self._known: dict[Any, Any] = {}

    async def provide(self, needs: Mapping[str, Dependency]) -> dict[str, Any]:
        return {name: await self._one(need) for name, need in needs.items()}

    async def _one(self, need: Dependency) -> Any:
        if need.use_cache and need.call in self._known:
            return self._known[need.call]
        call = self._overrides.get(need.call, need.call)
        if call is not need.call:
            need = need._replace(needs=dependency_of(call, True, f"task {self._job.task!r}: {call!r}").needs)
        given = await self.provide(need.needs)
        value = await self._enter(call, given)
        if self._job.why is not None:  # told to stop meanwhile, for which a thread does not end
            raise asyncio.CancelledError
        self._known.setdefault(need.call, value)
        return value

    async def _enter(self, call: Any, given: Mapping[str, Any]) -> Any:
        body, context = body_of(call), contextvars.copy_context()
        if inspect.isasyncgenfunction(body):
            return await self._stack.enter_async_context(contextlib.asynccontextmanager(call)(**given))
        if inspect.iscoroutinefunction(body):
            return await call(**given)

        async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
            value, error = await call_in_thread(self._job, self._threads, functools.partial(context.run, function, *args))
            if error is not None:
                raise error
            return value

        if not inspect.isgeneratorfunction(body):
            return await in_thread(functools.partial(call, **given))
        manager = contextlib.contextmanager(call)(**given)
        value = await in_thread(manager.__enter__)
        self._stack.push_async_exit(functools.partial(in_thread, manager.__exit__))
        return value


# ── 23. Running one job: a process of its own ─────────────────────────────────────────────────────────────────────────
# A spawned child for each: a fresh interpreter that imports the handler's module, calls it and sends back what came of it, as
# pickle, which is never stored. One of tinyq's threads starts the child and waits for its end; a job is stopped by a kill.

LINGER: Final = 5.0  # seconds that a child has for its threads and exit functions after it has sent the outcome
FOR_CHILD: Final = ("id", "task", "queue", "priority", "run_at", "created", "attempts", "fire_time")  # of its row
CHILD: Final = "import importlib, sys; name, fd, *sys.path = sys.argv[1:]; importlib.import_module(name).be_child(int(fd))"
PARENTS_AFFAIR: Final = (signal.SIGINT, signal.SIGTERM)  # may reach all processes of a service; ours are told by their parents

_is_child = False  # this is the process of one job
_importing = False  # in a child: the application is being imported


class ChildTraceback(Exception):
    """Shows, as the cause of an error that came from a child, where it was raised there."""


def move_to_process(handler: Handler, run_in: RunIn) -> None:
    """Give each job of a task a process. TypeError if that could not find the function."""
    choice(run_in, "run_in", None, "process")
    fn, where = handler.fn, f"task {handler.name!r}: run_in='process'"
    if not hasattr(os, "killpg"):
        raise TypeError(f"{where} needs a POSIX system")
    named = isinstance(getattr(fn, "__module__", None), str) and "<" not in getattr(fn, "__qualname__", "<")
    if not named or not inspect.isroutine(fn) or inspect.ismethod(fn):
        raise TypeError(
            f"{where} needs a function that a new process can import by module and name, which {fn!r} is not: "
            "write it with def at module level, and give it what it needs as arguments"
        )
    if fn.__module__ == "__main__":
        main_program(where)
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # as it is called in a child, see main_program
    if handler.needs:
        raise TypeError(f"{where} leaves no way for {', '.join(handler.needs)}: what a Depends gives stays in this process")
    handler.run_in, handler.in_thread, handler.direct = run_in, False, False


def main_program(where: str) -> tuple[bool, str]:
    """How a child imports what this process was started with: whether as a module, and its name or path. As multiprocessing does
    it, under the name `__mp_main__`, so that `if __name__ == "__main__"` is False there."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    name = spec.name if spec is not None else path
    if name is None or (spec is not None and name.split(".")[-1] == "__main__") or not os.path.exists(path or ""):
        raise TypeError(f"{where} cannot import a function of {main!r}: move it to a module of its own")
    return spec is not None, name


def refuse_start_at_import() -> None:
    """RuntimeError in a child whose main program has no guard: it would do there all that it does in its parent."""
    if _importing:
        raise RuntimeError(
            "a TinyQ was started by importing the program, which the process of a job (run_in='process') does: "
            "put what starts it under `if __name__ == '__main__':`"
        )


def kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter from macOS, if only zombies are left
        os.killpg(leader, signal.SIGKILL)


class Child:
    """The process of one running job: `run` is called in a thread, and `kill` in the event loop meanwhile."""

    def __init__(self, job: Running, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._job = job
        self._call = (args, kwargs)
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()
        self._progress: tuple[float, str | None] | None = None  # what the event loop has not been told yet

    def kill(self) -> None:
        """With all of its group."""
        self._killed = True
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    def run(self) -> Ended:
        """What the handler returned or raised, or how the process ended without either."""
        request = self._request()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._process = process = self._start(theirs.fileno())
            try:
                if self._killed:  # before there was anything to kill
                    self.kill()
                told = self._converse(ours, request)
                if told is None:
                    process.wait()
            finally:
                kill_group(process.pid)  # whatever is left of it
                process.wait()
        return (None, ProcessDied(process.returncode)) if told is None else told

    def _request(self) -> bytes:
        import pickle

        fn = self._job.handler.fn
        main = main_program("run_in='process'") if fn.__module__ in ("__main__", "__mp_main__") else None
        row = {name: getattr(self._job, name) for name in FOR_CHILD} | {"headers": encode_json(headers_of(self._job))}
        try:
            call = pickle.dumps(self._call)
        except Exception as error:
            raise TypeError(f"the arguments cannot be pickled for the job's process: {error_text(error)}") from error
        return pickle.dumps((os.getpid(), main, fn.__module__, fn.__qualname__, row, call))

    @staticmethod
    def _start(fd: int) -> subprocess.Popen[bytes]:
        """Leader of a group of its own, so that a kill finds all that it starts and a Ctrl-C in a terminal does not reach it.
        SIGTERM, which systemd sends to every process of a service, waits until the child can tell that it is not meant."""
        import subprocess

        this = __spec__.name if __spec__ is not None else __name__  # which is __main__ for `python -m tinyq`
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # pyright: ignore
        path = [entry for entry in sys.path if isinstance(entry, str)]
        command = [sys.executable, *flags, "-c", CHILD, this, str(fd), *path]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_AFFAIR)
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,), start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _converse(self, ours: socket.socket, request: bytes) -> Ended | None:
        """Say what is to be done, and hear what comes of it; None if the child ends before it has said so."""
        import pickle

        try:
            ours.sendall(request)
            with ours.makefile("rb") as stream:
                while (message := pickle.load(stream))[0] == "progress":
                    self._hand_on(*message[1:])
        except (EOFError, OSError, pickle.UnpicklingError):
            return None
        ours.settimeout(LINGER)
        try:
            while ours.recv(65536):
                pass
            cast("subprocess.Popen[bytes]", self._process).wait(LINGER)
        except Exception:  # whichever of the two gave up
            log.warning("%s: its process did not end within %g s of its function and is killed", label(self._job), LINGER)
        return received(*message)

    def _hand_on(self, *progress: Any) -> None:
        """To the event loop: the latest, as a child may say more than that has time to hear."""
        with self._lock:
            told, self._progress = self._progress is not None, progress
        if not told:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        with self._lock:
            progress, self._progress = self._progress, None
        if progress is not None and self._job.in_handler:
            report_progress(self._job, *progress)


def received(kind: str, pickled: bytes | None, *about: str) -> Ended:
    """What a child has sent, as (value, None) or (None, error)."""
    import pickle

    if kind == "value":
        try:
            return (None if pickled is None else pickle.loads(pickled)), None
        except Exception as error:
            return None, TypeError(f"the result cannot be unpickled: {error_text(error)}")
    module, name, message, trace = about
    raised: BaseException = type(name, (Exception,), {"__module__": module})(message)  # if all else fails
    with contextlib.suppress(Exception):
        found = pickle.loads(pickled or b"")
        raised = revive(*found) if isinstance(found, tuple) else found
    raised.__cause__ = ChildTraceback("\n" + trace)
    return None, raised


async def call_in_process(job: Running, threads: Threads, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ended:
    """Until the process has ended, of itself or killed as soon as the job is told to stop."""
    child = Child(job, args, kwargs)
    ending = threads.submit(child.run)
    stop: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.wait({ending})
        except asyncio.CancelledError as error:
            if job.why == "abandoned":  # not even a kill has ended it
                raise
            stop = error
            child.kill()
    ended, failure = ending.result()
    value, error_there = ended if failure is None else (None, failure)
    if stop is not None and error_there is not None:
        raise stop
    return value, error_there


def be_child(fd: int) -> None:
    """All that the spawned process does."""
    global _is_child
    import pickle

    _is_child = True

    for number in PARENTS_AFFAIR:  # (not SIG_IGN, which the programs that it runs would inherit)
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_AFFAIR)
    del sys.argv[1:]
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)  # or its end would not be seen as long as another holds it
    try:
        with sock.makefile("rb") as stream:
            parent, *request = pickle.load(stream)
    except (EOFError, pickle.UnpicklingError):  # the parent died
        return
    threading.Thread(target=end_with, args=(parent, sock), name="tinyq-parent", daemon=True).start()
    lock = threading.Lock()

    def send(*message: object) -> None:
        data = pickle.dumps(message)
        with lock:
            sock.sendall(data)

    def tell_progress(fraction: float, message: str | None) -> None:
        with contextlib.suppress(OSError):  # a fork of this process has no way to the parent
            send("progress", fraction, message)

    try:
        value = called_in_child(tell_progress, *request)
        try:
            outcome: tuple[Any, ...] = ("value", None if value is None else pickle.dumps(value))
        except Exception as error:
            raise TypeError(f"the result cannot be pickled: {error_text(error)}") from error
    except SystemExit:
        raise
    except BaseException as error:
        kind, (_, _, message) = type(error), error_text(error).partition(": ")
        outcome = ("error", pickled_error(error), kind.__module__, kind.__qualname__, message, traceback_text(error))
    send(*outcome)


def end_with(parent: int, sock: socket.socket) -> None:
    """Kill this process, and what it has started, when its parent is gone: nobody waits for the outcome."""
    import select

    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while os.getppid() == parent and not poll.poll(1000):  # (a fork of the parent may hold the other end open)
        pass
    kill_group(os.getpgrp())


def called_in_child(
    to_parent: Callable[[float, str | None], None],
    main: tuple[bool, str] | None,
    module: str,
    qualname: str,
    row: Mapping[str, Any],
    call: bytes,
) -> object:
    """Find the function, call it, and run the coroutine if it is one."""
    import importlib
    import pickle

    global _importing
    _importing = True
    found: Any = importlib.import_module(module) if main is None else import_main(*main)
    _importing = False
    for name in qualname.split("."):
        found = getattr(found, name)
    handler = getattr(found, "_handler", None)
    if isinstance(handler, Handler):  # it has been decorated
        found = handler.fn
    args, kwargs = pickle.loads(call)
    tier = Tier(store=MemoryStore(), durable=False, tasks={}, wake=asyncio.Event())  # of which it knows nothing here
    _current.set(cast(Running, JobRow(**row, tier=tier, to_parent=to_parent)))
    value = found(*args, **kwargs)
    return asyncio.run(result_of(value)) if inspect.isawaitable(value) else value


async def result_of(work: Awaitable[T]) -> T:
    return await work


def import_main(as_module: bool, name: str) -> object:
    import runpy
    import types

    main = types.ModuleType("__mp_main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    run = functools.partial(runpy.run_module, alter_sys=True) if as_module else runpy.run_path
    vars(main).update(run(name, run_name="__mp_main__"))
    return main


def pickled_error(error: BaseException) -> bytes | None:
    """So that it can be unpickled: as it says itself, or in its parts, without those that cannot; None for a local class."""
    import pickle

    def survives(value: object) -> bool:
        try:
            return isinstance(pickle.loads(pickle.dumps(value)), type(value))
        except Exception:
            return False

    if survives(error):
        return pickle.dumps(error)
    args = error.args if survives(error.args) else (error_text(error).partition(": ")[2],)
    parts = (type(error), args, {name: value for name, value in vars(error).items() if survives(value)})
    return pickle.dumps(parts) if survives(parts) else None


# ── 24. Running one job: the call ─────────────────────────────────────────────────────────────────────────────────────
# User code is awaited in `call_handler` and nowhere else. Whatever it does (return, raise, time out, be cancelled, call
# sys.exit) comes back as an Outcome.


def lost_for_good(row: JobRow, settings: Settings) -> bool:
    """Whether a claim has found what a process that does not know the task had to leave pending when its worker was lost."""
    return row.attempts > settings.retry.max_attempts or (settings.on_lost == "dead" and row.reason == WORKER_LOST)


def has_begun(job: Running) -> bool:
    """Whether its handler has been called before, for this fire time if it recurs."""
    return job.attempts > 1 or job.snoozes > 0 or job.interruptions > 0 or job.reason == SPLIT


def choose_fire_time(job: Running, now: int) -> bool:
    """For which of the fire times that have passed a recurring job runs; False for none of them, as it is too late."""
    due, text = cast(int, job.fire_time), cast(str, job.recurrence)
    if 0 <= now - due < interval_of(text)[2] and job.attempts == 1:
        job.ran = tuple.__new__(Ran, (due, now, 0, 0, text))  # (without the detour of Ran(...): one for each job)
        return True
    recurrence = recurrence_of(text)
    rule = rule_from(recurrence.rule)
    latest, chosen, missed = choose(rule, recurrence.misfire, recurrence.grace, due - 1, now)
    begun = has_begun(job)
    if latest <= due and (begun or waited_on_purpose(job, recurrence, rule, now)):  # once it has begun it is no longer too late
        job.ran = Ran(due, now, 0, 0, cast(str, job.recurrence))
        return True
    if not chosen:  # None: a clock has been set back since it was claimed
        job.ran = Ran(latest, now, missed - begun, begun) if latest >= due else None
        return job.ran is None
    job.fire_time = chosen[0] if recurrence.misfire == "all" else chosen[-1]
    superseded = job.fire_time != due and begun  # it was late for its retry, and the next fire time has come
    if superseded:
        job.attempts, job.snoozes, job.interruptions = 1, 0, 0
    job.ran = Ran(job.fire_time, now, missed - superseded, superseded, cast(str, job.recurrence))
    return True


def waited_on_purpose(job: Running, recurrence: Recurrence, rule: Rule, now: int) -> bool:
    """Whether a recurring job is late because its last run was not over, or by no more than the window in which it waits for
    others to go with."""
    due, grace = cast(int, job.fire_time), recurrence.grace
    window = job.handler.terms.window if job.handler.terms is not None else 0
    if job.reason == QUEUED:
        most = ON_TIME * 1e6 if recurrence.misfire == "skip" else longest_delay(rule, grace, due)
        return now - job.run_at - window < most
    return window > 0 and -window <= now - due - window < min(ON_TIME, math.inf if grace is None else grace) * 1e6


def prepare_call(job: Running, now: int) -> Outcome | Arguments:
    """The arguments, or why the handler is not to be called."""
    if job.refused is not None:
        return job.refused
    if job.expires is not None and job.expires < now and not has_begun(job):
        return Outcome("expired", reason="expired before it started")
    if job.lost and lost_for_good(job, job.settings):
        return Outcome("lost", reason=WORKER_LOST)
    try:
        if job.recurrence and not choose_fire_time(job, now):
            return Outcome("missed")
    except Exception as error:  # of another version, or of an installation without cronsim: others may know it
        return Outcome("parked", error=error, reason=RULE_FAILS)
    if job.args is not None:
        return job.args, job.kwargs
    try:
        job.args, job.kwargs = decode_call(job.payload, job.payload_version)
    except Undecodable as error:
        return Outcome("undecodable", reason=str(error))
    try:
        check_call(job.handler, job.args, job.kwargs)
        if job.handler.codecs is not None:
            job.args, job.kwargs = read_call(job.handler, (job.args, job.kwargs))
    except (TypeError, Misfit) as error:
        job.args = None
        misfit = f"task {job.handler.name!r} does not take these arguments: {error}"
        return Outcome("parked", error=TypeError(misfit) if isinstance(error, Misfit) else error)
    return job.args, job.kwargs


SHORT: Final = 2_000  # characters of payloads that are decoded together
TOGETHER: Final = 64  # of them: what is needed only meanwhile is gone before the garbage collector comes for it


def decode_all(rows: Sequence[JobRow], handlers: Mapping[str, Handler]) -> None:
    """Give rows that a claim has just read their arguments, many at a time, which takes a fraction of the time."""
    plain = [row for row in rows if type(row) is ClaimedRow]
    for first in range(0, len(plain), TOGETHER):
        decode_together(plain[first : first + TOGETHER], handlers)


def decode_together(plain: Sequence[JobRow], handlers: Mapping[str, Handler]) -> None:
    """Where anything is out of the ordinary prepare_call does it, and tells what is wrong with which."""
    payloads = [row.payload or "" for row in plain]
    if max(map(len, payloads), default=SHORT) >= SHORT:
        return
    between = os.urandom(8).hex()  # no payload knows it, and so no two that are spoilt make up for each other
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        calls = decode_json("[" + f',"{between}",'.join(payloads) + "]", strict=True)
        if len(calls) != 2 * len(plain) - 1 or calls[1::2].count(between) != len(plain) - 1:
            return
        for row, (args, kwargs) in zip(plain, calls[::2], strict=True):
            handler = handlers.get(row.task)
            if handler is not None and handler.codecs is None and type(args) is list and kwargs == {}:
                row.args = args if handler.fewest <= len(args) <= handler.most else None


def check_call(handler: Handler, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TypeError unless the handler takes these arguments."""
    if (kwargs or not handler.fewest <= len(args) <= handler.most) and handler.signature is not None:
        for name in handler.needs:
            if name in kwargs:
                raise TypeError(f"task {handler.name!r}: {name} is not for callers: its Depends fills it in for each attempt")
        try:
            handler.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"task {handler.name!r} does not take these arguments: {error}") from None


async def call_in_its_place(job: Running, threads: Threads, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ended:
    """The handler itself, in the loop, in a thread or in a process of its own."""
    handler = job.handler
    if handler.run_in is not None and not threads.inline:
        return await call_in_process(job, threads, args, kwargs)
    if handler.is_async:
        return await handler.fn(*args, **kwargs), None
    value, error = await call_in_thread(job, threads, functools.partial(handler.fn, *args, **kwargs))
    return (await value if inspect.isawaitable(value) else value), error


async def call_with_dependencies(job: Running, threads: Threads, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ended:
    """The handler with what it depends on. Its error is thrown into generators; one that swallows it makes no success of it."""
    handler, failure = job.handler, cast("BaseException | None", None)
    try:
        async with contextlib.AsyncExitStack() as stack:
            try:
                provided = await Provider(job, threads, stack).provide(handler.needs)
                given = cast(inspect.Signature, handler.signature).bind(*args, **kwargs).arguments
                call = inspect.BoundArguments(cast(inspect.Signature, handler.whole), cast(Any, {**given, **provided}))
                value, failure = await call_in_its_place(job, threads, call.args, call.kwargs)
                if failure is None:
                    return value, None
                raise failure
            except BaseException as raised:
                failure = raised
                raise
        return None, failure
    finally:
        del failure  # its traceback holds this frame


async def call_around(job: Running, threads: Threads, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ended:
    """The handler with its dependencies, inside of the middleware, inside of which a thread's error is raised like any other."""

    async def innermost(_: CurrentJob) -> Any:
        call = call_with_dependencies if job.handler.needs else call_in_its_place
        value, error = await call(job, threads, args, kwargs)
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # its traceback holds this frame

    call_next: CallNext = innermost
    for function in reversed(job.tier.middleware):
        call_next = functools.partial(pass_on, function, call_next)
    try:
        return await call_next(CurrentJob(job)), None
    except BaseException as raised:
        if job.handler.is_async:
            raise
        # No coroutine can raise StopIteration: Python makes it the cause of a RuntimeError.
        stopped = isinstance(raised, RuntimeError) and isinstance(raised.__cause__, StopIteration)
        return None, raised.__cause__ if stopped else raised


def pass_on(function: Middleware, call_next: CallNext, job: CurrentJob) -> Awaitable[Any]:
    return function(job, call_next)


def check_middleware(function: Any) -> None:
    if not callable(function) or not inspect.iscoroutinefunction(body_of(function)):
        raise TypeError(f"middleware() takes an async function, `async def mw(job, call_next)`, and this is {function!r}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TypeError(f"middleware() takes an async function of (job, call_next), and {function!r} is none: {error}") from None


def add_headers(row: JobRow, hooks: Sequence[EnqueueHook]) -> None:
    """Let the hooks add to the headers of a new job, in the context of whoever enqueues it."""
    headers = headers_of(row)
    for hook in hooks:
        changed = dict(headers)
        try:
            hook(changed)
            headers = as_headers(changed)
        except Exception as error:
            log.warning("on_enqueue hook %r failed for a job of task %s, which goes on: %s", hook, row.task, error_text(error))
    if headers or row.headers is not None:
        row.headers = encode_json(headers)


async def call_handler(job: Running, threads: Threads, clock: Clock, ended: Callable[[Running, Outcome], None]) -> None:
    """The whole task of one job: run its handler, and hand over what came of it. Raises nothing but a real Ctrl-C."""
    args, kwargs = job.args, job.kwargs
    if args is None or job.recurrence or job.expires is not None or job.refused is not None:
        found = prepare_call(job, clock.time())
        if isinstance(found, Outcome):
            ended(job, found)
            return
        args, kwargs = found
    why = job.why  # it was told to stop between the claim and this line
    if why == "shutdown":
        ended(job, Outcome("unstarted"))
        return
    _current.set(job)
    job.in_handler = True
    try:
        if why is not None:
            raise asyncio.CancelledError
        error: BaseException | None = None
        handler, middleware = job.handler, job.tier.middleware
        if handler.direct and not middleware:
            value = await handler.fn(*args, **kwargs)
        else:
            call = call_around if middleware or handler.needs else call_in_its_place
            value, error = await call(job, threads, args, kwargs)
        outcome = outcome_of(error) if error is not None else DONE if value is None else Outcome("done", value)
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise  # nothing else catches a Ctrl-C in this process, so this may be one
        try:
            outcome = outcome_of(raised)
        except Exception:  # a subclass that does not call its parent's constructor, say
            outcome = Outcome("failed", error=raised)
    finally:
        job.in_handler = False
    if job.why is not None or job.runner is None or job.runner.cancelling():
        outcome = after_stop(job, outcome, await swallow_cancellation())
    ended(job, outcome)
    del job, outcome  # an error's traceback holds this frame, which would hold the error


async def call_batch(
    call: BatchCall,
    threads: Threads,
    clock: Clock,
    item_ended: Callable[[Running, Outcome], None],
    ended: Callable[[Running, Outcome], None],
) -> None:
    """The whole task of one call for several jobs. Those whose handler cannot be called are no part of it."""
    kept, values, now = list[Running](), list[Any](), clock.time()
    for item in call.items:
        found = prepare_call(item, now)
        if isinstance(found, Outcome) or item.why is not None:
            item_ended(item, found if isinstance(found, Outcome) else after_stop(item, Outcome("unstarted"), False))
        else:
            item.in_handler = True
            kept.append(item)
            values += found[0]
            if found[1]:
                values += found[1].values()
    if kept:
        call.hold(kept)
        call.args = (values,)
        kept[0].deadline = call.deadline  # one for all
        await call_handler(call, threads, clock, ended)


def outcomes_of(call: BatchCall, outcome: Outcome, count: int) -> Sequence[Outcome]:
    """One for each of so many items: what the handler said of it, or of all. A call that has failed says nothing of any one of
    them: they are to run singly. (But if it was one alone, or the error says how long to wait, that is what happened to each.)"""
    if outcome.kind == "done" and outcome.value is not None:
        values = outcome.value
        if isinstance(values, (list, tuple)) and len(values) == count:
            return [outcome_of_item(value) for value in values]
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type_name(type(values))}"
        error = TypeError(f"a batch handler returns None, or a list of one value for each item: {got} for {count} items")
        outcome = Outcome("failed", error=error)
    if outcome.kind == "interrupted" and call.why is None and count > 1:  # not by tinyq: it was the handler's doing, or another's
        outcome = Outcome("failed", error=asyncio.CancelledError("its task was cancelled"))
    if outcome.kind in ("failed", "timeout") and count > 1 and not isinstance(outcome.error, RetryAfter):
        why = cast(BaseException, outcome.error)
        told = {"error": error_text(why), "traceback": traceback_text(why)}  # once for all: a traceback takes a millisecond
        log.warning(
            "a call of %s failed for its %d jobs, which run singly now: %s", call.task, count, told["error"], exc_info=why
        )
        outcome = outcome._replace(kind="split", value=told)
    return [outcome] * count


def outcome_of_item(value: object) -> Outcome:
    try:
        if isinstance(value, type) and issubclass(value, BaseException):
            value = value()  # as `raise` does
        if isinstance(value, BaseException):
            return outcome_of(value)
    except Exception as error:  # as in call_handler: of an exception that was not made as it should be
        return Outcome("failed", error=value if isinstance(value, BaseException) else error)
    return DONE if value is None else Outcome("done", value)


async def swallow_cancellation() -> bool:
    """Whether the running task was cancelled; what comes next is not, even if the handler cancelled its own task last."""
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    if task.cancelling() == 0:
        return False
    while task.cancelling() > 0:
        task.uncancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # before 3.13 uncancel leaves a cancellation that has not arrived yet
    return True


def outcome_of(error: BaseException) -> Outcome:
    """What a handler says by raising."""
    match error:
        case Snooze():
            return Outcome("snooze", delay=error.seconds)
        case RetryAfter():
            return Outcome("failed", error=error, delay=error.seconds)
        case Cancel():
            return Outcome("cancelled", reason=clean(str(error))[:500])
    return Outcome("failed", error=error)


def after_stop(job: Running, outcome: Outcome, from_outside: bool) -> Outcome:
    """What the outcome means once it is known whether, and why, the handler had been told to stop."""
    if job.why in ("lost", "abandoned"):
        return Outcome("dropped", reason=STOP_REASONS[job.why])
    if job.why == "timeout":
        running = ", thread still running then" if job.handler.in_thread else ""
        return Outcome("timeout", error=TimeoutError(f"timed out after {job.settings.timeout:g} s{running}"))
    if job.why == "cancel":
        if outcome.kind == "done":
            return outcome._replace(reason="a cancel request came too late")
        return Outcome("cancelled", reason=STOP_REASONS["cancel"])
    if outcome.kind == "failed" and (
        job.why == "shutdown" or (from_outside and isinstance(outcome.error, asyncio.CancelledError))
    ):
        return Outcome("interrupted", reason=STOP_REASONS["shutdown"])
    return outcome


# ── 25. Running one job: the decision ─────────────────────────────────────────────────────────────────────────────────
# What follows from an outcome: pure, no store and no clock. The claim has counted the start already; what was no real
# attempt gives it back, and is bounded by a counter of its own.

SNOOZES: Final = 10_000
INTERRUPTIONS: Final = 20
PARK_FOR: Final = 3600.0  # arguments that do not fit: as long as a rolling deploy may take
PARK_EVERY: Final = 30.0


CARRIED: Final = (
    "seq", "claim_no", "attempts", "snoozes", "interruptions", "lost", "parked", "error", "traceback",
)  # fmt: skip


def decide(row: JobRow, outcome: Outcome, settings: Settings, now: int) -> Settlement:
    """The settlement of one outcome."""
    back = row.attempts - 1
    match outcome.kind:
        case "done":
            return done(row, outcome, settings, now)
        case "failed" | "timeout":
            return failed(row, outcome, settings, now)
        case "snooze" if row.snoozes >= SNOOZES:
            return died(row, settings, now, reason=f"snoozed {SNOOZES:,} times")
        case "snooze":
            return again(row, settings, now, later(now, outcome.delay or 0.0), attempts=back, snoozes=row.snoozes + 1)
        case "cancelled":
            return finished(row, State.CANCELLED, settings.failure_ttl, now, reason=outcome.reason)
        case "expired":
            return finished(row, State.CANCELLED, settings.failure_ttl, now, reason=outcome.reason, attempts=back)
        case "interrupted" if row.interruptions >= INTERRUPTIONS:
            error = InterruptedError(f"interrupted by shutdown more than {INTERRUPTIONS} times")
            return failed(row, Outcome("failed", error=error), settings, now)
        case "interrupted":
            return again(row, settings, now, now, attempts=back, interruptions=row.interruptions + 1, reason=outcome.reason)
        case "split":
            told = cast(Mapping[str, Any], outcome.value)
            return again(row, settings, now, now, attempts=back, singly=1, reason=SPLIT, **told)
        case "unstarted":
            run_at = later(now, outcome.delay) if outcome.delay else row.run_at
            return again(row, settings, now, run_at, attempts=back, reason=row.reason)
        case "parked":
            since = row.parked if row.parked is not None else now
            misfit = error_text(outcome.error) if outcome.error else None
            if later(since, PARK_FOR) <= now:
                why = outcome.reason or "the arguments do not fit the handler"
                return died(row, settings, now, reason=why, error=misfit, attempts=back)
            return again(row, settings, now, later(now, PARK_EVERY), attempts=back, parked=since, reason="parked", error=misfit)
        case "undecodable":
            return died(row, settings, now, reason=outcome.reason, error=outcome.reason, attempts=back, ttl=math.inf)
        case "lost" if row.attempts >= settings.retry.max_attempts or settings.on_lost == "dead":
            starts = row.attempts if outcome.reason is None else back  # found out at a claim, which has counted one
            starts = min(starts, cast(int, settings.retry.max_attempts))
            lost = row.lost + (starts == row.attempts)
            return died(row, settings, now, reason=WORKER_LOST, error=WORKER_LOST, attempts=starts, lost=lost)
        case "lost":
            return again(row, settings, now, now, lost=row.lost + 1, reason=WORKER_LOST, error=WORKER_LOST)
        case "missed":
            return again(row, settings, now, row.run_at, attempts=back, reason=MISSED)
        case "dropped":
            raise ValueError("an outcome without a claim is not written")


def done_with(
    row: JobRow, reason: str | None = None, result: str | None = None, until: int | None = None, keep: bool = False
) -> Settlement:
    """Done; without more, nothing of it is kept."""
    before = row.claim_no > 1  # else there is no history
    snoozes, interruptions, lost = (row.snoozes, row.interruptions, row.lost) if before else (0, 0, 0)
    return tuple.__new__(Settlement, (  # (without the detour of Settlement(...): one for each job)
        row.seq, row.claim_no, IS_DONE, row.run_at, row.attempts, snoozes, interruptions, lost, None,
        reason, None, None, result, until, keep, row.ran, (row.singly and 0) if before else None, False,
    ))  # fmt: skip


NOTHING_SAID: Final = (0, 0, 0, None, None, None, None, None, None, False)


def just_done(row: JobRow) -> Settlement:
    """The same for what most jobs are, which have no history and of which nothing is kept."""
    if row.claim_no > 1 and (row.snoozes or row.interruptions or row.lost or row.singly is not None):
        return done_with(row)
    first = row.seq, row.claim_no, IS_DONE, row.run_at, row.attempts
    return tuple.__new__(Settlement, first + NOTHING_SAID + (row.ran, None, False))


def done(row: JobRow, outcome: Outcome, settings: Settings, now: int) -> Settlement:
    result, reason, ttl = None, outcome.reason, settings.result_ttl
    if ttl > 0 and row.durable:
        try:
            result = encode_json(write(row.handler.result_codec if row.handler else ANYTHING, outcome.value, "the result"))
        except Exception as error:
            found = str(error) if isinstance(error, Misfit) else "the result is nested too deep, or holds too long a number"
            reason = clean(f"{found}: JSON cannot carry that, so no result is kept")
            log.warning("%s is done, but %s", label(row), reason)
    return done_with(row, reason, result, None if ttl == math.inf else later(now, ttl), ttl > 0)


def failed(row: JobRow, outcome: Outcome, settings: Settings, now: int) -> Settlement:
    error, retry = cast(BaseException, outcome.error), settings.retry
    about: dict[str, Any] = {"error": error_text(error), "traceback": traceback_text(error)}
    asked = isinstance(error, RetryAfter)
    if row.attempts >= retry.max_attempts:
        return died(row, settings, now, reason="no attempts left", **about)
    if retry.gives_up_on(error) and not asked:
        return died(row, settings, now, reason="not to be retried", **about)
    delay = outcome.delay if outcome.delay is not None else retry.delay(row.attempts)
    return again(row, settings, now, later(now, delay), reason=outcome.kind, **about)


def again(row: JobRow, settings: Settings, now: int, run_at: int, **changes: Any) -> Settlement:
    """Pending once more; or cancelled, and then kept until so long, if that was asked for meanwhile."""
    until = None if settings.failure_ttl == math.inf else later(now, settings.failure_ttl)
    return settlement(row, State.PENDING, run_at, True, {**changes, "keep_until": until})


def died(row: JobRow, settings: Settings, now: int, ttl: float | None = None, **changes: Any) -> Settlement:
    return finished(row, State.DEAD, settings.failure_ttl if ttl is None else ttl, now, **changes)


def finished(row: JobRow, state: State, ttl: float, now: int, **changes: Any) -> Settlement:
    """Final, and kept for `ttl` seconds; undated if that is infinite."""
    return settlement(row, state, row.run_at, ttl > 0, changes | {"keep_until": None if ttl == math.inf else later(now, ttl)})


def settlement(row: JobRow, state: State, run_at: int, keep: bool, changes: Mapping[str, Any]) -> Settlement:
    values: dict[str, Any] = {name: getattr(row, name) for name in CARRIED}
    return Settlement(
        **{**values, "reason": None, "result": None, "keep_until": None, **changes}, state=state, run_at=run_at, keep=keep
    )


def report(row: JobRow, outcome: Outcome, change: Settlement) -> None:
    """The log line of an outcome, if it deserves one: WARNING for a retry, ERROR with traceback for the end."""
    if change.state is State.DEAD:
        fate = "failed for this fire time" if row.recurrence else "is dead"
        told = label(row, change.attempts)  # in memory a recurring job has moved on
        log.error("%s %s, %s: %s", told, fate, change.reason, change.error, exc_info=outcome.error)
    elif outcome.kind in ("failed", "timeout"):  # (of a call that is split one line has told)
        log.warning("%s failed: %s; next start at %s", label(row, change.attempts), change.error, as_datetime(change.run_at))
    elif outcome.kind == "parked" and row.parked is None:
        log.warning("%s is parked: %s", label(row), change.error)
    elif outcome.kind in ("expired", "interrupted"):
        log.info("%s: %s", label(row), outcome.reason)
    elif outcome.kind == "cancelled" or outcome.reason:
        log.info("%s is %s: %s", label(row), change.state, outcome.reason)


# ── 26. Loops: driver and slots ───────────────────────────────────────────────────────────────────────────────────────
# A loop is a step: it takes the time, does one round and returns the seconds to sleep. One driver runs them all.

Step = Callable[[int], Awaitable[float]]
BRIEF: Final = 1.0  # seconds for which a store may be busy without a word: as many workers that are woken at once may make it


async def drive(
    name: str,
    step: Step,
    wake: asyncio.Event,
    clock: Clock,
    stopped: asyncio.Event,
    longest: float = 15.0,
    incidents: dict[str, str] | None = None,
) -> None:
    """Run a step until all is stopped. Errors back off up to `longest` seconds, and are logged once an incident; while it
    lasts, the last of them stands in `incidents`."""
    failures, told, since, busy = 0, False, 0.0, False
    incidents = {} if incidents is None else incidents
    while not stopped.is_set():
        wake.clear()
        began = clock.monotonic()
        try:
            seconds = await step(clock.time())
            seconds -= clock.monotonic() - began  # reckoned from the time that the step was given
            if told:
                log.info("%s: working again", name)
                incidents.pop(name, None)
            failures, told, busy = 0, False, False
        except Exception as error:
            failures, busy = failures + 1, isinstance(error, StoreBusy)
            seconds = min(longest, 0.05 * 2.0 ** min(failures, 20))
            if busy:  # it has waited by itself
                seconds = 0.0 if failures <= 20 else min(longest, BRIEF)
            since = began if failures == 1 else since
            lasting = failures > 2 and clock.monotonic() - since >= BRIEF
            if not told and (lasting or not busy):  # a lock that is held for a moment is no incident
                told = True
                known = isinstance(error, StoreError)
                log.error("%s failed and will be tried again: %s", name, error_text(error), exc_info=None if known else error)
            if told:
                incidents[name] = error_text(error)
        if not stopped.is_set():
            await clock.wait(stopped if failures and not busy else wake, seconds)


class Slots:
    """How many jobs run at once: a number for each named queue, one for all others together, one for plain functions."""

    def __init__(self, concurrency: int, named: Mapping[str, int], threads: int) -> None:
        self.shared = concurrency
        self.named = dict(named)
        self.threads = threads
        self.fragile = 1
        self.lent = False  # to a claim that is under way
        self.called = False  # hungry tiers, for slots that came free, and none of them has come yet
        self.busy: dict[tuple[str, str], int] = {}  # see Room

    def room(self, tier: Tier) -> Room:
        return Room(
            self.shared, self.named, self.threads, self.fragile, tier.tasks,
            serves=tier.serves, terms=tier.terms, busy=dict(self.busy),
        )  # fmt: skip

    def full(self) -> bool:
        return self.shared <= 0 and all(free <= 0 for free in self.named.values())

    def take(self, job: Running) -> None:
        self.give(job, -1)

    def give(self, job: Running, slots: int = 1) -> None:
        if self.named and job.queue in self.named:
            self.named[job.queue] += slots
        else:
            self.shared += slots
        if job.handler.in_thread:
            self.threads += slots
        if job.lost:
            self.fragile += slots
        if (terms := job.handler.terms) is not None and terms.limited:
            limit = (terms.names[0], job.limit_value or "")
            self.busy[limit] = self.busy.get(limit, 0) - slots
            if self.busy[limit] == 0:
                del self.busy[limit]


@contextlib.contextmanager
def on_signals(callback: Callable[[], None], *, chain: bool) -> Iterator[None]:
    """Call back in the loop on SIGINT and SIGTERM, if this is the main thread. With `chain`, what was installed hears of it too:
    a handler at once, the default action afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous: dict[int, Any] = {}
    postponed: list[int] = []
    over = False

    def on_signal(number: int, frame: Any) -> None:
        before = previous[number]
        if over:  # put back by another stop, which had found it here and ended later
            signal.signal(number, before)
            signal.raise_signal(number)
            return
        loop.call_soon_threadsafe(callback)
        if chain and before in (signal.SIG_DFL, signal.default_int_handler):
            postponed.append(number)
        elif chain and callable(before):
            try:
                before(number, frame)
            except KeyboardInterrupt:  # asyncio's answer to a second Ctrl-C: not before what is kept has been kept
                postponed.append(number)

    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
        if signal.getsignal(number) not in (None, signal.SIG_IGN):
            previous[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        over = True
        for number, before in previous.items():
            if signal.getsignal(number) is on_signal:
                signal.signal(number, before)
        for number in postponed:
            signal.raise_signal(number)


# ── 27. Loops: the crew that claims, runs and settles ─────────────────────────────────────────────────────────────────
# Knows what runs here. Takes rows from a tier when there is room, runs each in a task of its own, writes what came of it,
# keeps leases alive and takes over those of workers that died.

POLL: Final = 0.2  # seconds between looks of somebody who waits, where nothing tells him
WATCH: Final = 0.5  # how often the event loop's lag is looked at while jobs run
LAG: Final = 1.0  # a loop that was blocked for longer is worth a warning
DOUBTFUL: Final = 20_000  # jobs that are watched at once for the end of their leases
MISSED_EACH: Final = 10.0  # seconds between two lines, at least, about recurring jobs that have missed fire times


def tell_missed(kind: str, late: Sequence[tuple[str, int, int]]) -> None:
    """One line for all that one delay has cost: names, how many fire times each has missed, how late it was (microseconds)."""
    missed, delay = sum(missed for _, missed, _ in late), max((delay for _, _, delay in late), default=0) / 1e6
    if len(late) == 1:
        log.warning("%s %s missed %d fire times: it was %.1f s late", kind, late[0][0], missed, delay)
    elif late:
        names = ", ".join(name for name, _, _ in late[:5]) + ", …" * (len(late) > 5)
        log.warning("%d %ss missed %d fire times: they were up to %.1f s late: %s", len(late), kind, missed, delay, names)


class Spells:
    """What is said once while it goes on: until it has not been so for a minute, or for three times as long as it needs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def begins(self, name: str, every: float) -> bool:
        """It is so, again or still. `every`: seconds in which it would be so again."""
        before, now = self._seen.get(name, -math.inf), self._clock.monotonic()
        self._seen[name] = now
        return now - before > max(60.0, 3 * every)


def tell_slow(name: str, took: float, period: float, rule: str, batch: bool = False) -> None:
    log.warning(
        "%s takes longer than its period: %.1f s, and it is due each %g s, so fire times are skipped (%s): make it shorter or "
        "its period longer%s",
        name, took, period, rule, "" if batch else ", or let one call do the work of many (batch)",
    )  # fmt: skip


def create_task(
    loop: asyncio.AbstractEventLoop, run: Coroutine[Any, Any, None], *, name: str, context: contextvars.Context
) -> asyncio.Task[None]:
    """A task by the loop's own factory. A job begins with the next turn even if that makes eager ones: before, what starts it
    has more to note of it, and of those that were claimed with it."""
    task = loop.create_task(in_its_turn(run), name=name, context=context)
    task.add_done_callback(lambda _: run.close())  # cancelled before its turn it has not begun
    return task


async def in_its_turn(run: Coroutine[Any, Any, None]) -> None:
    await asyncio.sleep(0)
    await run


class Crew:
    """Everything that runs, from claim to settlement."""

    def __init__(
        self,
        clock: Clock,
        memory: MemoryStore,
        slots: Slots,
        settings_of: Callable[[JobRow, Handler], Settings],
        worker: str,
        lease: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.memory = memory
        self._ends, self._call_ends, self._quick_ends = self._over, self._call_over, self._quick_over  # bound once
        self.running: dict[object, Running] = {}  # by tag
        self.tiers: list[Tier] = []
        self.handlers: Mapping[str, Handler] = {}
        self.live: weakref.WeakValueDictionary[bytes, JobRow] = weakref.WeakValueDictionary()  # durable rows with a handle here
        self._known: Mapping[bytes, object] = cast(Any, self.live).data  # to ask that itself whether it has an id takes a while
        self.threads = Threads()
        self.idle = asyncio.Event()  # nothing runs; set at that moment, cleared by who waits for it
        self.deadline_wake = asyncio.Event()
        self.settle_wake = asyncio.Event()
        self.closing = asyncio.Event()
        self.activity = 0  # grows with every job that is inserted or started here
        self.written = 0  # grows whenever outcomes have been written
        self.looks_at = FOREVER  # when durable jobs are to be claimed next, FOREVER if that depends on what is found or written
        self.pauses = 0  # grows with every pause and resume that is asked for here
        self.after_death: Callable[[JobRow], None] | None = None
        self._clock = clock
        # Without a factory `create_task` comes to this, a third slower.
        plain = loop.get_task_factory() is None
        self._create_task = functools.partial(asyncio.Task, loop=loop) if plain else functools.partial(create_task, loop)
        self._slots, self._settings_of = slots, settings_of
        self._worker, self._lease = worker, lease
        self._ended: list[tuple[Running, Outcome, Settlement]] = []  # durable, to be written
        self._handed = 0  # slots that are kept for jobs on their way into the store
        self._singly = False  # write them one by one: together it did not work
        self._fragile: set[object] = set()  # by tag, those on which a worker has died before and that have ended here
        self._next_deadline = math.inf
        self._last: Running | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._watched: dict[tuple[int, int, int | None], float] = {}
        self._stepped = (0, 0.0)
        self._spells = Spells(clock)
        self.pace_wake = asyncio.Event()
        self._watching = False  # how long due jobs wait
        self._behind: dict[tuple[str, str, bool], Overdue] = {}  # what has been told of
        self._took = {"claim": 0.0, "settlement": 0.0}  # seconds, the last time
        self._late: list[tuple[str, int, int]] = []  # recurring jobs that have missed fire times, to be told of
        self._late_told = -math.inf

    async def claim(self, tier: Tier, now: int) -> float:
        """Take what is due and fits, and start it."""
        tier.hungry, self._slots.called = tier.claiming, False
        if tier.durable:
            self.looks_at = FOREVER
        if not tier.claiming:
            return math.inf
        if self._slots.full():
            if not self._watching:
                self.pace_wake.set()
            return math.inf  # a slot that comes free wakes both tiers
        if self._slots.lent and any(other.durable and other.claiming for other in self.tiers):
            tier.waits_for_room = True  # (once that tier is closed, what its last claim still brings is handed back)
            return math.inf
        room = self._slots.room(tier)
        self._fragile &= self.running.keys()
        if self._fragile:
            room = room._replace(fragile=0)  # what has ended is written before the next one may take it along
        self._slots.lent = tier.durable  # the memory store answers at once; while a database thinks, the room is its
        began = self._clock.monotonic()
        try:
            claimed = await tier.store.claim(room, self._worker, later(now, self._lease), now)
        finally:
            if tier.durable:
                self._took["claim"] = self._clock.monotonic() - began
                self._slots.lent = False
                self.idle.set()  # whoever waits for the end of all work has been waiting for this, too
            for waiting in self.tiers:
                if waiting.waits_for_room:
                    waiting.waits_for_room = False
                    waiting.wake.set()
        tier.hungry, tier.limited = claimed.more, claimed.limited
        if (claimed.more or claimed.limited) and not self._watching:
            self.pace_wake.set()
        await self._make_sure(tier, claimed.rows)
        if tier.durable:
            self.heed(claimed.paused)
        await self._start_all(tier, claimed.rows, now)
        due = math.inf if claimed.next_at is None else max(0.0, (claimed.next_at - now) / 1e6)
        if not tier.durable:
            return due if due == math.inf else min(due, LONGEST_SLEEP)
        self.looks_at = claimed.next_at or FOREVER
        return min(due, SAFETY)

    def look_again(self, tier: Tier) -> None:
        """New jobs have been stored: have a claim look at them, unless one is in line behind them or has come with them."""
        if tier.claiming and not self._slots.lent:
            tier.wake.set()

    def heed(self, paused: frozenset[str]) -> None:
        """Let best-effort jobs of a queue that is paused in the database wait as well."""
        if self.memory.held != paused:
            self.memory.held = paused
            for tier in self.tiers:
                tier.wake.set()

    async def learn_paused(self, tier: Tier) -> None:
        """The same for a process that claims nothing, or has no room: without a claim it is not told."""
        before = self.pauses
        paused = await tier.store.paused()
        if self.pauses == before:  # else it may have been read before the pause that was asked for here
            self.heed(paused)

    async def _make_sure(self, tier: Tier, rows: Sequence[JobRow]) -> None:
        """A claim alone does not wait for the disk, and a power cut may take it along. A job that must not start a second time
        by itself starts once its claim is there to stay."""
        if not tier.durable:
            return
        tasks, careful = {row.task for row in rows}, []
        known = {name: handler for name, handler in self.handlers.items() if name in tasks}
        strict = {name for name, handler in known.items() if handler.options.get("on_lost") == "dead"}
        for row in rows if strict else [row for row in rows if row.options]:
            if (row.options or row.task in strict) and (handler := known.get(row.task)) is not None:
                with contextlib.suppress(Undecodable):
                    if self._settings_of(row, handler).on_lost == "dead":
                        careful.append((row.seq, row.claim_no, None))
        if careful:
            with contextlib.suppress(
                StoreError
            ):  # as sure as it can be made: to leave them claimed and not start them is no better
                await tier.store.confirm(careful, rows[0].lease or 0)

    async def _start_all(self, tier: Tier, rows: Sequence[JobRow], now: int) -> None:
        place, back, calls = 0, list[Settlement](), dict[tuple[Any, ...], list[Running]]()
        if tier.durable:
            decode_all(rows, self.handlers)
        while place < len(rows):
            alike = self._start_alike(tier, rows, place, calls) if type(rows[place]) is ClaimedRow else 0
            if alike == 0:
                back += self._start_one(tier, rows[place], calls, now)
            place += alike or 1
        for items in calls.values():
            size = cast(Terms, items[0].handler.terms).size
            for first in range(0, len(items), size):
                self._start_call(tier, items[first : first + size])
        if back:
            await tier.store.settle(back, now)

    def _start_alike(self, tier: Tier, rows: Sequence[JobRow], place: int, calls: dict[tuple[Any, ...], list[Running]]) -> int:
        """Start durable jobs of a claim, from a place on, as long as they are plain: what is done for each by `_start_one` and
        `start` is mostly done once for all. The answer is how many these are."""
        running, slots, task, queue, handler, begun = self.running, self._slots, "", "", None, 0
        settings, deadline, ends, items = DEFAULTS, 0.0, self._ends, list[Running]()
        for fresh in itertools.islice(rows, place, None) if tier.claiming else ():
            if type(fresh) is not ClaimedRow or fresh.id in running:
                break  # it may have options of its own, or a history
            row = self._first_claim(fresh) if fresh.id in self._known else fresh
            if row is None:
                break
            if handler is None or row.task != task or row.queue != queue:
                task, queue, handler = row.task, row.queue, self.handlers.get(row.task)
                if handler is None or not (handler.batch or (handler.direct and handler.terms is None)):
                    break
                settings = handler.settings or self._settings_of(row, handler)
                items = calls.setdefault((handler.name, queue, None, False, False), []) if handler.batch else items
                deadline, ends = self._until(settings), self._ends if settings.result_ttl > 0 else self._quick_ends
            running[row.id] = job = cast(Running, row)
            job.handler, job.settings, job.tier = handler, settings, tier
            begun += 1
            if handler.batch:
                items.append(job)
                continue
            job.deadline = deadline
            if slots.named:
                slots.give(job, -1)
            else:
                slots.shared -= 1
            run = call_handler(job, self.threads, self._clock, ends)
            job.runner = self._create_task(run, name=handler.task_name, context=contextvars.Context())
        self.activity += begun
        if begun and self._watch is None:
            self._watch_loop(first=True)
        return begun

    def _first_claim(self, fresh: JobRow) -> JobRow | None:
        """The row that handles in this process hold, if this claim is all that has happened since it was inserted."""
        row = self.live.get(fresh.id, fresh)
        if row is fresh:
            return fresh
        if row.claim_no or row.state is not IS_PENDING or fresh.claim_no != 1 or fresh.key is not None or fresh.task != row.task:
            return None  # others have had it since
        if (row.key, row.options, row.headers, row.expires, row.limit_value) != (None, None, None, None, None):
            return None  # and this is one that has lost what it had, such as by a requeue
        row.state, row.claim_no, row.attempts, row.seq, row.run_at = IS_RUNNING, 1, 1, fresh.seq, fresh.run_at
        row.worker, row.lease, row.started, row.args = fresh.worker, fresh.lease, fresh.started, fresh.args
        row.queue, row.priority, row.payload = fresh.queue, fresh.priority, fresh.payload  # edited by hand
        return row

    def _start_one(self, tier: Tier, row: JobRow, calls: dict[tuple[Any, ...], list[Running]], now: int) -> Sequence[Settlement]:
        """Start a job, or put it to those that are started together. Answers what is to be written if that is not possible."""
        kept = not tier.durable or bool(self.live)  # else it has not been here before
        if (row.id if tier.durable else row) in self.running:  # it lost its lease here, and its thread has not ended yet
            return [decide(row, Outcome("unstarted", delay=1.0), Settings(), now)]
        if kept and tier.durable:
            row = self.known(row)
        handler = (kept and row.handler) or self.handlers.get(row.task)
        if handler is None:  # two lanes with one number
            return [decide(row, Outcome("unstarted", delay=1.0), Settings(), now)]
        try:
            settings = (kept and row.settings) or (not row.options and handler.settings) or self._settings_of(row, handler)
        except Undecodable as error:
            self.start(tier, row, handler, Settings(), Outcome("undecodable", reason=str(error)))
            return ()
        if handler.batch:
            lost = row.lost > 0
            alone = (lost or row.singly is not None) and runs_alone(row) and row.seq
            kind = handler.name, row.queue, row.limit_value, lost, alone
            calls.setdefault(kind, []).append(self._enter(tier, row, handler, settings))
        else:
            self.start(tier, row, handler, settings)
        return ()

    def may_start(self, tier: Tier, queue: str, handler: Handler, now: int) -> bool:
        """Whether a job may start without having waited: a slot is free, and nobody waits for one."""
        tiers, memory, slots = self.tiers, self.memory, self._slots
        if tiers[0].hungry or tiers[-1].hungry or slots.lent or not tier.claiming or queue in memory.held:
            return False
        if memory.pending and memory.has_due(now):
            return False
        return (slots.named.get(queue, slots.shared) if slots.named else slots.shared) > 0 and (
            not handler.in_thread or slots.threads > 0
        )

    def start(self, tier: Tier, row: JobRow, handler: Handler, settings: Settings, refused: Outcome | None = None) -> None:
        """Run a claimed row in a task of its own."""
        if handler.batch:
            self._start_call(tier, [self._enter(tier, row, handler, settings, refused)])
            return
        job = self._enter(tier, row, handler, settings, refused)
        job.deadline = self._until(settings)
        self._slots.give(job, -1)
        context = contextvars.Context() if row.context is None else row.context
        if settings.retry.max_attempts > 1:
            context = context.copy()  # each attempt begins as the first did; a single one, if it snoozes, goes on in its own
        run = call_handler(job, self.threads, self._clock, self._ends)
        job.runner = self._create_task(run, name=handler.task_name, context=context)
        if self._watch is None:
            self._watch_loop(first=True)

    def start_simple(
        self, tier: Tier, row: SimpleRow, handler: Handler, settings: Settings, here: bool = False
    ) -> Awaitable[None]:
        """Store and run a new best-effort job, in one piece, since this is what most of them are. With `here`, in the task that
        calls this, which is made like one of its own and awaits the answer."""
        self.memory.adopt(row)
        job: Running = row  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        job.tier = tier
        self.activity += 1
        self.running[job] = job
        job.deadline = self._until(settings)
        if handler.in_thread or self._slots.named:
            self._slots.give(job, -1)
        else:
            self._slots.shared -= 1
        ends = self._quick_ends if handler.direct and settings.result_ttl <= 0 else self._ends
        run = call_handler(job, self.threads, self._clock, ends)
        if here:
            job.runner = asyncio.current_task()
        else:
            context = contextvars.Context() if row.context is None else row.context
            context = context.copy() if settings.retry.max_attempts > 1 else context  # as in `start`
            job.runner = self._create_task(run, name=handler.task_name, context=context)
        if self._watch is None:
            self._watch_loop(first=True)
        return run

    def _enter(self, tier: Tier, row: JobRow, handler: Handler, settings: Settings, refused: Outcome | None = None) -> Running:
        """A claimed row that runs from now on."""
        job: Running = row  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        job.handler, job.settings, job.tier = handler, settings, tier
        if not tier.claiming:  # claimed while the tier was being closed
            refused = Outcome("unstarted")
        if refused is not None:
            job.refused = refused
        self.activity += 1
        self.running[job.id if job.durable else job] = job
        return job

    def _until(self, settings: Settings) -> float:
        """The deadline of what starts now."""
        deadline = self._clock.monotonic() + settings.timeout
        if deadline < self._next_deadline:
            self._next_deadline = deadline
            self.deadline_wake.set()
        return deadline

    def _start_call(self, tier: Tier, items: Sequence[Running]) -> None:
        """Run several rows in one call of their batch handler, in one slot."""
        call = BatchCall(tier, items)
        call.deadline = items[0].deadline = self._until(call.settings)
        self._slots.give(call, -1)
        run = call_batch(call, self.threads, self._clock, self._ends, self._call_ends)
        call.runner = self._create_task(run, name=call.handler.task_name, context=contextvars.Context())
        for item in items:
            item.call, item.runner = call, call.runner
        if self._watch is None:
            self._watch_loop(first=True)

    @property
    def claims_under_way(self) -> bool:
        """Whether rows may have been claimed that are not among the running ones yet."""
        return self._slots.lent or self._handed > 0

    def offer(self, tier: Tier, row: JobRow, now: int) -> bool:
        """Keep a slot for a new durable job, and lease it to this worker, if it may start at once."""
        if (
            row.handler is None
            or row.run_at > now
            or row.task not in tier.tasks
            or (tier.serves is not None and row.queue not in tier.serves)
            or row.handler.terms is not None
            or not self.may_start(tier, row.queue, row.handler, now)
        ):
            return False
        row.worker, row.lease, row.started = self._worker, later(now, self._lease), now
        row.overtakes = tier.limited
        self._slots.take(cast(Running, row))
        self._handed += 1
        return True

    def take_over(self, tier: Tier, row: JobRow, answer: Sequence[Inserted] | None) -> None:
        """A job that was offered has been stored: it starts here, unless something else was due before it, or it failed."""
        self._handed -= 1
        self._slots.give(cast(Running, row))
        if answer is not None and answer[0].verdict == "started" and row.handler is not None and row.settings is not None:
            row.state, row.claim_no, row.attempts = State.RUNNING, 1, 1
            self.live[row.id] = row
            self.start(tier, row, row.handler, row.settings)
        else:
            row.worker = row.lease = row.started = None
            if answer is not None:
                self.live[row.id] = row
            for waiting in self.tiers:  # the slot is free again
                waiting.wake.set()
            self.idle.set()

    def known(self, fresh: JobRow, *, again: bool = False) -> JobRow:
        """The object that handles in this process already hold for a durable row, brought up to date unless what was read is
        older; else the row itself. `again`: the job had ended and was requeued."""
        row = self.live.setdefault(fresh.id, self.running.get(fresh.id, fresh))  # it may have been started while this was read
        ended = row.finished is not None and fresh.finished is None and fresh.claim_no == row.claim_no
        again = (again or row.state is State.DEAD) and fresh.state is State.PENDING  # as it was not when it died
        older = fresh.claim_no < row.claim_no or (ended and not again)
        if row is not fresh and row.tag not in self.running and not older:
            if fresh.task != row.task:  # a hand has made it a job of another
                row.handler = None
            vars(row).update(as_values(fresh))
            row.args = row.settings = None
            if row.finished is not None:  # nobody looks for it any more
                self.tell(row, row.finished)
        return row

    def _over(self, job: Running, outcome: Outcome) -> None:
        """A handler has ended, or could not be called."""
        call = job.call
        if call is not None:
            job.call = None
            call.left -= 1
        if call is None or call.left == 0:  # the slot of a call comes free with the last of its jobs
            self._free(call or job)
        self._last = job
        job.runner = None  # whose context leads back to the job
        if job.lost:
            self._fragile.add(job.tag)
        usual = outcome is DONE and (job.key is None or (job.recurrence and job.durable)) and job.settings.result_ttl <= 0
        if usual and not job.settings.shared:
            self._done(job)
            return
        try:
            self._settle(job, outcome)
        except Exception:
            log.exception("%s: a defect in tinyq; the job runs again when its lease ends", label(job))
            self.running.pop(job.tag, None)

    def _quick_over(self, job: Running, outcome: Outcome) -> None:
        """The same for one that is like most (`_start_alike`, `start_simple`), of which nothing is to be kept."""
        slots = self._slots
        if outcome is not DONE or job.key is not None or slots.named:
            self._over(job, outcome)
            return
        slots.shared += 1
        if not slots.called and (self.tiers[0].hungry or self.tiers[-1].hungry):
            self._call_hungry()
        self._last, job.runner = job, None
        self._done(job)

    def _done(self, job: Running) -> None:
        """What most jobs come to, without the detour."""
        if job.durable:
            if not self._ended:  # else the next round knows already
                self.settle_wake.set()
            self._ended.append((job, DONE, just_done(job)))
            return
        self.memory.forget(job)
        del self.running[job]
        if job.waiters:
            self.tell(job, 0)
        if not self.running:
            self.idle.set()

    def _call_over(self, call: Running, outcome: Outcome) -> None:
        """A call for several jobs has ended: the same for each of them, with what came of the call for it."""
        call = cast(BatchCall, call)
        call.runner, items = None, call.items
        if outcome is DONE:
            items = self._all_done(call, items)
        for item, own in zip(items, outcomes_of(call, outcome, len(items)), strict=True):
            item.in_handler = False
            self._over(item, after_stop(item, own, False) if item.why in ("lost", "abandoned", "cancel") else own)

    def _all_done(self, call: BatchCall, items: Sequence[Running]) -> Sequence[Running]:
        """Durable jobs of one call, done: what most of them come to, in one go. Answers those that take the longer way."""
        settings, ended, others = items[0].settings, self._ended, list[Running]()
        if not call.tier.durable or settings.result_ttl > 0 or settings.shared:
            return items
        if not ended:  # else the next round knows already
            self.settle_wake.set()
        for item in items:
            if item.settings is not settings or item.why is not None or item.lost or not (item.recurrence or item.key is None):
                others.append(item)
                continue
            item.in_handler, item.call, item.runner = False, None, None
            ended.append((item, DONE, just_done(item)))
        call.left -= len(items) - len(others)
        self._last = items[-1]
        if call.left == 0:
            self._free(call)
        return others

    def _free(self, job: Running) -> None:
        """A slot comes free."""
        self._slots.give(job)
        if not self._slots.called and (self.tiers[0].hungry or self.tiers[-1].hungry):
            self._call_hungry()
        if job.settings.gated:
            for tier in self.tiers:
                if tier.limited:
                    tier.wake.set()

    def _call_hungry(self) -> None:
        """Slots come free, of which the next claim finds all. In turns, so that neither tier takes every one."""
        self._slots.called = True
        self.tiers.reverse()
        for tier in self.tiers:
            if tier.hungry:
                tier.wake.set()

    def _leave(self, job: Running, now: int) -> None:
        """It runs here no more, whatever has been written of it."""
        del self.running[job.id if job.durable else job]
        if job.refused is not None or job.why is not None or job.note is not None:
            job.refused = job.why = job.note = None
        self.tell(job, now)
        if not self.running:
            self.idle.set()

    def _settle(self, job: Running, outcome: Outcome) -> None:
        """Best-effort outcomes are written at once; durable ones by the next round, and the lease is renewed until then."""
        now = self._clock.time()
        if outcome.kind == "dropped":
            log.warning("%s: %s; its outcome is not written", label(job), outcome.reason)
            self._leave(job, now)
        elif job.tier.durable:
            self._ended.append((job, outcome, self._decided(job, outcome, now)))
            self.settle_wake.set()
        else:
            change = self._decided(job, outcome, now)
            self._settled(job, outcome, change, self.memory.settle_now([change], now).get(job.seq), now)

    def _decided(self, job: Running, outcome: Outcome, now: int) -> Settlement:
        change, shared = decide(job, outcome, job.settings, now), job.settings.shared
        return change if change.ran is job.ran and not shared else change._replace(ran=job.ran, frees=shared)

    async def settle(self, tier: Tier, now: int) -> float:
        """Write what durable jobs have come to, all that wait at once; what cannot be written stays, and so do the leases."""
        most = 1 if self._singly else GROUP
        batch, self._ended = self._ended[:most], self._ended[most:]
        if not batch:
            return math.inf
        try:
            if tier.reports and (last_words := [
                words for job, _, change in batch if job.reporter and (words := job.reporter.close(change.keep))
            ]):  # fmt: skip
                await tier.store.progress(last_words)
            began = self._clock.monotonic()
            states = await tier.store.settle([change for _, _, change in batch], now)
            self._took["settlement"] = self._clock.monotonic() - began
        except BaseException as error:
            if isinstance(error, Exception):
                self._singly = not isinstance(error, StoreBusy)
            self._ended = self._ended + batch if self._singly else batch + self._ended
            raise
        self.written += 1
        handles = self._known
        for job, outcome, change in batch:
            state, ran = states.get(change.seq), change.ran
            moved_on = state is IS_PENDING  # of a recurring job, as it is done
            plainly = outcome is DONE and (moved_on or (state is IS_DONE and not (change.keep or ran)))
            if plainly and job.id not in handles:  # nobody here asks for it
                self.running.pop(job.id, None)
                if ran and (ran.missed or now - ran.started > interval_of(ran.recurrence)[0]):
                    self._note_ran(job, ran, now)
                continue
            try:
                self._settled(job, outcome, change, state, now)
            except Exception:
                log.exception("%s: a defect in tinyq, after its outcome was written", label(job))
                self.running.pop(job.tag, None)
        if not self.running:
            self.idle.set()
        self._singly = self._singly and bool(self._ended)
        tier.wake.set()
        return 0.0 if self._ended else math.inf

    def _settled(self, job: Running, outcome: Outcome, change: Settlement, state: State | None, now: int) -> None:
        if state is None:
            log.warning("%s had lost its lease when it ended: its outcome is dropped", label(job))
        elif outcome is DONE and state is IS_DONE and not change.keep and job.key is None:
            job.state, job.finished, job.value = IS_DONE, now, None
            if job.attempts > 1 or job.reason is not None:
                apply(job, change, now)
        else:
            if outcome is not DONE:
                report(job, outcome, change)
            if job.recurrence:  # what becomes of it next is known to the store
                if job.ran is not None:
                    self._note_ran(job, job.ran, now)
                job.state, job.ran = state, None
                if job.tier.durable:
                    job.args = None
                    self.live.pop(job.id, None)
            elif job.tier.durable:
                apply(job, change, now)
                job.args = None
                if state is not change.state:
                    job.state, job.reason = state, MERGED if job.key is not None else CANCELLED_ON_REQUEST
            job.exception = outcome.error
            if outcome.kind == "done":
                job.value = outcome.value
            self._became_dead(job, now, change if job.recurrence else None)
            if change.state is State.PENDING or job.key is not None:
                job.tier.wake.set()
        self._leave(job, now)

    def _note_ran(self, job: Running, ran: Ran, now: int) -> None:
        period = interval_of(cast(str, job.recurrence))[0]
        if 0 < period < now - ran.started and self._spells.begins(job.task, period / 1e6):
            name, took = f"recurring job {job.task} {(job.key or '')[2:]!r}", (now - ran.started) / 1e6
            tell_slow(name, took, period / 1e6, "overlap", job.handler.batch)
        if ran.missed:
            self._note_missed(job, ran)

    def _note_missed(self, job: Running, ran: Ran) -> None:
        """The first job that has missed fire times is named at once; what one delay has cost the others is one line."""
        self._late.append((f"{job.task} {(job.key or '')[2:]!r}", ran.missed, ran.started - ran.fire_time))
        if self._clock.monotonic() >= self._late_told + MISSED_EACH:
            self.tell_missed()

    def tell_missed(self) -> None:
        late, self._late, self._late_told = self._late, [], self._clock.monotonic()
        tell_missed("recurring job", late)

    @property
    def unsettled(self) -> int:
        """How many jobs have ended here whose outcomes are not written."""
        return len(self._ended)

    def unwritten(self) -> None:
        """Give up on the outcomes that the store has not taken by the end of the shutdown."""
        for job, _, _ in self._ended:
            log.error("%s ended, which was never written: it runs again when its lease ends", label(job))
            self._leave(job, self._clock.time())
        self._ended = []

    def _became_dead(self, row: JobRow, now: int, change: Settlement | None = None) -> None:
        """If that is what was committed, the hooks hear of it. `change`: of a row that has not seen it: it was reclaimed, or is a
        recurring job, which has moved on; of that they are told what this run has come to."""
        if change is not None and change.state is State.DEAD:
            row = row.but(waiters=None) if row.recurrence else row
            apply(row, change, now)
            row = row if row.recurrence else self.known(row)
        if row.state is State.DEAD:
            self._tell_dead(row)

    def _tell_dead(self, row: JobRow) -> None:
        if self.after_death is not None:
            self.after_death(row)

    def tell(self, row: JobRow, now: int) -> None:
        """Let whoever waits for a row look at it again: it has ended, or it is no longer what it was here."""
        if row.finished is None and row.state is not State.PENDING and row.state is not State.RUNNING:
            row.finished = now
        if row.waiters:
            for waiter in row.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def deadlines(self, now: int) -> float:
        """Stop what has run for longer than its timeout."""
        moment, self._next_deadline = self._clock.monotonic(), math.inf
        for job in list(self.running.values()):
            if job.deadline <= moment and job.why == "timeout":
                job.deadline = math.inf
                log.warning("%s timed out and was cancelled, and does not end: it keeps its slot", label(job))
            elif job.deadline <= moment:
                job.deadline = math.inf if job.handler.in_thread else moment + 5.0
                job.stop("timeout")
            self._next_deadline = min(self._next_deadline, job.deadline)
        return self._next_deadline - moment

    def _watch_loop(self, due: float = 0.0, *, first: bool = False) -> None:
        """While jobs run, see whether one of them keeps the event loop from turning."""
        loop = asyncio.get_running_loop()
        lag = 0.0 if first else loop.time() - due
        if lag > LAG:
            jobs = [*self.running.values(), *([self._last] if self._last else [])]
            suspects = sorted({job.task for job in jobs if job.handler.is_async and not job.handler.run_in})
            names = ", ".join(suspects[:5]) or "none of tinyq's"
            log.warning(
                "the event loop was blocked for %.1f s; async jobs at the time: %s; use def for blocking code", lag, names
            )
        for job in [job for job in self.running.values() if job.runner is not None and job.runner.done()]:
            self._over(job, Outcome("interrupted", reason="its task was cancelled before it began"))  # by somebody else
        self._watch = None
        if self.running:
            due = loop.time() + WATCH
            self._watch = loop.call_at(due, self._watch_loop, due, context=contextvars.Context())  # of nobody's request

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def watch_pace(self, after: float, now: int) -> float:
        """Say once, until they have caught up, that due jobs wait for longer than so many seconds."""
        began, self._watching = not self._watching, any(tier.hungry or tier.limited for tier in self.tiers) or bool(self._behind)
        if not self._watching:
            return math.inf
        if began:  # what waits has not done so for long
            return min(5.0, after / 2)
        late: dict[tuple[str, str, bool], Overdue] = {}
        for tier in self.tiers:
            if (tier.hungry or tier.limited) and tier.claiming:
                for found in await tier.store.overdue(later(now, -after)):
                    terms = tier.terms.get(found.task)
                    waits = terms is not None and found.since + terms.window >= later(now, -after)
                    if self._slots.room(tier).wants(found.queue, found.task) and not waits:
                        late.setdefault((found.queue, found.task, tier.durable), found)
        for name, found in late.items():
            if name not in self._behind:
                log.warning(
                    "queue %r falls behind: %s%d %s jobs of task %s wait, for up to %.1f s: %s; the last claim took %.1f ms, the "
                    "last settlement %.1f ms",
                    found.queue, "at least " if found.jobs == 10_000 else "", found.jobs, "durable" if name[2] else "best-effort",
                    found.task, (now - found.since) / 1e6, self._why_late(found), *(took * 1e3 for took in self._took.values()),
                )  # fmt: skip
        for queue, task, _ in self._behind.keys() - late.keys():
            log.info("queue %r has caught up with the jobs of task %s", queue, task)
        self._behind = late
        return min(5.0, after / 2)

    def _why_late(self, late: Overdue) -> str:
        """What keeps them, and what would help."""
        slots, terms = self._slots, self.tiers[0].terms.get(late.task)
        named = late.queue in slots.named
        room = f"queues={{{late.queue!r}: …}}" if named else "concurrency"
        if terms is not None and slots.busy.get((terms.names[0], late.value), 0) >= min(terms.running, terms.total):
            limit = f"max_running={terms.running}" if terms.running <= terms.total else f"max_running_total={terms.total}"
            return f"its {limit} is reached{' for ' + late.value if late.value else ''}: raise it, or let them wait"
        if slots.named.get(late.queue, slots.shared) <= 0:
            mine = [job for job in self.running.values() if (job.queue == late.queue if named else job.queue not in slots.named)]
            pool = dict.fromkeys(job.call or job for job in mine)  # which take a slot each
            names = ", ".join(f"{task} ({n})" for task, n in Counter(job.task for job in pool).most_common(3))
            longest = max((self._clock.monotonic() - job.deadline + job.settings.timeout for job in pool), default=0.0)
            took = f", for up to {longest:.1f} s" if 0 < longest < math.inf else ""
            taken = f"all its slots are taken, by {names or 'jobs that start'}{took}"
            return f"{taken}: more slots ({room}) or another process would help"
        if terms is not None and (terms.rate is not None or terms.total < math.inf):
            shared = [f"max_running_total={terms.total}"] * (terms.total < math.inf) + ["rate"] * (terms.rate is not None)
            return f"its {' or its '.join(shared)} lets no more start: raise it, or let them wait"
        if slots.threads <= 0:
            return "all threads for plain functions are taken: more of them (threads), or async functions, would help"
        return "this process does not get round to them: another process would help"

    async def retention(self, tier: Tier, now: int) -> float:
        """Drop what was kept long enough."""
        while await tier.store.prune(now) >= 500 and not self.closing.is_set():
            pass  # each a short transaction of its own
        if self._late:
            self.tell_missed()
        return 60.0

    async def leases(self, tier: Tier, now: int) -> float:
        """Renew what runs here, reclaim what ran where nobody renews any more."""
        await self._renew(tier, now)
        again = math.inf
        if not self.closing.is_set():
            again = await self._reclaim(tier, now)
            await self.learn_paused(tier)
            await self.retention(tier, now)
        return min(self._lease / 4, max(again, 0.05))

    def held(self) -> list[tuple[int, int, str | None]]:
        """The claims to renew. For any thread: the list of a dictionary's values is made in one step."""
        jobs = [job for job in list(self.running.values()) if job.tier.durable]
        return [(job.seq, job.claim_no, job.note) for job in jobs]

    async def _renew(self, tier: Tier, now: int) -> None:
        claims = self.held()
        if claims:
            self.heed_renewal(claims, await tier.store.extend(claims, later(now, self._lease)))

    def heed_renewal(self, claims: Sequence[tuple[int, int, str | None]], answers: Mapping[int, int | None]) -> None:
        """A claim that could not be renewed belongs to another; a job whose cancel was asked for is told."""
        jobs = {(job.seq, job.claim_no): job for job in self.running.values() if job.tier.durable}
        for seq, claim_no, _ in claims:
            job = jobs.get((seq, claim_no))
            if job is None:
                continue
            if seq not in answers and job.in_handler and job.why != "lost":
                log.warning("%s has lost its lease: it is cancelled here and writes nothing", label(job))
                job.stop("lost")
            elif answers.get(seq) is not None and job.why is None:
                job.stop("cancel")

    async def _reclaim(self, tier: Tier, now: int) -> float:
        """A lease must be past, and seen unrenewed here for a third of its length: so no clock step runs a job twice. The answer
        is in how many seconds another one may be."""
        moment = self._clock.monotonic()
        wall, steady = self._stepped
        held_up = moment - steady > self._lease / 2  # by a lock, which may have kept the others from renewing as well
        if held_up or abs((now - wall) / 1e6 - (moment - steady)) > self._lease / 6:
            self._watched.clear()
        self._stepped = (now, moment)
        # What is renewed in time has more than two thirds of its lease before it.
        doubtful = await tier.store.list(State.RUNNING, lease_before=later(now, self._lease * 0.6), limit=DOUBTFUL)
        others = [row for row in doubtful if row.tag not in self.running]
        if others and not await self._writes_in_time(tier):
            self._watched.clear()
            return self._lease / 6
        names = {row.seq: (row.seq, row.claim_no, row.lease) for row in doubtful}
        self._watched = {name: self._watched.get(name, moment) for name in names.values()}
        gone = [
            row
            for row in others
            if (row.lease or 0) < now
            and moment - self._watched[names[row.seq]] >= self._lease / 3
            and row.tag not in self.running  # still, after that write
        ]
        ends = (max(((row.lease or 0) - now) / 1e6, self._watched[names[row.seq]] + self._lease / 3 - moment) for row in others)
        if not gone:
            return min(ends, default=math.inf)
        changes = [self._after_loss(row, now) for row in gone]
        try:
            states = await tier.store.reclaim(changes, now)
        except StoreBusy:  # nobody could renew meanwhile
            self._watched.clear()
            raise
        reclaimed = [row for row in gone if row.seq in states]
        for row in reclaimed if len(reclaimed) <= 5 else ():
            log.warning("%s was reclaimed: worker %s has not renewed its lease", label(row), row.worker)
        if len(reclaimed) > 5:
            workers = ", ".join(sorted({str(row.worker) for row in reclaimed}))
            log.warning("%d jobs were reclaimed: worker %s has not renewed their leases", len(reclaimed), workers)
        for row, change in zip(gone, changes, strict=True):
            if row.seq in states:
                report(row, Outcome("lost"), change)
                self._became_dead(row, now, change)
                if row.id in self.live:
                    self.tell(self.known(row.but(state=states[row.seq], error=change.error)), now)
        tier.wake.set()
        return 0.0 if len(doubtful) == DOUBTFUL else min(ends, default=math.inf)

    async def _writes_in_time(self, tier: Tier) -> bool:
        """Whether the store can be written to: while it is locked nobody can renew, and nobody is lost for that."""
        began = self._clock.monotonic()
        try:
            await tier.store.extend((), 0)
        except StoreBusy:
            self._watched.clear()
            raise
        return self._clock.monotonic() - began < self._lease / 6

    def _after_loss(self, row: JobRow, now: int) -> Settlement:
        handler = self.handlers.get(row.task)
        if handler is None:
            return decide(row, Outcome("lost"), self._settings_of_stranger(row), now)
        try:
            return decide(row, Outcome("lost"), self._settings_of(row, handler), now)
        except Undecodable as error:
            return decide(row, Outcome("undecodable", reason=str(error)), Settings(), now)

    @staticmethod
    def _settings_of_stranger(row: JobRow) -> Settings:
        """Whoever knows the task also knows how many starts it has; what the row itself says holds here, too."""
        try:
            overrides = decode_overrides(row.options)
        except Undecodable:
            overrides = {}
        return Settings(**{**overrides, "retry": Retry(max_attempts=math.inf)})


# ── 28. Loops: schedules ──────────────────────────────────────────────────────────────────────────────────────────────
# Turns fire times into jobs. Fire times follow from the rule alone, the same in every process; which of those that have passed
# are run is the misfire policy's, whether one may start beside the last is the store's, which sees them all. There is no leader.


class Periodic(Record):
    """One schedule, and what it has done in this process."""

    handler: Handler
    rule: Rule
    overlap: Overlap
    misfire: Misfire
    grace: float | None  # seconds; None: the default
    immediate: bool
    per_process: bool
    text: str  # the rule
    period: int  # of an interval, microseconds; else 0
    prompt: float  # late by less than this it needs no policy
    settings: Settings | None = None  # of its jobs, in this run of the engine
    since: int = 0  # up to here fire times are dealt with
    next: int = 0
    begun: int = 0  # when its last run was seen to begin, here or elsewhere
    late: Sequence[int] = ()  # what has been missed and is run one after another
    dropped: int = 0  # how many of these came to be too late meanwhile
    order: int = -1  # of its entry in the heap
    watched: bool = False  # its run, for whose end it waits
    forced: bool = False  # its first run is due however late it is
    ended: bool = False  # removed, stood down, or broken
    removed: bool = False
    paused: bool = False
    last: int | None = None
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    superseded: int = 0

    @property
    def name(self) -> str:
        return self.handler.name

    def stats(self) -> ScheduleStats:
        return ScheduleStats(
            name=self.name, fired=self.fired, skipped=self.skipped, missed=self.missed, last=as_datetime(self.last),
            next=None if self.ended or self.paused else as_datetime(self.next or None), superseded=self.superseded,
            paused=self.paused,
        )  # fmt: skip

    def afresh(self) -> Periodic:
        """Another one, that has done nothing yet."""
        given = ("handler", "rule", "overlap", "misfire", "grace", "immediate", "per_process", "text", "period", "prompt")
        return Periodic(**{name: getattr(self, name) for name in given})

    def begin(self, now: int) -> int:
        """The moment that stands for its last fire time if none is recorded."""
        latest = self.rule.latest_at(now) if self.immediate else None
        return now if latest is None else latest - 1

    def arm(self, since: int) -> None:
        """Deal with the fire times after this moment."""
        regular = self.period and since == self.next
        self.since, self.next = since, since + self.period if regular else self.rule.next_at(since)
        if self.next <= since:
            raise ValueError(f"the next fire time after {as_datetime(since)} would be {as_datetime(self.next)}")

    def choose(self, now: int) -> tuple[int, list[int], int]:
        """Up to which fire time this deals with those that have passed, which are to be run, and how many are missed."""
        if now - self.next < self.prompt:
            return self.next, [self.next], self.dropped
        late = [moment for moment in self.late if self.since < moment <= now]  # later ones: the clock has been set back
        if not late:
            latest, late, missed = choose(self.rule, self.misfire, self.grace, self.since, now)
            if self.forced and not late and latest > self.since:
                return latest, [latest], missed - 1
            if self.overlap == "allow" or len(late) < 2:
                self.late = ()
                return latest, late, missed + self.dropped
            self.dropped += missed
        self.late = [moment for moment in late if now - moment < longest_delay(self.rule, self.grace, moment)]
        self.dropped += len(late) - len(self.late)
        return (self.late or late[-1:])[0], self.late[:1], self.dropped

    def waits_its_turn(self, moment: int) -> bool:
        """Whether this fire time is not for overlap to skip: it had been missed before the last run began."""
        return self.misfire == "all" and self.overlap != "allow" and moment <= self.begun


def set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


AT_A_TIME: Final = 50  # starts in one turn of the loop: few enough that most are over before the garbage collector comes
TURN: Final = 0.001  # seconds until a fire time that waits for a run which is not here is tried again, at first


class Scheduler:
    """Inserts a job at every fire time of its schedules: one heap, one timer."""

    def __init__(
        self,
        tier: Tier,
        clock: Clock,
        make_row: Callable[[Periodic, int], JobRow],
        watch: Callable[[str, Callable[[object], None]], bool] | None = None,
        start: Callable[[Periodic, int, bool], Awaitable[None] | None] | None = None,
    ) -> None:
        """`make_row`: for this fire time. `watch`: hear of the end of a schedule's run, if that is here. `start`: the run of the
        next fire time at once, or None if it has to wait for something; with True, in the task that calls this and awaits the
        answer."""
        # Earlier than others: in a process that has slept, a step takes up to a millisecond, five times as long as usual.
        self.wake = Sharp(self._meet, early=TIMERS_LATE + 0.001)
        self.firing = True
        self._tier = tier
        self._clock = clock
        self._make_row = make_row
        self._start, self._watch = start, watch
        self._heap: list[tuple[int, int, Periodic]] = []
        self._new: list[Periodic] = []
        self._order = itertools.count()
        self._spells = Spells(clock)
        self._under_way = False
        self._ready = set[asyncio.Task[None]]()  # the loop alone would not keep them
        self._drift = math.inf  # by how much the wall clock is ahead of the steady one

    def add(self, periodic: Periodic, now: int) -> None:
        periodic.ended = False
        with contextlib.suppress(Exception):  # said when it is armed for good
            periodic.arm(periodic.begin(now))
        self._new.append(periodic)
        self.wake.set()

    def is_due(self, now: int) -> bool:
        return self.firing and (bool(self._new) or (bool(self._heap) and self._heap[0][0] <= now))

    def is_busy(self, now: int) -> bool:
        """Whether a fire time is due, or is being turned into a job."""
        if self._under_way or self.is_due(now):
            return True
        waiting = (periodic for moment, _, periodic in self._heap if moment > periodic.next <= now and not periodic.ended)
        return any(now - periodic.begun < ON_TIME * 1e6 for periodic in waiting)  # else what it waits for may not end here

    def pass_over(self, now: int) -> None:
        """Go on as if what has come due by now had never been meant to fire."""
        for _, _, periodic in self._heap:
            if periodic.next <= now and not periodic.forced:
                periodic.arm(now)
        self._sort()

    def _sort(self) -> None:
        self._heap = [(periodic.next, order, periodic) for _, order, periodic in self._heap if order == periodic.order]
        heapq.heapify(self._heap)

    def _push(self, periodic: Periodic, moment: int | None = None) -> None:
        """In place of the entry that it may have, which is dropped when it comes up."""
        periodic.order = next(self._order)
        heapq.heappush(self._heap, (periodic.next if moment is None else moment, periodic.order, periodic))

    async def step(self, now: int) -> float:
        await self._notice_step_back(now)
        self._under_way = self.is_due(now)
        try:
            await self._enroll(now)
            await self._fire(now)
        finally:
            self._under_way = False
        if not self.firing or not self._heap:
            return math.inf
        return min(LONGEST_SLEEP, (self._heap[0][0] - now) / 1e6)

    async def _notice_step_back(self, now: int) -> None:
        """An interval of this process alone keeps its pace when the wall clock is set back. What is recorded in a database does
        not: a fire time that has been run is not run again."""
        drift = now / 1e6 - self._clock.monotonic()
        back, self._drift = self._drift - drift, drift
        if not STEP < back < math.inf:
            return
        for _, _, periodic in self._heap:
            periodic.begun = min(periodic.begun, now - 1)
        for _, _, periodic in self._heap if not self._tier.durable else ():
            if isinstance(periodic.rule, Every) and periodic.next - now > periodic.rule.period:
                await self._tier.store.undefine(periodic.name)
                if periodic.paused:
                    await self._tier.store.suspend(periodic.name, True, now - 1)
                periodic.arm(now - 1)
        self._sort()
        waiting = sum(periodic.since - now > LATENESS[0] * 1e6 for _, _, periodic in self._heap)
        if waiting:
            log.warning(
                "the clock was set back by %.1f s: %d schedules fire again once it is past what they have fired for",
                back,
                waiting,
            )

    async def _enroll(self, now: int) -> None:
        """Define what is new, and go on from the last fire time that is recorded of it, which may be from before a restart."""
        count, begins = len(self._new), list[tuple[Periodic, int]]()
        for periodic in self._new:
            try:
                begins += [] if periodic.ended else [(periodic, periodic.begin(now))]
            except Exception as error:
                self._give_up(periodic, error)
        definitions = [(periodic.name, periodic.text, begin) for periodic, begin in begins]
        records = await self._tier.store.define(definitions, now) if definitions else {}
        del self._new[:count]
        for periodic, begin in begins:
            record = records[periodic.name]
            periodic.paused = record.paused
            periodic.forced = periodic.immediate and record.last == begin
            periodic.begun = now  # a run of before may still go on
            self._rearm(periodic, record.last)
            if record.last > now + LATENESS[0] * 1e6:
                fired = as_datetime(record.last)
                log.warning("schedule %s has fired for %s, which is yet to come: it fires again after that", periodic.name, fired)

    def _rearm(self, periodic: Periodic, since: int) -> None:
        """Back onto the heap; a rule that fails costs the others nothing."""
        if periodic.ended:
            return
        try:
            periodic.arm(since)
            self._push(periodic)
        except Exception as error:
            self._give_up(periodic, error)

    @staticmethod
    def _give_up(periodic: Periodic, error: Exception) -> None:
        periodic.ended = True
        log.error("schedule %s is stopped, its rule fails: %s", periodic.name, error_text(error), exc_info=error)

    async def _fire(self, now: int) -> None:
        due: list[tuple[Periodic, int, list[int], int]] = []
        rows: list[JobRow] = []
        started = 0
        try:
            while self.firing and self._heap and self._heap[0][0] <= now and started < AT_A_TIME:
                if self._start_first(now, False) is not None:
                    started += 1
                    continue
                _, order, periodic = heapq.heappop(self._heap)
                if order != periodic.order or periodic.ended:
                    continue
                try:
                    latest, chosen, missed = periodic.choose(now)
                    made = [self._make_row(periodic, moment) for moment in chosen]
                except Exception as error:
                    self._give_up(periodic, error)
                    continue
                due.append((periodic, latest, chosen, 0 if periodic.paused else missed))
                rows += made
            answers = await self._tier.store.insert(rows, now) if rows else ()
        except BaseException:
            for periodic, *_ in due:  # the fire time is still the next one
                self._push(periodic)
            raise
        if due:
            self._tier.wake.set()
            self._note_all(due, iter(answers), now)

    async def _meet(self, due: float) -> None:
        """A little before the next fire time: have a task there in which its run may begin, and wait for that."""
        if not self._heap or self._heap[0][0] - self._clock.time() > 2e6 * self.wake.early:
            return  # it was only to look at the clock
        periodic, loop = self._heap[0][2], asyncio.get_running_loop()
        if self._start is None or not periodic.prompt or loop.get_task_factory() is not None:
            await self.wake.turn_until(due)
            return
        decided = cast("asyncio.Future[None]", loop.create_future())
        run = self._start_in_time(periodic, due, decided)
        task = asyncio.create_task(run, name=periodic.handler.task_name, context=contextvars.Context())
        self._ready.add(task)
        task.add_done_callback(self._ready.discard)
        task.add_done_callback(lambda _: set_done(decided))  # it may be cancelled before it begins
        await decided

    async def _start_in_time(self, periodic: Periodic, due: float, decided: asyncio.Future[None]) -> None:
        """Not before: until then it may be paused, say, or something else may take its slot. What has come in between is seen to
        by the step that follows."""
        latest, loop_time, run = due + TIMERS_LATE, asyncio.get_running_loop().time, None
        while (now := self._clock.time()) < periodic.next and loop_time() < latest and self.firing:
            if self.wake.is_set():
                break
            await asyncio.sleep(0)
        if self.firing and self._heap and self._heap[0][2] is periodic:
            run = self._start_first(now, True)
        set_done(decided)
        if run is not None:
            await run

    def _start_first(self, now: int, here: bool) -> Awaitable[None] | None:
        """Start the next run of the first schedule on the heap, and go on to its next fire time, unless anything about it is
        out of the ordinary."""
        _, order, periodic = self._heap[0]
        if self._start is None or order != periodic.order or periodic.ended or periodic.dropped:
            return None
        if not 0 <= now - periodic.next < periodic.prompt:
            return None
        run = self._start(periodic, now, here)
        if run is not None:
            periodic.last, periodic.begun, periodic.forced = periodic.next, now, False
            periodic.fired += 1
            periodic.arm(periodic.next)  # an interval, so it does not fail
            periodic.order = next(self._order)
            heapq.heapreplace(self._heap, (periodic.next, periodic.order, periodic))
        return run

    def _note_all(self, due: Sequence[tuple[Periodic, int, list[int], int]], answers: Iterator[Inserted], now: int) -> None:
        late: list[tuple[Periodic, int, int]] = []
        for periodic, latest, chosen, missed in due:
            found = [next(answers) for _ in chosen]
            if found and found[0].verdict == "overlap" and found[0].row.overlap == "wait":
                self._wait_turn(periodic, now)
                continue
            periodic.forced, periodic.dropped = False, 0
            for moment, answer in zip(chosen, found, strict=True):
                self._note(periodic, moment, answer, now)
            self._rearm(periodic, latest)
            if missed:
                late.append((periodic, missed, now - latest))
        self._note_missed(late)

    def _wait_turn(self, periodic: Periodic, now: int) -> None:
        """A run is not over: try again when it is; if it is not here, soon, and then more and more seldom."""
        if not periodic.watched and self._watch is not None:
            periodic.watched = self._watch(periodic.name, functools.partial(self._take_turn, periodic))
        pause = 1e6 if periodic.watched else min(1e6, max(TURN * 1e6, (now - periodic.begun) / 4))
        self._push(periodic, now + round(pause))

    def _take_turn(self, periodic: Periodic, ended: object = None) -> None:
        periodic.watched, now = False, self._clock.time()
        if periodic.next <= now and not periodic.ended:
            self._push(periodic, now)
            self.wake.set()

    @staticmethod
    def _note_missed(late: Sequence[tuple[Periodic, int, int]]) -> None:
        for periodic, missed, _ in late:
            periodic.missed += missed
        if late:
            tell_missed("schedule", [(periodic.name, missed, delay) for periodic, missed, delay in late])

    def _note(self, periodic: Periodic, moment: int, answer: Inserted, now: int) -> None:
        periodic.superseded += answer.superseded
        periodic.paused = answer.verdict == "paused"
        match answer.verdict:
            case "lost":
                periodic.begun = now
                log.debug("schedule %s: another process has fired %s", periodic.name, as_datetime(moment))
            case "stale":
                periodic.ended = True
                log.warning(
                    "schedule %s stands down in this process: another one has defined it differently since", periodic.name
                )
            case "overlap" | "existing":
                periodic.last = moment
                periodic.skipped += 1
                took, period = now - periodic.begun, periodic.period
                if answer.verdict == "overlap" and 0 < period <= took and self._spells.begins(periodic.name, period / 1e6):
                    tell_slow(f"schedule {periodic.name}", took / 1e6, period / 1e6, 'overlap="skip"')
                log.info("schedule %s skips %s: its last run is not over", periodic.name, as_datetime(moment))
            case "created":
                periodic.last, periodic.begun = moment, now
                periodic.fired += 1


# ── 29. Engine: taking work in ────────────────────────────────────────────────────────────────────────────────────────
# What lives between `start` and `stop` is the engine, told in three layers. This one holds the stores and the crew, makes rows
# and inserts them, and knows the bounds of what waits in memory.

RECURS: Final = "\u21bb "  # before the key of a recurring job, which is not to meet that of another job
NO_ARGUMENTS: Final[Arguments] = ((), {})
PER_JOB: Final = {"key", "run_at", "delay", "expires", "headers", "tx"}  # options with hardly ever the same value twice
WAIT_FOR_ROOM: Final = 5.0  # seconds that an enqueue waits while max_pending jobs do
HOOK_TIME: Final = 30.0  # seconds that an on_dead hook may take
HOOKS: Final = 10  # on_dead hooks that run at once; the others wait
NEEDS_DATABASE: Final = "durable=True needs a database: give db='jobs.db' to lifespan(), configure() or TinyQ(), or set TINYQ_DB"


class Intake:
    """The engine's way in."""

    _thread: int  # of the event loop

    def __init__(self, config: Config, handlers: Mapping[str, Handler], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.get_running_loop()
        self.config = config
        self.clock = config.clock
        self.worker = f"{config.worker_name or socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self.phase: Literal["running", "stopping", "stopped"] = "running"
        self.process = os.getpid()
        self.inherited = False  # this is a forked child of that process
        self.handlers = handlers
        self.memory_store = MemoryStore()
        self.memory_tasks: dict[str, bool] = {}
        self.terms: dict[str, Terms] = {}
        self.memory = Tier(store=self.memory_store, durable=False, tasks=self.memory_tasks, wake=Sharp(), terms=self.terms)
        self.durable_store: SQLiteStore | None = None
        self.durable: Tier | None = None
        self.durable_tasks: dict[str, bool] = {}
        self.pulse: Pulse | None = None
        self.lookout = asyncio.Event()  # somebody wrote to the table, or has begun to wait for what stands there
        slots = Slots(config.concurrency, config.queues, config.threads)
        self.crew = Crew(self.clock, self.memory_store, slots, self.settings_of, self.worker, config.lease, self.loop)
        self.crew.handlers = handlers
        self.crew.tiers.append(self.memory)
        self.spawned: dict[asyncio.Task[Any], str] = {}
        self.mark = object()  # of this run
        self._resolved: dict[Any, Settings] = {}
        self._hook_slots = asyncio.Semaphore(HOOKS)
        self._room: deque[asyncio.Event] = deque()
        self._awaited: set[JobRow] = set()
        self._moving: dict[bytes, asyncio.Task[list[JobRow]]] = {}  # promotions under way
        self._warned_of: set[tuple[str, str]] = set()  # tasks and types of arguments that belong to a request
        self._within: weakref.WeakSet[JobRow] = weakref.WeakSet()  # enqueued with tx, and perhaps never committed

    def settings(self, handler: Handler | None) -> Settings:
        """The options of a call that sets none of its own."""
        if handler is None:
            return resolve(self.config, None, {})
        if handler.settings is None:
            handler.settings = resolve(self.config, handler, {})
        return handler.settings

    def resolved(self, handler: Handler | None, options: Mapping[str, Any]) -> Settings:
        """All options of a call, checked options of its own included; the combinations that come up again are kept."""
        try:
            key = (handler, *options.items())
            if (settings := self._resolved.get(key)) is None:
                settings = resolve(self.config, handler, options)
                if len(self._resolved) < 1_000 and not options.keys() & PER_JOB:
                    self._resolved[key] = settings
            return settings
        except TypeError:  # a list, say, is no key
            return resolve(self.config, handler, options)

    def settings_of(self, row: JobRow, handler: Handler) -> Settings:
        """All options of a stored job: the defaults, its task's, and what its enqueue said about the run."""
        return resolve(self.config, handler, decode_overrides(row.options)) if row.options else self.settings(handler)

    def in_loop(self, call: Callable[[T], object], given: T) -> None:
        """Make a call that wakes loops: a plain function that registers something does so in a thread."""
        if threading.get_ident() == self._thread:
            call(given)
        else:
            self.loop.call_soon_threadsafe(call, given)

    def learn(self, handler: Handler) -> None:
        """Let claims take jobs of this task."""
        handler.learned = self.mark
        if handler.registered and self.handlers.get(handler.name, handler) is not handler:
            return  # another has taken its place
        self.memory_tasks[handler.name] = handler.in_thread or self.memory_tasks.get(handler.name, False)
        for name in (handler.name, *handler.aliases) if handler.registered else ():
            self.terms.pop(name, None)
            if handler.terms is not None and self.handlers.get(name, handler) is handler:
                self.terms[name] = handler.terms
        for alias in handler.aliases:
            if self.handlers.get(alias) is handler:
                self.durable_tasks[alias] = handler.in_thread
        if handler.registered:
            self.durable_tasks[handler.name] = handler.in_thread
            for tier in self.crew.tiers:
                tier.wake.set()

    def make_row(
        self, handler: Handler | None, name: str, settings: Settings, call: Arguments, overrides: Mapping[str, Any]
    ) -> JobRow:
        if handler is not None and settings.simple:
            simple = SimpleRow(handler, settings, call[0], self.clock.time(), contextvars.copy_context())
            if call[0]:
                self.look_at(name, call[0])
            if call[1]:
                simple.kwargs = call[1]
                self.look_at(name, call[1].values())
            simple.wait()
            return simple
        now = self.clock.time()
        row = JobRow(new_id(now) if settings.durable else b"", name, settings.queue, settings.priority, now, now)
        row.handler, row.settings = handler, settings
        row.key, row.on_conflict = settings.key, settings.on_conflict
        if settings.run_at is not None:
            row.run_at = settings.run_at
        elif settings.delay:
            row.run_at = later(now, settings.delay)
        if settings.expires is not None:
            at = settings.expires
            row.expires = as_moment(at, "expires") if isinstance(at, datetime) else later(now, at)
        if settings.durable:
            row.durable = True
            row.payload = encode_call(handler, name, call, self.config.max_payload)
            if overrides:
                row.options = encode_overrides(name, overrides)
            if settings.headers is not None:
                row.headers = encode_json(settings.headers)
        else:
            row.args, row.kwargs = call
            row.context = contextvars.copy_context()
            self.look_at(name, (*call[0], *call[1].values()))
        if settings.gated and handler is not None and handler.terms is not None and handler.terms.limited:
            row.limit_value = limit_value(handler, call)
        return row

    def make_recurring(self, row: JobRow, key: str, recurrence: Recurrence, immediate: bool) -> None:
        now, rule = row.created, rule_from(recurrence.rule)
        latest = rule.latest_at(now) if immediate else None
        row.run_at = row.fire_time = rule.next_at(now) if latest is None else latest
        row.key, row.recurrence, row.context = f"{RECURS}{key}", recurrence.as_text(), None
        row.expires = None  # which its task may have, and which is counted from now: how late it may be is misfire_grace

    def look_at(self, name: str, args: Iterable[Any]) -> None:
        """Say once per task and type that a best-effort job was given what may be closed by the time it runs."""
        for value in any_bound(args):
            about = (name, type_name(type(value)))
            if about not in self._warned_of and len(self._warned_of) < 1_000:
                self._warned_of.add(about)
                log.warning("task %s was given a %s, which is closed with its request: %s", *about, BOUND_ADVICE)

    def planned_row(self, plan: Plan, args: Sequence[Any]) -> JobRow:
        now, settings = self.clock.time(), plan.settings
        row = JobRow(new_id(now), plan.name, settings.queue, settings.priority, now, now)
        row.handler, row.settings, row.durable, row.options = plan.handler, settings, True, plan.options
        row.lane = plan.lane
        if plan.limit_value is not None:
            row.limit_value = plan.limit_value
        row.payload = encode_call(plan.handler, plan.name, (args, {}), self.config.max_payload)
        return row

    def start_at_once(self, row: SimpleRow, handler: Handler, settings: Settings) -> bool:
        """Start a new best-effort job here and now, if it need not wait for anything."""
        if not self.crew.may_start(self.memory, settings.queue, handler, row.created):
            row.wait()
            return False
        self.crew.start_simple(self.memory, row, handler, settings)
        return True

    async def insert(self, rows: Sequence[JobRow]) -> Sequence[Inserted]:
        """Store rows of one tier; each answer's row is the one object that stands for that job in this process."""
        self.crew.activity += 1
        if not rows[0].durable:
            for row in rows:
                if self.config.queues.get(row.queue) == 0:
                    raise ConfigurationError(
                        f"task {row.task!r}: queue {row.queue!r} has 0 slots here, so a best-effort job would never run: "
                        "use durable=True, for another process to run it, or another queue"
                    )
            await self._admit(len(rows))
            if not self.memory.claiming:
                raise ShuttingDown("the grace is over, so a best-effort job would never run: nothing was stored")
            answers = await self.memory_store.insert(rows, self.clock.time())
            self.memory.wake.set()
            return answers
        tier, now = self.require_durable(), self.clock.time()
        for row in rows:  # before the claim that may follow in the same unit: a handle is going to stand for it
            self.crew.live[row.id] = row
        answers = await tier.store.insert(rows, now)
        tier.wake.set()
        own = (answer.verdict == "created" or answer.row.recurrence is not None for answer in answers)
        return [
            answer if as_it_is else answer._replace(row=self.crew.known(answer.row))  # (a run under way has its own recurrence)
            for as_it_is, answer in zip(own, answers, strict=True)
        ]

    def add(self, row: JobRow) -> Awaitable[Any]:
        """Store one new durable job. (`insert` without what only keys and schedules need.)"""
        crew, tier = self.crew, cast(Tier, self.durable)
        store = cast(SQLiteStore, self.durable_store)
        crew.activity += 1
        if tier.claiming:
            if store.idle and crew.offer(tier, row, row.created):
                sure = row.settings is None or row.settings.on_lost == "dead"
                return store.hand_over(row, row.created, functools.partial(crew.take_over, tier, row), sure)
            if row.run_at <= row.created and not store.carries_due:
                tier.wake.set()  # so that a claim goes along with this and what else is enqueued now
                store.claim_comes = True
        crew.live[row.id] = row
        return store.add(row, row.created)

    async def insert_within(self, tx: Any, rows: Sequence[JobRow]) -> Sequence[Inserted]:
        """Store rows in the caller's own transaction. He may roll it back: what is known here of other jobs stays as it is."""
        self.require_durable()
        answers = await cast(SQLiteStore, self.durable_store).insert_within(tx, rows, self.clock.time())
        self._within.update(rows)
        return [answer._replace(row=self.crew.live.setdefault(answer.row.id, answer.row)) for answer in answers]

    def require_durable(self) -> Tier:
        if self.durable is not None:
            return self.durable
        import importlib.util

        if importlib.util.find_spec("aiosqlite") is None:
            raise ImportError("durable=True needs aiosqlite (pip install aiosqlite), and a database: TinyQ(db='jobs.db')")
        raise ConfigurationError(NEEDS_DATABASE)

    async def _admit(self, count: int) -> None:
        """Wait for room among the pending best-effort jobs: at most 5 s, and not inside a job, which may be in the way itself."""
        most = self.config.max_pending
        if self.memory_store.waiting + count <= most:
            return
        full = QueueFull(f"{most:,} best-effort jobs are pending (max_pending): enqueue less, raise it, or use durable=True")
        if count > most:
            raise QueueFull(
                f"{count:,} jobs at once are more than max_pending={most:,}: enqueue fewer at a time, or use durable=True"
            )
        ends: float | None = None
        while self.memory_store.waiting + count > most:
            if _current.get(None) is not None:
                raise full
            moment = self.clock.monotonic()
            ends = moment + WAIT_FOR_ROOM if ends is None else ends
            if moment >= ends:
                raise full
            turn = asyncio.Event()
            self._room.append(turn)
            try:
                await self.clock.wait(turn, ends - moment)
            finally:
                if turn in self._room:
                    self._room.remove(turn)
            self.require_running()
        if ends is not None:
            self._room_freed()  # perhaps there is room for the next in line, too

    def _room_freed(self) -> None:
        if self._room and self.memory_store.waiting < self.config.max_pending:
            self._room.popleft().set()

    def require_running(self) -> None:
        """Before start there is no engine; this is about the time after. Jobs that still run may enqueue to the end."""
        here = asyncio._get_running_loop()
        if here is None:
            raise NotStarted("there is no event loop in this thread: call from the loop in which tinyq was started")
        self.require_loop()
        if self.phase != "running" and not (self.phase == "stopping" and (_spawned.get() or _current.get(None) is not None)):
            raise ShuttingDown(f"tinyq is {self.phase}: nothing was stored; enqueue before the lifespan ends")

    def require_loop(self) -> None:
        if self.loop is not asyncio._get_running_loop():
            raise NotStarted(
                "this TinyQ was started in another event loop: start one in each loop, or hand the work over to that loop, by "
                "asyncio.run_coroutine_threadsafe(…)"
            )

    def disown(self) -> None:
        """In a forked child: neither use nor free anything of this engine, whose threads are not here."""
        self.inherited, self.phase = True, "stopped"
        for job in self.crew.running.values():
            job.why = "abandoned"
        if self.durable_store is not None:
            self.durable_store.disown()
        _open.append(self)

    def refuse_fork(self) -> None:
        if self.inherited:
            raise NotStarted(
                f"tinyq was started in process {self.process}, and this is process {os.getpid()}, a fork of it, which must not "
                "use its database connections and loops: start a TinyQ here, in an event loop of its own"
            )

    def spawn(self, coro: Coroutine[Any, Any, T], name: str | None, context: contextvars.Context | None) -> asyncio.Task[T]:
        self.require_running()
        if len(self.spawned) >= self.config.max_pending:
            raise QueueFull(f"{self.config.max_pending:,} spawned tasks are running (max_pending): spawn fewer at a time")
        return self._track(coro, name or getattr(coro, "__qualname__", None), context)

    def _track(self, coro: Coroutine[Any, Any, T], name: str | None, context: contextvars.Context | None) -> asyncio.Task[T]:
        task = self.loop.create_task(contained(coro), name=name, context=context)
        self.spawned[task] = task.get_name()
        task.add_done_callback(functools.partial(self._spawned_ended, coro))
        return task

    def _spawned_ended(self, coro: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
        coro.close()  # cancelled before its first turn it never began
        name = self.spawned.pop(task)
        if not self.spawned:
            self.crew.idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("spawned task %s failed: %s", name, error_text(error), exc_info=error)

    def call_hooks(self, hooks: Iterable[Handler], job: object, about: str) -> None:
        """Begin to call the on_dead hooks for a job. Whatever they do is their own affair: the job is settled."""
        for hook in hooks:
            if self.crew.closing.is_set() or len(self.spawned) >= self.config.max_pending:
                why = "tinyq has stopped" if self.crew.closing.is_set() else f"{self.config.max_pending:,} tasks are running"
                log.error("on_dead hook %s was not called for %s: %s", hook.name, about, why)
                continue
            task = self._track(self._call_hook(hook, job, about), f"on_dead hook {hook.name}", contextvars.Context())
            task.add_done_callback(functools.partial(hook_never_ended, hook, about))

    async def _call_hook(self, hook: Handler, job: object, about: str) -> None:
        async with self._hook_slots:
            work = self.loop.create_task(contained(run_hook(hook, job, self.crew.threads)))
            over = asyncio.Event()
            work.add_done_callback(lambda _: over.set())
            why = f"stopped after {HOOK_TIME:g} s"
            try:
                await self.clock.wait(over, HOOK_TIME)
            except asyncio.CancelledError:
                why = "stopped at shutdown"
            stopped = not work.done()
            if stopped:
                work.cancel()
                await self.clock.wait(over, 1.0)  # then it is known where it was
            error = failure_of(work)
            if stopped or error is not None:
                error = with_cause(TimeoutError(why), error) if stopped else error
                log.error("on_dead hook %s failed for %s: %s", hook.name, about, error_text(cast(Any, error)), exc_info=error)
            await asyncio.wait({work})  # one that does not heed its cancellation keeps its place


async def run_hook(hook: Handler, job: object, threads: Threads) -> None:
    if hook.is_async:
        await hook.fn(job)
        return
    thread = threads.submit(functools.partial(contextvars.copy_context().run, hook.fn, job))
    told = False
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:  # the first does nothing, since a thread cannot be stopped; the next abandons it
            if told:
                raise
            told = True
    value, error = thread.result()
    if error is not None:
        raise error
    if inspect.isawaitable(value):
        await value


def failure_of(work: asyncio.Task[Any]) -> BaseException | None:
    """The error with which a task has ended, if it has."""
    try:
        return work.exception() if work.done() else None
    except asyncio.CancelledError as error:
        return error


def with_cause(error: BaseException, cause: BaseException | None) -> BaseException:
    error.__cause__ = cause
    return error


def hook_never_ended(hook: Handler, about: str, task: asyncio.Task[None]) -> None:
    if task.cancelled():  # while it waited for its turn; one that had begun says itself what happened
        log.error("on_dead hook %s was not called for %s: tinyq is stopping", hook.name, about)


async def contained(coro: Coroutine[Any, Any, T]) -> T:
    """A spawned coroutine that cannot take the event loop down by SystemExit or KeyboardInterrupt."""
    _spawned.set(True)
    try:
        return await coro
    except (SystemExit, KeyboardInterrupt) as error:
        raise JobFailed(type(error).__qualname__, str(error)) from error


class Outpost(Intake):
    """Makes rows where no engine runs. Of an Intake it is what needs no event loop, for the length of one call."""

    def __init__(self, config: Config, handlers: Mapping[str, Handler], path: str | None) -> None:
        self.config, self.clock, self.handlers = config, config.clock, handlers
        self.path = path or (os.path.abspath(config.db) if config.db is not None else "")
        self.mark = object()
        self._resolved = {}

    def settings(self, handler: Handler | None) -> Settings:
        return resolve(self.config, handler, {})  # not kept: before the start the configuration may still change

    def learn(self, handler: Handler) -> None:
        """Nothing is claimed here."""

    def look_at(self, name: str, args: Iterable[Any]) -> None:
        """No best-effort job is going to be made here."""

    def require_durable(self) -> Any:
        if not self.path:
            raise ConfigurationError(NEEDS_DATABASE)

    def insert_now(self, row: JobRow, tx: Any) -> Inserted:
        if not row.durable:
            raise NotStarted(
                f"task {row.task!r}: no tinyq runs in this process that could run a best-effort job: use durable=True, for a "
                "worker to run it, or start this TinyQ in the application's lifespan"
            )
        now = self.clock.time()
        if tx is None:
            [answer] = insert_here(self.path, self.config, [row], now)
        else:
            [answer] = insert_here_within(tx, self.path, self.config, [row], now)
        return answer


def from_thread(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What a coroutine answers that runs in another thread's event loop, in the context of this one. If that loop is stuck, it is
    waited for at most 10 s; once the coroutine has begun, for as long as that takes."""
    import concurrent.futures

    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    async def carry() -> None:
        try:
            future.set_result(await make())
        except asyncio.CancelledError:
            future.set_exception(ShuttingDown("the event loop of this TinyQ went down meanwhile: the job may have been stored"))
        except BaseException as error:
            future.set_exception(error)

    def begin() -> None:
        if future.set_running_or_notify_cancel():
            tasks.append(loop.create_task(carry(), context=context))

    tasks: list[asyncio.Task[None]] = []  # a loop keeps no hold on its tasks
    try:
        loop.call_soon_threadsafe(begin)
    except RuntimeError:
        raise ShuttingDown("the event loop of this TinyQ was closed at this moment: nothing was stored") from None
    try:
        while not concurrent.futures.wait([future], PATIENCE).done:
            if future.cancel():
                raise TimeoutError(f"the event loop of this TinyQ has not turned for {PATIENCE:g} s: nothing was stored")
            if not loop.is_running():
                raise ShuttingDown("the event loop of this TinyQ ended meanwhile: the job may have been stored")
        return future.result()
    finally:
        future.cancel()  # if this thread was interrupted


# ── 30. Engine: asking about jobs ─────────────────────────────────────────────────────────────────────────────────────
# What handles need: reading, waiting, cancelling, promoting. Knows that a job may run in another process.


BATCH: Final = 500  # rows that one transaction requeues or purges


def batches(ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (ids[at : at + BATCH] for at in range(0, len(ids), BATCH))


class Inquiries(Intake):
    """The engine as handles see it."""

    async def get(self, id: bytes) -> JobRow | None:
        found = await self.memory_store.get([id])
        if found or self.durable is None:
            return found[0] if found else None
        existed = False
        for _ in range(5):
            written = self.crew.written
            found = await self.durable.store.get([id])
            if id in self.crew.running:
                return self.crew.running[id]
            if written == self.crew.written:  # else it may have ended here since it was read, and nobody would tell its handle
                break
            existed = existed or bool(found)
        if not found and existed:  # it has ended here at this moment, and a handle may know how
            return self.crew.live.get(id)
        return self.crew.known(found[0]) if found else None

    async def exists(self, row: JobRow) -> bool:
        self.refuse_fork()
        if not row.durable:
            return bool(await self.memory_store.get([row.id]))
        self.require_durable()
        return await cast(SQLiteStore, self.durable_store).exists(row.id)

    def settings_for(self, row: JobRow) -> Settings:
        if row.settings is None:
            handler = row.handler or self.handlers.get(row.task)
            try:
                row.settings = self.settings_of(row, handler) if handler else Settings(**decode_overrides(row.options))
            except Undecodable:
                row.settings = Settings()
        return row.settings

    async def wait_for_end(self, row: JobRow) -> None:
        """Returns when the job has ended; NoResult when this process is not going to see that."""
        self.refuse_fork()
        while row.finished is None:
            if self.phase == "stopped":
                raise NoResult(f"job {id_text(row.id)} was {row.state} when tinyq stopped here")
            await self._wait_for_change(row)

    async def _wait_for_change(self, row: JobRow) -> None:
        """Until something has become of the row, here or elsewhere. NoResult if nothing will that could be seen here."""
        self.require_loop()
        waiter: asyncio.Future[None] = self.loop.create_future()
        row.waiters = [*(row.waiters or ()), waiter]
        self._awaited.add(row)
        if row.durable:
            self.crew.live.setdefault(row.id, row)
        try:
            if row.durable and row.tag not in self.crew.running:
                if self.pulse is not None:
                    self.pulse.attend()
                if not (await asyncio.wait({waiter}, timeout=POLL / 2))[0]:
                    self.lookout.set()  # it may have ended before anybody listened
            await waiter
        finally:
            row.waiters.remove(waiter)
            if not row.waiters:
                self._awaited.discard(row)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen, even if whoever waited was cancelled at this moment

    async def look_up(self, now: int) -> float:
        """One look for all who wait for durable jobs that do not run here."""
        rows = [row for row in self._awaited if row.durable and row.finished is None and row.tag not in self.crew.running]
        if not rows or self.durable is None:
            return math.inf
        began = time.monotonic()
        found = {row.id: row for row in await self.durable.store.get([row.id for row in rows])}
        took = time.monotonic() - began
        for row in rows:
            if row.tag in self.crew.running or row.finished is not None:
                continue
            try:
                self._take_note(row, found.get(row.id))
            except NoResult as error:
                for waiter in row.waiters or ():
                    if not waiter.done():
                        waiter.set_exception(NoResult(str(error)))
            else:
                if row.finished is not None:
                    self.crew.tell(row, self.clock.time())
        with contextlib.suppress(TimeoutError):  # many who wait in a busy file: looking is to take a small part of the time
            async with asyncio.timeout(4 * took):
                await self.crew.closing.wait()
        return SAFETY

    def _take_note(self, row: JobRow, found: JobRow | None) -> None:
        """What has become of a durable job that does not run here."""
        tier = self.require_durable()
        if found is None:
            if row in self._within:
                raise NoResult(
                    f"job {id_text(row.id)} is not in the database: its transaction was not committed (yet), or it has ended and "
                    "its result was not kept; ask after the commit, or set result_ttl"
                )
            raise NoResult(
                f"job {id_text(row.id)} has ended and its result was not kept: set result_ttl to read it from anywhere"
            )
        self.crew.known(found)
        # With this worker's name on it, it runs here, and the claim's answer is on its way.
        left = not tier.claiming or (tier.serves is not None and row.queue not in tier.serves)
        elsewhere = left or (row.state is State.RUNNING and row.worker != self.worker)
        if row.finished is None and elsewhere and self.settings_for(row).result_ttl <= 0:
            raise NoResult(
                f"job {id_text(row.id)} runs in another process and keeps no result: set result_ttl to read it from here"
            )

    def listening(self) -> bool:
        """Whether anybody waits for what others write; asked from a thread."""
        return bool(self._awaited)

    def heard(self) -> None:
        """Somebody may have written to the table."""
        if self.durable is not None:
            self.durable.wake.set()
        if self._awaited:
            self.lookout.set()

    async def wake(self) -> None:
        for tier in self.crew.tiers:
            tier.wake.set()
        self.lookout.set()
        if self.durable_store is not None:
            await self.durable_store.ring(self.clock.time())

    async def cancel(self, row: JobRow) -> bool:
        self.refuse_fork()
        await self.promotion_of(row)
        while row.finished is None and self.phase != "stopped":
            self.require_loop()
            job = self.crew.running.get(row.tag)
            if job is not None:
                job.stop("cancel")
                await self._wait_for_change(row)
                continue  # if it failed at that moment, it is pending again
            settings, now = self.settings_for(row), self.clock.time()
            keep_until = None if settings.failure_ttl == math.inf else later(now, settings.failure_ttl)
            store = self.require_durable().store if row.durable else self.memory_store
            state = (await store.cancel([row.id], CANCELLED_ON_REQUEST, keep_until, now)).get(row.id)
            if state is State.CANCELLED:
                row.state, row.reason, row.finished = State.CANCELLED, row.reason or CANCELLED_ON_REQUEST, now
                self.crew.tell(row, self.clock.time())
                self._room_freed()
            elif state is not State.RUNNING or not await self._wait_for_stranger(row):
                break
        return row.state is State.CANCELLED

    async def _wait_for_stranger(self, row: JobRow) -> bool:
        """Until a job that was told to stop has done so, in whatever process it runs. False if its row is gone."""
        while row.finished is None and self.phase != "stopped" and row.tag not in self.crew.running:
            found = await self.require_durable().store.get([row.id])
            if not found:
                return False
            if self.crew.known(found[0]).state is not State.RUNNING:
                break
            await asyncio.sleep(POLL / 10 if row.worker == self.worker else POLL)
        return True

    async def dead(self, task: str | None, limit: int) -> list[JobRow]:
        """Dead rows of both tiers, the last to die first."""
        rows = list(await self.memory_store.dead(task, NEWEST, limit))
        if self.durable is not None:  # (without payloads, which the next claim brings)
            rows += [self.crew.known(row) for row in await self.durable.store.dead(task, NEWEST, limit)]
        return sorted(rows, key=lambda row: row.finished or 0, reverse=True)[:limit]

    async def requeue(self, ids: Sequence[bytes]) -> int:
        now, count = self.clock.time(), 0
        for store in self._stores():
            for some in batches(list(dict.fromkeys(ids))):
                count += await self._requeue(store, some, now)
        return count

    async def requeue_dead(self, task: str | None) -> int:
        """All dead jobs, of one task if it is named; but those whose key is taken."""
        now, count, left = self.clock.time(), 0, 0
        for store in self._stores():
            async for ids in self._dead_ids(store, task):
                again = await self._requeue(store, ids, now, bulk=True)
                count, left = count + again, left + len(ids) - again
        if left:
            log.warning("requeue left %d dead jobs as they are: a job with the same task and key is pending", left)
        return count

    async def _requeue(self, store: Store, ids: Sequence[bytes], now: int, bulk: bool = False) -> int:
        again = await store.requeue(ids, now, bulk)
        if store is not self.memory_store:
            for row in await store.get([id for id in again if id in self.crew.live]):
                self.crew.known(row, again=True)
        for tier in self.crew.tiers:
            tier.wake.set()
        return len(again)

    async def recurring(self, task: str | None, key: str | None, limit: int) -> list[JobRow]:
        key = None if key is None else f"{RECURS}{key}"
        return [row for store in self._stores() for row in await store.recurring(task, key, 0, limit)]

    async def unschedule(self, task: str, key: str, but: bool | None = None) -> bool:
        now = self.clock.time()
        return any([await store.unschedule(task, key, now) for store in self._stores(but)])

    async def purge(self, ids: Sequence[bytes]) -> int:
        return sum([await store.purge(some) for store in self._stores() for some in batches(ids)])

    async def purge_dead(self, task: str | None) -> int:
        return sum([await store.purge(ids, True) for store in self._stores() async for ids in self._dead_ids(store, task)])

    def _stores(self, but: bool | None = None) -> list[Store]:
        """The last one knows what holds for all processes. `but`: without the durable one, or without the other."""
        return [tier.store for tier in (self.memory, self.durable) if tier is not None and tier.durable is not but]

    @staticmethod
    async def _dead_ids(store: Store, task: str | None) -> AsyncIterator[list[bytes]]:
        """In batches, the last to die first: so one that is requeued and dies again meanwhile does not come up twice."""
        before = NEWEST
        while rows := await store.dead(task, before, BATCH):
            before = ended_at(rows[-1])
            yield [row.id for row in rows]

    async def pause(self, queue: str) -> None:
        for store in reversed(self._stores()):
            await store.pause([queue])
        self.crew.pauses += 1

    async def resume(self, queue: str) -> None:
        now = self.clock.time()
        for store in reversed(self._stores()):
            await store.resume([queue], now)
        self.crew.pauses += 1
        for tier in self.crew.tiers:
            tier.wake.set()

    async def stats(self, schedules: Sequence[Periodic]) -> Stats:
        now = self.clock.time()
        counts = list(await self.memory_store.counts(now))
        spawned = Counter(self.spawned.values())
        counts += [
            Count(queue="default", task=name, state=State.RUNNING, durable=False, count=n) for name, n in sorted(spawned.items())
        ]
        if self.durable is not None:
            counts += await self.durable.store.counts(now)
        paused = await self._stores()[-1].paused()
        counts = [c.but(due=0) if c.queue in paused else c for c in counts]
        unknown = {c.task for c in counts if c.durable and c.state is State.PENDING and c.task not in self.handlers}
        fires = tuple(schedule.stats() for schedule in schedules)
        return Stats(counts=tuple(counts), unknown=tuple(sorted(unknown)), schedules=fires, paused=tuple(sorted(paused)))

    async def promote(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """Move pending best-effort jobs into the table, whatever becomes of the caller; answers those that are stored now.
        One whose arguments do not encode stays as it is; one whose key a stored job has gives way to that."""
        self.require_durable()
        if self.phase == "running":  # one behind a running job with its key would run beside it
            rows = [row for row in rows if row.ready != HELD]
        pairs = [(row, stored) for row in rows if (stored := self._as_durable(row)) is not None]
        self.memory_store.detach([row for row, _ in pairs])
        for row, stored in pairs:
            stored.ticket = row.ticket  # the entry that it had in a heap stays dead
        task = self.loop.create_task(self._store_detached(pairs), context=contextvars.Context())
        self._moving |= {row.id: task for row, _ in pairs}
        task.add_done_callback(functools.partial(self._moved, [row.id for row, _ in pairs]))
        return await asyncio.shield(task)

    def _moved(self, ids: Sequence[bytes], task: asyncio.Task[list[JobRow]]) -> None:
        for id in ids:
            self._moving.pop(id, None)
        if not task.cancelled():
            task.exception()  # known to the caller, if there still is one

    async def promotion_of(self, row: JobRow) -> None:
        """Wait for it, if there is one under way."""
        self.refuse_fork()
        if row.id in self._moving:
            await asyncio.wait({self._moving[row.id]})

    def _as_durable(self, row: JobRow) -> JobRow | None:
        settings, usual = self.settings_for(row), self.settings(row.handler)
        run_options = ("retry", *STORED_OPTIONS)
        overrides = {name: getattr(settings, name) for name in run_options if getattr(settings, name) != getattr(usual, name)}
        stored = row.but(durable=True, on_conflict="reuse", waiters=None, args=None, context=None)
        headers = headers_of(row)
        stored.headers = encode_json(headers) if headers else None
        try:
            stored.payload = encode_call(row.handler, row.task, (row.args or (), row.kwargs), self.config.max_payload)
            stored.options = encode_overrides(row.task, overrides)
        except (TypeError, ValueError) as error:
            log.warning("%s cannot be promoted: %s", label(row), error_text(error))
            return None
        return stored

    async def _store_detached(self, pairs: Sequence[tuple[JobRow, JobRow]]) -> list[JobRow]:
        tier, now = self.require_durable(), self.clock.time()
        for _, stored in pairs:  # before the claim that may follow in the same unit
            self.crew.live[stored.id] = stored
        try:
            answers = await tier.store.insert([stored for _, stored in pairs], now) if pairs else ()
        except BaseException:
            self.memory_store.attach([row for row, _ in pairs], now)
            self.memory.wake.set()
            for row, _ in pairs:
                self.crew.tell(row, self.clock.time())
            raise
        promoted = []
        for (row, stored), answer in zip(pairs, answers, strict=True):
            if answer.verdict == "created":
                stored.waiters = row.waiters
                row.__dict__ = stored.__dict__  # what handles hold and what may run by now are one from here on
                self.crew.live[row.id] = row
                promoted.append(row)
                log.info("%s was promoted: it is stored as a durable job", label(row))
            else:
                row.state, row.reason = State.CANCELLED, "a durable job with the same key exists"
                log.info("%s was not promoted: %s", label(row), row.reason)
            self.crew.tell(row, self.clock.time())
        tier.wake.set()
        self._room_freed()
        return promoted


# ── 31. Engine: from start to stop ────────────────────────────────────────────────────────────────────────────────────
# Opens the store, begins the loops, and takes everything down again on the one path that there is.

EXTRA: Final = 2.0  # seconds for `finally` blocks after the grace
STALLED: Final = 5.0  # seconds of silence, of the loop or the database, that are worth a mention
PROGRESS: Final = 5.0  # seconds between the lines that say what a shutdown waits for


class Engine(Inquiries):
    """One run of a TinyQ."""

    def __init__(self, config: Config, handlers: Mapping[str, Handler], loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(config, handlers, loop)
        self.schedulers: dict[bool, Scheduler] = {}
        self.stopped = asyncio.Event()
        self.beat = Beat(self.loop)
        self._thread = threading.get_ident()
        self.incidents: dict[str, str] = {}  # of the loops and the pulse that fail at present: what they say
        self._unknown: Mapping[int, str] = {}  # due jobs of tasks that are not known here, as of the last upkeep
        self._untaken: Sequence[str] = ()  # those tasks of which a job was seen twice
        self._loops: list[asyncio.Task[None]] = []
        self._wakes: list[asyncio.Event] = []
        self._stopping: asyncio.Task[None] | None = None
        self._grace_ends = math.inf
        self._warned = False

    async def start(self, schedules: Sequence[Periodic]) -> None:
        """Open the store, begin the loops. On an error nothing is left behind."""
        if self.config.db is not None:
            config = self.config
            self.durable_store = SQLiteStore(cast(str, config.db), config.namespace, config.synchronous, config.auto_migrate)
            await self.durable_store.open()
            self.durable = Tier(
                store=self.durable_store,
                durable=True,
                tasks=self.durable_tasks,
                wake=Sharp(),
                claiming=self.config.worker,
                app=self.memory.app,
                middleware=self.memory.middleware,
                hungry=self.config.worker,  # what it left is not known before the first claim
                serves=self.config.serves,
                terms=self.terms,
            )
            self.durable_store.on_added = functools.partial(self.crew.look_again, self.durable)
            self.crew.tiers.append(self.durable)
            await self._begin_pulse(self.durable_store)
        for handler in self.handlers.values():
            handler.settings = None  # another run's configuration may have been another
            self.learn(handler)
        for tier in self.crew.tiers:
            self._begin_tier(tier)
        self._begin("timeouts", self.crew.deadlines, self.crew.deadline_wake)
        if self.config.behind_after < math.inf:
            self._begin("pace", functools.partial(self.crew.watch_pace, self.config.behind_after), self.crew.pace_wake)
        if self.durable is not None:
            self._begin("durable outcomes", functools.partial(self.crew.settle, self.durable), self.crew.settle_wake, 5.0)
        for schedule in schedules:
            self.add_schedule(schedule)
        facts = self.durable_store.facts if self.durable_store else {"path": "none, best-effort jobs only"}
        log.info(
            "tinyq %s started: worker %s, %s, %d tasks, %d schedules, database %s",
            __version__, self.worker, "claims jobs" if self.config.worker else "claims no durable jobs",
            len({*map(id, self.handlers.values())}), len(schedules),
            ", ".join(f"{name} {value}" for name, value in facts.items()),
        )  # fmt: skip

    async def _begin_pulse(self, store: SQLiteStore) -> None:
        crew = self.crew
        self.pulse = Pulse(
            store.path,
            self.config,
            self.worker,
            self.beat,
            self.incidents,
            crew.held,
            crew.heed_renewal,
            self.heard,
            self.listening,
            lambda: crew.looks_at,
        )
        store.on_due = self.pulse.ring
        try:
            await self.pulse.start()
        except BaseException:
            try:
                await self.pulse.stop()
            finally:  # it may be told again to give up
                await store.close()
            raise
        self._begin("results", self.look_up, self.lookout)

    async def _upkeep(self, tier: Tier, now: int) -> float:
        began = time.monotonic()
        seconds = await self.crew.leases(tier, now)
        if self.pulse is not None:
            self.pulse.renewed = began
        if self.durable_store is not None and self.config.worker:
            unknown = await self.durable_store.unknown(list(self.durable_tasks))
            self._untaken = sorted({name for seq, name in unknown.items() if seq in self._unknown})
            self._unknown = unknown
        return seconds

    def health(self) -> Health:
        """In any thread."""
        reasons = [] if self.phase == "running" else [f"tinyq is {self.phase}"]
        reasons += [f"{name} failing: {what}" for name, what in list(self.incidents.items())]
        waiting = self.durable_store.stalled if self.durable_store else 0.0
        if waiting > STALLED:
            reasons.append(f"a write has been waiting for the database for {waiting:.1f} s")
        owed = self.beat.owed() if threading.get_ident() != self._thread else 0.0
        if owed > STALLED:
            reasons.append(f"the event loop has not turned for {owed:.1f} s")
        untaken = [name for name in self._untaken if name not in self.handlers]
        if untaken:
            reasons.append(f"jobs are due of tasks that no worker knows: {', '.join(untaken[:10])}")
        return Health(status="degraded" if reasons else "ok", reasons=tuple(reasons))

    def _begin_tier(self, tier: Tier) -> None:
        name = "durable" if tier.durable else "best-effort"
        start = None if tier.durable else self._fire_at_once
        self.schedulers[tier.durable] = Scheduler(tier, self.clock, self.occurrence, self._watch_run, start)
        self._begin(f"{name} schedules", self.schedulers[tier.durable].step, self.schedulers[tier.durable].wake)
        self._begin(f"{name} claims", functools.partial(self._claim, tier), tier.wake)
        upkeep = self._upkeep if tier.durable else self.crew.retention
        self._begin(f"{name} upkeep", functools.partial(upkeep, tier), asyncio.Event(), self.config.lease / 4)

    def _begin(self, name: str, step: Step, wake: asyncio.Event, longest: float = 15.0) -> None:
        loop = drive(name, step, wake, self.clock, self.stopped, longest, self.incidents)
        self._wakes.append(wake)
        self._loops.append(self.loop.create_task(loop, name=f"tinyq {name}", context=contextvars.Context()))

    async def _claim(self, tier: Tier, now: int) -> float:
        if not tier.durable and self.memory_store.recurring_pending:
            self.memory_store.keep_pace(now, self.clock.monotonic())
        seconds = await self.crew.claim(tier, now)
        if not tier.durable:
            self._room_freed()
        return seconds

    def is_shared(self, schedule: Periodic) -> bool:
        """Whether its fire times are one for all processes."""
        return self.durable is not None and not schedule.per_process

    def own(self, schedules: list[Periodic]) -> list[Periodic]:
        """Those of this engine among the schedules of its TinyQ."""
        return schedules

    def tier_of(self, schedule: Periodic) -> Tier:
        return self.require_durable() if self.is_shared(schedule) else self.memory

    async def look_at_pauses(self, schedules: Sequence[Periodic]) -> None:
        """Learn which are paused: another process may have paused or resumed them since they were due here."""
        for tier in self.crew.tiers:
            of_tier = [schedule for schedule in schedules if self.tier_of(schedule) is tier]
            paused = await tier.store.suspended() if of_tier else frozenset()
            for schedule in of_tier:
                schedule.paused = schedule.name in paused

    def add_schedule(self, schedule: Periodic) -> None:
        shared, serves = self.is_shared(schedule), self.config.serves
        queue = self.settings(schedule.handler).queue
        if shared and not (self.config.worker and (serves is None or queue in serves)):
            log.info("schedule %s is left to the processes that claim durable jobs of its queue", schedule.name)
            return
        if not shared and self.config.queues.get(queue) == 0:
            log.warning("schedule %s is not run here: its queue has 0 slots", schedule.name)
            return
        if not shared and not schedule.per_process and not self._warned and several_workers():
            self._warned = True
            log.warning(
                "schedule %s: this looks like one of several server processes, and without a database each fires it; "
                "give db=…, or per_process=True if that is meant", schedule.name,
            )  # fmt: skip
        schedule.settings = None
        self.schedulers[shared].add(schedule, self.clock.time())

    def occurrence(self, schedule: Periodic, fire_time: int, by_hand: bool = False) -> JobRow:
        handler, settings = schedule.handler, schedule.settings
        if settings is None:
            shared = self.is_shared(schedule)
            own = {"durable": shared, "key": None, "run_at": None}
            schedule.settings = settings = Settings(**{**self.settings(handler).as_given(), **own})
        row = self.make_row(handler, handler.name, settings, NO_ARGUMENTS, {})
        row.context, row.schedule, row.fire_time, row.rule = None, handler.name, fire_time, schedule.text
        if settings.delay or row.durable:
            row.run_at = later(fire_time, settings.delay)
        if by_hand:
            row.by_hand, schedule.begun = True, row.created
        elif schedule.overlap != "skip" or schedule.misfire == "all":
            row.overlap = "wait" if schedule.waits_its_turn(fire_time) else schedule.overlap
            if schedule.overlap == "queue":  # which is what a key does: at most one pending behind the one that runs
                row.key, row.on_conflict = f"schedule {schedule.name}", "queue"
        return row

    def _fire_at_once(self, schedule: Periodic, now: int, here: bool) -> Awaitable[None] | None:
        """The next run of a schedule, if nothing keeps it from starting at once; see `start_simple`."""
        handler, settings = schedule.handler, schedule.settings
        if settings is None or not settings.simple or schedule.overlap == "queue":
            return None
        if not self.crew.may_start(self.memory, settings.queue, handler, now):
            return None
        row = SimpleRow(handler, settings, (), now, None)
        row.schedule, row.fire_time, row.rule = handler.name, schedule.next, schedule.text
        if not self.memory_store.fire(row, schedule.next):
            return None
        return self.crew.start_simple(self.memory, row, handler, settings, here)

    def _watch_run(self, schedule: str, then: Callable[[object], None]) -> bool:
        run = next((job for job in self.crew.running.values() if job.schedule == schedule), None)
        if run is None:
            return False
        waiter = self.loop.create_future()
        waiter.add_done_callback(then)
        run.waiters = [*(run.waiters or ()), waiter]
        if run.durable:
            self.crew.live[run.id] = run  # else nobody is told of its end
        return True

    def quiesce(self) -> None:
        """No claim of a durable job and no firing from this loop turn on."""
        for scheduler in self.schedulers.values():
            scheduler.firing = False
        self.memory_store.firing = False
        if self.durable is not None:
            self.durable.claiming = False

    async def drain(self) -> None:
        given_up = asyncio.Event()
        draining = asyncio.Task(self._drain(given_up), loop=self.loop, context=contextvars.Context())
        try:
            await asyncio.shield(draining)  # else what it is claiming just now would be claimed by nobody
        finally:
            given_up.set()
            self.crew.idle.set()

    async def _drain(self, given_up: asyncio.Event) -> None:
        while self.phase == "running" and not given_up.is_set():
            busy = bool(self.crew.running or self.spawned)
            if not busy and not await self._start_due():
                return
            self.crew.idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL if busy or self.crew.claims_under_way else 0.001):
                    await self.crew.idle.wait()

    async def _start_due(self) -> bool:
        """Start what is due here. False if that is nothing, so that all is quiet."""
        now, before, more = self.clock.time(), self.crew.activity, False
        try:
            for tier in (self.memory, *([self.durable] if self.durable else ())):
                more |= await self._claim(tier, now) <= 0
            self.crew.looks_at = FOREVER  # of this the claim loop, which may sleep for longer, has not been told
        except StoreBusy:
            return True
        firing = any(scheduler.is_busy(now) for scheduler in self.schedulers.values())
        return more or firing or before != self.crew.activity or self.crew.claims_under_way or bool(self.crew.running)

    async def stop(self, grace: float) -> None:
        """The one way down. A second call joins the first and can only shorten its grace."""
        self._grace_ends = min(self._grace_ends, self.clock.monotonic() + grace)
        self.crew.idle.set()
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
            return
        self.phase = "stopping"
        self.quiesce()
        self._stopping = self.loop.create_task(self._shut_down(), name="tinyq stop", context=contextvars.Context())
        with on_signals(self._hurry, chain=True):
            try:
                await asyncio.shield(self._stopping)
            except asyncio.CancelledError:
                self._hurry()
                await asyncio.wait({self._stopping})
                raise

    def _hurry(self) -> None:
        if self._grace_ends > 0:
            log.warning("told again to stop: the grace is over")
        self._grace_ends = 0.0
        self.crew.idle.set()

    async def _shut_down(self) -> None:
        for wake in (*self._wakes, *self._room):
            wake.set()
        self.memory.terms = {name: Terms(**cast(Any, vars(terms) | {"window": 0})) for name, terms in self.terms.items()}
        await self._wait_for_jobs()
        self.memory.claiming = False
        stuck = await self._cancel_jobs()
        self.crew.closing.set()
        if self.durable_store is not None:
            self.durable_store.hurry(EXTRA)
        await self._leftovers()
        self.phase = "stopped"
        for wake in (self.stopped, *self._wakes):
            wake.set()
        await asyncio.wait(self._loops, timeout=EXTRA)
        for loop in self._loops:
            loop.cancel()
        await self._write_the_last()
        for row in self._awaited:
            for waiter in row.waiters or ():
                set_done(waiter)
        self.crew.stop_watching()
        self.crew.tell_missed()
        if self.pulse is not None:
            await self.pulse.stop()
        if self.durable_store is not None:
            await self.durable_store.close()
        await self.crew.threads.close()
        log.info("tinyq stopped%s", f"; still running: {', '.join(stuck)}" if stuck else "")

    async def _write_the_last(self) -> None:
        """The outcomes that the store has not taken so far: once more, and then they are given up."""
        if self.durable is not None:
            for _ in range(2 * self.crew.unsettled):  # one that the store will never take must not cost the others theirs
                with contextlib.suppress(StoreError):
                    if await self.crew.settle(self.durable, self.clock.time()) > 0:
                        break
            self.crew.unwritten()

    async def _wait_for_jobs(self) -> None:
        """Until the running and the due best-effort jobs have ended, or the grace has."""
        began = self.clock.monotonic()
        told = began - PROGRESS
        while self.crew.running or self.spawned or (self.clock.monotonic() < self._grace_ends and await self._claim_memory()):
            moment = self.clock.monotonic()
            if moment >= self._grace_ends:
                return
            if moment - told >= PROGRESS:
                told = moment
                log.info(
                    "stopping: waiting for %s, and %d pending, for at most %.1f s",
                    self._names(), self.memory_store.pending, self._grace_ends - moment,
                )  # fmt: skip
            self.crew.idle.clear()
            await self.clock.wait(self.crew.idle, min(PROGRESS, self._grace_ends - moment))

    async def _claim_memory(self) -> bool:
        await self._claim(self.memory, self.clock.time())
        return bool(self.crew.running)

    def _names(self) -> str:
        running = Counter([job.task for job in self.crew.running.values()] + list(self.spawned.values()))
        return ", ".join(f"{name} ×{n}" for name, n in running.most_common(10)) or "nothing"

    async def _cancel_jobs(self) -> list[str]:
        """Cancel what still runs, give `finally` blocks a bounded time, name and abandon what does not end."""
        told: set[Running] = set()
        ends = self.clock.monotonic() + EXTRA
        while (self.crew.running or self.spawned or self.crew.claims_under_way) and (moment := self.clock.monotonic()) < ends:
            for job in set(self.crew.running.values()) - told:
                told.add(job)
                job.stop("shutdown")
            for task in list(self.spawned):  # a `finally` may spawn another
                if task.cancelling() == 0:
                    task.cancel()
            self.crew.idle.clear()
            await self.clock.wait(self.crew.idle, min(0.1, ends - moment))
        stuck = [label(job) for job in self.crew.running.values() if job.runner] + [
            f"spawned task {name}" for name in self.spawned.values()
        ]
        for name in stuck:
            log.error(
                "%s does not end though it was cancelled: it is abandoned%s", name, "" if "spawned" in name else " with its lease"
            )
        for job in list(self.crew.running.values()):
            job.stop("abandoned")
        return stuck

    async def _leftovers(self) -> None:
        """Promote the best-effort jobs that were not started; report by name those that are lost."""
        while self._moving:
            await asyncio.wait(set(self._moving.values()))
            await asyncio.sleep(0)  # until their callbacks have run
        pending = await self.memory_store.list(State.PENDING, limit=sys.maxsize)
        wanted = [row for row in pending if self._may_promote(row)]
        if wanted:
            try:
                await self.promote(wanted)
            except Exception as error:
                log.error("%d best-effort jobs cannot be promoted: %s", len(wanted), error_text(error))
        lost = [row for row in pending if row.state is State.PENDING and not row.durable and row.recurrence is None]
        if lost:
            names = Counter(row.task for row in lost)
            told = ", ".join(f"{name} ×{n}" for name, n in sorted(names.items())[:100])
            log.error("best-effort jobs lost at shutdown: %s%s", told, f" and {len(names) - 100} more tasks" * (len(names) > 100))
            now = self.clock.time()
            await self.memory_store.cancel([row.id for row in lost], "lost at shutdown", now, now)
            for row in lost:
                self.crew.tell(row, self.clock.time())

    def _may_promote(self, row: JobRow) -> bool:
        handler = row.handler
        if self.durable is None or handler is None or not handler.registered or row.schedule is not None or row.recurrence:
            return False
        wish = self.config.promote if handler.promote is None else handler.promote
        return wish == "interrupted" or (bool(wish) and row.interruptions == 0)


def several_workers() -> bool:
    """Whether this process seems to be one of several that serve the same application."""
    if os.environ.get("WEB_CONCURRENCY", "1") not in ("", "1") or "gunicorn" in os.environ.get("SERVER_SOFTWARE", ""):
        return True
    if {"--reload", "dev"} & set(sys.argv):  # uvicorn's and fastapi's reloader start one process of their own
        return False
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


# ── 32. Engine: under test ────────────────────────────────────────────────────────────────────────────────────────────
# The engine without loops, threads and files that the test kit steps by hand. It runs one job after the other, each to its end,
# in the event loop of whoever asks; all else is what production does, with two stores in memory.

MOST_RUNS: Final = 10_000  # of jobs that came up during one drain, or at one moment: more are taken for an endless circle
SPAWN_TIME: Final = 30.0  # seconds, of real time, that a drain waits for spawned tasks
UNCALLED: Final = {
    "expired",
    "missed",
    "parked",
    "undecodable",
    "unstarted",
    "lost",
}  # outcomes of jobs whose handlers were not called


class AnyLoop:
    """Stands for the event loop that runs in the calling thread at the moment."""

    def is_closed(self) -> bool:
        return False

    def get_task_factory(self) -> Any:
        return asyncio.Task  # there may be one: so `create_task` is what makes tasks

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coro, **options)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()


class KitClock:
    """Stands still until it is moved."""

    def __init__(self, now: int) -> None:
        self.began = self.now = now

    def time(self) -> int:
        return self.now

    def monotonic(self) -> float:
        return (self.now - self.began) / 1e6

    async def wait(self, wake: asyncio.Event, seconds: float) -> None:
        await wake.wait()  # no time passes meanwhile


class InlineThreads(Threads):
    """No threads, and no processes: a function is called where it stands."""

    inline = True
    inside: Final[set[int]] = set()  # threads in which one is being called, as if no event loop ran there

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Ended]:
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.inside.add(threading.get_ident())
        try:
            future.set_result((call(), None))
        except BaseException as error:
            future.set_result((None, error))
        finally:
            self.inside.discard(threading.get_ident())
        return future


def at_once(coro: Coroutine[Any, Any, T]) -> T:
    """The answer of a coroutine that never suspends, as a store in memory does not, nor an `enqueue` under test."""
    try:
        coro.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    coro.close()
    raise RuntimeError(f"{coro!r} was to answer at once, and waits")


async def moved_on(tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Wait until one of these tasks has ended, in whatever loop it runs, or for a moment; False if there is none to wait for."""
    here, own, others = asyncio.get_running_loop(), list[asyncio.Future[Any]](), list[asyncio.Future[Any]]()
    for task in tasks:
        loop = task.get_loop()
        if loop is here and task is not asyncio.current_task() and not task.done():
            own.append(task)
        elif loop is not here and loop.is_running():
            others.append(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.wait({task}), loop)))
    if own or others:
        await asyncio.wait([*own, *others], timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # until their callbacks have run
    for other in others:
        other.cancel()
    return bool(own or others)


class KitStore(MemoryStore):
    """One of two stores in memory that number their jobs together. Any thread may call it."""

    def __init__(self, twin: KitStore | None = None) -> None:
        super().__init__()
        self.durable = twin is not None
        self.lock: contextlib.AbstractContextManager[Any] = twin.lock if twin else threading.RLock()
        self.born: dict[bytes, JobRow] = twin.born if twin else {}  # all jobs that were ever inserted
        self._seq = twin._seq if twin else self._seq
        for name, verb in inspect.getmembers(MemoryStore, inspect.isfunction):
            if not name.startswith("_"):
                setattr(self, name, self._alone(getattr(self, name), inspect.iscoroutinefunction(verb)))

    def _alone(self, verb: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        async def call(*args: Any, **named: Any) -> Any:
            with self.lock:
                return await verb(*args, **named)  # which does not suspend

        def call_plain(*args: Any) -> Any:
            with self.lock:
                return verb(*args)

        return call if is_async else call_plain

    async def insert(self, rows: Sequence[JobRow], now: int) -> Sequence[Inserted]:
        answers = await super().insert(rows, now)
        for answer in answers:
            if answer.verdict == "created":
                self.born.setdefault(answer.row.id, answer.row)  # one that is promoted is there already
        return answers

    async def claim(self, room: Room, worker: str, lease: int, now: int) -> Claimed:
        return (await super().claim(room, worker, lease, now))._replace(paused=self.held)

    async def counts(self, now: int) -> Sequence[Count]:
        return [count.but(durable=self.durable) for count in await super().counts(now)]

    async def foremost(self, tasks: Mapping[str, bool], now: int) -> Entry | None:
        """What a claim would take now."""
        await self.claim(Room(0, {}, 0, 0, {}), "", now, now)  # which moves what has come due
        heads = []
        for lane, heap in self._lanes.items():
            while heap and self._stale(heap[0]):
                heapq.heappop(heap)
            if heap and lane[0] not in self.held and lane[1] in tasks:
                heads.append(heap[0])
        return min(heads, default=None)

    def waiting_until(self, *, again: bool) -> list[int]:
        """The moments at which jobs come due. `again`: those that have been started before, and could start."""
        rows = [entry[4] for entry in self._later if not self._stale(entry)]
        return [row.run_at for row in rows if not again or (self._goes_on(row) and row.queue not in self.held)]

    @staticmethod
    def _goes_on(row: JobRow) -> bool:
        return row.attempts + row.snoozes > 0 if row.recurrence is not None else row.claim_no > 0


class OneByOne(Slots):
    """Room for one more, however many there are: a job may wait for another that it has enqueued."""

    def room(self, tier: Tier) -> Room:
        return Room(1, {}, 1, 1, tier.tasks, terms={name: self._free(terms) for name, terms in tier.terms.items()})

    @staticmethod
    def _free(terms: Terms) -> Terms:
        """With calls that wait for no more items than there are; limits are of no account where nothing runs beside anything."""
        return Terms(names=terms.names, size=terms.size, value_of=terms.value_of)

    def full(self) -> bool:
        return False


class KitCrew(Crew):
    """Writes each outcome at once, and watches no event loop."""

    calls = 0

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.threads = InlineThreads()
        self.died: list[JobRow] = []

    def _over(self, job: Running, outcome: Outcome) -> None:
        self.calls += outcome.kind not in UNCALLED and (job.call is None or job is job.call.items[0])
        super()._over(job, outcome)
        if job.tier.durable:
            now = self._clock.time()
            at_once(self.settle(job.tier, now))
            if job.state is State.PENDING and job.recurrence is None:
                job.ready = claimable(job.run_at, job.lost, now)  # what was written and what stands in the store are one row

    def _all_done(self, call: BatchCall, items: Sequence[Running]) -> Sequence[Running]:
        return items

    def _tell_dead(self, row: JobRow) -> None:
        super()._tell_dead(row)
        self.died.append(row)

    def _watch_loop(self, due: float = 0.0, *, first: bool = False) -> None:
        """Nobody is there to be warned."""


class KitEngine(Engine):
    """A TinyQ under test."""

    def __init__(self, config: Config, handlers: Mapping[str, Handler], now: int) -> None:
        self.still = KitClock(now)
        super().__init__(self._unopened(config), handlers, cast(asyncio.AbstractEventLoop, AnyLoop()))
        self.loose = self.memory_store = KitStore()
        self.table = KitStore(self.loose)
        loose, table = (self.loose, self.memory_tasks), (self.table, self.durable_tasks)
        self.memory, self.durable = (
            Tier(store=store, durable=store.durable, tasks=tasks, wake=Sharp(), terms=self.terms)
            for store, tasks in (loose, table)
        )
        self.hands = self.crew = KitCrew(
            self.still, self.loose, OneByOne(1, {}, 1), self.settings_of, self.worker, config.lease, self.loop
        )
        self.crew.handlers = handlers
        self.crew.tiers += (self.memory, self.durable)
        for tier in (self.memory, self.durable):
            self.schedulers[tier.durable] = Scheduler(tier, self.still, self.occurrence)
        self.schedules: list[Periodic] = []  # copies: what they do here leaves no trace
        self.runs, self.last = 0, ""
        self._hook_slots = asyncio.Semaphore(sys.maxsize)  # nobody waits for one, which would bind it to one event loop

    def _unopened(self, config: Config) -> Config:
        """It stands for all processes, so it serves all durable jobs."""
        return config.but(db=None, worker=True, clock=self.still)

    def configure(self, config: Config) -> None:
        """Take other options for what comes."""
        self.config = self._unopened(config)
        self._resolved.clear()
        for handler in self.handlers.values():
            handler.settings = None
            self.learn(handler)

    def close(self) -> None:
        self.phase = "stopped"
        for handler in self.handlers.values():
            handler.settings = None

    # what differs because nothing goes on by itself

    def require_running(self) -> None:
        if self.phase != "running":
            raise ShuttingDown("the block of testing() is over: nothing is enqueued or run any more")

    def require_loop(self) -> None:
        """Any will do."""

    def in_loop(self, call: Callable[[T], object], given: T) -> None:
        call(given)

    def start_at_once(self, row: SimpleRow, handler: Handler, settings: Settings) -> bool:
        row.wait()
        return False

    def add(self, row: JobRow) -> Awaitable[Any]:
        return self.insert([row])

    async def insert_within(self, tx: Any, rows: Sequence[JobRow]) -> Sequence[Inserted]:
        return await self.insert(rows)

    async def _admit(self, count: int) -> None:
        if self.loose.pending + count > self.config.max_pending:
            raise QueueFull(
                f"{self.loose.pending:,} best-effort jobs are pending and max_pending is {self.config.max_pending:,}: "
                "enqueue fewer, raise it, or call drain() in between"
            )

    async def exists(self, row: JobRow) -> bool:
        return bool(await (self.table if row.durable else self.memory_store).get([row.id]))

    async def wait_for_end(self, row: JobRow) -> None:
        while row.finished is None:
            job = self.crew.running.get(row.tag)
            if job is not None:
                if job.runner is None or not await moved_on([job.runner]):
                    await asyncio.sleep(0.001)  # it waits for itself, until its timeout; or another thread is about to settle it
            elif self.phase == "stopped" or not await self.run_one():
                raise NoResult(
                    f"job {id_text(row.id)} is {row.state} until {as_datetime(row.run_at)}, and nothing else is due: "
                    "under testing() time passes in drain() and advance() only"
                )

    def add_schedule(self, schedule: Periodic) -> None:
        own = schedule.afresh()
        self.schedules.append(own)
        super().add_schedule(own)

    def own(self, schedules: list[Periodic]) -> list[Periodic]:
        return self.schedules

    def quiesce(self) -> None:
        """Nothing to hold back."""

    async def drain(self) -> None:
        await self.run_due()

    def health(self) -> Health:
        return Health(status="ok", reasons=())

    # what runs the jobs and moves the time

    async def run_one(self) -> bool:
        """Run the first of the jobs that are due, to its end. False if there is none."""
        now, started = self.still.now, list[Running]()
        with self.loose.lock:
            heads = [
                (head, tier)
                for tier, store in ((self.memory, self.loose), (cast(Tier, self.durable), self.table))
                if (head := at_once(store.foremost(tier.tasks, now))) is not None
            ]
            if not heads:
                return False
            before = set(self.crew.running)
            await self.crew.claim(min(heads, key=lambda found: found[0][:3])[1], now)
            started += [job for tag, job in list(self.crew.running.items()) if tag not in before]
            self.runs += 1
        for job in started:
            self.last = job.task
            await self._finish(job)
        return True

    async def _finish(self, job: Running) -> None:
        runner, limit = job.runner, (job.call or job).settings.timeout
        if runner is None:
            return
        try:
            await asyncio.wait({runner}, timeout=None if limit == math.inf else limit)
            if not runner.done():
                job.stop("timeout")
                await asyncio.wait({runner})
        finally:
            if not runner.done():  # whoever waits was cancelled
                job.stop("shutdown")
                await asyncio.wait({runner})

    async def run_due(self) -> None:
        """Run what is due at this moment, what comes up with that, and what was spawned."""
        self.require_running()
        most, ran = self.runs + MOST_RUNS + self._pending(), time.monotonic()
        while True:
            if await self.run_one():
                self._bound(most)
                ran = time.monotonic()
            elif not await moved_on(list(self.spawned)):
                return
            elif time.monotonic() - ran > SPAWN_TIME:
                raise RuntimeError(
                    f"spawned tasks have not ended for {SPAWN_TIME:g} s: {', '.join(sorted(set(self.spawned.values())))}; "
                    "end them in the test, or start what never ends with asyncio.create_task"
                )

    def _pending(self) -> int:
        return self.loose.pending + self.table.pending

    def _bound(self, most: int) -> None:
        if self.runs > most:
            raise RuntimeError(
                f"more than {MOST_RUNS:,} jobs have run that came up meanwhile: does one enqueue itself, or snooze, without end? "
                f"The last was {self.last}"
            )

    async def follow(self) -> None:
        """Run what is due, and what waits for another start; schedules do not fire meanwhile."""
        most = self.runs + MOST_RUNS + self._pending()
        await self.run_due()
        while moments := [*self.loose.waiting_until(again=True), *self.table.waiting_until(again=True)]:
            await self._pass_until(min(moments))
            self._bound(most)

    async def advance(self, seconds: float) -> None:
        await self._pass_until(later(self.still.now, seconds), fire=True)

    async def _pass_until(self, end: int, *, fire: bool = False) -> None:
        """Stop at every moment at which something comes due, and run it."""
        while True:
            for scheduler in self.schedulers.values() if fire else ():
                await scheduler.step(self.still.now)
            await self.run_due()
            moments = [*self.loose.waiting_until(again=False), *self.table.waiting_until(again=False)]
            moments += [schedule.next for schedule in self.schedules if not schedule.ended] if fire else ()
            upcoming = min((moment for moment in moments if self.still.now < moment <= end), default=None)
            self.still.now = max(self.still.now, end if upcoming is None else upcoming)
            for scheduler in () if fire else self.schedulers.values():
                scheduler.pass_over(self.still.now)
            if upcoming is None:
                break
        for tier in (self.memory, cast(Tier, self.durable)):
            await self.crew.retention(tier, self.still.now)


# ── 33. Job handle ────────────────────────────────────────────────────────────────────────────────────────────────────
# What `enqueue` and `get` answer. Never None: a handle, or an error.


class Job(Generic[R_co]):
    """One job, as seen from outside.

    `created` is False if `key` led to a job that was there already.
    """

    def __init__(self, engine: Engine, row: JobRow, created: bool) -> None:
        self._engine = engine
        self._row = row
        self.created = created

    def __repr__(self) -> str:
        return f"<Job {self.task} {self.id} {self.status}>"

    @property
    def id(self) -> str:
        """A UUID (version 7), as text."""
        return id_text(self._row.id)

    @property
    def task(self) -> str:
        return self._row.task

    @property
    def queue(self) -> str:
        return self._row.queue

    @property
    def durable(self) -> bool:
        """Whether the job is in the database."""
        return self._row.durable

    @property
    def status(self) -> State:
        """Live for a job of this process; else as it was when last read: `await get(id)` reads again."""
        return self._row.state

    @property
    def attempts(self) -> int:
        """Starts so far."""
        return self._row.attempts

    @property
    def error(self) -> str | None:
        """The last error, as `Type: message`."""
        return self._row.error

    @property
    def traceback(self) -> str | None:
        """Where the last error came from, as Python prints it; at most its last 4,000 characters."""
        return self._row.traceback

    @property
    def reason(self) -> str | None:
        """Why it is in this state, where that needs saying."""
        return self._row.reason

    @property
    def progress(self) -> tuple[float, str | None] | None:
        """What its handler has told of this attempt (from 0 to 1, and a message), None if nothing; see `CurrentJob.progress`.

        Like `status`, it is live for a job that runs in this process. It stays as long as a finished job is kept; a job that is
        to run again has none. A dead job that `dead` lists may come without.
        """
        return as_progress(self._row.progress)

    @property
    def run_at(self) -> datetime:
        """When it was, or is, to start."""
        return cast(datetime, as_datetime(self._row.run_at))

    async def result(self, timeout: float | timedelta | None = None) -> R_co:
        """Wait for the end and return what the handler returned.

        Giving up (TimeoutError after `timeout` seconds, or a cancelled wait) leaves the job alone. Raises JobFailed,
        JobCancelled, or at once NoResult if there will be nothing to return: a durable job's result is known outside of the
        process that ran it only with `result_ttl`.
        """
        row = self._row
        try:
            async with asyncio.timeout(None if timeout is None else duration(timeout, "timeout")):
                await self._engine.wait_for_end(row)
        except TimeoutError:
            raise TimeoutError(f"job {self.id} is still {row.state}, {timeout!r} s later; it goes on") from None
        if row.state is State.DEAD:
            kind, _, message = (row.error or row.reason or "unknown").partition(": ")
            raise JobFailed(kind, message) from row.exception
        if row.state is State.CANCELLED:
            raise JobCancelled(row.reason or "cancelled")
        if row.value is not ...:
            return cast(R_co, row.value)
        if row.result is None:
            why = row.reason or "set result_ttl to read it from anywhere"
            raise NoResult(f"job {self.id} is done and its result was not kept: {why}")
        handler = row.handler or self._engine.handlers.get(row.task)
        try:
            return cast(R_co, read_back(handler.result_codec if handler else ANYTHING, decode_json(row.result), "the result"))
        except (ValueError, RecursionError) as error:  # a Misfit, or what a hand has written
            raise NoResult(f"job {self.id} is done, and its result cannot be read here: {error}") from None

    async def exists(self) -> bool:
        """Whether the job is stored, now that all earlier writes are done. False, too, once it has ended and was not kept."""
        return await self._engine.exists(self._row)

    async def cancel(self) -> bool:
        """Take a pending job out, or cancel a running handler and wait until it has stopped. True if it is cancelled now."""
        return await self._engine.cancel(self._row)

    async def promote(self) -> bool:
        """Make a pending best-effort job durable, with what is left of its delay and attempts. False if it has started or ended,
        or waits for a running job with the same key.

        Raises TypeError for a callable that is not a registered task or arguments that JSON cannot carry.
        """
        row = self._row
        await self._engine.promotion_of(row)
        if row.durable or row.state is not State.PENDING:
            return row.durable
        if row.schedule is not None:
            raise TypeError(f"{row.task!r} was made by a schedule, and those are not promoted: the next fire time makes another")
        if row.handler is None or not row.handler.registered:
            raise TypeError(
                f"{row.task!r} is not a registered task, and only those can be found again: decorate it with @tinyq.task"
            )
        if row.args is not None:
            encode_call(row.handler, row.task, (row.args, row.kwargs), self._engine.config.max_payload)
        self._engine.require_running()
        return bool(await self._engine.promote([row]))


class Receipt(Job[R_co]):
    """The handle of a job that was enqueued without an engine. What needs one takes that of its TinyQ, once there is one."""

    def __init__(self, q: TinyQ, row: JobRow, created: bool) -> None:
        super().__init__(cast(Engine, None), row, created)
        self._q = q

    async def _attach(self) -> None:
        """Find the job as the engine that runs now knows it."""
        engine = self._q._engine
        if engine is None or engine.phase == "stopped" or engine.loop is not asyncio.get_running_loop():
            raise NotStarted(
                f"job {self.id} was enqueued where no tinyq runs: start this TinyQ in an event loop, where `await q.get(id)` "
                "finds it by its id"
            )
        if engine is not self._engine:
            self._engine = engine
            found = await engine.get(self._row.id)
            if found is None:
                engine._within.add(self._row)
            self._row = found or self._row

    async def result(self, timeout: float | timedelta | None = None) -> R_co:
        await self._attach()
        return await super().result(timeout)

    async def exists(self) -> bool:
        await self._attach()
        return await super().exists()

    async def cancel(self) -> bool:
        await self._attach()
        return await super().cancel()

    async def promote(self) -> bool:
        await self._attach()
        return await super().promote()


class Schedule:
    """A schedule, as `schedules()` gives it: its rule, what it has done, and what can be done with it."""

    def __init__(self, engine: Engine, rule: Rule, name: str, key: str | None) -> None:
        self._engine = engine
        self.rule = rule
        self.name = name
        self.key = key

    def __repr__(self) -> str:
        return f"<Schedule {self.name}{f' {self.key!r}' if self.key else ''}: {self.rule!r}>"

    @property
    def stats(self) -> ScheduleStats:
        """What it has done: a decorated function in this process, as of now; a recurring job anywhere, as of when it was read."""
        raise NotImplementedError

    def next_fires(self, n: int = 5) -> list[datetime]:
        """The next n fire times by the rule, paused or not, aware, in UTC; fewer if there are no more before the year 10,000.
        Looks at nothing and changes nothing."""
        fires, moment = [], max(self._since(), self._engine.clock.time())
        for _ in range(whole(n, "n", 0)):
            moment = self.rule.next_at(moment)
            if moment >= FOREVER:
                break
            fires.append(cast(datetime, as_datetime(moment)))
        return fires

    def _since(self) -> int:
        """The moment up to which its fire times are dealt with, if that may be in the future."""
        return 0

    async def pause(self) -> None:
        """Fire no more, until `resume`: with a database in no process, whatever restarts. Jobs that wait or run go on. Raises
        JobNotFound if it has been removed."""
        await self._suspend(True)

    async def resume(self) -> None:
        """Fire again, from the next fire time on: those that passed meanwhile are not made up for."""
        await self._suspend(False)

    async def _suspend(self, paused: bool) -> None:
        raise NotImplementedError

    async def run_now(self) -> Job[Any]:
        """Make a job of it at once, beside its fire times: whether or not the last run is over, and also while it is paused."""
        self._engine.require_running()
        [answer] = await self._engine.insert([await self._occurrence()])
        return Job(self._engine, answer.row, answer.verdict == "created")

    async def _occurrence(self) -> JobRow:
        raise NotImplementedError

    async def remove(self) -> None:
        """Fire no more. A decorated function fires no more in this process, and its record is forgotten: where it is still
        defined, other processes go on with it, and so does this one once it is run anew. A recurring job is gone for all."""
        raise NotImplementedError


class FunctionSchedule(Schedule):
    """That of a function decorated with `every` or `cron`."""

    def __init__(self, engine: Engine, periodic: Periodic, drop: Callable[[Periodic], None]) -> None:
        super().__init__(engine, periodic.rule, periodic.name, None)
        self._periodic = periodic
        self._drop = drop

    @property
    def stats(self) -> ScheduleStats:
        return self._periodic.stats()

    def _since(self) -> int:
        return self._periodic.since

    async def _suspend(self, paused: bool) -> None:
        engine, periodic = self._engine, self._periodic
        engine.require_running()
        if periodic.removed:
            raise JobNotFound(f"schedule {periodic.name} has been removed")
        await engine.tier_of(periodic).store.suspend(periodic.name, paused, engine.clock.time())
        periodic.paused = paused

    async def _occurrence(self) -> JobRow:
        return self._engine.occurrence(self._periodic, self._engine.clock.time(), by_hand=True)

    async def remove(self) -> None:
        self._engine.require_running()
        self._periodic.ended = self._periodic.removed = True
        with contextlib.suppress(ValueError):  # it is gone already
            self._drop(self._periodic)
        await self._engine.tier_of(self._periodic).store.undefine(self.name)


class RecurringJob(Schedule):
    """That of a job made by `schedule`. `created` is False if there was one with this key."""

    def __init__(self, engine: Engine, row: JobRow, created: bool = False) -> None:
        rule = rule_from(recurrence_of(cast(str, row.recurrence)).rule)
        super().__init__(engine, rule, row.task, (row.key or "").removeprefix(RECURS))
        self.created = created
        self._read(row)

    def _read(self, row: JobRow) -> None:
        self._row, recurrence, tally = row, recurrence_of(cast(str, row.recurrence)), Tally.of(row.tally)
        self.rule = rule_from(recurrence.rule)
        fire_time = row.fire_time or 0
        begun = row.state is State.RUNNING or row.attempts + row.snoozes + row.interruptions > 0
        self._over = fire_time if begun else fire_time - 1
        upcoming = self.rule.next_at(max(fire_time, self._engine.clock.time())) if begun else row.fire_time
        self._stats = ScheduleStats(
            name=row.task, fired=tally.fired, skipped=tally.skipped, missed=tally.missed,
            last=as_datetime(tally.last or None), next=None if recurrence.paused else as_datetime(upcoming),
            superseded=tally.superseded, paused=recurrence.paused, failed=tally.failed,
        )  # fmt: skip

    @property
    def stats(self) -> ScheduleStats:
        return self._stats

    def _since(self) -> int:
        return self._over

    @property
    def error(self) -> str | None:
        """Of its last run, if that failed."""
        return self._row.error

    @property
    def _store(self) -> Store:
        self._engine.require_running()
        return self._engine.require_durable().store if self._row.durable else self._engine.memory_store

    async def _suspend(self, paused: bool) -> None:
        if not await self._store.hold(self._row.id, paused, self._engine.clock.time()):
            raise self._gone()
        for tier in self._engine.crew.tiers:
            tier.wake.set()
        for row in await self._store.get([self._row.id]):
            if row.recurrence:
                self._read(row)

    async def _occurrence(self) -> JobRow:
        found, now = await self._store.get([self._row.id]), self._engine.clock.time()
        if not found:
            raise self._gone()
        nothing = ("key", "recurrence", "tally", "ready", "lease", "worker", "started", "waiters", "runner", "ran")
        fresh = {**FRESH, **dict.fromkeys(nothing), "id": new_id(now), "seq": 0, "claim_no": 0, "schedule": self._row.key}
        told = {} if found[0].durable else self._engine.memory_store.told(found[0])
        return found[0].but(**told | fresh, by_hand=True, created=now, run_at=now, fire_time=now)

    def _gone(self) -> JobNotFound:
        return JobNotFound(f"there is no recurring job {self.name} with key {self.key!r} any more")

    async def remove(self) -> None:
        await self._store.unschedule(self.name, cast(str, self._row.key), self._engine.clock.time())


# ── 34. Tasks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# What a decorated function becomes: callable as before, and able to enqueue itself with its own typed signature.


class Task(Generic[P, C_co, R_co]):
    """A registered function. P: its arguments; C: what a direct call returns (a coroutine for async def); R: its result."""

    def __init__(self, q: TinyQ, handler: Handler) -> None:
        functools.update_wrapper(self, handler.fn, updated=())
        self._q = q
        self._handler = handler

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    @property
    def name(self) -> str:
        """How jobs refer to it: `module.qualname`, unless it was given."""
        return self._handler.name

    @property
    def fn(self) -> Callable[P, C_co]:
        """The function itself."""
        return self._handler.fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C_co:
        return cast(C_co, self._handler.fn(*args, **kwargs))

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]:
        """Enqueue a call with the task's own options; all arguments go to the handler. Raises as `TinyQ.enqueue`."""
        begun = self._q._begin(self._handler, self._handler.name, args, kwargs, {})
        return begun if isinstance(begun, Job) else await self._q._insert(begun, None)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]:
        """The same from a thread in which no event loop runs; see `TinyQ.enqueue_sync`."""
        call: Call[P, R_co] = Call(self._q, self._handler, {})
        return call.enqueue_sync(*args, **kwargs)

    def options(self, **options: Unpack[Options]) -> Call[P, R_co]:
        """The task with other options: `await send.options(delay=60).enqueue(…)`."""
        return Call(self._q, self._handler, check_options(options, f"{self.name}.options()"))


TaskOrName = Task[..., Any, Any] | str


def name_of(task: TaskOrName) -> str:
    if isinstance(task, Task):
        return task.name
    return text(task, "task")


class AsyncTask(Task[P, Coroutine[object, Never, R_co], R_co]):
    """The same over async def: frameworks ask whether `__call__` is a coroutine function."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return cast(R_co, await self._handler.fn(*args, **kwargs))


if TYPE_CHECKING:

    class BatchTask(Task[[T], C_co, Any]):
        """As type checkers see the task of a batch handler: enqueued with one item, and called with a list."""

        @property
        def fn(self) -> Callable[[list[T]], C_co]: ...  # type: ignore[override]
        def __call__(self, items: list[T], /, *args: Any, **kwargs: Any) -> C_co: ...  # type: ignore[override]


class Call(Generic[P, R_co]):
    """A task with options for the next call; see `Task.options`."""

    def __init__(self, q: TinyQ, handler: Handler, options: Mapping[str, Any]) -> None:
        self._q = q
        self._handler = handler
        self._options = options

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]:
        """Enqueue a call; all arguments go to the handler."""
        begun = self._q._begin(self._handler, self._handler.name, args, kwargs, self._options)
        return begun if isinstance(begun, Job) else await self._q._insert(begun, self._options.get("tx"))

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]:
        """The same from a thread in which no event loop runs; see `TinyQ.enqueue_sync`."""
        loop = None if "tx" in self._options else self._q._loop_elsewhere()
        if loop is not None:
            return from_thread(loop, functools.partial(self.enqueue, *args, **kwargs))
        return self._q._insert_here(self._handler, self._handler.name, args, kwargs, self._options)


class Decorator(Protocol):
    """What `task(…)` and `every(…)` return."""

    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, Coroutine[object, Never, R], R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Task[P, R, R]: ...


class BatchDecorator(Protocol):
    """What `batch(…)` returns."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[list[T], ...], Coroutine[Any, Any, R]], /
    ) -> BatchTask[T, Coroutine[object, Never, R]]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[list[T], ...], R], /) -> BatchTask[T, R]: ...


# ── 35. Test kit ──────────────────────────────────────────────────────────────────────────────────────────────────────
# What `with q.testing() as jobs:` gives: what was enqueued, and the hands that run it and move the clock.


class EnqueuedJob(Job[R_co]):
    """A job as a test sees it."""

    @property
    def args(self) -> tuple[Any, ...]:
        """As the handler is given them: those of a durable job have been through JSON."""
        return tuple(arguments_of(self._row)[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(arguments_of(self._row)[1])

    @property
    def priority(self) -> int:
        return self._row.priority

    @property
    def key(self) -> str | None:
        return self._row.key

    @property
    def fire_time(self) -> datetime | None:
        """The scheduled moment, if a schedule made this job."""
        return as_datetime(self._row.fire_time)


def arguments_of(row: JobRow) -> Arguments:
    if row.args is not None:
        return row.args, row.kwargs
    return read_call(row.handler, decode_call(row.payload, row.payload_version))


def death_of(row: JobRow) -> Exception:
    """The error that a dead job died of, with a note that says whose it is."""
    error = row.exception
    if not isinstance(error, Exception):
        kind, _, message = (row.error or row.reason or "unknown").partition(": ")
        error = JobFailed(kind, message)
        error.__cause__ = row.exception
    error.add_note(f"{label(row)} is dead: {row.reason}")
    return error


class Kit:
    """What `with q.testing() as jobs:` gives: nothing runs in that block but by `drain` and `advance`.

    Both run jobs one after the other, by priority, then time, then order of enqueuing, in the event loop of the calling code, or
    in one of their own; plain functions and those with `run_in` are called right there. They wait for what was spawned, and
    for the on_dead hooks. They return how often handlers were called, and raise the error of the first job that has died
    meanwhile, once all the others have run (`raise_errors=False`: look at `status` and `error`, or `await q.dead()`). In an event
    loop, as in an async test, write `await jobs.adrain()` and `await jobs.aadvance(…)`. RuntimeError: the wrong one of the two,
    more than 10,000 jobs that came up meanwhile, or spawned tasks that have not ended after 30 s.
    """

    def __init__(self, engine: KitEngine) -> None:
        self._engine = engine
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._lock = threading.Lock()

    @property
    def now(self) -> datetime:
        """What the clock says: it stands still but for `drain` and `advance`."""
        return cast(datetime, as_datetime(self._engine.still.now))

    @overload
    def enqueued(self, task: Task[..., Any, R], /) -> list[EnqueuedJob[R]]: ...
    @overload
    def enqueued(self, task: str | Callable[..., Any] | None = None, /) -> list[EnqueuedJob[Any]]: ...
    def enqueued(self, task: Any = None, /) -> list[EnqueuedJob[Any]]:
        """All jobs of this block in the order of enqueuing, whatever has become of them; of one task, function or task's name.

        Those that a handler or a schedule has enqueued are among them. Raises UnknownTask for a name that is none.
        """
        rows = list(self._engine.loose.born.values())
        if isinstance(task, (Task, str)):
            name, known = name_of(task), self._engine.handlers
            if name not in known and all(row.task != name for row in rows):
                raise UnknownTask(f"no task is named {name!r} here{hint(name, known)}, and no job of that name was enqueued")
            names = {name, known[name].name} if name in known else {name}  # it may be an alias
            rows = [row for row in rows if row.task in names]
        elif task is not None:
            rows = [row for row in rows if row.handler is not None and row.handler.fn == task]
        return [EnqueuedJob(self._engine, row, True) for row in rows]

    def clear(self) -> None:
        """Take out what is pending, and forget all that was enqueued so far."""
        engine = self._engine
        for store in (engine.loose, engine.table):
            pending = [row.id for row in at_once(store.list(State.PENDING, limit=sys.maxsize))]
            at_once(store.cancel(pending, "cleared by the test", engine.still.now, engine.still.now))
        engine.loose.born.clear()

    def drain(self, *, raise_errors: bool = True) -> int:
        """Run what is due, and what that enqueues. The clock moves on to the next start of a job that failed or snoozed, until
        none waits for one; a delayed job runs if it comes due on that way, and no schedule fires."""
        return self._run(self.adrain(raise_errors=raise_errors), "adrain()")

    async def adrain(self, *, raise_errors: bool = True) -> int:
        """`drain` in an event loop."""
        return await self._reported(self._engine.follow(), raise_errors)

    def advance(self, seconds: float | timedelta, *, raise_errors: bool = True) -> int:
        """Move the clock, and at every moment at which something comes due run it: delayed jobs, retries, fire times. What is due
        already runs first, an `immediate` schedule included."""
        return self._run(self.aadvance(seconds, raise_errors=raise_errors), "aadvance(…)")

    async def aadvance(self, seconds: float | timedelta, *, raise_errors: bool = True) -> int:
        """`advance` in an event loop."""
        return await self._reported(self._engine.advance(duration(seconds, "advance")), raise_errors)

    async def _reported(self, work: Awaitable[None], raise_errors: bool) -> int:
        crew = self._engine.hands
        calls, deaths = crew.calls, len(crew.died)
        await work
        for row in crew.died[deaths:] if raise_errors else ():
            raise death_of(row)
        return crew.calls - calls

    def _run(self, coro: Coroutine[Any, Any, T], instead: str) -> T:
        try:
            self._engine.require_running()
            if asyncio._get_running_loop() is not None:
                raise RuntimeError(f"this is called in an event loop, which it would block: write `await jobs.{instead}`")
            with self._lock:  # one loop, kept for the whole block, since what jobs use may be bound to it
                return self._runner.run(coro)
        finally:
            coro.close()

    def close(self) -> None:
        self._engine.close()
        self._runner.close()


# ── 36. TinyQ ─────────────────────────────────────────────────────────────────────────────────────────────────────────
# The object behind everything: registration at any time, an engine between start and stop.


class TinyQ:
    """Background work of one application. All options: see `Configuration`; they are checked here, and nothing is opened.

    Use it as `async with TinyQ("jobs.db") as q:`, as `FastAPI(lifespan=q.lifespan)`, or with `start` and `stop`.
    """

    def __init__(self, db: str | os.PathLike[str] | None = None, **options: Unpack[Configuration]) -> None:
        self._given: dict[str, Any] = {**options} if db is None else {"db": db, **options}
        self._environment: Callable[[], dict[str, Any]] = role_from_environment
        configure_from(self._given)
        self._handlers: dict[str, Handler] = {}
        self._of_functions: dict[Any, Handler] = {}
        self._schedules: list[Periodic] = []
        self._dead_hooks: list[Handler] = []
        self._enqueue_hooks: list[EnqueueHook] = []
        self._middleware: list[Middleware] = []
        self._app: object = None  # while `lifespan` runs
        self._engine: Engine | None = None
        self._inherited: Engine | None = None  # in a forked child: that of the parent
        self._starting = False
        self._was_stopped = False
        self._was_tested = False
        self._has_written = False  # jobs into the file, without an engine
        self._strangers: set[str] = set()  # names of tasks of other processes
        self._reconfigurable = False  # the options given so far may be overridden
        self._quick: dict[Any, Handler] = {}  # what was handed to enqueue before, and what is known of bare callables
        self._plans: dict[Any, Sequence[Plan]] = {}  # the same with options

    # registration

    @overload
    def task(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, Coroutine[object, Never, R], R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        aliases: Sequence[str] | frozenset[str] = (),
        replace: bool = False,
        promote: Promote | None = None,
        run_in: RunIn | None = None,
        **options: Unpack[TaskOptions],
    ) -> Decorator: ...
    def task(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        aliases: Sequence[str] | frozenset[str] = (),
        replace: bool = False,
        promote: Promote | None = None,
        run_in: RunIn | None = None,
        **options: Any,
    ) -> Any:
        """Register a function (async or plain), method, partial or callable as a task. Works bare and with options.

        name: how stored jobs refer to it. Default `module.qualname`.
        aliases: names that it had before, in a list: jobs stored under those are its own.
        replace: take the place of a task with this name, instead of DuplicateTask.
        promote: at shutdown store its unstarted best-effort jobs (True), interrupted ones too ("interrupted"), or none (False).
        run_in: "process" gives each running job a new process of its own, for code that may crash, hang or use a processor for
            long. Its start counts towards the timeout and costs 0.1 s and more, as it imports the function's module; arguments,
            result and errors are pickled on their way. Past its timeout, cancelled, or at the end of the grace it is killed, with
            what it has started; a crash is a failed attempt with ProcessDied. Default: the event loop, or a thread for plain
            functions. Logging is not configured there.
        Raises TypeError for what is not callable, an unknown option, or a function that another process cannot import;
        ValueError for a bad value.
        """
        own, where = ("name", "aliases", "replace", "promote", "run_in", *LIMITS), f"task {name!r}" if name else "task()"
        limits = take_limits(options, where)
        checked = check_options(options, where, *own)
        flag(replace, "replace")
        refuse_tx(checked, "task()")
        registered = registration(name, aliases, promote, run_in, limits)

        def register(function: Callable[..., Any]) -> Task[..., Any, Any]:
            return self._register(function, checked, replace=replace, **registered)

        return cast(Any, register if fn is None else register(fn))

    def _register(
        self,
        fn: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        name: str | None,
        aliases: Sequence[str],
        promote: Promote | None,
        run_in: RunIn | None,
        limits: Mapping[str, Any],
        replace: bool = False,
    ) -> Task[..., Any, Any]:
        handler = make_handler(fn.fn if isinstance(fn, Task) else fn, name, options, promote)
        if "size" in limits:
            make_batch(handler)
        if run_in is not None:
            move_to_process(handler, run_in)
        replaced = self._handlers.get(handler.name)
        aliases = [*aliases, *(replaced.aliases if replaced and replaced.name == handler.name else ())]
        handler.aliases = tuple(dict.fromkeys(alias for alias in aliases if alias != handler.name))
        if limits:
            set_terms(handler, limits)
        for taken in (handler.name, *handler.aliases):
            if taken in self._handlers and not replace:
                raise DuplicateTask(f"a task named {taken!r} is registered already: give one of them name=…, or replace=True")
        if handler.name.startswith("__main__."):
            log.warning(
                "task %s is named after the script that runs: other processes know it by another name; give it name=…",
                handler.name,
            )
        self._handlers |= dict.fromkeys((handler.name, *handler.aliases), handler)
        self._forget_settings()
        with contextlib.suppress(TypeError):  # not hashable: it can be enqueued through its Task only
            self._of_functions[handler.fn] = handler
        if self._engine is not None:
            self._engine.in_loop(self._engine.learn, handler)
        return (AsyncTask if handler.is_async else Task)(self, handler)

    def batch(
        self,
        size: int,
        /,
        *,
        window: float | timedelta = 0.0,
        name: str | None = None,
        aliases: Sequence[str] | frozenset[str] = (),
        promote: Promote | None = None,
        **options: Unpack[TaskOptions],
    ) -> BatchDecorator:
        """Register a handler that does the work of many jobs in one call: `@q.batch(500, window=0.05)` on
        `async def poll(items: list[int])`. Its task is enqueued (or scheduled) with one item, `await poll.enqueue(7)`.

        size: how many items one call takes at most. window: seconds that the first of fewer waits for others, while they stay
            pending; default 0: what is due together goes together. Items that limits (`limit_by`) or a queue tell apart do not.
        A call takes one slot, and counts as one for running limits, while rates count items. Its timeout is the longest of
        those of its items. `current_job().batch` has their jobs.

        The handler returns None, and all are done; or a list with one entry for each item, in their order: its result, or an
        exception, by which this item alone is failed, or with Snooze(…), RetryAfter(…), Cancel(…) what these mean. Each has its
        own attempts. If the call itself raises or times out, nobody's attempt is used, and its items run again singly, so that
        those that have to can fail alone; what it had done for some by then is done again. Snooze, RetryAfter and Cancel from
        the call are for each of its items. Takes the options of a task, but for `run_in`. Raises TypeError for a function that
        does not take one list; ValueError for a bad value.
        """
        where = f"task {name!r}" if name else "batch()"
        terms = take_limits(cast(Any, options), where)
        terms |= {"size": whole(size, "size", 1, 100_000), "window": round(duration(window, "window") * 1e6)}
        checked = check_options(options, where, "window", "name", "aliases", "promote")
        refuse_tx(checked, where)
        registered = registration(name, aliases, promote, None, terms)

        def register(function: Callable[..., Any]) -> Task[..., Any, Any]:
            return self._register(function, checked, **registered)

        return cast(BatchDecorator, register)

    def every(
        self,
        seconds: float | timedelta,
        *,
        offset: float | timedelta = 0.0,
        immediate: bool = False,
        overlap: Overlap = "skip",
        misfire: Misfire = "latest",
        misfire_grace: float | timedelta | None = None,
        per_process: bool = False,
        name: str | None = None,
        aliases: Sequence[str] | frozenset[str] = (),
        promote: Promote | None = None,
        run_in: RunIn | None = None,
        **options: Unpack[TaskOptions],
    ) -> Decorator:
        """Run a function at every multiple of `seconds` since the epoch (moved by `offset`): every(60) means each full minute.

        The next fire time is the previous one plus the period, never "now plus the period". With a database one process of all
        runs each fire time, as a durable job; `per_process=True`, or no database: every process runs its own, best-effort.

        immediate: also fire once at start, for the current fire time; with a database only if the schedule has no record yet.
        overlap: what becomes of a fire time while the last run is not over: "skip" it (default), "queue" one behind it, or
            "allow" it beside it. A run that waits for a retry is given up for the next one.
        misfire: which fire times are run that have passed unnoticed (a blocked loop, a suspended machine, a downtime with a
            database): the "latest" (default), "all" of them, at most 1,000 (one after another, unless they may overlap), or none
            ("skip": 1 s late is the most).
        misfire_grace: seconds by which a missed fire time may be late and still be run. Default: the period, but at least a
            minute and at most an hour. What is missed for good is counted, and one WARNING says how late it was.

        The process that defines a name last has it; one with another rule stands down. Takes all options of a task; the default
        is a single start, and the schedule itself decides on durable, key and run_at. every(86400) is elapsed time: use `cron`
        for a time of the day. Raises TypeError for a function that needs arguments.
        """
        how = {"immediate": immediate, "overlap": overlap, "misfire": misfire, "misfire_grace": misfire_grace}
        own = registration(name, aliases, promote, run_in, take_limits(cast(Any, options), "every()"))
        return self._periodic("every()", Every(seconds, offset), {**how, "per_process": per_process}, own, options, "offset")

    def cron(
        self,
        expression: str,
        *,
        tz: str | ZoneInfo = "UTC",
        immediate: bool = False,
        overlap: Overlap = "skip",
        misfire: Misfire = "latest",
        misfire_grace: float | timedelta | None = None,
        per_process: bool = False,
        name: str | None = None,
        aliases: Sequence[str] | frozenset[str] = (),
        promote: Promote | None = None,
        run_in: RunIn | None = None,
        **options: Unpack[TaskOptions],
    ) -> Decorator:
        """Run a function when a time zone's clock reads what an expression names: `@q.cron("30 2 * * *", tz="Europe/Berlin")`.

        The expression, `tz`, what happens when clocks change, and what is raised: see `Cron`. All else is as for `every`.
        """
        how = {"immediate": immediate, "overlap": overlap, "misfire": misfire, "misfire_grace": misfire_grace}
        own = registration(name, aliases, promote, run_in, take_limits(cast(Any, options), "cron()"))
        return self._periodic("cron()", Cron(expression, tz), {**how, "per_process": per_process}, own, options, "tz")

    def _periodic(
        self, where: str, rule: Rule, how: dict[str, Any], own: Mapping[str, Any], options: Any, *others: str
    ) -> Decorator:
        """What `every` and `cron` have in common."""
        checked = check_options(options, where, *how, *own, *others)
        choice(how["overlap"], "overlap", "skip", "queue", "allow")
        choice(how["misfire"], "misfire", "latest", "all", "skip")
        grace = how.pop("misfire_grace")
        how["grace"] = None if grace is None else duration(grace, "misfire_grace", zero=False, infinite=True)
        flag(how["immediate"], "immediate")
        flag(how["per_process"], "per_process")
        refuse_tx(checked, where)

        def register(function: Callable[..., Any]) -> Task[..., Any, Any]:
            task = self._scheduled_task(where, function, checked, own)
            if not self._schedules and self._engine is None:
                atexit.register(warn_if_never_started, weakref.ref(self))
                leave_warnings_to_children()
            period = rule.period if isinstance(rule, Every) else 0
            prompt = min(period, ON_TIME * 1e6, *(() if grace is None else (how["grace"] * 1e6,)))
            schedule = Periodic(handler=task._handler, rule=rule, text=rule.as_text(), period=period, prompt=prompt, **how)
            self._schedules.append(schedule)
            if self._engine is not None:
                self._engine.in_loop(self._engine.add_schedule, schedule)
            return task

        return cast(Decorator, register)

    def on_dead(self, hook: HookT, /) -> HookT:
        """Have a function called with the Job of each job that dies, best-effort or durable, once that is committed.

        That is in the process that ran it, or in the one that found that its worker was lost. Of a recurring job it hears each
        time that the job has failed for a fire time, with a Job that stays as that run has ended. Async functions run in the
        event loop, plain ones in a thread, beside the jobs' slots; at most 10 at once, 30 s each. What a hook does cannot change
        the job: if it fails or takes longer, that is one ERROR in the log. Shutdown waits for it as for a running job. It is not
        called again if the process ends first. Raises TypeError for what is not callable.
        """
        self._dead_hooks.append(hook_from(hook))
        return hook

    def on_enqueue(self, hook: EnqueueHookT, /) -> EnqueueHookT:
        """Have a plain function called with the headers of each job that is enqueued, to add to them, such as
        `opentelemetry.propagate.inject`.

        It is called in the context (and the thread) of whoever enqueues, before anything is stored, with a `dict[str, str]` that
        starts as the option `headers`; the job finds the result as `current_job().headers`. Jobs that a schedule makes have
        nobody who enqueues them: it is not called for those. If it fails, or leaves what is no header, that is one WARNING, and
        the job goes on without. Raises TypeError for what is not callable, or is async.
        """
        if not callable(hook) or inspect.iscoroutinefunction(hook):
            raise TypeError(
                f"on_enqueue() takes a plain function of a dict of headers, which is not awaited, and this is {hook!r}"
            )
        self._enqueue_hooks.append(hook)
        self._plans.clear()
        return hook

    def middleware(self, function: MiddlewareT, /) -> MiddlewareT:
        """Have an async function called around each attempt of every job: `async def mw(job, call_next)`.

        `job` is its CurrentJob, and `await call_next(job)` runs the handler (or the next middleware; the first one registered is
        outermost) and returns its result. Errors come through as they are, Snooze, RetryAfter and Cancel among them, and a
        timeout as asyncio.CancelledError; what the middleware returns or raises counts as the handler's own. It runs within the
        job's context and its timeout; a call of a batch handler passes through it once, as its first job. Jobs of which no
        handler is called (expired, parked, undecodable) do not pass through it. Registered while jobs run, it is there for the
        next one. Raises TypeError for what is not an async function of two.
        """
        check_middleware(function)
        self._middleware.append(function)
        return function

    def _scheduled_task(self, where: str, fn: Any, options: Mapping[str, Any], own: Mapping[str, Any]) -> Task[..., Any, Any]:
        """The function as a task of its own, with a single start by default; a Task as it is, with its own options."""
        bare = fn._handler if isinstance(fn, Task) else make_handler(fn)
        if bare.signature is not None and bare.fewest > 0:
            raise TypeError(f"{where}: {bare.name!r} needs arguments, and a schedule has none to give: use functools.partial")
        if not isinstance(fn, Task):
            return self._register(fn, {"retry": ONE_START, **options}, **own)
        if fn._q is not self or options or any(value not in (None, [], {}) for value in own.values()):
            raise TypeError(
                f"{where}: {fn!r} is a task already: set its name and options there, and use the TinyQ that it belongs to"
            )
        if any(schedule.handler is fn._handler for schedule in self._schedules):
            raise DuplicateTask(f"{fn!r} has a schedule already: use functools.partial and another name for a second")
        return fn

    # enqueue

    @overload
    async def enqueue(self, fn: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    @overload
    async def enqueue(self, fn: BatchTask[T, Any], item: T, /, **options: Unpack[Options]) -> Job[Any]: ...
    @overload
    async def enqueue(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]: ...
    @overload
    async def enqueue(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]: ...
    @overload
    async def enqueue(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Unpack[Options]) -> Job[R]: ...
    @overload
    async def enqueue(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Unpack[Options]) -> Job[R]: ...
    async def enqueue(self, fn: Any, /, *args: Any, **kwargs: Any) -> Job[Any]:  # type: ignore[misc]
        """Enqueue a call of a task (or, best-effort, of any callable; or, durable, of a task by its name).

        Keywords that are names of options (see `Options`) are options, all others go to the handler. When this returns, a
        durable job is committed; with `tx`, when you commit. Raises before anything is stored: TypeError for arguments the
        handler does not take or an unknown option, PayloadError, PayloadTooLarge, QueueFull, KeyConflict, NotStarted,
        ShuttingDown, StoreError; ValueError for a `tx` that is closed, has no transaction, or is of another file or thread.

        Cancelled while it waits for the database, it leaves a whole job or none: the CancelledError has the handle as `job`,
        and `await error.job.exists()` tells.
        """
        if not kwargs:
            try:
                known = self._quick.get(fn)
            except TypeError:  # not hashable
                known = None
            handler = known or self._meet(fn)
            begun = self._begin(handler, handler.name, args, kwargs, kwargs)
            return begun if isinstance(begun, Job) else await self._insert(begun, None)
        for plan in self._plans_of(fn):
            if plan.fits(args, kwargs):
                return await self._insert(self._running().planned_row(plan, args), None)
        return await self._enqueue(fn, args, kwargs)

    def _plans_of(self, fn: Any) -> Sequence[Plan]:
        try:
            return self._plans.get(fn, ())
        except TypeError:  # not hashable
            return ()

    async def _enqueue(self, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Job[Any]:
        """With options, or keywords for the handler, or both."""
        given = dict(kwargs)
        found, name, checked = self._sort(fn, kwargs)
        begun = self._begin(found, name, args, kwargs, checked)
        if isinstance(begun, Job):
            return begun
        if not (self._enqueue_hooks or kwargs or checked.keys() & PER_JOB):
            self._remember(fn, begun, given)
        return await self._insert(begun, checked.get("tx"))

    def _sort(self, fn: Any, kwargs: dict[str, Any]) -> tuple[Handler | None, str, dict[str, Any]]:
        """The handler and its name, and the options, checked, which are taken out of the keywords."""
        options = {name: kwargs.pop(name) for name in list(kwargs) if name in CHECKS}
        found, name = self._find(fn, bool(options.get("durable")) or options.get("tx") is not None)
        if options and found is not None and found.signature is not None:
            for option in options:
                if option in found.signature.parameters:
                    raise TypeError(
                        f"{option!r} is both an option and a parameter of task {name!r}: "
                        f"write task.options({option}=…).enqueue(…) for the option, task.enqueue({option}=…) for the parameter"
                    )
        return found, name, check_options(options, f"enqueue({name})") if options else {}

    @overload
    def enqueue_sync(self, fn: str, /, *args: Any, **kwargs: Any) -> Job[Any]: ...
    @overload
    def enqueue_sync(self, fn: BatchTask[T, Any], item: T, /, **options: Unpack[Options]) -> Job[Any]: ...
    @overload
    def enqueue_sync(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]: ...
    @overload
    def enqueue_sync(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]: ...
    @overload
    def enqueue_sync(self, fn: Callable[[*Ts], Awaitable[R]], /, *args: *Ts, **options: Unpack[Options]) -> Job[R]: ...
    @overload
    def enqueue_sync(self, fn: Callable[[*Ts], R], /, *args: *Ts, **options: Unpack[Options]) -> Job[R]: ...
    def enqueue_sync(self, fn: Any, /, *args: Any, **kwargs: Any) -> Job[Any]:  # type: ignore[misc]
        """`enqueue` from a thread in which no event loop runs: a `def` route, a plain handler, a script.

        If this TinyQ runs in another thread, the job goes through its event loop, with this thread's context. Else a durable job
        is written to the database right here (for which aiosqlite is not needed) and workers in other processes are woken; its
        handle can tell its id, and its `result` and `cancel` need this TinyQ to be started. With `tx` (a sqlite3.Connection, or
        SQLAlchemy's Session or Connection, of this thread) it is written through that, whatever runs.

        Raises as `enqueue`. NotStarted, too, in a thread whose event loop it would block (with `tx` it may be called there), and
        for a best-effort job when no engine runs; TimeoutError if that engine's event loop has not turned for 10 s.
        """
        loop = self._loop_elsewhere() if kwargs.get("tx") is None else None
        if loop is not None:
            return from_thread(loop, functools.partial(self.enqueue, fn, *args, **kwargs))
        found, name, options = self._sort(fn, kwargs)
        return self._insert_here(found, name, args, kwargs, options)

    def _loop_elsewhere(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which this TinyQ runs, if it does; NotStarted in the thread of any event loop."""
        engine, here = self._engine, asyncio._get_running_loop()
        own = threading.get_ident() not in InlineThreads.inside or (engine is not None and engine.loop is here)
        if here is not None and own:
            raise NotStarted(
                "enqueue_sync() would block the event loop that runs in this thread, so nothing was stored: write `await "
                "enqueue(…)`, or call it in another thread, such as by asyncio.to_thread(q.enqueue_sync, …)"
            )
        if engine is None or engine.phase == "stopped" or isinstance(engine, KitEngine):
            return None
        return engine.loop if engine.loop.is_running() else None

    def _insert_here(
        self, handler: Handler | None, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Job[Any]:
        """In this thread, without an event loop."""
        engine = self._engine
        if isinstance(engine, KitEngine):
            begun = self._begin(handler, name, args, kwargs, options)
            return begun if isinstance(begun, Job) else at_once(self._insert(begun, options.get("tx")))
        if engine is not None and not engine.loop.is_closed():
            store = engine.durable_store
            outpost = Outpost(engine.config, self._handlers, store.path if store else None)
        else:
            outpost = Outpost(configure_from({**self._environment(), **self._given}), self._handlers, None)
        of_row = {option: value for option, value in options.items() if option != "tx"}
        row = self._make_row(outpost, handler, name, args, kwargs, of_row)
        answer = outpost.insert_now(row, options.get("tx"))
        self._has_written = True
        return Receipt(self, answer.row, answer.verdict == "created")

    def _remember(self, fn: Any, row: JobRow, given: Mapping[str, Any]) -> None:
        plan = self._plan(row, given)
        if plan is None:
            return
        if len(self._plans) >= 1_000:
            self._plans.clear()
        with contextlib.suppress(TypeError):  # not hashable
            self._plans[fn] = [plan, *self._plans.get(fn, ())][:8]

    def _plan(self, row: JobRow, given: Mapping[str, Any]) -> Plan | None:
        """If only id, time and arguments make it another than the next row of the same call."""
        handler, settings = row.handler, row.settings or DEFAULTS
        terms = handler.terms if handler is not None else None
        if not (row.durable and settings.plain and row.headers is None) or (terms is not None and terms.by is not None):
            return None
        return Plan(
            given={name: [*value] if isinstance(value, list) else value for name, value in given.items()},
            kinds=[*map(type, given.values())],
            handler=handler,
            name=row.task,
            settings=settings,
            options=row.options,
            lane=lane_of(cast(Engine, self._engine).config.namespace, row.queue, row.task, row.limit_value),
            limit_value=row.limit_value,
        )

    def _meet(self, fn: Any) -> Handler:
        """What is enqueued for the first time, without options."""
        handler = cast(Handler, self._find(fn, False)[0])
        self._keep(fn, handler)
        return handler

    def _keep(self, fn: Any, handler: Handler) -> None:
        if not isinstance(fn, (str, functools.partial)):
            if len(self._quick) >= 256:
                self._quick.clear()
            with contextlib.suppress(TypeError):  # not hashable
                self._quick[fn] = handler

    def _find(self, fn: Any, durable: bool) -> tuple[Handler | None, str]:
        """The handler behind what was handed to enqueue; None for the name of a task that only other processes know."""
        if isinstance(fn, Task):
            if fn._q is not self:
                raise UnknownTask(f"task {fn.name!r} belongs to another TinyQ: enqueue it there, or register it here")
            return fn._handler, fn.name
        if isinstance(fn, str):
            handler = self._handlers.get(fn)
            if handler is None and not durable:
                raise UnknownTask(
                    f"no task is named {fn!r} here{hint(fn, self._handlers)}; only a durable job may leave that to others"
                )
            if handler is None and fn not in self._strangers:
                self._greet(text(fn, "a task's name"))
            return handler, fn if handler is None else handler.name
        try:
            handler = self._of_functions.get(fn) or self._quick.get(fn)
        except TypeError:  # not hashable
            handler = None
        if handler is None:
            handler = make_handler(fn)
            self._keep(fn, handler)
        return handler, handler.name

    def _greet(self, name: str) -> None:
        """A name that is unknown here is said once, if it looks like a slip."""
        if len(self._strangers) >= 1_000:
            self._strangers.clear()
        self._strangers.add(name)
        if meant := did_you_mean(name, self._handlers):
            log.warning("no task is named %r here%s; its durable jobs wait for a process that has it", name, meant)

    def _begin(
        self, handler: Handler | None, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Job[Any] | JobRow:
        """The job, if it could start at once; else the row that is to be inserted."""
        engine = self._engine
        if engine is None or engine.phase != "running" or engine.loop is not asyncio._get_running_loop():
            engine = self._running()
        if handler is not None and handler.learned is engine.mark and not options and not kwargs:  # what most calls are
            settings, plan = handler.settings, handler.plan
            if settings is not None and handler.fewest <= len(args) <= handler.most and not self._enqueue_hooks:
                if settings.simple:
                    if args and not UNBOUND.issuperset(map(type, args)):
                        engine.look_at(name, args)
                    simple = SimpleRow(handler, settings, args, engine.clock.time(), contextvars.copy_context())
                    return Job(engine, simple, True) if engine.start_at_once(simple, handler, settings) else simple
                if plan is not None and plan.settings is settings:
                    return engine.planned_row(plan, args)
        if "tx" in options:
            options = {option: value for option, value in options.items() if option != "tx"}
        row = self._make_row(engine, handler, name, args, kwargs, options)
        if isinstance(row, SimpleRow) and row.handler is not None and row.settings is not None:
            return Job(engine, row, True) if engine.start_at_once(row, row.handler, row.settings) else row
        if handler is not None and not options and not kwargs:
            handler.plan = self._plan(row, {})
        return row

    async def _insert(self, row: JobRow, tx: Any) -> Job[Any]:
        engine = cast(Engine, self._engine)
        try:
            if tx is None and row.durable and row.key is None:
                await engine.add(row)
                return Job(engine, row, True)
            [answer] = await (engine.insert([row]) if tx is None else engine.insert_within(tx, [row]))
        except asyncio.CancelledError as error:
            cast(Any, error).job = Job(engine, row, True)
            raise
        return Job(engine, answer.row, answer.verdict in ("created", "started"))

    def _make_row(
        self,
        engine: Intake,
        handler: Handler | None,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> JobRow:
        settings = engine.resolved(handler, options) if options else engine.settings(handler)
        if handler is not None:
            try:
                check_call(handler, args, kwargs)
            except TypeError as error:
                raise TypeError(f"{error}{misfit_hint(handler, kwargs)}") from None
            if settings.durable and not handler.registered:
                raise TypeError(
                    f"{name!r} is not a registered task, so no later process could find it: decorate it with @tinyq.task"
                )
            if handler.learned is not engine.mark:
                engine.learn(handler)
        if settings.durable:
            engine.require_durable()
        row = engine.make_row(handler, name, settings, (args, kwargs), options)
        if self._enqueue_hooks:
            add_headers(row, self._enqueue_hooks)
        return row

    async def enqueue_many(self, items: Iterable[tuple[Any, ...]], **options: Unpack[Options]) -> list[Job[Any]]:
        """Enqueue many calls at once, all or none: items are (task, args) or (task, args, kwargs). Options hold for all.

        Durable ones are one transaction. Raises as `enqueue`, and ValueError if some are durable and some are not.
        """
        engine = self._running()
        checked = check_options(options, "enqueue_many()")
        tx = checked.pop("tx", None)
        rows = []
        for i, item in enumerate(items):
            if not isinstance(item, tuple) or len(item) not in (2, 3) or not isinstance(item[1], (tuple, list)):
                raise TypeError(f"items[{i}] is not (task, args) or (task, args, kwargs)")
            fn, args, kwargs = item if len(item) == 3 else (*item, {})
            if not isinstance(kwargs, Mapping):
                raise TypeError(f"items[{i}] is not (task, args) or (task, args, kwargs)")
            handler, name = self._find(fn, bool(checked.get("durable")))
            rows.append(self._make_row(engine, handler, name, tuple(args), dict(kwargs), checked))
        if len({row.durable for row in rows}) > 1:
            raise ValueError("some of these tasks are durable and some are not: pass durable=True or durable=False")
        answers = await (engine.insert(rows) if tx is None else engine.insert_within(tx, rows)) if rows else ()
        return [Job(engine, answer.row, answer.verdict in ("created", "started")) for answer in answers]

    async def schedule(
        self,
        fn: Any,
        /,
        *args: Any,
        when: Rule,
        key: str,
        overlap: Literal["skip", "queue"] = "skip",
        misfire: Misfire = "latest",
        misfire_grace: float | timedelta | None = None,
        immediate: bool = False,
        **kwargs: Any,
    ) -> RecurringJob:
        """Make a job that comes again at each fire time of a rule: `await q.schedule(poll, 7, when=tinyq.Every(60), key="7")`.

        It is one row, durable if there is a database (or as `durable` says), and one per task and key: scheduled again, it takes
        the new arguments, options and policies, and if the rule is another one, its next fire time; a run under way is left
        alone. After each run it waits for its next fire time, with all its attempts. A retry is given up when that comes first; a
        job that fails for good is logged, the on_dead hooks hear of it, and it comes again. Only `unschedule`, or Cancel from the
        handler, ends it.

        overlap: fire times during its own run are skipped (default), or "queue": the last one is run right after.
        immediate: begin with the fire time that has passed last. misfire, misfire_grace: as for `every`; `expires` of its task
            does not count. A job whose rule this installation does not know waits up to an hour for one that does.
        Options of a job, but those that say when, are taken as keywords, as by `enqueue`; so are the handler's own. Raises as
        `enqueue`.
        """
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in CHECKS}
        for name in ("delay", "run_at", "expires", "on_conflict", "tx"):
            if given.get(name) is not None:
                raise TypeError(f"schedule(): {name} does not go with a recurring job: `when` says when it runs")
        if not isinstance(when, Rule):
            raise TypeError(f"schedule(): when is {when!r}: give tinyq.Every(…) or tinyq.Cron(…)")
        choice(overlap, "overlap", "skip", "queue")
        choice(misfire, "misfire", "latest", "all", "skip")
        grace = None if misfire_grace is None else duration(misfire_grace, "misfire_grace", zero=False, infinite=True)
        recurrence = Recurrence(when.as_text(), overlap, misfire, grace)
        engine, options = self._running(), check_options(given, "schedule()")
        options.setdefault("durable", engine.durable is not None)
        handler, name = self._find(fn, options["durable"])
        row = self._make_row(engine, handler, name, args, kwargs, options)
        engine.make_recurring(row, text(key, "key"), recurrence, flag(immediate, "immediate"))
        [answer] = await engine.insert([row])
        moved = await engine.unschedule(name, cast(str, row.key), row.durable)
        return RecurringJob(engine, answer.row, answer.verdict == "created" and not moved)

    async def unschedule(self, task: TaskOrName | Callable[..., Any], /, *, key: str) -> bool:
        """Remove the recurring job of this task and key; a run of it that is under way ends as it does. Whether there was one."""
        engine, (handler, name) = self._running(), self._find(task, True)
        names = (name, *(handler.aliases if handler else ()))
        return any([await engine.unschedule(name, f"{RECURS}{text(key, 'key')}") for name in names])

    def spawn(
        self, coro: Coroutine[Any, Any, R], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[R]:
        """asyncio.create_task, but tracked: referenced until it ends, waited for at shutdown, its failure logged.

        It starts at once and takes no slot. Raises NotStarted, ShuttingDown, QueueFull (`max_pending` of them at once).
        """
        if not inspect.iscoroutine(coro):
            raise TypeError(f"spawn() takes a coroutine, and this is {coro!r}: call the async function")
        try:
            return self._running().spawn(coro, name, context)
        except BaseException:
            coro.close()
            raise

    def _running(self) -> Engine:
        if self._engine is not None:
            self._engine.require_running()
            return self._engine
        if self._inherited is not None:
            self._inherited.refuse_fork()
        if self._was_stopped:
            raise ShuttingDown("tinyq has stopped: nothing was stored; enqueue before the lifespan ends, or start it again")
        raise NotStarted(
            "tinyq has not been started: put `async with tinyq.lifespan(app):` (of your own TinyQ: q.lifespan) into the "
            "application's lifespan. If it is there, "
            "that lifespan does not run: a mounted sub-application's never does, nor a test client's without its context manager"
            ", nor one under a bare ASGI transport"
        )

    # life

    async def start(self) -> None:
        """Open the database, be listed in it, begin to claim and to fire. Waits for no job, and for another's write lock on being
        listed at most 0.25 s; raises AlreadyStarted, StoreError, ImportError."""
        if isinstance(self._engine, KitEngine):
            self._configure_kit(self._engine)
            return
        self._require_stopped()
        refuse_start_at_import()
        self._starting = True
        try:
            config = configure_from({**self._environment(), **self._given})
            for command in _commands:
                config = command.applied_to(config)
            self._forget_settings()
            engine = Engine(config, self._handlers)
            self._call_dead_hooks(engine, config)
            await engine.start(self._schedules)
        except BaseException:
            self._reconfigurable = True
            raise
        finally:
            self._starting = False
        self._engine, self._inherited, self._reconfigurable = engine, None, False
        watch_for_forks()
        _started.add(self)

    def _require_stopped(self) -> None:
        if self._engine is not None and (self._engine.loop.is_closed() or self._engine.phase == "stopped"):
            self._engine = None  # its loop ended without stop(), or whoever called that was cancelled
        if self._engine is not None or self._starting:
            raise AlreadyStarted("this TinyQ runs already: one lifespan (or start, or testing) at a time")

    def _call_dead_hooks(self, engine: Engine, config: Config) -> None:
        for tier in engine.crew.tiers:
            tier.app, tier.middleware = self._app, self._middleware
        configured = () if config.on_dead is None else (hook_from(config.on_dead),)
        engine.crew.after_death = lambda row: engine.call_hooks(
            (*configured, *self._dead_hooks), Job(engine, row, False), label(row)
        )

    async def stop(self, grace: float | timedelta | None = None) -> None:
        """Stop claiming and firing at once, let what runs go on for `grace` seconds, then cancel it; keep what can be kept.

        Waiting best-effort jobs are run within the grace, then promoted or reported lost. Idempotent; joins a stop under way.
        """
        engine = self._engine
        if engine is None:
            if self._inherited is not None:
                self._inherited.refuse_fork()
            return
        if isinstance(engine, KitEngine):
            self._reconfigurable = True
            return
        if engine.loop.is_running():
            engine.require_loop()
        try:
            await engine.stop(engine.config.grace if grace is None else duration(grace, "grace", infinite=True))
        finally:
            if engine.phase == "stopped" and self._engine is engine:
                self._engine = None
                self._was_stopped = self._reconfigurable = True

    async def quiesce(self) -> None:
        """Claim no durable job and fire no schedule any more, and go on with the rest; for a preStop hook."""
        self._running().quiesce()

    async def drain(self) -> None:
        """Return when nothing runs here and nothing that is due could start here. Not for a job: it would wait for itself."""
        await self._running().drain()

    async def __aenter__(self) -> TinyQ:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._inherited is None:  # a forked child that leaves the block leaves its parent's engine alone
            await self.stop()

    def _disown(self) -> None:
        self._starting = False
        if self._engine is not None:
            self._engine.disown()
            self._inherited, self._engine, self._reconfigurable = self._engine, None, True

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[dict[str, TinyQ]]:
        """Start, yield {"tinyq": self} (which Starlette merges into `request.state`), stop. Works without an app, too.

        `app` is what jobs find as `current_job().app`, and whose `dependency_overrides` hold for their dependencies.
        """
        refuse_path(app)
        self._app = app
        try:
            await self.start()
        finally:
            self._app = None
        try:
            yield {"tinyq": self}
        finally:
            await self.__aexit__()

    @contextlib.contextmanager
    def testing(self, *, at: datetime | None = None) -> Iterator[Kit]:
        """Within this block nothing is opened and nothing runs by itself; for tests, sync and async. See `Kit` for what it gives.

            @pytest.fixture
            def jobs():
                with tinyq.testing() as jobs:
                    yield jobs

        All of this TinyQ works, started or not, from any thread and event loop: durable jobs without a database (their arguments
        go through JSON all the same; those of best-effort jobs stay as they are), schedules, `dead`, `pause`. `start`, `stop` and
        `lifespan` do nothing, so an application can run its own around it. Jobs with `tx` exist at once, whatever becomes of the
        transaction. `result()` runs what is due until that job has ended.

        at: what the clock says at first; default: now. It stands still but for `drain` and `advance`; a handler's timeout is real
        time. Afterwards all jobs are gone, tasks and schedules stay. Raises AlreadyStarted while this TinyQ runs or is tested.
        """
        self._require_stopped()
        config = configure_from({**self._environment(), **self._given})
        engine = KitEngine(config, self._handlers, config.clock.time() if at is None else as_moment(at, "at"))
        self._configure_kit(engine)
        for schedule in self._schedules:
            engine.add_schedule(schedule)
        self._engine, self._was_tested = engine, True
        kit = Kit(engine)
        try:
            yield kit
        finally:
            self._engine = None
            self._forget_settings()
            kit.close()

    def _configure_kit(self, engine: KitEngine) -> None:
        config = configure_from({**self._environment(), **self._given})
        self._forget_settings()
        engine.configure(config)
        self._call_dead_hooks(engine, config)

    def _forget_settings(self) -> None:
        self._quick.clear()
        self._plans.clear()

    def run(self) -> None:
        """Start, work until SIGINT or SIGTERM, stop; for scripts and workers. A second signal skips the grace."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        told = asyncio.Event()
        with on_signals(told.set, chain=False):
            async with self:
                await told.wait()

    # looking

    async def get(self, id: str) -> Job[Any]:
        """The job with this id, as it is now. Raises JobNotFound if there is none (any more)."""
        engine = self._running()
        row = await engine.get(id_bytes(id))
        if row is None:
            raise JobNotFound(f"no job has the id {id!r}: it never was, or it has ended and was not kept")
        return Job(engine, row, False)

    async def schedules(self, task: TaskOrName | None = None, key: str | None = None, limit: int = 1_000) -> list[Schedule]:
        """The schedules of this process, and the recurring jobs there are, at most `limit` of both; those of one task, or with
        one key, if that is given. Raises NotStarted, StoreError."""
        engine, names = self._running(), self._names_of(task)
        await engine.look_at_pauses(engine.own(self._schedules))
        found: list[Schedule] = [
            FunctionSchedule(engine, periodic, engine.own(self._schedules).remove)
            for periodic in engine.own(self._schedules)
            if key is None and (task is None or periodic.name in names)
        ]
        for row in [row for name in names for row in await engine.recurring(name, key, whole(limit, "limit", 1))]:
            try:
                found.append(RecurringJob(engine, row))
            except Exception as error:
                log.error("%s is not listed, %s: %s", label(row), RULE_FAILS, error_text(error))
        return found[:limit]

    async def stats(self) -> Stats:
        """Counts per queue, task and state, and what the schedules of this process have done."""
        engine = self._running()
        await engine.look_at_pauses(engine.own(self._schedules))
        return await engine.stats(engine.own(self._schedules))

    def health(self) -> Health:
        """Whether this process can do its work now, and what keeps it from that: a store that fails, a write or an event loop
        that has been stuck for 5 seconds, due jobs of tasks that no worker knows.

        Reads and waits for nothing, may be called in any thread, and raises nothing. Meant for readiness: to restart a process
        because its database is locked, as a failed liveness probe does, would only lose what runs.
        """
        engine = self._engine
        if engine is not None and not engine.loop.is_closed():
            return engine.health()
        return Health(status="degraded", reasons=(f"tinyq has {'stopped' if self._was_stopped else 'not been started'}",))

    async def wake(self) -> None:
        """Look for due jobs now, here and in the other processes of this database and namespace, whether or not there are any.

        Never needed for what tinyq enqueues; rows that something else inserts are found within about 0.13 s without it.
        Raises NotStarted, ShuttingDown, StoreError.
        """
        await self._running().wake()

    async def dead(self, task: TaskOrName | None = None, limit: int = 100) -> list[Job[Any]]:
        """Dead jobs, of one task if it is given, the last to die first: durable ones, and the best-effort ones kept in memory."""
        engine = self._running()
        whole(limit, "limit", 1)
        rows = [row for name in self._names_of(task) for row in await engine.dead(name, limit)]
        rows.sort(key=lambda row: row.finished or 0, reverse=True)
        return [Job(engine, row, False) for row in rows[:limit]]

    async def requeue(self, *ids: str, task: TaskOrName | None = None, all: bool = False) -> int:
        """Make dead jobs pending again, with all their attempts. Answers how many were.

        Give ids (of cancelled jobs, too), or `task` (or its name) for all its dead jobs, or `all=True` for all there are; else
        TypeError. Each 500 of them are one transaction. An id raises KeyConflict if a job with the same key is pending; with
        `task` and `all` such a job is left dead, and one WARNING counts them. A recurring job waits for its next fire time.
        """
        one_way("requeue", ids, task, all)
        engine = self._running()
        if ids:
            return await engine.requeue([id_bytes(id) for id in ids])
        return sum([await engine.requeue_dead(name) for name in self._names_of(task)])

    async def purge(self, *ids: str, task: TaskOrName | None = None, all: bool = False) -> int:
        """Delete dead jobs. Answers how many were.

        Give ids (of done and cancelled jobs, too), or `task` (or its name) for all its dead jobs, or `all=True` for all there
        are; else TypeError. Each 500 of them are one transaction.
        """
        one_way("purge", ids, task, all)
        engine = self._running()
        if ids:
            return await engine.purge([id_bytes(id) for id in dict.fromkeys(ids)])
        return sum([await engine.purge_dead(name) for name in self._names_of(task)])

    def _names_of(self, task: TaskOrName | None) -> Sequence[str | None]:
        """The names that jobs of a task may have been stored under."""
        if task is None:
            return (None,)
        name = name_of(task)
        handler = self._handlers.get(name)
        return (name,) if handler is None else (handler.name, *handler.aliases)

    async def pause(self, queue: str) -> None:
        """Start no job of this queue any more, until `resume`, in any process that shares the database and the namespace.

        What runs goes on, and jobs can be enqueued. A pause outlives restarts; without a database it is this instance's own.
        Other processes hold back their best-effort jobs once they have noticed. Idempotent. Raises StoreError.
        """
        await self._running().pause(text(queue, "queue"))

    async def resume(self, queue: str) -> None:
        """Start jobs of this queue again. Idempotent. Raises StoreError."""
        await self._running().resume(text(queue, "queue"))


def registration(name: str | None, aliases: object, promote: object, run_in: object, limits: Mapping[str, Any]) -> dict[str, Any]:
    """What `task`, `every` and `cron` are told about the task itself, checked."""
    choice(promote, "promote", None, True, False, "interrupted")
    return {"name": name, "aliases": names_from(aliases), "promote": promote, "run_in": run_in, "limits": limits}


def hook_from(hook: Any) -> Handler:
    if not callable(hook):
        raise TypeError(f"on_dead() takes a function of the dead Job, and this is {hook!r}")
    handler = make_handler(hook.fn if isinstance(hook, Task) else hook)
    if handler.needs:
        raise TypeError(f"on_dead() takes a function of the dead Job, and {hook!r} has a Depends, which only jobs have filled in")
    return handler


def names_from(aliases: object) -> list[str]:
    if isinstance(aliases, str) or not isinstance(aliases, (list, tuple, set, frozenset)):
        raise TypeError(f'aliases is {aliases!r}: give a list of names, such as ["old_name"]')
    return [text(alias, "a name in aliases") for alias in aliases]


def one_way(verb: str, ids: Sequence[str], task: object, all: object) -> None:
    """TypeError unless exactly one way of naming jobs was used."""
    for id in ids:
        if not isinstance(id, str):
            raise TypeError(f"{verb}() takes ids one after another, and {id!r} is none: give {verb}(id, …), or {verb}(*ids)")
    if bool(ids) + (task is not None) + flag(all, "all") != 1:
        raise TypeError(
            f"{verb}() takes ids, or task=…, or all=True, one of these: given were {len(ids)} ids, task={task!r}, all={all}"
        )


_started: Final[weakref.WeakSet[TinyQ]] = weakref.WeakSet()


@functools.cache
def watch_for_forks() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=disown_all)


@functools.cache
def leave_warnings_to_children() -> None:
    """A process that has forked is the parent of a server's workers, as with `gunicorn --preload`: only these start anything."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_parent=functools.partial(atexit.unregister, warn_if_never_started))


def disown_all() -> None:
    for q in list(_started):
        q._disown()


def refuse_path(app: object) -> None:
    if isinstance(app, (str, os.PathLike)):
        raise TypeError(f"lifespan() takes the application first, and not {app!r}: write lifespan(db=…)")


def warn_if_never_started(q: weakref.ref[TinyQ]) -> None:
    found = q()
    if (
        found is not None
        and found._engine is found._inherited is None
        and not found._was_stopped
        and not found._was_tested
        and not found._has_written
        and not _is_child
        and found._schedules
    ):
        n = len(found._schedules)
        log.warning("%d schedule%s registered, and tinyq was never started: nothing ran", n, "" if n == 1 else "s")


# ── 37. Default instance ──────────────────────────────────────────────────────────────────────────────────────────────
# The functions of the module are the methods of one TinyQ, which `configure`, `lifespan` or the environment sets up.

_default: Final = TinyQ()
_default._environment = from_environment

task = _default.task
batch = _default.batch
every = _default.every
cron = _default.cron
enqueue = _default.enqueue
enqueue_many = _default.enqueue_many
enqueue_sync = _default.enqueue_sync
spawn = _default.spawn
start = _default.start
stop = _default.stop
quiesce = _default.quiesce
drain = _default.drain
get = _default.get
schedule = _default.schedule
unschedule = _default.unschedule
schedules = _default.schedules
stats = _default.stats
health = _default.health
requeue = _default.requeue
dead = _default.dead
purge = _default.purge
pause = _default.pause
resume = _default.resume
on_dead = _default.on_dead
on_enqueue = _default.on_enqueue
middleware = _default.middleware
wake = _default.wake
testing = _default.testing


def configure(db: str | os.PathLike[str] | None = None, **options: Unpack[Configuration]) -> None:
    """Set options of the default instance, before it starts or after it has stopped.

    Raises AlreadyStarted while it runs, ConfigurationError if an option was set to something else before its first start.
    """
    kit = _default._engine if isinstance(_default._engine, KitEngine) else None
    if _default._engine is not kit or _default._starting:
        raise AlreadyStarted("tinyq runs already: configure it before its lifespan begins")
    news: dict[str, Any] = {**options} if db is None else {"db": db, **options}
    configure_from(news)
    given = _default._given
    for name, value in news.items():
        if name in given and given[name] != value and not _default._reconfigurable:
            raise ConfigurationError(
                f"{name} was set to {given[name]!r} before and is to be {value!r} now: configure tinyq in one place"
            )
    given.update(news)
    if kit is not None:
        _default._configure_kit(kit)


@contextlib.asynccontextmanager
async def lifespan(
    app: object = None, *, db: str | os.PathLike[str] | None = None, **options: Unpack[Configuration]
) -> AsyncIterator[dict[str, TinyQ]]:
    """The default instance from start to stop: `async with tinyq.lifespan(app, db=…):`, or FastAPI(lifespan=tinyq.lifespan).

    Put it innermost in the application's own lifespan, so that it drains before what its jobs use is closed.
    """
    refuse_path(app)
    if options or db is not None:
        configure(db, **options)
    async with _default.lifespan(app) as state:
        yield state


def run(q: TinyQ | None = None) -> None:
    """Run a TinyQ (default: the default instance) until SIGINT or SIGTERM."""
    (q or _default).run()


# ── 38. Command line ──────────────────────────────────────────────────────────────────────────────────────────────────
# `python -m tinyq worker main:app`: a process for an application's lifespan and the TinyQs that it starts, without HTTP.
# `python -m tinyq schema jobs.db`: the SQL for a file whose tables somebody else makes.


class CommandFailed(Exception):
    """Why the command ends with exit code 1, in a sentence; a cause is shown with its traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Answers the exit code: 0, or 1 with the reason on standard error; SystemExit(2) for wrong usage."""
    try:
        found, command = parsed(arguments)
        return print_schema(found.file) if found.command == "schema" else work(found, command)
    except CommandFailed as failure:
        if failure.__cause__ is not None:
            traceback.print_exception(failure.__cause__)
        print(f"tinyq: {failure}", file=sys.stderr)
        return 1


def parsed(arguments: Sequence[str] | None) -> tuple[Any, Command]:
    import argparse

    parser = argparse.ArgumentParser(
        prog=f"python -m {__name__}" if _program else "tinyq", description="Background work of a FastAPI or Starlette service."
    )
    parser.add_argument("--version", action="version", version=f"tinyq {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    schema = commands.add_parser(
        "schema",
        help="print the SQL that makes or brings forward the tables of tinyq",
        description="Print the SQL that brings the tables of tinyq in a file forward, or makes them, for a TinyQ with "
        "auto_migrate=False: python -m tinyq schema jobs.db | sqlite3 jobs.db. The file itself is not changed.",
    )
    schema.add_argument("file", metavar="FILE", nargs="?", help="the database as it is; default: a new one")
    worker = commands.add_parser(
        "worker",
        help="serve the queues of an application in a process of their own",
        description="Enter an application's lifespan without HTTP and run its jobs, until SIGINT or SIGTERM: then let what runs "
        "go on for the grace, and hand back the rest. A second signal skips the grace, a third kills. Set TINYQ_WORKER=0 for the "
        "web processes. What is given here counts more than code and environment.",
    )
    add = worker.add_argument
    add("target", metavar="MODULE:APP", help="an ASGI application or a TinyQ, such as main:app")
    add("--queues", metavar="A,B=3", help="serve only these; =3: with so many slots of its own; default: all")
    add("--grace", metavar="SECONDS", default="60", help="for which running jobs go on after a signal; default 60")
    add("--app-dir", metavar="DIR", default=".", help="where the module is; default: the current directory")
    add("--factory", action="store_true", help="APP is a function that makes the application")
    levels = ("debug", "info", "warning", "error", "critical")
    add(
        "--log-level",
        choices=levels,
        help="of tinyq; default info. It logs to standard error unless the app sets up logging",
    )
    found = parser.parse_args(arguments)
    if found.command == "schema":
        return found, Command(grace=0.0, queues={})
    try:
        if not all(found.target.partition(":")):
            raise ValueError(f"{found.target!r} names no application: write MODULE:APP, such as main:app")
        grace = duration(as_number(found.grace, "--grace"), "--grace", infinite=True)
        return found, Command(grace=grace, queues={} if found.queues is None else queues_from(found.queues))
    except ValueError as error:
        worker.error(str(error))


def print_schema(file: str | None) -> int:
    import pathlib
    import sqlite3

    version = 0
    if file is not None:
        try:
            with contextlib.closing(sqlite3.connect(f"{pathlib.Path(file).absolute().as_uri()}?mode=ro", uri=True)) as db:
                version = schema_version(db, file)
        except (sqlite3.Error, StoreError) as error:
            raise CommandFailed(str(store_error(error, file))) from None
    for statement in ("BEGIN IMMEDIATE", *steps_from(version), "COMMIT") if version < len(MIGRATIONS) else ():
        print(f"{statement};")
    return 0


def as_number(word: str, name: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{name} is {word!r}: give a number") from None


def queues_from(words: str) -> dict[str, int | None]:
    queues: dict[str, int | None] = {}
    for word in words.split(","):
        name, equals, slots = word.strip().partition("=")
        if not name or name in queues or (equals and not (slots.isdecimal() and int(slots) > 0)):
            raise ValueError(f"--queues is {words!r}, and {word!r} in it is no new queue: write names, as in emails,reports=3")
        queues[text(name, "a queue's name")] = whole(int(slots), f"the number of slots of {name}", 1) if equals else None
    return queues


def work(found: Any, command: Command) -> int:
    app = load(found.target, found.app_dir, found.factory)
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        log.setLevel(logging.INFO)
    if found.log_level is not None:
        log.setLevel(found.log_level.upper())
    _commands[:] = [command]
    try:
        asyncio.run(Stay(found.target, app, command).serve())
    finally:
        _commands.clear()
    return 0


def load(target: str, folder: str, factory: bool) -> Any:
    """The application or TinyQ that is meant by `module:attribute`."""
    import importlib

    module_name, _, path = target.partition(":")
    sys.path.insert(0, os.path.abspath(folder))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise CommandFailed(
                f"there is no module {error.name!r} in {sys.path[0]} or where Python looks: write main:app for main.py, and give "
                "--app-dir if it is in another directory"
            ) from None
        raise CommandFailed(f"{module_name} cannot be imported: {error_text(error)}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise CommandFailed(f"{target}: {found!r} has no {name!r}{did_you_mean(name, dir(found))}") from None
    if factory:
        try:
            found = found()
        except Exception as error:
            raise CommandFailed(f"{target}() failed: {error_text(error)}") from error
    if not isinstance(found, TinyQ) and not callable(found):
        raise CommandFailed(f"{target} is {found!r}: an ASGI application or a TinyQ is wanted{other_copies()}")
    return found


def other_copies() -> str:
    """A hint, if the application has imported this module under another name."""
    here = sys.modules[__name__]
    names = [
        name
        for name, module in list(sys.modules.items())
        if isinstance(getattr(module, "TinyQ", None), type) and module.TinyQ.__module__ == name and module is not here
    ]
    return f"; this is {__name__}, and the application uses {names[0]}: python -m {names[0]} worker" if names else ""


class Stay:
    """One stay in an application's lifespan, as a server would have it but for HTTP, or in a bare TinyQ; from start to stop."""

    def __init__(self, target: str, app: Any, command: Command) -> None:
        self._target, self._app, self._command = target, app, command
        self._signals = 0
        self._asked = False
        self._failed: str | None = None  # what the application has to say of that

    async def serve(self) -> None:
        """Until told to stop. Raises CommandFailed."""
        loop = asyncio.get_running_loop()
        self._begun, self._told, self._over = (loop.create_future() for _ in range(3))
        self._run = run = loop.create_task(self._in_q() if isinstance(self._app, TinyQ) else self._in_lifespan())
        with on_signals(self._on_signal, chain=False):
            await first(run, self._begun, self._told, self._over)
            trouble, early = None, self._told.done() and not self._begun.done()
            if early:
                run.cancel()
            elif self._begun.done() and (trouble := self._idle()) is None:
                queues = ", ".join(name if n is None else f"{name}={n}" for name, n in self._command.queues.items())
                grace = self._command.grace
                log.info("worker of %s: %s, grace %g s", self._target, f"queues {queues}" if queues else "all queues", grace)
                await first(run, self._told)
            set_done(self._told)
            await first(run, self._over)
            await asyncio.wait({run}, timeout=EXTRA)
        if trouble is not None:
            raise CommandFailed(trouble)
        if not early:
            self._check()
        log.info("worker of %s: stopped", self._target)

    async def _in_q(self) -> None:
        async with self._app:
            self._begun.set_result(None)
            await asyncio.shield(self._told)

    async def _in_lifespan(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, str]:
        if self._asked:
            await asyncio.shield(self._told)
            return {"type": "lifespan.shutdown"}
        self._asked = True
        return {"type": "lifespan.startup"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        _, stage, how = message["type"].split(".")
        if how == "failed":
            self._failed = message.get("message") or "it does not say why"
        set_done(self._begun if (stage, how) == ("startup", "complete") else self._over)

    def _idle(self) -> str | None:
        """Why there is nothing to do for a worker, once the application has started."""
        engines = [q._engine for q in at_work()]
        if not engines:
            return (
                f"the lifespan of {self._target} started no TinyQ: put `async with tinyq.lifespan(app, db=…):` into it"
                f"{other_copies()}"
            )
        if all(engine is None or engine.durable is None for engine in engines):
            return (
                f"{self._target} has no database, and so no jobs for a worker: give db='jobs.db' to lifespan(), configure() or "
                "TinyQ(), or set TINYQ_DB"
            )
        return None

    def _check(self) -> None:
        """Raises CommandFailed unless the application has started and stopped as it should, and when it should."""
        stage = "shut down" if self._begun.done() else "start"
        if self._run.cancelled():
            raise CommandFailed(f"{self._target} did not {stage} in time: its lifespan was cut short")
        error = self._run.exception() if self._run.done() else None
        if error is not None:
            factory = "" if self._asked or isinstance(self._app, TinyQ) else "; if it is a function that makes one, add --factory"
            raise CommandFailed(f"{self._target} did not {stage}: {error_text(error)}{factory}") from error
        if self._failed is not None or not self._begun.done():
            why = self._failed or "it takes no part in the lifespan protocol of ASGI"
            raise CommandFailed(f"{self._target} did not {stage}: {why}")
        if self._signals == 0:
            raise CommandFailed(f"the lifespan of {self._target} ended by itself")

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            for q in at_work():
                cast(Engine, q._engine).quiesce()  # whatever the application does before it comes to that
            set_done(self._told)
        elif self._signals == 2:
            self._hurrying = asyncio.create_task(self._hurry())
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    async def _hurry(self) -> None:
        await asyncio.gather(*(q.stop(grace=0) for q in at_work()))
        await asyncio.wait({self._run}, timeout=EXTRA)
        self._run.cancel()


def at_work() -> list[TinyQ]:
    engines = ((q, q._engine) for q in _started)
    return [q for q, engine in engines if engine is not None and engine.phase != "stopped" and not engine.loop.is_closed()]


async def first(*ones: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(ones, return_when=asyncio.FIRST_COMPLETED)


if _program:
    sys.exit(main())
