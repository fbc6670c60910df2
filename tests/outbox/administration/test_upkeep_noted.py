"""The last success of the upkeep is recorded, whatever runs it, and checked."""

import json
from typing import Any, Final

import pytest

from outbox.cli.main import main
from outbox.errors import UpkeepError
from outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate, migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.outbox.administration.retiring import acting_as

FRESH: Final = "SELECT succeeded_at > now() - interval '1 minute' FROM outbox.upkeep"
LONG_AGO: Final = (
    "UPDATE outbox.upkeep SET awaited_at = now() - interval '4 hours',"
    " succeeded_at = {}::timestamptz - interval '4 hours'"
)
BREAK_A_CONDITION: Final = (
    "UPDATE outbox.partition_policy SET unsettled = 'no_such_column IS NULL'"
    " WHERE parent_table = 'inbox.job'"
)
TURN_OFF: Final = "UPDATE cron.job SET active = false"


def ask(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[Any]]:
    """Return the doctor's exit status, and what it finds except hints.

    Every role can connect to a test's database, and no relay is running.
    """
    capsys.readouterr()
    status = main(["doctor", "--json", "--database", url])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return status, [f for f in findings if f["severity"] not in ("unknown", "hint")]


def test_a_jobs_statement_is_recorded(database_url: str) -> None:
    assert execute(database_url, FRESH) == [(None,)]

    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        maintainer.execute("CALL outbox.maintain()")

    assert execute(database_url, FRESH) == [(True,)]


def test_a_run_of_the_command_is_recorded_and_the_doctor_finds_nothing_more(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = f"{database_url}?options=-crole%3Dpillarbox_monitor"
    status, (found,) = ask(database_url, capsys)
    assert (status, found["check"]) == (1, "upkeep")
    assert "has not run yet" in found["finding"]
    assert ask(monitor, capsys)[0] == 4  # the monitor can't see all transactions

    paste(database_url, found["remedy"])

    assert execute(database_url, FRESH) == [(True,)]
    assert ask(database_url, capsys) == (0, [])
    assert ask(monitor, capsys) == (4, [])


def test_a_failed_run_is_not_recorded_as_success(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["maintain", "--database", database_url]) == 0
    execute(database_url, LONG_AGO.format("now()"))
    execute(database_url, BREAK_A_CONDITION)
    execute(
        f"{database_url}?options=-crole%3Dpillarbox_owner",
        "SELECT outbox.make_partition('inbox.job',"
        " date_trunc('day', now(), 'UTC') - 20 * interval '24 hours')",
    )

    with pytest.raises(UpkeepError, match=r"retention of inbox\.job"):
        run_upkeep(database_url)

    assert execute(database_url, FRESH) == [(False,)]


@pytest.mark.parametrize(
    ("last", "said"),
    [("now()", "last succeeded at 2"), ("NULL", "has never succeeded")],
)
def test_an_upkeep_that_ran_hours_ago_or_never_is_an_error(
    last: str, said: str, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, LONG_AGO.format(last))

    status, (found,) = ask(database_url, capsys)

    assert (status, found["check"], found["severity"]) == (3, "upkeep", "error")
    assert said in found["finding"]
    paste(database_url, found["remedy"])
    assert ask(database_url, capsys) == (0, [])


def test_without_its_record_the_upkeep_counts_as_never_run(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, "DELETE FROM outbox.upkeep")
    _, (found,) = ask(database_url, capsys)
    assert "has never succeeded" in found["finding"]

    paste(database_url, found["remedy"])

    assert ask(database_url, capsys) == (0, [])


def test_without_pg_cron_any_scheduler_can_run_the_upkeep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with postgres_server(
        settings={"shared_preload_libraries": ""}, durable=False
    ) as bare:
        migrate_for_a_week(bare.url)
        status, (found,) = ask(bare.url, capsys)
        assert status == 1
        assert found["remedy"].endswith("every hour, by any scheduler")
        paste(bare.url, found["remedy"])
        assert ask(bare.url, capsys) == (0, [])


def test_pg_cron_can_be_installed_without_running_our_jobs(
    private_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = private_server.url
    execute(url, "CREATE EXTENSION pg_cron")
    migrate_for_a_week(url)
    execute(url, LONG_AGO.format("now()"))
    status, findings = ask(url, capsys)
    assert status == 3
    (found,) = (f for f in findings if f["check"] == "upkeep")
    assert "or by pg_cron: pillarbox migrate" in found["remedy"]

    assert main(["maintain", "--database", url]) == 0

    assert ask(url, capsys) == (0, [])
    # The jobs that migrate created can be switched off.
    migrate(url)
    execute(url, TURN_OFF)
    assert ask(url, capsys) == (0, [])
    execute(url, LONG_AGO.format("now()"))
    status, findings = ask(url, capsys)
    assert status == 3
    assert [f["check"] for f in findings] == ["upkeep", "cron", "cron"]
    assert "is inactive" in findings[1]["finding"]
