"""Relays that come and go share the lanes."""

import math
import time

import pytest

from outbox.lane import PRIORITIES, lanes_of
from tests.acceptance.fixtures import Figures
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.fixtures.processes import RunningProcess
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.fault

LEASE = 2.0
HEARTBEAT = LEASE / 10
ALL = frozenset(lane for priority in PRIORITIES for lane in lanes_of(priority))


def is_shared(inspection: Inspection, members: list[RunningProcess]) -> bool:
    held = inspection.lanes()
    return (
        set(held) == {relay.pid for relay in members}
        and all(
            len(lanes.intersection(lanes_of(priority)))
            <= math.ceil(len(lanes_of(priority)) / len(members))
            for lanes in held.values()
            for priority in PRIORITIES
        )
        and set().union(*held.values()) == ALL
    )


def test_running_relays_share_the_lanes(
    relays: Relays, sink: Sink, inspection: Inspection, figures: Figures
) -> None:
    members: list[RunningProcess] = []

    def settle(what: str, *, within: float) -> None:
        since = time.monotonic()
        wait_for(
            f"{len(members)} share",
            lambda: is_shared(inspection, members),
            seconds=within,
        )
        figures(f"shared after {what}", f"{time.monotonic() - since:.2f} s")

    for _ in range(4):
        members.append(relays.start(sink.url, f"--lease={LEASE}s"))
        settle(f"start of {len(members)}", within=10 * HEARTBEAT)
    members.pop(1).kill()
    settle("a kill", within=10 * HEARTBEAT)
    members.pop(0).terminate()
    settle("an end in order", within=10 * HEARTBEAT)
    members[0].freeze()
    frozen = members.pop(0)
    settle("a freeze", within=LEASE + 10 * HEARTBEAT)
    frozen.thaw()
    members.append(frozen)
    settle("a thaw", within=10 * HEARTBEAT)
