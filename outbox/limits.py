"""The limits of a message. `add` checks them, so that nothing fails at the commit."""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from pillarbox.outbox.duration import exact_duration, write_duration
from pillarbox.outbox.errors import ConfigError, InvalidMessageError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import is_uuid7
from pillarbox.outbox.tracing import CAUSE

MAX_SCHEMA_VERSION: Final = 2**31 - 1
MAX_INDEXED_BYTES: Final = 2048
"""The limit of a topic and a key in UTF-8: an index entry holds about 2.7 KB."""
MAX_WAIT: Final = timedelta(days=365)
"""Until when a message may wait; the tables refuse more than a day above it."""
MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
"""The table's own limit; `Limits` can't raise it."""
# In UTF-8 and as JSON, texts within these limits are within those of the table.
_MAX_TOPIC_CHARS: Final = 255
_MAX_KEY_CHARS: Final = 512
_MAX_TENANT_CHARS: Final = 255
_MAX_CONTENT_TYPE_CHARS: Final = 255
_MAX_HEADER_BYTES: Final = 16 * 1024
_LAST_MILLISECOND: Final = 253_402_300_799_999  # of the year 9999
_MOST_BYTES: Final = 4  # of a character
# SQL's outbox.add has the same expression.
_RESERVED: Final = re.compile(
    r"ce[-_]|cloudevents[:_]|nats-|pillarbox-|webhook-|content-type\Z",
    re.ASCII | re.IGNORECASE,
)
_INITIALS: Final = "cCnNpPwW"
STORED_HEADERS: Final = frozenset({"pillarbox-codec", "pillarbox-content-type"})
"""Reserved headers that a payload codec writes into the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest message that `add` accepts.

    A topic and a tenant can have at most 255 characters, a key 512; names and values of
    all headers together, 16 KiB in UTF-8.

    Attributes:
        max_payload_bytes: the limit of one payload, at most 64 MiB; brokers reject
            payloads above about 1 MiB, and a relay those above its own
            `max_payload_bytes`, which is 8 MiB.
        max_delay: how far ahead `available_at` may be, at most a year. A receipt's day
            comes from the id, which is generated when the message is created. If this
            is more than 6 days, set a `--minimum` above it with `pillarbox retention
            set inbox.receipt`, and likewise for `inbox.job`.
    """

    max_payload_bytes: int = 1024 * 1024
    max_delay: timedelta = timedelta(days=6)

    def __post_init__(self) -> None:
        """Check the values."""
        if not 1 <= self.max_payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"max_payload_bytes={self.max_payload_bytes}: must be from 1 to "
                f"{MAX_PAYLOAD_BYTES}, the table's limit"
            )
        if not timedelta(0) <= self.max_delay <= MAX_WAIT:
            raise ConfigError(
                f"max_delay={exact_duration(self.max_delay)}: must not be negative, nor"
                f" over {MAX_WAIT.days} days, the table's limit"
            )

    def check(self, message: Message) -> None:
        """Check a message against every rule.

        Raises:
            InvalidMessageError: the message breaks a rule; the error has the field, the
                value and the remedy.
        """
        _check_text("topic", message.topic, _MAX_TOPIC_CHARS)
        if message.key is not None:
            _check_text("key", message.key, _MAX_KEY_CHARS)
        if message.tenant is not None:
            _check_text("tenant", message.tenant, _MAX_TENANT_CHARS)
        _check_text("content_type", message.content_type, _MAX_CONTENT_TYPE_CHARS)
        _check_headers(message.headers)
        if CAUSE in message.headers:
            check_bytes(f"header {CAUSE}", message.headers[CAUSE])
        _check_id(message.id)
        size = len(message.payload)
        if size > self.max_payload_bytes:
            raise InvalidMessageError(
                "payload",
                f"{size} bytes",
                f"is over the limit of {self.max_payload_bytes} bytes",
                "store it elsewhere and add a reference, or raise"
                " Limits(max_payload_bytes=…) and the broker's own limit",
            )
        version = message.schema_version
        if type(version) is not int or not 1 <= version <= MAX_SCHEMA_VERSION:
            raise InvalidMessageError(
                "schema_version", version, "isn't a whole number from 1", "pass 1, 2, …"
            )
        if not isinstance(message.priority, Priority):
            raise InvalidMessageError(
                "priority",
                message.priority,
                "isn't a Priority",
                f"pass one of {', '.join(f'Priority.{p.name}' for p in Priority)}",
            )
        if message.available_at is not None:
            self._check_moment(message.available_at)

    def _check_moment(self, moment: datetime) -> None:
        if not isinstance(moment, datetime):
            raise InvalidMessageError(
                "available_at", moment, "isn't a datetime", "pass an aware datetime"
            )
        if moment.tzinfo is None:
            raise InvalidMessageError(
                "available_at",
                moment,
                "is a naive datetime, which has no time zone",
                "give it a time zone: datetime.now(UTC) + …",
            )
        delay = moment - datetime.now(UTC)
        if delay > self.max_delay:
            days = delay.days + 1
            raise InvalidMessageError(
                "available_at",
                moment.isoformat(),
                f"is more than {exact_duration(self.max_delay)} ahead",
                "add it later; or call add(…, limits=pillarbox.outbox.limits.Limits("
                f"max_delay=timedelta(days={days}))), and keep receipts and jobs "
                f"longer: pillarbox retention set inbox.receipt {days + 15}d "
                f"--minimum {days + 1}d, and the same for inbox.job",
            )


def check_received(message: Message) -> None:
    """Check that the tables can store a message that came from a broker.

    Raises:
        InvalidMessageError: it can only be stored as a dead letter.
    """
    check_bytes("topic", message.topic)
    if message.schema_version > MAX_SCHEMA_VERSION:
        raise InvalidMessageError.received(
            "schema_version", message.schema_version, f"is above {MAX_SCHEMA_VERSION}"
        )
    if is_uuid7(message.id) and message.id.int >> 80 > _LAST_MILLISECOND:
        raise InvalidMessageError(
            "id",
            message.id,
            "has a time after the year 9999",
            "fix the producer's clock",
        )


def reserved_header(names: Iterable[str]) -> str | None:
    """Return the first name that is reserved for brokers and pillarbox, if any.

    Depending on the broker, such names carry CloudEvents attributes, the content type,
    signatures, NATS's own headers and those of a payload codec.
    """
    for name in names:
        # Few names begin with these letters: `traceparent`, for one, needs no further
        # check.
        if name[:1] in _INITIALS and _RESERVED.match(name) is not None:
            return name
    return None


def check_reserved(names: Iterable[str]) -> None:
    """Reject headers that the receiving side would read as something else.

    Raises:
        InvalidMessageError: a name is reserved.
    """
    name = reserved_header(names)
    if name is not None:
        raise InvalidMessageError(
            "headers",
            name,
            "is a reserved name: ce-, ce_, cloudEvents:, cloudEvents_, nats-, "
            "pillarbox-, webhook- and content-type belong to brokers and pillarbox",
            "rename the header, or set the message's own field (tenant=…, key=…)",
        )


def check_bytes(field: str, value: str) -> None:
    """Reject a text that is too long for an index.

    Raises:
        InvalidMessageError: it is too long; the error has the field, the value and the
            remedy.
    """
    if len(value) * _MOST_BYTES <= MAX_INDEXED_BYTES:
        return
    size = len(value.encode(errors="surrogatepass"))
    if size > MAX_INDEXED_BYTES:
        raise InvalidMessageError(
            field,
            value,
            f"has {size} bytes, the limit of an index is {MAX_INDEXED_BYTES}",
            "shorten it",
        )


def _check_text(field: str, value: object, limit: int) -> None:
    if not isinstance(value, str):
        raise InvalidMessageError(field, value, "isn't text", "pass a str")
    if not value:
        raise InvalidMessageError(field, value, "is empty", "give it a name")
    if len(value) > limit:
        raise InvalidMessageError(
            field,
            value,
            f"has {len(value)} characters, the limit is {limit}",
            "shorten it",
        )
    _check_storable(field, value)


def _check_storable(field: str, value: str) -> None:
    if "\0" in value:
        raise InvalidMessageError(
            field, value, "has a NUL, which PostgreSQL can't store", "remove it"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidMessageError(
            field,
            value,
            "has a lone surrogate, which UTF-8 can't encode",
            "decode the source with errors='replace'",
        ) from None


def _check_headers(headers: Mapping[Any, Any]) -> None:
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessageError(
                "headers",
                {name: value},
                "isn't a mapping of str to str",
                "pass str for both",
            )
        if not name:
            raise InvalidMessageError(
                "headers", {name: value}, "has an empty name", "name the header"
            )
        _check_storable("headers", name)
        _check_storable("headers", value)
        size += len(name.encode()) + len(value.encode())
    if size > _MAX_HEADER_BYTES:
        raise InvalidMessageError(
            "headers",
            f"{size} bytes",
            f"is over the limit of {_MAX_HEADER_BYTES} bytes",
            "move it into the payload",
        )


def _check_id(id: object) -> None:
    if not isinstance(id, UUID) or not is_uuid7(id):
        raise InvalidMessageError(
            "id",
            id,
            "isn't a UUIDv7, which the inbox needs to find the message's day",
            "omit it, or make it with outbox.uuid7()",
        )
    # Receipts are stored in daily partitions that are created a week ahead: an id of
    # another time would have no partition.
    age = time.time() - (id.int >> 80) / 1000
    if not -86_400 < age < 86_400:
        raise InvalidMessageError(
            "id",
            id,
            f"was made {write_duration(timedelta(seconds=abs(age)))} "
            f"{'ago' if age > 0 else 'ahead of this clock'}",
            "make a new one with outbox.uuid7() for each message",
        )
