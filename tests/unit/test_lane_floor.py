"""The floor of a lane: how far it rises, and what lowers it."""

from datetime import UTC, datetime, timedelta

from relay.lanes.lane import Lane, Snapshot

QUIET = Snapshot(7, 7)
BUSY = Snapshot(5, 7)


def looked(lane: Lane, *seqs: int) -> None:
    """Look that often, each time after all that was open had ended."""
    for seq in seqs:
        lane.looked_up_to(seq, QUIET)


def test_the_floor_rises_when_a_later_look_has_seen_all_that_was_open() -> None:
    lane = Lane(16)
    lane.looked_up_to(10, BUSY)
    lane.looked_up_to(20, Snapshot(5, 9))
    assert lane.floor == -1

    lane.looked_up_to(30, Snapshot(8, 11))
    assert lane.floor == -1
    lane.looked_up_to(40, Snapshot(9, 11))
    assert lane.floor == 10


def test_what_had_begun_above_the_end_of_a_snapshot_is_waited_for() -> None:
    lane = Lane(16)
    # 7 is open, but nothing above it has ended, so this snapshot does not know of it.
    lane.looked_up_to(10, Snapshot(7, 7))
    lane.looked_up_to(20, Snapshot(7, 9))
    lane.looked_up_to(30, Snapshot(7, 9))
    assert lane.floor == -1

    lane.looked_up_to(30, Snapshot(9, 9))
    assert lane.floor == 10


def test_the_floor_does_not_rise_above_what_the_later_look_came_to() -> None:
    lane = Lane(16)
    looked(lane, 10, 10, 5)
    assert lane.floor == 5


def test_a_rewind_during_a_claim_is_not_undone_by_it() -> None:
    lane = Lane(16)
    looked(lane, 10, 15)

    lane.rewind(5, datetime.now(UTC))
    lane.rewind(7, datetime.now(UTC))
    looked(lane, 20)

    assert lane.floor == -1


def test_a_rewind_between_claims_lowers_the_floor_once() -> None:
    lane = Lane(16)
    looked(lane, 20, 30, 30)
    assert lane.floor == 20

    lane.rewind(5, datetime.now(UTC))
    assert lane.floor == 4
    lane.picked()
    looked(lane, 40, 50)
    assert lane.floor == 4
    looked(lane, 60)
    assert lane.floor == 40


def test_a_rewind_lowers_the_bound_in_time_too() -> None:
    lane = Lane(16)
    now = datetime.now(UTC)
    lane.acquainted(set(), None, now)

    lane.rewind(5, now - timedelta(days=3))

    assert lane.oldest == now - timedelta(days=3)


def test_a_look_at_the_head_under_way_does_not_undo_a_rewind_in_time() -> None:
    lane = Lane(16)
    now = datetime.now(UTC)
    lane.rewind(5, now - timedelta(days=3))

    lane.acquainted(set(), None, now)

    assert lane.oldest <= now - timedelta(days=3)


def test_a_head_below_the_floor_lowers_it() -> None:
    lane = Lane(16)
    now = datetime.now(UTC)
    looked(lane, 20, 30, 30)
    lane.picked()

    lane.acquainted(set(), (12, now - timedelta(days=3)), now)

    assert lane.floor == 11
    assert lane.oldest <= now - timedelta(days=3)


def test_an_empty_lane_rises_to_what_was_given_out_before_the_look() -> None:
    lane = Lane(16)
    lane.looked_up_to(500, Snapshot(5, 7))
    lane.looked_up_to(600, Snapshot(7, 9))
    lane.looked_up_to(700, Snapshot(9, 9))
    assert lane.floor == 500
