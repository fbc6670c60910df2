"""The timeline of the partitions, and the policy that the upkeep follows."""

import json
import re
from collections.abc import Iterator

import pytest
from psycopg.errors import CheckViolation

from pillarbox.outbox.administration.checks.retention import (
    KEPT_FOR_LATE_MESSAGES,
    MINIMUM_RETENTION,
)
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, new_database
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED, leave_detached
from tests.outbox.administration.test_upkeep import TABLES, add_old, old_partition

Capture = pytest.CaptureFixture[str]


def outbox(url: str, capsys: Capture, *arguments: str, status: int = 0) -> str:
    """Run the command; return its output, or its error if it fails."""
    assert main([arguments[0], "--database", url, *arguments[1:]]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


@pytest.mark.week
def test_the_timeline_shows_past_held_today_and_ahead(
    database_url: str, capsys: Capture
) -> None:
    old_partition(database_url, 20)
    add_old(database_url, 20, topic="orders")
    add_old(database_url, 20, topic="mails")
    old_partition(database_url, 3)

    lines = outbox(database_url, capsys, "partitions").splitlines()

    start = lines.index("outbox.message: kept 7d, 7 ahead")
    # pg_partman created some partitions before today, too.
    assert re.fullmatch(r"  !·+#o{7,8}", lines[start + 1])
    held = lines[start + 2]
    assert "held" in held
    assert "2 unsettled: SELECT * FROM outbox.unsettled_messages('outbox." in held
    assert "unsettled rows: 2 (unclaimed), for example 0" in lines[start + 3]
    query = held.partition("unsettled: ")[2]
    assert len(execute(database_url, query)) == 2


def test_the_timeline_shows_each_place_as_json_too(
    database_url: str, capsys: Capture
) -> None:
    name = leave_detached(database_url)
    old_partition(database_url, 30)
    add_old(database_url, 30)
    execute(
        database_url,
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_default"
        " PARTITION OF outbox.message DEFAULT",
    )
    execute(database_url, "ANALYZE outbox.message")

    tables = json.loads(outbox(database_url, capsys, "partitions", "--json"))
    drawn = outbox(database_url, capsys, "partitions")

    assert "D default" in drawn.splitlines()[0]
    assert "  DEFAULT     default " in drawn
    assert "  detached " in drawn
    assert [table["parent_table"] for table in tables] == TABLES
    (messages,) = (t for t in tables if t["parent_table"] == "outbox.message")
    assert messages["retention"] == 7 * 86400
    held, detached, *others, default = messages["partitions"]
    assert (held["place"], held["unsettled"], held["rows"]) == ("held", 1, 1)
    assert held["bytes"] > 0
    assert (detached["place"], detached["partition"]) == ("detached", name)
    assert {"today", "ahead"} <= {p["place"] for p in others}
    assert (default["partition"], default["place"]) == (
        "outbox.message_default",
        "default",
    )
    assert default["starts_at"] is default["ends_at"] is None


def test_the_monitor_can_see_partitions_and_policy(
    database_url: str, capsys: Capture
) -> None:
    old_partition(database_url, 20)
    add_old(database_url, 20)
    url = f"{database_url}?options=-crole%3Dpillarbox_monitor"

    assert "1 unsettled" in outbox(url, capsys, "partitions")
    assert "inbox.receipt" in outbox(url, capsys, "retention")
    refused = outbox(url, capsys, "retention", "set", "outbox.message", "9d", status=2)
    assert "permission denied" in refused
    assert "member of" in refused


def test_the_policy_is_shown_and_set(database_url: str, capsys: Capture) -> None:
    shown = outbox(database_url, capsys, "retention")
    assert [line.split()[0] for line in shown.splitlines()] == TABLES
    assert "daily" in shown
    set_it = ("retention", "set", "outbox.message")
    for given, kept in (("24h", "1d"), ("36h", "36h"), ("3w", "21d")):
        assert f"kept {kept}" in outbox(database_url, capsys, *set_it, given)
        drawn = outbox(database_url, capsys, "partitions")
        assert f"outbox.message: kept {kept}, 3 ahead" in drawn.splitlines()

    policies = json.loads(outbox(database_url, capsys, "retention", "--json"))
    kept_for = {p["parent_table"]: p["retention"] for p in policies}
    assert kept_for["outbox.message"] == 21 * 86400


@pytest.fixture(scope="module")
def unchanged_url(server: PostgresServer, template: Template) -> Iterator[str]:
    """One database for all refusals, which change nothing."""
    with new_database(server, "pillarbox_refusals", template) as name:
        yield server.database_url(name)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["outbox.message", "12h"], "must be at least 1d"),
        (["outbox.message", "999999w"], "must be at most 36500d"),
        (["receipt", "--minimum", "99999d"], "at most 36500d"),
        (["outbox.message", "soon"], "retention 'soon': write 90s"),
        (
            ["outbox.message", "--interval", "monthly"],
            "use hourly, daily, weekly; hours, days and",
        ),
        (["shop_order", "7d"], "has no policy"),
        (["dead_letter", "7d"], "is ambiguous; write one of inbox.dead_letter"),
        (["outbox.message"], "write show, or set TABLE"),
        (["receipt", "6d"], "pass --minimum"),
        (["receipt", "--minimum", "15d"], "delayed or retried for 15d"),
        (["receipt", "--minimum", "long"], "'--minimum': 'long': write 90s"),
        (["job", "1d"], "inbox.job: a message delayed or retried for 6d"),
        (["outbox.position", "3d"], "as long as outbox.message"),
        (["outbox.message", "--archive", "archive.save"], "--archive"),
    ],
)
def test_a_dangerous_retention_policy_is_refused(
    unchanged_url: str, capsys: Capture, arguments: list[str], problem: str
) -> None:
    before = execute(unchanged_url, "TABLE outbox.partition_policy")

    refusal = outbox(unchanged_url, capsys, "retention", "set", *arguments, status=2)

    assert problem in refusal
    assert execute(unchanged_url, "TABLE outbox.partition_policy") == before


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("retention = '23:59'", "retention_at_least_a_day"),
        ("retention = '36501 days'", "retention_at_most_a_hundred_years"),
        ("minimum = '6 days', retention = '5 days'", "retention_not_below_minimum"),
        ("span = '2 days'", "span_hourly_daily"),
    ],
)
def test_the_database_refuses_it_too(
    unchanged_url: str, change: str, constraint: str
) -> None:
    with pytest.raises(CheckViolation, match=constraint):
        execute(unchanged_url, f"UPDATE outbox.partition_policy SET {change}")


@pytest.mark.parametrize("table", KEPT_FOR_LATE_MESSAGES)
def test_the_minimum_of_receipts_and_jobs_can_be_changed(
    table: str, database_url: str, capsys: Capture
) -> None:
    is_it = "SELECT minimum FROM outbox.partition_policy WHERE parent_table = %s"
    assert execute(database_url, is_it, (table,)) == [(MINIMUM_RETENTION,)]
    set_it = ("retention", "set", table)

    lowered = outbox(database_url, capsys, *set_it, "6d", "--minimum", "2d")
    assert "kept 6d" in lowered
    assert "at least 2d" in lowered
    raised = outbox(database_url, capsys, *set_it, "45d", "--minimum", "31d")
    assert "at least 31d" in raised
    refused = outbox(database_url, capsys, *set_it, "30d", status=2)
    assert "delayed or retried for 31d" in refused


def test_the_longest_retention_works(database_url: str, capsys: Capture) -> None:
    outbox(database_url, capsys, "retention", "set", "outbox.message", "36500d")
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '36500 days'")

    outbox(database_url, capsys, "maintain")
    outbox(database_url, capsys, "partitions")
    execute(database_url, "TABLE outbox.partition_health")


def test_upkeep_by_an_unprivileged_role_names_a_privileged_one(
    database_url: str, capsys: Capture
) -> None:
    old_partition(database_url)
    url = f"{database_url}?options=-crole%3Dpillarbox_monitor"

    refused = outbox(url, capsys, "maintain", status=2)

    assert "permission denied for procedure maintain" in refused
    assert "pillarbox_maintainer to run" in refused
    assert len(execute(database_url, EXPIRED)) == 1


def test_a_database_without_the_schema_is_reported(
    empty_database_url: str, capsys: Capture
) -> None:
    for command in ("partitions", "retention", "maintain", "doctor"):
        told = outbox(empty_database_url, capsys, command, status=2)
        assert "pillarbox migrate" in told, command
