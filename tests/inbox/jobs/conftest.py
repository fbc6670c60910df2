"""A database with a table for effects, and sessions for it."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.jobs import EFFECTS
from tests.fixtures.sessions import execute


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, EFFECTS)
    return database_url


@pytest.fixture(params=["psycopg", "asyncpg"])
async def sessions(
    url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(url, request.param) as made:
        yield made
