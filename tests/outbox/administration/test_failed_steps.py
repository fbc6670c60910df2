"""A step of the upkeep that fails is reported with its remedy, and stops no other."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Final, NamedTuple
from uuid import uuid4

import psycopg
import pytest

from outbox.cli.main import main
from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.sessions import execute
from tests.outbox.administration.retiring import EXPIRED, acting_as
from tests.outbox.administration.test_upkeep import add_old, old_partition

FAILURES: Final = "SELECT step, object, failure FROM outbox.upkeep_failure"
AHEAD: Final = (
    "SELECT partition::text FROM outbox.partitions(%s)"
    " WHERE starts_at > now() ORDER BY starts_at DESC LIMIT 1"
)
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
    """What is put in the way of the upkeep of outbox.message, and what names it."""

    statement: str
    step: str
    named: str


OBSTACLES: Final = {
    "view": Obstacle(
        "CREATE VIEW public.report AS SELECT id FROM {partition}",
        "drop",
        "view public.report",
    ),
    "materialized view": Obstacle(
        'CREATE MATERIALIZED VIEW public."Report" AS SELECT id FROM {partition}',
        "drop",
        'materialized view public."Report"',
    ),
    "function": Obstacle(
        "CREATE FUNCTION public.id_of(m {partition}) RETURNS uuid LANGUAGE sql"
        " AS 'SELECT m.id'",
        "drop",
        "function public.id_of(",
    ),
    "rule": Obstacle(
        "CREATE TABLE public.sink (a int); CREATE RULE clear AS ON INSERT TO"
        " public.sink DO ALSO DELETE FROM {partition}",
        "drop",
        "rule clear on public.sink",
    ),
    "foreign key on the partition": Obstacle(
        WITH_A_KEY.format("{partition}"), "drop", "of_message of public.invoice"
    ),
    "foreign key on the table": Obstacle(
        WITH_A_KEY.format("outbox.message")
        + " INSERT INTO public.invoice SELECT id, created_at FROM {partition}",
        "detach",
        "of_message of public.invoice",
    ),
    "event trigger on drops": Obstacle(
        REFUSING.format("DROP TABLE"), "drop", "event trigger no_changes"
    ),
    "event trigger on changes": Obstacle(
        REFUSING.format("ALTER TABLE"), "detach", "event trigger no_changes"
    ),
}


def run(url: str) -> int:
    return main(["maintain", "--database", url])


def remove_a_day_ahead(url: str, table: str) -> Callable[[], bool]:
    """Drop a table's last partition; return what finds out whether it is back."""
    ((partition,),) = execute(url, AHEAD, [table])
    execute(url, f"DROP TABLE {partition}")

    def is_back() -> bool:
        query = "SELECT to_regclass(%s) IS NOT NULL"
        return bool(execute(url, query, [partition])[0][0])

    return is_back


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=list(OBSTACLES))
def test_whatever_keeps_one_partition_stops_no_other_step_and_is_named_at_once(
    obstacle: Obstacle,
    database_url: str,
    doctor: Doctor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = database_url
    for days in (20, 25):
        old_partition(url, days)
        add_old(url, days, outcome="published")
    old_partition(url, 40, "inbox.dead_letter")
    kept, _ = (name for (name,) in execute(url, EXPIRED))
    is_back = remove_a_day_ahead(url, "outbox.dead_letter")
    execute(url, obstacle.statement.format(partition=kept))

    for _ in range(2):
        assert run(url) == 2

    failures = {
        object_: failure
        for step, object_, failure in execute(url, FAILURES)
        if step == obstacle.step
    }
    assert obstacle.named in failures[kept]
    assert is_back() or "ALTER TABLE" in obstacle.statement
    if "DROP" not in obstacle.statement and obstacle.step == "drop":
        # Everything else that is past its retention is gone.
        left = (
            "SELECT x.partition::text FROM outbox.partition_policy p,"
            " outbox.partitions(p.parent_table) x WHERE x.ends_at < now() - p.retention"
            " AND p.follows IS NULL AND x.partition IS DISTINCT FROM to_regclass(%s)"
        )
        assert execute(url, left, [kept]) == []
    _, findings = doctor(url)
    found = next(f for f in findings if kept in f["finding"] and f["check"] == "upkeep")
    assert obstacle.named in found["finding"]
    capsys.readouterr()
    main(["status", "--json", "--database", url])
    status = json.loads(capsys.readouterr().out)
    assert obstacle.named in status["upkeep"]["failure"]

    paste(url, found["remedy"])

    assert run(url) == 0
    assert execute(url, FAILURES) == []
    assert execute(url, EXPIRED) == []
    assert is_back()


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
    is_back = remove_a_day_ahead(url, "inbox.suspect")
    is_elsewhere_back = remove_a_day_ahead(url, "outbox.dead_letter")
    old_partition(url)
    execute(url, statement)

    assert run(url) == 2

    assert is_elsewhere_back() or "EVENT TRIGGER" in statement
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
        assert is_back()
        assert is_elsewhere_back()


def test_a_session_that_locks_a_table_is_named_and_stops_no_other_table(
    database_url: str, doctor: Doctor
) -> None:
    url = database_url
    is_back = remove_a_day_ahead(url, "outbox.dead_letter")
    remove_a_day_ahead(url, "inbox.suspect")
    with closing(psycopg.connect(url, application_name="report")) as holder:
        holder.execute("LOCK TABLE inbox.suspect IN SHARE MODE")
        pid = holder.info.backend_pid

        assert main(["maintain", "--database", url]) == 2

        assert is_back()
        (found,) = (f for f in doctor(url)[1] if f["check"] == "upkeep")
        assert (
            f"session {pid} of role postgres (application report)" in (found["finding"])
        )
        paste(url, found["remedy"])
    assert main(["maintain", "--database", url]) == 0


def test_a_partition_of_another_owner_is_named_and_stops_no_other_one(
    database_url: str, doctor: Doctor, server: PostgresServer
) -> None:
    url = database_url
    for days in (20, 25):
        old_partition(url, days)
        add_old(url, days, outcome="published")
    kept, _ = (name for (name,) in execute(url, EXPIRED))
    role = f"tidy_{uuid4().hex}"
    execute(server.url, f"CREATE ROLE {role}")
    execute(url, f"ALTER TABLE {kept} OWNER TO {role}")
    try:
        assert run(url) == 2

        assert execute(url, EXPIRED) == [(kept,)]
        found = next(f for f in doctor(url)[1] if "the upkeep failed" in f["finding"])
        assert f"it belongs to {role}" in found["finding"]
        paste(url, found["remedy"])
        assert run(url) == 0
        assert execute(url, EXPIRED) == []
    finally:
        execute(url, f"DROP OWNED BY {role}")
        execute(server.url, f"DROP ROLE {role}")


def test_a_statement_timeout_ends_one_step_and_is_named(
    database_url: str, doctor: Doctor
) -> None:
    url = database_url
    remove_a_day_ahead(url, "inbox.dead_letter")
    is_back = remove_a_day_ahead(url, "outbox.dead_letter")
    with (
        psycopg.connect(url) as holder,
        acting_as(url, "pillarbox_maintainer") as maintainer,
    ):
        holder.execute("LOCK TABLE inbox.dead_letter IN SHARE MODE")
        maintainer.execute("SET statement_timeout = '2s'")
        with pytest.raises(psycopg.errors.RaiseException, match="statement_timeout"):
            maintainer.execute("CALL outbox.maintain()")
        holder.rollback()

    assert is_back()
    (found,) = (f for f in doctor(url)[1] if f["check"] == "upkeep")
    assert "statement_timeout of role pillarbox_maintainer is 2s" in found["finding"]
    assert "SET statement_timeout = 0" in found["remedy"]


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

    assert main(["maintain", "--database", database_url]) == 2

    ((step, table, failure),) = execute(database_url, FAILURES)
    assert (step, table) == ("trim", "inbox.foreign_receipt")
    assert "receipts stay" in failure


def test_a_failure_that_no_longer_occurs_is_forgotten_by_the_next_run(
    database_url: str,
) -> None:
    execute(database_url, "SELECT outbox.note_failure('no space')")
    execute(
        database_url,
        "SELECT outbox.note_failure('no', 'detach', 'outbox.message', 'x')",
    )

    assert main(["maintain", "--database", database_url]) == 0

    assert execute(database_url, FAILURES) == []
