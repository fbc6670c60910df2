"""A superuser's commands call nothing by which others shadow the catalog."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pillarbox import uuid7
from pillarbox.outbox.administration import connection as administration
from pillarbox.outbox.administration.migrate import migration_sql, unmigrate
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.postgres.connection import connect
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import (
    A_WEEK,
    Template,
    migrate_for_a_week,
    new_database,
    removal,
)
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute, session
from tests.migrations.catalog import snapshot
from tests.migrations.mallory import traps
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]

Commands: TypeAlias = dict[str, tuple[Callable[[str], int], int]]

ROOT: Final = Path(__file__).parent.parent.parent
BREAK_A_CONDITION: Final = (
    "UPDATE outbox.partition_policy SET gate = 'outbox.nothing'"
    " WHERE parent_table = 'outbox.message'"
)


# The error names the role that hits a trap. Functions that need C are left out.
TRAPS: Final = r"""
CREATE SCHEMA evil;
CREATE FUNCTION evil.bait() RETURNS boolean LANGUAGE plpgsql
AS $f$BEGIN RAISE EXCEPTION 'trapped as %', current_user; END$f$;
DO $do$
DECLARE
    o record;
    v_body text := 'LANGUAGE plpgsql AS ''BEGIN PERFORM evil.bait(); END''';
BEGIN
    FOR o IN
        SELECT p.proname, pg_get_function_identity_arguments(p.oid) AS arguments,
               pg_get_function_result(p.oid) AS result
          FROM pg_proc p
         WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind IN ('f', 'a')
           AND p.proname = ANY (string_to_array({names}, ','))
    LOOP
        BEGIN
            EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s ', o.proname,
                           o.arguments, o.result) || v_body;
        EXCEPTION WHEN OTHERS THEN CONTINUE;
        END;
    END LOOP;
    FOR o IN
        SELECT row_number() OVER () AS n, oprname, oprleft::regtype AS l,
               oprright::regtype AS r, oprresult::regtype AS result
          FROM pg_operator
         WHERE oprleft <> 0 AND oprname IN ('=', '<>', '<', '>', '<=', '>=', '+', '-',
                                            '*', '||', '~', '&', '>>')
    LOOP
        BEGIN
            EXECUTE format('CREATE FUNCTION evil.operator_%s(%s, %s) RETURNS %s ',
                           o.n, o.l, o.r, o.result) || v_body;
            EXECUTE format('CREATE OPERATOR evil.%s (LEFTARG = %s, RIGHTARG = %s,'
                ' FUNCTION = evil.operator_%s)', o.oprname, o.l, o.r, o.n);
        EXCEPTION WHEN OTHERS THEN CONTINUE;
        END;
    END LOOP;
    FOR o IN
        SELECT c.relname FROM pg_class c
         WHERE c.relkind IN ('r', 'v') AND c.relnamespace = 'pg_catalog'::regnamespace
           AND c.relname = ANY (string_to_array({names}, ','))
    LOOP
        BEGIN
            EXECUTE format('CREATE OR REPLACE VIEW evil.%I AS'
                ' SELECT t.* FROM pg_catalog.%I t WHERE evil.bait()',
                o.relname, o.relname);
        EXCEPTION WHEN invalid_table_definition THEN CONTINUE;
        END;
        EXECUTE format('GRANT ALL ON evil.%I TO PUBLIC', o.relname);
    END LOOP;
END
$do$;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
"""


def psql(url: str, script: str) -> int:
    return subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", url],
        input=script,
        text=True,
        stdout=subprocess.DEVNULL,
        check=False,
    ).returncode


def call(url: str) -> int:
    """Call the upkeep in SQL, and return 2 for its failure, as the command does."""
    with psycopg.connect(url, autocommit=True) as connection:
        path = connection.execute("SHOW search_path").fetchone()
        # The upkeep fails because of the broken condition, not because of a trap.
        with pytest.raises(psycopg.errors.RaiseException, match="nothing"):
            connection.execute("CALL outbox.maintain()")
        assert connection.execute("SHOW search_path").fetchone() == path
    return 2


# Commands, each with its exit status when a partition's condition is broken.
def migrate_quickly(url: str) -> int:
    migrate_for_a_week(url)
    return 0


SET: Final = ("retention", "set", "inbox.job", "20d")
sql_for_a_week: Final = partial(migration_sql, with_cron=False, days_ahead=A_WEEK)

COMMANDS: Final[Commands] = {
    "doctor": (lambda url: main(["doctor", "--database", url]), 3),
    "partitions": (lambda url: main(["partitions", "--database", url]), 0),
    "retention": (lambda url: main(["retention", "--database", url]), 0),
    "plan": (lambda url: main(["maintain", "--dry-run", "--database", url]), 0),
    "blocked keys": (lambda url: main(["blocked", "--database", url]), 0),
    "dead letters": (lambda url: main(["dead-letters", "list", "--database", url]), 0),
    "jobs": (lambda url: main(["jobs", "--database", url]), 0),
    "trace": (lambda url: main(["trace", str(uuid7()), "--database", url]), 1),
    "trace of a key": (lambda url: main(["trace", "--key", "k", "--database", url]), 1),
    "readers": (
        lambda url: main(["readers", "add", "a", "--consumer", "--database", url]),
        0,
    ),
    "upkeep": (lambda url: main(["maintain", "--database", url]), 2),
    "change of the interval": (
        lambda url: main([*SET, "--interval", "weekly", "--database", url]),
        0,
    ),
    "migrate again": (
        lambda url: main(["migrate", "--without-cron", "--database", url]),
        0,
    ),
    "remove": (lambda url: main(removal(url)), 0),
}
IN_SQL: Final[Commands] = {
    "upkeep": (call, 2),
    "remove": (lambda url: psql(url, migration_sql(remove=True)), 0),
}
NEW: Final[dict[str, Callable[[str], int]]] = {
    "migrate": migrate_quickly,
    "migrate in psql": lambda url: psql(url, sql_for_a_week()),
}


def is_superuser(server: PostgresServer, role: str) -> bool:
    query = "SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = %s"
    ((found,),) = execute(server.url, query, (role,))
    return bool(found)


def be_busy(url: str) -> None:
    """Make one partition held and another expired, and break a condition."""
    old_partition(url, 20)
    old_partition(url, 25)
    add_old(url, 25)
    execute(url, BREAK_A_CONDITION)


def our_sources() -> Iterator[Path]:
    for folder in ("outbox", "relay", "inbox", "migrations"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".sql", ".py"}:
                yield file


def hide_the_catalog(url: str) -> None:
    """Make a trap for every catalog object that pillarbox's sources name."""
    words = {w for f in our_sources() for w in re.findall(r"[a-z_]\w*", f.read_text())}
    names = ",".join(sorted(words))
    # pillarbox's tables are in no path.
    execute(url, TRAPS.replace("{names}", f"'{names}'"))


@pytest.fixture(scope="module")
def mallory(server: PostgresServer) -> Iterator[str]:
    """A role that must not gain any privileges."""
    with new_role(server.url, f"mallory_{uuid4().hex[:8]}") as name:
        yield name


def lay_traps(url: str, mallory: str) -> None:
    """Make traps: in the schema evil, and mallory's in public."""
    hide_the_catalog(url)
    execute(url, f"GRANT CREATE ON SCHEMA public TO {mallory}")
    execute(url, traps(mallory))


@pytest.fixture(scope="module")
def empty_with_traps(server: PostgresServer, mallory: str) -> Iterator[str]:
    """The name of a database to copy, since making thousands of traps takes long."""
    with new_database(server, "pillarbox_traps") as name:
        lay_traps(server.database_url(name), mallory)
        yield name


@pytest.fixture(scope="module")
def busy_with_traps(
    server: PostgresServer, template: Template, mallory: str
) -> Iterator[str]:
    """The name of a migrated database to copy, with traps and many findings."""
    with new_database(server, "pillarbox_traps", template) as name:
        be_busy(server.database_url(name))
        lay_traps(server.database_url(name), mallory)
        yield name


@contextmanager
def trapped(server: PostgresServer, source: str) -> Iterator[str]:
    """Copy a database; in each session's path, its traps come before the catalog."""
    name = f"pillarbox_test_{uuid4().hex}"
    session.end()
    server.create_database(name, source)
    try:
        path = "SET search_path = evil, public, pg_catalog"
        execute(server.url, f'ALTER DATABASE "{name}" {path}')
        yield server.database_url(name)
    finally:
        session.end()
        server.drop_database(name)


@pytest.fixture
def trapped_url(server: PostgresServer, busy_with_traps: str) -> Iterator[str]:
    with trapped(server, busy_with_traps) as url:
        yield url


def by_the_catalog(url: str) -> str:
    """Return a URL with a safe path, for the test's own queries."""
    return f"{url}?options=-csearch_path%3Dpg_catalog"


@pytest.mark.parametrize("commands", [COMMANDS, IN_SQL], ids=["commands", "SQL"])
def test_no_command_uses_a_name_that_a_search_path_could_hide(
    commands: Commands, trapped_url: str, server: PostgresServer, mallory: str
) -> None:
    for command, (run, status) in commands.items():
        assert run(trapped_url) == status, command
        assert not is_superuser(server, mallory), command


@pytest.mark.week
@pytest.mark.parametrize("command", NEW)
def test_a_first_migration_makes_the_same_schema_whatever_the_path_hides(
    command: str,
    empty_with_traps: str,
    database_url: str,
    server: PostgresServer,
    mallory: str,
) -> None:
    with trapped(server, empty_with_traps) as url:
        assert NEW[command](url) == 0

        asked = by_the_catalog(url)
        assert snapshot(asked) == snapshot(by_the_catalog(database_url))
        unmigrate(url)
    assert not is_superuser(server, mallory)


def test_the_traps_catch_a_session_without_a_pinned_path(
    trapped_url: str,
    server: PostgresServer,
    mallory: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    doctor = ["doctor", "--database", trapped_url]
    monkeypatch.setattr(administration, "PIN_SESSION", "SELECT 1")
    assert main(doctor) == 2
    assert "trapped as postgres" in capsys.readouterr().err

    # Even with the catalog first, mallory's match better.
    path = "SET search_path = pg_catalog, public"
    monkeypatch.setattr(administration, "PIN_SESSION", path)
    try:
        with suppress(TypeError):  # the traps return unexpected values
            main(doctor)
        assert is_superuser(server, mallory)
    finally:
        execute(server.url, f"ALTER ROLE {mallory} NOSUPERUSER")


def test_every_path_that_the_sql_sets_has_only_the_catalog() -> None:
    """In a schema of others, a routine or operator can match better than its own."""
    sources = "".join(file.read_text() for file in our_sources())
    paths = re.findall(r"search_path = (\w+(?:, \w+)*)", sources)
    # The migrations write it once, and name it at each function.
    assert len(paths) + sources.count("{pinned}\n") > 50
    assert set(paths) == {"pg_catalog, pg_temp"}


async def test_only_unshared_sessions_have_a_pinned_path(database_url: str) -> None:
    show, found = "SHOW search_path", []
    for shared in (False, True):
        async with await connect(
            database_url, application_name="path", shared=shared
        ) as connection:
            found += await (await connection.execute(show)).fetchall()

    assert found == [("pg_catalog, pg_temp",), ('"$user", public',)]
