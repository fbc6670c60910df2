"""The watchdog: reports an event loop that is blocked, and later ends the process.

A blocked loop sends no heartbeats, so the server releases the process's leases, but
nothing else would restart the process. The watchdog is a thread. It counts its own
ticks instead of reading a clock: if the whole process is frozen, so is its watchdog,
and the process isn't ended when it is resumed.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from pillarbox.outbox.errors import place_in
from pillarbox.outbox.events import Event
from pillarbox.outbox.logs.event_record import log_event
from pillarbox.outbox.observability.standard_error import write_error

STUCK: Final = 70
"""The exit status: EX_SOFTWARE of sysexits.h."""
_TICKS: Final = 20
_BLOCKED: Final = 5.0
_reported: Final[WeakSet[asyncio.AbstractEventLoop]] = WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopBlocked(Event):
    """The event loop has been blocked for seconds, so nothing else could run.

    It is only logged, since observers are called in the event loop.

    Attributes:
        where: the function of the application that its thread executes.
    """

    level = logging.WARNING
    advice = "await there instead, or call it in a thread: asyncio.to_thread, or def"

    seconds: float
    where: str
    stacktrace: str


@asynccontextmanager
async def reporting_blocks() -> AsyncIterator[None]:
    """Report if the block's event loop is blocked, unless another block does."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    if loop in _reported:
        yield
        return

    def report(seconds: float) -> None:
        frames = [*traceback.walk_stack(sys._current_frames()[thread])]
        where, trace = place_in(frames), "".join(traceback.format_stack(frames[0][0]))
        event = LoopBlocked(seconds=seconds, where=where, stacktrace=trace)
        log_event(logging.getLogger("pillarbox"), event)

    _reported.add(loop)
    try:
        async with Watchdog(_BLOCKED, report).watching():
            yield
    finally:
        _reported.discard(loop)


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
            if self._ticks == _TICKS + 1:
                self._on_blocked(self._limit)
