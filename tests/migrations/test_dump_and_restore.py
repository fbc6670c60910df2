"""A dump is restored into another server, maybe a newer one; the upkeep continues.

The dump comes from the server at PILLARBOX_OLDER_DATABASE_URL, or from the tests' own.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.cluster import find_binaries
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.positions import publish
from tests.fixtures.postgres import migrate_for_a_week, new_database, one_at_a_time
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot
from tests.migrations.filled import contents, empty_tables, fill
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")

# The bounds of each table's partitions, and the application's own table.
BESIDE = (
    "SELECT parent_table, x.starts_at, x.ends_at FROM outbox.partition_policy p,"
    " outbox.partitions(p.parent_table) x ORDER BY 1, 2",
    "SELECT * FROM public.sale ORDER BY number",
)
Partman: TypeAlias = tuple[dict[str, list[str]], set[str]]

ERROR = re.compile(r"ERROR:  (.*)")
COLUMNS = (
    "SELECT relname, array_agg(attname::text ORDER BY attnum)"
    " FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid AND attnum > 0"
    " WHERE relnamespace = 'partman'::regnamespace AND relkind = 'r' GROUP BY relname"
)
ROUTINES = (
    "SELECT CASE prokind WHEN 'p' THEN 'procedure ' ELSE 'function ' END"
    " || replace(oid::regprocedure::text, ',', ', ') FROM pg_proc"
    " WHERE pronamespace = 'partman'::regnamespace"
)
DROPPED = (
    "INSERT INTO outbox.dropped_partition SELECT 'inbox.receipt', at, at + '1 day', at,"
    " at + '1 hour' FROM date_trunc('day', now() - 20 * interval '24 hours') AS at"
)
KEPT = (
    "INSERT INTO outbox.kept_partition"
    " VALUES ('public.sale', 'inbox.receipt', '2020-01-01', '2020-01-02')"
)
GONE = "UPDATE outbox.reader SET role = 'gone' WHERE reader = 'main'"
"""A role of the application, which was not restored."""
HEALTH = (
    "SELECT min(ahead) >= 9, bool_and(has_today), sum(defaults), max(owners)"
    " FROM outbox.partition_health"
)


@pytest.fixture
def older(server: PostgresServer, tmp_path: Path) -> Iterator[PostgresServer]:
    url = os.environ.get("PILLARBOX_OLDER_DATABASE_URL")
    ((version,),) = execute(url or server.url, "SHOW server_version_num")
    if (dumps := client_version()) < int(version) // 10_000:
        pytest.skip(f"pg_dump {dumps} on this machine is older than the server")
    if not url:
        yield server
        return
    elsewhere = PostgresServer(url)
    with (
        one_at_a_time(elsewhere),
        new_database(elsewhere, "pillarbox_plain") as plain,
        new_database(server, "pillarbox_plain") as copy,
    ):
        source, target = elsewhere.database_url(plain), server.database_url(copy)
        execute(source, "CREATE TABLE plain (number integer)")
        # PostgreSQL 17.12 dumps an option for every column that 18.6 doesn't know.
        if errors := carry(source, target, str(tmp_path / "plain")):
            said = "; ".join(errors)
            pytest.skip(f"no dump of that server can be restored here: {said}")
        yield elsewhere


def client_version() -> int:
    """Return the major version of pg_dump."""
    said = subprocess.check_output(["pg_dump", "--version"], text=True)
    return int(said.split()[2].partition(".")[0])


def carry(source: str, target: str, file: str) -> list[str]:
    """Dump a database and restore it into another; return the errors of the restore."""
    assert run("pg_dump", "--format=custom", "--file", file, source) == []
    return run("pg_restore", "-d", target, file)


def run(program: str, *arguments: str) -> list[str]:
    """Run a program of the tested PostgreSQL, and return its errors in order."""
    done = subprocess.run(
        [find_binaries() / program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = sorted(ERROR.findall(done.stderr))
    assert errors or done.returncode == 0, done.stderr
    return errors


def partman(url: str) -> Partman:
    """Return pg_partman's tables with their columns, and its routines."""
    return dict(execute(url, COLUMNS)), {name for (name,) in execute(url, ROUTINES)}


def losses(older: Partman, newer: Partman) -> list[str]:
    """Return the errors caused by differences between two versions of pg_partman."""
    (old_tables, old_routines), (new_tables, new_routines) = older, newer
    missing = list(old_routines - new_routines)
    for table, columns in old_tables.items():
        if table not in new_tables:
            # One error for its rows, one for the owner's privileges.
            missing += [f'relation "partman.{table}"'] * 2
        else:
            gone = [column for column in columns if column not in new_tables[table]]
            missing += [
                f'column "{column}" of relation "{table}"' for column in gone[:1]
            ]
    return sorted(f"{what} does not exist" for what in missing)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_rows_policy_and_upkeep_survive_a_dump_and_restore(
    older: PostgresServer,
    server: PostgresServer,
    empty_database_url: str,
    tmp_path: Path,
    doctor: Doctor,
) -> None:
    file, roles = str(tmp_path / "dump"), str(tmp_path / "roles.sql")
    url = empty_database_url
    with new_database(older, "pillarbox_older") as name:
        source = older.database_url(name)
        migrate_for_a_week(source)
        for days in (20, 25):
            old_partition(source, days)
        add_old(source, 25)
        fill(source)
        execute(source, "UPDATE outbox.partition_policy SET premake = 9")
        execute(source, GONE)
        execute(source, DROPPED)
        execute(source, KEPT)
        execute(source, "SELECT outbox.finish_detached('outbox.message')")
        execute(source, "CREATE TABLE sale AS SELECT generate_series(1, 9) AS number")
        rows = contents(source)
        assert empty_tables(rows) == []
        beside = [execute(source, query) for query in BESIDE]
        schema, known = snapshot(source), partman(source)
        assert run("pg_dumpall", "--roles-only", "--file", roles, "-d", older.url) == []
        # Roles that already exist cause errors, and stay as they are.
        run("psql", "-X", "-q", "-f", roles, server.url)
        errors = carry(source, url, file)

    assert errors == losses(known, partman(url))
    assert contents(url) == rows
    assert [execute(url, query) for query in BESIDE] == beside
    if older is server:
        assert snapshot(url) == schema
    execute(url, "SELECT outbox.add('t', '{}'::jsonb, 'k')")
    migrate_for_a_week(url)
    assert main(["maintain", "--database", url]) == 0
    assert execute(url, HEALTH) == [(True, True, 0, 1)]
    assert len(execute(url, EXPIRED)) == 1
    publish(url)
    assert main(["maintain", "--database", url]) == 0
    assert execute(url, EXPIRED) == []
    _, findings = doctor(url)
    # fill() adds dead letters and failing processes.
    assert {(f["check"], f["severity"]) for f in findings} == {
        ("failures", "warning"),
        ("grants", "warning"),
    }
    assert "the role of reader main, gone, doesn't exist" in {
        f["finding"] for f in findings
    }
