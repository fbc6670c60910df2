"""Read an ASGI request: its headers, and its body within limits of size and time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias

from pillarbox.outbox.errors import shorten

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# If one of these occurred twice, one value might be verified and the other handled.
_ONCE_ONLY: Final = ("ce-", "webhook-", "content-type", "pillarbox-headers")


class Refused(Exception):  # noqa: N818 (an answer, not a failure)
    """A request was refused with a 4xx status."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(reason)


async def read_request(
    scope: Scope, receive: Receive, *, max_bytes: int, max_seconds: float
) -> tuple[Mapping[str, str], bytes]:
    """Return the headers, with lower-case names, and the body of a POST request.

    Raises:
        Refused: the method is not POST, the body is encoded, too large or too slow, or
            a header that must occur once occurs twice.
    """
    if scope["method"] != "POST":
        raise Refused(405, f"{scope['method']}: not allowed; use POST")
    headers = _folded(scope["headers"])
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise Refused(415, f"content-encoding {shorten(encoding)}: not supported")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(max_seconds):
            return headers, await _body(receive, max_bytes)
    except TimeoutError:
        raise Refused(
            408, f"the body was not received within {max_seconds:g} s"
        ) from None


async def _body(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Refused(400, "the sender disconnected before the end of the body")
        body += event.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not event.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> Refused:
    return Refused(413, f"the body exceeds the limit of {max_bytes} bytes")


def _folded(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name_bytes, value_bytes in raw:
        name = name_bytes.decode("latin-1").lower()
        value = value_bytes.decode("latin-1")
        if name not in headers:
            headers[name] = value
        elif name.startswith(_ONCE_ONLY):
            raise Refused(400, f"{name}: duplicate header")
        else:
            headers[name] += f", {value}"
    return headers
