"""Row-level security on our tables is an error, never a smaller result."""

import asyncio
from contextlib import suppress

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, Message
from pillarbox.inbox.events import SourceLost
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.observability.health import Health
from pillarbox.relay.events import DatabaseLost, RelayStarted
from pillarbox.relay.relay import Relay
from tests.acceptance.relays import as_role
from tests.fixtures.consumers import async_sessions_of
from tests.fixtures.consumers import running as consuming
from tests.fixtures.doctor import Doctor
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert, running
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_upkeep import add_old, old_partition

ENABLE = "ALTER TABLE {} ENABLE ROW LEVEL SECURITY"
INSERT_ONLY = "CREATE POLICY writers ON outbox.message FOR INSERT WITH CHECK (true)"
ALL_TABLES = """
    DO $$
    DECLARE
        v_table regclass;
    BEGIN
        FOR v_table IN SELECT c.oid FROM pg_class c
             WHERE c.relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
               AND c.relkind IN ('r', 'p')
        LOOP
            EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', v_table);
        END LOOP;
    END
    $$
"""


@pytest.mark.parametrize("table", ["outbox.message", "outbox.position"])
async def test_a_relay_does_not_start_if_policies_apply_to_it(
    database_url: str, table: str
) -> None:
    execute(database_url, ENABLE.format(table))
    relay = Relay(as_role(database_url, "pillarbox_relay"), ScriptedPublisher())
    with pytest.raises(ConfigError, match="row-level security would hide rows"):
        async with asyncio.timeout(60):
            await relay.run()


async def test_a_relay_publishes_nothing_while_policies_apply_to_its_log(
    database_url: str,
) -> None:
    execute(database_url, ENABLE.format("outbox.deferral"))
    insert(database_url, Message("orders", b"", key="k"))
    publisher = ScriptedPublisher()
    async with running(as_role(database_url, "pillarbox_relay"), publisher) as relay:
        (lost, *_) = await relay.events.wait_for(DatabaseLost)
        assert "row-level security" in lost.remedy
        assert publisher.calls == []
        execute(database_url, "ALTER TABLE outbox.deferral DISABLE ROW LEVEL SECURITY")
        await publisher.until_acked(1)


async def test_a_running_relay_is_not_ready_while_policies_apply_to_it(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher()
    health = Health(RelayStarted)
    async with running(as_role(database_url, "pillarbox_relay"), publisher) as relay:
        execute(database_url, INSERT_ONLY)
        execute(database_url, ENABLE.format("outbox.message"))
        insert(database_url, Message("orders", b""))
        (lost, *_) = await relay.events.wait_for(DatabaseLost)
        for event in list(relay.events.events):
            health(event)
        assert health.waits_for == ["database"]
        assert publisher.acked == []
        assert "row-level security" in lost.remedy

        execute(database_url, "ALTER TABLE outbox.message DISABLE ROW LEVEL SECURITY")
        await publisher.until_acked(1)


async def test_a_relay_that_bypasses_row_level_security_publishes(
    database_url: str,
) -> None:
    execute(database_url, ALL_TABLES)
    publisher = ScriptedPublisher()
    insert(database_url, Message("orders", b""))
    async with running(database_url, publisher):
        await publisher.until_acked(1)


async def test_a_consumer_does_not_start_if_policies_apply_to_its_sessions(
    database_url: str,
) -> None:
    execute(database_url, ENABLE.format("inbox.suspect"))
    url = as_role(database_url, "pillarbox_consumer")
    async with async_sessions_of(url) as sessions:
        consumer = Consumer("memory://", sessions, name="billing")

        @consumer.handles("orders")
        async def bill(session: AsyncSession, message: Message) -> None:
            pass

        with pytest.raises(ConfigError, match=r"row-level security of suspect"):
            await consumer.run()


async def test_a_source_of_the_postgres_broker_is_lost_while_policies_apply_to_it(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing")
    url = as_role(database_url, "pillarbox_relay")
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(url, sessions, name="billing")

        @consumer.handles("orders")
        async def bill(session: AsyncSession, message: Message) -> None:
            pass

        async with consuming(consumer) as events:
            execute(database_url, ENABLE.format("outbox.message"))
            insert(database_url, Message("orders", b""))
            (lost, *_) = await events.wait_for(SourceLost)
            assert "row-level security" in lost.reason


@pytest.mark.parametrize("table", ["outbox.message", "outbox.position"])
def test_forced_policies_do_not_make_the_gate_let_unsettled_messages_go(
    database_url: str, table: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    add_old(database_url)
    before = execute(database_url, "SELECT count(*) FROM outbox.message")
    url = as_role(database_url, "pillarbox_owner")
    for (relation,) in execute(
        database_url,
        "SELECT %s::regclass::text UNION ALL"
        " SELECT inhrelid::regclass::text FROM pg_inherits"
        " WHERE inhparent = %s::regclass",
        (table, table),
    ):
        execute(database_url, f"ALTER TABLE {relation} ENABLE ROW LEVEL SECURITY")
        execute(database_url, f"ALTER TABLE {relation} FORCE ROW LEVEL SECURITY")
    with suppress(psycopg.Error):
        execute(url, "CALL outbox.maintain()")

    assert execute(database_url, "SELECT count(*) FROM outbox.message") == before
    failures = execute(database_url, "SELECT u::text FROM outbox.upkeep_failure u")
    assert failures
    steps: list[tuple[str]] = []
    with suppress(psycopg.errors.InsufficientPrivilege):
        steps = execute(url, "SELECT step FROM outbox.upkeep_plan('outbox.message')")
    assert not {"detach", "drop", "finalize"} & {step for (step,) in steps}
    found = [f for f in doctor(database_url)[1] if f["check"] == "row security"]
    assert any(
        f"{table} applies to" in f["finding"].replace('"', "")
        and "pillarbox_owner" in f["finding"]
        for f in found
    )


def test_the_doctor_names_tables_and_roles_and_what_disables_it(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, INSERT_ONLY)
    execute(database_url, ENABLE.format("outbox.message"))
    (found,) = (f for f in doctor(database_url)[1] if f["check"] == "row security")
    assert found["severity"] == "error"
    assert "outbox.message applies to " in found["finding"]
    assert "pillarbox_relay" in found["finding"]
    execute(database_url, found["remedy"])
    assert doctor(database_url)[1] == []
