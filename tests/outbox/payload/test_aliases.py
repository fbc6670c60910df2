"""What is written under an alias is read under it, or the model is refused."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    AliasGenerator,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    SecretBytes,
    SecretStr,
    computed_field,
    create_model,
    field_serializer,
)
from pydantic.alias_generators import to_camel, to_pascal
from pydantic.dataclasses import dataclass as pydantic_dataclass
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from typing_extensions import TypedDict

from pillarbox import Consumer, Message
from pillarbox.outbox.errors import CodecError, ConfigError, InvalidMessageError
from pillarbox.outbox.payload import json_codec
from pillarbox.outbox.payload.asyncapi import document
from pillarbox.outbox.payload.schema_registry import (
    PayloadError,
    SchemaRegistry,
    validator_of,
)

T = TypeVar("T")


class Payer(BaseModel):
    paid_by: str = Field(alias="paidBy", default="unknown")


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    order_id: int
    payer: Payer = Payer()


class Named(BaseModel):
    """Its configuration asks for names where pillarbox uses aliases."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=False,
        extra="forbid",
    )
    order_id: int = 0
    payers: list[Payer] = []


class Unaliased(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=False, validate_by_name=True
    )
    order_id: int = 0


@pydantic_dataclass
class Validated:
    order_id: Annotated[int, Field(alias="orderId")]
    payer: Payer = Field(alias="paidFrom", default_factory=lambda: Payer())


@dataclass
class Plain:
    place: str
    payer: Payer


class Typed(TypedDict):
    at_place: str


class Container(BaseModel):
    """Its configuration holds for what has none of its own."""

    model_config = ConfigDict(alias_generator=to_pascal)
    first_one: Typed
    others: list[Typed] = []


class Page(BaseModel, Generic[T]):
    next_page: str = Field("", alias="nextPage")
    all_items: list[T] = Field(alias="allItems")


class Struct(msgspec.Struct, rename="camel"):
    order_id: int
    paid_by: str = "unknown"
    signature: bytes = b""


@dataclass
class Derived(Validated):
    """A standard dataclass, whose serializer is that of its base."""

    note: str = ""


def made(kind: Any, *values: Any, **named: Any) -> Any:
    """Return an instance by aliases, which type checkers don't know."""
    return kind(*values, **named)


def payer(name: str) -> Payer:
    return Payer.model_validate({"paidBy": name})


VALUES: list[tuple[Any, Any]] = [
    (Payer, payer("jane")),
    (Camel, Camel.model_validate({"orderId": 7, "payer": {"paidBy": "jane"}})),
    (Named, Named(order_id=7, payers=[payer("jane")])),
    (Unaliased, Unaliased(order_id=7)),
    (Validated, made(Validated, orderId=7, paidFrom=payer("jane"))),
    (Plain, Plain("home", payer("jane"))),
    (list[Payer], [payer("jane")]),
    (Payer | Camel, Camel.model_validate({"orderId": 7})),
    (RootModel[list[Payer]], RootModel[list[Payer]]([payer("jane")])),
    (Page[Payer], Page[Payer].model_validate({"allItems": [{"paidBy": "jane"}]})),
    (
        Container,
        Container.model_validate(
            {"FirstOne": {"AtPlace": "a"}, "Others": [{"AtPlace": "b"}]}
        ),
    ),
    (Struct, Struct(7, "jane", b"abcd")),
]


@pytest.mark.parametrize(("schema", "value"), VALUES, ids=lambda it: str(it)[:40])
def test_messages_schema_and_document_use_the_alias(schema: Any, value: Any) -> None:
    registry = SchemaRegistry()
    registry.register("orders.placed", schema)
    consumer = Consumer(
        "memory://", async_sessionmaker(), name="billing", registry=registry
    )

    @consumer.handles("orders.placed")
    async def bill(session: AsyncSession, message: Message) -> None: ...

    message = Message("orders.placed", value)

    registry.check(message)
    assert registry.load(message) == value
    assert "_" not in str(keys(message.json()))
    described = document("shop", "1", consumer.messages())
    one = {"$ref": "#/components/schemas/orders.placed.v1", **described}
    jsonschema.validate(message.json(), one)
    assert "_" not in str(properties(described))


def keys(value: Any) -> list[str]:
    if isinstance(value, list):
        return [key for inner in value for key in keys(inner)]
    if not isinstance(value, dict):
        return []
    return [*value, *keys([*value.values()])]


def properties(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [name for inner in schema for name in properties(inner)]
    if not isinstance(schema, dict):
        return []
    own = [*schema.get("properties", {}), *schema.get("required", [])]
    return [*own, *properties([*schema.values()])]


def test_rows_that_were_written_by_field_names_are_read() -> None:
    written: list[tuple[Any, str, Any]] = [
        (Payer, '{"paid_by": "jane"}', payer("jane")),
        (Camel, '{"order_id": 7, "payer": {"paid_by": "jane"}}', VALUES[1][1]),
        (Named, '{"order_id": 7, "payers": [{"paid_by": "jane"}]}', VALUES[2][1]),
        (Page[Payer], '{"all_items": [{"paid_by": "jane"}]}', VALUES[9][1]),
    ]
    for schema, text, value in written:
        registry = SchemaRegistry()
        registry.register("orders.placed", schema)
        message = Message.from_json("orders.placed", text)
        assert registry.load(message) == value
        with pytest.raises(
            InvalidMessageError, match=r"alias; pass the|missing|extra_forbidden"
        ):
            registry.check(message)


def test_only_names_instead_of_aliases_are_refused_when_a_message_is_added() -> None:
    class Made(BaseModel):
        paid_by: str = Field("unknown", alias="paidBy")
        number: int = Field(default_factory=iter(range(100)).__next__)
        details: dict[str, str] = {}

    validator = validator_of(Made)
    for fits in ({}, {"details": {"paid_by": "x"}}, {"paidBy": "jane", "number": 1}):
        validator.check(json_codec.encode(fits))
    with pytest.raises(PayloadError, match=r"model_dump\(by_alias=True\)"):
        validator.check(json_codec.encode(Made(paidBy="jane").model_dump()))


class Chosen(BaseModel):
    payer: str = Field("x", validation_alias=AliasChoices("paidBy", "payer"))


class Inside(BaseModel):
    payer: str = Field("x", validation_alias=AliasPath("order", "payer"))


class OnlyWritten(BaseModel):
    payer: str = Field("x", serialization_alias="paidBy")


class OnlyRead(BaseModel):
    payer: str = Field("x", validation_alias="paidBy")


class Generated(BaseModel):
    model_config = ConfigDict(
        alias_generator=AliasGenerator(
            validation_alias=to_camel, serialization_alias=to_pascal
        )
    )
    paid_by: str = "x"


class Swapped(BaseModel):
    payer: str = Field("x", alias="payee")
    payee: str = Field("x", alias="paidTo")


class Twice(BaseModel):
    payer: str = Field("x", alias="name")
    payee: str = Field("x", alias="name")


@pydantic_dataclass
class Dataclass:
    payer: Annotated[str, Field(serialization_alias="paidBy")] = "x"


@dataclass
class Standard:
    """`jsonable` writes it by names, for it knows nothing of pydantic."""

    payer: Annotated[str, Field(alias="paidBy")] = "x"


class Dict(TypedDict, total=False):
    payer: Annotated[str, Field(alias="paidBy")]


@dataclass
class Outside:
    """Not pydantic's, and so is the TypedDict in it, which stands twice."""

    one: Dict
    other: Dict


class Recursive(BaseModel):
    inner: "Recursive | None" = None
    one: OnlyRead | None = None


TWO_NAMES: list[Any] = [
    *(
        Chosen,
        Twice,
        Inside,
        OnlyWritten,
        OnlyRead,
        Generated,
        Swapped,
        Dataclass,
        Standard,
    ),
    *(
        Dict,
        Derived,
        Outside,
        Recursive,
        list[OnlyRead],
        OnlyRead | Payer,
        Page[OnlyRead],
    ),
    *(RootModel[dict[str, OnlyRead]], Annotated[OnlyRead, "x"], dict[str, Standard]),
]


@pytest.mark.parametrize("schema", TWO_NAMES, ids=str)
def test_a_type_that_is_read_otherwise_than_it_is_written_is_refused(
    schema: Any,
) -> None:
    with pytest.raises(ConfigError, match=r"its field '.*; give it one alias=…"):
        SchemaRegistry().register("orders.placed", schema)
    consumer = Consumer("memory://", async_sessionmaker(), name="billing")

    async def bill(session: AsyncSession, order: Any) -> None: ...

    bill.__annotations__["order"] = schema
    with pytest.raises(ConfigError, match=r"its field '.*; give it one alias=…"):
        consumer.handles("orders.placed")(bill)


def test_a_class_whose_parts_are_defined_later_is_checked_when_they_are() -> None:
    registry = SchemaRegistry()

    @registry.event("orders.placed")
    class Early(BaseModel):
        later: "Later"

    class Later(BaseModel):
        payer: str = Field("x", validation_alias="paidBy")

    Early.model_rebuild(_types_namespace={"Later": Later})
    with pytest.raises(ConfigError, match=r"its field 'payer' is written as 'payer'"):
        registry.check(Message("orders.placed", Early(later=made(Later))))


class Secret(BaseModel):
    token: SecretStr


class Revealed(BaseModel):
    token: SecretStr
    spare: SecretBytes = Field(default=SecretBytes(b"x"), exclude=True)

    @field_serializer("token", when_used="json")
    def reveal(self, token: SecretStr) -> str:
        return token.get_secret_value()


def test_a_secret_is_sent_as_it_is_or_refused() -> None:
    hidden = Secret(token=SecretStr("sesame"))
    for payload in (
        *(hidden, [hidden], {"a": {"b": hidden}}, {"token": SecretStr("sesame")}),
        *({1: SecretBytes(b"sesame")}, RootModel[list[Secret]]([hidden])),
        *(
            made(Standard, SecretStr("sesame")),
            Page[Any](nextPage="", allItems=[SecretStr("sesame")]),
        ),
    ):
        with pytest.raises(CodecError, match=r"secret.*give its field a field_serial"):
            Message("logins", payload)
    shown = Revealed(token=SecretStr("sesame"))
    message = Message("logins", shown)
    assert message.json() == {"token": "sesame"}
    assert validator_of(Revealed).load(message.payload) == shown


names = st.sampled_from(["a", "b", "c_d", "cD", "A", "x y"])
values: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(0, 9),
    str: st.text("ab*", max_size=10),
    SecretStr: st.text("ab*", max_size=10).map(SecretStr),
}


@st.composite
def models(draw: st.DrawFn, depth: int = 0) -> BaseModel:
    """Return an instance of a model with any aliases, nested at most twice."""
    fields: dict[str, Any] = {}
    content: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b", "c_d", "e"]), unique=True)):
        inner = draw(models(depth + 1)) if depth < 2 and draw(st.booleans()) else None
        kind = draw(st.sampled_from([*values])) if inner is None else type(inner)
        details: dict[str, Any] = {"exclude": draw(st.sampled_from([None, None, True]))}
        for alias in ("alias", "validation_alias", "serialization_alias"):
            if draw(st.integers(0, 3)) == 0:
                details[alias] = draw(names)
        default = draw(values[kind]) if inner is None else inner
        if draw(st.booleans()):
            details["default"] = default
        fields[name] = (kind, Field(**details))
        content[name] = default if inner else draw(values[kind])
    config = ConfigDict(
        alias_generator=draw(st.sampled_from([None, to_camel, to_pascal])),
        extra=draw(st.sampled_from(["ignore", "forbid", "allow"])),
        serialize_by_alias=draw(st.booleans()),
    )
    made: Any = create_model("Made", __config__=config, **fields)
    if draw(st.booleans()):

        class Computing(made):  # type: ignore[misc]
            @computed_field  # type: ignore[prop-decorator]
            @property
            def twice(self) -> int:
                return 2

        made = Computing
    instance: BaseModel = made.model_construct(_fields_set={*content}, **content)
    return instance


def sent(model: Any) -> Any:
    """Return the fields of a model that aren't excluded, and of the models in it."""
    if not isinstance(model, BaseModel):
        return model
    fields = type(model).model_fields
    kept = (name for name in fields if not fields[name].exclude)
    return {name: sent(getattr(model, name)) for name in kept}


@given(models())
def test_what_is_written_is_read_again_or_refused(model: BaseModel) -> None:
    registry = SchemaRegistry()
    try:
        registry.register("t", type(model))
        message = Message("t", model)
        registry.check(message)
    except (ConfigError, InvalidMessageError):
        return
    assert sent(registry.load(message)) == sent(model)
