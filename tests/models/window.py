"""A model of a consumer that reads a log and whose deliveries end out of order.

The window and the positions are the real code of `outbox/log`. Writers, snapshots, the
table of positions and the promises are those of `tests/models/log.py`; "published" is
what a handler has handled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from typing_extensions import override

from pillarbox.outbox.log.hidden import Floors
from pillarbox.outbox.log.position import Snapshot
from pillarbox.outbox.log.progress import Day, Progress
from pillarbox.outbox.log.window import Place, Window
from tests.models.explore import BrokenPromiseError
from tests.models.log import (
    DAYS,
    Database,
    LogModel,
    Owner,
    Row,
    State,
    forget_floors,
    is_covered,
    store_positions,
)

OPENED: Final = "opened"
_MOST_HELD: Final = 3


class Consumer(NamedTuple):
    """What a consumer remembers."""

    read: Progress
    stored: Progress
    floors: Floors = Floors()
    held: tuple[tuple[Place, Day], ...] = ()
    ended: tuple[tuple[Place, Day], ...] = ()
    last: tuple[int, Snapshot] | None = None


@dataclass(frozen=True)
class WindowModel(LogModel):
    """The possible steps of one consumer.

    Args:
        window: the class of the window.
    """

    window: type[Window] = Window

    @override
    def read(self, state: State) -> Iterator[tuple[str, State]]:
        database: Database = state.database
        consumer: Any = state.owners[0]
        if consumer is None:
            progress = self.new_progress(state, DAYS[: self.days])
            yield (
                "a consumer takes the lane",
                _with(state, Consumer(progress, progress)),
            )
            return
        rows = {row.seq: row for row in database.rows}
        if len(consumer.held) < _MOST_HELD:
            yield from self.hold(state, consumer)
        yield from self.handle(state, consumer, rows)
        yield from self.store(state, consumer)
        if state.budget.opened and consumer.held:
            place, _ = consumer.held[0]
            row = rows[place[0]]
            spent = state.budget._replace(opened=state.budget.opened - 1)
            for name, after in self.store(state, consumer, place):
                entries = (*database.entries, (row.id, OPENED))
                yield (
                    f"{name} beyond row {row.id}, which is open",
                    after._replace(
                        budget=spent,
                        database=after.database._replace(
                            entries=tuple(sorted(entries))
                        ),
                    ),
                )

    def hold(self, state: State, consumer: Consumer) -> Iterator[tuple[str, State]]:
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
        before, after = consumer.read, window.read
        if (before.days, before.as_of) == (after.days, after.as_of):
            return
        seen = max(position.up_to for _, position in window.read.days)
        floors = forget_floors(
            Owner(window.read, consumer.floors.note(database.next_xid, seen))
        ).floors
        yield (
            f"the consumer claims {[row.id for row in found]}",
            _with(state, _freeze(window, floors)),
        )

    def handle(
        self, state: State, consumer: Consumer, rows: dict[int, Row]
    ) -> Iterator[tuple[str, State]]:
        """End any delivery whose key has no earlier one in hand."""
        database = state.database
        opened = {id for id, _ in database.entries}
        held = [rows[seq] for (seq, _), _ in consumer.held]
        held += [row for row in database.rows if row.id in opened]
        for row in held:
            if row.key != "-" and any(
                other.key == row.key and other.seq < row.seq for other in held
            ):
                continue
            handled = self.accept(state, [row.id])
            name = f"row {row.id} is handled"
            if row.id not in opened:
                window = self.thaw(consumer)
                window.ended(_place_of(row))
                yield name, _with(handled, _freeze(window, consumer.floors))
                continue
            left = tuple(entry for entry in database.entries if entry[0] != row.id)
            yield name, handled._replace(database=database._replace(entries=left))
            if state.budget.kills:
                yield f"{name}, and the consumer killed", _kill(handled)

    def store(
        self, state: State, consumer: Consumer, *logged: Place
    ) -> Iterator[tuple[str, State]]:
        window = self.thaw(consumer)
        result = window.settle(logged)
        if result is None:
            return
        stored, rows, _ = result
        window.settled(stored, logged)
        yield (
            "the consumer stores its position",
            _with(
                state._replace(database=store_positions(state.database, rows)),
                _freeze(window, consumer.floors),
            ),
        )

    @override
    def happen(self, state: State) -> Iterator[tuple[str, State]]:
        if state.budget.kills and state.owners[0] is not None:
            yield "the consumer is killed", _kill(state)
        if state.budget.midnights and state.today + 1 < self.days:
            spent = state.budget._replace(midnights=state.budget.midnights - 1)
            yield "midnight", state._replace(today=state.today + 1, budget=spent)

    @override
    def check(self, state: State) -> None:
        super().check(state)
        consumer: Any = state.owners[0]
        if consumer is not None and not self._is_consistent(state, consumer):
            raise BrokenPromiseError("the memory differs from the table")

    @override
    def check_end(self, state: State) -> None:
        super().check_end(state)
        for row in state.database.rows:
            if row.is_committed and not is_covered(state.database, row):
                raise BrokenPromiseError(f"row {row.id} is never stored")

    def _is_consistent(self, state: State, consumer: Consumer) -> bool:
        database, stored = state.database, dict(consumer.stored.days)
        return all(
            stored[DAYS[row.day]].covers(row.seq, row.xid) == is_covered(database, row)
            for row in database.rows
            if row.is_committed
        )

    def thaw(self, consumer: Consumer) -> Window:
        window = self.window(consumer.stored)
        window.read = consumer.read
        window._held = dict(consumer.held)
        window._ended = dict(consumer.ended)
        window._last = consumer.last
        return window


def _place_of(row: Row) -> Place:
    return row.seq, DAYS[row.day].starts_at


def _freeze(window: Window, floors: Floors) -> Consumer:
    return Consumer(
        window.read,
        window.stored,
        floors,
        tuple(sorted(window._held.items())),
        tuple(sorted(window._ended.items())),
        window._last,
    )


def _with(state: State, consumer: Any) -> State:
    return state._replace(owners=(consumer, None))


def _kill(state: State) -> State:
    budget = state.budget._replace(kills=state.budget.kills - 1)
    return _with(state, None)._replace(budget=budget, may_repeat=True)
