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
from outbox.errors import ConfigError, traceback_of
from outbox.payload.schema_registry import PayloadError, Validator
from outbox.payload.validators.msgspec import MsgspecValidator
from outbox.payload.validators.pydantic import PydanticValidator
from pillarbox import InvalidMessageError, Message, SchemaRegistry

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
@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ({"order_id": SECRET}, "order_id"),
        ({"order_id": 1, "card": [SECRET]}, "card"),
        ([SECRET], ""),
    ],
)
def test_an_invalid_payload_is_refused_without_quoting_it(
    schema: object, payload: object, where: str
) -> None:
    registry = registry_with(schema)

    with Session() as session, pytest.raises(InvalidMessageError) as caught:
        pillarbox.add(session, Message("orders.placed", payload), registry=registry)

    assert caught.value.field == "payload"
    assert where in caught.value.problem
    assert "version 1 of topic 'orders.placed'" in caught.value.problem
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("schema", KINDS, ids=NAMES)
@pytest.mark.parametrize("payload", [b"{", b"\xff", b""])
def test_a_payload_that_is_not_json_is_refused(schema: object, payload: bytes) -> None:
    message = Message("orders.placed", payload, content_type="application/json")

    with pytest.raises(InvalidMessageError, match="payload"):
        registry_with(schema).check(message)


def test_bytes_not_declared_as_json_are_refused() -> None:
    with pytest.raises(InvalidMessageError, match="content_type"):
        registry_with(Model).check(Message("orders.placed", b'{"order_id": 1}'))


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "application/vnd.a+json"],
)
def test_every_json_content_type_is_read(content_type: str) -> None:
    message = Message("orders.placed", b'{"order_id": 1}', content_type=content_type)

    assert registry_with(Struct).load(message) == Struct(1)


def test_a_version_that_is_not_registered_is_refused() -> None:
    registry = registry_with(Model)
    registry.register("orders.placed", Plain, version=3)

    registry.check(Message("orders.placed", {"order_id": 1}, schema_version=3))
    with pytest.raises(InvalidMessageError, match="pass one of 1, 3"):
        registry.check(Message("orders.placed", {"order_id": 1}, schema_version=2))


def test_topics_without_a_schema_accept_anything() -> None:
    registry_with(Model).check(Message("orders.paid", b"\xff", schema_version=9))


def test_statements_are_checked_too() -> None:
    with pytest.raises(InvalidMessageError, match="order_id"):
        pillarbox.insert_statement(
            Message("orders.placed", {}), registry=registry_with(Model)
        )


@pytest.mark.parametrize("validator", [MsgspecValidator, PydanticValidator])
def test_either_library_can_read_a_dataclass(validator: Any) -> None:
    reader: Validator = validator(Plain)
    assert reader.load(b'{"order_id": 1}') == Plain(1)


class Unreadable:
    pass


@pytest.mark.parametrize(
    ("topic", "schema", "version", "words"),
    [
        ("orders.*", Model, 1, "in full"),
        ("", Model, 1, "in full"),
        ("orders.placed", Model, 0, "from 1"),
        ("orders.placed", Model, True, "from 1"),
        ("orders.placed", 7, 1, "neither"),
        ("orders.placed", {"type": "no such type"}, 1, r"\$\.type"),
        ("known", Model, 1, "already"),
    ],
)
def test_an_invalid_registration_is_reported_at_once(
    topic: str, schema: object, version: int, words: str
) -> None:
    registry = SchemaRegistry()
    registry.register("known", Model)

    with pytest.raises(ConfigError, match=words):
        registry.register(topic, schema, version=version)


@pytest.mark.parametrize(
    ("validator", "type_"),
    [(MsgspecValidator, list[int] | set[int]), (PydanticValidator, list[Unreadable])],
)
def test_an_unreadable_type_is_reported_at_once(validator: Any, type_: object) -> None:
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
    "payload",
    [
        {"kind": SECRET},
        {SECRET: 1},
        {"limits": {SECRET: "many"}},
        {"limits": {SECRET: 0}},
    ],
    ids=["value", "unknown key", "key", "rule of the application"],
)
@pytest.mark.parametrize(
    "schema",
    [StrictModel, StrictStruct, STRICT],
    ids=["pydantic", "msgspec", "JSON Schema"],
)
def test_no_schema_library_shows_values_or_keys_of_the_payload(
    schema: Any, payload: object
) -> None:
    registry = registry_with(schema)

    with pytest.raises(InvalidMessageError) as caught:
        registry.load(Message("orders.placed", payload))

    assert "doesn't fit version 1" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in traceback_of(caught.value)


def test_a_type_without_a_json_schema_is_validated() -> None:
    class Odd(pydantic.BaseModel):
        order_id: Annotated[int, pydantic.PlainValidator(int)]
        when: Callable[[], int] | None = None

    validator = PydanticValidator(Odd)

    with pytest.raises(PayloadError, match=r"at \$\.…: value_error"):
        validator.load(b'{"order_id": "many"}')
