"""How much one call carries: what gets through in time."""

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from relay.adaptive_batch import Portion

TIMEOUT = timedelta(seconds=30)
SECONDS = TIMEOUT.total_seconds()


def test_a_call_carries_the_whole_batch_as_long_as_nothing_takes_too_long() -> None:
    portion = Portion(TIMEOUT)

    portion.took(29.0)
    portion.took(0.1)

    assert portion.most > 1_000_000


def test_after_one_that_took_too_long_it_carries_half_of_that() -> None:
    portion = Portion(TIMEOUT)

    portion.took_too_long(500)

    assert portion.most == 250


def test_a_larger_one_that_was_under_way_does_not_raise_it_again() -> None:
    portion = Portion(TIMEOUT)

    portion.took_too_long(100)
    portion.took_too_long(500)

    assert portion.most == 50


def test_it_grows_only_after_a_call_that_had_time_for_twice_as_much() -> None:
    portion = Portion(TIMEOUT)
    portion.took_too_long(100)

    portion.took(15.0)
    assert portion.most == 50

    portion.took(14.9)
    assert portion.most == 100


def test_where_growing_was_wrong_it_waits_for_more_calls_each_time() -> None:
    portion = Portion(TIMEOUT)
    portion.took_too_long(14)
    calls = []
    for _ in range(8):
        count = 0
        while portion.most == 7:
            portion.took(0.0)
            count += 1
        portion.took_too_long(14)
        calls.append(count)

    assert calls == [1, 2, 4, 8, 16, 32, 64, 64]


def test_an_outage_does_not_make_it_hesitate() -> None:
    portion = Portion(TIMEOUT)
    for _ in range(20):
        portion.took_too_long(min(500, portion.most))
    assert portion.most == 1

    for _ in range(9):
        portion.took(0.1)

    assert portion.most == 512


@given(
    batch=st.integers(1, 2_000),
    pace=st.floats(min_value=0.001, max_value=29.0),
    quick=st.integers(0, 40),
)
def test_at_any_pace_it_gets_through_and_fails_no_more_at_that_pace(
    batch: int, pace: float, quick: int
) -> None:
    portion = Portion(TIMEOUT)
    for _ in range(quick):
        portion.took(0.0)
    outcomes = []
    for _ in range(40):
        carried = min(batch, portion.most)
        in_time = carried * pace < SECONDS
        outcomes.append(in_time)
        if in_time:
            portion.took(carried * pace)
        else:
            portion.took_too_long(carried)

    assert outcomes == sorted(outcomes)
    assert outcomes[11:] == [True] * 29
