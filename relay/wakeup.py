"""When to look again: rung by a writer, at the poll interval, or at once."""

import asyncio
from typing import Final

from outbox.doorbell import Doorbell
from relay.lanes import Lanes

_BUSY: Final = 0.02
_FIRST_LOOK: Final = 0.005
_LAST_LOOK: Final = 0.05


async def wake_lanes(board: Lanes, doorbell: Doorbell, poll_interval: float) -> None:
    """Wake the lanes whenever there may be something in them, until cancelled.

    Once all lanes are dry: arm the doorbell, look once more, sleep. As long as a
    writer is under way the bell can't be armed, so look every few milliseconds,
    which gathers small batches instead of paying for a NOTIFY each.
    """
    look = _FIRST_LOOK
    try:
        while True:
            await board.dry()
            if not await doorbell.arm():
                await asyncio.sleep(look)
                look = min(look * 2, _LAST_LOOK)
                board.wake()
                continue
            look = _FIRST_LOOK
            board.wake()
            if await _dry_soon(board):
                await doorbell.wait(poll_interval)
                board.wake()
            if not await _dry_soon(board):
                # Enough to do: writers need not ring until that is over.
                await doorbell.disarm()
    finally:
        await doorbell.close()


async def _dry_soon(board: Lanes) -> bool:
    try:
        async with asyncio.timeout(_BUSY):
            await board.dry()
    except TimeoutError:
        return False
    return True
