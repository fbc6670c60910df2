"""The source suite: several consumers, several replicas, and redelivery."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta

from pillarbox.inbox.poison.history import FIRST_DELIVERY
from pillarbox.inbox.source import Source
from pillarbox.inbox.testing.source_case import SourceCase
from pillarbox.outbox.gather import end
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import numbered, numbers_by_key

__all__ = ["SourceSharing"]


class SourceSharing(SourceCase):
    """Which replica gets a message, and which one gets a dead replica's messages."""

    @checks("fans_out")
    async def test_each_consumer_gets_everything(self) -> None:
        topic = await self.fresh_topic("one", "two")
        messages = numbered(topic, 30, keys=5)
        await self.put(*messages)
        async with self.source("one", topic) as one, self.source("two", topic) as two:
            for source in (one, two):
                arrived = await self.handle(source, 30)
                assert {m.id for m in arrived} == {m.id for m in messages}

    @checks("shares")
    async def test_replicas_share_and_nothing_is_handled_twice(self) -> None:
        topic = await self.fresh_topic()
        put: list[Message] = []
        handled: dict[str, list[Message]] = {"a": [], "b": []}
        progress = asyncio.Event()
        enough = asyncio.Event()

        async def work(name: str, source: Source) -> None:
            while not enough.is_set():
                for delivery in await source.receive(limit=5):
                    handled[name].append(delivery.message)
                    await delivery.ack()
                    progress.set()

        async def put_more() -> None:
            more = numbered(topic, 20, keys=50, start=len(put))
            put.extend(more)
            await self.put(*more)
            await asyncio.sleep(0.1)

        async with (
            asyncio.timeout(2 * self.patience),
            self.source("one", topic) as a,
            self.source("one", topic) as b,
            asyncio.TaskGroup() as tasks,
        ):
            for name, source in (("a", a), ("b", b)):
                tasks.create_task(work(name, source))
            while not (handled["a"] and handled["b"]):
                await put_more()
            put_before = len(put)
            while len(put) < put_before + 60:
                await put_more()
            while len({m.id for both in handled.values() for m in both}) < len(put):
                progress.clear()
                await progress.wait()
            enough.set()
        times = Counter(m.id for both in handled.values() for m in both)
        assert set(times) == {m.id for m in put}
        joined = 0 if self.capabilities.joins_quietly else put_before
        assert {times[m.id] for m in put[joined:]} == {1}

    @checks("shares", "hands_back")
    async def test_what_one_replica_hands_back_goes_to_another(self) -> None:
        topic = await self.fresh_topic()
        returned = 0

        async def hand_back(source: Source) -> None:
            nonlocal returned
            while True:
                for delivery in await source.receive(limit=5):
                    returned += await delivery.hand_back(timedelta(seconds=0.5))

        async with self.source("one", topic) as old, self.source("one", topic) as new:
            handing_back = asyncio.create_task(hand_back(old))
            while not returned:
                await self.put(*numbered(topic, 20, keys=20))
                await self.handle(new, 20)
            await end([handing_back])

    @checks("reads_ahead")
    async def test_urgent_messages_overtake_others(self) -> None:
        topic = await self.fresh_topic()
        flood = [
            message.replace(priority=Priority.BULK)
            for message in numbered(topic, 600, keys=30)
        ]
        urgent = Message(topic, b"600", key="urgent", priority=Priority.REALTIME)
        await self.put(*flood, urgent)
        received: list[Message] = []
        async with self.source("one", topic) as source:
            while not received or received[-1].id != urgent.id:
                (delivery,) = await self.receive(source, 1, limit=1)
                received.append(delivery.message)
                await asyncio.sleep(0.001)  # as long as a quick handler takes
                await delivery.ack()
        assert len(received) < 300
        del received[-1]
        by_key = numbers_by_key(received)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())

    @checks("one_receives")
    async def test_one_replica_receives_until_it_leaves_and_the_next_continues(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 3))
        async with AsyncExitStack() as stack:
            async with self.source("one", topic) as first:
                held = await self.receive(first, 3)
                second = await stack.enter_async_context(self.source("one", topic))
                await self.put(*numbered(topic, 2, start=3))
                assert not await self.anything(second)
                assert topic in set(second.abilities.standing_by())
                await held[0].ack()
                # Others of its key must not overtake it when it is left.
                await held[1].nack(timedelta(minutes=1))
            arrived = await self.handle(second, 4)
            assert not set(second.abilities.standing_by())
        assert numbers_by_key(arrived) == {"key-0": [1, 2, 3, 4]}

    @checks("one_receives", "survives_a_crash")
    async def test_what_a_killed_replica_held_comes_before_anything_newer(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 6, keys=2))
        await self.die_holding("one", topic, 6)
        async with self.source("one", topic) as second:
            await self.put(*numbered(topic, 6, keys=2, start=6))
            arrived = await self.handle(second, 12)
        assert numbers_by_key(arrived) == {
            "key-0": [0, 2, 4, 6, 8, 10],
            "key-1": [1, 3, 5, 7, 9, 11],
        }

    @checks("one_receives", "hands_back")
    async def test_a_replica_without_a_handler_lets_another_one_receive(self) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 1))

        async def hand_back(source: Source) -> None:
            while True:
                for delivery in await self.receive(source, 1):
                    await delivery.hand_back(timedelta(seconds=2))

        async with self.source("one", topic) as old, self.source("one", topic) as new:
            handing_back = asyncio.create_task(hand_back(old))
            (arrived,) = await self.handle(new, 1)
            await end([handing_back])
        assert arrived.payload == b"0"

    @checks()
    async def test_unsettled_deliveries_are_released_when_a_source_is_left(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 6))
        async with self.source("one", topic) as source:
            deliveries = await self.receive(source, 6)
            await deliveries[0].ack()
        async with self.source("one", topic) as source:
            again = await self.receive(source, 5)
            assert {d.attempts for d in again} == {0}
            left = [delivery.message.id for delivery in deliveries[1:]]
            came = [delivery.message.id for delivery in again]
            assert set(came) == set(left)
            assert came == left or not self.capabilities.ordered_by_key
            for delivery in again:
                await delivery.ack()

    @checks("survives_a_crash")
    async def test_what_a_killed_process_held_is_redelivered_and_may_have_been_started(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        messages = numbered(topic, 6)
        await self.put(*messages)
        await self.die_holding("one", topic, 6)
        arrived: list[Message] = []
        async with self.source("one", topic) as source:
            while len({m.id for m in arrived}) < 6:
                for delivery in await self.receive(source, 1):
                    # Otherwise, a message that kills its process does so forever.
                    assert delivery.attempts or delivery.history
                    assert delivery.history != FIRST_DELIVERY
                    arrived.append(delivery.message)
                    await delivery.ack()
        assert {m.id for m in arrived} == {m.id for m in messages}
        if self.capabilities.ordered_by_key:
            assert numbers_by_key(arrived) == numbers_by_key(messages)

    @checks("keeps_alive")
    async def test_a_delivery_in_progress_is_delivered_to_no_replica_again(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        await self.put(*numbered(topic, 1))
        async with self.source("one", topic) as slow:
            (delivery,) = await self.receive(slow, 1)
            async with AsyncExitStack() as others:
                replicas = [slow]
                if self.capabilities.shares:
                    other = self.source("one", topic)
                    replicas.append(await others.enter_async_context(other))
                during = timedelta(seconds=2 * self.hold)
                arrivals = [self.anything(replica, during) for replica in replicas]
                assert not any(await asyncio.gather(*arrivals))
            await delivery.ack()
            assert not await self.anything(slow)
        async with self.source("one", topic) as source:
            assert not await self.anything(source)
