"""No role's code runs as the superuser that migrates or looks at a database."""

from collections.abc import Iterator
from functools import cache
from typing import Final
from uuid import uuid4

import psycopg
import pytest

from pillarbox.outbox.administration.checks.foreign import LIST_FOREIGN_OBJECTS
from pillarbox.outbox.administration.migrate import migrate, migration_sql, unmigrate
from pillarbox.outbox.administration.names import Names
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot
from tests.migrations.test_hostile_path import is_superuser, psql
from tests.plans.conftest import Explained

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]

ESCALATE: Final = (
    "LANGUAGE plpgsql AS $$ BEGIN ALTER ROLE {mallory} SUPERUSER; RETURN NULL; END $$"
)
EVIL: Final = "CREATE FUNCTION evil.run() RETURNS trigger " + ESCALATE
TRAPS: Final = {
    "schemas, and a version table with a trigger": (
        "CREATE SCHEMA outbox; CREATE SCHEMA evil;"
        " CREATE TABLE outbox.alembic_version (version_num varchar(32) PRIMARY KEY);"
        f" {EVIL}; CREATE TRIGGER run AFTER INSERT OR UPDATE ON outbox.alembic_version"
        " FOR EACH ROW EXECUTE FUNCTION evil.run();"
        " CREATE SCHEMA inbox;"
        " CREATE SCHEMA partman; CREATE FUNCTION partman.create_parent(p_parent_table"
        " text, p_control text, p_interval text, p_type text, p_premake int,"
        f" p_template_table text, p_jobmon bool) RETURNS bool {ESCALATE}",
        [f"the schema {name} belongs to mallory_" for name in ("outbox", "inbox")],
    ),
    "a version table that is a view": (
        "CREATE SCHEMA outbox; CREATE FUNCTION outbox.version() RETURNS text "
        f"{ESCALATE}; CREATE VIEW outbox.alembic_version AS"
        " SELECT outbox.version() AS version_num",
        ["the schema outbox belongs to mallory_"],
    ),
    "an extension": (
        "RESET SESSION AUTHORIZATION; CREATE SCHEMA partman;"
        " CREATE EXTENSION pg_partman SCHEMA partman;"
        # As it is with pg_partman 5, which any role may install.
        " ALTER SCHEMA partman OWNER TO {mallory}; UPDATE pg_extension"
        " SET extowner = '{mallory}'::regrole WHERE extname = 'pg_partman'",
        ["the schema partman belongs to mallory_"],
    ),
    "the function of an administrator's event trigger": (
        "CREATE SCHEMA evil; CREATE FUNCTION evil.run() RETURNS event_trigger "
        + ESCALATE.replace("RETURN NULL; ", "")
        + "; RESET SESSION AUTHORIZATION;"
        " CREATE EVENT TRIGGER run ON ddl_command_start EXECUTE FUNCTION evil.run()",
        ["the event trigger run uses the function evil.run() of mallory_"],
    ),
    "functions and types in an administrator's table": (
        "CREATE SCHEMA evil; CREATE FUNCTION evil.run() RETURNS text "
        + ESCALATE
        + "; CREATE DOMAIN evil.version AS text CHECK (evil.run() IS NULL);"
        " RESET SESSION AUTHORIZATION; CREATE SCHEMA outbox;"
        " CREATE TABLE outbox.alembic_version (version_num text);"
        " CREATE RULE run AS ON INSERT TO outbox.alembic_version"
        " DO ALSO SELECT evil.run();"
        " ALTER TABLE outbox.alembic_version ADD run text DEFAULT evil.run(),"
        " ADD CHECK (evil.run() IS NULL), ADD of_type evil.version",
        [
            "the rule run on outbox.alembic_version uses the function evil.run()",
            "the default value for outbox.alembic_version.run uses",
            "the table constraint alembic_version_check on",
            "of_type uses the type evil.version of mallory_",
        ],
    ),
}
"""What mallory, who may create schemas, made before the first migration."""
LATER: Final = (
    "CREATE SCHEMA evil AUTHORIZATION {mallory};"
    " GRANT CREATE ON SCHEMA partman TO {mallory};"
    " SET SESSION AUTHORIZATION {mallory};"
    " CREATE FUNCTION partman.show_partitions(varchar, varchar) RETURNS int "
    + ESCALATE
    + "; CREATE FUNCTION evil.eq(text, varchar) RETURNS bool LANGUAGE sql"
    " AS 'SELECT true';"
    " CREATE OPERATOR partman.= (LEFTARG = text, RIGHTARG = varchar,"
    f" FUNCTION = evil.eq); {EVIL}; RESET SESSION AUTHORIZATION;"
    " CREATE TRIGGER run AFTER UPDATE ON outbox.alembic_version"
    " FOR EACH ROW EXECUTE FUNCTION evil.run();"
    " GRANT CREATE ON SCHEMA outbox TO PUBLIC;"
    " GRANT TRIGGER ON partman.part_config TO {mallory}"
)
"""What mallory got or made in a migrated database."""
SAID_LATER: Final = [
    "the operator partman.=(",
    "the function partman.show_partitions(",
    "the trigger run on outbox.alembic_version uses the function evil.run() of",
    "may create objects in the schema partman",
    "PUBLIC may create objects in the schema outbox",
    "may create triggers on 1 tables, such as partman.part_config",
]


def fill(script: str, mallory: str) -> str:
    return script.replace("{mallory}", mallory)


@pytest.fixture
def mallory(empty_database_url: str) -> Iterator[str]:
    """A role that may create schemas in the empty database."""
    database = empty_database_url.rpartition("/")[2].partition("?")[0]
    with new_role(empty_database_url, f"mallory_{uuid4().hex[:8]}") as name:
        execute(empty_database_url, f'GRANT CREATE ON DATABASE "{database}" TO {name}')
        yield name


@cache
def printed(part: str | None) -> str:
    return migration_sql(with_cron=False, part=part)


def assert_refused(
    problems: list[str], url: str, server: PostgresServer, mallory: str
) -> None:
    """Check that each problem is found, that migrating names one, and no trap runs."""
    found = [row[0] for row in execute(url, Names().fill(LIST_FOREIGN_OBJECTS))]
    assert [it for it in problems if not any(it in each for each in found)] == []
    with pytest.raises(MigrationError) as refused:
        migrate(url, with_cron=False)
    assert any(each in str(refused.value) for each in found)
    with pytest.raises(MigrationError):
        unmigrate(url)
    assert not is_superuser(server, mallory)


@pytest.mark.parametrize("trap", TRAPS)
def test_a_first_migration_refuses_what_another_role_made_before_it(
    trap: str, empty_database_url: str, server: PostgresServer, mallory: str
) -> None:
    script, problems = TRAPS[trap]
    execute(
        empty_database_url,
        f"SET SESSION AUTHORIZATION {mallory}; {fill(script, mallory)}",
    )

    assert_refused(problems, empty_database_url, server, mallory)
    for part in (None, "administrator"):
        assert psql(empty_database_url, printed(part)) != 0
    assert main(["doctor", "--database", empty_database_url]) != 0
    assert not is_superuser(server, mallory)


def test_a_later_migration_and_the_doctor_name_what_another_role_got_meanwhile(
    database_url: str, server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_role(database_url, f"mallory_{uuid4().hex[:8]}") as mallory:
        execute(database_url, fill(LATER, mallory))

        assert_refused(SAID_LATER, database_url, server, mallory)

        assert main(["doctor", "--database", database_url]) == 3
        told = capsys.readouterr().out
        assert [it for it in SAID_LATER if it not in told] == []
        assert not is_superuser(server, mallory)


def test_default_privileges_give_nobody_the_right_to_add_code(
    empty_database_url: str, mallory: str
) -> None:
    execute(
        empty_database_url,
        f"ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO {mallory};"
        f" ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {mallory}, PUBLIC",
    )
    for _ in range(2):
        migrate_for_a_week(empty_database_url)


def test_a_role_with_the_name_of_one_of_ours_is_not_trusted(
    empty_database_url: str, mallory: str
) -> None:
    with new_role(empty_database_url, f"{mallory}_web") as theirs:
        execute(empty_database_url, f"CREATE SCHEMA inbox AUTHORIZATION {theirs}")
        with pytest.raises(MigrationError, match=f"inbox belongs to {theirs}"):
            migrate(empty_database_url, with_cron=False, role_prefix=mallory)


def test_what_an_analyst_reads_blocks_nothing(database_url: str) -> None:
    with new_role(database_url, f"analyst_{uuid4().hex[:8]}") as analyst:
        execute(
            database_url,
            f"GRANT USAGE, CREATE ON SCHEMA outbox TO {analyst};"
            f" GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {analyst};"
            f" SET SESSION AUTHORIZATION {analyst};"
            " CREATE VIEW outbox.report AS SELECT count(*) FROM outbox.message;"
            " RESET SESSION AUTHORIZATION;"
            f" REVOKE CREATE ON SCHEMA outbox FROM {analyst}",
        )

        migrate_for_a_week(database_url)


def test_a_first_migration_refuses_roles_that_others_control(
    empty_database_url: str, server: PostgresServer, mallory: str
) -> None:
    problems = {
        "may grant the role theirs_owner to anybody": (
            f"REVOKE ADMIN OPTION FOR theirs_owner FROM {mallory}"
        ),
        "the role theirs_owner may log in": "ALTER ROLE theirs_owner NOLOGIN",
    }
    execute(
        server.url,
        "CREATE ROLE theirs_owner LOGIN;"
        f" GRANT theirs_owner TO {mallory} WITH ADMIN OPTION",
    )
    try:
        for problem, remedy in problems.items():
            with pytest.raises(MigrationError, match=problem) as refused:
                migrate_for_a_week(empty_database_url, role_prefix="theirs")
            assert remedy in str(refused.value)
            assert is_empty(snapshot(empty_database_url))
            execute(server.url, remedy)

        execute(server.url, f"REVOKE theirs_owner FROM {mallory}")
        migrate_for_a_week(empty_database_url, role_prefix="theirs")
        unmigrate(empty_database_url, role_prefix="theirs")
    finally:
        execute(server.url, "DROP ROLE IF EXISTS theirs_owner")


def test_the_list_is_computed_once_even_if_the_catalogs_have_no_statistics(
    database_url: str,
) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("SET allow_system_table_mods = on")
        connection.execute("DELETE FROM pg_statistic")
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {Names().fill(LIST_FOREIGN_OBJECTS)}"
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    loops = {
        node["Actual Loops"]
        for node in Explained(row[0][0]["Plan"], {}).nodes
        if node["Node Type"] == "Aggregate"
    }
    assert loops <= {0, 1}
    assert loops
