"""A database for each test, with the tables of the application and of pillarbox."""

from collections.abc import AsyncIterator, Iterator

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from pillarbox.testing import Databases

pytest_plugins = ["pillarbox.outbox.testing.plugin"]

Sessions = async_sessionmaker[AsyncSession]


@pytest.fixture(scope="session")
def migrated(pillarbox_databases: Databases) -> Iterator[str]:
    """A database to copy, because migrations take longer than a copy."""
    with pillarbox_databases.new() as url:
        config = Config("alembic.ini")
        config.attributes["url"] = url
        command.upgrade(config, "head")
        yield url


@pytest.fixture
async def sessions(
    pillarbox_databases: Databases, migrated: str
) -> AsyncIterator[Sessions]:
    with pillarbox_databases.new(like=migrated) as url:
        engine = create_async_engine(url)
        yield async_sessionmaker(engine)
        await engine.dispose()


@pytest.fixture
async def session(sessions: Sessions) -> AsyncIterator[AsyncSession]:
    """A session whose transaction is rolled back."""
    async with sessions() as session:
        yield session
