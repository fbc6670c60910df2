"""One process measures the database on behalf of all processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from outbox.errors import ConfigError
from outbox.observability.database_measure import (
    CONSUMER,
    RELAY,
    DatabaseMeasure,
    DatabaseMeasured,
    DatabaseMeasuredElsewhere,
    DatabaseNotMeasured,
    Measurer,
)
from outbox.observability.measures.tables import Table
from outbox.observability.prometheus import DatabaseMetrics
from outbox.testing.events import RecordedEvents
from pillarbox import Message
from tests.acceptance.relays import as_role
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

BACKLOG = "pillarbox_outbox_backlog_messages"


@asynccontextmanager
async def measuring(
    url: str,
    seconds: float = 0.05,
    grace: timedelta = timedelta(minutes=1),
    measurer: Measurer = RELAY,
) -> AsyncIterator[RecordedEvents]:
    """Measure in the role of a relay or a consumer until the end of the block."""
    events = RecordedEvents()
    role = "pillarbox_relay" if measurer is RELAY else "pillarbox_consumer"
    measure = DatabaseMeasure(
        as_role(url, role),
        seconds=seconds,
        notify=events,
        grace=grace,
        measurer=measurer,
    )
    task = asyncio.create_task(measure.run())
    try:
        yield events
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.week
async def test_a_relay_can_measure_everything(database_url: str) -> None:
    insert(database_url, Message("orders", b""), Message("orders", b"", key="k"))

    async with measuring(database_url) as events:
        measured, *_ = await events.wait_for(DatabaseMeasured)

    assert measured.overview.missing == ()
    backlog, tables = measured.overview.outbox, measured.overview.tables
    assert backlog is not None
    assert backlog.estimated == 2
    assert backlog.waited is not None
    assert backlog.waited > timedelta(0)
    # After midnight there is one fewer, until the next upkeep.
    assert table(measured, "outbox.message").ahead in {6, 7}
    assert {it.gaps for it in tables} == {0}
    assert {it.held for it in tables} == {()}
    assert (table(measured, "outbox.message").bytes or 0) > 0


def table(measured: DatabaseMeasured, name: str) -> Table:
    (found,) = [it for it in measured.overview.tables if it.table == name]
    return found


@pytest.mark.week
async def test_held_and_missing_partitions_are_counted(
    database_url: str,
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) SELECT outbox.uuid7(), min(starts_at), 16, 'orders', 'text/plain',"
        " '' FROM outbox.partitions('outbox.message')",
    )
    execute(
        database_url,
        "UPDATE outbox.partition_policy SET retention = '1 day'"
        " WHERE parent_table = 'outbox.message'",
    )
    # Also tomorrow's: midnight may come before the measurement.
    days = execute(
        database_url,
        "SELECT partition::text FROM outbox.partitions('inbox.suspect')"
        " WHERE starts_at <= now() + interval '1 day' AND ends_at > now()",
    )
    for (day,) in days:
        execute(database_url, f"DROP TABLE {day}")

    async with measuring(database_url) as events:
        measured, *_ = await events.wait_for(DatabaseMeasured)

    assert len(table(measured, "outbox.message").held) == 1
    assert not table(measured, "inbox.suspect").has_today
    assert measured.overview.missing == ()


async def test_a_pinned_transaction_of_another_role_is_timed(
    database_url: str,
) -> None:
    with psycopg.connect(database_url) as pin:
        pin.execute("SELECT pg_current_xact_id()")
        async with measuring(database_url) as events:
            # The pause grows to 50 times what a measurement takes.
            await events.wait_for(DatabaseMeasured, count=2, timeout=250)

        first, *_, last = events.of(DatabaseMeasured)
        assert last.pinned_for > first.pinned_for


async def test_one_replica_measures_and_another_takes_over_when_it_ends(
    database_url: str,
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(measuring(database_url))
        await first.wait_for(DatabaseMeasured)
        async with measuring(database_url) as second:
            await second.wait_for(DatabaseMeasuredElsewhere)
            assert second.of(DatabaseMeasured) == []
            await stack.aclose()
            await second.wait_for(DatabaseMeasured)


async def test_another_replica_takes_over_when_the_first_hangs(
    database_url: str,
) -> None:
    # To the server, a sleeping process looks the same as a hanging one.
    hanging = measuring(database_url, 3600.0, grace=timedelta(seconds=-3599))
    async with hanging as first:
        await first.wait_for(DatabaseMeasured)
        async with measuring(database_url) as second:
            await second.wait_for(DatabaseMeasured)


@pytest.mark.week
async def test_a_consumer_measures_if_no_relay_does(database_url: str) -> None:
    execute(database_url, "UPDATE outbox.upkeep SET succeeded_at = now()")
    async with measuring(database_url, measurer=CONSUMER) as consumer:
        measured, *_ = await consumer.wait_for(DatabaseMeasured)
        overview = measured.overview
        assert overview.missing == ()
        assert table(measured, "inbox.receipt").ahead in {6, 7}
        assert (table(measured, "inbox.receipt").bytes or 0) > 0
        assert overview.upkeep is not None
        assert overview.upkeep.age is not None
        assert not overview.upkeep.is_failing
        assert overview.outbox is None

        async with measuring(database_url, measurer=CONSUMER) as second:
            await second.wait_for(DatabaseMeasuredElsewhere)
            assert second.of(DatabaseMeasured) == []


async def test_consumers_leave_measuring_to_a_relay_until_it_ends(
    database_url: str,
) -> None:
    async with measuring(database_url, measurer=CONSUMER) as consumer:
        await consumer.wait_for(DatabaseMeasured)
        async with measuring(database_url) as relay:
            await relay.wait_for(DatabaseMeasured)
            await consumer.wait_for(DatabaseMeasuredElsewhere)
            before = len(consumer.of(DatabaseMeasured))
            await relay.wait_for(
                DatabaseMeasured, count=len(relay.of(DatabaseMeasured)) + 3
            )
            assert len(consumer.of(DatabaseMeasured)) == before
        await consumer.wait_for(DatabaseMeasured, count=before + 1)


async def test_an_unknown_database_is_reported() -> None:
    events = RecordedEvents()

    def unknown() -> str:
        raise ConfigError("the engine of sessions is not known")

    measure = DatabaseMeasure(unknown, seconds=60, notify=events, measurer=CONSUMER)
    task = asyncio.create_task(measure.run())
    failed, *_ = await events.wait_for(DatabaseNotMeasured)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert "is not known" in failed.reason


async def test_a_failed_measurement_is_reported_and_tried_again(
    database_url: str,
) -> None:
    execute(database_url, "ALTER TABLE outbox.message RENAME TO hidden")
    async with measuring(database_url) as events:
        failed, *_ = await events.wait_for(DatabaseNotMeasured)
        assert "no table outbox.message" in failed.reason
        execute(database_url, "ALTER TABLE outbox.hidden RENAME TO message")
        await events.wait_for(DatabaseMeasured)


@pytest.mark.week
async def test_only_the_replica_that_measures_has_samples(database_url: str) -> None:
    insert(database_url, Message("orders", b""))
    registry = CollectorRegistry()
    metrics = DatabaseMetrics(registry)
    assert registry.get_sample_value(BACKLOG) is None

    async with measuring(database_url) as events:
        measured, *_ = await events.wait_for(DatabaseMeasured)
    metrics(measured)

    database = {"database": measured.overview.database}
    assert registry.get_sample_value(BACKLOG, database) == 1
    ahead = {**database, "table": "outbox.message"}
    assert registry.get_sample_value("pillarbox_partitions_ahead", ahead) in {6, 7}
    metrics(DatabaseMeasuredElsewhere())
    assert registry.get_sample_value(BACKLOG, database) is None
