"""The policy: how long rows stay and how many partitions lie ahead."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from psycopg.rows import class_row

from outbox.administration import AdministrationConnection
from outbox.errors import ConfigError
from outbox.limits import Limits
from outbox.retry import RetryPolicy
from outbox.statement import load

INTERVALS: Final = {
    "hourly": timedelta(hours=1),
    "daily": timedelta(days=1),
    "weekly": timedelta(weeks=1),
}
_UNITS: Final = {"h": "hours", "d": "days", "w": "weeks"}
_MIN_PREMAKE: Final = 3
_MAX_PREMAKE: Final = 100
_RECEIPTS: Final = "inbox.receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the upkeep obeys for one table.

    Attributes:
        span: the width of a partition.
        retention: a partition may go when all of it is older.
        premake: partitions to keep ahead.
    """

    parent_table: str
    span: timedelta
    retention: timedelta
    premake: int


def read_policies(connection: AdministrationConnection) -> list[Policy]:
    """Read the policy of every table."""
    with connection.cursor(row_factory=class_row(Policy)) as cursor:
        return cursor.execute(load("outbox", "list_policies")).fetchall()


def receipt_floor(
    limits: Limits | None = None, retry: RetryPolicy | None = None
) -> timedelta:
    """Give the longest time after which a message can still come to its consumer.

    A receipt lies in the day in which its message was added. From then on the message
    may wait for its `available_at`, be retried by the relay, and be retried by the
    consumer.
    """
    limits, retry = limits or Limits(), retry or RetryPolicy()
    return limits.max_delay + 2 * retry.max_attempts * retry.max_delay


def change_policy(
    connection: AdministrationConnection,
    table: str,
    *,
    retention: timedelta | None = None,
    premake: int | None = None,
    interval: str | None = None,
    force: bool = False,
) -> Policy:
    """Change the policy of a table; the next upkeep obeys.

    Args:
        table: `outbox.message`, or `message` where that names only one.
        interval: hourly, daily or weekly; see Raises.
        force: take a retention of `inbox.receipt` below `receipt_floor`.

    Raises:
        ConfigError: a value can't be used, or the interval isn't the present one;
            nothing was changed.
        psycopg.Error: this role is no member of the tables' owner.
    """
    old = _find(table, read_policies(connection))
    new = replace(
        old,
        retention=old.retention if retention is None else retention,
        premake=old.premake if premake is None else premake,
    )
    _check(new, force=force)
    if interval is not None:
        _check_interval(interval, old)
    connection.execute(
        load("outbox", "set_policy"),
        {
            "parent_table": new.parent_table,
            "retention": new.retention,
            "premake": new.premake,
        },
    )
    return new


def parse_duration(text: str) -> timedelta:
    """Read 7d, 36h or 2w.

    Raises:
        ConfigError: it is written otherwise.
    """
    match = re.fullmatch(r"(\d{1,6})([hdw])", text)
    if match is None:
        raise ConfigError(f"retention {text!r}: write 7d, 36h or 2w")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _find(table: str, policies: Sequence[Policy]) -> Policy:
    found = [
        p
        for p in policies
        if table in {p.parent_table, p.parent_table.partition(".")[2]}
    ]
    if len(found) != 1:
        names = ", ".join(p.parent_table for p in found or policies)
        raise ConfigError(
            f"table {table!r}: {'names several' if found else 'is none of ours'};"
            f" write one of {names}"
        )
    return found[0]


def _check(policy: Policy, *, force: bool) -> None:
    if policy.retention < timedelta(days=1):
        raise ConfigError(
            f"retention={policy.retention} of {policy.parent_table}: must be at least a"
            " day, or today's rows would go; write 1d or more"
        )
    if not _MIN_PREMAKE <= policy.premake <= _MAX_PREMAKE:
        raise ConfigError(
            f"premake={policy.premake} of {policy.parent_table}: must be from"
            f" {_MIN_PREMAKE} to {_MAX_PREMAKE}; fewer leave no time to mend a failed"
            " upkeep, more make every plan slower"
        )
    floor = receipt_floor()
    if policy.parent_table == _RECEIPTS and policy.retention < floor and not force:
        raise ConfigError(
            f"retention={policy.retention} of {_RECEIPTS}: a message can come back"
            f" for {floor} (delay and retries), and without its receipt it would be"
            f" a dead letter; keep receipts longer, or add --force if your delays and"
            " retries are set shorter"
        )


def _check_interval(interval: str, policy: Policy) -> None:
    if interval not in INTERVALS:
        raise ConfigError(f"interval={interval!r}: use {', '.join(INTERVALS)}")
    if INTERVALS[interval] != policy.span:
        raise ConfigError(
            f"interval={interval} of {policy.parent_table}: its partitions are"
            f" {policy.span} wide, and pg_partman reads the names of a table's"
            " partitions by one format, so widths can't be mixed; keep the interval,"
            " and change retention or premake instead"
        )
