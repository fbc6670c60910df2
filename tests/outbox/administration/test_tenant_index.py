"""The index by tenant is made day by day, kept for new days, finished and dropped."""

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.tenants import add_tenant_index
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.postgres.sql_files import load
from tests.fixtures.days import make_partitions_at
from tests.fixtures.doctor import Doctor
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

OF_DAYS = """
    SELECT count(*), count(x.indexrelid), coalesce(bool_and(x.indisvalid), false)
      FROM outbox.partitions('outbox.message') AS p
      LEFT JOIN (pg_index AS x JOIN pg_inherits AS h
                 ON h.inhrelid = x.indexrelid
                    AND h.inhparent = to_regclass('outbox.message_tenant_idx'))
             ON x.indrelid = p.partition
"""


def migrate(url: str, *options: str) -> int:
    return main(["migrate", "--without-cron", "--database", url, *options])


def is_complete(url: str) -> bool:
    ((days, indexed, are_valid),) = execute(url, OF_DAYS)
    return bool(days == indexed and are_valid)


@pytest.mark.long
def test_all_days_get_it_also_those_that_are_added_later_until_it_is_dropped(
    database_url: str, doctor: Doctor
) -> None:
    insert(database_url, Message("t", b"", tenant="a"), Message("t", b""))
    for options in (["--tenants"], ["--tenants"], []):
        assert migrate(database_url, *options) == 0
        assert is_complete(database_url)
        assert doctor(database_url)[1] == []
    execute(
        database_url,
        make_partitions_at(
            "outbox.message", "ARRAY[now() - interval '100 days']"
        ).decode(),
    )
    assert is_complete(database_url)
    assert migrate(database_url, "--no-tenants") == 0
    assert not is_complete(database_url)


def test_one_that_was_interrupted_is_reported_and_finished(
    database_url: str, doctor: Doctor
) -> None:
    insert(database_url, *[Message("t", b"", tenant="a") for _ in range(2)])
    execute(database_url, load("outbox", "add_tenant_index"))
    days = execute(database_url, load("outbox", "list_unindexed_days"))
    ((today,),) = execute(
        database_url, "SELECT DISTINCT tableoid::regclass::text FROM outbox.message"
    )
    create = "CREATE {}INDEX CONCURRENTLY {} ON outbox.{} ({}) WHERE tenant IS NOT NULL"
    for _, day, index, _ in days:
        if f"outbox.{day}" != today:
            # It is only to be attached.
            execute(database_url, create.format("", index, day, "tenant, lane, seq"))
        else:
            with pytest.raises(psycopg.errors.UniqueViolation):
                execute(database_url, create.format("UNIQUE ", index, day, "tenant"))
    (found,) = [it for it in doctor(database_url)[1] if it["check"] == "schema"]
    assert "message_tenant_idx is incomplete" in found["finding"]
    assert found["remedy"].endswith(" --tenants")

    with administration(database_url, application_name="test") as connection:
        add_tenant_index(connection)
    assert is_complete(database_url)
    assert doctor(database_url)[1] == []


@pytest.mark.parametrize("option", ["--sql=all", "--remove=x"])
def test_it_is_not_part_of_the_printed_sql_nor_of_a_removal(
    option: str, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate(database_url, "--tenants", option) == 2
    assert "can't be combined" in capsys.readouterr().err
