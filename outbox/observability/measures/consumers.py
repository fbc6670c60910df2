"""The consumers: their deliveries, their rates, and how many are running."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outbox.administration.checks.locks import read_consumers as list_subscribers
from outbox.administration.readers import list_consumers as list_readers
from outbox.observability.measures.backlog import (
    Backlog,
    Rate,
    Tally,
    read_lags,
)
from outbox.observability.measures.processes import Process
from outbox.observability.measures.reading import Reading
from outbox.postgres.advisory_lock import Lock, consumer_class, reader_class
from outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """A consumer that has subscribed, has recently handled messages, or is running.

    Attributes:
        is_subscribed: whether it has subscribed to topics of the postgres broker, or
            reads the outbox. Only for these does the database show what waits.
        is_reader: whether it reads the outbox.
        replicas: how many are running; None if it runs in no process of its own, or
            records itself in another database. A consumer that is subscribed, and
            each named queue of one, holds a lock in this database while it runs.
        lag: its deliveries that are not acked; None if it uses another broker.
        rate: how fast it handled the messages that were added within the window.
    """

    name: str
    is_subscribed: bool
    is_reader: bool = False
    replicas: int | None
    lag: Backlog | None
    rate: Rate | None


_UNSIGNED: Final = 0xFFFFFFFF
"""pg_locks shows a lock's class as an unsigned number."""


def read_consumers(
    reading: Reading, running: Sequence[Process] | None
) -> tuple[ConsumerStatus, ...]:
    """Read what waits for consumers, and how fast they handle it.

    Args:
        running: the consumers that run; None if that is unknown.
    """
    readers = list_readers(reading.connection)
    subscribers = list_subscribers(reading.connection)
    subscribed = {*subscribers, *readers}
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
    # Planning the count takes a fifth of a new session's total time.
    lags = _read_lags(reading) if subscribers else {}
    if readers:
        lags |= read_lags(reading, readers)
    names = {*subscribed, *lags}
    recorded = Counter(it.name for it in running or ())
    classes = {n: (reader_class if n in readers else consumer_class)(n) for n in names}
    replicas = recorded | _count_members(reading, classes)
    return tuple(
        ConsumerStatus(
            name=name,
            is_subscribed=is_subscribed,
            is_reader=name in readers,
            replicas=replicas[name] if is_subscribed or name in recorded else None,
            lag=lags.get(name, Backlog()) if is_subscribed else None,
            rate=rates.get(name),
        )
        for name in sorted({*subscribed, *rates, *lags, *replicas})
        for is_subscribed in [name in subscribed or name in lags]
    )


def _count_members(reading: Reading, classes: Mapping[str, int]) -> Counter[str]:
    rows = reading.rows(load("outbox", "count_members"), member=int(Lock.MEMBER))
    members = {row["class"]: row["members"] for row in rows}
    return Counter({n: members.get(it & _UNSIGNED, 0) for n, it in classes.items()})


def _read_lags(reading: Reading) -> dict[str, Backlog]:
    tallies: dict[str, Tally] = defaultdict(lambda: Tally("topic"))
    most = reading.scope.per_lane
    for row in reading.rows(load("outbox", "count_deliveries"), most=most):
        tallies[row.pop("consumer")].add(row)
    lags = {consumer: tally.sum(reading.at) for consumer, tally in tallies.items()}
    return {
        consumer: replace(it, estimated=it.messages if it.is_complete else None)
        for consumer, it in lags.items()
    }
