"""The source suite: acks, nacks, order and foreign messages."""

import asyncio
import time
from contextlib import suppress
from datetime import timedelta

from pillarbox.inbox.testing.source_case import SourceCase
from pillarbox.outbox.cloudevents.raw_text import bytes_of
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import numbered, numbers_by_key

__all__ = ["SourceSettling"]


class SourceSettling(SourceCase):
    """One consumer with one replica, while the broker is available."""

    @checks()
    async def test_an_ack_removes_the_message_and_may_be_repeated(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 20))
        source = self.source("one", topic)
        async with source:
            await self.receive(source, 1)
        async with source:  # again, as when a start is tried again
            for delivery in await self.receive(source, 20):
                await delivery.ack()
                await delivery.ack()
            assert not await self.anything(source)
        async with self.source("one", topic) as source:
            assert not await self.anything(source)

    @checks()
    async def test_a_nack_redelivers_at_once_or_counts_an_attempt_and_waits(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 1))
        async with self.source("one", topic) as source:
            for _ in range(3):
                (delivery,) = await self.receive(source, 1)
                assert delivery.attempts == 0
                await delivery.nack()
            (delivery,) = await self.receive(source, 1)
            for attempts in range(3):
                if self.capabilities.counts_attempts:
                    assert delivery.attempts == attempts
                nacked_at = time.monotonic()
                await delivery.nack(timedelta(seconds=0.3))
                (delivery,) = await self.receive(source, 1)
                assert time.monotonic() - nacked_at >= 0.27
            await delivery.ack()
            assert not await self.anything(source)

    @checks("holds_back_keys")
    async def test_a_delayed_message_holds_back_its_key_and_no_other(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 2, keys=2))
        async with self.source("one", topic) as source:
            deliveries = await self.receive(source, 2)
            by_key = {delivery.message.key: delivery for delivery in deliveries}
            nacked_at = time.monotonic()
            await by_key["key-0"].nack(timedelta(seconds=1.5))
            await by_key["key-1"].ack()
            await self.put(*numbered(topic, 2, keys=2, start=2))
            messages: list[Message] = []
            while len(messages) < 3:
                for delivery in await self.receive(source, 1):
                    messages.append(delivery.message)
                    await delivery.ack()
                if time.monotonic() - nacked_at < 1.4:
                    assert {message.key for message in messages} == {"key-1"}
            assert numbers_by_key(messages) == {"key-0": [0, 2], "key-1": [3]}

    @checks("hands_back")
    async def test_what_is_handed_back_comes_again_later_without_an_attempt(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 2, keys=2))
        async with self.source("one", topic) as source:
            first, second = await self.receive(source, 2)
            handed_back_at = time.monotonic()
            assert await first.hand_back(timedelta(seconds=0.3))
            await second.ack()
            (again,) = await self.receive(source, 1)
            assert time.monotonic() - handed_back_at >= 0.27
            assert again.message.id == first.message.id
            assert again.attempts == 0
            await again.ack()
            assert not await self.anything(source)

    @checks("hands_back", "ordered_by_key", "holds_back_keys")
    async def test_what_is_handed_back_holds_back_its_key(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 3))
        arrived: list[Message] = []
        async with self.source("one", topic) as source:
            (first, *others) = await self.receive(source, 1)
            for delivery in (first, *others):
                assert await delivery.hand_back(timedelta(seconds=0.3))
            await self.put(*numbered(topic, 1, start=3))
            while len(arrived) < 4:
                for delivery in await self.receive(source, 1):
                    arrived.append(delivery.message)
                    await delivery.ack()
        assert [int(message.payload) for message in arrived] == [0, 1, 2, 3]

    @checks("hands_back")
    async def test_a_flood_that_is_handed_back_holds_up_no_others(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 1001, keys=1001))
        async with self.source("one", topic) as source, asyncio.timeout(self.patience):
            last = None
            while last is None:
                for delivery in await self.receive(source, 1):
                    if delivery.message.payload == b"1000":
                        last = delivery
                    else:
                        assert await delivery.hand_back(timedelta(minutes=1))
            await last.ack()

    @checks()
    async def test_acks_out_of_order_lose_nothing(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 10))
        async with self.source("one", topic) as source:
            deliveries = await self.receive(source, 10)
            for delivery in (*reversed(deliveries[5:]), deliveries[3]):
                await delivery.ack()
            left = {d.message.id for d in (*deliveries[:3], deliveries[4])}
        async with self.source("one", topic) as source:
            again = {message.id for message in await self.handle(source, 4)}
            if self.capabilities.acks_each:
                assert again == left
            while not left <= again:
                again |= {message.id for message in await self.handle(source, 1)}
            if self.capabilities.acks_each:
                assert not await self.anything(source)

    @checks("ordered_by_key")
    async def test_the_messages_of_a_key_are_delivered_in_order(self) -> None:
        topic = await self.fresh_topic()
        messages = numbered(topic, 60, keys=7)
        await self.put(*messages)
        arrived: list[Message] = []
        async with self.source("one", topic) as source:
            while len(arrived) < len(messages):
                for delivery in await self.receive(source, 1, limit=11):
                    arrived.append(delivery.message)
                    await delivery.ack()
        assert len(arrived) == len(messages)
        assert numbers_by_key(arrived) == numbers_by_key(messages)

    @checks()
    async def test_a_receive_respects_its_limit_and_its_poll_interval(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 30, keys=30))
        async with self.source("one", topic) as source:
            seen = 0
            for limit in (1, 3, 7, 100):
                deliveries = await self.receive(source, 1, limit=limit)
                assert len(deliveries) <= limit
                seen += len(deliveries)
            await self.receive(source, 30 - seen)
            for _ in range(3):
                async with asyncio.timeout(self.patience):
                    assert not await source.receive(limit=10)

    @checks()
    async def test_a_cancelled_receive_loses_nothing(self) -> None:
        topic = await self.fresh_topic()
        messages = numbered(topic, 20, keys=20)
        seen: set[int] = set()
        async with self.source("one", topic) as source:
            for n, message in enumerate(messages):
                call = asyncio.ensure_future(source.receive(limit=2))
                await asyncio.wait({call}, timeout=0.001 * (n % 4))
                await self.put(message)
                await asyncio.wait({call}, timeout=0.003 * (n % 5))
                call.cancel()
                await asyncio.wait({call})
                if call.cancelled():
                    continue
                # Under load, a broker can be mistaken for unavailable.
                with suppress(BrokerUnavailableError):
                    for delivery in call.result():
                        seen.add(int(delivery.message.payload))
                        await delivery.ack()
            more = await self.handle(source, len(messages) - len(seen))
        assert seen | {int(m.payload) for m in more} == set(range(20))

    @checks()
    async def test_a_task_that_receives_can_be_cancelled_at_any_moment(self) -> None:
        topic = await self.fresh_topic()
        async with self.source("one", topic) as source:
            for turns in range(40):
                task = asyncio.create_task(self.until_away(source))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task}, timeout=self.patience)
                assert task.cancelled()

    @checks("gets_foreign_messages")
    async def test_foreign_messages_are_delivered_with_their_problem(self) -> None:
        topic = await self.fresh_topic()
        metadata = b"\xff\x00 not text"
        await self.put_foreign(topic, b"\xff not ours")
        if self.capabilities.takes_bytes:
            await self.put_raw_header(topic, metadata)
        await self.put(*numbered(topic, 1))
        count = 3 if self.capabilities.takes_bytes else 2
        async with self.source("one", topic) as source:
            deliveries = await self.receive(source, count)
            foreign = [d.message for d in deliveries if d.problem is not None]
            assert len(foreign) == count - 1
            assert b"\xff not ours" in [message.payload for message in foreign]
            if self.capabilities.takes_bytes:
                kept = [bytes_of(v) for m in foreign for v in m.headers.values()]
                assert metadata in kept
            for delivery in deliveries:
                await delivery.ack()
        async with self.source("one", topic) as source:
            assert not await self.anything(source)

    @checks("takes_bytes_as_topic")
    async def test_a_foreign_topic_that_is_not_text_is_kept(self) -> None:
        beginning = self.topic()
        topics = f"{beginning}.*"
        await self.prepare(topics, "one")
        await self.put_raw_topic(f"{beginning}.".encode() + b"\xff\xfe")
        await self.put(*numbered(f"{beginning}.text", 1))
        async with self.source("one", topics) as source:
            deliveries = await self.receive(source, 2)
            (foreign,) = (d for d in deliveries if d.problem is not None)
            kept = bytes_of(foreign.message.topic)
            assert kept == f"{beginning}.".encode() + b"\xff\xfe"
            for delivery in deliveries:
                await delivery.ack()
        async with self.source("one", topics) as source:
            assert not await self.anything(source)
