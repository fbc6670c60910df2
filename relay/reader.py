"""A relay's reader, and its one broker.

The relays of a reader publish to the broker that the first of them recorded. Otherwise,
relays with different brokers would share the lanes, and each broker would get some of
the messages. If the recorded one is switched, a relay with the new one takes lanes, and
the others return theirs.
"""

from collections.abc import Callable, Sequence
from typing import Final

from typing_extensions import override

from pillarbox.outbox.brokers.options import identity_of
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.registration import (
    SWITCH,
    ReaderRecord,
    Registration,
    read_record,
)
from pillarbox.outbox.postgres.advisory_lock import MAIN
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.identity import identify_outbox
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.relay.events import ReaderAdded
from pillarbox.relay.publisher import Appending, Identifiable, Publisher

ORIGIN: Final = "relay:"
"""The origin of a dead letter is this, followed by the name of the reader."""
_MOST_COUNTED: Final = 10_000
"""Up to how many messages are counted that the new reader `main` gets."""


class RelayReader(Registration):
    """The reader of one relay.

    Args:
        name: the name of the reader.
        broker: the relay's broker, as a URL or any other name; by default the
            publisher's own identity, or the name of its class.
        switch: whether this relay's broker replaces the recorded one.
    """

    def __init__(
        self,
        name: str,
        broker: str | None,
        publisher: Publisher,
        notify: Callable[[Event], None] = lambda _: None,
        *,
        topics: Sequence[str] = (),
        switch: bool = False,
    ) -> None:
        if broker is None and isinstance(publisher, Identifiable):
            broker = publisher.identity
        elif broker is not None and "://" in broker:
            broker = identity_of(broker)
        own = broker or type(publisher).__qualname__
        super().__init__(name, own, notify, topics=topics)
        self._publisher = publisher
        self._switch = switch

    @override
    async def prepare(self, connection: Connection) -> None:
        """Let the reader get its topics, unless it is `main` and is added later."""
        if not await self.may_be_added(connection):
            await super().prepare(connection)

    async def may_be_added(self, connection: Connection) -> bool:
        """Return whether it is the relays' `main`, which the first of them adds."""
        is_main = self.name == MAIN
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
            await self.add(connection, ["*"], from_oldest=not from_now)
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
        self.notify(ReaderAdded(reader=self.name, messages=counted, oldest=oldest))

    @override
    async def current(self, connection: Connection) -> ReaderRecord | None:
        """Return the row; record the broker if none is, or if it is to be switched."""
        record = await super().current(connection)
        if record is None or record.topics is None:
            return record
        switch, self._switch = self._switch, False
        if record.broker is None or (switch and record.broker != self.own):
            await connection.execute(
                load("relay", "record_broker"),
                {"reader": self.name, "broker": self.own, "switch": switch},
            )
            return await self.read(connection)
        return record

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
                f"broker {self.own}: this is the outbox's own database, whose"
                " consumers need no relay"
            )

    async def require(self, connection: Connection) -> None:
        """Record the broker of the entered publisher if none is recorded.

        Raises:
            ConfigError: another one is recorded, or it is the outbox itself.
        """
        await self.refuse_own_outbox(connection)
        if not await self.may_read(connection):
            record = await self.read(connection)
            raise ConfigError(
                f"broker {self.own}: reader {self.name} is configured for"
                f" {record.broker}; {SWITCH}"
            )
