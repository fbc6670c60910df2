"""Claim: read the next messages of leased lanes, without locking or writing them."""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from outbox.errors import CodecError, InvalidMessageError
from outbox.json_codec import read_headers
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
from relay.lanes.deferrals import LONG_AGO, Draining, KeyEnd, LogOfKey, WaitingMessage
from relay.lanes.lane import BEGINNING, Lane

# The limit counts JSON text; as jsonb the headers are at most a few bytes longer.
_MAX_STORED_HEADERS: Final = MAX_HEADERS_BYTES + 64
_VERDICT: Final = 12  # the index of the column
_MAX_COPIED: Final = 1024 * 1024
"""Maximum size of an oversized row that is moved with the batch, while lanes wait.

The payload counts with its stored size, because it is copied in that form; the headers
count with their decompressed size.
"""
BIN: Final = timedelta(minutes=15)
"""A mark has the time of its messages, rounded down to a multiple of this."""
_STEP: Final = 1 << 18
"""Number of seqs that one statement examines. Their marks are held in memory."""
_MOST_UNWRITTEN: Final = 1 << 16
"""Watermarks are raised after this many seqs (of all lanes), or after some time."""
_RAISED_EVERY: Final = timedelta(minutes=1)
_MOST_AHEAD: Final = 1 << 20
"""How many seqs (of all lanes) a claim can be ahead of its floor.

The marks above the floor are held in memory. While a transaction that wrote stays open,
no floor rises. Beyond this limit, the relay looks for the first message without a mark
before each claim.
"""
_MOST_ENTRIES: Final = 10_000
"""How many entries in the log of its lanes a claim reads.

With a million blocked keys, reading the whole log before the first claim made all
messages wait for 6.2 s; reading it in portions, 10,000 entries take 0.1 s.
"""
_NO_END: Final = 2**63 - 1
_ENDED: Final = {"published", "dead_lettered"}


class Claimed(NamedTuple):
    """A message that was read; if it isn't valid, the problem with its row.

    Attributes:
        place: its place in the log; None if it is claimed for the first time.
        due_at: when it became due, if not on creation: the time it was scheduled for,
            or when its replay was requested.
    """

    lane: int
    seq: int
    id: Any
    created_at: datetime
    attempts: int
    key: str | None
    topic: str
    message: Message | None
    problem: str | None
    place: WaitingMessage | None = None
    due_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of one claim, lane by lane, each lane in order.

    Attributes:
        rows: to be published.
        oversized: rows so large that their lanes don't wait while they are moved to
            the dead letters. Their `problem` says what is too large.
        scheduled: rows that are not due yet.
        held: rows whose key is blocked.
        ended: messages in the log that needn't be published, each with its outcome;
            None if the message doesn't exist.
    """

    lanes: Sequence[Lane]
    rows: Sequence[Claimed] = ()
    oversized: Sequence[Claimed] = ()
    scheduled: Sequence[Claimed] = ()
    held: Sequence[Claimed] = ()
    ended: Sequence[tuple[Claimed, str | None]] = ()


async def claim_batch(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> Batch:
    """Read the next messages of these lanes and move their floors.

    A claim is limited to `batch_size` rows and `max_batch_bytes`, counting all columns;
    a single message is always claimed. A row with a column over its limit isn't loaded.
    Messages that waited come first, in order of seq, and fill at most half of the
    batch. They are followed by each lane's first messages without a mark.
    """
    floors = [lane.floor for lane in lanes]
    try:
        found = await _claim_lanes(connection, board, lanes, config)
    except BaseException:
        # One of several statements failed, and what the others read is lost.
        for lane, floor in zip(lanes, floors, strict=True):
            lane.go_back_to(floor)
        raise
    board.served(found.reached)
    rows = found.rows
    if config.codec is not None:
        rows = [decode_row(row, config.codec) for row in rows]
    return Batch(lanes, rows, found.oversized, found.scheduled, found.held, found.ended)


async def raise_watermarks(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane]
) -> None:
    """Verify how far the lanes are marked, and record it for their next owner."""
    lanes = [lane for lane in lanes if not lane.is_new]
    clock = await _note_clock(connection, board)
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        heads, snapshot = await _find_unmarked(connection, lanes)
    _look_up_to_heads(board, lanes, clock, heads, snapshot)
    while await _verify(connection, lanes):
        pass
    await _raise_watermarks(connection, lanes, clock.now)


async def _note_clock(connection: Connection, board: LaneBoard) -> "_Clock":
    # Read before the snapshot, so that it covers the transactions that drew these seqs.
    clock = await _read_clock(connection)
    board.set_clock(clock.now)
    board.horizon.note(clock.transaction_id, clock.now)
    board.horizon.note_drawn(clock.transaction_id, clock.seq)
    board.log_horizon.note_drawn(clock.transaction_id, clock.entry)
    return clock


async def _claim_lanes(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> "_Found":
    stale = [lane for lane in lanes if lane.needs_refresh]
    if not stale:
        return await _claim(connection, board, lanes, {}, config)
    clock = await _note_clock(connection, board)
    # A lane's previous owner may settle late. Waiting messages, head and batch must
    # come from one snapshot, or a key's next message could be claimed before its first.
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        heads = await _refresh(connection, board, stale, clock)
        found = await _claim(connection, board, lanes, heads, config)
    # This verifies refreshed lanes up to their heads, nothing that was just claimed.
    await _verify(connection, stale)
    await _raise_watermarks(
        connection,
        [lane for lane in stale if _is_worth_raising(lane, clock)],
        clock.now,
    )
    return found


@dataclass(slots=True)
class _Found:
    """The claimed messages, and the lanes that the claim reached."""

    rows: list[Claimed] = field(default_factory=list)
    oversized: list[Claimed] = field(default_factory=list)
    scheduled: list[Claimed] = field(default_factory=list)
    held: list[Claimed] = field(default_factory=list)
    ended: list[tuple[Claimed, str | None]] = field(default_factory=list)
    reached: Sequence[Lane] = ()

    @property
    def size(self) -> int:
        """The number of messages, except scheduled and held ones."""
        return len(self.rows) + len(self.oversized) + len(self.ended)


async def _claim(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    heads: "_Heads",
    config: RelayConfig,
) -> _Found:
    """Claim from lanes; those in `heads` were read in the same snapshot."""
    found = _Found()
    if not any(lane.deferrals.has_work for lane in lanes):
        await _claim_next(connection, board, lanes, heads, config, found)
        return found
    half = replace(
        config,
        batch_size=math.ceil(config.batch_size / 2),
        max_batch_bytes=math.ceil(config.max_batch_bytes / 2),
    )
    drained, changes = await _claim_deferred(connection, lanes, half, found)
    rest = replace(half, batch_size=max(config.batch_size - found.size, 1))
    await _claim_next(connection, board, lanes, heads, rest, found, drained)
    for change in changes:
        change()
    if any(
        lane.deferrals.more_is_due and lane.deferrals.size < config.batch_size // 2
        for lane in lanes
    ):
        board.ask_for_due()
    return found


async def _claim_next(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    heads: "_Heads",
    config: RelayConfig,
    found: _Found,
    drained: Set[tuple[int, str]] = frozenset(),
) -> None:
    """Claim messages without a mark, above the floors.

    Args:
        drained: the blocked keys, with their lanes, whose waiting messages are all in
            this claim.
    """
    worth_reading = board.rows_worth_reading(config.batch_size)
    oldest, newest = board.bounds(lanes)
    cursor = connection.cursor(binary=True)
    await cursor.execute(
        load("relay", "claim_batch"),
        {
            "lanes": [lane.number for lane in lanes],
            "floors": [_start(lane, heads) for lane in lanes],
            # A mark has the time of its messages, rounded down.
            "oldest": bin_of(oldest),
            "newest": newest,
            "max_rows": worth_reading,
            "aside": list(board.aside),
            **_limits(config),
        },
    )
    rows = await cursor.fetchall()
    last: dict[int, int] = {}
    due: list[Claimed] = []
    cut = False
    for row in rows:
        verdict = row[_VERDICT]
        if verdict == "next":
            cut = True
            continue
        claimed = _read(row) if verdict is None else _refuse(row, config)
        last[claimed.lane] = claimed.seq
        if verdict == "scheduled":
            found.scheduled.append(claimed)
        elif verdict == "aside":
            found.oversized.append(claimed)
        else:
            due.append(claimed)
    blocked = await _find_blocked(connection, lanes, due) - drained
    if blocked:
        found.held += [row for row in due if (row.lane, row.key) in blocked]
        due = [row for row in due if (row.lane, row.key) not in blocked]
    found.rows += due
    full = cut or len(rows) >= worth_reading
    board.note_claim(len(rows), cut=cut)
    if last:
        snapshot = Snapshot.read(rows[0][-1])
        drawn = board.horizon.drawn_before(snapshot.xmin)
        for lane in lanes:
            if lane.number not in last:
                continue
            # The lanes in `heads` were already examined in the same snapshot.
            if lane.number not in heads:
                lane.looked_up_to(last[lane.number], snapshot, drawn)
            if last[lane.number] - lane.floor > _MOST_AHEAD:
                lane.needs_refresh = True
    found.reached = list(_reached(lanes, last) if full else lanes)
    waits = {row.lane for row in found.rows}
    for lane in found.reached:
        if lane.number not in last and lane.number not in waits:
            lane.found_empty()


def _start(lane: Lane, heads: "_Heads") -> int:
    """Return a seq up to which the snapshot contains nothing to claim in the lane."""
    if lane.number not in heads:
        return lane.floor
    head = heads[lane.number]
    return max(lane.floor, _NO_END if head is None else head[0] - 1)


def _reached(lanes: Sequence[Lane], found: Container[int]) -> Sequence[Lane]:
    """Return the lanes up to the last row; a full claim says nothing about the rest."""
    end = max((i for i, lane in enumerate(lanes) if lane.number in found), default=-1)
    return lanes[: end + 1]


async def _claim_deferred(
    connection: Connection, lanes: Sequence[Lane], config: RelayConfig, found: _Found
) -> tuple[set[tuple[int, str]], list[Callable[[], None]]]:
    """Claim messages that waited: those that are due, and those of draining keys.

    Returns:
        The keys, with their lanes, whose waiting messages are all in this claim, and
        the changes to make in the lanes once the whole claim has succeeded.
    """
    places: list[WaitingMessage] = []
    share = config.batch_size
    if any(lane.deferrals.draining for lane in lanes):
        share = math.ceil(share / 2)
    for lane in lanes:
        lane.deferrals.begin_claim()
        places += lane.deferrals.next_due(share - len(places))
    keys = await _find_next_of_keys(connection, lanes, config.batch_size - len(places))
    drained = {
        (lane.number, key.key) for lane, key in keys if key.end is KeyEnd.NOTHING
    }
    order = {lane.number: index for index, lane in enumerate(lanes)}
    held = []
    wanted = [place for _, key in keys for place in key.places]
    blocked = await _find_blocked(connection, lanes, places) - drained
    for place in places:
        if (place.lane, place.key) in blocked:
            held.append(place)
        else:
            wanted.append(place)
    wanted.sort(key=lambda place: (order[place.lane], place.seq))
    unread = wanted[await _load(connection, wanted, config, found) :]
    left = {place.id for place in unread}
    # A new message must not overtake an unread one, whatever the latter waited for.
    drained -= {(place.lane, place.key) for place in unread if place.key is not None}
    found.held += [_unread(place) for place in held]

    taken = {place.id for place in places} - left
    changes: list[Callable[[], None]] = [
        partial(lane.deferrals.took, taken) for lane in lanes
    ]
    for lane, key in keys:
        is_free = (lane.number, key.key) in drained
        changes.append(partial(lane.deferrals.claimed, key, left, is_free=is_free))
    return drained, changes


async def _find_next_of_keys(
    connection: Connection, lanes: Sequence[Lane], max_rows: int
) -> list[tuple[Lane, Draining]]:
    """Read the log of draining keys, each up to its head."""
    wanted = [
        (lane, key, seq)
        for lane in lanes
        for key, seq in islice(lane.deferrals.draining.items(), max_rows)
    ][:max_rows]
    if not wanted:
        return []
    cursor = await connection.execute(
        load("relay", "find_next_of_keys"),
        {
            "lanes": [lane.number for lane, _, _ in wanted],
            "keys": [key for _, key, _ in wanted],
            "seqs": [seq for _, _, seq in wanted],
            "since": _since(lane for lane, _, _ in wanted),
            "max_rows": max_rows,
        },
        binary=True,
    )
    rows = await cursor.fetchall()
    # The last key may have more rows, and the keys after it weren't read.
    last = rows[-1][0] if len(rows) >= max_rows else len(wanted) + 1
    waiting: dict[int, list[tuple[WaitingMessage, bool | None]]] = {}
    for position, *fields, is_due in rows:
        lane, key, _ = wanted[position - 1]
        place = WaitingMessage._make((lane.number, *fields, key))
        waiting.setdefault(position, []).append((place, is_due))
    return [
        (
            lane,
            Draining.read(key, waiting.get(position, ()), is_cut=position == last),
        )
        for position, (lane, key, _) in enumerate(wanted[:last], 1)
    ]


def _since(lanes: Iterable[Lane]) -> datetime:
    moments = [lane.deferrals.since for lane in lanes]
    return min((moment for moment in moments if moment is not None), default=LONG_AGO)


async def _load(
    connection: Connection,
    places: Sequence[WaitingMessage],
    config: RelayConfig,
    found: _Found,
) -> int:
    """Load the messages at these places; return how many places were processed."""
    if not places:
        return 0
    cursor = connection.cursor(binary=True)
    moments = [place.created_at for place in places]
    await cursor.execute(
        load("relay", "claim_deferred"),
        {
            "ids": [place.id for place in places],
            "created_ats": moments,
            "lanes": [place.lane for place in places],
            "seqs": [place.seq for place in places],
            "runs": [place.run for place in places],
            "entries": [place.entry for place in places],
            "first": min(moments),
            "last": max(moments),
            **_limits(config),
        },
    )
    count = 0
    for position, *fields, verdict, too_large in await cursor.fetchall():
        if verdict == "next":
            break
        count = position
        place = places[position - 1]
        row = (*place[:4], *fields, verdict, too_large, None)
        if verdict is None:
            claimed = _read(row)
        elif verdict in _ENDED:
            found.ended.append((_unread(place), verdict))
            continue
        elif verdict == "missing":
            found.ended.append((_unread(place), None))
            continue
        elif verdict == "gone":
            continue
        else:
            claimed = _refuse(row, config)
        rows = found.oversized if verdict == "aside" else found.rows
        rows.append(claimed._replace(attempts=place.attempts, place=place))
    return count


def _unread(place: WaitingMessage) -> Claimed:
    return Claimed(
        place.lane,
        place.seq,
        place.id,
        place.created_at,
        place.attempts,
        place.key,
        "",
        None,
        None,
        place,
    )


def _limits(config: RelayConfig) -> dict[str, int]:
    return {
        "max_bytes": config.max_batch_bytes,
        "max_indexed": MAX_INDEXED_BYTES,
        "max_tenant": MAX_TENANT_BYTES,
        "max_content_type": MAX_CONTENT_TYPE_BYTES,
        "max_headers": _MAX_STORED_HEADERS,
        "max_payload": config.max_payload_bytes,
        "max_copied": _MAX_COPIED,
    }


def bin_of(moment: datetime) -> datetime:
    """Return the time of a mark: round down as `date_bin('15 minutes', …)` does."""
    return moment - (moment - BEGINNING) % BIN


class _Clock(NamedTuple):
    now: datetime
    seq: int
    entry: int
    transaction_id: int


async def _read_clock(connection: Connection) -> _Clock:
    cursor = await connection.execute(load("relay", "read_clock"))
    (row,) = await cursor.fetchall()
    return _Clock(*row)


_Heads: TypeAlias = dict[int, tuple[int, datetime] | None]
"""For each lane, seq and `created_at` of its first message without a mark, or None."""


async def _refresh(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], clock: _Clock
) -> _Heads:
    """Read the log and the heads of lanes that are new or may have changed."""
    for lane in lanes:
        if lane.floor > clock.seq:
            lane.restart()
        if lane.deferrals.read_up_to > clock.entry:
            lane.deferrals.restart_log()
    await _read_watermarks(connection, lanes, clock)
    heads, snapshot = await _find_unmarked(connection, lanes)
    drawn = board.log_horizon.drawn_before(snapshot.xmin)
    cuts = await _read_deferrals(connection, lanes)
    for lane in lanes:
        cut = cuts.get(lane.number)
        lane.deferrals.portion_read(cut, clock.entry, snapshot, drawn)
    since = min(clock.now, board.horizon.since(snapshot.xmin))
    for lane in lanes:
        lane.refresh(heads[lane.number], since)
    _look_up_to_heads(board, lanes, clock, heads, snapshot)
    return heads


def _look_up_to_heads(
    board: LaneBoard,
    lanes: Sequence[Lane],
    clock: _Clock,
    heads: _Heads,
    snapshot: Snapshot,
) -> None:
    drawn = board.horizon.drawn_before(snapshot.xmin)
    for lane in lanes:
        head = heads[lane.number]
        seen = clock.seq if head is None else head[0] - 1
        lane.looked_up_to(seen, snapshot, drawn)


async def _read_watermarks(
    connection: Connection, lanes: Sequence[Lane], clock: _Clock
) -> None:
    new = {lane.number: lane for lane in lanes if lane.is_new}
    if not new:
        return
    cursor = await connection.execute(
        load("relay", "read_watermarks"), {"lanes": list(new), "drawn": clock.seq}
    )
    for number, seq in await cursor.fetchall():
        new[number].start_at(seq)


async def _find_unmarked(
    connection: Connection, lanes: Sequence[Lane]
) -> tuple[_Heads, Snapshot]:
    """Find each lane's first message without a mark above its floor."""
    heads: _Heads = {}
    aboves = {lane.number: lane.floor for lane in lanes}
    snapshot = Snapshot(0, 0)
    while aboves:
        # In steps, because the marks are held in memory.
        rows = await _look_for_unmarked(connection, aboves, _STEP)
        for number, seq, created_at, following, text in rows:
            snapshot = Snapshot.read(text)
            if seq is None and following is not None:
                aboves[number] = following - 1
                continue
            heads[number] = None if seq is None else (seq, created_at)
            del aboves[number]
    return heads, snapshot


async def _look_for_unmarked(
    connection: Connection, aboves: Mapping[int, int], step: int
) -> list[tuple[Any, ...]]:
    """Run `find_unmarked.sql`; `aboves` maps each lane to a seq."""
    cursor = await connection.execute(
        load("relay", "find_unmarked"),
        {
            "lanes": list(aboves),
            "aboves": list(aboves.values()),
            "up_tos": [above + step for above in aboves.values()],
        },
    )
    return await cursor.fetchall()


async def _read_deferrals(
    connection: Connection, lanes: Sequence[Lane]
) -> dict[int, int]:
    """Read the next entries in the log of these lanes.

    Returns:
        For each lane that may have more entries, the last one that was read.
    """
    by_number = {lane.number: lane for lane in lanes}
    cursor = connection.cursor(binary=True)
    await cursor.execute(
        load("relay", "read_deferrals"),
        {
            "lanes": list(by_number),
            "entries": [lane.deferrals.read_up_to for lane in lanes],
            "max_rows": math.ceil(_MOST_ENTRIES / len(lanes)),
        },
    )
    cuts = {}
    for number, cut, *log in await cursor.fetchall():
        if cut is None:
            by_number[number].deferrals.read(LogOfKey(*log))
        else:
            cuts[number] = cut
    return cuts


async def _find_blocked(
    connection: Connection,
    lanes: Sequence[Lane],
    messages: Iterable[Claimed | WaitingMessage],
) -> set[tuple[int, str]]:
    """Return which of the messages' keys are blocked, with their lanes.

    This asks the database about lanes whose log is only partly read.
    """
    blocked: set[tuple[int, str]] = set()
    if not any(
        lane.deferrals.blocked or lane.deferrals.is_partly_read for lane in lanes
    ):
        return blocked
    by_number = {lane.number: lane for lane in lanes}
    unsure: set[tuple[int, str]] = set()
    for message in messages:
        if message.key is None:
            continue
        deferrals = by_number[message.lane].deferrals
        if deferrals.is_partly_read:
            unsure.add((message.lane, message.key))
        elif deferrals.is_blocked(message.key):
            blocked.add((message.lane, message.key))
    if unsure:
        cursor = await connection.execute(
            load("relay", "find_waiting_keys"),
            {
                "lanes": [number for number, _ in unsure],
                "keys": [key for _, key in unsure],
            },
        )
        for number, key in await cursor.fetchall():
            by_number[number].deferrals.found_waiting(key)
            blocked.add((number, key))
    return blocked


async def _verify(connection: Connection, lanes: Sequence[Lane]) -> bool:
    """Verify that messages up to the floors have marks, and count them.

    A floor may have passed messages that were inserted by hand into days that no claim
    has read. If a message lacks a mark, the next claim examines its lane again.

    Returns:
        Whether messages are left to verify: each step is limited, because it holds
        their marks in memory.
    """
    for lane in lanes:
        if lane.verified_by is not connection:
            # A server crash may have lost marks that this relay has seen.
            lane.forget_verified()
            lane.verified_by = connection
    behind = [lane for lane in lanes if lane.verified < lane.floor]
    if not behind:
        return False
    above = min(lane.verified for lane in behind)
    end = above + _STEP
    behind = [lane for lane in behind if lane.verified < end]
    up_tos = {lane.number: min(lane.floor, end) for lane in behind}
    places = range(max(up_tos) + 1)
    aboves = {lane.number: lane.verified for lane in behind}
    cursor = await connection.execute(
        load("relay", "verify_marks"),
        {
            "lanes": list(up_tos),
            "aboves": [aboves.get(number, 0) for number in places],
            "up_tos": [up_tos.get(number, 0) for number in places],
            "above": above,
            "up_to": max(up_tos.values()),
        },
    )
    counts: dict[int, dict[datetime, int]] = {}
    unmarked: dict[int, int] = {}
    for number, starts_at, messages, first in await cursor.fetchall():
        if first is not None:
            unmarked[number] = min(first, unmarked.get(number, first))
        if starts_at is not None:
            counts.setdefault(number, {})[starts_at] = messages
    for lane in behind:
        if lane.number in unmarked:
            lane.passed_by(unmarked[lane.number])
        else:
            lane.note_verified(up_tos[lane.number], counts.get(lane.number, {}))
    left = [lane for lane in behind if lane.verified < lane.floor]
    if left:
        await _skip_gaps(connection, left)
    return bool(left)


async def _skip_gaps(connection: Connection, lanes: Sequence[Lane]) -> None:
    """Skip seqs that no message of the lane has, since the sequence may have jumped."""
    aboves = {lane.number: lane.verified for lane in lanes}
    rows = await _look_for_unmarked(connection, aboves, 0)
    following = {number: seq for number, _, _, seq, _ in rows}
    for lane in lanes:
        seq = following[lane.number]
        lane.note_verified(lane.floor if seq is None else min(lane.floor, seq - 1), {})


def _is_worth_raising(lane: Lane, clock: _Clock) -> bool:
    return (
        lane.verified - lane.watermark >= _MOST_UNWRITTEN
        or clock.now - lane.raised_at >= _RAISED_EVERY
    )


async def _raise_watermarks(
    connection: Connection, lanes: Sequence[Lane], now: datetime
) -> None:
    """Record the verified stretches in a separate transaction.

    A transaction that also reads would keep all floors from rising until it ends.
    """
    stretches = [
        (lane, starts_at, messages)
        for lane in lanes
        for starts_at, messages in lane.unwritten.items()
    ]
    if not stretches:
        return
    await connection.execute(
        load("relay", "raise_watermarks"),
        {
            "lanes": [lane.number for lane, _, _ in stretches],
            "starts": [starts_at for _, starts_at, _ in stretches],
            "aboves": [lane.watermark for lane, _, _ in stretches],
            "up_tos": [lane.verified for lane, _, _ in stretches],
            "messages": [messages for _, _, messages in stretches],
        },
    )
    for lane in {lane for lane, _, _ in stretches}:
        lane.watermark_written(now)


def _refuse(row: Sequence[Any], config: RelayConfig) -> Claimed:
    """Return a `Claimed` for a row not loaded; `problem` names any oversized field."""
    lane, seq, id, created_at, topic, key, *_, too_large, _ = row
    problem = None if too_large is None else _limit_on(too_large, config)
    return Claimed(lane, seq, id, created_at, 0, key, topic, None, problem)


def _read(row: Sequence[Any]) -> Claimed:
    (
        lane,
        seq,
        id,
        created_at,
        topic,
        key,
        tenant,
        payload,
        content_type,
        headers,
        version,
        due_at,
        _,
        _,
        _,
    ) = row
    problem = None
    if headers is not None:
        headers, problem = read_headers(headers)
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
    return Claimed(
        lane, seq, id, created_at, 0, key, topic, message, problem, None, due_at
    )


def traceparent_of(row: Claimed) -> str | None:
    """Return the trace context with which a message was added, if the row was read."""
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
    """Return an error if a header's name is reserved, which `add` would reject."""
    if reserved_header(headers) is None:
        return None
    try:
        check_reserved(name for name in headers if name not in STORED_HEADERS)
    except InvalidMessageError as error:
        return str(error)
    return None


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
    """Return the problem with a row that `add` didn't write, or None."""
    _, _, id, _, topic, key, _, _, content_type, _, version, *_ = row
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
