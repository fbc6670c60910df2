"""From Redis Streams through a consumer: unreadable entries stop nothing."""

import asyncio
import html
import re
from typing import Any

import pytest
from redis import Redis
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, Message
from pillarbox.inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from pillarbox.inbox.sources.redis import RedisSource
from pillarbox.outbox.cli.main import main
from tests.fixtures import positions
from tests.fixtures.consumers import NEVER, async_sessions_of, running
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.sources import publish
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import browsing

RAW = b"\xff\x00 raw"
LETTERS = """
    SELECT message_id, topic, payload, attempts, status, error_reason
      FROM inbox.dead_letter
"""


@pytest.mark.parametrize(
    ("id", "says"),
    [(None, "id"), (b"evt_1", "isn't a UUID")],
    ids=["no id", "an id of another format"],
)
async def test_a_delivery_with_an_invalid_id_is_dead_lettered_and_the_next_handled(
    database_url: str, redis_url: str, id: bytes | None, says: str
) -> None:
    handled: list[bytes] = []
    with Redis.from_url(redis_url, protocol=2) as client:
        await publish(redis_url, Message("orders", b"before", key="k"))
        ((_, fields),) = client.xrange("orders")
        broken: dict[Any, Any] = {**fields, b"ce_data": RAW}
        del broken[b"ce_id"]
        client.xadd("orders", broken if id is None else {**broken, b"ce_id": id})
        await publish(redis_url, Message("orders", b"after", key="k"))

        async with async_sessions_of(database_url) as sessions:
            source = RedisSource(redis_url, consumer="billing", topics=["orders"])
            consumer = Consumer(source, sessions, name="billing", retry=NEVER)

            @consumer.handles("orders")
            async def handle(session: AsyncSession, message: Message) -> None:
                handled.append(message.payload)

            async with running(consumer) as events:
                await events.wait_for(MessageHandled, 2)
                (given_up,) = await events.wait_for(MessageDeadLettered)

        pending: Any = client.xpending("orders", "billing")
        assert pending["pending"] == 0
    assert handled == [b"before", b"after"]
    ((message_id, *letter, reason),) = execute(database_url, LETTERS)
    assert message_id.startswith("sha256:")
    assert letter == ["orders", RAW, 0, "PENDING"]
    assert reason == given_up.reason
    assert says in reason


async def test_a_consumer_that_fails_now_is_shown_by_status_blocked_trace_and_page(
    database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(database_url, "CALL outbox.maintain()")
    message = Message("orders", b"", key="k")
    insert(database_url, message)
    positions.publish(database_url)
    await publish(redis_url, message)
    secret = redis_url.replace("redis://", "redis://:pass@")
    with Redis.from_url(redis_url, protocol=2) as client:
        client.config_set("requirepass", "pass")
        try:
            async with async_sessions_of(database_url) as sessions:
                consumer = Consumer(secret, sessions, name="billing", retry=NEVER)

                @consumer.handles("orders")
                async def handle(session: AsyncSession, message: Message) -> None:
                    raise KeyError("no such customer")

                async with running(consumer) as events:
                    await events.wait_for(HandlerFailed)
                    await asyncio.to_thread(
                        wait_for,
                        "the consumer records it",
                        lambda: execute(
                            database_url,
                            "SELECT 1 FROM inbox.process WHERE failing_since < now()",
                        ),
                    )
                    told = await asyncio.to_thread(
                        commands, database_url, str(message.id), capsys
                    )
                    with browsing(database_url) as browser:
                        told["page"] = browser.get("/")
        finally:
            client.config_set("requirepass", "")

    assert told["status"].startswith("1 warning: ")
    assert ": 1 blocked key, " in told["blocked"]
    assert re.search(r" 1 +\d+s ", told["blocked"]), "failing for some seconds"
    for text in told.values():
        assert "billing" in text
        assert "KeyError: raised in" in html.unescape(text)
        assert "no such customer" not in html.unescape(text)
        assert "pass@" not in text


def commands(url: str, id: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    said = {}
    for command, *arguments in (("status",), ("blocked",), ("trace", id)):
        main([command, *arguments, "--database", url])
        said[command] = capsys.readouterr().out
    return said
