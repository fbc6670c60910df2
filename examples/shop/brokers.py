"""The broker of the demo: one given by URL, or a private one given by name."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from examples.shop.topics import make_topic
from pillarbox.inbox.demo.orders import TOPIC
from pillarbox.outbox.brokers.sqs.options import SqsOptions
from pillarbox.outbox.errors import ConfigError

NAMES: Final = ("postgres", "redis", "rabbitmq", "nats", "kafka", "sns")

_ONE_QUEUE: Final = (
    "broker sqs: a queue has one consumer, and the shop has two; use sns, which "
    "feeds a queue of each"
)


@contextmanager
def broker(wanted: str | None, database: str) -> Iterator[str]:
    """Yield the broker at a URL, or a private one; the database is none.

    Private ones soon give a replica the messages that a killed one was handling.

    Raises:
        ConfigError: the broker isn't known, its programs aren't installed, or the demo
            can't run on it.
    """
    if wanted in {None, "postgres"}:
        yield database
    elif "://" in wanted:
        yield _given(wanted)
    elif wanted == "redis":
        from tests.servers.redis import redis_server

        with redis_server() as redis:
            yield f"{redis.url}?reclaim_after=5s"
    elif wanted == "rabbitmq":
        from tests.servers.rabbitmq import rabbitmq_server

        with rabbitmq_server() as rabbitmq:
            yield rabbitmq.url
    elif wanted == "nats":
        from tests.servers.nats import nats_server

        with nats_server() as nats:
            yield f"{nats.url}?stream=DEMO&create={TOPIC}&ack_wait=5s"
    elif wanted == "kafka":
        from tests.servers.kafka import kafka_cluster

        with kafka_cluster() as kafka:
            kafka.create_topic(TOPIC, partitions=4)
            yield f"{kafka.url}?session.timeout.ms=6000"
    elif wanted == "sns":
        from tests.servers.sqs import sqs_server

        with sqs_server() as aws:
            url = f"{aws.url('sns')}&fifo=true&wait=1s&visibility=5s"
            asyncio.run(make_topic(url))
            yield url
    elif wanted == "sqs":
        raise ConfigError(_ONE_QUEUE)
    else:
        raise ConfigError(
            f"broker {wanted!r}: pass a URL, or one of {', '.join(NAMES)} for a "
            "private one"
        )


def _given(url: str) -> str:
    scheme = url.partition(":")[0]
    if scheme == "sqs":
        raise ConfigError(_ONE_QUEUE)
    if scheme in {"http", "https"}:
        raise ConfigError(
            "broker http: the demo's consumers read from a broker; pass another one"
        )
    if scheme == "sns" and not SqsOptions.parse(url)[1].fifo:
        raise ConfigError(
            "broker sns: the shop counts what is out of order, and only FIFO topics "
            "keep an order; make them, and add fifo=true to the URL"
        )
    return url
