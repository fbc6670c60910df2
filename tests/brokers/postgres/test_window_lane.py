"""A lane whose messages are handled in the same process."""

import time
from typing import Any, cast

from pillarbox.inbox.sources.postgres.held_message import Keeper
from pillarbox.inbox.sources.postgres.window_lane import WindowLane
from pillarbox.outbox.log.lanes.batch import PUBLISHED, SCHEDULED, ClaimedMessage
from pillarbox.outbox.log.lanes.keys import LogOfKey
from pillarbox.outbox.log.lanes.lane import Extent
from pillarbox.outbox.log.position import Position, Snapshot
from pillarbox.outbox.log.progress import Progress
from pillarbox.outbox.log.view import ReadView
from pillarbox.outbox.message import Message
from pillarbox.outbox.message_id import uuid7
from tests.models.waiting import DAY, NOW


def claimed(seq: int) -> ClaimedMessage:
    message = Message("t", b"", key="k")
    return ClaimedMessage(16, seq, uuid7(), NOW, 0, "k", "t", message, None)


def settle(lane: WindowLane) -> Any:
    settlement = lane.settle(time.monotonic(), is_leaving=True)
    assert settlement is not None
    lane.stored(settlement)
    return settlement


def test_a_key_goes_on_that_a_refresh_has_blocked_because_its_handler_ran() -> None:
    lane = WindowLane(16, {}, cast("Keeper", None))
    view = ReadView(Snapshot(10, 10), 10, 2, 1)
    lane.continue_with(
        Progress.take_over({DAY: Position()}, (), view.snapshot, view.next_xid, {})
    )
    extent = Extent(2, view, is_cut=False)
    (held,) = lane.take([claimed(1)], [(claimed(2), SCHEDULED)], extent, 0.0)
    assert settle(lane).opened == [held]

    of_key = LogOfKey(
        "k", has_head=True, has_ended=False, seq=1, due_at=NOW, created_at=NOW
    )
    lane.keys.read(of_key)
    assert lane.keys.is_blocked("k")
    lane.end(held, PUBLISHED, time.monotonic())
    settle(lane)
    assert "k" in lane.keys.draining
