"""A relay on a real database: order per key, retries, dead letters."""

from datetime import UTC, datetime, timedelta

from pillarbox import Message
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.relay.events import BatchSettled, MessageDeadLettered, MessageRefused
from pillarbox.relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    LONG,
    PATIENT,
    dead_letters,
    defer,
    end_runs,
    insert,
    make_due,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute


def refuse(*topics: str, times: int = 1) -> ScriptedPublisher:
    """Return a publisher that nacks each topic `times` times, and then acks."""
    left = dict.fromkeys(topics, times)

    def script(message: Message) -> Confirmation:
        if left.get(message.topic, 0) > 0:
            left[message.topic] -= 1
            return Nacked("not now")
        return Acked()

    return ScriptedPublisher(script)


async def test_the_publisher_receives_a_message_as_it_was_added(
    database_url: str,
) -> None:
    message = Message(
        "orders.placed",
        b"\x00\xff",
        key="ä😀",
        tenant="acme",
        headers={"traceparent": "00-1-2-03", 'quo"te': "\\"},
        content_type="text/xml",
        schema_version=4,
        priority=Priority.REALTIME,
    )
    insert(database_url, message)
    publisher = ScriptedPublisher()

    async with running(database_url, publisher):
        assert await publisher.until_acked(1) == [message]


async def test_a_refused_message_delays_its_key_and_no_other(
    database_url: str,
) -> None:
    insert(database_url, *numbered("abc", 3))
    publisher = refuse("a/1")

    async with running(database_url, publisher, retry=PATIENT) as relay:
        await publisher.until_acked(7)
        (blocked,) = await relay.events.wait_for(MessageRefused)
        assert (blocked.topic, blocked.key, blocked.attempts) == ("a/1", "a", 1)
        insert(database_url, Message("a/3", b"", key="a"), Message("b/3", b"", key="b"))
        await publisher.until_acked(8)
        assert publisher.of_key("a") == ["a/0"]
        make_due(database_url)
        await publisher.until_acked(11)

    assert publisher.of_key("a") == ["a/0", "a/1", "a/2", "a/3"]
    assert publisher.of_key("b") == ["b/0", "b/1", "b/2", "b/3"]
    assert unsettled(database_url) == 0


async def test_after_the_last_attempt_a_message_is_dead_lettered_and_its_key_continues(
    database_url: str,
) -> None:
    bulk = Priority.BULK
    bad = Message(
        "bad", b"\xff", key="k", tenant="acme", headers={"a": "b"}, priority=bulk
    )
    insert(database_url, bad, Message("next", b"", key="k", priority=bulk))
    publisher = refuse("bad", times=99)

    async with running(database_url, publisher) as relay:
        await publisher.until_acked(1)
        (given_up,) = await relay.events.wait_for(MessageDeadLettered)

    assert (given_up.id, given_up.attempts, given_up.reason) == (bad.id, 3, "not now")
    assert publisher.topics() == ["next"]
    assert unsettled(database_url) == 0
    rows = execute(
        database_url,
        "SELECT origin, message_id, topic, key, tenant, attempts, schema_version,"
        " priority, content_type, headers, payload, error_reason, status, retry_count"
        " FROM outbox.dead_letter",
    )
    assert rows == [
        (
            *("relay:main", str(bad.id), "bad", "k", "acme", 3, 1),
            *("bulk", "application/octet-stream", {"a": "b"}, b"\xff", "not now"),
            *("PENDING", 0),
        )
    ]


async def test_a_permanently_refused_message_is_dead_lettered_at_once(
    database_url: str,
) -> None:
    insert(database_url, *numbered("a", 3))
    forbidden = Nacked("no\0 such topic \ud800", permanent=True)
    publisher = ScriptedPublisher(lambda m: forbidden if m.topic == "a/1" else Acked())

    async with running(database_url, publisher):
        await publisher.until_acked(2)

    assert publisher.topics() == ["a/0", "a/2"]
    assert dead_letters(database_url) == [("a/1", 1, r"no\0 such topic \ud800")]


async def test_a_scheduled_message_is_published_at_its_time_and_delays_no_other(
    database_url: str,
) -> None:
    now = datetime.now(UTC)
    soon = now + timedelta(milliseconds=400)
    insert(
        database_url,
        Message("later", b"", key="k", available_at=now + LONG),
        Message("now", b"", key="k"),
        Message("soon", b"", available_at=soon),
        Message("overdue", b"", available_at=now - timedelta(days=1)),
    )
    publisher = ScriptedPublisher()

    async with running(database_url, publisher) as relay:
        await publisher.until(lambda: "soon" in publisher.topics())
        assert datetime.now(UTC) >= soon
        await publisher.until_acked(3)
        assert sorted(publisher.topics()) == ["now", "overdue", "soon"]
        await relay.events.wait_for(BatchSettled)
        make_due(database_url)
        await publisher.until_acked(4)

    assert publisher.topics()[3:] == ["later"]
    assert unsettled(database_url) == 0


async def test_an_old_due_message_is_published_before_newer_ones_of_its_key(
    database_url: str,
) -> None:
    insert(database_url, Message("old", b"", key="k"))
    execute(
        database_url,
        "UPDATE outbox.message SET created_at = created_at - interval '3 hours'",
    )
    defer(database_url, "old")
    publisher = ScriptedPublisher()
    async with running(database_url, publisher) as relay:
        insert(database_url, Message("warm up", b""))
        await publisher.until_acked(1)
        await relay.events.wait_for(BatchSettled)
        insert(database_url, Message("young", b"", key="k"), Message("other", b""))
        await publisher.until_acked(2)
        assert publisher.of_key("k") == []
        make_due(database_url)
        await publisher.until_acked(4)

    assert publisher.of_key("k") == ["old", "young"]


async def test_a_key_continues_when_another_relay_settles_its_head(
    database_url: str,
) -> None:
    insert(database_url, *numbered("a", 3))
    publisher = refuse("a/0")

    async with running(database_url, publisher, retry=PATIENT) as relay:
        await relay.events.wait_for(BatchSettled)
        end_runs(database_url, "a/0")
        await publisher.until_acked(2)

    assert publisher.topics() == ["a/1", "a/2"]


async def test_a_postponed_message_blocks_its_key_and_is_never_dead_lettered(
    database_url: str,
) -> None:
    insert(database_url, *numbered("a", 2))
    later = Nacked("later", retry_after=LONG)
    publisher = ScriptedPublisher(lambda message: later)

    for _ in range(3):
        async with running(
            database_url, publisher, retry=RetryPolicy(max_attempts=1)
        ) as relay:
            await relay.events.wait_for(MessageRefused)
            await relay.events.wait_for(BatchSettled)
        make_due(database_url)
    assert [[m.topic for m in call] for call in publisher.calls[1:]] == [["a/0"]] * 2
    assert dead_letters(database_url) == []

    publisher.script = lambda message: Acked()
    async with running(database_url, publisher):
        await publisher.until_acked(2)
    assert publisher.of_key("a") == ["a/0", "a/1"]
