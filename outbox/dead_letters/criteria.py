"""Which dead letters are meant."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self
from uuid import UUID

from outbox.dead_letters.letter import Status
from outbox.errors import ConfigError, shorten

_DIGITS: Final = 32
_FEWEST: Final = 4
_MOST_NAMED: Final = 5
_PREFIX: Final = re.compile(r"[0-9a-f]+(-[0-9a-f]+)*-?", re.ASCII)


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


@dataclass(frozen=True, slots=True)
class IdPrefix:
    """The first hexadecimal digits of an id, or all of them."""

    text: str
    digits: str

    @classmethod
    def of(cls, text: str) -> Self:
        """Read what somebody typed: digits with or without hyphens.

        Raises:
            ConfigError: it can't be the beginning of an id, or is too short to be
                more than a slip.
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
        """Give the parameters of the statement that finds such ids."""
        # As text, which every driver takes for a uuid.
        return {
            "first": str(UUID(self.digits.ljust(_DIGITS, "0"))),
            "last": str(UUID(self.digits.ljust(_DIGITS, "f"))),
            "max_rows": _MOST_NAMED + 1,
        }

    def choose(self, found: Sequence[UUID], tables: str) -> UUID:
        """Give the one id that was found in these tables.

        Raises:
            ConfigError: there is none, or more than one; it names them.
        """
        if len(found) == 1:
            return found[0]
        if not found:
            raise ConfigError(
                f"dead letter {self.text}: there is none in {tables}; list "
                "shows them, --message finds those of a message"
            )
        named = [str(id) for id in found[:_MOST_NAMED]]
        if len(found) > _MOST_NAMED:
            named.append("…")
        raise ConfigError(
            f"dead letter {self.text}: several ids begin with it, {', '.join(named)}; "
            "give more digits"
        )
