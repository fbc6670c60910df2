"""Select dead letters by what they have in common, or by id."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pillarbox.outbox.array_literal import plain_array
from pillarbox.outbox.dead_letters.letter import Status


class ListPosition(NamedTuple):
    """The position of a dead letter in a list ordered by time."""

    created_at: datetime
    id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """The criteria by which dead letters are selected; None matches any value.

    Attributes:
        ids: of the dead letters, or of their messages; none selects all.
        topic: a topic, or a prefix followed by `*`.
        error: part of the reason; upper and lower case are the same.
        origin: what dead-lettered the message: `relay:main`, `consumer:billing`.
        reason: the first 80 characters of the reason, exactly.
        since: dead-lettered then or later.
        until: dead-lettered then or earlier.
        before: only those that come after this one in a list, newest first.
        after: only those that come after this one in a list, oldest first.
        max_rows: at most this many.
    """

    status: Status | None = Status.PENDING
    ids: tuple[UUID, ...] = ()
    topic: str | None = None
    key: str | None = None
    tenant: str | None = None
    origin: str | None = None
    reason: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    before: ListPosition | None = None
    after: ListPosition | None = None
    max_rows: int | None = None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the statements that list and find."""
        many = self.topic is not None and self.topic.endswith("*")
        before_at, before_id = self.before or (None, None)
        after_at, after_id = self.after or (None, None)
        return {
            "ids": plain_array(self.ids) if self.ids else None,
            "status": None if self.status is None else self.status.value,
            "topic": None if many else self.topic,
            "topic_prefix": self.topic[:-1] if many and self.topic else None,
            "key": self.key,
            "tenant": self.tenant,
            "origin": self.origin,
            "reason": self.reason,
            "error": self.error,
            "since": self.since,
            "until": self.until,
            "before_at": before_at,
            "before_id": _text(before_id),
            "after_at": after_at,
            "after_id": _text(after_id),
            "max_rows": self.max_rows,
        }


def _text(id: UUID | None) -> str | None:
    # As text, which every driver accepts for a uuid.
    return None if id is None else str(id)
