"""Events as values: logs, metrics and tests observe them."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar, TypeAlias

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
    """The events whose condition ends with this one, and their repetitions."""

    advice: ClassVar[str | None] = None
    """What an operator should do. A log shows it as `remedy`, at WARNING. An event
    whose remedy depends on the case has a field of that name instead."""

    waits_for: ClassVar[str | None] = None
    """What the process waits for from this event until one that `ends` it; until then
    it isn't ready, and counts as failing."""

    settles: ClassVar[str | None] = None
    """How the event settled a message, such as `"retry"`: traces show the event under
    this name. Such events have the fields `id`, `topic`, `reason` and `traceparent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMeasured(Event):
    """How a relay or a consumer does, reported every few seconds.

    Attributes:
        name: the consumer's name; `main` for a relay.
        in_flight: batches that are being published, or running handlers.
        held: a consumer's messages that were fetched and are not settled yet, including
            those in flight; the lanes that a relay leases.
        blocked_keys: keys whose first message waits for its retry. For a lane of a
            relay with more of them than a claim can carry, that maximum.
        blocked_for: how long the first of a consumer's keys has waited.
        failing_since: since when something has kept failing; None if nothing fails.
        reason: the last failure.
    """

    level = logging.DEBUG

    kind: str
    name: str
    in_flight: int
    held: int
    blocked_keys: int
    blocked_for: timedelta | None = None
    failing_since: datetime | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingFailed(Event):
    """A span could not be started or ended. Messages are processed without it.

    It is only logged: it can happen in any thread, and outside of relays and consumers.

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
