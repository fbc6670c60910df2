"""pg_partman is upgraded from 4 to 5 while writers, a relay and a consumer run."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.counters import Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays, as_role
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import add_old, old_partition

pytestmark = pytest.mark.usefixtures("alone")

# The message holds its partition, and the relay does not publish it.
HOLD_BACK = "UPDATE outbox.message SET available_at = now() + interval '1 day'"
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
    """Return a version of pg_partman 4, and one of 5 to which it can be upgraded."""
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
        lacking = "the server lacks the files of pg_partman 4 and 5"
        assert "PILLARBOX_MUST_UPGRADE" not in os.environ, lacking
        pytest.skip(f"{lacking}: make matrix")
    old, new = found[0]
    return str(old), str(new)


class Writers:
    """Sessions that each add numbered messages of one key, one per transaction."""

    def __init__(self, url: str, number: int) -> None:
        self._url = as_role(url, "pillarbox_application")
        self._stop = threading.Event()
        self.added = {f"writer {n}": 0 for n in range(number)}
        self.failures: list[psycopg.Error] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._write, args=(k,)) for k in self.added]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    def _write(self, key: str) -> None:
        query = "SELECT outbox.add('numbers.counted', convert_to(%s, 'UTF8'), %s)"
        try:
            with psycopg.connect(self._url, autocommit=True) as connection:
                # Slowly enough for one consumer to keep up.
                while not self._stop.wait(0.1):
                    connection.execute(query, (str(self.added[key]), key))
                    self.added[key] += 1
        except psycopg.Error as error:
            self.failures.append(error)


@pytest.mark.timeout(300)
def test_writers_relay_and_consumer_continue_and_migrate_restores_grants(
    versions: tuple[str, str],
    empty_database_url: str,
    tmp_path: Path,
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
    execute(url, HOLD_BACK)
    writers = Writers(url, 4)

    with (
        Inspection(url) as inspection,
        Relays(url, tmp_path) as relays,
        Counters(url, tmp_path, inspection) as counters,
    ):
        processes = [
            relays.start("memory://drop", "--lease=2s"),
            counters.start(as_role(url, "pillarbox_relay")),
        ]

        def all_continue() -> None:
            handled, added = counters.count(), dict(writers.added)
            wait_for(
                "each writer and the consumer",
                lambda: (
                    writers.failures
                    or (
                        counters.count() > handled + 4
                        and all(writers.added[k] > n for k, n in added.items())
                    )
                ),
            )
            assert writers.failures == []

        with writers.at_work():
            all_continue()
            execute(url, f"ALTER EXTENSION pg_partman UPDATE TO '{five}'")
            all_continue()
            assert main(["doctor", "--database", url]) == 3
            assert "lacks privileges on pg_partman" in capsys.readouterr().out
            assert main(["maintain", "--database", url]) == 2
            assert "pillarbox doctor" in capsys.readouterr().err
            migrate(url, with_cron=False)
            assert main(["maintain", "--database", url]) == 0
            all_continue()
        wait_for("all is settled", lambda: inspection.unsettled() == 1, seconds=120)

        assert writers.failures == []
        numbers = {key: list(range(count)) for key, count in writers.added.items()}
        assert counters.numbers() == numbers
        for process in processes:
            assert process.is_running()
            assert "Lost" not in process.log(), process.log()

    assert execute(url, HEALTH) == [(True, True, 0, 1)]
    assert execute(url, "SELECT min(ahead) >= 9 FROM outbox.partition_health") == [
        (True,)
    ]
    assert execute(url, FORGOTTEN) == []
    assert len(execute(url, EXPIRED)) == 1
