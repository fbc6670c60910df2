"""Fixtures shared by the tests of the inbox."""

import pytest


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases often, so that tests can use long ones.

    A short lease would be lost if the machine stalled for a few seconds.
    """
    monkeypatch.setattr("inbox.jobs.lease._BEATS", 60)
