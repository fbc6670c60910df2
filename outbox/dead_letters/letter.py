"""A dead letter: the message as it was, and why it was dead-lettered."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Self
from uuid import UUID

from typing_extensions import override

from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import is_uuid7
from pillarbox.outbox.payload.json_codec import is_json

SHORTENED: Final = "…"
"""The end of a topic that was cut off, because it is too long for the table's index."""
MAX_SHORT: Final = 200
"""The number of characters before that."""
_DEEPEST: Final = 100
"""How deeply JSON may be nested to be shown as JSON: indents grow quadratically."""
_REMEDY: Final = "add a correct message, and discard this one"


class Status(StrEnum):
    """The status of a dead letter."""

    PENDING = "PENDING"
    SUCCEEDED = "SUCCEEDED"
    DISCARDED = "DISCARDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A dead letter without its payload, headers and stack trace.

    Attributes:
        id: the id of the dead letter; `message_id` is the id of the message.
        attempts: how often it failed before it was dead-lettered.
        retry_count: how many retries have failed since.
        retry_after: when the schedule may retry it; None if it is retried only by hand.
    """

    id: UUID
    created_at: datetime
    updated_at: datetime
    status: Status
    retry_count: int
    retry_after: datetime | None
    origin: str
    message_id: str
    topic: str
    key: str | None
    tenant: str | None
    attempts: int
    error_reason: str
    discard_reason: str | None
    discarded_by: str | None

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """Create one from a row whose columns are in the order of the fields."""
        names = (field.name for field in fields(cls))
        values = dict(zip(names, row, strict=True))
        return cls(**{**values, "status": Status(values["status"])})

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter(Summary):
    """A dead letter with all its fields."""

    schema_version: int
    priority: str
    content_type: str
    headers: Any
    payload: bytes
    error_stacktrace: str | None

    @classmethod
    @override
    def of(cls, row: Sequence[Any]) -> Self:
        """Create one from a row; headers that are nested too deeply stay text."""
        letter = super(Letter, cls).of(row)
        decoded = _loads(letter.headers)
        return letter if decoded is None else replace(letter, headers=decoded[0])

    def message(self) -> Message:
        """Return the message as it was.

        Raises:
            InvalidMessageError: it was never a valid message.
        """
        try:
            id = UUID(self.message_id)
        except ValueError:
            id = None
        if id is None or not is_uuid7(id):
            raise InvalidMessageError(
                "id", self.message_id, "isn't a UUIDv7, so it can't be retried", _REMEDY
            )
        if not isinstance(self.headers, Mapping) or not all(
            isinstance(value, str) for value in self.headers.values()
        ):
            raise InvalidMessageError(
                "headers", self.headers, "isn't an object of strings", _REMEDY
            )
        for field in ("topic", "content_type"):
            if not getattr(self, field):
                raise InvalidMessageError(field, "", "is empty", _REMEDY)
        if self.topic.endswith(SHORTENED) and len(self.topic) > MAX_SHORT:
            raise InvalidMessageError("topic", self.topic, "was cut off", _REMEDY)
        return Message(
            self.topic,
            bytes(self.payload),
            key=self.key,
            tenant=self.tenant,
            headers=dict(self.headers),
            id=id,
            content_type=self.content_type,
            schema_version=self.schema_version,
            priority=Priority(self.priority),
        )

    @override
    def as_json(self) -> dict[str, Any]:
        """Return the fields, with the payload as `payload_json` or `payload_base64`."""
        values = super(Letter, self).as_json()
        payload = bytes(values.pop("payload"))
        decoded = decode_json(self.content_type, payload)
        if decoded is None:
            values["payload_base64"] = b64encode(payload).decode()
        else:
            values["payload_json"] = decoded[0]
        return values


def decode_json(content_type: str, payload: bytes) -> tuple[Any] | None:
    """Decode a payload whose content type is JSON.

    Returns None if it isn't JSON, or is nested too deeply to be shown.
    """
    return _loads(payload) if is_json(content_type) else None


def _loads(text: str | bytes) -> tuple[Any] | None:
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return None
    level = [decoded]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return (decoded,)
    return None
