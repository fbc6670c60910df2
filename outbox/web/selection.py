"""The selection of dead letters: filters that can be combined, and a time window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Final, Self
from uuid import UUID

from pillarbox.outbox.dead_letters.criteria import Criteria, ListPosition
from pillarbox.outbox.dead_letters.letter import Status
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.errors import ConfigError, shorten

SIDES: Final[tuple[Schema, ...]] = ("outbox", "inbox")
STATUSES: Final = (*(status.value for status in Status), "ANY")

MAX_LENGTH: Final = 2048


def check_text(name: str, text: str) -> None:
    """Refuse a text that no column can hold, or that is too long to be meant."""
    if "\0" in text or len(text) > MAX_LENGTH:
        raise ConfigError(
            f"{name} {shorten(text)}: use at most {MAX_LENGTH} characters, without "
            "NUL characters"
        )


def check_choice(name: str, text: str, choices: Sequence[str]) -> None:
    """Refuse what isn't one of the choices."""
    if text not in choices:
        raise ConfigError(
            f"{name} {shorten(text)}: use {', '.join(filter(None, choices))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The filters that a viewer chose on the page; empty text matches anything.

    Attributes:
        side: outbox or inbox; empty for both.
        topic: a topic, or a prefix followed by `*`.
        reason: the first 80 characters of a reason.
        error: text that the reason contains.
        id: the ids of dead letters, with spaces between.
    """

    side: str = ""
    origin: str = ""
    topic: str = ""
    tenant: str = ""
    key: str = ""
    reason: str = ""
    error: str = ""
    status: str = Status.PENDING.value
    since: str = ""
    until: str = ""
    id: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Read a selection from the fields of a form or an address.

        Raises:
            ConfigError: a field has an invalid value.
        """
        chosen = {
            field.name: given[field.name]
            for field in fields(cls)
            if given.get(field.name)
        }
        for name, value in chosen.items():
            check_text(name, value)
        selection = cls(**chosen)
        check_choice("side", selection.side, ("", *SIDES))
        check_choice("status", selection.status, STATUSES)
        selection.criteria()
        return selection

    @property
    def sides(self) -> tuple[Schema, ...]:
        """The selected sides."""
        return tuple(it for it in SIDES if self.side in ("", it))

    def criteria(self, **changes: Any) -> Criteria:
        """Return the criteria for the statements.

        Raises:
            ConfigError: a moment or an id is malformed.
        """
        criteria = Criteria(
            ids=_ids(self.id),
            status=None if self.status == "ANY" else Status(self.status),
            topic=self.topic or None,
            key=self.key or None,
            tenant=self.tenant or None,
            origin=self.origin or None,
            reason=self.reason or None,
            error=self.error or None,
            since=_moment("since", self.since),
            until=_moment("until", self.until),
        )
        return replace(criteria, **changes)

    def frozen(self, now: datetime) -> Self:
        """Return the selection without later dead letters."""
        until = min(self.criteria().until or now, now)
        return replace(self, until=until.isoformat())

    def fields(self) -> dict[str, str]:
        """Return the fields that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def in_words(self) -> str:
        """Describe the filters in words, without the status."""
        words = [
            f"{len(it.split())} chosen" if name == "id" else f"{name} {it}"
            for name, it in self.fields().items()
            if name != "status"
        ]
        return ", ".join(words) or "no filter"


def read_place(text: str) -> ListPosition | None:
    """Parse the start of a page of a list, as `write_place` formats it.

    Raises:
        ConfigError: the text is malformed.
    """
    if not text:
        return None
    at, _, id = text.rpartition("_")
    try:
        return ListPosition(datetime.fromisoformat(at), UUID(id))
    except ValueError:
        raise ConfigError(
            f"before {shorten(text)}: follow the link of the page"
        ) from None


def write_place(place: ListPosition) -> str:
    """Format the start of a page of a list as text."""
    return f"{place.created_at.isoformat()}_{place.id}"


def _moment(name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=moment.tzinfo or UTC)
    except ValueError:
        raise ConfigError(
            f"{name} {shorten(text)}: write a moment as 2026-01-31T14:00, in UTC"
        ) from None


def _ids(text: str) -> tuple[UUID, ...]:
    try:
        return tuple(map(UUID, text.split()))
    except ValueError:
        raise ConfigError(
            f"id {shorten(text)}: isn't the id of a dead letter; the list shows them"
        ) from None
