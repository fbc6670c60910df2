"""Settle: record the outcome of a batch.

no mark ──claim──▶ (in flight, nothing written) ──ack──▶ a mark: published
                         │
                         ├─last nack, or a permanent one─▶ a mark: dead_lettered
                         │
    ┌──a mark: deferred──┴─nack, or not due, or behind a nacked one
    ▼
the log ──claim──▶ (in flight, nothing written) ──ack, last nack──▶ entry: settled
    ▲                    │
    └───entry: refused───┴─nack
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Final, NamedTuple

from outbox.cloudevents.raw_text import storable
from outbox.dead_letters import TOPIC_HEADER
from outbox.limits import MAX_INDEXED_BYTES
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy
from relay.claim import BIN, Batch, Claimed, bin_of
from relay.lanes.lane import BEGINNING
from relay.publish import Answer
from relay.publisher import Acked, Nacked

OUTCOMES: Final = ("outbox.settlement", "outbox.deferral", "outbox.dead_letter")
"""The tables into which a relay inserts what became of its messages."""

_MAX_ATTEMPTS: Final = 2**31 - 2
"""One less than the column's maximum, so that adding one still fits."""
_LONGEST: Final = 4096
"""A mark covers fewer seqs than this; `outbox.settlement` has the same limit."""


@dataclass(slots=True)
class Settlement:
    """The outcomes to record for a batch, and the rows to leave untouched.

    Attributes:
        held: messages that wait because their key is blocked.
        scheduled: messages that are not due yet.
        ended: messages in the log that needn't be published, each with its outcome;
            None if the message doesn't exist.
    """

    published: list[Claimed] = field(default_factory=list)
    retried: list[tuple[Claimed, str, float]] = field(default_factory=list)
    put_off: list[tuple[Claimed, str, float]] = field(default_factory=list)
    dead_lettered: list[tuple[Claimed, str]] = field(default_factory=list)
    held: list[Claimed] = field(default_factory=list)
    scheduled: list[Claimed] = field(default_factory=list)
    ended: list[tuple[Claimed, str | None]] = field(default_factory=list)
    untouched: list[Claimed] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to record."""
        return not (self.published or self.dead_lettered or self.ended or self.deferred)

    @property
    def waiting(self) -> list[tuple[Claimed, str, float]]:
        """The messages to retry later, which block their keys until then."""
        return [*self.retried, *self.put_off]

    @property
    def deferred(self) -> bool:
        """Whether any messages have to wait."""
        return bool(self.retried or self.put_off or self.held or self.scheduled)

    def add_unpublished(self, batch: Batch) -> None:
        """Add the messages of a claim that are not published."""
        self.held += batch.held
        self.scheduled += batch.scheduled
        self.ended += batch.ended

    def withdraw_deferrals(self, lanes: Collection[int]) -> None:
        """Leave messages of these lanes untouched if they would have to wait."""
        for refused in (self.retried, self.put_off):
            for one in [one for one in refused if one[0].lane in lanes]:
                refused.remove(one)
                self.untouched.append(one[0])
        for rows in (self.held, self.scheduled):
            for row in [row for row in rows if row.lane in lanes]:
                rows.remove(row)
                self.untouched.append(row)


def decide(
    rows: Sequence[Claimed], answers: Sequence[Answer], retry: RetryPolicy
) -> Settlement:
    """Turn answers into outcomes to record.

    Only the first nacked message of a key is charged an attempt; those behind it only
    wait. A postponed message isn't charged.
    """
    settlement = Settlement()
    charged: set[str | None] = set()
    waits: set[str | None] = set()
    for row, answer in zip(rows, answers, strict=True):
        match answer:
            case Acked():
                settlement.published.append(row)
            case Nacked(reason, permanent=False, retry_after=timedelta() as after) if (
                row.key not in charged
            ):
                delay = max(after, retry.first_delay).total_seconds()
                settlement.put_off.append((row, reason, delay))
                waits |= {row.key} - {None}
                charged |= {row.key} - {None}
            case Nacked(reason, permanent, after) if permanent or (
                after is None
                and row.key not in charged
                and retry.spent(row.attempts + 1)
            ):
                settlement.dead_lettered.append((row, reason))
                if not permanent:
                    charged |= {row.key} - {None}
            case Nacked(reason, retry_after=None) if row.key not in charged:
                delay = retry.delay(row.attempts + 1).total_seconds()
                settlement.retried.append((row, reason, delay))
                waits |= {row.key} - {None}
                charged |= {row.key} - {None}
            case _ if row.key in waits:
                settlement.held.append(row)
            case _:
                settlement.untouched.append(row)
    return settlement


async def settle_batch(
    connection: Connection, settlement: Settlement, *, origin: str
) -> dict[int, datetime]:
    """Record a settlement.

    Safe to repeat, and safe if another relay settled a row in the meantime.

    Returns:
        The earliest due time of each lane with messages that wait for a point in time.
    """
    first = [row for row in settlement.published if row.place is None]
    again = [row for row in settlement.published if row.place is not None]
    if (
        first
        and len(first) == len(settlement.published)
        and not (settlement.deferred or settlement.dead_lettered or settlement.ended)
    ):
        await mark_settled(connection, marks(first, "published"))
        return {}
    async with connection.transaction():
        if settlement.dead_lettered:
            await _move_to_dead_letters(
                connection, settlement.dead_lettered, origin, by_hand=False
            )
        due = await _defer(connection, settlement)
        await mark_settled(
            connection,
            [
                *marks(first, "published"),
                *marks(
                    _unmarked(r for r, _ in settlement.dead_lettered), "dead_lettered"
                ),
                *marks(_unmarked(row for row, _ in _reasons(settlement)), "deferred"),
            ],
        )
        ended = [*((row, "published") for row in again), *settlement.ended]
        if ended:
            await _end_runs(connection, ended)
    return due


def _unmarked(rows: Iterable[Claimed]) -> list[Claimed]:
    return [row for row in rows if row.place is None]


class Mark(NamedTuple):
    """The outcome of messages of one lane that were created in the same bin."""

    bin: datetime
    lane: int
    outcome: str
    rows: Sequence[Claimed]


def marks(rows: Iterable[Claimed], outcome: str) -> Iterator[Mark]:
    """Group rows that share a mark."""
    groups: dict[tuple[int, int, datetime], list[Claimed]] = {}
    group: list[Claimed] = []
    lane = block = -1
    starts = ends = BEGINNING
    for row in sorted(rows, key=_position):
        if (
            row.lane != lane
            or row.seq // _LONGEST != block
            or not starts <= row.created_at < ends
        ):
            lane, block = row.lane, row.seq // _LONGEST
            starts = bin_of(row.created_at)
            ends = starts + BIN
            group = groups.setdefault((lane, block, starts), [])
        group.append(row)
    for (lane, _, bin), members in groups.items():
        yield Mark(bin, lane, outcome, members)


def _position(row: Claimed) -> tuple[int, int]:
    return row.lane, row.seq


async def mark_settled(connection: Connection, marks: Iterable[Mark]) -> None:
    """Run `mark_settled.sql`."""
    marks = list(marks)
    if not marks:
        return
    ends = list(accumulate(len(mark.rows) for mark in marks))
    await connection.execute(
        load("relay", "mark_settled"),
        {
            "ids": [row.id for mark in marks for row in mark.rows],
            "bins": [mark.bin for mark in marks],
            "lanes": [mark.lane for mark in marks],
            "first_seqs": [mark.rows[0].seq for mark in marks],
            "last_seqs": [mark.rows[-1].seq for mark in marks],
            "outcomes": [mark.outcome for mark in marks],
            "starts": [
                end - len(m.rows) + 1 for m, end in zip(marks, ends, strict=True)
            ],
            "ends": ends,
        },
        binary=True,
    )


class _Entry(NamedTuple):
    """Why a message waits."""

    cause: str
    charge: int = 0
    delay: float | None = None
    reason: str | None = None


def _reasons(settlement: Settlement) -> Iterator[tuple[Claimed, _Entry]]:
    for row in settlement.scheduled:
        yield row, _Entry("scheduled")
    for row, reason, delay in settlement.retried:
        yield row, _Entry("refused", 1, delay, storable(reason))
    for row, reason, delay in settlement.put_off:
        yield row, _Entry("postponed", 0, delay, storable(reason))
    for row in settlement.held:
        # A message that was held before is already in the log as blocked.
        if row.place is None or row.place.cause != "blocked":
            yield row, _Entry("blocked")


async def _defer(connection: Connection, settlement: Settlement) -> dict[int, datetime]:
    entries = list(_reasons(settlement))
    if not entries:
        return {}
    rows = [row for row, _ in entries]
    cursor = await connection.execute(
        load("relay", "defer"),
        {
            **_log(rows),
            "attempts": [
                min(row.attempts, _MAX_ATTEMPTS) + entry.charge
                for row, entry in entries
            ],
            "causes": [entry.cause for _, entry in entries],
            "delays": [entry.delay for _, entry in entries],
            "reasons": [entry.reason for _, entry in entries],
            **_bounds(rows),
        },
    )
    return dict(await cursor.fetchall())


async def _end_runs(
    connection: Connection, ended: Sequence[tuple[Claimed, str | None]]
) -> None:
    rows = [row for row, _ in ended]
    await connection.execute(
        load("relay", "end_runs"),
        {
            **_log(rows),
            "attempts": [row.attempts for row in rows],
            "outcomes": [outcome for _, outcome in ended],
        },
        binary=True,
    )


async def move_to_dead_letters(
    connection: Connection, nacked: Sequence[tuple[Claimed, str]], origin: str
) -> None:
    """Move messages of any lanes to the dead letters, for retry by hand only."""
    async with connection.transaction():
        await _move_to_dead_letters(connection, nacked, origin, by_hand=True)
        await mark_settled(
            connection, marks(_unmarked(row for row, _ in nacked), "dead_lettered")
        )


async def _move_to_dead_letters(
    connection: Connection,
    nacked: Sequence[tuple[Claimed, str]],
    origin: str,
    *,
    by_hand: bool,
) -> None:
    rows = [row for row, _ in nacked]
    await connection.execute(
        load("relay", "move_to_dead_letters"),
        {
            **_log(rows),
            "reasons": [storable(reason) for _, reason in nacked],
            "attempts": [min(row.attempts, _MAX_ATTEMPTS) + 1 for row in rows],
            "origin": origin,
            "by_hand": by_hand,
            "max_topic_bytes": MAX_INDEXED_BYTES,
            "topic_header": TOPIC_HEADER,
            **_bounds(rows),
        },
    )


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
