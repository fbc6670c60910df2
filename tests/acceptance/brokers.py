"""Brokers for counters: start and kill them, and count their unacked messages."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import confluent_kafka
from redis import Redis

from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import (
    add_reader,
    drop_reader,
    list_readers,
)
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from tests.acceptance.counter import NAME, TOPIC
from tests.acceptance.relays import as_role
from tests.fixtures.elasticmq import elasticmq
from tests.fixtures.kafka import client_config
from tests.fixtures.nats import ask
from tests.fixtures.postgres import migrate_for_a_week, new_database
from tests.fixtures.real_kafka import real_kafka
from tests.fixtures.sessions import execute
from tests.fixtures.sqs import Aws, account
from tests.fixtures.variants import as_variant
from tests.servers.nats import nats_server
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_server
from tests.servers.redis import redis_server

_STREAM: Final = "NUMBERS"
# Of the queue and its shards; includes delivered messages that are unacked, which AMQP
# doesn't report.
_WAITING_IN_RABBITMQ: Final = (
    'lists:sum([Count || Queue <- rabbit_amqqueue:list(<<"/">>),'
    " {messages, Count} <- rabbit_amqqueue:info(Queue, [messages])])."
)
# A counter that died leaves its Kafka partitions to the others after the session.
QUICK: Final = "session.timeout.ms=2000&heartbeat.interval.ms=200"
_WAITING_IN_OUTBOX: Final = """
    SELECT count(*) FROM outbox.message_status
     WHERE reader = %s AND state NOT IN ('published', 'handled', 'dead_lettered')
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Broker:
    """A test's private server that loses nothing when killed.

    Attributes:
        url: for relays and counters alike.
        waiting: returns how many messages the counters have not acked.
        kill: kills it, as a crash would.
        start: restarts it with its data.
        ordered: whether keys stay in order with several counters.
        shares: whether several counters receive at the same time.
        write: writes the list of recently created queues to disk.
        relayed: whether relays publish to it.
        databases: the URLs of its databases, if it is PostgreSQL elsewhere.
    """

    url: str
    waiting: Callable[[], int]
    kill: Callable[[], None]
    start: Callable[[], None]
    ordered: bool = False
    shares: bool = True
    write: Callable[[], object] = lambda: None
    relayed: bool = True
    databases: Sequence[str] = ()


@contextmanager
def elsewhere() -> Iterator[Broker]:
    """Run another database, to whose outbox relays append."""
    with another_database() as (server, url):
        yield replace(
            outbox(url),
            url=url,
            kill=partial(server.stop, "immediate"),
            start=server.start,
            relayed=True,
            databases=(url,),
        )


@contextmanager
def another_database() -> Iterator[tuple[PostgresServer, str]]:
    with (
        postgres_server(durable=False) as server,
        new_database(server, "pillarbox_queue") as name,
    ):
        url = server.database_url(name)
        migrate_for_a_week(url)
        yield server, url


def outbox(url: str, *topics: str, consumer: str = NAME) -> Broker:
    """Make the outbox of a database the broker of one consumer, without relays."""
    with administration(url, application_name="test") as connection:
        add_reader(connection, consumer, topics or [TOPIC], for_consumer=True)
        if list_readers(connection, "main"):
            drop_reader(connection, "main")
    return Broker(
        url=as_role(url, "pillarbox_relay"),
        waiting=partial(_waiting_in_outbox, url, consumer),
        kill=_is_the_database,
        start=_is_the_database,
        ordered=True,
        relayed=False,
    )


@contextmanager
def redis() -> Iterator[Broker]:
    with redis_server({"appendonly": "yes", "appendfsync": "always"}) as server:
        yield Broker(
            url=server.url,
            waiting=partial(_waiting_in_redis, server.url),
            kill=server.kill,
            start=server.start,
            ordered=True,
            shares=False,
        )


@contextmanager
def rabbitmq() -> Iterator[Broker]:
    with rabbitmq_server() as server:
        yield Broker(
            url=f"{server.url}?exchange=numbers",
            waiting=partial(_waiting_in_rabbitmq, server),
            kill=server.kill,
            start=server.start,
            ordered=True,
            shares=False,
            write=server.write_names,
        )


@contextmanager
def nats() -> Iterator[Broker]:
    with nats_server() as server:
        yield Broker(
            url=f"{server.url}?stream={_STREAM}&create=numbers.>",
            waiting=partial(_waiting_in_nats, server.url),
            kill=server.kill,
            start=server.start,
            ordered=True,
            shares=False,
        )


@contextmanager
def kafka() -> Iterator[Broker]:
    with real_kafka() as node:
        node.create_topic(TOPIC, partitions=4)
        yield Broker(
            url=f"{node.url}/?{QUICK}",
            waiting=partial(_waiting_in_kafka, node.url),
            kill=node.kill,
            start=node.start,
            ordered=True,
        )


@contextmanager
def sqs() -> Iterator[Broker]:
    """Run ElasticMQ; a crash only stalls it, since a restart loses all queues."""
    with elasticmq() as server, account(server) as aws:
        queue = asyncio.run(aws.create_queue(TOPIC.replace(".", "-") + ".fifo"))
        yield Broker(
            url=f"{server.url()}&fifo=true",
            waiting=partial(_waiting_in_sqs, aws, queue),
            kill=server.freeze,
            start=server.thaw,
            ordered=True,
        )


BROKERS: Final[dict[str, Callable[[], AbstractContextManager[Broker]]]] = {
    "elsewhere": elsewhere,
    "redis": redis,
    "rabbitmq": rabbitmq,
    "nats": nats,
    "kafka": kafka,
    "sqs": sqs,
}


def plainly(*names: str) -> list[Any]:
    """Return the brokers that a crash ends as parameters: variants, except these."""
    killed = [name for name in BROKERS if name != "sqs"]
    return [name if name in names else as_variant(name) for name in killed]


def _waiting_in_outbox(url: str, consumer: str) -> int:
    ((count,),) = execute(url, _WAITING_IN_OUTBOX, [consumer])
    return int(count)


def _is_the_database() -> None:
    raise NotImplementedError("stop the database's server")


def _waiting_in_redis(url: str) -> int:
    waiting = 0
    with Redis.from_url(url, decode_responses=True) as client:
        # The topic, and its shards.
        for stream in client.scan_iter(f"{TOPIC}*", _type="STREAM"):
            groups: Any = client.xinfo_groups(stream)
            (group,) = groups
            unread: Any = client.xrange(stream, min=f"({group['last-delivered-id']}")
            waiting += int(group["pending"]) + len(unread)
    return waiting


def _waiting_in_rabbitmq(server: RabbitMQServer) -> int:
    return int(server.evaluate(_WAITING_IN_RABBITMQ))


def _waiting_in_nats(url: str) -> int:
    answer = asyncio.run(ask(url, f"CONSUMER.LIST.{_STREAM}"))
    return sum(
        durable["num_pending"] + durable["num_ack_pending"]
        for durable in answer["consumers"]
    )


def _waiting_in_sqs(aws: Aws, queue: str) -> int:
    answer = asyncio.run(
        aws.call("sqs", "get_queue_attributes", QueueUrl=queue, AttributeNames=["All"])
    )
    counts = ("", "NotVisible", "Delayed")
    return sum(
        int(answer["Attributes"][f"ApproximateNumberOfMessages{count}"])
        for count in counts
    )


def _waiting_in_kafka(url: str) -> int:
    client = confluent_kafka.Consumer(client_config(url) | {"group.id": NAME})
    try:
        partitions = [
            confluent_kafka.TopicPartition(TOPIC, number)
            for number in client.list_topics(TOPIC, timeout=60).topics[TOPIC].partitions
        ]
        return sum(
            client.get_watermark_offsets(each, timeout=60)[1] - max(each.offset, 0)
            for each in client.committed(partitions, timeout=60)
        )
    finally:
        client.close()
