"""Lists as tables of plain text, for people."""

from collections.abc import Sequence
from typing import Final

_GAP: Final = "  "


def draw_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Draw rows under the names of their columns, each on one line.

    What can't be printed is escaped: a table may show what strangers wrote.
    """
    cells = [list(names), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "".join(
        _GAP.join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        + "\n"
        for row in cells
    )


def _cell(value: object) -> str:
    return "-" if value is None else printable(" ".join(str(value).split()))


def printable(text: object, *, lines: bool = False) -> str:
    """Escape what a terminal would not show, or would obey, so that it stays one line.

    That is whatever Unicode counts as control (C0, C1), format (overrides of direction
    among them), surrogate, private or separator, but the space.

    Args:
        lines: line breaks and tabs stay as they are.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode()
        for c in text
    )
