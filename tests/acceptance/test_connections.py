"""Relays whose connections to PostgreSQL are cut, one after the other."""

import pytest

from tests.acceptance.inspection import Inspection, Part
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

OPTIONS = ("--batch-size=20", "--concurrency=2")
IN_FLIGHT = 2 * 20
PARTS: tuple[Part, ...] = ("lease", "doorbell", "sweep", "worker")


@pytest.mark.parametrize("part", PARTS)
def test_a_relay_reconnects_when_one_of_its_connections_is_cut(
    part: Part,
    relays: Relays,
    slow_sink: Sink,
    writer: Writer,
    inspection: Inspection,
) -> None:
    writer.add(600)
    relay = relays.start(slow_sink.url, *OPTIONS)
    slow_sink.wait_for_relay(relay.pid)

    gone = inspection.terminate(relay.pid, part)
    assert gone
    wait_for(
        f"another connection for {part}",
        lambda: inspection.backends(relay.pid, part) - gone,
    )
    inspection.wait_until_settled()
    writer.add(50)
    inspection.wait_until_settled()

    assert relay.is_running()
    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() <= IN_FLIGHT
    assert inspection.charged() == 0


def test_a_lease_is_lost_at_once_when_its_connection_is_cut(
    relays: Relays, sink: Sink, inspection: Inspection
) -> None:
    # With a lease of ten minutes, heartbeats are a minute apart.
    relay = relays.start(sink.url, "--lease=10m")
    relay.wait_for_log("LeaseTaken", times=3)
    inspection.terminate(relay.pid, "lease")
    relay.wait_for_log("LeaseLost", seconds=20)
    wait_for("it has lanes again", lambda: len(inspection.lanes()[relay.pid]) == 48)


def test_another_process_takes_over_when_a_lease_is_cut(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(1_500)
    cut, other = (relays.start(slow_sink.url, *OPTIONS, "--lease=2s") for _ in range(2))
    for relay in (cut, other):
        slow_sink.wait_for_relay(relay.pid)
    inspection.terminate(cut.pid, "lease")
    inspection.wait_until_settled()

    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() <= IN_FLIGHT
    assert len(inspection.lanes()) == 2
