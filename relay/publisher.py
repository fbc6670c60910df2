"""The contract between the relay and a broker."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, Self, TypeAlias, runtime_checkable

from pillarbox.outbox.message import Message


@dataclass(frozen=True, slots=True)
class Acked:
    """The broker has stored the message, as durably as it promises."""


@dataclass(frozen=True, slots=True)
class Nacked:
    """The broker, or a check before it, refused this one message.

    Attributes:
        reason: why, in the broker's words; stored in the dead letter.
        permanent: no later attempt can succeed, so the message isn't retried.
        retry_after: the message wasn't refused but postponed: it is retried after
            this long, and no attempt is counted, however often that happens.
    """

    reason: str
    permanent: bool = False
    retry_after: timedelta | None = None


Confirmation: TypeAlias = Acked | Nacked


def nack_too_large(payload: bytes, most: int | None) -> Nacked | None:
    """Nack a message whose payload is over the option `max_payload_bytes`, if any."""
    size = len(payload)
    if most is None or size <= most:
        return None
    return Nacked(
        f"payload has {size} bytes, the publisher's limit is {most} "
        "(max_payload_bytes)",
        permanent=True,
    )


class Publisher(Protocol):
    """Publishes batches to one broker and reports which messages it confirmed.

    Entering connects and leaving disconnects; after that, nothing is confirmed.
    `publish` is called from one event loop, possibly by several tasks at once; their
    batches never share a key.
    """

    async def __aenter__(self) -> Self:
        """Connect. Raises `BrokerUnavailableError` if the broker is unavailable."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect, and end all tasks that the publisher started."""

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Publish a batch in order, and return one answer for each message.

        A message that can never be published (too large, no such topic) is nacked as
        permanent before any message of its key is sent. If the call is cancelled,
        messages that the broker had not confirmed may or may not have arrived.

        Raises:
            BrokerUnavailableError: the broker is unavailable, and no message is to
                blame; any of them may have arrived. The next call reconnects.
        """


@runtime_checkable
class Checkable(Protocol):
    """An optional part of a `Publisher`: a check that the broker responds.

    With it, an idle relay notices when its broker becomes unavailable and when it is
    available again. Without it, the relay notices with the next message.
    """

    async def check(self) -> None:
        """Make one cheap round trip to the broker that publishes nothing.

        Reconnects if necessary. It can be called while `publish` is running, and is
        cancelled if it takes too long.

        Raises:
            BrokerUnavailableError: the broker is unavailable, or accepts no messages at
                the moment.
        """


@runtime_checkable
class InDatabase(Protocol):
    """An optional part of a `Publisher`: its broker may be the outbox's own server.

    If that server crashes, or a standby takes over, what the broker acked may be lost
    with the settlement. Then messages are published again that no settlement covers.
    """

    in_database: bool


@runtime_checkable
class Appending(Protocol):
    """An optional part of a `Publisher`: it appends to the outbox of a database.

    A relay of that same outbox is refused: its messages are there already.
    """

    appends_to: str | None
    """That outbox, as `identify_outbox` names it, once it is entered; None for none."""


@runtime_checkable
class Identifiable(Protocol):
    """An optional part of a `Publisher`: which broker it publishes to.

    Relays of one database publish to one broker, or do nothing. `pillarbox relay`
    compares URLs. A `Relay` without a URL compares this, or else the names of classes.
    """

    identity: str
    """The same for publishers to the same place; without credentials."""
