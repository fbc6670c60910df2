"""The offset that may be committed: that of the first unsettled message of a log.

Kafka keeps one offset for a consumer: where to continue. So messages that are settled
out of order wait here for those before them.
"""

from collections import deque


class Offsets:
    """The offsets of one log since it was assigned.

    Attributes:
        position: where to continue after a crash; None until something is settled.
    """

    def __init__(self) -> None:
        self.position: int | None = None
        self._open: deque[int] = deque()
        self._settled: set[int] = set()
        self._last = -1

    def follows(self, offset: int) -> bool:
        """Return whether an offset is above all others; offsets may have gaps."""
        return offset > self._last

    def add(self, offset: int) -> None:
        """Add the next offset, unsettled."""
        if not self.follows(offset):
            raise ValueError(f"offset {offset} comes after {self._last}")
        self._last = offset
        self._open.append(offset)

    def settle(self, offset: int) -> bool:
        """Settle an offset; return whether that moved the position."""
        self._settled.add(offset)
        moved = False
        while self._open and self._open[0] in self._settled:
            first = self._open.popleft()
            self._settled.remove(first)
            self.position = first + 1
            moved = True
        return moved
