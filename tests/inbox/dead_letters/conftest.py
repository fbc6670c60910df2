"""Sessions of a database with a table for effects."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from tests.fixtures.consumers import async_sessions_of


@pytest.fixture
async def sessions(url: str) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(url, "asyncpg") as opened:
        yield opened
