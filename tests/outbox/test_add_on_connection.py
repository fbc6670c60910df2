"""Messages are added on connections of SQLAlchemy Core and of psycopg."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import InvalidMessageError, Message, add
from pillarbox.outbox.errors import AutocommitError
from pillarbox.outbox.payload.schema_registry import SchemaRegistry
from pillarbox.outbox.postgres.connection import conninfo, sqlalchemy_url
from tests.fixtures.sessions import execute

ADDED = (
    "SELECT topic, key, tenant, headers, payload, schema_version, available_at"
    " FROM outbox.message ORDER BY seq"
)
AT = datetime(2026, 1, 31, tzinfo=UTC)
MESSAGES = (
    Message("a", {"it's": '"%s"'}, key="k", headers={"h": "ä\\"}, available_at=AT),
    Message("b", b"\x00\xff%", tenant="acme", schema_version=2),
)
ROWS = [
    ("a", "k", None, {"h": "ä\\"}, b'{"it\'s":"\\"%s\\""}', 1, AT),
    ("b", None, "acme", {}, b"\x00\xff%", 2, None),
]
KINDS = (
    *("sqlalchemy psycopg", "sqlalchemy asyncpg", "core"),
    *("psycopg", "psycopg async", "psycopg client"),
)
# The client's cursor puts parameters into the statement, as Django's does.
CLIENT: Final[dict[str, Any]] = {
    "cursor_factory": psycopg.ClientCursor,
    "row_factory": dict_row,
}


@asynccontextmanager
async def connected(kind: str, url: str, **settings: Any) -> AsyncIterator[Any]:
    """Yield a connection of one of the kinds."""
    if kind in {"psycopg", "psycopg client"}:
        settings |= CLIENT if kind == "psycopg client" else {}
        with psycopg.connect(conninfo(url), **settings) as connection:
            yield connection
    elif kind == "psycopg async":
        async with await psycopg.AsyncConnection.connect(
            conninfo(url), **settings
        ) as asynchronous:
            yield asynchronous
    elif kind == "core":
        engine = create_engine(sqlalchemy_url(url))
        with engine.connect() as core:
            yield core
        engine.dispose()
    else:
        driver = kind.partition(" ")[2]
        url = sqlalchemy_url(url).replace("psycopg", driver, 1)
        async_engine = create_async_engine(url)
        async with async_engine.connect() as async_core:
            yield async_core
        await async_engine.dispose()


async def finish(result: Any) -> None:
    if result is not None:
        await result


@pytest.mark.parametrize("kind", KINDS)
async def test_messages_are_part_of_the_connections_transaction(
    kind: str, database_url: str
) -> None:
    async with connected(kind, database_url) as connection:
        await finish(add(connection, Message("rolled back", b"")))
        await finish(connection.rollback())
        await finish(add(connection))
        await finish(add(connection, *MESSAGES))
        assert execute(database_url, ADDED) == []
        await finish(connection.commit())
    assert execute(database_url, ADDED) == ROWS


@pytest.mark.parametrize("kind", ["psycopg", "psycopg async"])
async def test_a_connection_in_autocommit_mode_needs_a_transaction(
    kind: str, database_url: str
) -> None:
    async with connected(kind, database_url, autocommit=True) as connection:
        with pytest.raises(AutocommitError, match=r"connection\.transaction\(\)"):
            await finish(add(connection, *MESSAGES))
        if kind == "psycopg":
            with connection.transaction():
                add(connection, *MESSAGES)
        else:
            async with connection.transaction():
                await add(connection, *MESSAGES)
    assert execute(database_url, ADDED) == ROWS


async def test_messages_are_checked_before_anything_is_inserted(
    database_url: str,
) -> None:
    strict = SchemaRegistry(strict=True)
    async with connected("psycopg", database_url) as connection:
        with pytest.raises(InvalidMessageError, match="isn't declared"):
            add(connection, *MESSAGES, registry=strict)
        assert connection.info.transaction_status.name == "IDLE"
