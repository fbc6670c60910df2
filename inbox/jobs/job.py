"""The job that a long handler gets instead of a session.

A transaction that stays open for hours would hold back vacuum, and a deployment would
undo it. So the handler uses as many of its own transactions as it likes. Each of them
checks the lease before it commits: a process that was frozen and replaced can't commit.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from functools import partial
from json import dumps
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy.orm import Session

from pillarbox.inbox.errors import (
    HandlerTimeoutError,
    JobLostError,
    TransactionEndedError,
)
from pillarbox.inbox.idle import limit_idle, limiting
from pillarbox.inbox.jobs.state import JobState
from pillarbox.inbox.jobs.store import Leased, finish_job, renew_job
from pillarbox.inbox.receipt import record_receipt
from pillarbox.inbox.transaction import Receipt, begin_held, protected
from pillarbox.outbox.message import Message
from pillarbox.outbox.tracing import set_cause

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


_End: TypeAlias = Callable[[Session], datetime]


class AnyJob:
    """The common part of both kinds of job. Attributes can be used in any thread.

    Attributes:
        message: the message to handle.
        attempts: the number of starts, including this one.
        checkpoint: the most recently saved checkpoint; None at first.
        is_finished: whether `finish` has committed.
        has_seen_end: whether the handler has learned from `cancelled` that it must
            stop.
        overrun: the error with which the job fails, once its time limit has passed.
        broken: the error of a block that ended its transaction itself; the job fails
            with it, even if the handler catches it.
    """

    def __init__(
        self,
        sessions: Callable[[], Any],
        leased: Leased,
        message: Message,
        max_idle: timedelta | None,
    ) -> None:
        self._sessions = sessions
        self.message = message
        self.attempts = leased.attempts
        self.checkpoint: Any = leased.checkpoint
        self.is_finishing = False
        self.is_finished = False
        self.has_seen_end = False
        self.broken: TransactionEndedError | None = None
        self._key = leased.key
        self._leased = leased
        self._max_idle = max_idle
        self._ending = threading.Event()
        self.overrun: HandlerTimeoutError | None = None

    @property
    def cancelled(self) -> bool:
        """Whether to stop now: cancelled, out of time, or the process is stopping.

        A plain function must check this from time to time, and then save a checkpoint
        if it has one, and return or raise. A coroutine is also cancelled. A handler
        that was asked to stop and returns counts as unfinished: the job is returned to
        the queue, or ends as cancelled. A handler that has nevertheless done its work
        must call `finish`.
        """
        if self._ending.is_set():
            self.has_seen_end = True
        return self.has_seen_end

    def end(self, overrun: HandlerTimeoutError | None = None) -> None:
        """Ask the handler to stop.

        Args:
            overrun: given if the time limit has passed: the error with which the job
                fails, so that it can't succeed.
        """
        self.overrun = overrun or self.overrun
        self._ending.set()

    @contextmanager
    def _recording_end(self) -> "Iterator[AbstractContextManager[None]]":
        try:
            with limiting(self._max_idle) as own:
                yield own
        except TransactionEndedError as error:
            self.broken = error
            raise

    def _begin(self, session: Session) -> None:
        self._check_time()
        self._mark(session)

    def _mark(self, session: Session) -> None:
        if self.broken is not None:
            raise self.broken
        limit_idle(session, self._max_idle)
        begin_held(session)
        set_cause(session, self._key.id)

    @property
    def _receipt(self) -> Receipt:
        return self._key.id, self._key.consumer

    def _hold(self, session: Session, checkpoint: str | None = None) -> datetime:
        renewed = renew_job(session, self._leased, checkpoint)
        if renewed is None:
            raise JobLostError(self._key.id)
        return renewed[1]

    def _hold_in_time(self, session: Session) -> datetime:
        self._check_time()
        return self._hold(session)

    def _check_time(self) -> None:
        if self.overrun is not None:
            raise self.overrun

    def _finish(self, session: Session) -> datetime:
        # The last check: a handler in time here succeeds, even if the limit passes now.
        self._check_time()
        record_receipt(session, self._key.id, self._key.consumer)
        done, attempts = JobState.SUCCESS, self.attempts
        if not finish_job(session, self._leased, done, attempts=attempts):
            raise JobLostError(self._key.id)
        self.is_finishing = True
        return self._leased.until


class Job(AnyJob):
    """The job of a long handler that is a plain function."""

    _sessions: Callable[[], Session]

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session whose transaction commits only while the lease holds.

        It commits at the end of the block and can't be ended inside it.

        Raises:
            InvalidReceiptError: from an `@idempotent` function with the consumer's own
                name, which the block calls for the job's message: both have one
                receipt.
            JobLostError: another process holds the job; nothing was committed.
            HandlerTimeoutError: the time limit has passed; nothing was committed, and
                the attempt has failed.
            HandlerTransactionError: the block ended the transaction or tried to, or
                caught a database error without a savepoint. If it ended it bypassing
                the session, or an earlier block did, the job fails even if the handler
                catches this.
        """
        with self._block(self._hold_in_time) as session:
            yield session

    @contextmanager
    def finish(self) -> Iterator[Session]:
        """Yield a session for the last transaction, which also ends the job.

        Return after this block: an error raised later is only reported. If a handler
        returns without calling it, its job is finished right afterwards, unless the
        handler was asked to stop.

        Raises:
            JobLostError, HandlerTimeoutError: as `transaction`.
        """
        with self._block(self._finish) as session:
            yield session
        self.is_finished = True

    @contextmanager
    def _block(self, end: _End) -> Iterator[Session]:
        with (
            self._recording_end() as own,
            self._sessions() as session,
            session.begin(),
        ):
            self._begin(session)
            with own, protected(session, self._receipt):
                yield session
                session.flush()
            until = end(session)
        self._leased.renewed(until)

    def save(self, checkpoint: object) -> None:
        """Save, as JSON, what another process needs to continue.

        Raises:
            JobLostError: as `transaction`.
        """
        as_json = dumps(checkpoint, allow_nan=False)
        with self._sessions() as session, session.begin():
            self._mark(session)
            until = self._hold(session, as_json)
        self._leased.renewed(until)
        self.checkpoint = checkpoint


class AsyncJob(AnyJob):
    """The job of a long handler that is a coroutine function."""

    _sessions: "Callable[[], AsyncSession]"

    @asynccontextmanager
    async def transaction(self) -> "AsyncIterator[AsyncSession]":
        """See `Job.transaction`."""
        async with self._block(self._hold_in_time) as session:
            yield session

    @asynccontextmanager
    async def finish(self) -> "AsyncIterator[AsyncSession]":
        """See `Job.finish`."""
        async with self._block(self._finish) as session:
            yield session
        self.is_finished = True

    @asynccontextmanager
    async def _block(self, end: _End) -> "AsyncIterator[AsyncSession]":
        with self._recording_end() as own:
            async with self._sessions() as session, session.begin():
                await session.run_sync(self._begin)
                with own:
                    async with protected(session, self._receipt):
                        yield session
                        await session.flush()
                until = await session.run_sync(end)
        self._leased.renewed(until)

    async def save(self, checkpoint: object) -> None:
        """See `Job.save`; a cancellation waits until the checkpoint is saved."""
        saving = asyncio.create_task(self._save_now(checkpoint))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            # The next process that takes the job must find the checkpoint.
            await asyncio.wait({saving})
            if not saving.cancelled():
                saving.exception()
            raise

    async def _save_now(self, checkpoint: object) -> None:
        as_json = dumps(checkpoint, allow_nan=False)
        async with self._sessions() as session, session.begin():
            await session.run_sync(self._mark)
            until = await session.run_sync(partial(self._hold, checkpoint=as_json))
        self._leased.renewed(until)
        self.checkpoint = checkpoint
