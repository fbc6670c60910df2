"""Claimed deliveries not handed out yet: tenants take turns, each in order."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from outbox.message import Message


class Item(Protocol):
    """An item that carries a message."""

    @property
    def message(self) -> Message: ...  # noqa: D102


T = TypeVar("T", bound=Item)


class Ready(Generic[T]):
    """Items by tenant; those without a tenant take turns like one more tenant."""

    def __init__(self) -> None:
        # The tenant served last is at the end.
        self._lines: OrderedDict[str | None, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        """Count all items."""
        return sum(map(len, self._lines.values()))

    @property
    def tenants(self) -> list[str]:
        """The tenants that have items."""
        return [tenant for tenant in self._lines if tenant is not None]

    def stocked(self, least: int) -> list[str]:
        """Return the tenants that have at least so many items."""
        return [it for it in self.tenants if len(self._lines[it]) >= least]

    def has_only(self, tenants: Collection[str]) -> bool:
        """Return whether there are items and all of them belong to these tenants."""
        return bool(self._lines) and all(tenant in tenants for tenant in self._lines)

    def add(self, item: T) -> None:
        """Add an item behind those of its tenant."""
        self._lines.setdefault(item.message.tenant, deque()).append(item)

    def put_back(self, item: T, follows: Callable[[T], bool]) -> None:
        """Put an item ahead of its tenant's others, but behind those it follows."""
        line = self._lines.setdefault(item.message.tenant, deque())
        place = max(
            (n + 1 for n, other in enumerate(line) if follows(other)), default=0
        )
        line.insert(place, item)

    def take(self, limit: int, without: Collection[str]) -> list[T]:
        """Remove and return at most `limit` items, one per tenant in each round."""
        given: list[T] = []
        round_ = [tenant for tenant in self._lines if tenant not in without]
        while round_ and len(given) < limit:
            for tenant in round_[: limit - len(given)]:
                line = self._lines[tenant]
                given.append(line.popleft())
                self._lines.move_to_end(tenant)
                if not line:
                    del self._lines[tenant]
            round_ = [tenant for tenant in round_ if tenant in self._lines]
        return given

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove and return the unwanted items."""
        removed: list[T] = []
        for tenant, line in list(self._lines.items()):
            found = [item for item in line if unwanted(item)]
            if not found:
                continue
            removed += found
            kept = deque(item for item in line if not unwanted(item))
            if kept:
                self._lines[tenant] = kept
            else:
                del self._lines[tenant]
        return removed
