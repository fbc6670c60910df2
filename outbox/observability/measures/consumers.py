"""The consumers: what waits for them, their rates, and how many are running."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg

from pillarbox.outbox.administration.readers import list_consumers, read_readers
from pillarbox.outbox.observability.measures.backlog import Backlog, Rate, read_lags
from pillarbox.outbox.observability.measures.processes import Process
from pillarbox.outbox.observability.measures.reading import Reading
from pillarbox.outbox.postgres.advisory_lock import Lock, reader_class
from pillarbox.outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The days that are kept for a consumer, with the positions and the log.

    Attributes:
        since: when the oldest of its messages was created.
    """

    days: int
    bytes: int
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """A consumer that reads the outbox, has recently handled messages, or is running.

    Attributes:
        is_reader: whether it reads the outbox of this database. Only for these does
            the database show what waits.
        replicas: how many are running; None if it runs in no process of its own, or
            records itself in another database. A consumer that reads the outbox, and
            each named queue of one, holds a lock in this database while it runs.
        lag: its messages that are not settled; None if it uses another broker.
        held: what is kept for it, if it isn't running and messages have waited for more
            than a day; None also if finding this out took too long.
        rate: how fast it handled the messages that were added within the window.
    """

    name: str
    is_reader: bool
    replicas: int | None
    lag: Backlog | None
    held: Held | None
    rate: Rate | None


_LONG: Final = timedelta(days=1)
_UNSIGNED: Final = 0xFFFFFFFF
"""pg_locks shows a lock's class as an unsigned number."""


def read_consumers(
    reading: Reading, running: Sequence[Process] | None
) -> tuple[ConsumerStatus, ...]:
    """Read what waits for consumers, and how fast they handle it.

    Args:
        running: the consumers that run; None if that is unknown.
    """
    readers = list_consumers(reading.connection)
    rates = {
        row["consumer"]: Rate(
            window=reading.scope.window,
            per_second=row["handled"],
            dead_lettered=None,
            median=row["median"],
            slow=row["slow"],
        )
        for row in reading.rows(
            load("outbox", "measure_handling"),
            since=reading.at - reading.scope.window,
            until=reading.at,
            most=reading.scope.rows,
        )
    }
    lags = read_lags(reading, readers) if readers else {}
    recorded = Counter(it.name for it in running or ())
    replicas = recorded | _count_members(reading, readers)
    behind = [
        name
        for name, lag in lags.items()
        if not replicas[name] and lag.waited is not None and lag.waited > _LONG
    ]
    # All days are opened, which takes longer than counting in recent ones.
    held = _read_held(reading, behind) if behind else {}
    return tuple(
        ConsumerStatus(
            name=name,
            is_reader=is_reader,
            replicas=replicas[name] if is_reader or name in recorded else None,
            lag=lags.get(name, Backlog()) if is_reader else None,
            held=held.get(name) if is_reader else None,
            rate=rates.get(name),
        )
        for name in sorted({*readers, *rates, *replicas})
        for is_reader in [name in readers]
    )


def _count_members(reading: Reading, readers: Sequence[str]) -> Counter[str]:
    rows = reading.rows(load("outbox", "count_members"), member=int(Lock.MEMBER))
    members = {row["class"]: row["members"] for row in rows}
    return Counter({it: members.get(reader_class(it) & _UNSIGNED, 0) for it in readers})


def _read_held(reading: Reading, consumers: Sequence[str]) -> dict[str, Held]:
    connection = reading.connection
    # The rest is known, if there are too many messages of others.
    with suppress(psycopg.errors.QueryCanceled), connection.transaction():
        return {
            it.reader: Held(days=it.days, bytes=it.bytes, since=it.oldest)
            for it in read_readers(connection, consumers, 1)
            if it.oldest is not None
        }
    return {}
