"""A failing migration names the cause and the remedy, and changes nothing."""

from collections.abc import Iterator

import pytest

from pillarbox.outbox.administration.migrate import migrate, unmigrate
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot
from tests.outbox.administration.broken import SEEN

pytestmark = pytest.mark.usefixtures("alone")

INSTALLED = "UPDATE pg_extension SET extversion = '{}' WHERE extname = 'pg_partman'"
MAJOR = """
SELECT split_part(extversion, '.', 1) FROM pg_extension WHERE extname = 'pg_partman'
"""
OLD_PARTMAN = "SELECT name 'pg_partman' AS name, '4.6.2' AS default_version"


@pytest.fixture
def powerless(empty_database_url: str) -> Iterator[str]:
    """The empty database, as a role that may only log in."""
    with new_role(empty_database_url, "powerless") as name:
        yield empty_database_url.replace("postgres@", f"{name}@")


def refusal(url: str, **options: object) -> str:
    before = snapshot(url.replace("powerless@", "postgres@"))
    with pytest.raises(MigrationError) as refused:
        migrate(url, **options)  # type: ignore[arg-type]
    assert snapshot(url.replace("powerless@", "postgres@")) == before
    return str(refused.value)


def test_a_database_other_than_pg_crons_is_refused(empty_database_url: str) -> None:
    text = refusal(empty_database_url, with_cron=True)

    assert 'pg_cron runs in database "pillarbox", this is' in text
    assert "set cron.database_name" in text
    assert "--without-cron" in text
    assert is_empty(snapshot(empty_database_url))
    schemas = "SELECT 1 FROM pg_namespace WHERE nspname IN ('partman', 'outbox')"
    assert execute(empty_database_url, schemas) == []


def test_a_role_is_told_each_right_that_it_lacks(
    powerless: str, empty_database_url: str
) -> None:
    text = refusal(powerless, with_cron=False)
    assert 'role "powerless" may not create schemas in database' in text
    assert "GRANT CREATE ON DATABASE" in text

    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    execute(empty_database_url, f'GRANT CREATE ON DATABASE "{name}" TO powerless')
    # Since pg_partman 5.2, the extension itself needs no superuser.
    execute(empty_database_url, "CREATE SCHEMA partman")
    text = refusal(powerless, with_cron=False)
    assert 'role "powerless" may not install pg_partman' in text
    assert "CREATE EXTENSION pg_partman SCHEMA partman" in text

    execute(empty_database_url, "CREATE EXTENSION pg_partman SCHEMA partman")
    text = refusal(powerless, with_cron=False, role_prefix="others")
    assert 'role "powerless" may not create "others_owner", or become it' in text
    assert "pillarbox migrate --sql administrator" in text
    text = refusal(powerless, with_cron=False)
    assert 'role "powerless" may not create "pillarbox_owner", or become it' in text
    assert 'GRANT "pillarbox_owner", "pillarbox_maintainer", "pillarbox_detacher"' in (
        text
    )


def test_a_database_encoding_other_than_utf8_is_refused(server: PostgresServer) -> None:
    execute(
        server.url,
        "CREATE DATABASE pillarbox_latin TEMPLATE template0 ENCODING 'LATIN1'"
        " LC_COLLATE 'C' LC_CTYPE 'C'",
    )
    try:
        text = refusal(server.database_url("pillarbox_latin"), with_cron=False)
    finally:
        server.drop_database("pillarbox_latin")

    assert "has the encoding LATIN1" in text
    assert "ENCODING 'UTF8'" in text


def test_a_pg_partman_that_is_too_old_is_refused(database_url: str) -> None:
    ((major,),) = execute(database_url, MAJOR)
    # Versions are compared as numbers.
    execute(database_url, INSTALLED.format(f"{major}.10.0"))
    migrate_for_a_week(database_url)
    execute(database_url, INSTALLED.format("4.6.2"))
    text = refusal(database_url, with_cron=False)
    assert "pg_partman 4.6.2, installed in this database, is older" in text
    assert "either run ALTER EXTENSION pg_partman UPDATE; or add" in text

    execute(database_url, SEEN.format("pg_available_extensions", OLD_PARTMAN))
    text = refusal(database_url, with_cron=False)
    assert "pg_partman 4.6.2 is older than 4.7" in text
    assert "apt install postgresql-" in text
    assert " and run ALTER EXTENSION pg_partman UPDATE; or add" in text
    assert text.endswith("; or add --without-partman")


def test_removing_a_missing_schema_does_nothing(empty_database_url: str) -> None:
    with pytest.raises(MigrationError, match="nothing to remove"):
        unmigrate(empty_database_url)

    assert is_empty(snapshot(empty_database_url))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("dead_letter", 'relation "dead_letter" already exists'),
        ("message", 'belong to "postgres", not to "pillarbox_owner"'),
        ("message", "outbox.message exists, but pillarbox migrate did not create it"),
    ],
)
def test_a_conflicting_relation_is_named(
    table: str, problem: str, empty_database_url: str
) -> None:
    execute(empty_database_url, "CREATE SCHEMA outbox")
    execute(empty_database_url, f"CREATE TABLE outbox.{table} (id int)")

    assert problem in refusal(empty_database_url, with_cron=False)
