"""The messages that a source keeps in memory.

A `Backlog` holds messages that were fetched and aren't delivered yet: priorities take
turns by weight, and within a priority messages are in order. A key waits while one of
its messages waits: later messages stay behind it, and all other keys proceed. Messages
of a paused topic stay, too; they leave room for others, since no more of that topic is
read.

A broker delivers in order of arrival. So a source that shares its messages with no
other replica reads ahead, and finds urgent messages behind many others.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import chain, count
from typing import Final, Generic, TypeVar

from pillarbox.inbox.source import Arrived
from pillarbox.outbox.lane import Lines, Priority

READ_AHEAD: Final = 10_000
"""How many messages a source holds before it stops reading ahead."""
_AHEAD_BYTES: Final = 32 * 1024 * 1024
AT_ONCE: Final = 250
"""How many messages it reads ahead with one call, at most."""
_RECENT: Final = 100
"""Over about how many messages the usual size is measured."""
LEFT_OUT: Final = 0.05
"""The longest wait of a source, in seconds, while it leaves something out: only the
next call can include that again."""


T = TypeVar("T", bound=Arrived)


class Backlog(Generic[T]):
    """Items of each priority by place, in whatever order they are added.

    Those with the same place keep the order in which they were added.
    For one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: Lines[list[tuple[int, int, T]]] = Lines(list)
        self._left_out: Collection[Priority] = ()
        self.is_paused: Callable[[str], bool] = lambda _: False
        self._paused: dict[str, list[T]] = {}
        self._count = self._bytes = 0
        self._usual_bytes: float | None = None
        self._deferred: dict[str | int, list[tuple[int, int, T]]] = {}
        self._due: dict[str | int, float] = {}
        self._timers: list[tuple[float, int, str | int]] = []
        self._number = count()

    def __len__(self) -> int:
        """Count all items, including those that are waiting."""
        return self._count + sum(map(len, self._paused.values()))

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, in no order."""
        heaps = chain(self._ready, self._deferred.values())
        unpaused = (item for *_, item in chain.from_iterable(heaps))
        return chain(unpaused, *self._paused.values())

    @property
    def room(self) -> int:
        """How many more to read ahead at once: none until messages' size is known."""
        if self._usual_bytes is None:
            return 0
        left = (_AHEAD_BYTES - self._bytes) / max(1.0, self._usual_bytes)
        return max(0, min(AT_ONCE, READ_AHEAD - self._count, int(left)))

    def add(self, item: T) -> None:
        """Add an item at its place; if its key is waiting, the item waits, too."""
        waiting = self._deferred.get(_name(item))
        if waiting is None:
            waiting = self._ready[item.message.priority]
        self._push(waiting, item)

    def defer(self, item: T, delay: float) -> None:
        """Make an item and its key wait for at least `delay` seconds."""
        name = _name(item)
        due = max(self._clock() + delay, self._due.get(name, 0.0))
        self._due[name] = due
        heapq.heappush(self._timers, (due, next(self._number), name))
        self._push(self._deferred.setdefault(name, []), item)

    def take(self, limit: int) -> list[T]:
        """Remove and return up to `limit` items, skipping those that wait."""
        self._wake()
        taken: list[T] = []
        while len(taken) < limit and (line := self._ready.next(self._left_out)):
            entry = heapq.heappop(line)
            item = entry[-1]
            waiting = self._deferred.get(_name(item))
            if waiting is not None:
                heapq.heappush(waiting, entry)
                continue
            self._count -= 1
            self._bytes -= len(item.message.payload)
            topic = item.message.topic
            is_paused = self.is_paused(topic)
            (self._paused.setdefault(topic, []) if is_paused else taken).append(item)
        return taken

    @property
    def ready(self) -> bool:
        """Whether `take` has any items to check."""
        self._wake()
        return bool(self._ready.waiting(self._left_out))

    @property
    def due(self) -> bool:
        """Whether any items wait for no retry, even if `take` leaves them out."""
        self._wake()
        return bool(self._ready.waiting())

    def leave_out(self, _: Collection[str], priorities: Collection[Priority]) -> None:
        """Let `take` skip these priorities until the next call."""
        self._left_out = priorities

    def leave_out_paused(self, is_paused: Callable[[str], bool]) -> bool:
        """Let `take` skip messages of paused topics; see `Abilities.pauses`."""
        self.is_paused = is_paused
        return True

    def patience(self, seconds: float) -> float:
        """Return how long to wait for news at most."""
        return min(seconds, LEFT_OUT) if self._left_out else seconds

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
        ready = chain.from_iterable(self._ready)
        behind = [entry for entry in ready if _name(entry[-1]) in self._due]
        return [
            (item, self._due[_name(item)] - now)
            for entries in (behind, *self._deferred.values())
            for *_, item in entries
        ]

    def remove(self, is_one: Callable[[T], bool]) -> None:
        """Remove items; a key is ready at once if none of its items waits any more."""
        self._count = self._bytes = 0
        for heap in (*self._ready, *self._deferred.values()):
            heap[:] = [entry for entry in heap if not is_one(entry[-1])]
            heapq.heapify(heap)
            self._count += len(heap)
            self._bytes += sum(len(item.message.payload) for *_, item in heap)
        self._deferred = {name: heap for name, heap in self._deferred.items() if heap}
        for items in self._paused.values():
            items[:] = [item for item in items if not is_one(item)]
        for name in self._due.keys() - self._deferred.keys():
            del self._due[name]

    def _wake(self) -> None:
        for topic in [it for it in self._paused if not self.is_paused(it)]:
            for item in self._paused.pop(topic):
                self.add(item)
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            due, _, name = heapq.heappop(self._timers)
            if self._due.get(name) != due:
                continue  # it was deferred again, for longer
            del self._due[name]
            for entry in self._deferred.pop(name):
                heapq.heappush(self._ready[entry[-1].message.priority], entry)

    def _push(self, heap: list[tuple[int, int, T]], item: T) -> None:
        size = len(item.message.payload)
        self._count += 1
        self._bytes += size
        usual = size if self._usual_bytes is None else self._usual_bytes
        self._usual_bytes = usual + (size - usual) / _RECENT
        heapq.heappush(heap, (item.place, next(self._number), item))


def _name(item: Arrived) -> str | int:
    return id(item) if item.key is None else item.key
