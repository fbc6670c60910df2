"""A message as an HTTP request: CloudEvents 1.0 in binary mode.

The attributes are `ce-` headers, percent-encoded as the HTTP binding lays down. The
message's own headers go beside them under their own names, and `pillarbox-headers`
lists them, for on the other side there are more headers than the sender's:

    pillarbox-headers: X-Own, traceparent, Gr%C3%B6%C3%9Fe*

A name that HTTP can't have or has for itself is percent-encoded, and so is, marked by
a star, a value that isn't printable ASCII.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import quote, unquote

from outbox.errors import InvalidMessageError
from outbox.headers import CONTENT_TYPE, from_headers, to_headers
from outbox.message import Message

PREFIX: Final = "ce-"
OWN: Final = "pillarbox-headers"

_TRACE_CONTEXT: Final = ("traceparent", "tracestate", "baggage")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_VALUE: Final = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
# All of ASCII that the HTTP binding leaves as it is: neither space, nor " nor %.
_SAFE: Final = "!#$&'()*+,/:;<=>?@[\\]^`{|}"
_RESERVED: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        CONTENT_TYPE,
        "cookie",
        "date",
        "expect",
        "forwarded",
        "host",
        "idempotency-key",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "via",
        OWN,
    }
)
_RESERVED_PREFIXES: Final = (PREFIX, "webhook-", "proxy-", "x-forwarded-")


def to_request(message: Message) -> dict[str, str]:
    """Write everything but the payload as headers of a request.

    Raises:
        InvalidMessageError: its content type can't be a header.
    """
    if not _VALUE.fullmatch(message.content_type):
        raise InvalidMessageError(
            "content_type",
            message.content_type,
            "isn't printable ASCII, which HTTP asks for",
            "write a media type",
        )
    bare = replace(message, headers={}) if message.headers else message
    headers = {
        name: quote(value, safe=_SAFE)
        for name, value in to_headers(bare, PREFIX).items()
        if name != CONTENT_TYPE
    }
    headers[CONTENT_TYPE] = message.content_type
    if message.headers:
        headers |= _own_headers(message.headers)
    return headers


def from_request(headers: Mapping[str, str], payload: bytes) -> Message:
    """Read a message from a request, whose headers have names in lower case.

    Raises:
        InvalidMessageError: an attribute is missing or isn't what it should be, or
            a header of the message got lost.
    """
    own = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
    for entry in headers.get(OWN, "").split(","):
        if listed := entry.strip():
            name = listed.removesuffix("*")
            value = headers.get(name.lower())
            if value is None:
                raise InvalidMessageError(
                    "headers",
                    name,
                    f"is listed in {OWN}, and got lost on the way",
                    "let the proxies in between pass it",
                )
            own[_decoded(name)] = _decoded(value) if name != listed else value
    attributes = {
        name: _decoded(_unquoted(value))
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    content_type = {n: headers[n] for n in (CONTENT_TYPE,) if n in headers}
    return from_headers({**own, **attributes, **content_type}, payload, PREFIX)


def _own_headers(own: Mapping[str, str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    listed = []
    taken: set[str] = set()
    for original, text in own.items():
        name = original if _NAME.fullmatch(original) else quote(original, safe="")
        folded = name.lower()
        if (
            folded in _RESERVED
            or folded.startswith(_RESERVED_PREFIXES)
            or folded in taken
        ):
            name = "".join(f"%{byte:02X}" for byte in original.encode())
        taken.add(name.lower())
        if _VALUE.fullmatch(text):
            headers[name] = text
            listed.append(name)
        else:
            headers[name] = quote(text, safe="")
            listed.append(f"{name}*")
    headers[OWN] = ", ".join(listed)
    return headers


def _unquoted(value: str) -> str:
    match = _QUOTED.fullmatch(value)
    return re.sub(r"\\(.)", r"\1", match[1]) if match else value


def _decoded(value: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise InvalidMessageError(
            "headers", value, "isn't percent-encoded UTF-8", "mend its producer"
        ) from None
