"""The options of an `amqp://`, `amqps://` or `rabbitmq://` URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final
from urllib.parse import quote, unquote

from typing_extensions import override

from pillarbox.outbox.brokers.options import (
    FILE,
    BrokerOptions,
    Form,
    option,
    payload_limit,
)

MAX_NAME_BYTES: Final = 255
"""AMQP's limit for a short string: a name, a routing key or a content type."""

_NAME: Final = Form.text(
    f"a name of at most {MAX_NAME_BYTES} bytes",
    lambda text: len(text.encode(errors="replace")) <= MAX_NAME_BYTES,
)


@dataclass(frozen=True, kw_only=True)
class RabbitMQOptions(BrokerOptions):
    """The options of the publisher and the source; pika reads the rest."""

    schemes: ClassVar[tuple[str, ...]] = ("amqp", "amqps", "rabbitmq")
    ports: ClassVar[Mapping[str, int]] = {"amqp": 5672, "amqps": 5671, "rabbitmq": 5672}
    destination: ClassVar[tuple[str, ...] | None] = ("exchange",)
    client: ClassVar[tuple[str, ...]] = (
        "heartbeat",
        "socket_timeout",
        "stack_timeout",
        "blocked_connection_timeout",
        "connection_attempts",
        "retry_delay",
        "channel_max",
        "frame_max",
        "locale",
        "client_properties",
        "tcp_options",
        "ssl_options",
    )

    exchange: str = option(
        _NAME,
        "outbox",
        side="both",
        help="a durable topic exchange; created if it is missing",
    )
    unroutable: str = option(
        Form.choice("keep", "drop"),
        "keep",
        side="relay",
        help="`drop`: a message that reaches no queue is acked, and lost",
    )
    max_payload_bytes: int = payload_limit(
        # The default max_message_size of RabbitMQ 3; RabbitMQ 4's is 16 MiB.
        128 * 1024 * 1024,
        more="; set it to the server's `max_message_size`",
    )
    timeout: timedelta = option(
        Form.duration(),
        timedelta(seconds=20),
        side="relay",
        help="how long the confirms of a batch may take before RabbitMQ counts as "
        "unavailable",
    )
    queue: str | None = option(
        _NAME,
        side="consumer",
        shown="the consumer's name",
        help="the queue; created if it is missing",
    )
    queue_type: str = option(
        Form.choice("quorum", "classic"),
        "quorum",
        side="consumer",
        help="the type of a queue that is created",
    )
    shards: int = option(
        Form.number(1, 16),
        1,
        side="consumer",
        help="into how many shards the queue is divided, for as many replicas",
    )
    single_active_consumer: bool = option(
        Form.flag(),
        False,
        side="consumer",
        help="`true`: RabbitMQ itself chooses the one replica that consumes",
    )
    prefetch: int | None = option(
        Form.number(most=65_535),
        side="consumer",
        shown='6,000; 4 × the first `limit`, at least 100, with `order="none"`',
        help="maximum number of messages held in this process",
    )
    cacertfile: str | None = option(
        FILE,
        side="both",
        shown="the system's",
        help="file with the CA certificates, for `amqps://`",
    )
    certfile: str | None = option(
        FILE, side="both", help="file with the client's certificate"
    )
    keyfile: str | None = option(FILE, side="both", help="file with its key")

    @classmethod
    @override
    def place(cls, path: str, query: str) -> str:
        """Return the virtual host."""
        return f"/{quote(unquote(path[1:]) or '/', safe='')}"
