"""The relay: lease lanes, wake, claim, publish, settle. Read this file first.

`outbox/log/process.py` holds the lanes. A few `Worker`s run the main loop: pick lanes,
claim a batch, publish it, settle it. No transaction is open while a worker waits for
the broker.
"""

from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, Final

from typing_extensions import override

from pillarbox.outbox import tracing
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.events import Observer, Observers, ProcessMeasured
from pillarbox.outbox.gather import Process
from pillarbox.outbox.log.process import Purpose, ReadingProcess
from pillarbox.outbox.observability.counters import TopicCounters
from pillarbox.outbox.observability.health import Outages
from pillarbox.outbox.observability.logging import logged
from pillarbox.outbox.observability.presence import Presence
from pillarbox.outbox.postgres.advisory_lock import MAIN
from pillarbox.outbox.postgres.connection import Connection, Link
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.url import scheme_of
from pillarbox.relay.activity import count_topics
from pillarbox.relay.adaptive_batch import BatchLimit
from pillarbox.relay.breaker import Breaker, check_broker
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import RelayStarted, RelayStopped
from pillarbox.relay.oversized import OversizedRows
from pillarbox.relay.publisher import Publisher
from pillarbox.relay.reader import RelayReader
from pillarbox.relay.renewed_publisher import publisher_of
from pillarbox.relay.worker import Worker

_GRANT: Final = (
    "GRANT pillarbox_relay TO its role, or pillarbox_reader if the reader is that"
    " role's; if it has that already, pillarbox migrate restores its privileges"
)
_MOVE_LIMIT: Final = 300.0
"""Seconds that moving one oversized row can take."""


class Relay(Process):
    """Publishes committed messages until stopped. For one event loop; runs once.

    Args:
        url: the database's URL, for a direct connection, not a transaction pooler.
        publisher: the broker's URL, or a `Publisher`, which the relay enters and exits.
        config: the settings; see `RelayConfig`.
        observers: called with every event, besides the log.
        reader: whose messages it publishes; see `pillarbox readers`.
        topics: topics that the reader gets from now on, if it doesn't already; it is
            added if it doesn't exist.
        broker: the URL, or another name, of the publisher's broker, to be compared with
            that of other relays; by default, the publisher's `identity`.
        switch_broker: publish to this broker from now on; relays with another one stop.
        from_now: whether `main`, if this is its first relay, gets only messages that
            commit from now on; by default, it gets earlier ones, too.
    """

    def __init__(
        self,
        url: str,
        publisher: Publisher | str,
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
                f"reader={reader}: --from-now is for the reader main; pillarbox"
                " readers add decides where others start"
            )
        if isinstance(publisher, str):
            broker, publisher = broker or publisher, publisher_of(publisher)
        is_url = broker is not None and "://" in broker
        self._name = scheme_of(broker or "") if is_url else type(publisher).__name__
        self._publisher = publisher
        self._config = config or RelayConfig()
        self._outages = Outages()
        self._counters = TopicCounters()
        mine: list[Observer] = [self._outages, partial(count_topics, self._counters)]
        self._notify = Observers([*mine, *logged(observers)]).notify
        self._reader = RelayReader(
            reader,
            broker,
            publisher,
            self._notify,
            topics=topics,
            switch=switch_broker,
        )
        self._from_now = from_now
        self._process = ReadingProcess(
            url,
            self._reader,
            self._config,
            self._notify,
            kind="relay",
            links=self._config.concurrency,
        )
        self._breaker = Breaker(self._notify)
        self._batch_limit = BatchLimit(self._config.publish_timeout)
        self._oversized = OversizedRows(
            Link(
                url,
                application_name=f"{self._process.application} oversized",
                server=self._process.server,
                answer_limit=_MOVE_LIMIT,
            ),
            reader=reader,
            notify=self._notify,
        )

    @override
    def stop(self) -> None:
        """Ask the relay to finish the batches in flight and stop. Returns at once."""
        self._process.stopping.set()

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
        await self._process.run(
            Purpose(
                grant=_GRANT,
                enter=self._enter,
                started=self._report_start,
                workers=self._workers,
                tasks=self._tasks,
                recorded=self._recorded,
            )
        )
        self._notify(RelayStopped())

    async def _enter(self, stack: AsyncExitStack, connection: Connection) -> None:
        """Enter the publisher; add the reader, if this is the first relay."""
        await stack.enter_async_context(self._publisher)
        await self._reader.refuse_own_outbox(connection)
        if await self._reader.may_be_added(connection):
            # No sooner: it records the broker.
            await self._reader.add_main(connection, from_now=self._from_now)

    def _report_start(self) -> None:
        self._notify(RelayStarted(publisher=self._name))
        self._started.set()

    def _tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Return the checks of the broker, and the moves of large rows."""
        interval = self._config.broker_check_interval.total_seconds()
        yield check_broker(
            self._publisher, self._process.lanes, self._breaker, interval
        )
        yield self._oversized.run()

    def _workers(self) -> Iterable[Coroutine[Any, Any, None]]:
        process = self._process
        for link in process.links:
            yield Worker(
                link,
                process.shared_link,
                process.lanes,
                self._publisher,
                self._breaker,
                self._batch_limit,
                self._oversized,
                self._config,
                in_flight=process.in_flight,
                stop=process.stopping,
                notify=self._notify,
            ).run()

    def _recorded(self) -> AbstractAsyncContextManager[object]:
        async def write(values: dict[str, Any]) -> None:
            link = self._process.shared_link
            async with link.lock:
                await (await link.connection()).execute(load("relay", "beat"), values)

        presence = Presence(
            self._reader.own, self._measure, write, self._notify, self._counters
        )
        return presence.recorded()

    def _measure(self) -> ProcessMeasured:
        outages, lanes = self._outages.longest_first(), self._process.lanes
        return ProcessMeasured(
            kind="relay",
            name=self._reader.name,
            in_flight=len(self._process.in_flight),
            held=len(lanes.numbers()),
            blocked_keys=lanes.count_blocked_keys(),
            failing_since=outages[0].since if outages else None,
            reason=outages[0].reason if outages else None,
        )
