"""The guard as a middleware of FastStream, with a real NATS."""

import json
from collections.abc import Callable
from uuid import UUID

import pytest
from faststream.nats import NatsBroker

from examples.frameworks.faststream_app import make_broker
from inbox import InvalidReceiptError
from inbox.frameworks.faststream import Idempotent
from outbox import uuid7
from outbox.testing.nats import NatsServer
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.relay import execute


async def ask(broker: NatsBroker, id: UUID, order: dict[str, int]) -> None:
    """Publish, and return when the subscriber has settled it."""
    headers = {"ce-id": str(id), "content-type": "application/json"}
    await broker.request(
        json.dumps(order), "orders.placed", headers=headers, timeout=60
    )


async def test_a_message_that_comes_twice_is_handled_once(
    url: str, shared_nats: NatsServer, invoices: Callable[[], list[int]]
) -> None:
    first, second = uuid7(), uuid7()
    async with (
        async_sessions_of(url) as sessions,
        make_broker(shared_nats.url, sessions) as broker,
    ):
        await broker.start()
        for id, order_id in ((first, 1), (first, 1), (second, 2), (first, 1)):
            await ask(broker, id, {"order_id": order_id})

    assert invoices() == [1, 2]
    ((receipts,),) = execute(url, "SELECT count(*) FROM inbox.receipt")
    assert receipts == 2


def test_a_consumer_without_name_is_refused() -> None:
    with pytest.raises(InvalidReceiptError, match="consumer ''"):
        Idempotent(None, consumer="")  # type: ignore[arg-type]
