"""A database with rows in several partitions, and EXPLAIN with real settings."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import psycopg
import pytest
from psycopg import sql

from pillarbox.outbox.log.process import SETTINGS
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.postgres import Template, new_database

DAYS_BACK = 5
Node: TypeAlias = dict[str, Any]

PARENTS = """
    SELECT child.relname, parent.relname
      FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid
      JOIN pg_class parent ON parent.oid = inhparent
     WHERE child.relkind = 'i' AND parent.relnamespace = 'outbox'::regnamespace
"""
FILL = """
    INSERT INTO outbox.message (id, created_at, lane, topic, key, content_type, payload)
    SELECT outbox.uuid7(), day + n * interval '500 milliseconds',
           16 + n %% 16, 't', 'k' || n %% 100, 'text/plain', %(payload)s
      FROM generate_series(%(today)s - %(back)s * interval '24 hours', %(today)s,
                           interval '24 hours') AS day
     -- Yesterday has enough rows to make an index worthwhile.
     CROSS JOIN generate_series(1, CASE WHEN day = %(today)s - interval '24 hours'
                                        THEN 60000 ELSE 3000 END) AS n
"""
# Settled in batches of 500 messages; one in ten was deferred, of which 1 % was refused.
SETTLE = """
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, snapshot)
    SELECT day, day + interval '24 hours', row_number() OVER (ORDER BY max(seq)),
           max(seq), count(*), lane, 'main', pg_current_snapshot()
      FROM (SELECT date_trunc('day', created_at, 'UTC') AS day, lane, seq
              FROM outbox.message) AS settled
     GROUP BY day, lane, seq / 500
"""
DEFER = """
    INSERT INTO outbox.deferral
           (created_at, due_at, seq, id, attempts, lane, cause, key)
    SELECT created_at,
           CASE WHEN seq % 1000 <> 11 THEN now() + (seq % 2000 - 1000) * interval '1 second' END,
           seq, id, (seq % 1000 = 1)::integer, lane,
           CASE seq % 1000 WHEN 1 THEN 'refused' WHEN 11 THEN 'blocked' ELSE 'scheduled' END,
           key
      FROM outbox.message WHERE seq % 10 = 1
"""  # noqa: E501

AUTO_EXPLAIN = """
    SET auto_explain.log_min_duration = 0;
    SET auto_explain.log_analyze = on;
    SET auto_explain.log_timing = off;
    SET auto_explain.log_format = json;
    SET client_min_messages = log
"""


def walk(node: Node) -> Iterator[Node]:
    """Yield a node of a plan and all below it."""
    yield node
    for child in node.get("Plans", ()):
        yield from walk(child)


def record_plans(connection: psycopg.Connection[Any]) -> list[Node]:
    """Return a list to which a session adds each statement's text and executed plan.

    The next query ends a statement, whose plan is logged only then.
    """
    plans: list[Node] = []

    def note(notice: psycopg.errors.Diagnostic) -> None:
        _, plan, shown = (notice.message_primary or "").partition("plan:\n")
        if plan:
            plans.append(json.loads(shown))

    connection.execute("LOAD 'auto_explain'")
    connection.execute(AUTO_EXPLAIN)
    connection.add_notice_handler(note)
    return plans


def executed_scans(nodes: Iterable[Node], *tables: str) -> list[Node]:
    """Return the scans of partitions, without those that never ran.

    Args:
        tables: the partitioned tables; by default all.
    """
    partition = re.compile(f"({'|'.join(tables) or '.*'})_p2")
    return [
        node
        for node in nodes
        if partition.match(str(node.get("Relation Name", "")))
        and node["Actual Loops"] > 0
    ]


def days_of(scans: Iterable[Node]) -> set[str]:
    """Return the days that were read."""
    # pg_partman 4 puts underscores into names; 5 doesn't.
    return {re.sub(r"\D", "", str(node["Relation Name"])) for node in scans}


def rows_per_loop(node: Node) -> float:
    """Return how many rows a scan reads each time, even if it filters them out."""
    return float(node["Actual Rows"] + node.get("Rows Removed by Filter", 0))


def rows_read(scans: Iterable[Node]) -> int:
    """Return how many rows were read in total, even if they were filtered out."""
    return sum(round(node["Actual Loops"] * rows_per_loop(node)) for node in scans)


def read_sequentially(scans: Iterable[Node]) -> set[str]:
    """Return the partitions with rows that were read from end to end."""
    return {
        node["Relation Name"]
        for node in scans
        if node["Node Type"] == "Seq Scan" and rows_per_loop(node) > 0
    }


class Explained:
    """A plan, with its nodes and the indexes and partitions that it touches."""

    def __init__(self, plan: Node, parents: Mapping[str, str]) -> None:
        self.nodes = list(walk(plan))
        self._parents = parents

    def scans(self, *tables: str) -> list[Node]:
        """Return the scans of partitions of these tables (default: outbox.message)."""
        prefixes = tuple(f"{table}_p" for table in tables or ("message",))
        return [
            node
            for node in self.nodes
            if str(node.get("Relation Name", "")).startswith(prefixes)
            and "Scan" in node["Node Type"]
        ]

    def partitions(self, *tables: str) -> set[str]:
        """Return the days that were read, without scans that never ran."""
        return days_of(it for it in self.scans(*tables) if it["Actual Loops"] > 0)

    def sequential(self) -> set[str]:
        """Return the non-empty partitions that were read sequentially."""
        return read_sequentially(self.scans("message", "position", "deferral"))

    def rows_removed(self) -> int:
        """Return the number of rows that were read and then filtered out."""
        return sum(int(n.get("Rows Removed by Filter", 0)) for n in self.scans())

    def sorts(self) -> list[Node]:
        """Return the nodes that read all of their input before they return a row."""
        return [node for node in self.nodes if "Sort" in node["Node Type"]]

    def conditions(self) -> list[str]:
        return [str(node["Index Cond"]) for node in self.nodes if "Index Cond" in node]

    def indexes(self) -> set[str]:
        """Return the indexes used, by their names on the partitioned tables."""
        return {
            self._parents[node["Index Name"]]
            for node in self.nodes
            if node.get("Index Name") in self._parents
        }


Explain: TypeAlias = Callable[..., Explained]


@pytest.fixture(scope="session")
def today() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@pytest.fixture(scope="session")
def filled_url(
    server: PostgresServer, template: Template, today: datetime
) -> Iterator[str]:
    with new_database(server, "pillarbox_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            days = [today - timedelta(days=n) for n in range(1, DAYS_BACK + 1)]
            connection.execute(make_partitions_at("outbox.message"), (days,))
            connection.execute(
                FILL, {"today": today, "back": DAYS_BACK, "payload": b"x" * 300}
            )
            connection.execute(SETTLE)
            connection.execute(DEFER)
            # As autovacuum does.
            connection.execute(
                "SELECT brin_summarize_new_values(inhrelid) FROM pg_inherits"
                " WHERE inhparent = 'outbox.message_xid_idx'::regclass"
            )
            for table in ("message", "position", "deferral"):
                connection.execute(f"ANALYZE outbox.{table}".encode())
        yield url


@pytest.fixture
def explain(filled_url: str) -> Iterator[Explain]:
    """Explain with the settings of all of a relay's connections."""
    with explaining(filled_url) as run:
        yield run


@contextmanager
def explaining(url: str) -> Iterator[Explain]:
    """Yield a function that runs one of the relay's statements and returns its plan.

    The statement has the settings of a relay's connections, and is rolled back.
    """
    with executed_plans(url, "pillarbox_relay", SETTINGS) as execute:
        with psycopg.connect(url) as connection:
            parents: dict[str, str] = dict(connection.execute(PARENTS).fetchall())

        def run(
            name: str, package: str = "outbox.log", **parameters: object
        ) -> Explained:
            values = {"reader": "main", **parameters}
            return Explained(execute(load(package, name), values), parents)

        yield run


@contextmanager
def executed_plans(
    url: str, role: str, settings: Mapping[str, str]
) -> Iterator[Callable[[str, Mapping[str, object]], Node]]:
    """Yield a function that executes a statement, rolls it back, and returns its plan.

    The plan is the one that was executed. EXPLAIN would make another plan for these
    parameters, whatever the value of `plan_cache_mode`.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        plans = record_plans(connection)
        connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
        for name, value in settings.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))

        def run(statement: str, parameters: Mapping[str, object]) -> Node:
            with connection.transaction(force_rollback=True):
                plans.clear()
                connection.execute(statement, parameters, prepare=True)
                connection.execute("SELECT")
            plan: Node = plans[0]["Plan"]
            return plan

        yield run
