"""The settlement that follows from the answers of the publisher."""

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from outbox.retry import RetryPolicy
from relay.claim import Claimed
from relay.publish import Answer
from relay.publisher import Acked, Nacked
from relay.settle import Settlement, decide
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

Pair = tuple[Claimed, Answer]


@pytest.mark.parametrize(
    ("pairs", "outcomes"),
    [
        pytest.param(
            [(FIRST, ACKED), (WITHOUT, ACKED)],
            {"published": [FIRST, WITHOUT]},
            id="acked messages are published",
        ),
        pytest.param(
            [(FIRST, None)],
            {"untouched": [FIRST]},
            id="without an answer nothing is recorded",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, REFUSED), (THIRD, None)],
            {"retried": [(FIRST, "no", 1.0)], "held": [SECOND_OF_KEY, THIRD]},
            id="only the first refused message of a key is charged",
        ),
        pytest.param(
            [(WITHOUT, REFUSED), (WITHOUT_TOO, REFUSED)],
            {"retried": [(WITHOUT, "no", 1.0), (WITHOUT_TOO, "no", 1.0)]},
            id="each message without a key is charged",
        ),
        pytest.param(
            [(FIRST, REFUSED), (OF_ANOTHER, REFUSED)],
            {"retried": [(FIRST, "no", 1.0), (OF_ANOTHER, "no", 1.0)]},
            id="each key is charged separately",
        ),
        pytest.param(
            [(LAST_BUT_ONE, REFUSED)],
            {"retried": [(LAST_BUT_ONE, "no", 1.0)]},
            id="the last but one refusal is retried",
        ),
        pytest.param(
            [(SPENT, REFUSED), (FIRST, REFUSED)],
            {"dead_lettered": [(SPENT, "no")], "untouched": [FIRST]},
            id="the last refusal dead-letters a message and charges none behind it",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, FORBIDDEN)],
            {
                "retried": [(FIRST, "no", 1.0)],
                "dead_lettered": [(SECOND_OF_KEY, "never")],
            },
            id="a permanent refusal counts at once, even behind a waiting head",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SPENT, REFUSED)],
            {"retried": [(FIRST, "no", 1.0)], "held": [SPENT]},
            id="a spent message behind a waiting head is not charged",
        ),
        pytest.param(
            [(FIRST, REFUSED), (SECOND_OF_KEY, ACKED)],
            {"retried": [(FIRST, "no", 1.0)], "published": [SECOND_OF_KEY]},
            id="an ack behind a refused head is still an ack",
        ),
        pytest.param(
            [(FIRST, None), (SECOND_OF_KEY, REFUSED), (THIRD, None)],
            {
                "untouched": [FIRST],
                "retried": [(SECOND_OF_KEY, "no", 1.0)],
                "held": [THIRD],
            },
            id="a message without an answer waits behind a refused one",
        ),
        pytest.param(
            [(SPENT, LATER), (LAST_BUT_ONE, REFUSED), (SPENT_TOO, LATER)],
            {
                "put_off": [(SPENT, "later", 7.0)],
                "held": [LAST_BUT_ONE, SPENT_TOO],
            },
            id="a postponed message and those behind it wait without charge",
        ),
        pytest.param(
            [(FIRST, NOW)],
            {"put_off": [(FIRST, "now", 1.0)]},
            id="nothing is postponed for less than the first delay",
        ),
    ],
)
def test_outcomes_follow_from_the_answers(
    pairs: list[Pair], outcomes: dict[str, Any]
) -> None:
    settlement = decide(
        [row for row, _ in pairs], [answer for _, answer in pairs], POLICY
    )

    found = {it.name: getattr(settlement, it.name) for it in fields(Settlement)}
    assert {name: rows for name, rows in found.items() if rows} == outcomes
