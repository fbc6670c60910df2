"""Fixtures shared by the tests of the inbox."""

import pytest

from tests.fixtures.effects import EFFECTS
from tests.fixtures.sessions import execute


@pytest.fixture
def url(database_url: str) -> str:
    """A database with a table for effects."""
    execute(database_url, EFFECTS)
    return database_url


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases often, so that tests can use long ones.

    A short lease would be lost if the machine stalled for a few seconds.
    """
    monkeypatch.setattr("inbox.jobs.lease._BEATS", 60)
