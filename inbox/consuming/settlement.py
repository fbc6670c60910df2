"""Settle one delivery: retry the handler until it succeeds, or dead-letter the message.

    handled now or before ──▶ ack
    RetryLater(delay) ──▶ retry after the delay; counts no attempt (see `verdict`)
    another exception ──▶ retry with backoff; after the last attempt a dead letter
    DeadLetter, too old or too new, unreadable ──▶ dead letter, ack
    no handler here, or one for an older schema ──▶ handed back (see `rollout`)
    encoded, and the consumer has no codec ──▶ handed back, and never given up
    committed inside the handler, with its receipt ──▶ dead letter, ack
    database unavailable ──▶ retry when it is back; counts no attempt
    its topic is paused ──▶ waits, or is handed back; no handler begins
    started too often before (see `poison/`) ──▶ dead letter, with the last error

Meanwhile later messages of the key wait; all others proceed.

A dead letter is written before the ack, whatever the message contains:

    written, or PENDING already ──▶ ack
    database unavailable ──▶ retry when it is back
    row refused ──▶ at once a spare row, which can store any message
"""

import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.consuming.outage import DatabaseOutage
from pillarbox.inbox.consuming.pauses import Pauses
from pillarbox.inbox.consuming.rollout import Rollout
from pillarbox.inbox.dead_letters.write import (
    DeadLetterWriter,
    Failure,
    Stacktraces,
    StoredFailure,
)
from pillarbox.inbox.errors import InvalidReceiptError
from pillarbox.inbox.events import (
    CodecMissing,
    DeadLetterRepeated,
    DeliveryEvent,
    DeliveryReturned,
    DuplicateSkipped,
    FinishedJobFailed,
    HandlerFailed,
    HandlerMissing,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.handlers.batch import Batches
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.inbox.handlers.outcome import (
    Again,
    Cancelled,
    Dead,
    Failed,
    Handled,
    Later,
    Outage,
    Outcome,
    Paused,
    Returned,
    Spent,
    Stopped,
)
from pillarbox.inbox.handlers.registration import Registered
from pillarbox.inbox.handlers.routes import Routes
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.handlers.upcasting import Versions
from pillarbox.inbox.jobs.runner import JobRunner
from pillarbox.inbox.poison.policy import PoisonPolicy, Start, StartCounter
from pillarbox.inbox.poison.store import find_last_error
from pillarbox.inbox.receipt import has_receipt
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.verdict import Fatal, Lost, Unclear, connection_broke, judge
from pillarbox.outbox.errors import (
    BrokerUnavailableError,
    InvalidMessageError,
    OutboxError,
    shorten,
    sqlstate_of,
)
from pillarbox.outbox.events import Observers
from pillarbox.outbox.limits import check_received
from pillarbox.outbox.message_id import seconds_since_epoch
from pillarbox.outbox.retry import RetryPolicy

T = TypeVar("T")

# Between calls of a handler that asks to be called again at once.
_PAUSE: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=10), max_delay=timedelta(seconds=1)
)
_AWAY: Final = (
    OperationalError,
    InterfaceError,
    PoolTimeoutError,
    OSError,
    OutboxError,
)
# The classes of data, constraint and program limit errors; and the internal error for
# a row that is too large to assemble.
_OF_THE_ROW: Final = ("22", "23", "54", "XX000")


class DeliverySettlement:
    """Settles the deliveries of one run of a consumer. For one event loop."""

    def __init__(
        self,
        dead_letters: DeadLetterWriter,
        routes: Routes[Registered],
        versions: Versions,
        rollout: Rollout,
        pauses: Pauses,
        executor: Executor,
        retry: RetryPolicy,
        observers: Observers,
        outage: DatabaseOutage,
    ) -> None:
        self.consumer = dead_letters.consumer
        self.dead_letters = dead_letters
        self.routes = routes
        self.versions = versions
        self.rollout = rollout
        self.pauses = pauses
        self.without_codec = Rollout(timedelta.max)
        self.executor = executor
        self.retry = retry
        self.notify = observers.notify
        self.stacktraces = Stacktraces()
        self.jobs = JobRunner(executor, self.consumer)
        self.poison = PoisonPolicy(executor, self.consumer)
        self.outage = outage
        self._batches: dict[Registered, Batches] = {}

    def settle(self, delivery: Delivery, dispatcher: Dispatcher) -> Awaitable[bool]:
        """Settle a delivery; return False if the consumer stops first."""
        return _Turn(self, delivery, dispatcher).settle()

    def batches(self, handler: Registered) -> Batches:
        """Return what collects the batches of a batch handler."""
        if handler not in self._batches:
            self._batches[handler] = Batches(handler, self.executor)
        return self._batches[handler]


class _Turn:
    """The settlement of one delivery."""

    def __init__(
        self, run: DeliverySettlement, delivery: Delivery, dispatcher: Dispatcher
    ) -> None:
        self._run = run
        self._delivery = delivery
        self._message = delivery.message
        self._dispatcher = dispatcher
        self._began = 0.0

    async def settle(self) -> bool:
        failure = problem_of(self._delivery)
        if failure is None:
            rollout = self._run.rollout
            failure = self._why_unhandled()
            if failure is None:
                rollout = self._run.without_codec
                failure = self._run.versions.why_encoded(self._message)
            if failure is None:
                handler = self._run.routes.find(self._message.topic)
                assert handler is not None
                return await self._try(handler)
            ended = await self._hand_back(failure, rollout)
            if ended is not None:
                return ended
        return await self._dead_letter(failure, self._delivery.attempts)

    def _why_unhandled(self) -> str | None:
        """Return why the message needs another replica; None: it has a handler here."""
        topic = self._message.topic
        known = self._run.routes.match(topic)
        if known is not None:
            return self._run.versions.why_too_new(known, self._message)
        return (
            f"consumer {self._run.consumer!r} has no handler for topic"
            f" {shorten(topic)}: add one and retry, or end the subscription (see the"
            " broker's page; for postgres, pillarbox readers drop)"
        )

    async def _hand_back(self, reason: str, rollout: Rollout) -> bool | None:
        """Hand the delivery back, or let it wait here if its source can't.

        Returns None after the rollout, and False if the consumer stops first.
        """
        run, topic = self._run, self._message.topic
        if rollout.patience and topic not in rollout.since:
            run.notify(
                CodecMissing(consumer=run.consumer, topic=topic, reason=reason)
                if rollout is run.without_codec
                else HandlerMissing(
                    consumer=run.consumer,
                    topic=topic,
                    reason=reason,
                    seconds=rollout.patience.total_seconds(),
                )
            )
        while (delay := rollout.wait(topic)) is not None:
            if await self._dispatcher.hand_back(self._delivery, delay):
                self._notify(DeliveryReturned)
                return True
            if not await self._dispatcher.park(delay):
                return False
        return None

    async def _try(self, handler: Registered) -> bool:
        retry = handler.terms.retry or self._run.retry
        is_long = handler.takes is Takes.JOB
        counter = StartCounter(self._run.poison, self._delivery, retry, is_long=is_long)
        has_ended = False
        try:
            outcome = await self._handle(handler, counter)
            has_ended = await self._end(outcome)
            return has_ended or isinstance(outcome, Returned)
        finally:
            await (counter.end() if has_ended else counter.uncount())

    async def _end(self, outcome: Outcome) -> bool:
        match outcome:
            case Handled(is_new, late_error):
                await self._handled(late_error, is_new=is_new)
            case Cancelled():
                self._run.outage.end()
                self._notify(MessageCancelled)
                await ack(self._delivery)
            case Dead(failure, attempts):
                return await self._dead_letter(failure, attempts)
            case Spent():
                return await self._end_spent(outcome)
            case Returned() | Stopped():
                return False
        return True

    async def _end_spent(self, spent: Spent) -> bool:
        was_handled = await self._was_handled()
        if was_handled is None:
            return False
        if was_handled:
            await self._handled(is_new=False)
            return True
        unknown = str(spent)
        find = partial(find_last_error, self._message.id, self._run.consumer, unknown)
        error: StoredFailure | str | None = await self._ask(find, unknown)
        return error is not None and await self._dead_letter(error, spent.starts)

    async def _was_handled(self) -> bool | None:
        """Return whether it has a receipt; None if the consumer stops first."""
        # A process may have died between the commit and the ack.
        find = partial(has_receipt, self._message.id, self._run.consumer)
        return await self._ask(find, False)

    async def _ask(self, find: Callable[[Session], T], impossible: T) -> T | None:
        """Return the database's answer; None if the consumer stops first.

        Args:
            impossible: the answer for an id that no row can have.
        """
        lost = 0
        while True:
            try:
                async with self._dispatcher.slot(self._message):
                    return await self._run.executor.transact(find)
            except Exception as error:  # noqa: BLE001 (waits until it gets an answer)
                if refusal_of(error) is not None:
                    return impossible
                lost += 1
                if not await self._run.outage.wait(error, lost, self._dispatcher):
                    return None

    async def _handle(self, handler: Registered, counter: StartCounter) -> Outcome:
        """Call the handler until the message has its outcome."""
        lost = postponed = 0
        while True:
            attempted = await self._attempt(handler, counter)
            match attempted:
                case Failed(error):
                    outcome = await self._failed(counter, error)
                    if outcome is not None:
                        return outcome
                    continue
                case Later(delay, reason):
                    postponed += 1
                    delay = max(delay, _PAUSE.delay(postponed))
                    await counter.uncount()
                    self._notify(
                        RetryRequested,
                        reason=self._describe(reason).reason,
                        seconds_until_retry=delay.total_seconds(),
                    )
                    goes_on = await self._dispatcher.park(delay)
                case Outage(error):
                    lost += 1
                    goes_on = await self._run.outage.wait(error, lost, self._dispatcher)
                case Paused():
                    await counter.keep()
                    pauses = self._run.pauses
                    left = await pauses.wait(self._delivery, self._dispatcher)
                    if left:
                        self._notify(DeliveryReturned)
                        return Returned()
                    goes_on = left is None
                case _:
                    return attempted
            if not goes_on:
                return Stopped()

    async def _attempt(
        self, handler: Registered, counter: StartCounter
    ) -> Outcome | Again:
        slot = self._dispatcher.slot(self._message)
        starting = counter.start(self._dispatcher.stopping)
        try:
            async with slot:
                if self._run.pauses.has(self._message.topic):
                    return Paused()
                async with starting as start:
                    match start:
                        case Start.STOPPED:
                            return Stopped()
                        case Start.SPENT:
                            return Spent(counter.attempts)
                    return await self._call(handler, counter)
        except Exception as raised:  # noqa: BLE001 (a handler may raise anything)
            verdict = judge(raised, handler.terms.is_permanent)
        match verdict:
            case Fatal(error):
                # A message without a receipt was never handled.
                is_called = not isinstance(error, InvalidReceiptError)
                return Dead(error, counter.attempts + is_called)
            case Unclear(error):
                # A long handler's blocks have no receipt that would show it.
                is_long = handler.takes is Takes.JOB
                was_committed = is_long or await self._was_handled()
                if was_committed is None:
                    return Stopped()
                if was_committed:
                    return Dead(error, counter.attempts + 1)
                return Failed(error)
            case Lost(error, lost):
                if not counter.excuses_loss():
                    return Failed(error)
                counter.broken_connections += 1
                return Outage(lost)
        return verdict

    async def _call(
        self, handler: Registered, counter: StartCounter
    ) -> Outcome | Later:
        run, message = self._run, self._message
        self._began = time.monotonic()
        match handler.takes:
            case Takes.ONE:
                return Handled(bool(await run.executor.handle(handler, [message])))
            case Takes.MANY:
                return Handled(await run.batches(handler).handle(message))
            case Takes.JOB:
                stopping = self._dispatcher.stopping
                return await run.jobs.run(handler, message, stopping, counter)

    async def _handled(
        self, late_error: Exception | None = None, *, is_new: bool
    ) -> None:
        self._run.outage.end()
        if late_error is not None:
            late = self._describe(late_error)
            self._notify(
                FinishedJobFailed, reason=late.reason, stacktrace=late.reported
            )
        if is_new:
            scheduled, id = self._message.available_at, self._message.id
            self._notify(
                MessageHandled,
                seconds=time.monotonic() - self._began,
                published_at=self._delivery.published_at,
                due_at=scheduled.timestamp() if scheduled else seconds_since_epoch(id),
            )
        else:
            self._notify(DuplicateSkipped)
        await ack(self._delivery)

    async def _failed(
        self, counter: StartCounter, error: Exception
    ) -> Dead | Returned | None:
        """Count an attempt; return the outcome if this process makes no other one."""
        failure = self._describe(error)
        await counter.failed(failure)
        if counter.retry.spent(counter.attempts):
            return Dead(error, counter.attempts)
        delay = counter.retry.delay(counter.attempts)
        self._notify(
            HandlerFailed,
            attempts=counter.attempts,
            reason=failure.reason,
            seconds_until_retry=delay.total_seconds(),
            stacktrace=self._run.stacktraces.first(self._message, failure, failure),
        )
        due = time.monotonic() + delay.total_seconds()
        if await self._dispatcher.park(delay):
            return None
        left = max(0.0, due - time.monotonic())
        await counter.keep()
        await self._delivery.nack(timedelta(seconds=left))
        return Returned()

    async def _dead_letter(self, failure: Failure, attempts: int) -> bool:
        """Write a dead letter and ack; return False if the consumer stops first."""
        run = self._run
        written: StoredFailure | None = None
        refusal: str | None = None
        lost = 0
        while written is None:
            try:
                async with self._dispatcher.slot(self._message):
                    written = await run.dead_letters.write(
                        self._message,
                        attempts=attempts,
                        failure=failure,
                        readable=problem_of(self._delivery) is None,
                        refusal=refusal,
                    )
            except Exception as error:  # noqa: BLE001 (nothing else can be done with it)
                if refusal is None:
                    refusal = refusal_of(error)
                    if refusal is not None:
                        continue
                # If the spare row is also refused, the message is not the reason.
                refusal = None
                lost += 1
                if not await run.outage.wait(error, lost, self._dispatcher):
                    return False
        run.outage.end()
        if written.is_new:
            self._notify(
                MessageDeadLettered,
                attempts=attempts,
                reason=written.reason,
                stacktrace=run.stacktraces.first(self._message, failure, written),
            )
        else:
            self._notify(DeadLetterRepeated)
        await ack(self._delivery)
        return True

    def _describe(self, failure: Failure) -> StoredFailure:
        return self._run.dead_letters.describe(failure, self._message.headers)

    def _notify(self, kind: type[DeliveryEvent], **more: object) -> None:
        self._run.notify(kind.of(self._run.consumer, self._message, **more))


def problem_of(delivery: Delivery) -> str | None:
    """Return why a delivery can't be handled as a message; None if it can."""
    if delivery.problem is not None:
        return delivery.problem
    try:
        check_received(delivery.message)
    except InvalidMessageError as error:
        return str(error)
    return None


def refusal_of(error: Exception) -> str | None:
    """Return why a row was refused because of its content; None for an outage.

    The server's message is omitted because it can quote the row.
    """
    refused_by = error.orig if isinstance(error, DBAPIError) else error
    state = sqlstate_of(error)
    if state is None:
        # The driver, or this library, failed before sending it.
        is_away = isinstance(error, _AWAY) or connection_broke(error)
        return None if is_away else type(refused_by).__name__
    if not state.startswith(_OF_THE_ROW):
        return None
    return f"{type(refused_by).__name__}, SQLSTATE {state}"


async def ack(delivery: Delivery) -> None:
    """Ack a delivery.

    If the broker is unavailable, it redelivers the message later, and the receipt is
    then found.
    """
    try:
        await delivery.ack()
    except BrokerUnavailableError:
        return
