"""The statements on `inbox.delivery`, and what their answers mean for the lanes."""

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg

from inbox.poison.history import FIRST_DELIVERY, REDELIVERED, History, TakenOver
from inbox.sources.postgres.lanes import SKEW, ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.tenants import Tenants
from inbox.subscriptions import subscribe
from outbox.errors import (
    BrokerUnavailableError,
    DatabaseUnavailableError,
    message_of,
)
from outbox.message import Message
from outbox.postgres.connection import Link
from outbox.postgres.lane_cursor import Snapshot
from outbox.postgres.sql_files import load

# Also a server that became a standby, and a table or a right that is gone: no message
# is to blame, and somebody may fix it.
AWAY: Final = (
    DatabaseUnavailableError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,
    psycopg.ProgrammingError,
)
_MAX_BYTES: Final = 8 * 1024 * 1024
_MAX_DUE: Final = 1000
# Of each lane that this replica takes.
_MAX_SUSPECTS: Final = 256


@dataclass(frozen=True, slots=True)
class Settled:
    """A delivery that was settled: it was acked, or it failed."""

    row: ClaimedDelivery
    delay: timedelta | None
    """Until it is retried; None if it was acked."""


@dataclass(frozen=True, slots=True)
class _TakenOver:
    """A lane that another replica may have had until `at`."""

    at: datetime
    history: TakenOver


class Queue:
    """The deliveries of one consumer, seen from one replica. For one event loop.

    Each method raises what `AWAY` lists when the database is away.
    """

    def __init__(
        self,
        link: Link,
        lanes: DeliveryLanes,
        *,
        consumer: str,
        prefetch: int,
        sweep_interval: timedelta,
        answer_timeout: timedelta,
    ) -> None:
        self._link = link
        self._lanes = lanes
        self._taken_over: dict[int, _TakenOver] = {}
        self._consumer = consumer
        self._prefetch = prefetch
        self._tenants = Tenants(prefetch)
        self._sweep_interval = sweep_interval.total_seconds()
        self._answer_timeout = answer_timeout.total_seconds()
        self._turn = asyncio.Lock()
        self._clock_offset = timedelta(0)
        self.sweep_at = 0.0
        """When to look everywhere again, by the monotonic clock."""

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Have the consumer's deliveries made from now on."""
        async with self._turn:
            await subscribe(await self._link.connection(), self._consumer, topics)

    async def claim(self, leased: Collection[int]) -> None:
        """Read what is next in these lanes; at most `prefetch`."""
        if self._lanes.new or time.monotonic() >= self.sweep_at:
            await self._sweep(leased)
        floors = self._lanes.floors(leased)
        if not floors:
            return
        rows = await self._execute("claim_deliveries", **self._bounds(floors))
        claimed = [read_delivery(row) for row in rows]
        full = self._is_full(claimed)
        snapshot = Snapshot.read(rows[0][-1]) if rows else None
        self._lanes.claimed(claimed, list(floors), snapshot, full=full)
        self._tenants.claimed([row.message.tenant for row in claimed], full=full)

    async def claim_tenants(
        self, leased: Collection[int], without: Collection[str]
    ) -> None:
        """Read the first of tenants that wait behind others' floods, if it is time.

        Args:
            without: tenants to leave out.
        """
        ready = self._lanes.ready_tenants
        stuck = self._lanes.is_stuck(without)
        if not self._tenants.is_due(self._lanes.ready, ready, stuck=stuck):
            return
        floors = self._lanes.floors(leased)
        if not floors:
            return
        rows = await self._execute(
            "claim_tenants",
            **self._bounds(floors),
            known=list({*ready, *without}),
            after=self._tenants.after,
            max_steps=self._tenants.max_steps,
            max_rows_each=self._tenants.rows_each,
        )
        claimed = [read_delivery(row[1:]) for row in rows if row[1] is not None]
        self._lanes.claimed_aside(claimed)
        self._tenants.looked(
            [row[0] for row in rows],
            [row[8] for row in rows if row[1] is not None],
            ready=ready,
            cut=len(rows) >= self._prefetch or self._is_full(claimed),
        )

    def hand_out(
        self, limit: int, leased: Collection[int], without: Collection[str]
    ) -> list[ClaimedDelivery]:
        """Return at most `limit` of the rows read, the tenants in turn."""
        rows = self._lanes.hand_out(limit, leased, without)
        self._tenants.handed_out(len(rows))
        return rows

    def history_of(self, row: ClaimedDelivery) -> History:
        """Return whether the lane's previous owner may have started to handle it."""
        taken_over = self._taken_over.get(row.lane)
        if taken_over is not None and row.created_at <= taken_over.at:
            return taken_over.history
        return REDELIVERED if row.attempts else FIRST_DELIVERY

    async def write(self, batch: Sequence[Settled]) -> None:
        """Write outcomes down, after which their deliveries are held no longer.

        Raises:
            BrokerUnavailableError: the database is away; to be called again.
        """
        acked = [s.row for s in batch if s.delay is None]
        failed = [(s.row, s.delay) for s in batch if s.delay is not None]
        try:
            if acked:
                await self._execute("mark_acked", **_span(acked))
            if failed:
                await self._execute(
                    "schedule_redelivery",
                    **_span([row for row, _ in failed]),
                    delays=[delay.total_seconds() for _, delay in failed],
                    attempts=[row.attempts for row, _ in failed],
                )
        except AWAY as error:
            raise BrokerUnavailableError(message_of(error)) from error
        for settled in batch:
            self._lanes.let_go(settled.row)

    async def close(self) -> None:
        """Disconnect; the next call connects again."""
        await self._link.close()

    def _bounds(self, floors: dict[int, int]) -> dict[str, Any]:
        return {
            "lanes": list(floors),
            "floors": list(floors.values()),
            "held": self._lanes.held_above(floors),
            "blocked": self._lanes.blocked,
            "oldest": self._lanes.oldest,
            "newest": datetime.now(UTC) + self._clock_offset + SKEW,
            "max_rows": self._prefetch,
            "max_bytes": _MAX_BYTES,
        }

    def _is_full(self, claimed: Sequence[ClaimedDelivery]) -> bool:
        return (
            len(claimed) >= self._prefetch
            or sum(len(row.message.payload) for row in claimed) >= _MAX_BYTES
        )

    async def _sweep(self, leased: Collection[int]) -> None:
        """Look everywhere: for what is due, for late commits, into new lanes."""
        new = self._lanes.new
        lanes = sorted({*leased, *new})
        self.sweep_at = time.monotonic() + self._sweep_interval
        if new:
            waiting = await self._execute("list_waiting", lanes=new)
            self._lanes.found_waiting((lane, seq, key) for lane, seq, key in waiting)
        # Also without lanes: leases end with the database, and somebody has to say so.
        due = await self._execute("ready_due", lanes=lanes, max_rows=_MAX_DUE)
        if not lanes:
            return
        heads = await self._execute("find_heads", lanes=lanes)
        now = heads[0][3]
        self._clock_offset = now - datetime.now(UTC)
        for lane in new:
            self._taken_over[lane] = _TakenOver(now, TakenOver(_MAX_SUSPECTS))
        self._lanes.oldest = min([now, *(at for _, _, at, _ in heads if at)]) - SKEW
        for lane, seq, _, _ in heads:
            self._lanes.found_head(lane, seq)
        for lane, seq, key, at in due:
            self._lanes.made_ready(lane, seq, key, at)
        if len(due) == _MAX_DUE:
            self.sweep_at = 0.0

    async def _execute(self, name: str, **parameters: Any) -> Sequence[Any]:
        async with self._turn:
            connection = await self._link.connection()
            cursor = connection.cursor(binary=True)
            try:
                async with asyncio.timeout(self._answer_timeout):
                    await cursor.execute(
                        load("inbox", name), {"consumer": self._consumer, **parameters}
                    )
            except TimeoutError:
                await self._link.close()
                raise BrokerUnavailableError(
                    f"the database gave no answer to {name} within "
                    f"{self._answer_timeout:g} s"
                ) from None
            return await cursor.fetchall() if cursor.description else []


def _span(rows: Sequence[ClaimedDelivery]) -> dict[str, Any]:
    """Return what an UPDATE needs to find rows without looking into every partition."""
    return {
        "seqs": [row.seq for row in rows],
        "first": min(row.created_at for row in rows),
        "last": max(row.created_at for row in rows),
    }


def read_delivery(row: Sequence[Any]) -> ClaimedDelivery:
    """Make a delivery of a row of the statement `claim_deliveries`."""
    (
        lane,
        seq,
        created_at,
        message_id,
        attempts,
        topic,
        key,
        tenant,
        payload,
        content_type,
        text,
        schema_version,
        _,
    ) = row
    headers, problem = ({}, None) if text is None else _read_headers(text)
    if schema_version < 1:
        problem = f"schema_version is {schema_version}, must be at least 1"
    message = Message(
        topic,
        payload,
        key=key,
        tenant=tenant,
        headers=headers,
        id=message_id,
        content_type=content_type,
        schema_version=schema_version,
    )
    return ClaimedDelivery(lane, seq, created_at, attempts, message, problem)


def _read_headers(text: str) -> tuple[dict[str, str], str | None]:
    try:
        headers = json.loads(text)
    except RecursionError:
        headers = None
    if isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values()):
        return headers, None
    return {"headers": text}, "headers is not a JSON object of strings"
