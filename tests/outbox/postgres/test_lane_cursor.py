"""How far the floor of a lane rises, and what lowers it."""

from datetime import UTC, datetime, timedelta

from outbox.postgres.lane_cursor import LaneCursor, Snapshot
from relay.lanes.lane import Lane

QUIET = Snapshot(xmin=7, next_xid=7)
"""A snapshot taken while no transaction is open."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def looked(cursor: LaneCursor, *seqs: int) -> None:
    """Finish a look at each of these seqs, while no transaction is open."""
    for seq in seqs:
        cursor.looked(seq, QUIET)


def test_a_snapshot_counts_the_xids_assigned_since_xmin() -> None:
    assert Snapshot.read("4294967296:3") == Snapshot(4294967296, 4294967299)


def test_the_floor_rises_once_everything_open_at_the_first_look_has_ended() -> None:
    cursor = LaneCursor()
    cursor.looked(10, Snapshot(xmin=5, next_xid=9))
    assert cursor.floor == -1
    cursor.looked(20, Snapshot(xmin=8, next_xid=12))
    assert cursor.floor == -1

    cursor.looked(30, Snapshot(xmin=9, next_xid=14))

    assert cursor.floor == 10


def test_the_floor_does_not_rise_above_the_end_of_the_later_look() -> None:
    cursor = LaneCursor()
    looked(cursor, 10, 5)
    assert cursor.floor == 5


def test_a_later_look_moves_past_rows_that_a_short_look_left() -> None:
    cursor = LaneCursor()
    cursor.looked(10, Snapshot(xmin=5, next_xid=9))
    cursor.looked(4, Snapshot(xmin=9, next_xid=20))
    assert cursor.floor == 4

    # Transactions that began later don't affect rows that were read before them.
    cursor.looked(12, Snapshot(xmin=9, next_xid=20))

    assert cursor.floor == 10


def test_a_rewind_during_a_look_is_not_undone_by_it() -> None:
    cursor = LaneCursor()
    looked(cursor, 10)

    cursor.rewind(5)
    cursor.rewind(7)
    looked(cursor, 20)

    assert cursor.floor == -1


def test_a_rewind_between_looks_lowers_the_floor_once() -> None:
    cursor = LaneCursor()
    looked(cursor, 20, 30)
    assert cursor.floor == 20

    cursor.rewind(5)
    assert cursor.floor == 4
    looked(cursor, 40)
    assert cursor.floor == 4
    looked(cursor, 60)
    assert cursor.floor == 40


def test_a_rewind_lowers_the_time_bound_too() -> None:
    lane = Lane(16)
    lane.refresh(None, NOW)

    lane.rewind(5, NOW - timedelta(days=3))

    assert lane.oldest == NOW - timedelta(days=3)


def test_a_running_look_at_the_head_does_not_undo_a_rewind_of_the_time_bound() -> None:
    lane = Lane(16)
    lane.rewind(5, NOW - timedelta(days=3))

    lane.refresh(None, NOW)

    assert lane.oldest <= NOW - timedelta(days=3)


def test_a_head_below_the_floor_lowers_it() -> None:
    lane = Lane(16)
    looked(lane.cursor, 20, 30)
    lane.picked()

    lane.refresh((12, NOW - timedelta(days=3)), NOW)

    assert lane.floor == 11
    assert lane.oldest <= NOW - timedelta(days=3)
