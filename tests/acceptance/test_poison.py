"""A message that always kills its process is dead-lettered, and no other message is."""

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from inbox.sources.rabbitmq import RabbitMQSource
from outbox.brokers.sqs.connection import resource_name
from pillarbox import Message
from relay.publisher import Publisher
from relay.publishers.kafka import KafkaPublisher
from relay.publishers.nats import NatsPublisher
from relay.publishers.postgres import PostgresPublisher
from relay.publishers.rabbitmq import RabbitMQPublisher
from relay.publishers.redis import RedisPublisher
from relay.publishers.sqs import SqsPublisher
from tests.acceptance.brokers import as_variant
from tests.acceptance.fixtures import show
from tests.acceptance.inspection import Inspection
from tests.acceptance.poison_consumer import MAX_ATTEMPTS, NAME, POISON, TOPIC
from tests.fixtures.processes import RunningProcess, command_line
from tests.fixtures.sqs import Aws
from tests.fixtures.waiting import wait_for
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import NatsServer
from tests.servers.sqs import SqsServer

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

_CONSUMERS = "tests.acceptance.poison_consumer"


class Supervisor:
    """Starts the consumer, and restarts it whenever it has exited.

    Attributes:
        deaths: how many times it was killed. Excludes exits because a broker, still
            busy with the previous process, was too slow to start against.
    """

    def __init__(
        self, directory: Path, environment: dict[str, str], consumer: str = "consumer"
    ) -> None:
        self.deaths = 0
        self._consumer = f"{_CONSUMERS}:{consumer}"
        self._starts = 0
        self._log = directory / "consumer.log"
        self._environment = environment
        self._process: RunningProcess | None = None

    def ensure_running(self) -> None:
        """Start the consumer unless it is running."""
        if self._process is None or not self._process.is_running():
            if self._process is not None:
                self.deaths += self._process.wait() == -signal.SIGKILL
            self._starts += 1
            assert self._starts <= 20, "it ends again and again"
            self._process = RunningProcess(
                command_line(
                    "pillarbox", "consume", self._consumer, "--log-level=debug"
                ),
                self._log,
                self._environment,
            )

    def end(self) -> None:
        """Kill the running process, and show its log."""
        if self._process is not None:
            self._process.kill()
            show(self._process)


@dataclass(frozen=True)
class Broker:
    """The broker that consumer and test share.

    Attributes:
        uncounted: how many starts are surely not counted: 1 if the broker says that
            the first delivery is the first. Otherwise the first start is counted only
            if the message is one of the first that the process starts.
    """

    url: str
    publisher: Publisher
    uncounted: int


def on_postgres(request: pytest.FixtureRequest) -> Broker:
    url: str = request.getfixturevalue("database_url")
    return Broker(url, PostgresPublisher(url), uncounted=0)


def on_redis(request: pytest.FixtureRequest) -> Broker:
    url: str = request.getfixturevalue("redis_url")
    return Broker(url, RedisPublisher(url), uncounted=1)


def on_nats(request: pytest.FixtureRequest) -> Broker:
    server: NatsServer = request.getfixturevalue("shared_nats")
    url = f"{server.url}?stream=FATAL&create={TOPIC}"
    return Broker(url, NatsPublisher(url), uncounted=1)


def on_rabbitmq(request: pytest.FixtureRequest) -> Broker:
    url: str = request.getfixturevalue("rabbitmq_url")

    async def bind() -> None:
        async with RabbitMQSource(url, consumer=NAME, topics=[TOPIC]):
            pass

    asyncio.run(bind())
    return Broker(url, RabbitMQPublisher(url), uncounted=1)


def on_kafka(request: pytest.FixtureRequest) -> Broker:
    cluster: KafkaCluster = request.getfixturevalue("mock_kafka")
    cluster.create_topic(TOPIC, partitions=3)
    url = f"{cluster.url}/?session.timeout.ms=4000&heartbeat.interval.ms=200"
    return Broker(url, KafkaPublisher(cluster.url), uncounted=0)


def on_sqs(request: pytest.FixtureRequest) -> Broker:
    server: SqsServer = request.getfixturevalue("shared_sqs")
    aws: Aws = request.getfixturevalue("aws")
    asyncio.run(aws.create_queue(resource_name(TOPIC, fifo=False)))
    return Broker(server.url(), SqsPublisher.from_url(server.url()), uncounted=1)


@pytest.fixture(
    params=[
        on_postgres,
        on_redis,
        *map(as_variant, (on_nats, on_rabbitmq, on_kafka, on_sqs)),
    ],
    ids=lambda make: make.__name__.removeprefix("on_"),
)
def broker(request: pytest.FixtureRequest) -> Broker:
    made: Broker = request.param(request)
    return made


def environment(database_url: str, broker_url: str) -> dict[str, str]:
    return {
        "PILLARBOX_DATABASE_URL": database_url,
        "PILLARBOX_BROKER_URL": broker_url,
    }


def supervise(supervisor: Supervisor, inspection: Inspection, count: int) -> None:
    """Keep the consumer running until each of `count` messages has an outcome."""

    def is_all_settled() -> bool:
        supervisor.ensure_running()
        query = """
            SELECT (SELECT count(*) FROM noted)
                 + (SELECT count(*) FROM inbox.dead_letter)
        """
        return inspection.rows(query) >= [(count,)]

    try:
        wait_for("all is settled", is_all_settled, seconds=300)
    finally:
        supervisor.end()


async def test_a_message_that_kills_its_process_is_dead_lettered(
    database_url: str,
    broker: Broker,
    inspection: Inspection,
    tmp_path: Path,
    full: bool,
) -> None:
    count = 2_000 if full else 60
    poison = count // 3
    messages = [
        Message(
            TOPIC, POISON if n == poison else b"%d" % n, key=f"key {n % (count // 4)}"
        )
        for n in range(count)
    ]
    inspection.run(
        "CREATE TABLE noted (number int);"
        f"INSERT INTO inbox.subscription VALUES ('{NAME}', '{TOPIC}')"
    )
    async with broker.publisher as publisher:
        await publisher.publish(messages)
    supervisor = Supervisor(tmp_path, environment(database_url, broker.url))
    supervise(supervisor, inspection, count)
    assert supervisor.deaths in range(MAX_ATTEMPTS + broker.uncounted, MAX_ATTEMPTS + 2)
    letters = inspection.rows(
        "SELECT payload, attempts, error_reason, status FROM inbox.dead_letter"
    )
    reason = f"was started {MAX_ATTEMPTS} times and never finished"
    assert letters == [(POISON, MAX_ATTEMPTS, reason, "PENDING")]
    noted = [number for (number,) in inspection.rows("SELECT number FROM noted")]
    assert sorted(noted) == [n for n in range(count) if n != poison]


async def test_messages_that_kill_their_process_are_isolated_from_their_batches(
    database_url: str, inspection: Inspection, tmp_path: Path
) -> None:
    count, poisons = 80, (40, 41)
    messages = [
        Message(TOPIC, POISON if n in poisons else b"%d" % n, key=f"key {n}")
        for n in range(count)
    ]
    inspection.run(
        "CREATE TABLE noted (number int);"
        f"INSERT INTO inbox.subscription VALUES ('{NAME}', '{TOPIC}')"
    )
    async with PostgresPublisher(database_url) as publisher:
        await publisher.publish(messages)
    supervisor = Supervisor(
        tmp_path, environment(database_url, database_url), "consumer_of_batches"
    )
    supervise(supervisor, inspection, count)
    # Each death uses up a start of one of them, or of both while in the same batch.
    assert supervisor.deaths <= len(poisons) * MAX_ATTEMPTS
    letters = inspection.rows("SELECT payload, attempts, status FROM inbox.dead_letter")
    assert letters == [(POISON, MAX_ATTEMPTS, "PENDING")] * len(poisons)
    noted = [number for (number,) in inspection.rows("SELECT number FROM noted")]
    assert sorted(noted) == [n for n in range(count) if n not in poisons]
