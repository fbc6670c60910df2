"""From Redis Streams through a consumer: unreadable entries stop nothing."""

import asyncio
import html

import pytest
from redis import Redis
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import HandlerFailed
from outbox.cli.main import main
from pillarbox import Consumer, Message
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
    assert told["blocked"].startswith("1 blocked key, ")
    for text in told.values():
        assert "billing" in text
        assert "no such customer" in html.unescape(text)
        assert "pass@" not in text


def commands(url: str, id: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    said = {}
    for command, *arguments in (("status",), ("blocked",), ("trace", id)):
        main([command, *arguments, "--database", url])
        said[command] = capsys.readouterr().out
    return said
