"""Fixtures for the tests of applications; pytest loads this plugin automatically.

    def test_an_order_is_announced(pillarbox_database_url: str) -> None:
        engine = create_engine(pillarbox_database_url)
        ...

A server starts when the first test needs it, and stops at the end of the run.

A test fails if it leaves messages unsent, that is, in a session that was closed during
the test without a commit, a rollback or an exception. Messages that the test read with
`added` don't count, and neither does the teardown of fixtures.
Mark tests that leave messages unsent on purpose with `pillarbox_allow_unsent`.
"""

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

# Imported before the first test, so that it records every message.
import outbox.testing.added  # noqa: F401
from outbox import unsent
from outbox.testing.events import RecordedEvents
from outbox.unsent import MessagesUnsent

if TYPE_CHECKING:
    from outbox.testing.postgres import PostgresServer

__all__ = [
    "pillarbox_database_url",
    "pillarbox_server",
    "pillarbox_template",
    "recorded_events",
]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "pillarbox_allow_unsent: the test may leave messages unsent"
    )
    # Ignore messages left unsent between tests: fixtures close their own sessions.
    unsent.on_unsent.append(lambda _: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves messages unsent."""
    lost: list[MessagesUnsent] = []
    listener = lost.append
    listeners = unsent.on_unsent
    listeners.append(listener)
    try:
        result = yield
    finally:
        listeners.remove(listener)
    if lost and item.get_closest_marker("pillarbox_allow_unsent") is None:
        pytest.fail("\n".join(map(str, lost)), pytrace=False)
    return result


@pytest.fixture
def recorded_events() -> RecordedEvents:
    """Return an observer that a test can use to wait for a process's events."""
    return RecordedEvents()


@pytest.fixture(scope="session")
def pillarbox_server() -> "Iterator[PostgresServer]":
    """Yield the server of PILLARBOX_DATABASE_URL, or a private one for this run.

    The private server is a container if Docker has the image `pillarbox-postgres`.
    Otherwise it needs PostgreSQL with pg_partman and pg_cron on this machine.
    """
    from outbox.testing.postgres import postgres_server

    url = os.environ.get("PILLARBOX_DATABASE_URL") or None
    with postgres_server(url, durable=False) as server:
        yield server


@pytest.fixture(scope="session")
def pillarbox_template(pillarbox_server: "PostgresServer") -> Iterator[str]:
    """Yield the name of a migrated database to copy; don't connect to it."""
    from outbox.administration.migrate import migrate

    name = f"pillarbox_template_{uuid4().hex}"
    pillarbox_server.create_database(name)
    try:
        migrate(pillarbox_server.database_url(name), with_cron=False)
        yield name
    finally:
        pillarbox_server.drop_database(name)


@pytest.fixture
def pillarbox_database_url(
    pillarbox_server: "PostgresServer", pillarbox_template: str
) -> Iterator[str]:
    """Yield the URL of a database with pillarbox's schema: `postgresql+psycopg://…`."""
    from outbox.postgres.connection import sqlalchemy_url

    name = f"pillarbox_{uuid4().hex}"
    pillarbox_server.create_database(name, pillarbox_template)
    try:
        yield sqlalchemy_url(pillarbox_server.database_url(name))
    finally:
        pillarbox_server.drop_database(name)
