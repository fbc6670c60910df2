"""An idle relay notices when its broker becomes unavailable and available again."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import pytest

from pillarbox import Message
from pillarbox.outbox import gather
from pillarbox.outbox.brokers.plugins import implementation
from pillarbox.outbox.observability.health import Health
from pillarbox.relay.events import (
    BatchSettled,
    BrokerLost,
    BrokerRecovered,
    RelayStarted,
    RelayStopped,
)
from pillarbox.relay.publisher import Checkable, Publisher
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import Running, insert, running
from tests.servers.kafka import KafkaCluster
from tests.servers.process import PrivateServer

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(300)]

OFTEN = timedelta(milliseconds=200)


@pytest.fixture(params=["redis", "nats", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> PrivateServer:
    server: PrivateServer = request.getfixturevalue(f"private_{request.param}")
    return server


def publisher_of(url: str) -> Publisher:
    found = implementation("pillarbox.publishers", url)
    return cast("Publisher", found(url))


def waits_for(relay: Running) -> list[str]:
    """Return the answer of `/ready` after the events so far."""
    health = Health(RelayStarted)
    for event in relay.events.events:
        health(event)
    return health.waits_for


async def test_an_idle_relay_is_not_ready_while_its_broker_is_down(
    database_url: str, broker: Any
) -> None:
    async with running(
        database_url, publisher_of(broker.url), broker_check_interval=OFTEN
    ) as relay:
        assert waits_for(relay) == []
        await asyncio.to_thread(broker.kill)
        await relay.events.wait_for(BrokerLost)
        assert waits_for(relay) == ["broker"]

        await asyncio.to_thread(broker.start)
        await relay.events.wait_for(BrokerRecovered, timeout=120)
        assert waits_for(relay) == []


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "never used"])
async def test_an_idle_relay_is_not_ready_while_kafka_is_down(
    database_url: str, private_mock: KafkaCluster, is_used: bool
) -> None:
    private_mock.create_topic("orders", partitions=1)
    async with running(
        database_url, publisher_of(private_mock.url), broker_check_interval=OFTEN
    ) as relay:
        if is_used:
            insert(database_url, Message("orders", b""))
            await relay.events.wait_for(BatchSettled)
        private_mock.stop()
        await relay.events.wait_for(BrokerLost, timeout=120)
        assert waits_for(relay) == ["broker"]
        private_mock.start()
        await relay.events.wait_for(BrokerRecovered, timeout=120)
        assert waits_for(relay) == []


async def test_an_idle_relay_is_not_ready_while_its_database_broker_is_down(
    database_url: str, other_url: str, proxy: MakeProxy
) -> None:
    broker, url = proxy(other_url)
    async with running(
        database_url, publisher_of(url), broker_check_interval=OFTEN
    ) as relay:
        broker.refuse()
        broker.cut()
        await relay.events.wait_for(BrokerLost)
        broker.accept()
        await relay.events.wait_for(BrokerRecovered)
        assert waits_for(relay) == []
        insert(database_url, Message("orders", b""))
        (settled,) = await relay.events.wait_for(BatchSettled)
        assert settled.published == 1


async def test_a_publisher_without_a_check_works(database_url: str) -> None:
    publisher = ScriptedPublisher()
    assert not isinstance(publisher, Checkable)
    async with running(
        database_url, publisher, broker_check_interval=timedelta(milliseconds=1)
    ) as relay:
        insert(database_url, Message("orders", b""))
        await publisher.until_acked(1)
        assert relay.events.of(BrokerLost) == []


async def test_the_relay_survives_any_error_of_a_check(database_url: str) -> None:
    class Broken(ScriptedPublisher):
        async def check(self) -> None:
            raise ValueError("no such thing")

    publisher = Broken()
    async with running(database_url, publisher, broker_check_interval=OFTEN) as relay:
        (lost,) = await relay.events.wait_for(BrokerLost)
        assert lost.reason.startswith("ValueError: raised in test_the_relay_survives_a")
        insert(database_url, Message("orders", b""))
        await publisher.until_acked(1)
        await relay.events.wait_for(BrokerRecovered)


async def test_a_relay_stops_even_if_a_library_swallows_the_cancellation(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Swallowing(ScriptedPublisher):
        def __init__(self) -> None:
            super().__init__()
            self.checked = asyncio.Event()
            self.swallowed = False

        async def check(self) -> None:
            if not self.swallowed:
                self.checked.set()
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                self.swallowed = True

    monkeypatch.setattr(gather, "_CANCEL_AGAIN", 0.1)
    publisher = Swallowing()
    async with running(database_url, publisher, broker_check_interval=OFTEN) as relay:
        await publisher.checked.wait()
    assert publisher.swallowed
    assert len(relay.events.of(RelayStopped)) == 1
