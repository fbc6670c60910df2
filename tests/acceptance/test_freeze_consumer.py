"""A consumer that is frozen for longer than its lease."""

import psycopg
import pytest

from tests.acceptance.counters import IMPATIENT, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.processes import RunningProcess
from tests.fixtures.waiting import wait_for, wait_until_none

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

COUNT = 100


@pytest.fixture
def impatient(counters: Counters) -> list[RunningProcess]:
    """Return two counters whose transactions can be idle for at most 2 s."""
    return [counters.start(consumer=IMPATIENT) for _ in range(2)]


def test_after_a_takeover_the_frozen_process_commits_nothing(
    relays: Relays,
    counters: Counters,
    impatient: list[RunningProcess],
    writer: Writer,
    inspection: Inspection,
) -> None:
    relays.start(inspection.url)
    frozen, other = impatient
    wait_for("they share the lanes", lambda: len(counters.shares()) == 2)
    with psycopg.connect(inspection.url) as gate:
        # Handlers wait at their INSERT, so the frozen process is certain to have some.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        writer.add(COUNT)
        wait_for("both are at work", counters.are_at_work)
        frozen.freeze()
        # The server ends the lease of the frozen process after 10 s.
        wait_for("its lanes are taken", lambda: counters.shares() == [16])
    wait_for("the other handles all of it", lambda: counters.count() == COUNT)
    assert counters.count_of(other.pid) == COUNT
    wait_until_none("deliveries wait", counters.waiting)

    frozen.thaw()
    # It restarts the handlers it had begun, and finds the receipts.
    frozen.wait_for_log("HandlerDatabaseLost")
    frozen.wait_for_log("DuplicateSkipped")
    wait_for("they share again", lambda: len(counters.shares()) == 2, seconds=120)
    assert counters.numbers() == writer.numbers()
    assert counters.receipts() == COUNT

    writer.add(COUNT)
    inspection.wait_until_settled()
    wait_until_none("deliveries wait", counters.waiting)
    assert counters.numbers() == writer.numbers()
    assert counters.count_of(frozen.pid) > 0
