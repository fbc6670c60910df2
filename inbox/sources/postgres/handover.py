"""Messages between the worker that claims them and the consumer that receives them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.inbox.sources.postgres.ready import Ready
from pillarbox.inbox.sources.postgres.tenants import Tenants, TenantsFound
from pillarbox.outbox.lane import Priority

_MAX_CLAIMS: Final = 4
"""The most messages that are ready, in claims, while some tenants are left out."""


class TenantSearch(NamedTuple):
    """Which tenants' messages to look for that lie behind those of others.

    Attributes:
        known: tenants to skip.
        after: the tenant after which to begin.
        max_steps: the maximum number of tenants to skip or find.
        rows_each: the maximum number of messages of each tenant.
    """

    known: Collection[str]
    after: str
    max_steps: int
    rows_each: int


class Handover:
    """Messages that were claimed, ready until they are received."""

    def __init__(self, prefetch: int) -> None:
        self.ready: Ready[HeldMessage] = Ready()
        self.some = asyncio.Event()
        self._prefetch = prefetch
        self.left_out: tuple[Collection[str], Collection[Priority]] = (), ()
        self._wanted = asyncio.Event()
        # So that a search brings as many messages of a tenant as a claim.
        self._tenants = Tenants(2 * prefetch)
        self._claimed: set[str] = set()
        """The tenant with the most messages in the last claim, if that left some."""
        self._known: set[str] = set()
        self._is_next = True

    async def wants_more(self, *, can_search: bool) -> TenantSearch | None:
        """Wait until more messages are wanted: the next ones, or those of tenants."""
        while True:
            ready = self.ready
            # Before they have none, as others are handed out during a search.
            stocked = ready.stocked(max(1, self._prefetch // 4))
            is_due = can_search and self._tenants.is_due(
                len(ready), stocked, stuck=ready.has_only(self.left_out[0])
            )
            lacks = self._claimed.difference(stocked)
            if is_due and (self._is_next or not (lacks or self._is_short())):
                break
            if is_due or self._is_short():
                self._is_next = True
                return None
            self._wanted.clear()
            await self._wanted.wait()
        # A claim follows: it may find messages that no search can. It also brings
        # more of this tenant's, which cost less to settle.
        self._is_next, self._known = False, {*stocked, *self._claimed}
        return TenantSearch(
            {*self._known, *self.left_out[0]},
            self._tenants.after,
            self._tenants.max_steps,
            self._tenants.rows_each,
        )

    def claimed(self, tenants: Sequence[str | None], *, is_cut: bool) -> None:
        """Record a claim of the next messages: their tenants, and whether more wait."""
        most = Counter(it for it in tenants if is_cut and it is not None)
        self._claimed = {it for it, _ in most.most_common(1)}
        self._tenants.claimed(tenants, full=is_cut)

    def searched(self, found: TenantsFound) -> None:
        """Record a search for tenants."""
        self._tenants.searched(found, self._known)

    def _is_short(self) -> bool:
        if len(self.ready) >= _MAX_CLAIMS * self._prefetch:
            return False
        return not self.ready or self.ready.has_only(*self.left_out)

    def hand_over(self, messages: Sequence[HeldMessage]) -> None:
        """Take messages, those of a key in order."""
        for message in messages:
            self.ready.add(message)
        self.some.set()

    def take_back(self, message: HeldMessage) -> None:
        """Take a message again that was not started, ahead of others of its key."""
        key, place = message.message.key, message.place
        self.ready.put_back(
            message,
            lambda other: (
                key is not None and other.message.key == key and other.place < place
            ),
        )
        self.some.set()

    def withdraw(self, unwanted: Callable[[HeldMessage], bool]) -> list[HeldMessage]:
        """Remove and return the unwanted messages that were not started, in order."""
        return self.ready.remove(unwanted)

    def leave_out(
        self, tenants: Collection[str], priorities: Collection[Priority]
    ) -> None:
        """Hand out no messages of these, until the next call."""
        self.left_out = tenants, priorities
        self._wanted.set()
        self.some.set()

    def take(self, limit: int) -> list[HeldMessage]:
        """Hand out messages whose lanes were leased all the time."""
        self.some.clear()
        taken: list[HeldMessage] = []
        while len(taken) < limit:
            found = self.ready.take(limit - len(taken), *self.left_out)
            if not found:
                break
            taken += [message for message in found if message.begin()]
        self._tenants.handed_out(len(taken))
        self._wanted.set()
        return taken
