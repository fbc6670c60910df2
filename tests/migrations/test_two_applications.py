"""Two applications in a cluster, each with its database, prefix and roles."""

import psycopg
import pytest

from pillarbox.outbox.administration.migrate import migrate, unmigrate
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.migrations.catalog import drop_roles_of_jobs, is_empty, snapshot
from tests.outbox.administration.retiring import acting_as
from tests.outbox.administration.test_upkeep import TABLES

pytestmark = pytest.mark.timeout(300)

PREFIXES = ("shop", "bank")
ROLES = ["application", "relay", "consumer", "maintainer", "monitor", "detacher", "web"]
LAUNCHER = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"
PATHS = (
    "SELECT r.rolname, s.setting FROM pg_db_role_setting"
    " JOIN pg_roles r ON r.oid = setrole, unnest(setconfig) AS s (setting)"
    " WHERE s.setting LIKE 'search_path%' ORDER BY 1"
)
"""How jobs resolve unqualified names."""
ADD = "SELECT outbox.add('t', '{}'::jsonb)"
QUERIES = (
    ADD,
    "SELECT * FROM outbox.message",
    "SELECT * FROM outbox.partition_policy",
    "CALL outbox.maintain()",
    "TABLE partman.part_config",
)
"""What a role of one application may not do in the other's database."""


@pytest.mark.long
def test_each_application_is_used_and_maintained_by_its_own_roles(
    private_server: PostgresServer,
) -> None:
    """pg_cron runs in shop's database."""
    private_server.create_database("bank")
    shop, bank = private_server.url, private_server.database_url("bank")
    urls = {"shop": shop, "bank": bank}
    for prefix, url in urls.items():
        with_cron = prefix == "shop"
        migrate(url, role_prefix=prefix, with_cron=with_cron)

    owners = "SELECT DISTINCT owner::regrole::text FROM outbox.partitions(%s)"
    health = "SELECT parent_table, ahead >= 7, owners FROM outbox.partition_health"
    for prefix, url in urls.items():
        with acting_as(url, f"{prefix}_application") as application:
            application.execute(ADD)
        with acting_as(url, f"{prefix}_maintainer") as maintainer:
            maintainer.execute("CALL outbox.maintain()")
        assert sorted(execute(url, health)) == [(t, True, 1) for t in sorted(TABLES)]
        assert execute(url, owners, ("outbox.message",)) == [(f"{prefix}_owner",)]
    for mine, other in (PREFIXES, PREFIXES[::-1]):
        for role in ROLES:
            with acting_as(urls[other], f"{mine}_{role}") as connection:
                for query in (*QUERIES, f"SET ROLE {other}_owner"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        connection.execute(query)
    jobs = "SELECT DISTINCT username FROM cron.job ORDER BY 1"
    assert execute(shop, jobs) == [("shop_detacher",), ("shop_maintainer",)]
    path = "search_path=pg_catalog, pg_temp"
    assert execute(shop, PATHS) == [("shop_detacher", path), ("shop_maintainer", path)]

    before = snapshot(bank)
    unmigrate(shop, role_prefix="shop")

    assert is_empty(snapshot(shop))
    assert snapshot(bank) == before
    drop_roles_of_jobs(bank, "shop")
    execute(bank, "CALL outbox.maintain()")
    wait_for("launcher", lambda: execute(shop, LAUNCHER), seconds=60)
