"""The relays of one database publish to one broker: the one that the first recorded.

Otherwise, relays with different brokers would share the lanes, and each broker would
get some of the messages. A relay with another broker than the recorded one holds no
lanes; if the recorded one is switched, it takes lanes, and the others return theirs.
"""

from collections.abc import Callable

from outbox.brokers.options import identity_of
from outbox.errors import ConfigError
from outbox.events import Event
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load
from relay.events import BrokerDiffers, BrokerMatches
from relay.publisher import Identifiable, Publisher

_REMEDY = (
    "correct the broker's URL; or, if all messages are to go to this one from now on, "
    "run pillarbox relay --switch-broker once with its URL"
)


class RecordedBroker:
    """Compares one relay's broker with the recorded one.

    Args:
        broker: the relay's broker, as a URL or any other name; by default the
            publisher's own identity, or the name of its class.
    """

    def __init__(
        self,
        broker: str | None,
        publisher: Publisher,
        notify: Callable[[Event], None] = lambda _: None,
    ) -> None:
        if broker is None and isinstance(publisher, Identifiable):
            broker = publisher.identity
        elif broker is not None and "://" in broker:
            broker = identity_of(broker)
        self._own = broker or type(publisher).__qualname__
        self._notify = notify
        self._differs: str | None = None

    async def matches(self, connection: Connection, *, switch: bool = False) -> bool:
        """Return whether it is the recorded one; report when that changes.

        Records it if none is recorded, or to `switch` to it.
        """
        recorded = await self._read(connection)
        if recorded is None or (switch and recorded != self._own):
            await connection.execute(
                load("relay", "record_broker"),
                {"identity": self._own, "switch": switch},
            )
            recorded = await self._read(connection)
        differs = None if recorded == self._own else recorded
        if differs != self._differs:
            self._differs = differs
            self._notify(
                BrokerMatches(broker=self._own)
                if differs is None
                else BrokerDiffers(broker=self._own, recorded=differs, remedy=_REMEDY)
            )
        return differs is None

    async def require(self, connection: Connection) -> None:
        """Record the broker if none is recorded.

        Raises:
            ConfigError: another one is recorded.
        """
        if not await self.matches(connection):
            raise ConfigError(
                f"broker {self._own}: the relays of this database publish to "
                f"{self._differs}; {_REMEDY}"
            )

    @staticmethod
    async def _read(connection: Connection) -> str | None:
        cursor = await connection.execute(load("outbox", "read_broker"))
        row = await cursor.fetchone()
        return None if row is None else str(row[0])
