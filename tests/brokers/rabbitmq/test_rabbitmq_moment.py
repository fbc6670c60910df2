"""A message in RabbitMQ contains its publishing time."""

from typing import Any

import pytest
from pika import BasicProperties

from pillarbox import Message
from pillarbox.outbox.brokers.rabbitmq.message import (
    from_delivery,
    published_at,
    to_properties,
)


def properties(**given: Any) -> BasicProperties:
    return BasicProperties(**given)  # type: ignore[no-untyped-call]


def test_a_users_header_of_the_same_name_is_kept() -> None:
    written = to_properties(Message("orders", b"1", headers={"timestamp_in_ms": "1"}))
    read, _ = from_delivery(written, "orders", b"1")

    assert dict(read.headers) == {"timestamp_in_ms": "1"}
    assert published_at(written) == written.timestamp


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (properties(timestamp=5), 5.0),
        (properties(timestamp=5, headers={"timestamp_in_ms": 5250}), 5.25),
        (properties(headers={"own": "x"}), None),
        (properties(), None),
    ],
    ids=["in seconds", "stamped by the server", "without", "without headers"],
)
def test_the_publishing_time_of_other_clients_messages_is_read(
    given: BasicProperties, wanted: float | None
) -> None:
    assert published_at(given) == wanted
