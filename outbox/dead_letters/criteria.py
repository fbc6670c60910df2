"""Select dead letters by what they have in common, or by id."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, Self
from uuid import UUID

from outbox.dead_letters.letter import Status
from outbox.errors import ConfigError, shorten

_DIGITS: Final = 32
_FEWEST: Final = 4
_MOST_NAMED: Final = 5
_PREFIX: Final = re.compile(r"[0-9a-f]+(-[0-9a-f]+)*-?", re.ASCII)


class ListPosition(NamedTuple):
    """The position of a dead letter in a list ordered by time."""

    created_at: datetime
    id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """What selected dead letters have in common; None selects any value.

    Attributes:
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
    id: UUID | None = None
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
            "id": _text(self.id),
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


@dataclass(frozen=True, slots=True)
class IdPrefix:
    """The first hexadecimal digits of an id, or all of them.

    All of them can also be the id of the dead letter's message.
    """

    text: str
    digits: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Read digits with or without hyphens.

        Raises:
            ConfigError: the text can't be the beginning of an id, or is so short that
                it may be a typo.
        """
        typed = text.strip().lower()
        digits = typed.replace("-", "")
        if not _PREFIX.fullmatch(typed) or not _FEWEST <= len(digits) <= _DIGITS:
            raise ConfigError(
                f"dead letter {shorten(text)}: isn't an id; give at least the first "
                f"{_FEWEST} hexadecimal digits of one that list shows"
            )
        return cls(text, digits)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the statement that finds such ids."""
        # As text, which every driver accepts for a uuid.
        return {
            "first": str(UUID(self.digits.ljust(_DIGITS, "0"))),
            "last": str(UUID(self.digits.ljust(_DIGITS, "f"))),
            "message_id": str(UUID(self.digits))
            if len(self.digits) == _DIGITS
            else None,
            "max_rows": _MOST_NAMED + 1,
        }

    def choose(self, found: Sequence[UUID], tables: str) -> UUID:
        """Return the one id that was found in these tables.

        Raises:
            ConfigError: none was found, or more than one; the error names them.
        """
        if len(found) == 1:
            return found[0]
        if not found:
            raise ConfigError(
                f"dead letter {self.text}: not found in {tables}; list shows them"
            )
        named = [str(id) for id in found[:_MOST_NAMED]]
        if len(found) > _MOST_NAMED:
            named.append("…")
        raise ConfigError(
            f"dead letter {self.text}: several have it: {', '.join(named)}; give "
            "the whole id of one"
        )
