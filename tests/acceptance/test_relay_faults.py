"""Relays that are killed, frozen, stopped and disconnected."""

import signal
import time

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import pillarbox
from pillarbox import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.inspection import Inspection, Part
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

OPTIONS = ("--batch-size=20", "--concurrency=2", "--lease=2s")
IN_FLIGHT = 2 * 20
PARTS: tuple[Part, ...] = ("lease", "doorbell", "shared", "worker")


@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_another_relay_takes_over_and_repeats_at_most_what_was_in_flight(
    fault: str, relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(1_000)
    one, other = (relays.start(slow_sink.url, *OPTIONS) for _ in range(2))
    for relay in (one, other):
        slow_sink.wait_for_relay(relay.pid)
    if fault == "kill":
        one.kill()
    else:
        inspection.terminate(one.pid, "lease")
    inspection.wait_until_settled()

    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() <= IN_FLIGHT
    assert inspection.charged() == 0


def test_what_commits_late_is_published_in_order_although_a_relay_was_killed(
    relays: Relays, sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    def add_late(session: Session, number: int) -> None:
        message = Message("numbers.counted", b"%d" % number, key="late")
        pillarbox.add(session, message)
        session.flush()

    relay = relays.start(sink.url, *OPTIONS)
    engine = create_engine(sqlalchemy_url(inspection.url))
    with Session(engine) as late, late.begin():
        add_late(late, 0)
        for _ in range(2):
            # These draw later numbers in every lane, and are settled before.
            writer.add(200)
            inspection.wait_until_settled()
            relay.kill()
            relay = relays.start(sink.url, *OPTIONS)
        writer.add(200)
        inspection.wait_until_settled()
    with Session(engine) as session, session.begin():
        add_late(session, 1)
    engine.dispose()
    inspection.wait_until_settled()
    assert sink.numbers() == writer.numbers() | {"late": [0, 1]}


def test_a_frozen_relay_loses_its_lanes_and_publishes_nothing_stale(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(1_000)
    frozen, other = (relays.start(slow_sink.url, *OPTIONS) for _ in range(2))
    for relay in (frozen, other):
        slow_sink.wait_for_relay(relay.pid)

    frozen.freeze()
    before = slow_sink.count_of(frozen.pid)
    wait_for("its lanes are taken", lambda: len(inspection.lanes()[other.pid]) == 48)
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


def test_a_relay_reconnects_when_its_connections_are_cut_one_after_the_other(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    relay = relays.start(slow_sink.url, *OPTIONS)
    for part in PARTS:
        before = slow_sink.count()
        writer.add(200)
        slow_sink.wait_for_count(before + 1)
        inspection.replace(relay.pid, part)
        inspection.wait_until_settled()

    assert relay.is_running()
    assert slow_sink.numbers() == writer.numbers()
    assert slow_sink.duplicates() <= len(PARTS) * IN_FLIGHT
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


def test_a_terminated_relay_settles_every_acked_message(
    relays: Relays, slow_sink: Sink, writer: Writer, inspection: Inspection
) -> None:
    writer.add(600)
    for _ in range(2):
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
    relay = relays.start(sink.url_with(latency=60), "--drain=0.5s")
    sink.wait_for_relay(relay.pid)
    relay.terminate()
    # The broker would answer after a minute, and a relay waits 20 s for that by itself.
    assert relay.wait(seconds=15) == 0
    assert inspection.unsettled()


class TestARestartOfPostgreSQL:
    @pytest.fixture
    def database_url(self, private_database_url: str) -> str:
        """Replace the database on the shared server."""
        return private_database_url

    def test_relays_share_the_lanes_and_hear_the_doorbell_again(
        self,
        migrated_server: PostgresServer,
        relays: Relays,
        sink: Sink,
        writer: Writer,
        inspection: Inspection,
    ) -> None:
        poll_interval = 20.0
        started = [
            relays.start(sink.url, *OPTIONS, INTERVALS=f"poll={poll_interval}")
            for _ in range(2)
        ]
        inspection.wait_for_shares([24, 24])
        inspection.wait_for_sleepers()
        migrated_server.restart("immediate")
        inspection.wait_for_shares([24, 24])
        inspection.wait_for_sleepers()
        writer.reconnect()
        for _ in range(5):
            writer.add(1)
            added_at = time.monotonic()
            sink.wait_for_count(writer.added)
            latency = sink.arrivals()[-1].at - added_at
            assert latency < poll_interval / 2, "the doorbell did not ring"
            inspection.wait_for_sleepers()
        assert sink.numbers() == writer.numbers()
        assert all(relay.is_running() for relay in started)
