"""A Kafka partition as long as it is ours, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import Message as Record

from inbox.sources.kafka.offsets import Offsets
from inbox.sources.kafka.reader import Part


@dataclass(slots=True, eq=False)
class Log:
    """A Kafka partition from its assignment to its end.

    Attributes:
        ours: nobody else has it yet.
        in_flight: how many of its entries are handed over and not settled.
        landed: called with each that is settled, once it is to go to somebody else.
    """

    part: Part
    offsets: Offsets = field(default_factory=Offsets)
    ours: bool = True
    in_flight: int = 0
    landed: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A record that came.

    Attributes:
        place: in the order of arrival.
        attempts: how many failed here.
    """

    log: Log
    place: int
    key: str | None
    offset: int
    record: Record
    attempts: int = 0
