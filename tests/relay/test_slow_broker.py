"""A relay whose broker is too slow for a whole batch within the publish timeout."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from outbox.message import Message
from relay.events import BrokerLost, BrokerRecovered
from relay.publisher import Confirmation
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
