"""The contract between the relay and a broker."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, Self, TypeAlias, runtime_checkable

from outbox.message import Message


@dataclass(frozen=True, slots=True)
class Acked:
    """The broker has the message, as durably as it promises."""


@dataclass(frozen=True, slots=True)
class Nacked:
    """The broker, or a check before it, refused this one message.

    Attributes:
        reason: why, in the broker's words; it ends in the dead letter.
        permanent: no later attempt can succeed, so none is made.
        retry_after: it wasn't refused, but put off: it is tried again after so
            long, and that counts no attempt, however often it happens.
    """

    reason: str
    permanent: bool = False
    retry_after: timedelta | None = None


Confirmation: TypeAlias = Acked | Nacked


class Publisher(Protocol):
    """Publishes batches to one broker and reports what it confirmed.

    Entering connects and leaving disconnects; after that nothing is confirmed.
    `publish` is called from one event loop, possibly by several tasks at once,
    whose batches never share a key.
    """

    async def __aenter__(self) -> Self:
        """Connect. Raises `BrokerUnavailableError` when the broker is away."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect, leaving no task behind."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Publish a batch in its order, and give one answer for each message.

        A message that is bad in itself (too large, no such topic) is nacked as
        permanent before anything of its key is sent. When cancelled, whatever the
        broker had not confirmed may or may not have arrived.

        Raises:
            BrokerUnavailableError: the broker is away, no message is to blame;
                any of the batch may have arrived. The next call reconnects.
        """


@runtime_checkable
class Checkable(Protocol):
    """What a `Publisher` may have besides: a sign of life from its broker.

    With it an idle relay notices that its broker is away, and back. Without it the
    relay learns that from the next message.
    """

    async def check(self) -> None:
        """Ask the broker for an answer, by one cheap round trip that publishes nothing.

        Connects again if need be. Called between calls of `publish`, or beside one;
        cancelled when it takes too long.

        Raises:
            BrokerUnavailableError: the broker is away, or would take no message now.
        """
