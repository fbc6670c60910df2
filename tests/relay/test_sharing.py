"""Several relays on one database, and several priority classes in one relay."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pillarbox import Message
from pillarbox.outbox.lane import LANES, PRIORITIES, Priority, priority_of
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.relay.events import BatchSettled, LeaseLost, LeaseTaken
from pillarbox.relay.publisher import Acked, Confirmation
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    QUICK,
    Running,
    end_sessions,
    insert,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute

HOUR = timedelta(hours=1)


def held(relay: Running) -> set[int]:
    lanes: set[int] = set()
    for event in relay.events.events:
        if isinstance(event, LeaseTaken):
            lanes.update(event.lanes)
        elif isinstance(event, LeaseLost):
            lanes.difference_update(event.lanes)
    return lanes


async def wait_until_held(relay: Running, count: int) -> set[int]:
    """Wait until a relay holds `count` lanes, and return them."""
    while len(lanes := held(relay)) != count:
        seen = len(relay.events.of(LeaseTaken)), len(relay.events.of(LeaseLost))
        if len(lanes) < count:
            await relay.events.wait_for(LeaseTaken, seen[0] + 1)
        else:
            await relay.events.wait_for(LeaseLost, seen[1] + 1)
    return lanes


async def test_a_relay_has_opened_its_sessions_before_it_takes_lanes(
    database_url: str,
) -> None:
    """One that is opened later makes claims read lanes from their beginning."""
    sessions = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name ~ '^pillarbox relay .* (worker|shared)$'"
    )
    async with running(database_url, ScriptedPublisher(), concurrency=3) as relay:
        assert execute(database_url, sessions) == [(4,)]
        assert not relay.events.of(LeaseTaken)


async def test_a_relay_that_starts_takes_each_lane_over_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its sessions are opened before, so that none makes claims start over."""
    times: Counter[int] = Counter()
    take_over = Lane.take_over

    def counted(lane: Lane, *args: Any, **kwargs: Any) -> None:
        times[lane.number] += 1
        take_over(lane, *args, **kwargs)

    monkeypatch.setattr(Lane, "take_over", counted)
    insert(database_url, *(Message("orders", b"", key=f"{n}") for n in range(200)))
    publisher = ScriptedPublisher()
    async with running(
        database_url, publisher, concurrency=1, batch_size=10, sweep_interval=HOUR
    ):
        await publisher.until_acked(200)
    assert set(times.values()) == {1}


async def test_relays_share_the_lanes_of_each_class_and_publish_each_message_once(
    database_url: str,
) -> None:
    broker = ScriptedPublisher()
    async with (
        running(database_url, broker, batch_size=20) as first,
        running(database_url, broker, batch_size=20) as second,
    ):
        ours, theirs = (
            await wait_until_held(first, 24),
            await wait_until_held(second, 24),
        )
        assert ours | theirs == set(range(LANES))
        for lanes in (ours, theirs):
            classes = Counter(map(priority_of, lanes))
            assert classes == dict.fromkeys(PRIORITIES, 8)

        insert(database_url, *numbered([f"k{n}" for n in range(50)], 20))
        await broker.until_acked(1000)

    for relay in (first, second):
        assert sum(e.published for e in relay.events.of(BatchSettled)) > 100
    assert len({message.id for message in broker.acked}) == len(broker.acked) == 1000
    for n in range(50):
        assert broker.of_key(f"k{n}") == [f"k{n}/{i}" for i in range(20)]
    assert unsettled(database_url) == 0


async def test_after_a_lost_lease_a_batch_calls_the_publisher_no_more(
    database_url: str,
) -> None:
    insert(database_url, *numbered("a", 2))
    broker = ScriptedPublisher()
    broker.open.clear()
    async with running(database_url, broker, strict_order=True) as relay:
        is_leased: dict[str, bool] = {}

        def ack(message: Message) -> Confirmation:
            is_leased.setdefault(message.topic, bool(held(relay)))
            return Acked()

        broker.script = ack
        await broker.until(lambda: bool(broker.calls))
        end_sessions(database_url, "lease")
        await wait_until_held(relay, 0)
        broker.open.set()
        await broker.until(lambda: "a/1" in is_leased)
    assert is_leased == {"a/0": False, "a/1": True}


def flood(url: str, priority: Priority, count: int) -> None:
    with psycopg.connect(conninfo(url)) as connection:
        connection.execute(
            "SELECT outbox.add('flood', '{}'::jsonb, priority => %s)"
            " FROM generate_series(1, %s)",
            (str(priority), count),
        )


async def test_a_flood_of_bulk_work_does_not_starve_the_rest(
    database_url: str,
) -> None:
    flood(database_url, Priority.BULK, 3000)
    publisher = ScriptedPublisher()
    # Without sweeps, so that only the turns of the priority classes matter.
    config = replace(QUICK, sweep_interval=HOUR, batch_size=10, concurrency=1)
    async with running(database_url, publisher, config):
        await publisher.until_acked(10)
        insert(database_url, *numbered("ab", 5))
        await publisher.until(lambda: len(publisher.of_key("b")) == 5)
        overtaken = len(publisher.acked)

    assert overtaken < 2500
    assert publisher.of_key("a") == [f"a/{n}" for n in range(5)]
