"""Entries are kept until their outcome is written, and lost ones aren't delivered."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import timedelta

import pytest

from pillarbox import Message
from pillarbox.inbox.consuming.backlog import READ_AHEAD
from pillarbox.inbox.consuming.keeper import Held, Keeper, Outcome
from tests.fixtures.waiting import answer_after

SOON = timedelta(milliseconds=10)
NEVER = timedelta(hours=1)


def entry(number: int, key: str | None = None) -> Held:
    return Held(message=Message("t", b""), at=number, place=number, key=key)


class Broker:
    """Records the calls of a keeper, and makes them wait or lose entries."""

    def __init__(self) -> None:
        self.keeper: Keeper[Held] = Keeper(self.write, self.extend, pause=lambda: 0.001)
        self.written: list[tuple[object, float | None]] = []
        self.is_writing, self.beaten = asyncio.Event(), asyncio.Event()
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.has_crossed = False
        self.lost: list[Held] = []

    async def write(self, outcomes: Sequence[Outcome[Held]]) -> None:
        self.is_writing.set()
        await self.accepts.wait()
        self.is_writing.clear()
        self.written += [(each.at, delay) for each, delay in outcomes]

    async def extend(self, entries: Sequence[Held]) -> Iterable[Held]:
        self.has_crossed |= self.is_writing.is_set()
        self.beaten.set()
        return self.lost

    async def beat(self) -> None:
        """Wait for a heartbeat that begins now, and for its effect."""
        self.beaten.clear()
        await self.beaten.wait()
        self.beaten.clear()
        await self.beaten.wait()


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    broker = Broker()
    broker.keeper.start()
    yield broker
    await broker.keeper.end()


async def test_no_heartbeat_is_sent_while_outcomes_are_written(broker: Broker) -> None:
    one, other = entry(1), entry(2)
    broker.keeper.hold([one, other])
    broker.accepts.clear()
    broker.keeper.handed_back(one, SOON)
    await broker.is_writing.wait()
    await answer_after(0.05)  # many heartbeats
    broker.accepts.set()
    await broker.beat()
    assert not broker.has_crossed
    assert broker.written == [(1, SOON.total_seconds())]
    assert list(broker.keeper.held.values()) == [other]


async def test_a_lost_entry_and_later_ones_of_its_key_are_not_delivered(
    broker: Broker,
) -> None:
    keeper = broker.keeper
    entries = [entry(1, "k"), entry(2, "k"), entry(3, "other"), entry(4, "k")]
    keeper.hold(entries)
    assert keeper.take(2) == entries[:2]
    broker.lost = entries[1:2]
    await broker.beat()
    keeper.nacked(entries[0], None)
    keeper.nacked(entries[1], None)
    keeper.handed_back(entries[1], SOON)
    assert keeper.take(9) == [entries[0], entries[2]]
    again = entry(2, "k")
    keeper.hold([again])
    assert keeper.take(9) == [again]
    assert not broker.written


async def test_losing_all_that_was_read_ahead_holds_up_nothing(broker: Broker) -> None:
    keeper = broker.keeper
    lost = [entry(number, str(number)) for number in range(READ_AHEAD)]
    keeper.hold(lost)
    keeper.nacked(keeper.take(1)[0], NEVER)
    broker.lost = lost
    began = time.monotonic()
    await keeper.beat()
    assert time.monotonic() - began < 1
    assert (len(keeper.held), len(keeper.backlog)) == (0, 0)
    again = entry(0, "0")
    broker.lost = []
    keeper.hold([again])
    assert keeper.take(9) == [again]


async def test_only_what_is_not_delivered_yet_is_released(broker: Broker) -> None:
    keeper = broker.keeper
    entries = [entry(number, "k") for number in range(4)]
    keeper.hold(entries)
    assert keeper.take(1) == entries[:1]
    await keeper.release(lambda it: it.place != 3)
    assert broker.written == [(1, 0.0), (2, 0.0)]
    assert list(keeper.held.values()) == [entries[0], entries[3]]
    assert keeper.take(9) == entries[3:]


async def test_what_is_left_is_returned_in_order_with_what_is_left_of_its_delay(
    broker: Broker,
) -> None:
    keeper = broker.keeper
    first, second, acked, waits = (entry(n) for n in range(4))
    keeper.hold([waits, acked, second, first])
    keeper.nacked(waits, NEVER)
    keeper.acked(acked)
    returned: dict[Held, float] = {}

    async def give_back(entries: dict[Held, float]) -> None:
        returned.update(entries)

    await keeper.leave(60, give_back)
    assert list(returned) == [first, second, waits]
    assert returned[first] == 0 < returned[waits] <= NEVER.total_seconds()
    assert broker.written == [(2, None)]


async def test_losing_all_that_was_read_ahead_takes_no_time() -> None:
    broker = Broker()
    broker.lost = [entry(number, f"k{number % 5000}") for number in range(10_000)]
    broker.keeper.hold(broker.lost)
    began = time.process_time()
    await broker.keeper.beat()
    assert time.process_time() - began < 0.3
    assert not broker.keeper.held
