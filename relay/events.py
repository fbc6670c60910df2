"""The events that a relay sends to its observers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from pillarbox.outbox.events import Event, ProcessFailed, StartDelayed
from pillarbox.outbox.log.events import BrokerDiffers as BrokerDiffers
from pillarbox.outbox.log.events import BrokerMatches as BrokerMatches
from pillarbox.outbox.log.events import DatabaseLost as DatabaseLost
from pillarbox.outbox.log.events import DatabaseRecovered as DatabaseRecovered
from pillarbox.outbox.log.events import LanesFree as LanesFree
from pillarbox.outbox.log.events import LanesWithheld as LanesWithheld
from pillarbox.outbox.log.events import LeaseLost as LeaseLost
from pillarbox.outbox.log.events import LeaseTaken as LeaseTaken
from pillarbox.outbox.log.events import ReaderDropped as ReaderDropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStopped(Event):
    """The relay stopped and released its lanes."""

    waits_for = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStarted(Event):
    """The relay is connected to the database and the broker.

    Attributes:
        publisher: the scheme of the broker's URL, or the name of the publisher.
    """

    ends = (RelayStopped, ProcessFailed, StartDelayed)

    publisher: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayActive(Event):
    """What the relay has done since its last report, sent at intervals.

    An interval in which nothing happened isn't reported, but the 60th in a row is.

    Attributes:
        published: messages that the broker accepted.
        refused: how often the broker refused a message, which is then retried.
        lag: the median time from add to publish, in seconds; None if nothing was
            published. It shows how far the relay is behind. A scheduled message counts
            from the time it was due, a replayed one from its replay.
        slowest: the longest such time.
        lanes: how many lanes it holds.
        blocked_keys: how many blocked keys it tracks; see `ProcessMeasured`.
        period: the time since the last report.
    """

    published: int
    refused: int
    dead_lettered: int
    lag: float | None
    slowest: float | None
    lanes: int
    blocked_keys: int
    period: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderAdded(Event):
    """The relay is the first one of the reader `main`, and has added it.

    Attributes:
        messages: how many existing messages it will publish: a number, or "at least
            10000".
        oldest: when the oldest of them was added; None if there are none.
    """

    reader: str
    messages: str
    oldest: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchClaimed(Event):
    """Messages were read from their lanes.

    Attributes:
        lanes: how many lanes they come from.
        messages: how many messages were read.
        seconds: how long that took.
    """

    level = logging.DEBUG
    lanes: int
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPublished(Event):
    """The broker answered for a batch.

    Attributes:
        acked: how many of the messages it accepted.
        seconds: how long that took.
        topics: the topic of each accepted message.
        due_at: when each of these was due, by the database's clock: when it was added,
            the time it was scheduled for, or when its replay was requested.
    """

    level = logging.DEBUG
    messages: int
    acked: int
    seconds: float
    topics: Sequence[str] = field(default=(), repr=False)
    due_at: Sequence[datetime] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettled(Event):
    """The outcomes of a batch were recorded.

    Attributes:
        published: messages that the broker accepted.
        retried: messages that will be published again later.
        dead_lettered: messages that were moved to the dead letters.
        seconds: how long that took.
    """

    level = logging.DEBUG
    published: int
    retried: int
    dead_lettered: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRefused(Event):
    """A message was nacked and will be retried; later messages of its key wait.

    Attributes:
        id: the message's id.
        key: its key; None: no other message waits.
        attempts: how often the broker refused it.
        reason: the broker's reason.
    """

    settles = "retry"
    about = ("topic", "reason")
    id: UUID
    topic: str
    key: str | None
    attempts: int
    reason: str
    traceparent: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeadLettered(Event):
    """A message was moved to the dead letters.

    Attributes:
        id: the message's id.
        attempts: how often it was tried.
        reason: the broker's reason, or the problem with the row.
    """

    level = logging.WARNING
    settles = "dead_letter"
    about = ("topic", "reason")
    advice = "fix the cause, then run pillarbox dead-letters retry --side outbox"
    id: UUID
    topic: str
    attempts: int
    reason: str
    traceparent: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLost(Event):
    """The broker is unavailable; nothing is claimed until the delay is over.

    Attributes:
        reason: the error.
        seconds: the delay.
    """

    about = ()
    lasting_level = logging.WARNING
    waits_for = "broker"
    advice = (
        "check that the broker is running, that this host can reach it, and that it"
        " accepts the credentials of --broker"
    )
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRecovered(Event):
    """The broker accepts messages again."""

    ends = (BrokerLost,)
