"""How far back claims must look for messages written by open transactions."""

from datetime import UTC, datetime, timedelta

from relay.lanes.lane import BEGINNING, SKEW, Lane
from relay.lanes.xid_horizon import XidHorizon

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def test_a_transaction_older_than_the_relay_can_have_written_at_any_time() -> None:
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


def test_a_note_is_kept_while_its_transaction_is_open() -> None:
    horizon = XidHorizon()
    for hours in range(50):
        horizon.note(100 + hours, NOON + hours * HOUR)
        assert horizon.since(101) == NOON


def test_notes_are_at_least_a_minute_apart() -> None:
    horizon = XidHorizon()
    horizon.note(100, NOON)
    horizon.note(200, NOON + timedelta(seconds=59))

    assert horizon.since(300) == NOON


def test_a_lane_looks_back_to_when_an_open_transaction_can_have_written_first() -> None:
    lane = Lane(16)

    lane.refresh((7, NOON), NOON - 5 * HOUR)
    assert lane.oldest == NOON - 5 * HOUR - SKEW

    lane.refresh((7, NOON), BEGINNING)
    assert lane.oldest == BEGINNING


def test_a_drawn_seq_counts_once_all_older_transactions_have_ended() -> None:
    horizon = XidHorizon()
    horizon.note_drawn(100, 7)
    horizon.note_drawn(200, 9)

    assert horizon.drawn_before(99) == -1
    assert horizon.drawn_before(100) == 7
    assert horizon.drawn_before(199) == 7
    assert horizon.drawn_before(250) == 9


def test_few_notes_are_kept_while_a_transaction_stays_open() -> None:
    horizon = XidHorizon()
    for n in range(1000):
        horizon.note_drawn(100 + n, n)

    assert horizon.drawn_before(100) == 0
    assert horizon.drawn_before(2000) == 999


def test_a_sequence_that_was_reset_discards_earlier_notes() -> None:
    horizon = XidHorizon()
    horizon.note_drawn(100, 1000)
    horizon.note_drawn(200, 3)

    assert horizon.drawn_before(150) == -1
    assert horizon.drawn_before(200) == 3
