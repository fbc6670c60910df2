"""The periodic work: find due messages, and sweep for messages that claims missed."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, cast

import psycopg

from outbox.errors import DatabaseUnavailableError
from outbox.events import Event, UpkeepFailed
from outbox.limits import MAX_INDEXED_BYTES
from outbox.postgres.connection import Connection, Link
from outbox.postgres.sql_files import load
from relay.claim import Claimed
from relay.config import RelayConfig
from relay.events import DatabaseLost, DatabaseRecovered
from relay.lanes.board import LaneBoard
from relay.lanes.deferrals import LONG_AGO, WaitingMessage
from relay.lanes.lane import Lane
from relay.settle import Settlement, settle_batch

_UPKEEP_INTERVAL: Final = 60.0
_LAST_ENTRY: Final = 2**63 - 1
_MOST_PASSED_BY: Final = 1000


async def sweep_lanes(
    board: LaneBoard, link: Link, config: RelayConfig, notify: Callable[[Event], None]
) -> None:
    """Find due messages and request sweeps, until cancelled.

    Args:
        link: shared with the workers.
    """
    interval = config.poll_interval.total_seconds()
    next_sweep = 0.0
    next_look = 0.0
    failure: str | None = None
    lost = False
    audit = _Audit(link, board)
    try:
        while True:
            try:
                if time.monotonic() >= next_sweep:
                    board.wake(refresh=True)
                    next_sweep = (
                        time.monotonic() + config.sweep_interval.total_seconds()
                    )
                    await audit.check_next()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _UPKEEP_INTERVAL
                    failure = await _look_at_upkeep(link, failure, notify)
                await _find_due(link, board, config.batch_size)
                if lost:
                    lost = False
                    notify(DatabaseRecovered())
            except (psycopg.Error, DatabaseUnavailableError) as error:
                async with link.lock:
                    await link.close()
                lost = True
                notify(DatabaseLost.of(error, interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await board.wants_due()
    finally:
        await link.close()


async def _look_at_upkeep(
    link: Link, known: str | None, notify: Callable[[Event], None]
) -> str | None:
    """Report a failure of the upkeep, which can be unnoticed, once; return it.

    A role without the privilege to read it skips this.
    """
    try:
        async with link.lock:
            connection = await link.connection()
            cursor = await connection.execute(load("relay", "read_upkeep_failure"))
            (failure,) = await cursor.fetchone() or (None,)
    except psycopg.errors.InsufficientPrivilege:
        return known
    if failure is not None and failure != known:
        notify(UpkeepFailed(reason=failure))
    return cast("str | None", failure)


class _Audit:
    """Recounts verified messages, one lane and one partition at a time.

    A watermark says nothing about rows that are later inserted below it with an
    explicit seq, which the tables' owner can do but Pillarbox's roles can't. So
    the audit checks for more messages than were verified. Messages without a mark get
    one, and an entry in the log that makes them due. Each lane is checked every few
    minutes.
    """

    def __init__(self, link: Link, board: LaneBoard) -> None:
        self._link = link
        self._board = board
        self._left: list[tuple[int, datetime, datetime]] = []

    async def check_next(self) -> None:
        """Check the next lane and partition."""
        async with self._link.lock:
            connection = await self._link.connection()
            if not self._left:
                cursor = await connection.execute(load("relay", "list_partitions"))
                days = await cursor.fetchall()
                self._left = [(n, *day) for day in days for n in self._board.numbers()]
            while self._left:
                number, starts_at, ends_at = self._left.pop(0)
                lane = self._board.find(number)
                if lane is not None and not lane.is_new and lane.watermark >= 0:
                    await _check_stretch(connection, lane, starts_at, ends_at)
                    return


async def _check_stretch(
    connection: Connection, lane: Lane, starts_at: datetime, ends_at: datetime
) -> None:
    stretch = {
        "lane": lane.number,
        "starts_at": starts_at,
        "ends_at": ends_at,
        "up_to": lane.watermark,
    }
    cursor = await connection.execute(load("relay", "check_stretch"), stretch)
    ((is_complete,),) = await cursor.fetchall()
    if is_complete:
        return
    cursor = await connection.execute(
        load("relay", "find_passed_by"),
        {**stretch, "max_indexed": MAX_INDEXED_BYTES, "max_rows": _MOST_PASSED_BY},
    )
    rows = [
        Claimed(lane.number, seq, id, created_at, 0, key, topic, None, None)
        for seq, id, created_at, key, topic in await cursor.fetchall()
    ]
    if rows:
        settlement = Settlement(scheduled=rows)
        due = await settle_batch(connection, settlement, origin="")
        for row in rows:
            lane.deferrals.note_created(row.created_at)
        lane.deferrals.expect(due[lane.number])


async def _find_due(link: Link, board: LaneBoard, batch_size: int) -> None:
    """Find due messages in each lane, at most `batch_size` at a time."""
    lanes = [
        lane
        for number in board.numbers()
        if (lane := board.find(number)) is not None
        and lane.deferrals.since is not None
        and lane.deferrals.size < batch_size
    ]
    began = [lane.deferrals.scan() for lane in lanes]
    async with link.lock:
        connection = await link.connection()
        # Do it even without lanes: an outage ends the leases and must be reported.
        rows = await find_due(connection, lanes, batch_size)
    by_lane: dict[int, list[Sequence[Any]]] = {lane.number: [] for lane in lanes}
    for number, *row in rows:
        by_lane[number].append(row)
    some = False
    for lane, begin in zip(lanes, began, strict=True):
        now, last_due, *_, last_entry, _, _ = by_lane[lane.number][-1]
        found = by_lane[lane.number] if last_due is not None else []
        for _, _, seq, id, created_at, run, attempts, entry, cause, key in found:
            lane.deferrals.release(
                WaitingMessage(
                    lane.number, seq, id, created_at, run, attempts, entry, cause, key
                )
            )
        is_cut = len(found) >= batch_size
        up_to = (last_due, last_entry) if is_cut else (now, _LAST_ENTRY)
        lane.deferrals.scanned(begin, up_to, is_cut=is_cut)
        some = some or bool(found)
    if some:
        board.wake()


async def find_due(
    connection: Connection, lanes: Sequence[Lane], max_rows: int
) -> list[tuple[Any, ...]]:
    """Run `find_due.sql`."""
    since = [lane.deferrals.since for lane in lanes]
    cursor = await connection.execute(
        load("relay", "find_due"),
        {
            "lanes": [lane.number for lane in lanes],
            "moments": [lane.deferrals.due_up_to[0] for lane in lanes],
            "entries": [lane.deferrals.due_up_to[1] for lane in lanes],
            "since": min((m for m in since if m is not None), default=LONG_AGO),
            "max_rows": max_rows,
        },
    )
    return await cursor.fetchall()
