"""Of two relays that believe to own a lane, one settles, and a doubt is resolved."""

import asyncio
from datetime import UTC, datetime

import psycopg
import pytest

import pillarbox.relay.worker
from pillarbox import Message
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.gather import end
from pillarbox.outbox.log.settle import store_settlement
from pillarbox.outbox.postgres.connection import Connection, Link, Server, connect
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.events import (
    BatchSettled,
    DatabaseRecovered,
    LeaseTaken,
    MessageDeadLettered,
)
from pillarbox.relay.oversized import OversizedRows
from pillarbox.relay.publisher import Acked, Nacked
from tests.fixtures.claimed import claimed
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    LONG,
    PATIENT,
    dead_letters,
    end_sessions,
    insert,
    mark_published,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.relay.test_claim import board_of_all_lanes, claim

CONFIG = RelayConfig()
REPLACE = """
    UPDATE outbox.message
       SET id = outbox.uuid7(), created_at = created_at + interval '1 microsecond',
           topic = 'new ' || topic
"""
"""As after a failover without the end of the log: others have their numbers and ids."""
OVERTAKE = """
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane,
                                 reader, snapshot)
    SELECT created_at, ends_at, number + 1, up_to, 0, lane, reader, snapshot
      FROM outbox.position WHERE messages > 0
"""
LOST = """
    DELETE FROM outbox.deferral;
    DELETE FROM outbox.position WHERE messages > 0;
"""


@pytest.mark.parametrize("has_committed", [False, True])
async def test_a_connection_lost_during_a_settlement_repeats_nothing(
    has_committed: bool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([True])

    async def cut(
        connection: Connection, *arguments: object, **options: object
    ) -> dict[int, datetime]:
        fails = next(failures, False)
        if fails and not has_committed:
            raise psycopg.OperationalError("the connection was cut")
        due = await store_settlement(connection, *arguments, **options)  # type: ignore[arg-type]
        if fails:
            raise psycopg.OperationalError("the connection was cut")
        return due

    monkeypatch.setattr(pillarbox.relay.worker, "store_settlement", cut)
    insert(database_url, *(Message(f"k/{n}", b"", key="k") for n in range(3)))
    publisher = ScriptedPublisher()
    async with running(database_url, publisher):
        await publisher.until_acked(3)
        insert(database_url, Message("last", b"", key="k"))
        await publisher.until_acked(4)

    assert publisher.topics() == ["k/0", "k/1", "k/2", "last"]
    assert unsettled(database_url) == 0
    assert execute(database_url, "SELECT sum(messages) FROM outbox.position") == [(4,)]


async def test_what_a_crash_of_the_server_unsettled_is_published_again(
    database_url: str,
) -> None:
    insert(database_url, Message("refused", b"", key="k"))
    publisher = ScriptedPublisher(lambda message: Nacked("no"))
    async with running(
        database_url, publisher, retry=PATIENT, sweep_interval=LONG
    ) as running_relay:
        await running_relay.events.wait_for(BatchSettled)
        execute(database_url, LOST)
        # That the lease has ended, too, would be noticed later.
        end_sessions(database_url, "worker")
        publisher.script = lambda message: Acked()
        insert(database_url, Message("next", b"", key="of another lane"))
        await publisher.until_acked(2)

    assert set(publisher.topics()) == {"refused", "next"}
    assert unsettled(database_url) == 0


@pytest.mark.parametrize(
    "answer", [Acked(), Nacked("no"), Nacked("never", permanent=True)]
)
async def test_a_batch_is_not_settled_where_others_have_its_numbers_and_transactions(
    answer: Acked | Nacked, database_url: str
) -> None:
    publisher = ScriptedPublisher(
        lambda message: Acked() if message.topic.startswith("new") else answer
    )
    publisher.open.clear()
    insert(database_url, *(Message("lost", b"", key=key) for key in "abc"))
    async with running(database_url, publisher, retry=PATIENT, sweep_interval=LONG):
        await publisher.until(lambda: bool(publisher.calls))
        for part in ("worker", "shared"):
            end_sessions(database_url, part)
        execute(database_url, REPLACE)
        publisher.open.set()
        await publisher.until(lambda: publisher.topics().count("new lost") == 3)

    assert unsettled(database_url) == 0
    assert dead_letters(database_url) == []
    assert execute(database_url, "SELECT 1 FROM outbox.deferral") == []


@pytest.mark.parametrize("in_database", [False, True])
async def test_acks_that_may_be_lost_with_the_settlement_do_not_count_after_a_crash(
    in_database: bool, database_url: str
) -> None:
    publisher = ScriptedPublisher()
    if in_database:
        publisher.in_database = True  # type: ignore[attr-defined]
    publisher.open.clear()
    insert(database_url, *numbered("k", 3))
    async with running(database_url, publisher, sweep_interval=LONG) as relay:
        await publisher.until(lambda: bool(publisher.calls))
        for part in ("worker", "shared"):
            end_sessions(database_url, part)
        publisher.open.set()
        await relay.events.wait_for(BatchSettled)

    repeated = 2 if in_database else 1
    assert publisher.topics() == ["k/0", "k/1", "k/2"] * repeated
    assert unsettled(database_url) == 0


async def test_a_large_message_that_a_failover_has_lost_leaves_nothing(
    database_url: str,
) -> None:
    events = RecordedEvents()
    link = Link(database_url, application_name="test")
    rows = OversizedRows(link, reader="main", notify=events)
    rows.add([claimed("lost", problem="payload is over 9 bytes")])
    task = asyncio.create_task(rows.run())
    await events.wait_for(MessageDeadLettered)
    await end([task])

    assert execute(database_url, "SELECT 1 FROM outbox.deferral") == []
    assert dead_letters(database_url) == []


async def test_a_lane_is_taken_over_although_a_lost_session_has_found_nothing_for_it(
    database_url: str,
) -> None:
    """Such a claim advances a position in memory only."""
    with administration(database_url, application_name="test") as connection:
        add_reader(connection, "some", ["new *"], broker="redis://b")
    publisher = ScriptedPublisher()
    async with running(
        database_url, publisher, reader="some", broker="redis://b", sweep_interval=LONG
    ) as relay:
        await relay.events.wait_for(LeaseTaken, count=3)
        insert(database_url, Message("lost", b"", key="k"))
        ((number,),) = execute(database_url, "SELECT lane FROM outbox.message")
        lane = relay.relay._process.lanes.find(number)
        assert lane is not None
        await asyncio.to_thread(wait_for, "the claim", lambda: lane.skipped)
        for part in ("worker", "shared"):
            end_sessions(database_url, part)
        execute(database_url, REPLACE)
        insert(database_url, Message("new last", b"", key="k"))
        await publisher.until_acked(2)

    assert publisher.topics() == ["new lost", "new last"]


async def test_a_reader_that_a_failover_has_lost_begins_where_it_is_added_again(
    database_url: str,
) -> None:
    with administration(database_url, application_name="test") as connection:
        insert(database_url, Message("a", b"", key="k"), Message("b", b"", key="k"))
        add_reader(connection, "some", ["a"], broker="redis://b")
    publisher = ScriptedPublisher()
    async with running(
        database_url, publisher, reader="some", broker="redis://b", sweep_interval=LONG
    ) as relay:
        await relay.events.wait_for(LeaseTaken, count=3)
        execute(
            database_url,
            "UPDATE outbox.subscription SET since = '1:1:', since_seq = -1, topic = 'b'"
            " WHERE reader = 'some'",
        )
        for part in ("worker", "shared", "lease"):
            end_sessions(database_url, part)
        await publisher.until_acked(1)

    assert publisher.topics() == ["b"]


async def test_the_fence_moves_to_today_when_its_day_has_passed(
    database_url: str,
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) SELECT outbox.uuid7(), starts_at, 16, 'old', 'c', ''"
        "  FROM outbox.partitions('outbox.message')"
        " WHERE ends_at < now() - interval '3 hours' ORDER BY 2 LIMIT 1",
    )
    mark_published(database_url, "old")
    board = board_of_all_lanes()
    lane = board.find(16)
    assert lane is not None
    read = []
    async with await connect(database_url, application_name="test") as connection:
        for _ in range(3):
            board.wake(refresh=True)
            assert (await claim(connection, board)).rows == []
            assert lane.progress is not None
            read.append([day for day, _ in lane.progress.days])

    assert execute(
        database_url,
        "SELECT number, ends_at < now(), messages FROM outbox.position"
        " ORDER BY number, created_at",
    ) == [(1, True, 1), (2, True, 0), (2, False, 0)]
    # From then on, claims don't read the old day.
    assert len(read[0]) > len(read[1]) == len(read[2])
    assert read[2][-1] == read[0][-1]


async def test_nothing_is_settled_in_a_session_of_a_server_that_was_replaced(
    database_url: str,
) -> None:
    """That server may hang."""
    server = Server()
    link = Link(database_url, application_name="test", server=server)
    async with link.use() as session:
        pass
    async with link.use(session):
        pass
    server.started_at = datetime.now(UTC)
    with pytest.raises(DatabaseUnavailableError, match="session was lost"):
        async with link.use(session):
            pass
    await link.close()


@pytest.mark.parametrize(
    ("meanwhile", "batches"),
    [(OVERTAKE, 2), ("DELETE FROM outbox.message WHERE topic = 'second'", 1)],
)
async def test_the_outage_of_a_settlement_ends_whatever_is_left_to_settle(
    meanwhile: str,
    batches: int,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts = iter([False, True])

    async def overtaken(
        connection: Connection, *arguments: object, **options: object
    ) -> dict[int, datetime]:
        if next(cuts, False):
            execute(database_url, meanwhile)
            raise psycopg.OperationalError("the connection was cut")
        return await store_settlement(connection, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pillarbox.relay.worker, "store_settlement", overtaken)
    async with running(database_url, ScriptedPublisher()) as running_relay:
        insert(database_url, Message("first", b"", key="k"))
        await running_relay.events.wait_for(BatchSettled)
        insert(database_url, Message("second", b"", key="k"))
        await running_relay.events.wait_for(DatabaseRecovered)
        await running_relay.events.wait_for(BatchSettled, count=batches)

    assert unsettled(database_url) == 0
