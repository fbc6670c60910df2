"""Publish once more what the first handling of a message added."""

from functools import cache
from uuid import UUID

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

from outbox.postgres.sql_files import load


def replay_caused_by(session: Session, message_id: UUID) -> int:
    """Make the relay publish again what names a message as its cause; give how many.

    With the ids that they have: who did get them skips them. It happens if and when
    the session's transaction commits.
    """
    found = session.execute(_statement(), {"id": message_id})
    return int(found.scalar_one())


@cache
def _statement() -> TextClause:
    return text(load("inbox", "replay_caused_by"))
