"""A superuser's commands call nothing by which others shadow the catalog."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from outbox.administration import connection as administration
from outbox.administration.migrate import migration_sql, unmigrate
from outbox.cli.main import main
from outbox.postgres.connection import connect
from outbox.testing.postgres import PostgresServer
from pillarbox import uuid7
from tests.fixtures.postgres import (
    A_WEEK,
    Template,
    migrate_for_a_week,
    removal,
)
from tests.fixtures.sessions import execute, session
from tests.migrations.catalog import snapshot
from tests.migrations.mallory import traps
from tests.migrations.test_definer_functions import TRAPS
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]

Lay: TypeAlias = Callable[[str], None]
Commands: TypeAlias = dict[str, tuple[Callable[[str], int], int]]

ROOT: Final = Path(__file__).parent.parent.parent
BREAK_A_CONDITION: Final = (
    "UPDATE outbox.partition_policy SET gate = 'outbox.nothing'"
    " WHERE parent_table = 'outbox.message'"
)


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
    "subscribe": (lambda url: main(["subscribe", "a", "t", "--database", url]), 0),
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
    "migrate again": (
        lambda url: psql(url, sql_for_a_week(from_version="0007")),
        0,
    ),
    "remove": (lambda url: psql(url, migration_sql(remove=True)), 0),
}
NEW: Final[dict[str, Callable[[str], int]]] = {
    "migrate": migrate_quickly,
    "migrate in psql": lambda url: psql(url, sql_for_a_week()),
    "migrate in psql by parts": lambda url: (
        psql(url, sql_for_a_week(part="administrator"))
        or psql(url, sql_for_a_week(part="owner"))
    ),
}


class Sources:
    """Databases to copy, since making thousands of traps takes long."""

    def __init__(self, server: PostgresServer, databases: ExitStack) -> None:
        self._server = server
        self._databases = databases
        self._names: dict[tuple[Callable[[str], None], str | None], str] = {}

    def name(self, prepare: Callable[[str], None], source: str | None) -> str:
        """Return the name of a copy of `source`, or of a new database, prepared."""
        if (prepare, source) not in self._names:
            name = f"pillarbox_source_{uuid4().hex}"
            self._databases.callback(self._server.drop_database, name)
            session.end()
            self._server.create_database(name, source)
            prepare(self._server.database_url(name))
            self._names[prepare, source] = name
        return self._names[prepare, source]


Copy: TypeAlias = Callable[[str], str]


@pytest.fixture(scope="module")
def sources(server: PostgresServer, mallory: str) -> Iterator[Sources]:
    with ExitStack() as databases:
        yield Sources(server, databases)


@pytest.fixture
def copy(server: PostgresServer) -> Iterator[Copy]:
    """A function that copies the database of this name and returns the copy's URL."""
    with ExitStack() as databases:

        def copy_of(source: str) -> str:
            name = f"pillarbox_test_{uuid4().hex}"
            databases.callback(server.drop_database, name)
            session.end()
            server.create_database(name, source)
            return server.database_url(name)

        yield copy_of


@pytest.fixture(scope="module")
def mallory(server: PostgresServer) -> Iterator[str]:
    """A role that must not gain any privileges."""
    name = f"mallory_{uuid4().hex[:8]}"
    execute(server.url, f"CREATE ROLE {name} LOGIN")
    yield name
    execute(server.url, f"DROP ROLE {name}")


@pytest.fixture(scope="module")
def lay(mallory: str) -> Lay:
    """A function by which mallory lays traps in a database's schema public."""

    def lay_in(url: str) -> None:
        execute(url, f"GRANT CREATE ON SCHEMA public TO {mallory}")
        execute(url, traps(mallory))

    return lay_in


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


@pytest.fixture
def busy(sources: Sources, template: Template) -> str:
    """The name of a database to copy, with many findings."""
    return sources.name(be_busy, template.name())


@pytest.fixture
def trapped_url(sources: Sources, busy: str, lay: Lay, copy: Copy) -> str:
    """A busy database with traps laid by mallory."""
    return copy(sources.name(lay, busy))


@pytest.mark.parametrize("commands", [COMMANDS, IN_SQL], ids=["commands", "SQL"])
def test_no_command_calls_a_function_that_shadows_the_catalogs(
    commands: Commands, trapped_url: str, server: PostgresServer, mallory: str
) -> None:
    for command, (run, status) in commands.items():
        assert run(trapped_url) == status, command
        assert not is_superuser(server, mallory), command


@pytest.mark.parametrize("command", NEW)
def test_a_first_migration_calls_no_function_that_shadows_the_catalogs(
    command: str,
    sources: Sources,
    copy: Copy,
    server: PostgresServer,
    mallory: str,
    lay: Lay,
) -> None:
    url = copy(sources.name(lay, None))

    assert NEW[command](url) == 0

    assert not is_superuser(server, mallory)
    unmigrate(url)
    assert not is_superuser(server, mallory)


@pytest.mark.parametrize("command", ["doctor", "partitions"])
def test_the_traps_catch_a_session_without_a_pinned_path(
    command: str,
    trapped_url: str,
    server: PostgresServer,
    mallory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "PIN_SESSION", "SELECT 1")
    try:
        with suppress(TypeError):  # the traps return unexpected values
            COMMANDS[command][0](trapped_url)

        assert is_superuser(server, mallory)
    finally:
        execute(server.url, f"ALTER ROLE {mallory} NOSUPERUSER")


def hide_the_catalog(url: str) -> None:
    """Make a trap for every catalog object that pillarbox's sources name."""
    words = set()
    for folder in ("outbox", "relay", "inbox", "migrations"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".sql", ".py"}:
                words |= set(re.findall(r"[a-z_]\w*", file.read_text()))
    names = ",".join(sorted(words))
    # pillarbox's tables are in no path: views of them would only block a removal.
    own = "n.nspname IN ('outbox', 'inbox', 'partman')"
    assert own in TRAPS
    traps_for_all = TRAPS.replace("{names}", f"'{names}'").replace(own, "false")
    execute(url, traps_for_all)


def put_traps_first(server: PostgresServer, url: str) -> str:
    """Put the traps before the catalog in every session's path; return the URL."""
    name = url.rpartition("/")[2].partition("?")[0]
    path = "SET search_path = evil, public, pg_catalog"
    execute(server.url, f'ALTER DATABASE "{name}" {path}')
    return url


@pytest.fixture
def hidden_url(sources: Sources, busy: str, copy: Copy, server: PostgresServer) -> str:
    """A busy database in which traps hide the catalog."""
    return put_traps_first(server, copy(sources.name(hide_the_catalog, busy)))


def by_the_catalog(url: str) -> str:
    """Return a URL with a safe path, for the test's own queries."""
    return f"{url}?options=-csearch_path%3Dpg_catalog"


@pytest.mark.parametrize("commands", [COMMANDS, IN_SQL], ids=["commands", "SQL"])
def test_no_command_uses_a_name_that_a_search_path_could_hide(
    commands: Commands, hidden_url: str
) -> None:
    for command, (run, status) in commands.items():
        assert run(hidden_url) == status, command


@pytest.mark.week
@pytest.mark.parametrize("command", NEW)
def test_a_first_migration_makes_the_same_schema_whatever_the_path_hides(
    command: str,
    sources: Sources,
    copy: Copy,
    database_url: str,
    server: PostgresServer,
) -> None:
    url = put_traps_first(server, copy(sources.name(hide_the_catalog, None)))

    assert NEW[command](url) == 0

    asked = by_the_catalog(url)
    assert snapshot(asked) == snapshot(by_the_catalog(database_url))
    unmigrate(url)


def test_a_session_without_a_pinned_path_calls_a_trap(
    hidden_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(administration, "PIN_SESSION", "SELECT 1")

    assert main(["doctor", "--database", hidden_url]) == 2

    assert "trapped as postgres" in capsys.readouterr().err


async def test_only_unshared_sessions_have_a_pinned_path(database_url: str) -> None:
    show, found = "SHOW search_path", []
    for shared in (False, True):
        async with await connect(
            database_url, application_name="path", shared=shared
        ) as connection:
            found += await (await connection.execute(show)).fetchall()

    assert found == [("pg_catalog, pg_temp",), ('"$user", public',)]
