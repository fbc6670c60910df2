"""A model of a consumer that reads the outbox, whose handlers end in any order.

The lane with its window and keys, the worker that hands messages over, what a claim
includes and what a settlement stores are the real code. The model covers the tables, as
`tests/models/waiting.py` does, and the callers: claims, settlements, the sweep, the
lease, and a consumer that handles the messages of a key in sequence. Handlers end, and
rows commit, while a claim is read or a settlement is stored.

Every state is checked: a row that the position covers was handled or has an entry, and
no other row has one. No entry waits for long for a handler. No message is handled
before one of its key that precedes it, or starts while it runs already. In every end
state each was handled, nothing waits, and the position covers all. Unless a process was
killed or lost the lane, nothing is handled twice.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

from pillarbox.inbox.sources.postgres.handover import Handover
from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.inbox.sources.postgres.settlement import LaneSettlement, settlement_of
from pillarbox.inbox.sources.postgres.window_lane import WindowLane
from pillarbox.inbox.sources.postgres.worker import HandlerWorker
from pillarbox.outbox.log.lanes.batch import (
    BLOCKED,
    PUBLISHED,
    SCHEDULED,
    ClaimedBatch,
    ClaimedMessage,
    Disposition,
)
from pillarbox.outbox.log.lanes.keys import LaneKeys, WaitingClaim, WaitingMessage
from pillarbox.outbox.log.lanes.lane import Extent
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Progress, Stored
from pillarbox.outbox.log.settle import Settlement
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.log.window import Window
from pillarbox.outbox.message import Message
from pillarbox.relay.config import RelayConfig
from tests.models.explore import BrokenPromiseError
from tests.models.waiting import (
    DAY,
    NOW,
    Database,
    WaitingModel,
    _claimed,
    _is_due,
    _key,
    _log,
    _open,
)

_OUTCOMES: Final[dict[str, Disposition | None]] = {
    "is handled": PUBLISHED,
    "fails": Disposition("refused", "no", delay=1.0, charge=1),
    "is given back": None,
}
_AT_ONCE, _LATER, _MUCH_LATER = 0.0, 1.0, 1000.0
"""Messages are claimed and end at 0, by the monotonic clock."""
_PATIENT: Final = 0.5

Hand = tuple[int, int]
"""A message in hand: its seq, and the number of the window it was claimed in."""


class FrozenHeld(NamedTuple):
    """A message in hand."""

    hand: Hand
    waiting: WaitingMessage | None
    is_open: bool


class FrozenLane(NamedTuple):
    """The state of a lane."""

    keys: Any
    needs_refresh: bool
    windows: int
    window: Any
    held: tuple[FrozenHeld, ...]
    stale: tuple[FrozenHeld, ...]
    behind: tuple[Hand, ...]
    ended: tuple[Hand, ...]
    refused: tuple[Any, ...]
    withheld: tuple[Any, ...]
    rest: Any


class Process(NamedTuple):
    """A consumer's process.

    Attributes:
        ready: messages that were handed over.
        received: those that the consumer has; the first of each key runs.
        is_kept: the lane isn't claimed until it is settled.
        scanned: the due entries that scans have found; they don't find them again.
    """

    lane: FrozenLane
    ready: tuple[Hand, ...] = ()
    received: tuple[Hand, ...] = ()
    is_kept: bool = False
    scanned: frozenset[int] = frozenset()


class Reading(NamedTuple):
    """What a claim has read."""

    claim: WaitingClaim
    loaded: tuple[int, ...]
    entries: tuple[Any, ...]
    found: tuple[int, ...]
    is_cut: bool
    view: ReadView


class Storing(NamedTuple):
    """A settlement that is stored, and what has happened since it was made."""

    before: Process
    at: float
    events: tuple[tuple[str, Any], ...]
    logged: frozenset[int]


class Written(NamedTuple):
    """What a settlement inserts."""

    number: int
    stored: tuple[Stored, ...]
    entries: tuple[tuple[int, str], ...]


class Budget(NamedTuple):
    """How often each event can happen."""

    failures: int = 0
    returns: int = 0
    opens: int = 0
    """How often messages get an entry because they run for long."""
    kills: int = 0
    losses: int = 0
    """How often the process loses its session or lease, and gets the lane again."""


_NOTHING_GOES_WRONG: Final = Budget()


class State(NamedTuple):
    """Everything that decides which steps are possible next."""

    script: str
    budget: Budget
    process: Process | None = None
    database: Database = Database()
    late: frozenset[int] = frozenset()
    """Rows that have not committed."""
    reading: Reading | None = None
    storing: Storing | None = None
    former: Written | None = None
    """The settlement of a process that has lost the lane."""
    sent: frozenset[int] = frozenset()
    may_repeat: bool = False


class _Board:
    """Stands for `LaneBoard`, of one lane that is leased all the time."""

    lane: WindowLane

    def find(self, number: int) -> WindowLane:
        return self.lane

    def owns(self, lanes: Sequence[WindowLane]) -> bool:
        return True

    def leave(self, lane: WindowLane) -> None:
        pass

    def keep(self, lane: WindowLane) -> None:
        lane.picked([lane])


class Running:
    """The real objects of a process."""

    def __init__(self, kind: type[WindowLane]) -> None:
        self.board = _Board()
        self.handover = Handover(100)
        self.worker = HandlerWorker(
            cast("Any", None),
            cast("Any", self.board),
            cast("Any", self.handover),
            RelayConfig(),
            in_flight=set(),
            stop=asyncio.Event(),
            notify=lambda _: None,
        )
        self.lane = self.board.lane = kind(16, {}, self.worker)
        self.worker._last = {16: self.lane}
        self.windows: list[Window] = []
        self.received: list[HeldMessage] = []


@dataclass(frozen=True)
class HandlersModel:
    """The possible steps.

    Args:
        script: the keys of the rows: `-`: none; `+`: none, and it commits late;
            uppercase: scheduled. Those before `|` are there from the start.
        kind: the class of the lane.
        most: the maximum number of rows in a claim.
        has_fence: a settlement is refused if another one came first.
        withdraws: messages that follow one that has to wait are taken back.
    """

    script: str
    budget: Budget = _NOTHING_GOES_WRONG
    kind: type[WindowLane] = WindowLane
    most: int = 2
    has_fence: bool = True
    withdraws: bool = True

    def start(self) -> State:
        there, _, to_come = self.script.rpartition("|")
        late = frozenset(n for n, key in enumerate(there, 1) if key == "+")
        return State(to_come, self.budget, database=Database(tuple(there)), late=late)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        self.check(state)
        is_end = True
        for step in self.possible(state):
            if step[1] != state:
                is_end = False
                yield step
        if is_end:
            self.check_end(state)

    def possible(self, state: State) -> Iterator[tuple[str, State]]:
        database = state.database
        if state.script:
            seq = len(database.rows) + 1
            rows = (*database.rows, state.script[0])
            yield (
                f"row {seq} of key {state.script[0]}",
                state._replace(
                    script=state.script[1:],
                    database=database._replace(rows=rows),
                    late=state.late | ({seq} if state.script[0] == "+" else set()),
                ),
            )
        for seq in sorted(state.late):
            yield f"row {seq} commits", state._replace(late=state.late - {seq})
        for entry in _open(database).values():
            if entry.cause in {"refused", "scheduled"} and not entry.is_due:
                entries = tuple(
                    e._replace(is_due=True) if e == entry else e
                    for e in database.entries
                )
                due = database._replace(entries=entries)
                yield f"row {entry.seq} is due", state._replace(database=due)
        if state.former is not None:
            yield "the former process settles", self.settle_late(state, state.former)
        if state.process is None:
            yield "a process takes the lane", self.begin(state)
            return
        yield from self.consume(state, state.process)
        if state.reading is not None:
            yield "the claim is taken", self.take(state, state.process, state.reading)
        elif state.storing is not None:
            yield "the lane is told", self.tell(state, state.storing)
        else:
            yield "a scan finds what is due", self.scan(state, state.process)
            if not state.process.is_kept:
                yield "a claim reads", self.claim(state, state.process, refresh=False)
                if state.process.lane.keys[0] < len(database.entries):
                    yield (
                        "a claim reads after a sweep",
                        self.claim(state, state.process, refresh=True),
                    )
            yield from self.settle(state, state.process)
        yield from self.end(state, state.process)

    # The process.

    def begin(self, state: State) -> State:
        running = Running(self.kind)
        return state._replace(process=_freeze(running, frozenset()))

    def take_over(self, state: State, running: Running) -> None:
        """Do what a refresh does with a lane without progress."""
        stored = state.database.stored
        position = Position() if stored is None else stored.position
        view = _view(state)
        rows = range(1, len(state.database.rows) + 1)
        lowest = [
            seq
            for seq in rows
            if seq not in state.late and not position.covers(seq, seq)
        ]
        running.lane.continue_with(
            Progress.take_over(
                {DAY: position},
                [] if stored is None else [stored],
                view.snapshot,
                view.next_xid,
                {DAY: min(lowest)} if lowest else {},
            )
        )
        assert running.lane.window is not None
        if running.lane.window not in running.windows:
            running.windows.append(running.lane.window)

    def end(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        budget = state.budget
        gone = state._replace(reading=None, storing=None, may_repeat=True)
        if budget.kills:
            budget = budget._replace(kills=budget.kills - 1)
            killed = gone._replace(process=None, budget=budget)
            yield "the process is killed", killed
        if state.budget.losses and process.lane.window is not None:
            budget = state.budget
            budget = budget._replace(losses=budget.losses - 1)
            running = self.thaw(state.database, process)
            running.lane.doubt()
            lost = gone._replace(process=_freeze(running), budget=budget)
            yield "the session is lost", lost
            if state.reading is None and state.storing is None:
                for written, _ in self.settlements(state, process):
                    yield (
                        "the lane is lost, and leased again",
                        lost._replace(former=written),
                    )

    # Claims.

    def claim(self, state: State, process: Process, *, refresh: bool) -> State:
        """Do what `outbox/log/claim.py` does up to the end of its statements."""
        database, running = state.database, self.thaw(state.database, process)
        lane, model = running.lane, WaitingModel(self.script, most=self.most)
        if refresh or lane.needs_refresh or lane.window is None:
            if lane.window is None:
                self.take_over(state, running)
            lane.log_read(*model.read_portion(database, lane.keys), NOW)
        entries = _open(database)
        claim = model.claim_waiting(database, lane.keys)
        loaded = tuple(
            message.seq
            for message in claim.messages
            if message.seq in entries and entries[message.seq].number == message.entry
        )
        assert lane.window is not None
        read, view = lane.window.read, _view(state)
        (_, position), *_ = read.days
        new = [
            seq
            for seq in range(1, len(database.rows) + 1)
            if seq not in state.late
            and not position.covers(seq, seq)
            and (read.as_of is None or read.as_of.visible(seq))
        ]
        most = max(self.most - len(loaded), 1)
        reading = Reading(
            claim,
            loaded,
            tuple((seq, entries[seq]) for seq in loaded),
            tuple(new[:most]),
            len(new) > most,
            view,
        )
        is_empty = not (claim.keys or claim.due or new)
        if is_empty:
            lane.advance(Extent(-1, view, is_cut=False))
        return state._replace(
            process=_freeze(running, process.scanned),
            reading=None if is_empty else reading,
        )

    def take(self, state: State, process: Process, reading: Reading) -> State:
        running = self.thaw(state.database, process)
        self._take(running, state.database, reading)
        return state._replace(process=_freeze(running, process.scanned), reading=None)

    def _take(self, running: Running, database: Database, reading: Reading) -> None:
        lane = running.lane
        batch = ClaimedBatch([lane])
        entries = dict(reading.entries)
        batch.rows += [_row(database, seq, entries[seq]) for seq in reading.loaded]
        batch.withheld += [
            (_row(database, it.seq)._replace(waiting=it), BLOCKED)
            for it in reading.claim.held
        ]
        for seq in reading.found:
            row = _row(database, seq)
            if database.rows[seq - 1].isupper():
                batch.withheld.append((row, SCHEDULED))
            elif (
                row.key is not None
                and lane.keys.is_blocked(row.key)
                and (16, row.key) not in reading.claim.drained
            ):
                batch.withheld.append((row, BLOCKED))
            else:
                batch.rows.append(row)
        extent = Extent(
            max(reading.found, default=-1), reading.view, is_cut=reading.is_cut
        )
        if reading.found:
            batch.extents[16] = extent
        else:
            lane.advance(extent)
        lane.keys.claimed(16, reading.claim)
        running.worker._take(batch)
        lane.put_back([lane])
        if lane.must_settle:
            running.worker._kept.add(lane)

    # Handlers.

    def consume(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        if process.ready and state.reading is None and state.storing is None:
            yield from self.do(state, "receives", None)
        begun: set[str] = set()
        for hand in process.received:
            key = _key(state.database, hand[0])
            if key is not None and key in begun:
                continue
            begun.add(key or "")
            yield from self.do(state, "is handled", hand)
            if state.budget.failures:
                budget = state.budget
                budget = budget._replace(failures=budget.failures - 1)
                yield from self.do(state._replace(budget=budget), "fails", hand)
            if state.budget.returns:
                budget = state.budget._replace(returns=state.budget.returns - 1)
                spent = state._replace(budget=budget)
                yield from self.do(spent, "is given back", hand)

    def do(
        self, state: State, what: str, hand: Hand | None
    ) -> Iterator[tuple[str, State]]:
        process, storing = state.process, state.storing
        assert process is not None
        running = self.thaw(state.database, process, is_claimed=bool(state.reading))
        before = {*running.received}
        self.apply(running, what, hand)
        if hand is not None and what == "is handled":
            state = self.accept(state, hand[0])
        for held in running.received:
            if held not in before and any(
                held.row.seq == other.row.seq for other in before
            ):
                raise BrokenPromiseError(f"row {held.row.seq} was started twice")
        if storing is not None:
            events = (*storing.events, (what, hand))
            storing = storing._replace(events=events)
        after = _freeze(running, process.scanned)
        name = what if hand is None else f"row {hand[0]} {what}"
        yield name, state._replace(process=after, storing=storing)

    def apply(self, running: Running, what: str, hand: Hand | None) -> None:
        if hand is None:
            running.received += cast("Any", running.handover.take(1))
            return
        (held,) = (it for it in running.received if _hand(running, it) == hand)
        running.received.remove(held)
        held.end(_OUTCOMES[what])
        if what != "is handled" and held.row.key is not None:
            # Those in its line.
            line = [it for it in running.received if it.row.key == held.row.key]
            for later in reversed(line):
                running.received.remove(later)
                later.end(None)

    def accept(self, state: State, seq: int) -> State:
        database = state.database
        key = _key(database, seq)
        if seq in state.sent and not state.may_repeat:
            raise BrokenPromiseError(f"row {seq} was handled twice")
        if key is not None and not database.rows[seq - 1].isupper():
            earlier = {
                other
                for other in range(1, seq)
                if database.rows[other - 1] == database.rows[seq - 1]
            }
            if missing := sorted(earlier - state.sent):
                raise BrokenPromiseError(
                    f"row {seq} was handled before {missing} of its key"
                )
        return state._replace(sent=state.sent | {seq})

    # Settlements.

    def settlements(
        self, state: State, process: Process
    ) -> Iterator[tuple[Written, float]]:
        """Yield what the process may store now."""
        for at in (_AT_ONCE, _LATER, _MUCH_LATER)[: 3 if state.budget.opens else 2]:
            running = self.thaw(state.database, process)
            part = running.lane.settle(at, is_leaving=False)
            if part is None:
                return
            self.check_kept(running, part, at)
            yield _written(running.lane, part), at
            if at == _AT_ONCE and not any(part.kept) and not state.budget.opens:
                return

    def settle(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        budget = state.budget
        if process.lane.window is None:
            put_back = process._replace(is_kept=False)
            yield "the lane is put back", state._replace(process=put_back)
            return
        for written, at in self.settlements(state, process):
            if not (written.stored or written.entries):
                yield "settles nothing", self.told(state, process, at, ())
                continue
            if at == _MUCH_LATER:
                state = state._replace(budget=budget._replace(opens=budget.opens - 1))
            done = self.store(state, written)
            if done is None:
                running = self.thaw(state.database, process)
                running.lane.doubt()
                yield "is refused", state._replace(process=_freeze(running))
                continue
            running = self.thaw(state.database, process)
            running.lane.settle(at, is_leaving=False)
            count = len(state.database.entries)
            logged = frozenset(e.number for e in done.database.entries[count:])
            yield (
                f"stores {written.entries}",
                done._replace(
                    process=_freeze(running, process.scanned),
                    storing=Storing(process, at, (), logged),
                ),
            )

    def store(self, state: State, written: Written) -> State | None:
        database = state.database
        number = 0 if database.stored is None else database.stored.number
        if written.stored and self.has_fence and number >= written.number:
            return None
        database = _log(database, written.entries)
        if written.stored:
            database = database._replace(stored=written.stored[-1])
        return state._replace(database=database)

    def settle_late(self, state: State, written: Written) -> State:
        return (self.store(state, written) or state)._replace(former=None)

    def tell(self, state: State, storing: Storing) -> State:
        told = self.told(state, storing.before, storing.at, storing.events)
        process = told.process
        assert process is not None
        scanned = process.scanned - storing.logged
        return told._replace(process=process._replace(scanned=scanned), storing=None)

    def told(
        self, state: State, before: Process, at: float, events: Sequence[Any]
    ) -> State:
        """Do what `HandlerWorker._settle` does once it is stored."""
        running = self.thaw(state.database, before)
        lane = running.lane
        part = lane.settle(at, is_leaving=False)
        assert part is not None
        for what, hand in events:
            self.apply(running, what, hand)
        _settlement(lane, part).tell_lanes({}, at)
        lane.stored(part)
        if lane.needs_claim or not lane.must_settle:
            running.worker._kept.discard(lane)
        return state._replace(process=_freeze(running, before.scanned))

    def scan(self, state: State, process: Process) -> State:
        running = self.thaw(state.database, process)
        due = [
            entry
            for entry in _open(state.database).values()
            if _is_due(entry) and entry.number not in process.scanned
        ]
        for entry in due:
            waiting = _claimed(state.database, entry.seq, entry).waiting
            assert waiting is not None
            running.lane.keys.release(waiting)
        scanned = process.scanned.union(entry.number for entry in due)
        return state._replace(process=_freeze(running, scanned))

    # Promises.

    def check_kept(self, running: Running, part: LaneSettlement, at: float) -> None:
        window = running.lane.window
        assert window is not None
        (_, stored), *_ = window.stored.days
        if at == _AT_ONCE or window.read.as_of or stored.late_up_to is not None:
            return
        for row in [it.row for it, _ in part.kept.refused] + [
            row for row, _ in part.kept.withheld
        ]:
            raise BrokenPromiseError(f"row {row.seq} is kept by a handler")

    def check(self, state: State) -> None:
        entries = _open(state.database)
        for seq in range(1, len(state.database.rows) + 1):
            is_covered = _covers(state, seq)
            if not is_covered and seq in entries:
                raise BrokenPromiseError(f"row {seq} has an entry, and is not covered")
            if is_covered and seq not in entries and seq not in state.sent:
                raise BrokenPromiseError(f"row {seq} was passed by")

    def check_end(self, state: State) -> None:
        entries = _open(state.database)
        for seq in range(1, len(state.database.rows) + 1):
            if seq in entries or seq not in state.sent:
                raise BrokenPromiseError(f"row {seq} is never handled")
            if not _covers(state, seq):
                raise BrokenPromiseError(f"row {seq} is never settled")

    def thaw(
        self, database: Database, process: Process, *, is_claimed: bool = False
    ) -> Running:
        frozen, running = process.lane, Running(self.kind)
        lane = running.lane
        if not self.withdraws:
            running.handover.withdraw = lambda unwanted: []  # type: ignore[method-assign]
        running.windows += [Window(_NO_PROGRESS) for _ in range(frozen.windows)]
        if frozen.window is not None:
            window = lane.window = running.windows[-1]
            stored, read, held, ended, window._last = frozen.window
            window.stored, window.read = stored, read
            window._held, window._ended = dict(held), dict(ended)
        known: dict[Hand, HeldMessage] = {}
        for one in (*frozen.held, *frozen.stale):
            (seq, number), waiting, is_open = one
            row = _row(database, seq)._replace(waiting=waiting)
            message = HeldMessage(row, lane, running.windows[number - 1], 0.0, is_open)
            known[one.hand] = message
            of = lane.held if one in frozen.held else lane.stale
            of[message.row.identity] = message
        lane._behind = [known[hand] for hand in frozen.behind]
        unsettled = lane._unsettled
        unsettled.ended.extend((known[hand], PUBLISHED) for hand in frozen.ended)
        unsettled.refused.extend((known[hand], it) for hand, it in frozen.refused)
        unsettled.withheld.extend(
            (_row(database, seq)._replace(waiting=waiting), it)
            for seq, waiting, it in frozen.withheld
        )
        lane.log_by, lane.needs_claim, lane._moves, to_drain = frozen.rest
        lane._to_drain = set(to_drain)
        lane.needs_refresh = frozen.needs_refresh
        lane.in_flight = is_claimed or process.is_kept
        _thaw_keys(lane.keys, frozen.keys)

        def find(hand: Hand) -> HeldMessage:
            if hand not in known:
                row, window = _row(database, hand[0]), running.windows[hand[1] - 1]
                known[hand] = HeldMessage(row, lane, window, 0.0, is_open=False)
            return known[hand]

        running.handover.hand_over(list(map(find, process.ready)))
        running.received = list(map(find, process.received))
        if process.is_kept:
            running.worker._kept.add(lane)
        return running


_NO_PROGRESS: Final = Progress(
    ((DAY, Position()),), 0, frozenset([DAY]), Snapshot(1, 1), 1
)
_TOPIC: Final = "orders"


def _row(database: Database, seq: int, entry: Any = None) -> ClaimedMessage:
    row = _claimed(database, seq, entry)
    message = Message(_TOPIC, b"", key=row.key, id=UUID(int=seq))
    return row._replace(message=message)


def _view(state: State) -> ReadView:
    """Return the view of a statement; each row has its own transaction."""
    end = len(state.database.rows) + 1
    snapshot = Snapshot(min(state.late, default=end), end, state.late)
    return ReadView(snapshot, end, end - 1, 1)


def _covers(state: State, seq: int) -> bool:
    stored = state.database.stored
    return (
        stored is not None
        and seq not in state.late
        and stored.position.covers(seq, seq)
    )


def _settlement(lane: WindowLane, part: LaneSettlement) -> Settlement:
    return settlement_of([(lane, part)])


def _written(lane: WindowLane, part: LaneSettlement) -> Written:
    settlement = _settlement(lane, part)
    entries = [(row.seq, it.cause) for row, it in settlement.entries]
    entries += [(row.seq, "settled") for row, _ in settlement.of("published")]
    for advance in settlement.advances:
        return Written(
            advance.after.number, tuple(advance.rows), tuple(sorted(entries))
        )
    return Written(0, (), tuple(sorted(entries)))


def _hand(running: Running, held: HeldMessage) -> Hand:
    number = next(n for n, it in enumerate(running.windows, 1) if it is held.window)
    return held.row.seq, number


def _freeze_held(running: Running, held: HeldMessage) -> FrozenHeld:
    return FrozenHeld(_hand(running, held), held.row.waiting, held.is_open)


def _freeze(running: Running, scanned: frozenset[int] = frozenset()) -> Process:
    lane, window = running.lane, running.lane.window
    unsettled = lane._unsettled
    frozen = FrozenLane(
        keys=_freeze_keys(lane.keys),
        needs_refresh=lane.needs_refresh,
        windows=len(running.windows),
        window=None
        if window is None
        else (
            window.stored,
            window.read,
            tuple(sorted(window._held.items())),
            tuple(sorted(window._ended.items())),
            window._last,
        ),
        held=tuple(sorted(_freeze_held(running, it) for it in lane.held.values())),
        stale=tuple(sorted(_freeze_held(running, it) for it in lane.stale.values())),
        behind=tuple(_hand(running, it) for it in lane._behind),
        ended=tuple(_hand(running, it) for it, _ in unsettled.ended),
        refused=tuple((_hand(running, held), it) for held, it in unsettled.refused),
        withheld=tuple((row.seq, row.waiting, it) for row, it in unsettled.withheld),
        rest=(
            # The worker reads the clock, which is not the model's.
            _PATIENT if lane.log_by else 0.0,
            lane.needs_claim,
            lane._moves,
            frozenset(lane._to_drain),
        ),
    )
    rings = running.handover.ready._rings
    line = [it for ring in rings for one in ring.values() for it in one]
    return Process(
        frozen,
        tuple(_hand(running, it) for it in line),
        tuple(_hand(running, it) for it in running.received),
        lane in running.worker._kept,
        # What was found is forgotten with the lane's keys.
        frozenset() if window is None else scanned,
    )


def _freeze_keys(keys: LaneKeys) -> Any:
    return (
        keys.floor,
        frozenset(keys.blocked),
        tuple(keys.draining.items()),
        frozenset(keys.due.values()),
        frozenset(keys._restarted),
    )


def _thaw_keys(keys: LaneKeys, frozen: Any) -> None:
    keys.floor, blocked, draining, due, restarted = frozen
    keys.blocked, keys.draining = set(blocked), dict(draining)
    keys.due = {it.id: it for it in sorted(due)}
    keys._restarted = set(restarted)
