"""Two readers with three relays each, and everything that can happen to them.

Relays are killed, frozen for longer than their lease, stopped and restarted, their
sessions are terminated, and the server crashes, at random moments, while writers write.
"""

import random
import time
from pathlib import Path

import pytest

from outbox.administration.connection import administration
from outbox.administration.readers import add_reader
from outbox.testing.postgres import PostgresServer
from tests.acceptance.inspection import Inspection, Part
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.waiting import let_pass, wait_for

pytestmark = pytest.mark.fault

OPTIONS = ("--batch-size=20", "--concurrency=2", "--lease=2s")
EVENTS = ("kill", "freeze", "stop", "terminate", "terminate", "crash")
REPLICAS = 3


@pytest.fixture
def database_url(private_database_url: str) -> str:
    """Replace the database on the shared server."""
    return private_database_url


@pytest.fixture
def sinks(tmp_path: Path) -> dict[str, Sink]:
    """Return the brokers of both readers."""
    return {name: Sink(tmp_path / name, latency=0.02) for name in ("main", "audit")}


class Chaos:
    """What happens to the relays, one event after the other."""

    def __init__(
        self, relays: Relays, sinks: dict[str, Sink], inspection: Inspection
    ) -> None:
        self._relays = relays
        self._sinks = sinks
        self._inspection = inspection
        self._frozen: list[tuple[float, RunningProcess]] = []
        self.running: list[tuple[str, RunningProcess]] = []
        for name in sinks:
            for _ in range(REPLICAS):
                self.start(name)

    def start(self, reader: str) -> None:
        broker = self._sinks[reader].url
        relay = self._relays.start_without_waiting(
            broker, *OPTIONS, f"--reader={reader}"
        )
        self.running.append((reader, relay))

    def happen(self, event: str, server: PostgresServer) -> None:
        self.thaw(time.monotonic() - random.uniform(1, 6))
        reader, relay = random.choice(self.running)
        if any(relay is frozen for _, frozen in self._frozen):
            return
        match event:
            case "kill":
                self.running.remove((reader, relay))
                relay.kill()
                self.start(reader)
            case "stop":
                self.running.remove((reader, relay))
                relay.terminate()
                self.start(reader)
            case "freeze":
                relay.freeze()
                self._frozen.append((time.monotonic(), relay))
            case "terminate":
                part: Part = random.choice(("lease", "worker", "sweep", "doorbell"))
                for backend in self._inspection.backends(relay.pid, part):
                    self._inspection.rows("SELECT pg_terminate_backend(%s)", backend)
            case "crash":
                server.restart("immediate")
        # One that was about to start exits if the server is away.
        for each in [it for it in self.running if not it[1].is_running()]:
            self.running.remove(each)
            self.start(each[0])

    def thaw(self, until: float) -> None:
        """Let those continue that were frozen before."""
        for at, relay in [*self._frozen]:
            if at <= until:
                relay.thaw()
                self._frozen.remove((at, relay))


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
    seconds, crashes = (1800 if full else 15), 0
    chaos = Chaos(relays, sinks, inspection)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        event = random.choice(EVENTS)
        # The server needs a second to come back, and its tables don't: few crashes.
        if event == "crash" and crashes * 60 > seconds - (end - time.monotonic()):
            continue
        writer.add(random.randint(1, 100))
        chaos.happen(event, migrated_server)
        if event == "crash":
            crashes += 1
            writer.reconnect()
        let_pass(random.uniform(0.1, 1.5))
    chaos.thaw(time.monotonic())
    wait_for(
        "all arrive at both",
        lambda: all(sink.count() == writer.added for sink in sinks.values()),
        seconds=300,
    )
    inspection.wait_until_settled(seconds=300)
    for name, sink in sinks.items():
        assert sink.numbers() == writer.numbers(), name
    assert inspection.charged() == 0
