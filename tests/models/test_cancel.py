"""What is cancelled is not published, in every interleaving."""

import pytest

from tests.models.cancel import CancelModel, State
from tests.models.explore import BrokenPromiseError, explore


def test_a_message_is_either_cancelled_or_published() -> None:
    print(explore(State(), CancelModel().steps))  # noqa: T201


@pytest.mark.parametrize(
    "broken",
    [
        CancelModel(reads_clock_first=True),
        CancelModel(locks=False),
        CancelModel(looks_again=False),
    ],
    ids=["reads the clock first", "asks for no lock", "looks with an old snapshot"],
)
def test_a_violated_rule_is_found(broken: CancelModel) -> None:
    with pytest.raises(BrokenPromiseError, match="cancelled and published"):
        explore(State(), broken.steps)
