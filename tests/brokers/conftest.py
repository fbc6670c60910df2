"""A test that leaves something open fails itself, and not a later test."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """Collect garbage after each test: an unclosed socket warns, which is an error.

    What is left is frozen, for looking at it again after each test would take longer
    than most of them.
    """
    yield
    gc.collect()
    gc.freeze()
