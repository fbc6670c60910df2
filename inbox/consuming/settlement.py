"""Settle one delivery: retry the handler until it succeeds, or dead-letter the message.

    handled now or before ──▶ ack
    RetryLater(delay) ──▶ retry after the delay; counts no attempt (see `inbox.verdict`)
    another exception ──▶ retry with backoff; after the last attempt a dead letter
    DeadLetter, too old or too new, unreadable ──▶ dead letter, ack
    no handler here, or one for an older schema ──▶ handed back (see `rollout`)
    committed inside the handler, with its receipt ──▶ dead letter, ack
    database unavailable ──▶ retry when it is back; counts no attempt
    started too often before (see `inbox.poison`) ──▶ dead letter, with the last error

Meanwhile later messages of the key wait; all others proceed.

A dead letter is written before the ack, whatever the message contains:

    written, or PENDING already ──▶ ack
    database unavailable ──▶ retry when it is back
    row refused ──▶ at once a spare row, which can store any message
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from inbox.consuming.dispatch import Dispatcher
from inbox.consuming.outage import DatabaseOutage
from inbox.consuming.rollout import Rollout
from inbox.dead_letters.write import (
    DeadLetterWriter,
    Failure,
    Stacktraces,
    StoredFailure,
    finished_job_failed,
)
from inbox.errors import InvalidReceiptError
from inbox.events import (
    DeadLetterRepeated,
    DeliveryReturned,
    DuplicateSkipped,
    HandlerFailed,
    HandlerMissing,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.handlers.batch import Batches, Batching
from inbox.handlers.executor import Executor
from inbox.handlers.outcome import (
    Again,
    Cancelled,
    Dead,
    Failed,
    Handled,
    Later,
    Nacked,
    Outage,
    Outcome,
    Spent,
    Stopped,
    Taken,
)
from inbox.handlers.registration import AnyHandler, terms_of
from inbox.handlers.routes import Routes
from inbox.handlers.upcasting import Versions
from inbox.jobs.runner import JobRunner, LongHandler
from inbox.poison.policy import PoisonPolicy, Start, StartCounter
from inbox.poison.store import find_last_error
from inbox.receipt import has_receipt
from inbox.source import Delivery
from inbox.verdict import Fatal, Lost, Unclear, connection_broke, judge
from outbox.errors import (
    BrokerUnavailableError,
    InvalidMessageError,
    OutboxError,
    shorten,
    sqlstate_of,
)
from outbox.events import Observers
from outbox.limits import check_received
from outbox.message import Message
from outbox.retry import RetryPolicy

T = TypeVar("T")

# Between calls of a handler that asks to be called again at once.
_PAUSE: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=10), max_delay=timedelta(seconds=1)
)


class DeliverySettlement:
    """Settles the deliveries of one run of a consumer. For one event loop."""

    def __init__(
        self,
        dead_letters: DeadLetterWriter,
        routes: Routes[AnyHandler],
        versions: Versions,
        rollout: Rollout,
        executor: Executor,
        retry: RetryPolicy,
        observers: Observers,
    ) -> None:
        self._dead_letters = dead_letters
        self._consumer = dead_letters.consumer
        self._routes = routes
        self._versions = versions
        self._rollout = rollout
        self._executor = executor
        self._batches: dict[Batching, Batches] = {}
        self._long = JobRunner(executor, dead_letters.consumer)
        self._retry = retry
        self._notify = observers.notify
        self._poison = PoisonPolicy(executor, dead_letters.consumer)
        self._outage = DatabaseOutage(dead_letters.consumer, observers)
        self._dead_lettering = DeadLettering(dead_letters, self._outage, observers)

    async def settle(self, delivery: Delivery, dispatcher: Dispatcher) -> bool:
        """Settle a delivery; return False if the consumer stops first."""
        message = delivery.message
        failure = problem_of(delivery)
        if failure is None:
            failure = self._why_unhandled(message)
            if failure is None:
                handler = self._routes.find(message.topic)
                assert handler is not None
                return await self._try(handler, delivery, dispatcher)
            ended = await self._hand_back(delivery, dispatcher, failure)
            if ended is not None:
                return ended
        return await self._dead_lettering.write(
            delivery, dispatcher, failure, delivery.attempts
        )

    def _why_unhandled(self, message: Message) -> str | None:
        """Return why a message needs another replica; None: it has a handler here."""
        known = self._routes.match(message.topic)
        if known is not None:
            return self._versions.why_too_new(known, message)
        return (
            f"consumer {self._consumer!r} has no handler for topic "
            f"{shorten(message.topic)}: add one and retry it, or end the subscription "
            "(pillarbox unsubscribe CONSUMER TOPIC; for brokers other than postgres "
            "see their pages)"
        )

    async def _hand_back(
        self, delivery: Delivery, dispatcher: Dispatcher, reason: str
    ) -> bool | None:
        """Hand a delivery back, or let it wait here if its source can't.

        Returns None after the rollout, and False if the consumer stops first.
        """
        topic = delivery.message.topic
        is_first = topic not in self._rollout.since
        while (delay := self._rollout.wait(topic)) is not None:
            if is_first:
                is_first = False
                seconds = self._rollout.patience.total_seconds()
                self._notify(
                    HandlerMissing(
                        consumer=self._consumer,
                        topic=topic,
                        reason=reason,
                        seconds=seconds,
                    )
                )
            if await dispatcher.hand_back(delivery, delay):
                self._notify(DeliveryReturned(**self._about(delivery.message)))
                return True
            if not await dispatcher.park(delay):
                return False
        return None

    async def _try(
        self, handler: AnyHandler, delivery: Delivery, dispatcher: Dispatcher
    ) -> bool:
        retry = terms_of(handler).retry or self._retry
        is_long = isinstance(handler, LongHandler)
        counter = StartCounter(self._poison, delivery, retry, is_long=is_long)
        has_ended = False
        try:
            match await self._handle(handler, delivery, dispatcher, counter):
                case Nacked():
                    return True
                case Handled() as handled:
                    await self._handled(delivery, handled)
                    has_ended = True
                case Cancelled():
                    self._outage.end()
                    self._notify(MessageCancelled(**self._about(delivery.message)))
                    await ack(delivery)
                    has_ended = True
                case Dead(failure, attempts):
                    has_ended = await self._dead_lettering.write(
                        delivery, dispatcher, failure, attempts
                    )
                case Spent() as spent:
                    has_ended = await self._end_spent(delivery, dispatcher, spent)
                case Stopped():
                    pass
        finally:
            await (counter.end() if has_ended else counter.uncount())
        return has_ended

    async def _end_spent(
        self, delivery: Delivery, dispatcher: Dispatcher, spent: Spent
    ) -> bool:
        was_handled = await self._was_handled(delivery.message, dispatcher)
        if was_handled is None:
            return False
        if was_handled:
            await self._handled(delivery, Handled(is_new=False))
            return True
        unknown, message = str(spent), delivery.message
        find = partial(find_last_error, message.id, self._consumer, unknown)
        error: StoredFailure | str | None
        error = await self._ask(find, unknown, message, dispatcher)
        if error is None:
            return False
        return await self._dead_lettering.write(
            delivery, dispatcher, error, spent.starts
        )

    async def _was_handled(
        self, message: Message, dispatcher: Dispatcher
    ) -> bool | None:
        """Return whether it has a receipt; None if the consumer stops first."""
        # A process may have died between the commit and the ack.
        find = partial(has_receipt, message.id, self._consumer)
        return await self._ask(find, False, message, dispatcher)

    async def _ask(
        self,
        find: Callable[[Session], T],
        impossible: T,
        message: Message,
        dispatcher: Dispatcher,
    ) -> T | None:
        """Return the database's answer; None if the consumer stops first.

        Args:
            impossible: the answer for an id that no row can have.
        """
        lost = 0
        while True:
            try:
                async with dispatcher.slot(message):
                    return await self._executor.transact(find)
            except Exception as error:  # noqa: BLE001 (waits until it gets an answer)
                if refusal_of(error) is not None:
                    return impossible
                lost += 1
                if not await self._outage.wait(error, lost, dispatcher):
                    return None

    async def _handle(
        self,
        handler: AnyHandler,
        delivery: Delivery,
        dispatcher: Dispatcher,
        counter: StartCounter,
    ) -> Outcome:
        """Call the handler until the message has its outcome."""
        message = delivery.message
        lost = postponed = 0
        while True:
            attempted = await self._attempt(handler, message, dispatcher, counter)
            match attempted:
                case Failed(error):
                    outcome = await self._failed(delivery, counter, error, dispatcher)
                    if outcome is not None:
                        return outcome
                    continue
                case Later(delay, reason):
                    postponed += 1
                    delay = max(delay, _PAUSE.delay(postponed))
                    await counter.uncount()
                    asked = self._dead_letters.describe(reason, message.headers)
                    self._notify(
                        RetryRequested(
                            **self._about(message),
                            reason=asked.reason,
                            seconds_until_retry=delay.total_seconds(),
                        )
                    )
                    goes_on = await dispatcher.park(delay)
                case Outage(error):
                    lost += 1
                    goes_on = await self._outage.wait(error, lost, dispatcher)
                case _:
                    return attempted
            if not goes_on:
                return Stopped()

    async def _attempt(
        self,
        handler: AnyHandler,
        message: Message,
        dispatcher: Dispatcher,
        counter: StartCounter,
    ) -> Outcome | Again:
        try:
            slot, starting = (
                dispatcher.slot(message),
                counter.start(dispatcher.stopping),
            )
            async with slot, starting as start:
                match start:
                    case Start.STOPPED:
                        return Stopped()
                    case Start.SPENT:
                        return Spent(counter.attempts)
                return await self._call(handler, message, dispatcher, counter)
        except Exception as raised:  # noqa: BLE001 (a handler may raise anything)
            verdict = judge(raised, terms_of(handler).is_permanent)
        match verdict:
            case Fatal(error):
                # A message without a receipt was never handled.
                is_called = not isinstance(error, InvalidReceiptError)
                return Dead(error, counter.attempts + is_called)
            case Unclear(error):
                # A long handler's blocks have no receipt that would show it.
                was_committed = isinstance(handler, LongHandler) or (
                    await self._was_handled(message, dispatcher)
                )
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
        self,
        handler: AnyHandler,
        message: Message,
        dispatcher: Dispatcher,
        counter: StartCounter,
    ) -> Outcome | Later:
        started = time.monotonic()
        if isinstance(handler, LongHandler):
            ended = await self._long.run(handler, message, dispatcher.stopping, counter)
        elif isinstance(handler, Batching):
            batches = self._batches.get(handler)
            if batches is None:
                batches = self._batches[handler] = Batches(handler, self._executor)
            ended = Handled(await batches.handle(message))
        else:
            ended = Handled(await self._executor.handle(handler, message))
        match ended:
            case Handled():
                seconds = time.monotonic() - started
                return Handled(ended.is_new, ended.late_error, seconds)
            case Taken(delay):
                return Later(delay, "another process has this job")
        return ended

    async def _handled(self, delivery: Delivery, handled: Handled) -> None:
        self._outage.end()
        about = self._about(delivery.message)
        if handled.late_error is not None:
            late = (self._dead_letters, delivery.message, handled.late_error)
            self._notify(finished_job_failed(*late))
        if handled.is_new:
            self._notify(
                MessageHandled(
                    **about,
                    seconds=handled.seconds,
                    published_at=delivery.published_at,
                )
            )
        else:
            self._notify(DuplicateSkipped(**about))
        await ack(delivery)

    async def _failed(
        self,
        delivery: Delivery,
        counter: StartCounter,
        error: Exception,
        dispatcher: Dispatcher,
    ) -> Dead | Nacked | None:
        """Count an attempt; return the outcome if there is no other one here."""
        failure = self._dead_letters.describe(error, delivery.message.headers)
        await counter.failed(failure)
        if counter.retry.spent(counter.attempts):
            return Dead(error, counter.attempts)
        if await self._back_off(delivery, counter, failure, dispatcher):
            return None
        return Nacked()

    async def _back_off(
        self,
        delivery: Delivery,
        counter: StartCounter,
        failure: StoredFailure,
        dispatcher: Dispatcher,
    ) -> bool:
        delay = counter.retry.delay(counter.attempts)
        traces = self._dead_lettering.stacktraces
        self._notify(
            HandlerFailed(
                **self._about(delivery.message),
                attempts=counter.attempts,
                reason=failure.reason,
                seconds_until_retry=delay.total_seconds(),
                stacktrace=traces.first(delivery.message, failure, failure),
            )
        )
        due = time.monotonic() + delay.total_seconds()
        if await dispatcher.park(delay):
            return True
        left = max(0.0, due - time.monotonic())
        await counter.keep()
        await delivery.nack(timedelta(seconds=left))
        return False

    def _about(self, message: Message) -> dict[str, Any]:
        return about_message(self._consumer, message)


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


class DeadLettering:
    """Writes the dead letters of one run of a consumer, and acks their messages.

    Attributes:
        stacktraces: selects the stack traces that the run reports.
    """

    def __init__(
        self,
        dead_letters: DeadLetterWriter,
        outage: DatabaseOutage,
        observers: Observers,
    ) -> None:
        self._dead_letters = dead_letters
        self.stacktraces = Stacktraces()
        self._outage = outage
        self._notify = observers.notify

    async def write(
        self,
        delivery: Delivery,
        dispatcher: Dispatcher,
        failure: Failure,
        attempts: int,
    ) -> bool:
        """Write a dead letter and ack; return False if the consumer stops first."""
        written: StoredFailure | None = None
        refusal: str | None = None
        lost = 0
        while written is None:
            try:
                async with dispatcher.slot(delivery.message):
                    written = await self._dead_letters.write(
                        delivery.message,
                        attempts=attempts,
                        failure=failure,
                        readable=problem_of(delivery) is None,
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
                if not await self._outage.wait(error, lost, dispatcher):
                    return False
        self._outage.end()
        about = about_message(self._dead_letters.consumer, delivery.message)
        if written.is_new:
            trace = self.stacktraces.first(delivery.message, failure, written)
            self._notify(
                MessageDeadLettered(
                    **about,
                    attempts=attempts,
                    reason=written.reason,
                    stacktrace=trace,
                )
            )
        else:
            self._notify(DeadLetterRepeated(**about))
        await ack(delivery)
        return True


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


def about_message(consumer: str, message: Message) -> dict[str, Any]:
    """Return the fields that all events about a message share."""
    return {
        "consumer": consumer,
        "id": message.id,
        "topic": message.topic,
        "key": message.key,
        "traceparent": message.headers.get("traceparent"),
    }


async def ack(delivery: Delivery) -> None:
    """Ack a delivery.

    If the broker is unavailable, it redelivers the message later, and the receipt is
    then found.
    """
    try:
        await delivery.ack()
    except BrokerUnavailableError:
        return
