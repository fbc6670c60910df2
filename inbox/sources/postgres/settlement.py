"""The next settlement of a lane whose messages are handled in this process."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from pillarbox.inbox.sources.postgres.held_message import HeldMessage
from pillarbox.outbox.log.lanes.batch import Disposition
from pillarbox.outbox.log.lanes.lane import Advance
from pillarbox.outbox.log.settle import Decided, Settlement

if TYPE_CHECKING:
    from pillarbox.inbox.sources.postgres.window_lane import WindowLane


class LaneSettlement(NamedTuple):
    """The next settlement of a lane.

    Attributes:
        advance: its positions; None if these stay.
        published: how many new messages were handled.
        others: messages that get an entry.
        log: those of them that had none so far, and are covered from now on.
        opened: those of them whose handlers run.
        earlier: those that precede others of their key, and aren't covered.
        taken: what of the lane is settled, or kept.
        kept: what has to wait for handlers.
    """

    advance: "Advance | None"
    published: int
    others: Sequence[Decided]
    log: Sequence[Decided]
    opened: Sequence[HeldMessage]
    earlier: Sequence[HeldMessage]
    taken: "Unsettled"
    kept: "Unsettled"


class Unsettled(NamedTuple):
    """Messages whose handling has ended, but isn't stored.

    Attributes:
        ended: messages that were handled.
        refused: messages that are handled again later, or were given back.
        withheld: messages that were not handed over.
    """

    ended: list[tuple[HeldMessage, Disposition]]
    refused: list[tuple[HeldMessage, Disposition]]
    withheld: list[Decided]

    @classmethod
    def none(cls) -> Self:
        """Return lists to add to."""
        return cls([], [], [])


def settlement_of(
    parts: Sequence[tuple["WindowLane", LaneSettlement]],
) -> Settlement:
    """Return the settlement of all these lanes."""
    return Settlement(
        [lane for lane, _ in parts],
        sum(part.published for _, part in parts),
        [one for _, part in parts for one in part.others],
        [part.advance for _, part in parts if part.advance is not None],
        frozenset(),
    )
