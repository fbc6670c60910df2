"""Claimed deliveries not handed out yet: priorities and tenants take turns."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from pillarbox.outbox.lane import PRIORITIES, Lines, Priority
from pillarbox.outbox.message import Message


class Item(Protocol):
    """An item that carries a message."""

    @property
    def message(self) -> Message: ...  # noqa: D102


T = TypeVar("T", bound=Item)


class Ready(Generic[T]):
    """Items by priority and tenant.

    Priorities take turns by weight, and the tenants of each take turns; those without
    a tenant are like one more tenant.
    """

    def __init__(self) -> None:
        # The tenant served last is at the end.
        self._rings: Lines[OrderedDict[str | None, deque[T]]] = Lines(OrderedDict)

    def __len__(self) -> int:
        """Count all items."""
        return self._counts().total()

    def stocked(self, least: int) -> list[str]:
        """Return the tenants that have at least this many items."""
        counts = self._counts().items()
        return [it for it, count in counts if it is not None and count >= least]

    def has_only(
        self, tenants: Collection[str], priorities: Collection[Priority] = ()
    ) -> bool:
        """Return whether there are items and all of them belong to one of these."""
        others = self._counts(priorities)
        return bool(self._rings.waiting()) and all(it in tenants for it in others)

    def _counts(self, left_out: Collection[Priority] = ()) -> Counter[str | None]:
        counts: Counter[str | None] = Counter()
        for priority in self._rings.waiting(left_out):
            ring = self._rings[priority]
            counts.update({tenant: len(line) for tenant, line in ring.items()})
        return counts

    def _line(self, item: T) -> deque[T]:
        message = item.message
        return self._rings[message.priority].setdefault(message.tenant, deque())

    def add(self, item: T) -> None:
        """Add an item behind those of its priority and tenant."""
        self._line(item).append(item)

    def put_back(self, item: T, follows: Callable[[T], bool]) -> None:
        """Put an item ahead of its line's others, but behind those it follows."""
        line = self._line(item)
        place = max(
            (n + 1 for n, other in enumerate(line) if follows(other)), default=0
        )
        line.insert(place, item)

    def take(
        self, limit: int, tenants: Collection[str], left_out: Collection[Priority] = ()
    ) -> list[T]:
        """Remove and return at most `limit` items of other tenants and priorities."""
        given: list[T] = []
        while len(given) < limit:
            stuck = {
                it
                for it in PRIORITIES
                if it in left_out or all(map(tenants.__contains__, self._rings[it]))
            }
            ring = self._rings.next(stuck)
            if ring is None:
                break
            tenant = next(it for it in ring if it not in tenants)
            given.append(ring[tenant].popleft())
            ring.move_to_end(tenant)
            if not ring[tenant]:
                del ring[tenant]
        return given

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return the unwanted items."""
        removed: list[T] = []
        for ring in self._rings:
            for tenant, line in list(ring.items()):
                found = [item for item in line if unwanted(item)]
                removed += found
                kept = deque(item for item in line if not unwanted(item))
                ring[tenant] = kept
                if not kept:
                    del ring[tenant]
        return removed
