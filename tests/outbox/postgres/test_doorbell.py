"""The doorbell: writers ring only for sleeping relays, and none sleeps too early."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from psycopg.rows import TupleRow

from pillarbox.outbox.postgres.advisory_lock import Lock
from pillarbox.outbox.postgres.doorbell import Doorbell
from tests.fixtures.sessions import execute

ADD = "SELECT outbox.add('t', '{}'::jsonb)"
LONG = 10.0
SHORT = 0.05

Connection = psycopg.Connection[TupleRow]


@asynccontextmanager
async def bell(url: str, name: str = "sleeper") -> AsyncIterator[Doorbell]:
    doorbell = Doorbell(
        url,
        lock=Lock.OUTBOX_DOORBELL,
        channel="outbox_message",
        application_name=name,
    )
    try:
        yield doorbell
    finally:
        await doorbell.close()


@pytest.fixture
def writer(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def listener(database_url: str) -> Iterator[Connection]:
    """Return a session that receives every ring."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("LISTEN outbox_message")
        yield connection


def rings(listener: Connection) -> list[str]:
    """Return the rings so far: our own notification comes after all earlier ones."""
    listener.execute("SELECT pg_notify('outbox_message', 'asked')")
    heard = []
    for notification in listener.notifies():
        if notification.payload == "asked":
            break
        heard.append(notification.payload)
    return heard


async def test_a_writer_rings_once_and_only_for_a_sleeping_relay(
    database_url: str, writer: Connection, listener: Connection
) -> None:
    writer.execute(ADD)
    assert rings(listener) == []
    async with bell(database_url) as sleeper:
        assert await sleeper.arm()
        with writer.transaction():
            writer.execute(ADD)
            assert rings(listener) == []
            writer.execute(ADD)

        assert await sleeper.wait(LONG)
        assert rings(listener) == [""]
        # The doorbell stays armed until the relay disarms it.
        writer.execute(ADD)
        assert rings(listener) == [""]


async def test_a_rolled_back_writer_does_not_ring(
    database_url: str, writer: Connection, listener: Connection
) -> None:
    async with bell(database_url) as sleeper:
        assert await sleeper.arm()
        with writer.transaction(force_rollback=True):
            writer.execute(ADD)

        assert not await sleeper.wait(SHORT)
        assert rings(listener) == []


async def test_no_relay_sleeps_while_a_writers_transaction_is_open(
    database_url: str, writer: Connection
) -> None:
    async with bell(database_url) as sleeper:
        with writer.transaction():
            writer.execute(ADD)
            assert not await sleeper.arm()
        assert await sleeper.arm()


async def test_a_disarmed_doorbell_does_not_ring_however_often_it_was_armed(
    database_url: str, writer: Connection, listener: Connection
) -> None:
    async with bell(database_url) as sleeper:
        assert await sleeper.arm()
        assert await sleeper.arm()
        await sleeper.disarm()
        await sleeper.disarm()
        assert rings(listener) == ["disarmed"]
        with writer.transaction():
            writer.execute(ADD)
            # Nothing is left of the first two calls.
            assert not await sleeper.arm()
        assert rings(listener) == []


async def test_one_ring_wakes_two_sleepers_and_one_that_disarms_passes_the_doorbell_on(
    database_url: str, writer: Connection, listener: Connection
) -> None:
    async with bell(database_url, "one") as one, bell(database_url, "other") as other:
        assert await one.arm()
        assert await other.arm()
        await other.disarm()
        assert rings(listener) == [], "it did not have the doorbell"
        assert await other.arm()
        writer.execute(ADD)
        assert await one.wait(LONG)
        assert await other.wait(LONG)

        await one.disarm()
        assert await other.wait(LONG)
        assert await other.arm()
        writer.execute(ADD)
        assert await other.wait(LONG)


async def test_the_lock_is_released_with_the_connection(database_url: str) -> None:
    async with bell(database_url, "one") as one, bell(database_url, "other") as other:
        assert await one.arm()
        execute(
            database_url,
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE application_name = 'one'",
        )

        assert await other.arm()
        assert not await one.wait(LONG)
        assert await one.arm()


async def test_without_a_database_the_doorbell_cannot_be_armed_and_waits_sleep() -> (
    None
):
    async with bell("postgresql://nobody@127.0.0.1:1/nowhere") as sleeper:
        assert not await sleeper.arm()
        assert not await sleeper.wait(SHORT)
        await sleeper.disarm()
