"""Idle replicas don't poll their broker at the same times."""

import asyncio
import json
import re
from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import nats
from nats.aio.msg import Msg
from redis import Redis

from pillarbox.inbox.source import Source
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.inbox.sources.redis import RedisSource
from pillarbox.outbox.retry import jittered
from tests.servers.nats import NatsServer

POLL = timedelta(milliseconds=200)
ENOUGH = 6


def test_a_jittered_wait_is_between_half_and_all_of_its_length() -> None:
    waits = [jittered(8.0) for _ in range(1000)]
    assert len(set(waits)) > 990
    assert 4.0 <= min(waits) < 4.5
    assert 7.5 < max(waits) <= 8.0


async def idle(source: Source, is_enough: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_enough():
            assert not await source.receive(limit=1)


def whole(waits: list[float]) -> list[float]:
    """Return the waits that weren't cut short by something due earlier."""
    return [wait for wait in waits if wait >= 0.099]


def differ(waits: list[float], most: float = 0.2) -> bool:
    return max(waits) <= most and max(waits) - min(waits) > 0.01


async def test_redis_reads_wait_for_different_times(redis_url: str) -> None:
    waits: list[float] = []
    with Redis.from_url(redis_url) as client, client.monitor() as monitor:

        def listen() -> None:
            while len(whole(waits)) < ENOUGH:
                said = monitor.next_command()["command"]
                found = re.search(r"XREAD .*BLOCK (\d+)", said, re.IGNORECASE)
                if found is not None:
                    waits.append(int(found[1]) / 1000)

        listener = Thread(target=listen)
        listener.start()
        async with RedisSource(
            redis_url, consumer="billing", topics=["orders"], poll_interval=POLL
        ) as source:
            await idle(source, lambda: len(whole(waits)) >= ENOUGH)
        listener.join(60)
    assert differ(whole(waits))


async def test_nats_pulls_wait_for_different_times(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    waits: list[float] = []

    async def note(asked: Msg) -> None:
        waits.append(json.loads(asked.data)["expires"] / 1e9)

    async with await nats.connect(shared_nats.url, allow_reconnect=False) as client:
        await client.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{nats_topics}.>", cb=note)
        await client.flush()
        async with NatsSource(
            shared_nats.url,
            consumer="billing",
            topics=[f"{nats_topics}.*"],
            poll_interval=POLL,
        ) as source:
            await idle(source, lambda: len(whole(waits)) >= ENOUGH)
    # Whoever reads alone pulls for longer than it polls.
    assert differ(whole(waits), most=2.0)
