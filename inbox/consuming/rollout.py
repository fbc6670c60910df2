"""How long messages wait for a replica that has a handler for them.

While a rolling deploy adds or removes a handler, replicas with and without it receive
the same messages. A replica without the handler doesn't count that as a failure: it
hands the message back, until the deploy should have ended. An encoded message is handed
back for as long as the consumer has no codec.
"""

import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Final

from pillarbox.inbox.handlers.routes import overlap
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.errors import shorten

_SHORTEST: Final = 1.0
_LONGEST: Final = 60.0
_LAST: Final = 0.1


class Rollout:
    """Since when this process receives messages that it has no handler for.

    Args:
        patience: how long they are handed back, from the first one of a topic.
        clock: returns the time in seconds.

    Attributes:
        since: when the first message of each topic came.
    """

    def __init__(
        self, patience: timedelta, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience: Final = patience
        self._clock = clock
        self.since: Final[BoundedDict[str, float]] = BoundedDict()

    def wait(self, topic: str) -> timedelta | None:
        """Return how long a message of this topic should wait; None: no longer.

        The wait grows with the rollout, so that no message comes back often.
        """
        now = self._clock()
        lasted = now - self.since.setdefault(topic, now)
        left = self.patience.total_seconds() - lasted
        if left <= 0:
            return None
        wait = min(max(lasted / 2, _SHORTEST), _LONGEST)
        return timedelta(seconds=min(wait, max(left, _LAST)))


def warn_unhandled(subscribed: Iterable[str], topics: Collection[str]) -> list[str]:
    """Return a warning if a consumer's reader gets more than its handlers take."""
    return [
        f"no handler for {shorten(topic)}, to which the consumer is subscribed:"
        " finish the rolling deploy, or end all its subscriptions with pillarbox"
        " readers drop"
        for topic in subscribed
        if topic not in topics and not any(overlap(topic, each) for each in topics)
    ]


def begins_at_oldest(group: str, messages: int) -> str:
    """Return the warning about a new group that begins at old messages."""
    return (
        f"new consumer group {group} starts at the oldest of {messages:,} messages: a"
        " renamed consumer would handle them all again"
    )
