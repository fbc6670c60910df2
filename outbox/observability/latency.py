"""Distributions of durations, in buckets, cheap enough to update for every message."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import sub
from typing import Final

SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Upper bounds of buckets, in seconds, for a statement or a call."""
LONG: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    *(60, 300, 900, 3600, 21600, 86400),
)
"""The same for handlers and for a message's whole path, which can take hours."""
_MOST_NEW: Final = 256


class Latencies:
    """Durations, counted in buckets. For one event loop.

    A negative duration counts as 0 s; it occurs if the clocks of two hosts differ.
    """

    __slots__ = (
        *("_counts", "_longest", "_new", "_sum", "_taken", "_taken_sum"),
        "bounds",
    )

    def __init__(self, bounds: tuple[float, ...] = LONG) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._longest = 0.0
        self._new: list[float] = []
        self._taken = [0] * (len(bounds) + 1)
        self._taken_sum = 0.0

    @property
    def counts(self) -> list[int]:
        """The count of each bucket, not cumulative; the last is above all bounds."""
        self._count_new()
        return self._counts

    @property
    def sum(self) -> float:
        """The sum of all durations."""
        self._count_new()
        return self._sum

    @property
    def longest(self) -> float:
        """The longest duration since the last `take`; 0 if there is none."""
        self._count_new()
        return self._longest

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Add one duration."""
        new = self._new
        new.append(seconds)
        if len(new) >= _MOST_NEW:
            self._count_new()

    def _count_new(self) -> None:
        # Assigning many durations to buckets at once takes a fraction of the time.
        new = self._new
        if not new:
            return
        new.sort()
        if new[0] < 0.0:
            new = [max(0.0, seconds) for seconds in new]
        below, total = 0, len(new)
        for bucket, bound in enumerate(self.bounds):
            end = bisect_right(new, bound, below)
            self._counts[bucket] += end - below
            below = end
            if below == total:
                break
        self._counts[-1] += total - below
        self._sum += sum(new)
        self._longest = max(self._longest, new[-1])
        self._new = []

    def add_since(
        self, moments: Sequence[datetime], now: datetime | None = None
    ) -> None:
        """Add the time since each of these moments, all in one time zone."""
        if now is None:
            now = datetime.now(UTC)
        self._new += [(now - moment).total_seconds() for moment in moments]
        if len(self._new) >= _MOST_NEW:
            self._count_new()

    def take(self) -> "Latencies":
        """Return the durations added since the last `take`; the counts keep growing."""
        recent = Latencies(self.bounds)
        recent._counts = list(map(sub, self.counts, self._taken))
        recent._sum = self._sum - self._taken_sum
        recent._longest = self._longest
        self._taken, self._taken_sum = self._counts.copy(), self._sum
        self._longest = 0.0
        return recent

    def quantile(self, share: float) -> float | None:
        """Return the duration that this share of all doesn't exceed; None if empty.

        The result is interpolated within a bucket, so it is approximate.
        """
        rank = share * self.count
        if not rank:
            return None
        below = 0.0
        for bound, count in zip((*self.bounds, self.longest), self.counts, strict=True):
            if count >= rank and count:
                top = min(bound, self.longest)
                return min(below, top) + max(0.0, top - below) * rank / count
            rank -= count
            below = bound
        return self.longest
