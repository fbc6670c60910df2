"""The commands that one member of a consumer group runs on Redis Streams."""

import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from inbox.consuming.keeper import Held
from inbox.consuming.rollout import begins_at_oldest
from inbox.poison.history import Delivered
from inbox.sources.redis.presence import Presence
from inbox.sources.redis.scripts import END_MEMBERSHIP, RETURNED, TAKE
from outbox.cloudevents.fields import from_fields, unreadable_from_fields
from outbox.cloudevents.raw_text import text_of
from outbox.errors import ConfigError, InvalidMessageError, shorten

_AT_ONCE: Final = 7 * 86_400
_DISCOVERY: Final = 5.0
_ALIVE: Final = 30_000
_LOOK: Final = 60.0
_PAGE: Final = 1000
_START: Final = b"0-0"
_LEAST_TAKEN: Final = 50
_STAND_BY: Final = 1.0
_MISSED: Final = 0.1
_RIGHTS: Final = (
    "&pillarbox:* +xgroup +xreadgroup +xread +xack +xclaim +xpending +xinfo +scan "
    "+eval +pubsub +subscribe +publish"
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

    Attributes:
        is_shared: whether several members read a stream at the same time, in any order.
        warnings, members: as of `Abilities`.
        standing_by: the streams that other members read.
        others: whether another member would read if this one left.
    """

    def __init__(self, client: Redis, *, group: str, topics: Sequence[str]) -> None:
        self._client = client
        self._group = group
        self._topics = [t.encode() for t in topics if not t.endswith("*")]
        self._prefixes = [t[:-1].encode() for t in topics if t.endswith("*")]
        self._process = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
        self._prefix = f"pillarbox:{group}:"
        self._channel = self._member = self._process
        self._presence = Presence(client, self._prefix[:-1])
        self._turn = 0
        self._is_unsure = False
        self._last: dict[bytes, bytes] = {}
        self._known: set[bytes] = set()
        self._discover_at = 0.0
        self._new: set[bytes] = set()
        self._look_at = 0.0
        self.warnings: list[str] = []
        self.members: dict[str, None] = {}
        self.is_shared = False
        self.standing_by: set[bytes] = set()
        self.others = False

    def identify(self, id: str) -> None:
        """End the member's name with an id."""
        self._process += f"-{id}"

    async def enter(self) -> None:
        """Become the youngest member of the groups.

        Raises:
            ConfigError: a topic names a key that isn't a stream, or the user lacks a
                right.
        """
        self._channel = self._process
        if not self.is_shared:
            since = datetime.now(UTC)
            self._channel = f"{self._prefix}{since:%Y%m%dT%H%M%S.%f}-{self._process}"
        self._member = self._channel
        self._is_unsure = False
        self._known.clear()
        try:
            if not self.is_shared:
                await self._presence.show(self._channel)
            await self.join()
            if not self.is_shared:
                await self.look_around()
            if not self.is_shared and self._known:
                await self._client.xread(dict.fromkeys(self._known, "$"))
                await self._take(0, 0.0, 0.0)
        except ResponseError as error:
            # Redis 6.2 says so only in the text if the command is in a script.
            is_refused = isinstance(error, NoPermissionError) or "can't run" in str(
                error
            )
            if self.is_shared or not is_refused:
                raise
            raise ConfigError(
                f"broker: {error}; to keep keys in order, a consumer's user needs "
                f"{_RIGHTS}; grant them, or write Consumer(…, order='none')"
            ) from None

    async def end(self) -> None:
        """End this member's presence."""
        await self._presence.end()

    async def look_around(self) -> None:
        """Notice whether a group is new on old streams, and who else is a member."""
        self._look_at = time.monotonic() + _LOOK
        new, self._new = self._new, set()
        self.members.clear()
        with suppress(NoPermissionError):
            if old := sum([await self._client.xlen(stream) for stream in new]):
                self.warnings.append(begins_at_oldest(self._group, old))
            for stream in self._known:
                for each in await self._client.xinfo_consumers(stream, self._group):
                    if each["idle"] < _ALIVE:
                        self.members[each["name"].decode(errors="replace")] = None

    async def join(self) -> None:
        """Create the group on every stream, starting at its first entry.

        Raises:
            ConfigError: a topic names a key that isn't a stream.
        """
        found = set(self._topics)
        for prefix in self._prefixes:
            pattern = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", prefix) + b"*"
            async for name in self._client.scan_iter(
                pattern, count=_PAGE, _type="STREAM"
            ):
                found.add(name)
        for stream in found - self._known:
            try:
                await self._client.xgroup_create(
                    stream, self._group, id="0", mkstream=True
                )
                if not self._discover_at:
                    self._new.add(stream)
            except ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    raise ConfigError(
                        f"topic {shorten(stream.decode())}: is a Redis key that is "
                        "not a stream; use another database of this Redis"
                    ) from None
                if not str(error).startswith("BUSYGROUP"):
                    raise
            # Try the commands on an entry that doesn't exist, so that a missing
            # privilege fails here, and not later, unnoticed, in a heartbeat or an ack.
            await self._client.xack(stream, self._group, _START)
            await self._client.xclaim(
                stream, self._group, self._member, 0, [_START], justid=True
            )
            await self._pending(stream, self._member)
            # Others see this member also before it gets its first entry.
            await self._client.xgroup_createconsumer(stream, self._group, self._member)
            self._known.add(stream)
        self._discover_at = time.monotonic() + _DISCOVERY

    async def _discover(self) -> bool:
        if not self._known or (
            self._prefixes and time.monotonic() >= self._discover_at
        ):
            await self.join()
        return bool(self._known)

    async def take(self, limit: int, seconds: float, lease: float) -> list[Entry]:
        """Return up to `limit` entries from each stream that no other member reads.

        Those come first that were returned, or that are left from members that are gone
        or that haven't been at work for `lease` seconds. If there are none, wait.
        """
        entries: list[Entry] = []
        with self._begun_anew():
            if time.monotonic() >= self._look_at:
                await self.look_around()
            if await self._discover():
                entries = await self._take(limit, seconds, lease)
            else:
                await self._presence.wait(seconds)
        return entries

    async def _take(self, limit: int, seconds: float, lease: float) -> list[Entry]:
        if self._is_unsure:
            # The server may still run the last read. What it reads is found under the
            # old name.
            self._turn += 1
            self._member = f"{self._channel}/{self._turn}"
        streams = list(self._known)
        pipeline = self._client.pipeline(transaction=False)
        last: dict[Any, Any] = {
            stream: id for stream, id in self._last.items() if stream in streams
        }
        if self.standing_by:
            seconds = min(seconds, _STAND_BY)
        if not seconds or not last.keys() | self.standing_by >= self._known:
            last = {}
        elif last:
            pipeline.xread(last, count=1, block=max(1, round(seconds * 1000)))
        else:
            await self._presence.wait(seconds)
        for stream in streams:
            pipeline.eval(
                TAKE,
                1,
                stream,
                self._group,
                self._member,
                self._channel,
                self._prefix,
                round(lease * 1000),
                limit,
            )
        self._is_unsure = True
        answers = await _answers(pipeline)
        self._last.clear()
        self.standing_by.clear()
        self.others = False
        entries: list[Entry] = []
        is_present = True
        for stream, (reader, *found) in zip(
            streams, answers[bool(last) :], strict=True
        ):
            if reader == self._channel.encode():
                is_present = False
            elif reader:
                self.standing_by.add(stream)
            else:
                others, taken, last_id = found
                self.others = self.others or bool(others)
                if last_id:
                    self._last[stream] = last_id
                entries += (_taken(EntryId(stream, id), *rest) for id, *rest in taken)
        if not is_present:
            await self._presence.wait(_MISSED)
            # After a failover, the connection to a frozen master may stay open.
            await self._presence.show(self._channel)
        self._is_unsure = False
        return entries

    async def read(self, limit: int, seconds: float) -> list[Entry]:
        """Wait for new entries, and return up to `limit` from each stream."""
        if not await self._discover():
            return []
        answer: Any = []
        with self._begun_anew():
            answer = await self._client.xreadgroup(
                self._group,
                self._member,
                dict.fromkeys(self._known, ">"),
                count=limit,
                block=max(1, round(seconds * 1000)),
            )
        return [
            _read(EntryId(stream, id), fields)
            for stream, entries in answer
            for id, fields in entries
        ]

    async def reclaim(self, idle: float, limit: int) -> list[Entry]:
        """Take over entries that no member has kept alive for `idle` seconds.

        Returns at least `limit` entries, or all there are.
        """
        entries: list[Entry] = []
        with self._begun_anew():
            if time.monotonic() >= self._look_at:
                await self.look_around()
            for stream in list(self._known):
                if len(entries) >= limit:
                    break
                returned = {
                    item["message_id"] for item in await self._pending(stream, RETURNED)
                }
                cursor: bytes = _START
                while len(entries) < limit:
                    # XAUTOCLAIM scans at most ten times `count` entries, and those of
                    # live members can precede those of dead ones.
                    answer: Any = await self._client.xautoclaim(
                        stream,
                        self._group,
                        self._member,
                        round(idle * 1000),
                        start_id=cursor,
                        count=max(limit - len(entries), _LEAST_TAKEN),
                    )
                    taken = {id: got for id, got in answer[1] if got is not None}
                    entries += await self._taken_over(stream, taken, returned)
                    cursor = answer[0]
                    if cursor == _START:
                        break
        return entries

    async def _taken_over(
        self,
        stream: bytes,
        taken: Mapping[bytes, Mapping[bytes, bytes]],
        returned: Collection[bytes],
    ) -> list[Entry]:
        if not taken:
            return []
        found = await self._find(stream, taken)
        entries: list[Entry] = []
        for id, fields in taken.items():
            # A member that returns an entry resets the count to its failed attempts.
            earlier = found[id]["times_delivered"] - 1 if id in found else 0
            entry = _read(EntryId(stream, id), fields)
            entry.attempts = earlier if id in returned else 0
            entry.history = Delivered(before=earlier > 0)
            entries.append(entry)
        return entries

    async def keep_alive(self, held: Iterable[EntryId]) -> dict[EntryId, bool]:
        """Reset the idle time of these entries, except those that the member lost.

        Return these, and whether another member has them.
        """
        lost: dict[EntryId, bool] = {}
        for stream, ids in _by_stream(held).items():
            with self._begun_anew():
                found = await self._find(stream, ids)
                kept: list[Any] = []
                for id in ids:
                    holder = found[id]["consumer"] if id in found else b""
                    if holder.startswith(self._channel.encode()):
                        kept.append(id)
                    else:
                        lost[EntryId(stream, id)] = bool(holder)
                if kept:
                    await self._client.xclaim(
                        stream, self._group, self._member, 0, kept, justid=True
                    )
        return lost

    async def acknowledge(self, entries: Iterable[EntryId]) -> None:
        """Settle entries for the whole group."""
        pipeline = self._client.pipeline(transaction=False)
        for stream, ids in _by_stream(entries).items():
            pipeline.xack(stream, self._group, *ids)
        await _answers(pipeline)

    async def leave(self, attempts: Mapping[EntryId, int]) -> None:
        """Release all entries that this member holds, and leave the groups.

        Args:
            attempts: the number of failed attempts, for entries that have any.
        """
        for stream in self._known | {at.stream for at in attempts}:
            with self._begun_anew():
                await self._leave(stream, attempts)
        if not self.is_shared:
            with suppress(NoPermissionError):
                await self._presence.leave()

    async def _leave(self, stream: bytes, attempts: Mapping[EntryId, int]) -> None:
        await self._give_back(stream, attempts)
        while not await end_membership(self._client, stream, self._group, self._member):
            await self._give_back(stream, attempts)

    async def _give_back(self, stream: bytes, attempts: Mapping[EntryId, int]) -> None:
        while pending := await self._pending(stream, self._member):
            found = [EntryId(stream, item["message_id"]) for item in pending]
            await self.give_back((at, attempts.get(at, 0), _AT_ONCE) for at in found)

    async def give_back(self, entries: Iterable[tuple[EntryId, int, float]]) -> None:
        """Release entries, each with its failed attempts and its idle time from now."""
        pipeline = self._client.pipeline(transaction=False)
        for at, attempts, idle in entries:
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

    @contextmanager
    def _begun_anew(self) -> Iterator[None]:
        """If a group or its stream was deleted, let `join` create the groups again."""
        try:
            yield
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._known.clear()

    async def _pending(self, stream: bytes, member: str) -> Sequence[Mapping[str, Any]]:
        pending: Sequence[Mapping[str, Any]] = await self._client.xpending_range(
            stream, self._group, "-", "+", _PAGE, member
        )
        return pending

    async def _find(
        self, stream: bytes, ids: Collection[bytes]
    ) -> dict[bytes, Mapping[str, Any]]:
        pipeline = self._client.pipeline(transaction=False)
        for id in ids:
            pipeline.xpending_range(stream, self._group, id, id, 1)
        return {
            item["message_id"]: item
            for found in await _answers(pipeline)
            for item in found
        }


async def _answers(pipeline: Any) -> Sequence[Any]:
    # If redis-py raised the error, its text would begin with the command and all ids.
    answers: Sequence[Any] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _by_stream(entries: Iterable[EntryId]) -> dict[bytes, list[bytes]]:
    streams: dict[bytes, list[bytes]] = {}
    for entry in entries:
        streams.setdefault(entry.stream, []).append(entry.id)
    return streams


def _taken(
    at: EntryId, fields: Sequence[bytes], earlier: int, is_returned: int
) -> Entry:
    entry = _read(at, dict(zip(fields[::2], fields[1::2], strict=True)))
    entry.key = entry.message.key
    entry.attempts = earlier if is_returned else 0
    entry.history = Delivered(before=earlier > 0)
    return entry


def _read(at: EntryId, fields: Mapping[bytes, bytes]) -> Entry:
    # Redis accepted it at the time that its id begins with.
    added_at, problem = int(at.id.partition(b"-")[0]) / 1000, None
    try:
        message = from_fields(fields)
    except InvalidMessageError as error:
        message = unreadable_from_fields(text_of(at.stream), fields)
        problem = f"entry {at.id.decode()}: {error}"
    return Entry(at=at, message=message, problem=problem, published_at=added_at)


async def end_membership(client: Redis, stream: bytes, group: str, member: str) -> bool:
    """Delete a member from the group; return False if entries are still pending.

    Check and deletion are one step, because a cancelled read may still be running on
    the server and receive an entry after a separate check. Deleting the member would
    then remove that entry from the group, too.
    """
    try:
        ended: Any = await client.eval(END_MEMBERSHIP, 1, stream, group, member)
    except NoPermissionError:
        # A name that remains in the group does no harm.
        return True
    return bool(ended)
