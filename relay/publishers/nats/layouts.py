"""Whether a topic may be published in the relay's number of shards, its layout.

Each layout of a topic is in order, but nothing keeps the order between two of them. So
the first message waits until what other layouts held by then is settled everywhere.
"""

from collections.abc import AsyncIterator, Mapping, Set
from datetime import timedelta
from typing import Any, Final

from outbox.brokers.nats.connection import NatsConnection
from outbox.brokers.nats.message import subject_problem
from outbox.brokers.shards import Shard
from outbox.errors import shorten
from relay.publisher import Nacked

_PAUSE: Final = timedelta(seconds=1)


class Layouts:
    """What is known about the layouts of topics, over one connection.

    Args:
        stream: the only one that may be used.
        of: the number of shards in which the relay publishes.
    """

    def __init__(self, connection: NatsConnection, stream: str | None, of: int) -> None:
        self._ask = connection.ask
        self._stream = stream
        self._of = of
        self._ready: set[str] = set()
        self._ends: dict[str, int] = {}

    async def refused(self, topics: Set[str]) -> dict[str, Nacked]:
        """Return which of these topics can't be published now, and why.

        Raises:
            ApiError: JetStream returned an error.
            BrokerUnavailableError: there was no answer, perhaps for want of a right.
        """
        problems = {each: await self._problem(each) for each in topics - self._ready}
        return {topic: problem for topic, problem in problems.items() if problem}

    async def _problem(self, topic: str) -> Nacked | None:
        if problem := subject_problem(topic):
            return Nacked(problem, permanent=True)
        if Shard.named(topic).of > 1:
            return Nacked(
                f"topic {shorten(topic)} is named like a shard, as which consumers "
                "would read it: rename it",
                permanent=True,
            )
        streams = await self._streams(topic)
        if not streams or self._stream not in {None, *streams}:
            return None  # The answer to the message says so.
        stream = self._stream or streams[0]
        info = await self._ask(f"STREAM.INFO.{stream}")
        retention = info["config"]["retention"]
        if self._of > 1 and stream not in await self._streams(f"{topic}.*"):
            return Nacked(
                f"stream {stream!r} doesn't capture the shards of topic "
                f"{shorten(topic)}: add {shorten(f'{topic}.*')} to its subjects"
            )
        if self._of > 1 and retention == "interest":
            return Nacked(
                f"stream {stream!r} has interest retention, so it would drop what is "
                "published in a shard before its consumers know the shard: give it the "
                "retention limits, or omit shards="
            )
        end = self._ends.setdefault(topic, info["state"]["last_seq"])
        if retention == "workqueue":  # It keeps only what isn't settled.
            info = await self._ask(f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
            subjects = info["state"].get("subjects") or ()
            waits_for = [each for each in subjects if self._is_other(each, topic)]
        else:
            waits_for = [
                each["name"]
                async for each in self._consumers(stream)
                if self._holds_up(each, topic, end)
            ]
        if not waits_for:
            self._ready.add(topic)
            return None
        return Nacked(
            f"topic {shorten(topic)} was published in another number of shards: the "
            f"first message in {self._of} waits until all earlier ones are settled; on "
            f"stream {stream!r}, {', '.join(waits_for)} still has some",
            retry_after=_PAUSE,
        )

    async def _streams(self, subject: str) -> list[str]:
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

    def _holds_up(self, info: Mapping[str, Any], topic: str, end: int) -> bool:
        """Return whether a durable hasn't settled what another layout held."""
        config = info["config"]
        filters = config.get("filter_subjects") or [config.get("filter_subject", "")]
        # As long as nothing is acked, NATS shows no floor.
        began = config.get("opt_start_seq", 1) - 1
        return (
            "durable_name" in config
            and any(self._is_other(each, topic) for each in filters)
            and (info["num_pending"] > 0 or info["num_ack_pending"] > 0)
            and max(began, info["ack_floor"]["stream_seq"]) < end
        )
