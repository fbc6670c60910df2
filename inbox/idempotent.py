"""`@idempotent`: applies a handler's effects exactly once, in any consumer."""

import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, overload

from sqlalchemy.orm import Session

from pillarbox.inbox.errors import DeadLetter
from pillarbox.inbox.guard import guard_of
from pillarbox.inbox.handlers.arguments import arguments_of
from pillarbox.inbox.handlers.signature import IDEMPOTENT, Takes, is_async, refuse_unrun
from pillarbox.inbox.receipt import MessageId, check_text
from pillarbox.outbox.errors import CodecError, ConfigError
from pillarbox.outbox.message import Message
from pillarbox.outbox.payload.payload_codec import PayloadCodec, decoded, why_unreadable

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

_GIVE_CODEC: Final = "pass one, idempotent(consumer=…, codec=codec)"

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
R = TypeVar("R")


def message_id(message: Message) -> MessageId:
    """Return the id for a message's receipt: the default for `key`.

    Args:
        message: one that a relay published, or of another producer.
    """
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
        ConfigError: the handler has the wrong signature; when called, if the payload
            is encoded, and there is no codec.
        DeadLetter: when called, if the payload can't be decoded.
        HandlerTransactionError: when called, or from the caller's commit: the handler
            ended the transaction or tried to, or caught a database error without a
            savepoint.
    """
    check_text("consumer", consumer)

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        arguments = arguments_of(handler, Takes.ONE, is_lenient=True).of

        def call(session: Any, message: Any) -> Any:
            if isinstance(message, Message):
                if codec is not None:
                    message = readable(message, codec)
                elif (encoded := why_unreadable(message, _GIVE_CODEC)) is not None:
                    raise ConfigError(f"message {message.id}: {encoded}")
            return handler(*arguments(session, message))

        def handle_once(session: Any, message: Any) -> Any:
            with guard_of(session, message, key(message), consumer) as is_new:
                result = call(session, message) if is_new else None
                refuse_unrun(handler, result)
            return result

        async def handle_once_async(session: Any, message: Any) -> Any:
            async with guard_of(session, message, key(message), consumer) as is_new:
                result = await call(session, message) if is_new else None
                refuse_unrun(handler, result)
            return result

        made = handle_once_async if is_async(handler) else handle_once
        guarded = functools.wraps(handler)(made)
        setattr(guarded, IDEMPOTENT, True)
        return guarded

    return decorate


def readable(message: Message, codec: PayloadCodec) -> Message:
    """Decode a message for its handler.

    Raises:
        DeadLetter: it can't be decoded.
    """
    try:
        return decoded(message, codec)
    except CodecError as error:
        raise DeadLetter(str(error)) from error
