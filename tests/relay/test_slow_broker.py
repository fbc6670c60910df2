"""A relay whose broker is too slow for a whole batch within the publish timeout."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from pillarbox.outbox.lane import Priority
from pillarbox.outbox.message import Message
from pillarbox.relay.events import BrokerLost, BrokerRecovered
from pillarbox.relay.publisher import Acked, Confirmation
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, numbered, running
from tests.fixtures.sessions import execute

FEW = 7


class SlowPublisher(ScriptedPublisher):
    """A publisher that never answers a call with more than `FEW` messages."""

    @override
    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        if len(batch) > FEW:
            self.calls.append(list(batch))
            await asyncio.Event().wait()
        return await super().publish(batch)


class WaitingPublisher(ScriptedPublisher):
    """A publisher that keeps a call with a slow message waiting until it is `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open.clear()

    @override
    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        if "slow" in {message.topic for message in batch}:
            return await super().publish(batch)
        self.acked += batch
        self._changed.set()
        return [Acked() for _ in batch]


async def test_a_batch_that_times_out_is_published_in_smaller_calls(
    database_url: str,
) -> None:
    insert(database_url, *numbered("ab", 50))
    publisher = SlowPublisher()

    async with running(
        database_url, publisher, publish_timeout=timedelta(seconds=0.3)
    ) as relay:
        await publisher.until_acked(100)
        await relay.events.wait_for(BrokerRecovered)
        reason = relay.events.of(BrokerLost)[0].reason

    assert reason.startswith("no answer within 0.3 s for ")
    for key in "ab":
        assert publisher.of_key(key) == [f"{key}/{n}" for n in range(50)]
    assert execute(database_url, "SELECT FROM outbox.deferral") == []
    # Each call that was too large was half the size of the one before.
    large = [len(call) for call in publisher.calls if len(call) > FEW]
    assert large == sorted(large, reverse=True)
    assert len(large) < 100 / FEW


async def test_a_message_that_takes_long_holds_up_only_its_own_lane(
    database_url: str,
) -> None:
    urgent = Message("urgent", b"", key="u", priority=Priority.REALTIME)
    publisher = WaitingPublisher()

    async with running(database_url, publisher, concurrency=2):
        insert(database_url, Message("slow", b"", key="s"))
        await publisher.until(lambda: len(publisher.calls) == 1)
        insert(database_url, urgent)

        assert [m.topic for m in await publisher.until_acked(1)] == ["urgent"]
        publisher.open.set()
        await publisher.until_acked(2)
