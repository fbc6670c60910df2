"""Settle: store the outcomes of a batch's messages, and pass them to the lanes.

One transaction stores the positions that cover the messages and the entries of those
that wait. Its positions have the next number of their lanes, which is unique: of two
processes that both claimed the messages, one settles.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

import psycopg

from pillarbox.outbox.array_literal import moment_array, plain_array
from pillarbox.outbox.cloudevents.raw_text import storable_reason
from pillarbox.outbox.limits import MAX_WAIT
from pillarbox.outbox.log.claims import arrays_of
from pillarbox.outbox.log.lanes.batch import ClaimedMessage, Disposition
from pillarbox.outbox.log.lanes.lane import Advance, Lane
from pillarbox.outbox.log.reader import LogReader
from pillarbox.outbox.log.takeover import SKEW, Clock
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.sql_files import load

WRITES: Final = ("outbox.position", "outbox.deferral", "outbox.dead_letter")
"""The tables into which a settlement inserts."""

ENDS: Final = {"published", "dead_lettered", "ended", "cancelled"}
_MAX_ATTEMPTS: Final = 2**31 - 2
"""One less than the column's maximum, so that adding one still fits."""

Decided: TypeAlias = tuple[ClaimedMessage, Disposition]


@dataclass(frozen=True, slots=True)
class Settlement:
    """The dispositions of the messages of a batch, and the positions that cover them.

    Attributes:
        published: how many new messages were published; positions cover them.
        others: all other messages, and those from the log that were published.
        advances: the positions to store, lane by lane.
        cut: the lanes with rows that are left for the next claim.
    """

    lanes: Sequence[Lane]
    published: int
    others: Sequence[Decided]
    advances: Sequence[Advance]
    cut: frozenset[int]

    def of(self, *causes: str) -> Sequence[Decided]:
        """Return the messages among `others` with one of these causes."""
        return [one for one in self.others if one[1].cause in causes]

    @property
    def entries(self) -> Sequence[Decided]:
        """The messages that get an entry in the log."""
        return [one for one in self.others if gets_entry(*one)]

    def tell_lanes(self, due: Mapping[int, datetime], at: float) -> None:
        """Tell the lanes that it was stored.

        Args:
            due: see `store_settlement`.
            at: when storing began, as `time.monotonic()`.
        """
        lanes = {lane.number: lane for lane in self.lanes}
        for message, _ in self.of("untouched"):
            assert message.waiting is not None
            lanes[message.lane].release(message.waiting)
        for message, disposition in self.others:
            if disposition.waits:
                lanes[message.lane].keys.waits(
                    message.key, message.seq, message.created_at, disposition.cause
                )
        for advance in self.advances:
            advance.lane.settled(advance.after, at)
        for number, due_at in due.items():
            lanes[number].keys.expect(due_at)
        for number in self.cut:
            lanes[number].wake()


def gets_entry(row: ClaimedMessage, disposition: Disposition) -> bool:
    """Whether the log gets an entry, as it may already have one that says so."""
    if row.waiting is not None:
        if disposition.cause == "blocked":
            return row.waiting.cause != "blocked"
        if disposition.cause == "aside":
            return False
    return disposition.waits


async def store_settlement(
    connection: Connection, reader: LogReader, settlement: Settlement
) -> dict[int, datetime]:
    """Store a settlement.

    Returns:
        The earliest due time of each lane with messages that wait for a point in time.

    Raises:
        psycopg.errors.UniqueViolation: another process has settled one of the
            lanes.
    """
    advances, entries = settlement.advances, settlement.entries
    ended = settlement.of("published", "ended", "cancelled")
    dead_lettered = settlement.of("dead_lettered")
    if not (ended or dead_lettered or entries):
        await _store_positions(connection, reader.name, advances)
        return {}
    due = {}
    async with connection.transaction():
        await _store_positions(connection, reader.name, advances)
        if dead_lettered:
            reasons = [(row, it.reason) for row, it in dead_lettered]
            await move_to_dead_letters(connection, reasons, reader.name, by_hand=False)
        if entries:
            due = await _defer(connection, entries, reader.name)
        if ended:
            await _end_runs(connection, ended, reader.name)
    return due


async def _store_positions(
    connection: Connection, reader: str, advances: Iterable[Advance]
) -> None:
    """Store the positions of a settlement, in its transaction.

    Raises:
        psycopg.errors.UniqueViolation: another process has settled one of the
            lanes.
    """
    rows = [(advance, row) for advance in advances for row in advance.rows]
    if not rows:
        return
    await connection.execute(
        load("outbox.log", "store_positions"),
        {
            "reader": reader,
            "starts": moment_array([row.day.starts_at for _, row in rows]),
            "ends": moment_array([row.day.ends_at for _, row in rows]),
            "lanes": plain_array([advance.lane.number for advance, _ in rows]),
            "numbers": plain_array([row.number for _, row in rows]),
            **arrays_of([row.position for _, row in rows]),
            "messages": plain_array([it.messages.get(row.day, 0) for it, row in rows]),
            "deferred": plain_array([it.deferred.get(row.day, 0) for it, row in rows]),
            "next_xids": plain_array([it.after.next_xid for it, _ in rows]),
        },
        prepare=True,
    )


async def move_fences(
    connection: Connection, reader: str, lanes: Iterable[Lane], clock: Clock
) -> None:
    """Store the positions of today for lanes that were last settled in a day past.

    Nothing of these lanes may be in flight.
    """
    began = time.monotonic()
    moved: list[Advance] = []
    for lane in lanes:
        progress = lane.progress
        if progress is None or max(progress.fence).ends_at > clock.now - SKEW:
            continue
        today = max(day for day, _ in progress.days if day.starts_at <= clock.now)
        if (stored := lane.move_fence(today)) is not None:
            moved.append(Advance(lane, *stored, {}, {}))
    try:
        await _store_positions(connection, reader, moved)
    except psycopg.errors.UniqueViolation:
        # Another process has settled one of them.
        for advance in moved:
            advance.lane.require_takeover()
    else:
        for advance in moved:
            advance.lane.settled(advance.after, began)
            advance.lane.expire()


async def _defer(
    connection: Connection, entries: Sequence[Decided], reader: str
) -> dict[int, datetime]:
    rows = [row for row, _ in entries]
    cursor = await connection.execute(
        load("outbox.log", "defer"),
        {
            "reader": reader,
            **_log(rows),
            "attempts": [
                min(row.attempts, _MAX_ATTEMPTS) + it.charge for row, it in entries
            ],
            "causes": [it.cause for _, it in entries],
            "delays": [
                None if it.delay is None else min(it.delay, MAX_WAIT.total_seconds())
                for _, it in entries
            ],
            "reasons": [_stored(it.reason) for _, it in entries],
            **_bounds(rows),
        },
    )
    return dict(await cursor.fetchall())


async def _end_runs(
    connection: Connection, ended: Sequence[Decided], reader: str
) -> None:
    rows = [row for row, _ in ended]
    await connection.execute(
        load("outbox.log", "end_runs"),
        {
            "reader": reader,
            **_log(rows),
            "attempts": [row.attempts for row in rows],
            "outcomes": [None if it.cause == "ended" else it.cause for _, it in ended],
        },
        binary=True,
    )


async def move_to_dead_letters(
    connection: Connection,
    nacked: Sequence[tuple[ClaimedMessage, str | None]],
    reader: str,
    *,
    by_hand: bool,
) -> None:
    """Move messages to the dead letters.

    Args:
        nacked: the messages, each with the reason.
        by_hand: whether they can be retried by hand only.
    """
    rows = [row for row, _ in nacked]
    await connection.execute(
        load("outbox.log", "move_to_dead_letters"),
        {
            **_log(rows),
            "reasons": [_stored(reason) for _, reason in nacked],
            "attempts": [min(row.attempts, _MAX_ATTEMPTS) + 1 for row in rows],
            "reader": reader,
            "by_hand": by_hand,
            **_bounds(rows),
        },
    )


def _stored(reason: str | None) -> str | None:
    return None if reason is None else storable_reason(reason)


def _log(rows: Sequence[ClaimedMessage]) -> dict[str, object]:
    """Return the columns of log entries that describe their messages."""
    return {
        "ids": [row.id for row in rows],
        "created_ats": [row.created_at for row in rows],
        "lanes": [row.lane for row in rows],
        "seqs": [row.seq for row in rows],
        "runs": [0 if row.waiting is None else row.waiting.run for row in rows],
        "keys": [row.key for row in rows],
    }


def _bounds(rows: Sequence[ClaimedMessage]) -> dict[str, object]:
    """Bound `created_at` so that the planner considers only the batch's partitions."""
    moments = [row.created_at for row in rows]
    return {"first": min(moments), "last": max(moments)}
