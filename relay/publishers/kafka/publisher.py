"""A publisher for Kafka: a topic maps to a Kafka topic, a key to a Kafka partition.

The producer is idempotent and preserves the order within a Kafka partition. If the
broker refuses a record only after it was sent, the records are sent again one by one,
so that other records in the same request aren't blamed and later records of its key
don't overtake it.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Self

import confluent_kafka
from confluent_kafka import KafkaError

from pillarbox.outbox.brokers.kafka.connection import (
    check_config,
    kafka_config,
    kafka_unavailable,
    reason_of,
)
from pillarbox.outbox.brokers.kafka.message import NewRecord, problem_of, record_of
from pillarbox.outbox.brokers.kafka.options import KafkaOptions
from pillarbox.outbox.errors import (
    BrokerTimeoutError,
    BrokerUnavailableError,
    CredentialsError,
)
from pillarbox.outbox.message import Message
from pillarbox.relay.answers import Answers
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large
from pillarbox.relay.publishers.kafka.producer import Producer

# Kafka's default for message.max.bytes.
_MAX_RECORD_BYTES: Final = 1_048_588
_DEFAULTS: Final = {
    "linger.ms": 1,
    "message.max.bytes": _MAX_RECORD_BYTES,
    # How long records wait for a missing topic. All topics are looked up before, so it
    # was deleted, and the default of 30 s would exceed `timeout`.
    "topic.metadata.propagation.max.ms": 2000,
}
_OURS: Final = {
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    # A broker that has nothing of a producer in a partition takes any sequence number.
    # So if it refuses the first request while another one is in flight, it takes the
    # second one, and librdkafka then reports the refused records as stored.
    "max.in.flight": 1,
    "max.in.flight.requests.per.connection": 1,  # the same
    # If a single record timed out, the next one would overtake it.
    "message.timeout.ms": 0,
    "partitioner": "murmur2_random",
}
# If each record waits for the report on the previous one, that alone preserves order,
# and a refusal doesn't kill the producer; replacing one takes up to a second.
_ALONE: Final = {
    "enable.gapless.guarantee": False,
    "enable.idempotence": False,
    "acks": "all",
    "max.in.flight": 1,
    "linger.ms": 0,
}
_CREATION: Final = 2.0
_REFUSED_FOR: Final = 5.0
_POSTPONED_FOR: Final = timedelta(seconds=5)
_FOR_EVER: Final = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.INVALID_RECORD,
}
_ABOUT_THE_TOPIC: Final = {
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_REFUSALS: Final = _FOR_EVER | _ABOUT_THE_TOPIC | {KafkaError.POLICY_VIOLATION}
_AGAIN: Final = {
    KafkaError._DESTROY,
    KafkaError._FATAL,
    KafkaError._GAPLESS_GUARANTEE,
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
}


class KafkaPublisher:
    """Publishes with an idempotent producer.

    Args:
        url: `kafka://host:port,…/?option=…`, with the options of `KafkaOptions` and of
            librdkafka.

    Raises:
        ConfigError: the URL can't be used.
    """

    def __init__(self, url: str) -> None:
        address, options = KafkaOptions.parse(url)
        self.identity = KafkaOptions.identity(url)
        self._name, config = kafka_config(address, _OURS)
        self._config: Mapping[str, Any] = {**_DEFAULTS, **config}
        check_config(self._name, confluent_kafka.Producer, self._config)
        self._max_record_bytes = int(self._config["message.max.bytes"])
        self._max_payload_bytes = options.max_payload_bytes or self._max_record_bytes
        self._timeout = options.timeout.total_seconds()
        self._producers: dict[bool, Producer] = {}
        self._ending: set[Producer] = set()
        self._entered = False
        self._known: set[str] = set()
        self._refused: dict[str, tuple[float, Nacked]] = {}
        self._leaderless: dict[str, tuple[int, Collection[int]]] = {}
        self._answered_at = 0.0

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            BrokerUnavailableError: no broker is reachable.
            ConfigError: the brokers reject the credentials.
        """
        self._entered = True
        producer = self._current()
        try:
            topics = await producer.topics(self._until())
        except BaseException as error:
            await self.__aexit__()
            if producer.refusal is not None and isinstance(error, Exception):
                raise CredentialsError(
                    f"broker {self._name} rejected the connection: {producer.refusal}"
                ) from error
            raise
        self._known.update(
            name
            for name, topic in topics.items()
            if topic.error is None and not _leaderless(topic)
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect, and drop unconfirmed records."""
        self._entered = False
        producers = self._ending.union(self._producers.values())
        self._producers = {}
        for producer in producers:
            # Before the await, because a cancelled task may never take its first step.
            producer.abandon()
        await asyncio.gather(*(producer.close() for producer in producers))

    async def check(self) -> None:
        """Request the metadata of an existing topic.

        Raises:
            BrokerUnavailableError: no broker responds.
        """
        # Ask only about a known topic: asking about another might create it.
        topic = next(iter(self._known), None)
        await self._current().topics(self._until(), topic)

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Send the batch in order, and wait for the delivery reports.

        Messages to a topic are nacked while it is missing, or while the user lacks the
        privilege to write to it; later messages of their keys in the batch are held
        back. Messages to a Kafka partition that has no leader, or that stores nothing
        while others do, are postponed.

        Raises:
            BrokerUnavailableError: no answer arrived. The next call reconnects.
        """
        now = asyncio.get_running_loop().time
        started, until = now(), self._until()
        records = [record_of(message) for message in batch]
        answers: Answers[Confirmation] = Answers(batch, map(self._check, records))
        for topic in {records[i].topic for i in answers.left} - self._known:
            await self._check_topic(topic, until)
        for i in answers.left:
            answers.given[i] = self._refusal(records[i])
        alone = False
        while pending := answers.hold_back():
            if now() >= until:
                # A topic may have been deleted since, or a leader have failed.
                self._known.clear()
                late = f"no answer within {self._timeout:g} s"
                if self._answered_at < started:
                    raise BrokerTimeoutError(str(kafka_unavailable(self._name, late)))
                for i in pending:
                    answers.give(i, Nacked(late, retry_after=_POSTPONED_FOR))
                break
            sent = pending[:1] if alone else pending
            producer = self._current(alone=alone)
            errors = await producer.send([records[i] for i in sent], until)
            if not alone and any(error is not None for error in errors):
                producer.abandon()
            next_alone = alone
            for i, error in zip(sent, errors, strict=True):
                if error is None:
                    answers.give(i, Acked())
                elif error.code() in _REFUSALS:
                    if len(sent) == 1 or error.code() in _ABOUT_THE_TOPIC:
                        answers.give(i, self._refuse(records[i], error))
                    next_alone = True
                elif error.code() not in _AGAIN:
                    raise kafka_unavailable(self._name, reason_of(error))
            if any(answers.given[i] for i in sent):
                self._answered_at = now()
            alone = next_alone
        return answers.complete()

    def _until(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    def _current(self, *, alone: bool = False) -> Producer:
        if not self._entered:
            raise BrokerUnavailableError(f"{self._name}: the publisher is closed")
        producer = self._producers.get(alone)
        if producer is None or producer.dead:
            self._ending = {each for each in self._ending if not each.ended.is_set()}
            if producer is not None:
                self._ending.add(producer)
            config = {**self._config, **_ALONE} if alone else self._config
            producer = self._producers[alone] = Producer(config, self._name)
        return producer

    def _check(self, record: NewRecord) -> Nacked | None:
        """Nack a record that is invalid."""
        if too_large := nack_too_large(record.value, self._max_payload_bytes):
            return too_large
        problem = problem_of(record, self._max_record_bytes)
        return None if problem is None else Nacked(problem, permanent=True)

    def _refusal(self, record: NewRecord) -> Nacked | None:
        """Nack a record to a topic that is refused or a partition without a leader."""
        until, refusal = self._refused.get(record.topic, (0.0, None))
        if until > time.monotonic():
            return refusal
        count, leaderless = self._leaderless.get(record.topic, (0, ()))
        if record.key is None or not leaderless:
            return None
        number = confluent_kafka.murmur2(record.key, count)
        if number not in leaderless:
            return None
        reason = f"Kafka partition {number} of topic {record.topic} has no leader"
        return Nacked(reason, retry_after=_POSTPONED_FOR)

    async def _check_topic(self, topic: str, until: float) -> None:
        """Look up a topic before anything is sent to it."""
        if self._refused.get(topic, (0.0,))[0] > time.monotonic():
            return
        now = asyncio.get_running_loop().time
        creation = min(until, now() + _CREATION)
        while True:
            found = (await self._current().topics(until, topic))[topic]
            error = found.error
            code = None if error is None else error.code()
            if code != KafkaError.UNKNOWN_TOPIC_OR_PART or now() >= creation:
                break
            # The request itself may have created it.
            await asyncio.sleep(0.1)
        if error is not None and code in _ABOUT_THE_TOPIC:
            self._refuse_topic(topic, error)
            return
        self._leaderless[topic] = (len(found.partitions), _leaderless(found))
        if not _leaderless(found):
            self._known.add(topic)

    def _refuse(self, record: NewRecord, error: KafkaError) -> Nacked:
        if error.code() in _ABOUT_THE_TOPIC:
            return self._refuse_topic(record.topic, error)
        return Nacked(
            f"Kafka refused it: {reason_of(error)}", permanent=error.code() in _FOR_EVER
        )

    def _refuse_topic(self, topic: str, error: KafkaError) -> Nacked:
        self._known.discard(topic)
        nacked = Nacked(
            f"Kafka refuses topic {topic}: {reason_of(error)}",
            permanent=error.code() in _FOR_EVER,
        )
        self._refused[topic] = (time.monotonic() + _REFUSED_FOR, nacked)
        return nacked


def _leaderless(topic: Any) -> Collection[int]:
    """Return the Kafka partitions of a topic that have no leader."""
    return {number for number, each in topic.partitions.items() if each.leader < 0}
