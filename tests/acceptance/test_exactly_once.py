"""Each message is handled once, although relays and consumers are killed."""

import random

import psycopg
import pytest

from tests.acceptance.counters import Counters
from tests.acceptance.fixtures import Figures
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.waiting import let_pass, wait_for, wait_until_none

pytestmark = pytest.mark.fault

BATCH_SIZE = 20
CONCURRENCY = 2
OPTIONS = (f"--batch-size={BATCH_SIZE}", f"--concurrency={CONCURRENCY}", "--lease=2s")

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


@pytest.mark.timeout(1800)
def test_every_message_is_handled_once_when_relays_and_consumers_are_killed(
    relays: Relays,
    counters: Counters,
    writer: Writer,
    inspection: Inspection,
    full: bool,
    figures: Figures,
) -> None:
    kills, messages = (30, 20_000) if full else (4, 400)
    publishing = [relays.start(inspection.url, *OPTIONS) for _ in range(2)]
    handling = [counters.start() for _ in range(2)]
    for kill in range(kills):
        writer.add(messages // kills)
        let_pass(random.uniform(0, 0.5))
        random.shuffle(publishing)
        publishing.pop().kill()
        publishing.append(relays.start(inspection.url, *OPTIONS))
        if kill % 2:
            random.shuffle(handling)
            handling.pop().kill()
            handling.append(counters.start())
    inspection.wait_until_settled()
    wait_until_none("deliveries wait", counters.waiting)

    assert counters.numbers() == writer.numbers()
    assert counters.receipts() == writer.added
    assert counters.duplicates() <= kills * CONCURRENCY * BATCH_SIZE
    figures("deliveries that were duplicates", counters.duplicates())


def test_concurrent_duplicates_are_handled_once(
    relays: Relays, counters: Counters, writer: Writer, inspection: Inspection
) -> None:
    relays.start(inspection.url)
    writer.add(200)
    inspection.wait_until_settled()
    inspection.run(HOLD_BACK)
    both = [counters.start() for _ in range(2)]
    wait_for("lanes are shared", lambda: counters.shares() == [8, 8])
    with psycopg.connect(inspection.url) as gate:
        # Handlers wait at their INSERT until the block ends.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        inspection.run(LET_GO_TWICE)
        wait_for("both are at work", counters.are_at_work)
    wait_until_none("deliveries wait", counters.waiting)
    assert all(counters.count_of(counter.pid) for counter in both)
    skipped = sum(counter.log().count("DuplicateSkipped") for counter in both)
    assert skipped == writer.added
    assert counters.numbers() == writer.numbers()


def test_a_handler_that_raises_leaves_no_receipt_and_no_effects(
    relays: Relays, counters: Counters, writer: Writer, inspection: Inspection
) -> None:
    relays.start(inspection.url)
    counter = counters.start()
    inspection.run("INSERT INTO doubt VALUES ('everything')")
    writer.add(1, topic="numbers.doubted")
    counter.wait_for_log("HandlerFailed", times=2)
    assert counters.count() == 0
    assert counters.receipts() == 0

    inspection.run("DELETE FROM doubt")
    wait_until_none("deliveries wait", counters.waiting)
    assert counters.numbers() == writer.numbers()
    assert counters.receipts() == 1
