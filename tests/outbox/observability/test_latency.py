"""Durations are counted in buckets, one by one or many at once."""

from bisect import bisect_left
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.outbox.observability.latency import LONG, SHORT, Latencies

NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)
AGES = st.lists(
    st.floats(-100, 200_000, allow_nan=False).map(lambda it: round(it, 3)), max_size=50
)


def added(ages: list[float]) -> list[datetime]:
    return [NOW - timedelta(seconds=age) for age in ages]


@given(ages=AGES)
def test_durations_added_at_once_count_like_durations_added_one_by_one(
    ages: list[float],
) -> None:
    at_once, singly = Latencies(), Latencies()
    at_once.add_since(added(ages), NOW)
    for age in ages:
        singly.add(age)
    assert at_once.count == len(ages)
    # Rounding can put a duration that equals a bound on either side of it.
    bounds = [age for age in ages if min(abs(age - b) for b in LONG) < 1e-5]
    if not bounds:
        assert at_once.counts == singly.counts
    assert at_once.sum == pytest.approx(singly.sum, abs=1e-3)
    assert at_once.longest == pytest.approx(singly.longest, abs=1e-5)


@given(ages=AGES)
def test_a_wrong_clock_makes_no_duration_negative(ages: list[float]) -> None:
    latencies = Latencies()
    latencies.add_since(added([-abs(age) for age in ages]), NOW)
    for age in ages:
        latencies.add(-abs(age))
    assert latencies.sum == latencies.longest == 0
    assert latencies.counts[0] == 2 * len(ages)


@given(ages=AGES.filter(bool))
def test_the_median_is_in_the_right_bucket(ages: list[float]) -> None:
    latencies = Latencies()
    for age in ages:
        latencies.add(age)
    median = latencies.quantile(0.5)
    assert median is not None
    exact = max(0.0, sorted(ages)[(len(ages) - 1) // 2])
    bounds = (0.0, *LONG, latencies.longest)
    bucket = bisect_left(LONG, exact)
    low, high = bounds[bucket], max(bounds[bucket], bounds[bucket + 1])
    assert low <= median + 1e-9 or median == latencies.longest
    assert median <= min(high, latencies.longest) + 1e-9


def test_without_durations_there_is_no_median() -> None:
    latencies = Latencies(SHORT)
    latencies.add_since([])
    assert latencies.quantile(0.5) is None
    assert (latencies.count, latencies.sum, latencies.longest) == (0, 0, 0)


@given(batches=st.lists(AGES, max_size=5))
def test_take_returns_durations_since_the_last_take_and_keeps_the_totals(
    batches: list[list[float]],
) -> None:
    total = Latencies()
    for ages in batches:
        alone = Latencies()
        for age in ages:
            total.add(age)
            alone.add(age)
        recent = total.take()
        assert (recent.counts, recent.longest) == (alone.counts, alone.longest)
        assert recent.sum == pytest.approx(alone.sum, abs=1e-6)
        assert recent.quantile(0.5) == alone.quantile(0.5)
    assert total.count == sum(map(len, batches))
