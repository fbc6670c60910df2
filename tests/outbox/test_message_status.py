"""outbox.message_status and related views show the state of a message at each step."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from pillarbox import Message
from tests.fixtures.positions import defer, give_up, publish
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute


def status(url: str) -> dict[str, Any]:
    """Return the row of the only message."""
    with psycopg.connect(url, row_factory=dict_row) as connection:
        connection.execute("SET jit = off")
        (row,) = connection.execute("SELECT * FROM outbox.message_status")
    return row


def unsettled(url: str) -> list[Any]:
    return execute(url, "SELECT state, run FROM outbox.unsettled_message ORDER BY seq")


def test_a_new_message_is_ready(database_url: str) -> None:
    message = Message("t", b"", key="k", tenant="acme")
    insert(database_url, message)

    row = status(database_url)

    assert (row["id"], row["topic"], row["key"]) == (message.id, "t", "k")
    assert (row["tenant"], row["state"]) == ("acme", "ready")
    assert (row["run"], row["attempts"], row["available_at"]) == (0, 0, None)
    assert (row["published_at"], row["dead_lettered_at"]) == (None, None)
    assert unsettled(database_url) == [("ready", 0)]


def test_a_scheduled_message_says_when_it_is_due(database_url: str) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    insert(database_url, Message("t", b"", available_at=soon))

    for is_claimed in (False, True):
        if is_claimed:
            defer(database_url, "scheduled", seconds=3600)
        row = status(database_url)
        assert (is_claimed, row["state"]) == (is_claimed, "scheduled")
        assert abs(row["available_at"] - soon) < timedelta(minutes=5)
        assert unsettled(database_url) == [("scheduled", 0)]


def test_a_refused_message_waits_and_says_why_until_it_is_published(
    database_url: str,
) -> None:
    insert(database_url, Message("t", b""))
    defer(database_url, "refused", attempts=1, reason="no such queue")
    defer(database_url, "refused", attempts=2, reason="still no such queue")

    row = status(database_url)
    assert (row["state"], row["attempts"]) == ("waiting", 2)
    assert row["last_error"] == "still no such queue"
    assert row["available_at"] > datetime.now(UTC)
    assert unsettled(database_url) == [("waiting", 0)]

    defer(database_url, "refused", seconds=-60, attempts=3, reason="not now")
    assert status(database_url)["state"] == "waiting", "although it is due"

    publish(database_url)
    row = status(database_url)
    assert (row["state"], row["attempts"]) == ("published", 3)
    assert row["last_error"] == "not now"
    assert abs(row["published_at"] - datetime.now(UTC)) < timedelta(minutes=5)
    assert (row["available_at"], row["dead_lettered_at"]) == (None, None)
    assert unsettled(database_url) == []


def test_a_message_that_is_due_at_once_is_ready(database_url: str) -> None:
    insert(database_url, Message("t", b""))
    # The relay can write it after the beginning of the statement that reads it.
    defer(database_url, "scheduled", seconds=3600)
    for cause in ("aside", "unknown", "found"):
        execute(database_url, "UPDATE outbox.deferral SET cause = %s", (cause,))
        assert (cause, status(database_url)["state"]) == (cause, "ready")
        assert unsettled(database_url) == [("ready", 0)]


@pytest.mark.parametrize("refused", [False, True], ids=["at once", "after refusals"])
def test_a_dead_letter_says_when_it_was_dead_lettered(
    database_url: str, *, refused: bool
) -> None:
    insert(database_url, Message("t", b""))
    if refused:
        defer(database_url, "refused", attempts=7)
    give_up(database_url)

    row = status(database_url)

    assert row["state"] == "dead_lettered"
    assert row["dead_lettered_at"] is not None
    assert row["published_at"] is None
    assert unsettled(database_url) == []


def test_a_replay_keeps_the_first_publication_and_starts_a_new_run(
    database_url: str,
) -> None:
    insert(database_url, Message("t", b""))
    defer(database_url, "refused", attempts=3)
    publish(database_url)
    first = status(database_url)["published_at"]

    defer(database_url, "replayed", seconds=0)

    row = status(database_url)
    assert (row["state"], row["run"], row["attempts"]) == ("ready", 1, 0)
    assert (row["published_at"], row["last_error"]) == (first, None)
    assert unsettled(database_url) == [("ready", 1)]

    publish(database_url)

    row = status(database_url)
    assert (row["state"], row["run"], row["published_at"]) == ("published", 1, first)
    assert unsettled(database_url) == []

    defer(database_url, "replayed", seconds=0)
    give_up(database_url)

    row = status(database_url)
    assert row["state"] == "dead_lettered"
    assert row["published_at"] == first < row["dead_lettered_at"]
    assert unsettled(database_url) == []


def test_a_key_is_blocked_until_its_run_is_settled_and_no_late_entry_reopens_it(
    database_url: str,
) -> None:
    """A relay that lost its lane logs a refusal after another relay has published."""
    insert(database_url, Message("head", b"", key="k"), Message("behind", b"", key="k"))
    defer(database_url, "refused", "topic = 'head'", attempts=1)
    defer(database_url, "blocked", "topic = 'behind'")
    assert unsettled(database_url) == [("waiting", 0), ("blocked", 0)]
    publish(database_url)
    late = (
        "INSERT INTO outbox.deferral (created_at, due_at, seq, id, attempts, lane,"
        " cause, reason) SELECT created_at, now(), seq, id, 2, lane, 'refused', 'late'"
        " FROM outbox.message"
    )
    execute(database_url, late)

    assert status_of_all(database_url) == {"published"}
    assert unsettled(database_url) == []


LATER = (
    "INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,"
    " reader, snapshot, settled_at) SELECT created_at, ends_at, number + %s,"
    " up_to, 0, lane, reader, {}, settled_at + %s * interval '1 hour'"
    " FROM outbox.position WHERE number = 1"
)


def test_a_message_that_commits_late_is_found_below_the_position(
    database_url: str,
) -> None:
    insert(database_url, Message("first", b"", key="k"))
    publish(database_url)
    with psycopg.connect(database_url) as slow:
        slow.execute("SELECT outbox.add('late', '{}', key => 'k')")
        insert(database_url, Message("overtakes", b"", key="k"))
        publish(database_url)
        assert unsettled(database_url) == []
    insert(database_url, Message("new", b"", key="k"))

    found = execute(
        database_url,
        "SELECT topic, state FROM outbox.message_status ORDER BY seq",
    )

    assert unsettled(database_url) == [("ready", 0), ("ready", 0)]
    assert found == [
        ("first", "published"),
        ("late", "ready"),
        ("overtakes", "published"),
        ("new", "ready"),
    ]
    publish(database_url)
    assert unsettled(database_url) == []


def test_a_late_message_was_published_when_a_position_first_saw_it(
    database_url: str,
) -> None:
    with psycopg.connect(database_url) as slow:
        slow.execute("SELECT outbox.add('late', '{}', key => 'k')")
        insert(database_url, Message("overtakes", b"", key="k"))
        publish(database_url)
    for first in (1, 2, 9, 10):
        execute(database_url, "DELETE FROM outbox.position WHERE number > 1")
        for number in range(1, 11):
            # Numbers have gaps where the lane settled messages of other days.
            snapshot = "snapshot" if number < first else "pg_current_snapshot()"
            execute(database_url, LATER.format(snapshot), (number * 3, number))

        late = execute(
            database_url,
            "SELECT m.published_at - p.settled_at FROM outbox.message_status m,"
            " outbox.position p WHERE m.topic = 'late' AND p.number = 1",
        )
        assert (first, late) == (first, [(timedelta(hours=first),)])


def test_of_late_messages_only_those_of_the_late_part_are_settled(
    database_url: str,
) -> None:
    with psycopg.connect(database_url) as slow:
        for topic in ("late", "too late"):
            slow.execute("SELECT outbox.add(%s, '{}', key => 'k')", (topic,))
        insert(database_url, Message("overtakes", b"", key="k"))
        publish(database_url)
    execute(
        database_url,
        "INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages,"
        " lane, reader, snapshot, late_up_to, late_snapshot)"
        " SELECT created_at, ends_at, 2, up_to, 1, lane, reader, snapshot, 1,"
        " pg_current_snapshot() FROM outbox.position",
    )

    found = execute(
        database_url, "SELECT topic, state FROM outbox.message_status ORDER BY seq"
    )

    assert [state for _, state in found] == ["published", "ready", "published"]
    waiting = execute(database_url, "SELECT topic FROM outbox.unsettled_message")
    assert waiting == [("too late",)]


def test_messages_from_another_cluster_are_covered_by_their_seq(
    database_url: str,
) -> None:
    """The ids of their transactions mean nothing here."""
    insert(database_url, Message("t", b"", key="k"), Message("t", b"", key="k"))
    publish(database_url)
    execute(database_url, "UPDATE outbox.position SET snapshot = '1:1:'")
    assert status_of_all(database_url) == {"ready"}

    execute(database_url, "INSERT INTO outbox.base VALUES ('this cluster', 2)")

    assert status_of_all(database_url) == {"published"}
    assert unsettled(database_url) == []


def test_positions_from_before_the_sequence_was_set_back_hide_nothing(
    database_url: str,
) -> None:
    insert(database_url, *(Message("old", b"", key="k") for _ in range(9)))
    publish(database_url)
    execute(database_url, "ALTER SEQUENCE outbox.message_seq RESTART")

    insert(database_url, Message("new", b"", key="k"))

    assert unsettled(database_url) == [("ready", 0)]


def status_of_all(url: str) -> set[str]:
    return {
        state for (state,) in execute(url, "SELECT state FROM outbox.message_status")
    }


def test_the_relay_and_the_monitor_can_read_the_views_but_no_payload_or_headers(
    database_url: str,
) -> None:
    insert(database_url, Message("t", b"secret"))
    for role in ("relay", "monitor"):
        with psycopg.connect(database_url) as connection:
            connection.execute(f"SET jit = off; SET ROLE pillarbox_{role}".encode())
            for view in ("message_status", "deferred_message", "unsettled_message"):
                cursor = connection.execute(f"SELECT * FROM outbox.{view}".encode())
                columns = {column.name for column in cursor.description or ()}
                assert {"id", "topic", "state", "run", "attempts"} <= columns, view
                assert "last_error" in columns, view
                assert not columns & {"payload", "headers"}, view
