"""Events, as values: logs, metrics and tests all listen to these."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, named in the past."""

    level: ClassVar[int] = logging.INFO
    """The level at which a log reports it."""

    about: ClassVar[tuple[str, ...]] = ()
    """The fields that identify the subject of an event that may repeat: a log reports
    the first one at once and sums up those that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKeysMeasured(Event):
    """The number of blocked keys, and how long the first has waited; None without any.

    Measured by each process for itself.
    """

    level = logging.DEBUG

    consumer: str
    keys: int
    age: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepMeasured(Event):
    """The time since the upkeep of the partitions last succeeded; None if it never did.

    Attributes:
        is_failing: whether it has failed since.
    """

    level = logging.DEBUG

    age: timedelta | None
    is_failing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepFailed(Event):
    """The upkeep of the partitions failed, or refused the server's clock."""

    level = logging.ERROR

    reason: str


Observer: TypeAlias = Callable[[Event], None]
"""Called in the task in which the event happens: it must be quick and never raise."""


class Observers:
    """Passes each event to all observers."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def notify(self, event: Event) -> None:
        """Call the observers in order."""
        for observer in self._observers:
            observer(event)
