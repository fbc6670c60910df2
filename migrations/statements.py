"""Split scripts into statements: not every driver accepts several at once."""

import re
from collections.abc import Iterator
from typing import Final

_STATEMENT: Final = re.compile(
    r"""(?: --[^\n]*                                      # a comment
          | '(?:[^']|'')*'                                # a string
          | "(?:[^"]|"")*"                                # a quoted name
          | \$(?P<tag>(?:[A-Za-z_]\w*)?)\$ .*? \$(?P=tag)\$  # a body
          | \bBEGIN\s+ATOMIC\b (?: \bCASE\b .*? \bEND\b | (?!\bEND\b) . )*
          | [^;] )+""",
    re.VERBOSE | re.DOTALL,
)
_COMMENTS: Final = re.compile(r"(?:\s+|--[^\n]*)*")


def split_statements(script: str) -> Iterator[str]:
    """Yield the statements without their semicolons, with the comments before them.

    Handles only the syntax of pillarbox's files: no `E''`, no nested comments, no
    nested `CASE` in a body that begins with `BEGIN ATOMIC`.
    """
    for found in _STATEMENT.finditer(script):
        statement = found[0].strip()
        if without_comments(statement):
            yield statement


def without_comments(statement: str) -> str:
    """Remove the comments before a statement."""
    return statement[_COMMENTS.match(statement).end() :]  # type: ignore[union-attr]
