"""No row is skipped and no key is published out of order, in any interleaving."""

from collections.abc import Container, Mapping
from dataclasses import replace
from datetime import datetime
from uuid import UUID

import pytest
from typing_extensions import override

from outbox.postgres.lane_cursor import LaneCursor, Snapshot
from relay.lanes.deferrals import Deferrals, Draining, WaitingMessage
from relay.lanes.lane import Lane
from tests.models.explore import BrokenPromiseError, explore
from tests.models.lane import Budget, FullSnapshot, LaneModel

SMALL = {
    "two writers, one of which may roll back": LaneModel(["k.j.", "k?"]),
    "a transaction that gets its id early and commits late": LaneModel(["kk.", "xk."]),
    "a message that is refused and due again": LaneModel(
        ["k.", "kk."], Budget(refusals=1)
    ),
    "a message without a key that is due again": LaneModel(
        ["-.", "--."], Budget(refusals=1)
    ),
    "a head that is refused twice": LaneModel(["k.k.k."], Budget(refusals=2)),
    "a broker outage": LaneModel(["k.j.", "k."], Budget(outages=1)),
    "a broker outage while a key drains": LaneModel(
        ["k.k.k."], Budget(outages=1, refusals=1)
    ),
    "a takeover from a relay that settles late": LaneModel(
        ["j.", "k."], Budget(takeovers=1, refusals=1)
    ),
    "a takeover of a key that drains": LaneModel(
        ["kkk."], Budget(takeovers=1, refusals=1)
    ),
    "a log of two keys that is read in portions": LaneModel(
        ["jkj."], Budget(takeovers=1, refusals=1), portion=1
    ),
    "a watermark, a late commit and a takeover": LaneModel(
        ["k.", "xk."], Budget(takeovers=1, raises=1)
    ),
    "a watermark, a refusal and a takeover": LaneModel(
        ["kk."], Budget(takeovers=1, refusals=1, raises=1)
    ),
}
LARGE = {
    "a watermark and a crash of the server": LaneModel(
        ["k.", "k."], Budget(raises=1, sweeps=1, crashes=1)
    ),
    "a takeover of a log that is read in portions": LaneModel(
        ["kk.k."], Budget(takeovers=1, refusals=1), portion=1
    ),
    "a sweep that notes what was drawn": LaneModel(["k.k.", "xk."], Budget(sweeps=1)),
    "portions, two keys, two refusals and a takeover": LaneModel(
        ["jkk.k."], Budget(takeovers=1, refusals=2), portion=1
    ),
    "a watermark, a crash and a refusal": LaneModel(
        ["k.k."], Budget(refusals=1, raises=2, sweeps=1, crashes=1)
    ),
    "two watermarks, a refusal and a takeover": LaneModel(
        ["k.k."], Budget(takeovers=1, refusals=1, raises=2)
    ),
    "a late commit and two other writers": LaneModel(["k.", "k.", "xk."]),
    "a refusal and another writer": LaneModel(["k.", "k.k."], Budget(refusals=1)),
    "a takeover of two keys": LaneModel(
        ["jj.", "kk."], Budget(takeovers=1, refusals=1)
    ),
    "two writers of two keys": LaneModel(["k.j.", "j.k?"]),
    "a refusal and a late commit": LaneModel(["k.k.", "xk."], Budget(refusals=1)),
    "a refusal between two keys": LaneModel(["k.j.", "k.k."], Budget(refusals=1)),
    "a broker with an outage and a refusal": LaneModel(
        ["k.k.", "k."], Budget(outages=1, refusals=1)
    ),
    "everything at once": LaneModel(
        ["kk.", "k."], Budget(refusals=1, outages=1, takeovers=1, sweeps=1, raises=1)
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_row_is_claimed_in_order(name: str) -> None:
    model = SMALL[name]
    print(f"{name}: {explore(model.start(), model.steps)}")  # noqa: T201


@pytest.mark.timeout(3600)
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
    """Assumes that a claim found every row up to its last one."""

    @override
    def looked(self, up_to: int, snapshot: Snapshot, drawn: int = -1) -> None:
        self.floor = max(self.floor, up_to)


class IgnoresHowFarTheClaimRead(LaneCursor):
    """Assumes that each claim reads as far as the previous one."""

    @override
    def looked(self, up_to: int, snapshot: Snapshot, drawn: int = -1) -> None:
        if self._candidate is not None:
            up_to = max(up_to, self._candidate[0])
        super().looked(up_to, snapshot, drawn)


class KeepsItsFloorOnRewind(LaneCursor):
    """Notes a rewind, and doesn't lower the floor."""

    @override
    def fall_back(self, floor: int) -> None:
        self._candidate = None


class ForgetsTheClaimInProgress(LaneCursor):
    """Lowers the floor, and lets a claim that began before raise it again."""

    @override
    def fall_back(self, floor: int) -> None:
        self.floor = min(self.floor, floor)


class ComparesXmax(LaneModel):
    """Treats every id below xmax as ended, even those in progress."""

    @override
    def _read(self, snapshot: FullSnapshot) -> Snapshot:
        return Snapshot(snapshot.xmax, snapshot.next_xid)


class WaitsForXmax(LaneModel):
    """Treats xmax as the next id, though transactions above it can be running."""

    @override
    def _read(self, snapshot: FullSnapshot) -> Snapshot:
        return Snapshot(snapshot.xmin, snapshot.xmax)


class BlocksNoKey(Deferrals):
    """Continues with a key although one of its messages was refused."""

    @override
    def block(self, key: str) -> None:
        pass


class FreesAKeyWhenItsHeadIsDue(Deferrals):
    """Drains a key, and publishes its new messages meanwhile."""

    @override
    def drain(self, key: str) -> None:
        super().drain(key)
        self.blocked.discard(key)


class ForgetsClaimedMessages(Deferrals):
    """Doesn't read a key again after the broker accepted only some of its messages."""

    @override
    def release(self, place: WaitingMessage) -> None:
        if place.cause != "blocked":
            super().release(place)


class StopsThoughTheHeadIsDue(Deferrals):
    """Relies on what it read, although a scan has found the key's head since."""

    @override
    def claimed(
        self, draining: Draining, left: Container[UUID], *, is_free: bool
    ) -> None:
        self._restarted.clear()
        super().claimed(draining, left, is_free=is_free)


class VerifiesAboveItsFloor(Lane):
    """Assumes that the row after the verified ones has a mark, too."""

    @override
    def note_verified(self, up_to: int, messages: Mapping[datetime, int]) -> None:
        super().note_verified(up_to + 1, messages)


LATE = LaneModel(["k.", "k.", "xk."])
REFUSED = LaneModel(["k.", "k.k."], Budget(refusals=1))
NO_KEY = LaneModel(["-.", "-.-."], Budget(refusals=1))
LOST = LaneModel(["k.j.", "k."], Budget(outages=1))
DRAINS = LaneModel(["kkk.", "k."], Budget(refusals=1))
TAKEN_OVER = LaneModel(["kkk."], Budget(takeovers=1, refusals=1))


@pytest.mark.parametrize(
    "broken",
    [
        replace(LATE, cursor=RisesToTheLastRow),
        replace(LATE, cursor=IgnoresHowFarTheClaimRead),
        replace(LOST, cursor=KeepsItsFloorOnRewind),
        ComparesXmax(LATE.scripts),
        WaitsForXmax(LATE.scripts),
        replace(REFUSED, deferrals=BlocksNoKey),
        replace(DRAINS, deferrals=FreesAKeyWhenItsHeadIsDue),
        LaneModel(
            ["kk."], Budget(1, outages=1, sweeps=1), deferrals=ForgetsClaimedMessages
        ),
        replace(DRAINS, reads_to_the_end=False),
        LaneModel(["kx.", "kx."], number_first=True),
        LaneModel(["jj.", "k.k."], TAKEN_OVER.budget, settles_after_loss=True),
        replace(TAKEN_OVER, reads_log=False),
        replace(TAKEN_OVER, portion=1, asks_for_keys=False),
        LaneModel(["kk."], TAKEN_OVER.budget, one_transaction=False),
        LaneModel(["k.", "xk."], Budget(takeovers=1, raises=1), up_to_floor=False),
        LaneModel(["k.", "xk."], Budget(sweeps=1), asks_who_drew=False),
        LaneModel(["k.k."], Budget(takeovers=1, refusals=1, raises=1), verifies=False),
        LaneModel(["k."], Budget(raises=1, crashes=1), forgets_at_a_crash=False),
        LaneModel(
            ["k.", "xk."], Budget(sweeps=1, raises=1), lane=VerifiesAboveItsFloor
        ),
    ],
    ids=lambda broken: "-".join(
        part
        for part in (
            type(broken).__name__.removeprefix("LaneModel"),
            broken.cursor.__name__.removeprefix("LaneCursor"),
            broken.deferrals.__name__.removeprefix("Deferrals"),
            "number_first" * broken.number_first,
            "settles_after_loss" * broken.settles_after_loss,
            "does_not_read_the_log" * (not broken.reads_log),
            "trusts_a_part_of_the_log" * (not broken.asks_for_keys),
            "marks_without_entry" * (not broken.one_transaction),
            "does_not_read_to_the_end" * (not broken.reads_to_the_end),
            "does_not_ask_who_drew" * (not broken.asks_who_drew),
            "raises_unverified" * (not broken.verifies),
            "raises_above_the_floor" * (not broken.up_to_floor),
            "remembers_beyond_a_crash" * (not broken.forgets_at_a_crash),
            broken.lane.__name__.removeprefix("Lane"),
        )
        if part
    ),
)
def test_a_violated_rule_is_found(broken: LaneModel) -> None:
    with pytest.raises(
        BrokenPromiseError, match=r"the (floor|watermark) is|was published before|never"
    ):
        explore(broken.start(), broken.steps)
