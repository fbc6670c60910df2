"""A model of a scheduled message that one transaction cancels while a reader finds it.

The steps are those of `outbox.cancel()` and `outbox.due_cause()`: what is one step here
is atomic in PostgreSQL. A transaction that commits becomes visible first, and releases
its locks then.

Every state is checked: what was cancelled is not published. In the end, the message is
published or ended as cancelled, and nobody waits for the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.models.explore import BrokenPromiseError


class State(NamedTuple):
    """The database, the transaction that cancels, and the reader."""

    is_due: bool = False
    transaction: str = "new"
    """New, locked, inserted, refused, visible, over."""
    is_early: bool | None = None
    """What it has read from the clock."""
    has_lock: bool = False
    is_cancelled: bool = False
    """Whether a new snapshot shows that."""
    reader: str = "searches"
    """Searches, found, free (it got the lock), due, published, ended."""
    saw: bool = False
    """Whether its snapshot shows that the message is cancelled."""


@dataclass(frozen=True)
class CancelModel:
    """The possible steps.

    Args:
        reads_clock_first: the transaction reads the clock before it has the lock.
        locks: the reader asks for the lock.
        looks_again: it looks for a cancellation with a snapshot from after the lock.
    """

    reads_clock_first: bool = False
    locks: bool = True
    looks_again: bool = True

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.reader == "published" and state.is_cancelled:
            raise BrokenPromiseError("it is cancelled and published")
        steps = [*self._cancel(state), *self._read(state)]
        is_over = state.transaction == "over" and state.reader in {"published", "ended"}
        if not state.is_due:
            steps.append(("it becomes due", state._replace(is_due=True)))
        elif not steps and not is_over:
            raise BrokenPromiseError("nothing goes on")
        if is_over and (state.reader == "ended") != state.is_cancelled:
            raise BrokenPromiseError("it is neither cancelled nor published")
        yield from steps

    def _cancel(self, state: State) -> Iterator[tuple[str, State]]:
        match state.transaction:
            case "new" if self.reads_clock_first and state.is_early is None:
                yield "reads the clock", state._replace(is_early=not state.is_due)
            case "new":
                yield "locks", state._replace(transaction="locked", has_lock=True)
            case "locked" if state.is_early is None:
                yield "reads the clock", state._replace(is_early=not state.is_due)
            case "locked":
                what = "inserted" if state.is_early else "refused"
                yield what, state._replace(transaction=what)
            case "inserted":
                visible = state._replace(transaction="visible", is_cancelled=True)
                yield "commits", visible
                yield "rolls back", state._replace(transaction="refused")
            case "refused" | "visible":
                yield "unlocks", state._replace(transaction="over", has_lock=False)

    def _read(self, state: State) -> Iterator[tuple[str, State]]:
        match state.reader:
            case "searches" if state.is_due:
                yield "finds it", state._replace(reader="found", saw=state.is_cancelled)
            case "found" if state.has_lock and self.locks:
                # It isn't a step on, but the end of a search.
                yield "finds it held", state._replace(reader="searches", saw=False)
            case "found":
                yield "gets the lock", state._replace(reader="free")
            case "free":
                saw = state.is_cancelled if self.looks_again else state.saw
                yield "looks", state._replace(reader="ended" if saw else "due")
            case "due":
                yield "publishes it", state._replace(reader="published")
