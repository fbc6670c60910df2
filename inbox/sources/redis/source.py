"""A source that reads Redis Streams: a topic is a stream, a consumer is a group.

One member of the group at a time reads a stream, the others stand by. It is the one
that has been there longest; the shards of a topic are dealt out to all. While a member
holds entries, no other one reads the stream: a script checks that and reads in one
step, so a member that was frozen in between finds nothing. The next reader begins with
the entries of the last one. That one was killed if its subscription has ended, frozen
if it sent no heartbeat for `reclaim_after`, or it hasn't settled what it held in time.

So every member holds a sequence without gaps. One that was frozen, cut off or slow
finishes it beside the new reader, and receipts keep both in order. As soon as it
notices that it lost an entry, it gives up all others of the stream.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import Final, Self

from pillarbox.inbox.consuming.backlog import AT_ONCE, LEFT_OUT, READ_AHEAD
from pillarbox.inbox.consuming.keeper import Keeper, Outcome
from pillarbox.inbox.source import Abilities, Delivery, EntryDelivery
from pillarbox.inbox.sources.redis.streams import Entry, Streams
from pillarbox.outbox.brokers.redis.connection import (
    close_client,
    redis_client,
    redis_errors,
    refuse_cluster,
)
from pillarbox.outbox.brokers.redis.options import RedisOptions
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.retry import jittered

_BEATS: Final = 3
# The entries read ahead, and as many that wait for other replicas.
_MOST_HELD: Final = 2 * READ_AHEAD
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
        self._streams = Streams(
            self._client, group=consumer, topics=topics, lease=self._reclaim_after
        )
        self._keeper: Keeper[Entry] = Keeper(
            self._write, self._extend, pause=lambda: self._reclaim_after / _BEATS
        )
        self.abilities = Abilities(
            leave_out=self._keeper.backlog.leave_out,
            warnings=lambda: self._streams.warnings,
            identify=self._streams.identify,
            share=self._share,
            standing_by=lambda: [text_of(s) for s in self._streams.standing_by],
            members=lambda: list(self._streams.members),
            pauses=self._keeper.backlog.leave_out_paused,
        )
        self._place = count()
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
        except BaseException:
            await self._close()
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
            await self._fill(limit)
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
        self._hands_back = True
        if len(self._keeper.held) >= _MOST_HELD:
            return False
        return self._keeper.kept_back(entry, delay)

    def _share(self) -> None:
        self._streams.is_shared = True

    async def _fill(self, limit: int) -> None:
        now, keeper, streams = time.monotonic(), self._keeper, self._streams
        if self._hands_back and streams.others and now >= self._stays_until:
            # The others begin with the entries that it holds. Running handlers
            # continue.
            await self._give_back(dict.fromkeys(keeper.held.values(), 0.0))
            keeper.forget(lambda _: True)
            await streams.enter(aside=True)
            self._hands_back = False
            self._stays_until = now + _LEAST_STAY
        backlog = keeper.backlog
        # The limit of a read is that of each stream.
        in_all = 0 if streams.is_shared else backlog.room
        room = -(-in_all // streams.readable)
        patience, is_ahead = 0.0, backlog.due
        if is_ahead:
            if not room or now < self._ahead_at:
                if not backlog.ready:
                    await asyncio.sleep(LEFT_OUT)
                return
            limit = room
        else:
            due = backlog.seconds_until_due()
            patience = backlog.patience(jittered(self._poll))
            patience = patience if due is None else min(patience, due)
            limit = max(limit, room)
        if streams.is_unsure:
            streams.rename()
            await keeper.beat()
        stood_by = set(streams.standing_by)
        entries = await streams.take(limit, patience, backlog.is_paused)
        if is_ahead:
            # Else, a full backlog would cost a read for each message that it delivers.
            goes_on = in_all == AT_ONCE and len(entries) >= room
            self._ahead_at = now if goes_on else now + _LOOK_AHEAD
        for entry in entries:
            entry.place = next(self._place)
        keeper.hold(entries)
        if moved := streams.standing_by - stood_by:
            await keeper.release(lambda entry: entry.at.stream in moved)

    async def _write(self, outcomes: Sequence[Outcome[Entry]]) -> None:
        with redis_errors(self._url):
            await self._streams.settle(
                [entry.at for entry, delay in outcomes if delay is None],
                [
                    (entry.at, entry.attempts, max(0.0, self._reclaim_after - delay))
                    for entry, delay in outcomes
                    if delay is not None
                ],
            )

    async def _extend(self, entries: Sequence[Entry]) -> Iterable[Entry]:
        held, streams = self._keeper.held, self._streams
        with redis_errors(self._url):
            lost = await streams.keep_alive(entry.at for entry in entries)
            for at, is_with_another in lost.items():
                if not is_with_another:
                    # The replica that settled it had it before.
                    held.pop(at, None)
            if streams.is_shared:
                return [entry for entry in entries if lost.get(entry.at)]
            given_up = {at.stream for at, is_elsewhere in lost.items() if is_elsewhere}
            if given_up:
                attempts = {entry.at: entry.attempts for entry in held.values()}
                await streams.leave(attempts, *given_up)
        return [entry for entry in held.values() if entry.at.stream in given_up]

    async def _give_back(self, entries: dict[Entry, float]) -> None:
        with redis_errors(self._url):
            await self._streams.leave({entry.at: entry.attempts for entry in entries})
