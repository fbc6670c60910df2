"""Migrations make daily partitions, so no test may run across midnight."""

from typing import Any

import pytest

from pillarbox.outbox.administration.migrate import migrate, migration_sql
from tests.fixtures.postgres import A_WEEK


@pytest.fixture(autouse=True)
def within_one_day(one_day: None) -> None:
    """Keep each test within one day."""


@pytest.fixture(autouse=True)
def for_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the partitions of a week instead of a month, in half the time."""
    for function in (migrate, migration_sql):
        defaults: Any = function.__kwdefaults__
        monkeypatch.setitem(defaults, "days_ahead", A_WEEK)
