"""If the server's clock jumps, nothing is forgotten silently."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final, TypeAlias

import psycopg
import pytest

from pillarbox import record_receipt, uuid7
from pillarbox.inbox.errors import MessageTooOldError
from pillarbox.inbox.receipt import ForeignId, record_receipts
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import UpkeepError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.brokers.postgres.test_outbox_source import check_histories
from tests.fixtures.consumers import sessions_of
from tests.fixtures.positions import count_holding
from tests.fixtures.postgres import FEW_DAYS, Template, new_database
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import running as relay_running
from tests.fixtures.server_clock import ServerClock, server_with_clock
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep

Ask: TypeAlias = Callable[[], list[dict[str, Any]]]

ADD: Final = "SELECT outbox.add('t', '{}'::jsonb)"
PARTITIONS: Final = "SELECT count(*) FROM outbox.partitions('inbox.receipt')"
REFUSED: Final = r"nothing is dropped.*pillarbox maintain --accept-clock"


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[PostgresServer, ServerClock]]:
    with server_with_clock() as both:
        yield both


@pytest.fixture(scope="module")
def migrated(running: tuple[PostgresServer, ServerClock]) -> Iterator[Template]:
    with ExitStack() as databases:
        yield Template(running[0], databases)


@pytest.fixture
def clock(running: tuple[PostgresServer, ServerClock]) -> Iterator[ServerClock]:
    """The server's clock, which is correct before and after each test."""
    yield running[1]
    running[1].jump(0)


@pytest.fixture
def url(
    running: tuple[PostgresServer, ServerClock], migrated: Template, clock: ServerClock
) -> Iterator[str]:
    """Return a migrated database whose upkeep has run."""
    server, _ = running
    with new_database(server, "clock", migrated) as name:
        url = server.database_url(name)
        run_upkeep(url)
        yield url


@pytest.fixture
def ask(url: str, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that asks the doctor about the upkeep."""

    def findings() -> list[dict[str, Any]]:
        capsys.readouterr()
        main(["doctor", "--json", "--database", url])
        found = json.loads(capsys.readouterr().out)["findings"]
        return [f for f in found if f["check"] == "upkeep"]

    return findings


def handle(url: str, message_id: Any) -> bool:
    with sessions_of(url) as sessions, sessions.begin() as session:
        return record_receipt(session, message_id, "billing")


def test_a_clock_that_jumps_ahead_drops_nothing_and_handles_nothing_twice(
    url: str, clock: ServerClock, ask: Ask
) -> None:
    record = (
        "SELECT succeeded_at, failed_at > succeeded_at, failure"
        " FROM outbox.upkeep LEFT JOIN outbox.upkeep_failure ON true"
    )
    ((succeeded_at, _, _),) = execute(url, record)
    message_id = uuid7()
    assert handle(url, message_id)
    before = execute(url, PARTITIONS)

    clock.jump(20)
    with pytest.raises(UpkeepError, match=REFUSED):
        run_upkeep(url)

    ((still, is_later, failure),) = execute(url, record)
    assert (still, is_later) == (succeeded_at, True)
    assert "nothing is dropped" in failure
    (found,) = ask()
    assert found["severity"] == "error"
    assert "the clock jumped ahead" in found["finding"]
    assert execute(url, PARTITIONS) >= before
    execute(url, ADD)
    clock.jump(0)
    assert not handle(url, message_id)
    run_upkeep(url)
    execute(url, ADD)
    assert ask() == []
    ((_, is_later, failure),) = execute(url, record)
    assert (is_later, failure) == (None, None)


def test_what_a_wrong_clock_dropped_is_too_old(url: str, clock: ServerClock) -> None:
    queue = (
        "INSERT INTO inbox.job (message_id, message_at, consumer, state, finished_at)"
        " SELECT id, inbox.moment_of(id), 'billing', 'success', now()"
        "  FROM (SELECT %s::uuid AS id) AS m"
    )
    handled = uuid7()
    assert handle(url, handled)
    execute(url, queue, [handled])
    clock.jump(30)
    assert main(["maintain", "--accept-clock", "--database", url]) == 0
    clock.jump(0)
    # There is no partition: today's was dropped.
    with pytest.raises(MessageTooOldError):
        handle(url, handled)

    with pytest.raises(UpkeepError, match="is behind now"):
        run_upkeep(url)

    with pytest.raises(MessageTooOldError, match="because a clock was ahead"):
        handle(url, handled)
    with (
        sessions_of(url) as sessions,
        sessions() as session,
        pytest.raises(MessageTooOldError, match="because a clock was ahead"),
    ):
        record_receipts(session, [handled], "billing")
    with pytest.raises(psycopg.errors.CheckViolation, match="not_forgotten_"):
        execute(url, queue, [handled])
    later = uuid7()
    assert handle(url, later)
    assert not handle(url, later)
    execute(url, queue, [later])
    execute(url, ADD)


def test_a_clock_set_back_stops_the_upkeep_until_it_is_accepted(
    url: str, clock: ServerClock, ask: Ask
) -> None:
    clock.jump(2)
    run_upkeep(url)
    clock.jump(0)
    with pytest.raises(UpkeepError, match=REFUSED):
        run_upkeep(url)
    (found,) = ask()
    assert "the clock was ahead then, or is behind now" in found["finding"]
    command, *options = found["remedy"].partition("  #")[0].split()[1:]

    assert main([command, *options, "--database", url]) == 0

    assert ask() == []
    run_upkeep(url)


def test_after_three_months_without_upkeep_rows_are_accepted_and_the_remedy_named(
    url: str, clock: ServerClock, ask: Ask
) -> None:
    execute(url, ADD)
    clock.jump(90)
    with pytest.raises(UpkeepError, match=REFUSED):
        run_upkeep(url)
    execute(url, ADD)
    days = "SELECT has_today, ahead FROM outbox.partition_health"
    assert set(execute(url, days)) == {(True, 1)}
    plan = "SELECT DISTINCT step FROM outbox.upkeep_plan() WHERE step <> 'hold'"
    assert execute(url, plan) == [("refuse",)]

    assert main(["maintain", "--accept-clock", "--database", url]) == 0

    assert set(execute(url, days)) == {(True, FEW_DAYS)}
    assert ask() == []
    # Nothing unsettled was dropped: a relay finds both messages when it starts.
    assert count_holding(url) == 2
    assert execute(url, f"{plan} AND step <> 'trim'") == []


async def test_a_relay_stopped_for_longer_than_the_retention_publishes_all(
    url: str, clock: ServerClock
) -> None:
    execute(url, ADD)
    for days in (10, 20):
        clock.jump(days)
        assert main(["maintain", "--accept-clock", "--database", url]) == 0
        execute(url, ADD)
    publisher = ScriptedPublisher()

    async with relay_running(url, publisher):
        ids = sorted(message.id for message in await publisher.until_acked(3))

    assert count_holding(url) == 0
    # The receipts of the first message's day were dropped after 14 days.
    with pytest.raises(MessageTooOldError):
        handle(url, ids[0])
    assert [handle(url, id) for id in ids[1:]] == [True, True]


def test_the_longest_pause_can_be_set(url: str, clock: ServerClock) -> None:
    execute(url, "UPDATE outbox.upkeep SET longest_pause = '100 days'")
    clock.jump(90)

    run_upkeep(url)

    clock.jump(0)
    with pytest.raises(psycopg.errors.CheckViolation):
        execute(url, "UPDATE outbox.upkeep SET longest_pause = '2 hours'")


def test_foreign_receipts_and_operations_outlive_a_clock_that_jumped(
    url: str, clock: ServerClock
) -> None:
    execute(url, "INSERT INTO inbox.foreign_receipt VALUES ('stripe', 'a', 'billing')")
    execute(
        url,
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
        " finished_at, state) VALUES ('retry', '{}', '', 'ann', 1, now(), 'done')",
    )
    clock.jump(100)
    for table in ("inbox.foreign_receipt", "outbox.operation"):
        trim = "SELECT outbox.trim_batch(%s)"
        assert execute(url, trim, [table]) == [(0,)], table


def test_receipts_of_foreign_ids_outlive_a_clock_that_was_behind(
    url: str, clock: ServerClock
) -> None:
    event = ForeignId("stripe", "evt_1")
    clock.jump(-20)
    assert handle(url, event)
    clock.jump(0)
    run_upkeep(url)

    assert not handle(url, event)


@pytest.mark.parametrize("days", [1, -1], ids=["ahead", "behind"])
async def test_a_consumer_judges_by_the_servers_clock_what_was_there_at_its_takeover(
    url: str, clock: ServerClock, days: int
) -> None:
    clock.jump(days)
    await check_histories(url)
