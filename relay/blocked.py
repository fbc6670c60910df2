"""`relay blocked`: the keys that wait behind a message that the broker refused."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from psycopg.rows import class_row

from outbox.administration import AdministrationConnection, administration
from outbox.command import DATABASE_VARIABLE, Subcommands, add_database, url_of
from outbox.duration import write_duration
from outbox.errors import ConfigError
from outbox.statement import load
from outbox.table import draw_table

_MAX_REASON: Final = 80
_COLUMNS: Final = ("key", "age", "due in", "attempts", "topic", "head", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKey:
    """A key and its head: the message that was nacked and waits for its next attempt.

    Attributes:
        id: of the head; the age of the key is since its `created_at`.
        available_at: when it is tried again.
    """

    key: str
    lane: int
    id: UUID
    topic: str
    attempts: int
    created_at: datetime
    available_at: datetime
    last_error: str


def list_blocked_heads(
    connection: AdministrationConnection, *, max_rows: int
) -> list[BlockedKey]:
    """List the keys that wait, the one with the oldest head first."""
    with connection.cursor(row_factory=class_row(BlockedKey)) as cursor:
        return cursor.execute(
            load("relay", "list_blocked_heads"), {"max_rows": max_rows}
        ).fetchall()


def add_to(subcommands: Subcommands) -> None:
    """Add the command to the parser."""
    parser = subcommands.add_parser(
        "blocked", help="list the keys that wait behind a refused message"
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
        found = list_blocked_heads(connection, max_rows=arguments.limit)
    if arguments.json:
        rows = [asdict(key) for key in found]
        sys.stdout.write(f"{json.dumps(rows, indent=2, default=str)}\n")
    else:
        sys.stdout.write(_table(found))
    return 0


def _table(found: Sequence[BlockedKey]) -> str:
    if not found:
        return "no key is blocked\n"
    now = datetime.now(UTC)
    return draw_table(
        _COLUMNS,
        [
            (
                blocked.key,
                write_duration(now - blocked.created_at),
                write_duration(blocked.available_at - now),
                blocked.attempts,
                blocked.topic,
                blocked.id,
                (blocked.last_error or "")[:_MAX_REASON],
            )
            for blocked in found
        ],
    )
