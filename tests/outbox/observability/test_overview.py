"""The overview of messages, processes and partitions, read from the database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, timedelta

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.administration.doctor import examine_quickly
from pillarbox.outbox.cli.output import to_json
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.overview import Overview, read_overview
from pillarbox.outbox.web.overview import backlog_text
from tests.acceptance.relays import as_role
from tests.fixtures.dead_letters import give_up
from tests.fixtures.positions import defer, publish
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute


@pytest.fixture
def monitor(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(
        as_role(database_url, "pillarbox_monitor"), autocommit=True
    ) as connection:
        yield connection


def test_the_backlog_consists_of_messages_that_are_not_settled(
    database_url: str, monitor: psycopg.Connection
) -> None:
    insert(
        database_url,
        Message("orders", b"", key="1", tenant="acme"),
        Message("orders", b"", key="2", priority=Priority.BULK),
        Message("mails", b"", key="3"),
        Message("mails", b"", key="published"),
        Message("mails", b"", key="later"),
    )
    publish(database_url, "key = 'published'")
    defer(database_url, "scheduled", "key = 'later'")
    with psycopg.connect(database_url) as slow:
        slow.execute("SELECT outbox.add('late', '{}', key => 'published')")
        insert(database_url, Message("overtakes", b"", key="published"))
        publish(database_url, "topic = 'overtakes'")

    backlog = read_overview(monitor, Scope(parts=["backlogs"])).outbox

    assert backlog is not None
    assert (backlog.messages, backlog.ready, backlog.scheduled) == (5, 4, 1)
    assert (backlog.is_complete, backlog.estimated) == (True, 5)
    assert backlog.waited is not None
    groups = (backlog.priorities, backlog.topics, backlog.tenants)
    counts = [{it.name: it.messages for it in group} for group in groups]
    assert counts == [
        {"default": 4, "bulk": 1},
        {"mails": 2, "orders": 2, "late": 1},
        {None: 4, "acme": 1},
    ]


def test_beyond_their_limits_numbers_are_estimated_or_said_to_be_incomplete(
    database_url: str, monitor: psycopg.Connection
) -> None:
    insert(database_url, *(Message("orders", b"", key="k") for _ in range(40)))
    add_consumer(database_url, "billing", "orders")
    give_up(database_url, *(Message("orders", b"") for _ in range(3)))

    overview = read_overview(
        monitor,
        Scope(parts=["backlogs", "consumers", "dead_letters"], per_lane=10, rows=2),
    )

    backlog = overview.outbox
    assert backlog is not None
    assert (backlog.is_complete, backlog.messages) == (False, 11)
    assert backlog.estimated is not None
    assert 35 <= backlog.estimated <= 45
    (billing,) = overview.consumers
    assert billing.lag is not None
    assert (billing.lag.is_complete, billing.lag.messages) == (False, 11)
    assert backlog_text(billing.lag).startswith("about ")
    letters, _ = overview.dead_letters
    assert (letters.pending, letters.is_complete) == (2, False)


def test_an_overview_is_json_with_times_in_utc_whatever_the_time_zone_of_the_session(
    monitor: psycopg.Connection,
) -> None:
    monitor.execute("SET timezone = 'Europe/Berlin'")

    overview = read_overview(monitor)

    assert overview.at.tzinfo is UTC
    days = [table.oldest for table in overview.tables or () if table.oldest]
    assert days
    assert {day.utcoffset() for day in days} == {timedelta(0)}
    assert json.loads(json.dumps(asdict(overview), default=to_json))["missing"] == []


def test_a_missing_part_is_named_and_does_not_fail_the_others(
    database_url: str, monitor: psycopg.Connection
) -> None:
    execute(database_url, "DROP SCHEMA inbox CASCADE")

    overview = read_overview(monitor)

    assert missing_parts(overview) == {
        "processes",
        "consumers",
        "dead_letters",
        "jobs",
        "tables",
    }
    assert overview.outbox is not None
    assert [it.side for it in overview.dead_letters] == ["outbox"]


def missing_parts(overview: Overview) -> set[str]:
    return {it.check for it in overview.missing}


def test_the_lag_of_a_consumer_is_what_it_has_not_settled(
    database_url: str, monitor: psycopg.Connection
) -> None:
    add_consumer(database_url, "billing", "orders")
    add_consumer(database_url, "idle", "mails")
    execute(
        database_url,
        "INSERT INTO outbox.message (created_at, id, lane, topic, content_type,"
        " payload) SELECT now() - interval '2 minutes', outbox.uuid7(), n, 'orders',"
        " 'text/plain', '' FROM generate_series(0, 4) AS n",
    )

    overview, findings = examine_quickly(monitor)

    billing, idle = overview.consumers
    assert (billing.name, billing.replicas) == ("billing", 0)
    assert billing.lag is not None
    assert (billing.lag.messages, billing.lag.ready) == (5, 5)
    assert [(it.name, it.messages) for it in billing.lag.topics] == [("orders", 5)]
    assert idle.lag is not None
    assert idle.lag.messages == 0
    assert any(
        "the consumer billing is not running" in finding.finding for finding in findings
    )


@pytest.mark.week
def test_a_refused_message_is_listed_with_its_key_and_dead_letters_by_reason(
    database_url: str, monitor: psycopg.Connection
) -> None:
    insert(database_url, Message("orders", b"", key="7"), Message("orders", b""))
    defer(database_url, "refused", "key = '7'", attempts=2, reason="no such exchange")
    for reason, hours in (("down", 0), ("down", 25), ("bad", 0)):
        age = timedelta(hours=hours)
        give_up(database_url, Message("orders", b""), reason=reason, age=age)

    overview = read_overview(monitor)

    assert overview.outbox is not None
    assert (overview.outbox.refused, overview.outbox.ready) == (1, 1)
    assert overview.blocked is not None
    assert overview.blocked.keys == 1
    (message,) = overview.blocked.oldest
    assert (message.key, message.attempts) == ("7", 2)
    assert message.last_error == "no such exchange"
    letters, _ = overview.dead_letters
    assert (letters.pending, letters.new, letters.is_complete) == (3, 2, True)
    by_reason = [(it.reason, it.pending) for it in letters.reasons]
    assert by_reason == [("down", 2), ("bad", 1)]


@pytest.mark.week
def test_a_message_of_an_idle_lane_is_found_however_old_it_is(
    database_url: str, monitor: psycopg.Connection
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) SELECT outbox.uuid7(), now() - interval '4 days', 40, 'orders',"
        " 'text/plain', ''",
    )

    backlog = read_overview(monitor, Scope(parts=["backlogs"])).outbox

    assert backlog is not None
    assert backlog.messages == 1
    assert backlog.waited is not None
    assert backlog.waited > timedelta(days=3)


def test_status_says_which_days_a_consumer_holds_that_is_down_without_a_relay(
    unread_database_url: str, monitor: psycopg.Connection
) -> None:
    add_consumer(unread_database_url, "billing", "orders")
    execute(
        unread_database_url,
        "INSERT INTO outbox.message (created_at, id, lane, topic, content_type,"
        " payload) SELECT now() - n * interval '24 hours', outbox.uuid7(), 0,"
        " 'orders', 'text/plain', '' FROM generate_series(0, 1) AS n",
    )

    overview, findings = examine_quickly(monitor)

    (billing,) = overview.consumers
    assert billing.held is not None
    assert (billing.held.days, billing.replicas) == (2, 0)
    (found,) = (it for it in findings if it.check == "backlog")
    yesterday = f"{overview.at - timedelta(days=1):%F}"
    assert f"keeps 2 days from being dropped, since {yesterday}, " in found.finding
    assert "pillarbox readers drop billing" in found.remedy
