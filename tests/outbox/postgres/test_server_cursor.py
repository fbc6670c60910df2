"""A server-side cursor is closed whatever happens."""

import asyncio

import psycopg
import pytest

from outbox.postgres.connection import connect, server_cursor
from tests.fixtures.relay import execute
from tests.fixtures.waiting import wait_for

MANY = "SELECT generate_series(1, 100000)"
SLEEPS = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"


async def test_a_server_cursor_reads_in_parts_and_is_closed(database_url: str) -> None:
    async with await connect(database_url, application_name="test") as connection:
        async with connection.transaction(), server_cursor(connection, "a") as cursor:
            await cursor.execute(MANY)
            numbers = [number async for (number,) in cursor]

        assert numbers == list(range(1, 100_001))
        assert cursor.closed


async def test_a_server_cursor_is_closed_if_its_connection_is_lost(
    database_url: str,
) -> None:
    async with await connect(database_url, application_name="test") as connection:
        cursors = []

        async def read() -> None:
            async with (
                connection.transaction(),
                server_cursor(connection, "a") as cursor,
            ):
                cursors.append(cursor)
                await cursor.execute(MANY)
                pid = connection.info.backend_pid
                execute(database_url, f"SELECT pg_terminate_backend({pid}, 60000)")

        with pytest.raises(psycopg.OperationalError):
            await read()

        assert cursors[0].closed


async def test_a_server_cursor_is_closed_if_its_task_is_cancelled(
    database_url: str,
) -> None:
    async with await connect(database_url, application_name="test") as connection:
        cursors = []

        async def read() -> None:
            async with (
                connection.transaction(),
                server_cursor(connection, "a") as cursor,
            ):
                cursors.append(cursor)
                await cursor.execute("SELECT pg_sleep(3600)")
                await cursor.fetchone()

        reading = asyncio.create_task(read())
        await asyncio.to_thread(
            wait_for, "it sleeps", lambda: execute(database_url, SLEEPS)
        )
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        assert cursors[0].closed
