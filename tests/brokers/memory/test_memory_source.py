"""The memory source fulfils the contract of a source."""

import asyncio
from datetime import timedelta

import pytest

from pillarbox import Message
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError


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
