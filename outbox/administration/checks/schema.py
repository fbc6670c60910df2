"""The schema: its version is the one that this program needs."""

import re
from collections.abc import Iterator
from importlib.resources import files

from outbox.administration.check import Finding, Installation, error, warning
from outbox.administration.checks.by_statement import by_statement
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load


def check_schema(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find a schema that is older or newer than this program."""
    known, found = newest_version(), read_version(connection)
    if found is None or found < known:
        yield error(
            f"the schema has version {found}, but this program needs {known}",
            here.migrate,
        )
    elif found > known:
        yield warning(
            f"the schema has version {found}, but this program is for {known}",
            "pip install --upgrade pillarbox",
        )

    if found is not None:
        differences = by_statement(load("outbox", "check_promises"))
        yield from differences(connection, here)


def read_version(connection: AdministrationConnection) -> str | None:
    """Return the version that the migrations recorded."""
    row = connection.execute(load("outbox", "read_schema_version")).fetchone()
    return None if row is None else str(row[0])


def newest_version() -> str:
    """Return the newest version of this program's migrations."""
    names = (f.name for f in files("outbox.migrations").joinpath("versions").iterdir())
    return max(match[0] for name in names if (match := re.match(r"\d{4}", name)))
