"""Which replica reads which durable: one at a time, and all of them evenly.

A replica reads only a durable that it has created itself, a *generation*: it begins
above the ack floor of the last one, which is then deleted. So a replica that was frozen
while it pulled gets nothing more, and the next one gets all unsettled messages before
newer ones. The order of a key needs nothing else: while two replicas read, each of them
gets all messages in order, and receipts skip duplicates.

The rest only decides how soon and how evenly the work is done. Twice a second a replica
tells the others what it reads, and `divide` returns the same in all of them. NATS
itself reports that a replica is gone: its subject has no subscriber any more.
"""

import asyncio
import json
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Final

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from pillarbox.inbox.sources.nats.durable import Durable, durable_name
from pillarbox.inbox.sources.nats.pull import Pulls
from pillarbox.outbox.brokers.nats.connection import ApiError
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.gather import cancellable, gather

READS: Final = "pillarbox.reads."
_PAUSE: Final = 0.5
_SILENT: Final = 2 * _PAUSE
_ANSWER: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The state that a replica has announced to the others.

    Attributes:
        layouts: those of which it reads durables, if they are its share.
        reads: the durables that it reads or is about to read.
        aside: the layouts that it leaves to others, if there are any.
        lease: for how long it can be silent without losing what it reads, in seconds.
    """

    layouts: Collection[str]
    reads: Collection[str]
    aside: Collection[str] = ()
    lease: float = 0.0
    heard_at: float = field(default=0.0, compare=False)


def divide(
    layouts: Mapping[str, Collection[str]], replicas: Mapping[str, Replica]
) -> Mapping[str, str | None]:
    """Return which replica should read each durable, with as few changes as possible.

    The durables of each layout are divided evenly and, as far as that leaves a choice,
    so are all of them.

    Args:
        layouts: the durables of each layout.
    """
    readers: dict[str, str | None] = {
        line: id for id, replica in replicas.items() for line in replica.reads
    }
    total = Counter(readers.values())
    for layout, lines in sorted(layouts.items()):
        able = {
            id: layout in replica.aside
            for id, replica in sorted(replicas.items())
            if layout in replica.layouts
        }
        if able:
            _divide(lines, able, readers, total)
    return readers


def _divide(
    lines: Collection[str],
    able: Mapping[str, bool],
    readers: dict[str, str | None],
    total: Counter[str | None],
) -> None:
    count = Counter(readers.get(line) for line in lines)

    def load(id: str, more: int = 0) -> tuple[bool, int, int]:
        return able[id], count[id] + more, total[id] + more

    def give(line: str, id: str) -> None:
        for each, change in ((readers.get(line), -1), (id, 1)):
            count[each] += change
            total[each] += change
        readers[line] = id

    for line in lines:
        if line not in readers:
            give(line, min(able, key=load))
    while busy := [id for id in able if count[id]]:
        least, most = min(able, key=load), max(busy, key=load)
        if load(least, 1) >= load(most):
            return
        give(next(line for line in lines if readers[line] == most), least)


class Replicas:
    """Which durables this replica of a consumer reads.

    Args:
        wanted, default: the configuration of durables, as of `Durable.open`.
        on_taken: called when it has begun to read, with the number of messages that
            the durables of a new topic begin with.
        on_left: called with a durable that another replica reads from now on.

    Attributes:
        is_shared: whether all replicas read all durables at the same time.
    """

    def __init__(
        self,
        consumer: str,
        wanted: Mapping[str, Any],
        default: Mapping[str, Any],
        *,
        on_taken: Callable[[int], None],
        on_left: Callable[[Durable], None],
    ) -> None:
        self.is_shared = False
        self._id = secrets.token_hex(4)
        self._consumer = consumer
        self._subject = f"{READS}{consumer}"
        self._wanted, self._default = wanted, default
        self._on_taken, self._on_left = on_taken, on_left
        self._durables: dict[str, Durable] = {}
        self._others: dict[str, Replica] = {}
        self._claimed: set[str] = set()
        self._aside: dict[str, float] = {}
        self._pulls: Pulls | None = None
        self._turn = asyncio.Lock()
        self._heard_itself = asyncio.Event()
        self._news = asyncio.Event()
        self._began_at = self._looked_at = self._searched_at = 0.0

    @property
    def ack_wait(self) -> float:
        """The shortest `ack_wait` of the durables, in seconds."""
        return min(durable.ack_wait for durable in self._durables.values())

    @property
    def elsewhere(self) -> set[str]:
        """The topics that only other replicas read."""
        own = self._pulls.reading.values() if self._pulls else ()
        durables, others = self._durables.values(), self._read_by_others
        read = {each.topic for each in durables if each.line in others}
        return read - {each.topic for each in own}

    async def begin(self, pulls: Pulls, durables: Iterable[Durable]) -> None:
        """Join the others over a new connection, and read what none of them reads.

        Raises:
            ApiError: JetStream returned an error.
            BrokerUnavailableError: there was no answer, perhaps for want of a right.
            ConfigError: a durable isn't a pull consumer with explicit acks.
        """
        async with self._turn:
            self._pulls, connection = pulls, pulls.connection
            self._others.clear()
            self._heard_itself.clear()
            self._add(durables := list(durables))
            streams = {durable.stream for durable in durables}
            for line, durable in list(self._durables.items()):
                if durable.stream not in streams:
                    del self._durables[line]
                    self._on_left(durable)
            self._claimed &= self._durables.keys()
            for stream in streams:
                # A replica without this right must not create anything either.
                with suppress(ApiError):
                    await connection.ask(f"CONSUMER.DELETE.{stream}.none")
            self._began_at = self._looked_at = time.monotonic()
            # If nobody else can hear this, NATS says so before it returns the next.
            await self._tell(pulls, reply=pulls.alone)
            for subject in (self._subject, f"{self._subject}.{self._id}"):
                hear = partial(self._hear, pulls)
                await connection.client.subscribe(subject, cb=hear)
            await self._tell(pulls, asks=True)
            try:
                async with asyncio.timeout(_ANSWER):
                    await self._heard_itself.wait()
            except TimeoutError:
                reason = connection.error or f"no answer on {self._subject}"
                raise await connection.drop(reason) from None
            await self._find_shards(pulls)
            await self._share(pulls)

    async def run(self) -> None:
        """Share with the others and find new shards, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE):
                    await self._news.wait()
            self._news.clear()
            async with self._turn:
                pulls = self._pulls
                if pulls is None or pulls.connection.lost is not None:
                    continue
                try:
                    await self._look(pulls)
                except (OutboxError, ApiError, NatsError, OSError) as error:
                    await pulls.connection.drop(error)

    async def leave(self, pulls: Pulls) -> None:
        """Let the others read everything."""
        self._pulls = None
        await self._tell(pulls, Replica(layouts=(), reads=()))

    def wake(self) -> None:
        """Let `run` look at once."""
        self._news.set()

    def step_aside(self, line: str, seconds: float) -> None:
        """Leave a durable and others of its layout to others, if there are any."""
        if line in self._durables:
            self._aside[self._durables[line].layout] = time.monotonic() + seconds
            self.wake()

    @property
    def _read_by_others(self) -> set[str]:
        return {line for other in self._others.values() for line in other.reads}

    def _is_ready(self, pulls: Pulls) -> bool:
        # Until then, the others are telling what they read.
        has_waited = time.monotonic() >= self._began_at + _PAUSE
        return has_waited or pulls.is_alone or self.is_shared

    def _itself(self, pulls: Pulls) -> Replica:
        reading, now = pulls.reading.values(), time.monotonic()
        divides = not self.is_shared and self._is_ready(pulls)
        layouts = {each.layout for each in self._durables.values() if divides}
        # Sharing takes a durable from the replica that reads it alone, which must know
        # at once.
        others = set() if self.is_shared else self._read_by_others
        claimed = self._claimed - others
        return Replica(
            layouts=sorted(layouts),
            reads=sorted(claimed | {each.line for each in reading}),
            aside=[layout for layout, until in self._aside.items() if now < until],
            lease=max((each.ack_wait for each in reading), default=0.0),
        )

    async def _tell(
        self,
        pulls: Pulls,
        itself: Replica | None = None,
        *,
        asks: bool = False,
        reply: str = "",
    ) -> None:
        state = asdict(itself or self._itself(pulls)) | {"id": self._id, "asks": asks}
        payload = json.dumps(state).encode()
        await pulls.connection.client.publish(self._subject, payload, reply)

    async def _hear(self, pulls: Pulls, got: Msg) -> None:
        if not got.data:
            return  # another one checks that this one is there
        state = json.loads(got.data)
        id, asks = state.pop("id"), state.pop("asks")
        if id == self._id:
            self._heard_itself.set()
            return
        # A later version may tell more.
        known = {it.name: state[it.name] for it in fields(Replica) if it.name in state}
        other = Replica(**known | {"heard_at": time.monotonic()})
        if other != self._others.get(id):
            self._news.set()
        self._others[id] = other
        if asks:
            with suppress(NatsError):
                await self._tell(pulls)

    async def _look(self, pulls: Pulls) -> None:
        now = time.monotonic()
        if now >= self._looked_at + _PAUSE:
            self._looked_at = now
            await self._tell(pulls)
            if now >= self._searched_at + 2 * _PAUSE:
                await self._find_shards(pulls)
            await gather(
                self._check(pulls, id, other)
                for id, other in self._others.items()
                if other.heard_at < now - _SILENT
            )
        await self._share(pulls)

    async def _check(self, pulls: Pulls, id: str, other: Replica) -> None:
        """Forget another replica if it is gone, or is silent for too long."""
        client, lease = pulls.connection.client, max(other.lease, _SILENT)
        try:
            with cancellable():
                await client.request(f"{self._subject}.{id}", timeout=_PAUSE)
        except NoRespondersError:
            self._others.pop(id, None)
        except NatsTimeoutError:
            if self._others[id].heard_at < time.monotonic() - lease:
                self._others.pop(id, None)

    async def _find_shards(self, pulls: Pulls) -> None:
        self._searched_at = time.monotonic()
        for durable in list(self._durables.values()):
            topic, stream = durable.subject, durable.stream
            if Shard.named(topic).of > 1 or topic.endswith(">"):
                continue
            info = await pulls.connection.ask(
                f"STREAM.INFO.{stream}", {"subjects_filter": f"{topic}.*"}
            )
            found = map(Shard.named, info["state"].get("subjects") or ())
            for of in {shard.of for shard in found if shard.topic == topic}:
                self._add(
                    Durable(stream, durable_name(self._consumer, each.name), each.name)
                    for each in Shard(topic, of=of).all
                )

    def _add(self, durables: Iterable[Durable]) -> None:
        for durable in durables:
            if durable.line not in self._durables:
                durable.set_limits({**self._default, **self._wanted})
                self._durables[durable.line] = durable

    def _readers(self, pulls: Pulls) -> Mapping[str, str | None]:
        """Return which replica should read each durable."""
        if self.is_shared:
            return dict.fromkeys(self._durables, self._id)
        layouts: dict[str, list[str]] = defaultdict(list)
        for line, durable in self._durables.items():
            layouts[durable.layout].append(line)
        latest = time.monotonic() - _SILENT
        others = {
            id: other if other.heard_at >= latest else replace(other, layouts=())
            for id, other in self._others.items()
        }
        return divide(layouts, others | {self._id: self._itself(pulls)})

    async def _share(self, pulls: Pulls) -> None:
        """Leave what others should read, and take what this replica should read."""
        taken: list[Durable] = []
        while True:
            readers = self._readers(pulls)
            for line, durable in self._durables.items():
                if durable.generation and readers.get(line, self._id) != self._id:
                    pulls.reading.pop(durable.place, None)
                    durable.generation = ""
                    self._on_left(durable)
            own = {line for line, id in readers.items() if id == self._id}
            if own != self._claimed:
                self._claimed = own
                await self._tell(pulls)
            places = {line: self._durables[line].place for line in own}
            new = [line for line in own if places[line] not in pulls.reading]
            if not new or not self._is_ready(pulls):
                break
            durable = self._durables[min(new)]
            created_at = durable.created_at
            if not await durable.open(
                pulls.connection, self._wanted, self._default, self.is_shared
            ):
                break
            if self.is_shared and created_at not in {"", durable.created_at}:
                # It would take acks of the last one of its name for its own.
                self._on_left(durable)
            pulls.reading[durable.place] = durable
            taken.append(durable)
        if taken:
            # Shards are old only with their topic: a relay can have begun with them.
            old = [each for each in taken if each.old is not None]
            topics = {it.topic for it in old if Shard.named(it.subject).of == 1}
            self._on_taken(sum(it.old or 0 for it in old if it.topic in topics))
