"""The contract between the relay and a broker."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from outbox.message import Message


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
        is_attempt: a handler has failed, so an attempt is counted although it was
            postponed. Not for publishers.
    """

    reason: str
    permanent: bool = False
    retry_after: timedelta | None = None
    is_attempt: bool = False


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


class Handed(Protocol):
    """A message for a handler in the relay's own process. For one event loop."""

    @property
    def message(self) -> Message:
        """The message, as far as it could be read."""

    @property
    def problem(self) -> str | None:
        """Why it can't be handled as a message; None if it can."""

    @property
    def attempts(self) -> int:
        """How often it has failed."""

    @property
    def created_at(self) -> datetime:
        """When it was added."""

    @property
    def place(self) -> tuple[int, datetime]:
        """Its seq and when it was added: lower ones of its key go first."""

    @property
    def leased(self) -> tuple[int, datetime | None]:
        """Its lane, and when this process took that, by the database's clock."""

    def begin(self) -> bool:
        """Return whether it may be started; otherwise it has another owner by now."""

    def end(self, answer: Confirmation | None) -> None:
        """Record its outcome, once; None: it was not started.

        A `Nacked` must say when the message is retried.
        """


class TenantSearch(NamedTuple):
    """Which tenants' messages to look for that lie behind those of others.

    Attributes:
        known: tenants to skip.
        after: the tenant after which to begin.
        max_steps: the maximum number of tenants to skip or find.
        rows_each: the maximum number of messages of each tenant.
    """

    known: Collection[str]
    after: str
    max_steps: int
    rows_each: int


class TenantsFound(NamedTuple):
    """What a search has found.

    Attributes:
        steps: the tenants that it has skipped or found, in order.
        tenants: those of its messages.
        is_cut: whether it has reached its limit of messages or bytes.
    """

    steps: Sequence[str] = ()
    tenants: Sequence[str] = ()
    is_cut: bool = False


@runtime_checkable
class Handling(Protocol):
    """What a relay hands messages to if their handlers are in its own process."""

    async def __aenter__(self) -> Self:
        """Begin."""

    async def __aexit__(self, *exc_info: object) -> None:
        """End."""

    async def wants_more(self, *, can_search: bool) -> TenantSearch | None:
        """Wait until more messages are wanted: the next ones, or those of tenants."""

    def claimed(self, tenants: Sequence[str | None], *, is_cut: bool) -> None:
        """Record a claim of the next messages: their tenants, and whether more wait."""

    def searched(self, found: TenantsFound) -> None:
        """Record a search for tenants."""

    def hand_over(self, messages: Sequence[Handed]) -> None:
        """Take messages, those of a key in order."""

    def take_back(self, message: Handed) -> None:
        """Take a message again that was not started, ahead of others of its key."""

    def withdraw(self, unwanted: Callable[[Handed], bool]) -> Sequence[Handed]:
        """Remove and return the unwanted messages that were not started, in order."""


@runtime_checkable
class Identifiable(Protocol):
    """An optional part of a `Publisher`: which broker it publishes to.

    Relays of one database publish to one broker, or do nothing. `pillarbox relay`
    compares URLs. A `Relay` without a URL compares this, or else the names of classes.
    """

    identity: str
    """The same for publishers to the same place; without credentials."""
