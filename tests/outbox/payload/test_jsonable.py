"""Objects as payloads: encoded as Pydantic's JSON mode encodes them, or refused."""

import enum
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import to_json

from pillarbox import InvalidMessageError, Message
from pillarbox.outbox.errors import CodecError
from pillarbox.outbox.payload.json_codec import decode, encode
from pillarbox.outbox.payload.jsonable import jsonable

AT = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
ID = UUID("01890000-0000-7000-8000-000000000000")


class Status(enum.Enum):
    PAID = "paid"


class Text(str, enum.Enum):  # noqa: UP042 (both kinds exist)
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class Model(BaseModel):
    id: UUID
    at: datetime
    amount: Decimal
    status: Status = Status.PAID


@pydantic_dataclass
class Validated:
    id: UUID
    at: datetime
    amount: Decimal
    status: Status = Status.PAID


@dataclass
class Plain:
    id: UUID
    at: datetime
    amount: Decimal
    status: Status = Status.PAID


@attrs.define
class Attrs:
    id: UUID
    at: datetime
    amount: Decimal
    status: Status = Status.PAID


class Struct(msgspec.Struct):
    id: UUID
    at: datetime
    amount: Decimal
    status: Status = Status.PAID


class Typed(TypedDict):
    id: UUID
    at: datetime
    amount: Decimal
    status: Status


PLACED: dict[str, Any] = {"id": ID, "at": AT, "amount": Decimal("1.10")}
ENCODED = (
    b'{"id":"01890000-0000-7000-8000-000000000000","at":"2026-01-31T12:30:00Z",'
    b'"amount":"1.10","status":"paid"}'
)


def test_each_kind_of_class_gives_the_same_bytes() -> None:
    for order in (
        Model(**PLACED),
        Validated(**PLACED),
        Plain(**PLACED),
        Attrs(**PLACED),
        Struct(**PLACED),
        Typed(id=ID, at=AT, amount=Decimal("1.10"), status=Status.PAID),
    ):
        message = Message("orders.placed", order)
        assert (order, message.payload) == (order, ENCODED)
        assert message.content_type == "application/json"
        assert Message("orders.placed", [order]).payload == b"[" + ENCODED + b"]"


zones = st.none() | st.integers(-14 * 60, 14 * 60).map(
    lambda minutes: timezone(timedelta(minutes=minutes))
)
scalars = (
    st.datetimes(timezones=zones)
    | st.times(timezones=zones)
    | st.dates()
    | st.timedeltas(timedelta(days=-300_000), timedelta(days=300_000))
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.uuids()
    | st.sampled_from([Status.PAID, Text.A, Number.ONE])
    | st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)
    | st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
keys = st.uuids() | st.dates() | st.integers() | st.sampled_from([Status.PAID, Text.A])


@given(
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(deque)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=1)
        ),
        max_leaves=8,
    )
)
def test_what_is_encoded_is_what_pydantic_encodes(value: object) -> None:
    assert encode(value) == to_json(value)


def test_sets_become_lists_and_a_text_stays_a_text_whatever_it_contains() -> None:
    assert encode({"a": {1}, "b": frozenset({AT})}) == (
        b'{"a":[1],"b":["2026-01-31T12:30:00Z"]}'
    )
    assert Message("t", '{"a": 1}').payload == b'"{\\"a\\": 1}"'


class Item(NamedTuple):
    price: object


class Order(BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    items: list[Any] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"items": [1, {"price": object()}]}, r"items\[1\]\.price: object "),
        ({"items": [Item(float("nan"))]}, r"items\[0\]\[0\]: a float that"),
        ({"at": Plain(ID, AT, b"\xff")}, r"at\.amount: bytes "),  # type: ignore[arg-type]
        ({"text": ["lone \ud800"]}, r"text\[0\]: surrogates"),
        ({"a": {("x",): 1}}, "a: a tuple can't be a key"),
        ({"a": {1: 1, "1": object()}}, "a: two keys are '1' in JSON"),
        (Order(items=[object()]), "Order can't be encoded"),
    ],
)
def test_the_error_names_the_path_to_what_cannot_be_encoded(
    value: object, path: str
) -> None:
    with pytest.raises(CodecError, match=path):
        encode(value)


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def test_an_application_registers_how_its_own_classes_are_encoded() -> None:
    with pytest.raises(CodecError, match=r"total: Money can't be encoded"):
        encode({"total": Money(100)})

    @jsonable.register
    def _(money: Money) -> object:
        return {"cents": money.cents, "at": AT}

    assert encode({"total": Money(100), ID: 1}) == (
        b'{"total":{"cents":100,"at":"2026-01-31T12:30:00Z"},'
        b'"01890000-0000-7000-8000-000000000000":1}'
    )
    assert encode([Struct(ID, AT, Money(1))])  # type: ignore[arg-type]


def circle() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def well() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def test_the_error_for_an_unencodable_payload_has_a_remedy() -> None:
    payloads = (
        *(object(), {"at": 1j}, float("nan"), {"a": [float("inf")]}),
        *("lone \ud800 surrogate", {("a", "b"): 1}, bytearray(b"not quite bytes")),
        *(circle(), well()),
    )
    for payload in payloads:
        with pytest.raises(CodecError) as refusal:
            Message("orders.placed", payload)

        assert isinstance(refusal.value, InvalidMessageError)
        assert refusal.value.field == "payload"
        assert type(payload).__name__ in str(refusal.value)
        assert "can't be encoded as JSON" in str(refusal.value)
        assert "@jsonable.register, or pass bytes" in str(refusal.value)


def test_an_encoded_value_is_decoded_again_and_other_text_is_refused() -> None:
    values: tuple[object, ...] = (
        *(None, True, 0, -1.5, "", "ä😀\u2028", [], {}),
        {"a": [{"b": None}]},
    )
    for value in values:
        assert decode(encode(value)) == value
    for text in (b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000):
        with pytest.raises(CodecError, match="isn't JSON"):
            decode(text)


def test_an_error_does_not_show_a_long_value_in_full() -> None:
    error = InvalidMessageError("key", "k" * 1000, "is long", "shorten it")

    assert len(str(error)) < 120
    assert "…" in str(error)
