"""The guard as a FastStream middleware, with a real NATS and a real Redis."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Annotated, Any, TypeAlias
from uuid import UUID

import pytest
from faststream import BaseMiddleware, Context
from faststream.confluent.message import KafkaMessage as ConfluentMessage
from faststream.kafka.message import KafkaMessage
from faststream.nats import NatsBroker
from faststream.nats.message import NatsBatchMessage, NatsMessage
from faststream.rabbit.message import RabbitMessage
from faststream.redis import RedisBroker, StreamSub
from faststream.redis.message import (
    FAKE_CONSUMER,
    RedisListMessage,
    RedisStreamMessage,
)
from sqlalchemy import text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import sessionmaker
from typing_extensions import override

from pillarbox import ConfigError, Message, add, idempotent, uuid7
from pillarbox.inbox.errors import InvalidReceiptError
from pillarbox.inbox.frameworks.faststream import Idempotent, event_id, unfold
from pillarbox.outbox.cloudevents.headers import from_headers
from pillarbox.outbox.testing.samples import TRACEPARENT
from pillarbox.relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.endings import (
    EFFECT,
    WAYS,
    effects,
    forget,
    make_effects,
    receipts,
)
from tests.fixtures.spans import Spans, attributes_of, context_of, parent_of
from tests.servers.nats import NatsServer

FromContext: TypeAlias = Annotated[AsyncSession, Context("session")]


@asynccontextmanager
async def subscribed(
    url: str, server: NatsServer, subscriber: Callable[..., Any], **settings: Any
) -> AsyncIterator[NatsBroker]:
    """Run a subscriber behind the middleware for the block."""
    async with async_sessions_of(url) as sessions:
        middleware = Idempotent(sessions, consumer="billing", **settings)
        broker = NatsBroker(server.url, middlewares=[middleware])
        broker.subscriber("orders.placed")(subscriber)
        async with broker:
            await broker.start()
            yield broker


async def ask(broker: NatsBroker, id: UUID, order: dict[str, int], **more: str) -> None:
    """Publish, and return once the subscriber has settled the message."""
    headers = {"ce-id": str(id), "content-type": "application/json", **more}
    await broker.request(
        json.dumps(order), "orders.placed", headers=headers, timeout=60
    )


async def test_what_outlives_a_subscriber_cannot_go_on_with_its_session(
    url: str, shared_nats: NatsServer
) -> None:
    kept: list[AsyncSession] = []

    async def bill(session: FromContext) -> None:
        kept.append(session)

    async with subscribed(url, shared_nats, bill) as broker:
        await ask(broker, uuid7(), {})
        with pytest.raises(InvalidRequestError, match="permanently closed"):
            await kept[0].execute(text("SELECT 1"))


async def test_the_result_of_a_duplicate_is_not_published(
    url: str, shared_nats: NatsServer
) -> None:
    one, two = uuid7(), uuid7()
    billed: list[str] = []
    done = asyncio.Event()

    async def bill(order: dict[str, int]) -> str:
        return f"billed {order['order_id']}"

    async with async_sessions_of(url) as sessions:
        middleware = Idempotent(sessions, consumer="billing")
        broker = NatsBroker(shared_nats.url, middlewares=[middleware])
        publishes = broker.publisher("orders.billed", headers={"ce-id": str(uuid7())})
        broker.subscriber("orders.placed")(publishes(bill))

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


async def test_a_handler_cannot_call_an_idempotent_function_of_its_consumer(
    url: str, shared_nats: NatsServer
) -> None:
    make_effects(url)
    id = uuid7()
    refused: list[str] = []

    @idempotent(consumer="billing")
    async def bill(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "billed"})

    async def handle(order: dict[str, int], session: FromContext) -> None:
        try:
            await bill(session, Message("orders.placed", order, id=id))
        except InvalidReceiptError as error:
            refused.append(str(error))

    async with subscribed(url, shared_nats, handle) as broker:
        await ask(broker, id, {"order_id": 1})
    assert "its own consumer name" in refused[0]
    assert effects(url) == []
    assert receipts(url) == 1


async def test_a_handler_has_a_span_in_the_trace_of_its_message(
    url: str, shared_nats: NatsServer, spans: Spans
) -> None:
    id = uuid7()
    headers = {"ce-type": "orders.placed", "traceparent": TRACEPARENT}

    async def bill(order: dict[str, int], session: FromContext) -> None:
        add(session, Message("bills", order))

    async with subscribed(url, shared_nats, bill) as broker:
        for _ in range(2):
            await ask(broker, id, {"order_id": 1}, **headers)
    handled, skipped = spans.named("process orders.placed")
    assert f"{context_of(handled).trace_id:032x}" in TRACEPARENT
    assert parent_of(spans.one("create bills")) == context_of(handled).span_id
    about = attributes_of(handled)
    assert about["messaging.system"] == "nats"
    assert about["messaging.message.id"] == str(id)
    assert attributes_of(skipped)["pillarbox.outcome"] == "duplicate"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "1min"),
        ({"max_idle": timedelta(seconds=7)}, "7s"),
        ({"max_idle": None}, "0"),
    ],
    ids=["by default", "as asked", "for ever"],
)
async def test_a_handlers_transaction_can_be_idle_for_max_idle(
    url: str, shared_nats: NatsServer, settings: dict[str, Any], shown: str
) -> None:
    limits: list[str] = []

    async def look(order: dict[str, int], session: FromContext) -> None:
        limit = text("SHOW idle_in_transaction_session_timeout")
        limits.append(str(await session.scalar(limit)))

    async with subscribed(url, shared_nats, look, **settings) as broker:
        await ask(broker, uuid7(), {"order_id": 1})
    assert limits == [shown]


def test_invalid_settings_are_refused() -> None:
    nothing: Any = None
    plain: Any = sessionmaker()
    with pytest.raises(ConfigError, match="max_idle=0s: must be"):
        Idempotent(nothing, consumer="billing", max_idle=timedelta(0))
    with pytest.raises(ConfigError, match=r"sessions .*pass SQLAlchemy's async_sess"):
        Idempotent(plain, consumer="billing")
    with pytest.raises(InvalidReceiptError, match="consumer ''"):
        Idempotent(nothing, consumer="")


async def test_an_entry_of_a_redis_stream_is_read_as_a_message(
    url: str, redis_url: str
) -> None:
    order = Message("orders", {"n": 1}, key="k", tenant="acme", headers={"a": "b"})
    seen = asyncio.Queue[tuple[Any, dict[str, Any]]]()
    async with async_sessions_of(url) as sessions:
        broker = RedisBroker(
            redis_url, middlewares=[Idempotent(sessions, consumer="billing")]
        )

        @broker.subscriber(stream=StreamSub("orders", last_id="0"))
        async def look(
            body: Any, headers: Annotated[dict[str, Any], Context("message.headers")]
        ) -> None:
            seen.put_nowait((body, headers))

        async with broker, RedisPublisher(redis_url) as publisher:
            await publisher.publish([order])
            await broker.start()
            async with asyncio.timeout(60):
                body, headers = await seen.get()
    assert body == {"n": 1}
    found = from_headers(headers, order.payload, "ce-")
    assert found == order


def test_each_brokers_header_for_the_id_is_read() -> None:
    mine, forged = uuid7(), uuid7()
    names = {"ce-id", "ce_id", "cloudEvents:id"}
    kinds: tuple[tuple[Any, str], ...] = (
        (NatsMessage, "ce-id"),
        (RedisListMessage, "ce-id"),
        (RabbitMessage, "cloudEvents:id"),
        (KafkaMessage, "ce_id"),
        (ConfluentMessage, "ce_id"),
    )
    for kind, name in kinds:
        headers = dict.fromkeys(names, str(forged)) | {name: str(mine)}
        options: dict[str, Any] = {}
        if kind in {KafkaMessage, ConfluentMessage}:
            options = {"consumer": None}
        message = kind(raw_message={}, body=b"", headers=headers, **options)
        assert event_id(message) == mine, kind


def test_a_batch_is_refused_because_it_has_no_single_id() -> None:
    headers = [{"ce-id": str(uuid7())} for _ in range(2)]
    batch: Any = NatsBatchMessage(
        raw_message=[], body=[b"", b""], headers=headers[0], batch_headers=headers
    )
    with pytest.raises(InvalidReceiptError, match="batch of 2 messages"):
        event_id(batch)


def test_an_entry_with_invalid_fields_is_refused() -> None:
    fields = {b"ce_id": b"none", b"ce_type": b"t", b"ce_data": b"1"}
    raw: Any = {"type": "stream", "channel": "orders", "data": fields}
    entry = RedisStreamMessage(raw, b"", consumer=FAKE_CONSUMER, group=None)
    with pytest.raises(InvalidReceiptError, match=r"entry of orders: .*id"):
        unfold(entry)


@pytest.mark.filterwarnings(
    "ignore:transaction already deassociated:sqlalchemy.exc.SAWarning"
)
@pytest.mark.parametrize(("driver", "part"), [("psycopg", 0), ("asyncpg", 1)])
async def test_ending_or_breaking_the_transaction_fails_the_handler(
    database_url: str, shared_nats: NatsServer, driver: str, part: int
) -> None:
    make_effects(database_url)
    raised: asyncio.Queue[BaseException | None] = asyncio.Queue()

    class Note(BaseMiddleware):
        """Records the error with which FastStream would decide between ack and nack."""

        @override
        async def after_processed(
            self,
            exc_type: type[BaseException] | None = None,
            exc_val: BaseException | None = None,
            exc_tb: TracebackType | None = None,
        ) -> bool | None:
            raised.put_nowait(exc_val)
            return True

    async with async_sessions_of(database_url, driver) as sessions:
        middleware = Idempotent(sessions, consumer="billing")
        broker = NatsBroker(shared_nats.url, middlewares=[Note, middleware])

        @broker.subscriber("orders.spoiled")
        async def handle(name: str, session: FromContext) -> None:
            await session.execute(EFFECT, {"what": "done"})
            await session.run_sync(WAYS[name].do)

        async with broker:
            await broker.start()
            for name, way in [*WAYS.items()][part::2]:
                headers = {"ce-id": str(uuid7()), "content-type": "application/json"}
                await broker.publish(
                    json.dumps(name), "orders.spoiled", headers=headers
                )
                async with asyncio.timeout(60):
                    error = await raised.get()
                assert (name, type(error)) == (name, way.raises)
                kept = int(way.is_committed)
                found = len(effects(database_url)), receipts(database_url)
                assert (name, found) == (name, (kept, kept))
                forget(database_url)
