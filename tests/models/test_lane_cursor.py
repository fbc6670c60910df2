"""No row is passed by and no key overtakes itself, in whatever order things happen."""

from dataclasses import replace
from datetime import datetime

import pytest
from typing_extensions import override

from outbox.postgres.lane_cursor import LaneCursor, Snapshot
from relay.lanes.lane import Lane
from tests.models.explore import BrokenPromiseError, explore
from tests.models.lane import Budget, FullSnapshot, LaneModel

SMALL = {
    "two writers, one of which may roll back": LaneModel(["k.j.", "k?"]),
    "a transaction that gets its id early and commits late": LaneModel(
        ["k.", "k.", "xk."]
    ),
    "a message that is refused and due again": LaneModel(
        ["k.", "k.k."], Budget(refusals=1)
    ),
    "a message without a key that is due again": LaneModel(
        ["-.", "-.-."], Budget(refusals=1)
    ),
    "a broker that goes away": LaneModel(["k.j.", "k."], Budget(outages=1)),
    "a relay that takes over from one that settles late": LaneModel(
        ["jj.", "kk."], Budget(takeovers=1, refusals=1)
    ),
}
LARGE = {
    "two writers of two keys": LaneModel(["k.j.", "j.k?"]),
    "a refusal beside a late commit": LaneModel(["k.k.", "xk."], Budget(refusals=1)),
    "a refusal between two keys": LaneModel(["k.j.", "k.k."], Budget(refusals=1)),
    "a broker that goes away and refuses": LaneModel(
        ["k.k.", "k."], Budget(outages=1, refusals=1)
    ),
    "everything at once": LaneModel(
        ["kk.", "k."], Budget(refusals=1, outages=1, takeovers=1, sweeps=1)
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_row_is_claimed_in_order(name: str) -> None:
    model = SMALL[name]
    print(f"{name}: {explore(model.start(), model.steps)}")  # noqa: T201


@pytest.mark.timeout(900)
@pytest.mark.fault
@pytest.mark.parametrize("name", LARGE)
def test_every_row_is_claimed_in_order_up_to_a_larger_bound(
    name: str, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("explored with --full")
    model = LARGE[name]
    print(f"{name}: {explore(model.start(), model.steps)}")  # noqa: T201


class RisesToTheLastRow(LaneCursor):
    """Breaks the rule: assumes that a look found everything."""

    @override
    def looked(self, up_to: int, snapshot: Snapshot) -> None:
        self.floor = max(self.floor, up_to)


class IgnoresHowFarTheLookGot(LaneCursor):
    """Believes that each look reaches as far as the one before."""

    @override
    def looked(self, up_to: int, snapshot: Snapshot) -> None:
        if self._candidate is not None:
            up_to = max(up_to, self._candidate[0])
        super().looked(up_to, snapshot)


class KeepsItsFloorAtARewind(LaneCursor):
    """Remembers that there was a rewind, and doesn't go back."""

    @override
    def fall_back(self, floor: int) -> None:
        self._candidate = None


class ForgetsTheLookUnderWay(LaneCursor):
    """Goes back, and lets a look that began before raise the floor again."""

    @override
    def fall_back(self, floor: int) -> None:
        self.floor = min(self.floor, floor)


class ComparesXmax(LaneModel):
    """Takes everything below xmax for ended, whatever is in progress."""

    @override
    def _read(self, snapshot: FullSnapshot) -> Snapshot:
        return Snapshot(snapshot.xmax, snapshot.next_xid)


class WaitsForXmax(LaneModel):
    """Takes xmax for the next id, though transactions above it may be running."""

    @override
    def _read(self, snapshot: FullSnapshot) -> Snapshot:
        return Snapshot(snapshot.xmin, snapshot.xmax)


class BlocksNoKey(Lane):
    """Lets a key go on behind a refused message."""

    @override
    def block(self, key: str, created_at: datetime, *, most: int) -> None:
        pass


class DoesNotLookAgainWhenAKeyIsFree(Lane):
    """Goes back to the message that is due, and not below it."""

    @override
    def free(
        self, seq: int, key: str | None, created_at: datetime, *, refused: bool
    ) -> None:
        before = self.needs_refresh
        super().free(seq, key, created_at, refused=refused)
        self.needs_refresh = before


LATE = LaneModel(["k.", "k.", "xk."])
REFUSED = LaneModel(["k.", "k.k."], Budget(refusals=1))
NO_KEY = LaneModel(["-.", "-.-."], Budget(refusals=1))
TAKEN_OVER = LaneModel(["jj.", "kk."], Budget(takeovers=1, refusals=1))


@pytest.mark.parametrize(
    "broken",
    [
        replace(LATE, cursor=RisesToTheLastRow),
        replace(LATE, cursor=IgnoresHowFarTheLookGot),
        replace(REFUSED, cursor=KeepsItsFloorAtARewind),
        replace(NO_KEY, cursor=ForgetsTheLookUnderWay),
        ComparesXmax(LATE.scripts),
        WaitsForXmax(LATE.scripts),
        replace(REFUSED, lane=BlocksNoKey),
        LaneModel(
            ["k.j.", "k.k."], Budget(refusals=1), lane=DoesNotLookAgainWhenAKeyIsFree
        ),
        LaneModel(["kx.", "kx."], number_first=True),
        replace(TAKEN_OVER, settles_after_loss=True),
        replace(TAKEN_OVER, looks_on_takeover=False),
    ],
    ids=lambda broken: "-".join(
        part
        for part in (
            type(broken).__name__.removeprefix("LaneModel"),
            broken.cursor.__name__.removeprefix("LaneCursor"),
            broken.lane.__name__.removeprefix("Lane"),
            "number_first" * broken.number_first,
            "settles_after_loss" * broken.settles_after_loss,
            "does_not_look_on_takeover" * (not broken.looks_on_takeover),
        )
        if part
    ),
)
def test_a_violated_rule_is_found(broken: LaneModel) -> None:
    with pytest.raises(
        BrokenPromiseError, match=r"the floor is|was published before|never"
    ):
        explore(broken.start(), broken.steps)
