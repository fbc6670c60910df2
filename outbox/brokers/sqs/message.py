"""The form of a message in SQS and SNS: a text body and at most ten attributes.

Up to nine attributes are those of CloudEvents, one names the encoding of the body, and
one holds the message's own headers as JSON. Where that makes eleven, the priority is
among the headers. If there is room, `traceparent` gets its own attribute.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from pillarbox.outbox.cloudevents.headers import from_headers, to_headers
from pillarbox.outbox.cloudevents.json_headers import are_text, read_json_headers
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import uuid7

PREFIX: Final = "ce-"
HEADERS: Final = "headers"
BODY: Final = "body-encoding"
_BASE64: Final = "base64"
_EMPTY: Final = "empty"
_MAX_ATTRIBUTES: Final = 10
_TIME: Final = f"{PREFIX}time"
_TRACE: Final = "traceparent"
_ID: Final = f"{PREFIX}id"
_PRIORITY: Final = f"{PREFIX}priority"
# In text, AWS accepts only the characters that XML allows.
_REFUSED: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPED: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|%")
_GROUP: Final = re.compile("[!-~]{1,128}")
_TYPE: Final = "String"
_encode_json = json.JSONEncoder(separators=(",", ":")).encode


class Written(NamedTuple):
    """A message in the form that AWS accepts.

    Attributes:
        size: the size in bytes, as AWS counts it.
    """

    body: str
    attributes: Mapping[str, str]
    size: int


def write(message: Message) -> Written:
    """Convert a message to the form that AWS accepts.

    Raises:
        InvalidMessageError: a value is empty, which AWS can't represent.
    """
    body, how = _write_body(message.payload)
    values = to_headers(message.replace(headers={}), PREFIX)
    time = values.pop(_TIME, None)
    own = dict(message.headers)
    if how is not None:
        values[BODY] = how
    if own and len(values) == _MAX_ATTRIBUTES:
        own[_PRIORITY] = values.pop(_PRIORITY)
    room = _MAX_ATTRIBUTES - len(values)
    if own and (own.keys() != {_TRACE} or not own[_TRACE]):
        room -= 1
    if own.get(_TRACE) and room:
        values[_TRACE] = own.pop(_TRACE)
        room -= 1
    if time is not None and room:
        values[_TIME] = time
    attributes = {name: _escape(name, value) for name, value in values.items()}
    if own:
        attributes[HEADERS] = _encode_json(own)
    size = _bytes(body) + sum(
        _bytes(name) + len(_TYPE) + _bytes(value) for name, value in attributes.items()
    )
    return Written(body, attributes, size)


def typed(attributes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return attributes in the form that the API expects."""
    return {
        name: {"DataType": _TYPE, "StringValue": value}
        for name, value in attributes.items()
    }


def group_of(message: Message) -> str:
    """Return the group of a message in a FIFO queue.

    The group is the message's key, or a hash of a key that AWS rejects. Without a key,
    it is the message's id.
    """
    if message.key is None:
        return str(message.id)
    if _GROUP.fullmatch(message.key):
        return message.key
    return "sha256-" + hashlib.sha256(message.key.encode()).hexdigest()


def read(
    body: str, attributes: Mapping[str, Mapping[str, Any]], *, place: str
) -> tuple[Message, str | None]:
    """Return a message, bare or in an SNS envelope, and any problem with it.

    An invalid message is returned as far as it is readable.
    """
    values = {name: _text(value) for name, value in attributes.items()}
    if _ID not in values:
        body, values = _out_of_envelope(body, values)
    payload = body.encode(errors="replace")
    try:
        payload = _read_body(body, values.get(BODY))
        return _read(payload, values), None
    except InvalidMessageError as error:
        unreadable = Message(place, payload, headers=values, id=uuid7())
        return unreadable, f"message in {place}: {error}"


def _read(payload: bytes, values: Mapping[str, str]) -> Message:
    own = read_json_headers(values.get(HEADERS))
    plain = {
        name: unquote(value)
        for name, value in values.items()
        if name not in {HEADERS, BODY}
    }
    if _PRIORITY in own:
        plain[_PRIORITY] = own.pop(_PRIORITY)
    message = from_headers(plain, payload, PREFIX)
    if not own:
        return message
    return message.replace(headers={**message.headers, **own})


def _write_body(payload: bytes) -> tuple[str, str | None]:
    if not payload:
        return "-", _EMPTY
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        pass
    else:
        if _REFUSED.search(text) is None:
            return text, None
    return base64.b64encode(payload).decode(), _BASE64


def _read_body(body: str, how: str | None) -> bytes:
    if how is None:
        return body.encode()
    if how == _EMPTY:
        return b""
    if how == _BASE64:
        try:
            return base64.b64decode(body, validate=True)
        except ValueError:
            pass
    raise InvalidMessageError.received(
        "payload", body, f"isn't {how!r}, as {BODY} says"
    )


def _out_of_envelope(body: str, values: dict[str, str]) -> tuple[str, dict[str, str]]:
    if not body.startswith("{"):
        return body, values
    try:
        envelope = json.loads(body)
    except (ValueError, RecursionError):
        return body, values
    if envelope.get("Type") != "Notification" or "TopicArn" not in envelope:
        return body, values
    inner = envelope.get("MessageAttributes")
    text = envelope.get("Message")
    if not isinstance(text, str) or not isinstance(inner, dict):
        return body, values
    found = {
        name: str(value.get("Value", ""))
        for name, value in inner.items()
        if isinstance(value, dict)
    }
    if not are_text((text, *found, *found.values())):
        return body, values
    return text, found


def _text(value: Mapping[str, Any]) -> str:
    if "StringValue" in value:
        return str(value["StringValue"])
    return text_of(value.get("BinaryValue", b""))


def _escape(name: str, value: str) -> str:
    if not value:
        raise InvalidMessageError(
            name, value, "is empty, which AWS doesn't allow for attributes", "omit it"
        )
    return _ESCAPED.sub(_percent, value)


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode())


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
