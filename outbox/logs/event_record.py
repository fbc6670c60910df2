"""An event as a record of the standard library's logging: its name and its fields."""

import logging
import re
from dataclasses import fields
from datetime import timedelta
from typing import Final

from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.events import Event
from pillarbox.outbox.logs.printable import printable

STACKTRACE: Final = "stacktrace"
"""The field of an event that is logged on separate lines, unless it is None."""

_MAX_VALUE: Final = 300
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id of a W3C `traceparent`; None if it isn't one."""
    found = _TRACEPARENT.match(traceparent or "")
    return None if found is None or found[1] == "0" * 32 else found[1]


def log_event(
    logger: logging.Logger, event: Event, *, level: int | None = None, **more: object
) -> None:
    """Log one event, its fields also as `extra`.

    Args:
        level: by default the event's own.
        more: values to log in addition to its fields.
    """
    level = level or event.level
    values = {it.name: getattr(event, it.name) for it in fields(event) if it.repr}
    if event.advice is not None and level >= logging.WARNING:
        values["remedy"] = event.advice
    values |= more
    extra = {"event": type(event).__name__, "values": values}
    trace_id = trace_id_of(getattr(event, "traceparent", None))
    if trace_id is not None:
        extra["trace_id"] = trace_id
    # A stack trace is too long for one line, and for a summary.
    trace = values.pop(STACKTRACE, None)
    text = " ".join(f"{name}={_short(value)}" for name, value in values.items())
    if trace is not None and not more:
        values[STACKTRACE] = trace
        text += "\n" + printable(trace, lines=True).rstrip()
    # `fileConfig`, which Alembic's env.py calls, disables the loggers that exist.
    logger.disabled = False
    logger.log(level, "%s %s", type(event).__name__, text, extra=extra)


def _short(value: object) -> str:
    if isinstance(value, timedelta):
        value = exact_duration(value)
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    if not text or any(character.isspace() for character in text):
        text = repr(" ".join(text.split()))
    text = printable(text)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"
