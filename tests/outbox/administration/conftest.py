"""The upkeep works in days, so no test can run across midnight."""

import pytest


@pytest.fixture(autouse=True)
def within_one_day(one_day: None) -> None:
    """Keep tests that count days from running across midnight."""
