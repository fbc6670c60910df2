"""The relay: lease lanes, wake, claim, publish, settle. Read this file first.

The parts run concurrently in one event loop. `Lease` holds lanes in a session of its
own, `wake_lanes` decides when to look for messages, and `sweep_lanes` does the periodic
work. A few `Worker`s run the main loop: pick lanes, claim a batch, publish it, settle
it. No transaction is open while a worker waits for the broker.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Final

import psycopg
from typing_extensions import override

from outbox import tracing
from outbox.errors import ConfigError, DatabaseUnavailableError, message_of
from outbox.events import Observer, Observers, ProcessMeasured
from outbox.gather import Process, end, gather
from outbox.lane import PRIORITIES, lanes_of
from outbox.log.claim import claim_batch
from outbox.log.lanes.board import LaneBoard
from outbox.log.reader import CLAIM_SETTINGS
from outbox.log.settle import WRITES
from outbox.log.sweep import sweep_lanes
from outbox.log.wakeup import wake_lanes
from outbox.logs.printable import for_sql
from outbox.observability.health import Outages
from outbox.observability.logging import logged
from outbox.observability.presence import Presence
from outbox.postgres.advisory_lock import (
    END_FOREIGN,
    MAIN,
    Lock,
    LockHolder,
    reader_class,
)
from outbox.postgres.connection import (
    NOT_PREPARED,
    Connection,
    Link,
    Server,
    connect,
)
from outbox.postgres.days import MAKE_DAYS, Days
from outbox.postgres.doorbell import Doorbell
from outbox.postgres.lease import RETRY, Lease
from outbox.postgres.pooler_check import refuse_pooler_async
from outbox.postgres.remedy import remedy_of
from outbox.postgres.sql_files import load
from outbox.url import scheme_of
from relay.adaptive_batch import BatchLimit
from relay.breaker import Breaker, check_broker
from relay.config import RelayConfig
from relay.events import (
    DatabaseLost,
    DatabaseRecovered,
    LanesFree,
    LanesWithheld,
    LeaseLost,
    LeaseTaken,
    RelayStarted,
    RelayStopped,
)
from relay.oversized import OversizedRows
from relay.publisher import Handling, Publisher
from relay.reader import RelayReader
from relay.renewed_publisher import publisher_of
from relay.worker import Worker

WORKER_SETTINGS: Final = {
    **CLAIM_SETTINGS,
    # Claims have their days in their text, so that one plan serves all of a day: making
    # it takes longer than the claim. Settlements read no partition. See `NOT_PREPARED`
    # for the others.
    "plan_cache_mode": "auto",
    # Otherwise the planner compares each statement with the CHECK constraints of each
    # partition that it reads, none of which excludes a row that the relay looks for.
    # Partitions are pruned regardless.
    "constraint_exclusion": "off",
    # Not even the policies of consumers that are kept apart apply to the outbox.
    "row_security": "off",
    # A relay that hangs in a settlement would make the one that has taken over its
    # lanes wait, on the rows that both insert.
    "idle_in_transaction_session_timeout": "10s",
}

_GRANT: Final = (
    "GRANT pillarbox_relay TO its role, or pillarbox_reader if the reader is that"
    " role's; if it has that, pillarbox migrate restores what was revoked"
)
_GRANT_READER: Final = (
    "run GRANT pillarbox_reader TO {} in the outbox's database; if it has that,"
    " pillarbox migrate restores what was revoked"
)
_MOVE_LIMIT: Final = 300.0
"""Seconds that moving one oversized row can take."""
_DAYS_DELAY: Final = 1.0
"""Seconds before missing days are made, which takes longer than the first claims."""


class Relay(Process):
    """Publishes committed messages until stopped. For one event loop; runs once.

    Args:
        url: the database's URL, for a direct connection, not a transaction pooler.
        publisher: the URL of the broker, or what publishes the messages; the relay
            enters and leaves it.
        config: the settings; see `RelayConfig`.
        observers: called with every event, besides the log.
        reader: whose messages it publishes; see `pillarbox readers`.
        topics: topics that the reader gets from now on, if it doesn't already; it is
            added if it doesn't exist.
        broker: the URL or another name of where the publisher publishes, for the
            comparison with other relays; by default its own `identity`.
        switch_broker: whether other relays have to follow this one to its broker.
        from_now: whether `main`, if this is its first relay, gets only what commits
            from now on; by default it gets the messages that are there, too.
    """

    def __init__(
        self,
        url: str,
        publisher: Publisher | Handling | str,
        config: RelayConfig | None = None,
        *,
        observers: Iterable[Observer] = (),
        reader: str = MAIN,
        topics: Sequence[str] = (),
        broker: str | None = None,
        switch_broker: bool = False,
        from_now: bool = False,
    ) -> None:
        super().__init__()
        if from_now and reader != MAIN:
            raise ConfigError(
                f"reader={reader}: is not main, and begins where pillarbox readers add"
                " lets it begin; leave out --from-now"
            )
        if isinstance(publisher, str):
            broker, publisher = broker or publisher, publisher_of(publisher)
        is_url = broker is not None and "://" in broker
        self._name = scheme_of(broker or "") if is_url else type(publisher).__name__
        self._url = url
        self._publisher = publisher
        self._config = config or RelayConfig()
        self._outages = Outages()
        # A consumer logs what its source meets.
        told = observers if isinstance(publisher, Handling) else logged(observers)
        self._notify = Observers([self._outages, *told]).notify
        self._reader = RelayReader(
            reader, broker, publisher, self._notify, self._on_topics
        )
        self._topics = topics
        self._switch_broker = switch_broker
        self._from_now = from_now
        # Short, because PostgreSQL truncates it to 63 bytes and the part comes last.
        host = socket.gethostname()[:30]
        self._application = f"pillarbox relay {host} {os.getpid()}"
        self._server = Server()
        self._lease = Lease(
            url,
            lock_class=reader_class(reader),
            groups=[lanes_of(priority) for priority in PRIORITIES],
            limit=self._config.lease,
            application_name=f"{self._application} lease",
            writes=WRITES,
            may_hold=self._reader.may_publish,
            on_obstruct=self._on_obstruct,
            on_take=self._on_take,
            on_lose=self._on_lose,
            on_fail=self._on_fail,
            server=self._server,
        )
        self._sweep_link = self._link("sweep")
        self._links = [
            self._link("worker")
            for _ in range(self._config.concurrency)
            if not isinstance(publisher, Handling)
        ]
        self._lanes = LaneBoard(self._lease, self._config.concurrency, reader)
        self._breaker = Breaker(self._notify)
        self._batch_limit = BatchLimit(self._config.publish_timeout)
        self._oversized = OversizedRows(
            Link(
                url,
                application_name=f"{self._application} oversized",
                server=self._server,
                answer_limit=_MOVE_LIMIT,
            ),
            reader=reader,
            notify=self._notify,
        )
        self._days = Days(self._make_days, self._notify)
        self._stop = asyncio.Event()
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def members(self) -> Sequence[str]:
        """The names of the sessions of this reader's processes."""
        return self._lease.members

    def identify(self, id: str) -> None:
        """Name its sessions after an id, before it runs: see `members`."""
        # PostgreSQL truncates the name to 63 bytes.
        self._lease.name(
            " ".join(("pillarbox", id, "inbox", self._reader.name, "lease"))
        )

    def step_aside(self, seconds: float) -> None:
        """Let other relays of the reader, if there are any, have all lanes."""
        self._lease.step_aside(seconds)

    @override
    def stop(self) -> None:
        """Ask the relay to finish the batches in flight and stop. Returns at once."""
        self._stop.set()

    @override
    async def run(self) -> None:
        """Publish until `stop` or cancellation, then drain and release the lanes.

        Broken connections are replaced. Messages that the broker did not confirm within
        `config.drain` stay unsettled, and the next relay publishes them again.

        Raises:
            ConfigError: the schema or a privilege is missing, or the URL leads through
                a transaction pooler. Raised only at the start, like the next two.
            DatabaseUnavailableError: the database is unreachable or read-only.
            BrokerUnavailableError: the broker is unreachable.
        """
        name = f"relay {self._reader.name}"
        await self._drained(self._run(), name, self._notify)

    async def _run(self) -> None:
        if tracing.tracer is not None:
            tracing.tracer.receive(tracing.system_of(self._publisher))
        async with AsyncExitStack() as stack:
            async with self._checked() as connection:
                await stack.enter_async_context(self._publisher)
                await self._reader.refuse_own_outbox(connection)
                if await self._reader.may_be_added(connection):
                    # No sooner: it records the broker.
                    await self._reader.add_main(connection, from_now=self._from_now)
                record = await self._reader.read(connection)
                self._lanes.reader.takeover.since = record.since
                self._lanes.gets_all = record.gets_all
                await self._reader.may_publish(connection, switch=self._switch_broker)
                links = (self._sweep_link, *self._links)
                for link in links:
                    stack.push_async_callback(link.close)
                # One that is opened later makes all claims start over. If that came
                # between a takeover and its claim, it would read settled messages.
                await gather(link.connection() for link in links)
                self._lanes.opened(max(link.opened_at for link in links), ())
            self._notify(RelayStarted(publisher=self._name))
            self._started.set()
            async with asyncio.TaskGroup() as group:
                upkeep = [
                    group.create_task(self._lease.run()),
                    group.create_task(self._wake()),
                    group.create_task(
                        sweep_lanes(
                            self._lanes, self._sweep_link, self._config, self._notify
                        )
                    ),
                    group.create_task(self._keep_days()),
                    group.create_task(
                        check_broker(
                            self._publisher,
                            self._lanes,
                            self._breaker,
                            self._config.broker_check_interval.total_seconds(),
                        )
                    ),
                    group.create_task(self._oversized.run()),
                ]
                workers = [group.create_task(it.run()) for it in self._workers()]
                # A consumer records itself, in the database of its handlers.
                is_relay = not isinstance(self._publisher, Handling)
                presence = self._presence().recorded() if is_relay else nullcontext()
                async with presence:
                    await self._stop.wait()
                    await self._drain(workers)
                await end(upkeep)
            self._notify(RelayStopped())

    @asynccontextmanager
    async def _checked(self) -> AsyncIterator[Connection]:
        await refuse_pooler_async(self._url)
        try:
            async with await connect(
                self._url,
                application_name=self._application,
                settings=WORKER_SETTINGS,
                writes=WRITES,
            ) as connection:
                if not await self._reader.may_be_added(connection):
                    if self._topics:
                        await self._reader.subscribe(connection, self._topics)
                    await self._reader.read(connection)
                takeover = self._lanes.reader.takeover
                now = (await takeover.read_clock(connection)).now
                await takeover.read_days(connection, [], now)
                await claim_batch(connection, self._lanes, [], self._config)
                yield connection
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.InvalidSchemaName,
        ) as error:
            raise ConfigError(
                "the database has no schema outbox: run pillarbox migrate"
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            grant = _GRANT
            if isinstance(self._publisher, Handling):
                grant = _GRANT_READER.format(for_sql(await self._role()))
            raise ConfigError(
                f"{message_of(error)}: {remedy_of(error, grant)}"
            ) from error
        except psycopg.errors.ReadOnlySqlTransaction as error:
            raise DatabaseUnavailableError(
                f"the relay can't record what it publishes: {message_of(error)}"
            ) from error

    async def _role(self) -> str:
        name = self._application
        async with await connect(self._url, application_name=name) as connection:
            cursor = await connection.execute("SELECT current_user")
            ((role,),) = await cursor.fetchall()
            return str(role)

    async def _wake(self) -> None:
        doorbell = Doorbell(
            self._url,
            lock=Lock.OUTBOX_DOORBELL,
            channel="outbox_message",
            application_name=f"{self._application} doorbell",
            server=self._server,
        )
        interval = self._config.poll_interval.total_seconds()
        await wake_lanes(self._lanes, doorbell, interval)

    async def _keep_days(self) -> None:
        await asyncio.sleep(_DAYS_DELAY)
        await self._days.make()
        await self._days.keep()

    async def _make_days(self) -> list[Any]:
        name = f"{self._application} days"
        async with await connect(self._url, application_name=name) as connection:
            return await (await connection.execute(MAKE_DAYS)).fetchall()

    def _presence(self) -> Presence:
        async def write(values: dict[str, Any]) -> None:
            link = self._sweep_link
            async with link.lock:
                await (await link.connection()).execute(load("relay", "beat"), values)

        return Presence(self._reader.own, self._measure, write, self._notify)

    def _measure(self) -> ProcessMeasured:
        outages = self._outages.longest_first()
        return ProcessMeasured(
            kind="relay",
            name=self._reader.name,
            in_flight=len(self._in_flight),
            held=len(self._lanes.numbers()),
            blocked_keys=self._lanes.count_blocked_keys(),
            failing_since=outages[0].since if outages else None,
            reason=outages[0].reason if outages else None,
        )

    def _link(self, part: str) -> Link:
        return Link(
            self._url,
            application_name=f"{self._application} {part}",
            settings=WORKER_SETTINGS,
            writes=WRITES,
            server=self._server,
            prepare_threshold=NOT_PREPARED,
        )

    def _workers(self) -> Sequence[Any]:
        from inbox.sources.postgres.worker import HandlerWorker

        links, publisher = self._links, self._publisher
        if isinstance(publisher, Handling):
            worker = HandlerWorker(
                self._sweep_link,
                self._lanes,
                publisher,
                self._config,
                in_flight=self._in_flight,
                stop=self._stop,
                notify=self._notify,
            )
            return [worker]
        return [
            Worker(
                links[number % len(links)],
                self._sweep_link,
                self._lanes,
                publisher,
                self._breaker,
                self._batch_limit,
                self._oversized,
                self._config,
                in_flight=self._in_flight,
                stop=self._stop,
                notify=self._notify,
            )
            for number in range(self._config.concurrency)
        ]

    async def _drain(self, workers: Collection[asyncio.Task[None]]) -> None:
        """Give batches in flight time to finish, and start no new ones."""
        in_flight = [task for task in workers if task in self._in_flight]
        for task in set(workers).difference(in_flight):
            task.cancel()
        if in_flight:
            await asyncio.wait(in_flight, timeout=self._config.drain.total_seconds())
        for task in in_flight:
            task.cancel()

    def _on_take(self, lanes: Collection[int]) -> None:
        self._lanes.take(lanes)
        self._notify(LeaseTaken(lanes=tuple(sorted(lanes))))

    def _on_topics(self) -> None:
        self._lanes.take_over()

    def _on_obstruct(self, foreign: Sequence[LockHolder]) -> None:
        if foreign:
            holders = tuple(map(str, foreign))
            self._notify(LanesWithheld(holders=holders, remedy=END_FOREIGN))
        else:
            self._notify(LanesFree())

    def _on_fail(self, error: Exception | None) -> None:
        self._notify(
            DatabaseRecovered() if error is None else DatabaseLost.of(error, RETRY)
        )

    def _on_lose(self, lanes: Collection[int]) -> None:
        self._lanes.lose(lanes)
        self._notify(LeaseLost(lanes=tuple(sorted(lanes))))
