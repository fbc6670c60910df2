"""A consumer that reads the outbox itself loses and overtakes nothing."""

import pytest

from tests.models.direct import DirectModel
from tests.models.explore import BrokenPromiseError, explore, models
from tests.models.log import Budget
from tests.models.test_window import IgnoresWhatIsHeld

SMALL = {
    "a scheduled row, a late one and a kill": DirectModel(
        ["xk.", "S."], Budget(kills=1), most=2
    ),
    "a scheduled row, a replay and a late one": DirectModel(
        ["xS.", "-k."], Budget(replays=1), most=2
    ),
    "a scheduled row, a replay and a kill": DirectModel(
        ["kS.", "k."], Budget(kills=1, replays=1), most=2
    ),
    "a failure, a late row and a kill": DirectModel(
        ["xk.", "k."], Budget(kills=1, refusals=1), most=2
    ),
    "a failure, and a delivery that stays open": DirectModel(
        ["kk.", "k."], Budget(refusals=1, opened=1), most=2
    ),
    "scheduled rows, cut, and a kill": DirectModel(["x-S.", "k."], Budget(kills=1)),
    "midnight, a scheduled row and a kill": DirectModel(
        ["xS.", "k."], Budget(kills=1, midnights=1), days=2
    ),
    "rows found ahead, and a late one": DirectModel(["k.", "-."], Budget(ahead=2)),
    "failures of rows found ahead and in order": DirectModel(
        ["-kk."], Budget(refusals=2, ahead=2)
    ),
    "a row found ahead, a replay and a kill": DirectModel(
        ["jk."], Budget(kills=1, replays=1, ahead=1)
    ),
    "a replay and a lost lane": DirectModel(
        ["kS."], Budget(losses=1, replays=1), most=2
    ),
}
LARGE = {
    "rows found ahead, a failure and a kill": DirectModel(
        ["jkk."], Budget(kills=1, refusals=1, ahead=2)
    ),
    "rows found ahead, a replay, a late one and a kill": DirectModel(
        ["jk.", "k."], Budget(kills=1, replays=1, ahead=1)
    ),
    "rows found ahead, a late one of their key and a kill": DirectModel(
        ["k.", "-.|k."], Budget(kills=1, ahead=2)
    ),
    "more rows found ahead, a failure and a kill": DirectModel(
        ["jkkk."], Budget(kills=1, refusals=1, ahead=3)
    ),
    "everything but a lost lane": DirectModel(
        ["xk.", "kS."], Budget(kills=1, refusals=1, replays=1), most=2
    ),
    "a scheduled row, a late one and a lost lane": DirectModel(
        ["xk.", "S."], Budget(losses=1), most=2
    ),
    "a failure and a lost lane": DirectModel(
        ["kk.", "k."], Budget(losses=1, refusals=1), most=2
    ),
    "rows found ahead, a failure and a lost lane": DirectModel(
        ["k.", "-k."], Budget(losses=1, refusals=1, ahead=1)
    ),
    "a row found ahead of another of its key, a failure and a lost lane": DirectModel(
        ["-kk."], Budget(losses=1, refusals=1, ahead=1)
    ),
    "rows found ahead, late ones, midnight and a kill": DirectModel(
        ["xk.", "-k."], Budget(kills=1, midnights=1, ahead=2), days=2
    ),
    "late rows, cut, a scheduled one, a delivery that stays open": DirectModel(
        ["x-S.", "--."], Budget(kills=1, opened=1)
    ),
}
FAILURE = Budget(refusals=1)
BROKEN = {
    "stores a position beyond what is held": DirectModel(
        ["x-S.", "-."], Budget(kills=1), most=2, window=IgnoresWhatIsHeld
    ),
    "passes a scheduled row without an entry": DirectModel(
        ["xS.", "k."], most=2, logs=False
    ),
    "adds an entry above the position": DirectModel(
        ["kS.", "k."], most=2, logs_above=True
    ),
    "lets an entry wait for a handler": DirectModel(["kS."], most=2, opens=False),
    "does not read the log": DirectModel(["kk.", "k."], FAILURE, 2, reads_log=False),
    "searches a lane with a late row": DirectModel(
        ["k.", "-.|k."], Budget(ahead=1), spares_late=False
    ),
    "searches beyond a row that may commit": DirectModel(
        ["k.", "-.|k."], Budget(ahead=2), has_floors_ahead=False
    ),
    "goes on with a key after a failure ahead": DirectModel(
        ["-kk."], Budget(refusals=1, ahead=2), waits_ahead=False
    ),
    "logs a row ahead without those of its key in hand": DirectModel(
        ["jkk."], Budget(refusals=1, ahead=3, kills=1), logs_earlier=False
    ),
    "claims what the log has": DirectModel(["-k."], Budget(ahead=1), asks_log=False),
    "no fence": DirectModel(["kS."], Budget(losses=1), 2, has_fence=False),
}


@pytest.mark.parametrize("model", models(SMALL, LARGE))
def test_every_row_is_handled_in_order(model: DirectModel) -> None:
    print(explore(model.start(), model.steps))  # noqa: T201


@pytest.mark.parametrize("name", BROKEN)
def test_a_violated_rule_is_found(name: str) -> None:
    model = BROKEN[name]
    with pytest.raises(BrokenPromiseError, match=r"^row .* (was|is) "):
        explore(model.start(), model.steps)
