"""Durations as people write them: 90s, 15m, 6h, 7d, 2w."""

import re
from datetime import timedelta
from typing import Final

from outbox.errors import ConfigError

_UNITS: Final = {
    "s": "seconds",
    "m": "minutes",
    "h": "hours",
    "d": "days",
    "w": "weeks",
}
_DURATION: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([smhdw])")


def read_duration(field: str, text: str) -> timedelta:
    """Read a duration.

    Raises:
        ConfigError: it is written otherwise.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{field} {text!r}: write 90s, 15m, 6h, 7d or 2w")
    return timedelta(**{_UNITS[match[2]]: float(match[1])})


def write_duration(duration: timedelta) -> str:
    """Write a duration in its largest unit, rounded down."""
    seconds = max(0.0, duration.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def read_rate(field: str, text: str) -> float:
    """Read how many a second: 10/s, 90/m, 500/h, or a number alone for seconds.

    Raises:
        ConfigError: it is written otherwise, or is none.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(?:/([smh]))?", text)
    number = 0.0 if match is None else float(match[1])
    if match is None or not number:
        raise ConfigError(f"{field} {text!r}: write 10/s, 90/m or 500/h")
    return number / {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]
