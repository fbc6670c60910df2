"""Finds where the claims of lanes start: a takeover, or a search.

A claim reads the days around the present, and those in which its lane has uncovered
rows. *Taking a lane over* finds these days, looking at all of them; the reader does so
when it leases the lane, when a day begins or ends, and after every doubt. From time to
time a *search* of the other days finds rows that were added there since, by their
transactions. Both *refresh* the lanes.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, NoReturn

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.log.claims import FAR, NO_END, Claims, arrays_of
from pillarbox.outbox.log.hidden import Floors
from pillarbox.outbox.log.lanes.lane import BEGINNING, Lane
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Day, Progress, Stored, fence_of
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.rows import rows_of
from pillarbox.outbox.postgres.sql_files import load

SKEW: Final = timedelta(hours=1)
"""How far the clocks of writers may be off."""
_REFRESHED: Final = timedelta(hours=1)
"""A lane is taken over again after this time, to forget days that it has finished."""
_SOON: Final = timedelta(minutes=1)
_RECENT: Final = 10_000
"""Transactions whose ids are this close are searched as a range."""
_MOST_XIDS: Final = 16
"""How many transactions are searched one by one."""
_ALL_DAYS: Final = 12
"""One search in this many includes the days that claims read."""
_END: Final = datetime(9999, 12, 30, tzinfo=UTC)


class Clock(NamedTuple):
    """The time of the database, and the last numbers that it has assigned."""

    now: datetime
    seq: int
    entry: int
    entry_file: int
    """The file of the sequence that numbers entries; another one begins again."""
    changed: str | None
    """A sequence whose numbers don't ascend in steps of one any more."""
    base: int | None
    """The last seq of rows from another cluster; None: pillarbox migrate has not run
    in this one."""


class RefreshNeededError(Exception):
    """The claim may have missed rows, or has found some of a day that isn't listed.

    The sequence was set back, for example.
    """


class DayRow(NamedTuple):
    """A row of `take_over.sql`: a day of a lane, and its position; null: none.

    Attributes:
        head: the first seq above the position.
    """

    lane: int
    starts_at: datetime
    ends_at: datetime
    number: int | None
    up_to: int
    snapshot: str
    late_up_to: int | None
    late_snapshot: str | None
    head: int | None

    @property
    def day(self) -> Day:
        """The day."""
        return Day(self.starts_at, self.ends_at)

    @property
    def position(self) -> Position:
        """The position that is stored."""
        late = self.late_snapshot
        return Position(
            self.up_to,
            Snapshot.parse(self.snapshot),
            self.late_up_to,
            None if late is None else Snapshot.parse(late),
        )


class Takeover:
    """The takeovers and searches of a reader.

    Attributes:
        since: the reader's position before it has stored any.
    """

    def __init__(self, reader: str, claims: Claims) -> None:
        self.since = Position()
        self._reader = reader
        self._claims = claims
        self._entry_file = 0
        self._entry_floors = Floors()

    def start_over(self) -> None:
        """Start over with another server, or one that crashed."""
        self._entry_floors = Floors()

    async def read_clock(self, connection: Connection) -> Clock:
        """Read the clock, before the transaction of `refresh`.

        Raises:
            ConfigError: the log came from another cluster, and wasn't migrated; or
                somebody has changed a sequence, and rows would be missed.
        """
        cursor = connection.cursor(row_factory=rows_of(Clock))
        await cursor.execute(load("outbox.log", "read_clock"))
        (clock,) = await cursor.fetchall()
        if clock.base is None:
            raise ConfigError(
                "the database was restored or copied to this cluster: run pillarbox"
                " migrate"
            )
        if clock.changed is not None:
            raise ConfigError(
                f"sequence {clock.changed} was altered (START, INCREMENT, MINVALUE,"
                " MAXVALUE, CACHE or CYCLE): run pillarbox migrate, which restores it"
            )
        self._claims.base = clock.base
        return clock

    def entries_begin_again(self, clock: Clock, read_up_to: int) -> bool:
        """Return whether entries may have got lower numbers than those read before.

        Raises:
            ConfigError: they will; see `refuse_entries`.
        """
        if read_up_to > clock.entry:
            self.refuse_entries(read_up_to)
        before, self._entry_file = self._entry_file, clock.entry_file
        if before in {0, clock.entry_file}:
            return False
        self._entry_floors = Floors()
        return True

    def note_entries(self, view: ReadView, clock: Clock) -> int:
        """Return an entry up to which each is visible in the view, or never will be."""
        xmin = view.snapshot.xmin
        floors = self._entry_floors.note(view.next_xid, clock.entry)
        self._entry_floors = floors.forget(xmin)
        return floors.of(xmin)

    def refuse_entries(self, assigned: int) -> NoReturn:
        """Refuse to add entries that would rank below this one.

        Raises:
            ConfigError: of the entries of a message, the last one counts.
        """
        raise ConfigError(
            f"sequence outbox.deferral_entry_seq was set back below {assigned}, which"
            " it had already assigned: run pillarbox migrate, which advances it"
        )

    async def refresh(
        self, connection: Connection, lanes: Sequence[Lane], clock: Clock
    ) -> ReadView:
        """Take lanes over, or search what was added elsewhere since the last search.

        Args:
            connection: in a transaction with isolation REPEATABLE READ, which the claim
                shares, without a statement so far.
            clock: read before.

        Raises:
            RefreshNeededError: the sequence was set back; read the clock again, and
                repeat it.
        """
        started, assigned = time.monotonic(), self._claims.assigned
        cursor = await connection.execute(load("outbox.log", "read_view"))
        ((text,),) = await cursor.fetchall()
        view = ReadView.parse(text)
        if not view.follows(*assigned):
            # The clock that the caller has read may be from before.
            self._claims.start_over(ceiling=-1, assigned=(view.seq, view.file))
            for lane in lanes:
                lane.require_takeover()
            raise RefreshNeededError
        known = [
            lane
            for lane in lanes
            if lane.progress is not None
            and clock.now < lane.expires_at
            and self._claims.has_floor(lane.progress)
        ]
        elsewhere = await self._search_other_days(connection, known)
        known = [lane for lane in known if lane.number not in elsewhere]
        new = [lane for lane in lanes if lane not in known]
        await self._take_over(connection, new, clock, view, started)
        for lane in lanes:
            lane.searched_in(view)
        if self._claims.is_beyond(lanes, clock.seq):
            below = known
        else:
            far = self._claims.plan(known).find_stale(view.snapshot)
            below = [
                lane for lane in known if lane in far or lane.searches % _ALL_DAYS == 0
            ]
        await self._search_below(connection, below, view)
        self._claims.note(view, clock.seq)
        return view

    async def _take_over(
        self,
        connection: Connection,
        lanes: Sequence[Lane],
        clock: Clock,
        view: ReadView,
        started: float,
    ) -> None:
        if not lanes:
            return
        oldest, newest = clock.now - SKEW, clock.now + SKEW
        lowest: dict[int, dict[Day, int]] = {lane.number: {} for lane in lanes}
        stored: dict[int, list[Stored]] = {lane.number: [] for lane in lanes}
        by_day: dict[Day, dict[int, Position]] = {}
        for row in await self.read_days(connection, lanes, clock.now):
            day, position = row.day, self.since
            if row.number is not None:
                position = row.position
                stored[row.lane].append(Stored(day, row.number, position))
            by_day.setdefault(day, {})[row.lane] = position
            if row.head is not None:
                lowest[row.lane][day] = row.head
        for day, positions in by_day.items():
            late = await self._find_late(connection, day, positions)
            for number, seq in late.items():
                lowest[number][day] = seq
        all_days = sorted(by_day)
        now = {d for d in all_days if d.starts_at < newest and d.ends_at > oldest}
        for lane in lanes:
            own = stored[lane.number]
            needed = {*lowest[lane.number], *fence_of(own), *now}
            if not needed:
                continue  # No day has a partition.
            days = [d for d in all_days if min(needed) <= d <= max(needed)]
            progress = Progress.take_over(
                dict.fromkeys(days, self.since),
                own,
                view.snapshot,
                view.next_xid,
                lowest[lane.number],
            )
            last = days[-1].ends_at - SKEW
            expires_at = max(clock.now + _SOON, min(clock.now + _REFRESHED, last))
            lane.take_over(progress, view, at=started, expires_at=expires_at)

    async def read_days(
        self, connection: Connection, lanes: Sequence[Lane], now: datetime
    ) -> Sequence[DayRow]:
        """Read how far lanes were read; without lanes, only check that this works."""
        cursor = connection.cursor(row_factory=rows_of(DayRow))
        await cursor.execute(
            load("outbox.log", "take_over"),
            {
                "reader": self._reader,
                "lanes": [lane.number for lane in lanes],
                "since": self.since.up_to,
                "oldest": now - SKEW,
                "newest": now + SKEW,
            },
        )
        return await cursor.fetchall()

    async def _find_late(
        self, connection: Connection, day: Day, positions: Mapping[int, Position]
    ) -> dict[int, int]:
        """Find the lowest row of each lane below its position that isn't covered."""
        positions = {n: p for n, p in positions.items() if p.up_to > self._claims.base}
        if not positions:
            return {}
        last = max(position.snapshot.xmax for position in positions.values())
        recent = {n: p for n, p in positions.items() if p.snapshot.xmax > last - FAR}
        xids = xids_of([position.snapshot for position in recent.values()])
        found = await self._search(connection, recent, day, xids)
        # These have been idle since: what they have is below their positions.
        idle = {n: p for n, p in positions.items() if n not in recent}
        return found | await self._search(connection, idle, day, {})

    async def _search_other_days(
        self, connection: Connection, lanes: Iterable[Lane]
    ) -> Collection[int]:
        """Return the lanes with new rows in days that their claims don't read."""
        groups: dict[tuple[Day, Day, Snapshot], list[int]] = {}
        for lane in lanes:
            assert lane.progress is not None
            days = lane.progress.days
            group = days[0][0], days[-1][0], lane.searched
            groups.setdefault(group, []).append(lane.number)
        found: set[int] = set()
        for (first, last, searched), numbers in groups.items():
            positions = dict.fromkeys(numbers, Position(NO_END, searched))
            xids = xids_of([searched])
            for span in ((BEGINNING, first.starts_at), (last.ends_at, _END)):
                found |= {*await self._search(connection, positions, span, xids)}
        return found

    async def _search_below(
        self, connection: Connection, lanes: Iterable[Lane], view: ReadView
    ) -> None:
        """Find rows below the positions in memory that no claim would find."""
        reading = [
            (lane, lane.progress.days)
            for lane in lanes
            if lane.progress is not None and lane.progress.as_of is None
        ]
        by_day: dict[Day, dict[int, Position]] = {}
        for lane, days in reading:
            for day, position in days:
                by_day.setdefault(day, {})[lane.number] = position
        lowest: dict[int, int] = {}
        for day, positions in by_day.items():
            late = await self._find_late(connection, day, positions)
            for number, seq in late.items():
                lowest[number] = min(seq, lowest.get(number, seq))
        for lane, _ in reading:
            lane.found_late(lowest.get(lane.number), view)

    async def _search(
        self,
        connection: Connection,
        positions: Mapping[int, Position],
        span: tuple[datetime, datetime],
        xids: Mapping[str, object],
    ) -> dict[int, int]:
        """Search by these transactions; if none are given, lane by lane."""
        if not positions:
            return {}
        name = "find_late" if xids else "find_late_in_lanes"
        cursor = await connection.execute(
            load("outbox.log", name),
            {
                "lanes": list(positions),
                **arrays_of(positions.values()),
                "base": self._claims.base,
                "oldest": span[0],
                "newest": span[1],
                **xids,
            },
        )
        return dict(await cursor.fetchall())


def xids_of(snapshots: Collection[Snapshot]) -> dict[str, object]:
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
