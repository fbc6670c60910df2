"""The schema: of the version that this program knows."""

import re
from collections.abc import Iterator
from importlib.resources import files

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity
from outbox.statement import load


def check_schema(
    connection: AdministrationConnection, names: Names
) -> Iterator[Finding]:
    """Find a schema that is older or newer than this program."""
    known, found = newest_version(), read_version(connection)
    if found is None or found < known:
        yield Finding(
            check="schema",
            severity=Severity.ERROR,
            finding=f"the schema has version {found}, this program works with {known}",
            remedy=names.migrate,
        )
    elif found > known:
        yield Finding(
            check="schema",
            severity=Severity.WARNING,
            finding=f"the schema has version {found}, this program knows {known}",
            remedy="pip install --upgrade pillarbox",
        )


def read_version(connection: AdministrationConnection) -> str | None:
    """Read what the migrations wrote down."""
    row = connection.execute(load("outbox", "read_schema_version")).fetchone()
    return None if row is None else str(row[0])


def newest_version() -> str:
    """Give the last version that this program's migrations make."""
    names = (f.name for f in files("outbox.migrations").joinpath("versions").iterdir())
    return max(match[0] for name in names if (match := re.match(r"\d{4}", name)))
