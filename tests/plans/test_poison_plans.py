"""What is asked about one message touches the one partition of its day."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from inbox.jobs.store import JobKey
from inbox.poison.store import (
    count_start,
    find_starts,
    forget_starts,
    keep_starts,
    take_back_start,
)
from inbox.receipt import has_receipt
from outbox.message_id import uuid7
from tests.fixtures.consumers import sessions_of

Ask: TypeAlias = Callable[[Session, JobKey], Any]

# What a statement reads or writes it has locked, until its transaction ends.
TOUCHED = text(
    "SELECT count(DISTINCT c.oid) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
    " WHERE l.pid = pg_backend_pid() AND c.relispartition AND c.relkind = 'r'"
)


def look_for_receipt(session: Session, key: JobKey) -> None:
    has_receipt(key.id, key.consumer, session)


def count_unless_open(session: Session, key: JobKey) -> None:
    count_start(session, key, unless_open=True)


def count_again(session: Session, key: JobKey) -> None:
    count_start(session, key, unless_open=False)


def keep_two(session: Session, key: JobKey) -> None:
    keep_starts(session, key, 2)


@pytest.fixture
def session(database_url: str) -> Iterator[Session]:
    with sessions_of(database_url) as sessions, sessions() as opened:
        yield opened


@pytest.mark.parametrize(
    "ask",
    [
        look_for_receipt,
        find_starts,
        count_unless_open,
        count_again,
        keep_two,
        take_back_start,
        forget_starts,
    ],
    ids=lambda ask: ask.__name__,
)
def test_one_partition_is_touched(session: Session, ask: Ask) -> None:
    ask(session, JobKey(uuid7(), "billing"))
    assert session.scalar(TOUCHED) == 1
