"""A removal drops everything of ours, and nothing of other people's."""

import re

import psycopg
import pytest

from pillarbox.outbox.administration.migrate import unmigrate
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.migrations.catalog import snapshot
from tests.outbox.administration.retiring import EXPIRED, NOTE_A_JOB
from tests.outbox.administration.test_upkeep import FOLLOWERS, add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")


def detach(url: str) -> str:
    """Leave a partition as the upkeep does between detach and drop."""
    old_partition(url)
    ((partition,),) = execute(url, EXPIRED)
    execute(url, NOTE_A_JOB)
    execute(
        url, f"ALTER TABLE outbox.message DETACH PARTITION {partition} CONCURRENTLY"
    )
    return str(partition)


def test_a_detached_partition_is_dropped_once_nobody_uses_it(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    partition = detach(url)

    with psycopg.connect(url) as reader:
        reader.execute(f"SELECT count(*) FROM {partition}")
        with pytest.raises(MigrationError, match=r"is detached, but still in use"):
            unmigrate(url)
        reader.rollback()
    unmigrate(url)

    assert execute(url, f"SELECT to_regclass('{partition}')") == [(None,)]


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ("VIEW public.mine AS SELECT id FROM outbox.message", "view public.mine"),
        ("TABLE outbox.mine (id int)", "table outbox.mine"),
        (
            "FUNCTION public.mine() RETURNS SETOF inbox.message_life"
            " LANGUAGE sql AS 'SELECT * FROM inbox.message_life'",
            "function public.mine()",
        ),
    ],
)
def test_an_object_of_others_in_the_way_is_kept_and_named(
    theirs: str, named: str, database_url: str
) -> None:
    execute(database_url, f"CREATE {theirs}")
    before = snapshot(database_url)

    with pytest.raises(MigrationError, match=rf"{re.escape(named)} isn't an object of"):
        unmigrate(database_url)

    assert snapshot(database_url) == before


def test_a_kept_table_blocks_its_partition_until_it_is_moved(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    execute(url, "UPDATE outbox.partition_policy SET keep_table = true")
    old_partition(url)
    old_partition(url, table="inbox.job")
    add_old(url, outcome="published")
    run_upkeep(url)
    kept = execute(url, "SELECT partition FROM outbox.kept_partition")
    # The followers of outbox.message are kept with it.
    assert len(kept) == 2 + len(FOLLOWERS)
    with pytest.raises(MigrationError, match=r"is kept by the policy.*SET SCHEMA"):
        unmigrate(url)
    execute(url, "CREATE SCHEMA mine")
    for (partition,) in kept:
        execute(url, f"ALTER TABLE {partition} SET SCHEMA mine")

    unmigrate(url)

    rows = [
        execute(url, f"SELECT count(*) FROM mine.{p.split('.')[1]}") for (p,) in kept
    ]
    assert sorted(rows) == [[(0,)]] * 2 + [[(1,)]] * 2
