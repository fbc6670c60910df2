"""A model of a consumer's lane, its writers and replicas, over a simulated PostgreSQL.

The queue and its bookkeeping are the real code; a model of the tables answers the
statements that they execute. Between any two statements a writer can take a step, the
replica's other task can continue, or the replica can die and another one take over.

Every state is checked: each delivery at or below the watermark has a mark or an entry,
the day isn't dropped while a delivery is unacked, every key is handled in order, and a
replica never receives a delivery that it could know is acked. In every end state the
remaining deliveries are claimed until none is left: all must then be handled and acked.
"""

import pickle
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeAlias, cast
from uuid import UUID

from typing_extensions import override

from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from inbox.sources.postgres.queue import Queue, Settled
from outbox.message import Message
from outbox.postgres.lane_cursor import LaneCursor
from tests.models import lane as relay
from tests.models.explore import BrokenPromiseError

LANE: Final = 0
NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
END: Final = datetime(2026, 1, 2, tzinfo=UTC)
_WRITES: Final = {"mark_acked", "log_redeliveries", "raise_watermark"}
_MOST_TASKS: Final = 2
LATER: Final = timedelta(seconds=1)
"""A refused delivery is due after one step of time."""

Rows: TypeAlias = Sequence[Sequence[Any]]


class Entry(NamedTuple):
    """An entry of the log; its position in the log, from 1, is its number."""

    seq: int
    cause: str
    attempts: int
    key: str | None
    due: float | None


class Stretch(NamedTuple):
    """A row of `inbox.watermark`."""

    above: int
    up_to: int
    deliveries: int


class Budget(NamedTuple):
    """How often each fault can happen."""

    refusals: int = 0
    returns: int = 0
    """Deliveries that are given back without a delay."""
    takeovers: int = 0
    sweeps: int = 0
    raises: int = 0
    by_hand: int = 0
    """Rows inserted with a number that a rolled-back transaction drew."""


_NOTHING_GOES_WRONG: Final = Budget()


class Tables(NamedTuple):
    """The contents of the database."""

    writers: relay.State
    """Its rows are the deliveries; otherwise only its writers are used."""
    marks: frozenset[int] = frozenset()
    log: tuple[Entry, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    by_hand: frozenset[int] = frozenset()
    time: int = 0

    @property
    def visible(self) -> dict[int, relay.Row]:
        return {
            seq: row
            for seq, row in enumerate(self.writers.rows, 1)
            if row.status == relay.COMMITTED
        }

    @property
    def watermark(self) -> int:
        return max((stretch.up_to for stretch in self.stretches), default=-1)

    @property
    def live(self) -> dict[int, tuple[int, Entry]]:
        """The last entry of each delivery that has no "acked" entry in the log."""
        ended = {entry.seq for entry in self.log if entry.cause == "acked"}
        return {
            entry.seq: (number, entry)
            for number, entry in enumerate(self.log, 1)
            if entry.seq not in ended
        }

    @property
    def acked(self) -> frozenset[int]:
        return self.marks | {e.seq for e in self.log if e.cause == "acked"}

    @property
    def covered(self) -> frozenset[int]:
        return self.marks | {entry.seq for entry in self.log}


class Ask(NamedTuple):
    """A statement whose result a task waits for."""

    name: str
    parameters: Mapping[str, Any]


class _Answer:
    """Waits until the model has executed a statement."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def __await__(self) -> Any:
        return (yield self._ask)


class ModelQueue(Queue):
    """The queue, with the model as its database."""

    @override
    async def _execute(self, name: str, **parameters: Any) -> Sequence[Any]:
        return cast("Sequence[Any]", await _Answer(Ask(name, parameters)))


@dataclass
class Replica:
    """One process: its queue, deliveries in progress, and unwritten outcomes."""

    queue: ModelQueue
    lanes: DeliveryLanes
    known: frozenset[int]
    """Deliveries it can know are acked: they were at its start, or it wrote the ack."""
    time: float = 0.0
    flight: tuple[ClaimedDelivery, ...] = ()
    outcomes: tuple[Settled, ...] = ()
    writing: tuple[Settled, ...] = ()

    @property
    def acked(self) -> frozenset[int]:
        return frozenset(s.row.seq for s in self.outcomes if s.delay is None)


class Frozen:
    """A snapshot of a replica; equal to any replica that would behave the same."""

    def __init__(self, replica: Replica) -> None:
        self._pickled = pickle.dumps(replica)
        self._known = _key_of(replica)
        self._hash = hash(self._known)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._known == other._known

    @override
    def __hash__(self) -> int:
        return self._hash

    def thaw(self) -> Replica:
        return cast("Replica", pickle.loads(self._pickled))


Happened: TypeAlias = tuple[Any, ...]


class State(NamedTuple):
    """Everything that decides which steps are possible next."""

    tables: Tables
    replica: Frozen
    """The replica when it last had no task in progress."""
    since: tuple[Happened, ...]
    """What its tasks have done since then, so that they can be replayed."""
    handled: frozenset[int]
    late: tuple[Happened, ...]
    """Statements that the former replica sent and that have not arrived yet."""
    budget: Budget


class Led(NamedTuple):
    """A replica whose tasks have been replayed up to now."""

    replica: Replica
    tasks: dict[str, Coroutine[Ask, Any, Any]]
    asks: dict[str, Ask]


class View(NamedTuple):
    """The state of a replica as seen from outside."""

    asks: dict[str, Ask]
    flight: tuple[ClaimedDelivery, ...]
    known: frozenset[int]
    is_ready: bool
    is_new: bool
    has_outcomes: bool
    settled: Frozen | None
    """The replica, if it has no task in progress."""


@dataclass(frozen=True)
class DeliveryModel:
    """The possible steps of a consumer's lane.

    Args:
        scripts: what each writer does; see `tests.models.lane.LaneModel`.
        queue: the class of the queue.
        lanes: the class of its bookkeeping.
        cursor: the class of the lane's cursor.
        most: the maximum number of rows in a claim.
        verifies: every delivery of a verified stretch has a mark or an entry.
        reads_log: waiting deliveries are read from the log.
        marks_end_it: a delivery with a mark doesn't wait, whatever the log says.
        reads_marks: a lane's new owner reads which deliveries have a mark.
    """

    scripts: Sequence[str]
    budget: Budget = _NOTHING_GOES_WRONG
    queue: type[ModelQueue] = ModelQueue
    lanes: type[DeliveryLanes] = DeliveryLanes
    cursor: type[LaneCursor] = LaneCursor
    most: int = 2
    verifies: bool = True
    reads_log: bool = True
    reads_marks: bool = True
    marks_end_it: bool = True
    seen: set[Any] = field(default_factory=set, init=False, compare=False, repr=False)
    """End states that have been checked."""
    views: dict[Any, View] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def start(self) -> State:
        tables = Tables(self._writers.start())
        state = State(
            tables=tables,
            replica=Frozen(self._new_replica(tables)),
            since=(),
            handled=frozenset(),
            late=(),
            budget=self.budget,
        )
        # It has read the empty lane; takeovers test how a lane is acquired.
        return self._run(state, "claim")

    @property
    def _writers(self) -> relay.LaneModel:
        return relay.LaneModel(self.scripts)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        self._check(state)
        view = self._view(state)
        is_busy = view.asks or view.flight or view.has_outcomes or state.late
        if not is_busy and not any(state.tables.writers.scripts):
            end = (state.tables, state.replica, state.handled)
            if end not in self.seen:
                self.seen.add(end)
                self._check_quiet(state)
        yield from self._others(state, view)
        yield from self._tasks(state, view)
        yield from self._handling(state, view)

    def _others(self, state: State, view: View) -> Iterator[tuple[str, State]]:
        """Yield the steps of everything but the replica."""
        tables, budget = state.tables, state.budget
        for writer, script in enumerate(tables.writers.scripts):
            if script:
                for name, after in self._writers.write(
                    tables.writers, writer, script[0]
                ):
                    yield name, state._replace(tables=tables._replace(writers=after))
        if not state.since and any(
            entry.due is not None and entry.due > tables.time for entry in tables.log
        ):
            yield "time passes", self._pass_time(state)
        for number, (name, parameters) in enumerate(state.late):
            arrived, _ = self._execute(tables, Ask(name, dict(parameters)))
            rest = state.late[:number] + state.late[number + 1 :]
            yield (
                f"the former replica's {name} arrives",
                state._replace(tables=arrived, late=rest),
            )
        if budget.by_hand:
            for seq, row in enumerate(tables.writers.rows, 1):
                if row.status == relay.GONE:
                    spent = budget._replace(by_hand=budget.by_hand - 1)
                    yield (
                        f"row {seq} is inserted by hand",
                        state._replace(tables=_insert(tables, seq), budget=spent),
                    )
        if budget.takeovers:
            yield "another replica takes the lane", self._take_over(state)
            for ask in view.asks.values():
                if ask.name in _WRITES:
                    yield (
                        f"another replica takes the lane while {ask.name} is sent",
                        self._take_over(state, ask),
                    )

    def _tasks(self, state: State, view: View) -> Iterator[tuple[str, State]]:
        """Yield the steps of the replica's tasks."""
        budget = state.budget
        for task, ask in view.asks.items():
            tables, rows = self._execute(state.tables, ask)
            answered = (*state.since, ("answered", task, _frozen(rows)))
            yield (
                f"{task}: {ask.name}",
                self._settle_down(state._replace(tables=tables, since=answered)),
            )
        # At most two tasks without a pause: otherwise the model would run forever.
        if sum(happened[0] == "begins" for happened in state.since) == _MOST_TASKS:
            return
        if "claim" not in view.asks and not view.flight:
            yield "a claim begins", self._happen(state, ("begins", "claim"))
            if budget.sweeps:
                spent = budget._replace(sweeps=budget.sweeps - 1)
                yield (
                    "a sweep begins",
                    self._happen(state._replace(budget=spent), ("begins", "sweep")),
                )
        if "write" not in view.asks and view.has_outcomes:
            yield "outcomes are written", self._happen(state, ("begins", "write"))
        if budget.raises and not view.asks and not view.is_new:
            spent = budget._replace(raises=budget.raises - 1)
            yield (
                "the watermark is raised",
                self._happen(state._replace(budget=spent), ("begins", "raise")),
            )

    def _handling(self, state: State, view: View) -> Iterator[tuple[str, State]]:
        """Yield the steps of the handlers."""
        budget = state.budget
        if not view.flight:
            if "claim" not in view.asks and view.is_ready:
                yield "deliveries are handed out", self._hand_out(state)
            return
        yield "all are handled", self._handle(state, None, "")
        for row in view.flight:
            if budget.refusals:
                spent = budget._replace(refusals=budget.refusals - 1)
                failed = self._handle(state._replace(budget=spent), row.seq, "refused")
                yield f"row {row.seq} fails", failed
            if budget.returns:
                spent = budget._replace(returns=budget.returns - 1)
                given = self._handle(state._replace(budget=spent), row.seq, "returned")
                yield f"row {row.seq} is given back", given

    def _hand_out(self, state: State) -> State:
        after = self._happen(state, ("handed out",))
        view = self._view(after)
        for row in view.flight:
            if row.seq in view.known:
                raise BrokenPromiseError(f"row {row.seq} is acked, and was handed out")
        return after

    def _handle(self, state: State, failed: int | None, how: str) -> State:
        handled = state.handled
        for row in _before(self._view(state).flight, failed):
            missing = state.tables.writers.rows[row.seq - 1].after - handled
            if missing:
                raise BrokenPromiseError(
                    f"row {row.seq} was handled before {sorted(missing)} of its key"
                )
            handled |= {row.seq}
        return self._happen(state._replace(handled=handled), ("handled", failed, how))

    def _happen(self, state: State, happened: Happened) -> State:
        return self._settle_down(state._replace(since=(*state.since, happened)))

    def _settle_down(self, state: State) -> State:
        """Drop the replica's history once none of its tasks is in progress."""
        settled = self._view(state).settled
        return state if settled is None else state._replace(replica=settled, since=())

    def _view(self, state: State) -> View:
        which = (state.replica, state.since)
        view = self.views.get(which)
        if view is None:
            view = self.views[which] = self._look(state)
        return view

    def _look(self, state: State) -> View:
        led = self._lead(state)
        replica = led.replica
        for task in led.tasks.values():
            task.close()
        return View(
            led.asks,
            replica.flight,
            replica.known,
            is_ready=bool(replica.lanes.ready),
            is_new=bool(replica.lanes.new),
            has_outcomes=bool(replica.outcomes),
            settled=None if led.tasks else Frozen(replica),
        )

    def _lead(self, state: State) -> Led:
        """Replay what a replica has done."""
        led = Led(state.replica.thaw(), {}, {})
        replica = led.replica
        for happened in state.since:
            match happened:
                case "begins", "claim":
                    self._begin(led, "claim", replica.queue.claim([LANE]))
                case "begins", "sweep":
                    replica.queue.sweep_soon()
                    self._begin(led, "claim", replica.queue.claim([LANE]))
                case "begins", "raise":
                    self._begin(led, "raise", replica.queue.raise_watermarks([LANE]))
                case "begins", "write":
                    batch, replica.outcomes = replica.outcomes, ()
                    replica.writing = batch
                    self._begin(led, "write", replica.queue.write(batch))
                case "answered", task, rows:
                    self._send(led, task, rows)
                case "handed out", *_:
                    rows = replica.queue.hand_out(self.most, [LANE], ())
                    replica.flight = tuple(rows)
                case "handled", failed, how:
                    _handle(replica, failed, how)
        return led

    def _begin(self, led: Led, name: str, task: Coroutine[Ask, Any, Any]) -> None:
        led.tasks[name] = task
        self._send(led, name, None)

    def _send(self, led: Led, name: str, rows: Rows | None) -> None:
        try:
            led.asks[name] = led.tasks[name].send(rows)
        except StopIteration:
            del led.tasks[name]
            led.asks.pop(name, None)
            if name == "write":
                replica = led.replica
                replica.known |= {s.row.seq for s in replica.writing if s.delay is None}
                replica.writing = ()

    def _pass_time(self, state: State) -> State:
        tables = state.tables._replace(time=state.tables.time + 1)
        replica = state.replica.thaw()
        replica.time += 1
        return state._replace(tables=tables, replica=Frozen(replica))

    def _take_over(self, state: State, sent: Ask | None = None) -> State:
        """Start a new replica; the statement sent by the former one arrives later."""
        late = state.late
        if sent is not None:
            late = (*late, (sent.name, _frozen(sorted(sent.parameters.items()))))
        spent = state.budget._replace(takeovers=state.budget.takeovers - 1)
        replica = self._new_replica(state.tables)
        return state._replace(
            replica=Frozen(replica), since=(), budget=spent, late=late
        )

    def _new_replica(self, tables: Tables) -> Replica:
        clock = _Clock()
        lanes = self.lanes(_ignore, _ignore, clock)
        lanes.take([LANE])
        lanes._lanes[LANE].cursor = self.cursor()
        lanes._lanes[LANE].verified_at = 0.0
        queue = self.queue(
            cast("Any", None),
            lanes,
            consumer="c",
            prefetch=self.most,
            sweep_interval=timedelta(days=1),
            answer_timeout=timedelta(days=1),
            verify_interval=timedelta(0),
            clock=clock,
        )
        queue._clock = queue._clock._replace(now=NOW)
        queue._turn = cast("Any", None)
        replica = Replica(queue, lanes, known=tables.acked, time=float(tables.time))
        clock.replica = replica
        return replica

    def _check(self, state: State) -> None:
        tables = state.tables
        for seq, row in enumerate(tables.writers.rows[: max(tables.watermark, 0)], 1):
            is_open = row.status == relay.OPEN
            is_left = row.status == relay.COMMITTED and seq not in tables.covered
            if is_open or (is_left and seq not in tables.by_hand):
                raise BrokenPromiseError(
                    f"the watermark is {tables.watermark}, and row {seq} has no mark"
                )
        verified = sum(stretch.deliveries for stretch in tables.stretches)
        live = tables.live.keys() - tables.marks
        if (
            verified == len(tables.visible)
            and not live
            and not tables.visible.keys() <= tables.acked
        ):
            raise BrokenPromiseError("the day is dropped, and the rest never acked")

    def _check_quiet(self, state: State) -> None:
        """Claim, handle and ack the remaining deliveries, with sweeps; all fall due.

        When none is left, one more sweep and one more claim must find nothing to break.
        """
        state = state._replace(budget=_NOTHING_GOES_WRONG)
        left, more = set(state.tables.visible), 2
        for turn in range(3 * len(state.tables.writers.rows) + 4):
            state = self._pass_time(state)
            state = self._run(state, "claim" if turn % 2 else "sweep")
            while self._view(state).is_ready:
                state = self._hand_out(state)
                state = self._handle(state, None, "")
                state = self._run(state, "write")
                self._check(state)
            left = state.tables.visible.keys() - (state.handled & state.tables.acked)
            more = 2 if left else more - 1
            if not more:
                return
        if left:
            raise BrokenPromiseError(f"rows {sorted(left)} are never handled")

    def _run(self, state: State, action: str) -> State:
        """Run a task to its end without interruption."""
        state = self._happen(state, ("begins", action))
        while asks := self._view(state).asks:
            ((task, ask),) = asks.items()
            tables, rows = self._execute(state.tables, ask)
            answered = (*state.since, ("answered", task, _frozen(rows)))
            state = self._settle_down(state._replace(tables=tables, since=answered))
        return state

    def _execute(self, tables: Tables, ask: Ask) -> tuple[Tables, Rows]:
        """Do what the statement with this name does."""
        return getattr(self, ask.name)(tables, **ask.parameters)  # type: ignore[no-any-return]

    def read_clock(self, tables: Tables) -> tuple[Tables, Rows]:
        xid = tables.writers.next_xid
        row = (NOW, len(tables.writers.rows), len(tables.log), xid, "cluster")
        writers = tables.writers._replace(ended=xid, next_xid=xid + 1)
        return tables._replace(writers=writers), [row]

    def find_heads(self, tables: Tables, **_: Any) -> tuple[Tables, Rows]:
        watermark = tables.watermark
        head = min((seq for seq in tables.visible if seq > watermark), default=None)
        return tables, [(LANE, NOW, END, watermark, head)]

    def verify_stretch(
        self, tables: Tables, *, above: int, up_to: int, max_open: int, **_: Any
    ) -> tuple[Tables, Rows]:
        stretch = [seq for seq in sorted(tables.visible) if above < seq <= up_to]
        covered = tables.covered if self.verifies else frozenset(stretch)
        left = [seq for seq in stretch if seq not in covered][:max_open]
        before = [seq for seq in stretch if not left or seq < left[0]]
        keys = [tables.visible[seq].key for seq in left]
        row = (len(before), max(before, default=None), left, [NOW] * len(left), keys)
        return tables, [(*row, self._snapshot(tables))]

    def raise_watermark(
        self, tables: Tables, *, above: int, up_to: int, deliveries: int, **_: Any
    ) -> tuple[Tables, Rows]:
        if any(stretch.above == above for stretch in tables.stretches):
            return tables, []
        stretches = (*tables.stretches, Stretch(above, up_to, deliveries))
        return tables._replace(stretches=stretches), []

    def list_covered(
        self, tables: Tables, *, floors: Sequence[int], **_: Any
    ) -> tuple[Tables, Rows]:
        covered = tables.covered if self.reads_marks else frozenset()
        return tables, [(LANE, seq) for seq in sorted(covered) if seq > floors[0]]

    def list_waiting(
        self, tables: Tables, *, after: int, with_blocked: bool, **_: Any
    ) -> tuple[Tables, Rows]:
        rows: list[tuple[Any, ...]] = []
        for number, entry in tables.live.values():
            if number <= after or not self.reads_log:
                continue
            if entry.due is not None:
                if entry.seq in tables.marks and self.marks_end_it:
                    continue
                due_in = entry.due - tables.time
                place = (entry.seq, NOW, entry.attempts, due_in)
                rows.append((LANE, entry.key, *place))
            elif with_blocked:
                rows.append((LANE, entry.key, None, None, None, None))
        return tables, rows

    def claim_deliveries(
        self,
        tables: Tables,
        *,
        floors: Sequence[int],
        passed: Sequence[int],
        max_rows: int,
        **_: Any,
    ) -> tuple[Tables, Rows]:
        found = [s for s in sorted(tables.visible) if s > floors[0] and s not in passed]
        snapshot = self._snapshot(tables)
        return tables, [
            _row(tables, seq, 0, snapshot if n == 0 else None)
            for n, seq in enumerate(found[:max_rows])
        ]

    def claim_waiting(
        self,
        tables: Tables,
        *,
        keys: Sequence[str],
        aboves: Sequence[int],
        seqs: Sequence[int],
        attempts: Sequence[int],
        max_rows_each: int,
        **_: Any,
    ) -> tuple[Tables, Rows]:
        found = dict(zip(seqs, attempts, strict=True))
        for key, above in zip(keys, aboves, strict=True):
            waiting = sorted(
                seq
                for seq, (_, entry) in tables.live.items()
                if entry.key == key and seq > above
                if not (seq in tables.marks and self.marks_end_it)
            )
            for seq in waiting[:max_rows_each]:
                found[seq] = tables.live[seq][1].attempts
        return tables, [_row(tables, s, found[s], None) for s in sorted(found)]

    def log_redeliveries(
        self,
        tables: Tables,
        *,
        seqs: Sequence[int],
        attempts: Sequence[int],
        causes: Sequence[str],
        delays: Sequence[float | None],
        keys: Sequence[str | None],
        **_: Any,
    ) -> tuple[Tables, Rows]:
        entries = tuple(
            Entry(
                seq, cause, count, key, None if delay is None else tables.time + delay
            )
            for seq, cause, count, key, delay in zip(
                seqs, causes, attempts, keys, delays, strict=True
            )
        )
        return tables._replace(log=tables.log + entries), []

    def mark_acked(
        self, tables: Tables, *, seqs: Sequence[int], **_: Any
    ) -> tuple[Tables, Rows]:
        return tables._replace(marks=tables.marks | {*seqs}), []

    def count_verified(
        self, tables: Tables, *, up_to: int, **_: Any
    ) -> tuple[Tables, Rows]:
        rows = sum(seq <= up_to for seq in tables.visible)
        found = {entry.seq for entry in tables.log if entry.cause == "found"}
        verified = sum(stretch.deliveries for stretch in tables.stretches)
        return tables, [(rows, verified + len(found))]

    def _snapshot(self, tables: Tables) -> str:
        snapshot = relay.take_snapshot(tables.writers)
        return f"{snapshot.xmin}:{snapshot.next_xid - snapshot.xmin}"


class _Clock:
    """A replica's clock; copied with it."""

    replica: Replica

    def __call__(self) -> float:
        return self.replica.time


def _ignore(_lane: int) -> None:
    pass


def _before(
    flight: Sequence[ClaimedDelivery], failed: int | None
) -> list[ClaimedDelivery]:
    """Return the handled ones: all but the failed one and later ones of its key."""
    seqs = [row.seq for row in flight]
    if failed is None:
        return [*flight]
    place = seqs.index(failed)
    key = flight[place].message.key
    rest = [r for r in flight[place + 1 :] if key is None or r.message.key != key]
    return [*flight[:place], *rest]


def _handle(replica: Replica, failed: int | None, how: str) -> None:
    """Do what the consumer and the source do with outcomes."""
    handled = _before(replica.flight, failed)
    outcomes = [Settled(row, None) for row in handled]
    left = [row for row in replica.flight if row not in handled]
    for row in reversed(left):
        if row.seq == failed and how == "refused":
            replica.lanes.block(row)
            outcomes.append(Settled(row, LATER))
        else:
            replica.lanes.give_back(row)
    replica.flight = ()
    replica.outcomes += tuple(outcomes)


def _insert(tables: Tables, seq: int) -> Tables:
    """Commit a row with this number, as an insert by hand does."""
    rows = list(tables.writers.rows)
    rows[seq - 1] = rows[seq - 1]._replace(
        key=None, status=relay.COMMITTED, after=frozenset()
    )
    return tables._replace(
        writers=tables.writers._replace(rows=tuple(rows)),
        by_hand=tables.by_hand | {seq},
    )


def _row(
    tables: Tables, seq: int, attempts: int, snapshot: str | None
) -> tuple[Any, ...]:
    key = tables.visible[seq].key
    place = (LANE, seq, NOW, UUID(int=seq), attempts)
    return (*place, "t", key, None, b"", "text/plain", None, 1, snapshot)


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, which are hashable."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    return value


_LEFT_OUT: Final = {"_taken_over", "_tenants", "_clock_offset", "_now", "_turn"}


def _key_of(value: Any) -> Any:
    """Return a hashable key of a value, built from its parts."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return tuple((_key_of(k), _key_of(v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_key_of, value))
    if isinstance(value, (list, tuple, deque)):
        return tuple(map(_key_of, value))
    if isinstance(value, Message):
        return value.id
    if callable(value):
        return None
    return tuple((name, _key_of(getattr(value, name))) for name in _names_of(value))


_PLAIN: Final = {type(None), bool, int, float, str, datetime, timedelta, UUID}
_names: Final[dict[type, list[str]]] = {}


def _names_of(value: object) -> Sequence[str]:
    """Return the names of the attributes that decide an object's behaviour."""
    kind = type(value)
    if kind not in _names:
        names = getattr(value, "__slots__", ())
        if is_dataclass(value):
            names = [field.name for field in fields(value)]
        if not names:
            return [name for name in vars(value) if name not in _LEFT_OUT]
        _names[kind] = [name for name in names if name not in _LEFT_OUT]
    return _names[kind]
