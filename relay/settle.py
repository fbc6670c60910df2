"""Settle: decide on each message of a batch that was published.

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

from pillarbox.outbox.log.lanes.batch import (
    BLOCKED,
    PUBLISHED,
    UNKNOWN,
    UNTOUCHED,
    ClaimedBatch,
    ClaimedMessage,
    Disposition,
)
from pillarbox.outbox.log.lanes.keys import BatchKeys
from pillarbox.outbox.log.lanes.lane import Advance, Extent, Lane
from pillarbox.outbox.log.progress import Day
from pillarbox.outbox.log.settle import ENDS, Decided, Settlement, gets_entry
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.relay.publish import Answer
from pillarbox.relay.publisher import Acked, Nacked


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
) -> list[Decided]:
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
    decided: Sequence[Decided],
) -> tuple[list[Decided], dict[int, int]]:
    """Give an entry to the rows without an answer that a position is to pass.

    Returns:
        All messages, and the seq of each lane from which on rows are left.
    """
    last: dict[int, int] = {}
    for row, it in decided:
        if row.waiting is None and it.cause not in {"untouched", "blocked"}:
            last[row.lane] = max(row.seq, last.get(row.lane, row.seq))
    cuts: dict[int, int] = {}
    closed: list[Decided] = []
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


def _advances(
    batch: ClaimedBatch, decided: Iterable[Decided], cuts: Mapping[int, int]
) -> Sequence[Advance]:
    """Return the positions to store of the lanes that the batch moves on."""
    new: dict[int, list[Decided]] = {}
    for row, it in decided:
        if row.waiting is None:
            new.setdefault(row.lane, []).append((row, it))
        elif it.cause in ENDS or gets_entry(row, it):
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


def _advance(lane: Lane, rows: Sequence[Decided], extent: Extent | None) -> Advance:
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
