"""The backlog: order by position, and waiting keys."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from inbox.consuming.backlog import Backlog


class Item(NamedTuple):
    place: int
    key: str | None


@dataclass(eq=False)
class Entry:
    key: str | None
    place: int = 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def take_all(backlog: Backlog[Item]) -> list[int]:
    return [item.place for item in backlog.take(100)]


def test_items_are_taken_in_order_of_position_regardless_of_when_they_were_added() -> (
    None
):
    backlog: Backlog[Item] = Backlog()
    for place in (3, 1, 2):
        backlog.add(Item(place, "a"))
    assert len(backlog) == 3
    assert take_all(backlog) == [1, 2, 3]
    assert not backlog.ready


def test_a_waiting_key_holds_back_its_current_and_later_messages() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    for item in (Item(2, "a"), Item(3, "b")):
        backlog.add(item)
    backlog.defer(Item(1, "a"), 5)
    backlog.add(Item(4, "a"))
    assert take_all(backlog) == [3]
    assert backlog.seconds_until_due() == 5
    assert len(backlog) == 3
    clock.now += 5
    assert take_all(backlog) == [1, 2, 4]
    assert backlog.seconds_until_due() is None


@pytest.mark.parametrize("waits", [(5, 1), (1, 5)])
def test_a_key_waits_once_for_its_longest_wait(waits: tuple[int, int]) -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    for place, wait in enumerate(waits, 1):
        backlog.defer(Item(place, "a"), wait)
    clock.now += 4
    assert take_all(backlog) == []
    clock.now += 1
    assert take_all(backlog) == [1, 2]


def test_messages_without_a_key_wait_individually() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    backlog.defer(Item(1, None), 5)
    backlog.add(Item(2, None))
    assert take_all(backlog) == [2]
    clock.now += 5
    assert take_all(backlog) == [1]


def test_nothing_is_left_after_clear() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    backlog.defer(Item(1, "a"), 5)
    backlog.add(Item(2, "b"))
    backlog.clear()
    clock.now += 5
    assert take_all(backlog) == []


def test_no_more_than_the_limit_is_received() -> None:
    backlog: Backlog[Item] = Backlog()
    for place in range(5):
        backlog.add(Item(place, None))
    assert [len(backlog.take(3)) for _ in range(3)] == [3, 2, 0]


def test_items_at_the_same_position_are_taken_in_the_order_added() -> None:
    clock = Clock()
    backlog: Backlog[Entry] = Backlog(clock)
    first, second, third = Entry("a"), Entry("b"), Entry(None)
    for entry in (second, first, third):
        backlog.defer(entry, 5)
    clock.now += 5
    assert backlog.take(3) == [second, first, third]


def test_waiting_messages_are_listed_with_those_they_hold_back() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    for item in (Item(2, "a"), Item(3, "b"), Item(4, None)):
        backlog.add(item)
    backlog.defer(Item(1, "a"), 5)
    backlog.add(Item(5, "a"))
    backlog.defer(Item(6, None), 2)
    clock.now += 1
    assert {item.place: left for item, left in backlog.waiting()} == {
        1: 4,
        2: 4,
        5: 4,
        6: 1,
    }
    clock.now += 4
    assert backlog.waiting() == []
