"""What a handler's annotations say of a durable call, and what becomes of arguments that do not keep to them."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import json
import logging
import math
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
    Union,
)
from uuid import UUID, uuid4

import pydantic
import pytest
from clock import FakeClock
from helpers import Open, edit, eventually, rows
from pydantic import BaseModel, Field, SecretStr
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from starlette.background import BackgroundTasks
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

import tinyq
from tinyq import DuplicateTask, NoResult, PayloadError, State, TinyQ

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]

LIMIT = 1_048_576
SEVEN = UUID(int=7)
NOON = datetime(2026, 1, 6, 12, 30, 1, 5, tzinfo=UTC)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Shape(enum.Enum):
    SQUARE = (1, 1)
    WIDE = (2, 1)


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    HELLO = "hello"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    id: UUID
    y: int = 0


@dataclass
class Line:
    price: Decimal
    note: str | None = None


@dataclass
class Order:
    id: UUID
    lines: list[Line]
    parent: Order | None = None


@dataclass(frozen=True, slots=True)
class Stamped:
    name: str
    id: UUID = field(init=False, default_factory=uuid4)


@dataclass
class Doubled:
    n: int

    def __post_init__(self) -> None:
        self.n *= 2


@dataclass
class Trimmed:
    text: str

    def __post_init__(self) -> None:
        self.text = self.text.strip()


@dataclass
class Card:
    number: str


@dataclass
class Transfer:
    iban: str


@dataclass
class Twin:
    iban: str


class OwnConstructor:
    def __init__(self, a: int) -> None:
        self.a = a


T = TypeVar("T")


@dataclass
class Box(Generic[T]):
    inside: T


class Event(TypedDict):
    id: UUID
    at: NotRequired[datetime]


class Item(BaseModel):
    id: UUID
    color: Color = Color.RED


class Cart(BaseModel):
    ids: list[UUID]
    items: list[Item] = []
    at: datetime | None = None
    total: Decimal = Field(default=Decimal(0), alias="totalPrice")


class BigCart(Cart):
    extra: int = 1


class Total(BaseModel):
    amount: float = 0  # a default that pydantic does not convert


class Login(BaseModel):
    password: SecretStr


OrderId = NewType("OrderId", UUID)


def handler(annotation: Any, **others: Any) -> tinyq.Handler:
    def send(order: Any) -> None: ...

    send.__annotations__ = {"order": annotation, **others}
    return tinyq.make_handler(send, "send", {})


def round_trip(known: tinyq.Handler, name: str, call: tinyq.Arguments, limit: int) -> tinyq.Arguments:
    """What would arrive of a durable call."""
    return tinyq.read_call(known, tinyq.decode_call(tinyq.encode_call(known, name, call, limit), tinyq.PAYLOAD_VERSION))


def arrival(annotation: Any, value: Any) -> Any:
    [args, kwargs] = round_trip(handler(annotation), "send", ([value], {}), LIMIT)
    assert not kwargs
    return args[0]


def payload(annotation: Any, value: Any) -> Any:
    return json.loads(tinyq.encode_call(handler(annotation), "send", ([value], {}), LIMIT))[0][0]


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, (list, tuple)):
        return all(map(same, a, b))
    if isinstance(a, dict):
        return all(same(left, right) for left, right in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (set, frozenset)):
        return all(any(same(left, right) for right in b) for left in a)
    if isinstance(a, datetime):
        return bool(a.utcoffset() == b.utcoffset())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return True


CARRIED: list[tuple[Any, Any]] = [
    (datetime, NOON),
    (datetime, NOON.replace(tzinfo=None)),
    (datetime, NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))),
    (datetime, datetime.max),
    (date, date(2026, 1, 6)),
    (time, time(12, 30)),
    (time, time(12, 30, tzinfo=UTC)),
    (timedelta, timedelta(days=1)),
    (timedelta, timedelta(microseconds=-1)),
    (timedelta, timedelta.max),
    (timedelta, timedelta.min + timedelta(microseconds=1)),
    (UUID, SEVEN),
    (Decimal, Decimal("1.10")),
    (Color, Color.BLUE),
    (Shape, Shape.WIDE),
    (Level, Level.HIGH),
    (Word, Word.HELLO),
    (Rights, Rights.READ | Rights.WRITE),
    (bytes, bytes(range(256))),
    (set[UUID], {SEVEN, UUID(int=8)}),
    (set, {1, "a", None}),
    (frozenset[int], frozenset({1, 2})),
    (tuple[int, UUID], (1, SEVEN)),
    (tuple[UUID, ...], (SEVEN, SEVEN)),
    (tuple, (1, "a")),
    (tuple[()], ()),
    (Point, Point(SEVEN, 3)),
    (Order, Order(SEVEN, [Line(Decimal("0.5"), "x")], Order(UUID(int=9), []))),
    (Stamped, Stamped("a")),
    (Trimmed, Trimmed("a")),
    (Box[UUID], Box(SEVEN)),
    (Box[list[date]], Box([date(2026, 1, 6)])),
    (Event, {"id": SEVEN}),
    (Event, {"id": SEVEN, "at": NOON}),
    (Optional[UUID], SEVEN),  # noqa: UP045
    (UUID | None, None),
    (Union[UUID, str], SEVEN),  # noqa: UP007
    (str | UUID, SEVEN),
    (str | UUID, "not one"),
    (UUID | str, "urn:uuid:00000000-0000-0000-0000-000000000007"),  # not how a UUID is written
    (date | datetime, NOON),
    (datetime | date, date(2026, 1, 6)),
    (Decimal | int, 5),
    (Decimal | float | None, 5.0),
    (timedelta | float, 5.0),
    (Card | Transfer, Transfer("DE1")),
    (list[UUID | str], [SEVEN, "a", SEVEN]),
    (set[UUID | str], {SEVEN, "a"}),
    (list[UUID], [SEVEN]),
    (Sequence[UUID], [SEVEN]),
    (dict[str, Decimal], {"a": Decimal(1)}),
    (Mapping[str, UUID | date], {"a": SEVEN, "b": date(2026, 1, 6)}),
    (dict[UUID, int], {SEVEN: 1}),
    (dict[int, str], {-1: "a", 20: "b"}),
    (dict[Level, set[UUID]], {Level.HIGH: {SEVEN}}),
    (dict[date, list[tuple[UUID, Color]]], {date(2026, 1, 6): [(SEVEN, Color.RED)]}),
    (Annotated[UUID, "an order"], SEVEN),
    (OrderId, SEVEN),
    (Literal["a", Color.RED], Color.RED),
    (Literal["a", Color.RED], "a"),
    (Path, Path("/tmp/a")),
    (Cart, Cart(ids=[SEVEN], items=[Item(id=SEVEN, color=Color.BLUE)], at=NOON, totalPrice=Decimal("1.5"))),
    (list[Cart] | None, [Cart(ids=[])]),
    (Cart | UUID, SEVEN),
    (Total, Total()),
    (Total | UUID, Total()),
    (dict[str, list[Item]], {"a": [Item(id=SEVEN)]}),
    (pydantic.AnyUrl, pydantic.AnyUrl("https://example.org/")),
    ("UUID", SEVEN),
    ("list[Order] | None", [Order(SEVEN, [])]),
    (list["UUID"], [SEVEN]),
    (float, 1),
    (int, True),
    (Any, {"a": [1, None]}),
    (object, "x"),
    ("Unknown", 1),
]
NAMES = [f"{annotation} {number}" for number, (annotation, _) in enumerate(CARRIED)]


@pytest.mark.parametrize(("annotation", "value"), CARRIED, ids=NAMES)
def test_a_value_arrives_as_what_its_annotation_says(annotation: Any, value: Any) -> None:
    assert same(arrival(annotation, value), value)


async def test_all_of_them_arrive_by_hand_over_and_from_the_table(open_file: Open) -> None:
    got: list[Any] = []

    def register(q: TinyQ) -> list[Any]:
        tasks = []
        for number, (annotation, _) in enumerate(CARRIED):

            async def keep(value: Any) -> None:
                got.append(value)

            keep.__annotations__ = {"value": annotation}
            tasks.append(q.task(name=f"keep {number}", durable=True)(keep))
        return tasks

    web = await open_file(worker=False)
    for task, (_, value) in zip(register(web), CARRIED, strict=True):
        await task.enqueue(value)
    await web.stop()
    worker = await open_file(concurrency=1)
    tasks = register(worker)
    async with asyncio.timeout(30):
        await worker.drain()
        assert [same(a, b) for a, (_, b) in zip(got, CARRIED, strict=True)] == [True] * len(CARRIED)
        got.clear()
        for task, (_, value) in zip(tasks, CARRIED, strict=True):  # handed over: each finds a free slot
            job = await task.enqueue(value)
            await job.result()
    assert [same(a, b) for a, (_, b) in zip(got, CARRIED, strict=True)] == [True] * len(CARRIED)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (datetime, NOON, "2026-01-06T12:30:01.000005+00:00"),
        (timedelta, timedelta(minutes=1), 60),
        (Color, Color.RED, "red"),
        (set[int], {3, 1, 2}, [1, 2, 3]),
        (bytes, b"\x00\xff", "AP8="),
        (Point, Point(SEVEN), {"id": str(SEVEN), "y": 0}),
        (dict[int, Decimal], {1: Decimal("2.50")}, {"1": "2.50"}),
        (Item, Item(id=SEVEN), {"id": str(SEVEN), "color": "red"}),
    ],
)
def test_what_is_stored_is_plain_json_that_a_person_can_read(annotation: Any, value: Any, expected: Any) -> None:
    assert payload(annotation, value) == expected


def test_a_set_is_stored_in_the_same_way_whatever_its_order() -> None:
    assert payload(set[str], {"c", "a", "b"}) == ["a", "b", "c"]


# what is refused


REFUSED: list[tuple[Any, Any, str]] = [
    (UUID, str(SEVEN), "order is of type str, and the annotation says UUID"),
    (UUID, None, "order is of type NoneType, and the annotation says UUID"),
    (datetime, NOON.isoformat(), "order is of type str, and the annotation says datetime"),
    (datetime, date(2026, 1, 6), "order is of type datetime.date, and the annotation says datetime"),
    (date, NOON, "order is of type datetime.datetime, and the annotation says date"),
    (Decimal, 1, "order is of type int, and the annotation says Decimal"),
    (Decimal, Decimal("NaN"), "order is nan, which is not JSON"),
    (Level, 3, "order is of type int, and the annotation says Level"),
    (Word, "hello", "order is of type str, and the annotation says Word"),
    (str, Word.HELLO, "order is of type test_annotations.Word"),
    (Any, SEVEN, "order is of type uuid.UUID"),
    (object, (1, 2), "order is of type tuple"),
    ("Unknown", SEVEN, "order is of type uuid.UUID, and its annotation 'Unknown' cannot be resolved at run time"),
    (int | str | None, {1}, "order is of type set"),
    (list[UUID], (SEVEN,), "order is of type tuple, and the annotation says list[UUID]"),
    (list[UUID], [SEVEN, str(SEVEN)], "order[1] is of type str, and the annotation says UUID"),
    (tuple[int, int], (1, 2, 3), "order is of type tuple, and the annotation says tuple[int, int]"),
    (Point, (SEVEN, 1), "order is of type tuple, and the annotation says Point"),
    (Order, Order(SEVEN, [Line(Decimal(1)), Line(1.5)]), "order.lines[1].price is of type float"),  # type: ignore[arg-type]
    (Order, Line(Decimal(1)), "order is of type test_annotations.Line, and the annotation says Order"),
    (Line, Line(Decimal(1), ("a",)), "order.note is of type tuple"),  # type: ignore[arg-type]
    (Doubled, Doubled(2), "order.n does not come back from JSON as it was"),
    (OwnConstructor, OwnConstructor(1), "order is of type test_annotations.OwnConstructor"),
    (Event, {"at": NOON}, "order has no 'id', which Event needs"),
    (Event, {"id": SEVEN, "at": str(NOON)}, "order['at'] is of type str, and the annotation says datetime"),
    (Event, {"id": SEVEN, 3: 4}, "order has the key 3 of type int"),
    (dict[str, Decimal], {"a": Decimal(1), "b": 2.5}, "order['b'] is of type float, and the annotation says Decimal"),
    (dict[int, int], {True: 1}, "order has the key True of type bool"),
    (dict[str, UUID], {1: SEVEN}, "a key of order is of type int, and the annotation says str"),
    (dict[UUID, int], {str(SEVEN): 1}, "a key of order is of type str, and the annotation says UUID"),
    (dict[int | str, int], {1: 1}, "order has the key 1 of type int"),
    (UUID | str, str(SEVEN), "order is ambiguous"),
    (list[Color | str], ["green", "red"], "order[1] is ambiguous"),
    (timedelta | int, 5, "order is ambiguous"),
    (Transfer | Twin, Twin("DE1"), "order is ambiguous"),
    (Literal["red", Color.RED], "red", "order is ambiguous"),
    (Literal[Color.RED], Color.BLUE, "order is of type test_annotations.Color"),
    (Order | UUID, Order(SEVEN, [Line(1)]), "order.lines[0].price is of type int"),  # type: ignore[arg-type]
    (Cart, BigCart(ids=[]), "order is of type test_annotations.BigCart, and the annotation says Cart"),
    (Cart, {"ids": []}, "order is of type dict, and the annotation says Cart"),
    (Login, Login(password=SecretStr("x")), "order.password does not come back from JSON as it was"),
    (float, math.nan, "order is nan"),
    (dict[UUID, float], {SEVEN: math.inf}, f"order[{SEVEN!r}] is inf"),
    (str, "\ud800", "order holds a lone surrogate"),
    (str, "\ud83d\ude00", "order holds a lone surrogate"),  # two halves that JSON would join
    (Any, {"\udfff": 1}, "order has a key that holds a lone surrogate"),
    (Line, Line(Decimal(1), "\ud800"), "order.note holds a lone surrogate"),
    (Path, Path("\ud800"), "order holds a lone surrogate"),
    (dict[str, UUID], {"\ud800": SEVEN}, "a key of order holds a lone surrogate"),
    (Item, Item.model_construct(id="x"), "order.id does not fit Item"),
]


@pytest.mark.parametrize(("annotation", "value", "message"), REFUSED, ids=[f"{n} {text}" for n, (*_, text) in enumerate(REFUSED)])
def test_what_would_arrive_as_something_else_is_refused_with_its_path(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        tinyq.encode_call(handler(annotation), "shop.send", ([value], {}), LIMIT)
    said = str(caught.value)
    assert said.startswith(ascii(f"task 'shop.send': {message}")[1:-1].replace("\\'", "'"))
    assert "; " in said and "\n" not in said


@pytest.mark.parametrize("text", ["😀 and text", "a \\ud800 that is text", "C:\\ud"])
def test_text_that_only_resembles_half_a_character_is_carried(text: str) -> None:
    assert arrival(str, text) == text
    assert arrival(list[str], [text]) == [text]


def test_a_value_in_a_circle_is_refused() -> None:
    order = Order(SEVEN, [])
    order.parent = order
    with pytest.raises(PayloadError, match="order is nested too deep, or in a circle"):
        arrival(Order, order)


def test_none_as_a_default_may_be_passed_whatever_the_annotation_says() -> None:
    def send(order: UUID = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    call = round_trip(tinyq.make_handler(send, "send", {}), "send", ([None], {}), LIMIT)
    assert call == ([None], {})


def test_a_name_that_only_type_checkers_know_spoils_no_other_parameter() -> None:
    def send(order: Unknown, at: datetime) -> None: ...

    known = tinyq.make_handler(send, "send", {})
    assert round_trip(known, "send", ([1, NOON], {}), LIMIT) == ([1, NOON], {})
    with pytest.raises(PayloadError, match=r"order is of type uuid\.UUID, and its annotation 'Unknown' cannot be resolved"):
        tinyq.encode_call(known, "send", ([SEVEN, NOON], {}), LIMIT)


def test_annotations_of_all_kinds_of_parameters_are_followed() -> None:
    def send(a: UUID, /, b: date, *rest: Decimal, c: Color, **more: UUID) -> None: ...

    call: tinyq.Arguments = ([SEVEN, NOON.date(), Decimal(1), Decimal(2)], {"c": Color.RED, "x": SEVEN})
    known = tinyq.make_handler(send, "send", {})
    assert round_trip(known, "send", call, LIMIT) == call
    with pytest.raises(PayloadError, match=r"rest\[1\] is of type int"):
        tinyq.encode_call(known, "send", ([SEVEN, NOON.date(), Decimal(1), 2], {"c": Color.RED}), LIMIT)
    with pytest.raises(PayloadError, match="x is of type str"):
        tinyq.encode_call(known, "send", ([SEVEN, NOON.date()], {"c": Color.RED, "x": "y"}), LIMIT)


class Caller:
    def method(self, order: UUID) -> None: ...

    def __call__(self, order: UUID) -> None: ...


def with_a_prefix(prefix: str, order: UUID) -> None: ...


def wrapped() -> Callable[..., None]:
    @functools.wraps(with_a_prefix)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    return wrapper


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (Caller().method, [SEVEN]),
        (Caller(), [SEVEN]),
        (functools.partial(with_a_prefix, "a"), [SEVEN]),
        (functools.partial(Caller().method), [SEVEN]),
        (wrapped(), ["a", SEVEN]),
        (Line, [Decimal(1)]),
    ],
    ids=["method", "object", "partial", "partial of a method", "wrapper", "class"],
)
def test_annotations_are_found_behind_every_kind_of_callable(fn: Any, args: list[Any]) -> None:
    assert round_trip(tinyq.make_handler(fn, "send", {}), "send", (args, {}), LIMIT) == (args, {})


def test_a_handler_of_plain_parameters_has_nothing_to_be_converted() -> None:
    def send(a: int, b: str | None, c: list[dict[str, Any]], d: Literal["x", 1], *rest: float, **more: bool) -> None: ...

    assert tinyq.make_handler(send, "send", {}).codecs is None
    assert tinyq.make_handler(lambda x, y=1: None, "send", {}).codecs is None
    assert tinyq.make_handler(print, "send", {}).codecs is None


def test_annotations_are_looked_at_when_a_payload_needs_them_and_once() -> None:
    made = handler(UUID)
    assert "codecs" not in vars(made)
    codecs = made.codecs
    assert codecs is not None and made.codecs is codecs


async def test_without_a_handler_only_plain_values_are_taken_and_the_worker_converts_them(open_file: Open) -> None:
    web = await open_file(worker=False)
    with pytest.raises(PayloadError, match=r"args\[0\] is of type uuid\.UUID; .*import the task, or pass str\(value\)"):
        await web.enqueue("send", SEVEN, durable=True)
    await web.enqueue("send", str(SEVEN), str(NOON), "1.5", durable=True)
    await web.stop()
    q = await open_file()
    got: list[Any] = []

    @q.task(name="send")
    async def send(order: UUID, at: datetime, price: Decimal) -> None:
        got.extend((order, at, price))

    async with asyncio.timeout(10):
        await q.drain()
    assert got == [SEVEN, NOON, Decimal("1.5")]


async def test_a_job_that_is_handed_over_gets_what_was_enqueued_and_not_what_became_of_it(open_file: Open) -> None:
    q = await open_file()
    got: list[Any] = []

    @q.task(durable=True)
    async def keep(first: list[UUID], second: list[UUID]) -> None:
        got.append((first, second, first is second))

    ids = [SEVEN]
    job = await keep.enqueue(ids, ids)
    ids.append(UUID(int=8))
    async with asyncio.timeout(10):
        await job.result()
    assert got == [([SEVEN], [SEVEN], False)]


async def test_every_attempt_gets_the_arguments_afresh(open_file: Open, clock: FakeClock) -> None:
    q = await open_file()
    got: list[set[UUID]] = []

    @q.task(durable=True, retry=[1])
    async def use_up(ids: set[UUID]) -> None:
        got.append(set(ids))
        ids.clear()
        if len(got) == 1:
            raise ValueError("again")

    job = await use_up.enqueue({SEVEN})
    result = asyncio.create_task(job.result())
    async with asyncio.timeout(10):
        while not result.done():
            await clock.advance(0.5)
    assert got == [{SEVEN}, {SEVEN}]


# what does not fit on arrival


@pytest.mark.parametrize(
    ("annotation", "stored", "message"),
    [
        (UUID, '[["abc"],{}]', r"order \(of type str\) does not read as UUID"),
        (list[UUID], '[["abc"],{}]', r"order \(of type str\) does not read as list\[UUID\]"),
        (Color, '[["green"],{}]', "order .* does not read as Color"),
        (Order, '[[{"id":"x","lines":[]}],{}]', r"order\.id .* does not read as UUID"),
        (Order, f'[[{{"id":"{SEVEN}"}}],{{}}]', "order has no 'lines', which Order needs"),
        (Order, f'[[{{"id":"{SEVEN}","lines":[],"new":1}}],{{}}]', "order has 'new', which Order does not know"),
        (Cart, '[[{"ids":["x"]}],{}]', r"order\.ids\[0\] does not fit Cart: Input should be a valid UUID"),
        (UUID | date, "[[5],{}]", r"order \(of type int\) does not read as UUID \| date"),
    ],
    ids=["UUID", "list", "enum", "field", "missing", "unknown", "pydantic", "union"],
)
def test_what_was_stored_and_does_not_fit_is_named_by_its_path_and_not_shown(annotation: Any, stored: str, message: str) -> None:
    with pytest.raises(tinyq.Misfit, match=f"^{message}") as caught:
        tinyq.read_call(handler(annotation), tinyq.decode_call(stored, tinyq.PAYLOAD_VERSION))
    assert "abc" not in str(caught.value) and "green" not in str(caught.value)


async def test_arguments_that_do_not_fit_this_version_are_parked_and_then_dead(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    web = await open_file(worker=False)
    await web.enqueue("send", {"id": "x", "lines": []}, durable=True)
    await web.stop()
    q = await open_file()
    started: list[Any] = []

    @q.task(name="send")
    async def send(order: Order) -> None:
        started.append(order)

    async with asyncio.timeout(10):
        while rows(file, "reason") != [("parked",)]:
            await clock.advance(0.1)
        assert rows(file, "state, attempts") == [("pending", 0)]
        await clock.advance(tinyq.PARK_FOR)
        while rows(file, "state") != [("dead",)]:
            await clock.advance(tinyq.PARK_EVERY)
    [[reason, attempts, error]] = rows(file, "reason, attempts, error")
    assert (reason, attempts, started) == ("the arguments do not fit the handler", 0, [])
    assert error == "TypeError: task 'send' does not take these arguments: order.id (of type str) does not read as UUID"


async def test_parked_arguments_are_run_once_a_version_comes_that_they_fit(
    open_file: Open, file: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    web = await open_file(worker=False)
    await web.enqueue("send", "abc", durable=True)
    await web.stop()
    q = await open_file()
    got: list[Any] = []

    @q.task(name="send")
    async def old(order: UUID) -> None:
        got.append(order)

    async with asyncio.timeout(10):
        while rows(file, "reason") != [("parked",)]:
            await clock.advance(0.5)
        said = "task 'send' does not take these arguments: order (of type str) does not read as UUID"
        await eventually(lambda: said in caplog.text, clock)
        assert "abc" not in caplog.text

        @q.task(name="send", replace=True)
        async def newest(order: str) -> None:
            got.append(order)

        while rows(file, "reason"):
            await clock.advance(tinyq.PARK_EVERY / 2)
    assert got == ["abc"]


async def test_a_class_that_raises_anything_on_arrival_only_parks_its_job(open_file: Open, file: Path, clock: FakeClock) -> None:
    @dataclass
    class Picky:
        a: int

        def __post_init__(self) -> None:
            if self.a > 1:
                raise SystemExit("too large")

    q = await open_file()

    async def send(order: Picky) -> None: ...

    send.__annotations__ = {"order": Picky}
    task = q.task(name="send", durable=True)(send)
    await task.options(delay=5).enqueue(Picky(1))
    edit(file, "UPDATE tinyq_jobs SET payload = ?", '[[{"a":2}],{}]')
    async with asyncio.timeout(10):
        while rows(file, "reason") != [("parked",)]:
            await clock.advance(0.5)
    assert "too large" in rows(file, "error")[0][0]


# results


@pytest.mark.parametrize(
    ("annotation", "value"),
    [(UUID, SEVEN), (list[Order], [Order(SEVEN, [])]), (UUID | None, None), (Cart, Cart(ids=[SEVEN])), (Any, {"a": 1})],
    ids=["UUID", "dataclasses", "None", "pydantic", "plain"],
)
async def test_a_result_is_read_elsewhere_as_the_return_annotation_says(annotation: Any, value: Any, open_file: Open) -> None:
    async def work() -> Any:
        return value

    work.__annotations__ = {"return": annotation}
    q, other = await open_file(), await open_file(worker=False)
    for each in (q, other):
        each.task(name="work", durable=True, result_ttl=60)(work)
    job = await q.enqueue("work")
    async with asyncio.timeout(10):
        assert await job.result() is value
        found = await (await other.get(job.id)).result()
    assert same(found, value)
    assert found is not value or value is None


async def test_a_result_that_cannot_be_carried_is_a_warning_on_a_done_job_and_a_reason_elsewhere(
    open_file: Open, caplog: pytest.LogCaptureFixture
) -> None:
    q, other = await open_file(), await open_file(worker=False)

    @q.task(name="work", durable=True, result_ttl=60)
    async def work() -> dict[str, UUID]:
        return {"a": "x"}  # type: ignore[dict-item]

    job = await work.enqueue()
    async with asyncio.timeout(10):
        assert await job.result() == {"a": "x"}
        assert job.status is State.DONE
        with pytest.raises(NoResult, match=r"the result\['a'\] is of type str, and the annotation says UUID"):
            await (await other.get(job.id)).result()
    [record] = [record for record in caplog.records if "is done, but" in record.message]
    assert record.levelno == logging.WARNING


async def test_a_result_that_does_not_read_as_the_annotation_here_is_no_result(open_file: Open) -> None:
    q, other = await open_file(), await open_file(worker=False)

    @q.task(name="work", durable=True, result_ttl=60)
    async def work() -> str:
        return "x"

    @other.task(name="work")
    async def newer() -> UUID:
        raise NotImplementedError

    job = await work.enqueue()
    async with asyncio.timeout(10):
        await job.result()
        with pytest.raises(NoResult, match=r"the result \(of type str\) does not read as UUID"):
            await (await other.get(job.id)).result()


# best-effort


async def test_a_best_effort_job_gets_its_arguments_as_they_are_and_is_promoted_by_annotation(
    open_file: Open, file: Path
) -> None:
    q = await open_file()
    got: list[Any] = []

    @q.task(name="keep")
    async def keep(order: UUID) -> None:
        got.append(order)

    job = await keep.enqueue("not one")  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await job.result()
    assert got == ["not one"]
    waits = await keep.options(delay=60).enqueue(SEVEN)
    assert await waits.promote()
    assert rows(file, "payload") == [(f'[["{SEVEN}"],{{}}]',)]
    odd = await keep.options(delay=60).enqueue("not one")  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="order is of type str"):
        await odd.promote()
    assert not odd.durable


# what belongs to a request


def request_bound() -> list[Any]:
    class Mine(AsyncSession):
        pass

    return [
        AsyncSession(), Mine(), Session(), Request({"type": "http"}), Response(), BackgroundTasks(), UploadFile(file=None)  # type: ignore[arg-type]
    ]  # fmt: skip


@pytest.mark.parametrize("value", request_bound(), ids=lambda value: type(value).__name__)
def test_what_belongs_to_a_request_is_refused_by_name_for_a_durable_job(value: Any) -> None:
    kinds = (
        [type(value)] if isinstance(value, (AsyncSession, Session, UploadFile)) else []
    )  # the others are no parameters of a task
    for annotation in (Any, UUID, *kinds):
        with pytest.raises(PayloadError) as caught:
            tinyq.encode_call(handler(annotation), "send", ([value], {}), LIMIT)
        said = str(caught.value)
        assert f"order is of type {type(value).__module__}." in said and type(value).__name__ in said
        assert "which is closed with its request; pass an id" in said
        assert "open a session of its own inside the task" in said
    with pytest.raises(PayloadError, match=r"args\[0\]\['db'\]\[0\] is of type .* which is closed with its request; pass an id"):
        tinyq.encode_call(None, "send", ([{"db": [value]}], {}), LIMIT)


async def test_connections_of_databases_are_refused_as_well() -> None:
    engine, asynchronous = create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")
    try:
        with engine.connect() as one:
            async with asynchronous.connect() as other:
                with sqlite3.connect(":memory:") as third:
                    for value in (one, other, third):
                        with pytest.raises(PayloadError, match="closed with its request"):
                            tinyq.encode_call(handler(Any), "send", ([value], {}), LIMIT)
                third.close()
    finally:
        engine.dispose()
        await asynchronous.dispose()


async def test_a_best_effort_job_that_is_given_one_is_warned_about_once_per_task_and_type(
    open_at: Any, caplog: pytest.LogCaptureFixture
) -> None:
    q: TinyQ = await open_at(None)

    @q.task(name="first")
    async def first(*args: Any, **kwargs: Any) -> None: ...

    @q.task(name="second")
    async def second(*args: Any) -> None: ...

    async with asyncio.timeout(10):
        for _ in range(3):
            await first.enqueue(1, Request({"type": "http"}))
            await first.options(delay=60).enqueue(db=AsyncSession())
            await q.enqueue(second, Request({"type": "http"}), priority=1)
            await q.enqueue_many([(second, [object()])])
    warned = [record for record in caplog.records if "closed with its request" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING] * 3
    assert [record.message.split(",")[0] for record in warned] == [
        "task first was given a starlette.requests.Request",
        "task first was given a sqlalchemy.ext.asyncio.session.AsyncSession",
        "task second was given a starlette.requests.Request",
    ]


# names that a task had before


async def test_jobs_stored_under_an_old_name_are_run_by_the_task_that_names_it(open_file: Open, file: Path) -> None:
    before = await open_file(worker=False)

    @before.task(name="old_name", durable=True)
    async def old(n: int) -> None: ...

    await old.enqueue(1)
    await before.stop()
    q = await open_file()
    ran: list[tuple[str, int]] = []

    @q.task(name="new_name", aliases=["older_name", "old_name"], result_ttl=60)
    async def new(n: int) -> None:
        ran.append((tinyq.current_job().task, n))

    async with asyncio.timeout(10):
        await q.drain()
    assert ran == [("old_name", 1)]
    assert rows(file, "task, state, keep_until IS NULL") == [("old_name", "done", 0)]  # with the task's own options
    assert (await q.stats()).unknown == ()
    assert q.health().status == "ok"


async def test_an_old_name_enqueues_a_job_of_the_new_one(open_file: Open) -> None:
    q = await open_file()

    @q.task(name="new_name", aliases=("old_name",))
    async def new() -> str:
        return "ran"

    async with asyncio.timeout(10):
        for durable in (False, True):
            for _ in range(2):
                job = await q.enqueue("old_name", durable=durable)
                assert (job.task, await job.result()) == ("new_name", "ran")


async def test_dead_jobs_under_an_old_name_are_listed_requeued_and_purged_with_their_task(open_file: Open, file: Path) -> None:
    q = await open_file()
    fails = True

    @q.task(name="new_name", aliases=["old_name"], durable=True, retry=False)
    async def new() -> None:
        if fails:
            raise ValueError

    async with asyncio.timeout(10):
        for _ in range(4):
            await new.enqueue()
        await q.drain()
        edit(file, "UPDATE tinyq_jobs SET task = 'old_name' WHERE seq <= 2")
        assert sorted(job.task for job in await q.dead(new)) == ["new_name", "new_name", "old_name", "old_name"]
        assert len(await q.dead(new, limit=3)) == 3
        fails = False
        [oldest] = [job for job in await q.dead("new_name") if job.task == "old_name"][-1:]
        assert await q.requeue(oldest.id) == 1
        assert await q.purge(task=new) == 3
        await q.drain()
    assert rows(file, "task") == []


async def test_a_key_also_finds_the_job_that_waits_under_an_old_name(open_file: Open, file: Path, clock: FakeClock) -> None:
    q = await open_file()
    ran: list[int] = []
    new = q.task(name="new_name", aliases=["old_name"], durable=True)(lambda n: ran.append(n))
    first = await new.options(key="k", delay=60).enqueue(1)
    edit(file, "UPDATE tinyq_jobs SET task = 'old_name'")
    assert [(job := await new.options(key="k").enqueue(2)).created, job.id] == [False, first.id]
    assert (await new.options(key="k", on_conflict="replace", delay=120).enqueue(3)).id == first.id
    with pytest.raises(tinyq.KeyConflict):
        await new.options(key="k", on_conflict="raise").enqueue(4)
    await eventually(lambda: ran, clock, 1)
    await clock.advance(120)
    assert ran == [3]


async def test_a_job_waits_for_the_one_with_its_key_that_runs_under_an_old_name(
    open_file: Open, file: Path, clock: FakeClock
) -> None:
    q = await open_file()
    ran: list[int] = []
    go_on = asyncio.Event()

    @q.task(name="new_name", aliases=["old_name"], durable=True)
    async def new(n: int) -> None:
        ran.append(n)
        await go_on.wait()

    await new.options(key="k", delay=60).enqueue(1)
    edit(file, "UPDATE tinyq_jobs SET task = 'old_name'")
    await eventually(lambda: ran, clock, 1)
    await new.options(key="k", on_conflict="queue").enqueue(2)
    await clock.advance(5)
    assert ran == [1]
    go_on.set()
    await eventually(lambda: ran == [1, 2], clock)


def test_a_name_that_is_taken_is_no_alias() -> None:
    q = TinyQ()
    q.task(name="a", aliases=["b"])(lambda: None)
    for options in ({"name": "b"}, {"name": "c", "aliases": ["a"]}, {"name": "c", "aliases": ["b"]}):
        with pytest.raises(DuplicateTask, match=r"'[ab]' is registered already"):
            q.task(**options)(lambda: None)
    assert "c" not in q._handlers


async def test_a_task_that_takes_the_place_of_another_takes_its_old_names_along(open_file: Open) -> None:
    q = await open_file()
    ran = []
    q.task(name="a", aliases=["b"], durable=True)(lambda: ran.append("first"))
    q.task(name="a", aliases=["c"], durable=True, replace=True)(lambda: ran.append("second"))
    async with asyncio.timeout(10):
        for name in ("a", "b", "c"):
            await (await q.enqueue(name)).result()
    assert ran == ["second"] * 3


@pytest.mark.parametrize("aliases", ["old_name", None, 7, [7]], ids=repr)
def test_aliases_that_are_no_list_of_names_are_a_type_error(aliases: Any) -> None:
    with pytest.raises(TypeError, match="aliases"):
        TinyQ().task(aliases=aliases)


# type aliases of Python 3.12


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is new in 3.12")
def test_type_statements_are_followed_and_may_refer_to_themselves() -> None:
    names: dict[str, Any] = {"UUID": UUID}
    exec("type Id = UUID\ntype Pair[T] = tuple[T, T]\ntype Tree = UUID | list[Tree] | dict[str, Tree]", names)
    for annotation, value in [
        (names["Id"], SEVEN),
        (GenericAlias(list, (names["Id"],)), [SEVEN]),
        (names["Pair"][UUID], (SEVEN, SEVEN)),
        (names["Tree"], [SEVEN, {"a": [SEVEN]}]),
    ]:
        assert same(arrival(annotation, value), value)
    deep: Any = [SEVEN]
    for _ in range(60):
        deep = [deep]
    assert arrival(names["Tree"], deep) == deep
