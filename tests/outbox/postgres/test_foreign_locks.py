"""A foreign session that holds our advisory locks is detected and reported by name."""

import json
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256

import psycopg
import pytest
from sqlalchemy import text

from pillarbox import Consumer, DeadLetter, Message, uuid7
from pillarbox.inbox.dead_letters import write
from pillarbox.inbox.events import (
    ConsumerStarted,
    DeliveryLanesFree,
    DeliveryLanesWithheld,
    HandlerDatabaseLost,
    MessageDeadLettered,
    MessageHandled,
    SourceLost,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.observability.health import Health
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock, reader_class
from pillarbox.relay.events import (
    LanesFree,
    LanesWithheld,
    LeaseTaken,
    RelayStarted,
)
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.consumers import running as consuming
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute
from tests.fixtures.urls import with_options

SECOND = timedelta(seconds=1)
ALL_LANES = f"SELECT pg_advisory_lock({LOCK_CLASS}, n) FROM generate_series(0, 47) n"
MEMBER = f"SELECT pg_advisory_lock({LOCK_CLASS}, {int(Lock.MEMBER)})"
BELL = f"SELECT pg_advisory_lock({LOCK_CLASS}, {int(Lock.OUTBOX_DOORBELL)})"
BELL_SHARED = BELL.replace("pg_advisory_lock", "pg_advisory_lock_shared")


OURS = {
    "a lane": f"{LOCK_CLASS}, 20",
    **{lock.name.lower(): f"{LOCK_CLASS}, {int(lock)}" for lock in Lock},
    "a consumer's lane": f"{reader_class('billing')}, 3",
    "make_partitions": "hashtextextended('outbox.make_partitions inbox.receipt', 0)",
    "finish_detached": "hashtextextended('outbox.finish_detached outbox.message', 0)",
}


@pytest.fixture
def mallory(database_url: str) -> Iterator["psycopg.Connection[tuple[object, ...]]"]:
    """Connect as a role that can connect and do nothing else."""
    execute(database_url, "DROP ROLE IF EXISTS mallory")
    execute(database_url, "CREATE ROLE mallory LOGIN")
    with psycopg.connect(
        database_url.replace("postgres@", "mallory@"),
        autocommit=True,
        application_name="just looking",
    ) as session:
        yield session
    execute(database_url, "DROP ROLE mallory")


@pytest.fixture
def importer_url(database_url: str) -> Iterator[str]:
    """Return the URL of a role that writes and that no relay trusts."""
    execute(database_url, "DROP ROLE IF EXISTS importer")
    execute(database_url, "CREATE ROLE importer LOGIN IN ROLE pillarbox_application")
    yield database_url.replace("postgres@", "importer@")
    execute(database_url, "DROP OWNED BY importer")
    execute(database_url, "DROP ROLE importer")


@pytest.mark.parametrize("lock", [ALL_LANES, MEMBER])
async def test_a_relay_without_lanes_names_the_foreign_session_until_it_is_gone(
    lock: str,
    database_url: str,
    mallory: "psycopg.Connection[tuple[object, ...]]",
) -> None:
    mallory.execute(lock)
    health = Health(RelayStarted)
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, lease=SECOND) as relay:
        (event,) = await relay.events.wait_for(LanesWithheld)
        for each in relay.events.events:
            health(each)
        assert health.waits_for == ["lanes"]
        (holder,) = event.holders
        assert f"pid {mallory.info.backend_pid} (role mallory" in holder
        assert "application 'just looking'" in holder
        assert "REVOKE CONNECT" in event.remedy
        assert relay.events.of(LeaseTaken) == []

        mallory.close()
        await relay.events.wait_for(LanesFree)
        health(relay.events.of(LanesFree)[0])
        assert health.waits_for == []
        insert(database_url, Message("after", b""))
        await publisher.until_acked(1)


@pytest.mark.parametrize("lock", [BELL, BELL_SHARED])
async def test_a_relay_polls_while_a_foreign_session_holds_the_doorbell(
    lock: str,
    database_url: str,
    mallory: "psycopg.Connection[tuple[object, ...]]",
) -> None:
    mallory.execute(lock)
    publisher = ScriptedPublisher()
    async with running(database_url, publisher, lease=SECOND) as relay:
        await relay.events.wait_for(LeaseTaken)
        insert(database_url, Message("seen", b""))
        await publisher.until_acked(1)
        assert relay.events.of(LanesWithheld) == []


@pytest.mark.parametrize("held", [[19], [*range(48)]], ids=["one lane", "all"])
async def test_a_consumer_without_lanes_names_the_foreign_session_and_continues(
    held: list[int],
    database_url: str,
    mallory: "psycopg.Connection[tuple[object, ...]]",
) -> None:
    add_consumer(database_url, "billing")
    mallory.execute(
        "SELECT pg_advisory_lock(%s, n) FROM unnest(%s::int[]) n",
        [reader_class("billing"), held],
    )
    health = Health(ConsumerStarted)
    async with async_sessions_of(database_url) as sessions:
        url = with_options(database_url, lease=SECOND)
        consumer = Consumer(url, sessions, name="billing")
        consumer.observe(health)

        @consumer.handles("orders")
        async def handle(session: object, message: Message) -> None:
            """Succeed."""

        async with consuming(consumer) as events:
            (event,) = await events.wait_for(DeliveryLanesWithheld, timeout=60)
            (holder,) = event.holders
            assert f"pid {mallory.info.backend_pid} (role mallory" in holder
            assert "REVOKE CONNECT" in event.remedy
            assert health.waits_for == ["lanes of default"]
            assert events.of(SourceLost) == []
            keys = [str(n) for n in range(50)]
            lanes = {key: lane_of(key, uuid7(), Priority.DEFAULT) for key in keys}
            if free := [key for key in keys if lanes[key] not in held]:
                insert(database_url, Message("orders", b"", key=free[0]))
                await events.wait_for(MessageHandled, timeout=60)

            mallory.close()
            await events.wait_for(DeliveryLanesFree, timeout=60)
            assert health.waits_for == []
            count = len(events.of(MessageHandled))
            withheld = next(key for key in keys if lanes[key] in held)
            insert(database_url, Message("orders", b"", key=withheld))
            await events.wait_for(MessageHandled, count + 1, timeout=60)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_dead_letter_whose_lock_is_held_is_written_late_and_reported(
    driver: str,
    database_url: str,
    mallory: "psycopg.Connection[tuple[object, ...]]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soon = text(str(write._LOCK).replace("5s", "100ms"))
    monkeypatch.setattr(write, "_LOCK", soon)
    message = Message("orders", b"")
    named = json.dumps(["consumer:billing", str(message.id)])
    key = int.from_bytes(sha256(named.encode()).digest()[:8], signed=True)
    mallory.execute("SELECT pg_advisory_lock(%s::bigint)", [key])
    source = MemorySource()
    async with async_sessions_of(database_url, driver) as sessions:
        consumer = Consumer(source, sessions, name="billing")

        @consumer.handles("orders")
        async def handle(session: object, message: Message) -> None:
            raise DeadLetter("no such customer")

        async with consuming(consumer) as events:
            source.add(message)
            (lost,) = await events.wait_for(HandlerDatabaseLost, timeout=60)
            assert "lock timeout" in lost.reason
            mallory.close()
            await events.wait_for(MessageDeadLettered, timeout=60)


def findings(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the doctor's findings about locks with their remedies, by severity."""
    main(["doctor", "--json", "--database", url])
    report = json.loads(capsys.readouterr().out)
    return {
        found["severity"]: f"{found['finding']}; {found['remedy']}"
        for found in report["findings"]
        if found["check"] == "locks"
    }


def test_the_doctor_names_a_foreign_session_and_counts_our_locks(
    database_url: str,
    mallory: "psycopg.Connection[tuple[object, ...]]",
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "error" not in findings(database_url, capsys)
    # Lanes are known by their readers.
    add_consumer(database_url, "billing")
    pid = mallory.info.backend_pid
    for mode in ("", "_shared"):
        for lock in OURS.values():
            mallory.execute(f"SELECT pg_advisory_lock{mode}({lock})")
        # Every writer holds the doorbells in shared mode.
        counted = [name for name in OURS if not (mode and "doorbell" in name)]

        said = findings(database_url, capsys)["error"]

        assert f"pid {pid} (role mallory, application 'just looking'" in said
        assert f"holds {len(counted)} of pillarbox's advisory locks" in said
        assert f"SELECT pg_terminate_backend({pid});" in said
        mallory.execute("SELECT pg_advisory_unlock_all()")


def test_the_doctor_does_not_report_a_writer_as_blocking_the_doorbell(
    database_url: str, importer_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(importer_url) as writer:
        writer.execute("SELECT outbox.add('long import', ''::bytea)")
        assert set(findings(database_url, capsys)) == {"hint"}


def test_the_doctors_remedy_excludes_foreign_roles_and_admits_ours(
    database_url: str,
    mallory: "psycopg.Connection[tuple[object, ...]]",
    capsys: pytest.CaptureFixture[str],
) -> None:
    hint = findings(database_url, capsys)["hint"]
    remedy = hint.partition("; ")[2]
    assert remedy.startswith("REVOKE CONNECT ON DATABASE")

    execute(database_url, remedy)

    assert findings(database_url, capsys) == {}
    query = "SELECT has_database_privilege(%s, current_database(), 'CONNECT')"
    for role, may in (("mallory", False), ("pillarbox_relay", True)):
        assert execute(database_url, query, [role]) == [(may,)]
