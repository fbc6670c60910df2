"""No message that waits is lost, or overtaken by one of its key."""

from typing import Self

import pytest
from typing_extensions import override

from pillarbox.outbox.log.lanes.keys import LaneKeys, WaitingClaim, WaitingMessage
from tests.models.explore import BrokenPromiseError, explore, models
from tests.models.waiting import Budget, WaitingModel

SMALL = {
    "a refusal": WaitingModel("kkk", Budget(refusals=1)),
    "a refusal of one of two keys": WaitingModel("kjkj", Budget(refusals=1)),
    "a message without a key that is due again": WaitingModel(
        "-k-", Budget(refusals=1)
    ),
    "a head that is refused twice": WaitingModel("kkk", Budget(refusals=2)),
    "a claim that leaves messages of a draining key": WaitingModel(
        "kkkk", Budget(refusals=1), most=6, fits=1
    ),
    "an outage of the broker": WaitingModel("kjk", Budget(outages=1)),
    "an outage while a key drains": WaitingModel("kkk", Budget(refusals=1, outages=1)),
    "no answer for one of several rows": WaitingModel("kjkj", Budget(partial=1)),
    "no answer while a key drains, and a kill": WaitingModel(
        "kkk", Budget(refusals=1, partial=1, kills=1)
    ),
    "no answer, a cut claim and a lost lease": WaitingModel(
        "kjk", Budget(partial=1, losses=1)
    ),
    "an oversized row and a lost lease": WaitingModel("kO", Budget(losses=1)),
    "a kill while a key drains": WaitingModel("kkk", Budget(refusals=1, kills=1)),
    "a former relay that settles late": WaitingModel(
        "kjk", Budget(refusals=1, losses=1)
    ),
    "a log of two keys that is read in portions": WaitingModel(
        "jkj", Budget(refusals=1, kills=1), portion=1
    ),
    "portions of a log with two heads, and a kill": WaitingModel(
        "kk", Budget(refusals=2, kills=1), portion=1
    ),
    "a crash of the server": WaitingModel("kkk", Budget(refusals=1, crashes=1)),
}
LARGE = {
    "an oversized row and a kill": WaitingModel("kOk", Budget(refusals=1, kills=1)),
    "portions, two keys, two refusals and a kill": WaitingModel(
        "jkkk", Budget(refusals=2, kills=1), portion=1
    ),
    "three rows in a claim, two lost leases": WaitingModel(
        "kjkj", Budget(refusals=1, losses=2), most=3
    ),
    "four rows in a claim, two answers missing": WaitingModel(
        "kjkjk", Budget(refusals=1, partial=2), most=4
    ),
    "portions, no answer and a lost lease": WaitingModel(
        "kkjk", Budget(refusals=1, partial=1, losses=1), portion=1
    ),
    "a crash, a kill and two refusals": WaitingModel(
        "kkjk", Budget(refusals=2, kills=1, crashes=1)
    ),
    "everything at once": WaitingModel(
        "kOjk", Budget(refusals=1, outages=1, partial=1, losses=1)
    ),
}


@pytest.mark.parametrize("model", models(SMALL, LARGE))
def test_every_row_is_published_in_order(model: WaitingModel) -> None:
    print(explore(model.start(), model.steps))  # noqa: T201


class BlocksNoKey(LaneKeys):
    """Continues with a key although one of its messages was refused."""

    @override
    def block(self, key: str) -> None:
        pass


class FreesAKeyWhenItsHeadIsDue(LaneKeys):
    """Drains a key, and publishes its new messages meanwhile."""

    @override
    def drain(self, key: str) -> None:
        super().drain(key)
        self.blocked.discard(key)


class ForgetsClaimedMessages(LaneKeys):
    """Doesn't read a key again after the broker accepted only some of its messages."""

    @override
    def release(self, place: WaitingMessage) -> None:
        if place.cause != "blocked":
            super().release(place)


class StopsThoughTheHeadIsDue(LaneKeys):
    """Relies on what it read, although a scan has found the key's head since."""

    @override
    def claimed(self, number: int, claim: WaitingClaim) -> None:
        self._restarted.clear()
        super().claimed(number, claim)


class ForgetsWhatIsLeft(WaitingClaim):
    """Frees a key although not all of its messages fit into the claim."""

    @override
    def cut(self, count: int) -> Self:
        return self


REFUSED = Budget(refusals=1)
KILLED = Budget(refusals=1, kills=1)
EACH = ("refused", "blocked", "unknown", "aside", "settled")
BROKEN = {
    "blocks no key": WaitingModel("kkk", REFUSED, BlocksNoKey),
    "frees a key when its head is due": WaitingModel(
        "kkkk", REFUSED, FreesAKeyWhenItsHeadIsDue
    ),
    "forgets claimed messages": WaitingModel(
        "kkk", Budget(refusals=1, outages=1), ForgetsClaimedMessages
    ),
    "stops though the head is due": WaitingModel(
        "kk", Budget(refusals=2, kills=1), StopsThoughTheHeadIsDue, portion=1
    ),
    "forgets what is left": WaitingModel(
        "kkkk", REFUSED, most=6, fits=1, waiting_claim=ForgetsWhatIsLeft
    ),
    "does not read to the end": WaitingModel("kkkk", REFUSED, reads_to_the_end=False),
    "no fence": WaitingModel("kjk", Budget(refusals=1, losses=1), has_fence=False),
    "does not read the log": WaitingModel("kkk", KILLED, reads_log=False),
    "trusts a part of the log": WaitingModel(
        "jkk", Budget(refusals=2, kills=1), portion=1, asks_for_keys=False
    ),
    "remembers beyond a crash": WaitingModel(
        "kjk", Budget(refusals=1, crashes=1), doubts=False
    ),
    **{
        f"inserts no entry {cause}": WaitingModel(
            "kjkO", Budget(refusals=1, partial=1), logs=[c for c in EACH if c != cause]
        )
        for cause in EACH
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_violated_rule_is_found(name: str) -> None:
    model = BROKEN[name]
    with pytest.raises(BrokenPromiseError, match=r"^row .* (was|is|has) "):
        explore(model.start(), model.steps)
