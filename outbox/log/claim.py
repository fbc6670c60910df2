"""Claim: read the next messages of leased lanes, without locking or writing them."""

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from datetime import datetime
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg

from pillarbox.outbox.errors import CodecError, InvalidMessageError
from pillarbox.outbox.lane import priority_of
from pillarbox.outbox.limits import STORED_HEADERS, check_reserved, reserved_header
from pillarbox.outbox.log.claims import ClaimPlan
from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.log.lanes.batch import (
    BLOCKED,
    CANCELLED,
    ENDED,
    OVERSIZED,
    SCHEDULED,
    UNKNOWN,
    ClaimedBatch,
    ClaimedMessage,
)
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.keys import (
    LONG_AGO,
    Draining,
    LaneKey,
    LogOfKey,
    WaitingClaim,
    WaitingMessage,
)
from pillarbox.outbox.log.lanes.lane import Extent, Lane
from pillarbox.outbox.log.registration import read_record
from pillarbox.outbox.log.settle import move_fences
from pillarbox.outbox.log.takeover import Clock, RefreshNeededError
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import is_uuid7
from pillarbox.outbox.payload.payload_codec import PayloadCodec, decoded, is_encoded
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.rows import rows_of
from pillarbox.outbox.postgres.sql_files import load, load_numbered

_MOST_SKIPPED: Final = 1000
"""After this many messages of other topics, a lane's position is stored even alone.

They are read again after a takeover, and whenever the backlog is counted.
"""
_MOST_OTHERS: Final = 2000
"""A claim can skip this many messages of other topics in each lane, at least."""
_MOST_ENTRIES: Final = 10_000
"""How many entries in the log of its lanes a claim reads.

With a million blocked keys, reading the whole log before the first claim made all
messages wait for 6.2 s; reading it in portions, 10,000 entries take 0.1 s.
"""


_UNLOADED: Final = {"scheduled": SCHEDULED, "aside": OVERSIZED, "next": UNKNOWN}
"""The outcome for a row that wasn't loaded, by the claim's verdict."""


class _Read(NamedTuple):
    """How far a claim has read a lane.

    Attributes:
        others: how many of its rows are of other topics.
    """

    up_to: int
    others: int
    is_cut: bool


_NONE: Final = _Read(-1, 0, is_cut=False)


class ClaimedRow(NamedTuple):
    """A row of `claim_batch.sql` or `claim_deferred.sql`."""

    lane: int
    seq: int
    id: Any
    created_at: datetime
    topic: str
    key: str | None
    tenant: str | None
    payload: bytes
    content_type: str
    headers: str | None
    schema_version: int
    due_at: datetime | None
    verdict: str | None
    place: int
    view: str | None


async def claim_batch(
    connection: Connection,
    board: LaneBoard,
    lanes: Sequence[Lane],
    config: ReadingConfig,
) -> ClaimedBatch:
    """Read the next messages of these lanes.

    A claim is limited to `batch_size` rows and `max_batch_bytes`, counting all columns;
    a single message is always claimed. A row whose payload is over its limit isn't
    loaded. Messages that waited come first, in order of seq, and fill at most half of
    the batch. They are followed by each lane's rows that its position doesn't cover.
    The positions advance with the settlement.
    """
    # Comprehensions and not generators, where each claim asks each lane.
    needs_refresh = True in [lane.needs_refresh for lane in lanes]
    while True:
        claim = _Claim(connection, board, lanes, config)
        try:
            batch = await (claim.refresh() if needs_refresh else claim.run())
        except RefreshNeededError:
            needs_refresh = True
            continue
        try:
            await _withhold_cancelled(connection, batch)
        except BaseException:
            # The lanes count the messages as claimed.
            for lane in lanes:
                lane.doubt()
            raise
        if config.codec is not None:
            batch.rows = [decode_row(row, config.codec) for row in batch.rows]
        return batch


async def find_cancelled(
    connection: Connection, rows: Iterable[ClaimedMessage]
) -> set[Hashable]:
    """Return the identities of new messages that are due, and cancelled, or may be.

    Args:
        connection: not in the transaction that has read them, whose snapshot can be
            older than a cancellation.
    """
    due = [row for row in rows if row.waiting is None and row.due_at is not None]
    if not due:
        return set()
    cursor = await connection.execute(
        load("outbox.log", "find_cancelled"),
        {
            "ids": [row.id for row in due],
            "created_ats": [row.created_at for row in due],
        },
    )
    found = {*await cursor.fetchall()}
    return {row.identity for row in due if (row.id, row.created_at) in found}


async def _withhold_cancelled(connection: Connection, batch: ClaimedBatch) -> None:
    """Leave them to the search for due messages, as if they weren't due."""
    rows = [*batch.rows, *[row for row, _ in batch.withheld]]
    cancelled = await find_cancelled(connection, rows)
    if cancelled:
        batch.withheld = [
            *[one for one in batch.withheld if one[0].identity not in cancelled],
            *[(row, SCHEDULED) for row in rows if row.identity in cancelled],
        ]
        batch.rows = [row for row in batch.rows if row.identity not in cancelled]


class _Claim:
    """One claim, of several lanes."""

    def __init__(
        self,
        connection: Connection,
        board: LaneBoard,
        lanes: Sequence[Lane],
        config: ReadingConfig,
    ) -> None:
        self._connection = connection
        self._board = board
        self._reader = board.reader
        self._lanes = lanes
        self._config = config
        self._limits = {
            "max_bytes": config.max_batch_bytes,
            "max_payload": config.max_payload_bytes,
        }
        self._batch = ClaimedBatch(lanes)

    async def refresh(self) -> ClaimedBatch:
        """Refresh all of the lanes first.

        The claim finds no rows below a position that no search has found.
        """
        takeover, connection = self._reader.takeover, self._connection
        clock = await takeover.read_clock(connection)
        await move_fences(connection, self._reader.name, self._lanes, clock)
        # A lane's previous owner may settle late. Waiting messages, positions and batch
        # must come from one snapshot, or a key's next message could be claimed before
        # its first.
        async with connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            # A failover may have lost the reader, which then begins elsewhere.
            record = await read_record(connection, self._reader.name)
            if record is not None and record.topics is not None:
                takeover.since, self._board.gets_all = record.since, record.gets_all
            await self._refresh(clock)
            batch = await self.run(is_fresh=True)
        self._board.forget_floors()
        return batch

    async def run(self, *, is_fresh: bool = False) -> ClaimedBatch:
        """Claim messages that waited, then new ones.

        Args:
            is_fresh: whether the lanes were refreshed in the same snapshot.
        """
        lanes, batch, most = self._lanes, self._batch, self._config.batch_size
        if not [1 for lane in lanes if lane.keys.draining or lane.keys.due]:
            await self._claim_new(most, frozenset(), is_fresh=is_fresh)
            return batch
        self._limits["max_bytes"] = math.ceil(self._config.max_batch_bytes / 2)
        waiting = await self._claim_waiting(math.ceil(most / 2))
        rest = max(most - len(batch.rows) - len(batch.withheld), 1)
        await self._claim_new(rest, waiting.drained, is_fresh=is_fresh)
        for lane in lanes:
            lane.keys.claimed(lane.number, waiting)
        few = max(1, most // 2)
        if any(lane.keys.more_is_due and lane.keys.size < few for lane in lanes):
            self._board.ask_for_due()
        return batch

    async def _claim_new(
        self, most: int, drained: Set[LaneKey], *, is_fresh: bool
    ) -> None:
        """Claim rows that the positions don't cover.

        Args:
            drained: the blocked keys whose waiting messages are all in this claim.
        """
        plan = self._reader.claims.plan(self._lanes)
        rows, view = await self._read_new(plan, most)
        taken, following = _cut(rows, most)
        unlisted = self._find_unlisted(taken)
        self._require_fresh(plan, view, taken, unlisted, is_fresh=is_fresh)
        self._board.note_claim(len(taken), is_cut=following is not None)
        reads = _count_read(taken, most + _MOST_OTHERS)
        # A lane that was read in part is left before its last seq; see `_cut`.
        taken = [row for row in taken if row.seq <= reads[row.lane].up_to]
        self._reader.claims.note(
            view, max((it.up_to for it in reads.values()), default=-1)
        )
        if unlisted:
            # A DEFAULT partition has them, which the doctor reports: no position can be
            # stored.
            taken = [row for row in taken if row not in unlisted]
        await self._sort(taken, drained)
        self._end(taken, view, reads, None if following is None else following.lane)

    async def _read_new(
        self, plan: ClaimPlan, most: int
    ) -> tuple[Sequence[ClaimedRow], ReadView]:
        """Read the next messages, and one more: it may have the seq of the last.

        Of those of other topics, only the last one that was read of each lane.
        """
        parameters = {
            **plan.parameters,
            "reader": self._reader.name,
            "gets_all": self._board.gets_all,
            **self._limits,
            "max_read": most + _MOST_OTHERS,
            "max_rows": most + 1 + len(self._lanes),
        }
        days = {name: parameters[name] for name in ("oldest", "newest")}
        text, names = load_numbered("outbox.log", "claim_batch", **days)
        make_row = rows_of(ClaimedRow)
        cursor = psycopg.AsyncRawCursor(self._connection, row_factory=make_row)
        values = [parameters[name] for name in names]
        await cursor.execute(text, values, prepare=True, binary=True)
        rows = await cursor.fetchall()
        view = rows[0].view
        assert view is not None
        return [] if rows[0].id is None else rows, ReadView.parse(view)

    def _find_unlisted(self, rows: Sequence[ClaimedRow]) -> Sequence[ClaimedRow]:
        """Return the rows of days that the lanes don't read."""
        lanes = {lane.number: lane for lane in self._lanes}
        moments = [row.created_at for row in rows]
        # Almost always there are none, and one question for each lane shows it.
        if moments:
            first, last = min(moments), max(moments)
            if all(
                lanes[number].reads(first, last) for number in {r.lane for r in rows}
            ):
                return ()
        return [row for row in rows if not lanes[row.lane].reads(row.created_at)]

    def _require_fresh(
        self,
        plan: ClaimPlan,
        view: ReadView,
        rows: Sequence[ClaimedRow],
        unlisted: Sequence[ClaimedRow],
        *,
        is_fresh: bool,
    ) -> None:
        """Raise `RefreshNeededError` if the claim may have missed rows."""
        strange = {row.lane for row in unlisted}
        lowest = {row.lane: row.seq for row in reversed(rows) if row not in unlisted}
        claims = self._reader.claims
        if (strange and not is_fresh) or claims.is_stale(
            plan, view, lowest, is_fresh=is_fresh
        ):
            for lane in self._lanes:
                if lane.number in strange:
                    lane.require_takeover()
            raise RefreshNeededError

    async def _sort(self, rows: Iterable[ClaimedRow], drained: Set[LaneKey]) -> None:
        """Put the reader's messages into the batch; those that may not go, withheld."""
        batch, due = self._batch, []
        for row in rows:
            if row.verdict is None:
                due.append(read_row(row, self._config))
            elif row.verdict != "other":
                message = read_row(row, self._config)
                batch.withheld.append((message, _UNLOADED[row.verdict]))
        blocked = await self._find_blocked(due) - drained
        if blocked:
            held = [it for it in due if (it.lane, it.key) in blocked]
            batch.withheld += [(message, BLOCKED) for message in held]
            due = [it for it in due if (it.lane, it.key) not in blocked]
        batch.rows += due

    def _end(
        self,
        rows: Iterable[ClaimedRow],
        view: ReadView,
        reads: Mapping[int, _Read],
        cut: int | None,
    ) -> None:
        """Record how far the lanes were read.

        Args:
            rows: those of days that the lanes read.
            reads: how far each lane with rows was read.
            cut: the lane that was not read to its end.
        """
        batch = self._batch
        batch.is_cut = cut is not None or any(read.is_cut for read in reads.values())
        numbers = [lane.number for lane in self._lanes]
        end = len(numbers) if cut is None else numbers.index(cut) + 1
        reached = self._lanes[:end]
        self._board.served(reached)
        mine = {row.lane for row in rows if row.verdict != "other"}
        publishes = {row.lane for row in batch.rows}
        empty, read_to_end = Extent(-1, view, is_cut=False), []
        for lane in reached:
            number, extent = lane.number, empty
            if number in reads or number == cut:
                read = reads.get(number, _NONE)
                extent = Extent(read.up_to, view, is_cut=read.is_cut or number == cut)
                lane.skip(read.others)
            if number in mine or lane.skipped >= _MOST_SKIPPED:
                batch.extents[number] = extent
            else:
                lane.advance(extent)
            if number in mine:
                is_empty = self._board.writers_ring
            else:
                # While others write, reading on at once would slow them down.
                is_empty = number not in publishes
            if is_empty and not extent.is_cut:
                read_to_end.append(lane)
        Lane.found_empty(read_to_end)

    async def _claim_waiting(self, most: int) -> WaitingClaim:
        """Claim messages that waited: due ones, and the next ones of draining keys."""
        due: list[WaitingMessage] = []
        share = most
        if any(lane.keys.draining for lane in self._lanes):
            share = math.ceil(share / 2)
        for lane in self._lanes:
            lane.keys.begin_claim()
            due += lane.keys.next_due(share - len(due))
        keys = await self._find_next_of_keys(most - len(due))
        blocked = await self._find_blocked(due)
        numbers = [lane.number for lane in self._lanes]
        claim = WaitingClaim.of(numbers, due, keys, blocked)
        claim = claim.cut(await self._load(claim.messages))
        self._batch.withheld += [(_unread(message), BLOCKED) for message in claim.held]
        cancelled = [message for message in due if message.is_cancelled]
        self._batch.withheld += [(_unread(message), CANCELLED) for message in cancelled]
        return claim

    async def _find_next_of_keys(self, max_rows: int) -> list[Draining]:
        """Read the log of draining keys, each up to its head."""
        wanted = [
            (lane, key, seq)
            for lane in self._lanes
            for key, seq in islice(lane.keys.draining.items(), max_rows)
        ][:max_rows]
        if not wanted:
            return []
        make_row = rows_of(WaitingMessage)
        cursor = self._connection.cursor(binary=True, row_factory=make_row)
        await cursor.execute(
            load("outbox.log", "find_next_of_keys"),
            {
                "reader": self._reader.name,
                "lanes": [lane.number for lane, _, _ in wanted],
                "keys": [key for _, key, _ in wanted],
                "seqs": [seq for _, _, seq in wanted],
                "since": since_of(lane for lane, _, _ in wanted),
                "max_rows": max_rows,
            },
        )
        rows = await cursor.fetchall()
        waiting: dict[LaneKey, list[WaitingMessage]] = {}
        for row in rows:
            waiting.setdefault((row.lane, row.key), []).append(row)
        keys = []
        for lane, key, _ in wanted:
            own = waiting.get((lane.number, key), [])
            # The last key may have more rows, and the keys after it weren't read.
            is_cut = len(rows) >= max_rows and own[-1:] == rows[-1:]
            keys.append(Draining.read(lane.number, key, own, is_cut=is_cut))
            if is_cut:
                break
        return keys

    async def _load(self, messages: Sequence[WaitingMessage]) -> int:
        """Load waiting messages into the batch; return how many of them fit."""
        if not messages:
            return 0
        make_row = rows_of(ClaimedRow)
        cursor = self._connection.cursor(binary=True, row_factory=make_row)
        moments = [message.created_at for message in messages]
        await cursor.execute(
            load("outbox.log", "claim_deferred"),
            {
                "reader": self._reader.name,
                "ids": [message.id for message in messages],
                "created_ats": moments,
                "lanes": [message.lane for message in messages],
                "seqs": [message.seq for message in messages],
                "runs": [message.run for message in messages],
                "entries": [message.entry for message in messages],
                "first": min(moments),
                "last": max(moments),
                **self._limits,
            },
        )
        batch, count = self._batch, 0
        for waiting, row in zip(messages, await cursor.fetchall(), strict=False):
            if row.verdict == "next":
                break
            count += 1
            if row.verdict is None:
                batch.rows.append(read_row(row, self._config, waiting))
            elif row.verdict == "aside":
                message = read_row(row, self._config, waiting)
                batch.withheld.append((message, OVERSIZED))
            elif row.verdict == "missing":
                batch.withheld.append((_unread(waiting), ENDED))
            # Otherwise it is gone: the log has a later entry.
        return count

    async def _refresh(self, clock: Clock) -> None:
        """Read positions, other days and the log of lanes that may have changed."""
        takeover, lanes = self._reader.takeover, self._lanes
        view = await takeover.refresh(self._connection, lanes, clock)
        last = max((lane.keys.read_up_to for lane in lanes), default=-1)
        if takeover.entries_begin_again(clock, last):
            self._board.restart_log()
        assigned = takeover.note_entries(view, clock)
        cuts = await self._read_deferrals()
        for lane in lanes:
            lane.log_read(cuts.get(lane.number), assigned, clock.now)

    async def _read_deferrals(self) -> dict[int, int]:
        """Read the next entries in the log of the lanes.

        Returns:
            For each lane that may have more entries, the last one that was read.
        """
        keys = {lane.number: lane.keys for lane in self._lanes}
        make_row = rows_of(LogOfKey)
        cursor = self._connection.cursor(binary=True, row_factory=make_row)
        await cursor.execute(
            load("outbox.log", "read_deferrals"),
            {
                "reader": self._reader.name,
                "lanes": list(keys),
                "entries": [it.read_up_to for it in keys.values()],
                "max_rows": math.ceil(_MOST_ENTRIES / len(keys)),
            },
        )
        cuts = {}
        for row in await cursor.fetchall():
            if row.top is None:
                keys[row.lane].read(row)
                continue
            keys[row.lane].logged(row.top)
            if row.cut is not None:
                cuts[row.lane] = row.cut
                if row.has_head:
                    self._reader.takeover.refuse_entries(row.cut)
        return cuts

    async def _find_blocked(
        self, messages: Sequence[ClaimedMessage | WaitingMessage]
    ) -> set[LaneKey]:
        """Return which of the messages' keys are blocked.

        This asks the database about lanes whose log is only partly read.
        """
        numbers = {message.lane for message in messages}
        own = [(it.number, it.keys) for it in self._lanes if it.number in numbers]
        lanes = {n: keys for n, keys in own if keys.blocked or keys.is_partly_read}
        if not lanes:
            return set()
        blocked: set[LaneKey] = set()
        unread: set[tuple[int, str]] = set()
        for message in messages:
            if message.key is not None and message.lane in lanes:
                keys = lanes[message.lane]
                if keys.is_partly_read:
                    unread.add((message.lane, message.key))
                elif keys.is_blocked(message.key):
                    blocked.add((message.lane, message.key))
        if unread:
            cursor = await self._connection.execute(
                load("outbox.log", "find_waiting_keys"),
                {
                    "reader": self._reader.name,
                    "lanes": [number for number, _ in unread],
                    "keys": [key for _, key in unread],
                },
            )
            for number, key in await cursor.fetchall():
                lanes[number].found_waiting(key)
                blocked.add((number, key))
        return blocked


def since_of(lanes: Iterable[Lane]) -> datetime:
    """Return a time before which none of the messages that wait was created."""
    moments = [lane.keys.since for lane in lanes]
    return min((moment for moment in moments if moment is not None), default=LONG_AGO)


def _cut(
    rows: Sequence[ClaimedRow], most: int
) -> tuple[Sequence[ClaimedRow], ClaimedRow | None]:
    """Return the rows that the claim takes, and the one that follows, if any.

    A position can't pass one of several rows with the same seq, which only exist after
    the sequence was set back: they are left together for the next claim.
    """
    end = next((i for i, row in enumerate(rows) if row.verdict == "next"), len(rows))
    own = (i for i, row in enumerate(rows) if row.verdict != "other")
    end = min(end, next(islice(own, most, None), end))
    if end == len(rows):
        return rows, None
    following = rows[end]
    place = following.lane, following.seq
    before = [row for row in rows[:end] if (row.lane, row.seq) != place]
    if before or not end:
        return before, following
    # They fill a claim.
    return rows[: end + 1], following


def _count_read(rows: Iterable[ClaimedRow], max_read: int) -> dict[int, _Read]:
    """Return how far each lane was read, from the rows that the claim takes."""
    reads, before = {}, 0
    for number, same in groupby(rows, key=attrgetter("lane")):
        own = [*same]
        read, before = own[-1].place - before, own[-1].place
        is_cut = read >= max_read
        others = read - sum(row.verdict != "other" for row in own)
        reads[number] = _Read(own[-1].seq - is_cut, others, is_cut)
    return reads


def _unread(message: WaitingMessage) -> ClaimedMessage:
    return ClaimedMessage(
        message.lane,
        message.seq,
        message.id,
        message.created_at,
        message.attempts,
        message.key,
        "",
        None,
        None,
        message,
    )


def read_row(
    row: ClaimedRow, config: ReadingConfig, waiting: WaitingMessage | None = None
) -> ClaimedMessage:
    """Return the message of a row, or the problem with it."""
    message = problem = None
    if row.verdict == "aside":
        limit = config.max_payload_bytes
        problem = f"payload is over {limit} bytes (max_payload_bytes)"
    elif row.verdict is None:
        headers = {} if row.headers is None else json.loads(row.headers)
        problem = problem_of_headers(headers) if headers else None
        if not is_uuid7(row.id):
            problem = f"id {row.id} is not a UUIDv7"
        message = Message(
            row.topic,
            row.payload,
            key=row.key,
            tenant=row.tenant,
            headers=headers,
            id=row.id,
            content_type=row.content_type,
            schema_version=row.schema_version,
            priority=priority_of(row.lane),
            # A replay is due when it was requested, long after the event.
            available_at=None if waiting and waiting.run else row.due_at,
        )
    return ClaimedMessage(
        row.lane,
        row.seq,
        row.id,
        row.created_at,
        0 if waiting is None else waiting.attempts,
        row.key,
        row.topic,
        message,
        problem,
        waiting,
        row.due_at,
    )


def decode_row(row: ClaimedMessage, codec: PayloadCodec) -> ClaimedMessage:
    """Decode the payload of a row, if it is encoded."""
    if row.problem is not None or row.message is None or not is_encoded(row.message):
        return row
    try:
        return row._replace(message=decoded(row.message, codec))
    except CodecError as error:
        return row._replace(problem=str(error))


def problem_of_headers(headers: Mapping[str, str]) -> str | None:
    """Return an error if a header's name is reserved, which `add` would reject."""
    if reserved_header(headers) is None:
        return None
    try:
        check_reserved(name for name in headers if name not in STORED_HEADERS)
    except InvalidMessageError as error:
        return str(error)
    return None
