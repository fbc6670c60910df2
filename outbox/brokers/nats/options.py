"""The options of a `nats://` or `tls://` URL."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

from pillarbox.outbox.brokers.options import (
    FILE,
    BrokerOptions,
    Form,
    option,
    payload_limit,
)
from pillarbox.outbox.brokers.shards import shards_option
from pillarbox.outbox.errors import ConfigError

_FORBIDDEN: Final = frozenset(" \t\r\n.*>/\\")
NAME_FORM: Final = "a name of letters, digits, - and _"


def is_name(text: str) -> bool:
    """Return whether a text can be the name of a stream, a consumer or a domain."""
    return bool(text) and text.isprintable() and not set(text) & _FORBIDDEN


@dataclass(frozen=True, kw_only=True)
class NatsOptions(BrokerOptions):
    """The options of the publisher and the source."""

    schemes: ClassVar[tuple[str, ...]] = ("nats", "tls")
    ports: ClassVar[Mapping[str, int]] = {"nats": 4222, "tls": 4222}
    destination: ClassVar[tuple[str, ...] | None] = ("stream", "domain", "shards")

    stream: str | None = option(
        Form.text(NAME_FORM, is_name),
        side="both",
        shown="the one that captures the topic",
        help="the only stream that may be used",
    )
    create: tuple[str, ...] = option(
        Form.names("subjects, separated by commas"),
        (),
        side="both",
        shown="",
        help="subjects, separated by commas: `stream` is created with them if it is "
        "missing",
    )
    shards: int = shards_option()
    max_payload_bytes: int | None = payload_limit(shown="the server's limit")
    timeout: timedelta = option(
        Form.duration(),
        timedelta(seconds=10),
        side="relay",
        help="how long to wait for any of the outstanding answers before NATS counts "
        "as unavailable",
    )
    ack_wait: timedelta | None = option(
        Form.duration(),
        side="consumer",
        shown="`30s`",
        help="time after which the messages of a dead replica are delivered again",
    )
    max_deliver: int | None = option(
        Form.number(),
        side="consumer",
        shown="unlimited",
        help="how often a message is delivered at most; the last time it becomes a "
        "dead letter without being handled",
    )
    max_ack_pending: int | None = option(
        Form.number(),
        side="consumer",
        shown="10,000",
        help="most messages that all replicas together may hold",
    )
    tls_ca: str | None = option(
        FILE,
        side="both",
        shown="the system's",
        help="file with the CA certificates, for `tls://`",
    )
    tls_cert: str | None = option(
        FILE, side="both", help="file with the client's certificate"
    )
    tls_key: str | None = option(FILE, side="both", help="file with its key")
    creds: str | None = option(
        FILE,
        side="both",
        help="a credentials file; needs `pip install nkeys`",
    )
    inbox_prefix: str = option(
        Form.text("a subject"),
        "_INBOX",
        side="both",
        help="prefix of the subjects of answers",
    )
    domain: str | None = option(
        Form.text(NAME_FORM, is_name), side="both", help="the JetStream domain"
    )

    def __post_init__(self) -> None:
        """Check that `create` comes with the name of the stream."""
        if self.create and self.stream is None:
            raise ConfigError(
                "broker URL option create: needs stream=NAME, the name of the stream"
            )
