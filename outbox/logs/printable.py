"""Text that is safe to show or to paste: from other sources, escaped, and numbers."""

import shlex
from typing import Final


def printable(text: object, *, lines: bool = False) -> str:
    """Escape what a terminal would hide or interpret; the text stays on one line.

    These are the characters that Unicode classifies as control (C0, C1), format
    (direction overrides among them), surrogate, private use, unassigned or separator,
    except the space.

    Args:
        lines: leave line breaks and tabs as they are.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode()
        for c in text
    )


def for_shell(text: object) -> str:
    """Quote a text as one word of a command that people paste, also in a comment."""
    return shlex.quote(printable(text))


STRING: Final = "'"


def for_sql(text: object, quote: str = '"') -> str:
    """Quote a name, or with `STRING` a string, in SQL that people paste or that we run.

    Put no value into a comment of SQL: its text may end the comment.
    """
    return f"{quote}{str(text).replace(quote, quote * 2)}{quote}"


def count(number: int, what: str) -> str:
    """Write a number with a noun whose plural is regular: `1 lane`, `1,204 lanes`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
