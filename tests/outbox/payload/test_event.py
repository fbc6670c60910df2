"""A class is bound to its topic once; then its instances can be added."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import assert_type

import pytest
from pydantic import BaseModel
from sqlalchemy.orm import Session

from pillarbox import REGISTRY, InvalidMessageError, Message, add, event
from pillarbox.outbox.errors import CodecError, ConfigError
from pillarbox.outbox.payload.schema_registry import SchemaRegistry
from pillarbox.outbox.testing import added

UNCHECKED = SchemaRegistry()


class Placed(BaseModel):
    order: int


@dataclass
class Paid:
    order: int


@pytest.fixture
def registry() -> SchemaRegistry:
    registry = SchemaRegistry()
    registry.event("orders.placed", version=2)(Placed)
    registry.event("orders.paid")(Paid)
    return registry


def test_events_are_added_to_their_topics(registry: SchemaRegistry) -> None:
    at = datetime(2026, 1, 31, tzinfo=UTC)
    with Session() as session:
        add(
            session,
            Placed(order=1),
            Paid(order=1),
            key="order-1",
            tenant="acme",
            available_at=at,
            registry=registry,
        )
        placed, paid = added(session)
    assert (placed.topic, placed.schema_version) == ("orders.placed", 2)
    assert (paid.topic, paid.schema_version) == ("orders.paid", 1)
    assert placed.payload == paid.payload == b'{"order":1}'
    for message in (placed, paid):
        assert message.key == "order-1"
        assert message.tenant == "acme"
        assert message.available_at == at


def test_added_events_are_returned_as_instances_of_their_class() -> None:
    @event("tests.counted", version=2)
    @dataclass
    class Counted:
        number: int

    assert REGISTRY.topic_of(Counted) == ("tests.counted", 2)
    with Session() as session:
        add(session, Counted(1), Counted(2))
        add(session, Message("tests.counted", {"number": "one"}), registry=UNCHECKED)
        assert_type(added(session, Counted), list[Counted])
        assert added(session, Counted) == [Counted(1), Counted(2)]
        assert len(added(session, "tests.counted")) == 3
        with pytest.raises(ConfigError, match="Placed: isn't bound to a topic; bind"):
            added(session, Placed)


def test_an_event_that_became_invalid_is_refused(registry: SchemaRegistry) -> None:
    placed = Placed(order=1)
    placed.order = "x"  # type: ignore[assignment]
    with (
        Session() as session,
        pytest.warns(UserWarning, match="Pydantic serializer"),
        pytest.raises(InvalidMessageError, match=r"\$\.order: int_parsing"),
    ):
        add(session, placed, registry=registry)


def test_an_object_of_another_class_and_a_key_beside_a_message_are_refused(
    registry: SchemaRegistry,
) -> None:
    class Derived(Placed):
        pass

    with Session() as session:
        for other in (Derived(order=1), object(), {"order": 1}):
            with pytest.raises(InvalidMessageError, match="@event"):
                add(session, other, registry=registry)
        with pytest.raises(InvalidMessageError, match="message key"):
            add(session, Message("orders.placed", b""), key="order-1")
    with pytest.raises(ConfigError, match=r"Placed: already bound to topic 'ord"):
        registry.event("orders.moved")(Placed)


def test_a_strict_registry_refuses_topics_that_nobody_declared() -> None:
    registry = SchemaRegistry(strict=True)
    registry.event("orders.placed")(Placed)
    with Session() as session:
        add(session, Placed(order=1), registry=registry)
        with pytest.raises(InvalidMessageError, match=r"isn't declared, and the"):
            add(session, Message("order.placed", {"order": 1}), registry=registry)
        assert len(added(session)) == 1


def test_text_that_is_json_already_is_used_as_it_is() -> None:
    for text in ('{"a": 1}', b'{"a": 1}'):
        message = Message.from_json("t", text, key="k", schema_version=3)
        assert message.payload == b'{"a": 1}'
        assert message.content_type == "application/json"
        assert (message.key, message.schema_version) == ("k", 3)
    with pytest.raises(CodecError, match="isn't JSON"):
        Message.from_json("t", "{'a': 1}")
