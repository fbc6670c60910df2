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

from inbox.errors import InvalidReceiptError, MessageTooNewError, MessageTooOldError
from inbox.receipt import ForeignId
from outbox.errors import ConfigError, NotASessionError
from pillarbox import record_receipt, uuid7
from tests.fixtures.consumers import async_sessions_of, id_of, sessions_of
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

Record: TypeAlias = Callable[..., Awaitable[bool]]


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


async def test_the_first_receipt_is_new_and_the_second_is_not(record: Record) -> None:
    message_id = uuid7()
    assert await record(message_id)
    assert not await record(message_id)


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


async def test_each_consumer_has_its_own_receipts(record: Record) -> None:
    message_id = uuid7()
    assert await record(message_id, "billing")
    assert await record(message_id, "shipping")


async def test_a_receipt_is_in_the_partition_of_its_message(
    record: Record, database_url: str
) -> None:
    moment = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=123000)
    assert await record(id_of(moment))
    assert execute(database_url, "SELECT message_at FROM inbox.receipt") == [(moment,)]


async def test_a_message_beyond_retention_is_too_old(record: Record) -> None:
    with pytest.raises(MessageTooOldError, match="was made 400d ago"):
        await record(id_of(datetime.now(UTC) - timedelta(days=400)))


async def test_a_message_ahead_of_the_partitions_is_too_new(record: Record) -> None:
    with pytest.raises(MessageTooNewError, match="check the clock of its producer"):
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


async def test_foreign_ids_are_unique_within_their_source(record: Record) -> None:
    assert await record(ForeignId("stripe", "evt_1"))
    assert await record(ForeignId("kafka", "evt_1"))
    assert not await record(ForeignId("stripe", "evt_1"))


@pytest.mark.parametrize("message_id", [uuid4(), "evt_1", None])
async def test_the_error_for_an_id_that_is_not_a_uuid7_has_a_remedy(
    record: Record, message_id: UUID
) -> None:
    with pytest.raises(InvalidReceiptError, match=r"ForeignId\(source, id\)"):
        await record(message_id)


@pytest.mark.parametrize("consumer", ["", "a\0b", None])
async def test_a_consumer_without_a_name_is_refused(
    record: Record, consumer: str
) -> None:
    with pytest.raises(InvalidReceiptError, match="receipt consumer"):
        await record(uuid7(), consumer)


def test_anything_but_a_session_is_refused() -> None:
    with pytest.raises(NotASessionError, match="run_sync"):
        record_receipt("session", uuid7(), "c")  # type: ignore[arg-type]


def test_a_receipt_is_rolled_back_with_its_transaction(database_url: str) -> None:
    message_id = uuid7()
    with sessions_of(database_url) as sessions:
        with sessions() as session:
            assert record_receipt(session, message_id, "c")
            session.rollback()
        with sessions.begin() as session:
            assert record_receipt(session, message_id, "c")


def test_a_message_that_is_too_old_aborts_the_transaction(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions, sessions() as session:
        with pytest.raises(MessageTooOldError):
            record_receipt(session, id_of(datetime(2020, 1, 1, tzinfo=UTC)), "c")
        with pytest.raises(InternalError, match="transaction is aborted"):
            session.execute(text("SELECT 1"))


async def test_the_longest_key_of_a_receipt_fits_into_the_index(
    record: Record,
) -> None:
    def odd(size: int) -> str:
        noise = "".join(sha256(b"%d" % n).hexdigest() for n in range(32))
        return noise[:size]

    assert await record(ForeignId(odd(512), odd(1024)), odd(512))
    for fields in ((odd(513), "id"), ("source", odd(1025))):
        with pytest.raises(InvalidReceiptError, match="bytes, the limit is"):
            ForeignId(*fields)
    with pytest.raises(InvalidReceiptError, match=r"consumer .* has 513 bytes"):
        await record(uuid7(), odd(513))


async def test_an_id_without_a_valid_date_is_refused_by_name(record: Record) -> None:
    with pytest.raises(InvalidReceiptError, match="after the year 9999"):
        await record(UUID("ffffffff-ffff-7fff-bfff-ffffffffffff"))


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


def test_of_many_concurrent_receipts_exactly_one_is_new(database_url: str) -> None:
    with sessions_of(database_url) as sessions:
        for _ in range(20):
            message_id = uuid7()
            rivals = [Rival(sessions, message_id) for _ in range(8)]
            assert sum(bool(rival.join()) for rival in rivals) == 1
