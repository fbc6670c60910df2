"""What tests of the inbox share."""

import pytest


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew leases often, so that tests can have long ones.

    A short lease would be lost whenever the machine stalls for a few seconds.
    """
    monkeypatch.setattr("inbox.jobs.lease._BEATS", 60)
