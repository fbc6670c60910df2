"""Waiting messages: many blocked keys, many due messages, and successive relays."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

import pillarbox.outbox.log.claim
from pillarbox import Message, uuid7
from pillarbox.outbox.lane import Priority, lane_of
from pillarbox.outbox.log.lanes.keys import (
    Draining,
    KeyEnd,
    LaneKeys,
    LogOfKey,
    WaitingClaim,
    WaitingMessage,
)
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.events import BatchSettled, MessageDeadLettered
from pillarbox.relay.publisher import Acked, Nacked
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import (
    LONG,
    PATIENT,
    dead_letters,
    defer,
    insert,
    make_due,
    numbered,
    running,
    unsettled,
)
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

PERSISTENT = RetryPolicy(
    max_attempts=1000,
    first_delay=timedelta(milliseconds=1),
    max_delay=timedelta(milliseconds=20),
)
KEYS = 60
NOT_IN_THE_LOG = (
    "SELECT count(*) FROM outbox.message m"
    " WHERE NOT EXISTS (SELECT FROM outbox.deferral d WHERE d.id = m.id)"
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def fill_with_blocked_keys(url: str, behind: int = 2) -> None:
    """Insert refused heads that wait for an hour, with messages behind them."""
    execute(
        url,
        """
        INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
        SELECT outbox.uuid7(), outbox.lane_of('b' || n, outbox.uuid7(), 'default'),
               'b' || n || '/' || i, 'b' || n, 'text/plain', ''
          FROM generate_series(0, %s) AS i, generate_series(1, %s) AS n
        """,
        (behind, KEYS),
    )
    defer(url, "b%/0")


async def wait_until_a_retry_is_settled(events: RecordedEvents) -> None:
    settled = 0
    while not any(event.retried for event in events.of(BatchSettled)):
        settled = len(await events.wait_for(BatchSettled, settled + 1))


@pytest.fixture(params=[10_000, 48], ids=["at once", "entry by entry"])
def portions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the log of a lane at once, or one entry with each claim."""
    monkeypatch.setattr(pillarbox.outbox.log.claim, "_MOST_ENTRIES", request.param)


@pytest.mark.usefixtures("portions")
async def test_relays_that_stop_while_they_read_the_log_keep_the_order_of_keys(
    database_url: str,
) -> None:
    chance = random.Random(7)
    keys = [f"k{n}" for n in range(30)]
    publishers = [
        ScriptedPublisher(
            lambda _: Nacked("no") if chance.random() < 0.3 else Acked(),
        )
        for _ in range(4)
    ]
    last = ScriptedPublisher()

    for turn, publisher in enumerate(publishers):
        insert(
            database_url,
            *[
                Message(f"{key}/{n}", b"", key=key)
                for n in (2 * turn, 2 * turn + 1)
                for key in keys
            ],
        )
        async with running(database_url, publisher, batch_size=10, retry=PERSISTENT):
            await publisher.until_acked(20)
    async with running(database_url, last, batch_size=10):
        await last.until_acked(240 - sum(len(it.acked) for it in publishers))

    for key in keys:
        topics = [topic for it in (*publishers, last) for topic in it.of_key(key)]
        assert topics == [f"{key}/{n}" for n in range(8)]


def is_held(url: str) -> bool:
    """Return whether the log says that a message waits behind another of its key."""
    return bool(execute(url, "SELECT 1 FROM outbox.deferral WHERE cause = 'blocked'"))


async def test_a_key_is_held_although_its_entries_are_not_read_yet(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pillarbox.outbox.log.claim, "_MOST_ENTRIES", 48)
    fill_with_blocked_keys(database_url, behind=0)
    insert(database_url, Message("behind", b"", key=f"b{KEYS}"))
    insert(database_url, Message("other", b"", key="other"))
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, retry=PATIENT):
        await publisher.until_acked(1)
        await asyncio.to_thread(wait_for, "it is held", partial(is_held, database_url))
        make_due(database_url)
        await publisher.until_acked(KEYS + 2)

    assert publisher.topics()[0] == "other"
    assert publisher.of_key(f"b{KEYS}") == [f"b{KEYS}/0", "behind"]


async def test_many_keys_delay_no_other_while_blocked_or_all_due_at_once(
    database_url: str,
) -> None:
    fill_with_blocked_keys(database_url)
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, batch_size=4, retry=PATIENT):
        insert(database_url, Message("before", b"", key="other"), Message("bare", b""))
        await publisher.until_acked(2)
        publisher.open.clear()
        make_due(database_url)
        calls = len(publisher.calls)
        await publisher.until(lambda: len(publisher.calls) > calls)

        publisher.open.set()
        insert(database_url, Message("after", b"", key="other"))
        await publisher.until(lambda: "after" in publisher.topics())
        assert len(publisher.acked) < 3 * KEYS
        await publisher.until_acked(3 * KEYS + 3)

    for n in range(1, KEYS + 1):
        assert publisher.of_key(f"b{n}") == [f"b{n}/{i}" for i in range(3)]


async def test_an_unblocked_key_is_published_without_the_log(
    database_url: str,
) -> None:
    fill_with_blocked_keys(database_url)
    publisher = ScriptedPublisher()

    async with running(database_url, publisher, retry=PATIENT) as running_relay:
        # A message claimed after the head of its key was published is not in the log.
        await asyncio.to_thread(
            wait_for,
            "all messages in the log",
            lambda: execute(database_url, NOT_IN_THE_LOG) == [(0,)],
        )
        make_due(database_url)
        await publisher.until_acked(3 * KEYS)
        publisher.script = lambda message: (
            Nacked("no") if message.topic == "a/0" else Acked()
        )
        insert(database_url, *numbered("ab", 2))
        await wait_until_a_retry_is_settled(running_relay.events)
        await publisher.until_acked(3 * KEYS + 2)
        publisher.script = lambda message: Acked()
        make_due(database_url)
        await publisher.until_acked(3 * KEYS + 4)
        insert(
            database_url,
            *[Message(f"{key}/9", b"", key=key) for key in ("b1", "b2", "a")],
        )
        await publisher.until_acked(3 * KEYS + 7)

    assert publisher.of_key("a") == ["a/0", "a/1", "a/9"]
    # The messages added last are not in the log.
    assert execute(database_url, NOT_IN_THE_LOG) == [(5,)]


async def test_a_new_message_overtakes_none_that_did_not_fit_into_the_claim(
    database_url: str,
) -> None:
    insert(database_url, *[Message(f"k/{n}", bytes(1000), key="k") for n in range(4)])
    publisher = ScriptedPublisher(lambda message: Nacked("no"))

    async with running(
        database_url, publisher, retry=PATIENT, max_batch_bytes=3000, concurrency=1
    ) as running_relay:
        await asyncio.to_thread(
            wait_for,
            "all messages in the log",
            lambda: execute(database_url, NOT_IN_THE_LOG) == [(0,)],
        )
        publisher.script = lambda message: Acked()
        publisher.open.clear()
        insert(database_url, Message("other", b"", key="of another lane"))
        await publisher.until(lambda: publisher.calls[-1][0].topic == "other")
        insert(database_url, Message("k/4", b"", key="k"))
        make_due(database_url)
        lane = running_relay.relay._process.lanes.find(
            lane_of("k", uuid7(), Priority.DEFAULT)
        )
        assert lane is not None
        await asyncio.to_thread(wait_for, "k/0 is due", lambda: lane.keys.draining)
        publisher.open.set()
        await publisher.until_acked(6)

    assert publisher.of_key("k") == [f"k/{n}" for n in range(5)]


@pytest.mark.parametrize("step", ["_find_next_of_keys", "_load", "_claim_new"])
async def test_a_claim_that_fails_halfway_skips_no_message(
    step: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(pillarbox.outbox.log.claim._Claim, step)
    failures = iter([False, False, *[True] * 5])

    async def fail(*arguments: Any, **more: Any) -> Any:
        result = await original(*arguments, **more)
        if next(failures, False):
            raise psycopg.OperationalError("the connection was cut")
        return result

    fill_with_blocked_keys(database_url)
    urgent = [
        Message(f"u{key}/{n}", b"", key=f"u{key}", priority=Priority.REALTIME)
        for n in range(20)
        for key in range(5)
    ]
    publisher = ScriptedPublisher()
    monkeypatch.setattr(pillarbox.outbox.log.claim._Claim, step, fail)
    async with running(database_url, publisher, batch_size=40, retry=PATIENT):
        insert(database_url, *urgent)
        make_due(database_url)
        await publisher.until_acked(100 + 3 * KEYS)

    assert next(failures, None) is None, "it has failed as often as it was to"
    for key in range(5):
        assert publisher.of_key(f"u{key}") == [f"u{key}/{n}" for n in range(20)]
    for n in range(1, KEYS + 1):
        assert publisher.of_key(f"b{n}") == [f"b{n}/{i}" for i in range(3)]


async def test_a_waiting_message_is_dead_lettered_once_across_relays(
    database_url: str,
) -> None:
    insert(database_url, *numbered("k", 3))
    defer(database_url, "k/0", attempts=2, due_in=timedelta(0))
    publisher = ScriptedPublisher(
        lambda message: Nacked("no") if message.topic == "k/0" else Acked()
    )

    async with running(database_url, publisher) as relay:
        await relay.events.wait_for(MessageDeadLettered)
        await publisher.until_acked(2)
    async with running(database_url, publisher):
        insert(database_url, Message("k/3", b"", key="k"))
        await publisher.until_acked(3)

    assert publisher.of_key("k") == ["k/1", "k/2", "k/3"]
    assert dead_letters(database_url) == [("k/0", 3, "no")]
    assert unsettled(database_url) == 0


async def test_a_message_deleted_by_hand_does_not_block_its_key(
    database_url: str,
) -> None:
    insert(database_url, *numbered("k", 2))
    defer(database_url, "k/0", due_in=timedelta(0))
    execute(database_url, "DELETE FROM outbox.message WHERE topic = 'k/0'")
    publisher = ScriptedPublisher()

    async with running(database_url, publisher):
        await publisher.until_acked(1)
        insert(database_url, Message("k/2", b"", key="k"))
        await publisher.until_acked(2)

    assert publisher.topics() == ["k/1", "k/2"]
    ended = "SELECT count(*) FROM outbox.deferral WHERE cause = 'settled'"
    assert execute(database_url, f"{ended} AND outcome IS NULL") == [(1,)]


async def test_a_scheduled_message_waits_for_its_key_once_it_is_due(
    database_url: str,
) -> None:
    publisher = ScriptedPublisher(lambda message: Nacked("no"))
    insert(
        database_url,
        Message("scheduled", b"", key="k", available_at=datetime.now(UTC) + LONG),
        Message("head", b"", key="k"),
    )
    async with running(database_url, publisher, retry=PATIENT) as relay:
        await wait_until_a_retry_is_settled(relay.events)
        execute(
            database_url,
            "INSERT INTO outbox.deferral"
            " (created_at, due_at, seq, id, lane, cause, key)"
            " SELECT created_at, now(), seq, id, lane, 'scheduled', key"
            "  FROM outbox.message WHERE topic = 'scheduled'",
        )
        publisher.script = lambda message: Acked()
        insert(database_url, Message("other", b"", key="j"))
        await publisher.until_acked(1)
        await asyncio.to_thread(wait_for, "it is held", partial(is_held, database_url))
        assert publisher.topics() == ["other"]
        make_due(database_url)
        await publisher.until_acked(3)

    # In the order in which they were added, once both are due.
    assert publisher.of_key("k") == ["scheduled", "head"]


def place(id: UUID | None = None, **changes: Any) -> WaitingMessage:
    return WaitingMessage(
        **{
            "lane": 16,
            "seq": 1,
            "id": id or uuid7(),
            "created_at": NOW,
            "run": 0,
            "attempts": 0,
            "entry": 1,
            "cause": "refused",
            "key": "k",
            **changes,
        }
    )


def test_a_blocked_key_takes_little_memory_however_long_it_is() -> None:
    keys = LaneKeys()
    long = [f"{n}{'x' * 2000}" for n in range(3)]
    for key in long:
        keys.block(key)

    assert all(map(keys.is_blocked, long))
    assert not keys.is_blocked(f"3{'x' * 2000}")
    assert max(map(len, keys.blocked)) < 64
    keys.drain(long[0])
    assert list(keys.draining) == long[:1]


def test_only_a_due_head_lets_its_key_drain() -> None:
    keys = LaneKeys()
    keys.block("k")
    keys.block("j")
    scheduled = place(cause="scheduled", key="j")

    keys.release(scheduled)
    keys.release(place())

    assert list(keys.draining) == ["k"]
    assert keys.blocked == {"k", "j"}
    assert keys.due == {scheduled.id: scheduled}


def test_an_older_message_held_while_its_key_drains_is_still_read() -> None:
    keys = LaneKeys()
    keys.block("k")
    keys.drain("k")
    keys.begin_claim()
    draining = Draining(16, "k", [place(seq=7)], KeyEnd.MORE)
    keys.claimed(16, WaitingClaim.of([16], [], [draining], ()))
    assert keys.draining == {"k": 7}

    keys.hold("k", 3)

    assert keys.draining == {"k": 2}


def test_a_scan_during_which_a_message_was_refused_is_repeated() -> None:
    keys = LaneKeys()
    began = keys.scan()
    keys.expect(NOW)

    keys.scanned(began, (NOW + LONG, 5), is_cut=False)

    assert keys.due_up_to <= (NOW, -1)
    # A cut one continues after the last message that it found.
    keys.scanned(keys.scan(), (NOW, 5), is_cut=True)
    assert keys.due_up_to == (NOW, 5)
    assert keys.more_is_due


@pytest.mark.parametrize(
    ("log", "blocked", "draining"),
    [
        (LogOfKey("k", True, False, 3, NOW, NOW), {"k"}, []),
        (LogOfKey("k", False, False, 3, None, NOW), {"k"}, ["k"]),
        (LogOfKey("k", False, True, None, None, None), set(), []),
        (LogOfKey(None, False, False, 3, NOW, NOW), set(), []),
    ],
    ids=["head", "no head", "nothing waits", "scheduled"],
)
def test_a_relay_that_takes_over_reads_the_blocked_keys_from_the_log(
    log: LogOfKey, blocked: set[str], draining: list[str]
) -> None:
    keys = LaneKeys()

    keys.read(log)

    assert keys.blocked == blocked
    assert list(keys.draining) == draining


def test_a_log_that_is_read_in_portions_counts_as_of_the_first_snapshot() -> None:
    keys = LaneKeys()

    keys.portion_read(10, assigned=25)
    assert (keys.is_partly_read, keys.read_up_to) == (True, 10)
    keys.portion_read(20, assigned=35)
    assert (keys.is_partly_read, keys.read_up_to) == (True, 20)
    keys.portion_read(40, assigned=45)
    assert keys.is_partly_read
    keys.portion_read(None, assigned=55)

    # An entry from 26 on may have been committed after the first snapshot.
    assert (keys.is_partly_read, keys.read_up_to) == (False, 25)

    # If the sequence was set back, the log is read from its beginning.
    keys.portion_read(30, assigned=60)
    keys.restart_log()
    assert (keys.is_partly_read, keys.read_up_to) == (False, -1)


def test_a_key_that_was_held_before_its_entries_were_read_drains_in_the_end() -> None:
    keys = LaneKeys()
    keys.read(LogOfKey("k", False, True, None, None, None))
    keys.portion_read(1, assigned=2)
    keys.found_waiting("k")
    keys.hold("k", 9)

    keys.read(LogOfKey("k", False, False, 3, None, NOW))
    assert not keys.draining
    keys.portion_read(None, assigned=2)

    assert list(keys.draining) == ["k"]


BLOCKED = place(cause="blocked")
HEAD = place(seq=2, due_at=NOW + LONG, now=NOW)
DUE_HEAD = HEAD._replace(due_at=NOW)
BEHIND = place(cause="blocked", seq=3)


@pytest.mark.parametrize(
    ("waiting", "following", "end"),
    [
        ([], [], KeyEnd.NOTHING),
        ([BLOCKED, BEHIND], [BLOCKED, BEHIND], KeyEnd.NOTHING),
        ([BLOCKED, HEAD, BEHIND], [BLOCKED], KeyEnd.HEAD),
        ([BLOCKED, DUE_HEAD, BEHIND], [BLOCKED, DUE_HEAD], KeyEnd.MORE),
        ([DUE_HEAD], [DUE_HEAD], KeyEnd.NOTHING),
    ],
    ids=["nothing", "no head", "a head that waits", "one that is due", "the last one"],
)
def test_a_key_drains_up_to_its_head(
    waiting: list[WaitingMessage],
    following: list[WaitingMessage],
    end: KeyEnd,
) -> None:
    read = Draining.read(16, "k", waiting, is_cut=False)
    assert read == Draining(16, "k", following, end)


def test_a_key_is_unblocked_once_a_claim_contains_all_its_waiting_messages() -> None:
    keys = LaneKeys()
    keys.block("k")
    keys.drain("k")
    keys.begin_claim()
    draining = Draining(16, "k", [BLOCKED, BEHIND], KeyEnd.NOTHING)
    claim = WaitingClaim.of([16], [], [draining], ())

    keys.claimed(16, claim.cut(1))
    assert keys.blocked == {"k"}
    assert keys.draining == {"k": BLOCKED.seq}

    keys.claimed(16, claim.cut(2))
    assert not keys.blocked
    assert not keys.size
