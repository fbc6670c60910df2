"""If a topic or queue is missing, a consumer says which and exits with status 2."""

from pathlib import Path
from uuid import uuid4

from tests.fixtures.refusals import refusal_of_consumer, user_who_may_make
from tests.servers.kafka import KafkaCluster
from tests.servers.nats import nats_server
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.sqs import SqsServer


def test_a_consumers_missing_topic_is_named(
    database_url: str, modules: Path, mock_kafka: KafkaCluster
) -> None:
    broker = f"{mock_kafka.url}/?allow.auto.create.topics=false"
    line = refusal_of_consumer(database_url, broker, modules)
    assert "orders" in line


def test_a_consumers_missing_queue_is_named(
    database_url: str, modules: Path, shared_sqs: SqsServer
) -> None:
    broker = f"{shared_sqs.url()}&queue=missing-queue"
    assert "missing-queue" in refusal_of_consumer(database_url, broker, modules)


def test_a_consumers_missing_queue_that_it_cannot_create_is_named(
    database_url: str, modules: Path, shared_rabbitmq: RabbitMQServer
) -> None:
    with user_who_may_make(shared_rabbitmq, "^nothing$") as url:
        broker = f"{url}?queue=missing-queue"
        line = refusal_of_consumer(database_url, broker, modules)
    assert "queue 'missing-queue' doesn't exist and can't be created: " in line
    assert "access" in line.lower()


def test_a_consumers_missing_exchange_that_it_cannot_create_is_named(
    database_url: str, modules: Path, shared_rabbitmq: RabbitMQServer
) -> None:
    queue = f"billing-{uuid4().hex}"
    with user_who_may_make(shared_rabbitmq, "^billing") as url:
        broker = f"{url}?queue={queue}&exchange=missing-exchange"
        line = refusal_of_consumer(database_url, broker, modules)
    assert "exchange 'missing-exchange'" in line


def test_a_consumers_topic_that_is_in_no_stream_is_named(
    database_url: str, modules: Path
) -> None:
    with nats_server() as server:
        assert "orders" in refusal_of_consumer(database_url, server.url, modules)
