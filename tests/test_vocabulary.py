"""The values that users pass and read: Retry, State, the tree of errors, the signals of a handler."""

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from clock import FakeClock

import tinyq
from tinyq import Retry, State, TinyQ

DAY = 86_400.0


def delays(retry: Retry, *failures: int) -> list[float]:
    return [retry.delay(n) for n in failures]


def samples(retry: Retry, failures: int = 1, count: int = 10_000) -> list[float]:
    rng = random.Random(2026)
    return [retry.delay(failures, rng) for _ in range(count)]


# Retry: the delay before jitter


def test_delays_grow_by_the_factor_until_the_cap() -> None:
    retry = Retry(base=1, factor=2, cap=60, jitter="none")
    assert delays(retry, *range(1, 10)) == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_delays_start_at_the_base() -> None:
    retry = Retry(base=30, factor=2, cap=600, jitter="none")
    assert delays(retry, *range(1, 7)) == [30, 60, 120, 240, 480, 600]
    assert sum(delays(retry, *range(1, 6))) == 930


@pytest.mark.parametrize(
    ("failures", "expected"),
    [(1, 1), (12, 2048), (13, 3600), (46, 3600), (47, 3600), (1023, 3600), (1024, 3600), (1025, 3600), (100_000, 3600)],
)
def test_a_delay_is_capped_before_its_power_overflows(failures: int, expected: float) -> None:
    retry = Retry(max_attempts=math.inf, base=1, factor=2, cap=3600, jitter="none")
    assert retry.delay(failures) == expected


@pytest.mark.parametrize("jitter", ["none", "equal", "full"])
@pytest.mark.parametrize("base", [0, 1e-6, 0.5, 5, 1e10])
def test_a_delay_is_a_finite_number_whatever_the_policy_and_the_attempt(base: float, jitter: Any) -> None:
    wrong = []
    for factor, cap in itertools.product(
        (0.1, 0.5, 1, 1.0000001, 1.5, 2, 6, 1e6, 1e300), (0, 1e-6, 1, 900, 1e12, 1e300, math.inf)
    ):
        retry = Retry(max_attempts=math.inf, base=base, factor=factor, cap=cap, jitter=jitter)
        for failures in (1, 2, 3, 46, 47, 1023, 1024, 1025, 100_000, 10**9):
            try:
                delay: object = retry.delay(failures, random.Random(failures))
            except ArithmeticError as error:
                delay = error
            if not (isinstance(delay, float) and 0 <= delay <= cap and math.isfinite(delay)):
                wrong.append((factor, cap, failures, delay))
    assert wrong == []


def test_delays_never_shrink_while_the_factor_is_at_least_one() -> None:
    for factor in (1.0, 1.01, 1.5, 2.0, 6.0):
        found = delays(Retry(base=2, factor=factor, cap=math.inf, jitter="none"), *range(1, 2_000))
        assert found == sorted(found)


def test_without_a_cap_delays_grow_by_the_power_as_long_as_anybody_could_wait() -> None:
    retry = Retry(base=1, factor=2, cap=math.inf, jitter="none")
    assert delays(retry, 1, 11, 21, 31) == [1, 1024, 1024**2, 1024**3]
    assert retry.delay(100_000) > 1000 * 365 * DAY


def test_a_factor_of_one_keeps_the_delay() -> None:
    assert delays(Retry(base=7, factor=1, jitter="none"), 1, 2, 3, 1024, 100_000) == [7] * 5


def test_a_cap_below_the_base_is_the_delay() -> None:
    assert delays(Retry(base=60, factor=2, cap=10, jitter="none"), 1, 2, 100_000) == [10] * 3


def test_a_base_of_zero_retries_at_once() -> None:
    for jitter in ("none", "equal", "full"):
        assert delays(Retry(base=0, jitter=jitter), 1, 2, 1024) == [0, 0, 0]


def test_durations_of_a_retry_may_be_timedeltas() -> None:
    retry = Retry(base=timedelta(minutes=1), factor=2, cap=timedelta(hours=1), delays=())
    assert retry == Retry(base=60, factor=2, cap=3600)
    assert Retry(delays=[timedelta(minutes=1), 2]) == Retry(delays=(60.0, 2.0))


def test_the_default_is_five_starts_in_about_twenty_minutes() -> None:
    retry = Retry()
    assert retry.max_attempts == 5
    assert [Retry(jitter="none").delay(n) for n in range(1, 5)] == [5, 30, 180, 900]
    assert (retry.base, retry.factor, retry.cap, retry.jitter) == (5, 6, 900, "equal")


# Retry: jitter


@pytest.mark.parametrize(("failures", "longest"), [(1, 10), (2, 20), (3, 40), (7, 600), (1024, 600)])
def test_equal_jitter_stays_between_half_the_delay_and_the_delay(failures: int, longest: float) -> None:
    found = samples(Retry(base=10, factor=2, cap=600, jitter="equal"), failures)
    assert longest / 2 <= min(found) < longest * 0.51
    assert longest * 0.99 < max(found) <= longest


def test_equal_jitter_spreads_evenly_around_three_quarters() -> None:
    found = samples(Retry(base=10, jitter="equal"))
    assert math.isclose(sum(found) / len(found), 7.5, rel_tol=0.01)
    quarters = [sum(low <= delay < low + 1.25 for delay in found) for low in (5, 6.25, 7.5, 8.75)]
    assert all(2_200 < count < 2_800 for count in quarters)


def test_jitter_is_equal_unless_asked_for_otherwise() -> None:
    assert Retry().jitter == "equal"
    assert min(samples(Retry(base=3600, cap=3600))) >= 1800


def test_jitter_of_long_delays_does_not_gather_retries_inside_a_short_outage() -> None:
    found = [delay for n in range(1, 6) for delay in samples(Retry(base=3600, factor=1, cap=math.inf), n, 2_000)]
    assert sum(delay < 30 * 60 for delay in found) == 0


def test_full_jitter_spreads_from_a_floor_above_zero_to_the_delay() -> None:
    found = samples(Retry(base=10, jitter="full"))
    assert 0 < min(found) < 2
    assert 9.9 < max(found) <= 10
    assert math.isclose(sum(found) / len(found), (min(found) + max(found)) / 2, rel_tol=0.02)


def test_without_jitter_the_delay_is_exact() -> None:
    assert set(samples(Retry(base=10, jitter="none"), count=100)) == {10}


def test_jitter_may_be_said_as_yes_or_no() -> None:
    assert Retry(jitter=True) == Retry(jitter="equal")
    assert Retry(jitter=False) == Retry(jitter="none")


def test_jitter_comes_from_the_random_generator_that_was_given() -> None:
    retry = Retry(base=10)
    assert [retry.delay(1, random.Random(5)) for _ in range(3)] == [retry.delay(1, random.Random(5))] * 3
    assert retry.delay(1, random.Random(5)) != retry.delay(1, random.Random(6))


def test_without_a_generator_delays_differ_from_call_to_call() -> None:
    assert len(set(delays(Retry(base=10), *[1] * 50))) > 40


# Retry: a list of delays


def test_a_list_of_delays_is_taken_as_it_is() -> None:
    retry = Retry(delays=[30, 120, 600])
    assert retry.max_attempts == 4
    assert delays(retry, 1, 2, 3) == [30, 120, 600]
    assert set(samples(retry, 2, 100)) == {120}


def test_the_last_delay_of_a_list_is_repeated() -> None:
    retry = Retry(max_attempts=6, delays=(30, 120, 600))
    assert delays(retry, 1, 2, 3, 4, 5) == [30, 120, 600, 600, 600]
    assert delays(retry, 1024, 100_000) == [600, 600]


def test_a_list_of_delays_is_not_capped() -> None:
    assert delays(Retry(delays=[7200]), 1) == [7200]


def test_a_delay_of_zero_in_a_list_is_zero() -> None:
    assert delays(Retry(delays=[0, 0, 5]), 1, 2, 3) == [0, 0, 5]


def test_linear_delays_wait_no_less_than_their_sum() -> None:
    assert sum(delays(Retry(delays=[1.5, 3, 4.5, 6]), 1, 2, 3, 4)) == 15.0


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        pytest.param([30, 120, 600], Retry(max_attempts=4, delays=(30, 120, 600)), id="list"),
        pytest.param((30, timedelta(minutes=2)), Retry(max_attempts=3, delays=(30, 120)), id="tuple"),
        pytest.param([0], Retry(max_attempts=2, delays=(0,)), id="at once"),
        pytest.param(False, Retry(max_attempts=1), id="never"),
        pytest.param(Retry(base=3), Retry(base=3), id="itself"),
    ],
)
def test_the_retry_option_has_three_forms(given: object, meant: Retry) -> None:
    assert tinyq.as_retry(given) == meant


@pytest.mark.parametrize("given", [3, 0, 5.0, True, "5", b"5", [], (), {}, {30: 1}, {30}, Retry], ids=repr)
def test_another_form_of_the_retry_option_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match=r"^retry is .*: give tinyq\.Retry\(\.\.\.\), a list of delays in seconds, or False$"):
        tinyq.as_retry(given)


# Retry: what is retried


def test_everything_that_a_handler_may_fail_with_is_retried_by_default() -> None:
    assert not any(Retry().gives_up_on(kind("x")) for kind in (ValueError, OSError, FileNotFoundError, TimeoutError))


def test_only_the_kinds_in_retry_on_are_retried() -> None:
    retry = Retry(retry_on=(ConnectionError, TimeoutError))
    assert not retry.gives_up_on(ConnectionResetError())  # a subclass
    assert not retry.gives_up_on(TimeoutError())
    assert retry.gives_up_on(ValueError())
    assert retry.gives_up_on(SystemExit(3))


def test_kinds_in_give_up_on_are_not_retried_even_if_retry_on_has_them() -> None:
    retry = Retry(retry_on=OSError, give_up_on=FileNotFoundError)
    assert retry.gives_up_on(FileNotFoundError())
    assert not retry.gives_up_on(PermissionError())
    assert retry.gives_up_on(KeyError())


def test_one_kind_need_not_be_a_tuple() -> None:
    assert Retry(retry_on=OSError) == Retry(retry_on=(OSError,))
    assert Retry(give_up_on=OSError) == Retry(give_up_on=(OSError,))


def test_a_predicate_may_say_what_is_retried() -> None:
    def is_temporary(error: BaseException) -> bool:
        return getattr(error, "temporary", False)

    temporary, lasting = OSError(), OSError()
    temporary.temporary = True  # type: ignore[attr-defined]
    anything: Any = Retry  # a predicate is promised beside types
    assert not anything(retry_on=is_temporary).gives_up_on(temporary)
    assert anything(retry_on=is_temporary).gives_up_on(lasting)
    assert anything(give_up_on=is_temporary).gives_up_on(temporary)
    assert not anything(give_up_on=is_temporary).gives_up_on(lasting)


# Retry: what makes no sense


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_attempts": 0}, ValueError, r"Retry\.max_attempts is 0: .*1 or more"),
        ({"max_attempts": -1}, ValueError, r"Retry\.max_attempts is -1"),
        ({"max_attempts": 2.5}, ValueError, r"Retry\.max_attempts is 2\.5"),
        ({"max_attempts": math.nan}, ValueError, r"Retry\.max_attempts is nan"),
        ({"max_attempts": -math.inf}, ValueError, r"Retry\.max_attempts is -inf"),
        ({"max_attempts": True}, TypeError, r"Retry\.max_attempts is True"),
        ({"max_attempts": "3"}, TypeError, r"Retry\.max_attempts is '3'"),
        ({"base": -1}, ValueError, r"Retry\.base is -1"),
        ({"base": math.inf}, ValueError, r"Retry\.base is inf"),
        ({"base": math.nan}, ValueError, r"Retry\.base is nan"),
        ({"base": "5"}, TypeError, r"Retry\.base is '5'"),
        ({"base": True}, TypeError, r"Retry\.base is True"),
        ({"base": timedelta(seconds=-1)}, ValueError, r"Retry\.base is "),
        ({"cap": -1}, ValueError, r"Retry\.cap is -1"),
        ({"cap": math.nan}, ValueError, r"Retry\.cap is nan"),
        ({"factor": 0}, ValueError, r"Retry\.factor is 0"),
        ({"factor": -2}, ValueError, r"Retry\.factor is -2"),
        ({"factor": math.inf}, ValueError, r"Retry\.factor is inf"),
        ({"factor": "2"}, TypeError, r"Retry\.factor is '2'"),
        ({"jitter": "half"}, ValueError, r"Retry\.jitter is 'half': it is 'equal', 'full' or 'none'"),
        ({"jitter": 0.5}, ValueError, r"Retry\.jitter is 0\.5"),
        ({"delays": [1, -2]}, ValueError, r"Retry\.delays\[1\] is -2"),
        ({"delays": [1, "2"]}, TypeError, r"Retry\.delays\[1\] is '2'"),
        ({"delays": [math.inf]}, ValueError, r"Retry\.delays\[0\] is inf"),
        ({"delays": 30}, TypeError, r"Retry\.delays is 30"),
        ({"retry_on": "OSError"}, TypeError, r"Retry\.retry_on is 'OSError'"),
        ({"retry_on": (OSError, 5)}, TypeError, r"Retry\.retry_on is "),
        ({"retry_on": int}, TypeError, r"Retry\.retry_on is "),
        ({"give_up_on": [OSError]}, TypeError, r"Retry\.give_up_on is "),
        ({"give_up_on": OSError("x")}, TypeError, r"Retry\.give_up_on is "),
    ],
    ids=repr,
)
def test_a_retry_that_makes_no_sense_is_refused_in_one_sentence(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match="^" + message) as caught:
        Retry(**options)
    assert "\n" not in str(caught.value)


def test_a_number_too_long_for_a_float_is_refused_like_any_other_bad_duration() -> None:
    with pytest.raises(ValueError, match=r"Retry\.base is "):
        Retry(base=10**400)


def test_an_unknown_option_of_a_retry_is_refused() -> None:
    options: Any = {"max_atempts": 3}
    with pytest.raises(TypeError, match="max_atempts"):
        Retry(**options)


def test_a_retry_cannot_be_changed_and_compares_by_value() -> None:
    retry: Any = Retry(base=3)
    with pytest.raises(AttributeError):
        retry.base = 4
    assert {Retry(base=3), Retry(base=3.0), Retry(base=timedelta(seconds=3))} == {retry}


# Retry: what a job makes of it


async def starts_of(clock: FakeClock, retry: Any, watch: float) -> tuple[list[float], tinyq.Job[None]]:
    """The seconds at which a job that always fails was started, and its handle."""
    begun: list[float] = []
    zero = clock.monotonic()
    q = TinyQ(clock=clock, behind_after=math.inf)  # to look for that each few seconds of a day takes long

    @q.task(retry=retry)
    async def fail() -> None:
        begun.append(clock.monotonic() - zero)
        raise ValueError("no")

    async with q:
        job = await fail.enqueue()
        await clock.advance(watch)
    return begun, job


def gaps(moments: Sequence[float]) -> list[float]:
    return [round(b - a, 3) for a, b in itertools.pairwise(moments)]


@pytest.mark.parametrize(
    ("retry", "waits"),
    [
        pytest.param(Retry(max_attempts=6, delays=(30, 120, 600)), [30, 120, 600, 600, 600], id="list, last repeated"),
        pytest.param([30, 120, 600], [30, 120, 600], id="list alone"),
        pytest.param(Retry(max_attempts=1), [], id="one start"),
        pytest.param(False, [], id="no retry"),
        pytest.param(Retry(max_attempts=3, base=1, factor=2, jitter="none"), [1, 2], id="three starts, two delays"),
        pytest.param(Retry(max_attempts=4, base=0), [0, 0, 0], id="at once"),
        pytest.param([0, 0], [0, 0], id="list of zeros"),
        pytest.param([1.5, 3, 4.5, 6], [1.5, 3, 4.5, 6], id="linear"),
        pytest.param(Retry(max_attempts=4, base=1, factor=10, cap=20, jitter="none"), [1, 10, 20], id="capped"),
    ],
)
async def test_a_failing_job_starts_again_after_exactly_its_delays_and_is_then_dead(
    clock: FakeClock, retry: Any, waits: list[float]
) -> None:
    begun, job = await starts_of(clock, retry, DAY)
    assert gaps(begun) == waits
    assert (job.status, job.attempts) == (State.DEAD, len(waits) + 1)


async def test_by_default_a_failing_task_starts_five_times_and_waits_at_least_half_its_delays(clock: FakeClock) -> None:
    begun, job = await starts_of(clock, None, DAY)
    waits = gaps(begun)
    assert len(waits) == 4
    assert all(d / 2 <= wait <= d for wait, d in zip(waits, (5, 30, 180, 900), strict=True))
    assert job.status is State.DEAD


async def test_a_job_is_retried_without_end_if_that_is_said(clock: FakeClock) -> None:
    begun, job = await starts_of(clock, Retry(max_attempts=math.inf, base=1, factor=2, cap=3600, jitter="none"), 60 * 3600)
    assert len(begun) > 60  # beyond the 47th, where a naive backoff overflows
    assert gaps(begun)[:14] == [2**n for n in range(12)] + [3600, 3600]
    assert set(gaps(begun)[12:]) == {3600}
    assert job.status is State.PENDING or job.reason == "lost at shutdown"


async def test_a_job_that_is_not_to_be_retried_is_dead_after_one_start(clock: FakeClock) -> None:
    begun, job = await starts_of(clock, Retry(give_up_on=ValueError), DAY)
    assert len(begun) == 1
    assert job.status is State.DEAD


def test_a_start_that_was_lost_counts_and_the_job_is_due_at_once() -> None:
    row = tinyq.JobRow(b"", "t", "default", 0, 0, 0, attempts=2, claim_no=2)
    change = tinyq.decide(row, tinyq.Outcome("lost"), tinyq.Settings(retry=Retry(max_attempts=3)), 1_000)
    assert (change.state, change.attempts, change.run_at, change.lost) == (State.PENDING, 2, 1_000, 1)


def test_a_last_start_that_was_lost_leaves_the_job_dead() -> None:
    row = tinyq.JobRow(b"", "t", "default", 0, 0, 0, attempts=3, claim_no=3)
    change = tinyq.decide(row, tinyq.Outcome("lost"), tinyq.Settings(retry=Retry(max_attempts=3)), 1_000)
    assert (change.state, change.attempts, change.reason) == (State.DEAD, 3, "worker lost")


@pytest.mark.parametrize("outcome", [tinyq.Outcome("snooze", delay=5.0), tinyq.Outcome("interrupted")], ids=lambda o: o.kind)
def test_a_snooze_and_an_interruption_give_their_start_back(outcome: tinyq.Outcome) -> None:
    row = tinyq.JobRow(b"", "t", "default", 0, 0, 0, attempts=1, claim_no=1)
    change = tinyq.decide(row, outcome, tinyq.Settings(retry=Retry(max_attempts=1)), 1_000)
    assert (change.state, change.attempts) == (State.PENDING, 0)
    assert (change.snoozes, change.interruptions) == ((1, 0) if outcome.kind == "snooze" else (0, 1))


@pytest.mark.parametrize(
    ("outcome", "counter"),
    [(tinyq.Outcome("snooze", delay=5.0), {"snoozes": 1_000_000}), (tinyq.Outcome("interrupted"), {"interruptions": 20})],
    ids=["snooze", "interrupted"],
)
def test_snoozes_and_interruptions_are_bounded_by_counters_of_their_own(outcome: tinyq.Outcome, counter: dict[str, int]) -> None:
    row = tinyq.JobRow(b"", "t", "default", 0, 0, 0, attempts=1, claim_no=1, **counter)
    assert tinyq.decide(row, outcome, tinyq.Settings(), 1_000).state is State.DEAD


# State


def test_the_states_are_five_words() -> None:
    assert [state.value for state in State] == ["pending", "running", "done", "dead", "cancelled"]


def test_a_state_is_its_word() -> None:
    assert State("dead") is State.DEAD
    assert f"{State.PENDING}" == str(State.PENDING) == State.PENDING.value == "pending"


# errors


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (tinyq.NotStarted, (RuntimeError,)),
        (tinyq.AlreadyStarted, (RuntimeError,)),
        (tinyq.ShuttingDown, (RuntimeError,)),
        (tinyq.ConfigurationError, (ValueError,)),
        (tinyq.QueueFull, ()),
        (tinyq.KeyConflict, ()),
        (tinyq.UnknownTask, (LookupError,)),
        (tinyq.DuplicateTask, (ValueError,)),
        (tinyq.PayloadError, (TypeError,)),
        (tinyq.PayloadTooLarge, (ValueError,)),
        (tinyq.StoreError, ()),
        (tinyq.StoreBusy, (tinyq.StoreError,)),
        (tinyq.ProcessDied, ()),
        (tinyq.JobError, ()),
        (tinyq.JobFailed, (tinyq.JobError,)),
        (tinyq.JobCancelled, (tinyq.JobError,)),
        (tinyq.NoResult, (tinyq.JobError,)),
        (tinyq.JobNotFound, (tinyq.JobError, LookupError)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_is_a_tinyq_error_and_what_python_calls_such_a_mistake(error: type, bases: tuple[type, ...]) -> None:
    assert issubclass(error, (tinyq.TinyQError, Exception)) and tinyq.TinyQError in error.__mro__
    assert all(base in error.__mro__ for base in bases)


def test_nothing_that_steers_a_job_is_caught_as_an_error_of_tinyq() -> None:
    assert not any(issubclass(signal, tinyq.TinyQError) for signal in (tinyq.Snooze, tinyq.RetryAfter, tinyq.Cancel))
    assert all(issubclass(signal, Exception) for signal in (tinyq.Snooze, tinyq.RetryAfter, tinyq.Cancel))


def test_a_failed_job_carries_the_type_and_the_message_of_its_error() -> None:
    error = tinyq.JobFailed("ValueError", "no such order")
    assert (error.type, error.message, str(error)) == ("ValueError", "no such order", "ValueError: no such order")
    assert str(tinyq.JobFailed("ValueError")) == "ValueError"


def test_a_cancelled_job_carries_its_reason() -> None:
    assert tinyq.JobCancelled("expired").reason == str(tinyq.JobCancelled("expired")) == "expired"


# signals


@pytest.mark.parametrize("signal", [tinyq.Snooze, tinyq.RetryAfter], ids=lambda signal: signal.__name__)
def test_a_signal_takes_seconds_or_a_timedelta(signal: Any) -> None:
    assert signal(90).seconds == signal(timedelta(minutes=1, seconds=30)).seconds == 90.0
    assert signal(0).seconds == 0.0


@pytest.mark.parametrize("signal", [tinyq.Snooze, tinyq.RetryAfter], ids=lambda signal: signal.__name__)
@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("5", TypeError)])
def test_a_signal_refuses_what_is_no_time_to_wait(signal: Any, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{signal.__name__} is {value!r}"):
        signal(value)


def test_a_cancel_carries_its_reason() -> None:
    assert str(tinyq.Cancel("the order is gone")) == "the order is gone"
    assert str(tinyq.Cancel())


# counts


def test_a_count_of_stats_adds_up_what_matches() -> None:
    counts = (
        tinyq.Count(queue="emails", task="send", state=State.PENDING, durable=True, count=3),
        tinyq.Count(queue="emails", task="send", state=State.DEAD, durable=True, count=2),
        tinyq.Count(queue="emails", task="greet", state=State.PENDING, durable=False, count=4),
        tinyq.Count(queue="reports", task="send", state=State.PENDING, durable=True, count=5),
    )
    stats = tinyq.Stats(counts=counts, unknown=(), schedules=())
    assert stats.count() == 14
    assert stats.count(queue="emails") == 9
    assert stats.count(task="send", state=State.PENDING) == 8
    assert stats.count(queue="emails", task="send", state="dead") == 2
    assert stats.count(queue="none") == 0


def test_stats_become_plain_dicts_for_json() -> None:
    count = tinyq.Count(queue="emails", task="send", state=State.DEAD, durable=True, count=2)
    stats = tinyq.Stats(counts=(count,), unknown=("old",), schedules=())
    row = {"queue": "emails", "task": "send", "state": "dead", "durable": True, "count": 2, "due": 0}
    assert stats.as_dict() == {"counts": (row,), "unknown": ("old",), "schedules": (), "paused": ()}


async def test_the_current_job_is_known_only_inside_of_one() -> None:
    with pytest.raises(LookupError, match=r"current_job\(\) was called outside of a job"):
        tinyq.current_job()
    q = TinyQ()
    seen: list[tuple[str, str, int, str]] = []

    @q.task(queue="emails")
    async def look() -> None:
        current = tinyq.current_job()
        seen.append((current.id, current.queue, current.attempt, current.task))

    async with q, asyncio.timeout(10):
        job = await look.enqueue()
        await job.result()
    assert seen == [(job.id, "emails", 1, look.name)]
