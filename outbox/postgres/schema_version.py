"""The version of the schema that this program needs, compared with the one there is."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

import psycopg

from pillarbox.outbox.errors import PrerequisiteError
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.sql_files import load

READ_VERSION: Final = load("outbox", "read_schema_version")


@cache
def newest_version() -> str:
    """Return the newest version of this program's migrations."""
    names = (
        f.name
        for f in files("pillarbox.outbox.migrations").joinpath("versions").iterdir()
    )
    return max(match[0] for name in names if (match := re.match(r"\d{4}", name)))


def refuse_older(found: str | None) -> None:
    """Refuse a schema that is older than this program.

    Args:
        found: its version; None if the role may not read it, which earlier versions
            allowed to no relay or consumer.

    Raises:
        PrerequisiteError: it is older.
    """
    if found is None or found < newest_version():
        has = f"version {found}" if found else "an older version"
        raise PrerequisiteError(
            f"the schema has {has}, but this program needs {newest_version()}: run "
            "pillarbox migrate"
        )


async def read_version(connection: Connection) -> str | None:
    """Return the schema's version; None if the role may not read it.

    Raises:
        PrerequisiteError: it is too old.
        psycopg.errors.UndefinedTable: there is no schema.
    """
    try:
        cursor = await connection.execute(READ_VERSION)
    except psycopg.errors.InsufficientPrivilege:
        return None
    row = await cursor.fetchone()
    version = str(row[0]) if row else ""
    refuse_older(version)
    return version
