"""The migrating role needn't be a superuser, which managed services don't offer."""

from collections.abc import Iterator

import pytest

from outbox.administration.migrate import unmigrate
from outbox.cli.main import main
from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.migrations.catalog import drop_roles_of_jobs, is_empty, snapshot
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import old_partition

pytestmark = pytest.mark.usefixtures("alone")

WITH_GRANT_OPTION = """
CREATE SCHEMA partman;
CREATE EXTENSION pg_partman SCHEMA partman;
GRANT USAGE ON SCHEMA partman TO administrator WITH GRANT OPTION;
GRANT ALL ON ALL TABLES IN SCHEMA partman TO administrator WITH GRANT OPTION;
GRANT ALL ON ALL FUNCTIONS IN SCHEMA partman TO administrator WITH GRANT OPTION;
GRANT ALL ON ALL PROCEDURES IN SCHEMA partman TO administrator WITH GRANT OPTION;
"""


@pytest.fixture
def administrator(server: PostgresServer, empty_database_url: str) -> Iterator[str]:
    """The empty database, as a role that may create roles and schemas."""
    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    execute(server.url, "CREATE ROLE administrator LOGIN CREATEROLE")
    execute(server.url, f'GRANT CREATE ON DATABASE "{name}" TO administrator')
    execute(empty_database_url, WITH_GRANT_OPTION)
    yield empty_database_url.replace("postgres@", "administrator@")
    execute(empty_database_url, "DROP OWNED BY administrator CASCADE")
    execute(server.url, "DROP ROLE administrator")


def test_a_role_with_createrole_migrates_maintains_and_removes(
    administrator: str, empty_database_url: str
) -> None:
    migrate_for_a_week(administrator, role_prefix="theirs")
    first = snapshot(empty_database_url)
    migrate_for_a_week(administrator, role_prefix="theirs")
    assert snapshot(empty_database_url) == first

    assert main(["maintain", "--database", administrator]) == 0
    ((ahead,),) = execute(
        administrator, "SELECT min(ahead) FROM outbox.partition_health"
    )
    assert ahead >= 7

    unmigrate(administrator, role_prefix="theirs")
    found = snapshot(empty_database_url)
    assert is_empty(found)
    drop_roles_of_jobs(empty_database_url, "theirs")


def test_a_member_without_set_role_is_told_who_may_detach(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((version,),) = execute(database_url, "SHOW server_version_num")
    if int(version) < 160000:
        pytest.skip("every member may become the owner before PostgreSQL 16")
    execute(database_url, "CREATE ROLE scheduler LOGIN IN ROLE pillarbox_maintainer")
    try:
        execute(database_url, "GRANT pillarbox_owner TO scheduler WITH SET FALSE")
        old_partition(database_url)
        theirs = database_url.replace("postgres@", "scheduler@")

        assert main(["maintain", "--database", theirs]) == 2

        assert len(execute(database_url, EXPIRED)) == 1
        assert "can SET ROLE pillarbox_owner" in capsys.readouterr().err
    finally:
        execute(database_url, "DROP ROLE scheduler")
