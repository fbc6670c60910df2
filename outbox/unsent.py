"""Messages that were never sent: their session ended without a commit or a rollback.

A rollback, or an exception that ends the session, discards messages on purpose. A
forgotten commit doesn't, nor does a commit after `expunge_all`, so it is reported: as
the event `MessagesUnsent`, which is logged, and as an `UnsentMessagesWarning`, a
`RuntimeWarning` like that for a coroutine that was never awaited.

An `AsyncSession` is closed in a task of its own, where an exception that ends its block
isn't visible. So its close is only logged, and the text says that there may be an
exception. A block of `begin()` rolls back, which is visible.
"""

import logging
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.orm import InstanceState, Session, SessionTransaction
from typing_extensions import override

from pillarbox.outbox.errors import shorten
from pillarbox.outbox.events import Event
from pillarbox.outbox.logs.event_record import log_event
from pillarbox.outbox.message import Message
from pillarbox.outbox.session import async_session_of

_MOST_NAMED: Final = 5
_UNCOMMITTED: Final = "outbox.messages_uncommitted"
_COMMIT_TRIED: Final = "outbox.commit_tried"
_CLOSED: Final = "session was closed without a commit, or expunged before a flush"
_CLOSED_ASYNC: Final = (
    "AsyncSession was closed without a commit, which was forgotten or prevented by an "
    "exception"
)


class UnsentMessagesWarning(RuntimeWarning):
    """Messages were added to a session that ended without sending them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesUnsent(Event):
    """A session was closed without a commit, or expunged its messages before one."""

    level = logging.WARNING
    advice = (
        "commit the session that add was given (with sessions.begin() as session: …), "
        "or roll it back on purpose"
    )

    messages: int
    topics: tuple[str, ...]
    cause: str = _CLOSED

    @override
    def __str__(self) -> str:
        """Return the text of the warning, with the remedy."""
        topics = [shorten(topic) for topic in self.topics[:_MOST_NAMED]]
        if len(self.topics) > _MOST_NAMED:
            topics.append("…")
        many = "" if self.messages == 1 else "s"
        return (
            f"lost {self.messages} message{many} of topic {', '.join(topics)}: their "
            f"{self.cause}; {self.advice}"
        )


class Batch:
    """The messages of one INSERT.

    Attributes:
        state: that of the object which the unit of work inserts; None if a flush under
            way writes the messages after its own.
        expected: how many of them a test has read, whose loss isn't reported.
    """

    __slots__ = ("_transaction", "expected", "messages", "state")

    def __init__(
        self,
        session: Session,
        messages: list[Message],
        state: InstanceState[Any] | None = None,
    ) -> None:
        self._transaction = (
            session.get_nested_transaction() or session.get_transaction()
        )
        self.messages = messages
        self.state = state
        self.expected = 0

    @property
    def is_pending(self) -> bool:
        """Whether the next flush writes them."""
        return self.state is not None and self.state.pending

    @property
    def is_expunged(self) -> bool:
        """Whether the session has dropped them before a flush."""
        return self.state is not None and self.state.transient

    def is_within(self, transaction: SessionTransaction) -> bool:
        """Return whether a rollback of `transaction` discards them."""
        around = self._transaction
        while around is not None and around is not transaction:
            around = around.parent
        return around is not None


def uncommitted(session: Session) -> list[Batch]:
    """Return the messages of the session's transaction, in the order of adding."""
    found: list[Batch] = session.info.setdefault(_UNCOMMITTED, [])
    return found


@event.listens_for(Session, "before_commit")
def _record_attempt(session: Session) -> None:
    # If this commit fails, its caller gets the error.
    if not session.in_nested_transaction():
        session.info[_COMMIT_TRIED] = True


@event.listens_for(Session, "after_commit")
def _forget_committed(session: Session) -> None:
    if not session.in_nested_transaction():
        batches = session.info.pop(_UNCOMMITTED, ())
        _report_lost([batch for batch in batches if batch.is_expunged])


@event.listens_for(Session, "after_rollback")
def _forget_rolled_back(session: Session) -> None:
    ended = session.get_nested_transaction() or session.get_transaction()
    if ended is not None and _UNCOMMITTED in session.info:
        kept = [batch for batch in uncommitted(session) if not batch.is_within(ended)]
        session.info[_UNCOMMITTED] = kept


@event.listens_for(Session, "after_transaction_end")
def _report_unsent(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is not None:
        return
    lost = session.info.pop(_UNCOMMITTED, ())
    if session.info.pop(_COMMIT_TRIED, False) or sys.exception() is not None:
        return
    _report_lost(lost, _CLOSED if async_session_of(session) is None else _CLOSED_ASYNC)


def _report_lost(batches: Iterable[Batch], cause: str = _CLOSED) -> None:
    lost = [m for batch in batches for m in batch.messages[batch.expected :]]
    if lost:
        topics = tuple(dict.fromkeys(message.topic for message in lost))
        _report(MessagesUnsent(messages=len(lost), topics=topics, cause=cause))


def _report(unsent: MessagesUnsent) -> None:
    log_event(logging.getLogger("pillarbox"), unsent)
    if unsent.cause is _CLOSED_ASYNC:
        return
    try:
        warnings.warn(str(unsent), UnsentMessagesWarning, stacklevel=2)
    except UnsentMessagesWarning as error:
        # Warnings are errors here, but the session must be closed nevertheless.
        sys.unraisablehook(
            SimpleNamespace(
                exc_type=type(error),
                exc_value=error,
                exc_traceback=error.__traceback__,
                err_msg=None,
                object=None,
            )
        )
