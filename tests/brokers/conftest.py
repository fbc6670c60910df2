"""A test that leaves something open fails itself, and not a later test."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Collect garbage after each test: an unclosed socket warns, which is an error."""
    yield
    gc.collect()
