"""The positions of a lane advance day by day.

That no row is skipped, and that only one of two owners can settle, is proved by the
models of a log.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from pillarbox.outbox.log.position import NOTHING, Position, Snapshot
from pillarbox.outbox.log.progress import Day, Progress, Stored
from pillarbox.outbox.log.window import Place, Window

FIRST, SECOND, THIRD = (
    Day(datetime(2026, 1, day, tzinfo=UTC), datetime(2026, 1, day + 1, tzinfo=UTC))
    for day in (1, 2, 3)
)
OLD, NEW, NEWEST = Snapshot(10, 10), Snapshot(20, 20), Snapshot(30, 30)
UNREAD = {FIRST: Position(), SECOND: Position()}


def take_over(
    days: dict[Day, Position],
    stored: Sequence[Stored] = (),
    lowest: dict[Day, int] | None = None,
) -> Progress:
    if lowest is None:
        lowest = dict.fromkeys(days, 10)
    return Progress.take_over(days, stored, OLD, 10, lowest)


def test_days_with_the_same_position_are_read_as_one() -> None:
    progress = take_over(UNREAD, [Stored(FIRST, 1, Position(7, OLD))])
    assert [part.start for part in progress.parts()] == [7, -1]
    progress = progress.claimed(9, NEW, 20, is_cut=False)
    (part,) = progress.parts()
    assert (part.oldest, part.newest) == (FIRST.starts_at, SECOND.ends_at)
    assert part.position == Position(9, NEW)


def test_a_late_part_is_stored_until_it_is_complete() -> None:
    progress = take_over(
        UNREAD,
        [Stored(FIRST, 1, Position(9, OLD)), Stored(SECOND, 1, Position(9, OLD))],
    )
    cut = progress.claimed(5, NEW, 20, is_cut=True)
    progress, rows = cut.settle([FIRST])
    assert rows[0] == Stored(FIRST, 2, Position(9, OLD, 5, NEW))
    # Claims go on as of the same snapshot.
    progress, rows = progress.claimed(7, NEWEST, 30, is_cut=True).settle([SECOND])
    assert {row.position for row in rows} == {Position(9, OLD, 7, NEW)}
    assert take_over(UNREAD, rows).as_of == NEW
    progress, rows = progress.claimed(8, NEWEST, 30, is_cut=False).settle([SECOND])
    assert {row.position for row in rows} == {Position(9, NEW)}
    assert progress.as_of is None


def test_claims_start_at_a_late_row_until_one_has_looked_as_of_now() -> None:
    stored = [Stored(FIRST, 1, Position(9, OLD, 5, NEW))]
    progress = take_over(
        UNREAD | {SECOND: Position(8, OLD)}, stored, {FIRST: 10, SECOND: 7}
    )
    assert [part.start for part in progress.parts()] == [5, 6]
    progress = progress.claimed(-1, NEWEST, 30, is_cut=False)
    assert [part.start for part in progress.parts()] == [6]
    progress = progress.claimed(-1, NEWEST, 30, is_cut=False)
    assert [part.start for part in progress.parts()] == [9]


def test_days_without_an_uncovered_row_continue_together() -> None:
    days = {FIRST: Position(), SECOND: Position(), THIRD: Position()}
    stored = [
        Stored(FIRST, 3, Position(7, NOTHING)),
        Stored(SECOND, 4, Position(9, OLD)),
    ]
    assert dict(take_over(days, stored, {THIRD: 2}).days) == {
        FIRST: Position(9, OLD),
        SECOND: Position(9, OLD),
        THIRD: Position(),
    }


def test_the_first_settlement_stores_all_days_that_claims_read() -> None:
    _, rows = take_over(UNREAD).claimed(9, OLD, 10, is_cut=True).settle([SECOND])
    assert [row.day for row in rows] == [FIRST, SECOND]
    stored = [Stored(SECOND, 1, Position(9, OLD))]
    _, rows = take_over(UNREAD, stored).claimed(10, NEW, 20, is_cut=True).settle([])
    assert [row.day for row in rows] == [SECOND]


def test_the_fence_moves_to_today() -> None:
    progress = take_over(UNREAD, [Stored(FIRST, 4, Position(9, OLD))])
    moved = progress.move_fence(SECOND)
    assert moved is not None
    after, rows = moved
    assert [(row.day, row.number) for row in rows] == [(FIRST, 5), (SECOND, 5)]
    assert after.fence == {SECOND}
    assert after.move_fence(SECOND) is None


def test_a_moment_is_of_the_day_that_has_it() -> None:
    progress = take_over({FIRST: Position(), THIRD: Position()})
    assert progress.day_of(FIRST.starts_at) == FIRST
    assert progress.day_of(SECOND.starts_at) is None
    assert progress.day_of(THIRD.ends_at) is None


def at(seq: int) -> Place:
    return seq, FIRST.starts_at


def test_a_delivery_that_is_held_blocks_the_others_only_so_long() -> None:
    window = Window(take_over(UNREAD))
    window.claimed(map(at, range(6)), 257, OLD, 10, is_cut=False)
    for seq in (2, 4):
        window.ended(at(seq))
    assert window.passed_by == [at(0), at(1), at(3)]
    assert [window.count_behind(at(seq)) for seq in (0, 3)] == [2, 1]
    assert window.settle() is None
    # The second one is held as well, so the position stops below it.
    assert window.settle([at(1)]) is None
    result = window.settle([at(0)])
    assert result is not None
    stored, rows, covered = result
    assert {row.position for row in rows} == {Position(0, OLD)}
    assert covered == {FIRST: 1}
    window.settled(stored, [at(0)])
    assert window.passed_by == [at(1), at(3)]


def test_a_repeated_takeover_changes_only_the_days_that_are_read() -> None:
    window = Window(take_over({FIRST: Position()}))
    window.claimed([at(3), at(4)], 4, NEW, 20, is_cut=False)
    window.ended(at(3))
    window.read_days(take_over(UNREAD))
    assert dict(window.read.days)[FIRST] == Position(4, NEW)
    assert at(3) in window
    assert at(4) in window
    assert [day for day, _ in window.stored.days] == [FIRST, SECOND]


def test_the_positions_of_all_days_are_stored_on_request() -> None:
    window = Window(take_over(UNREAD, [Stored(FIRST, 1, Position(2, OLD))]))
    window.claimed([], 9, NEW, 20, is_cut=False)
    assert window.settle() is None
    result = window.settle(all_days=True)
    assert result is not None
    assert [(row.day, row.position) for row in result[1]] == [
        (FIRST, Position(9, NEW)),
        (SECOND, Position(9, NEW)),
    ]


def test_a_position_waits_rather_than_take_a_third_part() -> None:
    late = Position(9, OLD, 6, NEW)
    window = Window(take_over(UNREAD, [Stored(FIRST, 1, late)]))
    window.claimed([at(7)], 7, NEWEST, 30, is_cut=False)
    window.claimed([at(3), at(4)], 4, NEWEST, 30, is_cut=False)
    window.ended(at(3))
    assert window.settle() is None
    window.ended(at(4))
    window.ended(at(7))
    result = window.settle()
    assert result is not None
    assert result[1] == [Stored(FIRST, 2, Position(9, NEWEST))]
