"""What a type checker would find is refused where it is written, not hours later."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.orm import Session, sessionmaker

from inbox.sources.memory import MemorySource
from outbox.errors import ConfigError
from outbox.payload.schema_registry import SchemaRegistry
from pillarbox import (
    Consumer,
    DeadLetter,
    InvalidMessageError,
    Message,
    RetryLater,
    RetryPolicy,
    add,
    event,
)

REGISTRY = SchemaRegistry()


@REGISTRY.event("orders.placed")
@dataclass
class PlacedOnce:
    order: int


@REGISTRY.event("orders.placed", version=2)
@dataclass
class Placed:
    order: int


@REGISTRY.event("orders.paid")
@dataclass
class Paid:
    order: int


REGISTRY.register("orders.bulk", list[Placed])


def consumer(**settings: Any) -> Consumer:
    sessions: sessionmaker[Session] = sessionmaker()
    return Consumer(
        MemorySource(), sessions, name="billing", registry=REGISTRY, **settings
    )


def handles(**options: Any) -> object:
    return consumer().handles("orders.placed", **options)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: consumer(retry=3), "retry=3: .* RetryPolicy"),
        (lambda: consumer(drain=3), "drain=3: .* timedelta"),
        (lambda: consumer(max_idle=5), "max_idle=5: .* timedelta"),
        (lambda: consumer(max_in_flight="3"), "max_in_flight='3': .* int"),
        (lambda: consumer(max_waiting=True), "max_waiting=True: .* int"),
        (lambda: consumer(queues=["a"]), "queues=.*: .* Mapping"),
        (lambda: handles(retry=3), "retry=3: .* RetryPolicy"),
        (lambda: handles(time_limit=5), "time_limit=5: .* timedelta"),
        (lambda: handles(permanent="x"), "permanent 'x': isn't an exception"),
        (lambda: RetryPolicy(max_delay=5), "max_delay=5: .* timedelta"),  # type: ignore[arg-type]
        (lambda: RetryPolicy(max_attempts=2.5), "max_attempts=2.5: .* int"),  # type: ignore[arg-type]
        (lambda: RetryLater(5), "delay=5: .* timedelta"),  # type: ignore[arg-type]
        (lambda: event(Paid), r"topic=.*: .* str; write @event\("),  # type: ignore[arg-type]
    ],
)
def test_a_setting_of_another_type_is_refused(
    make: Callable[[], object], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


def test_a_decision_without_a_reason_is_one() -> None:
    assert DeadLetter().reason == "requested by the handler"


def test_the_error_for_an_option_beside_a_message_shows_its_value() -> None:
    with Session() as session, pytest.raises(InvalidMessageError, match="key 'x': was"):
        add(session, Message("orders.placed", b""), key="x")


async def test_an_empty_url_is_called_empty() -> None:
    sessions: sessionmaker[Session] = sessionmaker()
    billing = Consumer("", sessions, name="billing")
    billing.handles("*")(lambda session, message: None)
    with pytest.raises(ConfigError, match="the URL of the source is empty; pass one"):
        await billing.run()


def test_a_handler_of_another_topics_or_versions_event_is_refused() -> None:
    def bill(session: Session, order: Paid) -> None: ...
    def ship(session: Session, orders: list[Placed]) -> None: ...

    with pytest.raises(ConfigError, match="takes Paid, the event of topic 'orders"):
        consumer().handles("orders.placed")(bill)
    placed_once = consumer().handles_batch("orders.placed", max_size=2, version=1)
    with pytest.raises(ConfigError, match="in version 1: its handler takes Placed, th"):
        placed_once(ship)

    # Nothing else is registered for these, or the class is one of what is.
    for topic in ("orders.paid", "orders.*", "*", "orders.paid.again"):
        consumer().handles(topic)(bill)
    for version in (None, 2):
        consumer().handles_batch("orders.placed", max_size=2, version=version)(ship)
    consumer().handles("orders.bulk")(ship)
