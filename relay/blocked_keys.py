"""`relay blocked`: refused messages that wait, and the keys that they block."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection, administration
from outbox.cli.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.cli.table import draw_table
from outbox.duration import write_duration
from outbox.errors import ConfigError
from outbox.postgres.sql_files import load

_MAX_REASON: Final = 80
_COLUMNS: Final = ("key", "age", "due in", "attempts", "topic", "message", "reason")
_NO_KEY: Final = "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A message that was nacked and waits for its next attempt.

    Attributes:
        key: blocked by it: later messages of that key wait too. None: it waits alone.
        available_at: when it is tried again.
    """

    key: str | None
    lane: int
    id: UUID
    topic: str
    attempts: int
    created_at: datetime
    available_at: datetime
    last_error: str


@dataclass(frozen=True, slots=True)
class RefusedCount:
    """How many messages wait after a refusal."""

    keys: int
    without_key: int


def list_refused(
    connection: AdministrationConnection, *, max_rows: int
) -> list[Refused]:
    """List what was refused and waits, the oldest message first."""
    with connection.cursor(row_factory=class_row(Refused)) as cursor:
        return cursor.execute(
            load("relay", "list_refused"), {"max_rows": max_rows}
        ).fetchall()


def count_refused(connection: AdministrationConnection) -> RefusedCount:
    """Count the blocked keys, and the refused messages that have none."""
    with connection.cursor(row_factory=class_row(RefusedCount)) as cursor:
        counted = cursor.execute(load("relay", "count_refused")).fetchone()
    assert counted is not None
    return counted


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "blocked", help="list refused messages that wait, and the keys they block"
    )
    add_database(parser)
    parser.add_argument(
        "--limit", type=int, default=50, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    url = url_of(arguments.database, "database", DATABASE_VARIABLE)
    with administration(
        url,
        application_name="pillarbox relay blocked",
        rights="GRANT pillarbox_monitor, or pillarbox_relay, TO its role",
    ) as connection:
        found = list_refused(connection, max_rows=arguments.limit)
        counted = count_refused(connection)
    if arguments.json:
        said = {
            **asdict(counted),
            "messages": [asdict(refused) for refused in found],
        }
        sys.stdout.write(f"{json.dumps(said, indent=2, default=str)}\n")
    else:
        sys.stdout.write(f"{_summary(counted)}\n{_table(found)}")
    return 0


def _summary(counted: RefusedCount) -> str:
    if not counted.keys and not counted.without_key:
        return "no key is blocked, and no refused message waits"
    return (
        f"{_number(counted.keys, 'blocked key')}, "
        f"{_number(counted.without_key, 'refused message')} without a key"
    )


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _table(found: Sequence[Refused]) -> str:
    if not found:
        return ""
    now = datetime.now(UTC)
    return draw_table(
        _COLUMNS,
        [
            (
                _NO_KEY if refused.key is None else refused.key,
                write_duration(now - refused.created_at),
                write_duration(refused.available_at - now),
                refused.attempts,
                refused.topic,
                refused.id,
                (refused.last_error or "")[:_MAX_REASON],
            )
            for refused in found
        ],
    )
