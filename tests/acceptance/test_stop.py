"""Relays that are stopped by signals."""

import signal

import pytest

from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

OPTIONS = ("--batch-size=20", "--concurrency=2")


def test_a_terminated_relay_settles_every_acked_message(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(600)
    for _ in range(3):
        relay = relays.start(slow_sink.url, *OPTIONS)
        slow_sink.wait_for_relay(relay.pid)
        relay.terminate()
        assert relay.wait() == 0
        assert "RelayStopped" in relay.log()
        assert inspection.unsettled()
        assert inspection.published() == {a.id for a in slow_sink.arrivals()}

    relays.start(slow_sink.url, *OPTIONS)
    inspection.wait_until_settled()
    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() == 0


def test_lanes_of_a_terminated_relay_move_without_duplicates(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(1_250)
    running = [relays.start(slow_sink.url, *OPTIONS, "--lease=2s") for _ in range(2)]
    for _ in range(3):
        leaving = running.pop(0)
        slow_sink.wait_for_relay(leaving.pid)
        leaving.terminate()
        running.append(relays.start(slow_sink.url, *OPTIONS, "--lease=2s"))
        assert leaving.wait() == 0
    inspection.wait_until_settled()
    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() == 0


def test_an_idle_relay_exits_at_once_when_terminated(
    relays: Relays, sink: Sink, inspection: Inspection
) -> None:
    relay = relays.start(sink.url)
    inspection.wait_for_sleepers()
    relay.terminate()
    # Half the time that it would wait for a batch in flight.
    assert relay.wait(seconds=10) == 0
    assert not inspection.lanes()


def test_a_second_signal_ends_a_relay_at_once(
    relays: Relays, sink: Sink, writer: Writer
) -> None:
    writer.add(100)
    relay = relays.start(sink.url_with(latency=60))
    sink.wait_for_relay(relay.pid)
    relay.terminate()
    wait_for("it drains", lambda: not relay.catches(signal.SIGTERM))
    assert relay.is_running()
    relay.terminate()
    # After its drain it would exit with status 0.
    assert relay.wait() == -signal.SIGTERM


def test_a_silent_broker_delays_a_stop_by_at_most_the_drain(
    relays: Relays, sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(100)
    url = sink.url_with(latency=60)
    relay = relays.start(url, "--drain=0.5s")
    sink.wait_for_relay(relay.pid)
    relay.terminate()
    # The broker would answer after a minute.
    assert relay.wait(seconds=30) == 0
    assert inspection.unsettled()
