"""The timeline of the partitions, and the policy that the upkeep follows."""

import json
import re

import pytest
from psycopg.errors import CheckViolation

from outbox.administration.checks.retention import (
    KEPT_FOR_LATE_MESSAGES,
    MINIMUM_RETENTION,
)
from outbox.cli.main import main
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_detach import leave_detached
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


def test_the_timeline_as_json_shows_the_same(
    database_url: str, capsys: Capture
) -> None:
    name = leave_detached(database_url)
    old_partition(database_url, 30)
    add_old(database_url, 30)
    execute(database_url, "ANALYZE outbox.message")

    tables = json.loads(outbox(database_url, capsys, "partitions", "--json"))

    assert [table["parent_table"] for table in tables] == TABLES
    (messages,) = (t for t in tables if t["parent_table"] == "outbox.message")
    assert messages["retention"] == 7 * 86400
    held, detached = messages["partitions"][:2]
    assert (held["place"], held["unsettled"], held["rows"]) == ("held", 1, 1)
    assert (detached["place"], detached["partition"]) == ("detached", name)
    assert held["bytes"] > 0
    places = {p["place"] for p in messages["partitions"]}
    assert {"today", "ahead"} <= places


@pytest.mark.week
def test_a_default_partition_is_shown(database_url: str, capsys: Capture) -> None:
    execute(
        database_url,
        "SET ROLE pillarbox_owner; CREATE TABLE outbox.message_default"
        " PARTITION OF outbox.message DEFAULT",
    )

    lines = outbox(database_url, capsys, "partitions").splitlines()
    tables = json.loads(outbox(database_url, capsys, "partitions", "--json"))

    assert "D default" in lines[0]
    start = lines.index("outbox.message: kept 7d, 7 ahead")
    assert re.fullmatch(r"  ·*#o+D", lines[start + 1])
    assert any(line.startswith("  DEFAULT     default ") for line in lines)
    (messages,) = (t for t in tables if t["parent_table"] == "outbox.message")
    found = messages["partitions"][-1]
    assert (found["partition"], found["place"]) == ("outbox.message_default", "default")
    assert found["starts_at"] is found["ends_at"] is None


@pytest.mark.week
@pytest.mark.parametrize(
    ("retention", "shown"),
    [
        *(("1d", "1d"), ("24h", "1d"), ("36h", "36h"), ("2w", "14d")),
    ],
)
def test_the_timeline_shows_the_whole_retention(
    retention: str, shown: str, database_url: str, capsys: Capture
) -> None:
    outbox(database_url, capsys, "retention", "set", "outbox.message", retention)

    drawn = outbox(database_url, capsys, "partitions")

    assert f"outbox.message: kept {shown}, 7 ahead" in drawn.splitlines()


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

    changed = outbox(database_url, capsys, "retention", "set", "outbox.message", "3w")
    assert "kept 21d" in changed

    policies = json.loads(outbox(database_url, capsys, "retention", "--json"))
    kept = {p["parent_table"]: p["retention"] for p in policies}["outbox.message"]
    assert kept == 21 * 86400


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["outbox.message", "12h"], "must be at least a day"),
        (["outbox.message", "999999w"], "must be at most 36500 days, a hundred years"),
        (["receipt", "36501d"], "write 36500d or less"),
        (["receipt", "--minimum", "99999d"], "minimum=99999 days of inbox.receipt"),
        (["outbox.message", "soon"], "retention 'soon': write 90s"),
        (["outbox.message", "--interval", "monthly"], "use hourly, daily, weekly"),
        (["shop_order", "7d"], "has no policy"),
        (["dead_letter", "7d"], "is ambiguous; write one of inbox.dead_letter"),
        (["outbox.message"], "nothing to set"),
        (["receipt", "6d"], "add --minimum"),
        (["receipt", "--minimum", "15d"], "can come back after 15d"),
        (["receipt", "--minimum", "long"], "'--minimum': 'long': write 90s"),
        (["job", "1d"], "inbox.job: a message can come back after 6d"),
    ],
)
def test_a_dangerous_retention_policy_is_refused(
    database_url: str, capsys: Capture, arguments: list[str], problem: str
) -> None:
    before = execute(database_url, "TABLE outbox.partition_policy")

    refusal = outbox(database_url, capsys, "retention", "set", *arguments, status=2)

    assert problem in refusal
    assert execute(database_url, "TABLE outbox.partition_policy") == before


@pytest.mark.parametrize("table", KEPT_FOR_LATE_MESSAGES)
def test_a_lower_minimum_allows_a_shorter_retention_of_receipts_and_jobs(
    table: str, database_url: str, capsys: Capture
) -> None:
    set_it = ["retention", "--database", database_url, "set", table, "6d"]

    assert main([*set_it, "--minimum", "2d"]) == 0

    printed = capsys.readouterr()
    assert "kept 6d" in printed.out
    assert "at least 2d" in printed.out


@pytest.mark.parametrize("table", KEPT_FOR_LATE_MESSAGES)
def test_the_minimum_covers_the_defaults_and_the_database_enforces_it(
    table: str, database_url: str
) -> None:
    is_it = "SELECT minimum FROM outbox.partition_policy WHERE parent_table = %s"
    shorten = "UPDATE outbox.partition_policy SET retention = '6 days' WHERE"

    assert execute(database_url, is_it, (table,)) == [(MINIMUM_RETENTION,)]
    with pytest.raises(CheckViolation, match="retention_not_below_minimum"):
        execute(database_url, f"{shorten} parent_table = %s", (table,))


@pytest.mark.parametrize("table", KEPT_FOR_LATE_MESSAGES)
def test_a_minimum_above_the_defaults_is_respected(
    table: str, database_url: str, capsys: Capture
) -> None:
    told = outbox(
        database_url, capsys, "retention", "set", table, "45d", "--minimum", "31d"
    )
    assert "at least 31d" in told

    refused = outbox(database_url, capsys, "retention", "set", table, "30d", status=2)
    assert "can come back after 31d" in refused


@pytest.mark.parametrize("table", TABLES)
def test_the_database_also_refuses_less_than_a_day(
    table: str, database_url: str
) -> None:
    shorten = "UPDATE outbox.partition_policy SET retention = '23:59' WHERE"

    with pytest.raises(CheckViolation, match="retention_at_least_a_day"):
        execute(database_url, f"{shorten} parent_table = %s", (table,))


@pytest.mark.parametrize("table", TABLES)
def test_the_database_also_refuses_more_than_a_hundred_years(
    table: str, database_url: str
) -> None:
    lengthen = "UPDATE outbox.partition_policy SET retention = '36501 days' WHERE"

    with pytest.raises(CheckViolation, match="retention_at_most_a_hundred_years"):
        execute(database_url, f"{lengthen} parent_table = %s", (table,))


def test_the_longest_retention_works(database_url: str, capsys: Capture) -> None:
    outbox(database_url, capsys, "retention", "set", "outbox.message", "36500d")
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '36500 days'")

    outbox(database_url, capsys, "maintain")
    outbox(database_url, capsys, "partitions")
    execute(database_url, "TABLE outbox.partition_health")


@pytest.mark.parametrize("role", ["relay", "application", "consumer", "monitor"])
def test_upkeep_by_an_unprivileged_role_names_a_privileged_one(
    role: str, database_url: str, capsys: Capture
) -> None:
    old_partition(database_url)
    url = f"{database_url}?options=-crole%3Dpillarbox_{role}"

    refused = outbox(url, capsys, "maintain", status=2)

    assert "permission denied for procedure maintain" in refused
    assert "pillarbox_maintainer to run" in refused
    assert len(execute(database_url, EXPIRED)) == 1


def test_a_database_without_the_schema_is_reported(
    empty_database_url: str, capsys: Capture
) -> None:
    for command in ("partitions", "retention", "maintain"):
        told = outbox(empty_database_url, capsys, command, status=2)
        assert "pillarbox migrate" in told
