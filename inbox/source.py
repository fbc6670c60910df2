"""The contract between a consumer and a broker."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from inbox.poison.history import History
from outbox.message import Message

E = TypeVar("E", contravariant=True)
T = TypeVar("T")


class Delivery(Protocol):
    """One delivery of a message by a broker."""

    @property
    def message(self) -> Message:
        """The message, as far as it is readable."""

    @property
    def attempts(self) -> int:
        """The number of failed attempts before this one, as far as the broker knows.

        If the broker counts starts, attempts that never ended because their process
        died count, too. A message that has used up its attempts isn't handled again.
        """

    @property
    def problem(self) -> str | None:
        """Why it can't be read as a message; None if it can.

        A delivery with a problem is never handled: it becomes a dead letter.
        """

    async def ack(self) -> None:
        """Settle it: the broker must not deliver it again.

        May return before the broker knows: the source sends the ack within
        milliseconds, at the latest before it is closed. Calling it twice is harmless.
        """

    async def nack(self, delay: timedelta | None = None) -> None:
        """Refuse the delivery.

        Without a delay it was not started: it is delivered again at once, here or
        elsewhere, and no attempt is counted. With a delay it failed: an attempt is
        counted, and neither it nor, if the broker keeps order, later messages of its
        key are delivered before that time.
        """


class DatedDelivery(Delivery, Protocol):
    """A delivery by a broker that says when a message was published."""

    @property
    def published_at(self) -> float | None:
        """When the broker accepted it, in seconds since 1970; None if unknown."""


class DeliveryWithHistory(Delivery, Protocol):
    """A delivery by a broker that doesn't count starts.

    The consumer counts them instead, for messages that may have been started before by
    a process that died; see `inbox.poison`.
    """

    @property
    def history(self) -> History:
        """What the source knows about earlier starts."""


class Settling(Protocol[E]):
    """A source that identifies its deliveries by entries of its own."""

    def acked(self, entry: E) -> None:
        """Settle an entry."""

    def nacked(self, entry: E, delay: timedelta | None) -> None:
        """Deliver an entry again, at once or after the delay."""


class EntryDelivery(Generic[T]):
    """A delivery that reports its outcome to its source, once."""

    def __init__(
        self,
        source: Settling[T],
        entry: T,
        message: Message,
        *,
        attempts: int,
        problem: str | None,
        history: History,
        published_at: float | None = None,
    ) -> None:
        self.published_at = published_at
        self.message = message
        self.attempts = attempts
        self.problem = problem
        self.history = history
        self._source = source
        self._entry = entry
        self._settled = False

    async def ack(self) -> None:
        """Ack the delivery within milliseconds."""
        if not self._settled:
            self._settled = True
            self._source.acked(self._entry)

    async def nack(self, delay: timedelta | None = None) -> None:
        """Deliver it again: here or, if the source is left first, elsewhere."""
        if not self._settled:
            self._settled = True
            self._source.nacked(self._entry, delay)


class Source(Protocol):
    """Delivers the messages of one consumer's topics.

    Entering connects. Leaving disconnects, returns deliveries that were neither acked
    nor nacked to the broker, and leaves no task behind. For one event loop; call
    `receive` from one task at a time, `ack` and `nack` from any.
    """

    async def __aenter__(self) -> Self:
        """Connect; raise `BrokerUnavailableError` if the broker is unavailable."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Wait for deliveries and return at most `limit`, those of a key in order.

        Returns none if none arrives within the poll interval. May be cancelled: what it
        had fetched by then is delivered later.

        Raises:
            BrokerUnavailableError: the broker is unavailable; the next call reconnects.
        """


@runtime_checkable
class SelectiveSource(Protocol):
    """A source that can skip tenants in its backlog.

    With any other source, a tenant whose messages fill the room of a queue holds up the
    messages of other tenants behind them.
    """

    def leave_out(self, tenants: Collection[str]) -> None:
        """Receive no messages of these tenants until this is called again."""


@runtime_checkable
class ReclaimingSource(Protocol):
    """A source that counts the messages that another replica held before."""

    @property
    def reclaimed(self) -> int:
        """The number of deliveries so far that another replica left or returned."""


@runtime_checkable
class LeasingSource(Protocol):
    """A source that leases lanes, which others who may connect can take from it."""

    @property
    def foreign_holders(self) -> Sequence[str]:
        """The sessions that are no consumers and hold lanes, described."""
