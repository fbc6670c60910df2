"""A source that reads the outbox itself, in the database of the writers.

Between the commit and the handler there is no relay process and no copy of the message:
the consumer is a reader of the outbox, and this source runs a relay that hands messages
to its own process. So it claims, orders, defers and takes lanes over as all relays do.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final, Self

from inbox.consuming.rollout import warn_unhandled
from inbox.poison.history import (
    FIRST_DELIVERY,
    REDELIVERED,
    History,
    TakenOver,
    Takeover,
)
from inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from inbox.sources.postgres.ready import Ready
from inbox.sources.postgres.tenants import Tenants
from outbox.brokers.options import DIRECT
from outbox.brokers.postgres import PostgresOptions
from outbox.errors import BrokerUnavailableError, DatabaseUnavailableError
from outbox.events import Event
from outbox.gather import end, start
from outbox.postgres.connection import connect
from outbox.postgres.days import PartitionsNotMade
from outbox.url import without_password
from relay.config import RelayConfig
from relay.events import (
    BrokerDiffers,
    BrokerMatches,
    DatabaseLost,
    DatabaseRecovered,
    LanesFree,
    LanesWithheld,
    ReaderDropped,
    RelayStarted,
)
from relay.publisher import Acked, Handed, Nacked, TenantSearch, TenantsFound
from relay.reader import RelayReader
from relay.relay import Relay

_MAX_SUSPECTS: Final = 256
"""For each lane that this replica takes over."""
_MAX_CLAIMS: Final = 4
"""So many claims' worth of messages are ready at most, if some tenants are left out."""
_LEFT_OUT: Final = 0.05
"""Seconds that a source waits for messages while tenants are left out."""
_MAX_PAYLOAD: Final = 2**30
"""As large as a value can be: none is given up because of its size."""


class _Handover:
    """What the relay hands messages to: they are ready here until they are received."""

    identity = DIRECT

    def __init__(self, prefetch: int) -> None:
        self.ready: Ready[Handed] = Ready()
        self.some = asyncio.Event()
        self._prefetch = prefetch
        self.left_out: frozenset[str] = frozenset()
        self._wanted = asyncio.Event()
        # So that a search brings as many messages of a tenant as a claim.
        self._tenants = Tenants(2 * prefetch)
        self._claimed: set[str] = set()
        """The tenant with the most messages in the last claim, if that left some."""
        self._known: set[str] = set()
        self._is_next = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def wants_more(self, *, can_search: bool) -> TenantSearch | None:
        while True:
            ready = self.ready
            # Before they have none, as others are handed out during a search.
            stocked = ready.stocked(max(1, self._prefetch // 4))
            is_due = can_search and self._tenants.is_due(
                len(ready), stocked, stuck=ready.has_only(self.left_out)
            )
            lacks = self._claimed.difference(stocked)
            if is_due and (self._is_next or not (lacks or self._is_short())):
                break
            if is_due or self._is_short():
                self._is_next = True
                return None
            self._wanted.clear()
            await self._wanted.wait()
        # A claim follows: it may find what no search can. It brings more of this
        # tenant, too, and what it brings costs less to settle.
        self._is_next, self._known = False, {*stocked, *self._claimed}
        return TenantSearch(
            {*self._known, *self.left_out},
            self._tenants.after,
            self._tenants.max_steps,
            self._tenants.rows_each,
        )

    def claimed(self, tenants: Sequence[str | None], *, is_cut: bool) -> None:
        most = Counter(it for it in tenants if is_cut and it is not None)
        self._claimed = {it for it, _ in most.most_common(1)}
        self._tenants.claimed(tenants, full=is_cut)

    def searched(self, found: TenantsFound) -> None:
        steps, tenants, is_cut = found
        self._tenants.searched(steps, tenants, ready=[*self._known], cut=is_cut)

    def _is_short(self) -> bool:
        if len(self.ready) >= _MAX_CLAIMS * self._prefetch:
            return False
        return not self.ready or self.ready.has_only(self.left_out)

    def hand_over(self, messages: Sequence[Handed]) -> None:
        for message in messages:
            self.ready.add(message)
        self.some.set()

    def take_back(self, message: Handed) -> None:
        key, place = message.message.key, message.place
        self.ready.put_back(
            message,
            lambda other: (
                key is not None and other.message.key == key and other.place < place
            ),
        )
        self.some.set()

    def withdraw(self, unwanted: Callable[[Handed], bool]) -> list[Handed]:
        return self.ready.remove(unwanted)

    def leave_out(self, tenants: Collection[str]) -> None:
        """Hand out no messages of these tenants, until the next call."""
        self.left_out = frozenset(tenants)
        self._wanted.set()
        self.some.set()

    def take(self, limit: int) -> list[Handed]:
        """Hand out messages whose lanes were leased all the time."""
        self.some.clear()
        taken: list[Handed] = []
        while len(taken) < limit:
            found = self.ready.take(limit - len(taken), self.left_out)
            if not found:
                break
            taken += [message for message in found if message.begin()]
        self._tenants.handed_out(len(taken))
        self._wanted.set()
        return taken


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
        self._url = url
        self._topics = topics
        self._poll = poll_interval.total_seconds()
        self._handover = _Handover(options.prefetch)
        self._started = asyncio.Event()
        self._failure: str | None = None
        self._refusal: str | None = None
        self._taken_over: dict[int, Takeover] = {}
        self._running: asyncio.Task[None] | None = None
        self._reader = RelayReader(consumer, DIRECT, self._handover)
        self._relay = Relay(
            url,
            self._handover,
            RelayConfig(
                concurrency=1,
                batch_size=options.prefetch,
                max_payload_bytes=_MAX_PAYLOAD,
                lease=options.lease,
                poll_interval=poll_interval,
                drain=leave_timeout,
            ),
            observers=[self._on_event],
            reader=consumer,
            topics=topics,
            broker=DIRECT,
        )
        self.abilities = Abilities(
            leave_out=self._handover.leave_out,
            foreign_holders=lambda: self._holders,
            warnings=lambda: self._warnings,
            identify=self._relay.identify,
            members=lambda: self._relay.members,
        )

    @classmethod
    def from_url(cls, url: str, *, consumer: str, topics: Sequence[str]) -> Self:
        """Create a source from a URL.

        Raises:
            ConfigError: the URL can't be used.
        """
        return cls(url, consumer=consumer, topics=topics)

    async def __aenter__(self) -> Self:
        """Add the topics to the consumer's reader; lease lanes, as a relay does.

        Raises:
            BrokerUnavailableError: the database is unreachable, or read-only.
            ConfigError: the reader of this name belongs to relays, or discards its
                messages; the role isn't a member of pillarbox_relay; or the URL leads
                through a pooler.
        """
        try:
            self._running = await start(self._relay.run(), self._started)
            await self._check_topics()
        except DatabaseUnavailableError as error:
            await self.__aexit__()
            raise self._away(str(error)) from error
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
        self._relay.stop()
        with suppress(Exception):
            await running
        await end([running])

    async def _check_topics(self) -> None:
        async with await connect(
            self._url, application_name="pillarbox inbox"
        ) as connection:
            record = await self._reader.read(connection)
        self._warnings = warn_unhandled(record.topics or (), self._topics)

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return messages that the relay has claimed.

        Raises:
            BrokerUnavailableError: the database is unavailable, or the reader was
                dropped or given to relays.
        """
        taken = self._handover.take(limit)
        if not (taken or self._failure or self._refusal):
            # While this waits, the caller can't let tenants in again.
            poll = min(self._poll, _LEFT_OUT) if self._handover.left_out else self._poll
            with suppress(TimeoutError):
                async with asyncio.timeout(poll):
                    await self._handover.some.wait()
            taken = self._handover.take(limit)
        if not taken:
            assert self._running is not None
            if self._running.done():
                self._running.result()
            if failure := self._refusal or self._failure:
                raise self._away(failure)
        return [
            EntryDelivery(
                self,
                handed,
                Arrived(
                    message=handed.message,
                    problem=handed.problem,
                    attempts=handed.attempts,
                    history=self._history_of(handed),
                    published_at=handed.created_at.timestamp(),
                ),
            )
            for handed in taken
        ]

    def acked(self, entry: Handed) -> None:
        """Settle a message."""
        entry.end(Acked())

    def nacked(self, entry: Handed, delay: timedelta | None) -> None:
        """Make a message claimable again: at once or, with its key, after a delay."""
        entry.end(
            None
            if delay is None
            else Nacked("its handler failed", retry_after=delay, is_attempt=True)
        )

    def handed_back(self, entry: Handed, delay: timedelta) -> bool:
        """Let a message and its key wait, and others lease its lane meanwhile."""
        entry.end(Nacked("can't be handled by this replica", retry_after=delay))
        self._relay.step_aside(delay.total_seconds())
        return True

    def _history_of(self, handed: Handed) -> History:
        lane, leased_at = handed.leased
        known = self._taken_over.get(lane)
        if leased_at is not None and (known is None or known.at != leased_at):
            known = Takeover(leased_at, TakenOver(_MAX_SUSPECTS))
            self._taken_over[lane] = known
        if known is not None and known.covers(handed.created_at):
            return known.history
        return REDELIVERED if handed.attempts else FIRST_DELIVERY

    def _on_event(self, event: Event) -> None:
        match event:
            case RelayStarted():
                self._started.set()
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
                warning = f"the outbox lacks days: {event.reason}; {event.remedy}"
                self._warnings = list(dict.fromkeys([*self._warnings, warning]))

    def _away(self, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(f"{without_password(self._url)}: {reason}")
