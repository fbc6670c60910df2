"""Fair scheduling: decides which waiting message gets the next free slot.

There are four levels: queues get slots by their weights, the priorities of a queue by
theirs, the tenants of a priority take turns, and within a tenant messages are served in
order of arrival. No slot stays free while a message may use it. So a flood of messages
delays only its own tenant, priority and queue.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

from pillarbox.outbox.lane import PRIORITIES, Lines, Priority

Tenant: TypeAlias = str | None
_Line: TypeAlias = deque[asyncio.Future[None]]


class Waiting:
    """The messages that wait in one queue, by priority and tenant.

    Attributes:
        rings: of a priority's tenants, the most recently served one is at the end.
    """

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.credit = weight
        self.rings: Lines[OrderedDict[Tenant, _Line]] = Lines(OrderedDict)


class FairScheduler:
    """Grants slots to the handlers of one run of a consumer. For one event loop.

    Args:
        max_in_flight: the number of slots.
        weights: each queue's share of the slots while other queues also want slots.
        max_per_tenant: the number of slots that one tenant can hold at once; messages
            without a tenant are not limited.
        on_capped: called when `capped` may have changed.
    """

    def __init__(
        self,
        max_in_flight: int,
        weights: Mapping[str, int],
        *,
        max_per_tenant: int | None = None,
        on_capped: Callable[[], None] = lambda: None,
    ) -> None:
        self._free = max_in_flight
        self._max_per_tenant = max_per_tenant
        self._on_capped = on_capped
        self._queues = {name: Waiting(weight) for name, weight in weights.items()}
        # The most recently served queue is at the end.
        self._order = deque(self._queues.values())
        self._taken: Counter[Tenant] = Counter()

    @property
    def in_flight(self) -> int:
        """The number of slots in use."""
        return self._taken.total()

    def capped(self, queue: str) -> int:
        """Count the messages that wait because their tenant is at its limit."""
        return self._count_capped(queue).total()

    def tenants_over_share(self, queue: str) -> set[str]:
        """Return the tenants with more such messages than slots that they can hold."""
        least = self._max_per_tenant or 0
        capped = self._count_capped(queue)
        return {t for t, count in capped.items() if t is not None and count > least}

    def _count_capped(self, queue: str) -> Counter[Tenant]:
        counts: Counter[Tenant] = Counter()
        if self._max_per_tenant is not None:
            for ring in self._queues[queue].rings:
                full = filter(self._is_full, ring)
                counts.update({tenant: len(ring[tenant]) for tenant in full})
        return counts

    async def acquire(self, name: str, priority: Priority, tenant: Tenant) -> None:
        """Wait for a slot in a queue, and hold it until `release`."""
        queue = self._queues[name]
        if self._free and not (self._is_full(tenant) or self._is_wanted()):
            self._take(queue, tenant)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = queue.rings[priority].setdefault(tenant, deque())
        line.append(granted)
        if self._is_full(tenant):
            self._on_capped()
        self._grant()
        if granted.done():
            return
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                with suppress(ValueError):
                    line.remove(granted)
            else:
                self.release(tenant)
            raise

    def release(self, tenant: Tenant) -> None:
        """Release a slot that was acquired for this tenant."""
        was_full = self._is_full(tenant)
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._grant()
        if was_full:
            self._on_capped()

    def _grant(self) -> None:
        while self._free:
            queue = self._next_queue()
            if queue is None or not (ring := queue.rings.next(self._stuck(queue))):
                return
            tenant = next(it for it in ring if not self._is_full(it))
            line = ring[tenant]
            granted = line.popleft() if line else None
            if line:
                ring.move_to_end(tenant)
            else:
                del ring[tenant]
            if granted is None or granted.cancelled():
                continue
            granted.set_result(None)
            self._take(queue, tenant)

    def _is_wanted(self) -> bool:
        """Whether a message waits that is eligible for a slot."""
        return any(queue.rings.waiting(self._stuck(queue)) for queue in self._order)

    def _stuck(self, queue: Waiting) -> list[Priority]:
        """Return the priorities of which all tenants are at their limit, if any."""
        return [it for it in PRIORITIES if all(map(self._is_full, queue.rings[it]))]

    def _take(self, queue: Waiting, tenant: Tenant) -> None:
        if not queue.credit:
            self._renew_credits()
        self._order.remove(queue)
        self._order.append(queue)
        queue.credit -= 1
        self._free -= 1
        self._taken[tenant] += 1
        if self._is_full(tenant):
            self._on_capped()

    def _next_queue(self) -> Waiting | None:
        """Choose by weight among the queues that have a message eligible for a slot."""
        waiting = [it for it in self._order if it.rings.waiting(self._stuck(it))]
        if not waiting:
            return None
        if not any(queue.credit for queue in waiting):
            self._renew_credits()
        return next(queue for queue in waiting if queue.credit)

    def _renew_credits(self) -> None:
        for queue in self._order:
            queue.credit = queue.weight

    def _is_full(self, tenant: Tenant) -> bool:
        return (
            tenant is not None
            and self._max_per_tenant is not None
            and self._taken[tenant] >= self._max_per_tenant
        )
