"""The copy of the messages for consumers goes, once everything in it is handled."""

from pathlib import Path
from typing import Final

import psycopg
import pytest

from pillarbox.outbox.errors import MigrationError
from tests.fixtures.doctor import Doctor
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot
from tests.migrations.filled import contents

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.week]

DELIVER: Final = (
    "INSERT INTO inbox.message (message_id, lane, schema_version, topic, key,"
    " content_type, headers, payload)"
    " SELECT outbox.uuid7(), 3, 1, topic, 'a', 'text/plain', '{}', ''"
    " FROM unnest(ARRAY['orders.paid', 'orders.sent', 'stock']) AS topic"
)
_SETTLE: Final = (
    "INSERT INTO {0}.position (created_at, ends_at, number, up_to, messages, lane,"
    " reader, snapshot) SELECT d.starts_at, d.ends_at, 1, max(m.seq), count(*), m.lane,"
    " '{1}', pg_current_snapshot() FROM outbox.partitions('{0}.message') AS d"
    " JOIN {0}.message AS m ON m.created_at >= d.starts_at"
    " AND m.created_at < d.ends_at GROUP BY 1, 2, m.lane"
)
HAS_ENDED: Final = (
    "SELECT ended_at IS NOT NULL FROM outbox.subscription WHERE reader = 'main'"
)


def settle(url: str, schema: str, reader: str) -> None:
    execute(url, _SETTLE.format(schema, reader))


def give_copy(url: str, broker: str = "redis://h/0") -> None:
    """Make the database one of an earlier checkout, with two consumers and a relay."""
    script = Path(__file__).with_name("copy.sql").read_text()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(script.encode())
    execute(
        url,
        "INSERT INTO inbox.subscription (consumer, topic)"
        " VALUES ('billing', 'orders.*'), ('audit', 'orders.paid'), ('idle', 'none')",
    )
    ((name,),) = execute(url, "SELECT current_database()")
    execute(url, f"UPDATE outbox.reader SET broker = '{broker.format(name=name)}'")


def test_what_is_undelivered_in_the_copy_is_named_and_nothing_is_changed(
    database_url: str,
) -> None:
    give_copy(database_url)
    execute(database_url, DELIVER)
    before = snapshot(database_url), contents(database_url)

    with pytest.raises(MigrationError) as refusal:
        migrate_for_a_week(database_url)

    text = str(refusal.value)
    assert "consumer audit has not handled: 1 of orders.paid, the oldest of" in text
    assert "consumer billing has not handled: 2 of orders.paid, orders.sent" in text
    assert "nothing was changed: run the consumer audit of the version before" in text
    assert "DELETE FROM inbox.subscription WHERE consumer = 'billing'" in text
    assert "idle" not in text
    assert (snapshot(database_url), contents(database_url)) == before


def test_a_day_of_the_copy_that_is_detached_counts_too(database_url: str) -> None:
    give_copy(database_url)
    execute(database_url, DELIVER)
    execute(
        database_url,
        "INSERT INTO outbox.retiring_partition"
        " SELECT partition, 'inbox.message', starts_at, ends_at, now(), 'pg_cron'"
        " FROM outbox.partitions('inbox.message')"
        " WHERE now() BETWEEN starts_at AND ends_at",
    )
    ((partition,),) = execute(
        database_url, "SELECT partition FROM outbox.retiring_partition"
    )
    detach = f"ALTER TABLE inbox.message DETACH PARTITION {partition}"
    execute(database_url, detach)

    with pytest.raises(MigrationError, match=r"billing has not handled: 2 of orders"):
        migrate_for_a_week(database_url)


@pytest.mark.long
def test_a_drained_copy_goes_as_if_it_had_never_been_there(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "SELECT outbox.add('orders.paid', '{}'::jsonb)")
    migrate_for_a_week(database_url)
    fresh = snapshot(database_url)
    found = doctor(database_url)
    give_copy(database_url)
    assert snapshot(database_url) != fresh
    execute(database_url, DELIVER)
    for consumer in ("billing", "audit"):
        settle(database_url, "inbox", consumer)

    migrate_for_a_week(database_url)

    assert snapshot(database_url) == fresh
    assert execute(database_url, "SELECT * FROM outbox.schema_differences()") == []
    assert doctor(database_url) == found
    execute(database_url, "CALL outbox.maintain()")
    assert execute(database_url, HAS_ENDED) == [(False,)]


def test_a_relay_that_filled_the_copy_ends_once_it_has_published_everything(
    database_url: str,
) -> None:
    give_copy(database_url, "postgresql://db:6432/{name}?inbox=true")
    execute(database_url, DELIVER)
    for consumer in ("billing", "audit"):
        settle(database_url, "inbox", consumer)
    execute(database_url, "SELECT outbox.add('orders.paid', '{}'::jsonb)")

    with pytest.raises(MigrationError) as refusal:
        migrate_for_a_week(database_url)
    text = str(refusal.value)
    assert "main has not copied to inbox.message: 1 of orders.paid" in text
    assert "pillarbox readers drop main --discard" in text
    assert execute(database_url, HAS_ENDED) == [(False,)]

    settle(database_url, "outbox", "main")
    migrate_for_a_week(database_url)
    assert execute(database_url, HAS_ENDED) == [(True,)]
    # What is added from now on waits for a reader; what main had is no one's.
    execute(database_url, "SELECT outbox.add('stock', '{}'::jsonb)")
    states = "SELECT topic, state FROM outbox.message_status ORDER BY seq"
    assert execute(database_url, states) == [
        ("orders.paid", "discarded"),
        ("stock", "unrouted"),
    ]


@pytest.mark.parametrize(
    "broker", ["postgresql://h/another?inbox=true", "postgresql:///{name}"]
)
def test_a_relay_to_another_outbox_stays(database_url: str, broker: str) -> None:
    """The copy of this database was never filled, or belongs to another one."""
    give_copy(database_url, broker)

    migrate_for_a_week(database_url)

    assert execute(database_url, HAS_ENDED) == [(False,)]


def test_what_others_have_made_of_the_copy_is_named_and_stays(
    database_url: str,
) -> None:
    give_copy(database_url)
    execute(
        database_url,
        "CREATE VIEW public.late AS SELECT topic FROM inbox.unsettled_delivery",
    )
    before = snapshot(database_url)

    with pytest.raises(MigrationError) as refusal:
        migrate_for_a_week(database_url)

    assert "view public.late depends on view inbox.unsettled" in str(refusal.value)
    assert snapshot(database_url) == before
