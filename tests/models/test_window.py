"""A consumer's deliveries may end in any order, and none is skipped."""

from collections import Counter
from collections.abc import Collection

import pytest
from typing_extensions import override

from pillarbox.outbox.log.progress import Day, Progress, Stored
from pillarbox.outbox.log.window import Place, Window
from tests.models.explore import BrokenPromiseError, explore, models
from tests.models.log import Budget
from tests.models.window import WindowModel

SMALL = {
    "late rows and a kill": WindowModel(["x-k.", "-k."], Budget(kills=1), most=2),
    "two deliveries that stay open, two kills": WindowModel(
        ["xk.", "-k."], Budget(kills=2, opened=2)
    ),
    "midnight, a delivery that stays open, a kill": WindowModel(
        ["x-.", "k."], Budget(kills=1, opened=1, midnights=1), days=2
    ),
}
LARGE = {
    "three writers, a rollback, a kill": WindowModel(
        ["xk.", "kj?", "j."], Budget(kills=1), most=2
    ),
    "a delivery that stays open, a kill": WindowModel(
        ["x--.", "kk."], Budget(kills=1, opened=1), most=2
    ),
    "late rows, cut, and a delivery that stays open": WindowModel(
        ["x---.", "--."], Budget(kills=1, opened=1)
    ),
    "midnight, late rows, cut, a kill": WindowModel(
        ["x--.", "-k."], Budget(kills=1, midnights=1), days=2
    ),
}


class IgnoresWhatIsHeld(Window):
    """Stores how far the claims have read."""

    @override
    def settle(
        self, logged: Collection[Place] = (), *, all_days: bool = False
    ) -> tuple[Progress, list[Stored], Counter[Day]] | None:
        held, self._held = self._held, {}
        result = super().settle()
        self._held = held
        return result

    @override
    def settled(self, stored: Progress, logged: Collection[Place] = ()) -> None:
        super().settled(stored)
        self._ended.clear()


class LogsWithoutPassing(Window):
    """Adds an entry for a delivery that the stored position doesn't cover."""

    @override
    def settle(
        self, logged: Collection[Place] = (), *, all_days: bool = False
    ) -> tuple[Progress, list[Stored], Counter[Day]] | None:
        return (self.stored, [], Counter()) if logged else super().settle()


BROKEN = {
    "stores a position beyond what is held": WindowModel(
        ["x-k.", "-k."], Budget(kills=1), most=2, window=IgnoresWhatIsHeld
    ),
    "adds an entry below the position": WindowModel(
        ["x-.", "-."], Budget(opened=1), window=LogsWithoutPassing
    ),
}


@pytest.mark.parametrize("model", models(SMALL, LARGE))
def test_every_delivery_is_handled_in_order(model: WindowModel) -> None:
    print(explore(model.start(), model.steps))  # noqa: T201


@pytest.mark.parametrize("name", BROKEN)
def test_a_violated_rule_is_found(name: str) -> None:
    model = BROKEN[name]
    with pytest.raises(BrokenPromiseError, match=r"^row \d+ (was|is) "):
        explore(model.start(), model.steps)
