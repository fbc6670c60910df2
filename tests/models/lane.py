"""A lane, its writers, its relay and the one before it, in front of a small PostgreSQL.

The lane and its cursor are the real ones. Modelled are what transactions see (ids,
snapshots, the sequence, commits in any order), and what calls the lane: the worker,
the sweep, and the lease, in the order of `relay/claim.py` and `relay/worker.py`.

Two promises are checked in every state: a claim never starts above a row that is still
to be published, and no key reaches the broker out of order. In every end the rest is
claimed until nothing comes any more: then everything that was committed has been
published.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

from outbox.postgres.lane_cursor import LaneCursor, Snapshot
from relay.lanes.lane import Lane
from tests.models.explore import BrokenPromiseError

NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
OPEN, READY, WAITING, PUBLISHED, GONE = "open", "ready", "waiting", "published", "gone"


class Row(NamedTuple):
    """A row of the table; its place in the table is its sequence number, from 1."""

    key: str | None
    writer: int
    status: str
    after: frozenset[int]
    """Rows of its key that had been committed, or were its transaction's own, when it
    was written: they go first."""


class FullSnapshot(NamedTuple):
    """All that PostgreSQL knows of a snapshot; the code gets `xmin` and `next_xid`."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...]
    next_xid: int


class Look(NamedTuple):
    """A claim in progress: what its statements have read."""

    snapshot: FullSnapshot
    found: tuple[int, ...]
    """All ready rows, if the lane is looked at anew; else the claim's."""
    blocked: frozenset[str] | None
    """Keys that wait in the table, if the lane is looked at anew."""
    drawn: int
    """The last sequence number drawn before."""


class Flight(NamedTuple):
    """A batch, from its claim to its settlement."""

    claimed: tuple[int, ...] = ()
    acked: tuple[int, ...] = ()
    refused: int | None = None
    is_published: bool = False


FrozenLane: TypeAlias = tuple[int, tuple[int, int] | None, frozenset[str], bool]


class Budget(NamedTuple):
    """How often things may go wrong."""

    refusals: int = 0
    outages: int = 0
    takeovers: int = 0
    sweeps: int = 0


_NOTHING_GOES_WRONG: Final = Budget()


class State(NamedTuple):
    """Everything that decides what may happen next."""

    scripts: tuple[str, ...]
    """What each writer still does."""
    xids: tuple[int, ...]
    """The id of each writer's open transaction; 0 before it has one."""
    next_xid: int
    ended: int
    """The highest id of a transaction that has ended."""
    rows: tuple[Row, ...]
    sent: frozenset[int]
    """What the broker has taken."""
    lane: FrozenLane
    look: Look | None
    flight: Flight | None
    due: int | None
    """A row that was made ready, which the lane doesn't know yet."""
    late_acks: tuple[int, ...]
    """What the former relay has published and not marked yet."""
    late_refusal: int | None
    budget: Budget


@dataclass(frozen=True)
class LaneModel:
    """What may happen to a lane.

    Args:
        scripts: what each writer does: `x` gets a transaction id, another letter
            writes a row with that key, `-` one without a key, `.` commits, and `?`
            commits or rolls back.
        cursor: the class of the lane's cursor.
        most: rows in a claim.
        number_first: rows draw their number before their transaction has an id.
        settles_after_loss: a relay that lost its lane still writes down refusals.
        looks_on_takeover: a new lane is looked at before it is claimed from.
    """

    scripts: Sequence[str]
    budget: Budget = _NOTHING_GOES_WRONG
    cursor: type[LaneCursor] = LaneCursor
    lane: type[Lane] = Lane
    most: int = 2
    number_first: bool = False
    settles_after_loss: bool = False
    looks_on_takeover: bool = True

    def start(self) -> State:
        return State(
            scripts=tuple(self.scripts),
            xids=(0,) * len(self.scripts),
            next_xid=1,
            ended=0,
            rows=(),
            sent=frozenset(),
            lane=_freeze(self._new_lane()),
            look=None,
            flight=None,
            due=None,
            late_acks=(),
            late_refusal=None,
            budget=self.budget,
        )

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        self._check(state)
        some = False
        for step in self._possible(state):
            some = True
            yield step
        if not some:
            self._check_quiet(state)

    def _possible(self, state: State) -> Iterator[tuple[str, State]]:
        for writer, script in enumerate(state.scripts):
            if script:
                yield from self._write(state, writer, script[0])
        yield from self._relay(state)
        if state.due is None and not (state.look and state.look.blocked is not None):
            # Both use the sweep's connection, so neither happens during the other.
            for seq in _with_status(state, WAITING):
                after = _settle(state, {seq: READY})
                yield f"row {seq} is due", after._replace(due=seq)
        if state.due is not None:
            yield f"the lane is told of row {state.due}", self._tell(state)
        if state.late_acks:
            after = _settle(state, dict.fromkeys(state.late_acks, PUBLISHED))
            yield "the former relay marks its rows", after._replace(late_acks=())
        if state.late_refusal is not None:
            after = _settle(state, {state.late_refusal: WAITING})
            after = after._replace(late_refusal=None)
            yield "the former relay writes down a refusal", after
        budget = state.budget
        if budget.sweeps:
            lane = self._thaw(state.lane)
            lane.needs_refresh = True
            spent = budget._replace(sweeps=budget.sweeps - 1)
            yield "a sweep", state._replace(lane=_freeze(lane), budget=spent)
        if budget.takeovers:
            yield "another relay takes the lane", self._take_over(state)

    def _write(
        self, state: State, writer: int, what: str
    ) -> Iterator[tuple[str, State]]:
        scripts = _with(state.scripts, writer, state.scripts[writer][1:])
        name = f"writer {writer}"
        xid = state.xids[writer]
        if what in ".?":
            outcomes = [READY, GONE] if what == "?" else [READY]
            for outcome in outcomes:
                rows = tuple(
                    row._replace(status=outcome)
                    if row.writer == writer and row.status == OPEN
                    else row
                    for row in state.rows
                )
                yield (
                    f"{name} {'commits' if outcome == READY else 'rolls back'}",
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
        elif state.flight is None:
            if state.due is not None and state.lane[-1]:
                return
            yield "the relay claims", self._begin(state)
        elif not state.flight.is_published:
            yield from self._publish(state, state.flight)
        else:
            flight = state.flight
            changes = dict.fromkeys(flight.acked, PUBLISHED)
            if flight.refused is not None:
                changes[flight.refused] = WAITING
            yield "the relay settles", _settle(state, changes)._replace(flight=None)

    def _begin(self, state: State) -> State:
        lane = self._thaw(state.lane)
        lane.picked()
        ready = _with_status(state, READY)
        if lane.needs_refresh:
            waiting = _with_status(state, WAITING)
            keys = (state.rows[seq - 1].key for seq in waiting)
            blocked = frozenset(key for key in keys if key is not None)
            look = Look(_snapshot(state), ready, blocked, len(state.rows))
        else:
            found = self._claim(state, lane, ready)
            look = Look(_snapshot(state), found, None, len(state.rows))
        return state._replace(lane=_freeze(lane), look=look)

    def _claim(self, state: State, lane: Lane, ready: Sequence[int]) -> tuple[int, ...]:
        """Do what `claim_batch.sql` does."""
        return tuple(
            seq
            for seq in ready
            if seq > lane.floor and state.rows[seq - 1].key not in lane.blocked
        )[: self.most]

    def _return(self, state: State, look: Look) -> State:
        lane = self._thaw(state.lane)
        snapshot = self._read(look.snapshot)
        if look.blocked is not None:
            free = [s for s in look.found if state.rows[s - 1].key not in look.blocked]
            head = free[0] if free else None
            lane.refresh(set(look.blocked), None if head is None else (head, NOW), NOW)
            lane.looked_up_to(look.drawn if head is None else head - 1, snapshot)
            found = self._claim(state, lane, look.found)
        else:
            found = look.found
            if found:
                lane.looked_up_to(found[-1], snapshot)
        if not found:
            lane.found_empty()
        return state._replace(
            lane=_freeze(lane),
            look=None,
            flight=Flight(found) if found else None,
        )

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
        assert state.flight is not None
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
        if refused is not None and (key := state.rows[refused - 1].key) is not None:
            lane.block(key, NOW, most=100)
        for seq in state.flight.claimed:
            if seq not in acked and seq != refused:
                lane.leave(seq, state.rows[seq - 1].key, NOW)
        is_empty = not acked and refused is None
        flight = Flight((), acked, refused, is_published=True)
        return state._replace(
            lane=_freeze(lane), sent=sent, flight=None if is_empty else flight
        )

    def _tell(self, state: State) -> State:
        assert state.due is not None
        lane = self._thaw(state.lane)
        lane.free(state.due, state.rows[state.due - 1].key, NOW, refused=True)
        return state._replace(lane=_freeze(lane), due=None)

    def _take_over(self, state: State) -> State:
        """Go on with a lane of which nothing is known.

        The former relay marks what was acked, whenever it gets to it. Nothing that it
        had claimed is published any more: it asks its lease before.
        """
        acked: tuple[int, ...] = ()
        refused: int | None = None
        if state.flight is not None and state.flight.is_published:
            acked, refused = state.flight.acked, state.flight.refused
        lane = self._new_lane()
        lane.needs_refresh = self.looks_on_takeover
        return state._replace(
            lane=_freeze(lane),
            look=None,
            flight=None,
            due=None,
            late_acks=acked,
            late_refusal=refused if self.settles_after_loss else None,
            budget=state.budget._replace(takeovers=state.budget.takeovers - 1),
        )

    def _check(self, state: State) -> None:
        floor, _, blocked, needs_refresh = state.lane
        if state.look is not None or needs_refresh:
            return
        known = {state.due, *state.late_acks}
        if state.flight is not None:
            known |= {*state.flight.claimed, *state.flight.acked, state.flight.refused}
        for seq, row in enumerate(state.rows[: max(floor, 0)], 1):
            if row.status == OPEN or (
                row.status == READY and seq not in known and row.key not in blocked
            ):
                raise BrokenPromiseError(
                    f"the floor is {floor}, and row {seq} is {row.status}"
                )

    def _check_quiet(self, state: State) -> None:
        """Claim the remaining rows, with occasional sweeps."""
        for _ in range(4 * len(state.rows) + 4):
            lane = self._thaw(state.lane)
            lane.needs_refresh = True
            state = state._replace(lane=_freeze(lane))
            for _ in range(3):
                state = self._begin(state)
                assert state.look is not None
                state = self._return(state, state.look)
                if state.flight is None:
                    break
                state = self._answered(state, state.flight.claimed)
                flight = state.flight
                assert flight is not None
                changes = dict.fromkeys(flight.acked, PUBLISHED)
                state = _settle(state, changes)._replace(flight=None)
        left = [
            seq
            for seq, row in enumerate(state.rows, 1)
            if row.status not in {PUBLISHED, GONE}
        ]
        if left:
            raise BrokenPromiseError(f"rows {left} are never published")

    def _new_lane(self) -> Lane:
        lane = self.lane(16)
        lane.cursor = self.cursor()
        return lane

    def _thaw(self, frozen: FrozenLane) -> Lane:
        lane = self._new_lane()
        cursor = lane.cursor
        cursor.floor, cursor._candidate, blocked, lane.needs_refresh = frozen
        lane.blocked = set(blocked)
        return lane


def _freeze(lane: Lane) -> FrozenLane:
    cursor = lane.cursor
    return (
        cursor.floor,
        cursor._candidate,
        frozenset(lane.blocked),
        lane.needs_refresh,
    )


def _snapshot(state: State) -> FullSnapshot:
    running = [xid for xid in state.xids if xid]
    xmax = state.ended + 1
    return FullSnapshot(
        # Without one below it PostgreSQL says xmax, even if some above are running.
        min([xid for xid in running if xid < xmax], default=xmax),
        xmax,
        tuple(xid for xid in running if xid < xmax),
        state.next_xid,
    )


def _settle(state: State, changes: dict[int, str]) -> State:
    """Change rows that are not settled yet, in a transaction of its own."""
    rows = tuple(
        row._replace(status=changes[seq])
        if seq in changes and row.status in {READY, WAITING}
        else row
        for seq, row in enumerate(state.rows, 1)
    )
    if rows == state.rows:
        return state
    return state._replace(rows=rows, ended=state.next_xid, next_xid=state.next_xid + 1)


def _with_status(state: State, status: str) -> tuple[int, ...]:
    return tuple(s for s, row in enumerate(state.rows, 1) if row.status == status)


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
