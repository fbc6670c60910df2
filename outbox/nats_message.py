"""What a message is on NATS: a subject, headers and a payload.

Names of headers must be tokens and values stay on one line, without white space
around them; so values are percent-encoded as CloudEvents lays down for HTTP where
they hold anything else.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from outbox.errors import shorten
from outbox.headers import from_headers, to_headers
from outbox.message import Message

PREFIX: Final = "ce-"
MESSAGE_ID: Final = "Nats-Msg-Id"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"

_ATTRIBUTE: Final = re.compile(r"[!#$&-~]*")
_SAFE: Final = "!#$&'()*+,/:;<=>?@[\\]^`{|}"
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_RESERVED: Final = "nats-"
# `NATS/1.0` and the empty line; `: ` and the end of a line.
_FRAME: Final = 12
_LINE: Final = 4

_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f*>]")


def subject_problem(topic: str) -> str | None:
    """Say why a topic can't be a subject, with the remedy; None if it can."""
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
            f"topic {shorten(topic)} is in a part of the subjects that NATS keeps for "
            "itself: begin it with neither $ nor _INBOX"
        )
    return None


def header_problem(message: Message) -> str | None:
    """Say why the headers of a message can't be sent; None if they can."""
    for name in message.headers:
        if _NAME.fullmatch(name) is None:
            return (
                f"header {shorten(name)}: NATS takes no such name; use letters, "
                "digits and -"
            )
        if name.lower().startswith(_RESERVED):
            return f"header {shorten(name)}: NATS acts on its own headers; rename it"
    return None


def encode_headers(message: Message) -> dict[str, str]:
    """Write the headers of a message without a `header_problem`."""
    headers = to_headers(message, PREFIX)
    for name, value in headers.items():
        if name.startswith(PREFIX):
            if _ATTRIBUTE.fullmatch(value) is None:
                headers[name] = quote(value, safe=_SAFE)
        elif not _is_plain(value):
            headers[name] = quote(value, safe=_SAFE)
    headers[MESSAGE_ID] = str(message.id)
    return headers


def size_of(headers: Mapping[str, str], payload: bytes) -> int:
    """Count the bytes that NATS' max_payload bounds: the headers belong to them."""
    lines = sum(len(name) + len(value) + _LINE for name, value in headers.items())
    return _FRAME + lines + len(payload)


def decode_message(headers: Mapping[str, str], payload: bytes) -> Message:
    """Read a message from its headers and its payload.

    Raises:
        InvalidMessageError: an attribute is missing, or isn't what it should be.
    """
    return from_headers(plain_headers(headers), payload, PREFIX)


def plain_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Read headers; those that NATS acts on are left out."""
    return {
        name: unquote(value) if "%" in value else value
        for name, value in headers.items()
        if not name.lower().startswith(_RESERVED)
    }


def _is_plain(value: str) -> bool:
    return (
        value.isascii()
        and value.isprintable()
        and "%" not in value
        and value == value.strip()
    )
