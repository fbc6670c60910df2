"""Send an open page its content whenever that has changed."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from outbox.bounded_dict import BoundedDict
from outbox.errors import OutboxError

SECONDS: Final = 2.0
"""How often an open page looks for changes: soon enough to follow a repair, and cached
for all viewers of the same page."""
_MOST_STREAMS: Final = 200
_SECONDS_OPEN: Final = 300.0
_SHARE: Final = 20
"""A page that is slow to read is read less often: for at most 1/20 of the time."""


class Cache:
    """Reads a page once for all viewers who have it open at the same time."""

    def __init__(self) -> None:
        self._read: BoundedDict[str, tuple[float, str]] = BoundedDict(_MOST_STREAMS)
        self._locks: BoundedDict[str, asyncio.Lock] = BoundedDict(_MOST_STREAMS)

    async def get(self, key: str, read: Callable[[], Awaitable[str]]) -> str:
        """Return the page if it was read in the last few seconds; otherwise read it."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:
            found = self._read.get(key)
            if found is not None and time.monotonic() < found[0]:
                return found[1]
            started = time.monotonic()
            text = await read()
            now = time.monotonic()
            keep = max(SECONDS / 2, (now - started) * _SHARE)
            self._read[key] = (now + keep, text)
            return text


class Streams:
    """The streams of server-sent events that are open. For one event loop."""

    def __init__(self) -> None:
        self._open = 0
        self._stopped = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no further stream should be opened."""
        return self._open >= _MOST_STREAMS

    def stop(self) -> None:
        """End all streams so that a server can stop; pages reconnect automatically."""
        self._stopped.set()

    async def stream(
        self, read: Callable[[], Awaitable[str]], is_known: Callable[[], bool]
    ) -> AsyncIterator[str]:
        """Yield server-sent events until the reader leaves, or for five minutes.

        Then the page reconnects, and identifies its viewer again.

        Args:
            is_known: whether the viewer is still logged in; the stream ends if not.
        """
        self._open += 1
        try:
            yield "retry: 1000\n\n"
            last = ""
            until = time.monotonic() + _SECONDS_OPEN
            while time.monotonic() < until and is_known():
                if self._stopped.is_set():
                    break
                try:
                    name, text = "page", await read()
                except OutboxError as error:
                    name, text = "problem", " ".join(str(error).split())
                if text != last:
                    lines = "".join(f"data: {line}\n" for line in text.splitlines())
                    yield f"event: {name}\n{lines}\n"
                    last = text
                else:
                    yield ": alive\n\n"
                try:
                    await asyncio.wait_for(self._stopped.wait(), SECONDS)
                except TimeoutError:
                    continue
        finally:
            self._open -= 1
