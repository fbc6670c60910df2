"""A test that leaves a resource open fails, rather than a later test."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Collect garbage after each test: an unclosed socket warns, which is an error.

    The remaining objects are frozen, since checking them again after each test would
    take longer than most tests.
    """
    yield
    gc.collect()
    gc.freeze()
