"""A replica's state of its lanes: floors, held deliveries, blocked keys."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from outbox import Message
from outbox.postgres.lane_cursor import Snapshot

AT = datetime(2026, 1, 1, tzinfo=UTC)
ALL = frozenset(range(16))
ID = UUID(int=0)
QUIET = Snapshot(100, 100)
"""No transaction is open."""


def row(seq: int, lane: int = 1, key: str | None = None) -> ClaimedDelivery:
    return ClaimedDelivery(lane, seq, AT, 0, Message("t", b"", key=key, id=ID), None)


class Used(set[int]):
    """The lanes that are said to be in use."""


@pytest.fixture
def used() -> Used:
    return Used()


@pytest.fixture
def lanes(used: Used) -> DeliveryLanes:
    """Lanes 1 to 3, looked into."""
    lanes = DeliveryLanes(used.add, used.discard)
    lanes.take([1, 2, 3])
    for lane in (1, 2, 3):
        lanes.found_head(lane, None)
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


def test_a_full_claim_says_nothing_about_lanes_after_its_last_row(
    lanes: DeliveryLanes,
) -> None:
    claim(lanes, row(9), row(8, lane=2), row(7, lane=3))
    claim(lanes)
    for lane in (1, 2, 3):
        lanes.found_head(lane, 2)
    claim(lanes, row(3), row(4, lane=2), full=True)
    lanes.floors(ALL)
    # Lane 1 was read to its end, lane 2 up to 4, lane 3 not at all.
    lanes.claimed([], [1, 2], QUIET, full=False)
    assert lanes.floors(ALL) == {3: 1, 1: 9, 2: 4}


def test_held_deliveries_are_excluded_from_a_claim_below_them(
    lanes: DeliveryLanes,
) -> None:
    claim(lanes, row(5), row(6))
    claim(lanes)
    assert lanes.held_above(lanes.floors(ALL)) == []
    lanes.found_head(1, 5)
    assert sorted(lanes.held_above(lanes.floors(ALL))) == [5, 6]
    assert claim(lanes, row(5)) == []


def test_a_rewind_during_a_claim_is_not_lost(lanes: DeliveryLanes) -> None:
    (given,) = claim(lanes, row(5))
    claim(lanes)
    floors = lanes.floors(ALL)
    assert floors[1] == 5
    lanes.let_go(given)
    lanes.rewind(1, 5, AT)
    lanes.claimed([row(6)], list(floors), QUIET, full=False)
    assert lanes.floors(ALL)[1] == 4


def test_a_lane_is_in_use_while_one_of_its_deliveries_is_held(
    lanes: DeliveryLanes, used: Used
) -> None:
    first, second = claim(lanes, row(5), row(6))
    lanes.let_go(first)
    lanes.let_go(first)
    assert used == {1}
    lanes.let_go(second)
    assert used == set()


def test_a_blocked_key_is_neither_claimed_nor_delivered(lanes: DeliveryLanes) -> None:
    lanes.claimed(
        [row(5, key="a"), row(6, key="a"), row(7, key="b")],
        [1, 2, 3],
        QUIET,
        full=False,
    )
    (head,) = lanes.hand_out(1, ALL)
    lanes.block(head)
    assert lanes.blocked == ["a"]
    assert lanes.hand_out(100, ALL) == [row(7, key="b")]
    lanes.let_go(head)
    claim(lanes)
    claim(lanes)
    assert lanes.floors(ALL)[1] == 7
    lanes.made_ready(1, 5, "a", AT)
    assert lanes.blocked == []
    assert lanes.floors(ALL)[1] == 4


def test_a_nacked_delivery_comes_before_the_rest_of_its_key(
    lanes: DeliveryLanes,
) -> None:
    a, b = row(5, key="a"), row(6, key="b")
    lanes.claimed([a, b, row(7, key="a")], [1, 2, 3], QUIET, full=False)
    assert lanes.hand_out(1, ALL) == [a]
    lanes.give_back(a)
    assert lanes.hand_out(100, ALL) == [b]
    assert lanes.floors(ALL)[1] < 5
    assert lanes.held_above(lanes.floors(ALL)) == [6]


def test_a_key_is_blocked_until_the_last_of_it_is_ready(lanes: DeliveryLanes) -> None:
    lanes.found_waiting([(1, 5, "a"), (1, 6, "a"), (9, 7, "not ours")])
    lanes.made_ready(1, 5, "a", AT)
    assert lanes.blocked == ["a"]
    lanes.made_ready(1, 6, "a", AT)
    assert lanes.blocked == []


def test_a_new_lane_is_not_claimed_from_before_a_look(
    lanes: DeliveryLanes,
) -> None:
    lanes.take([4])
    assert lanes.new == [4]
    assert 4 not in lanes.floors(ALL)
    lanes.found_head(4, 10)
    assert lanes.floors(ALL)[4] < 10


def test_nothing_is_delivered_from_a_lane_that_is_not_leased(
    lanes: DeliveryLanes, used: Used
) -> None:
    lanes.claimed([row(5), row(6, lane=2)], [1, 2, 3], QUIET, full=False)
    assert lanes.hand_out(100, frozenset({2})) == [row(6, lane=2)]
    assert used == {2}
    assert lanes.floors(ALL)[1] < 5


def test_a_lost_lane_is_forgotten_but_its_deliveries_stay_held(
    lanes: DeliveryLanes, used: Used
) -> None:
    (given,) = claim(lanes, row(5))
    lanes.lose([1])
    assert lanes.hand_out(100, ALL) == []
    lanes.take([1])
    lanes.found_head(1, 5)
    assert lanes.held_above(lanes.floors(ALL)) == [5]
    lanes.let_go(given)
    assert used == set()
