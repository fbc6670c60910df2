"""Debezium publishes the outbox, by the SQL and the connector of docs/debezium.md."""

import asyncio
import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Message as Record
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, Message, add
from pillarbox.inbox.sources.kafka import KafkaSource
from pillarbox.outbox.administration.readers import add_reader, drop_reader
from pillarbox.outbox.brokers.kafka.message import message_of
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.consumers import async_sessions_of, running, sessions_of
from tests.fixtures.debezium import Connect, connect, embedded, shown
from tests.fixtures.kafka import records
from tests.fixtures.postgres import SETTINGS, Template
from tests.fixtures.real_kafka import RealKafka
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

CONNECTOR: Final = json.loads(shown("json")[0])["config"]
SQL: Final = shown("sql")
LOG: Final = (
    "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
)
DROP_TODAY: Final = """
DO $$
DECLARE
    v_today regclass;
BEGIN
    SELECT partition INTO v_today FROM outbox.partitions('outbox.message')
     WHERE starts_at <= now() AND ends_at > now();
    EXECUTE format('ALTER TABLE outbox.message DETACH PARTITION %s', v_today);
    EXECUTE format('DROP TABLE %s', v_today);
    PERFORM outbox.make_days();
END
$$
"""


@pytest.fixture(scope="module")
def source_server() -> Iterator[PostgresServer]:
    with postgres_server(
        settings={**SETTINGS, "wal_level": "logical"}, durable=False
    ) as server:
        yield server


@pytest.fixture(scope="module")
def prepared(source_server: PostgresServer) -> Iterator[str]:
    """The name of a database that is set up for Debezium, which the tests copy."""
    with ExitStack() as databases:
        name = Template(source_server, databases).name()
        with psycopg.connect(source_server.database_url(name)) as connection:
            connection.execute(SQL[0])
        yield name


@pytest.fixture(scope="module")
def worker(real_node: RealKafka) -> Iterator[Connect]:
    with connect(real_node.servers) as running:
        yield running


@pytest.fixture
def name() -> str:
    """The name of the test's database, slot and topic."""
    return f"debezium_{uuid4().hex[:8]}"


@pytest.fixture
def url(source_server: PostgresServer, prepared: str, name: str) -> str:
    source_server.create_database(name, template=prepared)
    return source_server.database_url(name)


@pytest.fixture
def topic(real_node: RealKafka, name: str) -> str:
    real_node.create_topic(name, partitions=4)
    return name


def config_for(url: str) -> dict[str, str]:
    """Return the configuration of the page, for a database of the tests."""
    server = urlsplit(url)
    name = server.path.removeprefix("/")
    return {
        **CONNECTOR,
        "database.hostname": str(server.hostname),
        "database.port": str(server.port),
        "database.password": os.environ.get("PGPASSWORD", ""),
        "database.dbname": name,
        "slot.name": name,
        "topic.prefix": name,
        "heartbeat.interval.ms": "500",
    }


def reads(url: str) -> bool:
    """Return whether something reads the log from the database's slot."""
    name = urlsplit(url).path.removeprefix("/")
    active = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"
    return bool(execute(url, active, [name]))


def start(worker: Connect, url: str, **changes: str) -> None:
    """Start the connector of the page, and wait until it reads the log."""
    config = {**config_for(url), **changes}
    name = config["slot.name"]
    worker.configure(name, config)

    def works() -> bool:
        assert worker.failure(name) is None
        return reads(url)

    wait_for("the connector reads", works)


def commit(url: str, *messages: Message) -> None:
    with sessions_of(url) as sessions, sessions.begin() as session:
        add(session, *messages)


def read(record: Record) -> Message:
    message, problem = message_of(record)
    assert problem is None
    return message


def test_what_commits_arrives_as_from_the_relay(
    worker: Connect, real_node: RealKafka, url: str, topic: str
) -> None:
    whole = Message(
        topic,
        {"n": 1},
        key="ä",
        tenant="acme",
        headers={"traceparent": "00-1-2-01", "Größe": '"ü"'},
        schema_version=3,
    )
    delayed = Message(
        topic, b"\x00\xff", key="k", available_at=datetime.now(UTC) + timedelta(hours=1)
    )
    urgent = Message(topic, b"2", key="k", priority=Priority.REALTIME)
    empty = Message(topic, b"")
    start(worker, url)

    with sessions_of(url) as sessions, suppress(KeyError), sessions.begin() as session:
        add(session, Message(topic, b"rolled back", key="k"))
        session.flush()
        raise KeyError
    commit(url, whole, delayed)
    commit(url, urgent, empty)
    arrived = records(real_node.url, topic, 4)

    sent = {m.id: m for m in (whole, delayed, urgent, empty)}
    plain = {"available_at": None, "priority": Priority.DEFAULT}
    read_again = {read(record).id: read(record) for record in arrived}
    assert read_again == {id: m.replace(**plain) for id, m in sent.items()}  # type: ignore[arg-type]
    by_id = {read(record).id: record for record in arrived}
    record = by_id[whole.id]
    assert (record.key(), record.value()) == ("ä".encode(), whole.payload)
    headers = dict(record.headers() or [])
    assert headers.pop("ce_time")
    assert json.loads(headers.pop("pillarbox-headers") or b"") == dict(whole.headers)
    assert headers == {
        "ce_id": str(whole.id).encode(),
        "ce_type": topic.encode(),
        "ce_partitionkey": "ä".encode(),
        "ce_tenant": b"acme",
        "ce_schemaversion": b"3",
        "content-type": b"application/json",
    }
    assert (by_id[empty.id].key(), by_id[empty.id].value()) == (None, b"")
    # In the order of the commits, whatever their time and priority.
    of_key = [read(record) for record in arrived if record.key() == b"k"]
    assert [m.payload for m in of_key] == [b"\x00\xff", b"2"]


def test_the_embedded_engine_routes_what_commits_without_a_kafka(url: str) -> None:
    message = Message("orders", {"n": 1}, key="ä", tenant="acme", headers={"a": "b"})
    with embedded(config_for(url)) as engine:

        def works() -> bool:
            assert engine.is_running(), engine.log()
            return reads(url)

        wait_for("the engine reads", works, seconds=240)
        commit(url, message)
        engine.wait_for_log('"topic":"orders"')
        (line,) = re.findall(
            r'^event: (.*"topic":"orders".*)$', engine.log(), re.MULTILINE
        )

    event = json.loads(line)
    headers = {name: json.loads(value) for name, value in event["headers"].items()}
    assert event["key"] == "ä"
    assert base64.b64decode(event["value"]) == message.payload
    assert headers.pop("ce_time")
    assert json.loads(headers.pop("pillarbox-headers")) == {"a": "b"}
    assert headers == {
        "ce_id": str(message.id),
        "ce_type": "orders",
        "ce_partitionkey": "ä",
        "ce_tenant": "acme",
        "ce_schemaversion": 1,
        "content-type": "application/json",
    }


@pytest.mark.fault
async def test_each_is_handled_once_although_connect_is_killed_and_its_day_dropped(
    real_node: RealKafka, url: str, topic: str
) -> None:
    handled: list[bytes] = []
    last = asyncio.Event()
    # What was published isn't known to Connect when it starts again.
    with connect(real_node.servers, flush=timedelta(hours=1)) as worker:
        async with async_sessions_of(url) as sessions:
            source = KafkaSource(real_node.url, consumer=topic, topics=[topic])
            consumer = Consumer(source, sessions, name="billing")

            @consumer.handles(topic)
            async def handle(session: AsyncSession, message: Message) -> None:
                handled.append(message.payload)
                if message.payload == b"last":
                    last.set()

            async with running(consumer):
                await asyncio.to_thread(publish_through_a_kill, worker, url, topic)
                async with asyncio.timeout(60):
                    await last.wait()
    count = len(records(real_node.url, topic, 13))

    assert handled == [*(b"%d" % n for n in range(10)), b"down", b"dropped", b"last"]
    assert count > len(handled)


def publish_through_a_kill(worker: Connect, url: str, topic: str) -> None:
    start(worker, url)
    commit(url, *(Message(topic, b"%d" % n, key="k") for n in range(10)))
    receipts = "SELECT 1 FROM inbox.receipt"
    wait_for("ten are handled", lambda: len(execute(url, receipts)) == 10)
    worker.kill()
    commit(url, Message(topic, b"down", key="k"))
    execute(url, DROP_TODAY)
    commit(url, Message(topic, b"dropped", key="k"))
    worker.start()
    start(worker, url)
    commit(url, Message(topic, b"last", key="k"))


def test_the_slot_moves_on_while_nobody_adds_messages(
    worker: Connect, url: str, name: str
) -> None:
    start(worker, url)
    execute(url, "CREATE TABLE other AS SELECT generate_series(1, 1000)")
    ((written,),) = execute(url, "SELECT pg_current_wal_lsn()")
    wait_for("the slot moves on", lambda: execute(url, LOG, [written, name])[0][0])
    wait_for("the connector reads", lambda: reads(url))  # it may reconnect meanwhile
    query = SQL[1].replace("pillarbox_debezium", name)
    ((_, active, status, behind),) = execute(url, query)
    assert (active, status) == (True, "reserved")
    assert behind < 100_000


def test_a_snapshot_publishes_what_is_in_the_table(
    worker: Connect, real_node: RealKafka, url: str, topic: str
) -> None:
    commit(url, *(Message(topic, b"%d" % n) for n in range(3)))
    start(worker, url, **{"snapshot.mode": "initial"})
    commit(url, Message(topic, b"3"))
    arrived = records(real_node.url, topic, 4)
    assert sorted(record.value() or b"" for record in arrived) == [
        *(b"%d" % n for n in range(4))
    ]


@pytest.mark.parametrize(
    "refused",
    [{"topic": "no topic"}, {"payload": bytes(1 << 20)}],
    ids=lambda r: next(iter(r)),
)
def test_a_message_that_kafka_refuses_stops_the_connector(
    worker: Connect, url: str, name: str, topic: str, refused: Mapping[str, Any]
) -> None:
    start(worker, url)
    commit(url, Message(topic, b"").replace(**refused))
    failure = wait_for("it stops", lambda: worker.failure(name)) or ""
    assert "InvalidTopic" in failure or "RecordTooLarge" in failure


@pytest.mark.long
def test_a_publication_can_leave_topics_out(
    worker: Connect, real_node: RealKafka, url: str, topic: str
) -> None:
    execute(
        url,
        "ALTER PUBLICATION pillarbox_debezium SET TABLE outbox.message"
        " WHERE (topic NOT LIKE 'partners.%')",
    )
    start(worker, url)
    commit(url, Message("partners.invoice", b""), Message(topic, b"1"))
    assert len(records(real_node.url, topic, 1)) == 1
    assert "partners.invoice" not in real_node.admin.list_topics().topics


def test_no_day_is_held_when_the_only_reader_discards(url: str, topic: str) -> None:
    commit(url, Message(topic, b"1"))
    with psycopg.connect(url, autocommit=True) as connection:
        add_reader(connection, "debezium", ["*"], discard=True, from_oldest=True)
        drop_reader(connection, "main", discard=True)
    commit(url, Message(topic, b"2"))
    held = """
        SELECT u.* FROM outbox.partitions('outbox.message') AS p
         CROSS JOIN outbox.unsettled_messages(p.partition, p.starts_at, p.ends_at) AS u
    """
    assert execute(url, held) == []
    states = execute(url, "SELECT DISTINCT state FROM outbox.message_status")
    assert states == [("discarded",)]
