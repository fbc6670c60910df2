"""A relay goes on where it stopped after a crash of the server, or in another one."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psycopg
import pytest

from pillarbox import ConfigError, Message
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.cluster import find_binaries, initialized
from pillarbox.outbox.testing.lifetime import unprivileged_user
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from pillarbox.relay.events import BatchSettled, MessageDeadLettered
from pillarbox.relay.publisher import Acked, Nacked
from tests.fixtures.days import make_partitions_at
from tests.fixtures.doctor import Doctor
from tests.fixtures.postgres import FEW_DAYS, SETTINGS, copied_server
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    PATIENT,
    dead_letters,
    insert,
    make_due,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.migrations.test_dump_and_restore import carry, run

RECIPE = re.findall(
    r"```sql\n(.*?)```",
    Path("docs/database.md")
    .read_text(encoding="utf-8")
    .partition("### A logical replica")[2]
    .partition("\n## ")[0],
    re.DOTALL,
)
"""How to make a logical replica, as documented."""

BURN_IDS = """
    DO $$
    BEGIN
        FOR n IN 1..20000 LOOP
            PERFORM pg_current_xact_id();
            COMMIT;
        END LOOP;
    END
    $$
"""


@pytest.fixture(scope="module")
def other_data() -> Path:
    """The data of a cluster that isn't a copy of the one of the other tests."""
    return initialized.__wrapped__(find_binaries(), unprivileged_user())


@pytest.fixture
def other_cluster(other_data: Path) -> Iterator[PostgresServer]:
    with copied_server(other_data) as running:
        yield running


def kill_backend(url: str) -> None:
    """Kill a process of the server, which then ends all its sessions and recovers."""
    with psycopg.connect(conninfo(url)) as victim, psycopg.connect(conninfo(url)) as it:
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        with suppress(psycopg.OperationalError):
            it.execute("SELECT pg_sleep(60)")
    wait_for("the server", partial(is_up, url))


def is_up(url: str) -> bool:
    # A session of before the crash may answer until its process has the signal, too.
    try:
        psycopg.connect(conninfo(url)).close()
    except psycopg.OperationalError:
        return False
    return True


def refuse_r(message: Message) -> Acked | Nacked:
    return Nacked("no") if message.key == "r" else Acked()


async def test_a_settlement_that_a_crash_of_the_server_has_lost_is_repeated(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    # So long, nothing that commits asynchronously reaches the disk.
    execute(url, "ALTER SYSTEM SET wal_writer_delay = '10s'")
    execute(url, "SELECT pg_reload_conf()")
    publisher = ScriptedPublisher()
    publisher.script = lambda message: (
        Nacked("no") if len(publisher.calls) == 1 and message.key == "b" else Acked()
    )
    publisher.open.clear()
    async with running(url, publisher, retry=PATIENT) as relay:
        insert(url, *numbered("ab", 3))
        await publisher.until(lambda: bool(publisher.calls))
        execute(url, "CHECKPOINT")
        publisher.open.set()
        await relay.events.wait_for(BatchSettled)
        migrated_server.restart("immediate")
        insert(url, *[Message(f"{key}/3", b"", key=key) for key in "ab"])
        while "a/3" not in publisher.topics():
            await publisher.until_acked(len(publisher.acked) + 1)
        make_due(url)
        while "b/3" not in publisher.topics():
            await publisher.until_acked(len(publisher.acked) + 1)

    for key in "ab":
        topics = publisher.of_key(key)
        assert list(dict.fromkeys(topics)) == [f"{key}/{n}" for n in range(4)]
    assert unsettled(url) == 0
    assert execute(url, "SELECT sum(messages) FROM outbox.position") == [(8,)]


@pytest.mark.parametrize("killed", ["postmaster", "backend"])
async def test_what_commits_after_a_crash_is_published_although_it_has_lost_numbers(
    killed: str, migrated_server: PostgresServer
) -> None:
    url = migrated_server.url
    execute(url, "ALTER DATABASE pillarbox SET synchronous_commit = off")
    execute(url, "CHECKPOINT")
    # From now on, nothing reaches the disk.
    ((writer,),) = execute(
        url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
    )
    os.kill(writer, signal.SIGSTOP)
    publisher = ScriptedPublisher()
    publisher.open.clear()
    async with running(url, publisher):
        insert(url, *numbered("abcdefgh", 20))
        await publisher.until(lambda: sum(map(len, publisher.calls)) >= 160)
        # Until the server is back, the relay isn't: this blocks the event loop.
        if killed == "postmaster":
            migrated_server.restart("immediate")
        else:
            kill_backend(url)
        after = [Message("after", b"", key=key) for key in "abcdefgh" * 20]
        insert(url, *after)
        publisher.open.set()
        await publisher.until(lambda: publisher.topics().count("after") >= 160)

    assert {m.id for m in after} <= {m.id for m in publisher.acked}
    assert unsettled(url) == 0


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("burns", ["source", "target"])
async def test_a_database_restored_in_another_cluster_goes_on_where_it_was(
    burns: str,
    database_url: str,
    server: PostgresServer,
    other_cluster: PostgresServer,
    tmp_path: Path,
    doctor: Doctor,
) -> None:
    source, target = database_url, other_cluster.url
    execute(source if burns == "source" else target, BURN_IDS)
    first, second = ScriptedPublisher(refuse_r), ScriptedPublisher()
    with psycopg.connect(conninfo(source)) as slow:
        insert(source, *numbered("kr", 3))
        slow.execute("SELECT outbox.add('late', '{}'::jsonb, key => 'l')")
        async with running(source, first, retry=PATIENT) as relay:
            insert(source, *[Message(f"k/{n}", b"", key="k") for n in (3, 4)])
            await first.until_acked(5)
            await relay.events.wait_for(BatchSettled)
        slow.commit()
    insert(source, Message("k/5", b"", key="k"))
    file, roles = str(tmp_path / "dump"), str(tmp_path / "roles.sql")
    assert run("pg_dumpall", "--roles-only", "--file", roles, "-d", server.url) == []
    run("psql", "-X", "-q", "-f", roles, target)
    assert carry(source, target, file) == []

    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with running(target, second):
            pass
    _, findings = doctor(target)
    ((remedy,),) = ([it["remedy"]] for it in findings if it["check"] == "cluster")
    assert remedy.startswith("pillarbox migrate")
    migrate(target, with_cron=False, days_ahead=FEW_DAYS)
    assert execute(
        target,
        "SELECT topic FROM outbox.message_status WHERE state = 'ready' ORDER BY topic",
    ) == [("k/5",), ("late",)]
    async with running(target, second, sweep_interval=timedelta(milliseconds=50)):
        insert(target, Message("k/6", b"", key="k"), Message("r/3", b"", key="r"))
        await second.until_acked(3)
        make_due(target)
        await second.until_acked(7)

    assert sorted(second.of_key("l")) == ["late"]
    assert second.of_key("k") == ["k/5", "k/6"]
    assert second.of_key("r") == ["r/0", "r/1", "r/2", "r/3"]
    assert unsettled(target) == 0
    assert execute(
        target,
        "SELECT count(*) = (SELECT sum(messages) FROM outbox.position)"
        " FROM outbox.message",
    ) == [(True,)]


@pytest.mark.timeout(180)
async def test_a_logical_replica_that_was_made_as_documented_takes_over(
    other_cluster: PostgresServer,
) -> None:
    target = other_cluster.url
    empty, publish, subscribe = RECIPE
    with postgres_server(
        settings={**SETTINGS, "wal_level": "logical"}, durable=False
    ) as primary:
        source = primary.url
        for url in source, target:
            migrate(url, with_cron=False, days_ahead=FEW_DAYS)
        refusing = ScriptedPublisher(refuse_r)
        async with running(source, refusing, retry=PATIENT):
            insert(source, *numbered("kr", 3))
            await refusing.until(lambda: len(refusing.acked) >= 3)
            for _ in range(3):
                make_due(source)
            insert(source, Message("k/3", b"", key="k"))
            await refusing.until_acked(4)
        execute(target, empty)
        execute(source, publish)
        connection = subscribe.replace(
            "host=primary dbname=shop user=replicator", conninfo(source)
        )
        execute(target, connection)
        tomorrow = datetime.now(UTC) + timedelta(days=FEW_DAYS + 1)
        for url in source, target:
            owner = f"{url}?options=-crole%3Dpillarbox_owner"
            execute(owner, make_partitions_at("outbox.message").decode(), [[tomorrow]])
        insert(source, Message("k/4", b"", key="k"))
        execute(
            source,
            "INSERT INTO outbox.message (id, created_at, lane, topic, key,"
            " content_type, payload) SELECT outbox.uuid7(), %s, lane, 'new day', 'k',"
            " content_type, payload FROM outbox.message WHERE topic = 'k/4'",
            [tomorrow],
        )
        ((last,),) = execute(source, "SELECT pg_current_wal_lsn()::text")
        caught_up = (
            "SELECT bool_and(r.srsubstate = 'r' AND s.latest_end_lsn >= %s::pg_lsn)"
            " FROM pg_subscription_rel AS r, pg_stat_subscription AS s"
            " WHERE s.relid IS NULL"
        )
        wait_for("all rows", lambda: execute(target, caught_up, [last]) == [(True,)])
        execute(target, "DROP SUBSCRIPTION pillarbox")

    second = ScriptedPublisher(refuse_r)
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with running(target, second):
            pass
    migrate(target, with_cron=False, days_ahead=FEW_DAYS)
    async with running(target, second) as relay:
        make_due(target)
        await relay.events.wait_for(MessageDeadLettered, 3)
        await second.until_acked(2)
    assert second.of_key("k") == ["k/4", "new day"]
    assert [topic for topic, _, _ in dead_letters(target)] == ["r/0", "r/1", "r/2"]
    assert unsettled(target) == 0


async def test_a_database_that_was_migrated_before_its_rows_came_needs_a_base(
    database_url: str,
) -> None:
    """As a logical replica, or a dump that returns to its first cluster."""
    insert(database_url, *numbered("k", 2))
    publisher = ScriptedPublisher()
    async with running(database_url, publisher) as relay:
        await publisher.until_acked(2)
        await relay.events.wait_for(BatchSettled)
    execute(database_url, "INSERT INTO outbox.base VALUES ('elsewhere', -1)")
    with pytest.raises(ConfigError, match="run pillarbox migrate"):
        async with running(database_url, publisher):
            pass
    for _ in range(2):
        migrate(database_url, with_cron=False, days_ahead=FEW_DAYS)
    async with running(database_url, publisher):
        insert(database_url, Message("k/2", b"", key="k"))
        await publisher.until_acked(3)

    assert publisher.topics() == ["k/0", "k/1", "k/2"]
    assert execute(
        database_url, "SELECT cluster = 'elsewhere' FROM outbox.base ORDER BY seq"
    ) == [(True,), (False,)]
