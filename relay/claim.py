"""Claim: read the next messages of leased lanes, without locking or writing them."""

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import psycopg

from outbox.errors import CodecError, InvalidMessageError
from outbox.lane import priority_of
from outbox.limits import STORED_HEADERS, check_reserved, reserved_header
from outbox.log.reader import Clock, Drawn, Look, MustLookError, Read
from outbox.message import Message
from outbox.message_id import is_uuid7
from outbox.payload.payload_codec import PayloadCodec, decoded, is_encoded
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load, load_numbered
from relay.config import RelayConfig
from relay.lanes.board import LaneBoard
from relay.lanes.deferrals import LONG_AGO, Draining, KeyEnd, LogOfKey, WaitingMessage
from relay.lanes.lane import Lane
from relay.reader import read_record

_VERDICT: Final = 12  # the index of the column
_MOST_SKIPPED: Final = 1000
"""After so many messages of other topics, a lane's position is stored without others.

They are read again after a takeover, and by whoever counts the backlog.
"""
_MOST_ENTRIES: Final = 10_000
"""How many entries in the log of its lanes a claim reads.

With a million blocked keys, reading the whole log before the first claim made all
messages wait for 6.2 s; reading it in portions, 10,000 entries take 0.1 s.
"""


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

    @property
    def identity(self) -> Hashable:
        """What no other message has, even after a failover to a server without it."""
        run = 0 if self.place is None else self.place.run
        return self.id, self.created_at, self.seq, run


class Outcome(NamedTuple):
    """What becomes of a message.

    Attributes:
        cause: that of its entry in the log; or `published` or `dead_lettered`; or
            `ended`, if the log has an entry for a message that doesn't exist; or
            `untouched`, if it is claimed again as if this claim had not been.
        delay: the seconds until it is due; None if it waits only for its key.
        charge: the number of attempts to count.
    """

    cause: str
    reason: str | None = None
    delay: float | None = None
    charge: int = 0


PUBLISHED: Final = Outcome("published")
ENDED: Final = Outcome("ended")
UNTOUCHED: Final = Outcome("untouched")
SCHEDULED: Final = Outcome("scheduled")
HELD: Final = Outcome("blocked")
"""Its key is blocked."""
UNKNOWN: Final = Outcome("unknown", delay=0)
"""It may have been published, or could not be loaded."""
ASIDE: Final = Outcome("aside", delay=0)
"""It is so large that its lane doesn't wait while it is moved to the dead letters."""


@dataclass(slots=True)
class Batch:
    """The messages of one claim, lane by lane, each lane in order.

    Attributes:
        rows: to be published.
        others: rows that are not published now, and why.
        reads: how far lanes were read whose positions are to be stored.
        reached: the lanes that the claim reached.
    """

    lanes: Sequence[Lane]
    rows: list[Claimed] = field(default_factory=list)
    others: list[tuple[Claimed, Outcome]] = field(default_factory=list)
    reads: dict[int, Read] = field(default_factory=dict)
    reached: Sequence[Lane] = ()

    def release(self) -> Sequence[Lane]:
        """Keep only the lanes with something to settle; return the others."""
        used = {row.lane for row in self.rows} | {row.lane for row, _ in self.others}
        used |= self.reads.keys()
        released = [lane for lane in self.lanes if lane.number not in used]
        self.lanes = [lane for lane in self.lanes if lane.number in used]
        return released

    def by_lane(self) -> Sequence["Batch"]:
        """Divide it, so that each lane is settled as soon as its messages allow."""
        return [
            Batch(
                [lane],
                rows=[row for row in self.rows if row.lane == lane.number],
                others=[one for one in self.others if one[0].lane == lane.number],
                reads={n: read for n, read in self.reads.items() if n == lane.number},
            )
            for lane in self.lanes
        ]


async def claim_batch(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> Batch:
    """Read the next messages of these lanes.

    A claim is limited to `batch_size` rows and `max_batch_bytes`, counting all columns;
    a single message is always claimed. A row whose payload is over its limit isn't
    loaded. Messages that waited come first, in order of seq, and fill at most half of
    the batch. They are followed by each lane's rows that its position doesn't cover.
    The positions advance with the settlement.
    """
    batch = await _claim_lanes(connection, board, lanes, config)
    board.served(batch.reached)
    if config.codec is not None:
        batch.rows = [decode_row(row, config.codec) for row in batch.rows]
    return batch


async def _claim_lanes(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> Batch:
    must_look = any(lane.needs_refresh for lane in lanes)
    while True:
        try:
            if must_look:
                return await _look_and_claim(connection, board, lanes, config)
            return await _claim(connection, board, lanes, config)
        except MustLookError:
            must_look = True


async def _look_and_claim(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], config: RelayConfig
) -> Batch:
    # All of them: the claim finds no rows below a position of which no look knows.
    clock = await board.reader.read_clock(connection)
    await board.reader.move_fences(connection, lanes, clock)
    # A lane's previous owner may settle late. Waiting messages, positions and batch
    # must come from one snapshot, or a key's next message could be claimed before its
    # first.
    async with connection.transaction():
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        # A failover may have lost the reader, which then begins elsewhere.
        record = await read_record(connection, board.reader.reader)
        if record is not None and record.topics is not None:
            board.reader.since, board.topics = record.since, record.topics
        await _refresh(connection, board, lanes, clock)
        batch = await _claim(connection, board, lanes, config, has_looked=True)
    board.forget_floors()
    return batch


async def _claim(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    config: RelayConfig,
    *,
    has_looked: bool = False,
) -> Batch:
    found = Batch(lanes)
    if not any(lane.deferrals.has_work for lane in lanes):
        await _claim_next(connection, board, lanes, config, found, has_looked)
        return found
    half = replace(
        config,
        batch_size=math.ceil(config.batch_size / 2),
        max_batch_bytes=math.ceil(config.max_batch_bytes / 2),
    )
    drained, changes = await _claim_deferred(connection, board, lanes, half, found)
    size = len(found.rows) + len(found.others)
    rest = replace(half, batch_size=max(config.batch_size - size, 1))
    await _claim_next(connection, board, lanes, rest, found, has_looked, drained)
    for change in changes:
        change()
    if any(
        lane.deferrals.more_is_due
        and lane.deferrals.size < max(1, config.batch_size // 2)
        for lane in lanes
    ):
        board.ask_for_due()
    return found


async def _claim_next(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    config: RelayConfig,
    found: Batch,
    has_looked: bool,
    drained: Set[tuple[int, str]] = frozenset(),
) -> None:
    """Claim rows that the positions don't cover.

    Args:
        has_looked: whether a look has found the rows of transactions that ended.
        drained: the blocked keys, with their lanes, whose waiting messages are all in
            this claim.
    """
    claiming = board.reader.prepare(lanes)
    parameters = {
        **claiming.parameters,
        **board.topics.parameters,
        # One more, to see whether it has the seq of the last one.
        "max_rows": config.batch_size + 1,
        **_limits(config),
    }
    text, names = load_numbered("relay", "claim_batch")
    cursor = psycopg.AsyncRawCursor(connection)
    await cursor.execute(text, [parameters[name] for name in names], binary=True)
    rows = await cursor.fetchall()
    look = Look.parse(rows[0][-1])
    drawn = Drawn.parse(rows[0][-1])
    taken, following = _cut(rows if rows[0][0] is not None else [], config.batch_size)
    by_number = {lane.number: lane for lane in lanes}
    strange = _find_strange(taken, by_number)
    places = [(row[0], row[1]) for row in taken if row not in strange]
    if (strange and not has_looked) or board.reader.must_look(
        claiming, look, drawn, places, has_looked=has_looked
    ):
        for row in strange:
            by_number[row[0]].progress = None
        raise MustLookError
    # A DEFAULT partition has them, which the doctor reports: no position can be stored.
    passed = {row[0]: row[1] for row in strange}
    skipped: Counter[int] = Counter()
    last: dict[int, int] = {}
    due: list[Claimed] = []
    for row in taken:
        if row in strange:
            continue
        verdict = row[_VERDICT]
        if verdict == "other":
            skipped[row[0]] += 1
            passed[row[0]] = row[1]
            continue
        claimed = _read(row) if verdict is None else _refuse(row, config)
        last[claimed.lane] = claimed.seq
        if verdict == "scheduled":
            found.others.append((claimed, SCHEDULED))
        elif verdict == "aside":
            found.others.append((claimed, ASIDE))
        elif verdict == "next":
            found.others.append((claimed, UNKNOWN))
        else:
            due.append(claimed)
    blocked = await _find_blocked(connection, board, lanes, due) - drained
    if blocked:
        found.others += [(row, HELD) for row in due if (row.lane, row.key) in blocked]
        due = [row for row in due if (row.lane, row.key) not in blocked]
    found.rows += due
    board.note_claim(len(taken))
    seen = max([*last.values(), *passed.values()], default=-1)
    board.reader.note(look, drawn, seen)
    end = None if following is None else following[0]
    found.reached = _reached(lanes, end)
    waits = {row.lane for row in found.rows}
    for lane in found.reached:
        is_cut = lane.number == end
        up_to = max(passed.get(lane.number, -1), last.get(lane.number, -1))
        lane.skipped += skipped[lane.number]
        if lane.number in last or lane.skipped >= _MOST_SKIPPED:
            found.reads[lane.number] = Read(up_to, look, is_cut)
            if board.writers_ring and not is_cut:
                lane.found_empty()
            continue
        if lane.progress is not None and (up_to >= 0 or not is_cut):
            lane.progress = lane.progress.claimed(up_to, *look, is_cut=is_cut)
        # Where others find messages, more will follow.
        if not (is_cut or skipped[lane.number] or lane.number in waits):
            lane.found_empty()


def _find_strange(
    rows: Sequence[Sequence[Any]], lanes: Mapping[int, Lane]
) -> Sequence[Sequence[Any]]:
    """Return the rows of days that these lanes don't read."""
    moments = [row[3] for row in rows]
    # Almost always there are none, and one question for each lane shows it.
    if moments:
        first, last = min(moments), max(moments)
        if all(lanes[number].reads(first, last) for number in {r[0] for r in rows}):
            return ()
    return [row for row in rows if not lanes[row[0]].reads(row[3])]


def _cut(
    rows: Sequence[Sequence[Any]], most: int
) -> tuple[Sequence[Sequence[Any]], Sequence[Any] | None]:
    """Return the rows that the claim takes, and the one that follows, if any.

    A position can't pass one of several rows with the same seq, which only exist after
    the sequence was set back: they are left together for the next claim.
    """
    end = next((i for i, row in enumerate(rows) if row[_VERDICT] == "next"), len(rows))
    end = min(end, most)
    if end == len(rows):
        return rows, None
    following = rows[end]
    before = [row for row in rows[:end] if row[:2] != following[:2]]
    if before or not end:
        return before, following
    # They fill a claim.
    return rows[: end + 1], following


def _reached(lanes: Sequence[Lane], end: int | None) -> Sequence[Lane]:
    """Return the lanes up to the one that a full claim didn't read to its end."""
    numbers = [lane.number for lane in lanes]
    return lanes if end is None else lanes[: numbers.index(end) + 1]


async def _claim_deferred(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    config: RelayConfig,
    found: Batch,
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
    keys = await _find_next_of_keys(
        connection, board, lanes, config.batch_size - len(places)
    )
    drained = {
        (lane.number, key.key) for lane, key in keys if key.end is KeyEnd.NOTHING
    }
    order = {lane.number: index for index, lane in enumerate(lanes)}
    held = []
    wanted = [place for _, key in keys for place in key.places]
    blocked = await _find_blocked(connection, board, lanes, places) - drained
    for place in places:
        if (place.lane, place.key) in blocked:
            held.append(place)
        else:
            wanted.append(place)
    wanted.sort(key=lambda place: (order[place.lane], place.seq))
    unread = wanted[await _load(connection, board, wanted, config, found) :]
    left = {place.id for place in unread}
    # A new message must not overtake an unread one, whatever the latter waited for.
    drained -= {(place.lane, place.key) for place in unread if place.key is not None}
    found.others += [(_unread(place), HELD) for place in held]

    taken = {place.id for place in places} - left
    changes: list[Callable[[], None]] = [
        partial(lane.deferrals.took, taken) for lane in lanes
    ]
    for lane, key in keys:
        is_free = (lane.number, key.key) in drained
        changes.append(partial(lane.deferrals.claimed, key, left, is_free=is_free))
    return drained, changes


async def _find_next_of_keys(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], max_rows: int
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
            "reader": board.reader.reader,
            "lanes": [lane.number for lane, _, _ in wanted],
            "keys": [key for _, key, _ in wanted],
            "seqs": [seq for _, _, seq in wanted],
            "since": since_of(lane for lane, _, _ in wanted),
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


def since_of(lanes: Iterable[Lane]) -> datetime:
    """Return a time before which none of the messages that wait was created."""
    moments = [lane.deferrals.since for lane in lanes]
    return min((moment for moment in moments if moment is not None), default=LONG_AGO)


async def _load(
    connection: Connection,
    board: LaneBoard,
    places: Sequence[WaitingMessage],
    config: RelayConfig,
    found: Batch,
) -> int:
    """Load the messages at these places; return how many places were processed."""
    if not places:
        return 0
    cursor = connection.cursor(binary=True)
    moments = [place.created_at for place in places]
    await cursor.execute(
        load("relay", "claim_deferred"),
        {
            "reader": board.reader.reader,
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
    for position, *fields, verdict in await cursor.fetchall():
        if verdict == "next":
            break
        count = position
        place = places[position - 1]
        row = (*place[:4], *fields, verdict, None)
        if verdict is None:
            claimed = _read(row)
        elif verdict == "missing":
            found.others.append((_unread(place), ENDED))
            continue
        elif verdict == "gone":
            continue
        else:
            claimed = _refuse(row, config)
        claimed = claimed._replace(attempts=place.attempts, place=place)
        if verdict == "aside":
            found.others.append((claimed, ASIDE))
        else:
            found.rows.append(claimed)
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
        "max_payload": config.max_payload_bytes,
    }


async def _refresh(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane], clock: Clock
) -> None:
    """Read positions, other days and the log of lanes that may have changed."""
    look = await board.reader.refresh(connection, lanes, clock)
    last = max((lane.deferrals.read_up_to for lane in lanes), default=-1)
    if board.reader.entries_begin_again(clock, last):
        board.restart_log()
    floors = board.entry_floors.note(look.next_xid, clock.entry)
    board.entry_floors = floors.forget(look.snapshot.xmin)
    drawn = floors.of(look.snapshot.xmin)
    cuts = await _read_deferrals(connection, board, lanes)
    for lane in lanes:
        cut = cuts.get(lane.number)
        lane.deferrals.portion_read(cut, drawn)
        lane.needs_refresh = lane.deferrals.is_partly_read


async def _read_deferrals(
    connection: Connection, board: LaneBoard, lanes: Sequence[Lane]
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
            "reader": board.reader.reader,
            "lanes": list(by_number),
            "entries": [lane.deferrals.read_up_to for lane in lanes],
            "max_rows": math.ceil(_MOST_ENTRIES / len(lanes)),
        },
    )
    cuts = {}
    for number, cut, *log in await cursor.fetchall():
        if cut is None:
            by_number[number].deferrals.read(LogOfKey(*log))
            continue
        cuts[number] = cut
        if log[1]:
            board.reader.refuse_entries(cut)
    return cuts


async def _find_blocked(
    connection: Connection,
    board: LaneBoard,
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
                "reader": board.reader.reader,
                "lanes": [number for number, _ in unsure],
                "keys": [key for _, key in unsure],
            },
        )
        for number, key in await cursor.fetchall():
            by_number[number].deferrals.found_waiting(key)
            blocked.add((number, key))
    return blocked


def _refuse(row: Sequence[Any], config: RelayConfig) -> Claimed:
    """Return a `Claimed` for a row not loaded, with the problem if it is too large."""
    lane, seq, id, created_at, topic, key, *_ = row
    problem = None
    if row[_VERDICT] == "aside":
        limit = config.max_payload_bytes
        problem = f"payload is over {limit} bytes (max_payload_bytes)"
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
    ) = row
    headers = {} if headers is None else json.loads(headers)
    problem = problem_of_headers(headers) if headers else None
    if not is_uuid7(id):
        problem = f"id {id} is not a UUIDv7"
    message = None
    if problem is None:
        message = Message(
            topic,
            payload,
            key=key,
            tenant=tenant,
            headers=headers,
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
