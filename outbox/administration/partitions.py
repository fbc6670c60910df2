"""Show the partitions, and what holds those past their retention."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import dict_row

from outbox.administration.connection import AdministrationConnection
from outbox.administration.retention import Policy, read_policies
from outbox.administration.upkeep import UpkeepStep, plan_upkeep
from outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition of a table.

    Attributes:
        starts_at, ends_at: None for a DEFAULT partition.
        place: past, held (past its retention, with unsettled rows), detached (to be
            dropped), kept (detached, an ordinary table), today, ahead or default.
        rows: PostgreSQL's estimate; None if it was never analyzed.
        unsettled: the rows that hold it, counted up to 1,000.
        query: the query that shows those rows.
        reason: why those rows hold it, in which lanes, and the id of one.
    """

    partition: str
    starts_at: datetime | None
    ends_at: datetime | None
    place: str
    rows: int | None
    bytes: int
    unsettled: int | None = None
    query: str | None = None
    reason: str | None = None


def read_partitions(
    connection: AdministrationConnection, steps: Iterable[UpkeepStep] | None = None
) -> dict[Policy, list[Partition]]:
    """Return the policy of each table with its partitions, oldest first.

    Args:
        steps: what the upkeep would do now, if that has been read already.
    """
    policies = {policy.parent_table: policy for policy in read_policies(connection)}
    held = {
        step.partition: step
        for step in (plan_upkeep(connection) if steps is None else steps)
        if step.step in {"hold", "attach"} and step.unsettled != 0
    }
    found: dict[Policy, list[Partition]] = {p: [] for p in policies.values()}
    with connection.cursor(row_factory=dict_row) as cursor:
        for row in cursor.execute(load("outbox", "list_partitions")):
            policy = policies[row.pop("parent_table")]
            if step := held.get(row["partition"]):
                row["place"] = "held"
                row["unsettled"], row["query"] = step.unsettled, step.statement
                row["reason"] = step.reason
            found[policy].append(Partition(**row))
    return found
