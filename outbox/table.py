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


def printable(text: str) -> str:
    """Escape what a terminal would not show, or would obey; line breaks stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in text
    )
