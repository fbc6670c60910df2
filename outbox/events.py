"""Events as values: logs, metrics and tests observe them."""

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeAlias

from outbox import tracing
from outbox.errors import ConfigError, one_line, shorten, traceback_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverFailed(Event):
    """An observer raised. The others get the event, and the process goes on.

    Attributes:
        observer: its name.
        event: the event that it was called with.
        reason: the error.
    """

    level = logging.WARNING
    about = ("observer", "reason")
    advice = "correct the observer; it doesn't see such events"

    observer: str
    event: str
    reason: str
    stacktrace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed(Event):
    """A relay or a consumer ended by an error, or because its task was cancelled.

    Its messages wait for another process.

    Attributes:
        process: which one.
        reason: the error, which `run` and the end of the block also raise.
    """

    level = logging.WARNING
    advice = "correct the cause, and restart the process"
    waits_for = "restart"

    process: str
    reason: str
    stacktrace: str


Observer: TypeAlias = Callable[[Event], None]
"""Called in the task in which the event happens: it must be quick. If it raises,
`ObserverFailed` is logged, and the process goes on."""


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
                answer: Any = observer(event)
                if answer is not None:
                    _refuse_coroutine(answer)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 (no task may end by it)
                self._report(observer, event, error)
        if event.settles is not None and tracing.tracer is not None:
            tracing.tracer.observe(event)

    def _report(self, failed: Observer, event: Event, error: BaseException) -> None:
        report = ObserverFailed(
            observer=_name_of(failed),
            event=type(event).__name__,
            reason=one_line(error),
            stacktrace=traceback_of(error),
        )
        for observer in self._observers:
            if observer is not failed:
                with suppress(Exception):
                    observer(report)


def checked(observer: Observer) -> Observer:
    """Return an observer that can be called, and does its work when it is.

    Raises:
        ConfigError: it can't be called, or is a coroutine function.
    """
    if not callable(observer):
        raise ConfigError(
            f"observer {shorten(observer)}: can't be called; pass a function (event)"
        )
    if any(map(inspect.iscoroutinefunction, (observer, type(observer).__call__))):
        raise ConfigError(
            f"observer {_name_of(observer)}: is async, and nobody would await it; write"
            " def, and pass what takes long to a task or a queue of your own"
        )
    return observer


def _refuse_coroutine(answer: Any) -> None:
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("it returned a coroutine, which nobody awaits; write def")


def _name_of(observer: Observer) -> str:
    return getattr(observer, "__qualname__", type(observer).__qualname__)
