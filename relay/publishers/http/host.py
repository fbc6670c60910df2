"""What is known about the host that webhooks go to, and who is to blame.

    up ──no connection, a pause asked for, five refusals in a row──▶ away
    away ──any answer about a message──▶ up

While it is away a batch begins with one request at a time, so that a host in trouble
isn't flooded when it comes back.
"""

import time
from typing import Final
from uuid import UUID

from outbox.bounded_dict import BoundedDict
from outbox.errors import BrokerUnavailableError

_MAX_REFUSALS: Final = 5
# Shorter than this, several cuts of the network may well hit the same message.
_DOUBT: Final = 30.0


class Host:
    """The breaker of one host. For one event loop.

    Args:
        name: how errors call it.

    Attributes:
        away: why it counts as away; None while it is up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.away: str | None = None
        self._paused_until = 0.0
        self._refusals = 0
        self._answered_at = 0.0
        self._suspects: BoundedDict[UUID, float] = BoundedDict()

    def check_pause(self) -> None:
        """Refuse while the pause lasts that the host asked for.

        Raises:
            BrokerUnavailableError: it does.
        """
        left = self._paused_until - time.monotonic()
        if left > 0:
            raise BrokerUnavailableError(
                f"{self.name} asked for a pause, of which {left:.0f} s are left"
            )

    def error(self) -> BrokerUnavailableError:
        """Say why it is away."""
        return BrokerUnavailableError(f"{self.name} {self.away or 'was away'}")

    def answered(self, id: UUID) -> None:
        """Note an answer that was about the message."""
        self.away = None
        self._refusals = 0
        self._answered_at = time.monotonic()
        self._suspects.pop(id, None)

    def refused(self, reason: str) -> None:
        """Note that it refused a message; after too many in a row it is away."""
        self._refusals += 1
        if self._refusals >= _MAX_REFUSALS:
            self.lose(f"refuses one message after another: {reason}")

    def lose(self, reason: str) -> None:
        """Note that it is away."""
        self.away = reason

    def pause(self, seconds: float) -> None:
        """Note that it asked for a pause."""
        self._paused_until = time.monotonic() + seconds
        self.away = f"asked for a pause of {seconds:.0f} s"

    def blames(self, id: UUID) -> bool:
        """Return whether a request failed because of its message, and not of the host.

        It did, if it has been failing for a while, and the host answered others in
        between. Until then the host is to blame, and nobody is charged an attempt.
        """
        now = time.monotonic()
        since = self._suspects.setdefault(id, now)
        return now - since >= _DOUBT and self._answered_at > since

    def forget(self, id: UUID) -> None:
        """Forget the failures of a message: it was charged for them."""
        self._suspects.pop(id, None)

    def suspects(self, id: UUID) -> bool:
        """Return whether a request for this message failed because of the host."""
        return id in self._suspects
