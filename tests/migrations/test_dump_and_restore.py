"""A dump goes into another server, which may be newer, and the upkeep goes on there.

The dump is of the server of PILLARBOX_OLDER_DATABASE_URL, or of the tests' own.
"""

import os
import subprocess
from collections.abc import Iterator

import pytest

from outbox.cli import main
from outbox.migrate import migrate
from outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import new_database, one_at_a_time
from tests.fixtures.relay import execute
from tests.migrations.retiring import EXPIRED
from tests.migrations.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")

CONTENTS = (
    "SELECT * FROM outbox.message ORDER BY seq",
    "SELECT * FROM outbox.dead_letter",
    "SELECT * FROM inbox.foreign_receipt",
    "SELECT * FROM outbox.partition_policy ORDER BY parent_table",
    "SELECT nextval('outbox.message_seq') > 3",
    "SELECT parent_table, x.starts_at, x.ends_at FROM outbox.partition_policy p,"
    " outbox.partitions(p.parent_table) x ORDER BY 1, 2",
)
HEALTH = (
    "SELECT min(ahead) >= 9, bool_and(has_today), sum(defaults), max(owners)"
    " FROM outbox.partition_health"
)


@pytest.fixture
def older(server: PostgresServer) -> Iterator[PostgresServer]:
    url = os.environ.get("PILLARBOX_OLDER_DATABASE_URL")
    if not url:
        yield server
        return
    elsewhere = PostgresServer(url)
    with one_at_a_time(elsewhere):
        yield elsewhere


def dump(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def restore(url: str, script: str) -> list[str]:
    """Give the errors; what comes after one is restored all the same."""
    done = subprocess.run(
        ["psql", "-X", "-q", url],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "ERROR:" in line]


@pytest.mark.timeout(180)
def test_rows_policy_and_upkeep_survive_a_dump_and_its_restore(
    older: PostgresServer, server: PostgresServer, empty_database_url: str
) -> None:
    with new_database(older, "pillarbox_older") as name:
        source = older.database_url(name)
        migrate(source, with_cron=False)
        for days in (20, 25):
            old_partition(source, days)
        add_old(source, 25)
        for n in range(3):
            execute(source, f"SELECT outbox.add('t', '{{\"n\": {n}}}'::jsonb, 'k')")
        execute(source, "INSERT INTO inbox.foreign_receipt VALUES ('a', 'b', 'c')")
        execute(source, "UPDATE outbox.partition_policy SET premake = 9")
        script = dump("pg_dump", source)
        contents = [execute(source, query) for query in CONTENTS]
        roles = dump("pg_dumpall", "--roles-only", "-d", older.url)

    url = empty_database_url
    # Those that are there already are errors, and stay as they are.
    restore(server.url, roles)
    errors = restore(url, script)

    # pg_partman 5 has not the columns and functions of 4.
    assert [line for line in errors if "part" not in line] == []
    assert [execute(url, query) for query in CONTENTS] == contents
    execute(url, "SELECT outbox.add('t', '{}'::jsonb, 'k')")
    migrate(url, with_cron=False)
    assert main(["maintain", "--database", url]) == 0
    assert execute(url, HEALTH) == [(True, True, 0, 1)]
    assert len(execute(url, EXPIRED)) == 1
    execute(url, "UPDATE outbox.message SET published_at = now()")
    assert main(["maintain", "--database", url]) == 0
    assert execute(url, EXPIRED) == []
    assert main(["doctor", "--database", url]) < 3  # no pg_cron is a warning
