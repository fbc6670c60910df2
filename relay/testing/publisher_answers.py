"""The publisher suite: one correct answer for each message."""

import asyncio

from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.conformance import checks
from pillarbox.outbox.testing.samples import numbered
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from pillarbox.relay.testing.publisher_case import PublisherCase

__all__ = ["PublisherAnswers"]


class PublisherAnswers(PublisherCase):
    """Acked messages have arrived, and a nack affects only its own message."""

    @checks()
    async def test_each_message_gets_an_answer(self) -> None:
        messages = numbered(await self.fresh_topic(), 5, keys=2)
        async with self.publisher() as publisher:
            assert list(await publisher.publish([])) == []
            assert await publisher.publish(messages) == [Acked()] * 5
        await self.expect_in_order(messages)

    @checks("refuses_for_ever")
    async def test_a_bad_message_is_refused_permanently_and_others_are_not(
        self,
    ) -> None:
        topic = await self.fresh_topic()
        before, after = numbered(topic, 2), numbered(topic, 2, start=2)
        bad = self.bad_message(topic)
        large = Message(topic, bytes(self.max_payload_bytes + 1))
        other = Message(topic, b"9", key="other")
        async with self.publisher() as publisher:
            answers = await publisher.publish([*before, bad, other, large, *after])
            refused = [answers[2], answers[4], *await publisher.publish([bad, large])]
        for answer in refused:
            assert isinstance(answer, Nacked)
            assert answer.permanent
            assert answer.reason
        assert str(self.max_payload_bytes) in str(answers[4])
        assert [*answers[:2], answers[3], *answers[5:]] == [Acked()] * 5
        await self.expect_in_order([*before, other, *after])

    @checks("refuses_alone")
    async def test_a_refused_message_does_not_stop_the_others(self) -> None:
        first, last = numbered(await self.fresh_topic(), 2, keys=2)
        refused = await self.refused_message()
        async with self.publisher() as publisher:
            answers = await publisher.publish([first, refused, last])
        assert [answers[0], answers[2]] == [Acked()] * 2
        assert isinstance(answers[1], Nacked)
        assert not answers[1].permanent
        assert answers[1].reason
        await self.expect_in_order([first, last])

    @checks()
    async def test_several_tasks_may_publish_at_once(self) -> None:
        topic = await self.fresh_topic()
        batches = [
            [Message(topic, b"%d" % n, key=f"key-{task}") for n in range(20)]
            for task in range(4)
        ]
        async with self.publisher() as publisher:
            answers = await asyncio.gather(*map(publisher.publish, batches))
        assert [list(a) for a in answers] == [[Acked()] * 20] * 4
        messages = [message for batch in batches for message in batch]
        arrived = await self.expect_in_order(messages)
        assert len(arrived) == len(messages)

    @checks()
    async def test_nothing_is_confirmed_after_the_publisher_is_left(self) -> None:
        topic = await self.fresh_topic()
        async with self.publisher() as publisher:
            pass
        answers: list[Confirmation] = []
        try:
            async with asyncio.timeout(self.patience):
                answers += await publisher.publish(numbered(topic, 1))
        except BrokerUnavailableError:
            pass
        assert not any(isinstance(answer, Acked) for answer in answers)

    @checks()
    async def test_a_call_can_be_cancelled_at_any_moment_and_does_no_harm(self) -> None:
        messages = numbered(await self.fresh_topic(), 60, keys=3)
        async with self.publisher() as publisher:
            for turns in range(40):
                task = asyncio.create_task(self.publish_on_and_on(publisher, messages))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task}, timeout=self.patience)
                assert task.cancelled()
            async with asyncio.timeout(self.patience):
                answers = await self.until_answered(publisher, messages)
        assert answers == [Acked()] * len(messages)
        await self.expect_in_order(messages)
