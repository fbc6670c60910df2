"""Suspects in the database: messages that may have killed the process handling them.

Each start is committed here before the handler is called, and the row is deleted with
the outcome. Every function works in the transaction of the session it is given.
"""

from functools import cache
from typing import Any

from sqlalchemy import Row, TextClause, text
from sqlalchemy.orm import Session

from inbox.jobs.store import JobKey
from outbox.postgres.sql_files import load


def find_starts(session: Session, key: JobKey) -> int:
    """Return how often a suspect was started, as far as is known."""
    found = _run(session, "find_starts", key).first()
    return 0 if found is None else int(found.starts)


def count_start(session: Session, key: JobKey, *, unless_open: bool) -> int | None:
    """Count a start and return its number.

    With `unless_open`, return None and count nothing if an earlier start of the
    message never came to an end.
    """
    found: Row[Any] | None
    found = _run(session, "count_start", key, unless_open=unless_open).first()
    return None if found is None else int(found.starts)


def take_back_start(session: Session, key: JobKey) -> None:
    """Take back a start that turned out to be no attempt."""
    _run(session, "take_back_start", key)


def keep_starts(session: Session, key: JobKey, starts: int) -> None:
    """Keep the number of failed attempts of a message that is given back."""
    _run(session, "keep_starts", key, starts=starts)


def forget_starts(session: Session, key: JobKey) -> None:
    """Forget a message that has its outcome."""
    _run(session, "forget_starts", key)


def _run(session: Session, name: str, key: JobKey, **values: object) -> Any:
    return session.execute(_statement(name), {**key.values, **values})


@cache
def _statement(name: str) -> TextClause:
    return text(load("inbox", name))
