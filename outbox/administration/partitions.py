"""Show the partitions, and what holds those past their retention."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from psycopg.rows import dict_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.retention import Policy, read_policies
from pillarbox.outbox.administration.size import write_size
from pillarbox.outbox.administration.upkeep import UpkeepStep, plan_upkeep
from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.postgres.sql_files import load

SIGNS: Final = {
    "past": "·",
    "held": "!",
    "detached": "~",
    "kept": "k",
    "today": "#",
    "ahead": "o",
    "default": "D",
}


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


def draw_timeline(policy: Policy, partitions: list[Partition]) -> Iterator[str]:
    """Draw the partitions of one table as lines of text.

    The first line has one character per partition. Each partition then gets a line,
    except that the future ones share one.
    """
    moment = "%Y-%m-%d %H:%M" if policy.span < timedelta(days=1) else "%Y-%m-%d"
    yield (
        f"{policy.parent_table}: kept {exact_duration(policy.retention)},"
        f" {policy.premake} ahead"
    )
    yield f"  {''.join(SIGNS[p.place] for p in partitions)}"
    for p in partitions:
        if p.place != "ahead":
            rows = "? rows" if p.rows is None else f"~{p.rows:,} rows"
            begin = _at(p.starts_at, moment)
            line = f"  {begin}  {p.place:<8} {rows:>16} {write_size(p.bytes):>9}"
            if p.query is not None:
                many = "at least " if p.unsettled == 1000 else ""
                line += f"  {many}{p.unsettled} unsettled: {p.query}"
            yield line
            if p.reason is not None:
                yield f"    {p.reason}"
    if ahead := [p for p in partitions if p.place == "ahead"]:
        size = write_size(sum(p.bytes for p in ahead))
        begin, end = (_at(at, moment) for at in (ahead[0].starts_at, ahead[-1].ends_at))
        number = count(len(ahead), "partition")
        yield f"  {begin}  ahead    {number:>16} {size:>9}  up to {end}"


def legend() -> str:
    """Explain the characters of the timeline."""
    return ", ".join(f"{sign} {place}" for place, sign in SIGNS.items())


def _at(moment: datetime | None, form: str) -> str:
    if moment is None:
        return f"{'DEFAULT':<{len(datetime.now(UTC).strftime(form))}}"
    return moment.strftime(form)
