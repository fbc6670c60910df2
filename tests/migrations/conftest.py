"""Migrations make daily partitions, so no test may run across midnight."""

import pytest


@pytest.fixture(autouse=True)
def within_one_day(one_day: None) -> None:
    """Keep each test within one day."""
