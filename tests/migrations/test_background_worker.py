"""pg_partman's own background worker makes days; the rest of the upkeep is ours."""

from collections.abc import Iterator

import pytest

from outbox.cli import main
from outbox.migrate import migrate
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.relay import execute
from tests.fixtures.waiting import wait_for
from tests.migrations.retiring import EXPIRED
from tests.migrations.test_upkeep import add_old, old_partition

# Without these the days are the role's, and a time zone can shift or skip one.
LEND_THE_DETACHER = """
ALTER ROLE pillarbox_detacher IN DATABASE pillarbox SET role = 'pillarbox_owner';
ALTER ROLE pillarbox_detacher IN DATABASE pillarbox SET timezone = 'UTC';
ALTER ROLE pillarbox_detacher IN DATABASE pillarbox SET lock_timeout = '5s';
"""
LET_IT = "UPDATE outbox.partition_policy SET automatic = true"
AHEAD = "SELECT min(ahead) FROM outbox.partition_health"
ODD = """
SELECT x.* FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x
 WHERE x.owner <> 'pillarbox_owner'::regrole OR x.is_default
    OR x.starts_at <> date_trunc('day', x.starts_at, 'UTC')
    OR x.ends_at - x.starts_at <> interval '1 day'
"""


@pytest.fixture
def worked() -> Iterator[PostgresServer]:
    """A server that runs pg_partman's worker every second, and no pg_cron."""
    settings = {
        "shared_preload_libraries": "pg_partman_bgw",
        "pg_partman_bgw.dbname": "pillarbox",
        "pg_partman_bgw.role": "pillarbox_detacher",
        "pg_partman_bgw.interval": "1",
        "timezone": "Pacific/Chatham",
    }
    with postgres_server(settings=settings, durable=False, docker=False) as running:
        execute(running.url, "CREATE ROLE pillarbox_detacher LOGIN")
        yield running


@pytest.mark.timeout(180)
def test_it_makes_the_days_and_drops_none_which_is_left_to_the_command(
    worked: PostgresServer,
) -> None:
    url = worked.url
    migrate(url, with_cron=False)
    execute(url, "BEGIN;" + LEND_THE_DETACHER + "COMMIT")
    execute(url, LET_IT)
    assert main(["maintain", "--database", url]) == 0
    old_partition(url, 20)
    old_partition(url, 25)
    add_old(url, 25)
    execute(url, "UPDATE partman.part_config SET premake = 12")

    wait_for("days by the worker", lambda: execute(url, AHEAD)[0][0] >= 12, seconds=90)

    assert execute(url, ODD) == []
    assert len(execute(url, EXPIRED)) == 2
    execute(url, "SELECT outbox.add('t', '{}'::jsonb)")
    assert main(["maintain", "--database", url]) == 0
    assert len(execute(url, EXPIRED)) == 1


@pytest.mark.timeout(180)
def test_days_that_it_makes_as_somebody_else_are_found_by_the_doctor(
    worked: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = worked.url
    migrate(url, with_cron=False)
    execute(url, LET_IT)
    assert main(["maintain", "--database", url]) == 0
    execute(url, "UPDATE partman.part_config SET premake = 12")

    wait_for("days by the worker", lambda: execute(url, AHEAD)[0][0] >= 12, seconds=90)

    assert main(["doctor", "--database", url]) == 3
    assert "belongs to pillarbox_detacher" in capsys.readouterr().out
