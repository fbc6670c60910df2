"""What a source knows about earlier starts of a message."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Delivered:
    """The broker says whether it delivered the message before.

    Attributes:
        before: whether it did, to a process that may have started it.
        times: how many processes died holding it, if the broker counts that. Used only
            for messages whose starts can't be counted in the database.
    """

    before: bool
    times: int = 0


class TakenOver:
    """A part of a log that this process took over: a lane, a Kafka partition.

    The broker doesn't record what the previous owner had started. But that was
    among the first unsettled messages, so only the first few that are started here are
    suspects. A message that is already in the store doesn't use up that number: if the
    previous owner held more, each death brings the count closer to the poison.

    Attributes:
        left: how many more messages may be suspects.
    """

    __slots__ = ("left",)

    def __init__(self, max_suspects: int) -> None:
        self.left = max_suspects


History: TypeAlias = Delivered | TakenOver
"""The history of one delivery, as its source knows it."""

FIRST_DELIVERY = Delivered(before=False)
REDELIVERED = Delivered(before=True)
