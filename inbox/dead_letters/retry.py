"""Retry the dead letters of a consumer: have its handlers handle them once more.

    lock the dead letter, unless somebody else has it
    receipt: was it handled meanwhile? ──▶ SUCCEEDED
    the handler's effects
    SUCCEEDED

All of it is one transaction, with the same receipt that a redelivery of the message
would need. So the handler's effects happen once, whoever comes first. A long handler
has no such transaction: its job is opened anew and taken under that lock, and then its
lease keeps others out. Who cancels the job discards the dead letter.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sqlalchemy.orm import Session

from inbox.dead_letters.locks import (
    TakenError,
    bracketed,
    lock_letter,
    named,
    run_statement,
    schedule_lock,
)
from inbox.dead_letters.write import DeadLetterWriter
from inbox.errors import RetryLater
from inbox.events import MessageCancelled
from inbox.handlers.registration import AnyHandler
from inbox.handlers.routes import Routes
from inbox.handlers.sessions import Sessions, make_executor
from inbox.jobs.runner import JobBusy, JobCancelled, JobRunner, LongHandler
from inbox.jobs.store import JobKey, JobState, reopen_job, why_cancelled
from inbox.transaction import DEFAULT_MAX_IDLE
from outbox.dead_letters import (
    Candidate,
    Letter,
    Outcome,
    RetrySchedule,
    Statement,
    Status,
)
from outbox.dead_letters.events import DeadLetterFailed, DeadLetterSucceeded
from outbox.errors import (
    ConfigError,
    DatabaseUnavailableError,
    InvalidMessageError,
    OutboxError,
    one_line,
    shorten,
)
from outbox.events import Event
from outbox.message import Message
from outbox.retry import RetryPolicy

T = TypeVar("T")


@dataclass(slots=True)
class _OneAttempt:
    """What a long handler may make of a retry: one attempt, whatever ends it."""

    attempts: int = 0
    retry: RetryPolicy = field(default_factory=partial(RetryPolicy, max_attempts=1))

    def excuses(self, error: BaseException) -> bool:
        return False


class HandlerRetrier:
    """Retries one by one, each in the transaction of its handler.

    Args:
        writer: of the consumer; dead letters of others are left alone.
        schedule: says when to retry again what fails.
        max_idle: of the handlers' transactions, as for `Consumer`.
    """

    def __init__(
        self,
        sessions: Sessions,
        routes: Routes[AnyHandler],
        writer: DeadLetterWriter,
        schedule: RetrySchedule | None = None,
        notify: Callable[[Event], None] = lambda _: None,
        *,
        max_idle: timedelta | None = DEFAULT_MAX_IDLE,
    ) -> None:
        self.origin: Final = f"consumer:{writer.consumer}"
        self._consumer = writer.consumer
        self._sessions = sessions
        self._executor = make_executor(sessions, writer.consumer, 1, max_idle)
        self._routes = routes
        self._writer = writer
        self._schedule = schedule or RetrySchedule()
        self._notify = notify

    async def __aenter__(self) -> Self:
        """Nothing is opened before it is needed."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of the threads for plain functions."""
        await self._executor.close()

    async def fetch(
        self, name: Statement, parameters: Mapping[str, Any]
    ) -> Sequence[Sequence[Any]]:
        """Run a statement in a transaction of its own, and give its rows."""
        values = dict(parameters)
        if name in {Statement.FIND, Statement.LIST}:
            values["origin"] = self.origin
        return await self._transact(partial(run_statement, name, values))

    async def retry(self, candidate: Candidate) -> Outcome:
        """Have one dead letter handled, and write down what came of it."""
        letter = await self._read(candidate)
        if letter is None:
            return Outcome.SKIPPED
        try:
            message, handler = letter.message(), self._find_handler(letter)
        except (InvalidMessageError, _NoHandlerError) as error:
            return await self._fail(letter, str(error))
        try:
            is_new = await self._handle(handler, message, candidate)
        except (TakenError, JobBusy):
            return Outcome.SKIPPED
        except JobCancelled:
            await self._discard(letter, message)
            return Outcome.SKIPPED
        except RetryLater as decision:
            delay = decision.delay
            return await self._fail(letter, decision.reason, delay=delay, charge=0)
        except DatabaseUnavailableError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return await self._fail(letter, error)
        except Exception as error:  # noqa: BLE001 (a handler may raise anything)
            return await self._fail(letter, error)
        if not is_new and not await self.fetch(
            Statement.MARK_SUCCEEDED, named(candidate)
        ):
            return Outcome.SKIPPED
        self._notify(DeadLetterSucceeded(**_about(letter)))
        return Outcome.SUCCEEDED

    def alone(self) -> AbstractAsyncContextManager[bool]:
        """Hold the lock of the consumer's schedule, in a session of its own.

        Raises:
            DatabaseUnavailableError: it can't be asked for, or was lost in the block.
        """
        return schedule_lock(self._sessions, self._consumer)

    async def _handle(
        self, handler: AnyHandler, message: Message, candidate: Candidate
    ) -> bool:
        if not isinstance(handler, LongHandler):
            return await self._executor.handle(bracketed(handler, candidate), message)
        key = JobKey(message.id, self._consumer)

        def claim(session: Session) -> None:
            lock_letter(session, candidate)
            reopen_job(session, key)

        long = JobRunner(self._executor, self._consumer, returns_to=JobState.FAILURE)
        never = asyncio.Event()
        await long.run(handler, message, never, _OneAttempt(), claim)
        return False  # the state is left to be written

    async def _discard(self, letter: Letter, message: Message) -> None:
        """Write down what the cancel of a job means for its dead letter."""
        key = JobKey(message.id, self._consumer)
        why = await self._transact(lambda session: why_cancelled(session, key))
        reason = f"its job was cancelled: {why}" if why else "its job was cancelled"
        values = named(Candidate(letter.id, letter.created_at))
        await self.fetch(Statement.MARK_DISCARDED, {**values, "reason": reason})
        self._notify(
            MessageCancelled(
                consumer=self._consumer,
                id=message.id,
                topic=message.topic,
                key=message.key,
            )
        )

    async def _read(self, candidate: Candidate) -> Letter | None:
        rows = await self.fetch(Statement.READ, {"id": str(candidate.id)})
        letter = Letter.of(rows[0]) if rows else None
        if letter is None or letter.status is not Status.PENDING:
            return None
        if letter.origin != self.origin:
            raise ConfigError(
                f"dead letter {letter.id}: was given up by {letter.origin}, and this "
                f"is {self.origin}; retry it by its own consumer"
            )
        return letter

    def _find_handler(self, letter: Letter) -> AnyHandler:
        handler = self._routes.find(letter.topic)
        if handler is None:
            raise _NoHandlerError(
                f"consumer {self._consumer!r} has no handler for topic "
                f"{shorten(letter.topic)}: register one, or discard it"
            )
        return handler

    async def _fail(
        self,
        letter: Letter,
        failure: str | BaseException,
        *,
        delay: timedelta | None = None,
        charge: int = 1,
    ) -> Outcome:
        said = self._writer.describe(failure)
        count = letter.retry_count + charge
        await self.fetch(
            Statement.MARK_PENDING,
            {
                **named(Candidate(letter.id, letter.created_at)),
                "retry_count": letter.retry_count,
                "charge": charge,
                "reason": said.reason,
                "stacktrace": said.stacktrace,
                "delay": self._schedule.delay(count) if delay is None else delay,
            },
        )
        self._notify(
            DeadLetterFailed(**_about(letter), retry_count=count, reason=said.reason)
        )
        return Outcome.FAILED

    async def _transact(self, function: Callable[[Session], T]) -> T:
        try:
            return await self._executor.transact(function)
        except OutboxError:
            raise
        except Exception as error:
            raise DatabaseUnavailableError(
                f"the dead letters can't be read or written: {one_line(error)}"
            ) from error


class _NoHandlerError(Exception):
    """Nobody is there to handle it."""


def _about(letter: Letter) -> dict[str, Any]:
    return {
        "schema": "inbox",
        "id": letter.id,
        "message_id": letter.message_id,
        "topic": letter.topic,
    }
