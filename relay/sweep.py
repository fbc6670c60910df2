"""The periodic work: find due messages, and make claims look at other days."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from outbox.events import Event
from outbox.postgres.connection import Link
from outbox.postgres.sql_files import load
from relay.claim import since_of
from relay.config import RelayConfig
from relay.database_retry import DATABASE_ERRORS, DatabaseRetry
from relay.lanes.board import LaneBoard
from relay.lanes.deferrals import WaitingMessage

_LAST_ENTRY: Final = 2**63 - 1


async def sweep_lanes(
    board: LaneBoard, link: Link, config: RelayConfig, notify: Callable[[Event], None]
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
        and lane.deferrals.since is not None
        and lane.deferrals.size < batch_size
    ]
    # Not those of a lane that is taken over in the meantime.
    searched = [lane.deferrals for lane in lanes]
    began = [deferrals.scan() for deferrals in searched]
    async with link.use() as connection:
        # Do it even without lanes: an outage ends the leases and must be reported.
        cursor = await connection.execute(
            load("relay", "find_due"),
            {
                "reader": board.reader.reader,
                "lanes": [lane.number for lane in lanes],
                "moments": [deferrals.due_up_to[0] for deferrals in searched],
                "entries": [deferrals.due_up_to[1] for deferrals in searched],
                "since": since_of(lanes),
                "max_rows": batch_size,
            },
        )
    by_lane: dict[int, list[Sequence[Any]]] = {lane.number: [] for lane in lanes}
    for number, *row in await cursor.fetchall():
        by_lane[number].append(row)
    some = False
    for lane, deferrals, begin in zip(lanes, searched, began, strict=True):
        now, last_due, *_, last_entry, _, _ = by_lane[lane.number][-1]
        found = by_lane[lane.number] if last_due is not None else []
        for _, _, seq, id, created_at, run, attempts, entry, cause, key in found:
            deferrals.release(
                WaitingMessage(
                    lane.number, seq, id, created_at, run, attempts, entry, cause, key
                )
            )
        is_cut = len(found) >= batch_size
        up_to = (last_due, last_entry) if is_cut else (now, _LAST_ENTRY)
        deferrals.scanned(begin, up_to, is_cut=is_cut)
        some = some or bool(found)
    if some:
        board.wake()
