"""What a relay's reader is: its topics, where it began, and its one broker.

The relays of a reader share its messages, and publish them to one broker: the one that
the first of them recorded. Otherwise, relays with different brokers would share the
lanes, and each broker would get some of the messages. A relay with another broker than
the recorded one holds no lanes; if the recorded one is switched, it takes lanes, and
the others return theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from psycopg.errors import InsufficientPrivilege

from outbox.brokers.options import identity_of
from outbox.errors import ConfigError
from outbox.events import Event
from outbox.log.position import Position, Snapshot
from outbox.logs.printable import for_shell
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from relay.events import BrokerDiffers, BrokerMatches, ReaderDropped
from relay.publisher import Handling, Identifiable, Publisher

ORIGIN: Final = "relay:"
"""The origin of a dead letter is this, followed by the name of the reader."""
_SWITCH: Final = (
    "correct the broker's URL; or, if all messages are to go to this one from now on, "
    "run pillarbox relay --switch-broker once with its URL"
)


class Topics(NamedTuple):
    """The topics that a reader gets: names, and prefixes followed by `*`."""

    patterns: Sequence[str]

    @property
    def parameters(self) -> dict[str, list[str] | None]:
        """What the claim takes: `topics` and `prefixes`; null if it gets all."""
        if "*" in self.patterns:
            return {"topics": None, "prefixes": None}
        return {
            "topics": [topic for topic in self.patterns if not topic.endswith("*")],
            "prefixes": [topic[:-1] for topic in self.patterns if topic.endswith("*")],
        }


ALL: Final = Topics(["*"])


class ReaderRecord(NamedTuple):
    """The row of a reader.

    Attributes:
        broker: where its relays publish; None until the first has recorded it.
        topics: None if the reader was dropped.
        since: its position before it has stored any.
        refusal: why the role of this session may not run the reader; None if it may.
    """

    broker: str | None
    topics: Topics | None
    since: Position
    refusal: str | None

    def gets(self, topic: str) -> bool:
        """Whether it gets a topic, or all topics with a prefix followed by `*`."""
        return any(
            topic == known or (known.endswith("*") and topic.startswith(known[:-1]))
            for known in (() if self.topics is None else self.topics.patterns)
        )


class RelayReader:
    """The reader of one relay, compared with what the database has recorded.

    Args:
        name: the name of the reader.
        broker: the relay's broker, as a URL or any other name; by default the
            publisher's own identity, or the name of its class.

    Attributes:
        own: the relay's broker, without credentials.
    """

    def __init__(
        self,
        name: str,
        broker: str | None,
        publisher: Publisher | Handling,
        notify: Callable[[Event], None] = lambda _: None,
    ) -> None:
        if broker is None and isinstance(publisher, Identifiable):
            broker = publisher.identity
        elif broker is not None and "://" in broker:
            broker = identity_of(broker)
        self.name = name
        self.own = broker or type(publisher).__qualname__
        self._notify = notify
        self._problem: Event | None = None

    async def read(self, connection: Connection) -> ReaderRecord:
        """Return the row.

        Raises:
            ConfigError: there is no such reader, it was dropped, or the role may not
                run it.
        """
        record = await read_record(connection, self.name)
        if record is None:
            raise ConfigError(
                f"reader={self.name}: the outbox has no such reader; pillarbox readers"
                " list shows them, and pillarbox readers add "
                f"{for_shell(self.name)} adds one"
            )
        if record.topics is None:
            raise ConfigError(
                f"reader={self.name}: was dropped; add one with another name"
            )
        if record.refusal is not None:
            raise ConfigError(record.refusal)
        return record

    async def may_publish(
        self, connection: Connection, *, switch: bool = False
    ) -> bool:
        """Return whether the broker is the recorded one; report when that changes.

        Records it if none is recorded, or to `switch` to it.

        Raises:
            psycopg.errors.InsufficientPrivilege: the role may not run the reader.
        """
        record = await read_record(connection, self.name)
        if record is not None and record.refusal is not None:
            raise InsufficientPrivilege(record.refusal)
        problem: Event | None = None
        if record is None or record.topics is None:
            problem = ReaderDropped(reader=self.name)
        else:
            if record.broker is None or (switch and record.broker != self.own):
                await connection.execute(
                    load("relay", "record_broker"),
                    {"reader": self.name, "broker": self.own, "switch": switch},
                )
                record = await self.read(connection)
            if record.broker != self.own:
                problem = BrokerDiffers(
                    broker=self.own, recorded=record.broker or "", remedy=_SWITCH
                )
        if problem != self._problem:
            self._problem = problem
            self._notify(problem or BrokerMatches(broker=self.own))
        return problem is None

    async def require(self, connection: Connection) -> None:
        """Record the broker if none is recorded.

        Raises:
            ConfigError: another one is recorded.
        """
        if not await self.may_publish(connection):
            record = await self.read(connection)
            raise ConfigError(
                f"broker {self.own}: the relays of reader {self.name} publish to "
                f"{record.broker}; {_SWITCH}"
            )


async def read_record(connection: Connection, name: str) -> ReaderRecord | None:
    """Return the row of a reader, or None if there is no such reader."""
    cursor = await connection.execute(load("relay", "read_reader"), {"reader": name})
    row: Any = await cursor.fetchone()
    if row is None:
        return None
    broker, topics, since_seq, since, refusal = row
    return ReaderRecord(
        broker,
        None if topics is None else Topics(topics),
        Position(since_seq, Snapshot.parse(since)),
        refusal,
    )
