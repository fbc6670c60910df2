"""A snapshot is read as PostgreSQL reads it, and a position covers what was claimed."""

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.rows import TupleRow

from outbox.log.hidden import Floors
from outbox.log.position import NOTHING, Position, Snapshot

OLD = Snapshot.parse("10:14:10,12")
NEW = Snapshot.parse("12:20:12,17")


@pytest.mark.parametrize("text", ["1:1:", "725:727:725", "10:20:10,14,15"])
def test_a_snapshot_is_written_as_it_was_read(text: str) -> None:
    assert str(Snapshot.parse(text)) == text


@given(xmin=st.integers(1, 50), length=st.integers(0, 20), data=st.data())
def test_a_transaction_is_visible_if_the_server_says_so(
    connection: psycopg.Connection[TupleRow],
    xmin: int,
    length: int,
    data: st.DataObject,
) -> None:
    ids = st.sampled_from(range(xmin, xmin + length)) if length else st.nothing()
    snapshot = Snapshot(xmin, xmin + length, data.draw(st.frozensets(ids)))
    rows = connection.execute(
        "SELECT x FROM generate_series(1, 80) x"
        " WHERE pg_visible_in_snapshot(x::text::xid8, %s::pg_snapshot)",
        [str(snapshot)],
    )
    assert {xid for xid in range(1, 81) if snapshot.visible(xid)} == {
        x for (x,) in rows
    }


def test_a_new_position_covers_nothing() -> None:
    assert not Position().covers(0, 1)


def test_a_late_commit_is_not_covered() -> None:
    position = Position(100, OLD)
    assert position.covers(100, 11)
    assert not position.covers(99, 12)
    assert not position.covers(101, 11)


def test_a_late_part_covers_late_rows_up_to_its_seq() -> None:
    position = Position(100, OLD).extend(50, NEW)
    assert position.covers(50, 14)
    assert not position.covers(51, 14)
    assert position.covers(51, 11)
    assert position.extend(70, NEW).covers(51, 14)


def test_the_end_of_the_late_part_is_a_position_without_one() -> None:
    assert Position(100, OLD).extend(50, NEW).extend(100, NEW) == Position(100, NEW)


def test_rows_of_an_earlier_cluster_count_by_their_seq_alone() -> None:
    restored = Position(100, NOTHING)
    assert restored.covers(80, 900, base=80)
    assert not restored.covers(81, 900, base=80)
    assert not restored.covers(101, 900, base=200)


def test_a_claim_starts_at_the_lowest_floor_of_those_that_have_ended() -> None:
    hidden = Floors().note(10, 100).note(14, 200).find_hidden(OLD)
    assert (hidden.open, hidden.since, hidden.floor) == ({10: 100, 12: 100}, 14, 200)
    assert hidden.find_floor(OLD) is None
    # Ids from xmax on are not listed, however many they are.
    assert hidden.find_floor(Snapshot.parse("10:10014:10,12")) == 200
    assert hidden.find_floor(Snapshot.parse("12:10014:12")) == 100


def test_far_floors_are_split_from_near_ones() -> None:
    hidden = Floors().note(10, 100).note(12, 200).note(14, 300).find_hidden(OLD)
    near, far = hidden.split(200, 0)
    assert (near.open, near.since, far.open) == ({12: 200}, 14, {10: 100})
    assert far.find_floor(Snapshot.parse("12:30:12")) == 100
    assert far.find_floor(Snapshot.parse("10:30:10")) is None
    near, far = hidden.split(0, 15)
    assert (near.open, far.open, far.since) == ({}, {10: 100, 12: 200}, 14)
    assert near.find_floor(NEW) is None


def test_a_floor_is_a_seq_drawn_before_the_transaction_got_its_id() -> None:
    floors = Floors().note(10, 100).note(20, 300)
    assert [floors.of(xid) for xid in (9, 10, 19, 20)] == [-1, 100, 100, 300]


def test_a_claim_that_saw_nothing_new_leaves_the_floors() -> None:
    floors = Floors().note(10, 100)
    assert floors.note(20, 100) is floors


def test_forgetting_keeps_the_floors_of_transactions_that_may_be_open() -> None:
    floors = Floors().note(10, 100).note(20, 200).note(30, 300)
    kept = floors.forget(25)
    assert len(kept.notes) == 2
    assert [kept.of(xid) for xid in (25, 30)] == [200, 300]


def test_floors_stay_few_beside_an_open_transaction_and_are_never_too_high() -> None:
    floors = Floors()
    for xid in range(10_000):
        floors = floors.note(xid, 10 * xid)
    assert len(floors.notes) <= 256
    assert all(floors.of(xid) <= 10 * xid for xid in range(0, 10_000, 7))
    assert floors.of(9_999) == 99_990
    assert floors.of(9_950) == 99_500
