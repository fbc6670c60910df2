"""Migrations make partitions by the day, so no test may run across midnight."""

import pytest


@pytest.fixture(autouse=True)
def within_one_day(one_day: None) -> None:
    """Let no day end while a test counts days."""
