"""Claim: read the next messages of leased lanes. Nothing is locked or written."""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from outbox.database import Connection
from outbox.errors import CodecError, InvalidMessageError
from outbox.identifier import is_uuid7
from outbox.lane import priority_of
from outbox.limits import (
    MAX_INDEXED_BYTES,
    STORED_HEADERS,
    check_bytes,
    check_reserved,
)
from outbox.message import Message
from outbox.payload_codec import PayloadCodec, decoded, is_encoded
from outbox.statement import load
from relay.config import RelayConfig
from relay.horizon import Horizon
from relay.lane import Lane, Snapshot
from relay.lanes import Lanes

# Characters that fit, whatever they are; nearly every key is as short.
_SURELY_INDEXED: Final = MAX_INDEXED_BYTES // 4


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
    if strange:
        # Before the snapshot: what was given out belongs to transactions it knows.
        now, given_out, transaction_id = await _read_clock(connection)
        board.set_clock(now)
        board.horizon.note(transaction_id, now)
        # Whoever had a lane before may settle late: then blocked key, head and batch
        # must be of one moment, or the key's next message comes without its head.
        async with connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await _acquaint(connection, board.horizon, strange, now, given_out)
            found = await _claim(connection, board, lanes, config)
    else:
        found = await _claim(connection, board, lanes, config)
    rows = [_read(row, config) for row in found]
    taken = sum(len(row.message.payload) for row in rows if row.message is not None)
    full = (
        len(rows) >= config.batch_size
        or taken >= config.max_batch_bytes
        or any(row.message is None for row in rows)  # of unknown size
    )
    last = {row.lane: row.seq for row in rows}
    if found:
        snapshot = Snapshot.read(found[0][-1])
        for lane in lanes:
            # A strange lane was looked at with this very snapshot already.
            if lane.number in last and lane not in strange:
                lane.looked_up_to(last[lane.number], snapshot)
    reached = _reached(lanes, last) if full else lanes
    for lane in reached:
        if lane.number not in last:
            lane.found_empty()
    board.served(reached)
    if config.codec is not None:
        rows = [decode_row(row, config.codec) for row in rows]
    return Batch(lanes, rows)


def _reached(lanes: Sequence[Lane], found: Container[int]) -> Sequence[Lane]:
    """Leave out the lanes behind the last row: a full claim says nothing of them."""
    end = max((i for i, lane in enumerate(lanes) if lane.number in found), default=-1)
    return lanes[: end + 1]


async def _claim(
    connection: Connection, board: Lanes, lanes: Sequence[Lane], config: RelayConfig
) -> list[tuple[Any, ...]]:
    oldest, newest = board.bounds(lanes)
    cursor = connection.cursor(binary=True)
    await cursor.execute(
        load("relay", "claim_batch"),
        {
            "lanes": [lane.number for lane in lanes],
            "floors": [lane.floor for lane in lanes],
            "oldest": oldest,
            "newest": newest,
            "blocked": [key for lane in lanes for key in lane.blocked],
            "max_rows": config.batch_size,
            "max_bytes": config.max_batch_bytes,
            "max_payload": config.max_payload_bytes,
        },
    )
    return await cursor.fetchall()


async def _acquaint(
    connection: Connection,
    horizon: Horizon,
    lanes: Sequence[Lane],
    now: datetime,
    given_out: int,
) -> None:
    """Read what the database knows of lanes that are new, or may have changed."""
    blocked = await _list_blocked_keys(connection, lanes)
    cursor = await connection.execute(
        load("relay", "find_heads"),
        {
            "lanes": [lane.number for lane in lanes],
            "blocked": [key for keys in blocked.values() for key in keys],
        },
    )
    by_number = {lane.number: lane for lane in lanes}
    for number, seq, created_at, text, _ in await cursor.fetchall():
        lane = by_number[number]
        snapshot = Snapshot.read(text)
        head = None if seq is None else (seq, created_at)
        since = min(now, horizon.since(snapshot.oldest))
        lane.acquainted(blocked[number], head, since)
        lane.looked_up_to(given_out if seq is None else seq - 1, snapshot)


async def _read_clock(connection: Connection) -> tuple[datetime, int, int]:
    cursor = await connection.execute(load("relay", "read_clock"))
    ((now, seq, transaction_id),) = await cursor.fetchall()
    return now, seq, transaction_id


async def _list_blocked_keys(
    connection: Connection, lanes: Sequence[Lane]
) -> dict[int, set[str]]:
    blocked: dict[int, set[str]] = {lane.number: set() for lane in lanes}
    cursor = await connection.execute(
        load("relay", "list_blocked_keys"), {"lanes": list(blocked)}
    )
    for number, key in await cursor.fetchall():
        blocked[number].add(key)
    return blocked


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
        if headers:
            problem = problem_of_headers(headers)
    if (
        not topic
        or key == ""
        or not content_type
        or payload is None
        or version < 1
        or not is_uuid7(id)
        or (key is not None and len(key) > _SURELY_INDEXED)
    ):
        problem = _problem(row, config) or problem
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


def decode_row(row: Claimed, codec: PayloadCodec) -> Claimed:
    """Decode the payload of a row, if it is encoded."""
    if row.message is None or not is_encoded(row.message):
        return row
    try:
        return row._replace(message=decoded(row.message, codec))
    except CodecError as error:
        return row._replace(message=None, problem=str(error))


def problem_of_headers(headers: Mapping[str, str]) -> str | None:
    """Say which header would pass for an attribute; a table takes it, `add` doesn't."""
    try:
        check_reserved(name for name in headers if name not in STORED_HEADERS)
    except InvalidMessageError as error:
        return str(error)
    return None


def _read_headers(text: str) -> tuple[dict[str, str], str | None]:
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, f"headers can't be read: {type(error).__name__}"
    if isinstance(headers, dict) and all(isinstance(v, str) for v in headers.values()):
        return headers, None
    return {}, "headers is not a JSON object of strings"


def _problem(row: Sequence[Any], config: RelayConfig) -> str | None:
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
    if not is_uuid7(id):
        return f"id {id} is not a UUIDv7"
    try:
        check_bytes("key", key or "")
    except InvalidMessageError as error:
        return str(error)
    return None
