"""The database of the applications, which write invoices and purchases."""

from collections.abc import Callable

import pytest
from sqlalchemy import create_engine

from examples.frameworks import billing, shop
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.sessions import execute


@pytest.fixture
def url(database_url: str) -> str:
    engine = create_engine(sqlalchemy_url(database_url))
    for application in (billing, shop):
        application.Base.metadata.create_all(engine)
    engine.dispose()
    return database_url


@pytest.fixture
def invoices(url: str) -> Callable[[], list[int]]:
    """Return a function that reads the orders invoiced so far, in order."""

    def read() -> list[int]:
        rows = execute(url, "SELECT order_id FROM invoice ORDER BY order_id")
        return [order_id for (order_id,) in rows]

    return read
