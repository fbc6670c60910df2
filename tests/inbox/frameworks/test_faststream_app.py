"""FastStream's example, stopped and started, over each broker that FastStream has."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox import Message
from outbox.testing.kafka import KafkaCluster
from outbox.testing.nats import NatsServer
from outbox.testing.rabbitmq import RabbitMQServer
from outbox.testing.redis import RedisServer
from relay.publisher import Acked, Publisher
from relay.publishers.kafka import KafkaPublisher
from relay.publishers.nats import NatsPublisher
from relay.publishers.rabbitmq import RabbitMQPublisher
from relay.publishers.redis import RedisPublisher
from tests.fixtures.processes import RunningProcess
from tests.fixtures.relay import execute
from tests.fixtures.waiting import wait_for

TOPIC = "orders.placed"


@dataclass
class Place:
    """A broker of the test's own: its URL for FastStream, and our publisher."""

    url: str
    publisher: Callable[[], AbstractAsyncContextManager[Publisher]]

    def publish(self, *messages: Message) -> None:
        async def publish() -> None:
            async with self.publisher() as publisher:
                for message in messages:
                    assert [*await publisher.publish([message])] == [Acked()]

        asyncio.run(publish())


@pytest.fixture(params=["redis", "nats", "rabbitmq", "kafka", "confluent"])
def place(request: pytest.FixtureRequest) -> Place:
    match request.param:
        case "redis":
            redis: RedisServer = request.getfixturevalue("private_redis")
            return Place(redis.url, lambda: RedisPublisher.from_url(redis.url))
        case "nats":
            nats: NatsServer = request.getfixturevalue("private_nats")
            return Place(nats.url, lambda: NatsPublisher.from_url(nats.url))
        case "rabbitmq":
            rabbit: RabbitMQServer = request.getfixturevalue("private_rabbitmq")
            return Place(rabbit.url, lambda: RabbitMQPublisher.from_url(rabbit.url))
        case _:
            kafka: KafkaCluster = request.getfixturevalue("private_kafka")
            kafka.create_topic(TOPIC, partitions=1)
            url = kafka.url.replace("kafka", request.param, 1)
            return Place(url, lambda: KafkaPublisher.from_url(kafka.url))


@pytest.fixture
def app(url: str, tmp_path: Path) -> Callable[[Place], RunningProcess]:
    def start(place: Place) -> RunningProcess:
        process = RunningProcess(
            [sys.executable, "-m", "examples.frameworks.faststream_app"],
            tmp_path / "app.log",
            {"PILLARBOX_DATABASE_URL": url, "PILLARBOX_BROKER_URL": place.url},
        )
        started = process.log().count("FastStream app started")
        process.wait_for_log("FastStream app started", times=started + 1)
        return process

    return start


def order(number: int) -> Message:
    return Message(TOPIC, {"order_id": number}, key=f"order-{number}")


def test_messages_published_while_the_application_is_down_are_handled_once(
    place: Place,
    app: Callable[[Place], RunningProcess],
    url: str,
    invoices: Callable[[], list[int]],
) -> None:
    first, second, third, last = (order(number) for number in (1, 2, 3, 4))
    running = app(place)
    place.publish(first)
    wait_for("the first is billed", lambda: invoices() == [1])
    running.terminate()
    assert running.wait() == 0, running.log()

    # What the relay isn't sure of, it publishes again.
    place.publish(first, second, third, second)
    assert invoices() == [1]

    running = app(place)
    place.publish(last)
    wait_for("the last is billed", lambda: 4 in invoices())
    assert invoices() == [1, 2, 3, 4]
    assert execute(url, "SELECT count(*) FROM inbox.receipt") == [(4,)]
    running.terminate()
    assert running.wait() == 0, running.log()


def test_messages_published_before_the_first_start_are_handled_and_later_ones_too(
    private_redis: RedisServer,
    app: Callable[[Place], RunningProcess],
    invoices: Callable[[], list[int]],
) -> None:
    url = private_redis.url
    place = Place(url, lambda: RedisPublisher.from_url(url))
    place.publish(order(1), order(2))

    running = app(place)
    place.publish(order(3))
    wait_for("the third is billed", lambda: 3 in invoices())
    assert invoices() == [1, 2, 3]
    running.terminate()
    assert running.wait() == 0, running.log()

    running = app(place)
    place.publish(order(4))
    wait_for("the fourth is billed", lambda: 4 in invoices())
    assert invoices() == [1, 2, 3, 4]
    running.terminate()
    assert running.wait() == 0, running.log()
