"""The options of an `sqs://` or `sns://` URL."""

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

from typing_extensions import override

from pillarbox.outbox.brokers.options import (
    BrokerOptions,
    Form,
    identity_of,
    option,
    payload_limit,
)
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.url import split

_SECOND: Final = timedelta(seconds=1)


def _is_endpoint(url: str) -> bool:
    try:
        parts = split(url)
    except ConfigError:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and "@" not in url


@dataclass(frozen=True, kw_only=True)
class SqsOptions(BrokerOptions):
    """The options of the publisher and the source."""

    schemes: ClassVar[tuple[str, ...]] = ("sqs", "sns")
    destination: ClassVar[tuple[str, ...] | None] = (
        "fifo",
        "queue_prefix",
        "topic_prefix",
        "account",
    )

    fifo: bool = option(
        Form.flag(),
        False,
        side="both",
        help="`true`: the names end in `.fifo`",
    )
    queue_prefix: str | None = option(
        Form.text(), side="both", help="prefix of the queues' names"
    )
    topic_prefix: str | None = option(
        Form.text(), side="relay", help="prefix of the SNS topics' names"
    )
    queue: str | None = option(
        Form.text(),
        side="consumer",
        shown="`{topic}`, with `sns://` `{consumer}-{topic}`",
        help="the name of a consumer's queue",
    )
    account: str | None = option(
        Form.text("its 12 digits", re.compile(r"[0-9]{12}").fullmatch),
        side="both",
        shown="the credentials'",
        help="12 digits: the account that owns the queues or topics",
    )
    endpoint_url: str | None = option(
        Form.text("https://host:port", _is_endpoint),
        side="both",
        shown="AWS",
        help="another server that implements the API of AWS",
    )
    max_payload_bytes: int | None = payload_limit(shown="the queue's limit")
    in_flight: int = option(
        Form.number(), 16, side="relay", help="the most requests in flight"
    )
    wait: timedelta = option(
        Form.duration(timedelta(0), 20 * _SECOND, whole=True),
        20 * _SECOND,
        side="consumer",
        help="how long one request waits for messages, at most 20 s",
    )
    visibility: timedelta = option(
        Form.duration(_SECOND, timedelta(hours=12), whole=True),
        30 * _SECOND,
        side="consumer",
        help="time after which a dead replica's messages are delivered again",
    )

    @classmethod
    @override
    def identity(cls, url: str) -> str:
        """Return region and server, as botocore finds them in the environment, too."""
        _, options = cls.parse(url)
        service, _, rest = super().identity(url).partition("://")
        if not rest or rest.startswith("?"):
            rest = os.environ.get("AWS_DEFAULT_REGION", "") + rest
        endpoint = (
            options.endpoint_url
            or os.environ.get(f"AWS_ENDPOINT_URL_{service.upper()}")
            or os.environ.get("AWS_ENDPOINT_URL")
        )
        server = f" at {identity_of(endpoint)}" if endpoint else ""
        return f"{service}://{rest}{server}"
