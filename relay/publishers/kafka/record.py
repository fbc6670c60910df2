"""A message as a record of Kafka, and what keeps it from being one."""

import re
from typing import Final, NamedTuple

from outbox.brokers.kafka.connection import PREFIX
from outbox.cloudevents.headers import to_headers
from outbox.errors import shorten
from outbox.message import Message

_TOPIC: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")
# At most so much comes to a batch of one record, and to each of its headers.
_OVERHEAD: Final = 100
_HEADER_OVERHEAD: Final = 10
_LONGEST_CHARACTER: Final = 4


class Record(NamedTuple):
    """What is handed to librdkafka."""

    topic: str
    key: bytes | None
    value: bytes
    headers: dict[str, str]


def record_of(message: Message) -> Record:
    """Write a message as a record."""
    return Record(
        message.topic,
        None if message.key is None else message.key.encode(),
        message.payload,
        to_headers(message, PREFIX),
    )


def problem_of(record: Record, max_bytes: int) -> str | None:
    """Tell why Kafka can never take a record."""
    if _TOPIC.fullmatch(record.topic) is None:
        return (
            f"topic {shorten(record.topic)} can't be one of Kafka: it takes 1 to 249 "
            "of A-Z a-z 0-9 . _ -"
        )
    texts = (*record.headers, *record.headers.values())
    size = len(record.value) + len(record.key or b"") + _OVERHEAD
    size += len(record.headers) * _HEADER_OVERHEAD
    # To count bytes takes longer, and few records are near the limit.
    if size + _LONGEST_CHARACTER * sum(map(len, texts)) <= max_bytes:
        return None
    size += sum(len(text.encode()) for text in texts)
    if size <= max_bytes:
        return None
    return (
        f"the record has {size} bytes with key and headers, the limit is "
        f"{max_bytes} (message.max.bytes)"
    )
