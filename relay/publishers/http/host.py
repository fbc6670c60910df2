"""The state of a webhook's host, and whether the host or a message is to blame.

    up ──no connection, a pause requested, five refusals in a row──▶ unavailable
    unavailable ──any answer about a message──▶ up

While the host is unavailable, a batch begins with one request at a time, so that a
recovering host isn't flooded.
"""

import time
from typing import Final
from uuid import UUID

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.errors import BrokerUnavailableError

_MAX_REFUSALS: Final = 5
# In less time, several network failures can well hit the same message.
_DOUBT: Final = 30.0


class Host:
    """The breaker of one host. For one event loop.

    Args:
        name: the host's name in error messages.

    Attributes:
        away: why the host counts as unavailable; None while it is up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.away: str | None = None
        self._paused_until = 0.0
        self._refusals = 0
        self._answered_at = 0.0
        self._suspects: BoundedDict[UUID, float] = BoundedDict()

    def check_pause(self) -> None:
        """Check that any pause requested by the host is over.

        Raises:
            BrokerUnavailableError: the pause isn't over yet.
        """
        left = self._paused_until - time.monotonic()
        if left > 0:
            raise BrokerUnavailableError(
                f"{self.name} requested a pause: {left:.0f} s left"
            )

    def error(self) -> BrokerUnavailableError:
        """Return an error that says why the host is unavailable."""
        return BrokerUnavailableError(f"{self.name} {self.away or 'was unreachable'}")

    def answered(self, id: UUID) -> None:
        """Record an answer about the message, which shows that the host is up."""
        self.away = None
        self._refusals = 0
        self._answered_at = time.monotonic()
        self._suspects.pop(id, None)

    def refused(self, reason: str) -> None:
        """Record a refusal; too many in a row make the host unavailable."""
        self._refusals += 1
        if self._refusals >= _MAX_REFUSALS:
            self.lose(f"keeps refusing messages: {reason}")

    def lose(self, reason: str) -> None:
        """Record that the host is unavailable."""
        self.away = reason

    def pause(self, seconds: float) -> None:
        """Record that the host requested a pause."""
        self._paused_until = time.monotonic() + seconds
        self.away = f"requested a pause of {seconds:.0f} s"

    def blames(self, id: UUID) -> bool:
        """Return whether the message is to blame for a failed request, not the host.

        The message is to blame if its requests have been failing for a while and the
        host has answered others since the first failure. Until then, the host is to
        blame, and no message is charged an attempt.
        """
        now = time.monotonic()
        since = self._suspects.setdefault(id, now)
        return now - since >= _DOUBT and self._answered_at > since

    def forget(self, id: UUID) -> None:
        """Forget the failures of a message once it was charged for them."""
        self._suspects.pop(id, None)

    def suspects(self, id: UUID) -> bool:
        """Return whether a request for the message failed and wasn't charged to it."""
        return id in self._suspects
