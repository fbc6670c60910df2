"""The form of a message on NATS: a subject, headers and a payload.

Header names must be tokens. Values must be a single line without leading or trailing
white space; any other value is percent-encoded, as CloudEvents specifies for HTTP.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from pillarbox.outbox.cloudevents.headers import from_headers, to_headers
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.errors import InvalidMessageError, shorten
from pillarbox.outbox.message import Message

PREFIX: Final = "ce-"
MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
OF_CONSUMER: Final = "pillarbox consumer "
"""The description of a durable, before the name of the consumer that it belongs to."""

_VISIBLE: Final = re.compile(r"[!#$&-~]*")
_SAFE: Final = "!#$&'()*+,/:;<=>?@[\\]^`{|}"
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_RESERVED: Final = "nats-"
_SURROGATES: Final = re.compile(r"[\ud800-\udfff]")
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f*>]")


def subject_problem(topic: str) -> str | None:
    """Return why a topic can't be a subject, with the remedy; None if it can."""
    if not topic:
        return "topic is empty: give it a name"
    if found := _FORBIDDEN.search(topic):
        return (
            f"topic {shorten(topic)} holds {found.group()!r}, which NATS forbids in a "
            "subject: name it without white space, control characters, * and >"
        )
    if "" in topic.split("."):
        return (
            f"topic {shorten(topic)} has an empty part, which NATS forbids in a "
            "subject: name it without a dot at its ends and without two in a row"
        )
    if topic.startswith(("$", "_INBOX.")):
        return (
            f"topic {shorten(topic)} uses a subject prefix reserved by NATS: begin it "
            "with neither $ nor _INBOX"
        )
    return None


def header_problem(message: Message) -> str | None:
    """Return why the headers of a message can't be sent; None if they can."""
    for name in message.headers:
        if _NAME.fullmatch(name) is None:
            return (
                f"header {shorten(name)}: not a valid NATS header name; use letters, "
                "digits and -"
            )
        if name.lower().startswith(_RESERVED):
            return f"header {shorten(name)}: reserved by NATS; rename it"
    return None


def encode_headers(message: Message, stream: str | None = None) -> bytes:
    """Encode the headers of a message without a `header_problem`, as they are sent.

    With `stream`, NATS rejects the message if another stream would store it.
    """
    headers = to_headers(message, PREFIX)
    # For nearly every message, a single test of all values is enough.
    if _VISIBLE.fullmatch("".join(headers.values())) is None:
        for name, value in headers.items():
            headers[name] = _encode(value, spaces=not name.startswith(PREFIX))
    headers[MESSAGE_ID] = headers[f"{PREFIX}id"]
    if stream is not None:
        headers[EXPECTED_STREAM] = stream
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode("ascii")


def decode_message(headers: Mapping[str, str], payload: bytes) -> Message:
    """Read a message from its headers and its payload.

    Raises:
        InvalidMessageError: an attribute is missing or invalid, or a header isn't
            UTF-8.
    """
    # For nearly every message, a single test of all headers is enough.
    text = "".join((*headers, *headers.values()))
    if not text.isascii() and _SURROGATES.search(text):
        raise InvalidMessageError.received(
            "headers", raw_headers(headers), "aren't all UTF-8"
        )
    return from_headers(plain_headers(headers), payload, PREFIX)


def plain_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Decode headers, except those that NATS itself interprets."""
    return {
        name: unquote(value) if "%" in value else value
        for name, value in headers.items()
        if not name.lower().startswith(_RESERVED)
    }


def raw_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of something that isn't a message, losslessly."""
    return {raw_text(name): raw_text(value) for name, value in headers.items()}


def raw_text(text: str) -> str:
    """Return a subject or header of something that isn't a message, losslessly."""
    return text_of(text.encode(errors="surrogateescape"))


def _encode(value: str, *, spaces: bool) -> str:
    if _VISIBLE.fullmatch(value) is not None:
        return value
    if (
        spaces
        and value.isascii()
        and value.isprintable()
        and "%" not in value
        and value == value.strip()
    ):
        return value
    return quote(value, safe=_SAFE)
