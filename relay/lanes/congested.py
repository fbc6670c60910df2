"""Claims from lanes with more blocked keys than a claim can carry.

`relay/lanes/lane.py` explains the idea. The blocked keys stay in the database. A look
examines a bounded number of ready rows and finds which of them may be claimed, and how
far it got. The statements of a look and the claim that follows must see the same
snapshot, so they share a transaction.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeAlias
from uuid import UUID

from outbox.postgres.connection import Connection
from outbox.postgres.lane_cursor import Snapshot
from outbox.postgres.sql_files import load
from relay.lanes.lane import BEGINNING, SKEW, CatchUp, Lane
from relay.lanes.xid_horizon import XidHorizon

# In all lanes of a look together. This takes some 20 ms, for which others wait.
_MOST_EXAMINED: Final = 10_000
# If the first refusal is older, claims look for refused messages on every day.
_DAYS: Final = 40
_NO_END: Final = 2**63 - 1

Seqs: TypeAlias = dict[int, list[int]]


@dataclass(slots=True)
class Look:
    """What may be claimed from some lanes, and how far they were examined.

    Attributes:
        oldest: no examined row is older.
        moves: how often each catch-up had been set back when the look began.
        snapshot: the look's.
        passed: by lane, seqs below the floor, of keys that catch up.
        next: by lane, seqs above the floor.
        position: how far each lane's catch-up got; None: to the floor.
        reached: how far above the floor each lane was examined.
        exhausted: lanes with nothing ready above that.
    """

    oldest: datetime
    moves: dict[int, int]
    snapshot: Snapshot = field(default=Snapshot(0, 0))
    passed: Seqs = field(default_factory=dict)
    next: Seqs = field(default_factory=dict)
    position: dict[int, int | None] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    exhausted: set[int] = field(default_factory=set)

    def wanted(self) -> Seqs:
        """Return all seqs that may be claimed, by lane."""
        return {
            number: [*self.passed.get(number, ()), *self.next.get(number, ())]
            for number in self.passed | self.next
        }

    def cut(self, claimed: Iterable[int]) -> None:
        """Take back what was not claimed because the byte limit had been reached."""
        taken = set(claimed)
        for number, seqs in self.passed.items():
            if left := [seq for seq in seqs if seq not in taken]:
                self.position[number] = left[0] - 1
        for number, seqs in self.next.items():
            if left := [seq for seq in seqs if seq not in taken]:
                self.reached[number] = left[0] - 1
                self.exhausted.discard(number)


async def look_into(
    connection: Connection,
    lanes: Sequence[Lane],
    *,
    oldest: datetime,
    newest: datetime,
    aside: Sequence[UUID],
    max_rows: int,
) -> Look:
    """Examine congested lanes until `max_rows` messages are found.

    Keys that catch up get half of them, so that neither half holds up the other.
    """
    for lane in lanes:
        if lane.catch_up is not None and lane.catch_up.arrived:
            lane.end_catch_up()
    behind = [(lane, up) for lane in lanes if (up := lane.catch_up) is not None]
    look = Look(
        min([oldest, *(up.oldest for _, up in behind)]),
        {lane.number: up.moves for lane, up in behind},
    )
    bounds = {
        "newest": newest,
        "aside": aside,
        "max_examined": _share(lanes),
        "refused_since": min(lane.refused_since for lane in lanes),
    }
    if behind:
        await _look_below(
            connection,
            look,
            behind,
            bounds | {"oldest": look.oldest},
            max_rows=max(1, max_rows // 2),
        )
    found = sum(map(len, look.passed.values()))
    await _look_above(
        connection,
        look,
        lanes,
        bounds | {"oldest": oldest},
        max_rows=max(1, max_rows - found),
    )
    return look


def note(look: Look, lanes: Sequence[Lane], *, stale: Sequence[Lane]) -> list[Lane]:
    """Move floors and catch-ups as far as the look got; return the lanes it reached.

    Args:
        stale: lanes that were surveyed with the same snapshot before.
    """
    came_to = []
    for lane in lanes:
        number = lane.number
        up = lane.catch_up
        if (
            up is not None
            and number in look.position
            and look.moves.get(number) == up.moves
        ):
            position = look.position[number]
            up.arrived = position is None
            up.position = max(up.position, lane.floor if position is None else position)
        if number not in look.reached and number not in look.exhausted:
            continue
        came_to.append(lane)
        if number in look.reached and lane not in stale:
            lane.looked_up_to(look.reached[number], look.snapshot)
        if (
            number in look.exhausted
            and not look.next.get(number)
            and lane.catch_up is None
        ):
            lane.found_empty()
    return came_to


async def survey(
    connection: Connection,
    lanes: Sequence[Lane],
    horizon: XidHorizon,
    now: datetime,
    given_out: int,
) -> None:
    """Update congested lanes from the database.

    Rows below the floor that were made ready by hand are looked for piece by piece,
    from one survey to the next.
    """
    refused_since = await _find_first_refusal(connection, lanes)
    positions = [
        lane.surveyed if lane.congested and lane.surveyed < lane.floor else -1
        for lane in lanes
    ]
    floors = [lane.floor for lane in lanes]
    catching_up = [up for lane in lanes if (up := lane.catch_up) is not None]
    cursor = await connection.execute(
        load("relay", "survey_congested"),
        {
            "lanes": [lane.number for lane in lanes],
            "positions": positions,
            "floors": floors,
            **_who(catching_up),
            "refused_since": refused_since,
            "max_examined": _share(lanes),
        },
    )
    by_number = {lane.number: lane for lane in lanes}
    rows = await cursor.fetchall()
    reach = await _find_reach(
        connection,
        lanes,
        positions,
        floors,
        {"oldest": BEGINNING, "newest": now + SKEW, "max_examined": _share(lanes)},
    )
    for number, first, seq, created_at, text in rows:
        lane = by_number[number]
        snapshot = Snapshot.read(text)
        since = min(now, horizon.since(snapshot.xmin))
        stray = None if seq is None else (seq, created_at)
        lane.refresh_congested(first, stray, since, refused_since, given_out, snapshot)
        count, last = reach[number]
        lane.surveyed = last if count >= _share(lanes) and last is not None else -1


async def _look_below(
    connection: Connection,
    look: Look,
    behind: Sequence[tuple[Lane, CatchUp]],
    bounds: Mapping[str, Any],
    *,
    max_rows: int,
) -> None:
    lanes = [lane for lane, _ in behind]
    catch_ups = [up for _, up in behind]
    positions = [up.position for up in catch_ups]
    floors = [lane.floor for lane in lanes]
    cursor = await connection.execute(
        load("relay", "find_returning"),
        {
            "lanes": [lane.number for lane in lanes],
            "positions": positions,
            "floors": floors,
            **_who(catch_ups),
            "max_rows": max_rows,
            **bounds,
        },
    )
    look.passed, examined = _by_lane(await cursor.fetchall(), lanes, max_rows)
    reach = await _find_reach(connection, lanes, positions, floors, bounds)
    for lane in lanes:
        number = lane.number
        if number not in examined:
            if seqs := look.passed.get(number):
                look.position[number] = seqs[-1]
            continue
        count, last = reach[number]
        look.position[number] = last if count >= bounds["max_examined"] else None


async def _look_above(
    connection: Connection,
    look: Look,
    lanes: Sequence[Lane],
    bounds: Mapping[str, Any],
    *,
    max_rows: int,
) -> None:
    floors = [lane.floor for lane in lanes]
    cursor = await connection.execute(
        load("relay", "find_unblocked"),
        {
            "lanes": [lane.number for lane in lanes],
            "floors": floors,
            "returning": [
                key for lane in lanes if lane.catch_up for key in lane.catch_up.keys
            ],
            "max_rows": max_rows,
            **bounds,
        },
    )
    look.next, examined = _by_lane(await cursor.fetchall(), lanes, max_rows)
    ends = [_NO_END] * len(lanes)
    reach = await _find_reach(connection, lanes, floors, ends, bounds)
    cursor = await connection.execute(load("relay", "read_snapshot"))
    ((text,),) = await cursor.fetchall()
    look.snapshot = Snapshot.read(text)
    for lane in lanes:
        number = lane.number
        if number not in examined:
            if seqs := look.next.get(number):
                look.reached[number] = seqs[-1]
            continue
        count, last = reach[number]
        if last is not None:
            look.reached[number] = last
        if count < bounds["max_examined"]:
            look.exhausted.add(number)


def _share(lanes: Sequence[Lane]) -> int:
    return math.ceil(_MOST_EXAMINED / len(lanes))


def _by_lane(
    rows: Sequence[tuple[int, int]], lanes: Sequence[Lane], max_rows: int
) -> tuple[Seqs, set[int]]:
    """Group what was found by lane; return also the lanes that were examined in full.

    If enough was found, that excludes the lane of the last row and those after it.
    """
    found: Seqs = {}
    for number, seq in rows:
        found.setdefault(number, []).append(seq)
    examined = [lane.number for lane in lanes]
    if len(rows) >= max_rows:
        examined = examined[: examined.index(rows[-1][0])]
    return found, set(examined)


async def _find_reach(
    connection: Connection,
    lanes: Sequence[Lane],
    starts: Sequence[int],
    ends: Sequence[int],
    bounds: Mapping[str, Any],
) -> dict[int, tuple[int, int | None]]:
    cursor = await connection.execute(
        load("relay", "find_reach"),
        {
            "lanes": [lane.number for lane in lanes],
            "starts": starts,
            "ends": ends,
            "oldest": bounds["oldest"],
            "newest": bounds["newest"],
            "max_examined": bounds["max_examined"],
        },
    )
    return {number: (count, last) for number, count, last in await cursor.fetchall()}


async def _find_first_refusal(
    connection: Connection, lanes: Sequence[Lane]
) -> datetime:
    cursor = await connection.execute(
        load("relay", "find_first_refusal"),
        {"lanes": [lane.number for lane in lanes], "max_days": _DAYS},
    )
    ((first_day, lies_further_back),) = await cursor.fetchall()
    if first_day is None or lies_further_back:
        return BEGINNING
    day: datetime = first_day
    return day


def _who(catch_ups: Iterable[CatchUp]) -> dict[str, list[Any]]:
    catch_ups = list(catch_ups)
    return {
        "returning": [key for up in catch_ups for key in up.keys],
        "readied": [seq for up in catch_ups for seq in up.readied],
    }
