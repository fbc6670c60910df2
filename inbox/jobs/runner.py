"""Run a long handler under a lease, instead of in a single transaction.

The job is released when the process stops, ended when it is cancelled or runs out of
time, and dropped when the lease is lost: another process may already have started it
again.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from sqlalchemy.orm import Session

from pillarbox.inbox.dead_letters.locks import TakenError
from pillarbox.inbox.errors import HandlerTimeoutError, RetryLater
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.outcome import (
    Cancelled,
    Failed,
    Handled,
    JobOutcome,
    Later,
    Outage,
    Spent,
    Stopped,
)
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import name_of
from pillarbox.inbox.handlers.signature import is_async
from pillarbox.inbox.handlers.terms import call_alone
from pillarbox.inbox.jobs.job import AnyJob
from pillarbox.inbox.jobs.lease import JobLease, StopReason, transact
from pillarbox.inbox.jobs.state import JobState
from pillarbox.inbox.jobs.store import JobKey, Leased, queue_job, take_job
from pillarbox.inbox.processing import processing
from pillarbox.inbox.receipt import check_id, refusal
from pillarbox.inbox.verdict import Fatal, Lost, Unclear, judge
from pillarbox.outbox import tracing
from pillarbox.outbox.errors import DatabaseUnavailableError, one_line
from pillarbox.outbox.logs.printable import count
from pillarbox.outbox.message import Message
from pillarbox.outbox.retry import RetryPolicy


@dataclass(slots=True)
class Attempts:
    """The attempts of a message, as known to the caller; updated from the job.

    The job's count takes precedence: it outlives processes and deliveries.

    Attributes:
        retry: limits the number of attempts.
        attempts: the number of earlier attempts, as far as known.
    """

    retry: RetryPolicy
    attempts: int = 0

    def excuses_loss(self) -> bool:
        """Return whether another start that loses its connection doesn't count."""
        return False


class JobRunner:
    """Runs the long handlers of one run of a consumer.

    Args:
        returns_to: the state of jobs that are released: FAILURE if only a dead letter
            refers to them.
    """

    def __init__(
        self,
        executor: Executor,
        consumer: str,
        *,
        returns_to: JobState = JobState.QUEUED,
    ) -> None:
        self._executor = executor
        self._consumer = consumer
        self._returns_to = returns_to
        self._worker = f"{socket.gethostname()}:{os.getpid()}"

    async def run(
        self,
        long: Registered,
        message: Message,
        stopping: asyncio.Event,
        attempts: Attempts,
        claim: Callable[[Session], None] = lambda _: None,
    ) -> JobOutcome:
        """Run the handler; return how its job ended.

        Args:
            claim: locks and prepares other rows in the transaction that takes the job;
                can raise `TakenError`.

        Raises:
            TakenError: raised by `claim`.
            DatabaseUnavailableError: the handler was not called.
            RetryLater: the lease was lost.
            Exception: what the handler raised; the attempt is recorded.
        """
        check_id(message.id)
        key = JobKey(message.id, self._consumer)
        asked = time.monotonic()
        taken = await self._take(key, message, long.lease.total_seconds(), claim)
        if not isinstance(taken, Leased):
            if isinstance(taken, Spent):
                attempts.attempts = taken.starts
            return taken
        lease = JobLease(self._executor, taken, asked, self._returns_to)
        attempts.attempts = starts = taken.attempts - 1
        if starts and attempts.retry.spent(starts):
            reason = f"was started {count(starts, 'time')} before"
            await lease.end(JobState.FAILURE, reason, is_attempt=False)
            return Spent(starts)
        try:
            message = call_alone(long.terms.upcast, message)
            job = self._executor.job(long.call, taken, message)
            given = call_alone(long.terms.arguments.of, job, message)
        except Exception as error:  # noqa: BLE001 (upcasters are the user's)
            return await self._fail(long, lease, attempts, error)
        calling = call_until_end(self._executor, long, given, job, lease, stopping)
        call = self._executor.calls.begin(long, message)
        try:
            with processing(tracing.tracer, [message], self._consumer) as span:
                ended = await calling
                if (failure := _failure_of(job, ended)) is not None:
                    span.failed(failure)
        finally:
            self._executor.calls.end(call)
        return await self._settle(long, job, lease, attempts, ended)

    async def _take(
        self,
        key: JobKey,
        message: Message,
        seconds: float,
        claim: Callable[[Session], None],
    ) -> Leased | JobOutcome:
        """Take the job if no process holds it."""

        def take(session: Session) -> Leased | JobOutcome:
            claim(session)
            return take_job(session, key, self._worker, seconds)

        try:
            await transact(self._executor, queue_job, key, message)
            return await transact(self._executor, take)
        except TakenError:
            raise
        except Exception as error:
            if (refused := refusal(error, message.id)) is not None:
                raise refused from error
            raise DatabaseUnavailableError(one_line(error)) from error

    async def _settle(
        self,
        long: Registered,
        job: AnyJob,
        lease: JobLease,
        attempts: Attempts,
        ended: "Ended",
    ) -> JobOutcome:
        if job.is_finished:
            late = ended.error if isinstance(ended.error, Exception) else None
            return Handled(is_new=True, late_error=late)
        if job.broken is not None:
            await self._fail(long, lease, attempts, job.broken)
        if ended.is_done:
            await lease.succeed()
            return Handled(is_new=True)
        match ended.end:
            case StopReason.LOST:
                raise lease.lost
            case StopReason.STOPPED:
                with suppress(RetryLater):
                    await lease.give_back(None, is_failed=False)
                return Stopped()
            case StopReason.CANCELLED:
                await lease.end(JobState.CANCELLED)
                return Cancelled()
        error = _failure_of(job, ended) or asyncio.CancelledError()
        return await self._fail(long, lease, attempts, error)

    async def _fail(
        self,
        long: Registered,
        lease: JobLease,
        attempts: Attempts,
        error: BaseException,
    ) -> NoReturn:
        is_final = False
        if isinstance(error, Exception):
            # If it is unclear, effects may be committed without a receipt.
            match judge(error, long.terms.is_permanent):
                case Lost() if not attempts.excuses_loss():
                    pass
                case Later() | Outage() | Lost():
                    with suppress(RetryLater):
                        await lease.give_back(one_line(error), is_failed=False)
                    raise error
                case Failed(failure):
                    error = failure
                case Fatal(failure) | Unclear(failure):
                    error, is_final = failure, True
        if is_final or attempts.retry.spent(lease.attempts):
            state = (
                JobState.TIMED_OUT
                if isinstance(error, HandlerTimeoutError)
                else JobState.FAILURE
            )
            await lease.end(state, one_line(error))
        else:
            await lease.give_back(one_line(error), is_failed=True)
        raise error


def _failure_of(job: AnyJob, ended: "Ended") -> BaseException | None:
    """Return why a handler hasn't done its work; None if it has."""
    if job.is_finished:
        return None
    if job.broken is not None:
        return job.broken
    if ended.is_done:
        return None
    if ended.end is StopReason.TIMED_OUT:
        return job.overrun
    return ended.error or asyncio.CancelledError()


# The time that cancelled tasks have to end.
_LAST_STEPS: Final = 1.0
_LAST_WRITE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a handler ended: its error, why it had to stop, and if it was interrupted."""

    error: BaseException | None
    end: StopReason | None
    was_interrupted: bool

    @property
    def is_done(self) -> bool:
        """Whether the handler has done its work; not if it returned when asked to stop.

        A plain function that never checked `cancelled` has done all of its work.
        """
        if self.error is not None or self.end is StopReason.TIMED_OUT:
            return False
        return self.end is None or not self.was_interrupted


async def call_until_end(
    executor: Executor,
    long: Registered,
    given: Sequence[Any],
    job: AnyJob,
    lease: JobLease,
    stopping: asyncio.Event,
) -> Ended:
    """Call the handler, keep its lease, and ask it to stop when there is a reason.

    When this returns or raises, the handler's task has ended.
    """
    handler, limit = long.call, long.terms.time_limit
    seconds, timer = None, None
    if limit is not None:
        seconds = limit.total_seconds()
        overrun = HandlerTimeoutError(name_of(handler), limit)
        timer = asyncio.get_running_loop().call_later(seconds, job.end, overrun)
    work = asyncio.ensure_future(executor.call(handler, *given))
    keeping = asyncio.create_task(lease.keep(lambda: job.is_finishing))
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait(
            {work, stop, lease.ended},
            timeout=seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        end: StopReason | None = None
        was_interrupted = False
        if not work.done():
            end = _why(lease, stop)
            job.end()
            # A plain function sees it when it checks whether its job is cancelled.
            was_interrupted = is_async(handler) and work.cancel()
            await asyncio.wait({work})
            if job.overrun is not None:
                was_interrupted = True  # what it did from then on doesn't count
                end = StopReason.TIMED_OUT if end is StopReason.STOPPED else end
    except BaseException:
        # The drain is over: a plain function keeps running, but can't commit.
        job.end()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(work, return_exceptions=True)
        with suppress(Exception):
            async with asyncio.timeout(_LAST_WRITE):
                await lease.give_back(None, is_failed=False)
        raise
    finally:
        if timer is not None:
            timer.cancel()
        await _end(keeping, stop)
    error = asyncio.CancelledError() if work.cancelled() else work.exception()
    return Ended(error, end, was_interrupted or job.has_seen_end)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks; don't wait for those that ignore it."""
    for task in tasks:
        task.cancel()
    ended, _ = await asyncio.wait(tasks, timeout=_LAST_STEPS)
    for task in ended:
        if not task.cancelled():
            task.exception()  # avoids a warning that it was never retrieved


def _why(lease: JobLease, stop: asyncio.Future[Any]) -> StopReason:
    if lease.ended.done():
        return lease.ended.result()
    return StopReason.STOPPED if stop.done() else StopReason.TIMED_OUT
