"""Settle: decide on each message of a batch, and record the decisions.

not covered ──claim──▶ (in flight, nothing written) ──ack──▶ covered
                            │
                            ├─last nack, or a permanent one─▶ covered, entry settled
                            │
         ┌──covered, entry──┴─nack, no answer, not due, or behind one of these
         ▼
      the log ──claim──▶ (in flight, nothing written) ──ack, last nack─▶ entry settled
         ▲                    │
         └───entry: refused───┴─nack

A settlement is made from a batch and its answers, then stored, then told to the lanes.
One transaction stores the positions that cover the messages and the entries of those
that were not published. Its positions have the next number of their lanes, which is
unique: of two relays that both claimed the messages, one settles.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from outbox.cloudevents.raw_text import storable_reason
from outbox.limits import MAX_WAIT
from outbox.log.lane import Advance, Extent
from outbox.log.lanes.batch import (
    BLOCKED,
    PUBLISHED,
    UNKNOWN,
    UNTOUCHED,
    ClaimedBatch,
    ClaimedMessage,
    Disposition,
)
from outbox.log.lanes.keys import BatchKeys
from outbox.log.lanes.lane import Lane
from outbox.log.progress import Day
from outbox.log.reader import LogReader
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy
from relay.publish import Answer
from relay.publisher import Acked, Nacked

WRITES: Final = ("outbox.position", "outbox.deferral", "outbox.dead_letter")
"""The tables into which a settlement inserts."""

_ENDS: Final = {"published", "dead_lettered", "ended"}
_MAX_ATTEMPTS: Final = 2**31 - 2
"""One less than the column's maximum, so that adding one still fits."""

_Decided = tuple[ClaimedMessage, Disposition]


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
    others: Sequence[_Decided]
    advances: Sequence[Advance[Any]]
    cut: frozenset[int]

    def of(self, *causes: str) -> Sequence[_Decided]:
        """Return the messages among `others` with one of these causes."""
        return [one for one in self.others if one[1].cause in causes]

    @property
    def entries(self) -> Sequence[_Decided]:
        """The messages that get an entry in the log."""
        return [one for one in self.others if _gets_entry(*one)]

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


def settle(
    batch: ClaimedBatch, answers: Sequence[Answer], retry: RetryPolicy
) -> Settlement:
    """Decide on the messages of a batch.

    A position passes rows in order of seq: of the rows without an answer, those behind
    the last answer of their lane are left for the next claim; the others get an entry.
    """
    decided = decide(batch.rows, answers, retry)
    cuts: dict[int, int] = {}
    if [1 for row, it in decided if it.cause == "untouched" and row.waiting is None]:
        decided, cuts = _close_gaps(decided)
    decided += batch.withheld
    if cuts:
        decided = [
            (row, it)
            for row, it in decided
            if row.waiting is not None or row.seq < cuts.get(row.lane, row.seq + 1)
        ]
    others = [
        (row, it)
        for row, it in decided
        if it.cause != "published" or row.waiting is not None
    ]
    advances = _advances(batch, decided, cuts)
    published = len(decided) - len(others)
    return Settlement(batch.lanes, published, others, advances, frozenset(cuts))


def decide(
    rows: Sequence[ClaimedMessage], answers: Sequence[Answer], retry: RetryPolicy
) -> list[_Decided]:
    """Turn answers into dispositions.

    Only the first nacked message of a key is charged an attempt; those behind it only
    wait. A postponed message isn't charged.
    """
    keys = BatchKeys()
    return [
        (
            row,
            PUBLISHED
            if isinstance(answer, Acked)
            else _decide(row, answer, keys, retry),
        )
        for row, answer in zip(rows, answers, strict=True)
    ]


def _decide(
    row: ClaimedMessage, answer: Answer, keys: BatchKeys, retry: RetryPolicy
) -> Disposition:
    match answer:
        case Nacked(reason, permanent=True):
            return Disposition("dead_lettered", reason)
        case Nacked(reason, retry_after=after) if row.key not in keys.charged:
            keys.charge(row.key)
            if after is None and retry.spent(row.attempts + 1):
                return Disposition("dead_lettered", reason)
            keys.close(row.key)
            if after is None:
                delay = retry.delay(row.attempts + 1).total_seconds()
                return Disposition("refused", reason, delay, charge=1)
            delay = max(after, retry.first_delay).total_seconds()
            return Disposition("postponed", reason, delay)
    return BLOCKED if row.key in keys.closed else UNTOUCHED


def _close_gaps(
    decided: Sequence[_Decided],
) -> tuple[list[_Decided], dict[int, int]]:
    """Give an entry to the rows without an answer that a position is to pass.

    Returns:
        All messages, and the seq of each lane from which on rows are left.
    """
    last: dict[int, int] = {}
    for row, it in decided:
        if row.waiting is None and it.cause not in {"untouched", "blocked"}:
            last[row.lane] = max(row.seq, last.get(row.lane, row.seq))
    cuts: dict[int, int] = {}
    closed: list[_Decided] = []
    keys = BatchKeys()
    for row, it in decided:
        if row.waiting is not None or it.cause != "untouched":
            closed.append((row, it))
        elif row.lane not in last or row.seq > last[row.lane]:
            cuts[row.lane] = min(row.seq, cuts.get(row.lane, row.seq))
        else:
            closed.append((row, BLOCKED if row.key in keys.closed else UNKNOWN))
            keys.close(row.key)
    return closed, cuts


def _gets_entry(row: ClaimedMessage, disposition: Disposition) -> bool:
    """Whether the log gets an entry, as it may already have one that says so."""
    if row.waiting is not None:
        if disposition.cause == "blocked":
            return row.waiting.cause != "blocked"
        if disposition.cause == "aside":
            return False
    return disposition.waits


def _advances(
    batch: ClaimedBatch, decided: Iterable[_Decided], cuts: Mapping[int, int]
) -> Sequence[Advance[Lane]]:
    """Return the positions to store of the lanes that the batch moves on."""
    new: dict[int, list[_Decided]] = {}
    for row, it in decided:
        if row.waiting is None:
            new.setdefault(row.lane, []).append((row, it))
        elif it.cause in _ENDS or _gets_entry(row, it):
            new.setdefault(row.lane, [])
    advances = []
    for lane in batch.lanes:
        rows, extent = new.get(lane.number), batch.extents.get(lane.number)
        if extent is not None and lane.number in cuts:
            up_to = max((row.seq for row, _ in rows or ()), default=-1)
            extent = extent._replace(up_to=up_to, is_cut=True) if rows else None
        if rows is not None or extent is not None:
            advances.append(_advance(lane, rows or (), extent))
    return advances


def _advance(
    lane: Lane, rows: Sequence[_Decided], extent: Extent | None
) -> Advance[Lane]:
    progress = lane.progress
    assert progress is not None
    if extent is not None:
        (snapshot, next_xid, *_), is_cut = extent.view, extent.is_cut
        progress = progress.claimed(extent.up_to, snapshot, next_xid, is_cut=is_cut)
    moments = [row.created_at for row, _ in rows]
    same = progress.day_of(min(moments), max(moments)) if moments else None
    days = [same or progress.day_of(moment) for moment in moments]
    messages: Counter[Day] = Counter(filter(None, days))
    deferred = [
        day for day, (_, it) in zip(days, rows, strict=True) if it.cause != "published"
    ]
    after, stored = progress.settle(messages.keys())
    return Advance(lane, after, stored, messages, Counter(filter(None, deferred)))


async def store_settlement(
    connection: Connection, reader: LogReader, settlement: Settlement
) -> dict[int, datetime]:
    """Store a settlement.

    Returns:
        The earliest due time of each lane with messages that wait for a point in time.

    Raises:
        psycopg.errors.UniqueViolation: see `Settlements.store`.
    """
    advances, entries = settlement.advances, settlement.entries
    ended = settlement.of("published", "ended")
    dead_lettered = settlement.of("dead_lettered")
    if not (ended or dead_lettered or entries):
        await reader.settlements.store(connection, advances)
        return {}
    due = {}
    async with connection.transaction():
        await reader.settlements.store(connection, advances)
        if dead_lettered:
            reasons = [(row, it.reason) for row, it in dead_lettered]
            await move_to_dead_letters(connection, reasons, reader.name, by_hand=False)
        if entries:
            due = await _defer(connection, entries, reader.name)
        if ended:
            await _end_runs(connection, ended, reader.name)
    return due


async def _defer(
    connection: Connection, entries: Sequence[_Decided], reader: str
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
    connection: Connection, ended: Sequence[_Decided], reader: str
) -> None:
    rows = [row for row, _ in ended]
    await connection.execute(
        load("outbox.log", "end_runs"),
        {
            "reader": reader,
            **_log(rows),
            "attempts": [row.attempts for row in rows],
            "outcomes": [
                "published" if it.cause == "published" else None for _, it in ended
            ],
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
