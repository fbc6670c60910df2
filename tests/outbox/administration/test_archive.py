"""DBAs can archive partitions by hand, as kept tables, or with a function."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest

from outbox.cli.main import main
from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED, acting_as
from tests.outbox.administration.test_documented_sql import blocks, in_psql
from tests.outbox.administration.test_maintain_command import NOTE, leave_half_detached
from tests.outbox.administration.test_upkeep import add_old, old_partition

UPKEEP: Final = "CALL outbox.maintain()"
FAILURE: Final = "SELECT failure FROM outbox.upkeep"
ARCHIVE: Final = """
CREATE SCHEMA archive AUTHORIZATION {archivist};
GRANT USAGE ON SCHEMA archive TO pillarbox_owner;
SET ROLE {archivist};
CREATE TABLE archive.call (ran_as text, path text, schema_name text, table_name text,
                           starts_at timestamptz, ends_at timestamptz, rows int,
                           called_at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION archive.save(schema_name text, table_name text, starts_at timestamptz,
                             ends_at timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $f$
DECLARE
    v_rows int;
BEGIN
    EXECUTE format('SELECT count(*) FROM %I.%I', schema_name, table_name) INTO v_rows;
    INSERT INTO archive.call VALUES (current_user, current_setting('search_path'),
        schema_name, table_name, starts_at, ends_at, v_rows);
END
$f$;
RESET ROLE;
"""
FAILING: Final = """
CREATE OR REPLACE FUNCTION archive.save(schema_name text, table_name text,
                                        starts_at timestamptz, ends_at timestamptz)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $f$ BEGIN {body} END $f$
"""
LETTER: Final = """
INSERT INTO outbox.dead_letter (id, created_at, updated_at, status, origin, message_id,
    topic, schema_version, content_type, headers, payload, attempts, error_reason)
VALUES (outbox.uuid7(), now() - 40 * interval '24 hours', now(), 'SUCCEEDED', 'relay',
    'm', 'jane', 1, 'text/plain', '{}', '', 1, 'no')
"""
USAGE: Final = "GRANT USAGE ON SCHEMA outbox, inbox TO {archivist}"
CALLS: Final = (
    "SELECT ran_as, path, format('%I.%I', schema_name, table_name),"
    " ends_at - starts_at, rows FROM archive.call ORDER BY starts_at, called_at"
)


def exists(url: str, table: str) -> bool:
    return execute(url, "SELECT to_regclass(%s) IS NOT NULL", [table]) == [(True,)]


def server_version(url: str) -> int:
    return int(execute(url, "SHOW server_version_num")[0][0])


def create_expired(url: str, days: int = 20) -> str:
    """Create an expired partition with a settled row, and return its name."""
    old_partition(url, days)
    add_old(url, days, outcome="published")
    return str(execute(url, EXPIRED)[0][0])


@pytest.fixture
def archivist(server: PostgresServer, database_url: str) -> Iterator[str]:
    """Create a role with its own schema and function, but no rights on our tables."""
    role = f"archivist_{uuid4().hex}"
    execute(server.url, f"CREATE ROLE {role}")
    execute(database_url, ARCHIVE.format(archivist=role))
    yield role
    execute(database_url, f"DROP OWNED BY {role} CASCADE")
    execute(server.url, f"DROP ROLE {role}")


def set_archive(url: str, function: str = "archive.save") -> int:
    command = ["retention", "set", "outbox.message", "--archive", function]
    return main([*command, "--database", url])


def detach_by_hand(url: str, partition: str) -> None:
    execute(url, f"ALTER TABLE outbox.message DETACH PARTITION {partition}")


def detach_by_hand_concurrently(url: str, partition: str) -> None:
    execute(
        url, f"ALTER TABLE outbox.message DETACH PARTITION {partition} CONCURRENTLY"
    )


@pytest.mark.parametrize("detach", [detach_by_hand, detach_by_hand_concurrently])
@pytest.mark.parametrize("noted", [False, True], ids=["unknown", "planned before"])
def test_a_manually_detached_partition_is_left_alone(
    detach: Callable[[str, str], None], noted: bool, database_url: str, doctor: Doctor
) -> None:
    partition = create_expired(database_url)
    if noted:
        execute(database_url, "SELECT outbox.finish_detached('outbox.message')")
        assert len(execute(database_url, "TABLE outbox.retiring_partition")) == 1
    detach(database_url, partition)

    for _ in range(2):
        assert main(["maintain", "--database", database_url]) == 0
        execute(database_url, UPKEEP)

    assert exists(database_url, partition)
    assert execute(database_url, "TABLE outbox.retiring_partition") == []
    assert any(partition in f["finding"] for f in doctor(database_url)[1])


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


@pytest.mark.parametrize("by", ["pg_cron", "pillarbox maintain"])
def test_a_partition_detached_by_hand_is_left_alone_while_its_own_detach_is_planned(
    by: str, database_url: str, doctor: Doctor
) -> None:
    partition = create_expired(database_url)
    execute(database_url, "SELECT outbox.finish_detached('outbox.message')")
    execute(database_url, "UPDATE outbox.retiring_partition SET detach_by = %s", [by])
    detach_by_hand(database_url, partition)

    assert main(["maintain", "--database", database_url]) == 0
    execute(database_url, UPKEEP)

    # After 18, nothing tells the detach from the planned one.
    is_known = server_version(database_url) < 190000
    assert exists(database_url, partition) is is_known
    found = [f["finding"] for f in doctor(database_url)[1]]
    assert any(partition in finding for finding in found) is is_known


def attach_again_and_plan(url: str, partition: str, by: str) -> None:
    """Let the upkeep attach a partition that its job detached, and plan it anew."""
    plan_detach(url, by)
    detach_by_hand_concurrently(url, partition)
    set_retention(url, "60 days")
    execute(url, UPKEEP)
    assert attached(url, partition)
    set_retention(url, "7 days")
    plan_detach(url, by)


def plan_detach(url: str, by: str) -> None:
    execute(url, "SELECT outbox.finish_detached('outbox.message')")
    execute(url, "UPDATE outbox.retiring_partition SET detach_by = %s", [by])


def set_retention(url: str, time: str) -> None:
    statement = "UPDATE outbox.partition_policy SET retention = %s"
    execute(url, f"{statement} WHERE parent_table = 'outbox.message'", [time])


def attached(url: str, partition: str) -> bool:
    query = "SELECT relispartition FROM pg_class WHERE oid = %s::regclass"
    return bool(execute(url, query, [partition])[0][0])


@pytest.mark.parametrize("by", ["pg_cron", "pillarbox maintain"])
def test_a_partition_that_was_attached_again_is_left_alone_once_detached_by_hand(
    by: str, database_url: str
) -> None:
    partition = create_expired(database_url)
    attach_again_and_plan(database_url, partition, by)
    detach_by_hand(database_url, partition)

    execute(database_url, UPKEEP)

    assert exists(database_url, partition) is (server_version(database_url) < 190000)


def test_a_partition_that_was_attached_again_is_dropped_once_its_job_detached_it(
    database_url: str,
) -> None:
    partition = create_expired(database_url)
    attach_again_and_plan(database_url, partition, "pg_cron")
    detach_by_hand_concurrently(database_url, partition)

    execute(database_url, UPKEEP)

    assert not exists(database_url, partition)


@pytest.mark.parametrize("detach", [detach_by_hand, detach_by_hand_concurrently])
def test_retention_works_where_all_identifiers_are_quoted(
    detach: Callable[[str, str], None], database_url: str, doctor: Doctor
) -> None:
    partition = create_expired(database_url)
    name = database_url.rpartition("/")[2].partition("?")[0]
    execute(database_url, f'ALTER DATABASE "{name}" SET quote_all_identifiers = on')
    plan_detach(database_url, "pg_cron")
    detach(database_url, partition)

    execute(database_url, UPKEEP)

    is_ours = detach is detach_by_hand_concurrently
    assert exists(database_url, partition) is not is_ours
    if is_ours:
        assert doctor(database_url) == (0, [])
        create_expired(database_url, 25)
        assert main(["maintain", "--database", database_url]) == 0
        assert execute(database_url, EXPIRED) == []


def test_a_partition_detached_concurrently_is_dropped_while_its_job_is_scheduled(
    database_url: str,
) -> None:
    partition = create_expired(database_url)
    execute(database_url, "SELECT outbox.finish_detached('outbox.message')")
    execute(database_url, "UPDATE outbox.retiring_partition SET detach_by = 'pg_cron'")
    detach_by_hand_concurrently(database_url, partition)
    execute(database_url, UPKEEP)

    # The job uses the same statement, so nothing tells the two detaches apart.
    assert not exists(database_url, partition)


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
            if t["table"] == "outbox.message"
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


@pytest.mark.parametrize("role", ["pillarbox_maintainer", None])
def test_the_function_archives_as_its_owner_before_the_drop(
    role: str | None, database_url: str, archivist: str
) -> None:
    execute(database_url, USAGE.format(archivist=archivist))
    assert set_archive(database_url) == 0
    partition = create_expired(database_url)

    if role is None:
        assert main(["maintain", "--database", database_url]) == 0
    else:
        with acting_as(database_url, role) as maintainer:
            maintainer.execute(UPKEEP)

    assert not exists(database_url, partition)
    calls = execute(database_url, CALLS)
    assert [(table.partition("_p")[0], rows) for _, _, table, _, rows in calls] == [
        # Messages come first, then the tables that follow them.
        ("outbox.message", 1),
        ("outbox.deferral", 0),
        ("outbox.settlement", 1),
        ("outbox.watermark", 0),
    ]
    assert calls[0][2] == partition
    assert {(ran_as, path, span.days) for ran_as, path, _, span, _ in calls} == {
        (archivist, "pg_catalog, pg_temp", 1)
    }


def test_a_failing_archive_keeps_the_rows_and_is_reported_until_it_works(
    database_url: str,
    archivist: str,
    doctor: Doctor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    execute(database_url, USAGE.format(archivist=archivist))
    assert set_archive(database_url) == 0
    partition = create_expired(database_url)
    execute(database_url, "ALTER TABLE archive.call ADD CHECK (rows = 0)")

    assert main(["maintain", "--database", database_url]) == 2

    assert execute(database_url, f"SELECT count(*) FROM {partition}") == [(1,)]
    ((failure,),) = execute(database_url, FAILURE)
    assert f"{partition} is not archived, and so not dropped" in failure
    assert failure in capsys.readouterr().err
    (found,) = doctor(database_url)[1]
    assert (found["check"], found["severity"]) == ("upkeep", "warning")
    assert partition in found["finding"]
    with pytest.raises(psycopg.Error, match="not archived, and so not dropped"):
        execute(database_url, UPKEEP)
    # Nothing is left of the attempt, nor of the privileges granted for it.
    granted = "SELECT relacl::text LIKE %s FROM pg_class WHERE oid = %s::regclass"
    assert execute(database_url, granted, [f"%{archivist}%", partition]) != [(True,)]
    execute(database_url, "ALTER TABLE archive.call DROP CONSTRAINT call_rows_check")

    execute(database_url, UPKEEP)

    assert not exists(database_url, partition)
    assert execute(database_url, FAILURE) == [(None,)]


@pytest.mark.parametrize(
    "body",
    [
        "PERFORM '{secret}'::int;",
        "RAISE EXCEPTION E'no\\nDETAIL:  Key (email)=({secret}) exists';",
        "RAISE EXCEPTION 'no' USING DETAIL = '{secret}';",
    ],
)
def test_the_error_of_a_failing_archive_contains_no_value_of_a_row(
    body: str,
    database_url: str,
    archivist: str,
    doctor: Doctor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "jane@example.org"
    execute(database_url, USAGE.format(archivist=archivist))
    assert set_archive(database_url) == 0
    create_expired(database_url)
    execute(database_url, FAILING.format(body=body.format(secret=secret)))

    assert main(["maintain", "--database", database_url]) == 2

    ((failure,),) = execute(database_url, FAILURE)
    assert "is not archived, and so not dropped: archive.save: " in failure
    assert secret not in failure
    written = capsys.readouterr()
    assert secret not in written.out + written.err
    assert secret not in json.dumps(doctor(database_url)[1])


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


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("DROP FUNCTION {f}", "there is no function"),
        ("ALTER FUNCTION {f} SECURITY INVOKER", "would run as pillarbox_owner"),
        ("ALTER FUNCTION {f} RESET ALL", "has no search_path of its own"),
        ("REVOKE USAGE ON SCHEMA archive FROM pillarbox_owner", "may not call"),
        ("REVOKE USAGE ON SCHEMA outbox, inbox FROM {role}", "can't reach our tables"),
    ],
)
def test_an_unsafe_or_unusable_archive_function_is_refused(
    spoil: str,
    said: str,
    database_url: str,
    archivist: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    execute(database_url, USAGE.format(archivist=archivist))
    assert set_archive(database_url) == 0
    partition = create_expired(database_url)
    signature = "archive.save(text, text, timestamptz, timestamptz)"
    execute(database_url, spoil.format(f=signature, role=archivist))
    capsys.readouterr()

    assert set_archive(database_url) == 2
    assert said in capsys.readouterr().err

    with pytest.raises(psycopg.Error, match=said):
        execute(database_url, UPKEEP)
    assert exists(database_url, partition)


@pytest.mark.parametrize("name", ["save", "archive.save()", "a.b.c", """ "x """])
def test_the_name_of_a_function_must_include_its_schema(
    name: str, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_archive(database_url, name) == 2
    assert "write it as schema.function" in capsys.readouterr().err


def test_keeping_tables_and_archiving_exclude_each_other(
    database_url: str, archivist: str
) -> None:
    policy = (
        "SELECT keep_table, archive FROM outbox.partition_policy"
        " WHERE parent_table = %s"
    )
    execute(database_url, USAGE.format(archivist=archivist))

    def now() -> Any:
        return execute(database_url, policy, ["outbox.message"])[0]

    assert set_archive(database_url) == 0
    assert now() == (False, "archive.save")
    command = ["retention", "keep-table", "message", "--database", database_url]
    assert main(command) == 0
    assert now() == (True, None)
    assert set_archive(database_url) == 0
    assert now() == (False, "archive.save")
    assert set_archive(database_url, "") == 0
    assert now() == (False, None)
