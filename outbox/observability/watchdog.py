"""The watchdog: ends a process whose event loop is stuck, and says where.

A loop that a handler blocks sends no heartbeats, so the server has taken the leases
away long ago; but nobody starts the process anew. A thread notices. It counts its own
ticks instead of reading a clock, so a process that was frozen is not found guilty when
it thaws: then the thread stood still, too.
"""

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from outbox.errors import ConfigError

STUCK: Final = 70
"""The exit status: EX_SOFTWARE of sysexits.h."""
_TICKS: Final = 20


def end_process(limit: float) -> None:
    """Write down where every thread stands, and exit with `STUCK` at once."""
    sys.stderr.write(
        f"the event loop has not turned for {limit:g} s; the stacks "
        "of all threads follow, then this process ends\n"
    )
    sys.stderr.flush()
    faulthandler.dump_traceback(sys.stderr)
    os._exit(STUCK)


class Watchdog:
    """Watches the running loop from a thread.

    Args:
        limit: how many seconds the loop may take for one turn.
        bite: called in that thread when it took longer.
    """

    def __init__(
        self,
        limit: float,
        bite: Callable[[float], None] = end_process,
    ) -> None:
        if not 0 < limit < threading.TIMEOUT_MAX:
            raise ConfigError(
                f"watchdog={limit:g}: must be a positive number of seconds, or 0 for "
                "none"
            )
        self._limit = limit
        self._tick = limit / _TICKS
        self._bite = bite
        self._silent = 0
        self._over = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch for as long as the block runs."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        beating = asyncio.create_task(self._beat())
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._silent = 0
            await asyncio.sleep(self._tick)

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            self._silent += 1
            if self._silent > _TICKS:
                self._bite(self._limit)
                return
