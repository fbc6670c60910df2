"""The publisher suite: messages arrive unchanged."""

from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import (
    AWKWARD_HEADERS,
    numbered,
    various_messages,
    whole_of_unicode,
)
from pillarbox.relay.publisher import Acked
from pillarbox.relay.testing.publisher_case import PublisherCase

__all__ = ["PublisherContent"]


class PublisherContent(PublisherCase):
    """Fields, payloads, texts and order are preserved on the way through the broker."""

    @checks()
    async def test_messages_arrive_unchanged(self) -> None:
        topic = await self.fresh_topic()
        messages = various_messages(topic, self.max_payload_bytes)
        await self.publish(*messages)
        await self.expect_unchanged(topic, messages)

    @checks()
    async def test_a_payload_may_hold_the_whole_of_unicode(self) -> None:
        topic = await self.fresh_topic()
        messages = whole_of_unicode(topic, self.max_payload_bytes)
        await self.publish(*messages)
        await self.expect_unchanged(topic, messages)

    @checks()
    async def test_an_awkward_header_arrives_or_is_refused_permanently(self) -> None:
        topic = await self.fresh_topic()
        messages = [Message(topic, b"1", headers=h) for h in AWKWARD_HEADERS]
        async with self.publisher() as publisher:
            answers = await publisher.publish(messages)
        assert all(isinstance(a, Acked) or a.permanent for a in answers), answers
        pairs = zip(messages, answers, strict=True)
        await self.expect_unchanged(topic, [m for m, a in pairs if a == Acked()])

    @checks("ordered_by_key")
    async def test_the_order_within_a_key_is_kept(self) -> None:
        messages = numbered(await self.fresh_topic(), 300, keys=7)
        async with self.publisher() as publisher:
            for start in range(0, len(messages), 100):
                answers = await publisher.publish(messages[start : start + 100])
                assert answers == [Acked()] * 100
        arrived = await self.expect_in_order(messages)
        assert len(arrived) == len(messages)

    @checks("deduplicates")
    async def test_a_message_published_twice_arrives_once(self) -> None:
        messages = numbered(await self.fresh_topic(), 5)
        await self.publish(*messages)
        await self.publish(*messages)
        arrived = await self.received(messages[0].topic, len(messages))
        assert [m.id for m in arrived] == [m.id for m in messages]
