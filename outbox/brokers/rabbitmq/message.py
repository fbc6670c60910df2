"""The form of a message in RabbitMQ: properties, headers, body and routing key.

`message_id` is the id and `content_type` the content type; the rest are CloudEvents
attributes among the headers, with a prefix of the AMQP binding. The time of publishing
is stored where a server that stamps messages stores it: in whole seconds in
`timestamp`, and in milliseconds in a header.
"""

import time
from collections.abc import Mapping
from typing import Final

from pika import BasicProperties

from pillarbox.outbox.brokers.rabbitmq.options import MAX_NAME_BYTES
from pillarbox.outbox.cloudevents.headers import CONTENT_TYPE, from_headers, to_headers
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import uuid7

PREFIX: Final = "cloudEvents:"
# The other prefix of the AMQP binding, which the CloudEvents SDKs write.
_THEIR_PREFIX: Final = "cloudEvents_"
_MOMENT: Final = "timestamp_in_ms"
_PERSISTENT: Final = 2
# Headers in which a quorum queue counts how often a message was returned.
_OWN: Final = frozenset({"x-delivery-count", "x-acquired-count"})
# Headers that make RabbitMQ route to more queues; if it can't, it closes the channel.
_ROUTING: Final = frozenset({"CC", "BCC"})
# Headers must fit into one frame, of 128 KiB unless the server sets less.
_MAX_HEADER_BYTES: Final = 120 * 1024


def to_properties(message: Message) -> BasicProperties:
    """Return a message, except topic and payload, as properties published now."""
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
    """Return the message of a delivery, as far as it is readable, and any problem."""
    headers = {
        _text(name): _text(value)
        for name, value in (properties.headers or {}).items()
        # A number is the time of publishing; text is the application's own header.
        if name not in _OWN and not (name == _MOMENT and isinstance(value, int))
    }
    # The content type is a property; a header doesn't replace it.
    headers.pop(CONTENT_TYPE, None)
    if properties.content_type:
        headers[CONTENT_TYPE] = _text(properties.content_type)
    try:
        return from_headers(headers, payload, _prefix_of(headers)), None
    except InvalidMessageError as error:
        if isinstance(routing_key, str):
            routing_key = routing_key.encode()
        topic = text_of(routing_key)
        return Message(topic, payload, id=uuid7(), headers=headers), str(error)


def _prefix_of(headers: Mapping[str, str]) -> str:
    """Return the prefix of a delivery's attributes.

    Only one prefix counts, so that a header with the other one can't add an attribute.
    """
    is_theirs = f"{_THEIR_PREFIX}id" in headers and f"{PREFIX}id" not in headers
    return _THEIR_PREFIX if is_theirs else PREFIX


def why_impossible(message: Message) -> str | None:
    """Return why AMQP can't carry a message, whatever its payload; None if it can."""
    for name, text in (
        ("topic", message.topic),
        ("content type", message.content_type),
        *(("name of a header", name) for name in message.headers),
    ):
        if _size(text) > MAX_NAME_BYTES:
            return (
                f"the {name} has {_size(text)} bytes, "
                f"the limit of AMQP is {MAX_NAME_BYTES}"
            )
    for name in _ROUTING & message.headers.keys():
        return f"header {name}: reserved: RabbitMQ uses it for routing; rename it"
    size = _size(
        "".join(
            (
                message.key or "",
                message.tenant or "",
                *message.headers,
                *message.headers.values(),
            )
        )
    )
    if size > _MAX_HEADER_BYTES:
        return (
            f"the headers have {size} bytes, which have to fit into one frame: "
            f"the limit is {_MAX_HEADER_BYTES}"
        )
    return None


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return text_of(value)
    return value if isinstance(value, str) else str(value)
