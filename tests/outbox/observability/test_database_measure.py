"""Each process measures what its role can read in the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import psycopg
import pytest
from prometheus_client import CollectorRegistry

from pillarbox import Message
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.observability import database_measure
from pillarbox.outbox.observability.database_measure import (
    CONSUMER,
    RELAY,
    DatabaseMeasure,
    DatabaseMeasured,
    DatabaseNotMeasured,
)
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.measures.tables import Table
from pillarbox.outbox.observability.overview import read_overview
from pillarbox.outbox.observability.prometheus import DatabaseMetrics
from pillarbox.outbox.testing.events import RecordedEvents
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up
from tests.fixtures.pgbouncer import Pooled
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute

BACKLOG = "pillarbox_outbox_backlog_messages"


@pytest.fixture(autouse=True)
def _without_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, 50 times what a measurement takes is minutes."""
    monkeypatch.setattr(database_measure, "_SHARE", 1)


@asynccontextmanager
async def measuring(
    url: str, seconds: float = 0.05, scope: Scope = RELAY, *, role: str | None = None
) -> AsyncIterator[RecordedEvents]:
    """Measure in the role of a relay or a consumer until the end of the block."""
    events = RecordedEvents()
    role = role or ("pillarbox_relay" if scope is RELAY else "pillarbox_consumer")
    measure = DatabaseMeasure(
        lambda: as_role(url, role), scope, seconds=seconds, notify=events
    )
    task = asyncio.create_task(measure.run())
    try:
        yield events
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.week
@pytest.mark.parametrize("role", ["pillarbox_relay", "pillarbox_reader"])
async def test_a_relay_can_measure_everything(database_url: str, role: str) -> None:
    insert(database_url, Message("orders", b""), Message("orders", b"", key="k"))

    async with (
        measuring(database_url, role=role) as events,
        measuring(database_url, role=role) as replica,
    ):
        measured, *_ = await events.wait_for(DatabaseMeasured)
        await replica.wait_for(DatabaseMeasured)

    assert found_by(measured) == {("upkeep", "warning")}
    backlog, tables = measured.overview.outbox, measured.overview.tables
    assert backlog is not None
    assert backlog.estimated == 2
    assert backlog.waited is not None
    assert backlog.waited > timedelta(0)
    # After midnight there is one fewer, until the next upkeep.
    assert table(measured, "outbox.message").ahead in {6, 7}
    assert {it.gaps for it in tables} == {0}
    assert {it.held for it in tables} == {()}


def found_by(measured: DatabaseMeasured) -> set[tuple[str, str]]:
    """Return the checks that found something, each with the severity."""
    return {(it.check, it.severity) for it in measured.findings}


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

    messages = table(measured, "outbox.message")
    (held,) = messages.held
    assert held.unsettled == 1
    assert "unsettled" in held.reason
    assert messages.expired > 1
    with psycopg.connect(as_role(database_url, "pillarbox_monitor")) as monitor:
        seen = read_overview(monitor, Scope(parts=["tables"]))
    of_monitor = {it.table: it.held for it in seen.tables}
    assert of_monitor["outbox.message"] == messages.held
    assert not table(measured, "inbox.suspect").has_today
    assert {("partitions", "error"), ("retention", "warning")} <= found_by(measured)
    assert measured.overview.missing == ()


async def test_a_pinned_transaction_of_another_role_is_timed(
    database_url: str,
) -> None:
    with psycopg.connect(database_url, application_name="report") as pin:
        pin.execute("SELECT pg_current_xact_id()")
        async with measuring(database_url) as events:
            await events.wait_for(DatabaseMeasured, count=2)

        first, *_, last = [
            it
            for measured in events.of(DatabaseMeasured)
            for it in measured.overview.pins
            if it.pid == pin.info.backend_pid
        ]
        assert first.open_for is not None
        assert last.open_for is not None
        assert last.open_for > first.open_for
        with psycopg.connect(database_url, autocommit=True) as superuser:
            scope = Scope(parts=["pins"], pins_from=timedelta(0))
            pins = read_overview(superuser, scope).pins
        (named,) = [it for it in pins if it.name == "report"]
        assert named.is_writing
        assert named.xid is not None


@pytest.mark.week
async def test_a_consumer_can_measure_all_but_the_backlog(database_url: str) -> None:
    execute(database_url, "UPDATE outbox.upkeep SET succeeded_at = now()")
    async with measuring(database_url, scope=CONSUMER) as consumer:
        measured, *_ = await consumer.wait_for(DatabaseMeasured)
    overview = measured.overview
    assert found_by(measured) == set()
    assert [it.side for it in overview.dead_letters] == ["inbox"]
    assert overview.outbox is None


async def test_a_pooler_in_transaction_mode_may_be_in_between(pooled: Pooled) -> None:
    url = pooled(
        "transaction", default_pool_size=1, ignore_startup_parameters="options"
    )
    async with measuring(url) as first, measuring(url) as second:
        await first.wait_for(DatabaseMeasured)
        await second.wait_for(DatabaseMeasured)
        measured, *_ = await first.wait_for(DatabaseMeasured, count=2)
    assert measured.overview.missing == ()
    # The measurement left no state in the session for its next client.
    assert execute(url, "SHOW search_path") == [('"$user", public',)]
    assert execute(url, "SELECT name FROM pg_prepared_statements") == []


@pytest.mark.parametrize(
    ("scope", "side", "origin"),
    [(RELAY, "outbox", "relay:main"), (CONSUMER, "inbox", "consumer:billing")],
)
async def test_pending_dead_letters_are_counted_by_origin(
    database_url: str, scope: Scope, side: Schema, origin: str
) -> None:
    letters = [Message("t", b"") for _ in range(3)]
    give_up(database_url, *letters[:2], schema=side, age=timedelta(minutes=1))
    give_up(database_url, letters[2], schema=side, reason="never")
    give_up(database_url, Message("t", b""), schema=side, origin="another")
    execute(
        database_url,
        f"UPDATE {side}.dead_letter SET status = 'SUCCEEDED'"
        f" WHERE message_id = '{letters[0].id}'",
    )
    registry = CollectorRegistry()
    metrics = DatabaseMetrics(registry)

    async with measuring(database_url, scope=scope) as events:
        measured, *_ = await events.wait_for(DatabaseMeasured)
    metrics(measured)

    about = {"database": measured.overview.database, "schema": side, "origin": origin}
    assert registry.get_sample_value("dead_letter_total", about) == 2
    age = registry.get_sample_value("dead_letter_age_seconds", about)
    assert age is not None
    assert age >= 60
    about["origin"] = "another"
    assert registry.get_sample_value("dead_letter_total", about) == 1


async def test_an_unknown_database_is_reported() -> None:
    events = RecordedEvents()

    def unknown() -> str:
        raise ConfigError("the engine of sessions is not known")

    measure = DatabaseMeasure(unknown, CONSUMER, seconds=60, notify=events)
    task = asyncio.create_task(measure.run())
    failed, *_ = await events.wait_for(DatabaseNotMeasured)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert "is not known" in failed.reason


@pytest.mark.week
async def test_a_failed_measurement_leaves_the_time_of_the_last_one_and_is_repeated(
    database_url: str,
) -> None:
    insert(database_url, Message("orders", b""))
    registry = CollectorRegistry()
    metrics = DatabaseMetrics(registry)
    at = "pillarbox_database_measured_timestamp_seconds"
    assert registry.get_sample_value(at, {"database": ""}) == 0

    async with measuring(database_url) as events:
        measured, *_ = await events.wait_for(DatabaseMeasured)
        metrics(measured)
        database = {"database": measured.overview.database}
        assert registry.get_sample_value(BACKLOG, database) == 1
        finding = {**database, "check": "upkeep", "severity": "warning"}
        assert registry.get_sample_value("pillarbox_findings", finding) == 1

        execute(database_url, "ALTER TABLE outbox.message RENAME TO hidden")
        failed, *_ = await events.wait_for(DatabaseNotMeasured)
        assert "no table outbox.message" in failed.reason
        metrics(failed)
        assert registry.get_sample_value(BACKLOG, database) is None
        assert registry.get_sample_value("pillarbox_findings", finding) is None
        last = measured.overview.at.timestamp()
        assert registry.get_sample_value(at, database) == last

        execute(database_url, "ALTER TABLE outbox.hidden RENAME TO message")
        times = len(events.of(DatabaseMeasured))
        await events.wait_for(DatabaseMeasured, times + 1)
