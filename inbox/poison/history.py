"""What a source knows about earlier starts of a message."""

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class Delivered:
    """The broker records whether it delivered the message before.

    Attributes:
        before: whether it did, to a process that may have started the message.
    """

    before: bool


class TakenOver:
    """A part of a log that this process took over: a lane, a Kafka partition, a stream.

    The broker doesn't record which messages the previous owner had started, and which
    it had only read ahead. But those were among the first unsettled messages, so only
    the first few that are started here are suspects. A message that is already in the
    store doesn't reduce that number: if the previous owner held more messages, each
    death brings the count closer to the poison.

    Attributes:
        left: how many more messages can become suspects.
    """

    __slots__ = ("left",)

    # More than a consumer starts before it has handled all that was in flight.
    def __init__(self, max_suspects: int = 2_000) -> None:
        self.left = max_suspects


class Takeover(NamedTuple):
    """A takeover of messages from another process, and when.

    Attributes:
        at: when the previous owner may have held it last.
    """

    at: datetime
    history: TakenOver

    def covers(self, created_at: datetime) -> bool:
        """Return whether a message was there then, so that it may have been started.

        If `at` is by a clock that is behind the database's, a message may pass as new
        that isn't: at the next death it will be older.
        """
        return created_at <= self.at


History: TypeAlias = Delivered | TakenOver
"""The history of one delivery, as its source knows it."""

FIRST_DELIVERY = Delivered(before=False)
REDELIVERED = Delivered(before=True)
