"""Convert messages to Kafka records, and any record back to a message."""

import re
from typing import Final, NamedTuple, cast

from confluent_kafka import Message as Record

from pillarbox.outbox.brokers.kafka.connection import PREFIX
from pillarbox.outbox.cloudevents.headers import from_headers, to_headers
from pillarbox.outbox.cloudevents.json_headers import read_json_headers
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.errors import InvalidMessageError, shorten
from pillarbox.outbox.message import Message

PACKED: Final = "pillarbox-headers"
"""A header with the message's own headers as JSON: Debezium can't unpack a column."""
_TOPIC: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")
# The maximum overhead of a batch of one record and of each header, in bytes.
_OVERHEAD: Final = 100
_HEADER_OVERHEAD: Final = 10


def message_of(record: Record) -> tuple[Message, str | None]:
    """Return the message of a record, as far as it is readable, and any problem."""
    value, headers = record.value(), {}
    try:
        headers = _headers(record)
        if value is None:
            problem = "it has no value: it is a tombstone; publish an empty payload"
        else:
            texts = {name: _decoded(name, text) for name, text in headers.items()}
            own = read_json_headers(texts.pop(PACKED, None))
            message = from_headers(texts, value, PREFIX)
            if own:
                message = message.replace(headers={**message.headers, **own})
            return message, None
    except InvalidMessageError as error:
        problem = str(error)
    key = record.key()
    unreadable = Message(
        record.topic() or "",
        value or b"",
        key=None if key is None else text_of(key),
        headers={name: text_of(text) for name, text in headers.items()},
    )
    return unreadable, problem


def _headers(record: Record) -> dict[str, bytes]:
    try:
        # The client returns them in no other form, whatever its type hints say.
        pairs = cast("list[tuple[str, bytes | None]]", record.headers() or [])
    except UnicodeDecodeError:
        raise InvalidMessageError.received(
            "headers", None, "have a name that isn't UTF-8"
        ) from None
    # Debezium writes an attribute that the message doesn't have as null.
    return {
        name: value or b""
        for name, value in pairs
        if value is not None or not name.startswith(PREFIX)
    }


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidMessageError.received(
            f"header {name}", value, "isn't UTF-8"
        ) from None


class NewRecord(NamedTuple):
    """A record to pass to librdkafka."""

    topic: str
    key: bytes | None
    value: bytes
    headers: dict[str, str]


def record_of(message: Message) -> NewRecord:
    """Convert a message to a record."""
    return NewRecord(
        message.topic,
        None if message.key is None else message.key.encode(),
        message.payload,
        to_headers(message, PREFIX),
    )


def problem_of(record: NewRecord, max_bytes: int) -> str | None:
    """Return why Kafka can never accept a record; None if it can."""
    if _TOPIC.fullmatch(record.topic) is None:
        return (
            f"topic {shorten(record.topic)} isn't a valid Kafka topic: use 1 to 249 of "
            "A-Z a-z 0-9 . _ -"
        )
    texts = "".join((*record.headers, *record.headers.values()))
    size = (
        len(record.value)
        + len(record.key or b"")
        + len(texts.encode(errors="surrogatepass"))
    )
    size += _OVERHEAD + len(record.headers) * _HEADER_OVERHEAD
    if size <= max_bytes:
        return None
    return (
        f"the record has {size} bytes with key and headers, the limit is "
        f"{max_bytes} (message.max.bytes)"
    )
