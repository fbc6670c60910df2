"""The connections of our own processes."""

import asyncio
import threading

from pillarbox.outbox.postgres.connection import Connection, connect


async def test_a_block_that_is_cancelled_at_its_end_closes_its_connection(
    database_url: str,
) -> None:
    opened: list[Connection] = []

    async def use() -> None:
        async with await connect(database_url, application_name="test") as connection:
            opened.append(connection)
            # After so long, psycopg lets the loop run before it returns.
            threading.Event().wait(0.1)
            using.cancel()

    using = asyncio.create_task(use())
    await asyncio.wait([using])
    (connection,) = opened
    assert connection.closed
