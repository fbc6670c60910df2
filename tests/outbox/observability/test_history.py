"""Activity in each minute of the last hour, read from the tables."""

from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest

from outbox.observability.measures.history import read_history
from pillarbox import Message
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up
from tests.fixtures.sessions import execute

# A UUIDv7 made from a moment, `ago` before now, and the number n.
ID = """
    (lpad(to_hex((extract(epoch FROM now() - %(ago)s) * 1000)::bigint), 12, '0')
     || '7' || lpad(to_hex(n), 3, '0') || '8' || left(md5(n::text), 15))::uuid
"""
ADD = f"""
    INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
    SELECT {ID}, now() - %(ago)s, 16, 't', 'text/plain', ''
      FROM generate_series(1, %(count)s) AS n
"""
RECEIVE = f"""
    INSERT INTO inbox.receipt (message_id, message_at, consumer)
    SELECT id, inbox.moment_of(id), %(consumer)s
      FROM generate_series(1, %(count)s) AS n, LATERAL (SELECT {ID} AS id) AS made
"""
SETTLE = """
    INSERT INTO outbox.position (created_at, ends_at, settled_at, number, up_to,
           messages, deferred, lane, reader, owner, snapshot)
    SELECT date_trunc('day', now() - %(ago)s, 'UTC'), now() + interval '1 day',
           now() - %(ago)s, n, n, 9, 9 - %(published)s, n, 'main', gen_random_uuid(),
           pg_current_snapshot()
      FROM generate_series(1, 3) AS n
"""
HALF = timedelta(minutes=30)


@pytest.fixture
def monitor(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(
        as_role(database_url, "pillarbox_monitor"), autocommit=True
    ) as connection:
        yield connection


def run(url: str, statement: str, **values: object) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode(), {"ago": HALF, **values})


def busy(minutes: tuple[float, ...]) -> dict[int, float]:
    """Return the nonzero minutes, by how many minutes ago they were."""
    return {60 - n: messages for n, messages in enumerate(minutes) if messages}


def test_messages_are_counted_in_the_minute_in_which_they_were_added(
    database_url: str, monitor: psycopg.Connection
) -> None:
    run(database_url, ADD, count=7)

    ((ago, messages),) = busy(read_history(monitor).added).items()

    assert messages == 7
    assert ago in {29, 30, 31}


@pytest.mark.parametrize("published", [0, 1, 9])
def test_publications_are_counted_in_the_minute_of_their_positions(
    database_url: str, monitor: psycopg.Connection, published: int
) -> None:
    run(database_url, SETTLE, published=published)

    history = read_history(monitor)

    assert sum(busy(history.published).values()) == 3 * published


def test_handled_messages_are_counted_by_consumer(
    database_url: str, monitor: psycopg.Connection
) -> None:
    run(database_url, RECEIVE, consumer="billing", count=5)
    run(database_url, RECEIVE, consumer="mail", count=2)

    handled = read_history(monitor).handled

    assert {name: sum(minutes) for name, minutes in handled.items()} == {
        "billing": 5,
        "mail": 2,
    }


def test_dead_letters_are_counted_by_side_whatever_their_status(
    database_url: str, monitor: psycopg.Connection
) -> None:
    give_up(database_url, Message("t", 1), Message("t", 1), age=HALF)
    give_up(database_url, Message("t", 1), schema="inbox", age=HALF)
    execute(
        database_url,
        "UPDATE outbox.dead_letter SET status = 'DISCARDED', discard_reason = 'r',"
        " discarded_by = 'who' WHERE id = (SELECT max(id::text)::uuid"
        " FROM outbox.dead_letter)",
    )

    dead_lettered = read_history(monitor).dead_lettered

    assert {side: sum(minutes) for side, minutes in dead_lettered.items()} == {
        "outbox": 2,
        "inbox": 1,
    }


def test_a_busy_minute_is_estimated_from_its_first_rows(
    database_url: str, monitor: psycopg.Connection
) -> None:
    started = "date_trunc('minute', now()) - interval '30 minutes'"
    # 20 messages a second, over the whole minute.
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox.message"
            " (id, created_at, lane, topic, content_type, payload)"
            " SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0')"
            "  || '70008' || left(md5(n::text), 15))::uuid, at, 16, 't', 'c', ''"
            "   FROM generate_series(0, 1199) AS n,"
            f"       LATERAL (SELECT {started} + n * interval '50 ms' AS at) AS m"
        )

    (messages,) = busy(read_history(monitor, most=100).added).values()

    assert 1100 <= messages <= 1300


def test_activity_more_than_an_hour_ago_is_not_counted(
    database_url: str, monitor: psycopg.Connection
) -> None:
    ago = timedelta(minutes=62)
    run(database_url, ADD, count=7, ago=ago)
    run(database_url, SETTLE, published=1, ago=ago)
    run(database_url, RECEIVE, consumer="billing", count=5, ago=ago)

    history = read_history(monitor)

    assert (busy(history.added), busy(history.published), history.handled) == (
        {},
        {},
        {},
    )
