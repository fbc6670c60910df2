"""Writers whose transactions overlap."""

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import pillarbox
from outbox.lane import Priority, lane_of
from outbox.message import Message
from outbox.postgres.connection import sqlalchemy_url
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink

KEY = "late"


def neighbour_key() -> str:
    """Return another key of the same lane as `KEY`."""
    own, neighbours = Message("t", b"", key=KEY), map("neighbour-{}".format, range(999))
    lane = lane_of(KEY, own.id, Priority.DEFAULT)
    return next(k for k in neighbours if lane_of(k, own.id, Priority.DEFAULT) == lane)


def add(session: Session, key: str, number: int) -> None:
    pillarbox.add(session, Message("numbers.counted", b"%d" % number, key=key))
    session.flush()


def test_a_message_that_commits_late_is_not_overtaken_by_later_ones_of_its_key(
    relays: Relays, sink: Sink, inspection: Inspection
) -> None:
    relays.start(sink.url, "--lease=2s")
    inspection.wait_for_sleepers()
    engine = create_engine(sqlalchemy_url(inspection.url))
    with Session(engine) as late, late.begin():
        add(late, KEY, 0)
        # These draw a later seq, but commit earlier.
        for count in range(3):
            with Session(engine) as quick, quick.begin():
                add(quick, neighbour_key(), count)
            sink.wait_for_count(count + 1)
    with Session(engine) as next_of_key, next_of_key.begin():
        add(next_of_key, KEY, 1)
    engine.dispose()
    inspection.wait_until_settled()
    assert sink.numbers()[KEY] == [0, 1]
