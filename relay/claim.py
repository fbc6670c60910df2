"""Claim: read the next messages of leased lanes. Nothing is locked or written."""

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from outbox.errors import CodecError, InvalidMessageError
from outbox.lane import priority_of
from outbox.limits import (
    MAX_CONTENT_TYPE_BYTES,
    MAX_HEADERS_BYTES,
    MAX_INDEXED_BYTES,
    MAX_TENANT_BYTES,
    STORED_HEADERS,
    check_reserved,
    reserved_header,
)
from outbox.message import Message
from outbox.message_id import is_uuid7
from outbox.payload_codec import PayloadCodec, decoded, is_encoded
from outbox.postgres.connection import Connection
from outbox.postgres.lane_cursor import Snapshot
from outbox.postgres.sql_files import load
from relay.config import RelayConfig
from relay.lanes.board import LaneBoard
from relay.lanes.congested import look_into, note, survey
from relay.lanes.lane import Lane

# The limit counts JSON text; as jsonb the headers are at most a few bytes longer.
_MAX_STORED_HEADERS: Final = MAX_HEADERS_BYTES + 64
_VERDICT: Final = 12  # the index of the column
_MAX_COPIED: Final = 1024 * 1024
"""The size up to which an oversized row is moved with the batch, while lanes wait.

The payload counts as it is stored, since it is copied so; the headers are decompressed.
"""


class Claimed(NamedTuple):
    """A message that was read, or what is wrong with its row."""

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
    """The messages of one claim, lane by lane, each lane in order.

    Attributes:
        oversized: rows so large that their lanes don't wait while they are moved to
            the dead letters. Their `problem` says what is too large.
    """

    lanes: Sequence[Lane]
    rows: Sequence[Claimed]
    oversized: Sequence[Claimed] = ()


async def claim_batch(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> Batch:
    """Read the next messages of these lanes and move their floors.

    At most `batch_size` rows and `max_batch_bytes`, all of their columns counted; one
    message always passes. A row with a column over its limit is not loaded. From each
    lane comes a prefix of its ready rows, without blocked keys; from a congested lane,
    what is found among a bounded number of ready rows (`relay/lanes/congested.py`).
    """
    places = [lane.place() for lane in lanes]
    try:
        found = await _claim_by_kind(connection, board, lanes, config)
    except BaseException:
        # One of several statements failed: what the others read is lost.
        for lane, place in zip(lanes, places, strict=True):
            lane.go_back_to(place)
        raise
    board.served(found.reached)
    rows = found.rows
    if config.codec is not None:
        rows = [decode_row(row, config.codec) for row in rows]
    return Batch(lanes, rows, found.oversized)


async def _claim_by_kind(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> "_Found":
    stale = [lane for lane in lanes if lane.needs_refresh]
    ready = [lane for lane in lanes if not lane.congested]
    congested = [lane for lane in lanes if lane.congested]
    if stale:
        # Before the snapshot, so that it knows the transactions that drew these seqs.
        now, given_out, transaction_id = await _read_clock(connection)
        board.set_clock(now)
        board.horizon.note(transaction_id, now)
        # The lane's previous owner may settle late. Blocked keys, head and batch must
        # come from one snapshot, or a key's next message could be claimed before its
        # first.
        async with connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await _refresh(connection, board, stale, now, given_out, config)
            found = await _claim_both(connection, board, lanes, stale, config)
    elif not congested:
        found = await _claim_ready(connection, board, ready, stale, config)
    else:
        share = _half(config) if ready else config
        found = _Found()
        if ready:
            # Outside the transaction, because keys may become free in the meantime: a
            # snapshot older than that would miss their first messages.
            found = await _claim_ready(connection, board, ready, stale, share)
        async with connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            found += await _claim_congested(connection, board, congested, stale, share)
    return found


@dataclass(slots=True)
class _Found:
    """What was claimed, and the lanes that were reached."""

    rows: list[Claimed] = field(default_factory=list)
    oversized: list[Claimed] = field(default_factory=list)
    reached: list[Lane] = field(default_factory=list)

    def __add__(self, other: "_Found") -> "_Found":
        return _Found(
            self.rows + other.rows,
            self.oversized + other.oversized,
            self.reached + other.reached,
        )

    def read(self, found: Sequence[Sequence[Any]], config: RelayConfig) -> bool:
        """Sort rows by verdict; return whether some are left for the next claim."""
        cut = False
        for row in found:
            verdict = row[_VERDICT]
            if verdict is None:
                self.rows.append(_read(row))
            elif verdict == "next":
                cut = True
            else:
                rows = self.oversized if verdict == "aside" else self.rows
                rows.append(_refuse(row, config))
        return cut


async def _claim_both(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    stale: Sequence[Lane],
    config: RelayConfig,
) -> _Found:
    """Claim from ready and congested lanes; each kind gets half of the limits."""
    ready = [lane for lane in lanes if not lane.congested]
    congested = [lane for lane in lanes if lane.congested]
    if ready and congested:
        config = _half(config)
    found = _Found()
    if ready or not congested:
        found = await _claim_ready(connection, board, ready, stale, config)
    if congested:
        found += await _claim_congested(connection, board, congested, stale, config)
    return found


def _half(config: RelayConfig) -> RelayConfig:
    return replace(
        config,
        batch_size=math.ceil(config.batch_size / 2),
        max_batch_bytes=math.ceil(config.max_batch_bytes / 2),
    )


async def _claim_ready(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    stale: Sequence[Lane],
    config: RelayConfig,
) -> _Found:
    """Claim ready rows, except those of blocked keys."""
    worth_reading = board.rows_worth_reading(config.batch_size)
    if worth_reading < config.batch_size:
        config = replace(config, batch_size=worth_reading)
    found = await _claim(
        connection,
        board,
        lanes,
        config,
        floors=[lane.floor for lane in lanes],
        blocked=[key for lane in lanes for key in lane.blocked],
    )
    claimed = _Found()
    cut = claimed.read(found, config)
    full = cut or len(found) >= config.batch_size
    board.note_claim(len(found), cut=cut)
    last = {row.lane: row.seq for row in claimed.rows}
    if claimed.rows:
        snapshot = Snapshot.read(found[0][-1])
        for lane in lanes:
            # A stale lane has been examined with this very snapshot already.
            if lane.number in last and lane not in stale:
                lane.looked_up_to(last[lane.number], snapshot)
    claimed.reached = list(_reached(lanes, last) if full else lanes)
    for lane in claimed.reached:
        if lane.number not in last:
            lane.found_empty()
    return claimed


async def _claim_congested(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    stale: Sequence[Lane],
    config: RelayConfig,
) -> _Found:
    """Claim the rows found by examining congested lanes."""
    oldest, newest = board.bounds(lanes)
    look = await look_into(
        connection,
        lanes,
        oldest=oldest,
        newest=newest,
        aside=list(board.aside),
        max_rows=config.batch_size,
    )
    claimed = _Found()
    if wanted := look.wanted():
        asked = [lane for lane in lanes if lane.number in wanted]
        found = await _claim(
            connection,
            board,
            asked,
            config,
            floors=[min(wanted[lane.number]) - 1 for lane in asked],
            oldest=look.oldest,
            only=[seq for seqs in wanted.values() for seq in seqs],
        )
        claimed.read(found, config)
        look.cut(row.seq for row in [*claimed.rows, *claimed.oversized])
    claimed.reached = note(look, lanes, stale=stale)
    return claimed


def _reached(lanes: Sequence[Lane], found: Container[int]) -> Sequence[Lane]:
    """Leave out the lanes after the last row: a full claim says nothing about them."""
    end = max((i for i, lane in enumerate(lanes) if lane.number in found), default=-1)
    return lanes[: end + 1]


async def _claim(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    config: RelayConfig,
    *,
    floors: Sequence[int],
    blocked: Sequence[str] = (),
    oldest: datetime | None = None,
    only: Sequence[int] | None = None,
) -> list[tuple[Any, ...]]:
    since, newest = board.bounds(lanes)
    cursor = connection.cursor(binary=True)
    await cursor.execute(
        load("relay", "claim_batch"),
        {
            "lanes": [lane.number for lane in lanes],
            "floors": list(floors),
            "oldest": since if oldest is None else oldest,
            "newest": newest,
            "blocked": list(blocked),
            "only": None if only is None else list(only),
            "max_rows": config.batch_size,
            "aside": list(board.aside),
            "max_bytes": config.max_batch_bytes,
            "max_indexed": MAX_INDEXED_BYTES,
            "max_tenant": MAX_TENANT_BYTES,
            "max_content_type": MAX_CONTENT_TYPE_BYTES,
            "max_headers": _MAX_STORED_HEADERS,
            "max_payload": config.max_payload_bytes,
            "max_copied": _MAX_COPIED,
        },
    )
    return await cursor.fetchall()


async def _refresh(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    now: datetime,
    given_out: int,
    config: RelayConfig,
) -> None:
    """Read blocked keys and first rows of lanes that are new or may have changed."""
    found = await _list_blocked_keys(connection, lanes, config.max_blocked_keys + 1)
    congested = [
        lane for lane in lanes if len(found[lane.number]) > config.max_blocked_keys
    ]
    if congested:
        await survey(connection, congested, board.horizon, now, given_out)
    blocked = {
        lane.number: set(found[lane.number]) for lane in lanes if lane not in congested
    }
    cursor = await connection.execute(
        load("relay", "find_heads"),
        {
            "lanes": list(blocked),
            "blocked": [key for keys in blocked.values() for key in keys],
        },
    )
    by_number = {lane.number: lane for lane in lanes}
    for number, seq, created_at, text in await cursor.fetchall():
        lane = by_number[number]
        snapshot = Snapshot.read(text)
        head = None if seq is None else (seq, created_at)
        since = min(now, board.horizon.since(snapshot.xmin))
        lane.refresh(blocked[number], head, since)
        lane.looked_up_to(given_out if seq is None else seq - 1, snapshot)


async def _read_clock(connection: Connection) -> tuple[datetime, int, int]:
    cursor = await connection.execute(load("relay", "read_clock"))
    ((now, seq, transaction_id),) = await cursor.fetchall()
    return now, seq, transaction_id


async def _list_blocked_keys(
    connection: Connection, lanes: Sequence[Lane], max_keys: int
) -> dict[int, list[str]]:
    blocked: dict[int, list[str]] = {lane.number: [] for lane in lanes}
    cursor = await connection.execute(
        load("relay", "list_blocked_keys"),
        {"lanes": list(blocked), "max_keys": max_keys},
    )
    for number, key in await cursor.fetchall():
        blocked[number].append(key)
    return blocked


def _refuse(row: Sequence[Any], config: RelayConfig) -> Claimed:
    """Make a `Claimed` of a row that is too large; its problem names the field."""
    lane, seq, id, created_at, attempts, topic, key, *_, too_large, _ = row
    problem = _limit_on(too_large, config)
    return Claimed(lane, seq, id, created_at, attempts, key, topic, None, problem)


def _read(row: Sequence[Any]) -> Claimed:
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
        _,
        _,
    ) = row
    problem = None
    if headers is not None:
        headers, problem = _read_headers(headers)
        if headers:
            problem = problem_of_headers(headers)
    if not topic or key == "" or not content_type or version < 1 or not is_uuid7(id):
        problem = _problem(row) or problem
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


def traceparent_of(row: Claimed) -> str | None:
    """Return the trace context with which a message was added, if it is readable."""
    return None if row.message is None else row.message.headers.get("traceparent")


def decode_row(row: Claimed, codec: PayloadCodec) -> Claimed:
    """Decode the payload of a row, if it is encoded."""
    if row.message is None or not is_encoded(row.message):
        return row
    try:
        return row._replace(message=decoded(row.message, codec))
    except CodecError as error:
        return row._replace(message=None, problem=str(error))


def problem_of_headers(headers: Mapping[str, str]) -> str | None:
    """Return which header has a reserved name, in rows that `add` didn't write."""
    if reserved_header(headers) is None:
        return None
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


def _limit_on(field: str, config: RelayConfig) -> str:
    if field == "payload":
        return f"payload is over {config.max_payload_bytes} bytes (max_payload_bytes)"
    limit = {
        "tenant": MAX_TENANT_BYTES,
        "content_type": MAX_CONTENT_TYPE_BYTES,
        "headers": MAX_HEADERS_BYTES,
    }.get(field, MAX_INDEXED_BYTES)
    return f"{field} is over {limit} bytes"


def _problem(row: Sequence[Any]) -> str | None:
    """Return what is wrong with a row that wasn't written by `add`, or None."""
    _, _, id, _, _, topic, key, _, _, content_type, _, version, *_ = row
    if not topic:
        return "topic is empty"
    if key == "":
        return "key is empty; use null for a message without a key"
    if not content_type:
        return "content_type is empty"
    if version < 1:
        return f"schema_version is {version}, must be at least 1"
    if not is_uuid7(id):
        return f"id {id} is not a UUIDv7"
    return None
