"""The first relay adds the reader `main`, which gets everything that is there."""

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import (
    add_reader,
    drop_reader,
    list_readers,
)
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.relay.events import BatchPublished, ReaderAdded
from pillarbox.relay.relay import Relay
from tests.fixtures import positions
from tests.fixtures.postgres import ADD_MAIN, REMOVE_READERS, migrate_for_a_week
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import QUICK, insert, running
from tests.fixtures.roles import login, new_role
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

BROKER = "redis://a"
READERS = "SELECT reader, broker FROM outbox.reader"
WAITING = """
SELECT count(*) FROM pg_locks
 WHERE NOT granted AND relation = 'outbox.subscription'::regclass
"""
ADD = "SELECT outbox.add('open', '{}'::jsonb)"


def readers(url: str) -> list[tuple[str, str | None]]:
    return execute(url, READERS)


def test_a_migration_adds_no_reader_and_keeps_one(empty_database_url: str) -> None:
    migrate_for_a_week(empty_database_url)
    assert readers(empty_database_url) == []
    execute(empty_database_url, ADD_MAIN)
    migrate_for_a_week(empty_database_url)
    assert readers(empty_database_url) == [("main", None)]


async def test_it_publishes_what_is_there_and_says_so_before(
    unread_database_url: str,
) -> None:
    url = unread_database_url
    with administration(url, application_name="test") as connection:
        add_reader(connection, "billing", ["consumed"], for_consumer=True)
    insert(url, Message("consumed", b""), Message("waiting", b""))
    publisher = ScriptedPublisher()
    with psycopg.connect(url) as writer:
        writer.execute(ADD)
        async with running(url, publisher, broker=BROKER) as relay:
            await publisher.until_acked(2)
            writer.commit()
            await publisher.until_acked(3)
    assert sorted(publisher.topics()) == ["consumed", "open", "waiting"]
    (added,) = relay.events.of(ReaderAdded)
    assert (added.reader, added.messages) == ("main", "2")
    assert added.oldest is not None
    assert datetime.now(UTC) - added.oldest < timedelta(minutes=5)
    kinds = [type(event) for event in relay.events.events]
    assert kinds.index(ReaderAdded) < kinds.index(BatchPublished)
    publisher = ScriptedPublisher()
    async with running(url, publisher, broker=BROKER) as relay:
        insert(url, Message("later", b""))
        await publisher.until_acked(1)
    assert (publisher.topics(), relay.events.of(ReaderAdded)) == (["later"], [])


async def test_more_messages_than_are_worth_counting_are_not_counted(
    unread_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.relay.reader._MOST_COUNTED", 2)
    url = unread_database_url
    insert(url, *(Message("orders", b"") for _ in range(3)))
    with new_role(url, "rob", "LOGIN IN ROLE pillarbox_relay") as rob:
        async with running(login(url, rob), ScriptedPublisher()) as relay:
            (added,) = relay.events.of(ReaderAdded)
    assert added.messages == "at least 2"


async def test_from_now_it_leaves_what_is_there_but_not_what_is_open(
    unread_database_url: str,
) -> None:
    url, publisher = unread_database_url, ScriptedPublisher()
    insert(url, Message("before", b""))
    with psycopg.connect(url) as writer:
        writer.execute(ADD)
        async with running(url, publisher, from_now=True) as relay:
            writer.commit()
            insert(url, Message("after", b""))
            await publisher.until_acked(2)
    assert sorted(publisher.topics()) == ["after", "open"]
    (added,) = relay.events.of(ReaderAdded)
    assert (added.messages, added.oldest) == ("0", None)
    # Nobody has got it, so its day is kept.
    assert positions.count_holding(url) == 1


async def test_of_relays_that_start_at_once_one_adds_it(
    unread_database_url: str,
) -> None:
    url, publisher = unread_database_url, ScriptedPublisher()
    insert(url, *(Message("orders", b"") for _ in range(10)))
    async with asyncio.TaskGroup() as group:
        with psycopg.connect(url) as other:
            # They wait for each other here.
            other.execute("LOCK TABLE outbox.subscription IN SHARE MODE")
            relays = [running(url, publisher, broker=BROKER) for _ in range(3)]
            started = [group.create_task(it.__aenter__()) for it in relays]
            await asyncio.to_thread(
                wait_for, "three relays", lambda: execute(url, WAITING) == [(3,)]
            )
    await publisher.until_acked(10)
    for relay in relays:
        await relay.__aexit__(None, None, None)
    added = [event for it in started for event in it.result().events.of(ReaderAdded)]
    assert [event.reader for event in added] == ["main"]
    assert execute(url, "SELECT reader, topic FROM outbox.subscription") == [
        ("main", "*")
    ]
    assert len(publisher.acked) == 10


async def test_one_that_was_dropped_is_not_added_again(
    unread_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = unread_database_url
    async with running(url, ScriptedPublisher(), broker=BROKER):
        pass
    with administration(url, application_name="test") as connection:
        drop_reader(connection, "main")
    remedy = r"readers add main --broker URL restores it for new messages"
    with pytest.raises(ConfigError, match=f"reader=main: was dropped; .*{remedy}"):
        await Relay(url, ScriptedPublisher(), broker=BROKER).run()
    added = ["readers", "add", "main", "--broker", BROKER, "--database", url]
    assert main(added) == 0
    capsys.readouterr()
    publisher = ScriptedPublisher()
    async with running(url, publisher, broker=BROKER):
        insert(url, Message("orders", b""))
        await publisher.until_acked(1)


async def test_a_relay_that_can_not_run_adds_none(unread_database_url: str) -> None:
    url = unread_database_url
    publisher = ScriptedPublisher()
    publisher.away = "no such host"
    with pytest.raises(BrokerUnavailableError):
        await Relay(url, publisher, QUICK, broker="redis://mistyped").run()
    with (
        new_role(url, "bob", "LOGIN IN ROLE pillarbox_reader") as bob,
        pytest.raises(ConfigError, match="reader=main: gets everything; only members"),
    ):
        await Relay(login(url, bob), ScriptedPublisher(), QUICK).run()
    with pytest.raises(ConfigError, match=r"reader=typo: .*readers add typo"):
        await Relay(url, ScriptedPublisher(), QUICK, reader="typo").run()
    with pytest.raises(
        ConfigError, match=r"reader=hooks: --from-now is for the reader main"
    ):
        Relay(url, ScriptedPublisher(), reader="hooks", from_now=True)
    with administration(url, application_name="test") as connection:
        assert list_readers(connection) == []
        add_reader(connection, "main", None, discard=True)
    with pytest.raises(ConfigError, match="reader=main: exists, and discards its mes"):
        await Relay(url, ScriptedPublisher(), QUICK).run()
    execute(url, REMOVE_READERS)
