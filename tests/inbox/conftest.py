"""Fixtures shared by the tests of the inbox."""

from collections.abc import Iterator

import pytest

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.effects import EFFECTS
from tests.fixtures.endings import make_effects
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.sessions import execute


@pytest.fixture
def url(database_url: str) -> str:
    """A database with a table for effects."""
    execute(database_url, EFFECTS)
    return database_url


@pytest.fixture(scope="module")
def database(server: PostgresServer, template: Template) -> Iterator[str]:
    """A database for all tests of a module, with a table for effects."""
    with new_database(server, "pillarbox_test", template) as name:
        url = server.database_url(name)
        make_effects(url)
        yield url


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases often, so that tests can use long ones.

    A short lease would be lost if the machine stalled for a few seconds.
    """
    monkeypatch.setattr("pillarbox.inbox.jobs.lease._BEATS", 60)
