"""A member's presence: a subscription, which ends with its process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pillarbox.outbox.gather import end, start

_LISTEN: Final = 5.0
_PAUSE: Final = 0.1


class Presence:
    """Shows that a member exists, and hears when another one leaves.

    Args:
        channel: the channel of the group.

    Attributes:
        has_news: set when `waiting` would end its block.
    """

    def __init__(self, client: Redis, channel: str) -> None:
        self._client = client
        self._channel = channel
        self.has_news = False
        self._waiting: asyncio.Timeout | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def show(self, member: str) -> None:
        """Subscribe to the channel of a member instead of the last one's."""
        await self.end()
        shown = asyncio.Event()
        self._tasks = [await start(self._stay(member, shown), shown)]

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """End the block early if a member leaves, or this one is shown again."""
        for task in self._tasks:
            if task.done():
                task.result()
        try:
            async with asyncio.timeout(None) as self._waiting:
                yield
        except TimeoutError:
            if self._waiting is None or not self._waiting.expired():
                raise
        finally:
            self._waiting = None

    async def leave(self) -> None:
        """Wake the other members."""
        await self._client.publish(self._channel, "left")

    async def end(self) -> None:
        """End the subscription."""
        await end(self._tasks)

    async def _stay(self, member: str, shown: asyncio.Event) -> None:
        while True:
            try:
                async with self._client.pubsub() as subscription:
                    await subscription.subscribe(member, self._channel)
                    while True:
                        if await subscription.get_message(timeout=_LISTEN):
                            shown.set()
                            self._wake()
            except (RedisError, OSError):
                if not shown.is_set():
                    raise
            await asyncio.sleep(_PAUSE)

    def _wake(self) -> None:
        self.has_news = True
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0)
