"""A downgrade and an upgrade back, with rows in the tables."""

import psycopg
import pytest

from outbox.administration import migrate as migrations
from outbox.errors import MigrationError
from outbox.testing.postgres import PostgresServer
from tests.fixtures.marks import publish
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import FOLLOWERS, add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")

ROWS = (
    "SELECT id, created_at, seq, lane, topic, key, headers, payload"
    " FROM outbox.message ORDER BY seq"
)


def step(url: str, version: str) -> None:
    config = migrations._config("pillarbox", "partman", url=url, with_cron=False)
    if version == "head":
        migrations._run(lambda alembic: alembic.upgrade(config, version))
    else:
        migrations._run(lambda alembic: alembic.downgrade(config, version))


@pytest.mark.month
def test_rows_survive_a_downgrade_and_an_upgrade(
    database_url: str,
) -> None:
    url = database_url
    old_partition(url)
    add_old(url)
    execute(url, "SELECT outbox.add('orders', '{\"n\": 1}'::jsonb, 'a')")
    execute(url, "INSERT INTO inbox.foreign_receipt VALUES ('stripe', 'e1', 'billing')")
    before = snapshot(url)
    rows = execute(url, ROWS)

    step(url, "0003")
    assert execute(url, ROWS) == rows
    execute(url, "SELECT outbox.add('orders', '{\"n\": 2}'::jsonb, 'a')")
    step(url, "head")

    assert snapshot(url) == before
    assert len(execute(url, ROWS)) == 3
    execute(url, "CALL outbox.maintain()")
    assert len(execute(url, EXPIRED)) == 1
    publish(url)
    execute(url, "CALL outbox.maintain()")
    assert execute(url, EXPIRED) == []
    assert execute(url, "SELECT message_id FROM inbox.foreign_receipt") == [("e1",)]


def detach(url: str) -> str:
    """Leave a partition as the upkeep does between detach and drop."""
    old_partition(url)
    ((partition,),) = execute(url, EXPIRED)
    execute(url, "SELECT outbox.finish_detached('outbox.message')")
    execute(url, "UPDATE outbox.retiring_partition SET detach_by = 'pg_cron'")
    execute(
        url, f"ALTER TABLE outbox.message DETACH PARTITION {partition} CONCURRENTLY"
    )
    return str(partition)


def test_a_downgrade_drops_a_detached_partition_once_nobody_uses_it(
    database_url: str,
) -> None:
    url = database_url
    partition = detach(url)

    with psycopg.connect(url) as reader:
        reader.execute(f"SELECT count(*) FROM {partition}")
        with pytest.raises(MigrationError, match=r"is detached and somebody uses it"):
            step(url, "0003")
        reader.rollback()
    step(url, "0003")

    assert execute(url, f"SELECT to_regclass('{partition}')") == [(None,)]


def test_a_kept_table_blocks_its_partition_until_it_is_moved(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    execute(url, "UPDATE outbox.partition_policy SET keep_table = true")
    old_partition(url)
    old_partition(url, table="inbox.job")
    add_old(url, outcome="published")
    execute(url, "CALL outbox.maintain()")
    kept = execute(url, "SELECT partition FROM outbox.kept_partition")
    # The followers of outbox.message are kept with it.
    assert len(kept) == 2 + len(FOLLOWERS)
    with pytest.raises(MigrationError, match=r"is kept by the policy.*SET SCHEMA"):
        migrations.unmigrate(url)
    execute(url, "CREATE SCHEMA mine")
    for (partition,) in kept:
        execute(url, f"ALTER TABLE {partition} SET SCHEMA mine")

    migrations.unmigrate(url)

    rows = [
        execute(url, f"SELECT count(*) FROM mine.{p.split('.')[1]}") for (p,) in kept
    ]
    assert sorted(rows) == [[(0,)]] * 3 + [[(1,)]] * 2


def test_removal_includes_a_leftover_detached_partition(
    scheduled_server: PostgresServer,
) -> None:
    partition = detach(scheduled_server.url)

    migrations.unmigrate(scheduled_server.url)

    assert execute(scheduled_server.url, f"SELECT to_regclass('{partition}')") == [
        (None,)
    ]
