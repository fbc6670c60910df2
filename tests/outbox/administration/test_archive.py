"""DBAs can archive partitions by hand, or as kept tables."""

import json
from collections.abc import Callable
from typing import Final

import psycopg
import pytest

from outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED, NOTE_A_JOB
from tests.outbox.administration.test_documented_sql import blocks, in_psql
from tests.outbox.administration.test_maintain_command import NOTE, leave_half_detached
from tests.outbox.administration.test_upkeep import add_old, old_partition

UPKEEP: Final = "CALL outbox.maintain()"
FAILURE: Final = "SELECT string_agg(failure, '; ') FROM outbox.upkeep_failure"
LETTER: Final = """
INSERT INTO outbox.dead_letter (id, created_at, updated_at, status, origin, message_id,
    topic, schema_version, content_type, headers, payload, attempts, error_reason)
VALUES (outbox.uuid7(), now() - 40 * interval '24 hours', now(), 'SUCCEEDED', 'relay',
    'm', 'jane', 1, 'text/plain', '{}', '', 1, 'no')
"""


def exists(url: str, table: str) -> bool:
    return execute(url, "SELECT to_regclass(%s) IS NOT NULL", [table]) == [(True,)]


def server_version(url: str) -> int:
    return int(execute(url, "SHOW server_version_num")[0][0])


def create_expired(url: str, days: int = 20) -> str:
    """Create an expired partition with a settled row, and return its name."""
    old_partition(url, days)
    add_old(url, days, outcome="published")
    return str(execute(url, EXPIRED)[0][0])


def detach_by_hand(url: str, partition: str) -> None:
    execute(url, f"ALTER TABLE outbox.message DETACH PARTITION {partition}")


def detach_by_hand_concurrently(url: str, partition: str) -> None:
    execute(
        url, f"ALTER TABLE outbox.message DETACH PARTITION {partition} CONCURRENTLY"
    )


@pytest.mark.parametrize("detach", [detach_by_hand, detach_by_hand_concurrently])
def test_a_manually_detached_partition_is_left_alone(
    detach: Callable[[str, str], None], database_url: str
) -> None:
    partition = create_expired(database_url)
    execute(database_url, "SELECT outbox.finish_detached('outbox.message')")
    detach(database_url, partition)

    for _ in range(2):
        assert main(["maintain", "--database", database_url]) == 0
        execute(database_url, UPKEEP)

    assert exists(database_url, partition)
    assert execute(database_url, "TABLE outbox.retiring_partition") == []


def test_a_detach_that_the_command_never_started_is_left_alone(
    database_url: str,
) -> None:
    partition = create_expired(database_url)
    # The state that a command leaves if it is killed between note and detach.
    execute(
        database_url,
        "INSERT INTO outbox.retiring_partition SELECT partition, 'outbox.message',"
        " starts_at, ends_at, now(), 'pillarbox maintain'"
        " FROM outbox.partitions('outbox.message') WHERE partition = %s::regclass",
        [partition],
    )
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '60 days'")
    assert main(["maintain", "--database", database_url]) == 0
    detach_by_hand(database_url, partition)
    execute(database_url, "UPDATE outbox.partition_policy SET retention = '7 days'")

    assert main(["maintain", "--database", database_url]) == 0

    assert exists(database_url, partition)


def attach_again_and_plan(url: str, partition: str) -> None:
    """Let the upkeep attach a partition that its job detached, and plan it anew."""
    execute(url, NOTE_A_JOB)
    detach_by_hand_concurrently(url, partition)
    set_retention(url, "60 days")
    execute(url, UPKEEP)
    assert attached(url, partition)
    set_retention(url, "7 days")
    execute(url, NOTE_A_JOB)


def set_retention(url: str, time: str) -> None:
    statement = "UPDATE outbox.partition_policy SET retention = %s"
    execute(url, f"{statement} WHERE parent_table = 'outbox.message'", [time])


def attached(url: str, partition: str) -> bool:
    query = "SELECT relispartition FROM pg_class WHERE oid = %s::regclass"
    return bool(execute(url, query, [partition])[0][0])


def test_a_partition_that_was_attached_again_is_dropped_once_its_job_detached_it(
    database_url: str,
) -> None:
    partition = create_expired(database_url)
    attach_again_and_plan(database_url, partition)
    detach_by_hand_concurrently(database_url, partition)

    execute(database_url, UPKEEP)

    assert not exists(database_url, partition)


def test_retention_works_where_all_identifiers_are_quoted(
    database_url: str, doctor: Doctor
) -> None:
    partition = create_expired(database_url)
    name = database_url.rpartition("/")[2].partition("?")[0]
    execute(database_url, f'ALTER DATABASE "{name}" SET quote_all_identifiers = on')
    execute(database_url, NOTE_A_JOB)
    # The job uses the same statement, so nothing tells the two detaches apart.
    detach_by_hand_concurrently(database_url, partition)

    execute(database_url, UPKEEP)

    assert not exists(database_url, partition)
    assert doctor(database_url) == (0, [])
    create_expired(database_url, 25)
    assert main(["maintain", "--database", database_url]) == 0
    assert execute(database_url, EXPIRED) == []


@pytest.mark.parametrize("pending", [False, True], ids=["attached", "pending"])
def test_a_partition_detached_by_hand_as_documented_is_left_alone(
    pending: bool, database_url: str
) -> None:
    if pending:
        partition = leave_half_detached(database_url, "outbox.message")
    else:
        partition = create_expired(database_url)
    execute(database_url, NOTE, [partition])
    (script,) = blocks("database.md", "**By hand.**", "### Hours, days, weeks")
    script = script.replace("outbox.message_p20260801", partition)
    if pending:
        script = script.replace(
            f"PARTITION {partition};", f"PARTITION {partition} FINALIZE;"
        )
    done = in_psql(database_url, f"\\set ON_ERROR_STOP on\n{script}")
    assert (done.returncode, done.stderr) == (0, "")

    execute(database_url, UPKEEP)

    assert exists(database_url, partition)


def test_kept_tables_are_shown_until_the_policy_drops_partitions_again(
    database_url: str, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["retention", "keep-table", "outbox.message", "--database", database_url])
        == 0
    )
    assert "then kept as a table" in capsys.readouterr().out
    first = create_expired(database_url)

    assert main(["maintain", "--database", database_url]) == 0

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, f"SELECT count(*) FROM {first}") == [(1,)]
    assert doctor(database_url) == (0, [])
    capsys.readouterr()
    assert main(["partitions", "--json", "--database", database_url]) == 0
    assert {"partition": first, "place": "kept"}.items() <= {
        k: v
        for p in next(
            t["partitions"]
            for t in json.loads(capsys.readouterr().out)
            if t["parent_table"] == "outbox.message"
        )
        if p["partition"] == first
        for k, v in p.items()
    }.items()
    assert (
        main(["retention", "drop-table", "outbox.message", "--database", database_url])
        == 0
    )
    second = create_expired(database_url, 25)
    assert main(["maintain", "--database", database_url]) == 0
    assert exists(database_url, first)
    assert not exists(database_url, second)
    execute(database_url, f"DROP TABLE {first}")
    assert main(["maintain", "--database", database_url]) == 0


def test_the_error_of_a_condition_contains_no_value_of_a_row(
    database_url: str,
) -> None:
    execute(
        database_url,
        "UPDATE outbox.partition_policy SET unsettled = 'topic::int > 0'"
        " WHERE parent_table = 'outbox.dead_letter'",
    )
    old_partition(database_url, 40, "outbox.dead_letter")
    execute(database_url, LETTER)

    with pytest.raises(psycopg.Error, match='type integer: "…"') as it:
        execute(database_url, UPKEEP)

    assert "jane" not in str(it.value)
    ((failure,),) = execute(database_url, FAILURE)
    assert "outbox.dead_letter" in failure
    assert "jane" not in failure
