"""What a source has fetched and not handed over, in order, with keys held back.

A delivery that waits for its time holds back later ones of its key; those without a
key wait alone.
"""

import heapq
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

E = TypeVar("E")


class Holding(Generic[E]):
    """Entries ready to be handed over, and those that wait. For one event loop.

    Args:
        key_of: gives an entry's key; None means that nothing waits for it.
        place_of: gives an entry's place in the order, the same each time.
    """

    def __init__(
        self, *, key_of: Callable[[E], str | None], place_of: Callable[[E], int]
    ) -> None:
        self._key_of = key_of
        self._place_of = place_of
        self._ready: list[tuple[int, int, E]] = []
        self._waiting: dict[object, tuple[float, list[E]]] = {}
        self._count = 0

    def add(self, entry: E) -> None:
        """Take an entry that came, or came back."""
        key = self._key_of(entry)
        if key is not None and key in self._waiting:
            self._waiting[key][1].append(entry)
            return
        self._count += 1
        heapq.heappush(self._ready, (self._place_of(entry), self._count, entry))

    def put_aside(self, entry: E, delay: timedelta) -> None:
        """Let an entry, and what comes of its key, wait."""
        due = time.monotonic() + delay.total_seconds()
        key = self._key_of(entry)
        if key is None:
            self._waiting[id(entry)] = due, [entry]
            return
        before, entries = self._waiting.get(key, (due, []))
        followers = [item for item in self._ready if self._key_of(item[2]) == key]
        if followers:
            self._ready = [i for i in self._ready if self._key_of(i[2]) != key]
            heapq.heapify(self._ready)
        entries = [*entries, entry, *(item[2] for item in followers)]
        self._waiting[key] = max(before, due), entries

    def take(self, limit: int) -> list[E]:
        """Give at most `limit` of those that are ready, in their order."""
        now = time.monotonic()
        due = [name for name, (at, _) in self._waiting.items() if at <= now]
        for name in due:
            for entry in self._waiting.pop(name)[1]:
                self.add(entry)
        size = min(limit, len(self._ready))
        return [heapq.heappop(self._ready)[2] for _ in range(size)]

    def patience(self, most: float) -> float:
        """Give the seconds until something that waits is due, at most so many."""
        if not self._waiting:
            return most
        soonest = min(due for due, _ in self._waiting.values())
        return max(0.0, min(most, soonest - time.monotonic()))

    def waiting(self) -> list[tuple[E, float]]:
        """Give what waits, and for how many seconds more."""
        now = time.monotonic()
        return [
            (entry, max(0.0, due - now))
            for due, entries in self._waiting.values()
            for entry in entries
        ]
