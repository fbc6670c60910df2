"""The ids of messages that the broker confirmed in a call that raised nevertheless.

A batch of single requests may fail half-way. What was confirmed by then need not be
sent again when the relay comes with the same batch.
"""

import time
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from outbox.bounded_dict import BoundedDict

_MAX_AGE: Final = 300.0


class PublishedIds:
    """Remembers ids for five minutes at most, each until it is asked for."""

    def __init__(self) -> None:
        self._published_at: BoundedDict[UUID, float] = BoundedDict()

    def add(self, ids: Iterable[UUID]) -> None:
        """Remember ids; the oldest make room for them."""
        now = time.monotonic()
        for id in ids:
            self._published_at[id] = now

    def pop(self, id: UUID) -> bool:
        """Return whether a message was published lately, and forget it."""
        published_at = self._published_at.pop(id, None)
        return published_at is not None and time.monotonic() - published_at < _MAX_AGE
