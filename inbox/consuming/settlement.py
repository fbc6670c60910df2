"""Settle one delivery: retry the handler until it succeeds, or dead-letter the message.

    handled now or before ──▶ ack
    RetryLater(delay) ──▶ retry after the delay; counts no attempt
    another exception ──▶ retry with backoff; after the last attempt a dead letter
    DeadLetter, too old or too new, no handler, unreadable ──▶ dead letter, ack
    committed inside the handler, with its receipt ──▶ dead letter, ack
    database unavailable ──▶ retry when it is back; counts no attempt
    started too often before (see `inbox.poison`) ──▶ dead letter, with the last error

Meanwhile later messages of the key wait; all others proceed.

A dead letter is written before the ack, whatever the message contains:

    written, or PENDING already ──▶ ack
    database unavailable ──▶ retry when it is back
    row refused ──▶ at once a spare row, which can store any message
"""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from inbox.consuming.dispatch import Dispatcher
from inbox.dead_letters.write import (
    DeadLetterWriter,
    Failure,
    Stacktraces,
    StoredFailure,
    finished_job_failed,
)
from inbox.errors import (
    DeadLetter,
    InvalidReceiptError,
    RetryLater,
    TransactionEndedError,
)
from inbox.events import (
    DeadLetterRepeated,
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerDatabaseRecovered,
    HandlerFailed,
    MessageCancelled,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from inbox.handlers.batch import Batches, Batching
from inbox.handlers.executor import Executor, call_alone, connection_broke
from inbox.handlers.registration import AnyHandler, retry_of
from inbox.handlers.routes import Routes
from inbox.idempotent import receipt_of
from inbox.jobs.runner import JobCancelled, JobReturned, JobRunner, LongHandler
from inbox.poison.policy import PoisonPolicy, StartCounter, StartedTooOften
from inbox.poison.store import find_last_error
from inbox.receipt import has_receipt
from inbox.source import Delivery
from outbox.errors import (
    BrokerUnavailableError,
    DatabaseUnavailableError,
    InvalidMessageError,
    OutboxError,
    one_line,
    shorten,
    without_values,
)
from outbox.events import Observers
from outbox.limits import check_received
from outbox.message import Message
from outbox.postgres.remedy import remedy_of
from outbox.retry import RetryPolicy

T = TypeVar("T")


class DeliverySettlement:
    """Settles the deliveries of one run of a consumer. For one event loop."""

    def __init__(
        self,
        dead_letters: DeadLetterWriter,
        routes: Routes[AnyHandler],
        executor: Executor,
        retry: RetryPolicy,
        observers: Observers,
    ) -> None:
        self._dead_letters = dead_letters
        self._consumer = dead_letters.consumer
        self._routes = routes
        self._executor = executor
        self._batches: dict[Batching, Batches] = {}
        self._long = JobRunner(executor, dead_letters.consumer)
        self._retry = retry
        self._notify = observers.notify
        self._poison = PoisonPolicy(executor, dead_letters.consumer)
        self._outage = DatabaseOutage(dead_letters.consumer, observers)
        self._give_up = GiveUp(dead_letters, self._outage, observers)

    async def settle(self, delivery: Delivery, dispatcher: Dispatcher) -> bool:
        """Settle a delivery; return False if the consumer stops first."""
        message = delivery.message
        handler = self._routes.find(message.topic)
        problem = problem_of(delivery)
        if problem is not None:
            failure = problem
        elif handler is None:
            failure = (
                f"consumer {self._consumer!r} has no handler for topic "
                f"{shorten(message.topic)}"
            )
        else:
            return await self._try(handler, delivery, dispatcher)
        return await self._give_up.give_up(
            delivery, dispatcher, failure, delivery.attempts
        )

    async def _try(
        self, handler: AnyHandler, delivery: Delivery, dispatcher: Dispatcher
    ) -> bool:
        is_long = isinstance(handler, LongHandler)
        counter = self._poison.counter_of(
            delivery, retry_of(handler) or self._retry, is_long=is_long
        )
        settled = False
        try:
            outcome = await self._handle(handler, delivery, dispatcher, counter)
            if isinstance(outcome, bool):
                settled = outcome
            else:
                settled = await self._give_up.give_up(delivery, dispatcher, *outcome)
        except StartedTooOften as started:
            settled = await self._give_up_spent(handler, delivery, dispatcher, started)
        finally:
            await (counter.end() if settled else counter.take_back())
        return settled

    async def _give_up_spent(
        self,
        handler: AnyHandler,
        delivery: Delivery,
        dispatcher: Dispatcher,
        started: StartedTooOften,
    ) -> bool:
        was_handled = await self._was_handled(handler, delivery.message, dispatcher)
        if was_handled is None:
            return False
        if was_handled:
            await self._handled(delivery, False, 0.0)
            return True
        unknown, message = str(started), delivery.message
        look = partial(find_last_error, message.id, self._consumer, unknown)
        error: StoredFailure | str | None
        error = await self._ask(look, unknown, message, dispatcher)
        if error is None:
            return False
        return await self._give_up.give_up(delivery, dispatcher, error, started.starts)

    async def _was_handled(
        self, handler: AnyHandler, message: Message, dispatcher: Dispatcher
    ) -> bool | None:
        """Return whether it has a receipt; None if the consumer stops first."""
        # A process may have died between the commit and the ack.
        try:
            receipt = call_alone(receipt_of, handler, message, self._consumer)
        except Exception:  # noqa: BLE001 (upcasters and keys are the user's)
            return False  # the handler couldn't record a receipt either
        look = partial(has_receipt, *receipt)
        return await self._ask(look, False, message, dispatcher)

    async def _ask(
        self,
        look: Callable[[Session], T],
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
                    return await self._executor.transact(look)
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
    ) -> bool | tuple[str | BaseException, int]:
        message = delivery.message
        lost = 0
        while True:
            failure: Exception
            try:
                slot, start = (
                    dispatcher.slot(message),
                    counter.start(dispatcher.stopping),
                )
                async with slot, start as is_started:
                    if not is_started:
                        return False
                    started = time.monotonic()
                    is_new = await self._call(handler, message, dispatcher, counter)
            except StartedTooOften:
                raise
            except JobReturned:
                return False
            except JobCancelled:
                await self._cancelled(delivery)
                return True
            except RetryLater as decision:
                await counter.take_back()
                self._notify(
                    RetryRequested(
                        **self._about(message),
                        reason=without_values(decision.reason, decision),
                        seconds_until_retry=decision.delay.total_seconds(),
                    )
                )
                if not await dispatcher.park(decision.delay):
                    return False
                continue
            except DeadLetter as decision:
                return decision, counter.attempts + 1
            except InvalidReceiptError as error:
                return error, counter.attempts
            except DatabaseUnavailableError as error:
                lost += 1
                if not await self._outage.wait(error, lost, dispatcher):
                    return False
                continue
            except TransactionEndedError as error:
                if isinstance(handler, LongHandler):
                    return error, counter.attempts + 1
                was_committed = await self._was_handled(handler, message, dispatcher)
                if was_committed is None:
                    return False
                if was_committed:
                    return error, counter.attempts + 1
                failure = error
            except Exception as error:  # noqa: BLE001 (a handler may raise anything)
                if counter.excuses(error):
                    counter.broken_connections += 1
                    if not await self._outage.wait(
                        error, counter.broken_connections, dispatcher
                    ):
                        return False
                    continue
                failure = error
            else:
                if counter.late_error is not None:
                    self._notify(
                        finished_job_failed(
                            self._dead_letters, message, counter.late_error
                        )
                    )
                await self._handled(delivery, is_new, time.monotonic() - started)
                return True
            said = self._dead_letters.describe(failure)
            await counter.failed(said)
            if counter.retry.spent(counter.attempts):
                return failure, counter.attempts
            if not await self._back_off(delivery, counter, said, dispatcher):
                return True

    async def _call(
        self,
        handler: AnyHandler,
        message: Message,
        dispatcher: Dispatcher,
        counter: StartCounter,
    ) -> bool:
        if isinstance(handler, LongHandler):
            return await self._long.run(handler, message, dispatcher.stopping, counter)
        if isinstance(handler, Batching):
            batches = self._batches.get(handler)
            if batches is None:
                batches = self._batches[handler] = Batches(handler, self._executor)
            return await batches.handle(message)
        return await self._executor.handle(handler, message)

    async def _cancelled(self, delivery: Delivery) -> None:
        self._outage.end()
        self._notify(MessageCancelled(**self._about(delivery.message)))
        await ack(delivery)

    async def _handled(self, delivery: Delivery, is_new: bool, seconds: float) -> None:
        self._outage.end()
        about = self._about(delivery.message)
        if is_new:
            self._notify(
                MessageHandled(
                    **about,
                    seconds=seconds,
                    published_at=getattr(delivery, "published_at", None),
                )
            )
        else:
            self._notify(DuplicateSkipped(**about))
        await ack(delivery)

    async def _back_off(
        self,
        delivery: Delivery,
        counter: StartCounter,
        said: StoredFailure,
        dispatcher: Dispatcher,
    ) -> bool:
        delay = counter.retry.delay(counter.attempts)
        traces = self._give_up.stacktraces
        self._notify(
            HandlerFailed(
                **self._about(delivery.message),
                attempts=counter.attempts,
                reason=said.reason,
                seconds_until_retry=delay.total_seconds(),
                stacktrace=traces.first(delivery.message, said, said),
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


class GiveUp:
    """Writes the dead letters of one run of a consumer, and acks their messages.

    Attributes:
        stacktraces: selects the stack traces that the run reports.
    """

    def __init__(
        self,
        dead_letters: DeadLetterWriter,
        outage: "DatabaseOutage",
        observers: Observers,
    ) -> None:
        self._dead_letters = dead_letters
        self.stacktraces = Stacktraces()
        self._outage = outage
        self._notify = observers.notify

    async def give_up(
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
    state = getattr(refused_by, "sqlstate", None) or getattr(refused_by, "pgcode", None)
    if state is None:
        # The driver, or this library, failed before sending it.
        is_away = isinstance(error, _AWAY) or connection_broke(error)
        return None if is_away else type(refused_by).__name__
    if not str(state).startswith(_OF_THE_ROW):
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


_RECOVERY: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=100), max_delay=timedelta(seconds=10)
)
_TELL_AGAIN: Final = 20.0
"""Seconds after which a continuing outage is reported again."""


class DatabaseOutage:
    """Waits while the handlers' database is unavailable, and reports the outage."""

    def __init__(self, consumer: str, observers: Observers) -> None:
        self._consumer = consumer
        self._notify = observers.notify
        self._is_lost = False
        self._tell_at = -math.inf

    async def wait(
        self, error: BaseException, times: int, dispatcher: Dispatcher
    ) -> bool:
        """Wait with backoff after an error; return False if the consumer stops."""
        delay = _RECOVERY.delay(times)
        now = time.monotonic()
        if now >= self._tell_at:
            self._is_lost = True
            self._tell_at = now + _TELL_AGAIN
            self._notify(
                HandlerDatabaseLost(
                    consumer=self._consumer,
                    reason=one_line(error),
                    remedy=remedy_of(error),
                    seconds=delay.total_seconds(),
                )
            )
        # Still in flight, so that fetching pauses during an outage.
        return await dispatcher.pause(delay)

    def end(self) -> None:
        """Report that the database is back, if it was unavailable."""
        if self._is_lost:
            self._is_lost = False
            self._tell_at = -math.inf
            self._notify(HandlerDatabaseRecovered(consumer=self._consumer))
