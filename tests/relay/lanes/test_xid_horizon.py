"""How far back claims have to look for what open transactions wrote."""

from datetime import UTC, datetime, timedelta

from relay.lanes.lane import BEGINNING, SKEW, Lane
from relay.lanes.xid_horizon import XidHorizon

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def test_a_transaction_older_than_the_relay_may_have_written_at_any_time() -> None:
    horizon = XidHorizon()
    horizon.note(100, NOON)

    assert horizon.since(100) == BEGINNING
    assert horizon.since(90) == BEGINNING


def test_a_transaction_that_started_after_a_note_wrote_after_it() -> None:
    horizon = XidHorizon()
    horizon.note(100, NOON)
    horizon.note(200, NOON + HOUR)
    horizon.note(300, NOON + 2 * HOUR)

    assert horizon.since(150) == NOON
    assert horizon.since(250) == NOON + HOUR
    assert horizon.since(10**9) == NOON + 2 * HOUR


def test_a_recorded_moment_stays_while_its_transaction_is_open() -> None:
    horizon = XidHorizon()
    for hours in range(50):
        horizon.note(100 + hours, NOON + hours * HOUR)
        assert horizon.since(101) == NOON


def test_notes_are_at_least_a_minute_apart() -> None:
    horizon = XidHorizon()
    horizon.note(100, NOON)
    horizon.note(200, NOON + timedelta(seconds=59))

    assert horizon.since(300) == NOON


def test_a_lane_looks_back_to_where_an_open_transaction_began_to_write() -> None:
    lane = Lane(16)

    lane.refresh(set(), (7, NOON), NOON - 5 * HOUR)
    assert lane.oldest == NOON - 5 * HOUR - SKEW

    lane.refresh(set(), (7, NOON), BEGINNING)
    assert lane.oldest == BEGINNING
