"""Causation: a message that a handler adds carries the id of the message it handled.

The inbox notes the cause when it records a receipt, and `add` writes it into a header
of every message of the same transaction.
"""

from typing import Any, Final
from uuid import UUID

from sqlalchemy.orm import Session, SessionTransaction

from outbox.message import Message

HEADER: Final = "causation-id"
_CAUSE: Final = "outbox.cause"


def note_cause(session: Session, id: UUID) -> None:
    """Note which message a session's transaction handles, until it ends."""
    session.info[_CAUSE] = (_root(session), id)


def cause_of(session: Session) -> UUID | None:
    """Return the id of the message that a session's transaction handles, if noted."""
    noted: tuple[Any, UUID] | None = session.info.get(_CAUSE)
    if noted is None:
        return None
    if noted[0] is _root(session):
        return noted[1]
    del session.info[_CAUSE]
    return None


def caused(message: Message, cause: UUID) -> Message:
    """Return the message with its cause in a header, unless it has one already."""
    if HEADER in message.headers:
        return message
    return message.replace(headers={**message.headers, HEADER: str(cause)})


def _root(session: Session) -> SessionTransaction | None:
    return session.get_transaction()
