"""Decide what to do with a message that may have killed its process.

    new to the broker ──▶ run alongside others, not counted
    delivered before, unknown here ──▶ count a start, run alongside others
    counted before, and that start never finished ──▶ run alone, count a start
    started as often as the retry policy allows ──▶ dead letter, not started again;
        its reason is the last error that is known

A start is committed before the handler is called and deleted with the outcome. So a
killed process leaves behind the starts of the messages that it was handling, one of
which is the poison message. Each of these messages then runs alone, so that a
further death is counted only against the poison message. So each death of a process
uses up one start of a poison message, and each poison message kills at most
`max_attempts` processes, and one more if its first start was not counted.

Messages that start together are counted together (see `store`), so they reach a batch
handler as one batch.

Sources differ only in what their broker records (see `history`). If a source's
deliveries have no `history`, its broker counts starts itself, in `attempts`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Final
from uuid import UUID

from typing_extensions import override

from pillarbox.inbox.dead_letters.write import StoredFailure
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.jobs.runner import Attempts
from pillarbox.inbox.poison.history import Delivered, TakenOver
from pillarbox.inbox.poison.isolation import Isolation
from pillarbox.inbox.poison.store import SuspectStore
from pillarbox.inbox.receipt import refusal
from pillarbox.inbox.source import Delivery
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.errors import DatabaseUnavailableError, one_line
from pillarbox.outbox.message_id import is_uuid7
from pillarbox.outbox.retry import RetryPolicy

# Limits the retries of a handler that breaks its connection every time.
_MAX_BROKEN_CONNECTIONS: Final = 5


class Start(Enum):
    """Whether a message can be started."""

    NOW = auto()
    SPENT = auto()
    """It used up its starts before."""
    STOPPED = auto()
    """The consumer is stopping."""


class PoisonPolicy:
    """Decides about all messages of one run of a consumer. For one event loop."""

    def __init__(self, executor: Executor, consumer: str) -> None:
        self.store = SuspectStore(executor, consumer)
        self.isolation = Isolation()
        self.kept: BoundedDict[UUID, int] = BoundedDict()
        """The failed attempts of messages that are to be delivered again."""


class StartCounter(Attempts):
    """Counts the starts of one delivery, from the first to its outcome.

    Args:
        is_long: whether its handler is long, so that its job counts the starts.

    Attributes:
        broken_connections: the number of starts that lost their connection; they don't
            count as attempts.
    """

    def __init__(
        self,
        policy: PoisonPolicy,
        delivery: Delivery,
        retry: RetryPolicy,
        *,
        is_long: bool,
    ) -> None:
        kept = policy.kept.pop(delivery.message.id, 0)
        super().__init__(retry, max(kept, delivery.attempts))
        self.broken_connections = 0
        self._failure: StoredFailure | None = None
        self._policy = policy
        self._id = delivery.message.id
        self._history = delivery.history
        self._is_long = is_long
        # Without a UUIDv7 there is no receipt, so the handler isn't called.
        self._is_counted_here = (
            not is_long and self._history is not None and is_uuid7(self._id)
        )
        self._is_known = kept > 0
        self._is_open = False
        self._has_failed = False

    @asynccontextmanager
    async def start(self, stopping: asyncio.Event) -> AsyncIterator[Start]:
        """Run the block as one start, if it yields `Start.NOW`.

        Raises:
            DatabaseUnavailableError: the start couldn't be counted.
        """
        isolation = self._policy.isolation
        if self._is_spent_by_broker():
            yield Start.SPENT
            return
        async with isolation.shared(counts=not self._is_long):
            start = await self._start_beside_others(stopping)
            if start is not None:
                yield start
                return
        async with isolation.exclusive():
            yield await self._start_alone(stopping)

    @override
    def excuses_loss(self) -> bool:
        return self.broken_connections < _MAX_BROKEN_CONNECTIONS

    async def failed(self, failure: StoredFailure) -> None:
        """Record that the handler raised, so the start was an attempt."""
        self.attempts += 1
        self._failure = failure
        self._is_open = False
        self._has_failed = True
        if self._is_known or self._is_long:
            await self._store()

    async def uncount(self) -> None:
        """Record that the last start was not an attempt."""
        if self._is_open:
            self._is_open = False
            await self._policy.store.uncount(self._id)

    async def keep(self) -> None:
        """Keep the failed attempts for the next delivery, here or elsewhere."""
        if not self._is_known:
            await self._store()
        if self._is_known:
            self._policy.kept[self._id] = self.attempts

    async def _store(self) -> None:
        if self._failure is not None and is_uuid7(self._id):
            await self._policy.store.keep(self._id, self.attempts, self._failure)
            self._is_known = True

    async def end(self) -> None:
        """Record that the message has its outcome."""
        # An earlier process may have kept an error, though something else counts.
        may_be_known = (
            self.attempts and not self._is_counted_here and is_uuid7(self._id)
        )
        if self._is_known or may_be_known:
            await self._policy.store.delete(self._id)

    def _is_spent_by_broker(self) -> bool:
        # Its process died, or allowed more attempts.
        is_first_here = not (self._is_long or self._has_failed)
        return is_first_here and self.retry.spent(self.attempts)

    def _is_suspect(self) -> bool:
        if not self._is_counted_here:
            return False
        match self._history:
            case Delivered(before=before):
                return before
            case TakenOver(left=left):
                return self._is_known or left > 0
            case None:
                return False

    async def _start_beside_others(self, stopping: asyncio.Event) -> Start | None:
        """Count a start if necessary; return None if the message must run alone."""
        if stopping.is_set():
            return Start.STOPPED
        if self._is_open or not self._is_suspect():
            return Start.NOW
        return await self._count(unless_open=not self._has_failed)

    async def _start_alone(self, stopping: asyncio.Event) -> Start:
        if stopping.is_set():
            return Start.STOPPED
        return await self._count(unless_open=False) or Start.NOW

    async def _count(self, *, unless_open: bool) -> Start | None:
        store = self._policy.store
        try:
            count = await store.count(self._id, unless_open=unless_open)
        except Exception as error:
            if refusal(error, self._id) is None:
                raise DatabaseUnavailableError(one_line(error)) from error
            # Its day has no partition, so a receipt, if it needs one, will also fail.
            self._is_counted_here = False
            return Start.NOW
        self._is_known = True
        self._is_open = count.is_counted
        earlier = count.starts - count.is_counted
        if count.is_counted and not earlier and isinstance(self._history, TakenOver):
            self._history.left -= 1
        self.attempts = max(self.attempts, earlier)
        if self.retry.spent(earlier):
            self.attempts = earlier
            return Start.SPENT
        return Start.NOW if count.is_counted else None
