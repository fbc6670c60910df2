"""Log events with the standard library's logging, as names and values."""

import logging
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from typing_extensions import override

from pillarbox.outbox.events import Event, Observer
from pillarbox.outbox.logs.event_record import log_event
from pillarbox.outbox.logs.printable import printable

# The maximum number of subjects whose repetitions are counted.
_MAX_REPEATED: Final = 10_000


class PrintableFormatter(logging.Formatter):
    """Escapes control characters, and indents all lines of a record but the first.

    As a result, text from outside can't look like another record, whatever library
    logs it.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with its traceback."""
        return printable(super().format(record), lines=True).replace("\n", "\n    ")


class TraceContext(logging.Filter):
    """Adds the `trace_id` and `span_id` of OpenTelemetry's current span to each record.

    Add it to a handler. It imports nothing: if the process doesn't use OpenTelemetry,
    or outside a span, a record keeps the trace id of its event, if the event has one.
    """

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids; let every record pass."""
        trace: Any = sys.modules.get("opentelemetry.trace")
        if trace is not None:
            context = trace.get_current_span().get_span_context()
            if context.is_valid:
                record.trace_id = f"{context.trace_id:032x}"
                record.span_id = f"{context.span_id:016x}"
        return True


class LogEvents:
    """An observer that logs each event at its level; payloads never appear.

    Repeated events about one subject are logged as one line with a count: the first
    event is logged at once, and the following ones are summed up with the first event
    after `repeats`, when an event ends them, and when the process ends. Relays and
    consumers have an event every five seconds. At DEBUG, each of them is logged,
    too. An event that still repeats after `repeats` is logged at its `lasting_level`.
    Safe to call from any thread.

    Args:
        repeats: how long repetitions are collected.
        clock: returns seconds; for tests.
    """

    def __init__(
        self,
        *,
        repeats: timedelta = timedelta(minutes=1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logging.getLogger("pillarbox")
        self._repeats = _Repeats(self._logger, repeats.total_seconds(), clock)
        # A bound method of this observer would keep it alive.
        weakref.finalize(self, self._repeats.sum_up_all)

    def __call__(self, event: Event) -> None:
        """Log one event, with its fields also as `extra`."""
        if self._repeats.has_any:
            self._repeats.sum_up_due()
            if event.ends:
                self._repeats.end(event.ends)
        if not self._logger.isEnabledFor(event.lasting_level or event.level):
            return
        if event.about is None or self._repeats.is_first(event):
            log_event(self._logger, event)
        elif self._logger.isEnabledFor(logging.DEBUG):
            log_event(self._logger, event, level=logging.DEBUG)


def logged(observers: Iterable[Observer]) -> list[Observer]:
    """Return these observers and, unless one of them logs, one that does.

    An embedded process then logs what its command would have logged.
    """
    given = list(observers)
    if any(isinstance(observer, LogEvents) for observer in given):
        return given
    return [LogEvents(), *given]


@dataclass(slots=True)
class _Repeated:
    until: float
    last: Event
    count: int = 0


class _Repeats:
    """Events that have been logged, by subject, oldest first."""

    def __init__(
        self, logger: logging.Logger, seconds: float, clock: Callable[[], float]
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._repeated: OrderedDict[tuple[object, ...], _Repeated] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def has_any(self) -> bool:
        """Whether an event that can repeat has been logged."""
        return bool(self._repeated)

    def is_first(self, event: Event) -> bool:
        """Count an event; return whether to log it now."""
        about = event.about or ()
        subject = (type(event), *(getattr(event, name) for name in about))
        with self._lock:
            entry = self._repeated.get(subject)
            if entry is not None:
                entry.last = event
                entry.count += 1
            else:
                until = self._clock() + self._seconds
                self._repeated[subject] = _Repeated(until, event)
            too_many = len(self._repeated) > _MAX_REPEATED
        if too_many:
            self._sum_up(lambda _: len(self._repeated) > _MAX_REPEATED)
        return entry is None

    def sum_up_due(self) -> None:
        """Log repetitions that have been collected for long enough."""
        if self._repeated:
            now = self._clock()
            self._sum_up(lambda entry: entry.until <= now)

    def sum_up_all(self) -> None:
        """Log all repetitions so far."""
        self._sum_up(lambda _: True)

    def end(self, kinds: tuple[type[Event], ...]) -> None:
        """Log the repetitions of these events so far; the next one counts as new."""
        over = []
        with self._lock:
            for subject in [it for it in self._repeated if it[0] in kinds]:
                entry = self._repeated.pop(subject)
                if entry.count:
                    over.append(entry)
        for entry in over:
            log_event(self._logger, entry.last, repeated=entry.count)

    def _sum_up(self, is_over: Callable[[_Repeated], bool]) -> None:
        over = []
        with self._lock:
            while self._repeated and is_over(next(iter(self._repeated.values()))):
                subject, entry = self._repeated.popitem(last=False)
                if entry.count:
                    lasts = entry.until <= self._clock()
                    over.append((entry, lasts))
                    if lasts:
                        # It is still repeating, so the next ones are summed up, too.
                        until = self._clock() + self._seconds
                        self._repeated[subject] = _Repeated(until, entry.last)
        for entry, lasts in over:
            level = entry.last.lasting_level if lasts else None
            log_event(self._logger, entry.last, level=level, repeated=entry.count)
