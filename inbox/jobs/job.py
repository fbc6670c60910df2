"""What a long handler gets instead of a session: its job.

A transaction open for hours would hold back vacuum, and a deploy would undo it. So
the handler works in transactions of its own, as many as it likes. Each ends with a
look at the lease: what was frozen and overtaken can't commit.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session, sessionmaker

from inbox.errors import HandlerTimeoutError, JobLostError
from inbox.jobs.store import (
    JobKey,
    JobState,
    Leased,
    finish_job,
    hold_job,
    save_checkpoint,
)
from inbox.receipt import record_receipt
from inbox.transaction import hold, lent, limit_idle, limit_idle_now
from outbox.causation import note_cause
from outbox.message import Message

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker


class AnyJob:
    """What both colours have. Attributes are for any thread.

    Attributes:
        message: what is to be handled.
        attempts: how often it was started, this time included.
        checkpoint: what was last saved; None at first.
        is_finished: it has come to the end of `finish`.
        has_seen_end: it has read in `cancelled` that it is to stop.
    """

    def __init__(
        self,
        key: JobKey,
        leased: Leased,
        message: Message,
        max_idle: timedelta | None,
    ) -> None:
        self.message = message
        self.attempts = leased.attempts
        self.checkpoint: Any = leased.checkpoint
        self.is_finished = False
        self.has_seen_end = False
        self._key = key
        self._lease = leased.number
        self._max_idle = max_idle
        self._ending = threading.Event()
        self._overrun: HandlerTimeoutError | None = None

    @property
    def cancelled(self) -> bool:
        """Stop now: somebody asked for it, the time is over, or the process ends.

        A plain function has to look at this from time to time, save a checkpoint if
        it has one, and return or raise. A coroutine is cancelled besides. Who has been
        told and returns has not finished: the job is given back, or cancelled. Who is
        done all the same says so by `finish`.
        """
        if self._ending.is_set():
            self.has_seen_end = True
        return self.has_seen_end

    def end(self, overrun: HandlerTimeoutError | None = None) -> None:
        """Ask the handler to stop.

        Args:
            overrun: its time limit is over, so it can't succeed any more.
        """
        self._overrun = overrun or self._overrun
        self._ending.set()

    def _begin(self, session: Session) -> None:
        limit_idle(session, self._max_idle)
        held = hold(session)
        limit_idle_now(session)
        held.is_begun = self._max_idle is not None
        note_cause(session, self._key.id)

    def _hold(self, session: Session) -> None:
        if not hold_job(session, self._key, self._lease):
            raise JobLostError(self._key.id)

    def _begin_last(self, session: Session) -> None:
        self._check_time()
        self._begin(session)

    def _check_time(self) -> None:
        if self._overrun is not None:
            raise self._overrun

    def _finish(self, session: Session) -> None:
        # Last: what is in time here is a success, though the limit ends meanwhile.
        self._check_time()
        record_receipt(session, self._key.id, self._key.consumer)
        done, attempts = JobState.SUCCESS, self.attempts
        if not finish_job(session, self._key, self._lease, done, attempts=attempts):
            raise JobLostError(self._key.id)

    def _save(self, session: Session, checkpoint: object) -> None:
        if not save_checkpoint(session, self._key, self._lease, checkpoint):
            raise JobLostError(self._key.id)


class Job(AnyJob):
    """The job of a plain function."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        key: JobKey,
        leased: Leased,
        message: Message,
        max_idle: timedelta | None,
    ) -> None:
        super().__init__(key, leased, message, max_idle)
        self._sessions = sessions

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Give a session whose transaction commits only while the job is ours.

        It commits at the end of the block, and can't be ended inside of it.

        Raises:
            JobLostError: another process has the job; nothing was committed.
            TransactionControlError: the block ended the transaction, or tried to.
            UnexpectedRollbackError: a database error was caught without a savepoint;
                nothing was committed.
        """
        with self._sessions() as session, session.begin():
            self._begin(session)
            with lent(session):
                yield session
            session.flush()
            self._hold(session)

    @contextmanager
    def finish(self) -> Iterator[Session]:
        """Give the last transaction: its effects and the job's success are one.

        Return after it. A handler that returns without is finished right afterwards,
        unless it was told to stop.

        Raises:
            JobLostError: as `transaction`.
            HandlerTimeoutError: the time limit is over; nothing was committed, and
                the attempt has failed.
        """
        with self._sessions() as session, session.begin():
            self._begin_last(session)
            with lent(session):
                yield session
            session.flush()
            self._finish(session)
        self.is_finished = True

    def save(self, checkpoint: object) -> None:
        """Save, as JSON, what is needed to go on elsewhere.

        Raises:
            JobLostError: as `transaction`.
        """
        with self._sessions() as session, session.begin():
            self._begin(session)
            self._save(session, checkpoint)
        self.checkpoint = checkpoint


class AsyncJob(AnyJob):
    """The job of a coroutine function."""

    def __init__(
        self,
        sessions: "async_sessionmaker[AsyncSession]",
        key: JobKey,
        leased: Leased,
        message: Message,
        max_idle: timedelta | None,
    ) -> None:
        super().__init__(key, leased, message, max_idle)
        self._sessions = sessions

    @asynccontextmanager
    async def transaction(self) -> "AsyncIterator[AsyncSession]":
        """Do as `Job.transaction`."""
        async with self._sessions() as session, session.begin():
            await session.run_sync(self._begin)
            async with lent(session):
                yield session
            await session.flush()
            await session.run_sync(self._hold)

    @asynccontextmanager
    async def finish(self) -> "AsyncIterator[AsyncSession]":
        """Do as `Job.finish`."""
        async with self._sessions() as session, session.begin():
            await session.run_sync(self._begin_last)
            async with lent(session):
                yield session
            await session.flush()
            await session.run_sync(self._finish)
        self.is_finished = True

    async def save(self, checkpoint: object) -> None:
        """Do as `Job.save`; a cancellation waits until it is done."""
        saving = asyncio.create_task(self._save_now(checkpoint))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            # Whoever takes the job next is to find it.
            await asyncio.wait({saving})
            if not saving.cancelled():
                saving.exception()
            raise

    async def _save_now(self, checkpoint: object) -> None:
        async with self._sessions() as session, session.begin():
            await session.run_sync(self._begin)
            await session.run_sync(partial(self._save, checkpoint=checkpoint))
        self.checkpoint = checkpoint
