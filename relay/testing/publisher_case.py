"""The hooks and capabilities that connect an adapter to the publisher suite."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import BrokerCase, capability
from pillarbox.outbox.testing.samples import (
    MAX_PAYLOAD_BYTES,
    differences,
    numbers_by_key,
)
from pillarbox.relay.publisher import Acked, Confirmation, Publisher

__all__ = ["Capabilities", "PublisherCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a publisher and its broker; tests that need more are skipped."""

    ordered_by_key: bool = capability("Messages of one key arrive in order.")
    refuses_for_ever: bool = capability(
        "Payloads above the suite's `max_payload_bytes`, and messages like "
        "`bad_message`, are refused permanently."
    )
    refuses_alone: bool = capability(
        "The broker can refuse one message and accept the others of a batch."
    )
    goes_away: bool = capability("The broker is remote, and can be unavailable.")
    stalls: bool = capability("The broker can hang with its connections open.")
    deduplicates: bool = capability(
        "A message published twice with one id arrives once.", default=False
    )


class PublisherCase(BrokerCase, ABC):
    """The abstract part: override the hooks that your capabilities require.

    A hook can be called several times in a test. To use a fixture, write your own:

        @pytest.fixture(autouse=True)
        def broker(self, acme_url: str) -> None:
            self.url = acme_url

    Attributes:
        capabilities: set those that the adapter lacks to `False`.
        max_payload_bytes: the largest payload that `publisher()` accepts.
        patience: seconds within which a call must end, whatever the broker does.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    max_payload_bytes: ClassVar[int] = MAX_PAYLOAD_BYTES

    @abstractmethod
    def publisher(self) -> Publisher:
        """Return a publisher that isn't entered yet."""

    @abstractmethod
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        """Wait until `count` different messages are in a topic; return all, in order.

        Include duplicates. Called at most once for a topic. Raise if the messages
        don't arrive, and don't use a connection that `stall_broker` stalls.
        """

    async def prepare(self, topic: str) -> None:
        """Prepare a topic for publishing, if the broker needs that."""

    def bad_message(self, topic: str) -> Message:
        """Return a message with key `key-0` that can never be published."""
        return Message(topic, bytes(self.max_payload_bytes + 1), key="key-0")

    async def refused_message(self) -> Message:
        """Return a message that the broker refuses temporarily. For `refuses_alone`."""
        raise NotImplementedError

    async def fresh_topic(self) -> str:
        """Return a new topic that is ready for publishing."""
        topic = self.topic()
        await self.prepare(topic)
        return topic

    async def publish(self, *messages: Message) -> None:
        """Publish with a new publisher, and check that every message is acked."""
        async with self.publisher() as publisher:
            assert await publisher.publish(messages) == [Acked()] * len(messages)

    async def expect_in_order(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Check that these numbered messages of a topic, and no others, have arrived.

        Those of a key must be in order if the broker is `ordered_by_key`. Returns all
        that arrived, including duplicates.
        """
        arrived = await self.received(messages[0].topic, len(messages))
        assert {m.id for m in arrived} == {m.id for m in messages}
        if self.capabilities.ordered_by_key:
            assert numbers_by_key(arrived) == numbers_by_key(messages)
        return arrived

    async def expect_unchanged(self, topic: str, messages: Sequence[Message]) -> None:
        """Check that these messages, and no others, are in a topic as published."""
        arrived = {m.id: m for m in await self.received(topic, len(messages))}
        assert arrived.keys() == {message.id for message in messages}
        for message in messages:
            assert differences(message, arrived[message.id]) == {}

    async def until_answered(
        self, publisher: Publisher, batch: Sequence[Message]
    ) -> Sequence[Confirmation]:
        """Publish as the relay does: retry while the broker is unavailable."""
        async with asyncio.timeout(self.patience):
            while True:
                try:
                    return await publisher.publish(batch)
                except BrokerUnavailableError:
                    await asyncio.sleep(0.05)

    async def publish_on_and_on(
        self, publisher: Publisher, batch: Sequence[Message]
    ) -> None:
        """Publish a batch repeatedly until cancelled."""
        while True:
            await self.until_answered(publisher, batch)
            await asyncio.sleep(0)
