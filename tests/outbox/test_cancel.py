"""Scheduled messages are cancelled in the caller's own transaction."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege, SerializationFailure
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox import (
    Cancelled,
    InvalidMessageError,
    Message,
    TooLate,
    UnknownMessage,
    add,
    cancel,
)
from pillarbox.outbox.administration.connection import (
    AdministrationConnection,
    administration,
)
from pillarbox.outbox.administration.doctor import examine, examine_quickly
from pillarbox.outbox.administration.scheduled import list_scheduled
from pillarbox.outbox.errors import AutocommitError
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.postgres.connection import conninfo, sqlalchemy_url
from tests.acceptance.relays import as_role
from tests.fixtures.positions import defer, publish
from tests.fixtures.relay import insert
from tests.fixtures.roles import login, new_role
from tests.fixtures.sessions import execute
from tests.outbox.test_add_on_connection import KINDS, connected, finish

LATER: Final = timedelta(hours=1)
STATE: Final = "SELECT state, last_error FROM outbox.message_status"
UNROUTED: Final = "SELECT id FROM outbox.unrouted_messages()"
UNSETTLED_OF_DAYS: Final = """
SELECT u.id FROM outbox.partitions('outbox.message') AS p,
       outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at) AS u
"""
UNSETTLED: Final = "SELECT count(*) FROM outbox.unsettled_message"


def scheduled(**details: Any) -> Message:
    return Message("t", b"", available_at=datetime.now(UTC) + LATER, **details)


def cancelled(url: str, message: Message, reason: str | None = None) -> str:
    """Return the outcome in SQL."""
    query = "SELECT outcome FROM outbox.cancel(%s, %s)"
    ((outcome,),) = execute(url, query, [message.id, reason])
    return str(outcome)


def states(url: str) -> list[Any]:
    return [state for state, _ in execute(url, STATE)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_is_cancelled_in_the_connections_transaction(
    kind: str, database_url: str
) -> None:
    async def call(message: Message) -> object:
        called: Any = cancel(connection, message.id, reason="changed my mind")
        is_async = kind == "psycopg async" or kind.startswith("sqlalchemy")
        return await called if is_async else called

    message = scheduled()
    insert(database_url, message)
    async with connected(kind, database_url) as connection:
        assert await call(message) == Cancelled()
        await finish(connection.rollback())
        assert states(database_url) == ["scheduled"]
        assert await call(message) == Cancelled()
        assert states(database_url) == ["scheduled"], "the transaction is open"
        await finish(connection.commit())
        assert execute(database_url, STATE) == [("cancelled", None)]
        assert await call(message) == Cancelled()
        assert await call(Message("t", b"")) == UnknownMessage()


@pytest.mark.parametrize("scope", [lambda it: it(), scoped_session])
def test_a_session_cancels_what_it_has_just_added(
    database_url: str, scope: Callable[[sessionmaker[Session]], Any]
) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    session = scope(sessionmaker(engine))
    message, other = scheduled(), scheduled()
    add(session, message, other)
    assert cancel(session, message.id) == Cancelled()
    with session.begin_nested() as savepoint:
        assert cancel(session, other.id) == Cancelled()
        savepoint.rollback()
    session.commit()
    session.close()
    engine.dispose()
    query = "SELECT id, state FROM outbox.message_status"
    assert dict(execute(database_url, query)) == {
        message.id: "cancelled",
        other.id: "scheduled",
    }


@pytest.mark.parametrize("is_scoped", [False, True])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_async_session_cancels(
    database_url: str, driver: str, is_scoped: bool
) -> None:
    url = sqlalchemy_url(database_url).replace("psycopg", driver, 1)
    engine = create_async_engine(url)
    made = async_sessionmaker(engine)
    session: Any = async_scoped_session(made, lambda: 1) if is_scoped else made()
    message = scheduled()
    add(session, message)
    assert await cancel(session, message.id) == Cancelled()
    assert await cancel(session, Message("t", b"").id) == UnknownMessage()
    await session.commit()
    await session.close()
    await engine.dispose()
    assert states(database_url) == ["cancelled"]


async def test_a_mistake_is_refused_before_anything_is_sent(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url), isolation_level="AUTOCOMMIT")
    with Session(engine) as session, pytest.raises(AutocommitError, match="cancell"):
        cancel(session, uuid7())
    engine.dispose()
    with psycopg.connect(conninfo(database_url), autocommit=True) as connection:
        with pytest.raises(AutocommitError, match="keep the cancellation"):
            cancel(connection, uuid7())
        with pytest.raises(InvalidMessageError, match=r"pass message\.id"):
            cancel(connection, "7")  # type: ignore[call-overload]
    asynchronous = create_async_engine(sqlalchemy_url(database_url))
    async with AsyncSession(asynchronous) as unawaited:
        assert await cancel(unawaited, uuid4()) == UnknownMessage()
    await asynchronous.dispose()


MAKE: Final[dict[str, tuple[Callable[[str], object], str]]] = {
    "is published": (publish, "published"),
    "is refused": (lambda url: defer(url, "refused", seconds=60), "waiting"),
    "is due": (lambda url: None, "ready"),
}


@pytest.mark.parametrize("how", MAKE)
def test_it_is_too_late_once_a_message_is_due_and_the_readers_state_is_told(
    database_url: str, how: str
) -> None:
    make, state = MAKE[how]
    message = Message("t", b"", available_at=datetime.now(UTC) - LATER)
    insert(database_url, message)
    make(database_url)
    with psycopg.connect(conninfo(database_url)) as connection:
        assert cancel(connection, message.id) == TooLate({"main": state})
        assert cancel(connection, message.id) == TooLate({"main": state})


def test_a_message_that_nobody_gets_is_told_too_late_for_no_reader(
    unread_database_url: str,
) -> None:
    message, later = Message("t", b""), scheduled()
    insert(unread_database_url, message, later)
    with psycopg.connect(conninfo(unread_database_url)) as connection:
        assert cancel(connection, message.id) == TooLate({})
        assert cancel(connection, later.id) == Cancelled()
    for query in (UNROUTED, UNSETTLED_OF_DAYS):
        assert execute(unread_database_url, query) == [(message.id,)]


def test_a_reader_that_was_dropped_and_has_returned_makes_no_message_late(
    database_url: str,
) -> None:
    message = scheduled()
    insert(database_url, message)
    execute(
        database_url,
        """
        INSERT INTO outbox.deferral
               (reader, id, created_at, lane, seq, cause, outcome, reason)
        SELECT 'other', id, created_at, lane, seq, 'settled', 'discarded', 'dropped'
          FROM outbox.message
        """,
    )
    assert cancelled(database_url, message) == "cancelled"


def test_the_clock_was_set_back_after_a_message_was_published(
    database_url: str,
) -> None:
    message = scheduled()
    insert(database_url, message)
    defer(database_url, "scheduled", seconds=3600)
    publish(database_url)
    with psycopg.connect(conninfo(database_url)) as connection:
        assert cancel(connection, message.id) == TooLate({"main": "published"})


def test_the_first_of_two_cancellations_counts_and_the_second_waits_for_it(
    database_url: str,
) -> None:
    message = scheduled()
    insert(database_url, message)
    with psycopg.connect(conninfo(database_url)) as one:
        assert cancel(one, message.id, reason="first") == Cancelled()
        with psycopg.connect(conninfo(database_url)) as other:
            other.execute("SET lock_timeout = '50ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                cancel(other, message.id)
    assert cancelled(database_url, message) == "already cancelled"
    query = "SELECT reason FROM outbox.deferral"
    assert execute(database_url, query) == [("first",)]


def test_a_cancellation_that_an_old_snapshot_does_not_see_is_a_conflict(
    database_url: str,
) -> None:
    message = scheduled()
    insert(database_url, message)
    with psycopg.connect(conninfo(database_url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1 FROM outbox.message")
        assert cancelled(database_url, message) == "cancelled"
        with pytest.raises(SerializationFailure):
            cancel(connection, message.id)


def backlog(connection: AdministrationConnection) -> int:
    overview, _ = examine_quickly(connection)
    assert overview.outbox is not None
    return overview.outbox.messages


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_cancelled_message_is_nobodys_backlog(
    database_url: str, is_claimed: bool
) -> None:
    message = scheduled(key="k")
    insert(database_url, message)
    if is_claimed:
        defer(database_url, "scheduled", seconds=3600)
    with administration(database_url, application_name="test") as connection:
        assert [it.id for it in list_scheduled(connection, limit=9)] == [message.id]
        assert backlog(connection) == 1
        assert cancelled(database_url, message, "why") == "cancelled"
        assert list_scheduled(connection, limit=9) == []
        assert backlog(connection) == 0
    assert execute(database_url, UNSETTLED) == [(0,)]
    assert execute(database_url, "SELECT count(*) FROM outbox.open_deferrals()") == [
        (0,)
    ]


def test_it_is_recorded_who_has_cancelled_and_why(database_url: str) -> None:
    message = scheduled()
    insert(database_url, message)
    cancelled(database_url, message, "the order was withdrawn")
    query = """
        SELECT step, reason, by = session_user, reader
          FROM outbox.message_life WHERE message_id = %s ORDER BY at
    """
    assert execute(database_url, query, [message.id])[1:] == [
        ("cancelled", "the order was withdrawn", True, None)
    ]


RIGHTS: Final = {
    "pillarbox_application": True,
    "pillarbox_operator": True,
    "pillarbox_web": True,
    "pillarbox_relay": False,
    "pillarbox_consumer": False,
    "pillarbox_monitor": False,
}


@pytest.mark.parametrize("role", RIGHTS)
def test_who_may_add_and_who_operates_may_cancel(database_url: str, role: str) -> None:
    message = scheduled()
    insert(database_url, message)
    with psycopg.connect(conninfo(as_role(database_url, role))) as connection:
        if RIGHTS[role]:
            assert cancel(connection, message.id) == Cancelled()
        else:
            with pytest.raises(InsufficientPrivilege):
                cancel(connection, message.id)


def test_through_a_pooler_in_transaction_mode_a_rollback_takes_it_back(
    database_url: str, pooled: Callable[..., str]
) -> None:
    message = scheduled()
    insert(database_url, message)
    url = pooled("transaction")
    for end, state in (("ROLLBACK", "scheduled"), ("COMMIT", "cancelled")):
        with psycopg.connect(conninfo(url), prepare_threshold=None) as connection:
            assert cancel(connection, message.id) == Cancelled()
            connection.execute(end)
        assert states(database_url) == [state]
    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
    assert execute(database_url, locks) == [(0,)]


@pytest.mark.long
def test_many_cancellations_of_a_transaction_need_few_locks(database_url: str) -> None:
    messages = [scheduled() for _ in range(3_000)]
    insert(database_url, *messages)
    with psycopg.connect(conninfo(database_url)) as connection:
        query = """
            SELECT count(*) FILTER (WHERE c.outcome = 'cancelled')
              FROM outbox.message AS m CROSS JOIN LATERAL outbox.cancel(m.id) AS c
        """
        assert connection.execute(query).fetchall() == [(3_000,)]
        locks = """
            SELECT count(*) FROM pg_locks
             WHERE pid = pg_backend_pid() AND locktype = 'advisory'
        """
        ((held,),) = connection.execute(locks).fetchall()
        assert 900 < held <= 1024


def test_the_doctor_knows_the_locks_of_cancellations(database_url: str) -> None:
    message = scheduled()
    insert(database_url, message)
    with (
        new_role(database_url, "shop", "LOGIN IN ROLE pillarbox_application") as shop,
        psycopg.connect(conninfo(login(database_url, shop))) as connection,
        administration(database_url, application_name="test") as ours,
    ):
        assert cancel(connection, message.id) == Cancelled()
        found = [it.finding for _, findings in examine(ours) for it in findings]
        connection.rollback()
        connection.close()
    assert not [it for it in found if "pillarbox's advisory locks" in it]


def move(url: str, id: UUID, at: datetime) -> tuple[str, UUID | None]:
    query = "SELECT outcome, new_id FROM outbox.move(%s, %s, 'postponed')"
    ((outcome, new_id),) = execute(url, query, [id, at])
    return outcome, new_id


def test_a_moved_message_has_its_content_another_id_and_another_time(
    database_url: str,
) -> None:
    message = Message(
        "t",
        b"\0\xff",
        key="k",
        tenant="acme",
        headers={"h": "v"},
        content_type="text/xml",
        schema_version=3,
        available_at=datetime.now(UTC) + LATER,
    )
    insert(database_url, message)
    at = datetime.now(UTC) + 2 * LATER
    outcome, new_id = move(database_url, message.id, at)
    assert outcome == "cancelled"
    query = """
        SELECT count(DISTINCT (topic, key, tenant, headers, content_type, lane,
                               schema_version, payload)), count(*) FROM outbox.message
    """
    assert execute(database_url, query) == [(1, 2)]
    query = "SELECT id, state, available_at FROM outbox.message_status ORDER BY seq"
    (first, second) = execute(database_url, query)
    assert first[:2] == (message.id, "cancelled")
    assert second == (new_id, "scheduled", at)
    query = "SELECT reason FROM outbox.deferral WHERE outcome = 'cancelled'"
    assert execute(database_url, query) == [(f"moved to {new_id}: postponed",)]
    # It isn't moved twice, nor once it is due.
    assert move(database_url, message.id, at) == ("already cancelled", None)
    due = Message("t", b"")
    insert(database_url, due)
    assert move(database_url, due.id, at) == ("too late", None)
    assert move(database_url, uuid7(), at) == ("unknown", None)


def test_a_message_is_moved_as_far_ahead_as_the_application_has_scheduled_it(
    database_url: str,
) -> None:
    insert(database_url, scheduled())
    far = "UPDATE outbox.message SET available_at = created_at + interval '20 days'"
    execute(database_url, far)
    ((id,),) = execute(database_url, "SELECT id FROM outbox.message")
    with pytest.raises(psycopg.Error, match="more than 20 days ahead"):
        move(database_url, id, datetime.now(UTC) + timedelta(days=21))
    outcome, new_id = move(database_url, id, datetime.now(UTC) + timedelta(days=19))
    assert (outcome, new_id is None) == ("cancelled", False)


def test_what_can_not_be_moved_stays_as_it_is(database_url: str) -> None:
    message = scheduled()
    insert(database_url, message)
    with pytest.raises(psycopg.Error, match="more than 6 days"):
        move(database_url, message.id, datetime.now(UTC) + timedelta(days=7))
    execute(
        database_url,
        """UPDATE outbox.message SET headers = '{"pillarbox-codec": "aes:1"}'""",
    )
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="encoded payload"):
        move(database_url, message.id, datetime.now(UTC) + LATER)
    assert states(database_url) == ["scheduled"]
