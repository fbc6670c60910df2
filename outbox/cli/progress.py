"""A bar on the terminal while a command takes long; nothing where there is none."""

import sys
import time
from collections.abc import Mapping
from typing import Final, TextIO

_WIDTH: Final = 30
_INTERVAL: Final = 0.1


class Progress:
    """Draws how much of `total` is done, with counts beside it.

    Args:
        output: drawn on only if it is a terminal.
    """

    def __init__(self, total: int, output: TextIO = sys.stderr) -> None:
        self._total = total
        self._output = output
        self._visible = output.isatty() and total > 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def show(self, done: int, counts: Mapping[str, int]) -> None:
        """Draw anew, unless it was just drawn and there is more to come."""
        now = time.monotonic()
        if not self._visible or (done < self._total and now - self._drawn < _INTERVAL):
            return
        self._drawn = now
        filled = _WIDTH * done // self._total
        rate = done / max(now - self._started, 1e-6)
        said = "".join(f"  {count} {name}" for name, count in counts.items() if count)
        self._output.write(
            f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{self._total}"
            f"  {rate:.1f}/s{said}\x1b[K"
        )
        self._output.flush()

    def end(self) -> None:
        """Leave the bar as it is, and go to the next line."""
        if self._visible and self._drawn:
            self._output.write("\n")
            self._output.flush()
