"""FastStream: a subscriber behind a middleware that checks receipts.

python -m examples.frameworks.faststream_app

The broker is that of PILLARBOX_BROKER_URL. With these settings, each broker keeps
messages while this process is down, and redelivers those that were not acked.
FastStream's defaults do neither; on Kafka they even ack before the handler runs.
"""

import asyncio
import os
from typing import Annotated, Any
from urllib.parse import urlsplit

from faststream import AckPolicy, Context, FastStream
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from examples.frameworks.billing import invoice
from pillarbox import sqlalchemy_url
from pillarbox.inbox.frameworks.faststream import Idempotent

TOPIC = "orders.placed"
CONSUMER = "billing"
# By default, a message whose handler fails is dropped, or has already been acked.
AGAIN = AckPolicy.NACK_ON_ERROR


async def bill(
    order: dict[str, int], session: Annotated[AsyncSession, Context("session")]
) -> None:
    """Bill an order once, however often its message is delivered."""
    await session.execute(invoice(order["order_id"]))


def nats_broker(url: str, once: Idempotent) -> Any:
    """Consume the stream that the relay publishes to; all replicas share a durable."""
    from faststream.nats import JStream, NatsBroker, PullSub

    broker = NatsBroker(url, middlewares=[once])
    stream = JStream(
        "ORDERS", declare=False
    )  # the relay's stream, with its own settings
    broker.subscriber(
        TOPIC, stream=stream, durable=CONSUMER, pull_sub=PullSub(), ack_policy=AGAIN
    )(bill)
    return broker


def redis_broker(url: str, once: Idempotent) -> Any:
    """Consume with a group; the second subscriber reclaims pending entries."""
    from faststream.redis import RedisBroker, StreamSub

    broker = RedisBroker(url, middlewares=[once])
    # Each replica has a name, by which it finds its own pending entries.
    member = os.environ.get("HOSTNAME", "one")
    new = StreamSub(TOPIC, group=CONSUMER, consumer=member)
    # In milliseconds; must be longer than a handler takes.
    left = StreamSub(TOPIC, group=CONSUMER, consumer=member, min_idle_time=60_000)
    for stream in (new, left):
        broker.subscriber(stream=stream, ack_policy=AGAIN)(bill)
    return broker


async def create_redis_group(url: str) -> None:
    """Create the group at the stream's beginning; FastStream would start it at the end.

    `StreamSub(last_id="0")` doesn't help: once the group exists, such a subscriber
    reads only its own pending entries, and nothing new.
    """
    from redis.asyncio import Redis
    from redis.exceptions import ResponseError

    async with Redis.from_url(url) as redis:
        try:
            await redis.xgroup_create(TOPIC, CONSUMER, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # it already exists
                raise


def rabbitmq_broker(url: str, once: Idempotent) -> Any:
    """Consume a durable queue that is bound to the relay's exchange."""
    from faststream.rabbit import (
        ExchangeType,
        RabbitBroker,
        RabbitExchange,
        RabbitQueue,
    )

    broker = RabbitBroker(url, middlewares=[once])
    queue = RabbitQueue(CONSUMER, durable=True, routing_key=TOPIC)
    exchange = RabbitExchange("outbox", type=ExchangeType.TOPIC, durable=True)
    broker.subscriber(queue, exchange, ack_policy=AGAIN)(bill)
    return broker


def kafka_broker(url: str, once: Idempotent) -> Any:
    """Consume through aiokafka with a group that commits handled messages."""
    from faststream.kafka import KafkaBroker

    broker = KafkaBroker(urlsplit(url).netloc, middlewares=[once])
    broker.subscriber(
        TOPIC, group_id=CONSUMER, auto_offset_reset="earliest", ack_policy=AGAIN
    )(bill)
    return broker


def confluent_broker(url: str, once: Idempotent) -> Any:
    """Do the same through librdkafka."""
    from faststream.confluent import KafkaBroker

    # The operators of the cluster create topics, and choose the number of partitions.
    broker = KafkaBroker(
        urlsplit(url).netloc, middlewares=[once], allow_auto_create_topics=False
    )
    broker.subscriber(
        TOPIC, group_id=CONSUMER, auto_offset_reset="earliest", ack_policy=AGAIN
    )(bill)
    return broker


BROKERS = {
    "amqp": rabbitmq_broker,
    "confluent": confluent_broker,
    "kafka": kafka_broker,
    "nats": nats_broker,
    "redis": redis_broker,
}


def make_broker(url: str, sessions: async_sessionmaker[AsyncSession]) -> Any:
    """Create the broker of a URL, whose subscriber bills each order once."""
    once = Idempotent(sessions, consumer=CONSUMER)
    return BROKERS[urlsplit(url).scheme](url, once)


async def main() -> None:
    """Bill orders until SIGTERM."""
    engine = create_async_engine(sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"]))
    sessions = async_sessionmaker(engine)
    url = os.environ["PILLARBOX_BROKER_URL"]
    if urlsplit(url).scheme == "redis":
        await create_redis_group(url)
    broker = make_broker(url, sessions)
    await FastStream(broker).run()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
