"""A failing migration names the cause and the remedy, and changes nothing."""

from collections.abc import Iterator

import pytest

from outbox.administration.migrate import migrate, unmigrate
from outbox.errors import MigrationError
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot
from tests.outbox.administration.broken import SEEN

pytestmark = pytest.mark.usefixtures("alone")

INSTALLED = "UPDATE pg_extension SET extversion = '{}' WHERE extname = 'pg_partman'"
MAJOR = """
SELECT split_part(extversion, '.', 1) FROM pg_extension WHERE extname = 'pg_partman'
"""
NO_PARTMAN = "SELECT * FROM pg_available_extensions_itself WHERE name <> 'pg_partman'"
OLD_PARTMAN = "SELECT name 'pg_partman' AS name, '4.6.2' AS default_version"


@pytest.fixture
def powerless(server: PostgresServer, empty_database_url: str) -> Iterator[str]:
    """The empty database, as a role that may only log in."""
    execute(server.url, "CREATE ROLE powerless LOGIN")
    yield empty_database_url.replace("postgres@", "powerless@")
    execute(empty_database_url, "DROP OWNED BY powerless")
    execute(server.url, "DROP ROLE powerless")


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


def test_a_migrated_database_stays_as_it_is_when_cron_is_wrong(
    database_url: str,
) -> None:
    assert "--without-cron" in refusal(database_url, with_cron=True)


def test_a_role_that_cannot_create_schemas_is_refused(powerless: str) -> None:
    text = refusal(powerless, with_cron=False)

    assert 'role "powerless" may not create schemas in database' in text
    assert "GRANT CREATE ON DATABASE" in text


def test_a_role_without_createrole_is_refused(
    powerless: str, empty_database_url: str
) -> None:
    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    execute(empty_database_url, f'GRANT CREATE ON DATABASE "{name}" TO powerless')

    text = refusal(powerless, with_cron=False, role_prefix="others")

    assert 'role "others_owner" does not exist and "powerless" may not create' in text
    assert "pillarbox migrate --sql" in text


def test_a_role_that_cannot_install_pg_partman_is_refused(
    powerless: str, empty_database_url: str
) -> None:
    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    execute(empty_database_url, f'GRANT CREATE ON DATABASE "{name}" TO powerless')
    # Since pg_partman 5.2, the extension itself needs no superuser.
    execute(empty_database_url, "CREATE SCHEMA partman")

    text = refusal(powerless, with_cron=False)

    assert 'role "powerless" may not install pg_partman' in text
    assert "CREATE EXTENSION pg_partman SCHEMA partman" in text


def test_a_role_that_cannot_become_the_owner_is_refused(
    powerless: str, empty_database_url: str
) -> None:
    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    execute(empty_database_url, f'GRANT CREATE ON DATABASE "{name}" TO powerless')
    execute(empty_database_url, "CREATE SCHEMA partman")
    execute(empty_database_url, "CREATE EXTENSION pg_partman SCHEMA partman")

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


def offer(url: str, extensions: str) -> None:
    """Make the server offer these extensions in one database."""
    execute(url, SEEN.format("pg_available_extensions", extensions))


def test_a_server_without_pg_partman_is_refused(empty_database_url: str) -> None:
    offer(empty_database_url, NO_PARTMAN)

    text = refusal(empty_database_url, with_cron=False)

    assert " is there, pg_partman is missing; nothing was changed" in text
    assert "apt install postgresql-" in text


def test_a_pg_partman_that_is_too_old_is_refused(empty_database_url: str) -> None:
    offer(empty_database_url, OLD_PARTMAN)

    text = refusal(empty_database_url, with_cron=False)

    assert "pg_partman 4.6.2 is older than 4.7" in text
    assert "apt install postgresql-" in text
    assert text.endswith("; or add --without-partman")
    assert is_empty(snapshot(empty_database_url))


def test_a_pg_partman_older_than_its_installed_files_is_refused(
    database_url: str,
) -> None:
    execute(database_url, INSTALLED.format("4.6.2"))

    text = refusal(database_url, with_cron=False)

    assert "pg_partman 4.6.2, installed in this database, is older" in text
    assert "either run ALTER EXTENSION pg_partman UPDATE; or add" in text


def test_a_pg_partman_that_no_update_can_make_new_enough_is_refused(
    database_url: str,
) -> None:
    execute(database_url, INSTALLED.format("4.5.1"))
    offer(database_url, OLD_PARTMAN)

    text = refusal(database_url, with_cron=False)

    assert "apt install postgresql-" in text
    assert " and run ALTER EXTENSION pg_partman UPDATE; or add" in text


def test_versions_are_compared_as_numbers(database_url: str) -> None:
    ((major,),) = execute(database_url, MAJOR)
    execute(database_url, INSTALLED.format(f"{major}.10.0"))

    migrate_for_a_week(database_url)


def test_a_server_that_does_not_load_pg_cron_is_refused() -> None:
    with postgres_server(
        settings={"shared_preload_libraries": ""}, durable=False
    ) as bare:
        text = refusal(bare.url, with_cron=True)
        assert is_empty(snapshot(bare.url))

    assert "pg_cron" in text
    assert "shared_preload_libraries" in text


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


def test_tables_restored_without_their_roles_are_refused(database_url: str) -> None:
    execute(database_url, "ALTER TABLE outbox.message OWNER TO postgres")

    assert "restore the roles" in refusal(database_url, with_cron=False)
