"""The readers of the outbox: who gets which messages, and publishes them where.

The main reader exists from the beginning and gets everything. Further ones are added on
purpose, so that a mistyped name neither publishes everything again nor holds the days
of the messages. A reader's topics never change, and its name is never used again:
positions with its name are kept with the messages.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection
from outbox.brokers.options import identity_of
from outbox.brokers.postgres import DIRECT
from outbox.errors import ConfigError
from outbox.observability.measures.reading import limit
from outbox.postgres.sql_files import load

MOST_COUNTED: Final = 10_000
"""Up to how many messages of a reader are counted."""
_PATIENCE: Final = timedelta(minutes=1)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of the outbox.

    Attributes:
        broker: where its relays publish, without credentials; None until the first of
            them has recorded it, or if it discards its messages.
        topics: topics, and prefixes followed by `*`.
        discards: whether its messages are not to be published.
        dropped_at: when it was dropped; None if it wasn't.
        messages: how many messages it has not settled, up to `MOST_COUNTED`.
        oldest: when the oldest of them was created, whose day is kept for it.
    """

    reader: str
    broker: str | None
    topics: Sequence[str]
    discards: bool
    created_at: datetime
    dropped_at: datetime | None
    messages: int
    oldest: datetime | None

    @property
    def is_consumer(self) -> bool:
        """Whether a consumer reads it, and no relay."""
        return self.broker == DIRECT

    @property
    def settled_as(self) -> str:
        """What becomes of its messages, as in outbox.message_status."""
        return "handled" if self.is_consumer else "published"


def list_readers(
    connection: AdministrationConnection, name: str | None = None
) -> list[Reader]:
    """Return the readers, or the one of this name; those dropped come last."""
    with (
        connection.transaction(),
        connection.cursor(row_factory=class_row(Reader)) as cursor,
    ):
        limit(connection, _PATIENCE)
        return cursor.execute(
            load("outbox", "list_readers"), {"reader": name, "most": MOST_COUNTED}
        ).fetchall()


def add_reader(
    connection: AdministrationConnection,
    name: str,
    topics: Sequence[str],
    *,
    broker: str | None,
    from_oldest: bool = False,
) -> None:
    """Add a reader.

    Args:
        connection: in autocommit mode.
        topics: topics, or prefixes followed by `*`.
        broker: the URL where its relays publish; None: its messages are not published,
            and don't count as unrouted.
        from_oldest: whether it gets the messages that are there, too; by default only
            those whose transactions commit from now on.

    Raises:
        ConfigError: the name, a topic or the broker is invalid, or the name was used
            before.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"reader={name}: must have 1 to 63 characters of a to z, 0 to 9, _, . and"
            " -, and begin with a letter or a digit"
        )
    for topic in topics:
        if not topic or "*" in topic[:-1]:
            raise ConfigError(
                f"topic={topic}: must be a topic, or a prefix followed by a star"
            )
    with connection.transaction():
        added = connection.execute(
            load("outbox", "add_reader"),
            {"reader": name, "broker": None if broker is None else identity_of(broker)},
        ).fetchone()
        if added is None:
            (known,) = list_readers(connection, name)
            raise ConfigError(
                f"reader={name}: exists; pillarbox readers list shows it"
                if known.dropped_at is None
                else f"reader={name}: was dropped at {known.dropped_at:%F %R%z}; choose"
                " another name"
            )
        connection.execute(
            load("outbox", "add_topics"),
            {
                "reader": name,
                "topics": list(dict.fromkeys(topics)),
                "discard": broker is None,
                "from_oldest": from_oldest,
            },
        )


def drop_reader(
    connection: AdministrationConnection, name: str, *, discard: bool = False
) -> Reader:
    """Drop a reader: its relays stop, and its messages hold no days.

    Args:
        connection: in autocommit mode.
        discard: whether to drop it although it has messages to publish.

    Returns:
        The reader as it was.

    Raises:
        ConfigError: there is no such reader, or it has messages to publish.
    """
    with connection.transaction():
        known = next(iter(list_readers(connection, name)), None)
        if known is None or known.dropped_at is not None:
            raise ConfigError(
                f"reader={name}: there is no such reader; see pillarbox readers list"
            )
        if known.messages and not discard:
            raise ConfigError(
                f"reader={name}: has not {known.settled_as} {count_of(known)}, the"
                f" oldest of {known.oldest:%F %R%z}; wait for its"
                f" {'consumer' if known.is_consumer else 'relays'}, or give --discard"
            )
        connection.execute(load("outbox", "drop_reader"), {"reader": name})
    return known


def count_of(reader: Reader) -> str:
    """Return how many messages a reader has not settled, in words."""
    if reader.messages >= MOST_COUNTED:
        return f"{MOST_COUNTED} messages or more"
    return f"{reader.messages} message{'s' if reader.messages != 1 else ''}"
