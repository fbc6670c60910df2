"""When and where to look for tenants behind the floods of others.

Claims read by seq. So if more waits than one claim returns, a tenant's late message
would be found only after all earlier ones. A look goes from tenant to tenant instead,
skips those with messages in memory, and takes the first message of each other one.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

_MAX_STEPS: Final = 64
_MIN_ROWS_EACH: Final = 4
_INTERVAL: Final = 0.25
# Memory is bounded: when it holds this many claims' worth, no look adds more.
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
        """Record a claim; a full one may have left messages of each tenant behind."""
        self._deep = full
        self._more = {tenant for tenant in tenants if full and tenant is not None}
        if self._more or self._found:
            self._look_at = 0.0

    def handed_out(self, count: int) -> None:
        """Record that this many messages were delivered from memory."""
        self._handed_out += count

    def is_due(self, ready: int, tenants: Sequence[str], *, stuck: bool) -> bool:
        """Return whether to look now.

        Args:
            ready: how many messages are in memory, of these `tenants`.
            stuck: none of them may be delivered.
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
        """Record a look.

        Args:
            steps: the tenants that it skipped or found.
            tenants: those of the rows that it returned.
            ready: those that had messages in memory before.
            cut: whether it returned the maximum number of rows.
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
