"""The lease of a job: renewed while its handler runs, and settled when that ends.

If it can't be renewed (the server is unavailable, the pool is exhausted), the process
keeps trying until another process could have taken the job. Then the lease is lost.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy.orm import Session

from pillarbox.inbox.errors import RetryLater
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.idle import limit_idle_now
from pillarbox.inbox.jobs.state import JobState
from pillarbox.inbox.jobs.store import (
    Leased,
    finish_job,
    renew_job,
    return_job,
)
from pillarbox.inbox.receipt import record_receipt
from pillarbox.inbox.verdict import connection_broke
from pillarbox.outbox.errors import (
    DatabaseUnavailableError,
    OutboxError,
    one_line,
    sqlstate_of,
)

T = TypeVar("T")

_BEATS: Final = 3
# The fraction of its length after which a lease that can't be renewed is lost.
_SAFE: Final = 0.8
_AGAIN: Final = 0.2


class StopReason(Enum):
    """Why a handler has to stop before it is done."""

    CANCELLED = "cancelled"
    LOST = "lost"
    STOPPED = "stopped"
    TIMED_OUT = "timed out"


class JobLease:
    """A process's hold on one job.

    Attributes:
        seconds: the length of the lease.
        attempts: the number of starts of the job, including this one.
        ended: set when the job is cancelled or the lease is lost.
    """

    def __init__(
        self, executor: Executor, leased: Leased, asked: float, returns_to: JobState
    ) -> None:
        self.seconds = leased.seconds
        self.attempts = leased.attempts
        self.ended: asyncio.Future[StopReason] = (
            asyncio.get_running_loop().create_future()
        )
        self._executor = executor
        self._leased = leased
        self._safe_until = asked + _SAFE * leased.seconds
        self._returns_to = returns_to

    async def keep(self, is_finishing: Callable[[], bool]) -> None:
        """Renew the lease until it is lost, or the current task is cancelled.

        The lease is also renewed while a handler that was asked to stop is still
        running.

        Args:
            is_finishing: whether the handler ends its job itself, which looks to a
                renewal as if the lease were lost.
        """
        while True:
            await asyncio.sleep(self.seconds / _BEATS)
            end = await self._renew()
            if end is StopReason.LOST and is_finishing():
                return
            if end is not None and not self.ended.done():
                self.ended.set_result(end)
            if end is StopReason.LOST:
                return

    @property
    def lost(self) -> RetryLater:
        """The error for a lease that is lost: another process may have the job."""
        return RetryLater(timedelta(seconds=self.seconds), "the lease was lost")

    async def succeed(self) -> None:
        """End the job and record its receipt.

        Raises:
            RetryLater: the lease is lost, as for `end` and `give_back`.
        """
        key, done = self._leased.key, JobState.SUCCESS

        def succeed(session: Session) -> bool:
            record_receipt(session, key.id, key.consumer)
            return finish_job(session, self._leased, done, attempts=self.attempts)

        await self._write(succeed)

    async def end(
        self, state: JobState, reason: str | None = None, *, is_attempt: bool = True
    ) -> None:
        """End the job in another state."""
        await self._write(
            partial(
                finish_job,
                leased=self._leased,
                state=state,
                attempts=self.attempts if is_attempt else self.attempts - 1,
                reason=reason,
            )
        )

    async def give_back(self, reason: str | None, *, is_failed: bool) -> None:
        """Release the job; only a failure counts as an attempt."""
        await self._write(
            partial(
                return_job,
                leased=self._leased,
                reason=reason,
                state=self._returns_to,
                is_failed=is_failed,
            )
        )

    async def _renew(self) -> StopReason | None:
        asked = time.monotonic()
        beat = self.seconds / _BEATS
        try:
            # A renewal that hangs is as bad as one that fails.
            async with asyncio.timeout(max(self._safe_until - asked, beat)):
                renewed = await transact(self._executor, renew_job, self._leased)
        except Exception:  # noqa: BLE001 (drivers and pools raise whatever they like)
            return StopReason.LOST if time.monotonic() > self._safe_until else None
        if renewed is None:
            return StopReason.LOST
        cancelled, until = renewed
        self._leased.renewed(until)
        self._safe_until = asked + _SAFE * self.seconds
        return StopReason.CANCELLED if cancelled else None

    async def _write(self, function: Callable[[Session], bool]) -> None:
        """Write an outcome; retry as long as the lease holds."""

        def write(session: Session) -> None:
            if not function(session):
                raise self.lost  # and roll back the receipt

        while True:
            try:
                return await transact(self._executor, write)
            except (OutboxError, RetryLater):
                raise
            except Exception as error:
                if not _may_pass(error) or time.monotonic() > self._safe_until:
                    raise DatabaseUnavailableError(one_line(error)) from error
                await asyncio.sleep(_AGAIN)


async def transact(
    executor: Executor, function: Callable[..., T], *arguments: Any
) -> T:
    """Call a function with a session, in a short transaction."""

    def run(session: Session) -> T:
        limit_idle_now(session)
        return function(session, *arguments)

    return await executor.transact(run)


def _may_pass(error: Exception) -> bool:
    # Without an answer from the server there is no SQLSTATE: the connection was
    # refused, or the pool was exhausted.
    state = sqlstate_of(error) or ""
    return connection_broke(error) or state[:2] in {"", "53"}
