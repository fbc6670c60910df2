"""Events as values: logs, metrics and tests observe them."""

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import ClassVar, TypeAlias
from uuid import UUID

from pillarbox.outbox import tracing
from pillarbox.outbox.errors import ConfigError, one_line, traceback_of


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
    """The state of a relay or a consumer, reported every few seconds.

    Attributes:
        name: the consumer's name; `main` for a relay.
        in_flight: batches that are being published, or running handlers.
        held: a consumer's messages that were fetched and are not settled yet, including
            those in flight; the lanes that a relay leases.
        blocked_keys: keys whose first message waits for its retry; a relay counts at
            most as many in a lane as a claim can carry.
        blocked_for: the longest time that a consumer's key has been blocked.
        failing_since: since when it has been failing; None if nothing fails.
        reason: the last failure.
        running_id: the message of the handler that has been running for longest, if for
            longer than a few seconds; one that is overdue comes first.
        running_due: when it is or was overdue; None: never.
        standing_by: the topics that another replica of the consumer receives.
        paused: the topics, and prefixes followed by `*`, that are paused.
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
    running_id: UUID | None = None
    running_handler: str | None = None
    running_since: datetime | None = None
    running_due: datetime | None = None
    standing_by: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()

    @property
    def is_overdue(self) -> bool:
        """Whether that handler is overdue."""
        return self.running_due is not None and self.running_due <= datetime.now(UTC)


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
        "check the span processors, the exporter, and the attributes function passed"
        " to instrument()"
    )

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverFailed(Event):
    """An observer raised. The others get the event, and the process continues."""

    level = logging.WARNING
    about = ("observer", "reason")
    advice = "fix the observer; until then it misses such events"

    observer: str
    reason: str
    stacktrace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed(Event):
    """A relay or a consumer ended with an error, or because its task was cancelled.

    `run`, or the end of its block, raises the error.
    """

    level = logging.WARNING
    advice = "fix the cause, and restart the process"
    waits_for = "restart"

    process: str
    reason: str
    stacktrace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDelayed(Event):
    """A command can't start yet; it tries again within a second.

    Attributes:
        reason: the error.
        remedy: what to do if the wait doesn't end by itself.
        waited: for how long it has tried to start.
    """

    about = ("reason",)
    lasting_level = logging.WARNING

    reason: str
    remedy: str
    waited: timedelta


Observer: TypeAlias = Callable[[Event], None]
"""Called in the task in which the event happens: it must be quick, and not raise."""


class Observers:
    """Passes each event to all observers, and to the tracer if there is one.

    Raises:
        ConfigError: `checked` refuses an observer.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(map(checked, observers))

    def notify(self, event: Event) -> None:
        """Call the observers in order."""
        for observer in self._observers:
            try:
                observer(event)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 (no task may end by it)
                self._report(observer, error)
        if event.settles is not None and tracing.tracer is not None:
            tracing.tracer.observe(event)

    def _report(self, failed: Observer, error: BaseException) -> None:
        name, trace = name_of(failed), traceback_of(error)
        report = ObserverFailed(observer=name, reason=one_line(error), stacktrace=trace)
        for observer in self._observers:
            with suppress(BaseException):
                observer(report)


def checked(observer: Observer) -> Observer:
    """Return an observer, unless it can't be called, or is a coroutine function.

    Raises:
        ConfigError: it is one of these.
    """
    called = getattr(observer, "__call__", None)  # noqa: B004 (asks what it calls)
    if called is None:
        problem = "can't be called; pass a function (event)"
    elif any(map(inspect.iscoroutinefunction, (observer, called))):
        problem = "is async, but observers aren't awaited; write def"
    else:
        return observer
    raise ConfigError(f"observer {name_of(observer)}: {problem}")


def name_of(function: object) -> str:
    """Return the name of a function, or the class of another callable object."""
    return getattr(function, "__qualname__", type(function).__qualname__)
