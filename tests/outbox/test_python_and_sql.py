"""Functions implemented in both Python and SQL return the same results."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

import psycopg
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql
from psycopg.rows import TupleRow

from pillarbox.outbox.lane import (
    BUCKETS,
    LANES,
    Priority,
    lane_of,
    lanes_of,
    priority_of,
)
from pillarbox.outbox.limits import Limits
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import is_uuid7, moment_of, uuid7

Connection = psycopg.Connection[TupleRow]

# Every Unicode character that UTF-8 can encode and PostgreSQL can store.
TEXTS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1
)
PRIORITIES = st.sampled_from(Priority)
# A double represents microseconds exactly until 2255, where this range ends.
MILLISECONDS = st.integers(0, 2**53 // 1000)

RECEIPT_CHECK = """
SELECT pg_get_expr(conbin, conrelid) FROM pg_constraint
 WHERE conrelid = 'inbox.receipt'::regclass AND contype = 'c'
"""


def uuid7_of(milliseconds: int, tail: int) -> UUID:
    tail = tail & ~(0xF << 76) & ~(0b11 << 62)
    return UUID(int=milliseconds << 80 | 7 << 76 | 0b10 << 62 | tail)


UUIDS = st.builds(uuid7_of, MILLISECONDS, st.integers(0, 2**80 - 1))


@given(st.lists(st.tuples(st.none() | TEXTS, UUIDS, PRIORITIES), min_size=1))
def test_python_and_sql_put_a_message_into_the_same_lane(
    connection: Connection, messages: Sequence[tuple[str | None, UUID, Priority]]
) -> None:
    keys, ids, priorities = zip(*messages, strict=True)

    rows = connection.execute(
        "SELECT outbox.lane_of(key, id, priority)"
        " FROM unnest(%s::text[], %s::uuid[], %s::text[])"
        " WITH ORDINALITY AS m (key, id, priority, position) ORDER BY position",
        (list(keys), list(ids), [str(priority) for priority in priorities]),
    ).fetchall()

    assert [lane for (lane,) in rows] == [lane_of(*message) for message in messages]


@given(TEXTS, UUIDS, UUIDS)
def test_a_lane_belongs_to_its_priority_and_a_key_has_one_whatever_the_id(
    key: str, one: UUID, other: UUID
) -> None:
    for priority in Priority:
        lanes = {lane_of(key, id, priority) for id in (one, other)}
        (lane,) = lanes
        assert lane in lanes_of(priority)
        assert 0 <= lane < LANES
        assert lane % BUCKETS == lane_of(key, one, Priority.REALTIME)
        without_key = lane_of(None, one, priority)
        assert priority_of(lane) is priority_of(without_key) is priority


def test_keys_and_ids_spread_over_all_buckets() -> None:
    lanes = {lane_of(None, uuid7(), Priority.DEFAULT) for _ in range(1000)}
    keyed = {lane_of(str(n), uuid7(), Priority.DEFAULT) for n in range(1000)}

    assert lanes == keyed == set(lanes_of(Priority.DEFAULT))


@given(st.lists(UUIDS, min_size=1))
def test_python_and_sql_read_the_same_moment_from_an_id(
    connection: Connection, ids: Sequence[UUID]
) -> None:
    rows = connection.execute(
        "SELECT inbox.moment_of(id) FROM unnest(%s::uuid[])"
        " WITH ORDINALITY AS m (id, position) ORDER BY position",
        (list(ids),),
    ).fetchall()

    assert [moment for (moment,) in rows] == [moment_of(id) for id in ids]


@given(st.lists(UUIDS, min_size=1), st.sampled_from((-1, 0, 1)))
def test_a_receipt_must_have_the_moment_of_its_id(
    connection: Connection, ids: Sequence[UUID], microseconds: int
) -> None:
    off = timedelta(microseconds=microseconds)

    taken = pass_the_check(connection, ids, [moment_of(id) + off for id in ids])

    assert taken == [microseconds == 0] * len(ids)


@given(UUIDS, st.integers(0, 15))
def test_a_receipt_is_refused_for_an_id_of_another_version(
    connection: Connection, id: UUID, version: int
) -> None:
    other = UUID(int=id.int & ~(0xF << 76) | version << 76)

    assert pass_the_check(connection, [other], [moment_of(other)]) == [version == 7]


def pass_the_check(
    connection: Connection, ids: Sequence[UUID], moments: Sequence[datetime]
) -> list[bool]:
    """Return whether each receipt passes the CHECK of its table."""
    check = connection.execute(RECEIPT_CHECK).fetchone()
    assert check is not None
    query = sql.SQL(
        "SELECT {} FROM unnest(%s::uuid[], %s::timestamptz[])"
        " AS receipt (message_id, message_at)"
    ).format(sql.SQL(check[0]))
    return [taken for (taken,) in connection.execute(query, (ids, moments)).fetchall()]


def test_ids_made_in_sql_are_valid_and_contain_their_time(
    connection: Connection,
) -> None:
    rows = connection.execute(
        "SELECT clock_timestamp() - interval '1 ms', outbox.uuid7(),"
        " clock_timestamp() + interval '1 ms' FROM generate_series(1, 5000)"
    ).fetchall()

    ids = [id for _, id, _ in rows]
    assert len(set(ids)) == len(ids)
    assert all(map(is_uuid7, ids))
    assert all(start <= moment_of(id) <= end for start, id, end in rows)
    moments = [moment_of(id) for id in ids]
    assert moments == sorted(moments)
    for id in ids[:100]:
        Limits().check(Message("t", b"", id=id))


@given(st.integers(0, 2**128 - 1))
def test_a_uuid7_is_recognized_by_version_and_variant(value: int) -> None:
    id = UUID(int=value)

    assert is_uuid7(id) == (id.version == 7)
