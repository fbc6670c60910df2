"""Scheduled messages are cancelled while relays are killed or frozen."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from pillarbox import Cancelled, Message, TooLate, cancel
from pillarbox.outbox.postgres.connection import conninfo
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.fixtures.relay import insert
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

COUNT = 60


def scheduled(url: str, *, seconds: float) -> list[Message]:
    due_at = datetime.now(UTC) + timedelta(seconds=seconds)
    messages = [
        Message("t", b"%d" % n, key=f"k{n}", available_at=due_at) for n in range(COUNT)
    ]
    insert(url, *messages)
    return messages


def cancelled(url: str, messages: Sequence[Message]) -> set[UUID]:
    """Cancel each in its own transaction; return those that were in time."""
    done = set()
    with psycopg.connect(conninfo(url)) as connection:
        for message in messages:
            if cancel(connection, message.id) == Cancelled():
                done.add(message.id)
            connection.commit()
    return done


@pytest.mark.parametrize("fault", [as_variant("kill"), "freeze"])
def test_what_was_cancelled_while_a_relay_was_gone_is_never_published(
    fault: str, relays: Relays, sink: Sink, inspection: Inspection
) -> None:
    relay = relays.start(sink.url, "--lease=2s")
    messages = scheduled(inspection.url, seconds=8)
    logged = "outbox.deferral WHERE cause = 'scheduled'"
    wait_for("all are logged", lambda: inspection.count(logged) == COUNT)
    if fault == "kill":
        relay.kill()
    else:
        relay.freeze()
    done = cancelled(inspection.url, messages[: COUNT // 2])
    assert len(done) == COUNT // 2
    is_due = "outbox.message WHERE now() > available_at"
    wait_for("they are due", lambda: inspection.count(is_due) == COUNT)
    if fault == "kill":
        relays.start(sink.url, "--lease=2s")
    else:
        relay.thaw()
    inspection.wait_until_settled()
    kept = {str(it.id) for it in messages[COUNT // 2 :]}
    assert {it.id for it in sink.arrivals()} == kept


def test_of_cancellations_and_claims_at_the_same_moment_one_comes_first(
    relays: Relays, slow_sink: Sink, inspection: Inspection
) -> None:
    """The relays are killed in turn while messages become due and are cancelled."""
    done: set[str] = set()
    everything: set[str] = set()
    late = 0
    relay = relays.start(slow_sink.url, "--lease=2s", "--batch-size=5")
    for _ in range(4):
        messages = scheduled(inspection.url, seconds=0.4)
        everything |= {str(it.id) for it in messages}
        with psycopg.connect(conninfo(inspection.url)) as connection:
            for message in messages:
                match cancel(connection, message.id):
                    case Cancelled():
                        done.add(str(message.id))
                    case TooLate():
                        late += 1
                connection.commit()
                # So that they span the moment at which they are due.
                connection.execute("SELECT pg_sleep(0.01)")
        relay.kill()
        relay = relays.start(slow_sink.url, "--lease=2s", "--batch-size=5")
    inspection.wait_until_settled()
    published = {it.id for it in slow_sink.arrivals()}
    assert not published & done
    assert published | done == everything
    assert done
    assert late
