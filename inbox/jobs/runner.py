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
from datetime import timedelta
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from inbox.dead_letters.locks import TakenError
from inbox.errors import HandlerTimeoutError, RetryLater
from inbox.handlers.calls import TIME_LIMIT
from inbox.handlers.executor import Executor
from inbox.handlers.outcome import (
    Cancelled,
    Failed,
    Handled,
    Later,
    Outage,
    Spent,
    Stopped,
    Taken,
)
from inbox.handlers.routes import name_of
from inbox.handlers.terms import Terms, call_alone
from inbox.jobs.job import AnyJob
from inbox.jobs.lease import JobLease, StopReason, transact
from inbox.jobs.store import (
    Busy,
    Finished,
    JobKey,
    JobState,
    Leased,
    Taking,
    queue_job,
    take_job,
)
from inbox.processing import processing
from inbox.receipt import check_id, refusal
from inbox.verdict import Fatal, Lost, Unclear, judge
from outbox import tracing
from outbox.duration import exact_duration
from outbox.errors import ConfigError, DatabaseUnavailableError, one_line
from outbox.logs.printable import count
from outbox.message import Message
from outbox.retry import RetryPolicy

# Ensures that the lease has expired when a waiting process tries again.
_AGAIN: Final = 0.2


class LongHandler:
    """A handler `(job, message)` and its terms."""

    def __init__(
        self, handler: Callable[..., Any], terms: Terms, lease: timedelta
    ) -> None:
        if lease < timedelta(seconds=1):
            raise ConfigError(f"lease={exact_duration(lease)}: must be at least 1s")
        self.handler = handler
        self.terms = terms
        self.lease = lease.total_seconds()
        self.__qualname__ = getattr(handler, "__qualname__", repr(handler))
        setattr(self, TIME_LIMIT, terms.time_limit)


JobOutcome: TypeAlias = Handled | Taken | Spent | Cancelled | Stopped


class Attempts(Protocol):
    """The attempts of a message, as known to the caller; updated from the job.

    The job's count takes precedence: it outlives processes and deliveries.
    """

    attempts: int
    """The number of earlier attempts, as far as known."""

    @property
    def retry(self) -> RetryPolicy:
        """The policy that limits the number of attempts."""

    def excuses_loss(self) -> bool:
        """Return whether another start that loses its connection doesn't count."""


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
        long: LongHandler,
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
        taken, asked = await self._take(key, message, long.lease, claim)
        match taken:
            case Busy(seconds):
                return Taken(timedelta(seconds=seconds + _AGAIN))
            case Finished(JobState.CANCELLED):
                return Cancelled()
            case Finished(JobState.FAILURE | JobState.TIMED_OUT, starts, reason):
                # The process may have died before it wrote the dead letter.
                attempts.attempts = starts
                return Spent(starts, reason)
            case Finished():
                return Handled(is_new=False)
            case Leased() as leased:
                lease = JobLease(self._executor, leased, asked, self._returns_to)
                attempts.attempts = leased.attempts - 1
                if attempts.attempts and attempts.retry.spent(attempts.attempts):
                    return await self._spent(lease, attempts.attempts)
                try:
                    message = call_alone(long.terms.upcast, message)
                    job = self._executor.job(long.handler, leased, message)
                    given = call_alone(long.terms.arguments.of, job, message)
                except Exception as error:  # noqa: BLE001 (upcasters are the user's)
                    return await self._fail(long, lease, attempts, error)
                calling = call_until_end(
                    self._executor, long, given, job, lease, stopping
                )
                call = self._executor.calls.begin(long, [message], is_job=True)
                try:
                    with processing(tracing.tracer, [message], self._consumer) as span:
                        ended = await calling
                        if (failure := _failure_of(long, job, ended)) is not None:
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
    ) -> tuple[Taking, float]:
        """Take the job if no process holds it; also return when its lease began."""

        def take(session: Session) -> Taking:
            claim(session)
            return take_job(session, key, self._worker, seconds)

        try:
            await transact(self._executor, queue_job, key, message)
            asked = time.monotonic()
            taken = await transact(self._executor, take)
        except TakenError:
            raise
        except Exception as error:
            refused = (
                refusal(error, message.id) if isinstance(error, DBAPIError) else None
            )
            if refused is not None:
                raise refused from error
            raise DatabaseUnavailableError(one_line(error)) from error
        return taken, asked

    async def _spent(self, lease: JobLease, starts: int) -> Spent:
        reason = f"was started {count(starts, 'time')} before"
        if not await lease.end(JobState.FAILURE, reason, is_attempt=False):
            raise _lost(lease)
        return Spent(starts)

    async def _settle(
        self,
        long: LongHandler,
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
            if not await lease.succeed():
                raise _lost(lease)
            return Handled(is_new=True)
        match ended.end:
            case StopReason.LOST:
                raise _lost(lease)
            case StopReason.STOPPED:
                await lease.give_back(None, is_failed=False)
                return Stopped()
            case StopReason.CANCELLED:
                if not await lease.end(JobState.CANCELLED):
                    raise _lost(lease)
                return Cancelled()
        error = _failure_of(long, job, ended) or asyncio.CancelledError()
        return await self._fail(long, lease, attempts, error)

    async def _fail(
        self,
        long: LongHandler,
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
            if not await lease.end(state, one_line(error)):
                raise _lost(lease) from error
            raise error
        if not await lease.give_back(one_line(error), is_failed=True):
            raise _lost(lease) from error
        raise error


def _failure_of(long: LongHandler, job: AnyJob, ended: "Ended") -> BaseException | None:
    """Return why a handler hasn't done its work; None if it has."""
    if job.is_finished:
        return None
    if job.broken is not None:
        return job.broken
    if ended.is_done:
        return None
    if ended.end is StopReason.TIMED_OUT:
        limit = long.terms.time_limit or timedelta(0)
        return HandlerTimeoutError(long.__qualname__, limit)
    return ended.error or asyncio.CancelledError()


def _lost(lease: JobLease) -> RetryLater:
    return RetryLater(timedelta(seconds=lease.seconds), "the lease was lost")


# The time that cancelled tasks have to end.
_LAST_STEPS: Final = 1.0


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
    long: LongHandler,
    given: Sequence[Any],
    job: AnyJob,
    lease: JobLease,
    stopping: asyncio.Event,
) -> Ended:
    """Call the handler, keep its lease, and ask it to stop when there is a reason.

    When this returns or raises, the handler's task has ended.
    """
    handler, limit = long.handler, long.terms.time_limit
    seconds = None if limit is None else limit.total_seconds()
    started = time.monotonic()
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
            overrun = None
            if end is StopReason.TIMED_OUT and limit is not None:
                overrun = HandlerTimeoutError(name_of(handler), limit)
            job.end(overrun)
            was_interrupted = executor.interrupt(handler, work)
            if limit is not None and seconds is not None and overrun is None:
                left = max(0.0, started + seconds - time.monotonic())
                await asyncio.wait({work}, timeout=left)
                if not work.done():
                    job.end(HandlerTimeoutError(name_of(handler), limit))
                    was_interrupted = True  # what it does from now on doesn't count
                    end = StopReason.TIMED_OUT if end is StopReason.STOPPED else end
            await asyncio.wait({work})
    except BaseException:
        # The drain is over: a plain function keeps running, but can't commit.
        job.end()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(work, return_exceptions=True)
        await lease.let_go()
        raise
    finally:
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
