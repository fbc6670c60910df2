"""No row of a log is skipped, repeated or out of order, in any interleaving."""

from typing import Any, Self

import pytest
from typing_extensions import override

from pillarbox.outbox.log.progress import Progress
from tests.models.explore import BrokenPromiseError, explore, models
from tests.models.log import Budget, LogModel

SMALL = {
    "three writers, one of which may roll back": LogModel(["kk.", "kj?", "j."]),
    "three writers, two rows in a claim": LogModel(["kk.", "kj?", "j."], most=2),
    "three late rows": LogModel(["x---.", "--.", "k."], most=2),
    "savepoints": LogModel(["k(.", "(-.", "k."]),
    "a savepoint that is rolled back": LogModel(["(-)k.", "--.", "k."]),
    "a prepared transaction": LogModel(["-kp?", "k-.", "-."]),
    "a refusal": LogModel(["kk.", "kj.", "k."], Budget(refusals=1)),
    "two refusals": LogModel(["kkk.", "k."], Budget(refusals=2), most=2),
    "a refusal and late rows": LogModel(["xk.", "kj.", "-."], Budget(refusals=1)),
    "scheduled rows": LogModel(["S-.", "kS.", "k."]),
    "a scheduled row and a refusal": LogModel(
        ["Sk.", "k."], Budget(refusals=1, kills=1), most=2
    ),
    "a replay": LogModel(["k-.", "x-."], Budget(refusals=1, replays=1)),
    "an outage, and answers for a part of a batch": LogModel(
        ["kk.", "xk-."], Budget(outages=1, partial=1), most=2
    ),
    "two kills between any two statements": LogModel(["kk.", "xj-."], Budget(kills=2)),
    "a kill and a refusal": LogModel(["kk.", "xk."], Budget(refusals=1, kills=1)),
    "a lost lease": LogModel(["kk.", "xk."], Budget(refusals=1, losses=1)),
    "a crash of the server and a refusal": LogModel(
        ["kk.", "xk."], Budget(refusals=1, crashes=1)
    ),
    "a crash of the server, rows of other topics and late rows": LogModel(
        ["xO.", "kO."], Budget(crashes=1), most=2
    ),
    "a crash of the server that is the broker, too": LogModel(
        ["k-.", "x-."], Budget(crashes=1), most=2, is_broker=True, trusts_acks=False
    ),
    "a reader that starts now": LogModel(["kk.", "xk.", "j."], from_now=True),
    "a reader that starts now, two rows in a claim": LogModel(
        ["x-k.", "-.", "k."], most=2, from_now=True
    ),
    "rows of other topics": LogModel(["kO.", "xO-.", "k."], most=2),
    "rows of other topics, a refusal and a kill": LogModel(
        ["kO.", "xOk."], Budget(refusals=1, kills=1), most=2
    ),
    "rows of other topics and a lost lease": LogModel(
        ["OO.", "xk."], Budget(losses=1), most=2
    ),
    "rows of other topics and a restored dump": LogModel(
        ["xO-.", "k."], Budget(restores=1)
    ),
    "rows of other topics, and a day that is dropped": LogModel(
        ["kO.", "O."], Budget(midnights=1, drops=1), days=2
    ),
    "a reader of some topics that starts now": LogModel(
        ["xO-.", "kO."], most=2, from_now=True
    ),
    "a topic that is added, and a kill": LogModel(["xN.", "kN."], Budget(kills=1)),
    "a topic from the oldest row on, of a reader that starts now": LogModel(
        ["xN.", "N."],
        Budget(kills=1),
        most=2,
        from_now=True,
        from_oldest=True,
        is_ordered=False,
    ),
    "a reader that returns, a refusal and a late row": LogModel(
        ["k.", "xk."], Budget(refusals=1, returns=1), most=2
    ),
    "a reader that returns, and a kill": LogModel(
        ["k.", "xk."], Budget(kills=1, returns=1), most=2
    ),
    "a row inserted by hand, without floors": LogModel(
        ["kk.", "xk."], Budget(by_hand=1), has_floors=False
    ),
    "a sequence set back, without floors": LogModel(
        ["--.", "x-.", "-."], Budget(resets=1), has_floors=False, is_ordered=False
    ),
    "a sequence set back by two, two rows in a claim and a kill": LogModel(
        ["--.", "x-."],
        Budget(resets=1, kills=1),
        most=2,
        set_back=2,
        slack=2,
        is_ordered=False,
    ),
    "cached numbers, without floors or order": LogModel(
        ["--.", "--.", "k."], cache=2, has_floors=False, is_ordered=False
    ),
    "numbers drawn before the id, without floors": LogModel(
        ["-.", "-.", "k."], seq_first=True, has_floors=False
    ),
    "midnight and late rows": LogModel(["x-k.", "-k."], Budget(midnights=1), days=2),
    "midnight and a clock that steps back": LogModel(
        ["xk-.", "kk."], Budget(midnights=1, steps_back=1), days=2
    ),
    "late rows of two days and a kill": LogModel(
        ["x-k-.", "-k."], Budget(kills=1, midnights=1), days=2
    ),
    "midnight and a refusal": LogModel(
        ["xk-.", "kk."], Budget(refusals=1, midnights=1), most=2, days=2
    ),
    "midnight and a restored dump": LogModel(
        ["xk.", "k-."], Budget(restores=1, midnights=1), days=2
    ),
    "midnight, a refusal and a restored dump": LogModel(
        ["xk.", "k."], Budget(refusals=1, restores=1, midnights=1), days=2
    ),
    "a day that is dropped": LogModel(
        ["k-.", "k."], Budget(refusals=1, midnights=1, drops=1), days=2
    ),
    "a day that is dropped, late rows and a kill": LogModel(
        ["xk.", "-."], Budget(kills=1, midnights=1, drops=1), days=2
    ),
}
LARGE = {
    "a topic from the oldest row on, a kill and a lost lease": LogModel(
        ["xN.", "N."],
        Budget(kills=1, losses=1),
        most=2,
        from_oldest=True,
        is_ordered=False,
    ),
    "a topic that is added, and a lost lease": LogModel(
        ["N.", "N."], Budget(losses=1), most=2
    ),
    "a topic that is added beside late rows": LogModel(["xN.", "kN.", "N."], most=2),
    "midnight, a refusal and a crash of the server": LogModel(
        ["xk.", "k."], Budget(refusals=1, crashes=1, midnights=1), days=2
    ),
    "a sequence set back by two, which may have caught up": LogModel(
        ["--.", "-.", "-."], Budget(resets=1), set_back=2, slack=2, is_ordered=False
    ),
    "a day that is read later": LogModel(
        ["k-.", "-."],
        Budget(kills=1, midnights=1, steps_back=1),
        days=2,
        lists_days=True,
        is_ordered=False,
    ),
    "a topic that is added to a reader that starts now": LogModel(
        ["xN.", "kN."], Budget(kills=1), most=2, from_now=True
    ),
    "a day that is dropped and a lost lease": LogModel(
        ["k.", "k."], Budget(losses=1, midnights=1, drops=1), days=2
    ),
    "midnight and a lost lease": LogModel(
        ["xk.", "k-."], Budget(losses=1, midnights=1), days=2
    ),
    # An owner from before has no handler for these rows, so their order is not checked.
    "a topic from the oldest row on, beside late rows": LogModel(
        ["xN.", "N.", "-."], most=2, from_oldest=True, is_ordered=False
    ),
    "a reader that returns, a kill and a lost lease": LogModel(
        ["k.", "k."], Budget(kills=1, losses=1, returns=1), most=2
    ),
    "a topic that is added, a refusal and a lost lease": LogModel(
        ["N.", "xN."], Budget(refusals=1, losses=1), most=2
    ),
    "two midnights, a clock that steps back and a kill": LogModel(
        ["x-k.", "k-."], Budget(kills=1, midnights=2, steps_back=1), days=2
    ),
    "two lost leases and a kill": LogModel(["k.", "xk."], Budget(losses=2, kills=1)),
    "a lost lease and late rows": LogModel(
        ["xk-.", "kk."], Budget(refusals=1, losses=1), most=2
    ),
    "late rows of a day that the last claim didn't store": LogModel(
        ["x--.", "---."], Budget(kills=1, midnights=2), days=3
    ),
    "a lost lease, and the session ended": LogModel(
        ["kk.", "xk."], Budget(refusals=1, losses=1), fence="session"
    ),
    "a sequence set back by two, and late rows": LogModel(
        ["--.", "x-.", "-."], Budget(resets=1), set_back=2, slack=2, is_ordered=False
    ),
    "two late rows, cut": LogModel(["x-k.", "-k.", "jj."]),
    "a prepared transaction and a crash of the server": LogModel(
        ["-p?", "k.", "k."], Budget(crashes=1)
    ),
    "two lost leases, a kill, and the session ended": LogModel(
        ["k.", "xk."], Budget(losses=2, kills=1), fence="session"
    ),
    "a crash of the server, or a failover": LogModel(
        ["kk.", "x-.", "k."], Budget(crashes=1)
    ),
    "a restored dump": LogModel(["kk.", "x-.", "-."], Budget(restores=1)),
    "a restored dump and a refusal": LogModel(
        ["kk.", "xk.", "-."], Budget(refusals=1, restores=1), most=2
    ),
    "midnight, late rows and a kill": LogModel(
        ["x-k.", "k-.", "k."], Budget(kills=1, midnights=1), most=2, days=2
    ),
    "midnight and two lost leases": LogModel(
        ["xk.", "k."], Budget(losses=2, midnights=1), most=2, days=2
    ),
    "midnight, a refusal and a lost lease": LogModel(
        ["xk.", "k-."], Budget(refusals=1, losses=1, midnights=1), days=2
    ),
    "midnight, a refusal, a clock that steps back and a kill": LogModel(
        ["x-k.", "k."],
        Budget(refusals=1, kills=1, midnights=1, steps_back=1),
        days=2,
    ),
    "midnight, a refusal, a kill and a restored dump": LogModel(
        ["x-k.", "k."],
        Budget(refusals=1, kills=1, restores=1, midnights=1),
        most=2,
        days=2,
    ),
    "midnight, a restored dump and a lost lease": LogModel(
        ["xk.", "k."], Budget(losses=1, restores=1, midnights=1), days=2
    ),
}


class ClaimsAsOfNow(Progress):
    """Continues a cut claim of late rows with a newer snapshot."""

    __slots__ = ()

    @override
    def claimed(self, *args: Any, **kwargs: Any) -> Self:
        return super().claimed(*args, **kwargs)._replace(as_of=None)


BROKEN = {
    "a reader returns to what waits": LogModel(
        ["k."], Budget(refusals=1, returns=1), return_ends_entries=False
    ),
    "a process settles what it had before its reader returned": LogModel(
        ["k."], Budget(refusals=1, returns=1, kills=1), return_moves_fence=False
    ),
    "a process settles what it had before a topic began at the oldest row": LogModel(
        ["-.", "N."], most=2, from_oldest=True, oldest_moves_fence=False
    ),
    "a topic from the oldest row on without entries of what was passed": LogModel(
        ["N.", "-."], from_oldest=True, oldest_adds_entries=False
    ),
    "a relay remembers the topics": LogModel(["N.", "N."], remembers_topics=True),
    "a topic begins before claims can see it": LogModel(
        ["k.", "N."], begins_at_once=True
    ),
    "a takeover starts where the last topic begins": LogModel(
        ["k.", "N."], starts_at_topic=True
    ),
    "ignores late rows": LogModel(["xk.", "-."], claims_late=False),
    "takes over without a look for late rows": LogModel(
        ["xk.", "-."], Budget(kills=1), finds_late=False
    ),
    "passes rows that it has seen, not taken": LogModel(
        ["--.", "-."], up_to_last_seen=True
    ),
    "continues a cut claim as of now": LogModel(
        ["x--.", "--.", "x-."], progress=ClaimsAsOfNow
    ),
    "passes late rows beyond those of other topics that it has read": LogModel(
        ["xO.", "xk."], most=1, up_to_last_seen=True
    ),
    "stores a snapshot of the settlement": LogModel(
        ["-.", "-."], snapshot_of_claim=False
    ),
    "rows have ids of subtransactions": LogModel(
        ["(.", "-."], subxids=True, has_floors=False
    ),
    "reads on a standby": LogModel(["xk.", "-."], on_standby=True, has_floors=False),
    "no fence": LogModel(["kk.", "xk."], Budget(refusals=1, losses=1), fence="nothing"),
    "the position commits before the entries": LogModel(
        ["kk."], Budget(refusals=1, kills=1), most=2, settles="position"
    ),
    "the entries commit before the position": LogModel(
        ["kk."], Budget(refusals=1, kills=1), most=2, settles="entries"
    ),
    "a restored dump is read without a base": LogModel(
        ["x-.", "-."], Budget(restores=1), rebases=False, has_floors=False
    ),
    "xmax counts as the next id": LogModel(["x-.", "x-.", "-."], floors_by_xmax=True),
    "numbers drawn before the id, with floors": LogModel(
        ["-.", "-.", "k."], seq_first=True
    ),
    "cached numbers, with floors": LogModel(
        ["-.|-.", "-.", "-."], cache=2, is_ordered=False
    ),
    "a row inserted by hand, with floors": LogModel(
        ["-.", "-.", "k."], Budget(by_hand=1)
    ),
    "a sequence set back, with floors": LogModel(
        ["--.", "-.", "-."], Budget(resets=1), is_ordered=False
    ),
    "a sequence set back by two, and claims read one number again": LogModel(
        ["--.", "--.", "-."], Budget(resets=1), set_back=2, slack=1, is_ordered=False
    ),
    "cached numbers, and the order of keys": LogModel(
        ["-k.", "kk."], cache=2, has_floors=False
    ),
    "settles in another session what it has claimed": LogModel(
        ["-.", "-."], Budget(crashes=1), crosses="batch"
    ),
    "keeps a position that it has advanced in memory": LogModel(
        ["O.", "-."], Budget(crashes=1), crosses="progress"
    ),
    "keeps the floors of another session": LogModel(
        ["-.", "x-.", "-."], Budget(crashes=1), crosses="floors"
    ),
    "trusts the answers of a broker that is lost with the server": LogModel(
        ["-.", "-."], Budget(crashes=1), is_broker=True
    ),
    "the fence stays in a day that is dropped": LogModel(
        ["-.", "-."], Budget(midnights=1, drops=1), days=2, moves_fence=False
    ),
    "a new day gets the position of the day before": LogModel(
        ["-.", "-."],
        Budget(midnights=1, steps_back=1),
        days=2,
        lists_days=True,
        new_days_continue=True,
    ),
}


@pytest.mark.parametrize("model", models(SMALL, LARGE))
def test_every_row_is_published_once_and_in_order(model: LogModel) -> None:
    print(explore(model.start(), model.steps))  # noqa: T201


# It takes as long as many others together.
LONGEST = {"keeps the floors of another session"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=[pytest.mark.variant] * (it in LONGEST)) for it in BROKEN],
)
def test_a_violated_rule_is_found(name: str) -> None:
    model = BROKEN[name]
    with pytest.raises(BrokenPromiseError, match=r"^row .* (was|is) "):
        explore(model.start(), model.steps)
