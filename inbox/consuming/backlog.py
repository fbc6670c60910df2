"""The messages that a source keeps in memory.

A `Backlog` holds, in order, messages that were fetched and aren't delivered yet. A key
waits while one of its messages waits: later messages stay behind it, and all other keys
proceed.
"""

import asyncio
import heapq
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Generic, Protocol, TypeVar


class Item(Protocol):
    """An item that can wait.

    Attributes:
        place: its position in the order; items with the same place keep the order in
            which they were added.
        key: None for an item that doesn't need to be kept in order.
    """

    @property
    def place(self) -> int: ...  # noqa: D102

    @property
    def key(self) -> str | None: ...  # noqa: D102


T = TypeVar("T", bound=Item)


class Backlog(Generic[T]):
    """Items ordered by place, whatever order they are added in. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: list[tuple[int, int, T]] = []
        self._deferred: dict[str | int, list[tuple[int, int, T]]] = {}
        self._due: dict[str | int, float] = {}
        self._timers: list[tuple[float, int, str | int]] = []
        self._number = count()

    def __len__(self) -> int:
        """Count all items, including those that are waiting."""
        return len(self._ready) + sum(map(len, self._deferred.values()))

    def add(self, item: T) -> None:
        """Add an item at its place; if its key is waiting, the item waits, too."""
        name = _name(item)
        where = self._deferred.get(name, self._ready)
        self._push(where, item)

    def defer(self, item: T, delay: float) -> None:
        """Make an item and its key wait for at least `delay` seconds."""
        name = _name(item)
        due = max(self._clock() + delay, self._due.get(name, 0.0))
        self._due[name] = due
        heapq.heappush(self._timers, (due, next(self._number), name))
        self._push(self._deferred.setdefault(name, []), item)

    def take(self, limit: int) -> list[T]:
        """Remove and return up to `limit` items, in order, skipping those that wait."""
        self._wake()
        taken: list[T] = []
        while self._ready and len(taken) < limit:
            entry = heapq.heappop(self._ready)
            item = entry[-1]
            waiting = self._deferred.get(_name(item))
            if waiting is None:
                taken.append(item)
            else:
                heapq.heappush(waiting, entry)
        return taken

    @property
    def ready(self) -> bool:
        """Whether `take` has any items to check."""
        self._wake()
        return bool(self._ready)

    def seconds_until_due(self) -> float | None:
        """Return the seconds until the next waiting item is due; None if none waits."""
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - self._clock())

    async def wait_for(self, news: asyncio.Event, seconds: float) -> None:
        """Wait for an event, but no longer than until the next waiting item is due."""
        due = self.seconds_until_due()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds if due is None else min(seconds, due)):
                await news.wait()

    def waiting(self) -> list[tuple[T, float]]:
        """Return waiting items, with the seconds left; some wait behind their key."""
        self._wake()
        now = self._clock()
        behind = [entry for entry in self._ready if _name(entry[-1]) in self._due]
        return [
            (item, self._due[_name(item)] - now)
            for entries in (behind, *self._deferred.values())
            for *_, item in entries
        ]

    def forget(self, key: str) -> None:
        """Remove the items of a key that waits; another one is ready at once."""
        self._deferred.pop(key, None)
        self._due.pop(key, None)

    def clear(self) -> None:
        """Remove all items."""
        self._ready.clear()
        self._deferred.clear()
        self._due.clear()
        self._timers.clear()

    def _wake(self) -> None:
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            due, _, name = heapq.heappop(self._timers)
            if self._due.get(name) != due:
                continue  # it was deferred again, for longer
            del self._due[name]
            for entry in self._deferred.pop(name):
                heapq.heappush(self._ready, entry)

    def _push(self, heap: list[tuple[int, int, T]], item: T) -> None:
        heapq.heappush(heap, (item.place, next(self._number), item))


def _name(item: Item) -> str | int:
    return id(item) if item.key is None else item.key
