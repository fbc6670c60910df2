"""Run a long handler under a lease, instead of in one transaction.

The work is given back when the process stops, ended when somebody cancels it or its
time is over, and dropped when the lease is lost: then another process may have begun
it again.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy.exc import DBAPIError

from inbox.errors import DeadLetter, HandlerTimeoutError, RetryLater
from inbox.handle import Handling, connection_broke
from inbox.job import AnyJob
from inbox.jobs import (
    Busy,
    Finished,
    JobKey,
    JobState,
    Leased,
    Taking,
    queue_job,
    take_job,
)
from inbox.lease import End, Lease, transact
from inbox.prepare import Terms
from inbox.receipt import check_id, refusal
from outbox.errors import ConfigError, DatabaseUnavailableError, one_line
from outbox.message import Message
from outbox.retry import RetryPolicy

# So that who waits for a lease to run out finds that it has.
_AGAIN: Final = 0.2
# For what is cancelled to end: a handler for the second time, at the end of the drain.
_LAST_STEPS: Final = 1.0


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


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a handler ended: what it raised, why it was to end, and if it was told."""

    error: BaseException | None
    end: End | None
    is_told: bool

    @property
    def is_done(self) -> bool:
        """Whether it has run to its end. Who was told and returns broke off.

        A plain function that never looked has done all of its work.
        """
        if self.error is not None or self.end is End.TIMED_OUT:
            return False
        return self.end is None or not self.is_told


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
        taken, asked = await self._take(key, message, long.lease)
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
                lease = Lease(self._handling, key, leased, long.lease, asked)
                await self._refuse_killer(lease, retry)
                job = self._handling.job(key, leased, message)
                ended = await self._work(long, job, lease, stopping)
                await self._settle(long, job, lease, retry, ended)
                return True

    async def _take(
        self, key: JobKey, message: Message, seconds: float
    ) -> tuple[Taking, float]:
        """Take the job if nobody has it; tell also since when its lease counts."""
        try:
            await transact(self._handling, queue_job, key, message)
            asked = time.monotonic()
            taken = await transact(self._handling, take_job, key, self._worker, seconds)
        except Exception as error:
            refused = (
                refusal(error, message.id) if isinstance(error, DBAPIError) else None
            )
            if refused is not None:
                raise refused from error
            raise DatabaseUnavailableError(one_line(error)) from error
        return taken, asked

    async def _refuse_killer(self, lease: Lease, retry: RetryPolicy) -> None:
        started = lease.attempts - 1
        if started and retry.spent(started):
            reason = f"was started {started} times and never came to an end"
            await lease.end(JobState.FAILURE, reason)
            raise DeadLetter(reason)

    async def _work(
        self, long: LongHandler, job: AnyJob, lease: Lease, stopping: asyncio.Event
    ) -> _Ended:
        """Call the handler until it ends, by itself or for a reason."""
        limit = long.terms.time_limit
        work = asyncio.ensure_future(
            self._handling.call(long.handler, job, job.message)
        )
        keeping = asyncio.create_task(lease.keep())
        stop = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait(
                {work, stop, lease.ended},
                timeout=None if limit is None else limit.total_seconds(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            end: End | None = None
            is_told = False
            if not work.done():
                end = _why(lease, stop)
                job.end()
                is_told = self._handling.interrupt(work)
                await asyncio.wait({work})
        except BaseException:
            # The drain is over: a plain function goes on, and can't commit any more.
            job.end()
            await _end(work)
            await lease.let_go()
            raise
        finally:
            await _end(keeping, stop)
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        return _Ended(error, end, is_told or job.has_seen_end)

    async def _settle(
        self,
        long: LongHandler,
        job: AnyJob,
        lease: Lease,
        retry: RetryPolicy,
        ended: _Ended,
    ) -> None:
        if job.is_finished:
            return
        if ended.is_done:
            if not await lease.succeed():
                raise _lost(lease)
            return
        error = ended.error
        match ended.end:
            case End.LOST:
                raise _lost(lease)
            case End.STOPPED:
                await lease.give_back(None, is_failed=False)
                raise JobReturned
            case End.CANCELLED:
                if not await lease.end(JobState.CANCELLED, None):
                    raise _lost(lease)
                raise JobCancelled
            case End.TIMED_OUT:
                limit = long.terms.time_limit or timedelta(0)
                error = HandlerTimeoutError(long.__qualname__, limit)
        await self._fail(long, lease, retry, error or asyncio.CancelledError())

    async def _fail(
        self, long: LongHandler, lease: Lease, retry: RetryPolicy, error: BaseException
    ) -> None:
        if isinstance(error, RetryLater) or connection_broke(error):
            await lease.give_back(one_line(error), is_failed=False)
            raise error
        if isinstance(error, Exception):
            try:
                long.terms.judge(error)
            except DeadLetter as decision:
                error = decision
        if isinstance(error, DeadLetter) or retry.spent(lease.attempts):
            state = (
                JobState.TIMED_OUT
                if isinstance(error, HandlerTimeoutError)
                else JobState.FAILURE
            )
            await lease.end(state, one_line(error))
            raise DeadLetter(one_line(error)) from error
        await lease.give_back(one_line(error), is_failed=True)
        raise error


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and leave those alone that don't heed it."""
    for task in tasks:
        task.cancel()
    ended, _ = await asyncio.wait(tasks, timeout=_LAST_STEPS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # nobody else looks at it


def _why(lease: Lease, stop: asyncio.Future[Any]) -> End:
    if lease.ended.done():
        return lease.ended.result()
    return End.STOPPED if stop.done() else End.TIMED_OUT


def _lost(lease: Lease) -> RetryLater:
    return RetryLater(timedelta(seconds=lease.seconds), "the lease was lost")
