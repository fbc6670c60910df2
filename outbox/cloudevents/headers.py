"""A message's metadata as headers: one form for every broker that has headers.

The body is the payload; the rest are the attributes of CloudEvents 1.0, in binary
mode, with the prefix that the binding for the transport specifies (`ce_` for Kafka,
`ce-` for HTTP and NATS, `cloudEvents:` for AMQP). The message's own headers, W3C
`traceparent` among them, keep their names.
"""

import re
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.limits import check_received
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import is_uuid7, moment_of

CONTENT_TYPE: Final = "content-type"
_SPEC_VERSION: Final = "1.0"
_SOURCE: Final = "urn:pillarbox"
_VERSION: Final = re.compile(r"[1-9][0-9]{0,9}")
_ATTRIBUTES: Final = frozenset(
    {
        "specversion",
        "id",
        "source",
        "type",
        "time",
        "partitionkey",
        "tenant",
        "schemaversion",
        "priority",
    }
)
_PRIORITIES: Final = {priority.value: priority for priority in Priority}


def to_headers(message: Message, prefix: str) -> dict[str, str]:
    """Return everything but the payload as headers. Absent values have no header.

    An attribute overrides a header of the message with the same name.
    """
    headers = dict(message.headers)
    headers[CONTENT_TYPE] = message.content_type
    headers[f"{prefix}specversion"] = _SPEC_VERSION
    headers[f"{prefix}id"] = str(message.id)
    headers[f"{prefix}source"] = _SOURCE
    headers[f"{prefix}type"] = message.topic
    if is_uuid7(message.id):
        headers[f"{prefix}time"] = moment_of(message.id).isoformat()
    headers[f"{prefix}schemaversion"] = str(message.schema_version)
    if message.key is not None:
        headers[f"{prefix}partitionkey"] = message.key
    if message.tenant is not None:
        headers[f"{prefix}tenant"] = message.tenant
    if message.priority is not Priority.DEFAULT:
        headers[f"{prefix}priority"] = str(message.priority)
    return headers


def from_headers(headers: Mapping[str, str], payload: bytes, prefix: str) -> Message:
    """Read a message from its headers and its payload.

    Names are case-sensitive; a transport that changes their case passes them in lower
    case. Unknown attributes stay headers. A priority that isn't one of ours counts as
    the default.

    Raises:
        InvalidMessageError: an attribute is missing or invalid.
    """
    own = {f"{prefix}{name}" for name in _ATTRIBUTES} | {CONTENT_TYPE}
    version = headers.get(f"{prefix}schemaversion", "1")
    if _VERSION.fullmatch(version) is None:
        raise InvalidMessageError.received(
            "schemaversion", version, "isn't a whole number from 1"
        )
    message = Message(
        _required(headers, prefix, "type"),
        payload,
        key=headers.get(f"{prefix}partitionkey"),
        tenant=headers.get(f"{prefix}tenant"),
        headers={name: value for name, value in headers.items() if name not in own},
        id=read_id(_required(headers, prefix, "id")),
        content_type=headers.get(CONTENT_TYPE),
        schema_version=int(version),
        priority=_PRIORITIES.get(
            headers.get(f"{prefix}priority", ""), Priority.DEFAULT
        ),
    )
    check_received(message)
    return message


def _required(headers: Mapping[str, str], prefix: str, name: str) -> str:
    value = headers.get(f"{prefix}{name}")
    if not value:
        raise InvalidMessageError.received(
            name, value, f"is missing: there is no header {prefix}{name}"
        )
    return value


def read_id(value: str) -> UUID:
    """Read the id of a message.

    Raises:
        InvalidMessageError: it isn't a UUID.
    """
    try:
        return UUID(value)
    except ValueError:
        raise InvalidMessageError.received("id", value, "isn't a UUID") from None
