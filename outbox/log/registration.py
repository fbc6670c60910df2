"""A reader of the outbox: its topics, where it began, and its one broker.

The processes of a reader share its messages: relays, which publish them to one broker,
or the replicas of a consumer. A process whose broker isn't the recorded one holds no
lanes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, LiteralString, NamedTuple

import psycopg

from pillarbox.outbox.brokers.options import DIRECT
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.events import BrokerDiffers, BrokerMatches, ReaderDropped
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.logs.printable import for_shell
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.sql_files import load

SWITCH: Final = (
    "correct the broker's URL, or switch the reader to it: run pillarbox relay"
    " --switch-broker once with this URL"
)


class ReaderRecord(NamedTuple):
    """The row of a reader.

    Attributes:
        broker: where its relays publish; None until the first has recorded it.
        topics: topics, and prefixes followed by `*`; None if the reader was dropped.
        since: its position before it has stored any.
        gets_all: whether it has got every topic since then.
        refusal: why the role of this session may not run the reader; None if it may.
    """

    broker: str | None
    topics: Sequence[str] | None
    since: Position
    gets_all: bool
    refusal: str | None


class Registration:
    """The reader of one process, compared with what the database has recorded.

    Args:
        name: the name of the reader.
        own: where the process publishes, without credentials, or `DIRECT`.
        topics: topics that the reader gets from now on, if it doesn't already; it is
            added if it doesn't exist.

    Attributes:
        on_topics: called when the reader has other topics than before.
    """

    def __init__(
        self,
        name: str,
        own: str,
        notify: Callable[[Event], None] = lambda _: None,
        *,
        topics: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.own = own
        self.on_topics: Callable[[], None] = lambda: None
        self.notify = notify
        self._wanted = topics
        self._problem: Event | None = None
        self._topics: Sequence[str] | None = None

    async def prepare(self, connection: Connection) -> None:
        """Let the reader get its topics.

        It gets them from now on; a consumer gets a topic that no reader has ever had
        from the oldest message on.

        Args:
            connection: in autocommit mode.

        Raises:
            ConfigError: as `read` does.
        """
        if self._wanted:
            record = await read_record(connection, self.name)
            if record is not None:
                self._refuse_other_kind(record)
            by_rule = None if self.own == DIRECT else False
            await self.add(connection, self._wanted, from_oldest=by_rule)
        await self.read(connection)

    async def read(self, connection: Connection) -> ReaderRecord:
        """Return the row.

        Raises:
            ConfigError: there is no such reader, it was dropped, the role may not run
                it, or it is a consumer's and this is a relay, or the reverse.
        """
        record = await read_record(connection, self.name)
        if record is None:
            raise ConfigError(
                f"reader={self.name}: no such reader; pillarbox readers list shows"
                f" all, and pillarbox readers add {for_shell(self.name)} adds it"
            )
        if record.topics is None:
            raise ConfigError(
                f"reader={self.name}: was dropped; pillarbox readers add"
                f" {for_shell(self.name)} --broker URL restores it for new messages"
            )
        self._refuse_other_kind(record)
        if record.refusal is not None:
            raise ConfigError(record.refusal)
        return record

    async def add(
        self, connection: Connection, topics: Sequence[str], *, from_oldest: bool | None
    ) -> None:
        """Let the reader get these topics, from where it is said; None: see `prepare`.

        Raises:
            ConfigError: the role may not do that, or the reader discards its messages.
        """
        parameters = {
            "reader": self.name,
            "topics": list(topics),
            "broker": self.own,
            "discard": False,
            "from_oldest": from_oldest,
            "role": None,
        }
        statement = subscribe_statement()
        try:
            cursor = await connection.execute(statement, parameters)
            ((is_added,),) = await cursor.fetchall()
            if is_added:
                begin = parameters | {
                    "topics": [],
                    "broker": None,
                    "from_oldest": False,
                }
                await connection.execute(statement, begin)
        except psycopg.errors.InvalidParameterValue as error:
            raise ConfigError(error.diag.message_primary or str(error)) from error

    def _refuse_other_kind(self, record: ReaderRecord) -> None:
        if self.own == DIRECT != record.broker:
            raise ConfigError(
                f"reader={self.name}: already used by relays, which publish to"
                f" {record.broker or 'a broker'}; give the consumer another name"
            )
        if record.broker == DIRECT != self.own:
            raise ConfigError(
                f"reader={self.name}: already used by the consumer of this name; add"
                " another for relays: pillarbox readers add NAME --broker URL"
            )

    async def may_read(self, connection: Connection) -> bool:
        """Return whether the broker is the recorded one; report when that changes.

        Raises:
            psycopg.errors.InsufficientPrivilege: the role may not run the reader.
        """
        record = await self.current(connection)
        problem: Event | None = None
        if record is None or record.topics is None:
            problem = ReaderDropped(reader=self.name)
        elif record.broker != self.own:
            problem = BrokerDiffers(
                broker=self.own, recorded=record.broker or "", remedy=SWITCH
            )
        topics = None if record is None else record.topics
        if self._topics not in (None, topics):
            self.on_topics()
        self._topics = topics
        if problem != self._problem:
            self._problem = problem
            self.notify(problem or BrokerMatches(broker=self.own))
        return problem is None

    async def current(self, connection: Connection) -> ReaderRecord | None:
        """Return the row, if there is one.

        Raises:
            psycopg.errors.InsufficientPrivilege: the role may not run the reader.
        """
        record = await read_record(connection, self.name)
        if record is not None and record.refusal is not None:
            raise psycopg.errors.InsufficientPrivilege(record.refusal)
        return record


def subscribe_statement() -> LiteralString:
    """Return the statement that lets a reader get topics."""
    return load("outbox", "subscribe")


async def read_record(connection: Connection, name: str) -> ReaderRecord | None:
    """Return the row of a reader, or None if there is no such reader."""
    cursor = await connection.execute(
        load("outbox.log", "read_reader"), {"reader": name}
    )
    row: Any = await cursor.fetchone()
    if row is None:
        return None
    broker, topics, since_seq, since, gets_all, refusal = row
    since = Position(since_seq, Snapshot.parse(since))
    return ReaderRecord(broker, topics, since, gets_all, refusal)
