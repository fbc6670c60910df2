"""The output of commands: tables, JSON, and their progress on a terminal."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.logs.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

    from pillarbox.outbox.administration.check import Finding

Show: TypeAlias = Callable[[int], None]
"""Shows how much is done."""

_NO_LIMIT: Final = 1_000_000


def write_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under the names of their columns.

    On a terminal, long cells are folded to fit. In a pipe or a file, each row is on one
    line, complete and without colours. Unprintable characters are escaped, and a
    duration is in its largest unit.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
        # Ids and numbers are never folded; long values are in the last column.
        column.no_wrap = not sys.stdout.isatty()
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    draw(table)


def branch(text: str, below: Iterable["Tree"] = ()) -> "Tree":
    """Return a line of a tree for `draw`; unprintable characters are escaped."""
    from rich.text import Text
    from rich.tree import Tree

    made = Tree(Text(printable(text)))
    made.children += below
    return made


def draw(renderable: "RenderableType") -> None:
    """Print what Rich renders: on a terminal to fit, else in full, without colours."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    drawn = io.StringIO()
    Console(
        file=drawn,
        force_terminal=terminal,
        no_color=not terminal,
        width=shutil.get_terminal_size().columns if terminal else _NO_LIMIT,
        markup=False,
        highlight=False,
        emoji=False,
    ).print(renderable)
    sys.stdout.writelines(
        f"{line.rstrip()}\n" for line in drawn.getvalue().split("\n")[:-1]
    )


def write_json(value: Any) -> None:
    """Print a value as JSON; `to_json` converts what JSON can't represent."""
    sys.stdout.write(f"{json.dumps(value, indent=2, default=to_json)}\n")


def to_json(value: object) -> object:
    """Return a dataclass as its fields, a duration in seconds, and the rest as text.

    Moments are in ISO 8601.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else str(value)


def write_line(*texts: object) -> None:
    """Print each text on a line; escape what a terminal would interpret."""
    sys.stdout.writelines(f"{printable(text)}\n" for text in texts)


def lines_of(finding: "Finding") -> Iterator[str]:
    """Yield the two lines that show a finding."""
    yield f"{finding.severity:<8} {finding.check}: {finding.finding}"
    yield f"         {finding.remedy}"


def warn(text: object) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"pillarbox: {printable(text)}\n")


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case timedelta():
            return write_duration(value)
        case datetime():
            return f"{value:%F %T%z}"
    return printable(" ".join(str(value).split()))


@contextmanager
def progress(total: int) -> Iterator[Show]:
    """Show on a terminal how much of a long command is done.

    If the command fails or is interrupted, say it on standard error, terminal or not.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    with Progress(
        MofNCompleteColumn(),
        console=Console(stderr=True),
        redirect_stdout=False,
        redirect_stderr=False,
        disable=total <= 0 or not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def show(count: int) -> None:
            nonlocal done
            done = count
            bar.update(task, completed=count)

        try:
            yield show
        except BaseException:
            sys.stderr.write(f"{min(done, total)} of {total} were done\n")
            raise
