"""Backoff delays stay within their bounds, whatever those are."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from outbox.retry import RetryPolicy

DELAYS = st.timedeltas(timedelta(milliseconds=1), timedelta(days=30))


@given(DELAYS, DELAYS, st.integers(1, 100_000))
def test_a_delay_lies_between_the_first_and_the_longest(
    one: timedelta, other: timedelta, attempts: int
) -> None:
    policy = RetryPolicy(first_delay=min(one, other), max_delay=max(one, other))

    delay = policy.delay(attempts)

    assert policy.first_delay <= delay <= policy.max_delay
    ceiling = policy.first_delay.total_seconds() * 3.0 ** min(attempts, 64)
    assert delay.total_seconds() <= ceiling + 1e-6


@given(st.integers(1, 1000), st.integers(0, 2000))
def test_attempts_are_used_up_at_the_limit(limit: int, attempts: int) -> None:
    assert RetryPolicy(max_attempts=limit).spent(attempts) == (attempts >= limit)
