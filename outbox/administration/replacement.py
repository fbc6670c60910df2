"""The SQL that replaces partitions unlike those that pillarbox creates."""

from collections.abc import Sequence
from typing import NamedTuple


class Misfit(NamedTuple):
    """A partition to replace: DEFAULT, with odd bounds, or misnamed.

    Attributes:
        schema: its schema, quoted.
        aside: an unused name in that schema, quoted.
        control: the partition key column of the table, quoted.
    """

    partition: str
    schema: str
    aside: str
    control: str


def replacement(table: str, misfits: Sequence[Misfit]) -> str:
    """Return the SQL that replaces partitions and moves their rows to the new ones.

    It is one transaction, so that no row is lost if some row fits no partition. The
    names are freed first, since pg_partman creates no partition whose name is taken.
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
