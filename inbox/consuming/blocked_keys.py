"""The messages of a consumer that wait for a retry, and the keys that they block.

Such a message waits in the process, so no table shows it; the events do.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from pillarbox.inbox.events import (
    ConsumerStopped,
    DeliveryEvent,
    HandlerFailed,
    HandlerOverdue,
    MessageHandled,
    RetryRequested,
)
from pillarbox.outbox.events import Event

_MOST_OVERDUE: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """A message that failed, or whose handler asked for a retry.

    Attributes:
        key: the key that it blocks; None if it blocks none.
        since: when it first failed.
        next_at: when it will be retried, or was last retried.
        reason: its last failure, which names it; None if its handler only asked for a
            retry.
    """

    key: str | None
    since: datetime
    next_at: datetime
    reason: str | None


class BlockedKeys:
    """The blocked keys of one process; an observer of its consumer.

    Args:
        clock: returns the time, in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: dict[UUID, WaitingMessage] = {}

    def __call__(self, event: Event) -> None:
        """Update the blocked keys from an event."""
        if not self._waiting and type(event) is MessageHandled:
            return
        match event:
            case HandlerFailed() | RetryRequested():
                self._wait(event)
            case HandlerOverdue():
                return
            case DeliveryEvent(id=id):
                self._waiting.pop(id, None)
            case ConsumerStopped():
                self._waiting.clear()

    def oldest_first(self) -> list[WaitingMessage]:
        """Return the messages, starting with the one that has waited longest."""
        # The broker may have given one that is overdue to another replica.
        overdue = self._now() - _MOST_OVERDUE
        self._waiting = {
            id: it for id, it in self._waiting.items() if it.next_at > overdue
        }
        return sorted(self._waiting.values(), key=lambda it: it.since)

    def _wait(self, event: HandlerFailed | RetryRequested) -> None:
        now, before = self._now(), self._waiting.get(event.id)
        reason = None if before is None else before.reason
        if isinstance(event, HandlerFailed):
            reason = f"{event.topic} {event.id}: {event.reason}"
        self._waiting[event.id] = WaitingMessage(
            key=event.key,
            since=now if before is None else before.since,
            next_at=now + timedelta(seconds=event.seconds_until_retry),
            reason=reason,
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)
