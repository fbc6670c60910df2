"""The publisher suite: a broker is unavailable, recovers, is cut off, or hangs."""

import asyncio

import pytest

from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import numbered
from pillarbox.relay.publisher import Acked
from pillarbox.relay.testing.publisher_case import PublisherCase

__all__ = ["PublisherOutage"]


class PublisherOutage(PublisherCase):
    """Nothing hangs while the broker is unavailable, and no message is lost."""

    @checks("goes_away")
    async def test_an_outage_is_reported_without_a_hang_and_loses_nothing(self) -> None:
        messages = numbered(await self.fresh_topic(), 60, keys=3)
        async with self.publisher() as publisher:
            assert await publisher.publish(messages[:20]) == [Acked()] * 20
            await asyncio.to_thread(self.stop_broker)
            try:
                for _ in range(2):
                    async with asyncio.timeout(self.patience):
                        with pytest.raises(BrokerUnavailableError) as raised:
                            await publisher.publish(messages[20:40])
                    assert str(raised.value)
            finally:
                await asyncio.to_thread(self.start_broker)
            for start in (20, 40):
                batch = messages[start : start + 20]
                answers = await self.until_answered(publisher, batch)
                assert answers == [Acked()] * 20
        await self.expect_in_order(messages)

    @checks("goes_away")
    async def test_while_the_broker_is_unavailable_none_can_enter_and_all_can_leave(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        try:
            async with asyncio.timeout(2 * self.patience):
                async with self.publisher() as publisher:
                    await publisher.publish(numbered(topic, 1))
                    await asyncio.to_thread(self.stop_broker)
                    with pytest.raises(BrokerUnavailableError):
                        async with self.publisher():
                            pass
        finally:
            await asyncio.to_thread(self.start_broker)

    @checks("goes_away")
    async def test_acked_messages_have_arrived_despite_cut_connections(self) -> None:
        messages = numbered(await self.fresh_topic(), 360, keys=3)
        batches = [messages[start : start + 60] for start in range(0, 360, 60)]
        async with self.publisher() as publisher:
            for number, batch in enumerate(batches):
                if number % 3 == 1:
                    cut = asyncio.create_task(asyncio.to_thread(self.cut_connections))
                    answers = await self.until_answered(publisher, batch)
                    await cut
                else:
                    answers = await self.until_answered(publisher, batch)
                assert answers == [Acked()] * 60
        await self.expect_in_order(messages)

    @checks("stalls")
    async def test_a_call_to_a_broker_that_hangs_can_be_cancelled(self) -> None:
        messages = numbered(await self.fresh_topic(), 40, keys=2)
        async with self.publisher() as publisher:
            assert await publisher.publish(messages[:20]) == [Acked()] * 20
            await asyncio.to_thread(self.stall_broker)
            try:
                async with asyncio.timeout(self.patience):
                    with pytest.raises((TimeoutError, BrokerUnavailableError)):
                        async with asyncio.timeout(0.5):
                            await publisher.publish(messages[20:])
            finally:
                await asyncio.to_thread(self.resume_broker)
            answers = await self.until_answered(publisher, messages[20:])
            assert answers == [Acked()] * 20
        await self.expect_in_order(messages)
