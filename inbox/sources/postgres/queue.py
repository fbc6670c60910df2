"""Runs the statements on `inbox.message` and its related tables."""

import asyncio
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Self, TypeAlias

import psycopg

from inbox.poison.history import (
    FIRST_DELIVERY,
    REDELIVERED,
    History,
    TakenOver,
    Takeover,
)
from inbox.sources.postgres.lanes import (
    ClaimedDelivery,
    DeliveryLane,
    DeliveryLanes,
)
from inbox.sources.postgres.tenants import Tenants
from inbox.subscriptions import subscribe
from outbox.errors import (
    BrokerUnavailableError,
    DatabaseUnavailableError,
    message_of,
)
from outbox.limits import MAX_WAIT
from outbox.log.lane import Advance, Extent
from outbox.log.position import Position, Snapshot
from outbox.log.reader import LogReader
from outbox.log.takeover import Clock, RefreshNeededError
from outbox.log.view import ReadView
from outbox.log.window import Place
from outbox.message import Message
from outbox.payload.json_codec import read_headers
from outbox.postgres.connection import Connection, Link
from outbox.postgres.remedy import remedy_of
from outbox.postgres.sql_files import load_numbered

# These include a server that became a standby, and a missing table or privilege: no
# message is to blame, and an operator can fix it.
AWAY: Final = (
    DatabaseUnavailableError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,
    psycopg.ProgrammingError,
)
_MAX_BYTES: Final = 8 * 1024 * 1024
MAX_READ: Final = 10_000
"""How many rows of a lane a claim reads, whatever their topics."""
# For each lane that this replica takes over.
_MAX_SUSPECTS: Final = 256
# How many keys one claim drains, and how many entries one statement writes.
_MAX_KEYS: Final = 64
_MAX_ENTRIES: Final = 1000
_MAX_ATTEMPTS: Final = 2**31 - 1
_OPEN_AFTER: Final = timedelta(minutes=1)
_SKEW: Final = timedelta(hours=1)
_Entry: TypeAlias = tuple[int, int, datetime, int, str, float | None, str | None]
_ENTRY: Final = ("lanes", "seqs", "moments", "attempts", "causes", "delays", "keys")


class Outcome(NamedTuple):
    """What became of a delivery: acked or failed."""

    row: ClaimedDelivery
    delay: timedelta | None
    """The time until it is retried; None if it was acked."""
    is_attempt: bool = True
    """Whether it failed; False if it was handed back."""


class Queue:
    """The deliveries of one consumer, as one replica sees them. For one event loop.

    Each method raises one of the errors in `AWAY` if the database is unavailable.
    """

    def __init__(
        self,
        link: Link,
        lanes: DeliveryLanes,
        *,
        consumer: str,
        prefetch: int,
        sweep_interval: timedelta,
        open_after: timedelta = _OPEN_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._opened_at = 0.0
        self._lanes = lanes
        self._reader = LogReader(consumer, "inbox")
        self._consumer = consumer
        self._prefetch = prefetch
        self._tenants = Tenants(prefetch)
        self._sweep_interval = sweep_interval.total_seconds()
        self._open_after = open_after.total_seconds()
        self._clock = clock
        self._turn = asyncio.Lock()
        self._entries_read = [-1, -1]
        self._sweep_at = 0.0

    @property
    def next_claim_at(self) -> float:
        """When to claim again even without a wake-up, by the monotonic clock."""
        return min(self._sweep_at, self._lanes.next_due)

    def sweep_soon(self) -> None:
        """Make the next claim sweep."""
        self._sweep_at = 0.0

    async def subscribe(self, topics: Sequence[str]) -> list[str]:
        """Subscribe the consumer; it gets what is published from then on.

        Returns its earlier subscriptions.
        """
        async with self._turn:
            connection = await self._connect()
            earlier = await subscribe(connection, self._consumer, topics)
            await self._reader.takeover.read_clock(connection)
            return earlier

    async def claim(self, leased: Collection[int]) -> None:
        """Read due deliveries and the next ones of these lanes, at most `prefetch`."""
        async with self._turn:
            await self._connect()
        await self._log_behind()
        if self._lanes.new or self._clock() >= self._sweep_at:
            await self._sweep(leased)
        await self._claim_freed(leased)
        # A claim may find only deliveries that wait behind blocked keys.
        while await self._claim_next(leased) and not self._lanes.ready:
            pass

    async def _claim_next(self, leased: Collection[int]) -> bool:
        """Read the next deliveries of these lanes; return whether there may be more."""
        try:
            async with self._turn:
                more = await self._claim(await self._connect(), leased)
        except RefreshNeededError:
            await self._sweep(leased)
            return True
        await self._log_behind()
        return more

    async def _claim(
        self,
        connection: Connection,
        leased: Collection[int],
        *,
        is_fresh: bool = False,
    ) -> bool:
        """Read the next deliveries.

        Args:
            is_fresh: whether the lanes were refreshed in the same snapshot.
        """
        lanes = self._lanes.in_turn(leased)
        if not lanes:
            return False
        plan = self._reader.claims.plan(lanes)
        found = await self._query(
            connection,
            "claim_deliveries",
            **plan.parameters,
            **self._skipped(lanes),
            max_rows=self._prefetch,
        )
        view = ReadView.parse(found[0][-1])
        rows = [_Row.of(row) for row in found if row[0] is not None]
        lowest = {row.lane: row.seq for row in reversed(rows)}
        if self._reader.claims.is_stale(plan, view, lowest, is_fresh=is_fresh):
            raise RefreshNeededError
        taken = [row.delivery for row in rows if row.delivery is not None]
        is_full = len(rows) >= self._prefetch or _is_large(taken)
        is_cut = False
        for lane, claimed, read in _read_lanes(lanes, rows, view, is_full=is_full):
            is_cut = is_cut or read.is_cut
            if all(lane.reads(row.created_at) for row in claimed):
                self._lanes.claimed(lane, claimed, read)
            else:
                # A row of a day that did not exist when the lane was taken over.
                lane.expire()
                self.sweep_soon()
        self._reader.claims.note(view, max((row.seq for row in rows), default=-1))
        self._tenants.claimed([row.message.tenant for row in taken], full=is_full)
        return is_full or is_cut

    async def _claim_freed(self, leased: Collection[int]) -> None:
        """Read deliveries that waited and are due."""
        since, held = self._clock(), frozenset(self._lanes.held)
        keys, places = self._lanes.freed(leased, _MAX_KEYS, self._prefetch)
        if not keys and not places:
            return
        each = max(1, self._prefetch // max(1, len(keys)))
        try:
            rows = await self._execute(
                "claim_waiting",
                base=self._reader.claims.base,
                lanes=[freed.lane for freed in keys],
                keys=[freed.key for freed in keys],
                aboves=[freed.above for freed in keys],
                seqs=[seq for seq, _ in places],
                moments=[moment for _, moment in places],
                max_rows_each=each,
                max_bytes=_MAX_BYTES,
            )
        except BaseException:
            for place, number in places.items():
                self._lanes.wait(number, place, None, since)
            raise
        of_keys: list[ClaimedDelivery | None] = []
        for row in rows:
            place = row[1], row[2]
            is_read = row[8] is not None
            delivery = read_delivery(row, is_logged=True) if is_read else None
            if place not in places:
                of_keys.append(delivery)
            elif delivery is None:
                self._lanes.wait(places[place], place, None, since)
            else:
                self._lanes.claimed_again(delivery)
        self._lanes.claimed_waiting(
            keys, of_keys, since=since, held=held, max_rows_each=each
        )

    async def claim_tenants(
        self, leased: Collection[int], without: Collection[str]
    ) -> None:
        """If it is time, read the first deliveries of tenants hidden behind others.

        Args:
            without: tenants to leave out.
        """
        ready = self._lanes.ready.tenants
        stuck = self._lanes.ready.has_only(without)
        if not self._tenants.is_due(len(self._lanes.ready), ready, stuck=stuck):
            return
        lanes = self._lanes.in_turn(leased)
        if not lanes:
            return
        parameters = self._reader.claims.plan(lanes).parameters
        rows = await self._execute(
            "claim_tenants",
            **{name: parameters[name] for name in ("base", "oldest", "newest")},
            **self._skipped(lanes),
            lanes=[lane.number for lane in lanes],
            up_tos=[lane.up_to for lane in lanes],
            known=list({*ready, *without}),
            after=self._tenants.after,
            max_steps=self._tenants.max_steps,
            max_rows_each=self._tenants.rows_each,
            max_rows=self._prefetch,
        )
        claimed = [read_delivery(row[1:]) for row in rows if row[1] is not None]
        self._lanes.claimed_ahead(claimed)
        await self._log_behind()
        self._tenants.searched(
            [row[0] for row in rows],
            [row[8] for row in rows if row[1] is not None],
            ready=ready,
            cut=len(rows) >= self._prefetch or _is_large(claimed),
        )

    def _skipped(self, lanes: Sequence[DeliveryLane]) -> dict[str, Any]:
        ahead = [place for lane in lanes for place in lane.ahead]
        return {
            "seqs": [seq for seq, _ in ahead],
            "moments": [moment for _, moment in ahead],
            "max_read": MAX_READ,
            "max_bytes": _MAX_BYTES,
        }

    def hand_out(
        self, limit: int, leased: Collection[int], without: Collection[str]
    ) -> list[ClaimedDelivery]:
        """Return at most `limit` of the claimed deliveries; tenants take turns."""
        rows = self._lanes.hand_out(limit, leased, without)
        self._tenants.handed_out(len(rows))
        return rows

    def history_of(self, row: ClaimedDelivery) -> History:
        """Return whether the lane's previous owner may have started to handle it."""
        lane = self._lanes.find(row.lane)
        takeover = None if lane is None else lane.takeover
        if takeover is not None and takeover.covers(row.created_at):
            return takeover.history
        return REDELIVERED if row.attempts else FIRST_DELIVERY

    async def write(self, batch: Sequence[Outcome]) -> None:
        """Write outcomes, and stop holding their deliveries.

        Those of a lost session are not written, but read again: their receipts show
        whether the server still has what was handled.

        Raises:
            BrokerUnavailableError: the database is unavailable; call again.
        """
        try:
            async with self._turn:
                connection = await self._connect()
                stale = {row.place for row, *_ in batch if self._lanes.is_stale(row)}
                fresh = [one for one in batch if one.row.place not in stale]
                if fresh:
                    await self._settle(connection, fresh)
        except AWAY as error:
            raise BrokerUnavailableError(
                f"{message_of(error)}; {remedy_of(error)}"
            ) from error
        now = self._clock()
        for row, delay, _ in batch:
            self._lanes.let_go(row)
            if delay is not None:
                due = now if row.place in stale else now + delay.total_seconds()
                self._lanes.wait(row.lane, row.place, row.message.key, due)
        if stale:
            self._lanes.doubt({row.lane for row, *_ in batch if row.place in stale})

    async def _settle(self, connection: Connection, batch: Sequence[Outcome]) -> None:
        """Write outcomes: as a position if one can cover them, else as entries."""
        logged: list[ClaimedDelivery] = []
        entries: list[_Entry] = []
        lanes: dict[int, DeliveryLane] = {}
        for row, delay, is_attempt in batch:
            lane = self._lanes.find(row.lane)
            is_covered = False
            if lane is not None and lane.window is not None:
                lane.window.ended(row.place)
                lanes[row.lane] = lane
                is_covered = row.place in lane.window and not self._lanes.is_logged(row)
            if delay is not None:
                seconds = delay.total_seconds()
                entries.append(_entry(row, "refused", seconds, charge=is_attempt))
                logged.append(row)
            elif not is_covered:
                entries.append(_entry(row, "acked"))
                logged.append(row)
        before = self._clock() - self._open_after
        try:
            is_stored = await self._store(connection, lanes.values(), entries, before)
        except BaseException:
            for row in logged:
                lane = self._lanes.find(row.lane)
                if lane is not None and lane.window is not None:
                    lane.window.reopen(row.place)
            raise
        if is_stored:
            self._lanes.logged(logged)
        else:
            await self._settle(connection, batch)

    async def _store(
        self,
        connection: Connection,
        lanes: Iterable[DeliveryLane],
        entries: Sequence[_Entry],
        before: float,
        moved: Collection[int] = (),
    ) -> bool:
        """Store positions and entries; return False if another process has settled.

        Then the lanes are taken over again.

        Args:
            before: a delivery that is held since then gets an entry, if others have
                ended behind it.
            moved: the lanes of which to store all days.
        """
        settled: list[Advance[DeliveryLane]] = []
        opened: dict[int, list[ClaimedDelivery]] = {}
        for lane in lanes:
            if lane.window is None:
                continue
            all_days = lane.number in moved
            for rows in (self._lanes.to_open(lane, before), []):
                logged = [row.place for row in rows]
                result = lane.window.settle(logged, all_days=all_days)
                if result is not None:
                    after, stored, covered = result
                    deferred = lane.window.deferred(logged)
                    settled.append(Advance(lane, after, stored, covered, deferred))
                    opened[lane.number] = rows
                    break
        entries = [
            *entries,
            *(_entry(row, "open", 0.0) for rows in opened.values() for row in rows),
        ]
        try:
            if entries and settled:
                async with connection.transaction():
                    await self._log(connection, entries)
                    await self._reader.settlements.store(connection, settled)
            elif entries:
                await self._log(connection, entries)
            else:
                await self._reader.settlements.store(connection, settled)
        except psycopg.errors.UniqueViolation:
            self._lanes.doubt([one.lane.number for one in settled])
            self.sweep_soon()
            return False
        for one in settled:
            rows = opened[one.lane.number]
            assert one.lane.window is not None
            one.lane.window.settled(one.after, [row.place for row in rows])
            self._lanes.opened(rows)
            if one.lane.number in moved:
                one.lane.has_moved = False
        return True

    async def leave(self, leased: Collection[int]) -> None:
        """Store all that has ended, so that the lanes' next owners don't get it again.

        What is still held gets entries if something behind it has ended.
        """
        async with self._turn:
            connection = await self._connect()
            lanes = self._lanes.in_turn(leased)
            await self._store(connection, lanes, [], self._clock())

    async def close(self) -> None:
        """Disconnect; the next call connects again."""
        await self._link.close()

    async def _log_behind(self) -> None:
        """Log the deliveries that wait behind blocked keys."""
        while self._lanes.has_behind:
            async with self._turn:
                connection = await self._connect()
                behind, ahead = self._lanes.to_log(_MAX_ENTRIES)
                entries = [_entry(row, "open", 0.0) for row in ahead]
                entries += [_entry(row, "blocked") for row in behind]
                await self._log(connection, entries)
                self._lanes.logged([*behind, *ahead])
                self._lanes.opened(ahead)

    async def _log(self, connection: Connection, entries: Sequence[_Entry]) -> None:
        columns = map(list, zip(*entries, strict=True))
        await self._query(
            connection, "log_deliveries", **dict(zip(_ENTRY, columns, strict=True))
        )

    async def _sweep(self, leased: Collection[int]) -> None:
        """Take new lanes over, read the log, look for what no claim would find."""
        async with self._turn:
            connection = await self._connect()
            self._sweep_at = self._clock() + self._sweep_interval
            # Do it even without lanes: an outage ends the leases, and this reports
            # it.
            clock = await self._reader.takeover.read_clock(connection)
            lanes = [
                lane
                for number in sorted({*leased, *self._lanes.new})
                if (lane := self._lanes.find(number)) is not None
            ]
            if not lanes:
                return
            windows = {lane.number: lane.window for lane in lanes}
            while True:
                try:
                    await self._refresh(connection, leased, lanes, clock)
                    break
                except RefreshNeededError:
                    # The sequence was set back.
                    self._lanes.doubt()
                    windows = dict.fromkeys(windows)
                    clock = await self._reader.takeover.read_clock(connection)
                except BaseException:
                    # Of those that were taken over, the log may not be read.
                    new = [n for n, window in windows.items() if window is None]
                    self._lanes.doubt(new)
                    raise
            for lane in lanes:
                if lane.takeover is None:
                    lane.takeover = Takeover(clock.now, TakenOver(_MAX_SUSPECTS))
            long_past = clock.now - _SKEW
            moved = {lane.number for lane in lanes if lane.must_move(long_past)}
            before = self._clock() - self._open_after
            await self._store(connection, lanes, [], before, moved)
        await self._log_behind()

    async def _refresh(
        self,
        connection: Connection,
        leased: Collection[int],
        lanes: Sequence[DeliveryLane],
        clock: Clock,
    ) -> None:
        """Read positions and the log of lanes, and claim from them, in one snapshot.

        A lane's previous owner may settle late.
        """
        windows = {lane.number: lane.window for lane in lanes}
        async with connection.transaction():
            await connection.execute(
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;"
                " SET LOCAL enable_bitmapscan = on"
            )
            for up_to, xmin in await self._query(connection, "read_since"):
                self._reader.takeover.since = Position(up_to, Snapshot(xmin, xmin))
            await self._reader.takeover.refresh(connection, lanes, clock)
            if self._reader.takeover.entries_begin_again(clock, self._entries_read[1]):
                self._entries_read = [-1, -1]
            await connection.execute("SET LOCAL enable_bitmapscan = off")
            known = [
                lane
                for lane in lanes
                if lane.window is not None and lane.window is windows[lane.number]
            ]
            new = [lane for lane in lanes if lane not in known]
            await self._read_log(connection, known, self._entries_read[0])
            if new:
                starts = {lane.number: lane.start for lane in new}
                rows = await self._query(
                    connection,
                    "list_logged",
                    lanes=list(starts),
                    up_tos=list(starts.values()),
                )
                ahead: dict[int, set[Place]] = {number: set() for number in starts}
                for number, seq, created_at, beyond in rows:
                    if beyond is not None:
                        self._reader.takeover.refuse_entries(beyond)
                    ahead[number].add((seq, created_at))
                for lane in new:
                    lane.ahead = ahead[lane.number]
                await self._read_log(connection, new, None)
            # A transaction that adds an entry by hand can take a while to commit.
            self._entries_read = [self._entries_read[1], clock.entry]
            await self._claim(connection, leased, is_fresh=True)
        self._reader.claims.forget(lanes)

    async def _read_log(
        self, connection: Connection, lanes: Sequence[DeliveryLane], after: int | None
    ) -> None:
        """Note what waits in lanes.

        Args:
            after: read only later entries of deliveries that have a time; None: all.
        """
        if not lanes:
            return
        rows = await self._query(
            connection,
            "list_waiting",
            lanes=[lane.number for lane in lanes],
            after=-1 if after is None else after,
            with_blocked=after is None,
        )
        now = self._clock()
        for number, key, seq, created_at, due_in in rows:
            if seq is None:
                self._lanes.found_behind(number, key)
            else:
                self._lanes.wait(number, (seq, created_at), key, now + due_in)

    async def _connect(self) -> Connection:
        """Return the connection; a new one finds the server as it may have crashed."""
        connection = await self._link.connection()
        if self._link.opened_at != self._opened_at:
            self._opened_at = self._link.opened_at
            self._reader.opened(self._opened_at)
            self._entries_read = [-1, -1]
            self._lanes.lose_session()
        return connection

    async def _execute(self, name: str, **parameters: Any) -> Sequence[Any]:
        async with self._turn:
            return await self._query(await self._connect(), name, **parameters)

    async def _query(
        self, connection: Connection, name: str, **parameters: Any
    ) -> Sequence[Any]:
        text, names = load_numbered("inbox", name)
        values = {"consumer": self._consumer, **parameters}
        cursor = psycopg.AsyncRawCursor(connection)
        await cursor.execute(text, [values[name] for name in names], binary=True)
        return await cursor.fetchall() if cursor.description else []


class _Row(NamedTuple):
    """A row that a claim has read; without a delivery if it is only the last one."""

    lane: int
    seq: int
    delivery: ClaimedDelivery | None
    is_last: bool
    place: int

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        *columns, is_delivery, is_last, place, _ = row
        delivery = read_delivery([*columns, None]) if is_delivery else None
        return cls(row[0], row[1], delivery, is_last, place)


def _read_lanes(
    lanes: Iterable[DeliveryLane],
    rows: Sequence[_Row],
    view: ReadView,
    *,
    is_full: bool,
) -> Iterator[tuple[DeliveryLane, Sequence[ClaimedDelivery], Extent]]:
    """Yield the lanes that a claim has reached, with their deliveries.

    Args:
        rows: the deliveries, and the last row that was read of each lane.
        is_full: whether a limit may have ended the claim after the last of these rows.
    """
    by_lane: dict[int, list[_Row]] = {}
    for row in rows:
        by_lane.setdefault(row.lane, []).append(row)
    before = 0
    for lane in lanes:
        own = by_lane.get(lane.number, [])
        up_to, is_cut = -1, False
        if own:
            up_to = own[-1].seq
            is_cut = not own[-1].is_last or own[-1].place - before >= MAX_READ
            before = own[-1].place
        if is_cut and own[0].seq < up_to:
            # Others can have the last seq, too, after the sequence was set back.
            own = [row for row in own if row.seq < up_to]
            up_to -= 1
        claimed = [row.delivery for row in own if row.delivery is not None]
        yield lane, claimed, Extent(up_to, view, is_cut)
        if is_full and lane.number == rows[-1].lane:
            return


def _is_large(rows: Sequence[ClaimedDelivery]) -> bool:
    return sum(len(row.message.payload) for row in rows) >= _MAX_BYTES


def _entry(
    row: ClaimedDelivery, cause: str, delay: float | None = None, *, charge: int = 0
) -> _Entry:
    attempts, key = min(row.attempts + charge, _MAX_ATTEMPTS), row.message.key
    if delay is not None:
        delay = min(delay, MAX_WAIT.total_seconds())
    return row.lane, row.seq, row.created_at, attempts, cause, delay, key


def read_delivery(row: Sequence[Any], *, is_logged: bool = False) -> ClaimedDelivery:
    """Convert a row of `claim_deliveries.sql` to a delivery."""
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
    headers, problem = ({}, None) if text is None else read_headers(text)
    if problem is not None:
        headers = {"headers": text}  # for the dead letter
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
    return ClaimedDelivery(lane, seq, created_at, attempts, message, problem, is_logged)
