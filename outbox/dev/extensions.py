"""Find out which extensions a server has, to migrate with what is there."""

from typing import NamedTuple

import psycopg

from outbox.postgres.connection import conninfo
from outbox.postgres.sql_files import load


class Extensions(NamedTuple):
    """The extensions that a migration of a database can use.

    Attributes:
        partman: whether pg_partman can be installed.
        cron: whether pg_cron runs its jobs in this database.
    """

    partman: bool
    cron: bool


def find_extensions(url: str) -> Extensions:
    """Ask the server.

    Raises:
        psycopg.Error: it can't be reached.
    """
    with psycopg.connect(conninfo(url)) as connection:
        (row,) = connection.execute(load("outbox", "available_extensions")).fetchall()
    return Extensions(*row)
