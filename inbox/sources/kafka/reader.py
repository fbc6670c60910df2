"""A librdkafka consumer, and the thread that polls it.

The thread polls continuously, whatever the handlers do, so Kafka never considers the
consumer dead. It pauses the partitions of paused topics, and all partitions when there
is no room for more messages, and keeps polling. Only this thread calls the client: the
client allows one call at a time, and a thread that polls continuously would leave other
threads no chance to call it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from pillarbox.outbox.brokers.kafka.connection import kafka_unavailable, reason_of
from pillarbox.outbox.errors import ConfigError, shorten

if TYPE_CHECKING:
    from pillarbox.inbox.sources.kafka.source import KafkaSource

Part: TypeAlias = tuple[str, int]
"""A Kafka partition: its topic and its number."""

_POLL: Final = 0.05
_SLICE: Final = 1.0
_AT_ONCE: Final = 500
_FULL_WAIT: Final = 0.02
_FULL_BEFORE_PAUSE: Final = 1.0
_LAST_WAIT: Final = 10.0
_HASTE: Final = 2.0
# Permanent commit errors. Any other is temporary, or a rebalance resolves it.
_FORBIDDEN: Final = {
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.INVALID_COMMIT_OFFSET_SIZE,
}


class Reader:
    """A member of a consumer group, for one event loop.

    Args:
        config: librdkafka's configuration; the callbacks are set here.
        name: the broker's name, for errors.
        topics: names, or prefixes followed by `*`.
        listener: its methods are called in order, on the event loop: `assigned`,
            `arrived`, `leave`, `lost`, and `changed` if an attribute of the reader did.
        room: returns how many more messages can arrive; called by the thread.
        is_paused: returns whether a topic is paused; called by the thread.
        handover: how long to wait for `left`.

    Attributes:
        trouble: an error of the group or of a topic, for the source to raise and clear.
        down: whether all brokers are unreachable, according to librdkafka.
        in_doubt: whether a connection failed since a broker has answered. librdkafka
            doesn't always report that all are down (its issues 2259 and 5126), so the
            source asks.
        is_leaving: whether partitions are being handed over; until then the thread runs
            no commands.
        refusal: why the brokers rejected the credentials, if they did.
        ended: set when the thread has ended and the connections are closed.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        topics: Sequence[str],
        listener: "KafkaSource",
        *,
        room: Callable[[], int],
        is_paused: Callable[[str], bool],
        handover: float,
    ) -> None:
        self.trouble: str | None = None
        self.down = False
        self.in_doubt = False
        self.is_leaving = False
        self.refusal: str | None = None
        self.ended = asyncio.Event()
        self._name = name
        self._topics = list(topics)
        self._listener = listener
        self._room = room
        self._is_paused = is_paused
        self._assigned_topics: set[str] = set()
        self._handover = handover
        self._loop = asyncio.get_running_loop()
        self._reason = "no broker answered"
        self._paused: set[str] | None = set()
        self._full_since: float | None = None
        self._posted = 0
        self._arrived = 0
        self._stop = threading.Event()
        self._commands: deque[Callable[[confluent_kafka.Consumer], None]] = deque()
        self._positions: deque[list[TopicPartition]] = deque()
        self._client = confluent_kafka.Consumer(
            {
                **config,
                "error_cb": self._on_error,
                "on_commit": self._on_commit,
            }
        )
        threading.Thread(target=self._run, name="kafka", daemon=True).start()

    def join(self) -> None:
        """Join the group."""
        self._commands.append(
            lambda client: client.subscribe(
                [_subscription(topic) for topic in self._topics],
                on_assign=self._assigned,
                on_revoke=self._revoked,
                on_lost=self._lost,
            )
        )

    async def topics(
        self, until: float, topic: str | None = None
    ) -> Mapping[str, KafkaError | None]:
        """Return the topics, or one of them, each with its error, if any.

        Raises:
            BrokerUnavailableError: no broker answers before `until`, a time on the
                loop's clock.
        """
        named = {} if topic is None else {"topic": topic}
        while not self.ended.is_set():
            answer: asyncio.Future[Any] = self._loop.create_future()

            def ask(
                client: confluent_kafka.Consumer, answer: asyncio.Future[Any] = answer
            ) -> None:
                if answer.done():
                    return  # nobody waits for it any more
                try:
                    found = client.list_topics(timeout=_SLICE, **named)
                except KafkaException as error:
                    self._post(_answer, answer, error)
                else:
                    self._post(_answer, answer, found.topics)

            self._commands.append(ask)
            await asyncio.wait({answer}, timeout=_SLICE + _HASTE)
            if not answer.done():
                answer.cancel()
            elif isinstance(answer.result(), KafkaException):
                if not (self.down or self.in_doubt):
                    self._reason = reason_of(answer.result())
            else:
                self.down = self.in_doubt = False
                return {name: each.error for name, each in answer.result().items()}
            if self.down or self._loop.time() >= until:
                break
        raise kafka_unavailable(self._name, self._reason)

    def store(self, positions: Mapping[Part, int]) -> None:
        """Schedule the commit of positions; those of lost partitions are skipped."""
        offsets = [TopicPartition(*part, at) for part, at in positions.items()]
        self._positions.append(offsets)

    async def close(self) -> None:
        """Commit the stored positions, and leave the group."""
        self._stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WAIT):
                await self.ended.wait()

    def _run(self) -> None:
        client = self._client
        try:
            while not self._stop.is_set():
                self._run_commands(client)
                self._read(client)
            self._run_commands(client)
        except KafkaException as error:
            self.trouble = reason_of(error)
        finally:
            with suppress(KafkaException, RuntimeError):
                client.close()
            self._post(self.ended.set)
            self._post(self._listener.changed)

    def _run_commands(self, client: confluent_kafka.Consumer) -> None:
        self._store_positions(client)
        while self._commands:
            command = self._commands.popleft()
            with suppress(KafkaException):
                command(client)

    def _store_positions(self, client: confluent_kafka.Consumer) -> None:
        while self._positions:
            # Storing a position of a lost partition has no effect, as intended.
            with suppress(KafkaException):
                client.store_offsets(offsets=self._positions.popleft())

    def _read(self, client: confluent_kafka.Consumer) -> None:
        # The loop hasn't counted the messages that are still on their way to it.
        room = self._room() - (self._posted - self._arrived)
        paused = set(filter(self._is_paused, self._assigned_topics))
        if room > 0:
            self._full_since = None
        elif self._full():
            paused = {*self._assigned_topics}
        else:
            self._stop.wait(_FULL_WAIT)
            return
        if paused != self._paused:
            parts = client.assignment()
            client.pause([each for each in parts if each.topic in paused])
            client.resume([each for each in parts if each.topic not in paused])
            self._paused = paused
        first = client.poll(_POLL)
        if first is None:
            return
        messages = [first]
        if room > 1:
            messages += client.consume(min(room, _AT_ONCE) - 1, timeout=0)
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() == KafkaError._FATAL:
                    raise KafkaException(error)  # nothing will arrive any more
                self.trouble = reason_of(error)
                self._post(self._listener.changed)
        sound = [message for message in messages if message.error() is None]
        if sound:
            self._posted += len(sound)
            self._post(self._arrive, sound)

    def _arrive(self, messages: Sequence[Message]) -> None:
        self._listener.arrived(messages)
        self._arrived += len(messages)

    def _full(self) -> bool:
        """Return whether the buffer has been full for so long that polling is due."""
        if self._full_since is None:
            self._full_since = time.monotonic()
        return time.monotonic() - self._full_since > _FULL_BEFORE_PAUSE

    def _assigned(self, _: object, partitions: Sequence[TopicPartition]) -> None:
        # A partition that comes back is still paused if it was when it left, and others
        # stay as they were. So the next read pauses or resumes all of them.
        self._paused = None
        self._assigned_topics.update(each.topic for each in partitions)
        self._post(self._listener.assigned, _parts(partitions))

    def _revoked(self, _: object, partitions: Sequence[TopicPartition]) -> None:
        left = threading.Event()
        if self._post(self._listener.leave, _parts(partitions), left.set):
            self.is_leaving = True
            left.wait(self._handover)
            self.is_leaving = False
            # No commands: this is a callback of the client, and a blocking call within
            # one makes the client abort the process at its next callback.
            self._store_positions(self._client)
            self._post(self._listener.lost, _parts(partitions))

    def _lost(self, _: object, partitions: Sequence[TopicPartition]) -> None:
        self._post(self._listener.lost, _parts(partitions))

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.down = True
        else:
            self.in_doubt = True
            self._reason = reason_of(error)
        if error.code() == KafkaError._AUTHENTICATION:
            self.refusal = self._reason
        self._post(self._listener.changed)

    def _on_commit(self, error: KafkaError | None, _: object) -> None:
        # By identity, since comparing an error with None by == breaks the interpreter.
        if error is not None and error.code() in _FORBIDDEN:
            self.trouble = f"can't commit offsets: {reason_of(error)}"
            self._post(self._listener.changed)

    def _post(self, call: Callable[..., None], *arguments: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return False  # the loop is closed
        return True


def _answer(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _subscription(topic: str) -> str:
    """Return a topic, or a prefix of topics, in librdkafka's syntax."""
    if not topic.endswith("*"):
        return topic
    # With group.protocol=consumer, the brokers match it against the whole name.
    return f"^{topic[:-1].replace('.', '[.]')}.*"


def _parts(partitions: Sequence[TopicPartition]) -> list[Part]:
    return [(each.topic, each.partition) for each in partitions]


_CONNECT: Final = 10.0
_CREATION: Final = 2.0
_PAUSE: Final = 0.1


async def require_topics(reader: Reader, topics: Sequence[str], name: str) -> None:
    """Check that topics exist; prefixes are skipped.

    Args:
        name: the broker's name, for errors.

    Raises:
        BrokerUnavailableError: no broker answers.
        ConfigError: a topic doesn't exist, or the user lacks the privilege to read it.
    """
    now = asyncio.get_running_loop().time
    until = now() + _CONNECT
    found = await reader.topics(until)
    creation = now() + _CREATION
    for topic in topics:
        if topic in found or topic.endswith("*"):
            continue
        while True:
            error = (await reader.topics(until, topic)).get(topic)
            code = None if error is None else error.code()
            if code != KafkaError.UNKNOWN_TOPIC_OR_PART or now() >= creation:
                break
            # The request itself may have created it.
            await asyncio.sleep(_PAUSE)
        if error is not None and code != KafkaError.LEADER_NOT_AVAILABLE:
            raise ConfigError(
                f"broker {name}, topic {shorten(topic)}: {reason_of(error)}; create"
                " it, or grant this user read access"
            )
