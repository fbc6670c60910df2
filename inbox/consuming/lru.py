"""What was noted about messages of late, by their ids."""

from typing import Final, Generic, TypeVar
from uuid import UUID

T = TypeVar("T")

_MAX_IDS: Final = 10_000


class Recent(Generic[T]):
    """Notes on the ids noted last; the oldest are forgotten."""

    def __init__(self, max_ids: int = _MAX_IDS) -> None:
        self._max_ids = max_ids
        self._notes: dict[UUID, T] = {}

    def note(self, id: UUID, note: T) -> None:
        """Keep a note, instead of the one there is."""
        self._notes.pop(id, None)
        self._notes[id] = note
        if len(self._notes) > self._max_ids:
            del self._notes[next(iter(self._notes))]

    def get(self, id: UUID) -> T | None:
        """Give what was noted."""
        return self._notes.get(id)

    def forget(self, id: UUID) -> None:
        """Forget it, if there is anything."""
        self._notes.pop(id, None)
