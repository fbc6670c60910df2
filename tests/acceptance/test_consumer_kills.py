"""Relays and consumers are killed at random moments, over each broker."""

import random

import psycopg
import pytest

from pillarbox import Message, uuid7
from pillarbox.inbox.sources.postgres.window_lane import MOST_AGAIN
from pillarbox.outbox.lane import bucket_of
from tests.acceptance.brokers import Broker, outbox, plainly
from tests.acceptance.counter import TOPIC
from tests.acceptance.counters import COUNTER, POOLED, WIDE, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.writer import Writer
from tests.fixtures.relay import insert
from tests.fixtures.waiting import let_pass, wait_for, wait_until_none

pytestmark = pytest.mark.fault

_COLUMNS = "id, schema_version, topic, key, content_type, headers, payload"
HOLD_BACK = f"""
    CREATE TABLE held_back AS SELECT seq, lane, {_COLUMNS} FROM outbox.message;
    DELETE FROM outbox.message;
"""
# The second copy is in a lane of the other process. For half of the keys it comes
# first: otherwise, one process could begin all of the messages before the other.
LET_GO_TWICE = f"""
    INSERT INTO outbox.message (lane, {_COLUMNS})
    SELECT 16 + (lane + shift) % 16, {_COLUMNS}
      FROM held_back, (VALUES (0), (8)) AS twice (shift)
     ORDER BY seq + 20 * ((hashtext(key) & 1) # (shift / 8))
"""
HOLD_SLOW = """
    CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(1);
        RETURN NEW;
    END
    $$;
    CREATE TRIGGER hold BEFORE INSERT ON counted FOR EACH ROW
    WHEN (NEW.key LIKE 'slow%') EXECUTE FUNCTION hold();
"""
ADD_QUICK = f"""
    SELECT outbox.add('{TOPIC}', to_jsonb(n), key => 'quick ' || n)
      FROM generate_series(1, {{count}}) AS n
"""


@pytest.mark.parametrize("kind", ["postgres", *plainly("redis")])
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
    counters: Counters, writer: Writer, inspection: Inspection
) -> None:
    broker = outbox(inspection.url)
    writer.add(200)
    inspection.run(HOLD_BACK)
    both = [counters.start(broker.url) for _ in range(2)]
    wait_for("lanes are shared", lambda: counters.shares(inspection.url) == [24, 24])
    with psycopg.connect(inspection.url) as gate:
        # Handlers wait at their INSERT until the block ends.
        gate.execute("LOCK TABLE counted IN EXCLUSIVE MODE")
        inspection.run(LET_GO_TWICE)
        wait_for("both are at work", counters.are_at_work)
    wait_until_none("messages wait", broker.waiting)
    assert all(counters.count_of(counter.pid) for counter in both)
    assert sum(counters.logged("DuplicateSkipped")) == writer.added
    assert counters.numbers() == writer.numbers()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["postgres"])
@pytest.mark.timeout(900)
def test_a_kill_brings_a_bounded_number_of_handled_messages_again(
    kind: str,
    broker: Broker,
    counters: Counters,
    inspection: Inspection,
    full: bool,
) -> None:
    """In each lane, the first message is handled for long."""
    count = 20_000 if full else 2_000
    inspection.run(HOLD_SLOW)
    keys = {bucket_of(key, uuid7()): key for key in map("slow {}".format, range(500))}
    slow = [Message(TOPIC, b"0", key=key) for key in keys.values()]
    killed = counters.start(broker.url, WIDE)
    with psycopg.connect(inspection.url) as gate:
        gate.execute("SELECT pg_advisory_lock(1)")
        insert(inspection.url, *slow)
        inspection.run(ADD_QUICK.format(count=count))
        counters.wait_for_count(count)
        killed.kill()
    other = counters.start(broker.url, WIDE)
    wait_until_none("messages wait", broker.waiting)
    assert counters.count() == count + len(slow)
    assert other.log().count("DuplicateSkipped") <= len(slow) * MOST_AGAIN
    assert count > len(slow) * MOST_AGAIN == 16 * MOST_AGAIN
