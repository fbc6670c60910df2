"""A record of Kafka as a message, whatever a stranger may have written."""

from typing import cast

from confluent_kafka import Message as Record

from outbox.brokers.kafka.connection import PREFIX
from outbox.cloudevents.headers import from_headers
from outbox.cloudevents.raw_text import text_of
from outbox.errors import InvalidMessageError
from outbox.message import Message


def message_of(record: Record) -> tuple[Message, str | None]:
    """Read a record; give what can be read of it, and what is wrong if anything is."""
    value, headers = record.value(), {}
    try:
        headers = _headers(record)
        if value is None:
            problem = "it has no value: it is a tombstone; publish an empty payload"
        else:
            texts = {name: _decoded(name, text) for name, text in headers.items()}
            return from_headers(texts, value, PREFIX), None
    except InvalidMessageError as error:
        problem = str(error)
    key = record.key()
    stranger = Message(
        record.topic() or "",
        value or b"",
        key=None if key is None else text_of(key),
        headers={name: text_of(text) for name, text in headers.items()},
    )
    return stranger, problem


def _headers(record: Record) -> dict[str, bytes]:
    try:
        # The client gives them in no other form, whatever its types say.
        pairs = cast("list[tuple[str, bytes | None]]", record.headers() or [])
    except UnicodeDecodeError:
        raise InvalidMessageError(
            "headers", None, "have a name that isn't UTF-8", "fix the producer"
        ) from None
    return {name: value or b"" for name, value in pairs}


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidMessageError(
            f"header {name}", value, "isn't UTF-8", "fix the producer"
        ) from None
