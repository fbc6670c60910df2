"""A dead letter: the message as it was, and why it was given up."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Self
from uuid import UUID

from typing_extensions import override

from outbox.errors import InvalidMessageError
from outbox.json_codec import is_json
from outbox.message import Message
from outbox.message_id import is_uuid7

TOPIC_HEADER: Final = "pillarbox-topic"
"""The header in which a topic is kept that the table's index has no room for."""
SHORTENED: Final = "…"
"""What the topic ends with then."""
_DEEPEST: Final = 100
"""How deep JSON may be nested to be shown as JSON: indents grow with the square."""
_REMEDY: Final = "add what it was meant to be as a new message, and discard this one"


class Status(StrEnum):
    """What became of a dead letter."""

    PENDING = "PENDING"
    SUCCEEDED = "SUCCEEDED"
    DISCARDED = "DISCARDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A dead letter without its payload, headers and stack trace.

    Attributes:
        id: of the dead letter; `message_id` is that of the message.
        attempts: how often it failed before it was given up.
        retry_count: how often it was retried since, and failed.
        retry_after: not retried by the schedule before; None: only by hand.
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
        """Make it of a row, whose columns have the order of the fields."""
        names = (field.name for field in fields(cls))
        values = dict(zip(names, row, strict=True))
        return cls(**{**values, "status": Status(values["status"])})

    def as_json(self) -> dict[str, Any]:
        """Give the fields as JSON has them."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter(Summary):
    """A dead letter with everything that was kept."""

    schema_version: int
    content_type: str
    headers: Any
    payload: bytes
    error_stacktrace: str | None

    @classmethod
    @override
    def of(cls, row: Sequence[Any]) -> Self:
        """Make it of a row; headers too deep to be shown are the text that they are."""
        letter = super(Letter, cls).of(row)
        decoded = _loads(letter.headers)
        return letter if decoded is None else replace(letter, headers=decoded[0])

    def message(self) -> Message:
        """Give the message back as it was.

        Raises:
            InvalidMessageError: it was never one that could be read.
        """
        try:
            id = UUID(self.message_id)
        except ValueError:
            id = None
        if id is None or not is_uuid7(id):
            raise InvalidMessageError(
                "id", self.message_id, "isn't a UUIDv7: it can't be retried", _REMEDY
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
        topic, headers = self.topic, dict(self.headers)
        beginning = topic.removesuffix(SHORTENED)
        if beginning != topic and headers.get(TOPIC_HEADER, "").startswith(beginning):
            topic = headers.pop(TOPIC_HEADER)
        return Message(
            topic,
            bytes(self.payload),
            key=self.key,
            tenant=self.tenant,
            headers=headers,
            id=id,
            content_type=self.content_type,
            schema_version=self.schema_version,
        )

    @override
    def as_json(self) -> dict[str, Any]:
        """Give the fields, with the payload as `payload_json` or `payload_base64`."""
        values = super(Letter, self).as_json()
        payload = bytes(values.pop("payload"))
        decoded = decode_json(self.content_type, payload)
        if decoded is None:
            values["payload_base64"] = b64encode(payload).decode()
        else:
            values["payload_json"] = decoded[0]
        return values


def decode_json(content_type: str, payload: bytes) -> tuple[Any] | None:
    """Decode a payload that says it is JSON.

    None if it says or is something else, or is too deep to be shown.
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


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case UUID():
            return str(value)
        case _:
            return value
