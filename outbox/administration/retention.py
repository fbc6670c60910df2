"""The policy: how long rows stay and how many partitions lie ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection
from outbox.duration import exact_duration
from outbox.errors import ConfigError
from outbox.postgres.sql_files import load

INTERVALS: Final = {
    "hourly": timedelta(hours=1),
    "daily": timedelta(days=1),
    "weekly": timedelta(weeks=1),
}
_MIN_RETENTION: Final = timedelta(days=1)
_MAX_RETENTION: Final = timedelta(days=36500)
_MIN_PREMAKE: Final = 3
_MAX_PREMAKE: Final = 100
_MIN_AHEAD: Final = timedelta(days=1)
_PREMAKE: Final = {"hourly": 48, "daily": 7, "weekly": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the upkeep obeys for one table.

    Attributes:
        span: the width of a partition.
        retention: a partition may go when all of it is older.
        premake: partitions to keep ahead.
        minimum: which the retention may not be below; None: any may be set.
        keep_table: after its detach the table of an expired partition is kept, as an
            ordinary table, instead of being dropped.
        archive: `schema.function`, called before each drop; None for none.
    """

    parent_table: str
    span: timedelta
    retention: timedelta
    premake: int
    minimum: timedelta | None
    keep_table: bool
    archive: str | None


def read_policies(connection: AdministrationConnection) -> list[Policy]:
    """Read the policy of every table."""
    with connection.cursor(row_factory=class_row(Policy)) as cursor:
        return cursor.execute(load("outbox", "list_policies")).fetchall()


def change_policy(
    connection: AdministrationConnection,
    table: str,
    *,
    retention: timedelta | None = None,
    premake: int | None = None,
    interval: str | None = None,
    minimum: timedelta | None = None,
    keep_table: bool | None = None,
    archive: str | None = None,
) -> Policy:
    """Change the policy of a table; the next upkeep obeys.

    Args:
        table: `outbox.message`, or `message` where that names only one.
        interval: hourly, daily or weekly. Partitions ahead that are empty are
            replaced by those of the new width, beginning where the present hour, day
            and week end; the others stay, and go with their retention.
        premake: if it isn't given with another interval, two days of hours, seven
            days or four weeks.
        minimum: the longest time after which a message can still come to its
            consumer, by your delays and retries.
        keep_table: True also ends archiving, for nothing is dropped then.
        archive: a function of yours, as `schema.function`, that takes (schema text,
            table text, starts_at timestamptz, ends_at timestamptz) and is called before
            each drop, in its transaction; if it fails, the table is not dropped. It
            is to be SECURITY DEFINER with a search_path of its own: it runs as its
            owner, who is granted SELECT on that one table. "" ends archiving.

    Raises:
        ConfigError: a value can't be used; nothing was changed.
        psycopg.Error: this role is no member of the tables' owner, or the interval
            can't be changed now; nothing was changed.
    """
    old = _find(table, read_policies(connection))
    span = old.span if interval is None else _span(interval, old.parent_table)
    if premake is None:
        premake = old.premake if span == old.span else _PREMAKE[str(interval)]
    new = replace(
        old,
        span=span,
        retention=old.retention if retention is None else retention,
        premake=premake,
        minimum=old.minimum if minimum is None else minimum,
        keep_table=old.keep_table if keep_table is None else keep_table,
        archive=old.archive if archive is None else archive or None,
    )
    if keep_table:
        new = replace(new, archive=None)
    elif archive:
        new = replace(new, keep_table=False)
    _check(new)
    values = {
        "parent_table": new.parent_table,
        "span": new.span,
        "retention": new.retention,
        "premake": new.premake,
        "minimum": new.minimum,
        "keep_table": new.keep_table,
        "archive": new.archive,
    }
    with connection.transaction():
        if archive:
            _check_archive(connection, new)
        if new.span != old.span:
            connection.execute(load("outbox", "set_interval"), values)
        connection.execute(load("outbox", "set_policy"), values)
    return new


def _check_archive(connection: AdministrationConnection, policy: Policy) -> None:
    asked = {"archive": policy.archive}
    row = connection.execute(load("outbox", "judge_archive"), asked).fetchone()
    if row is not None and row[0] is not None:
        raise ConfigError(
            f"archive={policy.archive!r} of {policy.parent_table}: {row[0]}"
        )


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


def _check(policy: Policy) -> None:
    if policy.retention < _MIN_RETENTION:
        raise ConfigError(
            f"retention={exact_duration(policy.retention)} of {policy.parent_table}:"
            " must be at least a day, or today's rows would go; write 1d or more"
        )
    for name, value in (("retention", policy.retention), ("minimum", policy.minimum)):
        if value is not None and value > _MAX_RETENTION:
            raise ConfigError(
                f"{name}={value.days} days of {policy.parent_table}: must be at most"
                f" {_MAX_RETENTION.days} days, a hundred years, or no moment of the"
                f" database's lies so far back; write {_MAX_RETENTION.days}d or less"
            )
    if not _MIN_PREMAKE <= policy.premake <= _MAX_PREMAKE:
        raise ConfigError(
            f"premake={policy.premake} of {policy.parent_table}: must be from"
            f" {_MIN_PREMAKE} to {_MAX_PREMAKE}; fewer leave no time to mend a failed"
            " upkeep, more make every plan slower"
        )
    if policy.premake * policy.span < _MIN_AHEAD:
        raise ConfigError(
            f"premake={policy.premake} of {policy.parent_table}: {policy.premake} of"
            f" {exact_duration(policy.span)} reach less than a day ahead, which leaves"
            " no time to repair a failed upkeep; use at least"
            f" {_MIN_AHEAD // policy.span}"
        )
    if policy.minimum is not None and policy.retention < policy.minimum:
        raise ConfigError(
            f"retention={exact_duration(policy.retention)} of {policy.parent_table}:"
            f" a message can come back for {exact_duration(policy.minimum)} (delay and"
            " retries), and without its day there it would be a dead letter; keep it"
            " longer, or add --minimum if your delays and retries are set shorter"
        )


def _span(interval: str, table: str) -> timedelta:
    if interval not in INTERVALS:
        raise ConfigError(
            f"interval={interval!r} of {table}: use {', '.join(INTERVALS)}; hours, days"
            " and weeks nest, so that one can follow another without a gap"
        )
    return INTERVALS[interval]
