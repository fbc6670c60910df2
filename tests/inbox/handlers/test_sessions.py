"""The URL of a session factory's database."""

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from pillarbox.inbox.handlers.sessions import database_url
from pillarbox.outbox.errors import ConfigError

PLACE = "ann:p%40s%20s+@db.example:6432/shop"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("+psycopg", ""),
        ("+psycopg?sslmode=require", "?sslmode=require"),
        ("+psycopg?options=-c%20a%3D1", "?options=-c%20a%3D1"),
        ("+asyncpg", ""),
        ("+asyncpg?ssl=require", "?sslmode=require"),
        ("+asyncpg?prepared_statement_cache_size=0", ""),
    ],
)
def test_the_url_of_the_engine_is_converted_for_libpq(given: str, wanted: str) -> None:
    driver, _, query = given.partition("?")
    url = f"postgresql{driver}://{PLACE}" + (f"?{query}" if query else "")
    sessions = async_sessionmaker(create_async_engine(url))

    assert database_url(sessions) == f"postgresql://{PLACE}{wanted}"


def test_a_missing_engine_or_one_of_another_database_is_refused() -> None:
    with pytest.raises(ConfigError, match="the database is unknown"):
        database_url(sessionmaker())
    with pytest.raises(ConfigError, match="scheme 'sqlite'"):
        database_url(sessionmaker(create_engine("sqlite://")))
