"""A superuser's commands call nothing that others put in the way of the catalog."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from tests.fixtures.relay import execute
from tests.migrations.catalog import snapshot
from tests.migrations.mallory import traps
from tests.migrations.test_definer_functions import TRAPS
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]

Lay: TypeAlias = Callable[[str], None]

ROOT: Final = Path(__file__).parent.parent.parent
BREAK_A_CONDITION: Final = (
    "UPDATE outbox.partition_policy SET unsettled = 'nothing IS NULL'"
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
    """Return 2 for a failure, as the command does."""
    with psycopg.connect(url, autocommit=True) as connection:
        path = connection.execute("SHOW search_path").fetchone()
        # Some of the upkeep fails by the condition, and not by a trap.
        with pytest.raises(psycopg.errors.RaiseException, match="nothing"):
            connection.execute("CALL outbox.maintain(2)")
        assert connection.execute("SHOW search_path").fetchone() == path
    return 2


# Each with the exit status that it has where a partition's condition is broken.
COMMANDS: Final[dict[str, tuple[Callable[[str], int], int]]] = {
    "doctor": (lambda url: main(["doctor", "--database", url]), 3),
    "partitions": (lambda url: main(["partitions", "--database", url]), 0),
    "retention": (lambda url: main(["retention", "--database", url]), 0),
    "change of the interval": (
        lambda url: main(
            [
                "retention",
                "--database",
                url,
                "set",
                "inbox.job",
                "20d",
                "--interval",
                "weekly",
            ]
        ),
        0,
    ),
    "plan": (lambda url: main(["maintain", "--dry-run", "--database", url]), 0),
    "upkeep": (lambda url: main(["maintain", "--database", url]), 2),
    "upkeep by SQL": (call, 2),
    "migrate again": (
        lambda url: main(["migrate", "--without-cron", "--database", url]),
        0,
    ),
    "migrate again in psql": (
        lambda url: psql(url, migration_sql(with_cron=False, from_version="0007")),
        0,
    ),
    "remove": (
        lambda url: main(["migrate", "--remove", "--yes", "--database", url]),
        0,
    ),
    "remove in psql": (lambda url: psql(url, migration_sql(remove=True)), 0),
    "blocked keys": (lambda url: main(["blocked", "--database", url]), 0),
    "dead letters": (lambda url: main(["dead-letters", "list", "--database", url]), 0),
    "jobs": (lambda url: main(["jobs", "--database", url]), 0),
    "subscribe": (lambda url: main(["subscribe", "a", "t", "--database", url]), 0),
}
NEW: Final[dict[str, Callable[[str], int]]] = {
    "migrate": lambda url: main(["migrate", "--without-cron", "--database", url]),
    "migrate in psql": lambda url: psql(url, migration_sql(with_cron=False)),
    "migrate in psql by parts": lambda url: (
        psql(url, migration_sql(with_cron=False, part="administrator"))
        or psql(url, migration_sql(with_cron=False, part="owner"))
    ),
}


@pytest.fixture
def mallory(server: PostgresServer) -> Iterator[str]:
    """A role that must not change."""
    name = f"mallory_{uuid4().hex[:8]}"
    execute(server.url, f"CREATE ROLE {name} LOGIN")
    yield name
    execute(server.url, f"DROP ROLE {name}")


@pytest.fixture
def lay(mallory: str) -> Iterator[Lay]:
    """Let mallory lay traps in the schema public of a database."""
    trapped = []

    def lay_in(url: str) -> None:
        trapped.append(url)
        execute(url, f"GRANT CREATE ON SCHEMA public TO {mallory}")
        execute(url, traps(mallory))

    yield lay_in
    for url in trapped:
        execute(url, f"DROP OWNED BY {mallory} CASCADE")


def is_superuser(server: PostgresServer, role: str) -> bool:
    query = "SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = %s"
    ((found,),) = execute(server.url, query, (role,))
    return bool(found)


@pytest.fixture
def busy_database_url(database_url: str) -> str:
    """One in which a partition is held, another may go, and a condition fails."""
    old_partition(database_url, 20)
    old_partition(database_url, 25)
    add_old(database_url, 25)
    execute(database_url, BREAK_A_CONDITION)
    return database_url


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_calls_no_function_that_shadows_one_of_the_catalog(
    command: str,
    busy_database_url: str,
    server: PostgresServer,
    mallory: str,
    lay: Lay,
) -> None:
    lay(busy_database_url)
    run, status = COMMANDS[command]

    assert run(busy_database_url) == status

    assert not is_superuser(server, mallory)


@pytest.mark.parametrize("command", NEW)
def test_a_first_migration_calls_no_function_that_shadows_one_of_the_catalog(
    command: str,
    empty_database_url: str,
    server: PostgresServer,
    mallory: str,
    lay: Lay,
) -> None:
    lay(empty_database_url)

    assert NEW[command](empty_database_url) == 0

    assert not is_superuser(server, mallory)
    unmigrate(empty_database_url)
    assert not is_superuser(server, mallory)


@pytest.mark.parametrize("command", ["doctor", "partitions"])
def test_the_traps_catch_a_session_without_a_pinned_path(
    command: str,
    busy_database_url: str,
    server: PostgresServer,
    mallory: str,
    lay: Lay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(administration, "PIN_SESSION", "SELECT 1")
    lay(busy_database_url)

    with suppress(TypeError):  # what the traps give is none of what is expected
        COMMANDS[command][0](busy_database_url)

    assert is_superuser(server, mallory)


def hide_the_catalog(server: PostgresServer, url: str) -> None:
    """Put a trap before everything in the catalog that our sources name."""
    words = set()
    for folder in ("outbox", "relay", "inbox", "migrations"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".sql", ".py"}:
                words |= set(re.findall(r"[a-z_]\w*", file.read_text()))
    names = ",".join(sorted(words))
    name = url.rpartition("/")[2].partition("?")[0]
    # Our tables are in no path: views of them would only be in the way of a removal.
    own = "n.nspname IN ('outbox', 'inbox', 'partman')"
    assert own in TRAPS
    traps_for_all = TRAPS.replace("{names}", f"'{names}'").replace(own, "false")
    execute(url, traps_for_all)
    path = "SET search_path = evil, public, pg_catalog"
    execute(server.url, f'ALTER DATABASE "{name}" {path}')


def by_the_catalog(url: str) -> str:
    """Return the URL for the test's own queries."""
    return f"{url}?options=-csearch_path%3Dpg_catalog"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_uses_no_name_that_a_search_path_could_hide(
    command: str, busy_database_url: str, server: PostgresServer
) -> None:
    hide_the_catalog(server, busy_database_url)
    run, status = COMMANDS[command]

    assert run(busy_database_url) == status


@pytest.mark.parametrize("command", NEW)
def test_a_first_migration_makes_the_same_whatever_the_path_hides(
    command: str, empty_database_url: str, database_url: str, server: PostgresServer
) -> None:
    hide_the_catalog(server, empty_database_url)

    assert NEW[command](empty_database_url) == 0

    asked = by_the_catalog(empty_database_url)
    assert snapshot(asked) == snapshot(by_the_catalog(database_url))
    unmigrate(empty_database_url)


def test_a_session_without_a_pinned_path_falls_into_a_trap(
    busy_database_url: str,
    server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(administration, "PIN_SESSION", "SELECT 1")
    hide_the_catalog(server, busy_database_url)

    assert main(["doctor", "--database", busy_database_url]) == 2

    assert "trapped as postgres" in capsys.readouterr().err


async def test_sessions_of_our_own_have_a_pinned_path(database_url: str) -> None:
    show, found = "SHOW search_path", []
    for shared in (False, True):
        async with await connect(
            database_url, application_name="path", shared=shared
        ) as connection:
            found += await (await connection.execute(show)).fetchall()

    assert found == [("pg_catalog, pg_temp",), ('"$user", public',)]
