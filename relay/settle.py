"""Settle: record the outcome of a batch.

ready ──claim──▶ (in flight, nothing written) ──ack──▶ published_at
▲                        │
│                        ├─nack─▶ available_at, attempts + 1; its key is blocked
│                        ├─put off─▶ the same, but attempts stay (or become 1)
│                        │              │
└────── due, in order ◀──┼──────────────┘
└─last nack, or a permanent one─▶ dead_lettered_at
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from outbox.cloudevents.raw_text import storable
from outbox.dead_letters import TOPIC_HEADER
from outbox.limits import MAX_INDEXED_BYTES
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from outbox.retry import RetryPolicy
from relay.claim import Claimed
from relay.publish import Answer
from relay.publisher import Acked, Nacked

_MAX_ATTEMPTS: Final = 2**31 - 2
"""One less than the column's maximum, so that adding one still fits."""


@dataclass(slots=True)
class Settlement:
    """The outcomes to record for a batch, and the rows to leave untouched."""

    published: list[Claimed] = field(default_factory=list)
    retried: list[tuple[Claimed, str, float]] = field(default_factory=list)
    put_off: list[tuple[Claimed, str, float]] = field(default_factory=list)
    dead_lettered: list[tuple[Claimed, str]] = field(default_factory=list)
    untouched: list[Claimed] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to record."""
        return not (self.published or self.dead_lettered or self.waiting)

    @property
    def waiting(self) -> list[tuple[Claimed, str, float]]:
        """The messages to retry later, which hold back their keys until then."""
        return [*self.retried, *self.put_off]

    def withdraw_refusals(self, lanes: Collection[int]) -> None:
        """Don't record refusals in these lanes; their messages stay ready."""
        for refused in (self.retried, self.put_off):
            for one in [one for one in refused if one[0].lane in lanes]:
                refused.remove(one)
                self.untouched.append(one[0])


def decide(
    rows: Sequence[Claimed], answers: Sequence[Answer], retry: RetryPolicy
) -> Settlement:
    """Turn answers into outcomes to record.

    Only the first nacked message of a key is charged an attempt: those behind it
    just wait. A message that was postponed isn't charged, either.
    """
    settlement = Settlement()
    charged: set[str | None] = set()
    for row, answer in zip(rows, answers, strict=True):
        match answer:
            case Acked():
                settlement.published.append(row)
            case Nacked(reason, permanent=False, retry_after=timedelta() as after):
                if row.key in charged:
                    settlement.untouched.append(row)
                    continue
                delay = max(after, retry.first_delay).total_seconds()
                settlement.put_off.append((row, reason, delay))
                charged |= {row.key} - {None}
            case Nacked(reason, permanent) if permanent or (
                row.key not in charged and retry.spent(row.attempts + 1)
            ):
                settlement.dead_lettered.append((row, reason))
                if not permanent:
                    charged |= {row.key} - {None}
            case Nacked(reason) if row.key not in charged:
                delay = retry.delay(row.attempts + 1).total_seconds()
                settlement.retried.append((row, reason, delay))
                charged |= {row.key} - {None}
            case _:
                settlement.untouched.append(row)
    return settlement


async def settle_batch(
    connection: Connection, settlement: Settlement, *, origin: str
) -> None:
    """Record a settlement, with at most one statement for each kind of outcome.

    Safe to repeat, and safe if another relay settled a row in the meantime.
    """
    if not settlement.waiting and not settlement.dead_lettered:
        if settlement.published:
            await mark_published(connection, settlement.published)
        return
    async with connection.transaction():
        if settlement.published:
            await mark_published(connection, settlement.published)
        if settlement.retried:
            await schedule_retry(connection, settlement.retried)
        if settlement.put_off:
            await schedule_retry(connection, settlement.put_off, charge=0)
        if settlement.dead_lettered:
            await move_to_dead_letters(connection, settlement.dead_lettered, origin)


async def mark_published(connection: Connection, rows: Sequence[Claimed]) -> None:
    """Run `mark_published.sql`."""
    await connection.execute(
        load("relay", "mark_published"),
        {"ids": [row.id for row in rows], **_bounds(rows)},
        binary=True,
    )


async def schedule_retry(
    connection: Connection,
    nacked: Sequence[tuple[Claimed, str, float]],
    *,
    charge: int = 1,
) -> None:
    """Run `schedule_retry.sql`."""
    await connection.execute(
        load("relay", "schedule_retry"),
        {
            "ids": [row.id for row, _, _ in nacked],
            "delays": [delay for _, _, delay in nacked],
            "reasons": [storable(reason) for _, reason, _ in nacked],
            "attempts": [row.attempts for row, _, _ in nacked],
            "charge": charge,
            **_bounds([row for row, _, _ in nacked]),
        },
    )


async def move_to_dead_letters(
    connection: Connection,
    nacked: Sequence[tuple[Claimed, str]],
    origin: str,
    *,
    by_hand: bool = False,
) -> None:
    """Run `move_to_dead_letters.sql`; with `by_hand` no retry is scheduled."""
    await connection.execute(
        load("relay", "move_to_dead_letters"),
        {
            "ids": [row.id for row, _ in nacked],
            "reasons": [storable(reason) for _, reason in nacked],
            "attempts": [min(row.attempts, _MAX_ATTEMPTS) + 1 for row, _ in nacked],
            "origin": origin,
            "by_hand": by_hand,
            "max_topic_bytes": MAX_INDEXED_BYTES,
            "topic_header": TOPIC_HEADER,
            **_bounds([row for row, _ in nacked]),
        },
    )


def _bounds(rows: Sequence[Claimed]) -> dict[str, object]:
    """Bound `created_at`, so that the planner considers only the batch's partitions."""
    moments = [row.created_at for row in rows]
    return {"first": min(moments), "last": max(moments)}
