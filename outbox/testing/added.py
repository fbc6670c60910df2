"""Find out which messages the code under test has added to a session."""

from typing import Final

from sqlalchemy import event
from sqlalchemy.orm import Session

from outbox.message import Message
from outbox.session import AnySession
from outbox.unsent import uncommitted
from outbox.writer import sync_session

__all__ = ["added"]

_COMMITTED: Final = "outbox.testing.messages_committed"


def added(session: AnySession, topic: str | None = None) -> list[Message]:
    """Return the messages that were added to `session`, in order.

    They include messages that are waiting for the next flush, that were flushed, and
    that this session committed, but not those that were rolled back, with or without a
    savepoint. There is no I/O, so there is nothing to await, and the role needs no
    privilege to read the outbox.

        def test_an_order_is_announced(session: Session) -> None:
            place_order(session, total=9)
            [message] = added(session, "orders.placed")
            assert message.json() == {"total": 9}

    Messages are recorded once this module has been imported; the pytest plugin imports
    it before the first test. Messages of `insert_statement` are not included.

    Args:
        topic: return only the messages of this topic.
    """
    target = sync_session(session)
    messages: list[Message] = [*target.info.get(_COMMITTED, ())]
    for batch in uncommitted(target):
        messages += batch.messages
        # A test that has checked them can close the session without sending them.
        batch.expected = len(batch.messages)
    return [m for m in messages if topic is None or m.topic == topic]


# Before the writer's own listener, which forgets them.
@event.listens_for(Session, "after_commit", insert=True)
def _keep_committed(session: Session) -> None:
    if not session.in_nested_transaction():
        committed = session.info.setdefault(_COMMITTED, [])
        for batch in uncommitted(session):
            if not batch.is_expunged:
                committed += batch.messages
