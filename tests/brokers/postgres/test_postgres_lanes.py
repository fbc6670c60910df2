"""A replica's state of its lanes: held deliveries, those ahead, waiting keys."""

from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

import pytest

from inbox.sources.postgres.lanes import (
    ClaimedDelivery,
    DeliveryLane,
    DeliveryLanes,
)
from outbox.log.lane import Extent
from outbox.log.position import Position, Snapshot
from outbox.log.progress import Day, Progress
from outbox.log.view import ReadView
from pillarbox import Message

AT = datetime(2026, 1, 1, tzinfo=UTC)
DAY = Day(AT, datetime(2026, 1, 2, tzinfo=UTC))
ALL = frozenset(range(16))
ID = UUID(int=0)
QUIET = ReadView(Snapshot(100, 100), 100, 0, 1)
"""No transaction is open."""


def row(
    seq: int, lane: int = 1, key: str | None = None, *, logged: bool = False
) -> ClaimedDelivery:
    message = Message("t", b"", key=key, id=ID)
    return ClaimedDelivery(lane, seq, AT, 0, message, None, logged)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Used(set[int]):
    """The lanes that are reported to be in use."""


@pytest.fixture
def used() -> Used:
    return Used()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lanes(used: Used, clock: Clock) -> DeliveryLanes:
    """Lanes 1 to 3, taken over with no deliveries left."""
    lanes = DeliveryLanes(used.add, used.discard, clock)
    lanes.take([1, 2, 3])
    for number in (1, 2, 3):
        take_over(lanes, number)
    return lanes


def take_over(lanes: DeliveryLanes, number: int) -> None:
    found(lanes, number).continue_with(
        Progress.take_over({DAY: Position()}, [], QUIET.snapshot, 100, {})
    )


def found(lanes: DeliveryLanes, number: int = 1) -> DeliveryLane:
    lane = lanes.find(number)
    assert lane is not None
    return lane


def hold(
    lanes: DeliveryLanes, rows: Sequence[ClaimedDelivery], *, full: bool = False
) -> None:
    """Let a claim of all lanes find these rows."""
    for lane in lanes.in_turn(ALL):
        own = [each for each in rows if each.lane == lane.number]
        last = max((each.seq for each in own), default=-1)
        lanes.claimed(lane, own, Extent(last, QUIET, full))


def claim(
    lanes: DeliveryLanes, *rows: ClaimedDelivery, full: bool = False
) -> list[ClaimedDelivery]:
    hold(lanes, rows, full=full)
    return lanes.hand_out(100, ALL)


def test_a_claim_skips_what_is_ahead_until_it_has_passed_it(
    lanes: DeliveryLanes,
) -> None:
    lanes.claimed_ahead([row(7), row(9)])
    (given, other) = lanes.hand_out(100, ALL)
    lane = found(lanes)
    assert sorted(lane.ahead) == [(7, AT), (9, AT)]
    assert claim(lanes, row(5), full=True) == [row(5)]
    assert len(lane.ahead) == 2
    assert claim(lanes, row(8)) == [row(8)]
    assert lane.ahead == {(9, AT)}
    # It is handed out, and was not logged: no position may cover it yet.
    assert lane.window is not None
    assert given.place in lane.window
    assert other.place not in lane.window


def test_what_ended_ahead_is_not_held_when_a_claim_passes_it(
    lanes: DeliveryLanes,
) -> None:
    lanes.claimed_ahead([row(7)])
    (given,) = lanes.hand_out(100, ALL)
    lanes.let_go(given)
    lanes.logged([given])
    claim(lanes, row(8))
    lane = found(lanes)
    assert lane.window is not None
    assert given.place not in lane.window


def test_deliveries_are_opened_if_many_have_ended_behind_them(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    hold(lanes, [row(seq) for seq in range(300)])
    rows = lanes.hand_out(300, ALL)
    lane = found(lanes)
    assert lane.window is not None
    for each in rows[2:257]:
        lane.window.ended(each.place)
        lanes.let_go(each)
    assert lanes.to_open(lane, clock.now - 1) == []
    assert lanes.to_open(lane, clock.now) == rows[:2]
    lane.window.ended(rows[257].place)
    assert lanes.to_open(lane, clock.now - 1) == [rows[0]]


def test_a_doubted_lane_is_taken_over_again_and_keeps_unwritten_nacks(
    lanes: DeliveryLanes,
) -> None:
    first, second = claim(lanes, row(5, key="a"), row(6, key="b"))
    lanes.block(first)
    lanes.claimed_ahead([row(9)])
    lanes.doubt()
    assert sorted(lanes.new) == [1, 2, 3]
    assert lanes.hand_out(100, ALL) == []
    take_over(lanes, 1)
    # Both are still in hand, and what follows the nacked one waits.
    assert claim(lanes, row(5, key="a"), row(6, key="b"), row(7, key="a")) == []
    lane = found(lanes)
    assert lane.window is not None
    assert second.place in lane.window


def test_a_lane_is_in_use_while_one_of_its_deliveries_is_held(
    lanes: DeliveryLanes, used: Used
) -> None:
    first, second = claim(lanes, row(5), row(6))
    lanes.let_go(first)
    lanes.let_go(first)
    assert used == {1}
    lanes.let_go(second)
    assert used == set()


def drain(lanes: DeliveryLanes, clock: Clock, *rows: ClaimedDelivery | None) -> None:
    """Claim the waiting deliveries of freed keys."""
    keys, _ = lanes.freed(ALL, 10, 10)
    lanes.claimed_waiting(
        keys, rows, since=clock.now, held=set(lanes.held), max_rows_each=3
    )


def refuse(lanes: DeliveryLanes, given: ClaimedDelivery, due: float) -> None:
    lanes.block(given)
    lanes.let_go(given)
    lanes.wait(given.lane, given.place, given.message.key, due)


def seqs(rows: Sequence[ClaimedDelivery]) -> list[int]:
    return [row.seq for row in rows]


def test_later_deliveries_of_a_blocked_key_wait_behind_it(
    lanes: DeliveryLanes, used: Used
) -> None:
    rows = [row(5, key="a"), row(6, key="a"), row(7, key="b")]
    hold(lanes, rows)
    (head,) = lanes.hand_out(1, ALL)
    lanes.block(head)
    assert list(found(lanes).keys) == ["a"]
    assert seqs(lanes.hand_out(100, ALL)) == [7]
    assert claim(lanes, row(8, key="a"), row(9, key="b")) == [row(9, key="b")]
    # The delivery that they wait for gets an entry, too, if it has none.
    behind, ahead = lanes.to_log(10)
    assert (seqs(behind), seqs(ahead)) == ([6, 8], [5])
    lanes.let_go(head)
    lanes.wait(1, head.place, "a", 2000.0)
    behind, ahead = lanes.to_log(1)
    assert (seqs(behind), ahead) == ([6], [])
    lanes.logged(behind)
    behind, _ = lanes.to_log(10)
    assert seqs(behind) == [8]
    lanes.logged(behind)
    assert not lanes.has_behind
    assert used == {1}


def test_a_due_key_drains_in_order_before_newly_claimed_deliveries(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (head,) = claim(lanes, row(5, key="a"))
    refuse(lanes, head, clock.now + 10)
    assert lanes.next_due == clock.now + 10
    claim(lanes, row(6, key="a"))
    assert lanes.freed(ALL, 10, 10) == ([], {})
    clock.now += 11
    ((freed,), _) = lanes.freed(ALL, 10, 10)
    assert freed == (1, "a", 4)
    drain(
        lanes,
        clock,
        *(row(seq, key="a", logged=True) for seq in (5, 6, 7)),
    )
    # The log could have more of this key.
    assert list(found(lanes).keys) == ["a"]
    assert seqs(claim(lanes, row(9, key="a"))) == [5, 6, 7]
    drain(lanes, clock, row(8, key="a", logged=True), row(9, key="a", logged=True))
    assert found(lanes).keys == {}
    assert seqs(claim(lanes, row(10, key="a"))) == [8, 9, 10]


def test_a_key_refused_again_while_it_drains_waits_again(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (head,) = claim(lanes, row(5, key="a"))
    refuse(lanes, head, clock.now)
    drain(lanes, clock, *(row(seq, key="a", logged=True) for seq in (5, 6)))
    (again,) = lanes.hand_out(1, ALL)
    refuse(lanes, again, clock.now + 10)
    assert lanes.hand_out(1, ALL) == []
    assert not lanes.has_behind, "the log has it"
    clock.now += 11
    ((freed,), _) = lanes.freed(ALL, 10, 10)
    assert freed == (1, "a", 4)


def test_a_key_is_due_when_the_last_of_its_refused_deliveries_is(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    for seq, due in ((5, 10), (6, 20)):
        lanes.wait(1, (seq, AT), "a", clock.now + due)
    lanes.wait(9, (7, AT), "not ours", clock.now)
    clock.now += 11
    assert lanes.freed(ALL, 10, 10) == ([], {})
    clock.now += 11
    assert lanes.freed(ALL, 10, 10) == ([(1, "a", 4)], {})


def test_a_key_that_is_not_in_the_log_yet_is_not_due(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (head,) = claim(lanes, row(5, key="a"))
    lanes.block(head)
    clock.now += 1e9
    assert lanes.freed(ALL, 10, 10) == ([], {})


def test_a_delivery_without_a_key_waits_alone(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (given,) = claim(lanes, row(5))
    refuse(lanes, given, clock.now + 10)
    assert lanes.freed(ALL, 10, 10) == ([], {})
    clock.now += 11
    assert lanes.freed(ALL, 10, 10) == ([], {(5, AT): 1})
    assert lanes.freed(ALL, 10, 10) == ([], {})


def test_a_returned_delivery_comes_again_before_the_rest_of_its_key(
    lanes: DeliveryLanes,
) -> None:
    rows = [row(5, key="a"), row(6, key="a"), row(7, key="b"), row(8, key="a")]
    hold(lanes, rows)
    first, second = lanes.hand_out(2, ALL)
    lanes.give_back(first)
    lanes.give_back(second)
    assert seqs(lanes.hand_out(100, ALL)) == [5, 6, 7, 8]


def test_nothing_is_delivered_from_a_lane_that_is_being_released(
    lanes: DeliveryLanes, used: Used
) -> None:
    hold(lanes, [row(5), row(6, lane=2)])
    assert lanes.hand_out(100, frozenset({2})) == [row(6, lane=2)]
    assert used == {2}
    # If it stays, it is taken over again.
    assert found(lanes).window is None
    take_over(lanes, 1)
    assert claim(lanes, row(5)) == [row(5)]


def test_a_lost_lane_is_forgotten_but_its_deliveries_stay_held(
    lanes: DeliveryLanes, used: Used
) -> None:
    (given,) = claim(lanes, row(5))
    lanes.lose([1])
    assert lanes.hand_out(100, ALL) == []
    lanes.take([1])
    take_over(lanes, 1)
    assert claim(lanes, row(5)) == []
    lanes.let_go(given)
    assert used == set()
