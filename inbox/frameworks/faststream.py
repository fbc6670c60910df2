"""A FastStream middleware that guards handlers, for any of FastStream's brokers.

    broker = NatsBroker(middlewares=[Idempotent(sessions, consumer="billing")])

    @broker.subscriber("orders.placed", stream="ORDERS", durable="billing")
    async def bill(order: Order, session: Annotated[AsyncSession, Context("session")]):
        session.add(Invoice(order_id=order.id))

Receipt and effects commit before FastStream acks. If the handler raises, both are
rolled back, and FastStream's `ack_policy` decides what follows: only with
`NACK_ON_ERROR` is the message redelivered. Redis stream entries written by Pillarbox's
publisher are decoded.
"""

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

try:
    from faststream import BaseMiddleware, ContextRepo
    from faststream.message import SourceType, StreamMessage
    from faststream.response import PublishCommand
    from faststream.response.publish_type import PublishType
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{__name__}: {error}; pip install 'pillarbox[faststream]'",
        name=error.name,
    ) from error
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from typing_extensions import override

from pillarbox.inbox.errors import InvalidReceiptError
from pillarbox.inbox.guard import record_receipt_async
from pillarbox.inbox.idle import DEFAULT_MAX_IDLE, check_max_idle, limit_idle, limiting
from pillarbox.inbox.processing import processing, received
from pillarbox.inbox.receipt import MessageId, check_text
from pillarbox.inbox.transaction import protected
from pillarbox.outbox import tracing
from pillarbox.outbox.cloudevents.fields import PAYLOAD, from_fields
from pillarbox.outbox.cloudevents.headers import to_headers
from pillarbox.outbox.errors import ConfigError, InvalidMessageError, shorten
from pillarbox.outbox.session import is_async_sessionmaker

# The header prefixes of a message's attributes, by FastStream's name of the broker.
_PREFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "confluent": ("ce_",),
    "kafka": ("ce_",),
    "nats": ("ce-",),
    "rabbit": ("cloudEvents:", "cloudEvents_"),
    "redis": ("ce-",),
}
_ANY: Final = ("ce-", "ce_", "cloudEvents:", "cloudEvents_")


def event_id(message: StreamMessage[Any]) -> MessageId:
    """Read the id that Pillarbox's publishers write, on any broker.

    Raises:
        InvalidReceiptError: there is no id, it isn't a UUID, or the message is a batch,
            which has many.
    """
    if message.batch_headers:
        raise InvalidReceiptError(
            f"batch of {len(message.batch_headers)} messages: not supported: with one"
            " receipt per batch, one duplicate would skip the whole batch; subscribe"
            " to single messages"
        )
    headers: Mapping[str, Any] = message.headers or {}
    prefixes = _PREFIXES.get(_broker_of(message), _ANY)
    for prefix in prefixes:
        value = headers.get(f"{prefix}id")
        if value:
            try:
                return UUID(value.decode() if isinstance(value, bytes) else str(value))
            except ValueError as error:
                raise InvalidReceiptError(
                    f"message id {value!r}: not a UUID; pass a key= function that "
                    "reads the id of such messages"
                ) from error
    raise InvalidReceiptError(
        f"message id: header {prefixes[0]}id is missing; pass a key= function that "
        "reads the id of such messages"
    )


def _broker_of(message: StreamMessage[Any]) -> str:
    for kind in type(message).__mro__:
        package, _, rest = kind.__module__.partition(".")
        if package == "faststream":
            return rest.partition(".")[0]
    return ""


def _system_of(message: StreamMessage[Any]) -> str:
    broker = _broker_of(message)
    return {"confluent": "kafka", "rabbit": "rabbitmq"}.get(broker, broker)


def _topic_of(message: StreamMessage[Any]) -> str | None:
    headers = _text_headers(message)
    prefixes = _PREFIXES.get(_broker_of(message), _ANY)
    return next((headers[f"{p}type"] for p in prefixes if f"{p}type" in headers), None)


def _text_headers(message: StreamMessage[Any]) -> dict[str, str]:
    return {
        name: value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for name, value in (message.headers or {}).items()
    }


def unfold(message: StreamMessage[Any]) -> None:
    """Decode a Redis stream entry written by Pillarbox's publisher, in place.

    FastStream decodes only its own entries; it turns any other entry into a single body
    that holds all fields. Entries from other publishers are left unchanged.

    Raises:
        InvalidReceiptError: the entry has the publisher's fields, but they don't form a
            valid message.
    """
    raw = message.raw_message
    if _broker_of(message) != "redis" or raw.get("type") != "stream":
        return
    fields: Mapping[bytes, bytes] = raw["data"]
    if PAYLOAD not in fields or b"ce_id" not in fields:
        return
    try:
        found = from_fields(fields)
    except InvalidMessageError as error:
        raise InvalidReceiptError(f"entry of {raw['channel']}: {error}") from error
    message.body = found.payload
    message.headers = to_headers(found, "ce-")
    message.content_type = found.content_type
    message.message_id = str(found.id)
    message.clear_cache()


class Idempotent:
    """Handles each message once for `consumer`; a duplicate is acked and skipped.

    For a duplicate, `@broker.publisher` publishes nothing, because it published when
    the message was first handled; a caller that waits for a reply gets an empty one.

    Args:
        sessions: the session factory of the handlers' database; a handler gets its
            session from `Context("session")`.
        consumer: the name under which receipts are recorded.
        key: returns a message's id: a UUIDv7 or a `ForeignId`.
        max_idle: how long a handler's transaction can be idle before PostgreSQL
            terminates its session; None: no limit.

    Raises:
        ConfigError: `max_idle` is invalid, or `sessions` isn't an `async_sessionmaker`.
        InvalidReceiptError: `consumer` is invalid. When a message arrives, whatever
            `record_receipt` raises.
    """

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        *,
        consumer: str,
        key: Callable[[StreamMessage[Any]], MessageId] = event_id,
        max_idle: timedelta | None = DEFAULT_MAX_IDLE,
    ) -> None:
        check_text("consumer", consumer)
        check_max_idle(max_idle)
        if not is_async_sessionmaker(sessions):
            raise ConfigError(
                f"sessions {shorten(sessions)}: FastStream's handlers are async; pass "
                "SQLAlchemy's async_sessionmaker(engine)"
            )
        self.max_idle = max_idle
        # A task that outlives its handler must not use its session.
        self.sessions = partial(sessions, close_resets_only=False)
        self.consumer = consumer
        self.key = key

    def __call__(self, message: Any, /, *, context: ContextRepo) -> "_Once":
        """Create the middleware for one message; FastStream calls this."""
        return _Once(message, context=context, guard=self)


class _Once(BaseMiddleware[Any, Any]):
    def __init__(
        self, message: Any, /, *, context: ContextRepo, guard: Idempotent
    ) -> None:
        super().__init__(message, context=context)
        self._guard = guard
        self._is_duplicate = False

    @override
    async def consume_scope(
        self,
        call_next: Callable[[Any], Awaitable[Any]],
        msg: StreamMessage[Any],
    ) -> Any:
        if msg.source_type is SourceType.RESPONSE:
            return await call_next(msg)
        unfold(msg)
        id = self._guard.key(msg)
        if tracing.tracer is None:
            return await self._handle(call_next, msg, id)
        system = _system_of(msg)
        known = received(id, topic=_topic_of(msg), headers=_text_headers(msg))
        with processing(
            tracing.tracer, [known], self._guard.consumer, system=system
        ) as span:
            result = await self._handle(call_next, msg, id)
            if self._is_duplicate:
                span.skipped()
        return result

    async def _handle(
        self,
        call_next: Callable[[Any], Awaitable[Any]],
        msg: StreamMessage[Any],
        id: MessageId,
    ) -> Any:
        max_idle = self._guard.max_idle
        with limiting(max_idle) as own:
            async with self._guard.sessions() as session, session.begin():
                limit_idle(session, max_idle)
                if not await record_receipt_async(session, id, self._guard.consumer):
                    self._is_duplicate = True
                    return None
                with own, self.context.scope("session", session):
                    async with protected(session, (id, self._guard.consumer)):
                        return await call_next(msg)

    @override
    async def publish_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], cmd: PublishCommand
    ) -> Any:
        # consume_scope returns None for a duplicate; FastStream would publish it.
        if self._is_duplicate and cmd.publish_type is PublishType.PUBLISH:
            return None
        return await call_next(cmd)
