"""Retry the dead letters of a consumer: call their handlers again.

    lock the dead letter, unless another session holds it
    insert the receipt; if it exists, the message was handled meanwhile ──▶ SUCCEEDED
    call the handler
    SUCCEEDED

All of this is a single transaction, with the same receipt that a redelivery of the
message would need. So the handler's effects happen once, whichever comes first. A long
handler has no such transaction: its job is reopened and taken while the dead letter is
locked, and from then on its lease keeps other processes out. Cancelling the job
discards the dead letter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Self, TypeVar

from sqlalchemy.orm import Session

from pillarbox.inbox.dead_letters.locks import (
    LockedAttempt,
    TakenError,
    run_statement,
)
from pillarbox.inbox.dead_letters.write import (
    DeadLetterWriter,
    StoredFailure,
)
from pillarbox.inbox.errors import TransactionEndedError
from pillarbox.inbox.events import FinishedJobFailed, MessageCancelled
from pillarbox.inbox.handlers.outcome import (
    Cancelled,
    Handled,
    JobOutcome,
    Later,
    Outage,
    Spent,
    Stopped,
)
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import Routes
from pillarbox.inbox.handlers.sessions import Sessions, make_executor
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.handlers.terms import call_alone
from pillarbox.inbox.idle import DEFAULT_MAX_IDLE
from pillarbox.inbox.jobs.runner import Attempts, JobRunner
from pillarbox.inbox.jobs.state import JobState
from pillarbox.inbox.jobs.store import JobKey, reopen_job, why_cancelled
from pillarbox.inbox.verdict import judge
from pillarbox.outbox.cloudevents.raw_text import storable_reason
from pillarbox.outbox.dead_letters.letter import Letter, Status
from pillarbox.outbox.dead_letters.retry import (
    Candidate,
    Failure,
    Outcome,
    outcome_event,
)
from pillarbox.outbox.dead_letters.schedule import RetrySchedule
from pillarbox.outbox.dead_letters.statement import Statement
from pillarbox.outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    InvalidMessageError,
    OutboxError,
    one_line,
    shorten,
)
from pillarbox.outbox.events import Event
from pillarbox.outbox.message import Message
from pillarbox.outbox.retry import RetryPolicy

T = TypeVar("T")


# A retry is a single attempt of a long handler, however it ends.
_ONE_ATTEMPT: Final = RetryPolicy(max_attempts=1)


class HandlerRetrier:
    """Retries dead letters one by one, each in the transaction of its handler.

    Args:
        writer: the consumer's writer; other consumers' dead letters are not retried.
        schedule: when to repeat a failed retry.
        max_idle: the maximum idle time of the handlers' transactions, as for
            `Consumer`.
    """

    def __init__(
        self,
        sessions: Sessions,
        routes: Routes[Registered],
        writer: DeadLetterWriter,
        schedule: RetrySchedule | None = None,
        notify: Callable[[Event], None] = lambda _: None,
        *,
        max_idle: timedelta | None = DEFAULT_MAX_IDLE,
    ) -> None:
        self.origin: Final = f"consumer:{writer.consumer}"
        self._consumer = writer.consumer
        self._executor = make_executor(sessions, writer.consumer, 1, max_idle)
        self._routes = routes
        self._writer = writer
        self._schedule = schedule or RetrySchedule()
        self._notify = self._executor.calls.notify = notify

    async def __aenter__(self) -> Self:
        """Return the retrier; it opens connections only when it needs them."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Release the threads of plain functions."""
        await self._executor.close()

    async def fetch(
        self, name: Statement, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Run a statement in its own transaction, and return its rows."""
        return await self._transact(partial(run_statement, name, parameters))

    async def retry(self, candidate: Candidate) -> Outcome:
        """Handle one dead letter and record the outcome."""
        letter = await self._read(candidate)
        if letter is None:
            return Outcome.SKIPPED
        handler = self._routes.find(letter.topic)
        if handler is None:
            reason = (
                f"consumer {self._consumer!r} has no handler for topic"
                f" {shorten(letter.topic)}: register one, or discard the dead letter"
            )
            return await self._fail(letter, reason)
        try:
            message = letter.message()
        except InvalidMessageError as error:
            return await self._fail(letter, str(error))
        try:
            handled = await self._handle(handler, message, candidate)
        except TakenError:
            return Outcome.SKIPPED
        except Exception as raised:
            verdict = judge(raised)
            if isinstance(verdict, Outage):
                raise
            if isinstance(verdict, Later):
                why, delay = verdict.reason, verdict.delay
                return await self._fail(letter, why, delay=delay)
            return await self._fail(letter, verdict.error)
        match handled:
            case Later() | Stopped():
                return Outcome.SKIPPED
            case Cancelled():
                await self._discard(letter, message)
                return Outcome.SKIPPED
            case Spent():  # a retry's process died
                known = StoredFailure(letter.error_reason, letter.error_stacktrace)
                return await self._fail(letter, known)
            case Handled(late_error=Exception() as late):
                described = self._writer.describe(late, message.headers)
                self._notify(
                    FinishedJobFailed.of(
                        self._consumer,
                        message,
                        reason=described.reason,
                        stacktrace=described.reported,
                    )
                )
        # The attempt of a handler that was called has written the new state.
        is_written = handled.is_new and handler.takes is not Takes.JOB
        if not is_written and not await self.fetch(
            Statement.MARK_SUCCEEDED, candidate.parameters()
        ):
            return Outcome.SKIPPED
        self._notify(outcome_event("inbox", letter, None))
        return Outcome.SUCCEEDED

    async def _handle(
        self, handler: Registered, message: Message, candidate: Candidate
    ) -> JobOutcome:
        if handler.takes is not Takes.JOB:
            if handler.takes is Takes.MANY:
                message = call_alone(handler.terms.upcast, message)
            locked = partial(LockedAttempt, candidate=candidate)
            return Handled(
                bool(await self._executor.handle(handler, [message], locked))
            )
        key = JobKey(message.id, self._consumer)

        def claim(session: Session) -> None:
            if not run_statement(Statement.LOCK, candidate.parameters(), session):
                raise TakenError
            reopen_job(session, key)

        long = JobRunner(self._executor, self._consumer, returns_to=JobState.FAILURE)
        attempts = Attempts(_ONE_ATTEMPT)
        return await long.run(handler, message, asyncio.Event(), attempts, claim)

    async def _discard(self, letter: Letter, message: Message) -> None:
        """Discard the dead letter whose job was cancelled."""
        key = JobKey(message.id, self._consumer)
        why = await self._transact(lambda session: why_cancelled(session, key))
        reason = f"the job was cancelled: {why}" if why else "the job was cancelled"
        values = Candidate(letter.id, letter.created_at).parameters()
        await self.fetch(
            Statement.MARK_DISCARDED,
            {**values, "reason": storable_reason(reason), "person": None},
        )
        self._notify(MessageCancelled.of(self._consumer, message))

    async def _read(self, candidate: Candidate) -> Letter | None:
        rows = await self.fetch(Statement.READ, {"id": str(candidate.id)})
        if not rows:
            raise ConfigError(
                f"dead letter {candidate.id}: not found in the database of"
                f" {self.origin}; choose that database with --database"
            )
        letter = Letter.of(rows[0])
        if letter.status is not Status.PENDING:
            return None
        if letter.origin != self.origin:
            raise ConfigError(
                f"dead letter {letter.id}: belongs to {letter.origin}, not"
                f" {self.origin}; retry it with its own consumer"
            )
        return letter

    async def _fail(
        self,
        letter: Letter,
        failure: str | BaseException | StoredFailure,
        *,
        delay: timedelta | None = None,
    ) -> Outcome:
        described = self._writer.describe(failure, letter.headers)
        failed = Failure(
            reason=described.reason, stacktrace=described.stacktrace, delay=delay
        )
        values = failed.parameters(letter, self._schedule.delay)
        if isinstance(failure, TransactionEndedError):
            # The handler may have committed all of its effects: a retry would find a
            # duplicate and report success. Somebody must check them first.
            values["delay"] = None
        await self.fetch(Statement.MARK_PENDING, values)
        self._notify(outcome_event("inbox", letter, failed))
        return Outcome.FAILED

    async def _transact(self, function: Callable[[Session], T]) -> T:
        try:
            return await self._executor.transact(function)
        except OutboxError:
            raise
        except Exception as error:
            raise DatabaseUnavailableError(
                f"can't read or write dead letters: {one_line(error)}"
            ) from error
