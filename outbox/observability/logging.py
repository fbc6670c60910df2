"""Log events with the standard library's logging, as names and values."""

import asyncio
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Final

from typing_extensions import override

from outbox.duration import exact_duration
from outbox.events import Event
from outbox.observability.printable import printable

STACKTRACE: Final = "stacktrace"
"""The field of an event that is logged on lines of its own, unless it is None."""

_MAX_VALUE: Final = 300
# For how many subjects repetitions are counted.
_MAX_REPEATED: Final = 10_000


class PrintableFormatter(logging.Formatter):
    """Escapes control characters, and indents each line of a record but its first.

    So foreign text, in a record of whatever library, can't look like another record.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with its traceback."""
        return printable(super().format(record), lines=True).replace("\n", "\n    ")


class LogEvents:
    """An observer that logs each event at its level; payloads never appear.

    Repetitions about one key are logged as one line with a count: the first event is
    logged at once, the following ones are summed up after `repeats`, and when the
    process ends. Safe to call from any thread.

    Args:
        logger: `pillarbox` if left out.
        repeats: for how long repetitions are collected.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        logger: logging.Logger | None = None,
        *,
        repeats: timedelta = timedelta(minutes=1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger or logging.getLogger("pillarbox")
        self._repeats = _Repeats(self._logger, repeats.total_seconds(), clock)
        # A bound method of this observer would keep it alive.
        weakref.finalize(self, self._repeats.sum_up_all)

    def __call__(self, event: Event) -> None:
        """Log one event, its fields also as `extra`."""
        self._repeats.sum_up_due()
        if not self._logger.isEnabledFor(event.level):
            return
        if not event.about or self._repeats.is_first(event):
            _log(self._logger, event)


@dataclass(slots=True)
class _Repeated:
    until: float
    last: Event
    count: int = 0


class _Repeats:
    """Events that were logged already, by their subject, oldest first."""

    def __init__(
        self, logger: logging.Logger, seconds: float, clock: Callable[[], float]
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._told: OrderedDict[object, _Repeated] = OrderedDict()
        self._lock = threading.Lock()
        self._wakes = False

    def is_first(self, event: Event) -> bool:
        """Count an event; return whether to log it now."""
        subject = (type(event), *(getattr(event, name) for name in event.about))
        with self._lock:
            told = self._told.get(subject)
            if told is not None:
                told.last = event
                told.count += 1
            else:
                until = self._clock() + self._seconds
                self._told[subject] = _Repeated(until, event)
            too_many = len(self._told) > _MAX_REPEATED
            self._wake_later()
        if too_many:
            self._sum_up(lambda _: len(self._told) > _MAX_REPEATED)
        return told is None

    def sum_up_due(self) -> None:
        """Log repetitions that have been collected for long enough."""
        if self._told:
            now = self._clock()
            self._sum_up(lambda told: told.until <= now)

    def sum_up_all(self) -> None:
        """Log all repetitions so far."""
        self._sum_up(lambda _: True)

    def _sum_up(self, is_over: Callable[[_Repeated], bool]) -> None:
        over = []
        with self._lock:
            while self._told and is_over(next(iter(self._told.values()))):
                subject, told = self._told.popitem(last=False)
                if told.count:
                    over.append(told)
                    if told.until <= self._clock():
                        # It goes on: the next one is summed up, too.
                        until = self._clock() + self._seconds
                        self._told[subject] = _Repeated(until, told.last)
        for told in over:
            _log(self._logger, told.last, repeated=told.count)

    def _wake_later(self) -> None:
        """Log repetitions in time, even if no other event comes."""
        if self._wakes:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._wakes = True
        loop.call_later(self._seconds, self._woken)

    def _woken(self) -> None:
        self._wakes = False
        self.sum_up_due()
        with self._lock:
            if self._told:
                self._wake_later()


def _log(logger: logging.Logger, event: Event, **more: object) -> None:
    values = {field.name: getattr(event, field.name) for field in fields(event)} | more
    # Too long for one line, and for a summary.
    trace = values.pop(STACKTRACE, None)
    text = " ".join(f"{name}={_short(value)}" for name, value in values.items())
    if trace is not None and not more:
        values[STACKTRACE] = trace
        text += "\n" + printable(trace, lines=True).rstrip()
    logger.log(
        event.level,
        "%s %s",
        type(event).__name__,
        text,
        extra={"event": type(event).__name__, "values": values},
    )


def _short(value: object) -> str:
    if isinstance(value, timedelta):
        value = exact_duration(value)
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    if not text or any(character.isspace() for character in text):
        text = repr(" ".join(text.split()))
    text = printable(text)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"
