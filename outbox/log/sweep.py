"""The periodic work: find due messages, and request refreshes of the lanes."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final

from pillarbox.outbox.events import Event
from pillarbox.outbox.log.claim import since_of
from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.log.database_retry import DATABASE_ERRORS, DatabaseRetry
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.keys import FAR_AWAY, WaitingMessage
from pillarbox.outbox.postgres.connection import Link
from pillarbox.outbox.postgres.rows import rows_of
from pillarbox.outbox.postgres.sql_files import load

_LAST_ENTRY: Final = 2**63 - 1
# Many messages that are due one after the other are found together, and the searches
# take at most a tenth of the time.
_LEAST_WAIT: Final = 0.02
_SEARCHING: Final = 0.1
_HELD: Final = timedelta(seconds=0.1)
"""After this, a message is looked at again that may be cancelled still."""


async def sweep_lanes(
    board: LaneBoard, link: Link, config: ReadingConfig, notify: Callable[[Event], None]
) -> None:
    """Find due messages and request sweeps, until cancelled.

    Args:
        link: shared with the workers.
    """
    interval = config.poll_interval.total_seconds()
    next_sweep = 0.0
    retry = DatabaseRetry(notify)
    try:
        while True:
            try:
                if time.monotonic() >= next_sweep:
                    board.wake(refresh=True)
                    next_sweep = (
                        time.monotonic() + config.sweep_interval.total_seconds()
                    )
                wait = await _find_due(
                    link, board, config.batch_size, config.poll_interval
                )
                retry.succeeded()
            except DATABASE_ERRORS as error:
                wait = interval
                await retry.failed(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await board.wants_due()
    finally:
        await link.close()


async def _find_due(
    link: Link, board: LaneBoard, batch_size: int, interval: timedelta
) -> float:
    """Find due messages in each lane, at most `batch_size` at a time.

    Returns:
        How many seconds to wait for the next search, at most `interval`: until another
        message is due.
    """
    lanes = [
        lane
        for number in board.numbers()
        if (lane := board.find(number)) is not None
        and lane.keys.since is not None
        and lane.keys.size < batch_size
    ]
    # Not those of a lane that is taken over in the meantime.
    searched = [lane.keys for lane in lanes]
    began = [keys.scan() for keys in searched]
    # Whatever is stored meanwhile, this search may not see.
    board.searched_at, started = FAR_AWAY, time.monotonic()
    async with link.use() as connection:
        # Do it even without lanes: an outage ends the leases and must be reported.
        cursor = connection.cursor(row_factory=rows_of(WaitingMessage))
        await cursor.execute(
            load("outbox.log", "find_due"),
            {
                "reader": board.reader.name,
                "lanes": [lane.number for lane in lanes],
                "moments": [keys.due_up_to[0] for keys in searched],
                "entries": [keys.due_up_to[1] for keys in searched],
                "since": since_of(lanes),
                "within": interval,
                "max_rows": batch_size,
            },
        )
    by_lane: dict[int, list[WaitingMessage]] = {lane.number: [] for lane in lanes}
    for row in await cursor.fetchall():
        by_lane[row.lane].append(row)
    some, soonest, searched_at = False, interval, FAR_AWAY
    for lane, keys, begin in zip(lanes, searched, began, strict=True):
        last = by_lane[lane.number][-1]
        due = [row for row in by_lane[lane.number] if row.is_due]
        for row in due:
            if row.is_held:
                assert row.due_at is not None
                keys.hold_due(row.due_at)
                soonest = min(soonest, _HELD)
            else:
                keys.release(row)
        if last.due_at is not None and len(due) < len(by_lane[lane.number]):
            upcoming = by_lane[lane.number][len(due)].due_at
            assert upcoming is not None
            soonest = min(soonest, upcoming - last.now)
        searched_at = last.now + soonest
        some = some or not all(row.is_held for row in due)
        is_cut = len(due) >= batch_size
        up_to = (
            (last.due_at or last.now, last.entry) if is_cut else (last.now, _LAST_ENTRY)
        )
        keys.scanned(begin, up_to, is_cut=is_cut)
    board.searched_at = searched_at
    if some:
        board.wake()
    least = max(_LEAST_WAIT, (time.monotonic() - started) / _SEARCHING)
    return max(min(least, interval.total_seconds()), soonest.total_seconds())
