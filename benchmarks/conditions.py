"""The conditions under which benchmarks run: servers and sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import psycopg
from psycopg import sql

from benchmarks.measure import quantity
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.testing.postgres import PostgresServer

PREFIX = "pillarbox_bench"

# No checkpoint occurs in a run, and a run of megabytes fits into the write-ahead log.
SERVER_SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
}

DROP_MONTH = """
DO $$
DECLARE
    v_partition regclass;
BEGIN
    FOR v_partition IN
        SELECT x.partition
          FROM outbox.partition_policy p
         CROSS JOIN outbox.partitions(p.parent_table) x
         WHERE x.starts_at > now() + p.premake * p.span
    LOOP
        EXECUTE format('DROP TABLE %s', v_partition);
    END LOOP;
END
$$
"""
"""Leaves as many days ahead as an upkeep makes; without pg_cron, there is a month."""
ADD_MAIN = """
WITH added AS (
    INSERT INTO outbox.reader (reader) VALUES ('main') ON CONFLICT DO NOTHING
    RETURNING reader
)
INSERT INTO outbox.subscription (reader, topic, since, since_seq)
SELECT reader, '*', '1:1:', -1 FROM added
"""
"""Adds the reader of everything, as the first relay does."""


@dataclass(slots=True, kw_only=True)
class Conditions:
    """The conditions that all benchmarks share.

    Each run gets its own database, so that its leftovers do not slow down other runs.
    """

    server: PostgresServer
    quick: bool = False
    _numbers: Iterator[int] = field(default_factory=count, init=False)
    _template: str | None = field(default=None, init=False)

    def size(self, full: int, quick: int) -> int:
        """Return a number of messages or transactions, full or for a quick run."""
        return quick if self.quick else full

    def runs(self, full: int = 5) -> int:
        """Return how many times each variant runs."""
        return 2 if self.quick else full

    @contextmanager
    def empty_database(self) -> Iterator[str]:
        """Yield the URL of a new database, dropped after the block."""
        with self._database(template=None) as url:
            yield url

    @contextmanager
    def migrated_database(self) -> Iterator[str]:
        """Yield the URL of a new migrated database, dropped after the block."""
        if self._template is None:
            template = f"{PREFIX}_template"
            self.server.drop_database(template)
            self.server.create_database(template)
            migrate(self.server.database_url(template), with_cron=False)
            with psycopg.connect(self.server.database_url(template)) as connection:
                connection.execute(DROP_MONTH)
                connection.execute(ADD_MAIN)
            self._template = template
        with self._database(template=self._template) as url:
            yield url

    @contextmanager
    def copied_database(self, url: str) -> Iterator[str]:
        """Yield the URL of a copy of such a database, dropped after the block.

        Its files are copied, which is quick and doesn't fill the write-ahead log. No
        session may be connected to the original.
        """
        name, original = self._name(), url.rpartition("/")[2].partition("?")[0]
        copy = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            connection.execute(
                copy.format(sql.Identifier(name), sql.Identifier(original))
            )
        try:
            yield self.server.database_url(name)
        finally:
            self.server.drop_database(name)

    def close(self) -> None:
        """Drop the template database that the runs shared."""
        if self._template is not None:
            self.server.drop_database(self._template)
            self._template = None

    @contextmanager
    def _database(self, template: str | None) -> Iterator[str]:
        name = self._name()
        self.server.create_database(name, template)
        try:
            yield self.server.database_url(name)
        finally:
            self.server.drop_database(name)

    def _name(self) -> str:
        name = f"{PREFIX}_{next(self._numbers)}"
        self.server.drop_database(name)
        return name


def show(label: str, figure: float, unit: str) -> None:
    """Print the figure of one run."""
    print(f"  {label}: {quantity(figure, unit)}", file=sys.stderr)
