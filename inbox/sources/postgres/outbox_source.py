"""A source that reads the outbox itself, in the database of the writers.

Between the commit and the handler there is no relay process and no copy of the message:
the consumer is a reader of the outbox, which hands the messages to its own process. So
it claims, orders, defers and takes lanes over as relays do.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import (
    AsyncExitStack,
    suppress,
)
from datetime import timedelta
from typing import Any, Final, Self

from pillarbox.inbox.consuming.backlog import LEFT_OUT
from pillarbox.inbox.consuming.rollout import warn_unhandled
from pillarbox.inbox.poison.history import (
    FIRST_DELIVERY,
    REDELIVERED,
    History,
    TakenOver,
    Takeover,
)
from pillarbox.inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from pillarbox.inbox.sources.postgres.handover import Handover
from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.inbox.sources.postgres.worker import HandlerWorker
from pillarbox.outbox.brokers.options import DIRECT
from pillarbox.outbox.brokers.postgres import PostgresOptions
from pillarbox.outbox.errors import (
    BrokerRefusedError,
    BrokerUnavailableError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
)
from pillarbox.outbox.events import Event
from pillarbox.outbox.gather import end, start
from pillarbox.outbox.log.config import ReadingConfig
from pillarbox.outbox.log.events import (
    BrokerDiffers,
    BrokerMatches,
    DatabaseLost,
    DatabaseRecovered,
    LanesFree,
    LanesWithheld,
    ReaderDropped,
)
from pillarbox.outbox.log.lanes.batch import PUBLISHED, Disposition
from pillarbox.outbox.log.process import Purpose, ReadingProcess
from pillarbox.outbox.log.registration import Registration
from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.days import PartitionsNotMade
from pillarbox.outbox.url import without_password

_MAX_SUSPECTS: Final = 256
"""For each lane that this replica takes over."""
_MAX_PAYLOAD: Final = 2**30
"""As large as a value can be: size alone never dead-letters a message."""
_GRANT: Final = (
    "run GRANT pillarbox_reader TO {} in the outbox's database; if it has that"
    " already, pillarbox migrate restores its privileges"
)


class PostgresSource:
    """A source of one consumer's messages in the outbox; its replicas share them.

    Args:
        url: the URL of the outbox's database, for a direct connection, not a
            transaction pooler.
        consumer: the consumer's name, and that of its reader: see `pillarbox readers`.
        topics: the topics that it handles, which are added to the reader's.
        poll_interval: the maximum wait unless woken.
        leave_timeout: how long leaving waits for the outcomes to be written.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
        leave_timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        url, options = PostgresOptions.parse(url)
        self._warnings: list[str] = []
        self._holders: Sequence[str] = ()
        self._is_paused: Callable[[str], bool] = lambda _: False
        self._url = url
        self._topics = topics
        self._poll = poll_interval.total_seconds()
        self._handover = Handover(options.prefetch)
        self._started = asyncio.Event()
        self._failure: str | None = None
        self._refusal: str | None = None
        self._taken_over: dict[int, Takeover] = {}
        self._running: asyncio.Task[None] | None = None
        self._registration = Registration(
            consumer, DIRECT, self._on_event, topics=topics
        )
        self._config = ReadingConfig(
            concurrency=1,
            batch_size=options.prefetch,
            max_payload_bytes=_MAX_PAYLOAD,
            lease=options.lease,
            poll_interval=poll_interval,
            drain=leave_timeout,
        )
        self._process = ReadingProcess(
            url, self._registration, self._config, self._on_event, kind="consumer"
        )
        self.abilities = Abilities(
            leave_out=self._handover.leave_out,
            foreign_holders=lambda: self._holders,
            warnings=lambda: self._warnings,
            identify=self._process.identify,
            members=lambda: self._process.members,
            pauses=self._know_pauses,
        )

    @classmethod
    def from_url(cls, url: str, *, consumer: str, topics: Sequence[str]) -> Self:
        """Create a source from a URL.

        Raises:
            ConfigError: the URL can't be used.
        """
        return cls(url, consumer=consumer, topics=topics)

    async def __aenter__(self) -> Self:
        """Add the topics to the consumer's reader, and lease lanes.

        Raises:
            BrokerUnavailableError: the database is unreachable, or read-only.
            ConfigError: the reader of this name belongs to relays, or discards its
                messages; the role isn't a member of pillarbox_reader; or the URL leads
                through a pooler.
        """
        self._process.stopping.clear()
        self._started.clear()
        purpose = Purpose(
            grant=_GRANT,
            enter=self._enter,
            started=self._started.set,
            workers=self._workers,
        )
        try:
            self._running = await start(self._process.run(purpose), self._started)
        except DatabaseUnavailableError as error:
            await self.__aexit__()
            away = self._away(str(error))
            if isinstance(error, DatabaseRefusedError):
                away = BrokerRefusedError(str(away))
            raise away from error
        except BaseException:
            await self.__aexit__()
            raise
        self._running.add_done_callback(lambda _: self._handover.some.set())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Return what is not settled, write the outcomes, and release the lanes."""
        running, self._running = self._running, None
        if running is None:
            return
        self._process.stopping.set()
        with suppress(Exception):
            await running
        await end([running])

    async def _enter(self, _stack: AsyncExitStack, connection: Connection) -> None:
        """Look for topics that no handler takes."""
        record = await self._registration.read(connection)
        self._warnings = warn_unhandled(record.topics or (), self._topics)

    def _workers(self) -> Iterable[Coroutine[Any, Any, None]]:
        process = self._process
        yield HandlerWorker(
            process.shared_link,
            process.lanes,
            self._handover,
            self._config,
            in_flight=process.in_flight,
            stop=process.stopping,
            notify=self._on_event,
        ).run()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return messages that were claimed.

        Raises:
            BrokerUnavailableError: the database is unavailable, or the reader was
                dropped or given to relays.
        """
        taken = self._handover.take(limit)
        if not (taken or self._failure or self._refusal):
            is_partial = any(self._handover.left_out)
            poll = min(self._poll, LEFT_OUT) if is_partial else self._poll
            with suppress(TimeoutError):
                async with asyncio.timeout(poll):
                    await self._handover.some.wait()
            taken = self._handover.take(limit)
        if not taken:
            assert self._running is not None
            if self._running.done():
                self._running.result()
            if failure := self._refusal or self._failure:
                # Or a caller that asks again at once would keep the process from
                # recovering.
                await asyncio.sleep(0)
                raise self._away(failure)
        return [
            EntryDelivery(
                self,
                handed,
                Arrived(
                    message=handed.message,
                    problem=handed.row.problem,
                    attempts=handed.row.attempts,
                    history=self._history_of(handed),
                    published_at=handed.row.created_at.timestamp(),
                ),
            )
            for handed in taken
        ]

    def acked(self, entry: HeldMessage) -> None:
        """Settle a message."""
        entry.end(PUBLISHED)

    def nacked(self, entry: HeldMessage, delay: timedelta | None) -> None:
        """Make a message claimable again: at once or, with its key, after a delay."""
        if delay is None:
            entry.end(None)
            return
        seconds = delay.total_seconds()
        entry.end(Disposition("refused", "its handler failed", seconds, charge=1))

    def handed_back(self, entry: HeldMessage, delay: timedelta) -> bool:
        """Let a message and its key wait.

        Others lease its lane meanwhile, unless it is paused there, too.
        """
        seconds = delay.total_seconds()
        reason = "can't be handled by this replica"
        entry.end(Disposition("postponed", reason, seconds))
        if not self._is_paused(entry.message.topic):
            self._process.step_aside(seconds)
        return True

    def _know_pauses(self, is_paused: Callable[[str], bool]) -> bool:
        self._is_paused = is_paused
        return False

    def _history_of(self, handed: HeldMessage) -> History:
        row, leased_at = handed.row, handed.lane.leased_at
        known = self._taken_over.get(handed.lane.number)
        if leased_at is not None and (known is None or known.at != leased_at):
            known = Takeover(leased_at, TakenOver(_MAX_SUSPECTS))
            self._taken_over[handed.lane.number] = known
        if known is not None and known.covers(row.created_at):
            return known.history
        return REDELIVERED if row.attempts else FIRST_DELIVERY

    def _on_event(self, event: Event) -> None:
        match event:
            case LanesWithheld():
                self._holders = event.holders
            case LanesFree():
                self._holders = ()
            case DatabaseLost():
                self._failure = f"{event.reason}; {event.remedy}"
            case DatabaseRecovered():
                self._failure = None
            case ReaderDropped():
                self._refusal = f"reader {event.reader} was dropped"
            case BrokerDiffers():
                self._refusal = f"its relays publish to {event.recorded}"
            case BrokerMatches():
                self._refusal = None
            case PartitionsNotMade():
                warning = f"the outbox lacks partitions: {event.reason}; {event.remedy}"
                self._warnings = list(dict.fromkeys([*self._warnings, warning]))

    def _away(self, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(f"{without_password(self._url)}: {reason}")
