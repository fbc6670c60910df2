"""Batch handlers: many messages in one transaction, their receipts in one statement.

While one batch is being handled, the next one collects, so batches grow with the load
and a single message doesn't wait. When a batch fails, its messages are handled one by
one, so only the bad message fails.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from inbox.errors import TransactionEndedError
from inbox.handlers.executor import Executor
from inbox.handlers.routes import BatchHandler, Handler
from inbox.handlers.terms import Terms, call_alone, prepare
from outbox.errors import ConfigError, DatabaseUnavailableError
from outbox.message import Message

Answer: TypeAlias = asyncio.Future[bool]


class Batching:
    """A handler `(session, messages)` and its terms.

    Args:
        size: the maximum number of messages in one call. They have different keys,
            unless the queue doesn't keep order.
    """

    def __init__(self, handler: BatchHandler, terms: Terms, size: int) -> None:
        if size < 2:
            raise ConfigError(f"max_size={size}: must be at least 2")
        self.terms = terms
        self.size = size
        self.__qualname__ = getattr(handler, "__qualname__", repr(handler))
        # Upcast before messages join a batch, so one that can't be upcast fails alone.
        limited = Terms(_same, terms.time_limit, arguments=terms.arguments)
        self.handler: Any = prepare(cast("Handler", handler), limited)

    def __call__(self, session: Any, message: Message) -> Any:
        """Handle a single message, like any handler."""
        return self.handler(session, [self.terms.upcast(message)])


class Batches:
    """Collects the batches of one batch handler. For one event loop."""

    def __init__(self, batching: Batching, executor: Executor) -> None:
        self._batching = batching
        self._executor = executor
        self._waiting: deque[tuple[Message, Answer]] = deque()
        self._at_work: list[tuple[Message, Answer]] = []
        self._work: asyncio.Task[None] | None = None

    async def handle(self, message: Message) -> bool:
        """Handle a message in the next batch; return whether it was new.

        Raises:
            Exception: whatever the handler raised for this message alone, or
                `Executor.handle` raises.
        """
        message = call_alone(self._batching.terms.upcast, message)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._handle_all())
        try:
            return await answer
        except asyncio.CancelledError:
            # The drain is over: the last message to leave cancels the batch.
            if all(answer.done() for _, answer in (*self._at_work, *self._waiting)):
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)
            raise

    async def _handle_all(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), self._batching.size)
            batch = [self._waiting.popleft() for _ in range(count)]
            # Skip messages that a stop has cancelled.
            self._at_work = [(m, a) for m, a in batch if not a.done()]
            await self._handle(self._at_work)

    async def _handle(self, batch: Sequence[tuple[Message, Answer]]) -> None:
        if not batch:
            return
        handler = self._batching.handler
        try:
            new = await self._executor.handle_batch(handler, [m for m, _ in batch])
        except (DatabaseUnavailableError, TransactionEndedError) as error:
            # After TransactionEndedError receipts may be committed, so handling the
            # messages one by one could skip them as duplicates.
            self._fail(batch, error)
            return
        except Exception as error:  # noqa: BLE001 (a handler may raise anything)
            if len(batch) == 1:
                self._fail(batch, error)
                return
        else:
            for message, answer in batch:
                if not answer.done():
                    answer.set_result(message.id in new)
                new.discard(message.id)  # the same message can come twice in a batch
            return
        # Outside of the block, so that no error has that of the batch as its context.
        for one in batch:
            await self._handle([one])

    def _fail(self, batch: Sequence[tuple[Message, Answer]], error: Exception) -> None:
        for _, answer in batch:
            if not answer.done():
                answer.set_exception(error)


def _same(message: Message) -> Message:
    return message
