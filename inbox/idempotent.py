"""`@idempotent`: applies a handler's effects exactly once, in any consumer."""

import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

from sqlalchemy.orm import Session

from inbox.errors import DeadLetter
from inbox.handlers.arguments import arguments_of
from inbox.handlers.signature import Takes, is_async, refuse_unrun
from inbox.processing import processing, received
from inbox.receipt import MessageId, check_text, record_receipt
from inbox.transaction import protected
from outbox import tracing
from outbox.errors import CodecError, NotASessionError, shorten
from outbox.message import Message
from outbox.payload.payload_codec import PayloadCodec, decoded
from outbox.session import AnySession, is_async_scoped_session, is_async_session
from outbox.writer import sync_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session


M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
R = TypeVar("R")

Call: TypeAlias = Callable[[Any, Any], Any]
"""Calls a handler with its own arguments."""

_MARK: Final = "__idempotent__"
_CALLED: Final = "inbox.idempotent_called"


def message_id(message: Message) -> MessageId:
    """Return the id that a message's receipt has: the default for `key`."""
    return message.id


class Guard(Protocol[M_contra]):
    """The return type of `idempotent`: a decorator that makes a handler idempotent.

    The handler's own arguments can have any order, and be a decoded payload.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine function matches both
        self, handler: Callable[..., Awaitable[R]], /
    ) -> Callable[["AsyncSession", M_contra], Coroutine[Any, Any, R | None]]: ...

    @overload
    def __call__(
        self, handler: Callable[..., R], /
    ) -> Callable[[Session, M_contra], R | None]: ...


@overload
def idempotent(
    *,
    consumer: str,
    codec: PayloadCodec | None = None,
) -> Guard[Message]: ...


@overload
def idempotent(
    *,
    consumer: str,
    key: Callable[[M], MessageId],
) -> Guard[M]: ...


def idempotent(
    *,
    consumer: str,
    key: Callable[[Any], MessageId] = message_id,
    codec: PayloadCodec | None = None,
) -> Guard[Any]:
    """Make a handler `(session, message)` run once for each message and consumer.

    The receipt is inserted first, in the session's transaction. If it is new, the
    handler runs, and its result is returned; for a duplicate, the result is None.
    Receipt and effects commit or roll back together, with the caller's transaction. The
    handler is a plain function with a `Session`, or a coroutine function with an
    `AsyncSession`. It must not end the transaction, but may use savepoints
    (`session.begin_nested()`).

    Args:
        consumer: the name on the receipt: each consumer handles a message once.
        key: returns the id of the message: a UUIDv7, or a `ForeignId`.
        codec: decodes the payload for the handler.

    Raises:
        InvalidReceiptError: `consumer` is invalid; on a call, whatever `record_receipt`
            raises.
        ConfigError: the handler has the wrong signature.
        DeadLetter: when called, if the payload can't be decoded.
        HandlerTransactionError: when called, or from the caller's commit: the handler
            ended the transaction or tried to, or caught a database error without a
            savepoint.
    """
    check_text("consumer", consumer)
    return cast("Guard[Any]", _Guard(consumer, key, codec))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The receipt settings of an `@idempotent` handler."""

    consumer: str
    key: Callable[[Any], MessageId]


class _Guard(Generic[M]):
    def __init__(
        self,
        consumer: str,
        key: Callable[[M], MessageId],
        codec: PayloadCodec | None,
    ) -> None:
        self._consumer = consumer
        self._key = key
        self._codec = codec

    def __call__(self, handler: Callable[..., Any]) -> Callable[[Any, M], Any]:
        arguments = arguments_of(handler, Takes.ONE, is_lenient=True).of

        def call(session: AnySession, message: M) -> Any:
            return handler(*arguments(session, self._read(message)))

        make = self._async if is_async(handler) else self._sync
        guarded = functools.wraps(handler)(make(handler, call))
        setattr(guarded, _MARK, _Mark(self._consumer, self._key))
        return guarded

    def _sync(self, handler: Callable[..., Any], call: Call) -> Callable[..., Any]:
        def handle_once(session: Session, message: M) -> Any:
            if tracing.tracer is None:
                return self._handle(handler, call, session, message)[1]
            with self._processing(tracing.tracer, message) as span:
                is_new, result = self._handle(handler, call, session, message)
                if not is_new:
                    span.skipped()
            return result

        return handle_once

    def _handle(
        self, handler: Callable[..., Any], call: Call, session: Session, message: M
    ) -> tuple[bool, Any]:
        key = self._key(message)
        is_new = record_receipt(session, key, self._consumer)
        _record_call(session)
        if not is_new:
            return False, None
        with protected(session, (key, self._consumer)):
            result = call(session, message)
            refuse_unrun(handler, result)
        return True, result

    def _async(self, handler: Callable[..., Any], call: Call) -> Callable[..., Any]:
        async def handle_once(session: "AsyncSession", message: M) -> Any:
            if tracing.tracer is None:
                return (await self._handle_async(handler, call, session, message))[1]
            with self._processing(tracing.tracer, message) as span:
                done = await self._handle_async(handler, call, session, message)
                is_new, result = done
                if not is_new:
                    span.skipped()
            return result

        return handle_once

    async def _handle_async(
        self,
        handler: Callable[..., Any],
        call: Call,
        session: "AsyncSession",
        message: M,
    ) -> tuple[bool, Any]:
        key = self._key(message)
        is_new = await record_receipt_async(session, key, self._consumer)
        _record_call(session)
        if not is_new:
            return False, None
        async with protected(session, (key, self._consumer)):
            result = await call(session, message)
            refuse_unrun(handler, result)
        return True, result

    def _processing(
        self, tracer: tracing.Tracer, message: M
    ) -> AbstractContextManager[tracing.Processing]:
        known = received(self._key(message), message=message)
        return processing(tracer, [known], self._consumer)

    def _read(self, message: M) -> M:
        if self._codec is None or not isinstance(message, Message):
            return message
        return cast("M", readable(message, self._codec))


def readable(message: Message, codec: PayloadCodec) -> Message:
    """Decode a message for its handler.

    Raises:
        DeadLetter: it can't be decoded.
    """
    try:
        return decoded(message, codec)
    except CodecError as error:
        raise DeadLetter(str(error)) from error


async def record_receipt_async(
    session: "AsyncSession | async_scoped_session[Any]",
    message_id: MessageId,
    consumer: str,
) -> bool:
    """Call `record_receipt` with an `AsyncSession`.

    Raises:
        NotASessionError: `session` isn't an `AsyncSession`.
        Exception: whatever `record_receipt` raises.
    """
    if is_async_scoped_session(session):
        session = session()
    if not is_async_session(session):
        raise NotASessionError(
            f"session {shorten(session)}: isn't a SQLAlchemy AsyncSession, which an "
            "async handler needs; pass one, or make the handler a plain function"
        )
    return await session.run_sync(record_receipt, message_id, consumer)


def is_idempotent(handler: Callable[..., Any]) -> bool:
    """Return whether a handler records its receipt itself."""
    return _mark_of(handler) is not None


def _record_call(session: AnySession) -> None:
    called = sync_session(session)
    called.info[_CALLED] = called.get_transaction()


def was_called(session: Session) -> bool:
    """Return whether an `@idempotent` handler was called in the current transaction.

    A function that wraps one by `functools.wraps` may return without calling it.
    """
    called = session.info.get(_CALLED)
    return called is not None and called is session.get_transaction()


def receipt_of(
    handler: object, message: Message, consumer: str
) -> tuple[MessageId, str]:
    """Return the id and consumer of the receipt that a handler records for a message.

    Args:
        consumer: the name on the receipt if the handler isn't `@idempotent`.

    Raises:
        Exception: whatever the handler's `key` raises.
    """
    mark = _mark_of(handler)
    if mark is None:
        return message.id, consumer
    return mark.key(message), mark.consumer


def set_upcast(
    handler: Callable[..., Any], upcast: Callable[[Message], Message]
) -> None:
    """Make a handler's `key` read messages as upcast by `upcast`."""
    mark = _mark_of(handler)
    if mark is not None:
        key = mark.key
        upcasting = replace(mark, key=lambda message: key(upcast(message)))
        setattr(handler, _MARK, upcasting)


def _mark_of(handler: object) -> _Mark | None:
    return cast("_Mark | None", getattr(handler, _MARK, None))
