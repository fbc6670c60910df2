"""Readers with three processes each, and everything that can happen to them.

Relays, and consumers that read the outbox, are killed, frozen for longer than their
lease, stopped and restarted, their sessions are terminated, and the server crashes, at
random moments, while writers write.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from outbox.administration.connection import administration
from outbox.administration.readers import add_reader
from outbox.testing.postgres import PostgresServer
from tests.acceptance.brokers import Broker, outbox
from tests.acceptance.counters import IMPATIENT, Counters
from tests.acceptance.inspection import Inspection, Part
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import let_pass, wait_for, wait_until_none

pytestmark = pytest.mark.fault

OPTIONS = ("--batch-size=20", "--concurrency=2", "--lease=2s")
EVENTS = ("kill", "freeze", "stop", "terminate", "terminate", "crash")
REPLICAS = 3
SHORT_LEASES = {"rabbitmq": "&heartbeat=2"}


@pytest.fixture
def database_url(private_database_url: str) -> str:
    """Replace the database on the shared server."""
    return private_database_url


@pytest.fixture
def sinks(tmp_path: Path) -> dict[str, Sink]:
    """Return the brokers of both readers."""
    return {name: Sink(tmp_path / name, latency=0.02) for name in ("main", "audit")}


class Chaos:
    """What happens to the processes, one event after the other.

    Args:
        begins: each begins a process of a reader.
        restart_broker: kills it, and starts it again.
    """

    def __init__(
        self,
        begins: Sequence[Callable[[], RunningProcess]],
        inspection: Inspection,
        events: Sequence[str] = EVENTS,
        restart_broker: Callable[[], None] = lambda: None,
    ) -> None:
        self._inspection = inspection
        self._events = events
        self._restart_broker = restart_broker
        self._frozen: list[tuple[float, RunningProcess]] = []
        self.running = [(begin, begin()) for begin in begins for _ in range(REPLICAS)]

    def happen(self, event: str, server: PostgresServer) -> None:
        self.thaw(time.monotonic() - random.uniform(1, 6))
        begin, process = random.choice(self.running)
        if any(process is frozen for _, frozen in self._frozen):
            return
        match event:
            case "kill":
                self.running.remove((begin, process))
                process.kill()
                self.running.append((begin, begin()))
            case "stop":
                self.running.remove((begin, process))
                process.terminate()
                self.running.append((begin, begin()))
            case "freeze":
                process.freeze()
                self._frozen.append((time.monotonic(), process))
            case "terminate":
                part: Part = random.choice(("lease", "worker", "shared", "doorbell"))
                for backend in self._inspection.backends(process.pid, part):
                    self._inspection.rows("SELECT pg_terminate_backend(%s)", backend)
            case "crash":
                server.restart("immediate")
            case "broker":
                self._restart_broker()
        # One that was about to start exits if the server is away.
        for each in [it for it in self.running if not it[1].is_running()]:
            self.running.remove(each)
            self.running.append((each[0], each[0]()))

    def thaw(self, until: float) -> None:
        """Let those continue that were frozen before."""
        for at, process in [*self._frozen]:
            if at <= until:
                process.thaw()
                self._frozen.remove((at, process))

    def last(self, seconds: float, server: PostgresServer, writer: Writer) -> None:
        """Let things happen for so long, while a writer writes."""
        crashes, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            event = random.choice(self._events)
            # The servers need seconds to come back, and tables don't: few crashes.
            is_crash = event in {"crash", "broker"}
            if is_crash and crashes * 60 > seconds - (end - time.monotonic()):
                continue
            writer.add(random.randint(1, 100))
            self.happen(event, server)
            crashes += is_crash
            if event == "crash":
                writer.reconnect()
            let_pass(random.uniform(0.1, 1.5))
        self.thaw(time.monotonic())


@pytest.mark.timeout(3600)
def test_two_readers_lose_nothing_and_keep_each_key_in_order_whatever_happens(
    relays: Relays,
    sinks: dict[str, Sink],
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
    database_url: str,
    full: bool,
) -> None:
    with administration(database_url, application_name="test") as connection:
        add_reader(connection, "audit", ["*"], broker=sinks["audit"].url)
    begins = [
        partial(relays.start_without_waiting, sink.url, *OPTIONS, f"--reader={name}")
        for name, sink in sinks.items()
    ]
    Chaos(begins, inspection).last(1800 if full else 15, migrated_server, writer)
    wait_for(
        "all arrive at both",
        lambda: all(sink.count() == writer.added for sink in sinks.values()),
        seconds=300,
    )
    inspection.wait_until_settled(seconds=300)
    for name, sink in sinks.items():
        assert sink.numbers() == writer.numbers(), name
    assert inspection.charged() == 0


@pytest.mark.timeout(3600)
def test_consumers_handle_each_message_once_and_in_order_whatever_happens(
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
    full: bool,
) -> None:
    broker = outbox(inspection.url)
    begin = partial(counters.start_without_waiting, f"{broker.url}&lease=2s", IMPATIENT)
    Chaos([begin], inspection).last(1800 if full else 15, migrated_server, writer)
    counters.wait_for_count(writer.added)
    wait_until_none("messages wait", broker.waiting)
    counters.expect_each_once(writer.numbers())


@pytest.mark.parametrize("kind", ["nats", "rabbitmq", "redis"])
@pytest.mark.timeout(3600)
def test_consumers_over_a_broker_do_so_too(
    kind: str,
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
    full: bool,
) -> None:
    def restart_broker() -> None:
        broker.write()
        broker.kill()
        broker.start()

    url = broker.url + SHORT_LEASES.get(kind, "")
    begin = partial(counters.start_without_waiting, url, IMPATIENT)
    counters.start(url).terminate()
    broker.write()
    relays.start(broker.url)
    Chaos(
        [begin], inspection, ("kill", "freeze", "stop", "broker"), restart_broker
    ).last(900 if full else 20, migrated_server, writer)
    counters.wait_for_count(writer.added)
    wait_until_none("deliveries wait", broker.waiting)
    counters.expect_each_once(writer.numbers())


@pytest.mark.parametrize("kind", ["nats"])
@pytest.mark.timeout(3600)
def test_consumers_do_so_too_while_the_number_of_shards_changes(
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    migrated_server: PostgresServer,
    full: bool,
) -> None:
    counters.start(broker.url).terminate()
    begin = partial(counters.start_without_waiting, broker.url, IMPATIENT)
    chaos = Chaos([begin], inspection, ("kill", "freeze", "stop"))
    for shards in (1, 8, 3):
        # Those that published in another number of shards stop doing so.
        relays.start(with_options(broker.url, shards=shards), "--switch-broker")
        chaos.last(300 if full else 10, migrated_server, writer)
    counters.wait_for_count(writer.added)
    wait_until_none("deliveries wait", broker.waiting)
    counters.expect_each_once(writer.numbers())
