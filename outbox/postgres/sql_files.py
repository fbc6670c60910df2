"""The SQL of pillarbox's processes: one statement per file, named after its caller."""

from functools import cache
from importlib.resources import files
from typing import LiteralString


@cache
def load(package: str, name: str) -> LiteralString:
    """Read the statement `name` of `outbox`, `relay` or `inbox`.

    The files are part of the distribution, so their text is as trusted as a literal.
    """
    file = files(package).joinpath("sql", f"{name}.sql")
    return file.read_text(encoding="utf-8")  # type: ignore[return-value,unused-ignore]
