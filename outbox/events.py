"""Events as values: logs, metrics and tests observe them."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final, TypeAlias

from outbox import tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened; the class name is in the past tense.

    A field with `repr=False` is for observers in the process; no log shows it.
    """

    level: ClassVar[int] = logging.INFO
    """The level at which a log reports it: WARNING if an operator must act."""

    about: ClassVar[tuple[str, ...] | None] = None
    """For an event that may repeat, the fields that identify its subject: a log reports
    the first one at once and sums up those that follow. Empty: the event's type is the
    subject."""

    lasting_level: ClassVar[int | None] = None
    """The level at which repetitions are summed up; None: `level`. For conditions that
    usually end without help, and need an operator if they don't."""

    ends: ClassVar["tuple[type[Event], ...]"] = ()
    """The events whose repetitions end with this one."""

    advice: ClassVar[str | None] = None
    """What an operator should do. A log shows it as `remedy`, at WARNING. An event
    whose remedy depends on the case has a field of that name instead."""

    settles: ClassVar[str | None] = None
    """How the event settled a message, such as `"retry"`: traces show the event under
    this name. Such events have the fields `id`, `topic`, `reason` and `traceparent`."""


MEASURE_INTERVAL: Final = 5.0
"""Seconds between two measurements by the same process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKeysMeasured(Event):
    """The number of blocked keys, and how long the first one has waited, if any.

    Each process measures its own keys.
    """

    level = logging.DEBUG

    consumer: str
    keys: int
    age: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepFailed(Event):
    """The upkeep of the partitions failed, or didn't trust the server's clock."""

    level = logging.WARNING
    advice = "run pillarbox doctor, which names the cause; then pillarbox maintain"

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingFailed(Event):
    """A span could not be started or ended. Messages are processed without it.

    Attributes:
        reason: the error.
    """

    level = logging.WARNING
    about = ()
    advice = (
        "check the span processors and the exporter, and the function that instrument()"
        " was given as attributes"
    )

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingRefused(Event):
    """A tracing setting is invalid, so this process traces no messages.

    Attributes:
        reason: the variable, its value, and the allowed values.
    """

    level = logging.WARNING
    advice = "correct the variable and restart the process"

    reason: str


Observer: TypeAlias = Callable[[Event], None]
"""Called in the task in which the event happens: it must be quick and never raise."""


class Observers:
    """Passes each event to all observers, and to the tracer if there is one."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)

    def notify(self, event: Event) -> None:
        """Call the observers in order."""
        for observer in self._observers:
            observer(event)
        if event.settles is not None and tracing.tracer is not None:
            tracing.tracer.observe(event)
