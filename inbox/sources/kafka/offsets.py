"""What of a log may be committed: the settled messages before all that are not.

A log knows only one offset for a consumer: where to go on. So what is settled out of
order waits here for what came before it.
"""

from collections import deque


class Offsets:
    """The offsets of one log since it was assigned.

    Attributes:
        position: where to go on after a crash; None while nothing was settled.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._open: deque[int] = deque()
        self._settled: set[int] = set()
        self._last = -1

    def follows(self, offset: int) -> bool:
        """Return whether an offset is above all others; a log may leave some out."""
        return offset > self._last

    def add(self, offset: int) -> None:
        """Enter an offset that follows, unsettled."""
        if not self.follows(offset):
            raise ValueError(f"offset {offset} comes after {self._last}")
        self._last = offset
        self._open.append(offset)

    def settle(self, offset: int) -> bool:
        """Settle an offset that was added; tell whether that moved the position."""
        self._settled.add(offset)
        moved = False
        while self._open and self._open[0] in self._settled:
            first = self._open.popleft()
            self._settled.remove(first)
            self.position = first + 1
            moved = True
        return moved
