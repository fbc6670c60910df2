"""Receipts distinguish new messages from duplicates, with all sessions and drivers."""

import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TypeAlias
from uuid import UUID, uuid4

import pytest
from sqlalchemy import CursorResult, text
from sqlalchemy.exc import InternalError
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import record_receipt, uuid7
from pillarbox.inbox.errors import (
    InvalidReceiptError,
    MessageTooNewError,
    MessageTooOldError,
)
from pillarbox.inbox.receipt import ForeignId
from pillarbox.outbox.errors import ConfigError, NotASessionError
from tests.fixtures.consumers import async_sessions_of, id_of, sessions_of
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

Record: TypeAlias = Callable[..., Awaitable[bool]]


def odd(size: int) -> str:
    """Return incompressible text."""
    return "".join(sha256(b"%d" % n).hexdigest() for n in range(32))[:size]


@pytest.fixture(params=["psycopg", "psycopg async", "asyncpg"])
def record(request: pytest.FixtureRequest, database_url: str) -> Record:
    """Return a function that records a receipt in its own transaction."""

    async def in_session(message_id: UUID | ForeignId, consumer: str = "c") -> bool:
        if request.param == "psycopg":
            with sessions_of(database_url) as sessions, sessions.begin() as session:
                return record_receipt(session, message_id, consumer)
        driver = request.param.partition(" ")[0]
        async with (
            async_sessions_of(database_url, driver) as sessions_,
            sessions_.begin() as session_,
        ):
            return await session_.run_sync(record_receipt, message_id, consumer)

    return in_session


async def test_a_receipt_is_new_once_for_each_consumer_and_source(
    record: Record,
) -> None:
    message_id, evt_1 = uuid7(), ForeignId("stripe", "evt_1")
    assert await record(message_id)
    assert not await record(message_id)
    assert await record(message_id, "shipping")
    assert await record(evt_1)
    assert await record(ForeignId("kafka", "evt_1"))
    assert not await record(evt_1)


def test_a_missing_row_count_is_an_error_and_not_a_duplicate(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLAlchemy before 2.0.28 does not keep the row count.
    monkeypatch.setattr(CursorResult, "rowcount", -1)

    with (
        sessions_of(database_url) as sessions,
        sessions() as session,
        pytest.raises(ConfigError, match=r"rowcount=-1 .* use 2\.0\.31 or newer"),
    ):
        record_receipt(session, uuid7(), "c")


async def test_a_receipt_needs_the_partition_of_its_message(
    record: Record, database_url: str
) -> None:
    moment = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=123000)
    assert await record(id_of(moment))
    assert execute(database_url, "SELECT message_at FROM inbox.receipt") == [(moment,)]
    with pytest.raises(MessageTooOldError, match="is 400d old"):
        await record(id_of(datetime.now(UTC) - timedelta(days=400)))
    with pytest.raises(MessageTooNewError, match="check the producer's clock"):
        await record(id_of(datetime.now(UTC) + timedelta(days=400)))


async def test_a_violated_constraint_is_distinguished_from_a_missing_partition(
    record: Record, database_url: str
) -> None:
    execute(
        database_url,
        "ALTER TABLE inbox.receipt ADD CONSTRAINT no_billing CHECK (consumer <> 'b')",
    )
    with pytest.raises(InvalidReceiptError, match="constraint 'no_billing'") as raised:
        await record(uuid7(), "b")
    assert type(raised.value) is InvalidReceiptError


NO_UUID7 = r"ForeignId\(source, id\)"


@pytest.mark.parametrize(
    ("message_id", "consumer", "problem"),
    [
        (uuid4(), "c", NO_UUID7),
        ("evt_1", "c", NO_UUID7),
        (None, "c", NO_UUID7),
        (UUID("ffffffff-ffff-7fff-bfff-ffffffffffff"), "c", "after the year 9999"),
        (uuid7(), "", "receipt consumer"),
        (uuid7(), "a\0b", "receipt consumer"),
        (uuid7(), None, "receipt consumer"),
        (uuid7(), odd(513), "consumer .* has 513 bytes"),
    ],
    ids=["v4", "str", "None", "9999", "no name", "NUL", "no str", "too long"],
)
def test_an_invalid_receipt_is_refused_with_the_remedy(
    database_url: str, message_id: UUID, consumer: str, problem: str
) -> None:
    with (
        sessions_of(database_url) as sessions,
        sessions() as session,
        pytest.raises(InvalidReceiptError, match=problem),
    ):
        record_receipt(session, message_id, consumer)


def test_anything_but_a_session_is_refused() -> None:
    with pytest.raises(NotASessionError, match="run_sync"):
        record_receipt("session", uuid7(), "c")  # type: ignore[arg-type]


def test_a_message_that_is_too_old_aborts_the_transaction(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions, sessions() as session:
        with pytest.raises(MessageTooOldError):
            record_receipt(session, id_of(datetime(2020, 1, 1, tzinfo=UTC)), "c")
        with pytest.raises(InternalError, match="transaction is aborted"):
            session.execute(text("SELECT 1"))


def test_the_longest_key_of_a_receipt_fits_into_the_index(database_url: str) -> None:
    longest = ForeignId(odd(512), odd(1024))
    with sessions_of(database_url) as sessions, sessions.begin() as session:
        assert record_receipt(session, longest, odd(512))
    for fields in ((odd(513), "id"), ("source", odd(1025))):
        with pytest.raises(InvalidReceiptError, match="bytes, the limit is"):
            ForeignId(*fields)


class Rival:
    """Records the same receipt in another transaction at the same time."""

    def __init__(self, sessions: sessionmaker[Session], message_id: UUID) -> None:
        self.answer: bool | None = None
        self._sessions = sessions
        self._message_id = message_id
        self._thread = threading.Thread(target=self._record)
        self._thread.start()

    def _record(self) -> None:
        with self._sessions.begin() as session:
            self.answer = record_receipt(session, self._message_id, "c")

    def join(self) -> bool | None:
        self._thread.join(30)
        return self.answer


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_of_two_concurrent_receipts_the_second_waits(
    database_url: str, commits: bool
) -> None:
    message_id = uuid7()
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with sessions_of(database_url) as sessions, sessions() as session:
        assert record_receipt(session, message_id, "c")
        rival = Rival(sessions, message_id)
        wait_for("the rival waits", lambda: execute(database_url, waiting))
        assert rival.answer is None
        if commits:
            session.commit()
        else:
            session.rollback()
        assert rival.join() is not commits
