"""One connection for all examples of a module: they leave nothing behind."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import TupleRow

from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, new_database


@pytest.fixture(scope="module")
def connection(
    server: PostgresServer, template: Template
) -> Iterator[psycopg.Connection[TupleRow]]:
    with (
        new_database(server, "pillarbox_properties", template) as name,
        psycopg.connect(server.database_url(name), autocommit=True) as connection,
    ):
        yield connection
