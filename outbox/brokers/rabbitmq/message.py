"""A message as RabbitMQ carries it: properties, headers, body and routing key.

`message_id` is the id and `content_type` the content type; the rest are CloudEvents
attributes among the headers, under the prefix of the binding for AMQP. The moment of
publishing is where a server has it that stamps messages itself: in whole seconds in
`timestamp`, and in milliseconds in a header.
"""

import time
from typing import Final

from pika import BasicProperties

from outbox.brokers.rabbitmq.options import MAX_NAME_BYTES
from outbox.cloudevents.headers import CONTENT_TYPE, from_headers, to_headers
from outbox.cloudevents.raw_text import text_of
from outbox.errors import InvalidMessageError
from outbox.message import Message
from outbox.message_id import uuid7

PREFIX: Final = "cloudEvents:"
_MOMENT: Final = "timestamp_in_ms"
_PERSISTENT: Final = 2
# Where a quorum queue counts how often a message came back.
_OWN: Final = frozenset({"x-delivery-count", "x-acquired-count"})
# By these RabbitMQ routes a message to more queues, and closes the channel if it can't.
_ROUTING: Final = frozenset({"CC", "BCC"})
# They have to fit into one frame, of 128 KiB unless the server says less.
_MAX_HEADER_BYTES: Final = 120 * 1024
# Up to here, no text of UTF-8 is too long for a name.
_SHORT: Final = MAX_NAME_BYTES // 4


def to_properties(message: Message) -> BasicProperties:
    """Write everything but topic and payload, and that it is published now."""
    headers: dict[str, str | int] = {**to_headers(message, PREFIX)}
    del headers[CONTENT_TYPE]
    now = time.time()
    headers.setdefault(_MOMENT, int(now * 1000))
    return BasicProperties(  # type: ignore[no-untyped-call]
        content_type=message.content_type,
        headers=headers,
        delivery_mode=_PERSISTENT,
        message_id=str(message.id),
        timestamp=int(now),
    )


def published_at(properties: BasicProperties) -> float | None:
    """Return when a message was published, in seconds since 1970; None if unknown."""
    moment = (properties.headers or {}).get(_MOMENT)
    if isinstance(moment, int):
        return moment / 1000
    return None if properties.timestamp is None else float(properties.timestamp)


def from_delivery(
    properties: BasicProperties, routing_key: str | bytes, payload: bytes
) -> tuple[Message, str | None]:
    """Read a message; if it isn't one, give what can be read of it, and the reason."""
    headers = {
        _text(name): _text(value)
        for name, value in (properties.headers or {}).items()
        # A number in it is the moment of publishing; text is the user's own.
        if name not in _OWN and not (name == _MOMENT and isinstance(value, int))
    }
    # It is a property, and no header has its place.
    headers.pop(CONTENT_TYPE, None)
    if properties.content_type:
        headers[CONTENT_TYPE] = _text(properties.content_type)
    try:
        return from_headers(headers, payload, PREFIX), None
    except InvalidMessageError as error:
        if isinstance(routing_key, str):
            routing_key = routing_key.encode()
        topic = text_of(routing_key)
        return Message(topic, payload, id=uuid7(), headers=headers), str(error)


def why_impossible(message: Message) -> str | None:
    """Say why AMQP can't carry a message, whatever its payload."""
    for name, text in (
        ("topic", message.topic),
        ("content type", message.content_type),
        *(("name of a header", name) for name in message.headers),
    ):
        if len(text) > _SHORT and len(text.encode()) > MAX_NAME_BYTES:
            return (
                f"the {name} has {len(text.encode())} bytes, "
                f"the limit of AMQP is {MAX_NAME_BYTES}"
            )
    for name in _ROUTING & message.headers.keys():
        return f"header {name}: RabbitMQ routes by it; rename it"
    size = len(message.key or "") + len(message.tenant or "")
    size += sum(len(name) + len(value) for name, value in message.headers.items())
    if size > _MAX_HEADER_BYTES // 4:
        size = sum(
            len(text.encode())
            for pair in (*message.headers.items(), (message.key, message.tenant))
            for text in pair
            if text
        )
        if size > _MAX_HEADER_BYTES:
            return (
                f"the headers have {size} bytes, which have to fit into one frame: "
                f"the limit is {_MAX_HEADER_BYTES}"
            )
    return None


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return text_of(value)
    return value if isinstance(value, str) else str(value)
