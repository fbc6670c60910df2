"""Whether messages may be published in the relay's number of shards, its layout.

Each layout of a topic is in order, but nothing keeps the order between two of them. So
the first message of a lane waits until what other layouts held by then is settled
everywhere. Before that, a relay with another layout can have published the lane.
"""

import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Set
from datetime import timedelta
from typing import Any, Final, TypeAlias

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.brokers.nats.connection import ApiError, NatsConnection
from pillarbox.outbox.brokers.nats.message import OF_CONSUMER, subject_problem
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import shorten
from pillarbox.outbox.lane import lane_of
from pillarbox.outbox.message import Message
from pillarbox.relay.publisher import Nacked

_MISSING: Final = 404
_PAUSE: Final = timedelta(seconds=1)
_SILENCE: Final = 10.0
"""Seconds after which another relay can have published the lane."""

Line: TypeAlias = tuple[str, int]
"""A topic and a lane."""


def line_of(message: Message) -> Line:
    """Return the line of a message: one relay at a time publishes it."""
    return message.topic, lane_of(message.key, message.id, message.priority)


class Layouts:
    """The known layouts of topics, over one connection.

    Args:
        stream: the only one that may be used.
        of: the number of shards in which the relay publishes.
    """

    def __init__(self, connection: NatsConnection, stream: str | None, of: int) -> None:
        self._ask = connection.ask
        self._stream = stream
        self._of = of
        self._used_at: BoundedDict[Line, float] = BoundedDict()
        self._streams: BoundedDict[str, tuple[str, bool]] = BoundedDict()
        self._waiting: BoundedDict[str, tuple[int, Set[Line]]] = BoundedDict()

    async def refused(self, lines: Set[Line]) -> dict[Line, Nacked]:
        """Return which of these lines can't be published now, and why.

        Raises:
            ApiError: JetStream returned an error.
            BrokerUnavailableError: there was no answer, perhaps for want of a right.
        """
        now = time.monotonic()
        refused: dict[Line, Nacked] = {}
        latest = now - _SILENCE
        new = {it for it in lines if self._used_at.get(it, -math.inf) <= latest}
        for topic in {topic for topic, _ in new}:
            of_topic = {line for line in new if line[0] == topic}
            try:
                problem = await self._problem(topic, of_topic)
            except ApiError as error:
                if error.code != _MISSING:
                    raise
                # The stream is gone; another one may capture the topic.
                self._streams.pop(topic, None)
                problem = await self._problem(topic, of_topic)
            if problem is not None:
                refused |= dict.fromkeys(of_topic, problem)
        for line in lines - refused.keys():
            if line[0] in self._streams:
                self._used_at[line] = now
        return refused

    async def _problem(self, topic: str, lines: Set[Line]) -> Nacked | None:
        if topic not in self._streams:
            if (problem := await self._find_stream(topic)) is not None:
                return problem
            if topic not in self._streams:
                return None  # The answer to the message says that there is none.
        stream, is_queue = self._streams[topic]
        filled, end = [], 0
        for subject in (f"{topic}.*", topic)[: min(self._of, 2)]:
            body = {"subjects_filter": subject}
            info = await self._ask(f"STREAM.INFO.{stream}", body)
            found, end = info["state"].get("subjects") or (), info["state"]["last_seq"]
            filled += [each for each in found if self._is_other(each, topic)]
        waits_for = filled  # A work queue has only what isn't settled.
        if filled and not is_queue:
            since, waiting = self._waiting.get(topic, (0, frozenset()))
            if not lines <= waiting:
                since, waiting = end, waiting | lines
                self._waiting[topic] = since, waiting
            consumers = [each async for each in self._consumers(stream)]
            waits_for = [
                *(it["name"] for it in consumers if self._holds_up(it, topic, since)),
                *_unread(consumers, topic, filled),
            ]
        if not waits_for:
            self._waiting.pop(topic, None)
            return None
        return Nacked(
            f"topic {shorten(topic)}: waiting for its messages in other shards to be"
            f" settled before shards={self._of} applies; unsettled on stream"
            f" {stream!r}: {', '.join(waits_for)}",
            retry_after=_PAUSE,
        )

    async def _find_stream(self, topic: str) -> Nacked | None:
        if problem := subject_problem(topic):
            return Nacked(problem, permanent=True)
        if Shard.named(topic).of > 1:
            return Nacked(
                f"topic {shorten(topic)}: reserved for a shard of a topic",
                permanent=True,
            )
        streams = await self._capturing(topic)
        if not streams or self._stream not in {None, *streams}:
            return None
        stream = self._stream or streams[0]
        if self._of > 1 and stream not in await self._capturing(f"{topic}.*"):
            return Nacked(
                f"stream {stream!r} doesn't capture the shards of topic "
                f"{shorten(topic)}: add {shorten(f'{topic}.*')} to its subjects"
            )
        info = await self._ask(f"STREAM.INFO.{stream}")
        retention = info["config"]["retention"]
        if self._of > 1 and retention == "interest":
            return Nacked(
                f"stream {stream!r} has interest retention and would drop messages of"
                " a shard that no consumer reads yet: set its retention to limits, or"
                " omit shards="
            )
        self._streams[topic] = stream, retention == "workqueue"
        return None

    async def _capturing(self, subject: str) -> list[str]:
        answer = await self._ask("STREAM.NAMES", {"subject": subject})
        return answer.get("streams") or []

    async def _consumers(self, stream: str) -> AsyncIterator[Mapping[str, Any]]:
        offset, total = 0, 1
        while offset < total:
            body = {"offset": offset}
            answer = await self._ask(f"CONSUMER.LIST.{stream}", body)
            for each in answer["consumers"] or ():
                yield each
            offset, total = offset + answer["limit"], answer["total"]

    def _is_other(self, subject: str, topic: str) -> bool:
        shard = Shard.named(subject)
        return shard.topic == topic and shard.of != self._of

    def _holds_up(self, info: Mapping[str, Any], topic: str, since: int) -> bool:
        """Return whether a durable hasn't settled what another layout held."""
        config = info["config"]
        # As long as nothing is acked, NATS shows no floor.
        began = config.get("opt_start_seq", 1) - 1
        return (
            "durable_name" in config
            and any(self._is_other(each, topic) for each in _filters(config))
            and (info["num_pending"] > 0 or info["num_ack_pending"] > 0)
            and max(began, info["ack_floor"]["stream_seq"]) < since
        )


def _unread(
    consumers: Iterable[Mapping[str, Any]], topic: str, subjects: Iterable[str]
) -> Iterator[str]:
    """Name the consumers that read a topic, and haven't begun with some subjects."""
    read: dict[str, set[str]] = defaultdict(set)
    for info in consumers:
        for each in _filters(info["config"]):
            if Shard.named(each).topic == topic:
                read[info["config"].get("description", "")].add(each)
    for consumer, known in read.items():
        if consumer.startswith(OF_CONSUMER):
            yield from (f"{consumer} ({it})" for it in {*subjects} - known)


def _filters(config: Mapping[str, Any]) -> Collection[str]:
    return config.get("filter_subjects") or [config.get("filter_subject", "")]
