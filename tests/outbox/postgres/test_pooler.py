"""A pooler in transaction mode is detected and refused if a session is needed."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from sqlalchemy import make_url

from pillarbox import Message
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.errors import DatabaseUnavailableError, PoolerError
from pillarbox.outbox.postgres import pooler_check as pooler
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.postgres.pooler_check import refuse_pooler
from pillarbox.relay.dead_letters.retry import PublishingRetrier
from pillarbox.relay.events import BatchSettled
from pillarbox.relay.publishers.memory import MemoryPublisher
from pillarbox.relay.publishers.postgres import PostgresPublisher
from tests.fixtures.dead_letters import find, give_up, states
from tests.fixtures.pgbouncer import Pooled
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

Capture = pytest.CaptureFixture[str]
REFUSAL = "connects through a pooler in transaction mode"
REMEDY = "use the URL of PostgreSQL itself, or of a pool in session mode"
STATE = """
SELECT (SELECT count(*) FROM outbox.partitions('outbox.message')),
       (SELECT array_agg(p ORDER BY parent_table) FROM outbox.partition_policy p),
       (SELECT count(*) FROM outbox.subscription),
       (SELECT count(*) FROM pg_locks
          JOIN pg_database d ON d.oid = database
         WHERE locktype = 'advisory' AND datname = current_database())
"""
COMMANDS = (
    "maintain",
    "maintain --dry-run",
    "retention",
    "retention set outbox.message 30d",
    "partitions",
    "migrate --without-cron",
    "migrate --remove {database}",
    "dead-letters list --side outbox",
    "dead-letters list --side inbox",
    "blocked",
)


def words(command: str, url: str) -> list[str]:
    return command.format(database=make_url(url).database).split()


@contextmanager
def sessions_in_pool(url: str, count: int) -> Iterator[None]:
    """Make the pool open this many sessions, and leave them idle."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(conninfo(url))) for _ in range(count)
        ]
        for connection in connections:
            connection.execute("SELECT 1")
        for connection in connections:
            connection.rollback()
        yield


@contextmanager
def busy_clients(url: str, clients: int) -> Iterator[None]:
    """Let clients take and return sessions as fast as they can."""
    stop = threading.Event()
    rounds = [0] * clients

    def work(client: int) -> None:
        with psycopg.connect(conninfo(url), prepare_threshold=None) as connection:
            while not stop.is_set():
                connection.execute("SELECT pg_sleep(random() / 1000)")
                connection.commit()
                rounds[client] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        wait_for("clients at work", lambda: all(rounds))
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("in_turns", [0, 1])
def test_a_pooler_is_detected_however_it_assigns_sessions(
    in_turns: int, pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = pooled("transaction", server_round_robin=in_turns, default_pool_size=4)
    for count in (1, 2, 3, 4):
        with sessions_in_pool(url, count):
            for _ in range(5):
                with pytest.raises(PoolerError, match=REFUSAL):
                    refuse_pooler(url)
    # The check left no state in the session for its next client.
    assert execute(url, "SHOW search_path") == [('"$user", public',)]
    monkeypatch.setattr(pooler, "RING_LIMIT", 2.0)
    with busy_clients(url, 3):
        for _ in range(10):
            with pytest.raises(PoolerError):
                refuse_pooler(url)


async def test_a_pooler_in_statement_mode_is_detected_even_inside_a_running_loop(
    pooled: Pooled,
) -> None:
    with pytest.raises(PoolerError):
        refuse_pooler(pooled("statement"))


def test_a_pool_with_a_single_session_is_reported_as_too_small(
    pooled: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooler, "LIMIT", 0.5)
    with pytest.raises(DatabaseUnavailableError, match="two connections at once"):
        refuse_pooler(pooled("session", default_pool_size=1))


def test_a_command_refuses_a_pooler_names_the_remedy_and_changes_nothing(
    pooled: Pooled, database_url: str, capsys: Capture
) -> None:
    ((ahead,),) = execute(
        database_url,
        "SELECT max(partition::text) FROM outbox.partitions('outbox.message')",
    )
    execute(database_url, f"DROP TABLE {ahead}")
    before = execute(database_url, STATE)
    url = pooled("transaction")

    for command in COMMANDS:
        assert main([*words(command, url), "--database", url]) == 2, command

        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert REFUSAL in line, command
        assert REMEDY in line, command
        assert printed.out == "", command
        assert execute(database_url, STATE) == before, command
        assert execute(url, "SELECT current_user = session_user") == [(True,)], command


def test_the_doctor_reports_a_pooler_and_stops(pooled: Pooled, capsys: Capture) -> None:
    url = pooled("transaction")

    assert main(["doctor", "--json", "--database", url]) == 3

    report = json.loads(capsys.readouterr().out)
    assert report["checks"] == ["pooler"]
    (finding,) = report["findings"]
    assert finding["severity"] == "error"
    assert REFUSAL in finding["finding"]
    assert "the URL of PostgreSQL itself" in finding["remedy"]


def test_commands_work_through_a_pooler_in_session_mode(
    pooled: Pooled, capsys: Capture
) -> None:
    url = pooled("session")
    for command in ("maintain", "retention set outbox.message 30d", "partitions"):
        assert main([*words(command, url), "--database", url]) == 0
    main(["doctor", "--database", url])
    assert "ok       pooler\n" in capsys.readouterr().out


async def test_processes_refuse_a_pooler_and_do_nothing(
    pooled: Pooled, database_url: str
) -> None:
    url = pooled("transaction")
    insert(database_url, Message("orders", b""))
    give_up(database_url, Message("orders", b""))
    publisher = MemoryPublisher()

    with pytest.raises(PoolerError, match=REMEDY):
        async with running(url, publisher):
            pass
    source = PostgresSource(url, consumer="billing", topics=["orders"])
    with pytest.raises(PoolerError, match=REMEDY):
        async with source:
            pass
    with pytest.raises(PoolerError, match=REMEDY):
        async with PostgresPublisher(url):
            pass
    async with PublishingRetrier(url, lambda: publisher) as retrier:
        (candidate,) = await find(retrier, Criteria())
        with pytest.raises(PoolerError, match=REMEDY):
            await retrier.retry(candidate)

    assert publisher.messages == []
    assert (
        execute(database_url, "SELECT 1 FROM outbox.reader WHERE reader = 'billing'")
        == []
    )
    assert states(database_url) == [("PENDING", 0, "refused")]


async def test_processes_work_through_a_pooler_in_session_mode(
    pooled: Pooled, database_url: str
) -> None:
    url = pooled("session")
    async with running(url, publisher := MemoryPublisher()) as relaying:
        insert(database_url, message := Message("orders", b""))
        await relaying.events.wait_for(BatchSettled)
    assert publisher.messages == [message]
    async with PostgresSource(url, consumer="billing", topics=["orders"]) as source:
        async with PostgresPublisher(url) as publishing:
            await publishing.publish([message := Message("orders", b"")])
        (delivery,) = await source.receive(limit=1)
        assert delivery.message == message
        await delivery.ack()
