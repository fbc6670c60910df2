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

from pillarbox import Consumer, Message
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.payload.asyncapi import MessageSchema, compare, document
from pillarbox.outbox.payload.schema_registry import SchemaRegistry

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


def test_the_document_is_valid_by_the_official_schema() -> None:
    found = document("billing", "1.0.0", consumer().messages())
    schema = official()
    jsonschema.Draft7Validator(schema).validate(found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate({**found, "asyncapi": "2.0.0"})


def test_each_topic_is_a_channel_with_the_schemas_of_its_versions() -> None:
    found = document("billing", "1.0.0", consumer().messages())

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


TEXT: Any = {"type": "string"}
NUMBER: Any = {"type": "number"}
WHOLE: Any = {"type": "integer"}
OPTIONAL: Any = {"anyOf": [TEXT, {"type": "null"}]}


@pytest.mark.parametrize(
    ("old", "new", "problems"),
    [
        (an_object(a=TEXT), an_object(b=TEXT), [".a: was removed"]),
        (an_object(a=TEXT), an_object(("a",), a=TEXT), [".a: became required"]),
        (an_object(("a",), a=TEXT), an_object(a=TEXT), [".a: became optional"]),
        (an_object(("a",), a=TEXT), an_object(), [".a: was removed"]),
        (an_object(), an_object(("b",), b=TEXT), [".b: became required"]),
        (
            an_object(a={"type": "array", "items": an_object(b=WHOLE)}),
            an_object(a={"type": "array", "items": an_object(b=NUMBER)}),
            ['.a[].b: was {"type": "integer"}, is {"type": "number"}'],
        ),
        (
            an_object(a={"anyOf": [an_object(b=TEXT), {"type": "null"}]}),
            an_object(a={"anyOf": [an_object(b=WHOLE), {"type": "null"}]}),
            ['.a.b: was {"type": "string"}, is {"type": "integer"}'],
        ),
        (TEXT, None, [': was {"type": "string"}, is {}']),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, WHOLE, [": was {"]),
    ],
)
def test_an_incompatible_change_is_named(
    old: Any, new: Any, problems: list[str]
) -> None:
    found = compare(*documents(old, new))
    assert len(found) == len(problems)
    for text, problem in zip(found, problems, strict=True):
        assert text.startswith(f"t.v1{problem}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NUMBER, WHOLE),
        (TEXT, WHOLE),
        (TEXT, {}),
        (TEXT, OPTIONAL),
        (OPTIONAL, {"anyOf": [*OPTIONAL["anyOf"], WHOLE]}),
        (TEXT, {"type": ["string", "null"]}),
        ({"enum": ["a", "b"]}, {"enum": ["a"]}),
        ({"const": 1}, {"const": True}),
        ({"const": None}, {}),
        (TEXT, {**TEXT, "maxLength": 3}),
        ({**WHOLE, "minimum": 1}, {**WHOLE, "minimum": 2}),
        (TEXT, {**TEXT, "pattern": "a"}),
        (TEXT, {**TEXT, "format": "date"}),
        (an_object(), {**an_object(), "additionalProperties": False}),
        ({"additionalProperties": TEXT}, {"additionalProperties": WHOLE}),
        ({"prefixItems": [TEXT, WHOLE]}, {"prefixItems": [WHOLE, TEXT]}),
    ],
)
def test_what_a_field_may_hold_must_not_become_more_or_less(
    one: Any, other: Any
) -> None:
    assert len(compare(*documents(an_object(a=one), an_object(a=other)))) >= 1
    assert len(compare(*documents(an_object(a=other), an_object(a=one)))) >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (an_object(a=TEXT), an_object(a=TEXT, b=TEXT)),
        (an_object(a=TEXT), an_object(a={**TEXT, "title": "A", "default": "x"})),
        ({"enum": ["a", "b"]}, {"enum": ["b", "a"]}),
        (OPTIONAL, {"anyOf": OPTIONAL["anyOf"][::-1]}),
        ({"anyOf": [an_object(), TEXT]}, {"anyOf": [an_object(b=TEXT), TEXT]}),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, TEXT),
    ],
)
def test_what_breaks_nobody_is_allowed(old: Any, new: Any) -> None:
    assert compare(*documents(old, new)) == []


def test_a_model_whose_fields_may_hold_more_breaks_those_who_read_it() -> None:
    class Cancelled(BaseModel):
        reason: str
        at: datetime
        amount: int

    old = Cancelled.model_json_schema()

    class Cancelled(BaseModel):  # type: ignore[no-redef]
        reason: str | None = None
        at: datetime | None
        amount: float

    found = compare(*documents(old, Cancelled.model_json_schema()))
    assert {problem.partition(":")[0] for problem in found} == {
        *("t.v1.reason", "t.v1.at", "t.v1.amount"),
    }


def test_schemas_that_lead_to_themselves_by_an_alternative_are_compared() -> None:
    class Node(BaseModel):
        value: int
        next: "Node | None" = None

    old = Node.model_json_schema()

    class Node(BaseModel):  # type: ignore[no-redef]
        value: float
        next: "Node | None" = None

    found = compare(*documents(old, Node.model_json_schema()))
    assert [problem.partition(":")[0] for problem in found] == ["t.v1.value"]


def test_a_schema_that_leads_to_another_one_above_it_has_changed() -> None:
    def nested(to: str) -> Any:
        inner = an_object(c={"$ref": f"#/$defs/{to}"})
        outer = an_object(b={"$ref": "#/$defs/inner"})
        return {"$ref": "#/$defs/outer", "$defs": {"outer": outer, "inner": inner}}

    assert compare(*documents(nested("inner"), nested("inner"))) == []
    (problem,) = compare(*documents(nested("inner"), nested("outer")))
    assert problem.startswith("t.v1.b.c: ")


def test_recursive_schemas_are_compared() -> None:
    class Changed(BaseModel):
        sku: str
        price: int
        parts: list["Changed"] = Field(default_factory=list)

    old, new = documents(Item.model_json_schema(), Changed.model_json_schema())
    assert compare(old, old) == []
    assert any("price" in problem for problem in compare(old, new))


def test_references_are_compared_by_what_they_lead_to() -> None:
    def named(keyword: str, name: str, inner: Any) -> Any:
        return {keyword: {"$ref": f"#/$defs/{name}"}, "$defs": {name: inner}}

    some, fewer = {"enum": ["a", "b"]}, {"enum": ["a"]}
    for keyword in ("propertyNames", "not"):
        old = named(keyword, "A", some)
        assert compare(*documents(old, named(keyword, "B", some))) == []
        assert len(compare(*documents(old, named(keyword, "A", fewer)))) == 1

    beside = {"$ref": "#/$defs/A", "$defs": {"A": TEXT}}
    assert len(compare(*documents(beside, {**beside, "maxLength": 3}))) == 1

    old, new = (
        {
            "anyOf": [{"$ref": f"#/$defs/{name}"}, {**WHOLE, "description": name}],
            "$defs": {name: {**TEXT, "description": name}},
        }
        for name in ("A", "Z")
    )
    assert compare(*documents(old, new)) == []


def test_a_message_that_is_gone_is_found() -> None:
    (old,) = documents(TEXT)
    new = document("d", "1", [MessageSchema("t", 2, TEXT, is_received=True)])
    assert compare(old, new) == ["t.v1: was removed"]


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
    assert main(["asyncapi", path, "--against", str(old)]) == 1
    assert "orders.placed.v2.old: was removed" in capsys.readouterr().out
    old.write_text("{")
    assert main(["asyncapi", path, "--against", str(old)]) == 2
    assert "can't be read: JSONDecodeError" in capsys.readouterr().err
    old.write_text("[]")
    assert main(["asyncapi", path, "--against", str(old)]) == 2
    assert "isn't an AsyncAPI document" in capsys.readouterr().err
    assert main(["asyncapi", path, "--against", str(tmp_path / "none.json")]) == 2
    for parts in ('"info": {}', '"components": {"messages": []}'):
        old.write_text(f'{{"asyncapi": "3.0.0", {parts}}}')
        assert main(["asyncapi", path, "--against", str(old)]) == 2
        assert "has no components.messages" in capsys.readouterr().err
