"""The memory source fulfils the contract of a source."""

import asyncio
from datetime import timedelta

import pytest

from inbox.sources.memory import MemorySource
from outbox import Message
from outbox.errors import ConfigError
from tests.fixtures.consumers import numbered

SOON = timedelta(milliseconds=1)


async def test_messages_come_in_order_and_within_the_limit() -> None:
    messages = numbered(3)
    async with MemorySource(*messages) as source:
        first = await source.receive(limit=2)
        rest = await source.receive(limit=2)
    assert [d.message for d in (*first, *rest)] == messages


async def test_a_nack_without_delay_redelivers_before_all_others() -> None:
    async with MemorySource(*numbered(2)) as source:
        (first,) = await source.receive(limit=1)
        await first.nack()
        (again,) = await source.receive(limit=1)
        assert (again.message, again.attempts) == (first.message, 0)


async def test_a_nack_with_delay_counts_an_attempt() -> None:
    async with MemorySource(*numbered(1)) as source:
        for attempts in range(3):
            (delivery,) = await source.receive(limit=1)
            assert delivery.attempts == attempts
            await delivery.nack(SOON)


async def test_unacked_messages_are_redelivered_in_order() -> None:
    source = MemorySource(*numbered(3))
    async with source:
        deliveries = await source.receive(limit=3)
        await deliveries[1].ack()
        await deliveries[1].ack()
    assert source.acked == [deliveries[1].message]
    again = await source.receive(limit=3)
    assert [d.message for d in again] == [d.message for d in deliveries[::2]]


async def test_an_empty_source_delivers_nothing() -> None:
    assert await MemorySource(poll_interval=SOON).receive(limit=1) == []


async def test_an_added_message_wakes_a_waiting_receive() -> None:
    source = MemorySource(poll_interval=timedelta(minutes=1))
    receiving = asyncio.create_task(source.receive(limit=1))
    message = Message("orders", b"")
    asyncio.get_running_loop().call_soon(source.add, message)
    (delivery,) = await receiving
    assert delivery.message is message


def test_only_a_url_without_a_name_is_accepted() -> None:
    assert MemorySource.from_url("memory://", consumer="c", topics=[]).waiting == 0
    with pytest.raises(ConfigError, match="write memory://"):
        MemorySource.from_url("memory://x", consumer="c", topics=[])
