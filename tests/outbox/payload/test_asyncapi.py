"""The messages of an application as an AsyncAPI document, and what breaks consumers."""

import gzip
import json
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import jsonschema
import msgspec
import pytest
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from outbox.cli.main import main
from outbox.payload.asyncapi import MessageSchema, compare, document
from outbox.payload.schema_registry import SchemaRegistry
from pillarbox import Consumer, Message

# Of github.com/asyncapi/spec-json-schemas, Apache License 2.0.
OFFICIAL = Path(__file__).parent / "asyncapi-3.0.0.json.gz"


class Item(BaseModel):
    sku: str
    price: Decimal
    parts: list["Item"] = []


class Placed(BaseModel):
    id: UUID
    at: datetime
    items: list[Item]
    channel: Literal["web", "shop"] = "web"


class Paid(msgspec.Struct):
    order: int
    note: str | None = None


@dataclass
class Clicked:
    page: str
    tags: list[str] = field(default_factory=list)


def consumer() -> Consumer:
    registry = SchemaRegistry()
    registry.event("orders.placed", version=2)(Placed)
    registry.event("orders.paid")(Paid)
    registry.register("orders.packed", {"type": "object", "$defs": {"a": {}}})
    consumer = Consumer(
        "memory://", async_sessionmaker(), name="billing", registry=registry
    )

    @consumer.handles("orders.placed", version=2)
    async def bill(session: AsyncSession, order: Placed) -> None: ...

    @consumer.handles("clicks.*")
    async def count(session: AsyncSession, click: Clicked) -> None: ...

    @consumer.handles("users")
    async def greet(session: AsyncSession, message: Message) -> None: ...

    return consumer


def official() -> Any:
    return json.loads(gzip.decompress(OFFICIAL.read_bytes()))


def test_each_topic_is_a_channel_with_the_schemas_of_its_versions() -> None:
    found = document("billing", "1.0.0", consumer().messages())
    schema = official()
    jsonschema.Draft7Validator(schema).validate(found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate({**found, "asyncapi": "2.0.0"})

    assert {c["address"] for c in found["channels"].values()} == {
        *("orders.placed", "orders.paid", "orders.packed", "clicks.*", "users"),
    }
    assert {name.partition(".")[0] for name in found["operations"]} == {
        *("receive", "send"),
    }
    assert found["operations"]["receive.orders.placed"]["action"] == "receive"
    assert found["operations"]["send.orders.paid"]["action"] == "send"
    schemas = found["components"]["schemas"]
    assert schemas["orders.placed.v2"]["required"] == ["id", "at", "items"]
    reference = schemas["orders.placed.v2"]["properties"]["items"]["items"]["$ref"]
    assert reference.removeprefix("#/components/schemas/") in schemas
    assert "payload" not in found["components"]["messages"]["users.v1"]


def documents(*schemas: Any) -> list[dict[str, Any]]:
    return [
        document("d", "1", [MessageSchema("t", 1, schema, is_received=True)])
        for schema in schemas
    ]


def an_object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def an_array(items: Any) -> Any:
    return {"type": "array", "items": items}


TEXT: Any = {"type": "string"}
NUMBER: Any = {"type": "number"}
WHOLE: Any = {"type": "integer"}
OPTIONAL: Any = {"anyOf": [TEXT, {"type": "null"}]}
CLOSED = {**an_object(a=TEXT), "additionalProperties": False}


BREAKING: list[tuple[Any, Any, str]] = [
    (an_object(a=TEXT), an_object(b=TEXT), "t.v1.a: was removed"),
    (an_object(a=TEXT), an_object(("a",), a=TEXT), "t.v1.a: became required"),
    (an_object(), an_object(("b",), b=TEXT), "t.v1.b: became required"),
    (an_object(a=NUMBER), an_object(a=WHOLE), "t.v1.a: the type number"),
    (an_object(a=TEXT), an_object(a=WHOLE), "t.v1.a: the type string"),
    (an_object(a={}), an_object(a=TEXT), "t.v1.a: the type any"),
    (an_object(a=OPTIONAL), an_object(a=TEXT), "t.v1.a: alternative 2"),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "t.v1: allows fewer values"),
    (TEXT, {"const": "a"}, "t.v1: allows fewer values"),
    (an_array(NUMBER), an_array(TEXT), "t.v1[]: the type integer, number"),
    (TEXT, {**TEXT, "maxLength": 3}, "t.v1: maxLength fell to 3"),
    ({**WHOLE, "minimum": 1}, {**WHOLE, "minimum": 2}, "t.v1: minimum rose to 2"),
    (TEXT, {**TEXT, "pattern": "a"}, "t.v1: has a new pattern"),
    (an_object(a=TEXT), CLOSED, "t.v1: allows no other fields"),
    ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, WHOLE, "t.v1: the type stri"),
]
ALLOWED: list[tuple[Any, Any]] = [
    (an_object(a=TEXT), an_object(a=TEXT, b=TEXT)),
    (an_object(("a",), a=TEXT), an_object(a=TEXT)),
    (WHOLE, NUMBER),
    (TEXT, OPTIONAL),
    (TEXT, {}),
    ({"enum": ["a"]}, {"enum": ["a", "b"]}),
    ({**TEXT, "maxLength": 3}, TEXT),
]


def test_exactly_what_breaks_a_consumer_is_found() -> None:
    for old, new, problem in BREAKING:
        (found,) = compare(*documents(old, new))
        assert found.startswith(problem)
    for old, new in ALLOWED:
        assert compare(*documents(old, new)) == [], new


def test_recursive_schemas_and_messages_that_are_gone_are_compared() -> None:
    class Changed(BaseModel):
        sku: str
        price: int
        parts: list["Changed"] = Field(default_factory=list)

    old, new = documents(Item.model_json_schema(), Changed.model_json_schema())
    assert compare(old, old) == []
    assert any("price" in problem for problem in compare(old, new))
    (old,) = documents(TEXT)
    new = document("d", "1", [MessageSchema("t", 2, TEXT, is_received=True)])
    assert compare(old, new) == ["t.v1: is gone"]


def test_the_command_prints_a_document_and_compares_with_an_earlier_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = f"{__name__}:consumer"
    assert main(["asyncapi", path]) == 0
    printed = capsys.readouterr().out
    jsonschema.Draft7Validator(official()).validate(json.loads(printed))

    old = tmp_path / "old.json"
    old.write_text(printed)
    assert main(["asyncapi", path, "--against", str(old)]) == 0
    changed = json.loads(printed)
    changed["components"]["schemas"]["orders.placed.v2"]["properties"]["old"] = TEXT
    old.write_text(json.dumps(changed))
    assert main(["asyncapi", path, "--against", str(old)]) == 2
    assert "orders.placed.v2.old: was removed" in capsys.readouterr().out
    old.write_text("{")
    assert main(["asyncapi", path, "--against", str(old)]) == 2
    assert "can't be read: JSONDecodeError" in capsys.readouterr().err
