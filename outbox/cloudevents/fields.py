"""A message as fields: a mapping of bytes to bytes.

The body is the field `payload`; everything else is metadata. Headers of the message
are fields of their own, so that other readers find them without decoding anything.
Publishers and sources of transports that carry fields share this form.
"""

import re
from collections.abc import Mapping
from typing import Final

from outbox.cloudevents.headers import read_id
from outbox.cloudevents.raw_text import payload_of, text_of
from outbox.errors import InvalidMessageError
from outbox.limits import check_received
from outbox.message import Message
from outbox.message_id import uuid7

PAYLOAD: Final = b"payload"
_HEADER: Final = b"h:"
_VERSION: Final = re.compile(rb"[1-9][0-9]{0,9}")


def to_fields(message: Message) -> dict[bytes, bytes]:
    """Return a message as fields. Absent values have no field."""
    fields = {
        b"id": str(message.id).encode(),
        b"topic": message.topic.encode(),
        b"content_type": message.content_type.encode(),
        b"schema_version": b"%d" % message.schema_version,
    }
    if message.key is not None:
        fields[b"key"] = message.key.encode()
    if message.tenant is not None:
        fields[b"tenant"] = message.tenant.encode()
    for name, value in message.headers.items():
        fields[_HEADER + name.encode()] = value.encode()
    fields[PAYLOAD] = message.payload
    return fields


def from_fields(fields: Mapping[bytes, bytes]) -> Message:
    """Read a message from its fields; unknown fields are ignored.

    Raises:
        InvalidMessageError: a field is missing or invalid.
    """
    if PAYLOAD not in fields:
        raise _missing("payload")
    version = fields.get(b"schema_version", b"1")
    if _VERSION.fullmatch(version) is None:
        raise InvalidMessageError(
            "schema_version",
            version,
            "isn't a whole number from 1",
            "fix the producer",
        )
    message = Message(
        _required(fields, "topic"),
        fields[PAYLOAD],
        key=_text(fields, "key"),
        tenant=_text(fields, "tenant"),
        headers={
            _decoded("headers", name[len(_HEADER) :]): _decoded("headers", value)
            for name, value in fields.items()
            if name.startswith(_HEADER)
        },
        id=read_id(_required(fields, "id")),
        content_type=_text(fields, "content_type"),
        schema_version=int(version),
    )
    check_received(message)
    return message


def unreadable_from_fields(topic: str, fields: Mapping[bytes, bytes]) -> Message:
    """Read an entry that isn't one of our messages, for the dead letters.

    If it has no field `payload`, all its fields are the payload, as JSON.
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


def _required(fields: Mapping[bytes, bytes], name: str) -> str:
    value = _text(fields, name)
    if not value:
        raise _missing(name)
    return value


def _text(fields: Mapping[bytes, bytes], name: str) -> str | None:
    value = fields.get(name.encode())
    return None if value is None else _decoded(name, value)


def _decoded(field: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidMessageError(
            field, value, "isn't UTF-8", "fix the producer"
        ) from None


def _missing(name: str) -> InvalidMessageError:
    return InvalidMessageError(
        name, None, "is missing among the fields", "fix the producer"
    )
