"""Relays of one database publish to one broker, whichever of them starts first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Message
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import LANES
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.events import (
    BrokerDiffers,
    BrokerMatches,
    LeaseTaken,
    RelayStarted,
)
from pillarbox.relay.relay import Relay
from tests.fixtures.dead_letters import find, give_up
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import QUICK, insert, numbered, running
from tests.fixtures.sessions import execute
from tests.relay.test_sharing import held, wait_until_held


class At(ScriptedPublisher):
    """A publisher to a broker with this identity."""

    def __init__(self, identity: str) -> None:
        super().__init__()
        self.identity = identity


@asynccontextmanager
async def switching(url: str, publisher: At) -> AsyncIterator[RecordedEvents]:
    """Run a relay that switches the others to its broker."""
    events = RecordedEvents()
    relay = Relay(url, publisher, QUICK, observers=[events], switch_broker=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        await events.wait_for(RelayStarted)
        yield events
        relay.stop()


def recorded(url: str) -> Any:
    ((identity,),) = execute(
        url, "SELECT broker FROM outbox.reader WHERE reader = 'main'"
    )
    return identity


async def test_a_relay_with_another_broker_publishes_nothing_and_says_why(
    database_url: str,
) -> None:
    ours, theirs = At("redis://a/0"), At("redis://b/0")
    health = Health(RelayStarted)
    async with (
        running(database_url, ours) as first,
        running(database_url, theirs, lease=timedelta(seconds=1)) as second,
    ):
        for event in second.events.events:
            health(event)
        await wait_until_held(first, LANES)
        insert(database_url, *numbered("abcdefghij", 4))
        await ours.until_acked(40)

        (said,) = second.events.of(BrokerDiffers)
        assert (said.broker, said.recorded) == ("redis://b/0", "redis://a/0")
        assert "--switch-broker" in said.remedy
        assert health.waits_for == [BrokerDiffers.waits_for]
        assert (held(second), theirs.calls) == (set(), [])
    assert recorded(database_url) == "redis://a/0"


async def test_relays_with_the_same_broker_share_the_lanes(database_url: str) -> None:
    # The broker of any publisher may be given as its URL.
    first, second = "redis://ann:old@B:6379,a", "redis://ann:new@a,b/0?maxlen=5"
    async with (
        running(database_url, ScriptedPublisher(), broker=first) as one,
        running(database_url, ScriptedPublisher(), broker=second) as two,
    ):
        await wait_until_held(one, LANES // 2)
        await wait_until_held(two, LANES // 2)
        assert two.events.of(BrokerDiffers) == []
    assert recorded(database_url) == "redis://a,b/0"


async def test_relays_of_the_old_broker_return_their_lanes_after_a_switch(
    database_url: str,
) -> None:
    old, new = At("redis://a/0"), At("redis://b/0")
    async with running(database_url, old) as first:
        await wait_until_held(first, LANES)
        old.open.clear()
        insert(database_url, *numbered("k", 3))
        await old.until(lambda: bool(old.calls))
        async with switching(database_url, new) as events:
            await events.wait_for(LeaseTaken)
            await first.events.wait_for(BrokerDiffers)
            old.open.set()
            await wait_until_held(first, 0)

            insert(database_url, *numbered("l", 3))
            await new.until_acked(3)
            assert old.topics() == ["k/0", "k/1", "k/2"]
            assert new.topics() == ["l/0", "l/1", "l/2"]
            assert recorded(database_url) == "redis://b/0"

        async with switching(database_url, At("redis://a/0")):
            await first.events.wait_for(BrokerMatches)
            await wait_until_held(first, LANES // 2)


async def test_a_relay_that_came_first_yields_to_a_switch_before_it_has_lanes(
    database_url: str,
) -> None:
    async with switching(database_url, At("redis://mine/0")):
        pass
    publisher = At("redis://production/0")
    async with running(database_url, publisher) as relay:
        assert held(relay) == set()
        assert len(relay.events.of(BrokerDiffers)) == 1
        async with switching(database_url, At("redis://production/0")):
            await relay.events.wait_for(LeaseTaken)


async def test_publishers_without_an_identity_are_compared_by_class(
    database_url: str,
) -> None:
    class Other(ScriptedPublisher):
        pass

    async with running(database_url, ScriptedPublisher()) as first:
        await wait_until_held(first, LANES)
        async with running(database_url, Other()) as second:
            (said,) = second.events.of(BrokerDiffers)
    assert (said.recorded, said.broker.endswith("Other")) == ("ScriptedPublisher", True)


async def test_dead_letters_are_not_retried_at_another_broker(
    database_url: str,
) -> None:
    async with running(database_url, At("redis://a/0")) as first:
        await wait_until_held(first, LANES)
    give_up(database_url, Message("orders", b""), schema="outbox")
    theirs = At("redis://b/0")

    async with PublishingRetrier(database_url, lambda: theirs) as retrier:
        (candidate,) = await find(retrier, Criteria())
        with pytest.raises(ConfigError, match=r"redis://b/0.*redis://a/0"):
            await retrier.retry(candidate)
    assert theirs.calls == []
    assert execute(database_url, "SELECT status FROM outbox.dead_letter") == [
        ("PENDING",)
    ]
