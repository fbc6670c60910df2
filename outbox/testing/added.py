"""Find out which messages the code under test has added to a session."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from outbox.message import Message
from outbox.session import AnySession
from outbox.writer import Added, on_write, sync_session

__all__ = ["added"]

_SEEN: Final = "outbox.testing.messages_written"


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
    written: list[_Written] = target.info.get(_SEEN, [])
    messages = [one.message for one in written]
    for pending in target.new:
        if isinstance(pending, Added):
            messages += pending.messages
            # A test that has checked them can close the session without sending them.
            pending.is_settled = True
    return [m for m in messages if topic is None or m.topic == topic]


@dataclass(slots=True)
class _Written:
    """A message that was flushed, and the transactions that can roll it back."""

    message: Message
    transactions: frozenset[SessionTransaction]


def _note_written(session: Session, messages: Iterable[Message]) -> None:
    around = set()
    transaction = session.get_nested_transaction() or session.get_transaction()
    while transaction is not None:
        around.add(transaction)
        transaction = transaction.parent
    written = session.info.setdefault(_SEEN, [])
    written += [_Written(message, frozenset(around)) for message in messages]


@event.listens_for(Session, "after_soft_rollback")
def _forget_rolled_back(session: Session, previous: SessionTransaction) -> None:
    written: list[_Written] = session.info.get(_SEEN, [])
    written[:] = [one for one in written if previous not in one.transactions]


@event.listens_for(Session, "after_commit")
def _keep_committed(session: Session) -> None:
    if not session.in_nested_transaction():
        for one in session.info.get(_SEEN, []):
            one.transactions = frozenset()


@event.listens_for(Session, "after_transaction_end")
def _forget_unfinished(session: Session, transaction: SessionTransaction) -> None:
    # The session was closed without a commit: a rollback that sends no event.
    if transaction.parent is None:
        written: list[_Written] = session.info.get(_SEEN, [])
        written[:] = [one for one in written if not one.transactions]


on_write.append(_note_written)
