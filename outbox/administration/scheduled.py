"""Scheduled messages: list them, cancel them, and move them to another time.

`pillarbox scheduled` and the page's section Scheduled. `outbox.cancel()` and
`outbox.move()` in SQL decide, and record who did it and why; see
`outbox/cancellation.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from psycopg.errors import FeatureNotSupported, InvalidParameterValue
from psycopg.rows import dict_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import LANES, PRIORITIES, Priority, lane_of, priority_of
from pillarbox.outbox.postgres.sql_files import load

_REFUSALS: Final = (FeatureNotSupported, InvalidParameterValue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A message that isn't due.

    Attributes:
        readers: who is to publish or handle it.
    """

    id: UUID
    created_at: datetime
    due_at: datetime
    topic: str
    key: str | None
    tenant: str | None
    priority: Priority
    readers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The result of cancelling or moving a message.

    Attributes:
        outcome: as `outbox.cancel()` returns it.
        readers: if it is too late, the state of the message at each reader.
        new_id: the message that was added instead.
    """

    id: UUID
    outcome: str
    readers: Mapping[str, str] | None
    new_id: UUID | None

    @property
    def is_cancelled(self) -> bool:
        """Whether no reader gets the message, because of this call or another one."""
        return self.outcome in {"cancelled", "already cancelled"}

    @property
    def text(self) -> str:
        """The result, in words."""
        match self.outcome:
            case "cancelled" if self.new_id is not None:
                return f"{self.id} is cancelled, and {self.new_id} replaces it"
            case "cancelled":
                return f"{self.id} is cancelled"
            case "already cancelled":
                return f"{self.id} was already cancelled: nothing was changed"
            case "too late":
                states = (self.readers or {}).items()
                at = ", ".join(f"{state} at {name}" for name, state in states)
                what = at or "no reader gets it"
                return f"{self.id} is due, or was not scheduled: {what}"
        return f"{self.id}: no message has this id"


def list_scheduled(
    connection: AdministrationConnection,
    *,
    topic: str | None = None,
    key: str | None = None,
    tenant: str | None = None,
    limit: int,
) -> list[Scheduled]:
    """Return the next scheduled messages, in the order in which they are due.

    Args:
        topic: a topic, or a prefix followed by `*`.
    """
    is_prefix = topic is not None and topic.endswith("*")
    lanes: Sequence[int] = range(LANES)
    if key is not None:
        lanes = [lane_of(key, UUID(int=0), it) for it in PRIORITIES]
    values = {
        "lanes": list(lanes),
        "topic": None if is_prefix else topic,
        "topic_prefix": topic[:-1] if topic is not None and is_prefix else None,
        "key": key,
        "tenant": tenant,
        "max_rows": limit,
    }
    with connection.cursor(row_factory=dict_row) as cursor:
        # Planned for these values, so that each lane is read by its index.
        rows = cursor.execute(load("outbox", "list_scheduled"), values, prepare=False)
        return [Scheduled(priority=priority_of(row.pop("lane")), **row) for row in rows]


def cancel_message(
    connection: AdministrationConnection, id: UUID, reason: str | None
) -> Change:
    """Cancel a scheduled message."""
    return _change(connection, "cancel_message", id, {"reason": reason})


def move_message(
    connection: AdministrationConnection, id: UUID, to: datetime, reason: str | None
) -> Change:
    """Cancel a scheduled message, and add one with its content for another time."""
    values = {"available_at": to, "reason": reason}
    return _change(connection, "move_message", id, values)


def _change(
    connection: AdministrationConnection,
    statement: str,
    id: UUID,
    values: Mapping[str, object],
) -> Change:
    try:
        with connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(load("outbox", statement), {"id": id, **values})
            (row,) = cursor.fetchall()
    except _REFUSALS as error:
        said = error.diag
        text = f"{id}: {said.message_primary}; {said.message_hint}"
        raise ConfigError(text) from error
    return Change(id=id, **row)
