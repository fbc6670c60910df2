"""The events that a relay sends to its observers."""

import logging
from dataclasses import dataclass, field
from uuid import UUID

from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStarted(Event):
    """The relay is connected to the database and the broker."""

    publisher: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStopped(Event):
    """The relay stopped and released its lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(Event):
    """The relay leased lanes."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(Event):
    """The relay released lanes, or the server ended its lease."""

    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesWithheld(Event):
    """Other sessions hold lane locks and keep this relay from leasing lanes.

    Either sessions that are not relays, which may stop all publishing; or relays that
    don't hand over this relay's share while it has no lane at all.
    """

    level = logging.WARNING
    waits_for = "lanes"
    holders: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesFree(Event):
    """No session keeps this relay from its lanes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorbellHeld(Event):
    """A session that is neither relay nor writer holds the doorbell. Polling goes on.

    Attributes:
        shared: if it holds the lock in shared mode, as writers do, relays can't sleep
            and poll every 50 ms; if exclusively, every insert sends a NOTIFY.
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
    """The outcomes of a batch were recorded."""

    level = logging.DEBUG
    published: int
    retried: int
    dead_lettered: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleBatchDropped(Event):
    """A batch was not published, because its lease was no longer certain.

    Whichever relay leases the lanes next publishes it.
    """

    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlocked(Event):
    """A message was nacked; later messages of its key wait until it is retried."""

    about = ("topic", "reason")
    id: UUID
    topic: str
    key: str
    attempts: int
    reason: str
    traceparent: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelayed(Event):
    """A message without a key was nacked and will be retried; no other one waits."""

    about = ("topic", "reason")
    id: UUID
    topic: str
    attempts: int
    reason: str
    traceparent: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeadLettered(Event):
    """A message was moved to the dead letters."""

    level = logging.WARNING
    about = ("topic", "reason")
    advice = "fix the cause, then run pillarbox dead-letters retry --side outbox"
    id: UUID
    topic: str
    attempts: int
    reason: str
    traceparent: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLost(Event):
    """The broker is unavailable; nothing is claimed until the delay is over."""

    about = ()
    lasting_level = logging.WARNING
    advice = (
        "check that the broker is running, that this host can reach it, and that it"
        " accepts the credentials of --broker"
    )
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFound(Event):
    """The broker accepts messages again."""

    ends = (BrokerLost,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLost(Event):
    """A connection to PostgreSQL broke; it is opened again after the delay."""

    about = ()
    lasting_level = logging.WARNING
    advice = (
        "check that the database is running, that this host can reach it, and that it"
        " has a connection left"
    )
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFound(Event):
    """A broken connection was replaced."""

    ends = (DatabaseLost,)
