"""The settlement that follows from the answers of the publisher."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox.log.position import Position, Snapshot
from outbox.log.progress import Day, Progress
from outbox.log.reader import Look, Read
from outbox.retry import RetryPolicy
from relay.claim import HELD, PUBLISHED, UNTOUCHED, Batch, Claimed, Outcome
from relay.lanes.lane import Lane
from relay.publish import Answer
from relay.publisher import Acked, Nacked
from relay.settle import complete, decide
from tests.fixtures.claimed import claimed

SECOND = timedelta(seconds=1)
POLICY = RetryPolicy(max_attempts=3, first_delay=SECOND, max_delay=SECOND)
LATER = Nacked("later", retry_after=7 * SECOND)
FAILED = Nacked("failed", retry_after=7 * SECOND, is_attempt=True)
NOW = Nacked("now", retry_after=timedelta(0))
ACKED, REFUSED, FORBIDDEN = Acked(), Nacked("no"), Nacked("never", permanent=True)

FIRST, SECOND_OF_KEY, THIRD = (claimed(topic, "k") for topic in "abc")
OF_ANOTHER = claimed("d", "j")
WITHOUT, WITHOUT_TOO = claimed("e"), claimed("f")
LAST_BUT_ONE = claimed("g", "k", attempts=1)
SPENT, SPENT_TOO = claimed("h", "k", attempts=2), claimed("i", "k", attempts=2)

RETRIED = Outcome("refused", "no", 1.0, charge=1)


@pytest.mark.parametrize(
    ("pairs", "outcomes"),
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
            [RETRIED, HELD, HELD],
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
            [Outcome("dead_lettered", "no"), UNTOUCHED],
            id="the last refusal dead-letters a message and charges none behind it",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, FORBIDDEN)],
            [RETRIED, Outcome("dead_lettered", "never")],
            id="a permanent refusal counts at once, even behind a waiting head",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SPENT, REFUSED)],
            [RETRIED, HELD],
            id="a spent message behind a waiting head is not charged",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, ACKED)],
            [RETRIED, PUBLISHED],
            id="an ack behind a refused head is still an ack",
        ),
        pytest.param(
            [(FIRST, None), (SECOND_OF_KEY, REFUSED), (THIRD, None)],
            [UNTOUCHED, RETRIED, HELD],
            id="a message without an answer waits behind a refused one",
        ),
        pytest.param(
            [(SPENT, LATER), (LAST_BUT_ONE, REFUSED), (SPENT_TOO, LATER)],
            [Outcome("postponed", "later", 7.0), HELD, HELD],
            id="a postponed message and those behind it wait without charge",
        ),
        pytest.param(
            [(SPENT, FAILED), (LAST_BUT_ONE, REFUSED)],
            [Outcome("refused", "failed", 7.0, charge=1), HELD],
            id="an attempt that others retry is charged and never the last",
        ),
        pytest.param(
            [(FIRST, NOW)],
            [Outcome("postponed", "now", 1.0)],
            id="nothing is postponed for less than the first delay",
        ),
    ],
)
def test_outcomes_follow_from_the_answers(
    pairs: list[tuple[Claimed, Answer]], outcomes: list[Outcome]
) -> None:
    rows, answers = zip(*pairs, strict=True)

    settlement = decide(rows, answers, POLICY)

    assert settlement.outcomes == list(zip(rows, outcomes, strict=True))


def test_rows_behind_the_last_answer_are_left_for_the_next_claim() -> None:
    lane, nothing = Lane(16), Look(Snapshot(1, 1), 1)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    day = Day(today - timedelta(days=1), today + timedelta(days=2))
    lane.progress = Progress.take_over({day: Position()}, [], *nothing, {})
    rows = [claimed("a", "k"), claimed("b", "j", seq=2), claimed("c", "k", seq=3)]
    settlement = decide(rows, [REFUSED, None, None], POLICY)

    complete(settlement, Batch([lane], rows, reads={16: Read(3, nothing, False)}))

    assert settlement.outcomes == [(rows[0], RETRIED)]
    (settled,) = settlement.positions
    assert [row.position.up_to for row in settled.rows] == [1]
