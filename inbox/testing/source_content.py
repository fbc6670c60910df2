"""The source suite: messages are delivered unchanged."""

import time

from inbox.testing.source_case import SourceCase
from outbox.message import Message
from outbox.testing.conformance import checks
from outbox.testing.samples import (
    AWKWARD_HEADERS,
    differences,
    various_messages,
    whole_of_unicode,
)

__all__ = ["SourceContent"]


class SourceContent(SourceCase):
    """Fields, payloads and text arrive just as they were put into the broker."""

    @checks()
    async def test_messages_are_delivered_unchanged(self) -> None:
        topic = await self.fresh_topic()
        messages = various_messages(topic, self.max_payload_bytes)
        await self.put(*messages)
        await self.expect_as_put(*messages)

    @checks()
    async def test_payloads_with_all_of_unicode_are_delivered(self) -> None:
        topic = await self.fresh_topic()
        messages = whole_of_unicode(topic, self.max_payload_bytes)
        await self.put(*messages)
        await self.expect_as_put(*messages)

    @checks()
    async def test_awkward_headers_that_the_broker_accepts_are_delivered(self) -> None:
        topic = await self.fresh_topic()
        messages = [Message(topic, b"1", headers=h) for h in AWKWARD_HEADERS]
        await self.expect_as_put(*[m for m in messages if await self.try_to_put(m)])

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
