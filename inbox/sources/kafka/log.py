"""A Kafka partition as long as it is ours, and what came of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import Message as Record

from inbox.sources.kafka.offsets import Offsets
from inbox.sources.kafka.reader import Part

# More than a consumer holds, as long as it isn't told to hold more.
_MAX_SUSPECTS: Final = 2_000


@dataclass(slots=True, eq=False)
class Log:
    """A Kafka partition from its assignment to its end.

    Attributes:
        ours: nobody else has it yet.
        in_flight: how many of its entries are handed over and not settled.
        landed: called with each that is settled, once it is to go to somebody else.
        suspects: how many more may be among those that the one before had in work.
    """

    part: Part
    offsets: Offsets = field(default_factory=Offsets)
    ours: bool = True
    in_flight: int = 0
    landed: Callable[[], None] | None = None
    suspects: int = _MAX_SUSPECTS
    _since: float = field(default_factory=time.time)

    def suspect(self, record: Record) -> bool:
        """Tell whether a record may have been in other hands; for each in its order.

        Nothing says what was handed out before. But it lies behind the position, and
        was written before the Kafka partition came here.
        """
        kind, written_at = record.timestamp()
        is_new = kind != TIMESTAMP_NOT_AVAILABLE and written_at > self._since * 1000
        if is_new or not self.suspects:
            return False
        self.suspects -= 1
        return True


@dataclass(slots=True, eq=False)
class Entry:
    """A record that came.

    Attributes:
        place: in the order of arrival.
        suspect: whether somebody may have died of it.
        attempts: how many failed here.
    """

    log: Log
    place: int
    key: str | None
    offset: int
    record: Record
    suspect: bool
    attempts: int = 0
