"""Relays and consumers are killed at random moments, over each broker."""

import random

import psycopg
import pytest

from tests.acceptance.brokers import Broker, plainly
from tests.acceptance.counters import COUNTER, POOLED, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.urls import copy_of
from tests.fixtures.waiting import let_pass, wait_for, wait_until_none

pytestmark = pytest.mark.fault

_COLUMNS = "message_id, schema_version, topic, key, content_type, headers, payload"
HOLD_BACK = f"""
    CREATE TABLE held_back AS SELECT seq, lane, {_COLUMNS} FROM inbox.message;
    DELETE FROM inbox.message;
"""
# The second copy is in a lane of the other process. For half of the keys it comes
# first: otherwise, one process could begin all of the messages before the other.
LET_GO_TWICE = f"""
    INSERT INTO inbox.message (lane, {_COLUMNS})
    SELECT (lane + shift) % 16, {_COLUMNS}
      FROM held_back, (VALUES (0), (8)) AS twice (shift)
     ORDER BY seq + 20 * ((hashtext(key) & 1) # (shift / 8))
"""


@pytest.mark.parametrize("kind", ["postgres", *plainly("inbox", "redis", "nats")])
@pytest.mark.timeout(3600)
def test_every_message_takes_effect_once_when_relays_and_consumers_are_killed(
    kind: str,
    broker: Broker,
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    full: bool,
) -> None:
    kills, count = (30, 667) if full else (2, 100)
    consumer = POOLED if kind == "nats" else COUNTER
    handling = [counters.start(broker.url, consumer) for _ in range(2)]
    publishing = []
    if broker.relayed:
        publishing += [relays.start(broker.url, "--lease=2s") for _ in range(2)]
    for _ in range(kills):
        before = counters.count()
        writer.add(count)
        counters.wait_for_count(before + 1)
        for running in (publishing, handling):
            let_pass(random.uniform(0, 0.3))
            random.shuffle(running)
            if running:
                running.pop().kill()
        if broker.relayed:
            publishing.append(relays.start(broker.url, "--lease=2s"))
        handling.append(counters.start(broker.url, consumer))
    counters.wait_for_count(writer.added)
    inspection.wait_until_settled()
    wait_until_none("deliveries wait", broker.waiting)
    counters.expect_each_once(writer.numbers(), ordered=broker.ordered)


def test_concurrent_duplicates_are_handled_once(
    relays: Relays, counters: Counters, writer: Writer, inspection: Inspection
) -> None:
    relays.start(copy_of(inspection.url))
    writer.add(200)
    inspection.wait_until_settled()
    inspection.run(HOLD_BACK)
    both = [counters.start(copy_of(inspection.url)) for _ in range(2)]
    wait_for("lanes are shared", lambda: counters.shares(inspection.url) == [8, 8])
    with psycopg.connect(inspection.url) as gate:
        # Handlers wait at their INSERT until the block ends.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        inspection.run(LET_GO_TWICE)
        wait_for("both are at work", counters.are_at_work)
    wait_until_none("deliveries wait", counters.waiting)
    assert all(counters.count_of(counter.pid) for counter in both)
    assert sum(counters.logged("DuplicateSkipped")) == writer.added
    assert counters.numbers() == writer.numbers()
