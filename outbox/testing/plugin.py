"""Fixtures for the tests of applications.

    # conftest.py
    pytest_plugins = ["pillarbox.outbox.testing.plugin"]

    def test_an_order_is_announced(pillarbox_database_url: str) -> None:
        engine = create_engine(pillarbox_database_url)
        ...

A server starts when the first test needs it, and stops at the end of the run.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Imported before the first test, so that it records every message.
import pillarbox.outbox.testing.added  # noqa: F401
from pillarbox.outbox.testing.events import RecordedEvents

if TYPE_CHECKING:
    from pillarbox.outbox.testing.databases import Databases

__all__ = ["pillarbox_database_url", "pillarbox_databases", "recorded_events"]


@pytest.fixture
def recorded_events() -> RecordedEvents:
    """Return an observer that a test can use to wait for a process's events."""
    return RecordedEvents()


@pytest.fixture(scope="session")
def pillarbox_databases() -> "Iterator[Databases]":
    """Yield what creates databases, for fixtures of your own: see `Databases.new`."""
    from pillarbox.outbox.testing.databases import databases

    with databases() as made:
        yield made


@pytest.fixture
def pillarbox_database_url(pillarbox_databases: "Databases") -> Iterator[str]:
    """Yield the URL of a database with pillarbox's schema: `postgresql+psycopg://…`."""
    with pillarbox_databases.new() as url:
        yield url
