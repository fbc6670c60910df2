"""DBAs can archive partitions by hand, or as kept tables."""

import json
from typing import Final

import psycopg
import pytest

from pillarbox.outbox.administration.upkeep import APPLICATION_NAME
from pillarbox.outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import (
    EXPIRED,
    NOTE_A_JOB,
    detach,
    interrupt_a_detach,
    note,
)
from tests.outbox.administration.test_documented_sql import blocks, in_psql
from tests.outbox.administration.test_upkeep import add_old, exists, old_partition

UPKEEP: Final = "CALL outbox.maintain()"
FAILURE: Final = "SELECT string_agg(failure, '; ') FROM outbox.upkeep_failure"
LETTER: Final = """
INSERT INTO outbox.dead_letter (id, created_at, updated_at, status, origin, message_id,
    topic, schema_version, content_type, headers, payload, attempts, error_reason)
VALUES (outbox.uuid7(), now() - 40 * interval '24 hours', now(), 'SUCCEEDED', 'relay',
    'm', 'jane', 1, 'text/plain', '{}', '', 1, 'no')
"""


def create_expired(url: str, days: int = 20) -> str:
    """Create an expired partition with a settled row, and return its name."""
    old_partition(url, days)
    add_old(url, days, outcome="published")
    return str(execute(url, EXPIRED)[0][0])


def test_a_manually_detached_partition_is_left_alone(database_url: str) -> None:
    partition = create_expired(database_url)
    # The state that a command leaves if it is killed between note and detach.
    note(database_url, partition, by=APPLICATION_NAME)
    set_retention(database_url, "60 days")
    assert main(["maintain", "--database", database_url]) == 0
    set_retention(database_url, "7 days")
    detach(database_url, partition)

    for _ in range(2):
        assert main(["maintain", "--database", database_url]) == 0
        execute(database_url, UPKEEP)

    assert exists(database_url, partition)
    assert execute(database_url, "TABLE outbox.retiring_partition") == []


def set_retention(url: str, time: str) -> None:
    statement = "UPDATE outbox.partition_policy SET retention = %s"
    execute(url, f"{statement} WHERE parent_table = 'outbox.message'", [time])


@pytest.mark.parametrize("pending", [False, True], ids=["attached", "pending"])
def test_a_partition_detached_by_hand_as_documented_is_left_alone(
    pending: bool, database_url: str
) -> None:
    partition = create_expired(database_url)
    execute(database_url, NOTE_A_JOB)
    if pending:
        interrupt_a_detach(database_url, partition)
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


def test_retention_works_where_all_identifiers_are_quoted(
    database_url: str, doctor: Doctor
) -> None:
    partition = create_expired(database_url)
    name = database_url.rpartition("/")[2].partition("?")[0]
    execute(database_url, f'ALTER DATABASE "{name}" SET quote_all_identifiers = on')
    execute(database_url, NOTE_A_JOB)
    detach(database_url, partition)

    execute(database_url, UPKEEP)

    assert not exists(database_url, partition)
    assert doctor(database_url) == (0, [])
    create_expired(database_url, 25)
    assert main(["maintain", "--database", database_url]) == 0
    assert execute(database_url, EXPIRED) == []


def test_the_policy_can_keep_expired_partitions_as_tables(
    database_url: str, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--database", database_url]
    assert main(["retention", "keep-table", "outbox.message", *here]) == 0
    assert "then kept as a table" in capsys.readouterr().out
    first = create_expired(database_url)

    assert main(["maintain", *here]) == 0

    assert execute(database_url, EXPIRED) == []
    assert execute(database_url, f"SELECT count(*) FROM {first}") == [(1,)]
    assert doctor(database_url) == (0, [])
    capsys.readouterr()
    assert main(["partitions", "--json", *here]) == 0
    (partitions,) = (
        table["partitions"]
        for table in json.loads(capsys.readouterr().out)
        if table["parent_table"] == "outbox.message"
    )
    assert [p["place"] for p in partitions if p["partition"] == first] == ["kept"]
    assert main(["retention", "drop-table", "outbox.message", *here]) == 0
    second = create_expired(database_url, 25)
    assert main(["maintain", *here]) == 0
    assert exists(database_url, first)
    assert not exists(database_url, second)
    execute(database_url, f"DROP TABLE {first}")
    assert main(["maintain", *here]) == 0


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
