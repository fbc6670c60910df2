"""The postgres publisher: one delivery for each subscribed consumer, in order."""

from hashlib import sha256
from typing import Any

import psycopg
import pytest

from outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox import Message
from relay.publisher import Acked, Nacked
from relay.publishers.postgres import PostgresPublisher
from tests.fixtures.sessions import execute
from tests.fixtures.urls import copy_of


@pytest.fixture
def url(database_url: str) -> str:
    return database_url


def subscribe(url: str, *pairs: tuple[str, str]) -> None:
    for pair in pairs:
        execute(url, "INSERT INTO inbox.subscription VALUES (%s, %s)", pair)


def delivered(url: str) -> list[Any]:
    return execute(
        url,
        "SELECT d.consumer, d.topic, m.payload FROM inbox.delivery_status AS d"
        "  JOIN inbox.message AS m USING (seq, created_at) ORDER BY seq, consumer",
    )


async def test_each_subscribed_consumer_gets_a_message_once(url: str) -> None:
    subscribe(
        url,
        ("billing", "orders.placed"),
        ("billing", "orders.*"),
        ("billing", "*"),
        ("shipping", "orders.placed"),
        ("audit", "orders*"),
        ("other", "orders"),
        ("other", "orders.placed.*"),
    )
    async with PostgresPublisher(copy_of(url)) as publisher:
        assert await publisher.publish([Message("orders.placed", b"1")]) == [Acked()]
    consumers = sorted(consumer for consumer, _, _ in delivered(url))
    assert consumers == ["audit", "billing", "shipping"]


async def test_a_star_is_the_only_wildcard(url: str) -> None:
    subscribe(url, ("billing", "a_%*"))
    async with PostgresPublisher(copy_of(url)) as publisher:
        answers = await publisher.publish([Message("a_%b", b""), Message("axyb", b"")])
    assert [type(answer) for answer in answers] == [Acked, Nacked]


async def test_a_message_without_subscribers_is_nacked_with_the_remedy(
    url: str,
) -> None:
    subscribe(url, ("billing", "orders"))
    async with PostgresPublisher(copy_of(url)) as publisher:
        answers = await publisher.publish(
            [Message("orders", b""), Message("nobody", b""), Message("orders", b"")]
        )
    assert answers == [
        Acked(),
        Nacked(
            "nobody subscribes to topic 'nobody'; "
            "run pillarbox subscribe CONSUMER nobody"
        ),
        Acked(),
    ]
    assert len(delivered(url)) == 2


async def test_messages_without_subscribers_are_dropped_if_the_url_says_so(
    url: str,
) -> None:
    async with PostgresPublisher(copy_of(f"{url}?unsubscribed=drop")) as publisher:
        assert await publisher.publish([Message("nobody", b"")]) == [Acked()]


NO_ROOM = "".join(sha256(b"%d" % n).hexdigest() for n in range(100))


@pytest.mark.parametrize(
    "odd", [{"key": "a\0b"}, {"tenant": NO_ROOM}], ids=["key", "tenant"]
)
async def test_a_message_that_cannot_be_stored_is_refused_alone_and_permanently(
    url: str, odd: dict[str, Any]
) -> None:
    subscribe(url, ("billing", "orders"))
    async with PostgresPublisher(copy_of(url)) as publisher:
        first, second, third = await publisher.publish(
            [
                Message("orders", b"1"),
                Message("orders", b"2", **odd),
                Message("orders", b"3"),
            ]
        )
    assert first == third == Acked()
    assert isinstance(second, Nacked)
    assert second.permanent
    assert [payload for _, _, payload in delivered(url)] == [b"1", b"3"]


async def test_a_missing_partition_costs_no_attempt(url: str) -> None:
    subscribe(url, ("billing", "orders"))
    with psycopg.connect(url) as connection:
        for (partition,) in connection.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits"
            " WHERE inhparent = 'inbox.message'::regclass"
        ).fetchall():
            connection.execute(f"DROP TABLE {partition}")
    async with PostgresPublisher(copy_of(url)) as publisher:
        with pytest.raises(BrokerUnavailableError, match="run pillarbox maintain"):
            await publisher.publish([Message("orders", b"")])


async def test_a_read_only_database_is_unavailable(url: str) -> None:
    subscribe(url, ("billing", "orders"))
    read_only = f"{url}?options=-cdefault_transaction_read_only%3Don"
    publisher = PostgresPublisher(copy_of(read_only))
    with pytest.raises(BrokerUnavailableError, match="read-only transaction"):
        async with publisher:
            await publisher.publish([Message("orders", b"")])


async def test_the_relays_role_may_publish_and_its_loss_costs_no_attempt(
    url: str,
) -> None:
    subscribe(url, ("billing", "orders"))
    as_relay = f"{url}?options=-crole%3Dpillarbox_relay"
    async with PostgresPublisher(copy_of(as_relay)) as publisher:
        assert await publisher.publish([Message("orders", b"")]) == [Acked()]
        execute(url, "REVOKE INSERT ON inbox.message FROM pillarbox_relay")
        with pytest.raises(BrokerUnavailableError, match="permission denied"):
            await publisher.publish([Message("orders", b"")])


async def test_a_database_without_the_inbox_is_reported_at_start(
    empty_database_url: str,
) -> None:
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with PostgresPublisher(copy_of(empty_database_url)):
            pass


async def test_a_missing_privilege_is_reported_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match="GRANT pillarbox_relay TO"):
        async with PostgresPublisher(
            copy_of(f"{url}?options=-crole%3Dpillarbox_application")
        ):
            pass


@pytest.mark.parametrize(
    "option", ["unsubscribed=maybe", "nonsense=1", "max_payload_bytes=0"]
)
def test_an_unknown_option_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        PostgresPublisher(copy_of(f"postgresql://host/name?{option}"))
