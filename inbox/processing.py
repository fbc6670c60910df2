"""The span that covers a handler's call, in processes that are traced."""

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

from pillarbox.inbox.handlers.outcome import Later
from pillarbox.inbox.receipt import ForeignId, MessageId
from pillarbox.inbox.verdict import judge
from pillarbox.outbox import tracing
from pillarbox.outbox.message import FrozenDict, Message
from pillarbox.outbox.tracing import Processing, Received, Traced, Tracer

T = TypeVar("T")


class _Untraced:
    """Stands for the span in a process that isn't traced."""

    def skipped(self) -> None: ...

    def failed(self, error: BaseException) -> None: ...


_UNTRACED: Final = nullcontext(_Untraced())


def processing(
    tracer: Tracer | None,
    messages: Sequence[Traced],
    consumer: str,
    *,
    system: str | None = None,
) -> AbstractContextManager[Processing]:
    """Cover the handling of messages with a span, which becomes the current one.

    If the consumer already covers these messages with a span, no other one is created.
    Raises no errors of its own. Without a tracer there is no span.
    """
    if tracer is None:
        return _UNTRACED
    return tracer.process(messages, consumer, system=system, is_decision=_asks_later)


def _asks_later(error: Exception) -> bool:
    return isinstance(judge(error), Later)


async def traced(
    messages: Sequence[Message], consumer: str, attempt: Awaitable[T]
) -> T:
    """Await a call of a handler, in its span if this process is traced.

    Its answer is false if all of the messages were duplicates.
    """
    with processing(tracing.tracer, messages, consumer) as span:
        if not (answer := await attempt):
            span.skipped()
    return answer


def received(
    id: MessageId,
    *,
    message: object = None,
    topic: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Traced:
    """Return what tracing knows about a message; `message` can be a `Message`."""
    if isinstance(message, Message):
        return message
    text = id.id if isinstance(id, ForeignId) else id
    return Received(text, topic, FrozenDict(headers or {}))
