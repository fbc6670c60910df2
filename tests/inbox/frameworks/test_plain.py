"""The guard as a decorator in a hand-written loop over a real Redis."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis import Redis

from examples.frameworks.plain import GROUP, STREAM
from pillarbox import Message
from pillarbox.relay.publishers.redis import RedisPublisher
from tests.fixtures.processes import RunningProcess
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for


async def test_a_redelivered_entry_is_handled_once(
    url: str, redis_url: str, invoices: Callable[[], list[int]], tmp_path: Path
) -> None:
    redis: Any = Redis.from_url(redis_url, decode_responses=True)
    redis.xgroup_create(STREAM, GROUP, mkstream=True)
    first, second = (Message(STREAM, {"order_id": n}) for n in (1, 2))
    async with RedisPublisher(redis_url) as publisher:
        await publisher.publish([first, first, second, first])
    # One was delivered to a process that died before its ack.
    redis.xreadgroup(GROUP, "one", {STREAM: ">"}, 1)
    consumer = RunningProcess(
        [sys.executable, "-m", "examples.frameworks.plain"],
        tmp_path / "consumer.log",
        {"PILLARBOX_DATABASE_URL": url, "PILLARBOX_BROKER_URL": redis_url},
    )

    def settled() -> tuple[int, int]:
        assert consumer.is_running(), consumer.log()
        (group,) = redis.xinfo_groups(STREAM)
        return group["entries-read"], group["pending"]

    wait_for("all is acked", lambda: settled() == (4, 0))
    consumer.kill()
    redis.close()
    assert invoices() == [1, 2]
    assert execute(url, "SELECT count(*) FROM inbox.receipt") == [(2,)]
