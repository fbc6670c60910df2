"""Each process records that it runs, and what it fails at, in a row of its own."""

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from typing_extensions import override

from pillarbox import Consumer, Message
from pillarbox.inbox.events import HandlerFailed, StandbyEnded, StandingBy
from pillarbox.inbox.source import Abilities, Delivery
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.observability.measures.processes import Process, list_processes
from pillarbox.outbox.observability.presence import (
    RELEASE_VARIABLE,
    PresenceNotRecorded,
)
from pillarbox.relay.events import BrokerLost
from tests.acceptance.relays import as_role
from tests.fixtures.consumers import DRIVERS, NEVER, consuming, is_plain, sessions_by
from tests.fixtures.consumers import running as running_consumer
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

BEAT: Final = (
    "SELECT outbox.beat(%s, 'relay', 'main', %s, 'redis://h/0', NULL, NULL, 0, 0, %s)"
)

FUNCTION: Final = "FUNCTION outbox.beat"


def processes(url: str, side: Any) -> tuple[Process, ...]:
    with psycopg.connect(as_role(url, "pillarbox_monitor")) as connection:
        return list_processes(connection, side)


async def recorded(url: str, side: str, condition: str = "true") -> Process:
    query = f"SELECT 1 FROM {side}.process WHERE {condition}"
    await asyncio.to_thread(wait_for, condition, lambda: execute(url, query))
    (process,) = processes(url, side)
    return process


async def test_a_relay_is_recorded_while_it_runs_and_while_its_broker_is_away(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RELEASE_VARIABLE, "2026.11.3")
    publisher = ScriptedPublisher()
    async with running(as_role(database_url, "pillarbox_relay"), publisher) as relay:
        process = await recorded(database_url, "outbox")
        assert (process.kind, process.name) == ("relay", "main")
        assert process.broker == "ScriptedPublisher"
        assert process.host.endswith(f" {os.getpid()} (2026.11.3)")
        assert (process.failing_since, process.reason) == (None, None)

        publisher.away = "connection refused"
        insert(database_url, Message("orders", b""))
        await relay.events.wait_for(BrokerLost)
        process = await recorded(database_url, "outbox", "failing_since IS NOT NULL")
        assert process.reason == "connection refused"
        publisher.away = None
        await recorded(database_url, "outbox", "failing_since IS NULL")
    assert processes(database_url, "outbox") == ()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_consumer_that_fails_is_recorded_with_the_reason(
    driver: str, database_url: str
) -> None:
    is_asyncpg = driver == "asyncpg"  # which can't set a role in its URL
    url = database_url if is_asyncpg else as_role(database_url, "pillarbox_consumer")
    message = Message("orders", b"", key="k")
    source = MemorySource(message)
    async with sessions_by(url, driver) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=NEVER)

        if is_plain(driver):

            @consumer.handles("orders")
            def fail(session: Any, message: Message) -> None:
                raise KeyError("no such customer")

        else:

            @consumer.handles("orders")
            async def fail_async(session: Any, message: Message) -> None:
                raise KeyError("no such customer")

        async with running_consumer(consumer) as events:
            await events.wait_for(HandlerFailed)
            process = await recorded(database_url, "inbox", "failing_since IS NOT NULL")
    assert (process.kind, process.name, process.broker) == (
        "consumer",
        "billing",
        "memory",
    )
    told = f"orders {message.id}: KeyError: raised in "
    assert (process.reason or "").startswith(told)
    assert "no such customer" not in (process.reason or "")
    assert process.blocked_keys == 1
    assert processes(database_url, "inbox") == ()


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_replica_that_stands_by_says_for_what_until_it_receives(
    driver: str, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pillarbox")
    elsewhere = {"refunds", "orders"}
    source = MemorySource(poll_interval=timedelta(milliseconds=50))
    source.abilities = Abilities(standing_by=lambda: elsewhere)
    async with sessions_by(database_url, driver) as sessions:
        consumer = Consumer(source, sessions, name="billing")
        handle = plain if is_plain(driver) else coroutine
        for topic in elsewhere:
            consumer.handles(topic)(handle)
        async with running_consumer(consumer) as events:
            at_work = "standing_by IS NULL"
            replica = await recorded(database_url, "inbox", f"NOT {at_work}")
            assert replica.standing_by == "orders, refunds"
            elsewhere = set()
            await events.wait_for(StandbyEnded)
            await recorded(database_url, "inbox", at_work)
            elsewhere = {"orders"}
            await events.wait_for(StandingBy, 2)
    told = [it.message for it in caplog.records if "stand" in it.message.lower()]
    first, ended, again = (it.partition(" alternatives=")[0] for it in told)
    assert first.endswith("topics=\"('orders', 'refunds')\"")
    assert ended == "StandbyEnded consumer=billing queue=default"
    assert again.endswith("topics=('orders',)")
    assert 'Consumer(order="none")' in told[0]


class Interrupted(MemorySource):
    is_lost = False

    @override
    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        if self.is_lost:
            raise BrokerUnavailableError("away")
        return await super().receive(limit=limit)


async def test_while_the_broker_is_away_a_replica_stands_by_for_nothing(
    database_url: str,
) -> None:
    source = Interrupted(poll_interval=timedelta(milliseconds=50))
    source.abilities = Abilities(standing_by=lambda: {"orders"})
    async with consuming(database_url, source, coroutine, topic="orders") as events:
        await recorded(database_url, "inbox", "standing_by = 'orders'")
        source.is_lost = True
        await recorded(database_url, "inbox", "standing_by IS NULL")
        source.is_lost = False
        await recorded(database_url, "inbox", "standing_by = 'orders'")
        assert len(events.of(StandingBy)) == 1


async def coroutine(session: Any, message: Message) -> None:
    pass


def plain(session: Any, message: Message) -> None:
    pass


async def test_a_relay_that_cannot_record_itself_publishes_regardless(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE outbox.process")
        async with running(as_role(database_url, "pillarbox_relay"), publisher) as it:
            (missed,) = await it.events.wait_for(PresenceNotRecorded)
            assert "lock timeout" in missed.reason
            other.rollback()
            revoke = f"REVOKE EXECUTE ON {FUNCTION} FROM pillarbox_relay"
            execute(database_url, revoke)
            *_, missed = await it.events.wait_for(PresenceNotRecorded, 2)
            assert "permission denied" in missed.reason
            insert(database_url, Message("orders", b""))
            await publisher.until(lambda: len(publisher.acked) == 1)


def beat(
    connection: psycopg.Connection, id: UUID, host: str = "h", *, ends: bool = False
) -> None:
    connection.execute(BEAT, (id, host, ends))


def test_only_the_login_that_inserted_a_row_can_change_it(database_url: str) -> None:
    id = uuid4()
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET SESSION AUTHORIZATION pillarbox_relay")
        beat(connection, id)
        before = connection.execute("SELECT * FROM outbox.process").fetchall()
        for statement in (
            "UPDATE outbox.process SET reason = ''",
            "DELETE FROM outbox.process",
            "INSERT INTO outbox.process (id) VALUES (gen_random_uuid())",
            BEAT.replace("outbox.beat", "inbox.beat") % (f"'{id}'", "'h'", "false"),
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        connection.execute("RESET SESSION AUTHORIZATION")
        beat(connection, id)
        beat(connection, id, ends=True)
        after = connection.execute("SELECT * FROM outbox.process").fetchall()
    assert after == before


def test_a_beat_deletes_the_rows_of_processes_that_are_gone(database_url: str) -> None:
    silent, gone, new = uuid4(), uuid4(), uuid4()
    with psycopg.connect(database_url, autocommit=True) as connection:
        for id, seconds in ((silent, 50), (gone, 70)):
            beat(connection, id, f"{seconds}")
            connection.execute(
                "UPDATE outbox.process SET beat_at = now() - make_interval(secs => %s)"
                " WHERE id = %s",
                (seconds, id),
            )
        shown = [it.host for it in list_processes(connection, "outbox")]
        beat(connection, new, "new")
        ids = connection.execute("SELECT id FROM outbox.process").fetchall()
    assert shown == ["50"]
    assert {id for (id,) in ids} == {silent, new}


def test_beats_leave_no_entries_in_the_index(database_url: str) -> None:
    id = uuid4()
    with psycopg.connect(database_url) as connection:
        for _ in range(5):
            beat(connection, id)
        ((updates, hot),) = connection.execute(
            "SELECT pg_stat_get_xact_tuples_updated('outbox.process'::regclass),"
            " pg_stat_get_xact_tuples_hot_updated('outbox.process'::regclass)"
        )
    assert (updates, hot) == (4, 4)
