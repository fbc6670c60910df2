"""The FastStream example is stopped and restarted, over each broker it supports."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pillarbox import Message
from pillarbox.relay.publisher import Acked, Publisher
from pillarbox.relay.publishers.kafka import KafkaPublisher
from pillarbox.relay.publishers.nats import NatsPublisher
from pillarbox.relay.publishers.rabbitmq import RabbitMQPublisher
from pillarbox.relay.publishers.redis import RedisPublisher
from tests.fixtures.processes import RunningProcess
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import NatsServer
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisServer

TOPIC = "orders.placed"


@dataclass
class PrivateBroker:
    """A test's private broker: its URL for FastStream, and pillarbox's publisher."""

    url: str
    publisher: Callable[[], AbstractAsyncContextManager[Publisher]]

    def publish(self, *messages: Message) -> None:
        async def publish() -> None:
            async with self.publisher() as publisher:
                for message in messages:
                    assert [*await publisher.publish([message])] == [Acked()]

        asyncio.run(publish())


OTHERS = ("kafka", "nats", "rabbitmq", "confluent")


@pytest.fixture(
    params=[
        "redis",
        *(pytest.param(name, marks=pytest.mark.variant) for name in OTHERS),
    ]
)
def private_broker(request: pytest.FixtureRequest) -> PrivateBroker:
    match request.param:
        case "redis":
            redis: RedisServer = request.getfixturevalue("private_redis")
            return PrivateBroker(redis.url, lambda: RedisPublisher(redis.url))
        case "nats":
            nats: NatsServer = request.getfixturevalue("private_nats")
            return PrivateBroker(nats.url, lambda: NatsPublisher(nats.url))
        case "rabbitmq":
            rabbit: RabbitMQServer = request.getfixturevalue("private_rabbitmq")
            return PrivateBroker(rabbit.url, lambda: RabbitMQPublisher(rabbit.url))
        case _:
            kafka: KafkaCluster = request.getfixturevalue("private_mock")
            kafka.create_topic(TOPIC, partitions=1)
            url = kafka.url.replace("kafka", request.param, 1)
            return PrivateBroker(url, lambda: KafkaPublisher(kafka.url))


@pytest.fixture
def app(url: str, tmp_path: Path) -> Callable[[PrivateBroker], RunningProcess]:
    def start(private_broker: PrivateBroker) -> RunningProcess:
        process = RunningProcess(
            [sys.executable, "-m", "examples.frameworks.faststream_app"],
            tmp_path / "app.log",
            {"PILLARBOX_DATABASE_URL": url, "PILLARBOX_BROKER_URL": private_broker.url},
        )
        started = process.log().count("FastStream app started")
        process.wait_for_log("FastStream app started", times=started + 1)
        return process

    return start


def order(number: int) -> Message:
    return Message(TOPIC, {"order_id": number}, key=f"order-{number}")


def test_messages_published_while_the_application_is_down_are_handled_once(
    private_broker: PrivateBroker,
    app: Callable[[PrivateBroker], RunningProcess],
    url: str,
    invoices: Callable[[], list[int]],
) -> None:
    first, second, third, last = (order(number) for number in (1, 2, 3, 4))
    running = app(private_broker)
    private_broker.publish(first)
    wait_for("the first is billed", lambda: invoices() == [1])
    running.terminate()
    assert running.wait() == 0, running.log()

    # As when a relay publishes again what the broker may have accepted.
    private_broker.publish(first, second, third, second)
    assert invoices() == [1]

    running = app(private_broker)
    private_broker.publish(last)
    # Messages of different keys have no order.
    wait_for("the others are billed", lambda: len(invoices()) >= 4)
    assert sorted(invoices()) == [1, 2, 3, 4]
    assert execute(url, "SELECT count(*) FROM inbox.receipt") == [(4,)]
    running.terminate()
    assert running.wait() == 0, running.log()


def test_messages_published_before_and_after_the_first_start_are_handled(
    private_redis: RedisServer,
    app: Callable[[PrivateBroker], RunningProcess],
    invoices: Callable[[], list[int]],
) -> None:
    url = private_redis.url
    private_broker = PrivateBroker(url, lambda: RedisPublisher(url))
    private_broker.publish(order(1), order(2))

    running = app(private_broker)
    private_broker.publish(order(3))
    wait_for("the third is billed", lambda: 3 in invoices())
    assert invoices() == [1, 2, 3]
    running.terminate()
    assert running.wait() == 0, running.log()

    running = app(private_broker)
    private_broker.publish(order(4))
    wait_for("the fourth is billed", lambda: 4 in invoices())
    assert invoices() == [1, 2, 3, 4]
    running.terminate()
    assert running.wait() == 0, running.log()
