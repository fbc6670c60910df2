"""Statements on suspects touch the partitions of their days and no others."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from pillarbox.inbox.dead_letters.write import StoredFailure
from pillarbox.inbox.poison.store import (
    count_starts,
    delete_starts,
    keep_starts,
    uncount_starts,
)
from pillarbox.inbox.receipt import has_receipt
from pillarbox.outbox.message_id import uuid7
from tests.fixtures.consumers import id_of, sessions_of

Ask: TypeAlias = Callable[[Session, Sequence[UUID], str], Any]

# A statement locks all that it reads or writes until its transaction ends.
TOUCHED = text(
    "SELECT count(DISTINCT c.oid) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
    " WHERE l.pid = pg_backend_pid() AND c.relispartition AND c.relkind = 'r'"
)


def look_for_receipt(session: Session, ids: Sequence[UUID], consumer: str) -> None:
    has_receipt(ids[0], consumer, session)


def count_unless_open(session: Session, ids: Sequence[UUID], consumer: str) -> None:
    count_starts(session, ids, consumer, unless_open=True)


def count_and_find(session: Session, ids: Sequence[UUID], consumer: str) -> None:
    count_starts(session, ids, consumer, unless_open=True)
    count_starts(session, ids, consumer, unless_open=True)


def count_again(session: Session, ids: Sequence[UUID], consumer: str) -> None:
    count_starts(session, ids, consumer, unless_open=False)


def keep_two(session: Session, ids: Sequence[UUID], consumer: str) -> None:
    failed = 2, StoredFailure("ValueError: no", None)
    keep_starts(session, dict.fromkeys(ids, failed), consumer)


@pytest.fixture
def session(database_url: str) -> Iterator[Session]:
    with sessions_of(database_url) as sessions, sessions() as opened:
        yield opened


@pytest.mark.parametrize(
    "ask",
    [
        look_for_receipt,
        count_unless_open,
        count_and_find,
        count_again,
        keep_two,
        uncount_starts,
        delete_starts,
    ],
    ids=lambda ask: ask.__name__,
)
def test_only_the_days_of_the_messages_are_touched(session: Session, ask: Ask) -> None:
    ask(session, [uuid7()], "billing")
    assert session.scalar(TOUCHED) == 1

    yesterday = id_of(datetime.now(UTC) - timedelta(days=1))
    ask(session, [uuid7(), yesterday, uuid7()], "billing")
    assert session.scalar(TOUCHED) == (1 if ask is look_for_receipt else 2)
