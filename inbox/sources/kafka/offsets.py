"""The offset of a log that can be committed: every message before it is settled.

A log stores one offset per consumer: where to resume. So offsets that are settled out
of order wait here for the earlier ones.
"""

from collections import deque


class Offsets:
    """The offsets of one log since it was assigned.

    Attributes:
        position: where to resume after a crash; None until the first offset is settled.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._open: deque[int] = deque()
        self._settled: set[int] = set()
        self._last = -1

    def follows(self, offset: int) -> bool:
        """Return whether an offset is above all others; a log can have gaps."""
        return offset > self._last

    def add(self, offset: int) -> None:
        """Add an unsettled offset, which must be above all others."""
        if not self.follows(offset):
            raise ValueError(f"offset {offset} comes after {self._last}")
        self._last = offset
        self._open.append(offset)

    def settle(self, offset: int) -> bool:
        """Settle an offset that was added; return whether that moved the position."""
        self._settled.add(offset)
        moved = False
        while self._open and self._open[0] in self._settled:
            first = self._open.popleft()
            self._settled.remove(first)
            self.position = first + 1
            moved = True
        return moved
