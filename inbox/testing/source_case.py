"""The hooks and capabilities that bind an adapter to the source suite."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from pillarbox.inbox.source import Delivery, Source
from pillarbox.inbox.testing.crash import die_holding
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import BrokerCase, capability
from pillarbox.outbox.testing.samples import MAX_PAYLOAD_BYTES, differences

__all__ = ["Capabilities", "SourceCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a source and its broker; tests of absent ones are skipped."""

    ordered_by_key: bool = capability(
        "A consumer with a single replica gets the messages of a key in order."
    )
    acks_each: bool = capability(
        "An ack settles only its own delivery, even if earlier ones are not acked."
    )
    counts_attempts: bool = capability("The broker remembers failed attempts.")
    holds_back_keys: bool = capability(
        "A message nacked with a delay holds back later messages of its key."
    )
    shares: bool = capability("The replicas of a consumer share its messages.")
    one_receives: bool = capability(
        "One replica at a time receives a topic's messages, so that keys stay in order "
        "with several.",
        default=False,
    )
    reads_ahead: bool = capability(
        "Urgent messages are received before most others that the broker got earlier.",
        default=False,
    )
    hands_back: bool = capability("Messages can be handed back for other replicas.")
    joins_quietly: bool = capability(
        "A replica that joins causes no redelivery of handled messages."
    )
    fans_out: bool = capability("Each consumer gets every message.")
    survives_a_crash: bool = capability(
        "Messages held by a killed process are redelivered to another one."
    )
    keeps_alive: bool = capability(
        "A delivery stays with its replica, however long it takes to handle."
    )
    gets_foreign_messages: bool = capability(
        "The broker accepts messages from others in a format that isn't ours."
    )
    takes_bytes: bool = capability(
        "The broker accepts headers from others that are not valid text."
    )
    takes_bytes_as_topic: bool = capability(
        "The broker accepts topics from others whose names are not valid text."
    )
    dates_deliveries: bool = capability(
        "A delivery says when the broker took its message."
    )
    goes_away: bool = capability("The broker is remote, and can be unavailable.")
    stalls: bool = capability("The broker can hang with its connections open.")


class SourceCase(BrokerCase, ABC):
    """The abstract part: override the hooks that your capabilities require.

    To use a fixture, write your own:

        @pytest.fixture(autouse=True)
        def broker(self, acme_url: str) -> None:
            self.url = acme_url

    Attributes:
        capabilities: declare the ones that the adapter lacks as absent.
        max_payload_bytes: the size of the largest payload that `put` accepts.
        patience: the number of seconds within which messages must arrive, or a call
            must end.
        hold: the number of seconds after which messages that a dead replica held go to
            others; give the source a lease, visibility timeout or idle time of about
            this length.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    max_payload_bytes: ClassVar[int] = MAX_PAYLOAD_BYTES
    hold: ClassVar[float] = 3.0

    @abstractmethod
    def source(self, consumer: str, topic: str) -> Source:
        """Create a source, not yet open, with a poll interval of at most 0.2 s."""

    @abstractmethod
    async def put(self, *messages: Message) -> None:
        """Put messages into their topics, in this order.

        Don't use a connection that `stop_broker` breaks or `stall_broker` stalls.
        """

    async def try_to_put(self, message: Message) -> bool:
        """Put a message that the broker can refuse; return whether it accepted it."""
        await self.put(message)
        return True

    async def prepare(self, topic: str, *consumers: str) -> None:
        """Make sure that these consumers receive the topic's messages from now on.

        By default, each consumer's source is entered and left once.
        """
        for consumer in consumers:
            async with self.source(consumer, topic):
                pass

    async def put_foreign(self, topic: str, payload: bytes) -> None:
        """Put a message in a foreign format. For `gets_foreign_messages`."""
        raise NotImplementedError

    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        """Put a foreign message with these bytes in a header. For `takes_bytes`."""
        raise NotImplementedError

    async def put_raw_topic(self, topic: bytes) -> None:
        """Put a foreign message into a topic. For `takes_bytes_as_topic`."""
        raise NotImplementedError

    async def die_holding(self, consumer: str, topic: str, count: int) -> None:
        """Kill a process that holds `count` deliveries."""
        await die_holding(lambda: self.source(consumer, topic), count)

    async def fresh_topic(self, *consumers: str) -> str:
        """Return a topic whose messages these consumers receive; by default `one`."""
        topic = self.topic()
        await self.prepare(topic, *(consumers or ("one",)))
        return topic

    async def receive(
        self, source: Source, count: int, *, limit: int = 100
    ) -> list[Delivery]:
        """Receive until there are `count` deliveries, retrying during outages."""
        deliveries: list[Delivery] = []
        async with asyncio.timeout(self.patience):
            while len(deliveries) < count:
                try:
                    deliveries += await source.receive(limit=limit)
                except BrokerUnavailableError:
                    await asyncio.sleep(0.05)
        return deliveries

    async def handle(self, source: Source, count: int) -> list[Message]:
        """Receive and ack until there are `count` different messages."""
        messages: dict[object, Message] = {}
        async with asyncio.timeout(self.patience):
            while len(messages) < count:
                for delivery in await self.receive(source, 1):
                    messages.setdefault(delivery.message.id, delivery.message)
                    await delivery.ack()
        return list(messages.values())

    async def handle_all(self, source: Source, messages: Sequence[Message]) -> None:
        """Receive and ack until all of these messages, among others, have arrived."""
        missing = {message.id for message in messages}
        async with asyncio.timeout(self.patience):
            while missing:
                for delivery in await self.receive(source, 1):
                    missing.discard(delivery.message.id)
                    await delivery.ack()

    async def expect_as_put(self, *messages: Message) -> None:
        """Check that a source delivers these messages of one topic as they were put."""
        arrived: dict[object, Message] = {}
        async with self.source("one", messages[0].topic) as source:
            while len(arrived) < len(messages):
                for delivery in await self.receive(source, 1):
                    assert (delivery.attempts, delivery.problem) == (0, None)
                    if self.capabilities.dates_deliveries:
                        # The broker's clock can be slightly off.
                        assert delivery.published_at is not None
                        assert abs(time.time() - delivery.published_at) < 300
                    arrived[delivery.message.id] = delivery.message
                    await delivery.ack()
        for message in messages:
            assert differences(message, arrived[message.id]) == {}

    async def until_away(self, source: Source) -> None:
        """Receive until the source raises."""
        while True:
            await source.receive(limit=1)

    async def anything(
        self, source: Source, during: timedelta = timedelta(seconds=0.4)
    ) -> Sequence[Delivery]:
        """Return whatever arrives within `during`, possibly nothing."""
        until = time.monotonic() + during.total_seconds()
        while time.monotonic() < until:
            if deliveries := await source.receive(limit=100):
                return deliveries
        return []
