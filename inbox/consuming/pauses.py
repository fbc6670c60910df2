"""The topics of a consumer that are paused: none of their handlers starts.

The consumer learns of pauses with each beat of its row; see `observability/presence`.
"""

from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Final

from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.source import Delivery

_LOOK: Final = timedelta(seconds=1)
_AWAY: Final = timedelta(seconds=30)


class Pauses:
    """The pauses of one consumer. For one event loop.

    Attributes:
        topics: paused topics, and prefixes followed by `*`.
        kept: the queues whose sources keep messages of paused topics.
    """

    def __init__(self) -> None:
        self.topics: Collection[str] = ()
        self.kept: set[str] = set()

    def has(self, topic: str) -> bool:
        """Return whether a topic, or all topics of a prefix, are paused."""
        return any(
            topic == it or (it.endswith("*") and topic.startswith(it[:-1]))
            for it in self.topics
        )

    def has_all(self, topics: Iterable[str]) -> bool:
        """Return whether all of these topics are paused."""
        return bool(self.topics) and all(map(self.has, topics))

    async def wait(self, delivery: Delivery, dispatcher: Dispatcher) -> bool | None:
        """Let a message wait while it is paused: in its source, if that keeps it.

        Otherwise it waits here, and its key with it. If messages like this
        one leave too little room for other topics, it is handed back to the source.

        Returns:
            None if the pause has ended, True if the message was handed back, and False
            if the consumer stops first.
        """
        while self.has(delivery.message.topic):
            is_kept = dispatcher.queue in self.kept
            if (is_kept or dispatcher.is_crowded) and await dispatcher.hand_back(
                delivery, None if is_kept else _AWAY
            ):
                return True
            if not await dispatcher.park(_LOOK):
                return False
        return None
