"""A call to a broker that is cancelled at any moment leaves no connection behind.

The event loop is stepped: a call is cancelled before the first turn of its loop, then
before the second, and so on until it finishes before it is cancelled. This finds bugs
that need one unlucky moment, which random cancellation would find about once a month.
"""

import asyncio
import gc
import itertools
import re
from collections.abc import Callable, Coroutine, Set
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from inbox.source import Source
from inbox.sources.kafka import KafkaSource
from inbox.sources.nats import NatsSource
from inbox.sources.postgres import PostgresSource
from inbox.sources.rabbitmq import RabbitMQSource
from inbox.sources.redis import RedisSource
from inbox.sources.sqs import SqsSource
from outbox.brokers.sqs.connection import SqsSettings
from pillarbox import Message
from relay.publisher import Publisher
from relay.publishers.http import HttpPublisher
from relay.publishers.kafka import KafkaPublisher
from relay.publishers.nats import NatsPublisher
from relay.publishers.postgres import PostgresPublisher
from relay.publishers.rabbitmq import RabbitMQPublisher
from relay.publishers.redis import RedisPublisher
from relay.publishers.sqs import SqsPublisher
from tests.fixtures.http import Target
from tests.fixtures.rabbitmq import exchange_of
from tests.fixtures.sqs import Aws, fresh
from tests.fixtures.waiting import wait_for
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import NatsServer
from tests.servers.sqs import SqsServer


class Call(NamedTuple):
    """What is called, and the ports of its server."""

    run: Callable[[], Coroutine[Any, Any, object]]
    ports: frozenset[int]


_PATIENCE: Final = 60.0
_SOON: Final = timedelta(milliseconds=20)


class _Loop(asyncio.SelectorEventLoop):
    """Cancels a task before one of its turns.

    The loop sleeps until there is something to do, so it has few turns, and each of
    them is a step of some task.
    """

    def __init__(self, turn: int | None) -> None:
        super().__init__()
        self.cancelled = False
        self.task: asyncio.Task[object] | None = None
        self._turns_left = turn

    def _run_once(self) -> None:
        if self.task is not None and self._turns_left is not None:
            self._turns_left -= 1
            if self._turns_left == 0:
                self.cancelled = self.task.cancel()
        super()._run_once()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Limit the many garbage collections here to the objects of this test."""
    gc.collect()
    gc.freeze()


def _publishing(url: str, make: Callable[[], Publisher], topic: str) -> Call:
    async def call() -> None:
        async with make() as publisher:
            await publisher.publish([Message(topic, b"1")])

    return Call(call, _ports_of(url))


def _receiving(url: str, make: Callable[[], Source]) -> Call:
    async def call() -> None:
        async with make() as source:
            await source.receive(limit=1)

    return Call(call, _ports_of(url))


def _ports_of(url: str) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", url)))


@pytest.fixture
def http_publisher(target: Target) -> Call:
    return _publishing(target.url(), lambda: HttpPublisher.from_url(target.url()), "t")


@pytest.fixture
def kafka_publisher(mock_kafka: KafkaCluster) -> Call:
    return _publishing(mock_kafka.url, lambda: KafkaPublisher(mock_kafka.url), "t")


@pytest.fixture
def kafka_source(mock_kafka: KafkaCluster) -> Call:
    topic = fresh()
    mock_kafka.create_topic(topic, partitions=1)
    return _receiving(
        mock_kafka.url,
        lambda: KafkaSource(
            mock_kafka.url, consumer=topic, topics=[topic], poll_interval=_SOON
        ),
    )


@pytest.fixture
def nats_publisher(shared_nats: NatsServer, nats_topics: str) -> Call:
    return _publishing(
        shared_nats.url, lambda: NatsPublisher(shared_nats.url), f"{nats_topics}.t"
    )


@pytest.fixture
def nats_source(shared_nats: NatsServer, nats_topics: str) -> Call:
    return _receiving(
        shared_nats.url,
        lambda: NatsSource(
            shared_nats.url,
            consumer="one",
            topics=[f"{nats_topics}.t"],
            poll_interval=_SOON,
        ),
    )


@pytest.fixture
def postgres_publisher(database_url: str) -> Call:
    return _publishing(database_url, lambda: PostgresPublisher(database_url), "t")


@pytest.fixture
def postgres_source(database_url: str) -> Call:
    return _receiving(
        database_url,
        lambda: PostgresSource(
            database_url, consumer="one", topics=["t"], poll_interval=_SOON
        ),
    )


@pytest.fixture
def rabbitmq_publisher(rabbitmq_url: str) -> Call:
    return _publishing(rabbitmq_url, lambda: RabbitMQPublisher(rabbitmq_url), "t")


@pytest.fixture
def rabbitmq_source(rabbitmq_url: str) -> Call:
    return _receiving(
        rabbitmq_url,
        lambda: RabbitMQSource(
            f"{rabbitmq_url}&queue={exchange_of(rabbitmq_url)}",
            consumer="one",
            topics=["t"],
            poll_interval=_SOON,
        ),
    )


@pytest.fixture
def redis_publisher(redis_url: str) -> Call:
    return _publishing(redis_url, lambda: RedisPublisher(redis_url), "t")


@pytest.fixture
def redis_source(redis_url: str) -> Call:
    return _receiving(
        redis_url,
        lambda: RedisSource(
            redis_url, consumer="one", topics=["t"], poll_interval=_SOON
        ),
    )


@pytest.fixture
def sqs_publisher(shared_sqs: SqsServer, aws: Aws) -> Call:
    topic = fresh()
    asyncio.run(aws.create_queue(f"{topic}.fifo"))
    return _publishing(
        shared_sqs.url(), lambda: SqsPublisher.from_url(shared_sqs.url()), topic
    )


@pytest.fixture
def sqs_source(shared_sqs: SqsServer, aws: Aws) -> Call:
    topic = fresh()
    asyncio.run(aws.subscribe(f"{topic}.fifo", f"one-{topic}.fifo"))
    return _receiving(
        shared_sqs.url(),
        lambda: SqsSource(
            SqsSettings.from_url(shared_sqs.url("sns") + "&fifo=true&wait=0s"),
            consumer="one",
            topics=[topic],
            poll_interval=_SOON,
        ),
    )


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Call:
    found: Call = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(
    "call",
    [
        "http_publisher",
        "kafka_publisher",
        "kafka_source",
        "nats_publisher",
        "nats_source",
        "postgres_publisher",
        "postgres_source",
        "rabbitmq_publisher",
        "rabbitmq_source",
        "redis_publisher",
        "redis_source",
        "sqs_publisher",
        "sqs_source",
    ],
    indirect=True,
)
def test_a_call_cancelled_at_any_point_leaves_nothing_behind(call: Call) -> None:
    # The first call creates the objects that a library keeps for the whole process.
    _call_and_cancel(call, turn=None)
    assert call.ports
    for turn in itertools.count(1):
        sockets = _connections_to(call.ports)
        if not _call_and_cancel(call, turn=turn):
            break

        def all_closed(sockets: set[str] = sockets) -> bool:
            # C libraries close sockets when objects are freed, some in a thread.
            gc.collect()
            return _connections_to(call.ports) <= sockets

        wait_for(f"all closed after turn {turn}", all_closed, seconds=_PATIENCE)


def _call_and_cancel(call: Call, *, turn: int | None) -> bool:
    """Call, cancel before a turn of the loop, and return whether it was in time."""
    loop = _Loop(turn)

    async def main() -> None:
        loop.task = task = asyncio.ensure_future(call.run())
        await asyncio.wait({task}, timeout=_PATIENCE)
        assert task.done(), f"turn {turn}: {task}"
        assert task.cancelled() is loop.cancelled, f"turn {turn}: {task}"
        if not loop.cancelled:
            task.result()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=_PATIENCE)
        assert not left, f"turn {turn}"

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    return loop.cancelled


def _connections_to(ports: Set[int]) -> set[str]:
    """Return the sockets of this process that are connected to one of these ports.

    Other tests may have left clients in this process that still connect elsewhere.
    """
    connected = {
        inode
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        for _, _, remote, _, _, _, _, _, _, inode, *_ in [line.split()]
        if int(remote.partition(":")[2], 16) in ports
    }
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {f"socket:[{inode}]" for inode in connected} & found
