"""A consumer that is frozen until another one gets its messages."""

from typing import Final

import psycopg
import pytest

from tests.acceptance.brokers import Broker, as_variant
from tests.acceptance.counters import IMPATIENT, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import wait_for, wait_until_none

pytestmark = [pytest.mark.fault, pytest.mark.timeout(1800)]

# RabbitMQ's lease is the connection, which ends after two missed heartbeats.
OPTIONS: Final = {"rabbitmq": "&heartbeat=2"}


@pytest.mark.parametrize(
    "kind", ["postgres", "inbox", "rabbitmq", *map(as_variant, ("redis", "nats"))]
)
def test_after_a_takeover_the_frozen_process_commits_nothing(
    kind: str,
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    full: bool,
) -> None:
    count = 5_000 if full else 100
    url = broker.url + OPTIONS.get(kind, "")
    frozen, other = (counters.start(url, IMPATIENT) for _ in range(2))
    if broker.relayed:
        relays.start(broker.url)
    if broker.ordered:
        wait_for("they share the lanes", lambda: len(counters.shares(broker.url)) == 2)
    with psycopg.connect(inspection.url) as gate:
        # Handlers wait at their INSERT, so the frozen process is certain to have some.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        writer.add(count)
        wait_for("both are at work", counters.are_at_work)
        frozen.freeze()
    counters.wait_for_count(count)
    assert counters.count_of(other.pid) == count
    wait_until_none("deliveries wait", broker.waiting)

    frozen.thaw()
    # It restarts the handlers it had begun, and finds the receipts.
    frozen.wait_for_log("HandlerFailed")
    frozen.wait_for_log("DuplicateSkipped")

    def takes_part() -> bool:
        writer.add(50)
        return counters.count_of(frozen.pid) > 0

    wait_for("it takes part again", takes_part, pause=0.5)
    counters.wait_for_count(writer.added)
    wait_until_none("deliveries wait", broker.waiting)
    counters.expect_each_once(writer.numbers(), ordered=broker.ordered)
