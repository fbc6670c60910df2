"""Relays that are frozen for longer than their lease."""

import time

import pytest

from tests.acceptance.fixtures import Figures
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

LEASE = 2.0
OPTIONS = ("--batch-size=20", "--concurrency=2", f"--lease={LEASE}s")
IN_FLIGHT = 2 * 20


def test_a_frozen_relay_loses_its_lanes_and_publishes_nothing_stale(
    relays: Relays,
    slow_sink: Sink,
    writer: Writer,
    inspection: Inspection,
    figures: Figures,
) -> None:
    writer.add(1_000)
    frozen, other = (relays.start(slow_sink.url, *OPTIONS) for _ in range(2))
    for relay in (frozen, other):
        slow_sink.wait_for_relay(relay.pid)

    frozen.freeze()
    stopped_at = time.monotonic()
    before = slow_sink.count_of(frozen.pid)
    wait_for("its lanes are taken", lambda: len(inspection.lanes()[other.pid]) == 48)
    figures("take-over", f"{time.monotonic() - stopped_at:.1f} s, lease {LEASE} s")
    wait_for("the other drains all", lambda: not inspection.unsettled())

    frozen.thaw()
    wait_for("it has lanes again", lambda: inspection.lanes().get(frozen.pid))
    assert slow_sink.count_of(frozen.pid) == before
    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() <= IN_FLIGHT

    writer.add(1_000)
    wait_for("it publishes again", lambda: slow_sink.count_of(frozen.pid) > before)
    inspection.wait_until_settled()
    assert slow_sink.numbers() == writer.numbers()


def test_a_thawed_relay_does_not_overtake_the_one_that_took_its_lanes(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(2_000)
    frozen, other = (relays.start(slow_sink.url, *OPTIONS) for _ in range(2))
    for relay in (frozen, other):
        slow_sink.wait_for_relay(relay.pid)

    frozen.freeze()
    before = slow_sink.count_of(frozen.pid)
    wait_for("its lanes are taken", lambda: len(inspection.lanes()[other.pid]) == 48)
    published = slow_sink.count()
    wait_for("the other goes on", lambda: slow_sink.count() > published + 125)
    frozen.thaw()
    wait_for("it publishes again", lambda: slow_sink.count_of(frozen.pid) > before)
    inspection.wait_until_settled()

    assert slow_sink.numbers() == writer.numbers()
    # Only the messages in flight at the freeze are published again, by the other relay.
    assert slow_sink.duplicates() <= IN_FLIGHT
