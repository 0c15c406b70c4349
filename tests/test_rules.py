"""When things happen again and again: `Every` and `Cron` as values, against tables and against a walk minute by minute."""

import itertools
import pickle
import random
import sys
import time
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from clock import EPOCH

import tinyq
from tinyq import FOREVER, Cron, Every, rule_from

SECOND = 1_000_000
MINUTE = 60 * SECOND
DAY = 86_400 * SECOND


def at(text: str) -> int:
    """The moment of an ISO time; a date alone is its midnight in UTC."""
    return (datetime.fromisoformat(text if "T" in text else f"{text}T00:00Z") - EPOCH) // timedelta(microseconds=1)


def shown(moment: int) -> str:
    return (EPOCH + timedelta(microseconds=moment)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def fires(rule: Cron | Every, after: int, until: int) -> list[int]:
    """All fire times later than `after` and not later than `until`, by stepping forward."""
    found = []
    while (after := rule.next_at(after)) <= until:
        found.append(after)
    return found


def first(rule: Cron | Every, after: str, count: int) -> list[str]:
    moment, found = at(after), []
    for _ in range(count):
        moment = rule.next_at(moment)
        found.append(shown(moment)[:16] + "Z")
    return found


# changes of the clock


# what fires in the 24 hours of a day in UTC
CHANGES = [
    ("30 2 * * *", "Europe/Berlin", "2026-03-29", "01:00"),
    ("0 2 * * *", "Europe/Berlin", "2026-03-29", "01:00"),
    ("59 2 * * *", "Europe/Berlin", "2026-03-29", "01:00"),
    ("0 3 * * *", "Europe/Berlin", "2026-03-29", "01:00"),
    ("0,30 2 * * *", "Europe/Berlin", "2026-03-29", "01:00"),
    ("30 2,3 * * *", "Europe/Berlin", "2026-03-29", "01:00 01:30"),
    ("*/15 2 * * *", "Europe/Berlin", "2026-03-29", ""),
    ("* 2 * * *", "Europe/Berlin", "2026-03-29", ""),
    ("30 */2 * * *", "Europe/Berlin", "2026-03-29", "02:30 04:30 06:30 08:30 10:30 12:30 14:30 16:30 18:30 20:30 22:30"),
    ("30 * * * *", "Europe/Berlin", "2026-03-29", " ".join(f"{hour:02}:30" for hour in range(24))),
    ("30 2 * * *", "Europe/Berlin", "2026-10-25", "00:30"),
    ("0 3 * * *", "Europe/Berlin", "2026-10-25", "02:00"),
    ("30 * * * *", "Europe/Berlin", "2026-10-25", " ".join(f"{hour:02}:30" for hour in range(24))),
    ("*/15 2 * * *", "Europe/Berlin", "2026-10-25", "00:00 00:15 00:30 00:45 01:00 01:15 01:30 01:45"),
    ("30 */2 * * *", "Europe/Berlin", "2026-10-25", "00:30 01:30 " + " ".join(f"{hour:02}:30" for hour in range(3, 24, 2))),
    ("30 1 * * *", "Europe/London", "2026-03-29", "01:00"),
    ("30 1 * * *", "Europe/London", "2026-10-25", "00:30"),
    # half an hour: 2:00 to 2:30 is skipped, 1:30 to 2:00 is repeated
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03", "15:30"),
    ("0 */2 * * *", "Australia/Lord_Howe", "2026-10-03", "01:30 03:30 05:30 07:30 09:30 11:30 13:30 17:00 19:00 21:00 23:00"),
    ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04", "14:45"),
    ("*/15 1 * * *", "Australia/Lord_Howe", "2026-04-04", "14:00 14:15 14:30 14:45 15:00 15:15"),
    ("0 */6 * * *", "Australia/Lord_Howe", "2026-04-04", "01:00 07:00 13:00 19:30"),
    ("0 2-4/2 * * *", "Australia/Lord_Howe", "2026-04-04", "15:30 17:30"),
    ("*/60 2 * * *", "Australia/Lord_Howe", "2026-04-04", "15:30"),
    # two hours
    ("30 1 * * *", "Antarctica/Troll", "2026-03-29", "01:00 23:30"),
    ("30 */6 * * *", "Antarctica/Troll", "2026-10-25", "06:30 12:30 18:30"),
    # midnight is skipped
    ("0 0 * * *", "America/Sao_Paulo", "2018-11-04", "03:00"),
    ("*/30 0 * * *", "America/Sao_Paulo", "2018-11-04", ""),
    ("*/30 0 * * sun", "America/Sao_Paulo", "2018-11-04", ""),
    ("0 0 * * *", "Africa/Cairo", "2024-04-25", "22:00"),
    ("5 0 29 3 *", "Asia/Beirut", "2026-03-28", "22:00"),
    # midnight comes twice
    ("0 0 * * *", "America/Havana", "2026-11-01", "04:00"),
    ("*/30 0 * * *", "America/Havana", "2026-11-01", "04:00 04:30 05:00 05:30"),
    # most of Saturday's last hour comes twice, Sunday's first minute too
    ("*/20 23 * * sat", "America/St_Johns", "2006-10-29", "01:30 01:50 02:10 02:50 03:10"),
    ("0 0 * * *", "America/St_Johns", "2006-10-29", "02:30"),
    # there was no 30 December 2011
    ("0 12 * * *", "Pacific/Apia", "2011-12-29", "22:00"),
    ("0 12 * * *", "Pacific/Apia", "2011-12-30", "10:00 22:00"),
    ("* 12 30 12 *", "Pacific/Apia", "2011-12-30", ""),
    # summer time is interrupted
    ("30 2 * * *", "Africa/Casablanca", "2026-02-15", "01:30"),
    ("30 2 * * *", "Africa/Casablanca", "2026-03-22", "02:00"),
    ("0 0 * * *", "America/Santiago", "2026-09-06", "04:00"),
    ("30 0 * * *", "Atlantic/Azores", "2026-03-29", "01:00"),
    ("30 0 * * *", "Atlantic/Azores", "2026-10-25", "00:30"),
    # offsets with seconds
    ("0 12 * * *", "Africa/Monrovia", "1960-05-01", "12:44:30"),
    ("30 0 * * *", "Africa/Monrovia", "1972-01-07", "00:44:30"),
    ("*/20 0 * * *", "Africa/Monrovia", "1972-01-07", ""),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "tz", "day", "expected"), CHANGES, ids=lambda value: value[:24])
def test_fixed_times_fire_once_whatever_the_clock_does_and_the_others_follow_it(
    expression: str, tz: str, day: str, expected: str
) -> None:
    rule = Cron(expression, tz)
    found = fires(rule, at(day) - 1, at(day) + DAY - 1)
    assert [shown(moment)[11:19].removesuffix(":00") for moment in found] == expected.split()
    assert rule.passed(at(day) - 1, at(day) + DAY - 1, 100) == (len(found), found)


@pytest.mark.parametrize(
    ("expression", "tz", "after", "expected"),
    [
        ("30 2 * * *", "Europe/Berlin", "2026-03-27T23:00Z", "2026-03-28T01:30Z 2026-03-29T01:00Z 2026-03-30T00:30Z"),
        ("*/15 2 * * *", "Europe/Berlin", "2026-03-28T01:45Z", "2026-03-30T00:00Z"),
        ("30 */2 * * *", "Europe/Berlin", "2026-03-28T23:00Z", "2026-03-28T23:30Z 2026-03-29T02:30Z 2026-03-29T04:30Z"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T10:00Z", "2026-10-25T00:30Z 2026-10-26T01:30Z"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:59:59Z", "2026-10-26T01:30Z"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:15Z", "2026-10-26T01:30Z"),  # a quarter past two, for the second time
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:30Z", "2026-10-26T01:30Z"),
        ("15 * 25 10 *", "Europe/Berlin", "2026-10-25T00:15Z", "2026-10-25T01:15Z"),
        ("0 0 * * *", "US/Pacific", "2022-03-13T08:00Z", "2022-03-14T07:00Z"),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T03:00Z", "2018-11-04T03:00Z 2018-11-05T02:00Z"),
        ("0 0 1 1 *", "Australia/Lord_Howe", "2026-01-01", "2026-12-31T13:00Z"),
    ],
)
def test_the_next_fire_time_is_always_later(expression: str, tz: str, after: str, expected: str) -> None:
    assert first(Cron(expression, tz), after, len(expected.split())) == expected.split()


# the calendar


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 0 13 * 5", "2026-01-01", "2026-01-02 2026-01-09 2026-01-13 2026-01-16"),
        ("0 0 1,15 * 5", "2026-01-01", "2026-01-02 2026-01-09 2026-01-15 2026-01-16"),
        ("0 0 */2 * 1", "2026-01-01", "2026-01-05 2026-01-19 2026-02-09 2026-02-23"),
        ("0 0 1-31/2 * 1", "2026-01-01", "2026-01-03 2026-01-05 2026-01-07 2026-01-09"),
        ("0 0 29 2 1", "2026-01-01", "2026-02-02 2026-02-09 2026-02-16 2026-02-23"),
        ("0 0 30 2 1", "2026-01-01", "2026-02-02 2026-02-09 2026-02-16 2026-02-23"),
        ("0 0 31 2 0-7", "2026-01-31", "2026-02-01 2026-02-02"),
        ("0 0 31 * *", "2026-01-01", "2026-01-31 2026-03-31 2026-05-31 2026-07-31"),
        ("0 0 29 2 *", "2026-01-01", "2028-02-29 2032-02-29 2036-02-29"),
        ("0 0 29 2 *", "2096-03-01", "2104-02-29"),
        ("0 0 29 2 */7", "2088-03-01", "2128-02-29 2156-02-29"),
        ("0 0 */31 2 *", "2026-01-01", "2026-02-01 2027-02-01"),
        ("0 0 * * 0", "2026-01-01", "2026-01-04"),
        ("0 0 * * 7", "2026-01-01", "2026-01-04"),
        ("0 0 * * Sun", "2026-01-01", "2026-01-04"),
        ("0 0 * * 5-7", "2026-01-01", "2026-01-02 2026-01-03 2026-01-04 2026-01-09"),
        ("0 0 * * 1-5/2", "2026-01-01", "2026-01-02 2026-01-05 2026-01-07"),
        ("0 0 * * MON-fri/2", "2026-01-01", "2026-01-02 2026-01-05 2026-01-07"),
        ("0 0 * * 0-7/2", "2026-01-01", "2026-01-03 2026-01-04 2026-01-06"),
        ("0 0 1 jan-MAR *", "2026-01-01", "2026-02-01 2026-03-01 2027-01-01"),
        ("@yearly", "2026-01-01", "2027-01-01"),
        ("@annually", "2026-01-01", "2027-01-01"),
        ("@monthly", "2026-01-01", "2026-02-01"),
        ("@weekly", "2026-01-01", "2026-01-04"),
        ("@Daily", "2026-01-01", "2026-01-02"),
        (" @midnight\n", "2026-01-01", "2026-01-02"),
    ],
)
def test_a_date_is_what_the_day_month_and_weekday_fields_say(expression: str, after: str, expected: str) -> None:
    assert first(Cron(expression), after, len(expected.split())) == [f"{day}T00:00Z" for day in expected.split()]


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("*/7 * * * *", "2026-01-01T00:45Z", "00:49 00:56 01:00 01:07"),
        ("@hourly", "2026-01-01T00:45Z", "01:00 02:00"),
        ("5-5/1 * * * *", "2026-01-01T00:45Z", "01:05 02:05"),
        ("05 03 * * *", "2026-01-01T00:45Z", "03:05 03:05"),
        ("*/60 */24 * * *", "2026-01-01T00:45Z", "00:00"),
        ("0,*/20,7-9 * * * *", "2026-01-01T00:00Z", "00:07 00:08 00:09 00:20 00:40 01:00"),
        (" \t30\t2  * * *  \r\n", "2026-01-01T00:00Z", "02:30"),
    ],
)
def test_a_time_is_what_the_minute_and_hour_fields_say(expression: str, after: str, expected: str) -> None:
    assert [text[11:16] for text in first(Cron(expression), after, len(expected.split()))] == expected.split()


def test_either_day_field_is_enough_unless_one_begins_with_a_star() -> None:
    june = fires(Cron("48 14 31 jun sun"), at("2026-01-01"), at("2026-12-31"))
    assert [shown(moment)[:16] for moment in june] == [f"2026-06-{day:02}T14:48" for day in (7, 14, 21, 28)]
    december = fires(Cron("15 16 12 12 3"), at("2014-01-01"), at("2014-12-31T23:59Z"))
    assert [int(shown(moment)[8:10]) for moment in december] == [3, 10, 12, 17, 24, 31]


def test_a_fire_time_is_at_second_zero_and_later_than_any_fraction_before_it() -> None:
    rule = Cron("30 2 * * *")
    fire = at("2026-01-01T02:30Z")
    assert [rule.next_at(fire - 1), rule.next_at(fire), rule.next_at(fire + 1)] == [fire, fire + DAY, fire + DAY]
    assert rule.passed(fire - 1, fire, 5) == (1, [fire])
    assert rule.passed(fire, fire + DAY - 1, 5) == (0, [])
    assert rule.passed(fire + DAY, fire, 5) == (0, [])


# what is refused


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("5/15 * * * *", ["minute", "'5/15'", "5-59/15"]),
        ("* mon/2 * * *", ["hour", "'mon/2'", "0 to 23"]),
        ("* * * * mon/2", ["weekday", "'mon/2'", "1-7/2"]),
        ("*/0 * * * *", ["minute", "'*/0'", "step"]),
        ("* */0000000000 * * *", ["hour", "step"]),
        ("*/90 * * * *", ["minute", "'*/90'", "only 0", "every()"]),
        ("* */25 * * *", ["hour", "'*/25'", "only 0"]),
        ("* 8-10/4 * * *", ["hour", "'8-10/4'", "only 8"]),
        ("*/99999999999999999999 * * * *", ["minute", "only 0"]),
        ("*/ * * * *", ["minute", "'*/'", "step"]),
        ("*/5/2 * * * *", ["minute", "'*/5/2'", "step"]),
        ("*/-5 * * * *", ["minute", "'*/-5'", "step"]),
        ("/5 * * * *", ["minute", "'/5'"]),
        ("5-1 * * * *", ["minute", "'5-1'", "backwards", "5-59,0-1"]),
        ("* 22-6/2 * * *", ["hour", "'22-6/2'", "backwards"]),
        ("* * * * FRI-SUN", ["weekday", "'FRI-SUN'", "backwards", "5-7"]),
        ("* * * nov-feb *", ["month", "'nov-feb'", "backwards", "11-12,1-2"]),
        ("* * * JANUARY *", ["month", "'JANUARY'", "jan feb"]),
        ("* * * * sunday", ["weekday", "'sunday'", "sun mon"]),
        ("jan * * * *", ["minute", "'jan'"]),
        ("* * jan * *", ["day field", "'jan'"]),
        ("1,,2 * * * *", ["minute", "''", "incomplete"]),
        ("1, * * * *", ["minute", "''", "incomplete"]),
        (", * * * *", ["minute", "''", "incomplete"]),
        ("1- * * * *", ["minute", "'1-'", "incomplete"]),
        ("-5 * * * *", ["minute", "'-5'", "incomplete"]),
        ("1-2-3 * * * *", ["minute", "'1-2-3'"]),
        ("*-5 * * * *", ["minute", "'*-5'"]),
        ("** * * * *", ["minute", "'**'"]),
        ("60 * * * *", ["minute", "'60'", "0-59"]),
        ("* 24 * * *", ["hour", "'24'", "0-23"]),
        ("* * 0 * *", ["day field", "'0'", "1-31"]),
        ("* * 32 * *", ["day field", "'32'", "1-31"]),
        ("* * * 0 *", ["month", "'0'", "1-12"]),
        ("* * * 13 *", ["month", "'13'", "1-12"]),
        ("* * * * 8", ["weekday", "'8'", "0-7"]),
        ("* * * * 5-8", ["weekday", "'5-8'", "0-7"]),
        (f"{'9' * 5000} * * * *", ["minute", "0-59"]),
        ("\u0663 * * * *", ["minute", "'\u0663'"]),
        ("\uff13 * * * *", ["minute", "'\uff13'"]),
        ("*/\u0663 * * * *", ["minute", "step"]),
        ("+5 * * * *", ["minute", "'+5'"]),
        ("5_0 * * * *", ["minute", "'5_0'"]),
        ("1.5 * * * *", ["minute", "'1.5'"]),
        ("* * L * *", ["day field", "'L'", "not known"]),
        ("* * 15W * *", ["day field", "'15W'", "not known"]),
        ("* * * * 5#3", ["weekday", "'5#3'", "not known"]),
        ("* * * * 5L", ["weekday", "'5L'", "not known"]),
        ("* * ? * *", ["day field", "'?'", "not known"]),
        ("0 0\xa0* * *", ["4 fields", "five"]),
        ("0 0\n* * *", ["4 fields", "five"]),
        ("* * * * * *", ["6 fields", "five", "seconds"]),
        ("0 0 0 1 1 * 2026", ["7 fields", "five"]),
        ("* * * *", ["4 fields", "five"]),
        ("", ["0 fields", "five"]),
        ("  \n", ["0 fields", "five"]),
        ("@reboot", ["@reboot", "immediate"]),
        ("@every 5m", ["@every 5m", "@hourly"]),
        ("@daily *", ["@daily", "@hourly"]),
        ("0 0 31 2 *", ["never", "day", "'31'", "month '2'"]),
        ("0 0 30 2 *", ["never", "day", "'30'"]),
        ("0 0 31 4,6 *", ["never", "day", "'31'", "'4,6'"]),
        ("0 0 30-31 feb *", ["never", "day", "'30-31'"]),
        ("0 0 31 2,4,6,9,11 */2", ["never", "day", "'31'"]),
        ("*/5 * 30,31 2 *", ["never", "day"]),
    ],
)  # fmt: skip
def test_an_expression_that_means_nothing_certain_is_refused_by_field_and_reason(expression: str, words: Sequence[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Cron(expression)
    message = str(caught.value)
    assert [word for word in (*words, "cron ") if word not in message] == []
    assert len(message) < 500


@pytest.mark.parametrize("expression", [None, 5, b"* * * * *", ["*"] * 5])
def test_an_expression_is_text(expression: Any) -> None:
    with pytest.raises(TypeError, match="cron is "):
        Cron(expression)


@pytest.mark.parametrize(
    "tz",
    ["UTC+3", "CEST", "", "Europe", "Nowhere/City", "../UTC", "/etc/localtime", "localtime", "right/UTC", "posix/Europe/Berlin",
     "zone.tab", "Europe/Berlin\0", " UTC", "\ud800", "x" * 5000],
)  # fmt: skip
def test_what_is_not_the_same_zone_on_every_host_is_refused(tz: str) -> None:
    with pytest.raises(ValueError, match=r"tz is .*Europe/Berlin"):
        Cron("* * * * *", tz)


@pytest.mark.parametrize("tz", [None, UTC, timezone(timedelta(hours=2)), 3600, datetime.now().astimezone().tzinfo], ids=repr)
def test_a_zone_without_a_name_is_refused(tz: Any) -> None:
    with pytest.raises(TypeError, match=r"tz is .*Europe/Berlin"):
        Cron("* * * * *", tz)


def test_a_zone_may_be_given_as_a_zoneinfo_that_has_a_key() -> None:
    assert Cron("0 0 * * *", ZoneInfo("Asia/Tokyo")) == Cron("0 0 * * *", "Asia/Tokyo")
    with open(f"{zoneinfo.TZPATH[0]}/Asia/Tokyo", "rb") as file:
        keyless = ZoneInfo.from_file(file)
    with pytest.raises(ValueError, match="tz is "):
        Cron("0 0 * * *", keyless)


def test_the_zone_of_the_host_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    after = datetime(2026, 1, 1, 5, tzinfo=UTC)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert Cron("0 0 * * *").next(after).isoformat() == "2026-01-02T00:00:00+00:00"
        assert Cron("0 0 * * *", "Europe/Berlin").next(after).isoformat() == "2026-01-01T23:00:00+00:00"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_without_a_time_zone_database_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ["tzdata", *(name for name in sys.modules if name.startswith("tzdata."))]:
        monkeypatch.setitem(sys.modules, module, None)
    paths = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    try:
        with pytest.raises(ValueError, match="pip install tzdata"):
            Cron("* * * * *", "Europe/Berlin")
        assert Cron("* * * * *").tz == "UTC"  # which needs none
    finally:
        zoneinfo.reset_tzpath(to=paths)


def test_without_cronsim_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    tinyq.timetable.cache_clear()
    with pytest.raises(ImportError, match=r"tinyq-py\[cron\].*pip install cronsim"):
        Cron("* * * * *")
    with pytest.raises(ValueError, match="never fires"):  # found without a search through the calendar
        Cron("0 0 30 2 *")


# values


def test_rules_are_equal_by_what_they_say() -> None:
    assert Every(60) == Every(60.0) == Every(timedelta(minutes=1)) == Every(60, offset=120)
    assert Cron(" 0\t0 * * MON \n") == Cron("0 0 * * mon", tz="UTC") == Cron("0 0 * * mon")
    assert Cron("@daily") == Cron("0 0 * * *")
    assert (
        len({Every(60), Every(60, 1), Every(61), Cron("* * * * *"), Cron("* * * * *", "Asia/Tokyo"), Every(timedelta(0, 60))})
        == 5
    )
    assert Every(60) != Cron("* * * * *")


def test_a_rule_can_be_read_but_not_changed() -> None:
    rules: list[Any] = [Every(60, timedelta(seconds=5)), Cron("30 2 * * *", "Europe/Berlin")]
    assert [repr(rule) for rule in rules] == [
        "Every(seconds=60.0, offset=5.0)",
        "Cron(expression='30 2 * * *', tz='Europe/Berlin')",
    ]
    for rule in rules:
        with pytest.raises(AttributeError, match="cannot be changed"):
            rule.tz = "UTC"
        assert eval(repr(rule)) == rule
        assert pickle.loads(pickle.dumps(rule)) == rule


def test_another_one_with_a_change_is_checked_and_computes_with_it() -> None:
    assert Every(60, 15).but(seconds=10) == Every(10, 5)
    assert Cron("0 0 * * *").but(tz="Asia/Tokyo").next_at(0) == at("1970-01-01T15:00Z")
    with pytest.raises(ValueError, match="never"):
        Cron("0 0 * * *").but(expression="0 0 31 2 *")


@pytest.mark.parametrize(
    "rule",
    [Every(60), Every(0.1, 0.05), Every(1e-3), Every(1 / 3), Every(9e9, 8.9e9), Every(86400.000001, 0.000001), Cron("@hourly"),
     Cron("*/5 8-18/2 1,15 JAN-mar mon,7", "America/Argentina/Buenos_Aires")],
    ids=repr,
)  # fmt: skip
def test_a_rule_is_what_its_text_says(rule: Every | Cron) -> None:
    again = rule_from(rule.as_text())
    assert again == rule
    assert again.as_text() == rule.as_text()
    assert again.next_at(123) == rule.next_at(123)


def test_the_text_of_a_rule_can_be_read() -> None:
    assert Every(60).as_text() == "every 60.0 0.0"
    assert Cron("30 2 * * *", "Europe/Berlin").as_text() == "cron Europe/Berlin 30 2 * * *"


@pytest.mark.parametrize("text", ["", "every", "every 60", "every x y", "cron", "cron UTC", "cron UTC * *", "solar 1 2"])
def test_the_text_of_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        rule_from(text)


# every


def test_an_interval_counts_elapsed_time_over_a_change_of_the_clocks() -> None:
    rule = Every(86400, offset=timedelta(hours=7))
    after = datetime(2026, 3, 28, 8, tzinfo=ZoneInfo("Europe/Berlin"))
    assert rule.next(after).isoformat() == "2026-03-29T07:00:00+00:00"  # nine by the clock


@pytest.mark.parametrize("rule", [Every(0.001), Every(1), Every(60, 15), Every(1 / 3, 0.1), Every(604800), Every(9e9)], ids=repr)
def test_an_interval_passes_as_many_fire_times_as_it_would_have_stepped_through(rule: Every) -> None:
    start = at("2026-01-01T12:00:33Z")
    for length in (0, 1, 999, 1_000, SECOND, MINUTE // 50, 10 * MINUTE if rule.seconds >= 1 else 5_000):
        found = fires(rule, start, start + length)
        for most in (0, 1, 3, 10_000):
            assert rule.passed(start, start + length, most) == (len(found), found[max(0, len(found) - most) :])


def test_an_interval_does_not_count_its_way_through_a_long_absence() -> None:
    count, newest = Every(0.001).passed(0, at("2026-01-01"), 2)
    assert count == at("2026-01-01") // 1000
    assert newest == [at("2026-01-01") - 1000, at("2026-01-01")]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0,), ValueError, "every is 0: it must be greater than zero"),
        ((-1,), ValueError, "every is -1: it must be greater than zero"),
        ((float("nan"),), ValueError, "every is nan"),
        ((float("inf"),), ValueError, "every is inf"),
        ((0.0009,), ValueError, "every is 0.0009: the shortest period is 0.001 s"),
        ((1e10,), ValueError, "every is 10000000000.0: the longest is 9000000000 s"),
        ((1e305,), ValueError, "every is 1e.305: the longest"),
        ((True,), TypeError, "every is True: give seconds"),
        (("60",), TypeError, "every is '60': give seconds"),
        ((None,), TypeError, "every is None: give seconds"),
        ((60, -1), ValueError, "offset is -1: it must not be negative"),
        ((60, "5"), TypeError, "offset is '5': give seconds"),
        ((60, 1e305), ValueError, "offset is 1e.305: the longest"),
    ],
)
def test_an_interval_is_a_duration(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Every(*arguments)


# next


@pytest.mark.parametrize("rule", [Every(60), Cron("* * * * *", "Europe/Berlin")], ids=["every", "cron"])
def test_next_takes_and_gives_datetimes_that_have_a_zone(rule: Any) -> None:
    after = datetime(2026, 1, 6, 20, 52, 30, tzinfo=ZoneInfo("Asia/Shanghai"))
    assert rule.next(after) == datetime(2026, 1, 6, 12, 53, tzinfo=UTC)
    assert rule.next(after).tzinfo is UTC
    with pytest.raises(TypeError, match=r"after is .*without a time zone: use datetime.now\(UTC\)"):
        rule.next(datetime(2026, 1, 6, 20, 52))
    with pytest.raises(TypeError, match="after is 5"):
        rule.next(5)


@pytest.mark.parametrize(
    "rule",
    [Every(60), Every(9e9), Cron("0 0 1 1 *"), Cron("*/5 0 1 1 *", "Asia/Tokyo"), Cron("0 0 1 1 *", "Asia/Tokyo")],
    ids=repr,
)
def test_time_ends_with_the_year_9999(rule: Every | Cron) -> None:
    end = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    with pytest.raises(OverflowError, match="year 10,000"):
        rule.next(end)
    assert rule.next_at(FOREVER) == FOREVER
    assert rule.next_at(at("0001-01-01T00:00Z")) > at("0001-01-01T00:00Z")
    assert rule.passed(at("9990-01-01"), FOREVER, 1)[0] >= (0 if rule == Every(9e9) else 9)
    assert rule.passed(at("0001-01-01"), at("0001-01-02"), 3)[0] >= 0


def test_a_long_absence_costs_no_walk_through_it() -> None:
    rule = Cron("* * * * *", "Europe/Berlin")
    after, now = at("2016-01-01"), at("2026-01-01T00:00:30Z")
    assert rule.passed(after, now, 2) == ((now - after) // MINUTE, [at("2025-12-31T23:59Z"), at("2026-01-01")])


# the property: cron agrees with a walk through the minutes


class Walk(NamedTuple):
    """Minutes of UTC in a row, each with all times that the zone's clock passed to get there (skipped ones too), which is the
    reading itself at the end; and whether the clock had read that before."""

    minutes: list[tuple[int, list[datetime], bool]]

    @classmethod
    def of(cls, zone: ZoneInfo, start: datetime, days: int) -> "Walk":
        minutes: list[tuple[int, list[datetime], bool]] = []
        seen: set[datetime] = set()
        before: datetime | None = None
        for i in range(-2 * 1440, days * 1440):
            moment = start + timedelta(minutes=i)
            reading = moment.astimezone(zone).replace(tzinfo=None, fold=0)
            passed = [reading]
            while before is not None and passed[0] - before > timedelta(minutes=1):
                passed.insert(0, passed[0] - timedelta(minutes=1))
            if i >= 0:
                minutes.append(((moment - EPOCH) // timedelta(microseconds=1), passed, reading in seen))
            seen.add(reading)
            before = reading
        return cls(minutes)

    def fires(self, fields: Sequence[str], values: Sequence[set[int]]) -> list[int]:
        minutes, hours, days, months, weekdays = values

        def matches(reading: datetime) -> bool:
            if reading.minute not in minutes or reading.hour not in hours or reading.month not in months:
                return False
            day, weekday = reading.day in days, bool({reading.isoweekday(), reading.isoweekday() % 7} & weekdays)
            return day and weekday if "*" in (fields[2][0], fields[4][0]) else day or weekday

        if "*" in (fields[0][0], fields[1][0]):
            return [moment for moment, passed, _ in self.minutes if matches(passed[-1])]
        return [moment for moment, passed, again in self.minutes if not again and any(map(matches, passed))]


def make_field(rng: random.Random, low: int, high: int, star: float) -> tuple[str, set[int]]:
    """The text of a field, and the values that it means."""
    if rng.random() < star:
        return "*", set(range(low, high + 1))
    texts, values = [], set()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        first = rng.randint(low, high)
        last = rng.randint(first, high)
        step = rng.randint(1, last - first + 1)
        wide = rng.randint(1, (high - low + 1) // 2)
        text, meant = rng.choice([
            (f"{first}", {first}),
            (f"{first}", {first}),
            (f"{first}-{last}", set(range(first, last + 1))),
            (f"{first}-{last}/{step}", set(range(first, last + 1, step))),
            (f"*/{wide}", set(range(low, high + 1, wide))),
        ])  # fmt: skip
        texts.append(text)
        values |= meant
    return ",".join(texts), values


def make_expression(rng: random.Random, month: int, night: bool) -> tuple[list[str], list[set[int]]]:
    """Five fields and their values; most fire in this month and, if asked for, in the hours in which clocks change."""
    hours = rng.choice(["0", "1", "2", "3", "23", "0-3", "1,2", "22-23"])
    made = [
        make_field(rng, 0, 59, 0.1),
        (hours, hours_of(hours)) if night else make_field(rng, 0, 23, 0.2),
        make_field(rng, 1, 31, 0.6),
        (str(month), {month}) if rng.random() < 0.2 else make_field(rng, 1, 12, 0.8),
        make_field(rng, 0, 7, 0.6),
    ]
    return [text for text, _ in made], [values for _, values in made]


def hours_of(text: str) -> set[int]:
    ends = [int(end) for end in text.replace(",", "-").split("-")]
    return set(range(ends[0], ends[-1] + 1))


ZONES = [
    "UTC", "Europe/Berlin", "Europe/London", "US/Pacific", "Australia/Lord_Howe", "America/Santiago", "Africa/Casablanca",
    "Pacific/Apia", "Antarctica/Troll", "Atlantic/Azores", "Asia/Beirut", "America/Sao_Paulo", "Africa/Cairo", "America/Havana",
    "America/St_Johns", "Asia/Gaza", "Asia/Tehran", "Asia/Pyongyang", "America/Caracas", "Pacific/Kwajalein", "Pacific/Chatham",
]  # fmt: skip


def changes(zone: ZoneInfo, year: int) -> list[datetime]:
    """The first midnights in UTC after this zone's changes of offset in a year."""
    days = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=i) for i in range(366)]
    offsets = [day.astimezone(zone).utcoffset() for day in days]
    return [day for day, before, after in zip(days[1:], offsets, offsets[1:], strict=False) if before != after]


def compare(rng: random.Random, walk: Walk, zone: str, expressions: int, night: bool) -> int:
    """Hold this many expressions against a walk; how many fire times were compared."""
    start, end = walk.minutes[0][0] - 1, walk.minutes[-1][0]
    compared = 0
    for _ in range(expressions):
        fields, values = make_expression(rng, (EPOCH + timedelta(microseconds=end)).month, night)
        try:
            rule = Cron(" ".join(fields), zone)
        except ValueError as error:
            assert "never fires" in str(error)
            continue
        expected = walk.fires(fields, values)
        compared += len(expected)
        assert [shown(moment) for moment in fires(rule, start, end)] == [shown(moment) for moment in expected], rule
        for _ in range(5):
            after, now = sorted(rng.randint(start, end) for _ in range(2))
            between = [moment for moment in expected if after < moment <= now]
            most = rng.choice([0, 1, 3, 50])
            assert rule.passed(after, now, most) == (len(between), between[max(0, len(between) - most) :]), (
                rule,
                after,
                now,
                most,
            )
            later = next((moment for moment in expected if moment > after), None)
            assert rule.next_at(after) == later if later is not None else rule.next_at(after) > end, (rule, after)
    return compared


def test_cron_agrees_with_a_walk_through_the_minutes_around_changes_of_the_clock() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, compared = random.Random(seed), 0
    for _ in range(8):
        zone, year = rng.choice(ZONES), rng.randint(1975, 2040)
        for midnight in changes(ZoneInfo(zone), year)[:2] or [datetime(year, 6, 1, tzinfo=UTC)]:
            walk = Walk.of(ZoneInfo(zone), midnight - timedelta(days=2), 4)
            compared += compare(rng, walk, zone, 8, night=rng.random() < 0.7)
    assert compared > 100


def test_cron_agrees_with_a_walk_through_the_minutes_from_one_change_of_the_clock_to_the_next() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    zone = rng.choice(["Europe/Berlin", "US/Pacific", "Australia/Lord_Howe", "Africa/Casablanca", "America/Havana"])
    year = rng.randint(2020, 2036)
    found = changes(ZoneInfo(zone), year) + changes(ZoneInfo(zone), year + 1)
    one, other = min(itertools.pairwise(found), key=lambda pair: pair[1] - pair[0])
    walk = Walk.of(ZoneInfo(zone), one - timedelta(days=2), (other - one).days + 4)
    compare(rng, walk, zone, 2, night=True)
