"""Handlers of messages of the outbox end in any order; nothing is lost or overtaken."""

import pytest
from typing_extensions import override

from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.inbox.sources.postgres.settlement import LaneSettlement
from pillarbox.inbox.sources.postgres.window_lane import OPEN, WindowLane
from tests.models.explore import BrokenPromiseError, explore, models
from tests.models.handlers import Budget, HandlersModel

SMALL = {
    "messages of one key": HandlersModel("kk|k"),
    "a failure": HandlersModel("kk|", Budget(failures=1)),
    "a failure, and one that runs for long": HandlersModel(
        "kk|", Budget(failures=1, opens=1)
    ),
    "messages that are given back": HandlersModel("kkk|", Budget(returns=1, opens=1)),
    "a kill while some run for long": HandlersModel("k-|", Budget(opens=1, kills=1)),
    "a failure and a kill": HandlersModel("kk|", Budget(failures=1, kills=1)),
    "a lane that is lost while handlers run": HandlersModel("kk|k", Budget(losses=1)),
    "a lane that is lost twice": HandlersModel("kk|", Budget(losses=2)),
    "a lane that is lost while some run for long": HandlersModel(
        "k-|", Budget(opens=1, losses=1)
    ),
    "messages that are given back, and a lost lane": HandlersModel(
        "kk|", Budget(returns=1, losses=1)
    ),
    "a scheduled message": HandlersModel("kK|"),
    "a row that commits late": HandlersModel("+k|k", Budget(opens=1)),
}
LARGE = {
    "a failure, of two keys": HandlersModel("kkj|", Budget(failures=1, opens=1)),
    "a scheduled message, and one that is given back": HandlersModel(
        "kKk|", Budget(returns=1, opens=1)
    ),
    "a process that settles late what runs for long": HandlersModel(
        "k-k|", Budget(opens=1, losses=1)
    ),
    "a failure and a lost lane": HandlersModel("kk|", Budget(failures=1, losses=1)),
    "a scheduled message, and a later one": HandlersModel("kK|k"),
    "a scheduled message and a failure": HandlersModel("kK|", Budget(failures=1)),
    "a row that commits late, and a failure": HandlersModel("k+|-", Budget(failures=1)),
}


@pytest.mark.parametrize("model", models(SMALL, LARGE))
def test_every_message_is_handled_in_order_and_settled(model: HandlersModel) -> None:
    print(explore(model.start(), model.steps))  # noqa: T201


class RunsTwice(WindowLane):
    """Hands a message over although its handler from before still runs."""

    @override
    def _is_behind(self, held: HeldMessage) -> bool:
        return False


class ForgetsRefusals(WindowLane):
    """Doesn't remember which keys wait until the log has their messages."""

    @override
    def _closed(self) -> set[str | None]:
        return set()


class OpensNothing(WindowLane):
    """Gives no entries to messages that are passed while their handlers run."""

    @override
    def _running(self) -> list[HeldMessage]:
        return []


class LogsNoRun(WindowLane):
    """Passes messages whose handlers run."""

    @override
    def settle(self, now: float, *, is_leaving: bool) -> LaneSettlement | None:
        part = super().settle(now, is_leaving=is_leaving)
        if part is None:
            return None
        return part._replace(others=[one for one in part.others if one[1] is not OPEN])


BROKEN = {
    "runs twice": HandlersModel("k|", Budget(losses=1), RunsTwice),
    "forgets refusals": HandlersModel("kk|k", Budget(failures=1), ForgetsRefusals),
    "opens nothing": HandlersModel("jk|", Budget(failures=1), OpensNothing),
    "logs no run": HandlersModel("k-|", Budget(opens=1, kills=1), LogsNoRun),
    "withdraws nothing": HandlersModel("kk|", Budget(failures=1), withdraws=False),
    "no fence": HandlersModel("kk|", Budget(failures=1, losses=1), has_fence=False),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_violated_rule_is_found(name: str) -> None:
    model = BROKEN[name]
    with pytest.raises(BrokenPromiseError, match=r"^row .* (was|is|has) "):
        explore(model.start(), model.steps)
