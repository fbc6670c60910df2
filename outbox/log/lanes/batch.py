"""The messages of one claim, and their dispositions."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from pillarbox.outbox.log.lanes.keys import WAITING, WaitingMessage
from pillarbox.outbox.log.lanes.lane import Extent, Lane
from pillarbox.outbox.message import Message


class ClaimedMessage(NamedTuple):
    """A message that was read; if it isn't valid, the problem with its row.

    Attributes:
        message: None if it was not loaded.
        waiting: its entry in the log; None if it is claimed for the first time.
        due_at: when it became due, if not on creation: the time it was scheduled for,
            or when its replay was requested.
    """

    lane: int
    seq: int
    id: Any
    created_at: datetime
    attempts: int
    key: str | None
    topic: str
    message: Message | None
    problem: str | None
    waiting: WaitingMessage | None = None
    due_at: datetime | None = None

    @property
    def identity(self) -> Hashable:
        """Unique, even after a failover to a server without the message."""
        run = 0 if self.waiting is None else self.waiting.run
        return self.id, self.created_at, self.seq, run

    @property
    def traceparent(self) -> str | None:
        """The trace context with which it was added, if it was read."""
        return None if self.message is None else self.message.headers.get("traceparent")


class Disposition(NamedTuple):
    """The outcome of a claimed message: published, waiting, or dead-lettered.

    Attributes:
        cause: that of its entry in the log; or `published` or `dead_lettered`; or
            `ended`, if the log has an entry for a message that doesn't exist; or
            `cancelled`; or
            `untouched`, if it is claimed again as if this claim had not been.
        delay: the seconds until it is due; None if it waits only for its key.
        charge: the number of attempts to count.
    """

    cause: str
    reason: str | None = None
    delay: float | None = None
    charge: int = 0

    @property
    def waits(self) -> bool:
        """Whether the log says that it waits."""
        return self.cause in WAITING


PUBLISHED: Final = Disposition("published")
ENDED: Final = Disposition("ended")
CANCELLED: Final = Disposition("cancelled")
UNTOUCHED: Final = Disposition("untouched")
SCHEDULED: Final = Disposition("scheduled")
BLOCKED: Final = Disposition("blocked")
"""Its key is blocked."""
UNKNOWN: Final = Disposition("unknown", delay=0)
"""It may have been published, or could not be loaded."""
OVERSIZED: Final = Disposition("aside", delay=0)
"""It is so large that its lane doesn't wait while it is moved to the dead letters."""


@dataclass(slots=True)
class ClaimedBatch:
    """The messages of one claim, lane by lane, each lane in order.

    Attributes:
        rows: to be published.
        withheld: messages that are not published now, with the reason.
        extents: how far lanes were read whose positions are to be stored.
        is_cut: whether the claim left messages behind.
    """

    lanes: Sequence[Lane]
    rows: list[ClaimedMessage] = field(default_factory=list)
    withheld: list[tuple[ClaimedMessage, Disposition]] = field(default_factory=list)
    extents: dict[int, Extent] = field(default_factory=dict)
    is_cut: bool = False

    def release(self) -> Sequence[Lane]:
        """Keep only the lanes with something to settle; return the others."""
        used = {row.lane for row in self.rows} | {row.lane for row, _ in self.withheld}
        used |= self.extents.keys()
        released = [lane for lane in self.lanes if lane.number not in used]
        self.lanes = [lane for lane in self.lanes if lane.number in used]
        return released

    def by_lane(self) -> Sequence["ClaimedBatch"]:
        """Divide it, so that each lane is settled as soon as its messages allow."""
        return [
            ClaimedBatch(
                [lane],
                rows=[row for row in self.rows if row.lane == lane.number],
                withheld=[one for one in self.withheld if one[0].lane == lane.number],
                extents={n: it for n, it in self.extents.items() if n == lane.number},
            )
            for lane in self.lanes
        ]
