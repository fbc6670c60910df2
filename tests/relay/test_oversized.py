"""Rows inserted by hand that are too large for an index are dead-lettered."""

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


async def test_a_long_topic_is_cut_off_and_never_published(
    database_url: str,
) -> None:
    insert(database_url, Message("orders", b""))
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
    assert tally == RetryCounts(failed=1)
    assert publisher.calls == []


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
