"""No crash makes a queue skip a delivery, repeat it, or drop it too early."""

from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from inbox.sources.postgres.lanes import ClaimedDelivery, DeliveryLanes
from tests.models.delivery import Budget, DeliveryModel, ModelQueue
from tests.models.explore import BrokenPromiseError, explore
from tests.models.test_lane_cursor import RisesToTheLastRow

SMALL = {
    "a transaction that gets its id early and commits late": DeliveryModel(
        ["k.", "xk."]
    ),
    "two writers, one of which may roll back": DeliveryModel(["k.", "k?"]),
    "a delivery that fails": DeliveryModel(["kk."], Budget(refusals=1)),
    "a delivery that fails while its writer continues": DeliveryModel(
        ["k.k."], Budget(refusals=1)
    ),
    "a delivery without a key that fails": DeliveryModel(["--."], Budget(refusals=1)),
    "a delivery that is returned": DeliveryModel(["kk."], Budget(returns=1)),
    "a replica that takes over": DeliveryModel(["k.k."], Budget(takeovers=1)),
    "a replica that takes over a key that waits": DeliveryModel(
        ["kk."], Budget(takeovers=1, refusals=1)
    ),
    "a watermark while handlers run": DeliveryModel(["k.k."], Budget(raises=1)),
    "a watermark and a takeover": DeliveryModel(["k."], Budget(raises=1, takeovers=1)),
    "a sweep while handlers run": DeliveryModel(["-.-."], Budget(sweeps=1)),
    "a takeover with one delivery returned and the rest acked": DeliveryModel(
        ["jk."], Budget(returns=1, takeovers=1)
    ),
    "a row inserted by hand": DeliveryModel(["-?", "-."], Budget(by_hand=1)),
}
LARGE = {
    "a late commit and a takeover": DeliveryModel(["k.", "xk."], Budget(takeovers=1)),
    "a late commit and a watermark": DeliveryModel(["k.", "xk."], Budget(raises=1)),
    "a late commit and a sweep": DeliveryModel(["k.", "xk."], Budget(sweeps=1)),
    "a row inserted by hand and a sweep": DeliveryModel(
        ["-?", "-."], Budget(by_hand=1, sweeps=1)
    ),
    "two takeovers of a key that waits": DeliveryModel(
        ["kk."], Budget(takeovers=2, refusals=1)
    ),
    "a failure, a sweep and a takeover": DeliveryModel(
        ["kk."], Budget(refusals=1, sweeps=1, takeovers=1)
    ),
    "a failure, a watermark and a takeover": DeliveryModel(
        ["kk."], Budget(refusals=1, raises=1, takeovers=1)
    ),
    "two failures in a key with three deliveries": DeliveryModel(
        ["kkk."], Budget(refusals=2)
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_delivery_is_handled_in_order(name: str) -> None:
    model = SMALL[name]
    print(f"{name}: {explore(model.start(), model.steps)}")  # noqa: T201


@pytest.mark.timeout(3600)
@pytest.mark.fault
@pytest.mark.parametrize("name", LARGE)
def test_every_delivery_is_handled_in_order_up_to_a_larger_bound(
    name: str, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("explored with --full")
    model = LARGE[name]
    print(f"{name}: {explore(model.start(), model.steps)}")  # noqa: T201


class BlocksNoKey(DeliveryLanes):
    """Continues with a key although one of its deliveries failed."""

    @override
    def block(self, row: ClaimedDelivery) -> None:
        pass


class LogsFollowersFirst(DeliveryLanes):
    """Logs deliveries that wait behind a refused one before logging the refusal."""

    @override
    def _is_behind_unwritten(self, row: ClaimedDelivery) -> bool:
        return False


class ForgetsLoggedDeliveries(DeliveryLanes):
    """Writes a mark and no entry for a delivery that waits according to the log."""

    @override
    def is_logged(self, row: ClaimedDelivery) -> bool:
        return False


class IgnoresOpenTransactions(ModelQueue):
    """Verifies a new lane as if no transaction could still commit there."""

    @override
    async def _verify(self, parts: Any, up_to: Any, **options: Any) -> None:
        await super()._verify(parts, up_to, **{**options, "finally_from": -1})


class ReclaimsHeldDeliveries(ModelQueue):
    """Claims deliveries again that were held for long, though they may be acked."""

    @override
    async def _log_and_wait(self, entries: Any, found: Any) -> None:
        await super()._log_and_wait(entries, entries)


LATE = DeliveryModel(["k.", "xk."])
FAILS = DeliveryModel(["kk."], Budget(refusals=1))
TAKEN_OVER = DeliveryModel(["kk."], Budget(takeovers=1, refusals=1))
GIVEN_BACK = DeliveryModel(["jk."], Budget(returns=1, takeovers=1))
BROKEN = {
    "rises to the last row": replace(
        LATE, scripts=["k.k.", "k."], cursor=RisesToTheLastRow
    ),
    "ignores open transactions": replace(
        LATE, budget=Budget(takeovers=1), queue=IgnoresOpenTransactions
    ),
    "blocks no key": replace(FAILS, lanes=BlocksNoKey),
    "does not read the log": replace(TAKEN_OVER, reads_log=False),
    "does not read the marks": replace(GIVEN_BACK, reads_marks=False),
    "logs followers first": replace(TAKEN_OVER, lanes=LogsFollowersFirst),
    "raises unverified": DeliveryModel(
        ["k."], Budget(raises=1, takeovers=1), verifies=False
    ),
    "reclaims held deliveries": DeliveryModel(
        ["-.-."], Budget(sweeps=1), queue=ReclaimsHeldDeliveries
    ),
    "a mark doesn't end a wait": DeliveryModel(
        ["k.k."], Budget(sweeps=1), marks_end_it=False
    ),
    "marks logged deliveries": replace(
        FAILS, lanes=ForgetsLoggedDeliveries, marks_end_it=False
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_violated_rule_is_found(name: str) -> None:
    model = BROKEN[name]
    with pytest.raises(
        BrokenPromiseError,
        match=r"the watermark is|was handled before|never|handed out|is dropped",
    ):
        explore(model.start(), model.steps)
