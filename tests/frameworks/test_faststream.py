"""The guard as a middleware of FastStream, with a real NATS."""

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

import pytest
from faststream import Context
from faststream.nats import NatsBroker
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from examples.frameworks.faststream_app import make_broker
from inbox import InvalidReceiptError
from inbox.frameworks.faststream import Idempotent
from outbox import ConfigError, uuid7
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


async def test_what_a_duplicate_gives_is_not_published(
    url: str, shared_nats: NatsServer
) -> None:
    one, two = uuid7(), uuid7()
    billed: list[str] = []
    done = asyncio.Event()
    async with async_sessions_of(url) as sessions:
        broker = NatsBroker(
            shared_nats.url, middlewares=[Idempotent(sessions, consumer="billing")]
        )

        @broker.subscriber("orders.placed")
        @broker.publisher("orders.billed", headers={"ce-id": str(uuid7())})
        async def bill(order: dict[str, int]) -> str:
            return f"billed {order['order_id']}"

        async with broker, NatsBroker(shared_nats.url) as listening:

            @listening.subscriber("orders.billed")
            async def listen(said: str) -> None:
                billed.append(said)
                if said == "billed 2":
                    done.set()

            await listening.start()
            await broker.start()
            for id, order_id in ((one, 1), (one, 1), (two, 2)):
                await ask(broker, id, {"order_id": order_id})
            async with asyncio.timeout(60):
                await done.wait()
    assert billed == ["billed 1", "billed 2"]


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "1min"),
        ({"max_idle": timedelta(seconds=7)}, "7s"),
        ({"max_idle": None}, "0"),
    ],
    ids=["by default", "as asked", "for ever"],
)
async def test_a_handler_may_stand_still_for_as_long_as_max_idle(
    url: str, shared_nats: NatsServer, settings: dict[str, Any], shown: str
) -> None:
    limits: list[str] = []
    async with async_sessions_of(url) as sessions:
        middleware = Idempotent(sessions, consumer="billing", **settings)
        broker = NatsBroker(shared_nats.url, middlewares=[middleware])

        @broker.subscriber("orders.placed")
        async def look(
            order: dict[str, int], session: Annotated[AsyncSession, Context("session")]
        ) -> None:
            limit = text("SHOW idle_in_transaction_session_timeout")
            limits.append(str(await session.scalar(limit)))

        async with broker:
            await broker.start()
            await ask(broker, uuid7(), {"order_id": 1})
    assert limits == [shown]


def test_a_limit_that_no_handler_can_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_idle=0:00:00: must be"):
        Idempotent(
            None,  # type: ignore[arg-type]
            consumer="billing",
            max_idle=timedelta(0),
        )


def test_a_consumer_without_name_is_refused() -> None:
    with pytest.raises(InvalidReceiptError, match="consumer ''"):
        Idempotent(None, consumer="")  # type: ignore[arg-type]
