"""A model of which messages of a lane may go, over simulated tables.

The lane, its keys, what a claim includes, and the settlement of a batch, from its
answers to what the lane is told, are the real code. The model covers the tables, and
the callers: claims, the worker, the sweep, the lease and the mover of oversized rows,
in the order of `outbox/log/claim.py` and `relay/worker.py`. Rows commit in order:
`tests/models/log.py` covers late ones.

Every state is checked: a row that the position covers was published, or moved, or has
an entry, and no other row has one. No row is published before one of its key that
precedes it. In every end state nothing waits, and every row was published or moved.
Unless a relay was killed or lost the lane, or the server crashed, nothing is published
twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from pillarbox.outbox.log.lanes.batch import (
    BLOCKED,
    OVERSIZED,
    ClaimedBatch,
    ClaimedMessage,
    Disposition,
)
from pillarbox.outbox.log.lanes.keys import (
    Draining,
    LaneKeys,
    LogOfKey,
    WaitingClaim,
    WaitingMessage,
)
from pillarbox.outbox.log.lanes.lane import Advance, Extent, Lane
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Day, Progress, Stored
from pillarbox.outbox.log.settle import Settlement
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.settle import settle
from tests.models.explore import BrokenPromiseError

NOW: Final = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY: Final = Day(NOW.replace(hour=0), NOW.replace(day=2, hour=0))
_RETRY: Final = RetryPolicy(max_attempts=100)
_BLOCKING: Final = {"refused", "blocked", "unknown", "open"}


class Entry(NamedTuple):
    """An entry of the log."""

    number: int
    seq: int
    cause: str
    is_due: bool = False


class Database(NamedTuple):
    """What the server stores."""

    rows: tuple[str, ...] = ()
    """The keys, in order of seq from 1; `-`: none, `O`: none, and too large to load."""
    entries: tuple[Entry, ...] = ()
    stored: Stored | None = None


class Flight(NamedTuple):
    """A batch that is published and not settled."""

    number: int
    """The number of its settlement."""
    after: Progress
    stored: tuple[Stored, ...]
    entries: tuple[tuple[int, str], ...]
    others: tuple[tuple[ClaimedMessage, Disposition], ...]
    is_cut: bool
    logged: frozenset[int] | None = None
    """The entries that it has inserted; None: it isn't stored yet."""


class Reading(NamedTuple):
    """What a claim has read, before it is published."""

    claim: WaitingClaim
    loaded: tuple[int, ...]
    """The waiting rows that it has taken."""
    found: tuple[int, ...]
    is_cut: bool
    waiting: frozenset[str] | None
    """The keys that wait in the log, if the relay has read only a part of it."""


class FrozenLane(NamedTuple):
    """The state of a lane that decides what it does next."""

    number: int
    position: Position
    log_floor: int
    blocked: frozenset[str]
    draining: tuple[tuple[str, int], ...]
    due: frozenset[WaitingMessage]
    restarted: frozenset[str]
    reading: Any
    found: frozenset[str]
    needs_refresh: bool
    scanned: frozenset[int] = frozenset()
    """The due entries that scans have found; they don't find them again."""


class Budget(NamedTuple):
    """How often each event can happen."""

    refusals: int = 0
    outages: int = 0
    """How often the broker goes away while it answers for a batch."""
    partial: int = 0
    """How often it answers for later rows, and not for one."""
    kills: int = 0
    losses: int = 0
    """How often a relay loses the lane, with a batch that it has published."""
    crashes: int = 0
    """Crashes of the server; each loses the last settlement (asynchronous commit)."""


_NOTHING_GOES_WRONG: Final = Budget()


class State(NamedTuple):
    """Everything that decides which steps are possible next."""

    script: str
    """The keys of the rows to come."""
    budget: Budget
    lane: FrozenLane | None = None
    database: Database = Database()
    reading: Reading | None = None
    flight: Flight | None = None
    late: Flight | None = None
    """The batch of a former owner."""
    moving: frozenset[int] = frozenset()
    """The oversized rows that a relay moves."""
    sent: frozenset[int] = frozenset()
    """The rows that the broker has accepted, or that were moved."""
    may_repeat: bool = False
    unflushed: Database | None = None
    """What a crash goes back to."""
    is_in_doubt: bool = False
    """The server has crashed since the lane's last settlement or doubt."""


@dataclass(frozen=True)
class WaitingModel:
    """The possible steps.

    Args:
        script: the keys of the rows; see `Database.rows`.
        keys: the class of the lane's keys.
        most: the maximum number of rows in a claim.
        has_fence: a settlement is refused if another one came first.
        reads_log: a new lane's log is read before the first claim.
        fits: the number of waiting messages that fit into a claim; None: all.
        waiting_claim: the class that decides which of them go.
        portion: the number of log entries that a refresh reads; None: all.
        asks_for_keys: until the log is read, a claim asks the table which keys wait.
        reads_to_the_end: a key is free only when a claim has read its log to the end.
        doubts: after a crash of the server, the relay compares its number.
        logs: the causes of which entries are inserted.
    """

    script: str
    budget: Budget = _NOTHING_GOES_WRONG
    keys: type[LaneKeys] = LaneKeys
    most: int = 2
    has_fence: bool = True
    reads_log: bool = True
    fits: int | None = None
    waiting_claim: type[WaitingClaim] = WaitingClaim
    portion: int | None = None
    asks_for_keys: bool = True
    reads_to_the_end: bool = True
    doubts: bool = True
    logs: Sequence[str] = ("refused", "blocked", "unknown", "aside", "settled")

    def start(self) -> State:
        return State(self.script, self.budget)

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
        database, budget = state.database, state.budget
        if state.script:
            rows = (*database.rows, state.script[0])
            yield (
                f"row {len(rows)} of key {state.script[0]}",
                state._replace(
                    script=state.script[1:], database=database._replace(rows=rows)
                ),
            )
        yield from self.relay(state)
        for entry in _open(database).values():
            if entry.cause == "refused" and not entry.is_due:
                entries = tuple(
                    e._replace(is_due=True) if e == entry else e
                    for e in database.entries
                )
                yield (
                    f"row {entry.seq} is due",
                    state._replace(database=database._replace(entries=entries)),
                )
        for seq in sorted(state.moving):
            moved = state._replace(moving=state.moving - {seq})
            if seq in _open(database):
                moved = moved._replace(
                    database=_log(database, [(seq, "settled")]), sent=state.sent | {seq}
                )
            yield f"row {seq} is moved", moved
        if state.late is not None:
            yield "the former relay settles", self.settle(state, state.late, late=True)
        if state.lane is not None:
            yield "a scan finds what is due", self.scan(state, state.lane)
            if budget.kills:
                yield (
                    "the relay is killed",
                    _forget(state)._replace(
                        moving=frozenset(),
                        budget=budget._replace(kills=budget.kills - 1),
                    ),
                )
            if budget.losses:
                is_stored = state.flight is None or state.flight.logged is not None
                yield (
                    "the relay loses the lane",
                    _forget(state)._replace(
                        late=state.late if is_stored else state.flight,
                        budget=budget._replace(losses=budget.losses - 1),
                    ),
                )
        if budget.crashes and state.unflushed is not None and state.late is None:
            yield "the server crashes", self.crash(state, state.unflushed)

    def relay(self, state: State) -> Iterator[tuple[str, State]]:
        if state.lane is None:
            yield "a relay takes the lane", state._replace(lane=self.take_over(state))
        elif state.reading is not None:
            yield from self.publish(state, state.lane, state.reading)
        elif state.flight is not None and state.flight.logged is None:
            yield "the relay settles", self.settle(state, state.flight)
        elif state.flight is not None:
            yield (
                "the lane is told",
                state._replace(lane=self.tell(state.lane, state.flight), flight=None),
            )
        else:
            yield "the relay claims", self.claim(state, state.lane)
            swept = state.lane._replace(needs_refresh=True)
            yield "the relay claims after a sweep", self.claim(state, swept)

    def take_over(self, state: State) -> FrozenLane:
        lane = Lane(16)
        lane.keys = self.keys()
        stored = state.database.stored
        position = Position() if stored is None else stored.position
        lane.progress = Progress.take_over(
            {DAY: position}, [] if stored is None else [stored], *_view(0)[:2], {DAY: 1}
        )
        return _freeze(lane)

    def claim(self, state: State, frozen: FrozenLane) -> State:
        """Do what `_claim` does, in one snapshot."""
        database = state.database
        if state.is_in_doubt:
            state = state._replace(is_in_doubt=False)
            number = 0 if database.stored is None else database.stored.number
            if self.doubts and number != frozen.number:
                frozen = self.take_over(state)
        lane = self.thaw(frozen)
        keys = lane.keys
        if lane.needs_refresh and self.reads_log:
            lane.log_read(*self.read_portion(database, keys), NOW)
        else:
            lane.needs_refresh = keys.is_partly_read
        open_entries = _open(database)
        waiting = None
        if keys.is_partly_read and self.asks_for_keys:
            waiting = frozenset(
                database.rows[seq - 1]
                for seq, entry in open_entries.items()
                if entry.cause in _BLOCKING and _key(database, seq) is not None
            )
        claim = self.claim_waiting(database, keys)
        loaded = tuple(
            message.seq
            for message in claim.messages[: self.fits]
            # Otherwise a later entry exists.
            if message.seq in open_entries
            and open_entries[message.seq].number == message.entry
        )
        assert lane.progress is not None
        above = lane.progress.days[0][1].up_to
        new = range(above + 1 if above > 0 else 1, len(database.rows) + 1)
        most = max(self.most - len(loaded), 1)
        reading = Reading(claim, loaded, tuple(new[:most]), len(new) > most, waiting)
        is_empty = not (claim.keys or claim.due or new)
        return state._replace(
            lane=_freeze(lane, frozen.scanned), reading=None if is_empty else reading
        )

    def claim_waiting(self, database: Database, keys: LaneKeys) -> WaitingClaim:
        """Do what `_claim_waiting` does."""
        half = -(-self.most // 2)
        keys.begin_claim()
        if not keys.size:
            return WaitingClaim()
        due = keys.next_due(-(-half // 2) if keys.draining else half)
        draining = self.read_keys(database, keys, half - len(due))
        blocked = {(16, it.key) for it in due if it.key and keys.is_blocked(it.key)}
        claim = self.waiting_claim.of([16], due, draining, blocked)
        return replace(
            claim.cut(len(claim.messages[: self.fits])),
            due=tuple(claim.due),
            keys=tuple(claim.keys),
            messages=tuple(claim.messages),
            held=tuple(claim.held),
        )

    def read_portion(
        self, database: Database, keys: LaneKeys
    ) -> tuple[int | None, int]:
        """Do what `_read_deferrals` does."""
        above = keys.read_up_to
        last = max((entry.number for entry in database.entries), default=0)
        numbers = [e.number for e in database.entries if e.number > above]
        cut = None
        if self.portion is not None and len(numbers) >= self.portion:
            cut = numbers[self.portion - 1]
        for log in _read_log(database, above, last if cut is None else cut):
            keys.read(log)
        # Entries are numbered in the order of the commits here.
        return cut, last

    def read_keys(
        self, database: Database, keys: LaneKeys, most: int
    ) -> list[Draining]:
        """Do what `_find_next_of_keys` does."""
        read = []
        for key, above in list(keys.draining.items())[:most]:
            waiting = [
                _waiting(database, entry)
                for entry in _open(database).values()
                if _key(database, entry.seq) == key
                and entry.cause in _BLOCKING
                and entry.seq > above
            ]
            is_cut = len(waiting) >= most and self.reads_to_the_end
            draining = Draining.read(16, key, waiting[:most], is_cut=is_cut)
            read.append(replace(draining, next=tuple(draining.next)))
            most -= len(waiting)
            if most <= 0:
                break
        return read

    def publish(
        self, state: State, frozen: FrozenLane, reading: Reading
    ) -> Iterator[tuple[str, State]]:
        database, budget = state.database, state.budget
        lane = self.thaw(frozen)
        batch = ClaimedBatch([lane])
        entries = _open(database)
        for seq in reading.loaded:
            row = _claimed(database, seq, entries.get(seq))
            if database.rows[seq - 1] == "O":
                batch.withheld.append((row, OVERSIZED))
            else:
                batch.rows.append(row)
        for message in reading.claim.held:
            row = _claimed(database, message.seq, entries.get(message.seq))
            batch.withheld.append((row, BLOCKED))
        for seq in reading.found:
            row = _claimed(database, seq)
            if database.rows[seq - 1] == "O":
                batch.withheld.append((row, OVERSIZED))
            elif row.key is not None and self.blocks(reading, lane.keys, row.key):
                batch.withheld.append((row, BLOCKED))
            else:
                batch.rows.append(row)
        lane.keys.claimed(16, reading.claim)
        if reading.found:
            batch.extents[16] = Extent(
                max(reading.found),
                _view(len(database.rows)),
                reading.is_cut,
            )
        for name, answers, spent in self.answers(batch.rows, budget):
            done = self.accept(state, batch.rows, answers)
            settlement = settle(batch, answers, _RETRY)
            after = _freeze(lane, frozen.scanned)
            flight = _written(settlement)
            if settlement.advances:
                done = done._replace(flight=flight)
            else:
                after = self.tell(after, flight)
                oversized = {row.seq for row, _ in settlement.of("aside")}
                done = done._replace(moving=done.moving | oversized)
            yield (
                f"{[row.seq for row in batch.rows]}: {name}",
                done._replace(lane=after, reading=None, budget=spent),
            )

    def blocks(self, reading: Reading, keys: LaneKeys, key: str) -> bool:
        """Do what `_find_blocked` does."""
        if (16, key) in reading.claim.drained:
            return False
        if reading.waiting is None:
            return keys.is_blocked(key)
        if key in reading.waiting:
            keys.found_waiting(key)
        return key in reading.waiting

    def tell(self, frozen: FrozenLane, flight: Flight) -> FrozenLane:
        """Tell the lane about a settlement; scans find its entries again."""
        lane = self.thaw(frozen)
        logged = flight.logged or frozenset()
        advances = [Advance(lane, flight.after, (), {}, {})] if flight.stored else []
        cut = frozenset([16]) if flight.is_cut else frozenset[int]()
        Settlement([lane], 0, flight.others, advances, cut).tell_lanes(
            {16: NOW} if logged else {}, 1.0
        )
        return _freeze(lane, frozen.scanned - logged)

    def answers(
        self, rows: Sequence[ClaimedMessage], budget: Budget
    ) -> Iterator[tuple[str, list[Any], Budget]]:
        """Yield what the broker may answer: nothing behind a row of the same key."""
        yield "all are accepted", [Acked()] * len(rows), budget
        for index, row in enumerate(rows):
            around = [
                None
                if other.key == row.key is not None and position > index
                else Acked()
                for position, other in enumerate(rows)
            ]
            before, behind = around[:index], around[index + 1 :]
            if budget.refusals:
                yield (
                    f"row {row.seq} is refused",
                    [*before, Nacked("no"), *behind],
                    budget._replace(refusals=budget.refusals - 1),
                )
            if budget.outages:
                yield (
                    f"the broker goes away before row {row.seq}",
                    [*before, *[None] * (len(rows) - index)],
                    budget._replace(outages=budget.outages - 1),
                )
            if budget.partial:
                yield (
                    f"row {row.seq} gets no answer",
                    [*before, None, *behind],
                    budget._replace(partial=budget.partial - 1),
                )

    def accept(
        self, state: State, rows: Sequence[ClaimedMessage], answers: Sequence[Any]
    ) -> State:
        sent = state.sent
        for row, answer in zip(rows, answers, strict=True):
            if not isinstance(answer, Acked):
                continue
            if row.key is not None:
                earlier = {
                    seq
                    for seq in range(1, row.seq)
                    if _key(state.database, seq) == row.key
                }
                if missing := sorted(earlier - sent):
                    raise BrokenPromiseError(
                        f"row {row.seq} was published before {missing} of its key"
                    )
            if row.seq in sent and not state.may_repeat:
                raise BrokenPromiseError(f"row {row.seq} was published twice")
            sent |= {row.seq}
        return state._replace(sent=sent)

    def settle(self, state: State, flight: Flight, *, late: bool = False) -> State:
        database = state.database
        after = state._replace(late=None) if late else state._replace(flight=None)
        number = 0 if database.stored is None else database.stored.number
        is_refused = self.has_fence and number >= flight.number
        if is_refused or (self.doubts and number < flight.number - 1):
            # It forgets what it remembers.
            return after if late else after._replace(lane=self.take_over(state))
        entries = [entry for entry in flight.entries if entry[1] in self.logs]
        new = _log(database, entries)._replace(stored=flight.stored[-1])
        if not late:
            logged = {entry.number for entry in new.entries[len(database.entries) :]}
            after = state._replace(flight=flight._replace(logged=frozenset(logged)))
        oversized = {row.seq for row, it in flight.others if it.cause == "aside"}
        return after._replace(
            database=new,
            moving=after.moving | oversized,
            unflushed=database if state.budget.crashes else None,
        )

    def scan(self, state: State, frozen: FrozenLane) -> State:
        lane = self.thaw(frozen)
        due = [
            entry
            for entry in _open(state.database).values()
            if _is_due(entry) and entry.number not in frozen.scanned
        ]
        for entry in due:
            lane.keys.release(_waiting(state.database, entry))
        scanned = frozen.scanned.union(entry.number for entry in due)
        return state._replace(lane=_freeze(lane, scanned))

    def crash(self, state: State, before: Database) -> State:
        """Lose the last settlement; sessions end, and the relay goes on."""
        return state._replace(
            database=before._replace(rows=state.database.rows),
            budget=state.budget._replace(crashes=state.budget.crashes - 1),
            unflushed=None,
            is_in_doubt=True,
            may_repeat=True,
        )

    def thaw(self, frozen: FrozenLane) -> Lane:
        lane = Lane(16)
        keys = lane.keys = self.keys()
        lane.progress = Progress(
            ((DAY, frozen.position),), frozen.number, frozenset([DAY]), *_view(0)[:2]
        )
        keys.floor = frozen.log_floor
        keys.blocked = set(frozen.blocked)
        keys.draining = dict(frozen.draining)
        keys.due = {place.id: place for place in sorted(frozen.due)}
        keys._restarted = set(frozen.restarted)
        keys.reading = frozen.reading
        keys._found = set(frozen.found)
        lane.needs_refresh = frozen.needs_refresh
        return lane

    # Promises.

    def check(self, state: State) -> None:
        database = state.database
        entries = _open(database)
        up_to = 0 if database.stored is None else database.stored.position.up_to
        for seq in range(1, len(database.rows) + 1):
            if seq > up_to and seq in entries:
                raise BrokenPromiseError(f"row {seq} has an entry, and is not covered")
            if seq <= up_to and seq not in entries and seq not in state.sent:
                raise BrokenPromiseError(f"row {seq} was passed by")

    def check_end(self, state: State) -> None:
        entries = _open(state.database)
        for seq in range(1, len(state.database.rows) + 1):
            if seq in entries or seq not in state.sent:
                raise BrokenPromiseError(f"row {seq} is never published")


def _view(rows: int) -> ReadView:
    """Return the view of a claim that saw so many rows, each of its own transaction."""
    return ReadView(Snapshot(rows + 1, rows + 1), rows + 1, rows, 1)


def _written(settlement: Settlement) -> Flight:
    """Return what a settlement inserts, and what the lane is told."""
    entries = [(row.seq, it.cause) for row, it in settlement.entries]
    entries += [(row.seq, "settled") for row, _ in settlement.of("published")]
    # Delays are random.
    others = tuple((row, it._replace(delay=None)) for row, it in settlement.others)
    is_cut = bool(settlement.cut)
    for advance in settlement.advances:
        stored = tuple(advance.rows)
        return Flight(
            advance.after.number,
            advance.after,
            stored,
            tuple(sorted(entries)),
            others,
            is_cut,
        )
    (lane,) = settlement.lanes
    assert lane.progress is not None
    return Flight(0, lane.progress, (), (), others, is_cut)


def _forget(state: State) -> State:
    return state._replace(lane=None, reading=None, flight=None, may_repeat=True)


def _open(database: Database) -> dict[int, Entry]:
    """Return the last entries of the rows that wait, in order of seq."""
    last = {entry.seq: entry for entry in database.entries}
    ended = {entry.seq for entry in database.entries if entry.cause == "settled"}
    return {seq: last[seq] for seq in sorted(last.keys() - ended)}


def _log(database: Database, entries: Sequence[tuple[int, str]]) -> Database:
    """Insert entries; a row is settled once."""
    ended = {entry.seq for entry in database.entries if entry.cause == "settled"}
    number = len(database.entries)
    new = [
        Entry(number + index, seq, cause)
        for index, (seq, cause) in enumerate(entries, 1)
        if cause != "settled" or seq not in ended
    ]
    return database._replace(entries=(*database.entries, *new))


def _key(database: Database, seq: int) -> str | None:
    key = database.rows[seq - 1]
    return None if key in "-+O" else key.lower()


def _is_due(entry: Entry) -> bool | None:
    if entry.cause == "blocked":
        return None
    return entry.is_due or entry.cause in {"unknown", "aside", "open"}


def _waiting(database: Database, entry: Entry) -> WaitingMessage:
    is_due = _is_due(entry)
    return WaitingMessage(
        16,
        entry.seq,
        UUID(int=entry.seq),
        NOW,
        0,
        0,
        entry.number,
        entry.cause,
        _key(database, entry.seq),
        due_at=None if is_due is None else NOW if is_due else DAY.ends_at,
        now=NOW,
    )


def _claimed(
    database: Database, seq: int, entry: Entry | None = None
) -> ClaimedMessage:
    waiting = None if entry is None else _waiting(database, entry)
    key = _key(database, seq)
    return ClaimedMessage(16, seq, UUID(int=seq), NOW, 0, key, "", None, None, waiting)


def _read_log(database: Database, above: int, up_to: int) -> Iterator[LogOfKey]:
    """Do what `read_deferrals.sql` does."""
    portion = [e for e in database.entries if above < e.number <= up_to]
    last = {entry.seq: entry for entry in portion}
    last |= {entry.seq: entry for entry in portion if entry.cause == "settled"}
    # A scheduled message waits for its time.
    last = {seq: entry for seq, entry in last.items() if entry.cause != "scheduled"}
    for key in sorted({_key(database, seq) for seq in last} - {None}, key=str):
        of_key = [e for seq, e in last.items() if _key(database, seq) == key]
        waits = [entry for entry in of_key if entry.cause != "settled"]
        if waits or (of_key and above >= 0):
            yield LogOfKey(
                key,
                has_head=any(entry.cause != "blocked" for entry in waits),
                has_ended=len(waits) < len(of_key),
                seq=min((entry.seq for entry in waits), default=None),
                due_at=None,
                created_at=None,
            )


def _freeze(lane: Lane, scanned: frozenset[int] = frozenset()) -> FrozenLane:
    keys, progress = lane.keys, lane.progress
    assert progress is not None
    return FrozenLane(
        number=progress.number,
        position=progress.days[0][1],
        log_floor=keys.floor,
        blocked=frozenset(keys.blocked),
        draining=tuple(keys.draining.items()),
        due=frozenset(keys.due.values()),
        restarted=frozenset(keys._restarted),
        reading=keys.reading,
        found=frozenset(keys._found),
        needs_refresh=lane.needs_refresh,
        scanned=scanned,
    )
