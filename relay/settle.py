"""Settle: record the outcome of a batch.

not covered ──claim──▶ (in flight, nothing written) ──ack──▶ covered
                            │
                            ├─last nack, or a permanent one─▶ covered, entry settled
                            │
         ┌──covered, entry──┴─nack, no answer, not due, or behind one of these
         ▼
      the log ──claim──▶ (in flight, nothing written) ──ack, last nack─▶ entry settled
         ▲                    │
         └───entry: refused───┴─nack

One transaction stores the positions that cover the messages and the entries of those
that were not published. Its positions have the next number of their lanes, which is
unique: of two relays that both claimed the messages, one settles.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from outbox.cloudevents.raw_text import storable_reason
from outbox.limits import MAX_WAIT
from outbox.log.progress import Day
from outbox.log.reader import LogReader, Read, Settled
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy
from relay.claim import (
    ASIDE,
    HELD,
    PUBLISHED,
    UNKNOWN,
    UNTOUCHED,
    Batch,
    Claimed,
    Outcome,
)
from relay.lanes.lane import Lane
from relay.publish import Answer
from relay.publisher import Acked, Nacked

OUTCOMES: Final = ("outbox.position", "outbox.deferral", "outbox.dead_letter")
"""The tables into which a relay inserts what became of its messages."""

_ENDS: Final = {"dead_lettered", "ended"}
_BLOCKS: Final = {"refused", "postponed", "unknown"}
_WAITS: Final = {*_BLOCKS, "scheduled", "blocked", "aside"}
_MAX_ATTEMPTS: Final = 2**31 - 2
"""One less than the column's maximum, so that adding one still fits."""


@dataclass(slots=True)
class Settlement:
    """The outcomes to record for a batch.

    Attributes:
        positions: what the settlement stores of its lanes.
    """

    outcomes: list[tuple[Claimed, Outcome]] = field(default_factory=list)
    positions: list[Settled[Lane]] = field(default_factory=list)

    def of(self, *causes: str) -> list[tuple[Claimed, Outcome]]:
        """Return the messages with one of these causes."""
        return [one for one in self.outcomes if one[1].cause in causes]


def complete(settlement: Settlement, batch: Batch) -> None:
    """Add the messages that were not published, and the positions that cover all.

    A position passes rows in order of seq. Of the rows without an answer, those behind
    the last answer of their lane are left for the next claim; the others get an entry.
    """
    last: dict[int, int] = {}
    for row, outcome in settlement.outcomes:
        if row.place is None and outcome is not UNTOUCHED and outcome is not HELD:
            last[row.lane] = max(row.seq, last.get(row.lane, row.seq))
    cuts: dict[int, int] = {}
    waits: set[str | None] = set()
    for index, (row, outcome) in enumerate(settlement.outcomes):
        if row.place is not None or outcome is not UNTOUCHED:
            continue
        if row.lane not in last or row.seq > last[row.lane]:
            cuts[row.lane] = min(row.seq, cuts.get(row.lane, row.seq))
        elif row.key in waits:
            settlement.outcomes[index] = row, HELD
        else:
            settlement.outcomes[index] = row, UNKNOWN
            waits |= {row.key} - {None}
    settlement.outcomes += batch.others
    if cuts:
        settlement.outcomes = [
            (row, outcome)
            for row, outcome in settlement.outcomes
            if row.place is not None or row.seq < cuts.get(row.lane, row.seq + 1)
        ]
    rows: dict[int, list[tuple[Claimed, bool]]] = {}
    for row, outcome in settlement.outcomes:
        is_published = outcome is PUBLISHED
        if is_published or outcome.cause in _ENDS or _is_entered(row, outcome):
            rows.setdefault(row.lane, []).append((row, is_published))
    for lane in batch.lanes:
        if lane.number in cuts:
            lane.wake()
        elif lane.number in batch.reads:
            rows.setdefault(lane.number, [])
        if lane.number in rows:
            settlement.positions.append(
                _advance(
                    lane,
                    rows[lane.number],
                    batch.reads.get(lane.number),
                    is_cut=lane.number in cuts,
                )
            )


def remember(settlement: Settlement, batch: Batch) -> None:
    """Block the keys that must wait; make messages of the log claimable again.

    The settlement is not recorded yet, but no claim of these lanes comes before that.
    """
    lanes = {lane.number: lane for lane in batch.lanes}
    for row, _ in settlement.of("untouched"):
        assert row.place is not None
        lanes[row.lane].deferrals.release(row.place)
        lanes[row.lane].wake()
    for row, outcome in settlement.outcomes:
        if outcome.cause not in _WAITS:
            continue
        deferrals = lanes[row.lane].deferrals
        deferrals.note_created(row.created_at)
        if outcome is HELD:
            assert row.key is not None
            deferrals.hold(row.key, row.seq)
        elif outcome.cause in _BLOCKS and row.key is not None:
            deferrals.block(row.key)


def _advance(
    lane: Lane,
    rows: Iterable[tuple[Claimed, bool]],
    read: Read | None,
    *,
    is_cut: bool,
) -> Settled[Lane]:
    progress = lane.progress
    assert progress is not None
    new = [(row, is_published) for row, is_published in rows if row.place is None]
    if read is not None and (new or not is_cut):
        up_to = max(row.seq for row, _ in new) if is_cut else read.up_to
        is_cut = is_cut or read.is_cut
        progress = progress.claimed(up_to, *read.look, is_cut=is_cut)
    lane.skipped = 0
    messages: Counter[Day] = Counter()
    deferred: Counter[Day] = Counter()
    moments = [row.created_at for row, _ in new]
    same = progress.day_of(min(moments), max(moments)) if moments else None
    for row, is_published in new:
        day = same or progress.day_of(row.created_at)
        assert day is not None
        messages[day] += 1
        deferred[day] += not is_published
    return Settled(lane, *progress.settle(messages.keys()), messages, deferred)


def decide(
    rows: Sequence[Claimed], answers: Sequence[Answer], retry: RetryPolicy
) -> Settlement:
    """Turn answers into outcomes to record.

    Only the first nacked message of a key is charged an attempt; those behind it only
    wait. A postponed message isn't charged.
    """
    charged: set[str | None] = set()
    waits: set[str | None] = set()

    def outcome_of(row: Claimed, answer: Answer) -> Outcome:
        match answer:
            case Nacked(reason, permanent=True):
                return Outcome("dead_lettered", reason)
            case Nacked(reason, retry_after=after) if row.key not in charged:
                charged.update({row.key} - {None})
                if after is None and retry.spent(row.attempts + 1):
                    return Outcome("dead_lettered", reason)
                waits.update({row.key} - {None})
                if after is None:
                    delay = retry.delay(row.attempts + 1).total_seconds()
                    return Outcome("refused", reason, delay, charge=1)
                if answer.is_attempt:
                    return Outcome("refused", reason, after.total_seconds(), charge=1)
                delay = max(after, retry.first_delay).total_seconds()
                return Outcome("postponed", reason, delay)
        return HELD if row.key in waits else UNTOUCHED

    return Settlement(
        [
            (row, PUBLISHED if isinstance(answer, Acked) else outcome_of(row, answer))
            for row, answer in zip(rows, answers, strict=True)
        ]
    )


async def settle_batch(
    connection: Connection, reader: LogReader, settlement: Settlement
) -> dict[int, datetime]:
    """Record a settlement.

    Returns:
        The earliest due time of each lane with messages that wait for a point in time.

    Raises:
        psycopg.errors.UniqueViolation: see `LogReader.store`.
    """
    # Of most messages, a position says all there is to say.
    others = Settlement(
        [
            (row, outcome)
            for row, outcome in settlement.outcomes
            if outcome is not PUBLISHED or row.place is not None
        ]
    )
    ended: list[tuple[Claimed, str | None]] = [
        (row, "published") for row, _ in others.of("published")
    ]
    ended += ((row, None) for row, _ in others.of("ended"))
    dead_lettered = others.of("dead_lettered")
    entries = [one for one in others.outcomes if _is_entered(*one)]
    if not (ended or dead_lettered or entries):
        await reader.store(connection, settlement.positions)
        return {}
    due = {}
    async with connection.transaction():
        await reader.store(connection, settlement.positions)
        if dead_lettered:
            await move_to_dead_letters(
                connection, dead_lettered, reader.reader, by_hand=False
            )
        if entries:
            due = await _defer(connection, entries, reader.reader)
        if ended:
            await _end_runs(connection, ended, reader.reader)
    return due


def _is_entered(row: Claimed, outcome: Outcome) -> bool:
    """Return whether a message gets an entry in the log, as it may have one already."""
    if row.place is not None and outcome in {HELD, ASIDE}:
        return outcome is HELD and row.place.cause != "blocked"
    return outcome.cause in _WAITS


async def _defer(
    connection: Connection, entries: Sequence[tuple[Claimed, Outcome]], reader: str
) -> dict[int, datetime]:
    rows = [row for row, _ in entries]
    outcomes = [outcome for _, outcome in entries]
    cursor = await connection.execute(
        load("relay", "defer"),
        {
            "reader": reader,
            **_log(rows),
            "attempts": [
                min(row.attempts, _MAX_ATTEMPTS) + outcome.charge
                for row, outcome in entries
            ],
            "causes": [outcome.cause for outcome in outcomes],
            "delays": [
                None if o.delay is None else min(o.delay, MAX_WAIT.total_seconds())
                for o in outcomes
            ],
            "reasons": [_stored(outcome.reason) for outcome in outcomes],
            **_bounds(rows),
        },
    )
    return dict(await cursor.fetchall())


async def _end_runs(
    connection: Connection,
    ended: Sequence[tuple[Claimed, str | None]],
    reader: str,
) -> None:
    rows = [row for row, _ in ended]
    await connection.execute(
        load("relay", "end_runs"),
        {
            "reader": reader,
            **_log(rows),
            "attempts": [row.attempts for row in rows],
            "outcomes": [outcome for _, outcome in ended],
        },
        binary=True,
    )


async def move_to_dead_letters(
    connection: Connection,
    nacked: Sequence[tuple[Claimed, Outcome]],
    reader: str,
    *,
    by_hand: bool,
) -> None:
    """Move messages to the dead letters.

    Args:
        by_hand: whether they can be retried by hand only.
    """
    rows = [row for row, _ in nacked]
    await connection.execute(
        load("relay", "move_to_dead_letters"),
        {
            **_log(rows),
            "reasons": [_stored(outcome.reason) for _, outcome in nacked],
            "attempts": [min(row.attempts, _MAX_ATTEMPTS) + 1 for row in rows],
            "reader": reader,
            "by_hand": by_hand,
            **_bounds(rows),
        },
    )


def _stored(reason: str | None) -> str | None:
    return None if reason is None else storable_reason(reason)


def _log(rows: Sequence[Claimed]) -> dict[str, object]:
    """Return the columns of log entries that describe their messages."""
    return {
        "ids": [row.id for row in rows],
        "created_ats": [row.created_at for row in rows],
        "lanes": [row.lane for row in rows],
        "seqs": [row.seq for row in rows],
        "runs": [0 if row.place is None else row.place.run for row in rows],
        "keys": [row.key for row in rows],
    }


def _bounds(rows: Sequence[Claimed]) -> dict[str, object]:
    """Bound `created_at` so that the planner considers only the batch's partitions."""
    moments = [row.created_at for row in rows]
    return {"first": min(moments), "last": max(moments)}
