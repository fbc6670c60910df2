"""A source that reads Redis Streams: a topic is a stream, a consumer is a group.

Redis delivers entries to any replica that asks. So a key is in order with one replica,
but may not be with several; receipts still prevent effects from happening twice. A
heartbeat keeps entries with the replica that holds them; other replicas take over those
of a dead replica after `reclaim_after`.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from itertools import count
from typing import Final, NamedTuple, Self

from redis.exceptions import ResponseError

from inbox.consuming.backlog import Backlog
from inbox.consuming.outcomes import Outcomes
from inbox.source import Abilities, Delivery, EntryDelivery
from inbox.sources.redis.streams import Entry, EntryId, Streams
from outbox.brokers.redis.connection import (
    BROKEN,
    close_client,
    redis_client,
    redis_unavailable,
    refuse_cluster,
)
from outbox.brokers.redis.options import RedisOptions
from outbox.errors import BrokerUnavailableError, ConfigError
from outbox.gather import cancellable
from outbox.retry import jittered

_RECLAIM_INTERVAL: Final = 5.0
_BEATS: Final = 3


class _Outcome(NamedTuple):
    entry: Entry
    delay: float | None
    """How long others leave it alone, in seconds; None: it was acked."""


class RedisSource:
    """A source of the entries in one consumer's streams. Requires Redis 6.2.

    Args:
        url: `redis://host:port/db` or `rediss://…`, with the options of `RedisOptions`.
        consumer: the name of the group, which starts with the oldest entries.
        topics: names of streams, or prefixes followed by `*`; new streams are found
            within 5 s.
        poll_interval: the maximum wait of one read; each read's wait is jittered.
        leave_timeout: how long leaving waits for the acks to be written, and then for
            the other entries to be returned.
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
        address, options = RedisOptions.parse(url)
        self._url = address
        self._poll = poll_interval.total_seconds()
        self._reclaim_after = options.reclaim_after.total_seconds()
        self._leave_timeout = leave_timeout.total_seconds()
        self._client = redis_client(address)
        self._streams = Streams(self._client, group=consumer, topics=topics)
        self.abilities = Abilities(
            warnings=lambda: self._streams.warnings,
            identify=self._streams.identify,
            members=lambda: list(self._streams.members),
        )
        self._backlog: Backlog[Entry] = Backlog()
        self._place = count()
        self._held: dict[EntryId, int] = {}
        self._reclaim_at = 0.0
        self._outcomes: Outcomes[_Outcome] = Outcomes(self._settle)
        self._must_read = False

    async def __aenter__(self) -> Self:
        """Join the groups of the streams.

        Raises:
            BrokerUnavailableError: Redis is unreachable, or rejects the connection.
            ConfigError: a topic's key isn't a stream, or Redis is older than 6.2, part
                of a cluster, or a Sentinel.
        """
        try:
            with cancellable():
                await refuse_cluster(self._client, self._url)
                await self._streams.join()
                await self._reclaim(1)
        except BaseException as error:
            await close_client(self._client)
            if isinstance(error, ResponseError) and "unknown command" in str(error):
                raise ConfigError(f"broker: {error}; use Redis 6.2 or newer") from None
            if isinstance(error, BROKEN):
                raise redis_unavailable(self._url, error) from error
            raise
        self._outcomes.start(self._beat())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the acks, and return all other entries to the group."""
        async with AsyncExitStack() as leaving:
            leaving.push_async_callback(close_client, self._client)
            await self._outcomes.finish(self._leave_timeout)
            # If Redis is unavailable, other replicas take the entries over later.
            with suppress(*BROKEN, TimeoutError):
                async with asyncio.timeout(self._leave_timeout):
                    with cancellable():
                        await self._streams.leave(self._held)

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries and, at intervals, entries of dead replicas."""
        await self._outcomes.check()
        try:
            is_due = time.monotonic() >= self._reclaim_at and not self._must_read
            if not self._backlog.ready and is_due:
                with cancellable():
                    await self._reclaim(limit)
                # Entries that are handed back again and again hold up no others.
                self._must_read = True
            if not self._backlog.ready:
                self._must_read = False
                with cancellable():
                    self._keep(await self._streams.read(limit, self._patience()))
        except BROKEN as error:
            raise redis_unavailable(self._url, error) from error
        return [
            EntryDelivery(self, entry, entry) for entry in self._backlog.take(limit)
        ]

    def acked(self, entry: Entry) -> None:
        """Schedule the ack of an entry."""
        self._outcomes.add(_Outcome(entry, None))

    def nacked(self, entry: Entry, delay: timedelta | None) -> None:
        """Return an entry to its place in the order, or delay it."""
        if delay is None:
            self._backlog.add(entry)
            return
        entry.attempts += 1
        self._held[entry.at] = entry.attempts
        self._backlog.defer(entry, delay.total_seconds())

    def handed_back(self, entry: Entry, delay: timedelta) -> bool:
        """Schedule the return of an entry to the group."""
        self._outcomes.add(_Outcome(entry, delay.total_seconds()))
        return True

    async def _reclaim(self, limit: int) -> None:
        entries = await self._streams.reclaim(self._reclaim_after, limit)
        # If the limit was reached, there may be more: continue with the next call.
        if len(entries) < limit:
            interval = min(_RECLAIM_INTERVAL, self._reclaim_after / _BEATS)
            self._reclaim_at = time.monotonic() + interval
        self._keep(entry for entry in entries if entry.at not in self._held)

    def _keep(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._held[entry.at] = entry.attempts
            entry.place = next(self._place)
            self._backlog.add(entry)

    def _patience(self) -> float:
        patience = min(jittered(self._poll), self._reclaim_at - time.monotonic())
        due = self._backlog.seconds_until_due()
        return max(0.0, patience if due is None else min(patience, due))

    async def _settle(self, outcomes: Sequence[_Outcome]) -> None:
        acked = [entry.at for entry, delay in outcomes if delay is None]
        try:
            with cancellable():
                await self._streams.acknowledge(acked)
                await self._streams.give_back(
                    (entry.at, entry.attempts, max(0.0, self._reclaim_after - delay))
                    for entry, delay in outcomes
                    if delay is not None
                )
        except BROKEN as error:
            raise redis_unavailable(self._url, error) from error
        for entry, _ in outcomes:
            self._held.pop(entry.at, None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._reclaim_after / _BEATS)
            with cancellable(), suppress(*BROKEN, BrokerUnavailableError):
                for lost in await self._streams.keep_alive(list(self._held)):
                    self._held.pop(lost, None)
