"""The guard as a middleware of FastStream, for any of its brokers.

    broker = NatsBroker(middlewares=[Idempotent(sessions, consumer="billing")])

    @broker.subscriber("orders.placed")
    async def bill(order: Order, session: Annotated[AsyncSession, Context("session")]):
        session.add(Invoice(order_id=order.id))

Receipt and effects commit before FastStream acks. A handler that raises undoes both,
and what FastStream then does is by its own `ack_policy`.
"""

from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from faststream import BaseMiddleware, ContextRepo
from faststream.message import SourceType, StreamMessage
from faststream.response import PublishCommand
from faststream.response.publish_type import PublishType
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from typing_extensions import override

from inbox.errors import InvalidReceiptError
from inbox.idempotent import record_receipt_async
from inbox.idle import DEFAULT_MAX_IDLE, check_max_idle, limit_idle
from inbox.receipt import MessageId, check_text
from inbox.transaction import lent

_PREFIXES: Final = ("ce-", "ce_", "cloudEvents:", "cloudEvents_")


def event_id(message: StreamMessage[Any]) -> MessageId:
    """Read the id that our publishers write, whatever the broker.

    Raises:
        InvalidReceiptError: there is none.
    """
    headers: Mapping[str, Any] = message.headers or {}
    for prefix in _PREFIXES:
        value = headers.get(f"{prefix}id")
        if value:
            try:
                return UUID(value.decode() if isinstance(value, bytes) else str(value))
            except ValueError as error:
                raise InvalidReceiptError(
                    f"message id {value!r}: isn't a UUID; pass key=… that reads the id "
                    "of such messages"
                ) from error
    raise InvalidReceiptError(
        "message id: there is no header ce-id; pass key=… that reads the id of such "
        "messages"
    )


class Idempotent:
    """Handles each message once for `consumer`; a duplicate is acked and skipped.

    For a duplicate nothing is published by `@broker.publisher`, since the first
    handling did; who waits for a reply gets an empty one.

    Args:
        sessions: of the handlers' database; they get theirs by `Context("session")`.
        consumer: whose receipts these are.
        key: reads the id: a UUIDv7 or a `ForeignId`.
        max_idle: how long a handler's transaction may stand still before PostgreSQL
            ends its session; None: for ever.

    Raises:
        ConfigError: `max_idle` can't be used.
        InvalidReceiptError: `consumer` can't be used; in a handler's place also what
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
        self._max_idle = max_idle
        self._sessions = sessions
        self._consumer = consumer
        self._key = key

    def __call__(self, message: Any, /, *, context: ContextRepo) -> "_Once":
        """Make the middleware of one message, as FastStream asks."""
        return _Once(
            message,
            context=context,
            sessions=self._sessions,
            consumer=self._consumer,
            key=self._key,
            max_idle=self._max_idle,
        )


class _Once(BaseMiddleware[Any, Any]):
    def __init__(
        self,
        message: Any,
        /,
        *,
        context: ContextRepo,
        sessions: async_sessionmaker[AsyncSession],
        consumer: str,
        key: Callable[[StreamMessage[Any]], MessageId],
        max_idle: timedelta | None,
    ) -> None:
        super().__init__(message, context=context)
        self._sessions = sessions
        self._consumer = consumer
        self._key = key
        self._max_idle = max_idle
        self._is_duplicate = False

    @override
    async def consume_scope(
        self,
        call_next: Callable[[Any], Awaitable[Any]],
        msg: StreamMessage[Any],
    ) -> Any:
        if msg.source_type is SourceType.RESPONSE:
            return await call_next(msg)
        id = self._key(msg)
        async with self._sessions() as session, session.begin():
            limit_idle(session, self._max_idle)
            if not await record_receipt_async(session, id, self._consumer):
                self._is_duplicate = True
                return None
            async with lent(session):
                with self.context.scope("session", session):
                    return await call_next(msg)

    @override
    async def publish_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], cmd: PublishCommand
    ) -> Any:
        # Returning None, as a duplicate does, is to FastStream a result to publish.
        if self._is_duplicate and cmd.publish_type is PublishType.PUBLISH:
            return None
        return await call_next(cmd)
