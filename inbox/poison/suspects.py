"""Suspects: messages that may have killed whoever handled them, in the database.

Most brokers don't know what was started, only what they handed out. So the starts of
what comes again are counted here, each committed before the handler is called. Every
function works in the transaction of the session that it is given.
"""

from functools import cache
from typing import Any

from sqlalchemy import Row, TextClause, text
from sqlalchemy.orm import Session

from inbox.jobs.store import JobKey
from outbox.postgres.sql_files import load


def find_starts(session: Session, key: JobKey) -> int:
    """Tell how often a suspect was started, as far as is known."""
    found = _run(session, "find_starts", key).first()
    return 0 if found is None else int(found.starts)


def count_start(session: Session, key: JobKey, *, only_first: bool) -> int | None:
    """Count a start, and give which one it is.

    With `only_first` a suspect that was counted before gives None, uncounted.
    """
    found: Row[Any] | None
    found = _run(session, "count_start", key, only_first=only_first).first()
    return None if found is None else int(found.starts)


def take_back_start(session: Session, key: JobKey) -> None:
    """Take back a start that was no attempt."""
    _run(session, "take_back_start", key)


def keep_starts(session: Session, key: JobKey, starts: int) -> None:
    """Note that a message was started so often, whoever gets it next."""
    _run(session, "keep_starts", key, starts=starts)


def forget_starts(session: Session, key: JobKey) -> None:
    """Forget a message that has its outcome."""
    _run(session, "forget_starts", key)


def _run(session: Session, name: str, key: JobKey, **values: object) -> Any:
    return session.execute(_statement(name), {**key.values, **values})


@cache
def _statement(name: str) -> TextClause:
    return text(load("inbox", name))
