"""Runs the statements on `inbox.delivery` and its related tables."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg

from inbox.poison.history import FIRST_DELIVERY, REDELIVERED, History, TakenOver
from inbox.sources.postgres.lanes import (
    SKEW,
    ClaimedDelivery,
    DeliveryLanes,
    FreedKey,
    WaitingDelivery,
)
from inbox.sources.postgres.tenants import Tenants
from inbox.subscriptions import subscribe
from outbox.errors import (
    BrokerUnavailableError,
    DatabaseUnavailableError,
    message_of,
)
from outbox.json_codec import read_headers
from outbox.message import Message
from outbox.postgres.connection import Link
from outbox.postgres.lane_cursor import Drawn, Snapshot
from outbox.postgres.remedy import remedy_of
from outbox.postgres.sql_files import load

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
# For each lane that this replica takes over.
_MAX_SUSPECTS: Final = 256
# How many keys one claim drains, and how many entries one statement writes.
_MAX_KEYS: Final = 64
_MAX_ENTRIES: Final = 1000
# A watermark rises after this many deliveries, or after this time.
_STRETCH: Final = 4096
_VERIFY_INTERVAL: Final = timedelta(minutes=1)
# How many numbers of the sequence one statement verifies.
_MAX_VERIFIED: Final = 200_000
# How many deliveries with neither a mark nor an entry one statement returns.
_MAX_OPEN: Final = 10_000


@dataclass(frozen=True, slots=True)
class Settled:
    """A delivery that was settled: acked or failed."""

    row: ClaimedDelivery
    delay: timedelta | None
    """The time until it is retried; None if it was acked."""


@dataclass(frozen=True, slots=True)
class _TakenOver:
    """A lane that another replica may have held until `at`."""

    at: datetime
    history: TakenOver


class _Part(NamedTuple):
    """A lane in one partition, and how far it was verified."""

    lane: int
    starts_at: datetime
    ends_at: datetime
    watermark: int
    head: int | None
    """The first seq above the watermark."""


class _Stretch(NamedTuple):
    """The result of reading a lane in one partition.

    Attributes:
        deliveries: how many deliveries precede the first open one.
        last: the seq of the last of these; None if there are none.
        open: seq, time and key of the deliveries with neither a mark nor an entry, in
            order; if there are many, only the first ones.
        xmin: the snapshot's xmin.
    """

    deliveries: int
    last: int | None
    open: list[tuple[int, datetime, str | None]]
    xmin: int


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
        answer_timeout: timedelta,
        verify_interval: timedelta = _VERIFY_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._lanes = lanes
        self._taken_over: dict[int, _TakenOver] = {}
        self._consumer = consumer
        self._prefetch = prefetch
        self._tenants = Tenants(prefetch)
        self._sweep_interval = sweep_interval.total_seconds()
        self._answer_timeout = answer_timeout.total_seconds()
        self._verify_interval = verify_interval.total_seconds()
        self._now = clock
        self._turn = asyncio.Lock()
        self._clock_offset = timedelta(0)
        self._drawn = Drawn()
        self._clock = _Clock(datetime.now(UTC), -1, -1, 0, "")
        self._entries_read = [-1, -1]
        self._checked = 0
        self._to_verify: deque[_Part] = deque()
        self._sweep_at = 0.0

    @property
    def look_at(self) -> float:
        """When to claim again even without a wake-up, by the monotonic clock."""
        return min(self._sweep_at, self._lanes.next_due)

    @property
    def is_verifying(self) -> bool:
        """Whether the next claim verifies something."""
        return bool(self._to_verify)

    def sweep_soon(self) -> None:
        """Make the next claim sweep."""
        self._sweep_at = 0.0

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe the consumer; from then on, its deliveries are created."""
        async with self._turn:
            await subscribe(await self._link.connection(), self._consumer, topics)

    async def claim(self, leased: Collection[int]) -> None:
        """Read due deliveries and the next ones of these lanes, at most `prefetch`."""
        if self._lanes.new or self._now() >= self._sweep_at:
            await self._sweep(leased)
        # Verify one part at a time, which hardly delays the consumer.
        await self._verify_next()
        await self._log_behind()
        await self._claim_freed(leased)
        # A claim may find only deliveries that wait behind blocked keys.
        while await self._claim_next(leased) and not self._lanes.ready:
            pass

    def _plan_verification(self, lanes: Sequence[int], parts: Sequence[_Part]) -> None:
        for lane in lanes:
            if self._lanes.is_verification_due(lane, _STRETCH, self._verify_interval):
                self._lanes.verified(lane)
                self._to_verify += [
                    part
                    for part in parts
                    if part.lane == lane and part.head is not None
                ]

    async def _verify_next(self) -> None:
        if self._to_verify:
            part = self._to_verify.popleft()
            await self._verify([part], self._lanes.floors([part.lane]))

    async def _claim_next(self, leased: Collection[int]) -> bool:
        """Read the next deliveries of these lanes; return whether there may be more."""
        floors = self._lanes.floors(leased)
        if not floors:
            return False
        rows = await self._execute("claim_deliveries", **self._bounds(floors))
        claimed = [read_delivery(row) for row in rows]
        full = self._is_full(claimed)
        snapshot = Snapshot.read(rows[0][-1]) if rows else None
        drawn = -1 if snapshot is None else self._drawn.before(snapshot)
        self._lanes.claimed(claimed, list(floors), snapshot, full=full, drawn=drawn)
        self._tenants.claimed([row.message.tenant for row in claimed], full=full)
        await self._log_behind()
        return full

    async def _claim_freed(self, leased: Collection[int]) -> None:
        """Read deliveries that waited and are due."""
        since, held = self._now(), frozenset(self._lanes.held)
        keys, places = self._lanes.freed(leased, _MAX_KEYS, self._prefetch)
        if not keys and not places:
            return
        each = max(1, self._prefetch // max(1, len(keys)))
        try:
            rows = await self._execute(
                "claim_waiting",
                lanes=[freed.lane for freed in keys],
                keys=[freed.key for freed in keys],
                aboves=[freed.above for freed in keys],
                seqs=[place.seq for place in places],
                moments=[place.created_at for place in places],
                attempts=[place.attempts for place in places],
                max_rows_each=each,
                max_bytes=_MAX_BYTES,
            )
        except BaseException:
            for place in places:
                self._lanes.found(place)
            raise
        self._read_freed(keys, places, rows, since, held, each)

    def _read_freed(
        self,
        keys: Sequence[FreedKey],
        places: Sequence[WaitingDelivery],
        rows: Sequence[Sequence[Any]],
        since: float,
        held: Collection[int],
        each: int,
    ) -> None:
        alone = {place.seq: place for place in places}
        of_keys: list[ClaimedDelivery | None] = []
        for row in rows:
            place = alone.get(row[1])
            if place is None:
                of_keys.append(
                    read_delivery(row, is_logged=True) if row[8] is not None else None
                )
            elif row[8] is None:
                self._lanes.found(place)
            else:
                self._lanes.claimed_aside(
                    [read_delivery(row, is_logged=place.is_logged)]
                )
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
        await self._log_behind()
        self._tenants.looked(
            [row[0] for row in rows],
            [row[8] for row in rows if row[1] is not None],
            ready=ready,
            cut=len(rows) >= self._prefetch or self._is_full(claimed),
        )

    def hand_out(
        self, limit: int, leased: Collection[int], without: Collection[str]
    ) -> list[ClaimedDelivery]:
        """Return at most `limit` of the claimed deliveries; tenants take turns."""
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
        """Write outcomes, and stop holding their deliveries.

        Raises:
            BrokerUnavailableError: the database is unavailable; call again.
        """
        acked = [s.row for s in batch if s.delay is None]
        marked = [row for row in acked if not self._lanes.is_logged(row)]
        entries = [_acked(row) for row in acked if self._lanes.is_logged(row)]
        entries += [_refused(s.row, s.delay) for s in batch if s.delay is not None]
        try:
            if marked:
                await self._execute(
                    "mark_acked",
                    lanes=[row.lane for row in marked],
                    seqs=[row.seq for row in marked],
                    moments=[row.created_at for row in marked],
                )
            await self._log(entries)
        except AWAY as error:
            raise BrokerUnavailableError(
                f"{message_of(error)}; {remedy_of(error)}"
            ) from error
        now = self._now()
        for settled in batch:
            self._lanes.let_go(settled.row)
            if settled.delay is not None:
                self._lanes.refused(settled.row, now + settled.delay.total_seconds())

    async def raise_watermarks(self, leased: Collection[int]) -> None:
        """Raise the watermarks so that the lanes' next owners skip settled ones."""
        lanes = [lane for lane in leased if lane not in self._lanes.new]
        if lanes:
            await self._verify(await self._parts(lanes), self._lanes.floors(lanes))

    async def close(self) -> None:
        """Disconnect; the next call connects again."""
        await self._link.close()

    def _bounds(self, floors: dict[int, int]) -> dict[str, Any]:
        return {
            "lanes": list(floors),
            "floors": list(floors.values()),
            "passed": self._lanes.passed(floors),
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

    async def _log_behind(self) -> None:
        """Log the deliveries that wait behind blocked keys."""
        while rows := self._lanes.take_behind(_MAX_ENTRIES):
            try:
                await self._log([_blocked(row) for row in rows])
            except BaseException:
                self._lanes.put_back_behind(rows)
                raise

    async def _log(self, entries: Sequence["_Entry"]) -> None:
        if entries:
            await self._execute(
                "log_redeliveries",
                **{
                    name: [getattr(entry, name[:-1]) for entry in entries]
                    for name in _ENTRY_ARRAYS
                },
            )

    async def _sweep(self, leased: Collection[int]) -> None:
        """Read new lanes and the log, and look for deliveries that no claim found."""
        new = self._lanes.new
        lanes = sorted({*leased, *new})
        self._sweep_at = self._now() + self._sweep_interval
        # Do it even without lanes: an outage ends the leases, and this reports it.
        ((now, seq, entry, transaction_id, cluster),) = await self._execute(
            "read_clock"
        )
        went_back = seq < self._clock.seq
        self._clock = _Clock(now, seq, entry, transaction_id, cluster)
        self._clock_offset = now - datetime.now(UTC)
        self._drawn.note(seq, transaction_id)
        if not lanes:
            return
        for lane in new:
            self._taken_over[lane] = _TakenOver(now, TakenOver(_MAX_SUSPECTS))
        parts = await self._parts(lanes)
        if new:
            parts = await self._take_over(new, lanes, parts)
        known = [lane for lane in lanes if lane not in new]
        if known:
            entered = self._entries_read[0]
            self._note_waiting(
                await self._read_log(known, after=entered, with_blocked=False)
            )
            self._plan_verification(known, parts)
        # A transaction that adds an entry by hand can take a while to commit.
        self._entries_read = [self._entries_read[1], entry]
        begins = [p.starts_at for p in parts if p.head is not None]
        self._lanes.oldest = min([now - SKEW, *begins])
        checked = [p for p in parts if p.watermark >= 0]
        if went_back or self._clock.seq < max((p.watermark for p in parts), default=-1):
            for part in checked:
                await self._check(part)
        elif checked:
            self._checked = (self._checked + 1) % len(checked)
            await self._check(checked[self._checked])

    async def _parts(self, lanes: Sequence[int]) -> list[_Part]:
        rows = await self._execute(
            "find_heads", lanes=list(lanes), cluster=self._clock.cluster
        )
        return [_Part(*row) for row in rows]

    async def _take_over(
        self, new: Sequence[int], lanes: Sequence[int], parts: Sequence[_Part]
    ) -> list[_Part]:
        """Find the remaining deliveries of new lanes, from their watermarks on.

        The statements run one after the other, so whatever the lanes' previous owner
        writes in the meantime, one of them finds it.
        """
        drawn = self._clock.seq
        await self._verify(
            [part for part in parts if part.lane in new],
            dict.fromkeys(new, drawn),
            finally_from=self._clock.transaction_id,
        )
        parts = await self._parts(lanes)
        floors: dict[int, int] = {}
        for lane in new:
            own = [part for part in parts if part.lane == lane]
            # No open transaction can commit a row at or below a watermark.
            floor = min(drawn, max((part.watermark for part in own), default=-1))
            heads = [part.head - 1 for part in own if part.head is not None]
            floors[lane] = min([floor, *heads])
        begins = [p.starts_at for p in parts if p.head is not None]
        rows = await self._execute(
            "list_covered",
            lanes=list(floors),
            floors=list(floors.values()),
            oldest=min([self._clock.now - SKEW, *begins]),
        )
        passed: dict[int, set[int]] = {lane: set() for lane in floors}
        for lane, seq in rows:
            passed[lane].add(seq)
        waiting = await self._read_log(new, after=-1, with_blocked=True)
        for lane, floor in floors.items():
            self._lanes.start(lane, floor, passed[lane])
        self._note_waiting(waiting)
        return parts

    async def _read_log(
        self, lanes: Sequence[int], *, after: int, with_blocked: bool
    ) -> Sequence[Any]:
        return await self._execute(
            "list_waiting", lanes=list(lanes), after=after, with_blocked=with_blocked
        )

    def _note_waiting(self, rows: Sequence[Sequence[Any]]) -> None:
        now = self._now()
        for lane, key, seq, created_at, attempts, due_in in rows:
            if seq is None:
                self._lanes.found_behind(lane, key)
            else:
                place = WaitingDelivery(lane, seq, created_at, attempts, is_logged=True)
                self._lanes.found_waiting(place, key, now + due_in)

    async def _verify(
        self,
        parts: Sequence[_Part],
        up_to: dict[int, int],
        *,
        finally_from: int | None = None,
    ) -> None:
        """Raise the watermarks past deliveries that have a mark or an entry.

        Args:
            parts: the parts to verify.
            up_to: how far to verify each lane, at most to its floor.
            finally_from: required if `up_to` exceeds the floors: a transaction id that
                was assigned after all numbers up to `up_to` had been drawn.
        """
        for part in parts:
            watermark, target = part.watermark, up_to.get(part.lane, -1)
            head = part.head
            while head is not None and head <= target:
                end = min(target, head + _MAX_VERIFIED)
                known = self._lanes.known()
                most = _MAX_OPEN if finally_from is None else 1
                stretch = await self._read_stretch(part, watermark, end, most)
                if finally_from is not None and stretch.xmin < finally_from:
                    break
                if stretch.last is not None:
                    await self._execute(
                        "raise_watermark",
                        lane=part.lane,
                        starts_at=part.starts_at,
                        above=watermark,
                        up_to=stretch.last,
                        deliveries=stretch.deliveries,
                    )
                    watermark = stretch.last
                if stretch.open:
                    if finally_from is None:
                        await self._look_at_open(part.lane, stretch.open, known)
                    break
                head = end + 1

    async def _look_at_open(
        self,
        lane: int,
        rows: Sequence[tuple[int, datetime, str | None]],
        known: Collection[int],
    ) -> None:
        """Log deliveries that have been held for a long time, and claim unknown ones.

        Args:
            lane: the lane of the rows.
            rows: the deliveries with neither a mark nor an entry.
            known: the seqs that were known before the rows were read.
        """
        long_ago = self._now() - self._verify_interval
        known = {*known, *self._lanes.known()}
        started = self._lanes.held_since(long_ago, [seq for seq, _, _ in rows])
        entries = [
            _Entry(lane, seq, at, 0, "open", 0.0, key)
            for seq, at, key in rows
            if seq in started or seq not in known
        ]
        self._lanes.logged(started)
        # Those that were held are still held, or were settled in the meantime.
        unknown = [entry for entry in entries if entry.seq not in started]
        await self._log_and_wait(entries, unknown)

    async def _log_and_wait(
        self, entries: Sequence["_Entry"], found: Sequence["_Entry"]
    ) -> None:
        """Log entries, and schedule the claim of those in `found` that aren't held."""
        await self._log(entries)
        for lane, seq, at, attempts, _, _, key in found:
            place = WaitingDelivery(lane, seq, at, attempts, is_logged=True)
            self._lanes.found_waiting(place, key, self._now())

    async def _check(self, part: _Part) -> None:
        """Look for deliveries that were inserted below a watermark."""
        ((rows, known),) = await self._execute(
            "count_verified",
            lane=part.lane,
            starts_at=part.starts_at,
            ends_at=part.ends_at,
            up_to=part.watermark,
            cluster=self._clock.cluster,
        )
        above = -1
        while rows > known and above < part.watermark:
            end = min(part.watermark, above + _MAX_VERIFIED)
            stretch = await self._read_stretch(part, above, end, _MAX_OPEN)
            entries = [
                _Entry(part.lane, seq, at, 0, "found", 0.0, key)
                for seq, at, key in stretch.open
            ]
            await self._log_and_wait(entries, entries)
            # They have an entry from here on, so the next read continues after them.
            if len(stretch.open) < _MAX_OPEN:
                above = end

    async def _read_stretch(
        self, part: _Part, above: int, up_to: int, max_open: int
    ) -> _Stretch:
        ((rows, last, seqs, moments, keys, text),) = await self._execute(
            "verify_stretch",
            lane=part.lane,
            starts_at=part.starts_at,
            ends_at=part.ends_at,
            above=above,
            up_to=up_to,
            max_open=max_open,
        )
        found = list(zip(seqs, moments, keys, strict=True))
        return _Stretch(rows, last, found, Snapshot.read(text).xmin)

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


class _Clock(NamedTuple):
    """The result of `read_clock.sql`."""

    now: datetime
    seq: int
    entry: int
    transaction_id: int
    cluster: str


class _Entry(NamedTuple):
    """An entry in the log."""

    lane: int
    seq: int
    moment: datetime
    attempt: int
    cause: str
    delay: float | None
    key: str | None


_ENTRY_ARRAYS: Final = tuple(f"{name}s" for name in _Entry._fields)


def _acked(row: ClaimedDelivery) -> _Entry:
    return _entry(row, "acked", row.attempts, None)


def _refused(row: ClaimedDelivery, delay: timedelta) -> _Entry:
    return _entry(row, "refused", row.attempts + 1, delay.total_seconds())


def _blocked(row: ClaimedDelivery) -> _Entry:
    return _entry(row, "blocked", row.attempts, None)


def _entry(
    row: ClaimedDelivery, cause: str, attempts: int, delay: float | None
) -> _Entry:
    return _Entry(
        row.lane, row.seq, row.created_at, attempts, cause, delay, row.message.key
    )


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
