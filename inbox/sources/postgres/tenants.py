"""When and where to look for tenants that the floods of others hide.

Claims go by seq. So with more waiting than one claim gives, what a tenant added late
would be found when all before it is done. A look goes from tenant to tenant instead,
past those of which something is in memory already, and takes the first of each.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

_MAX_STEPS: Final = 64
_MIN_ROWS_EACH: Final = 4
_INTERVAL: Final = 0.25
# What is in memory is bounded: with that many claims' worth of it, no look adds more.
_MAX_CLAIMS: Final = 4


class Tenants:
    """Decides for one replica. Pure bookkeeping, for one event loop.

    Attributes:
        after: the tenant after which the next look begins.
        rows_each: how many rows of a tenant a look takes.
        max_steps: how many tenants it passes or finds.
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
        self._look_at = 0.0

    def claimed(self, tenants: Sequence[str | None], *, full: bool) -> None:
        """Learn from a claim; a full one left something of each behind, maybe."""
        self._deep = full
        self._more = {tenant for tenant in tenants if full and tenant is not None}
        if self._more or self._found:
            self._look_at = 0.0

    def handed_out(self, count: int) -> None:
        """Learn that so much less is in memory."""
        self._handed_out += count

    def is_due(self, ready: int, tenants: Sequence[str], *, stuck: bool) -> bool:
        """Return whether to look now.

        Args:
            ready: how much is in memory, of these `tenants`.
            stuck: nothing of it may be handed out.
        """
        if ready >= _MAX_CLAIMS * self._prefetch:
            return False
        if stuck:
            return True
        if not self._deep:
            return False
        # A few looks for each claim: what they cost must not grow with the tenants.
        some = self._handed_out >= self._prefetch // 4
        short = some and not self._more.issubset(tenants)
        return short or self._clock() >= self._look_at

    def looked(
        self,
        steps: Sequence[str],
        tenants: Sequence[str],
        *,
        ready: Sequence[str],
        cut: bool,
    ) -> None:
        """Learn from a look.

        Args:
            steps: the tenants it passed and found.
            tenants: those of the rows that it gave.
            ready: those of which something was in memory before.
            cut: it gave as many rows as it might.
        """
        rows = Counter(tenants)
        self._found = bool(rows)
        self._handed_out = 0
        self._more &= {*ready, *rows}
        self._more |= {tenant for tenant in rows if rows[tenant] >= self.rows_each}
        goes_on = bool(steps) and (cut or len(set(steps)) >= self.max_steps)
        self.after = steps[-1] if goes_on else ""
        self._look_at = self._clock() + (0.0 if goes_on else _INTERVAL)
        if rows:
            share = self._prefetch // (2 * len(rows))
            self.rows_each = max(_MIN_ROWS_EACH, share)
