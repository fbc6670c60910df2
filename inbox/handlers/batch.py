"""Batch handlers: many messages in one transaction, their receipts in one statement.

While one batch is being handled, the next one collects, so batches grow with the load
and a single message doesn't wait. If more wait than a batch holds, priorities take
turns. When a batch fails, its messages are handled one by one, so only the bad message
fails.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import TypeAlias

from pillarbox.inbox.errors import TransactionEndedError
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.terms import call_alone
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.lane import Lines
from pillarbox.outbox.message import Message

Answer: TypeAlias = asyncio.Future[bool]


class Batches:
    """Collects the batches of one batch handler. For one event loop."""

    def __init__(self, handler: Registered, executor: Executor) -> None:
        self._handler = handler
        self._executor = executor
        self._waiting: Lines[deque[tuple[Message, Answer]]] = Lines(deque)
        self._at_work: list[tuple[Message, Answer]] = []
        self._work: asyncio.Task[None] | None = None

    async def handle(self, message: Message) -> bool:
        """Handle a message in the next batch; return whether it was new.

        Raises:
            Exception: whatever the handler raised for this message alone, or
                `Executor.handle` raises.
        """
        message = call_alone(self._handler.terms.upcast, message)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[message.priority].append((message, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._handle_all())
        try:
            return await answer
        except asyncio.CancelledError:
            # The drain is over: the last message to leave cancels the batch.
            left = chain(self._at_work, *self._waiting)
            if all(answer.done() for _, answer in left):
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)
            raise

    async def _handle_all(self) -> None:
        while self._waiting.waiting():
            batch: list[tuple[Message, Answer]] = []
            while len(batch) < self._handler.size and (line := self._waiting.next()):
                batch.append(line.popleft())
            # Skip messages that a stop has cancelled.
            self._at_work = [(m, a) for m, a in batch if not a.done()]
            await self._handle(self._at_work)

    async def _handle(self, batch: Sequence[tuple[Message, Answer]]) -> None:
        if not batch:
            return
        messages = [message for message, _ in batch]
        try:
            new = await self._executor.handle(self._handler, messages)
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
