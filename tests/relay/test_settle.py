"""The settlement that follows from the answers of the publisher."""

from datetime import UTC, datetime, timedelta

import pytest

from pillarbox.outbox.log.lanes.batch import (
    BLOCKED,
    PUBLISHED,
    UNTOUCHED,
    ClaimedBatch,
    ClaimedMessage,
    Disposition,
)
from pillarbox.outbox.log.lanes.lane import Extent, Lane
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Day, Progress
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.relay.publish import Answer
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.settle import decide, settle
from tests.fixtures.claimed import claimed

SECOND = timedelta(seconds=1)
POLICY = RetryPolicy(max_attempts=3, first_delay=SECOND, max_delay=SECOND)
LATER = Nacked("later", retry_after=7 * SECOND)
NOW = Nacked("now", retry_after=timedelta(0))
ACKED, REFUSED, FORBIDDEN = Acked(), Nacked("no"), Nacked("never", permanent=True)

FIRST, SECOND_OF_KEY, THIRD = (claimed(topic, "k") for topic in "abc")
OF_ANOTHER = claimed("d", "j")
WITHOUT, WITHOUT_TOO = claimed("e"), claimed("f")
LAST_BUT_ONE = claimed("g", "k", attempts=1)
SPENT, SPENT_TOO = claimed("h", "k", attempts=2), claimed("i", "k", attempts=2)

RETRIED = Disposition("refused", "no", 1.0, charge=1)


@pytest.mark.parametrize(
    ("pairs", "dispositions"),
    [
        pytest.param(
            [(FIRST, ACKED), (WITHOUT, ACKED)],
            [PUBLISHED, PUBLISHED],
            id="acked messages are published",
        ),
        pytest.param(
            [(FIRST, None)], [UNTOUCHED], id="without an answer nothing is recorded"
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, REFUSED), (THIRD, None)],
            [RETRIED, BLOCKED, BLOCKED],
            id="only the first refused message of a key is charged",
        ),
        pytest.param(
            [(WITHOUT, REFUSED), (WITHOUT_TOO, REFUSED)],
            [RETRIED, RETRIED],
            id="each message without a key is charged",
        ),
        pytest.param(
            [(FIRST, REFUSED), (OF_ANOTHER, REFUSED)],
            [RETRIED, RETRIED],
            id="each key is charged separately",
        ),
        pytest.param(
            [(LAST_BUT_ONE, REFUSED)],
            [RETRIED],
            id="the last but one refusal is retried",
        ),
        pytest.param(
            [(SPENT, REFUSED), (FIRST, REFUSED)],
            [Disposition("dead_lettered", "no"), UNTOUCHED],
            id="the last refusal dead-letters a message and charges none behind it",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, FORBIDDEN)],
            [RETRIED, Disposition("dead_lettered", "never")],
            id="a permanent refusal counts at once, even behind a waiting head",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SPENT, REFUSED)],
            [RETRIED, BLOCKED],
            id="a spent message behind a waiting head is not charged",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, ACKED)],
            [RETRIED, PUBLISHED],
            id="an ack behind a refused head is still an ack",
        ),
        pytest.param(
            [(FIRST, None), (SECOND_OF_KEY, REFUSED), (THIRD, None)],
            [UNTOUCHED, RETRIED, BLOCKED],
            id="a message without an answer waits behind a refused one",
        ),
        pytest.param(
            [(SPENT, LATER), (LAST_BUT_ONE, REFUSED), (SPENT_TOO, LATER)],
            [Disposition("postponed", "later", 7.0), BLOCKED, BLOCKED],
            id="a postponed message and those behind it wait without charge",
        ),
        pytest.param(
            [(FIRST, NOW)],
            [Disposition("postponed", "now", 1.0)],
            id="nothing is postponed for less than the first delay",
        ),
    ],
)
def test_dispositions_follow_from_the_answers(
    pairs: list[tuple[ClaimedMessage, Answer]], dispositions: list[Disposition]
) -> None:
    rows, answers = zip(*pairs, strict=True)

    assert decide(rows, answers, POLICY) == list(zip(rows, dispositions, strict=True))


def test_rows_behind_the_last_answer_are_left_for_the_next_claim() -> None:
    lane, nothing = Lane(16), ReadView(Snapshot(1, 1), 1, 0, 1)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    day = Day(today - timedelta(days=1), today + timedelta(days=2))
    before = Progress.take_over({day: Position()}, [], *nothing[:2], {})
    lane.continue_with(before)
    rows = [claimed("a", "k"), claimed("b", "j", seq=2), claimed("c", "k", seq=3)]
    batch = ClaimedBatch([lane], rows, extents={16: Extent(3, nothing, False)})

    settlement = settle(batch, [REFUSED, None, None], POLICY)

    assert settlement.others == [(rows[0], RETRIED)]
    (advance,) = settlement.advances
    assert [row.position.up_to for row in advance.rows] == [1]
    assert (lane.progress, lane.keys.blocked) == (before, set()), "nothing is stored"

    settlement.tell_lanes({}, 1.0)

    assert (lane.progress, lane.keys.blocked) == (advance.after, {"k"})
