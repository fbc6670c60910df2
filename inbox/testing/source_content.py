"""The source suite: messages are delivered unchanged."""

from pillarbox.inbox.testing.source_case import SourceCase
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import (
    AWKWARD_HEADERS,
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
