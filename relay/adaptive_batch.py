"""Adapts the number of messages in one publish call to the broker's speed."""

from datetime import timedelta
from typing import Final

_ALL: Final = 1 << 20
_CALLS: Final = 8
"""Few, because after an outage the limit may be 1; several, because the next call may
time out, which costs the whole timeout."""


class BatchLimit:
    """The maximum number of messages in one call, halved when a call times out.

    Without it, a batch that the broker can't accept within the publish timeout (a slow
    network, a slow receiver, many messages of one key sent one by one) would be retried
    unchanged forever. The workers of a relay share one limit; it isn't safe to use in
    several event loops.

    Args:
        timeout: the timeout of one call.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._max_messages = _ALL
        self._calls = 0

    @property
    def max_messages(self) -> int:
        """The maximum number of messages in the next call, at least one."""
        return self._max_messages

    def record_timeout(self, messages: int) -> None:
        """Limit calls to at most half the messages of one that timed out."""
        self._calls = 0
        self._max_messages = max(1, min(self._max_messages, messages // 2))

    def record_success(self, seconds: float) -> None:
        """Double the limit after some calls that took less than half the timeout."""
        if self._max_messages == _ALL or 2 * seconds >= self._seconds:
            return
        self._calls += 1
        if self._calls == _CALLS:
            self._max_messages = min(2 * self._max_messages, _ALL)
            self._calls = 0
