"""The partitions of each table, and what keeps old ones."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from pillarbox.outbox.administration.upkeep import UpkeepStep, plan_upkeep
from pillarbox.outbox.observability.measures.reading import Reading
from pillarbox.outbox.postgres.sql_files import load

_HELD: Final = ("hold", "attach")
_EXPIRED: Final = ("hold", "refuse", "detach", "finalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The partitions of a table.

    Attributes:
        follows: the table whose partitions it follows; None if it has its own.
        oldest: when the first partition begins; None if there is none.
        ahead: how many partitions have not begun yet.
        has_today: whether current rows have a partition; if not, they are rejected.
        gaps: how many partitions are missing between future ones.
        held: the upkeep's steps for partitions that unsettled rows hold, oldest first.
        expired: how many partitions are past their retention, for any reason.
    """

    table: str
    follows: str | None
    span: timedelta
    retention: timedelta
    premake: int
    partitions: int
    oldest: datetime | None
    ahead: int
    has_today: bool
    gaps: int
    expired: int
    held: tuple[UpkeepStep, ...]

    @property
    def days_ahead(self) -> float:
        """How many days the partitions after the current one cover."""
        return self.ahead * self.span / timedelta(days=1)


def read_tables(reading: Reading) -> tuple[Table, ...]:
    """Read how many partitions each table has, has ahead, and can't drop."""
    late: dict[str, list[UpkeepStep]] = defaultdict(list)
    for step in plan_upkeep(reading.connection):
        late[step.parent_table].append(step)
    return tuple(
        Table(
            table=table,
            expired=sum(it.step in _EXPIRED for it in late[table]),
            held=tuple(
                it for it in late[table] if it.step in _HELD and it.unsettled != 0
            ),
            **row,
        )
        for row in reading.rows(load("outbox", "read_partition_health"))
        for table in [row.pop("parent_table")]
    )
