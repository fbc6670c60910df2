"""Claimed deliveries not handed out yet: priorities and tenants take turns."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from outbox.lane import Priority, Turns
from outbox.message import Message


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
        self._lines: dict[Priority, OrderedDict[str | None, deque[T]]] = {}
        self._turns = Turns()

    def __len__(self) -> int:
        """Count all items."""
        return self._counts().total()

    def stocked(self, least: int) -> list[str]:
        """Return the tenants that have at least so many items."""
        counts = self._counts().items()
        return [it for it, count in counts if it is not None and count >= least]

    def has_only(
        self, tenants: Collection[str], priorities: Collection[Priority] = ()
    ) -> bool:
        """Return whether there are items and all of them belong to one of these."""
        others = self._counts(priorities)
        return bool(self._lines) and all(tenant in tenants for tenant in others)

    def _counts(self, without: Collection[Priority] = ()) -> Counter[str | None]:
        counts: Counter[str | None] = Counter()
        for priority, lines in self._lines.items():
            if priority in without:
                continue
            for tenant, line in lines.items():
                counts[tenant] += len(line)
        return counts

    def _line(self, item: T) -> deque[T]:
        message = item.message
        lines = self._lines.setdefault(message.priority, OrderedDict())
        return lines.setdefault(message.tenant, deque())

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
        self,
        limit: int,
        without: Collection[str],
        left_out: Collection[Priority] = (),
    ) -> list[T]:
        """Remove and return at most `limit` items, one per tenant in each round.

        Args:
            without: tenants to skip.
            left_out: priorities to skip.
        """
        given: list[T] = []
        rounds = {
            priority: deque(tenant for tenant in lines if tenant not in without)
            for priority, lines in self._lines.items()
            if priority not in left_out
        }
        while len(given) < limit and (rounds := {p: r for p, r in rounds.items() if r}):
            priority = self._turns.next(rounds)
            lines, tenant = self._lines[priority], rounds[priority].popleft()
            line = lines[tenant]
            given.append(line.popleft())
            lines.move_to_end(tenant)
            if line:
                rounds[priority].append(tenant)
            else:
                self._drop(priority, tenant)
        return given

    def _drop(self, priority: Priority, tenant: str | None) -> None:
        """Drop a line that is empty."""
        del self._lines[priority][tenant]
        if not self._lines[priority]:
            del self._lines[priority]

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return the unwanted items."""
        removed: list[T] = []
        for priority, lines in list(self._lines.items()):
            for tenant, line in list(lines.items()):
                found = [item for item in line if unwanted(item)]
                if not found:
                    continue
                removed += found
                kept = deque(item for item in line if not unwanted(item))
                lines[tenant] = kept
                if not kept:
                    self._drop(priority, tenant)
        return removed
