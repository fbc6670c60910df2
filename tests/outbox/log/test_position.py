"""A snapshot is read as PostgreSQL reads it, and floors stay few.

What positions and floors promise is proved by the models of a log.
"""

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.rows import TupleRow

from pillarbox.outbox.log.hidden import Floors
from pillarbox.outbox.log.position import Snapshot
from pillarbox.outbox.log.reader import LogReader
from pillarbox.outbox.log.view import ReadView

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


def test_far_floors_are_split_from_near_ones() -> None:
    hidden = Floors().note(10, 100).note(12, 200).note(14, 300).find_hidden(OLD)
    near, far = hidden.split(200, 0)
    assert (near.open, near.since, far.open) == ({12: 200}, 14, {10: 100})
    assert far.find_floor(Snapshot.parse("12:30:12")) == 100
    assert far.find_floor(Snapshot.parse("10:30:10")) is None
    near, far = hidden.split(0, 15)
    assert (near.open, far.open, far.since) == ({}, {10: 100, 12: 200}, 14)
    assert near.find_floor(NEW) is None


def test_a_claim_that_saw_nothing_new_leaves_the_floors_and_old_ones_go() -> None:
    floors = Floors().note(10, 100).note(20, 200).note(30, 300)
    assert floors.note(40, 300) is floors
    kept = floors.forget(25)
    assert len(kept.notes) == 2, "those of transactions that may be open"
    assert [kept.of(xid) for xid in (25, 30)] == [200, 300]


def test_only_a_newer_session_forgets_which_numbers_had_been_drawn_by_when() -> None:
    """A standby that took over uses the ids and the numbers again."""
    reader = LogReader("main")
    reader.opened(2.0)
    reader.claims.note(ReadView(Snapshot(10, 10), 10, 100, 1), 100)
    for older in (1.0, 2.0):
        reader.opened(older)
        assert reader.claims._floors.of(10) == 100
    reader.opened(3.0)
    assert reader.claims._floors.of(10) == -1


def test_floors_stay_few_beside_an_open_transaction_and_are_never_too_high() -> None:
    floors = Floors()
    for xid in range(10_000):
        floors = floors.note(xid, 10 * xid)
    assert len(floors.notes) <= 256
    assert all(floors.of(xid) <= 10 * xid for xid in range(0, 10_000, 7))
    assert floors.of(9_999) == 99_990
    assert floors.of(9_950) == 99_500
