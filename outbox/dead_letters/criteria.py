"""Which dead letters are meant."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from outbox.dead_letters.letter import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """What the dead letters in question have in common; None stands for anything.

    Attributes:
        topic: a topic, or the beginning of topics followed by `*`.
        error: a part of the reason, in upper or lower case.
        origin: who gave it up: `publisher:redis`, `consumer:billing`.
        newer_than: given up at most so long ago.
        older_than: given up at least so long ago.
        max_rows: so many of them.
    """

    status: Status | None = Status.PENDING
    topic: str | None = None
    key: str | None = None
    tenant: str | None = None
    origin: str | None = None
    message_id: str | None = None
    error: str | None = None
    newer_than: timedelta | None = None
    older_than: timedelta | None = None
    max_rows: int | None = None

    def parameters(self) -> dict[str, Any]:
        """Give the parameters of the statements that list and find."""
        many = self.topic is not None and self.topic.endswith("*")
        return {
            "status": None if self.status is None else self.status.value,
            "topic": None if many else self.topic,
            "topic_prefix": self.topic[:-1] if many and self.topic else None,
            "key": self.key,
            "tenant": self.tenant,
            "origin": self.origin,
            "message_id": self.message_id,
            "error": self.error,
            "newer_than": self.newer_than,
            "older_than": self.older_than,
            "max_rows": self.max_rows,
        }
