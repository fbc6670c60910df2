"""Sizes for people, as PostgreSQL's `pg_size_pretty` writes them."""

from typing import Final

_UNITS: Final = ("bytes", "kB", "MB", "GB", "TB")


def write_size(count: float) -> str:
    """Write a number of bytes in the unit in which it has at most four digits."""
    unit = 0
    while count >= 10_000 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:,.0f} {_UNITS[unit]}"
