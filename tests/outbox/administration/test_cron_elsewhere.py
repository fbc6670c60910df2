"""pg_cron runs in a different database of the server than ours."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.cli.main import main
from outbox.testing.cluster import private_cluster
from outbox.testing.postgres import PostgresServer
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import (
    SETTINGS,
    copied_server,
    migrate_for_a_week,
)
from tests.fixtures.sessions import execute, session


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """The directory of a stopped server whose pg_cron runs in another database."""
    with private_cluster(SETTINGS, durable=False) as cluster:
        execute(cluster.url, "CREATE DATABASE bank")
        migrate_for_a_week(PostgresServer(cluster.url).database_url("bank"))
        session.end()
        cluster.stop("fast")
        yield cluster.data


@pytest.fixture
def its_server(data: Path) -> Iterator[PostgresServer]:
    with copied_server(data) as running:
        yield running


@pytest.fixture
def elsewhere(its_server: PostgresServer) -> str:
    """The migrated database."""
    return its_server.database_url("bank")


def test_the_doctor_says_who_can_run_the_upkeep_and_passes_after_a_run(
    elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--database", elsewhere]) == 1

    findings = json.loads(capsys.readouterr().out)["findings"]
    # Every role can connect to a test's database, and no relay is running.
    (found,) = (f for f in findings if f["severity"] != "hint")
    assert (found["check"], found["severity"]) == ("upkeep", "warning")
    assert "the upkeep has not run yet" in found["finding"]

    paste(elsewhere, found["remedy"])

    assert main(["doctor", "--database", elsewhere]) == 0
