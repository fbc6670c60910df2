"""Look for messages of tenants that are hidden behind those of others.

Claims read in order of seq, so behind a flood of one tenant they reach the messages of
another last. A search finds the first ones of each other tenant, by an index that the
owner of the database has made; without it, nothing is searched.

What a search finds is *ahead* of the claims. Nothing is stored of it before they reach
it: who takes the lane over claims it again, as it does what has ended behind a message
in hand. In its lane all rows before the search's own were claimed, or are found first.
So a message overtakes none of its key: if one committed late that no claim has read
yet, the lane isn't searched.
"""

from collections.abc import Sequence
from typing import Any, Final

import psycopg

from outbox.array_literal import plain_array
from outbox.log.view import ReadView
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from relay.claim import ClaimedRow, decode_row, read_row
from relay.config import RelayConfig
from relay.handling.window_lane import WindowLane
from relay.lanes.batch import ClaimedMessage
from relay.lanes.board import LaneBoard
from relay.publisher import TenantSearch, TenantsFound

_MAX_READ: Final = 10_000
"""How many messages of a tenant and lane are read, whatever their topics."""


async def has_tenant_index(connection: Connection) -> bool:
    """Whether tenants can be searched."""
    cursor = await connection.execute(load("relay", "has_tenant_index"))
    row = await cursor.fetchone()
    assert row is not None
    return bool(row[0])


async def claim_tenants(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[WindowLane],
    search: TenantSearch,
    config: RelayConfig,
) -> tuple[Sequence[ClaimedMessage], TenantsFound]:
    """Read messages that lie ahead of the claims of these lanes, which don't change.

    The lanes decide which of the messages they take.
    """
    lanes = [lane for lane in lanes if lane.top is not None]
    if not lanes:
        return (), TenantsFound()
    plan = board.reader.claims.plan(lanes)
    places = [place for lane in lanes for place in lane.ahead]
    keys = [(lane.number, key) for lane in lanes for key in lane.closed_ahead]
    cursor: psycopg.AsyncCursor[tuple[Any, ...]] = connection.cursor(binary=True)
    await cursor.execute(
        load("relay", "claim_tenants"),
        {
            **plan.parameters,
            "reader": board.reader.name,
            "gets_all": board.gets_all,
            "tops": plain_array(lane.top for lane in lanes),
            "after": search.after,
            "known": list(search.known),
            "seqs": [seq for seq, _ in places],
            "moments": [moment for _, moment in places],
            "key_lanes": [number for number, _ in keys],
            "keys": [key for _, key in keys],
            "max_steps": search.max_steps,
            "max_read": _MAX_READ,
            "max_rows_each": search.rows_each,
            "max_rows": config.batch_size,
            "max_bytes": config.max_batch_bytes,
        },
    )
    found = [(step, ClaimedRow(*row)) for step, *row in await cursor.fetchall()]
    view = ReadView.parse(str(found[0][1].view))
    if board.reader.claims.is_stale(plan, view, {}, is_fresh=False):
        return (), TenantsFound()  # The next claim refreshes the lanes.
    steps = [step for step, _ in found if step is not None]
    rows = [row for _, row in found if row.id is not None]
    messages = [read_row(row, config) for row in rows]
    if config.codec is not None:
        messages = [decode_row(row, config.codec) for row in messages]
    size = sum(len(row.payload) for row in rows)
    is_cut = len(rows) >= config.batch_size or size >= config.max_batch_bytes
    tenants = [row.tenant for row in rows if row.tenant is not None]
    return messages, TenantsFound(steps, tenants, is_cut)
