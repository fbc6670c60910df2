"""The schema: its version is the one that this program needs."""

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

_WITH_LIMITS: Final = "0006"
_LIMITS: Final = (
    "topic_size",
    "key_size",
    "tenant_size",
    "content_type_size",
    "headers_size",
    "headers_are_strings",
    "payload_size",
    "schema_version_positive",
)


def check_schema(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find a schema that is older or newer than this program."""
    known, found = newest_version(), read_version(connection)
    if found is None or found < known:
        yield Finding(
            check="schema",
            severity=Severity.ERROR,
            finding=f"the schema has version {found}, but this program needs {known}",
            remedy=here.migrate,
        )
    elif found > known:
        yield Finding(
            check="schema",
            severity=Severity.WARNING,
            finding=f"the schema has version {found}, but this program knows {known}",
            remedy="pip install --upgrade pillarbox",
        )

    if found is not None and found >= _WITH_LIMITS:
        yield from _check_limits(connection, here)


def _check_limits(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    for limit, is_gone in connection.execute(
        load("outbox", "list_missing_limits"), {"limits": list(_LIMITS)}
    ):
        yield Finding(
            check="schema",
            severity=Severity.WARNING,
            finding=f"the constraint {limit} of outbox.message doesn't exist: any role"
            " that may insert can add rows that are too large for a relay"
            if is_gone
            else f"the constraint {limit} of outbox.message is not validated",
            remedy="create it as pillarbox migrate --sql prints it"
            if is_gone
            else here.migrate,
        )


def read_version(connection: AdministrationConnection) -> str | None:
    """Return the version that the migrations recorded."""
    row = connection.execute(load("outbox", "read_schema_version")).fetchone()
    return None if row is None else str(row[0])


def newest_version() -> str:
    """Return the newest version of this program's migrations."""
    names = (f.name for f in files("outbox.migrations").joinpath("versions").iterdir())
    return max(match[0] for name in names if (match := re.match(r"\d{4}", name)))
