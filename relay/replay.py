"""Publish messages again that were published."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection
from outbox.errors import ConfigError
from outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which of the published messages are meant; None stands for anything.

    Attributes:
        since: added then or later; with `until` it bounds the days that are read.
        until: added before.
        topic: a topic, or the beginning of topics followed by `*`.
        max_rows: so many of them, the oldest first.
    """

    since: datetime
    until: datetime
    topic: str | None = None
    key: str | None = None
    tenant: str | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be found."""
        for name, moment in (("since", self.since), ("until", self.until)):
            if moment.tzinfo is None:
                raise ConfigError(
                    f"{name}={moment}: name its time zone, e.g. {moment}Z"
                )
        if self.since >= self.until:
            raise ConfigError(f"since={self.since}: must be before until={self.until}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ConfigError(f"max_rows={self.max_rows}: must be at least 1")

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the statements that count and find."""
        many = self.topic is not None and self.topic.endswith("*")
        return {
            "since": self.since,
            "until": self.until,
            "topic": None if many else self.topic,
            "topic_prefix": self.topic[:-1] if many and self.topic else None,
            "key": self.key,
            "tenant": self.tenant,
            "max_rows": self.max_rows,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How many messages of a topic were published, and when they were added."""

    topic: str
    messages: int
    oldest: datetime
    newest: datetime


def count_published(
    connection: AdministrationConnection, choice: Choice
) -> list[Published]:
    """Count what is meant, by topic; `max_rows` doesn't matter here."""
    with connection.cursor(row_factory=class_row(Published)) as cursor:
        return cursor.execute(
            load("relay", "count_published"), choice.parameters()
        ).fetchall()


def replay_published(
    connection: AdministrationConnection,
    choice: Choice,
    *,
    batch_size: int = 1000,
    max_per_second: float | None = None,
    on_batch: Callable[[int], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Make messages ready once more, with the ids that they have; give how many.

    Each batch is a transaction of its own and visible before the next one, in the
    order in which the messages were added: so a relay that is at work meanwhile
    keeps the order of each key.

    Args:
        connection: in autocommit mode.
        on_batch: is told how many have been made ready so far.
    """
    replayed = 0
    started = time.monotonic()
    for batch in _batches(connection, choice, batch_size):
        moments = [created_at for _, created_at in batch]
        replayed += connection.execute(
            load("relay", "replay_published"),
            {
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
    connection: AdministrationConnection, choice: Choice, size: int
) -> Iterator[Sequence[tuple[UUID, datetime]]]:
    # Held by the server beyond its transaction: neither does our memory grow with the
    # number of messages, nor does a snapshot keep dead rows from being cleaned up.
    with connection.cursor("pillarbox_replay", withhold=True) as cursor:
        cursor.execute(load("relay", "find_published"), choice.parameters())
        while batch := cursor.fetchmany(size):
            yield batch
