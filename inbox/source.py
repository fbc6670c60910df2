"""The contract between a consumer and a broker."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Protocol, Self, TypeVar

from pillarbox.inbox.poison.history import FIRST_DELIVERY, History
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message import Message

E = TypeVar("E", contravariant=True)
T = TypeVar("T")


class Delivery(Protocol):
    """One delivery of a message by a broker."""

    @property
    def message(self) -> Message:
        """The message, as far as it could be read."""

    @property
    def attempts(self) -> int:
        """The number of failed attempts before this one, as far as the broker knows.

        If the broker counts starts, this includes attempts that never ended because
        their process died. A message that has used up its attempts isn't handled again.
        """

    @property
    def problem(self) -> str | None:
        """Why the delivery can't be read as a message; None if it can.

        A delivery with a problem is never handled: it becomes a dead letter.
        """

    @property
    def history(self) -> History | None:
        """Whether the message may have been started before; None: attempts count that.

        With it, the consumer itself counts starts, for messages that may have been
        started before by a process that died; see `pillarbox.inbox.poison`.
        """

    @property
    def published_at(self) -> float | None:
        """When the broker accepted it, in seconds since 1970; None if unknown."""

    async def ack(self) -> None:
        """Settle the delivery: the broker must not deliver it again.

        Can return before the broker is notified: the source sends the ack within
        milliseconds, at the latest before it is closed. Calling it twice is harmless.
        """

    async def nack(self, delay: timedelta | None = None) -> None:
        """Refuse the delivery.

        Without a delay, it was not started: it is delivered again at once, to this
        process or another, and no attempt is counted. With a delay, it failed: an
        attempt is counted, and the message is not delivered again before the delay has
        passed. Nor are, if the broker keeps order, later messages of its key.
        """

    async def hand_back(self, delay: timedelta) -> bool:
        """Hand the delivery back for a replica that has a handler for it.

        It was not started, and no attempt is counted. This replica doesn't get it again
        before the delay has passed and, unlike after a nack, doesn't keep it in memory:
        any number of messages can be handed back while others are delivered. Returns
        False, and does nothing, if that isn't possible: then it waits in this process.
        """


class Settling(Protocol[E]):
    """A source that identifies its deliveries by its own kind of entry."""

    def acked(self, entry: E) -> None:
        """Settle an entry."""

    def nacked(self, entry: E, delay: timedelta | None) -> None:
        """Deliver an entry again, at once or after a delay."""

    def handed_back(self, entry: E, delay: timedelta) -> bool:
        """Return an entry to the broker; return False if that isn't possible."""


@dataclass(slots=True, eq=False, kw_only=True)
class Arrived:
    """A message as a source got it, with the attributes of `Delivery`.

    Attributes:
        place: its position in the order of arrival.
        key: None if it isn't kept in order.
    """

    message: Message
    place: int = 0
    key: str | None = None
    problem: str | None = None
    attempts: int = 0
    history: History | None = FIRST_DELIVERY
    published_at: float | None = None


class EntryDelivery(Generic[T]):
    """A delivery that reports its outcome to its source, once."""

    def __init__(self, source: Settling[T], entry: T, arrived: Arrived) -> None:
        self.message = arrived.message
        self.attempts = arrived.attempts
        self.problem = arrived.problem
        self.history = arrived.history
        self.published_at = arrived.published_at
        self._source = source
        self._entry = entry
        self._settled = False

    async def ack(self) -> None:
        """Ack the delivery within milliseconds."""
        if not self._settled:
            self._settled = True
            self._source.acked(self._entry)

    async def nack(self, delay: timedelta | None = None) -> None:
        """Request redelivery: by this source or, if it is closed first, by another."""
        if not self._settled:
            self._settled = True
            self._source.nacked(self._entry, delay)

    async def hand_back(self, delay: timedelta) -> bool:
        """Return the delivery to the broker within milliseconds."""
        if not self._settled:
            self._settled = self._source.handed_back(self._entry, delay)
        return self._settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Abilities of only some sources; by default, calls have no effect.

    Attributes:
        leave_out: receive no messages of these tenants and priorities until the next
            call, as far as it can. Without it, messages of one tenant or key that fill
            a queue's room delay all later ones.
        foreign_holders: describe the sessions other than consumers that hold lanes.
        warnings: what an operator should know about the consumer's group; each text is
            logged once.
        identify: take an id of the handlers' database into the name of this member of
            the group, without change. Called before the source is entered.
        members: the names of running members of the group, if the broker shows them.
        share: let all replicas receive at the same time, although the messages of a key
            then don't stay in order. Called before the source is entered. Without it,
            one replica at a time receives the messages of a topic.
        standing_by: the topics that another replica receives now.
        pauses: take a function that tells whether a topic is paused; return whether the
            source keeps nacked messages of a paused topic until it is resumed, and
            reads no more of it, as far as the broker separates topics. Otherwise,
            messages of a paused topic that are handed back are for no other replica,
            since it is paused there, too. Called before the source is entered, and
            after `share`.
    """

    leave_out: Callable[[Collection[str], Collection[Priority]], None] = lambda *_: None
    foreign_holders: Callable[[], Sequence[str]] = tuple
    warnings: Callable[[], Sequence[str]] = tuple
    identify: Callable[[str], None] = lambda _: None
    members: Callable[[], Sequence[str]] = tuple
    share: Callable[[], None] = lambda: None
    standing_by: Callable[[], Collection[str]] = tuple
    pauses: Callable[[Callable[[str], bool]], bool] = lambda _: False


class Source(Protocol):
    """Delivers the messages of one consumer's topics.

    Entering connects, also after it was left. Leaving disconnects, returns deliveries
    that were neither acked nor nacked to the broker, and leaves no task behind. For one
    event loop; call `receive` from one task at a time, `ack` and `nack` from any task.
    """

    @property
    def abilities(self) -> Abilities:
        """The abilities of this source beyond the contract."""

    async def __aenter__(self) -> Self:
        """Connect; raise `BrokerUnavailableError` if the broker is unavailable."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Wait for deliveries and return at most `limit`, those of a key in order.

        Returns an empty sequence if none arrives within the poll interval. The call can
        be cancelled: messages that it had already fetched are delivered later.

        Raises:
            BrokerUnavailableError: the broker is unavailable; the next call reconnects.
        """
