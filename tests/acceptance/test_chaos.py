"""Readers with three processes each, and everything that can happen to them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.brokers import Broker
from tests.acceptance.chaos import Chaos, Scale, tally
from tests.acceptance.counters import CLUMSY, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.urls import with_options
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import let_pass, wait_for, wait_until_none

pytestmark = [pytest.mark.fault, pytest.mark.timeout(3600)]

OPTIONS = ("--batch-size=20", "--concurrency=2", "--lease=2s")
SHORT_LEASES = {
    "postgres": {"lease": "2s"},
    "elsewhere": {"lease": "2s"},
    "rabbitmq": {"heartbeat": "2"},
}
SHORT = Scale(messages=1_500, keys=40, faults=7, seed=0)
FULL = Scale(messages=20_000, keys=300, faults=60, seed=0)


@pytest.fixture
def database_url(private_database_url: str) -> str:
    """Replace the database on the shared server."""
    return private_database_url


@pytest.fixture
def scale(full: bool, pytestconfig: pytest.Config) -> Scale:
    """Return the scale of the options; its seed is random without one."""
    names = ("messages", "keys", "faults", "seed")
    given = {name: pytestconfig.getoption(name) for name in names}
    given["seed"] = given["seed"] or random.randrange(1, 1 << 31)
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(FULL if full else SHORT, **chosen)


@pytest.fixture
def writer(database_url: str, scale: Scale) -> Iterator[Writer]:
    with Writer(database_url, keys=scale.keys) as opened:
        yield opened


@pytest.fixture
def sinks(tmp_path: Path) -> dict[str, Sink]:
    """Return the brokers of both readers."""
    return {name: Sink(tmp_path / name, latency=0.02) for name in ("main", "audit")}


def test_two_readers_lose_nothing_and_keep_each_key_in_order_whatever_happens(
    scale: Scale,
    relays: Relays,
    sinks: dict[str, Sink],
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
    database_url: str,
) -> None:
    with administration(database_url, application_name="test") as connection:
        add_reader(connection, "audit", ["*"], broker=sinks["audit"].url)
    begins = [
        partial(relays.start_without_waiting, sink.url, *OPTIONS, f"--reader={name}")
        for name, sink in sinks.items()
    ]

    def arrived() -> int:
        return min(sink.count() for sink in sinks.values())

    chaos = Chaos(scale, begins, migrated_server, writer)
    chaos.run(arrived)
    wait_for(
        "all arrive at both", lambda: arrived() == writer.added, seconds=300, pause=0.1
    )
    inspection.wait_until_settled(seconds=300)
    chaos.report(*(f"{sink.duplicates()} twice" for sink in sinks.values()))
    for name, sink in sinks.items():
        assert sink.numbers() == writer.numbers(), name
    assert inspection.charged() == 0


@pytest.mark.parametrize(
    "kind",
    [
        "redis",
        *map(
            as_variant,
            ("postgres", "nats", "rabbitmq", "elsewhere", "kafka", "sqs"),
        ),
    ],
)
def test_consumers_handle_each_message_once_and_in_order_whatever_happens(
    kind: str,
    scale: Scale,
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
) -> None:
    def restart_broker() -> None:
        broker.write()
        broker.kill()
        let_pass(random.uniform(0, 2))
        broker.start()

    url = with_options(broker.url, **SHORT_LEASES.get(kind, {}))
    begins = [partial(counters.start_without_waiting, url, CLUMSY)]
    if broker.relayed:
        # Queues and groups exist before the first message is published.
        counters.start(url).terminate()
        broker.write()
        begins.append(partial(relays.start_without_waiting, broker.url, *OPTIONS))
    chaos = Chaos(
        scale,
        begins,
        migrated_server,
        writer,
        others=broker.databases,
        more={"broker": restart_broker} if broker.relayed else {},
    )
    try:
        chaos.run(counters.count)
        counters.wait_for_count(writer.added)
        wait_until_none("deliveries wait", broker.waiting)
    finally:
        chaos.report(
            tally(inspection, writer.added),
            f"{sum(counters.logged('DuplicateSkipped'))} redelivered",
            f"{sum(counters.logged('HandlerFailed'))} failed",
        )
    counters.expect_each_once(writer.numbers())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nats", "redis", "rabbitmq"])
def test_consumers_do_so_too_while_the_number_of_shards_changes(
    kind: str,
    scale: Scale,
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
) -> None:
    lease = SHORT_LEASES.get(kind, {})
    urls = (with_options(broker.url, shards=n, **lease) for n in cycle((8, 3, 1)))
    counters.start(broker.url).terminate()
    broker.write()
    publishing = [relays.start(broker.url, *OPTIONS)]
    consumed = broker.url

    def begin() -> RunningProcess:
        return counters.start_without_waiting(consumed, CLUMSY)

    def change_relay() -> None:
        publishing.append(relays.start(next(urls), *OPTIONS, "--switch-broker"))
        publishing.pop(0).terminate()

    def deploy_consumers() -> None:
        nonlocal consumed
        consumed = next(urls)
        chaos.replace_all(begin)

    def restart_broker() -> None:
        broker.write()
        broker.kill()
        broker.start()

    if kind == "rabbitmq":  # whose consumers have the number of shards
        consumed = next(urls)
        faults = {"shards": deploy_consumers, "broker": restart_broker}
    else:
        change_relay()
        faults = {"shards": change_relay}
    chaos = Chaos(scale, [begin], migrated_server, writer, more=faults)
    try:
        chaos.run(counters.count)
        counters.wait_for_count(writer.added)
        wait_until_none("deliveries wait", broker.waiting)
    finally:
        chaos.report(tally(inspection, writer.added))
    counters.expect_each_once(writer.numbers())
