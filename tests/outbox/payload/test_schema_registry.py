"""The schema registry: a payload that doesn't fit is refused when it is added."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import InvalidMessageError, Message, SchemaRegistry
from pillarbox.outbox.errors import ConfigError, traceback_of
from pillarbox.outbox.payload.schema_registry import PayloadError
from pillarbox.outbox.payload.validators.msgspec import MsgspecValidator
from pillarbox.outbox.payload.validators.pydantic import PydanticValidator

SECRET = "4111-1111"


class Model(pydantic.BaseModel):
    order_id: int
    card: str = ""


class Struct(msgspec.Struct):
    order_id: int
    card: str = ""


@dataclass
class Plain:
    order_id: int
    card: str = ""


class Typed(TypedDict, total=False):
    order_id: int
    card: str


DOCUMENT = {
    "type": "object",
    "properties": {"order_id": {"type": "integer"}, "card": {"type": "string"}},
    "required": ["order_id"],
}
KINDS = [Model, Struct, Plain, Typed, DOCUMENT]
NAMES = ["pydantic", "msgspec", "dataclass", "TypedDict", "JSON Schema"]


def registry_with(schema: object) -> SchemaRegistry:
    registry = SchemaRegistry()
    registry.register("orders.placed", schema)
    return registry


@pytest.mark.parametrize("schema", KINDS, ids=NAMES)
def test_a_payload_that_fits_is_added(schema: object) -> None:
    registry = registry_with(schema)
    message = Message("orders.placed", {"order_id": 7})

    with Session() as session:
        pillarbox.add(session, message, registry=registry)

    loaded = registry.load(message)
    if isinstance(loaded, dict):
        assert loaded == {"order_id": 7}
    else:
        assert loaded == schema(order_id=7)  # type: ignore[operator]


@pytest.mark.parametrize("schema", KINDS, ids=NAMES)
def test_an_invalid_payload_is_refused_without_quoting_it(schema: object) -> None:
    registry = registry_with(schema)
    wrong: list[tuple[object, str]] = [
        ({"order_id": SECRET}, "order_id"),
        ({"order_id": 1, "card": [SECRET]}, "card"),
        ([SECRET], ""),
    ]
    for payload, where in wrong:
        message = Message("orders.placed", payload)
        with Session() as session, pytest.raises(InvalidMessageError) as caught:
            pillarbox.add(session, message, registry=registry)

        assert caught.value.field == "payload"
        assert where in caught.value.problem
        assert "version 1 of topic 'orders.placed'" in caught.value.problem
        assert SECRET not in str(caught.value)
    for text in (b"{", b"\xff", b""):
        message = Message("orders.placed", text, content_type="application/json")
        with pytest.raises(InvalidMessageError, match="payload"):
            registry.check(message)


def test_only_bytes_declared_as_json_are_read() -> None:
    text = b'{"order_id": 1}'
    for kind in ("application/json; charset=utf-8", "application/vnd.a+json"):
        message = Message("orders.placed", text, content_type=kind)
        assert registry_with(Struct).load(message) == Struct(1)
    with pytest.raises(InvalidMessageError, match="content_type"):
        registry_with(Model).check(Message("orders.placed", text))


def test_a_version_that_is_not_registered_is_refused() -> None:
    registry = registry_with(Model)
    registry.register("orders.placed", Plain, version=3)

    registry.check(Message("orders.placed", {"order_id": 1}, schema_version=3))
    with pytest.raises(InvalidMessageError, match="pass one of 1, 3"):
        registry.check(Message("orders.placed", {"order_id": 1}, schema_version=2))


def test_statements_are_checked_too_and_topics_without_a_schema_accept_anything() -> (
    None
):
    registry = registry_with(Model)
    registry.check(Message("orders.paid", b"\xff", schema_version=9))
    with pytest.raises(InvalidMessageError, match="order_id"):
        pillarbox.insert_statement(Message("orders.placed", {}), registry=registry)


class Unreadable:
    pass


INVALID: list[tuple[str, object, int, str]] = [
    ("orders.*", Model, 1, "in full"),
    ("", Model, 1, "in full"),
    ("orders.placed", Model, 0, "from 1"),
    ("orders.placed", Model, True, "from 1"),
    ("orders.placed", 7, 1, "neither"),
    ("orders.placed", {"type": "no such type"}, 1, r"\$\.type"),
    ("known", Model, 1, "already"),
]


def test_an_invalid_registration_is_reported_at_once() -> None:
    registry = SchemaRegistry()
    registry.register("known", Model)

    for topic, schema, version, words in INVALID:
        with pytest.raises(ConfigError, match=words):
            registry.register(topic, schema, version=version)


def test_either_library_reads_a_dataclass_and_reports_a_type_that_it_cannot_read() -> (
    None
):
    unreadable: list[tuple[Any, object]] = [
        (MsgspecValidator, list[int] | set[int]),
        (PydanticValidator, list[Unreadable]),
    ]
    for validator, type_ in unreadable:
        assert validator(Plain).load(b'{"order_id": 1}') == Plain(1)
        with pytest.raises(ConfigError, match="annotate its fields"):
            validator(type_)


def test_a_later_change_of_the_callers_schema_changes_nothing() -> None:
    schema: dict[str, Any] = {"properties": {"order": {"type": "integer"}}}
    registry = SchemaRegistry()
    registry.register("t", schema)

    schema["properties"]["order"]["type"] = "string"

    registry.check(Message("t", {"order": 1}))


class Kind(enum.Enum):
    CARD = "card"


class StrictModel(pydantic.BaseModel, extra="forbid"):
    kind: Literal["card"] = "card"
    limits: dict[str, int] = {}

    @pydantic.field_validator("limits")
    @classmethod
    def refuse(cls, limits: dict[str, int]) -> dict[str, int]:
        if 0 in limits.values():
            raise ValueError(f"no limit for {SECRET}")
        return limits


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind = Kind.CARD
    limits: dict[str, int] = {}

    def __post_init__(self) -> None:
        if 0 in self.limits.values():
            raise ValueError(f"Expected no limit for {SECRET}")


STRICT = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["card"]},
        "limits": {"additionalProperties": {"type": "integer", "exclusiveMinimum": 0}},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [StrictModel, StrictStruct, STRICT],
    ids=["pydantic", "msgspec", "JSON Schema"],
)
def test_no_schema_library_shows_values_or_keys_of_the_payload(schema: Any) -> None:
    registry = registry_with(schema)
    wrong: dict[str, object] = {
        "value": {"kind": SECRET},
        "unknown key": {SECRET: 1},
        "key": {"limits": {SECRET: "many"}},
        "rule of the application": {"limits": {SECRET: 0}},
    }
    for what, payload in wrong.items():
        with pytest.raises(InvalidMessageError) as caught:
            registry.load(Message("orders.placed", payload))

        assert "doesn't fit version 1" in str(caught.value), what
        assert SECRET not in str(caught.value), what
        assert SECRET not in traceback_of(caught.value), what


def test_a_type_without_a_json_schema_is_validated() -> None:
    class Odd(pydantic.BaseModel):
        order_id: Annotated[int, pydantic.PlainValidator(int)]
        when: Callable[[], int] | None = None

    validator = PydanticValidator(Odd)

    with pytest.raises(PayloadError, match=r"at \$\.order_id: value_error"):
        validator.load(b'{"order_id": "many"}')
