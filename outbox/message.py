"""The message: one event to deliver; the value that all packages share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Never, Self, TypedDict, TypeVar, Unpack
from uuid import UUID

from typing_extensions import override

from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.payload import json_codec as codec

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A copy of a mapping that can't be changed.

    Unlike a `MappingProxyType`, it doesn't change with the original, and it can be
    hashed, pickled and deep-copied.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise TypeError("a FrozenDict can't be changed; copy it with dict(…)")

    __setitem__ = __delitem__ = clear = pop = popitem = _refuse
    setdefault = update = __ior__ = _refuse

    @override
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


_NO_HEADERS: Final[FrozenDict[str, str]] = FrozenDict()


class Details(TypedDict, total=False):
    """The fields of a message other than topic and payload; see `Message`."""

    key: str | None
    tenant: str | None
    headers: Mapping[str, str]
    id: UUID
    priority: Priority
    available_at: datetime | None


class _Changes(Details, total=False):
    topic: str
    payload: object
    content_type: str
    schema_version: int


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """One event to deliver. Immutable; safe to share between threads and tasks.

    Attributes:
        topic: the destination at the broker.
        payload: the body, as bytes.
        key: messages with the same key and priority stay in order; None means no order.
        tenant: the customer or account it belongs to, for fair scheduling among
            tenants.
        headers: str to str, passed on to the consumer.
        id: the idempotency key of consumers, a UUIDv7.
        content_type: the media type of the payload.
        schema_version: the version of the payload's shape, from 1.
        priority: its class, for publishing and for handling.
        available_at: don't publish it before this time; None means now.
    """

    topic: str
    payload: bytes
    key: str | None
    tenant: str | None
    headers: Mapping[str, str]
    id: UUID
    content_type: str
    schema_version: int
    priority: Priority
    available_at: datetime | None

    def __init__(
        self,
        topic: str,
        payload: object,
        *,
        key: str | None = None,
        tenant: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        id: UUID | None = None,
        content_type: str | None = None,
        schema_version: int = 1,
        priority: Priority = Priority.DEFAULT,
        available_at: datetime | None = None,
    ) -> None:
        """Create a message; `add` checks it.

        Args:
            payload: bytes are used as they are. Anything else is encoded as JSON now:
                see `jsonable` for models, dataclasses, dates and others. So a str
                becomes a JSON string, whatever it contains: pass text that is JSON to
                `from_json`.
            headers: they are copied, so a later change doesn't reach the message.
            content_type: by default `application/octet-stream` for bytes and
                `application/json` for the rest.

        Raises:
            CodecError: the payload can't be encoded.
            InvalidMessageError: `headers` isn't a mapping.
        """
        # The relay creates tens of thousands of these a second: no loop, no dict.
        assign = object.__setattr__
        assign(self, "topic", topic)
        if isinstance(payload, bytes):
            assign(self, "payload", payload)
            assign(self, "content_type", content_type or codec.BINARY)
        else:
            assign(self, "payload", codec.encode(payload))
            assign(self, "content_type", content_type or codec.JSON)
        assign(self, "key", key)
        assign(self, "tenant", tenant)
        if type(headers) is not FrozenDict:
            # An abstract class takes as long to ask as all the rest together.
            if type(headers) is not dict and not isinstance(headers, Mapping):
                raise InvalidMessageError(
                    "headers", headers, "isn't a mapping", "pass a dict of str to str"
                )
            headers = FrozenDict(headers) if headers else _NO_HEADERS
        assign(self, "headers", headers)
        assign(self, "id", uuid7() if id is None else id)
        assign(self, "schema_version", schema_version)
        assign(self, "priority", priority)
        assign(self, "available_at", available_at)

    @classmethod
    def from_json(
        cls,
        topic: str,
        payload: str | bytes,
        *,
        schema_version: int = 1,
        **details: Unpack[Details],
    ) -> Self:
        """Create a message whose payload is already JSON.

        Args:
            payload: JSON; it is checked, and used unchanged.
            details: as for `Message`.

        Raises:
            CodecError: it isn't JSON in UTF-8.
        """
        encoded = payload.encode() if isinstance(payload, str) else payload
        codec.decode(encoded)
        return cls(
            topic,
            encoded,
            content_type=codec.JSON,
            schema_version=schema_version,
            **details,
        )

    def replace(self, **changes: Unpack[_Changes]) -> Self:
        """Return a copy with some attributes changed.

        A new payload that isn't bytes is encoded as JSON; its content type is then
        `application/json` unless that is given, too.

        Raises:
            CodecError: the payload can't be encoded.
        """
        values: dict[str, Any] = {**changes}
        if not isinstance(values.get("payload", b""), bytes):
            values.setdefault("content_type", codec.JSON)
        return replace(self, **values)

    def json(self) -> Any:
        """Decode the payload as JSON.

        Raises:
            CodecError: it isn't JSON.
        """
        return codec.decode(self.payload)

    @override
    def __repr__(self) -> str:
        """Identify the message without its payload, which must not reach logs."""
        return (
            f"Message(topic={self.topic!r}, key={self.key!r}, id='{self.id}', "
            f"payload=<{len(self.payload)} bytes>)"
        )
