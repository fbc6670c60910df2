"""PostgreSQL array literals, written by one `str.join` each.

A driver that is given lists looks at every element's type and quoting in Python: 90 µs
for the ten arrays of ten messages with psycopg, of 260 µs for the whole statement.
"""

from collections.abc import Iterable


def plain_array(values: Iterable[object]) -> str:
    """Write values whose text needs no quotes: numbers, UUIDs, None."""
    return "{" + ",".join("NULL" if v is None else str(v) for v in values) + "}"


def text_array(values: Iterable[str | None]) -> str:
    """Write texts, quoted and escaped as the manual says (8.15.6)."""
    return (
        "{"
        + ",".join(
            "NULL"
            if value is None
            else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
            for value in values
        )
        + "}"
    )


def moment_array(values: Iterable[object]) -> str:
    """Write moments, which have spaces in them, or None."""
    return text_array(None if value is None else str(value) for value in values)


def bytes_array(values: Iterable[bytes]) -> str:
    """Write bytes in hex format."""
    return "{" + ",".join(f'"\\\\x{value.hex()}"' for value in values) + "}"
