"""`pillarbox status`: what waits, what failed and how the tables are, on one screen."""

from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

from psycopg.rows import class_row

from outbox.administration.check import Severity
from outbox.administration.connection import AdministrationConnection, administration
from outbox.administration.doctor import examine
from outbox.administration.partitions import read_partitions
from outbox.administration.sides import load_sides
from outbox.cli.command import Database, Json, command, database_url, new_app
from outbox.cli.doctor import status_of
from outbox.cli.output import write_json, write_line, write_table
from outbox.dead_letters.letter import Status
from outbox.dead_letters.statement import Schema, Statement, statement
from outbox.duration import write_duration
from outbox.postgres.sql_files import load

_COLUMNS: Final = ("side", "due", "waits for", "later", "blocked keys", "dead letters")

app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What waits on one side.

    Attributes:
        later: scheduled, or refused and to be tried again.
        waited: how long the oldest that is due has waited; None if nothing is due.
    """

    side: Schema
    due: int
    later: int
    waited: timedelta | None


@command(
    app,
    epilog="Exit status: that of doctor. The inbox's messages are those of the "
    "postgres broker; other brokers keep theirs.",
)
def status(*, database: Database = None, json: Json = False) -> int:
    """Show waiting and failed messages, and the state of the tables."""
    with administration(
        database_url(database), application_name="pillarbox status"
    ) as connection:
        connection.execute("SET timezone = 'UTC'")
        findings = [it for _, found in examine(connection) for it in found]
        waiting = _read_waiting(connection)
        blocked = {
            side.schema: side.read_blocked_count(connection).keys
            for side in load_sides(None)
        }
        letters = {schema: _pending(connection, schema) for schema in blocked}
        tables = {
            policy.parent_table: Counter(each.place for each in partitions)
            for policy, partitions in read_partitions(connection).items()
        }
    code = status_of(findings)
    severities = Counter(finding.severity for finding in findings)
    if json:
        write_json(
            {
                "status": code,
                "findings": severities,
                "waiting": [
                    {
                        **asdict(it),
                        "blocked_keys": blocked[it.side],
                        "dead_letters": letters[it.side],
                    }
                    for it in waiting
                ],
                "partitions": [
                    {"table": table, **places} for table, places in tables.items()
                ],
            }
        )
        return code
    write_line(_answer(severities))
    write_line("")
    write_table(
        _COLUMNS,
        [
            (
                it.side,
                it.due,
                None if it.waited is None else write_duration(it.waited),
                it.later,
                blocked[it.side],
                letters[it.side],
            )
            for it in waiting
        ],
    )
    write_line("")
    write_table(
        ("table", "past", "ahead", "held"),
        [
            (table, places["past"], places["ahead"], places["held"])
            for table, places in tables.items()
        ],
    )
    return code


def _read_waiting(connection: AdministrationConnection) -> list[Waiting]:
    with connection.cursor(row_factory=class_row(Waiting)) as cursor:
        return cursor.execute(load("outbox", "read_status")).fetchall()


def _pending(connection: AdministrationConnection, schema: Schema) -> int:
    rows = connection.execute(statement(schema, Statement.MEASURE))
    return sum(count for _, state, count, _ in rows if state == Status.PENDING)


def _answer(severities: Counter[Severity]) -> str:
    bad = {
        Severity.ERROR: "errors",
        Severity.WARNING: "warnings",
        Severity.UNKNOWN: "checks that could not be made",
    }
    said = [f"{severities[it]} {name}" for it, name in bad.items() if severities[it]]
    if not said:
        return "all well"
    return f"{', '.join(said)}: pillarbox doctor names the remedies"
