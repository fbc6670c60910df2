"""Run a long handler under a lease, instead of in one transaction.

The lease is renewed while the handler works. The work is given back when the process
stops, ended when somebody cancels it or its time is over, and dropped when the lease
is lost: then another process may have begun it again.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from inbox.errors import DeadLetter, HandlerTimeoutError, RetryLater
from inbox.handle import Handling, connection_broke
from inbox.idle import limit_idle_now
from inbox.job import AnyJob
from inbox.jobs import (
    Busy,
    Finished,
    JobKey,
    JobState,
    Leased,
    finish_job,
    queue_job,
    renew_job,
    return_job,
    take_job,
)
from inbox.prepare import Terms
from inbox.receipt import check_id, record_receipt, refusal
from outbox.errors import ConfigError, DatabaseUnavailableError, one_line
from outbox.message import Message
from outbox.retry import RetryPolicy

T = TypeVar("T")

_BEATS: Final = 3
# Of the lease, after which one that can't be renewed is taken for lost.
_SAFE: Final = 0.8
_AGAIN: Final = 0.2


class LongHandler:
    """A handler `(job, message)` and how it is called."""

    def __init__(
        self, handler: Callable[..., Any], terms: Terms, lease: timedelta
    ) -> None:
        if lease < timedelta(seconds=1):
            raise ConfigError(f"lease={lease}: must be at least a second")
        self.handler = handler
        self.terms = terms
        self.lease = lease.total_seconds()
        self.__qualname__ = getattr(handler, "__qualname__", repr(handler))


class JobCancelled(Exception):  # noqa: N818 (an outcome, no error)
    """Somebody cancelled the job, and it has ended."""


class JobReturned(Exception):  # noqa: N818 (an outcome, no error)
    """The process stops, and the job was given back."""


class _End(Enum):
    CANCELLED = "cancelled"
    LOST = "lost"
    STOPPED = "stopped"
    TIMED_OUT = "timed out"


@dataclass(slots=True)
class _Run:
    key: JobKey
    job: AnyJob
    leased: Leased
    seconds: float
    safe_until: float
    retry: RetryPolicy


class LongHandling:
    """Runs the long handlers of one run of a consumer."""

    def __init__(self, handling: Handling, consumer: str) -> None:
        self._handling = handling
        self._consumer = consumer
        self._worker = f"{socket.gethostname()}:{os.getpid()}"

    async def run(
        self,
        long: LongHandler,
        message: Message,
        stopping: asyncio.Event,
        retry: RetryPolicy,
    ) -> bool:
        """Run the handler; tell whether the message was new.

        Raises:
            JobCancelled, JobReturned: it ended that way.
            RetryLater: another process has the job.
            DeadLetter: it was started too often and never came to an end.
            DatabaseUnavailableError: the handler was not reached.
            Exception: what the handler raised; the attempt is written down.
        """
        check_id(message.id)
        key = JobKey(message.id, self._consumer)
        message = long.terms.lift(message)
        try:
            await self._transact(queue_job, key, message)
            started = time.monotonic()
            taken = await self._transact(take_job, key, self._worker, long.lease)
        except DBAPIError as error:
            refused = refusal(error, message.id)
            if refused is not None:
                raise refused from error
            raise DatabaseUnavailableError(one_line(error)) from error
        match taken:
            case Busy(seconds):
                raise RetryLater(
                    timedelta(seconds=seconds + _AGAIN), "another process has this job"
                )
            case Finished(JobState.CANCELLED):
                raise JobCancelled
            case Finished(JobState.FAILURE | JobState.TIMED_OUT as state):
                # Whoever ended it may have died before its dead letter was written.
                raise DeadLetter(f"the job ended before: {state}")
            case Finished():
                return False
            case Leased() as leased:
                job = self._handling.job(key, leased, message)
                safe_until = started + _SAFE * long.lease
                run = _Run(key, job, leased, long.lease, safe_until, retry)
                await self._refuse_killer(run)
                await self._work(long, run, stopping)
                return True

    async def _refuse_killer(self, run: _Run) -> None:
        started = run.leased.attempts - 1
        if started and run.retry.spent(started):
            reason = f"was started {started} times and never came to an end"
            await self._persist(
                run, finish_job, run.key, run.leased.number, JobState.FAILURE, reason
            )
            raise DeadLetter(reason)

    async def _work(
        self, long: LongHandler, run: _Run, stopping: asyncio.Event
    ) -> None:
        work = asyncio.ensure_future(
            self._handling.call(long.handler, run.job, run.job.message)
        )
        watch = asyncio.create_task(self._watch(long, run, stopping))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            end = watch.result() if watch.done() else None
            if not work.done():
                run.job.end()
                self._handling.interrupt(work)
                await asyncio.wait({work})
        except asyncio.CancelledError:
            # The drain is over: a plain function goes on, and can't commit any more.
            run.job.end()
            work.cancel()
            with suppress(Exception):
                await self._give_back(run, None, is_failed=False)
            raise
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        await self._settle(long, run, work, end)

    async def _settle(
        self, long: LongHandler, run: _Run, work: asyncio.Future[Any], end: _End | None
    ) -> None:
        if run.job.is_finished:
            return
        error: BaseException | None
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None and end is not _End.TIMED_OUT:
            await self._succeed(run)
            return
        match end:
            case _End.LOST:
                raise RetryLater(timedelta(seconds=run.seconds), "the lease was lost")
            case _End.STOPPED:
                await self._give_back(run, None, is_failed=False)
                raise JobReturned
            case _End.CANCELLED:
                state = JobState.CANCELLED
                await self._persist(
                    run, finish_job, run.key, run.leased.number, state, None
                )
                raise JobCancelled
            case _End.TIMED_OUT:
                limit = long.terms.time_limit or timedelta(0)
                error = HandlerTimeoutError(long.__qualname__, limit)
        await self._fail(long, run, error or asyncio.CancelledError())

    async def _fail(self, long: LongHandler, run: _Run, error: BaseException) -> None:
        if isinstance(error, RetryLater) or connection_broke(error):
            await self._give_back(run, one_line(error), is_failed=False)
            raise error
        if isinstance(error, Exception):
            try:
                long.terms.judge(error)
            except DeadLetter as decision:
                error = decision
        if isinstance(error, DeadLetter) or run.retry.spent(run.leased.attempts):
            state = (
                JobState.TIMED_OUT
                if isinstance(error, HandlerTimeoutError)
                else JobState.FAILURE
            )
            await self._persist(
                run, finish_job, run.key, run.leased.number, state, one_line(error)
            )
            raise DeadLetter(one_line(error)) from error
        await self._give_back(run, one_line(error), is_failed=True)
        raise error

    async def _succeed(self, run: _Run) -> None:
        def succeed(session: Session) -> bool:
            record_receipt(session, run.key.id, run.key.consumer)
            return finish_job(
                session, run.key, run.leased.number, JobState.SUCCESS, None
            )

        if not await self._persist(run, succeed):
            raise RetryLater(timedelta(seconds=run.seconds), "the lease was lost")

    async def _give_back(
        self, run: _Run, reason: str | None, *, is_failed: bool
    ) -> None:
        back = partial(return_job, is_failed=is_failed)
        await self._persist(run, back, run.key, run.leased.number, reason)

    async def _watch(
        self, long: LongHandler, run: _Run, stopping: asyncio.Event
    ) -> _End:
        """Renew the lease until there is a reason to end the handler."""
        limit = long.terms.time_limit
        over = None if limit is None else time.monotonic() + limit.total_seconds()
        while True:
            now = time.monotonic()
            if over is not None and now >= over:
                return _End.TIMED_OUT
            pause = run.seconds / _BEATS
            if over is not None:
                pause = min(pause, over - now)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stopping.wait()
                return _End.STOPPED
            end = await self._renew(run)
            if end is not None:
                return end

    async def _renew(self, run: _Run) -> _End | None:
        asked = time.monotonic()
        try:
            cancelled = await self._transact(
                renew_job, run.key, run.leased.number, run.seconds
            )
        except DBAPIError:
            return _End.LOST if time.monotonic() > run.safe_until else None
        if cancelled is None:
            return _End.LOST
        run.safe_until = asked + _SAFE * run.seconds
        return _End.CANCELLED if cancelled else None

    async def _persist(
        self, run: _Run, function: Callable[..., T], *arguments: Any
    ) -> T:
        """Write an outcome, however often it takes, as long as the lease holds."""
        while True:
            try:
                return await self._transact(function, *arguments)
            except DBAPIError as error:
                if not connection_broke(error) or time.monotonic() > run.safe_until:
                    raise DatabaseUnavailableError(one_line(error)) from error
                await asyncio.sleep(_AGAIN)

    async def _transact(self, function: Callable[..., T], *arguments: Any) -> T:
        def transact(session: Session) -> T:
            limit_idle_now(session)
            return function(session, *arguments)

        return await self._handling.transact(transact)
