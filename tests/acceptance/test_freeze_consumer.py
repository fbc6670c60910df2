"""A consumer that stands still for longer than its lease."""

import psycopg
import pytest

from tests.acceptance.counters import Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]


def test_a_frozen_consumer_loses_its_lanes_and_counts_nothing_twice(
    relays: Relays, counters: Counters, writer: Writer, inspection: Inspection
) -> None:
    relays.start(inspection.url)
    frozen, other = (counters.start() for _ in range(2))
    wait_for("they share the lanes", lambda: len(counters.shares()) == 2)
    with psycopg.connect(inspection.url) as gate:
        # Handlers stop at their insert: there is work in the frozen one for sure.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        writer.add(1_000)
        wait_for(
            "both are at work",
            lambda: (
                inspection.rows(
                    "SELECT count(*) >= 9 FROM pg_locks "
                    "WHERE relation = 'counted'::regclass AND NOT granted"
                )
                == [(True,)]
            ),
        )
        frozen.freeze()
        # The server ends the frozen one's lease: 10 s.
        wait_for("its lanes are taken", lambda: counters.shares() == [16])
    # Whoever records a receipt that the frozen one has begun waits for its end.
    wait_for("the other goes on", lambda: counters.count_of(other.pid) > 0)
    frozen.thaw()
    wait_for("all is settled", lambda: not inspection.unsettled(), seconds=120)
    wait_for("all is acked", lambda: not counters.waiting(), seconds=240)
    wait_for("they share again", lambda: len(counters.shares()) == 2, seconds=120)
    assert counters.numbers() == writer.numbers()
    assert counters.receipts() == writer.added

    writer.add(1_000)
    wait_for("all is settled", lambda: not inspection.unsettled(), seconds=120)
    wait_for("all is acked", lambda: not counters.waiting(), seconds=240)
    assert counters.numbers() == writer.numbers()
