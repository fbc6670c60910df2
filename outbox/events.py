"""What happens, as values: logs, metrics and tests all listen to these."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, named in the past."""

    level: ClassVar[int] = logging.INFO
    """How loud a log should say it."""

    about: ClassVar[tuple[str, ...]] = ()
    """The fields that say whom it is about, if it may be repeated about the same: a log
    tells the first at once, and sums up what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKeysMeasured(Event):
    """So many keys are blocked, the first of them for so long; None if there is none.

    Measured by each process for itself.
    """

    level = logging.DEBUG

    consumer: str
    keys: int
    age: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepMeasured(Event):
    """So long ago the upkeep of the partitions last succeeded; None if it never did.

    Attributes:
        is_failing: whether it has failed since.
    """

    level = logging.DEBUG

    age: timedelta | None
    is_failing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepFailed(Event):
    """The upkeep of the partitions failed, whatever drives it, or refuses the clock."""

    level = logging.ERROR

    reason: str


Observer: TypeAlias = Callable[[Event], None]
"""Called in the task where it happens: be quick, never block, never raise."""


class Observers:
    """Tell every observer of an event."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def notify(self, event: Event) -> None:
        """Call the observers in their order."""
        for observer in self._observers:
            observer(event)
