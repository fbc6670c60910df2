"""Durations, moments and rates as people write them: 90s, 6h, 7d, 2w; 10/s, 500/h."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from pillarbox.outbox.errors import ConfigError, check_type, shorten

_UNITS: Final = {
    "s": "seconds",
    "m": "minutes",
    "h": "hours",
    "d": "days",
    "w": "weeks",
}
_SIZES: Final = tuple(
    (timedelta(**{name: 1}), unit)
    for unit, name in reversed(_UNITS.items())
    if unit != "w"  # a week is usually written as 7d
)
_MANY: Final = 1000
_NUMBER: Final = r"[0-9]{1,6}(?:\.[0-9]{1,6})?"
_DURATION: Final = re.compile(
    "".join(f"(?:({_NUMBER}){unit})?" for unit in reversed(_UNITS))
)
_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(?:/([smh]))?")


def read_duration(field: str, text: str) -> timedelta:
    """Read a duration, such as `90s` or `1h30m`.

    Raises:
        ConfigError: it is not a number followed by s, m, h, d or w, or several of
            them, the largest unit first; the message begins with `field`.
    """
    match = _DURATION.fullmatch(text) if text else None
    if match is None:
        raise ConfigError(
            f"{field} {shorten(text)}: write 90s, 15m, 6h, 7d, 2w or 1h30m"
        )
    numbers = zip(reversed(_UNITS.values()), match.groups(), strict=True)
    return timedelta(**{name: float(number or 0) for name, number in numbers})


def read_moment(field: str, text: str) -> datetime:
    """Read a moment: `2026-01-31T14:00Z`, or how long ago it was, such as `6h`.

    Raises:
        ConfigError: it has another form, or no time zone; the message begins with
            `field`.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return datetime.now(UTC) - read_duration(field, text)
        except (ConfigError, OverflowError):
            moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"{field} {shorten(text)}: write a moment with its time zone such as "
            "2026-01-31T14:00Z, or how long ago: 90s, 15m, 6h, 7d, 2w or 1h30m"
        )
    return moment


def check_duration(field: str, value: object) -> None:
    """Refuse a setting that isn't a duration, such as a number of seconds.

    Raises:
        ConfigError: it isn't a `timedelta`.
    """
    check_type(field, value, timedelta, "pass timedelta(seconds=…)")


def write_duration(duration: timedelta) -> str:
    """Write a duration in its largest unit up to days, rounded down, for display."""
    seconds = max(0.0, duration.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def brief_duration(duration: timedelta) -> str:
    """Write how long something took, such as 38ms, 1.2s, 7m or 3h.

    A negative duration, where two clocks differ, has a minus sign.
    """
    if duration < timedelta(0):
        return f"-{brief_duration(-duration)}"
    if duration < timedelta(seconds=1):
        return f"{duration / timedelta(milliseconds=1):.0f}ms"
    if duration < timedelta(minutes=1):
        return f"{duration.total_seconds():.1f}s"
    return write_duration(duration)


def exact_duration(duration: timedelta) -> str:
    """Write a duration as a person would type it, so that `read_duration` reads it.

    It has one unit if the number is small, as in 36h, else several, as in 6d1h20m.
    `read_duration` rejects it if it is negative or has more than six digits of days.
    """
    if duration < timedelta(0):
        return f"-{exact_duration(-duration)}"
    for size, unit in _SIZES:
        count, rest = divmod(duration, size)
        if duration and not rest and (unit == "d" or count < _MANY):
            return f"{count}{unit}"
    text = ""
    for size, unit in _SIZES[:-1]:
        count, duration = divmod(duration, size)
        text += f"{count}{unit}" if count else ""
    if duration or not text:
        seconds, rest = divmod(duration, timedelta(seconds=1))
        text += f"{seconds}.{rest.microseconds:06}".rstrip("0").rstrip(".") + "s"
    return text


def write_rate(per_second: float) -> str:
    """Write a rate for display, such as 0.2/s, 12/s or 1,204/s."""
    if 0 < per_second < 0.1:
        return "under 0.1/s"
    return f"{per_second:.1f}/s" if 0 < per_second < 10 else f"{per_second:,.0f}/s"


def read_rate(field: str, text: str) -> float:
    """Read a rate per second: `10/s`, `90/m`, `500/h`, or a number alone, as in `10`.

    Raises:
        ConfigError: it has another form, or is 0; the message begins with `field`.
    """
    match = _RATE.fullmatch(text)
    number = 0.0 if match is None else float(match[1])
    if match is None or not number:
        raise ConfigError(f"{field} {shorten(text)}: write 10/s, 90/m or 500/h")
    return number / {"s": 1, "m": 60, "h": 3600, None: 1}[match[2]]
