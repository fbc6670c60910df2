"""Backoff: which policies are refused, and when the attempts are used up."""

from datetime import timedelta

import pytest

from outbox.retry import RetryPolicy
from pillarbox import ConfigError


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


def test_attempts_are_used_up_after_the_last_one() -> None:
    policy = RetryPolicy(max_attempts=3)

    assert [policy.spent(n) for n in (1, 2, 3, 4)] == [False, False, True, True]


def test_a_policy_can_allow_a_single_attempt() -> None:
    assert RetryPolicy(max_attempts=1).spent(1)


def test_messages_that_failed_together_are_retried_at_different_times() -> None:
    policy = RetryPolicy()

    assert len({policy.delay(4) for _ in range(20)}) > 10


def test_equal_delays_give_exactly_that_delay() -> None:
    policy = RetryPolicy(first_delay=seconds(2), max_delay=seconds(2))

    assert policy.delay(1) == policy.delay(1000) == seconds(2)
