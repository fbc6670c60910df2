"""A model of a consumer that reads the outbox itself: a window over the log of relays.

The window and the positions are the real code of `outbox/log`; writers, snapshots, the
tables and the promises are those of `tests/models/log.py`. Rows can be scheduled,
handlers can fail, handled rows can be replayed, rows commit late, and consumers are
killed or lose the lane without noticing.

Two positions are enough: how far claims have read, and the stored one. What is claimed
and can't be handled now (not due, failed, or behind one of its key) gets its entry in
the transaction that stores the position beyond it. The deliveries before it whose
handlers run get entries that they are open, in the same transaction. So no entry has to
wait for a handler, but some wait for a claim: while late rows are read, a position can
need a third part. None is above the position, as for relays.

Rows can be found ahead of the claims, those of a tenant in order (key j is another
tenant's). In the lane all rows of the tenant before them were claimed, or are found
first: a lane with a row that committed late isn't searched, and a search goes on where
the last one ended, but not above the floor of a transaction that was open then. What
became of them is stored in a settlement, though no position covers them; if one has to
wait, those in hand before it, of its key, get entries, too. Claims leave to the log
what it has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from typing_extensions import override

from pillarbox.outbox.log.hidden import Floors
from pillarbox.outbox.log.progress import Day, Progress
from pillarbox.outbox.log.window import Place, Window
from tests.models.explore import BrokenPromiseError
from tests.models.log import (
    BLOCKED,
    DAYS,
    DUE,
    DUE_LATER,
    ENDED,
    REFUSED,
    REPLAYED,
    SCHEDULED,
    Database,
    LogModel,
    Owner,
    Row,
    State,
    forget_floors,
    is_covered,
    store_positions,
)
from tests.models.window import OPENED

_KEEPS_KEY: Final = {REFUSED, BLOCKED, DUE, OPENED}
_WAITS: Final = {OPENED: BLOCKED, REFUSED: REFUSED}
_READY: Final = {BLOCKED, DUE, DUE_LATER, REPLAYED, OPENED}
_MOST_HELD: Final = 3


class Consumer(NamedTuple):
    """What a consumer remembers.

    Attributes:
        entries: what it remembers of the log, once it can lose the lane unnoticed.
        ahead: the ids of the rows ahead that it has found, and what became of them.
        logged: the places in the window that the log has, and no position covers.
        found_up_to: a seq of each tenant up to which searches have found its rows.
        notes: for the floors of searches.
        drawn: the last seq that it knows to be drawn.
        top: the highest seq in the log, as far as it knows.
    """

    read: Progress
    stored: Progress
    floors: Floors = Floors()
    held: tuple[tuple[Place, Day], ...] = ()
    ended: tuple[tuple[Place, Day], ...] = ()
    failed: frozenset[int] = frozenset()
    last: Any = None
    has_lease: bool = True
    entries: tuple[tuple[int, str], ...] = ()
    ahead: tuple[tuple[int, str], ...] = ()
    logged: frozenset[Place] = frozenset()
    found_up_to: tuple[tuple[bool, int], ...] = ()
    notes: Floors = Floors()
    drawn: int = -1
    top: int = -1


@dataclass(frozen=True)
class DirectModel(LogModel):
    """The possible steps of a consumer, and of one that has lost the lane.

    Args:
        window: the class of the window.
        opens: deliveries whose handlers run get entries, if one behind needs one.
        logs: what the position passes, and has not ended, gets entries.
        logs_above: entries are inserted whatever the stored position covers.
        reads_log: a key waits for what the log has of it.
        has_fence: a settlement is refused if another one came first.
        spares_late: a lane with a row that committed late isn't searched.
        has_floors_ahead: a search goes on below what transactions can add that were
            open at the last one.
        waits_ahead: the rows of a key wait if one ahead of the claims has failed.
        logs_earlier: those in hand get entries before one of their key that waits.
        asks_log: a claim hands nothing over that the log has, as far up as it knows
            that there are entries. (See `LaneKeys.has_logged`. Otherwise one that has
            lost the lane would skip what the next one has logged, and go on behind it.)
    """

    window: type[Window] = Window
    opens: bool = True
    logs: bool = True
    logs_above: bool = False
    reads_log: bool = True
    has_fence: bool = True
    spares_late: bool = True
    has_floors_ahead: bool = True
    waits_ahead: bool = True
    logs_earlier: bool = True
    asks_log: bool = True

    @override
    def read(self, state: State) -> Iterator[tuple[str, State]]:
        owners: Any = state.owners
        is_free = not any(owner and owner.has_lease for owner in owners)
        for number, consumer in enumerate(owners):
            if consumer is not None:
                yield from self.work_on(state, number, consumer)
            elif is_free:
                is_free = False
                progress = self.new_progress(state, DAYS[: self.days])
                new = Consumer(progress, progress)._replace(top=_top(state.database))
                yield "a consumer takes the lane", _with(state, number, new)

    def work_on(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        if len(consumer.held) < _MOST_HELD:
            yield from self.hold(state, number, consumer)
        if state.budget.ahead and consumer.read.as_of is None:
            yield from self.search(state, number, consumer)
        yield from self.handle(state, number, consumer)
        yield from self.handle_ahead(state, number, consumer)
        yield from self.store(state, number, consumer)
        yield from self.store_ahead(state, number, consumer)

    def hold(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        database = state.database
        snapshot = self.take_snapshot(database)
        reader = Owner(consumer.read, consumer.floors)
        found, is_cut = self.scan(database, reader, snapshot, self.most)
        window = self.thaw(consumer)
        window.claimed(
            map(_place_of, found),
            max((row.seq for row in found), default=-1),
            snapshot,
            database.next_xid,
            is_cut=is_cut,
        )
        if (consumer.read.days, consumer.read.as_of) == (
            window.read.days,
            window.read.as_of,
        ):
            return
        ahead, failed = dict(consumer.ahead), consumer.failed
        for row in found:
            became = ahead.pop(row.id, None)
            is_logged = row.id in database.logged and row.seq <= consumer.top
            if is_logged and self.asks_log:
                window.logged(_place_of(row))
            elif became == ENDED:
                window.ended(_place_of(row))
            elif became == REFUSED:
                failed |= {row.seq}
        consumer = consumer._replace(failed=failed, ahead=_sorted(ahead))
        if self.budget.ahead:
            consumer = consumer._replace(drawn=database.next_seq - 1)
        seen = max(position.up_to for _, position in window.read.days)
        floors = consumer.floors.note(database.next_xid, seen)
        floors = forget_floors(Owner(window.read, floors)).floors
        after = _freeze(window, consumer)._replace(floors=floors)
        yield f"claims {[row.id for row in found]}", _with(state, number, after)

    def search(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Find a row that no claim has read, and none of its key before it."""
        database, days = state.database, dict(consumer.read.days)
        top = max(position.up_to for position in days.values())
        rows = sorted(row for row in database.rows if row.is_committed)
        if self.spares_late and any(
            row.seq <= top and not days[DAYS[row.day]].covers(row.seq, row.xid)
            for row in rows
        ):
            return
        xmin = self.take_snapshot(database).xmin
        notes = consumer.notes.note(database.next_xid, consumer.drawn)
        floor = notes.of(xmin) if self.has_floors_ahead else database.next_seq
        notes = notes.forget(xmin)
        for tenant in (False, True):
            up_to = max(top, dict(consumer.found_up_to).get(tenant, -1))
            own = [row for row in rows if (row.key == "j") == tenant]
            for row in sorted(own, key=lambda row: row.seq):
                is_known = row.id in dict(consumer.ahead) or row.id in database.logged
                if row.seq <= up_to or is_known or row.is_scheduled:
                    continue
                reached = {**dict(consumer.found_up_to), tenant: min(row.seq, floor)}
                new = consumer._replace(
                    ahead=_sorted({**dict(consumer.ahead), row.id: OPENED}),
                    found_up_to=_sorted(reached),
                    notes=notes,
                    drawn=database.next_seq - 1,
                )
                budget = state.budget._replace(ahead=state.budget.ahead - 1)
                spent = state._replace(budget=budget)
                yield f"finds row {row.id} ahead", _with(spent, number, new)
                break

    def handle_ahead(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Let a handler end, of a row ahead whose key has no earlier one before it."""
        database, log = state.database, self.log_of(state, consumer)
        rows, ahead = {row.id: row for row in database.rows}, dict(consumer.ahead)
        before = [*_held(database, consumer)]
        before += [rows[id] for id, why in log.items() if why in _KEEPS_KEY]
        keeps = {OPENED, REFUSED} if self.waits_ahead else {OPENED}
        before += [rows[id] for id, became in ahead.items() if became in keeps]
        for id in [id for id, became in ahead.items() if became == OPENED]:
            row = rows[id]
            if row.key != "-" and any(
                other.key == row.key and other.seq < row.seq for other in before
            ):
                continue
            ended = consumer._replace(ahead=_sorted({**ahead, id: ENDED}))
            handled = self.accept(state, [id])
            yield f"handles row {id} ahead", _with(handled, number, ended)
            if state.budget.refusals:
                budget = state.budget._replace(refusals=state.budget.refusals - 1)
                failed = _sorted({**ahead, id: REFUSED})
                yield (
                    f"fails with row {id} ahead",
                    _with(
                        state._replace(budget=budget),
                        number,
                        consumer._replace(ahead=failed),
                    ),
                )

    def store_ahead(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Store what became of a row ahead, or that it waits for one of its key."""
        database, log = state.database, self.log_of(state, consumer)
        rows, ahead = {row.id: row for row in database.rows}, dict(consumer.ahead)
        held = _held(database, consumer)
        waits = {rows[id].key for id, why in log.items() if why in _KEEPS_KEY} - {"-"}
        for id, became in ahead.items():
            row = rows[id]
            refused = [rows[i].seq for i, why in ahead.items() if why == REFUSED]
            refused += [it.seq for it in held if it.seq in consumer.failed]
            of_key = [it for it in rows.values() if it.key == row.key != "-"]
            if became == OPENED and not (
                row.key in waits
                or any(it.seq in refused and it.seq < row.seq for it in of_key)
            ):
                continue
            earlier = []
            if became != ENDED:
                earlier = [it for it in held if it in of_key and it.seq < row.seq]
                if any(it.seq in refused for it in earlier):
                    continue  # These get their entries first, or at the same time.
                earlier += [
                    it
                    for it in of_key
                    if it.seq < row.seq and ahead.get(it.id) in {OPENED, REFUSED}
                ]
            entries = {} if became == ENDED else {id: _WAITS[became]}
            if self.logs_earlier:
                entries |= {
                    it.id: REFUSED if ahead.get(it.id) == REFUSED else OPENED
                    for it in earlier
                }
            yield from self.store_entries(state, number, consumer, id, entries)

    def store_entries(
        self,
        state: State,
        number: int,
        consumer: Consumer,
        id: int,
        entries: dict[int, str],
    ) -> Iterator[tuple[str, State]]:
        database, window = state.database, self.thaw(consumer)
        rows = {row.id: row for row in database.rows}
        result = window.settle(all_days=True)
        if result is None:
            return  # More of the late rows must be read first.
        after, positions, _ = result
        name = f"stores of row {id} ahead {entries}"
        if any((row.day, row.number) in database.numbers for row in positions):
            yield "is refused", _with(state, number, None)
            return
        window.settled(after)
        stored = store_positions(database, positions, keep=self.budget.losses > 0)
        told = {id, *entries}
        for other in told:
            window.logged(_place_of(rows[other]))
        stored = stored._replace(
            entries=_sorted({**dict(stored.entries), **entries}),
            logged=stored.logged | told,
        )
        ahead = {i: why for i, why in consumer.ahead if i not in told}
        new = _freeze(window, consumer._replace(ahead=_sorted(ahead)))
        new = new._replace(entries=self.remember(stored.entries))
        new = new._replace(top=max(new.top, *(rows[other].seq for other in told)))
        yield name, _with(state._replace(database=stored), number, new)

    def handle(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Let a handler end, of a delivery whose key has no earlier one before it."""
        database = state.database
        rows = {row.id: row for row in database.rows}
        log = self.log_of(state, consumer)
        held = _held(database, consumer)
        before = [*held, *(rows[id] for id, why in log.items() if why in _KEEPS_KEY)]
        if not self.reads_log:
            before = held
        ready = [row for row in held if self.may_begin(row, consumer)]
        ready += [rows[id] for id, why in log.items() if why in _READY and id in rows]
        for row in ready:
            in_log = row.id in log
            has_order = not in_log or log[row.id] in _KEEPS_KEY
            if (
                has_order
                and row.key != "-"
                and any(
                    other.key == row.key and other.seq < row.seq for other in before
                )
            ):
                continue
            handled = self.accept(state, [row.id])
            name = f"handles row {row.id}"
            if in_log:
                ended = self.log(handled, number, consumer, row.id, None)
                yield name, ended
                if state.budget.kills:
                    budget = state.budget._replace(kills=state.budget.kills - 1)
                    killed = handled._replace(budget=budget, may_repeat=True)
                    yield f"{name}, and is killed", _with(killed, number, None)
            else:
                window = self.thaw(consumer)
                window.ended(_place_of(row))
                yield name, _with(handled, number, _freeze(window, consumer))
            if state.budget.refusals:
                budget = state.budget._replace(refusals=state.budget.refusals - 1)
                spent = state._replace(budget=budget)
                failed = consumer._replace(failed=consumer.failed | {row.seq})
                yield (
                    f"fails with row {row.id}",
                    self.log(spent, number, consumer, row.id, REFUSED)
                    if in_log
                    else _with(spent, number, failed),
                )

    def log(
        self,
        state: State,
        number: int,
        consumer: Consumer,
        id: int,
        entry: str | None,
    ) -> State:
        """Change what waits, or end it; what has ended waits no more."""
        database = state.database
        entries, mine = dict(database.entries), dict(consumer.entries)
        if id in entries:
            entries = _changed(entries, id, entry)
        database = database._replace(entries=tuple(sorted(entries.items())))
        if self.budget.losses:
            mine = _changed(mine, id, entry)
        new = consumer._replace(entries=tuple(sorted(mine.items())))
        return _with(state._replace(database=database), number, new)

    def may_begin(self, row: Row, consumer: Consumer) -> bool:
        return not row.is_scheduled and row.seq not in consumer.failed

    def store(
        self, state: State, number: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Store a position, with entries of what it passes and hasn't ended."""
        held = _held(state.database, consumer)
        causes = self.find_causes(state, consumer, held)
        yield from self.store_position(state, number, consumer, {})
        if state.budget.opened and held and causes[held[0].id] == OPENED:
            budget = state.budget._replace(opened=state.budget.opened - 1)
            spent = state._replace(budget=budget)
            yield from self.store_position(
                spent, number, consumer, {held[0].id: OPENED}
            )
        for index, row in enumerate(held):
            if causes[row.id] != OPENED:
                passed = self.find_passed(consumer, held, index)
                if passed is None:
                    continue
                entries = {other.id: causes[other.id] for other in passed}
                if not self.opens and OPENED in entries.values():
                    raise BrokenPromiseError(f"row {row.id} is kept by a handler")
                yield from self.store_position(state, number, consumer, entries)

    def find_passed(
        self, consumer: Consumer, held: Sequence[Row], index: int
    ) -> Sequence[Row] | None:
        """Return the deliveries to pass, so that one of them gets its entry now.

        They are all up to it; and while late rows are read, perhaps later ones. If a
        stored position would get a third part, more of the late rows must be read
        first: None.
        """
        if self.logs_above:
            return held[index : index + 1]
        for end in range(index + 1, len(held) + 1):
            if self.thaw(consumer).settle([_place_of(row) for row in held[:end]]):
                return held[:end]
        return None

    def find_causes(
        self, state: State, consumer: Consumer, held: Sequence[Row]
    ) -> dict[int, str]:
        """Return which entry each delivery would get that has not ended."""
        log = self.log_of(state, consumer)
        waits = {
            row.key for row in state.database.rows if log.get(row.id) in _KEEPS_KEY
        }
        causes = {}
        for row in held:
            if row.is_scheduled:
                causes[row.id] = SCHEDULED
            elif row.seq in consumer.failed:
                causes[row.id] = REFUSED
                waits.add(row.key)
            elif row.key != "-" and row.key in waits:
                causes[row.id] = BLOCKED
            else:
                causes[row.id] = OPENED
                waits.add(row.key)
        return causes

    def store_position(
        self,
        state: State,
        number: int,
        consumer: Consumer,
        entries: dict[int, str],
    ) -> Iterator[tuple[str, State]]:
        database = state.database
        rows = {row.id: row for row in database.rows}
        places = [_place_of(rows[id]) for id in entries]
        window = self.thaw(consumer)
        result = window.settle(places)
        name = f"stores its position, and {entries}"
        if result is None:
            if not (self.logs_above and entries):
                return
            for place in places:
                window.ended(place)
            stored = database
        else:
            after, positions, _ = result
            if self.has_fence and any(
                (row.day, row.number) in database.numbers for row in positions
            ):
                yield "is refused", _with(state, number, None)
                return
            window.settled(after, places)
            stored = store_positions(database, positions, keep=self.budget.losses > 0)
        if self.logs:
            entries = {**dict(database.entries), **entries}
            stored = stored._replace(entries=tuple(sorted(entries.items())))
        failed = consumer.failed - {place[0] for place in places}
        new = _freeze(window, consumer._replace(failed=failed))
        new = new._replace(entries=self.remember(stored.entries))
        yield name, _with(state._replace(database=stored), number, new)

    @override
    def check(self, state: State) -> None:
        super().check(state)
        for owner in state.owners:
            consumer: Any = owner
            # Of one that lost the lane, the next settlement is refused.
            if consumer is None or self.budget.losses:
                continue
            stored = dict(consumer.stored.days)
            for row in state.database.rows:
                if row.is_committed and (
                    stored[DAYS[row.day]].covers(row.seq, row.xid)
                    != is_covered(state.database, row)
                ):
                    raise BrokenPromiseError("the memory differs from the table")

    @override
    def check_end(self, state: State) -> None:
        super().check_end(state)
        for row in state.database.rows:
            if row.is_committed and not is_covered(state.database, row):
                raise BrokenPromiseError(f"row {row.id} is never stored")

    def log_of(self, state: State, consumer: Consumer) -> dict[int, str]:
        is_sure = consumer.has_lease
        return dict(state.database.entries if is_sure else consumer.entries)

    def thaw(self, consumer: Consumer) -> Window:
        window = self.window(consumer.stored)
        window.read = consumer.read
        window._held = dict(consumer.held)
        window._ended = dict(consumer.ended)
        window._logged = set(consumer.logged)
        window._last = consumer.last
        return window


def _changed(entries: dict[int, str], id: int, entry: str | None) -> dict[int, str]:
    left = {other: why for other, why in entries.items() if other != id}
    return left if entry is None else {**left, id: entry}


def _sorted(known: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(sorted(known.items()))


def _top(database: Database) -> int:
    return max((it.seq for it in database.rows if it.id in database.logged), default=-1)


def _held(database: Database, consumer: Consumer) -> list[Row]:
    rows = {row.seq: row for row in database.rows}
    return [rows[seq] for (seq, _), _ in consumer.held]


def _place_of(row: Row) -> Place:
    return row.seq, DAYS[row.day].starts_at


def _freeze(window: Window, consumer: Consumer) -> Consumer:
    return consumer._replace(
        read=window.read,
        stored=window.stored,
        held=tuple(sorted(window._held.items())),
        ended=tuple(sorted(window._ended.items())),
        logged=frozenset(window._logged),
        last=window._last,
    )


def _with(state: State, number: int, consumer: Any) -> State:
    first, second = state.owners
    owners = (first, consumer) if number else (consumer, second)
    return state._replace(owners=owners)
