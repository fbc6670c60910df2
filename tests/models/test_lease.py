"""No lane has two owners, or none for long, whatever happens to the two relays."""

from collections.abc import Collection

import pytest
from typing_extensions import override

from pillarbox.outbox.postgres.lease import Ownership
from tests.models.explore import BrokenPromiseError, explore
from tests.models.lease import LeaseModel


def test_a_failing_and_a_healthy_relay_share_lanes_and_block_none() -> None:
    model = LeaseModel()
    print(explore(model.start(), model.steps))  # noqa: T201


@pytest.mark.timeout(3600)
@pytest.mark.fault
def test_a_failing_and_a_freezing_relay_share_lanes_and_block_none(
    pytestconfig: pytest.Config,
) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("explored with --full")
    model = LeaseModel(is_one_steady=False)
    print(explore(model.start(), model.steps))  # noqa: T201


class IgnoresTheTime(Ownership):
    """Relies on its locks until it learns that they are gone."""

    @override
    def is_valid(self, now: float) -> bool:
        return self.is_member


class OutlivesItsSession(Ownership):
    """Relies on its locks for longer than the server keeps an idle session."""

    @override
    def is_valid(self, now: float) -> bool:
        return super().is_valid(now - 1)


class TakesNothing(Ownership):
    """Leaves the free lanes to the other relay."""

    @override
    def balance(
        self, group: Collection[int], members: float
    ) -> tuple[frozenset[int], int]:
        return super().balance(group, members)[0], 0


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (LeaseModel(IgnoresTheTime), "two relays hold"),
        (LeaseModel(OutlivesItsSession), "two relays hold"),
        (LeaseModel(counts_from_the_answer=True), "two relays hold"),
        (LeaseModel(trusts_its_connection=True), "two relays hold"),
        (LeaseModel(unlocks_first=True), "two relays hold"),
        (LeaseModel(TakesNothing), "nobody holds"),
        (LeaseModel(has_timeout=False), "nobody holds"),
    ],
    ids=[
        "ignores the time",
        "outlives its session",
        "counts from the answer",
        "trusts its connection",
        "unlocks before it stops",
        "takes nothing",
        "no idle_session_timeout",
    ],
)
def test_a_violated_rule_is_found(broken: LeaseModel, promise: str) -> None:
    with pytest.raises(BrokenPromiseError, match=promise):
        explore(broken.start(), broken.steps)
