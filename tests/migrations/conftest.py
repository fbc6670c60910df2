"""Migrations change the server's roles, so one worker at a time makes or drops them."""

from collections.abc import Iterator

import pytest

from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import one_at_a_time


@pytest.fixture
def alone(server: PostgresServer, template_database: str) -> Iterator[None]:
    with one_at_a_time(server):
        yield
