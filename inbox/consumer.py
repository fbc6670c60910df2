"""The consumer: receive, handle, settle. Read this file first.

`run` connects a `Source` and a `Flight`: it fetches no more than there is room for,
and what it fetched is settled side by side by a `Settlement`, key by key in order.
"""

import asyncio
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from inbox.events import (
    ConsumerStarted,
    ConsumerStopped,
    DeliveriesReceived,
    DeliveryReturned,
    SourceFound,
    SourceLost,
)
from inbox.flight import Flight
from inbox.handle import Sessions, handling, one_line
from inbox.receipt import check_text
from inbox.routes import Routes
from inbox.settle import Settlement
from inbox.source import Delivery, Source
from outbox.entry_points import implementation
from outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    DatabaseUnavailableError,
)
from outbox.events import Observer, Observers
from outbox.retry import RetryPolicy

H = TypeVar("H", bound=Callable[..., Any])

_RECONNECT = RetryPolicy(
    first_delay=timedelta(milliseconds=100), max_delay=timedelta(seconds=10)
)


class Consumer:
    """Handles the messages of a broker, each with its effects exactly once.

    Each message is handled in a transaction of its own with its receipt: a message
    that was handled before is acked and skipped. Handlers must not commit the session
    that they are given. Messages with one key are handled in the order in which the
    source hands them over, keys side by side.

    Args:
        source: where the messages come from: a broker's URL, or a `Source`.
        sessions: of the handlers' database: an `async_sessionmaker` for async
            handlers, a `sessionmaker` for plain functions, which run in threads.
        name: whose receipts, subscriptions and consumer group these are; the
            replicas of one consumer have one name.
        max_in_flight: handlers at work at once.
        max_waiting: messages held that wait behind others of their key, or for
            their retry; when it is reached, no more are fetched.
        retry: backoff and number of attempts for handlers that raise.
        drain: how long a stop waits for handlers at work.
        observers: are told of every event of `inbox.events`.
    """

    def __init__(
        self,
        source: Source | str,
        sessions: Sessions,
        *,
        name: str,
        max_in_flight: int = 64,
        max_waiting: int = 1024,
        retry: RetryPolicy | None = None,
        drain: timedelta = timedelta(seconds=20),
        observers: Iterable[Observer] = (),
    ) -> None:
        check_text("consumer", name)
        for field, value, least in (
            ("max_in_flight", max_in_flight, 1),
            ("max_waiting", max_waiting, 0),
        ):
            if value < least:
                raise ConfigError(f"{field}={value}: must be at least {least}")
        if drain < timedelta(0):
            raise ConfigError(f"drain={drain}: must not be negative")
        self.name = name
        self._source = source
        self._handling = handling(sessions, name, max_in_flight)
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._retry = retry or RetryPolicy()
        self._drain = drain
        self._observers = list(observers)
        self._routes = Routes()
        self._stop: asyncio.Event | None = None

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a handler."""
        return self._routes.topics

    def handles(self, topic: str) -> Callable[[H], H]:
        """Register the handler `(session, message)` of a topic, or of `orders.*`.

        A handler that is `@idempotent` records its receipt itself; for any other the
        consumer does.

        Raises:
            ConfigError: the topic has a handler already or can't be used, or the
                handler doesn't fit the kind of the sessions.
        """

        def register(handler: H) -> H:
            self._handling.check(handler)
            self._routes.add(topic, handler)
            return handler

        return register

    def observe(self, observer: Observer) -> None:
        """Tell one more observer, from the next run on."""
        self._observers.append(observer)

    def stop(self) -> None:
        """Let `run` drain and return. For the loop's own thread; twice is harmless."""
        if self._stop is not None:
            self._stop.set()

    async def run(self) -> None:
        """Handle messages until `stop` is called, or the task is cancelled.

        Then nothing more is fetched, handlers at work may finish within `drain`, and
        the rest is given back. A broker or a database that goes away later is waited
        for; a second cancellation ends the drain.

        Raises:
            ConfigError: there is no handler, or the source or the tables are not as
                they should be.
            BrokerUnavailableError, DatabaseUnavailableError: at the start, the broker
                or the database is away.
        """
        if self._stop is not None:
            raise ConfigError(f"consumer {self.name!r}: runs already; make another one")
        if not self.topics:
            raise ConfigError(
                f"consumer {self.name!r}: has no handler; register one with "
                "@consumer.handles(topic)"
            )
        self._stop = asyncio.Event()
        try:
            work = asyncio.create_task(self._run(self._stop))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                self._stop.set()
                await work
                raise
        finally:
            self._stop = None

    async def _run(self, stop: asyncio.Event) -> None:
        observers = Observers(self._observers)
        settlement = Settlement(
            self.name, self._routes, self._handling, self._retry, observers
        )
        flight = Flight(
            lambda delivery: settlement.settle(delivery, flight),
            max_in_flight=self._max_in_flight,
            max_waiting=self._max_waiting,
        )
        chosen = self._choose_source()
        await self._check_database()
        async with chosen as source:
            observers.notify(ConsumerStarted(consumer=self.name, topics=self.topics))
            receiving = asyncio.create_task(self._receive(source, flight, observers))
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait(
                    (receiving, stopped), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                receiving.cancel()
                stopped.cancel()
                results = await asyncio.gather(
                    receiving, stopped, return_exceptions=True
                )
                left = await flight.stop(self._drain)
                await self._give_back(left, observers)
                self._handling.close()
        observers.notify(ConsumerStopped(consumer=self.name, returned=len(left)))
        if isinstance(results[0], Exception):
            raise results[0]

    async def _check_database(self) -> None:
        try:
            await self._handling.probe()
        except Exception as error:
            state = getattr(getattr(error, "orig", None), "sqlstate", None)
            if state in {"42P01", "3F000"}:
                raise ConfigError(
                    "the database of sessions has no schema inbox: run outbox migrate "
                    "--database URL for it"
                ) from error
            if state == "42501":
                raise ConfigError(
                    f"the database of sessions: {one_line(error)}; grant the role "
                    "pillarbox_consumer to its user"
                ) from error
            raise DatabaseUnavailableError(
                f"can't read the inbox in the database of sessions: {one_line(error)}"
            ) from error

    def _choose_source(self) -> Source:
        if not isinstance(self._source, str):
            return self._source
        found = implementation("inbox.sources", self._source)
        source: Source = found.from_url(
            self._source, consumer=self.name, topics=self.topics
        )
        return source

    async def _receive(
        self, source: Source, flight: Flight, observers: Observers
    ) -> None:
        failures = 0
        while True:
            room = await flight.wait_for_room()
            try:
                deliveries = await source.receive(limit=room)
            except BrokerUnavailableError as error:
                failures += 1
                delay = _RECONNECT.delay(failures).total_seconds()
                observers.notify(
                    SourceLost(consumer=self.name, reason=str(error), seconds=delay)
                )
                await asyncio.sleep(delay)
                continue
            if failures:
                failures = 0
                observers.notify(SourceFound(consumer=self.name))
            if deliveries:
                flight.accept(deliveries)
                observers.notify(
                    DeliveriesReceived(consumer=self.name, messages=len(deliveries))
                )

    async def _give_back(self, left: list[Delivery], observers: Observers) -> None:
        # Last first: a source that puts each before all others has them in order.
        for delivery in reversed(left):
            try:
                await delivery.nack()
            except BrokerUnavailableError:
                continue  # comes again without being asked for
            observers.notify(
                DeliveryReturned(
                    consumer=self.name,
                    id=delivery.message.id,
                    topic=delivery.message.topic,
                    key=delivery.message.key,
                )
            )
