"""The readers of the outbox: who gets which messages, and publishes them where.

The first relay adds the main reader, which gets everything, and a consumer its own.
Further ones are added on purpose, so that a mistyped name neither publishes everything
again nor holds the days of the messages. Topics can be added to a reader, and a reader
that was dropped can return; both get only what commits from then on, except that a
consumer gets a topic that no reader has ever had from the oldest message on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg
from psycopg.rows import class_row, dict_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.size import write_size
from pillarbox.outbox.brokers.options import DIRECT, identity_of
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.log.registration import subscribe_statement
from pillarbox.outbox.observability.measures.reading import limit
from pillarbox.outbox.postgres.sql_files import load

MOST_COUNTED: Final = 10_000
"""Up to how many messages of a reader are counted."""
_MOST_OF_A_DAY: Final = 1_000
_PATIENCE: Final = timedelta(minutes=1)
_MAX_NAME_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of the outbox.

    Attributes:
        broker: where its relays publish, without credentials; None until the first of
            them has recorded it, or if it discards its messages.
        role: which role may run it, besides members of pillarbox_relay, if any.
        topics: topics, and prefixes followed by `*`.
        discards: whether its messages are not to be published.
        dropped_at: when it was dropped; None if it wasn't.
        messages: how many messages it has not settled, up to `MOST_COUNTED`.
        oldest: when the oldest of them was created.
        days: how many days have such messages, and so can't be dropped.
        bytes: the size of these days, with the positions and the log.
    """

    reader: str
    broker: str | None
    role: str | None
    topics: Sequence[str]
    discards: bool
    created_at: datetime
    dropped_at: datetime | None
    messages: int
    oldest: datetime | None
    days: int
    bytes: int

    @property
    def is_consumer(self) -> bool:
        """Whether a consumer reads it, and no relay."""
        return self.broker == DIRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrouted:
    """The messages that no reader gets.

    Attributes:
        is_first: whether there has never been a reader.
        messages: their number; if not `is_complete`, there are more.
        topics: some of their topics.
        more: how many more topics they have.
        oldest: when the oldest one was added.
        days: how many days are kept for them.
        bytes: the size of these days.
    """

    is_first: bool
    messages: int
    is_complete: bool
    topics: Sequence[str]
    more: int
    oldest: datetime
    days: int
    bytes: int


def find_unrouted(
    connection: AdministrationConnection, days: int | None = None
) -> Unrouted | None:
    """Return the messages that no reader gets, if there are any.

    Args:
        days: how many days to search, the newest ones; None: all.
    """
    with connection.cursor(row_factory=dict_row) as cursor:
        statement = load("outbox", "find_unrouted")
        row = cursor.execute(
            statement, {"most": _MOST_OF_A_DAY, "days": days}
        ).fetchone()
    return Unrouted(**row) if row and row["messages"] else None


def list_readers(
    connection: AdministrationConnection, name: str | None = None
) -> list[Reader]:
    """Return the readers, or the one of this name; those dropped come last."""
    with connection.transaction():
        limit(connection, _PATIENCE)
        names = None if name is None else [name]
        return read_readers(connection, names, MOST_COUNTED)


def read_readers(
    connection: AdministrationConnection, names: Sequence[str] | None, most: int
) -> list[Reader]:
    """Return readers, and up to this many messages of each; None: all readers."""
    with connection.cursor(row_factory=class_row(Reader)) as cursor:
        values = {"readers": names, "most": most}
        return cursor.execute(load("outbox", "list_readers"), values).fetchall()


def list_receivers(connection: AdministrationConnection) -> dict[str, str | None]:
    """Return the readers that get messages, and where these are published."""
    return dict(connection.execute(load("outbox", "list_receivers")).fetchall())


def consumer_of(reader: str) -> str:
    """Return the consumer of a reader: each named queue of one has its own reader."""
    return reader.partition("--")[0]


def list_consumers(connection: AdministrationConnection) -> list[str]:
    """Return the names of readers that are consumers, and get messages."""
    return [it for it, broker in list_receivers(connection).items() if broker == DIRECT]


def add_reader(
    connection: AdministrationConnection,
    name: str,
    topics: Sequence[str] | None,
    *,
    broker: str | None = None,
    for_consumer: bool = False,
    discard: bool = False,
    role: str | None = None,
    from_oldest: bool = False,
) -> None:
    """Add a reader, or topics to one that exists.

    Args:
        connection: in autocommit mode.
        topics: topics, or prefixes followed by `*`; None: all, of a new reader.
        broker: the URL where its relays publish; None: as it is.
        for_consumer: whether the consumer of its name reads it, and no relay.
        discard: whether its messages are not published, and don't count as unrouted.
        role: which role may run a new reader, besides members of pillarbox_relay, who
            may run all readers.
        from_oldest: whether it gets the messages that are there, too; by default only
            those whose transactions commit from now on.

    Raises:
        ConfigError: the name, a topic or the broker is invalid, or not that of the
            reader; or it would have to get messages that it has passed.
    """
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise ConfigError(f"reader={name}: must have 1 to {_MAX_NAME_BYTES} bytes")
    for topic in topics or ():
        if not topic or "*" in topic[:-1]:
            raise ConfigError(
                f"topic={topic}: must be a topic, or a prefix followed by a star"
            )
    destination = None if broker is None else identity_of(broker)
    parameters: dict[str, object] = {
        "reader": name,
        "topics": None if topics is None else list(topics),
        "broker": DIRECT if for_consumer else destination,
        "discard": discard,
        "from_oldest": from_oldest,
        "role": role,
    }
    statement = subscribe_statement()
    try:
        ((is_added,),) = connection.execute(statement, parameters)
        if is_added:
            parameters |= {
                "topics": [],
                "broker": None,
                "from_oldest": False,
                "role": None,
            }
            connection.execute(statement, parameters)
    except psycopg.errors.InvalidParameterValue as error:
        raise ConfigError(error.diag.message_primary or str(error)) from error


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
                f"reader={name}: no such reader; pillarbox readers list shows all"
            )
        if known.messages and not discard:
            raise ConfigError(
                f"reader={name}: has a backlog of {count_of(known)}, the oldest from"
                f" {known.oldest:%F %R%z}; wait for its"
                f" {'consumer' if known.is_consumer else 'relays'}, or pass --discard"
            )
        connection.execute(load("outbox", "drop_reader"), {"reader": name})
    return known


def held_by(reader: Reader) -> str:
    """Return the days that a reader keeps from being dropped, and their size."""
    days = f"{reader.days} day{'s' if reader.days != 1 else ''}"
    return f"{days}, {write_size(reader.bytes)}"


def count_of(reader: Reader) -> str:
    """Return how many messages a reader has not settled, in words."""
    if reader.messages >= MOST_COUNTED:
        return f"{MOST_COUNTED} messages or more"
    return f"{reader.messages} message{'s' if reader.messages != 1 else ''}"
