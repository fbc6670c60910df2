"""Writers that insert rows, over a simulated PostgreSQL."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

OPEN: Final = "open"
COMMITTED: Final = "committed"
GONE: Final = "gone"


class Row(NamedTuple):
    """A row of the table; its position in the table, from 1, is its sequence number."""

    key: str | None
    writer: int
    status: str
    after: frozenset[int]
    """The rows that must be published first: those of its key that were committed, or
    written by the same transaction, before it was written."""


class Snapshot(NamedTuple):
    """A snapshot as PostgreSQL has it."""

    xmin: int
    xmax: int
    in_progress: tuple[int, ...]
    next_xid: int


class State(NamedTuple):
    """What the writers have done, and will do."""

    scripts: tuple[str, ...]
    """The remaining steps of each writer: `x` gets a transaction id, another letter
    writes a row with that key, `-` one without a key, `.` commits, and `?` commits or
    rolls back."""
    xids: tuple[int, ...]
    """The id of each writer's open transaction; 0 before it has one."""
    next_xid: int = 1
    ended: int = 0
    """The highest transaction id that has ended."""
    rows: tuple[Row, ...] = ()


def write(state: State, writer: int, what: str) -> Iterator[tuple[str, State]]:
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
    if not xid:
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


def take_snapshot(state: State) -> Snapshot:
    running = [xid for xid in state.xids if xid]
    xmax = state.ended + 1
    return Snapshot(
        # With no running id below xmax, PostgreSQL reports xmin = xmax, even if higher
        # ids are running.
        min([xid for xid in running if xid < xmax], default=xmax),
        xmax,
        tuple(xid for xid in running if xid < xmax),
        state.next_xid,
    )


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
