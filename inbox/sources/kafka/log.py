"""A Kafka partition while it is assigned to this replica, and its entries."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import Message as Record

from pillarbox.inbox.poison.history import FIRST_DELIVERY, History, TakenOver
from pillarbox.inbox.source import Arrived
from pillarbox.inbox.sources.kafka.offsets import Offsets
from pillarbox.inbox.sources.kafka.reader import Part


@dataclass(slots=True, eq=False)
class Log:
    """A Kafka partition from its assignment until it is lost.

    Attributes:
        ours: whether this replica still owns it.
        in_flight: how many of its entries are delivered but not settled.
        landed: called whenever an entry is settled; None unless the partition is about
            to move to another member.
        taken_over: the history of messages that the previous owner may have started.
    """

    part: Part
    offsets: Offsets = field(default_factory=Offsets)
    ours: bool = True
    in_flight: int = 0
    landed: Callable[[], None] | None = None
    taken_over: TakenOver = field(default_factory=TakenOver)
    _since: float = field(default_factory=time.time)

    def history_of(self, written_at: float | None) -> History:
        """Return whether the previous owner may have started to handle a record."""
        is_new = written_at is not None and written_at > self._since
        return FIRST_DELIVERY if is_new else self.taken_over


def written_at_of(record: Record) -> float | None:
    """Return when a record was written, in seconds since 1970; None if unknown."""
    kind, milliseconds = record.timestamp()
    return None if kind == TIMESTAMP_NOT_AVAILABLE else milliseconds / 1000


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Arrived):
    """A record that was received."""

    log: Log
    offset: int
