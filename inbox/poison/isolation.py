"""Run one handler alone, so that if the process dies, the message to blame is known.

This works like a lock with shared and exclusive modes, but every wait has a time limit:
a handler that has run for a while is unlikely to kill its process.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final

_MAX_WAIT: Final = timedelta(seconds=2)


class Isolation:
    """The running handlers of one run of a consumer. For one event loop.

    Args:
        max_wait: how long a handler that is to run alone waits for the others to end,
            and how long the others wait for it.
    """

    def __init__(self, max_wait: timedelta = _MAX_WAIT) -> None:
        self._max_wait = max_wait.total_seconds()
        self._running: set[object] = set()
        self._exclusive: object | None = None
        self._deadline = 0.0
        self._changed = asyncio.Event()
        self._queue = asyncio.Lock()

    def shared(self, *, counts: bool = True) -> "Shared":
        """Run alongside other handlers, once no handler runs alone.

        Args:
            counts: False for a handler that takes so long that no other waits for it.
        """
        return Shared(self, counts=counts)

    async def enter(self, me: object, *, counts: bool) -> None:
        """Wait until no handler runs alone; then count this one as running."""
        while self._exclusive is not None and await self._wait_for_change():
            pass
        if counts:
            self._running.add(me)

    def leave(self, me: object) -> None:
        """No longer count this one as running."""
        self._running.discard(me)
        self._changed.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Run alone, once all other handlers have ended."""
        me = object()
        # After a crash a thousand may wait here; a change must wake only the first.
        async with self._queue:
            await self.enter(me, counts=False)
            self._exclusive = me
        try:
            self._deadline = time.monotonic() + self._max_wait
            while self._running and await self._wait_for_change():
                pass
            self._running = {me}
            self._deadline = time.monotonic() + self._max_wait
            yield
        finally:
            if self._exclusive is me:
                self._exclusive = None
            self.leave(me)

    async def _wait_for_change(self) -> bool:
        """Wait for a change; return False once the deadline has passed."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._changed.wait()
        return True


class Shared:
    """One of the handlers that run alongside others, for an `async with`."""

    __slots__ = ("_counts", "_isolation")  # a class, like `Slot`: it costs less time

    def __init__(self, isolation: Isolation, *, counts: bool) -> None:
        self._isolation = isolation
        self._counts = counts

    async def __aenter__(self) -> None:
        await self._isolation.enter(self, counts=self._counts)

    async def __aexit__(self, *raised: object) -> None:
        self._isolation.leave(self)
