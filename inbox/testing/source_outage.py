"""The source suite: a broker that becomes unavailable and recovers."""

import asyncio

import pytest

from pillarbox.inbox.testing.source_case import SourceCase
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import numbered, numbers_by_key

__all__ = ["SourceOutage"]


class SourceOutage(SourceCase):
    """A source doesn't hang while the broker is unavailable, and loses no messages."""

    @checks("goes_away")
    async def test_an_outage_is_reported_and_loses_no_message(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 10))
        async with self.source("one", topic) as source:
            deliveries = await self.receive(source, 10)
            await asyncio.to_thread(self.stop_broker)
            try:
                for delivery in deliveries[:5]:
                    await delivery.ack()
                async with asyncio.timeout(self.patience):
                    with pytest.raises(BrokerUnavailableError) as raised:
                        await self.until_away(source)
                assert str(raised.value)
            finally:
                await asyncio.to_thread(self.start_broker)
            for delivery in deliveries[5:]:
                await delivery.nack()
            later = numbered(topic, 20, keys=4, start=10)
            await self.put(*later)
            await self.handle_all(source, [d.message for d in deliveries[5:]] + later)

    @checks("goes_away")
    async def test_while_the_broker_is_unavailable_none_can_enter_and_all_can_leave(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 4))
        try:
            async with asyncio.timeout(2 * self.patience):
                async with self.source("one", topic) as source:
                    deliveries = await self.receive(source, 4)
                    await asyncio.to_thread(self.stop_broker)
                    await deliveries[0].ack()
                    with pytest.raises(BrokerUnavailableError):
                        async with self.source("one", topic):
                            pass
        finally:
            await asyncio.to_thread(self.start_broker)
        async with self.source("one", topic) as source:
            assert len(await self.handle(source, 3)) >= 3

    @checks("goes_away")
    async def test_cut_connections_lose_nothing(self) -> None:
        topic = await self.fresh_topic()
        messages = numbered(topic, 80, keys=5)
        await self.put(*messages)
        arrived: list[Message] = []
        async with self.source("one", topic) as source:
            while len({message.id for message in arrived}) < len(messages):
                for delivery in await self.receive(source, 1, limit=20):
                    if len(arrived) in {15, 50}:
                        await asyncio.to_thread(self.cut_connections)
                    arrived.append(delivery.message)
                    await delivery.ack()
        if self.capabilities.ordered_by_key:
            assert numbers_by_key(arrived) == numbers_by_key(messages)

    @checks("stalls")
    async def test_a_stall_is_reported_and_loses_nothing(self) -> None:
        topic = await self.fresh_topic()
        messages = numbered(topic, 40, keys=20)
        await self.put(*messages[:20])
        async with self.source("one", topic) as source:
            held = await self.receive(source, 20)
            await asyncio.to_thread(self.stall_broker)
            try:
                for delivery in held[:10]:
                    await delivery.ack()
                async with asyncio.timeout(2 * self.patience):
                    with pytest.raises(BrokerUnavailableError) as raised:
                        await self.until_away(source)
                assert str(raised.value)
            finally:
                await asyncio.to_thread(self.resume_broker)
            for delivery in held[10:]:
                await delivery.nack()
            await self.put(*messages[20:])
            await self.handle_all(
                source, [d.message for d in held[10:]] + messages[20:]
            )

    @checks("stalls")
    async def test_a_source_can_be_left_while_the_broker_stalls(self) -> None:
        topic = await self.fresh_topic()
        messages = numbered(topic, 4)
        await self.put(*messages)
        try:
            async with asyncio.timeout(2 * self.patience):
                async with self.source("one", topic) as source:
                    deliveries = await self.receive(source, 4)
                    await asyncio.to_thread(self.stall_broker)
                    await deliveries[0].ack()
        finally:
            await asyncio.to_thread(self.resume_broker)
        async with self.source("one", topic) as source:
            await self.handle_all(source, [d.message for d in deliveries[1:]])
