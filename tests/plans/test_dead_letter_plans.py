"""Queries of dead letters use an index and read only the requested days."""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid4

import psycopg
import pytest

from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.statement import Schema, Statement, statement
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import Template, new_database
from tests.plans.conftest import read_sequentially, walk

PAGE = Path(__file__).parent.parent.parent / "docs" / "dead-letters.md"
QUESTIONS = re.findall(r"```sql\n(-- .*?)```", PAGE.read_text(), re.DOTALL)
DAYS_BACK = 5
FILL = """
    INSERT INTO {schema}.dead_letter
           (created_at, origin, message_id, topic, attempts, schema_version,
            content_type, headers, payload, error_reason, status, discard_reason,
            retry_after)
    SELECT day + n * interval '20 seconds', 'consumer:billing', n::text,
           CASE WHEN n %% 100 = 0 THEN 'orders.placed' ELSE 't' || n %% 50 END, 1, 1,
           'application/json', '{{}}', '{{}}',
           CASE WHEN n %% 100 = 1 THEN 'ValueError: no such customer'
                ELSE 'error ' || n %% 50 END,
           CASE n %% 100 WHEN 2 THEN 'PENDING' WHEN 3 THEN 'DISCARDED'
                ELSE 'SUCCEEDED' END, 'r',
           CASE WHEN n %% 200 = 2 THEN now() + n * interval '1 hour' ELSE now() END
      FROM generate_series(%(today)s - %(back)s * interval '24 hours', %(today)s,
                           interval '24 hours') AS day
     CROSS JOIN generate_series(1, 4000) AS n
"""


class Plan(NamedTuple):
    """The indexes used, the partitions read, and those read sequentially."""

    indexes: set[str]
    partitions: set[str]
    sequential: set[str]


Ask: TypeAlias = Callable[..., Plan]


@pytest.fixture(scope="module")
def filled(
    server: PostgresServer, template: Template
) -> Iterator[psycopg.Connection[Any]]:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    with new_database(server, "pillarbox_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            for schema in ("outbox", "inbox"):
                table = f"{schema}.dead_letter"
                days = [today - timedelta(days=n) for n in range(1, DAYS_BACK + 1)]
                connection.execute(
                    "SELECT partman.create_partition_time(%s, %s)", (table, days)
                )
                connection.execute(
                    FILL.format(schema=schema), {"today": today, "back": DAYS_BACK}
                )
                connection.execute(f"ANALYZE {table}")
            connection.execute("RESET ROLE")
            yield connection


@pytest.fixture
def ask(filled: psycopg.Connection[Any]) -> Ask:
    parents = dict(
        filled.execute(
            "SELECT child.relname, parent.relname FROM pg_inherits"
            " JOIN pg_class child ON child.oid = inhrelid AND child.relkind = 'i'"
            " JOIN pg_class parent ON parent.oid = inhparent"
        ).fetchall()
    )

    def run(query: str, parameters: Mapping[str, object] | None = None) -> Plan:
        with filled.transaction(force_rollback=True):
            explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {query}"
            row = filled.execute(explain, parameters).fetchone()
        assert row is not None
        nodes = [n for n in walk(row[0][0]["Plan"]) if n["Actual Loops"] > 0]
        scans = [n for n in nodes if "Scan" in n["Node Type"] and "Relation Name" in n]
        return Plan(
            {parents[n["Index Name"]] for n in nodes if n.get("Index Name") in parents},
            {n["Relation Name"] for n in scans},
            read_sequentially(scans),
        )

    return run


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.split("\n")[0][3:40])
@pytest.mark.parametrize("schema", ["outbox", "inbox"])
def test_the_pages_queries_use_their_index(
    ask: Ask, question: str, schema: Schema
) -> None:
    plan = ask(question.replace("inbox.", f"{schema}."))
    named = re.findall(r"dead_letter_\w+_idx", question)
    if named:
        assert plan.indexes == set(named)
        assert plan.sequential == set()
    else:
        # The query asks for yesterday only.
        assert len(plan.partitions) == 1


def test_the_pages_queries_use_each_of_the_four_indexes() -> None:
    asked = re.findall(r"dead_letter_(\w+)_idx", "".join(QUESTIONS))
    assert asked == ["status", "topic", "reason", "retry"]


def test_due_dead_letters_are_leased_by_the_retry_index(ask: Ask) -> None:
    plan = ask(
        statement("inbox", Statement.LEASE_DUE),
        {
            "origin": "consumer:billing",
            "max_retries": 240,
            "max_rows": 50,
            "lease": 60,
        },
    )
    assert plan.indexes == {"dead_letter_retry_idx", "dead_letter_pkey"}
    assert plan.sequential == set()


@pytest.mark.parametrize("name", [Statement.LIST, Statement.FIND, Statement.GROUP])
@pytest.mark.parametrize(
    "criteria",
    [
        Criteria(max_rows=50),
        Criteria(since=datetime.now(UTC) - timedelta(days=2)),
        Criteria(status=None, topic="orders.placed", max_rows=50),
    ],
    ids=["pending", "recent", "topic"],
)
def test_a_list_is_read_from_indexes(
    ask: Ask, name: Statement, criteria: Criteria
) -> None:
    plan = ask(statement("outbox", name), criteria.parameters())
    assert plan.sequential == set()
    if criteria.topic is not None:
        assert plan.indexes == {"dead_letter_topic_idx"}


def test_a_dead_letter_is_locked_by_its_primary_key(
    ask: Ask, filled: psycopg.Connection[Any]
) -> None:
    row = filled.execute("SELECT id, created_at FROM inbox.dead_letter").fetchone()
    assert row is not None
    id: UUID = row[0]
    for name in (Statement.LOCK, Statement.MARK_SUCCEEDED):
        plan = ask(statement("inbox", name), {"id": id, "created_at": row[1]})
        assert (len(plan.partitions), plan.sequential) == (1, set())


def test_a_dead_letter_is_found_by_its_id_or_that_of_its_message(ask: Ask) -> None:
    criteria = Criteria(status=None, ids=(uuid4(), uuid4()))
    plan = ask(statement("inbox", Statement.LIST), criteria.parameters())
    assert plan.indexes == {"dead_letter_pkey", "dead_letter_message_idx"}
    assert plan.sequential == set()

    plan = ask(
        "SELECT id FROM inbox.dead_letter WHERE status = 'PENDING'"
        " AND message_id = '102' AND origin = 'consumer:billing'"
    )
    assert (plan.indexes, plan.sequential) == ({"dead_letter_message_idx"}, set())
