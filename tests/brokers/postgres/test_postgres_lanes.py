"""A replica's state of its lanes: floors, held deliveries, waiting keys."""

from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

import pytest

from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes, WaitingDelivery
from outbox import Message
from outbox.postgres.lane_cursor import Snapshot

AT = datetime(2026, 1, 1, tzinfo=UTC)
ALL = frozenset(range(16))
ID = UUID(int=0)
QUIET = Snapshot(100, 100)
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
    for lane in (1, 2, 3):
        lanes.start(lane, -1, ())
    return lanes


def claim(
    lanes: DeliveryLanes,
    *rows: ClaimedDelivery,
    full: bool = False,
    snapshot: Snapshot = QUIET,
) -> list[ClaimedDelivery]:
    floors = lanes.floors(ALL)
    lanes.claimed(rows, list(floors), snapshot, full=full)
    return lanes.hand_out(100, ALL)


def test_the_floor_follows_the_claimed_rows(lanes: DeliveryLanes) -> None:
    assert claim(lanes, row(5), row(7), row(3, lane=2)) == [
        row(5),
        row(7),
        row(3, lane=2),
    ]
    claim(lanes)
    assert lanes.floors(ALL) == {1: 7, 2: 3, 3: -1}


def test_the_floor_waits_for_transactions_that_were_open(
    lanes: DeliveryLanes,
) -> None:
    claim(lanes, row(5), snapshot=Snapshot(90, 100))
    claim(lanes, row(7), snapshot=Snapshot(99, 105))
    assert lanes.floors(ALL)[1] == -1
    claim(lanes, row(9), snapshot=Snapshot(100, 110))
    assert lanes.floors(ALL)[1] == 5
    claim(lanes, snapshot=Snapshot(110, 120))
    assert lanes.floors(ALL)[1] == 9


def test_a_backlogs_floor_rises_with_the_claim_that_reads_it(
    lanes: DeliveryLanes,
) -> None:
    lanes.claimed([row(5), row(7)], [1, 2, 3], QUIET, full=True, drawn=6)
    assert lanes.floors(ALL)[1] == 6


def test_a_full_claim_says_nothing_about_lanes_after_its_last_row(
    lanes: DeliveryLanes,
) -> None:
    rows = [row(9), row(8, lane=2)]
    lanes.claimed(rows, [1, 2, 3], QUIET, full=True, drawn=20)
    # Lane 1 was read to its end, lane 2 up to 8, lane 3 not at all.
    assert lanes.floors(ALL) == {3: -1, 1: 20, 2: 8}


def test_a_claim_skips_deliveries_already_claimed_above_its_floor(
    lanes: DeliveryLanes,
) -> None:
    (given, _) = claim(lanes, row(5), row(6), snapshot=Snapshot(90, 100))
    lanes.let_go(given)
    assert sorted(lanes.passed(lanes.floors(ALL))) == [5, 6]
    assert claim(lanes, row(7)) == [row(7)]
    assert claim(lanes, row(8)) == [row(8)]
    assert lanes.floors(ALL)[1] == 7
    assert lanes.passed(lanes.floors(ALL)) == [8]


def test_a_new_lane_starts_above_its_watermark(lanes: DeliveryLanes) -> None:
    lanes.take([4])
    assert lanes.new == [4]
    assert 4 not in lanes.floors(ALL)
    lanes.start(4, 10, [12])
    assert lanes.floors(ALL)[4] == 10
    assert lanes.passed([4]) == [12]


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
    lanes.refused(given, due)


def seqs(rows: Sequence[ClaimedDelivery]) -> list[int]:
    return [row.seq for row in rows]


def test_later_deliveries_of_a_blocked_key_wait_behind_it(
    lanes: DeliveryLanes, used: Used
) -> None:
    rows = [row(5, key="a"), row(6, key="a"), row(7, key="b")]
    lanes.claimed(rows, [1, 2, 3], QUIET, full=False)
    (head,) = lanes.hand_out(1, ALL)
    lanes.block(head)
    assert lanes.blocked == ["a"]
    assert seqs(lanes.hand_out(100, ALL)) == [7]
    assert claim(lanes, row(8, key="a"), row(9, key="b")) == [row(9, key="b")]
    # Not before the log has the delivery that they wait for.
    assert lanes.take_behind(10) == []
    lanes.let_go(head)
    lanes.refused(head, 2000.0)
    assert seqs(lanes.take_behind(10)) == [6, 8]
    assert lanes.take_behind(10) == []
    assert used == {1}


def test_a_due_key_drains_in_order_before_newly_claimed_deliveries(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (head,) = claim(lanes, row(5, key="a"))
    refuse(lanes, head, clock.now + 10)
    assert lanes.next_due == clock.now + 10
    claim(lanes, row(6, key="a"))
    assert lanes.freed(ALL, 10, 10) == ([], [])
    clock.now += 11
    ((freed,), _) = lanes.freed(ALL, 10, 10)
    assert freed == (1, "a", 4)
    drain(
        lanes,
        clock,
        *(row(seq, key="a", logged=True) for seq in (5, 6, 7)),
    )
    # The log could have more of this key.
    assert lanes.blocked == ["a"]
    assert seqs(claim(lanes, row(9, key="a"))) == [5, 6, 7]
    drain(lanes, clock, row(8, key="a", logged=True), row(9, key="a", logged=True))
    assert lanes.blocked == []
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
    assert lanes.take_behind(10) == [], "the log has it"
    clock.now += 11
    ((freed,), _) = lanes.freed(ALL, 10, 10)
    assert freed == (1, "a", 4)


def test_a_key_is_due_when_the_last_of_its_refused_deliveries_is(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    for seq, due in ((5, 10), (6, 20)):
        place = WaitingDelivery(1, seq, AT, 1, is_logged=True)
        lanes.found_waiting(place, "a", clock.now + due)
    lanes.found_waiting(
        WaitingDelivery(9, 7, AT, 1, is_logged=True), "not ours", clock.now
    )
    clock.now += 11
    assert lanes.freed(ALL, 10, 10) == ([], [])
    clock.now += 11
    assert lanes.freed(ALL, 10, 10) == ([(1, "a", 4)], [])


def test_a_key_that_is_not_in_the_log_yet_is_not_due(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (head,) = claim(lanes, row(5, key="a"))
    lanes.block(head)
    clock.now += 1e9
    assert lanes.freed(ALL, 10, 10) == ([], [])


def test_a_delivery_without_a_key_waits_alone(
    lanes: DeliveryLanes, clock: Clock
) -> None:
    (given,) = claim(lanes, row(5))
    refuse(lanes, given, clock.now + 10)
    assert lanes.freed(ALL, 10, 10) == ([], [])
    clock.now += 11
    assert lanes.freed(ALL, 10, 10) == ([], [(1, 5, AT, 1, True)])
    assert lanes.freed(ALL, 10, 10) == ([], [])


def test_a_returned_delivery_comes_again_before_the_rest_of_its_key(
    lanes: DeliveryLanes,
) -> None:
    rows = [row(5, key="a"), row(6, key="a"), row(7, key="b"), row(8, key="a")]
    lanes.claimed(rows, [1, 2, 3], QUIET, full=False)
    first, second = lanes.hand_out(2, ALL)
    lanes.give_back(first)
    lanes.give_back(second)
    assert seqs(lanes.hand_out(100, ALL)) == [5, 6, 7, 8]


def test_nothing_is_delivered_from_a_lane_that_is_being_released(
    lanes: DeliveryLanes, used: Used
) -> None:
    lanes.claimed([row(5), row(6, lane=2)], [1, 2, 3], QUIET, full=False)
    assert lanes.hand_out(100, frozenset({2})) == [row(6, lane=2)]
    assert used == {2}
    assert lanes.hand_out(100, ALL) == [row(5)]
    assert used == {1, 2}


def test_a_lost_lane_is_forgotten_but_its_deliveries_stay_held(
    lanes: DeliveryLanes, used: Used
) -> None:
    (given,) = claim(lanes, row(5))
    lanes.lose([1])
    assert lanes.hand_out(100, ALL) == []
    lanes.take([1])
    lanes.start(1, 4, ())
    assert claim(lanes, row(5)) == []
    lanes.let_go(given)
    assert used == set()
