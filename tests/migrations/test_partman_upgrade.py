"""pg_partman goes from 4 to 5 under tables that are written to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from outbox.cli import main
from outbox.migrate import migrate
from outbox.testing.postgres import PostgresServer
from tests.fixtures.relay import execute
from tests.fixtures.waiting import wait_for
from tests.migrations.retiring import EXPIRED
from tests.migrations.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")

COUNT = "SELECT count(*) FROM outbox.message"
HEALTH = (
    "SELECT min(ahead) >= 7, bool_and(has_today), sum(defaults), max(owners)"
    " FROM outbox.partition_health"
)
FORGOTTEN = (
    "SELECT parent_table FROM outbox.partition_policy p WHERE NOT EXISTS ("
    "SELECT FROM partman.part_config c WHERE c.parent_table = p.parent_table"
    " AND c.retention IS NULL AND c.infinite_time_partitions)"
)


@pytest.fixture
def versions(server: PostgresServer) -> tuple[str, str]:
    """A version of pg_partman 4, and one of 5 that this server can upgrade it to."""
    found = execute(
        server.url,
        "SELECT source, target FROM pg_extension_update_paths('pg_partman')"
        " JOIN pg_available_extension_versions v"
        "   ON v.name = 'pg_partman' AND v.version = source"
        " JOIN pg_available_extensions e ON e.name = v.name"
        " WHERE path IS NOT NULL AND source LIKE '4.7.%' AND target LIKE '5.%'"
        " ORDER BY target = default_version DESC,"
        "   string_to_array(target, '.')::int[] DESC, source LIMIT 1",
    )
    if not found:
        pytest.skip("the server has not the files of pg_partman 4 and 5: make matrix")
    old, new = found[0]
    return str(old), str(new)


class Writers:
    """Sessions that add messages one by one, each in a transaction of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.added = 0
        self.failures: list[psycopg.Error] = []
        self._lock = threading.Lock()

    @contextmanager
    def at_work(self, number: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._write) for _ in range(number)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    def go_on(self) -> None:
        """Wait until each of them must have written once more."""
        goal = self.added + 20
        wait_for("writers", lambda: self.added >= goal or self.failures, seconds=60)

    def _write(self) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                while not self._stop.is_set():
                    connection.execute("SELECT outbox.add('t', '{}'::jsonb, 'k')")
                    with self._lock:
                        self.added += 1
        except psycopg.Error as error:
            self.failures.append(error)


@pytest.mark.timeout(180)
def test_writers_go_on_and_migrate_gives_back_what_the_upgrade_took(
    versions: tuple[str, str],
    empty_database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = empty_database_url
    four, five = versions
    execute(url, "CREATE SCHEMA partman")
    execute(url, f"CREATE EXTENSION pg_partman SCHEMA partman VERSION '{four}'")
    migrate(url, with_cron=False)
    execute(url, "UPDATE outbox.partition_policy SET premake = 9")
    for days in (20, 25):
        old_partition(url, days)
    add_old(url, 25)
    writers = Writers(url)

    with writers.at_work(4):
        writers.go_on()
        execute(url, f"ALTER EXTENSION pg_partman UPDATE TO '{five}'")
        writers.go_on()
        assert main(["doctor", "--database", url]) == 3
        assert "may not use pg_partman" in capsys.readouterr().out
        migrate(url, with_cron=False)
        assert main(["maintain", "--database", url]) == 0
        writers.go_on()

    assert writers.failures == []
    assert execute(url, COUNT) == [(writers.added + 1,)]
    assert execute(url, HEALTH) == [(True, True, 0, 1)]
    assert execute(url, "SELECT min(ahead) >= 9 FROM outbox.partition_health") == [
        (True,)
    ]
    assert execute(url, FORGOTTEN) == []
    assert len(execute(url, EXPIRED)) == 1
