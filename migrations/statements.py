"""Split scripts into statements: not every driver accepts several at once."""

import re
from collections.abc import Iterator
from typing import Final

_TOKEN: Final = re.compile(
    r"""
    --[^\n]*                                            # a comment
  | '(?:[^']|'')*'                                      # a string
  | "(?:[^"]|"")*"                                      # a quoted name
  | \$(?P<tag>(?:[A-Za-z_]\w*)?)\$ .*? \$(?P=tag)\$     # a body
  | (?P<word>[A-Za-z_]\w*)
  | (?P<end>;)
  | .
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENTS: Final = re.compile(r"(?:\s+|--[^\n]*)*")


def split_statements(script: str) -> Iterator[str]:
    """Yield the statements without their semicolons, with the comments before them.

    Handles only the syntax of pillarbox's files: no `E''`, no nested comments.
    Semicolons in a body that begins with `BEGIN ATOMIC` don't end the statement.
    """
    start = depth = 0
    before = ""
    for token in _TOKEN.finditer(script):
        if word := (token["word"] or "").upper():
            if word == "ATOMIC" and before == "BEGIN":
                depth = 1
            elif word == "CASE" and depth:
                depth += 1
            elif word == "END" and depth:
                depth -= 1
            before = word
        elif token["end"] and not depth:
            statement = script[start : token.start()].strip()
            if without_comments(statement):
                yield statement
            start = token.end()
    if without_comments(rest := script[start:].strip()):
        yield rest


def without_comments(statement: str) -> str:
    """Remove the comments before a statement."""
    return statement[_COMMENTS.match(statement).end() :]  # type: ignore[union-attr]
