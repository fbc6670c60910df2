"""The contract between a consumer and a broker."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Protocol, Self, runtime_checkable

from inbox.poison.history import History
from outbox.message import Message


class Delivery(Protocol):
    """One handing-over of a message by a broker."""

    @property
    def message(self) -> Message:
        """The message, as far as it can be read."""

    @property
    def attempts(self) -> int:
        """How many attempts to handle it the broker knows to have failed before.

        Those count too that never came to an end, because their process died, as far
        as the broker can tell. Its last attempt behind it, it isn't handled again.
        """

    @property
    def problem(self) -> str | None:
        """Why it can't be read as a message; None for a sound one.

        What has a problem is never handled: it goes to the dead letters.
        """

    async def ack(self) -> None:
        """Settle it: the broker is not to hand it over again.

        May return before the broker knows; the source passes it on within
        milliseconds, and completely before it is left. Doing it twice is harmless.
        """

    async def nack(self, delay: timedelta | None = None) -> None:
        """Give it back.

        Without a delay it was not tried: it is handed over again at once, here or
        elsewhere, and no attempt is counted. With one it failed: an attempt is
        counted, and neither it nor, where the broker keeps order, later messages of
        its key come before that time.
        """


class DeliveryWithHistory(Delivery, Protocol):
    """A delivery of a broker that doesn't count starts.

    The consumer counts them instead, for messages that may have been started before by
    a process that died; see `inbox.poison`.
    """

    @property
    def history(self) -> History:
        """What the source knows about earlier starts."""


class Source(Protocol):
    """Hands over the messages of one consumer's topics.

    Entering connects, leaving disconnects, gives back what was neither acked nor
    nacked, and leaves no task behind. For one event loop; `receive` for one task at
    a time, `ack` and `nack` for any.
    """

    async def __aenter__(self) -> Self:
        """Connect. Raises `BrokerUnavailableError` when the broker is away."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Wait for deliveries and give at most `limit`, those of a key in their order.

        Gives none when the poll interval passes without any. May be cancelled: what
        it had fetched by then is handed over again.

        Raises:
            BrokerUnavailableError: the broker is away; the next call reconnects.
        """


@runtime_checkable
class SelectiveSource(Protocol):
    """What a source may offer besides: to pass over tenants in its backlog.

    With any other, a tenant whose messages fill the room of a queue holds up those of
    others behind them.
    """

    def leave_out(self, tenants: Collection[str]) -> None:
        """Receive nothing of these tenants until another call says otherwise."""


@runtime_checkable
class ReclaimingSource(Protocol):
    """What a source may offer besides: to count what others had before."""

    @property
    def reclaimed(self) -> int:
        """How many deliveries so far were left by a replica, or given back by one."""
