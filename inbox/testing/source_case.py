"""What an adapter's author tells the source suite: hooks and capabilities."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from uuid import uuid4

from inbox.source import Delivery, Source
from inbox.testing.crash import die_holding
from outbox.errors import BrokerUnavailableError
from outbox.message import Message
from outbox.testing.conformance import capability
from outbox.testing.samples import MAX_PAYLOAD_BYTES

__all__ = ["Capabilities", "SourceCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a source and its broker can do. What is declared absent is skipped."""

    ordered_by_key: bool = capability(
        "A consumer without replicas gets the messages of a key in their order."
    )
    acks_each: bool = capability(
        "An ack settles its delivery alone, whatever comes before it."
    )
    counts_attempts: bool = capability("The broker remembers failed attempts.")
    delays: bool = capability("What is nacked with a delay stays away that long.")
    holds_back_keys: bool = capability(
        "What is nacked with a delay holds back later messages of its key."
    )
    shares: bool = capability("The replicas of a consumer share its messages.")
    fans_out: bool = capability("Each consumer gets every message.")
    survives_a_crash: bool = capability(
        "What a killed process held is handed over again, to another process."
    )
    keeps_alive: bool = capability(
        "A delivery stays with its replica, however long it takes to handle."
    )
    gets_foreign_messages: bool = capability(
        "Others can put into the broker what is no message of ours."
    )
    takes_bytes: bool = capability(
        "Others can put metadata into the broker that is no text."
    )
    takes_bytes_as_topic: bool = capability(
        "Others can put into topics whose names are no text."
    )
    empty_payload: bool = capability("A payload may be empty.")
    any_text: bool = capability(
        "Keys, tenants and values of headers may hold any text."
    )
    case_of_headers: bool = capability("The case of the names of headers survives.")
    goes_away: bool = capability("The broker is apart from us, and can be away.")
    stalls: bool = capability("The broker can hang with its connections open.")


class SourceCase(ABC):
    """The abstract part: override the hooks that your capabilities ask for.

    Fixtures come in by one of your own:

        @pytest.fixture(autouse=True)
        def broker(self, acme_url: str) -> None:
            self.url = acme_url

    Attributes:
        capabilities: what can't be is declared absent here.
        max_payload_bytes: the largest payload that `put` can put.
        patience: seconds within which things have to come, or a call to end.
        hold: seconds after which what a dead replica held goes to others; make
            the source with about so short a lease, or visibility, or idle time.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    max_payload_bytes: ClassVar[int] = MAX_PAYLOAD_BYTES
    patience: ClassVar[float] = 60.0
    hold: ClassVar[float] = 3.0

    @abstractmethod
    def source(self, consumer: str, topic: str) -> Source:
        """Make a source, not entered yet, whose poll interval is at most 0.2 s."""

    @abstractmethod
    async def put(self, *messages: Message) -> None:
        """Put messages into their topics, in this order.

        Not through what `stop_broker` stops and `stall_broker` stalls.
        """

    async def try_to_put(self, message: Message) -> bool:
        """Put a message that the broker may not be able to hold; tell whether it is."""
        await self.put(message)
        return True

    def topic(self) -> str:
        """Return the name of a topic that no other test uses."""
        return f"suite-{uuid4().hex}"

    async def prepare(self, topic: str, *consumers: str) -> None:
        """Make sure that these consumers get what is put into a topic from now on.

        By default each is entered once, and left.
        """
        for consumer in consumers:
            async with self.source(consumer, topic):
                pass

    async def put_foreign(self, topic: str, payload: bytes) -> None:
        """Put a body that is no message of ours. For `gets_foreign_messages`."""
        raise NotImplementedError

    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        """Put what is no message, with these bytes in a header. For `takes_bytes`."""
        raise NotImplementedError

    async def put_raw_topic(self, topic: bytes) -> None:
        """Put what is no message into a topic. For `takes_bytes_as_topic`."""
        raise NotImplementedError

    def stop_broker(self) -> None:
        """Break all connections and let nobody in. For `goes_away`."""
        raise NotImplementedError

    def start_broker(self) -> None:
        """Let the broker be there again. For `goes_away`."""
        raise NotImplementedError

    def cut_connections(self) -> None:
        """Break the connections that are open. For `goes_away`."""
        self.stop_broker()
        self.start_broker()

    def stall_broker(self) -> None:
        """Let nothing through, with connections open. For `stalls`."""
        raise NotImplementedError

    def resume_broker(self) -> None:
        """Let everything through again. For `stalls`."""
        raise NotImplementedError

    async def die_holding(self, consumer: str, topic: str, count: int) -> None:
        """Let a process die that holds `count` deliveries."""
        await die_holding(lambda: self.source(consumer, topic), count)

    async def fresh_topic(self, *consumers: str) -> str:
        """Return a topic whose messages these consumers get; `one` if none is named."""
        topic = self.topic()
        await self.prepare(topic, *(consumers or ("one",)))
        return topic

    async def receive(
        self, source: Source, count: int, *, limit: int = 100
    ) -> list[Delivery]:
        """Receive until `count` deliveries are there, through outages."""
        deliveries: list[Delivery] = []
        async with asyncio.timeout(self.patience):
            while len(deliveries) < count:
                try:
                    deliveries += await source.receive(limit=limit)
                except BrokerUnavailableError:
                    await asyncio.sleep(0.05)
        return deliveries

    async def handle(self, source: Source, count: int) -> list[Message]:
        """Receive and ack until `count` different messages are there."""
        messages: dict[object, Message] = {}
        async with asyncio.timeout(self.patience):
            while len(messages) < count:
                for delivery in await self.receive(source, 1):
                    messages.setdefault(delivery.message.id, delivery.message)
                    await delivery.ack()
        return list(messages.values())

    async def handle_all(self, source: Source, messages: Sequence[Message]) -> None:
        """Receive and ack until all of these were there, whatever else comes."""
        missing = {message.id for message in messages}
        async with asyncio.timeout(self.patience):
            while missing:
                for delivery in await self.receive(source, 1):
                    missing.discard(delivery.message.id)
                    await delivery.ack()

    async def until_away(self, source: Source) -> None:
        """Receive until it raises."""
        while True:
            await source.receive(limit=1)

    async def anything(
        self, source: Source, during: timedelta = timedelta(seconds=0.6)
    ) -> Sequence[Delivery]:
        """Return what arrives within `during`, possibly nothing."""
        until = time.monotonic() + during.total_seconds()
        while time.monotonic() < until:
            if deliveries := await source.receive(limit=100):
                return deliveries
        return []
