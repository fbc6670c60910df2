"""The backlog: order by position, and waiting keys."""

from collections import Counter

import pytest

from pillarbox import Message
from pillarbox.inbox.consuming.backlog import READ_AHEAD, Backlog
from pillarbox.inbox.source import Arrived
from pillarbox.outbox.lane import Priority

DEFAULT = Message("t", b"")


class Item(Arrived):
    def __init__(self, place: int, key: str | None, message: Message = DEFAULT) -> None:
        super().__init__(message=message, place=place, key=key)


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


def test_nothing_is_left_after_all_items_are_removed() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    backlog.defer(Item(1, "a"), 5)
    backlog.add(Item(2, "b"))
    backlog.remove(lambda _: True)
    clock.now += 5
    assert take_all(backlog) == []


def test_a_priority_that_is_left_out_waits_and_holds_up_no_other() -> None:
    backlog: Backlog[Item] = Backlog(Clock())
    backlog.add(Item(1, "a"))
    backlog.leave_out((), {Priority.DEFAULT})
    assert (take_all(backlog), backlog.ready, backlog.due) == ([], False, True)
    assert backlog.patience(1.0) < 1.0
    backlog.add(Item(2, "b", Message("t", b"", priority=Priority.REALTIME)))
    assert take_all(backlog) == [2]
    backlog.leave_out((), ())
    assert (take_all(backlog), backlog.patience(1.0)) == ([1], 1.0)


def test_no_more_than_the_limit_is_received() -> None:
    backlog: Backlog[Item] = Backlog()
    for place in range(5):
        backlog.add(Item(place, None))
    assert [len(backlog.take(3)) for _ in range(3)] == [3, 2, 0]


def test_items_at_the_same_position_are_taken_in_the_order_added() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    first, second, third = Item(1, "a"), Item(1, "b"), Item(1, None)
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


def of(priority: Priority, place: int = 1, key: str | None = None) -> Item:
    return Item(place, key, Message("t", b"", priority=priority))


def test_priorities_take_turns_and_the_most_urgent_comes_first() -> None:
    backlog: Backlog[Item] = Backlog()
    for priority in reversed(Priority):
        for place in range(20):
            backlog.add(of(priority, place))
    taken = [item for _ in range(20) for item in backlog.take(1)]
    assert taken[0].message.priority is Priority.REALTIME
    assert Counter(item.message.priority for item in taken) == {
        Priority.REALTIME: 12,
        Priority.DEFAULT: 6,
        Priority.BULK: 2,
    }
    for priority in Priority:
        places = [item.place for item in taken if item.message.priority is priority]
        assert places == list(range(len(places)))


def test_a_key_waits_whatever_the_priority() -> None:
    clock = Clock()
    backlog: Backlog[Item] = Backlog(clock)
    backlog.add(of(Priority.REALTIME, 2, "a"))
    backlog.defer(of(Priority.BULK, 1, "a"), 5)
    assert take_all(backlog) == []
    clock.now += 5
    assert take_all(backlog) == [2, 1]


def test_a_key_is_ready_once_the_items_that_wait_are_removed() -> None:
    backlog: Backlog[Item] = Backlog()
    # A key may be named like a priority.
    for key in ("default", "b"):
        for place in (5, 3, 4):
            backlog.add(Item(place, key))
        backlog.defer(Item(1, key), 60)
    backlog.remove(lambda item: item.key == "b" and item.place in {1, 3})
    assert sorted(item.place for item in backlog) == [1, 3, 4, 4, 5, 5]
    assert take_all(backlog) == [4, 5]
    assert [item.place for item, _ in backlog.waiting()] == [1, 3, 4, 5]


def test_there_is_room_to_read_ahead_until_there_are_many_or_large_messages() -> None:
    backlog: Backlog[Item] = Backlog()
    assert backlog.room == 0
    small = Item(1, None)
    for _ in range(READ_AHEAD - 1):
        backlog.add(small)
    assert backlog.room == 1
    backlog.defer(Item(2, None), 5)
    assert backlog.room == 0
    assert len(backlog.take(1)) == backlog.room == 1
    backlog.remove(lambda _: True)

    backlog = Backlog()
    large = Item(1, "a", Message("t", bytes(1024 * 1024)))
    backlog.add(large)
    assert backlog.room == 31
    for _ in range(31):
        backlog.add(large)
    assert backlog.room == 0
    backlog.defer(large, 5)
    backlog.remove(lambda item: item.place == 1)
    assert len(backlog) == 0
    assert backlog.room > 20


def test_large_messages_after_thousands_of_small_ones_are_soon_expected() -> None:
    backlog: Backlog[Item] = Backlog()
    for _ in range(100_000):
        backlog.add(Item(1, None, Message("t", b"small")))
        backlog.take(1)
    for _ in range(250):
        backlog.add(Item(1, None, Message("t", bytes(1024 * 1024))))
    backlog.take(249)
    assert backlog.room < 40
