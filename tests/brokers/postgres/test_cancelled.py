"""A consumer that reads the outbox doesn't get a message that was cancelled."""

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from pillarbox import Cancelled, Message, TooLate, cancel
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.tenants import add_tenant_index
from pillarbox.outbox.postgres.connection import conninfo
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

OUTCOMES = "SELECT outcome FROM outbox.deferral WHERE id = %s AND reader = 'billing'"

IS_DUE = "SELECT now() > max(available_at) FROM outbox.message"


def soon(topic: str, key: str, tenant: str | None, seconds: float) -> Message:
    due_at = datetime.now(UTC) + timedelta(seconds=seconds)
    return Message(topic, b"", key=key, tenant=tenant, available_at=due_at)


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("tenant", [None, "acme"])
async def test_what_was_cancelled_is_ended_and_the_rest_of_its_key_is_delivered(
    database_url: str, tenant: str | None, is_claimed: bool
) -> None:
    if tenant is not None:
        with administration(database_url, application_name="test") as connection:
            add_tenant_index(connection)
    add_consumer(database_url, "billing", "t.*")
    source = PostgresSource(
        with_options(database_url, prefetch=8), consumer="billing", topics=["t.*"]
    )
    # Time enough to cancel one after both are logged, on a busy machine.
    seconds = 8 if is_claimed else 1
    withdrawn, kept = (
        soon(topic, "k", tenant, seconds) for topic in ("t.withdrawn", "t.kept")
    )
    insert(database_url, withdrawn, kept, Message("t.now", b"", key="k", tenant=tenant))
    waits = "SELECT count(*) FROM outbox.deferral WHERE cause = 'scheduled'"

    def is_logged() -> bool:
        return execute(database_url, waits) == [(2,)]

    def withdraw() -> object:
        with psycopg.connect(conninfo(database_url)) as connection:
            return cancel(connection, withdrawn.id)

    def are_due() -> bool:
        return execute(database_url, IS_DUE) == [(True,)]

    if not is_claimed:
        assert withdraw() == Cancelled()
        await asyncio.to_thread(wait_for, "both are due", are_due)
    topics: list[str] = []
    async with source, asyncio.timeout(120):
        if is_claimed:
            await asyncio.to_thread(wait_for, "both are logged", is_logged)
            assert withdraw() == Cancelled()
        while len(topics) < 2:
            for delivery in await source.receive(limit=10):
                topics.append(delivery.message.topic)
                if delivery.message.topic == "t.kept":
                    with psycopg.connect(conninfo(database_url)) as connection:
                        answer = cancel(connection, kept.id)
                    assert isinstance(answer, TooLate), "it is in hand"
                await delivery.ack()
        await asyncio.to_thread(
            wait_for,
            "it is ended",
            lambda: ("cancelled",) in execute(database_url, OUTCOMES, [withdrawn.id]),
        )
    assert topics == (["t.now", "t.kept"] if is_claimed else ["t.kept", "t.now"])
