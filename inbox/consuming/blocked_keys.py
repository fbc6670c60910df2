"""The messages of a consumer that wait for a retry, and the keys that they block.

Such a message waits in the process, so no table shows it; the events do.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from inbox.events import (
    ConsumerStopped,
    DeliveryEvent,
    HandlerFailed,
    MessageHandled,
    RetryRequested,
)
from outbox.events import Event

MOST_LISTED: Final = 1000
_MOST_OVERDUE: Final = timedelta(minutes=5)
_SECRET: Final = ("key", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKey:
    """A key and its head: the message that failed and will be retried.

    Attributes:
        key: None if the message blocks no other one.
        head: the id of that message.
        attempts: how often it has failed, as far as this process knows.
        since: when it first failed.
        next_at: when it will be retried, or was last retried.
        reason: the last failure; None if the handler only asked for a retry.
    """

    key: str | None
    topic: str
    head: UUID
    attempts: int
    since: datetime
    next_at: datetime
    reason: str | None = None


class BlockedKeys:
    """The blocked keys of one process; an observer of its consumer.

    Args:
        clock: returns the time, in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._heads: dict[UUID, BlockedKey] = {}

    def __call__(self, event: Event) -> None:
        """Update the blocked keys from an event."""
        if not self._heads and type(event) is MessageHandled:
            return
        match event:
            case HandlerFailed():
                self._block(event, event.attempts, event.reason)
            case RetryRequested():
                before = self._heads.get(event.id)
                self._block(
                    event,
                    0 if before is None else before.attempts,
                    None if before is None else before.reason,
                )
            case DeliveryEvent(id=id):
                self._heads.pop(id, None)
            case ConsumerStopped():
                self._heads.clear()

    def oldest_first(self) -> list[BlockedKey]:
        """Return the blocked keys, starting with the one that has waited longest."""
        return [it for it in self._oldest_first() if it.key is not None]

    def failing(self) -> list[BlockedKey]:
        """Return the messages that failed and wait, those without a key included."""
        return [it for it in self._oldest_first() if it.reason is not None]

    def listed(self) -> dict[str, Any]:
        """Return their number, and the heads that have waited longest.

        Not the keys, which can identify customers: anyone who reaches the port could
        read them. `pillarbox trace` shows the key of a message.
        """
        heads = self.oldest_first()
        return {
            "count": len(heads),
            "since": _plain(heads[0].since) if heads else None,
            "heads": [
                {
                    name: _plain(value)
                    for name, value in asdict(blocked).items()
                    if name not in _SECRET
                }
                for blocked in heads[:MOST_LISTED]
            ],
        }

    def _oldest_first(self) -> list[BlockedKey]:
        # The broker may have given one that is overdue to another replica.
        overdue = self._now() - _MOST_OVERDUE
        self._heads = {k: it for k, it in self._heads.items() if it.next_at > overdue}
        return sorted(self._heads.values(), key=lambda blocked: blocked.since)

    def _block(
        self,
        event: HandlerFailed | RetryRequested,
        attempts: int,
        reason: str | None,
    ) -> None:
        now, before = self._now(), self._heads.get(event.id)
        self._heads[event.id] = BlockedKey(
            key=event.key,
            topic=event.topic,
            head=event.id,
            attempts=attempts,
            since=now if before is None else before.since,
            next_at=now + timedelta(seconds=event.seconds_until_retry),
            reason=reason,
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return str(value) if isinstance(value, UUID) else value
