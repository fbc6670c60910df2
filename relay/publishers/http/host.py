"""The state of a webhook's host, and whether the host or a message is to blame.

    up ──a lost connection, a pause requested, five refusals in a row──▶ unavailable
    unavailable ──any answer about a message──▶ up

While the host is unavailable, a batch begins with one request at a time, so that a
recovering host isn't flooded.
"""

import time
from typing import Final
from uuid import UUID

from outbox.bounded_dict import BoundedDict
from outbox.errors import BrokerUnavailableError

_MAX_REFUSALS: Final = 5


class Host:
    """The breaker of one host. For one event loop.

    Args:
        name: the host's name in error messages.

    Attributes:
        away: why the host counts as unavailable; None while it is up.
        suspects: the messages whose last request was refused, or broke off.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.away: str | None = None
        self.suspects: BoundedDict[UUID, None] = BoundedDict()
        self._paused_until = 0.0
        self._refusals = 0

    def check_pause(self) -> None:
        """Check that any pause requested by the host is over.

        Raises:
            BrokerUnavailableError: the pause isn't over yet.
        """
        left = self._paused_until - time.monotonic()
        if left > 0:
            raise BrokerUnavailableError(
                f"{self.name} requested a pause; {left:.0f} s of it remain"
            )

    def error(self) -> BrokerUnavailableError:
        """Return an error that says why the host is unavailable."""
        return BrokerUnavailableError(f"{self.name} {self.away or 'was unreachable'}")

    def answered(self, id: UUID) -> None:
        """Record an answer about the message, which shows that the host is up."""
        self.away = None
        self._refusals = 0
        self.suspects.pop(id, None)

    def refused(self, id: UUID, reason: str) -> None:
        """Record a refusal; too many in a row make the host unavailable."""
        self.suspects[id] = None
        self._refusals += 1
        if self._refusals >= _MAX_REFUSALS:
            self.lose(f"refuses one message after another: {reason}")

    def lose(self, reason: str) -> None:
        """Record that the host is unavailable."""
        self.away = reason

    def pause(self, seconds: float) -> None:
        """Record that the host requested a pause."""
        self._paused_until = time.monotonic() + seconds
        self.away = f"requested a pause of {seconds:.0f} s"
