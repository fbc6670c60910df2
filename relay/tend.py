"""What comes round by the clock: due messages, and sweeps for what lies below."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, cast

import psycopg

from outbox.database import Connection, Link
from outbox.errors import DatabaseUnavailableError, message_of
from outbox.events import Event, UpkeepFailed, UpkeepMeasured
from outbox.statement import load
from relay.config import RelayConfig
from relay.events import DatabaseFound, DatabaseLost
from relay.lanes import Lanes

_UPKEEP_INTERVAL: Final = 60.0


async def tend_lanes(
    board: Lanes, link: Link, config: RelayConfig, notify: Callable[[Event], None]
) -> None:
    """Make due messages ready and order sweeps, until cancelled.

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
                    board.wake(strange=True)
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
    """Tell how the upkeep is doing, which may run where nobody looks; give its failure.

    A role that may not read it goes on without.
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


async def _ready_all_due(link: Link, board: Lanes, max_rows: int) -> None:
    while True:
        async with link.turn:
            connection = await link.connection()
            # Also without lanes: leases end with the database, and somebody has to
            # say so.
            rows = await ready_due(connection, board.numbers(), max_rows)
        for number, seq, key, attempts, created_at in rows:
            lane = board.find(number)
            if lane is not None:
                if attempts:
                    lane.blocked.discard(key)
                lane.rewind(seq, created_at)
        if rows:
            board.wake()
        if len(rows) < max_rows:
            return


async def ready_due(
    connection: Connection, lanes: list[int], max_rows: int
) -> list[tuple[Any, ...]]:
    """Run `ready_due.sql`."""
    cursor = await connection.execute(
        load("relay", "ready_due"), {"lanes": lanes, "max_rows": max_rows}
    )
    return await cursor.fetchall()
