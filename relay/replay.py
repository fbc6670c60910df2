"""Publishes messages again that have already been published."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.readers import list_consumers
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.advisory_lock import MAIN
from pillarbox.outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCriteria:
    """Which published messages to replay; None means any.

    Attributes:
        since: added then or later; with `until`, it limits which partitions are read.
        until: added before.
        topic: a topic, or a prefix followed by `*`.
        max_rows: the maximum number of messages, oldest first.
        reader: by which reader.
    """

    since: datetime
    until: datetime
    topic: str | None = None
    key: str | None = None
    tenant: str | None = None
    max_rows: int | None = None
    reader: str = MAIN

    def __post_init__(self) -> None:
        """Check the values."""
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment.tzinfo is None:
                raise ConfigError(
                    f"{name}={moment}: has no time zone; write e.g. {moment}Z"
                )
        if self.since >= self.until:
            raise ConfigError(f"since={self.since}: must be before until={self.until}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ConfigError(f"max_rows={self.max_rows}: must be at least 1")

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of `count_published.sql` and `find_published.sql`."""
        many = self.topic is not None and self.topic.endswith("*")
        return {
            "since": self.since,
            "until": self.until,
            "topic": None if many else self.topic,
            "topic_prefix": self.topic[:-1] if many and self.topic else None,
            "key": self.key,
            "tenant": self.tenant,
            "max_rows": self.max_rows,
            "reader": self.reader,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How many messages of a topic were published, and when they were added."""

    topic: str
    messages: int
    oldest: datetime
    newest: datetime


def count_published(
    connection: AdministrationConnection, choice: ReplayCriteria
) -> list[Published]:
    """Count the matching messages by topic; `max_rows` is ignored."""
    with connection.cursor(row_factory=class_row(Published)) as cursor:
        return cursor.execute(
            load("relay", "count_published"), choice.parameters()
        ).fetchall()


def count_receipts(
    connection: AdministrationConnection, choice: ReplayCriteria
) -> int | None:
    """Count the matching messages for which a consumer has receipts in this database.

    Returns None if relays publish the reader's messages.

    Raises:
        ConfigError: the role can't read receipts.
    """
    if choice.reader not in list_consumers(connection):
        return None
    statement, receipts = load("relay", "count_receipts"), 0
    try:
        for batch in _batches(connection, choice, 1000):
            values = {"ids": [id for id, _ in batch], "consumer": choice.reader}
            ((counted,),) = connection.execute(statement, values)
            receipts += counted
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"reader={choice.reader}: this role can't count the consumer's receipts:"
            " GRANT pillarbox_consumer TO it"
        ) from error
    return receipts


def replay_published(
    connection: AdministrationConnection,
    choice: ReplayCriteria,
    *,
    batch_size: int = 1000,
    max_per_second: float | None = None,
    on_batch: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Make messages ready again, with the same ids; return how many.

    Each batch is a separate transaction that commits before the next one begins, in the
    order in which the messages were added, so a relay that runs in the meantime keeps
    the order of each key.

    Args:
        connection: in autocommit mode.
        on_batch: called with the number of messages made ready so far.
    """
    replayed = 0
    started = time.monotonic()
    for batch in _batches(connection, choice, batch_size):
        moments = [created_at for _, created_at in batch]
        replayed += connection.execute(
            load("relay", "replay_published"),
            {
                "reader": choice.reader,
                "ids": [id for id, _ in batch],
                "first": min(moments),
                "last": max(moments),
            },
        ).rowcount
        on_batch(replayed)
        if max_per_second is not None:
            sleep(max(0.0, started + replayed / max_per_second - time.monotonic()))
    return replayed


def _batches(
    connection: AdministrationConnection, choice: ReplayCriteria, size: int
) -> Iterator[Sequence[tuple[UUID, datetime]]]:
    # With a holdable cursor, memory doesn't grow with the number of messages, and no
    # snapshot stays open that would keep vacuum from removing dead rows.
    with connection.cursor("pillarbox_replay", withhold=True) as cursor:
        cursor.execute(load("relay", "find_published"), choice.parameters())
        while batch := cursor.fetchmany(size):
            yield batch
