"""What to paste where partitions are not as we make them."""

from collections.abc import Sequence
from typing import NamedTuple


class Misfit(NamedTuple):
    """A partition that has to make room: DEFAULT, off its bounds, or misnamed.

    Attributes:
        schema: where it is, quoted.
        aside: a name there that stands in nobody's way, quoted.
    """

    partition: str
    schema: str
    aside: str


def replacement(table: str, misfits: Sequence[Misfit]) -> str:
    """Give the SQL that replaces partitions by those of the policy, rows and all.

    All in one transaction: no row may be lost if there is one that no partition takes.
    The names are cleared first, since pg_partman makes nothing where one is taken.
    """
    away = "".join(
        f" ALTER TABLE {table} DETACH PARTITION {partition};"
        f" ALTER TABLE {partition} RENAME TO {aside};"
        for partition, _, aside in misfits
    )
    back = "".join(
        f" INSERT INTO {table} SELECT * FROM {schema}.{aside};"  # noqa: S608 - for a person to read
        f" DROP TABLE {schema}.{aside};"
        for _, schema, aside in misfits
    )
    return f"BEGIN;{away} SELECT outbox.make_partitions('{table}');{back} COMMIT;"
