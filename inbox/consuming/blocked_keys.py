"""The blocked keys of a consumer: those whose first message waits for a retry.

The message waits in the process, so no table shows it; the events do.
"""

import asyncio
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
from outbox.events import BlockedKeysMeasured, Event, Observer

MOST_TOLD: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKey:
    """A key and its head: the message that failed and will be retried.

    Attributes:
        head: the id of that message.
        attempts: how often it has failed, as far as this process knows.
        since: when it first failed.
        next_at: when it will be retried, or was last retried.
    """

    key: str
    topic: str
    head: UUID
    attempts: int
    since: datetime
    next_at: datetime


class BlockedKeys:
    """The blocked keys of one process; an observer of its consumer.

    Args:
        clock: returns the time, in seconds since 1970.
    """

    def __init__(self, consumer: str, clock: Callable[[], float] = time.time) -> None:
        self._consumer = consumer
        self._clock = clock
        self._keys: dict[UUID, BlockedKey] = {}

    def __call__(self, event: Event) -> None:
        """Update the blocked keys from an event."""
        if not self._keys and type(event) is MessageHandled:
            return
        match event:
            case HandlerFailed(attempts=attempts):
                self._block(event, attempts)
            case RetryRequested():
                self._block(event, None)
            case DeliveryEvent(id=id):
                self._keys.pop(id, None)
            case ConsumerStopped():
                self._keys.clear()

    def oldest_first(self) -> list[BlockedKey]:
        """Return the blocked keys, starting with the one that has waited longest."""
        return sorted(self._keys.values(), key=lambda blocked: blocked.since)

    def count(self) -> dict[str, Any]:
        """Return the number of keys, and since when the oldest has been waiting."""
        since = min((blocked.since for blocked in self._keys.values()), default=None)
        return {"count": len(self._keys), "since": _plain(since)}

    def tell(self) -> dict[str, Any]:
        """Return `count` and at most `MOST_TOLD` keys, which can identify customers."""
        return {
            **self.count(),
            "keys": [
                {name: _plain(value) for name, value in asdict(blocked).items()}
                for blocked in self.oldest_first()[:MOST_TOLD]
            ],
        }

    async def measure(self, seconds: float, notify: Observer) -> None:
        """Report the number of keys every `seconds` seconds, until cancelled."""
        while True:
            oldest = min((b.since for b in self._keys.values()), default=None)
            notify(
                BlockedKeysMeasured(
                    consumer=self._consumer,
                    keys=len(self._keys),
                    age=None if oldest is None else self._now() - oldest,
                )
            )
            await asyncio.sleep(seconds)

    def _block(
        self, event: HandlerFailed | RetryRequested, attempts: int | None
    ) -> None:
        if event.key is None:
            return
        now, before = self._now(), self._keys.get(event.id)
        if attempts is None:
            attempts = 0 if before is None else before.attempts
        self._keys[event.id] = BlockedKey(
            key=event.key,
            topic=event.topic,
            head=event.id,
            attempts=attempts,
            since=now if before is None else before.since,
            next_at=now + timedelta(seconds=event.seconds_until_retry),
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    return str(value) if isinstance(value, UUID) else value
