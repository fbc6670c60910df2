"""What may have killed a replica is counted first, and alone the second time."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from inbox.sources.postgres.lanes import Claimed
from inbox.sources.postgres.suspects import Suspects
from outbox import Message

TAKEN_AT = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def row(seq: int, attempts: int = 0, age: timedelta = HOUR, lane: int = 1) -> Claimed:
    message = Message("t", b"", id=UUID(int=0))
    return Claimed(lane, seq, TAKEN_AT - age, attempts, message, None)


@pytest.fixture
def suspects() -> Suspects:
    return taken()


def taken(alone: timedelta = HOUR) -> Suspects:
    suspects = Suspects(alone)
    suspects.take([1])
    suspects.looked_into([1], TAKEN_AT)
    return suspects


def test_what_was_there_before_the_lane_is_counted(suspects: Suspects) -> None:
    old, new, elsewhere = row(1), row(2, age=-HOUR), row(3, lane=2)

    assert suspects.choose([old, new, elsewhere]) == ([old, new, elsewhere], [])
    assert suspects.hand_out([old, new, elsewhere]) == [old]
    assert suspects.in_work == [old]
    assert suspects.settle(old)
    assert not suspects.settle(new)
    assert suspects.in_work == []


def test_what_failed_and_is_due_is_not_counted_twice(suspects: Suspects) -> None:
    suspects.came_to_an_end(1, 5)

    assert suspects.hand_out([row(5, attempts=1), row(6, attempts=1)]) == [
        row(6, attempts=1)
    ]


def test_one_that_was_counted_before_waits_for_what_is_out(suspects: Suspects) -> None:
    first, known, rest = row(1), row(2, attempts=1), row(3)
    assert suspects.choose([first, known, rest]) == ([first], [known, rest])
    suspects.hand_out([first])

    assert suspects.choose([known, rest]) == ([], [known, rest])
    held_up = suspects.holds_up
    suspects.wrote(first)
    assert (held_up, suspects.holds_up) == (True, False)
    assert suspects.choose([known, rest]) == ([known], [rest])


def test_the_rest_waits_for_one_that_is_alone(suspects: Suspects) -> None:
    known, rest = row(2, attempts=1), row(3)
    assert suspects.choose([known, rest]) == ([known], [rest])
    suspects.hand_out([known])

    assert suspects.choose([rest]) == ([], [rest])

    suspects.wrote(known)
    assert suspects.choose([rest]) == ([rest], [])


def test_nothing_waits_for_longer_than_the_limit() -> None:
    suspects = taken(alone=timedelta(0))
    known, another, rest = row(1, attempts=1), row(2, attempts=1), row(3)
    assert suspects.choose([known, another, rest])[0] == [known]
    suspects.hand_out([known])

    assert suspects.choose([another, rest]) == ([another], [rest])
    suspects.hand_out([another])
    assert suspects.choose([rest]) == ([rest], [])


def test_a_lane_has_so_many_suspects_and_known_ones_besides(
    suspects: Suspects,
) -> None:
    known = [row(n, attempts=1) for n in range(100)]
    assert suspects.hand_out(known) == known
    assert len(suspects.hand_out([row(n) for n in range(100, 1000)])) == 256
    assert suspects.hand_out([row(1000), row(1001, attempts=1)]) == []


def test_one_that_was_given_back_untried_makes_room_for_another(
    suspects: Suspects,
) -> None:
    for _ in range(1000):
        assert suspects.hand_out([row(1)]) == [row(1)]
        assert suspects.settle(row(1))
        suspects.acquit(row(1))


async def test_a_wait_ends_when_what_is_out_is_written(suspects: Suspects) -> None:
    first, known = row(1), row(2, attempts=1)
    suspects.hand_out([first])
    assert suspects.choose([known]) == ([], [known])
    suspects.wrote(first)

    await suspects.wait()

    assert suspects.choose([known]) == ([known], [])


def test_a_lane_that_is_lost_has_none(suspects: Suspects) -> None:
    suspects.lose([1])
    suspects.acquit(row(1))

    assert suspects.hand_out([row(1)]) == []
