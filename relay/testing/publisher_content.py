"""The publisher suite: messages arrive unchanged."""

from outbox.message import Message
from outbox.testing.conformance import checks
from outbox.testing.samples import (
    AWKWARD_HEADERS,
    BINARY,
    TEXTS,
    TRACEPARENT,
    at_the_limit,
    differences,
    full_message,
    numbered,
    numbers_by_key,
    whole_of_unicode,
)
from relay.publisher import Acked
from relay.testing.publisher_case import PublisherCase

__all__ = ["PublisherContent"]


class PublisherContent(PublisherCase):
    """Fields, payloads, texts and order are preserved on the way through the broker."""

    @checks()
    async def test_every_field_arrives_unchanged(self) -> None:
        message = full_message(await self.fresh_topic())
        await self.publish(message)
        (arrived,) = await self.received(message.topic, 1)
        assert differences(message, arrived) == {}
        assert arrived.headers["traceparent"] == TRACEPARENT

    @checks()
    async def test_optional_fields_arrive_empty(self) -> None:
        message = Message(await self.fresh_topic(), b"1")
        await self.publish(message)
        (arrived,) = await self.received(message.topic, 1)
        assert differences(message, arrived) == {}

    @checks("case_of_headers")
    async def test_header_names_arrive_in_their_case(self) -> None:
        headers = {"X-Own": "1", "x-other": "2"}
        message = Message(await self.fresh_topic(), b"1", headers=headers)
        await self.publish(message)
        (arrived,) = await self.received(message.topic, 1)
        assert dict(arrived.headers) == headers

    @checks("empty_payload")
    async def test_an_empty_payload_arrives(self) -> None:
        message = Message(await self.fresh_topic(), b"")
        await self.publish(message)
        (arrived,) = await self.received(message.topic, 1)
        assert differences(message, arrived) == {}

    @checks()
    async def test_a_payload_at_the_limit_arrives(self) -> None:
        payload = at_the_limit(self.max_payload_bytes)
        message = Message(await self.fresh_topic(), payload)
        await self.publish(message)
        (arrived,) = await self.received(message.topic, 1)
        assert arrived.payload == payload

    @checks()
    async def test_a_payload_may_hold_any_bytes(self) -> None:
        topic = await self.fresh_topic()
        messages = [Message(topic, p) for p in (BINARY, b"\0", b"\xff\xfe", b"\r\n")]
        await self.publish(*messages)
        arrived = {m.id: m for m in await self.received(topic, len(messages))}
        assert [arrived[m.id].payload for m in messages] == [
            m.payload for m in messages
        ]

    @checks()
    async def test_a_payload_may_hold_the_whole_of_unicode(self) -> None:
        topic = await self.fresh_topic()
        size = min(32 * 1024, self.max_payload_bytes // 4)
        messages = [Message(topic, t.encode()) for t in whole_of_unicode(size)]
        await self.publish(*messages)
        arrived = {m.id: m for m in await self.received(topic, len(messages))}
        assert all(arrived[m.id].payload == m.payload for m in messages)

    @checks("any_text")
    async def test_key_tenant_and_headers_may_hold_any_text(self) -> None:
        topic = await self.fresh_topic()
        messages = [
            Message(topic, b"1", key=text, tenant=text, headers={"x": text})
            for text in TEXTS
        ]
        await self.publish(*messages)
        arrived = {m.id: m for m in await self.received(topic, len(messages))}
        for message in messages:
            assert differences(message, arrived[message.id]) == {}

    @checks()
    async def test_an_awkward_header_arrives_or_is_refused_permanently(self) -> None:
        topic = await self.fresh_topic()
        messages = [Message(topic, b"1", headers=h) for h in AWKWARD_HEADERS]
        async with self.publisher() as publisher:
            answers = await publisher.publish(messages)
        taken = [
            message
            for message, answer in zip(messages, answers, strict=True)
            if isinstance(answer, Acked)
        ]
        assert all(isinstance(a, Acked) or a.permanent for a in answers), answers
        arrived = {m.id: m for m in await self.received(topic, len(taken))}
        assert set(arrived) == {message.id for message in taken}
        for message in taken:
            assert differences(message, arrived[message.id]) == {}

    @checks("ordered_by_key")
    async def test_the_order_within_a_key_is_kept(self) -> None:
        messages = numbered(await self.fresh_topic(), 300, keys=7)
        async with self.publisher() as publisher:
            for start in range(0, len(messages), 100):
                answers = await publisher.publish(messages[start : start + 100])
                assert answers == [Acked()] * 100
        arrived = list(await self.received(messages[0].topic, len(messages)))
        assert len(arrived) == len(messages)
        assert numbers_by_key(arrived) == numbers_by_key(messages)

    @checks("deduplicates")
    async def test_a_message_published_twice_arrives_once(self) -> None:
        messages = numbered(await self.fresh_topic(), 5)
        await self.publish(*messages)
        await self.publish(*messages)
        arrived = await self.received(messages[0].topic, len(messages))
        assert [m.id for m in arrived] == [m.id for m in messages]
