"""What a relay tells its observers."""

import logging
from dataclasses import dataclass
from uuid import UUID

from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStarted(Event):
    """The relay reached the database and the broker."""

    publisher: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStopped(Event):
    """The relay gave its lanes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(Event):
    """Lanes came to this relay."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """Lanes went from this relay: given back, or taken by the server."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesWithheld(Event):
    """Other sessions hold locks of lanes, or keep this relay from them.

    Foreign sessions, which are no relays and may stop all publishing; or relays that
    don't hand over the share of this one, which has no lane.
    """

    level = logging.WARNING
    waits_for = "lanes"
    holders: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesFree(Event):
    """Nobody keeps this relay from its lanes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorbellHeld(Event):
    """A foreign session holds the doorbell. Polling goes on.

    Attributes:
        shared: as writers hold it, so that relays can't sleep and look every 50 ms;
            else every insert sends a NOTIFY.
    """

    level = logging.WARNING
    shared: bool
    holders: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClaimed(Event):
    """Messages were read from their lanes."""

    level = logging.DEBUG
    lanes: int
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPublished(Event):
    """The broker answered for a batch."""

    level = logging.DEBUG
    messages: int
    acked: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettled(Event):
    """The outcomes of a batch were written down."""

    level = logging.DEBUG
    published: int
    retried: int
    dead_lettered: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleBatchDropped(Event):
    """A batch was not published, because its lease was no longer certain."""

    level = logging.WARNING
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlocked(Event):
    """A message was nacked; later ones of its key wait until it is tried again."""

    level = logging.WARNING
    about = ("key",)
    id: UUID
    topic: str
    key: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelayed(Event):
    """A message without a key was nacked and is tried again; none waits behind it."""

    level = logging.WARNING
    about = ("topic",)
    id: UUID
    topic: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeadLettered(Event):
    """A message was given up."""

    level = logging.WARNING
    id: UUID
    topic: str
    attempts: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLost(Event):
    """The broker is away; nothing is claimed until the delay is over."""

    level = logging.WARNING
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFound(Event):
    """The broker takes messages again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLost(Event):
    """A connection to PostgreSQL broke; it is opened anew after the delay."""

    level = logging.WARNING
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFound(Event):
    """A connection that broke is replaced."""
