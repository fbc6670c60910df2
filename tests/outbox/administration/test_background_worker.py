"""pg_partman's own background worker creates partitions; our upkeep does the rest."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from outbox.administration.migrate import migrate
from outbox.cli.main import main
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_upkeep import add_old, old_partition

# Without these, the role owns new partitions, and a time zone shifts or skips one.
LEND_THE_DETACHER = """
ALTER ROLE pillarbox_detacher IN DATABASE pillarbox SET role = 'pillarbox_owner';
ALTER ROLE pillarbox_detacher IN DATABASE pillarbox SET timezone = 'UTC';
ALTER ROLE pillarbox_detacher IN DATABASE pillarbox SET lock_timeout = '100ms';
"""
LET_IT = "UPDATE outbox.partition_policy SET automatic = true"
OF_MESSAGE = " WHERE parent_table = 'outbox.message'"
RETENTION = "SELECT retention FROM partman.part_config" + OF_MESSAGE
# Beyond the month that a migration without pg_cron creates.
MORE = "UPDATE partman.part_config SET premake = 33"
AHEAD = "SELECT min(ahead) FROM outbox.partition_health"
BOUNDS = (
    "SELECT starts_at::text, ends_at::text FROM outbox.partitions('outbox.message')"
    " WHERE partition = to_regclass(%s)"
)
ODD = """
SELECT x.* FROM outbox.partition_policy p, outbox.partitions(p.parent_table) x
 WHERE x.owner <> 'pillarbox_owner'::regrole OR x.is_default
    OR x.starts_at <> date_trunc('day', x.starts_at, 'UTC')
    OR x.ends_at - x.starts_at <> interval '1 day'
"""

POSTMASTER = (
    "SELECT (regexp_match(pg_read_file('postmaster.pid'), '^[0-9]+'))[1]::integer"
)
T = TypeVar("T")


@pytest.fixture
def partman_worker() -> Iterator[PostgresServer]:
    """Start a server that runs pg_partman's worker every second, without pg_cron."""
    settings = {
        "shared_preload_libraries": "pg_partman_bgw",
        "pg_partman_bgw.dbname": "pillarbox",
        "pg_partman_bgw.role": "pillarbox_detacher",
        "pg_partman_bgw.interval": "1",
        "timezone": "Pacific/Chatham",
    }
    with postgres_server(settings=settings, durable=False, docker=False) as running:
        execute(running.url, "CREATE ROLE pillarbox_detacher LOGIN")
        yield running


def wait_for_the_worker(
    server: PostgresServer, what: str, condition: Callable[[], T]
) -> T:
    """Wait for an effect of pg_partman's worker; restart the server if the worker died.

    If a maintenance process ends before the main process checks on it, the main process
    concludes that it could not start (`BGWH_STOPPED`) and exits. PostgreSQL restarts it
    after 10 minutes. This is likely on a busy machine.
    """

    def satisfied() -> T:
        if not (found := condition()) and not runs_the_worker(server):
            server.restart()
        return found

    return wait_for(what, satisfied, seconds=150, pause=0.1)


def runs_the_worker(server: PostgresServer) -> bool:
    """Return whether the main process runs; it has no row in pg_stat_activity."""
    ((postmaster,),) = execute(server.url, POSTMASTER)
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text()
    for child in children.split():
        with suppress(OSError):
            if b"pg_partman master" in Path(f"/proc/{child}/cmdline").read_bytes():
                return True
    return False


@pytest.mark.timeout(240)
def test_the_worker_creates_partitions_and_leaves_dropping_to_the_command(
    partman_worker: PostgresServer,
) -> None:
    url = partman_worker.url
    migrate(url, with_cron=False)
    execute(url, "BEGIN;" + LEND_THE_DETACHER + "COMMIT")
    execute(url, LET_IT)
    assert main(["maintain", "--database", url]) == 0
    old_partition(url, 20)
    old_partition(url, 25)
    add_old(url, 25)
    execute(url, MORE)

    wait_for_the_worker(
        partman_worker, "days by the worker", lambda: execute(url, AHEAD)[0][0] >= 33
    )

    assert execute(url, ODD) == []
    assert len(execute(url, EXPIRED)) == 2
    execute(url, "SELECT outbox.add('t', '{}'::jsonb)")
    # The command drops a partition, and reports the manually changed setting once.
    assert main(["maintain", "--database", url]) == 2
    assert len(execute(url, EXPIRED)) == 1
    assert main(["maintain", "--database", url]) == 0


@pytest.mark.timeout(240)
def test_a_retention_set_by_hand_drops_nothing_and_is_reset(
    partman_worker: PostgresServer, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    url = partman_worker.url
    migrate(url, with_cron=False)
    execute(url, "BEGIN;" + LEND_THE_DETACHER + "COMMIT")
    execute(url, LET_IT)
    assert main(["maintain", "--database", url]) == 0
    old_partition(url, 20)
    add_old(url, 20)
    ((day,),) = execute(url, EXPIRED)
    ((start, end),) = execute(url, BOUNDS, [day])

    execute(url, "UPDATE partman.part_config SET retention = '7 days'" + OF_MESSAGE)

    wait_for_the_worker(
        partman_worker, "its detach", lambda: execute(url, EXPIRED) == []
    )
    assert execute(url, f"SELECT count(*) FROM {day}") == [(1,)]
    assert main(["maintain", "--database", url]) == 2
    said = "retention was 7 days and is null again"
    assert said in capsys.readouterr().err
    assert execute(url, RETENTION) == [(None,)]
    findings = doctor(url)[1]
    assert any(said in f["finding"] for f in findings if f["check"] == "upkeep")
    (stray,) = (f for f in findings if f"{day} has the name" in f["finding"])
    assert "attach it to outbox.message" in stray["remedy"]
    execute(
        url,
        f"ALTER TABLE outbox.message ATTACH PARTITION {day}"
        f" FOR VALUES FROM ('{start}') TO ('{end}')",
    )
    assert main(["maintain", "--database", url]) == 0
    assert execute(url, EXPIRED) == [(day,)]
    assert execute(url, "SELECT count(*) FROM outbox.message") == [(1,)]


@pytest.mark.timeout(240)
def test_the_doctor_finds_partitions_made_by_another_role(
    partman_worker: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = partman_worker.url
    migrate(url, with_cron=False)
    execute(url, LET_IT)
    assert main(["maintain", "--database", url]) == 0
    execute(url, MORE)

    wait_for_the_worker(
        partman_worker, "days by the worker", lambda: execute(url, AHEAD)[0][0] >= 33
    )

    assert main(["doctor", "--database", url]) == 3
    assert "belongs to pillarbox_detacher" in capsys.readouterr().out
