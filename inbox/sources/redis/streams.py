"""The commands that one member of a consumer group runs on Redis Streams."""

import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from inbox.consuming.keeper import Held
from inbox.consuming.rollout import begins_at_oldest
from inbox.poison.history import Delivered
from outbox.cloudevents.fields import from_fields, unreadable_from_fields
from outbox.cloudevents.raw_text import text_of
from outbox.errors import ConfigError, InvalidMessageError, shorten

RETURNED: Final = "returned"
"""The group member to which returned entries are assigned."""

_AT_ONCE: Final = 7 * 86_400
_DISCOVERY: Final = 5.0
_ALIVE: Final = 30_000
_LOOK: Final = 60.0
_PAGE: Final = 1000
_START: Final = b"0-0"
_LEAST_TAKEN: Final = 50


class EntryId(NamedTuple):
    """The position of an entry: its stream and its id."""

    stream: bytes
    id: bytes


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Held):
    """An entry as it was read; one that waits for its retry holds back no others."""

    at: EntryId


class Streams:
    """The streams of a consumer's topics. Requires Redis 6.2.

    Call each method within `redis_errors`.

    Attributes:
        warnings, members: as of `Abilities`.
    """

    def __init__(self, client: Redis, *, group: str, topics: Sequence[str]) -> None:
        self._client = client
        self._group = group
        self._topics = [t.encode() for t in topics if not t.endswith("*")]
        self._prefixes = [t[:-1].encode() for t in topics if t.endswith("*")]
        self._member = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
        self._known: set[bytes] = set()
        self._discover_at = 0.0
        self._new: set[bytes] = set()
        self._look_at = 0.0
        self.warnings: list[str] = []
        self.members: dict[str, None] = {}

    def identify(self, id: str) -> None:
        """End the member's name with an id."""
        self._member += f"-{id}"

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
            # Others see this member also before it gets its first entry.
            await self._client.xgroup_createconsumer(stream, self._group, self._member)
            self._known.add(stream)
        self._discover_at = time.monotonic() + _DISCOVERY

    async def read(self, limit: int, seconds: float) -> list[Entry]:
        """Wait for new entries, and return up to `limit` from each stream."""
        if not self._known or (
            self._prefixes and time.monotonic() >= self._discover_at
        ):
            await self.join()
        if not self._known:
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
        times = await self._times_delivered(stream, taken)
        entries: list[Entry] = []
        for id, fields in taken.items():
            # A member that returns an entry resets the count to its failed attempts.
            earlier = times.get(id, 1) - 1
            entry = _read(EntryId(stream, id), fields)
            entry.attempts = earlier if id in returned else 0
            entry.history = Delivered(before=earlier > 0)
            entries.append(entry)
        return entries

    async def keep_alive(self, held: Iterable[EntryId]) -> set[EntryId]:
        """Reset the idle time of these entries; return those that the member lost."""
        lost: set[EntryId] = set()
        for stream, ids in _by_stream(held).items():
            with self._begun_anew():
                ours = await self._times_delivered(stream, ids)
                lost.update(EntryId(stream, id) for id in ids if id not in ours)
                kept: list[Any] = [id for id in ids if id in ours]
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

    async def _times_delivered(
        self, stream: bytes, ids: Collection[bytes]
    ) -> dict[bytes, int]:
        pipeline = self._client.pipeline(transaction=False)
        for id in ids:
            pipeline.xpending_range(stream, self._group, id, id, 1, self._member)
        return {
            item["message_id"]: item["times_delivered"]
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


def _read(at: EntryId, fields: Mapping[bytes, bytes]) -> Entry:
    # Redis accepted it at the time that its id begins with.
    added_at, problem = int(at.id.partition(b"-")[0]) / 1000, None
    try:
        message = from_fields(fields)
    except InvalidMessageError as error:
        message = unreadable_from_fields(text_of(at.stream), fields)
        problem = f"entry {at.id.decode()}: {error}"
    return Entry(at=at, message=message, problem=problem, published_at=added_at)


_SCRIPT: Final = """
local group, member = ARGV[1], ARGV[2]
local pending = redis.pcall('XPENDING', KEYS[1], group, '-', '+', 1, member)
if pending.err then return pending end
if #pending > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, member)
return 1
"""


async def end_membership(client: Redis, stream: bytes, group: str, member: str) -> bool:
    """Delete a member from the group; return False if entries are still pending.

    Check and deletion are one step, because a cancelled read may still be running on
    the server and receive an entry after a separate check. Deleting the member would
    then remove that entry from the group, too.
    """
    try:
        ended: Any = await client.eval(_SCRIPT, 1, stream, group, member)
    except NoPermissionError:
        # A name that remains in the group does no harm.
        return True
    return bool(ended)
