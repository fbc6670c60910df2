"""Brokers that go away while relays publish to them."""

import os
import signal
from collections.abc import Iterator

import psycopg
import pytest
from redis import Redis

from outbox.migrate import migrate
from outbox.testing.postgres import PostgresServer
from outbox.testing.redis import RedisServer, redis_server
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.postgres import new_database
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

TOPIC = "numbers.counted"
OPTIONS = ("--batch-size=20", "--concurrency=2")
IN_FLIGHT = 2 * 20


@pytest.fixture
def durable_redis() -> Iterator[RedisServer]:
    """A Redis that loses nothing when it is killed."""
    with redis_server({"appendonly": "yes", "appendfsync": "always"}) as running:
        yield running


@pytest.fixture
def queue_url(private_server: PostgresServer) -> Iterator[str]:
    """A database for deliveries on a server of its own, where one consumer listens."""
    with new_database(private_server, "pillarbox_queue") as name:
        url = private_server.database_url(name)
        migrate(url, with_cron=False)
        with psycopg.connect(url) as connection:
            connection.execute(
                "INSERT INTO inbox.subscription (consumer, topic) VALUES ('one', %s)",
                [TOPIC],
            )
        yield url


def by_first_appearance(arrivals: list[tuple[str, str, int]]) -> dict[str, list[int]]:
    """Give the numbers of each key, from id, key and number of what arrived."""
    numbers: dict[str, list[int]] = {}
    seen = set()
    for id, key, number in arrivals:
        if id not in seen:
            seen.add(id)
            numbers.setdefault(key, []).append(number)
    return numbers


def entries_of(redis: RedisServer) -> list[tuple[str, str, int]]:
    """Give id, key and number of what is in the stream."""
    with Redis.from_url(redis.url, decode_responses=True) as client:
        entries = [fields for _, fields in client.xrange(TOPIC)]
    return [(e["id"], e["key"], int(e["payload"])) for e in entries]


def test_a_redis_that_is_killed_and_comes_back_costs_no_message_and_no_attempt(
    durable_redis: RedisServer,
    relays: Relays,
    writer: Writer,
    inspection: Inspection,
) -> None:
    writer.add(6_000)
    relay = relays.start(durable_redis.url, *OPTIONS)
    with Redis.from_url(durable_redis.url) as client:
        wait_for("something arrives", lambda: int(client.xlen(TOPIC)) > 500)
    durable_redis.kill()
    relay.wait_for_log("BrokerLost", times=3)
    assert inspection.unsettled()
    assert inspection.charged() == 0
    durable_redis.start()
    wait_for("all is settled", lambda: not inspection.unsettled())

    arrivals = entries_of(durable_redis)
    assert by_first_appearance(arrivals) == writer.numbers()
    assert len(arrivals) <= writer.added + IN_FLIGHT
    assert inspection.charged() == 0
    relay.wait_for_log("BrokerFound")


def test_a_redis_that_hangs_counts_as_away_until_it_answers_again(
    private_redis: RedisServer,
    relays: Relays,
    writer: Writer,
    inspection: Inspection,
) -> None:
    writer.add(6_000)
    relay = relays.start(private_redis.url, *OPTIONS, "--publish-timeout=0.3")
    with Redis.from_url(private_redis.url) as client:
        wait_for("something arrives", lambda: int(client.xlen(TOPIC)) > 500)
        server = int(client.info()["process_id"])
    os.kill(server, signal.SIGSTOP)
    try:
        relay.wait_for_log("BrokerLost", times=3)
        assert inspection.unsettled()
    finally:
        os.kill(server, signal.SIGCONT)
    wait_for("all is settled", lambda: not inspection.unsettled())

    arrivals = entries_of(private_redis)
    assert by_first_appearance(arrivals) == writer.numbers()
    assert inspection.charged() == 0
    # Each attempt may have reached the server, which answers them all when it thaws.
    attempts = relay.log().count("BrokerLost")
    assert len(arrivals) <= writer.added + attempts * IN_FLIGHT


def test_a_postgres_broker_that_crashes_and_comes_back_costs_no_message_and_no_attempt(
    private_server: PostgresServer,
    queue_url: str,
    relays: Relays,
    writer: Writer,
    inspection: Inspection,
) -> None:
    writer.add(6_000)
    relay = relays.start(queue_url, *OPTIONS)
    with psycopg.connect(queue_url, autocommit=True) as connection:

        def count() -> int:
            row = connection.execute("SELECT count(*) FROM inbox.delivery").fetchone()
            return int(row[0]) if row else 0

        wait_for("something arrives", lambda: count() > 500)
    private_server.stop("immediate")
    relay.wait_for_log("BrokerLost", times=3)
    assert inspection.unsettled()
    assert inspection.charged() == 0
    private_server.start()
    wait_for("all is settled", lambda: not inspection.unsettled())

    query = """
        SELECT message_id::text, key, convert_from(payload, 'UTF8')::int
          FROM inbox.delivery
         ORDER BY seq
    """
    with psycopg.connect(queue_url) as connection:
        arrivals = connection.execute(query).fetchall()
    assert by_first_appearance(arrivals) == writer.numbers()
    assert len(arrivals) <= writer.added + IN_FLIGHT
    assert inspection.charged() == 0
    relay.wait_for_log("BrokerFound")
