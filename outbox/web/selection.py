"""The selection of dead letters: filters that can be combined, and a time window."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self
from uuid import UUID

from outbox.dead_letters.criteria import Criteria, ListPosition
from outbox.dead_letters.letter import Status
from outbox.errors import ConfigError, shorten

WINDOWS: Final = {
    "1h": ("the last hour", timedelta(hours=1)),
    "24h": ("the last 24 hours", timedelta(hours=24)),
    "7d": ("the last 7 days", timedelta(days=7)),
    "30d": ("the last 30 days", timedelta(days=30)),
    "all": ("any time", None),
}
SIDES: Final = ("outbox", "inbox")
STATUSES: Final = (*(status.value for status in Status), "ANY")

_MAX_LENGTH: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The filters that a viewer chose on the page; empty text matches anything.

    Attributes:
        side: outbox or inbox; empty for both.
        topic: a topic, or a prefix followed by `*`.
        reason: the first 80 characters of a reason.
        error: text that the reason contains.
        window: a name in `WINDOWS`; `since` and `until` replace it if given.
        id: the id of one dead letter.
    """

    side: str = ""
    origin: str = ""
    topic: str = ""
    tenant: str = ""
    key: str = ""
    reason: str = ""
    error: str = ""
    status: str = Status.PENDING.value
    window: str = "all"
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
            if "\0" in value or len(value) > _MAX_LENGTH:
                raise ConfigError(
                    f"{name} {shorten(value)}: use at most {_MAX_LENGTH} characters, "
                    "without NUL characters"
                )
        selection = cls(**chosen)
        allowed = {"side": (*SIDES, ""), "status": STATUSES, "window": tuple(WINDOWS)}
        for name, values in allowed.items():
            if getattr(selection, name) not in values:
                raise ConfigError(
                    f"{name} {shorten(getattr(selection, name))}: use "
                    f"{', '.join(filter(None, values))}"
                )
        selection.criteria(datetime.now(UTC))
        return selection

    @property
    def sides(self) -> tuple[str, ...]:
        """The selected sides."""
        return (self.side,) if self.side else SIDES

    def criteria(self, now: datetime, **changes: Any) -> Criteria:
        """Return the criteria for the statements.

        Raises:
            ConfigError: a moment or an id is malformed.
        """
        since, until = _moment("since", self.since), _moment("until", self.until)
        span = WINDOWS[self.window][1]
        if since is None and until is None and span is not None:
            since = now - span
        criteria = Criteria(
            id=_id(self.id),
            status=None if self.status == "ANY" else Status(self.status),
            topic=self.topic or None,
            key=self.key or None,
            tenant=self.tenant or None,
            origin=self.origin or None,
            reason=self.reason or None,
            error=self.error or None,
            since=since,
            until=until,
        )
        return replace(criteria, **changes)

    def frozen(self, now: datetime) -> Self:
        """Return the selection with a fixed window, without later dead letters."""
        criteria = self.criteria(now)
        since = criteria.since.isoformat() if criteria.since else ""
        until = min(criteria.until or now, now)
        return replace(self, since=since, until=until.isoformat())

    def fields(self) -> dict[str, str]:
        """Return the fields that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def in_words(self) -> str:
        """Describe the filters in words, without the window."""
        names = ("origin", "topic", "tenant", "key", "reason", "error", "id")
        words = [f"side {self.side}"] if self.side else []
        words += [f"{it} {getattr(self, it)}" for it in names if getattr(self, it)]
        return ", ".join(words) or "no filter"

    def window_in_words(self) -> str:
        """Describe the window in words."""
        if self.since or self.until:
            since = f"since {self.since}" if self.since else ""
            until = f"until {self.until}" if self.until else ""
            return " ".join(filter(None, (since, until)))
        words, span = WINDOWS[self.window]
        return f"at {words}" if span is None else f"in {words}"


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


def _id(text: str) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        raise ConfigError(
            f"id {shorten(text)}: isn't the id of a dead letter; the list shows them"
        ) from None
