"""A record of Kafka as a message, whatever a stranger may have written."""

from typing import cast

from confluent_kafka import Message as Record

from outbox.errors import InvalidMessageError
from outbox.headers import from_headers
from outbox.kafka import PREFIX
from outbox.message import Message


def message_of(record: Record) -> tuple[Message, str | None]:
    """Read a record; give what can be read of it, and what is wrong if anything is."""
    value = record.value()
    headers, problem = _headers(record)
    if value is None:
        problem = "it has no value: it is a tombstone; publish with an empty payload"
    if problem is None and value is not None:
        try:
            return from_headers(headers, value, PREFIX), None
        except InvalidMessageError as error:
            problem = str(error)
    key = record.key()
    message = Message(
        record.topic() or "",
        value or b"",
        key=None if key is None else key.decode(errors="replace"),
        headers=headers,
    )
    return message, problem


def _headers(record: Record) -> tuple[dict[str, str], str | None]:
    headers: dict[str, str] = {}
    problem = None
    try:
        # The client gives them in no other form, whatever its types say.
        pairs = cast("list[tuple[str, bytes | None]]", record.headers() or [])
    except UnicodeDecodeError:
        return {}, "the name of a header isn't UTF-8; mend its producer"
    for name, value in pairs:
        try:
            headers[name] = (value or b"").decode()
        except UnicodeDecodeError:
            problem = f"header {name} isn't UTF-8; mend its producer"
    return headers, problem
