"""How long things took: a distribution in buckets, cheap enough for every message."""

from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Upper bounds of buckets, in seconds, for a statement or a call."""
LONG: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    *(60, 300, 900, 3600, 21600, 86400),
)
"""The same for handlers and for the way of a message, which may wait for hours."""
_SAMPLE: Final = 64


class Latencies:
    """Durations, counted in buckets. For one event loop.

    What ended before it began, because two hosts disagree about the time, took 0 s.

    Attributes:
        counts: of each bucket alone; the last one is for what is above all bounds.
        longest: the longest duration; 0 if there is none.
    """

    __slots__ = ("bounds", "counts", "longest", "sum")

    def __init__(self, bounds: tuple[float, ...] = LONG) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.longest = 0.0

    @property
    def count(self) -> int:
        """How many durations there are."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Add one duration."""
        seconds = max(0.0, seconds)
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds
        self.longest = max(self.longest, seconds)

    def add_since(
        self, moments: Sequence[datetime], now: datetime | None = None
    ) -> None:
        """Add the time since each of these moments, all in one time zone.

        Cheaper than so many calls of `add`. Of more than 64 moments, some stand for all
        in `sum`; everything else is exact.
        """
        if not moments:
            return
        if now is None:
            now = datetime.now(UTC)
        total = len(moments)
        first, last = min(moments), max(moments)
        if last > now:
            moments = [min(moment, now) for moment in moments]
            first, last = min(moments), now
        longest = (now - first).total_seconds()
        bucket = bisect_left(self.bounds, (now - last).total_seconds())
        if bucket == bisect_left(self.bounds, longest):
            self.counts[bucket] += total
        else:
            moments = sorted(moments)
            left = total
            # What began at this moment or later is in this bucket, or one before it.
            for bucket, bound in enumerate(self.bounds):
                begun = bisect_left(moments, now - timedelta(seconds=bound), 0, left)
                self.counts[bucket] += left - begun
                left = begun
            self.counts[-1] += left
        sample = moments[:: -(-total // _SAMPLE)]
        waited = sum((now - moment).total_seconds() for moment in sample)
        self.sum += waited * total / len(sample)
        self.longest = max(self.longest, longest)

    def quantile(self, share: float) -> float | None:
        """Return the duration that this share of all is within; None without any.

        It is interpolated within a bucket, and so approximate.
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
