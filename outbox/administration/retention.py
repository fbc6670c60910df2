"""The policy: how long rows are kept, and how many future partitions exist."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Final

from psycopg.rows import class_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.sql_files import load

INTERVALS: Final = {
    "hourly": timedelta(hours=1),
    "daily": timedelta(days=1),
    "weekly": timedelta(weeks=1),
}
_MIN_RETENTION: Final = timedelta(days=1)
_MAX_RETENTION: Final = timedelta(days=36500)  # timestamps don't reach back further
_PREMAKE: Final = {"hourly": 48, "daily": 7, "weekly": 4}
"""How many partitions are made ahead: at least two days, to fix a failed upkeep. More
would slow down the planner, which reads all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy of one table, which the upkeep applies.

    Attributes:
        span: the width of future partitions.
        retention: a partition is dropped when all its rows are older than this.
        premake: the number of future partitions.
        minimum: the shortest retention that may be set; None for no minimum.
        keep_table: whether an expired partition is kept as an ordinary table after its
            detach, ready to be archived, instead of being dropped.
        follows: the table whose policy this one shares, because this one's rows record
            what happened to that table's rows, and are dropped after them; None if it
            has a policy of its own.
    """

    parent_table: str
    span: timedelta
    retention: timedelta
    premake: int
    minimum: timedelta | None
    keep_table: bool
    follows: str | None


def read_policies(connection: AdministrationConnection) -> list[Policy]:
    """Return the policy of every table, each followed by those that follow it."""
    with connection.cursor(row_factory=class_row(Policy)) as cursor:
        return cursor.execute(load("outbox", "list_policies")).fetchall()


def change_policy(
    connection: AdministrationConnection,
    table: str,
    *,
    retention: timedelta | None = None,
    interval: str | None = None,
    minimum: timedelta | None = None,
    keep_table: bool | None = None,
) -> Policy:
    """Change the policy of a table and its followers; the next upkeep applies it.

    Args:
        table: `outbox.message`, or `message` if that is unambiguous.
        interval: hourly, daily or weekly. Empty future partitions are replaced by
            those of the new width, from the end of the current hour, day and week on;
            the others are kept until their retention is over.
        minimum: the longest time after which a message can still reach its consumer,
            given your delays and retries.

    Raises:
        ConfigError: a value is invalid, or the table follows another one; nothing was
            changed.
        psycopg.Error: this role isn't a member of the tables' owner, or the interval
            can't be changed now; nothing was changed.
    """
    old = _find(table, read_policies(connection))
    span = old.span if interval is None else _span(interval, old.parent_table)
    new = replace(
        old,
        span=span,
        retention=old.retention if retention is None else retention,
        premake=old.premake if span == old.span else _PREMAKE[str(interval)],
        minimum=old.minimum if minimum is None else minimum,
        keep_table=old.keep_table if keep_table is None else keep_table,
    )
    _check(new)
    values = asdict(new)
    with connection.transaction():
        if new.span != old.span:
            connection.execute(load("outbox", "set_interval"), values)
        connection.execute(load("outbox", "set_policy"), values)
    return new


def _find(table: str, policies: Sequence[Policy]) -> Policy:
    found = [
        p
        for p in policies
        if table in {p.parent_table, p.parent_table.partition(".")[2]}
    ]
    if len(found) != 1:
        names = ", ".join(p.parent_table for p in found or policies)
        raise ConfigError(
            f"table {table!r}: {'is ambiguous' if found else 'has no policy'};"
            f" write one of {names}"
        )
    (policy,) = found
    if policy.follows is not None:
        raise ConfigError(
            f"table {table!r}: is kept as long as {policy.follows}, whose messages"
            f" would be published again without it; write {policy.follows}"
        )
    return policy


def _check(policy: Policy) -> None:
    if policy.retention < _MIN_RETENTION:
        raise ConfigError(
            f"retention={exact_duration(policy.retention)} of {policy.parent_table}:"
            " must be at least 1d, to keep today's rows"
        )
    if max(policy.retention, policy.minimum or _MIN_RETENTION) > _MAX_RETENTION:
        raise ConfigError(
            f"retention of {policy.parent_table}: must be at most"
            f" {_MAX_RETENTION.days}d"
        )
    if policy.minimum is not None and policy.retention < policy.minimum:
        raise ConfigError(
            f"retention={exact_duration(policy.retention)} of {policy.parent_table}:"
            f" a message delayed or retried for {exact_duration(policy.minimum)}"
            " would become a dead letter; choose a longer retention, or pass"
            " --minimum if your delays and retries are shorter"
        )


def _span(interval: str, table: str) -> timedelta:
    if interval not in INTERVALS:
        raise ConfigError(
            f"interval={interval!r} of {table}: use {', '.join(INTERVALS)}; hours, days"
            " and weeks nest, so that old and new partitions meet without a gap"
        )
    return INTERVALS[interval]
