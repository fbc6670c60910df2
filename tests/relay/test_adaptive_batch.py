"""The adaptive batch: calls shrink until they finish within the publish timeout."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from pillarbox.relay.adaptive_batch import BatchLimit

TIMEOUT = timedelta(seconds=30)
SECONDS = TIMEOUT.total_seconds()


def test_a_call_contains_the_whole_batch_until_one_times_out() -> None:
    batch_limit = BatchLimit(TIMEOUT)

    batch_limit.record_success(29.0)
    batch_limit.record_success(0.1)

    assert batch_limit.max_messages > 1_000_000


def test_after_a_timeout_the_limit_is_half_of_that_call() -> None:
    batch_limit = BatchLimit(TIMEOUT)

    batch_limit.record_timeout(100)
    # A larger call that was still running doesn't raise it.
    batch_limit.record_timeout(500)

    assert batch_limit.max_messages == 50


def test_the_limit_grows_after_some_calls_with_time_for_twice_as_much() -> None:
    batch_limit = BatchLimit(TIMEOUT)
    batch_limit.record_timeout(100)
    for _ in range(7):
        batch_limit.record_success(14.9)
    batch_limit.record_success(15.0)
    assert batch_limit.max_messages == 50

    batch_limit.record_success(14.9)
    assert batch_limit.max_messages == 100

    for _ in range(8):
        batch_limit.record_success(14.9)
    assert batch_limit.max_messages == 200


@given(
    batch=st.integers(1, 2_000),
    pace=st.floats(min_value=0.001, max_value=29.0),
    quick=st.integers(0, 40),
)
def test_at_any_speed_the_batch_is_published_and_calls_stop_timing_out(
    batch: int, pace: float, quick: int
) -> None:
    batch_limit = BatchLimit(TIMEOUT)
    for _ in range(quick):
        batch_limit.record_success(0.0)
    outcomes = []
    for _ in range(40):
        carried = min(batch, batch_limit.max_messages)
        in_time = carried * pace < SECONDS
        outcomes.append(in_time)
        if in_time:
            batch_limit.record_success(carried * pace)
        else:
            batch_limit.record_timeout(carried)

    assert outcomes == sorted(outcomes)
    assert outcomes[11:] == [True] * 29
