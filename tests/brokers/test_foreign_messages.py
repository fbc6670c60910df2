"""A foreign message becomes a dead letter that contains all of its bytes."""

import asyncio
import json

from inbox.sources.postgres import InboxSource
from tests.fixtures.foreign_messages import DEEP, RAW, given_up
from tests.fixtures.sessions import execute


async def test_a_delivery_inserted_by_hand_is_dead_lettered(database_url: str) -> None:
    source = InboxSource(database_url, consumer="billing", topics=["orders"])
    headers = [[1, "ä"], {"nested": {"n": None}}]
    texts = [*map(json.dumps, headers), DEEP]

    async def put() -> None:
        for n, foreign in enumerate(texts):
            await asyncio.to_thread(
                execute,
                database_url,
                "INSERT INTO inbox.message (message_id, lane, schema_version,"
                " topic, content_type, headers, payload) VALUES"
                " (gen_random_uuid(), 0, 1, 'orders', 'x/y', %s, %s)",
                [foreign, RAW + b"%d" % n],
            )

    *kept, last = await given_up(database_url, source, put, count=3)
    assert [letter.payload for letter in kept] == [RAW + b"0", RAW + b"1"]
    assert [json.loads(letter.headers["headers"]) for letter in kept] == headers
    assert last.headers == {"headers": DEEP}
