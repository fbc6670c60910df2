"""The last success of the upkeep is recorded, whatever runs it, and checked."""

import json
from typing import Any, Final

import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import MigratedData, copied_server, migrate
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import acting_as

FRESH: Final = "SELECT succeeded_at > now() - interval '1 minute' FROM outbox.upkeep"
LONG_AGO: Final = (
    "UPDATE outbox.upkeep SET awaited_at = now() - interval '4 hours',"
    " succeeded_at = {}::timestamptz - interval '4 hours'"
)


def ask(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[Any]]:
    """Return the doctor's exit status, and what it finds except hints.

    Every role can connect to a test's database, and no relay is running.
    """
    capsys.readouterr()
    status = main(["doctor", "--json", "--database", url])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return status, [f for f in findings if f["severity"] not in ("unknown", "hint")]


def test_the_last_success_is_recorded_and_must_be_recent(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = f"{database_url}?options=-crole%3Dpillarbox_monitor"
    assert execute(database_url, FRESH) == [(None,)]
    status, (found,) = ask(database_url, capsys)
    assert (status, found["check"]) == (1, "upkeep")
    assert "has not run yet" in found["finding"]

    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintainer.execute("CALL outbox.maintain()")

    assert execute(database_url, FRESH) == [(True,)]
    assert ask(database_url, capsys) == (0, [])
    assert ask(monitor, capsys) == (4, [])  # it can't see all transactions
    for lost, said in (
        (LONG_AGO.format("now()"), "last succeeded at 2"),
        (LONG_AGO.format("NULL"), "has never succeeded"),
        ("DELETE FROM outbox.upkeep", "has never succeeded"),
    ):
        execute(database_url, lost)
        status, (found,) = ask(database_url, capsys)
        assert (status, found["check"], found["severity"]) == (3, "upkeep", "error")
        assert said in found["finding"]
    paste(database_url, found["remedy"])
    assert execute(database_url, FRESH) == [(True,)]
    assert ask(database_url, capsys) == (0, [])


def test_on_a_server_without_pg_cron_any_scheduler_can_run_the_upkeep(
    migrated_data: MigratedData, capsys: pytest.CaptureFixture[str]
) -> None:
    data = migrated_data.directory(with_cron=False)
    with copied_server(data, shared_preload_libraries="") as bare:
        with pytest.raises(MigrationError, match="shared_preload_libraries"):
            migrate(bare.url)
        status, (found,) = ask(bare.url, capsys)
        assert status == 1
        assert found["remedy"].endswith("every hour from any scheduler")
        paste(bare.url, found["remedy"])
        assert ask(bare.url, capsys) == (0, [])


def test_pg_cron_need_not_run_our_jobs(
    scheduled_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = scheduled_server.url
    assert main(["maintain", "--database", url]) == 0
    execute(url, "UPDATE cron.job SET active = false")
    assert ask(url, capsys) == (0, [])
    execute(url, LONG_AGO.format("now()"))
    status, findings = ask(url, capsys)
    assert status == 3
    assert [f["check"] for f in findings] == ["upkeep", "cron", "cron"]
    assert "or by pg_cron: pillarbox migrate" in findings[0]["remedy"]
    assert "is inactive" in findings[1]["finding"]
    execute(url, "SELECT cron.unschedule(jobid) FROM cron.job")
    assert ask(url, capsys)[0] == 3

    assert main(["maintain", "--database", url]) == 0

    assert ask(url, capsys) == (0, [])
