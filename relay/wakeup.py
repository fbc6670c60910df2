"""Decides when to look for messages: on a writer's signal, at intervals, or at once."""

import asyncio
from typing import Final

from outbox.postgres.doorbell import Doorbell
from relay.lanes.board import LaneBoard

_BUSY: Final = 0.02
_FIRST_LOOK: Final = 0.005
_LAST_LOOK: Final = 0.05
_ASIDE: Final = 0.2


async def wake_lanes(
    board: LaneBoard, doorbell: Doorbell, poll_interval: float
) -> None:
    """Wake lanes whenever they may contain messages, until cancelled.

    Once all lanes are idle, arm the doorbell, check once more, and sleep. While a
    writer's transaction is open, the doorbell can't be armed, so check every few
    milliseconds, which collects small batches without the cost of a NOTIFY for each.
    """
    look = _FIRST_LOOK
    try:
        while True:
            while not await _idle_within(board, min(poll_interval, _ASIDE)):
                # Writers don't ring while there is work, and an idle lane must not wait
                # for a busy one to become empty.
                board.look_aside()
            if not await doorbell.arm():
                await asyncio.sleep(look)
                look = min(look * 2, _LAST_LOOK)
                board.wake()
                continue
            look = _FIRST_LOOK
            board.wake()
            if await _idle_within(board, _BUSY):
                await doorbell.wait(poll_interval)
                board.wake()
            if not await _idle_within(board, _BUSY):
                # Writers needn't ring while there is work to do.
                await doorbell.disarm()
    finally:
        await doorbell.close()


async def _idle_within(board: LaneBoard, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await board.idle()
    except TimeoutError:
        return False
    return True
