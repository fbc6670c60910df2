"""What to paste where partitions are not as we make them."""

from collections.abc import Sequence
from typing import NamedTuple


class Misfit(NamedTuple):
    """A partition that has to make room: DEFAULT, off its bounds, or misnamed.

    Attributes:
        schema: where it is, quoted.
        aside: a name there that stands in nobody's way, quoted.
        control: the column that the table is partitioned by, quoted.
    """

    partition: str
    schema: str
    aside: str
    control: str


def replacement(table: str, misfits: Sequence[Misfit]) -> str:
    """Give the SQL that replaces partitions by ours: the policy's, and their rows'.

    All in one transaction: no row may be lost if there is one that no partition takes.
    The names are cleared first, since pg_partman makes nothing where one is taken.
    """
    away = "".join(
        f" ALTER TABLE {table} DETACH PARTITION {partition};"
        f" ALTER TABLE {partition} RENAME TO {aside};"
        for partition, _, aside, _ in misfits
    )
    days = "".join(
        f" SELECT outbox.make_partitions_at('{table}', array_agg(DISTINCT"  # noqa: S608
        f" date_trunc('hour', {control}, 'UTC'))) FROM {schema}.{aside};"
        for _, schema, aside, control in misfits
    )
    back = "".join(
        f" INSERT INTO {table} SELECT * FROM {schema}.{aside};"  # noqa: S608
        f" DROP TABLE {schema}.{aside};"
        for _, schema, aside, _ in misfits
    )
    wanted = f"SELECT outbox.make_partitions('{table}');"
    return f"BEGIN;{away} {wanted}{days}{back} COMMIT;"
