"""A model of a lane, its writers and its relays, over a simulated PostgreSQL.

The lane, its cursor and its bookkeeping of deferred messages are the real code. The
model covers what transactions see (ids, snapshots, the sequence, commits in any order),
the tables, and the callers of the lane: claims, the worker, the sweep and the lease, in
the order of `relay/claim.py`, `relay/worker.py` and `relay/sweep.py`.

Every state is checked: each row at or below the watermark has a mark, a claim never
starts above a row that has no mark and isn't in flight, and no key reaches the broker
out of order. In every end state the remaining rows are claimed until none is left: then
every committed row must have been published.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from outbox.postgres.lane_cursor import LaneCursor, Snapshot
from relay.lanes.deferrals import Deferrals, Draining, KeyEnd, LogOfKey, WaitingMessage
from relay.lanes.lane import Lane
from tests.models.explore import BrokenPromiseError

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
OPEN, COMMITTED, GONE = "open", "committed", "gone"
# The last entry of a row in the log.
REFUSED, DUE, BLOCKED, ENDED = "refused", "due", "blocked", "ended"
DEFERRED, PUBLISHED = "deferred", "published"


class Row(NamedTuple):
    """A row of the table; its position in the table, from 1, is its sequence number."""

    key: str | None
    writer: int
    status: str
    after: frozenset[int]
    """The rows that must be published first: those of its key that were committed, or
    written by the same transaction, before it was written."""
    mark: str | None = None
    entry: str | None = None
    number: int = 0
    """The number of its last entry."""

    @property
    def is_unmarked(self) -> bool:
        return self.status == COMMITTED and self.mark is None

    @property
    def waits(self) -> bool:
        return self.entry not in {None, ENDED}


class FullSnapshot(NamedTuple):
    """A snapshot in full, as PostgreSQL has it; the code gets `xmin` and `next_xid`."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...]
    next_xid: int


class Look(NamedTuple):
    """A claim in progress, with the results of its statements."""

    snapshot: FullSnapshot
    places: tuple[int, ...]
    """Rows claimed from the log."""
    drained: frozenset[str]
    """Keys whose waiting rows have all been claimed."""
    found: tuple[int, ...]
    """Rows without a mark."""
    head: int | None
    """The first row without a mark, if the lane is being refreshed."""
    is_refresh: bool
    waiting: frozenset[str] | None = None
    """The keys that wait in the log, if the relay has read only a part of it."""


class Flight(NamedTuple):
    """A batch, from its claim to its settlement."""

    claimed: tuple[int, ...] = ()
    """The claimed rows, in publishing order."""
    places: frozenset[int] = frozenset()
    """The rows that come from the log."""
    held: frozenset[int] = frozenset()
    acked: tuple[int, ...] = ()
    refused: int | None = None
    is_published: bool = False


Change: TypeAlias = dict[int, tuple[str, str]]
"""For each row, what is written ("mark" or "entry") and its value."""


class FrozenLane(NamedTuple):
    """The state of a lane that decides what it does next."""

    floor: int
    candidate: tuple[int, int] | None
    verified: int
    log_floor: int
    blocked: frozenset[str]
    draining: tuple[tuple[str, int], ...]
    due: frozenset[int]
    restarted: frozenset[str]
    reading: tuple[int, int] | None
    """The position in the log, and the last entry, of a pass of several portions."""
    found: frozenset[str]
    is_new: bool
    rewound: bool
    needs_refresh: bool


class Budget(NamedTuple):
    """How often each fault can happen."""

    refusals: int = 0
    outages: int = 0
    takeovers: int = 0
    sweeps: int = 0
    raises: int = 0
    """How often the watermark is raised, in two statements: read, then write."""
    crashes: int = 0
    """Crashes of the server; each loses the last settlement (asynchronous commit)."""


_NOTHING_GOES_WRONG: Final = Budget()


class State(NamedTuple):
    """Everything that decides which steps are possible next."""

    scripts: tuple[str, ...]
    """The remaining steps of each writer."""
    xids: tuple[int, ...]
    """The id of each writer's open transaction; 0 before it has one."""
    next_xid: int
    ended: int
    """The highest transaction id that has ended."""
    rows: tuple[Row, ...]
    sent: frozenset[int]
    """The rows that the broker has accepted."""
    lane: FrozenLane
    clock: int | None
    """The last sequence number drawn when the relay read the clock."""
    noted: tuple[int, int] | None
    """A transaction id, and a sequence number drawn before that id was assigned."""
    look: Look | None
    flight: Flight | None
    late: Flight | None
    """The batch that the former relay has published and not yet settled."""
    watermark: int
    """The watermark in the table; a relay that knows nothing starts above it."""
    verified: int | None
    """The row up to which every row was found marked; not in the table yet."""
    unflushed: tuple[tuple[int, str | None, str | None, int], ...]
    """Rows that a crash reverts, each with its previous mark, entry and number."""
    budget: Budget


@dataclass(frozen=True)
class LaneModel:
    """The possible steps of a lane.

    Args:
        scripts: what each writer does: `x` gets a transaction id, another letter
            writes a row with that key, `-` one without a key, `.` commits, and `?`
            commits or rolls back.
        cursor: the class of the lane's cursor.
        lane: the class of the lane.
        deferrals: the class of the lane's bookkeeping of the log.
        most: the maximum number of rows in a claim.
        number_first: rows draw their number before their transaction has an id.
        settles_after_loss: a relay that lost its lane still records refusals.
        reads_log: a new lane's log is read before the first claim.
        portion: the number of log entries that a refresh reads; None: all.
        asks_for_keys: until the log is read, a claim asks the table which keys wait.
        verifies: the watermark is raised only over rows that were found marked.
        up_to_floor: the watermark is not raised above the lane's floor.
        asks_who_drew: a noted number counts only once every transaction that could have
            drawn a lower one has ended.
        one_transaction: a mark and its log entry are written together.
        reads_to_the_end: a key is free only when a claim has read its log to the end.
        forgets_at_a_crash: a stretch verified before a crash isn't recorded after it.
    """

    scripts: Sequence[str]
    budget: Budget = _NOTHING_GOES_WRONG
    cursor: type[LaneCursor] = LaneCursor
    lane: type[Lane] = Lane
    deferrals: type[Deferrals] = Deferrals
    most: int = 2
    number_first: bool = False
    settles_after_loss: bool = False
    reads_log: bool = True
    portion: int | None = None
    asks_for_keys: bool = True
    verifies: bool = True
    up_to_floor: bool = True
    asks_who_drew: bool = True
    one_transaction: bool = True
    reads_to_the_end: bool = True
    forgets_at_a_crash: bool = True
    seen: set[Any] = field(default_factory=set, init=False, compare=False, repr=False)
    """End states that have been checked."""

    def start(self) -> State:
        return State(
            scripts=tuple(self.scripts),
            xids=(0,) * len(self.scripts),
            next_xid=1,
            ended=0,
            rows=(),
            sent=frozenset(),
            lane=_freeze(self._new_lane()),
            clock=None,
            noted=None,
            look=None,
            flight=None,
            late=None,
            watermark=0,
            verified=None,
            unflushed=(),
            budget=self.budget,
        )

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        self._check(state)
        if not any(state.scripts) and not any(
            (state.look, state.flight, state.late, state.clock)
        ):
            ends = (state.rows, state.sent, state.lane, state.watermark)
            if ends not in self.seen:
                self.seen.add(ends)
                self._check_quiet(state)
        yield from self._possible(state)

    def _possible(self, state: State) -> Iterator[tuple[str, State]]:
        for writer, script in enumerate(state.scripts):
            if script:
                yield from self.write(state, writer, script[0])
        yield from self._relay(state)
        for seq, row in enumerate(state.rows, 1):
            if row.entry == REFUSED:
                yield f"row {seq} is due", _come_due(state, seq)
        lane = state.lane
        if not lane.is_new and any(row.entry == DUE for row in state.rows):
            yield "a scan finds what is due", self._scan(state)
        if state.late is not None:
            yield "the former relay settles", self._settle_late(state, state.late)
        if state.verified is not None:
            watermark = max(state.watermark, state.verified)
            yield (
                f"the watermark {state.verified} is written",
                # It follows the marks in the write-ahead log.
                state._replace(watermark=watermark, verified=None, unflushed=()),
            )
        budget = state.budget
        if budget.raises and not lane.is_new and state.verified is None:
            spent = budget._replace(raises=budget.raises - 1)
            yield (
                "a look verifies what is marked",
                state._replace(verified=self._verify(state), budget=spent),
            )
        if budget.sweeps:
            swept = lane._replace(needs_refresh=True)
            spent = budget._replace(sweeps=budget.sweeps - 1)
            yield "a sweep", state._replace(lane=swept, budget=spent)
        if budget.takeovers:
            yield "another relay takes the lane", self._take_over(state)
        if budget.crashes and state.unflushed and state.late is None:
            yield "the server crashes", self._crash(state)

    def write(
        self, state: State, writer: int, what: str
    ) -> Iterator[tuple[str, State]]:
        scripts = _with(state.scripts, writer, state.scripts[writer][1:])
        name = f"writer {writer}"
        xid = state.xids[writer]
        if what in ".?":
            outcomes = [COMMITTED, GONE] if what == "?" else [COMMITTED]
            for outcome in outcomes:
                rows = tuple(
                    row._replace(status=outcome)
                    if row.writer == writer and row.status == OPEN
                    else row
                    for row in state.rows
                )
                yield (
                    f"{name} {'commits' if outcome == COMMITTED else 'rolls back'}",
                    state._replace(
                        scripts=scripts,
                        xids=_with(state.xids, writer, 0),
                        ended=max(state.ended, xid),
                        rows=rows,
                    ),
                )
            return
        after = state._replace(scripts=scripts)
        if not xid and (what == "x" or not self.number_first):
            after = after._replace(
                xids=_with(state.xids, writer, state.next_xid),
                next_xid=state.next_xid + 1,
            )
        if what == "x":
            yield f"{name} gets transaction id {after.xids[writer]}", after
            return
        before = frozenset(
            seq
            for seq, row in enumerate(state.rows, 1)
            if row.key is not None
            and row.key == what
            and (row.writer == writer if row.status == OPEN else row.status != GONE)
        )
        rows = (*state.rows, Row(None if what == "-" else what, writer, OPEN, before))
        yield f"{name} writes row {len(rows)} of key {what}", after._replace(rows=rows)

    def _relay(self, state: State) -> Iterator[tuple[str, State]]:
        if state.look is not None:
            yield "the claim returns", self._return(state, state.look)
        elif state.flight is not None:
            if not state.flight.is_published:
                yield from self._publish(state, state.flight)
            else:
                yield from self._settle(state, state.flight)
        elif state.lane.needs_refresh and state.clock is None:
            yield "the relay reads the clock", self._read_clock(state)
        else:
            yield "the relay claims", self._begin(state)

    def _read_clock(self, state: State) -> State:
        return state._replace(
            clock=len(state.rows),
            noted=(state.next_xid, len(state.rows)),
            ended=state.next_xid,
            next_xid=state.next_xid + 1,
        )

    def _begin(self, state: State) -> State:
        lane = self._thaw(state.lane)
        lane.picked()
        head: int | None = None
        if lane.needs_refresh:
            if lane.is_new:
                lane.start_at(state.watermark)
            unmarked = (
                seq
                for seq, row in enumerate(state.rows, 1)
                if row.is_unmarked and seq > lane.floor
            )
            head = next(unmarked, None)
            if self.reads_log:
                self._read_portion(state, lane.deferrals)
        places, drained = self._claim_deferred(state, lane)
        most = self.most - len(places)
        found: tuple[int, ...] = ()
        if not lane.needs_refresh:
            found = self._claim(state, lane, most)
        look = Look(
            take_snapshot(state), places, drained, found, head, lane.needs_refresh
        )
        if lane.deferrals.is_partly_read and self.asks_for_keys:
            look = look._replace(
                waiting=frozenset(
                    row.key for row in state.rows if row.waits and row.key is not None
                )
            )
        if lane.needs_refresh:
            # Claimed in the same snapshot, above the refreshed floor.
            self._refresh(state, lane, look)
            look = look._replace(found=self._claim(state, lane, most))
        return state._replace(lane=_freeze(lane), look=look)

    def _read_portion(self, state: State, deferrals: Deferrals) -> None:
        """Do what `_read_deferrals` does."""
        above, last = deferrals.read_up_to, _last_entry(state)
        numbers = sorted(row.number for row in state.rows if row.number > above)
        cut = None
        if self.portion is not None and len(numbers) >= self.portion:
            cut = numbers[self.portion - 1]
        for log in _read_log(state, above, last if cut is None else cut):
            deferrals.read(log)
        # Here entries are numbered in the order of the commits: all below `last` are
        # visible.
        deferrals.portion_read(cut, last, Snapshot(0, 0), last)

    def _claim_deferred(
        self, state: State, lane: Lane
    ) -> tuple[tuple[int, ...], frozenset[str]]:
        """Do what `_claim_deferred` does."""
        deferrals = lane.deferrals
        if not deferrals.has_work:
            return (), frozenset()
        deferrals.begin_claim()
        places = deferrals.next_due(1)
        most = max(self.most // 2, 1) - len(places)
        keys: list[Draining] = []
        for key, above in [*deferrals.draining.items()][:most]:
            waiting = [
                (_place(seq, row), None if row.entry == BLOCKED else row.entry == DUE)
                for seq, row in enumerate(state.rows, 1)
                if row.key == key and row.waits and seq > above
            ]
            is_cut = len(waiting) > most and self.reads_to_the_end
            keys.append(Draining.read(key, waiting[:most], is_cut=is_cut))
            most -= len(keys[-1].places)
            if not most:
                break
        drained = frozenset(key.key for key in keys if key.end is KeyEnd.NOTHING)
        taken = [*places, *(place for key in keys for place in key.places)]
        deferrals.took([place.id for place in places])
        for key_in_log in keys:
            deferrals.claimed(
                key_in_log, left=(), is_free=key_in_log.end is KeyEnd.NOTHING
            )
        return tuple(sorted(place.seq for place in taken)), drained

    def _claim(self, state: State, lane: Lane, most: int) -> tuple[int, ...]:
        """Do what `claim_batch.sql` does."""
        return tuple(
            seq
            for seq, row in enumerate(state.rows, 1)
            if row.is_unmarked and seq > lane.floor
        )[:most]

    def _refresh(self, state: State, lane: Lane, look: Look) -> None:
        assert state.clock is not None
        snapshot = self._read(look.snapshot)
        lane.refresh(None if look.head is None else (look.head, NOW), NOW)
        seen = state.clock if look.head is None else look.head - 1
        lane.looked_up_to(seen, snapshot, self._drawn(state, snapshot))

    def _drawn(self, state: State, snapshot: Snapshot) -> int:
        if state.noted is None:
            return -1
        xid, drawn = state.noted
        return drawn if snapshot.xmin >= xid or not self.asks_who_drew else -1

    def _return(self, state: State, look: Look) -> State:
        lane = self._thaw(state.lane)
        snapshot = self._read(look.snapshot)
        if look.found and not look.is_refresh:
            drawn = self._drawn(state, snapshot)
            lane.looked_up_to(look.found[-1], snapshot, drawn)
        if look.is_refresh and self.verifies:
            first = _first_unmarked(state, lane.verified, lane.floor)
            if first is None:
                lane.note_verified(max(lane.floor, lane.verified), {})
            else:
                lane.passed_by(first)
        blocked = lane.deferrals.blocked if look.waiting is None else look.waiting
        held = frozenset(
            seq
            for seq in look.found
            if (key := state.rows[seq - 1].key) is not None
            and key in blocked
            and key not in look.drained
        )
        if look.waiting is not None:
            for seq in held:
                lane.deferrals.found_waiting(state.rows[seq - 1].key or "")
        claimed = (*look.places, *(seq for seq in look.found if seq not in held))
        flight = None
        if claimed or held:
            flight = Flight(claimed, frozenset(look.places), held)
            if not claimed:
                flight = self._remember(state, lane, flight._replace(is_published=True))
        else:
            lane.found_empty()
        return state._replace(lane=_freeze(lane), look=None, flight=flight, clock=None)

    def _read(self, snapshot: FullSnapshot) -> Snapshot:
        return Snapshot(snapshot.xmin, snapshot.next_xid)

    def _publish(self, state: State, flight: Flight) -> Iterator[tuple[str, State]]:
        yield "the broker takes all", self._answered(state, flight.claimed)
        budget = state.budget
        for index, seq in enumerate(flight.claimed):
            if budget.refusals:
                key = state.rows[seq - 1].key
                rest = flight.claimed[index + 1 :]
                spent = budget._replace(refusals=budget.refusals - 1)
                yield (
                    f"the broker refuses row {seq}",
                    self._answered(
                        state._replace(budget=spent),
                        (
                            *flight.claimed[:index],
                            *(
                                s
                                for s in rest
                                if key is None or state.rows[s - 1].key != key
                            ),
                        ),
                        refused=seq,
                    ),
                )
            if budget.outages:
                spent = budget._replace(outages=budget.outages - 1)
                yield (
                    f"the broker goes away before row {seq}",
                    self._answered(
                        state._replace(budget=spent), flight.claimed[:index], lost=True
                    ),
                )

    def _answered(
        self,
        state: State,
        acked: tuple[int, ...],
        *,
        refused: int | None = None,
        lost: bool = False,
    ) -> State:
        """Do what `Worker._carry` does with the broker's answers."""
        flight = state.flight
        assert flight is not None
        sent = state.sent
        for seq in acked:
            if missing := sorted(state.rows[seq - 1].after - sent):
                raise BrokenPromiseError(
                    f"row {seq} was published before {missing} of its key"
                )
            sent |= {seq}
        lane = self._thaw(state.lane)
        if lost:
            lane.needs_refresh = True
        flight = flight._replace(acked=acked, refused=refused, is_published=True)
        after: Flight | None = self._remember(state, lane, flight)
        if after is not None and not (acked or after.held or refused is not None):
            after = None
        return state._replace(lane=_freeze(lane), sent=sent, flight=after)

    def _remember(self, state: State, lane: Lane, flight: Flight) -> Flight:
        """Do what `Worker._remember` does; return the batch to settle."""
        key_of = {seq: state.rows[seq - 1].key for seq in flight.claimed}
        key = None if flight.refused is None else key_of[flight.refused]
        behind: frozenset[int] = frozenset()
        if flight.refused is not None and key is not None:
            later = flight.claimed[flight.claimed.index(flight.refused) + 1 :]
            behind = frozenset(
                seq for seq in later if seq not in flight.acked and key_of[seq] == key
            )
        for seq in flight.claimed:
            if seq in flight.acked or seq == flight.refused or seq in behind:
                continue
            if seq in flight.places:
                lane.deferrals.release(_place(seq, state.rows[seq - 1]))
            else:
                lane.rewind(seq, NOW)
        held = flight.held | behind
        for seq in held:
            held_key = state.rows[seq - 1].key
            assert held_key is not None
            lane.deferrals.hold(held_key, seq)
        if key is not None:
            lane.deferrals.block(key)
        return flight._replace(held=held)

    def _settle(self, state: State, flight: Flight) -> Iterator[tuple[str, State]]:
        marks, entries = _written(flight)
        done = _change(state, marks, entries)
        yield "the relay settles", done._replace(flight=None)
        budget = state.budget
        if not self.one_transaction and entries and budget.takeovers:
            spent = budget._replace(takeovers=budget.takeovers - 1)
            half = _change(state, marks)._replace(budget=spent)
            yield "the relay is killed while it settles", self._new_owner(half)

    def _settle_late(self, state: State, flight: Flight) -> State:
        return _change(state, *_written(flight))._replace(late=None)

    def _scan(self, state: State) -> State:
        lane = self._thaw(state.lane)
        for seq, row in enumerate(state.rows, 1):
            if row.entry == DUE:
                lane.deferrals.release(_place(seq, row))
        return state._replace(lane=_freeze(lane))

    def _verify(self, state: State) -> int:
        """Do what `_verify` does."""
        lane = state.lane
        end = max(lane.floor, 0) if self.up_to_floor else len(state.rows)
        if not self.verifies or _first_unmarked(state, lane.verified, end) is None:
            return max(end, lane.verified)
        return lane.verified

    def _take_over(self, state: State) -> State:
        """Continue with a new owner, which knows nothing of the lane.

        The former relay can still settle what was acked, at any later step. It
        publishes none of its claimed rows: it checks its lease first.
        """
        late = None
        if state.flight is not None and state.flight.is_published:
            late = state.flight
            if not self.settles_after_loss:
                late = late._replace(refused=None, held=frozenset())
            if not (late.acked or late.refused or late.held):
                late = None
        spent = state.budget._replace(takeovers=state.budget.takeovers - 1)
        return self._new_owner(state._replace(budget=spent, late=late or state.late))

    def _crash(self, state: State) -> State:
        """Lose the last settlement and all state in the relay's memory."""
        rows = state.rows
        for seq, mark, entry, number in state.unflushed:
            row = rows[seq - 1]._replace(mark=mark, entry=entry, number=number)
            rows = _with(rows, seq - 1, row)
        spent = state.budget._replace(crashes=state.budget.crashes - 1)
        verified = state.verified if not self.forgets_at_a_crash else None
        return self._new_owner(
            state._replace(rows=rows, budget=spent, unflushed=(), verified=verified)
        )

    def _new_owner(self, state: State) -> State:
        return state._replace(
            lane=_freeze(self._new_lane()),
            clock=None,
            noted=None,
            look=None,
            flight=None,
        )

    def _check(self, state: State) -> None:
        for seq, row in enumerate(state.rows[: state.watermark], 1):
            if row.status == OPEN or row.is_unmarked:
                raise BrokenPromiseError(
                    f"the watermark is {state.watermark}, and row {seq} has no mark"
                )
        lane = state.lane
        if state.look is not None or lane.needs_refresh:
            return
        known: set[int] = set()
        for flight in (state.flight, state.late):
            if flight is not None:
                known |= {*flight.claimed, *flight.held}
        for seq, row in enumerate(state.rows[: max(lane.floor, 0)], 1):
            if row.status == OPEN or (row.is_unmarked and seq not in known):
                raise BrokenPromiseError(
                    f"the floor is {lane.floor}, and row {seq} has no mark"
                )

    def _check_quiet(self, state: State) -> None:
        """Claim the remaining rows, with sweeps; refused rows become due.

        When none is left, one more round must find nothing to break.
        """
        is_last, left = False, _left(state)
        for _ in range(6 * len(state.rows) + 6):
            for seq, row in enumerate(state.rows, 1):
                if row.entry == REFUSED:
                    state = _come_due(state, seq)
            state = state._replace(lane=state.lane._replace(needs_refresh=True))
            for _ in range(4):
                if state.lane.needs_refresh:
                    state = self._read_clock(state)
                state = self._begin(state)
                assert state.look is not None
                state = self._return(state, state.look)
                if state.flight is None:
                    break
                if not state.flight.is_published:
                    state = self._answered(state, state.flight.claimed)
                assert state.flight is not None
                ((_, state), *_) = self._settle(state, state.flight)
                state = self._scan(state)
            state = self._scan(state)
            left = _left(state)
            if is_last and not left:
                return
            is_last = not left
        if left:
            raise BrokenPromiseError(f"rows {left} are never published")

    def _new_lane(self) -> Lane:
        lane = self.lane(16)
        lane.cursor = self.cursor()
        lane.deferrals = self.deferrals()
        return lane

    def _thaw(self, frozen: FrozenLane) -> Lane:
        lane = self._new_lane()
        cursor, deferrals = lane.cursor, lane.deferrals
        cursor.floor, cursor._candidate = frozen.floor, frozen.candidate
        lane.verified = frozen.verified
        deferrals.log.floor = frozen.log_floor
        deferrals.blocked = set(frozen.blocked)
        deferrals.draining = dict(frozen.draining)
        deferrals.due = {_id(s): _place(s, _UNKEYED) for s in sorted(frozen.due)}
        deferrals._restarted = set(frozen.restarted)
        deferrals._found = set(frozen.found)
        if frozen.reading is not None:
            position, last = frozen.reading
            deferrals.portion_read(position, last, Snapshot(0, 0), last)
        lane.is_new, lane.rewound = frozen.is_new, frozen.rewound
        lane.needs_refresh = frozen.needs_refresh
        return lane


_UNKEYED: Final = Row(None, 0, COMMITTED, frozenset())


def _freeze(lane: Lane) -> FrozenLane:
    cursor, deferrals = lane.cursor, lane.deferrals
    return FrozenLane(
        floor=cursor.floor,
        candidate=cursor._candidate,
        verified=lane.verified,
        log_floor=deferrals.log.floor,
        blocked=frozenset(deferrals.blocked),
        draining=tuple(deferrals.draining.items()),
        due=frozenset(place.seq for place in deferrals.due.values()),
        restarted=frozenset(deferrals._restarted),
        reading=None
        if deferrals._reading is None
        else (deferrals._reading.position, deferrals._reading.last),
        found=frozenset(deferrals._found),
        is_new=lane.is_new,
        rewound=lane.rewound,
        needs_refresh=lane.needs_refresh,
    )


def _id(seq: int) -> UUID:
    return UUID(int=seq)


def _place(seq: int, row: Row) -> WaitingMessage:
    cause = "blocked" if row.entry == BLOCKED else "refused"
    return WaitingMessage(16, seq, _id(seq), NOW, 0, 0, 0, cause, row.key)


def _read_log(state: State, above: int, up_to: int) -> Iterator[LogOfKey]:
    """Do what `read_deferrals.sql` does."""
    new = [
        (seq, row)
        for seq, row in enumerate(state.rows, 1)
        if above < row.number <= up_to
    ]
    for key in sorted({row.key for _, row in new if row.key is not None}):
        rows = [(seq, row) for seq, row in new if row.key == key]
        yield LogOfKey(
            key,
            has_head=any(row.entry in {REFUSED, DUE} for _, row in rows),
            has_ended=any(row.entry == ENDED for _, row in rows),
            seq=min((seq for seq, row in rows if row.waits), default=None),
            due_at=None,
            created_at=None,
        )


def _left(state: State) -> list[int]:
    """Return the committed rows that are not published, or still have work to do."""
    return [
        seq
        for seq, row in enumerate(state.rows, 1)
        if row.status == COMMITTED
        and (row.is_unmarked or row.waits or seq not in state.sent)
    ]


def _first_unmarked(state: State, above: int, up_to: int) -> int | None:
    """Do what `verify_marks.sql` does."""
    rows = enumerate(state.rows[: max(up_to, 0)], 1)
    return next((seq for seq, row in rows if row.is_unmarked and seq > above), None)


def _last_entry(state: State) -> int:
    return max((row.number for row in state.rows), default=0)


def _written(flight: Flight) -> tuple[Change, Change]:
    """Return the marks and the entries that a settlement writes."""
    marks: Change = {}
    entries: Change = {}
    for seq in flight.acked:
        if seq in flight.places:
            entries[seq] = ("entry", ENDED)
        else:
            marks[seq] = ("mark", PUBLISHED)
    waiting = dict.fromkeys(sorted(flight.held), BLOCKED)
    if flight.refused is not None:
        waiting[flight.refused] = REFUSED
    for seq, entry in waiting.items():
        if seq not in flight.places:
            marks[seq] = ("mark", DEFERRED)
        if entry == REFUSED or seq not in flight.places:
            entries[seq] = ("entry", entry)
    return marks, entries


def take_snapshot(state: State) -> FullSnapshot:
    running = [xid for xid in state.xids if xid]
    xmax = state.ended + 1
    return FullSnapshot(
        # With no running id below xmax, PostgreSQL reports xmin = xmax, even if higher
        # ids are running.
        min([xid for xid in running if xid < xmax], default=xmax),
        xmax,
        tuple(xid for xid in running if xid < xmax),
        state.next_xid,
    )


def _change(state: State, *changes: Change) -> State:
    """Write marks and entries in one transaction.

    An entry that has ended stays ended, and a published mark is not overwritten.
    """
    rows = list(state.rows)
    number = _last_entry(state)
    for change in changes:
        for seq, (what, value) in change.items():
            row = rows[seq - 1]
            if what == "mark" and row.mark != PUBLISHED:
                rows[seq - 1] = row._replace(mark=value)
            elif what == "entry" and row.entry != ENDED:
                number += 1
                rows[seq - 1] = row._replace(entry=value, number=number)
    if tuple(rows) == state.rows:
        return state
    unflushed: tuple[tuple[int, str | None, str | None, int], ...] = ()
    if state.budget.crashes:
        unflushed = tuple(
            (seq, was.mark, was.entry, was.number)
            for seq, (was, row) in enumerate(zip(state.rows, rows, strict=True), 1)
            if was != row
        )
    return state._replace(
        rows=tuple(rows),
        ended=state.next_xid,
        next_xid=state.next_xid + 1,
        unflushed=unflushed,
    )


def _come_due(state: State, seq: int) -> State:
    """Let time pass until a row is due; nothing is written."""
    row = state.rows[seq - 1]._replace(entry=DUE)
    return state._replace(rows=_with(state.rows, seq - 1, row))


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
