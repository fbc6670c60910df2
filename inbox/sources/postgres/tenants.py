"""When and where to search for tenants that are hidden behind the backlogs of others.

Claims read in order of seq. So if more is waiting than one claim returns, claims alone
would find a tenant's late messages only after all earlier ones are done. Therefore a
look goes from tenant to tenant, skips those with deliveries in memory, and claims the
first deliveries of each other tenant.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

_MAX_STEPS: Final = 64
_MIN_ROWS_EACH: Final = 4
_INTERVAL: Final = 0.25
# Limits memory: searches add nothing to this many claims' worth of deliveries.
_MAX_CLAIMS: Final = 4


class TenantsFound(NamedTuple):
    """What a search has found.

    Attributes:
        steps: the tenants that it has skipped or found, in order.
        tenants: those of its messages.
        is_cut: whether it has reached its limit of messages or bytes.
    """

    steps: Sequence[str] = ()
    tenants: Sequence[str] = ()
    is_cut: bool = False


class Tenants:
    """Schedules the searches of one replica. Pure bookkeeping, for one event loop.

    Attributes:
        after: the tenant after which the next search begins.
        rows_each: the maximum number of rows that a search claims for each tenant.
        max_steps: the maximum number of tenants that a search skips or finds.
    """

    def __init__(
        self, prefetch: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.after = ""
        self.max_steps = _MAX_STEPS
        self.rows_each = max(_MIN_ROWS_EACH, prefetch // 16)
        self._prefetch = prefetch
        self._clock = clock
        self._deep = False
        self._more: set[str] = set()
        self._handed_out = 0
        self._found = False
        self._search_at = 0.0

    def claimed(self, tenants: Sequence[str | None], *, full: bool) -> None:
        """Record a claim; a full one may have left behind deliveries of its tenants."""
        self._deep = full
        known: set[str] = self._more if full else set()
        self._more = known | {it for it in tenants if full and it is not None}
        if self._more or self._found:
            self._search_at = 0.0

    def handed_out(self, count: int) -> None:
        """Record that `count` deliveries were handed out."""
        self._handed_out += count

    def is_due(self, ready: int, tenants: Sequence[str], *, stuck: bool) -> bool:
        """Return whether to search now.

        Args:
            ready: how many deliveries are in memory.
            tenants: the tenants of these.
            stuck: whether all of them belong to tenants that are left out.
        """
        if ready >= _MAX_CLAIMS * self._prefetch:
            return False
        is_time = self._clock() >= self._search_at
        if stuck:
            return is_time
        if not self._deep:
            return False
        # Only a few searches per claim: cost must not grow with the number of tenants.
        some = self._handed_out >= self._prefetch // 4
        short = some and not self._more.issubset(tenants)
        return short or is_time

    def searched(self, found: TenantsFound, ready: Collection[str]) -> None:
        """Record a search; `ready` had deliveries in memory before."""
        rows = Counter(found.tenants)
        self._found = bool(rows)
        self._handed_out = 0
        self._more &= {*ready, *rows}
        self._more |= {tenant for tenant in rows if rows[tenant] >= self.rows_each}
        steps = found.steps
        goes_on = bool(steps) and (found.is_cut or len(set(steps)) >= self.max_steps)
        self.after = steps[-1] if goes_on else ""
        self._search_at = self._clock() + (0.0 if goes_on else _INTERVAL)
        if rows:
            share = self._prefetch // (2 * len(rows))
            self.rows_each = max(_MIN_ROWS_EACH, share)
