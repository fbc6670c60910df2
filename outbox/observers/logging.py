"""Write events to the standard library's logging, as names and values."""

import logging
from dataclasses import fields
from typing import Final

from typing_extensions import override

from outbox.events import Event
from outbox.table import printable

_MAX_VALUE: Final = 300


class PrintableFormatter(logging.Formatter):
    """Escapes what a terminal would obey, and indents each line but a record's first.

    So no text of a stranger, in whatever library's record, passes for a record.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Format a record, with its traceback."""
        return printable(super().format(record), lines=True).replace("\n", "\n    ")


class LogEvents:
    """An observer that logs each event under its level; payloads never appear."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("pillarbox")

    def __call__(self, event: Event) -> None:
        """Log one event, its fields also as `extra`."""
        if not self._logger.isEnabledFor(event.level):
            return
        values = {field.name: getattr(event, field.name) for field in fields(event)}
        text = " ".join(f"{name}={_short(value)}" for name, value in values.items())
        self._logger.log(
            event.level,
            "%s %s",
            type(event).__name__,
            text,
            extra={"event": type(event).__name__, "values": values},
        )


def _short(value: object) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    if not text or any(character.isspace() for character in text):
        text = repr(" ".join(text.split()))
    text = printable(text)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"
