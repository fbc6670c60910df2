"""A message that always kills its process is dead-lettered, and no other message is."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pillarbox import Message
from pillarbox.inbox.sources.rabbitmq import RabbitMQSource
from pillarbox.outbox.brokers.sqs.connection import resource_name
from tests.acceptance.brokers import QUICK, outbox
from tests.acceptance.inspection import Inspection
from tests.acceptance.poison_consumer import MAX_ATTEMPTS, NAME, POISON, TOPIC
from tests.fixtures.processes import Processes, command_line
from tests.fixtures.relay import insert
from tests.fixtures.sources import publish
from tests.fixtures.sqs import Aws
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import NatsServer
from tests.servers.sqs import SqsServer

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

_CONSUMERS = "tests.acceptance.poison_consumer"
TABLE = "CREATE TABLE noted (number int)"
REASON = f"started {MAX_ATTEMPTS} times and never finished"


@pytest.fixture
def processes(database_url: str, tmp_path: Path) -> Iterator[Processes]:
    url = {"PILLARBOX_DATABASE_URL": database_url}
    with Processes(tmp_path, "consumer", **url) as started:
        yield started


@pytest.fixture
def nats_url(shared_nats: NatsServer) -> str:
    return f"{shared_nats.url}?stream=FATAL&create={TOPIC}"


@pytest.fixture
def bound_rabbitmq_url(rabbitmq_url: str) -> str:
    async def bind() -> None:
        async with RabbitMQSource(rabbitmq_url, consumer=NAME, topics=[TOPIC]):
            pass

    asyncio.run(bind())
    return rabbitmq_url


@pytest.fixture
def kafka_url(mock_kafka: KafkaCluster) -> str:
    mock_kafka.create_topic(TOPIC, partitions=3)
    return f"{mock_kafka.url}/?{QUICK}"


@pytest.fixture
def sqs_url(shared_sqs: SqsServer, aws: Aws) -> str:
    asyncio.run(aws.create_queue(resource_name(TOPIC, fifo=False)))
    return shared_sqs.url()


@pytest.fixture
def outbox_url(database_url: str) -> str:
    return outbox(database_url, TOPIC, consumer=NAME).url


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


async def put(broker: str, inspection: Inspection, *messages: Message) -> None:
    """Publish to a broker, or add to the outbox that the consumer reads."""
    if broker.startswith("postgres"):
        insert(inspection.url, *messages)
    else:
        await publish(broker, *messages)


def deaths_until_settled(
    processes: Processes,
    inspection: Inspection,
    count: int,
    broker: str,
    consumer: str = "consumer",
) -> int:
    """Restart the consumer whenever it has ended, until all messages have an outcome.

    Return how many times it was killed. Excludes exits because a broker, still busy
    with the previous process, was too slow to start against.
    """
    line = command_line(
        "pillarbox", "consume", f"{_CONSUMERS}:{consumer}", "--log-level=debug"
    )

    def is_all_settled() -> bool:
        if not any(process.is_running() for process in processes):
            assert len(list(processes)) < 20, "it ends again and again"
            processes.begin(line, PILLARBOX_BROKER_URL=broker)
        ended = inspection.count("noted") + inspection.count("inbox.dead_letter")
        return ended >= count

    wait_for("all is settled", is_all_settled, seconds=300)
    *ended, _ = processes
    return sum(process.wait() == -signal.SIGKILL for process in ended)


def expect_outcomes(
    inspection: Inspection, count: int, poisons: Sequence[int], reason: str
) -> None:
    """Check that the poison messages are dead letters, and all others were handled."""
    query = "SELECT payload, attempts, error_reason, status FROM inbox.dead_letter"
    letter = (POISON, MAX_ATTEMPTS, reason, "PENDING")
    assert inspection.rows(query) == [letter] * len(poisons)
    noted = [number for (number,) in inspection.rows("SELECT number FROM noted")]
    assert sorted(noted) == [n for n in range(count) if n not in poisons]


@pytest.mark.parametrize(
    # A start isn't counted if the broker says that the delivery is the first. Otherwise
    # it is counted only if the message is one of the first that the process starts. SQS
    # may deliver a message again before it is started for the first time.
    ("broker", "uncounted"),
    [
        ("outbox_url", 0),
        ("redis_url", 1),
        as_variant("nats_url", 1),
        as_variant("bound_rabbitmq_url", 1),
        as_variant("kafka_url", 0),
        as_variant("sqs_url", 0),
    ],
    indirect=["broker"],
)
async def test_a_message_that_kills_its_process_is_dead_lettered(
    broker: str,
    uncounted: int,
    processes: Processes,
    inspection: Inspection,
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
    inspection.run(TABLE)
    await put(broker, inspection, *messages)
    deaths = deaths_until_settled(processes, inspection, count, broker)
    assert deaths in range(MAX_ATTEMPTS + uncounted, MAX_ATTEMPTS + 2)
    expect_outcomes(inspection, count, [poison], REASON)


async def test_messages_that_kill_their_process_are_isolated_from_their_batches(
    outbox_url: str, processes: Processes, inspection: Inspection
) -> None:
    count, poisons = 80, (40, 41)
    messages = [
        Message(TOPIC, POISON if n in poisons else b"%d" % n, key=f"key {n}")
        for n in range(count)
    ]
    inspection.run(TABLE)
    await put(outbox_url, inspection, *messages)
    deaths = deaths_until_settled(
        processes, inspection, count, outbox_url, "consumer_of_batches"
    )
    # Each death uses up a start of one of them, or of both while in the same batch.
    assert deaths <= len(poisons) * MAX_ATTEMPTS
    expect_outcomes(inspection, count, poisons, REASON)
