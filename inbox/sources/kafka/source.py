"""A source that reads Kafka: a topic is a Kafka topic, a consumer is a group.

Kafka keeps one offset for each Kafka partition, so only the settled messages before the
first unsettled one are committed. Nacked messages wait here, together with later
messages of their key. When a Kafka partition is to move to another replica, this one
releases it once all its deliveries are settled, or after `handover`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Final, Self

import confluent_kafka
from confluent_kafka import Message as Record

from pillarbox.inbox.consuming.backlog import Backlog
from pillarbox.inbox.consuming.rollout import begins_at_oldest
from pillarbox.inbox.source import Abilities, Delivery, EntryDelivery
from pillarbox.inbox.sources.kafka.group import look_around
from pillarbox.inbox.sources.kafka.log import Entry, Log, written_at_of
from pillarbox.inbox.sources.kafka.reader import Part, Reader, require_topics
from pillarbox.outbox.brokers.kafka.connection import (
    check_config,
    kafka_config,
    kafka_unavailable,
)
from pillarbox.outbox.brokers.kafka.message import message_of
from pillarbox.outbox.brokers.kafka.options import KafkaOptions
from pillarbox.outbox.errors import BrokerUnavailableError, CredentialsError

_AT_ONCE: Final = 500
_DEFAULTS: Final = {
    "auto.commit.interval.ms": 100,
    "auto.offset.reset": "earliest",
    "fetch.queue.backoff.ms": 50,
    "queued.max.messages.kbytes": 16_384,
    # New Kafka partitions, and topics that are new or come back, are found within this
    # time; librdkafka's default is 5 minutes.
    "topic.metadata.refresh.interval.ms": 5000,
}
_DOUBT: Final = 3.0
"""How long a broker can take to answer before it counts as unreachable, in seconds."""
_COOPERATIVE: Final = {"partition.assignment.strategy": "cooperative-sticky"}


class KafkaSource:
    """A source of the records in one consumer's topics.

    Args:
        url: `kafka://host:port,…/?option=…`, with the options of `KafkaOptions` and
            librdkafka's own.
        consumer: the name of the group, which starts with the oldest records.
        topics: names, or prefixes followed by `*`; new topics are found within 5 s.
        poll_interval: how long one `receive` waits.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        ours = {"group.id": consumer, "enable.auto.offset.store": False}
        ours["enable.auto.commit"] = True
        address, options = KafkaOptions.parse(url)
        self._name, config = kafka_config(address, ours)
        defaults: dict[str, Any] = dict(_DEFAULTS)
        if config.get("group.protocol", "classic") == "classic":
            defaults |= _COOPERATIVE
        self._config: Mapping[str, Any] = {**defaults, **config}
        check_config(self._name, confluent_kafka.Consumer, self._config)
        self._warnings: list[str] = []
        self._members: list[str] = []
        self._backlog: Backlog[Entry] = Backlog()
        self.abilities = Abilities(
            leave_out=self._backlog.leave_out,
            warnings=lambda: self._warnings,
            identify=self._identify,
            members=lambda: self._members,
            pauses=self._backlog.leave_out_paused,
        )
        self._topics = tuple(topics)
        self._poll = poll_interval.total_seconds()
        self._handover = options.handover.total_seconds()
        self._place = count()
        self._room = _AT_ONCE
        self._logs: dict[Part, Log] = {}
        self._moved: set[Log] = set()
        self._wakeup = asyncio.Event()
        self._reader: Reader | None = None

    def _identify(self, id: str) -> None:
        name = self._config["client.id"].removesuffix(f"-{id}")
        self._config = {**self._config, "client.id": f"{name}-{id}"}

    async def __aenter__(self) -> Self:
        """Join the group.

        Raises:
            BrokerUnavailableError: no broker is reachable.
            ConfigError: a topic is missing, or the brokers reject the connection.
        """
        reader = self._reader = self._new_reader()
        try:
            await require_topics(reader, self._topics, self._name)
            old, self._members = await asyncio.to_thread(
                look_around, self._config, self._topics
            )
        except BaseException as error:
            await self.__aexit__()
            if reader.refusal is not None and isinstance(error, Exception):
                raise CredentialsError(
                    f"broker {self._name} rejected the connection: {reader.refusal}"
                ) from error
            raise
        if old:
            self._warnings = [begins_at_oldest(self._config["group.id"], old)]
        reader.join()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Commit the acked messages, return all others, and leave the group."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._store(reader)
            self.lost(list(self._logs))
            await reader.close()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Return new deliveries, and nacked ones that are due."""
        until = time.monotonic() + self._backlog.patience(self._poll)
        while True:
            if entries := self._take(limit):
                return [EntryDelivery(self, entry, entry) for entry in entries]
            await self._check_reader()
            patience = until - time.monotonic()
            if patience <= 0:
                return []
            self._wakeup.clear()
            await self._backlog.wait_for(self._wakeup, patience)

    def acked(self, entry: Entry) -> None:
        """Settle an entry."""
        log = entry.log
        if log.ours and log.offsets.settle(entry.offset):
            if not self._moved:
                asyncio.get_running_loop().call_soon(self._store)
            self._moved.add(log)
        self._landed(log)

    def handed_back(self, entry: Entry, delay: timedelta) -> bool:
        """Return False: only a rebalance brings an entry to another replica."""
        return False

    def nacked(self, entry: Entry, delay: timedelta | None) -> None:
        """Return an entry to its place in the order, or delay it."""
        if entry.log.ours and entry.log.landed is None:
            if delay is None:
                self._backlog.add(entry)
            else:
                entry.attempts += 1
                self._backlog.defer(entry, delay.total_seconds())
            self._update_room()
            self._wakeup.set()
        self._landed(entry.log)

    def assigned(self, parts: Sequence[Part]) -> None:
        """Start reading from Kafka partitions."""
        for part in parts:
            self._logs[part] = Log(part)

    def arrived(self, records: Sequence[Record]) -> None:
        """Add records to the backlog."""
        for record in records:
            topic, number, offset = record.topic(), record.partition(), record.offset()
            assert topic is not None
            assert number is not None
            assert offset is not None
            log = self._logs.get((topic, number))
            if log is None or log.landed is not None:
                continue
            if not log.offsets.follows(offset):
                # The log was truncated, and its offsets are being reused.
                self.lost([log.part])
                log = self._logs[log.part] = Log(log.part)
            log.offsets.add(offset)
            raw = record.key()
            key = None if raw is None else raw.decode(errors="surrogateescape")
            message, problem = message_of(record)
            written_at = written_at_of(record)
            self._backlog.add(
                Entry(
                    log=log,
                    place=next(self._place),
                    key=key,
                    offset=offset,
                    message=message,
                    problem=problem,
                    history=log.history_of(written_at),
                    published_at=written_at,
                )
            )
        self._update_room()
        self._wakeup.set()

    def leave(self, parts: Sequence[Part], left: Callable[[], None]) -> None:
        """Stop delivering from Kafka partitions; call `left` once all is settled."""
        logs = [self._logs[part] for part in parts if part in self._logs]
        for log in logs:
            log.landed = lambda: self._leave_if_landed(logs, left)
        self._leave_if_landed(logs, left)

    def lost(self, parts: Sequence[Part]) -> None:
        """Forget Kafka partitions; messages in flight won't be committed."""
        for part in parts:
            log = self._logs.pop(part, None)
            if log is not None:
                log.ours = False

    def changed(self) -> None:
        """Make `receive` check the reader."""
        self._wakeup.set()

    def _leave_if_landed(self, logs: Sequence[Log], left: Callable[[], None]) -> None:
        if not any(log.in_flight and log.ours for log in logs):
            self._store()
            left()

    def _landed(self, log: Log) -> None:
        log.in_flight -= 1
        if log.landed is not None:
            log.landed()

    def _store(self, reader: Reader | None = None) -> None:
        reader = reader or self._reader
        moved, self._moved = self._moved, set()
        positions = {
            log.part: log.offsets.position
            for log in moved
            if log.ours and log.offsets.position is not None
        }
        if positions and reader is not None:
            reader.store(positions)

    def _new_reader(self) -> Reader:
        return Reader(
            self._config,
            self._name,
            self._topics,
            self,
            room=lambda: self._room,
            is_paused=self._backlog.is_paused,
            handover=self._handover,
        )

    def _take(self, limit: int) -> list[Entry]:
        ours: list[Entry] = []
        while taken := self._backlog.take(limit - len(ours)):
            for entry in taken:
                if entry.log.ours and entry.log.landed is None:
                    entry.log.in_flight += 1
                    ours.append(entry)
        self._update_room()
        return ours

    def _update_room(self) -> None:
        self._room = self._backlog.room if len(self._backlog) else _AT_ONCE

    async def _check_reader(self) -> None:
        reader = self._reader
        if reader is None:
            raise BrokerUnavailableError(f"the source for {self._name} is closed")
        if reader.down or (reader.in_doubt and not reader.is_leaving):
            now = asyncio.get_running_loop().time()
            await reader.topics(now + _DOUBT)
        trouble, reader.trouble = reader.trouble, None
        if reader.ended.is_set():
            trouble = trouble or "the client ended"
            self.lost(list(self._logs))
            self._reader = self._new_reader()
            self._reader.join()
        if trouble is not None:
            raise kafka_unavailable(self._name, trouble)
