"""Find out which extensions a server has, to migrate with what is there."""

import psycopg

from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.postgres.sql_files import load


def find_extensions(url: str) -> tuple[bool, bool]:
    """Return whether pg_partman can be installed, and whether pg_cron runs jobs here.

    Raises:
        psycopg.Error: the server can't be reached.
    """
    with psycopg.connect(conninfo(url)) as connection:
        (row,) = connection.execute(load("outbox", "available_extensions")).fetchall()
    has_partman, has_cron = row
    return has_partman, has_cron
