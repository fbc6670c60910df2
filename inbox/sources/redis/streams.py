"""The commands that one member of a consumer group runs on Redis Streams."""

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from pillarbox.inbox.consuming.keeper import Held
from pillarbox.inbox.consuming.rollout import begins_at_oldest
from pillarbox.inbox.poison.history import REDELIVERED, Delivered, TakenOver
from pillarbox.inbox.sources.redis.presence import Presence
from pillarbox.inbox.sources.redis.scripts import KEEP, LEAVE, RETURNED, TAKE
from pillarbox.outbox.brokers.redis.options import LAYOUTS
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.cloudevents.fields import from_fields, unreadable_from_fields
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.errors import ConfigError, InvalidMessageError, shorten

_AT_ONCE: Final = 7 * 86_400_000
_KEPT_AT_ONCE: Final = 500
"""Entries that one script keeps; Redis runs nothing else meanwhile."""
_DISCOVERY: Final = 5.0
_RECLAIM_INTERVAL: Final = 5.0
_HANDOVER: Final = 10.0
"""Seconds after which a member takes over what the last reader still handles."""
_ALIVE: Final = 30_000
_LOOK: Final = 60.0
_PAGE: Final = 1000
_START: Final = b"0-0"
_ERRORS: Final = "surrogateescape"
_STAND_BY: Final = 1.0
_SOON: Final = 0.1
# Of Redis 6.2 and 7, and of newer servers.
_REFUSED: Final = re.compile("can't run|ACL failure")
_RIGHTS: Final = (
    "&pillarbox:* +xgroup +xreadgroup +xread +xack +xclaim +xpending +xinfo +hkeys "
    "+scan +eval +pubsub +subscribe +publish"
)


class EntryId(NamedTuple):
    """The position of an entry: its stream and its id."""

    stream: bytes
    id: bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Held):
    """An entry as it was read."""

    at: EntryId


class Streams:
    """The streams of a consumer's topics. Requires Redis 6.2.

    Call each method within `redis_errors`.

    Args:
        lease: how many seconds an entry stays with a member that doesn't keep it.

    Attributes:
        is_shared: whether several members read a stream at the same time, in any order.
        warnings, members: as of `Abilities`.
        standing_by: the streams that other members read.
        others: whether another member would read if this one stepped aside.
        is_unsure: whether the server may still run a read whose answer was lost.
    """

    def __init__(
        self, client: Redis, *, group: str, topics: Sequence[str], lease: float
    ) -> None:
        self._client = client
        self._group = group
        self._lease = lease
        self._topics = {topic for topic in topics if not topic.endswith("*")}
        self._prefixes = [topic[:-1] for topic in topics if topic.endswith("*")]
        self._process = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
        self._prefix = f"pillarbox:{group}:"
        self._channel = self._member = self._process
        self._presence = Presence(client, self._prefix[:-1])
        self._turn = 0
        self._streams: set[bytes] = set()
        self._known: set[bytes] = set()
        self._last: dict[Any, Any] = {}
        self._waits: set[bytes] = set()
        self._held_since: dict[bytes, float] = {}
        self._taken_over: dict[bytes, TakenOver] = {}
        self._discover_at = self._look_at = self._reclaim_at = 0.0
        self.warnings: list[str] = []
        self.members: dict[str, None] = {}
        self.is_shared = self.is_unsure = self.others = False
        self.standing_by: set[bytes] = set()

    def identify(self, id: str) -> None:
        """End the member's name with an id."""
        self._process = f"{self._process.removesuffix(f'-{id}')}-{id}"

    async def enter(self, *, aside: bool = False) -> None:
        """Become the youngest member of the groups, and hold nothing.

        Args:
            aside: let other members read, unless all of them do the same.

        Raises:
            ConfigError: a topic names a key that isn't a stream, or the user lacks a
                right, or Redis is too old.
        """
        if not self.is_shared:
            since = f"{'~' if aside else ''}{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
            self._channel = f"{self._prefix}{since}-{self._process}"
        self._member = self._channel
        self.is_unsure = False
        self._forget()
        try:
            if not self.is_shared:
                await self._presence.show(self._channel)
            await self._scan()
            pipeline = self._client.pipeline(transaction=False)
            self._ask_for_shards(pipeline)
            self._add_shards(await _answers(pipeline))
            if old := await self._join():
                self.warnings.append(begins_at_oldest(self._group, old))
            await self._look_around()
            if self._known and not self.is_shared:
                pipeline.xread(dict.fromkeys(self._known, "$"))
            for stream in self._known:
                self._add_take(pipeline, stream, 0)
            await _answers(pipeline)
        except ResponseError as error:
            # If the command is in a script, only the text says so.
            says = str(error)
            is_refused = isinstance(error, NoPermissionError) or _REFUSED.search(says)
            if not is_refused and "unknown command" not in says:
                raise
            raise ConfigError(
                f"broker: {error}; a consumer needs Redis 6.2 or newer, and the rights "
                f"{_RIGHTS}"
            ) from None

    @property
    def readable(self) -> int:
        """From how many streams this member may read, as far as it knows."""
        return max(1, len(self._known - self._waits))

    async def end(self) -> None:
        """End this member's presence."""
        await self._presence.end()

    def rename(self) -> None:
        """Read under another name; what an unanswered read finds has the last one."""
        self._turn += 1
        self._member = f"{self._channel}/{self._turn}"

    async def take(
        self, limit: int, seconds: float, is_paused: Callable[[str], bool]
    ) -> list[Entry]:
        """Return up to `limit` entries from each stream that this member may read.

        Those come first that were returned, or that are left from members that are gone
        or that haven't been at work for a lease. If there are none, wait. Nothing new
        is read of paused topics, but their reader is still determined, and entries that
        others left are taken over.
        """
        entries: list[Entry] = []
        with self._begun_anew():
            await self._scan()
            await self._join()
            await self._look_around()
            paused = {it for it in self._known if is_paused(_shard(it).topic)}
            if self._known - paused or (self._known and not self.is_shared):
                entries = await self._take(limit, seconds, paused)
            else:
                await asyncio.sleep(seconds)
        return entries

    async def _take(
        self, limit: int, seconds: float, paused: set[bytes]
    ) -> list[Entry]:
        now, pipeline = time.monotonic(), self._client.pipeline(transaction=False)
        streams, first = [*self._known], 0
        if self.is_shared:
            if now < self._reclaim_at:
                streams = []
            block = None if streams else _milliseconds(seconds)
            pipeline.xreadgroup(
                self._group,
                self._member,
                dict.fromkeys(self._known - paused, ">"),
                count=limit,
                block=block,
            )
            first = 1
        elif wait := self._wait(seconds, now):
            if self._last:
                pipeline.xread(self._last, count=1, block=_milliseconds(wait))
                first = 1
            else:
                async with self._presence.waiting():
                    await asyncio.sleep(wait)
        for stream in streams:
            self._add_take(pipeline, stream, 0 if stream in paused else limit)
        self._ask_for_shards(pipeline)
        self.is_unsure = not self.is_shared
        answers: list[Any] = []
        async with self._presence.waiting() if first else nullcontext():
            answers = await _answers(pipeline)
        if not answers:
            return []  # another member has left
        self._add_shards(answers[-len(self._topics) :])
        taken = [*zip(streams, answers[first : first + len(streams)], strict=True)]
        if not self.is_shared:
            if any(answer[0] == self._channel.encode() for _, answer in taken):
                # After a failover, the connection to a frozen master may stay open.
                await self._presence.show(self._channel)
            self.is_unsure = False
            return self._taken(taken, now, paused)
        left = [
            _left(EntryId(stream, id), *rest)
            for stream, (_, _, found, _) in taken
            for id, *rest in found
        ]
        if streams:
            # If the limit was reached, there may be more.
            pause = min(_RECLAIM_INTERVAL, self._lease / 3)
            self._reclaim_at = now + (0.0 if len(left) >= limit else pause)
        return left + [
            _entry(EntryId(stream, id), fields)
            for stream, new in answers[0]
            for id, fields in new
        ]

    def _wait(self, seconds: float, now: float) -> float:
        """Return how long to wait for news before the next read."""
        has_news, self._presence.has_news = self._presence.has_news, False
        if has_news or self._known - self._last.keys() - self._waits:
            return 0.0
        if any(now - since < _HANDOVER for since in self._held_since.values()):
            return min(seconds, _SOON)
        return min(seconds, _STAND_BY) if self._waits else seconds

    def _taken(
        self,
        answers: Iterable[tuple[bytes, Sequence[Any]]],
        now: float,
        paused: set[bytes],
    ) -> list[Entry]:
        entries: list[Entry] = []
        held_since, self._held_since = self._held_since, {}
        self._last.clear()
        self._waits = paused
        self.standing_by.clear()
        self.others = False
        for stream, (reader, *found) in answers:
            if reader:
                self._waits.add(stream)
                self._taken_over.pop(stream, None)
                if found[0]:
                    self._held_since[stream] = held_since.get(stream, now)
                if reader != self._channel.encode():
                    self.standing_by.add(stream)
                continue
            others, taken, last = found
            self.others = self.others or others > 0
            if last:
                self._last[stream] = last
            history = self._taken_over.setdefault(stream, TakenOver())
            for id, *rest in taken:
                entries.append(_left(EntryId(stream, id), *rest))
                if entries[-1].history == REDELIVERED:
                    entries[-1].history = history
        for entry in entries:
            entry.key = entry.message.key
        return entries

    def _add_take(self, pipeline: Any, stream: bytes, limit: int) -> None:
        mode = "shared" if self.is_shared else ""
        since = self._held_since.get(stream)
        if since is not None and time.monotonic() - since >= _HANDOVER:
            mode = "forced"
        pipeline.eval(
            TAKE,
            1,
            stream,
            self._group,
            self._member,
            self._channel,
            self._prefix,
            round(self._lease * 1000),
            limit,
            _shard(stream).number,
            mode,
        )

    async def _scan(self) -> None:
        if not self._prefixes or time.monotonic() < self._discover_at:
            return
        for prefix in self._prefixes:
            pattern = re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix) + "*"
            async for name in self._client.scan_iter(
                pattern, count=_PAGE, _type="STREAM"
            ):
                topic = _shard(name).topic
                if topic.startswith(prefix):
                    self._topics.add(topic)
        self._discover_at = time.monotonic() + _DISCOVERY

    async def _look_around(self) -> None:
        """Notice who else is a member."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK
        self.members.clear()
        with suppress(NoPermissionError):
            for stream in self._known:
                for each in await self._client.xinfo_consumers(stream, self._group):
                    if each["idle"] < _ALIVE:
                        self.members[each["name"].decode(errors="replace")] = None

    def _ask_for_shards(self, pipeline: Any) -> None:
        for topic in self._topics:
            pipeline.hkeys(_key(topic + LAYOUTS))

    def _add_shards(self, layouts: Sequence[Sequence[bytes]]) -> None:
        for topic, numbers in zip(self._topics, layouts, strict=True):
            for of in (1, *map(int, numbers)):
                shards = Shard(topic, of=of).all
                self._streams.update(_key(shard.name) for shard in shards)

    async def _join(self) -> int:
        """Create the group on every new stream, starting at its first entry.

        Returns how many entries the streams have on which it is new.

        Raises:
            ConfigError: a topic names a key that isn't a stream.
        """
        if not (streams := list(self._streams - self._known)):
            return 0
        pipeline = self._client.pipeline(transaction=False)
        for stream in streams:
            pipeline.xgroup_create(stream, self._group, id="0", mkstream=True)
            # Try the commands on an entry that doesn't exist, so that a missing
            # privilege fails here, and not later, unnoticed, in a heartbeat or an ack.
            pipeline.xack(stream, self._group, _START)
            pipeline.xclaim(stream, self._group, self._member, 0, [_START], justid=True)
            pipeline.xpending_range(stream, self._group, "-", "+", 1)
            # Others see this member also before it gets its first entry.
            pipeline.xgroup_createconsumer(stream, self._group, self._member)
            pipeline.xlen(stream)
        answers = await pipeline.execute(raise_on_error=False)
        old = 0
        for i, stream in enumerate(streams):
            created, *tried, length = answers[6 * i : 6 * i + 6]
            if str(created).startswith("WRONGTYPE"):
                raise ConfigError(
                    f"topic {shorten(text_of(stream))}: is a Redis key that is "
                    "not a stream; use another database of this Redis"
                )
            if not str(created).startswith("BUSYGROUP"):
                tried = [created, *tried]
                old += length if isinstance(length, int) else 0
            for answer in tried:
                if isinstance(answer, Exception):
                    raise answer
            self._known.add(stream)
        return old

    async def keep_alive(self, held: Iterable[EntryId]) -> dict[EntryId, bool]:
        """Reset the idle time of these entries, except those that the member lost.

        Return these, and whether another member has them.
        """
        lost: dict[EntryId, bool] = {}
        me = self._group, self._member, self._channel
        for stream, ids in _by_stream(held).items():
            with self._begun_anew():
                for n in range(0, len(ids), _KEPT_AT_ONCE):
                    part = ids[n : n + _KEPT_AT_ONCE]
                    found: Any = await self._client.eval(KEEP, 1, stream, *me, *part)
                    lost |= {EntryId(stream, id): bool(other) for id, other in found}
        return lost

    async def settle(
        self,
        acked: Iterable[EntryId],
        returned: Iterable[tuple[EntryId, int, float]],
    ) -> None:
        """Ack entries for the whole group, and release others.

        Args:
            returned: entries with their failed attempts and their idle time from now.
        """
        pipeline = self._client.pipeline(transaction=False)
        for stream, ids in _by_stream(acked).items():
            pipeline.xack(stream, self._group, *ids)
        for at, attempts, idle in returned:
            # The takeover will increment the count.
            pipeline.xclaim(
                at.stream,
                self._group,
                RETURNED,
                0,
                [at.id],
                idle=round(idle * 1000),
                retrycount=attempts,
                justid=True,
            )
        with self._begun_anew():
            await _answers(pipeline)

    async def leave(self, attempts: Mapping[EntryId, int], *streams: bytes) -> None:
        """Release all entries that this member holds, and leave the groups.

        Args:
            attempts: the number of failed attempts, for entries that have any.
            streams: the only ones to leave.
        """
        pipeline = self._client.pipeline(transaction=False)
        for stream in streams or self._known | {at.stream for at in attempts}:
            counts = (
                part
                for at, count in attempts.items()
                if at.stream == stream and count
                for part in (at.id, count)
            )
            pipeline.eval(
                LEAVE, 1, stream, self._group, self._channel, _AT_ONCE, *counts
            )
        with self._begun_anew():
            await _answers(pipeline)
        if not self.is_shared and not streams:
            with suppress(NoPermissionError):
                await self._presence.leave()

    @contextmanager
    def _begun_anew(self) -> Iterator[None]:
        """If a group or its stream was deleted, let `_join` create the groups again."""
        try:
            yield
        except ResponseError as error:
            # If the command is in a script, only the text says so.
            if "NOGROUP" not in str(error):
                raise
            self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._streams = {_key(topic) for topic in self._topics}
        self._last.clear()
        self._taken_over.clear()
        self._discover_at = 0.0


async def _answers(pipeline: Any) -> list[Any]:
    # If redis-py raised the error, its text would begin with the command and all ids.
    answers: list[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _key(name: str) -> bytes:
    return name.encode(errors=_ERRORS)


def _shard(stream: bytes) -> Shard:
    return Shard.named(stream.decode(errors=_ERRORS))


def _by_stream(entries: Iterable[EntryId]) -> dict[bytes, list[bytes]]:
    streams: dict[bytes, list[bytes]] = {}
    for entry in entries:
        streams.setdefault(entry.stream, []).append(entry.id)
    return streams


def _left(
    at: EntryId, fields: Sequence[bytes], earlier: int, is_returned: int
) -> Entry:
    entry = _entry(at, dict(zip(fields[::2], fields[1::2], strict=True)))
    entry.attempts = earlier if is_returned else 0
    entry.history = Delivered(before=earlier > 0)
    return entry


def _entry(at: EntryId, fields: Mapping[bytes, bytes]) -> Entry:
    # Redis accepted it at the time that its id begins with.
    added_at, problem = int(at.id.partition(b"-")[0]) / 1000, None
    try:
        message = from_fields(fields)
    except InvalidMessageError as error:
        topic = text_of(_key(_shard(at.stream).topic))
        message = unreadable_from_fields(topic, fields)
        problem = f"entry {at.id.decode()}: {error}"
    return Entry(at=at, message=message, problem=problem, published_at=added_at)
