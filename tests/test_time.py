"""Moments, ids and fire times: arithmetic that reads no clock."""

import asyncio
import random
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest
from clock import EPOCH

from tinyq import FOREVER, Every, SystemClock, as_datetime, as_moment, id_bytes, id_text, later, new_id

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def at(text: str) -> int:
    """The moment of an ISO time, by exact integer arithmetic."""
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


def shown(moment: int) -> str:
    return (EPOCH + timedelta(microseconds=moment)).strftime("%Y-%m-%dT%H:%M:%S.%fZ").replace(".000000", "")


# fire times


def next_fire(after: int, period: int, offset: int) -> int:
    return Every(timedelta(microseconds=period), timedelta(microseconds=offset)).next_at(after)


def missed_fires(due: int, now: int, period: int) -> int:
    """How many fire times have passed between one that is due and now."""
    return Every(timedelta(microseconds=period), timedelta(microseconds=due % period)).passed(due, now, 1)[0]


@pytest.mark.parametrize(
    ("after", "period", "offset", "expected"),
    [
        pytest.param("2026-01-01T12:00:33Z", MINUTE, 0, "2026-01-01T12:01:00Z", id="a full minute, whenever the process starts"),
        pytest.param("2026-01-01T12:01:00Z", MINUTE, 0, "2026-01-01T12:02:00Z", id="strictly later than a fire time"),
        pytest.param("2026-01-01T12:00:59.999999Z", MINUTE, 0, "2026-01-01T12:01:00Z", id="a microsecond before"),
        pytest.param("2026-01-01T12:01:00.000001Z", MINUTE, 0, "2026-01-01T12:02:00Z", id="a microsecond after"),
        pytest.param("2026-01-01T12:00:33Z", MINUTE, 15 * SECOND, "2026-01-01T12:01:15Z", id="moved by an offset"),
        pytest.param("2026-01-01T12:00:10Z", MINUTE, 15 * SECOND, "2026-01-01T12:00:15Z", id="an offset that is still to come"),
        pytest.param("2026-01-01T12:00:15Z", MINUTE, 15 * SECOND, "2026-01-01T12:01:15Z", id="at an offset, strictly later"),
        pytest.param("2026-01-01T12:59:59Z", HOUR, 0, "2026-01-01T13:00:00Z", id="a full hour"),
        pytest.param("2026-03-28T07:00:00Z", DAY, 7 * HOUR, "2026-03-29T07:00:00Z", id="a day is 24 hours over a clock change"),
        pytest.param("2026-01-01T00:00:00Z", 7 * DAY, 0, "2026-01-08T00:00:00Z", id="weeks since a Thursday in 1970"),
        pytest.param("2025-12-31T23:59:59Z", 7 * DAY, 0, "2026-01-01T00:00:00Z", id="the week over new year"),
        pytest.param("2026-01-01T12:00:00.123456Z", 100_000, 0, "2026-01-01T12:00:00.200000Z", id="a tenth of a second"),
        pytest.param("1969-12-31T23:59:30Z", MINUTE, 0, "1970-01-01T00:00:00Z", id="before the epoch"),
        pytest.param("1969-12-31T23:58:30Z", MINUTE, 0, "1969-12-31T23:59:00Z", id="further before the epoch"),
    ],
)
def test_the_next_fire_time_is_the_next_multiple_of_the_period(after: str, period: int, offset: int, expected: str) -> None:
    assert shown(next_fire(at(after), period, offset)) == expected


def test_a_fire_time_is_a_multiple_of_the_period_since_the_epoch_and_within_one_period() -> None:
    rng = random.Random(7)
    for _ in range(5_000):
        period = rng.choice([1_000, 1_234_567, SECOND, 7 * SECOND, MINUTE, HOUR, DAY, 7 * DAY])
        offset, after = rng.randrange(period), rng.randrange(at("2100-01-01T00:00:00Z"))
        fire = next_fire(after, period, offset)
        assert (fire - offset) % period == 0
        assert after < fire <= after + period


def test_processes_that_start_apart_have_the_same_fire_times() -> None:
    def first_ten(start: int) -> list[int]:
        fires = [next_fire(start, SECOND, 0)]
        while len(fires) < 10:
            fires.append(next_fire(fires[-1], SECOND, 0))
        return fires

    start = at("2026-01-01T12:00:00Z")
    assert len({tuple(first_ten(start + n * 300_000)) for n in range(4)}) == 1
    assert first_ten(start)[1:] == first_ten(start + 1_200_000)[:-1]


def test_fire_times_do_not_creep_over_a_year_of_minutes() -> None:
    fire = start = at("2026-01-01T00:00:00Z")
    for _ in range(365 * 24 * 60):
        fire = next_fire(fire + 37, MINUTE, 0)  # each found a little after the last one fired
    assert fire == start + 365 * DAY


# missed fire times


@pytest.mark.parametrize(
    ("due", "now", "period", "missed"),
    [
        pytest.param("2026-01-01T12:01:00Z", "2026-01-01T12:01:00Z", MINUTE, 0, id="on time"),
        pytest.param("2026-01-01T12:01:00Z", "2026-01-01T12:01:59.999999Z", MINUTE, 0, id="late by less than a period"),
        pytest.param("2026-01-01T12:01:00Z", "2026-01-01T12:02:00Z", MINUTE, 1, id="at the next one"),
        pytest.param("2026-01-01T12:01:00Z", "2026-01-01T12:05:10Z", MINUTE, 4, id="down from 12:00:30 to 12:05:10"),
        pytest.param("2026-01-01T12:00:03Z", "2026-01-01T12:00:07.5Z", SECOND, 4, id="the loop blocked from 2.1 to 7.5"),
        pytest.param("2026-01-01T01:00:00Z", "2026-01-01T08:30:00Z", HOUR, 7, id="suspended over a night"),
        pytest.param("2026-01-01T12:01:00Z", "2026-01-01T12:00:00Z", MINUTE, 0, id="woken early"),
        pytest.param("2026-01-01T12:01:00Z", "2025-12-31T12:00:00Z", MINUTE, 0, id="the clock was set back a day"),
    ],
)
def test_fire_times_that_passed_are_counted(due: str, now: str, period: int, missed: int) -> None:
    assert missed_fires(at(due), at(now), period) == missed


def test_what_fires_late_is_the_latest_fire_time_that_has_passed() -> None:
    rng = random.Random(3)
    for _ in range(2_000):
        period = rng.choice([SECOND, 7 * SECOND, MINUTE])
        due = next_fire(rng.randrange(10 * DAY), period, 0)
        now = due + rng.randrange(100 * period)
        fired = due + missed_fires(due, now, period) * period
        assert fired <= now < fired + period


# ids


def test_an_id_is_a_version_7_uuid_of_its_moment() -> None:
    now = at("2026-01-01T12:00:00.123456Z")
    found = uuid.UUID(bytes=new_id(now))
    assert (found.version, found.variant) == (7, uuid.RFC_4122)
    assert found.int >> 80 == now // 1_000  # milliseconds since the epoch


def test_ids_are_unique_at_one_moment() -> None:
    now = at("2026-01-01T12:00:00Z")
    assert len({new_id(now) for _ in range(100_000)}) == 100_000


def test_ids_sort_by_their_moments_to_the_microsecond() -> None:
    start = at("2026-01-01T12:00:00.998Z")
    ids = [new_id(start + n) for n in range(5_000)]
    assert ids == sorted(ids)
    assert [id_text(id) for id in ids] == sorted(id_text(id) for id in ids)


@pytest.mark.parametrize("now", ["1970-01-01T00:00:00Z", "2026-01-01T12:00:00Z", "9999-12-31T23:59:59Z"])
def test_an_id_has_16_bytes_and_a_version_whatever_the_year(now: str) -> None:
    raw = new_id(at(now))
    assert len(raw) == 16
    assert uuid.UUID(bytes=raw).version == 7


def test_the_text_of_an_id_is_that_of_a_uuid_and_leads_back() -> None:
    for n in range(100):
        raw = new_id(at("2026-01-01T12:00:00Z") + n * 997)
        assert id_text(raw) == str(uuid.UUID(bytes=raw))
        assert id_bytes(id_text(raw)) == raw
        assert id_bytes(id_text(raw).upper()) == raw
        assert id_bytes(uuid.UUID(bytes=raw).hex) == raw


@pytest.mark.parametrize("text", ["", "7", "not an id", "0" * 31, "0" * 34, "g" * 32, "-", "é" * 32])
def test_what_is_not_an_id_is_the_id_of_no_job(text: str) -> None:
    assert id_bytes(text) == b""


# moments


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(datetime(2026, 1, 6, 20, 52, tzinfo=ZoneInfo("Asia/Shanghai")), "2026-01-06T12:52:00Z", id="Shanghai"),
        pytest.param(datetime(2026, 1, 6, 20, 52, tzinfo=UTC), "2026-01-06T20:52:00Z", id="UTC"),
        pytest.param(datetime(2026, 1, 6, 20, 52, 0, 7, UTC), "2026-01-06T20:52:00.000007Z", id="microseconds"),
        pytest.param(datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=2))), "2026-03-29T00:30:00Z", id="+02:00"),
        pytest.param(datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")), "2026-10-25T00:30:00Z", id="first pass"),
        pytest.param(
            datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1), "2026-10-25T01:30:00Z", id="second pass"
        ),
        pytest.param(datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), "1969-12-31T23:59:59.999999Z", id="before the epoch"),
    ],
)
def test_an_aware_datetime_is_its_exact_moment(value: datetime, expected: str) -> None:
    assert shown(as_moment(value, "run_at")) == expected


class Undecided(tzinfo):
    """A zone that does not know its offset: what carries it is naive, by Python's own rule."""

    def utcoffset(self, _: datetime | None) -> None:
        return None

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> str:
        return "?"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(datetime(2026, 1, 6, 20, 52), id="no zone"),
        pytest.param(datetime(2026, 1, 6, 20, 52, tzinfo=Undecided()), id="a zone without an offset"),
    ],
)
def test_a_naive_datetime_is_refused_with_the_way_out(value: datetime) -> None:
    with pytest.raises(TypeError, match=r"^run_at is datetime\.datetime\(.*time zone.*datetime\.now\(UTC\)") as caught:
        as_moment(value, "run_at")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [date(2026, 1, 6), time(20, 52, tzinfo=UTC), 1_767_730_000, 1.5, "2026-01-06T20:52:00Z", timedelta(hours=1), True, b"x"],
    ids=repr,
)
def test_what_is_not_a_datetime_is_no_moment(value: object) -> None:
    with pytest.raises(TypeError, match=r"run_at is .*aware datetime"):
        as_moment(value, "run_at")


def test_a_moment_leads_back_to_an_aware_datetime() -> None:
    value = datetime(2026, 1, 6, 20, 52, 1, 234_567, UTC)
    back = as_datetime(as_moment(value, "run_at"))
    assert back == value
    assert back is not None and back.utcoffset() == timedelta(0)
    assert as_datetime(None) is None


def test_a_datetime_beyond_the_last_year_of_utc_can_still_be_shown() -> None:
    value = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=-5)))
    assert as_datetime(as_moment(value, "run_at")) == as_datetime(FOREVER)


# later


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, 0), (0.000001, 1), (0.1, 100_000), (1.5, 1_500_000), (86_400.0, DAY), (30 * 86_400.0, 30 * DAY), (0.3, 300_000)],
)
def test_later_counts_in_whole_microseconds(seconds: float, expected: int) -> None:
    start = at("2026-01-01T12:00:00Z")
    moment = later(start, seconds)
    assert moment - start == expected
    assert type(moment) is int


@pytest.mark.parametrize("seconds", [2.5e11, 1e12, 1e18, 1e300, float("inf"), timedelta.max.total_seconds()])
def test_later_than_there_are_datetimes_is_the_last_second_there_is(seconds: float) -> None:
    assert later(at("2026-01-01T12:00:00Z"), seconds) == FOREVER


def test_later_never_passes_the_last_second_there_is() -> None:
    just_before = FOREVER - 10 * SECOND
    assert later(just_before, 5) == FOREVER - 5 * SECOND
    assert later(just_before, 11) == FOREVER
    assert later(FOREVER, 1) == FOREVER


def test_the_last_second_there_is_can_be_shown() -> None:
    assert as_datetime(FOREVER) == datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_delays_added_one_by_one_lose_nothing() -> None:
    moment = start = at("2026-01-01T12:00:00Z")
    for seconds in (1.5, 3.0, 4.5, 6.0):
        moment = later(moment, seconds)
    assert moment - start == 15 * SECOND


# waiting


async def test_a_wait_is_over_once_it_was_woken_even_if_that_is_taken_back_at_once() -> None:
    wake = asyncio.Event()

    def wake_in_passing() -> None:
        wake.set()
        wake.clear()

    asyncio.get_running_loop().call_later(0.01, wake_in_passing)
    async with asyncio.timeout(20):
        await SystemClock().wait(wake, 3600)


async def test_a_wait_for_a_moment_is_not_over_before_it() -> None:
    for seconds in (0.001, 0.06):
        began = asyncio.get_running_loop().time()
        await SystemClock().wait(asyncio.Event(), seconds)
        assert asyncio.get_running_loop().time() >= began + seconds - 1e-6
