"""A source that dies as a process does: killed, with deliveries in its hands."""

import asyncio
import os
import signal
import warnings
from collections.abc import Callable
from typing import Final, NoReturn

from inbox.source import Source

__all__ = ["die_holding"]

_LIMIT: Final = 120


async def die_holding(source: Callable[[], Source], count: int) -> None:
    """Let a child process receive `count` deliveries and ack none, and kill it.

    Returns when it is dead, with its connections closed by the system.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Threads of this process are not in the child, which needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reading)
        _hold(source, count, writing)
    os.close(writing)
    try:
        said = await asyncio.to_thread(os.read, reading, 1000)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, child, 0)
    assert said == b"holding", said.decode(errors="replace")


def _hold(make: Callable[[], Source], count: int, writing: int) -> NoReturn:
    # Whatever happens, nothing of the parent may be run or closed from here.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(_receive(make, count, writing))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        os.write(writing, f"{type(error).__name__}: {error}".encode()[:900])
    finally:
        os._exit(1)


async def _receive(make: Callable[[], Source], count: int, writing: int) -> None:
    async with make() as source:
        held = 0
        while held < count:
            held += len(await source.receive(limit=count - held))
        os.write(writing, b"holding")
        # Its heartbeat goes on until the end.
        await asyncio.Event().wait()
