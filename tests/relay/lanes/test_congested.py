"""Lanes with more blocked keys than a claim carries."""

import random
from datetime import timedelta
from itertools import count
from typing import Any

import psycopg
import pytest

import relay.claim
import relay.lanes.congested
from outbox import Message, Priority
from outbox.retry import RetryPolicy
from outbox.testing.events import RecordedEvents
from relay.events import BatchSettled
from relay.publisher import Acked, Confirmation, Nacked
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import execute, insert, numbered, running, unsettled

LONG = timedelta(hours=1)
PATIENT = RetryPolicy(max_attempts=8, first_delay=LONG, max_delay=LONG)
PERSISTENT = RetryPolicy(
    max_attempts=1000,
    first_delay=timedelta(milliseconds=1),
    max_delay=timedelta(milliseconds=20),
)
MAKE_DUE = "UPDATE outbox.message SET available_at = now() WHERE attempts > 0"
MAKE_READY = "UPDATE outbox.message SET available_at = NULL WHERE topic = %s"
KEYS = 300
READY_HEADS = """
    SELECT count(*) FROM outbox.message
     WHERE attempts > 0 AND available_at IS NULL AND published_at IS NULL
"""


@pytest.fixture
def few_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims see a small part of a lane at a time."""
    monkeypatch.setattr(relay.lanes.congested, "_MOST_EXAMINED", 7)


def fill_with_blocked_keys(url: str, behind: int = 2) -> None:
    """Refused heads that wait for an hour, with messages behind them."""
    execute(
        url,
        """
        INSERT INTO outbox.message (id, lane, topic, key, content_type, payload,
                                    attempts, available_at)
        SELECT outbox.uuid7(), outbox.lane_of('b' || n, outbox.uuid7(), 'default'),
               'b' || n || '/' || i, 'b' || n, 'text/plain', '',
               CASE WHEN i = 0 THEN 1 ELSE 0 END,
               CASE WHEN i = 0 THEN now() + interval '1 hour' END
          FROM generate_series(0, %s) AS i, generate_series(1, %s) AS n
        """,
        (behind, KEYS),
    )


async def until_a_retry_is_written(events: RecordedEvents) -> None:
    settled = 0
    while not any(event.retried for event in events.of(BatchSettled)):
        settled = len(await events.wait_for(BatchSettled, settled + 1))


@pytest.mark.usefixtures("few_examined")
@pytest.mark.parametrize("most", [0, 3])
async def test_each_key_stays_in_order_whatever_the_broker_refuses(
    database_url: str, most: int
) -> None:
    chance = random.Random(most)
    publisher = ScriptedPublisher(
        lambda message: Nacked("no") if chance.random() < 0.3 else Acked()
    )
    keys = [f"k{n}" for n in range(60)]
    insert(database_url, *numbered(keys, 6))

    async with running(
        database_url,
        publisher,
        batch_size=20,
        max_blocked_keys=most,
        retry=PERSISTENT,
    ):
        await publisher.until_acked(100)
        insert(
            database_url,
            *[Message(f"{key}/{n}", b"", key=key) for n in (6, 7) for key in keys],
        )
        await publisher.until_acked(480)

    assert unsettled(database_url) == 0
    assert len(publisher.acked) == 480
    for key in keys:
        assert publisher.of_key(key) == [f"{key}/{n}" for n in range(8)]


@pytest.mark.usefixtures("few_examined")
async def test_two_relays_in_turn_keep_the_order_of_many_blocked_keys(
    database_url: str,
) -> None:
    answers = count()

    def every_third(message: Message) -> Confirmation:
        return Nacked("no") if next(answers) % 3 == 0 else Acked()

    insert(database_url, *numbered([f"k{n}" for n in range(40)], 5))
    first, second = ScriptedPublisher(every_third), ScriptedPublisher()

    async with running(
        database_url, first, batch_size=20, max_blocked_keys=1, retry=PERSISTENT
    ):
        await first.until_acked(80)
    async with running(database_url, second, batch_size=20, max_blocked_keys=1):
        await second.until_acked(200 - len(first.acked))

    published = [*first.topics(), *second.topics()]
    assert len(published) == len(set(published)) == 200
    for n in range(40):
        topics = [*first.of_key(f"k{n}"), *second.of_key(f"k{n}")]
        assert topics == [f"k{n}/{i}" for i in range(5)]


@pytest.mark.usefixtures("few_examined")
async def test_many_blocked_keys_delay_no_other_key(database_url: str) -> None:
    fill_with_blocked_keys(database_url)
    others = numbered("abcdefgh", 3)
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, max_blocked_keys=2, retry=PATIENT):
        insert(database_url, *others, Message("without a key", b""))
        await publisher.until_acked(25)

    assert sorted(publisher.topics()) == sorted(
        [*(message.topic for message in others), "without a key"]
    )


@pytest.mark.usefixtures("few_examined")
async def test_keys_that_are_due_all_at_once_are_made_ready_a_batch_at_a_time(
    database_url: str,
) -> None:
    fill_with_blocked_keys(database_url)
    publisher = ScriptedPublisher()

    async with running(
        database_url, publisher, batch_size=4, max_blocked_keys=2, retry=PATIENT
    ):
        insert(database_url, Message("before", b"", key="other"))
        await publisher.until_acked(1)
        publisher.open.clear()
        execute(database_url, MAKE_DUE)
        calls = len(publisher.calls)
        await publisher.until(lambda: len(publisher.calls) > calls)
        ((ready,),) = execute(database_url, READY_HEADS)
        assert 0 < ready <= 16 * 4

        publisher.open.set()
        insert(database_url, Message("after", b"", key="other"))
        await publisher.until(lambda: "after" in publisher.topics())
        assert len(publisher.acked) < 3 * KEYS
        await publisher.until_acked(3 * KEYS + 2)

    for n in range(1, KEYS + 1):
        assert publisher.of_key(f"b{n}") == [f"b{n}/{i}" for i in range(3)]


@pytest.mark.usefixtures("few_examined")
async def test_rows_made_ready_by_hand_in_a_congested_lane_are_found(
    database_url: str,
) -> None:
    fill_with_blocked_keys(database_url)
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, max_blocked_keys=2, retry=PATIENT):
        insert(database_url, *numbered("abcdefgh", 1))
        await publisher.until_acked(8)
        execute(database_url, MAKE_READY, ("b7/0",))
        await publisher.until_acked(11)

    assert publisher.of_key("b7") == ["b7/0", "b7/1", "b7/2"]


async def test_a_lane_is_no_longer_congested_when_its_keys_are_free(
    database_url: str,
) -> None:
    fill_with_blocked_keys(database_url)
    publisher = ScriptedPublisher()

    async with running(
        database_url, publisher, max_blocked_keys=2, retry=PATIENT
    ) as running_relay:
        execute(database_url, MAKE_DUE)
        await publisher.until_acked(3 * KEYS)
        publisher.script = lambda message: (
            Nacked("no") if message.topic == "a/0" else Acked()
        )
        insert(database_url, *numbered("ab", 2))
        await until_a_retry_is_written(running_relay.events)
        await publisher.until_acked(3 * KEYS + 2)
        execute(database_url, MAKE_DUE)
        publisher.script = lambda message: Acked()
        await publisher.until_acked(3 * KEYS + 4)

    assert publisher.of_key("a") == ["a/0", "a/1"]


async def test_a_claim_that_fails_half_way_passes_nothing_by(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = relay.lanes.congested.look_into
    failures = iter([False, False, *[True] * 5])

    async def fail(*arguments: Any, **more: Any) -> Any:
        if next(failures, False):
            raise psycopg.OperationalError("the connection was cut")
        return await look(*arguments, **more)

    fill_with_blocked_keys(database_url)
    # Lanes of another class are not congested, and are claimed from before the others.
    urgent = [
        Message(f"u{key}/{n}", b"", key=f"u{key}", priority=Priority.REALTIME)
        for n in range(20)
        for key in range(5)
    ]
    publisher = ScriptedPublisher()
    monkeypatch.setattr(relay.claim, "look_into", fail)
    async with running(
        database_url, publisher, batch_size=20, max_blocked_keys=2, retry=PATIENT
    ):
        insert(database_url, *urgent)
        await publisher.until_acked(100)

    for key in range(5):
        assert publisher.of_key(f"u{key}") == [f"u{key}/{n}" for n in range(20)]
