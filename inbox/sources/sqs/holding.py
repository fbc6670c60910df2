"""The messages that an SQS source holds: ready, delivered to the consumer, or waiting.

In a FIFO queue, a message that waits for its retry holds back later ones of its group.
SQS delivers several messages of a group together, and they can't be returned in order
without counting another receive. So they wait here, invisible to other replicas.
"""

import heapq
import time
from collections import deque
from collections.abc import Iterable

from inbox.sources.sqs.queue import Received


class Holding:
    """The messages that this replica holds. For one event loop."""

    def __init__(self) -> None:
        self.ours: dict[Received, None] = {}
        """All held messages, in the order of their arrival."""
        self.waiting: dict[Received, float] = {}
        """When each waiting message is due, by the monotonic clock."""
        self._ready: deque[Received] = deque()
        self._due: list[tuple[float, int, Received]] = []

    def add(self, received: Iterable[Received]) -> None:
        """Hold newly received messages."""
        for item in received:
            self.ours[item] = None
            self._ready.append(item)

    def drop(self, item: Received) -> None:
        """Stop holding a message that is settled, returned or lost."""
        self.ours.pop(item, None)
        self.waiting.pop(item, None)
        if item in self._ready:
            self._ready.remove(item)

    def lose(self, item: Received) -> None:
        """Drop a lost message, and ready ones that would overtake its redelivery."""
        self.drop(item)
        if item.line is not None:
            for other in list(self._ready):
                if other.line == item.line and other.number > item.number:
                    self.drop(other)

    def put_back(self, item: Received) -> None:
        """Make a message ready again, ahead of later ones of its line."""
        if item not in self.ours:
            return
        for place, other in enumerate(self._ready):
            if item.line == other.line and other.number > item.number:
                self._ready.insert(place, item)
                return
        self._ready.appendleft(item)

    def wait(self, item: Received, seconds: float) -> None:
        """Delay a message, and with it the later ones of its line."""
        if item in self.ours:
            due = min(time.monotonic() + seconds, item.ours_until)
            self.waiting[item] = due
            heapq.heappush(self._due, (due, item.number, item))

    def take(self, limit: int) -> list[Received]:
        """Return at most `limit` messages that can be delivered now."""
        self._wake()
        now = time.monotonic()
        first: dict[tuple[str, str] | None, int] = {}
        for item in self.waiting:
            first[item.line] = min(item.number, first.get(item.line, item.number))
        taken: list[Received] = []
        kept: list[Received] = []
        while self._ready and len(taken) < limit:
            item = self._ready.popleft()
            if item.until <= now:
                self.lose(item)
                continue
            blocker = None if item.line is None else first.get(item.line)
            if blocker is not None and blocker < item.number:
                kept.append(item)
            else:
                taken.append(item)
        self._ready.extendleft(reversed(kept))
        return taken

    def next_due(self) -> float | None:
        """Return when the next waiting message is due; None if none waits."""
        while self._due and self._due[0][2] not in self.waiting:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def _wake(self) -> None:
        now = time.monotonic()
        while (due := self.next_due()) is not None and due <= now:
            item = heapq.heappop(self._due)[2]
            del self.waiting[item]
            self.put_back(item)
