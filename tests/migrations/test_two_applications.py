"""Two applications in a cluster, each with its database, prefix and roles."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox.administration.migrate import migrate, unmigrate
from outbox.testing.cluster import private_cluster
from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import A_WEEK, SETTINGS, copied_server
from tests.fixtures.sessions import execute, session
from tests.fixtures.waiting import wait_for
from tests.migrations.catalog import drop_roles_of_jobs, is_empty, snapshot
from tests.outbox.administration.test_upkeep import TABLES

pytestmark = pytest.mark.timeout(300)

PREFIXES = ("shop", "bank")
ROLES = ["application", "relay", "consumer", "maintainer", "monitor", "detacher", "web"]
LAUNCHER = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"
ADD = "SELECT outbox.add('t', '{}'::jsonb)"


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """The directory of a stopped server with both; pg_cron runs in shop's database."""
    with private_cluster(SETTINGS, durable=False) as cluster:
        execute(cluster.url, "CREATE DATABASE bank")
        for prefix, url in urls_on(PostgresServer(cluster.url)).items():
            with_cron = prefix == "shop"
            migrate(url, role_prefix=prefix, with_cron=with_cron, days_ahead=A_WEEK)
        session.end()
        cluster.stop("fast")
        yield cluster.data


def urls_on(server: PostgresServer) -> dict[str, str]:
    """Return the URLs of both databases by prefix."""
    return {"shop": server.url, "bank": server.database_url("bank")}


@pytest.fixture(scope="module")
def urls(data: Path) -> Iterator[dict[str, str]]:
    with copied_server(data) as server:
        yield urls_on(server)


def acting(url: str, role: str) -> psycopg.Connection[Any]:
    connection = psycopg.connect(url, autocommit=True)
    connection.execute(f"SET SESSION AUTHORIZATION {role}")
    return connection


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("mine", "other"), [PREFIXES, PREFIXES[::-1]])
def test_a_role_of_one_schema_has_no_privileges_in_the_other(
    mine: str, other: str, role: str, urls: dict[str, str]
) -> None:
    with acting(urls[other], f"{mine}_{role}") as connection:
        for query in (
            ADD,
            "SELECT * FROM outbox.message",
            "SELECT * FROM outbox.partition_policy",
            "CALL outbox.maintain()",
            "TABLE partman.part_config",
            f"SET ROLE {other}_owner",
            f"SET ROLE {other}_{role}",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(query)


def test_each_schema_is_used_and_maintained_by_its_own_roles(
    urls: dict[str, str],
) -> None:
    for prefix, url in urls.items():
        with acting(url, f"{prefix}_application") as application:
            application.execute(ADD)
    for prefix, url in urls.items():
        with acting(url, f"{prefix}_maintainer") as maintainer:
            maintainer.execute("CALL outbox.maintain()")
        health = "SELECT parent_table, ahead >= 7, owners FROM outbox.partition_health"
        assert sorted(execute(url, health)) == [(t, True, 1) for t in sorted(TABLES)]

    owners = "SELECT DISTINCT owner::regrole::text FROM outbox.partitions(%s)"
    for prefix, url in urls.items():
        assert execute(url, owners, ("outbox.message",)) == [(f"{prefix}_owner",)]


def test_jobs_belong_to_the_roles_of_their_owner(
    urls: dict[str, str],
) -> None:
    roles = "SELECT DISTINCT username FROM cron.job ORDER BY 1"

    assert execute(urls["shop"], roles) == [("shop_detacher",), ("shop_maintainer",)]


def test_a_job_resolves_unqualified_names_only_in_the_catalog(
    urls: dict[str, str],
) -> None:
    settings = execute(
        urls["shop"],
        "SELECT r.rolname, s.setting FROM pg_db_role_setting"
        " JOIN pg_roles r ON r.oid = setrole, unnest(setconfig) AS s (setting)"
        " WHERE s.setting LIKE 'search_path%' ORDER BY 1",
    )

    path = "search_path=pg_catalog, pg_temp"
    assert settings == [("shop_detacher", path), ("shop_maintainer", path)]


def test_removing_one_schema_leaves_the_other(data: Path) -> None:
    with copied_server(data) as own:
        urls = urls_on(own)
        before = snapshot(urls["bank"])

        unmigrate(urls["shop"], role_prefix="shop")

        assert is_empty(snapshot(urls["shop"]))
        assert snapshot(urls["bank"]) == before
        drop_roles_of_jobs(urls["bank"], "shop")
        execute(urls["bank"], "CALL outbox.maintain()")
        wait_for("launcher", lambda: execute(own.url, LAUNCHER), seconds=60)
