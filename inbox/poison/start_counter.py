"""The starts of one message, counted where its broker doesn't.

    first delivery ──▶ started, not counted
    comes again ──▶ counted ──▶ started beside others
    comes again, was counted ──▶ alone ──▶ counted ──▶ started; too often: given up

It is counted before the handler is called, and forgotten with the outcome. So what a
killed process leaves are the counts of those that were at work in it: one of them did
it. Each of these is handled alone the next time, so its neighbours are charged once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from inbox.handlers.executor import Handling, connection_broke
from inbox.handlers.idle_timeout import limit_idle_now
from inbox.jobs.store import JobKey
from inbox.poison.isolation import Solitude
from inbox.poison.suspects import (
    count_start,
    find_starts,
    forget_starts,
    keep_starts,
    take_back_start,
)
from inbox.receipt import refusal
from inbox.source import Delivery
from outbox.errors import DatabaseUnavailableError, one_line
from outbox.message_id import is_uuid7
from outbox.retry import RetryPolicy

T = TypeVar("T")

_LAST_WRITE: Final = 2.0
# A handler that breaks its connection each time must not be tried for ever.
_MAX_BROKEN_CONNECTIONS: Final = 5


class StartedTooOften(Exception):  # noqa: N818 (an outcome, no error)
    """The message was started as often as may be, and never came to an end."""

    def __init__(self, starts: int) -> None:
        self.starts = starts
        super().__init__(f"was started {starts} times")


class Trials:
    """Makes the trials of one run of a consumer."""

    def __init__(self, handling: Handling, consumer: str) -> None:
        self.handling = handling
        self.consumer = consumer
        self.solitude = Solitude()

    def of(self, delivery: Delivery, retry: RetryPolicy, *, is_long: bool) -> "Trial":
        """Make the trial of a delivery. A long handler's job counts for itself."""
        return Trial(self, delivery, retry, is_long=is_long)


class Trial:
    """What becomes of one delivery, from its first start to its outcome.

    Attributes:
        attempts: how many are known to lie behind it; of a long handler the job
            knows that, whenever it is taken.
        retry: how many there may be, and when.
        broken: how many were no attempts, because they lost their connection.
    """

    def __init__(
        self, trials: Trials, delivery: Delivery, retry: RetryPolicy, *, is_long: bool
    ) -> None:
        self.retry = retry
        self.attempts = delivery.attempts
        self.broken = 0
        self._trials = trials
        self._id = delivery.message.id
        self._is_long = is_long
        suspect: bool | None = getattr(delivery, "suspect", None)
        # None: its source remembers for itself.
        self._is_kept = suspect is not None and not is_long and is_uuid7(self._id)
        self._is_suspect = bool(suspect) and self._is_kept
        self._is_noted = False
        self._is_open = False
        self._is_tried = False

    @asynccontextmanager
    async def start(self, stopping: asyncio.Event) -> AsyncIterator[bool]:
        """Count a start, and have the handler run in the block; False: it is to stop.

        Raises:
            StartedTooOften: it isn't to be started any more.
            DatabaseUnavailableError: it couldn't be counted.
        """
        solitude = self._trials.solitude
        is_known = False
        async with solitude.among_others(counts=not self._is_long):
            if stopping.is_set():
                yield False
                return
            if self._is_suspect and not self._is_open:
                is_known = not await self._count(only_first=not self._is_tried)
            if not is_known:
                yield True
                return
        await self._look()
        async with solitude.alone():
            if stopping.is_set():
                yield False
                return
            await self._count(only_first=False)
            yield True

    def excuses(self, error: BaseException) -> bool:
        """Tell whether a start that ended so was no attempt: its connection broke."""
        return self.broken < _MAX_BROKEN_CONNECTIONS and connection_broke(error)

    def failed(self) -> None:
        """Note that the handler raised: that start was an attempt."""
        self.attempts += 1
        self._is_open = False
        self._is_tried = True

    async def take_back(self) -> None:
        """Note that the last start was no attempt."""
        if self._is_open:
            self._is_open = False
            await self._write(take_back_start)

    async def keep(self) -> None:
        """Note that the message goes back with its failed attempts."""
        if self._is_kept:
            await self._write(partial(_keep, self.attempts))
        self._is_noted = self._is_open = False

    async def end(self) -> None:
        """Note that the message has its outcome."""
        if self._is_noted:
            self._is_noted = self._is_open = False
            await self._write(forget_starts)

    async def _look(self) -> None:
        starts = await self._transact(find_starts)
        self._is_noted = True
        self.attempts = max(self.attempts, starts)
        if self.retry.spent(starts):
            raise StartedTooOften(starts)

    async def _count(self, *, only_first: bool) -> bool:
        """Count a start; False if that is left to one who is alone."""
        try:
            starts = await self._transact(partial(_count, only_first))
        except DBAPIError as error:
            if refusal(error, self._id) is None:
                raise DatabaseUnavailableError(one_line(error)) from error
            # Its day has no partition: its receipt will say so, if it needs one.
            self._is_kept = self._is_suspect = False
            return True
        except Exception as error:
            raise DatabaseUnavailableError(one_line(error)) from error
        if starts is None:
            return False
        self._is_noted = self._is_open = True
        return True

    async def _write(self, function: Callable[[Session, JobKey], None]) -> None:
        """Write something down, if that can be: what is lost is one start too many."""
        with suppress(Exception):
            async with asyncio.timeout(_LAST_WRITE):
                await self._transact(function)

    async def _transact(self, function: Callable[[Session, JobKey], T]) -> T:
        key = JobKey(self._id, self._trials.consumer)

        def transact(session: Session) -> T:
            limit_idle_now(session)
            return function(session, key)

        return await self._trials.handling.transact(transact)


def _count(only_first: bool, session: Session, key: JobKey) -> int | None:
    return count_start(session, key, only_first=only_first)


def _keep(starts: int, session: Session, key: JobKey) -> None:
    keep_starts(session, key, starts)
