"""A relay on a real database: of a claim and a cancellation, one comes first."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
import pytest

from pillarbox import Cancelled, Message, TooLate, cancel
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.postgres.connection import connect, conninfo
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publisher import Nacked
from pillarbox.relay.replay import ReplayCriteria, replay_published
from tests.fixtures.positions import defer, publish
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import PATIENT, insert, running
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.relay.test_claim import board_of_all_lanes, claim
from tests.relay.test_readers import add as add_reader
from tests.relay.test_readers import relay_of

pytestmark = pytest.mark.timeout(120)

ENTRIES: Final = """
SELECT reader, cause, outcome FROM outbox.deferral WHERE id = %s ORDER BY entry
"""
IS_DUE: Final = "SELECT now() > max(available_at) FROM outbox.message"


def soon(topic: str = "soon", seconds: float = 4, **details: Any) -> Message:
    due_at = datetime.now(UTC) + timedelta(seconds=seconds)
    return Message(topic, b"", available_at=due_at, **details)


def cancelled(url: str, message: Message) -> object:
    with psycopg.connect(conninfo(url)) as connection:
        return cancel(connection, message.id)


async def until(url: str, query: str, expected: list[Any], *values: object) -> None:
    await asyncio.to_thread(
        wait_for, query, lambda: execute(url, query, values) == expected, seconds=60
    )


async def ended_at(url: str, message: Message, *readers: str) -> None:
    """Wait until these readers have ended a cancelled message."""
    query = """
        SELECT reader FROM outbox.deferral
         WHERE id = %s AND outcome = 'cancelled' AND reader <> '' ORDER BY reader
    """
    await until(url, query, [(reader,) for reader in sorted(readers)], message.id)


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_cancelled_message_is_not_published_when_it_is_due(
    database_url: str, is_claimed: bool
) -> None:
    message, publisher = soon(key="k"), ScriptedPublisher()
    if not is_claimed:
        # No claim has read it when it is cancelled, nor when it is due.
        message = soon(seconds=2, key="k")
        insert(database_url, message)
        assert cancelled(database_url, message) == Cancelled()
        await until(database_url, IS_DUE, [(True,)])
    async with running(database_url, publisher):
        if is_claimed:
            insert(database_url, message)
            waits = [("main", "scheduled", None)]
            await until(database_url, ENTRIES, waits, message.id)
            assert cancelled(database_url, message) == Cancelled()
        insert(database_url, Message("next", b"", key="k"))
        await publisher.until_acked(1)
        await ended_at(database_url, message, "main")

    assert publisher.topics() == ["next"], "its key goes on"
    assert cancelled(database_url, message) == Cancelled()


async def test_what_fell_due_while_no_relay_ran_keeps_the_order_of_its_key(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    insert(
        database_url,
        soon("first", seconds=0.3, key="k"),
        Message("second", b"", key="k"),
        soon("third", seconds=0.3, key="k"),
        Message("fourth", b"", key="k"),
    )
    await until(database_url, IS_DUE, [(True,)])
    async with running(database_url, publisher):
        await publisher.until_acked(4)
    assert publisher.topics() == ["first", "second", "third", "fourth"]
    assert execute(database_url, "SELECT count(*) FROM outbox.deferral") == [(0,)]


@pytest.mark.parametrize("what", ["blocked", "too large"])
async def test_a_cancelled_message_is_ended_even_if_its_first_claim_withholds_it(
    database_url: str, what: str
) -> None:
    refused = Message("refused", b"", key="k")
    insert(database_url, refused)
    defer(database_url, "refused", seconds=4)
    message = replace(soon(seconds=2, key="k"), payload=b"x" * 2000)
    insert(database_url, message)
    assert cancelled(database_url, message) == Cancelled()
    await until(database_url, IS_DUE, [(True,)])
    publisher, limit = ScriptedPublisher(), 1000 if what == "too large" else 3000
    async with running(database_url, publisher, max_payload_bytes=limit):
        await ended_at(database_url, message, "main")
        await publisher.until_acked(1)
    assert publisher.topics() == ["refused"]
    assert execute(database_url, ENTRIES, [message.id]) == [
        ("", "settled", "cancelled"),
        ("main", "scheduled", None),
        ("main", "settled", "cancelled"),
    ]


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_first_claim_holds_what_a_transaction_may_cancel(
    database_url: str, end: str
) -> None:
    message, publisher = soon(seconds=2, key="k"), ScriptedPublisher()
    insert(database_url, message, Message("next", b"", key="k"))
    with psycopg.connect(conninfo(database_url)) as connection:
        assert cancel(connection, message.id) == Cancelled()
        await until(database_url, IS_DUE, [(True,)])
        async with running(database_url, publisher):
            await publisher.until_acked(1)
            waits = [("main", "scheduled", None)]
            await until(database_url, ENTRIES, waits, message.id)
            getattr(connection, end)()
            if end == "commit":
                await ended_at(database_url, message, "main")
            else:
                await publisher.until_acked(2)
    published = ["next"] if end == "commit" else ["next", "soon"]
    assert publisher.topics() == published


async def test_a_claim_that_can_not_ask_is_as_if_it_had_not_been(
    database_url: str,
) -> None:
    message = soon(seconds=0.3)
    insert(database_url, message)
    await until(database_url, IS_DUE, [(True,)])
    ((definition,),) = execute(
        database_url, "SELECT pg_get_functiondef('outbox.due_cause'::regproc)"
    )
    execute(database_url, definition.replace("IF NOT (", "PERFORM 1 / 0; IF NOT ("))
    board = board_of_all_lanes()
    async with await connect(database_url, application_name="test") as connection:
        lanes = board.pick()
        with pytest.raises(psycopg.errors.DivisionByZero):
            await claim_batch(connection, board, lanes, RelayConfig())
        assert {lane.progress for lane in lanes} == {None}
        execute(database_url, definition)
        board.put_back(lanes)
        board.wake(refresh=True)
        batch = await claim(connection, board)
    assert [row.id for row in batch.rows] == [message.id]


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_while_a_transaction_may_cancel_it_a_due_message_is_held_and_no_other(
    database_url: str, end: str
) -> None:
    message, publisher = soon(), ScriptedPublisher()
    async with running(database_url, publisher) as relay:
        insert(database_url, message)
        await relay.events.wait_for(BatchSettled)
        with psycopg.connect(conninfo(database_url)) as connection:
            assert cancel(connection, message.id) == Cancelled()
            others = [soon("other", seconds=4) for _ in range(20)]
            insert(database_url, *[it for it in others if not alike(it, message)])
            await publisher.until(lambda: "other" in publisher.topics())
            await until(database_url, IS_DUE, [(True,)])
            assert "soon" not in publisher.topics()
            getattr(connection, end)()
        if end == "commit":
            await ended_at(database_url, message, "main")
            assert "soon" not in publisher.topics()
        else:
            await publisher.until(lambda: "soon" in publisher.topics())


def alike(one: Message, other: Message) -> bool:
    """Whether two messages share the lock of cancellations."""
    return one.id.int & 0x3FF == other.id.int & 0x3FF


async def test_it_is_too_late_for_a_message_that_the_publisher_has_in_hand(
    database_url: str,
) -> None:
    message, publisher = soon(seconds=0.5), ScriptedPublisher()
    publisher.open.clear()
    async with running(database_url, publisher):
        insert(database_url, message)
        await publisher.until(lambda: bool(publisher.calls))
        assert cancelled(database_url, message) == TooLate({"main": "ready"})
        publisher.open.set()
        await publisher.until_acked(1)
        query = "SELECT state FROM outbox.message_status"
        await until(database_url, query, [("published",)])
    assert cancelled(database_url, message) == TooLate({"main": "published"})


async def test_it_is_too_late_for_a_message_that_was_refused_and_is_retried(
    database_url: str,
) -> None:
    message = soon(seconds=0.3)
    publisher = ScriptedPublisher(lambda message: Nacked("no such queue"))
    insert(database_url, message)
    async with running(database_url, publisher, retry=PATIENT):
        query = "SELECT state FROM outbox.message_status"
        await until(database_url, query, [("waiting",)])
    assert cancelled(database_url, message) == TooLate({"main": "waiting"})


async def test_no_reader_gets_a_cancelled_message_not_even_one_added_later(
    database_url: str,
) -> None:
    message, other = soon(), Message("other", b"")
    insert(database_url, message, other)
    assert cancelled(database_url, message) == Cancelled()
    add_reader(database_url, "later", from_oldest=True)
    publishers = [ScriptedPublisher(), ScriptedPublisher()]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(database_url, publishers[0]))
        await stack.enter_async_context(relay_of(database_url, "later", publishers[1]))
        for publisher in publishers:
            await publisher.until_acked(1)
        await ended_at(database_url, message, "later", "main")
    assert [it.topics() for it in publishers] == [["other"], ["other"]]
    query = "SELECT DISTINCT state FROM outbox.message_status WHERE topic = 'soon'"
    assert execute(database_url, query) == [("cancelled",)]


async def test_a_cancelled_message_can_not_be_replayed(database_url: str) -> None:
    message = soon(seconds=2)
    insert(database_url, message)
    assert cancelled(database_url, message) == Cancelled()
    publisher = ScriptedPublisher()
    async with running(database_url, publisher):
        await ended_at(database_url, message, "main")
    now = datetime.now(UTC)
    hour = ReplayCriteria(since=now - timedelta(hours=1), until=now)
    with administration(database_url, application_name="test") as connection:
        assert replay_published(connection, hour) == 0


async def test_a_day_with_a_cancelled_message_that_was_ended_holds_nothing(
    database_url: str,
) -> None:
    message = soon(seconds=2)
    insert(database_url, message)
    assert cancelled(database_url, message) == Cancelled()
    async with running(database_url, ScriptedPublisher()):
        await ended_at(database_url, message, "main")
    query = """
        SELECT count(*) FROM outbox.partitions('outbox.message') AS p,
               outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at)
    """
    assert execute(database_url, query) == [(0,)]


def test_a_topic_that_a_reader_gets_later_brings_its_scheduled_messages_when_due(
    unread_database_url: str,
) -> None:
    subscribe = "SELECT outbox.subscribe('main', %s, %s, from_oldest => NULL)"
    execute(unread_database_url, subscribe, [["other"], "memory://"])
    far, found = soon("far", seconds=3600, key="k"), Message("far", b"", key="k")
    insert(unread_database_url, far, found, Message("other", b"", key="k"))
    publish(unread_database_url, "topic = 'other'")
    execute(unread_database_url, subscribe, [["far"], None])
    query = """
        SELECT id, cause, due_at = %s FROM outbox.deferral
         WHERE cause <> 'unknown' ORDER BY seq
    """
    assert execute(unread_database_url, query, [far.available_at]) == [
        (far.id, "scheduled", True),
        (found.id, "found", False),
    ]
