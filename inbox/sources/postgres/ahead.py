"""Finds messages of tenants that are hidden behind those of others.

Claims read in order of seq, so behind a flood of one tenant they reach the messages of
another last. A search finds the first ones of each other tenant, by an index that the
owner of the database has made; without it, nothing is searched.

A message that a search finds is *ahead* of the claims until they reach it. It overtakes
none of its key: all earlier rows of its lane were claimed, or are found first. So a
lane with a late row that no claim has read isn't searched, and a search continues where
the tenant's last one ended, but not above the floor of a transaction that was open
then.
"""

import json
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import psycopg

from pillarbox.inbox.sources.postgres.handover import TenantSearch
from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.inbox.sources.postgres.tenants import TenantsFound
from pillarbox.inbox.sources.postgres.window_lane import WindowLane
from pillarbox.outbox.array_literal import plain_array
from pillarbox.outbox.log.claim import ClaimedRow, decode_row, find_cancelled, read_row
from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.log.hidden import Floors
from pillarbox.outbox.log.lanes.batch import ClaimedBatch
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.sql_files import load

_MAX_READ: Final = 10_000
"""How many messages of a tenant and lane are read, whatever their topics."""
_NO_INDEX: Final = 10.0
"""Seconds after which an index by tenant is looked for again."""


class Searches:
    """The searches for tenants of one process."""

    def __init__(self, board: LaneBoard, config: ReadingConfig) -> None:
        self._board = board
        self._config = config
        self._floors = Floors()
        self._not_before = 0.0

    @property
    def are_possible(self) -> bool:
        """Whether there may be an index."""
        return time.monotonic() >= self._not_before

    async def find(
        self,
        connection: Connection,
        lanes: Iterable[WindowLane],
        search: TenantSearch,
    ) -> tuple[Sequence[HeldMessage], TenantsFound]:
        """Hold messages that lie ahead of the claims of these lanes.

        Returns:
            Those to hand over, and the search's result.
        """
        lanes = [lane for lane in lanes if lane.top is not None]
        if not lanes:
            return (), TenantsFound()
        cursor = await connection.execute(load("inbox", "has_tenant_index"))
        if await cursor.fetchone() != (True,):
            self._not_before = time.monotonic() + _NO_INDEX
            return (), TenantsFound()
        windows = [lane.window for lane in lanes]
        found, floor = await self._read(connection, lanes, search)
        steps = [step for step, _ in found if step is not None]
        rows = [row for _, row in found if row.id is not None]
        config, now = self._config, time.monotonic()
        messages = [read_row(row, config) for row in rows]
        cancelled = await find_cancelled(connection, messages)
        messages = [row for row in messages if row.identity not in cancelled]
        if config.codec is not None:
            messages = [decode_row(row, config.codec) for row in messages]
        handed: list[HeldMessage] = []
        for lane, window in zip(lanes, windows, strict=True):
            # Otherwise it was lost in the meantime.
            if lane.window is window and self._board.find(lane.number) is lane:
                own = [row for row in messages if row.lane == lane.number]
                handed += lane.take_ahead(own, floor, now)
        size = sum(len(row.payload) for row in rows)
        is_cut = len(rows) >= config.batch_size or size >= config.max_batch_bytes
        tenants = [row.tenant for row in rows if row.tenant is not None]
        return handed, TenantsFound(steps, tenants, is_cut)

    async def _read(
        self,
        connection: Connection,
        lanes: Sequence[WindowLane],
        search: TenantSearch,
    ) -> tuple[Sequence[tuple[str | None, ClaimedRow]], int]:
        """Return the tenants and their rows, and a seq below all that may commit."""
        claims = self._board.reader.claims
        plan = claims.plan(lanes)
        places = [
            held.place for lane in lanes for held in lane.held.values() if held.is_ahead
        ]
        cursor: psycopg.AsyncCursor[tuple[Any, ...]] = connection.cursor(binary=True)
        await cursor.execute(
            load("inbox", "claim_tenants"),
            {
                **plan.parameters,
                "reader": self._board.reader.name,
                "gets_all": self._board.gets_all,
                "tops": plain_array(lane.top for lane in lanes),
                "searched": json.dumps(
                    {
                        f"{lane.number}/{tenant}": seq
                        for lane in lanes
                        for tenant, seq in lane.found_up_to.items()
                    }
                ),
                "after": search.after,
                "known": list(search.known),
                "seqs": [seq for seq, _ in places],
                "moments": [moment for _, moment in places],
                "max_steps": search.max_steps,
                "max_read": _MAX_READ,
                "max_rows_each": search.rows_each,
                "max_rows": self._config.batch_size,
                "max_bytes": self._config.max_batch_bytes,
            },
        )
        found = [(step, ClaimedRow(*row)) for step, *row in await cursor.fetchall()]
        view = ReadView.parse(str(found[0][1].view))
        if claims.is_stale(plan, view, {}, is_fresh=False):
            self._floors = Floors()
            return (), -1  # The next claim refreshes the lanes.
        # Transactions that had no id draw higher seqs than those assigned before.
        self._floors = self._floors.note(view.next_xid, plan.assigned[0])
        floor = self._floors.of(view.snapshot.xmin)
        self._floors = self._floors.forget(view.snapshot.xmin)
        claims.note(view, -1)
        return found, floor


async def find_logged(
    connection: Connection, reader: str, batch: ClaimedBatch
) -> set[Hashable]:
    """Return the identities of new messages that the log has, as they were ahead."""
    keys = {lane.number: lane.keys for lane in batch.lanes}
    rows = [
        row
        for row in (*batch.rows, *(row for row, _ in batch.withheld))
        if row.waiting is None and keys[row.lane].has_logged(row.seq)
    ]
    if not rows:
        return set()
    moments = [row.created_at for row in rows]
    cursor = await connection.execute(
        load("inbox", "find_logged"),
        {
            "reader": reader,
            "ids": [row.id for row in rows],
            "created_ats": moments,
            "first": min(moments),
            "last": max(moments),
        },
    )
    logged = {*await cursor.fetchall()}
    return {row.identity for row in rows if (row.id, row.created_at) in logged}
