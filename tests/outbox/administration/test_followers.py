"""Positions are kept as long as their messages: no message loses its outcome."""

import json
from contextlib import suppress
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg.errors import CheckViolation, ForeignKeyViolation
from typing_extensions import override

from pillarbox.outbox.administration.upkeep import maintain
from pillarbox.outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.positions import count_holding, publish, replay
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import (
    EXPIRED,
    acting_as,
    detach,
    leave_detached,
    note,
    steps,
)
from tests.outbox.administration.test_upkeep import (
    FOLLOWERS,
    add_old,
    exists,
    old_partition,
)

Capture = pytest.CaptureFixture[str]

ENDED = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
OLD = (
    "SELECT p.parent_table, x.partition::text FROM outbox.partition_policy p,"
    " outbox.partitions(p.parent_table) x WHERE x.ends_at < now() - 7 * interval"
    " '24 hours' AND 'outbox.message' IN (p.parent_table, p.follows) ORDER BY 1"
)
UNCOVERED = (
    "SELECT count(*) FROM {} AS m WHERE NOT EXISTS (SELECT FROM outbox.position p"
    " WHERE p.lane = m.lane AND m.created_at >= p.created_at"
    " AND m.created_at < p.ends_at AND outbox.covers(p, m.seq, m.xid, -1))"
)
# There is a kill after each statement; other tables would triple their number.
LEAVE_TO_OTHERS = (
    "DELETE FROM outbox.partition_policy"
    " WHERE 'outbox.message' NOT IN (parent_table, coalesce(follows, ''))"
)
POLICIES = (
    "SELECT DISTINCT span, retention, premake, keep_table"
    " FROM outbox.partition_policy WHERE 'outbox.message' IN (parent_table, follows)"
)
BOUNDS = (
    "SELECT array_agg((starts_at, ends_at) ORDER BY starts_at)::text"
    " FROM outbox.partition_policy p, outbox.partitions(p.parent_table)"
    " WHERE 'outbox.message' IN (p.parent_table, p.follows)"
    " AND ends_at > now() GROUP BY p.parent_table"
)


class KilledError(Exception):
    """The process was killed."""


class KillableConnection(psycopg.Connection[Any]):
    """A session whose process is killed before a statement."""

    statements_left = 0

    @override
    def execute(self, *arguments: Any, **options: Any) -> Any:
        if self.statements_left == 0:
            self.close()
            raise KilledError
        self.statements_left -= 1
        return super().execute(*arguments, **options)


def all_messages_are_covered(url: str, partition: str) -> bool:
    """Check the table and, because it can be attached again, the partition too."""
    tables = ["outbox.message"] + [partition] * exists(url, partition)
    return all(execute(url, UNCOVERED.format(table)) == [(0,)] for table in tables)


def run_until_killed_after(url: str, statements: int) -> bool:
    """Run the upkeep; return whether it finished."""
    with (
        suppress(KilledError),
        KillableConnection.connect(url, autocommit=True) as connection,
    ):
        session = connection.info.backend_pid
        connection.statements_left = statements
        maintain(connection, report=print)
        connection.statements_left = 1
        return True
    # Until the server notices, the session keeps its locks.
    wait_for("the session ends", lambda: execute(url, ENDED, [session])[0][0])
    return False


@pytest.mark.long
def test_no_message_loses_its_outcome_wherever_the_upkeep_is_killed(
    database_url: str,
) -> None:
    execute(database_url, LEAVE_TO_OTHERS)
    for statements in count(1):
        old_partition(database_url)
        add_old(database_url, outcome="published")
        (partition,) = (p for t, p in execute(database_url, OLD) if t[-7:] == "message")

        finished = run_until_killed_after(database_url, statements)

        assert all_messages_are_covered(database_url, partition), statements
        with psycopg.connect(database_url, autocommit=True) as next_one:
            maintain(next_one, report=print)
        assert execute(database_url, OLD) == [], statements
        assert steps(database_url, "drop", "attach", "finalize", table=None) == []
        if finished:
            break
    assert statements > 10


def test_the_routines_drop_no_position_before_its_message(database_url: str) -> None:
    leader = leave_detached(database_url)
    assert steps(database_url, "detach", table=None) == []
    tables = [*FOLLOWERS, "outbox.message"]
    with acting_as(database_url, "pillarbox_maintainer") as maintainer:
        for table in FOLLOWERS:
            maintainer.execute("SELECT outbox.finish_detached(%s)", (table,))
        assert all_messages_are_covered(database_url, leader)
        assert len(execute(database_url, OLD)) == len(FOLLOWERS)
        for table in reversed(tables):
            maintainer.execute("SELECT outbox.finish_detached(%s)", (table,))
            assert all_messages_are_covered(database_url, leader)
    run_upkeep(database_url)

    assert execute(database_url, OLD) == []


def test_positions_stay_as_long_as_a_message_holds_its_partition(
    database_url: str,
) -> None:
    old_partition(database_url)
    add_old(database_url, outcome="published")
    replay(database_url)

    run_upkeep(database_url)

    assert len(execute(database_url, OLD)) == 1 + len(FOLLOWERS)
    assert steps(database_url, "hold", "detach", table=None) == ["hold"]
    publish(database_url)
    assert count_holding(database_url) == 0
    run_upkeep(database_url)
    assert execute(database_url, OLD) == []


def test_positions_that_were_detached_too_early_are_attached_again(
    database_url: str,
) -> None:
    """A planned job detached them, although their leader is attached again."""
    old_partition(database_url)
    add_old(database_url, outcome="published")
    replay(database_url)
    (partition,) = (p for t, p in execute(database_url, OLD) if t[-7:] == "osition")
    note(database_url, partition, "outbox.position")
    detach(database_url, partition, "outbox.position")
    assert steps(database_url, "attach", table="outbox.position") == ["attach"]

    run_upkeep(database_url)

    assert partition in dict(execute(database_url, OLD)).values()
    assert execute(database_url, UNCOVERED.format("outbox.message")) == [(0,)]


def test_the_policy_of_messages_applies_to_their_positions(
    database_url: str, capsys: Capture
) -> None:
    arguments = ["outbox.message", "3w", "--interval", "hourly"]
    assert main(["retention", "--database", database_url, "set", *arguments]) == 0
    assert "hourly   kept 21d" in capsys.readouterr().out

    assert len(execute(database_url, POLICIES)) == 1
    assert len(set(execute(database_url, BOUNDS))) == 1
    assert main(["retention", "--database", database_url, "--json"]) == 0
    policies = {p["parent_table"]: p for p in json.loads(capsys.readouterr().out)}
    for follower in FOLLOWERS:
        assert policies[follower]["follows"] == "outbox.message"
        assert policies[follower]["retention"] == 21 * 86400
        assert policies[follower]["premake"] == 48
    assert main(["retention", "--database", database_url]) == 0
    assert capsys.readouterr().out.count("follows outbox.message") == len(FOLLOWERS)


def test_positions_cannot_have_a_policy_of_their_own(
    database_url: str, capsys: Capture
) -> None:
    before = execute(database_url, POLICIES)
    set_it = "UPDATE outbox.partition_policy SET {} WHERE parent_table = %s"
    for table in FOLLOWERS:
        for command in (["set", table, "3d"], ["keep-table", table]):
            assert main(["retention", "--database", database_url, *command]) == 2
            assert "write outbox.message" in capsys.readouterr().err
        for change in ("retention = '3 days'", "keep_table = true", "premake = 9"):
            with pytest.raises(ForeignKeyViolation, match="kept_as_the_table_that_it"):
                execute(database_url, set_it.format(change), (table,))
        with pytest.raises(psycopg.Error, match="kept_as_the_table_that_it"):
            execute(
                database_url, "SELECT outbox.set_interval(%s, '7 days', 4)", (table,)
            )

    assert execute(database_url, POLICIES) == before
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '60 days'")
    assert len(execute(database_url, POLICIES)) == 1


def test_a_held_day_is_reported_as_overdue_for_one_table_only(
    database_url: str,
) -> None:
    overdue = (
        "SELECT parent_table, overdue FROM outbox.partition_health WHERE overdue > 0"
        " ORDER BY 1"
    )
    old_partition(database_url)
    add_old(database_url)
    with acting_as(database_url, "pillarbox_monitor") as monitor:
        assert monitor.execute(overdue).fetchall() == [("outbox.message", 1)]

    ((partition,),) = execute(database_url, EXPIRED)
    execute(database_url, f"DROP TABLE {partition}")

    assert execute(database_url, overdue) == [(table, 1) for table in FOLLOWERS]


def test_the_doctors_remedy_creates_missing_partitions_for_positions(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url, 3)
    add_old(database_url, 3)
    ((positions,),) = execute(
        database_url,
        "SELECT partition::text FROM outbox.partitions('outbox.position')"
        " WHERE starts_at = date_trunc('day', now(), 'UTC') - interval '72 hours'",
    )
    execute(database_url, f"DROP TABLE {positions}")
    with pytest.raises(CheckViolation, match="no partition of relation"):
        publish(database_url)
    (found,) = (f for f in doctor(database_url)[1] if f["check"] == "partitions")
    assert found["severity"] == "error"
    assert "can't be settled" in found["finding"]

    paste(database_url, found["remedy"])

    publish(database_url)
    assert doctor(database_url)[1] == []


def test_positions_stay_while_their_messages_may_lie_in_a_partition_without_a_begin(
    database_url: str,
) -> None:
    old_partition(database_url)
    add_old(database_url, outcome="published")
    ((partition, end),) = execute(
        database_url,
        "SELECT partition::text, ends_at::text FROM outbox.partitions('outbox.message')"
        f" WHERE partition = to_regclass(({EXPIRED}))",
    )
    followers = [row for row in execute(database_url, OLD) if row[1] != partition]
    detach(database_url, partition)
    execute(
        database_url,
        f"ALTER TABLE {partition} RENAME TO message_past; ALTER TABLE outbox.message"
        " ATTACH PARTITION outbox.message_past"
        f" FOR VALUES FROM (MINVALUE) TO ('{end}')",
    )

    run_upkeep(database_url)

    assert set(followers) <= set(execute(database_url, OLD))
