"""A source that can't record what became of its deliveries delivers nothing."""

import asyncio
from contextlib import suppress

from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.log.settle import WRITES
from pillarbox.outbox.message import Message
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.consumers import numbered
from tests.fixtures.passwords import set_password
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import answer_after

END_SOURCE = """
    SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
     WHERE usename = 'mary' AND datname = current_database()
"""
# What forbids to record, what allows it again, and what the error says.
CHANGES = [
    (
        "ALTER ROLE mary SET default_transaction_read_only = on",
        "ALTER ROLE mary RESET ALL",
        "default_transaction_read_only",
    ),
    *(
        (
            f"REVOKE INSERT ON {table} FROM pillarbox_relay",
            f"GRANT INSERT ON {table} TO pillarbox_relay",
            "pillarbox doctor",
        )
        for table in WRITES
    ),
]


async def test_a_source_delivers_nothing_whose_outcome_it_cannot_record(
    migrated_server: PostgresServer,
) -> None:
    url = migrated_server.url
    mary = set_password(url, "mary", "secret")

    async def receive(messages: list[Message]) -> None:
        missing = {message.id for message in messages}
        while missing:
            with suppress(BrokerUnavailableError):
                # Earlier ones come again if their acks were not sent yet.
                for delivery in await source.receive(limit=10):
                    await delivery.ack()
                    missing.discard(delivery.message.id)
            await answer_after(0.01)  # or the lease could never recover

    async with PostgresSource(mary, consumer="billing", topics=["orders"]) as source:
        insert(url, *(first := numbered(1)))
        await receive(first)
        for forbid, allow, words in CHANGES:
            execute(url, forbid)
            execute(url, END_SOURCE)
            insert(url, *(messages := numbered(5)))
            reason = ""
            async with asyncio.timeout(60):
                while words not in reason:
                    try:
                        assert await source.receive(limit=10) == []
                    except BrokerUnavailableError as error:
                        reason = str(error)
                    await answer_after(0.01)  # or the lease could never be refused
            execute(url, allow)
            execute(url, END_SOURCE)
            await receive(messages)
