"""Backoff: which policies are refused, how long it lasts, and when it is used up."""

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pillarbox import ConfigError
from pillarbox.outbox.retry import RetryPolicy

DELAYS = st.timedeltas(timedelta(milliseconds=1), timedelta(days=30))


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


@pytest.mark.parametrize("attempts", [0, -1])
def test_a_policy_without_attempts_is_refused(attempts: int) -> None:
    with pytest.raises(ConfigError, match=f"max_attempts={attempts}: must be at least"):
        RetryPolicy(max_attempts=attempts)


@pytest.mark.parametrize(
    ("first", "longest"), [(0, 1), (-1, 1), (2, 1)], ids=["none", "negative", "swapped"]
)
def test_invalid_delays_are_refused(first: int, longest: int) -> None:
    with pytest.raises(ConfigError, match=r"first_delay=.*max_delay=.*above 0"):
        RetryPolicy(first_delay=seconds(first), max_delay=seconds(longest))


def test_messages_that_failed_together_are_retried_at_different_times() -> None:
    policy = RetryPolicy()

    assert len({policy.delay(4) for _ in range(20)}) > 10


@given(DELAYS, DELAYS, st.integers(1, 100_000))
@example(seconds(2), seconds(2), 1000)
def test_a_delay_lies_between_the_first_and_the_longest(
    one: timedelta, other: timedelta, attempts: int
) -> None:
    policy = RetryPolicy(first_delay=min(one, other), max_delay=max(one, other))

    delay = policy.delay(attempts)

    assert policy.first_delay <= delay <= policy.max_delay
    ceiling = policy.first_delay.total_seconds() * 3.0 ** min(attempts, 64)
    assert delay.total_seconds() <= ceiling + 1e-6


@given(st.integers(1, 1000), st.integers(0, 2000))
@example(1, 1)
def test_attempts_are_used_up_at_the_limit(limit: int, attempts: int) -> None:
    assert RetryPolicy(max_attempts=limit).spent(attempts) == (attempts >= limit)
