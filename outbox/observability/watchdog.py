"""The watchdog: ends a process whose event loop is blocked, and shows where.

A blocked loop sends no heartbeats, so the server releases the process's leases, but
nothing else would restart the process. The watchdog is a thread. It counts its own
ticks instead of reading a clock: if the whole process is frozen, so is its watchdog,
and the process isn't ended when it is resumed.
"""

import asyncio
import faulthandler
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from outbox.observability.standard_error import write_error

STUCK: Final = 70
"""The exit status: EX_SOFTWARE of sysexits.h."""
_TICKS: Final = 20


def end_process(limit: float) -> None:
    """Write the stacks of all threads to standard error, and exit with `STUCK`."""
    read, write = os.pipe()
    # faulthandler holds the interpreter's lock while it writes, so it must not wait for
    # a reader. The pipe holds 64 KiB.
    os.set_blocking(write, False)
    faulthandler.dump_traceback(write)
    os.close(write)
    with open(read, encoding="utf-8", errors="replace") as stacks:  # noqa: PTH123
        write_error(
            f"the event loop has been blocked for {limit:g} s; exiting with status"
            f" {STUCK} after the stacks of all threads\n{stacks.read()}"
        )
    os._exit(STUCK)


class Watchdog:
    """Watches the running event loop from a thread.

    Args:
        limit: how many seconds the loop may be blocked.
        on_blocked: called in that thread, with the limit, when the loop has been
            blocked for longer.
    """

    def __init__(
        self,
        limit: float,
        on_blocked: Callable[[float], None] = end_process,
    ) -> None:
        self._limit = limit
        self._tick = limit / _TICKS
        self._on_blocked = on_blocked
        self._ticks = 0
        self._stopped = threading.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch for as long as the block runs."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        ticking = asyncio.create_task(self._reset())
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            ticking.cancel()

    async def _reset(self) -> None:
        while True:
            self._ticks = 0
            await asyncio.sleep(self._tick)

    def _watch(self) -> None:
        while not self._stopped.wait(self._tick):
            self._ticks += 1
            if self._ticks > _TICKS:
                self._on_blocked(self._limit)
                return
