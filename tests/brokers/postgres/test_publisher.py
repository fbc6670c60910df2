"""The postgres publisher appends to the outbox of another database."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message
from pillarbox.inbox.events import MessageHandled
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.url import FileUrl
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.postgres import PostgresPublisher
from pillarbox.relay.relay import Relay
from pillarbox.relay.renewed_publisher import publisher_of
from tests.fixtures import relay as relays
from tests.fixtures.consumers import id_of, running, sessions_of
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert, unsettled
from tests.fixtures.roles import login, new_role
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

NOW = datetime.now(UTC)


def appended(url: str, columns: str = "payload") -> list[Any]:
    return execute(url, f"SELECT {columns} FROM outbox.message ORDER BY seq")


async def until(what: str, reached: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_for, what, reached)


async def test_a_consumer_of_the_other_database_handles_the_messages_as_added(
    database_url: str, other_url: str
) -> None:
    add_consumer(other_url, "billing")
    messages = [
        Message(
            "orders",
            {"n": n},
            key=f"key {n % 3}",
            tenant="acme",
            headers={"color": "red"},
            schema_version=2,
            priority=priority,
        )
        for n, priority in enumerate([*Priority] * 10)
    ]
    handled: list[Message] = []
    with sessions_of(other_url) as sessions:
        consumer = Consumer(other_url, sessions, name="billing")

        @consumer.handles("orders", version=2)
        def handle(session: Session, message: Message) -> None:
            handled.append(message)

        async with (
            relays.running(database_url, PostgresPublisher(other_url)),
            running(consumer) as events,
        ):
            insert(database_url, *messages)
            await events.wait_for(MessageHandled, len(messages))
    for key in ("key 0", "key 1", "key 2"):
        numbers = [m.json()["n"] for m in handled if m.key == key]
        assert numbers == [m.json()["n"] for m in messages if m.key == key]
    assert {m.headers["color"] for m in handled} == {"red"}
    lanes = dict(appended(other_url, "id, lane"))
    assert lanes == {m.id: lane_of(m.key, m.id, m.priority) for m in messages}


async def test_relays_to_one_another_send_no_message_round(
    database_url: str, other_url: str
) -> None:
    async with (
        relays.running(database_url, PostgresPublisher(other_url)),
        relays.running(other_url, PostgresPublisher(database_url)),
    ):
        insert(database_url, Message("orders", b"from here"))
        insert(other_url, Message("orders", b"from there"))
        both = (database_url, other_url)
        await until("all is there", lambda: all(len(appended(it)) == 2 for it in both))
        await until("all is settled", lambda: not any(map(unsettled, both)))
    for url in both:
        assert sorted(appended(url)) == [(b"from here",), (b"from there",)]


@pytest.mark.parametrize("of_a_file", [False, True])
async def test_a_relay_to_its_own_outbox_is_refused_with_the_remedy(
    of_a_file: bool, database_url: str, tmp_path: Path
) -> None:
    # The same database by another name.
    broker = f"{database_url}?connect_timeout=60"
    if of_a_file:
        file = tmp_path / "url"
        file.write_text(broker)
        broker = FileUrl.read("PILLARBOX_BROKER_URL_FILE", str(file))
    with pytest.raises(
        ConfigError, match="own database, whose consumers need no relay"
    ):
        await Relay(database_url, publisher_of(broker), broker=broker).run()


async def test_a_dead_letter_is_not_appended_to_its_own_outbox(
    database_url: str,
) -> None:
    give_up(database_url, Message("orders", b""))
    retrier = PublishingRetrier(database_url, lambda: publisher_of(database_url))
    with pytest.raises(
        ConfigError, match="own database, whose consumers need no relay"
    ):
        await retry(retrier)


@pytest.mark.parametrize(
    "id",
    [id_of(NOW - timedelta(days=40)), id_of(NOW + timedelta(days=400))],
    ids=["of another month", "of another year"],
)
async def test_a_message_is_appended_once_whatever_the_time_in_its_id(
    id: UUID, database_url: str
) -> None:
    message = Message("orders", b"", id=id)
    async with PostgresPublisher(database_url) as publisher:
        for batch in ([message], [Message("orders", b""), message]):
            assert await publisher.publish(batch) == [Acked()] * len(batch)
    assert len(appended(database_url)) == 2


@pytest.mark.parametrize(
    "odd",
    [{"key": "a\0b"}, {"tenant": "x" * 1025}, {"topic": "\0"}],
    ids=["key", "tenant", "topic"],
)
async def test_a_message_that_cannot_be_stored_is_refused_alone_and_permanently(
    database_url: str, odd: dict[str, Any]
) -> None:
    batch = [
        Message(**{"topic": "t", "payload": b"%d" % n} | (odd if n == 1 else {}))
        for n in range(3)
    ]
    async with PostgresPublisher(database_url) as publisher:
        first, second, third = await publisher.publish(batch)
    assert first == third == Acked()
    assert isinstance(second, Nacked)
    assert second.permanent
    assert appended(database_url) == [(b"0",), (b"2",)]


async def test_the_applications_role_may_append_and_its_loss_costs_no_attempt(
    database_url: str,
) -> None:
    with new_role(database_url, "bob"):
        bobs = login(database_url, "bob")
        with pytest.raises(ConfigError, match="GRANT pillarbox_application TO its"):
            async with PostgresPublisher(bobs):
                pass
        execute(database_url, "GRANT pillarbox_application TO bob")
        async with PostgresPublisher(bobs) as publisher:
            assert await publisher.publish([Message("orders", b"")]) == [Acked()]
            execute(database_url, "REVOKE pillarbox_application FROM bob")
            with pytest.raises(BrokerUnavailableError, match="permission denied"):
                await publisher.publish([Message("orders", b"")])


@pytest.mark.parametrize("option", ["nonsense=1", "max_payload_bytes=0"])
def test_an_unknown_option_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        PostgresPublisher(f"postgresql://host/name?{option}")


async def test_a_read_only_database_is_unavailable(database_url: str) -> None:
    read_only = f"{database_url}?options=-cdefault_transaction_read_only%3Don"
    with pytest.raises(BrokerUnavailableError, match="read-only"):
        async with PostgresPublisher(read_only) as publisher:
            await publisher.publish([Message("orders", b"")])


async def test_a_missing_day_costs_no_attempt(database_url: str) -> None:
    for (day,) in execute(
        database_url,
        "SELECT inhrelid::regclass::text FROM pg_inherits"
        " WHERE inhparent = 'outbox.message'::regclass",
    ):
        execute(database_url, f"DROP TABLE {day}")
    async with PostgresPublisher(database_url) as publisher:
        with pytest.raises(BrokerUnavailableError, match="run pillarbox maintain"):
            await publisher.publish([Message("orders", b"")])


async def test_a_database_without_our_tables_is_reported_at_the_start(
    empty_database_url: str,
) -> None:
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with PostgresPublisher(empty_database_url):
            pass
