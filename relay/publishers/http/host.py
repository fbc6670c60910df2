"""The state of a webhook's host, and whether it or a message caused a failure.

    up ──no connection, a pause asked for, five refusals in a row──▶ away
    away ──any answer about a message──▶ up

While it is unavailable, a batch begins with one request at a time, so that a host in
trouble isn't flooded when it recovers.
"""

import time
from typing import Final
from uuid import UUID

from outbox.bounded_dict import BoundedDict
from outbox.errors import BrokerUnavailableError

_MAX_REFUSALS: Final = 5
# In less time, several network failures may hit the same message by chance.
_DOUBT: Final = 30.0


class Host:
    """The breaker of one host. For one event loop.

    Args:
        name: its name in errors.

    Attributes:
        away: why it counts as unavailable; None while it is up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.away: str | None = None
        self._paused_until = 0.0
        self._refusals = 0
        self._answered_at = 0.0
        self._suspects: BoundedDict[UUID, float] = BoundedDict()

    def check_pause(self) -> None:
        """Raise an error during a pause that the host asked for.

        Raises:
            BrokerUnavailableError: the pause isn't over.
        """
        left = self._paused_until - time.monotonic()
        if left > 0:
            raise BrokerUnavailableError(
                f"{self.name} asked for a pause, of which {left:.0f} s are left"
            )

    def error(self) -> BrokerUnavailableError:
        """Return an error that says why it is unavailable."""
        return BrokerUnavailableError(f"{self.name} {self.away or 'was away'}")

    def answered(self, id: UUID) -> None:
        """Record an answer that concerned the message."""
        self.away = None
        self._refusals = 0
        self._answered_at = time.monotonic()
        self._suspects.pop(id, None)

    def refused(self, reason: str) -> None:
        """Record a refusal; after too many in a row the host is unavailable."""
        self._refusals += 1
        if self._refusals >= _MAX_REFUSALS:
            self.lose(f"refuses one message after another: {reason}")

    def lose(self, reason: str) -> None:
        """Record that it is unavailable."""
        self.away = reason

    def pause(self, seconds: float) -> None:
        """Record that it asked for a pause."""
        self._paused_until = time.monotonic() + seconds
        self.away = f"asked for a pause of {seconds:.0f} s"

    def blames(self, id: UUID) -> bool:
        """Return whether a message, and not the host, made a request fail.

        It did if its requests have failed for a while, and the host answered others in
        between. Until then the host is to blame, and no attempt is counted.
        """
        now = time.monotonic()
        since = self._suspects.setdefault(id, now)
        return now - since >= _DOUBT and self._answered_at > since

    def forget(self, id: UUID) -> None:
        """Forget the failures of a message: they were counted as an attempt."""
        self._suspects.pop(id, None)

    def suspects(self, id: UUID) -> bool:
        """Return whether requests for this message failed because of the host."""
        return id in self._suspects
