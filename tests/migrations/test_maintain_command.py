"""The plan of the upkeep, printed."""

import pytest

from outbox.cli import main
from tests.fixtures.relay import execute
from tests.migrations.retiring import EXPIRED
from tests.migrations.test_upkeep import add_old, old_partition


def test_a_dry_run_prints_each_step_with_its_reason_and_does_nothing(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((ahead,),) = execute(
        database_url,
        "SELECT partition::text FROM outbox.partitions('outbox.message')"
        " WHERE starts_at = date_trunc('day', now(), 'UTC') + interval '3 days'",
    )
    command = ["maintain", "--dry-run", "--database", database_url]
    assert main(command) == 0
    assert capsys.readouterr().out == "nothing to do\n"
    execute(database_url, f"DROP TABLE {ahead}")
    for days in (20, 25):
        old_partition(database_url, days)
    add_old(database_url, 25)
    execute(
        database_url,
        "INSERT INTO inbox.foreign_receipt VALUES"
        " ('stripe', 'a', 'billing', now() - interval '15 days')",
    )

    assert main(command) == 0

    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[::2]] == [
        *("make", "hold", "detach", "trim")
    ]
    assert "older than the retention of 7 days, but it has unsettled rows (1 rows)" in (
        printed
    )
    assert "CONCURRENTLY" in printed
    assert len(execute(database_url, EXPIRED)) == 2
