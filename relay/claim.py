"""Claim: read the next messages of leased lanes. Nothing is locked or written."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from outbox.database import Connection
from outbox.identifier import is_uuid7
from outbox.lane import priority_of
from outbox.message import Message
from outbox.statement import load
from relay.config import RelayConfig
from relay.lanes import BEGINNING, Lane, Lanes, Snapshot

_END: Final = datetime(9999, 1, 1, tzinfo=UTC)


class Claimed(NamedTuple):
    """A message as it was read, or what is wrong with its row."""

    lane: int
    seq: int
    id: Any
    created_at: datetime
    attempts: int
    key: str | None
    topic: str
    message: Message | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of one claim, lane by lane, each lane in its order."""

    lanes: Sequence[Lane]
    rows: Sequence[Claimed]


async def claim_batch(
    connection: Connection, board: Lanes, lanes: Sequence[Lane], config: RelayConfig
) -> Batch:
    """Read the next messages of these lanes and move their floors.

    At most `batch_size` rows and about `max_batch_bytes` of payload. Each lane gives
    a prefix of what is ready, less the keys that are blocked.
    """
    strange = [lane for lane in lanes if lane.strange]
    # A head that became ready while its key was read may lie below the floor.
    sweep = bool(strange) or any(lane.sweep for lane in lanes)
    if strange:
        await _read_blocked_keys(connection, strange)
    cursor = connection.cursor(binary=True)
    await cursor.execute(
        load("relay", "claim_batch"),
        {
            "lanes": [lane.number for lane in lanes],
            "floors": [-1 if sweep else lane.floor for lane in lanes],
            "oldest": BEGINNING if sweep else _oldest(lanes),
            "newest": _END if sweep else board.newest(),
            "blocked": [key for lane in lanes for key in lane.blocked],
            "max_rows": config.batch_size,
            "max_bytes": config.max_batch_bytes,
            "max_payload": config.max_payload_bytes,
        },
        # A plan for all partitions must not become the plan for two.
        prepare=False if sweep else None,
    )
    found = await cursor.fetchall()
    rows = [_read(row, config) for row in found]
    taken = sum(len(row.message.payload) for row in rows if row.message is not None)
    full = (
        len(rows) >= config.batch_size
        or taken >= config.max_batch_bytes
        or any(row.message is None for row in rows)  # of unknown size
    )
    snapshot = _read_snapshot(found[0][-1]) if found else None
    _note(board, lanes, rows, snapshot, sweep=sweep, full=full)
    return Batch(lanes, rows)


def _oldest(lanes: Sequence[Lane]) -> datetime:
    return min((lane.oldest for lane in lanes), default=BEGINNING)


def _note(
    board: Lanes,
    lanes: Sequence[Lane],
    rows: Sequence[Claimed],
    snapshot: Snapshot | None,
    *,
    sweep: bool,
    full: bool,
) -> None:
    """Move floors; a full claim says nothing of the lanes behind its last row."""
    last = {row.lane: row.seq for row in rows}
    oldest: dict[int, datetime] = {}
    for row in rows:
        oldest[row.lane] = min(oldest.get(row.lane, row.created_at), row.created_at)
    seen = not full
    for lane in reversed(lanes):
        found = lane.number in last
        if found and snapshot is not None:
            lane.claimed_up_to(last[lane.number], snapshot)
            seen = True
        elif seen:
            lane.found_empty()
        if sweep and seen:
            lane.swept(board.oldest(oldest.get(lane.number)))


async def _read_blocked_keys(connection: Connection, lanes: Sequence[Lane]) -> None:
    by_number = {lane.number: lane for lane in lanes}
    cursor = await connection.execute(
        load("relay", "list_blocked_keys"), {"lanes": list(by_number)}
    )
    blocked = await cursor.fetchall()
    for lane in lanes:
        lane.blocked = {key for number, key in blocked if number == lane.number}
        lane.strange = False


def _read(row: Sequence[Any], config: RelayConfig) -> Claimed:
    (
        lane,
        seq,
        id,
        created_at,
        attempts,
        topic,
        key,
        tenant,
        payload,
        content_type,
        headers,
        version,
        _,
    ) = row
    problem = None
    if headers is not None:
        headers, problem = _read_headers(headers)
    if (
        not topic
        or key == ""
        or not content_type
        or payload is None
        or version < 1
        or not is_uuid7(id)
    ):
        problem = _problem(row, config)
    message = None
    if problem is None:
        message = Message(
            topic,
            payload,
            key=key,
            tenant=tenant,
            headers=headers or {},
            id=id,
            content_type=content_type,
            schema_version=version,
            priority=priority_of(lane),
        )
    return Claimed(lane, seq, id, created_at, attempts, key, topic, message, problem)


def _read_snapshot(text: str) -> Snapshot:
    oldest, end, _ = text.split(":")
    return Snapshot(int(oldest), int(end))


def _read_headers(text: str) -> tuple[dict[str, str], str | None]:
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"headers can't be read: {type(error).__name__}"
    if isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values()):
        return headers, None
    return {}, "headers is not a JSON object of strings"


def _problem(row: Sequence[Any], config: RelayConfig) -> str:
    """Say what is wrong with a row that someone may have inserted by hand."""
    _, _, id, _, _, topic, key, _, payload, content_type, _, version, _ = row
    if not topic:
        return "topic is empty"
    if key == "":
        return "key is empty: null means no order"
    if not content_type:
        return "content_type is empty"
    if payload is None:
        return f"payload is over {config.max_payload_bytes} bytes (max_payload_bytes)"
    if version < 1:
        return f"schema_version is {version}, it starts at 1"
    return f"id {id} is not a UUIDv7"
