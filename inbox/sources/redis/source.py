"""A source that reads Redis Streams: a topic is a stream, a consumer is a group.

One member of the group at a time reads a stream, the one that has been there longest;
the others stand by. While a member holds entries, no other one reads the stream: a
script checks that and reads in one step, so a member that was frozen in between finds
nothing. Who takes over begins with what the last one held. It was killed if its
subscription has ended, and frozen if it sent no heartbeat for `reclaim_after`.

So every member holds a sequence without gaps. One that was frozen or cut off works it
off beside the one that took over, and receipts keep both in order. As soon as it
notices that it lost an entry, it gives up all others.
"""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import Final, Self

from redis.exceptions import ResponseError

from inbox.consuming.keeper import Keeper, Outcome
from inbox.source import Abilities, Delivery, EntryDelivery
from inbox.sources.redis.streams import Entry, Streams
from outbox.brokers.redis.connection import (
    close_client,
    redis_client,
    redis_errors,
    refuse_cluster,
)
from outbox.brokers.redis.options import RedisOptions
from outbox.cloudevents.raw_text import text_of
from outbox.errors import ConfigError
from outbox.retry import jittered

_RECLAIM_INTERVAL: Final = 5.0
_BEATS: Final = 3
_MOST_HELD: Final = 10_000
_LEAST_STAY: Final = 30.0
_LOOK_AHEAD: Final = 0.05


class RedisSource:
    """A source of the entries in one consumer's streams. Requires Redis 6.2.

    Args:
        url: `redis://host:port/db`, `rediss://…`, or
            `redis+sentinel://host,host/master/db`, with the options of `RedisOptions`.
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
            share=self._share,
            standing_by=lambda: [text_of(s) for s in self._streams.standing_by],
            members=lambda: list(self._streams.members),
        )
        self._keeper: Keeper[Entry] = Keeper(
            self._write, self._extend, pause=lambda: self._reclaim_after / _BEATS
        )
        self._place = count()
        self._reclaim_at = 0.0
        self._must_read = False
        self._has_lost = False
        self._hands_back = False
        self._stays_until = 0.0
        self._ahead_at = 0.0

    async def __aenter__(self) -> Self:
        """Join the groups of the streams.

        Raises:
            BrokerUnavailableError: Redis is unreachable, or rejects the connection.
            ConfigError: a topic's key isn't a stream, or Redis is older than 6.2, part
                of a cluster, or a Sentinel.
        """
        try:
            with redis_errors(self._url):
                await refuse_cluster(self._client, self._url)
                await self._streams.enter()
                if self._streams.is_shared:
                    await self._reclaim(1)
        except BaseException as error:
            await self._close()
            cause = error.__cause__
            if isinstance(cause, ResponseError) and "unknown command" in str(cause):
                raise ConfigError(
                    f"broker: {cause}; use Redis 6.2 or newer and allow EVAL, or write "
                    "Consumer(…, order='none')"
                ) from None
            raise
        self._keeper.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Write the acks, and return all other entries to the group."""
        try:
            await self._keeper.leave(self._leave_timeout, self._give_back)
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            await self._streams.end()
        finally:
            await close_client(self._client)

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries, and entries of dead replicas."""
        await self._keeper.check()
        with redis_errors(self._url):
            if self._streams.is_shared:
                await self._read(limit)
            else:
                await self._take(limit)
        return [EntryDelivery(self, entry, entry) for entry in self._keeper.take(limit)]

    def acked(self, entry: Entry) -> None:
        """Schedule the ack of an entry."""
        self._keeper.acked(entry)

    def nacked(self, entry: Entry, delay: timedelta | None) -> None:
        """Return an entry to its place in the order, or delay it and its key."""
        self._keeper.nacked(entry, delay)

    def handed_back(self, entry: Entry, delay: timedelta) -> bool:
        """Return an entry to the group or, to keep its key in order, delay that."""
        if self._streams.is_shared:
            return self._keeper.handed_back(entry, delay)
        if len(self._keeper.held) >= _MOST_HELD:
            return False
        self._keeper.backlog.defer(entry, delay.total_seconds())
        self._hands_back = True
        return True

    def _share(self) -> None:
        self._streams.is_shared = True

    async def _take(self, limit: int) -> None:
        now, backlog = time.monotonic(), self._keeper.backlog
        makes_way = (
            self._hands_back and self._streams.others and now >= self._stays_until
        )
        if self._has_lost or makes_way:
            await self._keeper.give_up(self._give_back)
            await self._streams.enter()
            self._has_lost = self._hands_back = False
            self._stays_until = now + _LEAST_STAY
        if not backlog.ready:
            due = backlog.seconds_until_due()
            patience = jittered(self._poll)
            if due is not None:
                patience = min(patience, due)
            limit = max(limit, backlog.room)
            self._hold(await self._streams.take(limit, patience, self._reclaim_after))
        elif (room := backlog.room) and now >= self._ahead_at:
            ahead = await self._streams.take(room, 0.0, self._reclaim_after)
            self._hold(ahead)
            self._ahead_at = now if len(ahead) >= room else now + _LOOK_AHEAD

    async def _read(self, limit: int) -> None:
        backlog = self._keeper.backlog
        is_due = time.monotonic() >= self._reclaim_at and not self._must_read
        if not backlog.ready and is_due:
            await self._reclaim(limit)
            # Entries that are handed back again and again hold up no others.
            self._must_read = True
        if not backlog.ready:
            self._must_read = False
            patience = min(jittered(self._poll), self._reclaim_at - time.monotonic())
            due = backlog.seconds_until_due()
            patience = max(0.0, patience if due is None else min(patience, due))
            self._hold(await self._streams.read(limit, patience))

    async def _reclaim(self, limit: int) -> None:
        entries = await self._streams.reclaim(self._reclaim_after, limit)
        # If the limit was reached, there may be more: continue with the next call.
        if len(entries) < limit:
            interval = min(_RECLAIM_INTERVAL, self._reclaim_after / _BEATS)
            self._reclaim_at = time.monotonic() + interval
        self._hold(entries)

    def _hold(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.place = next(self._place)
        self._keeper.hold(entries)

    async def _write(self, outcomes: Sequence[Outcome[Entry]]) -> None:
        with redis_errors(self._url):
            await self._streams.acknowledge(
                entry.at for entry, delay in outcomes if delay is None
            )
            await self._streams.give_back(
                (entry.at, entry.attempts, max(0.0, self._reclaim_after - delay))
                for entry, delay in outcomes
                if delay is not None
            )

    async def _extend(self, entries: Sequence[Entry]) -> Iterable[Entry]:
        with redis_errors(self._url):
            lost = await self._streams.keep_alive(entry.at for entry in entries)
        if self._streams.is_shared:
            return [entry for entry in entries if entry.at in lost]
        for at, is_with_another in lost.items():
            # Whoever settled it was given it before.
            self._keeper.held.pop(at, None)
            self._has_lost = self._has_lost or is_with_another
        return ()

    async def _give_back(self, entries: dict[Entry, float]) -> None:
        with redis_errors(self._url):
            await self._streams.leave({entry.at: entry.attempts for entry in entries})
