"""Partitions: enough ahead, none missing, none foreign, all from midnight UTC."""

from collections.abc import Iterator
from typing import Final

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity

_MISSING: Final = """
SELECT p.parent_table, count(*), min(p.starts_at), h.ahead, h.has_today
  FROM outbox.upkeep_plan() p JOIN outbox.partition_health h USING (parent_table)
 WHERE p.step = 'make' GROUP BY p.parent_table, h.ahead, h.has_today
"""
_PARTITIONS: Final = """
SELECT p.parent_table, x.partition::text, x.is_default, x.detach_pending, x.starts_at,
       x.starts_at > now() AS ahead, x.owner::regrole::text, c.relowner::regrole::text,
       x.owner <> c.relowner AS is_foreign,
       x.starts_at <> date_trunc(CASE WHEN x.ends_at - x.starts_at < interval '1 day'
                                 THEN 'hour' ELSE 'day' END, x.starts_at, 'UTC')
           AS is_off,
       x.detach_pending AND x.ends_at >= now() - p.retention AS half_detached
  FROM outbox.partition_policy p JOIN pg_class c ON c.oid = p.parent_table::regclass,
       outbox.partitions(p.parent_table) x
 ORDER BY p.parent_table, x.starts_at
"""
_FEW: Final = 3


def check_partitions(
    connection: AdministrationConnection, _names: Names
) -> Iterator[Finding]:
    """Find days without a partition, and partitions that are not as we make them."""
    for table, missing, first, ahead, has_today in connection.execute(_MISSING):
        refused = not has_today or ahead < _FEW
        yield Finding(
            check="partitions",
            severity=Severity.ERROR if refused else Severity.WARNING,
            finding=f"{table} lacks {missing} partitions from {first:%Y-%m-%d} on"
            + ("" if has_today else ", today's among them: rows are refused"),
            remedy=f"SELECT outbox.make_partitions('{table}');",
        )
    for row in connection.execute(_PARTITIONS):
        yield from _judge(*row)


def _judge(
    table: str,
    partition: str,
    is_default: bool,
    _detach_pending: bool,
    starts_at: object,
    ahead: bool,
    owner: str,
    wanted_owner: str,
    is_foreign: bool,
    is_off: bool | None,
    half_detached: bool | None,
) -> Iterator[Finding]:
    if is_default:
        yield _found(
            f"{partition} is a DEFAULT partition: nothing can be detached concurrently,"
            " and a row in it blocks its day",
            f"ALTER TABLE {table} DETACH PARTITION {partition};"  # noqa: S608 - for a person to read
            f" SELECT outbox.make_partitions('{table}');"
            f" INSERT INTO {table} SELECT * FROM {partition}; DROP TABLE {partition};",
        )
    if is_foreign:
        yield _found(
            f"{partition} belongs to {owner}, {table} to {wanted_owner}: the upkeep"
            " can't drop it",
            f"ALTER TABLE {partition} OWNER TO {wanted_owner};",
        )
    if is_off:
        replace = f"DROP TABLE {partition}; SELECT outbox.make_partitions('{table}');"
        yield _found(
            f"{partition} begins at {starts_at}, not at midnight UTC: something else"
            " than outbox.maintain() made it in another time zone",
            replace if ahead else "leave it: it goes with its retention",
        )
    if half_detached:
        yield _found(
            f"{partition} is half detached and not expired: its rows can't be seen",
            f"ALTER TABLE {table} DETACH PARTITION {partition} FINALIZE;"
            " then attach it again: ALTER TABLE … ATTACH PARTITION … FOR VALUES …",
        )


def _found(finding: str, remedy: str) -> Finding:
    return Finding(
        check="partitions", severity=Severity.ERROR, finding=finding, remedy=remedy
    )
