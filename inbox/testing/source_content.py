"""The source suite: messages are delivered unchanged."""

import time
from collections.abc import Sequence

from inbox.testing.source_case import SourceCase
from outbox.message import Message
from outbox.testing.conformance import checks
from outbox.testing.samples import (
    AWKWARD_HEADERS,
    BINARY,
    TEXTS,
    at_the_limit,
    differences,
    full_message,
    whole_of_unicode,
)

__all__ = ["SourceContent"]


class SourceContent(SourceCase):
    """Fields, payloads and text arrive just as they were put into the broker."""

    @checks()
    async def test_a_message_is_delivered_unchanged(self) -> None:
        message = full_message(await self.fresh_topic())
        await self.put(message)
        async with self.source("one", message.topic) as source:
            (delivery,) = await self.receive(source, 1)
            assert differences(message, delivery.message) == {}
            assert (delivery.attempts, delivery.problem) == (0, None)

    @checks("dates_deliveries")
    async def test_a_delivery_says_when_its_message_was_published(self) -> None:
        message = full_message(await self.fresh_topic())
        began = time.time()
        await self.put(message)
        async with self.source("one", message.topic) as source:
            (delivery,) = await self.receive(source, 1)
            published_at = delivery.published_at
            assert published_at is not None
            # The broker's clock can be slightly off, and can count whole milliseconds.
            assert began - 5 < published_at < time.time() + 5

    @checks()
    async def test_optional_fields_stay_empty(self) -> None:
        message = Message(await self.fresh_topic(), b"1")
        await self.expect_as_put(message)

    @checks("case_of_headers")
    async def test_header_names_keep_their_case(self) -> None:
        headers = {"X-Own": "1", "x-other": "2"}
        await self.expect_as_put(
            Message(await self.fresh_topic(), b"1", headers=headers)
        )

    @checks("empty_payload")
    async def test_an_empty_payload_is_delivered(self) -> None:
        await self.expect_as_put(Message(await self.fresh_topic(), b""))

    @checks()
    async def test_a_payload_at_the_limit_is_delivered(self) -> None:
        payload = at_the_limit(self.max_payload_bytes)
        await self.expect_as_put(Message(await self.fresh_topic(), payload))

    @checks()
    async def test_payloads_of_any_bytes_are_delivered(self) -> None:
        topic = await self.fresh_topic()
        payloads = (BINARY, b"\0", b"\xff\xfe", b"\r\n")
        await self.expect_as_put(*(Message(topic, payload) for payload in payloads))

    @checks()
    async def test_payloads_with_all_of_unicode_are_delivered(self) -> None:
        topic = await self.fresh_topic()
        size = min(32 * 1024, self.max_payload_bytes // 4)
        texts = whole_of_unicode(size)
        await self.expect_as_put(*(Message(topic, text.encode()) for text in texts))

    @checks("any_text")
    async def test_key_tenant_and_headers_of_any_text_are_delivered(self) -> None:
        topic = await self.fresh_topic()
        await self.expect_as_put(
            *(
                Message(topic, b"1", key=text, tenant=text, headers={"x": text})
                for text in TEXTS
            )
        )

    @checks()
    async def test_awkward_headers_that_the_broker_accepts_are_delivered(self) -> None:
        topic = await self.fresh_topic()
        messages = [Message(topic, b"1", headers=h) for h in AWKWARD_HEADERS]
        taken = [message for message in messages if await self.try_to_put(message)]
        arrived = {m.id: m for m in await self.handed_over(topic, len(taken))}
        for message in taken:
            assert differences(message, arrived[message.id]) == {}

    async def expect_as_put(self, *messages: Message) -> None:
        """Put messages into one topic, and compare them with those delivered."""
        await self.put(*messages)
        arrived = await self.handed_over(messages[0].topic, len(messages))
        by_id = {message.id: message for message in arrived}
        for message in messages:
            assert differences(message, by_id[message.id]) == {}

    async def handed_over(self, topic: str, count: int) -> Sequence[Message]:
        """Return the messages that a source delivers, after acking each one."""
        arrived: dict[object, Message] = {}
        async with self.source("one", topic) as source:
            while len(arrived) < count:
                for delivery in await self.receive(source, 1):
                    assert delivery.problem is None
                    arrived[delivery.message.id] = delivery.message
                    await delivery.ack()
        return list(arrived.values())
