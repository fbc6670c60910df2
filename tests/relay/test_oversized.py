"""Rows inserted by hand that are too large for an index are dead-lettered whole."""

from hashlib import sha256

from outbox.dead_letters.retry import RetryCounts
from pillarbox import Message
from relay.dead_letters.retry import publishing_retrier
from relay.events import MessageDeadLettered
from tests.fixtures.dead_letters import retry
from tests.fixtures.limits import lift_limits
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import dead_letters, insert, running, unsettled
from tests.fixtures.sessions import execute

LONG = "".join(sha256(b"%d" % n).hexdigest() for n in range(100))
"""Incompressible text."""


def lengthen(url: str, column: str, topic: str) -> None:
    lift_limits(url)
    execute(
        url, f"UPDATE outbox.message SET {column} = %s WHERE topic = %s", [LONG, topic]
    )


async def test_a_long_topic_is_shortened_and_published_in_full_by_a_retry(
    database_url: str,
) -> None:
    insert(database_url, Message("orders", b"", headers={"h": "v"}))
    lengthen(database_url, "topic", "orders")
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered)
    assert dead_letters(database_url) == [
        (LONG[:200] + "…", 1, "topic is over 2048 bytes")
    ]
    assert unsettled(database_url) == 0
    assert publisher.calls == []

    publisher = ScriptedPublisher()
    tally = await retry(publishing_retrier(database_url, lambda: publisher))
    assert tally == RetryCounts(succeeded=1)
    ((message,),) = publisher.calls
    assert (message.topic, message.headers) == (LONG, {"h": "v"})


async def test_invalid_headers_are_kept_along_with_an_oversized_topic(
    database_url: str,
) -> None:
    insert(database_url, Message("orders", b""))
    lift_limits(database_url)
    execute(database_url, "UPDATE outbox.message SET headers = '[1]'")
    lengthen(database_url, "topic", "orders")
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered)
    query = "SELECT headers FROM outbox.dead_letter"
    kept = {"headers": [1], "pillarbox-topic": LONG}
    assert execute(database_url, query) == [(kept,)]


async def test_a_message_whose_key_is_too_long_to_block_is_not_published(
    database_url: str,
) -> None:
    insert(database_url, Message("orders", b"", key="k"))
    lengthen(database_url, "key", "orders")
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered)
    ((topic, _, reason),) = dead_letters(database_url)
    assert topic == "orders"
    assert reason == "key is over 2048 bytes"
    assert publisher.calls == []
