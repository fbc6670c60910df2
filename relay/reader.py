"""What a relay's reader is: its topics, where it began, and its one broker.

The relays of a reader share its messages, and publish them to one broker: the one that
the first of them recorded. Otherwise, relays with different brokers would share the
lanes, and each broker would get some of the messages. A relay with another broker than
the recorded one holds no lanes; if the recorded one is switched, it takes lanes, and
the others return theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import psycopg

from outbox.brokers.options import DIRECT, identity_of
from outbox.errors import ConfigError
from outbox.events import Event
from outbox.log.position import Position, Snapshot
from outbox.logs.printable import for_shell
from outbox.postgres.advisory_lock import MAIN
from outbox.postgres.connection import Connection
from outbox.postgres.identity import identify_outbox
from outbox.postgres.sql_files import load
from relay.events import BrokerDiffers, BrokerMatches, ReaderAdded, ReaderDropped
from relay.publisher import Appending, Handling, Identifiable, Publisher

ORIGIN: Final = "relay:"
"""The origin of a dead letter is this, followed by the name of the reader."""
_MOST_COUNTED: Final = 10_000
"""Up to how many messages are counted that the new reader `main` gets."""
_SWITCH: Final = (
    "correct the broker's URL; or, if all messages are to go to this one from now on, "
    "run pillarbox relay --switch-broker once with its URL"
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


class RelayReader:
    """The reader of one relay, compared with what the database has recorded.

    Args:
        name: the name of the reader.
        broker: the relay's broker, as a URL or any other name; by default the
            publisher's own identity, or the name of its class.
        on_topics: called when the reader has other topics than before.

    Attributes:
        own: the relay's broker, without credentials.
    """

    def __init__(
        self,
        name: str,
        broker: str | None,
        publisher: Publisher | Handling,
        notify: Callable[[Event], None] = lambda _: None,
        on_topics: Callable[[], None] = lambda: None,
    ) -> None:
        if broker is None and isinstance(publisher, Identifiable):
            broker = publisher.identity
        elif broker is not None and "://" in broker:
            broker = identity_of(broker)
        self.name = name
        self.own = broker or type(publisher).__qualname__
        self._publisher = publisher
        self._notify = notify
        self._problem: Event | None = None
        self._on_topics = on_topics
        self._topics: Sequence[str] | None = None

    async def read(self, connection: Connection) -> ReaderRecord:
        """Return the row.

        Raises:
            ConfigError: there is no such reader, it was dropped, the role may not run
                it, or it is a consumer's and this is a relay, or the reverse.
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
                f"reader={self.name}: was dropped; pillarbox readers add "
                f"{for_shell(self.name)} --broker URL lets it get new messages again"
            )
        self._refuse_other_kind(record)
        if record.refusal is not None:
            raise ConfigError(record.refusal)
        return record

    async def may_be_added(self, connection: Connection) -> bool:
        """Return whether it is the relays' `main`, which the first of them adds."""
        is_main = self.name == MAIN and self.own != DIRECT
        return is_main and await read_record(connection, self.name) is None

    async def add_main(self, connection: Connection, *, from_now: bool) -> None:
        """Add the reader of everything, and report what it gets.

        Args:
            connection: in autocommit mode.
            from_now: whether to leave out the messages that are there.

        Raises:
            ConfigError: the role may not add it, or it discards its messages.
        """
        try:
            await self._subscribe(connection, ["*"], from_oldest=not from_now)
        except ConfigError:
            if await self.may_be_added(connection):
                raise
            return  # Another relay has added it.
        counted, oldest = "0", None
        if not from_now:
            statement = load("relay", "count_messages")
            cursor = await connection.execute(statement, {"most": _MOST_COUNTED})
            ((messages, is_complete, oldest),) = await cursor.fetchall()
            counted = str(messages) if is_complete else f"at least {messages}"
        self._notify(ReaderAdded(reader=self.name, messages=counted, oldest=oldest))

    async def subscribe(self, connection: Connection, topics: Sequence[str]) -> None:
        """Let the reader get these topics, and add it if it doesn't exist.

        It gets them from now on; a consumer gets a topic that no reader has ever had
        from the oldest message on.

        Args:
            connection: in autocommit mode.

        Raises:
            ConfigError: the reader is not one of this kind.
        """
        record = await read_record(connection, self.name)
        if record is not None:
            self._refuse_other_kind(record)
        by_rule = None if self.own == DIRECT else False
        await self._subscribe(connection, topics, from_oldest=by_rule)

    async def _subscribe(
        self, connection: Connection, topics: Sequence[str], *, from_oldest: bool | None
    ) -> None:
        parameters = {
            "reader": self.name,
            "topics": list(topics),
            "broker": self.own,
            "discard": False,
            "from_oldest": from_oldest,
            "role": None,
        }
        statement = load("outbox", "subscribe")
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
                f"reader={self.name}: belongs to relays, which publish to "
                f"{record.broker or 'their broker'}; give the consumer another name"
            )
        if record.broker == DIRECT != self.own:
            raise ConfigError(
                f"reader={self.name}: belongs to the consumer of this name; a relay "
                "needs another one: pillarbox readers add NAME --broker URL"
            )

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
            raise psycopg.errors.InsufficientPrivilege(record.refusal)
        problem: Event | None = None
        if record is None or record.topics is None:
            problem = ReaderDropped(reader=self.name)
        else:
            if record.broker is None or (switch and record.broker != self.own):
                await connection.execute(
                    load("outbox.log", "record_broker"),
                    {"reader": self.name, "broker": self.own, "switch": switch},
                )
                record = await self.read(connection)
            if record.broker != self.own:
                problem = BrokerDiffers(
                    broker=self.own, recorded=record.broker or "", remedy=_SWITCH
                )
        topics = None if record is None else record.topics
        if self._topics not in (None, topics):
            self._on_topics()
        self._topics = topics
        if problem != self._problem:
            self._problem = problem
            self._notify(problem or BrokerMatches(broker=self.own))
        return problem is None

    async def refuse_own_outbox(self, connection: Connection) -> None:
        """Refuse an entered publisher that appends to the outbox which this reads.

        Raises:
            ConfigError: it does.
        """
        if (
            isinstance(self._publisher, Appending)
            and self._publisher.appends_to is not None
            and self._publisher.appends_to == await identify_outbox(connection)
        ):
            raise ConfigError(
                f"broker {self.own}: is the outbox's own database, which consumers "
                "read without a relay; run none for them"
            )

    async def require(self, connection: Connection) -> None:
        """Record the broker of the entered publisher if none is recorded.

        Raises:
            ConfigError: another one is recorded, or it is the outbox itself.
        """
        await self.refuse_own_outbox(connection)
        if not await self.may_publish(connection):
            record = await self.read(connection)
            raise ConfigError(
                f"broker {self.own}: the relays of reader {self.name} publish to "
                f"{record.broker}; {_SWITCH}"
            )


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
