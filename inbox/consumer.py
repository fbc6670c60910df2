"""The consumer process. Read this file first.

    Source ──Fetcher──▶ Dispatcher ──FairScheduler──▶ DeliverySettlement ──▶ ack

Each queue has a `Fetcher`, which receives as many messages from the source as the
`Dispatcher` has room for. The dispatcher handles the messages of a key in order, and
different keys concurrently; the `FairScheduler`, shared by all queues, decides which
message gets the next slot. `DeliverySettlement` calls the handler and settles the
delivery according to the outcome.

`Consumer.handles` registers handlers; `Consumer.run` starts these parts and drains
them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypedDict, TypeVar, Unpack

from sqlalchemy import text
from sqlalchemy.orm import Session
from typing_extensions import override

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.consuming.activity import count_topics
from pillarbox.inbox.consuming.blocked_keys import BlockedKeys
from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.consuming.fair_scheduler import FairScheduler
from pillarbox.inbox.consuming.fetch import Fetcher, fetch_all, stop_all
from pillarbox.inbox.consuming.limits import ConsumerLimits
from pillarbox.inbox.consuming.outage import DatabaseOutage
from pillarbox.inbox.consuming.pauses import Pauses
from pillarbox.inbox.consuming.queues import ORDERS, Order, ServedQueues
from pillarbox.inbox.consuming.rollout import Rollout
from pillarbox.inbox.consuming.settlement import DeliverySettlement
from pillarbox.inbox.dead_letters.retry import HandlerRetrier
from pillarbox.inbox.dead_letters.write import DeadLetterWriter, Redact
from pillarbox.inbox.events import ConsumerStarted, ConsumerStopped, HandlersAbandoned
from pillarbox.inbox.handlers.arguments import arguments_of
from pillarbox.inbox.handlers.attempt import answered
from pillarbox.inbox.handlers.checks import check_database, make_days, member_id
from pillarbox.inbox.handlers.registration import Registered, most_connections
from pillarbox.inbox.handlers.routes import (
    DEFAULT_QUEUE,
    Routes,
    check_queue,
    check_topic,
)
from pillarbox.inbox.handlers.sessions import (
    DEFAULT_IN_FLIGHT,
    Sessions,
    database_url,
    has_fixed_password,
    make_executor,
    pool_limit,
)
from pillarbox.inbox.handlers.signature import Takes
from pillarbox.inbox.handlers.terms import Permanent, Terms
from pillarbox.inbox.handlers.upcasting import Upcaster, Versions
from pillarbox.inbox.idle import DEFAULT_MAX_IDLE
from pillarbox.inbox.receipt import check_text
from pillarbox.inbox.source import Delivery, Source
from pillarbox.outbox import tracing
from pillarbox.outbox.errors import ConfigError, check_type, shorten, sqlstate_of
from pillarbox.outbox.events import Event, Observer, Observers, ProcessMeasured, checked
from pillarbox.outbox.gather import Process, end
from pillarbox.outbox.message import Message
from pillarbox.outbox.observability.counters import TopicCounters
from pillarbox.outbox.observability.health import Outages
from pillarbox.outbox.observability.logging import logged
from pillarbox.outbox.observability.presence import INTERVAL, Presence
from pillarbox.outbox.payload.asyncapi import MessageSchema
from pillarbox.outbox.payload.payload_codec import PayloadCodec
from pillarbox.outbox.payload.schema_registry import REGISTRY, SchemaRegistry, Validator
from pillarbox.outbox.postgres.days import Days
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.retry import RetryPolicy

H = TypeVar("H", bound=Callable[..., Any])
U = TypeVar("U", bound=Upcaster)


_QUICK: Final = timedelta(milliseconds=1)
_NEXT_BEAT: Final = timedelta(seconds=INTERVAL)
# The classes of SQLSTATEs that blame a row, a lock, the schema, or a privilege.
_OF_THE_TABLE: Final = ("22", "23", "3F", "42", "55")
# Drivers infer different types for these parameters.
_AS_TEXT: Final = ("id", "failing_since", "running_id", "running_since", "running_due")


class HandlerOptions(TypedDict, total=False):
    """How a consumer calls a handler.

    Attributes:
        queue: the queue for its messages, which has its own consumer group.
        version: the schema version that the handler understands: older messages are
            upcast to it (see `Consumer.upcasts`), newer ones are handed back, and
            dead-lettered after `rollout`. None: any.
        time_limit: after this time the handler's work is rolled back, and the attempt
            fails.
        permanent: exceptions that dead-letter the message at once, or a function that
            recognizes them.
        retry: overrides the consumer's retry policy.
    """

    queue: str
    version: int | None
    time_limit: timedelta | None
    permanent: Permanent
    retry: RetryPolicy | None


class Consumer(Process):
    """Handles messages from a broker, applying the effects of each exactly once.

    Each message is handled in its own transaction, together with its receipt; a message
    that was already handled is acked and skipped. Handlers must not commit the session
    that they are given. Messages with the same key and priority are handled in the
    order in which the source delivers them, others concurrently; priorities take turns
    by weight. `retrier` retries dead letters.

    Args:
        source: where messages come from: a broker's URL, a `Source`, or a mapping with
            one source for each queue.
        sessions: the session factory of the handlers' database: an `async_sessionmaker`
            for async handlers, a `sessionmaker` for plain functions, which run in
            threads, or a tuple of both, for handlers of both kinds. Instead, a psycopg
            pool, for handlers that take a connection: an `AsyncConnectionPool` for
            async handlers, a `ConnectionPool` for plain functions. The consumer
            opens a pool that isn't open, and then also closes it.
        name: identifies the consumer's receipts, subscriptions and consumer group; all
            replicas of a consumer use the same name.
        queues: the queues to serve, with their weights. Default: all, with equal
            weights.
        order: `"none"` if messages of a key need not wait for each other.
        max_in_flight: the maximum number of running handlers, at most the size of the
            engine's pool. Default: 64, or the pool size minus one if that is smaller.
        max_in_flight_per_tenant: the maximum number of running handlers for messages of
            one tenant.
        max_waiting: the number of messages of each queue that wait in memory: for a
            handler (at most `max_in_flight`; tenants take turns), behind others of
            their key, or for a retry. At the limit, and at 64 MiB of payloads,
            fetching pauses; a tenant or a priority alone fills half of it.
        max_idle: how long a handler's transaction can be idle before the server ends
            it, so that a frozen process doesn't keep its messages.
        retry: the number of attempts and the backoff for handlers that raise.
        drain: how long a stop waits for running handlers.
        rollout: how long a rolling deploy takes. For this long, messages for which this
            replica has no handler are handed back, since another replica may have one;
            then they are dead-lettered.
        codec: decodes payloads; a message that it can't decode is dead-lettered
            unchanged. Without one, encoded messages are handed back, and wait.
        redact: removes confidential parts from reasons and stack traces.
        registry: schemas that payloads must match before a handler is called.
        observers: called with every event of `pillarbox.inbox.events`, besides the log.
    """

    def __init__(
        self,
        source: Source | str | Mapping[str, Source],
        sessions: Sessions,
        *,
        name: str,
        queues: Mapping[str, int] | None = None,
        order: Order = "key",
        max_in_flight: int | None = None,
        max_in_flight_per_tenant: int | None = None,
        max_waiting: int = 1024,
        max_idle: timedelta | None = DEFAULT_MAX_IDLE,
        retry: RetryPolicy | None = None,
        drain: timedelta = timedelta(seconds=20),
        rollout: timedelta = timedelta(minutes=15),
        codec: PayloadCodec | None = None,
        redact: Redact | None = None,
        registry: SchemaRegistry = REGISTRY,
        observers: Iterable[Observer] = (),
    ) -> None:
        super().__init__()
        check_text("consumer", name)
        self._is_fitted = max_in_flight is None
        self._limits = ConsumerLimits(
            max_in_flight=DEFAULT_IN_FLIGHT if max_in_flight is None else max_in_flight,
            max_in_flight_per_tenant=max_in_flight_per_tenant,
            max_waiting=max_waiting,
            max_idle=max_idle,
            drain=drain,
            rollout=rollout,
        )
        self.name = name
        self.drain = drain
        self._redact = redact
        self._registry = registry
        self._retry = RetryPolicy() if retry is None else retry
        check_type("retry", self._retry, RetryPolicy, "pass RetryPolicy(…)")
        self._observers = list(map(checked, observers))
        self._routes: Routes[Registered] = Routes()
        self._versions = Versions(registry, codec)
        self._payloads: dict[str, Validator] = {}
        if order not in ORDERS:
            raise ConfigError(
                f"order={shorten(order)}: write one of {', '.join(ORDERS)}"
            )
        self._in_order = order == "key"
        self._connect(source, sessions)
        if queues is not None:
            self.serve(queues)

    def _connect(
        self, source: Source | str | Mapping[str, Source], sessions: Sessions
    ) -> None:
        limits = self._limits
        self._sessions = sessions
        self._executor = make_executor(
            sessions, self.name, limits.max_in_flight, limits.max_idle
        )
        self._writer = DeadLetterWriter(self.name, self._executor, self._redact)
        self.retrier = partial(
            HandlerRetrier,
            sessions,
            self._routes,
            self._writer,
            max_idle=limits.max_idle,
        )
        self._queues_served = ServedQueues(self.name, self._routes, source)
        self._blocked = BlockedKeys()
        self._stop: asyncio.Event | None = None

    def connected_to(
        self, source: Source | Mapping[str, Source], sessions: Sessions
    ) -> "Consumer":
        """Return a consumer with the same handlers, for tests.

        It has this consumer's settings and number of attempts, no observers, retries
        within milliseconds, and waits for no other replica's handlers.

        Raises:
            ConfigError: the sessions are for another kind of handlers.
        """
        other = copy(self)
        Process.__init__(other)
        other._limits = replace(self._limits, rollout=timedelta(0))
        other._retry = replace(self._retry, first_delay=_QUICK, max_delay=_QUICK)
        other._observers = []
        other._connect(source, sessions)
        if not other._executor.is_like(self._executor):
            raise ConfigError(
                f"sessions {shorten(sessions)}: consumer {self.name!r} needs another"
                " kind of sessions for its handlers"
            )
        return other

    def messages(self) -> list[MessageSchema]:
        """Describe the messages of its topics and of its registry."""
        found = [
            MessageSchema(
                topic, version, schema.json_schema(), self.queue_of(topic) is not None
            )
            for topic, version, schema in self._registry.schemas()
        ]
        declared = {message.topic for message in found}
        for topic in self.topics:
            if topic not in declared:
                payload = self._payloads.get(topic)
                schema = None if payload is None else payload.json_schema()
                version = self._versions.understood(topic) or 1
                found.append(MessageSchema(topic, version, schema, is_received=True))
        return found

    def require_codec(self, message: Message) -> None:
        """Raise `ConfigError` if a message is encoded and there is no codec."""
        if (problem := self._versions.why_encoded(message)) is not None:
            raise ConfigError(f"consumer {self.name!r}: {message.id}: {problem}")

    def queue_of(self, topic: str) -> str | None:
        """Return the queue of a topic; None if no handler takes it."""
        return self._routes.queue_of(topic)

    def database_url(self) -> str:
        """Return the URL of the handlers' database, in the form that libpq accepts.

        Raises:
            ConfigError: the URL can't be derived from the sessions' engine.
        """
        return database_url(self._sessions)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics for which a handler is registered."""
        return self._routes.topics

    def handles(
        self, topic: str, **options: Unpack[HandlerOptions]
    ) -> Callable[[H], H]:
        """Register the handler `(session, message)` of a topic or prefix (`orders.*`).

        Args:
            options: see `HandlerOptions`.

        Raises:
            ConfigError: the topic already has a handler or is invalid, the queue or a
                limit is invalid, or the handler has the wrong signature, doesn't
                match the kind of session, or is `@idempotent`.
        """
        return self._registers(topic, Takes.ONE, options)

    def handles_batch(
        self,
        topic: str,
        *,
        max_size: int,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[H], H]:
        """Register the batch handler `(session, messages)` of a topic or prefix.

        Args:
            max_size: the maximum number of messages in one call, at least 2.
            options: as for `handles`.

        Raises:
            ConfigError: as for `handles`.
        """
        return self._registers(topic, Takes.MANY, options, size=max_size)

    def job(
        self,
        topic: str,
        *,
        lease: timedelta,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[H], H]:
        """Register the long handler `(job, message)` of a topic or prefix: see `Job`.

        Args:
            lease: how long a process that hangs keeps a job, at least 1 s.
            options: as for `handles`.

        Raises:
            ConfigError: as for `handles`.
        """
        return self._registers(topic, Takes.JOB, options, lease=lease)

    def _registers(
        self,
        topic: str,
        takes: Takes,
        options: HandlerOptions,
        **of_kind: Any,
    ) -> Callable[[H], H]:
        given: dict[str, Any] = {**options}
        queue = given.pop("queue", DEFAULT_QUEUE)
        version = given.pop("version", None)
        check_topic(topic)
        check_queue(queue)
        self._versions.understands(topic, version)
        upcast = partial(self._versions.upcast, topic)
        terms = Terms(upcast, **given)

        def register(handler: H) -> H:
            arguments = arguments_of(handler, takes)
            self._executor.check(handler, arguments)
            if arguments.payload is not None:
                self._versions.decodes(topic, arguments.model)
                self._payloads[topic] = arguments.payload
            own = replace(terms, arguments=arguments)
            made = Registered(handler, takes, own, **of_kind)
            self._routes.add(topic, made, queue)
            return handler

        return register

    def upcasts(self, topic: str, *, to: int) -> Callable[[U], U]:
        """Register an upcaster from version `to - 1` to version `to`.

        An upcaster accepts a message and returns the payload of the next version. Pass
        the topic exactly as it is registered for its handler.

        Raises:
            ConfigError: this upcaster is already registered, or `to` is not a version.
        """

        def register(upcaster: U) -> U:
            self._versions.add(topic, to, upcaster)
            return upcaster

        return register

    def serve(self, queues: Mapping[str, int]) -> None:
        """Serve only these queues, with these weights, starting with the next run.

        Raises:
            ConfigError: no queue is given, or a weight isn't a positive number.
        """
        self._queues_served.choose(queues)

    def observe(self, observer: Observer) -> None:
        """Add an observer, starting with the next run.

        Raises:
            ConfigError: it can't be called, or is a coroutine function.
        """
        self._observers.append(checked(observer))

    def notify(self, event: Event) -> None:
        """Notify all observers of an event."""
        Observers(logged(self._observers)).notify(event)

    @override
    def stop(self) -> None:
        """Make `run` drain and return. Call it in the event loop's thread."""
        if self._stop is not None:
            self._stop.set()

    @override
    async def run(self, *, idle: timedelta | None = None) -> None:
        """Handle messages until `stop` is called or the task is cancelled.

        Then fetching stops, running handlers have `drain` to finish, and the remaining
        messages are returned to the broker. If the broker or the database becomes
        unavailable during the run, the consumer waits for it. A second cancellation
        ends the drain.

        Args:
            idle: also stop when nothing has arrived for this long and no handler is
                running. Messages that wait for a retry are returned with their delay.

        Raises:
            ConfigError: no handler is registered; the source, the queues or the tables
                can't be used; the role of the sessions lacks the privilege to write
                receipts; or their pool is smaller than `max_in_flight`.
            BrokerUnavailableError, DatabaseUnavailableError: the broker or the database
                is unavailable at the start; with `idle`, also the broker later.
        """
        if self._stop is not None:
            raise ConfigError(
                f"consumer {self.name!r}: already running; create another Consumer"
            )
        if not self.topics:
            raise ConfigError(
                f"consumer {self.name!r}: has no handlers; register one with"
                " @consumer.handles(topic)"
            )
        weights = self._queues_served.weights()
        self._versions.check()
        self._stop = asyncio.Event()
        try:
            work = self._run(self._stop, weights, idle)
            await self._drained(work, f"consumer {self.name}", self.notify)
        finally:
            self._stop = None

    async def _run(
        self, stop: asyncio.Event, weights: dict[str, int], idle: timedelta | None
    ) -> None:
        outages = Outages()
        counters = TopicCounters()
        count = partial(count_topics, counters)
        mine: list[Observer] = [outages, self._blocked, count]
        observers = Observers([*mine, *logged(self._observers)])
        self._executor.calls.notify = observers.notify
        sources = {queue: self._queues_served.source_of(queue) for queue in weights}
        systems = {q: tracing.system_of(source) for q, source in sources.items()}
        if tracing.tracer is not None:
            # All tasks inherit it.
            tracing.tracer.receive(next(iter(systems.values())))
        limits = self._fit_to_pool()
        days = Days(partial(self._executor.transact, make_days), observers.notify)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._executor.close)
            is_long = any(it.takes is Takes.JOB for it in self._routes.handlers)
            is_fixed = has_fixed_password(self._sessions)
            await check_database(
                self._executor, is_long=is_long, password_is_fixed=is_fixed
            )
            await days.make()
            member = await member_id(self._executor)
            pauses = Pauses()
            for queue, source in sources.items():
                source.abilities.identify(member)
                if not self._in_order:
                    source.abilities.share()
                if source.abilities.pauses(pauses.has):
                    pauses.kept.add(queue)
            stack.push_async_callback(end, [asyncio.create_task(days.keep())])
            outage = DatabaseOutage(self.name, observers, self._executor)
            scheduler, dispatchers = self._dispatchers(
                weights, observers, limits, systems, outage, pauses
            )
            fetchers = [
                Fetcher(
                    self.name,
                    queue,
                    await stack.enter_async_context(source),
                    dispatchers[queue],
                    observers,
                    is_paused=partial(pauses.has_all, self._routes.queues[queue]),
                    member=member,
                    idle=idle,
                )
                for queue, source in sources.items()
            ]
            measure = partial(
                self._measure,
                scheduler,
                dispatchers.values(),
                outages,
                fetchers,
                pauses,
            )
            await self._executor.open()
            broker = self._queues_served.broker(systems.values())
            limit = pool_limit(self._sessions)
            beat = partial(self._beat, outage, pauses)
            write = None if limit is not None and limit.is_shared else beat
            presence = Presence(broker, measure, write, observers.notify, counters)
            await stack.enter_async_context(presence.recorded())
            topics = [t for q in weights for t in self._routes.queues[q]]
            observers.notify(ConsumerStarted(consumer=self.name, topics=tuple(topics)))
            self._started.set()
            try:
                failure = await fetch_all(fetchers, stop)
            finally:
                returned = await stop_all(fetchers, self._limits.drain)
        observers.notify(ConsumerStopped(consumer=self.name, returned=returned))
        if running := self._executor.running_threads:
            observers.notify(HandlersAbandoned(consumer=self.name, handlers=running))
        if failure is not None:
            raise failure

    def _measure(
        self,
        scheduler: FairScheduler,
        dispatchers: Collection[Dispatcher],
        outages: Outages,
        fetchers: Collection[Fetcher],
        pauses: Pauses,
    ) -> ProcessMeasured:
        waiting = self._blocked.oldest_first()
        blocked = [it for it in waiting if it.key is not None]
        failing = [(it.since, it.reason) for it in waiting if it.reason is not None]
        failing += [(it.since, it.reason) for it in outages.longest_first()]
        failing += [it for fetcher in fetchers for it in fetcher.strangers]
        since, reason = min(failing, key=itemgetter(0), default=(None, None))
        return ProcessMeasured(
            kind="consumer",
            name=self.name,
            in_flight=scheduler.in_flight,
            held=sum(dispatcher.held for dispatcher in dispatchers),
            blocked_keys=len(blocked),
            blocked_for=datetime.now(UTC) - blocked[0].since if blocked else None,
            failing_since=since,
            reason=reason,
            standing_by=tuple(t for fetcher in fetchers for t in fetcher.standing_by),
            paused=tuple(sorted(pauses.topics)),
            **self._executor.calls.measure(),
        )

    async def _beat(
        self, outage: DatabaseOutage, pauses: Pauses, values: dict[str, Any]
    ) -> None:
        for name in _AS_TEXT:
            values[name] = None if values[name] is None else str(values[name])
        values["standing_by"] = ", ".join(values["standing_by"]) or None

        def beat(session: Session) -> list[str]:
            statement = text(load("inbox", "beat"))
            found = connection_of(session).execute(statement, values).scalar_one()
            return list(found)

        self._executor.questions.abandon()
        try:
            pauses.topics = await answered(self._executor.transact(beat), timedelta())
        except Exception as error:
            # Handlers don't need the table.
            if (sqlstate_of(error) or "")[:2] not in _OF_THE_TABLE:
                outage.begin(error, _NEXT_BEAT)
            raise
        outage.end()

    def _fit_to_pool(self) -> ConsumerLimits:
        limit = pool_limit(self._sessions)
        if limit is None:
            return self._limits
        limits = self._limits
        needed = most_connections(limits.max_in_flight, self._routes)
        if self._is_fitted and needed > limit.connections:
            limits = replace(limits, max_in_flight=limit.max_in_flight)
            needed = most_connections(limits.max_in_flight, self._routes)
        limit.check(limits.max_in_flight, needed)
        return limits

    def _dispatchers(
        self,
        weights: Mapping[str, int],
        observers: Observers,
        limits: ConsumerLimits,
        systems: Mapping[str, str],
        outage: DatabaseOutage,
        pauses: Pauses,
    ) -> tuple[FairScheduler, dict[str, Dispatcher]]:
        settlement = DeliverySettlement(
            self._writer,
            self._routes,
            self._versions,
            Rollout(limits.rollout),
            pauses,
            self._executor,
            self._retry,
            observers,
            outage,
        )
        dispatchers: dict[str, Dispatcher] = {}
        is_mixed = len(set(systems.values())) > 1

        def settle(queue: str, delivery: Delivery) -> Awaitable[bool]:
            if is_mixed and tracing.tracer is not None:
                tracing.tracer.receive(systems[queue])
            return settlement.settle(delivery, dispatchers[queue])

        def wake() -> None:
            for dispatcher in dispatchers.values():
                dispatcher.wake()

        scheduler = FairScheduler(
            limits.max_in_flight,
            weights,
            max_per_tenant=limits.max_in_flight_per_tenant,
            on_capped=wake,
        )
        for queue in weights:
            dispatchers[queue] = Dispatcher(
                partial(settle, queue),
                scheduler=scheduler,
                queue=queue,
                max_lines=limits.max_lines,
                max_waiting=limits.max_waiting,
                in_order=self._in_order,
            )
        return scheduler, dispatchers
