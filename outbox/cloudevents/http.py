"""A message as an HTTP request: CloudEvents 1.0 in binary mode.

The attributes are `ce-` headers, percent-encoded as the HTTP binding specifies. The
message's own headers keep their names, and `pillarbox-headers` lists them, because a
request also arrives with headers that the sender didn't write:

    pillarbox-headers: X-Own, traceparent, Gr%C3%B6%C3%9Fe*

A name that HTTP forbids or reserves is percent-encoded. So is a value that isn't
printable ASCII; a star after its name marks it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import quote, unquote

from outbox.cloudevents.headers import CONTENT_TYPE, from_headers, to_headers
from outbox.errors import InvalidMessageError
from outbox.limits import STORED_HEADERS, check_reserved, reserved_header
from outbox.message import Message

PREFIX: Final = "ce-"
OWN: Final = "pillarbox-headers"

_TRACE_CONTEXT: Final = ("traceparent", "tracestate", "baggage")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_VALUE: Final = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
# The ASCII characters that the HTTP binding leaves as they are: not space, " and %.
_SAFE: Final = "!#$&'()*+,/:;<=>?@[\\]^`{|}"
# Headers of the transport, and those meant only for the receiver of the request.
_RESERVED: Final = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        CONTENT_TYPE,
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
        "www-authenticate",
        "x-real-ip",
    }
)
_RESERVED_PREFIXES: Final = ("proxy-", "x-forwarded-")
# Words in the names of headers by which a client or a proxy proves who it is.
_CREDENTIAL: Final = re.compile(
    r"(?:.*[-_.])?(?:auth|authentication|authorization|tokens?|jwt|assertion|oidc|"
    r"api[-_.]?keys?|subscription[-_.]keys?|secrets?|csrf|csrftoken|xsrf|cookies?|"
    r"cookie2|credentials?|cert|certificate|passwords?|session|sessionid)(?:[-_.].*)?",
    re.ASCII | re.IGNORECASE,
)


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
    if message.headers:
        check_reserved(name for name in message.headers if name not in STORED_HEADERS)
        headers |= _own_headers(message.headers)
    return headers


def from_request(headers: Mapping[str, str], payload: bytes) -> Message:
    """Read a message from a request whose header names are in lower case.

    A header that `pillarbox-headers` lists is accepted only under a name that
    `to_request` writes: never `Authorization`, a cookie, or another header that is
    meant only for the receiver. `to_request` escapes such a name of a message's own.

    Raises:
        InvalidMessageError: an attribute is missing or invalid, or one of the message's
            own headers was lost or isn't allowed.
    """
    own = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
    for entry in headers.get(OWN, "").split(","):
        if listed := entry.strip():
            name = listed.removesuffix("*")
            original = _original(name)
            value = headers.get(name.lower())
            if value is None:
                raise InvalidMessageError(
                    "headers",
                    name,
                    f"is listed in {OWN}, but didn't arrive",
                    "let the proxies in between pass it on",
                )
            own[original] = _decoded(value) if name != listed else value
    attributes = {
        name: _decoded(_unquoted(value))
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    content_type = {n: headers[n] for n in (CONTENT_TYPE,) if n in headers}
    message = from_headers({**attributes, **content_type}, payload, PREFIX)
    return replace(message, headers={**message.headers, **own}) if own else message


def _own_headers(own: Mapping[str, str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    listed = []
    taken: set[str] = set()
    for original, text in own.items():
        name = original if _NAME.fullmatch(original) else quote(original, safe="")
        if _is_the_transports(name) or name.lower() in taken:
            name = _encoded_whole(original)
        taken.add(name.lower())
        if _VALUE.fullmatch(text):
            headers[name] = text
            listed.append(name)
        else:
            headers[name] = quote(text, safe="")
            listed.append(f"{name}*")
    headers[OWN] = ", ".join(listed)
    return headers


def _original(name: str) -> str:
    """Return the original name of a header that `_own_headers` could have written.

    Raises:
        InvalidMessageError: `_own_headers` never writes such a header.
    """
    original = _decoded(name)
    if name == original:
        is_ours = _NAME.fullmatch(name) and not _is_the_transports(name)
    else:
        is_ours = name == _encoded_whole(original) or (
            name == quote(original, safe="") and not _NAME.fullmatch(original)
        )
    if not is_ours:
        raise InvalidMessageError(
            "headers",
            name,
            f"is listed in {OWN}, but can't be a message's own",
            "list own headers only, under the names that to_request gives",
        )
    check_reserved(() if original in STORED_HEADERS else (original,))
    return original


def _is_the_transports(name: str) -> bool:
    folded = name.lower()
    return (
        folded in _RESERVED
        or folded.startswith(_RESERVED_PREFIXES)
        or _CREDENTIAL.fullmatch(name) is not None
        or (reserved_header((name,)) is not None and name not in STORED_HEADERS)
    )


def _encoded_whole(name: str) -> str:
    return "".join(f"%{byte:02X}" for byte in name.encode())


def _unquoted(value: str) -> str:
    match = _QUOTED.fullmatch(value)
    return re.sub(r"\\(.)", r"\1", match[1]) if match else value


def _decoded(value: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise InvalidMessageError(
            "headers", value, "isn't percent-encoded UTF-8", "fix the producer"
        ) from None
