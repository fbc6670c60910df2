"""The positions of a lane advance day by day, and one of two owners can settle."""

from collections.abc import Sequence
from datetime import UTC, datetime

from outbox.log.position import Position, Snapshot
from outbox.log.progress import Day, Progress, Stored
from outbox.log.window import MOST_AGAIN, Window

FIRST, SECOND, THIRD = (
    Day(datetime(2026, 1, day, tzinfo=UTC), datetime(2026, 1, day + 1, tzinfo=UTC))
    for day in (1, 2, 3)
)
OLD, NEW, NEWEST = Snapshot(10, 10), Snapshot(20, 20), Snapshot(30, 30)
UNREAD = {FIRST: Position(), SECOND: Position()}


def take_over(
    days: dict[Day, Position], stored: Sequence[Stored] = (), late: int | None = None
) -> Progress:
    return Progress.take_over(days, stored, OLD, 10, late)


def test_days_with_the_same_position_are_read_as_one() -> None:
    progress = take_over(UNREAD, [Stored(FIRST, 1, Position(7, OLD))])
    assert [part.start for part in progress.parts()] == [7, -1]
    progress = progress.claimed(9, NEW, 20, is_cut=False)
    (part,) = progress.parts()
    assert (part.oldest, part.newest) == (FIRST.starts_at, SECOND.ends_at)
    assert part.position == Position(9, NEW)


def test_a_settlement_stores_the_days_of_its_messages() -> None:
    progress = take_over(UNREAD, [Stored(SECOND, 4, Position(7, OLD))])
    _, rows = progress.claimed(9, NEW, 20, is_cut=False).settle([SECOND])
    assert rows == [Stored(SECOND, 5, Position(9, NEW))]


def test_two_owners_cannot_both_settle_even_messages_of_different_days() -> None:
    stored: list[Stored] = []
    for _ in range(2):
        former, owner = (take_over(UNREAD, stored) for _ in range(2))
        _, late = former.claimed(9, OLD, 10, is_cut=True).settle([FIRST])
        _, rows = owner.claimed(8, NEW, 20, is_cut=True).settle([SECOND])
        assert {(row.day, row.number) for row in late} & {
            (row.day, row.number) for row in rows
        }
        stored = rows


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
    progress = take_over(UNREAD | {SECOND: Position(8, OLD)}, stored, late=7)
    assert [part.start for part in progress.parts()] == [5, 6]
    progress = progress.claimed(-1, NEWEST, 30, is_cut=False)
    assert [part.start for part in progress.parts()] == [6]
    progress = progress.claimed(-1, NEWEST, 30, is_cut=False)
    assert [part.start for part in progress.parts()] == [9]


def test_a_day_that_is_read_later_keeps_its_own_position() -> None:
    progress = take_over({SECOND: Position()})
    progress = progress.claimed(9, OLD, 10, is_cut=False)
    days = {FIRST: Position(3, OLD), SECOND: Position(), THIRD: Position()}
    read = dict(progress.read_days(days, None).days)
    assert read == {
        FIRST: Position(3, OLD),
        SECOND: Position(9, OLD),
        THIRD: Position(),
    }


def test_a_delivery_that_is_held_blocks_the_others_only_so_long() -> None:
    window = Window(take_over(UNREAD))
    window.claimed(
        [(seq, FIRST) for seq in range(MOST_AGAIN + 2)], 257, OLD, 10, is_cut=False
    )
    for seq in range(2, MOST_AGAIN + 2):
        assert window.blocking is None
        window.ended(seq)
    assert window.blocking == 0
    # The second one is held as well, so the position stops below it.
    result = window.settle(0)
    assert result is not None
    stored, rows = result
    assert rows == [Stored(FIRST, 1, Position(0, OLD))]
    window.settled(stored, 0)
    assert window.blocking == 1


def test_a_position_waits_rather_than_take_a_third_part() -> None:
    late = Position(9, OLD, 6, NEW)
    window = Window(take_over(UNREAD, [Stored(FIRST, 1, late)]))
    window.claimed([(7, FIRST)], 7, NEWEST, 30, is_cut=False)
    window.claimed([(3, FIRST), (4, FIRST)], 4, NEWEST, 30, is_cut=False)
    window.ended(3)
    assert window.settle() is None
    window.ended(4)
    window.ended(7)
    result = window.settle()
    assert result is not None
    assert result[1] == [Stored(FIRST, 2, Position(9, NEWEST))]
