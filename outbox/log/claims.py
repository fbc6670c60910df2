"""Where claims start: at the positions, or at the floors of transactions that ended.

Rows that commit late are found by the claims themselves, which start at the floor of
the transaction; only if that is far below the position, a refresh must find them.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pillarbox.outbox.array_literal import moment_array, plain_array
from pillarbox.outbox.log.hidden import Floors, Hidden
from pillarbox.outbox.log.lanes.lane import BEGINNING, Lane
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Part, Progress
from pillarbox.outbox.log.view import ReadView

FAR: Final = 100_000
"""A late row further above its floor than this is searched by its transaction."""
NO_END: Final = 2**63 - 1
_UNKNOWN: Final = (-1, 0)
_SLACK: Final = 256
"""The sequence may be set back by this many numbers without a claim noticing.

It can have passed its old value again before the next claim. So each claim reads this
many numbers again; most of them belong to other lanes.
"""


class ClaimPlan(NamedTuple):
    """The parameters of a claim, and its limits.

    Attributes:
        far: transactions whose end would make the claim start far below a position, or
            in other days, with the lanes. If one has ended in its snapshot, the lanes
            must be refreshed first.
        near: the other transactions whose end makes the claim start lower.
        starts: where it starts in each lane if none of them has ended.
        assigned: the last seq assigned before, and the file of the sequence.
        has_floors: whether each lane has a floor.
    """

    parameters: dict[str, Any]
    far: Sequence[tuple[Hidden, Sequence[Lane]]]
    near: Sequence[Hidden]
    starts: Mapping[int, int]
    assigned: tuple[int, int]
    has_floors: bool

    def find_stale(self, snapshot: Snapshot) -> list[Lane]:
        """Return the lanes to refresh before a claim with this snapshot counts."""
        return [
            lane
            for hidden, lanes in self.far
            if hidden.find_floor(snapshot) is not None
            for lane in lanes
        ]

    def contradicts(self, snapshot: Snapshot, lowest: Mapping[int, int]) -> bool:
        """Whether rows were read that only a sequence that was set back can number."""
        # A claim begins a bit lower than it must, so it can find rows of far ones, too.
        hidden = (*self.near, *(hidden for hidden, _ in self.far))
        floors = [each.find_floor(snapshot) for each in hidden]
        floor = min([one for one in floors if one is not None], default=NO_END)
        return any(seq <= min(self.starts[n], floor) for n, seq in lowest.items())


class Claims:
    """The claims of a reader. For one event loop.

    Attributes:
        base: the last seq of rows that came from another cluster; -1: none.
        assigned: the last seq assigned at the last claim or search, and the file of the
            sequence.
    """

    def __init__(self) -> None:
        self.base = -1
        self.assigned = _UNKNOWN
        self._floors = Floors()
        self._ceiling = NO_END
        """The last seq drawn, if rows have higher ones: the sequence was set back, or
        the table's owner has chosen a seq. Then the seqs of rows say nothing about the
        floors of transactions."""

    def start_over(
        self, ceiling: int = NO_END, assigned: tuple[int, int] = _UNKNOWN
    ) -> None:
        """Forget which seqs were assigned by when, as they may be assigned again."""
        self._floors, self._ceiling, self.assigned = Floors(), ceiling, assigned

    def is_stale(
        self,
        plan: ClaimPlan,
        view: ReadView,
        lowest: Mapping[int, int],
        *,
        is_fresh: bool,
    ) -> bool:
        """Whether a claim may have missed rows: then refresh the lanes, and repeat it.

        Args:
            lowest: the lowest seq that it has read of each lane.
            is_fresh: whether the lanes were refreshed in the same snapshot, which
                doesn't show that the sequence was set back and has caught up.
        """
        if self._ceiling == NO_END and plan.contradicts(view.snapshot, lowest):
            # The refresh takes all lanes over.
            self.assigned = NO_END, -1
            return True
        if is_fresh:
            return False
        is_known = plan.has_floors and view.follows(*plan.assigned)
        return not is_known or bool(plan.find_stale(view.snapshot))

    def is_beyond(self, lanes: Iterable[Lane], seq: int) -> bool:
        """Whether rows below the positions may belong to transactions without an id.

        Args:
            seq: the last seq assigned.
        """
        positions = [
            position.up_to
            for lane in lanes
            if lane.progress is not None
            for _, position in lane.progress.days
        ]
        is_beyond = max(positions, default=-1) > seq and self._ceiling == NO_END
        if is_beyond:
            self._floors = Floors()
        if is_beyond or self._ceiling < NO_END:
            self._ceiling = seq
        return is_beyond

    def note(self, view: ReadView, seq: int) -> None:
        """Record what a claim has seen, and the last row that it has read."""
        self.assigned = max((view.seq, view.file), self.assigned)
        # The table's owner can have chosen a seq that isn't assigned yet.
        if 0 <= seq <= max(view.seq, 0):
            self._floors = self._floors.note(view.next_xid, min(seq, self._ceiling))

    def forget(self, lanes: Iterable[Lane]) -> None:
        """Forget what only concerns transactions that have ended for all lanes."""
        known = [lane.progress for lane in lanes if lane.progress is not None]
        if known:
            self._floors = self._floors.forget(min(p.snapshot.xmin for p in known))

    def plan(self, lanes: Sequence[Lane]) -> ClaimPlan:
        """Return the plan of a claim of these lanes."""
        read = [(it, progress) for it in lanes if (progress := it.progress) is not None]
        near, far = self._hidden(read)
        reading = [(lane.number, progress, progress.parts()) for lane, progress in read]
        firsts = [parts[0] for _, _, parts in reading]
        # Seqs below those of transactions that had no id; most lanes have the same one.
        known = {
            xid: self._floors.of(xid) for xid in {p.next_xid for _, p, _ in reading}
        }
        lowest = [
            # Otherwise it is read to its end as of an older snapshot.
            known[progress.next_xid] if progress.as_of is None else NO_END
            for _, progress, _ in reading
        ]
        starts: dict[int, int] = {}
        for number, _, parts in reading:
            starts[number] = parts[0].start
            for part in parts[1:]:
                starts[number] = min(starts[number], part.start)
        several = [
            (number, part._replace(start=min(part.start, floor - _SLACK)))
            for (number, _, parts), floor in zip(reading, lowest, strict=True)
            if len(parts) > 1
            for part in parts
        ]
        floors: dict[int, int] = {}
        for hidden in near:
            floors.update(hidden.open)
        parameters = {
            "lanes": plain_array(starts),
            "starts": plain_array(
                [
                    min(floor - _SLACK, start)
                    for start, floor in zip(starts.values(), lowest, strict=True)
                ]
            ),
            "up_tos": plain_array(
                [
                    parts[0].position.up_to if len(parts) == 1 else None
                    for _, _, parts in reading
                ]
            ),
            "snapshots": plain_array(
                _quoted([part.position.snapshot for part in firsts])
            ),
            "as_ofs": plain_array(
                _quoted([progress.as_of for _, progress, _ in reading])
            ),
            **(_several(several) if several else _ONE_PART_EACH),
            "hidden": plain_array(floors),
            "floors": plain_array(floor - _SLACK for floor in floors.values()),
            "since": str(min((hidden.since for hidden in near), default=NO_END)),
            "floor": min((hidden.floor for hidden in near), default=NO_END) - _SLACK,
            "base": self.base,
            "oldest": min([part.oldest for part in firsts], default=BEGINNING),
            "newest": max(
                [parts[-1].newest for _, _, parts in reading], default=BEGINNING
            ),
        }
        has_floors = min(lowest, default=0) >= 0
        return ClaimPlan(parameters, far, near, starts, self.assigned, has_floors)

    def _hidden(
        self, lanes: Iterable[tuple[Lane, Progress]]
    ) -> tuple[list[Hidden], list[tuple[Hidden, Sequence[Lane]]]]:
        """Return the transactions whose end makes claims start lower, near and far."""
        near: list[Hidden] = []
        far: list[tuple[Hidden, Sequence[Lane]]] = []
        for same in _alike(lanes):
            lane, progress = same[0]
            hidden = progress.find_hidden(self._floors)
            if hidden is not None:
                top = max(position.up_to for _, position in progress.days)
                reached, others = hidden.split(top - FAR, lane.taken_at)
                near.append(reached)
                far.append((others, [it for it, _ in same]))
        return near, far

    def has_floor(self, progress: Progress) -> bool:
        """Whether a seq is known below those of transactions that had no id.

        After the sequence was set back, theirs can be lower.
        """
        return progress.as_of is not None or self._floors.of(progress.next_xid) >= 0


def _alike(
    lanes: Iterable[tuple[Lane, Progress]],
) -> Iterable[Sequence[tuple[Lane, Progress]]]:
    """Group lanes whose claims miss the same transactions."""
    groups: dict[Hashable, list[tuple[Lane, Progress]]] = {}
    for lane, progress in lanes:
        # Hashing snapshots takes longer than treating a group as two.
        key = id(progress.snapshot), id(progress.as_of), lane.taken_at
        groups.setdefault(key, []).append((lane, progress))
    return groups.values()


def _several(parts: Sequence[tuple[int, Part]]) -> dict[str, str]:
    """Return the parameters of lanes that are read in several parts."""
    return {
        "part_lanes": plain_array(number for number, _ in parts),
        "part_oldest": moment_array(part.oldest for _, part in parts),
        "part_newest": moment_array(part.newest for _, part in parts),
        "part_starts": plain_array(part.start for _, part in parts),
        "part_up_tos": plain_array(part.position.up_to for _, part in parts),
        "part_snapshots": plain_array(
            _quoted([part.position.snapshot for _, part in parts])
        ),
    }


def _quoted(snapshots: Iterable[Snapshot | None]) -> Sequence[str | None]:
    """Return their text forms, which have commas. Most lanes have the same one."""
    texts: list[str | None] = []
    last: Snapshot | None = None
    text: str | None = None
    for snapshot in snapshots:
        if snapshot is not last:
            last, text = snapshot, None if snapshot is None else f'"{snapshot}"'
        texts.append(text)
    return texts


_ONE_PART_EACH: Final = _several(())


def arrays_of(positions: Collection[Position]) -> dict[str, str]:
    """Return the columns of positions."""
    return {
        "up_tos": plain_array([it.up_to for it in positions]),
        "snapshots": plain_array(_quoted([it.snapshot for it in positions])),
        "late_up_tos": plain_array([it.late_up_to for it in positions]),
        "late_snapshots": plain_array(_quoted([it.late_snapshot for it in positions])),
    }
