"""Reads a log, lane by lane: where claims start, and what their settlement stores.

Only this module executes the SQL of positions. `position.py` says what a position
covers, `progress.py` how positions advance.

A claim reads the days around the present, and those in which its lane has uncovered
rows. *Taking a lane over* finds these days, looking at all of them; the reader does so
when it leases the lane, when a day begins or ends, and after every doubt. From time to
time a *look* searches the other days for rows that have been added since, by their
transactions. Rows that commit late are found by the claims themselves, which start at
the floor of the transaction; only if that is far below the position, a look finds them.
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar

import psycopg

from outbox.array_literal import moment_array, plain_array
from outbox.errors import ConfigError
from outbox.log.hidden import Floors, Hidden
from outbox.log.position import Position, Snapshot
from outbox.log.progress import Day, Progress, Stored, fence_of
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import Log, load

CLAIM_SETTINGS: Final = {
    # If a server crash loses a settlement, its messages are published or delivered
    # again, which at-least-once delivery allows, so settling doesn't wait for the disk.
    "synchronous_commit": "off",
    # Otherwise each connection makes a generic plan for all partitions, which costs
    # more than a custom plan for the days of the batch: with 90 partitions, 21 ms to
    # settle and 15 ms to claim, compared with 1.6 ms each with 8.
    "plan_cache_mode": "force_custom_plan",
    # Otherwise a claim from lanes of about a thousand rows reads each lane to its end
    # and sorts it, although the index returns the rows in order: 5 ms for 500 rows
    # instead of 2. Without statistics the same happens to longer lanes.
    "enable_sort": "off",
    # Otherwise the estimates, which assume full hash tables, make the server
    # JIT-compile each claim, which takes longer than the claim itself: with 90
    # partitions, the one that checks the database at startup took 2 s.
    "jit": "off",
}
"""Those of a session that claims or settles."""
_SKEW: Final = timedelta(hours=1)
"""How far the clocks of writers may be off."""
_REFRESHED: Final = timedelta(hours=1)
"""A lane is taken over again after this time, to forget days that it has finished."""
_SOON: Final = timedelta(minutes=1)
_FAR: Final = 100_000
"""So many rows above its floor, a late row is searched by its transaction."""
_SLACK: Final = 256
"""By so many numbers the sequence may be set back without a claim noticing.

It can have passed its old value again before the next claim. So each claim reads this
many numbers again; most of them belong to other lanes.
"""
_RECENT: Final = 10_000
"""Transactions so close together are searched as a range."""
_MOST_XIDS: Final = 16
"""How many transactions are searched one by one."""
_LOOKS: Final = 12
"""One look in so many searches the days, too, that claims read."""
_BEGINNING: Final = datetime(1, 1, 3, tzinfo=UTC)
_END: Final = datetime(9999, 12, 30, tzinfo=UTC)
_NO_END: Final = 2**63 - 1


class Clock(NamedTuple):
    """The time of the database, and the last numbers drawn."""

    now: datetime
    seq: int
    entry: int
    entry_file: int
    """The file of the sequence that numbers entries; another one begins again."""
    changed: str | None
    """A sequence whose numbers don't ascend in steps of one any more."""
    base: int


class Drawn(NamedTuple):
    """The last seq drawn, read after a look's snapshot, and its sequence's file."""

    seq: int
    file: int

    @classmethod
    def parse(cls, text: str) -> "Drawn":
        """Read what a look returned."""
        *_, seq, file = text.split("/")
        return cls(int(seq), int(file))

    def follows(self, before: "Drawn | None") -> bool:
        """Whether the sequence has only advanced since an earlier look."""
        return before is None or (self.file == before.file and self.seq >= before.seq)


class Look(NamedTuple):
    """The snapshot of a statement, and the next id, read after it."""

    snapshot: Snapshot
    next_xid: int

    @classmethod
    def parse(cls, text: str) -> "Look":
        """Read `snapshot/age`; the age counts the ids from xmin on.

        PostgreSQL computes `age` once per transaction, and from the transaction's own
        id if it has one. So the snapshot must be the transaction's first, and older
        than its id.
        """
        snapshot, age, *_ = text.split("/")
        parsed = Snapshot.parse(snapshot)
        return cls(parsed, parsed.xmin + int(age))


class MustLookError(Exception):
    """The claim may have missed rows, or has found some of a day that isn't listed.

    The sequence was set back, for example.
    """


class Read(NamedTuple):
    """How far a claim has read a lane; see `Progress.claimed`."""

    up_to: int
    look: Look
    is_cut: bool


class LogLane:
    """What a reader remembers of a lane.

    Attributes:
        progress: how far the lane was read; None: it must be taken over.
        known_at: when the server was known to have what `progress` says, as
            `time.monotonic()`; see `Link.opened_at`.
        taken_at: the next transaction id when its claims began to read these days only.
        looked: the snapshot in which all other days were searched.
        looks: how often.
        expires_at: when the lane must be taken over again.
    """

    __slots__ = (
        "expires_at",
        "known_at",
        "looked",
        "looks",
        "number",
        "progress",
        "taken_at",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.progress: Progress | None = None
        self.known_at = 0.0
        self.taken_at = 0
        self.looked = Snapshot(1, 1)
        self.looks = 0
        self.expires_at = _BEGINNING

    def taken_over(self, progress: Progress) -> None:
        """Continue with what the takeover has found."""
        self.progress = progress

    def reads(self, first: datetime, last: datetime | None = None) -> bool:
        """Whether these moments are in one of the days that claims read."""
        progress = self.progress
        return progress is not None and progress.day_of(first, last) is not None


AnyLane = TypeVar("AnyLane", bound=LogLane)


class Settled(NamedTuple, Generic[AnyLane]):
    """What a settlement stores of a lane.

    Attributes:
        messages: how many messages the settlement covers, by day.
        deferred: how many of them were not published, by day.
    """

    lane: AnyLane
    after: Progress
    rows: Sequence[Stored]
    messages: Mapping[Day, int]
    deferred: Mapping[Day, int]


class LogReader:
    """A reader of `outbox.message` or `inbox.message`. For one event loop.

    Args:
        reader: the name with which its positions are stored.
        log: the schema.

    Attributes:
        since: its position before it has stored any.
        base: the last seq of rows that came from another cluster; -1: none.
    """

    def __init__(self, reader: str, log: Log = "outbox") -> None:
        self.reader = reader
        self.since = Position()
        self._log = log
        self._floors = Floors()
        self.base = -1
        self._ceiling = _NO_END
        """The last seq drawn, if rows have higher ones: the sequence was set back, or
        the table's owner has chosen a seq. Then the seqs of rows say nothing about the
        floors of transactions."""
        self._drawn: Drawn | None = None
        """What the sequence had drawn at the last claim or look."""
        self._entry_file = 0
        self._opened_at = 0.0

    def opened(self, at: float) -> None:
        """Begin anew in a session that was opened at this time; see `Link.opened_at`.

        A server that crashed, or a standby that was promoted, may have lost the end of
        its log, and uses the ids of its transactions and the numbers again.
        """
        if at > self._opened_at:
            self._opened_at = at
            self._floors, self._ceiling, self._drawn = Floors(), _NO_END, None

    async def read_clock(self, connection: Connection) -> Clock:
        """Read the clock, before the transaction that looks.

        Raises:
            ConfigError: the log came from another cluster, and wasn't migrated; or
                somebody has changed a sequence, and rows would be missed.
        """
        cursor = await connection.execute(
            load("outbox.log", "read_clock", log=self._log)
        )
        (row,) = await cursor.fetchall()
        clock = Clock(*row)
        if row[-1] is None:
            raise ConfigError(
                "the database was restored in this cluster, or copied to it:"
                " run pillarbox migrate"
            )
        if clock.changed is not None:
            raise ConfigError(
                f"sequence {clock.changed} was altered (START, INCREMENT, MINVALUE,"
                " MAXVALUE, CACHE or CYCLE): run pillarbox migrate, which restores it"
            )
        self.base = clock.base
        return clock

    def entries_begin_again(self, clock: Clock, read_up_to: int) -> bool:
        """Return whether entries may have got lower numbers than those read before.

        Raises:
            ConfigError: they will; see `refuse_entries`.
        """
        if read_up_to > clock.entry:
            self.refuse_entries(read_up_to)
        before, self._entry_file = self._entry_file, clock.entry_file
        return before not in {0, clock.entry_file}

    def refuse_entries(self, assigned: int) -> NoReturn:
        """Refuse to add entries that would rank below this one.

        Raises:
            ConfigError: of the entries of a message, the last one counts.
        """
        raise ConfigError(
            f"sequence {self._log}.deferral_entry_seq was set back below {assigned},"
            " which it has assigned: run pillarbox migrate, which advances it"
        )

    async def refresh(
        self, connection: Connection, lanes: Sequence[LogLane], clock: Clock
    ) -> Look:
        """Take lanes over, or look what has been added elsewhere since the last look.

        Args:
            connection: in a transaction with isolation REPEATABLE READ, which the claim
                shares, without a statement so far.
            clock: read before.

        Raises:
            MustLookError: read the clock again, and repeat it.
        """
        started, before = time.monotonic(), self._drawn
        cursor = await connection.execute(load("outbox.log", "look", log=self._log))
        ((text,),) = await cursor.fetchall()
        look, drawn = Look.parse(text), Drawn.parse(text)
        if not drawn.follows(before):
            self._fell(lanes, drawn)
        known = [
            lane
            for lane in lanes
            if lane.progress is not None
            and clock.now < lane.expires_at
            and self._lowest_floor(lane.progress) >= 0
        ]
        elsewhere = await self._look_elsewhere(connection, known)
        known = [lane for lane in known if lane.number not in elsewhere]
        new = [lane for lane in lanes if lane not in known]
        await self._take_over(connection, new, clock, look)
        for lane in lanes:
            lane.looked = look.snapshot
            lane.looks += 1
        if self._is_beyond(lanes, clock):
            below = known
        else:
            far = self.prepare(known).lanes_to_look(look.snapshot)
            below = [lane for lane in known if lane in far or lane.looks % _LOOKS == 0]
        await self._look_below(connection, below, look)
        for lane in new:
            lane.known_at = started
        self.note(look, drawn, clock.seq)
        return look

    def _fell(self, lanes: Iterable[LogLane], drawn: Drawn) -> NoReturn:
        """Make the caller take all of its lanes over: the sequence was set back.

        The clock that it has read may be from before.
        """
        self._floors, self._ceiling, self._drawn = Floors(), -1, drawn
        for lane in lanes:
            lane.progress = None
        raise MustLookError

    def _is_beyond(self, lanes: Iterable[LogLane], clock: Clock) -> bool:
        """Whether rows below the positions may belong to transactions without an id."""
        positions = [
            position.up_to
            for lane in lanes
            if lane.progress is not None
            for _, position in lane.progress.days
        ]
        is_beyond = max(positions, default=-1) > clock.seq and (
            self._ceiling == _NO_END
        )
        if is_beyond:
            self._floors = Floors()
        if is_beyond or self._ceiling < _NO_END:
            self._ceiling = clock.seq
        return is_beyond

    async def _take_over(
        self,
        connection: Connection,
        lanes: Sequence[LogLane],
        clock: Clock,
        look: Look,
    ) -> None:
        if not lanes:
            return
        oldest, newest = clock.now - _SKEW, clock.now + _SKEW
        stored = await self.read_stored(connection, lanes, oldest, newest)
        known: dict[int, dict[Day, Stored | None]] = {lane.number: {} for lane in lanes}
        lowest: dict[int, dict[Day, int]] = {lane.number: {} for lane in lanes}
        all_days: set[Day] = set()
        for number, starts_at, ends_at, *position, head in stored:
            day = Day(starts_at, ends_at)
            all_days.add(day)
            known[number][day] = _read_stored(day, *position)
            if head is not None:
                lowest[number][day] = head
        for day in all_days:
            positions = {
                number: self.since if (row := rows[day]) is None else row.position
                for number, rows in known.items()
                if day in rows
            }
            for number, seq in (
                await self._find_late(connection, day, positions)
            ).items():
                lowest[number][day] = seq
        for lane in lanes:
            rows = [row for row in known[lane.number].values() if row is not None]
            needed = {
                *lowest[lane.number],
                *fence_of(rows),
                *(d for d in all_days if d.starts_at < newest and d.ends_at > oldest),
            }
            if not needed:
                continue  # No day has a partition.
            days = [d for d in sorted(all_days) if min(needed) <= d <= max(needed)]
            if lane.progress is None or lane.progress.days[0][0] != days[0]:
                lane.taken_at = look.next_xid
            lane.taken_over(
                Progress.take_over(
                    dict.fromkeys(days, self.since),
                    rows,
                    look.snapshot,
                    look.next_xid,
                    lowest[lane.number],
                )
            )
            lane.expires_at = max(
                clock.now + _SOON,
                min(clock.now + _REFRESHED, days[-1].ends_at - _SKEW),
            )

    async def read_stored(
        self,
        connection: Connection,
        lanes: Sequence[LogLane],
        oldest: datetime,
        newest: datetime,
    ) -> Sequence[Any]:
        """Read how far lanes were read; without lanes, only check that this works."""
        cursor = await connection.execute(
            load("outbox.log", "take_over", log=self._log),
            {
                "reader": self.reader,
                "lanes": [lane.number for lane in lanes],
                "since": self.since.up_to,
                "oldest": oldest,
                "newest": newest,
            },
        )
        return await cursor.fetchall()

    async def _find_late(
        self, connection: Connection, day: Day, positions: Mapping[int, Position]
    ) -> dict[int, int]:
        """Find the lowest row of each lane below its position that isn't covered."""
        positions = {n: p for n, p in positions.items() if p.up_to > self.base}
        if not positions:
            return {}
        last = max(position.snapshot.xmax for position in positions.values())
        recent = {n: p for n, p in positions.items() if p.snapshot.xmax > last - _FAR}
        found = await self._search(
            connection,
            recent,
            day.starts_at,
            day.ends_at,
            **_xids([position.snapshot for position in recent.values()]),
        )
        # These have been idle since: what they have is below their positions.
        idle = {n: p for n, p in positions.items() if n not in recent}
        return found | await self._search(connection, idle, *day)

    async def _look_elsewhere(
        self, connection: Connection, lanes: Sequence[LogLane]
    ) -> Collection[int]:
        """Return the lanes with new rows in days that their claims don't read."""
        found: set[int] = set()
        for same in _grouped(lanes, _days_of):
            first, last, looked = _days_of(same[0])
            positions = {lane.number: Position(_NO_END, looked) for lane in same}
            for oldest, newest in (
                (_BEGINNING, first.starts_at),
                (last.ends_at, _END),
            ):
                found |= (
                    await self._search(
                        connection,
                        positions,
                        oldest,
                        newest,
                        **_xids([looked]),
                    )
                ).keys()
        return found

    async def _look_below(
        self, connection: Connection, lanes: Iterable[LogLane], look: Look
    ) -> None:
        """Find rows below the positions in memory that no claim would look for."""
        reading = [
            (lane, lane.progress)
            for lane in lanes
            if lane.progress is not None and lane.progress.as_of is None
        ]
        by_day: dict[Day, dict[int, Position]] = {}
        for lane, progress in reading:
            for day, position in progress.days:
                by_day.setdefault(day, {})[lane.number] = position
        late: dict[int, int] = {}
        for day, positions in by_day.items():
            for number, seq in (
                await self._find_late(connection, day, positions)
            ).items():
                late[number] = min(seq, late.get(number, seq))
        for lane, progress in reading:
            lane.progress = progress.looked(late.get(lane.number), *look)

    async def _search(
        self,
        connection: Connection,
        positions: Mapping[int, Position],
        oldest: datetime,
        newest: datetime,
        **xids: object,
    ) -> dict[int, int]:
        """Search by these transactions; if none are given, lane by lane."""
        if not positions:
            return {}
        cursor = await connection.execute(
            load(
                "outbox.log",
                "find_late" if xids else "find_late_in_lanes",
                log=self._log,
            ),
            {
                "lanes": list(positions),
                **_columns(positions.values()),
                "base": self.base,
                "oldest": oldest,
                "newest": newest,
                **xids,
            },
        )
        return dict(await cursor.fetchall())

    def prepare(self, lanes: Sequence[LogLane]) -> "Claiming":
        """Return what a claim of these lanes must read."""
        reading = [(lane, lane.progress) for lane in lanes if lane.progress is not None]
        parts = [
            (lane, progress.parts(), self._lowest_floor(progress))
            for lane, progress in reading
        ]
        near: list[Hidden] = []
        far: list[tuple[Hidden, Sequence[LogLane]]] = []
        for same in _grouped([lane for lane, _, _ in parts], _look_of):
            progress = same[0].progress
            assert progress is not None
            hidden = progress.find_hidden(self._floors)
            if hidden is not None:
                top = max(position.up_to for _, position in progress.days)
                reached, others = hidden.split(top - _FAR, same[0].taken_at)
                near.append(reached)
                far.append((others, same))
        floors: dict[int, int] = {}
        for one in near:
            floors.update(one.open)
        several = [
            (lane.number, part._replace(start=min(part.start, floor - _SLACK)))
            for lane, own, floor in parts
            if len(own) > 1
            for part in own
        ]
        return Claiming(
            {
                "lanes": plain_array(lane.number for lane, _, _ in parts),
                "starts": plain_array(
                    min(floor - _SLACK, *[part.start for part in own])
                    for _, own, floor in parts
                ),
                "up_tos": plain_array(
                    own[0].position.up_to if len(own) == 1 else None
                    for _, own, _ in parts
                ),
                "snapshots": plain_array(
                    _quoted(own[0].position.snapshot for _, own, _ in parts)
                ),
                "as_ofs": plain_array(
                    _quoted(progress.as_of for _, progress in reading)
                ),
                "part_lanes": plain_array(number for number, _ in several),
                "part_oldest": moment_array(part.oldest for _, part in several),
                "part_newest": moment_array(part.newest for _, part in several),
                "part_starts": plain_array(part.start for _, part in several),
                "part_up_tos": plain_array(part.position.up_to for _, part in several),
                "part_snapshots": plain_array(
                    _quoted(part.position.snapshot for _, part in several)
                ),
                "hidden": plain_array(floors),
                "floors": plain_array(floor - _SLACK for floor in floors.values()),
                "since": str(min((one.since for one in near), default=_NO_END)),
                "floor": min((one.floor for one in near), default=_NO_END) - _SLACK,
                "base": self.base,
                "oldest": min(
                    [own[0].oldest for _, own, _ in parts], default=_BEGINNING
                ),
                "newest": max(
                    [own[-1].newest for _, own, _ in parts], default=_BEGINNING
                ),
            },
            far,
            near,
            {lane.number: min(part.start for part in own) for lane, own, _ in parts},
            self._drawn,
            is_known=all(floor >= 0 for *_, floor in parts),
        )

    def must_look(
        self,
        claiming: "Claiming",
        look: Look,
        drawn: Drawn,
        places: Iterable[tuple[int, int]],
        *,
        has_looked: bool,
    ) -> bool:
        """Whether a claim may have missed rows, so that a look must come first.

        Args:
            places: the lane and the seq of each row that it has read.
            has_looked: whether one came first, which hasn't seen a sequence that was
                set back and has caught up.
        """
        if self._ceiling == _NO_END and claiming.contradicts(look.snapshot, places):
            # The look takes all lanes over.
            self._drawn = Drawn(_NO_END, 0)
            return True
        return not has_looked and not (
            claiming.is_known
            and drawn.follows(claiming.drawn)
            and not claiming.lanes_to_look(look.snapshot)
        )

    def _lowest_floor(self, progress: Progress) -> int:
        """Return a seq below those of transactions that had no id; -1: none is known.

        After the sequence was set back, theirs can be lower.
        """
        if progress.as_of is not None:
            return _NO_END  # It is read to its end as of an older snapshot.
        return self._floors.of(progress.next_xid)

    def note(self, look: Look, drawn: Drawn, seq: int) -> None:
        """Record the last seq that was drawn, and that of the last row read."""
        self._drawn = max(drawn, self._drawn or drawn)
        # The table's owner can have chosen a seq that isn't drawn yet.
        if 0 <= seq <= max(drawn.seq, 0):
            self._floors = self._floors.note(look.next_xid, min(seq, self._ceiling))

    def forget(self, lanes: Iterable[LogLane]) -> None:
        """Forget what only concerns transactions that have ended for all lanes."""
        known = [lane.progress for lane in lanes if lane.progress is not None]
        if known:
            self._floors = self._floors.forget(min(p.snapshot.xmin for p in known))

    async def store(
        self, connection: Connection, settled: Iterable[Settled[Any]]
    ) -> None:
        """Store the positions of a settlement, in its transaction.

        Raises:
            psycopg.errors.UniqueViolation: another process has settled one of the
                lanes.
        """
        rows = [(one, row) for one in settled for row in one.rows]
        if not rows:
            return
        await connection.execute(
            load("outbox.log", "store_positions", log=self._log),
            {
                "reader": self.reader,
                "starts": [row.day.starts_at for _, row in rows],
                "ends": [row.day.ends_at for _, row in rows],
                "lanes": [one.lane.number for one, _ in rows],
                "numbers": [row.number for _, row in rows],
                **_columns(row.position for _, row in rows),
                "messages": [one.messages.get(row.day, 0) for one, row in rows],
                "deferred": [one.deferred.get(row.day, 0) for one, row in rows],
                "next_xids": [str(one.after.next_xid) for one, _ in rows],
            },
        )

    async def move_fences(
        self, connection: Connection, lanes: Iterable[LogLane], clock: Clock
    ) -> None:
        """Store the positions of today for lanes that were last settled in a day past.

        Nothing of these lanes may be in flight.
        """
        moved = []
        for lane in lanes:
            progress = lane.progress
            if progress is None or max(progress.fence).ends_at > clock.now - _SKEW:
                continue
            today = max(day for day, _ in progress.days if day.starts_at <= clock.now)
            if (settled := progress.move_fence(today)) is not None:
                moved.append(Settled(lane, *settled, {}, {}))
        try:
            await self.store(connection, moved)
        except psycopg.errors.UniqueViolation:
            # Another process has settled one of them.
            for one in moved:
                one.lane.progress = None
        else:
            for one in moved:
                one.lane.progress = one.after
                one.lane.expires_at = clock.now


class Claiming(NamedTuple):
    """The parameters of a claim, and what it leaves out.

    Attributes:
        far: transactions whose end would make the claim start far below a position, or
            in other days, with the lanes. If one has ended in its snapshot, look first.
        near: the other transactions whose end makes the claim start lower.
        starts: where it starts in each lane if none of them has ended.
        drawn: what the sequence had drawn before.
        is_known: whether each lane has a floor.
    """

    parameters: dict[str, Any]
    far: Sequence[tuple[Hidden, Sequence[LogLane]]]
    near: Sequence[Hidden]
    starts: Mapping[int, int]
    drawn: Drawn | None
    is_known: bool

    def contradicts(
        self, snapshot: Snapshot, places: Iterable[tuple[int, int]]
    ) -> bool:
        """Whether rows were read that only a sequence that was set back can number."""
        floors = [hidden.find_floor(snapshot) for hidden in self.near]
        floor = min([one for one in floors if one is not None], default=_NO_END)
        return any(seq <= min(self.starts[lane], floor) for lane, seq in places)

    def lanes_to_look(self, snapshot: Snapshot) -> list[LogLane]:
        """Return the lanes that need a look before this claim counts."""
        return [
            lane
            for hidden, lanes in self.far
            if hidden.find_floor(snapshot) is not None
            for lane in lanes
        ]


def _grouped(
    lanes: Iterable[LogLane], key: Callable[[LogLane], Hashable]
) -> Iterable[Sequence[LogLane]]:
    groups: dict[Hashable, list[LogLane]] = {}
    for lane in lanes:
        groups.setdefault(key(lane), []).append(lane)
    return groups.values()


def _days_of(lane: LogLane) -> tuple[Day, Day, Snapshot]:
    """Return the first and the last day that claims read, and the last look."""
    assert lane.progress is not None
    days = lane.progress.days
    return days[0][0], days[-1][0], lane.looked


def _look_of(lane: LogLane) -> Hashable:
    """Return what the transactions depend on that are hidden from claims."""
    progress = lane.progress
    assert progress is not None
    # Hashing snapshots takes longer than treating a group as two.
    return id(progress.snapshot), id(progress.as_of), lane.taken_at


def _quoted(snapshots: Iterable[Snapshot | None]) -> Iterable[str | None]:
    """Yield their text forms, which have commas. Most lanes have the same one."""
    last: Snapshot | None = None
    text: str | None = None
    for snapshot in snapshots:
        if snapshot is not last:
            last, text = snapshot, None if snapshot is None else f'"{snapshot}"'
        yield text


def _read_stored(
    day: Day,
    number: int | None,
    up_to: int,
    snapshot: str,
    late_up_to: int | None,
    late_snapshot: str | None,
) -> Stored | None:
    if number is None:
        return None
    late = None if late_snapshot is None else Snapshot.parse(late_snapshot)
    return Stored(
        day, number, Position(up_to, Snapshot.parse(snapshot), late_up_to, late)
    )


def _columns(positions: Iterable[Position]) -> dict[str, list[Any]]:
    positions = list(positions)
    return {
        "up_tos": [position.up_to for position in positions],
        "snapshots": [str(position.snapshot) for position in positions],
        "late_up_tos": [position.late_up_to for position in positions],
        "late_snapshots": [
            None if position.late_snapshot is None else str(position.late_snapshot)
            for position in positions
        ],
    }


def _xids(snapshots: Collection[Snapshot]) -> dict[str, object]:
    """Return the transactions that are not visible in one of these snapshots."""
    if not snapshots:
        return {}
    start = min(snapshot.xmax for snapshot in snapshots)
    hidden = sorted(set().union(*(snapshot.in_progress for snapshot in snapshots)))
    old = [xid for xid in hidden if xid < start - _RECENT]
    start = min([start, *(xid for xid in hidden if xid >= start - _RECENT)])
    if len(old) > _MOST_XIDS:
        start = old[_MOST_XIDS]
    # An empty list would imply the condition of any partial index, which the planner
    # would then read as a whole.
    return {"xids": old[:_MOST_XIDS] or [0], "xid_from": start}
