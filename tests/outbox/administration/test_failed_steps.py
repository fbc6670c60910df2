"""A step of the upkeep that fails is reported with its remedy, and stops no other."""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Final, NamedTuple
from uuid import uuid4

import psycopg
import pytest

from pillarbox.outbox.cli.main import main
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED, acting_as
from tests.outbox.administration.test_upkeep import (
    add_old,
    drop_ahead,
    exists,
    old_partition,
)

FAILURES: Final = "SELECT step, object, failure FROM outbox.upkeep_failure"
REFUSING: Final = """
CREATE FUNCTION public.refuse() RETURNS event_trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'no changes on a Friday'; END $$;
CREATE EVENT TRIGGER no_changes ON ddl_command_start WHEN TAG IN ('{}')
EXECUTE FUNCTION public.refuse();
"""
WITH_A_KEY: Final = (
    "CREATE TABLE public.invoice (id uuid, created_at timestamptz,"
    " CONSTRAINT of_message FOREIGN KEY (id, created_at) REFERENCES {});"
)


class Obstacle(NamedTuple):
    """What is put in the way of the upkeep of a partition, and what names it."""

    statement: str
    named: str


OF_DROPS: Final = {
    "view": Obstacle(
        "CREATE VIEW public.report AS SELECT id FROM {partition}", "view public.report"
    ),
    "materialized view": Obstacle(
        'CREATE MATERIALIZED VIEW public."Report" AS SELECT id FROM {partition}',
        'materialized view public."Report"',
    ),
    "function": Obstacle(
        "CREATE FUNCTION public.id_of(m {partition}) RETURNS uuid LANGUAGE sql"
        " AS 'SELECT m.id'",
        "function public.id_of(",
    ),
    "rule": Obstacle(
        "CREATE TABLE public.sink (a int); CREATE RULE clear AS ON INSERT TO"
        " public.sink DO ALSO DELETE FROM {partition}",
        "rule clear on public.sink",
    ),
    "foreign key": Obstacle(
        WITH_A_KEY.format("{partition}"), "of_message of public.invoice"
    ),
    "owner": Obstacle(
        "ALTER TABLE {partition} OWNER TO {role}",
        "it belongs to tidy_",
    ),
}
"""Obstacles that each keep one partition."""
OF_ALL: Final = {
    "foreign key on the table": Obstacle(
        WITH_A_KEY.format("outbox.message")
        + " INSERT INTO public.invoice SELECT id, created_at FROM {partition}",
        "of_message of public.invoice",
    ),
    "event trigger on drops": Obstacle(
        REFUSING.format("DROP TABLE"), "event trigger no_changes"
    ),
    "event trigger on changes": Obstacle(
        REFUSING.format("ALTER TABLE"), "event trigger no_changes"
    ),
}


def run(url: str) -> int:
    return main(["maintain", "--database", url])


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    with new_role(database_url, f"tidy_{uuid4().hex}") as name:
        yield name


def put_in_the_way(
    url: str, obstacles: Iterable[Obstacle], role: str = ""
) -> dict[str, Obstacle]:
    """Return the expired partitions of outbox.message that obstacles keep."""
    kept = {}
    for days, obstacle in enumerate(obstacles, start=20):
        old_partition(url, days)
        add_old(url, days, outcome="published")
        partition = execute(url, EXPIRED)[0][0]
        execute(url, obstacle.statement.format(partition=partition, role=role))
        kept[partition] = obstacle
    return kept


def about_upkeep(url: str, doctor: Doctor, partition: str) -> dict[str, str]:
    """Return what the doctor finds about the failed upkeep of a partition."""
    return next(
        f
        for f in doctor(url)[1]
        if f"{partition}" in f["finding"] and f["check"] == "upkeep"
    )


@pytest.mark.long
def test_whatever_keeps_a_partition_stops_no_other_step_and_is_named_at_once(
    database_url: str, role: str, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    url = database_url
    kept = put_in_the_way(url, OF_DROPS.values(), role)
    for days in (30, 35):
        old_partition(url, days)
        add_old(url, days, outcome="published")
    old_partition(url, 40, "inbox.dead_letter")
    ahead = drop_ahead(url, table="outbox.dead_letter")

    for _ in range(2):
        assert run(url) == 2

    failures = {object_: failure for _, object_, failure in execute(url, FAILURES)}
    for partition, obstacle in kept.items():
        assert obstacle.named in failures[partition]
    assert exists(url, ahead)
    # Everything else that is past its retention is gone.
    left = (
        "SELECT x.partition::text FROM outbox.partition_policy p,"
        " outbox.partitions(p.parent_table) x WHERE x.ends_at < now() - p.retention"
        " AND p.follows IS NULL AND NOT x.partition::text = ANY (%s)"
    )
    assert execute(url, left, [list(kept)]) == []
    capsys.readouterr()
    main(["status", "--json", "--database", url])
    (status,) = json.loads(capsys.readouterr().out)["databases"]
    assert not any("fix the condition" in f["remedy"] for f in doctor(url)[1])
    for partition, obstacle in kept.items():
        assert obstacle.named in status["upkeep"]["failure"]
        found = about_upkeep(url, doctor, partition)
        assert obstacle.named in found["finding"]
        paste(url, found["remedy"])

    assert run(url) == 0
    assert execute(url, FAILURES) == []
    assert execute(url, EXPIRED) == []


@pytest.mark.parametrize("name", OF_ALL)
def test_whatever_keeps_all_partitions_is_named_at_once(
    name: str, database_url: str, doctor: Doctor
) -> None:
    url = database_url
    ahead = drop_ahead(url, table="outbox.dead_letter")
    ((partition, obstacle),) = put_in_the_way(url, [OF_ALL[name]]).items()

    for _ in range(2):
        assert run(url) == 2

    assert exists(url, ahead) or "ALTER TABLE" in obstacle.statement
    found = about_upkeep(url, doctor, partition)
    assert obstacle.named in found["finding"]

    paste(url, found["remedy"])

    assert run(url) == 0
    assert execute(url, FAILURES) == []
    assert execute(url, EXPIRED) == []
    assert exists(url, ahead)


def test_a_trim_that_fails_is_recorded(database_url: str) -> None:
    execute(
        database_url,
        "INSERT INTO inbox.foreign_receipt VALUES"
        " ('stripe', 'a', 'billing', now() - 15 * interval '24 hours');"
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'receipts stay'; END $$;"
        "CREATE TRIGGER refuse BEFORE DELETE ON inbox.foreign_receipt"
        " EXECUTE FUNCTION public.refuse()",
    )

    assert run(database_url) == 2

    ((step, table, failure),) = execute(database_url, FAILURES)
    assert (step, table) == ("trim", "inbox.foreign_receipt")
    assert "receipts stay" in failure


@pytest.mark.parametrize(
    ("statement", "named", "is_pasted"),
    [
        (
            "REVOKE CREATE ON SCHEMA inbox FROM pillarbox_owner",
            "pillarbox_owner lacks CREATE on the schema inbox",
            True,
        ),
        ("DROP TABLE inbox.suspect CASCADE", "there is no table inbox.suspect", False),
        (
            REFUSING.format("CREATE TABLE"),
            "event trigger no_changes",
            True,
        ),
    ],
    ids=["privilege", "table", "event trigger"],
)
def test_whatever_keeps_a_day_from_being_created_keeps_no_other_one(
    statement: str,
    named: str,
    is_pasted: bool,
    database_url: str,
    doctor: Doctor,
) -> None:
    url = database_url
    ahead = drop_ahead(url, table="inbox.suspect")
    elsewhere = drop_ahead(url, table="outbox.dead_letter")
    old_partition(url)
    execute(url, statement)

    assert run(url) == 2

    assert exists(url, elsewhere) or "EVENT TRIGGER" in statement
    assert execute(url, EXPIRED) == []
    found = next(
        f
        for f in doctor(url)[1]
        if f["finding"].startswith("the upkeep failed") and "suspect" in f["finding"]
    )
    assert named in found["finding"]
    if is_pasted:
        paste(url, found["remedy"])
        assert run(url) == 0
        assert exists(url, ahead)
        assert exists(url, elsewhere)


def test_a_session_that_locks_a_table_is_named_and_stops_no_other_table(
    database_url: str, doctor: Doctor
) -> None:
    url = database_url
    ahead = drop_ahead(url, table="outbox.dead_letter")
    drop_ahead(url, table="inbox.suspect")
    with closing(psycopg.connect(url, application_name="report")) as holder:
        holder.execute("LOCK TABLE inbox.suspect IN SHARE MODE")
        pid = holder.info.backend_pid

        assert run(url) == 2

        assert exists(url, ahead)
        (found,) = (f for f in doctor(url)[1] if f["check"] == "upkeep")
        assert (
            f"session {pid} of role postgres (application report)" in (found["finding"])
        )
        paste(url, found["remedy"])
    assert run(url) == 0


def test_a_statement_timeout_ends_one_step_and_is_named(
    database_url: str, doctor: Doctor
) -> None:
    url = database_url
    drop_ahead(url, table="inbox.dead_letter")
    ahead = drop_ahead(url, table="outbox.dead_letter")
    with (
        psycopg.connect(url) as holder,
        acting_as(url, "pillarbox_maintainer") as maintainer,
    ):
        holder.execute("LOCK TABLE inbox.dead_letter IN SHARE MODE")
        maintainer.execute("SET statement_timeout = '2s'")
        with pytest.raises(psycopg.errors.RaiseException, match="statement_timeout"):
            maintainer.execute("CALL outbox.maintain()")
        holder.rollback()

    assert exists(url, ahead)
    (found,) = (f for f in doctor(url)[1] if f["check"] == "upkeep")
    assert "statement_timeout of role pillarbox_maintainer is 2s" in found["finding"]
    assert "SET statement_timeout = 0" in found["remedy"]
