"""Messages that the broker took, in a call that could not tell the relay so.

A batch of single requests may fail half-way. What it had confirmed by then need not
be sent a second time when the relay comes with the same batch again.
"""

import time
from collections.abc import Iterable
from typing import Final
from uuid import UUID

_MAX_IDS: Final = 10_000
_MAX_AGE: Final = 300.0


class Taken:
    """Remembers ids for a while, each until it is asked for."""

    def __init__(self) -> None:
        self._taken_at: dict[UUID, float] = {}

    def add(self, ids: Iterable[UUID]) -> None:
        """Remember what was taken; the oldest make room."""
        self._taken_at.update(dict.fromkeys(ids, time.monotonic()))
        while len(self._taken_at) > _MAX_IDS:
            del self._taken_at[next(iter(self._taken_at))]

    def pop(self, id: UUID) -> bool:
        """Tell whether a message was taken lately, and forget it."""
        taken_at = self._taken_at.pop(id, None)
        return taken_at is not None and time.monotonic() - taken_at < _MAX_AGE
