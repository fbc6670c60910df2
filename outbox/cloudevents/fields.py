"""A message as the fields of a stream entry: its headers, and the payload beside them.

The headers are those of `headers`, with the prefix `ce_`. The payload's field has that
prefix, too, so that no header can have its name.
"""

from collections.abc import Mapping
from typing import Final

from pillarbox.outbox.cloudevents.headers import from_headers, to_headers
from pillarbox.outbox.cloudevents.raw_text import payload_of, text_of
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import uuid7

PREFIX: Final = "ce_"
PAYLOAD: Final = b"ce_data"


def to_fields(message: Message) -> dict[bytes, bytes]:
    """Return a message as fields. Absent values have no field."""
    fields = {
        name.encode(): value.encode()
        for name, value in to_headers(message, PREFIX).items()
    }
    return {**fields, PAYLOAD: message.payload}


def from_fields(fields: Mapping[bytes, bytes]) -> Message:
    """Read a message from its fields; unknown fields become headers.

    Raises:
        InvalidMessageError: a field is missing or invalid.
    """
    if PAYLOAD not in fields:
        raise InvalidMessageError.received(
            "payload", None, f"is missing: there is no field {PAYLOAD.decode()}"
        )
    try:
        headers = {
            name.decode(): value.decode()
            for name, value in fields.items()
            if name != PAYLOAD
        }
    except UnicodeDecodeError as error:
        text = error.object
        named = (text_of(name) for name, value in fields.items() if value == text)
        field = next(named, "headers")
        raise InvalidMessageError.received(field, text, "isn't UTF-8") from None
    return from_headers(headers, fields[PAYLOAD], PREFIX)


def unreadable_from_fields(topic: str, fields: Mapping[bytes, bytes]) -> Message:
    """Read an entry that isn't one of our messages, for the dead letters.

    If it has no payload, all its fields are the payload, as JSON.
    """
    bare = PAYLOAD not in fields
    return Message(
        topic,
        payload_of(fields) if bare else fields[PAYLOAD],
        id=uuid7(),
        headers={
            text_of(name): text_of(value)
            for name, value in fields.items()
            if name != PAYLOAD
        },
        content_type="application/json" if bare else None,
    )
