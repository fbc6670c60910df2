"""A relay on a real database during failures and when stopped."""

import asyncio
from datetime import timedelta

import pytest

from pillarbox import ConfigError, Message
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.log.settle import store_settlement
from pillarbox.outbox.postgres.connection import connect
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import (
    BatchClaimed,
    DatabaseLost,
    DatabaseRecovered,
    LeaseLost,
    LeaseTaken,
    MessageDeadLettered,
    MessageRefused,
)
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.settle import settle
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    dead_letters,
    end_sessions,
    insert,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute
from tests.relay.test_claim import board_of_all_lanes

MIB = 1024 * 1024


async def test_a_refusal_after_the_lease_is_lost_counts_if_nobody_else_settled(
    database_url: str,
) -> None:
    insert(database_url, *numbered("a", 3))
    publisher = ScriptedPublisher()
    publisher.script = lambda message: (
        Nacked("full") if len(publisher.calls) == 1 else Acked()
    )
    publisher.open.clear()

    async with running(database_url, publisher) as relay:
        await publisher.until(lambda: bool(publisher.calls))
        end_sessions(database_url, "lease")
        await relay.events.wait_for(LeaseLost)
        publisher.open.set()
        await publisher.until_acked(3)

    assert publisher.topics() == ["a/0", "a/1", "a/2"]
    assert unsettled(database_url) == 0
    assert dead_letters(database_url) == []


async def test_a_settlement_after_another_relay_has_settled_is_refused_as_a_whole(
    database_url: str,
) -> None:
    insert(database_url, *numbered("a", 3), Message("bad", b"", key="b"))
    publisher = ScriptedPublisher()
    publisher.script = lambda message: (
        Nacked("no", permanent=message.topic == "bad")
        if len(publisher.calls) == 1
        else Acked()
    )
    publisher.open.clear()

    async with running(database_url, publisher) as relay:
        await publisher.until(lambda: bool(publisher.calls))
        board, other = board_of_all_lanes(), RelayConfig()
        async with await connect(database_url, application_name="test") as connection:
            batch = await claim_batch(connection, board, board.pick(), other)
            settlement = settle(batch, [Acked()] * 4, other.retry)
            await store_settlement(connection, board.reader, settlement)
        publisher.open.set()
        insert(database_url, Message("a/3", b"", key="a"))
        await publisher.until_acked(1)
        assert relay.events.of(MessageRefused) == []

    assert publisher.topics() == ["a/3"]
    assert execute(database_url, "SELECT FROM outbox.deferral") == []
    assert dead_letters(database_url) == []
    assert unsettled(database_url) == 0


async def test_a_claim_is_bounded_in_bytes(database_url: str) -> None:
    insert(database_url, *[Message(f"t{n}", b"x" * MIB, key="k") for n in range(10)])
    publisher = ScriptedPublisher()
    most = 3 * MIB + 1024

    async with running(database_url, publisher, max_batch_bytes=most) as relay:
        await publisher.until_acked(10)
        sizes = [claim.messages for claim in relay.events.of(BatchClaimed)]

    assert publisher.topics() == [f"t{n}" for n in range(10)]
    assert sizes == [3, 3, 3, 1]

    # A single message may exceed it.
    insert(database_url, *[Message(f"t{n}", b"x" * MIB, key="k") for n in (10, 11)])
    async with running(database_url, publisher, max_batch_bytes=1000) as relay:
        await publisher.until_acked(12)
        assert all(c.messages == 1 for c in relay.events.of(BatchClaimed))


INVALID = {
    "id": ("gen_random_uuid()", "is not a UUIDv7"),
    "payload": ("convert_to(repeat('x', 2000), 'UTF8')", "payload is over 1000 bytes"),
    "headers": ("""'{"ce-tenant": "forged"}'""", "is a reserved name"),
}


def insert_by_hand(url: str, column: str, value: str) -> None:
    values = {
        "id": "outbox.uuid7()",
        "lane": "16",
        "topic": "'by hand'",
        "key": "'k'",
        "content_type": "'text/plain'",
        "headers": "'{}'",
        "schema_version": "1",
        "payload": "''",
    } | {column: value}
    execute(
        url,
        f"INSERT INTO outbox.message ({', '.join(values)})"
        f" VALUES ({', '.join(values.values())})",
    )


async def test_invalid_rows_inserted_by_hand_are_dead_lettered(
    database_url: str,
) -> None:
    insert_by_hand(database_url, "topic", "'before'")
    for column, (value, _) in INVALID.items():
        insert_by_hand(database_url, column, value)
    insert_by_hand(database_url, "topic", "'after'")
    insert_by_hand(database_url, "content_type", "repeat(E'odd\\n\\x01', 200)")
    insert_by_hand(database_url, "topic", "repeat('long', 500)")
    insert(database_url, Message("elsewhere", b"", key="j"))
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, max_payload_bytes=1000) as relay:
        await publisher.until_acked(5)
        await relay.events.wait_for(MessageDeadLettered, len(INVALID))

    assert [t[:9] for t in publisher.topics() if t != "elsewhere"] == [
        *("before", "after", "by hand", "longlongl")
    ]
    reasons = [reason for _, _, reason in dead_letters(database_url)]
    for _, reason in INVALID.values():
        assert sum(reason in given for given in reasons) == 1
    assert unsettled(database_url) == 0


async def test_cancelling_drains_too(database_url: str) -> None:
    insert(database_url, Message("t", b""))
    publisher = ScriptedPublisher()
    publisher.open.clear()
    async with running(database_url, publisher) as relay:
        await publisher.until(lambda: bool(publisher.calls))
        relay.task.cancel()
        publisher.open.set()
        with pytest.raises(asyncio.CancelledError):
            await relay.task

    assert unsettled(database_url) == 0


async def test_a_relay_that_cannot_lease_lanes_reports_it(database_url: str) -> None:
    # Nothing is claimed without lanes, so no other operation fails.
    publisher = ScriptedPublisher()
    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(LeaseTaken)
        execute(database_url, "ALTER TABLE outbox.message RENAME TO gone")
        end_sessions(database_url, "lease")
        lost = "does not exist"
        await relay.events.wait_for(LeaseLost)
        async with asyncio.timeout(60):
            while not any(lost in e.reason for e in relay.events.of(DatabaseLost)):
                seen = len(relay.events.of(DatabaseLost))
                await relay.events.wait_for(DatabaseLost, seen + 1)
        execute(database_url, "ALTER TABLE outbox.gone RENAME TO message")
        await relay.events.wait_for(DatabaseRecovered)
        insert(database_url, Message("t", b""))
        await publisher.until_acked(1)


async def test_a_role_without_privileges_is_refused_at_start(
    server: PostgresServer, database_url: str
) -> None:
    execute(database_url, "CREATE ROLE powerless LOGIN")
    try:
        url = database_url.replace("postgres@", "powerless@")
        with pytest.raises(ConfigError, match="GRANT pillarbox_relay TO its role"):
            async with running(url, ScriptedPublisher()):
                pass
    finally:
        execute(server.url, "DROP ROLE powerless")


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
async def test_a_relay_stops_soon_although_its_database_hangs(
    database_url: str, proxy: MakeProxy, is_busy: bool
) -> None:
    between, url = proxy(database_url)
    publisher = ScriptedPublisher()
    if is_busy:
        publisher.open.clear()
    async with running(url, publisher, drain=timedelta(seconds=0.1)) as it:
        insert(database_url, Message("t", b""))
        await publisher.until(lambda: bool(publisher.calls))
        between.stall()
        publisher.open.set()
        it.relay.stop()
        # Of the 30 s that the page recommends, the drain takes 20 by default.
        async with asyncio.timeout(8):
            await it.task
