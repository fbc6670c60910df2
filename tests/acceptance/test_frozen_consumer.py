"""A consumer that is frozen until another one gets its messages."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import psycopg
import pytest

from pillarbox import Message
from tests.acceptance.brokers import Broker
from tests.acceptance.counter import TOPIC
from tests.acceptance.counters import IMPATIENT, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.relay import insert
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for, wait_until_none

pytestmark = [pytest.mark.fault, pytest.mark.timeout(1800)]

# RabbitMQ's lease is the connection, which ends after two missed heartbeats.
OPTIONS: Final = {"rabbitmq": "&heartbeat=2"}
SETTLING: Final = (
    "SELECT count(*) FROM pg_locks"
    " WHERE relation = 'outbox.position'::regclass AND NOT granted"
)


@pytest.mark.parametrize(
    "kind", ["postgres", *map(as_variant, ("rabbitmq", "redis", "nats"))]
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
    if not broker.relayed:
        wait_for("they share the lanes", lambda: len(counters.shares(broker.url)) == 2)
    with psycopg.connect(inspection.url) as gate:
        # Handlers wait at their INSERT, so the frozen process is certain to have some.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        writer.add(count)
        # Without sharing, the first to start is the one that receives.
        at_work = 2 if broker.shares else 1
        wait_for("they work", partial(counters.are_at_work, at_work))
        frozen.freeze()
    counters.wait_for_count(count)
    assert counters.count_of(other.pid) == count
    wait_until_none("deliveries wait", broker.waiting)

    frozen.thaw()
    # It restarts the handlers it had begun, and finds the receipts.
    frozen.wait_for_log("HandlerFailed")
    frozen.wait_for_log("DuplicateSkipped")
    if not broker.shares:
        other.terminate()

    def takes_part() -> bool:
        writer.add(50)
        return counters.count_of(frozen.pid) > 0

    wait_for("it takes part again", takes_part, pause=0.5)
    counters.wait_for_count(writer.added)
    wait_until_none("deliveries wait", broker.waiting)
    counters.expect_each_once(writer.numbers(), ordered=broker.ordered)


@pytest.mark.parametrize("kind", ["postgres"])
@pytest.mark.parametrize(
    "logs", [as_variant(False), True], ids=["a statement", "a transaction"]
)
def test_of_two_processes_that_settle_the_same_messages_only_one_does(
    kind: str,
    logs: bool,
    broker: Broker,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
) -> None:
    def are_settling(processes: int) -> bool:
        # One that waits for too long tries again, and its first statement still waits.
        ((settling,),) = inspection.rows(SETTLING)
        return bool(settling >= processes)

    url = f"{broker.url}&lease=2s"
    with psycopg.connect(inspection.url) as gate:
        gate.execute("LOCK TABLE outbox.position IN EXCLUSIVE MODE")
        if logs:
            soon = datetime.now(UTC) + timedelta(seconds=1)
            later = Message(TOPIC, b"0", key="later", available_at=soon)
            insert(inspection.url, later)
        writer.add(100)
        # Starts only now, because it claims nothing more while it waits to settle.
        frozen = counters.start(url)
        counters.wait_for_count(writer.added)
        wait_for("it settles", lambda: are_settling(1))
        frozen.freeze()
        other = counters.start(url)
        other.wait_for_log("DuplicateSkipped")
        wait_for("both settle", lambda: are_settling(2))
    # The frozen one's statement comes first, but no one ends its transaction.
    wait_until_none("messages wait", broker.waiting)
    for process in (other, frozen):
        process.thaw()
        writer.add(50)
        counters.wait_for_count(writer.added + logs)
    wait_until_none("messages wait", broker.waiting)
    counters.expect_each_once(writer.numbers() | ({"later": [0]} if logs else {}))
    assert all(counter.is_running() for counter in counters)
