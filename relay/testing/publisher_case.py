"""What an adapter's author tells the publisher suite: hooks and capabilities."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from outbox.errors import BrokerUnavailableError
from outbox.message import Message
from outbox.testing.conformance import capability
from outbox.testing.samples import MAX_PAYLOAD_BYTES
from relay.publisher import Acked, Confirmation, Publisher

__all__ = ["Capabilities", "PublisherCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a publisher and its broker can do. What is declared absent is skipped."""

    ordered_by_key: bool = capability("Messages of one key arrive in their order.")
    empty_payload: bool = capability("A payload may be empty.")
    any_text: bool = capability(
        "Keys, tenants and values of headers may hold any text."
    )
    case_of_headers: bool = capability("The case of the names of headers survives.")
    limits_payload: bool = capability(
        "Payloads above the suite's `max_payload_bytes` are refused for ever."
    )
    refuses_for_ever: bool = capability(
        "There are messages that can never be published, like `bad_message`."
    )
    refuses_alone: bool = capability(
        "The broker can refuse one message and take its neighbours."
    )
    goes_away: bool = capability("The broker is apart from us, and can be away.")
    stalls: bool = capability("The broker can hang with its connections open.")
    deduplicates: bool = capability(
        "What is published twice with one id arrives once.", default=False
    )


class PublisherCase(ABC):
    """The abstract part: override the hooks that your capabilities ask for.

    A hook may be called several times in a test. Fixtures come in by one of your own:

        @pytest.fixture(autouse=True)
        def broker(self, acme_url: str) -> None:
            self.url = acme_url

    Attributes:
        capabilities: what can't be is declared absent here.
        max_payload_bytes: the largest payload that `publisher()` takes.
        patience: seconds within which a call has to end, whatever the broker does.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    max_payload_bytes: ClassVar[int] = MAX_PAYLOAD_BYTES
    patience: ClassVar[float] = 60.0

    @abstractmethod
    def publisher(self) -> Publisher:
        """Make a publisher, not entered yet."""

    @abstractmethod
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        """Wait until `count` different messages are in a topic; give all, in order.

        Duplicates are given, too. Called at most once for a topic. Raise if they
        don't come, and don't go through what `stall_broker` stalls.
        """

    def topic(self) -> str:
        """Return the name of a topic that no other test uses."""
        return f"suite-{uuid4().hex}"

    async def prepare(self, topic: str) -> None:  # noqa: B027 - most need nothing
        """Make a topic ready to be published to, if that takes anything."""

    def bad_message(self, topic: str) -> Message:
        """Return a message with key `key-0` that can never be published."""
        return Message(topic, bytes(self.max_payload_bytes + 1), key="key-0")

    async def refused_message(self) -> Message:
        """Return one that is refused now, but not for ever. For `refuses_alone`."""
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

    async def fresh_topic(self) -> str:
        """Return a topic that is ready."""
        topic = self.topic()
        await self.prepare(topic)
        return topic

    async def publish(self, *messages: Message) -> None:
        """Publish with a publisher of its own, all of it acked."""
        async with self.publisher() as publisher:
            assert await publisher.publish(messages) == [Acked()] * len(messages)

    async def until_answered(
        self, publisher: Publisher, batch: Sequence[Message]
    ) -> Sequence[Confirmation]:
        """Publish as the relay does: again and again while the broker is away."""
        async with asyncio.timeout(self.patience):
            while True:
                try:
                    return await publisher.publish(batch)
                except BrokerUnavailableError:
                    await asyncio.sleep(0.05)

    async def publish_on_and_on(
        self, publisher: Publisher, batch: Sequence[Message]
    ) -> None:
        """Publish a batch again and again, until cancelled."""
        while True:
            await self.until_answered(publisher, batch)
            await asyncio.sleep(0)
