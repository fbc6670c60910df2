"""PostgreSQL is restarted under running relays."""

import time

import pytest

from outbox.testing.postgres import PostgresServer, StopMode
from tests.acceptance.fixtures import Figures
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

POLL_INTERVAL = 20.0
OPTIONS = (
    "--batch-size=20",
    "--concurrency=2",
    "--lease=2s",
)
MODES: tuple[StopMode, ...] = ("fast", "immediate")


@pytest.fixture
def database_url(private_database_url: str) -> str:
    """Replace the database on the shared server."""
    return private_database_url


@pytest.mark.parametrize("mode", MODES)
def test_relays_survive_a_restart_of_postgresql(
    mode: StopMode,
    migrated_server: PostgresServer,
    relays: Relays,
    slow_sink: Sink,
    writer: Writer,
    inspection: Inspection,
    figures: Figures,
) -> None:
    started = [
        relays.start(slow_sink.url, *OPTIONS, INTERVALS=f"poll={POLL_INTERVAL}")
        for _ in range(2)
    ]
    inspection.wait_for_shares([24, 24])
    writer.add(1_000)
    for relay in started:
        slow_sink.wait_for_relay(relay.pid)

    migrated_server.restart(mode)
    back_at, arrived = time.monotonic(), len(slow_sink.arrivals())
    writer.reconnect()
    writer.add(250)  # on a slow machine, all others may be published already
    wait_for("a relay goes on", lambda: len(slow_sink.arrivals()) > arrived + 25)
    figures(f"back after a restart ({mode})", f"{time.monotonic() - back_at:.1f} s")
    inspection.wait_until_settled()
    assert slow_sink.numbers() == writer.numbers()

    inspection.wait_for_sleepers()
    migrated_server.restart(mode)
    inspection.wait_for_shares([24, 24])
    inspection.wait_for_sleepers()
    writer.reconnect()
    latencies = []
    for _ in range(5):
        writer.add(1)
        added_at = time.monotonic()
        wait_for("it arrives", lambda: slow_sink.count() == writer.added)
        latencies.append(slow_sink.arrivals()[-1].at - added_at)
        inspection.wait_for_sleepers()
    assert max(latencies) < POLL_INTERVAL / 2, "the doorbell did not ring"
    slowest = f"{max(latencies) * 1000:.1f} ms"
    figures(f"slowest of 5 after a restart while idle ({mode})", slowest)
    assert slow_sink.numbers() == writer.numbers()
    assert all(relay.is_running() for relay in started)
