"""Kill a process that holds deliveries of a source."""

import asyncio
import os
import signal
import warnings
from collections.abc import Callable
from typing import Final, NoReturn

from pillarbox.inbox.source import Source

__all__ = ["die_holding"]

_LIMIT: Final = 120


async def die_holding(source: Callable[[], Source], count: int) -> None:
    """Let a child process receive `count` deliveries and ack none, then kill it.

    Returns when the process is dead and the system has closed its connections.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The child doesn't get this process's threads, and doesn't need them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reading)
        _hold(source, count, writing)
    os.close(writing)
    try:
        report = await asyncio.to_thread(os.read, reading, 1000)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, child, 0)
    assert report == b"holding", report.decode(errors="replace")


def _hold(make: Callable[[], Source], count: int, writing: int) -> NoReturn:
    # Whatever happens, the child must not run or close anything of the parent's.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(_receive(make, count, writing))
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        os.write(writing, f"{type(error).__name__}: {error}".encode()[:900])
    finally:
        os._exit(1)


async def _receive(make: Callable[[], Source], count: int, writing: int) -> None:
    async with make() as source:
        held = 0
        while held < count:
            held += len(await source.receive(limit=count - held))
        os.write(writing, b"holding")
        # Keep the heartbeat running until killed.
        await asyncio.Event().wait()
