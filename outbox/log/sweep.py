"""The periodic work: find due messages, and request refreshes of the lanes."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from outbox.events import Event
from outbox.log.claim import since_of
from outbox.log.config import ReadingConfig
from outbox.log.database_retry import DATABASE_ERRORS, DatabaseRetry
from outbox.log.lanes.board import LaneBoard
from outbox.log.lanes.keys import WaitingMessage
from outbox.postgres.connection import Link
from outbox.postgres.rows import rows_of
from outbox.postgres.sql_files import load

_LAST_ENTRY: Final = 2**63 - 1


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
                await _find_due(link, board, config.batch_size)
                retry.succeeded()
            except DATABASE_ERRORS as error:
                await retry.failed(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await board.wants_due()
    finally:
        await link.close()


async def _find_due(link: Link, board: LaneBoard, batch_size: int) -> None:
    """Find due messages in each lane, at most `batch_size` at a time."""
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
                "max_rows": batch_size,
            },
        )
    by_lane: dict[int, list[WaitingMessage]] = {lane.number: [] for lane in lanes}
    for row in await cursor.fetchall():
        by_lane[row.lane].append(row)
    some = False
    for lane, keys, begin in zip(lanes, searched, began, strict=True):
        last = by_lane[lane.number][-1]
        due = [row for row in by_lane[lane.number] if row.due_at is not None]
        for row in due:
            keys.release(row)
        some = some or bool(due)
        is_cut = len(due) >= batch_size
        up_to = (
            (last.due_at or last.now, last.entry) if is_cut else (last.now, _LAST_ENTRY)
        )
        keys.scanned(begin, up_to, is_cut=is_cut)
    if some:
        board.wake()
