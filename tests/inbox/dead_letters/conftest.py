"""Sessions of a database with a table for effects."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.sessions import execute


@pytest.fixture(params=["psycopg", "asyncpg"])
async def sessions(
    database_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    execute(database_url, "CREATE TABLE effect (what text)")
    async with async_sessions_of(database_url, request.param) as opened:
        yield opened
