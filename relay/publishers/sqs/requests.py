"""Splits a batch into requests of up to ten entries, sent in parallel, keys in order.

The messages of a key form a *line*; a message without a key is a line of its own. Only
one request at a time contains entries of a line, which continues once that request is
answered, so concurrent requests never share a key.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from relay.publishers.sqs.destination import Destination

_MAX_ENTRIES: Final = 10

Line: TypeAlias = str | int
"""A key, or the index of a message without a key."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A message to send.

    Attributes:
        index: its position in the batch.
        size: its size in bytes, as AWS counts it.
        fields: the entry for the API, without its `Id`.
    """

    index: int
    line: Line
    place: Destination
    size: int
    fields: Mapping[str, Any]


class Requests:
    """The requests of one batch.

    Args:
        entries: in the order of the batch.
        strict: a request to a FIFO destination contains at most one entry of a line.
    """

    def __init__(self, entries: Iterable[Entry], *, strict: bool) -> None:
        self._strict = strict
        self._lines: dict[Line, deque[Entry]] = {}
        for entry in entries:
            self._lines.setdefault(entry.line, deque()).append(entry)
        self._ready: dict[Destination, deque[Line]] = {}
        for line in self._lines:
            self._make_ready(line)

    def take(self) -> list[Entry]:
        """Return the next request, which is empty if no line is ready."""
        if not self._ready:
            return []
        place, names = next(iter(self._ready.items()))
        del self._ready[place]
        taken: list[Entry] = []
        room = place.max_request_bytes
        while names and len(taken) < _MAX_ENTRIES:
            line = self._lines[names[0]]
            if line[0].size > room and taken:
                break
            names.popleft()
            room -= self._fill(taken, line, room)
        if names:
            # At the end, so that each destination gets its turn.
            self._ready[place] = names
        return taken

    def answered(
        self, request: Iterable[Entry], refused: Collection[Line]
    ) -> list[Entry]:
        """Continue the lines of a request; return the entries behind refused ones."""
        held_back: list[Entry] = []
        for name in {entry.line for entry in request}:
            if name in refused:
                held_back += self._lines[name]
                self._lines[name].clear()
            self._make_ready(name)
        return held_back

    def _fill(self, taken: list[Entry], line: deque[Entry], room: int) -> int:
        place = line[0].place
        alone = self._strict and place.fifo
        filled = 0
        while True:
            entry = line.popleft()
            taken.append(entry)
            filled += entry.size
            if (
                alone
                or len(taken) == _MAX_ENTRIES
                or not line
                or line[0].place != place
                or line[0].size > room - filled
            ):
                return filled

    def _make_ready(self, name: Line) -> None:
        if line := self._lines[name]:
            self._ready.setdefault(line[0].place, deque()).append(name)
