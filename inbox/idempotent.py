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
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    overload,
)

from sqlalchemy.orm import Session

from inbox.errors import DeadLetter, DuplicateMessageError
from inbox.handlers.signature import Takes, check_signature, is_async, refuse_unrun
from inbox.processing import processing, received
from inbox.receipt import MessageId, check_text, handling, record_for_call
from inbox.transaction import lent
from outbox import tracing
from outbox.errors import CodecError, ConfigError, NotASessionError, shorten
from outbox.message import Message
from outbox.payload_codec import PayloadCodec, decoded
from outbox.session import AnySession, is_async_scoped_session, is_async_session
from outbox.writer import sync_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session


M = TypeVar("M")
R = TypeVar("R")

OnDuplicate: TypeAlias = Literal["skip", "raise"]

_MARK: Final = "__idempotent__"
_CALLED: Final = "inbox.idempotent_called"


def message_id(message: Message) -> MessageId:
    """Return the id that a message's receipt has: the default for `key`."""
    return message.id


class Guard(Protocol[M]):
    """The return type of `idempotent`: a decorator that makes a handler idempotent."""

    @overload
    def __call__(
        self, handler: Callable[["AsyncSession", M], Awaitable[R]], /
    ) -> Callable[["AsyncSession", M], Coroutine[Any, Any, R | None]]: ...

    @overload
    def __call__(
        self, handler: Callable[[Session, M], R], /
    ) -> Callable[[Session, M], R | None]: ...


@overload
def idempotent(
    *,
    consumer: str,
    codec: PayloadCodec | None = None,
    on_duplicate: OnDuplicate = "skip",
) -> Guard[Message]: ...


@overload
def idempotent(
    *,
    consumer: str,
    key: Callable[[M], MessageId],
    on_duplicate: OnDuplicate = "skip",
) -> Guard[M]: ...


def idempotent(
    *,
    consumer: str,
    key: Callable[[Any], MessageId] = message_id,
    codec: PayloadCodec | None = None,
    on_duplicate: OnDuplicate = "skip",
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
        on_duplicate: `"skip"` it, or `"raise"` a `DuplicateMessageError`.

    Raises:
        InvalidReceiptError: `consumer` is invalid; on a call, whatever `record_receipt`
            raises.
        ConfigError: `on_duplicate` is invalid, or the handler has the wrong signature.
        DuplicateMessageError: when called for a duplicate, with `"raise"`.
        DeadLetter: when called, if the payload can't be decoded.
        TransactionControlError: when called, if the handler ended the transaction, or
            tried to.
        UnexpectedRollbackError: when called, or from the caller's commit: a database
            error was caught without a savepoint.
    """
    check_text("consumer", consumer)
    known = get_args(OnDuplicate)
    if on_duplicate not in known:
        raise ConfigError(
            f"on_duplicate={on_duplicate!r}: use one of {', '.join(known)}"
        )
    return cast("Guard[Any]", _Guard(consumer, key, codec, on_duplicate))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The receipt settings of an `@idempotent` handler."""

    consumer: str
    key: Callable[[Any], MessageId]
    on_duplicate: OnDuplicate


class _Guard(Generic[M]):
    def __init__(
        self,
        consumer: str,
        key: Callable[[M], MessageId],
        codec: PayloadCodec | None,
        on_duplicate: OnDuplicate,
    ) -> None:
        self._consumer = consumer
        self._on_duplicate = on_duplicate
        self._key = key
        self._codec = codec

    def __call__(self, handler: Callable[[Any, M], Any]) -> Callable[[Any, M], Any]:
        check_signature(handler, Takes.ONE)
        guarded = self._async(handler) if is_async(handler) else self._sync(handler)
        setattr(guarded, _MARK, _Mark(self._consumer, self._key, self._on_duplicate))
        return guarded

    def _sync(self, handler: Callable[[Session, M], Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        def handle_once(session: Session, message: M) -> Any:
            if tracing.tracer is None:
                return self._handle(handler, session, message)[1]
            with self._processing(tracing.tracer, message) as span:
                is_new, result = self._handle(handler, session, message)
                if not is_new:
                    span.skipped()
            return result

        return handle_once

    def _handle(
        self, handler: Callable[[Session, M], Any], session: Session, message: M
    ) -> tuple[bool, Any]:
        key, function = self._key(message), id(handler)
        is_new = record_for_call(session, key, self._consumer, function)
        _note_call(session)
        if not is_new:
            self._refuse_duplicate(key)
            return False, None
        with lent(session), handling(session, [key], self._consumer, function):
            result = handler(session, self._read(message))
            refuse_unrun(handler, result)
        return True, result

    def _async(self, handler: Callable[["AsyncSession", M], Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        async def handle_once(session: "AsyncSession", message: M) -> Any:
            if tracing.tracer is None:
                return (await self._handle_async(handler, session, message))[1]
            with self._processing(tracing.tracer, message) as span:
                is_new, result = await self._handle_async(handler, session, message)
                if not is_new:
                    span.skipped()
            return result

        return handle_once

    async def _handle_async(
        self,
        handler: Callable[["AsyncSession", M], Any],
        session: "AsyncSession",
        message: M,
    ) -> tuple[bool, Any]:
        key, function = self._key(message), id(handler)
        is_new = await record_receipt_async(session, key, self._consumer, function)
        _note_call(session)
        if not is_new:
            self._refuse_duplicate(key)
            return False, None
        async with lent(session):
            with handling(session, [key], self._consumer, function):
                result = await handler(session, self._read(message))
            refuse_unrun(handler, result)
        return True, result

    def _processing(
        self, tracer: tracing.Tracer, message: M
    ) -> AbstractContextManager[tracing.Processing]:
        known = received(self._key(message), message=message)
        return processing(tracer, [known], self._consumer)

    def _refuse_duplicate(self, key: MessageId) -> None:
        if self._on_duplicate == "raise":
            raise DuplicateMessageError(key, self._consumer)

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
    function: object = None,
) -> bool:
    """Call `record_for_call` with an `AsyncSession`.

    Raises:
        NotASessionError: `session` isn't an `AsyncSession`.
        Exception: whatever `record_for_call` raises.
    """
    if is_async_scoped_session(session):
        session = session()
    if not is_async_session(session):
        raise NotASessionError(
            f"session {shorten(session)}: isn't a SQLAlchemy AsyncSession, which an "
            "async handler needs; pass one, or make the handler a plain function"
        )
    return await session.run_sync(record_for_call, message_id, consumer, function)


def is_idempotent(handler: Callable[..., Any]) -> bool:
    """Return whether a handler records its receipt itself."""
    return _mark_of(handler) is not None


def _note_call(session: AnySession) -> None:
    called = sync_session(session)
    called.info[_CALLED] = called.get_transaction()


def was_called(session: Session) -> bool:
    """Return whether an `@idempotent` handler was called in the current transaction.

    A function that wraps one by `functools.wraps` may return without calling it.
    """
    called = session.info.get(_CALLED)
    return called is not None and called is session.get_transaction()


def on_duplicate_of(handler: Callable[..., Any]) -> OnDuplicate | None:
    """Return a handler's `on_duplicate` policy; None if it isn't `@idempotent`."""
    mark = _mark_of(handler)
    return None if mark is None else mark.on_duplicate


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


def note_lift(handler: Callable[..., Any], lift: Callable[[Message], Message]) -> None:
    """Make a handler's `key` read messages as upcast by `lift`."""
    mark = _mark_of(handler)
    if mark is not None:
        key = mark.key
        lifted = replace(mark, key=lambda message: key(lift(message)))
        setattr(handler, _MARK, lifted)


def _mark_of(handler: object) -> _Mark | None:
    return cast("_Mark | None", getattr(handler, _MARK, None))
