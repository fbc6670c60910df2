"""The periodic work: making due messages ready, and sweeps for late commits."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final, cast

import psycopg

from outbox.errors import DatabaseUnavailableError, message_of
from outbox.events import Event, UpkeepFailed, UpkeepMeasured
from outbox.postgres.connection import Connection, Link
from outbox.postgres.sql_files import load
from relay.config import RelayConfig
from relay.events import DatabaseFound, DatabaseLost
from relay.lanes.board import LaneBoard

_UPKEEP_INTERVAL: Final = 60.0
# Messages made ready by one statement, which takes about 20 ms.
_PORTION: Final = 1000


async def sweep_lanes(
    board: LaneBoard, link: Link, config: RelayConfig, notify: Callable[[Event], None]
) -> None:
    """Make due messages ready and request sweeps, until cancelled.

    Args:
        link: shared with the workers.
    """
    interval = config.poll_interval.total_seconds()
    next_sweep = 0.0
    next_look = 0.0
    failure: str | None = None
    lost = False
    try:
        while True:
            try:
                if time.monotonic() >= next_sweep:
                    board.wake(refresh=True)
                    next_sweep = (
                        time.monotonic() + config.sweep_interval.total_seconds()
                    )
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _UPKEEP_INTERVAL
                    failure = await _look_at_upkeep(link, failure, notify)
                await _ready_all_due(link, board, config.batch_size)
                if lost:
                    lost = False
                    notify(DatabaseFound())
            except (psycopg.Error, DatabaseUnavailableError) as error:
                async with link.turn:
                    await link.close()
                lost = True
                notify(DatabaseLost(reason=message_of(error), seconds=interval))
            await asyncio.sleep(interval)
    finally:
        await link.close()


async def _look_at_upkeep(
    link: Link, known: str | None, notify: Callable[[Event], None]
) -> str | None:
    """Report the state of the upkeep, which may fail unnoticed; return its failure.

    A role without the privilege to read it skips this.
    """
    try:
        async with link.turn:
            connection = await link.connection()
            cursor = await connection.execute(load("relay", "measure_upkeep"))
            age, failure = await cursor.fetchone() or (None, None)
    except psycopg.errors.InsufficientPrivilege:
        return known
    notify(UpkeepMeasured(age=age, is_failing=failure is not None))
    if failure is not None and failure != known:
        notify(UpkeepFailed(reason=failure))
    return cast("str | None", failure)


async def _ready_all_due(link: Link, board: LaneBoard, batch_size: int) -> None:
    numbers = set(board.numbers())
    congested = {n for n in numbers if (lane := board.find(n)) and lane.congested}
    # Also without lanes: leases end with the database, and somebody has to say so.
    open_lanes = numbers - congested
    share = math.ceil(batch_size / 4)
    while True:
        more = await _ready_some_due(link, board, open_lanes, share)
        open_lanes = {n for n in more if (lane := board.find(n)) and not lane.congested}
        if not open_lanes:
            break
    # Those of a congested lane go a batch at a time, the next when it has caught up.
    caught_up = {n for n in congested if (lane := board.find(n)) and not lane.catch_up}
    if caught_up:
        await _ready_some_due(link, board, caught_up, batch_size)


async def _ready_some_due(
    link: Link, board: LaneBoard, lanes: Collection[int], max_rows: int
) -> set[int]:
    """Make due messages ready, up to `max_rows` of each lane; return lanes with more.

    The connection is given up after each portion: workers wait for it.
    """
    left = sorted(lanes)
    more: set[int] = set()
    while True:
        async with link.turn:
            connection = await link.connection()
            rows = await ready_due(connection, left, max_rows, max_total=_PORTION)
        for number, seq, key, attempts, created_at in rows:
            lane = board.find(number)
            if lane is not None:
                lane.free(seq, key, created_at, refused=attempts > 0)
        if rows:
            board.wake()
        readied = Counter(row[0] for row in rows)
        more |= {number for number, count in readied.items() if count >= max_rows}
        if len(rows) < _PORTION:
            return more
        # The portion may have ended in the middle of this lane.
        last = max(readied, key=left.index)
        more.add(last)
        left = left[left.index(last) + 1 :]
        if not left:
            return more


async def ready_due(
    connection: Connection, lanes: list[int], max_rows: int, *, max_total: int
) -> list[tuple[Any, ...]]:
    """Run `ready_due.sql`."""
    cursor = await connection.execute(
        load("relay", "ready_due"),
        {"lanes": lanes, "max_rows": max_rows, "max_total": max_total},
    )
    return await cursor.fetchall()
