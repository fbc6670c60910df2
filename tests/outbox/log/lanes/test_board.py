"""The board: the turns of the lanes, and the state of each lane."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from pillarbox.outbox.lane import PRIORITIES, Priority, lanes_of, priority_of
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.lane import Lane
from tests.fixtures.claimed import HeldLease


class Board(LaneBoard):
    """A board that holds the newly leased lanes of some priority classes."""

    def __init__(self, *priorities: Priority, concurrency: int = 2) -> None:
        numbers = [n for p in priorities or PRIORITIES for n in lanes_of(p)]
        self.lease = HeldLease(numbers)
        super().__init__(self.lease, concurrency)
        self.take(numbers)

    def pick_share(self) -> Sequence[Lane]:
        """Pick a share of the lanes, as under load rather than after a wake-up."""
        picked = self.pick()
        if len(picked) == len(self.numbers()):
            self.put_back(picked)
            picked = self.pick()
        return picked

    def run_idle(self) -> None:
        picked = self.pick()
        Lane.found_empty(picked)
        self.put_back(picked)


def numbers(lanes: Sequence[Lane]) -> list[int]:
    return [lane.number for lane in lanes]


def test_after_a_wake_up_all_lanes_are_checked_in_order_of_priority() -> None:
    assert numbers(Board().pick()) == list(range(48))


def test_a_lane_is_in_flight_at_most_once() -> None:
    board = Board(concurrency=3)
    first = board.pick_share()
    second = board.pick_share()

    assert not set(numbers(first)) & set(numbers(second))
    board.wake()
    third = board.pick()
    assert not set(numbers(third)) & set(numbers([*first, *second]))
    assert len({*numbers(first), *numbers(second), *numbers(third)}) == 48
    assert board.pick() == []


def test_priority_classes_get_turns_by_weight() -> None:
    board = Board()
    turns: Counter[Priority] = Counter()

    for _ in range(1000):
        picked = board.pick_share()
        turns[priority_of(picked[0].number)] += 1
        board.put_back(picked)

    assert turns == {
        Priority.REALTIME: 600,
        Priority.DEFAULT: 300,
        Priority.BULK: 100,
    }


def test_lanes_of_one_priority_class_take_turns() -> None:
    board = Board(Priority.DEFAULT, concurrency=4)
    seen: list[int] = []

    for _ in range(4):
        picked = board.pick_share()
        seen += numbers(picked)
        board.served(picked)
        board.put_back(picked)

    assert sorted(seen[-16:]) == list(lanes_of(Priority.DEFAULT))


def test_a_wake_up_during_a_claim_is_not_lost() -> None:
    board = Board(Priority.DEFAULT)
    board.run_idle()
    assert board.pick() == []
    board.wake()
    picked = board.pick()
    for lane in picked:
        lane.needs_refresh = False

    board.wake(refresh=True)
    Lane.found_empty(picked)
    board.put_back(picked)

    assert len(again := board.pick()) == 16
    assert all(lane.needs_refresh for lane in again)


def test_a_lane_not_reached_by_a_full_claim_keeps_its_turn() -> None:
    board = Board(Priority.DEFAULT, concurrency=1)
    picked = board.pick_share()

    board.served(picked[:2])
    board.put_back(picked)

    assert numbers(board.pick()) == [*range(18, 32), 16, 17]


def test_a_lane_that_is_leased_again_is_another_which_starts_from_scratch() -> None:
    board = Board(Priority.DEFAULT)
    picked = board.pick()
    old, *others = picked
    old.needs_refresh = False
    old.keys.block("k")
    assert board.owns(picked)

    board.lose([old.number])
    assert not board.owns(picked)
    board.take([old.number])
    assert not board.owns(picked)
    assert board.owns(others)
    new = board.find(old.number)
    assert new is not None
    assert (new.progress, new.needs_refresh) == (None, True)
    assert new.keys.blocked == set()

    # Putting the old one back doesn't release the new one.
    assert [*board.pick()] == [new]
    board.put_back(picked)
    assert board.lease.in_use == {old.number}


def test_lanes_in_flight_are_not_released() -> None:
    board = Board(Priority.DEFAULT)
    picked = board.pick()
    assert board.lease.in_use == set(numbers(picked))

    board.put_back(picked[:3])

    assert board.lease.in_use == set(numbers(picked[3:]))


def test_a_lane_about_to_be_released_is_not_picked() -> None:
    board = Board(Priority.DEFAULT)
    board.lease.giving_back = {16, 17}

    assert numbers(board.pick()) == list(range(18, 32))


def test_a_recheck_reads_all_idle_lanes_in_one_claim() -> None:
    board = Board(concurrency=4)
    board.run_idle()
    for lane in board.numbers()[-16:]:
        board.find(lane).wake()  # type: ignore[union-attr]
    flying = board.pick()
    assert {priority_of(lane.number) for lane in flying} == {Priority.BULK}

    board.recheck_idle()

    assert numbers(board.pick()) == list(range(32))
    assert {priority_of(lane.number) for lane in board.pick()} == {Priority.BULK}


def test_a_board_is_busy_if_claims_find_messages_without_a_pause() -> None:
    board, other = Board(), Board()
    for _ in range(20):
        board.note_claim(1, is_cut=False)
        other.note_claim(1, is_cut=False)
        other.run_idle()
        other.wake()

    assert board.is_busy
    assert not other.is_busy


def test_a_board_is_no_longer_busy_once_it_is_idle() -> None:
    board = Board()
    board.note_claim(100, is_cut=True)
    board.run_idle()
    assert not board.is_busy


def test_a_board_is_busy_if_a_claim_leaves_messages() -> None:
    board = Board()
    board.note_claim(100, is_cut=True)
    assert board.is_busy


async def test_only_one_of_two_workers_gets_lanes_that_both_wait_for() -> None:
    board = Board(Priority.DEFAULT)
    board.run_idle()
    waiting = [asyncio.create_task(pick_next(board)) for _ in range(2)]
    await asyncio.wait(waiting, timeout=0)

    board.wake()
    done, (other,) = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
    board.run_idle()
    board.put_back([lane for task in done for lane in task.result()])
    board.wake()

    assert [len(task.result()) for task in done] == [16]
    assert len(await other) == 16


async def pick_next(board: Board) -> Sequence[Lane]:
    await board.work()
    return board.pick()


async def test_work_and_idle_return_once_their_state_is_reached() -> None:
    board = Board(Priority.DEFAULT)
    working, drying = (asyncio.create_task(wait()) for wait in (board.work, board.idle))
    await working
    picked = board.pick()
    assert not drying.done()
    Lane.found_empty(picked)

    board.put_back(picked)

    await drying
    working = asyncio.create_task(board.work())
    board.wake()
    await working
