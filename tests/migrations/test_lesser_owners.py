"""A member of the owner's role doesn't become a superuser when a superuser runs us."""

from collections.abc import Iterator
from typing import Final
from uuid import uuid4

import pytest
from sqlalchemy import create_engine

from pillarbox.outbox.administration.migrate import migrate, migration_sql
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import WITHOUT_PARTMAN, migrate_for_a_week, removal
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.migrations.test_hostile_path import is_superuser, psql

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]

PLANT: Final = """
SET ROLE pillarbox_owner;
CREATE FUNCTION outbox.evil() RETURNS text LANGUAGE plpgsql AS $f$
BEGIN
    RESET ROLE;
    ALTER ROLE {member} SUPERUSER;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END
$f$;
CREATE FUNCTION outbox.evil_trigger() RETURNS trigger LANGUAGE plpgsql AS
    $f$BEGIN PERFORM outbox.evil(); RETURN NULL; END$f$;
DO $plant$
DECLARE
    o record;
BEGIN
    -- All but templates and partitions.
    FOR o IN SELECT c.oid::regclass AS name FROM pg_class c
              WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
                AND c.relkind IN ('r', 'p') AND NOT c.relispartition
                AND c.relname <> 'alembic_version' AND c.relname !~ 'template'
    LOOP
        EXECUTE format('CREATE TRIGGER evil BEFORE INSERT OR UPDATE OR DELETE ON %s'
                       ' FOR EACH STATEMENT EXECUTE FUNCTION outbox.evil_trigger()',
                       o.name);
    END LOOP;
    FOR o IN SELECT c.oid::regclass AS name, pg_get_viewdef(c.oid) AS body
               FROM pg_class c
              WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
                AND c.relkind = 'v'
    LOOP
        EXECUTE format('CREATE OR REPLACE VIEW %s AS SELECT x.* FROM (SELECT'
                       ' outbox.evil() OFFSET 0) AS e (il), (%s) AS x'
                       ' WHERE e.il IS NULL',
                       o.name, rtrim(o.body, ';'));
    END LOOP;
    FOR o IN SELECT replace(pg_get_functiondef(p.oid), E'\\nBEGIN\\n',
                            E'\\nBEGIN PERFORM outbox.evil();\\n') AS body
               FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
              WHERE p.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
                AND l.lanname = 'plpgsql' AND p.proname !~ 'evil' AND NOT p.prosecdef
    LOOP
        EXECUTE o.body;
    END LOOP;
END
$plant$;
ALTER TABLE outbox.promise RENAME TO broken;
CREATE VIEW outbox.promise AS
    SELECT b.* FROM (SELECT outbox.evil() OFFSET 0) AS e (il), outbox.broken AS b
     WHERE e.il IS NULL;
CREATE RULE writes AS ON INSERT TO outbox.promise DO INSTEAD NOTHING;
CREATE RULE changes AS ON UPDATE TO outbox.promise DO INSTEAD NOTHING;
CREATE RULE deletes AS ON DELETE TO outbox.promise DO INSTEAD NOTHING;
RESET ROLE
"""
"""What a member of the owner's role leaves: it works, and makes it a superuser."""

COMMANDS: Final = {
    "migrate": ["migrate", "--without-cron"],
    "doctor": ["doctor"],
    "status": ["status"],
    "maintain": ["maintain"],
    "maintain --dry-run": ["maintain", "--dry-run"],
    "partitions": ["partitions"],
    "blocked": ["blocked"],
    "readers list": ["readers", "list"],
    "retention": ["retention"],
    "trace": ["trace", "01981f2e-0000-7000-8000-000000000000"],
    "dead-letters list": ["dead-letters", "list"],
    "relay": ["relay", "--broker", "memory://drop"],
    "readers add": ["readers", "add", "billing", "--consumer", "--topic", "orders"],
}


@pytest.fixture
def member(database_url: str) -> Iterator[str]:
    """A member of the owner's role that has planted what makes it a superuser."""
    name = f"member_{uuid4().hex[:8]}"
    with new_role(database_url, name, "LOGIN IN ROLE pillarbox_owner"):
        execute(of(name, database_url), PLANT.replace("{member}", name))
        yield name


def of(role: str, url: str) -> str:
    return url.replace("postgres@", f"{role}@")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_of_a_superuser_runs_what_a_member_of_the_owner_planted(
    command: str,
    database_url: str,
    member: str,
    server: PostgresServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for url in (database_url, f"{database_url}?options=-crole%3Dpillarbox_owner"):
        status = main([*COMMANDS[command], "--database", url])

        assert not is_superuser(server, member)
        assert status >= 2
        told = capsys.readouterr()
        if "role" not in url or command != "migrate":  # the owner may create no schemas
            assert (
                "postgres is a superuser, and would run what others can change: "
                f"{member}, as a member of pillarbox_owner" in told.out + told.err
            )


def test_a_migration_in_the_callers_session_and_a_removal_are_refused(
    database_url: str, member: str, server: PostgresServer
) -> None:
    engine = create_engine(database_url.replace("postgresql", "postgresql+psycopg"))
    with engine.connect() as connection, pytest.raises(MigrationError, match=member):
        migrate(connection, with_cron=False)
    engine.dispose()
    assert main(removal(database_url)) == 2
    assert not is_superuser(server, member)


def test_only_the_administrators_part_is_for_a_superuser(
    database_url: str, member: str, server: PostgresServer
) -> None:
    parts = {
        part: psql(database_url, migration_sql(with_cron=False, part=part))
        for part in ("administrator", "owner", None)
    }
    assert parts == {"administrator": 0, "owner": 3, None: 3}
    removal = migration_sql(with_cron=False, remove=True)
    assert psql(database_url, removal) == 3
    assert not is_superuser(server, member)


def test_the_member_itself_is_refused_nothing(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"member_{uuid4().hex[:8]}"
    roles = "LOGIN IN ROLE pillarbox_owner, pillarbox_maintainer, pg_monitor"
    with new_role(database_url, name, roles):
        for command in (["maintain"], ["status"], ["doctor"]):
            assert main([*command, "--database", of(name, database_url)]) in {0, 4}
        assert "superuser's" not in capsys.readouterr().out


def test_doctor_and_status_say_once_that_they_need_no_superuser(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("doctor", "status"):
        main([command, "--database", database_url])
        told = capsys.readouterr().out
        assert told.count("connected as a superuser") == 1
        assert "connect as a member of pillarbox_monitor and pg_monitor" in told


@pytest.mark.skipif(WITHOUT_PARTMAN, reason="it is about installing pg_partman")
def test_pg_partman_is_not_installed_among_what_a_member_of_the_owner_made(
    empty_database_url: str,
) -> None:
    name = f"member_{uuid4().hex[:8]}"
    with new_role(empty_database_url, name, "LOGIN IN ROLE pillarbox_owner"):
        execute(
            empty_database_url,
            f"CREATE SCHEMA partman AUTHORIZATION {name};"
            f" SET SESSION AUTHORIZATION {name};"
            " CREATE FUNCTION partman.f(text, varchar) RETURNS bool LANGUAGE sql"
            " AS 'SELECT true'; CREATE OPERATOR partman.="
            " (LEFTARG = text, RIGHTARG = varchar, FUNCTION = partman.f)",
        )
        script = migration_sql(with_cron=False, part="administrator")
        assert psql(empty_database_url, script) == 3
        with pytest.raises(MigrationError, match="contains foreign functions"):
            migrate(empty_database_url, with_cron=False)


def test_a_first_migration_may_find_members_of_a_role_that_is_there_already(
    empty_database_url: str,
) -> None:
    name = f"member_{uuid4().hex[:8]}"
    with new_role(empty_database_url, name, "LOGIN IN ROLE pillarbox_owner"):
        migrate_for_a_week(empty_database_url)
        with pytest.raises(Exception, match=name):
            migrate_for_a_week(empty_database_url)
