"""A consumer begins to consume: after a kill of RabbitMQ, in an alarm, with few rights.

Before it does, a marker shows what the queue's count of consumers is worth.
"""

import asyncio
import json
from typing import Final
from uuid import uuid4

import pytest

from pillarbox.outbox.errors import BrokerUnavailableError
from tests.brokers.rabbitmq.test_rabbitmq_source import source
from tests.fixtures.consumers import numbered
from tests.fixtures.rabbitmq import channel_of, user
from tests.fixtures.sources import (
    payloads,
    publish,
    receive,
    receive_despite_losses,
    until_lost,
)
from tests.fixtures.waiting import wait_for
from tests.servers.rabbitmq import RabbitMQServer

KILLS: Final = 4
KEYS: Final = 5
ALL: Final = 1_000
HELD: Final = 300


@pytest.fixture
def consumer() -> str:
    """A consumer name that no other test uses."""
    return f"billing-{uuid4().hex}"


@pytest.fixture
def url(private_rabbitmq: RabbitMQServer) -> str:
    return f"{private_rabbitmq.url}?exchange=test-{uuid4().hex}"


def limit(server: RabbitMQServer, queue: str, *definition: str) -> None:
    """Limit a queue to three messages by a policy."""
    name = f"<<{json.dumps(queue)}>>"
    limits = ", ".join(['{<<"max-length">>, 3}', *definition])
    server.evaluate(
        f'rabbit_policy:set(<<"/">>, {name}, {name}, [{limits}], 0,'
        ' <<"queues">>, <<"tests">>).'
    )


@pytest.mark.fault
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{}, {"shards": 2}])
async def test_after_a_kill_of_rabbitmq_what_a_replica_held_comes_first(
    private_rabbitmq: RabbitMQServer, url: str, options: dict[str, int]
) -> None:
    for number in range(KILLS):
        consumer = f"billing-{number}-{uuid4().hex}"
        async with source(url, consumer, prefetch=HELD, **options) as killed:
            assert await killed.receive(limit=1) == []
            await asyncio.to_thread(private_rabbitmq.write_names)
            await publish(url, *numbered(ALL, keys=KEYS))
            await receive_despite_losses(killed, HELD)
            await asyncio.to_thread(private_rabbitmq.kill)
            with pytest.raises(BrokerUnavailableError):
                await until_lost(killed)
        await asyncio.to_thread(private_rabbitmq.start)
        # A shard can have a message twice; then receipts skip the second one.
        handled = [dict[int, None]() for _ in range(KEYS)]
        async with source(url, consumer, prefetch=HELD, **options) as following:
            while sum(map(len, handled)) < ALL:
                for delivery in await receive_despite_losses(following, 1):
                    (payload,) = payloads([delivery])
                    handled[payload % KEYS][payload] = None
                    await delivery.ack()
        for key in range(KEYS):
            assert list(handled[key]) == list(range(key, ALL, KEYS))


async def test_while_rabbitmq_is_low_on_memory_a_consumer_begins_and_acks(
    private_rabbitmq: RabbitMQServer, url: str, consumer: str
) -> None:
    def has_alarm() -> bool:
        return private_rabbitmq.evaluate("rabbit_alarm:get_alarms().") != "[]"

    set_limit = "vm_memory_monitor:set_vm_memory_high_watermark"
    async with source(url, consumer):
        pass
    await publish(url, *numbered(ALL))
    private_rabbitmq.evaluate(f"{set_limit}(0.00001).")
    try:
        await asyncio.to_thread(wait_for, "it is low on memory", has_alarm)
        async with source(url, consumer, prefetch=HELD) as draining:
            handled = list[int]()
            while len(handled) < ALL:
                for delivery in await receive(draining, 1):
                    handled += payloads([delivery])
                    await delivery.ack()
    finally:
        private_rabbitmq.evaluate(f"{set_limit}(0.4).")
    assert handled == list(range(ALL))


async def test_a_user_who_may_not_publish_consumes_and_is_told_what_that_costs(
    shared_rabbitmq: RabbitMQServer, rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer):
        pass
    await publish(rabbitmq_url, *numbered(20))
    with user(shared_rabbitmq, consumer, "secret", ".*", write=f"^{consumer}"):
        url = rabbitmq_url.replace("guest:guest", f"{consumer}:secret")
        async with source(url, consumer) as limited:
            assert payloads(await receive(limited, 20)) == list(range(20))
            (warning,) = limited.abilities.warnings()
            assert "amq.default" in warning
            assert "grant the user write on it" in warning
    async with source(rabbitmq_url, consumer) as granted:
        await receive(granted, 20)
        assert granted.abilities.warnings() == []


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_queue_that_drops_its_oldest_message_when_full_loses_none(
    rabbitmq_url: str, consumer: str, queue_type: str
) -> None:
    with channel_of(rabbitmq_url) as channel:
        arguments = {"x-queue-type": queue_type, "x-max-length": 3}
        channel.queue_declare(consumer, durable=True, arguments=arguments)
    async with source(rabbitmq_url, consumer):
        pass
    await publish(rabbitmq_url, *numbered(3))
    async with source(rabbitmq_url, consumer) as only:
        assert payloads(await receive(only, 3)) == [0, 1, 2]
        (warning,) = only.abilities.warnings()
        assert "x-max-length" in warning
        assert "recreate it when it is empty" in warning


async def test_a_classic_queue_needs_no_marker_and_no_warning(
    rabbitmq_url: str, consumer: str
) -> None:
    with channel_of(rabbitmq_url) as channel:
        channel.queue_declare(consumer, durable=True)
    async with source(rabbitmq_url, consumer) as only:
        assert await only.receive(limit=1) == []
        assert only.abilities.warnings() == []


async def test_a_full_queue_that_rejects_messages_is_consumed_from(
    rabbitmq_url: str, shared_rabbitmq: RabbitMQServer, consumer: str
) -> None:
    limit(shared_rabbitmq, consumer, '{<<"overflow">>, <<"reject-publish">>}')
    async with source(rabbitmq_url, consumer):
        pass
    await publish(rabbitmq_url, *numbered(3))
    with channel_of(rabbitmq_url) as channel:
        # It accepts one more, and then it rejects.
        channel.basic_publish("", consumer, b"3")
    async with source(rabbitmq_url, consumer) as only:
        assert len(await receive(only, 3)) >= 3
        assert only.abilities.warnings() == []


async def test_a_full_queue_drops_one_message_for_a_marker_however_slow_the_disk_is(
    private_rabbitmq: RabbitMQServer, url: str, consumer: str
) -> None:
    limit(private_rabbitmq, consumer)
    async with source(url, consumer):
        pass
    await publish(url, *numbered(3))
    private_rabbitmq.evaluate(
        "Wal = whereis(ra_log_wal), sys:suspend(Wal),"
        " spawn(fun() -> timer:sleep(2500), sys:resume(Wal) end)."
    )
    async with source(url, consumer) as only:
        assert payloads(await receive(only, 2)) == [1, 2]


async def test_a_queue_that_is_down_is_not_consumed_from(
    rabbitmq_url: str, shared_rabbitmq: RabbitMQServer, consumer: str
) -> None:
    queue = f"{{'%2F_{consumer}', node()}}"
    async with source(rabbitmq_url, consumer):
        pass
    await publish(rabbitmq_url, *numbered(3))
    shared_rabbitmq.evaluate(f"ra:stop_server(quorum_queues, {queue}).")
    async with source(rabbitmq_url, consumer) as only:
        for _ in range(3):
            assert await only.receive(limit=1) == []
        assert list(only.abilities.standing_by()) == ["orders"]
        shared_rabbitmq.evaluate(f"ra:restart_server(quorum_queues, {queue}).")
        assert payloads(await receive(only, 3)) == [0, 1, 2]
