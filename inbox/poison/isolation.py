"""Who is at work beside whom: a message that may kill is handled while nobody else is.

So it is known who does it, and nobody is charged for being near. Both sides wait for
each other, but not for long: what has lived so long is not about to kill.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final

_PATIENCE: Final = timedelta(seconds=2)


class Solitude:
    """The handlers at work in one run of a consumer. For one event loop.

    Args:
        patience: how long the rest waits for one that is alone, and that one for the
            rest.
    """

    def __init__(self, patience: timedelta = _PATIENCE) -> None:
        self._patience = patience.total_seconds()
        self._at_work: set[object] = set()
        self._lone: object | None = None
        self._until = 0.0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def among_others(self, *, counts: bool = True) -> AsyncIterator[None]:
        """Work beside others, as soon as nobody is alone.

        Args:
            counts: with False it works for so long that nobody waits for it.
        """
        await self._wait_for_lone()
        me = object()
        if counts:
            self._at_work.add(me)
        try:
            yield
        finally:
            self._leave(me)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Work alone, as soon as all others are through."""
        await self._wait_for_lone()
        me = self._lone = object()
        try:
            self._until = time.monotonic() + self._patience
            while self._at_work and await self._change():
                pass
            self._at_work = {me}
            self._until = time.monotonic() + self._patience
            yield
        finally:
            if self._lone is me:
                self._lone = None
            self._leave(me)

    async def _wait_for_lone(self) -> None:
        while self._lone is not None and await self._change():
            pass

    async def _change(self) -> bool:
        """Wait for a change; give False when the patience is over."""
        patience = self._until - time.monotonic()
        if patience <= 0:
            return False
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._changed.wait()
        return True

    def _leave(self, me: object) -> None:
        self._at_work.discard(me)
        self._changed.set()
