"""How much of a batch one call of the publisher carries."""

from datetime import timedelta
from typing import Final

_ALL: Final = 1 << 20
_MAX_CALLS: Final = 64


class Portion:
    """All of a batch, unless that took too long: then less, until it gets through.

    Without this a batch that the broker can't take within the publish timeout (a slow
    line, a slow receiver, many messages of a key that go one by one) would be tried
    again as it is, for ever. For one event loop; the workers of a relay share one.

    Args:
        timeout: of one call.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._most = _ALL
        self._grown = False
        self._calls = 0
        # Before it grows; more each time that growing turns out to be wrong.
        self._calls_needed = 1

    @property
    def most(self) -> int:
        """Messages that a call may carry now, at least one."""
        return self._most

    def took_too_long(self, messages: int) -> None:
        """Carry at most half of what a call could not bring through in time."""
        if self._most == _ALL:
            self._calls_needed = 1
        elif self._grown:
            self._calls_needed = min(2 * self._calls_needed, _MAX_CALLS)
        self._grown = False
        self._calls = 0
        self._most = max(1, min(self._most, messages // 2))

    def took(self, seconds: float) -> None:
        """Carry twice as much again, after calls that would have had time for it."""
        if self._most == _ALL or 2 * seconds >= self._seconds:
            return
        self._calls += 1
        if self._calls >= self._calls_needed:
            self._most = min(2 * self._most, _ALL)
            self._grown = True
            self._calls = 0
