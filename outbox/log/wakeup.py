"""Decides when to look for messages: on a writer's signal, at intervals, or at once."""

import asyncio
from typing import Final

from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.postgres.doorbell import Armed, Doorbell

_FIRST_PAUSE: Final = 0.005
_LAST_PAUSE: Final = 0.05
_FIRST_RECHECK: Final = 0.02
_LAST_RECHECK: Final = 0.2


async def wake_lanes(
    board: LaneBoard, doorbell: Doorbell, poll_interval: float
) -> None:
    """Wake lanes whenever they may contain messages, until cancelled.

    Arm the doorbell, check once more if it was not armed all the time, and sleep. While
    a writer's transaction is open, the doorbell can't be armed, so check every few
    milliseconds, which collects small batches without the cost of a NOTIFY for each.
    Once there are messages all the time, disarm it until all lanes are idle.
    """
    pause = _FIRST_PAUSE
    try:
        while True:
            armed = await doorbell.arm()
            board.writers_ring = bool(armed)
            if armed:
                pause = _FIRST_PAUSE
                if armed is Armed.ANEW:
                    board.wake()
                await doorbell.wait(poll_interval)
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LAST_PAUSE)
            board.wake()
            if board.is_busy or not armed:
                # Writers needn't ring while there is work to do.
                board.writers_ring = False
                await doorbell.disarm()
                await _until_idle(board, poll_interval)
    finally:
        await doorbell.close()


async def _until_idle(board: LaneBoard, poll_interval: float) -> None:
    recheck = _FIRST_RECHECK
    while not await _idle_within(board, min(poll_interval, recheck)):
        # Writers don't ring while there is work, and an idle lane must not wait for a
        # busy one to become empty.
        recheck = min(2 * recheck, _LAST_RECHECK)
        if board.has_found():
            recheck = _FIRST_RECHECK
        board.recheck_idle()


async def _idle_within(board: LaneBoard, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await board.idle()
    except TimeoutError:
        return False
    return True
