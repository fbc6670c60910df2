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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from outbox.cloudevents.raw_text import storable
from outbox.log.progress import Day
from outbox.log.reader import LogReader, Settled
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy
from relay.claim import Batch, Claimed, Read
from relay.lanes.lane import Lane
from relay.publish import Answer
from relay.publisher import Acked, Nacked

OUTCOMES: Final = ("outbox.position", "outbox.deferral", "outbox.dead_letter")
"""The tables into which a relay inserts what became of its messages."""

_MAX_ATTEMPTS: Final = 2**31 - 2
"""One less than the column's maximum, so that adding one still fits."""


@dataclass(slots=True)
class Settlement:
    """The outcomes to record for a batch, and the rows to leave untouched.

    Attributes:
        held: messages that wait because their key is blocked.
        scheduled: messages that are not due yet.
        aside: messages too large to be loaded, which are moved to the dead letters.
        unknown: messages without an answer, which are published again.
        ended: messages in the log that don't exist.
        positions: what the settlement stores of its lanes.
    """

    published: list[Claimed] = field(default_factory=list)
    retried: list[tuple[Claimed, str, float]] = field(default_factory=list)
    put_off: list[tuple[Claimed, str, float]] = field(default_factory=list)
    dead_lettered: list[tuple[Claimed, str]] = field(default_factory=list)
    held: list[Claimed] = field(default_factory=list)
    scheduled: list[Claimed] = field(default_factory=list)
    aside: list[Claimed] = field(default_factory=list)
    unknown: list[Claimed] = field(default_factory=list)
    ended: list[Claimed] = field(default_factory=list)
    untouched: list[Claimed] = field(default_factory=list)
    positions: list[Settled[Lane]] = field(default_factory=list)

    @property
    def waiting(self) -> list[tuple[Claimed, str, float]]:
        """The messages to retry later, which block their keys until then."""
        return [*self.retried, *self.put_off]

    def keep(self, keeps: Callable[[Claimed], bool]) -> None:
        """Leave out the messages for which this doesn't hold."""
        for rows in (
            *(self.published, self.held, self.scheduled, self.aside),
            *(self.unknown, self.ended, self.untouched),
        ):
            rows[:] = filter(keeps, rows)
        for refused in (self.retried, self.put_off):
            refused[:] = [one for one in refused if keeps(one[0])]
        self.dead_lettered[:] = [one for one in self.dead_lettered if keeps(one[0])]

    def drop(self, lanes: Collection[int]) -> None:
        """Leave out what belongs to these lanes."""
        self.keep(lambda row: row.lane not in lanes)
        self.positions[:] = [
            one for one in self.positions if one.lane.number not in lanes
        ]


def complete(settlement: Settlement, batch: Batch) -> None:
    """Add the messages that were not published, and the positions that cover all.

    A position passes rows in order of seq. Of the rows without an answer, those behind
    the last answer of their lane are left for the next claim; the others get an entry.
    """
    answered = [
        *settlement.published,
        *(row for row, *_ in settlement.waiting),
        *(row for row, _ in settlement.dead_lettered),
    ]
    last: dict[int, int] = {}
    for row in answered:
        if row.place is None:
            last[row.lane] = max(row.seq, last.get(row.lane, row.seq))
    cuts: dict[int, int] = {}
    waits: set[str | None] = set()
    for row in settlement.untouched:
        if row.place is not None:
            continue
        if row.lane not in last or row.seq > last[row.lane]:
            cuts[row.lane] = min(row.seq, cuts.get(row.lane, row.seq))
        elif row.key in waits:
            settlement.held.append(row)
        else:
            settlement.unknown.append(row)
            waits |= {row.key} - {None}
    settlement.untouched[:] = [row for row in settlement.untouched if row.place]
    settlement.held += batch.held
    settlement.scheduled += batch.scheduled
    settlement.aside += batch.oversized
    settlement.unknown += batch.unread
    settlement.ended += batch.ended
    if cuts:
        settlement.keep(
            lambda row: (
                row.place is not None or row.seq < cuts.get(row.lane, row.seq + 1)
            )
        )
    rows: dict[int, list[tuple[Claimed, bool]]] = {}
    for row in settlement.published:
        rows.setdefault(row.lane, []).append((row, True))
    for row in _logged(settlement):
        rows.setdefault(row.lane, []).append((row, False))
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
    for row in settlement.untouched:
        assert row.place is not None
        lanes[row.lane].deferrals.release(row.place)
        lanes[row.lane].wake()
    waiting = [row for row, *_ in settlement.waiting]
    for row in (
        *waiting,
        *settlement.held,
        *settlement.scheduled,
        *settlement.aside,
        *settlement.unknown,
    ):
        lanes[row.lane].deferrals.note_created(row.created_at)
    for row in settlement.held:
        assert row.key is not None
        lanes[row.lane].deferrals.hold(row.key, row.seq)
    for row in (*waiting, *settlement.unknown):
        if row.key is not None:
            lanes[row.lane].deferrals.block(row.key)


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


def _logged(settlement: Settlement) -> Iterator[Claimed]:
    """Yield the messages that get an entry."""
    yield from (row for row, _ in settlement.dead_lettered)
    yield from (row for row, _ in _reasons(settlement))
    yield from settlement.ended


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
            case Nacked(reason, retry_after=timedelta() as after, is_attempt=True) if (
                row.key not in charged
            ):
                settlement.retried.append((row, reason, after.total_seconds()))
                waits |= {row.key} - {None}
                charged |= {row.key} - {None}
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
    connection: Connection, reader: LogReader, settlement: Settlement
) -> dict[int, datetime]:
    """Record a settlement.

    Returns:
        The earliest due time of each lane with messages that wait for a point in time.

    Raises:
        psycopg.errors.UniqueViolation: see `LogReader.store`.
    """
    ended = [
        *((row, "published") for row in settlement.published if row.place is not None),
        *((row, None) for row in settlement.ended),
    ]
    if not (ended or settlement.dead_lettered or any(_reasons(settlement))):
        await reader.store(connection, settlement.positions)
        return {}
    async with connection.transaction():
        await reader.store(connection, settlement.positions)
        if settlement.dead_lettered:
            await _move_to_dead_letters(
                connection, settlement.dead_lettered, reader.reader, by_hand=False
            )
        due = await _defer(connection, settlement, reader.reader)
        if ended:
            await _end_runs(connection, ended, reader.reader)
    return due


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
    for row in settlement.aside:
        if row.place is None:
            yield row, _Entry("aside", delay=0)
    for row in settlement.unknown:
        yield row, _Entry("unknown", delay=0)


async def _defer(
    connection: Connection, settlement: Settlement, reader: str
) -> dict[int, datetime]:
    entries = list(_reasons(settlement))
    if not entries:
        return {}
    rows = [row for row, _ in entries]
    cursor = await connection.execute(
        load("relay", "defer"),
        {
            "reader": reader,
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
    connection: Connection, nacked: Sequence[tuple[Claimed, str]], reader: str
) -> None:
    """Move messages of any lanes to the dead letters, for retry by hand only."""
    await _move_to_dead_letters(connection, nacked, reader, by_hand=True)


async def _move_to_dead_letters(
    connection: Connection,
    nacked: Sequence[tuple[Claimed, str]],
    reader: str,
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
            "reader": reader,
            "by_hand": by_hand,
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
