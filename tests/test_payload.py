"""What a durable job's arguments may be, and what becomes of a stored payload that cannot be read."""

import ast
import asyncio
import dataclasses
import enum
import json
import math
import pickle
import re
import sqlite3
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import tinyq
from tinyq import PayloadError, PayloadTooLarge, Retry, State, TinyQ, Undecodable, decode_call, encode_call

LIMIT = 1_048_576


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    HELLO = "hello"


class Text(str):
    pass


class Number(int):
    pass


class Ratio(float):
    pass


class Items(list[int]):
    pass


class Table(dict[str, int]):
    pass


@dataclasses.dataclass
class Money:
    amount: int


Pair = namedtuple("Pair", "left right")


def send(user: Any, items: Any = None, *rest: Any, note: Any = None, **more: Any) -> None: ...


SEND = tinyq.make_handler(send, "shop.send", {})


def encode(*args: Any, **kwargs: Any) -> str:
    return encode_call(SEND, "shop.send", (args, kwargs), LIMIT)


def there_and_back(*args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return decode_call(encode(*args, **kwargs), tinyq.PAYLOAD_VERSION)


def same(a: object, b: object) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


# what arrives as it was


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, 1, -1, 2**63, -(2**200), 10**4000, 0.0, 1.5, -1e-300, 1e308, 0.1, "", "é", "日本", "\x00",
        "𝄞", "</script>", '"\\', [], {}, [[]], [{}, []], {"": None}, {"a": [1, {"b": [True]}]}, [1, 1.0, True, "1"],
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_what_json_can_carry_arrives_as_the_same_value_of_the_same_type(value: object) -> None:
    args, kwargs = there_and_back(value, [value], note={"deep": value})
    assert same(args, [value, [value]])
    assert same(kwargs, {"note": {"deep": value}})


def test_zero_and_one_do_not_become_truth_values_nor_whole_numbers_floats() -> None:
    args, _ = there_and_back([0, 1, False, True, 1.0, 0.0])
    assert [type(value) for value in args[0]] == [int, int, bool, bool, float, float]


def test_a_negative_zero_keeps_its_sign() -> None:
    args, _ = there_and_back(-0.0)
    assert math.copysign(1, args[0]) == -1


def test_a_call_without_arguments_has_a_payload() -> None:
    assert there_and_back() == ([], {})


def test_options_that_are_names_of_parameters_are_arguments_like_any_other() -> None:
    names = {"queue": 1, "delay": 2, "run_at": 3, "key": 4, "timeout": 5}
    assert there_and_back(0, **names) == ([0], names)


def test_a_value_that_occurs_twice_is_no_circle() -> None:
    shared = [1, 2]
    assert there_and_back([shared, shared], shared) == ([[shared, shared], shared], {})


def test_nesting_as_deep_as_data_ever_is_arrives() -> None:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    assert there_and_back(value)[0] == [value]


def test_a_payload_is_json_in_ascii() -> None:
    text = encode("日本", note=1.5)
    assert text.isascii()
    assert json.loads(text) == [["日本"], {"note": 1.5}]


# what is refused, with the task and the path


FOREIGN = [
    pytest.param((1, 2), "tuple", id="tuple"),
    pytest.param(Pair(1, 2), "Pair", id="namedtuple"),
    pytest.param({1, 2}, "set", id="set"),
    pytest.param(frozenset({1}), "frozenset", id="frozenset"),
    pytest.param(range(3), "range", id="range"),
    pytest.param(iter([1]), "list_iterator", id="iterator"),
    pytest.param({"a": 1}.keys(), "dict_keys", id="dict keys"),
    pytest.param(b"x", "bytes", id="bytes"),
    pytest.param(bytearray(b"x"), "bytearray", id="bytearray"),
    pytest.param(datetime(2026, 1, 6, tzinfo=UTC), "datetime.datetime", id="datetime"),
    pytest.param(date(2026, 1, 6), "datetime.date", id="date"),
    pytest.param(timedelta(seconds=1), "datetime.timedelta", id="timedelta"),
    pytest.param(UUID(int=7), "uuid.UUID", id="UUID"),
    pytest.param(Decimal("1.5"), "decimal.Decimal", id="Decimal"),
    pytest.param(Fraction(1, 2), "fractions.Fraction", id="Fraction"),
    pytest.param(1j, "complex", id="complex"),
    pytest.param(Path("/tmp"), "Path", id="Path"),
    pytest.param(math.nan, "nan", id="NaN"),
    pytest.param(math.inf, "inf", id="infinity"),
    pytest.param(-math.inf, "-inf", id="minus infinity"),
    pytest.param(Color.RED, "Color", id="Enum"),
    pytest.param(Level.HIGH, "Level", id="IntEnum"),
    pytest.param(Word.HELLO, "Word", id="StrEnum"),
    pytest.param(Text("x"), "Text", id="str subclass"),
    pytest.param(Number(3), "Number", id="int subclass"),
    pytest.param(Ratio(0.5), "Ratio", id="float subclass"),
    pytest.param(Items([1]), "Items", id="list subclass"),
    pytest.param(Table(a=1), "Table", id="dict subclass"),
    pytest.param(OrderedDict(a=1), "OrderedDict", id="OrderedDict"),
    pytest.param(defaultdict(int), "defaultdict", id="defaultdict"),
    pytest.param(UserDict(a=1), "UserDict", id="UserDict"),
    pytest.param(deque([1]), "deque", id="deque"),
    pytest.param(Money(3), "Money", id="dataclass"),
    pytest.param(Money, "type", id="class"),
    pytest.param(len, "builtin_function_or_method", id="function"),
    pytest.param(object(), "object", id="object"),
    pytest.param(..., "ellipsis", id="Ellipsis"),
    pytest.param({1: "a"}, "int", id="int key"),
    pytest.param({1.5: "a"}, "float", id="float key"),
    pytest.param({None: "a"}, "NoneType", id="None key"),
    pytest.param({True: "a"}, "bool", id="bool key"),
    pytest.param({("a", 1): "a"}, "tuple", id="tuple key"),
    pytest.param({Word.HELLO: "a"}, "Word", id="StrEnum key"),
    pytest.param({Text("a"): 1}, "Text", id="str subclass key"),
]


@pytest.mark.parametrize(("value", "kind"), FOREIGN)
def test_what_would_not_arrive_as_it_was_is_refused_by_task_path_and_type(value: object, kind: str) -> None:
    places: list[tuple[Sequence[Any], dict[str, Any], str]] = [
        ([value], {}, "user"),
        ([1, [0, 1, {"price": value}]], {}, "items[2]['price']"),
        ([1], {"note": [value]}, "note[0]"),
        ([1], {"more": {"a": {"b": [None, value]}}}, "more['a']['b'][1]"),
    ]
    for args, kwargs, path in places:
        with pytest.raises(PayloadError) as caught:
            encode(*args, **kwargs)
        message = str(caught.value)
        assert "'shop.send'" in message
        assert f"{path} " in message
        assert kind in message
        assert "\n" not in message


def test_the_first_of_several_foreign_values_is_named() -> None:
    with pytest.raises(PayloadError, match=r"items\[1\] is of type set"):
        encode(1, [1, {2}, (3,)], note=b"x")


def test_an_argument_beyond_the_named_parameters_is_named_by_its_number() -> None:
    with pytest.raises(PayloadError, match=r"args\[2\]|rest\[0\]"):
        encode(1, 2, {3})
    with pytest.raises(PayloadError, match=r"args\[3\]|rest\[1\]"):  # and not by a keyword-only parameter's name
        encode(1, 2, 3, {4})


def test_without_a_handler_at_hand_arguments_are_named_by_their_number() -> None:
    with pytest.raises(PayloadError, match=r"task 'elsewhere': args\[1\]\['a'\] is of type set; "):
        encode_call(None, "elsewhere", ([1, {"a": {2}}], {}), LIMIT)


def test_a_refusal_says_what_to_pass_instead() -> None:
    with pytest.raises(PayloadError, match="pass an id, a str, or a plain list or dict instead"):
        encode({1})


def circle() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


def pit() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("make", "why"), [(circle, "circle"), (pit, "deep"), (lambda: 10**5000, "too long")], ids=["circular", "too deep", "huge int"]
)
def test_what_cannot_be_written_as_json_is_refused_by_task_and_argument(make: Any, why: str) -> None:
    for args, kwargs, name in [([1, make()], {}, "items"), ([1], {"note": make()}, "note"), ([1], {"more": make()}, "more")]:
        with pytest.raises(PayloadError) as caught:
            encode(*args, **kwargs)
        message = str(caught.value)
        assert "'shop.send'" in message
        assert why in message
        assert f" {name}" in message  # of several arguments, which
        assert len(message) < 500


def test_values_are_not_asked_to_describe_themselves() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("repr may be slow, secret, or broken")

        __str__ = __repr__

    with pytest.raises(PayloadError, match="Shy"):
        encode([Shy()])


# size


def test_arguments_may_take_exactly_as_many_bytes_as_allowed() -> None:
    text = encode_call(SEND, "shop.send", (["x" * 100], {}), 10_000)
    assert encode_call(SEND, "shop.send", (["x" * 100], {}), len(text)) == text
    with pytest.raises(PayloadTooLarge):
        encode_call(SEND, "shop.send", (["x" * 100], {}), len(text) - 1)


def test_arguments_that_are_too_large_are_refused_with_both_sizes_and_the_way_out() -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        encode("x" * 10_000_000)
    message = str(caught.value)
    assert "'shop.send'" in message
    assert "10,000,009 bytes" in message and "max_payload is 1,048,576" in message
    assert "pass its id, or raise max_payload" in message
    assert "xxx" not in message


def test_size_is_counted_in_bytes_not_in_characters() -> None:
    with pytest.raises(PayloadTooLarge):
        encode_call(SEND, "shop.send", (["日" * 30], {}), 80)


# what cannot be read


UNREADABLE = [
    pytest.param(None, id="nothing"),
    pytest.param("", id="empty"),
    pytest.param("{", id="cut off"),
    pytest.param("[[1],{}", id="cut off at the end"),
    pytest.param("[[1],{}]]", id="more after the end"),
    pytest.param("not json", id="words"),
    pytest.param("'[[],{}]'", id="single quotes"),
    pytest.param("null", id="null"),
    pytest.param("7", id="a number"),
    pytest.param('"ab"', id="a string of two"),
    pytest.param("[]", id="an empty list"),
    pytest.param("[[]]", id="one part"),
    pytest.param("[[],{},1]", id="three parts"),
    pytest.param("[{},[]]", id="parts exchanged"),
    pytest.param('["ab",{}]', id="arguments as a string"),
    pytest.param("[[],[]]", id="keywords as a list"),
    pytest.param("[[],null]", id="keywords null"),
    pytest.param('{"a":1,"b":2}', id="an object of two"),
    pytest.param("[[NaN],{}]", id="NaN"),
    pytest.param("[[Infinity],{}]", id="Infinity"),
    pytest.param(pickle.dumps(([1], {}), 0).decode("ascii"), id="a pickle"),
    pytest.param("[" * 100_000, id="too deep"),
    pytest.param("[[" + "9" * 5_000 + "],{}]", id="a number that is too long"),
]


@pytest.mark.parametrize("payload", UNREADABLE)
def test_a_payload_that_is_not_the_json_of_a_call_is_undecodable(payload: str | None) -> None:
    with pytest.raises(Undecodable, match=r"^undecodable: ") as caught:
        decode_call(payload, tinyq.PAYLOAD_VERSION)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_a_payload_of_another_version_is_undecodable(version: int) -> None:
    with pytest.raises(Undecodable, match=rf"version {version}\b.*reads {tinyq.PAYLOAD_VERSION}"):
        decode_call("[[],{}]", version)


def test_nothing_that_would_run_code_from_a_payload_is_within_reach() -> None:
    source = Path(tinyq.__file__).read_text()
    found = re.search(r"^# ── \d+\. Running one job: a process of its own ─.*?(?=^# ── )", source, re.MULTILINE | re.DOTALL)
    assert found  # a parent and its child may pickle, but nothing that was stored
    assert not re.search(r"payload|decode|store\.", found[0])
    tree = ast.parse(source.replace(found[0], ""))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    dangerous = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "yaml", "pydoc", "pkgutil", "runpy"}
    assert dangerous.isdisjoint(imported)
    assert {"eval", "exec", "compile", "__import__"}.isdisjoint(called)


# what enqueue said about the run


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"timeout": 30.0},
        {"timeout": math.inf, "result_ttl": math.inf, "failure_ttl": 0.0},
        {"retry": Retry(max_attempts=7, base=1, factor=2, cap=60, jitter="full")},
        {"retry": Retry(max_attempts=math.inf, cap=math.inf, jitter="none")},
        {"retry": Retry(max_attempts=6, delays=(30, 120, 600)), "result_ttl": 3600.0},
        {"retry": Retry(delays=(0,))},
    ],
    ids=["none", "timeout", "infinities", "retry", "no limits", "delays", "at once"],
)
def test_options_of_the_run_are_stored_and_read_back(overrides: dict[str, Any]) -> None:
    assert tinyq.decode_overrides(tinyq.encode_overrides("shop.send", overrides)) == overrides


def test_nothing_is_stored_of_options_that_were_not_given() -> None:
    assert tinyq.encode_overrides("shop.send", {"priority": 3, "queue": "emails"}) is None


@pytest.mark.parametrize("retry", [Retry(retry_on=OSError), Retry(give_up_on=OSError)], ids=["retry_on", "give_up_on"])
def test_exception_types_are_not_stored_with_a_job(retry: Retry) -> None:
    with pytest.raises(TypeError, match=r"task 'shop\.send': .*put them on the task"):
        tinyq.encode_overrides("shop.send", {"retry": retry})


# errors in rows and logs


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (ValueError(), "ValueError"),
        (ValueError("two\n  lines\tand tabs"), "ValueError: two lines and tabs"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
    ids=["message", "without one", "several lines", "key"],
)
def test_the_text_of_an_error_is_its_type_and_message_on_one_line(error: BaseException, expected: str) -> None:
    assert tinyq.error_text(error) == expected


def test_the_text_of_an_error_is_bounded() -> None:
    assert len(tinyq.error_text(ValueError("x" * 1_000_000))) == 500


def test_an_error_that_cannot_be_shown_still_has_a_text() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Broken" in tinyq.error_text(Broken())


def test_the_text_of_a_traceback_is_bounded_and_ends_with_the_error() -> None:
    def deeper(n: int) -> None:
        if n:
            deeper(n - 1)
        raise ValueError("at the bottom")

    with pytest.raises(ValueError) as caught:
        deeper(200)
    text = tinyq.traceback_text(caught.value)
    assert len(text) <= 4_000
    assert text.endswith("ValueError: at the bottom\n")


# through a real file


class Shop:
    """A TinyQ over a file whose rows a test may edit while it is stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ran: list[Any] = []

    def tinyq(self, **options: Any) -> tuple[TinyQ, Any]:
        q = TinyQ(self.path, **options)

        @q.task(name="note")
        async def note(value: Any) -> None:
            self.ran.append(value)

        return q, note

    async def store(self, *values: Any) -> list[str]:
        """Durable jobs that are committed and not run."""
        q, note = self.tinyq(worker=False)
        async with q:
            return [(await note.options(durable=True).enqueue(value)).id for value in values]

    def edit(self, statement: str, *parameters: Any) -> None:
        db = sqlite3.connect(self.path)
        try:
            assert db.execute(statement, parameters).rowcount > 0
            db.commit()
        finally:
            db.close()

    def rows(self, statement: str) -> list[Any]:
        db = sqlite3.connect(self.path)
        try:
            return db.execute(statement).fetchall()
        finally:
            db.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    yield Shop(tmp_path / "jobs.db")


async def test_a_payload_that_cannot_be_read_leaves_its_job_dead_unrun_and_kept_and_the_next_one_runs(shop: Shop) -> None:
    ids = await shop.store(*range(6))
    broken = ["{", '{"a":1,"b":2}', '["ab",{}]', pickle.dumps(([1], {}), 0).decode("ascii")]
    for seq, payload in enumerate(broken, 1):
        shop.edit("UPDATE tinyq_jobs SET payload = ? WHERE seq = ?", payload, seq)
    shop.edit("UPDATE tinyq_jobs SET payload_version = 2 WHERE seq = 5")
    q, _ = shop.tinyq()
    async with q, asyncio.timeout(30):
        await q.drain()
        jobs = [await q.get(id) for id in ids[:5]]
        assert [job.status for job in jobs] == [State.DEAD] * 5
        assert all((job.reason or "").startswith("undecodable") for job in jobs)
        assert [job.attempts for job in jobs] == [0] * 5
    assert shop.ran == [5]
    assert shop.rows("SELECT count(*) FROM tinyq_jobs WHERE state = 'dead' AND keep_until IS NULL") == [(5,)]
    assert shop.rows("SELECT payload FROM tinyq_jobs ORDER BY seq LIMIT 4") == [(payload,) for payload in broken]


async def test_text_that_is_not_utf_8_leaves_its_job_dead_and_the_next_one_runs(shop: Shop) -> None:
    damaged, _ = await shop.store("first", "second")
    shop.edit("UPDATE tinyq_jobs SET payload = CAST(x'5bff5d' AS TEXT) WHERE seq = 1")
    q, _ = shop.tinyq()
    async with q, asyncio.timeout(10):
        while not shop.ran:  # noqa: ASYNC110  the claim may never come, and drain waits only for what can be read
            await asyncio.sleep(0.01)
        await q.drain()
        assert (await q.get(damaged)).status is State.DEAD
    assert shop.ran == ["second"]


async def test_a_row_that_names_a_function_of_a_library_is_never_run(shop: Shop, tmp_path: Path) -> None:
    await shop.store("first", "second")
    mark = tmp_path / "mark"
    shop.edit("UPDATE tinyq_jobs SET task = 'os.system', payload = ? WHERE seq = 1", json.dumps([[f"touch {mark}"], {}]))
    q, _ = shop.tinyq()
    async with q, asyncio.timeout(30):
        await q.drain()
        stats = await q.stats()
    assert shop.ran == ["second"]
    assert not mark.exists()
    assert stats.unknown == ("os.system",)
    assert shop.rows("SELECT task, state, attempts FROM tinyq_jobs") == [("os.system", "pending", 0)]


async def test_an_argument_that_is_refused_stores_nothing(shop: Shop) -> None:
    q, note = shop.tinyq(worker=False)
    async with q:
        for value in ({1}, math.nan, circle(), "x" * 2_000_000):
            with pytest.raises((PayloadError, PayloadTooLarge)):
                await note.options(durable=True).enqueue(value)
        with pytest.raises(PayloadError):
            await q.enqueue_many([(note, ("fine",)), (note, ((1, 2),))], durable=True)
        assert (await q.stats()).count() == 0
    assert shop.rows("SELECT count(*) FROM tinyq_jobs") == [(0,)]


async def test_a_best_effort_job_takes_any_argument(shop: Shop) -> None:
    q, note = shop.tinyq()
    value = object()
    async with q, asyncio.timeout(10):
        await (await note.enqueue(value)).result()
    assert shop.ran == [value]
