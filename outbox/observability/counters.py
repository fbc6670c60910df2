"""A process's counters since it started, by topic; a heartbeat writes them to its row.

The page computes rates from them: see `pillarbox.outbox.web.history`.
"""

import json
from typing import Final

from pillarbox.outbox.cloudevents.raw_text import storable
from pillarbox.outbox.observability.latency import Latencies

MOST_TOPICS: Final = 30
OTHERS: Final = "(others)"
"""The topics after the first `MOST_TOPICS`, and what isn't the name of one."""
_LONGEST: Final = 200


class TopicCounters:
    """Counts what a process has done and what failed. For one event loop."""

    def __init__(self) -> None:
        self._topics: dict[str, tuple[list[int], Latencies]] = {}

    def done(self, topic: str, count: int = 1) -> None:
        """Count messages that were published or handled."""
        self._of(topic)[0][0] += count

    def took(self, topic: str, seconds: float) -> None:
        """Add the time of a message from its commit to its end."""
        self._of(topic)[1].add(seconds)

    def failed(self, topic: str) -> None:
        """Count an attempt that failed."""
        self._of(topic)[0][1] += 1

    def as_json(self) -> str:
        """Return `{topic: [done, failed, counts of the buckets]}`."""
        return json.dumps(
            {
                topic: [*counts, latencies.counts]
                for topic, (counts, latencies) in self._topics.items()
            }
        )

    def _of(self, topic: str) -> tuple[list[int], Latencies]:
        found = self._topics.get(topic)
        if found is None:
            is_shown = len(topic) <= _LONGEST and storable(topic) == topic
            topic = topic if is_shown and len(self._topics) < MOST_TOPICS else OTHERS
            found = self._topics.setdefault(topic, ([0, 0], Latencies()))
        return found
