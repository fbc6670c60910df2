"""What a session factory says of its database."""

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from inbox.handlers.sessions import database_url
from outbox.errors import ConfigError

PLACE = "ann:p%40ss@db.example:6432/shop"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("+psycopg", ""),
        ("+psycopg?sslmode=require", "?sslmode=require"),
        ("+asyncpg", ""),
        ("+asyncpg?ssl=require", "?sslmode=require"),
        ("+asyncpg?prepared_statement_cache_size=0", ""),
    ],
)
def test_the_url_of_the_engine_is_one_that_libpq_understands(
    given: str, wanted: str
) -> None:
    driver, _, query = given.partition("?")
    url = f"postgresql{driver}://{PLACE}" + (f"?{query}" if query else "")
    sessions = async_sessionmaker(create_async_engine(url))

    assert database_url(sessions) == f"postgresql://{PLACE}{wanted}"


def test_an_engine_that_is_not_known_or_of_another_database_is_refused() -> None:
    with pytest.raises(ConfigError, match="the engine of sessions is not known"):
        database_url(sessionmaker())
    with pytest.raises(ConfigError, match="scheme 'sqlite'"):
        database_url(sessionmaker(create_engine("sqlite://")))
