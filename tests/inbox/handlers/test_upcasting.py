"""A consumer's handlers receive versions they understand, within a time limit."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import DeadLetter, Message, SchemaRegistry
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.handlers.upcasting import Versions
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.consumers import QUICK, consuming
from tests.fixtures.effects import EFFECT, effects
from tests.fixtures.sessions import execute

TOPIC = "orders.placed"


def with_currency(message: Message) -> object:
    return {**message.json(), "currency": "EUR"}


def in_cents(message: Message) -> object:
    order = message.json()
    return {**order, "cents": order.pop("amount") * 100, "amount": None}


def versions(
    understood: int | None, registry: SchemaRegistry | None = None
) -> Versions:
    made = Versions(registry or SchemaRegistry())
    made.understands(TOPIC, understood)
    return made


def test_a_message_is_upcast_step_by_step_and_keeps_its_id() -> None:
    climbing = versions(3)
    climbing.add(TOPIC, 2, with_currency)
    climbing.add(TOPIC, 3, in_cents)
    old = Message(TOPIC, {"amount": 5}, key="k", tenant="acme", headers={"h": "1"})

    new = climbing.upcast(TOPIC, old)

    assert new.json() == {"amount": None, "currency": "EUR", "cents": 500}
    assert new.schema_version == 3
    same = ("id", "topic", "key", "tenant", "headers", "content_type", "priority")
    assert [getattr(new, name) for name in same] == [
        getattr(old, name) for name in same
    ]


@pytest.mark.parametrize("understood", [None, 2])
def test_a_current_version_is_not_upcast(understood: int | None) -> None:
    message = Message(TOPIC, b"\xff", schema_version=2)
    assert versions(understood).upcast(TOPIC, message) is message


@pytest.mark.parametrize(
    ("version", "words"),
    [(4, "is newer than the handler"), (1, "no upcaster to version 2")],
)
def test_a_version_without_an_upcaster_path_is_dead_lettered(
    version: int, words: str
) -> None:
    climbing = versions(3)
    climbing.add(TOPIC, 3, in_cents)

    with pytest.raises(DeadLetter, match=words):
        climbing.upcast(TOPIC, Message(TOPIC, {"amount": 1}, schema_version=version))


def broken(message: Message) -> Any:
    raise KeyError("amount")


def unencodable(message: Message) -> object:
    return {1, object()}


@pytest.mark.parametrize("upcaster", [broken, unencodable])
def test_an_upcaster_that_fails_is_named(upcaster: Any) -> None:
    climbing = versions(2)
    climbing.add(TOPIC, 2, upcaster)

    with pytest.raises(DeadLetter, match=f"{upcaster.__name__} to version 2"):
        climbing.upcast(TOPIC, Message(TOPIC, {}))


@dataclass
class Order:
    cents: int


def test_an_upcast_message_must_match_its_schema() -> None:
    registry = SchemaRegistry()
    registry.register(TOPIC, Order, version=2)
    climbing = versions(2, registry)
    climbing.add(TOPIC, 2, lambda message: {"cents": message.json()["amount"]})

    climbing.upcast(TOPIC, Message(TOPIC, {"amount": 5}))
    with pytest.raises(DeadLetter, match=r"version 2 of topic 'orders\.placed'"):
        climbing.upcast(TOPIC, Message(TOPIC, {"amount": "five"}))


@pytest.mark.parametrize(
    ("understood", "steps", "words"),
    [
        (4, [2, 4], "no upcaster to version 3, between 1 and 4"),
        (4, [2, 3], "no upcaster to version 4, between 1 and 4"),
        (2, [2, 3], "an upcaster to version 3, but its handler understands 2"),
        (None, [2], r"no handler with a version; .*version=2"),
    ],
)
def test_incomplete_upcaster_chains_are_reported_at_start(
    understood: int | None, steps: list[int], words: str
) -> None:
    climbing = versions(understood)
    for step in steps:
        climbing.add(TOPIC, step, with_currency)

    with pytest.raises(ConfigError, match=words):
        climbing.check()


def test_two_upcasters_to_one_version_are_refused() -> None:
    climbing = versions(2)
    climbing.add(TOPIC, 2, with_currency)

    with pytest.raises(
        ConfigError, match="already has an upcaster to version 2: with_currency"
    ):
        climbing.add(TOPIC, 2, in_cents)


@pytest.mark.parametrize("to", [1, 0, True, "2"])
def test_an_upcaster_to_no_version_is_refused(to: Any) -> None:
    with pytest.raises(ConfigError, match="whole number from 2"):
        versions(2).add(TOPIC, to, with_currency)


class OrderInCents(BaseModel):
    cents: int


class OrderInEuros(BaseModel):
    amount: Decimal


def test_an_upcaster_can_take_and_return_models() -> None:
    def to_cents(order: OrderInEuros) -> OrderInCents:
        return OrderInCents(cents=int(order.amount * 100))

    climbing = versions(2)
    climbing.add(TOPIC, 2, to_cents)

    message = climbing.upcast(TOPIC, Message(TOPIC, {"amount": "1.10"}))
    assert (message.json(), message.schema_version) == ({"cents": 110}, 2)
    with pytest.raises(DeadLetter, match=r"to_cents to version 2: .*at \$\.amount: "):
        climbing.upcast(TOPIC, Message(TOPIC, {"amount": "secret"}))


def test_an_upcaster_of_something_else_is_refused_when_it_is_registered() -> None:
    def upcast(number: int) -> object:
        return number

    with pytest.raises(ConfigError, match="let it take the message or its payload"):
        versions(2).add(TOPIC, 2, upcast)


def dead_letters(url: str) -> list[Any]:
    query = (
        "SELECT schema_version, attempts, error_reason, payload FROM inbox.dead_letter"
    )
    return execute(url, query)


def currency(session: Session, message: Message) -> None:
    session.execute(EFFECT, {"what": message.json()["currency"]})


async def test_old_versions_are_upcast_and_newer_ones_are_dead_lettered(
    url: str,
) -> None:
    old = Message(TOPIC, {"order_id": 1})
    new = Message(TOPIC, {"order_id": 2, "currency": "CHF"}, schema_version=2)
    newer = Message(TOPIC, {"order_id": 3, "money": {}}, schema_version=3)
    source, terms = MemorySource(old, new, newer), {"version": 2}
    async with consuming(
        url, source, currency, terms, upcast=with_currency, rollout=timedelta(0)
    ) as events:
        await events.wait_for(MessageHandled, 2)
        await events.wait_for(MessageDeadLettered)

    assert effects(url) == ["CHF", "EUR"]
    ((version, _, reason, payload),) = dead_letters(url)
    assert "schema_version 3 is newer than the handler" in reason
    assert (version, bytes(payload)) == (3, newer.payload)


async def test_a_handler_that_times_out_leaves_no_effects(url: str) -> None:
    async def endless(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "begun"})
        await asyncio.Event().wait()

    source = MemorySource(Message(TOPIC, {}))
    terms = {"time_limit": timedelta(milliseconds=50)}
    async with consuming(url, source, endless, terms, retry=QUICK) as events:
        await events.wait_for(MessageDeadLettered)

    assert effects(url) == []
    ((_, attempts, reason, _),) = dead_letters(url)
    assert attempts == QUICK.max_attempts
    assert "exceeded its time limit of 0.05s" in reason
