"""A message as an HTTP request: CloudEvents 1.0 in binary mode.

The attributes are `ce-` headers, percent-encoded as the HTTP binding specifies. The
message's own headers are one JSON object in `pillarbox-headers`, because a request also
arrives with headers that the sender didn't write, and must not replace any of those.
Only a trace context has headers of its own, so that every receiver continues it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import quote, unquote

from pillarbox.outbox.cloudevents.headers import CONTENT_TYPE, from_headers, to_headers
from pillarbox.outbox.cloudevents.json_headers import read_json_headers
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.limits import STORED_HEADERS, check_reserved
from pillarbox.outbox.message import Message

PREFIX: Final = "ce-"
OWN: Final = "pillarbox-headers"

_TRACE_CONTEXT: Final = ("traceparent", "tracestate", "baggage")
_VALUE: Final = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
# The ASCII characters that the HTTP binding leaves as they are: not space, " and %.
_SAFE: Final = "!#$&'()*+,/:;<=>?@[\\]^`{|}"


def to_request(message: Message) -> dict[str, str]:
    """Return everything but the payload as headers of a request.

    Raises:
        InvalidMessageError: the content type can't be a header, or one of the message's
            own headers has a reserved name.
    """
    if not _VALUE.fullmatch(message.content_type):
        raise InvalidMessageError(
            "content_type",
            message.content_type,
            "isn't printable ASCII, which HTTP requires",
            "write a media type",
        )
    bare = replace(message, headers={}) if message.headers else message
    headers = {
        name: quote(value, safe=_SAFE)
        for name, value in to_headers(bare, PREFIX).items()
        if name != CONTENT_TYPE
    }
    headers[CONTENT_TYPE] = message.content_type
    if own := dict(message.headers):
        _check(own)
        for name in _TRACE_CONTEXT:
            if name in own and _VALUE.fullmatch(own[name]):
                headers[name] = own.pop(name)
    if own:
        headers[OWN] = json.dumps(own)  # in ASCII, without control characters
    return headers


def from_request(headers: Mapping[str, str], payload: bytes) -> Message:
    """Read a message from a request whose header names are in lower case.

    Raises:
        InvalidMessageError: an attribute is missing or invalid, or the message's own
            headers are invalid, or one of them has a reserved name.
    """
    own = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
    own |= read_json_headers(headers.get(OWN))
    _check(own)
    attributes = {
        name: _decoded(_unquoted(value))
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    content_type = {n: headers[n] for n in (CONTENT_TYPE,) if n in headers}
    message = from_headers({**attributes, **content_type}, payload, PREFIX)
    return replace(message, headers={**message.headers, **own}) if own else message


def _check(own: Mapping[str, str]) -> None:
    check_reserved(name for name in own if name not in STORED_HEADERS)


def _unquoted(value: str) -> str:
    match = _QUOTED.fullmatch(value)
    return re.sub(r"\\(.)", r"\1", match[1]) if match else value


def _decoded(value: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise InvalidMessageError.received(
            "headers", value, "isn't percent-encoded UTF-8"
        ) from None
