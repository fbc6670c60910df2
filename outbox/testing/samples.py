"""Messages that are hard to transport, for the suites of publishers and sources."""

from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message import Message

__all__ = [
    "AWKWARD_HEADERS",
    "MAX_PAYLOAD_BYTES",
    "TEXTS",
    "TRACEPARENT",
    "differences",
    "full_message",
    "numbered",
    "numbers_by_key",
    "various_messages",
    "whole_of_unicode",
]

TRACEPARENT: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_BINARY: Final = bytes(range(256)) * 2
# The writer's default limit, minus room for headers, which many brokers count as well.
MAX_PAYLOAD_BYTES: Final = 1024 * 1024 - 16 * 1024
TEXTS: Final = (
    "ä ß é Ω я",
    "e\u0301 vs \u00e9",
    "中文 日本語 한국어",
    "עברית العربية \u202e",
    "👩‍👩‍👧 🏳️‍🌈",
    "\ud7ff\ue000\ufffd\uffff\U00010000\U0010ffff",
    "100 % %41 \"quoted\" 'single' \\ back",
    " led and followed by spaces ",
)
AWKWARD_HEADERS: Final = (
    {"with space": "1"},
    {"with:colon": "1"},
    {"Ünïcödé": "1"},
    {"empty": ""},
    {"line": "one\r\nx-smuggled: yes"},
    {"control": "\x01\x1f\x7f\t"},
    {"x" * 200: "y" * 4000},
    {f"many-{n}": str(n) for n in range(60)},
)
_FIELDS: Final = (
    "id",
    "topic",
    "payload",
    "key",
    "tenant",
    "headers",
    "content_type",
    "schema_version",
    "priority",
)
_SURROGATES: Final = range(0xD800, 0xE000)


def full_message(topic: str) -> Message:
    """Return a message with a value in every field that is transported."""
    return Message(
        topic,
        b'{"n": 1}',
        key="order-1",
        tenant="acme",
        headers={"traceparent": TRACEPARENT, "tracestate": "a=1,b=2", "x-own": "1"},
        content_type="application/vnd.acme.order+json; charset=utf-8",
        schema_version=7,
        priority=Priority.BULK,
    )


def numbered(topic: str, count: int, *, keys: int = 1, start: int = 0) -> list[Message]:
    """Return messages whose payloads are numbers, distributed over keys."""
    return [
        Message(topic, b"%d" % n, key=f"key-{n % keys}")
        for n in range(start, start + count)
    ]


def numbers_by_key(messages: Sequence[Message]) -> dict[str | None, list[int]]:
    """Return the numbers of each key in order, without duplicates after the first."""
    numbers: dict[str | None, list[int]] = {}
    seen: set[UUID] = set()
    for message in messages:
        if message.id not in seen:
            seen.add(message.id)
            numbers.setdefault(message.key, []).append(int(message.payload))
    return numbers


def various_messages(topic: str, max_payload_bytes: int) -> list[Message]:
    """Return messages of one topic that differ in which values are hard to transport.

    One of them has a payload of `max_payload_bytes`.
    """
    large = (_BINARY * (max_payload_bytes // len(_BINARY) + 1))[:max_payload_bytes]
    return [
        full_message(topic),
        Message(topic, b"1"),
        Message(topic, b"1", headers={"X-Own": "1", "x-other": "2"}),
        *(
            Message(topic, p)
            for p in (b"", _BINARY, b"\0", b"\xff\xfe", b"\r\n", large)
        ),
        *(
            Message(topic, b"1", key=text, tenant=text, headers={"x": text})
            for text in TEXTS
        ),
    ]


def whole_of_unicode(topic: str, max_payload_bytes: int) -> list[Message]:
    """Return messages whose payloads contain every character that UTF-8 can encode."""
    points = [point for point in range(0x110000) if point not in _SURROGATES]
    size = min(32 * 1024, max_payload_bytes // 4)
    return [
        Message(topic, "".join(map(chr, points[start : start + size])).encode())
        for start in range(0, len(points), size)
    ]


def differences(sent: Message, arrived: Message) -> dict[str, tuple[object, object]]:
    """Return the fields in which two messages differ, as sent and as arrived."""
    pairs = {
        name: (_plain(getattr(sent, name)), _plain(getattr(arrived, name)))
        for name in _FIELDS
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
