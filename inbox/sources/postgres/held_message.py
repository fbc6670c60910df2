"""A message that was handed over, until it is settled."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pillarbox.outbox.log.lanes.batch import ClaimedMessage, Disposition
from pillarbox.outbox.log.lanes.keys import WaitingMessage
from pillarbox.outbox.log.window import Place, Window

if TYPE_CHECKING:
    from pillarbox.inbox.sources.postgres.window_lane import WindowLane
    from pillarbox.outbox.message import Message

NO_NUMBER: Final = -1
"""Of an entry that this process has just added."""


class Keeper(Protocol):
    """Hands messages over, and settles them."""

    def may_begin(self, held: "HeldMessage") -> bool:
        """Return whether the handler of a message may begin."""

    def end(self, held: "HeldMessage", outcome: Disposition | None) -> None:
        """Record how the handler of a message has ended."""


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that was handed over, until it is settled.

    Attributes:
        row: as it was claimed last.
        window: that of its lane at that time.
        since: when it was claimed first, as `time.monotonic()`.
        is_open: its handler has not ended.
        is_ahead: a search has found it, no claim has reached it, and the log doesn't
            have it.
    """

    row: ClaimedMessage
    lane: "WindowLane"
    window: Window
    since: float
    is_open: bool = True
    is_ahead: bool = False

    @property
    def message(self) -> "Message":
        """The message, as far as it could be read."""
        assert self.row.message is not None
        return self.row.message

    @property
    def place(self) -> Place:
        """Its place in the window."""
        return self.row.seq, self.row.created_at

    def opened(self) -> None:
        """Record that the log says that its handler runs."""
        row, self.is_ahead = self.row, False
        self.row = row._replace(
            waiting=WaitingMessage(
                row.lane,
                row.seq,
                row.id,
                row.created_at,
                0,
                row.attempts,
                NO_NUMBER,
                "open",
                row.key,
            )
        )

    def begin(self) -> bool:
        """Return whether it may be started: its lane has been leased all the time."""
        return self.lane.keeper.may_begin(self)

    def end(self, outcome: Disposition | None) -> None:
        """Record its outcome, once; None: it was not started."""
        self.lane.keeper.end(self, outcome)
