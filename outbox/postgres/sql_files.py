"""The SQL of pillarbox's processes: one statement per file, named after its caller."""

import re
from datetime import datetime
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final, LiteralString

_PLACEHOLDER: Final = re.compile(r"%(?:%|\((\w+)\)s)")
_PARTS: Final = ("leased", "uncovered")
"""Parts that several claims include, as `{leased}`."""


@cache
def load(package: str, name: str) -> LiteralString:
    """Read the statement `name` of `outbox`, `outbox/log`, `relay` or `inbox`.

    The files are part of the distribution, so their text is as trusted as a literal.
    """
    file = files(f"pillarbox.{package}").joinpath("sql", f"{name}.sql")
    text = file.read_text(encoding="utf-8")
    for part in _PARTS:
        if (mark := f"{{{part}}}") in text:
            *_, body = load("outbox.log", part).split("\n", 4)
            text = text.replace(mark, body.rstrip())
    return text  # type: ignore[return-value,unused-ignore]


@lru_cache(maxsize=64)
def load_numbered(
    package: str, name: str, **moments: datetime
) -> tuple[LiteralString, tuple[str, ...]]:
    """Read a statement for a cursor that takes `$1`, and the parameters' names in turn.

    Other cursors of psycopg convert the placeholders, and do so again at each execution
    of a statement of more than 4,096 characters.

    Args:
        moments: parameters that become part of the text, so that its prepared plan
            leaves out the partitions that it doesn't read.
    """
    names: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        name = found[1]
        if name in moments:
            return f"'{moments[name].isoformat(' ')}'::timestamptz"
        return "%" if name is None else f"${names.setdefault(name, len(names) + 1)}"

    text = _PLACEHOLDER.sub(number, load(package, name))
    return text, tuple(names)  # type: ignore[return-value,unused-ignore]
